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


@pytest.mark.parametrize("pad", [0, None])
def test_a_text_that_ended_is_scored_as_alone(
    pad: int | None, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    """Pads after the end count as real in the mask of `generate`, and are not."""
    module: Any = tiny_model("llama")
    whole = generate(module, IDS)
    # The second token that the second text is given ends it; a prompt may hold it too.
    end = int(whole[1, 5])
    assert end != whole[1, 4] and end not in whole[0]
    module.generation_config.eos_token_id = [end]
    ids = torch.cat([torch.full((2, 1), end), IDS], 1)
    for prompt in (IDS, ids):
        alone = []
        for row in range(2):
            with hs.recording(module, probes=probes["two"]) as rec:
                generate(module, prompt[row : row + 1])
            alone.append(rec.scores)
        with hs.recording(module, probes=probes["two"]) as rec:
            written = generate(module, prompt, pad_token_id=pad)
        for row in range(2):
            part = rec.scores.of(row)
            expected = alone[row].tokens.ids.tolist()
            assert part.tokens.ids.tolist() == expected
            np.testing.assert_allclose(
                part["layer.1"], alone[row]["layer.1"], rtol=1e-4, atol=1e-5
            )
        assert len(rec.scored) == written.shape[1] - prompt.shape[1]
        if prompt is IDS:
            assert rec.scores.tokens.lengths.tolist() == [9, 5]
    # A text that goes on after an end has not ended.
    with hs.recording(module, probes=probes["two"]) as rec, torch.no_grad():
        cache = module(IDS).past_key_values
        for token in (end, 5, 6):
            step = torch.tensor([[token], [7]])
            cache = module(step, past_key_values=cache).past_key_values
    assert rec.scores.tokens.lengths.tolist() == [7, 7]


def test_probes_in_a_list_are_named_by_their_sites(
    module: nn.Module, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(model, probes=[*probes.values()]) as rec:
        generate(module, IDS)
    with hs.recording(model, probes=probes) as named:
        generate(module, IDS)
    for name, other in zip(("layer.1", "final", "layer.1 (3)"), probes, strict=True):
        np.testing.assert_array_equal(rec.scores[name], named.scores[other])
    for ask in (rec.scores.alarms, rec.scores.so_far, rec.scores.__getitem__):
        with pytest.raises(
            Error, match=r"No probe 'x': there are layer.1, layer.1 .3., final"
        ):
            ask("x")
    with pytest.raises(Error, match="it is a str"), hs.recording(model, probes=["x"]):
        pass


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


def with_pool(probe: hs.Probe, pool: str) -> hs.Probe:
    """Copy a probe of two classes that pools the scores of tokens."""
    copy = hs.Probe(site=probe.site)
    copy.coef_, copy.intercept_ = probe.coef_, probe.intercept_
    copy.classes_, copy.pool = probe.classes_, pool
    if pool == "attention":
        copy.query_ = np.random.default_rng(1).normal(size=64)
    return copy


@pytest.mark.parametrize("pool", ["last", "mean", "rolling:3", "softmax", "attention"])
def test_alarms_are_those_of_the_text_so_far(
    pool: str, module: nn.Module, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    probe = with_pool(probes["two"], pool)
    with hs.recording(model, "layer.1", probes={"p": probe}) as rec:
        generate(module, IDS)
    with pytest.raises(Error, match="has no threshold"):
        rec.scores.alarms("p")
    so_far = rec.scores.so_far("p")
    negatives = np.full(30, np.median(so_far))
    probe.threshold(negatives, false_positives=0.1)
    assert probe.threshold_ is not None
    alarms = rec.scores.alarms("p")
    assert 0 < alarms.sum() < len(alarms) == 18
    # By hand, from the states that were kept.
    for text in range(2):
        part = rec.scores.of(text)
        rows = [states["layer.1"][states.tokens.rows(text)] for states in rec.passes]
        states = torch.cat(rows)
        np.testing.assert_array_equal(part["p"], probe.decision_function(states))
        for end in range(1, 10):
            expected = probe.so_far(probe.readings(states[:end]))[-1]
            assert part.so_far("p")[end - 1] == pytest.approx(expected)
        assert not part.alarms("p")[0]
        assert (
            part.alarms("p")[1:].tolist()
            == (part.so_far("p") > probe.threshold_.value)[1:].tolist()
        )


def test_a_text_can_be_stopped_when_a_probe_rings(
    module: Any, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    probe = with_pool(probes["two"], "last")
    with hs.recording(model, probes={"p": probe}) as rec:
        whole = generate(module, IDS[:1])
    median = np.median(rec.scores.so_far("p"))
    probe.threshold(np.full(30, median), false_positives=0.1)
    first = int(rec.scores.alarms("p").argmax())
    assert rec.scores.alarms("p").any()

    def rings(ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        return torch.tensor([bool(live.scores.alarms("p").any())])

    with hs.recording(model, probes={"p": probe}) as live:
        cut = generate(module, IDS[:1], stopping_criteria=[rings])
    assert cut.shape[1] == max(first + 2, 5) <= whole.shape[1]


def test_states_of_vllm_have_the_same_scores(
    tmp_path: Path, module: Any, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    from safetensors.torch import save_file

    with hs.recording(model, "layer.1", probes={"p": probes["two"]}) as rec:
        generate(module, IDS[:1])
    # What vLLM saves of a request: `hidden_states` [token, layer, width] and its ids.
    states = torch.cat([part["layer.1"] for part in rec.passes])
    ids = torch.from_numpy(rec.scores.tokens.ids.copy())
    path = tmp_path / "request.safetensors"
    save_file({"hidden_states": states[:, None].clone(), "token_ids": ids}, path)
    saved = hs.States.read(path, sites=[1])
    scores = probes["two"].decision_function(saved["layer.1"])
    np.testing.assert_array_equal(scores, rec.scores["p"])


def test_a_state_that_is_not_finite_is_not_scored(
    module: Any, model: hs.Model, probes: dict[str, hs.Probe]
) -> None:
    with hs.recording(model, probes={"p": probes["two"]}) as rec:
        module(IDS)
    (readings,) = [part.readings["p"] for part in rec.recorded]
    readings[0, 2] = torch.nan
    with pytest.raises(Error, match="a NaN or an infinity"):
        _ = rec.scores
