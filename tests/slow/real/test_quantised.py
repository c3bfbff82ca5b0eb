"""Quantised weights: every scheme is proved, named, hashed and right, or refused."""

import copy
import warnings
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import LoadError, ModuleError
from hiddenscope.modules.module_copy import float64_copy, private_copy
from hiddenscope.modules.quantised import quantisation_of, quantised_weights
from hiddenscope.modules.weights import Fingerprint, weight_tensors
from hiddenscope.testing import tiny_model

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")
pytest.importorskip("accelerate")

SCHEMES = {
    "int8": "torchao int8 weight-only",
    "fp8": "torchao fp8 weight-only",
    "bnb-int8": "bitsandbytes int8",
    "nf4": "bitsandbytes nf4",
    "fp4": "bitsandbytes fp4",
}
TEXT = [5, 6, 7, 8, 9, 10, 11]
TEXTS = [TEXT, [12, 13, 14]]
TARGETS = [[3, 4, 5], [6, 7]]
# How far the weights of each scheme may be from the original ones.
ROUNDING = {"int8": 0.02, "fp8": 0.05, "bnb-int8": 0.02, "nf4": 0.15, "fp4": 0.25}


def unpacked_copy(module: nn.Module) -> nn.Module:
    """Copy a module with plain weights in the place of quantised ones."""
    return private_copy(module, lambda name, tensor: tensor)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of tiny models of four families."""
    made = {}
    for family in ("llama", "gpt2", "bert", "t5"):
        folder = tmp_path_factory.mktemp(family)
        tiny_model(family).save_pretrained(folder)  # type: ignore[operator]
        made[family] = folder
    return made


def load(folders: dict[str, Path], family: str, scheme: str) -> hs.Model:
    return hs.load(hs.Quantised(folders[family], scheme))


@pytest.fixture(params=SCHEMES)
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llama(folders: dict[str, Path], scheme: str) -> hs.Model:
    return load(folders, "llama", scheme)


CASES = [
    *[("llama", scheme) for scheme in SCHEMES],
    *[("gpt2", "nf4"), ("gpt2", "bnb-int8")],
    *[("bert", "int8"), ("bert", "nf4")],
    *[("t5", "fp8"), ("t5", "fp4")],
]


@pytest.mark.parametrize(("family", "scheme"), CASES)
def test_a_scheme_is_proved_named_copied_and_unpacked(
    folders: dict[str, Path], family: str, scheme: str
) -> None:
    model = load(folders, family, scheme)
    module, source = model.module, model.source()
    assert source.quantisation == SCHEMES[scheme]
    assert source.dtype == "float32"
    plain = hs.load(folders[family])
    assert plain.source().quantisation == ""
    assert plain.source().weights != source.weights
    weights = list(quantised_weights(module))
    assert len(weights) > 10
    for weight in weights:
        original = plain.module.get_parameter(weight.full_name).detach()
        # Conv1D keeps its weight the other way round.
        original = original.T if family == "gpt2" else original
        error = (weight.unpack() - original).norm() / original.norm()
        assert 0 < float(error) < ROUNDING[scheme]
    inputs = {"input_ids": torch.tensor([TEXT])}
    targets = None
    if family == "t5":
        inputs["decoder_input_ids"] = torch.tensor([TARGETS[0]])
        targets = [TARGETS[0]]
    before = Fingerprint(module).value, [type(part) for part in module.modules()]
    copied, wide, unpacked = (
        make(module) for make in (private_copy, float64_copy, unpacked_copy)
    )
    types = [type(part) for part in module.modules()]
    assert (Fingerprint(module).value, types) == before
    assert quantisation_of(copied) == quantisation_of(module) == SCHEMES[scheme]
    assert quantisation_of(unpacked) == ""
    with torch.no_grad():
        # The copy first: it must not take anything from the original.
        copied(**inputs)
        output = module(**inputs, output_hidden_states=True)
        assert torch.equal(copied(**inputs).logits, output.logits)
        assert torch.equal(module(**inputs).logits, output.logits)
        exact = wide(**inputs).logits
        numbers = unpacked(**inputs).logits
    addresses = {
        weight.path: weight.tensor.data_ptr() for weight in weight_tensors(module)
    }
    for weight in weight_tensors(copied):
        assert weight.tensor.data_ptr() == addresses.pop(weight.path)
    assert not addresses
    assert exact.dtype == torch.float64
    tolerance = 0.05 if scheme == "bnb-int8" else 1e-5
    scale = float(exact.norm())
    assert float((exact - output.logits).norm()) < tolerance * scale
    assert float((exact - numbers).norm()) < 1e-5 * scale
    states: Any = model.capture([TEXT], targets=targets)
    assert f"({SCHEMES[scheme]})" in repr(states)
    if family == "t5":
        entries, states = output.decoder_hidden_states, states.decoder
        sites = [f"decoder.layer.{k}" for k in range(3)]
    else:
        entries, sites = output.hidden_states, [f"layer.{k}" for k in range(3)]
    for site, entry in zip(sites, entries, strict=False):
        assert torch.equal(states[site], entry[0])


def test_torchao_refuses_a_model_of_which_it_would_quantise_nothing(
    folders: dict[str, Path],
) -> None:
    with pytest.raises(LoadError, match="Conv1D.*Choose 'nf4'"):
        load(folders, "gpt2", "int8")


def test_the_hash_covers_numbers_and_scales(
    folders: dict[str, Path], llama: hs.Model, scheme: str
) -> None:
    again = load(folders, "llama", scheme)
    assert Fingerprint(llama.module).value == Fingerprint(again.module).value
    names = [weight.path for weight in weight_tensors(llama.module)]
    assert len(set(names)) == len(names)
    weight = next(quantised_weights(again.module))
    parts = [
        part
        for part in weight_tensors(again.module)
        if part.path.startswith(weight.full_name)
    ]
    assert len(parts) > 1, "a packed weight has scales beside it"
    for part in parts:
        before = Fingerprint(again.module).value
        if part.tensor.numel() and part.path.rpartition(".")[2] != "zero_point":
            with torch.no_grad():
                part.tensor.view(torch.uint8).flatten()[:1] += 1
            assert Fingerprint(again.module).value != before, part.path


def test_batched_is_as_alone_or_known_not_to_be(llama: hs.Model, scheme: str) -> None:
    assert llama.batching.padding_safe == (scheme != "bnb-int8"), llama.batching.reason
    if scheme == "bnb-int8":
        assert "outlier channels over the whole batch" in llama.batching.reason
    together = llama.capture(TEXTS)
    for number, text in enumerate(TEXTS):
        alone = llama.capture([text])
        torch.testing.assert_close(
            together.of(number).values,  # type: ignore[union-attr]
            alone.values,  # type: ignore[union-attr]
            rtol=1e-4,
            atol=1e-5,
        )


def test_what_torchao_does_besides_is_named_or_found() -> None:
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    module = tiny_model("llama")
    quantize_(module, Int8DynamicActivationInt8WeightConfig())
    model = hs.load((module, None))
    name = "torchao int8 with int8 activations"
    assert model.source().quantisation == name
    with pytest.raises(ModuleError, match=name):
        hs.record(model, [TEXT], "layer.1", grad=True)
    assert torch.isfinite(model.capture(TEXTS).values).all()  # type: ignore[union-attr, arg-type]
    module = tiny_model("llama")
    quantize_(module, Int8WeightOnlyConfig())
    weight: Any = next(quantised_weights(module)).part.weight
    weight.scale.data[3] = torch.nan
    with pytest.raises(hs.errors.NotFinite, match=r"weight.scale has 1 NaN"):
        hs.load((module, None))


def test_a_folder_that_was_saved_quantised_is_loaded_by_its_path(
    llama: hs.Model, tmp_path: Path, scheme: str
) -> None:
    llama.module.save_pretrained(tmp_path)  # type: ignore[operator]
    again = hs.load(tmp_path)
    assert again.source().quantisation == SCHEMES[scheme]
    assert again.source().weights == llama.source().weights
    first, second = llama.capture([TEXT]), again.capture([TEXT])
    assert torch.equal(first.values, second.values)  # type: ignore[union-attr, arg-type]
    with pytest.raises(LoadError, match="quantised with .* already"):
        hs.load(hs.Quantised(tmp_path, "nf4"))


def test_the_questions_are_answered_or_refused(llama: hs.Model, scheme: str) -> None:
    last = llama.capture([TEXT], "final")
    run = hs.record(llama, [TEXT], "final", logits=True)
    assert torch.equal(run.states.values, last.values)  # type: ignore[union-attr, arg-type]
    contrast = hs.Contrast(TEXT, [5, 6, 30, 8, 9, 10, 11], answer=7, other=8)
    direction = hs.Direction.of(torch.ones(64), sites="layer.1")
    assert hs.lens(llama, TEXT).facts
    assert hs.profile(llama, TEXTS).facts
    assert hs.contributions(llama, TEXT, 7).facts
    assert hs.patch(llama, contrast).facts
    assert hs.steer(llama, [TEXT], direction, quality=TEXTS).facts
    if scheme == "bnb-int8":
        with pytest.raises(hs.errors.SiteError, match="do not add up"):
            hs.attention(llama, TEXT)
        for ask in (
            lambda: hs.record(llama, [TEXT], "layer.1", grad=True),
            lambda: hs.visibility(llama, TEXT),
        ):
            with pytest.raises(ModuleError, match="rounds what enters .* no derivati"):
                ask()
        return
    assert hs.visibility(llama, TEXT).facts
    plain = hs.load((unpacked_copy(llama.module), None))
    answered, expected = hs.attention(llama, TEXT).data, hs.attention(plain, TEXT).data
    for name in expected.data_vars:
        if expected[name].dtype.kind == "f":
            assert abs(answered[name] - expected[name]).max() < 1e-3
    gradients = []
    for side in (llama, plain):
        run = hs.record(side, [TEXT], "layer.1", logits=True, grad=True)
        assert run.logits is not None
        (live,) = run.live.values()
        gradients.append(torch.autograd.grad(run.logits[-1, 7], live)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


def test_loading_is_quiet(
    folders: dict[str, Path], capfd: pytest.CaptureFixture[str]
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(folders, "llama", "bnb-int8").capture(TEXTS)
    assert capfd.readouterr().err.count("MatMul8bitLt") <= 1


def test_projections_that_a_user_has_packed_are_taken_as_they_are() -> None:
    """Where a pass would rearrange them in place, they are refused."""
    import bitsandbytes

    module = tiny_model("llama")
    for path, part in list(module.named_modules()):
        if type(part) is not nn.Linear or path == "lm_head":
            continue
        rows, columns = part.weight.shape
        packed: Any = bitsandbytes.nn.Linear4bit(
            columns, rows, bias=False, compute_dtype=torch.float32, quant_type="nf4"
        )
        packed.weight = bitsandbytes.nn.Params4bit(
            part.weight.data, requires_grad=False, quant_type="nf4"
        )
        container, _, name = path.rpartition(".")
        setattr(module.get_submodule(container), name, packed.to("cpu").eval())
        # As it is on processors with bfloat16.
        packed.support_avx512bf16_for_cpu = True
    with pytest.raises(LoadError, match="rearranges its 4-bit weights"):
        hs.load((module, None))
    for part in module.modules():
        if isinstance(part, bitsandbytes.nn.Linear4bit):
            part.support_avx512bf16_for_cpu = False
    model = hs.load((module, None))
    assert model.source().quantisation == "bitsandbytes nf4 with packed scales"
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        expected = module(ids, output_hidden_states=True).hidden_states[2][0]
    assert torch.equal(model.capture([TEXT])["layer.2"], expected)


def test_an_adapter_on_a_quantised_base(
    folders: dict[str, Path], tmp_path: Path, scheme: str
) -> None:
    config = peft.LoraConfig(
        target_modules=["q_proj", "up_proj"], init_lora_weights=False
    )
    peft.get_peft_model(tiny_model("llama"), config).save_pretrained(tmp_path)
    base = hs.Quantised(folders["llama"], scheme)
    adapted = hs.load(hs.Adapted(base, tmp_path))
    below, plain = adapted.without_adapters(), hs.load(base)
    assert adapted.source().quantisation == SCHEMES[scheme]
    assert adapted.source().base_weights == plain.source().weights
    states = below.capture(TEXTS)
    assert torch.equal(states.values, plain.capture(TEXTS).values)  # type: ignore[union-attr, arg-type]
    assert not torch.equal(adapted.capture(TEXTS).values, states.values)  # type: ignore[union-attr, arg-type]


def test_quantised_blocks_are_grafted_into_the_plain_model(
    folders: dict[str, Path], scheme: str
) -> None:
    plain = hs.load(folders["llama"])
    quantised = hs.load(hs.Quantised(folders["llama"], scheme))
    texts = [TEXT, TEXT[1:], TEXT[::-1]]
    result = hs.graft(plain, quantised, texts, layers=2)
    mixed: Any = copy.deepcopy(plain.module)
    donor: Any = quantised.module
    for number in (1, 2):
        mixed.model.layers[number] = donor.model.layers[number]
    losses = []
    for ids in texts:
        row = torch.tensor([ids])
        with torch.no_grad():
            logits = mixed(row).logits[0, :-1]
        losses.append(float(torch.nn.functional.cross_entropy(logits, row[0, 1:])))
    found = float(result.data["loss"].sel(site="layer.2"))
    assert found == pytest.approx(sum(losses) / 3, rel=1e-4)
    back = hs.graft(quantised, plain, texts, layers=3)
    expected = result.facts["losses"]["model"]["value"]
    assert back.data["loss"].values == pytest.approx([expected], rel=1e-4)
