"""Look into the archives of a release: `python -m labs.release.contents dist`."""

import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "hiddenscope"
# Bytes. Nobody should wait for a download of pictures.
LARGEST_WHEEL = 3_000_000
LARGEST_SDIST = 10_000_000
LARGEST_FILE = 2_000_000
# What it takes to build and to test from the sdist alone.
NEEDED_IN_SDIST = {
    "CHANGELOG.md",
    "CITATION.cff",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "constraints.txt",
    "docs/index.md",
    "pyproject.toml",
    "labs/release/smoke.py",
    "tests/conftest.py",
}
# What tools leave behind.
LITTER = {
    ".git",
    ".hypothesis",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
    ".venv",
    "__pycache__",
    "build",
    "dist",
    "node_modules",
    "out",
}


def package_files() -> set[str]:
    """Return every file of the package, code and data, as a wheel names it."""
    files = set()
    for path in PACKAGE.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            files.add(path.relative_to(PACKAGE.parent).as_posix())
    return files


def wheel_faults(wheel: Path) -> list[str]:
    """Return what a wheel lacks and what does not belong into it."""
    faults = []
    with zipfile.ZipFile(wheel) as archive:
        sizes = {info.filename: info.file_size for info in archive.infolist()}
    shipped = set()
    for name in sizes:
        if not name.partition("/")[0].endswith(".dist-info"):
            shipped.add(name)
    expected = package_files()
    for name in sorted(expected - shipped):
        faults.append(f"{wheel.name} lacks {name}")
    for name in sorted(shipped - expected):
        faults.append(f"{wheel.name} holds {name}, which is not in the package")
    if not any(name.endswith("licenses/LICENSE") for name in sizes):
        faults.append(f"{wheel.name} lacks the licence")
    return faults + size_faults(wheel, LARGEST_WHEEL, sizes)


def sdist_faults(sdist: Path) -> list[str]:
    """Return what an sdist lacks and what does not belong into it."""
    faults = []
    sizes = {}
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            if member.issym() or member.islnk():
                faults.append(f"{sdist.name} holds a link: {member.name}")
            # Without the folder that holds everything.
            sizes[member.name.partition("/")[2]] = member.size
    needed = NEEDED_IN_SDIST | {f"src/{name}" for name in package_files()}
    for name in sorted(needed - set(sizes)):
        faults.append(f"{sdist.name} lacks {name}")
    for name in sorted(sizes):
        if LITTER & set(name.split("/")):
            faults.append(f"{sdist.name} holds {name}, which a tool left behind")
    return faults + size_faults(sdist, LARGEST_SDIST, sizes)


def size_faults(archive: Path, largest: int, sizes: dict[str, int]) -> list[str]:
    """Return whether the archive, or a file in it, is too large."""
    faults = []
    size = archive.stat().st_size
    if size > largest:
        faults.append(f"{archive.name} has {size:,} bytes, more than {largest:,}")
    for name, bytes_of_file in sizes.items():
        if bytes_of_file > LARGEST_FILE:
            faults.append(f"{archive.name} holds {name} of {bytes_of_file:,} bytes")
    return faults


def main(folder: Path) -> int:
    """Print the faults of the archives in a folder; return the exit code."""
    wheels = sorted(folder.glob("*.whl"))
    sdists = sorted(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(sdists) != 1:
        print(f"There must be one wheel and one sdist in {folder}: empty it first.")
        return 1
    faults = wheel_faults(wheels[0]) + sdist_faults(sdists[0])
    for fault in faults:
        print(fault)
    for archive in (*wheels, *sdists):
        print(f"{archive.name}: {archive.stat().st_size / 1e6:.1f} MB")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
