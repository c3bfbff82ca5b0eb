"""The page as text: its policy names what is in it, and nothing in it is somebody
else's markup.
"""

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from hiddenscope.errors import StatesError
from hiddenscope.views import page, unpack
from hiddenscope.views.figures import style
from tests.pages.scenes import HOSTILE, hostile, lines, norms

STATIC = Path(page.__file__).parent / "static"
SCRIPTS = sorted(STATIC.glob("*.js"))


class Seen(HTMLParser):
    """Every tag with its attributes, and the text inside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: dict[str, str] = {}
        self.inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = dict(attrs).get("type") or tag

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        self.raw[self.inside] = self.raw.get(self.inside, "") + data


def test_the_policy_names_the_script_and_the_style_by_their_hashes() -> None:
    seen = Seen(page.document([norms()], "Norms"))
    content = next(
        attrs["content"]
        for tag, attrs in seen.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    for directive, text in (
        ("script-src", seen.raw["module"]),
        ("style-src", seen.raw["style"]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in content
    assert content.startswith("default-src 'none';")
    assert not re.search(r"unsafe|connect-src|https?:|\*", content)


def test_the_payload_in_the_page_holds_the_views() -> None:
    seen = Seen(page.document([norms(), lines()], "Two"))
    assert [view.title for view in unpack(seen.raw["application/octet-stream"])] == [
        "Norms",
        "Probes by layer",
    ]


def test_no_string_becomes_markup() -> None:
    calm = Seen(page.document([norms(), lines()], "x", ["y", "z"]))
    wild = Seen(
        page.document(
            hostile()[:2], HOSTILE[0], [HOSTILE[0], f"{HOSTILE[2]} `{HOSTILE[1]}`"]
        )
    )
    assert sorted({tag for tag, _ in wild.tags} - {tag for tag, _ in calm.tags}) == [
        "code"
    ]
    assert not any(
        name.startswith("on") or name == "style"
        for _, attrs in wild.tags
        for name in attrs
    )


def test_prose_is_headings_paragraphs_lists_and_code() -> None:
    text = page.document([], "t", ["# Head\nOne\ntwo `code`\n\n- a\n- b <i>"])
    assert (
        "<h2>Head</h2>\n<p>One two <code>code</code></p>\n<ul><li>a</li><li>b"
        " &lt;i&gt;</li></ul>" in text
    )


def test_prose_stands_before_its_view_and_after_the_last() -> None:
    text = page.document([norms(), lines()], "t", ["Prose one", "", "Prose two"])
    order = [
        text.index(piece)
        for piece in ("Prose one", 'data-view="0"', 'data-view="1"', "Prose two")
    ]
    assert order == sorted(order)
    with pytest.raises(StatesError, match="pieces of prose"):
        page.document([], "t", ["a", "b"])


def test_a_frame_is_shut_in_and_holds_the_page_unchanged() -> None:
    text = page.document([norms()], "Norms")
    tag, attrs = Seen(page.frame(text)).tags[0]
    assert tag == "iframe"
    assert attrs["sandbox"] == "allow-scripts allow-downloads"
    assert attrs["srcdoc"] == text
    assert unescape(page.frame(text)).count("<!doctype html>") == 1


def test_modules_are_joined_in_the_order_of_their_imports() -> None:
    text = page.join_scripts("main.js")
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    assert (
        text.index("function element(")
        < text.index("class Figure")
        < text.index("class GridView")
        < text.index("start()")
    )
    assert all(
        script.read_text("utf-8").splitlines()[0].startswith("/**")
        for script in SCRIPTS
    )
    assert "</script" not in text.lower() and "<!--" not in text


def test_what_cannot_be_joined_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "a.js": 'import { b } from "./b.js";\n',
        "b.js": 'import { a } from "./a.js";\n',
        "c.js": 'import * as d from "./d.js";\n',
        "e.js": 'import { f } from "./f.js";\nconst f = 1;\n',
        "f.js": "export const f = 1;\n",
    }
    monkeypatch.setattr(page, "_static", modules.__getitem__)
    for entry, says in {
        "a.js": "imports itself",
        "c.js": "named things",
        "e.js": "has that name too",
    }.items():
        with pytest.raises(StatesError, match=says):
            page.join_scripts(entry)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_run_no_text_and_ask_no_network(script: Path) -> None:
    text = script.read_text("utf-8")
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new"
        r" Function|fetch\(|XMLHttpRequest"
    )
    banned += r"|WebSocket|EventSource|sendBeacon|importScripts|setAttribute\(\"style|localStorage|cookie"
    assert not re.search(banned, text)
    assert text.count("\n") <= 360


def test_the_page_and_the_figures_have_one_set_of_colours() -> None:
    text = (STATIC / "colour.js").read_text("utf-8")
    for table in (style.SEQUENTIAL, style.DIVERGING, style.CLASSES, style.NO_CLASS):
        for shades in table.values():
            assert ", ".join(f'"{shade}"' for shade in shades) in text


@pytest.mark.parametrize("table", [style.SEQUENTIAL, style.DIVERGING])
def test_lightness_runs_evenly(table: dict[str, tuple[str, ...]]) -> None:
    """Steps of CIE lightness are alike, and a diverging map is as light left as right:
    order is seen with any eyes.
    """

    def lightness(shade: str) -> float:
        parts = [int(shade[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
        return float(116 * y ** (1 / 3) - 16)

    for shades in table.values():
        levels = [lightness(shade) for shade in shades]
        if table is style.DIVERGING:
            assert all(
                abs(a - b) < 8 for a, b in zip(levels, levels[::-1], strict=True)
            )
            levels = levels[4:]
        steps = [b - a for a, b in zip(levels, levels[1:], strict=False)]
        assert all(step * steps[0] > 0 for step in steps)
        assert max(map(abs, steps)) < 2 * min(map(abs, steps))
