"""Drift against ports written from scratch: modules of other names, functions, arrays,
and the faults of ports.
"""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hiddenscope as hs
from hiddenscope.analyses.drift.dtypes import Digits, digits_of_embeddings, with_digits
from hiddenscope.errors import (
    Error,
    ModuleError,
    NotFinite,
    PassError,
    StatesError,
    UnknownModel,
)
from hiddenscope.modules.slow_dtypes import slowdown
from hiddenscope.testing import build, tiny_model
from tests.unit.analyses.test_drift import plain_llama

TEXTS = [
    [5, 6, 7, 9, 30, 41, 17],
    [50, 60, 70, 80],
    [33, 12, 8, 100, 101, 99, 7, 5, 4, 11],
]
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "head_dim": 16,
}
CONFIG |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


PLAIN: Any = plain_llama()


@cache
def llama() -> hs.Model:
    return hs.load(
        (
            build(
                {
                    "model_class": "LlamaForCausalLM",
                    "config_class": "LlamaConfig",
                    "config": CONFIG,
                }
            ),
            None,
        )
    )


@cache
def t5() -> hs.Model:
    module: Any = tiny_model("t5")
    module.config.decoder_start_token_id = 0
    return hs.load((module, None))


def port(mistake: str = "", block: int = 1) -> Any:
    return PLAIN.PlainLlama(llama().module, mistake, block=block).eval()


def facts_of(candidate: Any, model: hs.Model | None = None, **options: Any) -> Any:
    return hs.drift(model or llama(), candidate, TEXTS, **options).facts


def running(loop: Callable[[Any, Tensor], Tensor]) -> Any:
    """The port with another loop over its blocks."""
    candidate = port()

    class Looping(PLAIN.PlainLlama):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.head(self.norm(loop(self.blocks, self.embed(ids))))
            return out

    candidate.__class__ = Looping
    return candidate


def skipping(blocks: Any, x: Tensor) -> Tensor:
    for number in (0, 2):
        x = blocks[number](x)
    return x


def doubling(blocks: Any, x: Tensor) -> Tensor:
    for number in (0, 1, 1, 2):
        x = blocks[number](x)
    return x


def swapping(blocks: Any, x: Tensor) -> Tensor:
    for number in (1, 0, 2):
        x = blocks[number](x)
    return x


def scaling(blocks: Any, x: Tensor) -> Tensor:
    for block in blocks:
        x = 1.001 * block(x)
    return x


@pytest.mark.parametrize(
    ("loop", "site", "module", "fault"),
    [
        (skipping, "layer.2", "", "layer_skipped"),
        (doubling, "layer.2", "", "layer_doubled"),
        (swapping, "layer.1", "blocks.1", "swapped_layer"),
        (scaling, "layer.2", "", "block_input"),
    ],
)
def test_the_code_that_calls_the_blocks_is_at_fault(
    loop: Any, site: str, module: str, fault: str
) -> None:
    facts = facts_of(running(loop))
    assert (facts["first_site"], facts["module"]) == (site, module)
    assert fault in [hint["fault"] for hint in facts["hints"]], facts["hints"]


def in_block(change: Callable[[Any, Tensor], Tensor]) -> Any:
    """The port with another forward in its second block."""
    candidate = port()

    class Changed(PLAIN.Block):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return change(self, x)

    candidate.blocks[1].__class__ = Changed
    return candidate


def mlp(
    block: Any, x: Tensor, act: Callable[[Tensor], Tensor] = functional.silu
) -> Tensor:
    out: Tensor = block.down(act(block.gate(x)) * block.up(x))
    return out


def parallel(block: Any, x: Tensor) -> Tensor:
    out: Tensor = x + block.attention(block.norm1(x)) + mlp(block, block.norm2(x))
    return out


def normed_residual(block: Any, x: Tensor) -> Tensor:
    y = block.norm1(x)
    y = y + block.attention(y)
    return y + mlp(block, block.norm2(y))


def other_activation(block: Any, x: Tensor) -> Tensor:
    x = x + block.attention(block.norm1(x))
    return x + mlp(block, block.norm2(x), functional.gelu)


def unchanged(block: Any, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (parallel, None),
        (normed_residual, None),
        (other_activation, "activation"),
        (unchanged, "layer_skipped"),
    ],
)
def test_the_code_of_a_block_is_at_fault_and_not_a_part_that_it_feeds_wrongly(
    change: Any, fault: str | None
) -> None:
    facts = facts_of(in_block(change))
    assert (facts["first_site"], facts["module"], facts["own_code"]) == (
        "layer.2",
        "blocks.1",
        True,
    )
    assert fault is None or fault in [hint["fault"] for hint in facts["hints"]], facts[
        "hints"
    ]


@pytest.mark.parametrize(
    ("mistake", "fault"),
    [("repeat", "kv_heads"), ("eps", "norm_root_eps"), ("interleaved", "rope_pairs")],
)
def test_a_mistake_of_a_port_is_known_by_its_signature(
    mistake: str, fault: str
) -> None:
    """Attention that cannot be called as the reference's is known by what it gave."""
    hints = [hint["fault"] for hint in facts_of(port(mistake))["hints"]]
    assert hints == [fault]


def with_tables(base: float, blocks: tuple[int, ...] = (0, 1, 2)) -> Any:
    """The port whose attention is given rotary tables from outside, which are wrong for
    some blocks.
    """
    candidate = port()

    class Attention(PLAIN.Attention):  # type: ignore[misc]
        def forward(self, x: Tensor, base: Tensor) -> Tensor:
            self.base = float(base)
            out: Tensor = super().forward(x)
            return out

    class Block(PLAIN.Block):  # type: ignore[misc]
        def forward(self, x: Tensor, base: Tensor) -> Tensor:
            x = x + self.attention(self.norm1(x), base)
            return x + mlp(self, self.norm2(x))

    class Looping(PLAIN.PlainLlama):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for number, block in enumerate(self.blocks):
                x = block(x, torch.tensor(base if number in blocks else 10000.0))
            out: Tensor = self.head(self.norm(x))
            return out

    candidate.__class__ = Looping
    for block in candidate.blocks:
        block.__class__, block.attention.__class__ = Block, Attention
    return candidate


def test_what_a_part_is_given_and_nobody_compared_is_said() -> None:
    assert not facts_of(with_tables(10000.0))["drifted"]
    facts = facts_of(with_tables(500.0))
    assert (facts["first_site"], facts["module"], facts["own_code"]) == (
        "layer.1",
        "blocks.0.attention",
        False,
    )
    assert facts["hints"][-1]["fault"] == "not_compared"
    assert [hint["fault"] for hint in facts_of(with_tables(500.0, (1,)))["hints"]] == [
        "not_compared"
    ]


def states_of(module: Any, ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [*module(ids, output_hidden_states=True, use_cache=False).hidden_states]


RETURNED: dict[str, Callable[[list[Tensor]], Any]] = {
    "list": lambda states: states,
    "generator": lambda states: (state for state in states),
    "arrays": lambda states: [state.numpy() for state in states],
    "one array": lambda states: torch.stack(states).numpy(),
    "without the text": lambda states: torch.cat(states),
    "last first": lambda states: states[::-1],
    "token first": lambda states: [state.transpose(0, 1) for state in states],
}


@pytest.mark.parametrize("form", RETURNED)
def test_a_function_may_return_its_states_in_any_form(form: str) -> None:
    change, module = RETURNED[form], llama().module
    facts = facts_of(lambda ids: change(states_of(module, ids)))
    assert not facts["drifted"] and facts["sites"] == 4
    assert facts["notes"] == [
        "No tensor of the candidate was paired with `layer.3`: not compared."
    ]


def every_state(module: Any, ids: Tensor) -> list[Tensor]:
    """The embeddings, what each block gives, and what the final norm makes of the last."""
    outputs: list[Tensor] = []
    hooks = [
        block.register_forward_hook(lambda *call: outputs.append(call[2]))
        for block in module.model.layers
    ]
    first, *_, final = states_of(module, ids)
    for hook in hooks:
        hook.remove()
    return [first, *outputs, final]


def numbered(states: list[Tensor], start: int = 0) -> dict[str, Tensor]:
    return {f"layer.{number}": state for number, state in enumerate(states, start)}


# What a function returns of all states, by what it is paired, and the first site that
# has a tensor.
OFF_BY_ONE: dict[str, tuple[Callable[[list[Tensor]], Any], str, str]] = {
    "from zero": (lambda states: numbered(states[1:-1]), "name, off by one", "layer.1"),
    "from zero, and final": (
        lambda s: {**numbered(s[1:-1]), "final": s[-1]},
        "name, off by one",
        "layer.1",
    ),
    "embeddings as layer.1": (
        lambda states: numbered(states[:-1], 1),
        "name, off by one",
        "layer.0",
    ),
    "without embeddings": (
        lambda s: {"hidden_states": s[1:]},
        "name, off by one",
        "layer.1",
    ),
    "without both": (
        lambda s: {"hidden_states": s[1:-1]},
        "name, off by one",
        "layer.1",
    ),
    "normed": (
        lambda s: {"hidden_states": [*s[1:-2], s[-1]]},
        "name, off by one",
        "layer.1",
    ),
    "a list": (lambda states: states[1:], "order, off by one", "layer.1"),
    "right": (lambda states: numbered(states[:-1]), "name", "layer.0"),
}


@pytest.mark.parametrize("form", OFF_BY_ONE)
def test_numbers_that_are_off_by_one_are_no_drift(form: str) -> None:
    change, by, first = OFF_BY_ONE[form]
    facts = facts_of(lambda ids: change(every_state(llama().module, ids)))
    assert not facts["drifted"]
    assert (facts["pairing"]["by"], facts["pairing"]["pairs"][0]["site"]) == (by, first)
    assert any("off by one" in note for note in facts["notes"]) == (by != "name")


@pytest.mark.parametrize("form", OFF_BY_ONE)
def test_massive_channels_and_rounding_do_not_hide_that_numbers_are_off_by_one(
    form: str,
) -> None:
    """One channel of a real model may be a thousand times larger than the others, and
    the same in all layers.
    """
    module: Any = copy.deepcopy(llama().module)
    module.model.embed_tokens.weight.data[:, 5] = 3000.0
    model = hs.load((module, None))

    def rounded(ids: Tensor) -> Any:
        return OFF_BY_ONE[form][0](
            [state.bfloat16().float() for state in every_state(module, ids)]
        )

    facts = facts_of(rounded, model)
    assert (
        facts["pairing"]["by"] == OFF_BY_ONE[form][1]
        and facts["pairing"]["pairs"][0]["site"] == OFF_BY_ONE[form][2]
    )


def test_embeddings_show_in_which_digits_weights_were_saved() -> None:
    module: Any = llama().module
    embeddings = module.model.embed_tokens.weight.detach()
    assert digits_of_embeddings(embeddings, module) == Digits()
    saved = digits_of_embeddings(embeddings.bfloat16().float(), module)
    assert (
        saved == Digits(reference=torch.bfloat16)
        and "was saved in bfloat16" in saved.notes[0]
    )
    rounded = with_digits(module, saved.reference)
    assert digits_of_embeddings(embeddings.bfloat16().float(), rounded) == Digits()


@pytest.mark.parametrize("form", OFF_BY_ONE)
def test_a_fault_beside_numbers_that_are_off_by_one_is_found(form: str) -> None:
    broken: Any = copy.deepcopy(llama().module)
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(1.1)
    facts = facts_of(lambda ids: OFF_BY_ONE[form][0](every_state(broken, ids)))
    assert (facts["first_site"], facts["pairing"]["by"]) == (
        "layer.2",
        OFF_BY_ONE[form][1],
    )


def skips_first(module: Any) -> None:
    """The first block is left out, and the last is run twice: there are as many."""
    blocks = module.model.layers
    blocks[0], blocks[1] = blocks[1], blocks[2]


def scales_embeddings(module: Any) -> None:
    module.model.embed_tokens.weight.data.mul_(3.0)


def breaks_embeddings(module: Any) -> None:
    module.model.embed_tokens.weight.data = module.model.embed_tokens.weight.data.roll(
        1, 0
    )


def repeats(module: Any) -> None:
    blocks = module.model.layers
    blocks[1], blocks[2] = blocks[0], blocks[0]


@pytest.mark.parametrize(
    "plant", [skips_first, scales_embeddings, breaks_embeddings, repeats]
)
@pytest.mark.parametrize("form", ["all", "from one", "reported"])
def test_a_fault_is_not_paired_away(plant: Callable[[Any], None], form: str) -> None:
    broken = copy.deepcopy(llama().module)
    plant(broken)

    def returned(ids: Tensor) -> Any:
        states = every_state(broken, ids)
        if form == "reported":
            return {"hidden_states": [*states[:-2], states[-1]]}
        return numbered(states[:-1]) if form == "all" else numbered(states[1:-1], 1)

    facts = facts_of(returned)
    assert facts["drifted"] and facts["pairing"]["by"] == "name"
    first = {skips_first: "layer.1", repeats: "layer.2"}.get(
        plant, "layer.1" if form == "from one" else "layer.0"
    )
    assert facts["first_site"] == first


STACKED: dict[str, Callable[[Tensor], Any]] = {
    "text, layer": lambda states: states[None],
    "layer, text": lambda states: states[:, None],
    "text, token, layer": lambda states: states.transpose(0, 1)[None],
    "token, layer": lambda states: states.transpose(0, 1),
    "layer": lambda states: states,
    "text, layer among others": lambda states: {
        "hidden_states": states[None],
        "ids": torch.zeros(3, dtype=torch.long),
    },
    "array": lambda states: states[None].numpy(),
}


@pytest.mark.parametrize(
    "texts", [TEXTS, [TEXTS[0][:5]], [[7]], [TEXTS[0][:5], TEXTS[1]]]
)
@pytest.mark.parametrize("form", STACKED)
def test_all_layers_may_be_in_one_tensor(form: str, texts: list[list[int]]) -> None:
    """Of texts with as many tokens as there are sites, five, too."""
    module = llama().module
    if texts == [[7]] and form in ("layer", "token, layer"):
        return  # [5, 1, 64] and [1, 5, 64] are a state of five tokens or texts

    def returned(ids: Tensor) -> Any:
        return STACKED[form](torch.cat(every_state(module, ids)))

    facts = hs.drift(llama(), returned, texts).facts
    assert not facts["drifted"] and facts["sites"] >= 4


def test_a_generator_may_use_one_tensor_for_all_layers() -> None:
    def states(ids: Tensor) -> Any:
        buffer = torch.empty(1, ids.shape[1], 64)
        for state in every_state(llama().module, ids):
            yield buffer.copy_(state)

    assert not facts_of(states)["drifted"]


def endless(ids: Tensor) -> Any:
    while True:
        yield torch.zeros(1, ids.shape[1], 64)


def failing(ids: Tensor) -> Any:
    raise KeyError("gate")


def failing_late(ids: Tensor) -> Any:
    yield torch.zeros(1, ids.shape[1], 64)
    raise KeyError("gate")


def nested(ids: Tensor) -> Any:
    states: list[Any] = []
    states.append(states)
    return states


def huge(ids: Tensor) -> Any:
    return torch.zeros(1, 1).expand(10**7, 10**7)


ODD_CANDIDATES: dict[str, tuple[Any, type[Exception], str]] = {
    "raises": (failing, PassError, "it raised KeyError: 'gate'"),
    "raises late": (failing_late, PassError, "it raised KeyError: 'gate'"),
    "no parameter": (lambda: None, PassError, "it raised TypeError"),
    "None": (lambda ids: None, StatesError, "gave no floating-point tensor"),
    "strings": (lambda ids: ["a", "b"], StatesError, "gave no floating-point tensor"),
    "integers": (lambda ids: [ids] * 4, StatesError, "gave no floating-point tensor"),
    "huge": (huge, StatesError, "gave no floating-point tensor"),
    "NaN": (
        lambda ids: [torch.full((1, ids.shape[1], 64), torch.nan)] * 5,
        NotFinite,
        "has a NaN at layer.0",
    ),
    "endless": (endless, PassError, "more than 2,000 things"),
    "nested": (nested, PassError, "RecursionError"),
    "meta": (
        lambda ids: torch.zeros(1, ids.shape[1], 64, device="meta"),
        PassError,
        "meta device",
    ),
    "class": (nn.Linear, ModuleError, "Cannot compare the candidate"),
    "number": (5, ModuleError, "got int"),
    "no such path": ("/no/such/path", UnknownModel, "no such folder or file"),
}


@pytest.mark.parametrize("kind", ODD_CANDIDATES)
def test_an_odd_candidate_is_refused_with_a_reason(kind: str) -> None:
    candidate, error, message = ODD_CANDIDATES[kind]
    with pytest.raises(error, match=message):
        facts_of(candidate)


def test_a_module_that_fails_is_named() -> None:
    candidate = port()
    candidate.blocks[1].norm2.gain = nn.Parameter(torch.ones(63))
    with pytest.raises(
        PassError,
        match="Cannot run the candidate: it raised RuntimeError: The size of tensor",
    ):
        facts_of(candidate)


@pytest.mark.parametrize(
    "option",
    [
        {"texts": True},
        {"texts": 5},
        {"texts": Ellipsis},
        {"baseline": 0},
        {"baseline": True},
        {"baseline": b"x"},
        {"baseline": ""},
        {"baseline": "/dev/zero"},
        {"baseline": "."},
        {"baseline": "a\0b"},
        {"pairing": 3},
        {"pairing": {}},
        {"pairing": {"layer.1": 5}},
        {"sites": 5},
        {"sites": None},
    ],
    ids=str,
)
def test_an_odd_argument_is_refused_in_our_own_words(option: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"texts": TEXTS, **option}
    with pytest.raises(Error):
        hs.drift(llama(), port(), **arguments)


def test_states_beyond_recognition_are_not_left_out() -> None:
    """They correlate with nothing of the reference, and are paired by order; or it is
    an error.
    """
    broken: Any = copy.deepcopy(llama().module)
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(-30)
    facts = facts_of(lambda ids: states_of(broken, ids))
    assert (facts["first_site"], facts["pairing"]["by"], facts["sites"]) == (
        "layer.2",
        "order",
        4,
    )
    with pytest.raises(StatesError, match="not every one of its 3 tensors"):
        facts_of(lambda ids: states_of(broken, ids)[:3])
    named = facts_of(lambda ids: {"layer.2": states_of(broken, ids)[2]})
    assert (named["first_site"], named["sites"]) == ("layer.2", 1)


def test_order_is_what_it_says() -> None:
    """Names and correlation do not matter then, and a number of tensors that does not
    fit is an error.
    """
    module = llama().module

    def misnamed(ids: Tensor) -> dict[str, Tensor]:
        first, second, *others = states_of(module, ids)
        return {"layer.1": first, "layer.0": second} | {
            f"h{number}": state for number, state in enumerate(others)
        }

    facts = facts_of(misnamed, pairing="order")
    assert (
        facts["pairing"]["by"] == "order"
        and not facts["drifted"]
        and facts["sites"] == 4
    )
    backwards = facts_of(lambda ids: states_of(module, ids)[::-1], pairing="order")
    assert backwards["drifted"] and backwards["pairing"]["by"] == "order"
    with pytest.raises(
        StatesError,
        match="it has 3 tensors of the shape of a state, and the reference 5 sites",
    ):
        facts_of(lambda ids: states_of(module, ids)[:3], pairing="order")


def test_states_of_a_function_that_ran_in_bfloat16_are_no_drift_in_a_wider_dtype() -> (
    None
):
    # torch warns once in a process that this CPU has no product in bfloat16; the trial
    # of its speed hears it.
    slowdown(torch.bfloat16)
    narrow = copy.deepcopy(llama().module).bfloat16()
    facts = facts_of(lambda ids: [state.float() for state in states_of(narrow, ids)])
    assert not facts["drifted"] and "dtype" in facts["noise"]["made_of"]


def test_a_function_whose_weights_were_saved_in_bfloat16_is_no_drift() -> None:
    # A checkpoint has no rotary tables: these keep their digits.
    saved = with_digits(llama().module, torch.bfloat16)
    facts = facts_of(lambda ids: states_of(saved, ids))
    assert not facts["drifted"], facts["first_site"]
    assert [note for note in facts["notes"] if "saved in bfloat16" in note]


class _Reporting(PLAIN.PlainLlama):  # type: ignore[misc]
    """Gives a dict, with the last layer before the norm in `hidden_states`."""

    def forward(self, ids: Tensor) -> Any:
        states = [self.embed(ids)]
        for block in self.blocks:
            states.append(block(states[-1]))
        return {"hidden_states": states, "logits": self.head(self.norm(states[-1]))}


def test_the_last_entry_of_hidden_states_may_be_the_last_layer() -> None:
    candidate = port()
    candidate.__class__ = _Reporting
    facts = facts_of(candidate)
    assert not facts["drifted"] and facts["compared"] == "parts" and facts["sites"] == 6
    called = facts_of(lambda ids: candidate(ids))
    assert not called["drifted"] and called["pairing"]["by"] == "name"
    assert [pair["site"] for pair in called["pairing"]["pairs"]] == [
        *(f"layer.{k}" for k in range(4)),
        "logits",
    ]


def test_blocks_need_not_be_in_a_list() -> None:
    class Attributes(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.embed, self.norm, self.head = inner.embed, inner.norm, inner.head
            self.b0, self.b1, self.b2 = inner.blocks

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.norm(self.b2(self.b1(self.b0(self.embed(ids))))))

    candidate = Attributes(port()).eval()
    assert not facts_of(candidate)["drifted"]
    candidate.b1.down.weight.data.mul_(-30)
    facts = facts_of(candidate)
    assert (facts["first_site"], facts["module"], facts["pairing"]["by"]) == (
        "layer.2",
        "b1.down",
        "blocks",
    )


def test_a_port_without_a_head_is_compared_up_to_its_last_layer() -> None:
    class Headless(PLAIN.PlainLlama):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> Any:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.norm(x)

    candidate = port("eps")
    candidate.__class__ = Headless
    facts = facts_of(candidate)
    assert (facts["first_site"], facts["module"], facts["consequences"]) == (
        "layer.2",
        "blocks.1.norm1",
        None,
    )
    assert facts["notes"] == [
        "The candidate gives no logits of the reference's shape: they were not"
        " compared."
    ]


def test_a_module_before_the_blocks_is_not_blamed_for_what_comes_after_them() -> None:
    """An embedding that does not scale, with the scale in the model's own code: another
    make, and no fault.
    """
    module: Any = tiny_model("gemma3_text")
    candidate = copy.deepcopy(module)
    scale = float(candidate.model.embed_tokens.embed_scale)
    candidate.model.embed_tokens.embed_scale.fill_(1.0)
    candidate.model.embed_tokens.register_forward_hook(lambda _, __, made: made)
    candidate.model.layers[0].register_forward_pre_hook(
        lambda _, args: (args[0] * scale, *args[1:])
    )
    candidate.model.norm.weight.data.add_(0.5)
    facts = hs.drift((module, None), candidate, TEXTS).facts
    assert (facts["first_site"], facts["module"]) == ("final", "model.norm")


class _PlainT5(nn.Module):
    """T5's encoder and decoder as blocks of other names, around the reference's own
    parts.
    """

    def __init__(self, module: Any) -> None:
        super().__init__()
        inner = copy.deepcopy(module)
        self.shared, self.enc, self.dec, self.out = (
            inner.shared,
            inner.encoder,
            inner.decoder,
            inner.lm_head,
        )
        self.scale = (
            inner.config.d_model**-0.5 if inner.config.tie_word_embeddings else 1.0
        )

    def forward(self, ids: Tensor, target_ids: Tensor) -> Tensor:
        memory = self.enc(inputs_embeds=self.shared(ids)).last_hidden_state
        made = self.dec(
            inputs_embeds=self.shared(target_ids),
            encoder_hidden_states=memory,
            use_cache=False,
        )
        out: Tensor = self.out(made.last_hidden_state * self.scale)
        return out


def test_a_port_with_an_encoder_and_a_decoder() -> None:
    candidate = _PlainT5(t5().module).eval()
    facts = facts_of(candidate, t5())
    assert (
        not facts["drifted"]
        and facts["pairing"]["by"] == "blocks"
        and facts["sites"] == 11
    )
    candidate.get_submodule("dec.block.1.layer.1.EncDecAttention.k").weight.data.mul_(
        1.1
    )  # type: ignore[union-attr, operator]
    facts = facts_of(candidate, t5())
    assert facts["first_site"] == "decoder.layer.2"
    assert facts["module"] == "dec.block.1.layer.1.EncDecAttention.k"


class _Expert(nn.Module):
    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        super().__init__()
        half = len(gate_up) // 2
        self.w1, self.w3, self.w2 = (
            nn.Linear(*weight.T.shape, bias=False)
            for weight in (gate_up[:half],) * 2 + (down,)
        )
        for part, weight in (
            (self.w1, gate_up[:half]),
            (self.w3, gate_up[half:]),
            (self.w2, down),
        ):
            part.weight.data = weight.detach().clone()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class _Experts(nn.Module):
    """A mixture of experts, each a module of its own, in the place of Mixtral's."""

    def __init__(self, mlp: Any, top: int, *, normalised: bool) -> None:
        super().__init__()
        weights = zip(mlp.experts.gate_up_proj, mlp.experts.down_proj, strict=True)
        self.router, self.top, self.normalised = (
            copy.deepcopy(mlp.gate.weight),
            top,
            normalised,
        )
        self.each = nn.ModuleList([_Expert(gate_up, down) for gate_up, down in weights])

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        share, chosen = (rows @ self.router.T).float().softmax(-1).topk(self.top, -1)
        share = share / share.sum(-1, keepdim=True) if self.normalised else share
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.each):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                out.index_add_(
                    0, row, expert(rows[row]) * share[row, place, None].to(rows)
                )
        return out.view_as(x)


def mixtral_port(model: hs.Model, *, normalised: bool = True) -> Any:
    """The plain Llama with experts in the place of its MLP."""
    module: Any = model.module
    candidate = PLAIN.PlainLlama.__new__(PLAIN.PlainLlama)
    nn.Module.__init__(candidate)
    config = module.config
    candidate.embed = nn.Embedding.from_pretrained(
        module.model.embed_tokens.weight.detach().clone()
    )
    candidate.blocks = nn.ModuleList(
        [_MixtralBlock(block, config, normalised) for block in module.model.layers]
    )
    candidate.norm = PLAIN.Norm(config.hidden_size, config.rms_norm_eps, "")
    candidate.norm.gain.data = module.model.norm.weight.detach().clone()
    candidate.head = copy.deepcopy(module.lm_head)
    return candidate.eval()


class _MixtralBlock(nn.Module):
    def __init__(self, block: Any, config: Any, normalised: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = (
            PLAIN.Norm(config.hidden_size, config.rms_norm_eps, "") for _ in range(2)
        )
        self.norm1.gain.data = block.input_layernorm.weight.detach().clone()
        self.norm2.gain.data = block.post_attention_layernorm.weight.detach().clone()
        self.attention = PLAIN.Attention(config, "")
        for name in "qkvo":
            getattr(self.attention, f"w{name}").weight.data = getattr(
                block.self_attn, f"{name}_proj"
            ).weight.detach()
        self.moe = _Experts(
            block.mlp, config.num_experts_per_tok, normalised=normalised
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.moe(self.norm2(x))
        return out


@cache
def mixtral() -> hs.Model:
    config = {**CONFIG, "num_local_experts": 4, "num_experts_per_tok": 2}
    row = {
        "model_class": "MixtralForCausalLM",
        "config_class": "MixtralConfig",
        "config": config,
    }
    return hs.load((build(row), None))


def test_experts_that_are_modules_of_their_own() -> None:
    assert not facts_of(mixtral_port(mixtral()), mixtral())["drifted"]
    candidate = mixtral_port(mixtral())
    candidate.blocks[1].moe.each[2].w2.weight.data.mul_(1.05)
    facts = facts_of(candidate, mixtral())
    assert (facts["first_site"], facts["module"]) == (
        "layer.2",
        "blocks.1.moe.each.2.w2",
    )
    facts = facts_of(mixtral_port(mixtral(), normalised=False), mixtral())
    assert (facts["first_site"], facts["module"]) == ("layer.1", "blocks.0.moe")


def test_a_layout_of_weights_is_no_fault() -> None:
    """GPT-2 keeps its matrices as [in, out], a port as [out, in]: a fault beside that
    is no transposed weight.
    """

    class Linear(nn.Linear):
        pass

    model = hs.load((tiny_model("gpt2"), None))
    candidate: Any = copy.deepcopy(model.module)
    theirs = candidate.transformer.h[1].attn.c_proj
    own = Linear(*theirs.weight.shape)
    own.weight.data, own.bias.data = (
        theirs.weight.data.T.contiguous(),
        torch.zeros_like(theirs.bias.data),
    )
    candidate.transformer.h[1].attn.c_proj = own.eval()
    facts = facts_of(candidate, model)
    assert facts["module"] == "transformer.h.1.attn.c_proj"
    assert [hint["fault"] for hint in facts["hints"]] == ["missing_bias"]


def test_a_port_that_needs_more_than_ids_is_refused() -> None:
    class Placed(PLAIN.PlainLlama):  # type: ignore[misc]
        def forward(self, ids: Tensor, positions: Tensor) -> Any:
            return super().forward(ids)

    candidate = port()
    candidate.__class__ = Placed
    with pytest.raises(PassError, match="it needs 'positions' as well as token ids"):
        facts_of(candidate)


def test_what_was_asked_for_and_not_done_is_said() -> None:
    note = "Low memory was not used: it needs two live models with the same modules."
    states = llama().capture(TEXTS)
    for candidate in (port(), states):
        assert facts_of(candidate, low_memory=True)["notes"] == [note]
    with pytest.raises(StatesError, match="saved states are paired by their sites"):
        facts_of(states, pairing="order")


def test_a_report_claims_no_more_than_was_measured() -> None:
    states = llama().capture(TEXTS)
    assert "Noise was not measured" in hs.drift(states, states, None).summary()
    result = hs.drift(llama(), port("repeat"), TEXTS)
    facts = {**result.facts, "self_check": {"observing_changed_nothing": False}}
    facts["consequences"] = {
        **facts["consequences"],
        "restored": [{"sites": ["layer.2"], "share": -0.25}],
    }
    words = hs.Result("drift", result.data, facts, result.source).summary()
    assert (
        "do not rely on this comparison" in words
        and "do not rely" not in result.summary()
    )
    assert "adds 25.0% to the KL divergence" in words
    assert "the query heads read heads 0, 1, 0, 1." in words


def changed_llama(change: Callable[[Any], None]) -> hs.Model:
    """The reference with other weights."""
    module = copy.deepcopy(llama().module)
    with torch.no_grad():
        change(module)
    return hs.load((module, None))


def port_of(model: hs.Model) -> Any:
    return PLAIN.PlainLlama(model.module, "", block=1).eval()


def test_a_wrong_final_norm_without_a_head_is_not_taken_for_a_folded_one() -> None:
    class Headless(PLAIN.PlainLlama):  # type: ignore[misc]
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            out: Tensor = self.norm(x)
            return out

    candidate = port()
    candidate.__class__ = Headless
    assert not facts_of(candidate)["drifted"]
    candidate.norm.gain.data.mul_(torch.linspace(0.5, 2, 64))
    assert facts_of(candidate)["first_site"] == "final"


def test_a_head_is_blamed_beside_a_norm_that_differs_in_the_last_place() -> None:
    candidate = port()
    candidate.norm.gain.data[0] *= 1 + 2e-7
    candidate.head.weight.data[3] *= 1.3
    facts = facts_of(candidate)
    assert (facts["first_site"], facts["module"]) == ("logits", "head")


def test_blocks_of_other_widths_teach_nothing() -> None:
    def narrow(gated: Any, names: tuple[str, str, str]) -> None:
        for name in names:
            weight = getattr(gated, name).weight.data
            weight = weight[:, :32] if name == names[2] else weight[:32]
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = weight.clone()
            setattr(gated, name, linear)

    model = changed_llama(
        lambda module: narrow(
            module.model.layers[1].mlp, ("gate_proj", "up_proj", "down_proj")
        )
    )
    candidate = PLAIN.PlainLlama(llama().module, "", block=1).eval()
    narrow(candidate.blocks[1], ("gate", "up", "down"))
    assert not facts_of(candidate, model)["drifted"]
    candidate.blocks[1].norm1.eps = 0.1
    facts = facts_of(candidate, model)
    assert facts["first_site"] == "layer.2" and facts["module"] in (
        "blocks.1",
        "blocks.1.norm1",
    )


def test_rows_that_are_alike_teach_nothing() -> None:
    def zero_rows(module: Any) -> None:
        for number in (0, 2):
            module.model.layers[number].self_attn.q_proj.weight[[3, 7]] = 0

    model = changed_llama(zero_rows)
    candidate = port_of(model)
    candidate.blocks[1].attention.mistake = "interleaved"
    assert facts_of(candidate, model)["module"] == "blocks.1.attention"


def test_norms_that_are_alike_teach_nothing() -> None:
    def train_one_norm(module: Any) -> None:
        for number in (0, 2):
            module.model.layers[number].input_layernorm.weight.fill_(1)
            module.model.layers[number].post_attention_layernorm.weight.fill_(1)
        module.model.layers[1].post_attention_layernorm.weight.copy_(
            torch.linspace(0.5, 1.5, 64)
        )

    class Scaled(PLAIN.Block):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = 1.1 * super().forward(x)
            return out

    model = changed_llama(train_one_norm)
    candidate = port_of(model)
    candidate.blocks[1].__class__ = Scaled
    assert facts_of(candidate, model)["module"] == "blocks.1"


def test_a_block_that_is_like_another_one_is_not_called_swapped() -> None:
    model = changed_llama(
        lambda module: module.model.layers[1].load_state_dict(
            module.model.layers[0].state_dict()
        )
    )
    candidate = port_of(model)
    candidate.blocks[1].norm1.eps = 0.1
    facts = facts_of(candidate, model)
    assert facts["module"] == "blocks.1.norm1"
    assert "swapped_layer" not in [hint["fault"] for hint in facts["hints"]]


def test_a_block_that_makes_several_layers_is_judged_by_the_call_of_each() -> None:
    """The port calls one block three times, as a model with shared layers does, and the
    second time wrongly.
    """

    def share(module: Any) -> None:
        for number in (1, 2):
            module.model.layers[number].load_state_dict(
                module.model.layers[0].state_dict()
            )

    class Sharing(PLAIN.PlainLlama):  # type: ignore[misc]
        factor = 1.0

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for number in range(3):
                x = self.block(x, self.factor if number == 1 else 1.0)
            out: Tensor = self.head(self.norm(x))
            return out

    class Block(PLAIN.Block):  # type: ignore[misc]
        def forward(self, x: Tensor, factor: float) -> Tensor:
            out: Tensor = factor * super().forward(x)
            return out

    model = changed_llama(share)
    candidate = port_of(model)
    candidate.block = candidate.blocks[0]
    del candidate.blocks
    candidate.__class__, candidate.block.__class__ = Sharing, Block
    names = {
        "layer.1": "output of block",
        "layer.2": "output of block (call 2)",
        "layer.3": "output of block (call 3)",
    }
    assert not facts_of(candidate, model, pairing=names)["drifted"]
    candidate.factor = 1.1
    facts = facts_of(candidate, model, pairing=names)
    assert facts["first_site"] == "layer.2"
    assert "block_input" not in [hint["fault"] for hint in facts["hints"]], facts[
        "hints"
    ]
