"""What is packed comes back, to the bit."""

import base64
import gzip
import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from hiddenscope.errors import StatesError
from hiddenscope.results import Listing
from hiddenscope.results.pictures import (
    Graph,
    Grid,
    Lines,
    Measure,
    Panels,
    Series,
    View,
    Words,
)
from hiddenscope.views import pack, unpack
from hiddenscope.views.payload import rounded
from tests.pages.scenes import (
    comparison,
    graph,
    hostile,
    influence,
    lines,
    norms,
    panels,
    visibility,
    words,
)

TEXT = st.text(st.characters(), max_size=8)
FLOATS = st.floats(width=32)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return type(one) is type(other) and all(
            same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)
        )
    return bool(one == other)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    rows, columns = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dtype = draw(st.sampled_from([np.float16, np.float32]))
    values = draw(hn.arrays(dtype, (rows, columns), elements=st.floats(width=16)))
    chosen = draw(hn.arrays(np.int32, (rows, columns, 2), elements=st.integers(-1, 2)))
    said = Words(("a", "b", "c"), chosen) if draw(st.booleans()) else None
    meaning = draw(st.sampled_from(["sequential", "diverging"]))
    measure = Measure(draw(TEXT), values, draw(TEXT), meaning)
    row = st.lists(st.none() | TEXT, min_size=columns, max_size=columns).map(tuple)
    sites = tuple(f"layer.{k}" for k in range(rows))
    second = draw(st.just(()) | row)
    return Grid(draw(TEXT), sites, draw(row), (measure,), said, second)


@st.composite
def scatters(draw: st.DrawFn) -> Panels:
    count, many = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    points = draw(hn.arrays(np.float32, (count, many, 2), elements=FLOATS))
    labels = draw(st.just([]) | st.lists(TEXT, min_size=many, max_size=many))
    sites = tuple(f"layer.{k}" for k in range(count))
    return Panels(draw(TEXT), sites, points, tuple(labels))


@st.composite
def charts(draw: st.DrawFn) -> Lines:
    count = draw(st.integers(1, 5))
    numbers = hn.arrays(np.float32, count, elements=FLOATS)
    banded = draw(numbers), draw(numbers), draw(numbers)
    style = draw(st.sampled_from(["line", "bar"]))
    one = Series(draw(TEXT), *banded, draw(TEXT), style)
    plain = Series("plain", draw(numbers), style="dash")
    return Lines(draw(TEXT), tuple(map(str, range(count))), (one, plain))


@settings(max_examples=25)
@given(st.lists(st.one_of(grids(), scatters(), charts()), max_size=3))
def test_views_come_back_as_they_were(views: list[View]) -> None:
    assert all(map(same, views, unpack(pack(views))))


def test_scenes_come_back_as_they_were() -> None:
    views = [norms(), words(), comparison(), panels(), lines(), graph(), *hostile()]
    assert all(map(same, views, unpack(pack(views))))
    assert pack(views[:2]) == pack(views[:2]), "the same views make the same payload"


def test_an_influence_keeps_four_digits_and_every_zero() -> None:
    map_ = influence(6, 5) * np.float32(1e-30)
    back = unpack(pack([visibility(6, ("a", "b", "c", "d", "e"))]))[0].measures[0]
    whole = visibility(6, ("a", "b", "c", "d", "e")).measures[0]
    assert np.allclose(back.influence, whole.influence, rtol=2**-14, atol=0)
    assert ((back.influence == 0) == (whole.influence == 0)).all()
    assert same(back.values, whole.values)
    assert np.allclose(rounded(map_), map_, rtol=2**-14, atol=0)
    odd = np.array(
        [np.nan, np.inf, -np.inf, np.finfo(np.float32).max, -0.0], dtype=np.float32
    )
    assert np.array_equal(rounded(odd)[:3], odd[:3], equal_nan=True)
    assert np.isfinite(rounded(odd)[3])


def test_the_header_is_what_the_docs_say() -> None:
    raw = gzip.decompress(base64.b64decode(pack([norms(2, ("a", "b"))])))
    length = int.from_bytes(raw[4:8], "little")
    header = json.loads(raw[8 : 8 + length])
    assert raw[:4] == b"HSV1"
    assert header["views"][0]["kind"] == "Grid"
    assert header["arrays"] == [
        {"dtype": "float32", "shape": [4, 2], "offset": 0, "length": 32}
    ]
    assert len(raw) == 8 + length + 32


def test_many_labels_come_back() -> None:
    labels = tuple(f"class {k}" for k in range(300)) * 2
    view = Panels("many", ("layer.0",), np.zeros((1, 600, 2)), labels)
    assert unpack(pack([view]))[0].labels == labels


def test_a_damaged_payload_is_an_error() -> None:
    other = base64.b64encode(gzip.compress(b"HSV0", mtime=0)).decode()
    for damage in ("", "????", "AAAA", pack([lines()])[:-40], other):
        with pytest.raises(StatesError, match="damaged"):
            unpack(damage)


SITES = ("layer.0",)
ONE = (Measure("m", [[1.0]]),)
MAP = (Measure("m", [[1.0]], influence=np.zeros((1, 1, 1, 2))),)
POINTS = np.zeros((1, 3, 2))
WRONG: dict[str, list[Any]] = {
    "no values": [lambda: Measure("m")],
    r"\[any, any\]": [lambda: Measure("m", [1.0]), lambda: Measure("m", [["a"]])],
    "sequential, diverging": [lambda: Measure("m", [[1.0]], meaning="odd")],
    r"\[1, 2\]": [lambda: Grid("g", SITES, ("a", "b"), ONE)],
    "empty": [
        lambda: Grid("g", SITES, ("a",), ()),
        lambda: Graph("g", (), (), [], [], []),
    ],
    "there are 2": [
        lambda: Grid("g", SITES, ("a",), ONE, second=("a", "b")),
        lambda: Panels("p", SITES, POINTS, marks=("a", "b")),
    ],
    "not there": [
        lambda: Grid("g", SITES, ("a",), ONE, text_of=(1,)),
        lambda: Panels("p", SITES, POINTS, first=((1,),)),
    ],
    r"\[1, 1, 1, 1\]": [lambda: Grid("g", SITES, ("a",), MAP)],
    "Give integers": [lambda: Words(("a",), np.array([[[1]]]))],
    r"\[1, any, 2\]": [lambda: Panels("p", SITES, np.zeros((2, 3, 2)))],
    "3": [lambda: Panels("p", SITES, POINTS, labels=("a",))],
    "one side": [lambda: Series("s", [1.0], low=[1.0])],
    r"\[1\]": [lambda: Lines("l", SITES, (Series("s", [1.0, 2.0]),))],
    "none": [lambda: Lines("l", SITES, ())],
    "has no value": [lambda: Graph("g", ("a", "b"), (0, 1), [0], [1], [1.0, 2.0])],
    "goes down": [
        lambda: Graph("g", ("a", "b"), (0, 1), [1], [0], [1.0]),
        lambda: Graph("g", ("a", "b"), (1, 0), [], [], []),
        lambda: Graph.of("g", [("layer.2.mlp", "layer.2.attn", "", 1.0)]),
    ],
    "no node": [lambda: Graph("g", ("a", "b"), (0, 1), [0], [2], [1.0])],
    "not finite": [lambda: Graph("g", ("a", "b"), (0, 1), [0], [1], [np.inf])],
    "a cell for each column": [lambda: Listing("t", ("a", "b"), (("c",),))],
}


def test_what_cannot_be_drawn_is_an_error() -> None:
    for says, makers in WRONG.items():
        for make in makers:
            with pytest.raises(StatesError, match=says):
                make()
