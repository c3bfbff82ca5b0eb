"""UMAP in other processes: the same pictures, and no second run of a script."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hiddenscope.analyses.project import workers
from hiddenscope.analyses.project.workers import Job, UmapPool
from hiddenscope.measures.distances import Distances


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_other_processes_give_the_same_pictures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.randn(50, 30)
    rows[::2, 0] += 6
    neighbours, distances = Distances(rows).nearest(15)
    near = neighbours.numpy(), distances.float().numpy()
    jobs = [Job(rows[:, :2].numpy(), *near, seed) for seed in range(6)]
    monkeypatch.setattr(workers, "WORTH_A_PROCESS", 1)
    done: list[float] = []
    with UmapPool(0) as alone:
        assert alone.others == 0
        expected = alone.compute(jobs, done.append)
    assert sum(done) == 6
    with UmapPool(1) as pool:
        assert pool.others == 1
        pool.wait_until_ready()
        assert pool._ready[0].result()
        for ours, theirs in zip(expected, pool.compute(jobs, done.append), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        pool._processes[0].kill()  # a process that ends leaves its job to the others
        assert len(pool.compute(jobs[:3], done.append)) == 3
    assert pool._processes[0].poll() is not None


def test_other_processes_run_in_a_plain_script(tmp_path: Path) -> None:
    """A script without `if __name__ == "__main__"` must not be run again by them."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os; print('once', flush=True)\n"
        "from hiddenscope.analyses.project.workers import UmapPool\n"
        "with UmapPool(30_000) as pool: pool.wait_until_ready()\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=True,
        # What they compile is no matter here, and takes most of the time.
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
    )
    assert done.stdout.count("once") == 1
