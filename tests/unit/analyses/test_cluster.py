"""Cluster: scikit-learn's HDBSCAN, its most typical texts by their definition, and what
does not cluster.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.cluster.compute import row_units
from hiddenscope.cli import main as cli
from hiddenscope.errors import NotFinite, StatesError, TextError, UnknownModel
from hiddenscope.results import views_of
from hiddenscope.results.pictures import Panels
from hiddenscope.vectors.collection import collection_of

Tiny = Callable[..., hs.Model]
TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house.",
    "The end.",
] * 3


def clouds(
    sizes: list[int], width: int = 12, noise: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Points around as many far corners, and others anywhere between them."""
    generator = np.random.default_rng(seed)
    corners = np.linalg.qr(generator.standard_normal((width, width)))[0]
    labels = np.repeat(np.arange(len(sizes)), sizes)
    points = 5 * corners[labels] + 0.3 * generator.standard_normal((sum(sizes), width))
    loose = generator.uniform(-6, 6, (noise, width))
    return np.concatenate([points, loose]) + 3, np.append(labels, [-1] * noise)


def same_groups(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two labellings part the points alike, whatever the labels are called."""
    pairs = set(zip(a.tolist(), b.tolist(), strict=True))
    return len(pairs) == len(set(a.tolist())) == len(set(b.tolist()))


def test_clusters_that_are_there_are_found() -> None:
    points, labels = clouds([40, 30, 20])
    found = hs.cluster(points)
    assert same_groups(found.data["cluster_of"].values, labels)
    assert found.data["size"].values.tolist() == [40, 30, 20]
    assert found.facts["cluster_count"] == 3
    assert found.facts["noise"] == 0
    np.testing.assert_allclose(found.data["stability"], 1, atol=0.05)
    # Of clusters of one size, that of the first row comes first.
    for points in (clouds([20, 20])[0], clouds([20, 20])[0][::-1].copy()):
        assert hs.cluster(points).data["cluster_of"].values[0] == 0


def test_what_belongs_to_none_is_noise_and_grey() -> None:
    points, labels = clouds([60, 40], noise=12)
    found = hs.cluster(points)
    assert (found.data["cluster_of"].values[:100] == labels[:100]).mean() > 0.95
    assert (found.data["cluster_of"].values[100:] == -1).sum() >= 8
    assert found.facts["noise"] == int((found.data["cluster_of"] < 0).sum())
    panels, many = (
        views_of(result)[0]
        for result in (found, hs.cluster(clouds([12] * 10, width=20)[0]))
    )
    assert isinstance(panels, Panels) and isinstance(many, Panels)
    assert panels.grey in panels.labels
    assert panels.grey == panels.classes[-1] == "no cluster"
    coloured = [name for name in many.classes if name != many.grey]
    assert len(coloured) <= 8, "no two have one colour"


def test_no_cluster_at_all_is_an_answer(tmp_path: Path) -> None:
    # Every direction as far from the others as any.
    even = np.concatenate([np.eye(12), -np.eye(12)])
    found = hs.cluster(even, [f"text {n}" for n in range(24)], smallest=12)
    assert (found.facts["cluster_count"], found.facts["noise"]) == (0, 24)
    assert found.data["typical"].shape[0] == 0
    assert found.summary()
    found.save(tmp_path / "none.html")


def draws(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def test_rows_that_are_the_same_or_the_mean_are_no_error() -> None:
    points = np.ones((30, 4))
    points[:3] = draws(3, 4)
    found = hs.cluster(points, smallest=3)  # in some rounds none of the three is left
    assert np.isfinite(found.data["stability"]).all()
    points, _ = clouds([20, 20])
    points[0] = points[1:].mean(0)
    assert hs.cluster(torch.from_numpy(points)).facts["cluster_count"] == 2


def test_permuted_points_and_another_scale_give_the_same_clusters() -> None:
    points, _ = clouds([30, 20], noise=5)
    found = hs.cluster(points)
    here = found.data["cluster_of"].values
    order = np.random.default_rng(1).permutation(len(points))
    assert same_groups(hs.cluster(points[order]).data["cluster_of"].values, here[order])
    assert same_groups(hs.cluster(points * 1000).data["cluster_of"].values, here)
    assert hs.cluster(points).equals(found)


def test_of_very_many_rows_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenscope.analyses.cluster.compute.MAX_ROWS", 100)
    points, labels = clouds([80, 60], width=4)
    found = hs.cluster(points.astype(np.float32), smallest=10)
    assert (found.facts["clustered"], found.facts["rows"]) == (100, 140)
    assert "A random sample of 100 of 140 texts was clustered." in found.summary()
    numbers = found.data["text"].values
    assert len(set(numbers.tolist())) == 100
    assert same_groups(found.data["cluster_of"].values, labels[numbers])
    assert set(found.data["typical"].values.ravel().tolist()) <= set(numbers.tolist())


def test_tokens_are_clustered(tiny: Tiny) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    tokens = hs.cluster(hs.each_token(states), site="layer.0", smallest=3)
    assert tokens.data.sizes["token"] == len(states.tokens)
    assert views_of(tokens) and views_of(hs.cluster(clouds([12, 9])[0]))


EQUAL = np.ones((20, 4))
HOLED = np.where(np.eye(20, 4) > 0, np.nan, 1.0)
TOO_FEW = "texts, and two clusters of 5 need 10"
REFUSED: list[tuple[Callable[[hs.Model], Any], type[Exception], str]] = [
    (lambda m: hs.cluster(EQUAL), StatesError, "all 20 texts are the same"),
    (lambda m: hs.cluster(m, [[5, 6]] * 20), StatesError, "all 20 texts are the same"),
    (lambda m: hs.cluster(m, "A dog"), TextError, f"there are 1 {TOO_FEW}"),
    (lambda m: hs.cluster(EQUAL[:9]), TextError, f"there are 9 {TOO_FEW}"),
    (lambda m: hs.cluster(HOLED), NotFinite, "row 0 has a NaN"),
    (lambda m: hs.cluster(EQUAL, smallest=1), StatesError, "integer >= 2: got 1"),
    (lambda m: hs.cluster(EQUAL, smallest=2.5), StatesError, "integer >= 2: got 2.5"),
    (lambda m: hs.cluster(EQUAL, smallest=True), StatesError, "integer >= 2: got True"),
    (lambda m: hs.cluster(m), TextError, "no texts were given"),
    (lambda m: hs.cluster(m, []), TextError, "there are 0"),
    (lambda m: hs.cluster(m, [*TEXTS, ""]), TextError, "Text 12: it is empty"),
    (lambda m: hs.cluster(m.capture(TEXTS), TEXTS), TextError, "have their own texts"),
    (lambda m: hs.cluster("texts.txt"), UnknownModel, "the name of a file of texts"),
]  # type: ignore[arg-type]


def test_what_cannot_be_clustered_is_said(tiny: Tiny) -> None:
    for call, error, said in REFUSED:
        with pytest.raises(error, match=said):
            call(tiny("llama"))


def test_the_command_takes_vectors_without_a_model(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", clouds([12, 9])[0])
    said = CliRunner().invoke(cli.app, ["cluster", f"@{tmp_path / 'vectors.npy'}"])
    assert said.exit_code == 0, said.output
    assert "21 texts make 2 clusters." in said.output


def test_copies_and_groups_are_left_out_together() -> None:
    points = draws(60, 8)
    copied = np.concatenate([points, np.repeat(points[:1], 8, axis=0)])
    strings = [f"text {number}" for number in range(60)] + ["text 0"] * 8
    groups = [number % 5 for number in range(60)] + [0] * 8
    collection = collection_of(copied, strings)
    units = row_units(collection, np.arange(68), None)
    assert units[0] == units[-1] and len(set(units.tolist())) == 60
    assert len(set(row_units(collection, np.arange(68), groups).tolist())) == 5
    grouped = hs.cluster(copied, hs.read(strings, group=groups)).data["cluster_of"]
    assert grouped.equals(hs.cluster(copied, strings).data["cluster_of"])
