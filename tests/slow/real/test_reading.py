"""Probe, project and embed on trained models."""

import numpy as np
import pytest

import hiddenscope as hs
from hiddenscope.loading import zoo

pytestmark = pytest.mark.real

TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house and nothing in the garden.",
    "The end.",
]


def test_which_city_comes_next_is_known_late(smollm2: hs.Model) -> None:
    sites = "layer.0,layer.12,layer.26,final"
    result = hs.probe(smollm2, "cities-incomplete", sites=sites)
    accuracy = result.data["accuracy"]
    assert accuracy.sel(site="layer.26") > 0.75
    assert accuracy.sel(site="layer.0") <= 0.55
    assert "layer.26" in result.facts["above_chance_at"]
    assert result.facts["classes"] == [
        {"label": "Montreal", "rows": 25},
        {"label": "Toronto", "rows": 25},
    ]


def test_the_cities_are_apart_late(smollm2: hs.Model) -> None:
    some = {"incomplete": "cities-incomplete", "complete": "cities-complete"}
    result = hs.project(smollm2, some, method="pca", sites="layer.0,layer.29")
    incomplete, complete = result.facts["parts"]
    assert incomplete["labels_predicted"] >= 45
    assert complete["all_equal_at"] == ["layer.0"]
    early = result.data.sel(dataset="incomplete", site="layer.0")
    for name in ("silhouette_p", "neighbour_p", "fisher_p"):
        assert early[name] > 0.5
    assert early["fisher"].item() == pytest.approx(0, abs=1e-9)
    for name in some:
        late = result.data.sel(dataset=name, site="layer.29")
        assert late["silhouette_p"].item() <= 0.005
    assert "layer.0" not in incomplete["separation"]["apart_at"]
    (comparison,) = result.facts["comparisons"]
    assert comparison["model"] == "smollm2" and comparison["pairs"] == 0


@pytest.mark.filterwarnings("ignore")  # theirs
def test_sentence_transformers_makes_the_same_vectors(minilm: hs.Model) -> None:
    transformers = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.models")
    # As its own files say.
    reader = modules.Transformer(str(zoo.zoo_folder("minilm")), max_seq_length=256)
    pooling = modules.Pooling(384, pooling_mode="mean")
    theirs = transformers.SentenceTransformer(
        modules=[reader, pooling, modules.Normalize()], device="cpu"
    )
    words = ["river", "stone", "a", "light", "over"]
    ragged = [" ".join(words[: n % 5 + 1] * (n % 7 + 1)) for n in range(37)]
    long = [
        f"{word} " * length
        for word in ("river", "stones")
        for length in (250, 300, 700)
    ]
    texts = [*TEXTS, *ragged, *long]
    expected = theirs.encode(texts, show_progress_bar=False)
    np.testing.assert_allclose(hs.embed(minilm, texts), expected, atol=1e-5, rtol=0)
