"""The command line: it starts quickly, says what goes wrong in words, and hides nothing
from the docs.
"""

import io
import json
import re
import runpy
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray
from typer.main import get_command
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import errors, progress
from hiddenscope.catalog import ANALYSES
from hiddenscope.cli import arguments, endings, terminal
from hiddenscope.cli import main as cli
from hiddenscope.cli.demo import _print_grid
from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import SiteError
from hiddenscope.loading import zoo
from hiddenscope.loading.outline import Outline, check_sites, outline
from hiddenscope.results import findings_of
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import render
from tests.places import ROOT

runner = CliRunner()
TEXT = "The capital of France is Paris."
LABELLED = [
    ("The capital", "a"),
    ("capital The", "a"),
    ("of France", "b"),
    ("France of", "b"),
]
COMMANDS = get_command(cli.app).commands  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _progress_as_it_was() -> Iterator[None]:
    yield
    progress.show(None)


def options_of(name: str) -> set[str]:
    return {option for parameter in COMMANDS[name].params for option in parameter.opts}


def test_every_command_takes_the_shared_options_and_says_what_each_does() -> None:
    for name, command in COMMANDS.items():
        shared = {"--json", "--progress", "--debug"}
        if name not in ("models", "store", "serve", "doctor"):
            shared |= {"--device"}
        # A dictionary is trained on states that are there, and kept where --to says.
        if name not in ("models", "store", "serve", "doctor", "fit"):
            shared |= {"--dtype"}
        if name not in ("store", "serve", "doctor", "fit"):
            # The models of a series are arguments.
            shared |= {"--out"} if name == "series" else {"--model", "--out"}
        assert shared <= options_of(name), name
        assert command.help, name
        silent = [part.name for part in command.params if not part.help]
        assert set(silent) <= {"help"}, name


def test_the_docs_have_every_command_option_and_analysis() -> None:
    docs = ROOT / "docs"
    generate = runpy.run_path(str(docs / "generate.py"))
    for name, page in generate["PAGES"].items():
        assert (docs / name).read_text("utf-8") == page(), f"{name}: run `make docs`"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["models", "--quiet", "--progress"], "--progress was given 2 times"),
        (["models", "--out", "a.json", "--out", "b.json"], "--out was given 2 times"),
        (["lens", "a", "-k", "1", "-k", "2"], "-k was given 2 times"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(words: list[str], told: str) -> None:
    done = runner.invoke(cli.app, words)
    assert (done.exit_code, told in done.output) == (2, True), done.output


def test_models_lists_the_zoo(tmp_path: Path) -> None:
    table = runner.invoke(cli.app, ["models"])
    assert table.exit_code == 0
    assert "smollm2" in table.stdout
    rows = json.loads(runner.invoke(cli.app, ["models", "--json"]).stdout)
    assert rows[0]["name"] == "smollm2"
    assert {
        "name",
        "description",
        "licence",
        "wheel",
        "cached",
        "bytes",
        "path",
    } <= set(rows[0])
    runner.invoke(
        cli.app, ["models", "--model", "minilm", "--out", str(tmp_path / "models.json")]
    )
    assert [
        row["name"] for row in json.loads((tmp_path / "models.json").read_text())
    ] == ["minilm"]


@pytest.mark.parametrize(
    ("name", "found"),
    [("nowhere/x.json", "there is no folder"), ("x.pdf", "this command writes")],
)
def test_a_list_that_cannot_be_written(tmp_path: Path, name: str, found: str) -> None:
    done = runner.invoke(cli.app, ["models", "--out", str(tmp_path / name)])
    assert done.exit_code == 2
    assert found in done.stderr
    assert "unexpected" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_only_a_newline_ends_a_line_of_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a\u2028b\x0cc\n\nd\n"))
    assert arguments.texts_in(["-", "e"]) == ["a\u2028b\x0cc", "d", "e"]


# Commands that take no texts, or a dataset.
WITHOUT_TEXTS = {
    "demo",
    "serve",
    "doctor",
    "anatomy",
    "models",
    "store",
    "extract",
    "fit",
    "project",
    "probe",
    "graft",
    "series",
    "variable",
}
# What stands beside the texts.
BESIDE = {
    "circuit": ["b", "--answer", " x", "--other", " y"],
    "steer": ["--toward", "a", "--away", "b"],
    "contributions": ["--answer", " a"],
    "patch": ["b", "--answer", " x", "--other", " y"],
    "edges": ["b", "--answer", " x", "--other", " y"],
    "examples": ["--direction", "layer.1.mlp.neuron.7"],
}
BEFORE = {"drift": ["smollm2"], "search": ["cities-complete"], "compare": ["A text."]}


def test_a_file_name_is_never_taken_as_a_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("plainly").write_text("A text.\n")
    for name in set(COMMANDS) - WITHOUT_TEXTS:
        for word in ("notes.MD", "plainly"):
            words = [name, *BEFORE.get(name, []), word, *BESIDE.get(name, [])]
            done = runner.invoke(cli.app, words)
            assert (done.exit_code, done.stdout) == (2, ""), words
            assert word in done.stderr and f"@{word}" in done.stderr


def test_what_words_stand_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, lines = tmp_path / "table.csv", tmp_path / "lines.txt"
    table.write_text("review,stars\ngood,5\nso so,3\n")
    lines.write_text("one\n\ntwo\n")
    assert arguments.texts_in([f"@{lines}", "three.", "@@four"]) == [
        "one",
        "two",
        "three.",
        "@four",
    ]
    assert arguments.texts_in([], str(table), "review") == ["good", "so so"]
    assert arguments.texts_in([f"@{table}"], None, "review") == ["good", "so so"]
    assert arguments.texts_in(["Read a.txt and e.g. b", "U.S.", "3.5"]) == [
        "Read a.txt and e.g. b",
        "U.S.",
        "3.5",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("text\nfrom stdin\n"))
    assert arguments.texts_in(["@-.csv"]) == ["from stdin"]
    with pytest.raises(errors.TextError, match="it holds 2"):
        arguments.text_in(f"@{lines}")
    with pytest.raises(errors.TextError, match="no file is given"):
        arguments.texts_in(["A text."], None, "review")
    for word in ("", " "):
        with pytest.raises(errors.TextError):
            arguments.texts_in([word])


def test_texts_come_from_files_and_from_stdin(folder: str, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("review,stars\nThe capital,5\nof France is,3\n")
    wanted = json.loads(
        ask("capture", "The capital", "of France is", "--model", folder, "--json")
    )["texts"]
    for words in ([f"@{table}"], ["--texts", str(table)]):
        assert (
            json.loads(
                ask("capture", *words, "--text", "review", "--model", folder, "--json")
            )["texts"]
            == wanted
        )
    said = ask(
        "capture",
        "-.csv",
        "--text",
        "review",
        "--model",
        folder,
        "--json",
        stdin=table.read_text(),
    )
    assert json.loads(said)["texts"] == wanted
    assert "2 vectors" in ask(
        "embed", f"@{table}", "--text", "review", "--model", folder
    )
    found = ask(
        "search", str(table), "The capital", "--text", "review", "--model", folder
    )
    assert found == ask(
        "search", f"@{table}", "The capital", "--text", "review", "--model", folder
    )
    done = runner.invoke(
        cli.app, ["embed", f"@{table}", "--text", "no", "--model", folder]
    )
    assert (done.exit_code, "No column 'no'" in done.stderr) == (2, True)


@pytest.fixture
def sae(folder: str, tmp_path: Path) -> str:
    """The folder of a dictionary of the model: components of its states."""
    rows = hs.load(folder).capture([TEXT, TEXT[::-1]], "layer.1")["layer.1"]
    mean = rows.mean(0)
    _, _, components = torch.linalg.svd(rows - mean, full_matrices=False)
    both = torch.cat([components[:6], -components[:6]])
    hs.Dictionary(
        both,
        both.T.contiguous(),
        torch.zeros(len(both)),
        mean,
        "layer.1",
        "layer.1",
        Encoding("relu", centred=True),
    ).save(tmp_path / "sae")
    return str(tmp_path / "sae")


def test_a_dictionary_is_proved_on_the_texts_that_are_given(
    folder: str, sae: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.txt"
    file.write_text(f"{TEXT}\n{TEXT[::-1]}\n")
    model = ["--model", folder]
    asked = ["features", TEXT, TEXT[::-1], "--dictionary", sae, *model, "--json"]
    shares = set()
    for options, texts in (
        ([], None),
        (["--proof-texts", str(file)], [TEXT, TEXT[::-1]]),
    ):
        facts = json.loads(ask(*asked, *options))["facts"]
        proof = hs.Dictionary.read(sae, hs.load(folder), texts=texts).proof
        assert proof is not None
        assert facts["proved"] == pytest.approx(proof.stated.unexplained, rel=1e-5)
        shares.add(round(facts["proved"], 6))
    assert len(shares) == 2


def test_the_scores_of_a_kept_probe_are_shown_token_by_token(
    folder: str, tmp_path: Path
) -> None:
    """Of --out probe.nc too: a probe that a command fitted is followed by another."""
    for name, last in (("train", 6), ("other", 12)):
        rows = [
            f"{text} {'is ' * k},{label}"
            for k in range(last)
            for text, label in LABELLED
        ]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *rows]))
    kept, page = tmp_path / "probe.nc", tmp_path / "examples.json"
    words = ["probe", f"{tmp_path}/train.csv", "--test", f"{tmp_path}/other.csv"]
    words += ["--pool", "softmax", "--sites", "layer.1", "--model", folder]
    said = ask(*words, "--out", str(kept))
    assert "There are too few texts of “a” to say where 5% of them would ring" in said
    probe = hs.Probe.of(hs.Result.load(kept))
    probe.save(tmp_path / "probe.safetensors")
    states = hs.load(folder).capture([TEXT], "layer.1")
    assert isinstance(states, hs.States)
    scores = probe.scores(probe.readings(states["layer.1"]))
    for path in (kept, tmp_path / "probe.safetensors"):
        found = ["examples", TEXT, "--direction", str(path), "--model", folder]
        ask(*found, "-k", "3", "--out", str(page))
        data = hs.Result.load(page).data
        strongest = data["activation"].to_numpy()[0, :3]
        expected = np.sort(scores[1:])[::-1][:3]
        assert strongest == pytest.approx(expected, rel=1e-4), path


def test_every_command_with_a_dictionary_takes_texts_for_its_proof(
    folder: str, sae: str, tmp_path: Path
) -> None:
    file = tmp_path / "short.txt"
    file.write_text("T\n")
    proof = ["--proof-texts", str(file), "--model", folder]
    feature = f"feature:{sae}:2"
    commands = (
        ["features", TEXT, "--dictionary", sae],
        ["examples", TEXT, "--direction", f"{sae}:2"],
        ["lens", feature],
        ["contributions", TEXT, "--answer", feature],
        ["steer", TEXT, "--toward", feature],
        ["compare", TEXT, TEXT[::-1], "--sites", feature],
    )
    for words in commands:
        done = runner.invoke(cli.app, [*words, *proof])
        # One token has nothing beside the first.
        assert (done.exit_code, "no states are left" in done.stderr) == (2, True)
        assert "or more: --proof-texts FILE." in done.stderr
    for words in (
        ["features", TEXT, "--site", "layer.1"],
        ["examples", TEXT, "--direction", "layer.1.mlp.neuron.3"],
        ["lens", TEXT],
        ["contributions", TEXT, "--answer", "of"],
        ["steer", TEXT, "--toward", "of", "--away", "is"],
        ["compare", TEXT, TEXT[::-1]],
        ["lens", TEXT, "--fit", "tuned", "--out", str(tmp_path / "lens.safetensors")],
    ):
        done = runner.invoke(cli.app, [*words, *proof])
        # Nothing is left unsaid of an option that did nothing.
        assert (done.exit_code, "no dictionary is read" in done.stderr) == (2, True)


def test_a_misspelt_word_for_a_dictionary_is_answered_with_the_words(
    folder: str,
) -> None:
    asked = ["features", TEXT, "--dictionary", "neuron", "--model", folder]
    refused = runner.invoke(cli.app, asked)
    assert refused.exit_code == 2
    assert "or neurons, pca or random" in refused.output


def test_a_feature_of_a_dictionary_stands_in_place_of_texts(
    folder: str, sae: str, tmp_path: Path
) -> None:
    feature, model = f"feature:{sae}:2", ["--model", folder]
    assert "Feature 2 at layer.1 writes" in ask("lens", feature, *model, "-k", "3")
    said = ask("contributions", "The capital", "--answer", feature, *model)
    assert "layer.1 along feature 2" in said
    words = ["steer", "The capital", "--toward", feature, *model, "--new-tokens", "0"]
    assert "what feature 2 writes" in ask(*words)
    path = str(tmp_path / "compare.json")
    pair = ["compare", TEXT, TEXT[::-1], *model, "--out", path, "--sites"]
    ask(*pair, feature)
    own = hs.load(folder)
    along = hs.Dictionary.read(sae, own)[2]
    expected = hs.compare(own, TEXT, TEXT[::-1], sites=along).data
    found = hs.Result.load(path).data
    xarray.testing.assert_allclose(found, expected, rtol=1e-5)
    ask(*pair, "layer.1")
    assert list(hs.Result.load(path).data) != list(found)
    for more, told in (
        (["--away", "is"], "--toward is a feature"),
        (["--sites", "layer.1.mlp.neurons"], "states at layer.1.mlp.neurons have"),
    ):
        done = runner.invoke(cli.app, [*words, *more])
        assert (done.exit_code, told in done.stderr) == (2, True), done.stderr
    done = runner.invoke(cli.app, ["lens", f"{feature}000", *model])
    assert (done.exit_code, "No feature 2,000" in done.stderr) == (2, True)
    for words in (["feature:sae"], ["feature:sae:-1"], [feature, feature]):
        done = runner.invoke(cli.app, ["lens", *words, *model])
        assert (done.exit_code, "Give feature:PATH:17 alone" in done.stderr) == (
            2,
            True,
        )
    done = runner.invoke(cli.app, ["steer", "The capital", "--toward", "is", *model])
    assert (done.exit_code, "No texts" in done.stderr) == (2, True)


def test_errors_give_remedies_for_the_command_line(folder: str) -> None:
    done = runner.invoke(
        cli.app, ["capture", "The " * 3000, "--model", folder, "--quiet"]
    )
    assert done.exit_code == 2
    assert "--truncate" in done.stderr and "truncate=" not in done.stderr
    done = runner.invoke(
        cli.app, ["cluster", *["The capital"] * 3, "--model", folder, "--quiet"]
    )
    assert done.exit_code == 2
    assert "--smallest" in done.stderr and "smallest=" not in done.stderr


def test_a_table_for_another_program_is_not_folded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.table(
        ["site", "module", "n"],
        [["layer.0", "x" * 90, "1"], ["final", "y", "23"]],
        text=(0, 1),
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:] == [f"layer.0  {'x' * 90}   1", f"final    {'y':90}  23"]


def test_an_error_of_ours_is_one_message_without_a_traceback() -> None:
    done = runner.invoke(cli.app, ["models", "--model", "no\x1b[31msuch"])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(
        r"No model 'no\x1b[31msuch' in the zoo: it has smollm2"
    )
    assert "Traceback" not in done.stderr
    with pytest.raises(errors.UnknownModel):
        runner.invoke(
            cli.app, ["models", "--model", "nothing", "--debug"], catch_exceptions=False
        )


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "Stopped."),
        (
            errors.TextError("An empty text", "it has no tokens", "Give a text."),
            2,
            "An empty text: it has no tokens.",
        ),
        (ZeroDivisionError("by zero"), 2, "ZeroDivisionError: by zero"),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(folder: Path) -> bool:
        raise raised

    monkeypatch.setattr(zoo, "is_complete", fail)
    done = runner.invoke(cli.app, ["models"])
    assert (done.exit_code, done.stdout) == (code, "")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("flag", "choice"), [([], None), (["--quiet"], False), (["--progress"], True)]
)
def test_progress_is_shown_as_asked(
    flag: list[str], choice: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool | None] = []
    monkeypatch.setattr(progress, "show", chosen.append)
    runner.invoke(cli.app, ["models", *flag])
    assert chosen == [choice]


def test_project_takes_several_models(folder: str, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    rows = [("text", "label"), *LABELLED]
    data.write_text("".join(f"{text},{label}\n" for text, label in rows))
    words = ["project", str(data), "--method", "pca", "--json"]
    result = json.loads(ask(*words, "--model", folder, "--model", folder))
    assert [part["model"] for part in result["facts"]["parts"]] == [
        (name := Path(folder).name),
        f"{name} (2)",
    ]
    with_other = json.loads(ask(*words, "--model", folder, "--other", folder))
    assert with_other["facts"]["parts"] == result["facts"]["parts"]


def test_wrong_usage_exits_with_2() -> None:
    assert runner.invoke(cli.app, ["capture"]).exit_code == 2
    assert runner.invoke(cli.app, ["nothing"]).exit_code == 2
    assert (
        runner.invoke(cli.app, ["capture", "a", "b", "--generate", "3"]).exit_code == 2
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Paris", "Paris"),
        (" größer 東京 🙂", " größer 東京 🙂"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("\x9b31m", r"\x9b31m"),
        ("\u202eevil\u2066", r"\u202eevil\u2066"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\u2028\u200b\ufeff", r"\u2028\u200b\ufeff"),
        ("\ud800", r"\ud800"),
        ("\U000e0041", r"\U000e0041"),
        ("[red]x[/red]", "[red]x[/red]"),
    ],
)
def test_what_reaches_a_terminal_is_visible(
    text: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert terminal.visible(text) == shown
    terminal.table(["name", text], [["x", text]])
    assert shown.strip() in capsys.readouterr().out


def test_the_grid_runs_up(capsys: pytest.CaptureFixture[str]) -> None:
    coords = {
        "site": ["layer.0", "layer.1", "final"],
        "string": ("token", ["The", "[b]\x1b"]),
    }
    norm = (("site", "token"), [[1.0, 2.0], [22_000.0, 200.0], [0.0, 3.0]])
    _print_grid(hs.Result("profile", xarray.Dataset({"norm": norm}, coords), {}, {}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["final", "layer.1", "layer.0"]
    assert "22,000" in lines[2]
    assert "█" in lines[2]
    assert r"[b]\x1b" in lines[0]


def ask(*words: str, stdin: str | None = None) -> str:
    done = runner.invoke(
        cli.app,
        [*words, "--quiet", "--device", "cpu", "--dtype", "float32"],
        input=stdin,
    )
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    return done.stdout


def test_anatomy_prints_the_proof(folder: str, tmp_path: Path) -> None:
    printed = ask("anatomy", "--model", folder, "--out", str(tmp_path / "proof.csv"))
    assert [
        site
        for site in ("layer.0", "layer.1", "layer.2", "layer.3", "final")
        if site not in printed
    ] == []
    assert "layer.3" in (tmp_path / "proof.csv").read_text()
    assert json.loads(ask("anatomy", "--model", folder, "--json"))["kind"] == "anatomy"


def test_capture_prints_describes_and_keeps(folder: str, tmp_path: Path) -> None:
    assert "layer.0" in ask("capture", TEXT, "--model", folder)
    said = json.loads(
        ask(
            "capture",
            TEXT,
            "The capital",
            "--model",
            folder,
            "--sites",
            "layer.1,final",
            "--json",
        )
    )
    assert (said["sites"], said["shape"]) == (["layer.1", "final"], [2, 8, 16])
    assert said["tokens"]["text"] == [0] * 6 + [1] * 2
    assert said["source"]["dtype"].endswith("float32")
    out = tmp_path / "states.safetensors"
    assert (
        ask(
            "capture",
            "-",
            "--model",
            folder,
            "--out",
            str(out),
            stdin=f"{TEXT}\nThe capital\n",
        )
        == ""
    )
    assert hs.States.load(out).tokens.texts == (TEXT, "The capital")


def test_capture_continues_a_text(folder: str) -> None:
    said = json.loads(
        ask(
            "capture",
            "The capital",
            "--model",
            folder,
            "--generate",
            "3",
            "--sites",
            "final",
            "--json",
        )
    )
    assert said["shape"][1] == 5


# The easiest first; patching is the hardest, and comes where a model can be patched,
# before the proof.
HEADINGS = [
    "How large is every state?",
    "What would each layer predict?",
    "Where do two texts differ?",
    "At which layers are the classes apart?",
    "Do the two datasets differ?",
    "Which states influence which?",
    "How do we know which state is which?",
]


@pytest.mark.slow
def test_demo_writes_a_page_and_says_where(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    printed = ask("demo", "--model", folder)
    page = tmp_path / "hiddenscope-demo.html"
    assert str(page) in printed
    assert printed.index("final ") < printed.index("Try next")
    told = page.read_text("utf-8")
    assert re.findall('<div class="prose claim">\n<h2>(.*?)</h2>', told) == HEADINGS
    # This tokenizer does not know Berlin.
    assert "Which states carry the answer" not in told
    open_views = re.sub("<details.*?</details>", "", told, flags=re.DOTALL).count(
        "<section data-view="
    )
    assert open_views == len(HEADINGS), "one view a part; the others are folded"
    profile = hs.profile(hs.load(folder, device="cpu", dtype="float32"), TEXT)
    assert (
        next(
            sentence
            for sentence in findings_of(profile)
            if "the median norm of the first" in sentence
        )
        in told
    )
    facts = json.loads(
        ask("demo", "--model", folder, "--json", "--out", str(tmp_path / "other.html"))
    )
    assert facts["profile"] == profile.facts
    assert Path(facts["page"]).read_text("utf-8") == told
    wrong = ["demo", "--model", folder, "--quiet", "--out", "x.safetensors"]
    done = runner.invoke(cli.app, wrong)
    assert (done.exit_code, "this command writes .html" in done.stderr) == (2, True)


def test_clusters_are_printed_line_by_line_where_output_is_piped(folder: str) -> None:
    """Each typical text has a line of its own; a line end within a text is still
    written out.
    """
    texts = [f"{'the cat' if k % 2 else 'on or of'} number {k}" for k in range(24)]
    printed = ask("cluster", *texts, "--model", folder)
    assert "\\n" not in printed
    lines = printed.splitlines()
    (head,) = [
        number for number, line in enumerate(lines) if line.startswith("cluster  size")
    ]
    typical = [
        line.split("  ")[-1].strip() for line in lines[head + 1 :] if line.strip()
    ]
    assert set(typical) <= set(texts) and len(typical) > 2


def test_the_program_runs_its_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hiddenscope", "--version"])
    monkeypatch.setattr(cli, "watch", lambda: None)
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    assert capsys.readouterr().out == f"{hs.__version__}\n"


def test_who_reports_a_stop_lets_others_report_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    state = endings._State()
    monkeypatch.setattr(endings, "_state", state)
    endings.report_stop()
    with ThreadPoolExecutor(1) as other:
        assert other.submit(state.lock.acquire, timeout=1).result()
    assert capsys.readouterr().err == "Stopped.\n"


def test_an_error_with_an_interrupt_behind_it_is_an_interrupt() -> None:
    def broken_off() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as interrupt:
            raise errors.LoadError(
                "Cannot read it", "an import was broken off", "Try again."
            ) from interrupt

    with pytest.raises(SystemExit) as left, endings.errors_as_messages(debug=False):
        broken_off()
    assert left.value.code == 130


@pytest.mark.parametrize(
    "cause",
    [MemoryError(), ImportError("x.so: failed to map segment from shared object")],
)
def test_a_lack_of_memory_is_named_whatever_broke(
    cause: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = errors.Damaged("Cannot read it", "MemoryError", "Download it again.")
    wrong.__cause__ = cause
    for error in (cause, wrong):
        with pytest.raises(SystemExit), endings.errors_as_messages(debug=False):
            raise error
        told = capsys.readouterr().err
        assert told.startswith("There is not enough memory") and "again" not in told


def test_figures_are_chosen_and_what_was_written_is_told(
    folder: str, tmp_path: Path
) -> None:
    out = tmp_path / "norms.svg"
    call = [
        "profile",
        TEXT,
        "--model",
        folder,
        "--sites",
        "layer.1,final",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    done = runner.invoke(
        cli.app,
        [*call, "--out", str(out), "--measure", "kurtosis", "--width", "column"],
    )
    assert (done.exit_code, done.stderr) == (
        0,
        f"Wrote {out} ({terminal.in_bytes(out.stat().st_size)}).\n",
    )
    assert "kurtosis" in out.read_text("utf-8") and "norm (L2)" not in out.read_text(
        "utf-8"
    )
    wide = re.search(r'width="([\d.]+)pt"', out.read_text("utf-8"))
    assert wide and float(wide[1]) == pytest.approx(3.3 * 72, abs=1)
    done = runner.invoke(
        cli.app, [*call, "--quiet", "--out", str(out), "--view", "grid-9"]
    )
    assert done.exit_code == 2 and "there are grid" in done.stderr
    assert "middle layers" in done.stdout, "what was found is told all the same"


def test_an_option_that_would_do_nothing_is_not_there() -> None:
    options = {name: options_of(name) for name in COMMANDS}
    figures = {
        name
        for name, found in options.items()
        if {"--view", "--measure", "--width"} <= found
    }
    assert figures == {analysis.word for analysis in ANALYSES if analysis.result}
    assert not {"--device", "--dtype"} & options["models"]


def test_the_other_side_has_a_dtype_and_a_device_of_its_own(
    folder: str, tmp_path: Path
) -> None:
    out = tmp_path / "sides.nc"
    call = [
        "compare",
        TEXT,
        "--model",
        folder,
        "--sites",
        "layer.1,final",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    other = [
        "--other-dtype",
        "bfloat16",
        "--other-device",
        "cpu",
        "--out",
        str(out),
        "--quiet",
    ]
    done = runner.invoke(cli.app, [*call, *other])
    assert done.exit_code == 0, done.stderr
    source = hs.Result.load(out).source
    assert (source["dtype"], source["other"]["dtype"], source["other"]["model"]) == (
        "float32",
        "bfloat16",
        source["model"],
    )
    title = next(iter(hs.Result.load(out).views.values()))
    assert "float32" in title and "bfloat16" in title
    page = render.page(hs.Result.load(out))
    assert "dtype: float32" in page and "dtype of the other side: bfloat16" in page


def test_groups_are_a_column_of_the_data(tmp_path: Path) -> None:
    """From the words of a command line to the facts, of a model and of its states."""
    folder = str(tmp_path / "model")
    model = tiny_model("gpt2")
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    texts = [
        f"the {noun} {verb}"
        for noun in ("cat", "dog", "one", "mat")
        for verb in ("sat", "on")
    ]
    lines = [f"{text},{k % 2},{text.split()[1]}" for k, text in enumerate(texts)]
    data = tmp_path / "data.csv"
    data.write_text("\n".join(["text,label,noun", *lines]))
    for words in (["probe"], ["project", "--method", "pca"]):
        done = runner.invoke(
            cli.app,
            [
                *words,
                str(data),
                "--group",
                "noun",
                "--model",
                folder,
                "--sites",
                "layer.1",
                "--json",
                "--quiet",
            ],
        )
        assert done.exit_code == 0, done.output
        facts = json.loads(done.stdout)["facts"]
        part = facts if words == ["probe"] else facts["parts"][0]
        assert (
            part["groups_given"] is True
            and part["groups"] == 4
            and part["smallest_p"] is not None
        )
    states = tmp_path / "states.safetensors"
    hs.load(folder).capture(texts, "layer.1").save(states)
    words = [
        "probe",
        str(data),
        "--group",
        "noun",
        "--states",
        str(states),
        "--json",
        "--quiet",
    ]
    assert json.loads(runner.invoke(cli.app, words).stdout)["facts"]["groups"] == 4
    done = runner.invoke(
        cli.app, ["probe", str(data), "--group", "topic", "--states", str(states)]
    )
    assert done.exit_code == 2 and "No column 'topic' in data.csv" in done.output
    done = runner.invoke(
        cli.app,
        ["probe", "position", "--each-token", "--group", "noun", "--model", folder],
    )
    assert done.exit_code == 2 and "Cannot use --group noun" in done.output


def test_a_job_tells_its_cost_and_its_end_in_json(folder: str, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("The cat sat.\nA dog ran.\n")
    to = str(tmp_path / "states")
    told = ask("extract", str(texts), "--to", to, "--model", folder, "--json")
    events = [json.loads(line) for line in told.splitlines()]
    assert [event["event"] for event in (events[0], events[-1])] == ["cost", "end"]
    assert events[-1]["units_pending"] == 0


def test_what_a_checkpoint_says_of_itself(
    folder: str, headless: str, tmp_path: Path
) -> None:
    tiny = outline(folder)
    assert (tiny.layers, tiny.dtype, tiny.headless) == (3, "float32", False)
    assert (
        tiny.parameters
        == 5 * 16 + 2 * 16 * 16 + 3 * (4 * 16 * 16 + 3 * 16 * 32 + 2 * 16) - 64
    )
    assert outline(headless).headless
    assert outline("someone/model") == Outline("model")
    (tmp_path / "config.json").write_text(
        '{"num_hidden_layers": "many", "architectures": 3}'
    )
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    assert outline(str(tmp_path)).layers is None
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "config.json"
    config = json.loads(path.read_text())
    # The depth of two stacks, and that of foreign code, are not known from a config.
    for more in ({"is_encoder_decoder": True}, {"auto_map": {}}):
        path.write_text(json.dumps(config | more))
        assert outline(str(path.parent)).layers is None, more
    with pytest.raises(SiteError, match="it has layer.0 to layer.3"):
        check_sites(tiny, "layer.2,layer.4.attn")
    check_sites(tiny, "layer.*,final,layer.-1,*.mlp,layer.3,hidden_states[9]")


PATCH = "patch The of --answer x --other"
# What is wrong, and what is said of it before the weights are read.
EARLY = {
    "attention The --layers 4": "it has layer.0 to layer.3",
    "attention The --layers 1,2-9": "it has layer.0 to layer.3",
    "attention The --layers layer.7.attn": "it has layer.0 to layer.3",
    "attention The --heads 0-2": "No head 2 in {name}: an attention has 2 heads",
    "attention The --draws -1": "must be an integer >= 0: got -1",
    "search cities-complete The -k 0": "must be an integer >= 1: got 0",
    "lens The -k 0": "must be an integer >= 1: got 0",
    "lens The --fit best --out {here}/l.safetensors": "'best' is not one of 'tuned'",
    f"{PATCH} x": "both answers are 'x'",
    "patch The The --answer x --other y": "both prompts are the same",
    f"{PATCH} y --layers -1": "must be an integer >= 0: got -1",
    "graft {model} cities-complete --layers 0": "must be an integer >= 1: got 0",
    "probe {table} --label author --group author": "both group and label",
    "project {table} --label author --group author": "both group and label",
    "project {table} --label author --neighbours 1": "must be an integer >= 2: got 1",
    "cluster The of --smallest 1": "must be an integer >= 2: got 1",
    "probe {table} --label author --seed -1": "must be an integer >= 0: got -1",
    "steer The --toward a --away b --new-tokens -1": "must be an integer >= 0: got -1",
    "visibility The --per-text 0": "must be an integer >= 1: got 0",
    "visibility The --probes 1": "must be an integer >= 2: got 1",
    "profile The --sample 2": "must be an integer >= 3: got 2",
    "contributions The --answer x --neurons -1": "must be an integer >= 0: got -1",
    "extract nowhere.txt --to {here}/s": "there is no such file",
    "extract {table} --to {here}/s --every 0": "must be an integer >= 1: got 0",
    "extract {table} --to {here}/s --store-dtype int3": "No dtype 'int3'",
    "capture The --generate -1": "must be an integer >= 0: got -1",
    "capture The --out {here}/no/x.safetensors": "there is no folder",
    "capture The --out {here}/x.html": "this command writes .safetensors",
}


@pytest.mark.parametrize("words", EARLY)
def test_what_can_be_known_is_said_before_weights_are_read(
    words: str, folder: str, tmp_path: Path
) -> None:
    """The folder of the model has no weights, and nothing asks for them."""
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "model.safetensors").unlink()
    table = tmp_path / "table.csv"
    table.write_text("text,author\nA cat,a\nA dog,b\n")
    places = {"model": model, "table": table, "here": tmp_path, "name": model.name}
    given = words.format(**places).split()
    done = runner.invoke(cli.app, [*given, "--model", str(model)])
    assert done.exit_code == 2
    assert EARLY[words].format(**places) in done.stderr


def test_without_a_command_all_of_them_are_listed_with_examples() -> None:
    done = CliRunner().invoke(cli.app, [])
    assert done.exit_code == 0
    for name in COMMANDS:
        assert len(re.findall(rf"^  {name} +\w", done.stdout, re.MULTILINE)) == 1, name
    for group in cli.COMMAND_GROUPS:
        assert f"{group.title}:" in done.stdout
        assert f"$ hiddenscope {group.example}\n" in done.stdout
    assert "..." not in done.stdout.partition("Begin here")[2], "no line of help is cut"


@pytest.mark.parametrize(
    ("words", "suggested"),
    [
        # Not "--adapter, --lens", which share some letters with it.
        ("lens --layer 3", "(Possible options: --sites)"),
        ("attention --layer 3", "(Possible options: --layers)"),
        ("lens --targt x", "(Possible options: --target, --targets)"),
        ("steer --prompt x", ""),
    ],
)
def test_an_option_is_suggested_only_if_it_may_be_meant(
    words: str, suggested: str
) -> None:
    option = words.split()[1]
    done = CliRunner().invoke(cli.app, words.split())
    told = f"No such option: {option} {suggested}".strip()
    assert done.stderr.strip().endswith(told)
