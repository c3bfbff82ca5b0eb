"""Chains: runs of calls in which each takes in exactly what the one before gave out."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hiddenscope.anatomy.taps import Tap
from hiddenscope.anatomy.trace import Call, Trace

DEEPEST = 3


@dataclass(frozen=True)
class Chain:
    """The calls that may be the blocks of a stack, with the taps and values of layer.0, layer.1, ... layer.L."""

    taps: tuple[Tap, ...]
    values: tuple[Tensor, ...]
    blocks: tuple[Call, ...]

    @property
    def ended(self) -> int:
        """When the last block was left."""
        return self.blocks[-1].left

    def within(self, other: "Chain") -> bool:
        """Whether all of it was run inside one block of another."""
        return any(block.entered < self.blocks[0].entered and self.ended < block.left for block in other.blocks)


@dataclass(frozen=True)
class Landmarks:
    """Where a family without block modules shows its states: what its first block is given, what each leaves behind."""

    enter: str
    leave: str


# Families whose blocks are no module that is called: xlm and flaubert run parallel lists of parts in one loop, and
# squeezebert calls its blocks' `forward` past the hooks.
FAMILIES: Mapping[str, Landmarks] = {
    "xlm": Landmarks(enter="attentions.0", leave="layer_norm2.{}"),
    "flaubert": Landmarks(enter="attentions.0", leave="layer_norm2.{}"),
    "squeezebert": Landmarks(enter="encoder.layers.0.attention", leave="encoder.layers.{}.output"),
}


def chains(module: nn.Module, trace: Trace) -> Iterator[Chain]:
    """The chains of a trace, those of the outermost lists first and the longest of these first."""
    family = FAMILIES.get(getattr(getattr(module, "config", None), "model_type", ""))
    if family is not None:
        yield from _by_landmarks(family, trace)
        return
    lists = {path for path, part in module.named_modules() if isinstance(part, nn.ModuleList)}
    for depth in range(1, DEEPEST + 1):
        calls = [call for call in trace.calls if _list_depth(call.path, lists) == depth and _may_be_block(call)]
        yield from sorted(_linked(calls), key=lambda chain: -len(chain.blocks))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Bit for bit the same, NaN included."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _list_depth(path: str, lists: set[str]) -> int:
    """How many lists the path goes through, if it ends just inside one; 0 if it does not."""
    steps = path.split(".")
    if ".".join(steps[:-1]) not in lists:
        return 0
    return sum(".".join(steps[:i]) in lists for i in range(1, len(steps)))


def _may_be_block(call: Call) -> bool:
    return call.into is not None and call.out is not None and call.into.ndim >= 3


def _linked(calls: list[Call]) -> Iterator[Chain]:
    free = list(calls)
    while free:
        run = [free.pop(0)]
        while True:
            following = [c for c in free if c.entered > run[-1].left and same(c.into, run[-1].out)]
            if not following:
                break
            run.append(following[0])
            free.remove(following[0])
        yield _chain(run)


def _chain(run: list[Call]) -> Chain:
    enter = Tap(run[0].path, run[0].number, "input")
    leave = [Tap(call.path, call.number, "output") for call in run]
    values = [run[0].into, *(call.out for call in run)]
    return Chain((enter, *leave), tuple(value for value in values if value is not None), tuple(run))


def _by_landmarks(family: Landmarks, trace: Trace) -> Iterator[Chain]:
    calls = {call.path: call for call in trace.calls}
    prefix = next((path[: -len(family.enter)] for path in calls if path.endswith(family.enter)), None)
    if prefix is None:
        return
    first, run = calls[prefix + family.enter], list[Call]()
    while (path := prefix + family.leave.format(len(run))) in calls:
        run.append(calls[path])
    values = [first.into, *(call.out for call in run)]
    if run and all(value is not None for value in values):
        taps = (Tap(first.path, 0, "input"), *(Tap(call.path, 0, "output") for call in run))
        yield Chain(taps, tuple(value for value in values if value is not None), tuple(run))
