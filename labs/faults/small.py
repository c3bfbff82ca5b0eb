"""Faults below the rounding of a token, and sound pairs, for drift's systematic test.

A pair is a model and a copy that was changed. Each part of both is run on equal input,
and its rows are given to `SystematicTest`: the states, and single modules.
"""

import copy
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.analyses.drift.systematic import Finding, SystematicTest
from hiddenscope.discovery import Anatomy
from labs.faults.equal_input import (
    Batch,
    FloatAccumulation,
    ModuleCall,
    Rows,
    draw_batches,
    module_calls,
    split_rows,
    state_rows,
)
from labs.faults.models import FAMILIES, in_float64, subject
from labs.faults.planted import HARMLESS, ModelParts
from labs.faults.planted.fault import Rng, first, replace_forward, with_first
from labs.faults.planted.parts import is_linear, is_norm

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
TOKENS = (100, 300, 1000)
SOUND_TOKENS = 200
TRAINED = "minilm"
# These change nothing, need a compiler, or change the dtype of one side alone.
LEFT_OUT = ("copy", "weights_not_contiguous", "compiled", "bf16", "fp16", "fp64")
# In these the modules hold other weights than the reference's on purpose, so that only
# states can be compared.
OTHER_LAYOUT = ("norm_folded", "channels_permuted")
RUNS = ("one_text", "padding", "other_device")
# How many sets of texts are tried in each dtype.
SEEDS = {"bfloat16": 2, "float32": 1, "float16": 1}
NATIVE = ("llama", "bert")
RESIDUAL = "residual x1.001"
POST_NORM = ("bert", "bart", TRAINED)


@dataclass(frozen=True)
class Trial:
    """A pair: a model, what is done to a copy of it, in which dtype, on which texts, on
    which devices.

    The `device` is that of both sides; `native` is a CPU with its own products of
    bfloat16. With `cpu-cuda` the candidate alone is on a GPU, and with `cuda-tf32` both
    multiply in TF32.
    """

    subject: str
    kind: str
    dtype: str
    seed: int = 0
    sound: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Measured:
    """What came of a trial at one number of tokens: how far the strongest part and
    module are beyond their bars.

    `effect` is how much the fault changes the part at which it shows, in float64, as a
    share of the part's output.
    """

    trial: Trial
    tokens: int
    detail: str
    effect: float
    part: str
    pattern: str
    size: float
    beyond: float
    module: str
    module_beyond: float
    smallest: float

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> "Measured":
        values = json.loads(line)
        return cls(**{**values, "trial": Trial(**values["trial"])})


@dataclass(frozen=True)
class Setting:
    """A reference in one dtype, its copy in float64, and texts."""

    module: nn.Module
    wide: nn.Module
    anatomy: Anatomy
    batches: tuple[Batch, ...]


def trials(*, trained: bool = True) -> Iterator[Trial]:
    """List every pair, planted and sound; those on a GPU where there is one."""
    names = (*FAMILIES, TRAINED) if trained else FAMILIES
    for name in names:
        module = _module(name)
        for dtype in DTYPES:
            for seed in range(SEEDS[dtype]):
                yield from _sound_trials(name, module, dtype, seed)
            yield from _planted_trials(name, module, dtype, 0)
        if name in NATIVE:
            for trial in _sound_trials(name, module, "bfloat16", 0):
                yield replace(trial, device="native")
        if torch.cuda.is_available():
            yield from _cuda_trials(name, module)


def _cuda_trials(name: str, module: nn.Module) -> Iterator[Trial]:
    for dtype in DTYPES:
        for trial in _sound_trials(name, module, dtype, 0):
            yield replace(trial, device="cuda")
        yield Trial(name, "other_device", dtype, 0, sound=True, device="cpu-cuda")
    for kind in ("one_text", "padding", "linear_split", "norm_by_hand"):
        yield Trial(name, kind, "float32", 0, sound=True, device="cuda-tf32")


def _planted_trials(
    name: str, module: nn.Module, dtype: str, seed: int
) -> Iterator[Trial]:
    for kind, places in PLACES.items():
        if places(ModelParts(module)):
            yield Trial(name, kind, dtype, seed)
    # Where a norm follows the sum, the stream is not what the block returns.
    if name not in POST_NORM:
        yield Trial(name, RESIDUAL, dtype, seed)


def _sound_trials(
    name: str, module: nn.Module, dtype: str, seed: int
) -> Iterator[Trial]:
    for kind, change in HARMLESS.items():
        if kind not in LEFT_OUT and change.applies(module):
            yield Trial(name, kind, dtype, seed, sound=True)
    for kind in ("one_text", "padding"):
        yield Trial(name, kind, dtype, seed, sound=True)


def _module(name: str) -> nn.Module:
    return _trained().module if name == TRAINED else subject(name).module


@cache
def _trained() -> hs.Model:
    return hs.load(TRAINED, dtype="float32")


@cache
def anatomy_of(name: str) -> Anatomy:
    """Find the parts of a model."""
    if name == TRAINED:
        return _trained().anatomy
    model = subject(name)
    return hs.load((model.module, model.tokenizer)).anatomy


@cache
def setting(name: str, dtype: str, seed: int, tokens: int, device: str) -> Setting:
    """Build a reference in a dtype on a device, and draw its texts."""
    original = _module(name)
    module = copy.deepcopy(original).to(DTYPES[dtype])
    # Tables of rotary frequencies stay in float32, as they do in a model that is
    # loaded.
    buffers = dict(original.named_buffers())
    for path, buffer in module.named_buffers():
        buffer.data = buffers[path].clone()
    config: Any = module.config
    decoder = bool(config.is_encoder_decoder)
    batches = draw_batches(tokens, config.vocab_size, seed, decoder=decoder)
    module.to(device)
    return Setting(module, in_float64(module), anatomy_of(name), tuple(batches))


Places = Callable[[ModelParts], list[str]]


def _linears(parts: ModelParts) -> list[str]:
    return parts.everywhere(is_linear)


def _biased(parts: ModelParts) -> list[str]:
    return [path for path in _linears(parts) if parts.modules[path].bias is not None]


def _norms(parts: ModelParts) -> list[str]:
    return parts.everywhere(is_norm)


def _mlps(parts: ModelParts) -> list[str]:
    """List the last linears of MLPs, whose output is what the MLP adds."""
    ends = ("down_proj", "fc2", "mlp.c_proj", "wo", "dense_4h_to_h", "output.dense")
    return [
        path
        for path in _linears(parts)
        if path.endswith(ends) and "attention" not in path
    ]


PLACES: dict[str, Places] = {
    "weight x1.02": _linears,
    "weight x1.01": _linears,
    "norm x1.01": _norms,
    "bias x1.02": _biased,
    "MLP output x1.005": _mlps,
}


def plant(trial: Trial, module: nn.Module) -> tuple[nn.Module, str]:
    """Plant a small fault in a copy, and return the copy and the place."""
    rng = Rng(f"{trial.subject} {trial.kind} {trial.seed}")
    changed = copy.deepcopy(module)
    path = rng.choice(PLACES[trial.kind](ModelParts(changed)))
    part: Any = changed.get_submodule(path)
    what, factor = trial.kind.split(" x")
    with torch.no_grad():
        if what == "weight":
            part.weight.mul_(float(factor))
        elif what == "bias":
            part.bias.mul_(float(factor))
        elif what == "norm":
            _scale_norm(part, float(factor))
        else:
            _scale_output(part, float(factor))
    return changed, path


def _scale_norm(part: Any, factor: float) -> None:
    # Gemma keeps the weight less one.
    offset = 1.0 if "gemma" in type(part).__name__.lower() else 0.0
    part.weight.copy_((part.weight.double() + offset) * factor - offset)
    if getattr(part, "bias", None) is not None:
        part.bias.mul_(factor)


def _scale_output(part: nn.Module, factor: float) -> None:
    def forward(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return with_first(output, first(output) * factor)

    replace_forward(part, forward)


class Comparison:
    """The tests of every part and module of one pair."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.states: dict[str, SystematicTest] = {}
        self.modules: dict[str, SystematicTest] = {}
        self.squared_effect: dict[str, Tensor] = {}

    def add_states(
        self, reference: Rows, candidate: Rows, exact: Rows, faulty: Rows | None
    ) -> None:
        """Add the rows of states.

        Those of the fault in float64 say what there is to find.
        """
        for name, rows in reference.items():
            test = self.states.setdefault(
                name, SystematicTest(rows.shape[1], self.dtype)
            )
            test.add(rows, candidate[name], exact[name])
            if faulty is not None:
                change = (faulty[name] - exact[name]).square().sum()
                sums = torch.stack([change, exact[name].square().sum()])
                self.squared_effect[name] = (
                    self.squared_effect.get(name, torch.zeros(2)) + sums
                )

    def add_module(
        self, path: str, reference: Tensor, candidate: Tensor, exact: Tensor
    ) -> None:
        """Add the rows of a single module."""
        test = self.modules.setdefault(
            path, SystematicTest(reference.shape[1], self.dtype)
        )
        test.add(reference, candidate, exact)

    def measured(self, trial: Trial, tokens: int, detail: str) -> Measured:
        """Say what stands out most."""
        findings = {name: test.result() for name, test in self.states.items()}
        inner = {name: test.result() for name, test in self.modules.items()}
        part, finding = _strongest(findings)
        module, inner_finding = _strongest(inner)
        effects = [
            float((change / size).sqrt())
            for change, size in self.squared_effect.values()
        ]
        smallest = [
            each.smallest
            for name, each in findings.items()
            if name.endswith(("attn", "mlp"))
        ]
        middle = sorted(smallest)[len(smallest) // 2]
        return Measured(
            trial=trial,
            tokens=tokens,
            detail=detail,
            effect=max(effects, default=0.0),
            part=part,
            pattern=finding.strongest.name,
            size=finding.size,
            beyond=finding.beyond,
            module=module,
            module_beyond=inner_finding.beyond,
            smallest=middle,
        )


def _strongest(findings: dict[str, Finding]) -> tuple[str, Finding]:
    if not findings:
        return "", Finding(0)
    return max(findings.items(), key=lambda item: item[1].beyond)


def measure(trial: Trial, most: int = TOKENS[-1]) -> list[Measured]:
    """Compare a pair; with a fault, at every number of tokens up to the most."""
    # A GPU has products of its own, and of a CPU's own some pairs are measured.
    accumulation = (
        nullcontext()
        if "cuda" in trial.device or trial.device == "native"
        else FloatAccumulation()
    )
    with accumulation:
        return _measure_sound(trial) if trial.sound else _measure_planted(trial, most)


def measure_all(group: list[Trial]) -> list[Measured]:
    """Compare several pairs; one that cannot be compared says so and is left out."""
    outcomes = []
    for trial in group:
        try:
            outcomes += measure(trial)
        except Exception as error:
            print(
                f"{trial}: {type(error).__name__}: {error}", file=sys.stderr, flush=True
            )
    return outcomes


def _measure_planted(trial: Trial, most: int) -> list[Measured]:
    if trial.subject == TRAINED or trial.dtype != "bfloat16":
        most = min(most, 300)
    base = setting(trial.subject, trial.dtype, trial.seed, most, "cpu")
    residual = trial.kind == RESIDUAL
    candidate, detail = (
        (base.module, "stream") if residual else plant(trial, base.module)
    )
    faulty = None if residual else in_float64(candidate)
    comparison = Comparison(DTYPES[trial.dtype])
    outcomes = []
    count = 0
    for batch in base.batches:
        reference, exact = reference_rows(trial, base, batch)
        if faulty is None:
            theirs, wrong = _scaled_residual(reference, exact, base.module)
        else:
            theirs = state_rows(candidate, base.anatomy, batch, reference)
            wrong = state_rows(faulty, base.anatomy, batch, reference)
        comparison.add_states(reference, theirs, exact, wrong)
        _add_modules(comparison, base, candidate, batch)
        before, count = count, count + batch.ids.numel()
        if any(before < tokens <= count for tokens in TOKENS):
            reached = max(tokens for tokens in TOKENS if tokens <= count)
            outcomes.append(comparison.measured(trial, reached, detail))
    return outcomes


def _measure_sound(trial: Trial) -> list[Measured]:
    ours, theirs_device = DEVICES[trial.device]
    torch.backends.cuda.matmul.allow_tf32 = trial.device == "cuda-tf32"
    base = setting(trial.subject, trial.dtype, trial.seed, SOUND_TOKENS, ours)
    run = trial.kind in RUNS
    candidate = (
        copy.deepcopy(base.module)
        if run
        else HARMLESS[trial.kind].make(base.module, trial.seed)
    )
    candidate.to(theirs_device)
    comparison = Comparison(DTYPES[trial.dtype])
    for batch in base.batches:
        reference, exact = reference_rows(trial, base, batch)
        if trial.kind == "one_text":
            theirs = _text_by_text(base, batch, reference)
        else:
            padding = 9 if trial.kind == "padding" else 0
            theirs = state_rows(
                candidate, base.anatomy, batch, reference, padding=padding
            )
        comparison.add_states(reference, theirs, exact, None)
        if not run and trial.kind not in OTHER_LAYOUT:
            _add_modules(comparison, base, candidate, batch)
    return [comparison.measured(trial, SOUND_TOKENS, trial.kind)]


DEVICES = {
    "cpu": ("cpu", "cpu"),
    "native": ("cpu", "cpu"),
    "cuda": ("cuda", "cuda"),
    "cpu-cuda": ("cpu", "cuda"),
    "cuda-tf32": ("cuda", "cuda"),
}
_reference_rows: dict[tuple[str, int], tuple[Rows, Rows]] = {}


def reference_rows(trial: Trial, base: Setting, batch: Batch) -> tuple[Rows, Rows]:
    """Run the reference and its float64 copy; both are kept for the next pair."""
    key = (trial.device, id(batch))
    if key not in _reference_rows:
        reference = state_rows(base.module, base.anatomy, batch)
        _reference_rows[key] = (
            reference,
            state_rows(base.wide, base.anatomy, batch, reference),
        )
    return _reference_rows[key]


def _text_by_text(base: Setting, batch: Batch, reference: Rows) -> Rows:
    texts = []
    for text, put in zip(batch.texts(), split_rows(reference, batch), strict=True):
        texts.append(state_rows(base.module, base.anatomy, text, put))
    return {name: torch.cat([rows[name] for rows in texts]) for name in reference}


def _scaled_residual(
    reference: Rows, exact: Rows, module: nn.Module
) -> tuple[Rows, Rows]:
    """Scale the stream that the second block adds to, before the sum is rounded.

    Factors as small as this are lost where they meet a number that is rounded already:
    in bfloat16, 1.001 times a number is rounded to that number.
    """
    theirs, wrong = dict(reference), dict(exact)
    prefix = "decoder." if "decoder.layer.2" in reference else ""
    layer, branch = f"{prefix}layer.2", f"{prefix}layer.2.mlp"
    stream = exact[layer] - reference[branch].double()
    wrong[layer] = exact[layer] + 0.001 * stream
    theirs[layer] = wrong[layer].to(reference[layer].dtype)
    return theirs, wrong


def _add_modules(
    comparison: Comparison, base: Setting, candidate: nn.Module, batch: Batch
) -> None:
    """Add the rows of single modules; those of unchanged modules are equal."""
    parts = dict(candidate.named_modules())
    for call, exact in _calls(base, batch):
        theirs = call.repeat(parts[call.path]) if call.path in parts else None
        if (
            theirs is not None
            and exact is not None
            and not torch.equal(theirs, call.output)
        ):
            width = exact.shape[-1]
            rows = (
                tensor.reshape(-1, width) for tensor in (call.output, theirs, exact)
            )
            comparison.add_module(call.path, *rows)


_module_calls: dict[tuple[int, int], list[tuple[ModuleCall, Tensor | None]]] = {}


def _calls(base: Setting, batch: Batch) -> list[tuple[ModuleCall, Tensor | None]]:
    """Call every module of the reference in its dtype and in float64.

    Both are kept for the next pair.
    """
    key = (id(base), id(batch))
    if key not in _module_calls:
        wide = dict(base.wide.named_modules())
        calls = module_calls(base.module, batch)
        _module_calls[key] = [
            (call, call.repeat(wide[call.path], wide=True)) for call in calls
        ]
    return _module_calls[key]
