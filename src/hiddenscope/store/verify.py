"""Verification of a store, and removal of what is damaged or not needed.

`verify` reads and compares every byte. `gc` removes what killed processes left.
`discard_damaged` removes the records of damaged units, so that the job that made the
store computes them again.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
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
def verify(path: str | os.PathLike[str]) -> Verification:
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
    copies = report.attempt(None, read_copies, folder, plan) or {}
    report.attempt(None, read_strings, folder, plan)
    last = (-1, 0)
    for unit in plan.units:
        for sequence in report.attempt(unit.name, read_sequences, folder, unit) or ():
            place = (sequence.text, sequence.start)
            if place <= last or sequence.text in copies:
                what = f"plan/{unit.name}.jsonl has text {sequence.text} out of order"
                report.add(None, f"{what}, or it is a copy", recomputable=False)
            last = place
    complete = report.attempt(None, completed, folder, plan)
    recorded = folder.recorded()
    needed: set[str] = set()
    with progress.track("Verifying", total=len(plan.units)) as advance:
        for unit in plan.units:
            commit = _verify_unit(
                report, plan, unit, recorded, complete, read_shards=True
            )
            if commit is not None:
                needed.add(commit.sha256)
            advance(1)
    for name in sorted(recorded - set(plan.by_name)):
        what = f"commits/{name}.json is of a unit that is not in the plan"
        report.add(None, what, recomputable=False)
    for name in _links(folder):
        report.add(None, f"{name} is a link", recomputable=False)
    pending: tuple[str, ...] = ()
    if complete is None:
        pending = tuple(name for name in plan.by_name if name not in recorded)
    unneeded = sorted(folder.stored() - needed)
    return Verification(
        tuple(report.damages),
        pending,
        tuple(f"data/{sha256}.safetensors" for sha256 in unneeded),
        complete is not None,
    )


@checked
def gc(path: str | os.PathLike[str], *, damaged: bool = False) -> Removed:
    """Remove what killed processes left: unlocked temporary files, unnamed shards.

    With `damaged`, also the records of damaged units, so that they are computed again
    when the job runs again.
    """
    folder = StoreFolder(path)
    folder.check()
    plan = read_plan(folder)
    names = []
    freed = 0
    for leftover in folder.temporaries():
        size = _size(leftover)
        if remove_unheld(leftover):
            names.append(f"tmp/{leftover.name}")
            freed += size
    # A process whose shard has no record yet holds this lock too.
    with folder.locked("data", wait=False) as is_free:
        if is_free:
            removed = _remove_damaged(folder, plan) if damaged else []
            commits = [committed(folder, plan, unit) for unit in folder.recorded()]
            unneeded = folder.stored() - {commit.sha256 for commit in commits}
            removed += [folder.data(sha256) for sha256 in sorted(unneeded)]
            freed += sum(map(_size, removed))
            for file in removed:
                file.unlink(missing_ok=True)
            for name in ("data", "commits", "."):
                to_disk(folder.path / name)
            names += [str(file.relative_to(folder.path)) for file in removed]
    return Removed(tuple(names), freed, not is_free)


def _remove_damaged(folder: StoreFolder, plan: StorePlan) -> list[Path]:
    units = _damaged_units(folder, plan, plan.units, read_shards=True)
    if not units and not _complete_is_wrong(folder, plan):
        return []
    return _remove_records(folder, units)


def _remove_records(folder: StoreFolder, units: Iterable[str]) -> list[Path]:
    """Remove the record of all records, and then those of some units.

    No record names the shards of these units any more.
    """
    records_of_units = [folder.record(unit) for unit in units]
    removed = []
    for path in (folder.complete, *records_of_units):
        if os.path.lexists(path):
            path.unlink()
            removed.append(path)
    for name in (".", "commits"):
        to_disk(folder.path / name)
    return removed


@checked
def damaged_texts(path: str | os.PathLike[str]) -> list[str]:
    """Return the files of plan/ that are damaged or missing.

    With the plan they can be made again from the corpus.
    """
    folder = StoreFolder(path)
    plan = read_plan(folder)
    report = _DamageReport(folder, Damaged)
    digests = {"duplicates": plan.duplicates, "strings": plan.strings}
    digests |= {unit.name: unit.sha256 for unit in plan.units}
    damaged = []
    for name, sha256 in digests.items():
        if report.attempt(None, read_beside, folder, name, sha256) is None:
            damaged.append(f"plan/{name}.jsonl")
    return damaged


@checked
def discard_damaged(
    path: str | os.PathLike[str], *, read_shards: bool = True
) -> list[str]:
    """Remove the records of damaged units, which are pending then; return their names.

    Without `read_shards`, only the records, and the length, header and table of
    checksums of each shard are read.
    """
    folder = StoreFolder(path)
    plan = read_plan(folder)
    units = _damaged_units(folder, plan, plan.units, read_shards=read_shards)
    if not units and not _complete_is_wrong(folder, plan):
        return []
    # Locked, so that no other process commits or runs gc meanwhile.
    with folder.locked("data"):
        # Another job may have repaired some of them since.
        suspects = [unit for unit in plan.units if unit.name in units]
        units = _damaged_units(folder, plan, suspects, read_shards=read_shards)
        _remove_records(folder, units)
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
    recorded = folder.recorded()
    with progress.track("Verifying", total=len(units)) as advance:
        for unit in units:
            _verify_unit(report, plan, unit, recorded, None, read_shards=read_shards)
            advance(1)
    return sorted({damage.unit for damage in report.damages if damage.unit})


def _complete_is_wrong(folder: StoreFolder, plan: StorePlan) -> bool:
    """Tell whether complete.json is damaged, or lists a record that is not there."""
    try:
        complete = completed(folder, plan)
        if complete is None:
            return False
        for unit, sha256 in complete.units.items():
            if committed(folder, plan, unit).sha256 != sha256:
                return True
    except Damaged:
        return True
    return False


def _verify_unit(
    report: "_DamageReport",
    plan: StorePlan,
    unit: UnitDigest,
    recorded: set[str],
    complete: Complete | None,
    *,
    read_shards: bool,
) -> Commit | None:
    """Check the record and the shard of a unit, and return its commit if it has one."""
    name = unit.name
    folder = report.folder
    if name not in recorded:
        if complete is not None:
            report.add(name, f"commits/{name}.json is missing")
        return None
    commit = report.attempt(name, committed, folder, plan, name)
    if commit is None:
        return None
    report.attempt(name, _check_shard, folder, plan, commit, read_shards)
    if complete is not None and complete.units[name] != commit.sha256:
        report.add(name, "its record is not the one that complete.json lists")
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
        if whole:
            for piece in reader.pieces():
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
    """Compare the texts, ids and spans of a shard with the plan.

    Whoever changed a shard may have made all its checksums again.
    """
    unit = plan.by_name[reader.commit.unit]
    try:
        planned = sequence_tensors(read_sequences(folder, unit), plan.every)
    except Damaged:
        # That file of the plan is damaged, and is reported as such; the shard is not.
        return
    for name, expected in planned.items():
        if not np.array_equal(reader.read_all(name), expected):
            reason = (
                f"data/{reader.commit.sha256}.safetensors has other {name} than"
                f" plan/{unit.name}.jsonl"
            )
            raise Damaged(f"Cannot read unit {unit.name}", reason, records.VERIFY)


def _links(folder: StoreFolder) -> Iterator[str]:
    """Yield the links inside a store, of whatever name."""
    for name in (".", *FOLDERS):
        with suppress(OSError), os.scandir(folder.path / name) as entries:
            links = sorted(entry.name for entry in entries if entry.is_symlink())
            for link in links:
                yield f"{name}/{link}".removeprefix("./")


def _size(path: Path) -> int:
    try:
        return path.lstat().st_size
    except OSError:
        return 0


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
