"""Verification of a store, and removal of what is damaged or not needed.

`verify` reads and compares every byte. `gc` removes what killed processes left.
`discard_damaged` removes the records of damaged units, so that the job that made the
store computes them again.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, Error
from hiddenscope.files import PathLike, to_disk
from hiddenscope.store.folder import FOLDERS, StoreFolder
from hiddenscope.store.plan import (
    StorePlan,
    UnitDigest,
    read_copies,
    read_plan,
    read_sequences,
    read_strings,
)
from hiddenscope.store.records import (
    Commit,
    check_complete,
    committed,
    completed,
    read_beside,
)
from hiddenscope.store.rows import Shards
from hiddenscope.store.shard import ShardReader, layout_of, sequence_tensors

Value = TypeVar("Value")


@dataclass(frozen=True)
class StoreDamage:
    """Something in a store that is damaged or missing, and its unit if it has one.

    `recomputable` says whether the same job, run again, repairs it.
    """

    unit: str | None
    what: str
    recomputable: bool = True

    def __str__(self) -> str:
        return f"unit {self.unit}: {self.what}" if self.unit else self.what


@dataclass(frozen=True)
class Verification:
    """The damages of a store, its pending units, and files that no record names."""

    damages: tuple[StoreDamage, ...]
    pending: tuple[str, ...]
    unneeded: tuple[str, ...]
    complete: bool

    @property
    def intact(self) -> bool:
        """Tell whether nothing is damaged or missing; pending units are not."""
        return not self.damages

    @property
    def units(self) -> tuple[str, ...]:
        """Return the units that are damaged or missing, each once."""
        return tuple(sorted({damage.unit for damage in self.damages if damage.unit}))


@dataclass(frozen=True)
class Removed:
    """The files that gc removed; `busy` if a running job kept it from the shards."""

    files: tuple[str, ...]
    freed: int
    busy: bool


@checked
def verify(path: PathLike) -> Verification:
    """Read every byte of a store and compare it with its checksum.

    >>> import tempfile
    >>> from hiddenscope.store import StorePlan, StoreSequence, create
    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 4}, "float32")
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = create(path, plan, [[StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)]])
    ...     verification = verify(path)
    >>> verification.intact, verification.pending
    (True, ('000000',))
    """
    folder = StoreFolder(path)
    folder.check()
    report = _DamageReport(folder)
    plan = report.attempt(None, read_plan, folder)
    if plan is None:
        return Verification(tuple(report.damages), (), (), False)
    report.attempt(None, read_copies, folder, plan)
    report.attempt(None, read_strings, folder, plan)
    for unit in plan.units:
        report.attempt(unit.name, read_sequences, folder, unit)
    complete = report.attempt(None, completed, folder, plan.digest, plan.by_name)
    recorded = folder.recorded()
    commits = report.units(plan, plan.units, read_shards=True)
    for name, sha256 in (complete or {}).items():
        if name not in recorded:
            report.add(name, f"commits/{name}.json is missing")
        elif name in commits and commits[name].sha256 != sha256:
            report.add(name, "its record is not the one that complete.json lists")
    if not report.damages:
        # Whether the texts of all units together are in the order of the corpus.
        try:
            Shards(folder, plan, commits).sequences()
        except Error as error:
            report.add(None, error.reason, recomputable=False)
    for name in sorted(recorded - set(plan.by_name)):
        what = f"commits/{name}.json is of a unit that is not in the plan"
        report.add(None, what, recomputable=False)
    for name in (".", *FOLDERS):
        with suppress(OSError), os.scandir(folder.path / name) as entries:
            links = sorted(entry.name for entry in entries if entry.is_symlink())
            for link in links:
                what = f"{name}/{link} is a link".removeprefix("./")
                report.add(None, what, recomputable=False)
    pending: tuple[str, ...] = ()
    if complete is None:
        pending = tuple(name for name in plan.by_name if name not in recorded)
    unneeded = folder.stored() - {commit.sha256 for commit in commits.values()}
    return Verification(
        tuple(report.damages),
        pending,
        tuple(f"data/{sha256}.safetensors" for sha256 in sorted(unneeded)),
        complete is not None,
    )


@checked
def gc(path: PathLike, *, damaged: bool = False) -> Removed:
    """Remove what killed processes left: unlocked temporary files, unnamed shards.

    With `damaged`, also the records of damaged units, so that they are computed again
    when the job runs again.
    """
    folder = StoreFolder(path)
    folder.check()
    plan = read_plan(folder)
    sizes = {}
    for name, size in folder.remove_leftovers().items():
        sizes[f"tmp/{name}"] = size
    # A process whose shard has no record yet holds this lock too.
    with folder.locked("data", wait=False) as is_free:
        if is_free:
            if damaged:
                units = _damaged_units(folder, plan, plan.units, read_shards=True)
                sizes |= _remove_records(folder, plan, units)
            recorded = folder.recorded()
            commits = [committed(folder, plan.digest, unit) for unit in recorded]
            unneeded = folder.stored() - {commit.sha256 for commit in commits}
            for file in sorted(map(folder.data, unneeded)):
                sizes[f"data/{file.name}"] = file.lstat().st_size
                file.unlink()
            to_disk(folder.path / "data")
    return Removed(tuple(sizes), sum(sizes.values()), not is_free)


@checked
def damaged_texts(path: PathLike) -> list[str]:
    """Return the files of plan/ that are damaged or missing.

    With the plan they can be made again from the corpus.
    """
    folder = StoreFolder(path)
    plan = read_plan(folder)
    digests = {"duplicates": plan.duplicates, "strings": plan.strings}
    digests |= {unit.name: unit.sha256 for unit in plan.units}
    damaged = []
    for name, sha256 in digests.items():
        try:
            read_beside(folder, name, sha256)
        except Damaged:
            damaged.append(f"plan/{name}.jsonl")
    return damaged


@checked
def discard_damaged(path: PathLike, *, read_shards: bool = True) -> list[str]:
    """Remove the records of damaged units, which are pending then; return their names.

    Without `read_shards`, only the records, and the length, header and table of
    checksums of each shard are read.
    """
    folder = StoreFolder(path)
    plan = read_plan(folder)
    units = _damaged_units(folder, plan, plan.units, read_shards=read_shards)
    # Locked, so that no other process commits or runs gc meanwhile.
    with folder.locked("data"):
        if units:
            # Another job may have repaired some of them since.
            suspects = [plan.by_name[unit] for unit in units]
            units = _damaged_units(folder, plan, suspects, read_shards=read_shards)
        _remove_records(folder, plan, units)
    return units


def _damaged_units(
    folder: StoreFolder,
    plan: StorePlan,
    units: Sequence[UnitDigest],
    *,
    read_shards: bool,
) -> list[str]:
    """Return the units whose record or shard is damaged; one without is pending."""
    report = _DamageReport(folder, Damaged)
    report.units(plan, units, read_shards=read_shards)
    return sorted({damage.unit for damage in report.damages if damage.unit})


def _remove_records(
    folder: StoreFolder, plan: StorePlan, units: Sequence[str]
) -> dict[str, int]:
    """Remove the record of all records, and then those of some units.

    No record names the shards of these units any more. Where no units are named, and
    the record of all records lists those that are there, it stays.
    """
    sizes: dict[str, int] = {}
    if not units:
        with suppress(Damaged):
            complete = completed(folder, plan.digest, plan.by_name) or {}
            commits = {unit: committed(folder, plan.digest, unit) for unit in complete}
            check_complete(folder, complete, commits)
            return sizes
    for path in (folder.complete, *map(folder.record, units)):
        if os.path.lexists(path):
            sizes[str(path.relative_to(folder.path))] = path.lstat().st_size
            path.unlink()
    to_disk(folder.path)
    to_disk(folder.path / "commits")
    return sizes


def _verify_shard(
    folder: StoreFolder, plan: StorePlan, commit: Commit, whole: bool
) -> None:
    """Check the length, header and table of checksums of a shard.

    With `whole` also every block, all of them together, and the texts, ids and spans
    against the plan: whoever changed a shard may have made all its checksums again.
    """
    unit = plan.by_name[commit.unit]
    name = f"data/{commit.sha256}.safetensors"
    layout = layout_of(plan, unit)
    with closing(ShardReader(folder, commit, layout)) as reader:
        # These are read after the table of checksums and the header.
        reader.sequences()
        if not whole:
            return
        digest = hashlib.sha256()
        for piece in reader.pieces():
            digest.update(piece.data)
        if digest.hexdigest() != commit.sha256:
            raise folder.damaged(f"{name} is not the file that its name says")
        try:
            planned = sequence_tensors(read_sequences(folder, unit), plan.every)
        except Damaged:
            # That file of the plan is damaged, and is reported as such; the shard is
            # not.
            return
        for tensor, expected in planned.items():
            if not np.array_equal(reader.read_all(tensor), expected):
                what = f"{name} has other {tensor} than plan/{unit.name}.jsonl"
                raise folder.damaged(what)


class _DamageReport:
    """The damages so far. Errors of `kind` count as damages, any other is raised.

    Before something is removed, `kind` is Damaged: a disk that cannot be read just now
    is not a reason to remove a record.
    """

    def __init__(self, folder: StoreFolder, kind: type[Error] = Error) -> None:
        self.folder = folder
        self.kind = kind
        self.damages: list[StoreDamage] = []

    def add(self, unit: str | None, what: str, *, recomputable: bool = True) -> None:
        self.damages.append(StoreDamage(unit, what, recomputable))

    def attempt(
        self, unit: str | None, read: Callable[..., Value], *arguments: Any
    ) -> Value | None:
        """Return what a function reads; report a damage and return None if it fails."""
        try:
            return read(*arguments)
        except self.kind as error:
            self.add(unit, error.reason)
            return None

    def units(
        self, plan: StorePlan, units: Sequence[UnitDigest], *, read_shards: bool
    ) -> dict[str, Commit]:
        """Check the records and the shards of units; return the records that there are.

        A unit without a record is pending, and not damaged.
        """
        folder = self.folder
        recorded = folder.recorded()
        commits = {}
        with progress.track("Verifying", total=len(units)) as advance:
            for name in [unit.name for unit in units]:
                advance(1)
                if name not in recorded:
                    continue
                commit = self.attempt(name, committed, folder, plan.digest, name)
                if commit is not None:
                    commits[name] = commit
                    self.attempt(name, _verify_shard, folder, plan, commit, read_shards)
        return commits
