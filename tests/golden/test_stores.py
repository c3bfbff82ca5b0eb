"""Stores of every version of the format, as they were once written."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import hiddenscope as hs
from hiddenscope.store import create, verify
from hiddenscope.testing.stores import COPIES, SITES, tiny_sequences
from labs.chaos.kills import files_of
from tests.places import TESTS

STRINGS = {number: f"t{number}" for number in range(200)}
DIGESTS = {
    1: ["0bda554a61066195", "7ccfc1e63a6bf678", "95e48e7857001204"],
    2: ["f0c450ec486227c9", "7fb5f6506383be81", "f3b56d2a143438b6"],
}
LENGTHS = {1: [5, 3, 4, 10, 3, 5, 2], 2: [2, 1, 2, 4, 1, 2, 1]}


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_every_version_is_read_and_written_as_ever(
    tmp_path: Path, version: int
) -> None:
    path, golden = tmp_path / "golden", TESTS / f"golden/store-{version}"
    shutil.copytree(golden, path)
    store = hs.open(path)
    assert store.plan.version == version
    assert tuple(map(str, store.sites)) == SITES
    digests = []
    for site in SITES:
        values = np.asarray(store[site]).tobytes()
        digests.append(hashlib.sha256(values).hexdigest()[:16])
    assert digests == DIGESTS[version]
    assert store.complete and verify(path).intact
    assert store.tokens.lengths.tolist() == LENGTHS[version]
    assert store.tokens.strings[:2] == ("t0", f"t{store.every}")
    plan = replace(store.plan, units=(), duplicates="", strings="")
    again = tmp_path / "again"
    writer = create(again, plan, tiny_sequences(), COPIES, STRINGS)
    for unit in writer.pending():
        texts = sorted({row.text for row in writer.sequences(unit)})
        bits = {}
        for site in SITES:
            rows = np.concatenate([np.asarray(store.of(text)[site]) for text in texts])
            bits[site] = (rows.view(np.uint32) >> 16).astype("<u2")
        writer.commit(unit, bits)
    writer.complete()
    assert files_of(again) == files_of(golden)
