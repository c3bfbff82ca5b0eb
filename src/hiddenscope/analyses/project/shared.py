"""UMAP of many sets of points, by this process and by others that help it.

The sets lie in a folder, one file each, and whoever makes the mark of a file first computes its picture. This file is
also what the other processes run, so it knows nothing of hiddenscope.
"""

import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float32]
Neighbours: TypeAlias = tuple[NDArray[np.int64], Floats]


def umap_of(start: Floats, neighbours: Neighbours, seed: int) -> Floats:
    """The UMAP picture of points whose neighbours are known, begun from given places."""
    places, distances = neighbours
    with warnings.catch_warnings():  # that TensorFlow is missing, and that new points could not be added
        warnings.simplefilter("ignore")
        import umap

        knn = (places.astype(np.int32), distances.astype(np.float32), None)
        options: dict[str, Any] = {"n_neighbors": places.shape[1], "random_state": seed, "n_jobs": 1}
        made = umap.UMAP(**options, init=start.astype(np.float32), precomputed_knn=knn).fit_transform(start)
    return np.asarray(made, dtype=np.float32)


def warm() -> None:
    """Have everything compiled that a picture needs, by making one of a few points."""
    points = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    apart = np.linalg.norm(points[:, None] - points[None], axis=-1)
    places = np.argsort(apart, axis=1)[:, :5]
    umap_of(points, (places, np.take_along_axis(apart, places, 1).astype(np.float32)), 0)


def put(folder: Path, number: int, start: Floats, neighbours: Neighbours, seed: int) -> None:
    """Lay a set of points into the folder, whole or not at all."""
    fresh = folder / f"{number}.fresh.npz"
    np.savez(fresh, start=start, places=neighbours[0], distances=neighbours[1], seed=seed)
    fresh.rename(folder / f"{number}.points.npz")


def work(folder: Path) -> Iterator[int]:
    """Compute what nobody has begun yet, as long as there is any; the numbers of what was done."""
    for path in sorted(folder.glob("*.points.npz"), key=lambda path: int(path.name.split(".")[0])):
        number = int(path.name.split(".")[0])
        try:
            os.close(os.open(folder / f"{number}.begun", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        with np.load(path, allow_pickle=False) as kept:
            made = umap_of(kept["start"], (kept["places"], kept["distances"]), int(kept["seed"]))
        np.save(folder / f"{number}.fresh.npy", made)
        (folder / f"{number}.fresh.npy").rename(folder / f"{number}.picture.npy")
        yield number


def help_with(folder: Path, whom: int) -> None:
    """What a process that helps does: get warm, wait until all is laid out, work, and go."""
    warm()
    (folder / f"{os.getpid()}.warm").touch()
    while folder.is_dir() and not (folder / "ready").exists():
        time.sleep(0.05)
        if os.getppid() != whom:
            return
    for _ in work(folder):
        pass


if __name__ == "__main__":
    help_with(Path(sys.argv[1]), int(sys.argv[2]))
