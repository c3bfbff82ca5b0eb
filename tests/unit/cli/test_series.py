"""The command `series`: models as arguments, variants as options, a job that resumes."""

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from hiddenscope.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Two folders; all that is imported is left out of the collections that free them."""
    paths = []
    for seed in (0, 1):
        path = tmp_path_factory.mktemp("models") / f"seed{seed}"
        module: Any = tiny_model("llama", seed=seed, layers=2)
        module.save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
        paths.append(str(path))
    gc.collect()
    gc.freeze()
    yield paths
    gc.unfreeze()


@pytest.fixture
def texts(tmp_path: Path) -> str:
    path = tmp_path / "texts.txt"
    path.write_text("The cat sat on the mat.\nA dog sat.\n")
    return str(path)


def ask(*words: str) -> Any:
    return CliRunner().invoke(cli.app, ["series", *words])


def test_a_series_is_asked_kept_and_resumed(
    models: list[str], texts: str, tmp_path: Path
) -> None:
    to, out = tmp_path / "kept", tmp_path / "series.nc"
    words = [*models, models[0], "--texts", texts, "--analysis", "lens"]
    words += ["--option", "k=3", "--to", str(to), "--out", str(out), "--quiet"]
    done = ask(*words)
    assert done.exit_code == 0, done.output
    assert "seed0 (1) and seed0 (2) have the same weights" in done.stdout
    assert "same result as" in done.stdout
    files = {path: path.stat().st_mtime_ns for path in to.iterdir()}
    assert len(files) == 4
    lines = Path(texts).read_text().splitlines()
    expected = hs.series([*models, models[0]], "lens", lines, options={"k": 3})
    assert hs.Result.load(out).equals(expected)
    assert ask(*words).stdout == done.stdout
    assert {path: path.stat().st_mtime_ns for path in to.iterdir()} == files


def test_json_holds_the_whole_result(models: list[str], texts: str) -> None:
    printed = ask(*models, "--texts", texts, "--json", "--quiet")
    assert json.loads(printed.stdout)["kind"] == "series"


@pytest.mark.slow
def test_schemes_are_a_comma_list_or_repeated(models: list[str], texts: str) -> None:
    words = [models[0], "--texts", texts, "--json", "--quiet"]
    listed = ask(*words, "--quantise", "int8,fp8").stdout
    names = [member["name"] for member in json.loads(listed)["facts"]["members"]]
    assert names == ["seed0", "seed0 int8", "seed0 fp8"]
    assert ask(*words, "--quantise", "int8", "--quantise", "fp8").stdout == listed


def test_wrong_words_are_refused_in_a_sentence(models: list[str], texts: str) -> None:
    first = models[0]
    refused: list[tuple[list[str], str]] = [
        ([first, f"{first}x"], "Member 2 of 2, seed0x: No model at"),
        ([first], "there is nothing to compare it with"),
        ([*models, "--revision", "step1"], "there are 2 models"),
        ([first, "--revision", "step1"], "Cannot make a series: it has one member"),
        ([*models, "--option", "k=3"], "No option 'k' in a series of profile"),
        ([*models, "--option", "sites=layer.9"], "No site 'layer.9'"),
        ([*models, "--analysis", "probe"], "have no labels"),
    ]
    for words, message in refused:
        done = ask(*words, "--texts", texts)
        assert done.exit_code == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
