"""Pages that compare libraries name the newest versions that were tried."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.version import Version

from labs.bench.peers.environments import newest_tried
from tests.places import ROOT

DOCS = ROOT / "docs"
COMPARING = [
    ROOT / "README.md",
    DOCS / "coming-from.md",
    *sorted((DOCS / "coming-from").glob("*.md")),
]
# What a package is called in prose, where that is not its name.
IN_PROSE = {"TransformerLens": "transformer-lens", "SAELens": "sae-lens"}
NAMED = re.compile(r"(?<![\w-])([A-Za-z][A-Za-z-]*) (\d+(?:\.\d+)+)")
# A line that records the versions of a run; the next run writes it again.
RECORD = re.compile(r"^(?:Versions:|hiddenscope \d).*$", re.MULTILINE)


def named(text: str) -> Iterator[tuple[str, Version]]:
    """Yield every package that was tried, with the version that a text names."""
    for name, version in NAMED.findall(text):
        package = IN_PROSE.get(name, name.lower())
        if package in newest_tried():
            yield package, Version(version)


def outdated(text: str) -> list[str]:
    """Return the packages of which a text names no version as new as the newest tried.

    A text may name older ones too. "nnsight 0.8" stands for every 0.8.
    """
    newest: dict[str, Version] = {}
    for package, version in named(text):
        newest[package] = max(version, newest.get(package, version))
    behind = []
    for package, version in newest.items():
        latest = Version(newest_tried()[package])
        parts = len(version.release)
        if version.release < latest.release[:parts]:
            behind.append(f"{package} {version}, and {latest} was tried")
    return behind


@pytest.mark.parametrize("page", COMPARING, ids=lambda page: page.stem)
def test_no_page_speaks_of_a_version_older_than_the_newest_tried(page: Path) -> None:
    text = RECORD.sub("", page.read_text("utf-8"))
    assert outdated(text) == [], "read it again, and say what holds now"


@pytest.mark.parametrize("page", [*COMPARING, DOCS / "bench.md"], ids=lambda p: p.stem)
def test_a_recorded_run_with_older_versions_is_pointed_out(page: Path) -> None:
    behind = outdated("\n".join(RECORD.findall(page.read_text("utf-8"))))
    if behind:
        pytest.skip(f"{page.name} records a run with {'; '.join(behind)}: run it again")


def test_the_table_names_every_library_that_was_tried() -> None:
    text = (DOCS / "coming-from.md").read_text("utf-8")
    packages = dict(named(text))
    missing = set(newest_tried()) - set(packages) - {"torch", "sentence-transformers"}
    assert missing == set()


def test_the_benchmark_runs_the_versions_of_the_constraints() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    for package in ("torch", "transformers", "sentence-transformers"):
        pins = [line for line in lines if line.startswith(f"{package}==")]
        assert not pins or pins[0] == f"{package}=={newest_tried()[package]}"


def test_an_older_version_is_noticed() -> None:
    latest = newest_tried()["nnsight"]
    assert outdated(f"nnsight {latest}, and nnsight 0.1.0 long ago") == []
    assert outdated("nnterp beside nnsight 0.1.0")
    assert outdated("TransformerLens 3.9")
    assert outdated("TransformerLens 4 in general, and nnsight 0.8") == []
