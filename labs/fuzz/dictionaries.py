"""Dictionaries of every library with odd configurations, special files and damage.

Each case is a copy of a sound folder that the tests read, with one or two changes.
"""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import hiddenscope as hs
from labs.fuzz.folders import _bytes, _mutate, _special
from labs.fuzz.sandbox import Case

FILES = Path(__file__).parents[2] / "tests" / "unit" / "directions" / "files"


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Cases of dictionaries, from one seed."""
    sound = sorted(path.parent for path in FILES.rglob("numbers.safetensors"))
    for number in range(count):
        chance = random.Random(f"dictionary {seed} {number}")
        base = chance.choice(sound)
        yield Case(
            "dictionaries",
            f"dictionary {seed}/{number} {base.relative_to(FILES)}",
            lambda base=base, chance=chance: _attempt(base, chance, work),
        )


def _attempt(base: Path, chance: random.Random, work: Path) -> str:
    top = work / f"case-{os.getpid()}-{chance.getrandbits(32):08x}"
    folder = top / base.relative_to(FILES)
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("numbers*"))
    try:
        for _ in range(chance.choice((1, 1, 2))):
            _change(folder, chance)
        dictionary = hs.Dictionary.read(folder, site="layer.2")
        dictionary.encode(dictionary.directions.new_ones(3, dictionary.width))
        return "loaded"
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _change(folder: Path, chance: random.Random) -> None:
    configs = sorted(folder.glob("*.json"))
    # An earlier change may have left nothing here to be changed.
    try:
        if configs and chance.random() < 0.6:
            _mutate(chance.choice(configs), chance, ("architecture", "k", "trainer"))
        elif chance.random() < 0.2:
            _special(folder, chance)
        else:
            _bytes(folder, chance)
    except (OSError, ValueError, LookupError, TypeError):
        return
