"""Pairing: which tensors of a candidate of somebody else's making are which states of
the reference.

A table that the caller gives decides. Without one, these are tried in turn: the modules
that are the candidate's blocks; names that are sites or entries of Hugging Face's
`hidden_states`; and for tensors without such names their order and their correlation.
Numbers that are off by one are recognised. A tensor that is left over while a site is,
is an error; other sites without a tensor are named in the notes of the result.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.candidate import Runner, Value, values_of
from hiddenscope.discovery import Anatomy, Stack, Tap
from hiddenscope.errors import StatesError
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

__all__ = ["Pairs", "Runner", "Value", "batches_for", "pair", "values_of"]

LOGITS = "logits"
PAIRING_TOKENS = 256  # of the first texts, on which tensors are paired
LEAST_CORRELATION = 0.5
CLEARLY_BETTER = (
    # By which the mean correlation must be larger before another order is believed.
    0.1
)
# Numbers are off by one if that makes nearly all tensors so many times nearer to the
# reference, and none farther.
NEARER, NEARLY_ALL = 4.0, 0.75
_NUMBERED = re.compile(
    r"(?:output )?(?:(encoder|decoder)[._])?(layer\.|hidden_states\[)(\d+)\]?"
)


class Reference(Protocol):
    """What pairing needs to know of the reference."""

    @property
    def anatomy(self) -> Anatomy: ...
    @property
    def taps(self) -> Mapping[Site, Tap]: ...
    def batch(self, inputs: Inputs) -> PaddedBatch: ...


@dataclass
class Pairs:
    """Which value of the candidate is which site, by what they were paired, and
    sentences about that.
    """

    by: str
    chosen: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def facts(self, side: Reference) -> dict[str, Any]:
        """Show the pairing; the table `{site: candidate}` of it can be given back,
        changed.
        """
        taps = {str(site): str(tap) for site, tap in side.taps.items()}
        pairs = []
        for site, value in self.chosen.items():
            pairs.append(
                {
                    "site": site,
                    "reference": taps.get(site, site),
                    "candidate": value.name,
                }
            )
        return {"by": self.by, "pairs": pairs}


def batches_for(side: Reference, inputs: Inputs) -> list[PaddedBatch]:
    """Take the first texts, one at a time, on which tensors are paired."""
    batches: list[PaddedBatch] = []
    tokens = 0
    for text, length in enumerate(inputs.lengths):
        tokens += length
        if batches and tokens > PAIRING_TOKENS:
            break
        batches.append(side.batch(inputs.some([text])))
    return batches


def pair(
    values: Sequence[Value],
    reference_rows: Mapping[str, Tensor],
    side: Reference,
    module: nn.Module | None,
    pairing: Mapping[str, str] | str | None,
) -> Pairs:
    """Pair values with the sites of the reference; nothing to pair is an error."""
    if isinstance(pairing, Mapping):
        return _by_table(values, reference_rows, pairing)
    if pairing not in (None, "order", "auto"):
        reason = f"got {pairing!r}"
        raise StatesError(
            "Cannot read the pairing",
            reason,
            "Give a table {site: name}, 'order' or 'auto'.",
        )
    matcher = _Matcher(values, reference_rows, side.anatomy)
    if pairing == "order":
        return matcher.in_order(()) or matcher.refuse_order()
    pairs = matcher.by_blocks(module) if module is not None else None
    pairs = pairs or matcher.by_names()
    if pairs is None and (module is None or pairing == "auto"):
        pairs = matcher.by_order()
    pairs = pairs or matcher.by_correlation() or matcher.refuse()
    pairs.chosen = {
        site: pairs.chosen[site] for site in reference_rows if site in pairs.chosen
    }
    return pairs


def _by_table(
    values: Sequence[Value], reference: Mapping[str, Tensor], table: Mapping[str, str]
) -> Pairs:
    named = {value.name: value for value in values}
    pairs = Pairs("table")
    for site, name in table.items():
        if site not in reference:
            reason = f"the reference has {', '.join(list(reference)[:4])} and so on"
            raise StatesError(
                f"No site {site!r} to pair", reason, "Give sites of the reference."
            )
        value = (
            named.get(name)
            or named.get(f"output of {name}")
            or named.get(f"output {name}")
        )
        if value is None:
            reason = f"there are {', '.join(list(named)[:6])} and so on"
            raise StatesError(
                f"No tensor {name!r} in the candidate", reason, "Give one of these."
            )
        if value.rows.shape != reference[site].shape:
            reason = (
                f"it is {list(value.rows.shape)} and {site} is"
                f" {list(reference[site].shape)}"
            )
            raise StatesError(
                f"Cannot pair {name!r} with {site}",
                reason,
                "Pair tensors of one shape.",
            )
        pairs.chosen[site] = value
    if not table:
        raise StatesError(
            "Nothing to compare",
            "the pairing is empty",
            "Give a table: {'layer.3': 'blocks.2'}.",
        )
    return pairs


class _Matcher:
    """Pairs values with the sites of the reference, in one way or another."""

    def __init__(
        self, values: Sequence[Value], reference: Mapping[str, Tensor], anatomy: Anatomy
    ) -> None:
        self.values, self.reference, self.anatomy = values, reference, anatomy
        self.sites = [site for site in reference if site != LOGITS]
        shapes = {reference[site].shape for site in self.sites}
        self.fitting = [value for value in values if value.rows.shape in shapes]

    def refuse(self) -> Pairs:
        """Say why nothing could be paired."""
        shapes = sorted({tuple(value.rows.shape) for value in self.values})
        expected = list(self.reference[self.sites[0]].shape)
        reason = (
            f"the reference's states are {expected}, and the candidate's tensors"
            f" {list(map(list, shapes[:6]))}"
        )
        remedy = "Give a pairing: {'layer.3': 'blocks.2'}."
        if not shapes:
            reason = (
                "the candidate gave no floating-point tensor with a row for each token"
            )
            remedy = "Give a tensor [1, token, width] for each state."
        elif self.fitting:
            count = len(self.fitting)
            reason = (
                f"not every one of its {count} tensors of that shape correlates with a"
                " state of the reference"
            )
        raise StatesError("Nothing to compare", reason, remedy)

    def by_names(self) -> Pairs | None:
        """Pair by names that are sites, or entries of Hugging Face's `hidden_states`."""
        pairs = Pairs("name")
        numbered: dict[str, dict[int, Value]] = defaultdict(dict)
        for value in self.values:
            match = _NUMBERED.fullmatch(value.name)
            if match is None:
                self._add(pairs.chosen, value.name, value)
            else:
                name, style, number = match.groups(self.anatomy.stacks[-1].name)
                numbered[f"{name} {style}"].setdefault(int(number), value)
        for stack in self.anatomy.stacks:
            layers = self._layers(stack)
            self._add_numbered(pairs, numbered[f"{stack.name} layer."], layers, layers)
            self._add_numbered(
                pairs,
                numbered[f"{stack.name} hidden_states["],
                self._reported(stack),
                layers,
            )
        return pairs if set(pairs.chosen) - {LOGITS} else None

    def _add(self, chosen: dict[str, Value], site: str, value: Value) -> None:
        if site in self.reference and self.reference[site].shape == value.rows.shape:
            chosen.setdefault(site, value)

    def _layers(self, stack: Stack) -> list[str]:
        """List the layers of a stack, and final."""
        prefix = self._prefix(stack)
        return [
            site
            for site in self.sites
            if site.startswith((f"{prefix}layer.", f"{prefix}final"))
        ]

    def _reported(self, stack: Stack) -> list[str]:
        return [str(site) for site in self.anatomy.reported(stack)]

    def _prefix(self, stack: Stack) -> str:
        return f"{stack.name}." if len(self.anatomy.stacks) > 1 else ""

    def _add_numbered(
        self,
        pairs: Pairs,
        values: Mapping[int, Value],
        named: Sequence[str],
        layers: Sequence[str],
        shifts: Sequence[int] = (1, -1),
    ) -> None:
        """Pair numbered values with named sites, or off by one where nearly all agree
        clearly better that way.
        """
        ends = layers[-2:]
        # Hugging Face's last entry is `final`; many ports keep the last layer there,
        # before the norm.
        is_exact = len(named) >= len(layers)
        chosen = self._in_places(values, named, [] if is_exact else ends)
        for shift in shifts:
            moved = {number + shift: value for number, value in values.items()}
            shifted = self._in_places(moved, layers, ends)
            if self._is_nearer(shifted, chosen, len(values)):
                site, value = next(iter(shifted.items()))
                example = f"its `{value.name}` was paired with `{site}`, and so on"
                pairs.notes.append(
                    f"The candidate's numbers are off by one: {example}."
                )
                pairs.by = f"{pairs.by}, off by one"
                chosen = shifted
        for site, value in chosen.items():
            pairs.chosen.setdefault(site, value)

    def _in_places(
        self, values: Mapping[int, Value], sites: Sequence[str], ends: Sequence[str]
    ) -> dict[str, Value]:
        """Pair each value with the site in its place; with the nearest of the `ends` if
        that is one of them.
        """
        chosen: dict[str, Value] = {}
        for place, value in sorted(values.items()):
            site = sites[place] if 0 <= place < len(sites) else ""
            if site in ends:
                site = min(ends, key=lambda end: self._distance(end, value))
            self._add(chosen, site, value)
        return chosen

    def _distance(self, site: str, value: Value) -> float:
        """Average the differences of channels, as shares of their norms; infinite if
        these cannot be compared.
        """
        expected = self.reference.get(site)
        if expected is None or expected.shape != value.rows.shape:
            return np.inf
        expected, actual = expected.cpu().double(), value.rows.double()
        # By channel: the massive ones hardly change from layer to layer, and would hide
        # what the others do.
        shares = (actual - expected).norm(dim=0) / (
            actual.norm(dim=0) + expected.norm(dim=0)
        )
        return float(shares.nan_to_num(0.0).mean())

    def _is_nearer(
        self, shifted: Mapping[str, Value], named: Mapping[str, Value], count: int
    ) -> bool:
        """Tell whether a shift makes nearly all values clearly nearer to the reference,
        and none farther.
        """
        sites = {value.name: site for site, value in named.items()}
        nearer = 0
        for site, value in shifted.items():
            before = self._distance(sites.get(value.name, ""), value)
            after = self._distance(site, value)
            if before * NEARER < after:
                return False
            nearer += after * NEARER < before
        return nearer > 1 and nearer >= NEARLY_ALL * count

    def in_order(self, shifts: Sequence[int] = (1, -1)) -> Pairs | None:
        """Pair by order alone: all sites, or those that Hugging Face reports."""
        stack = self.anatomy.stacks[-1]
        values = dict(enumerate(self.fitting))
        for sites in (self.sites, self._reported(stack)):
            if len(sites) == len(values) and set(sites) <= set(self.sites):
                pairs = Pairs("order")
                self._add_numbered(pairs, values, sites, self._layers(stack), shifts)
                return pairs
        return None

    def refuse_order(self) -> Pairs:
        """Say why values cannot be paired by order."""
        counts = (
            f"{len(self.fitting)} tensors of the shape of a state, and the reference"
            f" {len(self.sites)} sites"
        )
        remedy = "Give a table: {'layer.3': 'blocks.2'}."
        raise StatesError(
            "Cannot pair the candidate by order", f"it has {counts}", remedy
        )

    def by_order(self) -> Pairs | None:
        """Pair by order, unless by correlation values are clearly more like the
        reference.
        """
        ordered, correlated = self.in_order(), self.by_correlation()
        if ordered is None or correlated is None:
            return ordered or correlated
        is_better = (
            self._likeness(correlated) > self._likeness(ordered) + CLEARLY_BETTER
        )
        return correlated if is_better else ordered

    def by_correlation(self) -> Pairs | None:
        """Find the pairs whose correlations add up to most.

        None if a tensor is left over while a site is: what a fault has changed beyond
        recognition must not be left out.
        """
        from scipy.optimize import linear_sum_assignment

        values = _distinct(self.fitting)
        scores = np.full((len(self.sites), len(values)), -1.0)
        for i, site in enumerate(self.sites):
            for j, value in enumerate(values):
                scores[i, j] = self._correlation(site, value) - LEAST_CORRELATION
        chosen: dict[str, Value] = {}
        for i, j in zip(*linear_sum_assignment(scores, maximize=True), strict=True):
            if scores[i, j] > 0:
                chosen[self.sites[i]] = values[j]
        is_whole = len(chosen) == min(scores.shape)
        return Pairs("correlation", chosen) if chosen and is_whole else None

    def _likeness(self, pairs: Pairs) -> float:
        """Average the correlations of pairs."""
        correlations = [
            self._correlation(site, value) for site, value in pairs.chosen.items()
        ]
        return float(np.mean(correlations)) if correlations else -1.0

    def _correlation(self, site: str, value: Value) -> float:
        """Average the correlation of the channels over the tokens, so that no massive
        channel decides it alone.
        """
        if self.reference[site].shape != value.rows.shape:
            return -1.0
        expected = _centred(self.reference[site])
        actual = _centred(value.rows)
        products = (expected * actual).sum(0)
        sizes = expected.norm(dim=0) * actual.norm(dim=0)
        return float((products / sizes).nan_to_num(0.0, 0.0, 0.0).mean())

    def by_blocks(self, module: nn.Module) -> Pairs | None:
        """Pair by the modules that are the candidate's blocks: for every stack as many
        of one kind as it has blocks.
        """
        groups = _groups(module, self.fitting)
        pairs = Pairs("blocks")
        for stack in self.anatomy.stacks:
            group = next((group for group in groups if len(group) == stack.depth), None)
            if group is None:
                self._refuse_other_depth(module, groups)
                return None
            groups = [other for other in groups if not set(other) & set(group)]
            pairs.chosen |= self._of_blocks(group, self._prefix(stack))
        return pairs

    def _refuse_other_depth(
        self, module: nn.Module, groups: Sequence[Sequence[str]]
    ) -> None:
        """Refuse a list of more or fewer blocks than the reference has."""
        for group in groups:
            parent = _parent(group[0])
            if _is_list(module, parent) and len(self.anatomy.stacks) == 1:
                reason = (
                    f"the reference has {self.anatomy.stacks[0].depth} blocks, and"
                    f" {parent} has {len(group)}"
                )
                raise StatesError(
                    "Cannot pair the blocks",
                    reason,
                    "Give a pairing that says which are which.",
                )

    def _of_blocks(self, blocks: Sequence[str], prefix: str) -> dict[str, Value]:
        """Pair blocks in the order in which they are called; or, if not each is called
        once, in that of the list.
        """
        entries = [
            value for path, value in _seen(self.fitting, "input") if path in blocks
        ]
        outputs = [
            (path, value)
            for path, value in _seen(self.fitting, "output")
            if path in blocks
        ]
        called = [path for path, _ in outputs]
        if sorted(called) == sorted(blocks):
            blocks = called
        chosen = {f"{prefix}layer.0": value for value in entries[:1]}
        for layer, path in enumerate(blocks, 1):
            not_called = Value(
                f"output of {path}", torch.empty(0), Tap(path, 0, "output")
            )
            chosen[f"{prefix}layer.{layer}"] = dict(outputs).get(path, not_called)
        self._add_final(chosen, f"{prefix}final", outputs[-1][1])
        return chosen

    def _add_final(self, chosen: dict[str, Value], site: str, last: Value) -> None:
        """Pair the final norm: of what modules give after the last block, the output
        that is most like it.
        """
        later = self.fitting[self.fitting.index(last) + 1 :]
        norms = [
            value
            for _, value in _seen(later, "output")
            if not value.rows.equal(last.rows)
        ]
        if site in self.reference and norms:
            chosen[site] = max(norms, key=lambda value: self._correlation(site, value))


def _centred(rows: Tensor) -> Tensor:
    rows = rows.cpu().double()
    return rows - rows.mean(0)


def _distinct(values: Sequence[Value]) -> list[Value]:
    """Leave out what modules hand on: of equal tensors one after another, the first is
    the state.
    """
    distinct: list[Value] = []
    for value in values:
        if value.tap is None or not distinct or not value.rows.equal(distinct[-1].rows):
            distinct.append(value)
    return distinct


def _seen(values: Sequence[Value], side: hooks.Side) -> list[tuple[str, Value]]:
    """List the values that are seen on one side of a module, with its path."""
    taps = [(value.tap, value) for value in values if value.tap is not None]
    return [(tap.path, value) for tap, value in taps if tap.side == side]


def _groups(module: nn.Module, values: Sequence[Value]) -> list[list[str]]:
    """Group modules of one kind under one parent that give states, the outermost first,
    then those called first.
    """
    called = [path for path, _ in _seen(values, "output")]
    groups: dict[tuple[str, object], list[str]] = {}
    for path, part in module.named_modules():
        if path and _is_list(module, _parent(path)):
            groups.setdefault((_parent(path), "list"), []).append(path)
        if path and part._modules:
            groups.setdefault((_parent(path), type(part)), []).append(path)
    ranked = []
    for group in groups.values():
        places = [called.index(path) for path in group if path in called]
        if len(group) > 1 and len(places) > len(group) / 2:
            ranked.append((group[0].count("."), min(places), group))
    return [group for *_, group in sorted(ranked)]


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_list(module: nn.Module, path: str) -> bool:
    return isinstance(module.get_submodule(path), nn.ModuleList | nn.Sequential)
