"""The page as text: its policy names what is in it, and nothing in it is somebody
else's markup.
"""

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from hiddenscope.errors import StatesError
from hiddenscope.results import Listing
from hiddenscope.views import page, unpack
from hiddenscope.views.figures import style
from hiddenscope.views.page import html_lists
from hiddenscope.views.terms import new_terms
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


def test_the_policy_names_the_script_and_the_style_and_the_payload_the_views() -> None:
    seen = Seen(page.document([norms(), lines()], "Two"))
    content = next(
        attrs["content"]
        for tag, attrs in seen.tags
        if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    assert content
    for directive, text in (
        ("script-src", seen.raw["module"]),
        ("style-src", seen.raw["style"]),
    ):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{directive} 'sha256-{digest}';" in content
    assert content.startswith("default-src 'none';")
    assert content.endswith("base-uri 'none'; form-action 'none'")
    assert not re.search(r"unsafe|connect-src|https?:|\*", content)
    views = unpack(seen.raw["application/octet-stream"])
    assert [view.title for view in views] == ["Norms", "Probes by layer"]


def test_no_string_becomes_markup() -> None:
    calm = Seen(page.document([norms(), lines()], "x", ["y", "z"]))
    prose = [HOSTILE[0], f"{HOSTILE[2]} `{HOSTILE[1]}`"]
    wild = Seen(page.document(hostile()[:2], HOSTILE[0], prose))
    new = {tag for tag, _ in wild.tags} - {tag for tag, _ in calm.tags}
    assert new == {"code"}
    names = [name for _, attrs in wild.tags for name in attrs]
    assert not any(name.startswith("on") or name == "style" for name in names)
    quoted = page.html_text("\"'&\0\u202e\u2028\x7f\tx")
    assert quoted == "&quot;&#x27;&amp;‹U+0000›‹U+202E›‹U+2028›‹U+007F›\tx"


def test_prose_is_headings_paragraphs_lists_and_code_around_the_views() -> None:
    text = page.document([], "t", ["# Head\nOne\ntwo `code`\n\n- a\n- b <i>"])
    assert (
        "<h2>Head</h2>\n<p>One two <code>code</code></p>\n<ul><li>a</li><li>b"
        " &lt;i&gt;</li></ul>" in text
    )
    text = page.document([norms(), lines()], "t", ["Prose one", "", "Prose two"])
    order = [
        text.index(piece)
        for piece in ("Prose one", 'data-view="0"', 'data-view="1"', "Prose two")
    ]
    assert order == sorted(order)
    assert "<title>Norms</title>" in page.document([norms()], "")
    with pytest.raises(StatesError, match="pieces of prose"):
        page.document([], "t", ["a", "b"])


def test_a_list_says_its_numbers_and_how_many_are_left_out() -> None:
    rows = tuple((0.5 - k / 100, k, "<b>" * 300) for k in range(102))
    listing = Listing("T", ("score", "rank", "text"), rows, bar="score", most=2.0)
    html = html_lists([listing])
    assert html.count("<tr>") == 1 + 100
    assert "And 2 more: a CSV of the result has them all." in html
    assert '<td class="number" data-name="score">−0.010</td>' in html
    assert html.count('<rect width="25"') == 1, "the first is a quarter of the most"
    assert "&lt;b&gt;" * 199 in html and "&lt;b&gt;" * 200 not in html
    short = html_lists([Listing("T", ("text",), (("a",), ("b",)), note="N")])
    assert "<ul><li>a</li><li>b</li></ul>" in short
    assert '<p class="note">N</p>' in short
    small = html_lists([Listing("T", ("a", "b"), (("x", 0.00123), ("y", 1e-9)))])
    assert "0.00123</td>" in small and "0.00000</td>" in small
    assert html_lists([]) == ""


def test_terms_are_explained_once_in_the_order_of_the_text() -> None:
    known = {"entropy"}
    found = [term for term, _ in new_terms("KL, Logits, entropy and p 0.01", known)]
    assert found == ["KL", "logit", "p-value"]
    assert [term for term, _ in new_terms("trust, KL", known)] == ["trustworthiness"]
    # A term in the explanation of another is explained too.
    nested = [term for term, _ in new_terms("an unembedding", set())]
    assert nested == ["unembedding", "hidden state", "logit"]


def test_a_frame_is_shut_in_and_holds_the_page_unchanged() -> None:
    text = page.document([norms()], "Norms")
    tag, attrs = Seen(page.frame(text, 300)).tags[0]
    assert tag == "iframe"
    assert attrs["sandbox"] == "allow-scripts allow-downloads"
    assert (attrs["srcdoc"], attrs["height"]) == (text, "300")
    assert unescape(page.frame(text)).count("<!doctype html>") == 1


def test_modules_are_joined_in_the_order_of_their_imports() -> None:
    text = page.join_scripts("main.js")
    assert not re.search(r"^(import|export)\b", text, re.MULTILINE)
    pieces = ("function element(", "class Figure", "class GridView", "start()")
    places = [text.index(piece) for piece in pieces]
    assert places == sorted(places)
    assert "</script" not in text.lower() and "<!--" not in text


def test_scripts_can_be_joined() -> None:
    """They import named things, on one line, and no two share a top-level name: in one
    script, the second would replace the first.
    """
    other_import = re.compile(
        r"^(?:import|export \*|export \{|export default)\b"
        r"|\bimport\((?!\"\./\w+\.js\"\)\.)",
        re.MULTILINE,
    )
    named = re.compile(
        r"^(?:export )?(?:async )?(?:function\*?|class|const|let) (\w+)", re.MULTILINE
    )
    owners: dict[str, str] = {}
    for script in STATIC.glob("*.js"):
        text = script.read_text("utf-8")
        text = re.sub(r'^import \{[^}]*\} from "\./\w+\.js";\n', "", text, flags=re.M)
        assert not other_import.search(text), script.name
        for name in named.findall(text):
            assert owners.setdefault(name, script.name) == script.name, name


def test_scripts_make_no_markup_run_no_text_and_ask_no_network() -> None:
    banned = (
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function"
        r"|fetch\(|XMLHttpRequest|WebSocket|EventSource|sendBeacon|importScripts"
        r"|setAttribute\(\"style|localStorage|cookie"
    )
    for script in SCRIPTS:
        text = script.read_text("utf-8")
        assert text.startswith("/**"), script.name
        assert not re.search(banned, text), script.name
        assert text.count("\n") <= 500, script.name


def shades_of_the_page() -> list[tuple[str, ...]]:
    """Return every table of colours: maps, light and dark, then classes."""
    text = (STATIC / "colour.js").read_text("utf-8")
    tables = re.findall(r"(?:light|dark): \[([^]]*)\]", text)
    return [tuple(re.findall(r"#\w{6}", table)) for table in tables]


def test_the_page_and_the_figures_have_one_set_of_colours() -> None:
    light = shades_of_the_page()[::2]
    on_paper = [style.SEQUENTIAL, style.DIVERGING, style.CLASSES, (style.NO_CLASS,)]
    assert light == on_paper


def lightness(shade: str) -> float:
    """Return the lightness of CIE."""
    parts = [int(shade[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [
        p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
    ]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return float(116 * y ** (1 / 3) - 16)


def test_lightness_runs_evenly() -> None:
    """Steps are alike, and a diverging map is as light left as right: order is seen
    with any eyes.
    """
    for place, shades in enumerate(shades_of_the_page()[:4]):
        levels = [lightness(shade) for shade in shades]
        assert len(levels) == 9
        if place >= 2:
            mirrored = zip(levels, levels[::-1], strict=True)
            assert all(abs(a - b) < 8 for a, b in mirrored)
            levels = levels[4:]
        steps = [b - a for a, b in pairwise(levels)]
        assert all(step * steps[0] > 0 for step in steps)
        assert max(map(abs, steps)) < 2 * min(map(abs, steps))
