"""verify and gc: every byte of a store read and compared, and what nobody needs
removed.

What is damaged can be computed again: `discard_damaged` removes the records of damaged
units, so that the job that made the store has them to do again.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, Error
from hiddenscope.files import to_disk
from hiddenscope.store import records
from hiddenscope.store.commits import Commit, Complete, committed, completed
from hiddenscope.store.folder import FOLDERS, StoreFolder, remove_unheld
from hiddenscope.store.plan import StorePlan, UnitDigest
from hiddenscope.store.shard import layout_of, sequence_tensors
from hiddenscope.store.shard_reader import ShardReader
from hiddenscope.store.writer import (
    read_beside,
    read_copies,
    read_plan,
    read_sequences,
    read_strings,
)

Value = TypeVar("Value")


@dataclass(frozen=True)
class StoreDamage:
    """Something in a store that is damaged or missing: the unit that it belongs to, if
    it is of one, and what it is.

    `recomputable` says whether the same job, run again, puts it right.
    """

    unit: str | None
    what: str
    recomputable: bool = True

    def __str__(self) -> str:
        return f"unit {self.unit}: {self.what}" if self.unit else self.what


@dataclass(frozen=True)
class Verification:
    """What verify found: every damage, the units that are not committed, and files that
    no record names.
    """

    damages: tuple[StoreDamage, ...]
    pending: tuple[str, ...]
    unneeded: tuple[str, ...]
    complete: bool

    @property
    def intact(self) -> bool:
        """Whether nothing is damaged or missing. Units that are not committed yet are
        not missing.
        """
        return not self.damages

    @property
    def units(self) -> tuple[str, ...]:
        """The units that are damaged or missing, each once."""
        return tuple(sorted({damage.unit for damage in self.damages if damage.unit}))


@dataclass(frozen=True)
class Removed:
    """What gc removed, and whether a process at work kept it from looking at shards."""

    files: tuple[str, ...]
    freed: int
    busy: bool


@checked
def verify(path: str | os.PathLike[str]) -> Verification:
    """Read every byte of a store and compare it with its checksum.

    >>> import tempfile
    >>> from hiddenscope.store import StorePlan, StoreSequence, create
    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 4}, "float32")
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = create(path, plan, [[StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)]])
    ...     found = verify(path)
    >>> found.intact, found.pending
    (True, ('000000',))
    """
    folder = StoreFolder(path)
    folder.check()
    found = _Found(folder)
    plan = found.attempt(None, read_plan, folder)
    if plan is None:
        return Verification(tuple(found.damages), (), (), False)
    for read in (read_copies, read_strings):
        found.attempt(None, read, folder, plan)
    for unit in plan.units:
        found.attempt(unit.name, read_beside, folder, unit.name, unit.sha256)
    complete = found.attempt(None, completed, folder, plan)
    recorded = folder.recorded()
    commits: dict[str, Commit] = {}
    with progress.track("Verifying", total=len(plan.units)) as advance:
        for unit in plan.units:
            commit = _verify_unit(
                found, plan, unit, recorded, complete, read_shards=True
            )
            commits |= {unit.name: commit} if commit else {}
            advance(1)
    for name in sorted(recorded - set(plan.by_name)):
        found.damages.append(
            StoreDamage(
                None, f"commits/{name}.json is of a unit that is not in the plan", False
            )
        )
    found.damages += [
        StoreDamage(None, f"{name} is a link", False) for name in _links(folder)
    ]
    pending = (
        () if complete else tuple(name for name in plan.by_name if name not in recorded)
    )
    unneeded = folder.stored() - {commit.sha256 for commit in commits.values()}
    names = sorted(f"data/{sha256}.safetensors" for sha256 in unneeded)
    return Verification(
        tuple(found.damages), pending, tuple(names), complete is not None
    )


@checked
def gc(path: str | os.PathLike[str], *, damaged: bool = False) -> Removed:
    """Remove what killed processes left: temporary files that nobody holds, and shards
    that no record names.

    With `damaged`, also the records of damaged units, so that they are computed anew
    when the job is run again.
    """
    folder = StoreFolder(path)
    folder.check()
    plan = read_plan(folder)
    names, freed = [], 0
    for leftover in folder.temporaries():
        size = _size(leftover)
        if remove_unheld(leftover):
            names.append(f"tmp/{leftover.name}")
            freed += size
    # A process that is between its two names holds it too.
    with folder.locked("data", wait=False) as free:
        if free:
            units = (
                _damaged_units(folder, plan, plan.units, read_shards=True)
                if damaged
                else []
            )
            wrong = bool(units) or (damaged and _complete_is_wrong(folder, plan))
            gone = _remove_records(folder, units) if wrong else []
            needed = {
                committed(folder, plan, unit).sha256 for unit in folder.recorded()
            }
            gone += [folder.data(sha256) for sha256 in sorted(folder.stored() - needed)]
            freed += sum(map(_size, gone))
            for file in gone:
                file.unlink(missing_ok=True)
            for name in ("data", "commits", "."):
                to_disk(folder.path / name)
            names += [str(file.relative_to(folder.path)) for file in gone]
    return Removed(tuple(names), freed, not free)


def _remove_records(folder: StoreFolder, units: Iterable[str]) -> list[Path]:
    """Remove the record of all records first, and then those of some units; their
    shards are unneeded then.
    """
    gone = [
        path
        for path in (folder.complete, *map(folder.record, units))
        if os.path.lexists(path)
    ]
    for path in gone:
        path.unlink()
    for name in (".", "commits"):
        to_disk(folder.path / name)
    return gone


@checked
def damaged_texts(path: str | os.PathLike[str]) -> list[str]:
    """The files of plan/ that are damaged or missing; with the plan they can be made
    again from the corpus.
    """
    folder = StoreFolder(path)
    plan, found = read_plan(folder), _Found(folder, Damaged)
    names = [
        name
        for unit, name, sha256 in _texts_of(plan)
        if found.attempt(unit, read_beside, folder, name, sha256) is None
    ]
    return [f"plan/{name}.jsonl" for name in names]


@checked
def discard_damaged(
    path: str | os.PathLike[str], *, read_shards: bool = True
) -> list[str]:
    """Remove the records of damaged units, so that they are pending and are computed
    again; the units by name.

    Without `read_shards`, only the records, and the length, header and table of
    checksums of each shard are read.
    """
    folder = StoreFolder(path)
    plan = read_plan(folder)
    units = _damaged_units(folder, plan, plan.units, read_shards=read_shards)
    if not units and not _complete_is_wrong(folder, plan):
        return []
    with folder.locked("data"):  # no other process commits, or tidies up, meanwhile
        # Which another job may have mended since.
        again = [unit for unit in plan.units if unit.name in units]
        units = _damaged_units(folder, plan, again, read_shards=read_shards)
        _remove_records(folder, units)
    return units


def _damaged_units(
    folder: StoreFolder,
    plan: StorePlan,
    units: Iterable[UnitDigest],
    *,
    read_shards: bool,
) -> list[str]:
    """The units whose record or shard is damaged; a unit without a record is pending."""
    found, recorded = _Found(folder, Damaged), folder.recorded()
    listed = list(units)
    with progress.track("Verifying", total=len(listed)) as advance:
        for unit in listed:
            _verify_unit(found, plan, unit, recorded, None, read_shards=read_shards)
            advance(1)
    return sorted({damage.unit for damage in found.damages if damage.unit})


def _complete_is_wrong(folder: StoreFolder, plan: StorePlan) -> bool:
    """Whether complete.json is damaged, or lists a unit that has no record, or another
    one.
    """
    try:
        complete = completed(folder, plan)
        return complete is not None and any(
            committed(folder, plan, unit).sha256 != sha256
            for unit, sha256 in complete.units.items()
        )
    except Damaged:
        return True


def _texts_of(plan: StorePlan) -> Iterator[tuple[str | None, str, str]]:
    """The files of plan/: the unit of each, if it is of one, its name and its hash."""
    yield None, "duplicates", plan.duplicates
    yield None, "strings", plan.strings
    yield from ((unit.name, unit.name, unit.sha256) for unit in plan.units)


def _verify_unit(
    found: "_Found",
    plan: StorePlan,
    unit: UnitDigest,
    recorded: set[str],
    complete: Complete | None,
    *,
    read_shards: bool,
) -> Commit | None:
    """Check one unit: its record and its shard."""
    name, folder = unit.name, found.folder
    if name not in recorded:
        if complete is not None:
            found.damages.append(StoreDamage(name, f"commits/{name}.json is missing"))
        return None
    commit = found.attempt(name, committed, folder, plan, name)
    if commit is None:
        return None
    found.attempt(name, _check_shard, folder, plan, commit, read_shards)
    if complete is not None and complete.units[name] != commit.sha256:
        found.damages.append(
            StoreDamage(name, "its record is not the one that complete.json lists")
        )
    return commit


def _check_shard(
    folder: StoreFolder, plan: StorePlan, commit: Commit, whole: bool
) -> None:
    """Check the length, header and table of checksums of a shard.

    With `whole` also every block, all of them together, and the texts, ids and spans
    against the plan.
    """
    layout = layout_of(plan, plan.digest, plan.by_name[commit.unit])
    reader = ShardReader(folder, commit, layout)
    try:
        reader.check_header()
        digest = hashlib.sha256()
        for piece in reader.pieces() if whole else ():
            digest.update(piece.data)
        reader.sequences()
        if whole:
            _compare_with_plan(folder, plan, reader)
    finally:
        reader.close()
    if whole and digest.hexdigest() != commit.sha256:
        reason = f"data/{commit.sha256}.safetensors is not the file that its name says"
        raise Damaged(f"Cannot read unit {commit.unit}", reason, records.VERIFY)


def _compare_with_plan(
    folder: StoreFolder, plan: StorePlan, reader: ShardReader
) -> None:
    """Compare what a shard says of its texts with the plan: whoever changed it may have
    made all checksums anew.
    """
    unit = plan.by_name[reader.commit.unit]
    try:
        planned = sequence_tensors(read_sequences(folder, unit), plan.every)
    except (
        Damaged
        # That file of the plan is damaged, and is named as such; the shard is not.
    ):
        return
    for name, expected in planned.items():
        if not np.array_equal(reader.read_all(name), expected):
            reason = (
                f"data/{reader.commit.sha256}.safetensors has other {name} than"
                f" plan/{unit.name}.jsonl"
            )
            raise Damaged(f"Cannot read unit {unit.name}", reason, records.VERIFY)


def _links(folder: StoreFolder) -> Iterator[str]:
    """Links inside a store, of whatever name."""
    for name in (".", *FOLDERS):
        with suppress(OSError), os.scandir(folder.path / name) as entries:
            yield from sorted(
                f"{name}/{entry.name}".removeprefix("./")
                for entry in entries
                if entry.is_symlink()
            )


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


class _Found:
    """What has been found so far. `kind` is what counts as a damage; any other error is
    raised.

    A disk that cannot be read just now is no reason to remove anything: there `kind` is
    Damaged.
    """

    def __init__(self, folder: StoreFolder, kind: type[Error] = Error) -> None:
        self.folder, self.kind, self.damages = folder, kind, list[StoreDamage]()

    def attempt(
        self, unit: str | None, read: Callable[..., Value], *given: Any
    ) -> Value | None:
        """What a function reads; None, and a damage more, where it cannot."""
        try:
            return read(*given)
        except self.kind as error:
            self.damages.append(StoreDamage(unit, error.reason))
            return None
