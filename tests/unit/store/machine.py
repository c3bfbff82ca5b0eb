"""A store that is made, crashed, gone on with, read, verified and tidied in any order,
beside a plain set of the units that were committed.
"""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import hiddenscope as hs
from hiddenscope.errors import StoreError
from hiddenscope.store import discard_damaged, gc, resume_store, verify
from hiddenscope.testing.stores import tiny_plan, tiny_store, tiny_values
from labs.chaos.crashes import dying

UNITS = ("000000", "000001", "000002")
SOME_UNITS = st.lists(st.sampled_from(UNITS), unique=True)


def shard(path: Path, unit: str) -> Path:
    """Return the file with the states of a unit."""
    record = json.loads((path / f"commits/{unit}.json").read_text("utf-8"))
    return path / "data" / f"{record['sha256']}.safetensors"


def damage(path: Path, at: int = -9000) -> None:
    """Flip a bit of a file."""
    content = bytearray(path.read_bytes())
    content[max(at, -len(content))] ^= 8
    path.write_bytes(content)


class StoreMachine(RuleBasedStateMachine):
    """What is read is what was committed, after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.committed: set[str] = set()
        self.begun = False

    @initialize()
    def make(self) -> None:
        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "store"

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def recorded(self) -> set[str]:
        return {path.stem for path in (self.path / "commits").glob("*.json")}

    def learn(self) -> None:
        """After a crash, what is there is what counts; nothing that was there may be
        gone.
        """
        assert self.committed <= self.recorded()
        self.committed = self.recorded()
        self.begun = (self.path / "plan.json").exists()

    @rule(units=SOME_UNITS)
    def work(self, units: list[str]) -> None:
        writer = tiny_store(self.path, units=[])
        for unit in units:
            is_new = unit not in self.committed
            assert writer.commit(unit, tiny_values(writer, unit)) == is_new
        self.committed |= set(units)
        self.begun = True

    @rule(steps=st.integers(0, 60), units=SOME_UNITS)
    def crash(self, steps: int, units: list[str]) -> None:
        with dying(steps):
            tiny_store(self.path, units=units)
        self.learn()

    @precondition(lambda self: self.begun)
    @rule()
    def tidy(self) -> None:
        assert not gc(self.path).busy

    @precondition(lambda self: self.begun)
    @rule(steps=st.integers(0, 5))
    def tidy_and_crash(self, steps: int) -> None:
        with dying(steps):
            gc(self.path)
        self.learn()

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def damage_and_mend(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.committed)))
        damage(shard(self.path, unit), at=data.draw(st.integers(-3000, -1)))
        assert verify(self.path).units == (unit,)
        gc(self.path, damaged=True)
        self.committed.discard(unit)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), deleted=st.booleans())
    def damage_anything_and_heal(self, data: st.DataObject, deleted: bool) -> None:
        files = [file for file in self.path.rglob("*") if file.is_file()]
        kept = sorted(file for file in files if file.parent.name != "tmp")
        file = data.draw(st.sampled_from(kept))
        file.unlink() if deleted else damage(file, at=data.draw(st.integers(-3000, -1)))
        tiny_plan(self.path)
        discard_damaged(self.path)
        left = self.recorded()
        at_most = int(file.parent.name in ("data", "commits"))
        assert left <= self.committed and len(self.committed - left) <= at_most
        self.committed = left

    @precondition(lambda self: self.begun)
    @rule()
    def complete(self) -> None:
        writer = resume_store(self.path)
        if len(self.committed) == len(UNITS):
            writer.complete()
        else:
            with pytest.raises(StoreError, match="are not committed"):
                writer.complete()

    @invariant()
    def reads_what_was_committed(self) -> None:
        if not self.begun:
            return
        store, writer = hs.open(self.path), resume_store(self.path)
        assert set(store.units) == self.committed and verify(self.path).intact
        for unit in self.committed:
            texts = {row.text for row in writer.sequences(unit)}
            found = [store.of(text)["final"][:] for text in sorted(texts)]
            wanted = tiny_values(writer, unit)["final"]
            assert np.array_equal(np.concatenate(found), wanted)
