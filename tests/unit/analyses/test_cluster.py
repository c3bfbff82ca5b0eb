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
from hiddenscope.analyses.cluster.cluster import _units
from hiddenscope.cli import main as cli
from hiddenscope.errors import NotFinite, StatesError, TextError, UnknownModel
from hiddenscope.vectors.collection import collection_of
from hiddenscope.views import Panels, sections_of, views_of

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
    middles = (
        np.linalg.qr(generator.standard_normal((width, width)))[0][: len(sizes)] * 5
    )
    points = [
        middle + 0.3 * generator.standard_normal((size, width))
        for middle, size in zip(middles, sizes, strict=True)
    ]
    loose = generator.uniform(-6, 6, (noise, width))
    labels = np.repeat([*range(len(sizes)), -1], [*sizes, noise])
    return np.concatenate([*points, loose]) + 3, labels


def same_groups(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two labellings part the points alike, whatever the labels are called."""
    return (
        len(set(zip(a.tolist(), b.tolist(), strict=True)))
        == len(set(a.tolist()))
        == len(set(b.tolist()))
    )


def test_clusters_that_are_there_are_found() -> None:
    points, labels = clouds([40, 30, 20])
    found = hs.cluster(points)
    assert same_groups(found.data["cluster_of"].values, labels)
    assert found.data["size"].values.tolist() == [40, 30, 20]
    assert found.facts["cluster_count"] == 3
    assert found.facts["noise"] == 0
    np.testing.assert_allclose(found.data["stability"], 1, atol=0.05)
    assert found.data["place"].shape == (90, 2)


def test_what_belongs_to_none_is_noise() -> None:
    points, labels = clouds([60, 40], noise=12)
    found = hs.cluster(points)
    assert (found.data["cluster_of"].values[:100] == labels[:100]).mean() > 0.95
    assert (found.data["cluster_of"].values[100:] == -1).sum() >= 8
    nothing = hs.cluster(np.random.default_rng(0).standard_normal((60, 8)))
    assert (
        nothing.facts["cluster_count"] == 0
        or nothing.data["stability"].values.min() < 0.75
    )  # what is not there is not firm
    assert nothing.facts["noise"] == int((nothing.data["cluster_of"] < 0).sum())


def test_each_cluster_has_a_list_of_its_typical_texts(
    tiny: Callable[..., hs.Model],
) -> None:
    found = hs.cluster(
        tiny("llama"),
        [f"{'the cat' if k % 2 else 'on or of'} number {k}" for k in range(24)],
    )
    (section,) = sections_of(found)
    clusters = found.facts["clusters"]
    assert clusters and len(section.tables) == len(clusters)
    for cluster, table in zip(clusters, section.tables, strict=True):
        assert [text for (text,) in table.rows] == cluster["typical"]
        assert table.title.startswith(
            f"Cluster {cluster['cluster']}: {cluster['size']} texts"
        )


def test_points_of_no_cluster_are_grey() -> None:
    points, _ = clouds([60, 40], noise=12)
    panels = views_of(hs.cluster(points))[0]
    assert isinstance(panels, Panels)
    assert (
        panels.grey in panels.labels
        and panels.grey == panels.classes[-1] == "no cluster"
    )
    many = views_of(hs.cluster(clouds([12] * 10, width=20)[0]))[0]
    assert isinstance(many, Panels)
    assert len([name for name in many.classes if name != many.grey]) <= 8, (
        "no two have one colour"
    )


def test_no_cluster_at_all_is_an_answer(tmp_path: Path) -> None:
    # Every direction as far from the others as any.
    even = np.concatenate([np.eye(12), -np.eye(12)])
    found = hs.cluster(even, [f"text {n}" for n in range(24)], smallest=12)
    assert (found.facts["cluster_count"], found.facts["noise"]) == (0, 24)
    assert found.data["typical"].shape[0] == 0
    assert found.summary()
    found.save(tmp_path / "none.html")


def test_clusters_with_fewer_than_are_typical() -> None:
    points, _ = clouds([2, 3, 9], width=6)
    found = hs.cluster(points, smallest=2)
    sizes = found.data["size"].values
    assert sizes.min() < found.data.sizes["rank"]
    assert (
        (found.data["typical"].values >= 0).sum(1)
        == np.minimum(sizes, found.data.sizes["rank"])
    ).all()


def test_the_labels_are_those_of_hdbscan() -> None:
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    points, _ = clouds([50, 60, 40], width=40, noise=10, seed=2)
    directions = points - points.mean(0)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    theirs = (
        HDBSCAN(min_cluster_size=6, copy=True)
        .fit(PCA(15).fit_transform(directions))
        .labels_
    )
    assert same_groups(hs.cluster(points, smallest=6).data["cluster_of"].values, theirs)


def by_hand(points: np.ndarray, smallest: int) -> np.ndarray:
    """All of it with scikit-learn: centred, of norm 1, along principal directions, and
    then HDBSCAN.
    """
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    unit = points - points.mean(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    places = PCA(min(15, max(2, len(points) // 10))).fit_transform(unit)
    labels: np.ndarray = (
        HDBSCAN(min_cluster_size=smallest, copy=True).fit(places).labels_
    )
    return labels


@pytest.mark.parametrize(("rows", "width"), [(60, 8), (200, 64), (120, 384)])
def test_for_the_stability_all_is_done_again_without_a_fifth(
    rows: int, width: int
) -> None:
    points = np.random.default_rng(0).standard_normal((rows, width))
    found = hs.cluster(points)
    generator, overlaps = np.random.default_rng(0), []
    labels = found.data["cluster_of"].values
    assert same_groups(labels, by_hand(points, 5))
    for _ in range(8):
        kept = np.sort(generator.choice(rows, round(0.8 * rows), replace=False))
        again = by_hand(points[kept], 4)
        members = [
            labels[kept] == label for label in range(found.facts["cluster_count"])
        ]
        others = [again == label for label in range(again.max() + 1)]
        overlaps.append(
            [
                max([(a & b).sum() / (a | b).sum() for b in others], default=0)
                for a in members
            ]
        )
    np.testing.assert_allclose(found.data["stability"], np.mean(overlaps, 0), atol=1e-6)
    assert found.data["stability"].max() < 0.45, "they are clusters of noise"


def test_a_part_of_the_rows_may_be_all_the_same() -> None:
    points = np.ones((30, 4))
    points[:3] = np.random.default_rng(0).standard_normal((3, 4))
    found = hs.cluster(points, smallest=3)  # in some rounds none of the three is left
    assert np.isfinite(found.data["stability"]).all()


def test_the_most_typical_are_the_medoids() -> None:
    points, _ = clouds([15, 25])
    found = hs.cluster(points, [f"text {n}" for n in range(40)])
    unit = points - points.mean(0)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    for label in range(2):
        rows = np.flatnonzero(found.data["cluster_of"].values == label)
        near = np.array([sum(unit[a] @ unit[b] for b in rows if b != a) for a in rows])
        expected = rows[np.argsort(-near)][:3].tolist()
        assert found.data["typical"].values[label].tolist() == expected
        assert found.facts["clusters"][label]["typical"] == [
            f"text {n}" for n in expected
        ]


def test_permuted_points_and_another_scale_give_the_same_clusters() -> None:
    points, _ = clouds([30, 20], noise=5)
    here = hs.cluster(points).data["cluster_of"].values
    order = np.random.default_rng(1).permutation(len(points))
    assert same_groups(hs.cluster(points[order]).data["cluster_of"].values, here[order])
    assert same_groups(hs.cluster(points * 1000).data["cluster_of"].values, here)
    assert hs.cluster(points).equals(hs.cluster(points))


def test_of_very_many_rows_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiddenscope.analyses.cluster.cluster.MAX_ROWS", 1_000)
    points, labels = clouds([800, 600], width=4)
    found = hs.cluster(points.astype(np.float32), smallest=50)
    assert (found.facts["clustered"], found.facts["rows"]) == (1_000, 1_400)
    assert "A random sample of 1,000 of 1,400 texts was clustered." in found.summary()
    numbers = found.data["text"].values
    assert len(set(numbers.tolist())) == 1_000
    assert same_groups(found.data["cluster_of"].values, labels[numbers])
    assert set(found.data["typical"].values.ravel().tolist()) <= set(numbers.tolist())


def test_models_states_and_tokens_are_clustered(
    tiny: Callable[..., hs.Model], tmp_path: Path
) -> None:
    model = tiny("llama")
    one = hs.cluster(model, TEXTS, smallest=3)
    states = model.capture(TEXTS)
    other = hs.cluster(states, smallest=3)
    assert one.data["cluster_of"].equals(other.data["cluster_of"])
    assert one.facts == other.facts
    assert one.facts["cluster_count"] == 4  # each text stands there three times
    assert one.data["string"].values.tolist() == TEXTS
    for suffix in ("html", "json"):
        one.save(tmp_path / f"one.{suffix}")
    assert hs.Result.load(tmp_path / "one.json").equals(one)
    tokens = hs.cluster(hs.each_token(states), site="layer.0", smallest=3)
    assert tokens.data.sizes["token"] == len(states.tokens)
    tokens.save(tmp_path / "tokens.png")
    hs.cluster(clouds([12, 9])[0]).save(tmp_path / "numbers.png")


EQUAL = np.ones((20, 4))
HOLED = np.where(np.eye(20, 4) > 0, np.nan, 1.0)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m: hs.cluster(EQUAL), StatesError, "all 20 texts are the same"),
        (
            lambda m: hs.cluster(m, [[5, 6, 7]] * 20, site="layer.0"),
            StatesError,
            "all 20 texts are the same",
        ),
        (
            lambda m: hs.cluster(m, "A dog"),
            TextError,
            "there are 1 texts, and two clusters of 5 need 10",
        ),
        (
            lambda m: hs.cluster(EQUAL[:9]),
            TextError,
            "there are 9 texts, and two clusters of 5 need 10",
        ),
        (lambda m: hs.cluster(HOLED), NotFinite, "row 0 has a NaN"),
        (
            lambda m: hs.cluster(EQUAL, smallest=1),
            StatesError,
            "smallest must be an integer >= 2, got 1",
        ),
        (
            lambda m: hs.cluster(EQUAL, smallest=2.5),
            StatesError,
            "smallest must be an integer >= 2, got 2.5",
        ),
        (
            lambda m: hs.cluster(EQUAL, smallest=True),
            StatesError,
            "smallest must be an integer >= 2, got True",
        ),
        (lambda m: hs.cluster(m), TextError, "no texts were given"),
        (lambda m: hs.cluster(m, []), TextError, "there are 0"),
        (lambda m: hs.cluster(m, [*TEXTS, ""]), TextError, "Text 12: it is empty"),
        (
            lambda m: hs.cluster(m.capture(TEXTS), TEXTS),
            TextError,
            "the states have their own texts",
        ),
        (
            lambda m: hs.cluster("texts.txt"),
            UnknownModel,
            "the name of a file of texts",
        ),
    ],
)
def test_what_cannot_be_clustered_is_said(
    tiny: Callable[..., hs.Model],
    call: Callable[[hs.Model], Any],
    error: type[Exception],
    said: str,
) -> None:
    with pytest.raises(error, match=said):
        call(tiny("llama"))


def test_a_row_that_is_the_mean_is_no_error() -> None:
    points, _ = clouds([20, 20])
    points[0] = points[1:].mean(0)
    assert hs.cluster(torch.from_numpy(points)).facts["cluster_count"] == 2


def test_the_command_takes_vectors_without_a_model(tmp_path: Path) -> None:
    np.save(tmp_path / "vectors.npy", clouds([12, 9])[0])
    said = CliRunner().invoke(cli.app, ["cluster", f"@{tmp_path / 'vectors.npy'}"])
    assert said.exit_code == 0, said.output
    assert "21 texts make 2 clusters; 0 belong to none." in said.output


@pytest.mark.real
def test_a_sentence_encoder_parts_what_is_of_different_things(minilm: hs.Model) -> None:
    kitchen = [
        "Whisk the eggs.",
        "Simmer the sauce.",
        "Knead the dough.",
        "Roast the carrots.",
        "Salt the soup.",
        "Fry the onions.",
    ]
    space = [
        "The probe orbits Saturn.",
        "A distant star.",
        "The rocket lifted off.",
        "A spiral galaxy.",
        "The rover is on Mars.",
        "The Moon has craters.",
    ]
    found = hs.cluster(minilm, [*kitchen, *space], smallest=4).data["cluster_of"].values
    kept = found >= 0
    assert kept.sum() >= 9
    assert same_groups(found[kept], np.repeat([0, 1], 6)[kept])


def test_copies_and_groups_are_left_out_together() -> None:
    generator = np.random.default_rng(0)
    points = generator.normal(size=(60, 8))
    copied = np.concatenate([points, np.repeat(points[:1], 8, axis=0)])
    strings = [f"text {number}" for number in range(60)] + ["text 0"] * 8
    collection = collection_of(copied, strings)
    units = _units(collection, np.arange(68), None)
    assert units[0] == units[-1] and len(set(units.tolist())) == 60
    grouped = _units(
        collection, np.arange(68), [number % 5 for number in range(60)] + [0] * 8
    )
    assert len(set(grouped.tolist())) == 5
    by_hand = hs.read(strings, group=[number % 5 for number in range(60)] + [0] * 8)
    assert (
        hs.cluster(copied, by_hand)
        .data["cluster_of"]
        .equals(hs.cluster(copied, strings).data["cluster_of"])
    )
