"""The views of `attention` and `contributions`: what is drawn is what the data has, on
the page and on paper, with the pointer, the keyboard and a finger.
"""

import csv
import io
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import Page

import hiddenscope as hs
from hiddenscope.errors import StatesError
from hiddenscope.results import FINDINGS, TABLES, Look
from hiddenscope.views import Grid, Lines, Patterns, pack, sections_of, unpack, views_of
from hiddenscope.views.kinds import attention as attention_kind
from hiddenscope.views.painter import FigurePainter
from hiddenscope.views.payload import (
    BYTE_STEPS,
    COARSE_STEPS,
    FINE_STEPS,
    quantised,
    steps_of,
)
from tests.pages.inside import (
    EVIL,
    SENTENCE,
    attention,
    contributions,
    known_kinds,
)
from tests.pages.looking import CONTRAST, WIDER, Contexts, Opener, Shown
from tests.places import ROOT
from tests.slow.browser.views.test_grid import shade

KINDS = ("attention", "contributions")
AXE = ROOT / "node_modules" / "axe-core" / "axe.min.js"
TELEPHONE = {"width": 390, "height": 844}


@pytest.fixture(autouse=True)
def _kinds() -> Iterator[None]:
    with known_kinds(*KINDS):
        yield


def heads_of(result: hs.Result) -> Patterns:
    view = views_of(result)[0]
    assert isinstance(view, Patterns)
    return view


# --- What the payload holds


@pytest.mark.parametrize("missing", [(), ((1, 2), (5, 3))])
def test_the_payload_holds_the_weights_of_the_data(
    missing: tuple[tuple[int, int], ...],
) -> None:
    result = attention(missing=missing)
    (read,) = unpack(pack([heads_of(result)]))
    assert isinstance(read, Patterns)
    weights = result.data["pattern"].to_numpy()
    error = np.abs(read.weights - weights)
    np.testing.assert_array_equal(np.isnan(read.weights), np.isnan(weights))
    assert np.nanmax(error - (np.sqrt(weights) + 1e-3) / FINE_STEPS) <= 0
    norms = result.data["write_norm"].to_numpy()
    np.testing.assert_array_equal(read.norms, norms)
    # A value-weighted weight is a weight times the norm, so that no second map is sent.
    weighted = read.weights * read.norms[:, :, None, :]
    np.testing.assert_allclose(weighted, result.data["weighted"], rtol=5e-3, atol=1e-4)
    np.testing.assert_array_equal(read.exists, heads_of(result).exists)
    assert [score.name for score in read.scores] == [
        "induction",
        "reads the previous token",
        "reads the first token",
        "reads the current token",
    ]


def test_many_weights_are_rounded_to_bytes_and_the_page_says_so() -> None:
    weights = np.random.default_rng(0).random((4, 4, 260, 260), np.float32)
    levels = quantised(weights)
    assert levels.dtype == np.uint8 and steps_of(weights) == BYTE_STEPS
    error = np.abs((levels / BYTE_STEPS) ** 2 - weights)
    assert error.max() <= 1 / BYTE_STEPS
    assert (error <= (np.sqrt(weights) + 0.002) / BYTE_STEPS).all()
    huge = np.broadcast_to(np.float32(0.25), (32, 32, 200, 200))
    assert steps_of(huge) == COARSE_STEPS < BYTE_STEPS
    many = attention(16, 16, SENTENCE * 9)
    assert "255 steps" in heads_of(many).note
    assert "255 steps" not in heads_of(attention()).note


def test_a_long_text_is_cut_and_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_kind, "MOST_TOKENS", 5)
    first = heads_of(attention())
    assert first.weights.shape[2:] == (5, 5) and first.queries == SENTENCE[:5]
    assert first.note == "The first 5 of 8 tokens."
    later = heads_of(attention(queries=[5, 7]))
    assert later.note == "The last 5 of 8 tokens."
    assert later.keys == SENTENCE[3:] and later.positions == (2, 4)
    memory = heads_of(attention(memory=("a",) * 9))
    assert memory.weights.shape[2:] == (5, 5) and memory.positions == ()


def test_the_large_head_is_the_strongest_that_was_found() -> None:
    result = attention(6, 4)
    found = result.facts["induction_heads"][0]["site"]
    view = heads_of(result)
    assert view.name_of(*view.large) == found
    untested = heads_of(attention(tested=False, missing=[(0, 0)]))
    assert untested.name_of(*untested.large) == "layer.1.attn.head.1"


def test_heads_that_do_not_fit_are_refused() -> None:
    view = heads_of(attention(2, 2))
    fields = {"sites": view.sites, "heads": view.heads, "queries": view.queries}
    fields |= {"keys": view.keys, "weights": view.weights, "norms": view.norms}
    for wrong in (
        {"weights": view.weights[:1]},
        {"norms": view.norms[..., :2]},
        {"large": (2, 0)},
        {"positions": (0,)},
        {"queries": ()},
    ):
        with pytest.raises(StatesError):
            Patterns("Patterns", **fields | wrong)
    grid = views_of(contributions(2, 2))[0]
    assert isinstance(grid, Grid)
    with pytest.raises(StatesError, match="bars"):
        Grid("Grid", grid.sites, grid.tokens, grid.measures, bars=3)


# --- What is said


def test_findings_name_the_heads_and_their_chance() -> None:
    result = attention()
    lead, *others = FINDINGS["attention"](result)
    assert lead.startswith("1 of 24 attention heads reads the token that followed")
    assert "layer.4.attn.head.3 (0.70 against 0.05)." in lead
    previous, half, *_ = others
    assert "6 of 24 attention heads read the previous token" in previous
    assert "(p at most 0.05), which is 0.05." in previous
    assert "6 of 24 give the previous token more than half of the weight" in half
    assert half.endswith("layer.3.attn.head.0 (0.90) and 3 others.")
    assert any("No head is shown to read the current token" in s for s in others)
    assert any("corrected for all heads" in s for s in others)
    (table,) = TABLES["attention"](result)
    assert len(table.rows) == 1 + 6 + 6
    assert "heads were not tested" in next(
        iter(FINDINGS["attention"](attention(tested=False)))
    )
    result.facts["rows_sum_to"] = "0.83"
    assert any("as little as 0.83" in s for s in FINDINGS["attention"](result))


def test_findings_say_what_adds_most_and_whether_the_sum_holds() -> None:
    result = contributions(other=" Berlin")
    strongest = result.facts["strongest"][0]
    lead, *others = FINDINGS["contributions"](result)
    assert lead.startswith(strongest["site"]) and "“Paris” over “Berlin”" in lead
    assert any("error of at most 1e-06" in sentence for sentence in others)
    parts, neurons = TABLES["contributions"](result)
    assert parts.rows[0][0] == strongest["site"]
    assert re.fullmatch(r"layer\.\d+\.mlp\.neuron\.\d+", neurons.rows[0][0])
    for kind in KINDS:
        made = attention() if kind == "attention" else contributions()
        assert all(section.reading for section in sections_of(made))


@pytest.mark.parametrize("cross", [False, True])
def test_the_grid_of_contributions_holds_every_part(cross: bool) -> None:
    result = contributions(6, 4, (" Par", "is"), biases=True, cross=cross)
    grid, sums = views_of(result)
    assert isinstance(grid, Grid) and isinstance(sums, Lines)
    assert grid.tokens[-2:] == ("bias", "MLP") and grid.bars == 2
    data = result.data
    for step, measure in enumerate(grid.measures):
        values = measure.numbers
        own = values[::2] if cross else values
        np.testing.assert_allclose(own[:, :4], data["attn_head"][step], rtol=1e-6)
        np.testing.assert_allclose(own[:, 4], data["attn_bias"][step], rtol=1e-6)
        upper = values[1::2] if cross else values
        np.testing.assert_allclose(upper[:, 5], data["mlp"][step], rtol=1e-6)
        if cross:
            np.testing.assert_allclose(
                upper[:, :4], data["cross_head"][step], rtol=1e-6
            )
        # The bars by kind add up to the logit: nothing is left out.
        total = sums.series[step].y.sum(dtype=np.float64)
        assert total == pytest.approx(float(data["total"][step]), abs=1e-5)
    assert len(grid.measures) == 2 and "token 2 of the answer" in grid.measures[1].name


# --- On paper


@pytest.mark.parametrize("width", ["", "column", "page"])
def test_figures_show_all_heads_and_the_large_one(width: str) -> None:
    result = attention(6, 4, missing=[(0, 1)])
    figure = FigurePainter(".png").figure(result, Look("", "", width))  # type: ignore[arg-type]
    pictures = [image for axes in figure.axes for image in axes.images]
    *small, large = pictures
    assert len(small) == 6 * 4 - 1, "a picture for each head there is"
    drawn = np.nan_to_num(large.get_array().filled(np.nan))
    np.testing.assert_allclose(drawn, result.data["pattern"][3, 3], atol=1e-6)
    if width:
        inches = {"column": 3.3, "page": 6.9}[width]
        assert figure.get_size_inches()[0] == pytest.approx(inches, abs=0.02)
    shown = np.nan_to_num(pictures[3].get_array().filled(np.nan))
    np.testing.assert_allclose(shown, result.data["pattern"][1, 0], atol=1e-6)
    titles = {text.get_text() for text in figure.texts}
    assert any("layer.4.attn.head.3" in title for title in titles)


def test_a_figure_shows_the_head_that_is_asked_for(tmp_path: Path) -> None:
    result = attention()
    for suffix in (".png", ".svg", ".pdf"):
        result.save(tmp_path / f"x{suffix}")
        assert (tmp_path / f"x{suffix}").stat().st_size > 10_000
    result.save(tmp_path / "y.svg", measure="layer.2.attn.head.1 weighted")
    drawing = (tmp_path / "y.svg").read_text("utf-8")
    assert "layer.2.attn.head.1" in drawing
    assert "value-weighted attention" in drawing
    with pytest.raises(StatesError, match="there are layer.1.attn.head.0 to"):
        result.save(tmp_path / "z.svg", measure="layer.9.attn.head.0")
    contributions(biases=True).save(tmp_path / "c.svg", view="all")
    drawing = (tmp_path / "c.svg").read_text("utf-8")
    assert "MLP" in drawing and "embedding" in drawing


def test_bars_on_paper_are_as_long_as_their_numbers() -> None:
    result = contributions(5, 3)
    grid = views_of(result)[0]
    assert isinstance(grid, Grid)
    axes = FigurePainter(".png").figure(result, Look()).axes[0]
    lengths = np.array([patch.get_width() for patch in axes.patches])
    np.testing.assert_allclose(
        lengths / np.abs(lengths).max(),
        result.data["mlp"][0] / np.abs(result.data["mlp"][0]).max(),
        rtol=1e-5,
    )


# --- On the page


def token(shown: Shown, place: int, kind: str) -> str:
    found = shown.view().locator(".readtoken").nth(place).locator(f".{kind}")
    return found.inner_text()


def test_a_token_shows_what_it_reads_and_who_reads_it(show: Opener) -> None:
    result = attention()
    view = heads_of(result)
    shown = show([view])
    row, head = view.large
    pattern = result.data["pattern"].to_numpy()[row, head]
    shown.view().locator(".readtoken").nth(4).hover()
    shown.settle()
    for key in range(len(SENTENCE)):
        text = token(shown, key, "reads")
        expected = pattern[4, key]
        assert (
            text == ""
            if expected == 0
            else float(text) == pytest.approx(expected, abs=0.006)
        )
        text = token(shown, key, "readers")
        expected = pattern[key, 4]
        assert (
            text == ""
            if expected == 0
            else float(text) == pytest.approx(expected, abs=0.006)
        )
    strongest = int(pattern[4].argmax())
    said = shown.readout()
    assert "“␣is” token 4 reads" in said and SENTENCE[strongest].strip() in said
    # Without the pointer, the last token is shown again.
    shown.page.mouse.move(2, 2)
    shown.settle()
    assert "token 7 reads" in shown.readout()


def test_value_weighted_numbers_are_those_of_the_data(show: Opener) -> None:
    result = attention()
    view = heads_of(result)
    shown = show([view])
    shown.choose("Value-weighted")
    row, head = view.large
    weighted = result.data["weighted"].to_numpy()[row, head]
    for key in range(len(SENTENCE)):
        text = token(shown, key, "reads")
        assert float(text) == pytest.approx(weighted[7, key], abs=0.006, rel=0.01)
    assert "0.shows=weighted" in shown.fragment
    table = csv.reader(io.StringIO(shown.save("CSV").decode("utf-8-sig")))
    names, *rows = table
    assert names[-2:] == ["weight", "value-weighted (L2)"]
    assert len(rows) == 8 * 9 // 2
    for line in rows:
        query, key = int(line[1]), int(line[3])
        assert float(line[6]) == pytest.approx(weighted[query, key], rel=0.01, abs=1e-3)


def test_the_keyboard_chooses_heads_and_tokens(show: Opener) -> None:
    view = heads_of(attention(6, 4, missing=[(2, 3)]))
    shown = show([view])
    large = shown.view().locator(".onehead h3")
    assert large.inner_text() == "layer.4.attn.head.3"
    shown.press("ArrowLeft", "ArrowUp")
    assert large.inner_text() == "layer.5.attn.head.2"
    shown.press("PageDown", "Home")
    assert large.inner_text() == "layer.1.attn.head.0"
    shown.press("End", "ArrowUp", "ArrowUp")
    assert large.inner_text() == "layer.2.attn.head.3", "a head that is missing is none"
    assert "head=layer.2.attn.head.3" in shown.fragment
    shown.view().locator(".largestage").focus()
    shown.page.keyboard.press("ArrowUp")
    shown.page.keyboard.press("ArrowLeft")
    shown.page.keyboard.press("ArrowLeft")
    shown.settle()
    assert "“.” token 6 reads “␣Paris” token 5" in shown.readout()
    shown.page.keyboard.press("Tab")
    shown.page.keyboard.press("Shift+Tab")
    shown.view().locator('.readtoken[tabindex="0"]').focus()
    shown.page.keyboard.press("Home")
    shown.page.keyboard.press("ArrowRight")
    shown.settle()
    assert "“␣capital” token 1 reads" in shown.readout()
    assert shown.view().locator('.readtoken[tabindex="0"]').count() == 1


def test_a_click_chooses_a_head_and_a_link_keeps_it(show: Opener) -> None:
    view = heads_of(attention(6, 4))
    shown = show([view])
    box = shown.canvas().bounding_box()
    assert box
    # The lowest row is the first layer; the right edge is the last head.
    shown.canvas().click(position={"x": box["width"] - 12, "y": box["height"] - 50})
    shown.settle()
    name = shown.view().locator(".onehead h3").inner_text()
    assert name == "layer.1.attn.head.3"
    scores = shown.view().locator("table.scores").inner_text()
    tested = view.scores[0].score
    assert tested is not None and f"{tested[0, 3]:.3f}".rstrip("0") in scores
    again = show([view], fragment=shown.fragment)
    assert again.view().locator(".onehead h3").inner_text() == name


@pytest.mark.parametrize(("scale", "power"), [("Linear", 1.0), ("Root", 0.5)])
def test_the_colour_of_a_cell_is_its_weight(
    show: Opener, scale: str, power: float
) -> None:
    result = attention(2, 3, seed=3)
    view = heads_of(result)
    shown = show([view])
    shown.choose(scale)
    pattern = result.data["pattern"].to_numpy()[view.large]
    canvas = shown.view().locator("canvas.large")
    box = canvas.bounding_box()
    assert box
    # The last row ends 4 pixels above the lower edge, and cells are at most 36 high.
    y = box["height"] - 14
    seen = {}
    for x in range(40, int(box["width"]), 12):
        canvas.hover(position={"x": x, "y": y})
        shown.settle()
        match = re.search(
            r"token 7 reads “[^”]*” token (\d+): ([\d.]+)", shown.readout()
        )
        if match:
            seen.setdefault(int(match[1]), []).append((x, float(match[2])))
    assert set(seen) == set(range(7)), "every cell of the row is found"
    for key, places in seen.items():
        x, said = places[len(places) // 2]
        assert said == pytest.approx(pattern[7, key], abs=6e-4)
        level = (pattern[7, key] / pattern.max()) ** power
        painted = shown.pixel(x, y, layer="large")[:3]
        assert painted == pytest.approx(shade(float(level)), abs=2)


def test_tokens_of_two_texts_stand_apart(show: Opener) -> None:
    result = attention(3, 2, SENTENCE, memory=("Il", " fait", " beau"))
    view = heads_of(result)
    assert view.positions == ()
    shown = show([view])
    texts = shown.view().locator(".tokentext")
    assert texts.count() == 2
    pattern = result.data["pattern"].to_numpy()[view.large]
    texts.nth(1).locator(".readtoken").nth(1).hover()
    shown.settle()
    for query in range(len(SENTENCE)):
        text = (
            texts.nth(0)
            .locator(".readtoken")
            .nth(query)
            .locator(".readers")
            .inner_text()
        )
        assert float(text) == pytest.approx(pattern[query, 1], abs=0.006)


def test_hostile_tokens_stay_text(show: Opener) -> None:
    result = attention(2, 2, EVIL)
    grid = views_of(contributions(3, 2, EVIL[:3]))[0]
    shown = show([heads_of(result), grid])
    assert shown.page.evaluate("window.hacked") is None
    tokens = shown.view().locator(".readtoken bdi").all_inner_texts()
    assert tokens[0].startswith("</script>") and tokens[-1] == "∅"
    everything = shown.page.locator("body").inner_text()
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", everything)
    for name in ("SVG", "CSV"):
        assert b"<script>window" not in shown.save(name) or name == "CSV"


def test_bars_are_read_out_and_saved_as_cells_are(show: Opener) -> None:
    result = contributions(6, 4)
    grid = views_of(result)[0]
    shown = show([grid])
    shown.press("Home", "End")
    value = float(result.data["mlp"][0, 0])
    said = shown.readout()
    assert "layer.1" in said and "MLP" in said
    assert f"{abs(value):.4g}"[:4] in said
    assert shown.save("SVG").count(b"<rect") > 6 * 4
    shown.press("ArrowLeft")
    assert "head.3" in shown.readout()


@pytest.fixture
def telephone(contexts: Contexts) -> Iterator[Page]:
    context = contexts(
        viewport=TELEPHONE,
        offline=True,
        has_touch=True,
        is_mobile=True,
        reduced_motion="reduce",
        color_scheme="dark",
    )
    page = context.new_page()
    yield page
    page.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_fits_a_telephone_in_the_dark(
    kind: str, telephone: Page, tmp_path: Path
) -> None:
    made = {"attention": attention(30, 9), "contributions": contributions(30, 9)}
    made[kind].save(tmp_path / "page.html")
    telephone.goto((tmp_path / "page.html").as_uri())
    telephone.wait_for_selector("html[data-ready=true]", state="attached")
    assert telephone.evaluate(WIDER, TELEPHONE["width"]) == []
    assert telephone.evaluate(CONTRAST) == []
    if kind == "attention":
        telephone.locator(".readtoken").nth(2).tap()
        said = telephone.locator(".readout").first.inner_text()
        assert "“␣of” token 2 reads" in said


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_nothing_hangs_out_at_any_width(show: Opener, width: int) -> None:
    views = [heads_of(attention(32, 32)), views_of(contributions(32, 32))[0]]
    shown = show(views, width=width)
    assert shown.page.evaluate(WIDER, width) == []
    shown.keep(f"heads-{width}")


def test_axe_finds_no_fault(contexts: Contexts, tmp_path: Path) -> None:
    if not AXE.is_file():
        pytest.skip("axe-core is not installed: `make scripts` installs it")
    context = contexts(bypass_csp=True, reduced_motion="reduce")
    for result in (attention(), attention(memory=SENTENCE), contributions()):
        result.save(tmp_path / "page.html")
        page = context.new_page()
        page.goto((tmp_path / "page.html").as_uri())
        page.wait_for_selector("html[data-ready=true]", state="attached")
        page.add_script_tag(path=AXE)
        faults = page.evaluate("axe.run().then(({ violations }) => violations)")
        assert [fault["id"] for fault in faults] == []
        page.close()


def test_a_notebook_shows_them_too() -> None:
    for result in (attention(), contributions()):
        bundle = result._repr_mimebundle_()
        assert "srcdoc=" in bundle["text/html"]
