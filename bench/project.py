"""Scores and maps of many layers: silhouettes beside scikit-learn's, UMAP beside plain umap-learn."""

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import measure
from bench.measure import Row

LAYERS, POINTS, WIDTH = 31, 2_000, 576
FIRST = 5_000
SILHOUETTES, TOGETHER, FRESH = 2.0, 1.6, 0.4


def rows(repeats: int) -> list[Row]:
    """One row a promise."""
    return [_silhouettes(repeats), *_in_processes(max(1, repeats // 3)), _fresh(max(1, repeats // 3))]


def _points(layers: int, count: int, width: int = WIDTH) -> torch.Tensor:
    """States that lie as a model's do: a few strong directions, many weak ones, two classes."""
    generator = torch.Generator().manual_seed(0)
    strength = 10.0 / torch.arange(1, width + 1) ** 0.7
    points = torch.randn(layers, count, width, generator=generator) * strength
    points[:, ::2, 3] += 4
    return points


def _silhouettes(repeats: int) -> Row:
    from sklearn.metrics import silhouette_score

    from hiddenscope.measures.distances import Distances
    from hiddenscope.measures.separation import silhouette

    points = _points(LAYERS, POINTS)
    codes = torch.arange(POINTS) % 2
    ways = {
        "ours": lambda: [silhouette(Distances(layer), codes) for layer in points],
        "theirs": lambda: [silhouette_score(layer.numpy(), codes.numpy()) for layer in points],
    }
    np.testing.assert_allclose(ways["ours"](), ways["theirs"](), atol=1e-5)
    found = measure.ratios(measure.interleaved(ways, repeats, warm=False), "ours")["theirs"]
    what = f"silhouettes, {LAYERS} layers x {POINTS:,} points x {WIDTH}: scikit-learn's loop / ours"
    return Row("project", what, found.cpu, found.wall, SILHOUETTES, at_least=True)


def _in_processes(repeats: int) -> list[Row]:
    """UMAP by one process and by two, warm; and that few points stay in one."""
    from hiddenscope.analyses.project.crew import WORTH_A_PROCESS, Crew
    from hiddenscope.measures.distances import Distances

    jobs = []
    for layer in _points(LAYERS, POINTS, 64):
        places, distances = Distances(layer).nearest(15)
        start = (layer[:, :2] / layer[:, :2].abs().max() * 10).numpy()
        jobs.append((start, (places.numpy(), distances.float().numpy()), 0))

    def maps(points: int) -> float:
        """Wall time from when everybody is warm; CPU time would not see the other process."""
        with Crew(points) as crew:
            crew._thread.join()
            while len([*Path(crew._folder.name).glob("*.warm")]) < crew.helpers:
                time.sleep(0.1)
            begin = time.perf_counter()
            crew.pictures(jobs, lambda amount: None)
            return time.perf_counter() - begin

    found = [maps(0) / maps(WORTH_A_PROCESS) for _ in range(repeats)]
    what = f"UMAP, {LAYERS} layers x {POINTS:,} points, warm: one process / two"
    few = LAYERS * 50
    with Crew(few) as crew:
        stays = f"{LAYERS} x 50 points: processes besides this one"
        one = Row("project", stays, float(crew.helpers), None, 0.0)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if cores < 2:
        return [Row("project", what, skipped="there is one core"), one]
    return [Row("project", what, None, float(np.median(found)), TOGETHER, at_least=True, judged="wall"), one]


PLAIN = """
import warnings; warnings.simplefilter("ignore")
import umap
umap.UMAP(random_state=0, n_jobs=1).fit_transform(points)
"""
OURS = """
from hiddenscope.analyses.project.crew import Crew
with Crew(0) as crew:
    import torch
    from hiddenscope.analyses.project.maps import Plan, pca, pictures
    from hiddenscope.measures.distances import Distances
    some = [Distances(torch.from_numpy(points))]
    pictures(some, [pca(some[0])[0]], Plan("umap", 15, (0,)), crew, lambda amount: None)
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
    """The first map in a fresh process, importing and compiling included."""
    import tempfile

    gc.collect()
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, _points(1, FIRST)[0].numpy())
        ratios = []
        for _ in range(repeats):
            ours, plain = (_run(body, file.name) for body in (OURS, PLAIN))
            ratios.append([a / b for a, b in zip(ours, plain, strict=True)])
    cpu, wall = np.median(np.array(ratios), axis=0).tolist()
    what = f"the first UMAP of {FIRST:,} points in a fresh process: ours / plain umap-learn"
    return Row("project", what, cpu, wall, FRESH)


def _run(body: str, path: str) -> Any:
    command = [sys.executable, "-c", FRAME.format(body=body), path]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
