"""What is said of a picture holds for what is drawn: rows of tokens, cells left out,
scales, labels, lines.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page

import hiddenscope as hs
from hiddenscope.results import FINDINGS
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import (
    Grid,
    Lines,
    Measure,
    Panels,
    Series,
    sections_of,
    views_of,
)
from hiddenscope.views.page import document
from tests.every import CLASSES, NUMBERED, TEXT, points, result_of, tiny
from tests.pages.looking import Contexts
from tests.slices import sliced

CLEAN, CORRUPT = "The cat sat", "The dog sat"
# Every text that is written on a canvas, with its height on the page.
RECORDER = """(() => {
  window.written = [];
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const at = this.getTransform().transformPoint(new DOMPoint(x, y));
    window.written.push({ text, y: at.y / devicePixelRatio, x: at.x / devicePixelRatio, where: this.canvas.className });
    return write.apply(this, arguments);
  };
})()"""


@pytest.fixture
def opened(contexts: Contexts, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a page that keeps what is written on its canvases."""
    context = contexts(viewport={"width": 1400, "height": 1000}, offline=True)
    pages = []

    def at(html: str) -> Page:
        path = tmp_path / "page.html"
        path.write_text(html, "utf-8")
        page = context.new_page()
        pages.append(page)
        page.add_init_script(RECORDER)
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.evaluate(
            "new Promise((done) => requestAnimationFrame(() =>"
            " requestAnimationFrame(done)))"
        )
        return page

    yield at
    for page in pages:
        page.close()


def saved_page(result: hs.Result, folder: Path) -> str:
    result.save(folder / "saved.html")
    return (folder / "saved.html").read_text("utf-8")


def contrast() -> hs.Result:
    return hs.patch(tiny("llama"), hs.Contrast(CLEAN, CORRUPT, 11, 12))


def first_grid(result: hs.Result) -> Grid:
    return next(view for view in views_of(result) if isinstance(view, Grid))


def named_rows(grid: Grid) -> dict[str, str]:
    """The text of each row of tokens, by the name of the row."""
    rows = (grid.tokens, grid.second)
    texts = ("".join(token or "" for token in row) for row in rows)
    return dict(zip(grid.token_rows, texts, strict=True))


def test_the_rows_of_a_patch_are_named_by_the_prompt_that_they_hold() -> None:
    rows = named_rows(first_grid(contrast()))
    assert rows["clean"].endswith(CLEAN) and rows["corrupted"].endswith(CORRUPT)


def test_the_rows_of_a_comparison_are_named_as_the_words_beside_it_name_them() -> None:
    result = hs.compare(tiny("llama"), CLEAN, CORRUPT)
    rows = named_rows(first_grid(result))
    assert rows["first"].endswith(CLEAN) and rows["second"].endswith(CORRUPT)
    reading = sections_of(result)[0].reading
    assert f"“{CLEAN}” (first) and “{CORRUPT}” (second)" in reading
    assert not re.search("above|below", reading), (
        "where a row stands is for the picture to show"
    )


@pytest.mark.parametrize("depth", [4, 30], ids=["short", "tall"])
def test_a_row_of_tokens_has_its_name_at_its_side(
    depth: int, opened: Callable[..., Page]
) -> None:
    """Of two rows the first is the upper one, wherever they stand."""
    sites = tuple(f"layer.{k}" for k in range(depth))
    values = np.ones((depth, 3))
    rows = {
        "tokens": ("The", " cat", " sat"),
        "second": ("The", " dog", " sat"),
        "token_rows": ("clean", "corrupted"),
    }
    page = opened(
        document(
            [Grid("Patch", sites, measures=(Measure("effect", values),), **rows)],
            "Rows",
        )
    )
    written = page.evaluate("window.written")
    heights: dict[str, list[float]] = {}
    for one in written:
        # The tokens above a tall grid are on a canvas of their own, the others on that
        # of the grid.
        heights.setdefault(f"{one['where']} {one['text']}", []).append(round(one["y"]))
    for name, token in (("clean", "␣cat"), ("corrupted", "␣dog")):
        for canvas in ("back", "tokens-above"):
            assert set(heights.get(f"{canvas} {name}", [])) == set(
                heights.get(f"{canvas} {token}", [])
            )
    above = (
        heights
        if depth == 4
        else {key: y for key, y in heights.items() if key.startswith("tokens-above")}
    )
    upper = min(min(y) for key, y in above.items() if key.endswith("clean"))
    lower = min(min(y) for key, y in above.items() if key.endswith("corrupted"))
    assert upper < lower


def test_a_printed_row_of_tokens_has_its_name_at_its_side() -> None:
    figure = contrast().figure("grid")
    figure.canvas.draw()
    heights: dict[str, set[int]] = {}
    for text in figure.findobj(
        lambda artist: hasattr(artist, "get_text") and artist.get_visible()
    ):
        heights.setdefault(text.get_text(), set()).add(
            round(text.get_window_extent().y0)
        )
    (upper,), (lower,) = heights["clean"], heights["corrupted"]
    assert upper > lower
    grid = first_grid(contrast())
    for height, row, other in (
        (upper, grid.tokens, grid.second),
        (lower, grid.second, grid.tokens),
    ):
        token = next(token for token in row if token and token not in other)
        shown = heights[token.replace(" ", "␣")]
        assert min(abs(height - place) for place in shown) < 25
        assert min(abs(upper + lower - height - place) for place in shown) > 40


def test_what_a_state_does_to_itself_is_left_out_and_not_called_zero(
    opened: Callable[..., Page], tmp_path: Path
) -> None:
    result = result_of("visibility", 0)
    grid = first_grid(result)
    assert "choose" not in grid.note.lower(), "one may be chosen already"
    page = opened(saved_page(result, tmp_path))
    view = page.locator('section[data-view="0"]')
    view.locator("canvas.front").click(position={"x": 400, "y": 40})
    key = view.locator("canvas.legend").get_attribute("aria-label") or ""
    assert "exactly 0" in key and "itself, left out" in key
    view.locator("summary").click()
    head, *rows = [row.split("\t") for row in view.locator("tr").all_inner_texts()]
    pinned = page.evaluate("decodeURIComponent(location.hash)")
    site, token = re.search(r"pin=([^~]*)~(\d+)", pinned).groups()  # type: ignore[union-attr]
    on, of = (place for place, name in enumerate(head) if "pinned state" in name)
    itself = next(row for row in rows if row[0] == site and row[1] == token)
    assert itself[on] == itself[of] == "none"


def test_a_prediction_shows_the_influence_of_the_state_that_it_is_made_from(
    opened: Callable[..., Page], tmp_path: Path
) -> None:
    """The top row stands for the predictions, and is also the last layer: a cell of it
    has a number for itself.
    """
    page = opened(saved_page(result_of("visibility", 3), tmp_path))
    view = page.locator('section[data-view="0"]')
    stage = view.locator(".stage")
    stage.focus()
    for key in ("ArrowRight", "End", "PageUp", "Enter"):
        page.keyboard.press(key)
    assert "is influenced most by" in view.locator(".readout").inner_text()
    view.locator("summary").click()
    head, *rows = [row.split("\t") for row in view.locator("tr").all_inner_texts()]
    on = next(
        place
        for place, name in enumerate(head)
        if "influence on the pinned state" in name
    )
    last = max(int(row[1]) for row in rows)
    itself = next(row for row in rows if row[0] == "final" and int(row[1]) == last)
    assert float(itself[on]) > 0


def spans_decades(values: Any) -> bool:
    numbers = np.asarray(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers) or numbers.min() <= 0:
        return False
    span = 100 if numbers.max() > 1 else 10_000  # what is at most 1 may be a share
    return bool(numbers.max() >= span * numbers.min())


def worth_a_log_scale(view: Grid | Lines) -> bool:
    if isinstance(view, Lines):
        return view.scale == "log" or spans_decades(
            np.concatenate([series.y for series in view.series])
        )
    measure = view.measures[0]
    return measure.scale == "log" or (
        measure.meaning == "sequential" and spans_decades(measure.numbers)
    )


@pytest.mark.parametrize(
    "word", sliced(list(dict.fromkeys(word for word, _ in NUMBERED)), 7)
)
def test_a_log_scale_is_offered_where_it_shows_something(
    word: str, opened: Callable[..., Page]
) -> None:
    views = [
        view for view in views_of(result_of(word, 0)) if not isinstance(view, Panels)
    ]
    page = opened(document(views, "Scales"))
    for place, view in enumerate(views):
        log = page.locator(f'section[data-view="{place}"]').get_by_role(
            "radio", name="Log", exact=True
        )
        assert log.count() == int(worth_a_log_scale(view)), view.title


def test_shares_and_accuracies_have_no_log_scale(opened: Callable[..., Page]) -> None:
    shares = Lines(
        "Right answers",
        ("layer.0", "layer.1"),
        (Series("share", [0.002, 0.98]),),
        y_name="accuracy",
    )
    rates = Lines(
        "Norms", ("layer.0", "layer.1"), (Series("norm", [0.2, 98.0]),), y_name="norm"
    )
    page = opened(document([shares, rates], "Scales"))
    offered = [
        page.locator(f'section[data-view="{n}"]')
        .get_by_role("radio", name="Log")
        .count()
        for n in (0, 1)
    ]
    assert offered == [0, 1]


def test_a_probe_predicts_labels_and_not_the_name_of_a_dataset() -> None:
    result = hs.probe(tiny("llama"), "cities-complete")
    reading = sections_of(result)[0].reading
    assert (
        "the label of each text, “Montreal” or “Toronto”" in reading
        and "cities-complete" not in reading
    )
    numbers = sections_of(result_of("probe", 1))[0].reading
    assert "the number that each text is labelled with" in numbers
    tokens = sections_of(result_of("probe", 2))[0].reading
    assert "the label of each token, “0”, “1”, “2 to 3”, “4 to 7” or “from 8”" in tokens


def test_a_masked_model_predicts_in_the_place_of_a_token_and_not_after_it() -> None:
    masked, causal = result_of("lens", 2), result_of("lens", 0)
    for result, place, other in (
        (masked, "in this place", "next"),
        (causal, "next", "in this place"),
    ):
        reading = sections_of(result)[0].reading
        assert (
            f"would predict {place}" in reading
            and f"would predict {other}" not in reading
        )
    assert next(iter(FINDINGS["lens"](masked))).startswith("In the place of")
    assert next(iter(FINDINGS["lens"](causal))).startswith("After")


@pytest.mark.parametrize(("word", "place"), NUMBERED)
def test_words_beside_a_picture_speak_of_what_is_in_it(word: str, place: int) -> None:
    """A line, a list, a class or a scale is mentioned where there is one."""
    for section in sections_of(result_of(word, place)):
        lines = [view for view in section.views if isinstance(view, Lines)]
        styles = {series.style for view in lines for series in view.series}
        says = section.reading
        assert "dashed line" not in says or "dash" in styles
        assert "solid line" not in says or "line" in styles
        assert "The bars" not in says or "bar" in styles
        assert "list" not in says or section.tables
        assert "table" not in says or section.tables
        assert "coloured by its class" not in says or all(
            v.labels for v in section.views if isinstance(v, Panels)
        )
        grids = [view for view in section.views if isinstance(view, Grid)]
        assert "on a log scale" not in says or grids[0].measures[0].scale == "log"
        for view in grids:
            outlined = (
                view.words is not None
                and view.words.framed
                and max(view.words.settled_rows()) >= 0
            )
            assert ("An outline" in view.note) == outlined
            assert (view.x_name == "token") == (
                view.tokens != view.sites
                and view.x_name not in ("strength", "site", "part", "head", "member")
            )


def test_a_grid_of_other_things_than_tokens_is_read_out_as_what_it_is(
    opened: Callable[..., Page],
) -> None:
    sites = ("layer.0", "layer.1")
    measures = (
        Measure("linear CKA", np.array([[1.0, 0.5], [0.5, 1.0]]), limits=(0, 1)),
    )
    across = Grid("Pairs", sites, sites, measures, x_name="site")
    texts = Grid(
        "Texts",
        ("a cat", "a dog"),
        ("a dog", "a cat"),
        measures,
        x_name="text",
        y_name="text",
    )
    page = opened(document([across, texts], "Pairs"))
    for place, (words, ranges) in enumerate(
        [("site layer.1", "Each layer"), ("text a cat", "Each row")]
    ):
        view = page.locator(f'section[data-view="{place}"]')
        view.locator(".stage").focus()
        for _ in range(2):
            page.keyboard.press("ArrowRight")
        readout = view.locator(".readout").inner_text()
        assert words in readout and "token" not in readout
        assert view.get_by_role("radio", name=ranges, exact=True).count() == 1


def test_texts_without_labels_are_not_called_labelled() -> None:
    states = tiny("llama").capture(CLASSES[0])
    result = hs.project(states, method="pca")
    html_words = " ".join(
        [result.title, result.summary(), *(s.reading for s in sections_of(result))]
    )
    assert "labelled" not in html_words and "p-value" not in html_words
    assert "24 points without labels" in result.summary()
    assert not any("p-value" in view.note for view in views_of(result))


def test_clusters_of_vectors_have_no_lists_and_no_texts() -> None:
    section = sections_of(hs.cluster(points()))[0]
    assert "list" not in section.reading and not section.tables


def test_one_block_replaces_that_of_the_model() -> None:
    reading = sections_of(result_of("graft", 0))[0].reading
    assert "1 block of the donor replaces that of the model" in reading


def test_a_text_of_one_token_has_one_line_of_norms() -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    result = hs.profile(model, [[5]])
    along = next(
        section
        for section in sections_of(result)
        if section.title == "The same along the layers"
    )
    names = [
        series.name
        for view in along.views
        if isinstance(view, Lines)
        for series in view.series
    ]
    assert ("other tokens" in along.reading) == any(
        "other tokens" in name for name in names
    )


def test_a_comparison_begins_with_its_texts(tmp_path: Path) -> None:
    told = saved_page(hs.compare(tiny("llama"), TEXT, CORRUPT), tmp_path)
    assert (
        told.index('class="prose claim"')
        < told.index("<section data-view")
        < told.index('class="prose guide"')
    )
