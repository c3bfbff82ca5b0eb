"""What an attacker, or a careless user, gives to the workbench: paths in texts, strange
files, strange names.
"""

import json
import os
import shlex
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.app.code import Named, as_command
from hiddenscope.app.desk import Desk
from hiddenscope.app.library import Library
from hiddenscope.app.schemas import ModelChoice
from hiddenscope.app.stores import STATES_FORMATS
from hiddenscope.cli.main import app
from tests.workbench.serving import Bench, computed, same, settings_in


@pytest.mark.parametrize("word", ["cluster", "search", "embed"])
def test_a_text_that_is_the_path_of_a_file_is_a_text(
    bench: Bench, tiny_name: str, tmp_path: Path, word: str
) -> None:
    """Python reads a file where one string names it; a page would so read every text
    file of the machine.
    """
    secret = tmp_path / "diary.txt"
    secret.write_text("my secret\nmy second secret\nmy third secret\n")
    given = {"search": {"query": "a"}, "cluster": {"smallest": 2}}.get(word, {})
    submitted = bench.submit(word, tiny_name, texts=str(secret), **given)
    said = bench.wait(submitted.json["id"])
    if said["state"] == "done":
        assert (
            b"secret"
            not in bench.ask(
                "GET", f"/api/results/{said['result']}/file?format=json"
            ).body
        )
        assert (
            f"[{str(secret)!r}]"
            in bench.ask("GET", f"/api/results/{said['result']}").json["python"]
        )
    else:  # one text has no clusters
        assert "1 text" in said["error"]


def header(path: Path, content: Any) -> None:
    """A .safetensors file that holds this header, and nothing else."""
    packed = content if isinstance(content, bytes) else json.dumps(content).encode()
    path.write_bytes(struct.pack("<Q", len(packed)) + packed)


def claims(states: Any, shape: Any = (1, 2, 3)) -> dict[str, Any]:
    notes = {"format": STATES_FORMATS[0], "states": json.dumps(states)}
    return {"__metadata__": notes, "values": {"shape": shape}}


def test_files_that_are_not_what_their_names_say_hide_no_others(
    root: Path, tmp_path: Path, another: Callable[..., Any]
) -> None:
    folder = tmp_path / "hostile"
    shutil.copytree(root / "models", folder / "models")
    model = folder / "models" / "tiny"
    (folder / "loop").symlink_to("loop")
    (folder / "all").symlink_to(".")
    (folder / "latest").symlink_to(model)
    (folder / "outside").symlink_to(root / "models" / "tiny")
    shutil.copytree(model, os.fsdecode(os.fsencode(folder) + b"/bad-\xff"))
    shutil.copytree(model, os.fsdecode(os.fsencode(folder) + b"/bad-\xfe"))
    header(folder / "deep.safetensors", b"[" * 100_000)
    header(folder / "empty.safetensors", claims({}))
    header(folder / "bare.safetensors", claims({"": {}}))
    header(
        folder / "words.safetensors",
        claims({"": {"sites": ["x"], "count": "x", "source": []}}, [1, "x", 3]),
    )
    with another(root=folder) as bench:
        listed = bench.ask("GET", "/api/models")
        assert listed.status == 200, listed.body
        found = [one["label"] for one in listed.json if one["source"] == "folder"]
        assert found == [
            "latest",
            "models/encoder",
            "models/other",
            "models/tiny",
            "models/words",
        ]
        stores = bench.ask("GET", "/api/stores")
        assert stores.status == 200 and stores.json == []


def test_a_store_that_changed_is_searched_again(
    root: Path, tmp_path: Path, another: Callable[..., Any]
) -> None:
    """What changes is a folder in the store's folder, whose own time stays as it was."""
    below = tmp_path / "below"
    shutil.copytree(root / "models" / "tiny", below / "tiny")
    hs.extract(
        hs.load(below / "tiny"), ["a b", "c d", "e f"], to=below / "states"
    ).close()
    with another(root=below) as bench:
        name, store = (
            bench.folder("tiny"),
            bench.ask("GET", "/api/stores").json[0]["name"],
        )
        first = bench.submit("store", name, store=store, query="a b", site="layer.1")
        assert bench.wait(first.json["id"])["state"] == "done"
        assert (
            bench.submit("store", name, store=store, query="a b", site="layer.1").status
            == 200
        )
        next((below / "states" / "commits").iterdir()).unlink()
        assert (
            bench.submit("store", name, store=store, query="a b", site="layer.1").status
            == 202
        )


def test_what_was_asked_of_a_model_that_was_not_here_yet_is_asked_again(
    tmp_path: Path,
) -> None:
    """Of a model that is yet to be downloaded nobody knows the version: two servers may
    get two.
    """
    choice = ModelChoice(name="nobody/nothing")
    first, second = (
        Library(settings_in(tmp_path)).model_identity(choice) for _ in range(2)
    )
    assert first != second


def test_a_result_of_one_device_is_not_that_of_another(tmp_path: Path) -> None:
    asked = {
        "analysis": "grid",
        "model": {"name": "smollm2"},
        "arguments": {"text": "a"},
    }
    nothing: Any = None
    settings = [
        settings_in(tmp_path, device=device) for device in (None, "cpu", "cuda")
    ]
    assert (
        len(
            {
                Desk(one, nothing, nothing, Library(one)).resolve(asked)[0]
                for one in settings
            }
        )
        == 3
    )


def test_the_code_of_an_upload_names_its_columns(
    bench: Bench, tiny_name: str, here: Path
) -> None:
    rows = (
        b"text,sentence,kind\nnot this,The rest is,a\nnor this,The best is,b\nnor"
        b" that,The test is,a\n"
    )
    (here / "-rows.csv").write_bytes(rows)
    name = bench.ask(
        "POST", "/api/datasets?file=-rows.csv&text=sentence&label=kind", rows
    ).json["name"]
    asked = {"data": name, "method": "pca", "sites": "layer.1"}
    answered = bench.answer("project", tiny_name, **asked)
    expected = computed(bench, answered["id"], here)
    exec(answered["python"].replace("project.html", "python.nc"), {})
    assert same(hs.Result.load(here / "python.nc"), expected)
    words = shlex.split(
        answered["command"].replace("--out project.html", "--out command.nc")
    )
    with pytest.raises(SystemExit) as left:
        get_command(app)(args=words[1:])
    assert left.value.code == 0 and same(hs.Result.load(here / "command.nc"), expected)
    asked = {"analysis": "graft", "model": {"name": "a"}, "arguments": {"data": name}}
    grafted = as_command(asked, {name: Named("rows.csv", {"text": "sentence"})})
    assert grafted.text is not None and "--text sentence" in grafted.text


def test_nothing_long_comes_back_in_a_refusal(bench: Bench) -> None:
    answer = bench.ask(
        "POST",
        "/api/jobs",
        {"analysis": "x" * 10**6, "model": {"name": "a"}, "arguments": {}},
    )
    assert answer.status == 422 and len(answer.body) < 2_000


def test_two_columns_of_one_name_among_very_many_are_found_at_once(
    bench: Bench,
) -> None:
    columns = ",".join(f"c{number}" for number in range(300_000))
    answer = bench.ask(
        "POST", "/api/datasets?file=wide.csv", f"{columns},twice,twice\n".encode()
    )
    assert answer.status == 422 and "'twice'" in answer.json["detail"]


def test_a_label_that_is_half_a_character_is_refused(bench: Bench) -> None:
    answer = bench.ask(
        "POST", "/api/datasets?file=a.jsonl", b'{"text": "a", "label": "\\ud800"}\n'
    )
    assert answer.status == 422 and "half of a character" in answer.json["detail"]


def test_a_label_that_has_parts_is_refused(bench: Bench) -> None:
    for label in (b"[1, 2]", b'{"a": 1}'):
        answer = bench.ask(
            "POST",
            "/api/datasets?file=a.jsonl",
            b'{"text": "a", "label": ' + label + b"}\n",
        )
        assert (
            answer.status == 422
            and "line 1 has a label with parts" in answer.json["detail"]
        )


def test_what_is_kept_is_its_owners_alone(bench: Bench) -> None:
    assert stat.S_IMODE(bench.settings.folder.stat().st_mode) == 0o700
