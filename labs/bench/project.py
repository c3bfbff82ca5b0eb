"""Test by permutation and draw UMAP, against scikit-learn and umap-learn."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import torch

from labs.bench import measure
from labs.bench.measure import Row

LAYERS, POINTS, WIDTH = 31, 2_000, 576
SCORED, SHUFFLES = 500, 99
FIRST = 5_000
PERMUTATIONS, TWO_PROCESSES, FRESH = 5.0, 1.6, 0.4


def rows(repeats: int) -> list[Row]:
    """Measure one row for each bar."""
    few = max(1, repeats // 3)
    return [_permutations(few), *_in_processes(few), _fresh(few)]


def _points(layers: int, count: int, width: int = WIDTH) -> torch.Tensor:
    """Draw points as states lie: some strong directions, many weak, two classes."""
    generator = torch.Generator().manual_seed(0)
    strength = 10.0 / torch.arange(1, width + 1) ** 0.7
    points = torch.randn(layers, count, width, generator=generator) * strength
    points[:, ::2, 3] += 4
    return points


def _permutations(repeats: int) -> Row:
    """Compare silhouettes of shuffled labels; scikit-learn is given the distances."""
    from sklearn.metrics import pairwise_distances, silhouette_score

    from hiddenscope.measures.distances import Distances
    from hiddenscope.measures.permutations import permuted
    from hiddenscope.measures.separation import separation

    points = _points(1, SCORED)[0]
    labels = permuted(torch.arange(SCORED) % 2, SHUFFLES, 0).labellings

    def theirs() -> list[float]:
        distances = pairwise_distances(points.numpy())
        return [
            silhouette_score(distances, some, metric="precomputed")
            for some in labels.numpy()
        ]

    ways = {"ours": lambda: separation(Distances(points), labels), "theirs": theirs}
    assert (
        abs(separation(Distances(points), labels)["silhouette"].value - theirs()[0])
        < 1e-5
    )
    ratio = measure.ratios(measure.interleaved(ways, repeats, warm=False), "ours")[
        "theirs"
    ]
    what = (
        f"{SCORED} points x {WIDTH}: scikit-learn's silhouette under {SHUFFLES}"
        " shuffles / all four scores by ours"
    )
    return Row("project", what, ratio.cpu, ratio.wall, PERMUTATIONS, at_least=True)


def _in_processes(repeats: int) -> list[Row]:
    """Compare UMAP in one process with two; few points stay in one."""
    from hiddenscope.analyses.project.workers import WORTH_A_PROCESS, Job, UmapPool
    from hiddenscope.measures.distances import Distances

    jobs = []
    for layer in _points(LAYERS, POINTS, 64):
        neighbours, distances = Distances(layer).nearest(15)
        start = (layer[:, :2] / layer[:, :2].abs().max() * 10).numpy()
        jobs.append(Job(start, neighbours.numpy(), distances.float().numpy(), 0))

    def seconds(points: int) -> float:
        """Return wall time once compiled; CPU time would miss the other process."""
        with UmapPool(points) as pool:
            pool.wait_until_ready()
            begin = time.perf_counter()
            pool.compute(jobs, lambda amount: None)
            return time.perf_counter() - begin

    what = f"UMAP, {LAYERS} layers x {POINTS:,} points, compiled: one process / two"
    stays = f"{LAYERS} x 50 points: processes besides this one"
    one = Row("project", stays, float(UmapPool(LAYERS * 50).others), None, 0.0)
    cores = (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
    if cores < 2:
        return [Row("project", what, skipped="there is one core"), one]
    ratio = float(
        np.median([seconds(0) / seconds(WORTH_A_PROCESS) for _ in range(repeats)])
    )
    return [
        Row("project", what, None, ratio, TWO_PROCESSES, at_least=True, judged="wall"),
        one,
    ]


PLAIN = """
import warnings; warnings.simplefilter("ignore")
import umap
umap.UMAP(random_state=0, n_jobs=1).fit_transform(points)
"""
OURS = """
from hiddenscope.analyses.project.workers import UmapPool
with UmapPool(0) as pool:
    import torch
    from hiddenscope.analyses.project.pictures import Pictures, draw
    from hiddenscope.measures.distances import Distances
    draw([Distances(torch.from_numpy(points))], Pictures("umap", 15), (0,), pool, lambda amount: None)
"""
FRAME = """
import json, resource, sys, time
import numpy as np
points = np.load(sys.argv[1])
wall, cpu = time.perf_counter(), time.process_time()
{body}
print(json.dumps([time.process_time() - cpu, time.perf_counter() - wall]))
"""


def _fresh(repeats: int) -> Row:
    """Compare the first picture in a fresh process, imports and compiling included."""
    gc.collect()
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, _points(1, FIRST)[0].numpy())
        ratios = []
        for _ in range(repeats):
            ours, plain = (_run(body, file.name) for body in (OURS, PLAIN))
            ratios.append([a / b for a, b in zip(ours, plain, strict=True)])
    cpu, wall = np.median(np.array(ratios), axis=0).tolist()
    what = (
        f"the first UMAP of {FIRST:,} points in a fresh process: ours / plain"
        " umap-learn"
    )
    return Row("project", what, cpu, wall, FRESH)


def _run(body: str, path: str) -> Any:
    command = [sys.executable, "-c", FRAME.format(body=body), path]
    return json.loads(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
    )
