"""The statistics of every stack, as labelled arrays and a report."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.profile.neurons import (
    NeuronStatistics,
    compare_last,
    design_tokens,
    is_neurons,
    measure_neurons,
    write_sites,
)
from hiddenscope.analyses.profile.statistics import (
    MASSIVE,
    NONE,
    RANKS,
    StackStatistics,
    stack_statistics,
)
from hiddenscope.analyses.profile.story import (
    NEURON_MEASURES,
    LargestNorm,
    LargestValue,
    LayerSimilarity,
    LeastAlike,
    MassiveActivations,
    MassiveChannel,
    MassiveToken,
    NotFinite,
    ProfileReport,
    ProfileStack,
    SiteNorms,
    Spread,
)
from hiddenscope.errors import StatesError, TextError
from hiddenscope.measures import WORTH_READING
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.passes import Inputs, Texts, resume
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    block_diagonal,
    extremes,
    site_names,
    text_array,
    to_dataset,
    token_coords,
)
from hiddenscope.sites import Site, SitePatterns, select, summarise
from hiddenscope.states import Pair, Readable, Source, States
from hiddenscope.states.arrays import AnyArray, Floats32
from hiddenscope.vectors.dataset import strings_of
from hiddenscope.vectors.pooled import pooled_as

if TYPE_CHECKING:
    import xarray

FinalNorm: TypeAlias = Literal["apart", "everywhere", "mixed"]

MOST_LISTED = 8

PER_STATE: Mapping[str, Attributes] = {
    "norm": {"long_name": "norm", "units": "L2", "scale": "log"},
    "mean": {"long_name": "mean over the width", "meaning": "diverging"},
    "deviation": {"long_name": "standard deviation over the width", "scale": "log"},
    "kurtosis": {"long_name": "kurtosis over the width", "scale": "log"},
}
PER_SITE = {
    "norm_first": "norm of the first token",
    "norm_median": "median norm of the other tokens",
    "norm_low": "lower quartile of the others' norms",
    "norm_high": "upper quartile of the others' norms",
    "mean_first": "mean over the width of the first token",
    "mean_median": "median mean over the width of the other tokens",
    "deviation_first": "standard deviation over the width of the first token",
    "deviation_median": "median standard deviation over the width of the other tokens",
    "kurtosis_first": "kurtosis over the width of the first token",
    "kurtosis_median": "median kurtosis over the width of the other tokens",
    "added_first": "what the block adds to the first token, over what it was given",
    "added_median": (
        "what the block adds to the other tokens, over what it was given, median"
    ),
    "anisotropy": "mean cosine between different tokens",
    "anisotropy_others": "mean cosine between different tokens, without first ones",
    "effective_rank": "effective rank",
    "effective_rank_others": "effective rank, without first tokens",
    "intrinsic_dimension": "intrinsic dimension",
    "intrinsic_dimension_others": "intrinsic dimension, without first tokens",
}
PER_SITE_POOLED = {
    "norm_median": "median norm of the vectors",
    "norm_low": "lower quartile of the vectors' norms",
    "norm_high": "upper quartile of the vectors' norms",
    "mean_median": "median mean over the width",
    "deviation_median": "median standard deviation over the width",
    "kurtosis_median": "median kurtosis over the width",
    "added_median": "what the block adds to a vector, over what it was given, median",
    "anisotropy": "mean cosine between different vectors",
    "effective_rank": "effective rank",
    "intrinsic_dimension": "intrinsic dimension",
}
# By the beginning of the name of a variable along the sites.
PER_SITE_ATTRIBUTES: Mapping[str, Attributes] = {
    "norm": {"units": "L2", "scale": "log"},
    "mean": {"meaning": "diverging"},
    "deviation": {"scale": "log"},
    "kurtosis": {"scale": "log"},
    "added": {"units": "share of the norm", "scale": "log"},
    "anisotropy": {"units": "cosine"},
    "effective_rank": {"units": "directions", "scale": "log"},
    "intrinsic_dimension": {"units": "directions", "scale": "log"},
}
CKA_POOLED = {
    "cka": "linear CKA",
    "cka_chance": "linear CKA if vectors were paired at random, on average",
}
CKA = {
    "cka": "linear CKA",
    "cka_others": "linear CKA, without first tokens",
    "cka_chance": "linear CKA if tokens were paired at random, on average",
}
LARGEST_VALUES = {
    "channel": "channel with a large value, the largest first",
    "channel_value": "its largest value, by size",
    "channel_times": "that over the median of all values, by size",
    "channel_text": "text of the token that has it",
    "channel_position": "position of the token that has it",
    "channel_string": "token that has it",
}


def measure_states(
    source: ModelLike | Readable | Pair,
    texts: Texts | Inputs | None,
    sites: SitePatterns,
    final_norm: FinalNorm,
    sample: int,
    targets: Texts | None,
    truncate: bool,
) -> Result:
    """Return the statistics of every state and site as a result."""
    source = as_source(source)
    captured = _states(source, texts, sites, targets, truncate)
    stacks = (
        [captured.encoder, captured.decoder]
        if isinstance(captured, Pair)
        else [captured]
    )
    selected = []
    for stack in stacks:
        # States name their sites as they were asked for, such as layer.-1.
        if isinstance(stack, States):
            selected.append(stack.select(sites=sites).sites)
        else:
            selected.append(select(sites, stack.sites))
    if final_norm == "everywhere":
        stacks[0] = _through_final_norm(source, captured, selected[0])
        selected[0] = stacks[0].sites
    statistics = []
    neurons: list[NeuronStatistics | None] = []
    with progress.track("Profiling", total=sum(map(len, selected))) as advance:
        for stack, stack_sites in zip(stacks, selected, strict=True):
            # A normed `final` is not compared with raw layers, unless that is wanted.
            compared = frozenset(stack_sites)
            raw = frozenset(site for site in stack_sites if site.layer is not None)
            if final_norm == "apart" and raw:
                compared = raw
            statistics.append(
                stack_statistics(stack, stack_sites, compared, sample, advance)
            )
    for stack, stack_sites in zip(stacks, selected, strict=True):
        neurons.append(None)
        of_neurons = tuple(filter(is_neurons, stack_sites))
        # Every row must be a token.
        if not of_neurons or pooled_as(stack) is not None:
            continue
        # A target of a decoder is a copy only where the encoder's text is one too.
        keys, *of_targets = [strings_of(other.tokens) for other in stacks]
        if of_targets:
            keys = list(map(str, zip(keys, *of_targets, strict=True)))
        design = design_tokens(stack, keys, getattr(texts, "groups", None))
        if not len(design.sizes):
            continue
        values = []
        with progress.track("Profiling neurons", total=len(of_neurons)) as advance:
            for site in of_neurons:
                values.append(measure_neurons(stack, site, design))
                advance(1)
        neurons[-1] = NeuronStatistics(of_neurons, design, np.stack(values))
    pooled = statistics[0].pooled
    word = "tokens" if pooled is None else "vectors"
    counts: dict[str, Any] = {
        word: sum(len(stack.tokens) for stack in stacks),
        f"{word}_kept": sum(stack.stored_tokens for stack in statistics),
    }
    report = ProfileReport(
        texts=stacks[0].tokens.count,
        pooled=pooled,
        computed_in="float64",
        final_norm=final_norm,
        stacks=list(map(_stack_report, statistics, neurons)),
        **counts,
    )
    data = _dataset(statistics, neurons, normed=final_norm == "everywhere")
    origin = getattr(stacks[0], "source", None)
    return Result("profile", data, report, origin if isinstance(origin, Source) else {})


def _states(
    source: object,
    texts: Texts | Inputs | None,
    sites: SitePatterns,
    targets: Texts | None,
    truncate: bool,
) -> Readable | Pair:
    if isinstance(source, Model):
        if texts is None:
            raise TextError(
                f"Cannot profile {source.name}",
                "there are no texts",
                "Give one or several.",
            )
        return source.capture(
            texts, _with_writes(source, sites), targets=targets, truncate=truncate
        )
    if texts is not None or targets is not None:
        raise TextError(
            "Cannot profile states",
            "texts were given too",
            "Leave them out, or give a model.",
        )
    if not isinstance(source, Pair | Readable):
        raise StatesError(
            "Cannot profile this",
            f"it is {type(source).__name__}",
            "Give a model, states, or what has sites, tokens and blocks().",
        )
    if not isinstance(source, Pair) and not len(source.tokens):
        raise StatesError(
            "Cannot profile these states", "there are no tokens", "Give at least one."
        )
    return source


def _with_writes(model: Model, patterns: SitePatterns) -> SitePatterns:
    """Return the sites to capture: those of neurons with what they write, and where."""
    selected = model.anatomy.select(patterns)
    needed: set[Site] = set()
    for site in filter(is_neurons, selected):
        needed.update(write_sites(site))
    if not needed:
        return patterns
    return sorted({*selected, *needed.intersection(model.anatomy.sites)})


def _through_final_norm(
    source: object, captured: object, sites: tuple[Site, ...]
) -> States:
    """Take each captured layer through the model's own final norm.

    `layer.L` is then the same as `final`.
    """
    problem = "Cannot take layers through the final norm"
    if not isinstance(source, Model) or not isinstance(captured, States):
        reason = "that takes the model, and states were given"
        if isinstance(source, Model):
            reason = "there are two stacks"
        raise StatesError(problem, reason, "Give a model of one stack and texts.")
    stack = source.anatomy.stacks[0]
    layers = tuple(site for site in sites if site.layer is not None and not site.part)
    if stack.proof.final is None or not layers:
        reason = f"{source.name} has no final norm"
        if stack.proof.final is not None:
            reason = "no whole layers were chosen"
        raise StatesError(problem, reason, "Leave final_norm='apart'.")
    raw = captured.select(sites=list(layers))
    normed = []
    for text in range(raw.tokens.count):
        states = raw.of(text)
        # Each layer enters the pass where the last does: one batch, a row for each.
        batch = [states.tokens.ids.tolist()] * len(layers)
        last = Site(stack.depth)
        run = resume(source, batch, last, states.values, "final", logits=False)
        assert isinstance(run.states, States)
        normed.append(run.states["final"].reshape(len(layers), len(states.tokens), -1))
    return States(layers, torch.cat(normed, 1), raw.tokens, raw.source)


def _dataset(
    stacks: Sequence[StackStatistics],
    neurons: Sequence[NeuronStatistics | None],
    *,
    normed: bool,
) -> "xarray.Dataset":
    """Return one Dataset; with two stacks, cells without a state are NaN."""
    pooled = any(stack.pooled is not None for stack in stacks)
    variables: Variables = {}
    for name, attributes in PER_STATE.items():
        cells = []
        for stack in stacks:
            cells.append(np.stack([site.per_state[name] for site in stack.by_site]))
        variables[name] = ("site", "token"), block_diagonal(cells), attributes
    for name, long_name in (PER_SITE_POOLED if pooled else PER_SITE).items():
        values = np.concatenate([stack.per_site(name) for stack in stacks])
        attributes = {"long_name": long_name}
        for prefix, details in PER_SITE_ATTRIBUTES.items():
            if name.startswith(prefix):
                attributes |= details
        variables[name] = "site", values, attributes
    variables |= _neuron_variables(stacks, neurons)
    # The channels with the largest values, `[site, rank]`. Where there are fewer
    # channels, the numbers are -1 or NaN and the text is empty.
    ranks = []
    for stack in stacks:
        tokens = stack.source.tokens
        for of_site in stack.by_site:
            largest, rows = of_site.largest_values, of_site.largest_values.row
            strings = text_array([tokens.strings[row] for row in rows])
            ranks.append(
                (
                    _padded(largest.channel, NONE),
                    _padded(largest.value, np.nan),
                    _padded(largest.times, np.nan),
                    _padded(tokens.text[rows], NONE),
                    _padded(tokens.positions[rows], NONE),
                    _padded(strings, ""),
                )
            )
    columns = zip(*ranks, strict=True)
    for (name, long_name), column in zip(LARGEST_VALUES.items(), columns, strict=True):
        variables[name] = ("site", "rank"), np.stack(column), long_name
    for name, long_name in (CKA_POOLED if pooled else CKA).items():
        squares = []
        for stack in stacks:
            values = getattr(stack, name)
            # Sites that were not compared are NaN.
            square = np.full((len(stack.sites), len(stack.sites)), np.nan)
            if values is not None:
                places = [stack.sites.index(site) for site in stack.compared]
                square[np.ix_(places, places)] = values.float().numpy()
            squares.append(square)
        cka = block_diagonal(squares)
        if np.isfinite(cka).any():
            variables[name] = ("site", "source_site"), cka, long_name
    attrs = {}
    # Two stacks are an encoder and a decoder, whose texts are the targets.
    for name, stack in zip(("texts", "targets"), stacks, strict=False):
        texts = stack.source.tokens.texts
        if texts is not None:
            attrs[name] = list(texts)
    names = []
    forms = []
    for stack in stacks:
        names += site_names(stack.sites)
        for site in stack.sites:
            forms.append("normed" if normed or site.layer is None else "raw")
    coords: Coordinates = {"site": names, "form": ("site", text_array(forms))}
    if "cka" in variables:
        coords["source_site"] = names
    stored = [
        stack.source.tokens.select(slice(stack.stored_tokens)) for stack in stacks
    ]
    stack_names = [str(stack.stack) for stack in stacks] if len(stacks) > 1 else []
    coords |= token_coords(stored, stack_names)
    return to_dataset(variables, coords, attrs)


def _neuron_variables(
    stacks: Sequence[StackStatistics], neurons: Sequence[NeuronStatistics | None]
) -> Variables:
    """Return every measure of neurons with its interval; other sites are NaN."""
    if not any(neurons):
        return {}
    sites: list[Site] = []
    for stack in stacks:
        sites += stack.sites
    shape = 3, len(sites), len(NEURON_MEASURES)
    columns = np.full(shape, np.nan, dtype=np.float32)
    for of_stack in filter(None, neurons):
        places = [sites.index(site) for site in of_stack.sites]
        columns[:, places] = of_stack.intervals
    variables: Variables = {}
    for number, (name, measure) in enumerate(NEURON_MEASURES.items()):
        attributes: Attributes = {"long_name": f"{measure.words} of neurons"}
        if measure.factor:
            attributes["scale"] = "log"
        for end, values in zip(("", "_low", "_high"), columns, strict=True):
            variables[f"{name}{end}"] = "site", values[:, number], attributes
    return variables


def _padded(column: AnyArray, empty: int | float | str) -> AnyArray:
    padded = np.full(RANKS, empty, dtype=column.dtype)
    padded[: len(column)] = column
    return padded


def _stack_report(
    stack: StackStatistics, neurons: NeuronStatistics | None
) -> ProfileStack:
    """Report one stack, as far as there is anything to say."""
    layers = [place for place, site in enumerate(stack.sites) if site.layer is not None]
    quarter = len(layers) // 4
    middle = layers[quarter : len(layers) - quarter]
    spreads: dict[str, Any] = {}
    for name in ("anisotropy", "effective_rank"):
        columns = {"all_tokens": name, "other_tokens": f"{name}_others"}
        if stack.pooled is not None:
            columns = {"all_vectors": name}
        medians = {
            key: _median(stack.per_site(column)[middle])
            for key, column in columns.items()
        }
        if any(median is not None for median in medians.values()):
            spreads[name] = Spread(**medians)
    dimension = "intrinsic_dimension"
    if stack.pooled is None:
        dimension = "intrinsic_dimension_others"
    largest, massive = _massive(stack)
    # The state with the largest norm, and the first that is not finite.
    fields: dict[str, Any] = {}
    sites = list(zip(stack.sites, stack.by_site, strict=True))
    at, numbers = max(sites, key=lambda pair: pair[1].highest)
    if numbers.largest != NONE:
        row = _row(stack, numbers.largest)
        fields["largest_norm"] = LargestNorm(norm=numbers.highest, site=str(at), **row)
    broken = [(at, numbers) for at, numbers in sites if numbers.not_finite]
    if broken:
        at, numbers = broken[0]
        fields["not_finite"] = NotFinite(
            states=sum(numbers.not_finite for _, numbers in broken),
            site=str(at),
            **_row(stack, numbers.first_not_finite),
        )
    return ProfileStack(
        stack=stack.stack,
        few_tokens=stack.counts[1] < WORTH_READING,
        **_norms(stack, middle),
        **fields,
        **spreads,
        intrinsic_dimension=extremes(stack.sites, stack.per_site(dimension)),
        added=extremes(stack.sites, stack.per_site("added_median")),
        largest_value=largest,
        massive_activations=massive,
        cka=_similarity(stack),
        neurons=None if neurons is None else compare_last(neurons),
    )


def _median(values: Floats32) -> float | None:
    """Return the median of the finite values, None if there are none."""
    values = values[np.isfinite(values)]
    return float(np.median(values)) if len(values) else None


def _norms(stack: StackStatistics, middle: list[int]) -> dict[str, Any]:
    """Return the norms over the middle layers and around the final norm."""
    if not middle:
        return {}
    names = {"first_token_norm": "norm_first", "other_tokens_norm": "norm_median"}
    if stack.pooled is not None:
        names = {"vector_norm": "norm_median"}
    columns = {key: stack.per_site(name) for key, name in names.items()}
    fields: dict[str, Any] = {}
    for name, column in columns.items():
        norm = float(np.median(column[middle]))
        if np.isfinite(norm):
            fields[name] = norm
    others = fields.get("other_tokens_norm", 0.0)
    if others > 0 and "first_token_norm" in fields:
        fields["norm_ratio"] = fields["first_token_norm"] / others
    fields["middle_layers"] = summarise([stack.sites[place] for place in middle])
    if stack.sites[-1].layer is None:
        for key, place in (("before_final", -2), ("at_final", -1)):
            norms = {
                name: float(column[place])
                for name, column in columns.items()
                if np.isfinite(column[-2:]).all()
            }
            fields[key] = SiteNorms(site=str(stack.sites[place]), **norms)
    return fields


def _row(stack: StackStatistics, row: int) -> dict[str, Any]:
    """Name a row by its token, or by its text where states are pooled."""
    tokens = stack.source.tokens
    if stack.pooled is None:
        return {"token": tokens.strings[row]}
    return {"text": int(tokens.text[row])}


def _massive(
    stack: StackStatistics,
) -> tuple[LargestValue | None, MassiveActivations | None]:
    """Return the largest value of all, and the massive activations."""
    tokens = stack.source.tokens
    largest = None
    highest = -np.inf
    for site, numbers in zip(stack.sites, stack.by_site, strict=True):
        values = numbers.largest_values
        # No comparison with NaN is true.
        if len(values.times) and highest < values.times[0] < np.inf:
            highest = float(values.times[0])
            row = int(values.row[0])
            position = int(tokens.positions[row])
            largest = LargestValue(
                times_median=highest,
                site=str(site),
                channel=int(values.channel[0]),
                **_row(stack, row),
                position=position if stack.pooled is None else None,
            )
    massive = [numbers.massive for numbers in stack.by_site]
    rows, channels = np.concatenate(massive, axis=1)
    if largest is None or not len(rows):
        return largest, None
    pairs = zip(stack.sites, massive, strict=True)
    at_tokens: dict[str, Any] = {}
    if stack.pooled is None:
        strings = Counter(tokens.strings[row] for row in rows)
        at_tokens["at_first_tokens"] = int((tokens.positions[rows] == 0).sum())
        at_tokens["tokens"] = [
            MassiveToken(token=token, values=count)
            for token, count in strings.most_common(MOST_LISTED)
        ]
    return largest, MassiveActivations(
        threshold=MASSIVE,
        values=len(rows),
        channels=[
            MassiveChannel(channel=channel, values=count)
            for channel, count in Counter(channels.tolist()).most_common(MOST_LISTED)
        ],
        sites=summarise([site for site, places in pairs if places.size]),
        **at_tokens,
    )


def _similarity(stack: StackStatistics) -> LayerSimilarity | None:
    """Return the median CKA of all pairs of layers, and the least similar pair."""
    if stack.cka is None or len(stack.compared) < 2:
        return None
    upper = torch.ones_like(stack.cka).triu(1).bool()
    matrices = {"median": stack.cka, "median_by_chance": stack.cka_chance}
    fields: dict[str, Any] = {"sampled_vectors": stack.counts[0]}
    if stack.pooled is None:
        fields = {"sampled_tokens": stack.counts[0]}
        matrices["median_other_tokens"] = stack.cka_others
    for key, matrix in matrices.items():
        if matrix is not None:
            fields[key] = _median(matrix[upper].numpy())
    values = stack.cka if stack.cka_others is None else stack.cka_others
    pairs = torch.where(upper & values.isfinite(), values, torch.inf)
    if pairs.isfinite().any():
        row, column = np.unravel_index(int(pairs.argmin()), pairs.shape)
        fields["least_alike"] = LeastAlike(
            site=str(stack.compared[row]),
            source_site=str(stack.compared[column]),
            cka=float(pairs[row, column]),
        )
    return LayerSimilarity(**fields)
