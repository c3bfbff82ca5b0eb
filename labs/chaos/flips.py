"""Single flipped bits: every one, in whatever file, is found by verify and by the read
that touches it.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hiddenscope.errors import Error
from hiddenscope.store import open as open_store
from hiddenscope.store import resume_store, verify
from hiddenscope.testing import tiny_store


@dataclass(frozen=True)
class Flip:
    """One flipped bit, and whether it was found."""

    file: str
    byte: int
    bit: int
    verified: bool
    read: bool


def flips(path: Path, count: int, seed: int = 0) -> list[Flip]:
    """Flip one bit at a time of a store, each file as often as any other, and put it
    back.
    """
    draw = random.Random(seed)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    done = []
    for number in range(count):
        file = files[number % len(files)]
        content = file.read_bytes()
        byte, bit = draw.randrange(len(content)), draw.randrange(8)
        file.write_bytes(
            content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :]
        )
        done.append(
            Flip(
                str(file.relative_to(path)),
                byte,
                bit,
                not intact(path),
                not readable(path),
            )
        )
        file.write_bytes(content)
    return done


def intact(path: Path) -> bool:
    """Whether verify finds nothing."""
    try:
        return verify(path).intact
    except Error:
        return False


def readable(path: Path) -> bool:
    """Whether everything in a store can be read: every value, every token, and the
    texts of every unit.
    """
    try:
        store, writer = open_store(path), resume_store(path)
        for site in store.sites:
            np.asarray(store[site])
        assert len(store.tokens) == len(store)
        for unit in writer.plan.units:
            writer.sequences(unit.name)
    except Error:
        return False
    return True


def run(count: int = 1000) -> list[str]:
    """Flip bits in a store of wide states, and say how many were found."""
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_store(Path(folder, "store"), dtype="bfloat16", width=2000).path
        done = flips(path, count)
        assert intact(path)
        assert readable(path)
    missed = [flip for flip in done if not (flip.verified and flip.read)]
    found = (
        f"{sum(flip.verified for flip in done):,} found by verify,"
        f" {sum(flip.read for flip in done):,} by reading"
    )
    return [
        (
            f"flipped bits: {count:,} in {len({flip.file for flip in done})} files;"
            f" {found}"
        ),
        *map(str, missed),
    ]
