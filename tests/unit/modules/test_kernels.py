"""Attention is checked where a kernel can lose a NaN, in this thread and call alone."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, overrides
from torch.nn import functional

import hiddenscope as hs
from hiddenscope.errors import NotFinite
from hiddenscope.modules import hooks, installation, operations
from hiddenscope.testing import tiny_model
from hiddenscope.testing.untouched import AtCall, tracing

TEXT = [7, 99, 23, 64, 31]


@pytest.fixture
def losing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take queries and keys as lost on this device, whatever its kernel does."""
    monkeypatch.setattr(operations, "lost_inputs", lambda device, dtype: (0, 1))


@pytest.fixture
def keeping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take nothing as lost on this device, whatever its kernel does."""
    monkeypatch.setattr(operations, "lost_inputs", lambda device, dtype: ())


def modes() -> list[object]:
    return list(overrides._get_current_function_mode_stack())


def modes_in_a_pass(module: nn.Module) -> list[object]:
    """Return the function modes that a pass of the model runs under."""
    model = hs.load((module, None))
    stack: list[object] = []
    handle = module.register_forward_hook(lambda *call: stack.extend(modes()))
    model.capture([TEXT])
    handle.remove()
    return stack


def spoilt(which: int) -> Tensor:
    inputs = torch.ones(3, 1, 1, 5, 8)
    inputs[which, 0, 0, 2] = torch.nan
    return inputs


@pytest.mark.usefixtures("losing")
def test_a_pass_is_checked_where_a_kernel_loses_its_inputs() -> None:
    stack = modes_in_a_pass(tiny_model("llama"))
    assert {type(mode) for mode in stack} == {operations.AttentionCheck}
    assert not modes()


@pytest.mark.usefixtures("losing")
def test_only_the_first_pass_of_these_weights_is_checked_if_states_show_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = tiny_model("llama")
    model = hs.load((module, None))
    checks: list[object] = []
    checked = hooks._checked_attention
    monkeypatch.setattr(
        hooks, "_checked_attention", lambda *call: checks.append(call) or checked(*call)
    )

    def check_count(sites: str = "layer.*") -> int:
        checks.clear()
        model.capture([TEXT], sites)
        return len(checks)

    assert [check_count(), check_count("layer.1")] == [0, 0], "the load tried it"
    assert check_count("layer.2.mlp") == 1, "what a branch adds shows no other token"
    with hs.editing(model, {"layer.1": lambda states: states}):
        assert check_count() == 1, "a change may hide what is not finite"
    weight = module.model.layers[1].self_attn.q_proj.weight
    torch.nn.init.constant_(weight, 3e38)
    with pytest.raises(NotFinite):
        check_count()
    torch.nn.init.constant_(weight, 0.01)
    assert [check_count("layer.1"), check_count("layer.0")] == [1, 0]
    assert [check_count(), check_count()] == [1, 0], "deeper, and once"
    module.to(torch.float16)
    model = hs.load((module, None))
    assert [check_count(), check_count()] == [1, 1], "float16 has no room"


@pytest.mark.usefixtures("keeping")
def test_nothing_is_installed_where_no_kernel_loses_its_inputs() -> None:
    assert not modes_in_a_pass(tiny_model("llama"))


@pytest.mark.usefixtures("losing")
def test_nothing_is_installed_where_torch_computes_no_attention() -> None:
    module: Any = tiny_model("llama")
    module.set_attn_implementation("eager")
    assert not modes_in_a_pass(module)

    class Own(nn.Linear):
        """A part from outside transformers, which may do what the config denies."""

    module.model.layers[0].mlp.act_fn = Own(1, 1).eval()
    hooks.parts_of(module)
    with hooks.finite_attention(module):
        assert modes()


Attention = Callable[[Tensor, Tensor, Tensor], object]
CALLS: dict[str, Attention] = {
    "positional": lambda *inputs: functional.scaled_dot_product_attention(*inputs),
    "keywords": lambda query, key, value: functional.scaled_dot_product_attention(
        query=query, key=key, value=value
    ),
    "multi-head": lambda query, key, value: nn.MultiheadAttention(
        8, 2, batch_first=True
    )(query[0], key[0], value[0], need_weights=False),
}


@pytest.mark.usefixtures("losing")
@pytest.mark.parametrize("call", CALLS)
def test_lost_inputs_are_found_however_attention_is_called(call: str) -> None:
    for which in (0, 1):
        inputs = spoilt(which)
        with (
            pytest.raises(NotFinite, match="attention call 1 of 1 was given a NaN"),
            hooks.finite_attention(nn.Linear(1, 1)),
        ):
            CALLS[call](*inputs)
        assert not modes()


@pytest.mark.usefixtures("losing")
def test_multi_head_attention_gives_the_same_numbers() -> None:
    module = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    states = torch.randn(2, 5, 8)
    expected = module(states, states, states, need_weights=False)[0]
    with hooks.finite_attention(module):
        checked = module(states, states, states, need_weights=False)[0]
    assert torch.equal(checked, expected)


@pytest.mark.usefixtures("losing")
def test_a_check_that_ends_in_another_thread_is_gone_before_the_next_one() -> None:
    check = hooks.finite_attention(nn.Linear(1, 1))
    check.__enter__()
    left = modes()
    thread = threading.Thread(target=check.__exit__, args=(None, None, None))
    thread.start()
    thread.join()
    functional.scaled_dot_product_attention(*spoilt(0))  # it is no longer checked
    with hooks.finite_attention(nn.Linear(1, 1)):
        assert len(modes()) == 1 and modes() != left
    assert not modes()
    installation.remove_leftovers()


@pytest.mark.usefixtures("losing")
def test_an_interrupt_while_torch_suspends_the_check_leaves_nothing() -> None:
    """torch takes a mode off its stack while the mode handles an operation."""
    model = hs.load((tiny_model("gpt2"), None))
    model.capture([TEXT])
    for call in range(1, 6):
        with (
            pytest.raises(KeyboardInterrupt),
            tracing(AtCall((contextlib.__file__, "__exit__"), call)),
        ):
            model.capture([TEXT])
        installation.remove_leftovers()
        assert not modes()
