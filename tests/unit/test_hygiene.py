"""Whatever happens in a pass, the module is left as it was."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import AnatomyError, NotFinite, PassError
from hiddenscope.testing import identity_block, nan_weight, tiny_model
from hiddenscope.testing.untouched import is_free

Hanging = Callable[[nn.Module], dict[str, Any]]
TEXT = [7, 99, 23, 64, 31]
FAMILIES = ["llama", "gpt2", "bert", "t5"]
BLOCK = {
    "llama": "model.layers.1",
    "gpt2": "transformer.h.1",
    "bert": "bert.encoder.layer.1",
    "t5": "encoder.block.1",
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def model(family: str) -> Iterator[hs.Model]:
    """A model of the test's own, which must be as before when the test is done."""
    module = tiny_model(family)
    module.config.decoder_start_token_id = 0  # type: ignore[union-attr]
    weights = [weight.clone() for weight in module.parameters()]
    yield hs.load((module, None))
    assert all(
        torch.equal(a, b) for a, b in zip(weights, module.parameters(), strict=True)
    )


@cache
def fresh_states(family: str) -> Any:
    module = tiny_model(family)
    module.config.decoder_start_token_id = 0  # type: ignore[union-attr]
    return hs.load((module, None)).capture([TEXT, TEXT[:2]])


def works(model: hs.Model, family: str) -> bool:
    """Whether the model still captures what a fresh one does."""
    mine, theirs = model.capture([TEXT, TEXT[:2]]), fresh_states(family)
    return all(torch.equal(mine[site], theirs[site]) for site in mine.sites)


def test_after_loading(family: str, hanging: Hanging) -> None:
    module = tiny_model(family)
    before = hanging(module)
    hs.load((module, None))
    assert hanging(module) == before


def test_after_success_and_early_stop(
    model: hs.Model, family: str, hanging: Hanging
) -> None:
    before = hanging(model.module)
    model.capture([TEXT, TEXT[:2]])
    model.capture([TEXT], "layer.1")
    hs.record(model, [TEXT], "layer.1-2", logits=True)
    with hs.recording(model, "layer.1"):
        hs.record(model, [TEXT], "layer.2")
    assert hanging(model.module) == before
    hs.record(model, [TEXT], grad=True, logits=True)
    assert hanging(model.module) == before
    assert works(model, family)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("torn"), KeyboardInterrupt(), SystemExit(3)],
    ids=lambda e: type(e).__name__,
)
def test_after_an_error_or_an_interrupt_in_a_block(
    model: hs.Model, family: str, error: BaseException, hanging: Hanging
) -> None:
    def tear(*_: Any) -> None:
        raise error

    handle = model.module.get_submodule(BLOCK[family]).register_forward_hook(tear)
    before = hanging(model.module)
    ways: list[Callable[[], Any]] = [
        lambda: model.capture([TEXT, TEXT[:2]]),
        lambda: hs.record(model, [TEXT], logits=True),
        lambda: hs.record(model, [TEXT], grad=True),
    ]
    for way in ways:
        with pytest.raises(type(error)):
            way()
        assert hanging(model.module) == before
    with pytest.raises(type(error)), hs.recording(model):
        model.module(**_inputs(model))
    assert hanging(model.module) == before
    handle.remove()
    assert works(model, family)
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def _inputs(model: hs.Model) -> dict[str, Any]:
    ids = torch.tensor([TEXT])
    return {"input_ids": ids} | (
        {"decoder_input_ids": ids} if len(model.anatomy.stacks) > 1 else {}
    )


def test_after_an_interrupt_inside_our_own_hook(
    model: hs.Model, family: str, monkeypatch: pytest.MonkeyPatch, hanging: Hanging
) -> None:
    before = hanging(model.module)
    with monkeypatch.context() as patch:
        patch.setattr("hiddenscope.passes.buffers.StackBuffer.write", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.capture([TEXT])
    assert hanging(model.module) == before
    assert works(model, family)


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_after_a_nan(family: str, hanging: Hanging) -> None:
    module = tiny_model(family)
    module.config.decoder_start_token_id = 0  # type: ignore[union-attr]
    model = hs.load((module, None))
    nan_weight(module, block=2)
    before = hanging(module)
    with pytest.raises(NotFinite):
        model.capture([TEXT])
    with pytest.raises(NotFinite):
        hs.load((module, None))
    assert hanging(module) == before


def test_after_an_anatomy_that_fails(hanging: Hanging) -> None:
    module = tiny_model("llama")
    identity_block(module, 2)
    before = hanging(module)
    with pytest.raises(AnatomyError):
        hs.load((module, None))
    assert hanging(module) == before


def test_after_generation(hanging: Hanging) -> None:
    module = tiny_model("llama")
    model = hs.load((module, None))
    before, settings = hanging(module), module.generation_config.to_dict()  # type: ignore[union-attr, operator]
    model.capture_generation([TEXT], max_new_tokens=3)
    with pytest.raises(PassError):
        model.capture_generation([TEXT], max_new_tokens=3, num_beams=3)
    handle = module.model.layers[1].register_forward_hook(_interrupted)  # type: ignore
    with pytest.raises(KeyboardInterrupt):
        model.capture_generation([TEXT], max_new_tokens=3)
    handle.remove()
    assert hanging(module) == before
    assert module.generation_config.to_dict() == settings  # type: ignore[union-attr, operator]
    assert works(model, "llama")


def test_hooks_and_forwards_of_somebody_else_stay(hanging: Hanging) -> None:
    module, calls = tiny_model("llama"), []
    block = module.model.layers[0]  # type: ignore[union-attr, index]
    block.register_forward_hook(lambda *_: calls.append("hook"))
    theirs = block.forward
    block.forward = lambda *args, **kwargs: (
        calls.append("forward"),
        theirs(*args, **kwargs),
    )[1]
    before = hanging(module)
    model = hs.load((module, None))
    calls.clear()
    model.capture([TEXT])
    assert calls == ["forward", "hook"] and hanging(module) == before


def test_a_lock_is_free_after_an_error(model: hs.Model, family: str) -> None:
    handle = model.module.get_submodule(BLOCK[family]).register_forward_hook(
        _interrupted
    )
    with pytest.raises(KeyboardInterrupt):
        model.capture([TEXT])
    handle.remove()
    assert is_free(model.lock)
