"""The oracles of analyses of states agree with what these say, on several families."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hiddenscope as hs
from tests.oracles import disagreements
from tests.registry import CLASSES, OTHER, TEXT, TEXTS, points, tiny

# `tests/checks` asks the smallest questions of every subject; these ask others.
pytestmark = pytest.mark.slow
FAMILIES = ("llama", "gpt2", "gemma3_text", "bert", "t5", "granite")


def check(word: str, model: Any, asked: Mapping[str, Any]) -> Any:
    """Ask, compare with the oracle, and return the result."""
    result = getattr(hs, word)(model, **asked)
    assert disagreements(word, model, asked, result) == []
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_profile(family: str) -> None:
    check("profile", tiny(family), {"texts": [TEXT, OTHER]})


@pytest.mark.parametrize("family", FAMILIES)
def test_profile_of_neurons(family: str) -> None:
    texts = [f"{TEXT} {OTHER} {number}" for number in range(4)]
    if family == "gemma3_text":
        # Where a window is short, tokens after the same few tokens have equal states,
        # of which rounding chooses the strongest.
        texts = ["The cat sat.", "A mat of it rests on one", "No dog is", "On it: rats"]
    sites = "encoder.*.mlp.neurons" if family == "t5" else "*.mlp.neurons"
    check("profile", tiny(family), {"texts": texts, "sites": sites})


@pytest.mark.parametrize("family", FAMILIES)
def test_compare(family: str) -> None:
    check("compare", tiny(family), {"a": TEXT, "b": OTHER})


def test_compare_of_lists_is_pair_by_pair() -> None:
    check("compare", tiny("llama"), {"a": [TEXT, OTHER], "b": [OTHER, "The mat."]})


@pytest.mark.parametrize("family", FAMILIES)
def test_compare_of_two_models(family: str) -> None:
    check("compare", tiny(family), {"a": TEXT, "other": tiny(family, 1)})


@pytest.mark.parametrize("family", FAMILIES)
def test_project(family: str) -> None:
    check("project", tiny(family), {"data": CLASSES, "method": "pca"})


def test_project_of_two_models_and_datasets() -> None:
    data = {"a": CLASSES, "b": CLASSES}
    models = [tiny("llama"), tiny("gpt2")]
    check("project", models, {"data": data, "method": "pca"})


@pytest.mark.parametrize(
    ("family", "nearness"), [*zip(FAMILIES, ("cosine", "dot", "l2") * 2, strict=True)]
)
def test_search(family: str, nearness: str) -> None:
    texts = CLASSES[0]
    asked = {"query": [TEXT, OTHER], "texts": texts, "k": 3, "nearness": nearness}
    check("search", tiny(family), asked)


def test_search_of_an_array() -> None:
    check("search", points(), {"query": [0.0, 2.0, 1.0], "k": 2})


@pytest.mark.parametrize("family", FAMILIES)
def test_cluster(family: str) -> None:
    check("cluster", tiny(family), {"texts": CLASSES[0]})


def test_cluster_of_an_array() -> None:
    check("cluster", points(), {})


@pytest.mark.parametrize(
    ("family", "pool"),
    [*zip(FAMILIES, (None, "mean:all", "max", "last", "first", 1), strict=True)],
)
def test_embed(family: str, pool: str | int | None) -> None:
    check("embed", tiny(family), {"texts": TEXTS, "pool": pool})


def test_embed_of_a_site() -> None:
    check("embed", tiny("bert"), {"texts": TEXTS, "pool": "max", "site": "layer.1"})


@pytest.mark.parametrize("adjust", ["centre", "whiten"])
def test_adjusted_vectors(adjust: str) -> None:
    texts = [[5 + k % 90, 6 + k // 90, 7 + k % 7] for k in range(150)]
    asked = {"texts": texts, "adjust": adjust, "normalize": False}
    check("embed", tiny("llama"), asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_probe(family: str) -> None:
    check("probe", tiny(family), {"data": CLASSES, "sites": "layer.2"})


def test_probe_of_several_classes() -> None:
    texts, _ = CLASSES
    check(
        "probe",
        tiny("llama"),
        {"data": (texts, ["a", "b", "c", "b"] * 6), "sites": "layer.1,layer.2"},
    )


def test_probe_of_numbers() -> None:
    texts, _ = CLASSES
    numbers = [float(k % 7) for k in range(24)]
    asked = {"data": (texts, numbers), "task": "regress", "sites": "layer.1"}
    check("probe", tiny("gpt2"), asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_examples_of_a_neuron(family: str) -> None:
    stack = "encoder." if family == "t5" else ""
    other = "A mat is one of the cats" if family == "gemma3_text" else OTHER
    asked = {"directions": f"{stack}layer.2.mlp.neuron.7", "texts": [TEXT, other]}
    check("examples", tiny(family), asked)


@pytest.mark.parametrize("gate", ["linear", "relu", "topk"])
def test_examples_of_a_dictionary(gate: str) -> None:
    made = hs.Dictionary.of(np.random.default_rng(0).normal(size=(9, 64)), "layer.2")
    encoding = replace(made.encoding, gate=gate, k=3 if gate == "topk" else None)
    asked = {"directions": replace(made, encoding=encoding), "texts": [TEXT, OTHER]}
    check("examples", tiny("llama"), asked)


def test_examples_of_a_direction_with_copies() -> None:
    direction = hs.Direction.of(np.ones(64), sites="layer.1")
    asked = {"directions": direction, "texts": [TEXT, TEXT, OTHER], "threshold": 0.1}
    check("examples", tiny("gpt2"), asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_anatomy(family: str) -> None:
    check("anatomy", tiny(family), {})


@pytest.mark.parametrize(
    ("family", "pool"), [*zip(FAMILIES, (None, "mean", "last") * 2, strict=True)]
)
def test_extract(family: str, pool: str | None, tmp_path: Path) -> None:
    sites = "encoder.layer.*" if family == "t5" else "layer.*"
    asked = {"corpus": TEXTS, "to": tmp_path / "states", "sites": sites, "pool": pool}
    check("extract", tiny(family), asked)


@pytest.mark.parametrize("analysis", ["profile", "compare"])
def test_series(analysis: str) -> None:
    models = [tiny("llama"), tiny("llama", 1), tiny("bert")]
    check("series", models, {"analysis": analysis, "data": [TEXT, OTHER]})


def test_series_against_the_previous_member() -> None:
    models = [tiny("gpt2"), tiny("gpt2", 1), tiny("gpt2", 2)]
    asked = {"analysis": "compare", "data": [TEXT, OTHER], "against": "previous"}
    check("series", models, asked)


@pytest.mark.parametrize(
    ("analysis", "options"),
    [("probe", {"sites": "layer.2"}), ("project", {"method": "pca"})],
)
def test_series_of_labelled_texts(analysis: str, options: dict[str, Any]) -> None:
    models = [tiny("llama"), tiny("gpt2")]
    check("series", models, {"analysis": analysis, "data": CLASSES, "options": options})


@pytest.mark.parametrize("family", FAMILIES)
def test_features(family: str) -> None:
    stack = "encoder." if family == "t5" else ""
    texts = [f"{TEXT} {OTHER} {number}" for number in range(4)]
    asked = {"texts": texts, "site": f"{stack}layer.2"}
    result = check("features", tiny(family), asked)
    for comparison in result.facts["comparisons"]:
        if comparison["measure"] == "divergence":
            assert min(score["value"] for score in comparison["scores"]) >= 0


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dictionary", ["pca", "neurons"])
def test_features_of_an_mlp(family: str, dictionary: str) -> None:
    texts = [f"{TEXT} {OTHER} {number}" for number in range(4)]
    asked = {"texts": texts, "dictionary": dictionary, "site": "layer.2.mlp"}
    check("features", tiny(family), asked)


@pytest.mark.parametrize("family", FAMILIES)
def test_features_of_labelled_texts(family: str) -> None:
    stack = "encoder." if family == "t5" else ""
    rows = np.random.default_rng(0).normal(size=(40, 64))
    made = hs.Dictionary.of(rows, f"{stack}layer.1")
    made = replace(made, encoding=replace(made.encoding, gate="topk", k=5))
    check("features", tiny(family), {"dictionary": made, "data": CLASSES})
