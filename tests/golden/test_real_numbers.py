"""Hold a dozen numbers of trained models: what a user saw yesterday is there today.

They were measured in float32; the tolerance leaves room for another processor. Why each
is so is not asked here: the laws and the oracles of the other tests say what is right.
"""

from functools import cache

import numpy as np
import pytest
import torch

import hiddenscope as hs

pytestmark = pytest.mark.real
SENTENCE, PROMPT = "The capital of France is Paris.", "The capital of France is"
IDS = [504, 3575, 282, 4649, 314, 7042, 30]


def close(value: object, expected: object) -> None:
    np.testing.assert_allclose(value, expected, rtol=2e-3, atol=2e-3)


@pytest.fixture(scope="module")
def states(smollm2: hs.Model) -> hs.States:
    return smollm2.capture(SENTENCE)


@pytest.fixture(scope="module")
def patched(smollm2: hs.Model) -> hs.Result:
    german = "The capital of Germany is"
    return hs.patch(smollm2, hs.Contrast(PROMPT, german, " Paris", " Berlin"))


@pytest.fixture(scope="module")
def lens(smollm2: hs.Model) -> hs.Result:
    return hs.lens(smollm2, PROMPT, k=1, target=" Paris")


@pytest.fixture(scope="module")
def written(smollm2: hs.Model) -> hs.States:
    return smollm2.capture_generation(PROMPT, max_new_tokens=3, sites="layer.1")


def test_tokens_and_weights(states: hs.States) -> None:
    assert states.tokens.ids.tolist() == IDS
    assert states.source.weights.startswith("sha256:1c82b3b46a7e5266")
    assert states.values.shape == (32, 7, 576)


def test_norms_of_states(states: hs.States) -> None:
    expected = {"layer.0": 2.5411, "layer.10": 143.722, "layer.20": 215.293}
    expected |= {"layer.30": 619.245, "final": 46.8124}
    for site, norm in expected.items():
        close(states[site].norm(dim=-1).median(), norm)
    close(states["layer.20"].abs().max(), 22452.9)


def test_the_loss_of_a_sentence(smollm2: hs.Model) -> None:
    logits = hs.record(smollm2, SENTENCE, (), logits=True).logits
    assert logits is not None
    loss = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(IDS[1:]))
    close(loss, 2.56745)


def test_what_the_lens_reads(lens: hs.Result) -> None:
    target = lens.facts["target"]
    assert (target["rank"], target["first_best_at"]) == (1, "layer.30")
    close(target["probability"], 0.772532)
    last = lens.data.isel(token=-1, rank=0)
    close(last["probability"].values[[15, 29]], [0.793423, 0.199483])
    assert lens.facts["half_settled_from"] == "layer.28"


def test_where_two_sentences_differ(smollm2: hs.Model) -> None:
    result = hs.compare(smollm2, SENTENCE, "The capital of Germany is Berlin.")
    cosines = result.data["cosine"].sel(site="final").values
    close(cosines, [1, 1, 1, 0.978385, 0.895497, 0.926269, 0.964763])


def test_what_carries_the_answer(patched: hs.Result) -> None:
    effects = patched.data["effect"].sel(site=["layer.15", "layer.25"]).values
    close(effects, [[0, 0, 0, 1.0105, 0.0241], [0, 0, 0, 0.0033, 0.9948]])


def test_what_writes_the_answer(smollm2: hs.Model) -> None:
    result = hs.contributions(smollm2, PROMPT, " Paris", " Berlin")
    close(result.facts["total"], [6.66266])
    assert "layer.24.attn.head.4 adds most to the logit of “Paris”" in result.summary()


def test_how_much_a_state_sees_of_others(smollm2: hs.Model) -> None:
    result = hs.visibility(smollm2, PROMPT, sites="layer.29-30")
    assert "90% comes from the same token" in result.summary()


def test_massive_activations(smollm2: hs.Model) -> None:
    said = hs.profile(smollm2, SENTENCE).summary()
    assert "17 values in channel 507 at layer.12 to layer.28" in said


def test_what_is_written_next(written: hs.States) -> None:
    assert written.tokens.ids.tolist() == [*IDS, 198]


@cache
def _vectors() -> np.ndarray:
    texts = ["A cat sleeps on the sofa.", "A kitten naps on the couch."]
    return hs.embed("minilm", [*texts, "Interest rates rose in March."])


@pytest.mark.usefixtures("minilm")
def test_how_alike_sentences_are() -> None:
    vectors = _vectors()
    close((vectors @ vectors.T)[0], [1, 0.7629, -0.0097])


@pytest.mark.usefixtures("minilm")
def test_vectors_find_their_neighbours() -> None:
    result = hs.search(_vectors(), _vectors()[1], k=2)
    assert result.data["number"].values.ravel().tolist() == [1, 0]
