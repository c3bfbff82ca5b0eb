"""An analysis of a store is the analysis of the states in it, without holding them."""

import copy
import functools
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
import xarray
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.probe.labels import labelled_rows
from hiddenscope.catalog import ANALYSES, Analysis
from hiddenscope.cli import main as cli
from hiddenscope.errors import StatesError, TextError
from hiddenscope.extract import Engine
from hiddenscope.results import story_of
from hiddenscope.states.pooling import POOLINGS
from hiddenscope.store import StorePlan, StoreSequence, create
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import vectors

WORDS = ["the", "a", "of", "river", "city", "house", "green", "old", "new", "runs"]


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("gpt2", layers=2), tiny_tokenizer()))


@pytest.fixture(scope="module")
def texts() -> list[str]:
    draw = np.random.default_rng(0)
    drawn = [" ".join(draw.choice(WORDS, 3 + number % 7)) for number in range(24)]
    # One of them comes twice.
    return [*drawn[:-1], drawn[5]]


@pytest.fixture(scope="module")
def store(
    model: hs.Model, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> hs.Store:
    return stored(model, texts, tmp_path_factory.mktemp("store") / "store")


@pytest.fixture(scope="module")
def states(store: hs.Store) -> hs.States:
    return store.to_states()


def stored(model: hs.Model, texts: list[str], path: Path) -> hs.Store:
    """A store of several units; a text that is there twice is there once."""
    return hs.extract(model, texts, path, engine=Engine(unit_bytes=2**16))


def same(one: hs.Result, two: hs.Result) -> None:
    xarray.testing.assert_identical(one.data.drop_attrs(), two.data.drop_attrs())
    assert one.facts == two.facts


def test_a_store_reads_as_its_states(
    store: hs.Store, states: hs.States, model: hs.Model, texts: list[str]
) -> None:
    captured = model.capture(texts)
    assert len(store.units) > 3
    assert store.tokens.equals(states.tokens) and states.tokens.equals(captured.tokens)
    assert store.source == states.source == captured.source
    # A batch of other texts rounds in another way.
    torch.testing.assert_close(states.values, captured.values)
    assert store.to_xarray().equals(states.to_xarray())
    row = states["final"][3].numpy()
    found, expected = (hs.search(hs.each_token(one), row, 5) for one in (store, states))
    same(found, expected)


@pytest.fixture(scope="module")
def written(
    model: hs.Model,
    states: hs.States,
    texts: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with the states as a store and as a file, the model, and the labels of
    the texts.
    """
    folder = tmp_path_factory.mktemp("written")
    stored(model, texts, folder / "store")
    states.save(folder / "states.safetensors")
    model.module.save_pretrained(folder / "model")  # type: ignore[operator]
    model.tokenizer.save_pretrained(folder / "model")  # type: ignore[union-attr]
    lines = []
    for text in texts:
        words = text.split()
        lines.append(
            json.dumps({"text": text, "first": words[0], "length": len(words)})
        )
    (folder / "labels.jsonl").write_text("\n".join(lines))
    (folder / "others.jsonl").write_text("\n".join(lines[::-1]))
    direction = hs.Direction.of(states["layer.2"][3], sites="layer.2")
    direction.save(folder / "direction.gguf")
    return folder


Call = Callable[[Any, Path], hs.Result]
QUERIES = ["old river", "the city"]
ASKED: dict[str, tuple[list[str], Call]] = {
    "profile": (["--sample", "50"], lambda source, _: hs.profile(source, sample=50)),
    "project": (
        ["{labels}", "--label", "first", "--method", "pca", "--sites", "layer.2"],
        lambda source, labels: hs.project(
            source, hs.read(labels, label="first"), method="pca", sites="layer.2"
        ),
    ),
    "probe": (
        ["{labels}", "--label", "length", "--task", "regress", "--sites", "layer.2"],
        lambda source, labels: hs.probe(
            source, hs.read(labels, label="length"), task="regress", sites="layer.2"
        ),
    ),
    "search": (
        [*QUERIES, "-k", "4", "--model", "{model}"],
        lambda source, labels: hs.search(
            source, (hs.load(labels.parent / "model"), QUERIES), 4
        ),
    ),
    "cluster": (
        ["--smallest", "4"],
        lambda source, _: hs.cluster(source, smallest=4),
    ),
    "features": (
        ["--dictionary", "pca", "--site", "layer.2"],
        lambda source, _: hs.features(source, None, "pca", site="layer.2"),
    ),
    "examples": (
        ["--direction", "{direction}"],
        lambda source, labels: hs.examples(
            source, hs.Direction.load(labels.parent / "direction.gguf")
        ),
    ),
}


@pytest.mark.parametrize("word", ASKED)
def test_a_store_and_states_give_the_same_here_and_by_the_command(
    word: str, written: Path, store: hs.Store, states: hs.States, tmp_path: Path
) -> None:
    words, call = ASKED[word]
    labels = written / "labels.jsonl"
    wanted = call(states, labels)
    same(call(store, labels), wanted)
    wanted.save(tmp_path / "wanted.json")
    places = {"labels": labels, "model": written / "model"}
    places["direction"] = written / "direction.gguf"
    given = [one.format_map(places) for one in words]
    for name in ("store", "states.safetensors"):
        out = tmp_path / f"{name}.json"
        source = ["--states", str(written / name), "--out", str(out)]
        done = CliRunner().invoke(cli.app, [word, *given, *source])
        assert done.exit_code == 0, (name, done.output)
        same(hs.Result.load(out), hs.Result.load(tmp_path / "wanted.json"))


def test_labels_of_states_come_from_a_file_or_a_frame_of_their_texts(
    store: hs.Store, states: hs.States, texts: list[str], tmp_path: Path
) -> None:
    labels = [text.split()[-1] < "n" for text in texts]
    frame = pandas.DataFrame({"text": texts, "label": labels})
    path = tmp_path / "reviews.csv"
    frame.to_csv(path, index=False)
    ask = functools.partial(hs.project, sites="layer.2", method="pca")
    wanted = ask(store, [str(label) for label in labels])
    for source, data in ((store, str(path)), (states, frame), (store, hs.read(path))):
        xarray.testing.assert_equal(ask(source, data).data, wanted.data)
    rows = labelled_rows(store, str(path), "classify", "layer.2", "mean")
    assert len(rows.labels) == 23, "of two copies one counts"
    # Where the texts are not kept, their number is compared.
    ids = hs.States(
        states.sites, states.values, replace(states.tokens, texts=None), states.source
    )
    for source, data, what in (
        (store, frame[::-1], "text 0 differs"),
        (store, frame[:-1], "it has 23 texts, and the states are of 24"),
        (
            ids,
            pandas.concat([frame, frame]),
            "it has 48 texts, and the states are of 24",
        ),
    ):
        with pytest.raises(TextError, match=what):
            ask(source, data)


def test_the_folder_of_a_store_can_be_the_source_of_a_search(written: Path) -> None:
    words = [*QUERIES, "-k", "4", "--model", str(written / "model"), "--json"]
    store = str(written / "store")
    told = []
    for first in (["--states", store], [store], [f"@{store}"]):
        done = CliRunner().invoke(cli.app, ["search", *first, *words])
        assert done.exit_code == 0, done.output
        told.append(json.loads(done.stdout)["facts"])
    assert told[0] == told[1] == told[2]


def reads_states(analysis: Analysis) -> bool:
    first, *_ = inspect.signature(getattr(hs, analysis.word)).parameters.values()
    return any(
        word in str(first.annotation)
        for word in ("Readable", "Searchable", "Reference")
    )


def test_every_analysis_of_states_reads_stores() -> None:
    two_sided = {"compare", "drift"}  # each side of drift may be the path of states
    assert set(ASKED) | two_sided == {one.word for one in ANALYSES if reads_states(one)}


REFUSED: list[tuple[str, str]] = [
    ("profile text --states {store}", "Cannot use texts with --states"),
    ("profile --states {store} --model gpt2", "Cannot use --model with --states"),
    ("cluster --states {store} --truncate", "Cannot use --truncate with --states"),
    ("profile --states nosuch", "there is no such file or folder"),
    ("profile --states {0}", "it has no plan.json, so it is not a store"),
    ("profile --states {0}/labels.jsonl", "it is not a .safetensors file"),
    ("profile --states {store} --sites layer.9", "No site 'layer.9'"),
    ("probe {0}/others.jsonl --label first --states {store}", "text 0 differs"),
    ("probe cities-complete --states {store}", "are not those of the states"),
    (
        "project {0}/labels.jsonl cities-complete --states {store}",
        "Cannot compare datasets",
    ),
    ("project --states {store} --other gpt2", "Cannot use --other with --states"),
    ("project", "No dataset"),
    ("search", "No source to search"),
    ("search --states {store}", "No texts"),
    ("search {store}", "no query was given"),
    ("probe {store}", "it is a store of states. Give it as --states"),
    ("embed @{store}", "it is a store of states. Give it as --states"),
]


def test_what_has_no_use_beside_states_is_refused(written: Path) -> None:
    for words, what in REFUSED:
        given = words.format(written, store=written / "store").split()
        done = CliRunner().invoke(cli.app, given)
        assert done.exit_code == 2 and what in done.stderr, done.output


def scaled(model: hs.Model, factor: float) -> hs.Model:
    """The model with other weights in its second block."""
    module: Any = copy.deepcopy(model.module)
    module.transformer.h[1].mlp.c_fc.weight.data.mul_(factor)
    return hs.load((module, model.tokenizer))


def test_drift(model: hs.Model, tmp_path: Path) -> None:
    few = ["old river runs", "the city", "old river runs", "a house by the river"]
    store = stored(model, few, tmp_path / "store")
    against = stored(scaled(model, 1.05), few, tmp_path / "other")
    states, other = store.to_states(), against.to_states()
    same(hs.drift(store, against, None), hs.drift(states, other, None))
    found = hs.drift(model, store, None)
    same(found, hs.drift(model, states, None))
    assert not found.facts["drifted"]
    found = hs.drift(model, tmp_path / "other", None)
    assert found.facts["first_site"] == "layer.2"


@pytest.fixture(scope="module")
def windowed(
    model: hs.Model, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> hs.Store:
    """A store of texts of which two are cut into windows that overlap."""
    longer = [" ".join(texts[:3]), texts[0], " ".join(texts[6:10])]
    corpus = hs.Corpus(longer, window=20, stride=12)
    return hs.extract(model, corpus, tmp_path_factory.mktemp("windowed") / "store")


def test_drift_runs_over_the_windows_of_a_store(
    model: hs.Model, windowed: hs.Store
) -> None:
    found = hs.drift(model, windowed, None)
    assert not found.facts["drifted"] and found.facts["texts"] == 3
    positions = found.data["position"].to_numpy().tolist()
    assert positions == windowed.tokens.positions.tolist()
    drifted = hs.drift(windowed, scaled(model, 1.1), None)
    assert drifted.facts["first_site"] == "layer.2"
    cut = [text[:60] for text in windowed.tokens.texts or ()]
    said = "computed in windows of long texts. Leave the texts out"
    with pytest.raises(StatesError, match=said):
        hs.drift(model, windowed, cut)


def test_drift_reads_a_store_on_the_command_line(
    written: Path, windowed: hs.Store
) -> None:
    words = ["drift", str(windowed.path), "--model", str(written / "model")]
    done = CliRunner().invoke(cli.app, words)
    assert done.exit_code == 0, done.output
    assert "No drift: in one dtype and with one attention kernel" in done.output


def test_drift_refuses_a_store_that_has_not_every_token(
    model: hs.Model, texts: list[str], tmp_path: Path
) -> None:
    def extract(name: str, given: Any, pool: Any = None) -> hs.Store:
        return hs.extract(model, given, tmp_path / name, sites="layer.1", pool=pool)

    few = extract("every", hs.Corpus(texts[:4], every=2))
    mean, others = (extract(name, texts[:4], "mean") for name in ("mean", "again"))
    for store, what in (
        (few, "one token in 2"),
        (mean, "the mean:sinkless of each text"),
    ):
        with pytest.raises(StatesError, match=f"the store keeps {what} alone"):
            hs.drift(model, store, None)
    assert hs.drift(mean, others, None).facts["drifted"] is False
    different = extract("others", texts[4:8], "mean")
    with pytest.raises(StatesError, match="The two saved runs are of different texts"):
        hs.drift(mean, different, None)


def test_a_position_in_overlapping_windows_is_that_of_the_text(
    windowed: hs.Store,
) -> None:
    whole = windowed.to_states()
    tokens = whole.tokens
    lengths = [int(windowed.of(text).tokens.positions.max()) + 1 for text in range(3)]
    shortest = min(lengths)
    for token in (0, shortest - 1, -1, -2, -shortest):
        found = vectors(windowed, sites="layer.2", pool=token).values[0]
        for text in range(3):
            place = token if token >= 0 else lengths[text] + token
            here = (tokens.text == text) & (tokens.positions == place)
            row = whole["layer.2"][np.flatnonzero(here)[0]]
            torch.testing.assert_close(found[text], row.float())
    said = rf"text 1 is at {shortest - 1}. Choose a position that every text"
    with pytest.raises(TextError, match=said):
        vectors(windowed, sites="layer.2", pool=shortest)
    long, place = windowed.of(2), lengths[2] - 3
    assert place > 20
    row = long.to_states()["layer.2"][np.flatnonzero(long.tokens.positions == place)[0]]
    found = vectors(long, sites="layer.2", pool=place).values[0]
    torch.testing.assert_close(found[0], row.float())


@pytest.fixture(scope="module")
def pooled(
    model: hs.Model, texts: list[str], tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, hs.Store]:
    """Stores of one row for each text, or window, by how they were pooled; and of all
    tokens, by None.
    """
    folder = tmp_path_factory.mktemp("pooled")
    longer = [*texts[:-2], " ".join(texts[:6]), texts[3]]
    corpus = hs.Corpus(longer, window=40, stride=20)
    ways = (None, "mean", "max", "last", "first", 0, -1, 2)
    return {
        way: hs.extract(model, corpus, folder / f"{way}", sites="layer.2", pool=way)
        for way in ways
    }


def test_pooled_states_are_taken_for_what_they_are(
    pooled: dict[Any, hs.Store],
) -> None:
    whole = pooled[None].to_states()
    same_as = {"first": (0,), 0: ("first",), "last": (-1,), -1: ("last",)}
    said = r"from pooled states: the store keeps .*. Give "
    for way in ("mean", "max", "last", "first", 0, -1, 2):
        store = pooled[way]
        name = "mean:sinkless" if way == "mean" else way
        assert store.pooled == str(name)
        assert len(store) > len(store.texts), "some texts have several windows"
        for token in (*POOLINGS, 0, -1, 2):
            if token not in (name, *same_as.get(way, ())):
                with pytest.raises(StatesError, match=said):
                    vectors(store, sites="layer.2", pool=token)
            elif way != "mean":  # which is the mean of the windows' means
                found = vectors(store, sites="layer.2", pool=token).values
                wanted = vectors(whole, sites="layer.2", pool=token).values
                torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("how", ["mean", 0])
def test_a_profile_of_pooled_states_speaks_of_vectors(
    pooled: dict[Any, hs.Store], how: Any
) -> None:
    store = pooled[how]
    result = hs.profile(store)
    assert result.facts["pooled"] == store.pooled
    assert result.facts["vectors"] == len(store)
    assert "tokens" not in result.facts and result.facts["vectors_kept"] == len(store)
    (facts,) = result.facts["stacks"]
    norms = np.linalg.norm(np.asarray(store["layer.2"]), axis=1)
    median = result.data["norm_median"].sel(site="layer.2")
    assert median == pytest.approx(np.median(norms), rel=1e-6)
    assert not {"first_token_norm", "other_tokens_norm", "norm_ratio"} & set(facts)
    assert facts["vector_norm"] > 0
    largest = facts["largest_norm"]
    assert set(largest) == {"norm", "site", "text"}
    assert largest["site"] == "layer.2"
    assert largest["text"] == store.tokens.text[np.argmax(norms)]
    assert largest["norm"] == pytest.approx(norms.max(), rel=1e-6)
    sections = story_of(result)
    assert sections and "token" not in result.summary()
    for section in sections:
        assert "token" not in section.prose + section.reading
    for name in map(str, result.data):
        assert "first" not in name and "others" not in name


def test_a_text_is_found_among_pooled_states(
    model: hs.Model, pooled: dict[Any, hs.Store]
) -> None:
    for way in ("mean", "max", "last"):
        strings = pooled[way].tokens.texts
        assert strings is not None
        query = strings[7]
        found = hs.search(pooled[way], (model, query), 1)
        assert found.facts["token"] == pooled[way].pooled
        assert found.data["score"].values[0, 0] == pytest.approx(1.0)
        assert strings[int(found.data["number"].values[0, 0])] == query
    labels, said = ["a", "b"] * 12, "the last token of each text from pooled states"
    with pytest.raises(StatesError, match=f"Cannot take {said}"):
        hs.probe(pooled["mean"], labels, pool="last")
    assert hs.probe(pooled["mean"], labels).facts["token"] == "mean:sinkless"
    assert hs.cluster(pooled[-1]).facts["token"] == -1


def test_pooled_texts_without_strings_are_no_copies_of_one_another(
    tmp_path: Path,
) -> None:
    site, source = "layer.0", {"model": "toy"}
    plan = StorePlan(source, {}, (site,), {site: 8}, "float32", pool="mean")
    sequences = [
        StoreSequence(text, 0, (text, text + 1), ((-1, -1),) * 2, 0)
        for text in range(24)
    ]
    writer = create(tmp_path / "store", plan, [sequences])
    values = np.random.default_rng(0).standard_normal((24, 8), dtype=np.float32)
    values[::2] += 3
    writer.commit("000000", {site: values})
    writer.complete()
    labels = [text % 2 for text in range(24)]
    # An older store: its means are of all tokens.
    store = hs.open(tmp_path / "store")
    with pytest.raises(StatesError, match="Give 'mean:all'"):
        hs.probe(store, labels, pool="mean")
    found = hs.probe(store, labels, pool="mean:all")
    assert (found.facts["rows"], found.facts["texts"]) == (24, 24)
