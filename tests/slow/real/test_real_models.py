"""What only trained weights show, on the zoo's smollm2 and minilm."""

import pytest
import torch

import hiddenscope as hs
from hiddenscope.model.batching import states_disagreement

pytestmark = pytest.mark.real

SENTENCES = [
    "The capital of France is Paris.",
    "No.",
    "Water boils at a hundred degrees Celsius at sea level, and at less on a mountain.",
    "She sold seashells by the seashore.",
    "def add(a, b):\n    return a + b\n",
    (
        "In 1969 two people walked on the Moon for the first time, while a third stayed"
        " in orbit above them."
    ),
    "Why?",
    "L'été dernier, nous sommes allés à la mer avec des amis.",
    (
        "The quick brown fox jumps over the lazy dog, again and again, until the dog"
        " has had enough of it and walks away."
    ),
    "3.14159 26535 89793",
    "Once upon a time there was a small village at the edge of a dark forest.",
    "日本の首都は東京です。",
]


@pytest.mark.parametrize(
    ("country", "city"), [("France", " Paris"), ("Germany", " Berlin")]
)
def test_the_capital_follows(smollm2: hs.Model, country: str, city: str) -> None:
    logits = hs.record(
        smollm2, f"The capital of {country} is", "layer.1", logits=True
    ).logits
    assert logits is not None
    assert smollm2.tokenizer.decode([int(logits[-1].argmax())]) == city


def test_the_first_token_is_a_hundred_times_larger_than_the_others_in_the_middle(
    smollm2: hs.Model,
) -> None:
    states = smollm2.capture("The capital of France is Paris.")
    norms = states.values.norm(dim=-1)[13:23]  # type: ignore[union-attr]
    assert 15_000 < norms[:, 0].median() < 30_000
    assert 50 < norms[:, 1:].median() < 800
    assert norms[:, 0].min() > 20 * norms[:, 1:].max()


def test_final_is_not_the_raw_last_layer(smollm2: hs.Model) -> None:
    states = smollm2.capture("The capital of France is")
    assert str(states.sites[-2]) == "layer.30" and str(states.sites[-1]) == "final"
    ids = torch.tensor([states.tokens.ids.tolist()])
    with torch.no_grad(), hs.recording(smollm2, "final") as rec:
        smollm2.module(ids)
    assert torch.equal(rec.states["final"], states["final"])
    norm = smollm2.module.get_submodule(smollm2.anatomy.taps[states.sites[-1]].path)
    with torch.no_grad():
        assert torch.equal(norm(states["layer.30"]), states["final"])
    assert not torch.allclose(states["layer.30"], states["final"], rtol=0.1)


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_real_sentences_in_a_batch_equal_themselves_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: hs.Model = request.getfixturevalue(name)
    assert model.batching.padding_safe
    states = model.capture(SENTENCES)
    assert (
        states.tokens.texts == tuple(SENTENCES)
        and len(set(states.tokens.lengths.tolist())) > 6
    )
    for number, sentence in enumerate(SENTENCES):
        alone = model.capture(sentence)
        assert alone.tokens.ids.tolist() == states.of(number).tokens.ids.tolist()  # type: ignore[union-attr]
        assert states_disagreement(alone, states.of(number)) <= 1  # type: ignore[union-attr, arg-type]


def test_a_kitten_is_nearer_to_a_cat_than_the_stock_market_is(minilm: hs.Model) -> None:
    texts = [
        "A cat sits on the mat.",
        "A kitten rests on a rug.",
        "The stock market fell.",
    ]
    pooled = minilm.capture(texts).pool("mean", "layer.-1")  # type: ignore[union-attr]
    near, far = torch.cosine_similarity(pooled[:1], pooled[1:])
    assert near > far + 0.3
    assert minilm.capture(texts).pool("cls", "layer.-1").shape == (3, 384)  # type: ignore[union-attr]


def test_generation_gives_what_a_full_pass_gives(smollm2: hs.Model) -> None:
    states = smollm2.capture_generation("The capital of France is", max_new_tokens=12)
    text = "".join(states.tokens.strings)
    assert text.startswith("The capital of France is Paris")
    whole = smollm2.capture([states.tokens.ids.tolist()])
    assert states_disagreement(whole, states) <= 8  # type: ignore[arg-type]


def test_a_source_names_the_model(smollm2: hs.Model) -> None:
    source = smollm2.capture("Hello").source  # type: ignore[union-attr]
    assert (
        source.model == "smollm2"
        and source.weights.startswith("sha256:")
        and source.depth == 30
        and source.final
    )
