"""Project: scores held against scikit-learn, laws of what must not move them, pictures
that own up, and the cities.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.manifold import trustworthiness as oracle_trustworthiness
from sklearn.metrics import calinski_harabasz_score, silhouette_score
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

import hiddenscope as hs
from hiddenscope.analyses.project import workers
from hiddenscope.analyses.project.pictures import align, disparity, panel_of
from hiddenscope.analyses.project.workers import Job, UmapPool
from hiddenscope.errors import Error, StatesError, TextError
from hiddenscope.measures.distances import Distances, trustworthiness
from hiddenscope.measures.permutations import permuted
from hiddenscope.measures.separation import separation
from hiddenscope.sites import Site
from hiddenscope.texts import Labelled
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Lines, Panels
from tests.slices import long, sliced

Tiny = Callable[..., hs.Model]
TEXTS = [
    f"The {animal} {verb} the {thing}."
    for animal in ("cat", "dog")
    for verb in ("sees", "has")
    for thing in ("mat", "hat", "bone")
]
LABELS = ["cat"] * 6 + ["dog"] * 6


def points(
    count: int = 60,
    width: int = 20,
    classes: int = 3,
    apart: float = 2.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows, codes = (
        torch.randn(count, width, generator=generator),
        torch.arange(count) % classes,
    )
    rows[torch.arange(count), codes] += apart
    return rows, codes


def states(values: Tensor, tokens_each: int = 1) -> hs.States:
    count = values.shape[1]
    text = [row // tokens_each for row in range(count)]
    positions = [row % tokens_each for row in range(count)]
    tokens = hs.Tokens(
        None, text, positions, list(range(count)), [f"t{k}" for k in range(count)]
    )
    return hs.States(
        tuple(Site(k) for k in range(len(values))), values, tokens, hs.Source("toy")
    )


def scores(
    rows: Tensor, codes: Tensor, shuffles: int = 99, seed: int = 0
) -> dict[str, Any]:
    return dict(separation(Distances(rows), permuted(codes, shuffles, seed).labellings))


@pytest.mark.parametrize(("count", "shift"), [(60, 0.0), (700, 0.0), (700, 1000.0)])
def test_the_scores_are_those_of_scikit_learn(count: int, shift: float) -> None:
    rows, codes = points(count)
    codes[7] = 3  # alone in its class
    rows, y = rows + shift, codes.numpy()
    found = scores(rows, codes)
    assert found["silhouette"].value == pytest.approx(
        silhouette_score(rows.double().numpy(), y), abs=1e-6
    )
    assert found["fisher"].value == pytest.approx(
        calinski_harabasz_score(rows.double().numpy(), y), rel=1e-6
    )
    nearest = (
        NearestNeighbors(n_neighbors=1)
        .fit(rows.double().numpy())
        .kneighbors(return_distance=False)[:, 0]
    )
    assert found["neighbour"].value == pytest.approx(
        float((y[nearest] == y).mean()), abs=1e-12
    )
    picture = rows[:, :2].contiguous()
    oracle = oracle_trustworthiness(
        rows.double().numpy(), picture.double().numpy(), n_neighbors=9
    )
    assert trustworthiness(Distances(rows), picture, 9) == pytest.approx(
        oracle, abs=1e-5
    )


def test_distances_are_exact_where_it_matters() -> None:
    rows, _ = points(700)
    # In float32 products these would lose their digits.
    far = torch.cat([rows[:350] * 1e-3, rows[350:] * 1e-3 + 50])
    apart = Distances(far)
    assert apart.dtype == torch.float64
    assert Distances(rows).dtype == torch.float32
    for some in (rows, far):
        whole = torch.cat([block for _, block in Distances(some).blocks()]).double()
        exact = torch.cdist(
            some.double(), some.double(), compute_mode="donot_use_mm_for_euclid_dist"
        )
        torch.testing.assert_close(whole, exact, rtol=2e-5, atol=1e-9)
    twice = torch.cat([rows[:3], rows[:3]])
    whole = torch.cat([block for _, block in Distances(twice).blocks()])
    assert (whole[:3, 3:].diagonal() == 0).all()
    assert (whole > 0).sum() == 24


def test_blocks_and_the_whole_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, codes = points(90)
    whole, near = scores(rows, codes), Distances(rows).nearest(5)
    monkeypatch.setattr("hiddenscope.measures.distances.KEPT", 0)
    monkeypatch.setattr("hiddenscope.measures.distances.AT_ONCE", 200)
    monkeypatch.setattr("hiddenscope.measures.separation.MEMBERS", 3000)
    pieces = scores(rows, codes)
    for name, score in whole.items():
        assert pieces[name].value == pytest.approx(score.value, abs=1e-9)
        assert pieces[name].p == score.p
    assert torch.equal(Distances(rows).nearest(5)[0], near[0])
    assert (near[0][:, 0] == torch.arange(90)).all()


def test_what_must_not_move_a_score_does_not() -> None:
    rows, codes = points()
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1))
    turn = torch.linalg.qr(
        torch.randn(
            20, 20, generator=torch.Generator().manual_seed(2), dtype=torch.float64
        )
    )[0]
    base = scores(rows, codes)
    for other in (
        scores(rows[order], codes[order]),
        scores(rows.double() @ turn * 7 + 3, codes),
        scores(rows, (codes + 1) % 3),
    ):
        for name, score in base.items():
            assert other[name].value == pytest.approx(score.value, abs=1e-6)
            assert (other[name].p <= 0.05) == (score.p <= 0.05)


def test_shuffled_labels_are_at_chance() -> None:
    rows, codes = points(40, apart=0.0)
    apart, found = Distances(rows), []
    for seed in range(120):
        own = codes[torch.randperm(40, generator=torch.Generator().manual_seed(seed))]
        found.append(
            [
                score.p
                for score in separation(
                    apart, permuted(own, 49, seed).labellings
                ).values()
            ]
        )
    p = np.array(found)
    assert ((p > 0.4) & (p < 0.6)).mean(0).max() < 0.5
    assert np.abs(p.mean(0) - 0.5).max() < 0.1
    assert (p <= 0.1).mean(0).max() < 0.2
    assert (p <= 0.5).mean(0).min() > 0.3
    assert max(score.p for score in scores(*points(apart=4.0)).values()) == 0.01


def test_of_neighbours_that_are_equally_near_each_counts_its_share() -> None:
    rows = torch.tensor([[0.0], [0.0], [0.0], [9.0]])
    found = scores(rows, torch.tensor([0, 0, 1, 1]))
    assert found["neighbour"].value == pytest.approx((0.5 + 0.5 + 0.0 + 1 / 3) / 4)
    assert found["within"].value == pytest.approx((9 / 2) / (27 / 6))


def test_pictures_are_turned_towards_one_another() -> None:
    picture = points(30, 2, 2)[0].numpy()
    # Mirrored and shifted.
    turned = picture @ np.array([[0.0, 1.0], [1.0, 0.0]], dtype=np.float32) + 5
    np.testing.assert_allclose(
        align(turned, picture), picture - picture.mean(0), atol=1e-5
    )
    assert disparity(picture, turned * 3) == pytest.approx(0, abs=1e-3)
    assert disparity(picture, points(30, 2, 2, seed=5)[0].numpy()) > 0.5
    rows, _ = points(30)
    turn = torch.linalg.qr(
        torch.randn(20, 20, generator=torch.Generator().manual_seed(2))
    )[0]
    layers = hs.project(
        states(torch.stack([rows, rows @ turn, -rows])), method="pca"
    ).data
    for layer in (1, 2):
        np.testing.assert_allclose(layers["x"][layer], layers["x"][0], atol=1e-3)
        np.testing.assert_allclose(layers["y"][layer], layers["y"][0], atol=1e-3)


def test_a_picture_owns_up_to_what_is_not_there() -> None:
    rows, codes = points(60, 200, 2, apart=0.0)
    apart, found = Distances(rows), scores(rows, codes)
    lying = torch.randn(60, 2, generator=torch.Generator().manual_seed(1)).numpy()
    lying[:, 0] += codes.numpy() * 20
    classes_look_apart = panel_of(apart, [lying], codes, found, 15).doubt
    assert classes_look_apart is not None
    assert classes_look_apart.groups is None
    assert classes_look_apart.p is not None and classes_look_apart.p > 0.05
    groups_can_be_seen = panel_of(apart, [lying], None, {}, 15).doubt
    assert groups_can_be_seen is not None
    assert groups_can_be_seen.groups == 2
    assert panel_of(apart, [rows[:, :2].numpy()], codes, found, 15).doubt is None
    real, codes = points(60, 20, 2, apart=30.0)
    shown = real[:, :2].contiguous().numpy()
    assert (
        panel_of(Distances(real), [shown], codes, scores(real, codes), 15).doubt is None
    )


class Stored:
    """States on disk, as a store would have them."""

    def __init__(self, whole: hs.States) -> None:
        self._whole, self.sites, self.tokens = whole, whole.sites, whole.tokens

    def blocks(self, site: str | Site) -> Iterator[Tensor]:
        yield from torch.split(self._whole[site], 2)


def test_every_source_gives_the_same_points(tiny: Tiny) -> None:
    model = tiny("llama")
    base = hs.project(model, (TEXTS, LABELS), method="pca")
    captured = model.capture(TEXTS)
    assert isinstance(captured, hs.States)
    for source in (captured, Stored(captured)):
        found = hs.project(source, LABELS, method="pca")
        for name in ("x", "y", "silhouette", "neighbour_p", "trust"):
            np.testing.assert_allclose(
                found.data[name], base.data[name], rtol=1e-3, atol=1e-4
            )
    assert base.data["x"].dims == ("site", "text")
    assert base.data["label"].values.tolist() == LABELS
    tokens = hs.project(
        captured, list(captured.tokens.strings), method="pca", sites="layer.1"
    )
    assert tokens.data["x"].sizes == {"site": 1, "token": len(captured.tokens)}
    each = hs.project(
        hs.each_token(model), (TEXTS, LABELS), method="pca", sites="layer.1"
    )
    assert each.data.sizes["token"] == len(captured.tokens)
    pair = hs.project(tiny("t5"), (TEXTS, LABELS), method="pca", pool="mean")
    assert {site.split(".")[0] for site in pair.data["site"].values} == {"encoder"}
    assert "separation" not in hs.project(captured, method="pca").facts["parts"][0]


def test_models_and_datasets_side_by_side(tiny: Tiny, tmp_path: Path) -> None:
    models = [tiny("llama"), tiny("gpt2"), tiny("gpt2")]
    some = {"all": (TEXTS, LABELS), "few": (TEXTS[2:10], LABELS[2:10])}
    result = hs.project(models, some, method="pca")
    assert result.data["silhouette"].dims == ("model", "dataset", "site")
    assert result.data.sizes["text"] == 20
    assert len(set(result.data["model"].values)) == 3
    panels, *lines = views_of(result)
    assert isinstance(panels, Panels)
    assert len(set(panels.rows)) == 6 and panels.rows_name == "model, dataset"
    assert panels.title.startswith("all and few in ")
    assert all(isinstance(one, Lines) for one in lines)
    of_few = [k for k, row in enumerate(panels.rows) if row.endswith("few")]
    assert np.isnan(panels.points[of_few][:, :12]).all()
    assert np.isfinite(panels.points[of_few[1]][12:]).all()
    assert len(sections_of(result)) == 2
    result.save(tmp_path / "panels.svg")
    alone = hs.project(models[0], (TEXTS[2:10], LABELS[2:10]), method="pca")
    both = result.data.sel(model=result.data["model"][0], dataset="few")
    np.testing.assert_allclose(alone.data["silhouette"], both["silhouette"], atol=1e-5)
    with pytest.raises(StatesError, match="one point for each text"):
        hs.project(
            hs.each_token([models[0], tiny("bert")]), (TEXTS, LABELS), method="pca"
        )


def test_panels_are_marked_where_the_test_says_so_and_those_of_the_findings_come_first(
    tiny: Tiny,
) -> None:
    rows, codes = points(40, 12, 2, apart=0.0)
    deep = torch.stack(
        [
            rows + (9 * codes[:, None] if layer in (7, 8, 9) else 0)
            for layer in range(13)
        ]
    )
    result = hs.project(states(deep), codes.tolist(), method="pca")
    separation = result.facts["parts"][0]["separation"]
    panels = views_of(result)[0]
    assert isinstance(panels, Panels)
    marked = [
        site
        for site, mark in zip(panels.sites, panels.marks, strict=True)
        if mark == "apart"
    ]
    assert marked == separation["apart_at"] == ["layer.7", "layer.8", "layer.9"]
    first = [panels.sites[panel] for panel in panels.first[0]]
    assert len(first) == 5 and {
        "layer.0",
        "layer.7",
        "layer.12",
        separation["best"]["site"],
    } <= set(first)
    noise = hs.project(states(deep[:7]), codes.tolist(), method="pca")
    assert not any(views_of(noise)[0].marks) and "marked" not in views_of(noise)[0].note
    models = hs.project([tiny("llama"), tiny("gpt2")], (TEXTS, LABELS), method="pca")
    both = views_of(models)[0]
    assert isinstance(both, Panels) and len(both.first) == 2
    for column in zip(*both.first, strict=True):
        depths = [both.depths[panel] for panel in column if panel >= 0]
        assert max(depths) - min(depths) < 0.35


def test_a_layer_whose_states_are_all_equal_says_so() -> None:
    values = torch.stack([torch.ones(12, 8), points(12, 8)[0]])
    result = hs.project(states(values), LABELS, method="pca")
    assert result.facts["parts"][0]["all_equal_at"] == ["layer.0"]
    assert np.isnan(result.data["silhouette"].values[0])
    panels = views_of(result)[0]
    assert isinstance(panels, Panels)
    assert panels.messages == ("All states are equal here", "")
    assert any(
        "All states are equal at layer.0." in section.prose
        for section in sections_of(result)
    )
    every = hs.project(states(values[:1]), LABELS, method="pca")
    assert views_of(every)


def test_classes_of_one_and_one_class() -> None:
    values = points(12, 8)[0][None]
    alone = hs.project(states(values), ["x", *LABELS[1:]], method="pca")
    assert alone.facts["parts"][0]["alone_in_class"] == ["x"]
    assert np.isfinite(alone.data["silhouette"].values).all()
    one = hs.project(states(values), ["x"] * 12, method="pca")
    assert "The points are all of one class." in one.summary()
    assert "silhouette" not in one.data
    none = hs.project(states(values), method="pca")
    panels = views_of(none)[0]
    assert isinstance(panels, Panels)
    assert panels.labels == ()
    assert sections_of(none) and sections_of(one)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"method": "isomap"}, "No method 'isomap'"),
        ({"data": ["a"] * 5}, "there are 5 labels for 12 texts"),
        ({"data": [str(k) for k in range(12)]}, "all 12 labels are different"),
        ({"data": ["a"] * 11 + [None]}, "A label is missing"),
        ({"data": "cities-incomplete"}, "Give a list with one label for each text"),
        ({"method": 5}, "No method '5'"),
        ({"seed": -1}, "seed must be an integer >= 0, got -1"),
        ({"pool": "second"}, "No pooling 'second'"),
        ({"token": "last"}, "token is now called pool"),
        ({"source": 5}, "Give a model, a list of models, or states"),
        ({"source": []}, "Give a model, a list of models, or states"),
        ({"sites": "layer.9"}, "layer.9"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], what: str) -> None:
    given: dict[str, Any] = {
        "source": states(points(12, 8)[0][None]),
        "data": LABELS,
        "method": "pca",
        **options,
    }
    with pytest.raises(Error) as error:
        hs.project(given.pop("source"), given.pop("data"), **given)
    assert what in str(error.value)


def test_how_pictures_are_made_is_checked() -> None:
    for neighbours in (1, 2.5, float("nan"), True):
        with pytest.raises(StatesError, match="neighbours must be an integer >= 2"):
            hs.Pictures(neighbours=neighbours)  # type: ignore[arg-type]


def test_states_that_are_not_finite_are_named() -> None:
    values = points(12, 8)[0].repeat(2, 1, 1)
    values[1, 3, 4] = torch.nan
    with pytest.raises(Error, match=r"layer\.1"):
        hs.project(states(values), LABELS, method="pca")
    with pytest.raises(StatesError, match="there is 1 point, and it takes 4"):
        hs.project(states(values[:1, :1]), method="umap")
    with pytest.raises(TextError, match="the text is empty"):
        hs.project(hs.load((_module(), None)), (["a", ""], ["x", "x"]))


def _module() -> Any:
    from hiddenscope.testing import tiny_model

    return tiny_model("gpt2")


def test_pacmap_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pacmap", None)
    with pytest.raises(StatesError, match=r"pip install 'hiddenscope\[pacmap\]'"):
        hs.project(states(points(12, 8)[0][None]), LABELS, method="pacmap")


@pytest.mark.parametrize("method", ["tsne", pytest.param("pacmap", marks=long)])
def test_the_other_methods(method: Any) -> None:
    values = points(30, 8, 2, apart=9.0)[0][None]
    result = hs.project(states(values), ["a", "b"] * 15, method=method)
    assert np.isfinite(result.data["x"].values).all()
    assert result.data["shown"].values[0] > 0.3
    assert result.data["spread"].values[0] < 0.9


@pytest.fixture(scope="module")
def three_layers() -> Tensor:
    rows, _ = points(50, 30, 2, apart=6.0)
    # Two points only, 25 times each.
    equal = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[torch.arange(50) % 2].repeat(1, 15)
    return torch.stack([equal, rows, torch.ones(50, 30)])


def test_umap_with_one_seed_is_one_picture(three_layers: Tensor) -> None:
    labels, seen = ["a", "b"] * 25, []
    how = hs.Pictures(preview=seen.append)
    once, again = (
        hs.project(states(three_layers), labels, method=how) for _ in range(2)
    )
    assert once.equals(again)
    assert [result.facts["method"] for result in seen] == ["pca", "pca"]
    assert np.isfinite(once.data["x"].values[:2]).all()
    assert once.data["shown"].values[1] > 0.5
    assert once.data["trust"].values[1] > 0.75
    assert 0 < once.data["spread"].values[1] < 1
    other = hs.project(states(three_layers[1:2]), labels, seed=5)
    assert not np.allclose(other.data["x"].values[0], once.data["x"].values[1])
    few = hs.project(states(points(6, 8)[0][None]), ["a", "b"] * 3)
    assert few.facts["neighbours"] == 5


@long
def test_other_processes_give_the_same_pictures(
    three_layers: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    neighbours, distances = Distances(three_layers[1]).nearest(15)
    start = three_layers[1, :, :2].numpy()
    jobs = [
        Job(start, neighbours.numpy(), distances.float().numpy(), seed)
        for seed in range(6)
    ]
    monkeypatch.setattr(workers, "WORTH_A_PROCESS", 1)
    done: list[float] = []
    with UmapPool(0) as alone:
        assert alone.others == 0
        expected = alone.compute(jobs, done.append)
    assert sum(done) == 6
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    with UmapPool(1) as pool:
        assert pool.others == 1
        pool.wait_until_ready()
        assert pool._ready[0].result()
        for ours, theirs in zip(expected, pool.compute(jobs, done.append), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        pool._processes[0].kill()  # a process that ends leaves its job to the others
        assert len(pool.compute(jobs[:3], done.append)) == 3
    assert pool._processes[0].poll() is not None


def test_other_processes_run_in_a_plain_script(
    three_layers: Tensor, tmp_path: Path
) -> None:
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


def test_a_small_job_stays_in_one_process() -> None:
    for count, others in ((31 * 50, 0), (31 * 2000, 1)):
        assert min(UmapPool(count).others, 1) == min(
            others, len(os.sched_getaffinity(0)) - 1
        )


@pytest.mark.real
# The experiment of the cities is run as well.
@long
def test_the_cities_in_a_real_model(smollm2: hs.Model) -> None:
    some = {"incomplete": "cities-incomplete", "complete": "cities-complete"}
    result = hs.project(smollm2, some, method="pca", sites="layer.0,layer.29")
    incomplete, complete = result.facts["parts"]
    assert incomplete["labels_predicted"] >= 45
    assert complete["all_equal_at"] == ["layer.0"]
    data = result.data.sel(dataset="incomplete")
    assert (
        data[["silhouette_p", "neighbour_p", "fisher_p"]].sel(site="layer.0").to_array()
        > 0.5
    ).all()
    assert data["fisher"].sel(site="layer.0").item() == pytest.approx(0, abs=1e-9)
    for name in some:
        late = result.data.sel(dataset=name, site="layer.29")
        assert late["silhouette_p"].item() <= 0.005
    assert "layer.0" not in incomplete["separation"]["apart_at"]
    assert result.facts["tightness"][0]["model"] == "smollm2"
    assert len(sections_of(result)) == 2


def test_a_score_that_is_no_number_is_no_finding() -> None:
    apart = Distances(torch.zeros(6, 2))
    codes = torch.tensor([0, 0, 0, 1, 1, 1])
    found = separation(apart, permuted(codes, 19, seed=0).labellings)
    assert all(np.isnan(one.p) or one.p == 1 for one in found.values())


def test_one_row_far_away_leaves_the_neighbours_of_the_others() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(600, 8, generator=generator)
    rows[:300, 0] += 30
    rows[-1] *= 3_000
    codes = (torch.arange(600) >= 300).long()
    assert (
        separation(Distances(rows), permuted(codes, 9, seed=0).labellings)[
            "neighbour"
        ].value
        > 0.98
    )


def coin_flips(
    runs: int, texts: int, tokens: int, copies: int = 1
) -> Iterator[tuple[hs.States, list[str]]]:
    """States that know their text and nothing else, and labels of texts that mean
    nothing; copies share both.
    """
    for seed in range(runs):
        generator = torch.Generator().manual_seed(seed)
        of_text = torch.randn(2, texts, 1, 8, generator=generator).repeat(
            1, copies, tokens, 1
        )
        values = (
            of_text + 0.3 * torch.randn(of_text.shape, generator=generator)
        ).flatten(1, 2)
        count = texts * copies
        text = [row // tokens for row in range(count * tokens)]
        names = [
            f"{'text' if k < texts else 'TEXT'}"
            f" {k % texts}{'.' if k >= 2 * texts else ''}"
            for k in range(count)
        ]
        positions, strings = (
            [row % tokens for row in range(len(text))],
            ["t"] * len(text),
        )
        given = hs.Tokens(names, text, positions, range(len(text)), strings)
        flips = (torch.rand(texts, generator=generator) < 0.5).tolist()
        yield (
            hs.States((Site(0), Site(1)), values, given, hs.Source("toy")),
            ["ab"[flips[k % texts]] for k in range(count)],
        )


@pytest.mark.parametrize(("by_token", "copies"), sliced([(True, 1), (False, 3)], 1))
def test_coin_flips_are_at_chance_where_rows_of_a_text_go_together(
    by_token: bool, copies: int
) -> None:
    """Tokens of one text, and copies of one text, are no evidence each for itself."""
    results = [
        hs.project(
            hs.each_token(given) if by_token else given,
            labels,
            pool=None if by_token else "mean",
            method="pca",
        )
        for given, labels in coin_flips(40, 24, 6 if by_token else 2, copies)
    ]
    p = np.array([result.data["silhouette_p"].values for result in results])
    assert (p <= 0.05).mean() <= 0.15, (
        "one in twenty is expected; rows shuffled one by one give more than half"
    )
    assert 0.3 < p.mean() < 0.7
    assert (
        sum(
            bool(result.facts["parts"][0]["separation"]["apart_at"])
            for result in results
        )
        <= 6
    )


def test_labels_are_shuffled_between_groups_and_never_within() -> None:
    groups = [0, 0, 0, 1, 1, 2, 3, 3]
    codes = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0])
    drawn = permuted(codes, 200, 0, groups).labellings
    assert torch.equal(drawn[0], codes)
    for group in range(4):
        rows = drawn[:, [row for row, own in enumerate(groups) if own == group]]
        assert (rows == rows[:, :1]).all()
    assert (drawn[1:, [0, 3, 5, 6]].sum(1) == 2).all(), "as many groups of each class"
    tokens = [0, 0, 1, 1, 2, 2]
    mixed = permuted(
        torch.tensor([0, 1, 0, 1, 2, 2]), 200, 0, tokens, units=tokens
    ).labellings
    pairs = {tuple(row.tolist()) for row in mixed.view(-1, 2)}
    assert pairs == {(0, 1), (1, 0), (2, 2)}, "the labels of a text move together"


def test_more_points_do_not_reverse_the_verdict() -> None:
    """Classes that are apart at few of many sites are found so with few shuffles too."""
    for count in (300, 600):
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(16, count, 8, generator=generator)
        values[14:, ::2, 0] += 1.0
        result = hs.project(states(values), ["a", "b"] * (count // 2), method="pca")
        assert result.facts["parts"][0]["separation"]["apart_at"] == [
            "layer.14",
            "layer.15",
        ]
        corrected, p = (
            result.data["silhouette_p_corrected"].values,
            result.data["silhouette_p"].values,
        )
        assert (corrected >= p - 1e-12).all()
        assert corrected[14] <= 0.005


def test_the_corrected_p_names_a_site_of_noise_in_one_of_twenty() -> None:
    named, seeds = 0, sliced(range(60), 20)
    for seed in seeds:
        values = torch.randn(10, 30, 6, generator=torch.Generator().manual_seed(seed))
        result = hs.project(states(values), ["a", "b"] * 15, method="pca")
        named += bool(result.facts["parts"][0]["separation"]["apart_at"])
    # One in twenty is expected, and four times as many come in 0.3% of all draws.
    assert named <= 4 * len(seeds) / 20


def test_nearest_points_that_contradict_the_silhouette_are_said_to() -> None:
    """Each point has a twin of the other class: the classes are apart on average, and
    no nearest point shows it.
    """
    twins = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    shift = 5 * torch.eye(40)[0]
    result = hs.project(
        states(torch.cat([twins, twins + shift])[None]),
        ["a"] * 30 + ["b"] * 30,
        method="pca",
    )
    (sentence,) = [
        line for line in result.summary().splitlines() if "silhouette" in line
    ]
    assert "are apart at layer.0 by the silhouette (p at most 0.05" in sentence
    assert (
        "of 0% of the points has the same class (p = 1 at that site), so nearest"
        " neighbours alone do not show it." in sentence
    )


def test_sections_hold_every_finding_and_name_the_classes() -> None:
    rows, codes = points(30, 8, 2, apart=9.0)
    labelled = hs.project(
        states(rows[None]), ["ab"[code] for code in codes], method="pca"
    )
    bare = hs.project(states(torch.cat([rows, rows])[None, :30]), method="pca")
    for result in (labelled, bare):
        told = " ".join(section.prose for section in sections_of(result))
        assert all(line.strip() in told for line in result.summary().splitlines()[1:])
    assert (
        "(“a”, “b”)" in sections_of(labelled)[0].reading
        or "(“b”, “a”)" in sections_of(labelled)[0].reading
    )
    assert "classes" not in sections_of(bare)[0].title


def pairs_of(count: int, apart: float, seed: int = 0) -> tuple[hs.States, list[str]]:
    """Minimal pairs: the two texts share their topic, and one direction tells a
    question from a statement.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(1, count, 1, 12, generator=generator).repeat(1, 1, 2, 1)
    values += 0.3 * torch.randn(values.shape, generator=generator)
    values[:, :, 1, 0] += apart
    names = [f"You saw the {noun} there{end}" for noun in range(count) for end in ".?"]
    rows = range(2 * count)
    tokens = hs.Tokens(names, rows, [0] * 2 * count, rows, ["t"] * 2 * count)
    return (
        hs.States((Site(0),), values.flatten(1, 2), tokens, hs.Source("toy")),
        [
            "said",
            "asked",
        ]
        * count,
    )


def test_minimal_pairs_are_permuted_within_pairs() -> None:
    """Texts that differ in a full stop are no copies where their labels differ, and
    whole pairs are all alike.
    """
    result = hs.project(*pairs_of(16, 12.0), method="pca")
    (part,) = result.facts["parts"]
    assert part["separation"]["best"]["silhouette"] > 0.5
    assert part["separation"]["best"]["p_corrected"] <= 0.002 and part["separation"][
        "apart_at"
    ] == ["layer.0"]
    assert (
        "doubts" not in part["picture"] and part["groups"] == 16 and part["texts"] == 32
    )
    assert "Do not trust" not in result.summary()
    p = [
        float(
            hs.project(*pairs_of(16, 0.0, seed), method="pca").data["silhouette_p"][0]
        )
        for seed in range(30)
    ]
    assert 0.25 < np.mean(p) < 0.75 and np.mean(np.array(p) <= 0.05) <= 0.2


def test_the_smallest_p_of_few_pairs_is_told() -> None:
    result = hs.project(*pairs_of(4, 12.0), method="pca")
    assert (
        result.facts["parts"][0]["smallest_p"]
        == result.facts["parts"][0]["separation"]["best"]["p_corrected"]
        == 1 / 8
    )
    assert (
        "the smallest p-value that is possible is 0.12, so nothing can be shown"
        in result.summary()
    )


def test_where_nothing_can_be_permuted_there_is_no_p_and_no_verdict() -> None:
    """One group for each class: labels that change places part the texts in the same
    way.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 12, 6, generator=generator)
    values[:, 6:, 0] += 9
    labels = ["a"] * 6 + ["b"] * 6
    given = states(values)
    data = hs.read(([f"text {k}" for k in range(12)], labels), group=labels)
    result = hs.project(given, data, method="pca")
    (part,) = result.facts["parts"]
    assert (
        part["smallest_p"] is None and part["separation"]["best"]["p_corrected"] is None
    )
    assert (
        set(part["separation"]["best"]["p"].values()) == {None}
        and part["separation"]["apart_at"] == []
    )
    assert "silhouette_p" not in result.data and "doubts" not in part["picture"]
    said = result.summary()
    assert "There is no p-value: the labels can be permuted in no other way." in said
    assert (
        "No site is shown" not in said
        and "Do not trust" not in said
        and "nan" not in said
    )


def paraphrases(
    seed: int, groups: int = 10, size: int = 4
) -> tuple[hs.States, Labelled]:
    """States that know which sentence a text paraphrases and nothing else; labels of
    sentences that mean nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, groups, 1, 8, generator=generator).repeat(1, 1, size, 1)
    values = (values + 0.2 * torch.randn(values.shape, generator=generator)).flatten(
        1, 2
    )
    number = np.repeat(np.arange(groups), size)
    labels = torch.randperm(groups, generator=generator).numpy()[number] % 2
    given = states(values)
    return given, hs.read(
        ([f"text {k}" for k in range(len(number))], labels.tolist()), group=number
    )


def test_groups_of_paraphrases_are_one_piece_of_evidence_each() -> None:
    """Without groups, forty texts of ten sentences set the classes apart in nearly
    every run.
    """
    alone = together = 0
    for seed in range(12):
        given, data = paraphrases(seed)
        without = hs.project(given, list(data.labels or ()), method="pca")
        grouped = hs.project(given, data, method="pca")
        alone += bool(without.facts["parts"][0]["separation"]["apart_at"])
        together += bool(grouped.facts["parts"][0]["separation"]["apart_at"])
        assert (
            grouped.facts["parts"][0]["groups"] == 10
            and grouped.facts["parts"][0]["groups_given"]
        )
    assert alone >= 9 and together <= 3  # more comes up in 1 of 350 at a level of 5%
    assert (
        "are taken as independent of one another, since no groups were given"
        in without.summary()
    )
    assert (
        "The 10 groups of texts are taken as independent of one another"
        in grouped.summary()
    )


def test_a_class_with_more_copies_is_not_apart_for_that() -> None:
    p = []
    for seed in range(25):
        generator = torch.Generator().manual_seed(seed)
        text = np.repeat(np.arange(24), [6, 1] * 12).tolist()
        values = torch.randn(1, 24, 8, generator=generator)
        result = hs.project(named(values, text), [k % 2 for k in text], method="pca")
        p.append(float(result.data["neighbour_p"][0]))
        assert result.facts["parts"][0]["copies"] == len(text) - 24
    assert np.sum(np.array(p) <= 0.05) <= 4  # a third of them where copies count


def named(values: Tensor, text: Sequence[int]) -> hs.States:
    """States of texts with one token each, some of which are copies."""
    rows = range(len(text))
    tokens = hs.Tokens(
        [f"text {k}" for k in text], rows, [0] * len(text), rows, ["t"] * len(text)
    )
    return hs.States(
        tuple(Site(k) for k in range(len(values))),
        values[:, list(text)],
        tokens,
        hs.Source("toy"),
    )


def test_copies_move_no_score() -> None:
    values = torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0))
    once, twice = range(30), [*range(30), *range(0, 30, 3)]
    alone, copied = (
        hs.project(named(values, text), [k % 2 for k in text], method="pca")
        for text in (once, twice)
    )
    for name in (
        "silhouette",
        "neighbour",
        "fisher",
        "within",
        "silhouette_p",
        "neighbour_p",
    ):
        np.testing.assert_allclose(alone.data[name], copied.data[name], rtol=1e-6)
    assert copied.facts["parts"][0]["copies"] == 10 and copied.data.sizes["text"] == 40
    assert (
        "10 texts came again with the same label; each counts once." in copied.summary()
    )
