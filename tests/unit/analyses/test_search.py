"""Search: exactly the nearest, held against brute force in numpy and against
scikit-learn, ties and all.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from hiddenscope.errors import NotFinite, SiteError, StatesError, TextError
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import collection, nearest
from hiddenscope.vectors.nearest import Nearest
from hiddenscope.views import Lines, sections_of
from hiddenscope.views.kinds.search import views

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
            lengths = [
                np.sqrt((rows * rows).sum(1)) * np.sqrt((query * query).sum())
                for query in queries
            ]
            scores = scores / np.stack(lengths)
        order = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    return order, np.take_along_axis(scores, order, 1)


class Mapped:
    """States of one site in a memory-mapped file, read a few rows at a time, one token
    a text.
    """

    def __init__(self, path: Path, rows: np.ndarray, block: int) -> None:
        np.save(path, rows)
        self.path, self.block, self.sites, count = path, block, (Site(3),), len(rows)
        self.tokens = hs.Tokens(
            None, range(count), [0] * count, [1] * count, ["t"] * count
        )

    def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
        mapped = np.load(self.path, mmap_mode="r")
        for start in range(0, len(mapped), self.block):
            yield torch.from_numpy(mapped[start : start + self.block].copy())


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    """Rows of many lengths, in which every tenth is one of three that come again and
    again.
    """
    generator = np.random.default_rng(3)
    made = generator.standard_normal((5000, 24)) * generator.lognormal(0, 1, (5000, 1))
    made[::10] = made[:3][generator.integers(0, 3, 500)]
    return made.astype(np.float32)


@pytest.mark.parametrize("nearness", ["cosine", "dot", "l2"])
@pytest.mark.parametrize("k", [1, 7, 600])
def test_the_nearest_are_those_of_brute_force(
    rows: np.ndarray, nearness: str, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = np.concatenate(
        [rows[:3], np.random.default_rng(1).standard_normal((4, 24)).astype(np.float32)]
    )
    order, scores = brute(rows, queries, k, nearness)
    for block in (333, 4096):
        monkeypatch.setattr(collection, "MOST_ROWS", block)
        found = hs.search(rows, queries, k, nearness=nearness).data
        assert found["number"].values.tolist() == order.tolist()
        np.testing.assert_allclose(
            found["score"].values, scores, rtol=1e-12, atol=1e-12
        )


@pytest.mark.parametrize(
    ("nearness", "metric"), [("cosine", "cosine"), ("l2", "euclidean")]
)
def test_scikit_learn_finds_the_same(nearness: str, metric: str) -> None:
    from sklearn.neighbors import NearestNeighbors

    generator = np.random.default_rng(5)
    rows, queries = (
        generator.standard_normal((2000, 16)),
        generator.standard_normal((9, 16)),
    )
    theirs = (
        NearestNeighbors(n_neighbors=8, metric=metric, algorithm="brute")
        .fit(rows)
        .kneighbors(queries)
    )
    ours = hs.search(rows, queries, 8, nearness=nearness).data
    assert ours["number"].values.tolist() == theirs[1].tolist()
    distances = 1 - ours["score"] if nearness == "cosine" else ours["score"]
    np.testing.assert_allclose(distances, theirs[0], rtol=1e-6, atol=1e-9)


def test_what_float32_cannot_tell_apart_is_told_apart() -> None:
    base = np.zeros((300, 8))
    base[:, 0] = 1e4
    base[:, 1] = 1e-5 * np.random.default_rng(0).permutation(300)
    query = np.array([1.0, 1.0, 0, 0, 0, 0, 0, 0])
    # Products in float32 are equal.
    assert len(np.unique(base.astype(np.float32) @ query.astype(np.float32))) < 50
    expected = np.argsort(-base[:, 1], kind="stable")[:10]
    assert (
        hs.search(base, query, 10, nearness="dot").data["number"].values[0].tolist()
        == expected.tolist()
    )


@pytest.mark.parametrize("nearness", ["cosine", "dot", "l2"])
def test_queries_that_every_row_points_away_from(nearness: str) -> None:
    """The worst of the nearest then has a cosine below zero, or just at zero, which is
    the lowest bar there is.
    """
    generator = np.random.default_rng(4)
    rows = np.abs(generator.standard_normal((4000, 16))).astype(np.float32)
    rows[:, 15] = 0
    queries = np.stack([-rows[0], np.eye(16, dtype=np.float32)[15], rows[1]])
    order, scores = brute(rows, queries, 9, nearness)
    found = hs.search(rows, queries, 9, nearness=nearness).data  # type: ignore[arg-type]
    assert found["number"].values.tolist() == order.tolist()
    np.testing.assert_allclose(found["score"].values, scores, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("nearness", ["cosine", "dot", "l2"])
def test_products_that_are_too_coarse_are_not_used(
    rows: np.ndarray, nearness: nearest.Nearness, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.Tensor.__matmul__

    def coarse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (
            matmul(a.bfloat16(), b.bfloat16()).float()
            if a.dtype == torch.float32
            else matmul(a, b)
        )

    monkeypatch.setattr(torch.Tensor, "__matmul__", coarse)
    found = Nearest(torch.from_numpy(rows[:5]), 4, nearness)
    found.see(torch.from_numpy(rows))
    assert found.numbers.tolist() == brute(rows, rows[:5], 4, nearness)[0].tolist()
    assert found._by_torch is False


@pytest.mark.parametrize("nearness", ["cosine", "dot", "l2"])
def test_a_query_finds_alone_what_it_finds_among_others(
    rows: np.ndarray, nearness: nearest.Nearness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nearest, "PIECE", 4 * 24 * 100)
    wide = torch.from_numpy(rows).repeat_interleave(2, dim=1)
    queries = torch.from_numpy(rows[20:27])
    # Rows that do not follow one another, rows that are widened.
    for block in (
        wide[:, ::2],
        wide[:, ::2].bfloat16(),
    ):
        together = Nearest(queries, 8, nearness)
        together.see(block)
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
    same = np.repeat(
        np.random.default_rng(0).standard_normal((1, 31)).astype(np.float32), 50, axis=0
    )
    for nearness in ("cosine", "dot", "l2"):
        found = hs.search(same, same[0] * 2, 20, nearness=nearness).data  # type: ignore[arg-type]
        assert found["number"].values.tolist() == [list(range(20))]
        assert len(set(found["score"].values.ravel().tolist())) == 1


def test_more_than_there_are_gives_all_and_permuted_rows_permute_the_answer(
    rows: np.ndarray,
) -> None:
    some = rows[1:10]
    assert hs.search(some, some[0], 100).data.sizes["rank"] == 9
    order = np.random.default_rng(2).permutation(9)
    here, there = (
        hs.search(some, some[:2], 9).data,
        hs.search(some[order], some[:2], 9).data,
    )
    assert order[there["number"].values].tolist() == here["number"].values.tolist()
    np.testing.assert_array_equal(here["score"], there["score"])


@pytest.mark.parametrize("block", [1, 64, 10_000])
def test_a_source_that_need_not_fit_in_memory(
    rows: np.ndarray, block: int, tmp_path: Path
) -> None:
    rows = rows[:500]
    order, _ = brute(rows, rows[:4], 6, "cosine")
    mapped = Mapped(tmp_path / "rows.npy", rows, block)
    for source in (
        mapped,
        np.load(mapped.path, mmap_mode="r"),
        torch.from_numpy(rows),
        rows.astype(">f4"),
    ):
        assert (
            hs.search(source, rows[:4], 6).data["number"].values.tolist()
            == order.tolist()
        )


def test_a_model_and_its_states_find_the_same(tiny: Callable[..., hs.Model]) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    found = hs.search(model, ["A dog", "The end."], 3, texts=TEXTS)
    assert found.data["string"].values[:, 0].tolist() == ["A dog", "The end."]
    # The same text, within rounding.
    assert set(found.data["number"].values[0, :2].tolist()) == {
        1,
        4,
    }
    np.testing.assert_allclose(found.data["score"].values[:, 0], 1, atol=1e-6)
    assert (found.facts["searched"], found.facts["unit"]) == (6, "text")
    assert (found.facts["site"], found.facts["token"], found.facts["nearness"]) == (
        "final",
        "mean",
        "cosine",
    )
    again = hs.search(states, (model, ["A dog", "The end."]), 3)
    assert again.data["number"].values.tolist() == found.data["number"].values.tolist()
    assert again.source == found.source
    array = hs.search(hs.embed(model, TEXTS), (model, "A dog"), 2, texts=TEXTS)
    assert set(array.data["number"].values[0].tolist()) == {1, 4}
    last = hs.search(
        states, states.pool("last", "layer.1")[2], 1, site="layer.1", pool="last"
    ).data
    assert last["number"].values.tolist() == [[2]]


def test_every_token_may_be_searched(tiny: Callable[..., hs.Model]) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    for source, texts in ((states, None), (model, TEXTS)):
        found = hs.search(
            hs.each_token(source), states["layer.2"][5], 2, site="layer.2", texts=texts
        ).data
        assert found["number"].values[0, 0] == 5
        assert found["position"].values[0, 0] == 5
        assert found["string"].values[0, 0] == states.tokens.strings[5]
        assert found["text"].values[0, 0] == 0


def test_an_encoder_decoder_is_searched_in_its_encoder(
    tiny: Callable[..., hs.Model],
) -> None:
    model = tiny("t5")
    assert set(
        hs.search(model, "A dog", 2, texts=TEXTS).data["number"].values[0].tolist()
    ) == {1, 4}
    pair = model.capture(TEXTS)
    assert set(
        hs.search(pair, (model, "A dog"), 2).data["number"].values[0].tolist()
    ) == {1, 4}
    assert (
        hs.search(pair, (model, "A dog"), 1, site="decoder.final").facts["site"]
        == "decoder.final"
    )


ONE = np.eye(4)
ZERO = np.array([[1.0, 0], [0, 0]])


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda m, s: hs.search(ONE, ONE[0], 0),
            StatesError,
            "k must be an integer >= 1, got 0",
        ),
        (
            lambda m, s: hs.search(ONE, ONE[0], 2.5),
            StatesError,
            "k must be an integer >= 1, got 2.5",
        ),
        (
            lambda m, s: hs.search(ONE, ONE[0], True),
            StatesError,
            "k must be an integer >= 1, got True",
        ),
        (
            lambda m, s: hs.search(ONE, [1.0, 2.0]),
            StatesError,
            "the query is 2 wide, and the rows are 4 wide",
        ),
        (lambda m, s: hs.search(ZERO, [1.0, 0]), StatesError, "row 1 is zero"),
        (
            lambda m, s: hs.search(ONE, [0.0] * 4),
            StatesError,
            "query 0 is a vector of zeros",
        ),
        (lambda m, s: hs.search(ONE, [np.nan] * 4), NotFinite, "query 0 has a NaN"),
        (
            lambda m, s: hs.search(np.array([[1.0, 2], [np.nan, 0]]), [1.0, 0]),
            NotFinite,
            "row 1 has a NaN",
        ),
        (
            lambda m, s: hs.search(ONE, "a text"),
            StatesError,
            "no model was given to embed it",
        ),
        (
            lambda m, s: hs.search(ONE, (m, "a text"), nearness="l2"),
            StatesError,
            "may have been scaled",
        ),
        (lambda m, s: hs.search(ONE, []), StatesError, "neither texts nor vectors"),
        (lambda m, s: hs.search(ONE, {}), StatesError, "neither texts nor vectors"),
        (
            lambda m, s: hs.search(ONE, ["a", 5]),
            StatesError,
            "neither texts nor vectors",
        ),
        (
            lambda m, s: hs.search(ONE, ONE[0], texts=["a"]),
            TextError,
            "4 vectors and 1 texts",
        ),
        (lambda m, s: hs.search(ONE[0], ONE[0]), StatesError, r"float64 \[4\]"),
        (
            lambda m, s: hs.search(np.zeros((0, 4)), ONE[0]),
            StatesError,
            r"float64 \[0, 4\]",
        ),
        (lambda m, s: hs.search([[1.0, 2.0]], [1.0, 2.0]), StatesError, "got list"),
        (lambda m, s: hs.search(ONE.astype(int), ONE[0]), StatesError, "int64"),
        (
            lambda m, s: hs.search(ONE, ONE[0], nearness="angle"),
            StatesError,
            "No nearness 'angle'",
        ),
        (lambda m, s: hs.search(m, "A dog"), TextError, "no texts were given"),
        (lambda m, s: hs.search(m, "A dog", texts=[]), TextError, "the list is empty"),
        (
            lambda m, s: hs.search(m, "A dog", texts=["", "a"]),
            TextError,
            "Text 0: it is empty",
        ),
        (lambda m, s: hs.search(m, " ", texts=TEXTS), TextError, "white space"),
        (
            lambda m, s: hs.search(s, (m, "A dog"), texts=TEXTS),
            TextError,
            "the states have their own texts",
        ),
        (
            lambda m, s: hs.search(hs.each_token(s), (m, "A dog")),
            StatesError,
            "a text has several",
        ),
        (
            lambda m, s: hs.search(s, (m, "A dog"), site="layer.*"),
            StatesError,
            "names 4 sites",
        ),
        (lambda m, s: hs.search(s, (m, "A dog"), site="layer.9"), SiteError, "layer.9"),
    ],
)
def test_what_cannot_be_searched_is_said(
    tiny: Callable[..., hs.Model],
    call: Callable[..., object],
    error: type[Exception],
    said: str,
) -> None:
    model = tiny("llama")
    with pytest.raises(error, match=said):
        call(model, model.capture(TEXTS))


def test_a_query_of_another_model_is_refused(tiny: Callable[..., hs.Model]) -> None:
    with pytest.raises(StatesError, match="other weights"):
        hs.search(tiny("llama").capture(TEXTS), (tiny("gpt2"), "A dog"))


@pytest.mark.parametrize("queries", [1, 6])
def test_it_is_shown_and_kept(
    tiny: Callable[..., hs.Model], queries: int, tmp_path: Path
) -> None:
    found = hs.search(tiny("llama"), TEXTS[:queries], 3, texts=TEXTS)
    for suffix in ("html", "csv"):
        found.save(tmp_path / f"found.{suffix}")
    assert (tmp_path / "found.html").stat().st_size > 10_000
    assert [type(view).__name__ for view in views(found)] == ["Grid", "Lines"]
    assert next(views(found)).title.startswith("Nearest to")
    section, falling = sections_of(found)
    assert len(section.tables) == queries and not section.views, "the lists come first"
    assert falling.folded and all(isinstance(view, Lines) for view in falling.views)
    for number, table in enumerate(section.tables):
        here = found.data.isel(query=number)
        assert table.columns == ("rank", "cosine", "text")
        assert [row[2] for row in table.rows] == here["string"].values.tolist(), (
            "texts in full"
        )
        assert [row[1] for row in table.rows] == here["score"].values.tolist()
    assert (tmp_path / "found.html").read_text("utf-8").count(
        '<figure class="listing">'
    ) == queries
    found.save(tmp_path / "found.json")
    assert hs.Result.load(tmp_path / "found.json").equals(found)
    hs.search(ONE, ONE[:queries], 2).save(tmp_path / "numbers.png")
    found = hs.search(
        hs.each_token(tiny("llama").capture(TEXTS)), np.ones((queries, 64)), 3
    )
    found.save(tmp_path / "tokens.png")


@pytest.mark.real
def test_a_sentence_encoder_finds_what_is_meant(minilm: hs.Model) -> None:
    texts = [
        "Simmer the sauce for twenty minutes.",
        "The probe entered orbit around Saturn.",
        "The bank raised rates.",
    ]
    found = hs.search(minilm, ["cooking", "space travel", "money"], 1, texts=texts)
    assert found.data["number"].values.ravel().tolist() == [0, 1, 2]


@pytest.mark.real
def test_the_command_prints_what_is_nearest(minilm: hs.Model, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text(
        "Simmer the \x1b[31msauce.\nThe probe entered orbit.\nThe bank raised rates.\n"
    )
    said = CliRunner().invoke(
        cli.app, ["search", str(texts), "outer space", "-k", "3", "--model", "minilm"]
    )
    assert said.exit_code == 0, said.output
    assert said.output.index("The probe entered orbit.") < said.output.index("sauce")
    assert "\x1b" not in said.output
    vectors = tmp_path / "vectors.npy"
    made = CliRunner().invoke(
        cli.app, ["embed", f"@{texts}", "--out", str(vectors), "--model", "minilm"]
    )
    assert made.exit_code == 0, made.output
    options = ["--texts", str(texts), "--json", "-k", "1", "--model", "minilm"]
    found = CliRunner().invoke(
        cli.app, ["search", str(vectors), "outer space", *options]
    )
    assert "The probe entered orbit." in found.output


def test_an_empty_block_is_nothing_to_see(rows: np.ndarray) -> None:
    found, plain = (Nearest(torch.from_numpy(rows[:1]), 3) for _ in range(2))
    for block in (rows[:0], rows, rows[:0]):
        found.see(torch.from_numpy(block))
    plain.see(torch.from_numpy(rows))
    assert found.seen == len(rows)
    assert (found.numbers == plain.numbers).all()


def test_the_command_reads_queries_with_the_model_of_the_states(tmp_path: Path) -> None:
    """A store that names a model which no name can load, or another than --model, is
    refused before anything is.
    """
    model = hs.load((tiny_model("bert"), tiny_tokenizer()))
    hs.extract(model, ["a cat", "the hat"], to=tmp_path / "states", sites="layer.1")
    words = ["search", "--states", str(tmp_path / "states"), "a query"]
    done = CliRunner().invoke(cli.app, words)
    assert (
        done.exit_code == 2
        and "Name the folder of that model: --model PATH" in done.stderr
    )
    done = CliRunner().invoke(cli.app, [*words, "--model", "smollm2"])
    assert (
        done.exit_code == 2
        and "its states are of BertForMaskedLM, and not of smollm2" in done.stderr
    )
