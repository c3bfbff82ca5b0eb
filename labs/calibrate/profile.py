"""Profile: intervals of the neurons of a layer over texts, and whether the last of
layers that are alike is said to be apart.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import torch

from hiddenscope.analyses.profile.neurons import (
    NeuronStatistics,
    compare_last,
    design_tokens,
    measure_neurons,
)
from hiddenscope.analyses.profile.story import NEURON_MEASURES
from hiddenscope.sites import Site
from hiddenscope.states import Source, States, Tokens
from hiddenscope.states.arrays import Floats
from labs.calibrate.trials import Claim, Experiment, Study, each

TOKENS, NEURONS, TYPES = 20, 16, 8
SCALE, TAIL = 0.3, 0.3
# How much groups of texts differ: the deviation of the logarithm of their activations.
BETWEEN = 0.15
PLANTED = 2.0
NAN = float("nan")

Layers = Literal["equal", "differ", "walk", "planted"]


class Findings(NamedTuple):
    """What one run found: the last four are 1 where any measure is said to be apart,
    or the planted one. `kurtosis` has the logarithms of the value and the ends of each
    layer, where layers have the same.
    """

    activation: float
    kurtosis: Floats | None
    sparseness: float
    previous: float
    trend: float
    walk: float
    found: float


def trial(seed: int, layers: Layers, depth: int, groups: Sequence[int]) -> Findings:
    """Measure neurons whose activations have a known distribution in every layer."""
    generator = np.random.default_rng(seed)
    scales, tails = _layers(generator, layers, depth)
    text_group = np.repeat(np.arange(len(groups)), groups)
    token_text = np.repeat(np.arange(len(text_group)), TOKENS)
    values = []
    for scale, tail in zip(scales, tails, strict=True):
        shape = len(token_text), NEURONS
        sizes = scale + tail * generator.normal(size=shape)
        sizes += (
            BETWEEN * generator.normal(size=len(groups))[text_group][token_text, None]
        )
        values.append(np.exp(sizes) * generator.normal(size=shape))
    sites = tuple(Site(layer, "mlp.neurons") for layer in range(1, depth + 1))
    ids = generator.integers(TYPES, size=len(token_text))
    tokens = Tokens(
        None,
        token_text,
        np.tile(np.arange(TOKENS), len(text_group)),
        ids,
        [str(token) for token in ids],
    )
    states = States(sites, torch.from_numpy(np.stack(values)), tokens, Source("drawn"))
    names = [[text] for text in range(len(text_group))]
    design = design_tokens(states, names, text_group.tolist())
    measured = np.stack([measure_neurons(states, site, design) for site in sites])
    return _findings(NeuronStatistics(sites, design, measured), scales, tails, layers)


def _layers(
    generator: np.random.Generator, layers: Layers, depth: int
) -> tuple[Floats, Floats]:
    """Return the logarithm of the scale, and the tail, of each layer."""
    scales, tails = SCALE * generator.normal(size=(2, depth))
    if layers in ("equal", "planted"):
        scales, tails = np.zeros((2, depth))
    if layers == "walk":
        scales, tails = scales.cumsum() / 2, tails.cumsum() / 4
    if layers == "planted":
        scales[-1] = np.log(PLANTED)
    return scales, TAIL * np.exp(tails)


def _findings(
    statistics: NeuronStatistics, scales: Floats, tails: Floats, layers: Layers
) -> Findings:
    """Compare the intervals with the moments of a normal times a lognormal number."""
    spread = tails**2 + BETWEEN**2
    truths = {
        "neuron_activation": np.sqrt(2 / np.pi) * np.exp(scales + spread / 2),
        "neuron_sparseness": 1 - 2 / np.pi * np.exp(-spread),
    }
    names = list(NEURON_MEASURES)
    _, low, high = statistics.intervals
    held = []
    for name, truth in truths.items():
        column = names.index(name)
        inside = (low[:, column] <= truth) & (truth <= high[:, column])
        held.append(float(inside.mean()))
    kurtosis = None
    if layers == "equal":
        column = names.index("neuron_kurtosis")
        kurtosis = np.log([ends[:, column] for ends in statistics.intervals])
    profile = compare_last(statistics)
    apart = []
    for gaps in (profile.against_previous, profile.against_trend):
        apart.append(float(any(gap.verdict != "undecided" for gap in gaps)))
    previous, trend = apart
    found = NAN
    if layers == "planted":
        verdicts = {gap.measure: gap.verdict for gap in profile.against_trend}
        found = float(verdicts["neuron_activation"] == "more")
    return Findings(
        held[0],
        kurtosis,
        held[1],
        previous if layers == "equal" else NAN,
        trend if layers in ("equal", "differ") else NAN,
        trend if layers == "walk" else NAN,
        found,
    )


def sum_up(records: Sequence[Findings]) -> Mapping[str, Sequence[float]]:
    columns = {
        key: [getattr(record, key) for record in records]
        for key in Findings._fields
        if key != "kurtosis"
    }
    # The kurtosis of a sample is lower than that of all text, so an interval is about
    # what samples of this size have on average.
    known = [record.kurtosis for record in records if record.kurtosis is not None]
    if known:
        mean = np.mean([value for value, _, _ in known])
        columns["kurtosis"] = [
            float(((low <= mean) & (mean <= high)).mean()) for _, low, high in known
        ]
    return columns


SINGLE = (1,) * 40
CONDITIONS: dict[str, tuple[Layers, int, Sequence[int]]] = {
    "12 equal layers, 40 texts": ("equal", 12, SINGLE),
    "12 equal layers, 10 groups of 4 texts": ("equal", 12, (4,) * 10),
    "12 equal layers, 20 groups of 1 to 20 texts": (
        "equal",
        12,
        tuple(max(1, 20 // rank) for rank in range(1, 21)),
    ),
    "12 equal layers, 20 pairs of texts": ("equal", 12, (2,) * 20),
    "6 equal layers, 40 texts": ("equal", 6, SINGLE),
    "6 layers that differ by chance, 40 texts": ("differ", 6, SINGLE),
    "12 layers that differ by chance, 40 texts": ("differ", 12, SINGLE),
    "24 layers that differ by chance, 40 texts": ("differ", 24, SINGLE),
    "24 layers that wander, 40 texts": ("walk", 24, SINGLE),
    "12 equal layers, the last twice as strong, 40 texts": ("planted", 12, SINGLE),
}

STUDY = Study(
    "profile",
    f"Texts of {TOKENS} tokens, {NEURONS} neurons: normal times lognormal activations,"
    " with a part that a group of texts has in common.\nLayers are equal, differ by"
    " chance around no trend, or wander from layer to layer. The kurtosis is that of"
    " samples of\nthis size, which is lower than that of endless text.",
    {
        "activation": Claim("the 95% interval holds the mean activation", 0.93),
        "kurtosis": Claim("it holds the mean kurtosis of such samples", 0.93),
        "sparseness": Claim("it holds the sparseness", 0.93),
        "previous": Claim(
            "the last is said to be apart from an equal one before", high=0.05
        ),
        "trend": Claim("the last is said to be apart from the trend", high=0.05),
        "walk": Claim("the same, of layers that wander"),
        "found": Claim("a last layer that is twice as strong is said to be", low=0.95),
    },
    [
        Experiment(
            what,
            each(partial(trial, layers=layers, depth=depth, groups=groups)),
            sum_up,
        )
        for what, (layers, depth, groups) in CONDITIONS.items()
    ],
)
