"""Cuts: the proof for a module that reports no hidden states.

A state is a cut if the rest of the pass depends on the text only through it: put into
a pass over another text, it turns the output into that of its own text, bit for bit.
Blocks are a stack if each takes in what the one before gave out and every state between
them is a cut. A connection that skips blocks would be seen, because it still carries
the other text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from hiddenscope.discovery.blocks import differs
from hiddenscope.discovery.proof import (
    DEEPEST_LIST,
    Chain,
    Proof,
    Unproved,
    block_calls,
    linked,
    require_changes,
    same,
)
from hiddenscope.discovery.taps import Tap, layouts
from hiddenscope.discovery.trace import Call, Trace, arguments, trace
from hiddenscope.discovery.vocabulary import trial_ids
from hiddenscope.modules import hooks


def whole_chains(module: nn.Module, trial: Trace) -> Iterator[Chain]:
    """Yield the chains that use every call of their group. The outermost come first.

    A group is the calls of module lists of one depth, or those of modules of one class
    and depth that are in no list.
    """
    groups = [block_calls(module, trial, k + 1) for k in range(DEEPEST_LIST)]
    by_class: dict[tuple[str, int], list[Call]] = defaultdict(list)
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
    _check_rows(module, trial, taps, ids.clone(), others)
    last = trial.states_at(taps[-1])
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


def _check_rows(
    module: nn.Module,
    trial: Trace,
    taps: tuple[Tap, ...],
    ids: Tensor,
    others: Tensor,
) -> None:
    """Change the first token of the first text; refuse rows that are no tokens'."""
    ids[0, 0] = others[others != ids[0, 0]][0]
    changed = trace(module, arguments(module, ids))
    first, last = taps[0], taps[-1]
    if same(trial.states_at(first)[0, 0], changed.states_at(first)[0, 0]):
        raise Unproved("the first row of layer.0 does not depend on the first token")
    before, after = trial.states_at(last)[1:], changed.states_at(last)[1:]
    if differs(before, after, steps=len(taps)):
        raise Unproved(
            "the states of a text depend on the other texts of its batch (do its"
            " modules take the axes of text and token in this order?)"
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
