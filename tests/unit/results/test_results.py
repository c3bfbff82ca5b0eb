"""Results: what an analysis returns, and the files it can be kept in."""

import csv
import io
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import h5py
import numpy as np
import pytest
import xarray

import hiddenscope as hs
from hiddenscope.errors import Error, FileError, StatesError
from hiddenscope.files import UNSEALED, seal
from hiddenscope.results import Result
from hiddenscope.results.dataset import Variables, to_dataset, token_coords
from hiddenscope.results.sentences import in_words
from hiddenscope.sites import Site
from hiddenscope.states import Source, Tokens
from hiddenscope.views import render
from tests.unit.views.recorded import KINDS
from tests.unit.views.recorded import RESULTS as RECORDED

HOSTILE = ["", "\0", "a\0b", "\ud800", "\ud83d\ude00", "\U0001f600", "\\", "\\0"]
HOSTILE += ["\\N", "\\ud800", "=1+1", "-2", "+3", "@x", "\tx", "\rx", "a,b", 'a"b']
HOSTILE += ["a\nb", "</script>", "\u2028", "\u202e", " ", "x" * 100_000]
# Where pyarrow is installed, pandas and so xarray take no half of a surrogate pair in
# an array; JSON still does.
CELLS = [
    text for text in HOSTILE if not any("\ud800" <= char <= "\udfff" for char in text)
]
SOURCE = Source("toy", versions={"torch": "2.13"})


def result_with(values: Any, **attributes: Any) -> Result:
    """A result of one variable along the sites."""
    return Result("any", xarray.Dataset({"x": ("site", values, attributes)}), {}, {})


def hostile_result() -> Result:
    n = len(CELLS)
    norms = np.linspace(-1, 1, 2 * n, dtype="f4").reshape(2, n)
    words = np.array([CELLS, CELLS[::-1]], dtype=object)
    variables = {
        "norm": (("site", "token"), norms, {"units": "", "k": [1]}),
        "word": (("site", "token"), words),
        "rank": ("site", np.array([2**63 - 1, -(2**63)])),
        "odd": ("site", np.array([math.nan, -math.inf])),
        "half": ("site", np.array([0.1, -0.0], dtype=np.float16)),
        "zero": ("site", np.array([0.0, -0.0])),
        "big": ("site", np.array([2**64 - 1, 0], dtype=np.uint64)),
        "kept": ("token", np.arange(n) % 2 == 0),
        "total": ((), 3.25),
        "none": (("nothing", "site"), np.zeros((0, 2), dtype=np.int8)),
    }
    strings = ("token", np.array(CELLS, dtype=object))
    coords = {"site": ["layer.0", "final"], "string": strings, "model": "toy"}
    attrs = {"title": "\ud800", "limits": [1, math.inf]}
    deep = (np.float32(0.5), np.int64(3), np.bool_(True), np.arange(3))
    facts = {
        "first": Site(3),
        "odd": [math.nan, -math.inf, -0.0],
        "words": HOSTILE,
        "$float": 1,
        "\ud800": None,
        "nested": {"deep": deep},
        "big": 10**30,
    }
    return Result("sizes", xarray.Dataset(variables, coords, attrs), facts, SOURCE)


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
    for name in ("half", "zero"):
        assert np.signbit(back.data[name].to_numpy()).tolist() == [False, True]
    assert back.data["kept"].dtype == bool
    assert back.data.sel(site="final")["total"] == 3.25
    assert set(back.data.coords) == {"site", "string", "model"}
    assert Source.from_json(back.source) == SOURCE
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    back.save(path)
    assert Result.load(path).equals(result)


def test_json_is_strict_and_netcdf_opens_in_plain_xarray(tmp_path: Path) -> None:
    hostile_result().save(tmp_path / "x.json")

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    said = json.loads((tmp_path / "x.json").read_text("ascii"), parse_constant=refuse)
    assert said["kind"] == "sizes"
    assert said["variables"]["half"]["values"] == [0.1, -0.0]
    assert said["variables"]["odd"]["values"] == ["NaN", "-Infinity"]
    result_with([1.0, math.nan], units="m").save(tmp_path / "x.nc")
    with xarray.open_dataset(tmp_path / "x.nc", engine="h5netcdf") as plain:
        assert plain["x"][0] == 1.0
        assert plain["x"].attrs["units"] == "m"


def test_any_attributes_and_large_facts_fit(tmp_path: Path) -> None:
    attrs = {"_FillValue": 1, "dtype": "bool", "coordinates": "x", "flag": True}
    attrs |= {"big": 10**30, "units": "\0" * 100_000, "DIMENSION_LIST": []}
    attrs |= {"none": None, "odd": math.nan, "long_name": [1, "\ud800"]}
    large = xarray.Dataset(attrs={"long": "x" * 200_000})
    for result in (
        result_with([1.0], **attrs),
        Result("any", large, {"long": "y" * 200_000}, {}),
    ):
        for suffix in ("nc", "json"):
            result.save(tmp_path / f"x.{suffix}")
            assert Result.load(tmp_path / f"x.{suffix}").equals(result)


def csv_of(result: Result, folder: Path) -> list[list[str]]:
    result.save(folder / "x.csv")
    with (folder / "x.csv").open(newline="", encoding="utf-8") as file:
        csv.field_size_limit(1_000_000)
        return list(csv.reader(file))


def test_csv_is_long_and_no_text_is_taken_for_a_formula(tmp_path: Path) -> None:
    data = xarray.Dataset(
        {
            "x": (("site", "token"), [[-1.5, 2.0], [3.0, math.nan]]),
            "word": ("token", ["=1", "-ok"]),
            "total": -7,
        },
        {"site": ["layer.0", "layer.1"], "string": ("token", ["@a", "b"])},
    )
    assert csv_of(Result("any", data, {}, {}), tmp_path) == [
        ["site", "token", "string", "variable", "value"],
        ["layer.0", "0", "'@a", "x", "-1.5"],
        ["layer.0", "1", "b", "x", "2.0"],
        ["layer.1", "0", "'@a", "x", "3.0"],
        ["layer.1", "1", "b", "x", "nan"],
        ["", "0", "'@a", "word", "'=1"],
        ["", "1", "b", "word", "'-ok"],
        ["", "", "", "total", "-7"],
    ]
    header, *rows = csv_of(hostile_result(), tmp_path)
    assert {len(row) for row in rows} == {len(header)} == {6}
    texts = [row[-1] for row in rows if row[-2] == "word"]
    assert len(texts) == 2 * len(CELLS)
    for text in texts:
        assert not text.startswith(("=", "+", "-", "@", "\t", "\r"))
        assert "\0" not in text
    formulas = ["=1+1", "\n=1+1", " =1", "＝1+1", "＋1", "a;=1", "a; @x", "\t=1", "-1"]
    for text in [*formulas, "@x"]:
        strings = np.array([text, "plain"], dtype=object)
        rows = csv_of(result_with(strings), tmp_path)
        cells = {cell for row in rows for cell in row}
        assert f"'{text}" in cells and text not in cells and "plain" in cells


def test_formats_are_found_by_the_suffix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hostile_result()
    formats = r"the formats are .*\.csv .*\.json .*\.nc"
    for name in ("x.xlsx", "x", ".json", "x.pickle"):
        with pytest.raises(FileError, match=formats):
            result.save(tmp_path / name)
    with pytest.raises(FileError, match="Cannot write"):
        result.save(tmp_path / "nowhere" / "x.json")
    assert list(tmp_path.iterdir()) == []

    def draw(result: Result, path: Path) -> None:
        assert path.suffix == ".html"
        path.write_text(f"<p>{result.kind}</p>")

    def fail(result: Result, path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(render, "write_page", draw)
    result.save(tmp_path / "x.html")
    monkeypatch.setattr(render, "write_page", fail)
    with pytest.raises(KeyboardInterrupt):
        result.save(tmp_path / "x.html")
    assert (tmp_path / "x.html").read_text() == "<p>sizes</p>"
    assert len(list(tmp_path.iterdir())) == 1


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    foreign = xarray.Dataset({"x": ("site", [1.0])})
    foreign.to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    with pytest.raises(FileError):
        Result.load(tmp_path / "foreign.nc")
    for suffix in (".json", ".nc"):
        path = tmp_path / f"x{suffix}"
        hostile_result().save(path)
        whole = path.read_bytes()
        damaged = [b"", b"{}", b"[]", b"null", b"[" * 100_000, b"\xff"]
        damaged.append(whole[: len(whole) // 2])
        if suffix == ".json":
            damaged.append(whole[:-1])
        for content in damaged:
            path.write_bytes(content)
            with pytest.raises(FileError):
                Result.load(path)
        for absent in (tmp_path / f"none{suffix}", tmp_path, tmp_path / "x.csv"):
            with pytest.raises(FileError):
                Result.load(absent)


def virtual(other: Path) -> h5py.VirtualLayout:
    layout = h5py.VirtualLayout((2,), "f8")
    layout[:] = h5py.VirtualSource(str(other), "x", (2,))
    return layout


def put(values: Any) -> Callable[[h5py.File, Path], None]:
    return lambda file, other: file.__setitem__("x", values)


def created(**options: Any) -> Callable[[h5py.File, Path], None]:
    """A gigabyte, most of which is filled in when it is read."""

    def plant(file: h5py.File, other: Path) -> None:
        values = file.create_dataset("x", (2**27,), "f8", **options)
        if values.chunks:
            values[:4] = 1.0

    return plant


# What may stand where the values of a variable were; `other` is a file of the user.
PLANTED: dict[str, Callable[[h5py.File, Path], object]] = {
    "bytes of another file": lambda file, other: file.create_dataset(
        "x", (2,), "f8", external=[(str(other), 0, 16)]
    ),
    "bytes of a pipe, which nobody writes to": lambda file, other: file.create_dataset(
        "x", (2,), "f8", external=[(str(other.with_name("pipe")), 0, 16)]
    ),
    "a view of another file": lambda file, other: file.create_virtual_dataset(
        "x", virtual(other)
    ),
    "a link to another file": put(h5py.ExternalLink("other.h5", "/x")),
    "a link to another variable": put(h5py.SoftLink("/word")),
    "a group": lambda file, other: file.create_group("x"),
    "a gigabyte of compressed zeros": created(chunks=(2**20,), compression="gzip"),
    "a gigabyte of chunks that are not there": created(chunks=(2**10,)),
    "a gigabyte of one number": created(fillvalue=1.0),
    "references": put(np.array([h5py.Reference()] * 2, h5py.ref_dtype)),
    "values with parts": put(np.zeros(2, [("a", "f8"), ("b", "f8")])),
    "strings of a fixed length": put(np.array([b"a", b"b"])),
    "values of no kind": put(np.array([b"a", b"b"], "V2")),
}


def sealed_with(folder: Path, change: Callable[[h5py.File], None]) -> Path:
    """A file of ours in which something was exchanged, sealed as if it had been written
    so.
    """
    path = folder / "x.nc"
    words = {"x": ("site", [1.0, 2.0]), "word": ("site", ["a", "b"])}
    Result("any", xarray.Dataset(words), {}, {}).save(path)
    content = io.BytesIO(path.read_bytes())
    with h5py.File(content, "r+") as file:
        change(file)
    path.write_bytes(content.getvalue() + UNSEALED.encode())
    seal(path)
    return path


def test_only_what_lies_in_a_netcdf_file_is_read(tmp_path: Path) -> None:
    other = tmp_path / "other.h5"
    with h5py.File(other, "w") as file:
        file["x"] = [1.0, 2.0]
    os.mkfifo(tmp_path / "pipe")

    def exchanged(plant: Callable[[h5py.File, Path], object]) -> Path:
        def change(file: h5py.File) -> None:
            del file["x"]
            plant(file, other)

        return sealed_with(tmp_path, change)

    # Refused for what is planted, and for nothing else.
    loaded = Result.load(exchanged(put([3.0, 4.0])))
    assert loaded.data["x"].values.tolist() == [3.0, 4.0]
    for what, plant in PLANTED.items():
        with pytest.raises(FileError, match="Cannot read a result from ") as caught:
            Result.load(exchanged(plant))
        said = str(caught.value)
        assert "'x'" in said or "no variable" in said, what


def test_one_long_string_that_is_named_often_is_refused(tmp_path: Path) -> None:
    count, long = 1000, "y" * 10_000
    path = tmp_path / "x.nc"
    result_with([long, *"z" * (count - 1)]).save(path)
    with h5py.File(path) as file:
        offset = file["x"].id.get_offset()
    content = bytearray(path.read_bytes())
    content[offset : offset + 16 * count] = content[offset : offset + 16] * count
    place = content.rindex(b"hiddenscope-sha256:")
    path.write_bytes(bytes(content[:place]) + UNSEALED.encode())
    seal(path)
    with h5py.File(path) as file:
        # HDF5 has nothing against it.
        assert file["x"].asstr()[()].tolist() == [long] * count
    with pytest.raises(FileError, match="longer than the file"):
        Result.load(path)


def test_a_dtype_that_no_result_has_is_refused(tmp_path: Path) -> None:
    def change(file: h5py.File) -> None:
        header = json.loads(file["hiddenscope_notes"].asstr()[()])
        header["variables"]["x"]["dtype"] = dtype
        file["hiddenscope_notes"][()] = json.dumps(header)

    path = tmp_path / "x.json"
    for dtype in ("S1000000000", "U1000000000", "O", "V10", "M8[s]", "complex128"):
        result_with([1.0, 2.0]).save(path)
        header = json.loads(path.read_text())
        header["variables"]["x"]["dtype"] = dtype
        path.write_text(json.dumps({**header, "seal": UNSEALED}))
        seal(path)
        for file in (path, sealed_with(tmp_path, change)):
            with pytest.raises(FileError, match="its dtype is"):
                Result.load(file)


@pytest.mark.parametrize("field", ["kind", "facts", "source"])
def test_a_sealed_file_of_other_fields_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "a.json"
    result_with([1.0, 2.0]).save(path)
    content = json.loads(path.read_text("ascii")) | {"seal": UNSEALED}
    for wrong in (None, 5, [1], {} if field == "kind" else "x"):
        path.write_text(json.dumps(content | {field: wrong}), "ascii")
        seal(path)
        with pytest.raises(FileError, match="of another type"):
            Result.load(path)


def smallest_result(kind: str) -> dict[str, Any]:
    """The shortest file of a kind of result, as JSON."""
    with ZipFile(RECORDED) as packed:
        files = [file for file in packed.infolist() if file.filename.startswith(kind)]
        assert files, f"no {kind} is recorded: run python -m tests.unit.views.record"
        smallest = min(files, key=lambda file: file.file_size)
        return dict(json.loads(packed.read(smallest)))


def tampered(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The file without a variable, with odd values, and with a number of 400 digits."""
    variables, facts = content["variables"], content["facts"]
    for name, variable in variables.items():
        others = {key: value for key, value in variables.items() if key != name}
        yield content | {"variables": others}
        odd = variable | {"values": [10**400, "Infinity"], "shape": [2]}
        yield content | {"variables": others | {name: odd}}
    for name in facts:
        yield content | {"facts": facts | {name: 10**400}}
        yield content | {"facts": facts | {name: []}}


@pytest.mark.parametrize("kind", KINDS)
def test_a_tampered_result_is_told_or_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    content = smallest_result(kind) | {"seal": UNSEALED}
    changes = list(tampered(content))
    refused = 0
    for changed in changes[:: -(-len(changes) // 24)]:
        path.write_text(json.dumps(changed))
        seal(path)
        try:
            assert Result.load(path).summary()
        except Error:
            refused += 1
    assert refused


def test_what_cannot_be_saved_is_refused() -> None:
    facts: list[Any] = [{"a": object()}, {1: 2}, {"a": 1j}, {"a": b"x"}, {"a": {1, 2}}]
    for wrong in [*facts, {"a": np.array(1j)}]:
        with pytest.raises(StatesError):
            Result("any", xarray.Dataset(), wrong, {})
    dates = np.array(["2020-01-01"], dtype="datetime64[ns]")
    objects = np.array([{}], dtype=object)
    for values in (np.array([1j]), dates, objects, np.array(["a", None])):
        with pytest.raises(StatesError):
            result_with(values)
    plain = xarray.Dataset({"x": (("a", "b"), [[1.0]])}, {"a": [1], "b": [2]})
    for data, reason in (
        (plain.stack(c=("a", "b")), None),
        (xarray.Dataset({"x": ("site", [1.0], {"k": object()})}), "x.attrs.k holds"),
        (xarray.Dataset({"x": ("site", [1.0])}, attrs={"k": 1j}), "attrs.k holds"),
        (xarray.Dataset({"x": ("site", [1.0])}, attrs={1: "k"}), "attrs holds"),
        (xarray.Dataset({1: ("site", [1.0])}), "1 is not a string"),
        (xarray.Dataset({"x": (("a", 2), [[1.0]])}), "2 is not a string"),
        (xarray.Dataset({"hiddenscope_notes": ("site", [1.0])}), "reserved"),
        (xarray.Dataset({"x": ("hiddenscope_notes", [1.0])}), "reserved"),
    ):
        with pytest.raises(StatesError, match=reason):
            Result("any", data, {}, {})
    with pytest.raises(StatesError, match="whole characters"):
        Result("any", xarray.Dataset({"\ud800": ("site", [1.0])}), {}, {})


def test_equality_sees_everything() -> None:
    values = np.array([1.0, math.nan])
    data = xarray.Dataset({"x": ("site", values)}, {"site": ["a", "b"]})
    facts, source = {"n": 1, "odd": math.nan}, {"model": "toy"}
    result = Result("any", data, facts, source)
    turned = {"odd": math.nan, "n": 1}
    assert result.equals(Result("any", data.copy(deep=True), turned, source))
    for other in (
        Result("other", data, facts, source),
        Result("any", data, facts | {"n": 2}, source),
        Result("any", data, facts, {"model": "other"}),
        Result("any", data + 1, facts, source),
        Result("any", data.astype(np.float32), facts, source),
        Result("any", data.assign_coords(site=["a", "c"]), facts, source),
        Result("any", data.assign_attrs(k=1), facts, source),
    ):
        assert not result.equals(other)


def test_the_summary_is_readable_and_safe() -> None:
    facts = {
        "first difference": "' France'",
        "at": 3,
        "share": 1 / 3,
        "by layer": [1, 2.5],
        "more": {"a": "\x1b[31m"},
    }
    data = xarray.Dataset({"x": ("site", [1.0])})
    result = Result("sizes", data, facts, Source("toy"))
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
    # Escapes do not make a fact long.
    assert in_words("\x1b" * 100 + "x" * 100).isprintable()
    assert len(in_words("\U000e0001" * 150)) == len(in_words("x" * 300)) == 200
    shown = result._repr_mimebundle_(include=["text/plain"])
    assert shown == {"text/plain": result.summary()}


def test_a_result_is_read_by_tokens_and_sites(tiny: Callable[..., hs.Model]) -> None:
    texts = ["The cat sat.", "The end."]
    result = hs.profile(tiny("llama"), texts, sites="layer.1,final")
    strings = result.data["string"].values.tolist()
    norm = result["norm"]
    assert norm["token"].values.tolist() == strings
    assert norm["site"].values.tolist() == ["layer.1", "final"]
    assert (norm.values == result.data["norm"].values).all()
    table = result.to_pandas("norm")
    assert table.index.tolist() == ["layer.1", "final"]
    assert table.columns.tolist() == strings
    final = result.data["norm"].sel(site="final").values
    assert (table.loc["final"].values == final).all()
    rows = result.to_pandas()
    assert rows.index.names == ["site", "token"] and len(rows) == norm.size
    alike = {str(name) for name, one in result.data.items() if one.dims == norm.dims}
    assert set(rows.columns) == alike
    assert rows["norm"].values.tolist() == norm.values.ravel().tolist()
    assert "norm" in result and "norms" not in result
    assert list(result) == [str(name) for name in result.data]
    with pytest.raises(StatesError, match="Did you mean 'norm'"):
        result["norms"]
    # A map is read by tokens at both ends.
    seen = hs.visibility(tiny("gpt2"), "The cat", sites="layer.1,final")
    strings = seen.data["string"].values.tolist()
    for axis in ("token", "source_token"):
        assert seen["l1"][axis].values.tolist() == strings
    table = seen.to_pandas()
    assert table.index.names == list(seen.data["l1"].dims)
    assert (table["l1"].values == seen["l1"].values.ravel()).all()


def test_results_of_one_dimension_and_of_none() -> None:
    along = {"error": ("site", [1.0, 2.0]), "whole": ((), 3.0)}
    result = hs.Result(
        "toy", xarray.Dataset(along, {"site": ["layer.0", "final"]}), {}, {}
    )
    assert result.to_pandas().to_dict() == {"error": {"layer.0": 1.0, "final": 2.0}}
    assert result.to_pandas("whole").to_numpy().tolist() == [[3.0]]
    with pytest.raises(StatesError, match="no variables"):
        hs.Result("toy", xarray.Dataset(), {}, {}).to_pandas()


def test_arrays_become_a_dataset_with_the_labels_of_their_tokens() -> None:
    first = Tokens(None, [0, 0], [0, 1], [10, 11], ("a", "longer"))
    stacks = [first, Tokens(None, [0], [0], [10], ("b",))]
    coords = token_coords(stacks, ["encoder", "decoder"])
    columns = {name: values.tolist() for name, (_, values) in coords.items()}
    assert columns == {
        "text": [0, 0, 0],
        "position": [0, 1, 0],
        "id": [10, 11, 10],
        "string": ["a", "longer", "b"],
        "stack": ["encoder", "encoder", "decoder"],
    }
    assert "stack" not in token_coords(stacks[:1])
    variables: Variables = {"norm": ("token", np.array([1.0, 2.0]), {"units": "L2"})}
    data = to_dataset(variables, token_coords(stacks[:1]), {"texts": ["x"]})
    # Strings stay objects, and attributes are copied.
    assert data["string"].dtype == object
    assert data.attrs == {"texts": ["x"]}
    data["norm"].attrs["units"] = "another"
    assert variables["norm"][2] == {"units": "L2"}


def test_a_kind_without_a_story_is_told_by_its_facts() -> None:
    for kind in ("extract", "mine"):
        result = hs.Result(kind, xarray.Dataset(), {"rows": 2}, {})
        assert result.summary() == f"{kind}\n  rows  2"
