"""Results as pages, figures and notebook outputs, and which views they are given."""

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import xarray
from matplotlib.text import Text

import hiddenscope as hs
from hiddenscope.errors import FileError, StatesError
from hiddenscope.results import FINDINGS, Width
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import Grid, Lines, sections_of, views_of
from hiddenscope.views.page import frame
from hiddenscope.views.render import page

SITES = ["layer.0", "layer.1", "final"]
STARTS = {
    ".png": b"\x89PNG",
    ".svg": b"<?xml",
    ".pdf": b"%PDF-",
    ".html": b"<!doctype html>",
}


def result(**variables: object) -> hs.Result:
    coords = {
        "site": SITES,
        "string": ("token", ["The", "</script>"]),
        "text": ("token", [0, 0]),
    }
    data = xarray.Dataset(
        variables or {"norm": (("site", "token"), np.ones((3, 2)))}, coords
    )
    return hs.Result(
        "sizes",
        data,
        {"largest": 1.0, "where": {"site": "final"}, "text": "<b>"},
        {"model": "toy"},
    )


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("gpt2"), tiny_tokenizer()))


@pytest.mark.parametrize("suffix", STARTS)
def test_a_result_is_saved_by_its_suffix(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"picture{suffix.upper()}"
    result().save(path)
    assert path.read_bytes().startswith(STARTS[suffix])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_what_was_kept_can_be_drawn_in_another_process(tmp_path: Path) -> None:
    result().save(tmp_path / "x.nc")
    result().save(tmp_path / "here.svg")
    program = "import hiddenscope as hs; hs.Result.load('x.nc').save('there.svg')"
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    assert (tmp_path / "there.svg").read_bytes() == (tmp_path / "here.svg").read_bytes()


def test_an_analysis_brings_the_views_along() -> None:
    program = (
        "import hiddenscope as hs; hs.profile; from hiddenscope.results import"
        " PAINTERS, RENDERERS; print(sorted(RENDERERS | PAINTERS))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "['.html', '.pdf', '.png', '.svg']\n"


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
    assert set(shown._repr_mimebundle_(include=["image/png"])) == {
        "image/png",
        "text/plain",
    }
    assert set(shown._repr_mimebundle_(exclude=["text/html"])) == {
        "image/png",
        "text/plain",
    }


SHOW = (
    "import hiddenscope as hs, xarray; print(hs.Result('Sizes, all',"
    " xarray.Dataset({'x': ('site', [1.0])}, {'site': ['layer.0']}), {}, {}).show())"
)


def test_show_opens_a_page_that_stays(tmp_path: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    given = os.environ | {"BROWSER": f"{browser} %s", "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env=given,
        capture_output=True,
        text=True,
        check=True,
    )
    path = Path(done.stdout.strip())
    assert (path.name, path.parent.parent) == ("sizes-all.html", tmp_path)
    assert path.read_text("utf-8").startswith("<!doctype html>")
    assert opened.read_text().strip() == path.as_uri()


def test_show_says_where_the_page_is_when_there_is_no_browser(tmp_path: Path) -> None:
    given = {
        name: value
        for name, value in os.environ.items()
        if name not in {"BROWSER", "DISPLAY", "WAYLAND_DISPLAY"}
    }
    given |= {"PATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env=given,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 0:
        pytest.skip("this system starts a browser that is not on the path")
    assert "no browser could be started" in done.stderr
    assert len(list(tmp_path.glob("*/sizes-all.html"))) == 1


def test_variables_over_sites_and_tokens_are_measures_of_one_grid() -> None:
    look = {
        "long_name": "difference",
        "units": "logits",
        "meaning": "diverging",
        "scale": "log",
    }
    cells = np.arange(6.0).reshape(2, 3)
    (grid,) = views_of(
        result(a=(("token", "site"), cells, look), b=(("site", "token"), cells.T > 2))
    )
    assert isinstance(grid, Grid)
    first, second = grid.measures
    assert (first.name, first.unit, first.meaning, first.scale) == (
        "difference",
        "logits",
        "diverging",
        "log",
    )
    assert first.numbers.tolist() == cells.T.tolist()
    assert (second.name, second.meaning, second.scale) == ("b", "sequential", "linear")
    assert grid.sites == tuple(SITES)
    assert grid.tokens == ("The", "</script>")
    assert grid.title == "Difference, b of toy"


def test_a_map_shows_what_a_cell_sees() -> None:
    shown = result(
        influence=(
            ("site", "token", "source_site", "source_token"),
            np.ones((3, 2, 3, 2)),
        )
    )
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


def test_the_raw_last_layer_stands_out_of_the_anatomy(model: hs.Model) -> None:
    (lines,) = views_of(hs.anatomy(model))
    assert isinstance(lines, Lines)
    proved, raw = lines.series
    assert np.nansum(proved.y) == 0
    assert np.isfinite(raw.y).nonzero()[0].tolist() == [lines.x.index("layer.3")]
    assert "layer.3 is raw, and hidden_states[3] is normed" in lines.note
    (bert,) = views_of(hs.anatomy(hs.load((tiny_model("bert"), None))))
    assert isinstance(bert, Lines)
    assert len(bert.series) == 1


def test_a_profile_is_a_grid_and_lines(model: hs.Model) -> None:
    texts = ["The cat sat.", "A dog in the house"]
    grid, lines, *more = views_of(hs.profile(model, texts))
    assert isinstance(grid, Grid)
    assert isinstance(lines, Lines)
    assert all(isinstance(one, Lines) for one in more), (
        "too few tokens for a map of all pairs of layers"
    )
    assert grid.texts == tuple(texts)
    assert sorted(set(grid.text_of)) == [0, 1]
    assert [one.name for one in lines.series] == ["first token", "other tokens, median"]
    assert lines.series[1].band == "middle half"
    assert len(views_of(hs.profile(model.capture("The", "layer.*")))) >= 2


def test_two_stacks_stand_in_one_grid_and_their_lines_do_not_meet() -> None:
    module = tiny_model("t5")
    module.config.decoder_start_token_id = 0
    grid, lines, *more = views_of(
        hs.profile(hs.load((module, tiny_tokenizer())), "The cat sat.")
    )
    assert isinstance(grid, Grid)
    assert isinstance(lines, Lines)
    assert grid.texts[0] == "The cat sat."
    assert len(set(grid.text_of)) == 2
    for one in lines.series:
        inside = [place.startswith(one.name.split()[0]) for place in lines.x]
        assert np.isfinite(one.y).tolist() == inside
    for one in (one for view in more if isinstance(view, Lines) for one in view.series):
        assert not np.isfinite(
            one.y[[not place.startswith(one.name.split()[0]) for place in lines.x]]
        ).any()


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
    assert (
        next(
            sentence
            for sentence in FINDINGS["profile"](norms)
            if "the median norm of the first token" in sentence
        )
        in told
    )
    assert "hides all others" not in told, (
        "that holds where the first token is far larger"
    )
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
        return hs.lens(
            model,
            one,
            target=int(hs.lens(model, one).data["word_id"].values[-1, -1, 0]),
        )
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
    told, _, _ = (
        (tmp_path / "story.html")
        .read_text("utf-8")
        .partition("<main>")[2]
        .partition("<noscript>")
    )
    assert told.count(r"“’x’\n\n# H\n\n- y") >= 2, "it is there, on one line"
    titles = [section.title for section in sections_of(found)]
    assert re.findall("(?:<h2>|<summary>More: )(.*?)</", told) == titles
    assert "<li>" not in told
    codes = r"layer\.(?:\d+|k)|final|docs/\w+\.md"
    assert all(
        re.fullmatch(codes, code) for code in re.findall("<code>(.*?)</code>", told)
    )


def test_a_large_first_token_is_remarked_on() -> None:
    norms = {
        "middle_layers": "layer.1",
        "first_token_norm": 300.0,
        "other_tokens_norm": 3.0,
        "norm_ratio": 100.0,
    }
    ends = {
        "before_final": {
            "site": "layer.2",
            "first_token_norm": 90.0,
            "other_tokens_norm": 9.0,
        },
        "at_final": {
            "site": "final",
            "first_token_norm": 4.0,
            "other_tokens_norm": 5.0,
        },
    }
    coords = {
        "site": SITES,
        "string": ("token", ["a"]),
        "final_norm": ("site", [False] * 3),
    }
    columns = {
        f"norm_{name}": ("site", [1.0, 1, 1])
        for name in ("first", "median", "low", "high")
    }
    data = xarray.Dataset(
        {"norm": (("site", "token"), np.ones((3, 1))), **columns}, coords
    )
    facts = {
        "texts": 1,
        "stacks": [{"stack": None, "few_tokens": True, **norms, **ends}],
    }
    grid, lines = sections_of(hs.Result("profile", data, facts, {}))
    assert (
        "is 300, and that of the other tokens 3: the first is 100.0 times as large"
        in grid.prose
    )
    assert (
        "the norm of the first token from 90 to 4 and that of the other tokens from 9"
        " to 5" in grid.prose
    )
    assert "hides all others" in lines.prose
    assert "have about the same norm" in lines.prose


def test_a_figure_shows_the_view_and_the_measure_that_are_asked_for(
    model: hs.Model, tmp_path: Path
) -> None:
    result = hs.profile(model, "The capital of France is Paris. " * 2)
    grid, lines, *_ = result.views
    assert (grid, lines) == ("grid", "lines") and result.views["grid"].startswith(
        "The norm of every state"
    )

    def titles(**look: Any) -> str:
        result.save(tmp_path / "x.svg", **look)
        return (tmp_path / "x.svg").read_text("utf-8")

    assert (
        "The norm of every state" in titles()
        and "The norm along the layers" not in titles()
    )
    assert "The norm along the layers" in titles(
        view="lines"
    ) and "of every state" not in titles(view="lines")
    for name in ("kurtosis", "kurtosis over the width"):
        assert "The kurtosis over the width of every state" in titles(measure=name)
    everything = titles(view="all")
    assert all(
        title in everything
        for title in ("The norm of every state", "The norm along the layers")
    )
    result.save(tmp_path / "x.pdf", view="all")
    assert (tmp_path / "x.pdf").read_bytes().count(b"/Type /Page ") == len(result.views)
    for wrong in (
        {"view": "nosuch"},
        {"measure": "nosuch"},
        {"view": "lines", "measure": "norm"},
        {"width": "wide"},
    ):
        with pytest.raises(StatesError):
            result.save(tmp_path / "y.png", **wrong)
    with pytest.raises(FileError, match="are for figures"):
        result.save(tmp_path / "y.html", view="grid")
    assert not (tmp_path / "y.png").exists() and not (tmp_path / "y.html").exists()


@pytest.mark.parametrize(("width", "inches"), [("column", 3.3), ("page", 6.9)])
def test_a_figure_is_as_wide_as_a_column_or_a_page_of_a_paper(
    model: hs.Model, width: Width, inches: float
) -> None:
    result = hs.profile(
        model, "The capital of France is Paris, and that of Germany is Berlin." * 2
    )
    for view in result.views:
        figure = result.figure(view, width=width)
        assert figure.get_size_inches()[0] == pytest.approx(inches, abs=0.02), view
        sizes = {
            text.get_fontsize()
            for text in figure.findobj(Text)
            if text.get_text().strip()
        }
        assert min(sizes) >= 8


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
