"""Results: what an analysis returns, and the files it can be kept in."""

import csv
import io
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xarray
from hypothesis import given, settings
from hypothesis import strategies as st

import hiddenscope as hs
from hiddenscope.errors import FileError, StatesError
from hiddenscope.files import UNSEALED, seal
from hiddenscope.results import FINDINGS, RENDERERS, Result, in_words
from hiddenscope.sites import Site
from hiddenscope.states import Source
from hiddenscope.testing import tiny_model, tiny_tokenizer

HOSTILE = [
    "",
    "\0",
    "a\0b",
    "\ud800",
    "\ud83d\ude00",
    "\U0001f600",
    "\\",
    "\\0",
    "\\N",
    "\\ud800",
    "=1+1",
    "-2",
    "+3",
]
HOSTILE += [
    "@x",
    "\tx",
    "\rx",
    "a,b",
    'a"b',
    "a\nb",
    "</script>",
    "\u2028",
    "\u202e",
    " ",
    "x" * 100_000,
]
# Where pyarrow is installed, pandas and so xarray take no half of a surrogate pair in
# an array; JSON still does.
CELLS = [
    text for text in HOSTILE if not any("\ud800" <= char <= "\udfff" for char in text)
]


def hostile_result() -> Result:
    n = len(CELLS)
    data = xarray.Dataset(
        {
            "norm": (
                ("site", "token"),
                np.linspace(-1, 1, 2 * n, dtype="f4").reshape(2, n),
                {"units": "", "k": [1]},
            ),
            "word": (("site", "token"), np.array([CELLS, CELLS[::-1]], dtype=object)),
            "rank": ("site", np.array([2**63 - 1, -(2**63)])),
            "odd": ("site", np.array([math.nan, -math.inf])),
            "half": ("site", np.array([0.1, -0.0], dtype=np.float16)),
            "big": ("site", np.array([2**64 - 1, 0], dtype=np.uint64)),
            "kept": ("token", np.arange(n) % 2 == 0),
            "total": ((), 3.25),
            "none": (("nothing", "site"), np.zeros((0, 2), dtype=np.int8)),
        },
        {
            "site": ["layer.0", "final"],
            "string": ("token", np.array(CELLS, dtype=object)),
            "model": "toy",
        },
        {"title": "\ud800", "limits": [1, math.inf]},
    )
    facts = {
        "first": Site(3),
        "odd": [math.nan, -math.inf, -0.0],
        "words": HOSTILE,
        "$float": 1,
        "\ud800": None,
    }
    facts |= {
        "nested": {
            "deep": (np.float32(0.5), np.int64(3), np.bool_(True), np.arange(3))
        },
        "big": 10**30,
    }
    return Result("sizes", data, facts, Source("toy", versions={"torch": "2.13"}))


@pytest.mark.parametrize("suffix", [".json", ".nc", ".NC"])
def test_what_is_saved_comes_back(tmp_path: Path, suffix: str) -> None:
    result = hostile_result()
    path = tmp_path / f"x{suffix}"
    result.save(path)
    back = Result.load(path)
    assert back.equals(result)
    assert result.equals(back)
    assert back.facts["words"] == HOSTILE
    assert back.facts["$float"] == 1
    assert back.data["word"].to_numpy().tolist() == [CELLS, CELLS[::-1]]
    assert back.data["half"].dtype == np.float16
    assert np.signbit(back.data["half"].to_numpy()[1])
    assert back.data["kept"].dtype == bool
    assert back.data.sel(site="final")["total"] == 3.25
    assert set(back.data.coords) == {"site", "string", "model"}
    assert Source.from_json(back.source) == Source("toy", versions={"torch": "2.13"})
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    back.save(path)
    assert Result.load(path).equals(result)


def arrays(kind: str, elements: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(elements, max_size=5).map(
        lambda values: np.array(values, dtype=kind)
    )


FLOATS = (
    arrays("f2", st.floats(width=16))
    | arrays("f4", st.floats(width=32))
    | arrays("f8", st.floats())
)
INTS = (
    arrays("i1", st.integers(-128, 127))
    | arrays("u8", st.integers(0, 2**64 - 1))
    | arrays("?", st.booleans())
)
WORDS = st.lists(st.text(st.characters()), max_size=5).map(
    lambda xs: np.array([*xs, None], dtype=object)[:-1]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters()), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=60)
@given(
    st.one_of(FLOATS, INTS, WORDS),
    st.dictionaries(st.text(st.characters()), JSON, max_size=3),
)
def test_anything_comes_back(
    tmp_path_factory: pytest.TempPathFactory, array: Any, facts: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("results")
    result = Result("any", xarray.Dataset({"x": ("token", array)}), facts, {})
    for suffix in ("json", "nc"):
        result.save(folder / f"x.{suffix}")
        back = Result.load(folder / f"x.{suffix}")
        assert back.equals(result)
        if array.dtype.kind == "f":
            signs = np.signbit(back.data["x"].to_numpy()) == np.signbit(array)
            assert (signs | np.isnan(array)).all()
    result.save(folder / "x.csv")


def test_json_is_strict_and_readable(tmp_path: Path) -> None:
    hostile_result().save(tmp_path / "x.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    said = json.loads((tmp_path / "x.json").read_text("ascii"), parse_constant=refuse)
    assert said["kind"] == "sizes"
    assert said["variables"]["half"]["values"] == [0.1, -0.0]
    assert said["variables"]["odd"]["values"] == ["NaN", "-Infinity"]


def test_netcdf_opens_in_plain_xarray(tmp_path: Path) -> None:
    data = xarray.Dataset(
        {"norm": ("site", [1.0, math.nan], {"units": "m"})},
        {"site": ["layer.0", "final"]},
    )
    Result("profile", data, {}, {}).save(tmp_path / "x.nc")
    with xarray.open_dataset(tmp_path / "x.nc", engine="h5netcdf") as plain:
        assert plain.sel(site="layer.0")["norm"] == 1.0
        assert plain["norm"].attrs["units"] == "m"


def test_any_attributes_fit_in_netcdf(tmp_path: Path) -> None:
    attrs = {
        "_FillValue": 1,
        "dtype": "bool",
        "coordinates": "x",
        "flag": True,
        "big": 10**30,
        "units": "\0" * 100_000,
    }
    attrs |= {
        "DIMENSION_LIST": [],
        "none": None,
        "odd": math.nan,
        "long_name": [1, "\ud800"],
    }
    result = Result("any", xarray.Dataset({"x": ("site", [1.0], attrs)}), {}, {})
    for suffix in ("nc", "json"):
        result.save(tmp_path / f"x.{suffix}")
        assert Result.load(tmp_path / f"x.{suffix}").equals(result)


def test_large_facts_fit_in_netcdf(tmp_path: Path) -> None:
    result = Result(
        "any",
        xarray.Dataset(attrs={"long": "x" * 200_000}),
        {"long": "y" * 200_000},
        {},
    )
    result.save(tmp_path / "x.nc")
    assert Result.load(tmp_path / "x.nc").equals(result)


def test_csv_is_long_and_quotes_text_only(tmp_path: Path) -> None:
    data = xarray.Dataset(
        {
            "x": (("site", "token"), [[-1.5, 2.0], [3.0, math.nan]]),
            "word": ("token", ["=1", "-ok"]),
            "total": -7,
        },
        {"site": ["layer.0", "layer.1"], "string": ("token", ["@a", "b"])},
    )
    Result("any", data, {}, {}).save(tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == [
        ["site", "token", "string", "variable", "value"],
        ["layer.0", "0", "'@a", "x", "-1.5"],
        ["layer.0", "1", "b", "x", "2.0"],
        ["layer.1", "0", "'@a", "x", "3.0"],
        ["layer.1", "1", "b", "x", "nan"],
        ["", "0", "'@a", "word", "'=1"],
        ["", "1", "b", "word", "'-ok"],
        ["", "", "", "total", "-7"],
    ]


def test_hostile_text_in_csv(tmp_path: Path) -> None:
    hostile_result().save(tmp_path / "x.csv")
    with (tmp_path / "x.csv").open(newline="", encoding="utf-8") as file:
        csv.field_size_limit(1_000_000)
        rows = list(csv.DictReader(file))
    assert {len(row) for row in rows} == {6}
    texts = [row["value"] for row in rows if row["variable"] == "word"]
    assert len(texts) == 2 * len(CELLS)
    assert not any(
        text.startswith(("=", "+", "-", "@", "\t", "\r")) or "\0" in text
        for text in texts
    )


def test_a_suffix_that_nobody_writes(tmp_path: Path) -> None:
    result = hostile_result()
    for name in ("x.xlsx", "x", ".json", "x.pickle"):
        with pytest.raises(FileError, match=r"the formats are .*\.csv .*\.json .*\.nc"):
            result.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_renderer_is_found_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def draw(result: Result, path: Path) -> None:
        assert path.suffix == ".html"
        path.write_text(f"<p>{result.kind}</p>")

    monkeypatch.setitem(RENDERERS, ".html", draw)
    hostile_result().save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == "<p>sizes</p>"

    def fail(result: Result, path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setitem(RENDERERS, ".html", fail)
    with pytest.raises(KeyboardInterrupt):
        hostile_result().save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == "<p>sizes</p>"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("suffix", [".json", ".nc"])
def test_files_that_are_not_ours(tmp_path: Path, suffix: str) -> None:
    result = hostile_result()
    result.save(tmp_path / f"x{suffix}")
    whole = (tmp_path / f"x{suffix}").read_bytes()
    damaged = [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"[" * 100_000,
        b"\xff",
        whole[:-1],
        whole[: len(whole) // 2],
    ]
    for i, content in enumerate(damaged):
        bad = tmp_path / f"bad{i}{suffix}"
        bad.write_bytes(content)
        if content != whole[:-1] or suffix == ".json":
            with pytest.raises(FileError):
                Result.load(bad)
    for absent in (tmp_path / f"none{suffix}", tmp_path, tmp_path / "x.csv"):
        with pytest.raises(FileError):
            Result.load(absent)
    with pytest.raises(FileError, match="Cannot write"):
        result.save(tmp_path / "nowhere" / f"x{suffix}")


def test_a_foreign_netcdf_file(tmp_path: Path) -> None:
    xarray.Dataset({"x": ("site", [1.0])}).to_netcdf(
        tmp_path / "x.nc", engine="h5netcdf"
    )
    with pytest.raises(FileError):
        Result.load(tmp_path / "x.nc")


def plant_external(file: h5py.File, folder: Path) -> None:
    """The values lie in another file of the user."""
    (folder / "secret").write_bytes(b"a secret" * 2)
    file.create_dataset("x", (2,), "f8", external=[(str(folder / "secret"), 0, 16)])


def plant_pipe(file: h5py.File, folder: Path) -> None:
    """The values come from a pipe, which nobody writes to."""
    os.mkfifo(folder / "pipe")
    file.create_dataset("x", (2,), "f8", external=[(str(folder / "pipe"), 0, 16)])


def plant_virtual(file: h5py.File, folder: Path) -> None:
    """The values are those of a variable of another file."""
    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = [1.0, 2.0]
    layout = h5py.VirtualLayout((2,), "f8")
    layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "x", (2,))
    file.create_virtual_dataset("x", layout)


def plant_external_link(file: h5py.File, folder: Path) -> None:
    """The variable is one of another file."""
    with h5py.File(folder / "other.h5", "w") as other:
        other["x"] = [1.0, 2.0]
    file["x"] = h5py.ExternalLink(str(folder / "other.h5"), "/x")


def plant_soft_link(file: h5py.File, folder: Path) -> None:
    """The variable is the place of another."""
    file["y"] = [1.0, 2.0]
    file["x"] = h5py.SoftLink("/y")


def plant_group(file: h5py.File, folder: Path) -> None:
    """The variable is a group."""
    file.create_group("x")["x"] = [1.0, 2.0]


def plant_compressed(file: h5py.File, folder: Path) -> None:
    """A megabyte becomes a gigabyte."""
    zeros = file.create_dataset(
        "x", (2**27,), "f8", chunks=(2**20,), compression="gzip"
    )
    zeros[:4] = 1.0


def plant_chunks(file: h5py.File, folder: Path) -> None:
    """One chunk is there, and the others are filled in when they are read."""
    file.create_dataset("x", (2**27,), "f8", chunks=(2**10,))[:4] = 1.0


def plant_fill(file: h5py.File, folder: Path) -> None:
    """A terabyte of the same number, none of which is in the file."""
    file.create_dataset("x", (2**37,), "f8", fillvalue=1.0)


def plant_reference(file: h5py.File, folder: Path) -> None:
    """The values are references."""
    file.create_dataset("x", (2,), h5py.ref_dtype)[:] = [file.ref, file.ref]


def plant_compound(file: h5py.File, folder: Path) -> None:
    """The values have parts."""
    file["x"] = np.zeros(2, [("a", "f8"), ("b", "f8")])


def plant_fixed(file: h5py.File, folder: Path) -> None:
    """The values are strings of a fixed length."""
    file["x"] = np.array([b"a", b"b"])


def plant_opaque(file: h5py.File, folder: Path) -> None:
    """The values are of no kind."""
    file["x"] = np.array([b"a", b"b"], "V2")


PLANTED = [
    plant_external,
    plant_pipe,
    plant_virtual,
    plant_external_link,
    plant_soft_link,
    plant_group,
    plant_compressed,
    plant_chunks,
    plant_fill,
    plant_reference,
    plant_compound,
    plant_fixed,
    plant_opaque,
]


def sealed_with(folder: Path, change: Callable[[h5py.File], None]) -> Path:
    """A file of ours in which something was exchanged, sealed as if it had been written
    so.
    """
    path = folder / "x.nc"
    Result(
        "any",
        xarray.Dataset({"x": ("site", [1.0, 2.0]), "word": ("site", ["a", "b"])}),
        {},
        {},
    ).save(path)
    content = io.BytesIO(path.read_bytes())
    with h5py.File(content, "r+") as file:
        change(file)
    path.write_bytes(content.getvalue() + UNSEALED.encode())
    seal(path)
    return path


def test_what_is_exchanged_for_itself_is_read(tmp_path: Path) -> None:
    """The files of the next test are refused for what is planted in them, and for
    nothing else.
    """

    def exchange(file: h5py.File) -> None:
        del file["x"]
        file["x"] = [3.0, 4.0]

    assert Result.load(sealed_with(tmp_path, exchange)).data["x"].values.tolist() == [
        3.0,
        4.0,
    ]


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: str(plant.__name__))
def test_only_what_lies_in_a_netcdf_file_is_read(
    tmp_path: Path, plant: Callable[[h5py.File, Path], None]
) -> None:
    def exchange(file: h5py.File) -> None:
        del file["x"]
        plant(file, tmp_path)

    path = sealed_with(tmp_path, exchange)
    with pytest.raises(
        FileError, match=r"Cannot read a result from .*('x'|no variable)"
    ):
        Result.load(path)


def test_one_long_string_that_is_named_often_is_refused(tmp_path: Path) -> None:
    count, long = 1000, "y" * 10_000
    path = tmp_path / "x.nc"
    Result(
        "any", xarray.Dataset({"word": ("site", [long, *"z" * (count - 1)])}), {}, {}
    ).save(path)
    with h5py.File(path) as file:
        offset = file["word"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[offset : offset + 16 * count] = content[offset : offset + 16] * count
    place = content.rindex(b"hiddenscope-sha256:")
    path.write_bytes(bytes(content[:place]) + UNSEALED.encode())
    seal(path)
    with h5py.File(path) as file:
        # HDF5 has nothing against it.
        assert file["word"].asstr()[()].tolist() == [long] * count
    with pytest.raises(FileError, match="longer than the file"):
        Result.load(path)


@pytest.mark.parametrize("suffix", [".json", ".nc"])
@pytest.mark.parametrize(
    "dtype",
    ["S1000000000", "U1000000000", "O", "V10", "M8[s]", "complex128", "float128"],
)
def test_a_dtype_that_no_result_has_is_refused(
    tmp_path: Path, suffix: str, dtype: str
) -> None:
    path = tmp_path / f"x{suffix}"
    Result("any", xarray.Dataset({"x": ("site", [1.0, 2.0])}), {}, {}).save(path)
    if suffix == ".json":
        header = json.loads(path.read_text())
        header["variables"]["x"]["dtype"] = dtype
        path.write_text(json.dumps({**header, "seal": UNSEALED}))
    else:
        content = io.BytesIO(path.read_bytes())
        with h5py.File(content, "r+") as file:
            header = json.loads(file["hiddenscope_notes"].asstr()[()])
            header["variables"]["x"]["dtype"] = dtype
            file["hiddenscope_notes"][()] = json.dumps(header)
        path.write_bytes(content.getvalue() + UNSEALED.encode())
    seal(path)
    with pytest.raises(FileError, match="its dtype is"):
        Result.load(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"a": object()},
        {1: 2},
        {"a": 1j},
        {"a": b"x"},
        {"a": {1, 2}},
        {"a": np.array(1j)},
    ],
)
def test_facts_are_json(wrong: dict[Any, Any]) -> None:
    with pytest.raises(StatesError):
        Result("any", xarray.Dataset(), wrong, {})


def test_data_is_numbers_flags_and_text() -> None:
    dates = np.array(["2020-01-01"], dtype="datetime64[ns]")
    for wrong in (
        np.array([1j]),
        dates,
        np.array([{}], dtype=object),
        np.array(["a", None]),
    ):
        with pytest.raises(StatesError):
            Result("any", xarray.Dataset({"x": ("site", wrong)}), {}, {})
    stacked = xarray.Dataset({"x": (("a", "b"), [[1.0]])}, {"a": [1], "b": [2]}).stack(
        c=("a", "b")
    )
    with pytest.raises(StatesError):
        Result("any", stacked, {}, {})


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (xarray.Dataset({"x": ("site", [1.0], {"k": object()})}), "x.attrs.k holds"),
        (xarray.Dataset({"x": ("site", [1.0])}, attrs={"k": 1j}), "attrs.k holds"),
        (xarray.Dataset({"x": ("site", [1.0])}, attrs={1: "k"}), "attrs holds"),
        (xarray.Dataset({1: ("site", [1.0])}), "1 is not a string"),
        (xarray.Dataset({"x": (("a", 2), [[1.0]])}), "2 is not a string"),
        (xarray.Dataset({"hiddenscope_notes": ("site", [1.0])}), "reserved"),
        (xarray.Dataset({"x": ("hiddenscope_notes", [1.0])}), "reserved"),
    ],
)
def test_data_that_cannot_be_saved_is_refused(
    data: xarray.Dataset, reason: str
) -> None:
    with pytest.raises(StatesError, match=reason):
        Result("any", data, {}, {})


def test_equality_sees_everything() -> None:
    data = xarray.Dataset(
        {"x": ("site", np.array([1.0, math.nan]))}, {"site": ["a", "b"]}
    )
    result = Result("any", data, {"n": 1, "odd": math.nan}, {"model": "toy"})
    assert result.equals(
        Result("any", data.copy(deep=True), {"odd": math.nan, "n": 1}, {"model": "toy"})
    )
    others = [
        Result("other", data, result.facts, result.source),
        Result("any", data, {"n": 2, "odd": math.nan}, result.source),
        Result("any", data, result.facts, {"model": "other"}),
        Result("any", data + 1, result.facts, result.source),
        Result("any", data.astype(np.float32), result.facts, result.source),
        Result("any", data.assign_coords(site=["a", "c"]), result.facts, result.source),
        Result("any", data.assign_attrs(k=1), result.facts, result.source),
    ]
    assert not any(result.equals(other) for other in others)


def test_the_summary_is_readable_and_safe() -> None:
    facts = {
        "first difference": "' France'",
        "at": 3,
        "share": 1 / 3,
        "by layer": [1, 2.5],
        "more": {"a": "\x1b[31m"},
    }
    result = Result(
        "sizes", xarray.Dataset({"x": ("site", [1.0])}), facts, Source("toy")
    )
    assert result.summary() == str(result)
    assert result.summary().splitlines() == [
        "sizes of toy",
        "  first difference  ' France'",
        "  at                3",
        "  share             0.333333",
        "  by layer          1, 2.5",
        "  more",
        r"    a  \x1b[31m",
    ]
    assert repr(result) == "Result(sizes of toy: x[site 1], 5 facts)"
    lines = hostile_result().summary().split("\n")
    assert all(line.isprintable() and len(line) < 1_000 for line in lines)


def test_escapes_do_not_make_a_fact_long() -> None:
    assert in_words("\x1b" * 100 + "x" * 100).isprintable()
    assert len(in_words("\U000e0001" * 150)) == len(in_words("x" * 300)) == 200


def test_the_summary_is_the_findings_where_the_kind_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(
        FINDINGS,
        "sizes",
        lambda result: (f"There are {result.facts['n']}.", "A \x1b[31m token."),
    )
    result = Result("sizes", xarray.Dataset(), {"n": 3}, Source("toy"))
    assert result.summary() == "sizes of toy\n  There are 3.\n  A \\x1b[31m token."
    assert result._repr_mimebundle_(include=["text/plain"]) == {
        "text/plain": result.summary()
    }


def test_importing_results_loads_no_xarray() -> None:
    code = (
        "import sys, hiddenscope.results; sys.exit(bool({'torch', 'numpy', 'xarray'} &"
        " set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    "text",
    ["=1+1", "\n=1+1", " =1", "＝1+1", "＋1", "a;=1", "a; @x", "\t=1", "-1", "@x"],
)
def test_no_text_in_a_csv_is_taken_for_a_formula(tmp_path: Path, text: str) -> None:
    data = xarray.Dataset(
        {
            "string": ("token", np.array([text, "plain"], dtype=object)),
            "norm": ("token", [1.0, -2.0]),
        }
    )
    Result("toy", data, {}, {}).save(tmp_path / "result.csv")
    with (tmp_path / "result.csv").open(newline="", encoding="utf-8") as file:
        cells = {cell for row in csv.reader(file) for cell in row}
    assert f"'{text}" in cells and text not in cells and "plain" in cells
    assert "-2.0" in cells, "numbers stay numbers"


def test_a_result_is_read_by_tokens_and_sites() -> None:
    result = hs.profile(
        (tiny_model("llama"), tiny_tokenizer()),
        ["The cat sat.", "The end."],
        sites="layer.1,final",
    )
    strings = result.data["string"].values.tolist()
    norm = result["norm"]
    assert norm["token"].values.tolist() == strings and norm[
        "site"
    ].values.tolist() == ["layer.1", "final"]
    assert (norm.values == result.data["norm"].values).all()
    table = result.to_pandas("norm")
    assert (table.index.tolist(), table.columns.tolist()) == (
        ["layer.1", "final"],
        strings,
    )
    assert (
        table.loc["final"].values == result.data["norm"].sel(site="final").values
    ).all()
    rows = result.to_pandas()
    assert rows.index.names == ["site", "token"] and len(rows) == norm.size
    assert set(rows.columns) == {
        str(name) for name, one in result.data.items() if one.dims == norm.dims
    }
    assert rows["norm"].values.tolist() == norm.values.ravel().tolist()
    assert (
        "norm" in result
        and "norms" not in result
        and list(result) == [str(name) for name in result.data]
    )
    with pytest.raises(StatesError, match="Did you mean 'norm'"):
        result["norms"]


def test_a_map_is_read_by_tokens_at_both_ends() -> None:
    result = hs.visibility(
        (tiny_model("gpt2"), tiny_tokenizer()), "The cat", sites="layer.1,final"
    )
    seen = result["l1"]
    strings = result.data["string"].values.tolist()
    assert (
        seen["token"].values.tolist() == seen["source_token"].values.tolist() == strings
    )
    table = result.to_pandas()
    assert (
        table.index.names == list(result.data["l1"].dims)
        and (table["l1"].values == seen.values.ravel()).all()
    )


def test_results_of_one_dimension_and_of_none() -> None:
    along = xarray.Dataset(
        {"error": ("site", [1.0, 2.0]), "whole": ((), 3.0)},
        {"site": ["layer.0", "final"]},
    )
    result = hs.Result("toy", along, {}, {})
    assert result.to_pandas().to_dict() == {"error": {"layer.0": 1.0, "final": 2.0}}
    assert result.to_pandas("whole").to_numpy().tolist() == [[3.0]]
    with pytest.raises(StatesError, match="no variables"):
        hs.Result("toy", xarray.Dataset(), {}, {}).to_pandas()
