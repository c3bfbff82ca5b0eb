"""Pair the tensors of a program with the states of the reference.

A table from the caller decides. Without one, these are tried in turn: modules that are
the program's blocks; names that are sites or entries of Hugging Face's `hidden_states`;
and, for tensors without such names, their order and their correlation. Numbers that are
off by one are recognised. If a tensor and a site are both left over, that is an error.
Other sites without a tensor are named in the notes of the result.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.facts import PairFacts, PairingFacts
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel
from hiddenscope.analyses.drift.program import Value
from hiddenscope.discovery import Anatomy, Stack, Tap
from hiddenscope.errors import StatesError
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs

# Tensors are paired on the first texts, up to this many tokens.
PAIRING_TOKENS = 256
LEAST_CORRELATION = 0.5
# By which the mean correlation must be larger before another order is believed.
CLEARLY_BETTER = 0.1
# Numbers are off by one if a shift brings nearly all tensors this many times nearer to
# the reference, and none farther from it.
NEARER, NEARLY_ALL = 4.0, 0.75
_NUMBERED = re.compile(
    r"(?:output )?(?:(encoder|decoder)[._])?(layer\.|hidden_states\[)(\d+)\]?"
)
Values = dict[str, Value]
"""The value that is paired with each site."""


@dataclass
class Pairs:
    """The values paired with sites, by what they were paired, and notes on that."""

    by: str
    values: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def facts(self, reference: LiveModel) -> PairingFacts:
        """Return the pairs; a table {site: candidate} of them can be given back."""
        taps = {str(site): str(tap) for site, tap in reference.taps.items()}
        pairs = []
        for site, value in self.values.items():
            place = taps.get(site, site)
            pairs.append(PairFacts(site=site, reference=place, candidate=value.name))
        return PairingFacts(by=self.by, pairs=pairs)


def texts_for_pairing(inputs: Inputs) -> Inputs:
    """Return the first texts, on which tensors are paired."""
    tokens, count = 0, 0
    for length in inputs.lengths:
        tokens += length
        if count and tokens > PAIRING_TOKENS:
            break
        count += 1
    return inputs.some(range(count))


def pair(
    values: Sequence[Value],
    reference_rows: Mapping[str, Tensor],
    anatomy: Anatomy,
    module: nn.Module | None,
    pairing: Mapping[str, str] | str | None,
) -> Pairs:
    """Pair values with the sites of the reference; nothing to pair is an error."""
    if isinstance(pairing, Mapping):
        return _by_table(values, reference_rows, pairing)
    if pairing not in (None, "order", "auto"):
        remedy = "Give a table {site: name}, 'order' or 'auto'."
        raise StatesError("Cannot read the pairing", f"got {pairing!r}", remedy)
    matcher = _Matcher(values, reference_rows, anatomy)
    if pairing == "order":
        pairs = matcher.in_order(())
        return matcher.refuse_order() if pairs is None else pairs
    pairs = None
    if module is not None:
        pairs = matcher.by_blocks(module)
    if pairs is None:
        pairs = matcher.by_names()
    if pairs is None and (module is None or pairing == "auto"):
        pairs = matcher.by_order()
    if pairs is None:
        pairs = matcher.by_correlation()
    if pairs is None:
        matcher.refuse()
    paired = pairs.values
    pairs.values = {site: paired[site] for site in reference_rows if site in paired}
    return pairs


def _by_table(
    values: Sequence[Value], reference: Mapping[str, Tensor], table: Mapping[str, str]
) -> Pairs:
    if not table:
        remedy = "Give a table: {'layer.3': 'blocks.2'}."
        raise StatesError("Nothing to compare", "the pairing is empty", remedy)
    named = {value.name: value for value in values}
    pairs = Pairs("table")
    for site, name in table.items():
        if site not in reference:
            reason = f"the reference has {', '.join(list(reference)[:4])} and so on"
            remedy = "Give sites of the reference."
            raise StatesError(f"No site {site!r} to pair", reason, remedy)
        spellings = (name, f"output of {name}", f"output {name}")
        matches = [named[spelling] for spelling in spellings if spelling in named]
        if not matches:
            reason = f"there are {', '.join(list(named)[:6])} and so on"
            remedy = "Give one of these."
            raise StatesError(f"No tensor {name!r} in the candidate", reason, remedy)
        shape, expected = list(matches[0].rows.shape), list(reference[site].shape)
        if shape != expected:
            reason = f"it is {shape} and {site} is {expected}"
            remedy = "Pair tensors of one shape."
            raise StatesError(f"Cannot pair {name!r} with {site}", reason, remedy)
        pairs.values[site] = matches[0]
    return pairs


class _Matcher:
    """Pairs values with the sites of the reference in one of several ways.

    `fitting` are the values that have the shape of a state.
    """

    def __init__(
        self, values: Sequence[Value], reference: Mapping[str, Tensor], anatomy: Anatomy
    ) -> None:
        self.values, self.reference, self.anatomy = values, reference, anatomy
        self.sites = [site for site in reference if site != LOGITS]
        shapes = {reference[site].shape for site in self.sites}
        self.fitting = [value for value in values if value.rows.shape in shapes]

    def refuse(self) -> NoReturn:
        """Say why nothing could be paired."""
        shapes = sorted({tuple(value.rows.shape) for value in self.values})
        expected = list(self.reference[self.sites[0]].shape)
        remedy = "Give a pairing: {'layer.3': 'blocks.2'}."
        if not shapes:
            reason = (
                "the candidate gave no floating-point tensor with a row for each token"
            )
            remedy = "Give a tensor [1, token, width] for each state."
        elif self.fitting:
            reason = (
                f"not every one of its {len(self.fitting)} tensors of that shape"
                " correlates with a state of the reference"
            )
        else:
            reason = (
                f"the reference's states are {expected}, and the candidate's tensors"
                f" {list(map(list, shapes[:6]))}"
            )
        raise StatesError("Nothing to compare", reason, remedy)

    def by_names(self) -> Pairs | None:
        """Pair by names that are sites or entries of Hugging Face's hidden_states."""
        pairs = Pairs("name")
        numbered: dict[str, dict[int, Value]] = defaultdict(dict)
        for value in self.values:
            match = _NUMBERED.fullmatch(value.name)
            if match is None:
                self._add(pairs.values, value.name, value)
            else:
                name, style, number = match.groups(self.anatomy.stacks[-1].name)
                numbered[f"{name} {style}"].setdefault(int(number), value)
        for stack in self.anatomy.stacks:
            layers, reported = self._layers(stack), self._reported(stack)
            by_layer = numbered[f"{stack.name} layer."]
            by_entry = numbered[f"{stack.name} hidden_states["]
            self._add_numbered(pairs, by_layer, layers, layers)
            self._add_numbered(pairs, by_entry, reported, layers)
        return pairs if set(pairs.values) - {LOGITS} else None

    def _add(self, values: Values, site: str, value: Value) -> None:
        expected = self.reference.get(site)
        if expected is not None and expected.shape == value.rows.shape:
            values.setdefault(site, value)

    def _prefix(self, stack: Stack) -> str:
        return f"{stack.name}." if len(self.anatomy.stacks) > 1 else ""

    def _layers(self, stack: Stack) -> list[str]:
        """Return the layers of a stack, and final."""
        prefix = self._prefix(stack)
        starts = (f"{prefix}layer.", f"{prefix}final")
        return [site for site in self.sites if site.startswith(starts)]

    def _reported(self, stack: Stack) -> list[str]:
        """Return the sites that Hugging Face reports in `hidden_states`."""
        return [str(site) for site in self.anatomy.reported(stack)]

    def _add_numbered(
        self,
        pairs: Pairs,
        values: Mapping[int, Value],
        named: Sequence[str],
        layers: Sequence[str],
        shifts: Sequence[int] = (1, -1),
    ) -> None:
        """Pair numbered values with named sites, or off by one if that fits better."""
        # Hugging Face's last entry is `final`. Many ports keep the last layer before
        # the norm there, so the nearest of the two is taken.
        ends = layers[-2:]
        unsure_ends = [] if len(named) >= len(layers) else ends
        paired = self._in_places(values, named, unsure_ends)
        for shift in shifts:
            moved = {number + shift: value for number, value in values.items()}
            shifted = self._in_places(moved, layers, ends)
            if self._is_nearer(shifted, paired, len(values)):
                site, value = next(iter(shifted.items()))
                pairs.notes.append(
                    f"The candidate's numbers are off by one: its `{value.name}` was"
                    f" paired with `{site}`, and so on."
                )
                pairs.by = f"{pairs.by}, off by one"
                paired = shifted
        for site, value in paired.items():
            pairs.values.setdefault(site, value)

    def _in_places(
        self, values: Mapping[int, Value], sites: Sequence[str], ends: Sequence[str]
    ) -> Values:
        """Pair each value with the site in its place, or the nearest of the `ends`."""
        paired: Values = {}
        for place, value in sorted(values.items()):
            if not 0 <= place < len(sites):
                continue
            site = sites[place]
            if site in ends:
                site = min(ends, key=lambda end: self._distance(end, value))
            self._add(paired, site, value)
        return paired

    def _distance(self, site: str, value: Value) -> float:
        """Return the mean relative difference of channels, or infinity."""
        expected = self.reference.get(site)
        if expected is None or expected.shape != value.rows.shape:
            return np.inf
        expected, actual = expected.cpu().double(), value.rows.double()
        # By channel: massive channels hardly change from layer to layer, and would hide
        # what the others do.
        sizes = actual.norm(dim=0) + expected.norm(dim=0)
        shares = (actual - expected).norm(dim=0) / sizes
        return float(shares.nan_to_num(0.0).mean())

    def _is_nearer(
        self, shifted: Mapping[str, Value], named: Mapping[str, Value], count: int
    ) -> bool:
        """Check that a shift brings nearly all values nearer, and none farther."""
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

    def refuse_order(self) -> NoReturn:
        """Say why values cannot be paired by order."""
        reason = (
            f"it has {len(self.fitting)} tensors of the shape of a state, and the"
            f" reference {len(self.sites)} sites"
        )
        remedy = "Give a table: {'layer.3': 'blocks.2'}."
        raise StatesError("Cannot pair the candidate by order", reason, remedy)

    def by_order(self) -> Pairs | None:
        """Pair by order, unless by correlation values fit clearly better."""
        ordered, correlated = self.in_order(), self.by_correlation()
        if ordered is None or correlated is None:
            return ordered or correlated
        needed = self._mean_correlation(ordered.values) + CLEARLY_BETTER
        fit = self._mean_correlation(correlated.values)
        return correlated if fit > needed else ordered

    def by_correlation(self) -> Pairs | None:
        """Find the pairs with the largest sum of correlations.

        The result is None if a tensor and a site are left over: a fault that changed a
        state beyond recognition must not be left out.
        """
        from scipy.optimize import linear_sum_assignment

        values = _distinct(self.fitting)
        scores = np.full((len(self.sites), len(values)), -1.0)
        for i, site in enumerate(self.sites):
            for j, value in enumerate(values):
                scores[i, j] = self._correlation(site, value) - LEAST_CORRELATION
        pairs = Pairs("correlation")
        for i, j in zip(*linear_sum_assignment(scores, maximize=True), strict=True):
            if scores[i, j] > 0:
                pairs.values[self.sites[i]] = values[j]
        is_complete = len(pairs.values) == min(scores.shape)
        return pairs if pairs.values and is_complete else None

    def _mean_correlation(self, values: Values) -> float:
        correlations = [self._correlation(*pair) for pair in values.items()]
        return float(np.mean(correlations or [-1.0]))

    def _correlation(self, site: str, value: Value) -> float:
        """Return the correlation over tokens, averaged over channels.

        By channel, so that no massive channel decides it alone.
        """
        if self.reference[site].shape != value.rows.shape:
            return -1.0
        expected = _centred(self.reference[site])
        actual = _centred(value.rows)
        products = (expected * actual).sum(0)
        sizes = expected.norm(dim=0) * actual.norm(dim=0)
        return float((products / sizes).nan_to_num(0.0, 0.0, 0.0).mean())

    def by_blocks(self, module: nn.Module) -> Pairs | None:
        """Pair by the program's blocks: as many of one kind as each stack has."""
        groups = _groups(module, self.fitting)
        pairs = Pairs("blocks")
        for stack in self.anatomy.stacks:
            fitting = [group for group in groups if len(group) == stack.depth]
            if not fitting:
                self._refuse_other_depth(module, groups)
                return None
            prefix = self._prefix(stack)
            # Two stacks are as many as the blocks of a stack that has two.
            choices = [self._of_blocks(group, prefix) for group in fitting]
            fits = [self._mean_correlation(values) for values in choices]
            best = int(np.argmax(fits))
            if fits[best] <= fits[0] + CLEARLY_BETTER:
                best = 0
            taken = set(fitting[best])
            groups = [other for other in groups if not set(other) & taken]
            pairs.values |= choices[best]
        return pairs

    def _refuse_other_depth(
        self, module: nn.Module, groups: Sequence[Sequence[str]]
    ) -> None:
        """Raise if the program has a list with another number of blocks."""
        for group in groups:
            parent = _parent(group[0])
            if _is_list(module, parent) and len(self.anatomy.stacks) == 1:
                reason = (
                    f"the reference has {self.anatomy.stacks[0].depth} blocks, and"
                    f" {parent} has {len(group)}"
                )
                remedy = "Give a pairing that says which are which."
                raise StatesError("Cannot pair the blocks", reason, remedy)

    def _of_blocks(self, blocks: Sequence[str], prefix: str) -> Values:
        """Pair blocks in the order of their calls.

        If not each is called once, they are paired in the order of the list.
        """
        outputs = []
        for path, value in _values_at(self.fitting, "output"):
            if path in blocks:
                outputs.append((path, value))
        called = [path for path, _ in outputs]
        if sorted(called) == sorted(blocks):
            blocks = called
        paired: Values = {}
        for path, value in _values_at(self.fitting, "input"):
            if path in blocks:
                paired.setdefault(f"{prefix}layer.0", value)
        by_path = dict(outputs)
        for layer, path in enumerate(blocks, 1):
            not_called = Value(
                f"output of {path}", torch.empty(0), Tap(path, 0, "output")
            )
            paired[f"{prefix}layer.{layer}"] = by_path.get(path, not_called)
        # The final norm is the output after the last block that is most like it.
        site, last = f"{prefix}final", outputs[-1][1]
        later = self.fitting[self.fitting.index(last) + 1 :]
        norms = []
        for _, value in _values_at(later, "output"):
            if not value.rows.equal(last.rows):
                norms.append(value)
        if site in self.reference and norms:
            paired[site] = max(norms, key=lambda value: self._correlation(site, value))
        return paired


def _centred(rows: Tensor) -> Tensor:
    rows = rows.cpu().double()
    return rows - rows.mean(0)


def _distinct(values: Sequence[Value]) -> list[Value]:
    """Drop tensors that modules only pass on: of equal neighbours the first remains."""
    distinct: list[Value] = []
    for value in values:
        if value.tap is None or not distinct or not value.rows.equal(distinct[-1].rows):
            distinct.append(value)
    return distinct


def _values_at(values: Sequence[Value], side: hooks.Side) -> list[tuple[str, Value]]:
    """Return the values on one side of modules, with the paths of these modules."""
    at_side = []
    for value in values:
        if value.tap is not None and value.tap.side == side:
            at_side.append((value.tap.path, value))
    return at_side


def _groups(module: nn.Module, values: Sequence[Value]) -> list[list[str]]:
    """Group modules of one kind under one parent whose outputs are states.

    The outermost groups come first, then those that are called first.
    """
    called = [path for path, _ in _values_at(values, "output")]
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
