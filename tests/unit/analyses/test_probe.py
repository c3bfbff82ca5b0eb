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
from hiddenscope.analyses.probe.labels import control, labelled_rows, previous_token
from hiddenscope.analyses.probe.significance import null_distribution
from hiddenscope.errors import (
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
    assign_folds,
    logistic,
    mix,
    ridge,
    standardised,
)
from hiddenscope.linear.bootstrap import (
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
from hiddenscope.texts import copy_key
from hiddenscope.vectors.dataset import strings_of
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Lines
from tests.slices import sliced

Tiny = Callable[..., hs.Model]
PLANTED = 2


def states(
    values: torch.Tensor,
    lengths: Sequence[int] | None = None,
    ids: Sequence[int] | None = None,
) -> hs.States:
    """States of texts, a token each unless their lengths are given."""
    lengths = [1] * values.shape[1] if lengths is None else lengths
    text = [k for k, length in enumerate(lengths) for _ in range(length)]
    ids = list(range(len(text))) if ids is None else ids
    texts = tuple(f"text {k}" for k in range(len(lengths)))
    positions = [place for length in lengths for place in range(length)]
    tokens = hs.Tokens(texts, text, positions, ids, [f"t{k}" for k in ids])
    return hs.States(
        tuple(Site(k) for k in range(len(values))), values, tokens, hs.Source("toy")
    )


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
    assert (data["accuracy_low"] < data["accuracy"]).all() and (
        data["accuracy"] <= data["accuracy_high"]
    ).all()
    np.testing.assert_allclose(
        data["accuracy_fold"].mean("fold"), data["accuracy"], atol=0.02
    )
    assert float(data["majority"]) == 0.5


def test_what_says_nothing_is_at_chance() -> None:
    values, labels = planted(rows=120)
    shuffled = np.random.default_rng(0).permutation(labels).tolist()
    result = hs.probe(values, shuffled)
    bound = 4 * np.sqrt(0.25 / 120)  # four deviations of a fair coin
    assert (np.abs(result.data["accuracy"] - 0.5) < bound).all()
    assert (np.abs(result.data["control"] - 0.5) < bound).all()
    assert result.facts["above_chance_at"] == []
    assert "No site is shown to be better" in sections_of(result)[0].prose


def test_rows_in_another_order_score_the_same(found: hs.Result) -> None:
    given, labels = planted()
    order = np.random.default_rng(1).permutation(len(labels))
    texts = tuple(f"text {k}" for k in order)
    tokens = hs.Tokens(texts, range(80), [0] * 80, order, [f"t{k}" for k in order])
    moved = hs.States(given.sites, given.values[:, order], tokens, given.source)
    again = hs.probe(moved, [labels[k] for k in order])
    for name in ("accuracy", "accuracy_fold", "control", "penalty", "mix_accuracy"):
        np.testing.assert_allclose(again.data[name], found.data[name], atol=0.02)
    np.testing.assert_allclose(again.data["coef"], found.data["coef"], atol=0.01)


def test_another_seed_deals_other_folds_and_the_same_one_the_same(
    found: hs.Result,
) -> None:
    assert hs.probe(*planted()).equals(found)
    assert not np.array_equal(
        hs.probe(*planted(), seed=1).data["accuracy_fold"], found.data["accuracy_fold"]
    )


def test_numbers_are_regressed() -> None:
    given, _ = planted(rows=60)
    goal = (given.values[1] @ torch.arange(12.0) + 100).numpy()
    result = hs.probe(given, goal, task="regress")
    assert result.facts["best"]["site"] == "layer.1"
    assert result.facts["best"]["r2"] > 0.99
    assert result.facts["above_chance_at"] == ["layer.1"]
    assert result.data["coef"].dims == ("site", "width")
    assert "interval" not in result.facts["mix"] and "mix_r2_low" not in result.data
    assert "its uncertainty is not known" in sections_of(result)[0].prose
    assert (result.data["control"] < 0.2).all()
    probe = hs.Probe.of(result, "layer.1")
    assert probe.score(given["layer.1"], goal) > 0.999
    theirs = Ridge(float(result.data["penalty_whole"].sel(site="layer.1")))
    own = given["layer.1"].double().numpy()
    theirs.fit((own - own.mean(0)) / own.std(0), goal)
    np.testing.assert_allclose(probe.coef_ * own.std(0), theirs.coef_, rtol=1e-4)
    assert (
        "R²"
        in next(view for view in views_of(result) if isinstance(view, Lines)).y_name
    )
    assert "Better than guessing the mean" in sections_of(result)[0].prose


def test_the_kept_probe_is_scikit_learns_in_the_states_own_space(
    found: hs.Result,
) -> None:
    given, labels = planted()
    probe = hs.Probe.of(found)
    assert probe.site == f"layer.{PLANTED}"
    own = given[probe.site].double().numpy()
    scaled = (own - own.mean(0)) / own.std(0)
    theirs = LogisticRegression(C=1 / probe.penalty, tol=1e-8).fit(scaled, labels)
    np.testing.assert_allclose(probe.coef_ * own.std(0), theirs.coef_, atol=2e-3)
    np.testing.assert_allclose(
        probe.decision_function(own), theirs.decision_function(scaled), atol=1e-2
    )
    np.testing.assert_allclose(
        probe.predict_proba(own), theirs.predict_proba(scaled), atol=1e-2
    )
    assert probe.score(given[probe.site], labels) == theirs.score(scaled, labels)
    assert probe.classes_.tolist() == theirs.classes_.tolist() == ["no", "yes"]
    assert (
        probe.coef_.shape == theirs.coef_.shape
        and probe.intercept_.shape == theirs.intercept_.shape
    )


@pytest.mark.parametrize("kind", [2, 3, "regress"])
def test_a_probe_that_was_saved_is_the_same(tmp_path: Path, kind: int | str) -> None:
    own = planted()[0].values[0].numpy()
    rng = np.random.default_rng(0)
    labels = (
        rng.normal(size=80) if kind == "regress" else rng.integers(0, int(kind), 80)
    )
    task: Any = "regress" if kind == "regress" else "classify"
    probe = hs.Probe(task, penalty=2.0, site="layer.3").fit(own, labels)
    probe.save(tmp_path / "p.safetensors")
    again = hs.Probe.load(tmp_path / "p.safetensors")
    assert (again.predict(own) == probe.predict(own)).all()
    assert (again.decision_function(own) == probe.decision_function(own)).all()
    assert repr(again) == repr(probe) and again.penalty == 2.0
    assert again.predict(own).dtype == probe.predict(own).dtype
    if kind == 3:
        theirs = LogisticRegression(C=0.5, tol=1e-8).fit(
            (own - own.mean(0)) / own.std(0), labels
        )
        np.testing.assert_allclose(
            probe.predict_proba(own),
            theirs.predict_proba((own - own.mean(0)) / own.std(0)),
            atol=1e-3,
        )


def test_a_result_keeps_its_probes(tmp_path: Path, found: hs.Result) -> None:
    for suffix in ("nc", "json"):
        found.save(tmp_path / f"r.{suffix}")
        again = hs.Result.load(tmp_path / f"r.{suffix}")
        assert again.equals(found)
        own = planted()[0].values[PLANTED]
        assert (
            hs.Probe.of(again).decision_function(own)
            == hs.Probe.of(found).decision_function(own)
        ).all()


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


@pytest.mark.parametrize(
    ("coef", "intercept", "classes", "what"),
    [
        (torch.zeros(2, 5), torch.zeros(2), [0, 1], r"2 classes have \[1, width\]"),
        (torch.zeros(1, 5), torch.zeros(2), [0, 1], r"2 classes have \[1, width\]"),
        (
            torch.zeros(3, 5),
            torch.zeros(3),
            [0, 1, 2, 3],
            r"4 classes have \[4, width\]",
        ),
        (torch.zeros(1, 0), torch.zeros(1), [0, 1], "coefficients"),
        (torch.zeros(5), torch.zeros(()), [0], "1 classes"),
        (
            torch.tensor([[0.0, torch.nan]]),
            torch.zeros(1),
            [0, 1],
            "coefficients are not all finite",
        ),
        (
            torch.zeros(1, 2),
            torch.tensor([torch.inf]),
            [0, 1],
            "intercepts are not all finite",
        ),
        (
            torch.zeros(1, 2, dtype=torch.int64),
            torch.zeros(1),
            [0, 1],
            "coefficients are not all finite",
        ),
        (torch.zeros(2, 5), torch.zeros(()), None, "a regression has"),
        (torch.zeros(5), torch.zeros(1), None, "a regression has"),
    ],
)
def test_a_file_whose_numbers_are_no_probe_is_refused(
    tmp_path: Path,
    coef: torch.Tensor,
    intercept: torch.Tensor,
    classes: list[int] | None,
    what: str,
) -> None:
    settings = {
        "task": "regress" if classes is None else "classify",
        "penalty": 1.0,
        "site": "",
        "classes": classes,
    }
    header = {"format": "hiddenscope.probe/1", "probe": json.dumps(settings)}
    write_tensors(
        tmp_path / "p.safetensors", {"coef": coef, "intercept": intercept}, header
    )
    with pytest.raises(Damaged, match=what):
        hs.Probe.load(tmp_path / "p.safetensors")


@pytest.mark.parametrize(
    "penalty", [float("nan"), float("inf"), 0, -1.0, "strong", None]
)
def test_a_penalty_that_is_none_is_refused(penalty: Any) -> None:
    with pytest.raises(StatesError, match="penalty must be a finite number > 0"):
        hs.Probe(penalty=penalty)


def test_equal_states_are_at_chance_and_said_to_be() -> None:
    given, labels = planted()
    given.values[0] = 0.1
    result = hs.probe(given, labels)
    assert result.data["accuracy"].values[0] == 0.5
    assert result.facts["all_equal_at"] == ["layer.0"]
    assert "All states are equal at layer.0" in sections_of(result)[0].prose
    result = hs.probe(states(torch.full((2, 80, 4), 3.3)), labels)
    assert result.facts["above_chance_at"] == []


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (["a"] * 80, "all of one class"),
        (["a"] * 79 + ["b"], "'b' has only one text"),
        (list(range(80)), "80 classes"),
        (["a", "b"], "80 texts and 2 labels"),
        (["a", None] * 40, "the label of text 1 is missing"),
        ([0.5, float("nan")] * 40, "the label of text 1 is missing"),
        ("yes", "got str"),
        (7, "got int"),
    ],
)
def test_labels_that_cannot_be_probed_are_refused(labels: Any, what: str) -> None:
    with pytest.raises(StatesError, match=what):
        hs.probe(planted()[0], labels)


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        (["a", "b"] * 40, "label 0 is 'a'"),
        ([1.0] * 80, "all labels are 1"),
        ([np.inf] * 80, "not a finite number"),
    ],
)
def test_numbers_that_cannot_be_regressed_are_refused(labels: Any, what: str) -> None:
    with pytest.raises(StatesError, match=what):
        hs.probe(planted()[0], labels, task="regress")


def test_other_bad_input_is_refused(tiny: Tiny) -> None:
    given, labels = planted()
    with pytest.raises(StatesError, match="No task"):
        hs.probe(given, labels, task="guess")  # type: ignore[arg-type]
    given.values[1, 7, 3] = torch.nan
    with pytest.raises(NotFinite, match=r"layer\.1, text 7"):
        hs.probe(given, labels)
    with pytest.raises(NotFinite, match=r"layer\.1, text 7, position 0"):
        hs.probe(hs.each_token(given), labels)
    model = tiny("llama")
    with pytest.raises(TextError, match="empty"):
        hs.probe(model, (["", "b"], [0, 1]))
    with pytest.raises(TextError, match="no labels"):
        hs.probe(model, ["one", "two"])
    with pytest.raises(TextError, match="needs a label for each token"):
        hs.probe(hs.each_token(model), "cities-complete")
    with pytest.raises(StatesError, match="all of one text"):
        hs.probe(
            hs.each_token(model),
            (["The cat sat on the mat."], "position"),
            task="regress",
        )
    with pytest.raises(StatesError, match="text 0 has"):
        hs.probe(hs.each_token(model), (["The cat.", "The dog."], [["a"], ["b"]]))
    with pytest.raises(StatesError, match="No ready label"):
        hs.probe(hs.each_token(model), (["The cat.", "The dog."], "colour"))


def test_a_small_class_makes_few_folds() -> None:
    given, _ = planted(rows=40)
    result = hs.probe(given, ["a"] * 38 + ["b"] * 2)
    assert result.facts["folds"] == 2
    assert result.facts["fixed_penalty"] == 100
    assert float(result.data["majority"]) == 0.95
    assert hs.probe(given, ["a"] * 37 + ["b"] * 3).facts["folds"] == 3


def test_a_text_that_comes_twice_is_not_both_learnt_and_tested() -> None:
    """Noise, each row twice: whoever parts the twins finds all of them again."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(1, 40, 200, generator=generator).repeat(1, 2, 1)
    labels = (torch.rand(40, generator=generator) < 0.5).repeat(2).long().tolist()
    tokens = hs.Tokens(
        [f"text {k % 40}" for k in range(80)],
        range(80),
        [0] * 80,
        range(80),
        ["t"] * 80,
    )
    together = hs.probe(hs.States((Site(0),), values, tokens, hs.Source("toy")), labels)
    parted = hs.probe(states(values), labels)
    assert (
        float(parted.data["accuracy"][0])
        > 0.75
        > 0.7
        > float(together.data["accuracy"][0])
    )
    assert (
        together.facts["texts"],
        together.facts["rows"],
        together.facts["copies"],
    ) == (40, 40, 40)


@pytest.mark.parametrize("changed", [" {}", "{} ", "{}.", "{}!", "“{}”"])
def test_near_copies_are_copies(changed: str) -> None:
    """Coin flips on noise, each text twice, the second time with a space or a stop
    more.
    """
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1, 40, 200, generator=generator).repeat(1, 2, 1)
    labels = (torch.rand(40, generator=generator) < 0.5).repeat(2).long().tolist()
    texts = [f"text {k}" for k in range(40)]
    tokens = hs.Tokens(
        [*texts, *map(changed.format, texts)],
        range(80),
        [0] * 80,
        range(80),
        ["t"] * 80,
    )
    result = hs.probe(hs.States((Site(0),), values, tokens, hs.Source("toy")), labels)
    assert result.facts["texts"] == 40
    assert float(result.data["accuracy"][0]) < 0.7


def test_a_probe_of_token_types_is_not_selective() -> None:
    """Hewitt and Liang: states that are the token and no more tell any label of it, a
    drawn one as well.
    """
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 12, 400)
    values = torch.eye(12)[torch.from_numpy(ids)][None] + 0.01 * torch.randn(1, 400, 12)
    given = states(values, [8] * 50, ids.tolist())
    result = hs.probe(hs.each_token(given), [["x", "y", "z"][k % 3] for k in ids])
    assert float(result.data["accuracy"][0]) == 1.0
    assert float(result.data["control"][0]) > 0.95
    assert abs(float(result.data["selectivity"][0])) < 0.05
    assert result.facts["texts"] == 50 and result.facts["rows"] == 400


def test_labels_of_tokens_are_flat_or_by_text() -> None:
    given = states(torch.randn(2, 60, 5), [3] * 20, (list(range(6)) * 10))
    flat = [str(k % 2) for k in range(60)]
    nested = [flat[3 * k : 3 * k + 3] for k in range(20)]
    assert hs.probe(hs.each_token(given), flat).equals(
        hs.probe(hs.each_token(given), nested)
    )


@pytest.mark.parametrize(
    "ready", sliced(["position", "previous-token", "word-start"], 1)
)
def test_ready_labels_need_no_data(tiny: Tiny, ready: str) -> None:
    result = hs.probe(hs.each_token(tiny("gpt2")), ready, sites="layer.0")
    assert result.facts["texts"] == 100
    counts = {one["label"]: one["rows"] for one in result.facts["classes"]}
    assert sum(counts.values()) == result.facts["rows"]
    if ready == "position":  # the embeddings of gpt2 hold it as it is
        assert {"0", "1", "2 to 3", "4 to 7"} <= set(counts)
        assert result.facts["best"]["accuracy"] > 0.9
    if ready == "previous-token":
        assert counts["(another)"] > 0
        assert result.facts["left_out"] == 100
    if ready == "word-start":
        assert set(counts) == {"begins a word", "goes on"}


def test_the_previous_token_is_the_one_before_in_the_text() -> None:
    # Two windows that overlap, and a text of which some tokens are kept.
    positions = [
        0,
        1,
        2,
        1,
        2,
        0,
        4,
        5,
    ]
    tokens = hs.Tokens(None, [0] * 5 + [1] * 3, positions, [7] * 8, ("a",) * 8)
    assert [label is not None for label in previous_token(tokens, "classify")] == [
        0,
        1,
        1,
        0,
        1,
        0,
        0,
        1,
    ]


def test_position_is_a_number_too(tiny: Tiny) -> None:
    texts = [
        "The cat sat on the mat.",
        "The dog sat in the garden of the house.",
        "A bird sang.",
        "It was late.",
    ] * 2
    texts = [f"{text} {k}" for k, text in enumerate(texts)]
    result = hs.probe(
        hs.each_token(tiny("gpt2")),
        (texts, "position"),
        task="regress",
        sites="layer.0",
    )
    assert result.facts["best"]["r2"] > 0.6
    assert "mix" not in result.facts


def test_a_model_and_its_states_give_the_same(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [f"The {animal} sat {k}." for k in range(6) for animal in ("cat", "dog")]
    labels = ["cat", "dog"] * 6
    captured = model.capture(texts)
    assert isinstance(captured, hs.States)
    direct, read = (
        hs.probe(model, (texts, labels), pool="mean"),
        hs.probe(captured, labels, pool="mean"),
    )
    np.testing.assert_allclose(direct.data["accuracy"], read.data["accuracy"])
    assert direct.facts["best"]["accuracy"] == 1.0
    assert (
        hs.probe(tiny("t5"), (texts, labels), sites="decoder.layer.*")
        .data["site"]
        .values[0]
        == "decoder.layer.0"
    )


def test_weights_of_noise_are_not_told_as_a_finding() -> None:
    """On noise nearly all weight can go to one site, and to another in the next fold:
    the range over the folds then excludes the weights of all rows. So there is none,
    and the findings say how many folds agree.
    """
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(6, 20, 64, generator=generator)
    result = hs.probe(states(values), [k % 2 for k in range(20)])
    data = result.data
    weights = data["mix_weight"].to_numpy()
    by_fold = data["mix_weight_fold"].to_numpy()
    assert weights.max() > 0.9
    assert ((weights < by_fold.min(1)) | (weights > by_fold.max(1))).any()
    assert not {"mix_weight_low", "mix_weight_high"} & set(data)
    agreeing = int((by_fold.argmax(0) == weights.argmax()).sum())
    assert agreeing < data.sizes["fold"]
    assert f"as in {agreeing} of {data.sizes['fold']} folds" in result.summary()
    _, mix_view = views_of(result)
    assert isinstance(mix_view, Lines)
    assert all(series.low is None for series in mix_view.series)
    assert len(mix_view.series) == 1 + data.sizes["fold"]


def test_the_mix_is_that_of_its_definition() -> None:
    """One site is a plain probe; of several, no small change of weights or coefficients
    is better.
    """
    given, labels = planted(rows=60, sites=3)
    own = torch.stack([standardised(site)[0] for site in given.values.double()])
    targets = torch.tensor([int(one == "yes") for one in labels])[None]
    every = Problems(
        torch.ones(1, 60, dtype=torch.bool),
        targets,
        torch.tensor([5.0], dtype=torch.float64),
    )
    for learner in (logistic(2, 1e-8), ridge()):
        alone = mix(own[:1], every, learner, 1e-8)
        torch.testing.assert_close(
            alone.scores,
            learner.fit(own[0], every).scores(own[0]),
            atol=1e-5,
            rtol=1e-5,
        )
        mixed = mix(own, every, learner, 1e-8)
        torch.testing.assert_close(
            mixed.weights.sum(0), torch.ones(1, dtype=torch.float64)
        )
        at_weights = (mixed.weights[:, 0, None, None] * own).sum(0)
        assert mixed.converged.all() and mixed.weights[PLANTED, 0] > 0.5
        assert learner.losses(mixed.scores, targets.T).mean() < 0.25
        assert at_weights.shape == own[0].shape


ALONE = PermutationTest([1.0], Z)
PLAIN = VarianceFactors(1.0, 1.0)


def interval_of(
    right: NDArray[np.bool_],
    groups: NDArray[np.int64],
    factors: VarianceFactors = PLAIN,
    test: PermutationTest = ALONE,
) -> Interval:
    """The interval of a share of rows that are right, all of one class."""
    scores, targets = (
        torch.from_numpy(np.where(right, -1.0, 1.0)).view(-1, 1, 1),
        torch.zeros(len(right), 1).long(),
    )
    return accuracy_interval(accuracy(scores, targets, groups), groups, factors, test)


def test_the_interval_of_independent_rows_is_wilsons() -> None:
    alone = interval_of(np.array([True] * 8 + [False] * 2), np.arange(10))
    # As in the tables.
    assert (round(alone.low, 4), round(alone.high, 4)) == (
        0.4902,
        0.9433,
    )
    sure = interval_of(np.ones(20, dtype=bool), np.arange(20))
    assert sure.high == 1 and 0.8 < sure.low < 0.85
    assert alone.joint_low == alone.decision_low == alone.low
    four = PermutationTest([1.0] * 4, 3.0)
    wider = interval_of(
        np.array([True] * 8 + [False] * 2),
        np.arange(10),
        VarianceFactors(2.0, 1.0),
        four,
    )
    assert (
        wider.joint_low
        < wider.decision_low
        == wider.low
        < alone.low
        < alone.high
        < wider.high
    )
    # Bonferroni's end for four sites is nearer than three standard deviations, and that
    # of a hundred is not.
    hundred = interval_of(
        np.array([True] * 8 + [False] * 2),
        np.arange(10),
        test=PermutationTest([1.0] * 100, 3.0),
    )
    assert (
        hundred.joint_low
        < interval_of(
            np.array([True] * 8 + [False] * 2), np.arange(10), test=four
        ).joint_low
    )


def test_rows_of_one_text_that_go_together_count_for_fewer() -> None:
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(20), 10)
    alike = np.repeat(rng.random(20) < 0.6, 10)
    one, ten = interval_of(alike, groups), interval_of(alike, np.arange(200))
    assert one.low < ten.low < ten.high < one.high
    held = 0
    for seed in range(60):
        right = np.repeat(np.random.default_rng(seed).random(30) < 0.7, 5)
        interval = interval_of(right, np.repeat(np.arange(30), 5))
        held += interval.low <= 0.7 <= interval.high
    assert held >= 51


def test_labels_that_were_permuted_say_what_chance_is() -> None:
    """A score that is large by itself is not, beside one that chance makes as large; p
    is exact.
    """
    rng = np.random.default_rng(0)
    scores = torch.from_numpy(rng.normal(0.5, 0.05, (3, 200)))
    scores[1, 0] = 0.9
    found = permutation_test(scores)
    assert (
        found.p_values[1] == 1 / 200 < 0.05 < min(found.p_values[0], found.p_values[2])
    )
    assert 2 < found.joint_z < 3
    assert permutation_test(torch.full((2, 200), 0.5)) == PermutationTest([1, 1], Z)
    # 1.5, but for the draw.
    assert (
        1.2
        < variance_factors(scores[0, 1:], torch.full((199,), 0.05**2 / 1.5)).within
        < 1.9
    )
    # Never narrower than independent rows.
    assert variance_factors(scores[0, 1:], torch.full((199,), 1.0)) == (
        1,
        1,
    )
    assert variance_factors(
        torch.full((9,), 0.5), torch.zeros(9), lower_bound=2.25
    ) == (2.25, 1)


def test_predictions_that_lean_to_no_class_go_together_by_two_over_pi() -> None:
    """Of nearly linear fits of noise: with the intercept most predictions are the
    larger class, and hardly vary.
    """
    given = states(torch.randn(1, 60, 40, generator=torch.Generator().manual_seed(0)))
    rows = labelled_rows(
        given, [int(k < 24) for k in range(60)], "classify", "layer.*", "last", False
    )
    target = target_of(rows, "classify")
    found = null_distribution(
        standardised(given.values[0])[0],
        torch.zeros(60),
        target,
        design_of(rows, target, 0),
    ).variability
    # 1 + 2 / π, but for the draw.
    assert isinstance(found, VarianceFactors) and 1.25 < found.within < 2.05


def test_the_part_of_the_variance_that_class_sizes_bring_has_a_factor_of_its_own() -> (
    None
):
    """It widens the interval of a probe that leans to a class, and not of one that
    reads both classes equally well.
    """
    targets = torch.tensor([[0]] * 30 + [[1]] * 20)
    leaning, even = (
        torch.full((50, 1, 1), -1.0),
        (2.0 * targets - 1).view(50, 1, 1).clone(),
    )
    even[:6], even[30:34] = 1, -1  # a fifth of either class is wrong
    for scores, wider in ((leaning, True), (even, False)):
        measured = accuracy(scores, targets, np.arange(50))
        plain, other = (
            accuracy_interval(
                measured, np.arange(50), VarianceFactors(1.0, factor), ALONE
            )
            for factor in (1.0, 2.0)
        )
        assert (
            other.low < plain.low - 0.03 and other.high > plain.high + 0.03
        ) == wider
        assert (other == plain) == (not wider)


def test_drawn_class_sizes_tell_how_much_leaning_to_the_larger_class_gains() -> None:
    """One that always says the larger class: the error is that of its size, and more
    than `between` has no part.
    """
    labels = bootstrap_classes(
        np.arange(50) % 2, 500, 0, np.arange(50), np.arange(50) % 5
    )
    assert labels is not None
    larger = (labels.double().mean(1) > 0.5).double() * 2 - 1
    shares = torch.tensor([0.5, 0.5])
    always = bootstrap_accuracy(
        larger.expand(50, 1, -1), labels.T, np.arange(50), shares
    )
    torch.testing.assert_close(
        always.score,
        torch.maximum(labels.double().mean(1), 1 - labels.double().mean(1)),
    )
    torch.testing.assert_close(
        always.fresh, torch.full((500,), 0.5, dtype=torch.float64)
    )
    assert 1 <= size_factor(always) < 1.2
    # One that leans the more, the larger the class: as far as the sizes are apart.
    far = (labels.double().mean(1) - 0.5).abs()
    leans = BootstrapSample(
        0.5 + 4 * far**2,
        torch.full((500,), 0.5),
        torch.zeros(500),
        0.25 * (4 * far) ** 2 / 50,
    )
    assert 2.3 < size_factor(leans) < 3.7  # E[x⁴] of a normal distribution is 3 E[x²]²


def size_factor(measured: BootstrapSample) -> float:
    return variance_factors(
        torch.rand(20),
        torch.ones(20),
        BootstrapSample(*(part.double() for part in measured)),
    ).between


def test_the_interval_of_r2_holds_what_makes_the_found_value_likely() -> None:
    """A value has its own deviation, which is large where much could be read: so the
    interval reaches up farther.
    """
    influence = torch.full((1, 50), 0.1, dtype=torch.float64)
    found = ExplainedVariance(torch.tensor(0.0), torch.tensor(0.0), influence)
    own = 0.1**2 * 50 / 50**2 * 50 / 49
    worlds = PlantedSpread(
        np.array([0.0, -0.1, -0.5]), np.array([0.02, 0.1, 0.2]), np.full(3, own)
    )
    interval = r2_interval(found, np.arange(50), worlds, PermutationTest([1.0], 3.0))
    assert interval.low == pytest.approx(1 - np.exp(Z * 0.02), abs=1e-3)
    # -0.288 has a deviation of 0.147: the last.
    assert interval.high == pytest.approx(1 - np.exp(-0.288), abs=1e-3)
    assert (
        interval.joint_low
        == interval.decision_low
        < interval.low
        < interval.score
        < interval.high
    )
    wider = r2_interval(
        found._replace(influence=2 * influence),
        np.arange(50),
        worlds,
        PermutationTest([1.0], 3.0),
    )
    assert wider.low < interval.low < interval.high < wider.high
    at_least = r2_interval(
        found, np.arange(50), worlds, PermutationTest([1.0], 3.0), 0.3
    )
    ends = [1 - np.exp(width * 0.3) for width in (3.0, Z, -Z)]
    assert [at_least.joint_low, at_least.low, at_least.high] == pytest.approx(
        ends, abs=1e-3
    )
    # The test of chance is as it was.
    assert at_least.decision_low == pytest.approx(interval.decision_low, abs=1e-3)


@pytest.mark.parametrize(("width", "copies"), [(4, 1), (60, 1), (4, 3), (60, 2)])
def test_the_jackknife_is_that_of_fits_without_each_text(
    width: int, copies: int
) -> None:
    """scikit-learn's fits, all of them again, with the scale and the penalty of each
    fold as they were.
    """
    generator, rows = torch.Generator().manual_seed(width), 12 * copies
    states = torch.randn(rows, width, generator=generator)
    targets = states[:, 0] + torch.randn(rows, generator=generator)
    groups, penalty = np.arange(rows) // copies, torch.tensor([1.0, 10.0, 100.0])
    own, goal, folds, logarithm = (
        states.double().numpy(),
        targets.double().numpy(),
        groups % 3,
        [],
    )
    for left_out in range(12):
        kept, predicted = groups != left_out, np.empty(rows)
        for fold in range(3):
            train, tested = kept & (folds != fold), folds == fold
            scaler = StandardScaler().fit(own[folds != fold])
            model = Ridge(float(penalty[fold])).fit(
                scaler.transform(own[train]), goal[train]
            )
            predicted[tested] = model.predict(scaler.transform(own[tested]))
        logarithm.append(np.log(1 - r2_score(goal[kept], predicted[kept])))
    expected = np.sqrt(11 * np.var(logarithm))
    assert jackknife_deviation(
        states, targets, folds, groups, penalty
    ) == pytest.approx(expected, rel=1e-6)


def test_the_jackknife_of_states_that_are_all_equal_is_finite() -> None:
    targets, rows = (
        torch.randn(10, generator=torch.Generator().manual_seed(0)),
        np.arange(10),
    )
    for width in (3, 30):
        deviation = jackknife_deviation(
            torch.zeros(10, width), targets, rows % 2, rows, torch.full((2,), 100.0)
        )
        assert 0 < deviation < 1


def test_planted_numbers_are_read_the_better_the_stronger_they_are() -> None:
    generator = torch.Generator().manual_seed(0)
    signal, noise = (
        torch.randn(60, generator=generator).double(),
        torch.randn(60, generator=generator).double(),
    )
    groups = np.arange(60) // 2
    drawn = bootstrap_numbers(noise, 240, 0, groups)
    made = plant_signal(drawn, 3 * signal + 1)
    correlation = [
        float(torch.corrcoef(torch.stack([signal, row]))[0, 1]) for row in made
    ]
    by_strength = np.array(correlation).reshape(len(STRENGTHS), -1).mean(1)
    np.testing.assert_allclose(by_strength, STRENGTHS, atol=0.12)
    measured = r2(signal.expand(240, -1).T[:, None] * 0.5, made.T, groups)
    worlds = planted_spread(measured, len(STRENGTHS), groups)
    assert (np.diff(worlds.logarithm) < 0).all() and (
        worlds.deviation**2 >= worlds.within - 1e-12
    ).all()


def test_few_numbers_have_finite_intervals_too() -> None:
    """Of four texts one may be drawn four times, or the one left out that has another
    number: all are equal.
    """
    given = states(torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(0)))
    for numbers in ([1.0, 2.0, 2.0, 4.0], [1.0, 1.0, 1.0, 4.0]):
        result = hs.probe(given, numbers, task="regress")
        ends = [result.data[f"r2{end}"].to_numpy() for end in ("_low", "", "_high")]
        assert np.isfinite(ends).all() and (np.diff(ends, axis=0) >= 0).all()
    assert (
        np.ptp(
            bootstrap_numbers(torch.arange(3.0), 200, 0, np.arange(3)).numpy(), axis=1
        )
        > 0
    ).all()


def test_the_variance_of_few_numbers_is_found_too_small_by_that_of_their_mean() -> None:
    numbers = torch.randn(
        10, 4_000, generator=torch.Generator().manual_seed(0)
    ).double()
    # The true mean: an R² of 0 on fresh rows.
    predicted = torch.zeros(10, 1, 4_000, dtype=torch.float64)
    found = r2(predicted, numbers, np.arange(10))
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


def test_copies_of_a_text_have_one_label_when_labels_are_permuted() -> None:
    """Coin flips on noise, each text three times: a shuffle of rows would call nearly
    every run above chance.
    """
    called = 0
    for seed in range(15):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(1, 30, 40, generator=generator).repeat(1, 3, 1)
        labels = (torch.arange(30) % 2).repeat(3).tolist()
        tokens = hs.Tokens(
            [f"text {seed} {k % 30}" for k in range(90)],
            range(90),
            [0] * 90,
            range(90),
            ["t"] * 90,
        )
        result = hs.probe(
            hs.States((Site(0),), values, tokens, hs.Source("toy")), labels, seed=seed
        )
        called += float(result.data["p"][0]) <= 0.05
    assert called <= 4  # more comes up in 1 of 1,800 at a level of 5%


def test_rows_have_one_control_label_in_any_order() -> None:
    targets, folds = torch.arange(30) % 2, np.arange(30) % 5
    order = np.random.default_rng(1).permutation(30)
    values = torch.randn(1, 30, 4)
    rows = labelled_rows(
        states(values), targets.tolist(), "classify", "layer.*", "last", False
    )
    for seed in range(5):
        drawn = control(targets, rows, folds, seed)
        assert drawn is not None and not torch.equal(drawn, targets)
        moved = control(targets[order], rows.select(order.tolist()), folds[order], seed)
        assert moved is not None and torch.equal(moved, drawn[order])


def test_few_texts_are_said_to_be_too_few_for_the_intervals() -> None:
    given, labels = planted(rows=16)
    result = hs.probe(given, labels)
    assert result.facts["calibrated"] is False
    assert "The intervals are rough" in sections_of(result)[0].prose
    assert "calibrated" not in hs.probe(*planted(rows=24)).facts


def test_intervals_of_several_classes_are_not_called_95_percent() -> None:
    """Of noise with four classes they held the truth in 88% of simulations
    (docs/probe.md).
    """
    given = states(torch.randn(2, 30, 6, generator=torch.Generator().manual_seed(0)))
    several, two = (hs.probe(given, [k % count for k in range(30)]) for count in (3, 2))
    assert several.facts["interval_holds"] == 0.88 and "interval_holds" not in two.facts
    assert "they held the truth in 88% of simulations" in several.summary()
    (section, *_), (of_two, *_) = sections_of(several), sections_of(two)
    assert "95% interval" in of_two.reading and "95%" not in section.reading
    assert "band is its interval (held in 88% of simulations)" in section.reading
    lines = views_of(several)[0]
    assert (
        isinstance(lines, Lines)
        and lines.series[0].band == "interval (held in 88% of simulations)"
    )
    names = [
        str(variable.attrs.get("long_name"))
        for variable in several.data.variables.values()
    ]
    assert not any("95%" in name for name in names)


def test_the_best_site_is_told_with_an_interval_that_knows_it_was_chosen(
    found: hs.Result,
) -> None:
    best, data = found.facts["best"], found.data.sel(site=f"layer.{PLANTED}")
    assert best["interval"][0] < float(data["accuracy_low"]) and best["interval"][
        1
    ] == float(data["accuracy_high"])
    assert best["p"] == 1 / 200 and found.facts["permutations"] == 199
    assert "corrected for being the best of 4" in sections_of(found)[0].prose
    given, labels = planted()
    alone = hs.probe(given, labels, sites=f"layer.{PLANTED}")
    assert alone.facts["best"]["interval"][0] == pytest.approx(
        float(alone.data["accuracy_low"][0]), abs=0.05
    )
    assert "corrected" not in sections_of(alone)[0].prose


def test_r2_is_scikit_learns_of_all_held_out_predictions() -> None:
    given, _ = planted(rows=40)
    goal = (
        given.values[1] @ torch.arange(12.0)
        + 30 * torch.randn(40, generator=torch.Generator().manual_seed(3))
    ).numpy()
    result = hs.probe(given, goal, task="regress")
    keys = [copy_key(text) for text in strings_of(given.tokens)]
    folds = assign_folds(np.zeros(40, dtype=np.int64), keys, 5, 0)
    for site in ("layer.0", "layer.1"):
        own, predicted = given[site].double().numpy(), np.empty(40)
        for fold, penalty in enumerate(
            result.data["penalty"].sel(site=site).to_numpy()
        ):
            train = folds != fold
            scaler = StandardScaler().fit(own[train])
            model = Ridge(penalty).fit(scaler.transform(own[train]), goal[train])
            predicted[~train] = model.predict(scaler.transform(own[~train]))
        assert float(result.data["r2"].sel(site=site)) == pytest.approx(
            r2_score(goal, predicted), abs=1e-4
        )


@pytest.mark.real
def test_which_city_comes_next_is_known_late(smollm2: hs.Model) -> None:
    result = hs.probe(
        smollm2, "cities-incomplete", sites="layer.0,layer.12,layer.26,final"
    )
    accuracy = dict(
        zip(
            result.data["site"].values.tolist(),
            result.data["accuracy"].values.tolist(),
            strict=True,
        )
    )
    assert accuracy["layer.26"] > 0.75 and accuracy["layer.0"] <= 0.55
    assert "layer.26" in result.facts["above_chance_at"]
    assert result.facts["classes"] == [
        {"label": "Montreal", "rows": 25},
        {"label": "Toronto", "rows": 25},
    ]
    lines, weights = views_of(result)
    assert isinstance(lines, Lines) and isinstance(weights, Lines)
    assert [series.name for series in lines.series] == [
        "probe",
        "control labels",
        "largest class",
        "mix of all sites",
    ]


def test_an_accuracy_below_chance_is_explained() -> None:
    """Each text has a twin of the other class, hence an unseen text resembles one of
    another label.
    """
    twins = torch.randn(30, 60, generator=torch.Generator().manual_seed(0))
    values = torch.cat(
        [
            twins,
            twins
            + 0.01 * torch.randn(30, 60, generator=torch.Generator().manual_seed(1)),
        ]
    )[None]
    names = [f"text {number}" for number in range(60)]
    tokens = hs.Tokens(names, range(60), [0] * 60, range(60), ["t"] * 60)
    states = hs.States((Site(0),), values, tokens, hs.Source("toy"))
    result = hs.probe(states, ["a"] * 30 + ["b"] * 30)
    assert float(result.data["accuracy_high"][0]) < 0.5
    said = result.summary()
    assert (
        "At layer.0 the probe is right less often than guessing the largest class"
        " would be" in said
    )
    assert (
        "the texts most like a held-out text have another label" in said
        and "say so with groups" in said
    )
    grouped = hs.probe(
        states,
        hs.read((names, ["a"] * 30 + ["b"] * 30), group=[k % 30 for k in range(60)]),
    )
    assert (
        float(grouped.data["accuracy_high"][0]) > 0.5
        and "less often" not in grouped.summary()
    )


def minimal_pairs(
    count: int, apart: float, seed: int = 0
) -> tuple[hs.States, list[str]]:
    """The two texts of a pair share their topic, and one direction tells a question
    from a statement.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, count, 1, 12, generator=generator).repeat(1, 1, 2, 1)
    values += 0.3 * torch.randn(values.shape, generator=generator)
    values[1, :, 1, 0] += apart
    names = [f"You saw the {noun} there{end}" for noun in range(count) for end in ".?"]
    rows = range(2 * count)
    tokens = hs.Tokens(names, rows, [0] * 2 * count, rows, ["t"] * 2 * count)
    return (
        hs.States((Site(0), Site(1)), values.flatten(1, 2), tokens, hs.Source("toy")),
        ["said", "asked"] * count,
    )


def test_minimal_pairs_are_permuted_within_pairs() -> None:
    """Texts that differ in a full stop are no copies where their labels differ, and
    whole pairs are all alike.
    """
    result = hs.probe(*minimal_pairs(16, 12.0))
    best = result.facts["best"]
    assert best["site"] == "layer.1" and best["accuracy"] == 1.0 and best["p"] == 0.005
    assert best["control"] < 0.75 and best["selectivity"] > 0.25
    assert result.facts["above_chance_at"] == ["layer.1"]
    assert (
        result.facts["texts"],
        result.facts["groups"],
        result.facts["groups_given"],
    ) == (32, 16, False)
    assert "kept together (16 groups)" in result.summary()


def test_the_smallest_p_of_few_pairs_is_told() -> None:
    result = hs.probe(*minimal_pairs(4, 12.0))
    assert (
        result.facts["smallest_p"] == 1 / 8 == result.facts["best"]["p"]
        and result.facts["permutations"] == 15
    )
    assert (
        "permuted in 16 ways only: the smallest p-value that is possible is 0.12, so"
        " nothing" in result.summary()
    )
    assert result.facts["best"]["control"] < 1


def test_one_label_for_each_position_is_told_from_chance() -> None:
    """All texts have the same labels in the same order, so that whole texts that change
    places change nothing.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 24, 5, 8, generator=generator)
    values[1] += 3 * torch.randn(5, 8, generator=generator)
    given = states(values.flatten(1, 2), [5] * 24, ids=[0] * 60 + [1] * 60)
    result = hs.probe(hs.each_token(given), ["a", "a", "b", "b", "b"] * 24)
    assert (
        result.facts["above_chance_at"] == ["layer.1"]
        and result.facts["best"]["p"] == 0.005
    )
    assert float(result.data["p"][0]) > 0.05


def test_groups_of_paraphrases_are_one_piece_of_evidence_each() -> None:
    """Without groups, forty texts of ten sentences are read at many sites in most runs."""
    alone = together = 0
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(2, 10, 1, 40, generator=generator).repeat(1, 1, 4, 1)
        values = (
            values + 0.2 * torch.randn(values.shape, generator=generator)
        ).flatten(1, 2)
        number = np.repeat(np.arange(10), 4)
        labels = (torch.randperm(10, generator=generator).numpy()[number] % 2).tolist()
        given = states(values)
        data = hs.read(([f"text {k}" for k in range(40)], labels), group=number)
        alone += bool(hs.probe(given, labels, seed=seed).facts["above_chance_at"])
        grouped = hs.probe(given, data, seed=seed)
        together += bool(grouped.facts["above_chance_at"])
        assert (
            grouped.facts["groups"] == 10
            and grouped.facts["groups_given"]
            and not grouped.facts["calibrated"]
        )
    assert alone >= 4 and together <= 1
    assert (
        "with as few as 10 groups of texts they were not calibrated"
        in grouped.summary()
    )


def test_copies_change_nothing() -> None:
    """A text that comes again with the same label is probed once, however often it
    comes.
    """
    given, labels = planted(rows=40)
    often = np.repeat(np.arange(40), np.random.default_rng(0).integers(1, 6, 40))
    rows = range(len(often))
    tokens = hs.Tokens(
        [f"text {k}" for k in often], rows, [0] * len(often), rows, ["t"] * len(often)
    )
    copied = hs.States(given.sites, given.values[:, often], tokens, given.source)
    once, again = hs.probe(given, labels), hs.probe(copied, [labels[k] for k in often])
    for name in ("accuracy", "accuracy_low", "accuracy_high", "p", "control"):
        np.testing.assert_array_equal(once.data[name], again.data[name])
    assert again.facts["copies"] == len(often) - 40
    assert (
        f"{len(often) - 40} texts came again with the same label; each text was probed"
        " once." in again.summary()
    )


def test_large_groups_count_for_no_more_than_their_effective_number() -> None:
    """Groups that are right or wrong as a whole: of one large group and many small ones
    the mean follows the large.
    """
    sizes = np.array([40, *[1] * 40])
    groups = np.repeat(np.arange(41), sizes)
    held = 0
    for seed in range(60):
        right = (np.random.default_rng(seed).random(41) < 0.6)[groups]
        interval = interval_of(right, groups)
        held += interval.low <= 0.6 <= interval.high
    assert effective_count(groups) == pytest.approx(80**2 / (1600 + 40))
    assert held >= 54


def test_an_interval_that_reaches_down_to_guessing_is_explained(
    found: hs.Result,
) -> None:
    """The interval of the best site allows for its choice, and the test does not need
    it.
    """
    best, chance = found.facts["best"], found.facts["chance"]
    low = float(found.data["accuracy_low"].sel(site=best["site"]))
    assert low > chance and "reaches down to guessing" not in found.summary()
    facts = {
        **found.facts,
        "best": {**best, "interval": [chance - 0.02, best["interval"][1]]},
    }
    told = hs.Result("probe", found.data, facts, found.source).summary()
    assert (
        "reaches down to guessing because it allows for the choice of the best site. By"
        " itself" in told
    )
    facts = {**facts, "above_chance_at": []}
    told = hs.Result("probe", found.data, facts, found.source).summary()
    assert (
        "Permuted labels seldom do as well as the best site (p = 0.005), but its"
        " interval holds 50%" in told
    )


def test_where_nothing_can_be_permuted_there_is_no_verdict(found: hs.Result) -> None:
    best = {**found.facts["best"], "p": None, "control": None, "selectivity": None}
    facts = {**found.facts, "best": best, "above_chance_at": [], "smallest_p": None}
    told = hs.Result("probe", found.data, facts, found.source).summary()
    assert "the labels can be permuted in no other way, so there is no p-value" in told
    assert "No site is shown" not in told and "control labels" not in told
