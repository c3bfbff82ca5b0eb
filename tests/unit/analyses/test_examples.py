"""Examples: the strongest tokens equal a full sort, however the corpus is cut; planted
kinds of tokens are found, and noise claims nothing.
"""

import math
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.examples import compute, kinds
from hiddenscope.cli.main import app
from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import Error
from hiddenscope.measures.activity import Activity
from hiddenscope.sites import Site
from hiddenscope.states import Source, States, Tokens
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.pages.scenes import HOSTILE

WIDTH = 8


def drawn(seed: int = 0, texts: int = 30, length: int = 12, kinds: int = 9) -> States:
    """States of no model, whose tokens and values mean nothing."""
    generator = np.random.default_rng(seed)
    count = texts * length
    ids = generator.integers(kinds, size=count)
    tokens = Tokens(
        None,
        np.repeat(np.arange(texts), length),
        np.tile(np.arange(length), texts),
        ids,
        [f"t{token}" for token in ids],
    )
    values = torch.from_numpy(generator.standard_normal((1, count, WIDTH)))
    return States((Site(1),), values.float(), tokens, Source("drawn"))


class Cut:
    """The same states, in blocks of other sizes."""

    def __init__(self, states: States, *sizes: int) -> None:
        self.states, self.sizes = states, sizes
        self.sites, self.tokens, self.source = (
            states.sites,
            states.tokens,
            states.source,
        )

    def blocks(self, site: str | Site) -> Iterator[Tensor]:
        rows, place = self.states[site], 0
        while len(rows):
            size = self.sizes[place % len(self.sizes)]
            yield rows[:size]
            rows, place = rows[size:], place + 1


def dictionary(count: int = 20, gate: Any = "relu", **options: Any) -> hs.Dictionary:
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(count, WIDTH, generator=generator)
    return hs.Dictionary(
        vectors,
        vectors.T.contiguous(),
        torch.full((count,), -1.0),
        torch.zeros(WIDTH),
        "layer.1",
        "layer.1",
        Encoding(gate, **options),
    )


def expected(states: States, units: hs.Dictionary) -> tuple[Tensor, np.ndarray]:
    counted = np.flatnonzero(states.tokens.positions > 0)
    return units.activations(states["layer.1"][counted]), counted


@pytest.mark.parametrize("sizes", [(1,), (7, 50), (1000,)])
def test_how_the_corpus_is_cut_changes_nothing(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "PIECE", 64 * 20)
    states = drawn()
    whole = hs.examples(states, dictionary(), k=4)
    cut = hs.examples(Cut(states, *sizes), dictionary(), k=4)
    # Products of other numbers of rows may be rounded differently.
    for name, variable in whole.data.items():
        if variable.dtype.kind == "f":
            np.testing.assert_allclose(cut.data[name], variable, rtol=1e-4, atol=1e-5)
        else:
            assert cut.data[name].equals(variable), name
    assert cut.facts["listed"][0]["prefers"] == whole.facts["listed"][0]["prefers"]


def test_a_shuffled_corpus_has_the_same_strongest_tokens() -> None:
    states = drawn()
    order = np.random.default_rng(1).permutation(states.tokens.count)
    rows = np.concatenate([np.arange(360).reshape(30, 12)[text] for text in order])
    shuffled = States(
        states.sites,
        states.values[:, rows],
        Tokens(
            None,
            states.tokens.text,
            states.tokens.positions,
            states.tokens.ids[rows],
            [states.tokens.strings[row] for row in rows],
        ),
        states.source,
    )
    first, second = (
        hs.examples(some, dictionary(), k=5).data["number"].values[:, :5]
        for some in (states, shuffled)
    )
    assert rows[second].tolist() == first.tolist()


def test_a_stream_keeps_little_and_the_first_of_equals() -> None:
    activity = Activity(1, 2, np.array([1]), lowest=0.0)
    for value in (1.0, 2.0, 2.0, 2.0, 0.0):
        activity.see(torch.tensor([[value]]))
    assert activity.numbers.tolist() == [[1, 2]] and activity.active.tolist() == [4]
    few = Activity(1, 3, np.array([], dtype=int), lowest=0.0)
    few.see(torch.tensor([[0.0], [5.0]]))
    assert few.numbers.tolist() == [[1, -1, -1]]
    many = Activity(1, 1, np.array([], dtype=int))
    many.see(torch.ones(1000, 1))
    assert many.active.tolist() == [1000], "a byte counts to 255"


AXIS = hs.Direction.of(np.eye(WIDTH)[0], sites="layer.1")


def test_noise_prefers_nothing_more_often_than_its_level() -> None:
    runs = 40
    claims = sum(
        "It prefers" in hs.examples(drawn(seed), AXIS, k=1).summary()
        for seed in range(runs)
    )
    assert claims <= 0.05 * runs + 2 * math.sqrt(0.05 * 0.95 * runs)


def test_copies_of_a_text_are_one_text() -> None:
    """A kind that stands out in one text does so in all its copies, and means nothing."""
    generator = np.random.default_rng(0)
    ids = np.tile(generator.integers(9, size=30), 40)
    strong = np.tile(generator.random(30) < 0.2, 40)
    groups = np.zeros(1200, dtype=int)
    assert not list(kinds.tested_kinds(strong, ids, groups, 1))


def test_a_model_streams_what_its_states_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "HELD", 2**12)
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    texts = [f"the cat sat on mat number {number}" for number in range(12)]
    states = model.capture(texts, ["layer.2", "layer.2.mlp.neurons"])
    vector = torch.randn(64, generator=torch.Generator().manual_seed(0))
    asked = [hs.Direction.of(vector, sites="layer.2"), "layer.2.mlp.neuron.7"]
    streamed, stored = hs.examples(model, asked, texts), hs.examples(states, asked)
    assert streamed.data["direction"].values.tolist() == [
        "direction 0",
        "layer.2.mlp.neuron.7",
    ]
    np.testing.assert_allclose(streamed.data["heat"], stored.data["heat"], atol=1e-4)
    assert streamed.data["number"].equals(stored.data["number"])
    neurons = hs.Dictionary.neurons(model, "layer.2.mlp.neurons")
    by_number = hs.examples(states, neurons, features=[7])
    assert (
        by_number.data["number"].values.tolist()
        == stored.data["number"].values[1:].tolist()
    )


def test_a_store_gives_what_its_states_give(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    texts = [f"the cat sat on mat number {number}" for number in range(12)]
    store = hs.extract(model, texts, tmp_path / "states", sites="layer.2")
    states = model.capture(texts, "layer.2")
    asked = hs.Direction.between(model, texts[:2], texts[2:4], sites="layer.2")
    first, second = hs.examples(store, asked), hs.examples(states, asked)
    assert first.data["number"].equals(second.data["number"])
    np.testing.assert_allclose(first.data["heat"], second.data["heat"], atol=1e-4)


def test_the_activation_of_a_probe_is_its_decision_value() -> None:
    states = drawn()
    rows = states["layer.1"]
    probe = hs.Probe(site="layer.1").fit(rows, (rows[:, 0] > 0).int().numpy())
    data = hs.examples(states, probe, k=3).data
    scores = probe.decision_function(rows)
    assert data["direction"].values.tolist() == ["probe for 1"]
    numbers = data["number"].values[0]
    np.testing.assert_allclose(data["activation"].values[0], scores[numbers], atol=1e-4)
    three = hs.Probe(site="layer.1").fit(rows, states.tokens.ids % 3)
    assert hs.examples(states, three).facts["directions"] == 3


@pytest.mark.parametrize("gate", ["relu", "threshold", "gated", "topk"])
def test_some_features_are_those_of_all(gate: str) -> None:
    options: dict[str, Any] = {
        "threshold": {"threshold": torch.full((20,), 0.3)},
        "gated": {"gate_bias": torch.full((20,), -0.5), "gain": torch.full((20,), 2.0)},
        "topk": {"k": 3},
    }.get(gate, {})
    units, states = dictionary(gate=gate, **options), drawn()
    whole = hs.examples(states, units).data.isel(direction=[17, 3])
    some = hs.examples(states, units, features=[17, 3]).data
    assert some["direction"].values.tolist() == ["feature 17", "feature 3"]
    assert (
        some["number"].values[:, :10].tolist()
        == whole["number"].values[:, :10].tolist()
    )


def test_massive_states_are_left_out_like_first_ones() -> None:
    states = drawn()
    values = states.values.clone()
    values[0, 50] = 200.0
    spoiled = States(states.sites, values, states.tokens, states.source)
    result = hs.examples(spoiled, [AXIS, hs.Direction.of(np.ones(8), sites="layer.1")])
    numbers = result.data["number"].values
    assert 50 not in numbers and (numbers >= 0).all()
    rows = np.setdiff1d(np.flatnonzero(states.tokens.positions > 0), [50])
    share = float((values[0, rows, 0] > 0).double().mean())
    assert result.data["share"].values[0] == share
    assert result.facts["listed"][0]["massive"] == 1
    assert "of 329 tokens" in result.summary()
    around = np.abs(numbers[:, :, None] + np.arange(-8, 9) - 50) == 0
    assert np.isnan(result.data["heat"].values[around]).all()


def test_a_number_of_numpy_is_a_feature_and_a_large_one_is_no_neuron() -> None:
    result = hs.examples(drawn(), dictionary(), features=np.int64(1))
    assert result.facts["listed"][0]["name"] == "feature 1"
    model = hs.load((tiny_model("llama", layers=1), None))
    # A matrix with a row for each neuron would take 40 gigabytes.
    with pytest.raises(Error, match="is for 100,000"):
        hs.examples(model, "layer.1.mlp.neuron.99999", [[5, 6, 7]])
    mixed = ["layer.1.mlp.neuron.2", hs.Direction.of(np.ones(64), sites="layer.1.mlp")]
    found = hs.examples(model, mixed, [[5, 6, 7]]).facts["listed"]
    assert [listed["site"] for listed in found] == [
        "layer.1.mlp.neurons",
        "layer.1.mlp",
    ]


def test_nothing_of_the_states_is_changed() -> None:
    states = drawn()
    before = states.values.clone()
    hs.examples(states, hs.Dictionary.of(np.eye(WIDTH), "layer.1"))
    assert torch.equal(states.values, before)


def spoiled() -> States:
    states = drawn(texts=2)
    values = states.values.clone()
    values[0, 5, 3] = math.nan
    return States(states.sites, values, states.tokens, states.source)


def firsts() -> States:
    tokens = Tokens(None, [0, 1], [0, 0], [5, 6], ["a", "b"])
    return States((Site(1),), torch.ones(1, 2, WIDTH), tokens, Source("drawn"))


def pooled() -> Any:
    states: Any = Cut(drawn(), 9)
    states.pooled = "mean"
    return states


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: hs.examples(spoiled(), AXIS), "at layer.1, text 0, position 5"),
        (lambda: hs.examples(firsts(), AXIS), "No tokens to look at"),
        (lambda: hs.examples(pooled(), AXIS), "stands for a whole text"),
        (
            lambda: hs.examples(drawn(), hs.Direction.of(np.ones(5), sites="layer.1")),
            "its states are 8 wide, and direction 0 is for 5",
        ),
        (
            lambda: hs.examples(drawn(), hs.Direction.of(np.ones(8), sites="layer.7")),
            "No site 'layer.7' in these states",
        ),
        (lambda: hs.examples(drawn(), hs.Direction.of(np.ones(8))), "at which site"),
        (lambda: hs.examples(drawn(), hs.Probe()), "a fitted probe"),
        (lambda: hs.examples(drawn(), "layer.1"), "only a neuron is"),
        (lambda: hs.examples(drawn(), []), "the list is empty"),
        (lambda: hs.examples(drawn(), [3]), "this int is no direction"),
        (lambda: hs.examples(drawn(), AXIS, features=[1]), "what is no dictionary"),
        (lambda: hs.examples(drawn(), dictionary(), threshold=float("nan")), "NaN"),
        (lambda: hs.examples(drawn(), dictionary(), features=[99]), "No feature 99"),
        (lambda: hs.examples(drawn(), dictionary(), features=[]), "No directions"),
        (lambda: hs.examples(drawn(), AXIS, ["a text"]), "texts with states"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(ask: Any, message: str) -> None:
    with pytest.raises(Error, match=message):
        ask()


def test_the_command_takes_a_neuron_and_files_of_directions(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama", layers=2), tiny_tokenizer()))
    texts = ["the cat sat on the mat", "a dog ran over there"]
    states = model.capture(texts, ["layer.1.mlp.neurons", "layer.2"])
    rows = states["layer.2"]
    probe = hs.Probe(site="layer.2").fit(rows, np.arange(len(rows)) % 2)
    vector = hs.Direction.between(model, texts[:1], texts[1:], sites="layer.2")
    features = hs.Dictionary.pca(states, 20, "layer.2")
    features = replace(features, encoding=Encoding("relu", centred=True))
    paths = [tmp_path / name for name in ("s.safetensors", "p.safetensors", "v.gguf")]
    for thing, path in zip((states, probe, vector), paths, strict=True):
        thing.save(path)
    features.save(tmp_path / "sae")
    neuron, sae = "layer.1.mlp.neuron.7", str(tmp_path / "sae")

    def ask(word: str, *options: str) -> Any:
        words = ["examples", "--states", str(paths[0]), "--direction", word, *options]
        return CliRunner().invoke(app, words)

    for word, directions, some in (
        (neuron, neuron, None),
        (str(paths[1]), probe, None),
        (str(paths[2]), vector, None),
        (f"{sae}:17,3", features, [17, 3]),
        (f"feature:{sae}:17", features, [17]),
    ):
        out = tmp_path / "result.json"
        answer = ask(word, "-k", "2", "--out", str(out))
        assert answer.exit_code == 0, answer.output
        data = hs.Result.load(out).data
        expected = hs.examples(states, directions, features=some, k=2).data
        assert (data["direction"].values == expected["direction"].values).all()
        assert data["number"].equals(expected["number"])
        activation = expected["activation"]
        np.testing.assert_allclose(data["activation"], activation, rtol=1e-5)
    for word, message in (
        ("layer.1", "only a neuron is"),
        (f"{sae}:a", "must be numbers: got 'a'"),
        (f"{sae}:99", "No feature 99"),
        (f"{sae}/none.gguf", "none.gguf"),
    ):
        answer = ask(word)
        assert (answer.exit_code, answer.stdout) == (2, ""), answer.output
        assert message in " ".join(answer.stderr.split())


def test_tokens_of_a_page_are_never_tags(tmp_path: Path) -> None:
    states = drawn(kinds=len(HOSTILE))
    strings = [HOSTILE[token] for token in states.tokens.ids]
    tokens = replace(states.tokens, strings=strings)
    hostile = States(states.sites, states.values, tokens, states.source)
    direction = hs.Direction.of(torch.eye(WIDTH)[0], sites="layer.1")
    tags = []
    for source in (states, hostile):
        path = tmp_path / "page.html"
        hs.examples(source, direction).save(path)
        page = path.read_text()
        shown = re.sub(r"(?s)(<script[^>]*>).*?</script>", r"\1", page)
        tags.append(set(re.findall(r"<([a-z]+)", shown)))
    assert tags[0] == tags[1]
    assert "window.hacked = 1</script>" not in page and "<img src=x" not in page
    assert "\u202e" not in page and "\0" not in page


def test_a_feature_as_a_direction_is_named_so_and_k_is_bounded() -> None:
    result = hs.examples(drawn(), dictionary()[3], k=10**6)
    assert result.data["direction"].values.tolist() == ["feature 3 as a direction"]
    assert result.data.sizes["example"] < 10**4


def test_copies_of_a_context_are_shown_once() -> None:
    states = drawn(texts=20)
    rows = states.values.view(20, 12, WIDTH)
    rows[3:12] = rows[3]
    ids = states.tokens.ids.reshape(20, 12).copy()
    ids[3:12] = ids[3]
    states = replace(states, tokens=replace(states.tokens, ids=ids.ravel()))
    direction = torch.zeros(WIDTH)
    direction[0] = 1
    result = hs.examples(states, hs.Direction.of(direction, sites="layer.1"), k=10)
    kinds = result.data["kind"].to_numpy() == "strongest"
    numbers = result.data["number"].to_numpy()[0, kinds]
    windows = result.data["window"].to_numpy()[0, kinds]
    assert len(numbers) == 10 == len(set(map(tuple, windows)))
    (record,) = result.facts["listed"]
    ranked = (-states.values[0, :, 0]).argsort(stable=True).tolist()
    ranked = [row for row in ranked if row % 12]
    last = ranked.index(numbers[-1])
    assert record["copies"] == last - 9 > 0
    assert f"{record['copies']} tokens among its strongest left out" in result.summary()
    # Of copies the first is shown, and everything else in its order.
    assert all(row // 12 == 3 or not 3 <= row // 12 < 12 for row in numbers)


class Watched(Cut):
    """States that say how many of their blocks are held at once."""

    most = 0

    def blocks(self, site: str | Site) -> Iterator[Tensor]:
        held: weakref.WeakSet[Tensor] = weakref.WeakSet()
        for block in super().blocks(site):
            held.add(fresh := block.clone())
            yield fresh
            del fresh
            self.most = max(self.most, len(held))


def test_no_more_than_some_blocks_are_held() -> None:
    corpus = Watched(drawn(texts=400), 50)
    direction = hs.Direction.of(torch.arange(1.0, WIDTH + 1), sites="layer.1")
    hs.examples(corpus, direction, k=3)
    # The first 4,096 states tell what is massive.
    assert corpus.most < 90


@pytest.mark.parametrize("spoil", ["heat", "number", "position", "window"])
def test_a_result_without_its_data_is_refused_in_a_sentence(
    tmp_path: Path, spoil: str
) -> None:
    direction = hs.Direction.of(torch.ones(WIDTH), sites="layer.1")
    result = hs.examples(drawn(), direction, k=3)
    spoilt = replace(result, data=result.data.drop_vars(spoil))
    spoilt.save(tmp_path / "spoilt.nc")
    with pytest.raises(Error, match="do not fit together|damaged") as caught:
        hs.Result.load(tmp_path / "spoilt.nc").summary()
    assert "\n" not in str(caught.value)
