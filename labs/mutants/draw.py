"""Which faults are tried: drawn by a seed, without those that no test can see."""

import ast
import hashlib
import random
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from labs.mutants.operators import Fault, faults_in

ROOT = Path(__file__).parents[2]
PACKAGE = PurePosixPath("src/hiddenscope")
EQUIVALENT = Path(__file__).parent / "equivalent.toml"
# Made for tests, or not Python.
LEFT = ("testing", "static")


@dataclass(frozen=True)
class Mutant:
    """The package with one fault; `path` is relative to the root of the checkout."""

    path: PurePosixPath
    fault: Fault
    source: str

    @property
    def place(self) -> str:
        """Return the file below the package, and the line."""
        return f"{self.path.relative_to(PACKAGE)}:{self.fault.line}"

    @property
    def changed(self) -> str:
        """Return the source of the file with the fault."""
        return self.fault.apply(self.source)

    @property
    def line(self) -> str:
        """Return the text of the line."""
        return self.source.splitlines()[self.fault.line - 1].strip()

    @property
    def name(self) -> tuple[str, str, str, str]:
        """Return what names the fault wherever its line moves."""
        file = str(self.path.relative_to(PACKAGE))
        return file, self.fault.function, self.line, self.fault.what

    @property
    def is_sound(self) -> bool:
        """Tell whether the changed file is valid Python and means something else."""
        try:
            changed = ast.dump(ast.parse(self.changed))
        except SyntaxError:
            return False
        return changed != ast.dump(ast.parse(self.source))


def drawn(seed: int, room: str = "", root: Path = ROOT) -> Iterator[Mutant]:
    """Yield mutants in the order in which a seed draws them, until all are drawn.

    Kinds of faults are equally likely, and so are the places of a kind: a room is drawn
    in proportion to its size. No two are in one line. The order is that of a hash of
    the seed and the name of each, so that a change elsewhere in the package leaves what
    is drawn as it was.
    """
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    folder = root / PACKAGE / room
    for file in sorted(folder.rglob("*.py")):
        path = PurePosixPath(file.relative_to(root).as_posix())
        if set(LEFT) & set(path.parts):
            continue
        source = file.read_text("utf-8")
        for fault in faults_in(source):
            by_kind[fault.kind].append(Mutant(path, fault, source))
    for kind in by_kind.values():
        kind.sort(key=lambda mutant: _digest(seed, mutant))
    chance = random.Random(seed)
    lines: set[str] = set()
    while by_kind:
        kind = chance.choice(sorted(by_kind))
        mutant = by_kind[kind].pop()
        if not by_kind[kind]:
            del by_kind[kind]
        if mutant.place not in lines and mutant.is_sound:
            lines.add(mutant.place)
            yield mutant


def _digest(seed: int, mutant: Mutant) -> bytes:
    text = "\n".join([str(seed), *mutant.name])
    return hashlib.sha256(text.encode()).digest()


def draw(
    seed: int, count: int, room: str = "", root: Path = ROOT
) -> tuple[list[Mutant], list[Mutant]]:
    """Return this many mutants, and those that were put aside on the way."""
    unseen = equivalents()
    mutants: list[Mutant] = []
    aside = []
    for mutant in drawn(seed, room, root):
        if len(mutants) == count:
            break
        if mutant.name in unseen:
            aside.append(mutant)
        else:
            mutants.append(mutant)
    return mutants, aside


def equivalents(file: Path = EQUIVALENT) -> dict[tuple[str, str, str, str], str]:
    """Return the faults that no test can see, by name, and why."""
    listed = tomllib.loads(file.read_text("utf-8")).get("equivalent", [])
    unseen = {}
    for row in listed:
        name = row["file"], row["function"], row["line"], row["mutation"]
        unseen[name] = row["why"]
    return unseen
