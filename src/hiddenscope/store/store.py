"""Store: the states of a corpus on disk, read like `States` without holding them.

A store shows the units that were committed when it was opened, and no others. Every
block is checked as it is read; a damaged block and a missing unit are errors.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope import states
from hiddenscope.arguments import checked
from hiddenscope.errors import SiteError, StatesError, StoreError
from hiddenscope.files import PathLike
from hiddenscope.sites import Site, SitePatterns, named_layer, summarise
from hiddenscope.states.arrays import Ints
from hiddenscope.states.tokens import Source, Tokens, terminal_safe
from hiddenscope.store.export import ExportFormat, export_rows
from hiddenscope.store.folder import StoreFolder
from hiddenscope.store.plan import read_plan
from hiddenscope.store.records import check_complete, committed, completed
from hiddenscope.store.rows import Shards, SiteArray, TextIndex, as_xarray
from hiddenscope.store.verify import gc, verify

if TYPE_CHECKING:
    import torch
    import xarray


@checked
def open(path: PathLike) -> "Store":  # noqa: A001
    """Open the store in a folder, for reading.

    >>> import tempfile
    >>> from hiddenscope.store import StorePlan, StoreSequence, create
    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 4}, "float32")
    >>> with tempfile.TemporaryDirectory() as path:
    ...     text = StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)
    ...     writer = create(path, plan, [[text]])
    ...     _ = writer.commit("000000", {"layer.0": np.ones((2, 4), "float32")})
    ...     store = open(path)
    ...     store["layer.0"][1].tolist(), store.tokens.ids.tolist()
    ([1.0, 1.0, 1.0, 1.0], [5, 6])
    """
    folder = StoreFolder(path)
    folder.check()
    plan = read_plan(folder)
    # Read before the records, which are written before it: a store that completes in
    # between is then shown as incomplete, and never the other way round.
    complete = completed(folder, plan.digest, plan.by_name)
    recorded = folder.recorded()
    unknown = recorded - set(plan.by_name)
    if unknown:
        reason = f"it has a record of unit {min(unknown)}, which is not in its plan"
        raise folder.damaged(reason)
    commits = {unit: committed(folder, plan.digest, unit) for unit in recorded}
    check_complete(folder, complete or {}, commits)
    return Store(Shards(folder, plan, commits), complete is not None)


@checked
class Store:
    """States on disk, with the `sites`, `tokens` and `blocks(site)` of all states.

    `texts` are the numbers, in the corpus, of the texts that are there: all of them in
    a store that is `complete`.
    """

    def __init__(
        self, shards: Shards, complete: bool, part: TextIndex | None = None
    ) -> None:
        self._shards = shards
        self._part = part
        self.complete = complete
        self.plan = shards.plan
        self.sites = tuple(map(Site.parse, self.plan.sites))
        record = {"model": "unknown"}
        for name, value in self.plan.model.items():
            if name in Source.__dataclass_fields__:
                record[name] = value
        try:
            self.source = Source.from_json(record)
        except (StatesError, TypeError) as error:
            raise StoreError(
                "Cannot read the plan of a store",
                str(error),
                "Give a plan as docs/store-format.md says.",
            ) from error

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; what was read stays."""
        self._shards.close()

    verify = staticmethod(verify)
    gc = staticmethod(gc)

    def __repr__(self) -> str:
        rows = f"{self._index.count:,} rows of {len(self.texts):,} texts"
        parts = [f"{self.plan.dtype}: {len(self.sites)} sites x {rows}"]
        if self.every > 1:
            parts.append(f"every={self.every}")
        if self.complete:
            parts.append("complete")
        else:
            done = f"{len(self._shards.units):,} of {len(self.plan.units):,}"
            parts.append(f"{done} units are committed")
        title = f"Store of {terminal_safe(self.source.model)}, {', '.join(parts)}"
        return f"{title}\n  sites   {summarise(self.sites)}"

    @property
    def path(self) -> Path:
        """Return the folder."""
        return self._shards.folder.path

    @property
    def dtype(self) -> str:
        """Return the dtype of the states on disk."""
        return self.plan.dtype

    @property
    def pooled(self) -> str | None:
        """Return the pooling of each text (or window); None if every row is a token."""
        return self.plan.pool

    @property
    def every(self) -> int:
        """Return n, where the tokens at positions 0, n, 2n and so on are kept."""
        return self.plan.every

    @property
    def units(self) -> tuple[str, ...]:
        """Return the units that were committed when the store was opened."""
        return tuple(unit.name for unit in self._shards.units)

    @property
    def texts(self) -> Ints:
        """Return the numbers, in the corpus, of the texts that are there."""
        return self._index.texts

    @property
    def sequence_lengths(self) -> Ints:
        """Return the number of rows of every sequence that the model ran on.

        A sequence is a text, or one window of a long text.
        """
        return self._index.sequences.length

    @property
    def firsts(self) -> Ints:
        """Return the rows of the first tokens of texts; of pooled states there is none.

        >>> import tempfile
        >>> from hiddenscope.testing import tiny_store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = tiny_store(Path(folder))
        ...     len(open(folder).firsts)
        7
        """
        index = self._index
        begins = (index.sequences.start == 0) & (index.sequences.length > 0)
        if self.pooled is not None:
            begins[:] = False
        firsts: Ints = index.begins[begins]
        return firsts

    @property
    def _index(self) -> TextIndex:
        return self._part or self._shards.index

    def __len__(self) -> int:
        return self._index.count

    def __getitem__(self, site: str | Site | int) -> SiteArray:
        selected = self._select(named_layer(site))
        if len(selected) > 1:
            reason = f"it names {len(selected)} sites"
            raise SiteError(
                f"Cannot get the site {str(site)[:60]!r}", reason, "Name one."
            )
        return self._array(selected[0])

    def _array(self, site: Site) -> SiteArray:
        return SiteArray(self._shards, self._index, str(site))

    def of(self, text: int) -> "Store":
        """Return the states of one text, by its number in the corpus, from 0."""
        number = int(np.searchsorted(self.texts, text))
        if number == len(self.texts) or self.texts[number] != text:
            reason = f"there are {len(self.texts):,} texts"
            if not self.complete:
                reason = "its unit is not committed"
                count = self.plan.corpus.get("count")
                if isinstance(count, int):
                    reason += f", the corpus has {count:,}"
            raise StatesError(
                f"No text {text} in {self._shards.folder.shown}",
                reason,
                "`.texts` lists what is there.",
            )
        return Store(self._shards, self.complete, self._index.part(number))

    @cached_property
    def tokens(self) -> Tokens:
        """Return the tokens, one row each; of pooled states, the texts or windows."""
        index = self._index
        texts = None
        if self._shards.has_texts:
            firsts = index.sequences.take(index.firsts)
            places = list(
                zip(firsts.unit.tolist(), firsts.number.tolist(), strict=True)
            )
            text_of = self._shards.text_reader()
            # In the order of the units, of which only a few are held.
            by_place = {place: text_of(*place) for place in sorted(set(places))}
            texts = tuple(by_place[place] for place in places)
        return self._shards.tokens(index, np.arange(index.count), texts)

    def blocks(
        self, site: str | Site, rows: int | None = None
    ) -> "Iterator[torch.Tensor]":
        """Yield the rows of one site in order, in their own dtype, some at a time."""
        return map(self._tensor, self[site].native_blocks(rows))

    def rows(self, site: str | Site, numbers: Sequence[int] | Ints) -> "torch.Tensor":
        """Return some rows of one site, in their own dtype and in the order named."""
        array = self[site]
        rows = np.asarray(numbers)
        if rows.size and (rows.dtype.kind not in "iu" or rows.ndim != 1):
            reason = f"{rows.dtype} {list(rows.shape)} is not a list of row numbers"
            raise StatesError(
                f"Cannot take rows of {array!r}",
                reason,
                "Give integers; of a mask, np.flatnonzero(mask).",
            )
        return self._tensor(array.native(rows.astype(np.int64).reshape(-1)))

    def _tensor(self, native: NDArray[Any]) -> "torch.Tensor":
        import torch

        values = torch.from_numpy(native)
        # numpy has no bfloat16: it sees the bits.
        if self.plan.dtype == "bfloat16":
            return values.view(torch.bfloat16)
        return values

    def to_states(self, sites: SitePatterns | None = None) -> "states.States":
        """Read states into memory: of `.of(text)`, or of a small store.

        All stored sites are read, or `sites`, whatever their widths are.
        """
        import torch

        selected = self._select_or_all(sites)
        rows = [torch.cat(list(self.blocks(site))) for site in selected]
        values = states.stack_sites(selected, rows)
        return states.States(selected, values, self.tokens, self.source)

    def to_xarray(self, sites: SitePatterns | None = None) -> "xarray.DataArray":
        """Return a DataArray with dims site, token, width, read from disk as needed.

        It has all stored sites, or `sites`. They must be of one width.
        """
        selected = self._select_or_all(sites)
        arrays = [self._array(site) for site in selected]
        return as_xarray(arrays, selected, self.tokens, self.source)

    def export(
        self,
        path: PathLike,
        *,
        sites: SitePatterns | None = None,
        format: ExportFormat | None = None,  # noqa: A002
    ) -> str:
        """Write the rows in a format of other programs, and return the format's name.

        `format` is parquet, zarr, dataset (a folder that `datasets.load_from_disk`
        opens) or atlas (a Parquet file of one site that Embedding Atlas opens); without
        it, the suffix .parquet or .zarr decides. Only a few megabytes are held at a
        time. The path must be new, and appears only when it is whole. bfloat16 is
        widened to float32, which is exact.

        >>> import tempfile
        >>> from hiddenscope.testing import tiny_store
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = tiny_store(Path(folder, "states"))
        ...     open(f"{folder}/states").export(f"{folder}/states.parquet")
        'parquet'
        """
        selected = self._select_or_all(sites)
        names = tuple(map(str, selected))
        provenance = {
            "source": self.source.to_json(),
            "plan": self.plan.digest,
            "dtype": self.plan.dtype,
            "pool": self.plan.pool,
            "every": self.plan.every,
            "complete": self.complete,
            "texts": len(self.texts),
            "rows": len(self),
        }
        return export_rows(
            self._shards, self._index, names, Path(path), format, provenance
        )

    def _select_or_all(self, patterns: SitePatterns | None) -> tuple[Site, ...]:
        # The pattern "*" would leave out sites inside attention and the MLP.
        return self.sites if patterns is None else self._select(patterns)

    def _select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        owner = f"this store of {terminal_safe(self.source.model)}"
        return self.source.select_sites(patterns, self.sites, owner)
