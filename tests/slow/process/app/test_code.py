"""As Python and as command: what the page offers is run here, and gives the same
numbers.
"""

import shlex
from pathlib import Path
from typing import Any

import numpy
import pytest
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.app.code import as_command
from hiddenscope.cli.main import app
from tests.slices import sliced
from tests.workbench.asking import MANY_TEXTS, QUESTIONS, TEXT, named
from tests.workbench.serving import Bench, computed, same

NO_COMMAND = {"search"}


WITH_RESULT = [*QUESTIONS.items(), ("visibility", MANY_TEXTS)]
WITH_RESULT.remove(("embed", QUESTIONS["embed"]))


@pytest.mark.parametrize(("word", "arguments"), sliced(WITH_RESULT, 7))
def test_the_code_of_every_analysis_gives_the_same(
    bench: Bench, tiny_name: str, here: Path, word: str, arguments: dict[str, Any]
) -> None:
    answered = bench.answer(word, tiny_name, **named(bench, arguments))
    expected = computed(bench, answered["id"], here)
    namespace: dict[str, Any] = {}
    exec(answered["python"].replace(f"{word}.html", "python.nc"), namespace)
    assert same(hs.Result.load(here / "python.nc"), expected)
    if word in NO_COMMAND:
        assert (
            answered["command"] is None and "Python only" in answered["command_reason"]
        )
        return
    words = shlex.split(
        answered["command"].replace(f"--out {word}.html", "--out command.nc")
    )
    assert words.pop(0) == "hiddenscope"
    with pytest.raises(SystemExit) as left:
        get_command(app)(args=words)
    assert left.value.code == (1 if word == "drift" else 0)
    assert same(hs.Result.load(here / "command.nc"), expected)


@pytest.mark.parametrize("word", ["project", "probe", "cluster"])
def test_the_code_of_a_position_gives_the_same(
    bench: Bench, tiny_name: str, here: Path, word: str
) -> None:
    """A position is a number in the request, in Python and after the command has read
    its word.
    """
    texts = (
        {"texts": ["a b", "c d", "e f", "d e", "f g", "h i"]}
        if word == "cluster"
        else {}
    )
    answered = bench.answer(word, tiny_name, **QUESTIONS[word] | texts | {"pool": -1})
    expected = computed(bench, answered["id"], here)
    exec(answered["python"].replace(f"{word}.html", "python.nc"), {})
    assert same(hs.Result.load(here / "python.nc"), expected)
    words = shlex.split(
        answered["command"].replace(f"--out {word}.html", "--out command.nc")
    )
    with pytest.raises(SystemExit) as left:
        get_command(app)(args=words[1:])
    assert left.value.code == 0 and same(hs.Result.load(here / "command.nc"), expected)


@pytest.mark.parametrize("pooled", ["3", "middle", 1.5, True, 10**9])
def test_a_pooling_that_there_is_not_is_refused(
    bench: Bench, tiny_name: str, pooled: Any
) -> None:
    answer = bench.submit("embed", tiny_name, texts=[TEXT], pool=pooled)
    assert answer.status == 422 and "pool" in answer.json["detail"]


def test_the_code_of_embed_writes_the_same_vectors(
    bench: Bench, tiny_name: str, here: Path
) -> None:
    answered = bench.answer("embed", tiny_name, **QUESTIONS["embed"])
    expected = computed(bench, answered["id"], here).data["vector"].to_numpy()
    exec(answered["python"], {})
    assert (numpy.load(here / "embed.npy") == expected).all()
    (here / "embed.npy").unlink()
    with pytest.raises(SystemExit) as left:
        get_command(app)(args=shlex.split(answered["command"])[1:])
    assert left.value.code == 0 and (numpy.load(here / "embed.npy") == expected).all()


def test_the_code_of_the_grid_and_of_a_state_runs(
    bench: Bench, tiny_name: str, here: Path
) -> None:
    grid = bench.answer("grid", tiny_name, text=TEXT)
    namespace: dict[str, Any] = {}
    exec(grid["python"], namespace)
    norms = computed(bench, grid["id"], here).data["norm"].to_numpy()
    assert namespace["result"].data["norm"].to_numpy() == pytest.approx(norms)
    for change in (
        None,
        {"kind": "ablate"},
        {"kind": "replace", "text": "a b c d e"},
        {"kind": "steer", "toward": "a", "away": "b"},
    ):
        given = {} if change is None else {"change": change}
        state = bench.answer(
            "state", tiny_name, text=TEXT, site="layer.2", token=1, **given
        )
        exec(state["python"], namespace)
        if change is not None:
            best = namespace["best"].values.tolist()
            assert best == pytest.approx(
                [one["probability"] for one in state["state"]["after"]], abs=1e-5
            )


@pytest.mark.parametrize(
    ("text", "said"),
    [("-", "takes '-' for"), ("corpus.txt", "'corpus.txt'"), ("  ", "something else")],
)
def test_a_text_that_a_command_line_takes_for_something_else_has_no_command(
    text: str, said: str
) -> None:
    asked = {
        "analysis": "lens",
        "model": {"name": "smollm2"},
        "arguments": {"texts": text},
    }
    assert as_command(asked, {}).text is None and said in as_command(asked, {}).reason


@pytest.mark.parametrize(
    "text", ["--help", "@name", "it's; rm -rf $HOME `x`", "a\nb", "-k"]
)
def test_a_hostile_text_is_one_word_of_the_command(text: str) -> None:
    asked = {
        "analysis": "lens",
        "model": {"name": "smollm2"},
        "arguments": {"texts": text},
    }
    words = shlex.split(as_command(asked, {}).text or "")
    assert words[-1] == (f"@{text}" if text.startswith("@") else text)
    assert words[-2] == "--" or not text.startswith("-")


@pytest.mark.parametrize(
    "change",
    [
        None,
        {"kind": "ablate"},
        {"kind": "steer", "toward": "a", "away": "b", "strength": 9.0},
    ],
)
def test_what_the_model_writes_is_what_its_code_writes(
    bench: Bench,
    tiny_name: str,
    capsys: pytest.CaptureFixture[str],
    change: dict[str, Any] | None,
) -> None:
    """Before and after a change of one state: the editing of every pass of `generate`,
    run here by other code.
    """
    given = {} if change is None else {"change": change}
    arguments = {"text": TEXT, "site": "layer.2", "token": 1, "new_tokens": 5, **given}
    answered = bench.answer("continuation", tiny_name, **arguments)
    written = answered["continuation"]
    assert written["before"] and (written["after"] is None) == (change is None)
    capsys.readouterr()
    exec(answered["python"], {})
    expected = [
        text for text in (written["before"], written["after"]) if text is not None
    ]
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in expected)


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
