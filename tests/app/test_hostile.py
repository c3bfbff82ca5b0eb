"""What an attacker, or a careless user, gives to the workbench: paths in texts, strange files, strange names."""

from pathlib import Path

import pytest

from .serving import Bench


@pytest.mark.parametrize("word", ["cluster", "search", "embed"])
def test_a_text_that_is_the_path_of_a_file_is_a_text(bench: Bench, tiny_name: str, tmp_path: Path, word: str) -> None:
    """Python reads a file where one string names it; a page would so read every text file of the machine."""
    secret = tmp_path / "diary.txt"
    secret.write_text("my secret\nmy second secret\nmy third secret\n")
    given = {"search": {"query": "a"}, "cluster": {"smallest": 2}}.get(word, {})
    submitted = bench.submit(word, tiny_name, texts=str(secret), **given)
    said = bench.wait(submitted.json["id"])
    if said["state"] == "done":
        assert b"secret" not in bench.ask("GET", f"/api/results/{said['result']}/file?format=json").body
        assert f"[{str(secret)!r}]" in bench.ask("GET", f"/api/results/{said['result']}").json["python"]
    else:  # one text has no clusters
        assert "1 text" in said["error"]
