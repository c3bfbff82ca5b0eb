"""Probes inside a recording: equal to scoring the recorded states, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import Error, PassError
from hiddenscope.testing import tiny_model

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model(module: nn.Module) -> hs.Model:
    return hs.load((module, None))


@pytest.fixture(scope="module")
def probes() -> dict[str, hs.Probe]:
    rng = np.random.default_rng(0)
    states = rng.normal(size=(40, 64))
    two = hs.Probe(site="layer.1").fit(states, rng.integers(0, 2, 40))
    three = hs.Probe(site="final").fit(states, rng.integers(0, 3, 40))
    line = hs.Probe("regress", site="layer.1").fit(states, rng.normal(size=40))
    return {"two": two, "three": three, "line": line}


def generate(module: Any, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    return module.generate(ids, max_new_tokens=6, do_sample=False, **options)


def test_scores_equal_those_of_recorded_states(
    module: nn.Module, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(model, "layer.1,final", probes=probes) as rec:
        generate(module, IDS)
    assert len(rec.scored) == len(rec.passes) == 6
    for scored, states in zip(rec.scored, rec.passes, strict=True):
        assert scored.tokens.ids.tolist() == states.tokens.ids.tolist()
        for name, probe in probes.items():
            expected = probe.decision_function(states[probe.site])
            np.testing.assert_array_equal(scored[name], expected)
    # All rows at once are the same numbers too.
    joined = probes["two"].decision_function(rec.states["layer.1"])
    by_pass = np.concatenate([scored["two"] for scored in rec.scored])
    np.testing.assert_array_equal(joined, by_pass)


def test_each_generated_token_has_a_score_and_no_states_are_kept(
    module: nn.Module, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(model, probes=probes) as rec:
        written = generate(module, IDS)
    scores = rec.scores
    assert scores["two"].shape == (2 * 9,)
    assert scores["three"].shape == (2 * 9, 3)
    for text in range(2):
        part = scores.of(text)
        # Nothing is computed from the last token that is generated.
        assert part.tokens.ids.tolist() == written[text, :-1].tolist()
        assert part.tokens.positions.tolist() == list(range(9))
        captured = model.capture([written[text, :-1].tolist()], "layer.1")
        expected = probes["two"].decision_function(captured["layer.1"])
        np.testing.assert_allclose(part["two"], expected, rtol=1e-4, atol=1e-5)
    assert all(not recorded.states for recorded in rec.recorded)
    with pytest.raises(PassError, match="probes alone were asked for"):
        _ = rec.states


def test_padding_has_no_score(
    module: Any, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with hs.recording(model, probes=probes) as rec:
        written = generate(module, IDS, attention_mask=mask, pad_token_id=0)
    assert rec.scores.tokens.lengths.tolist() == [7, 9]
    assert rec.scores.of(0).tokens.ids.tolist() == written[0, 2:-1].tolist()


def test_beam_search_has_no_joined_scores(
    module: Any, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(model, probes=probes) as rec:
        generate(module, IDS, num_beams=3)
    assert len(rec.scored) == 6
    with pytest.raises(PassError, match=r"beam search.*rec\.scored") as raised:
        _ = rec.scores
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "options",
    [
        dict(num_return_sequences=3),
        dict(cache_implementation="static"),
        dict(use_cache=False),
    ],
)
def test_other_ways_of_generation_are_joined(
    options: dict[str, Any], module: Any, probes: dict[str, hs.Probe]
) -> None:
    torch.manual_seed(0)
    with hs.recording(module, probes=probes["two"]) as rec:
        written = module.generate(IDS, max_new_tokens=6, do_sample=True, **options)
    scores = rec.scores
    if options.get("use_cache") is False:
        assert scores.tokens.count == 12
        return
    for text in range(len(written)):
        assert scores.of(text).tokens.ids.tolist() == written[text, :-1].tolist()


def test_rejected_tokens_of_assisted_generation_are_not_joined(
    module: Any, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(module, probes=probes["two"]) as rec, torch.no_grad():
        output = module(IDS)
        output.past_key_values.crop(-1)
        module(IDS[:, :1], past_key_values=output.past_key_values)
    with pytest.raises(PassError, match="rejects tokens"):
        _ = rec.scores


def test_two_conversations_in_turn_are_not_joined(
    module: Any, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(module, probes=probes["two"]) as rec, torch.no_grad():
        first = module(IDS[:1]).past_key_values
        second = module(IDS[1:]).past_key_values
        module(IDS[:1, :1], past_key_values=second)
        joined = rec.scores
        module(IDS[:1, :1], past_key_values=first)
    assert joined.tokens.lengths.tolist() == [4, 5]
    with pytest.raises(PassError, match="was changed between two"):
        _ = rec.scores


def test_an_encoder_decoder_is_scored_where_the_probe_reads() -> None:
    module = tiny_model("t5")
    width = module.config.d_model
    rng = np.random.default_rng(0)
    states, labels = rng.normal(size=(20, width)), rng.integers(0, 2, 20)
    inner = hs.Probe(site="decoder.layer.1").fit(states, labels)
    outer = hs.Probe(site="encoder.layer.1").fit(states, labels)
    with hs.recording(module, probes=inner) as rec:
        written = generate(module, IDS, decoder_start_token_id=3)
    assert rec.scores.of(0).tokens.ids.tolist() == written[0, :-1].tolist()
    with hs.recording(module, probes={"e": outer}) as rec:
        generate(module, IDS, decoder_start_token_id=3)
    assert rec.scores.tokens.ids.tolist() == IDS.flatten().tolist()
    with (
        pytest.raises(Error, match="the encoder and the decoder"),
        hs.recording(module, probes={"e": outer, "d": inner}),
    ):
        pass
    ambiguous = hs.Probe(site="layer.1").fit(states, labels)
    with (
        pytest.raises(Error, match="names 2 sites"),
        hs.recording(module, probes=ambiguous),
    ):
        pass


def test_bad_probes_are_refused_before_a_pass(model: hs.Model) -> None:
    states, labels = np.eye(4), [0, 1, 0, 1]
    narrow = hs.Probe(site="layer.1").fit(states, labels)
    cases: list[tuple[Any, str]] = [
        (narrow, "fitted to width 4, and layer.1 of .* is 64 wide"),
        (hs.Probe(site="layer.1"), "not fitted"),
        (hs.Probe().fit(states, labels), "which site"),
        ({"x": hs.Probe(site="layer.99").fit(states, labels)}, "No site"),
        ({"x": object()}, "it is a object"),
        ({}, "there are none"),
    ]
    for probes, message in cases:
        with pytest.raises(Error, match=message), hs.recording(model, probes=probes):
            pass
    with hs.recording(model) as rec:
        model.module(IDS)
    with pytest.raises(PassError, match="No scores of probes"):
        _ = rec.scores


def test_a_saved_probe_knows_its_model(tmp_path: Path, model: hs.Model) -> None:
    texts = [[5 + number, 6, 7 + number % 2] for number in range(24)]
    states = model.capture(texts, "layer.1")
    result = hs.probe(states, [number % 2 for number in range(24)])
    probe = hs.Probe.of(result, "layer.1")
    probe.save(tmp_path / "probe.safetensors")
    loaded = hs.Probe.load(tmp_path / "probe.safetensors")
    assert loaded.source == probe.source
    assert loaded.source["weights"] == model.source(None).weights
    assert loaded.site == "layer.1"
    np.testing.assert_array_equal(loaded.coef_, probe.coef_)
    with hs.recording(model, probes=loaded) as rec, torch.no_grad():
        model.module(IDS)
    expected = probe.decision_function(model.capture(IDS, "layer.1")["layer.1"])
    np.testing.assert_array_equal(rec.scores["layer.1"], expected)
