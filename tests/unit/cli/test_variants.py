"""Models with adapters on the command line."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from tests.folders import saved_llama as saved_llama
from tests.folders import tiny_llama
from tests.unit.loading.adapters import write_adapter

runner = CliRunner()
TEXT = "the capital of France is"


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "lora", "lora", tiny_llama())


def run(*words: str | Path) -> str:
    done = runner.invoke(cli.app, [*map(str, words), "--quiet"])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_a_command_takes_an_adapter(lora: Path, saved_llama: Path) -> None:
    output = run("lens", TEXT, "--model", saved_llama, "--adapter", lora, "--json")
    answer = json.loads(output)
    model = hs.load(hs.Adapted(saved_llama, lora))
    assert answer["facts"] == json.loads(json.dumps(hs.lens(model, TEXT).facts))
    assert answer["source"]["adapters"][0]["kind"] == "LORA"


def test_compare_switches_the_adapter_off(
    lora: Path,
    saved_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loads: list[object] = []
    load = hs.load

    def counting(source: object, **options: object) -> hs.Model:
        loads.append(source)
        return load(source, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(hs, "load", counting)
    words = ("--model", saved_llama, "--adapter", lora, "--other", saved_llama)
    output = run("compare", TEXT, *words, "--json")
    # The base is loaded once, for both sides.
    assert len(loads) == 1
    on = load(hs.Adapted(saved_llama, lora))
    expected = hs.compare(on, TEXT, other=load(saved_llama)).facts
    assert json.loads(output)["facts"] == json.loads(json.dumps(expected))


def test_what_is_wrong_with_an_adapter_is_one_sentence(
    saved_llama: Path, tmp_path: Path, lora: Path
) -> None:
    path = tmp_path / "states.safetensors"
    hs.load((tiny_llama(), None)).capture([[5, 6, 7]]).save(path)
    nowhere = ["lens", TEXT, "--model", saved_llama, "--adapter", "./nowhere"]
    useless = ["profile", "--states", path, "--adapter", lora]
    for words, said in (
        (nowhere, "No adapter in nowhere: it does not exist."),
        (useless, "Cannot use --adapter with --states"),
    ):
        done = runner.invoke(cli.app, list(map(str, words)))
        assert done.exit_code == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr
