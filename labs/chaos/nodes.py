"""Nodes: machines of a Ray cluster that are killed while a job runs on them; here each
is a raylet of this machine.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Read when Ray is imported: time for a busy machine, workers that are not starved
# there, and none that Ray ends because the machine's memory is nearly full of what
# others do.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "45")
os.environ.setdefault("RAY_worker_niceness", "0")
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

import hiddenscope as hs
from hiddenscope.extract import JobProgress
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.chaos import memory_folder
from labs.chaos.kills import UNIT_BYTES, faults, texts

COUNT = 5
OPTIONS = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "wait": False}
ATTEMPTS, SECONDS = 3, 45
NOT_STARTED = "Ray did not start a cluster on this machine"


def run(count: int = COUNT) -> list[str]:
    """Kill this many nodes, each replaced by another, and say what came of it: the
    figures first, then what is wrong.
    """
    import ray

    model, corpus = hs.load((tiny_model("gpt2"), tiny_tokenizer())), texts(24 * count)
    with TemporaryDirectory(dir=memory_folder()) as name:
        folder = Path(name)
        hs.extract(
            model,
            corpus,
            folder / "whole",
            engine=hs.Engine(unit_bytes=UNIT_BYTES, threads=1),
        )
        cluster, node = _started()
        nodes, killed = [node], list[Any]()

        def report(now: JobProgress) -> None:
            if now.units_done % 4 == 2 and len(killed) < count and nodes:
                killed.append(nodes.pop())
                cluster.remove_node(killed[-1], allow_graceful=False)
                # One that does not start: the head goes on alone.
                with suppress(Exception):
                    nodes.append(cluster.add_node(**OPTIONS))

        try:
            engine = hs.Engine(
                "ray",
                workers=2,
                threads=1,
                address=cluster.address,
                unit_bytes=UNIT_BYTES,
            )
            hs.ExtractJob.plan(model, corpus, folder / "store", engine=engine).run(
                report
            )
        finally:
            ray.shutdown()
            cluster.shutdown()
        wrong = faults(folder / "store", folder / "whole")
    return [
        (
            f"nodes: {len(killed)} nodes of a Ray cluster killed; {len(wrong)} faults"
            " in the store"
        ),
        *wrong,
    ]


def _started() -> tuple[Any, Any]:
    """A cluster of two nodes, and the one that is not its head.

    A raylet ends itself when its agents take longer than 15 seconds to start, as they
    do on a busy machine (Ray issue 65983), and no option changes that. So a cluster
    that does not come up is tried again.
    """
    from ray.cluster_utils import Cluster

    for _ in range(ATTEMPTS):
        cluster = Cluster()
        try:
            cluster.add_node(**OPTIONS, include_dashboard=False)
            node = cluster.add_node(**OPTIONS)
            cluster.wait_for_nodes(timeout=SECONDS)
        except Exception as error:
            print(f"once more: {error}", file=sys.stderr)
            cluster.shutdown()
        else:
            return cluster, node
    raise SystemExit(NOT_STARTED)
