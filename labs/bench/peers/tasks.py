"""Describe the tasks: what is asked of every library, on which model and texts."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from hiddenscope.loading import zoo
from hiddenscope.loading.checkpoint import load_tokenizer
from hiddenscope.loading.folder import check_folder
from labs.bench import ragged
from labs.bench.peers.beside import Task
from labs.bench.peers.environments import OURS, PLAIN
from labs.truth.eap_ig import STEPS

TEXTS, TOKENS, EARLY = 8, 64, 5
LENS_TOKENS, K = 64, 5
LAYERS, HEADS, PATCH_TOKENS, SHARED_TOKENS = 30, 9, 12, 8
RAGGED, EXTRACTED, EMBEDDED = 64, 32, 96
MAP_TOKENS, DRIFT_TOKENS = 16, 128
TRACERS = ("TransformerLens", "nnsight")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
# As many positions as minilm has, so that no library cuts a text.
LONGEST, MINILM_WIDTH = 512, 384
GPT2_WORDS = 50_257


def draw(texts: int, tokens: int, words: int = 40_000) -> list[list[int]]:
    """Draw a batch of tokens without padding, the same each time."""
    generator = torch.Generator().manual_seed(0)
    drawn: list[list[int]] = torch.randint(
        100, words, (texts, tokens), generator=generator
    ).tolist()
    return drawn


def all_tasks(place: Path) -> list[Task]:
    """Return every task; models with random weights are saved under a folder."""
    smollm2 = str(zoo.zoo_folder("smollm2"))
    sweep = patch_task(smollm2, LAYERS, PATCH_TOKENS, TRACERS)
    return [
        _load(smollm2),
        *_captures(smollm2),
        _ragged(place),
        _extract(place),
        _lens(smollm2),
        replace(sweep, what=f"smollm2, {sweep.what}"),
        heads_task(smollm2, LAYERS, HEADS, 0),
        heads_task(smollm2, LAYERS, HEADS, SHARED_TOKENS),
        edges_task(place, 1),
        edges_task(place, STEPS),
        visibility_task(gpt2(place, 12, 768), MAP_TOKENS),
        _embed(),
        _drift(place),
    ]


def _load(folder: str) -> Task:
    return Task(
        "load",
        "smollm2, float32, from the disk's cache",
        {"folder": folder},
        (PLAIN, OURS, *TRACERS, "nnterp"),
        tolerance=0.0,
    )


def _captures(folder: str) -> list[Task]:
    """Return the tasks of every layer, of one early layer, and of memory."""
    what = f"smollm2, float32, {TEXTS} texts x {TOKENS} tokens"
    job = {"folder": folder, "ids": draw(TEXTS, TOKENS), "layer": EARLY}
    libraries = (PLAIN, OURS, *TRACERS, "nnterp", "TorchLens")
    every = f"{what}, every layer"
    return [
        Task("capture", every, job, libraries),
        Task("early stop", f"{what}, layer.{EARLY} of 30", job, libraries, "early"),
        Task(
            "memory",
            f"{every}: peak memory of the whole process, model and library included",
            job,
            libraries,
            "capture",
            tolerance=None,
            memory=True,
        ),
    ]


def _ragged(place: Path) -> Task:
    folder = small_llama(place)
    texts = _reviews(folder, RAGGED)
    what = f"6 layers, 384 wide, random weights, {RAGGED} texts of 8 to 256 tokens"
    job = {"folder": folder, "texts": texts}
    return Task(
        "ragged corpus",
        f"{what}, final",
        job,
        (PLAIN, OURS, *TRACERS, "TorchLens"),
        "ragged",
    )


def _extract(place: Path) -> Task:
    folder = small_llama(place)
    texts = _reviews(folder, EXTRACTED)
    first = _tokens_of(folder, texts[0])
    what = f"the same model, {EXTRACTED} texts, every layer to the disk"
    job = {
        "folder": folder,
        "texts": texts,
        "first_tokens": first,
        "to": str(place / "extracted"),
    }
    return Task("extract", what, job, (PLAIN, OURS, *TRACERS))


def _lens(folder: str) -> Task:
    what = f"smollm2, float32, {LENS_TOKENS} tokens, every layer, {K} best words"
    job = {"folder": folder, "ids": draw(1, LENS_TOKENS), "k": K}
    # Probabilities are at most 1, and TransformerLens attends with code of its own.
    return Task("lens", what, job, (PLAIN, OURS, *TRACERS, "nnterp"), tolerance=1e-3)


def patch_task(
    folder: str, layers: int, tokens: int, peers: tuple[str, ...], words: int = 40_000
) -> Task:
    """Return a sweep of every layer and token.

    A loop runs one pass for each cell, so one cell of each layer is timed and counts
    for all tokens of its layer.
    """
    clean, corrupt = draw(2, tokens, words)
    cells = [(layer, 5 * layer % tokens) for layer in range(1, layers)]
    job = {
        "folder": folder,
        "clean": clean,
        "corrupt": corrupt,
        "answer": 101,
        "other": 102,
        "cells": cells,
        "times": tokens * layers / len(cells),
    }
    what = f"float32, {layers} layers x {tokens} tokens"
    return Task("patch", what, job, (PLAIN, OURS, *peers), tolerance=1e-3)


def heads_task(folder: str, layers: int, heads: int, shared: int) -> Task:
    """Return a sweep of every head, of prompts that share their first tokens.

    A loop runs one pass for each head, so one head of each layer is timed and counts
    for all heads of its layer.
    """
    clean, corrupt = draw(2, PATCH_TOKENS)
    corrupt[:shared] = clean[:shared]
    cells = [(layer, 5 * layer % heads) for layer in range(1, layers + 1)]
    job = {
        "folder": folder,
        "clean": clean,
        "corrupt": corrupt,
        "answer": 101,
        "other": 102,
        "cells": cells,
        "times": heads,
    }
    name = "heads, shared prefix" if shared else "heads"
    prompts = f"prompts of {PATCH_TOKENS} tokens that differ from the first token"
    if shared:
        prompts = f"prompts of {PATCH_TOKENS} tokens, the first {shared} in common"
    what = f"smollm2, float32, {layers} layers x {heads} heads, {prompts}"
    libraries = (PLAIN, OURS, "TransformerLens")
    return Task(name, what, job, libraries, "heads", tolerance=1e-3)


def edges_task(place: Path, steps: int) -> Task:
    """Return the estimates of all edges, with one gradient or with some.

    Estimates differ, because ours compute what each reader makes of its edge; the logit
    differences of the two runs must be the same.
    """
    clean, corrupt = draw(2, PATCH_TOKENS)
    job = {
        "folder": gpt2(place, 12, 768, GPT2_WORDS),
        "clean": clean,
        "corrupt": corrupt,
        "answer": 101,
        "other": 102,
        "steps": steps,
    }
    shape = f"GPT-2's shape, random weights, float32, {PATCH_TOKENS} tokens"
    if steps == 1:
        what = f"{shape}, all edges by one gradient (plain HF: EAP, own implementation)"
        return Task(
            "edges", what, job, (PLAIN, OURS, "TransformerLens"), tolerance=1e-3
        )
    what = f"{shape}, all edges by {steps} gradients (plain HF: EAP-IG, the same)"
    libraries = PLAIN, OURS
    return Task("integrated edges", what, job, libraries, "edges", tolerance=1e-3)


def visibility_task(folder: str, tokens: int) -> Task:
    """Return a map of what every state sees; the peer is a loop of backward passes."""
    what = f"GPT-2's shape, random weights, float32, {tokens} tokens, every layer"
    job = {"folder": folder, "ids": draw(1, tokens, 1000)}
    return Task("visibility", what, job, (PLAIN, OURS), tolerance=1e-3)


def _embed() -> Task:
    folder = str(zoo.zoo_folder("minilm"))
    texts = _reviews(folder, EMBEDDED)
    what = f"minilm, {EMBEDDED} texts of 8 to 256 tokens"
    job = {
        "folder": folder,
        "texts": texts,
        "longest": LONGEST,
        "width": MINILM_WIDTH,
    }
    return Task("embed", what, job, (PLAIN, OURS, "sentence-transformers"))


def _drift(place: Path) -> Task:
    folder = small_llama(place)
    what = (
        f"6 layers, 384 wide, {DRIFT_TOKENS} tokens, one weight scaled by 1.01;"
        " ours also finds the block and tells rounding from faults"
    )
    job = {
        "folder": folder,
        "candidate": _faulty(place, folder),
        "ids": draw(1, DRIFT_TOKENS),
    }
    return Task("drift", what, job, (PLAIN, OURS))


def small_llama(place: Path) -> str:
    """Save a random model with smollm2's tokenizer, once, and return its folder."""
    folder = place / "small"
    if not folder.exists():
        shape = {"layers": 6, "width": 384, "heads": 6, "words": 49_152}
        llama(folder, **shape)
        for name in TOKENIZER_FILES:
            source = zoo.zoo_folder("smollm2") / name
            if source.exists():
                shutil.copy(source, folder / name)
    return str(folder)


def llama(folder: Path, *, layers: int, width: int, heads: int, words: int) -> str:
    """Save a random model of Llama's shape and return its folder."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        vocab_size=words,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).eval().save_pretrained(folder)
    return str(folder)


def gpt2(place: Path, layers: int, width: int, words: int = 1000) -> str:
    """Save a random model of GPT-2's shape, and return its folder."""
    folder = place / f"gpt2-{layers}-{width}-{words}"
    if not folder.exists():
        torch.manual_seed(0)
        config = GPT2Config(
            n_layer=layers,
            n_embd=width,
            n_head=max(1, width // 64),
            vocab_size=words,
            bos_token_id=0,
            eos_token_id=0,
        )
        GPT2LMHeadModel(config).eval().save_pretrained(folder)
    return str(folder)


def _faulty(place: Path, folder: str) -> str:
    """Save a copy with one weight scaled, and return its folder."""
    faulty = place / "faulty"
    module: Any = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        module.model.layers[3].mlp.down_proj.weight.mul_(1.01)
    module.save_pretrained(faulty)
    return str(faulty)


def _reviews(folder: str, count: int) -> list[str]:
    tokenizer = load_tokenizer(check_folder(Path(folder)))
    return ragged.texts(tokenizer, count)[0]


def _tokens_of(folder: str, text: str) -> int:
    tokenizer = load_tokenizer(check_folder(Path(folder)))
    return len(tokenizer(text)["input_ids"])
