"""Results as pages, figures and notebook outputs, and which views they are given."""

import base64
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import peft
import pytest
import xarray

import hiddenscope as hs
from hiddenscope.errors import ArgumentError, FileError, StatesError
from hiddenscope.results import findings_of, story_of, views_of
from hiddenscope.results.pictures import Grid, Lines
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views.page import frame
from hiddenscope.views.render import page
from tests.places import ROOT
from tests.unit.views.recorded import recorded

SITES = ["layer.0", "layer.1", "final"]
STARTS = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF-"}
STARTS[".html"] = b"<!doctype html>"


def result(**variables: object) -> hs.Result:
    coords = {
        "site": SITES,
        "string": ("token", ["The", "</script>"]),
        "text": ("token", [0, 0]),
    }
    norms = {"norm": (("site", "token"), np.ones((3, 2)))}
    facts = {"largest": 1.0, "where": {"site": "final"}, "text": "<b>"}
    data = xarray.Dataset(variables or norms, coords)
    return hs.Result("sizes", data, facts, {"model": "toy"})


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("gpt2"), tiny_tokenizer()))


def test_a_result_is_saved_by_its_suffix(tmp_path: Path) -> None:
    for suffix, start in STARTS.items():
        path = tmp_path / f"picture{suffix.upper()}"
        result().save(path)
        assert path.read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == len(STARTS)


@pytest.mark.slow
def test_what_was_kept_can_be_drawn_in_another_process(tmp_path: Path) -> None:
    """No analysis need be imported for it, and no torch."""
    result().save(tmp_path / "x.nc")
    result().save(tmp_path / "here.svg")
    program = (
        "import sys; import hiddenscope as hs\n"
        "hs.Result.load('x.nc').save('there.svg')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "False\n"
    assert (tmp_path / "there.svg").read_bytes() == (tmp_path / "here.svg").read_bytes()


def test_a_page_tells_the_facts_and_holds_no_markup_of_theirs() -> None:
    told = page(result())
    assert "<h1>Sizes of toy</h1>" in told
    assert "<td>where</td><td>site final</td>" in told
    assert "<td>text</td><td>&lt;b&gt;</td>" in told
    assert told.count("</script>") == 2


def test_a_notebook_gets_the_page_the_figure_and_the_text() -> None:
    shown = result()
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"text/html", "image/png", "text/plain"}
    assert 'sandbox="allow-scripts allow-downloads"' in bundle["text/html"]
    assert bundle["text/html"].split(">")[-2:] == frame(page(shown)).split(">")[-2:]
    assert base64.b64decode(bundle["image/png"], validate=True).startswith(b"\x89PNG")
    assert bundle["text/plain"] == shown.summary()
    for asked in ({"include": ["image/png"]}, {"exclude": ["text/html"]}):
        assert set(shown._repr_mimebundle_(**asked)) == {"image/png", "text/plain"}


def test_show_opens_a_page_that_stays_and_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    path = hs.Result("Sizes, all", result().data, {}, {}).show()
    assert (path.name, path.parent.parent) == ("sizes-all.html", tmp_path)
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert opened == [path.as_uri()]
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    with pytest.raises(FileError, match="no browser could be started"):
        result().show()
    assert len(list(tmp_path.glob("*/sizes.html"))) == 1


def test_variables_over_sites_and_tokens_are_measures_of_one_grid() -> None:
    look = {"long_name": "difference", "units": "logits"}
    look |= {"meaning": "diverging", "scale": "log"}
    cells = np.arange(6.0).reshape(2, 3)
    (grid,) = views_of(
        result(a=(("token", "site"), cells, look), b=(("site", "token"), cells.T > 2))
    )
    assert isinstance(grid, Grid)
    first, second = grid.measures
    found = first.name, first.unit, first.meaning, first.scale
    assert found == ("difference", "logits", "diverging", "log")
    assert first.numbers.tolist() == cells.T.tolist()
    assert (second.name, second.meaning, second.scale) == ("b", "sequential", "linear")
    assert grid.sites == tuple(SITES)
    assert grid.tokens == ("The", "</script>")
    assert grid.title == "Difference, b of toy"


def test_a_map_shows_what_a_cell_sees() -> None:
    dims = ("site", "token", "source_site", "source_token")
    shown = result(influence=(dims, np.ones((3, 2, 3, 2))))
    (grid,) = views_of(
        hs.Result("see", shown.data.assign_coords(source_site=SITES), {}, {})
    )
    assert isinstance(grid, Grid)
    assert grid.measures[0].influence is not None
    with pytest.raises(
        StatesError, match="influence has site, token, source_site, source_token"
    ):
        views_of(hs.Result("see", shown.data.isel(source_site=[0]), {}, {}))


def test_words_over_ranks_stand_in_the_cells() -> None:
    words = np.full((3, 2, 2), " Paris", dtype=object)
    (grid,) = views_of(
        result(
            word=(("site", "token", "rank"), words),
            p=(("site", "token", "rank"), np.full((3, 2, 2), 0.25)),
        )
    )
    assert isinstance(grid, Grid)
    assert grid.words is not None
    assert grid.words.words == (" Paris",)
    assert grid.measures[0].limits == (0, 1)


def test_series_share_axes_only_with_their_like() -> None:
    shown = views_of(
        result(
            a=("site", [1.0, 2, 3], {"units": "L2"}),
            b=("site", [1, 2, 3], {"units": "L2"}),
            c=("site", [1.0, 2, 3]),
            d=("strength", [1.0, 2]),
            names=("site", ["x", "y", "z"]),
        )
    )
    assert all(isinstance(view, Lines) for view in shown)
    found = [
        (view.x_name, view.unit, [one.name for one in view.series])
        for view in shown
        if isinstance(view, Lines)
    ]
    assert found == [
        ("site", "", ["c"]),
        ("site", "L2", ["a", "b"]),
        ("strength", "", ["d"]),
    ]


def test_long_texts_are_cut_and_it_is_said() -> None:
    data = xarray.Dataset(
        {"x": (("site", "token"), np.ones((1, 5_000)))}, {"site": ["final"]}
    )
    (grid,) = views_of(hs.Result("long", data, {}, {}))
    assert isinstance(grid, Grid)
    assert len(grid.tokens) == 4_096
    assert grid.note == "The first 4,096 of 5,000 tokens."


def test_what_cannot_be_drawn_is_said_and_still_printed(tmp_path: Path) -> None:
    shown = hs.Result(
        "cube",
        xarray.Dataset({"x": (("a", "b", "c"), np.ones((2, 2, 2)))}),
        {"n": 8},
        {},
    )
    with pytest.raises(StatesError, match="Cannot draw the cube: x has a, b, c"):
        shown.save(tmp_path / "x.png")
    assert list(tmp_path.iterdir()) == []
    assert shown._repr_mimebundle_() == {"text/plain": "cube\n  n  8"}


def test_a_story_reads_its_numbers_off_the_results(
    model: hs.Model, tmp_path: Path
) -> None:
    proof, norms = hs.anatomy(model), hs.profile(model, "The cat sat.")
    hs.story(
        [proof, norms, result()],
        tmp_path / "story.html",
        opening="Once `upon` <a> time.",
        closing="- The end",
    )
    told = (tmp_path / "story.html").read_text("utf-8")
    assert told.count("<section data-view=") == 1 + len(views_of(norms)) + 1
    assert "<p>Once <code>upon</code> &lt;a&gt; time.</p>" in told
    assert "“The cat sat.”" in told
    said = [text for text in findings_of(norms) if "the first token is" in text]
    assert len(said) == 1 and said[0] in told
    # That holds where the first token is far larger.
    assert "hides all others" not in told
    assert told.index("Sizes of toy") < told.index("<li>The end</li>")
    with pytest.raises(FileError, match="a story is a page"):
        hs.story([proof], tmp_path / "story.txt")
    with pytest.raises(FileError, match="Cannot write"):
        hs.story([proof], tmp_path / "nowhere" / "story.html")


HOSTILE = "`x`\n\n# H\n\n- y"


def hostile(kind: str, model: hs.Model) -> hs.Result:
    """A result of texts and tokens that would be headings, lists and code."""
    one, two = f"{HOSTILE} cat", f"{HOSTILE} dog"
    if kind == "lens":
        best = hs.lens(model, one).data["word_id"].values[-1, -1, 0]
        return hs.lens(model, one, target=int(best))
    if kind == "compare":
        return hs.compare(model, one, two)
    if kind == "patch":
        return hs.patch(model, hs.Contrast(one, two, 7, 9))
    return hs.search(model, one, texts=[one, two], k=2)


@pytest.mark.parametrize("kind", ["lens", "compare", "patch", "search"])
def test_texts_and_tokens_in_a_story_stay_words(kind: str, tmp_path: Path) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    model.text_encoder._strings.update(dict.fromkeys(range(128), HOSTILE))
    found = hostile(kind, model)
    hs.story([found], tmp_path / "story.html")
    html = (tmp_path / "story.html").read_text("utf-8")
    told = html.partition("<main>")[2].partition("<noscript>")[0]
    assert told.count(r"“’x’\n\n# H\n\n- y") >= 2, "it is there, on one line"
    titles = [section.title for section in story_of(found)]
    assert re.findall("(?:<h2>|<summary>More: )(.*?)</", told) == titles
    assert "<li>" not in told
    codes = r"layer\.(?:\d+|k)|final|docs/\w+\.md"
    for code in re.findall("<code>(.*?)</code>", told):
        assert re.fullmatch(codes, code)


def test_the_docs_are_a_link_where_they_lie_beside_the_page(tmp_path: Path) -> None:
    found = recorded("anatomy-0")
    with TemporaryDirectory(dir=ROOT) as folder:
        path = Path(folder, "story.html")
        hs.story([found], path)
        (link,) = re.findall('<a href="(.*?)">', path.read_text("utf-8"))
        assert (path.parent / link).resolve() == ROOT / "docs" / "anatomy.md"
    hs.story([found], tmp_path / "story.html")
    told = (tmp_path / "story.html").read_text("utf-8")
    assert "<a href=" not in told and "<code>docs/anatomy.md</code>" in told


def test_a_story_of_several_results_has_contents_and_folds(tmp_path: Path) -> None:
    """A term is explained once, in the part that uses it first."""
    results = [recorded(name) for name in ("lens-0", "compare-0", "profile-0")]
    hs.story(results, tmp_path / "story.html")
    html = (tmp_path / "story.html").read_text("utf-8")
    sections = [section for found in results for section in story_of(found)]
    titles = [section.title for section in sections if not section.folded]
    assert re.findall(r'<a href="#part-\d">(.*?)</a>', html) == titles
    folded = [section.title for section in sections if section.folded]
    assert re.findall("<summary>More: (.*?)</summary>", html) == folded
    names = ", ".join(found.title for found in results)
    assert f"<h1>{names}</h1>" in html
    parts = re.split('(?=<article class="part")', html.partition("<noscript>")[0])
    terms = re.findall("<dt>(.*?)</dt>", html)
    assert {"logit", "unembedding", "KL", "entropy", "kurtosis"} <= set(terms)
    assert len(set(terms)) == len(terms)
    for term in ("unembedding", "KL", "kurtosis"):
        first = next(part for part in parts if re.search(rf"\b{term}\b", part))
        assert f"<dt>{term}</dt>" in first
    hs.story(results[:1], tmp_path / "one.html")
    assert 'class="contents"' not in (tmp_path / "one.html").read_text("utf-8")


def test_a_figure_shows_the_view_and_the_measure_that_are_asked_for(
    tmp_path: Path,
) -> None:
    result = recorded("profile-0")
    assert [*result.views][:2] == ["grid", "lines"]
    grid, lines = "The norm of every state", "The norm along the layers"
    assert result.views["grid"].startswith(grid)

    def told(**look: Any) -> str:
        result.save(tmp_path / "x.svg", **look)
        return (tmp_path / "x.svg").read_text("utf-8")

    first, second = told(), told(view="lines")
    assert grid in first and lines not in first
    assert lines in second and grid not in second
    for name in ("kurtosis", "kurtosis over the width"):
        assert "The kurtosis over the width of every state" in told(measure=name)
    wrong = [{"view": "nosuch"}, {"measure": "nosuch"}]
    for look in [*wrong, {"view": "lines", "measure": "norm"}]:
        with pytest.raises(StatesError):
            result.save(tmp_path / "y.png", **look)
    width: Any = "wide"
    with pytest.raises(ArgumentError, match="width must be '', 'column' or 'page'"):
        result.save(tmp_path / "y.png", width=width)
    with pytest.raises(FileError, match="are for figures"):
        result.save(tmp_path / "y.html", view="grid")
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]


def test_a_file_of_all_views_has_a_page_for_each(tmp_path: Path) -> None:
    result = recorded("probe-0")
    result.save(tmp_path / "x.pdf", view="all")
    pages = (tmp_path / "x.pdf").read_bytes().count(b"/Type /Page ")
    assert pages == len(result.views) == 2


@pytest.mark.slow
def test_a_page_says_which_side_is_quantised(tmp_path: Path) -> None:
    module: Any = tiny_model("llama")
    module.save_pretrained(tmp_path / "tiny")
    quantised = hs.Quantised(tmp_path / "tiny", "int8")
    compared = hs.drift(hs.load(tmp_path / "tiny"), hs.load(quantised), [[5, 6, 7]])
    sides = "tiny (torchao int8 weight-only) against tiny (no quantisation)"
    assert next(iter(views_of(compared))).title == f"The error of {sides}"
    assert "quantisation of the candidate: torchao int8 weight-only" in page(compared)


def test_a_page_names_the_adapters_of_a_model() -> None:
    settings = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(tiny_model("llama"), settings)
    model = hs.load((adapted.eval(), None))
    shown = page(hs.lens(model, [[5, 6, 7]]))
    assert f"base weights: {model.source().base_weights}" in shown
    assert "adapters: default (LORA, strength 1.0, sha256:" in shown
