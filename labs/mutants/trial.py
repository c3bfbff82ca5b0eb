"""One fault in a copy of the package, held against the tests until the first failure.

The checkout is never touched: it is copied into a temporary folder, without what was
built there.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, TypeAlias

from labs.mutants.draw import PACKAGE, ROOT, Mutant

# After the tests of the room, in this order; a folder that is not there is passed over.
SHARED = (
    # What every recorded result says and shows comes first: it is quick.
    "tests/unit/views",
    *("tests/checks", "tests/laws", "tests/oracles", "tests/golden", "tests/smoke"),
)
# What no test reads.
BUILT = ("build", "dist", "node_modules", "out")
# How the source is written, not what it does.
OF_SOURCE = ("test_architecture.py", "test_hygiene.py")
# Of a test, and of all of them: a fault may well run forever.
TEST_SECONDS = 300
ALL_SECONDS = 1800
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", re.MULTILINE)
# pytest's exit codes.
PASSED, TEST_FAILED, INTERRUPTED, USAGE = 0, 1, 2, 4

Reach: TypeAlias = Literal["", "near", "all"]
"""How far from a fault it is looked for."""

SURVIVED = "SURVIVED"
CAUGHT = "caught"
NO_IMPORT = "does not import"
HANGS = "hangs"
CRASHES = "crashes"


@dataclass(frozen=True)
class Outcome:
    """What came of a mutant: a verdict, and the test that first failed."""

    mutant: Mutant
    verdict: str
    test: str = ""
    seconds: float = 0.0

    @property
    def found(self) -> bool:
        """Tell whether the tests notice the fault."""
        return self.verdict != SURVIVED


class Broken(Exception):
    """The tests could not be run."""


def room_of(path: PurePosixPath) -> str:
    """Return the room of a file, as `ROOM=` of the Makefile names it.

    >>> room_of(PurePosixPath("src/hiddenscope/analyses/patch/cells.py"))
    'patch'
    >>> room_of(PurePosixPath("src/hiddenscope/sites.py"))
    'sites'
    """
    first, *others = path.relative_to(PACKAGE).parts
    if first == "analyses" and len(others) > 1:
        return others[0]
    return first.removesuffix(".py")


def held_against(path: PurePosixPath, reach: Reach = "") -> list[str]:
    """Return what is run on a fault in a file, the nearest first.

    That are the examples of the file, the tests of its room, those of the rooms that
    import the file, and what is shared. With `reach` "near" it ends with its room, and
    with "all" it goes on with every unit test.
    """
    near = [str(path), *_tests_of_room(room_of(path))]
    if reach == "near":
        return near
    shared = [folder for folder in SHARED if (ROOT / folder).is_dir()]
    tests = [*near, *_tests_of_importers(path), *shared]
    if reach == "all":
        tests.append("tests/unit")
    return list(dict.fromkeys(tests))


def _tests_of_room(room: str) -> list[str]:
    """Return the folders and files of tests that have the name of a room."""
    unit = ROOT / "tests" / "unit"
    near = []
    for found in sorted(unit.rglob("*")):
        is_folder = found.is_dir() and found.name == room
        if is_folder or re.fullmatch(rf"test_{room}.*\.py", found.name):
            near.append(found)
    if not near:
        near = [file for file in unit.glob("test_*.py") if file.name not in OF_SOURCE]
    return [file.relative_to(ROOT).as_posix() for file in sorted(near)]


def _tests_of_importers(path: PurePosixPath) -> list[str]:
    """Return the tests of the rooms that import a file by its own name."""
    module = ".".join(path.relative_to("src").with_suffix("").parts)
    package, _, name = module.rpartition(".")
    imports = re.compile(rf"from {module} import|from {package} import .*\b{name}\b")
    rooms = set()
    for file in (ROOT / PACKAGE).rglob("*.py"):
        if imports.search(file.read_text("utf-8")):
            rooms.add(room_of(PurePosixPath(file.relative_to(ROOT).as_posix())))
    tests = []
    # Of `__init__` and the like everything is a client.
    for room in sorted(rooms - {"__init__", "annotations"}):
        tests += _tests_of_room(room)
    return tests


@contextmanager
def copied(root: Path = ROOT) -> Iterator[Path]:
    """Yield a copy of the checkout, whose package may be changed."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        copy = Path(folder).resolve()
        for entry in root.iterdir():
            if entry.name.startswith(".") or entry.name in BUILT:
                continue
            if entry.is_dir():
                shutil.copytree(entry, copy / entry.name)
            else:
                shutil.copy2(entry, copy)
        yield copy


def check_copy() -> None:
    """Make sure that Python imports the copy and not the package of the checkout."""
    with copied() as copy:
        code = "import hiddenscope; print(hiddenscope.__file__)"
        imported = subprocess.run(
            [sys.executable, "-c", code],
            cwd=copy,
            env=_environment(copy),
            capture_output=True,
            text=True,
            check=True,
        )
        place = Path(imported.stdout.strip()).resolve()
        if not place.is_relative_to(copy):
            raise Broken(f"Python imports {place}, not the copy in {copy}")


def hold(
    mutant: Mutant,
    reach: Reach = "",
    limit: float = ALL_SECONDS,
    without: Collection[str] = (),
) -> Outcome:
    """Run the tests on a mutant, `without` some, until the first failure."""
    begun = time.monotonic()
    tests = held_against(mutant.path, reach)
    with copied() as copy:
        file = copy / mutant.path
        file.write_text(mutant.changed, "utf-8")
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()
        left_out = [f"--deselect={test}" for test in without]
        code, output = _pytest(copy, ["-x", *left_out, *tests], limit)
    seconds = time.monotonic() - begun
    if code == PASSED:
        return Outcome(mutant, SURVIVED, seconds=seconds)
    if code is None:
        return Outcome(mutant, HANGS, seconds=seconds)
    first = FAILED.search(output)
    if code < 0 or "crashed" in output.rpartition("\n")[2]:
        return Outcome(mutant, CRASHES, seconds=seconds)
    if first is None:
        if code == USAGE and "conftest" in output:
            return Outcome(mutant, NO_IMPORT, seconds=seconds)
        raise Broken(f"{mutant.place}: pytest ended with {code}:\n{output[-2000:]}")
    test, message = first[1], first[2] or ""
    verdict = CAUGHT
    if "::" not in test:
        verdict = NO_IMPORT
    elif "it hangs" in message:
        verdict = HANGS
    return Outcome(mutant, verdict, test, seconds)


def failing_anyway(tests: Sequence[str], jobs: int) -> set[str]:
    """Return which of these tests fail on the package as it is."""
    if not tests:
        return set()
    with copied() as copy:
        several = ["-n", str(jobs)] if jobs > 1 else []
        code, output = _pytest(copy, [*several, *tests], ALL_SECONDS)
    if code not in (PASSED, TEST_FAILED):
        raise Broken(f"pytest ended with {code}:\n{output[-2000:]}")
    return {match[1] for match in FAILED.finditer(output)} & set(tests)


def _pytest(
    copy: Path, arguments: Sequence[str], limit: float
) -> tuple[int | None, str]:
    """Run tests in a copy; return the exit code, None where they took too long."""
    # The marker is spelled otherwise than in pyproject.toml: a test that takes long is
    # no failure here.
    options = ["-q", "--no-header", "--tb=no", "-rfE", "-m", "(not slow)"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        + list(arguments),
        cwd=copy,
        env=_environment(copy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return None, ""
    finally:
        # Whatever the tests started goes with them.
        _end(process)
    return process.returncode, output


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def _environment(copy: Path) -> dict[str, str]:
    """Return the environment in which a copy is tried: its package, and one thread."""
    paths = [str(copy / "src"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "HIDDENSCOPE_TEST_SECONDS": str(TEST_SECONDS),
        # Names of tests are cut at the width of the terminal.
        "COLUMNS": "2000",
    }
