"""Proof: is a dictionary what its file says?

The states of the site that it names are encoded and decoded under what the file says,
and under its neighbours: a layer lower or higher, another part of the layer, the bias
subtracted or not, states scaled or not, another activation. Two numbers tell them
apart. A dictionary was trained to leave little of the variance unexplained; and what it
decodes then has the right size: regressed on it, states have a slope of 1, or more if a
penalty shrinks the activations. The more features may act, the less is left, whatever
the dictionary was trained for: a sound one that was taught to use few is no exception.
So another input has to do better with as many features, the strongest of both, and of
another activation the slope counts, which is less than 1 where too many act. A k or a
threshold that is somewhat wrong looks like a dictionary that was badly trained: it is
said how much less the best reading leaves.

What is stated must be as good as any neighbour; else the dictionary is refused, and the
neighbour named. It must also explain more of these states than of the same ones with
their numbers shuffled, as no dictionary of another model does.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hiddenscope import texts as shipped
from hiddenscope.directions.direction import in_stack
from hiddenscope.directions.encoding import largest
from hiddenscope.errors import NotFinite, SiteError, StatesError
from hiddenscope.measures.massive import MASSIVE
from hiddenscope.model import Model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.sites import Site
from hiddenscope.states import States
from hiddenscope.states.arrays import Bools, Floats

if TYPE_CHECKING:
    from hiddenscope.directions.dictionary import Dictionary

    Change: TypeAlias = Callable[[Dictionary], Dictionary]

# A neighbour that leaves this share of what is stated is better, if texts agree. Chance
# in the training moves other inputs by a few percent, and wrong ones by a quarter.
LESS = {"site": 0.98, "activation": 0.98, "input": 0.9, "bias": 0.92}
# What is decoded is too large if the slope is clearly below this; a neighbour's may be
# a little less, since a dictionary fits other texts than its own less well.
TOO_LARGE = 0.98
LEAST_SLOPE = 0.96
# A dictionary of ReLU was trained with a penalty that makes what it decodes too small.
RELU_SLOPE = 1.03
LEVEL = 0.95
# Another k, or thresholds at another scale: this share must be left with fewer, which
# leave more in sound dictionaries; and with more, if what is stated decodes too little,
# or else. Sound JumpReLU dictionaries reach 0.63.
FEWER, MORE, MANY_MORE = 0.8, 0.85, 0.57
TOO_SMALL = 1.08
THRESHOLDS = (0.4, 2.5)
# How many times as much must be left as stated for another reading to be named.
WORTH_SAYING = 1.02
# Kinds of neighbours at the same site.
OWN = ("input", "size")
# A dictionary must leave this share of what it leaves of shuffled states.
OF_SHUFFLED = 0.9
SHUFFLES = 4
# Layers below and above and parts of the layer that are tried, and the fewest features
# instead of all.
NEAR = 3
BOTH = ("reads", "writes")
PARTS = ("", "mid", "mlp", "mlp.input", "attn", "attn.z")
FEWEST = 4
# Another bias moves what is decoded, and with it the bias that fits best.
ROUNDS = 3
TINY = np.finfo(float).tiny
# Texts that tell how a model norms states, and what rounding leaves of them.
FEW, ROUNDING = 8, 0.01
STATE_NORM_WORDS = {
    "": "without norming each state",
    "length": "with each state brought to one length",
    "layer": "with each state normed as by a layer norm",
    "mean": "with the mean over the width taken out, as TransformerLens can do",
}


@dataclass(frozen=True)
class Convention:
    """One way to use a dictionary, and how it did.

    `unexplained` is the share of the variance that it leaves, `slope` that of the
    states on what is decoded, and `counts` the mean number of features of each member
    that act at a token. `left` and `excess` are for each text what is left, and by how
    much the slope is above the least; `missing` is the mean of what is left, [width].
    """

    name: str
    unexplained: float
    slope: float
    counts: tuple[float, ...]
    left: Floats = field(repr=False)
    excess: Floats = field(repr=False)
    missing: Tensor = field(repr=False)

    @property
    def active(self) -> float:
        """Return the mean number of features at a token."""
        return sum(self.counts)


@dataclass(frozen=True)
class Proof:
    """How a dictionary did as stated, and under each neighbour.

    `shuffled` is what it leaves of states whose numbers are shuffled, and
    `first_tokens` what it leaves of all states with the first tokens. `best` is the
    reading that leaves least where as many features act, and `worse` how many times as
    much is left as stated.
    """

    stated: Convention
    neighbours: tuple[Convention, ...]
    shuffled: float
    first_tokens: float
    best: str = ""
    worse: float = 1.0

    def __str__(self) -> str:
        lines = [f"as stated: {_described(self.stated)}"]
        lines += [f"{way.name}: {_described(way)}" for way in self.neighbours]
        if self.best:
            lines.append(self.best_reading)
        lines.append(f"shuffled states: {self.shuffled:.1%} unexplained")
        lines.append(f"with first tokens: {self.first_tokens:.1%} unexplained")
        return "\n".join(lines)

    @property
    def best_reading(self) -> str:
        """Return what leaves least at the same site, and how much; "" if as stated."""
        share = f"{1 / self.worse:.0%} of that is left, with as many features"
        return f"{self.best}, {share}" if self.best else ""


class Neighbour(NamedTuple):
    """What a file may have meant: another site, another input or activation."""

    name: str
    kind: Literal["site", "input", "bias", "activation", "size"]
    change: "Change"


@dataclass(frozen=True)
class Trials:
    """States at some sites, on which conventions are tried, and the rows to try."""

    states: Mapping[str, States]
    rows: Bools

    def run(
        self,
        name: str,
        members: Sequence["Dictionary"],
        *,
        shuffle: int | None = None,
        most: Sequence[float] = (),
    ) -> Convention:
        """Encode and decode the states, and add up what all members write.

        With a seed to `shuffle` the numbers of each state change places first, about
        the mean. At `most` as many features of each member act, the strongest.
        """
        rows = {}
        for site in {members[0].writes, *(member.reads for member in members)}:
            values = self.states[site][site]
            rows[site] = values[torch.from_numpy(self.rows).to(values.device)].float()
        if shuffle is not None:
            generator = torch.Generator().manual_seed(shuffle)
            for member in members:
                order = torch.randperm(member.width, generator=generator)
                mean = rows[member.reads].mean(0)
                others = (rows[member.reads] - mean)[:, order.to(mean.device)]
                rows[member.reads] = others + mean
        outputs = rows[members[0].writes].double()
        decoded = torch.zeros_like(outputs)
        counts = [0.0] * len(members)
        for number, member in enumerate(members):
            parts = []
            for block, activations in member.blocks(rows[member.reads]):
                if most:
                    sizes = activations * member.directions.norm(dim=1)
                    strongest = largest(sizes, max(1, round(most[number])))
                    activations = activations * strongest
                parts.append(member.decode(activations, block))
                counts[number] += int((activations > 0).sum()) / len(outputs)
            decoded += torch.cat(parts)
        texts = self.states[members[0].writes].tokens.text[self.rows]
        # A text of which no state is tried has no say.
        _, numbers = np.unique(texts, return_inverse=True)

        def by_text(values: Tensor) -> Floats:
            return np.bincount(numbers, values.sum(-1).cpu().numpy()).astype(float)

        errors = outputs - decoded
        left = by_text(errors.square())
        outputs -= outputs.mean(0)
        decoded -= decoded.mean(0)
        spread = max(by_text(outputs.square()).sum(), TINY)
        size, along = by_text(decoded.square()), by_text(outputs * decoded)
        return Convention(
            name,
            float(left.sum() / spread),
            float(along.sum() / max(size.sum(), TINY)),
            tuple(counts),
            left / spread,
            along - TOO_LARGE * size,
            errors.mean(0),
        )


def normed_as(model: Model, inputs: Inputs, dictionary: "Dictionary") -> "Dictionary":
    """Return a dictionary of normed states, with the norm that the model has.

    What enters the MLP is one of them times a number for each channel, and shifted.
    """
    if dictionary.encoding.state_norm != "model":
        return dictionary
    place = Site.parse(dictionary.reads)
    ends = [str(replace(place, part=part)) for part in (place.part, "mlp.input")]
    captured = in_stack(
        model.capture(inputs.some(range(min(FEW, len(inputs)))), ends), place
    )
    states, entering = (captured[end].double() for end in ends)
    entering -= entering.mean(0)
    left = {}
    for norm in ("length", "centred"):
        encoding = replace(dictionary.encoding, state_norm=norm)
        way = replace(dictionary, encoding=encoding)
        rows = way.normed(states)
        rows -= rows.mean(0)
        gains = (rows * entering).sum(0) / rows.square().sum(0).clamp_min(TINY)
        left[float((entering - gains * rows).square().sum())] = way
    if not min(left) < ROUNDING * float(entering.square().sum()):
        raise StatesError(
            f"Cannot use this dictionary with {model.name}",
            f"what enters the MLP there is not {dictionary.reads} after a norm",
            "Give a dictionary of this model.",
        )
    return left[min(left)]


def prove(
    members: Sequence["Dictionary"], model: Model, texts: Texts | Inputs | None = None
) -> Proof:
    """Try a dictionary on states of its site, and refuse it if a neighbour is better.

    The first member is the dictionary; if it is a cross-layer transcoder, the others
    are those of lower layers with what they write at the same site. The first token of
    each text is left out, and whatever is as long as that: such a state is often a
    hundred times as large as the others, and outweighs them all.
    """
    dictionary = members[0]
    problem = f"Cannot use this dictionary with {model.name}"
    _check_sites(members, model, problem)
    elsewhere = list(_other_sites(members, model))
    states: dict[str, States] = {}
    inputs = model.encode(shipped.read("plain").texts if texts is None else texts)
    for end in ("reads", "writes"):
        near_by = [near.change(member) for near, member in product(elsewhere, members)]
        sites = {getattr(place, end) for place in (*members, *near_by)}
        if not sites <= states.keys():
            captured = model.capture(inputs, sorted(sites), keep="device")
            states |= {site: in_stack(captured, Site.parse(site)) for site in sites}
    advice = "Give texts of two tokens or more: read(path, model, texts=...)."
    rows = states[dictionary.writes].tokens.positions > 0
    medians = {}
    for site, at in states.items():
        lengths = at[site].float().norm(dim=-1)
        medians[site] = float(lengths.median())
        if not math.isfinite(medians[site]):
            raise NotFinite(problem, f"the states at {site} hold a NaN", advice)
        # One that is massive at a single site would decide for or against it.
        rows &= (lengths <= MASSIVE * medians[site]).cpu().numpy()
    if not rows.any():
        reason = "no states are left without those of first tokens"
        raise StatesError(problem, reason, advice)
    trials = Trials(states, rows)
    stated = trials.run("as stated", members)
    shuffled = min(
        trials.run("", members, shuffle=seed).unexplained for seed in range(SHUFFLES)
    )
    most = min(1.0, OF_SHUFFLED * shuffled)
    scale = math.sqrt(dictionary.width) / medians[dictionary.reads]
    encodings = _other_encodings(dictionary, stated, scale)
    others = (*elsewhere, *_other_bias(trials, members), *encodings)
    neighbours, best, (best_name, worse) = _compare(
        trials, members, others, stated, most
    )
    if best is not None:
        raise StatesError(
            problem,
            f"as stated, {_described(stated)}; {best.name}, {_described(best)}",
            "Correct the file, or make the Dictionary with what fits; or, if it was"
            " trained on texts of another kind, prove it on such:"
            " read(path, model, texts=...).",
        )
    if not stated.unexplained < most:
        raise StatesError(
            problem,
            f"it explains no more of the states at {dictionary.writes} than of states"
            f" whose numbers are shuffled: {stated.unexplained:.0%} of the variance is"
            " left",
            "Give a dictionary of this model.",
        )
    everything = Trials(states, np.ones_like(rows)).run("", members)
    left = everything.unexplained
    return Proof(stated, tuple(neighbours), shuffled, left, best_name, worse)


def _compare(
    trials: Trials,
    members: Sequence["Dictionary"],
    near_by: Iterable[Neighbour],
    stated: Convention,
    most: float,
) -> tuple[list[Convention], Convention | None, tuple[str, float]]:
    """Return how neighbours did, the one that is meant instead, if any, and the best of
    the same site with how many times as much is left as stated.

    A neighbour that leaves `most` or more is none.
    """
    neighbours = []
    # What leaves less, by how much it leaves; and other activations that fit better.
    less: dict[float, Convention] = {}
    others, sizes = [], []
    best_name, worse = "", WORTH_SAYING
    for near in near_by:
        changed = [near.change(member) for member in members]
        way = trials.run(near.name, changed)
        neighbours.append(way)
        if way.unexplained >= most:
            continue
        if near.kind == "activation":
            if _better_slope(way, stated):
                others.append(way)
            continue
        # Where a single feature acts, any reading may be the better one.
        if way.unexplained >= stated.unexplained:
            continue
        # More features leave less, in sound dictionaries too.
        fewer = np.minimum(stated.counts, way.counts).tolist()
        fair = trials.run("", changed, most=fewer)
        alike = trials.run("", members, most=fewer)
        if near.kind in OWN and alike.unexplained > worse * fair.unexplained:
            best_name = near.name
            worse = alike.unexplained / max(fair.unexplained, TINY)
        if near.kind == "size":
            if _better_size(way, stated):
                sizes.append(way)
        elif _less(fair, alike, LESS[near.kind]):
            less[fair.unexplained / alike.unexplained] = way
    _, best = min(less.items(), default=(0.0, None))
    # If what fits best still decodes too much, too many features act.
    if best is None or best.slope < LEAST_SLOPE:
        best = min(others, key=lambda way: abs(1 - way.slope), default=best)
    # Where far too few act, whatever makes more of them act looks better.
    for way in sizes:
        if best is None or way.unexplained < LESS["input"] * best.unexplained:
            best = way
    return neighbours, best, (best_name, worse if best_name else 1.0)


def _described(way: Convention) -> str:
    return (
        f"{way.unexplained:.1%} of the variance is left unexplained, with"
        f" {way.active:.0f} features active at a token and a slope of {way.slope:.2f}"
    )


def _check_sites(members: Sequence["Dictionary"], model: Model, problem: str) -> None:
    for member in members:
        widths = {
            member.reads: member.width,
            member.writes: member.directions.shape[1],
        }
        for name, width in widths.items():
            site, *others = model.anatomy.select(name)
            if others:
                reason = f"{name} is in both stacks"
                raise SiteError(problem, reason, f"Give site='encoder.{name}'.")
            if model.anatomy.width(site) != width:
                raise StatesError(
                    problem,
                    f"it is for states of width {width:,}, and those at {site} have"
                    f" {model.anatomy.width(site):,}",
                    "Give a dictionary of this model.",
                )


def _other_sites(members: Sequence["Dictionary"], model: Model) -> Iterator[Neighbour]:
    """Yield what moves a dictionary to a layer or part nearby, of the same width."""
    first = members[0]
    # A transcoder may be wrong about one end.
    choices = [("reads",), ("writes",)] if first.reads != first.writes else [BOTH]
    steps = (*range(-NEAR, 0), *range(1, NEAR + 1))
    moves: list[tuple[Any, int, str | None]] = [(BOTH, step, None) for step in steps]
    moves += [(ends, 0, part) for ends, part in product(choices, PARTS)]
    for ends, step, part in moves:
        move = partial(_moved, ends=ends, step=step, part=part)
        # The model may have no such layer or part, or one of another width.
        with suppress(SiteError, StatesError):
            changed = [move(member) for member in members]
            _check_sites(changed, model, "")
            site = getattr(changed[0], ends[-1])
            # What is written lies in the states after it.
            backwards = Site.parse(changed[0].reads) > Site.parse(changed[0].writes)
            if site != getattr(first, ends[-1]) and not backwards:
                word = "at" if ends == BOTH else f"when it {ends[0]}"
                yield Neighbour(f"{word} {site}", "site", move)


def _moved(
    dictionary: "Dictionary", ends: Sequence[str], step: int, part: str | None
) -> "Dictionary":
    """Return the dictionary some layers higher, or at another part of its layer."""
    sites: dict[str, Any] = {}
    for end in ends:
        site = Site.parse(getattr(dictionary, end))
        there = site.part if part is None else part
        sites[end] = str(Site((site.layer or 0) + step, there, site.stack))
    return replace(dictionary, **sites)


def _other_bias(trials: Trials, members: Sequence["Dictionary"]) -> Iterator[Neighbour]:
    """Yield the bias of the decoder that fits these states, if the file's is zero.

    It is fitted to every other text. On all of them a needless one then does neither
    better nor worse: what it gains in these texts it loses in the others.
    """
    first, *others = members
    every_other = trials.states[first.writes].tokens.text % 2 == 1
    half = Trials(trials.states, trials.rows & every_other)
    if first.bias.any() or not half.rows.any():
        return
    fitted = first
    for _ in range(ROUNDS):
        missing = half.run("", [fitted, *others]).missing
        fitted = replace(fitted, bias=fitted.bias + missing.to(fitted.bias))
    name = "with a bias of the decoder, which is zero here and may be missing"
    yield Neighbour(name, "bias", lambda one: fitted if one is first else one)


def _other_encodings(
    dictionary: "Dictionary", stated: Convention, scale: float
) -> Iterator[Neighbour]:
    """Yield what the file may have meant by its input or its activation."""
    encoding = dictionary.encoding
    if dictionary.reads == dictionary.writes:
        word = "not subtracted" if encoding.centred else "subtracted"
        name = f"with the decoder's bias {word} from the input"
        yield _encoded(name, "input", centred=not encoding.centred)
        name = f"with the states scaled by {scale:.3g}"
        if "scale" in dictionary.facts:
            name, scale = "with the states not scaled", 1 / dictionary.facts["scale"]
        yield Neighbour(name, "input", partial(scaled, scale=scale))
    for norm, name in STATE_NORM_WORDS.items():
        if norm != encoding.state_norm:
            yield _encoded(name, "input", state_norm=norm)
    if encoding.gate in ("threshold", "topk"):
        word = "without" if encoding.by_norm else "with"
        name = f"{word} the norm of the directions in the threshold"
        yield _encoded(name, "input", by_norm=not encoding.by_norm)
    if encoding.gate == "topk":
        yield _encoded("with ReLU instead of TopK", "activation", gate="relu")
    if encoding.gate == "topk" and encoding.k:
        for size in {max(1, encoding.k // 2), min(2 * encoding.k, len(dictionary))}:
            yield _encoded(f"with k={size}", "size", k=size)
    if encoding.threshold is not None:
        for times in THRESHOLDS:
            name = f"with thresholds {times} times as high"
            yield _encoded(name, "size", threshold=encoding.threshold * times)
    k = FEWEST
    while encoding.gate == "relu" and k < stated.active:
        name = f"with about the {k} largest activations alone, or a threshold"
        yield _encoded(name, "activation", gate="topk", k=k)
        k += math.ceil(k / 4)


def _encoded(name: str, kind: Any, **fields: Any) -> Neighbour:
    """Return the neighbour whose encoding has other fields."""

    def changed(member: "Dictionary") -> "Dictionary":
        return replace(member, encoding=replace(member.encoding, **fields))

    return Neighbour(name, kind, changed)


def scaled(dictionary: "Dictionary", scale: float) -> "Dictionary":
    """Return a dictionary that first multiplies states, and divides what it decodes."""
    encoding = dictionary.encoding
    if encoding.by_norm and encoding.threshold is not None:
        encoding = replace(encoding, threshold=encoding.threshold / scale)
    encoder = dictionary.encoder
    return replace(
        dictionary,
        encoder=None if encoder is None else encoder * scale,
        directions=dictionary.directions / scale,
        bias=dictionary.bias / scale,
        encoding=encoding,
    )


def _better_slope(way: Convention, stated: Convention) -> bool:
    """Tell whether another activation decodes what is nearer to the right size.

    With fewer features it has to halve an excess; one with more leaves less anyway, and
    must decode too little, as ReLU does after training with a penalty.
    """
    if way.active < stated.active:
        return _below_zero(stated.excess) and 1 - way.slope < (1 - stated.slope) / 2
    return way.slope >= RELU_SLOPE and _less(way, stated, LESS["activation"])


def _better_size(way: Convention, stated: Convention) -> bool:
    """Tell whether another k, or another scale of the thresholds, fits clearly better.

    What was trained on squared errors decodes too little where too few act.
    """
    is_nearer = abs(1 - way.slope) < abs(1 - stated.slope)
    if way.active < stated.active:
        return is_nearer and _less(way, stated, FEWER)
    too_little = is_nearer and stated.slope > TOO_SMALL
    return _less(way, stated, MORE if too_little else MANY_MORE)


def _less(way: Convention, stated: Convention, share: float) -> bool:
    """Tell whether less than this share of what is stated is left, in most texts."""
    less = way.unexplained < share * stated.unexplained
    return less and _below_zero(way.left - stated.left)


def _below_zero(values: Floats) -> bool:
    """Tell whether the mean over texts is below 0, by Student's interval."""
    if len(values) < 2:
        return bool(values.mean() < 0)
    error = values.std(ddof=1) / math.sqrt(len(values))
    reach = stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * error
    return bool(values.mean() + reach < 0)
