"""Do each task with torch and transformers alone, as people write it.

Every other way is measured against these. They need no package of ours, so they run in
any environment and on any device.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Cell = tuple[int, int]
BATCH = 32


class Edge(NamedTuple):
    """What writes, in which layer and head, and what reads it there.

    A writer is "embeddings", "head" or "mlp"; a reader "q", "k", "v", "mlp" or "logits".
    """

    writer: str
    layer: int
    head: int
    reader: str
    read_layer: int
    read_head: int


def base_model(module: Any) -> Any:
    """Return the model without its head."""
    return module.base_model


def hidden_states(module: nn.Module, ids: Tensor) -> tuple[Tensor, ...]:
    """Return every hidden state of a batch; the head does not run."""
    output = base_model(module)(
        input_ids=ids, use_cache=False, output_hidden_states=True
    )
    states: tuple[Tensor, ...] = output.hidden_states
    return states


def lens(module: Any, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Read the `k` best words after every block: norm, head, softmax, top-k."""
    states = hidden_states(module, ids)[1:]
    norm = _final_norm(module)
    probabilities = []
    words = []
    for number, state in enumerate(states):
        # Hugging Face's last hidden state has been through the final norm already.
        normed = state if number == len(states) - 1 else norm(state)
        best = module.lm_head(normed).float().softmax(-1).topk(k)
        probabilities.append(best.values)
        words.append(best.indices)
    return torch.stack(probabilities).cpu(), torch.stack(words).cpu()


def patch(
    module: Any, clean: Tensor, corrupt: Tensor, cells: Sequence[Cell]
) -> list[Tensor]:
    """Run one pass for each cell (layer, token) and return its last logits."""
    states = hidden_states(module, clean)
    blocks = _blocks(module)
    logits = []
    for layer, token in cells:
        row = states[layer][0, token]
        with _replaced(blocks, layer, token, row):
            output = module(input_ids=corrupt, use_cache=False, logits_to_keep=1)
        logits.append(output.logits[0, -1])
    return logits


def patch_heads(
    module: Any, clean: Tensor, corrupt: Tensor, cells: Sequence[Cell]
) -> list[Tensor]:
    """Run one pass for each cell (layer, head) and return its last logits."""
    projections = [block.self_attn.o_proj for block in _blocks(module)]
    inputs: list[Tensor] = []
    handles = [
        part.register_forward_pre_hook(lambda part, args: inputs.append(args[0]))
        for part in projections
    ]
    module(input_ids=clean, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    width = module.config.head_dim
    logits = []
    for layer, head in cells:
        columns = slice(head * width, (head + 1) * width)
        values = inputs[layer - 1][..., columns]
        with _replaced_columns(projections[layer - 1], columns, values):
            output = module(input_ids=corrupt, use_cache=False, logits_to_keep=1)
        logits.append(output.logits[0, -1])
    return logits


def patch_edges(
    module: Any, clean: Tensor, corrupt: Tensor, edges: Sequence[Edge]
) -> list[Tensor]:
    """Run one pass for each edge of a Llama and return its last logits.

    Its reader gets what its writer wrote after the clean prompt, and nothing else is
    changed by hand.
    """
    written = [_written(module, ids) for ids in (clean, corrupt)]
    logits = []
    for edge in edges:
        new, old = (_share_of(module, run, edge) for run in written)
        with _reading(module, edge, new - old):
            output = module(input_ids=corrupt, use_cache=False, logits_to_keep=1)
        logits.append(output.logits[0, -1])
    return logits


def _written(module: Any, ids: Tensor) -> dict[str, list[Tensor]]:
    """Record the embeddings, what the heads gather, and what the MLPs add."""
    written: dict[str, list[Tensor]] = {"embeddings": [], "head": [], "mlp": []}

    def keep_input(part: Any, arguments: Any) -> None:
        written["head"].append(arguments[0])

    def keep_output(name: str) -> Any:
        return lambda part, arguments, output: written[name].append(output)

    embeddings = module.get_input_embeddings()
    handles = [embeddings.register_forward_hook(keep_output("embeddings"))]
    for block in _blocks(module):
        projection = block.self_attn.o_proj
        handles.append(projection.register_forward_pre_hook(keep_input))
        handles.append(block.mlp.register_forward_hook(keep_output("mlp")))
    module(input_ids=ids, use_cache=False, logits_to_keep=1)
    for handle in handles:
        handle.remove()
    return written


def _share_of(module: Any, written: dict[str, list[Tensor]], edge: Edge) -> Tensor:
    """Return what the writer of an edge adds to the stream."""
    if edge.writer == "head":
        width = module.config.head_dim
        columns = slice(edge.head * width, (edge.head + 1) * width)
        projection = _blocks(module)[edge.layer - 1].self_attn.o_proj
        gathered = written["head"][edge.layer - 1][..., columns]
        return gathered @ projection.weight[:, columns].T
    number = 0 if edge.writer == "embeddings" else edge.layer - 1
    return written[edge.writer][number]


@contextmanager
def _reading(module: Any, edge: Edge, change: Tensor) -> Iterator[None]:
    """Make the reader of an edge read a change, while the body runs."""
    width = module.config.head_dim
    rows = slice(edge.read_head * width, (edge.read_head + 1) * width)
    normed: list[Tensor] = []

    def add(norm: Any, arguments: Any) -> Any:
        return (arguments[0] + change, *arguments[1:])

    def norm_changed(norm: Any, arguments: Any, output: Any) -> None:
        # Not called: the hook would be called again.
        normed[:] = [norm.forward(arguments[0] + change)]

    def put(projection: Any, arguments: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[..., rows] = normed[0] @ projection.weight[rows].T
        return output

    if edge.reader == "logits":
        handles = [_final_norm(module).register_forward_pre_hook(add)]
    elif edge.reader == "mlp":
        norm = _blocks(module)[edge.read_layer - 1].post_attention_layernorm
        handles = [norm.register_forward_pre_hook(add)]
    else:
        block = _blocks(module)[edge.read_layer - 1]
        projection = getattr(block.self_attn, f"{edge.reader}_proj")
        handles = [
            block.input_layernorm.register_forward_hook(norm_changed),
            projection.register_forward_hook(put),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _replaced_columns(part: Any, columns: slice, values: Tensor) -> Iterator[None]:
    """Put values into some columns of a module's input, while the body runs."""

    def put(part: Any, arguments: Any) -> Any:
        state = arguments[0].clone()
        state[..., columns] = values
        return (state, *arguments[1:])

    handle = part.register_forward_pre_hook(put)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _replaced(blocks: Any, layer: int, token: int, row: Tensor) -> Iterator[None]:
    """Put a row into the state that leaves a block, while the body runs."""

    def put(block: Any, arguments: Any, output: Any) -> Any:
        state = output if isinstance(output, Tensor) else output[0]
        state = state.clone()
        state[0, token] = row
        return state if isinstance(output, Tensor) else (state, *output[1:])

    handle = blocks[layer - 1].register_forward_hook(put)
    try:
        yield
    finally:
        handle.remove()


def visibility(module: nn.Module, ids: Tensor) -> Tensor:
    """Differentiate the length of every state by all states below it.

    One pass, then one backward pass for each target. The result has the dimensions
    target layer, target token, source layer, source token.
    """
    with torch.enable_grad():
        states = hidden_states(module, ids)
        layers, tokens = len(states), ids.shape[1]
        influence = torch.zeros(layers, tokens, layers, tokens)
        for layer in range(layers):
            for token in range(tokens):
                target = length(states[layer][0, token])
                sources = states[: layer + 1]
                gradients = torch.autograd.grad(target, sources, retain_graph=True)
                for source, gradient in enumerate(gradients):
                    influence[layer, token, source] = gradient[0].abs().sum(-1).cpu()
    return influence


def length(state: Tensor) -> Tensor:
    """Return |h|₁/|h|₂, whose gradient is what `hs.visibility` measures."""
    return state.abs().sum() / state.norm()


def batches(texts: Sequence[str], tokenizer: Any, device: Any) -> Iterator[Any]:
    """Tokenise texts in batches in their order, each padded to its longest text."""
    for start in range(0, len(texts), BATCH):
        chosen = list(texts[start : start + BATCH])
        yield tokenizer(chosen, padding=True, return_tensors="pt").to(device)


def extract(
    module: nn.Module, tokenizer: Any, texts: Sequence[str], folder: Path
) -> None:
    """Save every hidden state of a corpus, one file a batch."""
    for number, batch in enumerate(batches(texts, tokenizer, _device(module))):
        output = base_model(module)(**batch, use_cache=False, output_hidden_states=True)
        # A clone each: a view would write the storage of its whole batch.
        states = [state.clone() for state in output.hidden_states]
        torch.save(states, folder / f"{number}.pt")


def last_states(
    module: nn.Module, tokenizer: Any, texts: Sequence[str]
) -> list[Tensor]:
    """Return the final states of every text, without padding."""
    kept = []
    for batch in batches(texts, tokenizer, _device(module)):
        output = base_model(module)(**batch, use_cache=False)
        mask = batch["attention_mask"].bool()
        for row, state in enumerate(output.last_hidden_state):
            kept.append(state[mask[row]])
    return kept


def embed(module: nn.Module, tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """Average the final states of every text and scale each mean to length 1."""
    vectors = []
    for batch in batches(texts, tokenizer, _device(module)):
        output = base_model(module)(**batch, use_cache=False)
        weights = batch["attention_mask"].unsqueeze(-1).to(output[0].dtype)
        mean = (output[0] * weights).sum(1) / weights.sum(1)
        vectors.append(nn.functional.normalize(mean.float(), dim=-1).cpu())
    return torch.cat(vectors)


def drift(reference: nn.Module, candidate: nn.Module, ids: Tensor) -> list[float]:
    """Return the largest difference of two models, layer by layer."""
    differences = []
    pairs = zip(
        hidden_states(reference, ids), hidden_states(candidate, ids), strict=True
    )
    for left, right in pairs:
        differences.append(float((left - right).abs().max()))
    return differences


def _device(module: Any) -> Any:
    return module.device


def _blocks(module: Any) -> Any:
    inner = base_model(module)
    return inner.layers if hasattr(inner, "layers") else inner.h


def _final_norm(module: Any) -> Any:
    inner = base_model(module)
    return inner.norm if hasattr(inner, "norm") else inner.ln_f
