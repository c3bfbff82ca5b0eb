"""Proof: a chain of blocks is a stack of the model when Hugging Face's own report of
the same pass agrees, bit for bit.

A chain is a run of calls in which each takes in exactly what the one before gave out.
The report is a check and never the source of a state. It may leave the embeddings out
(mamba), end with the raw last layer (CLIP) or with the normed one (most models): so
every entry of it has to be one of the chain's states, in order, and every layer between
the first and the last has to be one of the entries.

Some models run several lists of blocks, and something other than a block comes between
them: CANINE and Funnel shorten the text and lengthen it again, HRM runs two lists in
turn. There the stack is the last list, from which the last hidden state comes, and the
first entries of the report have to be states of the blocks before it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import takewhile
from typing import TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.discovery.taps import Layout, Tap, layouts
from hiddenscope.discovery.trace import Call, Trace

DEEPEST_LIST = 3
LONGEST_EXIT = 3
EARLIER = -1  # in `Proof.entries`: a state of a block that is run before the stack
# gemma3n carries four streams and averages them, outside any module, between its last
# block and its final norm.
MERGES_BEFORE_FINAL = ("gemma3n", "gemma3n_text")


@dataclass(frozen=True)
class Chain:
    """The calls that may be the blocks of a stack, with the taps and values of layer.0,
    layer.1, ... layer.L.
    """

    taps: tuple[Tap, ...]
    values: tuple[Tensor, ...]
    blocks: tuple[Call, ...]

    @property
    def ended(self) -> int:
        """When the last block was left."""
        return self.blocks[-1].left

    def within(self, other: "Chain") -> bool:
        """Whether all of it was run inside one block of another chain."""
        return any(
            block.entered < self.blocks[0].entered and self.ended < block.left
            for block in other.blocks
        )


@dataclass(frozen=True)
class BlockPaths:
    """Where a family whose blocks are no modules has its states: the input of `first`,
    the output of each `output`.
    """

    first: str
    output: str


# xlm and flaubert run parallel lists of submodules in one loop; squeezebert calls its
# blocks' `forward` past the hooks.
WITHOUT_BLOCK_MODULES: Mapping[str, BlockPaths] = {
    "xlm": BlockPaths(first="attentions.0", output="layer_norm2.{}"),
    "flaubert": BlockPaths(first="attentions.0", output="layer_norm2.{}"),
    "squeezebert": BlockPaths(
        first="encoder.layers.0.attention", output="encoder.layers.{}.output"
    ),
}


def model_type(module: nn.Module) -> str:
    """The `model_type` of a module's configuration."""
    return str(getattr(getattr(module, "config", None), "model_type", ""))


def chains(module: nn.Module, trace: Trace) -> Iterator[Chain]:
    """The chains of a trace: those of the outermost module lists first, and of these
    the longest first.
    """
    paths = WITHOUT_BLOCK_MODULES.get(model_type(module))
    if paths is not None:
        yield from _chain_at(paths, trace)
        return
    for depth in range(1, DEEPEST_LIST + 1):
        yield from sorted(
            _linked(block_calls(module, trace, depth)),
            key=lambda chain: -len(chain.blocks),
        )


def block_calls(
    module: nn.Module, trace: Trace, depth: int | None = None
) -> list[Call]:
    """The calls that may be blocks: of children of module lists, at one depth of lists
    in lists or at any.
    """
    lists = {
        path for path, part in module.named_modules() if isinstance(part, nn.ModuleList)
    }
    depths = range(1, DEEPEST_LIST + 1) if depth is None else [depth]
    return [
        call
        for call in trace.calls
        if _list_depth(call.path, lists) in depths and _may_be_block(call)
    ]


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors are the same bit for bit, NaN included."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def _list_depth(path: str, lists: set[str]) -> int:
    """How many module lists the path goes through, if it is a child of one; 0 if it is
    not.
    """
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
        while following := [
            c for c in free if c.entered > run[-1].left and same(c.into, run[-1].out)
        ]:
            run.append(following[0])
            free.remove(following[0])
        yield _chain(run[0], run)


def _chain_at(paths: BlockPaths, trace: Trace) -> Iterator[Chain]:
    calls = {call.path: call for call in trace.calls}
    prefix = next(
        (path[: -len(paths.first)] for path in calls if path.endswith(paths.first)),
        None,
    )
    if prefix is None:
        return
    run: list[Call] = []
    while (path := prefix + paths.output.format(len(run))) in calls:
        run.append(calls[path])
    first = calls[prefix + paths.first]
    if run and first.into is not None and all(call.out is not None for call in run):
        yield _chain(first, run)


def _chain(first: Call, run: list[Call]) -> Chain:
    """The input of `first`, then the output of every call of the run."""
    taps = [
        Tap(first.path, first.number, "input"),
        *(Tap(call.path, call.number, "output") for call in run),
    ]
    values = [first.into, *(call.out for call in run)]
    return Chain(
        tuple(taps), tuple(value for value in values if value is not None), tuple(run)
    )


class Unproved(Exception):
    """Why a chain is no stack of the model."""


class HasNaN(Unproved):
    """A chain in which no two states can be told apart, because there is a NaN at
    `layer` and at all later ones.
    """

    def __init__(self, layer: int) -> None:
        super().__init__(f"a NaN comes up at layer.{layer}")
        self.layer = layer


@dataclass(frozen=True)
class Proof:
    """What was shown of one stack: the tap of each state, and which state each entry of
    `hidden_states` is.

    `exit` are the modules between the last block and the last hidden state, `final` the
    tap of the final norm among them. `entries[j]` is the number of the layer that
    `hidden_states[j]` is, one more than the depth for what the exit gives, and EARLIER
    for a state of blocks before the stack; `differences` are the largest differences
    from these entries, and `raw_difference` that of the raw last layer from the last of
    them.
    """

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
        """The number of blocks."""
        return len(self.taps) - 1

    @property
    def earlier(self) -> int:
        """How many of the first entries of `hidden_states` are states of blocks that
        are run before the stack.
        """
        return self.entries.count(EARLIER)

    def agrees(self, other: "Proof") -> bool:
        """Whether another pass, over texts of another shape, showed the same."""
        mine, theirs = (
            replace(proof, differences=(), raw_difference=0.0)
            for proof in (self, other)
        )
        return mine == theirs


_Step: TypeAlias = tuple[Call, Tensor | None, Tensor | None]
"""A call after the last block, with the states that went in and came out."""


@dataclass(frozen=True)
class _Exit:
    """The calls that make the last hidden state from the last layer, and that state."""

    calls: tuple[Call, ...]
    value: Tensor


def prove(module: nn.Module, chain: Chain, trace: Trace) -> Proof:
    """Compare the chain with what the model reports; raise Unproved, with what did not
    fit, where they disagree.
    """
    for k, block in enumerate(chain.blocks):
        if same(chain.values[k], chain.values[k + 1]):
            layer = next(
                (
                    j
                    for j, value in enumerate(chain.values)
                    if bool(value.isnan().any())
                ),
                None,
            )
            if layer is not None:
                raise HasNaN(layer)
            raise Unproved(
                f"block {k + 1} ({block.path}) changes nothing, so that nothing shows"
                " where its state is"
            )
    reasons = []
    for report in trace.reports():
        for layout in layouts(chain.values[0], trace.texts, trace.tokens):
            try:
                return _prove(module, chain, trace, report, layout)
            except Unproved as reason:
                reasons.append(str(reason))
    where = f"{chain.blocks[0].path} to {chain.blocks[-1].path}"
    raise Unproved(
        reasons[0] if reasons else f"the states of {where} have no row for each token"
    )


def _prove(
    module: nn.Module,
    chain: Chain,
    trace: Trace,
    report: Sequence[Tensor],
    layout: Layout,
) -> Proof:
    layers = [_layer(value, layout, trace) for value in chain.values]
    earlier = _earlier(module, chain, trace, report)
    entries = [_entry(entry, trace) for entry in report[earlier:]]
    ends = [*trace.last_hidden_states, report[-1]]
    exit_ = _find_exit(
        module, replace(chain, values=tuple(layers)), ends, trace, layout
    )
    states = layers if exit_ is None else [*layers, exit_.value]
    matched = _matched(entries, states)
    if earlier:
        _check_last_list(module, chain, trace, matched)
    missing = sorted(set(range(1, len(layers) - 1)) - set(matched))
    if missing:
        raise Unproved(
            f"layer.{missing[0]} is not among the {len(entries)} hidden_states that the"
            " model gives back"
        )
    final = None if exit_ is None else _final_norm(exit_, trace, layout)
    last = entries[-1]
    comparable = last.shape == layers[-1].shape
    return Proof(
        taps=tuple(replace(tap, layout=layout) for tap in chain.taps),
        final=None if final is None else final[0],
        exit=() if exit_ is None else tuple(call.path for call in exit_.calls),
        entries=(EARLIER,) * earlier + matched,
        width=layers[0].shape[-1],
        final_width=None if final is None else final[1].shape[-1],
        dtype=reduce(torch.promote_types, {value.dtype for value in states}),
        differences=(0.0,) * earlier
        + tuple(
            (states[k] - entry).abs().max().item()
            for k, entry in zip(matched, entries, strict=True)
        ),
        raw_difference=(
            (layers[-1] - last).abs().max().item() if comparable else float("nan")
        ),
    )


def _layer(value: Tensor, layout: Layout, trace: Trace) -> Tensor:
    if layout not in layouts(value, trace.texts, trace.tokens):
        raise Unproved(
            f"the states change their shape between blocks, to {list(value.shape)}"
        )
    return layout.states(value, trace.tokens)


def _entry(entry: Tensor, trace: Trace) -> Tensor:
    """An entry of the report as [text, token, width]; several streams are laid side by
    side.
    """
    for layout in layouts(entry, trace.texts, trace.tokens):
        return layout.states(entry, trace.tokens)
    shape = f"{list(entry.shape)} for {trace.texts} texts of {trace.tokens} tokens"
    raise Unproved(f"an entry of its hidden_states has the shape {shape}")


def _earlier(
    module: nn.Module, chain: Chain, trace: Trace, report: Sequence[Tensor]
) -> int:
    """How many of the first entries of the report are states of blocks that are run
    before the chain.
    """
    began = chain.blocks[0].entered
    blocks = [call for call in block_calls(module, trace) if call.left < began]
    values = [value for call in blocks for value in (call.into, call.out)]

    def before(entry: Tensor) -> bool:
        return any(same(entry, value) for value in values) and not any(
            same(entry, value) for value in chain.values
        )

    return sum(1 for _ in takewhile(before, report))


def _check_last_list(
    module: nn.Module, chain: Chain, trace: Trace, matched: Sequence[int]
) -> None:
    """Refuse a chain behind other blocks that is not a whole list of blocks, or of
    which no layer is reported.

    Part of a list would be numbered from its middle on: something is added there,
    perhaps by a hook of somebody's.
    """
    paths = [call.path for call in chain.blocks]
    blocks = paths[0].rpartition(".")[0]
    children = [
        f"{blocks}.{name}" for name, _ in module.get_submodule(blocks).named_children()
    ]
    at = children.index(paths[0])
    if at:
        raise Unproved(
            f"{paths[0]} takes in something else than {children[at - 1]} gives out, so"
            " they make no chain"
        )
    if paths != children:
        raise Unproved(
            f"{paths[0]} to {paths[-1]}, which it ends with, are not one list of blocks"
        )
    if not any(k <= len(paths) for k in matched):
        raise Unproved(
            f"hidden_states has no state of {blocks}, the list of blocks that it ends"
            " with"
        )


def _matched(entries: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, ...]:
    """Which of the states each entry is; each must be one, and they must come in order."""
    matched: list[int] = []
    for j, entry in enumerate(entries):
        start = matched[-1] + 1 if matched else 0
        k = next((k for k in range(start, len(states)) if same(states[k], entry)), None)
        if k is None:
            raise Unproved(
                f"hidden_states[{j}] of {len(entries)} is not a state of the blocks"
                " found"
            )
        matched.append(k)
    return tuple(matched)


def _find_exit(
    module: nn.Module,
    chain: Chain,
    ends: Sequence[Tensor],
    trace: Trace,
    layout: Layout,
) -> _Exit | None:
    """The calls that lead from the last layer to the last hidden state; None if that is
    the last layer itself.
    """
    last = chain.values[-1]
    exact = [
        end
        for end in ends
        if end.ndim == 3 and end.shape[:2] == (trace.texts, trace.tokens)
    ]
    if not exact:
        shape = (
            f"its last hidden state is {list(ends[0].shape)} for {trace.texts} texts of"
            f" {trace.tokens} tokens"
        )
        raise Unproved(f"{shape}, so that its rows are not those of the tokens")
    after = [
        call
        for call in trace.calls
        if call.entered > chain.ended and _has_no_list(module, call)
    ]
    steps = [
        (
            call,
            _as_states(call.into, trace, layout),
            _as_states(call.out, trace, layout),
        )
        for call in after
    ]
    for end in exact:
        calls = _shortest_run(last, end, steps)
        if calls:
            return _Exit(calls, end)
    if any(same(end, last) for end in exact):
        return None
    if model_type(module) in MERGES_BEFORE_FINAL:
        for call, _, out in steps:
            if out is not None and any(same(out, end) for end in exact):
                return _Exit((call,), out)
    raise Unproved(_why_no_exit(len(chain.blocks), last, exact, steps, layout))


def _why_no_exit(
    depth: int,
    last: Tensor,
    ends: Sequence[Tensor],
    steps: Sequence[_Step],
    layout: Layout,
) -> str:
    """What is wrong with the way from the last layer to the last hidden state."""
    for call, into, out in steps:
        wider = (
            into is not None
            and into.shape[-1] > last.shape[-1]
            and any(same(out, end) for end in ends)
        )
        if wider and any(same(half, last) for half in into.split(last.shape[-1], -1)):  # type: ignore[union-attr]
            streams = (
                f"layer.{depth}, which hidden_states show, and a second stream, which"
                " they do not"
            )
            return (
                f"its blocks carry two streams: {call.path} makes its last hidden state"
                f" from {streams}"
            )
    wide, ours = ends[0].shape[-1], last.shape[-1]
    why = (
        f": it is {wide} wide, and that {ours}"
        if wide != ours and layout.token < 2
        else ""
    )
    return (
        f"its last hidden state is not layer.{depth}, nor made from it by modules"
        f" alone{why}"
    )


def _has_no_list(module: nn.Module, call: Call) -> bool:
    """Whether the submodule called holds no module list, and so no blocks."""
    return not any(
        isinstance(part, nn.ModuleList)
        for part in module.get_submodule(call.path).modules()
    )


def _shortest_run(
    start: Tensor, end: Tensor, steps: Sequence[_Step]
) -> tuple[Call, ...]:
    """The shortest run of calls, each fed by the one before, from one value to another."""
    fronts: list[tuple[tuple[Call, ...], Tensor]] = [((), start)]
    for _ in range(LONGEST_EXIT):
        reached: list[tuple[tuple[Call, ...], Tensor]] = []
        for calls, value in fronts:
            for call, into, out in steps:
                if (
                    call in calls
                    or out is None
                    or not same(into, value)
                    or same(out, value)
                ):
                    continue
                if same(out, end):
                    return (*calls, call)
                reached.append(((*calls, call), out))
        fronts = reached
    return ()


def _as_states(tensor: Tensor | None, trace: Trace, layout: Layout) -> Tensor | None:
    fits = None if tensor is None else fitting_layout(tensor, trace, layout)
    return None if tensor is None or fits is None else fits.states(tensor, trace.tokens)


def fitting_layout(tensor: Tensor, trace: Trace, preferred: Layout) -> Layout | None:
    """The layout of a tensor that is no block's state: that of the stack's own states,
    if it fits.
    """
    possible = list(layouts(tensor, trace.texts, trace.tokens))
    return preferred if preferred in possible else possible[0] if possible else None


def _final_norm(
    exit_: _Exit, trace: Trace, layout: Layout
) -> tuple[Tap, Tensor] | None:
    """The last call of the exit that keeps the shape: the others only mix streams or
    change the width.
    """
    for call in reversed(exit_.calls):
        if (
            call.into is not None
            and call.out is not None
            and call.into.shape == call.out.shape
        ):
            fits = fitting_layout(call.out, trace, layout)
            if fits is not None:
                return Tap(call.path, call.number, "output", fits), fits.states(
                    call.out, trace.tokens
                )
    return None
