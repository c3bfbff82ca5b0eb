"""Values of views: a `Grid`, `Panels`, `Lines`, `Patterns` or `Graph`, checked when
they are made.

They know no model and no analysis. The page, the notebook and matplotlib draw them.

>>> norms = Measure("norm", [[1.0, 2.0], [3.0, float("nan")]])
>>> grid = Grid("Norms", ("layer.0", "layer.1"), ("The", " cat"), (norms,))
>>> grid.measures[0].values.shape
(2, 2)
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import chain, groupby, pairwise
from typing import Any, Literal, TypeAlias, get_args, get_origin

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hiddenscope.errors import StatesError
from hiddenscope.results.layering import layered
from hiddenscope.sites import Site

PackedFloats: TypeAlias = NDArray[np.float32] | NDArray[np.float16]
Meaning: TypeAlias = Literal["sequential", "diverging"]
ColourScale: TypeAlias = Literal["linear", "log"]
Style: TypeAlias = Literal["line", "dash", "bar"]
TokenLabel: TypeAlias = str | None

# Attention weights are packed as steps of their square root: the more weights there
# are, the fewer steps, so that a page stays within some 15 MB.
MOST_FINE_WEIGHTS, MOST_BYTE_WEIGHTS = 1_000_000, 16_000_000
FINE_STEPS, BYTE_STEPS, COARSE_STEPS = 65_535, 255, 63
# Panels of a row that are shown at first.
FIRST = 5
# Items that a tuple turns what it is given into.
PLAIN = (str, int, float)
_LAYER = re.compile(r"layer\.(\d+)")
# Of a label in a graph, in pixels: the width of a character, and of what is around it.
CHARACTER, FRAME = 7.7, 18.0
LONGEST_SHORT = 16
# How a part is named in a graph: what is replaced, and with what.
SHORTER = (
    (r"^(enc|dec)oder\.", r"\1 "),
    (r"layer\.(\d+)\.attn\.head\.(\d+)$", r"\1.\2"),
    (r"layer\.(\d+)\.(.+)", r"\2 \1"),
    (r"layer\.0$", "embeddings"),
)


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
    values: PackedFloats | None = None
    unit: str = ""
    meaning: Meaning = "sequential"
    scale: ColourScale = "linear"
    each_layer: bool = False
    limits: tuple[float, float] | None = None
    influence: PackedFloats | None = None
    title: str = ""

    def __post_init__(self) -> None:
        _complete(self)
        values = self.values
        if self.influence is not None:
            name = f"the influence of {self.name!r}"
            influence = floats(self.influence, name, (None,) * 4)
            _set(self, influence=influence)
            if values is None:
                # Sums of float32 over thousands of sources would lose digits.
                values = np.nansum(influence.astype(np.float64), axis=(2, 3))
        what = f"the measure {self.name!r}"
        _refuse(what, (values is None, "it has no values", "Give values or a map."))
        _set(self, values=floats(values, what, (None, None)))
        if self.limits is not None:
            low, high = self.limits
            _set(self, limits=(float(low), float(high)))

    @property
    def numbers(self) -> PackedFloats:
        """Return the values `[site, token]`, which every finished measure has."""
        assert self.values is not None
        return self.values


@dataclass(frozen=True, eq=False)
class Words:
    """The top words of every cell: `chosen` `[site, token, rank]` indexes `words`, and
    is -1 where there is none.

    With `framed`, a frame marks in each column the cell above which the word no longer
    changes.

    >>> top = Words.of([[["Paris", "Rome"], ["Paris", ""]]], [[[0.9, 0.1], [1.0, 0.0]]])
    >>> top.words, top.chosen.tolist()
    (('Paris', 'Rome'), [[[0, 1], [0, -1]]])
    """

    words: tuple[str, ...]
    chosen: NDArray[np.int32]
    probabilities: PackedFloats | None = None
    framed: bool = False

    def __post_init__(self) -> None:
        # Any negative number means that there is no word; a payload holds -1.
        indices = np.asarray(self.chosen)
        is_integer = indices.ndim == 3 and indices.dtype.kind in "iu"
        wrong = not is_integer or bool((indices >= len(self.words)).any())
        shape = f"their indices are {indices.dtype} {list(indices.shape)}"
        reason = f"{shape}, for {len(self.words)} words"
        _refuse("these words", (wrong, reason, "Give integers [site, token, rank]."))
        indices = np.maximum(indices, -1).astype(np.int32)
        _complete(self)
        _set(self, chosen=indices)
        if self.probabilities is not None:
            probabilities = floats(self.probabilities, "probabilities", indices.shape)
            _set(self, probabilities=probabilities)

    def settled_rows(self) -> list[int]:
        """Return for each column the lowest row from which on all rows have the word of
        the top row; -1 where that is the top row itself.

        >>> columns = [["a", "c", "c"], ["b", "b", "d"], ["e", "f", "e"]]
        >>> Words.of(np.array(columns).T[..., None]).settled_rows()
        [1, -1, -1]
        """
        top_words = self.chosen[:, :, 0]
        rows, last = len(top_words), top_words[-1]
        differs_from_top_down = top_words[::-1] != last
        rows_above = differs_from_top_down.argmax(0)
        settled = np.where(differs_from_top_down.any(0), rows - rows_above, 0)
        unsettled = (settled == rows - 1) | (last < 0)
        return [int(row) for row in np.where(unsettled, -1, settled)]

    @classmethod
    def of(cls, strings: ArrayLike, probabilities: ArrayLike | None = None) -> "Words":
        """Make words of strings `[site, token, rank]`, "" where there is none."""
        array = np.asarray(strings, dtype=object)
        index_of = {"": -1}
        for word in array.flat:
            index_of.setdefault(word, len(index_of) - 1)
        indices = np.array([index_of[word] for word in array.flat], dtype=np.int32)
        indices = indices.reshape(array.shape)
        if probabilities is not None:
            probabilities = floats(probabilities, "probabilities", indices.shape)
        return cls(tuple(index_of)[1:], indices, probabilities)


@dataclass(frozen=True, eq=False)
class Grid:
    """Tokens across, layers up: the forward pass, unrolled.

    `sites` run from the bottom up and `tokens` from the left, each as a reader knows
    it; None is a gap. `second` is a second row of tokens, aligned with the first and
    drawn below it; `token_rows` names the two rows. `text_of` says which of `texts` a
    column belongs to, where there are several side by side. An encoder-decoder puts
    both stacks in one grid; cells that do not exist are NaN. `x_name` and `y_name` say
    what runs across and up, where that is not tokens and sites. The last `bars` columns
    are drawn as bars and not as colours.
    """

    title: str
    sites: tuple[str, ...]
    tokens: tuple[TokenLabel, ...]
    measures: tuple[Measure, ...]
    words: Words | None = None
    second: tuple[TokenLabel, ...] = ()
    texts: tuple[str, ...] = ()
    text_of: tuple[int, ...] = ()
    note: str = ""
    token_rows: tuple[str, ...] = ()
    x_name: str = "token"
    y_name: str = "site"
    bars: int = 0

    def __post_init__(self) -> None:
        _complete(self)
        shape = len(self.sites), len(self.tokens)
        columns = shape[1]
        _check_lengths(self, columns, "second", "text_of")
        _check_lengths(self, 2, "token_rows")
        texts = range(max(len(self.texts), 1))
        empty = not self.measures or 0 in shape
        _refuse(
            f"the grid {self.title!r}",
            (empty, "it is empty", "Give sites, tokens and a measure."),
            (
                not empty and not 0 <= self.bars < columns,
                f"{self.bars} of {columns} columns are bars",
                "Leave at least one column to colours.",
            ),
            (
                any(text not in texts for text in self.text_of),
                "a column names a text that is not there",
                "Count texts from 0.",
            ),
        )
        for measure in self.measures:
            what = f"the measure {measure.name!r}"
            floats(measure.numbers, what, shape)
            if measure.influence is not None:
                floats(measure.influence, f"the influence of {what}", shape + shape)
        if self.words is not None:
            floats(self.words.chosen, "the words", (*shape, None))


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
    panels of a row are spread evenly. `first` has the panels that are shown until a
    reader opens them all: the same number for each row, at equal depths, and -1 where a
    row has none. Without it there are five in a row; where a single row has few panels,
    all are shown.
    """

    title: str
    sites: tuple[str, ...]
    points: PackedFloats
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
        _complete(self)
        panels = len(self.sites)
        _set(self, points=floats(self.points, "points", (panels, None, 2)))
        _check_lengths(self, self.points.shape[1], "labels", "texts")
        _check_lengths(self, panels, "captions", "messages", "rows", "marks", "depths")
        _set(self, depths=self.depths or by_order(self.rows, panels))
        first = self.first or shown_first(self.depths, self.rows)
        _set(self, first=tuple(tuple(map(int, row)) for row in first))
        missing = any(not -1 <= panel < panels for panel in chain(*self.first))
        remedy = "Count panels from 0, and give -1 for none."
        _refuse("the first panels", (missing, "one is not there", remedy))

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the distinct labels in the order of the points."""
        return tuple(dict.fromkeys(self.labels))


@dataclass(frozen=True, eq=False)
class Series:
    """One line, dashed line or set of bars: one `y` for each place, NaN in a gap, with
    a band from `low` to `high`.

    >>> Series("silhouette", [0.1, 0.4], [0.0, 0.3], [0.2, 0.5], "95% interval").style
    'line'
    """

    name: str
    y: PackedFloats
    low: PackedFloats | None = None
    high: PackedFloats | None = None
    band: str = ""
    style: Style = "line"

    def __post_init__(self) -> None:
        _complete(self)
        what = f"the series {self.name!r}"
        _set(self, y=floats(self.y, what, (None,)))
        half = (self.low is None) != (self.high is None)
        _refuse(what, (half, "its band has only one side", "Give low and high."))
        for name in ("low", "high"):
            side = getattr(self, name)
            if side is not None:
                _set(self, **{name: floats(side, f"{name} of {what}", self.y.shape)})


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
    scale: ColourScale = "linear"
    note: str = ""
    # On a log axis, `x` are numbers that rise, such as distances.
    x_scale: ColourScale = "linear"

    def __post_init__(self) -> None:
        _complete(self)
        empty = not self.series or not self.x
        remedy = "Give places and at least one series."
        _refuse(f"the lines {self.title!r}", (empty, "there are none", remedy))
        for series in self.series:
            floats(series.y, f"the series {series.name!r}", (len(self.x),))

    @property
    def places(self) -> tuple[float, ...]:
        """Return where each x stands on the axis: layers of one stack at their depth,
        numbers of a log axis by their doublings, anything else one after the other.

        >>> norm = Series("norm", [1.0, 2.0, 3.0])
        >>> Lines("Norms", ("layer.0", "layer.12", "final"), (norm,)).places
        (0.0, 12.0, 13.0)
        """
        # Some layers may be left out: a curve must not look steeper for that.
        in_order = tuple(float(place) for place in range(len(self.x)))
        if self.x_scale == "log":
            return tuple(math.log2(float(x) / float(self.x[0])) for x in self.x)
        if self.x_name != "site":
            return in_order
        depths = []
        for x in self.x:
            layer = _LAYER.fullmatch(x)
            if layer:
                depths.append(float(layer[1]))
        # `final` has no number of its own, and stands one step above the last layer.
        if self.x[-1] == "final" and depths and len(depths) == len(self.x) - 1:
            depths.append(depths[-1] + 1)
        rises = all(before < after for before, after in pairwise(depths))
        if len(depths) < len(self.x) or not rises:
            return in_order
        return tuple(depth - depths[0] for depth in depths)


@dataclass(frozen=True, eq=False)
class HeadScore:
    """How far each head does one thing, such as reading the previous token: numbers
    `[site, head]`, NaN where a head is missing.

    `here` is the mean weight in this text. `score` is the same on random tokens,
    `null` what chance gives there, and `p` the corrected p-value. Each may be None.

    >>> HeadScore("first", here=[[0.25, 0.5]]).here.tolist()
    [[0.25, 0.5]]
    """

    name: str
    here: PackedFloats | None = None
    score: PackedFloats | None = None
    null: PackedFloats | None = None
    p: PackedFloats | None = None

    def __post_init__(self) -> None:
        self.check((None, None))

    def check(self, shape: tuple[int | None, ...]) -> None:
        """Keep the numbers as a payload holds them, if they have this shape."""
        for name in ("here", "score", "null", "p"):
            numbers = getattr(self, name)
            if numbers is not None:
                _set(self, **{name: floats(numbers, f"{self.name}.{name}", shape)})


@dataclass(frozen=True, eq=False)
class Patterns:
    """Attention patterns: small multiples of layer by head, and one head large.

    `sites` run from the bottom up and `heads` across. `weights` are `[site, head,
    query, key]`, from 0 to 1, and NaN where a head is missing. `norms` `[site, head,
    key]` are the norms of what each key's token writes through the head: a weight
    times the norm is the value-weighted weight. `positions` are the places of the
    queries among the keys; there are none where queries and keys are tokens of two
    texts. `large` is the place of the site and of the head that is large at first;
    with `weighted`, value-weighted weights are shown first.
    """

    title: str
    sites: tuple[str, ...]
    heads: tuple[str, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: PackedFloats
    norms: PackedFloats
    positions: tuple[int, ...] = ()
    scores: tuple[HeadScore, ...] = ()
    large: tuple[int, int] = (0, 0)
    weighted: bool = False
    note: str = ""

    def __post_init__(self) -> None:
        _complete(self)
        shape = len(self.sites), len(self.heads)
        queries, keys = len(self.queries), len(self.keys)
        _check_lengths(self, queries, "positions")
        weights = floats(self.weights, "weights", (*shape, queries, keys))
        norms = floats(self.norms, "norms", (*shape, keys))
        row, head = map(int, self.large)
        _set(self, weights=weights, norms=norms, large=(row, head))
        for score in self.scores:
            score.check(shape)
        inside = row in range(shape[0]) and head in range(shape[1])
        _refuse(
            f"the heads {self.title!r}",
            (0 in weights.shape, "there are none", "Give sites, heads and tokens."),
            (
                not inside or any(place not in range(keys) for place in self.positions),
                "a token or the large head is not there",
                "Count sites, heads and keys from 0.",
            ),
        )

    @property
    def exists(self) -> NDArray[np.bool_]:
        """Tell which heads exist, `[site, head]`."""
        return np.logical_not(np.isnan(self.norms).all(axis=2))

    def name_of(self, row: int, head: int) -> str:
        """Return the site of one head."""
        return f"{self.sites[row]}.head.{self.heads[head]}"

    def shown(self, row: int, head: int) -> NDArray[np.float64]:
        """Return what the picture of one head shows, `[query, key]`."""
        weights: NDArray[np.float64] = self.weights[row, head].astype(np.float64)
        norms: NDArray[np.float64] = self.norms[row, head].astype(np.float64)
        return weights * norms if self.weighted else weights


@dataclass(frozen=True, eq=False)
class Graph:
    """Parts of a model in layers, from the bottom up, and edges between them.

    `nodes` run in the order of the forward pass; `rows` has the layer of each, rising.
    Edge k goes up from `source[k]` to `target[k]`, places among the nodes, and has the
    value `values[k]`, above or below zero. `kinds` says how each is read, such as "q"
    or "k"; `exact` has a second number for each, NaN where there is none.

    `short` are the names that stand in the picture, and `across` is the layout, as
    `layered` returns it; both are made where they are not given.
    """

    title: str
    nodes: tuple[str, ...]
    rows: tuple[int, ...]
    source: NDArray[np.int32]
    target: NDArray[np.int32]
    values: PackedFloats
    kinds: tuple[str, ...] = ()
    value_name: str = "effect"
    unit: str = ""
    note: str = ""
    exact: PackedFloats | None = None
    exact_name: str = "exact effect"
    short: tuple[str, ...] = ()
    across: PackedFloats | None = None

    def __post_init__(self) -> None:
        _complete(self)
        nodes = self.nodes
        values = floats(self.values, "the values of edges", (None,))
        source = np.asarray(self.source, dtype=np.int32)
        target = np.asarray(self.target, dtype=np.int32)
        same = source.shape == target.shape == values.shape
        up = same and (source < target).all() and sorted(self.rows) == [*self.rows]
        inside = up and (source >= 0).all() and (target < len(nodes)).all()
        _refuse(
            f"the graph {self.title!r}",
            (not self.rows, "it is empty", "Give nodes and their rows."),
            (not same, "an edge has no value", "Give one to each."),
            (not up, "an edge or a row goes down", "Follow the forward pass."),
            (not inside, "an edge has no node at an end", "Count nodes from 0."),
            (not np.isfinite(values).all(), "a value is not finite", "Leave it out."),
        )
        short = tuple(map(_short, self.short or nodes))
        _set(self, short=short, values=values, source=source, target=target)
        _check_lengths(self, len(nodes), "rows", "short")
        _check_lengths(self, len(values), "kinds")
        across: ArrayLike | None = self.across
        if across is None:
            widths = CHARACTER * np.array([*map(len, short)]) + FRAME
            across = layered(self.rows, np.stack([source, target], 1), widths)
        _set(self, across=floats(across, "the layout", (None, None)))
        if self.exact is not None:
            _set(self, exact=floats(self.exact, "exact effects", values.shape))

    @classmethod
    def of(
        cls, title: str, edges: Iterable[tuple[str, str, str, float]], **more: Any
    ) -> "Graph":
        """Make a graph of edges (writer, reader, kind, value), whose ends are sites or
        "logits". The embeddings and the logits are always there.

        >>> edges = [("layer.2.attn.head.5", "layer.2.mlp", "", 0.5)]
        >>> graph = Graph.of("Strongest edges", edges)
        >>> graph.short, graph.rows
        (('embeddings', '2.5', 'mlp 2', 'logits'), (0, 1, 1, 3))
        """
        # Without an edge there is nothing to turn into columns.
        columns = list(zip(*edges, strict=True)) or [()] * 4
        writers, readers, kinds, values = columns
        names = {"layer.0", *writers, *readers} - {"logits"}
        sites = sorted(map(Site.parse, names))
        nodes = (*map(str, sites), "logits")
        layers = [(site.stack, site.layer) for site in sites]
        rows = (*map(layers.index, layers), len(sites))
        source = np.array([*map(nodes.index, writers)])
        target = np.array([*map(nodes.index, readers)])
        return cls(title, nodes, rows, source, target, np.array(values), kinds, **more)


View: TypeAlias = Grid | Panels | Lines | Patterns | Graph


def floats(
    numbers: ArrayLike | None, name: str, shape: tuple[int | None, ...]
) -> PackedFloats:
    """Return the numbers as a payload holds them, read-only: float16 stays, anything
    else becomes float32. Where `shape` is None, any length will do.
    """
    array = np.asarray(numbers)
    has_shape = array.ndim == len(shape) and all(
        wanted in (None, length)
        for wanted, length in zip(shape, array.shape, strict=True)
    )
    lengths = str(list(shape)).replace("None", "any")
    _refuse(
        name,
        (
            array.dtype.kind not in "fiub" or not has_shape,
            f"it is {array.dtype} {list(array.shape)}",
            f"Give numbers {lengths}.",
        ),
    )
    packed: PackedFloats
    if array.dtype == np.float16:
        packed = np.ascontiguousarray(array, dtype=np.float16)
    else:
        packed = np.ascontiguousarray(array, dtype=np.float32)
    # A view of the array, so that the caller's own array stays writeable.
    packed = packed.view()
    packed.setflags(write=False)
    return packed


def _short(name: str) -> str:
    """Return the name of a part as it stands in a graph.

    >>> _short("layer.3.attn.head.5"), _short("decoder.layer.3.mlp"), _short("logits")
    ('3.5', 'dec mlp 3', 'logits')
    """
    label = name
    for pattern, shorter in SHORTER:
        label = re.sub(pattern, shorter, label)
    return label if len(label) <= LONGEST_SHORT else f"{label[: LONGEST_SHORT - 1]}…"


def _set(value: object, **fields: object) -> None:
    """Set fields of a frozen dataclass while it is made."""
    for name, field in fields.items():
        object.__setattr__(value, name, field)


def _complete(picture: Any) -> None:
    """Make fields the tuples that their types say, and refuse a word that is no choice
    of its type.
    """
    for field in fields(picture):
        value, parts = getattr(picture, field.name), get_args(field.type)
        if get_origin(field.type) is Literal:
            remedy = f"Choose one of {', '.join(parts)}."
            refusal = value not in parts, f"got {value!r}", remedy
            _refuse(f"this {field.name}", refusal)
        elif parts[1:] == (Ellipsis,):
            items = map(parts[0], value) if parts[0] in PLAIN else value
            object.__setattr__(picture, field.name, tuple(items))


def _check_lengths(picture: object, count: int, *names: str) -> None:
    """Refuse fields that have neither `count` items nor none."""
    for name in names:
        length = len(getattr(picture, name))
        remedy = f"Give {count}, or none."
        refusal = length not in (0, count), f"there are {length}", remedy
        _refuse(f"these {name}", refusal)


def _refuse(what: str, *refusals: tuple[bool, str, str]) -> None:
    """Raise for the first refusal that holds: a condition, a reason and a remedy."""
    for holds, reason, remedy in refusals:
        if holds:
            raise StatesError(f"Cannot draw {what}", reason, remedy)


def runs(rows: Sequence[str], count: int) -> list[list[int]]:
    """Return the panels of each row; without names there is one row.

    >>> runs(("gpt2", "gpt2", "bert"), 3), runs((), 3)
    ([[0, 1], [2]], [[0, 1, 2]])
    """
    names = rows or [""] * count
    return [list(run) for _, run in groupby(range(count), key=names.__getitem__)]


def by_order(rows: Sequence[str], count: int) -> tuple[float, ...]:
    """Return depths from 0 to 1, evenly along each row.

    >>> by_order(("a", "a", "a", "b"), 4)
    (0.0, 0.5, 1.0, 0.0)
    """
    depths = []
    for run in runs(rows, count):
        last = max(1, len(run) - 1)
        depths += [place / last for place in range(len(run))]
    return tuple(depths)


def shown_first(
    depths: Sequence[float], rows: Sequence[str] = (), named: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Return for each row the panels at five depths, and -1 where it has none there.

    The depths are spread evenly, but those of the panels in `named` are among them. A
    single row of few panels is shown whole.

    >>> shown_first([k / 30 for k in range(31)], named=[20])
    ((0, 8, 15, 20, 30),)
    """
    rows_of_panels = runs(rows, len(depths))
    longest = max(rows_of_panels, key=len)
    if len(longest) > FIRST + 1:
        # Spread depths evenly, then move the nearest inner one to each named depth.
        wanted = [place / (FIRST - 1) for place in range(FIRST)]
        # The first and the last depth stay: they show where a model begins and ends.
        free = set(range(1, FIRST - 1))
        for depth in dict.fromkeys([depths[panel] for panel in named]):
            if free and 0 < depth < 1:
                nearest = min(free, key=lambda place: abs(wanted[place] - depth))
                free.discard(nearest)
                wanted[nearest] = depth
        wanted = sorted(wanted)
    elif len(rows_of_panels) > 1:
        wanted = [depths[panel] for panel in longest]
    else:
        return ()
    return tuple(_nearest(panels, depths, wanted) for panels in rows_of_panels)


def _nearest(
    panels: Sequence[int], depths: Sequence[float], wanted: Sequence[float]
) -> tuple[int, ...]:
    """Return the nearest panel for each depth, every panel at most once; of two that
    are equally deep, the later.

    >>> _nearest([0, 1, 2], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0])
    (0, 1, 2)
    >>> _nearest([0, 1], [0.0, 1.0], [0.0, 1.0, 1.0])
    (0, -1, 1)
    """
    selected = [-1] * len(wanted)

    def distance(place: int, panel: int) -> float:
        return abs(wanted[place] - depths[panel])

    # From the last panel on, so that of two that are equally deep the later one wins.
    for panel in reversed(panels):

        def preference(place: int, panel: int = panel) -> tuple[float, bool, int]:
            return distance(place, panel), selected[place] >= 0, -place

        place = min(range(len(wanted)), key=preference)
        holder = selected[place]
        if holder < 0 or distance(place, panel) < distance(place, holder):
            selected[place] = panel
    return tuple(selected)


def steps_of(weights: PackedFloats) -> int:
    """Return into how many steps the square root of a weight is divided."""
    if weights.size <= MOST_FINE_WEIGHTS:
        return FINE_STEPS
    if weights.size <= MOST_BYTE_WEIGHTS:
        return BYTE_STEPS
    return COARSE_STEPS
