"""Run a model with plain hooks, in float64, by a table of where its parts are.

Nothing of hiddenscope's engine is used: the blocks, the heads and the norms of each
family stand in `FAMILIES`, as they are read in transformers' code. One pass answers one
question, and every pass runs the whole model.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Change = Callable[[Tensor], Tensor]


class NoTable(LookupError):
    """Say that there is no oracle: of a family, or of what was asked."""


@dataclass(frozen=True)
class Shape:
    """Where the parts of one stack of blocks are; paths in a block are its own.

    `attn`, `cross` and `mlp` are the modules whose output is added to the stream, and
    `out`, `cross_out` and `down` the projections that heads and neurons go through.
    `reads` and `mlp_reads` are the modules that take the stream for attention and for
    the MLP, and `inner` takes that after its norm. `queries`, `keys` and `values` are the last modules in which every head has
    columns of its own, and `fused` says how these lie where one module makes all three.
    `factor` names an attribute of the block by which each part is multiplied.
    """

    blocks: str
    attn: str = "self_attn.o_proj"
    out: str = "self_attn.o_proj"
    mlp: str = "mlp.down_proj"
    down: str | None = "mlp.down_proj"
    reads: tuple[str, ...] = ("input_layernorm",)
    mlp_reads: tuple[str, ...] = ("post_attention_layernorm",)
    inner: str = "mlp"
    queries: str = "self_attn.q_proj"
    keys: str = "self_attn.k_proj"
    values: str = "self_attn.v_proj"
    fused: str = ""
    norm: str | None = "norm"
    kind: str = "pre-norm"
    middle: str | None = None
    factor: str | None = None
    cross: str | None = None
    cross_out: str | None = None


LLAMA = Shape("layers")
OPT = Shape(
    "layers",
    attn="self_attn.out_proj",
    out="self_attn.out_proj",
    mlp="fc2",
    down="fc2",
    inner="fc1",
    reads=("self_attn_layer_norm",),
    mlp_reads=("final_layer_norm",),
    norm="layer_norm",
)
NEOX = Shape(
    "layers",
    attn="attention.dense",
    out="attention.dense",
    mlp="mlp.dense_4h_to_h",
    down="mlp.dense_4h_to_h",
    queries="attention.query_key_value",
    keys="attention.query_key_value",
    values="attention.query_key_value",
    fused="heads",
    norm="final_layer_norm",
    kind="parallel",
)
BLOOM = replace(
    NEOX,
    blocks="h",
    attn="self_attention.dense",
    out="self_attention.dense",
    queries="self_attention.query_key_value",
    keys="self_attention.query_key_value",
    values="self_attention.query_key_value",
    norm="ln_f",
    kind="pre-norm",
)
GPT2 = Shape(
    "h",
    attn="attn.c_proj",
    out="attn.c_proj",
    mlp="mlp.c_proj",
    down="mlp.c_proj",
    reads=("ln_1",),
    mlp_reads=("ln_2",),
    queries="attn.c_attn",
    keys="attn.c_attn",
    values="attn.c_attn",
    fused="thirds",
    norm="ln_f",
)
BERT = Shape(
    "encoder.layer",
    attn="attention.output.dense",
    out="attention.output.dense",
    mlp="output.dense",
    down="output.dense",
    inner="intermediate.dense",
    reads=("attention.self.query", "attention.self.key", "attention.self.value"),
    mlp_reads=("intermediate.dense",),
    queries="attention.self.query",
    keys="attention.self.key",
    values="attention.self.value",
    norm=None,
    kind="post-norm",
    middle="attention.output",
)
T5 = Shape(
    "encoder.block",
    attn="layer.0.SelfAttention.o",
    out="layer.0.SelfAttention.o",
    mlp="layer.1.DenseReluDense.wo",
    down="layer.1.DenseReluDense.wo",
    inner="layer.1.DenseReluDense",
    reads=("layer.0.layer_norm",),
    mlp_reads=("layer.1.layer_norm",),
    queries="layer.0.SelfAttention.q",
    keys="layer.0.SelfAttention.k",
    values="layer.0.SelfAttention.v",
    norm="encoder.final_layer_norm",
)
BART = replace(
    OPT,
    blocks="encoder.layers",
    reads=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    mlp_reads=("fc1",),
    norm=None,
    kind="post-norm",
    middle="self_attn_layer_norm",
)
NORMS_AFTER = {
    "attn": "post_attention_layernorm",
    "mlp": "post_feedforward_layernorm",
}

# By the `model_type` of the config: the stacks, the decoder last.
FAMILIES: dict[str, tuple[Shape, ...]] = {
    "gpt2": (GPT2,),
    "llama": (LLAMA,),
    "qwen3": (LLAMA,),
    "mistral": (LLAMA,),
    "qwen2": (LLAMA,),
    "gemma3_text": (
        replace(LLAMA, **NORMS_AFTER, mlp_reads=("pre_feedforward_layernorm",)),
    ),
    "gemma2": (
        replace(LLAMA, **NORMS_AFTER, mlp_reads=("pre_feedforward_layernorm",)),
    ),
    "granite": (replace(LLAMA, factor="residual_multiplier"),),
    "mixtral": (replace(LLAMA, mlp="mlp", down=None),),
    "olmo2": (
        replace(
            LLAMA,
            **NORMS_AFTER,
            reads=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            mlp_reads=("mlp",),
            queries="self_attn.q_norm",
            keys="self_attn.k_norm",
        ),
    ),
    "phi": (
        replace(
            LLAMA,
            attn="self_attn.dense",
            out="self_attn.dense",
            mlp="mlp.fc2",
            down="mlp.fc2",
            mlp_reads=("input_layernorm",),
            norm="final_layernorm",
            kind="parallel",
        ),
    ),
    "cohere": (replace(LLAMA, mlp_reads=("input_layernorm",), kind="parallel"),),
    "gpt_neox": (NEOX,),
    "gptj": (
        replace(
            GPT2,
            attn="attn.out_proj",
            out="attn.out_proj",
            mlp="mlp.fc_out",
            down="mlp.fc_out",
            mlp_reads=("ln_1",),
            queries="attn.q_proj",
            keys="attn.k_proj",
            values="attn.v_proj",
            fused="",
            kind="parallel",
        ),
    ),
    "gpt_neo": (
        replace(
            GPT2,
            attn="attn.attention.out_proj",
            out="attn.attention.out_proj",
            queries="attn.attention.q_proj",
            keys="attn.attention.k_proj",
            values="attn.attention.v_proj",
            fused="",
        ),
    ),
    "mpt": (
        replace(
            GPT2,
            blocks="blocks",
            attn="attn.out_proj",
            out="attn.out_proj",
            mlp="ffn.down_proj",
            down="ffn.down_proj",
            inner="ffn",
            reads=("norm_1",),
            mlp_reads=("norm_2",),
            queries="attn.Wqkv",
            keys="attn.Wqkv",
            values="attn.Wqkv",
            norm="norm_f",
        ),
    ),
    "bloom": (BLOOM,),
    # One head of keys and values, and one norm.
    "falcon": (
        replace(BLOOM, mlp_reads=("input_layernorm",), fused="rest", kind="parallel"),
    ),
    "xglm": (OPT,),
    "opt": (replace(OPT, blocks="decoder.layers", norm="decoder.final_layer_norm"),),
    "mamba": (Shape("layers", attn="mixer", norm="norm_f", kind="mixer"),),
    "bert": (BERT,),
    "roberta": (BERT,),
    "t5": (
        T5,
        replace(
            T5,
            blocks="decoder.block",
            mlp="layer.2.DenseReluDense.wo",
            down="layer.2.DenseReluDense.wo",
            inner="layer.2.DenseReluDense",
            mlp_reads=("layer.2.layer_norm",),
            norm="decoder.final_layer_norm",
            cross="layer.1.EncDecAttention.o",
            cross_out="layer.1.EncDecAttention.o",
        ),
    ),
    "bart": (
        BART,
        replace(
            BART,
            blocks="decoder.layers",
            cross="encoder_attn.out_proj",
            cross_out="encoder_attn.out_proj",
            middle="encoder_attn_layer_norm",
        ),
    ),
}


class Exact(TorchFunctionMode):
    """Compute in float64 where a model's own code asks for float32."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        wide = [torch.float64 if a is torch.float32 else a for a in args]
        named = dict(kwargs or {})
        if named.get("dtype") is torch.float32:
            named["dtype"] = torch.float64
        if func is Tensor.float:
            return args[0].double()
        return func(*wide, **named)


@contextmanager
def exactly() -> Iterator[None]:
    """Make float64 the default, and what float32 stands for, while the body runs."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Exact():
            yield
    finally:
        torch.set_default_dtype(before)


def copied(module: nn.Module, *, eager: bool = False) -> nn.Module:
    """Copy a module in float64, on the CPU; `eager` builds it with that attention."""
    if eager:
        config = copy.deepcopy(module.config)
        maker: Any = type(module)
        if hasattr(module, "merge_and_unload"):
            raise NoTable("no eager copy of a model with an adapter")
        twin = maker._from_config(config, attn_implementation="eager")
        twin.load_state_dict(module.state_dict())
    else:
        twin = copy.deepcopy(module)
    if hasattr(twin, "merge_and_unload"):
        # An adapter adds to the weights.
        twin = twin.merge_and_unload()
    twin = twin.double().cpu().eval()
    twin.config.use_cache = False
    # Grouped products are not there in float64.
    twin.config._experts_implementation = "eager"
    for weight in twin.parameters():
        weight.requires_grad_(False)
    return twin


class Plain:
    """A copy of a module in float64, and its stacks by the table.

    >>> from hiddenscope.testing import tiny_model
    >>> plain = Plain(tiny_model("gpt2"))
    >>> _, states = plain.run({"input_ids": [[5, 6, 7]]}, ["layer.0", "final"])
    >>> tuple(states["final"].shape)
    (1, 3, 64)
    """

    def __init__(self, module: Any, *, eager: bool = False) -> None:
        config = getattr(module, "config", None)
        kind = getattr(config, "model_type", type(module).__name__)
        if kind not in FAMILIES:
            raise NoTable(f"no {kind} in the table of families")
        if not all(weight.is_floating_point() for weight in module.parameters()):
            raise NoTable("no oracle of quantised weights")
        self.module = copied(module, eager=eager)
        self.config: Any = self.module.config
        self.shapes = FAMILIES[kind]
        prefix = getattr(self.module, "base_model_prefix", "")
        self.base = getattr(self.module, prefix, self.module)

    def stack(self, site: str) -> tuple[Shape, str]:
        """Return the stack of a site, and the site without its stack."""
        name, _, rest = site.partition(".")
        if name in ("encoder", "decoder"):
            return self.shapes[-1 if name == "decoder" else 0], rest
        return self.shapes[-1], site

    def blocks(self, shape: Shape) -> Sequence[nn.Module]:
        """Return the blocks of a stack."""
        return list(self.base.get_submodule(shape.blocks))

    @property
    def depth(self) -> int:
        """Return the number of blocks of the last stack."""
        return len(self.blocks(self.shapes[-1]))

    def heads(self, shape: Shape | None = None) -> tuple[int, int]:
        """Return how many heads of queries there are, and how many of keys."""
        config = self.config
        names = ("num_attention_heads", "n_head", "n_heads", "num_heads")
        if shape is self.shapes[0] and len(self.shapes) == 2:
            names = ("encoder_attention_heads", *names)
        elif len(self.shapes) == 2:
            names = ("decoder_attention_heads", *names)
        found = [getattr(config, name, None) for name in names]
        count = next(number for number in found if number is not None)
        if config.model_type == "falcon":
            return count, 1
        return count, getattr(config, "num_key_value_heads", None) or count

    def run(
        self,
        inputs: Mapping[str, Any],
        record: Sequence[str] = (),
        changes: Mapping[str, Change] | None = None,
        *,
        grad: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the whole model once; return its logits and the recorded states.

        `changes` give the new state at a site from the old one. A base model without a
        head gives its last state for logits.
        """
        ids = {name: torch.as_tensor(value) for name, value in inputs.items()}
        states: dict[str, Tensor] = {}
        handles: list[Any] = []
        taps = [(site, change, True) for site, change in (changes or {}).items()]
        taps += [(site, None, False) for site in record]
        for site, change, _ in taps:
            handles += self._tap(site, change, states, ids)
        try:
            with exactly(), torch.set_grad_enabled(grad):
                output = self.module(**ids, return_dict=True)
        finally:
            for handle in handles:
                handle.remove()
        logits = output.get("logits")
        if logits is None:
            logits = output.get("prediction_logits", output[0])
        return logits, states

    def attentions(self, inputs: Mapping[str, Any], name: str) -> list[Tensor]:
        """Return the weights [head, query, key] of each block, as the model reports.

        `name` is that of the report. The copy must be eager.
        """
        ids = {key: torch.as_tensor(value) for key, value in inputs.items()}
        with exactly(), torch.no_grad():
            output = self.module(**ids, output_attentions=True, return_dict=True)
        return [weights[0] for weights in output[name]]

    def _tap(
        self,
        site: str,
        change: Change | None,
        states: dict[str, Tensor],
        ids: Mapping[str, Tensor],
    ) -> list[Any]:
        """Hook one site, to change it or to record it."""
        shape, rest = self.stack(site)
        name = "input_ids"
        if len(self.shapes) == 2 and shape is self.shapes[-1]:
            name = "decoder_input_ids"
        texts, tokens = ids[name].shape

        def touch(state: Tensor) -> Tensor:
            laid = state.reshape(texts, tokens, -1)
            if change is None:
                # Falcon adds to it in place.
                states[site] = laid.clone()
                return state
            return change(laid).reshape(state.shape)

        blocks = self.blocks(shape)
        if rest == "final":
            assert shape.norm is not None
            return [_after(self.base.get_submodule(shape.norm), touch)]
        _, number, *inside = rest.split(".", 3)
        if not inside:
            if number == "0":
                return [_before(blocks[0], touch)]
            return [_after(blocks[int(number) - 1], touch)]
        block = blocks[int(number) - 1]
        return self._inside(shape, block, inside[0], inside[1:], touch)

    def _inside(
        self, shape: Shape, block: nn.Module, part: str, of: list[str], touch: Change
    ) -> list[Any]:
        """Hook a part of a block, or what is inside it."""
        factor = getattr(block, shape.factor) if shape.factor else 1.0
        adds = {"attn": shape.attn, "cross": shape.cross, "mlp": shape.mlp}
        goes = {"attn": shape.out, "cross": shape.cross_out, "mlp": shape.down}
        if part == "mid":
            return self._middle(shape, block, touch, factor)
        added = block.get_submodule(adds[part] or "")
        if not of:
            return [_after(added, lambda out: touch(out * factor) / factor)]
        if of[0] == "in":
            paths = shape.mlp_reads if part == "mlp" else shape.reads
            return [_before(block.get_submodule(path), touch) for path in paths]
        if of[0] == "input":
            return [_before(block.get_submodule(shape.inner), touch)]
        if of[0] in ("q", "k", "v"):
            names = {"q": shape.queries, "k": shape.keys, "v": shape.values}
            made = block.get_submodule(names[of[0]])
            clip = getattr(block.get_submodule(shape.out.split(".")[0]), "clip_qkv", 0)
            if not clip:
                return [_after(made, touch)]
            # MPT cuts all three off before its heads read them.
            return [_after(made, lambda out: touch(out.clamp(-clip, clip)))]
        last = block.get_submodule(goes[part] or "")
        if of[0] in ("z", "neurons"):
            return [_before(last, touch)]
        kind, number = of[0].split(".")
        width = weight_of(last).shape[1]
        size = width // self.heads(shape)[0] if kind == "head" else 1
        columns = slice(int(number) * size, (int(number) + 1) * size)
        if added is last:
            return [_after_with_input(last, partial(_write, columns, factor, touch))]
        kept: list[Tensor] = []

        def keep(module: nn.Module, value: Tensor, out: Tensor) -> Tensor:
            kept[:] = [value]
            return out

        def scaled(module: nn.Module, value: Tensor, out: Tensor) -> Tensor:
            # A norm without a mean multiplies each channel by a number. Of nothing it
            # makes nothing.
            written = kept[0][..., columns] @ weight_of(last)[:, columns].T
            old = written * (out / value).nan_to_num(0) * factor
            return out + (touch(old) - old) / factor

        return [_after_with_input(last, keep), _after_with_input(added, scaled)]

    def _middle(
        self, shape: Shape, block: nn.Module, touch: Change, factor: float
    ) -> list[Any]:
        """Hook the state before the MLP."""
        if shape.middle is not None:
            return [_after(block.get_submodule(shape.middle), touch)]
        if shape.kind == "parallel":
            return [_before(block, touch)]
        into: list[Tensor] = []

        def keep(state: Tensor) -> Tensor:
            into[:] = [state]
            return state

        def change(out: Tensor) -> Tensor:
            return (touch(into[0] + out * factor) - into[0]) / factor

        added = block.get_submodule(shape.cross or shape.attn)
        if shape.cross is None:
            return [_before(block, keep), _after(added, change)]
        # The stream after attention enters the norm before cross-attention.
        norm = block.get_submodule(shape.cross.rsplit(".", 2)[0] + ".layer_norm")
        return [_before(norm, keep), _after(added, change)]

    def columns(self, shape: Shape, part: str, head: int) -> Tensor:
        """Return the columns of a head's queries, keys or values, where they are made.

        `part` is q, k or v.
        """
        queries, _ = self.heads(shape)
        block = self.blocks(shape)[0]
        size = weight_of(block.get_submodule(shape.out)).shape[1] // queries
        place = "qkv".index(part)
        if not shape.fused:
            start = head * size
        elif shape.fused == "thirds":
            start = (place * queries + head) * size
        elif shape.fused == "heads":
            start = (3 * head + place) * size
        else:
            start = head * size if part == "q" else (queries + place - 1) * size
        return torch.arange(start, start + size)


def texts_of(model: Any, texts: Any, targets: Any = None) -> list[dict[str, Any]]:
    """Return the inputs of a pass for each text."""
    encoded = model.encode(texts, targets=targets)
    rows = []
    for number, ids in enumerate(encoded.ids):
        row = {"input_ids": [list(ids)]}
        if encoded.targets is not None:
            row["decoder_input_ids"] = [list(encoded.targets.ids[number])]
        rows.append(row)
    return rows


def repeated(row: Mapping[str, Any], times: int) -> dict[str, Any]:
    """Return the inputs of a pass in which one text stands in every row."""
    return {name: list(ids) * times for name, ids in row.items()}


@dataclass(frozen=True)
class Pair:
    """A contrast or an interchange as ids, and where its answers are read."""

    clean: dict[str, Any]
    corrupt: dict[str, Any]
    at: tuple[int, int]
    answer: int
    other: int
    group: Any

    def difference(self, logits: Tensor, side: int) -> Tensor:
        """Return the answer's logit less the other's, on the clean side (0) or not."""
        row = logits[..., self.at[side], :]
        return row[..., self.answer] - row[..., self.other]


def pairs_of(model: Any, asked: Any) -> list[Pair]:
    """Return the distinct pairs of prompts of a question."""
    pairs: dict[Any, Pair] = {}
    for contrast in asked if isinstance(asked, list | tuple) else [asked]:
        sides = []
        at = []
        for prompt in (contrast.clean, contrast.corrupt):
            prompt = prompt if isinstance(prompt, str) else list(prompt)
            (side,) = texts_of(model, prompt, contrast.targets)
            ids = side.get("decoder_input_ids", side["input_ids"])[0]
            place = contrast.at
            if place is None:
                place = -1
                mask = getattr(model.tokenizer, "mask_token_id", None)
                if mask in ids and not model.encoder_decoder:
                    place = ids.index(mask)
            sides.append(side)
            at.append(place % len(ids))
        answers = []
        for answer in (contrast.answer, contrast.other):
            if isinstance(answer, str):
                (answer,) = model.tokenizer(answer, add_special_tokens=False).input_ids
            answers.append(answer)
        key = (str(sides), tuple(at), *answers)
        pair = Pair(*sides, (at[0], at[1]), *answers, contrast.group)
        pairs.setdefault(key, pair)
    return list(pairs.values())


def groups_of(pairs: Sequence[Pair]) -> list[int]:
    """Number the groups of pairs: one name, or the same two prompts, is one group."""
    groups = [*range(len(pairs))]
    for number, pair in enumerate(pairs):
        for earlier, other in enumerate(pairs[:number]):
            named = pair.group is not None and pair.group == other.group
            both = [{str(one.clean), str(one.corrupt)} for one in (pair, other)]
            if named or both[0] == both[1]:
                known, joined = groups[number], groups[earlier]
                groups = [joined if group == known else group for group in groups]
    return groups


def error_of_mean(rows: np.ndarray, groups: Sequence[int]) -> np.ndarray | None:
    """Return how far the mean over rows moves where each group is left out in turn."""
    names = sorted(set(groups))
    if len(names) < 2:
        return None
    means = []
    for name in names:
        kept = [row for row, group in zip(rows, groups, strict=True) if group != name]
        means.append(np.mean(kept, 0))
    away = np.array(means) - np.mean(means, 0)
    return ((len(names) - 1) / len(names) * (away**2).sum(0)) ** 0.5


def weight_of(module: nn.Module) -> Tensor:
    """Return a projection's weight as [out, in]."""
    weight: Any = module.weight
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _write(
    columns: slice,
    factor: float,
    touch: Change,
    module: nn.Module,
    value: Tensor,
    out: Tensor,
) -> Tensor:
    """Change or record what some columns of a projection write."""
    old = value[..., columns] @ weight_of(module)[:, columns].T * factor
    return out + (touch(old) - old) / factor


def _after(module: nn.Module, touch: Change) -> Any:
    """Hook the first tensor that a module gives."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (touch(output[0]), *output[1:])
        return touch(output)

    return module.register_forward_hook(hook)


def _after_with_input(
    module: nn.Module, touch: Callable[[nn.Module, Tensor, Tensor], Tensor]
) -> Any:
    """Hook what a module gives, beside what went in."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return touch(module, args[0], output)

    return module.register_forward_hook(hook)


def _before(module: nn.Module, touch: Change) -> Any:
    """Hook the first tensor that a module takes."""

    def hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (touch(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": touch(kwargs["hidden_states"])}

    return module.register_forward_pre_hook(hook, with_kwargs=True)
