"""No tiny configuration leaves a switch at a value that hides it."""

import gzip
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import hiddenscope as hs
from hiddenscope.discovery import find
from hiddenscope.errors import SiteError
from hiddenscope.testing import build, families, tiny_model
from tests.configurations import configured
from tests.places import TESTS

sys.path.insert(0, str(TESTS / "conformance"))

import switches

TEXTS = [[7, 99, 23, 64, 31, 8, 45], [12, 40, 66, 101, 90]]
NAMES = re.compile(
    "multiplier|soft_?cap|clip_qkv|logit_scale|logits_scaling|(alpha|beta)_factor"
    "|scale_emb|route_scale|scaling_factor"
)
# The models do without these, or do not read them.
LEFT = {
    "mtp_loss_scaling_factor": "in training alone",
    "block_ffn_dim_multiplier": "of a width; 1 in LFM2",
    "final_logit_softcapping gemma3": "not read: its text model has it",
    "attn_logit_softcapping gemma3": "not read",
    "attn_logit_softcapping gemma3_text": "not read",
    "attn_logit_softcapping t5gemma2": "not read",
    "logit_scale mpt": "not read",
    "logits_scaling granite_speech": "not read",
    "logits_scaling granite_speech_plus": "not read",
    "rescale_embeddings big_bird": "false in BigBird",
    "scale_embedding whisper": "not read; false in Whisper",
    "scale_embedding blenderbot-small": "a norm undoes it",
}


@cache
def rows() -> list[dict[str, Any]]:
    with gzip.open(TESTS / "conformance" / "tiny_configs.json.gz") as file:
        return list(json.load(file))


def hidden(model_type: str, config: dict[str, Any]) -> Iterator[str]:
    """Yield the multipliers, caps and scales that do nothing."""
    for place in switches.places(config):
        for name, value in {**place, **place.get("attn_config", {})}.items():
            if not NAMES.search(name) or value not in (0, 1, None) or value is True:
                continue
            if name not in LEFT and f"{name} {model_type}" not in LEFT:
                yield f"{model_type}: {name} is {value}"


def test_a_configuration_that_is_built_is_left_as_it_is() -> None:
    """Moshi takes the type of its audio encoder out of what it is given."""
    row = next(row for row in rows() if row["model_class"] == "MoshiForCausalLM")
    before = json.dumps(row)
    build(row)
    assert json.dumps(row) == before


def test_configurations_have_their_switches_at_values_that_show() -> None:
    known = switches.switches()
    assert set(known) <= {row["model_type"] for row in rows()}
    assert len(known) >= 140
    seen = set()
    for row in rows():
        for name, switch in known.get(row["model_type"], {}).items():
            for field, tiny in switch["tiny"].items():
                values = switches.values(row["config"], field)
                assert all(value == tiny for value in values), (row, name)
                if values:
                    seen.add((row["model_type"], name))
            assert switch["hidden"] != switch["tiny"]
            assert switch["why"] in ("published", "size", "code")
    assert len(seen) == sum(map(len, known.values()))


def test_no_multiplier_cap_or_scale_is_hidden() -> None:
    found = []
    for row in rows():
        found += hidden(row["model_type"], row["config"])
    table = TESTS.parent / "src" / "hiddenscope" / "testing" / "models.json"
    for family, row in json.loads(table.read_text("utf-8")).items():
        found += hidden(family, row["config"])
    assert sorted(set(found)) == []


def test_a_hidden_multiplier_is_seen() -> None:
    assert list(hidden("granite", {"residual_multiplier": 1.0}))
    assert list(hidden("mpt", {"attn_config": {"clip_qkv": None}}))
    assert not list(hidden("granite", {"residual_multiplier": 0.22}))


@pytest.mark.parametrize(
    ("family", "hides"),
    [
        ("bart", {"scale_embedding": False}),
        ("cohere", {"logit_scale": 1.0}),
        ("cohere2", {"logit_scale": 1.0}),
        ("cohere2", {"sliding_window": 16}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 24}),
        ("gemma2", {"sliding_window": 16}),
        ("gemma3_text", {"final_logit_softcapping": None}),
        ("gemma3_text", {"query_pre_attn_scalar": 16}),
        ("gemma3_text", {"sliding_window": 16}),
        ("granite", {"attention_multiplier": 1.0}),
        ("granite", {"embedding_multiplier": 1.0}),
        ("granite", {"logits_scaling": 1.0}),
        ("granite", {"residual_multiplier": 1.0}),
        ("minicpm3", {"scale_depth": 3**0.5}),
        ("minicpm3", {"scale_emb": 1}),
        ("mpt", {"attn_config": {"clip_qkv": None}}),
        ("stablelm", {"use_parallel_residual": False}),
        ("t5", {"relative_attention_max_distance": 128}),
        ("xglm", {"scale_embedding": False}),
    ],
)
def test_a_switch_of_a_tiny_family_shows(family: str, hides: dict[str, Any]) -> None:
    table = TESTS.parent / "src" / "hiddenscope" / "testing" / "models.json"
    row = json.loads(table.read_text("utf-8"))[family]
    row["model_class"] = next(iter(row["classes"].values()))
    whole = build(row)
    ids = torch.tensor([TEXTS[0]])
    inputs = {"input_ids": ids}
    if whole.config.is_encoder_decoder:  # type: ignore[union-attr]
        inputs["decoder_input_ids"] = ids
    other = build({**row, "config": row["config"] | hides})
    with torch.no_grad():
        logits, without = whole(**inputs).logits, other(**inputs).logits
    assert (logits - without).abs().max() > 1e-3 * logits.abs().max()


@pytest.mark.parametrize("family", sorted(families()))
def test_tiny_families_are_small(family: str) -> None:
    assert sum(weight.numel() for weight in tiny_model(family).parameters()) < 5e6


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", ["RwkvForCausalLM", "DebertaV2ForMaskedLM"])
def test_blocks_with_something_between_them_are_proved(name: str) -> None:
    """RWKV halves its state after some blocks, DeBERTa v2 convolves it after one."""
    module = configured(name)
    model = hs.load((module, None))
    (stack,) = model.anatomy.stacks
    sides = [tap.side for tap in stack.proof.taps]
    assert sides.count("input") == 1
    ids = torch.tensor([TEXTS[0]])
    with torch.no_grad():
        output = module(ids, output_hidden_states=True)
    states = hs.record(model, [TEXTS[0]], "*").states
    assert isinstance(states, hs.States)
    pairs = list(zip(stack.proof.entries, output.hidden_states, strict=True))
    assert {layer for layer, _ in pairs} >= set(range(1, stack.depth))
    for layer, entry in pairs:
        site = "final" if layer > stack.depth else f"layer.{layer}"
        torch.testing.assert_close(states[site], entry[0], rtol=0, atol=0)
    for layer in range(stack.depth + 1):
        site = f"layer.{layer}"
        # The state of another text decides all that follows.
        given = hs.record(model, [TEXTS[1]], "*", logits=True)
        assert isinstance(given.states, hs.States)
        assert given.logits is not None
        change = {site: hs.Replace(given.states[site])}
        edited = hs.edit(model, [TEXTS[0][:5]], change, "*", logits=True)
        assert isinstance(edited.states, hs.States)
        assert edited.logits is not None
        torch.testing.assert_close(edited.logits, given.logits)
        for later in range(layer, stack.depth + 1):
            after = f"layer.{later}"
            torch.testing.assert_close(edited.states[after], given.states[after])
        resumed = hs.resume(
            model, [TEXTS[0][:5]], site, given.states[site], logits=True
        )
        assert resumed.logits is not None
        torch.testing.assert_close(resumed.logits, given.logits)
    changed = sides.index("input")
    with pytest.raises(SiteError, match="before the next block takes it in"):
        hs.record(model, [TEXTS[0]], f"layer.{changed}.attn")


def test_a_stream_beside_the_blocks_is_still_refused() -> None:
    with pytest.raises(hs.errors.AnatomyError, match="two streams"):
        find(configured("ReformerModel"))
