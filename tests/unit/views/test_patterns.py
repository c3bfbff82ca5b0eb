"""The views of `attention` and `contributions`: the payload and the figures hold what
the data has.
"""

from pathlib import Path

import numpy as np
import pytest

from hiddenscope.analyses.attention import story as attention_kind
from hiddenscope.errors import StatesError
from hiddenscope.results import Look, findings_of, views_of
from hiddenscope.results.pictures import (
    BYTE_STEPS,
    COARSE_STEPS,
    FINE_STEPS,
    Grid,
    Lines,
    Patterns,
    steps_of,
)
from hiddenscope.views import pack, unpack
from hiddenscope.views.payload import quantised
from hiddenscope.views.render import figure_of
from tests.pages.inside import SENTENCE, attention, contributions, heads_of
from tests.unit.views.recorded import recorded


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
    assert "255 steps, so a weight is off by at most 0.004" in heads_of(many).note
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
    assert memory.note == "At most 5 tokens of each text are shown."


def test_the_large_head_is_the_strongest_that_was_found() -> None:
    result = attention(6, 4)
    view = heads_of(result)
    assert view.name_of(*view.large) == result.facts["induction_heads"][0]["site"]
    untested = attention(tested=False, missing=[(0, 0)])
    view = heads_of(untested)
    assert view.name_of(*view.large) == "layer.1.attn.head.1"
    assert "heads were not tested" in next(iter(findings_of(untested)))


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


@pytest.mark.parametrize("name", ["contributions-1", "contributions-3"])
def test_the_grid_of_contributions_holds_every_part(name: str) -> None:
    """Of an answer of two tokens, with biases or with cross-attention."""
    data = recorded(name).data
    cross, heads = "cross_head" in data, data.sizes["head"]
    grid, sums = views_of(recorded(name))
    assert isinstance(grid, Grid) and isinstance(sums, Lines)
    assert grid.tokens[-1] == "MLP" and len(grid.measures) == 2
    assert "token 2 of the answer" in grid.measures[1].name
    for step, measure in enumerate(grid.measures):
        values = measure.numbers
        own = values[::2] if cross else values
        upper = values[1::2] if cross else values
        columns = [(own[:, :heads], "attn_head"), (upper[:, -1], "mlp")]
        if cross:
            columns.append((upper[:, :heads], "cross_head"))
        else:
            assert grid.tokens[-2:] == ("bias", "MLP") and grid.bars == 2
            columns.append((own[:, heads], "attn_bias"))
        for drawn, part in columns:
            np.testing.assert_allclose(drawn, data[part][step], rtol=1e-6)
        # The bars by kind add up to the logit: nothing is left out.
        total = sums.series[step].y.sum(dtype=np.float64)
        assert total == pytest.approx(float(data["total"][step]), abs=2e-3)


@pytest.mark.parametrize(("width", "inches"), [("", None), ("column", 3.3)])
def test_figures_show_all_heads_and_the_large_one(
    width: str, inches: float | None
) -> None:
    result = attention(6, 4, missing=[(0, 1)])
    figure = figure_of(result, Look("", "", width))  # type: ignore[arg-type]
    pictures = [image for axes in figure.axes for image in axes.images]
    assert len(pictures) == 6 * 4 - 1 + 1, "a picture for each head there is"
    for picture, (layer, head) in ((pictures[-1], (3, 3)), (pictures[3], (1, 0))):
        drawn = np.nan_to_num(picture.get_array().filled(np.nan))
        pattern = result.data["pattern"][layer, head]
        np.testing.assert_allclose(drawn, pattern, atol=1e-6)
    left, right, low, high = pictures[3].get_extent()
    # The fourth picture is the first of the second layer: one is missing below.
    assert (left + right, low + high) == (1, 3), "each in the middle of its place"
    assert pictures[3].get_clim() == (0, pytest.approx(pattern.max()))
    if inches:
        assert figure.get_size_inches()[0] == pytest.approx(inches, abs=0.02)
    titles = {text.get_text() for text in figure.texts}
    assert any("layer.4.attn.head.3" in title for title in titles)


def test_a_figure_shows_the_head_that_is_asked_for(tmp_path: Path) -> None:
    result = attention(2, 2)
    result.save(tmp_path / "y.svg", measure="layer.2.attn.head.1 weighted")
    drawing = (tmp_path / "y.svg").read_text("utf-8")
    assert "layer.2.attn.head.1" in drawing
    assert "value-weighted attention" in drawing
    with pytest.raises(StatesError, match=r"there are layer.1.attn.head.0 to"):
        result.save(tmp_path / "z.svg", measure="layer.9.attn.head.0")


def test_bars_on_paper_are_as_long_as_their_numbers() -> None:
    result = contributions(5, 3)
    axes = figure_of(result, Look()).axes[0]
    lengths = np.array([patch.get_width() for patch in axes.patches])
    numbers = result.data["mlp"][0].to_numpy()
    longest = np.abs(numbers).max()
    np.testing.assert_allclose(
        lengths / np.abs(lengths).max(), numbers / longest, rtol=1e-5
    )
