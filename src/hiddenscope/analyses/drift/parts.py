"""Compare two live models part by part: each block of the candidate on exactly what the
reference's block was given.

Each batch takes one pass of both as they are, one of the reference in float64, and one
of the candidate in which every layer is replaced by the reference's after it was
measured. Where dtypes or attention kernels differ, the parts are compared in the
coarser dtype and with the candidate's kernel, on private copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.drift.counterparts import is_column_scaled
from hiddenscope.analyses.drift.errors import (
    Errors,
    Where,
    main_site,
    places_of,
    refuse_broken_states,
    refuse_not_finite,
    stack_of,
    token_finder,
)
from hiddenscope.analyses.drift.noise import INFINITE, Gap, Noise, gap
from hiddenscope.analyses.drift.observe import (
    LOGITS,
    Observed,
    ObservedState,
    Side,
    observe,
)
from hiddenscope.analyses.drift.streaming import StateQueue
from hiddenscope.errors import NotFinite
from hiddenscope.model import Model
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

# So many tokens, or this share of them, may be beyond the noise because a block is
# unsrecorder there.
FEW_TOKENS, FEW_TOKENS_SHARE = 2, 0.05
# The input of such a block is changed by so many units in the last place, to see
# whether it is.
PERTURBATIONS_ULP = (1, 2, 4) * 4
Batch = tuple[list[int], Inputs]
"""The numbers of some texts among all, and these texts."""


@dataclass(frozen=True)
class ComparedSides:
    """The two models as they were given, and as their parts are compared: in one dtype,
    with one attention kernel.
    """

    reference: Side
    candidate: Side
    equal_reference: Side
    equal_candidate: Side
    notes: tuple[str, ...] = ()

    @property
    def sites(self) -> list[Site]:
        """The sites that both have."""
        return [site for site in self.reference.sites if site in self.candidate.taps]

    @property
    def noise_sources(self) -> list[str]:
        """Say how the noise is measured."""
        sources = ["float64"]
        if self.candidate.dtype != self.reference.dtype:
            sources.append("dtype")
        if self.equal_reference.kernel != self.reference.kernel:
            sources.append("kernel")
        return sources

    def passes(self, batches: int) -> dict[str, float]:
        """Count the passes of each model that a batch took; a model that serves as two
        sides counts once.
        """
        references = {
            id(side): side.passes for side in (self.reference, self.equal_reference)
        }
        candidates = {
            id(side): side.passes for side in (self.candidate, self.equal_candidate)
        }
        return {
            "reference": sum(references.values()) / batches,
            "candidate": sum(candidates.values()) / batches,
        }


def changed_weights(sides: ComparedSides) -> list[tuple[str, float]]:
    """List the weights that differ between two models with the same modules, and by
    what share of their norm.

    They show differences that no state shows. A port's weights may be laid out
    otherwise, and are not compared.
    """
    if sides.candidate.is_port:
        return []
    weights = dict(sides.equal_candidate.module.named_parameters())
    changed: list[tuple[str, float]] = []
    for name, weight in sides.equal_reference.module.named_parameters():
        other = weights.get(name)
        if (
            other is None
            or other is weight
            or other.shape != weight.shape
            or weight.is_meta
            or other.is_meta
        ):
            continue
        expected, values = weight.detach(), other.detach().to(weight.device)
        if not torch.equal(expected, values.to(expected.dtype)):
            norm = float(expected.double().norm())
            difference = float((values.double() - expected.double()).norm())
            changed.append((name, difference / norm if norm else torch.inf))
    return changed


def compare_parts(
    sides: ComparedSides, model: Model, inputs: Inputs, *, low_memory: bool = False
) -> Errors:
    """Compare two live models part by part. A padded batch in which a NaN comes up is
    run again text by text.
    """
    batches = list(inputs.batches(model))
    if sides.candidate.is_port:
        return _compare_batches(sides, model, inputs, _one_by_one(inputs), low_memory)
    try:
        return _compare_batches(sides, model, inputs, batches, low_memory)
    except NotFinite:
        has_padding = any(len(set(batch.costs)) > 1 for _, batch in batches)
        if not has_padding:
            raise
    for side in (
        sides.reference,
        sides.candidate,
        sides.equal_reference,
        sides.equal_candidate,
    ):
        side.passes = 0
    errors = _compare_batches(sides, model, inputs, _one_by_one(inputs), low_memory)
    errors.notes.append(
        "Texts were run one at a time, because a NaN comes up in a padded batch."
    )
    return errors


def _one_by_one(inputs: Inputs) -> list[Batch]:
    return [([text], inputs.some([text])) for text in range(len(inputs))]


def empty_errors(inputs: Inputs, reference: Side) -> Errors:
    """Make the errors of some texts, before any is measured."""
    stacks = reference.anatomy.stacks
    names = [stack.name for stack in stacks] if len(stacks) > 1 else [None]
    return Errors({name: sum(inputs.of(name).lengths) for name in names})


def _compare_batches(
    sides: ComparedSides,
    model: Model,
    inputs: Inputs,
    batches: Sequence[Batch],
    low_memory: bool,
) -> Errors:
    errors = empty_errors(inputs, sides.reference)
    errors.noise_sources = sides.noise_sources
    errors.notes += sides.notes
    compare = _compare_in_step if low_memory else _compare_batch
    reference_has_head = False
    with progress.track("Comparing", total=len(batches)) as advance:
        # Where texts are batched by length, the shortest come last: the self-check is
        # made on these.
        for texts, batch in reversed(batches):
            where = token_finder(inputs, texts, model.text_encoder, errors.tokens)
            recorder = _BatchRecorder(
                errors, sides, batch, places_of(inputs, texts, errors.tokens), where
            )
            reference_has_head |= compare(recorder)
            advance(1)
    errors.passes = sides.passes(len(batches))
    if reference_has_head and LOGITS not in errors.beyond:
        errors.notes.append(
            "The candidate gives no logits of the reference's shape: they were not"
            " compared."
        )
    errors.notes = list(dict.fromkeys(errors.notes))
    longest = max((batch for _, batch in batches), key=lambda batch: sum(batch.lengths))
    errors.finish(sides.sites, longest)
    if sides.candidate.is_port:
        _drop_folded_norms(errors, sides)
    return errors


def _drop_folded_norms(errors: Errors, sides: ComparedSides) -> None:
    """Leave `final` out where the logits agree, or where the head has the norm's
    weights folded into its columns.
    """
    finals = [name for name in errors.drifting if name.endswith("final")]
    logits_agree = LOGITS in errors.beyond and LOGITS not in errors.drifting
    if not finals or not (logits_agree or _has_folded_head(sides)):
        return
    for name in finals:
        errors.drop(name)
        words = (
            f"`{name}` was not compared: the weights of the candidate's last norm seem"
            " to be folded into its head."
        )
        errors.notes.append(words)


def _has_folded_head(sides: ComparedSides) -> bool:
    """Check whether the port has a matrix that is the reference's head with its columns
    scaled.
    """
    head = sides.reference.anatomy.head
    weight = (
        None
        if head is None
        else getattr(sides.equal_reference.part(head.path), "weight", None)
    )
    if not isinstance(weight, Tensor):
        return False
    rounding = Noise.assumed(sides.candidate.dtype).envelope
    return any(
        is_column_scaled(other, weight, rounding)
        for other in sides.equal_candidate.module.parameters()
    )


@dataclass
class _BatchRecorder:
    """Adds what differs in one batch to the errors of all."""

    errors: Errors
    sides: ComparedSides
    batch: Inputs
    places: Mapping[str | None, Sequence[int]]
    where: Where
    isolated: list[tuple[ObservedState, Tensor]] = field(default_factory=list)

    def places_at(self, name: str) -> Sequence[int]:
        return self.places[stack_of(name, self.errors.tokens)]

    def add_whole(self, reference: ObservedState, rows: Tensor) -> None:
        """Add what differs at a site in whole passes."""
        refuse_not_finite("reference", reference.name, reference.rows, self.where)
        refuse_not_finite("candidate", reference.name, rows, self.where)
        if reference.rows.shape == rows.shape:
            self.errors.put_cells(
                reference.name, self.places_at(reference.name), reference.rows, rows
            )

    def add_local(
        self, reference: ObservedState, rows: Tensor, unreplaced_rows: Tensor | None
    ) -> Tensor | None:
        """Add what a part does by itself, and return the reference's layer for the next
        part to start from.
        """
        name = reference.name
        if reference.noise is None or reference.rows.shape != rows.shape:
            return None
        local = gap(reference.rows, rows)
        layer = main_site(name)
        if self._is_isolated(local, reference.noise):
            self.isolated.append((reference, rows))
        else:
            self._judge(reference, rows, local, reference.noise)
        if name != layer:
            return None
        self.errors.put(name, "local", self.places_at(name), local.rows)
        if unreplaced_rows is not None:
            norms = (
                reference.rows.double()
                .norm(dim=-1)
                .clamp_min(torch.finfo(torch.float64).tiny)
            )
            inherited = (unreplaced_rows.double() - rows.double()).norm(dim=-1) / norms
            self.errors.put(name, "inherited", self.places_at(name), inherited)
        # A port may have the final norm folded into its head, which then cannot start
        # from the reference's state.
        enters_folded_head = self.sides.candidate.is_port and name.endswith("final")
        return None if enters_folded_head else reference.rows

    def _judge(
        self, reference: ObservedState, rows: Tensor, local: Gap, noise: Noise
    ) -> None:
        self.errors.judge(main_site(reference.name), local, noise, self.batch)
        if reference.exact is not None:
            self.errors.add_systematic(
                reference.name, reference.rows, rows, reference.exact
            )

    def _is_isolated(self, local: Gap, noise: Noise) -> bool:
        """Check whether an error is beyond the noise at no more than a few tokens."""
        over = int((local.rows > noise.envelope).sum())
        return (
            over <= max(FEW_TOKENS, FEW_TOKENS_SHARE * len(local.rows))
            and noise.times_over(local) > 1
        )

    def judge_isolated(self) -> None:
        """Judge sites with errors at a few tokens, by what a change in the last places
        of the input does there.

        A router that must choose between two experts, or rounding to integers, may make
        much of it at a few tokens.
        """
        for reference, rows in self.isolated:
            site = Site.parse(reference.name) if reference.name != LOGITS else None
            noise = reference.noise
            assert noise is not None
            if site is not None and site.layer:
                noise = noise.joined(self._instability(site, reference))
            self._judge(reference, rows, gap(reference.rows, rows), noise)
        self.isolated.clear()

    def _instability(self, site: Site, reference: ObservedState) -> list[Gap]:
        """Change the input of a block in its last places some times, and measure what
        that does to a site in it.
        """
        before = Site((site.layer or 1) - 1, "", site.stack)
        unit = torch.finfo(reference.rows.dtype).eps
        generator = torch.Generator().manual_seed(0)
        gaps: list[Gap] = []
        size = unit

        def change(state: ObservedState) -> Tensor | None:
            if state.name == reference.name:
                gaps.append(gap(reference.rows, state.rows))
            if state.name != str(before):
                return None
            signs = torch.randint(0, 2, state.rows.shape, generator=generator) * 2 - 1
            return state.rows * (1 + size * signs)

        side = self.sides.equal_reference
        passes = side.passes
        for units in PERTURBATIONS_ULP:
            size = units * unit
            observe(side, self.batch, [before, site], visit=change)
        # They belong to no comparison of the two.
        side.passes = passes
        return gaps

    def add_missing(self, expected: Sequence[str], reached: set[str]) -> None:
        """Call a layer that the candidate never reaches infinitely far off.

        One that is only seen as it enters a block is not seen where the candidate
        leaves that block out.
        """
        taps = self.sides.candidate.taps
        entries = {str(site) for site, tap in taps.items() if tap.side == "input"}
        for name in expected:
            if (
                name == main_site(name)
                and name not in reached
                and name not in entries
                and name != LOGITS
            ):
                self.errors.judge(
                    name,
                    INFINITE,
                    Noise.assumed(self.sides.candidate.dtype),
                    self.batch,
                )

    def check_self(self, observations: Sequence[tuple[Side, Observed]]) -> None:
        """Compare a pass with hooks and one without, bit for bit, once."""
        if self.errors.observing_changed_nothing is None:
            unchanged = [
                _is_unchanged(side, self.batch, observed)
                for side, observed in observations
            ]
            self.errors.observing_changed_nothing = all(unchanged)


def _compare_batch(recorder: _BatchRecorder) -> bool:
    """Compare the passes of one batch; return whether the reference gives logits."""
    sides, batch = recorder.sides, recorder.batch
    expected = observe(sides.equal_reference, batch, sides.sites, noise=True)
    recorder.errors.notes += expected.notes
    reference = expected
    if sides.equal_reference is not sides.reference:
        reference = observe(sides.reference, batch, sides.sites)
    candidate = observe(sides.candidate, batch, sides.sites)
    refuse_broken_states("reference", reference, recorder.where)
    refuse_broken_states("candidate", candidate, recorder.where)
    for name, state in reference.states.items():
        if name in candidate.states and name == main_site(name):
            recorder.add_whole(state, candidate.rows(name))
    unreplaced = candidate
    if sides.equal_candidate is not sides.candidate:
        unreplaced = observe(sides.equal_candidate, batch, sides.sites)
    reached: set[str] = set()

    def compare(state: ObservedState) -> Tensor | None:
        reference_state = expected.states.get(state.name)
        if reference_state is None or state.name not in unreplaced.states:
            return None
        reached.add(state.name)
        return recorder.add_local(
            reference_state, state.rows, unreplaced.rows(state.name)
        )

    observe(sides.equal_candidate, batch, sides.sites, visit=compare)
    recorder.judge_isolated()
    recorder.add_missing(list(expected.states), reached)
    recorder.check_self([(sides.reference, reference), (sides.candidate, candidate)])
    return LOGITS in reference.states


def _compare_in_step(recorder: _BatchRecorder) -> bool:
    """Compare one batch with two layers' states in memory; what is inherited takes both
    passes at once.
    """
    sides, batch = recorder.sides, recorder.batch
    layers = [site for site in sides.sites if not site.part]
    whole = StateQueue()

    def compare_whole(state: ObservedState) -> None:
        expected = whole.take(state.name)
        if expected is not None:
            recorder.add_whole(expected, state.rows)

    candidate = whole.run_in_step(
        lambda: observe(sides.reference, batch, layers, visit=whole.give),
        lambda: observe(sides.candidate, batch, layers, visit=compare_whole),
    )
    parts = StateQueue()
    reached: set[str] = set()

    def compare_part(state: ObservedState) -> Tensor | None:
        expected = parts.take(state.name)
        if expected is None:
            return None
        reached.add(state.name)
        return recorder.add_local(expected, state.rows, None)

    parts.run_in_step(
        lambda: observe(
            sides.equal_reference, batch, sides.sites, visit=parts.give, noise=True
        ),
        lambda: observe(sides.equal_candidate, batch, sides.sites, visit=compare_part),
    )
    recorder.judge_isolated()
    recorder.add_missing(parts.names, reached)
    recorder.check_self([(sides.candidate, candidate)])
    return LOGITS in whole.names


def _is_unchanged(side: Side, batch: Inputs, observed: Observed) -> bool:
    """Check that a pass without any hook gives the same output bit for bit."""
    bare = hooks.first_tensor(side.run(side.batch(batch)))
    return (
        observed.output is not None
        and bare is not None
        and torch.equal(bare.cpu(), observed.output)
    )
