"""Load a model whose proof is remembered, against `from_pretrained`."""

from collections.abc import Callable
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer

import hiddenscope as hs
from hiddenscope.loading import zoo
from labs.bench import measure
from labs.bench.measure import Row

BAR = 1.15


def rows(repeats: int) -> list[Row]:
    """Compare the second `hs.load` of a folder; the first proves everything."""
    folder = zoo.zoo_folder("smollm2")
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: hs.load(folder, dtype="float32", device="cpu"),
        "ours with tokenizer": lambda: (
            hs.load(folder, dtype="float32", device="cpu").tokenizer
        ),
        "theirs": lambda: AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
        "both": lambda: (
            AutoModelForCausalLM.from_pretrained(folder, dtype="float32"),
            AutoTokenizer.from_pretrained(folder),
        ),
    }
    costs = measure.interleaved(ways, repeats)
    model, both = (
        measure.ratios(costs, "theirs")["ours"],
        measure.ratios(costs, "both")["ours with tokenizer"],
    )
    what = "smollm2, float32, loaded before: hs.load of the folder, with its proof"
    return [
        Row(
            "load",
            f"{what} / AutoModelForCausalLM.from_pretrained",
            model.cpu,
            model.wall,
            BAR,
        ),
        Row(
            "load",
            "the same and its tokenizer / that and AutoTokenizer.from_pretrained",
            both.cpu,
            both.wall,
        ),
    ]
