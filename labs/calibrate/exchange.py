"""Exchange: whether labels that mean nothing are taken for more where they are not
exchangeable at will: they go with the size of groups, come in runs, or drift in time.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.linear.probe import Task
from hiddenscope.states.arrays import Floats
from labs.calibrate.draws import Drawn
from labs.calibrate.probe import labels_of, states_of
from labs.calibrate.trials import Claim, Experiment, Study, each

SITES, WIDTH = 3, 16
LENGTHS = tuple(range(8, 32, 2))
PLANTED = 1.0  # half the distance of the classes
Draw = Callable[[np.random.Generator], Drawn]


class Said(NamedTuple):
    """What `hs.probe` and `hs.project` said in one run; NaN where it does not apply."""

    above: float
    apart: float
    control: float
    untested: float
    serial: float
    excluded: float
    ends: float


def drawn(
    states: Floats,
    targets: Floats,
    groups: Sequence[int] | None = None,
    as_tokens: bool = False,
) -> Drawn:
    """States with targets, and nothing fresh."""
    nothing = torch.empty(0)
    names = None if groups is None else tuple(groups)
    values = torch.from_numpy(states).float()
    return Drawn(
        values, torch.from_numpy(targets), nothing, nothing, 1, names, as_tokens
    )


def sized(random: np.random.Generator, sizes: tuple[int, int, int, int]) -> Drawn:
    """This many groups of one size and class, and this many of another; half of the
    variance of a text is that of its group.
    """
    few, large, many, small = sizes
    groups = np.repeat(np.arange(few + many), [large] * few + [small] * many)
    return drawn(
        _of_groups(random, groups), (groups >= few).astype(int), groups.tolist()
    )


def lengths(random: np.random.Generator, follows: float, planted: float) -> Drawn:
    """Tokens of 40 texts whose class goes with their length, by a logistic law."""
    counts = random.integers(5, 25, size=40)
    scaled = (counts - counts.mean()) / counts.std()
    classes = (random.random(40) < 1 / (1 + np.exp(-follows * scaled))).astype(int)
    groups = np.repeat(np.arange(40), counts)
    states = _of_groups(random, groups)
    states[:, :, 0] += planted * (2 * classes[groups] - 1)
    return drawn(states, classes[groups], groups.tolist(), True)


def runs(random: np.random.Generator, memory: float, planted: float) -> Drawn:
    """Tokens of 12 texts of many lengths, whose labels and states both change slowly."""
    parts = [autoregression(random, n, SITES * WIDTH + 1, memory) for n in LENGTHS]
    walks = np.concatenate(parts)
    labels = (walks[:, 0] > 0).astype(int)
    states = walks[:, 1:].reshape(-1, SITES, WIDTH).swapaxes(0, 1).copy()
    states[:, :, 0] += planted * (2 * labels - 1)
    return drawn(states, labels, np.repeat(np.arange(12), LENGTHS).tolist(), True)


def series(
    random: np.random.Generator, texts: int, memory: float, classes: bool
) -> Drawn:
    """Texts in an order of time: labels and states are walks that know nothing of one
    another, random walks if the memory is 1.
    """
    walks = autoregression(random, texts, SITES * WIDTH + 1, memory)
    states = walks[:, 1:].reshape(texts, SITES, WIDTH).swapaxes(0, 1)
    labels = walks[:, 0]
    if classes:
        labels = (labels > np.median(labels)).astype(int)
    return drawn(states.copy(), labels)


def in_order(
    random: np.random.Generator, texts: int, planted: float, classes: bool
) -> Drawn:
    """Independent texts, sorted by their labels."""
    states = random.standard_normal((SITES, texts, WIDTH))
    labels = np.sort(random.standard_normal(texts))
    if classes:
        labels = (np.arange(texts) * 2 // texts).astype(int)
    states[:, :, 0] += planted * (labels - labels.mean()) / labels.std()
    return drawn(states, labels)


def autoregression(
    random: np.random.Generator, count: int, width: int, memory: float
) -> Floats:
    """Numbers `[count, width]` that remember the one before; 1 is a random walk."""
    steps = random.standard_normal((count, width))
    if memory == 1:
        return steps.cumsum(0)
    for before, step in zip(steps, steps[1:], strict=False):
        step *= (1 - memory**2) ** 0.5
        step += memory * before
    return steps


def _of_groups(random: np.random.Generator, groups: np.ndarray) -> Floats:
    shared = random.standard_normal((SITES, groups.max() + 1, WIDTH))[:, groups]
    return (shared + random.standard_normal(shared.shape)) / 2**0.5


def trial(seed: int, draw: Draw) -> Said:
    """Ask both analyses about one draw."""
    given = draw(np.random.default_rng(seed))
    task: Task = "regress" if given.targets.is_floating_point() else "classify"
    states = states_of(given, seed)
    labels = labels_of(given, states)
    source = hs.each_token(states) if given.as_tokens else states
    facts = hs.probe(source, labels, task=task, seed=seed).facts
    best, apart = facts["best"], float("nan")
    if task == "classify":
        projected = hs.project(source, labels, method="pca", seed=seed)
        (part,) = projected.facts["parts"]
        apart = float(bool(part["separation"]["apart_at"]))
    control = float("nan") if best["control"] is None else best["control"]
    low = -np.inf if best["interval"] is None else best["interval"][0]
    return Said(
        float(bool(facts["above_chance_at"])),
        apart,
        control if task == "classify" else float("nan"),
        float(best["p"] is None),
        float("serial_inflation" in facts),
        float(low > (0.0 if task == "regress" else 0.5)),
        float(best["interval"] is not None),
    )


def sum_up(records: Sequence[Said], planted: bool) -> Mapping[str, Sequence[float]]:
    columns = {name: [getattr(one, name) for one in records] for name in Said._fields}
    if planted:
        columns["found"] = columns.pop("above")
        columns["found_apart"] = columns.pop("apart")
        del columns["excluded"]
    return columns


def experiment(what: str, draw: Draw, planted: bool = False) -> Experiment:
    return Experiment(
        what, each(partial(trial, draw=draw)), partial(sum_up, planted=planted)
    )


SIZES = ((4, 10, 20, 2), (10, 4, 20, 2), (6, 5, 12, 3), (12, 4, 12, 4))
STUDY = Study(
    "exchange",
    f"{SITES} independent sites of {WIDTH} channels of noise, with meaningless labels"
    " that go with the size of groups, come in\nruns as the states do, or drift along"
    " the order of the texts as the states do; then independent texts sorted by label,"
    "\nwhich must not be flagged, and labels that a direction tells.",
    {
        "above": Claim("the probe calls a site above chance that is not", 0.0, 0.05),
        "apart": Claim("project calls classes apart that are not", 0.0, 0.05),
        "excluded": Claim("the best site's interval excludes chance", 0.0, 0.05),
        "ends": Claim("it has an interval"),
        "found": Claim("the probe finds what is planted"),
        "found_apart": Claim("project finds it"),
        "control": Claim("accuracy on control labels"),
        "untested": Claim("there is no p-value"),
        "serial": Claim("a drift is told"),
    },
    [
        experiment(
            f"{few} groups of {large} against {many} of {small}",
            partial(sized, sizes=(few, large, many, small)),
        )
        for few, large, many, small in SIZES
    ]
    + [
        experiment(
            "longer texts are more often of one class",
            partial(lengths, follows=1.0, planted=0.0),
        ),
        experiment(
            "longer texts are more often of one class, planted",
            partial(lengths, follows=1.0, planted=PLANTED),
            planted=True,
        ),
    ]
    + [
        experiment(
            f"labels in runs, memory {memory}{', planted' if planted else ''}",
            partial(runs, memory=memory, planted=planted),
            planted > 0,
        )
        for memory, planted in ((0.95, 0.0), (0.8, 0.0), (0.8, PLANTED))
    ]
    + [
        experiment(
            f"{'classes' if classes else 'numbers'} in time, {name}, {texts} texts",
            partial(series, texts=texts, memory=memory, classes=classes),
        )
        for texts in (40, 100)
        for name, memory in (("random walks", 1.0), ("memory 0.8", 0.8))
        for classes in (False, True)
    ]
    + [
        experiment(
            f"{'classes' if classes else 'numbers'} in order"
            f"{', planted' if planted else ''}",
            partial(in_order, texts=60, planted=planted, classes=classes),
            planted > 0,
        )
        for planted in (0.0, PLANTED)
        for classes in (False, True)
    ],
)
