"""Quantised weights as files and modules name them, without the libraries.

tests/slow/real has the libraries.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.errors import LoadError, ModuleError, Unsafe
from hiddenscope.loading import variants
from hiddenscope.modules.module_copy import private_copy
from hiddenscope.modules.quantised import (
    batch_dependence,
    packed_tensors,
    quantisation_of,
    quantised_weights,
    refuse_gradients,
)
from tests.folders import change, tiny_llama

CLASS = {"default": {"_type": "os.system", "_data": "true"}}


@pytest.mark.parametrize(
    ("method", "others", "error", "match"),
    [
        ("hqq", {}, LoadError, "hqq is not installed. Run: pip install"),
        ("gptq", {"bits": 4}, LoadError, "pip install gptqmodel"),
        ("vptq", {}, LoadError, "computes on a GPU only"),
        ("fp8", {}, Unsafe, "kernels would be downloaded"),
        ("mxfp4", {}, Unsafe, "kernels would be downloaded"),
        ("no such", {}, LoadError, "names the method 'no such'"),
        (["torchao"], {}, LoadError, "names the method"),
        (None, {}, LoadError, "names the method"),
        (None, {"load_in_8bit": True}, LoadError, "bitsandbytes is not installed"),
        ("torchao", {"quant_type": CLASS}, LoadError, "names the class 'os.system'"),
        ("bitsandbytes", {"kernel": "a/kernel"}, Unsafe, "kernel='a/kernel'"),
    ],
)
def test_a_config_that_cannot_be_followed_is_refused_before_weights_are_read(
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: object,
    others: dict[str, object],
    error: type[Exception],
    match: str,
) -> None:
    named = {} if method is None else {"quant_method": method}
    change(llama / "config.json", quantization_config={**named, **others})
    monkeypatch.setattr(variants, "is_installed", lambda name: False)
    monkeypatch.setattr(
        "hiddenscope.loading.checkpoint._from_pretrained",
        lambda *_: pytest.fail("read"),
    )
    with pytest.raises(error, match=match):
        hs.load(llama, device="cpu")


def test_what_cannot_be_quantised_is_refused(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LoadError, match="quantising"):
        hs.load(hs.Quantised((tiny_llama(), None), "int8"))
    monkeypatch.setattr(variants, "is_installed", lambda name: False)
    for scheme in ("int8", "nf4"):
        with pytest.raises(LoadError, match=r"pip install hiddenscope\[quantised\]"):
            hs.load(hs.Quantised(llama, scheme))
    monkeypatch.setattr(variants, "is_installed", lambda name: True)
    change(llama / "config.json", quantization_config={"quant_method": "torchao"})
    with pytest.raises(LoadError, match="quantised with torchao already"):
        hs.load(hs.Quantised(llama, "nf4"))


class Int8Tensor(Tensor):
    """A weight as torchao keeps it: known by the module and the name of its class."""

    __module__ = "torchao.quantization"
    act_quant_kwargs: object = None

    def dequantize(self) -> Tensor:
        return self.as_subclass(Tensor).float() / 4


class Int8Params(nn.Parameter):
    """A weight as LLM.int8() keeps it, with a scale for each row."""

    __module__ = "bitsandbytes.nn"
    SCB: Tensor


class Linear8bitLt(nn.Linear):
    __module__ = "bitsandbytes.nn"


def test_packed_weights_are_named_and_unpacked() -> None:
    numbers = torch.arange(-4, 4, dtype=torch.int8).reshape(2, 4)
    part = nn.Linear(4, 2, bias=False)
    part._parameters["weight"] = nn.Parameter(
        numbers.as_subclass(Int8Tensor), requires_grad=False
    )
    module = nn.Sequential(part, nn.ReLU())
    assert quantisation_of(module) == "torchao int8 weight-only"
    (weight,) = quantised_weights(module)
    assert weight.full_name == "0.weight"
    assert torch.equal(weight.unpack(), numbers / 4)
    refuse_gradients(module)
    plain: Any = private_copy(module, lambda name, tensor: tensor)
    assert quantisation_of(plain) == ""
    assert torch.equal(plain(torch.eye(4)), (numbers / 4).T.relu())
    part.weight.act_quant_kwargs = {}  # type: ignore[union-attr]
    assert quantisation_of(module) == "torchao int8 with int8 activations"
    with pytest.raises(ModuleError, match=r"rounds what enters `0` to 8 bits"):
        refuse_gradients(module)


def test_llm_int8_has_scales_and_depends_on_the_batch() -> None:
    numbers = torch.tensor([[127, -127], [0, 64]], dtype=torch.int8)
    part: Any = Linear8bitLt(2, 2, bias=False)
    part.weight = Int8Params(numbers, requires_grad=False)
    part.weight.SCB = torch.tensor([2.0, 127.0])
    assert quantisation_of(part) == "bitsandbytes int8"
    (weight,) = quantised_weights(part)
    assert weight.rounds_input
    expected = torch.tensor([[2.0, -2.0], [0.0, 64.0]])
    torch.testing.assert_close(weight.unpack(), expected)
    names = [name for name, _ in packed_tensors(part, "weight")]
    assert names == ["weight", "weight.SCB"]
    assert batch_dependence(part) == ""
    part.state = type("State", (), {"threshold": 6.0})()
    assert "outlier channels over the whole batch" in batch_dependence(part)


def test_weights_that_only_their_own_library_can_unpack_are_refused() -> None:
    module = tiny_llama()
    module.config.quantization_config = {"quant_method": "hqq"}
    assert quantisation_of(module) == "hqq"
    with pytest.raises(ModuleError, match="packed by hqq, whose gradients"):
        refuse_gradients(module)
    with pytest.raises(ModuleError, match="packed by hqq, and only its own code"):
        private_copy(module, lambda name, tensor: tensor)
    module.config.quantization_config = {"quant_method": "torchao"}
    assert quantisation_of(module) == ""
