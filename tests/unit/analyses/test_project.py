"""Project: scores held against scikit-learn, laws of what must not move them, and
pictures that own up.
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors
from torch import Tensor

import hiddenscope as hs
from hiddenscope.analyses.project import workers
from hiddenscope.analyses.project.pictures import align, disparity, panel_of
from hiddenscope.analyses.project.workers import Job, UmapPool
from hiddenscope.errors import Error, StatesError, TextError
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.permutations import permuted
from hiddenscope.measures.separation import separation
from hiddenscope.results import views_of
from hiddenscope.results.pictures import Panels
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer

Tiny = Callable[..., hs.Model]
TEXTS = [
    f"The {animal} {verb} the {thing}."
    for animal in ("cat", "dog")
    for verb in ("sees", "has")
    for thing in ("mat", "hat", "bone")
]
LABELS = ["cat"] * 6 + ["dog"] * 6


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def points(
    count: int = 60,
    width: int = 20,
    classes: int = 3,
    apart: float = 2.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    rows, codes = noise(count, width, seed=seed), torch.arange(count) % classes
    rows[torch.arange(count), codes] += apart
    return rows, codes


def states(
    values: Tensor, names: Sequence[str] | None = None, tokens_each: int = 1
) -> hs.States:
    count = values.shape[1]
    text = [row // tokens_each for row in range(count)]
    positions = [row % tokens_each for row in range(count)]
    strings = [f"t{k}" for k in range(count)]
    tokens = hs.Tokens(names, text, positions, list(range(count)), strings)
    sites = tuple(Site(k) for k in range(len(values)))
    return hs.States(sites, values, tokens, hs.Source("toy"))


def drawn(
    values: Tensor, labels: Any = None, names: Sequence[str] | None = None
) -> hs.Result:
    """The pictures of states by PCA."""
    return hs.project(states(values, names), labels, method="pca")


def panels_of(result: hs.Result) -> Panels:
    panels = views_of(result)[0]
    assert isinstance(panels, Panels)
    return panels


def scores(rows: Tensor, codes: Tensor) -> dict[str, Any]:
    return dict(separation(Distances(rows), permuted(codes, 99, 0).labellings))


def test_distances_are_exact_where_it_matters() -> None:
    rows, _ = points(700)
    # In float32 products these would lose their digits.
    far = torch.cat([rows[:350] * 1e-3, rows[350:] * 1e-3 + 50])
    exactly = "donot_use_mm_for_euclid_dist"
    for some in (rows, far):
        whole = torch.cat([block for _, block in Distances(some).blocks()]).double()
        exact = torch.cdist(some.double(), some.double(), compute_mode=exactly)
        torch.testing.assert_close(whole, exact, rtol=2e-5, atol=1e-9)
    twice = torch.cat([rows[:3], rows[:3]])
    whole = torch.cat([block for _, block in Distances(twice).blocks()])
    assert (whole[:3, 3:].diagonal() == 0).all()
    assert (whole > 0).sum() == 24


def test_one_row_far_away_leaves_the_neighbours_of_the_others() -> None:
    rows, codes = noise(600, 8), (torch.arange(600) >= 300).long()
    rows[:300, 0] += 30
    rows[-1] *= 3_000
    found = separation(Distances(rows), permuted(codes, 9, seed=0).labellings)
    assert found["neighbour"].value > 0.98


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
    turn = torch.linalg.qr(noise(20, 20, seed=2).double())[0]
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
        scored = separation(apart, permuted(own, 49, seed).labellings)
        found.append([score.p for score in scored.values()])
    p = np.array(found)
    assert ((p > 0.4) & (p < 0.6)).mean(0).max() < 0.5
    assert np.abs(p.mean(0) - 0.5).max() < 0.1
    assert (p <= 0.1).mean(0).max() < 0.2
    assert (p <= 0.5).mean(0).min() > 0.3
    assert max(score.p for score in scores(*points(apart=4.0)).values()) == 0.01


def test_ties_and_equal_points_have_scores_by_their_definition() -> None:
    rows = torch.tensor([[0.0], [0.0], [0.0], [9.0]])
    found = scores(rows, torch.tensor([0, 0, 1, 1]))
    assert found["neighbour"].value == pytest.approx((0.5 + 0.5 + 0.0 + 1 / 3) / 4)
    assert found["within"].value == pytest.approx((9 / 2) / (27 / 6))
    equal = scores(torch.zeros(6, 2), torch.tensor([0, 0, 0, 1, 1, 1]))
    assert all(np.isnan(one.p) or one.p == 1 for one in equal.values())


def test_labels_are_shuffled_between_groups_and_never_within() -> None:
    groups = [0, 0, 0, 1, 1, 2, 3, 3]
    codes = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0])
    shuffled = permuted(codes, 200, 0, groups).labellings
    assert torch.equal(shuffled[0], codes)
    for group in range(4):
        rows = shuffled[:, [row for row, own in enumerate(groups) if own == group]]
        assert (rows == rows[:, :1]).all()
    assert (shuffled[1:, [0, 3, 5, 6]].sum(1) == 2).all(), "as many of each class"
    tokens, codes = [0, 0, 1, 1, 2, 2], torch.tensor([0, 1, 0, 1, 2, 2])
    mixed = permuted(codes, 200, 0, tokens, units=tokens).labellings
    pairs = {tuple(row.tolist()) for row in mixed.view(-1, 2)}
    possible = {(0, 1), (1, 1), (1, 0), (0, 0), (2, 2)}
    assert pairs == possible, "the labels of a text move together"


def test_pictures_are_turned_towards_one_another() -> None:
    picture = points(30, 2, 2)[0].numpy()
    # Mirrored and shifted.
    turned = picture @ np.array([[0.0, 1.0], [1.0, 0.0]], dtype=np.float32) + 5
    centred = picture - picture.mean(0)
    np.testing.assert_allclose(align(turned, picture), centred, atol=1e-5)
    assert disparity(picture, turned * 3) == pytest.approx(0, abs=1e-3)
    assert disparity(picture, points(30, 2, 2, seed=5)[0].numpy()) > 0.5
    rows, _ = points(30)
    turn = torch.linalg.qr(noise(20, 20, seed=2))[0]
    layers = drawn(torch.stack([rows, rows @ turn, -rows])).data
    for axis in "xy":
        for layer in (1, 2):
            here, first = layers[axis][layer], layers[axis][0]
            np.testing.assert_allclose(here, first, atol=1e-3)


def test_a_picture_owns_up_to_what_is_not_there() -> None:
    rows, codes = points(60, 200, 2, apart=0.0)
    apart, found = Distances(rows), scores(rows, codes)
    lying = noise(60, 2, seed=1).numpy()
    lying[:, 0] += codes.numpy() * 20
    classes_look_apart = panel_of("layer.1", apart, [lying], codes, found, 15).doubt
    assert classes_look_apart is not None
    assert classes_look_apart.groups is None
    assert classes_look_apart.p is not None and classes_look_apart.p > 0.05
    groups_can_be_seen = panel_of("layer.1", apart, [lying], None, {}, 15).doubt
    assert groups_can_be_seen is not None
    assert groups_can_be_seen.groups == 2
    assert (
        panel_of("layer.1", apart, [rows[:, :2].numpy()], codes, found, 15).doubt
        is None
    )
    real, codes = points(60, 20, 2, apart=30.0)
    shown, found = real[:, :2].contiguous().numpy(), scores(real, codes)
    assert panel_of("layer.1", Distances(real), [shown], codes, found, 15).doubt is None


@pytest.fixture
def models(tiny: Tiny) -> dict[str, hs.Model]:
    """Models of four families, loaded before a test is timed."""
    return {family: tiny(family) for family in ("llama", "gpt2", "bert", "t5")}


def test_every_source_gives_the_same_points(models: dict[str, hs.Model]) -> None:
    model = models["llama"]
    given: dict[str, Any] = {"method": "pca", "sites": "layer.1"}
    base = hs.project(model, (TEXTS, LABELS), **given)
    captured = model.capture(TEXTS)
    assert isinstance(captured, hs.States)
    found = hs.project(captured, LABELS, **given).data
    for name in ("x", "y", "silhouette", "neighbour_p", "trust"):
        np.testing.assert_allclose(found[name], base.data[name], rtol=1e-3, atol=1e-4)
    assert base.data["x"].dims == ("site", "text")
    assert base.data["label"].values.tolist() == LABELS
    tokens = hs.project(captured, list(captured.tokens.strings), **given)
    assert tokens.data["x"].sizes == {"site": 1, "token": len(captured.tokens)}
    each = hs.project(hs.each_token(model), (TEXTS, LABELS), **given)
    assert each.data.sizes["token"] == len(captured.tokens)
    pair = hs.project(models["t5"], (TEXTS, LABELS), method="pca", pool="mean")
    assert {site.split(".")[0] for site in pair.data["site"].values} == {"encoder"}
    assert "separation" not in hs.project(captured, **given).facts["parts"][0]


def test_a_picture_of_two_models_says_what_its_percentages_are(
    models: dict[str, hs.Model],
) -> None:
    two = [models["llama"], models["gpt2"]]
    result = hs.project(two, (TEXTS, LABELS), method="pca", sites="layer.3")
    note = panels_of(result).note
    assert "A percentage is the depth of a site in its model" in note


def test_models_and_datasets_side_by_side(models: dict[str, hs.Model]) -> None:
    three = [models["llama"], models["gpt2"], models["gpt2"]]
    few = (TEXTS[2:10], LABELS[2:10])
    both = {"all": (TEXTS, LABELS), "few": few}
    result = hs.project(three, both, method="pca", sites="layer.0,layer.3")
    assert result.data["silhouette"].dims == ("model", "dataset", "site")
    assert result.data.sizes["text"] == 20
    assert len(set(result.data["model"].values)) == 3
    panels = panels_of(result)
    assert len(set(panels.rows)) == 6 and panels.rows_name == "model, dataset"
    of_few = [k for k, row in enumerate(panels.rows) if row.endswith("few")]
    assert np.isnan(panels.points[of_few][:, :12]).all()
    assert np.isfinite(panels.points[of_few[1]][12:]).all()
    for column in zip(*panels.first, strict=True):
        depths = [panels.depths[panel] for panel in column if panel >= 0]
        assert max(depths) - min(depths) < 0.35
    alone = hs.project(three[0], few, method="pca", sites="layer.0,layer.3").data
    beside = result.data.sel(model=result.data["model"][0], dataset="few")
    np.testing.assert_allclose(alone["silhouette"], beside["silhouette"], atol=1e-5)
    for record in result.facts["comparisons"]:
        of_model = result.data.sel(model=record["model"])
        assert (record["first"], record["second"]) == ("all", "few")
        # Eight texts are in both.
        assert record["pairs"] == 8 and record["groups"] == 12
        for name in ("dispersion", "neighbour"):
            values = of_model[name].sel(site=record[name]["site"]).values
            expected = [record[name]["first"], record[name]["second"]]
            np.testing.assert_allclose(values, expected)
    assert {record["model"] for record in result.facts["comparisons"]} == {
        *result.data["model"].values
    }
    each = hs.each_token(three[0])
    tokens = hs.project(each, both, method="pca", sites="layer.3").data
    assert set(tokens["text"].values.tolist()) == set(range(20)), "numbered through"
    others = hs.each_token([models["llama"], models["bert"]])
    with pytest.raises(StatesError, match="one point for each text"):
        hs.project(others, (TEXTS, LABELS), method="pca")


def test_labels_that_the_model_predicts_are_counted() -> None:
    module: Any = tiny_model("gpt2")
    model = hs.load((module, tiny_tokenizer()))
    (the,) = tiny_tokenizer()(" the", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        # Whatever the text, this token has the largest logit.
        module.transformer.ln_f.bias[0] = 1000
        module.transformer.wte.weight[the, 0] = 9
    labels = ["the"] * 5 + ["of"] * 7
    for sites in ("layer.0", "layer.*"):
        result = hs.project(model, (TEXTS, labels), method="pca", sites=sites)
        assert result.facts["parts"][0]["labels_predicted"] == 5
    # Words of several tokens are predicted by none.
    words = hs.project(model, (TEXTS, LABELS), method="pca", sites="layer.0")
    assert "labels_predicted" not in words.facts["parts"][0]


def test_panels_are_marked_where_the_test_says_so_and_those_of_the_findings_come_first() -> (
    None
):
    rows, codes = points(40, 12, 2, apart=0.0)
    deep = rows.repeat(13, 1, 1)
    deep[7:10] += 9 * codes[:, None]
    result = drawn(deep, codes.tolist())
    separation = result.facts["parts"][0]["separation"]
    panels = panels_of(result)
    marks = zip(panels.sites, panels.marks, strict=True)
    marked = [site for site, mark in marks if mark == "apart"]
    assert marked == separation["apart_at"] == ["layer.7", "layer.8", "layer.9"]
    first = [panels.sites[panel] for panel in panels.first[0]]
    best = separation["best"]["site"]
    assert len(first) == 5 and {"layer.0", "layer.7", "layer.12", best} <= set(first)
    noisy = panels_of(drawn(deep[:3], codes.tolist()))
    assert not any(noisy.marks) and "marked" not in noisy.note


def test_a_layer_whose_states_are_all_equal_says_so() -> None:
    values = torch.stack([torch.ones(12, 8), points(12, 8)[0]])
    result = drawn(values, LABELS)
    assert result.facts["parts"][0]["all_equal_at"] == ["layer.0"]
    assert np.isnan(result.data["silhouette"].values[0])
    assert panels_of(result).messages == ("All states are equal here", "")
    assert views_of(drawn(values[:1], LABELS))


def test_classes_of_one_and_one_class() -> None:
    values = points(12, 8)[0][None]
    alone = drawn(values, ["x", *LABELS[1:]])
    assert alone.facts["parts"][0]["alone_in_class"] == ["x"]
    assert np.isfinite(alone.data["silhouette"].values).all()
    one = drawn(values, ["x"] * 12)
    assert "silhouette" not in one.data
    assert panels_of(drawn(values)).labels == ()


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"method": "isomap"}, "method must be 'umap' or"),
    ({"data": ["a"] * 5}, "there are 5 labels for 12 texts"),
    ({"data": [str(k) for k in range(12)]}, "all 12 labels are different"),
    ({"data": ["a"] * 11 + [None]}, "A label is missing"),
    ({"data": "cities-incomplete"}, "it has 50 texts, and the states are of 12"),
    ({"method": 5}, "method must be 'umap' or"),
    ({"seed": -1}, "seed must be an integer >= 0: got -1"),
    ({"pool": "second"}, "No pooling 'second'"),
    ({"source": 5}, "Give a model, a list of models, or states"),
    ({"source": []}, "Give a model, a list of models, or states"),
    ({"sites": "layer.9"}, "layer.9"),
]


def test_what_cannot_be_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    values = points(12, 8)[0].repeat(2, 1, 1)
    usual = {"source": states(values), "data": LABELS, "method": "pca"}
    for options, what in REFUSED:
        given: dict[str, Any] = {**usual, **options}
        with pytest.raises(Error) as error:
            hs.project(given.pop("source"), given.pop("data"), **given)
        assert what in str(error.value)
    for neighbours in (1, 2.5, float("nan"), True):
        with pytest.raises(StatesError, match="neighbours must be an integer >= 2"):
            hs.Pictures(neighbours=neighbours)  # type: ignore[arg-type]
    with pytest.raises(TextError, match="the text is empty"):
        hs.project((tiny_model("gpt2"), None), (["a", ""], ["x", "x"]), method="pca")
    with pytest.raises(StatesError, match="there is 1 point, and it takes 4"):
        hs.project(states(values[:1, :1]), method="tsne")
    monkeypatch.setitem(sys.modules, "pacmap", None)
    with pytest.raises(StatesError, match=r"pip install 'hiddenscope\[pacmap\]'"):
        hs.project(states(values), LABELS, method="pacmap")
    values[1, 3, 4] = torch.nan
    with pytest.raises(Error, match=r"layer\.1"):
        drawn(values, LABELS)


@pytest.mark.parametrize(
    "method", ["tsne", pytest.param("pacmap", marks=pytest.mark.slow)]
)
def test_the_other_methods(method: Any) -> None:
    values = points(30, 8, 2, apart=9.0)[0][None]
    result = hs.project(states(values), ["a", "b"] * 15, method=method)
    assert np.isfinite(result.data["x"].values).all()
    assert result.data["shown"].values[0] > 0.3
    assert result.data["spread"].values[0] < 0.9


def test_umap_starts_from_pca_with_the_nearest_points(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UMAP itself takes seconds to compile: here a picture is its start, turned."""
    jobs: list[Job] = []

    def turned(job: Job) -> Any:
        jobs.append(Job.from_bytes(job.to_bytes()))
        angle = job.seed / 10
        turn = [[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]]
        return (job.start @ np.array(turn)).astype(np.float32)

    monkeypatch.setattr(Job, "compute", turned)
    monkeypatch.setattr(workers, "compile_umap", lambda: None)
    rows, codes = points(30, 8, 2, apart=9.0)
    values, seen = torch.stack([rows, rows * 2 + 1]), []
    how = hs.Pictures(neighbours=5, preview=seen.append)
    labels = codes.tolist()
    result = hs.project(states(values), labels, method=how, seed=4)
    assert [job.seed for job in jobs] == [4, 5, 6, 4, 5, 6]
    assert result.facts["seeds"] == [4, 5, 6] and result.facts["neighbours"] == 5
    by_pca = drawn(values, labels).data
    assert [preview.facts["method"] for preview in seen] == ["pca"]
    np.testing.assert_allclose(seen[0].data["x"], by_pca["x"], atol=1e-5)
    near = NearestNeighbors(n_neighbors=5).fit(rows.numpy()).kneighbors(rows.numpy())
    for job, scale in ((jobs[0], 1), (jobs[3], 2)):
        np.testing.assert_array_equal(job.neighbours, near[1])
        np.testing.assert_allclose(job.distances, near[0] * scale, atol=1e-4)
        assert np.abs(job.start).max() == pytest.approx(10)
    # Turned pictures are one picture, and that of every layer lies as the first.
    np.testing.assert_allclose(result.data["spread"], 0, atol=1e-3)
    np.testing.assert_allclose(result.data["x"][1], result.data["x"][0], atol=1e-4)
    ratio = result.data["x"] / result.data["x"].max("text")
    assert np.abs(ratio).max() < 10 and (result.data["shown"] > 0.5).all()
    few = hs.project(states(points(6, 8)[0][None]), ["a", "b"] * 3)
    assert few.facts["neighbours"] == 5
    with pytest.raises(StatesError, match="there are 3 points, and it takes 4"):
        hs.project(states(values[:, :3]))


@pytest.mark.slow
def test_umap_with_one_seed_is_one_picture() -> None:
    rows, _ = points(50, 30, 2, apart=6.0)
    # Two points only, 25 times each.
    equal = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[torch.arange(50) % 2].repeat(1, 15)
    layers, labels = torch.stack([equal, rows, torch.ones(50, 30)]), ["a", "b"] * 25
    once, again = (hs.project(states(layers), labels) for _ in range(2))
    assert once.equals(again)
    assert np.isfinite(once.data["x"].values[:2]).all()
    assert once.data["shown"].values[1] > 0.5
    assert once.data["trust"].values[1] > 0.75
    assert 0 < once.data["spread"].values[1] < 1
    other = hs.project(states(layers[1:2]), labels, seed=5)
    assert not np.allclose(other.data["x"].values[0], once.data["x"].values[1])


def test_a_small_job_stays_in_one_process() -> None:
    for count, others in ((31 * 50, 0), (31 * 2000, 1)):
        most = len(os.sched_getaffinity(0)) - 1
        assert min(UmapPool(count).others, 1) == min(others, most)


def tokens_of_texts(seed: int) -> hs.Result:
    """Tokens know their text and nothing else."""
    values = noise(2, 24, 1, 8, seed=seed).repeat(1, 1, 6, 1)
    values += 0.3 * noise(*values.shape, seed=1000 + seed)
    given = states(values.flatten(1, 2), [f"text {k}" for k in range(24)], 6)
    return hs.project(hs.each_token(given), flips(seed, 24), method="pca")


def many_sites(seed: int) -> hs.Result:
    return drawn(noise(10, 30, 6, seed=seed), ["a", "b"] * 15)


def equal_pairs(seed: int) -> hs.Result:
    return drawn(*pairs_of(16, 0.0, seed))


def grouped_paraphrases(seed: int) -> hs.Result:
    return drawn(*paraphrases(seed))


def flips(seed: int, count: int) -> list[str]:
    coins = np.random.default_rng(seed).integers(0, 2, count)
    return ["ab"[coin] for coin in coins]


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        tokens_of_texts,
        many_sites,
        equal_pairs,
        grouped_paraphrases,
    ],
)
def test_what_means_nothing_is_at_chance(draw: Callable[[int], hs.Result]) -> None:
    """Rows that go together, and sites of which the best is told, are no evidence each
    for itself.
    """
    results = [draw(seed) for seed in range(40)]
    for score in ("silhouette", "neighbour"):
        p = np.array([result.data[f"{score}_p"].values for result in results])
        assert (p <= 0.05).mean() <= 0.15, "one in twenty is expected"
        assert 0.3 < p.mean() < 0.7
    parts = [result.facts["parts"][0]["separation"] for result in results]
    # More comes up in 1 of 300.
    assert sum(bool(part["apart_at"]) for part in parts) <= 6


def test_more_points_do_not_reverse_the_verdict() -> None:
    """Classes that are apart at few of many sites are found so with few shuffles too."""
    for count in (200, 510):
        values = noise(4, count, 8)
        values[2:, ::2, 0] += 1.0
        result = drawn(values, ["a", "b"] * (count // 2))
        apart_at = result.facts["parts"][0]["separation"]["apart_at"]
        assert apart_at == ["layer.2", "layer.3"]
        corrected = result.data["apart_p"].values
        assert (corrected >= result.data["silhouette_p"].values - 1e-12).all()
        assert corrected[2] <= 0.005


def pairs_of(
    count: int, apart: float, seed: int = 0
) -> tuple[Tensor, list[str], list[str]]:
    """Minimal pairs: the two texts share their topic, and one direction tells a
    question from a statement.
    """
    values = noise(1, count, 1, 12, seed=seed).repeat(1, 1, 2, 1)
    values += 0.3 * noise(*values.shape, seed=1000 + seed)
    values[:, :, 1, 0] += apart
    names = [f"You saw the {noun} there{end}" for noun in range(count) for end in ".?"]
    return values.flatten(1, 2), ["said", "asked"] * count, names


def test_minimal_pairs_are_permuted_within_pairs() -> None:
    """Texts that differ in a full stop are no copies where their labels differ, and
    whole pairs are all alike.
    """
    result = drawn(*pairs_of(16, 12.0))
    (part,) = result.facts["parts"]
    assert part["separation"]["best"]["silhouette"] > 0.5
    assert part["separation"]["best"]["p_corrected"] <= 0.002
    assert part["separation"]["apart_at"] == ["layer.0"]
    assert part["groups"] == 16 and part["texts"] == 32
    assert "doubts" not in part["picture"]
    few = drawn(*pairs_of(4, 12.0))
    (part,) = few.facts["parts"]
    assert part["smallest_p"] == part["separation"]["best"]["p_corrected"] == 1 / 8


def test_where_nothing_can_be_permuted_there_is_no_p_and_no_verdict() -> None:
    """One group for each class: labels that change places part the texts in the same
    way.
    """
    values = noise(2, 12, 6)
    values[:, 6:, 0] += 9
    labels = ["a"] * 6 + ["b"] * 6
    data = hs.read(([f"text {k}" for k in range(12)], labels), group=labels)
    result = drawn(values, data)
    (part,) = result.facts["parts"]
    separation = part["separation"]
    assert part["smallest_p"] is None and separation["best"]["p_corrected"] is None
    assert set(separation["best"]["p"].values()) == {None}
    assert separation["apart_at"] == []
    assert "silhouette_p" not in result.data and "doubts" not in part["picture"]


def paraphrases(seed: int) -> tuple[Tensor, Any]:
    """States that know which of ten sentences a text paraphrases and nothing else;
    labels of sentences that mean nothing.
    """
    values = noise(2, 10, 1, 8, seed=seed).repeat(1, 1, 4, 1)
    values += 0.2 * noise(*values.shape, seed=1000 + seed)
    number = np.repeat(np.arange(10), 4)
    labels = (np.random.default_rng(seed).permutation(10)[number] % 2).tolist()
    names = [f"text {k}" for k in range(40)]
    return values.flatten(1, 2), hs.read((names, labels), group=number)


def test_groups_of_paraphrases_are_one_piece_of_evidence_each() -> None:
    """Without groups, forty texts of ten sentences set the classes apart in nearly
    every run, unless their order gives them away.
    """
    order = np.random.default_rng(0).permutation(40)
    alone = together = 0
    for seed in range(6):
        values, data = paraphrases(seed)
        mixed = [data.labels[row] for row in order]
        without, grouped = drawn(values[:, order], mixed), drawn(values, data)
        alone += bool(without.facts["parts"][0]["separation"]["apart_at"])
        together += bool(grouped.facts["parts"][0]["separation"]["apart_at"])
        assert grouped.facts["parts"][0]["groups"] == 10
        assert grouped.facts["parts"][0]["groups_given"]
    assert alone >= 5 and together <= 1
    in_order = drawn(values, list(data.labels)).facts["parts"][0]
    assert "serial_inflation" in in_order and in_order["smallest_p"] is None
    assert "serial_inflation" not in grouped.facts["parts"][0]


def test_classes_of_several_clouds_are_apart_by_their_neighbours() -> None:
    """Eight clouds around a circle, of either class in turn: hardly a silhouette."""
    angles = torch.arange(8.0).repeat_interleave(5) * torch.pi / 4
    clouds = 20 * torch.stack([angles.cos(), angles.sin()], 1) + noise(40, 2)
    result = drawn(clouds[None], (["a"] * 5 + ["b"] * 5) * 4)
    separation = result.facts["parts"][0]["separation"]
    assert separation["best"]["silhouette"] < 0.1
    assert separation["apart_at"] == ["layer.0"]
    assert "has the same class" in result.summary()
