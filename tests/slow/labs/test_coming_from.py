"""The ten tasks run, agree with each other, and are what the pages show."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hiddenscope as hs
from docs import coming_from
from hiddenscope.loading import zoo
from labs.bench import coming_from as lab

PAGES = sorted(coming_from.PAGES.glob("*.md"))


def small_model(folder: Path) -> Path:
    """Save random weights of smollm2's depth, with its tokenizer.

    The real model would take a minute here; `python -m labs.bench.coming_from` runs it.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=30,
        num_attention_heads=4,
        num_key_value_heads=2,
        # Large enough for attention to matter.
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(zoo.zoo_folder("smollm2") / name, folder)
    return folder


@pytest.fixture(scope="module")
def computed(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, lab.Arrays]]:
    """Run the two scripts that need no other environment."""
    folder = tmp_path_factory.mktemp("tasks")
    try:
        lab.prepare(folder, small_model(tmp_path_factory.mktemp("small")))
    except hs.errors.Unreachable as error:
        pytest.skip(f"the tasks use the tokenizer of smollm2: {error}")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        try:
            libraries = ("hiddenscope", "hugging_face")
            yield {library: lab.run(library) for library in libraries}
        finally:
            # The script of plain Hugging Face turns gradients off for good.
            torch.set_grad_enabled(True)


@pytest.mark.real
def test_hiddenscope_and_hugging_face_agree_in_every_task(
    computed: dict[str, lab.Arrays],
) -> None:
    rows = lab.compare(computed["hugging_face"], computed["hiddenscope"])
    assert [row for row in rows if row.equal is False] == []
    # Loading has no number of its own.
    assert {row.task for row in rows} == set(coming_from.TASKS) - {"load"}


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "task"), [("stream", "states"), ("words", "lens"), ("effect", "patch")]
)
def test_a_difference_is_noticed_in_its_task(
    computed: dict[str, lab.Arrays], name: str, task: str
) -> None:
    ours = computed["hiddenscope"]
    wrong = ours[name].copy()
    if wrong.dtype.kind == "U":
        wrong = np.char.add(wrong, "!")
    else:
        wrong.flat[-1] += 0.01 + np.abs(wrong).max()
    rows = lab.compare({**ours, name: wrong}, ours)
    assert {row.task for row in rows if row.equal is False} == {task}


def test_the_pages_show_the_scripts_and_the_last_run() -> None:
    for path in PAGES:
        assert path.read_text("utf-8") == coming_from.page(path), "run `make docs`"


def test_the_last_run_found_no_difference_in_any_library() -> None:
    record = json.loads(coming_from.RECORD.read_text("utf-8"))
    assert {"hiddenscope", *coming_from.LIBRARIES} == {"hiddenscope", *record["rows"]}
    for rows in record["rows"].values():
        assert [row for row in rows if row["equal"] is False] == []
