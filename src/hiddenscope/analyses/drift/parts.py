"""Compare two live models part by part: each block on the input of the reference's.

For each batch both models run once as they are, the reference once more in float64, and
the candidate once more with every layer replaced by the reference's after it was
measured. If dtypes or attention kernels differ, the parts are compared on private
copies, in the coarser dtype and with the candidate's kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.drift.errors import (
    Errors,
    Where,
    main_site,
    places_of,
    refuse_not_finite,
    stack_of,
    token_finder,
)
from hiddenscope.analyses.drift.live_model import LOGITS, LiveModel, layer_before
from hiddenscope.analyses.drift.noise import INFINITE, Gap, Noise, gap
from hiddenscope.analyses.drift.observe import Observed, ObservedState, observe
from hiddenscope.analyses.drift.streaming import StateQueue
from hiddenscope.analyses.drift.weights import is_column_scaled
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.model import Model
from hiddenscope.modules import hooks
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site

# If no more than this many tokens, or this share of them, are beyond the noise, the
# block may be unstable at these tokens: its input is then perturbed in the last place.
FEW_TOKENS, FEW_TOKENS_SHARE = 2, 0.05
# Sizes of these perturbations. Each is tried four times with random signs.
PERTURBATIONS_ULP = (1, 2, 4) * 4
Batch = tuple[list[int], Inputs]
"""The numbers of some texts among all, and these texts."""


@dataclass(frozen=True)
class ComparedSides:
    """Both models as given, and as their parts are compared.

    The `equal_` models have one dtype and one attention kernel.
    """

    reference: LiveModel
    candidate: LiveModel
    equal_reference: LiveModel
    equal_candidate: LiveModel
    notes: tuple[str, ...] = ()

    @property
    def sites(self) -> list[Site]:
        """Return the sites that both have."""
        return [site for site in self.reference.sites if site in self.candidate.taps]

    @property
    def noise_sources(self) -> list[str]:
        """Return the names of the measurements behind the noise."""
        sources = ["float64"]
        if self.candidate.dtype != self.reference.dtype:
            sources.append("dtype")
        if self.equal_reference.kernel != self.reference.kernel:
            sources.append("kernel")
        return sources

    @property
    def rounds_inputs(self) -> bool:
        """Tell whether layers of the reference round their input to 8 bits."""
        weights = quantised_weights(self.equal_reference.module)
        return any(weight.rounds_input for weight in weights)

    def passes(self) -> dict[str, float]:
        """Return how many passes each model has run, private copies included."""
        counts = {
            "reference": self.reference.passes,
            "candidate": self.candidate.passes,
        }
        if self.equal_reference is not self.reference:
            counts["reference"] += self.equal_reference.passes
        if self.equal_candidate is not self.candidate:
            counts["candidate"] += self.equal_candidate.passes
        return counts

    def reset_passes(self) -> None:
        """Set the counts of passes to zero."""
        for model in (
            self.reference,
            self.candidate,
            self.equal_reference,
            self.equal_candidate,
        ):
            model.passes = 0


def compare_parts(
    sides: ComparedSides, model: Model, inputs: Inputs, *, low_memory: bool = False
) -> Errors:
    """Compare two live models part by part.

    If a NaN comes up in a padded batch, the texts are run again one at a time.
    """
    singles: list[Batch] = []
    for text in range(len(inputs)):
        singles.append(([text], inputs.some([text])))
    # A port need not know padding.
    if sides.candidate.is_port:
        return _compare_batches(sides, model, inputs, singles, low_memory)
    batches = list(inputs.batches(model))
    try:
        return _compare_batches(sides, model, inputs, batches, low_memory)
    except NotFinite:
        has_padding = any(len(set(batch.costs)) > 1 for _, batch in batches)
        if not has_padding:
            raise
    sides.reset_passes()
    errors = _compare_batches(sides, model, inputs, singles, low_memory)
    errors.notes.append(
        "Texts were run one at a time, because a NaN comes up in a padded batch."
    )
    return errors


def _compare_batches(
    sides: ComparedSides,
    model: Model,
    inputs: Inputs,
    batches: Sequence[Batch],
    low_memory: bool,
) -> Errors:
    errors = Errors.for_texts(inputs, sides.reference)
    errors.noise_sources = sides.noise_sources
    errors.notes += sides.notes
    compare = _compare_in_step if low_memory else _compare_batch
    reference_has_head = False
    with progress.track("Comparing", total=len(batches)) as advance:
        # Batches are ordered by length, so the self-check of the first batch compared
        # here runs on the shortest texts.
        for texts, batch in reversed(batches):
            where = token_finder(inputs, texts, model.text_encoder, errors.tokens)
            places = places_of(inputs, texts, errors.tokens)
            recorder = _BatchRecorder(errors, sides, batch, places, where)
            reference_has_head |= compare(recorder)
            advance(1)
    for who, passes in sides.passes().items():
        errors.passes[who] = passes / len(batches)
    if reference_has_head and LOGITS not in errors.verdicts:
        errors.notes.append(
            "The candidate gives no logits of the reference's shape: they were not"
            " compared."
        )
    errors.notes = list(dict.fromkeys(errors.notes))
    longest = max((batch for _, batch in batches), key=lambda batch: sum(batch.lengths))
    errors.conclude_systematic(longest)
    errors.sort(sides.sites)
    if sides.candidate.is_port:
        _drop_folded_norms(errors, sides)
    return errors


def _drop_folded_norms(errors: Errors, sides: ComparedSides) -> None:
    """Drop `final` if the logits agree, or if the head contains the norm's weights."""
    drifting = errors.drifting
    logits_agree = LOGITS in errors.verdicts and LOGITS not in drifting
    for name in drifting:
        if not name.endswith("final"):
            continue
        if logits_agree or _has_folded_head(sides):
            errors.drop(name)
            errors.notes.append(
                f"`{name}` was not compared: the weights of the candidate's last norm"
                " seem to be folded into its head."
            )


def _has_folded_head(sides: ComparedSides) -> bool:
    """Check whether the port has the reference's head with scaled columns."""
    head = sides.reference.anatomy.head
    if head is None:
        return False
    weight = getattr(sides.equal_reference.part(head.path), "weight", None)
    if not isinstance(weight, Tensor):
        return False
    rounding = Noise.assumed(sides.candidate.dtype).envelope
    for other in sides.equal_candidate.module.parameters():
        if is_column_scaled(other, weight, rounding):
            return True
    return False


@dataclass
class _BatchRecorder:
    """Adds the differences in one batch to the errors of all batches.

    `isolated` holds the states and candidate rows with errors at a few tokens only.
    """

    errors: Errors
    sides: ComparedSides
    batch: Inputs
    places: Mapping[str | None, Sequence[int]]
    where: Where
    isolated: list[tuple[ObservedState, Tensor]] = field(default_factory=list)

    def _places_at(self, name: str) -> Sequence[int]:
        return self.places[stack_of(name, self.errors.tokens)]

    def add_whole(self, reference: ObservedState, rows: Tensor) -> None:
        """Add the difference at a site in whole passes."""
        name = reference.name
        refuse_not_finite("reference", name, reference.rows, self.where)
        refuse_not_finite("candidate", name, rows, self.where)
        if reference.rows.shape == rows.shape:
            self.errors.put_cells(name, self._places_at(name), reference.rows, rows)
        elif name != LOGITS:
            widths = f"{reference.rows.shape[-1]} and {rows.shape[-1]}"
            reason = f"their hidden sizes are {widths} at {name}"
            remedy = "Give two versions of one model."
            raise StatesError("Cannot compare the two models", reason, remedy)

    def add_local(
        self, reference: ObservedState, rows: Tensor, unreplaced_rows: Tensor | None
    ) -> Tensor | None:
        """Add the error of one part, and return the state that the next part enters.

        `unreplaced_rows` are the candidate's in its own pass, on its own input.
        """
        name, noise = reference.name, reference.noise
        if noise is None or reference.rows.shape != rows.shape:
            return None
        local = gap(reference.rows, rows)
        tokens_over = int((local.rows > noise.envelope).sum())
        few_tokens = max(FEW_TOKENS, FEW_TOKENS_SHARE * len(local.rows))
        if tokens_over <= few_tokens and noise.times_over(local) > 1:
            self.isolated.append((reference, rows))
        else:
            self._judge(reference, rows, local, noise)
        if name != main_site(name):
            return None
        self.errors.put(name, "local", self._places_at(name), local.rows)
        if unreplaced_rows is not None:
            norms = reference.rows.double().norm(dim=-1)
            norms = norms.clamp_min(torch.finfo(torch.float64).tiny)
            inherited = (unreplaced_rows.double() - rows.double()).norm(dim=-1) / norms
            self.errors.put(name, "inherited", self._places_at(name), inherited)
        # A port may have the final norm folded into its head, which then cannot start
        # from the reference's state.
        enters_folded_head = self.sides.candidate.is_port and name.endswith("final")
        return None if enters_folded_head else reference.rows

    def _judge(
        self, reference: ObservedState, rows: Tensor, local: Gap, noise: Noise
    ) -> None:
        name = reference.name
        self.errors.judge(main_site(name), local, noise, self.batch)
        if reference.exact is not None:
            self.errors.add_systematic(name, reference.rows, rows, reference.exact)

    def judge_isolated(self) -> None:
        """Judge errors at a few tokens by what the last digits of the input do there.

        A router between two nearly equal experts, or rounding to integers, turns a
        rounding error at a few tokens into a large one.
        """
        for reference, rows in self.isolated:
            noise = reference.noise
            assert noise is not None
            if reference.name != LOGITS:
                noise = noise.joined(self._instability(reference))
            self._judge(reference, rows, gap(reference.rows, rows), noise)
        self.isolated.clear()

    def _instability(self, reference: ObservedState) -> list[Gap]:
        """Perturb the last digits of a block's input, and measure the effect."""
        site = Site.parse(reference.name)
        if not site.layer:
            return []
        before = layer_before(site)
        unit = torch.finfo(reference.rows.dtype).eps
        generator = torch.Generator().manual_seed(0)
        gaps: list[Gap] = []
        size = unit

        def perturb(state: ObservedState) -> Tensor | None:
            if state.name == reference.name:
                gaps.append(gap(reference.rows, state.rows))
            if state.name != str(before):
                return None
            signs = torch.randint(0, 2, state.rows.shape, generator=generator) * 2 - 1
            return state.rows * (1 + size * signs)

        model = self.sides.equal_reference
        passes = model.passes
        for units in PERTURBATIONS_ULP:
            size = units * unit
            observe(model, self.batch, [before, site], visit=perturb)
        # These passes compare nothing, and do not count.
        model.passes = passes
        return gaps

    def add_missing(self, expected: Sequence[str], reached: set[str]) -> None:
        """Count a layer that the candidate never reaches as infinitely far off."""
        # A layer seen only as it enters a block is not seen where the candidate skips
        # that block.
        taps = self.sides.candidate.taps
        entries = {str(site) for site, tap in taps.items() if tap.side == "input"}
        for name in expected:
            is_layer = name == main_site(name) and name != LOGITS
            if is_layer and name not in reached and name not in entries:
                noise = Noise.assumed(self.sides.candidate.dtype)
                self.errors.judge(name, INFINITE, noise, self.batch)

    def check_self(self, observations: Sequence[tuple[LiveModel, Observed]]) -> None:
        """Check once that passes without hooks give the same output, bit for bit."""
        if self.errors.observing_changed_nothing is not None:
            return
        self.errors.observing_changed_nothing = True
        for model, observed in observations:
            bare = hooks.first_tensor(model.run(model.batch(self.batch)))
            expected = observed.output
            if (
                bare is None
                or expected is None
                or not torch.equal(bare.cpu(), expected)
            ):
                self.errors.observing_changed_nothing = False


def _compare_batch(recorder: _BatchRecorder) -> bool:
    """Compare the passes of one batch; return whether the reference gives logits."""
    sides, batch = recorder.sides, recorder.batch
    expected = observe(sides.equal_reference, batch, sides.sites, noise=True)
    recorder.errors.notes += expected.notes
    reference = expected
    if sides.equal_reference is not sides.reference:
        reference = observe(sides.reference, batch, sides.sites)
    candidate = observe(sides.candidate, batch, sides.sites)
    for who, observed in (("reference", reference), ("candidate", candidate)):
        for name, state in observed.states.items():
            refuse_not_finite(who, name, state.rows, recorder.where)
    for name, state in reference.states.items():
        if name in candidate.states and name == main_site(name):
            recorder.add_whole(state, candidate.rows(name))
    unreplaced = candidate
    if sides.equal_candidate is not sides.candidate:
        unreplaced = observe(sides.equal_candidate, batch, sides.sites)
    reached: set[str] = set()

    def compare(state: ObservedState) -> Tensor | None:
        reference_state = expected.states.get(state.name)
        unreplaced_state = unreplaced.states.get(state.name)
        if reference_state is None or unreplaced_state is None:
            return None
        reached.add(state.name)
        return recorder.add_local(reference_state, state.rows, unreplaced_state.rows)

    observe(sides.equal_candidate, batch, sides.sites, visit=compare)
    recorder.judge_isolated()
    recorder.add_missing(list(expected.states), reached)
    recorder.check_self([(sides.reference, reference), (sides.candidate, candidate)])
    return LOGITS in reference.states


def _compare_in_step(recorder: _BatchRecorder) -> bool:
    """Compare one batch with only two layers' states in memory.

    Inherited errors are left out: they need two passes of the candidate at once.
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
