"""What a token reads, as the grid of the page paints it."""

import numpy as np
import pytest

from hiddenscope.app.answers import pack_result
from hiddenscope.app.cells import reads_of
from hiddenscope.errors import SiteError
from hiddenscope.results import views_of
from hiddenscope.results.pictures import Grid
from hiddenscope.views import unpack
from tests.pages.inside import EVIL, SENTENCE, attention


def test_a_cell_is_the_largest_and_the_mean_weight_over_heads() -> None:
    result = attention(6, 4, missing=[(2, 1)])
    reads = reads_of(result, 5)[0].data
    row = result.data.isel(query=5)
    for name in ("pattern", "weighted"):
        weights = row[name].to_numpy()
        largest, mean = reads[f"largest_{name}"], reads[f"mean_{name}"]
        assert largest.dims == mean.dims == ("site", "token")
        np.testing.assert_array_equal(largest.to_numpy(), np.nanmax(weights, axis=1))
        np.testing.assert_allclose(mean.to_numpy(), np.nanmean(weights, axis=1), 1e-6)
    assert reads["site"].to_numpy().tolist() == [f"layer.{k}" for k in range(1, 7)]
    later = reads["largest_pattern"].to_numpy()[:, 6:]
    assert (later == 0).all(), "a token reads nothing after it"


def test_one_row_is_enough_and_another_token_is_refused() -> None:
    some = attention(3, 2, queries=[4])
    assert reads_of(some, 4)[0].data["largest_pattern"].shape == (3, len(SENTENCE))
    with pytest.raises(SiteError, match="No attention of token 3"):
        reads_of(some, 3)
    # A layer without a head has no mean.
    bare = reads_of(attention(2, 2, missing=[(0, 0), (0, 1)]), 3)[0].data
    assert np.isnan(bare["mean_pattern"].to_numpy()).any(1).tolist() == [True, False]


def test_the_grid_says_which_weight_it_paints_and_hostile_tokens_stay_text() -> None:
    reads, title = reads_of(attention(), 3)
    grid = views_of(reads)[0]
    assert isinstance(grid, Grid)
    assert [measure.name for measure in grid.measures] == [
        "largest weight of any head",
        "mean weight of all heads",
        "largest value-weighted weight of any head",
        "mean value-weighted weight of all heads",
    ]
    assert title.startswith("What “France”, token 3, reads")
    reads, title = reads_of(attention(2, 2, EVIL), 0)
    packed = pack_result(reads, (title,))
    (grid,) = unpack(packed.payload.decode("ascii"))
    assert isinstance(grid, Grid) and grid.tokens == EVIL
    assert packed.header["columns"] == list(range(len(EVIL)))
