"""A private copy of a module: what it shares with the original, and what it must not."""

from typing import Any

import torch
from torch import nn

from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import private_copy, to_dtype
from hiddenscope.testing import tiny_model


def test_a_copy_gives_the_same_numbers_with_the_same_tensors() -> None:
    module, ids = tiny_model("llama"), torch.tensor([[5, 6, 7]])
    copied = private_copy(module)
    assert torch.equal(copied(ids).logits, module(ids).logits)
    for weight, shared in zip(module.parameters(), copied.parameters(), strict=True):
        assert weight is shared
    assert not {id(part) for part in module.modules()} & {
        id(part) for part in copied.modules()
    }


def test_tied_weights_stay_tied_when_they_are_converted() -> None:
    module: Any = tiny_model("gpt2")
    copied: Any = private_copy(module, to_dtype(torch.float64))
    assert copied.lm_head.weight is copied.transformer.wte.weight
    assert copied(torch.tensor([[5, 6]])).logits.dtype == torch.float64
    assert {weight.dtype for weight in module.parameters()} == {torch.float32}


def test_another_attention_kernel_is_the_copy_s_alone() -> None:
    module: Any = tiny_model("llama")
    copied: Any = private_copy(module, attention="eager")
    assert copied.config._attn_implementation == "eager"
    assert module.config._attn_implementation == "sdpa"


def test_our_hooks_do_not_move_to_the_copy_and_those_of_others_do() -> None:
    linear = nn.Linear(2, 2)
    calls: list[str] = []
    linear.register_forward_hook(lambda *seen: calls.append("theirs"))
    with hooks.watching(
        [hooks.Watch(linear, "output", lambda output: calls.append("ours"))]
    ):
        copied = private_copy(linear)
    copied(torch.zeros(1, 2))
    assert calls == ["theirs"]
