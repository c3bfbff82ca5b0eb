"""Pair the tensors of a program with the states of the reference.

A program is a port's module or a function that the user wrote. It is run on a few
texts, and its tensors with a row for each token are paired with sites. A table from the
caller decides. Without one, these are tried in turn: modules that are the program's
blocks; names that are sites or entries of Hugging Face's `hidden_states`; and, for
tensors without such names, their order and their correlation. Numbers that are off by
one are recognised. If a tensor and a site are both left over, that is an error. Other
sites without a tensor are named in the notes of the result.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.live_model import (
    LOGITS,
    LiveModel,
    Program,
    is_compiled,
    naming_errors,
    run_program,
)
from hiddenscope.analyses.drift.observe import ModuleCall, record_calls, rows_of
from hiddenscope.analyses.drift.story import Pairing
from hiddenscope.discovery import Stack, Tap
from hiddenscope.discovery.trace import layouts
from hiddenscope.errors import PassError, StatesError
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes import Inputs, PaddedBatch, require_recordable
from hiddenscope.sites import Site

# Tensors are paired on the first texts, up to this many tokens.
PAIRING_TOKENS = 256
# Items that an iterator may yield for one text.
MOST_ITEMS = 2000
LEAST_CORRELATION = 0.5
# By which the mean correlation must be larger before another order is believed.
CLEARLY_BETTER = 0.1
# Numbers are off by one if a shift brings nearly all tensors this many times nearer to
# the reference, and none farther from it.
NEARER, NEARLY_ALL = 4.0, 0.75
# Embeddings that differ by less, as a share of channels, are the same.
SAME = 0.05
GIVE_TABLE = "Give a table: {'layer.3': 'blocks.2'}."
_NUMBERED = re.compile(
    r"(?:output )?(?:(encoder|decoder)[._])?(layer\.|hidden_states\[)(\d+)\]?"
)


@dataclass
class Value:
    """A tensor of a program as rows [token, width], and its tap if a module made it."""

    name: str
    rows: Tensor
    tap: Tap | None = None

    def path(self, side: hooks.Side) -> str | None:
        """Return the module that it enters or leaves; None if it does not."""
        return self.tap.path if self.tap and self.tap.side == side else None


Values = dict[str, Value]
"""The value that is paired with each site."""


@dataclass
class Pairs:
    """The values paired with sites, by what they were paired, and notes on that.

    `inline` are blocks that are never called themselves, by the site that each makes.
    """

    by: str
    values: Values = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    inline: dict[str, str] = field(default_factory=dict)

    def facts(self, reference: LiveModel) -> Pairing:
        """Return the pairs; a table {site: candidate} of them can be given back."""
        taps = {str(site): str(tap) for site, tap in reference.taps.items()}
        places = {}
        for site, value in self.values.items():
            places[site] = taps.get(site, site), value.name
        return Pairing.of(self.by, places)

    def port(self, program: Program, reference: LiveModel) -> LiveModel | None:
        """Return a program as a side that can be entered, if its blocks are known."""
        module = _open_module(program)
        taps = {}
        blocks = {}
        for name, value in self.values.items():
            if value.tap is None:
                continue
            site = Site.parse(name)
            taps[site] = value.tap
            if site.layer and value.tap.side == "output":
                blocks[site] = value.tap.path
        if module is None or len(blocks) < 2:
            return None
        name = type(module).__name__
        anatomy = reference.anatomy
        pad = reference.pad
        return LiveModel(name, module, anatomy, pad, taps, blocks, is_port=True)

    def rows(
        self, program: Program, reference: LiveModel, inputs: Inputs
    ) -> dict[str, Tensor]:
        """Run a program on all texts and return its rows for each paired site."""
        values = {
            value.name: value.rows for value in values_of(program, reference, inputs)
        }
        rows = {}
        for site, value in self.values.items():
            if value.name not in values:
                reason = f"{value.name} has no row for each token of every text"
                remedy = "Pair tensors that every text gives."
                raise PassError("Cannot compare the candidate", reason, remedy)
            rows[site] = values[value.name].cpu()
        return rows


def pair_program(
    reference: LiveModel,
    program: Program,
    inputs: Inputs,
    pairing: Mapping[str, str] | str | None,
) -> Pairs:
    """Pair the tensors of a program with the reference's sites, on the first texts."""
    module = _open_module(program)
    if module is not None:
        require_recordable(module)
    tokens = 0
    count = 0
    for length in inputs.lengths:
        tokens += length
        if count and tokens > PAIRING_TOKENS:
            break
        count += 1
    texts = inputs.some(range(count))
    values = values_of(program, reference, texts)
    layers = [site for site in reference.sites if not site.part]
    singles = [texts.some([text]) for text in range(count)]
    rows = rows_of(reference, singles, layers)
    pairs = _Matcher(values, rows, reference, texts).pair(module, pairing)
    unpaired = [
        f"`{name}`" for name in rows if name not in pairs.values and name != LOGITS
    ]
    if unpaired:
        names = ", ".join(unpaired)
        pairs.notes.append(
            f"No tensor of the candidate was paired with {names}: not compared."
        )
    return pairs


def _open_module(program: Program) -> nn.Module | None:
    """Return a program as a module whose parts can be hooked, or None."""
    if isinstance(program, nn.Module) and not is_compiled(program):
        return program
    return None


@dataclass
class _Matcher:
    """Pairs values with the sites of the reference in one of several ways.

    `reference` holds its rows by site on `texts`, and `fitting` the values that have
    the shape of a state.
    """

    values: Sequence[Value]
    reference: Mapping[str, Tensor]
    model: LiveModel
    texts: Inputs

    def __post_init__(self) -> None:
        self.stacks = self.model.anatomy.stacks
        self.sites = [site for site in self.reference if site != LOGITS]
        shapes = {self.reference[site].shape for site in self.sites}
        self.fitting = [value for value in self.values if value.rows.shape in shapes]

    def pair(
        self, module: nn.Module | None, pairing: Mapping[str, str] | str | None
    ) -> Pairs:
        """Pair values with sites; nothing to pair is an error."""
        if isinstance(pairing, Mapping):
            return self._by_table(pairing)
        if pairing not in (None, "order", "auto"):
            remedy = "Give a table {site: name}, 'order' or 'auto'."
            raise StatesError("Cannot read the pairing", f"got {pairing!r}", remedy)
        if pairing == "order":
            pairs = self._in_order(())
            if pairs is None:
                reason = (
                    f"it has {len(self.fitting)} tensors of the shape of a state, and"
                    f" the reference {len(self.sites)} sites"
                )
                problem = "Cannot pair the candidate by order"
                raise StatesError(problem, reason, GIVE_TABLE)
            return pairs
        pairs = None
        if module is not None:
            pairs = self._by_blocks(module) or self._by_inline_blocks(module)
        if pairs is None:
            pairs = self._by_names()
        if pairs is None:
            pairs = self._by_correlation()
            ordered = None
            if module is None or pairing == "auto":
                ordered = self._in_order()
            if pairs is None:
                pairs = ordered
            elif ordered is not None:
                # By order, unless values fit clearly better by correlation.
                needed = self._mean_correlation(ordered.values) + CLEARLY_BETTER
                if self._mean_correlation(pairs.values) <= needed:
                    pairs = ordered
        if pairs is None:
            raise self._refusal()
        paired = pairs.values
        pairs.values = {site: paired[site] for site in self.reference if site in paired}
        return pairs

    def _by_table(self, table: Mapping[str, str]) -> Pairs:
        if not table:
            raise StatesError("Nothing to compare", "the pairing is empty", GIVE_TABLE)
        named = {value.name: value for value in self.values}
        pairs = Pairs("table")
        for site, name in table.items():
            if site not in self.reference:
                sites = ", ".join(list(self.reference)[:4])
                reason = f"the reference has {sites} and so on"
                remedy = "Give sites of the reference."
                raise StatesError(f"No site {site!r} to pair", reason, remedy)
            spellings = (name, f"output of {name}", f"output {name}")
            matches = [named[spelling] for spelling in spellings if spelling in named]
            if not matches:
                reason = f"there are {', '.join(list(named)[:6])} and so on"
                remedy = "Give one of these."
                problem = f"No tensor {name!r} in the candidate"
                raise StatesError(problem, reason, remedy)
            shape = list(matches[0].rows.shape)
            expected = list(self.reference[site].shape)
            if shape != expected:
                reason = f"it is {shape} and {site} is {expected}"
                remedy = "Pair tensors of one shape."
                raise StatesError(f"Cannot pair {name!r} with {site}", reason, remedy)
            pairs.values[site] = matches[0]
        return pairs

    def _refusal(self) -> StatesError:
        """Say why nothing could be paired."""
        shapes = sorted({tuple(value.rows.shape) for value in self.values})
        expected = list(self.reference[self.sites[0]].shape)
        problem = "Nothing to compare"
        remedy = "Give a pairing: {'layer.3': 'blocks.2'}."
        reason = (
            f"the reference's states are {expected}, and the candidate's tensors"
            f" {list(map(list, shapes[:6]))}"
        )
        if self.fitting:
            problem = "Cannot pair the candidate"
            reason = (
                f"not every one of its {len(self.fitting)} tensors of that shape"
                " correlates with a state of the reference: it gives others besides, or"
                " a fault changed some beyond recognition"
            )
            for site in self.sites:
                fits = [self._correlation(site, value) for value in self.fitting]
                if max(fits) <= LEAST_CORRELATION:
                    reason += f". None does with {site}: look there and before it"
                    break
        elif not shapes:
            reason = (
                "the candidate gave no floating-point tensor with a row for each token"
            )
            remedy = "Give a tensor [1, token, width] for each state."
        return StatesError(problem, reason, remedy)

    def _by_names(self) -> Pairs | None:
        """Pair by names that are sites or entries of Hugging Face's hidden_states."""
        pairs = Pairs("name")
        numbered: dict[str, dict[int, Value]] = defaultdict(dict)
        for value in self.values:
            match = _NUMBERED.fullmatch(value.name)
            if match is None:
                self._add(pairs.values, value.name, value)
            else:
                name, style, number = match.groups(self.stacks[-1].name)
                numbered[f"{name} {style}"].setdefault(int(number), value)
        for stack in self.stacks:
            layers = self._layers(stack)
            reported = self.model.anatomy.reported_names(stack)
            by_layer = numbered[f"{stack.name} layer."]
            by_entry = numbered[f"{stack.name} hidden_states["]
            self._add_numbered(pairs, by_layer, layers, layers)
            self._add_numbered(pairs, by_entry, reported, layers)
        return pairs if set(pairs.values) - {LOGITS} else None

    def _add(self, values: Values, site: str, value: Value) -> None:
        expected = self.reference.get(site)
        if expected is not None and expected.shape == value.rows.shape:
            values.setdefault(site, value)

    def _layers(self, stack: Stack) -> list[str]:
        """Return the layers of a stack, and final."""
        prefix = self._prefix(stack)
        starts = (f"{prefix}layer.", f"{prefix}final")
        return [site for site in self.sites if site.startswith(starts)]

    def _prefix(self, stack: Stack) -> str:
        return f"{stack.name}." if len(self.stacks) > 1 else ""

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
            # A shift must bring nearly all values nearer, and none farther.
            sites = {value.name: site for site, value in paired.items()}
            nearer = farther = 0
            for site, value in shifted.items():
                before = self._distance(sites.get(value.name, ""), value)
                after = self._distance(site, value)
                nearer += after * NEARER < before
                farther += before * NEARER < after
            if not farther and nearer > 1 and nearer >= NEARLY_ALL * len(values):
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
        if expected is None:
            return np.inf
        return _difference(expected, value.rows)

    def _in_order(self, shifts: Sequence[int] = (1, -1)) -> Pairs | None:
        """Pair by order alone: all sites, or those that Hugging Face reports."""
        stack = self.stacks[-1]
        values = dict(enumerate(self.fitting))
        for sites in (self.sites, self.model.anatomy.reported_names(stack)):
            if len(sites) == len(values) and set(sites) <= set(self.sites):
                pairs = Pairs("order")
                self._add_numbered(pairs, values, sites, self._layers(stack), shifts)
                if shifts and pairs.by == "order":
                    self._leave_out_extra(pairs, sites)
                return pairs
        return None

    def _leave_out_extra(self, pairs: Pairs, sites: Sequence[str]) -> None:
        """Leave a tensor out of the order where those after it then fit clearly better:
        one that is no state, in a program that gives no final. The last is left out if
        it is a tensor inside the reference.
        """
        values = list(pairs.values.values())
        rests = [values[:place] + values[place + 1 :] for place in range(len(values))]
        fits = [list(map(self._distance, sites, rest)) for rest in (*rests, values)]
        # Of two that are equal, the later: the last may be a final that was not normed.
        best = min(range(len(values)), key=lambda place: (sum(fits[place]), -place))
        moved = zip(fits[best][best:], fits[-1][best + 1 :], strict=True)
        reason = ""
        if any(after * NEARER < before for after, before in moved):
            reason = "by those after it"
        elif list(pairs.values)[-1].endswith("final") and self._is_inside(values[-1]):
            best, reason = len(values) - 1, "but a tensor inside it"
        if reason:
            pairs.values = dict(zip(sites, rests[best], strict=False))
            pairs.notes.append(
                f"The candidate's `{values[best].name}` is no state of the reference,"
                f" {reason}, and was left out."
            )

    def _is_inside(self, value: Value) -> bool:
        """Tell whether a value is a tensor of the reference other than its states."""
        nearest = min(self._distance(site, value) for site in self.sites)
        if nearest <= SAME:
            return False
        near = min(SAME, nearest / NEARER)
        inside = values_of(self.model.module, self.model, self.texts)
        return any(_difference(other.rows, value.rows) <= near for other in inside)

    def _by_correlation(self) -> Pairs | None:
        """Find the pairs with the largest sum of correlations.

        The result is None if a tensor and a site are left over: a fault that changed a
        state beyond recognition must not be left out.
        """
        from scipy.optimize import linear_sum_assignment

        # Modules may only pass a tensor on: of equal neighbours the first remains.
        values: list[Value] = []
        for value in self.fitting:
            is_same = bool(values) and value.rows.equal(values[-1].rows)
            if value.tap is None or not is_same:
                values.append(value)
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
        expected = self.reference[site].cpu().double()
        actual = value.rows.cpu().double()
        expected = expected - expected.mean(0)
        actual = actual - actual.mean(0)
        products = (expected * actual).sum(0)
        sizes = expected.norm(dim=0) * actual.norm(dim=0)
        return float((products / sizes).nan_to_num(0.0, 0.0, 0.0).mean())

    def _by_blocks(self, module: nn.Module) -> Pairs | None:
        """Pair by the program's blocks: as many of one kind as each stack has."""
        # Modules of one kind under one parent whose outputs are states. The outermost
        # groups come first, then those that are called first.
        called = [value.path("output") for value in self.fitting]
        called = [path for path in called if path is not None]
        siblings: dict[tuple[str, object], list[str]] = defaultdict(list)
        for path, part in module.named_modules():
            if path and _is_list(module, _parent(path)):
                siblings[_parent(path), "list"].append(path)
            if path and part._modules:
                siblings[_parent(path), type(part)].append(path)
        ranked = []
        for group in siblings.values():
            places = [called.index(path) for path in group if path in called]
            if len(group) > 1 and len(places) > len(group) / 2:
                ranked.append((group[0].count("."), min(places), group))
        groups = [group for *_, group in sorted(ranked)]
        pairs = Pairs("blocks")
        for stack in self.stacks:
            fitting = [group for group in groups if len(group) == stack.depth]
            if not fitting:
                for group in groups:
                    parent = _parent(group[0])
                    if _is_list(module, parent) and len(self.stacks) == 1:
                        reason = (
                            f"the reference has {stack.depth} blocks, and {parent} has"
                            f" {len(group)}"
                        )
                        remedy = "Give a pairing that says which are which."
                        raise StatesError("Cannot pair the blocks", reason, remedy)
                return None
            # Two stacks are as many as the blocks of a stack that has two.
            prefix = self._prefix(stack)
            choices = [self._of_blocks(group, prefix) for group in fitting]
            fits = [self._mean_correlation(values) for values in choices]
            best = int(np.argmax(fits))
            if fits[best] <= fits[0] + CLEARLY_BETTER:
                best = 0
            taken = set(fitting[best])
            groups = [other for other in groups if not set(other) & taken]
            pairs.values |= choices[best]
        return pairs

    def _by_inline_blocks(self, module: nn.Module) -> Pairs | None:
        """Pair by blocks whose parts the program calls itself, such as a ModuleDict's.

        What enters the first part of each is the state before it, unless the program
        norms it first: then the embeddings do not agree.
        """
        stack = self.stacks[-1]
        entering = [value for value in self.fitting if value.path("input")]
        called = {value.tap.path for value in self.values if value.tap}
        for path, part in module.named_modules():
            blocks = [f"{path}.{name}." for name in part._modules]
            is_group = isinstance(part, nn.ModuleList | nn.ModuleDict)
            if not is_group or len(blocks) != stack.depth:
                continue
            inside = [
                [value for value in entering if str(value.path("input")).startswith(at)]
                for at in blocks
            ]
            is_called = any(block[:-1] in called for block in blocks)
            if len(self.stacks) > 1 or is_called or not all(inside):
                continue
            after = entering[entering.index(inside[-1][-1]) + 1 :]
            states = [calls[0] for calls in inside] + after[:1]
            if self._distance("layer.0", states[0]) > SAME:
                continue
            pairs = Pairs("blocks run inline")
            for layer, state in enumerate(states):
                pairs.values[f"layer.{layer}"] = state
            for layer, block in enumerate(blocks, 1):
                pairs.inline[f"layer.{layer}"] = block[:-1]
            # What comes out of the module that reads the last state.
            for value in self.fitting:
                if after and value.path("output") == after[0].path("input"):
                    self._add(pairs.values, "final", value)
            for value in reversed(self.values):
                self._add(pairs.values, LOGITS, value)
            return pairs
        return None

    def _of_blocks(self, blocks: Sequence[str], prefix: str) -> Values:
        """Pair blocks in the order of their calls.

        If not each is called once, they are paired in the order of the list.
        """
        outputs = [value for value in self.fitting if value.path("output") in blocks]
        by_path = {str(value.path("output")): value for value in outputs}
        if len(outputs) == len(by_path) == len(blocks):
            blocks = list(by_path)
        paired: Values = {}
        for value in self.fitting:
            if value.path("input") in blocks:
                paired.setdefault(f"{prefix}layer.0", value)
        for layer, path in enumerate(blocks, 1):
            not_called = Value(
                f"output of {path}", torch.empty(0), Tap(path, 0, "output")
            )
            paired[f"{prefix}layer.{layer}"] = by_path.get(path, not_called)
        # The final norm is the output after the last block that is most like it.
        site = f"{prefix}final"
        last = outputs[-1]
        norms = []
        for value in self.fitting[self.fitting.index(last) + 1 :]:
            if value.path("output") and not value.rows.equal(last.rows):
                norms.append(value)
        if site in self.reference and norms:
            paired[site] = max(norms, key=lambda value: self._correlation(site, value))
        return paired


def _difference(expected: Tensor, actual: Tensor) -> float:
    """Return the mean relative difference of channels, or infinity."""
    if expected.shape != actual.shape:
        return np.inf
    expected = expected.cpu().double()
    actual = actual.cpu().double()
    # By channel: massive channels hardly change from layer to layer, and would hide
    # what the others do.
    sizes = actual.norm(dim=0) + expected.norm(dim=0)
    shares = (actual - expected).norm(dim=0) / sizes
    return float(shares.nan_to_num(0.0).mean())


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_list(module: nn.Module, path: str) -> bool:
    return isinstance(module.get_submodule(path), nn.ModuleList | nn.Sequential)


def values_of(program: Program, reference: LiveModel, inputs: Inputs) -> list[Value]:
    """Return the tensors with a row for each token of every text, in order.

    Each text is run by itself, on the program's device if it is a module.
    """
    model = reference
    if isinstance(program, nn.Module):
        model = replace(reference, module=program)
    texts = [
        _values_of_text(program, model.batch(inputs.some([text])))
        for text in range(len(inputs))
    ]
    values = []
    for name, first in texts[0].items():
        rows = [text[name].rows for text in texts if name in text]
        widths = {part.shape[-1] for part in rows}
        if len(rows) == len(texts) and len(widths) == 1:
            values.append(Value(name, torch.cat(rows), first.tap))
    return values


def _values_of_text(program: Program, batch: PaddedBatch) -> Values:
    """Run a program on one text and return its tensors as rows, by name."""
    lengths = [batch.ids.shape[1]]
    if batch.targets is not None:
        lengths.append(batch.targets.ids.shape[1])
    values = {}
    returned = {}

    def add(name: str, tensor: Tensor, tap: Tap | None = None) -> None:
        """Keep a tensor that has a row for each token."""
        if not tensor.is_floating_point():
            return
        for tokens in lengths:
            layout = next(layouts(tensor, 1, tokens), None)
            if layout is None:
                continue
            if layout.flat or tensor.shape[layout.token] == tokens:
                rows = layout.states(tensor, tokens)[0].cpu()
                laid_out = None if tap is None else replace(tap, layout=layout)
                values[name] = Value(name, rows, laid_out)
                return

    def run() -> None:
        with naming_errors():
            for name, tensor in named_tensors(run_program(program, batch)):
                # Copied at once: a generator may reuse one tensor for all layers.
                if set(lengths) & set(tensor.shape):
                    returned[name] = tensor.detach().to("cpu", copy=True)

    module = _open_module(program)
    prefix = ""
    if module is None:
        with autograd.restored(), torch.no_grad():
            run()
    else:
        prefix = "output "
        parts = dict(hooks.parts_of(module))
        del parts[""]
        counts: Counter[tuple[str, hooks.Side]] = Counter()
        for path, side, state in _events(record_calls(parts, run)):
            tap = Tap(path, counts[path, side], side)
            counts[path, side] += 1
            if state is not None:
                add(str(tap), state, tap)
    for name, tensor in returned.items():
        place = f"{prefix}{name}"
        add(place, tensor)
        # A tensor may hold all layers, [layer, token, width].
        is_only = len(returned) == 1 or name == "hidden_states"
        if tensor.ndim == 4 and 1 in tensor.shape[:3]:
            tensor = tensor.squeeze(tensor.shape.index(1))
        elif tensor.ndim != 3 or not is_only or 1 in tensor.shape[:2]:
            continue
        # If a text has as many tokens as there are layers, both orders are kept. Texts
        # of other lengths fit only one of them.
        if tensor.shape[1] in lengths:
            for layer, part in enumerate(tensor):
                add(f"{place}[{layer}]", part)
        if tensor.shape[0] in lengths:
            for layer, part in enumerate(tensor.unbind(1)):
                add(f"{place}[:, {layer}]", part)
    return values


def _events(
    calls: Iterable[ModuleCall],
) -> Iterator[tuple[str, hooks.Side, Tensor | None]]:
    """Yield the inputs and outputs of modules in the order of time."""
    for call in calls:
        yield call.path, "input", call.state
        yield from _events(call.inner)
        yield call.path, "output", call.output


def named_tensors(output: object, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors and arrays that a program returned, by name or by place."""
    if is_dataclass(output) and not isinstance(output, Mapping | type):
        output = vars(output)
    problem = "Cannot compare the candidate"
    if isinstance(output, Tensor):
        if output.is_meta:
            reason = "it returned a tensor on the meta device, which holds no numbers"
            raise PassError(problem, reason, "Load its weights first.")
        if output.layout != torch.strided:
            output = output.to_dense()
        # float8 cannot be computed with.
        is_float8 = output.is_floating_point() and output.dtype.itemsize == 1
        yield name or "output", output.float() if is_float8 else output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(value, str(key))
    elif isinstance(output, tuple | list | Iterator):
        for place, value in enumerate(output):
            if place == MOST_ITEMS:
                reason = f"it gives more than {MOST_ITEMS:,} things for one text"
                raise PassError(
                    problem, reason, "Give one tensor for each state, and stop."
                )
            yield from named_tensors(value, f"{name}[{place}]" if name else str(place))
    elif hasattr(output, "__array__"):
        array = np.asarray(output)
        # numpy has no bfloat16: jax's comes as a dtype of kind V.
        if array.dtype.kind in "fV":
            if array.dtype not in (np.float16, np.float32, np.float64):
                array = array.astype(np.float32)
            yield name or "output", torch.tensor(array)
