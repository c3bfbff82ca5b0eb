"""A store as an xarray: labelled, and read from the disk when values are asked for."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope.errors import StatesError
from hiddenscope.sites import Site
from hiddenscope.states.tokens import Source, Tokens
from hiddenscope.store.site_array import SiteArray

if TYPE_CHECKING:
    import xarray


def labelled(
    arrays: Sequence[SiteArray], sites: Sequence[Site], tokens: Tokens, source: Source
) -> "xarray.DataArray":
    """A DataArray with dims site, token, width and the coordinates site, text,
    position, id, string.
    """
    import xarray
    from xarray.backends import BackendArray
    from xarray.core import indexing

    if len({array.shape for array in arrays}) > 1:
        raise StatesError(
            "Cannot label these sites",
            "their widths differ",
            "Choose sites of one width.",
        )

    class Lazy(BackendArray):  # xarray knows a lazy array by this class
        shape = (len(arrays), *arrays[0].shape)
        dtype = arrays[0].dtype

        def __getitem__(self, key: Any) -> Any:
            return indexing.explicit_indexing_adapter(
                key, self.shape, indexing.IndexingSupport.OUTER, self._outer
            )

        def _outer(self, key: tuple[Any, ...]) -> NDArray[Any]:
            chosen, rows, channels = key
            numbers = np.arange(len(arrays))[chosen]
            if numbers.ndim == 0:
                return np.asarray(arrays[int(numbers)][rows][..., channels])
            parts = [arrays[number][rows][..., channels] for number in numbers]
            return (
                np.stack(parts) if parts else arrays[0][rows][..., channels][None][:0]
            )

    strings = np.array([*tokens.strings, None], dtype=object)[:-1]
    # As in `States.to_xarray`.
    coords = {
        "site": [str(site) for site in sites],
        "text": ("token", tokens.text),
        "position": ("token", tokens.positions),
        "id": ("token", tokens.ids),
        "string": xarray.Variable("token", strings, fastpath=True),
    }
    lazy = xarray.Variable(
        ("site", "token", "width"), indexing.LazilyIndexedArray(Lazy())
    )
    return xarray.DataArray(
        lazy, coords, name="states", attrs={"source": json.dumps(source.to_json())}
    )
