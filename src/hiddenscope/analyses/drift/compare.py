"""Compare two sides: part by part on equal input, or whole passes.

Two live models are compared part by part: each block on the input of the reference's.
For each batch both models run once as they are, the reference once more in float64, and
the candidate once more with every layer replaced by the reference's after it was
measured. If dtypes or attention kernels differ, the parts are compared on private
copies, in the coarser dtype and with the candidate's kernel.

Whole passes are compared where the other side cannot be entered in the middle: saved
states, or a program that only returns tensors. The noise comes from null passes: runs
of private copies of the reference that differ from its own pass in rounding alone,
because they use float64, the other side's dtype, or another attention kernel, batch
size and number of threads. Two saved runs allow no measurement, so the tolerance of
their dtype is used instead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope import progress
from hiddenscope.analyses.drift.errors import (
    INFINITE,
    SIDES,
    Errors,
    Gap,
    Noise,
    Places,
    gap,
    gap_of_blocks,
    main_site,
    places_of,
    stack_of,
)
from hiddenscope.analyses.drift.live_model import (
    LOGITS,
    Digits,
    LiveModel,
    layer_before,
    tokens_of,
    with_parameters,
)
from hiddenscope.analyses.drift.observe import (
    Observed,
    ObservedState,
    StateQueue,
    observe,
    rows_of,
)
from hiddenscope.analyses.drift.systematic import SystematicTest, coarsest
from hiddenscope.errors import (
    NotFinite,
    PassError,
    StatesError,
    first_line,
    is_out_of_memory,
)
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import (
    float64_copy,
    named_weights,
    private_copy,
)
from hiddenscope.modules.operations import slowdown
from hiddenscope.modules.quantised import quantised_weights
from hiddenscope.modules.trials import without_excluded
from hiddenscope.passes import Inputs
from hiddenscope.sites import Site
from hiddenscope.states import Tokens

# If no more than this many tokens, or this share of them, are beyond the noise, the
# block may be unstable at these tokens: its input is then perturbed in the last place.
FEW_TOKENS, FEW_TOKENS_SHARE = 2, 0.05
# Sizes of these perturbations. Each is tried four times with random signs.
PERTURBATIONS_ULP = (1, 2, 4) * 4
# Passes of a live model beside another run: as it is, and two null passes.
WHOLE_PASSES = 3
KNOWN_KERNELS = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flex_attention",
)


class Claim(NamedTuple):
    """The claim that rows of a recorded run are a state of the live model.

    `read` returns some rows, by their numbers. If they are centred, they are the state
    less the mean of each token's numbers.
    """

    site: str
    read: Callable[[Sequence[int]], Tensor]
    is_centred: bool = False


@dataclass(frozen=True)
class RecordedRun:
    """A run that can be read but not entered: saved states, or what a program returned.

    `dtype` is the one that it was computed in, and `tokens` are those of each stack. A
    claim stands under the name of its site, or under another where several are tried
    for one set of rows, such as the layers that a file may have mislabelled. `passes`
    is how many the program was run for: none where the states were saved.
    """

    name: str
    source: Mapping[str, object]
    dtype: torch.dtype
    tokens: Mapping[str | None, Tokens]
    claims: Mapping[str, Claim]
    notes: Sequence[str] = ()
    passes: int = 0
    is_reference: bool = False


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

    @classmethod
    def on_equal_terms(
        cls, reference: LiveModel, candidate: LiveModel
    ) -> ComparedSides:
        """Choose how parts are compared, on private copies where a side must change.

        The coarser of both dtypes and the candidate's attention kernel are used.
        """
        digits = Digits.common(reference.module, candidate.module)
        equal_reference = reference.with_digits(digits.reference)
        equal_candidate = candidate.with_digits(digits.candidate)
        if torch.finfo(candidate.dtype).eps < torch.finfo(reference.dtype).eps:
            equal_candidate = _rounded(equal_candidate, reference)
        if equal_candidate.dtype != reference.dtype:
            equal_reference = _rounded(equal_reference, equal_candidate)
        kernel = candidate.kernel
        if kernel in KNOWN_KERNELS and kernel != reference.kernel:
            copied = private_copy(equal_reference.module, attention=kernel)
            equal_reference = replace(equal_reference, module=copied)
        return cls(reference, candidate, equal_reference, equal_candidate, digits.notes)

    @property
    def sites(self) -> list[Site]:
        """Return the sites that both have."""
        return [site for site in self.reference.sites if site in self.candidate.taps]

    @property
    def rounds_inputs(self) -> bool:
        """Tell whether layers of the reference round their input to 8 bits."""
        weights = quantised_weights(self.equal_reference.module)
        return any(weight.rounds_input for weight in weights)


def _rounded(model: LiveModel, like: LiveModel) -> LiveModel:
    """Copy a model with its weights in the dtype of another.

    What the other keeps wider stays wide.
    """
    dtypes = {name: tensor.dtype for name, tensor in named_weights(like.module)}
    narrow = like.dtype

    def convert(name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        # Buffers such as rotary tables have a dtype of their own.
        if not isinstance(tensor, nn.Parameter):
            return tensor.to(dtypes.get(name, tensor.dtype))
        dtype = dtypes.get(name, narrow)
        return tensor.to(dtype if dtype.itemsize > narrow.itemsize else narrow)

    return replace(model, module=private_copy(model.module, convert))


def compare_parts(
    sides: ComparedSides,
    inputs: Inputs,
    *,
    low_memory: bool = False,
    check: bool = True,
) -> Errors:
    """Compare two live models part by part.

    With `check`, passes without hooks show whether observing changed anything. If a NaN
    comes up in a padded batch, the texts are run again one at a time.
    """
    model = sides.reference.loaded

    def compare(batches: Sequence[tuple[list[int], Inputs]]) -> Errors:
        errors = Errors(tokens_of(model, inputs), notes=[*sides.notes])
        errors.observing_changed_nothing = None if check else True
        errors.noise_sources = ["float64"]
        if sides.candidate.dtype != sides.reference.dtype:
            errors.noise_sources.append("dtype")
        if sides.equal_reference.kernel != sides.reference.kernel:
            errors.noise_sources.append("kernel")
        compare_batch = _compare_in_step if low_memory else _compare_batch
        reference_has_head = False
        with progress.track("Comparing", total=len(batches)) as advance:
            # Batches are ordered by length, so the self-check of the first batch
            # compared here runs on the shortest texts.
            for numbers, some in reversed(batches):
                places = places_of(inputs, numbers, errors.tokens)
                recorder = _BatchRecorder(errors, sides, some, places)
                reference_has_head |= compare_batch(recorder)
                advance(1)
        # The reference also runs in float64, and the candidate with its states
        # replaced. In low memory no pass of one dtype and kernel serves both
        # comparisons.
        changed = low_memory or sides.equal_reference is not sides.reference
        errors.passes["reference"] = 2 + changed
        changed = not low_memory and sides.equal_candidate is not sides.candidate
        errors.passes["candidate"] = 2 + changed
        if reference_has_head and LOGITS not in errors.verdicts:
            errors.notes.append(
                "The candidate gives no logits of the reference's shape: they were not"
                " compared."
            )
        errors.notes = list(dict.fromkeys(errors.notes))
        longest = max((some for _, some in batches), key=lambda some: sum(some.lengths))
        errors.conclude_systematic(longest)
        errors.sort(map(str, sides.sites))
        return errors

    singles = [([text], inputs.some([text])) for text in range(len(inputs))]
    # A port need not know padding.
    if sides.candidate.is_port:
        errors = compare(singles)
        _drop_folded_norms(errors, sides)
        return errors
    batches = list(inputs.batches(model))
    try:
        return compare(batches)
    except NotFinite:
        has_padding = any(len(set(batch.costs)) > 1 for _, batch in batches)
        if not has_padding:
            raise
    errors = compare(singles)
    errors.notes.append(
        "Texts were run one at a time, because a NaN comes up in a padded batch."
    )
    return errors


def _drop_folded_norms(errors: Errors, sides: ComparedSides) -> None:
    """Drop `final` if the logits agree, or if the head contains the norm's weights."""
    drifting = errors.drifting
    finals = [name for name in drifting if name.endswith("final")]
    is_folded = LOGITS in errors.verdicts and LOGITS not in drifting
    head = sides.reference.anatomy.head
    if finals and head is not None and not is_folded:
        weight = getattr(sides.equal_reference.part(head.path), "weight", None)
        rounding = Noise.assumed(sides.candidate.dtype).envelope
        for other in sides.equal_candidate.module.parameters():
            if isinstance(weight, Tensor) and is_column_scaled(other, weight, rounding):
                is_folded = True
    for name in finals:
        if is_folded:
            errors.drop(name)
            errors.notes.append(
                f"`{name}` was not compared: the weights of the candidate's last norm"
                " seem to be folded into its head."
            )


def is_column_scaled(weight: Tensor, other: Tensor, rounding: float) -> bool:
    """Check whether one matrix is the other with each column scaled differently.

    A norm that is folded into a projection does this.
    """
    if weight.ndim != 2 or weight.shape != other.shape:
        return False
    values = weight.detach().double().cpu()
    expected = other.detach().double().cpu()
    sizes = expected.square().sum(0).clamp_min(torch.finfo(torch.float64).tiny)
    scales = (values * expected).sum(0) / sizes
    rest = (values - expected * scales).norm() / values.norm()
    is_one_scale = bool((scales - scales.mean()).abs().max() <= rounding)
    return float(rest) <= rounding and not is_one_scale


@dataclass
class _BatchRecorder:
    """Adds the differences in one batch to the errors of all batches.

    `isolated` holds the states and candidate rows with errors at a few tokens only, and
    `reached` the names of the states that the candidate computed.
    """

    errors: Errors
    sides: ComparedSides
    inputs: Inputs
    places: Places
    isolated: list[tuple[ObservedState, Tensor]] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)

    def add_whole(self, reference: ObservedState | None, state: ObservedState) -> None:
        """Add the difference at a site in whole passes."""
        if reference is None or state.name != main_site(state.name):
            return
        name = state.name
        expected = reference.rows
        rows = state.rows
        if expected.shape == rows.shape:
            self.errors.compare(name, self.places, expected, rows)
        elif name != LOGITS:
            widths = f"{expected.shape[-1]} and {rows.shape[-1]}"
            reason = f"their hidden sizes are {widths} at {name}"
            remedy = "Give two versions of one model."
            raise StatesError("Cannot compare the two models", reason, remedy)

    def add_local(
        self,
        reference: ObservedState | None,
        state: ObservedState,
        unreplaced: ObservedState | None,
    ) -> Tensor | None:
        """Add the error of one part, and return the state that the next part enters.

        `unreplaced` is the candidate's state in its own pass, on its own input.
        """
        if reference is None:
            return None
        self.reached.add(state.name)
        name = state.name
        noise = reference.noise
        rows = state.rows
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
        self.errors.put(name, "local", self.places, local.rows)
        if unreplaced is not None:
            # Words that no text can hold are minus infinity on all three sides.
            expected, _ = without_excluded(reference.rows.double(), rows.double())
            moved, alone = without_excluded(unreplaced.rows.double(), rows.double())
            norms = expected.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
            inherited = (moved - alone).norm(dim=-1) / norms
            self.errors.put(name, "inherited", self.places, inherited)
        # A port may have the final norm folded into its head, which then cannot start
        # from the reference's state.
        enters_folded_head = self.sides.candidate.is_port and name.endswith("final")
        return None if enters_folded_head else reference.rows

    def _judge(
        self, reference: ObservedState, rows: Tensor, local: Gap, noise: Noise
    ) -> None:
        name = reference.name
        expected = reference.rows
        self.errors.judge(main_site(name), local, noise, self.inputs)
        if reference.exact is not None:
            test = SystematicTest(expected.shape[-1])
            test = self.errors.systematic.setdefault(name, test)
            test.add(expected, rows, reference.exact)

    def conclude(
        self,
        expected: Iterable[str],
        observations: Sequence[tuple[LiveModel, Observed]],
    ) -> None:
        """Judge what is left of a batch, and check what was observed.

        Errors at a few tokens are judged by what the last digits of the input do there:
        a router between two nearly equal experts, or rounding to integers, turns a
        rounding error at a few tokens into a large one.
        """
        for reference, rows in self.isolated:
            noise = reference.noise
            assert noise is not None
            if reference.name != LOGITS:
                noise = noise.joined(self._instability(reference))
            self._judge(reference, rows, gap(reference.rows, rows), noise)
        # A layer that the candidate never reaches is infinitely far off. One seen only
        # as it enters a block is not seen where the candidate skips that block.
        taps = self.sides.candidate.taps
        entries = {str(site) for site, tap in taps.items() if tap.side == "input"}
        for name in expected:
            is_layer = name == main_site(name) and name != LOGITS
            if is_layer and name not in self.reached and name not in entries:
                noise = Noise.assumed(self.sides.candidate.dtype)
                self.errors.judge(name, INFINITE, noise, self.inputs)
        # Once, passes without hooks must give the same output, bit for bit.
        if self.errors.observing_changed_nothing is not None:
            return
        self.errors.observing_changed_nothing = True
        for model, observed in observations:
            bare = hooks.first_tensor(model.run(model.batch(self.inputs)))
            output = observed.output
            if bare is None or output is None or not torch.equal(bare.cpu(), output):
                self.errors.observing_changed_nothing = False

    def _instability(self, reference: ObservedState) -> list[Gap]:
        """Perturb the last digits of a block's input, and measure the effect."""
        site = Site.parse(reference.name)
        if not site.layer:
            return []
        before = layer_before(site)
        unit = torch.finfo(reference.rows.dtype).eps
        generator = torch.Generator().manual_seed(0)
        gaps = []
        size = unit

        def perturb(state: ObservedState) -> Tensor | None:
            if state.name == reference.name:
                gaps.append(gap(reference.rows, state.rows))
            if state.name != str(before):
                return None
            signs = torch.randint(0, 2, state.rows.shape, generator=generator) * 2 - 1
            return state.rows * (1 + size * signs)

        model = self.sides.equal_reference
        for units in PERTURBATIONS_ULP:
            size = units * unit
            observe(model, self.inputs, [before, site], visit=perturb)
        return gaps


def _compare_batch(recorder: _BatchRecorder) -> bool:
    """Compare the passes of one batch; return whether the reference gives logits."""
    sides = recorder.sides
    inputs = recorder.inputs
    expected = observe(sides.equal_reference, inputs, sides.sites, noise=True)
    recorder.errors.notes += expected.notes
    reference = expected
    if sides.equal_reference is not sides.reference:
        reference = observe(sides.reference, inputs, sides.sites)
    candidate = observe(sides.candidate, inputs, sides.sites)
    for name, state in candidate.states.items():
        recorder.add_whole(reference.states.get(name), state)
    unreplaced = candidate
    if sides.equal_candidate is not sides.candidate:
        unreplaced = observe(sides.equal_candidate, inputs, sides.sites)

    def compare(state: ObservedState) -> Tensor | None:
        before = unreplaced.states.get(state.name)
        if before is None:
            return None
        return recorder.add_local(expected.states.get(state.name), state, before)

    observe(sides.equal_candidate, inputs, sides.sites, visit=compare)
    observations = [(sides.reference, reference), (sides.candidate, candidate)]
    recorder.conclude(expected.states, observations)
    return LOGITS in reference.states


def _compare_in_step(recorder: _BatchRecorder) -> bool:
    """Compare one batch with only two layers' states in memory.

    Inherited errors are left out: they need two passes of the candidate at once.
    """
    sides = recorder.sides
    inputs = recorder.inputs
    layers = [site for site in sides.sites if not site.part]
    whole = StateQueue()
    parts = StateQueue()

    def compare_whole(state: ObservedState) -> None:
        recorder.add_whole(whole.take(state.name), state)

    def compare_part(state: ObservedState) -> Tensor | None:
        return recorder.add_local(parts.take(state.name), state, None)

    candidate = whole.run_in_step(
        lambda: observe(sides.reference, inputs, layers, visit=whole.give),
        lambda: observe(sides.candidate, inputs, layers, visit=compare_whole),
    )
    parts.run_in_step(
        lambda: observe(
            sides.equal_reference, inputs, sides.sites, visit=parts.give, noise=True
        ),
        lambda: observe(sides.equal_candidate, inputs, sides.sites, visit=compare_part),
    )
    recorder.conclude(parts.names, [(sides.candidate, candidate)])
    return LOGITS in whole.names


def compare_recorded(model: LiveModel, run: RecordedRun, inputs: Inputs) -> Errors:
    """Compare whole passes of a model with a recorded run, claim by claim.

    The noise is that of null passes, or the tolerance of the dtype where none can run.
    """
    # Rows of the model come first below, also where it is the candidate.
    roles = SIDES[::-1] if run.is_reference else SIDES
    passes = {roles[0]: WHOLE_PASSES, roles[1]: run.passes}
    errors = Errors(run.tokens, roles=roles, passes=passes)
    claimed = {claim.site for claim in run.claims.values()}
    sites = [site for site in model.taps if str(site) in claimed]
    for numbers, some in inputs.batches(model.loaded):
        observed = observe(model, some, sites)
        null_passes = list(_null_passes(errors, model, some, sites, run.dtype))
        places = places_of(inputs, numbers, errors.tokens)
        for name, claim in run.claims.items():
            if claim.site not in observed.states:
                continue
            expected = observed.rows(claim.site)
            rows = claim.read(places[stack_of(claim.site, errors.tokens)])
            if claim.is_centred:
                means = expected.double().mean(-1, keepdim=True)
                rows = (rows.double() + means).to(rows.dtype)
            errors.compare(name, places, expected, rows)
            coarse = coarsest([expected.dtype, rows.dtype])
            nulls = [null[claim.site][: len(expected)] for null in null_passes]
            gaps = [gap(expected, null) for null in nulls]
            noise = _assumed_noise(claim.site, coarse)
            if gaps:
                noise = Noise.of_passes(gaps, coarse)
            errors.judge(name, gap(expected, rows), noise, some)
    errors.sort([*map(str, sites), *run.claims])
    errors.notes += run.notes
    return errors


def compare_saved(
    runs: Mapping[str, Iterable[tuple[Tensor, Tensor]]],
    tokens: Mapping[str | None, Tokens],
    computed_in: Collection[torch.dtype],
) -> Errors:
    """Compare two saved runs, given as pairs of blocks of rows for each site.

    States may be stored in a wider dtype than they were computed in, so the coarsest
    of all dtypes counts.
    """
    errors = Errors(tokens, noise_sources=["tolerance"])

    def measured(
        name: str, blocks: Iterable[tuple[Tensor, Tensor]], dtypes: set[torch.dtype]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        for reference, candidate in blocks:
            expected = reference.cpu()
            rows = candidate.cpu()
            end = start + len(expected)
            places = dict.fromkeys(tokens, range(start, end))
            errors.compare(name, places, expected, rows)
            dtypes |= {expected.dtype, rows.dtype}
            start = end
            yield expected, rows

    for name, blocks in runs.items():
        dtypes = set(computed_in)
        error = gap_of_blocks(measured(name, blocks, dtypes))
        errors.judge(name, error, _assumed_noise(name, coarsest(dtypes)), Inputs(()))
    return errors


def _assumed_noise(name: str, dtype: torch.dtype) -> Noise:
    depth = 0 if name == LOGITS else Site.parse(name).layer or 0
    return replace(Noise.assumed(dtype, depth), channel=inf)


def _null_passes(
    errors: Errors,
    reference: LiveModel,
    batch: Inputs,
    sites: Sequence[Site],
    dtype: torch.dtype,
) -> Iterator[Mapping[str, Tensor]]:
    """Run the reference in other, equally correct ways, where the model allows them."""

    def run(module: nn.Module, *texts: Inputs) -> Mapping[str, Tensor]:
        return rows_of(replace(reference, module=module), texts or [batch], sites)

    def run_float64() -> Mapping[str, Tensor]:
        return run(float64_copy(reference.module))

    def run_narrow() -> Mapping[str, Tensor]:
        # torch warns once, with a stack trace, if a CPU lacks products in this dtype.
        # The trial receives that warning instead of the user.
        slowdown(dtype)
        return run(with_parameters(reference.module, lambda part: part.to(dtype)))

    def run_otherwise() -> Mapping[str, Tensor]:
        """Run texts with another attention kernel, thread count and batch size."""
        kernel = {"sdpa": "eager", "eager": "sdpa"}.get(reference.kernel)
        other = private_copy(reference.module, attention=kernel)
        texts = [batch.some([text]) for text in range(len(batch))]
        # A single text runs twice in one batch; of its rows only the first are read.
        if len(batch) == 1:
            texts = [batch.some([0, 0])]
        with hooks.threads(2 if torch.get_num_threads() == 1 else 1):
            return run(other, *texts)

    runs = {"float64": run_float64, "dtype": run_narrow}
    if dtype in (reference.dtype, torch.float64):
        runs = {"float64": run_float64, "kernel_batch_threads": run_otherwise}
    errors.noise_sources = []
    for name, null_pass in runs.items():
        try:
            rows = null_pass()
        except (RuntimeError, ValueError, TypeError, PassError) as error:
            if is_out_of_memory(error):
                raise
            errors.notes.append(
                f"The noise of `{name}` could not be measured: {first_line(error)}"
            )
            continue
        errors.noise_sources.append(name)
        yield rows
