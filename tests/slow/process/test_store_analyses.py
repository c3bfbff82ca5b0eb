"""Analyses of a store in a process of its own: how much of it is in memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LARGER = """
import resource, sys
from pathlib import Path
import numpy as np
import torch
import hiddenscope as hs
from hiddenscope.store import StorePlan, StoreSequence, create, rows
from hiddenscope.analyses.drift import saved
from hiddenscope.measures import running

rows.BLOCK_BYTES, saved.BLOCK, running.CHUNK = 2**20, 256, 2**17  # less at a time, as the store is small
torch.set_num_threads(1)
draw, width, sites = np.random.default_rng(0), 256, ("layer.0", "layer.1")

def row(text, length):
    return StoreSequence(text, 0, tuple(range(text, text + length)), ((-1, -1),) * length, 0)

def stored(path, length):
    plan = StorePlan({"model": "toy"}, {}, sites, dict.fromkeys(sites, width), "float32")
    writer = create(path, plan, [[row(text, length)] for text in range(24)])
    for unit in writer.pending():
        writer.commit(unit, {site: draw.standard_normal((length, width), dtype=np.float32) for site in sites})
    writer.complete()
    return hs.open(path)

def analyses(found):
    labels = [str(text % 2) for text in range(found.tokens.count)]
    yield "profile", lambda: hs.profile(found, sample=64)
    yield "search", lambda: hs.search(found, draw.standard_normal(width), site="layer.1")
    yield "cluster", lambda: hs.cluster(found, site="layer.1")
    yield "probe", lambda: hs.probe(found, labels)
    yield "project", lambda: hs.project(found, labels, method="pca")
    yield "drift", lambda: hs.drift(found, found, None)

def peak():
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024

for _, run in analyses(stored(Path(sys.argv[1], "small"), 64)):  # what is loaded and made once
    run()
large = stored(Path(sys.argv[1], "large"), 2048)  # 96 MiB
for name, run in analyses(large):
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    run()
    print(name, (peak() - before) >> 20)
"""


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="the memory of a process is not told here",
)
def test_a_store_is_not_held_in_memory(tmp_path: Path) -> None:
    # Every array is given back to the system when it is let go, so that holes between
    # small ones do not count.
    allocator = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", LARGER, str(tmp_path)]
    done = subprocess.run(
        program, capture_output=True, text=True, env={**os.environ, **allocator}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = {
        name: int(mebibytes)
        for name, mebibytes in map(str.split, done.stdout.splitlines())
    }
    assert set(grown) == {"profile", "search", "cluster", "probe", "project", "drift"}
    assert max(grown.values()) < 48, (
        f"of a store of 96 MiB, half would be in memory: {grown}"
    )
