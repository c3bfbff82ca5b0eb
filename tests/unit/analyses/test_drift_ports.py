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
from hiddenscope.analyses.drift.live_model import with_digits
from hiddenscope.errors import (
    Error,
    ModuleError,
    NotFinite,
    PassError,
    StatesError,
    UnknownModel,
)
from hiddenscope.modules.operations import slowdown
from hiddenscope.testing import build, tiny_model
from tests.unit.analyses.planted import plain_llama

TEXTS = [[5, 6, 7, 9, 30, 41, 17], [33, 12, 8, 100, 101, 99, 7, 5, 4, 11]]
CONFIG = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}


PLAIN: Any = plain_llama()


@cache
def llama() -> hs.Model:
    """Load a tiny Llama with two key and value heads for four query heads."""
    row = {"model_class": "LlamaForCausalLM", "config_class": "LlamaConfig"}
    return hs.load((build({**row, "config": CONFIG}), None))


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """Load what the first test would pay for."""
    facts_of(port())


def port(mistake: str = "", model: hs.Model | None = None) -> Any:
    return PLAIN.PlainLlama((model or llama()).module, mistake, block=1).eval()


def facts_of(candidate: Any, model: hs.Model | None = None, **options: Any) -> Any:
    return hs.drift(model or llama(), candidate, TEXTS, **options).facts


def blamed(facts: Any) -> tuple[str, str]:
    return facts["first_site"], facts["module"]


def hints_of(facts: Any) -> list[str]:
    return [hint["fault"] for hint in facts["hints"]]


def give(part: Any, forward: Callable[..., Any]) -> Any:
    """Give a module another forward, as an edited source file would."""
    kind = type(part)
    part.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    return part


def running(*order: int, factor: float = 1.0) -> Any:
    """Return the port with another loop over its blocks."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in order:
            x = factor * self.blocks[number](x)
        out: Tensor = self.head(self.norm(x))
        return out

    return give(port(), forward)


def test_the_code_that_calls_the_blocks_is_at_fault() -> None:
    for candidate, site, module, fault in (
        (running(0, 2), "layer.2", "", "layer_skipped"),
        (running(0, 1, 1, 2), "layer.2", "", "layer_doubled"),
        (running(1, 0, 2), "layer.1", "blocks.1", "swapped_layer"),
        (running(0, 1, 2, factor=1.001), "layer.2", "", "block_input"),
    ):
        facts = facts_of(candidate)
        assert blamed(facts) == (site, module)
        assert fault in hints_of(facts), facts["hints"]


def test_an_exchanged_block_is_told_by_its_matrices_alone() -> None:
    candidate = running(1, 0, 2)
    with torch.no_grad():
        for block in candidate.blocks:
            block.norm1.gain.mul_(1.5)
    assert "swapped_layer" in hints_of(facts_of(candidate))


def mlp(block: Any, x: Tensor, act: Any = functional.silu) -> Tensor:
    out: Tensor = block.down(act(block.gate(x)) * block.up(x))
    return out


def parallel(block: Any, x: Tensor) -> Tensor:
    out: Tensor = x + block.attention(block.norm1(x)) + mlp(block, block.norm2(x))
    return out


def other_activation(block: Any, x: Tensor) -> Tensor:
    x = x + block.attention(block.norm1(x))
    return x + mlp(block, block.norm2(x), functional.gelu)


@pytest.mark.parametrize(
    ("forward", "fault"),
    [
        (parallel, None),
        (other_activation, "activation"),
        (lambda block, x: x, "layer_skipped"),
    ],
)
def test_the_code_of_a_block_is_at_fault_and_not_a_part_that_it_feeds_wrongly(
    forward: Any, fault: str | None
) -> None:
    candidate = port()
    give(candidate.blocks[1], forward)
    facts = facts_of(candidate)
    assert blamed(facts) == ("layer.2", "blocks.1") and facts["own_code"]
    assert fault is None or fault in hints_of(facts), facts["hints"]


MISTAKES = {
    "": (None, None, []),
    "interleaved": ("layer.2", "blocks.1.attention", ["rope_pairs"]),
    "repeat": ("layer.2", "blocks.1.attention", ["kv_heads"]),
    "eps": ("layer.2", "blocks.1.norm1", ["norm_root_eps"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistakes_of_a_plain_port_are_found_and_named(mistake: str) -> None:
    """Attention that cannot be called as the reference's is known by what it gave."""
    facts = facts_of(port(mistake))
    assert (*blamed(facts), hints_of(facts)) == MISTAKES[mistake]
    assert facts["pairing"]["by"] == "blocks" and facts["compared"] == "parts"
    assert facts["pairing"]["pairs"][2] == {
        "site": "layer.2",
        "reference": "output of model.layers.1",
        "candidate": "output of blocks.1",
    }


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_mistakes_of_a_plain_port_of_a_real_model_are_found(
    mistake: str, smollm2: hs.Model
) -> None:
    texts = ["The capital of France is Paris.", "In 1969, people landed on the moon."]
    facts = hs.drift(smollm2, port(mistake, smollm2), texts).facts
    assert blamed(facts) == MISTAKES[mistake][:2]


def with_tables(base: float, *wrong: int) -> Any:
    """Return the port whose blocks are given the base of their rotation from outside,
    which is wrong for some of them.
    """

    def attend(self: Any, x: Tensor, base: Tensor) -> Tensor:
        self.base = float(base)
        out: Tensor = PLAIN.Attention.forward(self, x)
        return out

    def run_block(self: Any, x: Tensor, base: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), base)
        return x + mlp(self, self.norm2(x))

    def run(self: Any, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            x = block(x, torch.tensor(base if number in wrong else 10000.0))
        out: Tensor = self.head(self.norm(x))
        return out

    candidate = give(port(), run)
    for block in candidate.blocks:
        give(block, run_block)
        give(block.attention, attend)
    return candidate


def test_what_a_part_is_given_and_nobody_compared_is_said() -> None:
    facts = facts_of(with_tables(500.0, 0, 1, 2))
    assert blamed(facts) == ("layer.1", "blocks.0.attention") and not facts["own_code"]
    assert facts["hints"][-1]["fault"] == "not_compared"
    facts = facts_of(with_tables(500.0, 1))
    assert facts["first_site"] == "layer.2" and hints_of(facts) == ["not_compared"]


def states_of(module: Any, ids: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [*module(ids, output_hidden_states=True, use_cache=False).hidden_states]


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


def in_one_buffer(states: list[Tensor]) -> Any:
    buffer = torch.empty_like(states[0])
    for state in states:
        yield buffer.copy_(state)


FORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "generator of one buffer": in_one_buffer,
    "arrays": lambda states: [state.numpy() for state in states],
    "last first": lambda states: states[::-1],
    "token first": lambda states: [state.transpose(0, 1) for state in states],
    "layer": torch.cat,
    "token, layer": lambda states: torch.cat(states).transpose(0, 1),
    "layer, text": torch.stack,
    "text, layer": lambda states: torch.cat(states)[None].numpy(),
    "text, token, layer": lambda states: torch.cat(states).transpose(0, 1)[None],
    "among others": lambda states: {
        "hidden_states": torch.cat(states)[None],
        "ids": torch.zeros(3, dtype=torch.long),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_a_function_may_return_its_states_in_any_form(form: str) -> None:
    """Also if a text has as many tokens as there are sites, five."""

    def returned(ids: Tensor) -> Any:
        return FORMS[form](every_state(llama().module, ids))

    facts = hs.drift(llama(), returned, [TEXTS[0][:5], TEXTS[1][:3]]).facts
    # Entries of `hidden_states` have no place for the last layer beside the final norm.
    sites = 4 if form == "among others" else 5
    assert not facts["drifted"] and facts["sites"] == sites


def numbered(states: list[Tensor], start: int = 0) -> dict[str, Tensor]:
    return {f"layer.{number}": state for number, state in enumerate(states, start)}


# What a function returns of all states, by what it is paired, and the first site that
# has a tensor.
OFF_BY_ONE: dict[str, tuple[Callable[[list[Tensor]], Any], str, str]] = {
    "from zero": (lambda states: numbered(states[1:-1]), "name, off by one", "layer.1"),
    "embeddings as layer.1": (
        lambda states: numbered(states[:-1], 1),
        "name, off by one",
        "layer.0",
    ),
    "without embeddings": (
        lambda states: {"hidden_states": states[1:]},
        "name, off by one",
        "layer.1",
    ),
    "normed": (
        lambda states: {"hidden_states": [*states[1:-2], states[-1]]},
        "name, off by one",
        "layer.1",
    ),
    "a list": (lambda states: states[1:], "order, off by one", "layer.1"),
    "right": (lambda states: numbered(states[:-1]), "name", "layer.0"),
}


@pytest.mark.parametrize("form", OFF_BY_ONE)
def test_numbers_that_are_off_by_one_are_no_drift(form: str) -> None:
    change, by, first = OFF_BY_ONE[form]
    broken, massive = (copy.deepcopy(llama().module) for _ in range(2))
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(1.1)
    # One channel of a real model may be a thousand times larger than the others, and
    # the same in all layers.
    massive.model.embed_tokens.weight.data[:, 5] = 3000.0

    def pairing_of(facts: Any) -> tuple[str, str]:
        return facts["pairing"]["by"], facts["pairing"]["pairs"][0]["site"]

    def rounded(ids: Tensor) -> Any:
        states = every_state(massive, ids)
        return change([state.bfloat16().float() for state in states])

    facts = facts_of(lambda ids: change(every_state(llama().module, ids)))
    assert not facts["drifted"] and pairing_of(facts) == (by, first)
    assert any("off by one" in note for note in facts["notes"]) == (by != "name")
    facts = facts_of(lambda ids: change(every_state(broken, ids)))
    assert facts["first_site"] == "layer.2" and pairing_of(facts) == (by, first)
    if form in ("from zero", "a list"):
        facts = facts_of(rounded, hs.load((massive, None)))
        assert pairing_of(facts) == (by, first)


def skips_first(module: Any) -> None:
    """Leave the first block out, and run the last twice: there are as many."""
    blocks = module.model.layers
    blocks[0], blocks[1] = blocks[1], blocks[2]


def repeats(module: Any) -> None:
    blocks = module.model.layers
    blocks[1], blocks[2] = blocks[0], blocks[0]


def scales_embeddings(module: Any) -> None:
    module.model.embed_tokens.weight.data.mul_(3.0)


def breaks_embeddings(module: Any) -> None:
    weight = module.model.embed_tokens.weight
    weight.data = weight.data.roll(1, 0)


@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (skips_first, "layer.1"),
        (repeats, "layer.2"),
        (scales_embeddings, "layer.0"),
        (breaks_embeddings, "layer.0"),
    ],
)
def test_a_fault_is_not_paired_away(plant: Callable[[Any], None], first: str) -> None:
    broken = copy.deepcopy(llama().module)
    plant(broken)
    forms: list[tuple[str, Callable[[list[Tensor]], Any]]] = [
        ("layer.0", lambda states: numbered(states[:-1])),
        ("layer.1", lambda states: numbered(states[1:-1], 1)),
        ("layer.0", lambda states: {"hidden_states": [*states[:-2], states[-1]]}),
    ]
    for start, form in forms:
        facts = facts_of(lambda ids, form=form: form(every_state(broken, ids)))
        assert facts["drifted"] and facts["pairing"]["by"] == "name"
        assert facts["first_site"] == max(first, start)


def failing_late(ids: Tensor) -> Any:
    yield torch.zeros(1, ids.shape[1], 64)
    raise KeyError("gate")


def endless(ids: Tensor) -> Any:
    while True:
        yield torch.zeros(1, ids.shape[1], 64)


def nested(ids: Tensor) -> Any:
    states: list[Any] = []
    states.append(states)
    return states


def of_nans(ids: Tensor) -> Any:
    return [torch.full((1, ids.shape[1], 64), torch.nan)] * 5


def on_meta(ids: Tensor) -> Any:
    return torch.zeros(1, ids.shape[1], 64, device="meta")


def needing_more(self: Any, ids: Tensor, positions: Tensor) -> Any:
    return PLAIN.PlainLlama.forward(self, ids)


def test_an_odd_candidate_is_refused_with_a_reason() -> None:
    narrow = port()
    narrow.blocks[1].norm2.gain = nn.Parameter(torch.ones(63))
    needing, shallow = give(port(), needing_more), port()
    del shallow.blocks[2]
    cases: list[tuple[Any, type[Exception], str]] = [
        (failing_late, PassError, "it raised KeyError: 'gate'"),
        (lambda: None, PassError, "it raised TypeError"),
        (lambda ids: ["a", "b"], StatesError, "gave no floating-point tensor"),
        (
            lambda ids: torch.zeros(1, 1).expand(10**7, 10**7),
            StatesError,
            "gave no floating-point tensor",
        ),
        (
            lambda ids: torch.ones(1, ids.shape[1], 8),
            StatesError,
            r"the reference's states are \[17, 64\]",
        ),
        (shallow, StatesError, "the reference has 3 blocks, and blocks has 2"),
        (of_nans, NotFinite, "has a NaN at layer.0"),
        (endless, PassError, "more than 2,000 things"),
        (nested, PassError, "RecursionError"),
        (on_meta, PassError, "meta device"),
        (nn.Linear, ModuleError, "Cannot compare the candidate"),
        ("/no/such/path", UnknownModel, "no such folder or file"),
        (
            narrow,
            PassError,
            "Cannot run the candidate: it raised RuntimeError: The size of tensor",
        ),
        (needing, PassError, "it needs 'positions' as well as token ids"),
    ]
    for candidate, error, message in cases:
        with pytest.raises(error, match=message):
            facts_of(candidate)


def test_an_odd_argument_is_refused_in_our_own_words() -> None:
    odd: dict[str, list[Any]] = {
        "baseline": [0, True, b"x", "", "/dev/zero", ".", "a\0b"],
        "pairing": [3, {}, {"layer.1": 5}],
        "sites": [5, None],
    }
    for name, values in odd.items():
        for value in values:
            arguments: dict[str, Any] = {"texts": TEXTS, name: value}
            with pytest.raises(Error):
                hs.drift(llama(), port(), **arguments)


def test_a_foreign_program_is_paired_by_table_by_name_and_by_correlation() -> None:
    model, candidate = llama(), port()
    table = {"layer.1": "blocks.0", "layer.2": "blocks.1", "final": "norm"}
    facts = facts_of(candidate, pairing=table)
    assert not facts["drifted"] and facts["pairing"]["by"] == "table"
    for wrong, words in (
        ({"layer.1": "blocks.9"}, "No tensor 'blocks.9'"),
        ({"layer.9": "blocks.0"}, "No site 'layer.9'"),
        ({"layer.1": "head"}, "Cannot pair 'head' with layer.1"),
    ):
        with pytest.raises(StatesError, match=words):
            facts_of(candidate, pairing=wrong)
    other: Any = copy.deepcopy(model.module)

    def turned(ids: Tensor) -> Any:
        return dict(zip("abcd", states_of(other, ids)[::-1], strict=True))

    facts = facts_of(turned)
    assert not facts["drifted"] and facts["pairing"]["by"] == "correlation"
    pairs = {pair["site"]: pair["candidate"] for pair in facts["pairing"]["pairs"]}
    assert pairs["layer.1"] == "c"
    assert facts["notes"] == [
        "No tensor of the candidate was paired with `layer.3`: not compared."
    ]
    other.model.layers[1].mlp.up_proj.weight.data.mul_(1.1)
    facts = facts_of(lambda ids: numbered(states_of(other, ids)[:3]))
    assert blamed(facts) == ("layer.2", None)
    assert (facts["pairing"]["by"], facts["compared"]) == ("name", "passes")


def test_states_beyond_recognition_are_not_left_out() -> None:
    """They correlate with nothing of the reference, and are paired by order; or it is
    an error.
    """
    broken: Any = copy.deepcopy(llama().module)
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(-30)
    facts = facts_of(lambda ids: states_of(broken, ids))
    assert (facts["first_site"], facts["sites"]) == ("layer.2", 4)
    assert facts["pairing"]["by"] == "order"
    words = "Cannot pair .* not every one of its 3 tensors .* a fault changed some"
    with pytest.raises(StatesError, match=words):
        facts_of(lambda ids: states_of(broken, ids)[:3])
    named = facts_of(lambda ids: {"layer.2": states_of(broken, ids)[2]})
    assert (named["first_site"], named["sites"]) == ("layer.2", 1)


def test_order_is_what_it_says() -> None:
    """Names and correlation do not matter then, and a number of tensors that does not
    fit is an error.
    """
    module = llama().module

    def misnamed(ids: Tensor) -> dict[str, Tensor]:
        names = ("layer.1", "layer.0", "h0", "h1")
        return dict(zip(names, states_of(module, ids), strict=True))

    facts = facts_of(misnamed, pairing="order")
    assert not facts["drifted"] and facts["sites"] == 4
    assert facts["pairing"]["by"] == "order"
    backwards = facts_of(lambda ids: states_of(module, ids)[::-1], pairing="order")
    assert backwards["drifted"] and backwards["pairing"]["by"] == "order"
    words = "it has 3 tensors of the shape of a state, and the reference 5 sites"
    with pytest.raises(StatesError, match=words):
        facts_of(lambda ids: states_of(module, ids)[:3], pairing="order")


def test_a_function_that_ran_in_bfloat16_or_was_saved_in_it_is_no_drift() -> None:
    # torch warns once in a process that this CPU has no product in bfloat16; the trial
    # of its speed hears it.
    slowdown(torch.bfloat16)
    narrow = copy.deepcopy(llama().module).bfloat16()
    facts = facts_of(lambda ids: [state.float() for state in states_of(narrow, ids)])
    assert not facts["drifted"] and "dtype" in facts["noise"]["made_of"]
    # A checkpoint has no rotary tables: these keep their digits.
    saved = with_digits(llama().module, torch.bfloat16)
    facts = facts_of(lambda ids: states_of(saved, ids))
    assert not facts["drifted"], facts["first_site"]
    assert [note for note in facts["notes"] if "saved in bfloat16" in note]


def reporting(self: Any, ids: Tensor) -> Any:
    """Give a dict, with the last layer before the norm in `hidden_states`."""
    states = [self.embed(ids)]
    for block in self.blocks:
        states.append(block(states[-1]))
    return {"hidden_states": states, "logits": self.head(self.norm(states[-1]))}


def test_the_last_entry_of_hidden_states_may_be_the_last_layer() -> None:
    candidate = give(port(), reporting)
    facts = facts_of(candidate)
    assert not facts["drifted"] and facts["compared"] == "parts" and facts["sites"] == 6
    called = facts_of(lambda ids: candidate(ids))
    assert not called["drifted"] and called["pairing"]["by"] == "name"
    sites = [pair["site"] for pair in called["pairing"]["pairs"]]
    assert sites == ["layer.0", "layer.1", "layer.2", "layer.3", "logits"]


def test_blocks_need_not_be_in_a_list() -> None:
    class Attributes(nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.embed, self.norm, self.head = inner.embed, inner.norm, inner.head
            self.b0, self.b1, self.b2 = inner.blocks

        def forward(self, ids: Tensor) -> Any:
            return self.head(self.norm(self.b2(self.b1(self.b0(self.embed(ids))))))

    candidate = Attributes(port()).eval()
    candidate.b1.down.weight.data.mul_(-30)
    facts = facts_of(candidate)
    assert blamed(facts) == ("layer.2", "b1.down")
    assert facts["pairing"]["by"] == "blocks"


def headless(self: Any, ids: Tensor) -> Tensor:
    x = self.embed(ids)
    for block in self.blocks:
        x = block(x)
    out: Tensor = self.norm(x)
    return out


def test_a_port_without_a_head_is_compared_up_to_its_last_layer() -> None:
    facts = facts_of(give(port("eps"), headless))
    assert blamed(facts) == ("layer.2", "blocks.1.norm1")
    assert facts["consequences"] is None
    assert facts["notes"] == [
        "The candidate gives no logits of the reference's shape: they were not"
        " compared."
    ]
    # A wrong final norm is not taken for one that is folded into the head.
    candidate = give(port(), headless)
    candidate.norm.gain.data.mul_(torch.linspace(0.5, 2, 64))
    assert facts_of(candidate)["first_site"] == "final"


def test_a_head_is_blamed_beside_a_norm_that_differs_in_the_last_place() -> None:
    candidate = port()
    candidate.norm.gain.data[0] *= 1 + 2e-7
    candidate.head.weight.data[3] *= 1.3
    assert blamed(facts_of(candidate)) == ("logits", "head")


def test_a_fault_before_or_after_the_blocks_of_a_port_is_found() -> None:
    for path, site in (("embed", "layer.0"), ("norm", "final"), ("head", "logits")):
        candidate = port()
        next(candidate.get_submodule(path).parameters()).data.mul_(1.05)
        facts = facts_of(candidate)
        assert blamed(facts) == (site, path) and hints_of(facts) == ["scale"]


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
    assert blamed(facts) == ("final", "model.norm")


class _PlainT5(nn.Module):
    """T5's encoder and decoder under other names, around the reference's own parts."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        inner = copy.deepcopy(module)
        self.shared, self.out = inner.shared, inner.lm_head
        self.enc, self.dec = inner.encoder, inner.decoder
        is_tied = inner.config.tie_word_embeddings
        self.scale = inner.config.d_model**-0.5 if is_tied else 1.0

    def forward(self, ids: Tensor, target_ids: Tensor) -> Tensor:
        memory = self.enc(inputs_embeds=self.shared(ids)).last_hidden_state
        made = self.dec(
            inputs_embeds=self.shared(target_ids),
            encoder_hidden_states=memory,
            use_cache=False,
        )
        out: Tensor = self.out(made.last_hidden_state * self.scale)
        return out


@pytest.mark.slow
def test_a_port_with_an_encoder_and_a_decoder() -> None:
    module: Any = tiny_model("t5")
    module.config.decoder_start_token_id = 0
    candidate: Any = _PlainT5(module).eval()
    path = "dec.block.1.layer.1.EncDecAttention.k"
    candidate.get_submodule(path).weight.data.mul_(1.1)
    facts = hs.drift((module, None), candidate, TEXTS[1:2]).facts
    assert blamed(facts) == ("decoder.layer.2", path)
    assert facts["pairing"]["by"] == "blocks" and facts["sites"] == 11


class _PackedBert(nn.Module):
    """BERT as torch's own encoder."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.embeddings = copy.deepcopy(module.embeddings)
        config = module.config
        layers = []
        for block in copy.deepcopy(module.encoder.layer):
            layer = nn.TransformerEncoderLayer(
                config.hidden_size,
                config.num_attention_heads,
                config.intermediate_size,
                activation="gelu",
                layer_norm_eps=config.layer_norm_eps,
                batch_first=True,
            )
            own, heads = block.attention.self, layer.self_attn
            parts = own.query, own.key, own.value
            heads.in_proj_weight.data = torch.cat([part.weight for part in parts]).data
            heads.in_proj_bias.data = torch.cat([part.bias for part in parts]).data
            heads.out_proj.load_state_dict(block.attention.output.dense.state_dict())
            layer.norm1 = block.attention.output.LayerNorm
            layer.linear1, layer.linear2 = block.intermediate.dense, block.output.dense
            layer.norm2 = block.output.LayerNorm
            layers.append(layer)
        self.layers = nn.ModuleList(layers)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embeddings(ids)
        for layer in self.layers:
            states = layer(states)
        out: Tensor = states
        return out


def test_norms_before_the_parts_of_a_packed_block_are_its_own_code() -> None:
    row = {"model_class": "BertModel", "config_class": "BertConfig"}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = {"vocab_size": 128, "num_hidden_layers": 3, **sizes}
    model = hs.load((build({**row, "config": config}), None))
    candidate = _PackedBert(model.module).eval()
    assert not facts_of(candidate, model)["drifted"]
    candidate.layers[1].norm_first = True  # type: ignore[assignment]
    facts = facts_of(candidate, model)
    assert blamed(facts) == ("layer.2", "layers.1") and facts["own_code"]


def test_two_stacks_of_one_class_are_not_taken_for_two_blocks() -> None:
    row = {"model_class": "T5ForConditionalGeneration", "config_class": "T5Config"}
    config = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2}
    module: Any = build({**row, "config": {**config, "decoder_start_token_id": 0}})
    candidate = _PlainT5(module).eval()
    facts = hs.drift((module, None), candidate, TEXTS[1:2]).facts
    assert not facts["drifted"]
    pairs = {pair["site"]: pair["candidate"] for pair in facts["pairing"]["pairs"]}
    assert pairs["encoder.layer.1"] == "output of enc.block.0"
    assert pairs["decoder.layer.2"] == "output of dec.block.1"


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
    own.weight.data = theirs.weight.data.T.contiguous()
    own.bias.data = torch.zeros_like(theirs.bias.data)
    candidate.transformer.h[1].attn.c_proj = own.eval()
    facts = facts_of(candidate, model)
    assert facts["module"] == "transformer.h.1.attn.c_proj"
    assert hints_of(facts) == ["missing_bias"]


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
    assert "do not rely" not in result.summary()
    restored = [{"sites": ["layer.2"], "share": -0.25}]
    facts = {
        **result.facts,
        "self_check": {"observing_changed_nothing": False},
        "consequences": {**result.facts["consequences"], "restored": restored},
    }
    words = hs.Result("drift", result.data, facts, result.source).summary()
    assert "do not rely on this comparison" in words
    assert "adds 25.0% to the KL divergence" in words
    assert "the query heads read heads 0, 1, 0, 1." in words


def changed_llama(change: Callable[[Any], None]) -> hs.Model:
    """Load the reference with other weights."""
    module: Any = copy.deepcopy(llama().module)
    with torch.no_grad():
        change(module.model.layers)
    return hs.load((module, None))


def test_blocks_of_other_widths_teach_nothing() -> None:
    def narrow(gated: Any, *names: str) -> None:
        for name in names:
            weight = getattr(gated, name).weight.data
            weight = weight[:, :32] if name == names[2] else weight[:32]
            linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = weight.clone()
            setattr(gated, name, linear)

    model = changed_llama(
        lambda blocks: narrow(blocks[1].mlp, "gate_proj", "up_proj", "down_proj")
    )
    candidate = port()
    narrow(candidate.blocks[1], "gate", "up", "down")
    candidate.blocks[1].norm1.eps = 0.1
    facts = facts_of(candidate, model)
    assert facts["first_site"] == "layer.2"
    assert facts["module"] in ("blocks.1", "blocks.1.norm1")


def test_rows_and_norms_that_are_alike_teach_nothing() -> None:
    def zero_rows(blocks: Any) -> None:
        for number in (0, 2):
            blocks[number].self_attn.q_proj.weight[[3, 7]] = 0

    def train_one_norm(blocks: Any) -> None:
        for number in (0, 2):
            blocks[number].input_layernorm.weight.fill_(1)
            blocks[number].post_attention_layernorm.weight.fill_(1)
        trained = torch.linspace(0.5, 1.5, 64)
        blocks[1].post_attention_layernorm.weight.copy_(trained)

    model = changed_llama(zero_rows)
    candidate = port(model=model)
    candidate.blocks[1].attention.mistake = "interleaved"
    assert facts_of(candidate, model)["module"] == "blocks.1.attention"
    model = changed_llama(train_one_norm)
    candidate = port(model=model)
    give(candidate.blocks[1], lambda self, x: 1.1 * PLAIN.Block.forward(self, x))
    assert facts_of(candidate, model)["module"] == "blocks.1"


def share(blocks: Any) -> None:
    """Give all blocks the weights of the first."""
    for block in blocks[1:]:
        block.load_state_dict(blocks[0].state_dict())


def test_a_block_that_is_like_another_one_is_not_called_swapped() -> None:
    model = changed_llama(share)
    candidate = port(model=model)
    candidate.blocks[1].norm1.eps = 0.1
    facts = facts_of(candidate, model)
    assert facts["module"] == "blocks.1.norm1"
    assert "swapped_layer" not in hints_of(facts)


def test_a_block_that_makes_several_layers_is_judged_by_the_call_of_each() -> None:
    """The port calls one block three times, as a model with shared layers does, and the
    second time wrongly.
    """

    def run(self: Any, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for number in range(3):
            x = self.block(x, self.factor if number == 1 else 1.0)
        out: Tensor = self.head(self.norm(x))
        return out

    def run_block(self: Any, x: Tensor, factor: float) -> Tensor:
        out: Tensor = factor * PLAIN.Block.forward(self, x)
        return out

    model = changed_llama(share)
    candidate = give(port(model=model), run)
    candidate.block = give(candidate.blocks[0], run_block)
    del candidate.blocks
    names = {
        "layer.1": "output of block",
        "layer.2": "output of block (call 2)",
        "layer.3": "output of block (call 3)",
    }
    candidate.factor = 1.0
    assert not facts_of(candidate, model, pairing=names)["drifted"]
    candidate.factor = 1.1
    facts = facts_of(candidate, model, pairing=names)
    assert facts["first_site"] == "layer.2"
    assert "block_input" not in hints_of(facts), facts["hints"]


class Inline(nn.Module):
    """The port with blocks that are dictionaries of parts, run inline."""

    def __init__(self, inner: Any, *, is_named: bool = False) -> None:
        super().__init__()
        self.embed, self.norm, self.head = inner.embed, inner.norm, inner.head
        names = ("norm1", "attention", "norm2", "gate", "up", "down")
        blocks = [
            nn.ModuleDict({name: getattr(block, name) for name in names})
            for block in inner.blocks
        ]
        self.blocks: Any = nn.ModuleList(blocks)
        if is_named:
            self.blocks = nn.ModuleDict(zip("012", blocks, strict=True))

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for _, part in self.blocks.named_children():
            x = x + part["attention"](part["norm1"](x))
            y = part["norm2"](x)
            x = x + part["down"](functional.silu(part["gate"](y)) * part["up"](y))
        return self.head(self.norm(x))


@pytest.mark.parametrize("block", [0, 1, 2])
@pytest.mark.parametrize("mistake", ["", "repeat", "eps", "interleaved"])
@pytest.mark.parametrize("is_named", [False, True])
def test_blocks_that_are_run_inline_are_paired_by_what_enters_them(
    mistake: str, block: int, is_named: bool
) -> None:
    inner = PLAIN.PlainLlama(llama().module, mistake, block=block).eval()
    candidate = Inline(inner, is_named=is_named)
    facts = facts_of(candidate)
    assert facts["pairing"]["by"] == "blocks run inline" and facts["sites"] == 6
    first = f"layer.{block + 1}" if mistake else None
    assert facts["first_site"] == first
    said = [note for note in facts["notes"] if "run inline" in note]
    assert [f"`blocks.{block}`" in note for note in said] == [True] * bool(mistake)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_extra_tensor_in_place_of_final_is_not_paired_by_order(place: int) -> None:
    model = llama().module

    def with_extra(module: Any, ids: Tensor) -> list[Tensor]:
        *layers, _ = every_state(module, ids)
        normed = functional.layer_norm(layers[place - 1], (64,))
        return [*layers[:place], normed, *layers[place:]]

    facts = facts_of(lambda ids: with_extra(model, ids))
    assert not facts["drifted"] and facts["sites"] == 4, facts["first_site"]
    assert any("left out" in note for note in facts["notes"])
    broken = copy.deepcopy(model)
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(1.1)
    facts = facts_of(lambda ids: with_extra(broken, ids))
    assert facts["first_site"] == "layer.2"


def test_a_dtype_that_only_rounds_adds_nothing_at_any_layer() -> None:
    narrow = copy.deepcopy(llama().module).bfloat16()
    told = hs.drift(llama(), hs.load((narrow, None)), TEXTS).summary()
    assert "rounding is the whole of it" in told and "0.00%" not in told
    same = hs.drift(llama(), hs.load((copy.deepcopy(llama().module), None)), TEXTS)
    assert "the KL divergence is 0 at all of 17 positions" in same.summary()


@pytest.mark.parametrize("inside", ["self_attn.o_proj", "post_attention_layernorm"])
def test_a_last_tensor_from_inside_a_block_is_not_taken_for_final(inside: str) -> None:
    model = llama().module

    def with_inside(module: Any, ids: Tensor) -> list[Tensor]:
        kept: list[Tensor] = []
        part = module.get_submodule(f"model.layers.2.{inside}")
        hook = part.register_forward_hook(lambda *call: kept.append(call[2]))
        *layers, _ = every_state(module, ids)
        hook.remove()
        return [*layers, *kept]

    facts = facts_of(lambda ids: with_inside(model, ids))
    assert not facts["drifted"] and facts["sites"] == 4, facts["first_site"]
    assert any("left out" in note for note in facts["notes"])
    broken = copy.deepcopy(model)
    broken.model.layers[1].mlp.down_proj.weight.data.mul_(1.1)
    facts = facts_of(lambda ids: with_inside(broken, ids))
    assert facts["first_site"] == "layer.2"


@pytest.mark.parametrize("fault", ["scaled", "eps", "forgotten", "swapped", "negated"])
def test_a_faulty_final_of_a_function_is_reported(fault: str) -> None:
    broken = copy.deepcopy(llama().module)
    norm = broken.model.norm
    if fault == "scaled":
        norm.weight.data.mul_(1.5)
    elif fault == "eps":
        norm.variance_epsilon = 0.1
    elif fault == "swapped":
        norm.weight.data.copy_(norm.weight.data.roll(1) * 3)
    elif fault == "negated":
        norm.weight.data.neg_()

    def states(ids: Tensor) -> list[Tensor]:
        *layers, final = every_state(broken, ids)
        return [*layers, layers[-1] if fault == "forgotten" else final]

    facts = facts_of(states)
    assert facts["first_site"] == "final" and facts["sites"] == 5
