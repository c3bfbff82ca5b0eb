"""What docs/errors.md quotes is what the package says.

In a quotation `…` stands for what differs from case to case.
"""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import hiddenscope as hs
from hiddenscope.errors import Error
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.places import ROOT
from tests.registry import tiny

ROW = re.compile(r"^\| (`+) ?(.+?) ?\1 \| (.+) \|$", re.MULTILINE)
GAP = "…"


@cache
def quotations() -> list[str]:
    """Return every message that the page quotes."""
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    index = page.partition("## The classes")[0]
    return [row[1] for row in ROW.findall(index)]


@cache
def source_strings() -> list[str]:
    """Return every string of the package, with its fields as gaps."""
    strings = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                strings.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                strings.append("".join(map(_part, node.values)))
    return strings


def _part(value: ast.expr) -> str:
    return str(value.value) if isinstance(value, ast.Constant) else GAP


def _pattern(quotation: str) -> re.Pattern[str]:
    """Return a pattern of the messages that a quotation stands for."""
    pieces = map(re.escape, quotation.split(GAP))
    return re.compile(".+".join(pieces), re.DOTALL)


def test_the_page_has_the_errors_that_users_meet() -> None:
    assert len(quotations()) >= 40
    assert len(set(quotations())) == len(quotations())


def test_every_quoted_text_occurs_in_the_source() -> None:
    # The problem and the reason of an error are two strings.
    parts = [part for quotation in quotations() for part in quotation.split(": ")]
    strings = "\n".join(source_strings())
    assert [part for part in parts if part not in strings] == []
    assert "Cannot load …: it is Tuesday" not in strings


def _ask_logits_of_a_headless_model() -> None:
    headless = hs.load((tiny_model("bert", task="base"), tiny_tokenizer()))
    hs.record(headless, "the cat", (), logits=True)


def _record_nothing() -> None:
    model = tiny("llama")
    with hs.recording(model) as recorder:
        pass
    _ = recorder.states


def _edit_nothing() -> None:
    with hs.editing(tiny("llama"), {"layer.1": hs.Scale(0.0)}):
        pass


def _write_over_other_things() -> None:
    Path("taken").mkdir()
    Path("taken", "notes.txt").write_text("mine")
    hs.extract(tiny("llama"), ["the cat"], "taken", sites="layer.1")


def _go_on_with_other_sites() -> None:
    for sites in ("layer.1", "layer.2"):
        hs.extract(tiny("llama"), ["the cat"], "begun", sites=sites)


def _read_a_table_of_words() -> None:
    Path("words.csv").write_text("first,second\na b,c d\n")
    hs.read("words.csv")


CALLS: dict[str, Callable[[], object]] = {
    "No model …: the zoo has …": lambda: hs.load("smolm2"),
    "No model at …: there is no such folder or file": lambda: hs.load("./nowhere"),
    "Cannot use this live model: a … is not a name, a path or a (module, tokenizer)": (
        lambda: hs.load((1, 2, 3))
    ),
    "No site … in …: it has …": lambda: tiny("llama").capture("the cat", "layer.99"),
    "No site …: sites look like 'layer.3', 'layer.3.attn', 'layer.3.attn.head.0' or 'final'": (
        lambda: tiny("llama").capture("the cat", "levels")
    ),
    "it has no final norm; its last state is …": (
        lambda: tiny("bert").capture("the cat", "final")
    ),
    "Cannot get the site …: it names … sites": (
        lambda: tiny("llama").capture("the cat")["layer.*"]
    ),
    "No texts: the list is empty": lambda: tiny("llama").capture([]),
    "Text …: it has … tokens and … takes at most …": (
        lambda: tiny("llama").capture([[5] * 100_000])
    ),
    "Text …: id … is outside the vocabulary of …": (
        lambda: tiny("llama").capture([[10**9]])
    ),
    "Cannot read the texts: got …": lambda: tiny("llama").encode(3.5),
    "Cannot read texts from …: there is no such file": lambda: hs.read("no such file"),
    "they are …, and none is plainly the text": _read_a_table_of_words,
    "for … it is … tokens: …": (
        lambda: hs.lens(tiny("llama"), "the cat", target="the cat sat on the mat")
    ),
    "No logits of …: it has no language-model head": _ask_logits_of_a_headless_model,
    "they are all of one class, …": (
        lambda: hs.probe(tiny("llama"), (["the cat", "the mat"], ["a", "a"]))
    ),
    "Nothing was changed: the module was not called inside the `with`": _edit_nothing,
    "No recorded states: no pass was run inside the `with`": _record_nothing,
    "Cannot make a store in …: the folder holds other things, such as …": (
        _write_over_other_things
    ),
    "Cannot go on with …: it was started with other settings": (
        _go_on_with_other_sites
    ),
    "Cannot save a result as …: the formats are …": (
        lambda: hs.anatomy(tiny("llama")).save("anatomy.xyz")
    ),
    "Cannot call …: … must be …, got …": (
        lambda: hs.attention(tiny("llama"), "the cat", layers=5.5)
    ),
}


def test_the_usual_errors_say_what_the_page_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(CALLS) <= set(quotations())
    for quotation, call in CALLS.items():
        with pytest.raises(Error) as caught:
            call()
        assert _pattern(quotation).search(str(caught.value)), str(caught.value)
