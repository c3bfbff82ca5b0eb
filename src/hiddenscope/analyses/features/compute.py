"""What features say of states and of the loss, beside what simpler directions say.

Whatever is fitted here is fitted to one half of the texts and scored on the other.
First tokens and massive states are left out: they would outweigh all others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import rankdata
from torch import Tensor

from hiddenscope.analyses.features.story import (
    Comparison,
    Feature,
    FeaturesReport,
    Score,
)
from hiddenscope.directions.dictionary import (
    Dictionary,
    principal_components,
    random_directions,
)
from hiddenscope.directions.encoding import largest
from hiddenscope.directions.layouts import site_of
from hiddenscope.errors import (
    Error,
    FileError,
    PassError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures import RunningStatistics
from hiddenscope.measures.grouped import effective_count, estimate, group_sums
from hiddenscope.measures.massive import is_massive, length_limit
from hiddenscope.model import Model, as_source
from hiddenscope.passes import Inputs, Pass, Replace, edit, resume
from hiddenscope.passes.edit import plan
from hiddenscope.passes.losses import batch_size, measure_losses
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Result
from hiddenscope.results.dataset import text_array, to_dataset, token_coords
from hiddenscope.results.report import Estimate
from hiddenscope.sites import Site
from hiddenscope.states import Pair
from hiddenscope.states.arrays import Bools, Floats, Ints
from hiddenscope.states.pooling import refuse_pooled
from hiddenscope.texts.groups import copy_key, merged_groups
from hiddenscope.vectors.dataset import (
    Dataset,
    dataset_of,
    labels_of_states,
    refuse_missing,
    strings_of,
    texts_of,
)
from hiddenscope.vectors.pooled import read_vectors

# Rows that are encoded at a time: each may have a hundred thousand activations.
ROWS = 512
LISTED, WORDS = 10, 5
PROBLEM = "Cannot measure these features"
# Dictionaries that a word names: 32 components, or as many of 8 times as many random
# directions as states are wide.
MADE: dict[str, Callable[[RunningStatistics, str], Dictionary]] = {
    "pca": lambda fit, site: principal_components(fit, 32, site),
    "random": lambda fit, site: random_directions(
        fit, 8 * len(fit.mean), min(32, len(fit.mean)), site, 0
    ),
}
NAMES = {
    "unexplained": "left unexplained",
    "active": "active features",
    "share": "share of what is written",
    "activation": "activation",
    "strongest": "strongest features",
    "tokens": "tokens on which it acts",
    "written": "what it writes in all",
}


class Sample(NamedTuple):
    """States of texts, and the rows that count; the half and the group of each text."""

    states: Any
    inputs: Inputs | None
    labels: Any
    rows: Ints
    text: Ints
    half: Ints
    groups: Ints

    def at(self, site: str) -> Tensor:
        """Return the rows of a site that count."""
        blocks = read_vectors(self.states, Site.parse(site), None, "device")
        return torch.cat(list(blocks))[self.rows].float()

    def statistics(self, rows: Tensor) -> list[RunningStatistics]:
        """Return the statistics of the rows that each half of the texts leaves."""
        both = [RunningStatistics(), RunningStatistics()]
        for half, statistics in enumerate(both):
            statistics.add(rows[self.half[self.text] != half])
        return both

    def by_text(self, rows: Tensor) -> Floats:
        """Add up the rows of each text."""
        return group_sums(rows.double().cpu().numpy(), self.text)

    def say(self, inputs: Tensor, by_half: Sequence[Any], outputs: Tensor) -> Tensor:
        """Return what is said in place of outputs, by what fits the other half."""
        said = torch.empty_like(outputs)
        for half, way in enumerate(by_half):
            rows = torch.from_numpy(np.flatnonzero(self.half[self.text] == half))
            for part in torch.split(rows, ROWS):
                said[part] = way.reconstruct(inputs[part])
        return said

    def compare(
        self, measure: str, ways: Iterable[str], tops: Floats, bottoms: Floats
    ) -> Comparison:
        """Return a number of every way, and how far the first is above the others."""
        numbers = estimate(tops, self.groups, bottoms)
        gaps = estimate(tops[:, :1] - tops[:, 1:], self.groups, bottoms)
        scores = []
        for way, number, gap in zip(ways, numbers, [None, *gaps], strict=True):
            scores.append(Score(way=way, gap=gap, **vars(number)))
        return Comparison(measure=measure, scores=scores)


class Neurons(NamedTuple):
    """Neurons, of which those count that are farthest from their mean in what they
    write; the others are at their mean.
    """

    dictionary: Dictionary
    mean: Tensor
    few: int

    def activations(self, states: Tensor) -> Tensor:
        """Return the activations of all."""
        return states

    def reconstruct(self, states: Tensor) -> Tensor:
        """Return what the MLP writes with a few of them."""
        away = states - self.mean
        sizes = away.abs() * self.dictionary.directions.norm(dim=1)
        return self.dictionary.decode(away * largest(sizes, self.few) + self.mean)


def measure_features(
    source: Any, texts: Any, dictionary: Any, site: Any, data: Any, k: int
) -> Result:
    """Measure a dictionary and its baselines on states."""
    opened = as_source(source)
    model = opened if isinstance(opened, Model) else None
    site = str(site) if isinstance(site, Site) else site
    named = _named(model, dictionary, site)
    reads, writes = getattr(named, "reads", site), getattr(named, "writes", site)
    neurons, notes = _neurons(model, writes)
    if notes and data is None:
        neurons = None
    sites = {reads, writes, *([neurons.reads] if neurons else ())}
    sample = _sample(opened, texts, data, sorted(sites))
    outputs = sample.at(writes)
    inputs = outputs if reads == writes else sample.at(reads)
    others = sample.statistics(outputs)
    whole = others[0] + others[1]
    if not bool(whole.covariance.trace() > 0):
        raise StatesError(PROBLEM, f"states at {writes} are equal", "Give other texts.")
    is_compared = others[0].count * others[1].count > 0
    if isinstance(named, str):
        made_of = others if is_compared else [whole, whole]
        fits = [MADE[named](fit, writes) for fit in made_of]
    else:
        fits = [named.assured(model, sample.inputs)] * 2
    fits = [fit.to(outputs.device, torch.float32) for fit in fits]
    # Labels are told apart by what is fitted to the first half: numbers are of that.
    named = fits[1]
    acts = _encode(named, inputs, min(k, len(named)))
    lengths = sample.by_text(torch.ones(len(inputs), 1))
    sums = sample.by_text(acts["active"][:, None])
    (active,) = estimate(sums, sample.groups, lengths)
    ways = {"the dictionary": (inputs, fits)}
    if is_compared:
        few = max(1, round(active.value))
        ways |= _baselines(named, sample, outputs, others, few, neurons)
    said = {}
    for name, way in ways.items():
        # Where there are notes, neurons do not make these states.
        if name != "neurons" or not notes:
            said[name] = sample.say(*way, outputs)
    mean = whole.mean.to(outputs)
    errors = [(outputs - each).square().sum(1) for each in (mean, *said.values())]
    left = sample.by_text(torch.stack(errors, 1))
    comparisons = [sample.compare("unexplained", said, left[:, 1:], left[:, :1])]
    acts["unexplained"] = (errors[1] / errors[0]).cpu()
    if not is_compared:
        notes.append(
            "All texts are of one group, so no half can score the other, and whatever"
            " was fitted here is scored on what it was fitted to."
        )
    elif active.value >= len(mean):
        notes.append("As many numbers act as a state has: components say all of it.")
    if named.later is not None and (Site.parse(reads).layer or 0) > 1:
        notes.append("What features of lower layers write here is left out.")
    losses: list[Estimate] = []
    why_not = _why_no_loss(model, writes)
    if why_not:
        notes.append(f"The loss was not measured: {why_not}.")
    else:
        variants = {"": mean.expand_as(outputs), **said}
        losses, compared = _compare_losses(model, sample, writes, variants)
        comparisons += compared
    if sample.labels is not None:
        comparisons.append(_detect(sample, inputs, ways))
    report = FeaturesReport(
        site=writes,
        reads=reads,
        features=len(named),
        texts=len(lengths),
        tokens=len(inputs),
        massive=int((sample.states.tokens.positions > 0).sum()) - len(inputs),
        silent=int((acts["tokens"] == 0).sum()),
        active=active,
        believed=named.is_believed,
        proved=None if named.proof is None else named.proof.stated.unexplained,
        best="" if named.proof is None else named.proof.best_reading,
        losses=losses,
        comparisons=comparisons,
        strongest=_strongest(None if why_not else model, named, acts),
        notes=notes,
    )
    return Result("features", _data(sample, writes, acts), report, sample.states.source)


def _named(model: Model | None, dictionary: Any, site: str | None) -> Any:
    """Return a dictionary, or the word of one that is made of the states."""
    if isinstance(dictionary, Dictionary):
        if site is not None and (site_of(site) or site) != dictionary.writes:
            reason = f"the dictionary lies at {dictionary.writes}"
            raise SiteError(PROBLEM, reason, "Leave the site out.")
        return dictionary
    if dictionary != "neurons" and dictionary not in MADE:
        if not Path(dictionary).exists() and len(Path(dictionary).parts) == 1:
            reason = f"there is no such folder as {str(dictionary)[:60]!a}"
            remedy = "Give a path that exists, or neurons, pca or random."
            raise FileError(PROBLEM, reason, remedy)
        return Dictionary.read(dictionary, model, site or "")
    if site is None:
        raise SiteError(PROBLEM, "they may be of any site", "Give site='layer.12'.")
    if dictionary in MADE:
        return dictionary
    if model is None:
        reason = "a store does not hold what neurons write"
        raise StatesError(PROBLEM, reason, "Give the model and texts.")
    return Dictionary.neurons(model, _inside(site))


def _inside(site: str) -> str:
    """Return where the neurons of a layer are."""
    place = Site.parse(site)
    return str(Site(place.layer, "mlp.neurons", place.stack))


def _neurons(model: Model | None, writes: str) -> tuple[Dictionary | None, list[str]]:
    """Return the neurons of a layer, and why they do not make its states."""
    neurons, reason = None, "a store does not hold what they write"
    if model is not None:
        try:
            neurons = Dictionary.neurons(model, _inside(writes))
            reason = f"{writes} holds more than what they write"
        except Error as error:
            reason = error.reason
    if neurons is not None and neurons.writes == writes:
        return neurons, []
    return neurons, [f"Neurons were not compared in what they leave: {reason}."]


def _sample(source: Any, texts: Any, data: Any, sites: Sequence[str]) -> Sample:
    """Capture the states of texts, or take those of a store, and halve the texts."""
    inputs = None
    if isinstance(source, Model):
        if (texts is None) == (data is None):
            reason = "they take one of texts and data"
            raise TextError(PROBLEM, reason, "Give texts, or labelled texts as data.")
        dataset = Dataset(texts_of(texts), None, "", getattr(texts, "groups", None))
        if data is not None:
            dataset = dataset_of(data)
        inputs = source.encode(dataset.texts)
        states: Any = source.capture(inputs, sites, keep="device")
        if isinstance(states, Pair):
            reason = f"{sites[0]} is in both stacks"
            raise SiteError(PROBLEM, reason, f"Give site='encoder.{sites[0]}'.")
    else:
        dataset, states = labels_of_states(source, data), source
    tokens = states.tokens
    if data is not None and np.shape(dataset.labels)[:1] != (tokens.count,):
        reason = f"{tokens.count:,} texts need as many labels"
        raise StatesError(PROBLEM, reason, "Give one for each text.")
    refuse_missing(() if data is None else dataset.labels, PROBLEM, "text")
    refuse_pooled(states, PROBLEM)
    counted = tokens.positions > 0
    for site in sites:
        limit = length_limit(states.blocks(site))
        massive = [is_massive(block, limit) for block in states.blocks(site)]
        counted &= ~torch.cat(massive).cpu().numpy()
    rows = np.flatnonzero(counted)
    empty = np.setdiff1d(np.arange(tokens.count), tokens.text[rows])
    if len(empty):
        reason = "has a single token, or massive ones alone after the first"
        reason = f"text {empty[0]:,} {reason}"
        raise StatesError(PROBLEM, reason, "Leave it out.")
    keys = [copy_key(text) for text in strings_of(inputs or tokens)]
    # Numbered by their names, so that the order of texts means nothing.
    _, groups = np.unique(merged_groups(keys, dataset.groups), return_inverse=True)
    order = np.random.default_rng(0).permutation(int(groups.max()) + 1)
    half = order[groups] % 2
    return Sample(states, inputs, dataset.labels, rows, tokens.text[rows], half, groups)


def _encode(dictionary: Dictionary, inputs: Tensor, k: int) -> dict[str, Tensor]:
    """Encode every row: the strongest features of each, and how each feature acts."""
    norms = dictionary.directions.norm(dim=1)
    tokens, written = torch.zeros_like(norms), torch.zeros_like(norms)
    columns = []
    for rows in torch.split(inputs, ROWS):
        activations = dictionary.activations(rows)
        acting, sizes = activations != 0, activations.abs() * norms
        top = sizes.topk(k)
        share = top.values / sizes.sum(1, keepdim=True)
        values = activations.gather(1, top.indices)
        columns.append((top.indices, values, share, acting.sum(1)))
        tokens += acting.sum(0)
        written += sizes.sum(0)
    parts = [*map(torch.cat, zip(*columns, strict=True)), tokens, written]
    names = "strongest", "activation", "share", "active", "tokens", "written"
    return {name: part.cpu() for name, part in zip(names, parts, strict=True)}


def _baselines(
    named: Dictionary,
    sample: Sample,
    outputs: Tensor,
    others: Sequence[RunningStatistics],
    few: int,
    neurons: Dictionary | None,
) -> dict[str, Any]:
    """Return what says the same states with as few active numbers."""
    count, writes = len(named), named.writes
    components, drawn = [], []
    for fit in others:
        components.append(principal_components(fit, few, writes))
        drawn.append(random_directions(fit, count, min(few, count), writes, 1))
    ways: dict[str, Any] = {"principal components": (outputs, components)}
    ways["random directions"] = outputs, drawn
    if neurons is not None:
        rows, most = sample.at(neurons.reads), min(few, len(neurons))
        means = [half.mean.to(rows) for half in sample.statistics(rows)]
        ways["neurons"] = rows, [Neurons(neurons, mean, most) for mean in means]
    return ways


def _why_no_loss(model: Model | None, writes: str) -> str:
    """Say why next tokens have no loss; empty if they have."""
    if model is None:
        return "a store has no model"
    if not (model.anatomy.stacks[0].causal and model.anatomy.makes_logits):
        return f"{model.name} does not predict next tokens"
    try:
        plan(model.anatomy, {writes: Replace(0.0)})
    except Error as error:
        return error.reason
    return ""


def _compare_losses(
    model: Any, sample: Sample, writes: str, variants: Mapping[str, Tensor]
) -> tuple[list[Estimate], list[Comparison]]:
    """Measure the losses as the model is, and with each of these in place.

    The first of them is what takes the place of states where all is lost.
    """
    inputs, tokens = sample.inputs, sample.states.tokens
    assert inputs is not None, "a model encodes texts"
    states = sample.states[writes]
    place = np.full(len(tokens), -1)
    place[sample.rows] = np.arange(len(sample.rows))

    def runs() -> Iterator[tuple[int, list[int], Pass]]:
        for texts, batch in inputs.batches(model, batch_tokens=batch_size(model)):
            rows = np.concatenate([np.r_[tokens.rows(text)] for text in texts])
            counted = np.flatnonzero(place[rows] >= 0)
            for number, said in enumerate((None, *variants.values())):
                values = states[rows]
                if said is not None:
                    values[counted] = said[place[rows[counted]]].to(values)
                if Site.parse(writes).part:
                    change = Replace(values)
                    run = edit(model, batch, {writes: change}, (), logits=True)
                else:
                    run = resume(model, batch, writes, values, ())
                yield number, texts, run

    measured = measure_losses(inputs, runs(), len(variants) + 1, divergence=True)
    loss, harm = measured.loss.T, (measured.loss[1:2] - measured.loss[:1]).T
    losses = estimate(np.hstack([loss[:, :2], harm]), sample.groups)
    ways = list(variants)[1:]
    divergence, ones = measured.divergence[2:].T, np.ones_like(harm)
    comparisons = [sample.compare("divergence", ways, divergence, ones)]
    if losses[2].side > 0:
        recovered = loss[:, 1:2] - loss[:, 2:]
        comparisons.append(sample.compare("recovered", ways, recovered, harm))
    return losses, comparisons


def _detect(sample: Sample, inputs: Tensor, ways: Mapping[str, Any]) -> Comparison:
    """Score the best single feature, neuron and direction at telling labels apart.

    Each is selected on one half of the texts, by its mean over tokens. The variance of
    an AUROC A is at most A (1 - A) over the smaller class (Birnbaum and Klose 1957), so
    Wilson's interval of a share of that many holds it.
    """
    names = sorted(set(map(str, sample.labels)))
    positive = np.array([str(label) == names[-1] for label in sample.labels])
    train, test = sample.half == 0, sample.half == 1
    sizes = np.unique(2 * train + positive, return_counts=True)[1]
    if len(names) != 2 or len(sizes) < 4 or min(sizes) < 2:
        reason = f"there are {len(names)} labels, and each half needs two texts of two"
        raise StatesError(PROBLEM, reason, "Give more texts of two labels.")
    text = torch.from_numpy(sample.text).to(inputs.device)
    sums = {}
    for way, (rows, (_, fit)) in ways.items():
        parts = torch.split(rows, ROWS), torch.split(text, ROWS)
        for part, of_text in zip(*parts, strict=True):
            values = fit.activations(part)
            if way not in sums:
                sums[way] = values.new_zeros(len(positive), values.shape[1])
            sums[way].index_add_(0, of_text, values)
    states, lengths = sample.by_text(inputs), np.bincount(sample.text)[:, None]
    centres, in_test = [], []
    for label in (positive, ~positive):
        centres.append((states / lengths)[train & label].mean(0))
        groups = np.unique(sample.groups[test & label], return_inverse=True)[1]
        in_test.append(effective_count(groups))
    toward = states @ (centres[0] - centres[1])
    sums["difference of means"] = torch.from_numpy(toward)[:, None]
    scores = []
    for way, of_way in sums.items():
        ahead = []
        # Ranks take some times the memory of what is ranked.
        for columns in torch.split(of_way.cpu(), ROWS, 1):
            means = columns.numpy() / lengths
            ahead.append(auroc(means[train], positive[train]) - 0.5)
        every = np.concatenate(ahead)
        best = int(np.abs(every).argmax())
        means = of_way[:, best].cpu().numpy() / lengths[:, 0]
        score = float(auroc(np.sign(every[best]) * means[test], positive[test]))
        low, high = wilson(score, min(in_test), len(sums))
        larger = names[-1] if every[best] > 0 else names[0]
        ends = Estimate(value=score, low=low, high=high)
        scores.append(Score(way=way, number=best, larger=larger, **vars(ends)))
    return Comparison(measure="auroc", scores=scores)


def auroc(values: Floats, positive: Bools) -> Any:
    """Return how often a positive row is above a negative one, for each column.

    >>> float(auroc(np.array([1.0, 2, 3, 2]), np.array([False, False, True, True])))
    0.875
    """
    ranks = rankdata(values, axis=0)[positive].mean(0)
    return (ranks - (positive.sum() + 1) / 2) / (~positive).sum()


def _strongest(
    model: Model | None, named: Dictionary, acts: Mapping[str, Tensor]
) -> list[Feature]:
    """Return the features that write most, and the words that each would predict."""
    most = acts["written"].topk(min(LISTED, len(named))).indices
    words = written_words(model, named, most)
    listed = []
    for feature, strings in zip(most.tolist(), words, strict=True):
        tokens = int(acts["tokens"][feature])
        written = float(acts["written"][feature]) / max(1, tokens)
        listed.append(
            Feature(feature=feature, tokens=tokens, written=written, words=strings)
        )
    return listed


def written_words(
    model: Model | None, named: Dictionary, features: Tensor
) -> list[list[str]]:
    """Return the words that the direction of each feature would predict, if any."""
    if model is None or not len(features):
        return [[]] * len(features)
    rows = named.directions[features].to(model.device, model.dtype)
    try:
        logits = Unembedding(model).logits_of(rows, Site.parse(named.writes))
    except (PassError, SiteError):
        # It has no head, or one that does not read this site.
        return [[]] * len(features)
    return list(map(model.text_encoder.strings, logits.topk(WORDS).indices.tolist()))


def _data(sample: Sample, site: str, acts: Mapping[str, Tensor]) -> Any:
    """Return the strongest features of every token, as a grid shows them."""
    variables: Any = {}
    tokens = sample.states.tokens
    for name, words in NAMES.items():
        values: Any = acts[name].float().numpy()
        dims: tuple[str, ...] = ("feature",)
        if name not in ("tokens", "written"):
            # What is left out has a column as in any grid, and nothing in it.
            shape = 1, len(tokens), *values.shape[1:]
            numbers = np.full(shape, np.nan, np.float32)
            numbers[0, sample.rows] = values
            values, dims = numbers, ("site", "token", "rank")[: len(shape)]
        if name == "strongest":
            acting = np.nan_to_num(variables["activation"][1]) != 0
            strings = text_array([""] * values.size).reshape(values.shape)
            strings[acting] = list(map(str, values[acting].astype(int)))
            values = strings
        variables[name] = dims, values, words
    coords: Any = {"site": [site], **token_coords([tokens])}
    return to_dataset(variables, coords, {"texts": list(tokens.texts or ())})
