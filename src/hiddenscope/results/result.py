"""Result: what an analysis returns. Labelled arrays, the findings as facts, and where
they come from.

The views fill four tables here when they are imported: how a result is written
(`RENDERERS`), shown in a notebook (`DISPLAYS`), described in sentences (`FINDINGS`) and
listed on a terminal (`TABLES`). So a result knows no view.

>>> import xarray
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])}, {"site": ["layer.0", "layer.1"]})
>>> print(Result("sizes", norms, {"largest": 2.5, "at": "layer.1"}, {"model": "toy"}).summary())
sizes of toy
  largest  2.5
  at       layer.1
"""

import base64
import io
import json
import os
import re
import tempfile
import webbrowser
from collections.abc import (
    Callable,
    Collection,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Protocol,
    TypeAlias,
    TypedDict,
)

from hiddenscope.arguments import checked, shown
from hiddenscope.catalog import ANALYSIS
from hiddenscope.errors import ArgumentError, Error, FileError, StatesError
from hiddenscope.files import UNSEALED, check_seal, replacing, seal
from hiddenscope.results.netcdf import NetcdfFile
from hiddenscope.sites import Site

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import xarray
    from matplotlib.figure import Figure

Facts: TypeAlias = Mapping[str, Any]
"""The findings of an analysis: snake_case keys that its page documents, and values as
JSON keeps them.
"""

Renderer: TypeAlias = Callable[["Result", Path], None]
Width: TypeAlias = Literal["", "column", "page"]

RENDERERS: dict[str, Renderer] = {}
"""How to write a result to a file, by suffix; the views put `.html` here."""

PAINTERS: dict[str, "Painter"] = {}
"""What draws figures, by suffix; the views put `.png`, `.svg` and `.pdf` here."""

DISPLAYS: dict[str, Callable[["Result"], str]] = {}
"""How to show a result in a notebook, by media type; the views put `text/html` and
`image/png` (as base64) here.
"""

FINDINGS: dict[str, Callable[["Result"], Iterable[str]]] = {}
"""What a person should read of a result, in plain sentences, by its kind; the views put
their kinds here.
"""

TABLES: dict[str, Callable[["Result"], Iterable["Table"]]] = {}
"""What a terminal prints beneath the findings, by kind; the views put their kinds here.
"""

_FORMAT = "hiddenscope.result/1"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile(r"\\(\\|0|u[0-9a-f]{4})")
# What a spreadsheet may take for a formula: a sign at the start, also full-width, also
# behind white space or a `;` that begins another cell where the comma is the decimal
# mark.
_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠\t\r\n]|.*;\s*[=+\-@＝＋－＠]", re.DOTALL)
# The scalar variable of a netCDF file that holds what netCDF cannot.
_HEADER = "hiddenscope_notes"
_NUMBERS = {"bool", "float16", "float32", "float64", "int8", "int16", "int32", "int64"}
_NUMBERS |= {"uint8", "uint16", "uint32", "uint64"}
_NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class Table(NamedTuple):
    """Rows of strings for a terminal; the columns at the places in `text` hold text,
    the others numbers.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text: Collection[int] = (0,)
    title: str = ""


class HasJson(Protocol):
    """What has a form in JSON, as a `Source` of states has."""

    def to_json(self) -> dict[str, Any]:
        """The value as JSON keeps it."""


class Look(NamedTuple):
    """Which view of a result a figure shows, which measure of a grid, and how wide it
    is.
    """

    view: str = ""
    measure: str = ""
    width: Width = ""


class Painter(Protocol):
    """What draws the views of a result with matplotlib."""

    def titles(self, result: "Result") -> dict[str, str]:
        """The names of the views, each with its title."""

    def figure(self, result: "Result", look: Look) -> "Figure":
        """A view as a figure."""

    def write(self, result: "Result", path: Path, look: Look) -> None:
        """A view as a file."""


class _Variable(TypedDict):
    """Everything of a variable but its numbers, as files keep it."""

    dims: list[Hashable]
    shape: list[int]
    dtype: str
    attrs: Any
    coordinate: bool
    values: NotRequired[Any]  # in JSON; netCDF has places of its own


class _Header(TypedDict):
    """Everything of a result but its numbers, as files keep it."""

    format: str
    kind: str
    facts: Any
    source: Any
    attrs: Any
    variables: dict[str, _Variable]


@checked
@dataclass(frozen=True, eq=False, repr=False, init=False)
class Result:
    """One type for every analysis: its `kind`, `data` (labelled arrays), `facts` (the
    findings) and `source`.

    `facts` and `source` are kept as JSON keeps them: tuples become lists, numpy's
    numbers Python's, and a `Source` the mapping that its `to_json()` gives; a `Site` is
    kept as its name.

    >>> import xarray
    >>> result = Result("profile", xarray.Dataset({"norm": ("site", [1.0, 2.5])}), {"largest": 2.5}, {"model": "toy"})
    >>> result
    Result(profile of toy: norm[site 2], 1 fact)
    """

    kind: str
    data: "xarray.Dataset"
    facts: Facts
    source: Mapping[str, Any]

    def __init__(
        self,
        kind: str,
        data: "xarray.Dataset",
        facts: Facts,
        source: Mapping[str, Any] | HasJson,
    ) -> None:
        if not all(hasattr(data, name) for name in ("data_vars", "indexes")):
            reason = f"data must be an xarray.Dataset, got {shown(data)}"
            raise ArgumentError(
                "Cannot make a result", reason, "Give data as documented."
            )
        simple = {"facts": _simple(facts, "facts"), "source": _simple(source, "source")}
        for name, value in {"kind": kind, "data": data, **simple}.items():
            object.__setattr__(self, name, value)
        _dtypes(data)
        if any(index.nlevels > 1 for index in self.data.indexes.values()):
            raise StatesError(
                "Cannot use this data",
                "an index has several levels",
                "Call .reset_index() on it first.",
            )

    def __repr__(self) -> str:
        shapes = (
            f"{name}[{', '.join(f'{d} {n}' for d, n in v.sizes.items())}]"
            for name, v in self.data.items()
        )
        facts = "1 fact" if len(self.facts) == 1 else f"{len(self.facts)} facts"
        return (
            f"Result({', '.join([self.title, *shapes]).replace(', ', ': ', 1)},"
            f" {facts})"
        )

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """What a person should read: the findings in sentences, or else the facts line
        by line. Safe on a terminal.
        """
        findings = FINDINGS.get(self.kind)
        lines = (
            _lines(self.facts, "  ")
            if findings is None
            else (f"  {_safe(line)}" for line in findings(self))
        )
        return "\n".join([self.title, *lines])

    def __getitem__(self, name: str) -> "xarray.DataArray":
        """One of its variables, labelled so that people can read it: tokens by their
        strings, sites by their names.

        >>> import xarray
        >>> strings = {"site": ["layer.0"], "string": ("token", ["The", " cat"])}
        >>> norms = xarray.Dataset({"norm": (("site", "token"), [[1.0, 2.5]])}, strings)
        >>> float(Result("profile", norms, {}, {})["norm"].sel(site="layer.0", token=" cat"))
        2.5
        """
        if name not in self.data:
            names = [str(known) for known in self.data]
            near = get_close_matches(str(name), names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
            raise StatesError(
                f"No {shown(name)} in the {self.title}",
                f"it has {', '.join(names) or 'none'}",
                remedy,
            )
        variable = self.data[name]
        strings = {
            str(dim): self._strings(str(dim))
            for dim in variable.dims
            if str(dim).endswith("token")
        }
        return variable.assign_coords(
            {dim: (dim, found) for dim, found in strings.items() if found is not None}
        )

    def _strings(self, dim: str) -> "np.ndarray[Any, Any] | None":
        """The strings of the tokens along a dimension; those of a map are the same at
        both ends, and kept once.
        """
        own = [
            name
            for name in (f"{dim.removesuffix('token')}string", "string")
            if name in self.data.coords
        ]
        found = self.data[own[0]].to_numpy() if own else None
        return (
            found
            if found is not None and found.shape == (self.data.sizes[dim],)
            else None
        )

    def __iter__(self) -> Iterator[str]:
        return map(str, self.data)

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def to_pandas(self, name: str = "") -> "pandas.DataFrame":
        """A variable as a table, sites down and tokens across; or without a name, all
        that belong to the same things.

        Without a name there is a row for each site and token (or whatever the first
        variable runs over), and a column for each variable that runs over the same.

        >>> import xarray
        >>> strings = {"site": ["layer.0"], "string": ("token", ["The", " cat"])}
        >>> norms = xarray.Dataset({"norm": (("site", "token"), [[1.0, 2.5]])}, strings)
        >>> print(Result("profile", norms, {}, {}).to_pandas("norm"))  # doctest: +NORMALIZE_WHITESPACE
        token    The   cat
        site
        layer.0  1.0   2.5
        """
        import pandas

        dims = self._first.dims
        columns = {
            one: self[one]
            for one in ([name] if name else self)
            if name or self.data[one].dims == dims
        }
        first = next(iter(columns.values()))
        if name and first.ndim == 2:
            rows, across = (
                pandas.Index(first[dim].values, name=dim) for dim in first.dims
            )
            return pandas.DataFrame(first.values, rows, across)
        labels = [first[dim].values for dim in first.dims]
        values = {one: variable.values.ravel() for one, variable in columns.items()}
        if first.ndim > 1:
            return pandas.DataFrame(
                values, pandas.MultiIndex.from_product(labels, names=list(first.dims))
            )
        return pandas.DataFrame(
            values, pandas.Index(labels[0], name=first.dims[0]) if labels else None
        )

    @property
    def _first(self) -> "xarray.DataArray":
        """The first variable, which says what the others belong to."""
        if not len(self.data):
            raise StatesError(
                f"Cannot make a table of the {self.title}",
                "it has no variables",
                "Read its facts.",
            )
        return self.data[next(iter(self.data))]

    def equals(self, other: "Result") -> bool:
        """Whether everything is the same: kind, facts, source, and the data with its
        dtypes and attributes.
        """
        mine, theirs = (
            json.dumps([r.kind, _tag(r.facts), _tag(r.source)], sort_keys=True)
            for r in (self, other)
        )
        return (
            mine == theirs
            and _dtypes(self.data) == _dtypes(other.data)
            and self.data.identical(other.data)
        )

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        view: str = "",
        measure: str = "",
        width: Width = "",
    ) -> None:
        """Write a file, whole or not at all, in the format that the suffix names.

        `.html` is one page that works offline. `.png`, `.svg` and `.pdf` are figures
        for print: the main view, or the one that `view` names (`result.views` lists
        them; "all" is every view, in a PDF one on each page), with the `measure` of a
        grid, as wide as the "column" or the "page" of a paper (3.3 and 6.9 inches).
        `.json` and `.nc` come back exactly with `Result.load`. `.csv` is one row a
        number, for other programs: text that a spreadsheet would take for a formula
        gets a leading apostrophe.

        >>> import tempfile, xarray
        >>> result = Result("profile", xarray.Dataset({"norm": ("site", [1.0, 2.5])}), {"largest": 2.5}, {})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.save(f"{folder}/norms.nc")
        ...     Result.load(f"{folder}/norms.nc").equals(result)
        True
        """
        writers = _WRITERS | RENDERERS
        suffix, look = Path(path).suffix.lower(), Look(view, measure, width)
        problem = f"Cannot save a result as {_safe(os.fspath(path))}"
        if suffix not in writers and suffix not in PAINTERS:
            formats = " ".join(sorted([*writers, *PAINTERS]))
            raise FileError(
                problem,
                f"the formats are {formats}",
                "Give the path one of these suffixes.",
            )
        if any(look) and suffix not in PAINTERS:
            reason = "view, measure and width are for figures"
            raise FileError(
                problem,
                reason,
                f"Leave them out, or save as {' '.join(sorted(PAINTERS))}.",
            )
        with replacing(path) as fresh:
            if suffix in PAINTERS:
                PAINTERS[suffix].write(self, fresh, look)
            else:
                writers[suffix](self, fresh)

    @property
    def views(self) -> dict[str, str]:
        """The names of the views of this result, the main one first, each with its
        title.
        """
        return _painter().titles(self)

    def figure(
        self, view: str = "", *, measure: str = "", width: Width = ""
    ) -> "Figure":
        """One view as a matplotlib Figure, to change and save as you like; the options
        are those of `save`.
        """
        return _painter().figure(self, Look(view, measure, width))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Result":
        """Read what `save` wrote as `.json` or `.nc`."""
        problem = f"Cannot read a result from {_safe(os.fspath(path))}"
        read = _READERS.get(Path(path).suffix.lower())
        if read is None or not Path(path).is_file():
            reason = (
                "there is no such file"
                if read
                else "only .json and .nc can be read back"
            )
            raise FileError(
                problem, reason, "Give the path of a file that .save() wrote."
            )
        check_seal(path, problem)
        try:
            return read(Path(path))
        except (
            OSError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            RecursionError,
            Error,
        ) as error:
            reason = f"it is damaged or of another kind ({_safe(str(error))[:200]})"
            raise FileError(problem, reason, "Save the result again.") from error

    def show(self) -> Path:
        """Open the page in a browser; it stays where it was written, and that is
        returned.
        """
        path = Path(
            tempfile.mkdtemp(prefix="hiddenscope-"),
            f"{re.sub('[^a-z0-9]+', '-', self.kind.lower())}.html",
        )
        self.save(path)
        if not webbrowser.open(path.as_uri()):
            raise FileError(
                f"Cannot show the {self.title}",
                "no browser could be started",
                f"Open {path} in one.",
            )
        return path

    def _repr_mimebundle_(
        self, include: Any = None, exclude: Any = None
    ) -> dict[str, str]:
        """What a notebook shows: the page, the figure where no script runs, the
        findings where there is only text.
        """
        chosen = {
            kind
            for kind in DISPLAYS
            if (not include or kind in include) and kind not in (exclude or ())
        }
        bundle = {"text/plain": self.summary()}
        try:
            return bundle | {kind: DISPLAYS[kind](self) for kind in sorted(chosen)}
        except StatesError:  # there is nothing in it that could be drawn
            return bundle

    @property
    def title(self) -> str:
        """What it is and its model, as one line that is safe on a terminal."""
        known, model = ANALYSIS.get(self.kind), self.source.get("model")
        heading = (known and known.heading) or f"{_safe(self.kind)} of"
        if isinstance(model, str):
            return f"{heading} {_safe(model)}"
        return heading.rsplit(" ", 1)[0] if " " in heading else heading


def to_bytes(result: Result, suffix: str) -> bytes:
    """What `save` writes as `.json` or `.nc`, from which `Result.load` makes the same
    result.

    >>> import xarray
    >>> to_bytes(Result("profile", xarray.Dataset(), {}, {}), ".json")[:1]
    b'{'
    """
    with tempfile.TemporaryDirectory(prefix="hiddenscope-") as folder:
        path = Path(folder, f"result{suffix}")
        _WRITERS[suffix](result, path)
        return path.read_bytes()


def _painter() -> Painter:
    if not PAINTERS:
        raise FileError(
            "Cannot draw a figure",
            "no view is imported",
            "Import hiddenscope.views.render first.",
        )
    return PAINTERS[".pdf"]


def _lines(facts: Facts, indent: str) -> Iterator[str]:
    wide = max(
        (
            len(_safe(key))
            for key, value in facts.items()
            if not isinstance(value, dict)
        ),
        default=0,
    )
    for key, value in facts.items():
        if isinstance(value, dict):
            yield f"{indent}{_safe(key)}"
            yield from _lines(value, indent + "  ")
        else:
            yield f"{indent}{_safe(key):<{wide}}  {in_words(value)}"


def in_words(value: Any) -> str:
    """A fact on one line, short and safe on a terminal."""
    if isinstance(value, list):
        return (
            ", ".join([*map(in_words, value[:12]), *(["…"] if len(value) > 12 else [])])
            or "none"
        )
    if isinstance(value, dict):
        return "; ".join(
            f"{_safe(key)} {in_words(inner)}" for key, inner in value.items()
        )
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return _safe(text if len(text) <= 200 else text[:199] + "…")


def _safe(text: str) -> str:
    """Text that is safe on a terminal: what cannot be printed is escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def _simple(value: Any, where: str) -> Any:
    """The value as JSON's kinds: dict, list, str, int, float, bool, None."""
    if isinstance(value, str | int | float) and hasattr(value, "item"):
        return value.item()
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Site):
        return str(value)
    if hasattr(value, "to_json"):
        value = value.to_json()
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {
            str(key): _simple(inner, f"{where}.{key}") for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_simple(inner, where) for inner in value]
    if hasattr(value, "tolist") and not isinstance(
        plain := value.tolist(), complex | bytes
    ):
        return _simple(plain, where)
    reason = f"{_safe(where)} holds {type(value).__name__}"
    raise StatesError(
        "Cannot write this as JSON",
        reason,
        "Give text, numbers, lists and mappings of them.",
    )


def _tag(value: Any) -> Any:
    """The same for strict JSON: no bare NaN, and no lone surrogates, which JSON would
    join into one character.
    """
    if isinstance(value, float) and str(value) in _NOT_FINITE:
        return {"$float": _NOT_FINITE[str(value)]}
    if isinstance(value, str) and _SURROGATE.search(value):
        return {
            "$text": base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()
        }
    if isinstance(value, dict):
        if any(key.startswith("$") or _SURROGATE.search(key) for key in value):
            return {"$dict": [[_tag(key), _tag(inner)] for key, inner in value.items()]}
        return {key: _tag(inner) for key, inner in value.items()}
    return [_tag(inner) for inner in value] if isinstance(value, list) else value


def _untag(value: Any) -> Any:
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


def _dtype(array: "np.ndarray[Any, Any]", name: str) -> str:
    """The dtype's name, and `str` for every way of holding text."""
    if array.dtype.kind in "biuf" and array.dtype.itemsize <= 8:
        return str(array.dtype.name)
    if array.dtype.kind in "UT" or (array.dtype.kind == "O" and _only_text(array)):
        return "str"
    reason = f"{_safe(name)} is {array.dtype}"
    raise StatesError(
        "Cannot keep this data in a result",
        reason,
        "Give numbers of at most 64 bits, flags or text.",
    )


def _number_dtype(name: str) -> str:
    """Return the name of a dtype that a file may hold; others could ask for a gigabyte
    a number.
    """
    if name not in _NUMBERS:
        raise ValueError(f"its dtype is {name}")
    return name


def _only_text(array: "np.ndarray[Any, Any]") -> bool:
    return all(issubclass(kind, str) for kind in set(map(type, array.ravel().tolist())))


def _dtypes(data: "xarray.Dataset") -> dict[str, str]:
    return {
        str(name): _dtype(variable.to_numpy(), str(name))
        for name, variable in data.variables.items()
    }


def _header(result: Result) -> _Header:
    """Everything of a result but its numbers."""
    variables: dict[str, _Variable] = {
        str(name): {
            "dims": list(variable.dims),
            "shape": list(variable.shape),
            "dtype": _dtype(variable.to_numpy(), str(name)),
            "attrs": _tag(_simple(variable.attrs, f"{name}.attrs")),
            "coordinate": name in result.data.coords,
        }
        for name, variable in result.data.variables.items()
    }
    return {
        "format": _FORMAT,
        "kind": result.kind,
        "facts": _tag(result.facts),
        "source": _tag(result.source),
        "attrs": _tag(_simple(result.data.attrs, "attrs")),
        "variables": variables,
    }


def _restore(header: _Header, arrays: Mapping[str, "np.ndarray[Any, Any]"]) -> Result:
    import xarray

    if header["format"] != _FORMAT:
        raise ValueError(f"its format is {header['format']}")
    variables = {
        name: (
            variable["dims"],
            arrays[name].reshape(variable["shape"]),
            _untag(variable["attrs"]),
        )
        for name, variable in header["variables"].items()
    }
    coords = {
        name: variables.pop(name)
        for name, variable in header["variables"].items()
        if variable["coordinate"]
    }
    data = xarray.Dataset(variables, coords, _untag(header["attrs"]))
    return Result(
        header["kind"], data, _untag(header["facts"]), _untag(header["source"])
    )


def _write_json(result: Result, path: Path) -> None:
    header = _header(result)
    for name, variable in header["variables"].items():
        variable["values"] = _listed(result.data[name].to_numpy(), variable["dtype"])
    path.write_text(
        json.dumps({"seal": UNSEALED, **header}, indent=1, allow_nan=False), "ascii"
    )
    seal(path)


def _read_json(path: Path) -> Result:
    import numpy as np

    header = json.loads(path.read_text("utf-8"))
    arrays = {}
    for name, variable in header["variables"].items():
        flat = variable["values"]
        for _ in variable["shape"][1:]:
            flat = list(chain.from_iterable(flat))
        flat = flat if variable["shape"] else [flat]
        if variable["dtype"] == "str":
            arrays[name] = _objects([_untag(value) for value in flat])
        else:
            numbers = [float(x) if isinstance(x, str) else x for x in flat]
            arrays[name] = np.array(numbers, dtype=_number_dtype(variable["dtype"]))
    return _restore(header, arrays)


def _listed(array: "np.ndarray[Any, Any]", dtype: str) -> Any:
    """Nested lists for JSON: the shortest numbers that come back exactly, and words for
    what is not finite.
    """
    import numpy as np

    if dtype == "str":
        flat = [_tag(value) for value in array.flat]
    elif array.dtype.kind == "f":
        # 0.1, not 0.10000000149011612.
        short = np.array([float(str(value)) for value in array.flat])
        exact = array.astype(np.float64).ravel()
        kept = np.where(
            short.astype(array.dtype) == array.ravel(), short, exact
        ).tolist()
        flat = [_NOT_FINITE.get(str(value), value) for value in kept]
    else:
        return array.tolist()
    return _objects(flat).reshape(array.shape).tolist()


def _objects(values: list[Any]) -> "np.ndarray[Any, Any]":
    import numpy as np

    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _write_netcdf(result: Result, path: Path) -> None:
    header = _header(result)
    data = result.data.drop_attrs().assign_attrs(
        kind=_escape(result.kind), format=_FORMAT
    )
    for name, variable in header["variables"].items():
        array = data[name].to_numpy()
        if variable["dtype"] == "str":
            array = _objects([_escape(value) for value in array.flat]).reshape(
                array.shape
            )
        elif variable["dtype"] in ("float16", "bool"):
            array = array.astype(
                "float32" if variable["dtype"] == "float16" else "uint8"
            )
        data[name] = (variable["dims"], array)
        words = {
            key: variable["attrs"][key]
            for key in ("units", "long_name")
            if key in variable["attrs"]
        }
        data[name].attrs.update(
            {key: _escape(str(word)[:1_000]) for key, word in words.items()}
        )
    data[_HEADER] = json.dumps(header, allow_nan=False)
    # The bytes are made in memory: on a full disk HDF5 ends the process when it closes
    # a file that it could not write.
    content = io.BytesIO()
    data.to_netcdf(
        content,
        engine="h5netcdf",
        encoding={name: {"_FillValue": None} for name in data.variables},
    )
    # HDF5 does not read behind its end.
    path.write_bytes(content.getvalue() + UNSEALED.encode())
    seal(path)


def _read_netcdf(path: Path) -> Result:
    with NetcdfFile(path.read_bytes()) as file:
        header = json.loads(file.read(_HEADER).item())
        arrays = {}
        for name, variable in header["variables"].items():
            array = file.read(name)
            if variable["dtype"] == "str":
                arrays[name] = _objects([_unescape(value) for value in array.flat])
            else:
                arrays[name] = array.astype(_number_dtype(variable["dtype"]))
    return _restore(header, arrays)


def _escape(text: str) -> str:
    """Text for netCDF, which ends at a NUL and takes no lone surrogates."""
    text = text.replace("\\", r"\\").replace("\0", r"\0")
    return _SURROGATE.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _unescape(text: str) -> str:
    named = {"\\": "\\", "0": "\0"}
    return _ESCAPED.sub(
        lambda match: named.get(match[1]) or chr(int(match[1][1:], 16)), text
    )


def _write_csv(result: Result, path: Path) -> None:
    """One row for each number, with its labels; a label that does not apply is empty."""
    import pandas

    data = result.data
    labels = [
        *map(str, data.sizes),
        *(
            str(name)
            for name in data.coords
            if name not in data.sizes and data[name].dims
        ),
    ]
    with path.open(
        "w", encoding="utf-8", errors="backslashreplace", newline=""
    ) as file:
        head = pandas.DataFrame(
            columns=[_cell(name) for name in (*labels, "variable", "value")]
        )
        head.to_csv(file, index=False, lineterminator="\r\n")
        for name, variable in data.data_vars.items():
            cells = [
                *(_spread(data[label], variable) for label in labels),
                str(name),
                variable.to_numpy().ravel(),
            ]
            frame = pandas.DataFrame(dict(enumerate(cells)), index=range(variable.size))
            for column in frame.select_dtypes(exclude="number"):
                frame[column] = frame[column].map(_cell)
            frame.to_csv(
                file, index=False, header=False, na_rep="nan", lineterminator="\r\n"
            )


def _spread(label: "xarray.DataArray", variable: "xarray.DataArray") -> Any:
    """What a label is at every number of a variable; empty where it does not apply."""
    if not set(label.dims) <= set(variable.dims):
        return ""
    return label.broadcast_like(variable).transpose(*variable.dims).to_numpy().ravel()


def _cell(value: Any) -> Any:
    """Text as text: a spreadsheet must not take it for a formula, nor stop at a NUL."""
    if not isinstance(value, str):
        return value
    text = value.replace("\0", r"\x00")
    return f"'{text}" if _FORMULA.match(text) else text


_WRITERS: dict[str, Renderer] = {
    ".json": _write_json,
    ".csv": _write_csv,
    ".nc": _write_netcdf,
}
_READERS: dict[str, Callable[[Path], Result]] = {
    ".json": _read_json,
    ".nc": _read_netcdf,
}
