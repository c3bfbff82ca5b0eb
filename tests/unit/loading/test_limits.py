"""Absurd numbers and special files are refused before they cost time or memory;
believable giants are not.
"""

import gzip
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import hiddenscope as hs
from fuzz import folders
from fuzz.sandbox import Case, sandboxed
from hiddenscope.errors import Damaged, Error, TooLarge
from hiddenscope.loading import limits, open_source
from hiddenscope.loading.limits import WeightTotals
from hiddenscope.loading.size_limit import SizeLimit
from hiddenscope.loading.tokenizer_file import check_tokenizer_file
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.places import TESTS

CONFIGS = TESTS / "conformance" / "tiny_configs.json.gz"


def change(path: Path, **entries: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def refusal(folder: Path) -> str:
    """What a folder is refused with, by a process that may take 10 seconds and 2 GB."""
    (outcome,) = sandboxed([Case("folder", folder.name, lambda: str(hs.load(folder)))])
    assert outcome.verdict == "refused", (
        outcome.verdict,
        outcome.detail,
        outcome.seconds,
        outcome.memory,
    )
    return outcome.detail


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"num_labels": 10**9}, "num_labels=1,000,000,000"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers=100,000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1,000,000,000"),
        ({"num_hidden_layers": 5_000}, "num_hidden_layers=5,000"),
        ({"intermediate_size": 10**9}, "intermediate_size=1,000,000,000"),
        ({"x" * 200: 10**9, "num_hidden_layers": 10**5}, "2,336 modules"),
    ],
)
def test_an_absurd_number_of_a_config_is_named(
    llama: Path, entries: dict[str, object], said: str
) -> None:
    change(llama / "config.json", **entries)
    assert said in refusal(llama)


@pytest.mark.parametrize("family", ["gpt2", "t5", "longformer"])
def test_an_absurd_number_of_other_families_is_named(
    family: str, tmp_path: Path
) -> None:
    if family == "longformer":
        config = transformers.LongformerConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=128,
        )
        module: Any = transformers.LongformerModel(config)
        bombs: list[dict[str, Any]] = [
            {"attention_window": [10**7] * 2},
            {"attention_window": [8192] * 2},
        ]
    else:
        module = tiny_model(family)
        name = {"gpt2": "n_layer", "t5": "num_decoder_layers"}[family]
        bombs = [{name: 10**5}, {name: 10**7}]
    module.save_pretrained(tmp_path / family)
    sound = (tmp_path / family / "config.json").read_text()
    for bomb in bombs:
        (tmp_path / family / "config.json").write_text(sound)
        change(tmp_path / family / "config.json", **bomb)
        (value,) = bomb.values()
        assert (
            f"={value if isinstance(value, int) else value[0]:,}"
            in refusal(tmp_path / family)
            or family != "gpt2"
        )


@pytest.mark.parametrize(
    "name",
    ["config.json", "tokenizer.json", "model.safetensors", "generation_config.json"],
)
@pytest.mark.parametrize("kind", ["/dev/zero", "pipe", "folder", "nowhere"])
def test_only_files_are_opened(llama: Path, name: str, kind: str) -> None:
    (llama / name).unlink()
    if kind == "pipe":
        os.mkfifo(llama / name)
    elif kind == "folder":
        (llama / name).mkdir()
    else:
        (llama / name).symlink_to(kind)
    with pytest.raises(Damaged, match=name):
        open_source(llama)


def test_a_file_that_is_too_large_for_its_kind_is_not_read(llama: Path) -> None:
    os.truncate(llama / "config.json", 2**40)
    with pytest.raises(Damaged, match=r"config\.json has 1,099,511,627,776 bytes"):
        open_source(llama)


@pytest.mark.parametrize("kind", ["large", "many", "pipe", "nowhere", "/dev/zero"])
def test_chat_templates_in_a_folder_of_their_own_are_checked_too(
    llama: Path, kind: str
) -> None:
    """transformers reads each of them when it loads a tokenizer."""
    folder = llama / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ messages }}")
    open_source(llama)
    if kind == "large":
        os.truncate(folder / "tool_use.jinja", 2**40)
    elif kind == "many":
        for number in range(17):
            (folder / f"{number}.jinja").touch()
            os.truncate(folder / f"{number}.jinja", 2**20)
    elif kind == "pipe":
        os.mkfifo(folder / "rag.jinja")
    else:
        (folder / "rag.jinja").symlink_to(kind)
    with pytest.raises(
        Damaged, match=r"its .*(tool_use|rag|additional_chat_templates)"
    ):
        open_source(llama)


def steps(kind: str, count: int) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    twice = {
        "type": "TemplateProcessing",
        "single": [sequence] * 2,
        "pair": [sequence] * 2,
        "special_tokens": {},
    }
    level = {
        "type": "ByteLevel",
        "add_prefix_space": True,
        "trim_offsets": True,
        "use_regex": False,
    }
    return {
        "normalizer": {
            "normalizer": {"type": "Sequence", "normalizers": [replace] * count}
        },
        "pre_tokenizer": {
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [level] * count}
        },
        "post_processor": {
            "post_processor": {"type": "Sequence", "processors": [twice] * count}
        },
        "decoder": {"decoder": {"type": "Sequence", "decoders": [replace] * count}},
        "padding": {
            "padding": {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0}
        },
    }[kind]


@pytest.mark.parametrize(
    "kind", ["normalizer", "pre_tokenizer", "post_processor", "decoder", "padding"]
)
def test_a_tokenizer_that_multiplies_a_text_is_refused(llama: Path, kind: str) -> None:
    path = llama / "tokenizer.json"
    sound = json.loads(path.read_text())
    sound.pop(kind)
    for content in ({**steps(kind, 30), **sound}, {**sound, **steps(kind, 30)}):
        for text in (
            json.dumps(content),
            json.dumps(content).replace(kind, f"\\u00{ord(kind[0]):02x}{kind[1:]}"),
        ):
            path.write_text(text)
            with pytest.raises(
                Damaged, match=rf"{kind}|pads every text to 1,000,000,000"
            ):
                _ = open_source(llama).tokenizer
    path.write_text(
        json.dumps({**sound, **(steps(kind, 1) if kind != "padding" else {})})
    )
    check_tokenizer_file(path)


def test_a_regular_expression_that_never_ends_is_an_error_of_ours(llama: Path) -> None:
    """The library stops it after some millions of steps, with a panic that is no
    Exception.
    """
    path, long = llama / "tokenizer.json", "a" * 60 + "b"
    sound = json.loads(path.read_text())
    split = {
        "type": "Split",
        "pattern": {"Regex": "(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    replace = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"}
    added = {
        "id": 127,
        "content": long,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "special": False,
    }
    path.write_text(json.dumps({**sound, "pre_tokenizer": split}))
    with pytest.raises(hs.errors.TextError, match="retry-limit"):
        hs.load(llama).capture(long)
    tokens = [*sound["added_tokens"], {**added, "normalized": False}]
    path.write_text(json.dumps({**sound, "decoder": replace, "added_tokens": tokens}))
    with pytest.raises(hs.errors.TextError, match="retry-limit"):
        hs.load(llama).capture(long)
    tokens = [*sound["added_tokens"], {**added, "normalized": True}]
    path.write_text(
        json.dumps({**sound, "normalizer": replace, "added_tokens": tokens})
    )
    with pytest.raises(Damaged, match="retry-limit"):
        hs.load(llama)


def test_tokenizers_as_they_are_written_pass(tmp_path: Path) -> None:
    tiny_tokenizer(cls=True).save_pretrained(tmp_path)
    check_tokenizer_file(tmp_path / "tokenizer.json")
    replace = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}] * 5
    split = {
        "type": "Sequence",
        "pretokenizers": [{"type": "Split"}, {"type": "ByteLevel"}, {"type": "Digits"}],
    }
    content = {
        "normalizer": {"type": "Sequence", "normalizers": replace},
        "pre_tokenizer": split,
    }
    content |= {
        "model": {
            "vocab": {"normalizer": 1, "decoder": 2, "model": 3},
            "merges": [["de", "coder"]],
        }
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    check_tokenizer_file(tmp_path / "tokenizer.json")


def giants() -> dict[str, tuple[Any, WeightTotals]]:
    """Configs of very large models, with what their weight files hold."""
    llama = {
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
    }
    llama |= {
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
        "max_position_embeddings": 1_048_576,
    }
    gemma = {
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 62,
    }
    gemma |= {"max_position_embeddings": 1_048_576}
    return {
        "LlamaForCausalLM": (
            transformers.LlamaConfig(**llama),
            WeightTotals(1138, 811 * 10**9, 128_256),
        ),
        "DeepseekV3ForCausalLM": (
            transformers.DeepseekV3Config(),
            WeightTotals(91_991, 688 * 10**9, 129_280),
        ),
        "Gemma3ForCausalLM": (
            transformers.Gemma3TextConfig(**gemma),
            WeightTotals(808, 54 * 10**9, 262_144),
        ),
    }


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "Gemma3ForCausalLM"]
)
def test_believable_giants_are_built(name: str) -> None:
    config, held = giants()[name]
    limits.check_counts(limits.walk(config.to_dict()), held, name)
    with torch.device("meta"), limits.building(held, config.to_dict(), name):
        module = getattr(transformers, name)(config)
    assert sum(weight.numel() for weight in module.parameters()) > 10**10


def test_every_known_class_is_built_within_limits() -> None:
    """A seeded sample of the classes; `make fuzz` tries all."""
    with gzip.open(CONFIGS) as file:
        rows = json.load(file)
    tried = 0
    for row in random.Random(0).sample(rows, 25):
        if not hasattr(transformers, row["model_class"]):
            continue
        config = getattr(transformers, row["config_class"])(**row["config"])
        limits.check_counts(
            limits.walk(config.to_dict()), WeightTotals(), row["model_class"]
        )
        build = getattr(transformers, row["model_class"])
        tensors = len(build(config).state_dict())
        with (
            limits.building(
                WeightTotals(tensors // 3, 0, 0), row["config"], row["model_class"]
            ),
            torch.device("meta"),
        ):
            build(config)
        tried += 1
    assert tried > 12


def test_limits_act_in_their_own_thread_alone_and_leave_nothing() -> None:
    from concurrent.futures import ThreadPoolExecutor

    def many() -> int:
        return len(nn.ModuleList(nn.Identity() for _ in range(5_000)))

    with ThreadPoolExecutor(1) as other, limits.building(WeightTotals(), {}, "x"):
        assert other.submit(many).result() == 5_000
    assert many() == 5_000
    with (
        pytest.raises(Damaged, match="2,000 modules"),
        limits.building(WeightTotals(), {"layers": 5_000}, "x"),
    ):
        many()
    assert many() == 5_000


def test_a_tensor_is_refused_before_there_is_memory_for_it() -> None:
    """A mask of every token by every other has no memory yet when it is refused."""
    rows = torch.ones(10**6, dtype=torch.bool)
    for make in (
        lambda: rows[:, None] & rows,
        lambda: torch.zeros(10**6, 10**6),
        lambda: rows[:9].repeat(10**11),
    ):
        with (
            pytest.raises(TooLarge, match="it makes a tensor of [0-9,]+ bytes"),
            SizeLimit(nn.Linear(2, 2), "x"),
        ):
            make()
    with SizeLimit(nn.Linear(2, 2), "x"):
        assert int((rows[:100, None] & rows[:100]).nonzero().sum()) == 990_000


def test_a_pass_that_never_ends_is_stopped() -> None:
    class Loop(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            while True:
                input_ids = input_ids + 1

    with (
        pytest.raises(TooLarge, match="too many operations"),
        SizeLimit(Loop(), "Loop"),
    ):
        Loop()(torch.ones(1))


def test_a_slice_of_the_fuzzed_folders_and_files(tmp_path: Path) -> None:
    cases = [*folders.folders(8, 2026, tmp_path), *folders.ggufs(8, 2026, tmp_path)]
    outcomes = list(sandboxed(cases))
    assert [
        (out.case.name, out.verdict, out.detail)
        for out in outcomes
        if out.verdict not in ("loaded", "refused")
    ] == []


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("config.json", {"architectures": 5}),
        ("config.json", {"model_type": []}),
        ("config.json", {"pad_token_id": 10**30}),
        ("config.json", {"pad_token_id": 10**9}),
        ("config.json", {"eos_token_id": {}}),
        ("config.json", {"max_position_embeddings": 1}),
        ("tokenizer_config.json", {"model_max_length": "long"}),
        ("tokenizer_config.json", {"model_max_length": [1]}),
        ("tokenizer_config.json", {"extra_ids": 10**9}),
    ],
)
def test_an_odd_entry_works_or_is_an_error_of_ours(
    llama: Path, name: str, entries: dict[str, object]
) -> None:
    change(llama / name, **entries)
    try:
        hs.load(llama).capture(["the capital of France"])
    except Error:
        pass
