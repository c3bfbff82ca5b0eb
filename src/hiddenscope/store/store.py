"""Store: the states of a corpus on disk, read like `States` without holding them.

A store is opened as it is: it shows the units that were committed then, and no others.
What is read is checked, block by block; a block that is damaged and a unit that is
missing are errors.
"""

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hiddenscope import states
from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, SiteError, StatesError, StoreError
from hiddenscope.sites import Site, SitePatterns, named_layer, select, summarise
from hiddenscope.states.tokens import Source, Tokens, plain
from hiddenscope.store import records
from hiddenscope.store.commits import Commit, committed, completed
from hiddenscope.store.folder import StoreFolder
from hiddenscope.store.labelled import labelled
from hiddenscope.store.plan import StorePlan
from hiddenscope.store.shard import layout_of
from hiddenscope.store.shard_reader import ShardReader
from hiddenscope.store.site_array import FEW, SiteArray
from hiddenscope.store.text_index import (
    Ints,
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

OPEN = 64  # shards that are kept open
AT_ONCE = 64 * 2**20  # bytes of one site that are read at a time
ROWS = 65_536  # rows of one site that are read at a time, at most


@checked
def open(path: str | os.PathLike[str]) -> "Store":  # noqa: A001
    """Open the store in a folder, for reading.

    >>> import tempfile
    >>> from hiddenscope.store import StorePlan, StoreSequence, create
    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 4}, "float32")
    >>> with tempfile.TemporaryDirectory() as path:
    ...     writer = create(path, plan, [[StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)]])
    ...     _ = writer.commit("000000", {"layer.0": np.ones((2, 4), "float32")})
    ...     store = open(path)
    ...     store["layer.0"].shape, store["layer.0"][1].tolist(), store.tokens.ids.tolist()
    ((2, 4), [1.0, 1.0, 1.0, 1.0], [5, 6])
    """
    folder = StoreFolder(path)
    folder.check()
    plan = read_plan(folder)
    complete = completed(folder, plan)  # before the records: they are written before it
    unknown = folder.recorded() - set(plan.by_name)
    if unknown:
        reason = f"it has a record of unit {min(unknown)}, which is not in its plan"
        raise Damaged(f"Cannot open {folder.shown}", reason, records.VERIFY)
    commits = {
        unit: committed(folder, plan, unit) for unit in sorted(folder.recorded())
    }
    if complete is not None:
        _check_complete(folder, complete.units, commits)
    return Store(_Shards(folder, plan, commits), complete is not None)


def _check_complete(
    folder: StoreFolder, units: Any, commits: dict[str, Commit]
) -> None:
    for unit, sha256 in units.items():
        found = commits.get(unit)
        if found is None or found.sha256 != sha256:
            what = (
                "is missing"
                if found is None
                else "is not the one that complete.json lists"
            )
            raise Damaged(
                f"Cannot open {folder.shown}",
                f"the record of unit {unit} {what}",
                records.VERIFY,
            )


class _Shards:
    """The shards of the committed units, some of them open."""

    def __init__(
        self, folder: StoreFolder, plan: StorePlan, commits: dict[str, Commit]
    ) -> None:
        self.folder, self.plan, self.commits = folder, plan, commits
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
            while len(self._open) > OPEN:
                # It is closed when nobody reads from it any more.
                self._open.popitem(last=False)
            return reader

    def close(self) -> None:
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()

    def tensor(self, name: str) -> list[NDArray[Any]]:
        """A tensor of every unit, whole."""
        return [self.read_all(number, name) for number in range(len(self.units))]

    def read_all(self, number: int, name: str) -> NDArray[Any]:
        """A tensor of a unit, whole."""
        return self[number].read_all(name)

    def _sequence_tensors(self) -> Iterator[list[NDArray[np.int64]]]:
        """What the sequences of every unit are: their texts, their first positions, and
        the offsets of their rows.
        """
        for number in range(len(self.units)):
            if number % FEW == 0:  # so that the disk has many of them to do at once
                for ahead in range(number, min(number + FEW, len(self.units))):
                    self[ahead].prefetch_index()
            yield self[number].sequences()

    @cached_property
    def copies(self) -> dict[int, int]:
        """Texts that are copies, and of which."""
        return read_copies(self.folder, self.plan)

    @cached_property
    def strings(self) -> dict[int, str]:
        """How token ids read."""
        return read_strings(self.folder, self.plan)

    @cached_property
    def planned(self) -> PlannedSequences:
        """The sequences of all committed units."""
        texts, starts, offsets = (
            zip(*self._sequence_tensors(), strict=True) if self.units else ((), (), ())
        )
        tokens = [np.diff(some) for some in offsets]
        lengths = (
            tokens
            if self.plan.pool is None
            else [np.ones_like(some) for some in tokens]
        )
        firsts = [np.cumsum(some) - some for some in lengths]
        units = [np.full(len(some), number) for number, some in enumerate(texts)]
        planned = PlannedSequences(
            *(_joined(parts) for parts in (texts, starts, units, firsts, lengths))
        )
        text, start = np.diff(planned.text), np.diff(planned.start)
        copied = np.isin(planned.text, list(self.copies))
        if not ((text > 0) | ((text == 0) & (start > 0))).all() or copied.any():
            reason = (
                "a text is in two units that do not follow one another, or is a copy"
                " and has states of its own"
            )
            raise Damaged(f"Cannot read {self.folder.shown}", reason, records.VERIFY)
        return planned

    @cached_property
    def partial(self) -> list[int]:
        """Texts that may have sequences in a unit that is not committed: the first and
        last of each such unit.
        """
        missing = [unit for unit in self.plan.units if unit.name not in self.commits]
        ends = [
            (some[0].text, some[-1].text)
            for some in (read_sequences(self.folder, unit) for unit in missing)
        ]
        return sorted({text for pair in ends for text in pair})


def _joined(parts: Sequence[NDArray[Any]]) -> Ints:
    return np.concatenate([np.empty(0, np.int64), *parts]).astype(np.int64)


@checked
class Store:
    """States on disk: `sites`, `tokens` and `blocks(site)` as every analysis reads
    them, and arrays by site.

    `texts` are the numbers, in the corpus, of the texts that are there: all of them in
    a store that is `complete`.
    """

    def __init__(
        self, shards: _Shards, complete: bool, part: TextIndex | None = None
    ) -> None:
        self._shards, self._part = shards, part
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
        done, planned = len(self._shards.units), len(self.plan.units)
        state = (
            "complete"
            if self.complete
            else f"{done:,} of {planned:,} units are committed"
        )
        shape = (
            f"{len(self.sites)} sites x {self._index.count:,} rows of"
            f" {len(self.texts):,} texts"
        )
        some = f", every={self.every}" if self.every > 1 else ""
        title = (
            f"Store of {plain(self.source.model)}, {self.plan.dtype}: {shape}{some},"
            f" {state}"
        )
        return f"{title}\n  sites   {summarise(self.sites)}"

    @property
    def path(self) -> Path:
        """The folder."""
        return self._shards.folder.path

    @property
    def dtype(self) -> str:
        """The dtype in which the states lie on disk."""
        return self.plan.dtype

    @property
    def pooled(self) -> str | None:
        """How the tokens of each text (or window) became one row; None where every row
        is a token.
        """
        return self.plan.pool

    @property
    def every(self) -> int:
        """Of a text the tokens at positions 0, n, 2n and so on are kept: n, and so 1
        where all are.
        """
        return self.plan.every

    @property
    def units(self) -> tuple[str, ...]:
        """The units that were committed when the store was opened."""
        return tuple(unit.name for unit in self._shards.units)

    @property
    def texts(self) -> Ints:
        """The numbers, in the corpus, of the texts that are there."""
        return self._index.texts

    @property
    def sequence_lengths(self) -> Ints:
        """The number of rows of every sequence that the model was given: a text, or one
        window of a long text.
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
        chosen = self._choose(named_layer(site))
        if len(chosen) > 1:
            reason = f"it names {len(chosen)} sites"
            raise SiteError(
                f"Cannot get the site {str(site)[:60]!r}", reason, "Name one."
            )
        return self._array(chosen[0])

    def _array(self, site: Site) -> SiteArray:
        return SiteArray(
            self._shards,
            self._index,
            str(site),
            self.plan.widths[str(site)],
            self.plan.dtype,
        )

    def of(self, text: int) -> "Store":
        """The states of one text, by its text index: its number in the corpus, from 0."""
        number = int(np.searchsorted(self.texts, text))
        if number == len(self.texts) or self.texts[number] != text:
            known = self.plan.corpus.get("count")
            reason = (
                "its unit is not committed"
                if not self.complete
                else f"there are {len(self.texts):,} texts"
            )
            reason = (
                f"{reason}, the corpus has {known:,}"
                if isinstance(known, int) and not self.complete
                else reason
            )
            raise StatesError(
                f"No text {text} in {self._shards.folder.shown}",
                reason,
                "`.texts` lists what is there.",
            )
        return Store(
            self._shards, self.complete, self._index.part(number, self._shards.planned)
        )

    @cached_property
    def tokens(self) -> Tokens:
        """The tokens, one row each; where states are pooled, each row is a text, or a
        window of one.
        """
        index, planned, shards = self._index, self._shards.planned, self._shards
        text = np.repeat(index.owner, planned.length[index.order])
        if self.plan.pool is None:
            every, starts = self.every, planned.start[index.order]
            within = spread(np.zeros_like(index.order), planned.length[index.order])
            positions = (
                np.repeat(-(-starts // every) * every, planned.length[index.order])
                + within * every
            )
            ids, spans = self._of_tokens("ids"), self._of_tokens("spans")
            strings = tuple(
                shards.strings.get(token) or str(token) for token in ids.tolist()
            )
        else:
            positions, ids = planned.start[index.order], np.full(len(index.order), -1)
            spans, strings = (
                np.full((len(index.order), 2), -1),
                (f"({self.plan.pool})",) * len(index.order),
            )
        return Tokens(
            self._strings(), text, positions, ids, strings, spans, len(index.texts)
        )

    def _of_tokens(self, name: str) -> NDArray[Any]:
        """A tensor with a row for each token, in the order of the texts."""
        index, shards = self._index, self._shards
        if self._part is not None:
            runs = index.runs(0, index.count)
            return np.concatenate(
                [shards[unit].rows(name, first, count) for unit, first, count in runs]
            )
        parts = shards.tensor(name) or [
            np.empty((0, 2) if name == "spans" else 0, np.int32)
        ]
        bases = np.cumsum([0, *map(len, parts)])
        lengths = np.diff([*index.run_begin, index.count])
        return np.concatenate(parts)[
            spread(bases[index.run_unit] + index.run_first, lengths)
        ]

    def _strings(self) -> tuple[str, ...] | None:
        """The texts, where they were kept: each is on the first of its sequences."""
        if not any(unit.text_bytes for unit in self.plan.units):
            return None
        index, planned = self._index, self._shards.planned
        firsts = index.order[np.searchsorted(index.owner, np.arange(len(index.texts)))]
        bases = np.searchsorted(planned.unit, np.arange(len(self._shards.units)))
        strings: dict[int, str] = {}
        wanted = np.unique(firsts)
        for unit in np.unique(planned.unit[wanted]).tolist():
            numbers = wanted[planned.unit[wanted] == unit]
            content, offsets = (
                self._shards.read_all(unit, name)
                for name in ("strings", "strings.offsets")
            )
            for number, local in zip(
                numbers.tolist(), (numbers - bases[unit]).tolist(), strict=True
            ):
                strings[number] = self._shards[unit].string(
                    content[offsets[local] : offsets[local + 1]]
                )
        return tuple(strings[number] for number in firsts)

    def blocks(
        self, site: str | Site, rows: int | None = None
    ) -> "Iterator[torch.Tensor]":
        """The rows of one site in order, in their own dtype, some at a time: 64 MiB, or
        as many as are asked for.
        """
        array = self[site]
        for part in array.native_blocks(
            max(1, min(ROWS, AT_ONCE // array.row_bytes)) if rows is None else rows
        ):
            yield self._tensor(part)

    def rows(self, site: str | Site, numbers: Sequence[int] | Ints) -> "torch.Tensor":
        """Some rows of one site, in their own dtype and in the order in which they are
        asked for.
        """
        array, rows = self[site], np.asarray(numbers)
        if rows.size and (rows.dtype.kind not in "iu" or rows.ndim != 1):
            reason = f"{rows.dtype} {list(rows.shape)} is no list of row numbers"
            raise StatesError(
                f"Cannot take rows of {array!r}",
                reason,
                "Give integers; of a mask, np.flatnonzero(mask).",
            )
        return self._tensor(array.native(rows.astype(np.int64).reshape(-1)))

    def _tensor(self, native: NDArray[Any]) -> "torch.Tensor":
        import torch

        bits = torch.from_numpy(native)
        return bits.view(torch.bfloat16) if self.plan.dtype == "bfloat16" else bits

    def to_states(self, sites: SitePatterns = "*") -> "states.States":
        """The states in memory: of `.of(text)`, or of a store that is small."""
        import torch

        chosen = self._choose(sites)
        values = torch.stack([torch.cat(list(self.blocks(site))) for site in chosen])
        return states.States(chosen, values, self.tokens, self.source)

    def to_xarray(self, sites: SitePatterns = "*") -> "xarray.DataArray":
        """A DataArray with dims site, token, width, which reads from the disk what is
        asked of it and no more.
        """
        chosen = self._choose(sites)
        return labelled(
            [self._array(site) for site in chosen], chosen, self.tokens, self.source
        )

    def _choose(self, patterns: SitePatterns) -> tuple[Site, ...]:
        named = [Site.parse(name) if name else None for name in self.source.reported]
        reported = {self.sites[0].stack: named} if named else None
        owner = f"this store of {plain(self.source.model)}"
        depth, final = self.source.depth, self.source.final
        return select(
            patterns,
            self.sites,
            owner=owner,
            depth=depth,
            final=final,
            reported=reported,
        )


def _source(plan: StorePlan) -> Source:
    known = {
        name: value
        for name, value in plan.model.items()
        if name in Source.__dataclass_fields__
    }
    try:
        return Source.from_json({"model": "unknown"} | known)
    except (StatesError, TypeError) as error:
        raise StoreError(
            "Cannot read the plan of a store",
            str(error),
            "Give a plan as docs/store-format.md says.",
        ) from error
