"""The tokens that excite directions, as labelled arrays and a report."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.examples.kinds import tested_kinds
from hiddenscope.analyses.examples.readings import Reading, readings_of
from hiddenscope.analyses.examples.story import (
    AROUND,
    DirectionRecord,
    ExamplesReport,
    PreferredKind,
)
from hiddenscope.directions.direction import in_stack
from hiddenscope.errors import ArgumentError, StatesError
from hiddenscope.measures.activity import Activity, sample_rows
from hiddenscope.measures.massive import is_massive, length_limit
from hiddenscope.model import Model, ModelLike, as_source
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Coordinates,
    Variables,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Readable, Source, Tokens
from hiddenscope.states.arrays import Floats32, Ints
from hiddenscope.states.pooling import refuse_pooled
from hiddenscope.texts.groups import copy_key, merged_groups
from hiddenscope.vectors.dataset import strings_of, texts_of
from hiddenscope.vectors.pooled import HELD, read_vectors
from hiddenscope.vectors.vectors import open_sites

# Activations that are computed at a time: in the cache of a core, or enough for a GPU.
PIECE, PIECE_GPU = 2**20, 2**26
FEWEST_ROWS = 64
LOOKING = "Looking for examples"
# Tokens from each quarter of the activations, and at random.
QUARTERS, PER_QUARTER, RANDOM = 4, 3, 5
# Of this many sampled tokens the quarters are made.
RANKED = 1024
# A token is strong if it is active and among this share of the sample.
STRONG = 0.05
# Times as many of the strongest are looked at, of which copies are left out.
SPARE = 4
# Directions whose examples are shown, with the kinds of tokens that they prefer.
SHOWN = 8


@dataclass(frozen=True)
class Computed:
    """The states that a model computes of inputs, read like those of a store."""

    model: Model
    inputs: Inputs
    tokens: Tokens
    source: Source

    def blocks(self, site: Site) -> Iterator[Tensor]:
        """Compute the rows of a site, some texts at a time."""
        row_bytes = self.model.anatomy.width(site) * self.model.dtype.itemsize
        ends = np.cumsum(self.tokens.lengths) * row_bytes
        # Texts that end in the same portion of memory are computed together.
        borders = np.unique(ends // HELD, return_index=True)[1]
        for texts in np.split(np.arange(len(ends)), borders[1:]):
            yield self._states(site, texts)

    def rows(self, site: Site, numbers: Ints) -> Tensor:
        """Return some rows, in order, of the texts that they belong to."""
        texts = np.unique(self.tokens.text[numbers])
        present = np.flatnonzero(np.isin(self.tokens.text, texts))
        states = self._states(site, texts)
        return states[np.searchsorted(present, numbers)]

    def _states(self, site: Site, texts: Ints) -> Tensor:
        some = self.inputs.some(texts.tolist())
        captured = self.model.capture(some, site, keep="device")
        return in_stack(captured, site)[site]


def find_examples(
    source: ModelLike | Readable | Pair,
    directions: Any,
    texts: Texts | Inputs | None,
    features: Any,
    k: int,
    threshold: float,
) -> Result:
    """Return the strongest tokens of every direction, and others beside them."""
    select = partial(open_sites, as_source(source), texts)
    readings = readings_of(directions, features, select)
    stack, *stacks = {reading.site.stack for reading in readings}
    if stacks:
        raise StatesError(
            "Cannot look for examples in two stacks",
            "the encoder and the decoder have different tokens",
            "Ask for directions of each by themselves.",
        )
    corpus: Any = select(str(readings[0].site))[0]
    refuse_pooled(corpus, "Cannot look for tokens in pooled states")
    if isinstance(corpus, Model):
        inputs = corpus.encode(texts_of(texts))
        for number, reading in enumerate(readings):
            proved = reading.dictionary.assured(corpus, inputs)
            readings[number] = replace(reading, dictionary=proved)
        tokens = corpus.text_encoder.tokens(inputs.of(stack))
        corpus = Computed(corpus, inputs, tokens, corpus.source(stack))
    counted = np.flatnonzero(corpus.tokens.positions > 0)
    if not len(counted):
        raise StatesError(
            "No tokens to look at",
            "first tokens are left out, and there are no others",
            "Give longer texts, or a store of every token.",
        )
    if np.isnan(threshold):
        reason = "nothing is above NaN"
        raise ArgumentError("Cannot count active tokens", reason, "Give a number.")
    sample = sample_rows(counted, sum(len(reading.names) for reading in readings))
    looked_up = []
    total = len(readings) * len(corpus.tokens)
    with (
        autograd.restored(),
        torch.no_grad(),
        progress.track(LOOKING, total) as advance,
    ):
        for reading in readings:
            # No example of a sparse feature is below the threshold.
            lowest = threshold if reading.sparse else -np.inf
            activity = Activity(
                len(reading.names),
                min(SPARE * k, len(counted)),
                sample,
                threshold=threshold,
                lowest=lowest,
            )
            # What is massive is told by the first blocks; tee hands them on again.
            head, blocks = tee(read_vectors(corpus, reading.site, None, "device"))
            limit = length_limit(head)
            del head
            moved = reading.dictionary.to(limit.device)
            reading = replace(reading, dictionary=moved)
            looked_up.append(LookedUp(reading, activity, limit))
            is_first = torch.from_numpy(corpus.tokens.positions == 0).to(limit.device)
            for block in blocks:
                at_once = PIECE if block.device.type == "cpu" else PIECE_GPU
                rows = max(FEWEST_ROWS, at_once // len(reading.dictionary))
                for states in torch.split(block, rows):
                    activations = reading.activations(states)
                    here = slice(activity.seen, activity.seen + len(states))
                    left_out = is_first[here] | is_massive(states, limit)
                    rows_out = left_out.nonzero()[:, 0]
                    activations.index_fill_(0, rows_out, -torch.inf)
                    activity.see(activations)
                advance(len(block))
            activity.finish()
        return _result(corpus, looked_up, getattr(texts, "groups", None), k)


class LookedUp(NamedTuple):
    """What was looked up at a site, what came of it, and what length is massive."""

    reading: Reading
    activity: Activity
    limit: Tensor


def _result(
    corpus: Any, looked_up: Sequence[LookedUp], groups: Sequence[Any] | None, k: int
) -> Result:
    tokens: Tokens = corpus.tokens
    later = int((tokens.positions > 0).sum())
    keys = [copy_key(text) for text in strings_of(tokens)]
    _, group_of = np.unique(merged_groups(keys, groups), return_inverse=True)
    names: list[str] = []
    sites: list[str] = []
    shown: list[tuple[LookedUp, int]] = []
    examples, shares = [], []
    folded: list[int] = []
    for at in looked_up:
        here = range(len(at.reading.names))
        names += at.reading.names
        sites += [str(at.reading.site) for _ in here]
        shown += [(at, column) for column in here]
        *some, copies = _examples(at.activity, tokens, k)
        examples.append(some)
        folded += copies
        shares.append(at.activity.active.cpu().double() / at.activity.counted)
    shown = shown[:SHOWN]
    numbers, values = map(np.concatenate, zip(*examples, strict=True))
    share = np.concatenate(shares)
    strings = text_array([*tokens.strings, ""])
    listed, windows, heats = [], [], []
    for place, (at, column) in enumerate(shown):
        rows = numbers[place]
        around, heat = _heat(corpus, at, column, rows)
        windows.append(strings[around])
        heats.append(heat)
        record = DirectionRecord(
            name=names[place],
            site=sites[place],
            sparse=at.reading.sparse,
            share=float(share[place]),
            massive=later - at.activity.counted,
            copies=folded[place],
            strongest=strings[rows[0]] if rows[0] >= 0 else None,
            activation=float(values[place, 0]),
            prefers=_preferred(at.activity, column, tokens, group_of, len(shown)),
        )
        listed.append(record)
    dims, around_dims = ("direction", "example"), ("told", "example", "offset")
    text, position = (
        np.where(numbers < 0, -1, facts[numbers])
        for facts in (tokens.text, tokens.positions)
    )
    variables: Variables = {
        "activation": (dims, values, "activation"),
        "number": (dims, numbers, "number of the token, -1 for none"),
        "text": (dims, text, "number of the text"),
        "position": (dims, position, "position in the text"),
        "string": (dims, strings[numbers], "token"),
        "share": ("direction", share, "share of active tokens"),
        "site": ("direction", text_array(sites), "site"),
        "heat": (around_dims, np.stack(heats), "activation"),
        "window": (around_dims, np.stack(windows), "token"),
    }
    kinds = ["strongest"] * (numbers.shape[1] - QUARTERS * PER_QUARTER - RANDOM)
    for quarter in range(QUARTERS):
        kinds += [f"{25 * quarter}–{25 * quarter + 25}%"] * PER_QUARTER
    coords: Coordinates = {
        "direction": text_array(names),
        "kind": ("example", text_array([*kinds, *["random"] * RANDOM])),
        "offset": np.arange(-AROUND, AROUND + 1),
    }
    report = ExamplesReport(
        texts=tokens.count,
        groups=int(group_of.max()) + 1,
        tokens=later,
        first_left_out=len(tokens) - later,
        sampled=len(looked_up[0].activity.sample),
        threshold=looked_up[0].activity.threshold,
        directions=len(names),
        believed=any(at.reading.dictionary.is_believed for at in looked_up),
        listed=listed,
    )
    data = to_dataset(variables, coords)
    return Result("examples", data, report, getattr(corpus, "source", {}))


def _examples(
    activity: Activity, tokens: Tokens, k: int
) -> tuple[Ints, Floats32, list[int]]:
    """Return the rows and activations `[direction, example]`, -1 and NaN for none, and
    how many of the strongest of each direction are copies, which are left out.

    After the strongest come some of each quarter of the active tokens, or of all where
    a direction is linear, and some at random, the same for every direction.
    """
    order = np.random.default_rng(1).permutation(len(activity.sample))
    sampled = activity.sampled.T.contiguous().cpu().numpy()
    places = np.full((len(sampled), QUARTERS * PER_QUARTER + RANDOM), -1)
    # The last ones: quarters take the first.
    last = np.arange(len(order))[-RANDOM:]
    places[:, QUARTERS * PER_QUARTER :][:, : len(last)] = last
    for direction, row in enumerate(sampled):
        row = row[order]
        ranked = np.flatnonzero(row > activity.lowest)[:RANKED]
        ranked = ranked[np.argsort(row[ranked], kind="stable")]
        for quarter, part in enumerate(np.array_split(ranked, QUARTERS)):
            # In the order of the shuffled sample: any of the quarter are as likely.
            some = np.sort(part)[:PER_QUARTER]
            places[direction, quarter * PER_QUARTER :][: len(some)] = some
    rows = np.where(places < 0, -1, activity.sample[order[places]])
    values = np.take_along_axis(sampled, order[places], 1)
    around = _rows_around(tokens, activity.numbers.ravel())
    contexts = np.where(around < 0, -1, tokens.ids[around])
    _, codes = np.unique(contexts, axis=0, return_inverse=True)
    width = activity.numbers.shape[1]
    shape = len(sampled), min(k, width)
    strongest, strengths = np.full(shape, -1), np.full(shape, np.nan)
    copies = []
    for direction, row in enumerate(codes.reshape(-1, width)):
        known = np.flatnonzero(activity.numbers[direction] >= 0)
        firsts = np.sort(known[np.unique(row[known], return_index=True)[1]])[:k]
        strongest[direction, : len(firsts)] = activity.numbers[direction, firsts]
        strengths[direction, : len(firsts)] = activity.values[direction, firsts]
        looked_at = len(known)
        if len(firsts) == k:
            looked_at = int(firsts[-1]) + 1
        copies.append(looked_at - len(firsts))
    numbers = np.concatenate([strongest, rows], 1)
    values = np.concatenate([strengths, values], 1)
    values = np.where(numbers < 0, np.nan, values).astype(np.float32)
    return numbers, values, copies


def _rows_around(tokens: Tokens, numbers: Ints) -> Ints:
    """Return the rows around each `[row, offset]`; -1 outside of its text."""
    around = numbers[:, None] + np.arange(-AROUND, AROUND + 1)
    rows = np.clip(around, 0, len(tokens) - 1)
    inside = (rows == around) & (numbers[:, None] >= 0)
    inside &= tokens.text[rows] == tokens.text[numbers][:, None]
    return np.where(inside, rows, -1)


def _heat(
    corpus: Any, at: LookedUp, column: int, numbers: Ints
) -> tuple[Ints, Floats32]:
    """Return the rows around examples, and how strongly the direction acts in each,
    `[example, offset]`; -1 and NaN outside of the text.
    """
    tokens: Tokens = corpus.tokens
    rows = _rows_around(tokens, numbers)
    inside = rows >= 0
    heat = np.full(rows.shape, np.nan, np.float32)
    needed, places = np.unique(rows[inside], return_inverse=True)
    if len(needed):
        site = at.reading.site
        if hasattr(corpus, "rows"):
            states = corpus.rows(site, needed)
        else:
            parts, start = [], 0
            for block in corpus.blocks(site):
                here = np.searchsorted(needed, (start, start + len(block)))
                parts.append(block[needed[slice(*here)] - start])
                start += len(block)
            states = torch.cat(parts)
        activations = at.reading.activations(states.to(at.limit.device))[:, column]
        # What is left out has no colour: it would hide that of all others.
        first = torch.from_numpy(tokens.positions[needed] == 0).to(states.device)
        activations[first | is_massive(states, at.limit)] = torch.nan
        heat[inside] = activations.cpu().numpy()[places]
    return rows, heat


def _preferred(
    activity: Activity, column: int, tokens: Tokens, group_of: Ints, count: int
) -> list[PreferredKind]:
    """Return the kinds of tokens that one of the first directions prefers."""
    sample, sampled = activity.sample, activity.sampled[:, column].cpu().numpy()
    strong = sampled > max(activity.threshold, np.quantile(sampled, 1 - STRONG))
    ids = tokens.ids[sample]
    shown = []
    for kind in tested_kinds(strong, ids, group_of[tokens.text[sample]], count):
        if kind.low > 0:
            token = tokens.strings[sample[ids == kind.id][0]]
            shown.append(replace(kind, token=token))
    return shown
