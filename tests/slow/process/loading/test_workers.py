"""Processes that load a model with adapters."""

from pathlib import Path

import numpy as np

import hiddenscope as hs
from tests.folders import tiny_llama
from tests.unit.loading.adapters import write_adapter


def test_a_model_with_adapters_is_extracted_by_workers(
    saved_llama: Path, tmp_path: Path
) -> None:
    lora = write_adapter(tmp_path / "lora", "lora", tiny_llama())
    model = hs.load(hs.Adapted(saved_llama, lora, strength=0.5), device="cpu")
    texts = ["the capital of France"] * 3
    store = hs.extract(model, texts, tmp_path / "s", engine=hs.Engine(workers=2))
    expected = model.capture(["the capital of France"])
    rows = store[store.sites[-1]][: len(expected.tokens)]
    np.testing.assert_array_equal(np.asarray(rows), expected[store.sites[-1]].numpy())
    assert store.source.adapters[0].strength == 0.5
