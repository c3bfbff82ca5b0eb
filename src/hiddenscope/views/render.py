"""Results as files and in notebooks: fills the tables in which `Result` looks for its pages and figures."""

import base64
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hiddenscope.results import DISPLAYS, FINDINGS, RENDERERS, TABLES, Result, in_words
from hiddenscope.views.figures import Format, image
from hiddenscope.views.kinds import KINDS, views_of
from hiddenscope.views.page import document, frame

NOTEBOOK_DPI = 130
HEIGHT = 620  # of a notebook's output, until the page has said how high it is
MADE_BY = ("model", "revision", "weights", "dtype", "device", "attention", "versions")


def page(result: Result) -> str:
    """A result as one page: its views, its findings, and where it comes from."""
    views = views_of(result)
    title = f"{result.title[:1].upper()}{result.title[1:]}"
    return document(views, title, [*[""] * len(views), _told(result)])


def _told(result: Result) -> str:
    findings = FINDINGS.get(result.kind)
    parts = {
        "Findings": [f"- {sentence}".replace("\n", " ") for sentence in findings(result)] if findings else [],
        "Facts": [] if findings else _items(result.facts),
        "Where it comes from": _items({key: result.source.get(key) for key in MADE_BY}),
    }
    return "\n\n".join(f"# {name}\n\n" + "\n".join(lines) for name, lines in parts.items() if lines)


def _items(facts: Mapping[str, Any]) -> list[str]:
    """One line a fact; facts of a stack are many, and stand one by one behind its name."""
    found = []
    for key, value in facts.items():
        if isinstance(value, dict) and (len(value) > 5 or any(isinstance(inner, dict) for inner in value.values())):
            found += [f"- {key}: {line.removeprefix('- ')}" for line in _items(value)]
        elif value not in (None, "", [], {}):
            found.append(f"- {key}: {in_words(value)}".replace("\n", " "))
    return found


def _save_page(result: Result, path: Path) -> None:
    path.write_text(page(result), "utf-8")


def _save_figure(suffix: Format, result: Result, path: Path) -> None:
    path.write_bytes(image(views_of(result), suffix))


def _framed(result: Result) -> str:
    return frame(page(result), HEIGHT)


def _figure(result: Result) -> str:
    return base64.b64encode(image(views_of(result), ".png", dpi=NOTEBOOK_DPI)).decode("ascii")


RENDERERS[".html"] = _save_page
for _suffix in (".png", ".svg", ".pdf"):
    RENDERERS[_suffix] = partial(_save_figure, _suffix)
FINDINGS.update({word: kind.findings for word, kind in KINDS.items() if kind.findings})
TABLES.update({word: kind.tables for word, kind in KINDS.items() if kind.tables})
DISPLAYS["text/html"] = _framed
DISPLAYS["image/png"] = _figure
