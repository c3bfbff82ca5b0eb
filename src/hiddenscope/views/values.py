"""What a view shows, as plain values: a `Grid`, `Panels` or `Lines`. No view knows a
model or an analysis.

>>> norms = Measure("norm", [[1.0, 2.0], [3.0, float("nan")]])
>>> Grid("Norms", ("layer.0", "layer.1"), ("The", " cat"), (norms,)).measures[0].values.shape
(2, 2)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hiddenscope.errors import StatesError
from hiddenscope.views.depths import by_order, shown_first

Floats: TypeAlias = NDArray[np.float32] | NDArray[np.float16]
Meaning: TypeAlias = Literal["sequential", "diverging"]
Scale: TypeAlias = Literal["linear", "log"]
Style: TypeAlias = Literal["line", "dash", "bar"]
Token: TypeAlias = str | None

_LAYER = re.compile(r"layer\.(\d+)")


@dataclass(frozen=True, eq=False)
class Measure:
    """One named array of a grid: values `[site, token]`, NaN where a cell is missing.

    `meaning` is "diverging" where zero is the middle. `scale` and `each_layer` are how
    it is first shown; `limits` fix the ends of its colours; `title` names the grid
    while this measure is shown. `influence` is `[site, token, source_site,
    source_token]` over the sites and tokens of the grid: how much every other cell
    influences a cell. Without `values`, a cell's value is the sum of these.

    >>> Measure("difference", [[0.0, 0.5]], unit="L2").values.tolist()
    [[0.0, 0.5]]
    """

    name: str
    values: Floats | None = None
    unit: str = ""
    meaning: Meaning = "sequential"
    scale: Scale = "linear"
    each_layer: bool = False
    limits: tuple[float, float] | None = None
    influence: Floats | None = None
    title: str = ""

    def __post_init__(self) -> None:
        _chosen(self, "meaning", Meaning)
        _chosen(self, "scale", Scale)
        if self.influence is not None:
            _put(self, influence=floats(self.influence, f"{self.name}.influence", 4))
        if self.values is not None:
            _put(self, values=floats(self.values, self.name, 2))
        elif self.influence is not None:
            _put(
                self,
                values=np.nansum(self.influence.astype(np.float64), axis=(2, 3)).astype(
                    np.float32
                ),
            )
        else:
            raise StatesError(
                f"Cannot draw the measure {self.name!r}",
                "it has no values",
                "Give values or an influence map.",
            )
        if self.limits is not None:
            _put(self, limits=(float(self.limits[0]), float(self.limits[1])))

    @property
    def numbers(self) -> Floats:
        """The values `[site, token]`; `__post_init__` sees to it that there are some."""
        assert self.values is not None
        return self.values


@dataclass(frozen=True, eq=False)
class Words:
    """The top words of every cell: `chosen` `[site, token, rank]` indexes `words`, and
    is -1 where there is none.

    With `framed`, a frame marks in each column the cell from which on the word is that
    of the top row and stays so.

    >>> top = Words.of([[["Paris", "Rome"], ["Paris", ""]]], [[[0.9, 0.1], [1.0, 0.0]]])
    >>> top.words, top.chosen.tolist()
    (('Paris', 'Rome'), [[[0, 1], [0, -1]]])
    """

    words: tuple[str, ...]
    chosen: NDArray[np.int32]
    probabilities: Floats | None = None
    framed: bool = False

    def __post_init__(self) -> None:
        chosen = np.asarray(self.chosen)
        if (
            chosen.ndim != 3
            or chosen.dtype.kind not in "iu"
            or (chosen >= len(self.words)).any()
        ):
            reason = (
                f"their indices are {chosen.dtype} {list(chosen.shape)}, for"
                f" {len(self.words)} words"
            )
            raise StatesError(
                "Cannot draw the words of a grid",
                reason,
                "Give integers [site, token, rank].",
            )
        _put(
            self,
            words=tuple(self.words),
            chosen=np.maximum(chosen, -1).astype(np.int32),
        )
        if self.probabilities is not None:
            _put(self, probabilities=floats(self.probabilities, "probabilities", 3))
            _same(self.probabilities, chosen.shape, "the probabilities of words")

    def settled_rows(self) -> list[int]:
        """In each column, the row from which on all say what the top row says; -1 where
        that is the top row alone.

        >>> Words.of([[["a"], ["b"], ["e"]], [["c"], ["b"], ["f"]], [["c"], ["d"], ["e"]]]).settled_rows()
        [1, -1, -1]
        """
        top = self.chosen[:, :, 0]
        others = top[::-1] != top[-1]  # from the top down
        rows = np.where(others.any(0), len(top) - others.argmax(0), 0)
        return [
            int(row)
            for row in np.where((rows == len(top) - 1) | (top[-1] < 0), -1, rows)
        ]

    @classmethod
    def of(cls, strings: ArrayLike, probabilities: ArrayLike | None = None) -> "Words":
        """From the words themselves, `[site, token, rank]`, '' where there is none."""
        array = np.asarray(strings, dtype=object)
        places: dict[str, int] = {"": -1}
        for word in array.flat:
            places.setdefault(word, len(places) - 1)
        chosen = np.array(
            [places[word] for word in array.flat], dtype=np.int32
        ).reshape(array.shape)
        kept = (
            None if probabilities is None else floats(probabilities, "probabilities", 3)
        )
        return cls(tuple(places)[1:], chosen, kept)


@dataclass(frozen=True, eq=False)
class Grid:
    """Tokens across, layers up: the forward pass, unrolled.

    `sites` run from the bottom up and `tokens` from the left, each as a reader knows
    it; None is a gap. `second` is a second row of tokens, aligned with the first and
    drawn below it; `token_rows` names the two rows. `text_of` says which of `texts` a
    column belongs to, where there are several side by side. An encoder-decoder puts
    both stacks in one grid; cells that do not exist are NaN. `x_name` and `y_name` say
    what runs across and up, where that is not tokens and sites.
    """

    title: str
    sites: tuple[str, ...]
    tokens: tuple[Token, ...]
    measures: tuple[Measure, ...]
    words: Words | None = None
    second: tuple[Token, ...] = ()
    texts: tuple[str, ...] = ()
    text_of: tuple[int, ...] = ()
    note: str = ""
    token_rows: tuple[str, ...] = ()
    x_name: str = "token"
    y_name: str = "site"

    def __post_init__(self) -> None:
        _tuples(
            self,
            "sites",
            "tokens",
            "measures",
            "second",
            "texts",
            "text_of",
            "token_rows",
        )
        _put(
            self,
            sites=tuple(map(str, self.sites)),
            text_of=tuple(map(int, self.text_of)),
        )
        shape = len(self.sites), len(self.tokens)
        if not self.measures or 0 in shape:
            raise StatesError(
                f"Cannot draw the grid {self.title!r}",
                "it is empty",
                "Give sites, tokens and a measure.",
            )
        for measure in self.measures:
            _same(measure.numbers, shape, f"the measure {measure.name!r}")
            if measure.influence is not None:
                _same(
                    measure.influence,
                    shape + shape,
                    f"the influence of {measure.name!r}",
                )
        if self.words is not None:
            _same(
                self.words.chosen,
                (*shape, self.words.chosen.shape[2]),
                "the words of a grid",
            )
        for name in ("second", "text_of"):
            _one_each(name, getattr(self, name), len(self.tokens), "tokens")
        _one_each("token_rows", self.token_rows, 2, "rows of tokens")
        if not all(0 <= text < max(len(self.texts), 1) for text in self.text_of):
            raise StatesError(
                "Cannot place the columns of a grid",
                "one names a text that is not there",
                "Count texts from 0.",
            )


@dataclass(frozen=True, eq=False)
class Panels:
    """One scatter for each site: `points` `[panel, point, 2]`, the same points in each,
    NaN where one is missing.

    There is one of `labels` and `texts` for each point, or none at all. There is one of
    `captions` (scores, say) and `messages` ("all states are equal", in place of a
    scatter) for each panel. `rows` names what a panel belongs to besides its site, such
    as a model, and `rows_name` says what these names are: each run of equal names
    begins a new row. `marks` has a word or two for panels that stand out. Points with
    the label `grey` belong to no class.

    `depths` says how deep each panel lies in its model, from 0 to 1; without them,
    panels of a row are spread evenly. `first` has the panels that are shown before all
    are asked for: for each row as many, at equal depths, and -1 where there is none.
    Without it there are five in a row; where a single row has few panels, all are
    shown.
    """

    title: str
    sites: tuple[str, ...]
    points: Floats
    labels: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    captions: tuple[str, ...] = ()
    messages: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    note: str = ""
    rows_name: str = "row"
    marks: tuple[str, ...] = ()
    grey: str = ""
    depths: tuple[float, ...] = ()
    first: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        _put(
            self,
            points=floats(self.points, "points", 3),
            sites=tuple(map(str, self.sites)),
        )
        _tuples(self, "labels", "texts", "captions", "messages", "rows", "marks")
        _same(
            self.points,
            (len(self.sites), self.points.shape[1], 2),
            "the points of panels",
        )
        for name in ("labels", "texts"):
            _one_each(name, getattr(self, name), self.points.shape[1], "points")
        for name in ("captions", "messages", "rows", "marks", "depths"):
            _one_each(name, getattr(self, name), len(self.sites), "panels")
        _put(
            self,
            depths=tuple(
                map(float, self.depths or by_order(self.rows, len(self.sites)))
            ),
        )
        first = self.first or shown_first(self.depths, self.rows)
        _put(self, first=tuple(tuple(map(int, row)) for row in first))
        if any(
            not -1 <= panel < len(self.sites) for row in self.first for panel in row
        ):
            raise StatesError(
                "Cannot show the first panels",
                "one is not there",
                "Count panels from 0, and give -1 for none.",
            )

    @property
    def classes(self) -> tuple[str, ...]:
        """The labels in the order in which they are met."""
        return tuple(dict.fromkeys(self.labels))


@dataclass(frozen=True, eq=False)
class Series:
    """One line, dashed line or set of bars: one `y` for each place, NaN in a gap, with
    a band from `low` to `high`.

    >>> Series("silhouette", [0.1, 0.4], low=[0.0, 0.3], high=[0.2, 0.5], band="95% interval").style
    'line'
    """

    name: str
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    band: str = ""
    style: Style = "line"

    def __post_init__(self) -> None:
        _chosen(self, "style", Style)
        _put(self, y=floats(self.y, self.name, 1))
        if (self.low is None) != (self.high is None):
            raise StatesError(
                f"Cannot draw the band of {self.name!r}",
                "it has only one side",
                "Give low and high.",
            )
        for name in ("low", "high"):
            if (side := getattr(self, name)) is not None:
                side = floats(side, f"{self.name}.{name}", 1)
                _same(side, self.y.shape, f"the band of {self.name!r}")
                _put(self, **{name: side})


@dataclass(frozen=True, eq=False)
class Lines:
    """Series along the layers, or along whatever `x` names: a strength, a distance in
    tokens.
    """

    title: str
    x: tuple[str, ...]
    series: tuple[Series, ...]
    x_name: str = "site"
    y_name: str = ""
    unit: str = ""
    scale: Scale = "linear"
    note: str = ""

    def __post_init__(self) -> None:
        _tuples(self, "x", "series")
        _put(self, x=tuple(map(str, self.x)))
        _chosen(self, "scale", Scale)
        if not self.series or not self.x:
            raise StatesError(
                f"Cannot draw the lines {self.title!r}",
                "there are none",
                "Give places and at least one series.",
            )
        for series in self.series:
            _same(series.y, (len(self.x),), f"the series {series.name!r}")

    @property
    def places(self) -> tuple[float, ...]:
        """Where each x stands along the axis: layers of one stack at their depth, all
        else one after the other.

        >>> Lines("Norms", ("layer.0", "layer.12", "final"), (Series("norm", [1.0, 2.0, 3.0]),)).places
        (0.0, 12.0, 13.0)
        """
        layers = [_LAYER.fullmatch(x) for x in self.x]
        depths = [float(layer[1]) for layer in layers if layer]
        if (
            self.x_name == "site"
            and self.x[-1] == "final"
            and len(depths) == len(self.x) - 1 > 0
        ):
            depths.append(depths[-1] + 1)
        rises = all(before < after for before, after in pairwise(depths))
        if self.x_name == "site" and len(depths) == len(self.x) and rises:
            return tuple(depth - depths[0] for depth in depths)
        return tuple(float(place) for place in range(len(self.x)))


View: TypeAlias = Grid | Panels | Lines


@dataclass(frozen=True)
class Listing:
    """Texts and numbers that a page shows as a table, or as a list where there is one
    column.

    The numbers of the column `bar` have bars too; a full one is `most`, or the largest
    of them.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float, ...], ...]
    bar: str = ""
    most: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        if any(len(row) != len(self.columns) for row in self.rows):
            reason = f"there are rows of other lengths than {len(self.columns)}"
            raise StatesError(
                f"Cannot show the list {self.title!r}",
                reason,
                "Give a cell for each column.",
            )


@dataclass(frozen=True)
class Section:
    """A part of a page: its title, what was found, and the views that show it.

    `reading` says in a sentence or two what the views show and how their numbers are
    defined. `prose` is the findings, as paragraphs that `document` takes. A `folded`
    section stands behind "More" beneath the one before it. `docs` is the word of the
    docs page that says more. `tables` stand below the views. The first paragraph of
    `prose` stands above the first view: it should be one sentence. Everything else that
    is said comes beside the view or after it.
    """

    title: str
    prose: str
    views: tuple[View, ...]
    reading: str = ""
    folded: bool = False
    docs: str = ""
    tables: tuple[Listing, ...] = ()


def floats(numbers: ArrayLike, name: str, dims: int) -> Floats:
    """The numbers as they are packed, read-only: float16 stays, everything else becomes
    float32.
    """
    array = np.asarray(numbers)
    if array.dtype.kind not in "fiub" or array.ndim != dims:
        reason = f"{name} is {array.dtype} {list(array.shape)}"
        raise StatesError(
            "Cannot draw these numbers", reason, f"Give numbers in {dims} dimensions."
        )
    kept = np.ascontiguousarray(
        array, dtype=array.dtype if array.dtype == np.float16 else np.float32
    ).view()
    kept.setflags(write=False)
    return kept


def _put(value: object, **fields: Any) -> None:
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def _tuples(value: object, *names: str) -> None:
    _put(value, **{name: tuple(getattr(value, name)) for name in names})


def _chosen(value: object, name: str, choices: Any) -> None:
    if (choice := getattr(value, name)) not in get_args(choices):
        options = ", ".join(get_args(choices))
        raise StatesError(
            f"{name} must be one of {options}",
            f"got {choice!r}",
            "Choose one of these.",
        )


def _same(array: NDArray[Any], shape: tuple[int, ...], what: str) -> None:
    if array.shape != shape:
        raise StatesError(
            f"Cannot draw {what}",
            f"its shape is {list(array.shape)}",
            f"Give {list(shape)}.",
        )


def _one_each(name: str, values: Sequence[object], count: int, of: str) -> None:
    if values and len(values) != count:
        raise StatesError(
            f"Cannot draw {name} of {count} {of}",
            f"there are {len(values)}",
            f"Give {count}, or none.",
        )
