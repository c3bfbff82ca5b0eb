"""Features: what a dictionary says of states and of the loss, beside simpler ways."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli.main import app
from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import NotFinite, SiteError, StatesError
from hiddenscope.results import views_of
from hiddenscope.testing import tiny_model, tiny_tokenizer

SITE = "layer.2"
WIDTH = 64


@pytest.fixture(scope="module")
def model() -> hs.Model:
    """A tiny llama that is sure of its next token."""
    module = tiny_model("llama")
    with torch.no_grad():
        module.lm_head.weight.mul_(60)
    return hs.load((module, None))


@pytest.fixture(scope="module")
def texts(model: hs.Model) -> list[list[int]]:
    """Texts of different lengths that the model itself goes on with."""
    generator = np.random.default_rng(0)
    written = []
    for length in generator.integers(4, 9, 16):
        ids = torch.from_numpy(generator.integers(5, 90, (1, 3)))
        for _ in range(length):
            with torch.no_grad():
                following = model.module(input_ids=ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, following], 1)
        written.append(ids[0].tolist())
    return written


def identity(site: str = SITE) -> hs.Dictionary:
    return hs.Dictionary.of(torch.eye(WIDTH), site)


def nothing() -> hs.Dictionary:
    """A dictionary of which no feature ever acts."""
    zeros = torch.zeros(WIDTH)
    return hs.Dictionary(
        torch.eye(WIDTH), torch.zeros(WIDTH, WIDTH), zeros, zeros, SITE, SITE
    )


def sparse(k: int = 5, count: int = 96) -> hs.Dictionary:
    """Random unit directions, of which k act."""
    generator = torch.Generator().manual_seed(3)
    dictionary = hs.Dictionary.of(torch.randn(count, WIDTH, generator=generator), SITE)
    return replace(dictionary, encoding=Encoding("topk", k=k))


def scores(result: hs.Result, measure: str) -> dict[str, Any]:
    for comparison in result.facts["comparisons"]:
        if comparison["measure"] == measure:
            return {score["way"]: score for score in comparison["scores"]}
    raise AssertionError(f"no {measure}")


def later(states: hs.States, site: str = SITE) -> Tensor:
    return states[site][torch.from_numpy(states.tokens.positions > 0)]


def test_features_that_never_act_recover_nothing(
    model: hs.Model, texts: list[list[int]]
) -> None:
    mean = later(model.capture(texts, SITE)).double().mean(0).float()
    result = hs.features(model, texts, replace(nothing(), bias=mean))
    recovered = scores(result, "recovered")["the dictionary"]
    assert recovered["value"] == pytest.approx(0, abs=1e-6)
    assert result.facts["active"]["value"] == 0
    assert result.facts["silent"] == WIDTH
    assert "with the mean state in the place of every one" in result.summary()


def test_what_training_left_is_not_said_to_be_a_proof(
    model: hs.Model, texts: list[list[int]]
) -> None:
    fitted = replace(identity(), facts={"origin": "fitted", "unexplained": 0.2})
    result = hs.features(model, texts[:4], fitted)
    assert result.facts.get("proved") is None
    assert "When it was read" not in result.summary()


def test_what_does_not_act_has_no_name(model: hs.Model, texts: list[list[int]]) -> None:
    data = hs.features(model, texts, sparse(k=5), k=7).data
    is_first = (data["position"] == 0).to_numpy()
    assert (data["strongest"][:, is_first] == "").all()
    later = data["strongest"][:, ~is_first]
    assert (later[..., :5] != "").all() and (later[..., 5:] == "").all()


def test_neither_order_nor_batches_nor_copies_change_anything(
    model: hs.Model, texts: list[list[int]]
) -> None:
    result = hs.features(model, texts, sparse())
    turned = hs.features(model, texts[::-1], sparse())
    for measure in ("unexplained", "divergence"):
        for way, score in scores(result, measure).items():
            other = scores(turned, measure)[way]["value"]
            assert other == pytest.approx(score["value"], rel=1e-4)
    doubled = hs.features(model, texts * 2, sparse())
    (single, double) = (scores(r, "unexplained") for r in (result, doubled))
    for way, score in single.items():
        for end in ("value", "low", "high"):
            assert double[way][end] == pytest.approx(score[end], rel=1e-4)


def test_stored_states_say_the_same_without_a_loss(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama", layers=2), tiny_tokenizer()))
    texts = [f"The {word} sat on the mat." for word in ("cat", "dog", "rest", "hat")]
    result = hs.features(model, texts, sparse())
    store = hs.extract(model, texts, tmp_path / "states", sites=[SITE])
    for stored in (model.capture(texts, SITE), store):
        told = hs.features(stored, dictionary=sparse())
        for way, score in scores(told, "unexplained").items():
            expected = scores(result, "unexplained")[way]["value"]
            assert score["value"] == pytest.approx(expected, rel=1e-5)
        assert told.facts["losses"] == []
        assert "The loss was not measured: a store has no model." in told.summary()


def test_words_name_dictionaries_that_are_made_of_the_other_half(
    model: hs.Model, texts: list[list[int]]
) -> None:
    result = hs.features(model, texts, "pca", site=SITE)
    left = scores(result, "unexplained")
    assert result.facts["features"] == 32
    gap = left["principal components"]["gap"]["value"]
    assert gap == pytest.approx(0, abs=1e-6)
    drawn = hs.features(model, texts, "random", site=SITE)
    assert drawn.facts["features"] == 8 * WIDTH
    neurons = hs.features(model, texts, "neurons", site=SITE)
    assert neurons.facts["site"] == "layer.2.mlp"
    assert scores(neurons, "unexplained")["the dictionary"]["value"] < 1e-9
    written = hs.features(model, texts, "random", site="layer.2.mlp")
    assert "neurons" in scores(written, "unexplained")


def test_a_massive_state_is_left_out_like_a_first_one() -> None:
    states, labels = planted(np.random.default_rng(0))
    spoiled = replace(states, values=states.values.clone())
    spoiled.values[0, 42] = 500.0
    basis = hs.Dictionary.of(torch.eye(16)[:4], SITE)
    plain, other = (
        hs.features(some, dictionary=basis, data=labels) for some in (states, spoiled)
    )
    assert other.facts["massive"] == 1 and not plain.facts.get("massive")
    assert "first tokens and 1 massive one are left out" in other.summary()
    for way, score in scores(plain, "unexplained").items():
        value = scores(other, "unexplained")[way]["value"]
        assert value == pytest.approx(score["value"], abs=0.02)
    assert other.data["unexplained"][:, 42].isnull().all()
    spoiled.values[0, 40:44] = 500.0
    with pytest.raises(StatesError, match="massive ones alone"):
        hs.features(spoiled, dictionary=basis)


def test_single_texts_are_shown_and_not_compared(model: hs.Model) -> None:
    result = hs.features(model, [[5, 6, 7, 8]], sparse())
    assert list(scores(result, "unexplained")) == ["the dictionary"]
    assert "There are no intervals" in result.summary()
    assert views_of(result)[0].tokens == ("5", "6", "7", "8")


def planted(
    generator: np.random.Generator, count: int = 40, strength: float = 3.0
) -> Any:
    """States with labels along one direction, and these labels."""
    labels = np.arange(count) % 2
    text = np.repeat(np.arange(count), 4)
    values = generator.standard_normal((1, len(text), 16))
    values[0, :, 3] += strength * labels[text]
    tokens = hs.Tokens(
        None,
        text,
        np.tile(np.arange(4), count),
        np.arange(len(text)),
        ["t"] * len(text),
    )
    states = hs.States(
        (hs.Site(2),), torch.from_numpy(values).float(), tokens, hs.Source("toy")
    )
    return states, labels.tolist()


def test_labels_are_told_apart_where_they_are_planted() -> None:
    states, labels = planted(np.random.default_rng(0))
    basis = hs.Dictionary.of(torch.eye(16), SITE)
    found = scores(hs.features(states, dictionary=basis, data=labels), "auroc")
    assert found["the dictionary"]["number"] == 3
    assert found["the dictionary"]["value"] > 0.9
    assert found["difference of means"]["value"] > 0.9
    noise, labels = planted(np.random.default_rng(1), strength=0.0)
    found = scores(hs.features(noise, dictionary=basis, data=labels), "auroc")
    assert all(score["low"] < 0.5 < score["high"] for score in found.values())


def test_the_feature_that_tells_labels_apart_is_named() -> None:
    states, labels = planted(np.random.default_rng(0))
    turned = torch.eye(16)
    turned[3] *= -1
    for basis, larger in ((torch.eye(16), max(labels)), (turned, min(labels))):
        dictionary = hs.Dictionary.of(basis, SITE)
        result = hs.features(states, dictionary=dictionary, data=labels)
        said = f"number 3 tells the labels apart, larger for “{larger}”, with an AUROC"
        assert said in result.summary()
    noise, labels = planted(np.random.default_rng(1), strength=0.0)
    result = hs.features(noise, dictionary=dictionary, data=labels)
    assert "is not shown to tell the labels apart" in result.summary()


@pytest.fixture
def saved(model: hs.Model, texts: list[list[int]], tmp_path: Path) -> Path:
    """A dictionary in a file, which knows all that its states say."""
    rows = later(model.capture(texts, SITE))
    basis = torch.linalg.svd(rows - rows.mean(0)).Vh
    both = hs.Dictionary.of(torch.cat([basis, -basis]), SITE)
    encoding = Encoding("relu", centred=True)
    replace(both, bias=rows.mean(0), encoding=encoding).save(tmp_path)
    return tmp_path


def test_a_dictionary_from_a_file_is_proved_where_it_is_used(
    model: hs.Model, texts: list[list[int]], saved: Path
) -> None:
    believed = hs.Dictionary.read(saved)
    proved = hs.features(model, texts, believed)
    assert proved.facts["proved"] == pytest.approx(0, abs=1e-6)
    elsewhere = replace(believed, reads="layer.1", writes="layer.1")
    for analysis in (hs.features, hs.examples):
        ask = (texts, elsewhere) if analysis is hs.features else (elsewhere, texts)
        with pytest.raises(StatesError, match=r"; at layer\.2, 0\.0% of the variance"):
            analysis(model, *ask)


def test_a_better_reading_of_its_file_is_said(
    model: hs.Model, texts: list[list[int]], saved: Path
) -> None:
    proved = hs.Dictionary.read(saved, model, texts=texts)
    assert proved.proof is not None
    proof = replace(proved.proof, best="with k=8", worse=1.25)
    result = hs.features(model, texts[:4], replace(proved, proof=proof))
    said = "The best other reading of its file: with k=8, 80% of that is left, with as many features"
    assert said in result.summary()


def test_what_was_not_proved_is_said_first(
    model: hs.Model, texts: list[list[int]], saved: Path
) -> None:
    believed = hs.Dictionary.read(saved)
    states = model.capture(texts, SITE)
    told = (
        hs.features(model, texts[:4], believed),
        hs.features(states, dictionary=believed),
        hs.examples(states, believed, features=[0]),
    )
    for result in told:
        assert result.facts["believed"]
        assert "Nothing was proved of this dictionary" in result.summary()
    assert told[0].summary().index("Nothing") < told[0].summary().index("Of 128")


def test_an_encoder_has_no_loss_of_next_tokens() -> None:
    model = hs.load((tiny_model("bert"), tiny_tokenizer()))
    result = hs.features(model, ["The cat sat.", "On the mat."], "pca", site="layer.1")
    assert "does not predict next tokens" in result.summary()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dictionary": "pca"}, "they may be of any site"),
        (
            {"dictionary": hs.Dictionary.of(torch.eye(32), SITE)},
            "the dictionary is for layer.2 of width 32",
        ),
        ({"dictionary": "neuron"}, "a path that exists, or neurons, pca or random"),
        ({"dictionary": identity(), "data": ([[5, 6]], [0])}, "texts and data"),
        ({"dictionary": identity(), "texts": [[5, 6], [7]]}, "text 1 has a single"),
        (
            {"dictionary": identity(), "texts": None, "data": ([[5, 6], [7, 8]], [0])},
            "2 texts need as many labels",
        ),
        (
            {"dictionary": identity(), "texts": None, "data": ([[5, 6]], None)},
            "1 texts need as many labels",
        ),
        ({"dictionary": identity(), "texts": [[5, 6]]}, "states at layer.2 are"),
        (
            {
                "dictionary": identity(),
                "texts": None,
                "data": ([[5, 6, 7]] * 8, [0] * 8),
            },
            "there are 1 labels",
        ),
        *(
            (
                {
                    "dictionary": identity(),
                    "texts": None,
                    "data": ([[5, 6, 7]] * 8, [label] * 4 + [missing] * 4),
                },
                "the label of text 4 is missing",
            )
            for label, missing in (("a", None), (0.0, float("nan")))
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(
    model: hs.Model, options: dict[str, Any], message: str
) -> None:
    arguments = {"texts": [[5, 6, 7], [8, 9, 10]], **options}
    with pytest.raises(hs.errors.Error, match=message) as refused:
        hs.features(model, **arguments)
    assert "\n" not in str(refused.value)


def test_states_that_do_not_fit_are_refused(model: hs.Model) -> None:
    states = model.capture([[5, 6, 7], [8, 9, 10]], SITE)
    neurons = hs.Dictionary.neurons(model, "layer.2.mlp.neurons")
    with pytest.raises(SiteError, match=r"No site 'layer\.2\.mlp"):
        hs.features(states, dictionary=neurons)
    with pytest.raises(StatesError, match="a store does not hold what neurons write"):
        hs.features(states, dictionary="neurons", site=SITE)
    states.values[0, 1, 0] = float("nan")
    with pytest.raises(NotFinite, match="a NaN at layer.2"):
        hs.features(states, dictionary=identity())


def test_a_site_of_both_stacks_is_refused_and_a_site_may_be_a_value() -> None:
    both = hs.load((tiny_model("bart"), None))
    texts = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14]]
    with pytest.raises(SiteError, match=r"Give site='encoder\.layer\.1'"):
        hs.features(both, texts, "pca", site="layer.1")
    result = hs.features(both, texts, "random", site=hs.Site.parse("encoder.layer.1"))
    assert result.facts["site"] == "encoder.layer.1"


def test_the_command_asks_the_same(tmp_path: Path) -> None:
    path = tmp_path / "model"
    module, tokenizer = tiny_model("llama", layers=1), tiny_tokenizer()
    module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    words = ["features", "The cat sat.", "On the mat.", "--model", str(path)]
    options = ["--dictionary", "random", "--site", "layer.1", "-k", "2"]
    answer = CliRunner().invoke(app, [*words, *options])
    assert answer.exit_code == 0, answer.output
    assert "Of 512 features at layer.1" in answer.output
    assert "Features that write most" in answer.output
    labelled = tmp_path / "pets.csv"
    rows = [
        f"The {pet} sat on mat {k}.,{pet}" for k in range(8) for pet in ("cat", "dog")
    ]
    labelled.write_text("\n".join(["text,pet", *rows]), "utf-8")
    words = ["features", "--data", str(labelled), "--label", "pet", *words[3:]]
    answer = CliRunner().invoke(app, [*words, *options])
    assert answer.exit_code == 0, answer.output
    assert "AUROC of the best single number" in answer.output
    answer = CliRunner().invoke(app, [*words[:1], *words[5:], *options])
    assert answer.exit_code == 2 and "No texts: none was given" in answer.output


def test_a_part_of_a_cross_layer_transcoder_is_said_to_be_one(model: hs.Model) -> None:
    for layer, is_part in ((1, False), (2, True)):
        site = f"layer.{layer}.mlp"
        dictionary = replace(
            identity(f"{site}.input"), writes=site, encoding=Encoding("relu"), later={}
        )
        result = hs.features(model, [[5, 6, 7], [8, 9, 3]], dictionary)
        assert ("lower layers" in " ".join(result.facts["notes"])) == is_part


def test_what_cannot_be_compared_is_said(model: hs.Model) -> None:
    alone = hs.features(model, [[5, 6, 7, 8, 9]], "pca", site="layer.2")
    assert any("of one group" in note for note in alone.facts["notes"])
    dictionary = hs.Dictionary.of(torch.eye(model.anatomy.width(hs.Site(2))), "layer.2")
    whole = hs.features(model, [[5, 6, 7], [8, 9, 3]], dictionary)
    assert any("components say all" in note for note in whole.facts["notes"])
    with pytest.raises(SiteError, match=r"lies at layer\.2"):
        hs.features(model, [[5, 6, 7], [8, 9, 3]], dictionary, site="layer.1")
