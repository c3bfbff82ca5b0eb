"""Result: what every analysis returns.

Its story is told by its analysis (`results.story`), and drawn by `views`.

>>> import xarray
>>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])})
>>> facts = {"largest": 2.5, "at": "layer.1"}
>>> print(Result("sizes", norms, facts, {"model": "toy"}).summary())
sizes of toy
  largest  2.5
  at       layer.1
"""

import json
import re
import tempfile
import webbrowser
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    NamedTuple,
    Protocol,
    TypeAlias,
)

from hiddenscope.arguments import checked, shown
from hiddenscope.catalog import ANALYSIS, STORIES
from hiddenscope.errors import ArgumentError, FileError, StatesError
from hiddenscope.files import PathLike, check_seal, printable, replacing
from hiddenscope.results.export import (
    READERS,
    WRITERS,
    check_data,
    dtype_names,
    tag,
    to_plain,
)
from hiddenscope.results.report import Facts, Report
from hiddenscope.results.sentences import fact_lines
from hiddenscope.results.story import Table, findings_of, tables_of

if TYPE_CHECKING:
    import numpy as np
    import pandas
    import xarray
    from matplotlib.figure import Figure

FIGURES = (".pdf", ".png", ".svg")

Width: TypeAlias = Literal["", "column", "page"]
"""The width of a figure: that of a column or page of a paper, or "" for its own."""


class HasJson(Protocol):
    """A value with a JSON form, such as the `Source` of states."""

    def to_json(self) -> dict[str, Any]:
        """Return the value as JSON keeps it."""


class Look(NamedTuple):
    """The view that a figure shows, the measure of a grid, and the width."""

    view: str = ""
    measure: str = ""
    width: Width = ""


@checked
@dataclass(frozen=True, eq=False, repr=False, init=False)
class Result:
    """One type for every analysis: its `kind`, `data` (labelled arrays), `facts` (the
    findings) and `source`.

    `facts` and `source` are kept as JSON keeps them: tuples become lists, numpy's
    numbers Python's, and a `Source` the mapping that its `to_json()` gives; a `Site` is
    kept as its name.

    >>> import xarray
    >>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])})
    >>> Result("profile", norms, {"largest": 2.5}, {"model": "toy"})
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
        facts: Facts | Report,
        source: Mapping[str, Any] | HasJson,
    ) -> None:
        # Known by its attributes: importing this package must not import xarray.
        if not hasattr(data, "data_vars") or not hasattr(data, "indexes"):
            raise ArgumentError(
                "Cannot make a result",
                f"data must be an xarray.Dataset, got {shown(data)}",
                "Give data as documented.",
            )
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "data", data)
        object.__setattr__(self, "facts", to_plain(facts, "facts"))
        object.__setattr__(self, "source", to_plain(source, "source"))
        # Data that no file can hold is refused now, not when it is saved.
        check_data(data)

    def __repr__(self) -> str:
        variables = []
        for name, variable in self.data.items():
            sizes = [f"{dim} {size}" for dim, size in variable.sizes.items()]
            variables.append(f"{name}[{', '.join(sizes)}]")
        facts = "1 fact" if len(self.facts) == 1 else f"{len(self.facts)} facts"
        if not variables:
            return f"Result({self.title}, {facts})"
        return f"Result({self.title}: {', '.join(variables)}, {facts})"

    def __str__(self) -> str:
        return self.summary()

    @property
    def title(self) -> str:
        """Return the heading and the model as one line that is safe on a terminal."""
        analysis = ANALYSIS.get(self.kind)
        heading = f"{printable(self.kind)} of"
        if analysis is not None and analysis.heading:
            heading = analysis.heading
        model = self.source.get("model")
        if isinstance(model, str):
            return f"{heading} {printable(model)}"
        # Without a model, drop the preposition that ends the heading, if any.
        return heading.rsplit(" ", 1)[0]

    def summary(self) -> str:
        """Describe the result in sentences, or its facts line by line where its kind
        has no sentences. Safe on a terminal.
        """
        if self.kind in STORIES:
            lines = [f"  {printable(sentence, None)}" for sentence in findings_of(self)]
        else:
            lines = list(fact_lines(self.facts, "  "))
        return "\n".join([self.title, *lines])

    @property
    def tables(self) -> list[Table]:
        """Return what a terminal prints beneath the summary."""
        return tables_of(self)

    def __getitem__(self, name: str) -> "xarray.DataArray":
        """Return a variable whose tokens are labelled by their strings.

        >>> import xarray
        >>> strings = {"site": ["layer.0"], "string": ("token", ["The", " cat"])}
        >>> norms = xarray.Dataset({"norm": (("site", "token"), [[1.0, 2.5]])}, strings)
        >>> norm = Result("profile", norms, {}, {})["norm"]
        >>> float(norm.sel(site="layer.0", token=" cat"))
        2.5
        """
        if name not in self.data:
            names = list(self)
            near = get_close_matches(str(name), names, 1)
            remedy = f"Did you mean {near[0]!r}?" if near else "Choose one of these."
            raise StatesError(
                f"No {shown(name)} in the {self.title}",
                f"it has {', '.join(names) or 'none'}",
                remedy,
            )
        variable = self.data[name]
        strings = {}
        for dim in map(str, variable.dims):
            token_strings = self._token_strings(dim)
            if token_strings is not None:
                strings[dim] = (dim, token_strings)
        return variable.assign_coords(strings)

    def _token_strings(self, dim: str) -> "np.ndarray[Any, Any] | None":
        """Return the strings of the tokens along a dimension, if the data has them.

        A `source_token` without strings takes those of `token` if the lengths agree.
        """
        if not dim.endswith("token"):
            return None
        for name in (f"{dim.removesuffix('token')}string", "string"):
            if name in self.data.coords:
                strings = self.data[name].to_numpy()
                return strings if strings.shape == (self.data.sizes[dim],) else None
        return None

    def __iter__(self) -> Iterator[str]:
        return map(str, self.data)

    def __contains__(self, name: object) -> bool:
        return name in self.data

    def to_pandas(self, name: str = "") -> "pandas.DataFrame":
        """Return one variable as a table (two dimensions: rows by columns).

        Without a name, return every variable with the dimensions of the first as a
        column, in long form.

        >>> import xarray
        >>> strings = {"site": ["layer.0"], "string": ("token", ["The", " cat"])}
        >>> norms = xarray.Dataset({"norm": (("site", "token"), [[1.0, 2.5]])}, strings)
        >>> table = Result("profile", norms, {}, {}).to_pandas("norm")
        >>> print(table)  # doctest: +NORMALIZE_WHITESPACE
        token    The   cat
        site
        layer.0  1.0   2.5
        """
        import pandas

        if not len(self.data):
            raise StatesError(
                f"Cannot make a table of the {self.title}",
                "it has no variables",
                "Read its facts.",
            )
        if name:
            columns = {name: self[name]}
        else:
            dims = self.data[next(iter(self))].dims
            columns = {key: self[key] for key in self if self.data[key].dims == dims}
        first = next(iter(columns.values()))
        labels = [pandas.Index(first[dim].values, name=dim) for dim in first.dims]
        if name and first.ndim == 2:
            return pandas.DataFrame(first.values, *labels)
        values = {key: variable.values.ravel() for key, variable in columns.items()}
        if first.ndim > 1:
            return pandas.DataFrame(values, pandas.MultiIndex.from_product(labels))
        return pandas.DataFrame(values, labels[0] if labels else None)

    def equals(self, other: "Result") -> bool:
        """Tell whether everything is the same: kind, facts, source, and the data with
        its dtypes and attributes.
        """
        # NaN is not equal to itself, but its text is.
        mine, theirs = (
            json.dumps([r.kind, tag(r.facts), tag(r.source)], sort_keys=True)
            for r in (self, other)
        )
        return (
            mine == theirs
            and dtype_names(self.data) == dtype_names(other.data)
            and self.data.identical(other.data)
        )

    def save(
        self,
        path: PathLike,
        *,
        view: str = "",
        measure: str = "",
        width: Width = "",
    ) -> None:
        """Write a file, whole or not at all, in the format that the suffix names.

        `.html` is one page that works offline. `.png`, `.svg` and `.pdf` are figures
        for print: the main view, or the one that `view` names (`result.views` lists
        them; "all" is every view, in a PDF one on each page), with the `measure` of a
        grid or the large head of patterns ("layer.3.attn.head.5", "weighted", or both),
        as wide as the "column" or the "page" of a paper (3.3 and 6.9 inches).
        `.json` and `.nc` come back exactly with `Result.load`. `.csv` is one row a
        number, for other programs: text that a spreadsheet would take for a formula
        gets a leading apostrophe.

        >>> import tempfile, xarray
        >>> norms = xarray.Dataset({"norm": ("site", [1.0, 2.5])})
        >>> result = Result("profile", norms, {"largest": 2.5}, {})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result.save(f"{folder}/norms.nc")
        ...     Result.load(f"{folder}/norms.nc").equals(result)
        True
        """
        suffix = Path(path).suffix.lower()
        look = Look(view, measure, width)
        problem = f"Cannot save a result as {printable(path)}"
        formats = {*WRITERS, ".html", *FIGURES}
        if suffix not in formats:
            raise FileError(
                problem,
                f"the formats are {' '.join(sorted(formats))}",
                "Give the path one of these suffixes.",
            )
        if any(look) and suffix not in FIGURES:
            raise FileError(
                problem,
                "view, measure and width are for figures",
                f"Leave them out, or save as {' '.join(FIGURES)}.",
            )
        with replacing(path) as fresh:
            if suffix in FIGURES:
                fresh.write_bytes(_views().figure_bytes(self, suffix, look))
            elif suffix == ".html":
                _views().write_page(self, fresh)
            else:
                WRITERS[suffix](self, fresh)

    @classmethod
    def load(cls, path: PathLike) -> "Result":
        """Read what `save` wrote as `.json` or `.nc`."""
        problem = f"Cannot read a result from {printable(path)}"
        read = READERS.get(Path(path).suffix.lower())
        if read is None:
            reason = "only .json and .nc can be read back"
            remedy = "Give the path of a file that .save() wrote."
            raise FileError(problem, reason, remedy)
        check_seal(path, problem)
        try:
            return cls(*read(Path(path)))
        except MemoryError:
            raise
        except Exception as error:
            # What a file holds may fail in every library that reads it.
            message = printable(str(error))
            raise FileError(
                problem,
                f"it is damaged or of another kind ({message})",
                "Save the result again.",
            ) from error

    @property
    def views(self) -> dict[str, str]:
        """Return the names of the views, the main one first, each with its title."""
        return {name: view.title for name, view in _views().named_views(self).items()}

    def figure(
        self, view: str = "", *, measure: str = "", width: Width = ""
    ) -> "Figure":
        """Draw one view as a matplotlib Figure, to change and save as you like; the
        options are those of `save`.
        """
        figure: Figure = _views().figure_of(self, Look(view, measure, width))
        return figure

    def show(self) -> Path:
        """Open the page in a browser, and return the path of its file, which stays."""
        name = re.sub("[^a-z0-9]+", "-", self.kind.lower())
        path = Path(tempfile.mkdtemp(prefix="hiddenscope-"), f"{name}.html")
        self.save(path)
        if not webbrowser.open(path.as_uri()):
            raise FileError(
                f"Cannot show the {self.title}",
                "no browser could be started",
                f"Open {path} in one.",
            )
        return path

    def _repr_mimebundle_(
        self,
        include: Collection[str] | None = None,
        exclude: Collection[str] | None = None,
    ) -> dict[str, str]:
        """Return what a notebook shows: the page, the figure where no script runs, and
        the findings where there is only text.
        """
        bundle = {"text/plain": self.summary()}
        displays = {
            "image/png": _views().encoded_figure,
            "text/html": _views().framed_page,
        }
        for media_type, display in displays.items():
            left_out = media_type in (exclude or ())
            if left_out or (include and media_type not in include):
                continue
            try:
                bundle[media_type] = display(self)
            except StatesError:
                # The result holds nothing that can be drawn.
                return {"text/plain": bundle["text/plain"]}
        return bundle


def to_bytes(result: Result, suffix: str) -> bytes:
    """Return what `save` writes as `.json` or `.nc`.

    >>> import xarray
    >>> to_bytes(Result("profile", xarray.Dataset(), {}, {}), ".json")[:1]
    b'{'
    """
    with tempfile.TemporaryDirectory(prefix="hiddenscope-") as folder:
        path = Path(folder, f"result{suffix}")
        WRITERS[suffix](result, path)
        return path.read_bytes()


def _views() -> Any:
    """Import what draws results, which takes long and stands above this room."""
    return import_module("hiddenscope.views.render")
