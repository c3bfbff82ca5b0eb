"""Proof: a chain of blocks is a stack if Hugging Face reports the same states.

A chain is a run of calls in which each takes in exactly what the one before gave out.
Hugging Face's report of the same pass has to agree bit for bit. The report is a check
and never the source of a state. It may leave the embeddings out (mamba), end with the
raw last layer (CLIP) or with the normed one (most models): so every entry of it has to
be one of the chain's states, in order, and every layer between the first and the last
has to be one of the entries.

Some models run several lists of blocks with something other than a block between them:
CANINE and Funnel shorten the text and lengthen it again, HRM runs two lists in turn.
There the stack is the last list, from which the last hidden state comes, and the first
entries of the report have to be states of the blocks before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

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
    """Calls that may be the blocks of a stack.

    `taps` and `values` are those of layer.0, layer.1, ... layer.L.
    """

    taps: tuple[Tap, ...]
    values: tuple[Tensor, ...]
    blocks: tuple[Call, ...]

    @property
    def ended(self) -> int:
        """Return when the last block was left."""
        return self.blocks[-1].left

    def within(self, other: Chain) -> bool:
        """Tell whether all of it was run inside one block of another chain."""
        for block in other.blocks:
            if block.entered < self.blocks[0].entered and self.ended < block.left:
                return True
        return False


@dataclass(frozen=True)
class BlockPaths:
    """Where a family whose blocks are no modules has its states.

    They are the input of `first` and the output of each `output`.
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
    """Return the `model_type` of a module's configuration."""
    return str(getattr(getattr(module, "config", None), "model_type", ""))


def chains(module: nn.Module, trace: Trace, /) -> Iterator[Chain]:
    """Yield the chains of a trace.

    Those of the outermost module lists come first, and of these the longest first.
    """
    paths = WITHOUT_BLOCK_MODULES.get(model_type(module))
    if paths is not None:
        yield from _chain_at(paths, trace)
        return
    for depth in range(1, DEEPEST_LIST + 1):
        chains = linked(block_calls(module, trace, depth))
        yield from sorted(chains, key=lambda chain: -len(chain.blocks))


def block_calls(
    module: nn.Module, trace: Trace, depth: int | None = None
) -> list[Call]:
    """Return the calls that may be blocks: those of children of module lists.

    `depth` is the number of lists in lists; None stands for any.
    """
    lists = set()
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList):
            lists.add(path)
    depths = range(1, DEEPEST_LIST + 1) if depth is None else [depth]
    calls = []
    for call in trace.calls:
        if call.into is None or call.out is None or call.into.ndim < 3:
            continue
        if _list_depth(call.path, lists) in depths:
            calls.append(call)
    return calls


def _list_depth(path: str, lists: set[str]) -> int:
    """Count the module lists on the path to a child of one; 0 for any other path."""
    steps = path.split(".")
    if ".".join(steps[:-1]) not in lists:
        return 0
    return sum(".".join(steps[:i]) in lists for i in range(1, len(steps)))


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two tensors are the same bit for bit, NaN included."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def linked(calls: Sequence[Call]) -> Iterator[Chain]:
    """Link calls to chains: each takes in what the one before gave out."""
    free = list(calls)
    while free:
        run = [free.pop(0)]
        following: Call | None = run[0]
        while following is not None:
            following = _next_call(free, run[-1])
            if following is not None:
                run.append(following)
                free.remove(following)
        yield _chain(run[0], run)


def _next_call(calls: Sequence[Call], before: Call) -> Call | None:
    for call in calls:
        if call.entered > before.left and same(call.into, before.out):
            return call
    return None


def _chain_at(paths: BlockPaths, trace: Trace) -> Iterator[Chain]:
    calls = {call.path: call for call in trace.calls}
    for first_path in calls:
        if first_path.endswith(paths.first):
            break
    else:
        return
    prefix = first_path.removesuffix(paths.first)
    run: list[Call] = []
    while (path := prefix + paths.output.format(len(run))) in calls:
        run.append(calls[path])
    first = calls[first_path]
    if run and first.into is not None and all(call.out is not None for call in run):
        yield _chain(first, run)


def _chain(first: Call, run: Sequence[Call]) -> Chain:
    """Return the input of `first`, then the output of every call of the run."""
    taps = [Tap(first.path, first.number, "input")]
    values = [first.into]
    for call in run:
        taps.append(Tap(call.path, call.number, "output"))
        values.append(call.out)
    tensors = tuple(value for value in values if value is not None)
    return Chain(tuple(taps), tensors, tuple(run))


class Unproved(Exception):
    """The reason why a chain is not a stack of the model."""


class HasNaN(Unproved):
    """A chain with a NaN at `layer` and all later ones, so that no states differ."""

    def __init__(self, layer: int) -> None:
        super().__init__(f"a NaN comes up at layer.{layer}")
        self.layer = layer


@dataclass(frozen=True)
class Proof:
    """The proof of one stack: the tap of each state, and its place in `hidden_states`.

    `exit` are the modules between the last block and the last hidden state, `final` the
    tap of the final norm among them. `entries[j]` is the number of the layer that
    `hidden_states[j]` is, one more than the depth for the output of the exit, and
    EARLIER for a state of blocks before the stack; there are none where the proof was
    made by cuts. `differences` are the largest
    differences from these entries, and `raw_difference` that of the raw last layer from
    the last of them.
    """

    taps: tuple[Tap, ...]
    final: Tap | None
    exit: tuple[str, ...]
    width: int
    final_width: int | None
    dtype: torch.dtype
    entries: tuple[int, ...] = ()
    differences: tuple[float, ...] = ()
    raw_difference: float = float("nan")

    @property
    def depth(self) -> int:
        """Return the number of blocks."""
        return len(self.taps) - 1

    @property
    def earlier(self) -> int:
        """Return how many of the first `hidden_states` come before the stack."""
        return self.entries.count(EARLIER)

    def agrees(self, other: Proof) -> bool:
        """Tell whether another pass, over texts of another shape, proved the same."""
        mine = replace(self, differences=(), raw_difference=0.0)
        theirs = replace(other, differences=(), raw_difference=0.0)
        return mine == theirs


@dataclass(frozen=True)
class _Step:
    """A call after the last block, with the states that went in and came out."""

    call: Call
    into: Tensor | None
    out: Tensor | None


@dataclass(frozen=True)
class _Exit:
    """The calls that make the last hidden state from the last layer, and that state."""

    calls: tuple[Call, ...]
    value: Tensor


def prove(module: nn.Module, chain: Chain, trace: Trace, /) -> Proof:
    """Compare a chain with the model's report; raise Unproved where they disagree."""
    require_changes(chain)
    reasons = []
    for report in trace.reports():
        for layout in layouts(chain.values[0], trace.texts, trace.tokens):
            try:
                return _prove(module, chain, trace, report, layout)
            except Unproved as reason:
                reasons.append(str(reason))
    if reasons:
        raise Unproved(reasons[0])
    where = f"{chain.blocks[0].path} to {chain.blocks[-1].path}"
    raise Unproved(f"the states of {where} have no row for each token")


def require_changes(chain: Chain) -> None:
    """Raise Unproved if a block hands on its state: nothing shows where that is."""
    for k, block in enumerate(chain.blocks):
        if not same(chain.values[k], chain.values[k + 1]):
            continue
        for layer, value in enumerate(chain.values):
            if bool(value.isnan().any()):
                raise HasNaN(layer)
        raise Unproved(
            f"block {k + 1} ({block.path}) changes nothing, so that nothing shows where"
            " its state is"
        )


def _prove(
    module: nn.Module,
    chain: Chain,
    trace: Trace,
    report: Sequence[Tensor],
    layout: Layout,
) -> Proof:
    layers = [_layer(value, layout, trace) for value in chain.values]
    earlier = _count_earlier(module, chain, trace, report)
    entries = [_entry(entry, trace) for entry in report[earlier:]]
    ends = [*trace.last_hidden_states, report[-1]]
    exit_ = _find_exit(module, chain, layers[-1], ends, trace, layout)
    states = layers if exit_ is None else [*layers, exit_.value]
    matched = _match(entries, states)
    if earlier:
        _check_last_list(module, chain, matched)
    missing = sorted(set(range(1, len(layers) - 1)) - set(matched))
    if missing:
        raise Unproved(
            f"layer.{missing[0]} is not among the {len(entries)} hidden_states that the"
            " model gives back"
        )
    final = final_width = None
    exit_paths: tuple[str, ...] = ()
    if exit_ is not None:
        final, final_width = _final_norm(exit_, trace, layout)
        exit_paths = tuple(call.path for call in exit_.calls)
    differences = [0.0] * earlier
    for k, entry in zip(matched, entries, strict=True):
        differences.append((states[k] - entry).abs().max().item())
    raw_difference = float("nan")
    if entries[-1].shape == layers[-1].shape:
        raw_difference = (layers[-1] - entries[-1]).abs().max().item()
    return Proof(
        taps=tuple(replace(tap, layout=layout) for tap in chain.taps),
        final=final,
        exit=exit_paths,
        entries=(EARLIER,) * earlier + matched,
        width=layers[0].shape[-1],
        final_width=final_width,
        dtype=reduce(torch.promote_types, {value.dtype for value in states}),
        differences=tuple(differences),
        raw_difference=raw_difference,
    )


def _layer(value: Tensor, layout: Layout, trace: Trace) -> Tensor:
    if layout not in layouts(value, trace.texts, trace.tokens):
        raise Unproved(
            f"the states change their shape between blocks, to {list(value.shape)}"
        )
    return layout.states(value, trace.tokens)


def _entry(entry: Tensor, trace: Trace) -> Tensor:
    """Return an entry of the report as [text, token, width].

    Several streams are laid side by side.
    """
    for layout in layouts(entry, trace.texts, trace.tokens):
        return layout.states(entry, trace.tokens)
    shape = f"{list(entry.shape)} for {trace.texts} texts of {trace.tokens} tokens"
    raise Unproved(f"an entry of its hidden_states has the shape {shape}")


def _count_earlier(
    module: nn.Module, chain: Chain, trace: Trace, report: Sequence[Tensor]
) -> int:
    """Count the first entries of the report that come from blocks before the chain."""
    values = []
    for call in block_calls(module, trace):
        if call.left < chain.blocks[0].entered:
            values += [call.into, call.out]
    for number, entry in enumerate(report):
        is_before = any(same(entry, value) for value in values)
        if not is_before or any(same(entry, value) for value in chain.values):
            return number
    return len(report)


def _check_last_list(module: nn.Module, chain: Chain, matched: Sequence[int]) -> None:
    """Refuse a chain behind other blocks that is not a whole list of blocks.

    Part of a list would be numbered from its middle on: something is added there,
    perhaps by a hook of the user's. A layer of the list must be reported, too.
    """
    paths = [call.path for call in chain.blocks]
    blocks = paths[0].rpartition(".")[0]
    children = []
    for name, _ in module.get_submodule(blocks).named_children():
        children.append(f"{blocks}.{name}")
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


def _match(entries: Sequence[Tensor], states: Sequence[Tensor]) -> tuple[int, ...]:
    """Return the number of the state that each entry is; they must come in order."""
    matched: list[int] = []
    start = 0
    for j, entry in enumerate(entries):
        for k in range(start, len(states)):
            if same(states[k], entry):
                break
        else:
            raise Unproved(
                f"hidden_states[{j}] of {len(entries)} is not a state of the blocks"
                " found"
            )
        matched.append(k)
        start = k + 1
    return tuple(matched)


def _find_exit(
    module: nn.Module,
    chain: Chain,
    last: Tensor,
    ends: Sequence[Tensor],
    trace: Trace,
    layout: Layout,
) -> _Exit | None:
    """Return the calls that lead from the last layer to the last hidden state.

    It is None if that is the last layer itself.
    """
    exact = []
    for end in ends:
        if end.ndim == 3 and end.shape[:2] == (trace.texts, trace.tokens):
            exact.append(end)
    if not exact:
        raise Unproved(
            f"its last hidden state is {list(ends[0].shape)} for {trace.texts} texts of"
            f" {trace.tokens} tokens, so that its rows are not those of the tokens"
        )
    steps = []
    for call in trace.calls:
        if call.entered > chain.ended and _holds_no_list(module, call):
            into = _as_states(call.into, trace, layout)
            steps.append(_Step(call, into, _as_states(call.out, trace, layout)))
    for end in exact:
        calls = _shortest_run(last, end, steps)
        if calls:
            return _Exit(calls, end)
    if any(same(end, last) for end in exact):
        return None
    if model_type(module) in MERGES_BEFORE_FINAL:
        for step in steps:
            if step.out is not None and any(same(step.out, end) for end in exact):
                return _Exit((step.call,), step.out)
    raise Unproved(_why_no_exit(len(chain.blocks), last, exact, steps, layout))


def _why_no_exit(
    depth: int,
    last: Tensor,
    ends: Sequence[Tensor],
    steps: Sequence[_Step],
    layout: Layout,
) -> str:
    """Say what is wrong with the way from the last layer to the last hidden state."""
    width = last.shape[-1]
    for step in steps:
        into = step.into
        if into is None or into.shape[-1] <= width:
            continue
        if not any(same(step.out, end) for end in ends):
            continue
        streams = torch.split(into, width, -1)
        if any(same(stream, last) for stream in streams):
            return (
                f"its blocks carry two streams: {step.call.path} makes its last hidden"
                f" state from layer.{depth}, which hidden_states show, and a second"
                " stream, which they do not"
            )
    reason = (
        f"its last hidden state is not layer.{depth}, nor made from it by modules alone"
    )
    end_width = ends[0].shape[-1]
    if end_width != width and layout.token < 2:
        reason += f": it is {end_width} wide, and that {width}"
    return reason


def _holds_no_list(module: nn.Module, call: Call) -> bool:
    """Tell whether a submodule holds no module list, and so no blocks."""
    parts = module.get_submodule(call.path).modules()
    return not any(isinstance(part, nn.ModuleList) for part in parts)


def _shortest_run(
    start: Tensor, end: Tensor, steps: Sequence[_Step]
) -> tuple[Call, ...]:
    """Return the shortest run of calls from one value to another.

    Each call takes in what the one before gave out.
    """
    fronts: list[tuple[tuple[Call, ...], Tensor]] = [((), start)]
    for _ in range(LONGEST_EXIT):
        reached: list[tuple[tuple[Call, ...], Tensor]] = []
        for calls, value in fronts:
            for step in steps:
                if step.call in calls or step.out is None:
                    continue
                if not same(step.into, value) or same(step.out, value):
                    continue
                if same(step.out, end):
                    return (*calls, step.call)
                reached.append(((*calls, step.call), step.out))
        fronts = reached
    return ()


def _as_states(tensor: Tensor | None, trace: Trace, layout: Layout) -> Tensor | None:
    if tensor is None:
        return None
    fitting = fitting_layout(tensor, trace, layout)
    return None if fitting is None else fitting.states(tensor, trace.tokens)


def fitting_layout(tensor: Tensor, trace: Trace, preferred: Layout) -> Layout | None:
    """Return a layout of a tensor that is no block's state; None if there is none.

    The layout of the stack's own states is preferred.
    """
    possible = list(layouts(tensor, trace.texts, trace.tokens))
    if preferred in possible:
        return preferred
    return possible[0] if possible else None


def _final_norm(
    exit_: _Exit, trace: Trace, layout: Layout
) -> tuple[Tap | None, int | None]:
    """Return the tap and the width of the last call of the exit that keeps the shape.

    The other calls only mix streams or change the width.
    """
    for call in reversed(exit_.calls):
        if call.into is None or call.out is None or call.into.shape != call.out.shape:
            continue
        fitting = fitting_layout(call.out, trace, layout)
        if fitting is not None:
            width = fitting.states(call.out, trace.tokens).shape[-1]
            return Tap(call.path, call.number, "output", fitting), width
    return None, None
