"""The faithfulness of circuits of every size, beside others of the same size."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.circuit.story import Area, CircuitReport, Other, Size
from hiddenscope.causes.contrast import Contrast
from hiddenscope.causes.encoding import AskedContrasts, ask_contrasts
from hiddenscope.causes.estimate import Effects, Method
from hiddenscope.causes.rewire import check_restored, rewire
from hiddenscope.causes.strongest import SHARE, preferring_other, strongest_edges
from hiddenscope.causes.wiring import Wiring
from hiddenscope.errors import TextError
from hiddenscope.measures.grouped import MIN_BOOTSTRAPPED, estimate
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes.sweep import logits_tolerance
from hiddenscope.progress import Advance
from hiddenscope.results import Result
from hiddenscope.results.dataset import Attributes, Coordinates, Variables, to_dataset
from hiddenscope.results.report import Estimate
from hiddenscope.states.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    import xarray

Ablation: TypeAlias = Literal["resample", "mean", "zero"]

# From as many groups, some can choose while enough for an interval test.
ENOUGH = MIN_BOOTSTRAPPED + 3
CURVES = {
    "value": "faithfulness",
    "low": "lower end of the faithfulness",
    "high": "upper end of the faithfulness",
}
SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


def find_circuit(
    model: ModelLike,
    contrasts: Contrast | Sequence[Contrast],
    *,
    ablation: Ablation,
    method: Method,
    random: int,
    seed: int,
) -> Result:
    """Rank the edges on some contrasts, and test circuits of every size on others."""
    model = as_model(model)
    asked = ask_contrasts(model, contrasts, one_form=False)
    wiring = Wiring.of(model)
    generator = np.random.default_rng(seed)
    choosing, testing = _split(asked, generator)
    trial = _Trial(model, wiring, asked, ablation)
    methods: list[Method] = [method]
    if method != "gradient":
        methods.append("gradient")
    total = len(methods) * len(choosing)
    with progress.track("Ranking edges", total=total) as advance:
        scores = trial.rank(methods, choosing, advance)
    possible = np.argwhere(wiring.possible)
    orders = {"circuit": _ranked(scores[0], possible)}
    if method != "gradient":
        orders["plain gradient"] = _ranked(scores[1], possible)
    for number in range(random):
        orders[f"random {number + 1}"] = generator.permutation(possible)
    sizes = [ceil(share * len(possible)) for share in SHARES]
    kept = np.zeros((len(orders), len(sizes), *wiring.possible.shape), dtype=bool)
    for way, order in enumerate(orders.values()):
        for number, size in enumerate(sizes):
            kept[way, number][tuple(order[:size].T)] = True
    kept = np.concatenate([kept, wiring.possible & ~kept[:1]])
    ways = [*orders, "complement"]
    rows = len(testing) * len(ways) + len(choosing)
    with progress.track("Testing circuits", total=rows * len(sizes)) as advance:
        held_out = trial.test(kept, testing, advance)
        where_chosen = held_out[:1]
        if testing is not choosing:
            where_chosen = trial.test(kept[:1], choosing, advance)
    chosen_by = np.full(wiring.possible.shape, np.nan)
    for share, of_circuit in zip(SHARES[::-1], kept[0, ::-1], strict=True):
        chosen_by[of_circuit] = share
    data = _dataset(wiring, ways, held_out, where_chosen[0], scores[0], chosen_by)
    data.attrs |= asked.texts()
    report = CircuitReport(
        contrasts=len(asked.encodings),
        groups=asked.group_count,
        copies=asked.copies,
        chosen_on=len(choosing),
        tested_on=len(testing),
        held_out=testing is not choosing,
        ablation=ablation,
        method=method,
        answers=[encoded.answers(model) for encoded in asked.encodings],
        clean=trial.clean,
        ablated=trial.ablated,
        edges=len(possible),
        sizes=_sizes(ways, sizes, held_out, where_chosen[0]),
        areas=[_area(way, held_out[k]) for k, way in enumerate(ways)],
        strongest=strongest_edges(data),
        restored=trial.restored,
        notes=[
            *dict.fromkeys(asked.notes()),
            *preferring_other([*trial.starts.values()]),
        ],
    )
    return Result("circuit", data, report, model.source(None))


class _Trial:
    """The contrasts of a question, on which edges are ranked and circuits tested.

    `clean` and `ablated` are the mean logit differences, of the tested prompts, with
    all edges kept and with none.
    """

    def __init__(
        self, model: Model, wiring: Wiring, asked: AskedContrasts, ablation: Ablation
    ) -> None:
        self.model = model
        self.wiring = wiring
        self.asked = asked
        self.ablation = ablation
        self.mean = torch.zeros(())
        self.restored = self.clean = self.ablated = 0.0
        self.starts: dict[int, float] = {}

    def rank(
        self, methods: Sequence[Method], numbers: Sequence[int], advance: Advance
    ) -> Floats:
        """Return the mean effects of all edges [method, writer, reader]."""
        scores = np.zeros((len(methods), *self.wiring.possible.shape))
        for number in numbers:
            effects = self._effects(number)
            runs = effects.runs
            written = torch.cat([runs.written, runs.other_written], 1).mean(1)
            self.mean = self.mean.to(written) + written / len(numbers)
            for row, method in enumerate(methods):
                scores[row] += effects.of_all(method, advance) / len(numbers)
        return scores

    def test(
        self, kept: Bools, numbers: Sequence[int], advance: Advance
    ) -> list[list[Estimate]]:
        """Return how faithful circuits [way, size, writer, reader] are."""
        circuits = kept.reshape(-1, *kept.shape[2:])
        changed = self.wiring.possible & ~circuits
        changed = np.concatenate([changed, self.wiring.possible[None]])
        found, spans = [], []
        allowed = clean = ablated = 0.0
        for number in numbers:
            effects = self._effects(number)
            runs = effects.runs
            if self.ablation == "mean":
                everywhere = self.mean[:, None].expand_as(runs.written)
                runs = replace(runs, other_written=everywhere)
            elif self.ablation == "zero":
                runs = replace(runs, other_written=torch.zeros_like(runs.written))
            logits = rewire(self.model, effects.stepper, runs, changed, advance)
            measures = effects.measures
            left = measures.difference(logits.double()).cpu().numpy()
            allowed += measures.rounding(logits[-1], logits_tolerance(self.model))
            found.append(left[:-1] - left[-1])
            spans.append(measures.start - left[-1])
            clean += measures.start / len(numbers)
            ablated += left[-1] / len(numbers)
        if abs(sum(spans)) <= allowed:
            remedy = "Give prompts that tell the answers apart."
            if self.ablation != "resample":
                remedy = "Use ablation='resample', or other prompts."
            raise TextError(
                "Faithfulness is a share of the difference between two runs",
                f"with no edge kept the answer is preferred by {ablated:.3g} in logits,"
                f" and with all by {clean:.3g}",
                remedy,
            )
        self.clean, self.ablated = clean, ablated
        groups = np.unique(self.asked.groups[[*numbers]], return_inverse=True)[1]
        differences = np.reshape(found, (len(numbers), *kept.shape[:2]))
        faithful = []
        for way in range(len(kept)):
            of_way = differences[:, way]
            span = np.broadcast_to(np.array(spans)[:, None], of_way.shape)
            faithful.append(estimate(of_way, groups, span))
        return faithful

    def _effects(self, number: int) -> Effects:
        encoded = self.asked.encodings[number]
        effects = Effects(self.model, self.wiring, encoded, "clean")
        off = check_restored(self.model, effects.stepper, effects.runs)
        self.restored = max(self.restored, off)
        self.starts[number] = effects.measures.start
        return effects


def _split(
    asked: AskedContrasts, generator: np.random.Generator
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the contrasts that choose edges, and those that test them.

    Of a single group all do both. Where there are enough, eight groups test: with fewer
    there is no interval.
    """
    count = asked.group_count
    if count == 1:
        everything = range(len(asked.encodings))
        return everything, everything
    few = count // 2
    if count >= ENOUGH:
        few = min(few, count - MIN_BOOTSTRAPPED)
    chooses = np.isin(asked.groups, generator.permutation(count)[:few])
    return np.flatnonzero(chooses).tolist(), np.flatnonzero(~chooses).tolist()


def _ranked(scores: Floats, possible: Ints) -> Ints:
    """Return the edges, those with the largest effects first."""
    order = np.argsort(-np.abs(scores[tuple(possible.T)]), kind="stable")
    return possible[order]


def _sizes(
    ways: Sequence[str],
    sizes: Sequence[int],
    held_out: Sequence[Sequence[Estimate]],
    where_chosen: Sequence[Estimate],
) -> list[Size]:
    listed = []
    for number, (share, size) in enumerate(zip(SHARES, sizes, strict=True)):
        others = []
        for way, of_way in zip(ways[1:], held_out[1:], strict=True):
            others.append(Other(way=way, value=of_way[number].value))
        faithful = held_out[0][number]
        listed.append(
            Size(
                value=faithful.value,
                low=faithful.low,
                high=faithful.high,
                share=share,
                edges=size,
                where_chosen=where_chosen[number].value,
                others=others,
            )
        )
    return listed


def _area(way: str, faithful: Sequence[Estimate]) -> Area:
    """Return the areas below a curve, and between it and 1, as means over the axes."""
    values = np.array([size.value for size in faithful])
    means = []
    for places in (np.array(SHARES), np.log10(SHARES)):
        for heights in (values, np.abs(1 - values)):
            area = np.trapezoid(heights, places)
            means.append(float(area / (places[-1] - places[0])))
    return Area(way=way, cpr=means[0], cmd=means[1], log_cpr=means[2], log_cmd=means[3])


def _dataset(
    wiring: Wiring,
    ways: Sequence[str],
    held_out: Sequence[Sequence[Estimate]],
    where_chosen: Sequence[Estimate],
    scores: Floats,
    chosen_by: Floats,
) -> "xarray.Dataset":
    dims = "way", "share"
    variables: Variables = {}
    for name, long_name in CURVES.items():
        values = []
        for of_way in held_out:
            values.append([getattr(size, name) for size in of_way])
        numbers = np.array(values, dtype=float)
        variable = "faithfulness" if name == "value" else name
        variables[variable] = dims, numbers, {"long_name": long_name}
    on_choosing = np.array([size.value for size in where_chosen])
    attributes: Attributes = {
        "long_name": "faithfulness on the prompts that chose the edges"
    }
    variables["where_chosen"] = dims[1:], on_choosing, attributes
    parts = "writer", "reader"
    variables["effect"] = parts, scores, {"long_name": "effect", **SHARE}
    attributes = {"long_name": "share of the smallest circuit that holds the edge"}
    variables["chosen_by"] = parts, chosen_by, attributes
    coords: Coordinates = {
        "way": list(ways),
        "share": np.array(SHARES),
        "writer": [str(site) for site in wiring.writers],
        "reader": [str(reader) for reader in wiring.readers],
    }
    return to_dataset(variables, coords)
