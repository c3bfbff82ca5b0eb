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

A module that reports no hidden states is proved by cuts. A state is a cut if the rest
of the pass depends on the text only through it: put into a pass over another text, it
turns the output into that of its own text, bit for bit. Blocks are a stack if each
takes in what the one before gave out and every state between them is a cut. A
connection that skips blocks would be seen, because it still carries the other text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

import torch
from torch import Tensor, nn

from hiddenscope.discovery.trace import (
    Call,
    Layout,
    Tap,
    Trace,
    arguments,
    layouts,
    trace,
)
from hiddenscope.discovery.vocabulary import trial_ids
from hiddenscope.modules import hooks

DEEPEST_LIST = 3
LONGEST_EXIT = 3
EARLIER = -1  # in `Proof.entries`: a state of a block that is run before the stack
# What rounding may change in a pass of the same shape, in units in the last place and
# as a share of a value: nothing, unless the tokens are grouped differently, as mixtures
# of experts do.
UNITS, SMALLEST_CHANGE = 4, 1e-4
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


# Where families whose blocks are no modules have their states: the input of the first
# path and the output of each of the second. xlm and flaubert run parallel lists of
# submodules in one loop; squeezebert calls its blocks' `forward` past the hooks.
WITHOUT_BLOCK_MODULES = {
    "xlm": ("attentions.0", "layer_norm2.{}"),
    "flaubert": ("attentions.0", "layer_norm2.{}"),
    "squeezebert": ("encoder.layers.0.attention", "encoder.layers.{}.output"),
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
        # The chain whose states are at these ends of paths, if it is there.
        start, outputs = paths
        calls = {call.path: call for call in trace.calls}
        for first in [path for path in calls if path.endswith(start)][:1]:
            prefix = first.removesuffix(start)
            run: list[Call] = []
            while (path := prefix + outputs.format(len(run))) in calls:
                run.append(calls[path])
            chain = _chain(calls[first], run)
            if run and len(chain.values) == len(chain.taps):
                yield chain
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
    # The depth of each list; the lists that hold it come before it.
    lists: dict[str, int] = {}
    for path, part in module.named_modules():
        if isinstance(part, nn.ModuleList):
            around = [other for other in lists if path.startswith(f"{other}.")]
            lists[path] = len(around) + 1
    depths = range(1, DEEPEST_LIST + 1) if depth is None else [depth]
    calls = []
    for call in trace.calls:
        if call.into is None or call.out is None or call.into.ndim < 3:
            continue
        if lists.get(call.path.rpartition(".")[0]) in depths:
            calls.append(call)
    return calls


def same(a: Tensor | None, b: Tensor | None) -> bool:
    """Tell whether two tensors are the same bit for bit, NaN included."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all())


def differs(plain: Tensor, changed: Tensor, *, steps: int = 1) -> bool:
    """Tell whether more than one number in eight changed by more than rounding does.

    Numbers are counted, because a few huge ones would hide what the others do. Those
    smaller than the median are measured by the median. Numbers that stay zero do not
    count: a part may write to a few channels only. `steps` is the number of blocks in
    which rounding adds up.
    """
    eps = torch.finfo(plain.dtype).eps
    is_written = (plain != 0) | (changed != 0)
    if not is_written.any():
        return False
    plain, changed = plain[is_written].double(), changed[is_written].double()
    size = plain.abs().clamp(min=plain.abs().median())
    allowed = max(UNITS * steps**0.5 * eps, SMALLEST_CHANGE)
    return bool(((plain - changed).abs() > allowed * size).double().mean() > 1 / 8)


def linked(calls: Sequence[Call]) -> Iterator[Chain]:
    """Link calls to chains: each takes in what the one before gave out."""
    free = list(calls)
    while free:
        run = [free.pop(0)]
        for call in list(free):
            if call.entered > run[-1].left and same(call.into, run[-1].out):
                run.append(call)
                free.remove(call)
        yield _chain(run[0], run)


def _chain(first: Call, run: Sequence[Call]) -> Chain:
    """Return the input of `first`, then the output of every call of the run."""
    taps = [Tap(first.path, first.number, "input")]
    values = [first.into]
    for call in run:
        taps.append(Tap(call.path, call.number, "output"))
        values.append(call.out)
    tensors = tuple(value for value in values if value is not None)
    return Chain(tuple(taps), tensors, tuple(run))


def interrupted_chains(module: nn.Module, trace: Trace) -> Iterator[Chain]:
    """Yield whole lists of blocks with something other than a block in between.

    RWKV halves its state after every sixth block, DeBERTa v2 adds a convolution after
    the first. There a layer is what the next block takes in.
    """
    lists = defaultdict(list)
    for call in block_calls(module, trace, 1):
        lists[call.path.rpartition(".")[0]].append(call)
    for path, run in lists.items():
        children = [name for name, _ in module.get_submodule(path).named_children()]
        if [call.path for call in run] != [f"{path}.{name}" for name in children]:
            continue
        chain = _chain(run[0], run)
        taps, values = list(chain.taps), list(chain.values)
        for call in trace.calls:
            # What comes between the blocks may read this, too.
            if call.left < run[0].entered and same(call.out, values[0]):
                taps[0] = Tap(call.path, call.number, "output")
                break
        for k, call in enumerate(run[1:], 1):
            if call.into is not None and not same(call.into, values[k]):
                taps[k] = Tap(call.path, call.number, "input")
                values[k] = call.into
        if len({value.shape for value in values}) == 1:
            yield Chain(tuple(taps), tuple(values), chain.blocks)


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
    made by cuts. `raw_difference` is the largest difference of the raw last layer from
    the last entry. It depends on the texts, so that equal proofs may differ in it.
    """

    taps: tuple[Tap, ...]
    final: Tap | None
    exit: tuple[str, ...]
    width: int
    final_width: int | None
    dtype: torch.dtype
    entries: tuple[int, ...] = ()
    raw_difference: float = field(default=float("nan"), compare=False)

    @property
    def ends_with_final(self) -> bool:
        """Tell whether the last hidden state is the output of the final norm."""
        return self.final is not None and self.final.path == self.exit[-1]

    @property
    def earlier(self) -> int:
        """Return how many of the first `hidden_states` come before the stack."""
        return self.entries.count(EARLIER)


@dataclass(frozen=True)
class _Step:
    """A call after the last block, with the states that went in and came out."""

    call: Call
    into: Tensor | None
    out: Tensor | None


def prove(module: nn.Module, chain: Chain, trace: Trace, /) -> Proof:
    """Compare a chain with the model's report; raise Unproved where they disagree."""
    require_changes(chain)
    where = f"{chain.blocks[0].path} to {chain.blocks[-1].path}"
    reasons = []
    for report in trace.reports():
        for layout in layouts(chain.values[0], trace.texts, trace.tokens):
            try:
                return _prove(module, chain, trace, report, layout)
            except Unproved as reason:
                reasons.append(reason)
    reasons.append(Unproved(f"the states of {where} have no row for each token"))
    raise reasons[0]


def require_changes(chain: Chain) -> None:
    """Raise Unproved if a block hands on its state: nothing shows where that is."""
    for k, block in enumerate(chain.blocks):
        if not same(chain.values[k], chain.values[k + 1]):
            continue
        for layer, value in enumerate(chain.values):
            if value.isnan().any():
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
    for value in chain.values:
        if layout not in layouts(value, trace.texts, trace.tokens):
            raise Unproved(
                f"the states change their shape between blocks, to {list(value.shape)}"
            )
    layers = [layout.states(value, trace.tokens) for value in chain.values]
    earlier = _count_earlier(module, chain, trace, report)
    entries = [_entry(entry, trace) for entry in report[earlier:]]
    ends = [*trace.last_hidden_states, report[-1]]
    exit_calls, end = _find_exit(module, chain, layers[-1], ends, trace, layout)
    states = [*layers, end] if exit_calls else layers
    # The number of the state that each entry is; they must come in order.
    matched: list[int] = []
    for j, entry in enumerate(entries):
        start = matched[-1] + 1 if matched else 0
        later = range(start, len(states))
        number = next((k for k in later if same(states[k], entry)), None)
        if number is None:
            raise Unproved(
                f"hidden_states[{j}] of {len(entries)} is not a state of the blocks"
                " found"
            )
        matched.append(number)
    if earlier:
        _check_last_list(module, chain, matched)
    missing = sorted(set(range(1, len(layers) - 1)) - set(matched))
    if missing:
        raise Unproved(
            f"layer.{missing[0]} is not among the {len(entries)} hidden_states that the"
            " model gives back"
        )
    final, final_width = _final_norm(exit_calls, trace, layout)
    raw_difference = float("nan")
    if entries[-1].shape == layers[-1].shape:
        raw_difference = (layers[-1] - entries[-1]).abs().max().item()
    return Proof(
        taps=tuple(replace(tap, layout=layout) for tap in chain.taps),
        final=final,
        exit=tuple(call.path for call in exit_calls),
        entries=(*[EARLIER] * earlier, *matched),
        width=layers[0].shape[-1],
        final_width=final_width,
        dtype=reduce(torch.promote_types, {value.dtype for value in states}),
        raw_difference=raw_difference,
    )


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


def _find_exit(
    module: nn.Module,
    chain: Chain,
    last: Tensor,
    ends: Sequence[Tensor],
    trace: Trace,
    layout: Layout,
) -> tuple[tuple[Call, ...], Tensor]:
    """Return the calls that lead from the last layer to the last hidden state.

    There are none if that is the last layer itself.
    """
    exact = [
        end
        for end in ends
        if end.ndim == 3 and end.shape[:2] == (trace.texts, trace.tokens)
    ]
    if not exact:
        raise Unproved(
            f"its last hidden state is {list(ends[0].shape)} for {trace.texts} texts of"
            f" {trace.tokens} tokens, so that its rows are not those of the tokens"
        )
    steps = []
    for call in trace.calls:
        if call.entered < chain.ended:
            continue
        # What holds a module list may hold blocks.
        parts = module.get_submodule(call.path).modules()
        if not any(isinstance(part, nn.ModuleList) for part in parts):
            into = _as_states(call.into, trace, layout)
            steps.append(_Step(call, into, _as_states(call.out, trace, layout)))
    for end in exact:
        calls = _shortest_run(last, end, steps)
        if calls:
            return calls, end
    if any(same(end, last) for end in exact):
        return (), last
    if model_type(module) in MERGES_BEFORE_FINAL:
        for step in steps:
            if step.out is not None and any(same(step.out, end) for end in exact):
                return (step.call,), step.out
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


def _shortest_run(
    start: Tensor, end: Tensor, steps: Sequence[_Step]
) -> tuple[Call, ...]:
    """Return the shortest run of calls from one value to another.

    Each call takes in what the one before gave out.
    """
    fronts: list[tuple[tuple[Call, ...], Tensor]] = [((), start)]
    for _ in range(LONGEST_EXIT):
        reached = []
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
    calls: Sequence[Call], trace: Trace, layout: Layout
) -> tuple[Tap | None, int | None]:
    """Return the tap and the width of the last call of the exit that keeps the shape.

    The other calls only mix streams or change the width.
    """
    for call in reversed(calls):
        if call.into is None or call.out is None or call.into.shape != call.out.shape:
            continue
        fitting = fitting_layout(call.out, trace, layout)
        if fitting is not None:
            width = fitting.states(call.out, trace.tokens).shape[-1]
            return Tap(call.path, call.number, "output", fitting), width
    return None, None


def whole_chains(module: nn.Module, trial: Trace) -> Iterator[Chain]:
    """Yield the chains that use every call of their group. The outermost come first.

    A group is the calls of module lists of one depth, or those of modules of one class
    and depth that are in no list.
    """
    groups = [block_calls(module, trial, k + 1) for k in range(DEEPEST_LIST)]
    by_class = defaultdict(list)
    for call in trial.calls:
        part = module.get_submodule(call.path)
        parent = module.get_submodule(call.path.rpartition(".")[0])
        # A block has parts; a norm or an activation has none.
        if any(part.children()) and not isinstance(parent, nn.ModuleList):
            by_class[type(part).__name__, call.path.count(".")].append(call)
    groups += [calls for calls in by_class.values() if len(calls) > 1]
    for group in groups:
        calls = list(filter(_keeps_shape, group))
        places = {call.path.rpartition(".")[0] for call in calls}
        chains = list(linked(calls))
        if len(chains) == len(places) == 1:
            yield chains[0]


def _keeps_shape(call: Call) -> bool:
    if call.into is None or call.out is None or call.into.ndim < 3:
        return False
    return call.into.shape == call.out.shape


def prove_by_cuts(module: nn.Module, chain: Chain, trial: Trace) -> Proof:
    """Enter a pass over another text at every state.

    Raise Unproved if the other text still shows in the output.
    """
    require_changes(chain)
    texts, tokens = trial.texts, trial.tokens
    layout = next(layouts(chain.values[0], texts, tokens), None)
    if layout is None or layout.length(chain.values[0]) != tokens:
        raise Unproved(
            f"its blocks hold {list(chain.values[0].shape)} for {texts} texts of"
            f" {tokens} tokens, and not one row for each token"
        )
    device = hooks.input_device(module)
    # These are the ids of the trial.
    ids = trial_ids(module, texts, tokens).to(device)
    others = trial_ids(module, texts, tokens, seed=2).to(device)
    end = hooks.logits_in(trial.output)

    def gives(
        read: Tensor, tap: Tap | None = None, value: Tensor | None = None
    ) -> bool:
        """Tell whether a pass gives the output of the trial."""
        watches = [] if tap is None else [tap.watch(module, lambda _: value)]
        # Traced like the trial: torch's own blocks take another kernel without hooks.
        with hooks.watching(watches):
            output = trace(module, arguments(module, read)).output
        return same(hooks.logits_in(output), end)

    if end is None:
        raise Unproved("its output holds no tensor to compare")
    if not gives(ids):
        raise Unproved("a second pass over the same text gives another output")
    if gives(others):
        raise Unproved("its output does not depend on the text")
    taps = tuple(replace(tap, layout=layout) for tap in chain.taps)
    for k, (tap, value) in enumerate(zip(taps, chain.values, strict=True)):
        if not gives(others, tap, value):
            raise Unproved(
                f"layer.{k} does not decide the output: something else that matters"
                " bypasses it"
            )
    # Change the first token of the first text, and refuse rows that are no tokens'.
    ids = ids.clone()
    ids[0, 0] = others[others != ids[0, 0]][0]
    changed = trace(module, arguments(module, ids))
    first, last = trial.states_at(taps[0]), trial.states_at(taps[-1])
    if same(first[0, 0], changed.states_at(taps[0])[0, 0]):
        raise Unproved("the first row of layer.0 does not depend on the first token")
    if differs(last[1:], changed.states_at(taps[-1])[1:], steps=len(taps)):
        raise Unproved(
            "the states of a text depend on the other texts of its batch (do its"
            " modules take the axes of text and token in this order?)"
        )
    norms = _norms_after(module, chain.ended, last, trial)
    # What is no cut is not what the head reads, and `final` must be.
    if norms and not gives(others, *norms[-1]):
        norms = []
    return Proof(
        taps=taps,
        final=norms[-1][0] if norms else None,
        exit=tuple(tap.path for tap, _ in norms),
        width=last.shape[-1],
        final_width=last.shape[-1] if norms else None,
        dtype=last.dtype,
    )


def _norms_after(
    module: nn.Module, time: int, state: Tensor, trial: Trace
) -> list[tuple[Tap, Tensor]]:
    """Return the outputs of modules that norm the last state, one after another.

    A norm is taken for what it is by having no matrix: no weight is larger than the
    state.
    """
    norms = []
    for call in trial.calls:
        weights = module.get_submodule(call.path).parameters()
        has_matrix = any(weight.numel() > state.shape[-1] for weight in weights)
        if call.entered < time or has_matrix or not _keeps_shape(call):
            continue
        assert call.into is not None
        assert call.out is not None
        for layout in layouts(call.out, trial.texts, trial.tokens):
            out = layout.states(call.out, trial.tokens)
            is_fed = same(layout.states(call.into, trial.tokens), state)
            if is_fed and not same(out, state):
                norms.append((Tap(call.path, call.number, "output", layout), call.out))
                state = out
    return norms
