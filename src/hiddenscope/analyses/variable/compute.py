"""What is exchanged at every site and token, beside controls, and the report."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.variable.exchange import (
    Place,
    Prompts,
    exchanged,
    first_places,
    learn,
    read_alone,
)
from hiddenscope.analyses.variable.story import NAMES, Held, VariableReport
from hiddenscope.causes.contrast import Interchange, read_interchanges
from hiddenscope.causes.encoding import AskedContrasts, EncodedContrast, encode_distinct
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import Error, SiteError, StatesError, TextError
from hiddenscope.linear.crossvalidation import assign_folds
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import effective_count, group_sums
from hiddenscope.measures.permutations import corrected_sign_flip_p
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs, record
from hiddenscope.passes.edit import changeable
from hiddenscope.passes.losses import batch_size
from hiddenscope.passes.sweep import logits_tolerance
from hiddenscope.results import Result
from hiddenscope.results.dataset import Variables, to_dataset
from hiddenscope.sites import Site, SitePatterns, summarise
from hiddenscope.states import States
from hiddenscope.states.arrays import Floats, Ints

Cell: TypeAlias = tuple[str, str]
PROBLEM = "Cannot look for a variable"
LEVEL = 0.05
FOLDS = 2
# Random subspaces of which the mean is taken.
DRAWS = 4
# Controls that must do worse than the subspace, in the order in which they are named.
WORSE = ("unchanged", "random", "mismatched", "shuffled", "reinitialised")


class Trial(NamedTuple):
    """Pairs in one model: the runs of their bases and sources, their groups and folds,
    and another source for each, drawn from all of them.

    `direct` [pair, width] is what the answers read of the last layer.
    """

    base: Prompts
    source: Prompts
    direct: Tensor
    groups: Ints
    folds: Ints
    wrong: Ints
    subspace: Any
    rank: int
    seed: int

    def bases(self, place: Place, difference: Tensor) -> list[Tensor]:
        """Return the subspace that is tested on each fold, found on the others."""
        bases = []
        for fold in range(FOLDS):
            others = np.flatnonzero(self.folds != fold).tolist()
            if isinstance(self.subspace, Tensor | Direction):
                basis = _orthonormal(self.subspace, place.site, difference.shape[1])
            elif self.subspace == "pca":
                basis = torch.linalg.svd(difference[others])[2][: self.rank]
            else:
                basis = learn(
                    self.base, place, difference, others, self.rank, self.seed
                )
            bases.append(basis)
        return bases

    def moved(self, difference: Tensor, bases: Sequence[Tensor]) -> Tensor:
        """Return what of the differences lies in the subspace of each pair's fold."""
        moved = torch.zeros_like(difference)
        for fold, basis in enumerate(bases):
            here = torch.from_numpy(self.folds == fold)
            moved[here] = exchanged(difference[here], basis)
        return moved

    def found(self, place: Place, order: Any = ...) -> Floats:
        """Return the hits of a subspace found and tested with sources in this order."""
        base = self.base.rows(place)
        difference = self.source.rows(place)[order] - base
        moved = self.moved(difference, self.bases(place, difference))
        return self.base.hits(place, base + moved)


class Looked(NamedTuple):
    """One site and token: the hits of every pair by what was exchanged, the mean
    subspace, and the share of it that the answers do not read.
    """

    hits: dict[str, Floats]
    basis: Tensor
    unread: float


def find_variable(
    model: ModelLike,
    pairs: Sequence[Interchange] | str,
    sites: SitePatterns,
    tokens: Sequence[int] | None,
    subspace: Any,
    rank: int,
    seed: int,
) -> Result:
    """Exchange a subspace at every site and token, beside the controls."""
    model = as_model(model)
    listed = _listed(pairs)
    subspace, rank = _given(subspace, rank)
    notes: list[str] = []
    selected = _sites(model, sites, rank, notes)
    asked = _encoded(model, listed)
    encoded, groups, _ = asked
    notes += asked.notes()
    columns = _columns(encoded, tokens)
    classes = np.unique([pair.other for pair in encoded], return_inverse=True)[1]
    folds = assign_folds(classes, list(map(str, groups)), FOLDS, seed)
    wrong = np.random.default_rng(seed).permutation(len(encoded))
    cells = {}
    for site in selected:
        for column, positions in columns.items():
            cells[str(site), column] = Place(site, positions)

    def trial_in(model: Model) -> Trial:
        base = _prompts(model, encoded, 0, selected)
        source = _prompts(model, encoded, 1, selected)
        last = Place(Site(model.anatomy.stacks[0].depth), base.at)
        direct, _ = base.gradients(last, base.rows(last), range(len(encoded)))
        return Trial(base, source, direct, groups, folds, wrong, subspace, rank, seed)

    with autograd.restored(inference=False), torch.no_grad():
        trial = trial_in(model)
        _check_told_apart(trial)
        looked, failed = _search(
            trial, cells, lambda: trial_in(model.randomised(seed)), notes
        )
        right = first_places(trial.base.logits, trial.base.answer)
    held = []
    count = effective_count(groups)
    for cell, found in looked.items():
        value = float(found.hits["learned"].mean())
        low, high = wilson(value, count, len(looked))
        held.append(
            Held(
                site=cell[0],
                token=cell[1],
                value=value,
                low=low,
                high=high,
                unread=found.unread,
                failed=failed[cell],
            )
        )
    report = VariableReport(
        pairs=len(encoded),
        groups=asked.group_count,
        subspace=subspace if isinstance(subspace, str) else "given",
        rank=rank,
        right=float(right.mean()),
        cells=sorted(held, key=lambda cell: -cell.value),
        notes=list(dict.fromkeys(notes)),
    )
    data = _dataset(cells, looked, held, rank)
    return Result("variable", data, report, model.source(None))


def _search(
    trial: Trial,
    cells: Mapping[Cell, Place],
    random_weights: Callable[[], Trial],
    notes: list[str],
) -> tuple[dict[Cell, Looked], dict[Cell, list[str]]]:
    """Look at every cell, and learn again, as controls, in those that are left."""
    looked = {}
    with progress.track("Exchanging", total=len(cells)) as advance:
        for cell, place in cells.items():
            found = _look(trial, place)
            if found is not None:
                looked[cell] = found
            advance(1)
    if not looked:
        reason = "base and source have equal states at every site and token"
        raise TextError(PROBLEM, reason, "Name tokens at which they differ.")
    # Where the source itself is answered so, the whole state should do no less.
    alike = first_places(trial.source.logits, trial.base.target)
    failed = _judged(looked, alike, trial.groups)
    left = {cell: looked[cell] for cell in looked if not failed[cell]}
    random = None
    if left:
        try:
            random = random_weights()
        except Error as error:
            notes.append(f"Random weights were not tried: {error.reason}.")
    with progress.track("Learning controls", total=len(left)) as advance:
        for cell, found in left.items():
            found.hits["shuffled"] = trial.found(cells[cell], trial.wrong)
            if random is not None:
                found.hits["reinitialised"] = random.found(cells[cell])
            advance(1)
    return looked, failed | _judged(left, alike, trial.groups)


def _look(trial: Trial, place: Place) -> Looked | None:
    """Exchange a subspace at one site and token, and what it is compared with; None
    where base and source have the same states.
    """
    prompts = trial.base
    base = prompts.rows(place)
    source = trial.source.rows(place)
    difference = source - base
    if not bool(difference.any()):
        return None
    bases = trial.bases(place, difference)
    moved = trial.moved(difference, bases)
    read = torch.zeros_like(difference)
    shares = []
    for fold, basis in enumerate(bases):
        others = np.flatnonzero(trial.folds != fold).tolist()
        gradients, _ = prompts.gradients(place, base, others)
        # Where a dormant pathway would be awake.
        after = base + exchanged(difference, basis)
        awake, _ = prompts.gradients(place, after, others)
        here = torch.from_numpy(trial.folds == fold)
        gradients = torch.cat([gradients, awake])
        if not place.site.is_inner:
            # What reaches the answers past all later parts is read apart from these.
            passes = place.positions[others] == prompts.at[others]
            gradients = torch.cat([gradients, trial.direct[others][passes]])
        read[here], share = read_alone(basis, gradients, difference[here])
        shares.append(share)
    shifts = {
        "learned": moved,
        "whole": difference,
        "mismatched": trial.moved(source[trial.wrong] - base, bases),
        "read": read,
    }
    hits = {"unchanged": first_places(prompts.logits, prompts.target)}
    for name, shift in shifts.items():
        hits[name] = prompts.hits(place, base + shift)
    generator = torch.Generator().manual_seed(trial.seed)
    draws = []
    for _ in range(DRAWS):
        drawn = torch.randn(bases[0].T.shape, generator=generator, dtype=base.dtype)
        rows = torch.linalg.qr(drawn)[0].T
        along = exchanged(difference, rows)
        scale = moved.norm(dim=1) / along.norm(dim=1).clamp_min(1e-30)
        draws.append(prompts.hits(place, base + scale[:, None] * along))
    hits["random"] = np.mean(draws, axis=0)
    # The directions that the subspaces of both folds have most in common.
    basis = torch.linalg.svd(torch.cat(bases))[2][: len(bases[0])]
    # A direction is defined up to its sign: its largest component is made positive.
    basis = basis * basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
    return Looked(hits, basis, float(np.mean(shares)))


def _judged(
    looked: Mapping[Cell, Looked], alike: Floats, groups: Ints
) -> dict[Cell, list[str]]:
    """Return the controls that each cell does not survive.

    All comparisons of all cells are tested together: the signs of whole groups are
    flipped. That a subspace does more than the whole state is suspect by itself, so
    that more cells must not hide it.
    """
    places = []
    columns: list[Floats] = []
    for cell, (hits, _, _) in looked.items():
        gaps = {
            "whole": alike * (hits["learned"] - hits["whole"]),
            "read": hits["read"] - hits["random"],
        }
        for name in WORSE:
            if name in hits:
                gaps[name] = hits["learned"] - hits[name]
        places += [(cell, name) for name in gaps]
        columns += gaps.values()
    failed: dict[Cell, list[str]] = {cell: [] for cell in looked}
    if columns:
        sums = group_sums(np.stack(columns, 1), groups)
        sizes = np.bincount(groups)
        means = sums / sizes[:, None]
        p_values = corrected_sign_flip_p(means)
        for number, (cell, name) in enumerate(places):
            is_failed = p_values[number] > LEVEL
            if name == "whole":
                is_failed = corrected_sign_flip_p(means[:, [number]])[0] <= LEVEL
            if is_failed:
                failed[cell].append(name)
    return failed


def _dataset(
    cells: Mapping[Cell, Any],
    looked: Mapping[Cell, Looked],
    held: Sequence[Held],
    rank: int,
) -> Any:
    """Return accuracies and subspaces by site and token."""
    sites, tokens = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    shape = len(sites), len(tokens)
    numbers = {name: np.full(shape, np.nan, np.float32) for name in NAMES}
    width = max(found.basis.shape[1] for found in looked.values())
    basis = np.full((*shape, rank, width), np.nan)
    for place in held:
        cell = sites.index(place.site), tokens.index(place.token)
        found = looked[place.site, place.token]
        values = {name: hits.mean() for name, hits in found.hits.items()}
        values |= {"low": place.low, "high": place.high, "unread": place.unread}
        for name, value in values.items():
            numbers[name][cell] = value
        basis[cell][:, : found.basis.shape[1]] = found.basis
    dims = ("site", "token", "rank", "width")
    variables: Variables = {"basis": (dims, basis, "basis of the subspace")}
    for name, words in NAMES.items():
        variables[name] = ("site", "token"), numbers[name], words
    return to_dataset(variables, {"site": sites, "token": tokens})


def _listed(pairs: Any) -> list[Interchange]:
    """Return the pairs, of which some must have another answer than their base."""
    listed = read_interchanges(pairs) if isinstance(pairs, str) else list(pairs)
    remedy = "Give hs.Interchange(base, source, answer, counterfactual), several times."
    if not listed:
        raise TextError(PROBLEM, "there are no pairs", remedy)
    if not all(isinstance(pair, Interchange) for pair in listed):
        raise TextError("pairs must be Interchanges", f"got {pairs!r:.60}", remedy)
    if all(pair.answer == pair.counterfactual for pair in listed):
        reason = "every counterfactual is the answer itself, so nothing would change"
        raise TextError(PROBLEM, reason, "Give pairs whose values differ.")
    return listed


def _given(subspace: Any, rank: int) -> tuple[Any, int]:
    """Return a word, a direction or rows [rank, width], and the rank."""
    if isinstance(subspace, str):
        return subspace, rank
    if isinstance(subspace, Direction) or hasattr(subspace, "coef_"):
        return Direction.of(subspace), 1
    remedy = "Give 'learned', 'pca', a direction, or rows [rank, width]."
    try:
        rows = torch.as_tensor(np.asarray(subspace)).double()
    except (TypeError, ValueError) as error:
        raise StatesError(PROBLEM, f"got {subspace!r:.60}", remedy) from error
    if rows.ndim == 1:
        rows = rows[None]
    if rows.ndim != 2 or not len(rows) or not rows.isfinite().all():
        reason = f"a subspace of the shape {list(rows.shape)} is no rows of numbers"
        raise StatesError(PROBLEM, reason, remedy)
    if rank not in (1, len(rows)):
        reason = f"the rank is {rank}, and {len(rows)} rows were given"
        raise StatesError(PROBLEM, reason, "Leave the rank out.")
    if torch.linalg.matrix_rank(rows) < len(rows):
        reason = f"rows of the shape {list(rows.shape)} depend on one another"
        raise StatesError(PROBLEM, reason, remedy)
    return rows, len(rows)


def _orthonormal(subspace: Tensor | Direction, site: Site, width: int) -> Tensor:
    """Return orthonormal rows of a subspace that was given."""
    if isinstance(subspace, Direction):
        subspace = subspace.vector_at(site, width)[None]
    if subspace.shape[1] != width:
        reason = f"the subspace is {subspace.shape[1]} wide, and {site} {width}"
        raise StatesError(PROBLEM, reason, "Give rows that fit the site.")
    basis: Tensor = torch.linalg.qr(subspace.T)[0].T
    return basis


def _sites(
    model: Model, patterns: SitePatterns, rank: int, notes: list[str]
) -> tuple[Site, ...]:
    """Return the sites at which states can be exchanged."""
    selected = []
    sites, left_out = changeable(model.anatomy, model.anatomy.select(patterns))
    for site in sites:
        width = model.anatomy.width(site)
        if rank > width:
            reason = f"the rank is {rank}, and {site} is {width} wide"
            raise SiteError(PROBLEM, reason, "Give a lower rank.")
        # Gradients there are not those of what is put in place.
        if site.index is not None or site.part == "mid":
            left_out.append(site)
        else:
            selected.append(site)
    if not selected:
        remedy = "Give layers, attn, attn.z, mlp or mlp.neurons."
        raise SiteError(PROBLEM, "no such site can be exchanged", remedy)
    if left_out:
        notes.append(f"{summarise(left_out)} cannot be exchanged and was left out.")
    return tuple(selected)


def _encoded(model: Model, pairs: Sequence[Interchange]) -> AskedContrasts:
    """Encode the pairs; refuse those that do not align, that contradict one another or
    that are all of one group.
    """
    asked = encode_distinct(model, pairs, one_form=False)
    seen: dict[Any, tuple[int, int]] = {}
    for number, pair in enumerate(asked.encodings):
        answers = pair.answer, pair.other
        if seen.setdefault((pair.inputs.ids, pair.at), answers) != answers:
            reason = "the same base and source are given with different answers"
            raise TextError(PROBLEM, reason, "Give one pair for each base and source.")
        base, source = pair.inputs.lengths
        if base != source:
            reason = f"in pair {number} the base has {base} tokens, the source {source}"
            remedy = "Give prompts with the same number of tokens."
            raise TextError("Cannot align the tokens of a pair", reason, remedy)
    if asked.group_count == 1:
        reason = "all pairs belong to one group, so that none can be held out"
        raise TextError(PROBLEM, reason, "Give pairs of several groups.")
    return asked


def _columns(
    encoded: Sequence[EncodedContrast], tokens: Sequence[int] | None
) -> dict[str, Ints]:
    """Return the positions, in every pair, of each token that is looked at."""
    columns: dict[str, Any] = {}
    for token in tokens or ():
        columns[f"token {token}"] = [token] * len(encoded)
    if tokens is None:
        differing = []
        for pair in encoded:
            base, source = map(np.array, pair.inputs.ids)
            differing.append(np.flatnonzero(base != source)[-1])
        last = [pair.at[0] for pair in encoded]
        if differing != last:
            columns["the differing token"] = differing
        columns["the answering token"] = last
    lengths = np.array([pair.inputs.lengths[0] for pair in encoded])
    positions = {}
    for name, column in columns.items():
        places = np.array(column)
        places = np.where(places < 0, places + lengths, places)
        if not ((places >= 0) & (places < lengths)).all():
            reason = f"one of them has {lengths.min()} tokens"
            remedy = "Name positions that all have; -1 is the last."
            raise TextError(f"Not all pairs have {name}", reason, remedy)
        positions[name] = places
    return positions


def _check_told_apart(trial: Trial) -> None:
    """Refuse pairs of which base and source prefer the answers alike."""
    base = trial.base
    change = trial.source.logits - base.logits
    pairs = torch.arange(len(change))
    gaps = change[pairs, base.target] - change[pairs, base.answer]
    largest = float(base.logits.abs().max())
    rounding = logits_tolerance(base.model) * largest
    if float(gaps.abs().max()) <= rounding:
        reason = "base and source prefer the answers alike, within rounding"
        raise TextError(PROBLEM, reason, "Give prompts that tell them apart.")


def _prompts(
    model: Model, encoded: Sequence[EncodedContrast], side: int, sites: Sequence[Site]
) -> Prompts:
    """Run the bases, or the sources, of all pairs."""
    inputs = Inputs(tuple(pair.inputs.ids[side] for pair in encoded))
    at = np.array([pair.at[side] for pair in encoded])
    ids = np.array([(pair.answer, pair.other) for pair in encoded])
    candidates, places = np.unique(ids, return_inverse=True)
    answer, target = torch.from_numpy(places.reshape(ids.shape)).T
    logits = torch.zeros(len(encoded), len(candidates), dtype=torch.float64)
    for texts, batch in inputs.batches(model, batch_tokens=batch_size(model)):
        run = record(model, batch, (), logits=True)
        assert run.logits is not None
        starts = np.cumsum([0, *batch.lengths[:-1]])
        logits[texts] = run.logits[starts + at[texts]][:, candidates].double().cpu()
    last = Site(model.anatomy.stacks[0].depth)
    states = model.capture(inputs, tuple(sorted({*sites, last})))
    assert isinstance(states, States), "the model has one stack"
    return Prompts(
        model, inputs, at, torch.from_numpy(candidates), answer, target, logits, states
    )
