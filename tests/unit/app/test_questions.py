"""What the worker answers about one text and one state, and the files of a result."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import xarray

import hiddenscope as hs
from hiddenscope.app import cells as module
from hiddenscope.app.cache import StoredResult
from hiddenscope.app.cells import Models
from hiddenscope.app.questions import preview_pictures
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.workbench.asking import TEXT
from tests.workbench.serving import Bench


def test_an_answer_is_that_of_the_library_bit_for_bit(
    bench: Bench, tiny_name: str, root: Path, tmp_path: Path
) -> None:
    answer = bench.answer("lens", tiny_name, texts=TEXT, k=2)
    own = hs.lens(root / "models" / "tiny", TEXT, k=2)
    assert bench.result(answer, tmp_path).data.identical(own.data)


def test_a_question_asked_again_is_answered_at_once(
    bench: Bench, tiny_name: str
) -> None:
    first = bench.answer("grid", tiny_name, text="Once more.")
    again = bench.submit("grid", tiny_name, text="Once more.")
    assert again.status == 200
    assert again.json["state"] == "done" and again.json["result"] == first["id"]
    other = bench.submit("grid", tiny_name, text="Once more")
    assert other.status == 202
    bench.wait(other.json["id"])


def test_the_grid_has_the_norms_of_the_states(
    bench: Bench, tiny_name: str, root: Path
) -> None:
    answer = bench.answer("grid", tiny_name, text=TEXT)
    grid: Any = bench.views(answer)[0]
    states = hs.load(root / "models" / "tiny").capture(TEXT)
    assert isinstance(states, hs.States)
    assert grid.tokens == states.tokens.strings
    norms = states.values.double().norm(dim=-1).float().numpy()
    assert (grid.measures[0].values == norms).all()
    assert [view["title"] for view in answer["views"]] == [
        "The norm of every state of tiny",
        "The norm along the layers of tiny",
    ]


def test_what_a_token_reads_is_that_of_the_analysis(
    bench: Bench, tiny_name: str
) -> None:
    for given, token in (({"token": 2}, 2), ({"token": 999}, 12), ({}, 12)):
        answer = bench.answer("reads", tiny_name, text=TEXT, **given)
        grid: Any = bench.views(answer)[0]
        last = len(grid.tokens) - 1
        token = min(token, last)
        assert f"token {token}, reads in each layer" in answer["views"][0]["title"]
        largest = grid.measures[0].numbers
        assert (largest[:, token + 1 :] == 0).all()
        assert largest[:, : token + 1].max() > 0


def test_one_state_with_its_names_and_what_changes_do(
    bench: Bench, tiny_name: str
) -> None:
    cell = {"text": TEXT, "site": "layer.2", "token": 1}

    def state(**change: Any) -> dict[str, Any]:
        given = {"change": change} if change else {}
        told: dict[str, Any] = bench.answer("state", tiny_name, **cell, **given)[
            "state"
        ]
        return told

    plain = state()
    assert plain["names"] == {
        "hiddenscope": 'states["layer.2"][1]',
        "Hugging Face": "outputs.hidden_states[2][0, 1]",
        "TransformerLens": 'cache["blocks.1.hook_resid_post"][0, 1]',
    }
    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    states = model.capture(TEXT)
    assert isinstance(states, hs.States)
    assert plain["norm"] == float(states["layer.2"][1].double().norm())
    assert plain["string"] == states.tokens.strings[1]
    units = states.values / states.values.norm(dim=-1, keepdim=True)
    cosines = units @ units[2, 1]
    best = cosines.flatten().sort(descending=True).values[1:9]  # the first is itself
    assert [one["cosine"] for one in plain["nearest"]] == pytest.approx(best.tolist())
    for one in plain["nearest"]:
        row = [str(site) for site in states.sites].index(one["site"])
        assert cosines[row, one["token"]] == pytest.approx(one["cosine"])
        assert states.tokens.strings[one["token"]] == one["string"]
    lens = hs.lens(model, TEXT, k=10, sites="layer.2").data.isel(site=0, token=1)
    assert [one["word"] for one in plain["lens"]] == lens["word"].values.tolist()
    assert len(plain["before"]) == 10 and "after" not in plain
    gone = state(kind="ablate")
    assert gone["before"] == plain["before"] != gone["after"]
    same = state(kind="replace", text=TEXT)
    assert same["after"] == same["before"]  # its own state in its own place
    assert same["used"] == {"token": 1, "string": plain["string"]}
    moved = state(kind="steer", toward="a b", away="c d", strength=4.0)
    assert moved["after"] != plain["before"]
    assert moved["used"] == {"toward": "a b", "away": "c d", "strength": 4.0}


@pytest.mark.parametrize("site", ["layer.2", "layer.2.mlp"])
def test_the_strongest_features_of_a_state_are_those_of_the_analysis(
    bench: Bench,
    tiny_name: str,
    dictionaries: dict[str, hs.Dictionary],
    site: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = bench.dictionary(site)
    painted = bench.answer("features", tiny_name, texts=TEXT, dictionary=name)
    assert painted["columns"] == list(range(13))
    # A dictionary is read and proved once, however often it is asked.
    monkeypatch.setattr(hs.Dictionary, "read", lambda *_: pytest.fail("read again"))
    cell = {"text": TEXT, "site": site, "token": 3, "dictionary": name}
    listed = bench.answer("state", tiny_name, **cell)["state"]["features"]
    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    result = hs.features(model, TEXT, dictionaries[site])
    at = result.data.isel(site=0, token=3)
    assert [f"{one['feature']}" for one in listed] == at["strongest"].values.tolist()
    activations = [one["activation"] for one in listed]
    assert activations == pytest.approx(at["activation"].values.tolist(), rel=1e-4)
    words = {one["feature"]: one["words"] for one in result.facts["strongest"]}
    both = [one for one in listed if one["feature"] in words]
    assert both and all(one["words"] == words[one["feature"]] for one in both)
    cell["site"] = "layer.1"
    said = bench.answer("state", tiny_name, **cell)["state"]["features"]
    assert said == f"The dictionary is of {site}."


def test_a_feature_is_added_scaled_and_taken_out(
    bench: Bench, tiny_name: str, dictionaries: dict[str, hs.Dictionary]
) -> None:
    """What the page says after a change is what the library says after it."""
    cell = {"text": TEXT, "site": "layer.2", "token": 3}
    cell["dictionary"] = bench.dictionary("layer.2")

    def state(kind: str, strength: float) -> dict[str, Any]:
        change = {"kind": kind, "feature": 5, "strength": strength}
        answer = bench.answer("state", tiny_name, **cell, change=change)
        told: dict[str, Any] = answer["state"]
        assert told["change"] == kind
        assert told["used"] == {"feature": 5, "strength": strength}
        return told

    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    direction = dictionaries["layer.2"].directions[5]
    for kind, strength, change in (
        ("add", 4.0, hs.Add(direction, tokens=3, scale=4.0)),
        ("scale", 3.0, hs.Scale(3.0, tokens=3, along=direction)),
        ("scale", 0.0, hs.Project(direction, tokens=3)),
    ):
        told = state(kind, strength)
        logits: Any = hs.edit(model, [TEXT], {"layer.2": change}, (), logits=True)
        expected = logits.logits[-1].softmax(-1).topk(10).values.tolist()
        after = [one["probability"] for one in told["after"]]
        assert after == pytest.approx(expected, rel=1e-5)
        assert told["after"] != told["before"]
    same = state("scale", 1.0)
    assert [one["word"] for one in same["after"]] == [
        one["word"] for one in same["before"]
    ]


def test_a_dictionary_of_another_model_is_refused_and_the_state_is_told(
    bench: Bench, dictionaries: dict[str, hs.Dictionary]
) -> None:
    cell: dict[str, Any] = {"text": TEXT, "site": "layer.2", "token": 3}
    name = bench.dictionary("layer.2")
    words = bench.folder("models/words")
    told = bench.answer("state", words, **cell, dictionary=name)["state"]
    assert told["norm"] > 0
    assert told["features"].endswith("Give a dictionary of this model.")
    # To change one of its features there is another matter.
    cell |= {"dictionary": name, "change": {"kind": "add", "feature": 0}}
    job = bench.over("state", words, **cell)
    assert job["error"].endswith("Give a dictionary of this model.")


def test_a_feature_that_cannot_be_changed_is_refused_in_a_sentence(
    bench: Bench, tiny_name: str, dictionaries: dict[str, hs.Dictionary]
) -> None:
    cell: dict[str, Any] = {"text": TEXT, "site": "layer.2", "token": 3}
    count = len(dictionaries["layer.2"])
    last = {"kind": "add", "feature": count - 1}
    beyond = {"kind": "scale", "feature": count}
    of_mlp = bench.dictionary("layer.2.mlp")
    for change, name, said in (
        (beyond, bench.dictionary("layer.2"), f"No feature {count}: the dictionary"),
        (last, of_mlp, "do not write to layer.2: they write to layer.2.mlp"),
    ):
        asked = cell | {"change": change, "dictionary": name}
        for word in ("state", "continuation"):
            job = bench.over(word, tiny_name, **asked)
            assert job["state"] == "failed" and said in job["error"], job
    gone = cell | {"change": last, "dictionary": "dictionary:0123456789abcdef"}
    refused = bench.submit("state", tiny_name, **gone)
    assert refused.status == 422 and "No dictionary" in refused.json["detail"]


def test_answers_are_the_likeliest_tokens_that_differ(
    bench: Bench, tiny_name: str
) -> None:
    found = bench.answer("answers", tiny_name, a=TEXT, b="Another text")["answers"]
    model = hs.load(bench.settings.root / "models" / "tiny")  # type: ignore[operator]
    likeliest = int(hs.record(model, [TEXT], (), logits=True).logits[-1].argmax())  # type: ignore[index, union-attr]
    assert found["answer"] != found["other"]
    assert found["answer"] == model.text_encoder.string(likeliest)
    contrast = hs.Contrast(TEXT, "Another text", found["answer"], found["other"])
    assert hs.patch(model, contrast, layers=0).facts["contrasts"] == 1


def test_a_failed_job_says_why(bench: Bench, tiny_name: str, root: Path) -> None:
    encoder = bench.folder("models/encoder")
    masked = root / "more" / "masked"
    tiny_model("bert").save_pretrained(masked)  # type: ignore[operator]
    tiny_tokenizer(cls=True).save_pretrained(masked)
    broken = root / "more" / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    (broken / "model.safetensors").write_bytes(b"")
    cell = {"text": TEXT, "site": "layer.1", "token": 1}
    short = {"kind": "replace", "text": "a", "token": 99}
    texts = {"a": "a", "b": "b"}
    for word, model, arguments, said in (
        ("state", tiny_name, cell | {"site": "layer.9"}, "No state at layer.9"),
        ("state", tiny_name, cell | {"token": 999}, "token 999"),
        ("state", tiny_name, cell | {"change": {"kind": "replace"}}, "no text was"),
        ("state", tiny_name, cell | {"change": {"kind": "steer"}}, "'toward'"),
        ("state", tiny_name, cell | {"change": short}, "text B has 2 tokens"),
        ("continuation", encoder, cell, "cannot continue the text"),
        ("answers", encoder, texts, "No answers were found"),
        ("answers", bench.folder("more/masked"), texts, "predicts masked tokens"),
        ("lens", bench.folder("more/broken"), {"texts": "x"}, "Cannot read model"),
    ):
        job = bench.over(word, model, **arguments)
        assert job["state"] == "failed" and said in job["error"], job
    assert bench.answer("lens", tiny_name, texts="after that", k=1)
    # What an encoder cannot say of a state is a sentence in its place.
    state = bench.answer("state", encoder, **cell)["state"]
    assert "no head, and makes no logits" in state["lens"]


def test_a_text_that_is_the_path_of_a_file_is_a_text(
    bench: Bench, tiny_name: str, tmp_path: Path
) -> None:
    """Python reads a file where one string names it; a page would so read every text
    file of the machine.
    """
    secret = tmp_path / "diary.txt"
    secret.write_text("my secret\nmy second secret\nmy third secret\n")
    for word, given in (("search", {"query": "a"}), ("embed", {})):
        answer = bench.answer(word, tiny_name, texts=str(secret), **given)
        file = bench.ask("GET", f"/api/results/{answer['id']}/file?format=json")
        assert b"secret" not in file.body
        assert f"[{str(secret)!r}]" in answer["python"]
    job = bench.over("cluster", tiny_name, texts=str(secret), smallest=2)
    assert job["state"] == "failed" and "1 text" in job["error"]


def test_an_early_picture_is_drawn_where_the_whole_takes_longer() -> None:
    early: list[StoredResult] = []
    for given in ({"method": "pca"}, {"method": "tsne"}, {}):
        arguments: dict[str, Any] = dict(given)
        preview_pictures(arguments, early.append)
        if given == {"method": "pca"}:
            assert arguments == given
            continue
        pictures = arguments["method"]
        assert pictures.method == given.get("method", "umap")
        data = xarray.Dataset({"norm": ("site", [1.0])}, {"site": ["layer.0"]})
        pictures.preview(hs.Result("norms", data, {}, {}))
    assert len(early) == 2 and early[0].payload


def test_models_and_states_are_held_up_to_a_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CAPTURES", 2)
    models = Models("cpu")

    def get(name: str, **more: Any) -> hs.Model:
        return models.get({"path": str(root / "models" / name), **more})

    tiny = get("tiny")
    assert get("tiny") is tiny and get("tiny", identity="changed") is not tiny
    assert get("tiny") is tiny
    get("other")  # the third: the one that was not used for longest goes
    assert get("tiny") is tiny
    first = models.states(tiny, "a")
    for text in ("b", "a", "c"):
        models.states(tiny, text)
    assert models.states(tiny, "a") is first
    assert [text for _, text in models._captured] == ["c", "a"]
    monkeypatch.setattr(module, "MAX_CAPTURED_BYTES", 0)
    models.states(tiny, "d")
    assert [text for _, text in models._captured] == ["d"]
    get("words")
    assert not models._captured
    with pytest.raises(hs.errors.TextError, match="has an encoder and a decoder"):
        models.states(SimpleNamespace(name="t5", capture=lambda text: None), "a")  # type: ignore[arg-type]


def test_a_result_is_saved_in_every_format(bench: Bench, tiny_name: str) -> None:
    id_ = bench.answer("lens", tiny_name, texts=TEXT, k=2)["id"]
    for format_, start in {
        "html": b"<!doctype html>",
        "csv": b"",
        "json": b"{",
        "nc": b"\x89HDF",
    }.items():
        file = bench.ask("GET", f"/api/results/{id_}/file?format={format_}")
        assert file.status == 200 and file.body.startswith(start)
        assert len(file.body) > 500
        told = file.headers["content-disposition"]
        assert told == f'attachment; filename="lens.{format_}"'
        assert file.headers["content-security-policy"] == "sandbox"


@pytest.mark.slow
def test_a_view_and_a_measure_are_chosen_for_a_picture(
    bench: Bench, tiny_name: str
) -> None:
    id_ = bench.answer("lens", tiny_name, texts=TEXT, k=2)["id"]
    pictures = set()
    for more in ("", "&measure=entropy", "&view=lines"):
        file = bench.ask("GET", f"/api/results/{id_}/file?format=png{more}")
        assert file.body.startswith(b"\x89PNG")
        pictures.add(file.body)
    assert len(pictures) == 3
    for format_, start in (("pdf", b"%PDF"), ("svg", b"<?xml")):
        file = bench.ask("GET", f"/api/results/{id_}/file?format={format_}")
        assert file.body.startswith(start)


def test_what_is_not_there_is_said(bench: Bench, tiny_name: str) -> None:
    id_ = bench.answer("lens", tiny_name, texts=TEXT, k=2)["id"]
    state = bench.answer("state", tiny_name, text=TEXT, site="layer.1", token=0)["id"]
    jobs = bench.over("embed", tiny_name, texts=["a"])["id"]
    for path, status, said in (
        (f"results/{id_}/file?format=png&view=nothing", 422, "there are grid"),
        (f"results/{id_}/file?format=exe", 422, "format"),
        (f"results/{state}/file?format=json", 422, "Copy its Python code"),
        (f"results/{'0' * 64}", 404, "No such result"),
        (f"results/{'0' * 64}/file?format=png", 404, "No such result"),
        ("results/x", 422, "id"),
        ("jobs/nothing", 404, "No such job"),
        (f"jobs/{jobs}/partial", 404, "no partial result"),
        ("stores/store:0123456789abcdef/texts", 422, "No store"),
        ("stores/..%2F..%2Fetc/texts", 404, "Not Found"),
    ):
        refused = bench.ask("GET", f"/api/{path}")
        assert refused.status == status and said in refused.json["detail"], path
    events = bench.ask("GET", f"/api/jobs/{jobs}/events").body
    assert events.startswith(b'data: {"id":') and events.endswith(b"}\n\n")


def test_the_page_and_its_scripts_are_served_and_paths_lead_nowhere(
    bench: Bench,
) -> None:
    assert b"<html" in bench.ask("GET", "/").body
    script = bench.ask("GET", "/views/static/grid.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert bench.ask("GET", "/favicon.ico").status == 204
    assert bench.ask("GET", "/api/openapi.json").status == 200
    for path in (
        "/app/static/../__init__.py",
        "/app/static/%2e%2e%2f__init__.py",
        "/app/static/..%5c",
        "/x/static/y",
        "/docs",
    ):
        assert bench.ask("GET", path).status == 404
    assert bench.settings.folder.stat().st_mode & 0o777 == 0o700
