"""Folders and files that would take all time or memory, each in a process of its own."""

import gzip
import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hiddenscope as hs
from hiddenscope.errors import Error
from hiddenscope.loading import limits
from hiddenscope.loading.limits import WeightTotals
from hiddenscope.testing import tiny_model
from labs.fuzz import folders
from labs.fuzz.sandbox import Case, sandboxed
from tests.folders import change, tiny_llama, tiny_tokenizer
from tests.places import TESTS

CONFIGS = TESTS / "conformance" / "tiny_configs.json.gz"


def save(family: str, folder: Path) -> None:
    module: Any = tiny_llama() if family == "llama" else tiny_model(family)
    module.save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "entries", "said"),
    [
        ("llama", {"num_labels": 10**9}, "num_labels=1,000,000,000"),
        ("llama", {"num_hidden_layers": 10**5}, "num_hidden_layers=100,000"),
        ("llama", {"num_hidden_layers": 10**9}, "num_hidden_layers=1,000,000,000"),
        ("llama", {"intermediate_size": 10**9}, "intermediate_size=1,000,000,000"),
        ("llama", {"x" * 200: 10**9, "num_hidden_layers": 10**5}, "2,336 modules"),
        ("gpt2", {"n_layer": 10**5}, "n_layer=100,000"),
        ("gpt2", {"n_layer": 10**7}, "n_layer=10,000,000"),
        ("t5", {"num_decoder_layers": 10**5}, ""),
        ("t5", {"num_decoder_layers": 10**7}, "num_decoder_layers=10,000,000"),
        ("longformer", {"attention_window": [10**7] * 2}, ""),
        ("longformer", {"attention_window": [8192] * 2}, ""),
    ],
)
def test_an_absurd_number_of_a_config_is_refused_at_once(
    family: str, entries: dict[str, object], said: str, tmp_path: Path
) -> None:
    folder = tmp_path / family
    save(family, folder)
    change(folder / "config.json", **entries)
    # It may take 10 seconds and 2 GB.
    (outcome,) = sandboxed([Case("folder", family, lambda: str(hs.load(folder)))])
    assert outcome.verdict == "refused", outcome
    assert said in outcome.detail


def test_every_known_class_is_built_within_limits() -> None:
    """A seeded sample of the classes; `make fuzz` tries all."""
    with gzip.open(CONFIGS) as file:
        rows = json.load(file)
    tried = 0
    for row in random.Random(0).sample(rows, 25):
        name = row["model_class"]
        if not hasattr(transformers, name):
            continue
        config = getattr(transformers, row["config_class"])(**row["config"])
        limits.check_counts(limits.walk(config.to_dict()), WeightTotals(), name)
        build = getattr(transformers, name)
        held = WeightTotals(len(build(config).state_dict()) // 3, 0, 0)
        with limits.building(held, row["config"], name), torch.device("meta"):
            build(config)
        tried += 1
    assert tried > 12


def test_an_odd_entry_works_or_is_an_error_of_ours(tmp_path: Path) -> None:
    odd: list[tuple[str, dict[str, object]]] = [
        ("config.json", {"architectures": 5}),
        ("config.json", {"model_type": []}),
        ("config.json", {"pad_token_id": 10**30}),
        ("config.json", {"max_position_embeddings": 1}),
        ("tokenizer_config.json", {"model_max_length": "long"}),
        ("tokenizer_config.json", {"extra_ids": 10**9}),
    ]
    for number, (name, entries) in enumerate(odd):
        folder = tmp_path / str(number)
        save("llama", folder)
        tiny_tokenizer().save_pretrained(folder)
        change(folder / name, **entries)
        with suppress(Error):
            hs.load(folder).capture(["the capital of France"])


def test_a_slice_of_the_fuzzed_folders_and_files(tmp_path: Path) -> None:
    cases = [*folders.folders(8, 2026, tmp_path), *folders.ggufs(8, 2026, tmp_path)]
    for outcome in sandboxed(cases):
        assert outcome.verdict in ("loaded", "refused"), outcome
