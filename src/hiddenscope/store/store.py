"""Store: the states of a corpus on disk, read like `States` without holding them.

A store shows the units that were committed when it was opened, and no others. Every
block is checked as it is read; a damaged block and a missing unit are errors.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope import states
from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, SiteError, StatesError, StoreError
from hiddenscope.sites import Site, SitePatterns, named_layer, summarise
from hiddenscope.states.arrays import Ints
from hiddenscope.states.tokens import Source, Tokens, terminal_safe
from hiddenscope.store import records
from hiddenscope.store.commits import Commit, committed, completed
from hiddenscope.store.export import ExportFormat, export_rows
from hiddenscope.store.folder import StoreFolder
from hiddenscope.store.plan import StorePlan
from hiddenscope.store.row_blocks import StoredRows
from hiddenscope.store.shard import layout_of
from hiddenscope.store.shard_reader import ShardReader
from hiddenscope.store.site_array import FEW, SiteArray, as_xarray
from hiddenscope.store.text_index import (
    PlannedSequences,
    TextIndex,
    index_texts,
    spread,
)
from hiddenscope.store.verify import gc, verify
from hiddenscope.store.writer import (
    read_copies,
    read_plan,
    read_sequences,
    read_strings,
)

if TYPE_CHECKING:
    import torch
    import xarray

# Shards that are kept open.
MOST_OPEN = 64
# At most so much of one site is read at a time.
BLOCK_BYTES = 64 * 2**20
BLOCK_ROWS = 65_536


@checked
def open(path: str | os.PathLike[str]) -> "Store":  # noqa: A001
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
    complete = completed(folder, plan)
    recorded = folder.recorded()
    unknown = recorded - set(plan.by_name)
    if unknown:
        reason = f"it has a record of unit {min(unknown)}, which is not in its plan"
        raise Damaged(f"Cannot open {folder.shown}", reason, records.VERIFY)
    commits = {unit: committed(folder, plan, unit) for unit in sorted(recorded)}
    if complete is not None:
        _check_complete(folder, complete.units, commits)
    return Store(_Shards(folder, plan, commits), complete is not None)


def _check_complete(
    folder: StoreFolder, units: Mapping[str, str], commits: dict[str, Commit]
) -> None:
    problem = f"Cannot open {folder.shown}"
    for unit, sha256 in units.items():
        commit = commits.get(unit)
        if commit is None:
            reason = f"the record of unit {unit} is missing"
            raise Damaged(problem, reason, records.VERIFY)
        if commit.sha256 != sha256:
            reason = (
                f"the record of unit {unit} is not the one that complete.json lists"
            )
            raise Damaged(problem, reason, records.VERIFY)


class _Shards:
    """The shards of the committed units, some of them open."""

    def __init__(
        self, folder: StoreFolder, plan: StorePlan, commits: dict[str, Commit]
    ) -> None:
        self.folder = folder
        self.plan = plan
        self.commits = commits
        self.digest = plan.digest
        self.units = tuple(plan.by_name[unit] for unit in sorted(commits))
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = Lock()

    def __getitem__(self, number: int) -> ShardReader:
        with self._lock:
            reader = self._open.pop(number, None)
            if reader is None:
                unit = self.units[number]
                layout = layout_of(self.plan, self.digest, unit)
                reader = ShardReader(self.folder, self.commits[unit.name], layout)
            self._open[number] = reader
            while len(self._open) > MOST_OPEN:
                # Dropped and not closed: another thread may still read from it.
                self._open.popitem(last=False)
            return reader

    def close(self) -> None:
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()

    def tensor(self, name: str) -> list[NDArray[Any]]:
        """Read a tensor of every unit."""
        return [self.read_all(number, name) for number in range(len(self.units))]

    def read_all(self, number: int, name: str) -> NDArray[Any]:
        """Read a tensor of one unit."""
        return self[number].read_all(name)

    def _sequence_tensors(self) -> Iterator[list[NDArray[np.int64]]]:
        """Yield texts, first positions and row offsets of each unit's sequences."""
        for number in range(len(self.units)):
            # Many at once, so that the disk can work on them side by side.
            if number % FEW == 0:
                for ahead in range(number, min(number + FEW, len(self.units))):
                    self[ahead].prefetch_index()
            yield self[number].sequences()

    @cached_property
    def copies(self) -> dict[int, int]:
        """Return which text each copy is a copy of."""
        return read_copies(self.folder, self.plan)

    @cached_property
    def strings(self) -> dict[int, str]:
        """Return the strings of token ids."""
        return read_strings(self.folder, self.plan)

    @cached_property
    def planned(self) -> PlannedSequences:
        """Return the sequences of all committed units."""
        parts: list[list[Ints]] = []
        for number, (texts, starts, offsets) in enumerate(self._sequence_tensors()):
            lengths = np.diff(offsets)
            if self.plan.pool is not None:
                lengths = np.ones_like(lengths)
            units = np.full(len(texts), number)
            firsts = np.cumsum(lengths) - lengths
            parts.append([texts, starts, units, firsts, lengths])
        nothing: list[list[Ints]] = [[np.empty(0, np.int64)] * 5]
        columns = zip(*(parts or nothing), strict=True)
        planned = PlannedSequences(*(_joined(column) for column in columns))
        text_steps = np.diff(planned.text)
        next_window = (text_steps == 0) & (np.diff(planned.start) > 0)
        in_order = ((text_steps > 0) | next_window).all()
        if not in_order or np.isin(planned.text, list(self.copies)).any():
            reason = (
                "a text is in two units that do not follow one another, or is a copy"
                " and has states of its own"
            )
            raise Damaged(f"Cannot read {self.folder.shown}", reason, records.VERIFY)
        return planned

    @cached_property
    def partial(self) -> list[int]:
        """Return texts that may have sequences in a unit that is not committed.

        They are the first and the last text of each such unit.
        """
        texts: set[int] = set()
        for unit in self.plan.units:
            if unit.name not in self.commits:
                sequences = read_sequences(self.folder, unit)
                texts |= {sequences[0].text, sequences[-1].text}
        return sorted(texts)


def _joined(parts: Sequence[NDArray[Any]]) -> Ints:
    return np.concatenate(parts).astype(np.int64)


@checked
class Store:
    """States on disk, with the `sites`, `tokens` and `blocks(site)` of all states.

    `texts` are the numbers, in the corpus, of the texts that are there: all of them in
    a store that is `complete`.
    """

    def __init__(
        self, shards: _Shards, complete: bool, part: TextIndex | None = None
    ) -> None:
        self._shards = shards
        self._part = part
        self.complete = complete
        self.plan = shards.plan
        self.sites = tuple(map(Site.parse, self.plan.sites))
        self.source = _source(self.plan)

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
        lengths: Ints = self._shards.planned.length[self._index.order]
        return lengths

    @cached_property
    def _index(self) -> TextIndex:
        if self._part is not None:
            return self._part
        shards = self._shards
        partial = [] if len(shards.units) == len(self.plan.units) else shards.partial
        return index_texts(shards.planned, shards.copies, partial)

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
        name = str(site)
        width = self.plan.widths[name]
        return SiteArray(self._shards, self._index, name, width, self.plan.dtype)

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
        part = self._index.part(number, self._shards.planned)
        return Store(self._shards, self.complete, part)

    @cached_property
    def tokens(self) -> Tokens:
        """Return the tokens, one row each; of pooled states, the texts or windows."""
        index = self._index
        planned = self._shards.planned
        starts = planned.start[index.order]
        lengths = planned.length[index.order]
        text = np.repeat(index.owner, lengths)
        if self.plan.pool is None:
            every = self.every
            # The first position of each window that is a multiple of `every`.
            firsts = -(-starts // every) * every
            places = spread(np.zeros_like(index.order), lengths)
            positions = np.repeat(firsts, lengths) + places * every
            ids = self._of_tokens("ids")
            spans = self._of_tokens("spans")
            known = self._shards.strings
            strings = tuple(known.get(token) or str(token) for token in ids.tolist())
        else:
            rows = len(index.order)
            positions = starts
            ids = np.full(rows, -1)
            spans = np.full((rows, 2), -1)
            strings = (f"({self.plan.pool})",) * rows
        texts = self._strings()
        return Tokens(texts, text, positions, ids, strings, spans, len(index.texts))

    def _of_tokens(self, name: str) -> NDArray[Any]:
        """Read a tensor with a row for each token, in the order of the texts."""
        index = self._index
        shards = self._shards
        if self._part is not None:
            parts = []
            for unit, first, count in index.runs(0, index.count):
                parts.append(shards[unit].rows(name, first, count))
            return np.concatenate(parts)
        parts = shards.tensor(name)
        if not parts:
            parts = [np.empty((0, 2) if name == "spans" else 0, np.int32)]
        bases = np.cumsum([0, *map(len, parts)])
        lengths = np.diff([*index.run_begin, index.count])
        rows = spread(bases[index.run_unit] + index.run_first, lengths)
        return np.concatenate(parts)[rows]

    def _strings(self) -> tuple[str, ...] | None:
        """Return the texts if they were stored, which is with their first sequences."""
        if not any(unit.text_bytes for unit in self.plan.units):
            return None
        index = self._index
        shards = self._shards
        planned = shards.planned
        firsts = index.order[np.searchsorted(index.owner, np.arange(len(index.texts)))]
        bases = np.searchsorted(planned.unit, np.arange(len(shards.units)))
        strings: dict[int, str] = {}
        wanted = np.unique(firsts)
        for unit in np.unique(planned.unit[wanted]).tolist():
            content = shards.read_all(unit, "strings")
            offsets = shards.read_all(unit, "strings.offsets")
            for number in wanted[planned.unit[wanted] == unit].tolist():
                place = number - int(bases[unit])
                encoded = content[offsets[place] : offsets[place + 1]]
                strings[number] = shards[unit].string(encoded)
        return tuple(strings[number] for number in firsts)

    def blocks(
        self, site: str | Site, rows: int | None = None
    ) -> "Iterator[torch.Tensor]":
        """Yield the rows of one site in order, in their own dtype, some at a time."""
        array = self[site]
        if rows is None:
            rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // array.row_bytes))
        for part in array.native_blocks(rows):
            yield self._tensor(part)

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
        path: str | os.PathLike[str],
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
        reader = StoredRows(self._shards, self._index, names)
        return export_rows(reader, Path(path), format, provenance)

    def _select_or_all(self, patterns: SitePatterns | None) -> tuple[Site, ...]:
        # The pattern "*" would leave out sites inside attention and the MLP.
        return self.sites if patterns is None else self._select(patterns)

    def _select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        owner = f"this store of {terminal_safe(self.source.model)}"
        return self.source.select_sites(patterns, self.sites, owner)


def _source(plan: StorePlan) -> Source:
    record = {"model": "unknown"}
    for name, value in plan.model.items():
        if name in Source.__dataclass_fields__:
            record[name] = value
    try:
        return Source.from_json(record)
    except (StatesError, TypeError) as error:
        raise StoreError(
            "Cannot read the plan of a store",
            str(error),
            "Give a plan as docs/store-format.md says.",
        ) from error
