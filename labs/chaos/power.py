"""Power loss: what a disk may hold when the machine goes off at any instant, made from
a log of a job's own calls.

A killed process loses nothing that it wrote; a machine that goes off loses whatever was
not brought to the disk by `fsync`. So a job runs once while every call that changes a
file or a folder is logged, with the content of each file at its `fsync`. Then, for
every point of that log, folders are made as a disk might hold them: the content of a
file is that of its last `fsync`, or nothing, or zeros of the right length; the names in
a folder are those of its last `fsync`, or all, or some of those that came later. This
is what ALICE (Pillai et al., OSDI 2014) does for the calls of databases.
"""

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from hiddenscope.store import open as open_store
from hiddenscope.testing.stores import tiny_store, tiny_values
from labs.chaos import memory_folder
from labs.chaos.flips import intact, readable

Names: TypeAlias = dict[str, int]  # the names in a folder, and the inode of each
# Which names of a folder are on the disk.
Keeps: TypeAlias = Literal["synced", "all", "some"]
Lost: TypeAlias = Literal["empty", "zeros"]  # what a file holds that was never synced
CALLS = (
    "fsync",
    "fdatasync",
    "replace",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
    "open",
)


@dataclass
class Disk:
    """Files and folders by their inodes: as the processes see them, and as the disk is
    known to hold them.
    """

    root: int
    names: dict[int, Names] = field(default_factory=dict)  # of each folder
    synced_names: dict[int, Names] = field(default_factory=dict)
    # Of each file at its last fsync.
    contents: dict[int, bytes] = field(default_factory=dict)
    # Of each file when it was last seen.
    sizes: dict[int, int] = field(default_factory=dict)

    def copy(self) -> "Disk":
        """The same now, whatever happens later."""
        names, synced = (
            {inode: dict(own) for inode, own in some.items()}
            for some in (self.names, self.synced_names)
        )
        return Disk(self.root, names, synced, dict(self.contents), dict(self.sizes))

    def write(
        self, folder: Path, keeps: Keeps, lost: Lost, chance: random.Random
    ) -> None:
        """Make a folder as the disk might hold it."""
        self._write(folder, self.root, keeps, lost, chance)

    def _write(
        self, path: Path, inode: int, keeps: Keeps, lost: Lost, chance: random.Random
    ) -> None:
        if inode not in self.names:
            unsynced = b"" if lost == "empty" else bytes(self.sizes.get(inode, 0))
            path.write_bytes(self.contents.get(inode, unsynced))
            return
        path.mkdir()
        synced, now = self.synced_names.get(inode, {}), self.names[inode]
        chosen = synced if keeps == "synced" else now
        if keeps == "some":
            both = synced | now
            chosen = {
                name: both[name]
                for name in both
                if synced.get(name) == now.get(name) or chance.random() < 0.5
            }
        for name, below in chosen.items():
            self._write(path / name, below, keeps, lost, chance)


class Log:
    """Follows the calls of a job below a folder, and keeps the disk after each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.disk = Disk(folder.stat().st_ino, {folder.stat().st_ino: {}})
        # A descriptor of every inode: one that is removed is not used again then.
        self._open: dict[int, int] = {}
        self._opening = os.open
        self.points: list[tuple[str, Disk, frozenset[str]]] = []
        # The units of which the job was told that they are committed.
        self.committed: set[str] = set()

    def look(self) -> None:
        """See what names there are: files may be made by calls that are not followed."""
        for place, folders, files in os.walk(self.folder):
            found = {name: os.stat(Path(place, name)) for name in (*folders, *files)}
            self.disk.names[os.stat(place).st_ino] = {
                name: own.st_ino for name, own in found.items()
            }
            self.disk.sizes |= {
                found[name].st_ino: found[name].st_size for name in files
            }
            for name, own in found.items():
                if own.st_ino not in self._open:
                    self._open[own.st_ino] = self._opening(
                        Path(place, name), os.O_RDONLY
                    )

    def synced(self, descriptor: int) -> None:
        """A file or a folder has been brought to the disk."""
        inode = os.fstat(descriptor).st_ino
        if inode in self.disk.names:
            self.disk.synced_names[inode] = dict(self.disk.names[inode])
        else:
            self.disk.contents[inode] = Path(f"/proc/self/fd/{descriptor}").read_bytes()

    def close(self) -> None:
        """Let the inodes go."""
        for descriptor in self._open.values():
            os.close(descriptor)

    def point(self, name: str) -> None:
        """Keep the disk as it is now: the power may go here."""
        self.points.append((name, self.disk.copy(), frozenset(self.committed)))


@contextmanager
def logged(folder: Path) -> Iterator[Log]:
    """Follow what the body does below a folder."""
    before: dict[str, Callable[..., Any]] = {
        name: getattr(os, name) for name in CALLS if hasattr(os, name)
    }
    log = Log(folder)

    def follow(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = before[name](*args, **kwargs)
            log.look()
            if name in ("fsync", "fdatasync"):
                log.synced(args[0])
            if name != "open" or args[1] & os.O_CREAT:
                log.point(name)
            return made

        return call

    for name in before:
        setattr(os, name, follow(name))
    try:
        yield log
    finally:
        for name, function in before.items():
            setattr(os, name, function)
        log.close()


def log_of_a_job(folder: Path) -> Log:
    """The log of a job that makes a small store in a folder, unit by unit."""
    folder.mkdir()
    with logged(folder) as log:
        writer = tiny_store(folder / "store", units=[])
        for unit in writer.pending():
            writer.commit(unit, tiny_values(writer, unit))
            log.committed.add(unit)
            log.point("committed")
        writer.complete()
        log.committed.add("complete")
        log.point("completed")
    return log


def faults(
    path: Path, committed: frozenset[str], sound: dict[str, bytes]
) -> Iterator[str]:
    """What is wrong with a store after the power went: units that are lost, values that
    are wrong, a job that fails.
    """
    if (path / "plan.json").exists():
        if not (intact(path) and readable(path)):
            yield "it is not intact"
            return
        store = open_store(path)
        if missing := committed - {
            *store.units,
            *(["complete"] if store.complete else []),
        }:
            yield f"{', '.join(sorted(missing))} was committed and is lost"
    elif committed:
        yield "it has no plan"
    tiny_store(path)
    found = {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }
    if found != sound:
        yield "it is another store after the job was run again"


def power_losses(folder: Path, count: int, seed: int = 0) -> tuple[int, int, list[str]]:
    """Let the power go at points of a job, all of them in turn: how often, how many
    points there are, what is wrong.
    """
    chance, wrong = random.Random(seed), list[str]()
    log = log_of_a_job(folder / "job")
    store = folder / "job/store"
    sound = {
        str(file.relative_to(store)): file.read_bytes()
        for file in sorted(store.rglob("*"))
        if file.is_file()
    }
    kinds: list[tuple[Keeps, Lost]] = [
        ("synced", "empty"),
        ("all", "zeros"),
        ("all", "empty"),
        ("some", "zeros"),
    ]
    for number in range(count):
        name, disk, committed = log.points[number % len(log.points)]
        keeps, lost = kinds[number // len(log.points) % len(kinds)]
        disk.write(folder / "after", keeps, lost, chance)
        found = list(faults(folder / "after/store", committed, sound))
        wrong += [f"after {name} ({keeps} names, {lost}): {fault}" for fault in found]
        shutil.rmtree(folder / "after")
    return count, len(log.points), wrong


def run(count: int = 600) -> list[str]:
    """Let the power go so often, and say what came of it."""
    with tempfile.TemporaryDirectory(dir=memory_folder()) as folder:
        done, points, wrong = power_losses(Path(folder), count)
    return [
        (
            f"power: {done:,} losses of power at {points:,} points of a job;"
            f" {len(wrong)} stores wrong"
        ),
        *wrong,
    ]
