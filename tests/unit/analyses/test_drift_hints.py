"""What a fault looks like: every hint against every kind of planted fault, and against
modules that are sound.
"""

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.hints import Suspect, argument_hints, explain_fault
from hiddenscope.analyses.drift.observe import ModuleCall, record_calls, tensors_in
from labs.faults.models import _padded, subject
from labs.faults.planted import HARMLESS, KINDS, UNNAMED, ModelParts, Planted
from labs.faults.planted.attention import Mistake, attend_plainly
from labs.faults.planted.fault import replace_forward
from tests.unit.analyses.planted import HINTS, families_for, hints_of

CPU = torch.device("cpu")


@cache
def batch_of(family: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The arguments of a pass over a padded batch, and which tokens are real in the
    first and in the last stack.
    """
    model = subject(family)
    arguments, _ = _padded(model.ids, CPU)
    real = arguments["attention_mask"].bool()
    if model.target_ids is None:
        return arguments, real, real
    targets, _ = _padded(model.target_ids, CPU)
    arguments["decoder_input_ids"] = targets["input_ids"]
    return arguments, real, targets["attention_mask"].bool()


@cache
def calls_of(family: str) -> dict[str, ModuleCall]:
    """The first call of every module of a family's tiny model."""
    module, arguments = subject(family).module, batch_of(family)[0]
    outermost = record_calls(
        dict(module.named_modules()), lambda: module(**arguments, use_cache=False)
    )
    calls: dict[str, ModuleCall] = {}
    for call in outermost[0].walk():
        calls.setdefault(call.path, call)
    return calls


def suspect_between(
    reference: nn.Module,
    candidate: nn.Module,
    call: ModuleCall,
    mask: Tensor,
    **fields: Any,
) -> Suspect:
    """Return a module beside the reference's, as the search hands it on."""
    values = {
        "path": call.path,
        "reference": reference,
        "candidate": candidate,
        "call": call,
        "output": tensors_in(call.repeat(candidate, CPU))[0],
        "same_make": True,
        "masks": [mask],
        "blocks": {},
        "model": reference,
    }
    return Suspect(**{**values, **fields})


def suspect_of(family: str, path: str, candidate: nn.Module, **fields: Any) -> Suspect:
    """Return the module at a path of a candidate, on the reference's input."""
    reference = subject(family).module
    _, first, last = batch_of(family)
    in_decoder = "decoder" in path and "encoder" not in path.partition("decoder")[0]
    parts = ModelParts(reference)
    blocks = {block.site: parts.modules[block.path] for block in parts.blocks}
    return suspect_between(
        reference.get_submodule(path),
        candidate.get_submodule(path),
        calls_of(family)[path],
        last if in_decoder else first,
        **{"blocks": blocks, "model": reference, **fields},
    )


def leaf_suspect(reference: nn.Module, candidate: nn.Module, **fields: Any) -> Suspect:
    """Return a suspect of two modules by themselves, on random states of width 16."""
    state = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(0))
    calls = record_calls({"part": reference}, lambda: reference(state))
    mask = torch.ones(2, 9, dtype=torch.bool)
    return suspect_between(reference, candidate, calls[0], mask, **fields)


def faults_of(suspect: Suspect) -> set[str]:
    """The names of all hints; each is a sentence, and every hypothesis could be tried."""
    hints, notes = explain_fault(suspect)
    assert notes == []
    assert all(hint.evidence.endswith(".") for hint in hints)
    return {hint.fault for hint in hints}


def planted(family: str, kind: str) -> Planted:
    return {**KINDS, **UNNAMED}[kind].plant(subject(family).module)


# One kind for every set of hints; tests/slow/faults has all kinds.
KINDS_HERE = {frozenset(hints): kind for kind, hints in HINTS.items()}.values()


@pytest.mark.parametrize("kind", KINDS_HERE)
def test_every_kind_of_fault_is_called_by_its_name_and_by_no_other(kind: str) -> None:
    family = families_for(kind)[0]
    fault = planted(family, kind)
    blocks = [block.path for block in ModelParts(fault.module).blocks]
    if any(block.startswith(f"{fault.path}.".lstrip(".")) for block in blocks):
        # Of a module that runs the blocks, drift compares the blocks' arguments.
        assert hints_of(family, kind) <= {"block_argument"}
        return
    suspect = suspect_of(family, fault.path, fault.module)
    assert faults_of(suspect) == hints_of(family, kind), explain_fault(suspect)


NORM = "model.layers.1.input_layernorm"
SCALES = {
    "llama": "model.layers.1.self_attn",
    "gpt2": "transformer.h.1.attn",
    "t5": "encoder.block.1.layer.0.SelfAttention",
    "gemma2": "model.layers.1.self_attn",
}


def attending(family: str, scale: float) -> nn.Module:
    """Return a candidate that attends with another scale of its scores."""
    candidate = copy.deepcopy(subject(family).module)
    attend_plainly(candidate.get_submodule(SCALES[family]), Mistake(scale=scale))
    return candidate


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def test_a_norm_of_another_make() -> None:
    """Others are in the table of planted faults and among the mistakes of ports."""
    for family, fault, forward in (
        ("gemma2", "less_one", lambda _, self, x: rms(x) * self.weight),
        ("llama", "plus_one", lambda _, self, x: rms(x) * (1 + self.weight)),
        ("llama", "twice", lambda original, self, x: original(x) * self.weight),
    ):
        candidate = copy.deepcopy(subject(family).module)
        replace_forward(candidate.get_submodule(NORM), forward)
        suspect = suspect_of(family, NORM, candidate)
        assert faults_of(suspect) == {f"norm_weight_{fault}"}


def test_an_eps_beside_the_root_is_told_from_one_under_it() -> None:
    """With an eps that shows: the reference's is large, and its place is the mistake."""
    reference = nn.LayerNorm(16, eps=0.05)
    nn.init.normal_(reference.weight)
    candidate = copy.deepcopy(reference)

    def beside(original: Any, self: Any, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        root = centred.square().mean(-1, keepdim=True).sqrt()
        out: Tensor = centred / (root + self.eps) * self.weight + self.bias
        return out

    replace_forward(candidate, beside)
    assert faults_of(leaf_suspect(reference, candidate)) == {"norm_eps_outside"}


@pytest.mark.parametrize("family", SCALES)
def test_another_scale_of_the_scores(family: str) -> None:
    """Wherever a family keeps its scale, and whether its projections are fused."""
    for factor, words in (
        (1.001, "1.00"),
        (2**0.5, "1.4142"),
        (4.0, "4 times the reference's, as without a scale of 1/sqrt(d)."),
        (0.25, "0.25 times the reference's, as with one more scale of 1/sqrt(d)."),
    ):
        suspect = suspect_of(family, SCALES[family], attending(family, factor))
        (hint,), _ = explain_fault(suspect)
        assert hint.fault == "attention_scale"
        assert f"with scores {words}" in hint.evidence


def test_a_scale_in_a_block_is_seen_from_outside() -> None:
    suspect = suspect_of("llama", "model.layers.1", attending("llama", 4.0))
    assert faults_of(suspect) == {"attention_scale"}


def interleaved(table: Tensor) -> Tensor:
    return table[..., : table.shape[-1] // 2].repeat_interleave(2, -1)


def test_rotary_tables_that_are_wrong_for_one_block() -> None:
    for fault, change in (
        ("rope_interleaved", lambda cos, sin: (interleaved(cos), interleaved(sin))),
        ("position_off_by_one", lambda cos, sin: (cos.roll(-1, -2), sin.roll(-1, -2))),
        ("rope_missing", lambda cos, sin: (cos**0, 0 * sin)),
    ):

        def forward(
            original: Any, self: Any, *, change: Any = change, **given: Any
        ) -> Any:
            tables = change(*given.pop("position_embeddings"))
            return original(position_embeddings=tables, **given)

        candidate = copy.deepcopy(subject("llama").module)
        replace_forward(candidate.get_submodule(SCALES["llama"]), forward)
        assert faults_of(suspect_of("llama", SCALES["llama"], candidate)) == {fault}


def test_rows_of_zeros_are_counted() -> None:
    reference = nn.Linear(16, 16)
    candidate, third = copy.deepcopy(reference), torch.tensor([2])
    replace_forward(
        candidate, lambda original, self, x: original(x).index_fill(1, third, 0.0)
    )
    (hint,), _ = explain_fault(leaf_suspect(reference, candidate))
    assert hint.fault == "zero_rows" and hint.evidence.startswith("2 rows")


def test_parameters_of_other_names_are_not_missing() -> None:
    """A linear that calls its bias `b` has one; one that has none is found by what it
    gives.
    """

    class Product(nn.Module):
        def __init__(self, weight: Tensor, bias: Tensor) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(weight.T), nn.Parameter(bias)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w + self.b

    reference = nn.Linear(16, 16)
    weight, bias = reference.weight.detach(), reference.bias.detach()
    for same_make in (True, False):
        product = Product(1.1 * weight, bias)
        suspect = leaf_suspect(reference, product, same_make=same_make)
        assert faults_of(suspect) == set()
    unbiased = leaf_suspect(reference, Product(weight, 0 * bias), same_make=False)
    assert faults_of(unbiased) == {"missing_bias"}


def test_weights_of_another_make_are_not_compared() -> None:
    for kind in ("weight_permuted", "weight_transposed", "weight_bf16"):
        fault = planted("llama", kind)
        suspect = suspect_of("llama", fault.path, fault.module, same_make=False)
        assert faults_of(suspect) == set(), kind


def test_weights_that_do_not_account_for_the_error_are_not_blamed() -> None:
    """Rows in another order are a layout where the code reads them so; the fault is
    another.
    """
    reference = nn.Linear(16, 16)
    candidate, order = copy.deepcopy(reference), torch.randperm(16)
    candidate.weight.data = reference.weight[order]
    candidate.bias.data = reference.bias[order]
    back = order.argsort()
    replace_forward(candidate, lambda original, self, x: 1.5 * original(x)[..., back])
    assert faults_of(leaf_suspect(reference, candidate)) == {"scale"}


def test_padding_is_spoken_of_only_where_there_is_some() -> None:
    path = "bert.encoder.layer.1.attention.self"
    candidate = copy.deepcopy(subject("bert").module)

    def unmasked(original: Any, self: Any, x: Tensor, **arguments: Any) -> Any:
        return original(x, **{**arguments, "attention_mask": None})

    replace_forward(candidate.get_submodule(path), unmasked)
    suspect = suspect_of("bert", path, candidate)
    assert faults_of(suspect) == {"padding_not_masked"}
    everything = torch.ones_like(suspect.mask)
    assert faults_of(replace(suspect, masks=[everything])) == set()


SOUND = ("attention_plain", "all_by_hand", "qkv_fused")


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "gemma2"])
def test_nothing_is_said_of_what_is_sound(family: str) -> None:
    """Rounding alone looks like nothing, in any part of the second block."""
    module = subject(family).module
    block = ModelParts(module).blocks[1].path
    for change in SOUND:
        if not HARMLESS[change].applies(module):
            continue
        candidate = HARMLESS[change].make(module)
        for path, call in calls_of(family).items():
            if (path == block or path.startswith(f"{block}.")) and call.outputs:
                suspect = suspect_of(family, path, candidate)
                assert faults_of(suspect) == set(), (change, path)


class Elsewhere(Tensor):
    """A tensor on a device of its own, so to speak: it cannot be combined with others
    before it is moved by `to`.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.to:
            plain = [
                arg.as_subclass(Tensor) if isinstance(arg, cls) else arg for arg in args
            ]
            return function(*plain, **(kwargs or {}))
        if any(
            isinstance(arg, Tensor) and not isinstance(arg, cls) and arg.ndim
            for arg in tensors_in([args])
        ):
            raise RuntimeError("Expected all tensors to be on the same device")
        return super().__torch_function__(function, types, args, kwargs or {})


def test_weights_on_another_device_are_moved_before_they_are_compared() -> None:
    reference = nn.Linear(16, 16)
    candidate = copy.deepcopy(reference)
    candidate.weight.data.mul_(1.02)
    suspect = leaf_suspect(reference, candidate)
    for name, weight in list(candidate.named_parameters()):
        elsewhere = weight.detach().as_subclass(Elsewhere)
        setattr(candidate, name, nn.Parameter(elsewhere, requires_grad=False))
    with pytest.raises(RuntimeError, match="same device"):
        candidate.weight + reference.weight
    assert faults_of(suspect) == {"scaled_weight"}


def test_arguments_of_the_blocks_are_compared_on_one_device() -> None:
    ids, table = torch.arange(6)[None], torch.eye(3)[0]
    ours = {"ids": ids, "mask": ids, "cache": None, "table": table, "same": ids}
    others = (ids + 2).as_subclass(Elsewhere)
    table = torch.ones(3)
    theirs = {"ids": others, "mask": None, "cache": ids, "table": table, "same": ids}
    assert [hint.evidence for hint in argument_hints(ours, theirs)] == [
        "`ids`, which the blocks are given, is the reference's plus 2.",
        "The blocks are given `mask` in the reference and not in the candidate.",
        "The blocks are given `cache` in the candidate and not in the reference.",
        "`table`, which the blocks are given, differs in 2 of 3 elements.",
    ]


class Failing(nn.Linear):
    """Works in its first call, and raises in every later one."""

    def __init__(self, error: Exception) -> None:
        super().__init__(16, 16)
        self.error, self.calls = error, torch.zeros(())

    def forward(self, state: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1:
            raise self.error
        return super().forward(state)


def hints_beside(reference: Failing) -> tuple[list[str], list[str]]:
    """Return the hints and notes on twice the output of a module."""
    candidate = nn.Linear(16, 16)
    candidate.weight.data = 2 * reference.weight.data
    candidate.bias.data = 2 * reference.bias.data
    hints, notes = explain_fault(leaf_suspect(reference, candidate))
    return [hint.fault for hint in hints], notes


def test_what_could_not_be_tried_is_said_once_and_a_refusal_is_an_answer() -> None:
    hints, notes = hints_beside(Failing(RuntimeError("the device is on fire")))
    assert hints == ["scale"]
    assert all(note.endswith("RuntimeError: the device is on fire") for note in notes)
    assert len(notes) == len(set(notes)) and "Hints on weights of `part`" in notes[0]
    for refusal in (
        TypeError("unexpected keyword"),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    ):
        assert hints_beside(Failing(refusal)) == (["scale"], [])
