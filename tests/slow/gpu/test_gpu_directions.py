"""Directions on a GPU: features change, read and split states as on the CPU."""

import pytest
import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model

TEXTS = [[5, 6, 7, 8], [9, 10, 11]]
DTYPES = [torch.float32, torch.bfloat16]
close = torch.testing.assert_close


def load(device, dtype=torch.float32):
    return hs.load((tiny_model("llama").to(device, dtype), None))


def feature():
    generator = torch.Generator().manual_seed(7)
    vectors = torch.randn(3, 64, generator=generator, dtype=torch.float64)
    return hs.Dictionary.of(vectors, "layer.2")[1]


def tolerance(dtype):
    return 1e-4 if dtype == torch.float32 else 0.15


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_changes_along_a_feature_are_those_of_the_cpu(dtype):
    near = {"rtol": tolerance(dtype), "atol": tolerance(dtype)}
    along = feature()
    for change in (
        hs.Add(along, scale=2.0),
        hs.Project(along),
        hs.Scale(3, None, along),
    ):
        states = []
        for model in (load("cuda", dtype), load("cpu")):
            edited = hs.edit(model, TEXTS, {"layer.2": change}, "layer.2-3")
            states.append(edited.states.values.float().cpu())
        close(*states, **near)


def test_a_neuron_on_the_gpu_writes_as_on_the_cpu():
    neurons = []
    for device in ("cuda", "cpu"):
        dictionary = hs.Dictionary.neurons(load(device), "layer.2.mlp.neurons")
        neurons.append(dictionary[7].vectors["layer.2.mlp"])
    close(*neurons, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_words_and_parts_along_a_feature_are_those_of_the_cpu(dtype):
    words, products = [], []
    for model in (load("cuda", dtype), load("cpu")):
        words.append(hs.lens(model, feature(), k=3).data["probability"].values)
        parts = hs.contributions(model, TEXTS[0], feature()).data
        products.append(parts["logit"].values)
        assert abs(float(parts["error"][0])) <= tolerance(dtype)
    for pair in (words, products):
        close(*map(torch.tensor, pair), rtol=tolerance(dtype), atol=tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_examples_are_those_of_the_cpu(dtype):
    generator = torch.Generator().manual_seed(3)
    texts = torch.randint(20, 90, (30, 12), generator=generator).tolist()
    directions = torch.randn(40, 64, generator=generator)
    features = hs.Dictionary.of(directions, "layer.2")
    asked = [features, "layer.2.mlp.neuron.7"]
    results = []
    for model in (load("cuda", dtype), load("cpu")):
        results.append(hs.examples(model, asked, texts, k=4).data)
        sites = ["layer.2", "layer.2.mlp.neurons"]
        states = model.capture(texts, sites, keep="device")
        results.append(hs.examples(states, asked, k=4).data)
    near = tolerance(dtype)
    for data in results:
        close(data["share"].values, results[-1]["share"].values, rtol=0.2, atol=0.02)
        strongest = data["activation"].values[:, :4]
        expected = results[-1]["activation"].values[:, :4]
        assert abs(strongest - expected).max() < near * abs(expected).max()


def test_features_on_the_gpu_are_looked_up_there():
    model, features = load("cuda"), hs.Dictionary.of(torch.eye(64), "layer.2")
    result = hs.examples(model, features.to("cuda"), TEXTS, features=[3], k=1)
    rows = load("cpu").capture(TEXTS, "layer.2")["layer.2"]
    later = rows[[1, 2, 3, 5, 6]]
    assert result.data["activation"].values[0, 0] == pytest.approx(
        float(later[:, 3].max()), rel=1e-3
    )
