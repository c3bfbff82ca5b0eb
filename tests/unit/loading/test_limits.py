"""Absurd numbers and special files are refused before they cost time or memory;
believable giants are not.

tests/slow/faults has numbers that would take all memory if they were followed.
"""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import Damaged, Error, TooLarge
from hiddenscope.loading import limits, open_source, size_limit
from hiddenscope.loading.limits import WeightTotals, check_tokenizer_file
from hiddenscope.loading.size_limit import SizeLimit
from hiddenscope.testing import tiny_tokenizer
from tests.folders import change


def test_an_absurd_number_of_a_config_is_named(llama: Path) -> None:
    sound = (llama / "config.json").read_text()
    for entries, said in (
        ({"num_hidden_layers": 200_000}, "num_hidden_layers=200,000"),
        ({"num_hidden_layers": 500}, "2,336 modules.*num_hidden_layers=500"),
        ({"intermediate_size": 10**7}, "parameters.*intermediate_size=10,000,000"),
        ({"num_labels": 10**6}, "num_labels=1,000,000"),
    ):
        (llama / "config.json").write_text(sound)
        change(llama / "config.json", **entries)
        with pytest.raises(Damaged, match=said):
            hs.load(llama)


@pytest.mark.parametrize("kind", ["/dev/zero", "pipe", "folder", "nowhere"])
def test_only_files_are_opened(llama: Path, kind: str) -> None:
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        path = llama / name
        aside = path.rename(llama.parent / name)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(kind)
        with pytest.raises(Damaged, match=name):
            open_source(llama)
        if kind == "folder":
            path.rmdir()
        aside.replace(path)


def test_a_file_that_is_too_large_for_its_kind_is_not_read(llama: Path) -> None:
    os.truncate(llama / "config.json", 2**40)
    with pytest.raises(Damaged, match=r"config\.json has 1,099,511,627,776 bytes"):
        open_source(llama)


def test_chat_templates_in_a_folder_of_their_own_are_checked_too(llama: Path) -> None:
    """transformers reads each of them when it loads a tokenizer."""
    folder = llama / "additional_chat_templates"
    folder.mkdir()
    (folder / "tool_use.jinja").write_text("{{ messages }}")
    open_source(llama)
    os.mkfifo(folder / "rag.jinja")
    with pytest.raises(Damaged, match="rag.jinja is a named pipe"):
        open_source(llama)
    (folder / "rag.jinja").unlink()
    for number in range(17):
        (folder / f"{number}.jinja").touch()
        os.truncate(folder / f"{number}.jinja", 2**20)
    with pytest.raises(Damaged, match="its additional_chat_templates has more than"):
        open_source(llama)
    os.truncate(folder / "tool_use.jinja", 2**40)
    with pytest.raises(Damaged, match=r"tool_use.jinja has 1,099"):
        open_source(llama)


REPLACE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
TWICE = {
    "type": "TemplateProcessing",
    "single": [SEQUENCE] * 2,
    "pair": [SEQUENCE] * 2,
    "special_tokens": {},
}
LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": True,
    "trim_offsets": True,
    "use_regex": False,
}
# By the part of a tokenizer: the key of its steps, and a step that makes a text longer.
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "normalizer": ("normalizers", REPLACE),
    "pre_tokenizer": ("pretokenizers", LEVEL),
    "post_processor": ("processors", TWICE),
    "decoder": ("decoders", REPLACE),
}


@pytest.mark.parametrize("part", [*STEPS, "padding"])
def test_a_tokenizer_that_multiplies_a_text_is_refused(llama: Path, part: str) -> None:
    path = llama / "tokenizer.json"
    sound = json.loads(path.read_text())
    sound.pop(part)
    if part == "padding":
        few = {}
        fixed = {"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_id": 0}
        many = {part: fixed}
    else:
        key, step = STEPS[part]
        few = {part: {"type": "Sequence", key: [step]}}
        many = {part: {"type": "Sequence", key: [step] * 30}}
    escaped = f"\\u00{ord(part[0]):02x}{part[1:]}"
    for content in ({**many, **sound}, {**sound, **many}):
        text = json.dumps(content)
        for written in (text, text.replace(part, escaped)):
            path.write_text(written)
            with pytest.raises(Damaged, match=rf"{part}|pads every text to 1,000,000,"):
                _ = open_source(llama).tokenizer
    path.write_text(json.dumps({**sound, **few}))
    check_tokenizer_file(path)


def test_tokenizers_as_they_are_written_pass(tmp_path: Path) -> None:
    tiny_tokenizer(cls=True).save_pretrained(tmp_path)
    check_tokenizer_file(tmp_path / "tokenizer.json")
    # Whatever is replaced by as much makes no text longer, however often.
    replace = [{"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}] * 5
    replace += [{"type": "Replace", "pattern": {"String": "a"}, "content": "b"}] * 100
    split = [{"type": "Split"}, {"type": "ByteLevel"}, {"type": "Digits"}]
    vocabulary = {"normalizer": 1, "decoder": 2, "model": 3}
    content = {
        "normalizer": {"type": "Sequence", "normalizers": replace},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": split},
        "model": {"vocab": vocabulary, "merges": [["de", "coder"]]},
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    check_tokenizer_file(tmp_path / "tokenizer.json")


def test_of_two_entries_of_one_name_the_last_counts_as_for_the_library(
    tmp_path: Path,
) -> None:
    path = tmp_path / "tokenizer.json"
    sound = json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    del sound["normalizer"]
    rest = json.dumps(sound)[1:]
    many = json.dumps({"type": "Sequence", "normalizers": [REPLACE] * 30})
    plain = json.dumps({"type": "Lowercase"})
    path.write_text(f'{{"normalizer": {many}, "normalizer": {plain}, {rest}')
    check_tokenizer_file(path)
    assert "Lowercase" in repr(tokenizers.Tokenizer.from_file(str(path)).normalizer)
    path.write_text(f'{{"normalizer": {plain}, "normalizer": {many}, {rest}')
    with pytest.raises(Damaged, match="normalizer can make one character into"):
        check_tokenizer_file(path)


@pytest.mark.parametrize(
    ("part", "normalized", "error"),
    [
        ("pre_tokenizer", True, hs.errors.TextError),
        ("decoder", False, hs.errors.TextError),
        ("normalizer", True, Damaged),
    ],
)
def test_a_regular_expression_that_never_ends_is_an_error_of_ours(
    llama: Path, part: str, normalized: bool, error: type[Error]
) -> None:
    """The library stops it after some millions of steps, with a panic that is no
    Exception.
    """
    path, long = llama / "tokenizer.json", "a" * 60 + "b"
    step: dict[str, object] = {"pattern": {"Regex": "(a+)+$"}}
    changes: dict[str, object] = {}
    if part == "pre_tokenizer":
        step |= {"type": "Split", "behavior": "Isolated", "invert": False}
    else:
        step |= {"type": "Replace", "content": "x"}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False)
        token = {"id": 127, "content": long, "normalized": normalized, **flags}
        changes["added_tokens"] = [*json.loads(path.read_text())["added_tokens"], token]
    change(path, **changes, **{part: step})
    with pytest.raises(error, match="retry-limit"):
        hs.load(llama).capture(long)


def test_believable_giants_are_built() -> None:
    config = transformers.DeepseekV3Config(num_hidden_layers=20)
    held, name = WeightTotals(91_991, 688 * 10**9, 129_280), "DeepseekV3ForCausalLM"
    limits.check_counts(limits.walk(config.to_dict()), held, name)
    with torch.device("meta"), limits.building(held, config.to_dict(), name):
        module = transformers.DeepseekV3ForCausalLM(config)
    assert sum(weight.numel() for weight in module.parameters()) > 10**11


def test_limits_act_in_their_own_thread_alone_and_leave_nothing() -> None:
    def many() -> int:
        return len(nn.ModuleList(nn.Identity() for _ in range(2_500)))

    with ThreadPoolExecutor(1) as other, limits.building(WeightTotals(), {}, "x"):
        assert other.submit(many).result() == 2_500
    with (
        pytest.raises(Damaged, match="2,000 modules"),
        limits.building(WeightTotals(), {"layers": 2_500}, "x"),
    ):
        many()
    assert many() == 2_500


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


class Loop(nn.Module):
    passed = 0

    def forward(self, numbers: torch.Tensor) -> None:
        while True:
            numbers = numbers + 1
            self.passed += 1


def test_a_pass_that_never_ends_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(size_limit, "OPERATIONS", 500)
    module, numbers = Loop(), torch.ones(1)
    with pytest.raises(TooLarge, match="too many operations"), SizeLimit(module, "x"):
        module(numbers)
    assert module.passed == 500 + size_limit.OPERATIONS_PER_MODULE
