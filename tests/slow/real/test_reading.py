"""Probe, project, cluster, embed and search on trained models."""

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.embed.embed import mean_cosine
from hiddenscope.cli import main as cli
from hiddenscope.loading import zoo
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.values import Lines

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
    lines, weights = views_of(result)
    assert isinstance(lines, Lines) and isinstance(weights, Lines)
    assert [series.name for series in lines.series] == [
        "probe",
        "control labels",
        "largest class",
        "mix of all sites",
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
    assert result.facts["tightness"][0]["model"] == "smollm2"
    assert len(sections_of(result)) == 2


def test_a_sentence_encoder_parts_what_is_of_different_things(minilm: hs.Model) -> None:
    texts = [
        "Whisk the eggs.",
        "Simmer the sauce.",
        "Knead the dough.",
        "Roast the carrots.",
        "Salt the soup.",
        "Fry the onions.",
        "The probe orbits Saturn.",
        "A distant star.",
        "The rocket lifted off.",
        "A spiral galaxy.",
        "The rover is on Mars.",
        "The Moon has craters.",
    ]
    found = hs.cluster(minilm, texts, smallest=4).data["cluster_of"].values
    assert (found >= 0).sum() >= 9
    kitchen, space = (set(half[half >= 0].tolist()) for half in (found[:6], found[6:]))
    assert len(kitchen) == len(space) == 1 and kitchen != space


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


def test_centring_spreads_what_a_causal_model_holds_together(smollm2: hs.Model) -> None:
    plain, centred = (
        mean_cosine(torch.from_numpy(hs.embed(smollm2, TEXTS, adjust=adjust)))
        for adjust in (None, "centre")
    )
    assert plain > 0.5
    assert centred < 0


def test_a_sentence_encoder_finds_what_is_meant(minilm: hs.Model) -> None:
    texts = [
        "Simmer the sauce for twenty minutes.",
        "The probe entered orbit around Saturn.",
        "The bank raised rates.",
    ]
    found = hs.search(minilm, ["cooking", "space travel", "money"], 1, texts=texts)
    assert found.data["number"].values.ravel().tolist() == [0, 1, 2]


def test_the_command_prints_what_is_nearest(minilm: hs.Model, tmp_path: Path) -> None:
    texts, vectors = tmp_path / "texts.txt", tmp_path / "vectors.npy"
    texts.write_text(
        "Simmer the \x1b[31msauce.\nThe probe entered orbit.\nThe bank raised rates.\n"
    )

    def ask(*words: str) -> str:
        said = CliRunner().invoke(cli.app, [*words, "--model", "minilm"])
        assert said.exit_code == 0, said.output
        return said.output

    said = ask("search", str(texts), "outer space", "-k", "3")
    assert said.index("The probe entered orbit.") < said.index("sauce")
    assert "\x1b" not in said
    ask("embed", f"@{texts}", "--out", str(vectors))
    options = ["--texts", str(texts), "--json", "-k", "1"]
    assert "The probe entered orbit." in ask(
        "search", str(vectors), "outer space", *options
    )
