"""Export: the contents of a result as JSON, netCDF and CSV files.

JSON and netCDF files hold everything and come back exactly; CSV is for other programs.
`Result.save` and `Result.load` call these functions, which return the `Contents` that a
result is made of.
"""

import base64
import io
import json
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import chain
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    NotRequired,
    TypeAlias,
    TypedDict,
)

import numpy as np

from hiddenscope.errors import StatesError
from hiddenscope.files import UNSEALED, printable, seal
from hiddenscope.results.report import plain_fields
from hiddenscope.sites import Site

if TYPE_CHECKING:
    import h5py
    import xarray

    from hiddenscope.results.result import Result

Array: TypeAlias = np.ndarray[Any, Any]

Json: TypeAlias = Any
"""A value of JSON's kinds: dict, list, str, int, float, bool or None."""

_FORMAT = "hiddenscope.result/1"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(\\|0|u[0-9a-f]{4})")
# A spreadsheet may take text for a formula if it starts with one of these signs, which
# may be full-width. It may also do so behind white space, or behind a `;`, which starts
# another cell where the comma is the decimal mark.
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠\t\r\n]|.*;\s*[=+\-@＝＋－＠]", re.DOTALL)
# The scalar variable of a netCDF file that holds what netCDF cannot.
_HEADER = "hiddenscope_notes"
# Characters of an attribute that are repeated for other programs.
_LONGEST_ATTRIBUTE = 1_000
_NUMBERS = {"bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"}
_NUMBERS |= {"uint8", "uint16", "uint32", "uint64"}
# How an HDF5 file begins.
_SIGNATURE = b"\x89HDF\r\n\x1a\n"
# HDF5 stores a string as its length in 4 bytes, the address of its heap in 8 bytes and
# its index in that heap in 4.
_STRING_BYTES = 16
# netCDF has neither of these.
_STORED_AS = {"float16": "float32", "bool": "uint8"}
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Contents(NamedTuple):
    """The four parts of a result; facts and source hold JSON's kinds only."""

    kind: str
    data: "xarray.Dataset"
    facts: Json
    source: Json


class _Variable(TypedDict):
    """A variable without its numbers."""

    dims: list[Hashable]
    shape: list[int]
    dtype: str
    attrs: Json
    coordinate: bool
    # Only JSON files have values here; netCDF stores them in variables.
    values: NotRequired[Json]


class _Header(TypedDict):
    """A result without its numbers, as both formats store it."""

    format: str
    kind: str
    facts: Json
    source: Json
    attrs: Json
    variables: dict[str, _Variable]


# --- Values that JSON can hold


def to_plain(value: Any, where: str) -> Json:
    """Return a value as JSON's kinds; `where` names it in the error.

    Tuples become lists, numpy's numbers Python's, a `Site` its name, and anything with
    a `to_json()` what that returns.
    """
    if isinstance(value, str | int | float) and hasattr(value, "item"):
        # np.float64 is a float and np.str_ is a str, but neither is a plain one.
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Site):
        return str(value)
    if hasattr(value, "to_json"):
        value = value.to_json()
    elif is_dataclass(value):
        value = plain_fields(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            str(key): to_plain(inner, f"{where}.{key}") for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(inner, where) for inner in value]
    if hasattr(value, "tolist"):
        listed = value.tolist()
        if not isinstance(listed, complex | bytes):
            return to_plain(listed, where)
    raise StatesError(
        "Cannot write this as JSON",
        f"{printable(where)} holds {type(value).__name__}",
        "Give text, numbers, lists and mappings of them.",
    )


def tag(value: Json) -> Json:
    """Return a value that strict JSON can hold; `_untag` reverses it.

    JSON has no NaN and no infinity, and joins two lone surrogates to one character.
    """
    if isinstance(value, float) and str(value) in _NOT_FINITE:
        return {"$float": _NOT_FINITE[str(value)]}
    if isinstance(value, str) and _SURROGATE.search(value):
        encoded = value.encode("utf-8", "surrogatepass")
        return {"$text": base64.b64encode(encoded).decode()}
    if isinstance(value, list):
        return [tag(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if any(key.startswith("$") or _SURROGATE.search(key) for key in value):
        return {"$dict": [[tag(key), tag(inner)] for key, inner in value.items()]}
    return {key: tag(inner) for key, inner in value.items()}


def _untag(value: Json) -> Json:
    if isinstance(value, list):
        return [_untag(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if "$float" in value:
        return float(value["$float"])
    if "$text" in value:
        return base64.b64decode(value["$text"]).decode("utf-8", "surrogatepass")
    if "$dict" in value:
        return {_untag(key): _untag(inner) for key, inner in value["$dict"]}
    return {key: _untag(inner) for key, inner in value.items()}


# --- Labelled arrays


def check_data(data: "xarray.Dataset") -> None:
    """Raise StatesError unless files can hold the data."""
    for name in {**data.sizes, **data.variables}:
        if not isinstance(name, str) or _SURROGATE.search(name):
            raise StatesError(
                "Cannot keep this data in a result",
                f"the name {printable(repr(name))} is not a string of whole characters",
                "Name variables and dimensions by strings.",
            )
    if _HEADER in data.variables or _HEADER in data.sizes:
        raise StatesError(
            "Cannot keep this data in a result",
            f"the name {_HEADER} is reserved for files",
            "Give it another name.",
        )
    dtype_names(data)
    for name, variable in data.variables.items():
        to_plain(variable.attrs, f"{name}.attrs")
    to_plain(data.attrs, "attrs")
    if any(index.nlevels > 1 for index in data.indexes.values()):
        raise StatesError(
            "Cannot use this data",
            "an index has several levels",
            "Call .reset_index() on it first.",
        )


def dtype_names(data: "xarray.Dataset") -> dict[str, str]:
    """Return the dtype of every variable; `str` for every way of holding text.

    Raises StatesError if a file can hold neither numbers nor text of this dtype.
    """
    names = {}
    for name, variable in data.variables.items():
        array = variable.to_numpy()
        if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
            names[str(name)] = str(array.dtype.name)
        elif array.dtype.kind in "UT" or _is_text(array):
            names[str(name)] = "str"
        else:
            raise StatesError(
                "Cannot keep this data in a result",
                f"{printable(str(name))} is {array.dtype}",
                "Give numbers of at most 64 bits, flags or text.",
            )
    return names


def _is_text(array: Array) -> bool:
    if array.dtype.kind != "O":
        return False
    types = set(map(type, array.ravel().tolist()))
    return all(issubclass(kind, str) for kind in types)


def _number_dtype(name: str) -> str:
    """Return the name of a number's dtype after checking it.

    A file could name a dtype that needs a gigabyte for each number.
    """
    if name not in _NUMBERS:
        raise ValueError(f"its dtype is {name}")
    return name


def text_array(values: Sequence[Any]) -> Array:
    """Return strings, or numbers and words, as an array of Python objects.

    NumPy's own strings have a fixed width: one long token would make all of them long.

    >>> text_array(["a", "longer"]).dtype
    dtype('O')
    """
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _header(result: "Result") -> _Header:
    data = result.data
    dtypes = dtype_names(data)
    variables: dict[str, _Variable] = {}
    for name, variable in data.variables.items():
        variables[str(name)] = {
            "dims": list(variable.dims),
            "shape": list(variable.shape),
            "dtype": dtypes[str(name)],
            "attrs": tag(to_plain(variable.attrs, f"{name}.attrs")),
            "coordinate": name in data.coords,
        }
    return {
        "format": _FORMAT,
        "kind": result.kind,
        "facts": tag(result.facts),
        "source": tag(result.source),
        "attrs": tag(to_plain(data.attrs, "attrs")),
        "variables": variables,
    }


def _restore(header: _Header, arrays: Mapping[str, Array]) -> Contents:
    """Return the contents that `_header` and the arrays were made of."""
    import xarray

    if header["format"] != _FORMAT:
        raise ValueError(f"its format is {header['format']}")
    variables = {}
    coords = {}
    for name, variable in header["variables"].items():
        array = arrays[name].reshape(variable["shape"])
        restored = (variable["dims"], array, _untag(variable["attrs"]))
        if variable["coordinate"]:
            coords[name] = restored
        else:
            variables[name] = restored
    data = xarray.Dataset(variables, coords, _untag(header["attrs"]))
    facts, source = _untag(header["facts"]), _untag(header["source"])
    kind = header["kind"]
    if [type(kind), type(facts), type(source)] != [str, dict, dict]:
        raise ValueError("its kind, facts or source are of another type")
    return Contents(kind, data, facts, source)


# --- JSON


def _write_json(result: "Result", path: Path) -> None:
    header = _header(result)
    for name, variable in header["variables"].items():
        array = result.data[name].to_numpy()
        flat = array.ravel().tolist()
        if variable["dtype"] == "str":
            flat = [tag(value) for value in flat]
        elif array.dtype.kind == "f":
            # Among numbers, the word "NaN" can only be a number. In facts it may also
            # be text, so `tag` wraps it there.
            # The shortest numbers that come back exactly are written: a float32 of 0.1
            # as 0.1, not as 0.10000000149011612.
            short = np.array([float(str(value)) for value in array.flat])
            exact = array.astype(np.float64).ravel()
            # A short number is rounded twice, to float64 and then to the dtype, which
            # seldom ends at a neighbour (7.038531e-26 of float32). NaN is not equal to
            # itself.
            comes_back = short.astype(array.dtype) == array.ravel()
            values = np.where(comes_back, short, exact).tolist()
            flat = [_NOT_FINITE.get(str(value), value) for value in values]
        variable["values"] = text_array(flat).reshape(array.shape).tolist()
    # The seal is a checksum of the file. It takes the place of UNSEALED once the rest
    # is written.
    text = json.dumps({"seal": UNSEALED, **header}, indent=1, allow_nan=False)
    path.write_text(text, "ascii")
    seal(path)


def _read_json(path: Path) -> Contents:
    header = json.loads(path.read_text("utf-8"))
    arrays = {}
    for name, variable in header["variables"].items():
        values = variable["values"]
        if not variable["shape"]:
            values = [values]
        for _ in variable["shape"][1:]:
            values = list(chain.from_iterable(values))
        if variable["dtype"] == "str":
            arrays[name] = text_array([_untag(value) for value in values])
        else:
            arrays[name] = np.array(
                [_number(value) for value in values],
                dtype=_number_dtype(variable["dtype"]),
            )
    return _restore(header, arrays)


def _number(value: float | str) -> float:
    """Return a number, also one that JSON has as a word: NaN or an infinity."""
    return float(value) if isinstance(value, str) else value


# --- netCDF


def _write_netcdf(result: "Result", path: Path) -> None:
    import xarray

    header = _header(result)
    variables: dict[str, Any] = {}
    for name, variable in header["variables"].items():
        array = result.data[name].to_numpy()
        dtype = variable["dtype"]
        if dtype == "str":
            escaped = text_array([_escape(value) for value in array.flat])
            array = escaped.reshape(array.shape)
        elif dtype in _STORED_AS:
            array = array.astype(_STORED_AS[dtype])
        attributes = {}
        # The header has all attributes. Other programs know these two.
        for key in ("units", "long_name"):
            if key in variable["attrs"]:
                text = str(variable["attrs"][key])[:_LONGEST_ATTRIBUTE]
                attributes[key] = _escape(text)
        variables[name] = (variable["dims"], array, attributes)
    variables[_HEADER] = json.dumps(header, allow_nan=False)
    attrs = {"kind": _escape(result.kind), "format": _FORMAT}
    # All at once: to add one to a dataset takes longer than to write it.
    data = xarray.Dataset(variables, attrs=attrs)
    data = data.set_coords([str(name) for name in result.data.coords])
    no_fill_value = {name: {"_FillValue": None} for name in data.variables}
    # HDF5 ends the process when it closes a file that a full disk kept it from writing,
    # so the bytes are made in memory.
    content = io.BytesIO()
    data.to_netcdf(content, engine="h5netcdf", encoding=no_fill_value)
    # HDF5 ignores what follows its end, so there is room for the seal.
    path.write_bytes(content.getvalue() + UNSEALED.encode())
    seal(path)


def _read_netcdf(path: Path) -> Contents:
    import h5py

    content = path.read_bytes()
    if not content.startswith(_SIGNATURE):
        raise ValueError("it is no HDF5 file")
    arrays = {}
    with h5py.File(io.BytesIO(content), "r") as file:
        header = json.loads(_read_variable(file, _HEADER, content).item())
        for name, variable in header["variables"].items():
            array = _read_variable(file, name, content)
            if variable["dtype"] == "str":
                arrays[name] = text_array([_unescape(text) for text in array.flat])
            else:
                arrays[name] = array.astype(_number_dtype(variable["dtype"]))
    return _restore(header, arrays)


def _read_variable(file: "h5py.File", name: str, content: bytes) -> Array:
    """Return the values of a variable of a netCDF-4 file, text as an array of objects,
    and trust nothing in the file.

    Such a file is an HDF5 file, and an HDF5 variable can be much more than numbers:
    values in another file or in a pipe, views of other variables, links to other files,
    compressed zeros, a terabyte of one fill value, code in a filter plugin, one string
    that is referenced a million times. `Result.save` writes none of that. So the layout
    is checked before any value is read; xarray and h5netcdf would read everything.
    """
    import h5py

    link = None
    # A name with a slash is a path, and any step of a path may be a link.
    if "/" not in name:
        link = file.get(name, getlink=True)
    if link is None:
        raise LookupError(f"there is no variable {name!r}")
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"variable {name!r} is a link")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise ValueError(f"{name!r} is no variable")
    properties = dataset.id.get_create_plist()
    text = h5py.check_string_dtype(dataset.dtype)
    layout = properties.get_layout()
    sizes = file.id.get_create_plist().get_sizes()
    # HDF5 gives a variable without values a chunked layout.
    in_pieces = layout != h5py.h5d.CONTIGUOUS and dataset.size
    neither = text is None and dataset.dtype.kind not in "biuf"
    refusals = {
        "has its values in another file": properties.get_external_count() > 0,
        "is a view of others": layout == h5py.h5d.VIRTUAL,
        "is compressed": properties.get_nfilters() > 0,
        "is not in one piece": in_pieces,
        "holds neither numbers nor text": neither,
        "holds strings of a fixed length": text is not None and text.length is not None,
        "has addresses of other than 8 bytes": sizes != (8, 8),
    }
    for refusal, holds in refusals.items():
        if holds:
            raise ValueError(f"variable {name!r} {refusal}")
    item_bytes = dataset.dtype.itemsize if text is None else _STRING_BYTES
    stored, needed = dataset.id.get_storage_size(), dataset.size * item_bytes
    if stored != needed or needed > len(content):
        raise ValueError(
            f"variable {name!r} has {dataset.size:,} values, and the file holds"
            f" {stored:,} bytes of it"
        )
    if text is None:
        return np.asarray(dataset[()])
    if dataset.size:
        # Strings that are longer than the file must be referenced many times, and would
        # fill the memory.
        words = np.frombuffer(content, "<u4", 4 * dataset.size, dataset.id.get_offset())
        if int(words[::4].sum(dtype=np.uint64)) > len(content):
            raise ValueError(
                f"the strings of variable {name!r} are longer than the file"
            )
    return np.array(dataset.asstr()[()], dtype=object)


def _escape(text: str) -> str:
    """Escape what netCDF text cannot hold.

    It is cut at a NUL, and lone surrogates are not valid UTF-8.
    """
    text = text.replace("\\", r"\\").replace("\0", r"\0")
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _unescape(text: str) -> str:
    plain = {"\\": "\\", "0": "\0"}

    def character(match: re.Match[str]) -> str:
        return plain.get(match[1]) or chr(int(match[1][1:], 16))

    return _ESCAPED.sub(character, text)


# --- CSV


def _write_csv(result: "Result", path: Path) -> None:
    """Write one row for each number; a label that does not apply to it is empty."""
    import pandas

    data = result.data
    labels = [str(dim) for dim in data.sizes]
    for name in data.coords:
        if name not in data.sizes and data[name].dims:
            labels.append(str(name))
    columns = [_cell(name) for name in (*labels, "variable", "value")]
    with path.open(
        "w", encoding="utf-8", errors="backslashreplace", newline=""
    ) as file:
        heading = pandas.DataFrame(columns=columns)
        heading.to_csv(file, index=False, lineterminator="\r\n")
        for name, variable in data.data_vars.items():
            cells: list[Any] = []
            for label in labels:
                # A label that does not apply is empty.
                cells.append("")
                if set(data[label].dims) <= set(variable.dims):
                    aligned = data[label].broadcast_like(variable)
                    cells[-1] = aligned.transpose(*variable.dims).to_numpy().ravel()
            cells += [str(name), variable.to_numpy().ravel()]
            # Columns are numbered: a label may be called `variable` or `value` too.
            frame = pandas.DataFrame(dict(enumerate(cells)), index=range(variable.size))
            for column in frame.select_dtypes(exclude="number"):
                frame[column] = frame[column].map(_cell)
            frame.to_csv(
                file, index=False, header=False, na_rep="nan", lineterminator="\r\n"
            )


def _cell(value: Any) -> Any:
    """Return a cell that no spreadsheet runs as a formula or cuts at a NUL."""
    if not isinstance(value, str):
        return value
    text = value.replace("\0", r"\x00")
    return f"'{text}" if _FORMULA.match(text) else text


WRITERS: dict[str, Callable[["Result", Path], None]] = {
    ".json": _write_json,
    ".csv": _write_csv,
    ".nc": _write_netcdf,
}
READERS: dict[str, Callable[[Path], Contents]] = {
    ".json": _read_json,
    ".nc": _read_netcdf,
}
