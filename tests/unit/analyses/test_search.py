"""Search: exactly the nearest, held against brute force in numpy, ties and all."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from hiddenscope.errors import (
    ArgumentError,
    NotFinite,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import collection, nearest
from hiddenscope.vectors.nearest import Nearest, Nearness

Tiny = Callable[..., hs.Model]
NEARNESSES = get_args(Nearness)
TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house.",
    "The end.",
    "A dog",
    "Where is it?",
]


def brute(
    rows: np.ndarray, queries: np.ndarray, k: int, nearness: str
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, in float64, with a stable sort: of equals, the first."""
    rows, queries = rows.astype(np.float64), queries.astype(np.float64)
    if nearness == "l2":
        scores = np.stack([np.sqrt(((rows - query) ** 2).sum(1)) for query in queries])
        order = np.argsort(scores, axis=1, kind="stable")[:, :k]
    else:
        scores = np.stack([(rows * query).sum(1) for query in queries])
        if nearness == "cosine":
            lengths = np.sqrt((rows * rows).sum(1))
            scores /= np.sqrt((queries * queries).sum(1))[:, None] * lengths
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(scores, order, 1)


def check(rows: np.ndarray, queries: np.ndarray, k: int) -> None:
    """Hold a search against brute force, by every nearness."""
    for nearness in NEARNESSES:
        order, scores = brute(rows, queries, k, nearness)
        found = hs.search(rows, queries, k, nearness=nearness).data  # type: ignore[arg-type]
        assert found["number"].values.tolist() == order.tolist(), nearness
        np.testing.assert_allclose(found["score"], scores, rtol=1e-12, atol=1e-12)


def numbers(found: hs.Result) -> list[list[int]]:
    listed: list[list[int]] = found.data["number"].values.tolist()
    return listed


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Rows of many lengths, in which every tenth is one of three that come again and
    again.
    """
    generator = np.random.default_rng(3)
    made = generator.standard_normal((5000, 24)) * generator.lognormal(0, 1, (5000, 1))
    made[::10] = made[:3][generator.integers(0, 3, 500)]
    return made.astype(np.float32)


@pytest.mark.parametrize("k", [1, 7, 600])
def test_the_nearest_are_those_of_brute_force(
    rows: np.ndarray, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = np.random.default_rng(1).standard_normal((4, 24)).astype(np.float32)
    for block in (333, 4096):
        monkeypatch.setattr(collection, "MOST_ROWS", block)
        check(rows, np.concatenate([rows[:3], others]), k)


def test_queries_that_every_row_points_away_from() -> None:
    """The worst of the nearest then has a cosine below zero, or just at zero, which is
    the lowest bar there is.
    """
    generator = np.random.default_rng(4)
    rows = np.abs(generator.standard_normal((4000, 16))).astype(np.float32)
    rows[:, 15] = 0
    check(rows, np.stack([-rows[0], np.eye(16, dtype=np.float32)[15], rows[1]]), 9)


def test_what_float32_cannot_tell_apart_is_told_apart() -> None:
    base = np.zeros((300, 8))
    base[:, 0] = 1e4
    base[:, 1] = 1e-5 * np.random.default_rng(0).permutation(300)
    query = np.array([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    # Products in float32 are equal.
    assert len(np.unique(base.astype(np.float32) @ query.astype(np.float32))) < 50
    expected = np.argsort(-base[:, 1], kind="stable")[:10]
    assert numbers(hs.search(base, query, 10, nearness="dot")) == [expected.tolist()]


@pytest.mark.parametrize("nearness", NEARNESSES)
def test_products_that_are_too_coarse_are_not_used(
    rows: np.ndarray, nearness: Nearness, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.Tensor.__matmul__

    def coarse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype != torch.float32:
            return matmul(a, b)
        return matmul(a.bfloat16(), b.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", coarse)
    found = Nearest(torch.from_numpy(rows[:5]), 4, nearness)
    found.see(torch.from_numpy(rows))
    assert found.numbers.tolist() == brute(rows, rows[:5], 4, nearness)[0].tolist()
    assert found._by_torch is False


@pytest.mark.parametrize("nearness", NEARNESSES)
def test_a_query_finds_alone_what_it_finds_among_others(
    rows: np.ndarray, nearness: Nearness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "PIECE", 4 * 24 * 100)
    wide = torch.from_numpy(rows).repeat_interleave(2, dim=1)
    queries = torch.from_numpy(rows[20:27])
    # Rows that do not follow one another, rows that are widened.
    for block in (wide[:, ::2], wide[:, ::2].bfloat16()):
        together = Nearest(queries, 8, nearness)
        # An empty block is nothing to see.
        for part in (block[:0], block, block[:0]):
            together.see(part)
        assert together.seen == len(rows)
        for number in range(len(queries)):
            alone = Nearest(queries[number : number + 1], 8, nearness)
            alone.see(block)
            assert alone.numbers[0].tolist() == together.numbers[number].tolist()
            assert alone.scores[0].tolist() == together.scores[number].tolist()


def test_equal_rows_come_in_their_order_wherever_they_stand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(collection, "MOST_ROWS", 7)
    monkeypatch.setattr(nearest, "PAIRS", 5)
    row = np.random.default_rng(0).standard_normal((1, 31)).astype(np.float32)
    same = np.repeat(row, 50, axis=0)
    for nearness in NEARNESSES:
        found = hs.search(same, same[0] * 2, 20, nearness=nearness)  # type: ignore[arg-type]
        assert numbers(found) == [list(range(20))]
        assert len(set(found.data["score"].values.ravel().tolist())) == 1


def test_more_than_there_are_gives_all_and_permuted_rows_permute_the_answer(
    rows: np.ndarray,
) -> None:
    some = rows[1:10]
    assert hs.search(some, some[0], 100).data.sizes["rank"] == 9
    order = np.random.default_rng(2).permutation(9)
    here, there = (hs.search(given, some[:2], 9) for given in (some, some[order]))
    assert order[numbers(there)].tolist() == numbers(here)
    np.testing.assert_array_equal(here.data["score"], there.data["score"])


class Mapped:
    """States of one site in a memory-mapped file, read a few rows at a time, one token
    a text.
    """

    def __init__(self, path: Path, block: int) -> None:
        self.rows, self.block = np.load(path, mmap_mode="r"), block
        self.sites, count = (Site(3),), len(self.rows)
        positions, ids, strings = [0] * count, [1] * count, ["t"] * count
        self.tokens = hs.Tokens(None, range(count), positions, ids, strings)

    def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
        for start in range(0, len(self.rows), self.block):
            yield torch.from_numpy(self.rows[start : start + self.block].copy())


def test_a_source_that_need_not_fit_in_memory(rows: np.ndarray, tmp_path: Path) -> None:
    rows, path = rows[:500], tmp_path / "rows.npy"
    order, _ = brute(rows, rows[:4], 6, "cosine")
    np.save(path, rows)
    mapped = [Mapped(path, block) for block in (1, 64, 10_000)]
    others = (np.load(path, mmap_mode="r"), torch.from_numpy(rows), rows.astype(">f4"))
    for source in (*mapped, *others):
        assert numbers(hs.search(source, rows[:4], 6)) == order.tolist()


def test_arrays_and_rows_of_states_are_searched(tiny: Tiny) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    array = hs.search(hs.embed(model, TEXTS), (model, "A dog"), 2, texts=TEXTS)
    assert set(numbers(array)[0]) == {1, 4}
    row = states.pool("last", "layer.1")[2]
    assert numbers(hs.search(states, row, 1, site="layer.1", pool="last")) == [[2]]
    with pytest.raises(StatesError, match="other weights"):
        hs.search(states, (tiny("gpt2"), "A dog"))


def test_every_token_may_be_searched(tiny: Tiny) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    row = states["layer.2"][5]
    for source, texts in ((states, None), (model, TEXTS)):
        each = hs.each_token(source)
        found = hs.search(each, row, 2, site="layer.2", texts=texts)
        first = found.data.isel(query=0, rank=0)
        assert (first["number"], first["position"], first["text"]) == (5, 5, 0)
        assert first["string"] == states.tokens.strings[5]


def test_an_encoder_decoder_is_searched_in_its_encoder(tiny: Tiny) -> None:
    model = tiny("t5")
    assert set(numbers(hs.search(model, "A dog", 2, texts=TEXTS))[0]) == {1, 4}
    pair, query = model.capture(TEXTS), (model, "A dog")
    assert set(numbers(hs.search(pair, query, 2))[0]) == {1, 4}
    found = hs.search(pair, query, 1, site="decoder.final")
    assert found.facts["site"] == "decoder.final"


ONE = np.eye(4)
ZERO = np.array([[1.0, 0], [0, 0]])
HOLED = np.array([[1.0, 2], [np.nan, 0]])
NEITHER = "neither texts nor vectors"


def search(*given: Any, **options: Any) -> Callable[..., Any]:
    return lambda model, states: hs.search(*given, **options)


def of_model(query: str, **options: Any) -> Callable[..., Any]:
    return lambda model, states: hs.search(model, query, **options)


def of_states(**options: Any) -> Callable[..., Any]:
    return lambda model, states: hs.search(states, (model, "A dog"), **options)


REFUSED: list[tuple[Callable[..., Any], type[Exception], str]] = [
    (search(ONE, ONE[0], 0), StatesError, "k must be an integer >= 1: got 0"),
    (search(ONE, ONE[0], 2.5), StatesError, "k must be an integer >= 1: got 2.5"),
    (search(ONE, ONE[0], True), StatesError, "k must be an integer >= 1: got True"),
    (search(ONE, [1.0, 2.0]), StatesError, "query is 2 wide, and the rows are 4 wide"),
    (search(ZERO, [1.0, 0]), StatesError, "row 1 is zero"),
    (search(ONE, [0.0] * 4), StatesError, "query 0 is a vector of zeros"),
    (search(ONE, [np.nan] * 4), NotFinite, "query 0 has a NaN"),
    (search(HOLED, [1.0, 0]), NotFinite, "row 1 has a NaN"),
    (search(ONE, "a text"), StatesError, "no model was given to embed it"),
    (search(ONE, []), StatesError, NEITHER),
    (search(ONE, {}), StatesError, NEITHER),
    (search(ONE, ["a", 5]), StatesError, NEITHER),
    (search(ONE, ONE[0], texts=["a"]), TextError, "4 vectors and 1 texts"),
    (search(ONE[0], ONE[0]), StatesError, r"float64 \[4\]"),
    (search(np.zeros((0, 4)), ONE[0]), StatesError, r"float64 \[0, 4\]"),
    (search([[1.0, 2.0]], [1.0, 2.0]), StatesError, "got list"),
    (search(ONE.astype(int), ONE[0]), StatesError, "int64"),
    (search(ONE, ONE[0], nearness="angle"), ArgumentError, "got 'angle'"),
    (of_model("A dog"), TextError, "no texts were given"),
    (of_model("A dog", texts=[]), TextError, "the list is empty"),
    (of_model("A dog", texts=["", "a"]), TextError, "Text 0: it is empty"),
    (of_model(" ", texts=TEXTS), TextError, "white space"),
    (of_states(texts=TEXTS), TextError, "the states have their own texts"),
    (of_states(site="layer.*"), StatesError, "names 4 sites"),
    (of_states(site="layer.9"), SiteError, "layer.9"),
    (
        lambda m, s: hs.search(ONE, (m, "a text"), nearness="l2"),
        StatesError,
        "may have been scaled",
    ),
    (
        lambda m, s: hs.search(hs.each_token(s), (m, "A dog")),
        StatesError,
        "a text has several",
    ),
]


def test_what_cannot_be_searched_is_said(tiny: Tiny) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    for call, error, said in REFUSED:
        with pytest.raises(error, match=said):
            call(model, states)


def test_the_command_reads_queries_with_the_model_of_the_states(tmp_path: Path) -> None:
    """A store that names a model which no name can load, or another than --model, is
    refused before anything is.
    """
    model = hs.load((tiny_model("bert"), tiny_tokenizer()))
    hs.extract(model, ["a cat", "the hat"], to=tmp_path / "states", sites="layer.1")
    words = ["search", "--states", str(tmp_path / "states"), "a query"]
    # Of a folder the number of layers is known, whatever was downloaded before.
    deeper = tmp_path / "deeper"
    tiny_model("llama", layers=6).save_pretrained(deeper)  # type: ignore[operator]
    other = "its states are of BertForMaskedLM, and not of deeper"
    for options, said in (
        ([], "Name the folder of that model: --model PATH"),
        (["--model", str(deeper)], other),
    ):
        done = CliRunner().invoke(cli.app, [*words, *options])
        assert done.exit_code == 2 and said in done.stderr


def test_the_command_prints_what_is_nearest(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hs, "load", lambda *given, **options: tiny("llama"))
    texts, vectors = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text("Where is \x1b[31mit?\nA dog\n")
    said = CliRunner().invoke(cli.app, ["search", str(texts), "A dog", "-k", "2"])
    assert said.exit_code == 0, said.output
    assert said.output.index("A dog") < said.output.index("Where is")
    assert "\x1b" not in said.output
    np.save(vectors, hs.embed(tiny("llama"), ["Where is it?", "A dog"]))
    words = ["search", str(vectors), "A dog", "--texts", str(texts), "--json"]
    found = CliRunner().invoke(cli.app, [*words, "-k", "1"])
    assert '"A dog"' in found.output and "Where is" not in found.output


def test_texts_beside_an_array_say_how_they_became_vectors() -> None:
    """An array does not say how it was made, so nothing can tell if both are alike."""
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    texts = ["the cat", "a mat", "on it"]
    rows = hs.embed(model, texts, site="layer.1", pool="mean:all")
    result = hs.search(rows, (model, "the cat"), texts=texts, k=1)
    said = "How the rows of the array were made is not recorded."
    assert said in result.summary()
    assert result.facts["embedded"].endswith("at final")
    of_model = hs.search(model, "the cat", texts=texts, k=1)
    assert "embedded" not in of_model.facts and said not in of_model.summary()
