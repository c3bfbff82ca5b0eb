"""Adapter folders with absurd numbers, slow patterns, odd tensors, and bases elsewhere.

Each case is a copy of a sound adapter on a sound tiny model, with one or two changes.
"""

import json
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import hiddenscope as hs
from hiddenscope.testing import tiny_model
from labs.fuzz.folders import NUMBERS, ODD, _saved
from labs.fuzz.sandbox import Case

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Each takes years to be looked for in the name of a layer.
SLOW = (
    ".*" * 14 + "z",
    ".?" * 45 + "!",
    "(([a-z_.0-9]+)+)+#",
    r"(.*)(.*)(.*)\1\2\3#",
    "(a|a|.)" * 40 + "#",
)
NAMES = (
    *("target_modules", "exclude_modules", "layers_pattern", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "target_parameters", "feedforward_modules"),
)
COUNTS = (
    *("r", "lora_alpha", "num_vectors", "vector_length", "topk", "init_r", "target_r"),
    *("n_frequency", "block_size", "oft_block_size", "trainable_token_indices"),
    *("loftq_config", "init_lora_weights", "layers_to_transform", "bias", "peft_type"),
)


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Cases of adapters, from one seed."""
    base = _saved(work / "sound" / "llama", lambda: tiny_model("llama"))
    for number in range(count):
        chance = random.Random(f"adapter {seed} {number}")
        kind = chance.choice(sorted(_kinds()))
        yield Case(
            "adapters",
            f"adapter {seed}/{number} {kind}",
            lambda kind=kind, chance=chance: _attempt(base, kind, chance, work),
        )


def _attempt(base: Path, kind: str, chance: random.Random, work: Path) -> str:
    folder = work / f"case-{os.getpid()}-{chance.getrandbits(32):08x}" / "adapter"
    shutil.copytree(_sound(kind, work), folder)
    try:
        for _ in range(chance.choice((1, 1, 2))):
            chance.choices((_config, _tensors, _base), (8, 2, 1))[0](folder, chance)
        strength = chance.choice((1.0, 1.0, 0.5))
        by_path = json.loads((folder / CONFIG).read_text()).get("elsewhere")
        source: Any = hs.Adapted(base, folder, strength=strength)
        model = hs.load(folder if by_path else source, device="cpu")
        model.capture([[5, 6, 7]])
        return "loaded"
    finally:
        shutil.rmtree(folder.parent, ignore_errors=True)


@cache
def _kinds() -> dict[str, Callable[[], Any]]:
    import peft

    layers = ["q_proj", "down_proj"]
    return {
        "lora": lambda: peft.LoraConfig(r=3, target_modules=layers),
        "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
        "saved": lambda: peft.LoraConfig(
            r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
        ),
        "vblora": lambda: peft.VBLoRAConfig(
            r=2, num_vectors=8, vector_length=8, topk=2, target_modules=["q_proj"]
        ),
        "ia3": lambda: peft.IA3Config(
            target_modules=layers, feedforward_modules=["down_proj"]
        ),
        "vera": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
        "tokens": lambda: peft.TrainableTokensConfig(token_indices=[5, 6]),
    }


@cache
def _sound(kind: str, work: Path) -> Path:
    import peft

    folder = work / "sound" / f"adapter {kind} {os.getpid()}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model: Any = tiny_model("llama")
        peft.get_peft_model(model, _kinds()[kind]()).save_pretrained(folder)
    return folder


def _config(folder: Path, chance: random.Random) -> None:
    content = json.loads((folder / CONFIG).read_text())
    if chance.random() < 0.5:
        name, slow = chance.choice(NAMES), chance.choice(SLOW)
        shapes = (slow, [slow], {slow: 4}, [f"a.{i}" for i in range(30_000)])
        content[name] = chance.choice(shapes)
    else:
        value = chance.choice(NUMBERS if chance.random() < 0.7 else ODD)
        content[chance.choice((*COUNTS, *content))] = value
    (folder / CONFIG).write_text(json.dumps(content))


def _tensors(folder: Path, chance: random.Random) -> None:
    tensors = load_file(folder / WEIGHTS)
    name = chance.choice(sorted(tensors))
    change = chance.randrange(4)
    if change == 0:
        tensors["x"] = torch.zeros(0, 2**40)
    elif change == 1:
        del tensors[name]
    elif change == 2:
        tensors[name] = torch.zeros(chance.choice((0, 1, 1000)))
    else:
        for number in range(50_000):
            tensors[f"base_model.model.x{number}.lora_A.weight"] = torch.zeros(1)
    save_file(tensors, folder / WEIGHTS)


def _base(folder: Path, chance: random.Random) -> None:
    """Name itself, a folder that is not there, or a file as its base."""
    content = json.loads((folder / CONFIG).read_text())
    bases = (
        str(folder),
        str(folder.parent / "none"),
        "/dev/zero",
        "",
        "\0",
        "a" * 5000,
    )
    content |= {"base_model_name_or_path": chance.choice(bases), "elsewhere": True}
    (folder / CONFIG).write_text(json.dumps(content))
