"""A second opinion: what an anatomy says of a module, held against a pass of its own
with plain hooks.

Nothing of the proof is used but its claims: other texts, other shapes, and the sums and
norms worked out anew.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery import Anatomy, Stack, Tap, arguments, vocabulary

TEXTS, TOKENS, TARGETS = 6, 11, 8

# Where Hugging Face's tuple is not layer.0 to layer.L-1 and the last hidden state;
# known from reading these models. Layer.1 to layer.L, then final.
FROM_FIRST_TO_FINAL = {
    "mamba",
    "mamba2",
    "falcon_mamba",
    "rwkv",
}
# Other blocks come first, and then this list of them: from layer.0, or from layer.1
# where its input is not reported.
LAST_LIST_FROM = {"canine": 0, "funnel": 0, "hrm_text": 1}
# Layer.0 to layer.L.
ENDS_RAW = {
    "clip_text_model",
    "tipsv2_text_model",
    "gemma3n",
    "gemma3n_text",
    "fsmt",
}


class Seen:
    """Every call of every part in one pass: (path, number of the call) -> what went in
    and what came out.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Mapping[str, Any],
        put: tuple[Tap, Tensor] | None = None,
    ) -> None:
        """Run a pass, with one tensor put in the place of what is at a tap."""
        self.into: dict[tuple[str, int], Tensor | None] = {}
        self.out: dict[tuple[str, int], Tensor | None] = {}
        counts: Counter[str] = Counter()
        handles = []
        for path, part in module.named_modules():

            def before(_: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
                named = kwargs.get("hidden_states")
                seen = _first([*args, named, *kwargs.values()])
                _fill(seen, put, (path, counts[path], "input"))
                self.into[path, counts[path]] = None if seen is None else seen.clone()
                counts[path] += 1

            def after(_: nn.Module, __: Any, output: Any, path: str = path) -> None:
                seen = _first([output])
                _fill(seen, put, (path, counts[path] - 1, "output"))
                self.out[path, counts[path] - 1] = (
                    None if seen is None else seen.clone()
                )

            handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(part.register_forward_hook(after))
        try:
            with torch.no_grad():
                self.output = module(
                    **inputs, output_hidden_states=True, return_dict=True
                )
        finally:
            for handle in handles:
                handle.remove()

    def at(self, tap: Tap, tokens: int) -> Tensor:
        seen = self.into if tap.side == "input" else self.out
        tensor = seen[tap.path, tap.call]
        assert tensor is not None
        return tap.layout.states(tensor, tokens)


def wrongs(module: nn.Module, anatomy: Anatomy) -> list[str]:
    """What an anatomy says that is not so; empty if all of it is."""
    inputs = trial_inputs(module, len(anatomy.stacks) == 2)
    seen = Seen(module, inputs)
    found: list[str] = []
    for i, stack in enumerate(anatomy.stacks):
        name = "decoder_input_ids" if i else "input_ids"
        tokens = inputs[name].shape[1]
        layers = [seen.at(tap, tokens) for tap in stack.proof.taps]
        found += _against_the_report(module, anatomy, stack, seen, layers)
        found += _norm(module, stack, seen, layers)
        for k, block in enumerate(stack.blocks, 1):
            parts = {part: seen.at(tap, tokens) for part, tap in block.parts.items()}
            if parts and (
                what := _sums(
                    block.kind,
                    layers[k - 1],
                    layers[k],
                    parts,
                    _norms(seen, block.path, stack, tokens),
                )
            ):
                found.append(f"{stack.name}.layer.{k} ({block.kind}): {what}")
        found += _causal(module, stack, inputs, name, layers[-1])
        found += _middles(module, stack, inputs, tokens)
    return [*found, *_head(anatomy, seen, inputs)]


def trial_inputs(module: nn.Module, two: bool) -> dict[str, Any]:
    """Return ids for one pass, with targets where there are two stacks."""
    generator = torch.Generator().manual_seed(7)
    size = vocabulary(module)
    ids, targets = (
        torch.randint(20, size, (TEXTS, n), generator=generator)
        for n in (TOKENS, TARGETS)
    )
    return arguments(module, ids, targets=targets if two else None)


def _against_the_report(
    module: nn.Module, anatomy: Anatomy, stack: Stack, seen: Seen, layers: list[Tensor]
) -> Iterator[str]:
    """Hold every layer against the entry of Hugging Face's tuple that must be it."""
    kind = module.config.model_type  # type: ignore[union-attr]
    prefix = f"{stack.name}_" if len(anatomy.stacks) == 2 else ""
    entries = seen.output.get(f"{prefix}hidden_states") or seen.output.get(
        "hidden_states"
    )
    if entries is None:
        return
    entries = [_laid(_first([entry]), layers[0].shape[1]) for entry in entries]
    end = _end(stack, seen, layers)
    expected = layers if kind in ENDS_RAW else [*layers[:-1], end]
    expected = [*layers[1:], end] if kind in FROM_FIRST_TO_FINAL else expected
    if kind in LAST_LIST_FROM:
        expected = expected[LAST_LIST_FROM[kind] :]
        yield from _other_blocks(seen, entries[: -len(expected)])
        entries = entries[-len(expected) :]
    if len(entries) != len(expected):
        yield f"{len(entries)} entries of hidden_states for {stack.depth} blocks"
    for k, (entry, state) in enumerate(zip(entries, expected, strict=False)):
        if not _same(entry, state):
            yield f"{prefix}hidden_states[{k}] of {len(entries)} is another state"
    for k, (one, next_one) in enumerate(zip(layers, layers[1:], strict=False)):
        if _same(one, next_one):
            yield f"layer.{k + 1} is layer.{k}"
    last = seen.output.get(
        f"{stack.name}_last_hidden_state"
        if prefix == "encoder_"
        else "last_hidden_state"
    )
    if last is not None and not _same(last, end):
        yield "the last hidden state is not where the stack ends"


def _other_blocks(seen: Seen, entries: Sequence[Tensor]) -> Iterator[str]:
    """Hold the entries of Hugging Face's tuple before a last list of blocks against
    whatever other parts made.
    """
    made = [
        value
        for value in (*seen.into.values(), *seen.out.values())
        if value is not None
    ]
    for k, entry in enumerate(entries):
        if not any(_same(entry, value) for value in made):
            yield f"hidden_states[{k}] is the state of no part"


def _end(stack: Stack, seen: Seen, layers: list[Tensor]) -> Tensor:
    """What leaves the stack: final, or what the last part on the way out makes, or the
    last layer as it is.
    """
    proof, tokens = stack.proof, layers[0].shape[1]
    if proof.final is not None:
        return seen.at(proof.final, tokens)
    left = seen.out[proof.exit[-1], 0] if proof.exit else layers[-1]
    assert left is not None
    return left


def _norm(
    module: nn.Module, stack: Stack, seen: Seen, layers: list[Tensor]
) -> Iterator[str]:
    """Where one part makes `final`, let it make `final` again out of the raw last
    layer.
    """
    tap = stack.proof.final
    if tap is None or len(stack.proof.exit) != 1:
        return
    final = seen.at(tap, layers[0].shape[1])
    if _same(final, layers[-1]):
        yield "final is layer.L as it is"
    if final.shape == layers[-1].shape and tap.layout == stack.proof.taps[-1].layout:
        with torch.no_grad():
            again = module.get_submodule(tap.path)(layers[-1])
        if not _same(_first([again]), final):
            yield f"{tap.path} does not make final out of the last layer"


def _sums(
    kind: str,
    into: Tensor,
    out: Tensor,
    parts: Mapping[str, Tensor],
    norms: Sequence[Any],
) -> str:
    """What is wrong with the parts of one block, by the meaning that its kind gives
    them.
    """
    if kind == "parallel":
        right = _near(into + parts["attn"] + parts["mlp"], out) and _same(
            parts["mid"], into
        )
        return "" if right else "layer.k-1 + attn + mlp is not layer.k"
    branches = [parts[name] for name in ("attn", "cross", "mlp") if name in parts]
    streams = [into]
    for branch in branches[:-1]:
        streams = [
            after for at in streams for after in _joined(kind, at + branch, norms)
        ]
    if not any(_near(parts["mid"], stream) for stream in streams):
        return "layer.k-1 and attn (and cross) do not make mid"
    ends = _joined(kind, parts["mid"] + branches[-1], norms)
    return (
        ""
        if any(_near(end, out) for end in ends)
        else "mid and mlp do not make layer.k"
    )


def _joined(kind: str, total: Tensor, norms: Sequence[Any]) -> list[Tensor]:
    if kind == "pre-norm":
        return [total]
    return [out for into, out in norms if _near(into, total)]


def _norms(
    seen: Seen, path: str, stack: Stack, tokens: int
) -> list[tuple[Tensor, Tensor]]:
    """What went in and came out of each part of a block that keeps the shape, both laid
    as the stack's states are.
    """
    laid = stack.proof.taps[0].layout
    inside = [key for key in seen.out if key[0].startswith(f"{path}.")]
    pairs = [
        (a, b)
        for key in inside
        if (a := seen.into[key]) is not None and (b := seen.out[key]) is not None
    ]
    return [
        (laid.states(a, tokens), laid.states(b, tokens))
        for a, b in pairs
        if a.shape == b.shape and a.ndim >= 3
    ]


def _causal(
    module: nn.Module, stack: Stack, inputs: dict[str, Any], name: str, plain: Tensor
) -> Iterator[str]:
    changed = inputs[name].clone()
    changed[:, -1] = (changed[:, -1] + 5) % vocabulary(module)
    again = Seen(module, {**inputs, name: changed}).at(
        stack.proof.taps[-1], changed.shape[1]
    )
    still = _near(again[:, :-1], plain[:, :-1])
    if still != stack.causal:
        yield f"{stack.name} is said to be {'' if stack.causal else 'not '}causal"


def _middles(
    module: nn.Module, stack: Stack, inputs: dict[str, Any], tokens: int
) -> Iterator[str]:
    """Put the middle of other texts into each block: its MLP must read that, and so
    add what it adds in the other texts.
    """
    others = {
        name: value.flip(0) if name.endswith("input_ids") else value
        for name, value in inputs.items()
    }
    other = Seen(module, others)
    for k, block in enumerate(stack.blocks, 1):
        if not {"mid", "mlp"} <= block.parts.keys():
            continue
        mid, mlp = block.parts["mid"], block.parts["mlp"]
        seen = other.into if mid.side == "input" else other.out
        put = seen[mid.path, mid.call]
        assert put is not None
        again = Seen(module, inputs, (mid, put))
        if not _near(again.at(mlp, tokens), other.at(mlp, tokens)):
            yield f"{stack.name}.layer.{k}: the MLP does not read what is put in at mid"


def _fill(seen: Tensor | None, put: tuple[Tap, Tensor] | None, place: Any) -> None:
    """Overwrite a tensor where another is to be put in."""
    if put is None or seen is None:
        return
    tap, tensor = put
    if place == (tap.path, tap.call, tap.side):
        seen.copy_(tensor)


def _head(anatomy: Anatomy, seen: Seen, inputs: Mapping[str, Any]) -> Iterator[str]:
    head = anatomy.head
    if head is None:
        return
    stack = anatomy.stacks[-1]
    tokens = inputs[
        "decoder_input_ids" if len(anatomy.stacks) == 2 else "input_ids"
    ].shape[1]
    last = seen.at(stack.proof.final or stack.proof.taps[-1], tokens)
    number = max(number for path, number in seen.out if path == head.path)
    if _same(seen.into[head.path, number], last) != head.reads_final:
        yield (
            f"{head.path} is said {'' if head.reads_final else 'not '}to read the final"
            " state"
        )
    if _same(seen.out[head.path, number], seen.output["logits"]) != head.gives_logits:
        yield (
            f"{head.path} is said {'' if head.gives_logits else 'not '}to give the"
            " logits"
        )


def _laid(entry: Tensor | None, tokens: int) -> Tensor:
    """An entry of the report as [text, token, width]."""
    assert entry is not None
    if entry.ndim == 3:
        return entry[:, :tokens]
    order = [list(entry.shape).index(TEXTS), list(entry.shape).index(tokens)]
    return entry.movedim(order, (0, 1)).flatten(2)


def _first(values: Sequence[Any]) -> Tensor | None:
    """The first floating tensor, depth first."""
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value
        inner = list(value.values()) if isinstance(value, Mapping) else value
        if isinstance(inner, list | tuple) and (found := _first(inner)) is not None:
            return found
    return None


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and a.shape == b.shape and torch.equal(a, b)


def _near(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-5 * b.abs().max())
