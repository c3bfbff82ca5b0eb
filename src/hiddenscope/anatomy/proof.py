"""Proof: a chain is a stack of the model when Hugging Face's own report of the same pass says so, bit for bit.

The report is a check and never the source. It may leave the embeddings out (mamba), end on the raw last layer (CLIP) or
on the normed one (most): so every entry has to be one of our states, in order, and every layer between the first and
the last has to be one of the entries.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor, nn

from hiddenscope.anatomy.chains import Chain, same
from hiddenscope.anatomy.taps import Layout, Tap, layouts
from hiddenscope.anatomy.trace import Call, Trace

# gemma3n carries four streams and averages them, outside any module, between its last block and its final norm.
MERGES_BEFORE_FINAL = ("gemma3n", "gemma3n_text")
LONGEST_EXIT = 3


class Unproved(Exception):
    """Why a chain is no stack of the model."""


class Broken(Unproved):
    """A chain in which nothing can be told apart, because a NaN comes up at `layer` and runs through the rest."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"a NaN comes up at layer.{layer}")
        self.layer = layer


@dataclass(frozen=True)
class Proof:
    """What was shown of one stack: where each state lies, and which of them each entry of Hugging Face's tuple is."""

    taps: tuple[Tap, ...]
    final: Tap | None
    exit: tuple[str, ...]
    entries: tuple[int, ...]
    width: int
    final_width: int | None
    dtype: torch.dtype
    differences: tuple[float, ...]
    raw_difference: float

    @property
    def depth(self) -> int:
        """How many blocks there are."""
        return len(self.taps) - 1

    def agrees(self, other: "Proof") -> bool:
        """Whether another pass, over texts of another shape, showed the same."""
        mine, theirs = (replace(proof, differences=(), raw_difference=0.0) for proof in (self, other))
        return mine == theirs


@dataclass(frozen=True)
class _Way:
    """How the last layer leaves the stack: through which calls, and what comes out."""

    calls: tuple[Call, ...]
    value: Tensor


def prove(module: nn.Module, chain: Chain, trace: Trace) -> Proof:
    """Hold the chain against what the model reports, or raise Unproved with what did not fit."""
    for k, block in enumerate(chain.blocks):
        if same(chain.values[k], chain.values[k + 1]):
            broken = next((j for j, value in enumerate(chain.values) if bool(value.isnan().any())), None)
            if broken is not None:
                raise Broken(broken)
            raise Unproved(f"block {k + 1} ({block.path}) changes nothing, so that nothing shows where its state is")
    reasons = []
    for report in trace.reports():
        for layout in layouts(chain.values[0], trace.texts, trace.tokens):
            try:
                return _prove(module, chain, trace, report, layout)
            except Unproved as reason:
                reasons.append(str(reason))
    where = f"{chain.blocks[0].path} to {chain.blocks[-1].path}"
    raise Unproved(reasons[0] if reasons else f"the states of {where} have no row for each token")


def _prove(module: nn.Module, chain: Chain, trace: Trace, report: Sequence[Tensor], layout: Layout) -> Proof:
    states = [_states(value, layout, trace) for value in chain.values]
    entries = [_entry(entry, trace) for entry in report]
    way = _way_out(module, replace(chain, values=tuple(states)), [*trace.lasts, report[-1]], trace, layout)
    known = states if way is None else [*states, way.value]
    matched = _align(entries, known)
    missing = sorted(set(range(1, len(states) - 1)) - set(matched))
    if missing:
        raise Unproved(f"layer.{missing[0]} is not among the {len(entries)} hidden_states that the model gives back")
    final = None if way is None else _final_norm(way, trace, layout)
    last = entries[-1]
    comparable = last.shape == states[-1].shape
    return Proof(
        taps=tuple(replace(tap, layout=layout) for tap in chain.taps),
        final=None if final is None else final[0],
        exit=() if way is None else tuple(call.path for call in way.calls),
        entries=matched,
        width=states[0].shape[-1],
        final_width=None if final is None else final[1].shape[-1],
        dtype=reduce(torch.promote_types, {value.dtype for value in known}),
        differences=tuple((known[k] - entry).abs().max().item() for k, entry in zip(matched, entries, strict=True)),
        raw_difference=(states[-1] - last).abs().max().item() if comparable else float("nan"),
    )


def _states(value: Tensor, layout: Layout, trace: Trace) -> Tensor:
    if layout not in layouts(value, trace.texts, trace.tokens):
        raise Unproved(f"the states change their shape between blocks, to {list(value.shape)}")
    return layout.states(value, trace.tokens)


def _entry(entry: Tensor, trace: Trace) -> Tensor:
    """An entry of the report as [text, token, width]; streams are laid side by side."""
    for layout in layouts(entry, trace.texts, trace.tokens):
        return layout.states(entry, trace.tokens)
    shape = f"{list(entry.shape)} for {trace.texts} texts of {trace.tokens} tokens"
    raise Unproved(f"an entry of its hidden_states has the shape {shape}")


def _align(entries: Sequence[Tensor], known: Sequence[Tensor]) -> tuple[int, ...]:
    """Which of the known states each entry is; each must be one, and they must come in order."""
    matched: list[int] = []
    for j, entry in enumerate(entries):
        start = matched[-1] + 1 if matched else 0
        k = next((k for k in range(start, len(known)) if same(known[k], entry)), None)
        if k is None:
            raise Unproved(f"hidden_states[{j}] of {len(entries)} is no state of the blocks found")
        matched.append(k)
    return tuple(matched)


def _way_out(module: nn.Module, chain: Chain, ends: Sequence[Tensor], trace: Trace, layout: Layout) -> _Way | None:
    """The calls that lead from the last layer to the last hidden state; None if that is the last layer itself."""
    last = chain.values[-1]
    exact = [end for end in ends if end.ndim == 3 and end.shape[:2] == (trace.texts, trace.tokens)]
    if not exact:
        raise Unproved(
            f"its last hidden state is {list(ends[0].shape)} for {trace.texts} texts of {trace.tokens} tokens"
        )
    after = [call for call in trace.calls if call.entered > chain.ended and _is_small(module, call)]
    steps = [(call, _laid(call.into, trace, layout), _laid(call.out, trace, layout)) for call in after]
    for end in exact:
        calls = _path(last, end, steps)
        if calls:
            return _Way(calls, end)
    if any(same(end, last) for end in exact):
        return None
    if getattr(getattr(module, "config", None), "model_type", "") in MERGES_BEFORE_FINAL:
        for call, _, out in steps:
            if out is not None and any(same(out, end) for end in exact):
                return _Way((call,), out)
    wide, ours = exact[0].shape[-1], last.shape[-1]
    why = f": it is {wide} wide, and that {ours}" if wide != ours and layout.token < 2 else ""
    raise Unproved(f"its last hidden state is not layer.{len(chain.blocks)}, nor made from it by modules alone{why}")


def _is_small(module: nn.Module, call: Call) -> bool:
    """Whether the part called holds no list of its own, and so no blocks."""
    return not any(isinstance(part, nn.ModuleList) for part in module.get_submodule(call.path).modules())


def _path(start: Tensor, end: Tensor, steps: Sequence[tuple[Call, Tensor | None, Tensor | None]]) -> tuple[Call, ...]:
    """The shortest run of calls, each fed by the one before, from one value to another."""
    fronts: list[tuple[tuple[Call, ...], Tensor]] = [((), start)]
    for _ in range(LONGEST_EXIT):
        reached: list[tuple[tuple[Call, ...], Tensor]] = []
        for way, value in fronts:
            for call, into, out in steps:
                if call in way or out is None or not same(into, value) or same(out, value):
                    continue
                if same(out, end):
                    return (*way, call)
                reached.append(((*way, call), out))
        fronts = reached
    return ()


def _laid(tensor: Tensor | None, trace: Trace, layout: Layout) -> Tensor | None:
    found = None if tensor is None else fitting(tensor, trace, layout)
    return None if tensor is None or found is None else found.states(tensor, trace.tokens)


def fitting(tensor: Tensor, trace: Trace, layout: Layout) -> Layout | None:
    """How a tensor that is no block's lies: as the stack's own states do, if that can be."""
    possible = list(layouts(tensor, trace.texts, trace.tokens))
    return layout if layout in possible else possible[0] if possible else None


def _final_norm(way: _Way, trace: Trace, layout: Layout) -> tuple[Tap, Tensor] | None:
    """The last call on the way out that keeps the shape: the others only mix streams or change the width."""
    for call in reversed(way.calls):
        if call.into is not None and call.out is not None and call.into.shape == call.out.shape:
            lies = fitting(call.out, trace, layout)
            if lies is not None:
                return Tap(call.path, call.number, "output", lies), lies.states(call.out, trace.tokens)
    return None
