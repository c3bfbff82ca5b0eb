"""Laws of stepping: blocks called one at a time, on any rows, are the whole pass."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope import Site
from hiddenscope.errors import PassError
from hiddenscope.passes.stepping import Stepper
from hiddenscope.testing import tiny_model
from hiddenscope.testing.untouched import is_free
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
Hanging = Callable[[nn.Module], dict[str, Any]]

IDS = [[7, 99, 23, 64, 31], [8, 45, 77, 64, 30]]
FAST = ["llama", "gptj", "gemma3_text", "bloom", "granite"]
SLOW = ["gpt2", "qwen3", "opt", "gpt_neox", "falcon", "mixtral"]
INSIDE = ("attn", "attn.q", "attn.k", "attn.v", "attn.z", "mlp")


def closely(states: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(states, expected, rtol=1e-5, atol=1e-5)


def recorded(model: hs.Model, ids: list[list[int]]) -> Any:
    """Return what a whole pass shows [token of all texts, width], by site."""
    return hs.record(
        model, ids, "layer.*,*.attn,*.attn.q,*.attn.k,*.attn.v,*.attn.z,*.mlp"
    ).states


@pytest.mark.parametrize("family", with_slow(FAST, SLOW))
def test_stepping_through_all_blocks_is_the_whole_pass(
    tiny: Tiny, family: str, hanging: Hanging
) -> None:
    """Rows are as many as the model has heads, which a table of the text's own has too,
    and more: and they are another text's as well, for arguments tell nothing of it.
    """
    model = tiny(family)
    before = hanging(model.module)
    states = recorded(model, IDS)
    stepper = Stepper(model, model.encode(IDS[:1]))
    for copies in (1, 2, 3):
        rows = states["layer.0"].reshape(2, 5, -1).repeat(copies, 1, 1)
        for layer in range(1, 4):
            read = [Site(layer, part) for part in INSIDE]
            shown = stepper.call(layer, rows, read, whole=True)
            rows = shown.pop(Site(layer))
            for site, seen in shown.items():
                expected = states[site].reshape(2, 5, -1)
                closely(seen, expected.repeat(copies, 1, 1))
            closely(rows, states[Site(layer)].reshape(2, 5, -1).repeat(copies, 1, 1))
    assert hanging(model.module) == before


@pytest.mark.parametrize("family", with_slow(["llama"], ["gpt2", "gptj"]))
@pytest.mark.parametrize("part", ["attn.q", "attn.v", "attn.z", "mlp"])
def test_a_change_is_an_edit(tiny: Tiny, family: str, part: str) -> None:
    model = tiny(family)
    site = Site(2, part)
    states = recorded(model, IDS[:1])
    new = states[site].flip(0)
    edited = hs.edit(model, IDS[:1], {site: hs.Replace(new)}, "layer.2,layer.2.attn.z")
    stepper = Stepper(model, model.encode(IDS[:1]))
    rows = states["layer.1"].repeat(2, 1, 1)

    def change(seen: Tensor) -> Tensor:
        """Change the second row alone."""
        return torch.cat([seen[:1], new[None]])

    z = Site(2, "attn.z")
    shown = stepper.call(2, rows, [z], {site: change}, whole=True)
    for place in (z, Site(2)):
        closely(shown[place][0], states[place])
        closely(shown[place][1], edited.states[place])
    assert torch.equal(shown[site][1], new), "what is read is read after the changes"


def test_a_call_ends_when_all_is_read(tiny: Tiny) -> None:
    model = tiny("llama")
    stepper = Stepper(model, model.encode(IDS[:1]))
    ran: list[int] = []
    mlp: Any = model.module.get_submodule("model.layers.0.mlp")
    handle = mlp.register_forward_hook(lambda *_: ran.append(1))
    rows = recorded(model, IDS[:1])["layer.0"][None]
    ran.clear()
    assert set(stepper.call(1, rows, [Site(1, "attn.z")])) == {Site(1, "attn.z")}
    assert not ran
    stepper.call(1, rows, [Site(1, "attn.z")], whole=True)
    handle.remove()
    assert ran


def test_what_a_block_does_not_show_is_refused(tiny: Tiny, hanging: Hanging) -> None:
    model = tiny("llama")
    before = hanging(model.module)
    stepper = Stepper(model, model.encode(IDS[:1]))
    with pytest.raises(PassError, match=r"No state at layer\.2\.mlp of .* by itself"):
        stepper.call(1, torch.zeros(1, 5, 64), [Site(2, "mlp")])
    albert = tiny("albert")
    with pytest.raises(PassError, match="is called more than once"):
        Stepper(albert, albert.encode(IDS[:1]))
    assert hanging(model.module) == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_leaves_no_gradients_and_the_modes_of_the_caller(mode: Any) -> None:
    model = hs.load((tiny_model("llama"), None))
    rows = torch.randn(1, 5, 64)
    with mode():
        stepper = Stepper(model, model.encode(IDS[:1]))
        inside = stepper.call(1, rows, whole=True)[Site(1)]
        assert not torch.is_grad_enabled()
    outside = stepper.call(1, rows, whole=True)[Site(1)]
    assert torch.is_grad_enabled()
    assert not outside.requires_grad and torch.equal(inside, outside)
    assert all(weight.grad is None for weight in model.module.parameters())


def test_an_interrupt_inside_a_block_leaves_nothing(
    tiny: Tiny, hanging: Hanging
) -> None:
    model = tiny("llama")
    stepper = Stepper(model, model.encode(IDS[:1]))
    before = hanging(model.module)

    def interrupt(seen: Tensor) -> Tensor:
        raise KeyboardInterrupt

    for part in ("attn.q", "attn.z", "mid", "mlp"):
        with pytest.raises(KeyboardInterrupt):
            stepper.call(2, torch.zeros(1, 5, 64), (), {Site(2, part): interrupt})
        assert hanging(model.module) == before
        assert is_free(model.lock)
