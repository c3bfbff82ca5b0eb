"""Kept states in the workbench: listed, read in pages, searched and analysed."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.app.cells import Models, fit_dictionary
from hiddenscope.app.library import Library, read_texts
from hiddenscope.app.settings import Settings
from hiddenscope.cli import main as cli
from hiddenscope.errors import Error
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.workbench.code import check_code, run_python, same
from tests.workbench.serving import Bench
from tests.workbench.texts import TEXTS

runner = CliRunner()
STORE, FILE = "corpora/states", "corpora/kept.safetensors"
CITIES = hs.read("cities-incomplete")
LABELLED = {"data": "cities-incomplete", "sites": "layer.1"}


@pytest.mark.parametrize("label", [STORE, FILE])
def test_kept_states_are_listed_and_their_texts_are_read_in_pages(
    bench: Bench, store: hs.Store, kept: hs.States, label: str
) -> None:
    source, total = (store, len(TEXTS)) if label == STORE else (kept, 5)
    listed = {one["label"]: one for one in bench.ask("GET", "/api/stores").json}[label]
    told = {
        "sites": [str(site) for site in source.sites],
        "tokens": len(source.tokens),
        "texts": total,
        "dtype": "float32",
        "width": kept.width,
        "complete": True,
        "model": "tiny",
    }
    assert {name: listed[name] for name in told} == told and listed["bytes"] > 0
    name, read = bench.store(label), []
    for first in range(0, total + 3, 3):
        page = bench.ask("GET", f"/api/stores/{name}/texts?first={first}&count=3").json
        assert (page["total"], page["first"]) == (total, first)
        read += page["texts"]
    assert [one["text"] for one in read] == list(TEXTS[:total])
    assert [one["number"] for one in read] == list(range(total))
    assert [one["tokens"] for one in read] == source.tokens.lengths.tolist()
    for count in (0, 101):
        asked = bench.ask("GET", f"/api/stores/{name}/texts?count={count}")
        assert asked.status == 422


def test_the_norms_of_a_text_come_from_the_store(
    bench: Bench, store: hs.Store, tmp_path: Path
) -> None:
    answer = bench.answer("kept", store=bench.store(STORE), text=4)
    norms = bench.result(answer, tmp_path).data["norm"]
    own = store.of(4)
    for site in own.sites:
        expected = np.linalg.norm(np.asarray(own[site], dtype=np.float64), axis=1)
        assert norms.sel(site=str(site)).to_numpy() == pytest.approx(expected, rel=1e-6)
    result = run_python(answer, tmp_path)["result"]
    assert result.data["norm"].to_numpy() == pytest.approx(norms.to_numpy())
    assert answer["views"][0]["title"] == "The norm of every state of text 4, of tiny"


@pytest.mark.parametrize("label", [STORE, FILE])
def test_the_nearest_states_are_those_of_all_rows(
    bench: Bench, store: hs.Store, kept: hs.States, label: str, tmp_path: Path
) -> None:
    source = store if label == STORE else kept
    given = {"text": 3, "site": "layer.2", "token": 5, "k": 4}
    answer = bench.answer("nearest", store=bench.store(label), **given)
    rows = np.asarray(source["layer.2"], dtype=np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    at = source.tokens.rows(3).start + 5
    cosines = units @ units[at]
    cosines[at] = -np.inf
    scores = [one["score"] for one in answer["nearest"]]
    assert scores[:4] == pytest.approx(np.sort(cosines)[::-1][:4], abs=1e-6)
    for one in answer["nearest"]:
        row = source.tokens.rows(one["text"]).start + one["token"]
        assert cosines[row] == pytest.approx(one["score"], abs=1e-6)
        assert source.tokens.strings[row] == one["string"]
    result = run_python(answer, tmp_path)["result"]
    assert result.data.equals(bench.result(answer, tmp_path).data)
    job = bench.over("nearest", store=bench.store(label), **given | {"token": 999})
    assert job["state"] == "failed" and "No state at token 999" in job["error"]


def test_a_search_in_a_store_names_its_texts(
    bench: Bench, store: hs.Store, tiny_name: str, tmp_path: Path
) -> None:
    query = "The rest of number 7 is here."
    asked = {"store": bench.store(STORE), "query": query, "k": 3}
    answer = bench.answer("store", tiny_name, **asked)
    first = answer["nearest"][0]
    assert (first["string"], first["text"]) == (query, TEXTS.index(query))
    assert first["score"] == pytest.approx(1, abs=1e-4) and first["token"] is None
    check_code(answer, bench.result(answer, tmp_path), tmp_path)
    other = bench.over("store", bench.folder("models/other"), **asked)
    assert other["state"] == "failed" and "other weights" in other["error"]


def test_states_of_two_stacks_are_searched_by_the_code_too(
    bench: Bench, root: Path, tmp_path: Path
) -> None:
    """At a site of the encoder, which is not the last there is."""
    folder, path = root / "pairs" / "t5", root / "pairs" / "kept.safetensors"
    module: Any = tiny_model("t5")
    for config in (module.config, module.generation_config):
        config.decoder_start_token_id = 0
    module.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    pair = hs.load(folder).capture(["a b", "c d", "e f"], targets=["a", "c", "e"])
    assert isinstance(pair, hs.Pair)
    pair.save(path)
    name = bench.store("pairs/kept.safetensors")
    asked = {"store": name, "query": "c d", "site": "encoder.layer.1", "k": 2}
    answer = bench.answer("store", bench.folder("pairs/t5"), **asked)
    assert answer["nearest"][0]["text"] == 1 and "hs.Pair.load(" in answer["python"]
    result = bench.result(answer, tmp_path)
    assert same(run_python(answer, tmp_path)["result"], result)
    assert "--site encoder.layer.1" in answer["command"]
    job = bench.over("kept", store=name, text=0)
    assert job["state"] == "failed" and "an encoder and a decoder" in job["error"]
    training = bench.submit("fit", None, on=name, **to_fit("pair"))
    job = bench.wait(training.json["id"])
    assert job["state"] == "failed" and "an encoder and a decoder" in job["error"]
    assert not (root / "dictionaries" / "pair").exists()


def test_texts_of_a_store_that_is_not_complete_keep_their_numbers(
    bench: Bench, root: Path, tiny_name: str
) -> None:
    """The first unit is not committed, so the first texts are not there; the others are
    named as in the corpus.
    """
    path = root / "corpora" / "partial"
    texts = [f"The rest of number {k} is here." for k in range(12)]
    model = hs.load(root / "models" / "tiny")
    engine = hs.Engine(unit_bytes=60_000)
    hs.extract(model, texts, to=path, engine=engine).close()
    (path / "complete.json").unlink()
    (path / "commits" / "000000.json").unlink()
    listed = {one["label"]: one for one in bench.ask("GET", "/api/stores").json}
    there = hs.open(path).texts.tolist()
    assert not listed["corpora/partial"]["complete"]
    assert 0 < there[0] < there[-1] == 11
    name = bench.store("corpora/partial")
    page = bench.ask("GET", f"/api/stores/{name}/texts").json["texts"]
    read = [(one["number"], one["text"]) for one in page]
    assert read == [(number, texts[number]) for number in there]
    answer = bench.answer("store", tiny_name, store=name, query=texts[9], k=1)
    (found,) = answer["nearest"]
    assert (found["text"], found["string"]) == (9, texts[9])
    cell = {"text": 9, "site": "layer.2", "token": 1}
    near = bench.answer("nearest", store=name, **cell, k=3)["nearest"]
    # The same prefix, in other texts.
    assert {one["text"] for one in near} <= set(there) - {9}


def test_a_store_of_pooled_states_has_one_column_for_a_text(
    bench: Bench, root: Path, tmp_path: Path
) -> None:
    model = hs.load(root / "models" / "tiny")
    path = root / "corpora" / "pooled"
    hs.extract(model, list(TEXTS[:6]), to=path, pool="mean").close()
    name = bench.store("corpora/pooled")
    data = bench.result(bench.answer("kept", store=name, text=4), tmp_path).data
    assert data["string"].to_numpy().tolist() == ["(mean:sinkless)"]
    cell = {"text": 4, "site": "final", "token": 0}
    near = bench.answer("nearest", store=name, **cell, k=2)["nearest"]
    assert len(near) == 2 and 4 not in {one["text"] for one in near}


def test_half_a_surrogate_pair_a_long_text_and_a_damaged_file_are_no_500(
    tmp_path: Path, kept: hs.States
) -> None:
    first = kept.of(0)
    tokens, path = first.tokens, tmp_path / "half.safetensors"
    half = "half \ud83d" + "x" * 300
    texts = hs.states.Tokens(
        (half,), tokens.text, tokens.positions, tokens.ids, tokens.strings
    )
    hs.States(kept.sites, first.values, texts, kept.source).save(path)
    (row,) = read_texts(path, 0, 5).texts
    assert row.cut and len(row.text) == 300
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(hs.errors.FileError, match="half.safetensors"):
        read_texts(path, 0, 5)


@pytest.fixture(scope="session")
def cities(root: Path) -> hs.Store:
    """A store of labelled texts, below the root of the workbench."""
    model = hs.load(root / "models" / "tiny")
    return hs.extract(model, list(CITIES.texts), to=root / "corpora" / "cities")


@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("cluster", {"site": "layer.1"}),
        ("project", {**LABELLED, "method": "pca"}),
        pytest.param("probe", LABELLED, marks=pytest.mark.slow),
        pytest.param("profile", {"sites": "layer.1"}, marks=pytest.mark.slow),
    ],
)
def test_an_analysis_of_a_store_gives_what_python_gives(
    bench: Bench, cities: hs.Store, tmp_path: Path, word: str, arguments: dict[str, Any]
) -> None:
    """No model is loaded: the states are there. Its code and its command give the same."""
    answer = bench.answer(word, on=bench.store("corpora/cities"), **arguments)
    assert answer["model"] is None
    result = bench.result(answer, tmp_path)
    options = dict(arguments)
    data = [list(CITIES.labels or ())] if options.pop("data", None) else []
    assert same(getattr(hs, word)(cities, *data, **options), result)
    check_code(answer, result, tmp_path)


def test_labels_of_other_texts_are_refused(bench: Bench, cities: hs.Store) -> None:
    name = bench.store("corpora/cities")
    job = bench.over("probe", on=name, data="cities-complete")
    assert job["state"] == "failed" and "are not those of the states" in job["error"]


def to_fit(name: str, **more: Any) -> dict[str, Any]:
    few = {"features": 8, "k": 2, "tokens": 400, "site": "layer.2"}
    return {"to": name, **few, **more}


def test_a_dictionary_is_trained_on_a_store_and_offered(
    bench: Bench, store: hs.Store, tmp_path: Path
) -> None:
    """Its numbers are those of the library, of its program and of its command."""
    assert bench.settings.root is not None
    folder = bench.settings.root / "dictionaries" / "mine"
    job = bench.submit("fit", None, on=bench.store(STORE), **to_fit("mine"))
    answer = bench.ask("GET", f"/api/results/{bench.wait(job.json['id'])['result']}")
    own = hs.Dictionary.fit(
        store, "layer.2", features=8, k=2, training=hs.Training(400)
    )
    told = " ".join(answer.json["findings"])
    assert "in dictionaries/mine." in told
    assert f"{own.facts['unexplained']:.1%} of the variance was left" in told
    namespace = run_python(answer.json, tmp_path)
    words = shlex.split(answer.json["command"])[1:]
    words[words.index("--to") + 1] = str(tmp_path / "command")
    assert runner.invoke(cli.app, words).exit_code == 0
    for fitted in (folder, tmp_path / "mine", tmp_path / "command"):
        read = hs.Dictionary.read(fitted)
        assert torch.allclose(read.directions, own.directions, atol=1e-6), fitted
    assert namespace["dictionary"].reads == "layer.2"
    # It is offered at once, and nothing is ever written over it.
    assert bench.dictionary("mine")
    before = sorted((file.name, file.read_bytes()) for file in folder.iterdir())
    job = bench.submit("fit", None, on=bench.store(STORE), **to_fit("mine"))
    over = bench.wait(job.json["id"])
    assert over["state"] == "failed"
    assert "dictionaries/mine: there is something of that name" in over["error"]
    after = sorted((file.name, file.read_bytes()) for file in folder.iterdir())
    assert after == before
    # Once it was removed, the same may be asked again.
    shutil.rmtree(folder)
    job = bench.submit("fit", None, on=bench.store(STORE), **to_fit("mine"))
    assert bench.wait(job.json["id"])["state"] == "done" and folder.is_dir()
    shutil.rmtree(folder)


def test_a_fit_that_cannot_be_done_leaves_nothing(
    bench: Bench,
    store: hs.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = bench.settings.root
    assert root is not None
    name = bench.store(STORE)
    for arguments, said in (
        (to_fit("../out"), "“to” cannot be"),
        (to_fit("a/b"), "“to” cannot be"),
        (to_fit(".hidden"), "“to” cannot be"),
        (to_fit("x" * 65), "“to” cannot be"),
        (to_fit("x", features=16_385), "at most 16,384"),
        (to_fit("x", k=0), "at least 1"),
        (to_fit("x", tokens=10**8), "at most 10,000,000"),
    ):
        refused = bench.submit("fit", None, on=name, **arguments)
        assert refused.status == 422 and said in refused.json["detail"]
    for arguments, said in (
        (to_fit("x", features=10_000, k=2), "Give more texts, or ask for fewer."),
        (to_fit("x", k=9), "k is 9, and there are 8 features"),
        (to_fit("x", site="layer.99"), "layer.99"),
    ):
        job = bench.submit("fit", None, on=name, **arguments)
        over = bench.wait(job.json["id"])
        assert over["state"] == "failed" and said in over["error"]
        assert not (root / "dictionaries" / "x").exists()
    (root / "dictionaries" / "file").write_text("mine")
    job = bench.submit("fit", None, on=name, **to_fit("file"))
    assert "there is something" in bench.wait(job.json["id"])["error"]
    (root / "dictionaries" / "file").unlink()
    # A cancelled job ends so, wherever it is.
    request = {
        "arguments": to_fit("x") | {"to": str(tmp_path / "dictionaries" / "x")},
        "store": {"path": str(store.path), "identity": ""},
    }
    monkeypatch.setattr(hs.Dictionary, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fit_dictionary(Models(), request)
    assert not list((tmp_path / "dictionaries").iterdir())


def interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_what_others_put_there_while_it_is_trained_stays(
    store: hs.Store,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_cancelled: bool,
) -> None:
    folder = tmp_path / "dictionaries" / "x"
    save = hs.Dictionary.save

    def save_meanwhile(dictionary: hs.Dictionary, path: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "cfg.json").write_text("another server's")
        if is_cancelled:
            raise KeyboardInterrupt
        save(dictionary, path)

    monkeypatch.setattr(hs.Dictionary, "save", save_meanwhile)
    request = {
        "arguments": to_fit("x") | {"to": str(folder)},
        "store": {"path": str(store.path), "identity": ""},
    }
    names = ["x"]
    if is_cancelled:
        with pytest.raises(KeyboardInterrupt):
            fit_dictionary(Models(), request)
    else:
        findings = fit_dictionary(Models(), request).header["findings"]
        assert "in dictionaries/x-2." in findings[0]
        assert hs.Dictionary.read(folder.with_name("x-2")).reads == "layer.2"
        names.append("x-2")
    assert (folder / "cfg.json").read_text() == "another server's"
    assert sorted(path.name for path in folder.parent.iterdir()) == names


def test_a_dictionary_is_never_kept_behind_a_link(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    library = Library(Settings(root=root, folder=tmp_path / "app"))
    assert library.new_dictionary("x") == str(root / "dictionaries" / "x")
    (root / "dictionaries").symlink_to(elsewhere)
    with pytest.raises(Error, match="is a link") as raised:
        library.new_dictionary("x")
    assert "\n" not in str(raised.value)
    assert not list(elsewhere.iterdir())
