"""Stores in the workbench: kept states are opened, searched and browsed, by the API and
in a browser.
"""

import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.app.code import Named, as_command, as_python
from hiddenscope.app.stores import read_texts, store_identity
from hiddenscope.cli.main import app
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.workbench.pages import Opener, Workbench, fragment
from tests.workbench.serving import Bench, same
from tests.workbench.texts import HOSTILE, TEXTS


def listed(bench: Bench, label: str) -> dict[str, Any]:
    found: dict[str, Any] = next(
        one for one in bench.ask("GET", "/api/stores").json if one["label"] == label
    )
    return found


def asked(bench: Bench, analysis: str, **arguments: Any) -> dict[str, Any]:
    """The answer to a question that needs no model."""
    job = bench.ask("POST", "/api/jobs", {"analysis": analysis, "arguments": arguments})
    assert job.status in (200, 202), job.body
    said = bench.wait(job.json["id"])
    assert said["state"] == "done", said
    answer: dict[str, Any] = bench.ask("GET", f"/api/results/{said['result']}").json
    return answer


def numbers(bench: Bench, answer: dict[str, Any], folder: Path) -> hs.Result:
    path = folder / "answer.nc"
    path.write_bytes(
        bench.ask("GET", f"/api/results/{answer['id']}/file?format=nc").body
    )
    return hs.Result.load(path)


def test_a_store_and_a_file_are_listed_with_what_they_hold(
    bench: Bench, store: hs.Store, kept: hs.States
) -> None:
    found = listed(bench, "corpora/states")
    assert found["sites"] == [str(site) for site in store.sites]
    assert (found["tokens"], found["texts"], found["dtype"]) == (
        len(store),
        len(TEXTS),
        store.dtype,
    )
    assert (found["width"], found["complete"], found["model"]) == (
        store["final"].shape[1],
        True,
        "tiny",
    )
    file = listed(bench, "corpora/kept.safetensors")
    assert (file["tokens"], file["texts"], file["width"]) == (
        len(kept.tokens),
        5,
        kept.width,
    )
    assert file["dtype"] == "float32" and file["sites"] == [
        str(site) for site in kept.sites
    ]


@pytest.mark.parametrize("label", ["corpora/states", "corpora/kept.safetensors"])
def test_texts_are_read_in_pages(
    bench: Bench, store: hs.Store, kept: hs.States, label: str
) -> None:
    name, total = (
        listed(bench, label)["name"],
        len(TEXTS) if label.endswith("states") else 5,
    )
    read = []
    for first in range(0, total + 3, 3):
        page = bench.ask("GET", f"/api/stores/{name}/texts?first={first}&count=3").json
        assert (page["total"], page["first"]) == (total, first)
        read += page["texts"]
    assert [one["text"] for one in read] == list(TEXTS[:total])
    assert [one["number"] for one in read] == list(range(total))
    lengths = store.tokens.lengths if label.endswith("states") else kept.tokens.lengths
    assert [one["tokens"] for one in read] == lengths.tolist()


@pytest.mark.parametrize(
    ("path", "status"), [("store:0123456789abcdef", 422), ("..%2F..%2Fetc", 422)]
)
def test_a_store_that_is_not_there_is_a_sentence(
    bench: Bench, path: str, status: int
) -> None:
    answer = bench.ask("GET", f"/api/stores/{path}/texts")
    assert answer.status in (status, 404) and "passwd" not in answer.body.decode()


def test_the_norms_of_a_text_come_from_the_store(
    bench: Bench, store: hs.Store, tmp_path: Path
) -> None:
    name = listed(bench, "corpora/states")["name"]
    answer = asked(bench, "kept", store=name, text=4)
    data = numbers(bench, answer, tmp_path).data
    own = store.of(4)
    for site in own.sites:
        norms = np.linalg.norm(np.asarray(own[site], dtype=np.float64), axis=1)
        assert data["norm"].sel(site=str(site)).to_numpy() == pytest.approx(
            norms, rel=1e-6
        )
    namespace: dict[str, Any] = {}
    exec(
        answer["python"].replace("profile.html", str(tmp_path / "profile.nc")),
        namespace,
    )
    assert namespace["result"].data["norm"].to_numpy() == pytest.approx(
        data["norm"].to_numpy()
    )


@pytest.mark.parametrize("label", ["corpora/states", "corpora/kept.safetensors"])
def test_the_nearest_states_are_those_of_all_rows(
    bench: Bench, store: hs.Store, kept: hs.States, label: str, tmp_path: Path
) -> None:
    source = store if label.endswith("states") else kept
    answer = asked(
        bench,
        "nearest",
        store=listed(bench, label)["name"],
        text=3,
        site="layer.2",
        token=5,
        k=4,
    )
    rows = np.asarray(source["layer.2"], dtype=np.float64)
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    at = source.tokens.rows(3).start + 5
    cosines = units @ units[at]
    cosines[at] = -np.inf
    assert [one["score"] for one in answer["nearest"]][:4] == pytest.approx(
        np.sort(cosines)[::-1][:4], abs=1e-6
    )
    for one in answer["nearest"]:
        row = source.tokens.rows(one["text"]).start + one["token"]
        assert cosines[row] == pytest.approx(one["score"], abs=1e-6)
        assert source.tokens.strings[row] == one["string"]
    namespace: dict[str, Any] = {}
    exec(
        answer["python"].replace("search.html", str(tmp_path / "search.nc")), namespace
    )
    assert namespace["result"].data.equals(numbers(bench, answer, tmp_path).data)


def test_a_search_in_a_store_names_its_texts(
    bench: Bench, store: hs.Store, tiny_name: str, tmp_path: Path
) -> None:
    name = listed(bench, "corpora/states")["name"]
    answer = bench.answer(
        "store", tiny_name, store=name, query="The rest of number 7 is here.", k=3
    )
    assert answer["nearest"][0]["string"] == "The rest of number 7 is here."
    assert answer["nearest"][0]["text"] == TEXTS.index("The rest of number 7 is here.")
    assert answer["nearest"][0]["score"] == pytest.approx(1, abs=1e-4)
    found = numbers(bench, answer, tmp_path)
    namespace: dict[str, Any] = {}
    exec(
        answer["python"].replace("search.html", str(tmp_path / "search.nc")), namespace
    )
    assert namespace["result"].data["number"].equals(found.data["number"])
    assert same(commanded(answer, tmp_path), found)


def commanded(answer: dict[str, Any], folder: Path) -> hs.Result:
    """What the command of an answer gives."""
    words = shlex.split(
        answer["command"].replace("--out search.html", f"--out {folder / 'command.nc'}")
    )
    with pytest.raises(SystemExit) as left:
        get_command(app)(args=words[1:])
    assert left.value.code == 0
    return hs.Result.load(folder / "command.nc")


def test_the_code_of_a_search_in_the_states_of_two_stacks_runs(
    bench: Bench, root: Path, tmp_path: Path
) -> None:
    """States of an encoder and a decoder in a file, at a site of the encoder, which is
    not the last there is.
    """
    folder, path = root / "pairs" / "t5", root / "pairs" / "kept.safetensors"
    module: Any = tiny_model("t5")
    module.config.decoder_start_token_id = (
        module.generation_config.decoder_start_token_id
    ) = 0
    module.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    pair = hs.load(folder).capture(["a b", "c d", "e f"], targets=["a", "c", "e"])
    assert isinstance(pair, hs.Pair)
    pair.save(path)
    given = {
        "store": listed(bench, "pairs/kept.safetensors")["name"],
        "query": "c d",
        "site": "encoder.layer.1",
    }
    answer = bench.answer("store", bench.folder("pairs/t5"), **given, k=2)
    assert answer["nearest"][0]["text"] == 1
    found = numbers(bench, answer, tmp_path)
    namespace: dict[str, Any] = {}
    exec(
        answer["python"].replace("search.html", str(tmp_path / "search.nc")), namespace
    )
    assert same(namespace["result"], found) and same(commanded(answer, tmp_path), found)


@pytest.mark.parametrize(
    ("analysis", "said"),
    [("kept", "all texts, not one"), ("nearest", "not for a state")],
)
def test_where_there_is_no_command_the_reason_is_said(analysis: str, said: str) -> None:
    given = {
        "store": "store:0123456789abcdef",
        "text": 0,
        "site": "final",
        "token": 0,
        "k": 3,
    }
    command = as_command({"analysis": analysis, "arguments": given}, {})
    assert (
        command.text is None
        and said in command.reason
        and "Python only" in command.reason
    )


def test_texts_of_a_store_that_is_not_complete_keep_their_numbers(
    bench: Bench, root: Path, tiny_name: str
) -> None:
    """The first unit is not committed, so the first texts are not there; the others are
    named as in the corpus.
    """
    path, texts = (
        root / "corpora" / "partial",
        [f"The rest of number {k} is here." for k in range(12)],
    )
    hs.extract(
        hs.load(root / "models" / "tiny"),
        texts,
        to=path,
        engine=hs.Engine(unit_bytes=60_000),
    ).close()
    (path / "complete.json").unlink()
    (path / "commits" / "000000.json").unlink()
    found, there = listed(bench, "corpora/partial"), hs.open(path).texts.tolist()
    assert not found["complete"] and 0 < there[0] < there[-1] == 11
    page = bench.ask("GET", f"/api/stores/{found['name']}/texts").json["texts"]
    assert [(one["number"], one["text"]) for one in page] == [
        (number, texts[number]) for number in there
    ]
    answer = bench.answer("store", tiny_name, store=found["name"], query=texts[9], k=1)
    assert (answer["nearest"][0]["text"], answer["nearest"][0]["string"]) == (
        9,
        texts[9],
    )
    near = asked(
        bench, "nearest", store=found["name"], text=9, site="layer.2", token=1, k=3
    )
    # The same prefix, in other texts.
    assert {one["text"] for one in near["nearest"]} <= set(there) - {9}


def test_a_store_of_pooled_states_has_one_column_for_a_text(
    bench: Bench, root: Path, tmp_path: Path
) -> None:
    path = root / "corpora" / "pooled"
    hs.extract(
        hs.load(root / "models" / "tiny"), list(TEXTS[:6]), to=path, pool="mean"
    ).close()
    name = listed(bench, "corpora/pooled")["name"]
    data = numbers(bench, asked(bench, "kept", store=name, text=4), tmp_path).data
    assert data["string"].to_numpy().tolist() == ["(mean)"]
    near = asked(bench, "nearest", store=name, text=4, site="final", token=0, k=2)[
        "nearest"
    ]
    assert len(near) == 2 and 4 not in {one["text"] for one in near}


def test_a_store_that_grew_is_another(store: hs.Store) -> None:
    """A unit that was committed later changes what is found, so results of before are
    not shown again.
    """
    before = store_identity(store.path)
    added = store.path / "commits" / "of-a-test.json"
    added.write_text("{}")
    try:
        assert store_identity(store.path) != before
    finally:
        added.unlink()


def test_half_a_surrogate_pair_and_a_damaged_file_are_no_500(
    root: Path, tmp_path: Path, kept: hs.States
) -> None:
    tokens = hs.load(root / "models" / "tiny").capture("a b").tokens  # type: ignore[union-attr]
    texts = hs.states.Tokens(
        ("half \ud83d",), tokens.text, tokens.positions, tokens.ids, tokens.strings
    )
    values = kept.values[:, : len(tokens)]
    hs.States(kept.sites, values, texts, kept.source).save(
        tmp_path / "half.safetensors"
    )
    assert (
        read_texts(tmp_path / "half.safetensors", 0, 5)
        .model_dump_json()
        .startswith("{")
    )
    content = bytearray((tmp_path / "half.safetensors").read_bytes())
    (tmp_path / "half.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(hs.errors.FileError, match="half.safetensors"):
        read_texts(tmp_path / "half.safetensors", 0, 5)


def test_states_of_a_pair_are_read_as_such_in_the_code(
    tmp_path: Path, kept: hs.States
) -> None:
    stacks = []
    for stack in ("encoder", "decoder"):
        sites = tuple(hs.Site.parse(f"{stack}.{site}") for site in kept.sites)
        stacks.append(hs.States(sites, kept.values, kept.tokens, kept.source))
    hs.Pair(*stacks).save(tmp_path / "pair.safetensors")
    kept.save(tmp_path / "one.safetensors")
    for name, opening in (("pair", "hs.Pair.load"), ("one", "hs.States.load")):
        path = tmp_path / f"{name}.safetensors"
        asked = {"analysis": "kept", "arguments": {"store": "s", "text": 0}}
        assert f"states = {opening}({str(path)!r})" in str(
            as_python(asked, {"s": Named(str(path))})
        )


def idle(shown: Workbench) -> None:
    shown.until("() => !document.querySelector('.stale')")
    shown.settle()


def test_a_store_is_browsed_in_the_browser(
    look: Opener, store: hs.Store, kept: hs.States, tiny_name: str
) -> None:
    """Texts in pages, one text with its tokens and norms, the nearest states of a cell,
    and a search.
    """
    shown = look(fragment(tab="stores", model=tiny_name))
    page = shown.page
    page.get_by_role("button", name="corpora/states").click()
    texts = page.locator(".texts li button")
    page.get_by_role("heading", name=f"Texts 0 to 19 of {len(TEXTS)}").wait_for()
    for number, text in enumerate(HOSTILE):
        assert (
            "alert" not in page.locator(".texts").inner_html()
            or "&lt;" in page.locator(".texts").inner_html()
        )
        texts.nth(number).click()
        page.get_by_role("heading", name=f"Text {number}", exact=True).wait_for()
        idle(shown)
        assert page.locator("button.token").count() == store.tokens.lengths[number], (
            text
        )
    page.get_by_role("button", name="Later texts").click()
    page.get_by_role("heading", name="Texts 20 to 39").wait_for()
    page.get_by_role("button", name="Later texts").click()
    page.get_by_role("heading", name=f"Texts 40 to {len(TEXTS) - 1}").wait_for()
    assert page.get_by_role("button", name="Later texts").is_disabled()
    texts.last.click()
    page.get_by_role("heading", name=f"Text {len(TEXTS) - 1}", exact=True).wait_for()
    page.locator(".kept .grid .stage").focus()
    for key in ("ArrowRight", "End", "ArrowUp", "Enter"):
        page.keyboard.press(key)
    near = page.locator(".near button")
    near.first.wait_for()
    idle(shown)
    assert "text 6" in near.first.inner_text()  # the copy of this text
    near.first.click()
    page.get_by_role("heading", name="Text 6", exact=True).wait_for()
    idle(shown)
    again = look(shown.fragment)
    again.page.get_by_role("heading", name="Text 6", exact=True).wait_for()
    again.page.locator(".near button").first.wait_for()
    shown.keep("workbench-stores")
    page.get_by_label("Query", exact=True).fill("The rest of number 9 is here.")
    page.get_by_role("button", name="Search").click()
    page.get_by_role("heading", name="Nearest at final").wait_for()
    assert (
        "number 9" in texts.first.inner_text()
        and "cosine 1.000" in texts.first.inner_text()
    )
    page.get_by_role("button", name="Show all texts").click()
    page.get_by_role("heading", name="Texts 0 to 19").wait_for()


def test_states_in_a_file_are_browsed_and_a_wrong_model_is_a_sentence(
    look: Opener, bench: Bench, kept: hs.States
) -> None:
    shown = look(
        fragment(tab="stores", store=listed(bench, "corpora/kept.safetensors")["name"])
    )
    page = shown.page
    page.locator(".texts li button").nth(3).click()
    page.get_by_role("heading", name="Text 3", exact=True).wait_for()
    page.locator("button.token").nth(2).click()
    page.locator(".near li").first.wait_for()
    page.get_by_label("Model that encodes the query").fill("models/other")
    page.get_by_label("Query", exact=True).fill("The rest.")
    page.get_by_role("button", name="Search").click()
    page.locator(".texts").get_by_role("alert").get_by_text("other weights").wait_for()
    page.get_by_role("button", name="Show all texts").click()
    page.get_by_role("heading", name="Texts 0 to 4 of 5").wait_for()


CITIES = hs.read("cities-incomplete")
ON_STORES: dict[str, dict[str, Any]] = {
    "profile": {"sites": "layer.1,layer.2"},
    "project": {"data": "cities-incomplete", "method": "pca", "sites": "layer.1"},
    "probe": {"data": "cities-incomplete", "sites": "layer.1"},
    "cluster": {"site": "layer.1"},
}


@pytest.fixture(scope="session")
def cities(root: Path) -> hs.Store:
    """A store of labelled texts, below the root of the workbench."""
    return hs.extract(
        hs.load(root / "models" / "tiny"),
        list(CITIES.texts),
        to=root / "corpora" / "cities",
    )


def of_store(
    bench: Bench, analysis: str, store: str, **arguments: Any
) -> dict[str, Any]:
    """The job of an analysis of kept states, once it is over."""
    job = bench.ask(
        "POST",
        "/api/jobs",
        {"analysis": analysis, "store": store, "arguments": arguments},
    )
    assert job.status in (200, 202), job.body
    return bench.wait(job.json["id"])


@pytest.mark.parametrize("word", ON_STORES)
def test_an_analysis_of_a_store_gives_what_python_gives(
    bench: Bench, cities: hs.Store, tmp_path: Path, word: str
) -> None:
    """No model is loaded: the states are there. Its code and its command give the same."""
    name = listed(bench, "corpora/cities")["name"]
    over = of_store(bench, word, name, **ON_STORES[word])
    assert over["state"] == "done", over
    answer = bench.ask("GET", f"/api/results/{over['result']}").json
    assert answer["model"] is None
    result = numbers(bench, answer, tmp_path)
    options = dict(ON_STORES[word])
    data = [list(CITIES.labels or ())] if options.pop("data", None) else []
    assert same(getattr(hs, word)(cities, *data, **options), result)
    exec(answer["python"].replace(f"{word}.html", str(tmp_path / "python.nc")), {})
    assert same(hs.Result.load(tmp_path / "python.nc"), result)
    words = shlex.split(
        answer["command"].replace(
            f"--out {word}.html", f"--out {tmp_path / 'command.nc'}"
        )
    )
    with pytest.raises(SystemExit) as left:
        get_command(app)(args=words[1:])
    assert left.value.code == 0 and same(
        hs.Result.load(tmp_path / "command.nc"), result
    )


def test_labels_of_other_texts_are_refused(bench: Bench, cities: hs.Store) -> None:
    name = listed(bench, "corpora/cities")["name"]
    over = of_store(bench, "probe", name, data="cities-complete")
    assert over["state"] == "failed" and "are not those of the states" in over["error"]


@pytest.mark.parametrize(
    "given", [{}, {"model": {"name": "smollm2"}, "store": "store:0123456789abcdef"}]
)
def test_a_request_names_a_model_or_a_store(
    bench: Bench, given: dict[str, Any]
) -> None:
    answer = bench.ask(
        "POST", "/api/jobs", {"analysis": "profile", "arguments": {}, **given}
    )
    assert answer.status == 422 and "either a model or a store" in answer.json["detail"]


def test_a_store_is_analysed_in_the_browser(
    look: Opener, bench: Bench, cities: hs.Store
) -> None:
    shown = look(fragment(tab="stores", store=listed(bench, "corpora/cities")["name"]))
    page = shown.page
    page.get_by_role("radio", name="Project").check()
    assert (
        page.get_by_label("Truncate").count() == 0
        and page.get_by_label("Model").count() == 0
    )
    page.get_by_label("Dataset").select_option("cities-incomplete")
    page.get_by_label("Method").select_option("pca")
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".panels canvas").first.wait_for()
    page.get_by_role("radio", name="Cluster").check()
    page.get_by_role("button", name="Run", exact=True).click()
    page.locator(".findings li").first.wait_for()
    again = look(shown.fragment)
    again.page.locator(".findings li").first.wait_for()
    assert again.page.get_by_role("radio", name="Cluster").is_checked()
    page.get_by_role("radio", name="Browse its texts").check()
    page.locator(".texts li button").first.wait_for()


def test_without_stores_the_tab_says_how_to_make_one(
    look: Opener, another: Any, tmp_path: Path
) -> None:
    with another(root=None) as fresh:
        shown = look(fragment(tab="stores"), at=fresh)
        shown.page.get_by_text("hiddenscope extract").wait_for()
