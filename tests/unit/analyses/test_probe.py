"""Probe: what is planted is found where it was planted, what is not there is not, and
what is kept comes back.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.metrics import r2_score
from sklearn.preprocessing import StandardScaler

import hiddenscope as hs
from hiddenscope.analyses.probe.design import design_of, target_of
from hiddenscope.analyses.probe.labels import (
    control,
    labelled_rows,
    position,
    previous_token,
    word_start,
)
from hiddenscope.analyses.probe.significance import null_distribution
from hiddenscope.errors import (
    ArgumentError,
    Damaged,
    FileError,
    NotFinite,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.files import write_tensors
from hiddenscope.linear import (
    Problems,
    logistic,
    mix,
    ridge,
    standardised,
)
from hiddenscope.linear.crossvalidation import (
    STRENGTHS,
    bootstrap_classes,
    bootstrap_numbers,
    plant_signal,
)
from hiddenscope.linear.intervals import (
    BootstrapSample,
    ExplainedVariance,
    Interval,
    PermutationTest,
    PlantedSpread,
    VarianceFactors,
    Z,
    accuracy,
    accuracy_interval,
    bootstrap_accuracy,
    permutation_test,
    planted_spread,
    r2,
    r2_interval,
    variance_factors,
)
from hiddenscope.linear.jackknife import jackknife_deviation
from hiddenscope.measures.grouped import effective_count
from hiddenscope.sites import Site
from hiddenscope.texts import Labelled

Tiny = Callable[..., hs.Model]
PLANTED = 2


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(
    values: torch.Tensor,
    lengths: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
) -> hs.States:
    """States of texts, a token each unless their lengths are given."""
    lengths = [1] * values.shape[1] if lengths is None else lengths
    text = [k for k, length in enumerate(lengths) for _ in range(length)]
    ids = list(range(len(text))) if ids is None else ids
    names = [f"text {k}" for k in range(len(lengths))] if names is None else names
    positions = [place for length in lengths for place in range(length)]
    tokens = hs.Tokens(names, text, positions, ids, [f"t{k}" for k in ids])
    sites = tuple(Site(k) for k in range(len(values)))
    return hs.States(sites, values, tokens, hs.Source("toy"))


def planted(
    rows: int = 80, width: int = 12, sites: int = 4, seed: int = 1
) -> tuple[hs.States, list[str]]:
    """Noise at every site, and a direction that tells the class at one of them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sites, rows, width, generator=generator)
    labels = torch.arange(rows) % 2
    direction = torch.randn(width, generator=generator)
    values[PLANTED] += 2.5 * (2 * labels[:, None] - 1) * direction / direction.norm()
    return states(values), [["no", "yes"][label] for label in labels]


@pytest.fixture(scope="module")
def found() -> hs.Result:
    return hs.probe(*planted())


def test_a_planted_direction_is_found_where_it_was_planted(found: hs.Result) -> None:
    assert found.kind == "probe"
    assert found.facts["best"]["site"] == f"layer.{PLANTED}"
    assert found.facts["best"]["accuracy"] > 0.9
    assert found.facts["above_chance_at"] == [f"layer.{PLANTED}"]
    assert found.facts["mix"]["largest_weight"]["site"] == f"layer.{PLANTED}"
    assert found.facts["mix"]["accuracy"] > 0.9
    data = found.data
    assert data["accuracy"].dims == ("site",)
    assert data["accuracy_fold"].dims == data["penalty"].dims == ("site", "fold")
    assert data["coef"].dims == ("site", "class", "width")
    np.testing.assert_allclose(data["selectivity"], data["accuracy"] - data["control"])
    np.testing.assert_allclose(data["mix_weight"].sum(), 1, rtol=1e-5)
    np.testing.assert_allclose(data["mix_weight_fold"].sum("site"), 1, rtol=1e-5)
    assert found.facts["mix"]["largest_weight"]["folds"] == data.sizes["fold"]
    assert (data["accuracy_low"] < data["accuracy"]).all()
    assert (data["accuracy"] <= data["accuracy_high"]).all()
    by_fold = data["accuracy_fold"].mean("fold")
    np.testing.assert_allclose(by_fold, data["accuracy"], atol=0.02)
    assert float(data["majority"]) == 0.5


def test_sites_that_share_the_best_score_are_all_named() -> None:
    """The first of them is no better than the others."""
    drawn, labels = planted(rows=24, sites=3)
    drawn.values[1:] = 0
    drawn.values[1:, :, 0] = torch.tensor([name == "yes" for name in labels])
    result = hs.probe(drawn, labels)
    best = result.facts["best"]
    assert best["accuracy"] == 1 and best["tied"] == ["layer.1", "layer.2"]
    said = "2 sites share the best score (layer.1 to layer.2); layer.1 is the first"
    assert said in result.summary()


@pytest.mark.parametrize("task", ["regress", "classify"])
def test_two_random_walks_have_no_interval(task: Any) -> None:
    """What drifts goes together by chance, and rows in a row are no draws."""
    walks = np.random.default_rng(3).standard_normal((80, 25)).cumsum(0)
    labels = walks[:, 0]
    if task == "classify":
        labels = (labels > np.median(labels)).astype(int)
    drawn = states(torch.from_numpy(walks[:, 1:].reshape(80, 2, 12)).swapaxes(0, 1))
    result = hs.probe(drawn, labels.tolist(), task=task)
    assert result.facts["serial_inflation"] > 1.5
    assert result.facts["best"]["interval"] is None
    assert "interval" not in result.facts["mix"]
    score = result.facts["score"]
    assert result.data[f"{score}_low"].isnull().all()
    assert "There are no intervals" in result.summary()
    assert "its uncertainty is not known" in result.summary()
    assert hs.Probe.of(result).coef_.any()


def test_the_best_site_is_told_with_an_interval_that_knows_it_was_chosen(
    found: hs.Result,
) -> None:
    best, data = found.facts["best"], found.data.sel(site=f"layer.{PLANTED}")
    assert best["interval"][0] < float(data["accuracy_low"])
    assert best["interval"][1] == float(data["accuracy_high"])
    assert best["p"] == 1 / 200 and found.facts["permutations"] == 199
    alone = hs.probe(*planted(), sites=f"layer.{PLANTED}")
    assert alone.facts["best"]["interval"][0] == pytest.approx(
        float(alone.data["accuracy_low"][0]), abs=0.05
    )


def test_what_says_nothing_is_at_chance() -> None:
    values, labels = planted(rows=120)
    shuffled = np.random.default_rng(0).permutation(labels).tolist()
    result = hs.probe(values, shuffled)
    bound = 4 * np.sqrt(0.25 / 120)  # four deviations of a fair coin
    assert (np.abs(result.data["accuracy"] - 0.5) < bound).all()
    assert (np.abs(result.data["control"] - 0.5) < bound).all()
    assert result.facts["above_chance_at"] == []


def test_the_centre_of_gravity_is_where_it_was_planted(found: hs.Result) -> None:
    centre = found.facts["centre"]
    assert centre["interval"][0] < PLANTED < centre["interval"][1]
    assert abs(centre["layer"] - PLANTED) < 0.3
    assert centre["middle"] == 1.5
    assert centre["depth"] == pytest.approx(centre["layer"] / 3)
    assert "The centre of gravity over layers is" in found.summary()
    # Two layers have no curve, and noise has no centre.
    values, labels = planted()
    two = hs.probe(values, labels, sites="layer.2,layer.3")
    assert "centre" not in two.facts
    shuffled = np.random.default_rng(0).permutation(labels).tolist()
    assert "centre" not in hs.probe(values, shuffled).facts


def test_a_label_that_all_layers_read_is_said_to_lie_in_the_middle() -> None:
    labels = torch.arange(60) % 2
    values = noise(3, 60, 6)
    values[..., 0] += 2 * (2 * labels - 1)
    result = hs.probe(states(values), labels.tolist())
    assert "Its interval holds the middle, 1.0" in result.summary()


def test_the_order_of_rows_means_nothing_and_the_seed_deals_the_folds(
    found: hs.Result,
) -> None:
    given, labels = planted()
    order = np.random.default_rng(1).permutation(len(labels))
    names = [f"text {k}" for k in order]
    moved = states(given.values[:, order], ids=order.tolist(), names=names)
    again = hs.probe(moved, [labels[k] for k in order])
    for name in ("accuracy", "accuracy_fold", "control", "penalty", "mix_accuracy"):
        np.testing.assert_allclose(again.data[name], found.data[name], atol=0.02)
    np.testing.assert_allclose(again.data["coef"], found.data["coef"], atol=0.01)
    assert hs.probe(given, labels).equals(found)
    other = hs.probe(given, labels, sites="layer.0", seed=1).data["accuracy_fold"]
    assert not np.array_equal(other[0], found.data["accuracy_fold"][0])


def test_numbers_are_regressed() -> None:
    given, _ = planted(rows=60)
    goal = (given.values[1] @ torch.arange(12.0) + 100).numpy()
    result = hs.probe(given, goal, task="regress")
    assert result.facts["best"]["site"] == "layer.1"
    assert result.facts["best"]["r2"] > 0.99
    assert result.facts["above_chance_at"] == ["layer.1"]
    assert result.data["coef"].dims == ("site", "width")
    assert "interval" not in result.facts["mix"] and "mix_r2_low" not in result.data
    assert (result.data["control"] < 0.2).all()
    probe = hs.Probe.of(result, "layer.1")
    assert probe.score(given["layer.1"], goal) > 0.999
    theirs = Ridge(float(result.data["penalty_whole"].sel(site="layer.1")))
    own = given["layer.1"].double().numpy()
    theirs.fit((own - own.mean(0)) / own.std(0), goal)
    np.testing.assert_allclose(probe.coef_ * own.std(0), theirs.coef_, rtol=1e-4)


def test_the_kept_probe_is_scikit_learns_in_the_states_own_space(
    found: hs.Result, tmp_path: Path
) -> None:
    given, labels = planted()
    probe = hs.Probe.of(found)
    assert probe.site == f"layer.{PLANTED}"
    own = given[probe.site].double().numpy()
    scaled = (own - own.mean(0)) / own.std(0)
    theirs = LogisticRegression(C=1 / probe.penalty, tol=1e-8).fit(scaled, labels)
    np.testing.assert_allclose(probe.coef_ * own.std(0), theirs.coef_, atol=2e-3)
    for name in ("decision_function", "predict_proba"):
        ours, expected = getattr(probe, name)(own), getattr(theirs, name)(scaled)
        np.testing.assert_allclose(ours, expected, atol=1e-2)
    assert probe.score(given[probe.site], labels) == theirs.score(scaled, labels)
    assert probe.classes_.tolist() == theirs.classes_.tolist() == ["no", "yes"]
    assert probe.coef_.shape == theirs.coef_.shape
    assert probe.intercept_.shape == theirs.intercept_.shape
    for suffix in ("nc", "json"):
        found.save(tmp_path / f"r.{suffix}")
        again = hs.Result.load(tmp_path / f"r.{suffix}")
        assert again.equals(found)
        kept = hs.Probe.of(again).decision_function(own)
        assert (kept == probe.decision_function(own)).all()


def test_a_probe_that_was_saved_is_the_same(tmp_path: Path) -> None:
    own = planted()[0].values[0].numpy()
    rng, path = np.random.default_rng(0), tmp_path / "p.safetensors"
    for task, labels in (
        ("regress", rng.normal(size=80)),
        ("classify", rng.integers(0, 2, 80)),
        ("classify", rng.integers(0, 3, 80)),
    ):
        probe = hs.Probe(task, penalty=2.0, site="layer.3").fit(own, labels)  # type: ignore[arg-type]
        probe.save(path)
        again = hs.Probe.load(path)
        assert (again.predict(own) == probe.predict(own)).all()
        assert (again.decision_function(own) == probe.decision_function(own)).all()
        assert repr(again) == repr(probe) and again.penalty == 2.0
        assert again.predict(own).dtype == probe.predict(own).dtype
    scaled = (own - own.mean(0)) / own.std(0)
    theirs = LogisticRegression(C=0.5, tol=1e-8).fit(scaled, labels)
    expected = theirs.predict_proba(scaled)
    np.testing.assert_allclose(probe.predict_proba(own), expected, atol=1e-3)


def test_what_is_no_probe_is_refused(tmp_path: Path, found: hs.Result) -> None:
    with pytest.raises(FileError, match="no such file"):
        hs.Probe.load(tmp_path / "none.safetensors")
    planted()[0].save(tmp_path / "s.safetensors")
    with pytest.raises(FileError, match="other content"):
        hs.Probe.load(tmp_path / "s.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"torn")
    with pytest.raises(FileError, match="damaged"):
        hs.Probe.load(tmp_path / "torn.safetensors")
    with pytest.raises(FileError, match="suffix"):
        hs.Probe.of(found).save(tmp_path / "p.pickle")
    with pytest.raises(SiteError, match="No site 'layer.40'"):
        hs.Probe.of(found, "layer.40")
    with pytest.raises(StatesError, match="not fitted"):
        hs.Probe().predict([[1.0]])
    with pytest.raises(StatesError, match="wide"):
        hs.Probe.of(found).predict([[1.0]])
    bad: list[Any] = [float("nan"), float("inf"), 0, -1.0, "strong", None]
    for penalty in bad:
        with pytest.raises(StatesError, match="penalty must be a finite number > 0"):
            hs.Probe(penalty=penalty)


def test_a_file_whose_numbers_are_no_probe_is_refused(tmp_path: Path) -> None:
    zeros, path = torch.zeros, tmp_path / "p.safetensors"
    nan, infinite = torch.tensor([[0.0, torch.nan]]), torch.tensor([torch.inf])
    integers = torch.zeros(1, 2, dtype=torch.int64)
    cases: list[tuple[torch.Tensor, torch.Tensor, list[int] | None, str]] = [
        (zeros(2, 5), zeros(2), [0, 1], r"2 classes have \[1, width\]"),
        (zeros(1, 5), zeros(2), [0, 1], r"2 classes have \[1, width\]"),
        (zeros(3, 5), zeros(3), [0, 1, 2, 3], r"4 classes have \[4, width\]"),
        (zeros(1, 0), zeros(1), [0, 1], r"its coefficients are \[1, 0\]"),
        (zeros(5), zeros(()), [0], "1 classes"),
        (nan, zeros(1), [0, 1], "coefficients are not all finite"),
        (zeros(1, 2), infinite, [0, 1], "intercepts are not all finite"),
        (integers, zeros(1), [0, 1], "coefficients are not all finite"),
        (zeros(2, 5), zeros(()), None, "a regression has"),
        (zeros(5), zeros(1), None, "a regression has"),
    ]
    for coef, intercept, classes, what in cases:
        task = "regress" if classes is None else "classify"
        settings = {"task": task, "penalty": 1.0, "site": "", "classes": classes}
        header = {"format": "hiddenscope.probe/1", "probe": json.dumps(settings)}
        write_tensors(path, {"coef": coef, "intercept": intercept}, header)
        with pytest.raises(Damaged, match=what):
            hs.Probe.load(path)


def test_equal_states_are_at_chance_and_said_to_be() -> None:
    given, labels = planted(sites=3)
    given.values[0] = 0.1
    result = hs.probe(given, labels)
    assert result.data["accuracy"].values[0] == 0.5
    assert result.facts["all_equal_at"] == ["layer.0"]
    result = hs.probe(states(torch.full((2, 80, 4), 3.3)), labels)
    assert result.facts["above_chance_at"] == []


REFUSED: list[tuple[Any, str, str]] = [
    (["a"] * 80, "classify", "all of one class"),
    (["a"] * 79 + ["b"], "classify", "'b' has only one text"),
    (list(range(80)), "classify", "80 classes"),
    (["a", "b"], "classify", "80 texts and 2 labels"),
    (["a", None] * 40, "classify", "the label of text 1 is missing"),
    ([0.5, float("nan")] * 40, "classify", "the label of text 1 is missing"),
    (7, "classify", "got int"),
    (["a", "b"] * 40, "regress", "label 0 is 'a'"),
    ([1.0] * 80, "regress", "all labels are 1"),
    ([np.inf] * 80, "regress", "not a finite number"),
]


def test_labels_that_cannot_be_probed_are_refused() -> None:
    given, _ = planted()
    for labels, task, what in REFUSED:
        with pytest.raises(StatesError, match=what):
            hs.probe(given, labels, task=task)  # type: ignore[arg-type]
    with pytest.raises(FileError, match="'yes': there is no such file"):
        hs.probe(given, "yes")
    with pytest.raises(ArgumentError, match="task must be 'classify' or 'regress'"):
        hs.probe(given, ["a", "b"] * 40, task="guess")  # type: ignore[arg-type]


def test_a_class_that_falls_into_one_fold_is_refused() -> None:
    # Three groups are dealt to two folds, and two of them have all of "b".
    labels = list("dcaddbabccaccbcccccccabbccccbb")
    groups = [int(group) for group in "012111020202210002020111202211"]
    texts = tuple(f"text {k}" for k in range(30))
    data = Labelled(texts, tuple(labels), "three groups", tuple(groups))
    with pytest.raises(StatesError, match="class 'b' fall into one fold"):
        hs.probe(states(noise(3, 30, 4)), data)


def test_other_bad_input_is_refused(tiny: Tiny) -> None:
    given, labels = planted()
    given.values[1, 7, 3] = torch.nan
    with pytest.raises(NotFinite, match=r"layer\.1, text 7"):
        hs.probe(given, labels)
    with pytest.raises(NotFinite, match=r"layer\.1, text 7, position 0"):
        hs.probe(hs.each_token(given), labels)
    model, pair = tiny("llama"), ["The cat.", "The dog."]
    each = hs.each_token(model)
    with pytest.raises(TextError, match="empty"):
        hs.probe(model, (["", "b"], [0, 1]))
    with pytest.raises(TextError, match="no labels"):
        hs.probe(model, ["one", "two"])
    with pytest.raises(TextError, match="needs a label for each token"):
        hs.probe(each, "cities-complete")
    with pytest.raises(StatesError, match="all of one text"):
        hs.probe(each, (["The cat sat on the mat."], "position"), task="regress")
    with pytest.raises(StatesError, match="text 0 has"):
        hs.probe(each, (pair, [["a"], ["b"]]))
    with pytest.raises(StatesError, match="No ready label"):
        hs.probe(each, (pair, "colour"))
    with pytest.raises(StatesError, match="Cannot regress the previous token"):
        hs.probe(each, (pair, "previous-token"), task="regress")


def test_a_small_class_makes_few_folds() -> None:
    given, _ = planted(rows=40, sites=3)
    result = hs.probe(given, ["a"] * 38 + ["b"] * 2)
    assert result.facts["folds"] == 2
    assert result.facts["fixed_penalty"] == 100
    assert float(result.data["majority"]) == 0.95
    assert hs.probe(given, ["a"] * 37 + ["b"] * 3).facts["folds"] == 3


def test_a_text_that_comes_twice_is_not_both_learnt_and_tested() -> None:
    """Noise, each row twice: whoever parts the twins finds all of them again."""
    values = noise(1, 40, 200).repeat(1, 2, 1)
    labels = np.random.default_rng(0).integers(0, 2, 40).tolist() * 2
    texts = [f"text {k}" for k in range(40)]
    for changed in ("{}", " {}.", "“{}”"):
        names = [*texts, *map(changed.format, texts)]
        together = hs.probe(states(values, names=names), labels)
        assert float(together.data["accuracy"][0]) < 0.7
        counted = [together.facts[name] for name in ("texts", "rows", "copies")]
        assert counted == [40, 40, 40]
    parted = hs.probe(states(values), labels)
    assert float(parted.data["accuracy"][0]) > 0.75


def test_a_probe_of_token_types_is_not_selective() -> None:
    """Hewitt and Liang: states that are the token and no more tell any label of it, a
    drawn one as well.
    """
    ids = np.random.default_rng(0).integers(0, 12, 400)
    values = torch.eye(12)[torch.from_numpy(ids)][None] + 0.01 * noise(1, 400, 12)
    given = states(values, [8] * 50, ids.tolist())
    result = hs.probe(hs.each_token(given), [["x", "y", "z"][k % 3] for k in ids])
    assert float(result.data["accuracy"][0]) == 1.0
    assert float(result.data["control"][0]) > 0.95
    assert abs(float(result.data["selectivity"][0])) < 0.05
    assert result.facts["texts"] == 50 and result.facts["rows"] == 400


def test_labels_of_tokens_are_flat_or_by_text() -> None:
    given = states(noise(1, 60, 5), [3] * 20, list(range(6)) * 10)
    flat = [str(k % 2) for k in range(60)]
    nested = [flat[3 * k : 3 * k + 3] for k in range(20)]
    each = hs.each_token(given)
    assert hs.probe(each, flat).equals(hs.probe(each, nested))


def test_ready_labels_are_those_of_the_tokens() -> None:
    # Two windows that overlap, and a text of which some tokens are kept.
    positions = [0, 1, 2, 1, 2, 0, 4, 5]
    tokens = hs.Tokens(None, [0] * 5 + [1] * 3, positions, [7] * 8, ("a",) * 8)
    known = [label is not None for label in previous_token(tokens, "classify")]
    assert known == [False, True, True, False, True, False, False, True]
    assert position(tokens, "regress") == positions
    texts = ["a cats’ b"] * 6
    spans = [(-1, -1), (0, 1), (1, 3), (3, 7), (7, 7), (8, 9)]
    # The last text has a position and a token that no other has.
    places = [*list(range(6)) * 5, 0, 1, 2, 3, 4, 9]
    strings = [*"abcdef" * 5, *"abzdef"]
    ids = [ord(string) for string in strings]
    numbers = [row // 6 for row in range(36)]
    whole = hs.Tokens(texts, numbers, places, ids, strings, spans * 6)
    begins, continues = "begins a word", "goes on"
    expected = [None, begins, begins, continues, None, begins]
    assert word_start(whole, "classify") == expected * 6
    numeric = [None, 1.0, 1.0, 0.0, None, 1.0]
    assert word_start(whole, "regress") == numeric * 6
    classes = ["0", "1", "2 to 3", "2 to 3", "from 4", "from 4"]
    assert position(whole, "classify") == classes * 6
    before = previous_token(whole, "classify")
    assert before[:6] == [None, "'a'", "'b'", "'c'", "'d'", "'e'"]
    assert before[-6:] == [None, "'a'", "'b'", "(another)", "'d'", None]
    with pytest.raises(StatesError, match="no texts to find words in"):
        word_start(tokens, "classify")


@pytest.mark.slow
def test_ready_labels_need_no_data(tiny: Tiny) -> None:
    facts = {}
    for ready in ("position", "previous-token", "word-start"):
        each = hs.each_token(tiny("gpt2"))
        facts[ready] = hs.probe(each, ready, sites="layer.0").facts
        assert facts[ready]["texts"] == 100
    counts = {
        ready: {one["label"]: one["rows"] for one in found["classes"]}
        for ready, found in facts.items()
    }
    for ready, found in facts.items():
        assert sum(counts[ready].values()) == found["rows"]
    # The embeddings of gpt2 hold the position as it is.
    assert {"0", "1", "2 to 3", "4 to 7"} <= set(counts["position"])
    assert facts["position"]["best"]["accuracy"] > 0.9
    assert counts["previous-token"]["(another)"] > 0
    assert facts["previous-token"]["left_out"] == 100
    assert set(counts["word-start"]) == {"begins a word", "goes on"}


def test_position_is_a_number_too(tiny: Tiny) -> None:
    texts = [
        "The cat sat on the mat.",
        "The dog sat in the garden of the house.",
        "A bird sang.",
        "It was late.",
    ]
    data = ([f"{text} {k}" for k, text in enumerate(texts * 2)], "position")
    each = hs.each_token(tiny("gpt2"))
    result = hs.probe(each, data, task="regress", sites="layer.0")
    assert result.facts["best"]["r2"] > 0.6
    assert "mix" not in result.facts
    assert result.facts["data"] == "position of tokens"


def test_a_model_and_its_states_give_the_same(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [f"The {animal} sat {k}." for k in range(6) for animal in ("cat", "dog")]
    labels = ["cat", "dog"] * 6
    captured = model.capture(texts)
    direct = hs.probe(model, (texts, labels), pool="mean", sites="layer.1")
    read = hs.probe(captured, labels, pool="mean", sites="layer.1")
    np.testing.assert_allclose(direct.data["accuracy"], read.data["accuracy"])
    assert direct.facts["best"]["accuracy"] == 1.0
    decoder = hs.probe(tiny("t5"), (texts, labels), sites="decoder.layer.0")
    assert decoder.data["site"].values.tolist() == ["decoder.layer.0"]


def test_weights_of_noise_are_not_told_as_a_finding() -> None:
    """On noise nearly all weight can go to one site, and to another in the next fold:
    the range over the folds then excludes the weights of all rows. So there is none,
    and the findings say how many folds agree.
    """
    result = hs.probe(states(noise(6, 20, 64, seed=1)), [k % 2 for k in range(20)])
    data = result.data
    weights = data["mix_weight"].to_numpy()
    by_fold = data["mix_weight_fold"].to_numpy()
    assert weights.max() > 0.9
    assert ((weights < by_fold.min(1)) | (weights > by_fold.max(1))).any()
    assert not {"mix_weight_low", "mix_weight_high"} & set(data)
    agreeing = int((by_fold.argmax(0) == weights.argmax()).sum())
    assert agreeing < data.sizes["fold"]
    assert result.facts["mix"]["largest_weight"]["folds"] == agreeing


def test_the_mix_of_one_site_is_a_plain_probe_and_of_several_finds_the_planted() -> (
    None
):
    given, labels = planted(rows=60, sites=3)
    own = torch.stack([standardised(site)[0] for site in given.values.double()])
    targets = torch.tensor([int(one == "yes") for one in labels])[None]
    penalty = torch.tensor([5.0], dtype=torch.float64)
    every = Problems(torch.ones(1, 60, dtype=torch.bool), targets, penalty)
    for learner in (logistic(2, 1e-8), ridge()):
        alone = mix(own[:1], every, learner, 1e-8)
        plain = learner.fit(own[0], every).scores(own[0])
        torch.testing.assert_close(alone.scores, plain, atol=1e-5, rtol=1e-5)
        mixed = mix(own, every, learner, 1e-8)
        one = torch.ones(1, dtype=torch.float64)
        torch.testing.assert_close(mixed.weights.sum(0), one)
        assert mixed.converged.all() and mixed.weights[PLANTED, 0] > 0.5
        assert learner.losses(mixed.scores, targets.T).mean() < 0.25


ALONE = PermutationTest([1.0], Z)
PLAIN = VarianceFactors(1.0, 1.0)


def interval_of(
    right: NDArray[np.bool_],
    groups: NDArray[np.int64] | None = None,
    factors: VarianceFactors = PLAIN,
    test: PermutationTest = ALONE,
) -> Interval:
    """The interval of a share of rows that are right, all of one class."""
    groups = np.arange(len(right)) if groups is None else groups
    scores = torch.from_numpy(np.where(right, -1.0, 1.0)).view(-1, 1, 1)
    targets = torch.zeros(len(right), 1).long()
    return accuracy_interval(accuracy(scores, targets, groups), groups, factors, test)


def test_the_interval_of_independent_rows_is_wilsons() -> None:
    right = np.array([True] * 8 + [False] * 2)
    alone = interval_of(right)
    # As in the tables.
    assert (round(alone.low, 4), round(alone.high, 4)) == (0.4902, 0.9433)
    sure = interval_of(np.ones(20, dtype=bool))
    assert sure.high == 1 and 0.8 < sure.low < 0.85
    assert alone.joint_low == alone.low
    four = PermutationTest([1.0] * 4, 3.0)
    wider = interval_of(right, factors=VarianceFactors(2.0, 1.0), test=four)
    assert wider.joint_low < wider.low < alone.low
    assert alone.high < wider.high
    # Bonferroni's end for four sites is nearer than three standard deviations, and that
    # of a hundred is not.
    hundred = interval_of(right, test=PermutationTest([1.0] * 100, 3.0))
    assert hundred.joint_low < interval_of(right, test=four).joint_low


@pytest.mark.parametrize(
    "sizes",
    [[1] * 30, [2] * 20, [10] * 6, [*range(12, 1, -1)]],
    ids=["rows", "pairs", "groups", "unequal groups"],
)
@pytest.mark.parametrize("by_group", [False, True])
def test_one_more_right_row_never_lowers_an_interval(
    sizes: list[int], by_group: bool
) -> None:
    """Down to no error at all, where nothing tells how far rows go together, and
    whatever rows are wrong; it does not jump either.
    """
    groups = np.repeat(np.arange(len(sizes)), sizes)
    rows = np.arange(len(groups))
    targets = torch.from_numpy((groups if by_group else rows) % 2)[:, None]
    for factors in (PLAIN, VarianceFactors(1.6, 1.0), VarianceFactors(1.6, 3.0)):
        right = np.zeros(len(rows), dtype=bool)
        ends = []
        for row in [0, *np.random.default_rng(0).permutation(rows)]:
            sign = np.where(right, 1.0, -1.0) * (2 * targets[:, 0].numpy() - 1)
            found = accuracy(torch.from_numpy(sign)[:, None, None], targets, groups)
            test = PermutationTest([1.0] * 6, 2.6)
            interval = accuracy_interval(found, groups, factors, test)
            ends.append([interval.low, interval.high, interval.joint_low])
            right[row] = True
        steps = np.diff(ends, axis=0)
        assert steps.min() > -1e-9
        assert steps.max() < 0.15
    # It reaches no lower than the exact binomial one of as many rows as groups.
    exact = 0.025 ** (1 / effective_count(groups))
    assert interval_of(np.ones(len(rows), dtype=bool), groups).low > exact - 0.01


def test_twenty_minimal_pairs_show_a_direction_that_permuted_labels_do_not() -> None:
    """Also where the accuracy is so uncertain that its interval reaches to guessing."""
    shared = noise(1, 20, 64, seed=8).repeat_interleave(2, 1)
    values = 0.9**0.5 * shared + 0.1**0.5 * noise(1, 40, 64, seed=9)
    labels = [0, 1] * 20
    values[0, :, 0] += torch.tensor(labels) * 2 - 1
    texts = tuple(f"text {row}" for row in range(40))
    pairs = tuple(row // 2 for row in range(40))
    data = Labelled(texts, tuple(labels), "pairs", pairs)
    facts = hs.probe(states(values), data, pool="last").facts
    assert facts["best"]["interval"][0] < 0.5
    assert facts["above_chance_at"] == ["layer.0"]


def test_rows_that_go_together_count_for_fewer() -> None:
    groups = np.repeat(np.arange(20), 10)
    alike = np.repeat(np.random.default_rng(0).random(20) < 0.6, 10)
    one, ten = interval_of(alike, groups), interval_of(alike)
    assert one.low < ten.low < ten.high < one.high
    # Of one large group and many small ones the mean follows the large.
    large = np.repeat(np.arange(41), [40, *[1] * 40])
    assert effective_count(large) == pytest.approx(80**2 / (1600 + 40))
    even = np.repeat(np.arange(30), 5)
    for groups, truth, fewest in ((even, 0.7, 51), (large, 0.6, 54)):
        held = 0
        for seed in range(60):
            draws = np.random.default_rng(seed).random(groups.max() + 1)
            interval = interval_of((draws < truth)[groups], groups)
            held += interval.low <= truth <= interval.high
        assert held >= fewest


def test_labels_that_were_permuted_say_what_chance_is() -> None:
    """A score that is large by itself is not, beside one that chance makes as large; p
    is exact.
    """
    scores = torch.from_numpy(np.random.default_rng(0).normal(0.5, 0.05, (3, 200)))
    scores[1, 0] = 0.9
    found = permutation_test(scores)
    assert found.p_values[1] == 1 / 200
    assert min(found.p_values[0], found.p_values[2]) > 0.05
    assert 2 < found.joint_z < 3
    assert permutation_test(torch.full((2, 200), 0.5)) == PermutationTest([1, 1], Z)
    permuted = scores[0, 1:]
    # 1.5, but for the draw.
    factors = variance_factors(permuted, torch.full((199,), 0.05**2 / 1.5))
    assert 1.2 < factors.within < 1.9
    # Never narrower than independent rows.
    assert variance_factors(permuted, torch.full((199,), 1.0))[:2] == (1, 1)
    equal = torch.full((9,), 0.5)
    assert variance_factors(equal, torch.zeros(9), lower_bound=2.25) == (2.25, 1, 0)


def test_predictions_that_lean_to_no_class_go_together_by_two_over_pi() -> None:
    """Of nearly linear fits of noise: with the intercept most predictions are the
    larger class, and hardly vary.
    """
    given = states(noise(1, 60, 40))
    labels = [int(k < 24) for k in range(60)]
    rows = labelled_rows(given, labels, "classify", "layer.*", "last")
    target = target_of(rows, "classify")
    own, predicted = standardised(given.values[0])[0], torch.zeros(60)
    found = null_distribution(own, predicted, target, design_of(rows, target, 0))
    # 1 + 2 / π, but for the draw.
    assert isinstance(found.variability, VarianceFactors)
    assert 1.25 < found.variability.within < 2.05
    # Accuracies less the share of the larger class, which noise does not exceed.
    assert -0.2 < float(found.scores.mean()) < 0.05


def test_the_part_of_the_variance_that_class_sizes_bring_has_a_factor_of_its_own() -> (
    None
):
    """It widens the interval of a probe that leans to a class, and not of one that
    reads both classes equally well.
    """
    targets = torch.tensor([[0]] * 30 + [[1]] * 20)
    leaning = torch.full((50, 1, 1), -1.0)
    even = (2.0 * targets - 1).view(50, 1, 1).clone()
    even[:6], even[30:34] = 1, -1  # a fifth of either class is wrong
    rows = np.arange(50)
    factors = [VarianceFactors(1.0, factor) for factor in (1.0, 2.0)]
    for scores in (leaning, even):
        measured = accuracy(scores, targets, rows)
        plain, other = (
            accuracy_interval(measured, rows, factor, ALONE) for factor in factors
        )
        if scores is even:
            assert other == plain
        else:
            assert other.low < plain.low - 0.03 and other.high > plain.high + 0.03


def test_drawn_class_sizes_tell_how_much_leaning_to_the_larger_class_gains() -> None:
    """One that always says the larger class: the error is that of its size, and more
    than `between` has no part.
    """
    rows = np.arange(50)
    labels = bootstrap_classes(rows % 2, 500, 0, rows, rows % 5)
    assert labels is not None
    share = labels.double().mean(1)
    larger = ((share > 0.5).double() * 2 - 1).expand(50, 1, -1)
    always = bootstrap_accuracy(larger, labels.T, rows, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(always.score, torch.maximum(share, 1 - share))
    half = torch.full((500,), 0.5, dtype=torch.float64)
    torch.testing.assert_close(always.fresh, half)
    assert 1 <= size_factor(always) < 1.2
    # One that leans the more, the larger the class: as far as the sizes are apart.
    far = (share - 0.5).abs()
    within, between = torch.zeros(500), 0.25 * (4 * far) ** 2 / 50
    leans = BootstrapSample(0.5 + 4 * far**2, half, within, between)
    assert 2.3 < size_factor(leans) < 3.7  # E[x⁴] of a normal distribution is 3 E[x²]²


def size_factor(measured: BootstrapSample) -> float:
    sample = BootstrapSample(*(part.double() for part in measured))
    return variance_factors(torch.rand(20), torch.ones(20), sample).between


def test_the_interval_of_r2_holds_what_makes_the_found_value_likely() -> None:
    """A value has its own deviation, which is large where much could be read: so the
    interval reaches up farther.
    """
    influence = torch.full((1, 50), 0.1, dtype=torch.float64)
    found = ExplainedVariance(torch.tensor(0.0), torch.tensor(0.0), influence)
    own = 0.1**2 * 50 / 50**2 * 50 / 49
    rows, test = np.arange(50), PermutationTest([1.0], 3.0)
    worlds = PlantedSpread(
        np.array([0.0, -0.1, -0.5]), np.array([0.02, 0.1, 0.2]), np.full(3, own)
    )
    interval = r2_interval(found, rows, worlds, test)
    assert interval.low == pytest.approx(1 - np.exp(Z * 0.02), abs=1e-3)
    # -0.288 has a deviation of 0.147: the last.
    assert interval.high == pytest.approx(1 - np.exp(-0.288), abs=1e-3)
    assert interval.joint_low == interval.decision_low < interval.low
    assert interval.low < interval.score < interval.high
    spread = found._replace(influence=2 * influence)
    wider = r2_interval(spread, rows, worlds, test)
    assert wider.low < interval.low < interval.high < wider.high
    at_least = r2_interval(found, rows, worlds, test, 0.3)
    ends = [1 - np.exp(width * 0.3) for width in (3.0, Z, -Z)]
    found_ends = [at_least.joint_low, at_least.low, at_least.high]
    assert found_ends == pytest.approx(ends, abs=1e-3)
    # The test of chance is as it was.
    assert at_least.decision_low == pytest.approx(interval.decision_low, abs=1e-3)


def jackknife_by_hand(
    own: Any, goal: Any, folds: Any, groups: Any, penalty: Any
) -> float:
    """scikit-learn's fits, all of them again, with the scale and the penalty of each
    fold as they were.
    """
    logarithm = []
    for left_out in np.unique(groups):
        kept, predicted = groups != left_out, np.empty(len(own))
        for fold in range(3):
            train, tested = kept & (folds != fold), folds == fold
            scaler = StandardScaler().fit(own[folds != fold])
            model = Ridge(float(penalty[fold]))
            model.fit(scaler.transform(own[train]), goal[train])
            predicted[tested] = model.predict(scaler.transform(own[tested]))
        logarithm.append(np.log(1 - r2_score(goal[kept], predicted[kept])))
    return float(np.sqrt((len(logarithm) - 1) * np.var(logarithm)))


def test_the_jackknife_is_that_of_fits_without_each_text() -> None:
    for width, copies in ((4, 1), (60, 1), (4, 3), (60, 2)):
        generator, rows = torch.Generator().manual_seed(width), 12 * copies
        own = torch.randn(rows, width, generator=generator)
        goal = own[:, 0] + torch.randn(rows, generator=generator)
        groups, penalty = np.arange(rows) // copies, torch.tensor([1.0, 10.0, 100.0])
        expected = jackknife_by_hand(
            own.double().numpy(), goal.double().numpy(), groups % 3, groups, penalty
        )
        deviation = jackknife_deviation(own, goal, groups % 3, groups, penalty)
        assert deviation == pytest.approx(expected, rel=1e-6)
    # And of states that are all equal it is finite.
    rows, penalty = np.arange(10), torch.full((2,), 100.0)
    for width in (3, 30):
        equal = torch.zeros(10, width)
        assert 0 < jackknife_deviation(equal, noise(10), rows % 2, rows, penalty) < 1


def test_planted_numbers_are_read_the_better_the_stronger_they_are() -> None:
    signal, groups = noise(60).double(), np.arange(60) // 2
    drawn = bootstrap_numbers(noise(60, seed=1).double(), 240, 0, groups)
    made = plant_signal(drawn, 3 * signal + 1)
    correlation = [torch.corrcoef(torch.stack([signal, row]))[0, 1] for row in made]
    by_strength = np.array(correlation).reshape(len(STRENGTHS), -1).mean(1)
    np.testing.assert_allclose(by_strength, STRENGTHS, atol=0.12)
    measured = r2(signal.expand(240, -1).T[:, None] * 0.5, made.T, groups)
    worlds = planted_spread(measured, len(STRENGTHS), groups)
    assert (np.diff(worlds.logarithm) < 0).all()
    assert (worlds.deviation**2 >= worlds.within - 1e-12).all()


def test_few_numbers_have_finite_intervals_too() -> None:
    """Of four texts one may be drawn four times, or the one left out that has another
    number: all are equal.
    """
    given = states(noise(2, 4, 6))
    for numbers in ([1.0, 2.0, 2.0, 4.0], [1.0, 1.0, 1.0, 4.0]):
        result = hs.probe(given, numbers, task="regress")
        ends = [result.data[f"r2{end}"].to_numpy() for end in ("_low", "", "_high")]
        assert np.isfinite(ends).all() and (np.diff(ends, axis=0) >= 0).all()
    drawn = bootstrap_numbers(torch.arange(3.0), 200, 0, np.arange(3))
    assert (np.ptp(drawn.numpy(), axis=1) > 0).all()


def test_the_variance_of_few_numbers_is_found_too_small_by_that_of_their_mean() -> None:
    # The true mean: an R² of 0 on fresh rows.
    predicted = torch.zeros(10, 1, 4_000, dtype=torch.float64)
    found = r2(predicted, noise(10, 4_000).double(), np.arange(10))
    # About -1 / 9: the mean of the sample is nearer to it.
    explained = 1 - (1 - found.score).mean()
    assert float(explained) < -0.1 and abs(float(found.logarithm.mean())) < 0.02


def test_labels_of_drawn_class_sizes_go_to_whole_texts_and_evenly_to_folds() -> None:
    classes, groups = np.repeat(np.arange(60) % 3 // 2, 2), np.repeat(np.arange(60), 2)
    folds = np.repeat(np.random.default_rng(0).permutation(np.arange(60) % 5), 2)
    drawn = bootstrap_classes(classes, 400, 0, groups, folds)
    assert drawn is not None and (drawn[:, ::2] == drawn[:, 1::2]).all()
    by_fold = torch.stack([drawn[:, folds == fold].sum(1) // 2 for fold in range(5)])
    assert int((by_fold.amax(0) - by_fold.amin(0)).max()) <= 1
    sizes = by_fold.sum(0).double()
    # Binomial: 20 and 13.3.
    assert abs(float(sizes.mean()) - 20) < 0.8 and 10 < float(sizes.var()) < 17
    # Two labels in a text.
    assert bootstrap_classes(np.arange(120) % 2, 9, 0, groups, folds) is None


def test_rows_have_one_control_label_in_any_order() -> None:
    targets, folds = torch.arange(30) % 2, np.arange(30) % 5
    order = np.random.default_rng(1).permutation(30)
    given, labels = states(torch.randn(1, 30, 4)), targets.tolist()
    rows = labelled_rows(given, labels, "classify", "layer.*", "last")
    for seed in range(5):
        drawn = control(targets, rows, folds, seed)
        assert drawn is not None and not torch.equal(drawn, targets)
        moved = control(targets[order], rows.select(order.tolist()), folds[order], seed)
        assert moved is not None and torch.equal(moved, drawn[order])


def test_few_texts_are_said_to_be_too_few_for_the_intervals() -> None:
    result = hs.probe(*planted(rows=16))
    assert result.facts["calibrated"] is False
    assert "calibrated" not in hs.probe(*planted(rows=24)).facts


def test_intervals_of_several_classes_are_not_called_95_percent() -> None:
    """Of noise with four classes they held the truth in 88% of simulations
    (docs/methods.md).
    """
    given = states(noise(2, 30, 6))
    several, two = (hs.probe(given, [k % count for k in range(30)]) for count in (3, 2))
    assert several.facts["interval_holds"] == 0.88 and "interval_holds" not in two.facts
    for variable in several.data.variables.values():
        assert "95%" not in str(variable.attrs.get("long_name"))


def test_twins_of_the_other_class_are_below_chance_unless_they_are_a_group() -> None:
    """An unseen text resembles one of another label."""
    twins = noise(30, 60)
    values = torch.cat([twins, twins + 0.01 * noise(30, 60, seed=1)])[None]
    given, labels = states(values), ["a"] * 30 + ["b"] * 30
    result = hs.probe(given, labels)
    assert float(result.data["accuracy_high"][0]) < 0.5
    names = [f"text {number}" for number in range(60)]
    data = hs.read((names, labels), group=[k % 30 for k in range(60)])
    grouped = hs.probe(given, data)
    assert float(grouped.data["accuracy_high"][0]) > 0.5


def minimal_pairs(count: int) -> tuple[hs.States, list[str]]:
    """The two texts of a pair share their topic, and one direction tells a question
    from a statement.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, count, 1, 12, generator=generator).repeat(1, 1, 2, 1)
    values += 0.3 * torch.randn(values.shape, generator=generator)
    values[1, :, 1, 0] += 12.0
    names = [f"You saw the {noun} there{end}" for noun in range(count) for end in ".?"]
    return states(values.flatten(1, 2), names=names), ["said", "asked"] * count


def test_minimal_pairs_are_permuted_within_pairs() -> None:
    """Texts that differ in a full stop are no copies where their labels differ, and
    whole pairs are all alike.
    """
    result = hs.probe(*minimal_pairs(16))
    facts, best = result.facts, result.facts["best"]
    assert best["site"] == "layer.1" and best["accuracy"] == 1.0 and best["p"] == 0.005
    assert best["control"] < 0.75 and best["selectivity"] > 0.25
    assert facts["above_chance_at"] == ["layer.1"]
    assert (facts["texts"], facts["groups"], facts["groups_given"]) == (32, 16, False)
    few = hs.probe(*minimal_pairs(4))
    assert few.facts["smallest_p"] == 1 / 8 == few.facts["best"]["p"]
    assert few.facts["permutations"] == 15
    assert few.facts["best"]["control"] < 1


def test_groups_of_paraphrases_are_one_piece_of_evidence_each() -> None:
    """Without groups, noise seems to be read in forty texts of ten sentences, unless
    their order gives them away.
    """
    order = np.random.default_rng(0).permutation(40)
    number = np.repeat(np.arange(10), 4)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(1, 10, 1, 40, generator=generator).repeat(1, 1, 4, 1)
        values += 0.2 * torch.randn(values.shape, generator=generator)
        labels = (torch.randperm(10, generator=generator).numpy()[number] % 2).tolist()
        given = states(values.flatten(1, 2))
        data = hs.read(([f"text {k}" for k in range(40)], labels), group=number)
        mixed = states(values.flatten(1, 2)[:, order])
        alone = hs.probe(mixed, [labels[row] for row in order], seed=seed)
        assert alone.facts["above_chance_at"] == ["layer.0"]
        grouped = hs.probe(given, data, seed=seed)
        assert grouped.facts["above_chance_at"] == []
        assert grouped.facts["groups"] == 10 and grouped.facts["groups_given"]
        assert not grouped.facts["calibrated"]
    in_order = hs.probe(given, labels, seed=seed)
    assert in_order.facts["above_chance_at"] == []
    assert in_order.facts["serial_inflation"] > 1.5
    assert in_order.facts["best"]["control"] is None
