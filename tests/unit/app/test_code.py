"""As Python and as command: what the page offers is run here, and gives the same
numbers.
"""

import shlex
from pathlib import Path
from typing import Any

import numpy
import pytest

import hiddenscope as hs
from hiddenscope.app.code import NO_COMMAND, Named, as_command, as_python
from tests.workbench.asking import MANY_TEXTS, QUESTIONS, TEXT, named
from tests.workbench.code import check_code, run_command, run_python
from tests.workbench.serving import Bench

ASKED = []
ASKED.append(pytest.param("visibility", MANY_TEXTS, id="many texts"))
# A position is a number in the request and in Python, and a word of the command.
POSITION = QUESTIONS["cluster"] | {"pool": -1}
ASKED.append(pytest.param("cluster", POSITION, id="a position"))


@pytest.mark.parametrize(("word", "arguments"), ASKED)
def test_every_analysis_answers_and_its_code_gives_the_same(
    bench: Bench, tiny_name: str, tmp_path: Path, word: str, arguments: dict[str, Any]
) -> None:
    given = named(bench, arguments)
    if given.get("data", "").startswith("upload:"):
        rows = "text,label\nThe rest is,a\nThe best is,b\nThe test is,a\n"
        (tmp_path / "rows.csv").write_text(rows)
    answer = bench.answer(word, tiny_name, **given)
    assert answer["analysis"] == word and answer["title"]
    views = bench.views(answer)
    assert [view.title for view in views] == [view["title"] for view in answer["views"]]
    for section in answer["sections"]:
        assert max(section["views"], default=0) < len(views)
    expected = bench.result(answer, tmp_path)
    if word != "embed":
        check_code(answer, expected, tmp_path)
        return
    # Its vectors are a bare array.
    vectors = expected.data["vector"].to_numpy()
    assert (run_python(answer, tmp_path)["vectors"] == vectors).all()
    assert (numpy.load(tmp_path / "embed.npy") == vectors).all()
    (tmp_path / "embed.npy").unlink()
    assert (numpy.load(run_command(answer, tmp_path)) == vectors).all()


@pytest.mark.slow
def test_a_probe_is_tested_on_a_second_dataset(
    bench: Bench, tiny_name: str, tmp_path: Path
) -> None:
    names = {}
    for name, words in (("train", "The rest is"), ("other", "The best is here")):
        rows = [f"{words} {k},{'good' if k % 2 else 'bad'}" for k in range(12)]
        content = "\n".join(["text,label", *rows]).encode()
        (tmp_path / f"{name}.csv").write_bytes(content)
        path = f"/api/datasets?file={name}.csv"
        names[name] = bench.ask("POST", path, content).json["name"]
    asked = {"data": names["train"], "test": names["other"], "pool": "rolling"}
    answer = bench.answer("probe", tiny_name, **asked, sites="layer.1")
    expected = bench.result(answer, tmp_path)
    assert expected.facts["test"]["data"] == "other"
    assert "There are too few texts of “bad”" in " ".join(answer["findings"])
    check_code(answer, expected, tmp_path)


def test_two_datasets_with_different_columns_are_no_command() -> None:
    request = {
        "analysis": "probe",
        "model": {"name": "tiny"},
        "arguments": {"data": "upload:1", "test": "upload:2"},
    }
    names = {
        "upload:1": Named("a.csv", {"label": "mood"}),
        "upload:2": Named("b.csv", {"label": "mood"}),
    }
    command = as_command(request, names).text
    assert command is not None and "--test b.csv" in command
    names["upload:2"] = Named("b.csv", {"label": "kind"})
    found = as_command(request, names)
    assert found.text is None and "different columns" in found.reason
    program = as_python(request, names)
    assert program is not None
    assert "test=hs.read('b.csv', label='kind')" in program


def test_an_analysis_takes_a_second_model(bench: Bench, tiny_name: str) -> None:
    for word in ("drift", "graft"):
        answer = bench.answer(word, tiny_name, **named(bench, QUESTIONS[word]))
        assert "models/other" in answer["python"]
        assert "models/other" in answer["command"]


def test_the_code_of_the_grid_and_of_what_a_token_reads_runs(
    bench: Bench, tiny_name: str, tmp_path: Path
) -> None:
    grid = bench.answer("grid", tiny_name, text=TEXT)
    norms = bench.result(grid, tmp_path).data["norm"].to_numpy()
    assert run_python(grid, tmp_path)["result"].data[
        "norm"
    ].to_numpy() == pytest.approx(norms)
    profile = hs.Result.load(run_command(grid, tmp_path))
    assert profile.data["norm"].to_numpy() == pytest.approx(norms)
    reads = bench.answer("reads", tiny_name, text=TEXT, token=2)
    result = run_python(reads, tmp_path)["result"]
    assert result.data["query_position"].to_numpy().tolist() == [2]
    largest = bench.result(reads, tmp_path).data["largest_pattern"].to_numpy()
    assert (result.data["pattern"].to_numpy()[:, :, 0].max(1) == largest).all()
    command = hs.Result.load(run_command(reads, tmp_path))
    assert command.data["pattern"].equals(result.data["pattern"])
    # Without a token it is the last one, as on the page.
    last = bench.answer("reads", tiny_name, text=TEXT)
    assert "queries='-1'" in last["python"] and "--queries=-1" in last["command"]


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"kind": "ablate"},
        {"kind": "replace", "text": "a b c d e"},
        {"kind": "replace", "text": "a b c d e", "token": 3},
        {"kind": "steer", "toward": "a", "away": "b", "strength": 9.0},
        {"kind": "add", "feature": 7, "strength": 9.0},
        {"kind": "scale", "feature": 7, "strength": 0.0},
    ],
)
def test_what_the_model_predicts_and_writes_is_what_its_code_does(
    bench: Bench,
    tiny_name: str,
    dictionaries: dict[str, hs.Dictionary],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any] | None,
) -> None:
    """Before and after a change of one state: the editing of every pass of `generate`,
    run here by other code.
    """
    given = {} if change is None else {"change": change}
    cell = {"text": TEXT, "site": "layer.2", "token": 1, **given}
    if change is not None and "feature" in change:
        cell["dictionary"] = bench.dictionary("layer.2")
    answer = bench.answer("state", tiny_name, **cell)
    names = run_python(answer, tmp_path)
    assert float(names["state"].norm()) == pytest.approx(answer["state"]["norm"])
    if change is not None:
        after = [one["probability"] for one in answer["state"]["after"]]
        assert names["best"].values.tolist() == pytest.approx(after, abs=1e-5)
    answer = bench.answer("continuation", tiny_name, **cell, new_tokens=5)
    written = answer["continuation"]
    assert written["before"] and (written["after"] is None) == (change is None)
    capsys.readouterr()
    run_python(answer, tmp_path)
    texts = [text for text in written.values() if text is not None]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)


def lens(text: str) -> dict[str, Any]:
    model = {"name": "smollm2", "dtype": "float16"}
    return {"analysis": "lens", "model": model, "arguments": {"texts": text}}


def test_a_hostile_text_is_one_word_of_the_command() -> None:
    for text in ("--help", "@name", "it's; rm -rf $HOME `x`", "a\nb", "-k"):
        words = shlex.split(as_command(lens(text), {}).text or "")
        assert words[:6] == [
            "hiddenscope",
            "lens",
            "--model",
            "smollm2",
            "--dtype",
            "float16",
        ]
        assert words[-1] == (f"@{text}" if text.startswith("@") else text)
        assert (words[-2] == "--") == text.startswith("-")


def test_where_there_is_no_command_the_reason_is_said() -> None:
    for text, said in (
        ("-", "takes '-' for"),
        ("corpus.txt", "'corpus.txt'"),
        ("  ", "something else"),
    ):
        command = as_command(lens(text), {})
        assert command.text is None and said in command.reason
    for word, said in {
        "state": "a single state",
        "continuation": "a single state",
        "answers": "a single state",
        "kept": "all texts, not one",
        "nearest": "not for a state",
    }.items():
        command = as_command({"analysis": word, "arguments": {}}, {})
        assert command.text is None and said in command.reason
        assert "Python only" in command.reason
    assert len(NO_COMMAND) == 5


def test_states_that_are_gone_have_no_code() -> None:
    given = {"analysis": "kept", "arguments": {"store": "store:0", "text": 1}}
    assert as_python(given, {}) is None
    assert as_python({"analysis": "answers", "arguments": {}}, {}) is None
    given = {"analysis": "profile", "store": "store:0", "arguments": {}}
    assert as_command(given, {}).reason == "The states are there no longer."
    there = {"store:0": Named("/kept/states")}
    fit = {"store": "store:0", "analysis": "fit"}
    fit |= {"arguments": {"to": "new", "site": "layer.2", "k": 4}}
    told = "hiddenscope fit /kept/states --to new --site layer.2 -k 4"
    assert as_command(fit, there).text == told
    file = {"store:0": Named("/kept/states.safetensors")}
    assert "reads a store, not a file" in as_command(fit, file).reason
    assert as_command(given, there).text == (
        "hiddenscope profile --states /kept/states --out profile.html"
    )
