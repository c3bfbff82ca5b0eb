"""The labelled arrays: the map, its sites and its tokens."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.visibility.maps import Axes
from hiddenscope.analyses.visibility.measures import LONG, UNITS, Measure, Numbers
from hiddenscope.analyses.visibility.reading import Subject
from hiddenscope.states import Tokens

if TYPE_CHECKING:
    import xarray

MAP = ("site", "token", "source_site", "source_token")


def mean(maps: Iterable[tuple[Numbers, Numbers | None]]) -> tuple[Numbers, Numbers | None]:
    """The mean over texts; each has probes of its own, so the errors are independent and shrink with their number."""
    total: Numbers | None = None
    spread: Numbers | None = None
    count = 0
    for values, half in maps:
        count += 1
        total = values if total is None else total + values
        if half is not None:
            spread = half**2 if spread is None else spread + half**2
    assert total is not None
    return total / count, None if spread is None else np.sqrt(spread) / count


def table(subject: Subject, axes: Axes, measure: Measure, found: tuple[Numbers, Numbers | None]) -> "xarray.Dataset":
    """One Dataset; with two stacks, the cells in which no state is are NaN."""
    import xarray

    look = {"long_name": LONG[measure.name], "units": UNITS[measure.name], "scale": "log"}
    said = {measure.name: look, f"{measure.name}_error": {**look, "long_name": "half the 95% interval"}}
    there = axes.there
    names = [str(site) for site in axes.sites]
    coords: dict[str, Any] = {"source_site": names}
    dims: tuple[str, ...] = MAP
    if measure.name == "logit":
        dims, gone = MAP[1:], np.broadcast_to(~there, found[0].shape)
        coords |= _tokens({name: subject.tokens[name] for name in list(subject.tokens)[-1:]}, "")
        coords |= _tokens(subject.tokens, "source_")
        coords["asked"] = ("token", np.array([*subject.asked, None], dtype=object)[:-1])
    else:
        gone = ~there[None, None] | ~there[:, :, None, None]
        coords |= {"site": names, **_tokens(subject.tokens, "")}
    columns = {
        name: (dims, np.where(gone, np.nan, values).astype(np.float32), attrs)
        for (name, attrs), values in zip(said.items(), found, strict=True)
        if values is not None
    }
    texts = {("targets" if name == "decoder" else "texts"): some.texts for name, some in subject.tokens.items()}
    return xarray.Dataset(columns, coords, {name: list(some) for name, some in texts.items() if some is not None})


def _tokens(stacks: "dict[str | None, Tokens] | Any", prefix: str) -> dict[str, Any]:
    """What stands at each place: in one text its token; in several the token that all have, or the position."""
    columns: dict[str, list[Any]] = {"position": [], "id": [], "string": []}
    for tokens in stacks.values():
        length = int(tokens.lengths[0])
        ids = tokens.ids.reshape(-1, length)
        for place in range(length):
            same = len(set(ids[:, place].tolist())) == 1
            columns["position"].append(place)
            columns["id"].append(int(ids[0, place]) if same else -1)
            columns["string"].append(tokens.strings[place] if same else str(place))
    dim = f"{prefix}token"
    coords: dict[str, Any] = {f"{prefix}{name}": (dim, np.array(columns[name])) for name in ("position", "id")}
    coords[f"{prefix}string"] = (dim, np.array([*columns["string"], None], dtype=object)[:-1])
    if len(stacks) > 1:
        lengths = [int(tokens.lengths[0]) for tokens in stacks.values()]
        coords[f"{prefix}stack"] = (dim, np.repeat(np.array([str(n) for n in stacks], dtype=object), lengths))
    return coords
