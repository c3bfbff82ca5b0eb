"""Train small models on film reviews, for the experiments that need real checkpoints.

`checkpoints` trains a GPT-2 from nothing and saves it on the way; `adapter` trains a
LoRA on any model. Both are kept in the cache folder, so that they are trained once.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache as remembered
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from reviews import Review, labelled_reviews
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.loading import cache
from hiddenscope.texts import copy_key

END = "<|endoftext|>"
HELD_OUT = 1_000
SEED = 0


class Size(NamedTuple):
    """A GPT-2, and how long it is trained."""

    layers: int = 9
    width: int = 192
    heads: int = 6
    vocabulary: int = 4_096
    context: int = 128
    batch: int = 16
    steps: int = 2_000

    reviews: int | None = None

    @property
    def saved(self) -> list[int]:
        """Return the steps after which it is saved: 0, and up to seven that double."""
        return sorted({0, *(self.steps >> power for power in range(7))})


class Corpus(NamedTuple):
    """Reviews to train on, and others to measure with."""

    training: list[Review]
    held_out: list[Review]


@remembered
def corpus() -> Corpus:
    """Return all whole reviews but copies, in random order; the last are held out."""
    unique: dict[str, Review] = {}
    for review in labelled_reviews("imdb"):
        text = re.sub(r"\s*<br ?/>\s*", "\n", review.text)
        unique.setdefault(copy_key(text), review._replace(text=text))
    reviews = list(unique.values())
    order = np.random.default_rng(SEED).permutation(len(reviews))
    shuffled = [reviews[number] for number in order]
    return Corpus(shuffled[:-HELD_OUT], shuffled[-HELD_OUT:])


def checkpoints(size: Size, device: str | None = None) -> dict[int, Path]:
    """Train a GPT-2 on the reviews, once; return its folders by step."""
    place = _place("gpt2", size._asdict())

    def build(part: Path) -> None:
        texts = [review.text for review in corpus().training[: size.reviews]]
        tokenizer = train_tokenizer(texts, size.vocabulary)
        ids = _encoded(tokenizer, texts)
        torch.manual_seed(SEED)
        module = new_gpt2(size).to(device or "cpu")
        blocks = _random_blocks(ids, size)
        for step in _train(module, blocks, size.steps, learning_rate=2e-3):
            if step in size.saved:
                folder = part / f"step{step}"
                module.save_pretrained(folder)
                tokenizer.save_pretrained(folder)

    folder = cache.build_once(place, build)
    return {step: folder / f"step{step}" for step in size.saved}


def train_tokenizer(texts: Sequence[str], vocabulary: int) -> Any:
    """Learn the byte-pair merges of the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END
    )


def new_gpt2(size: Size) -> Any:
    """Build a GPT-2 with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=size.vocabulary,
        n_positions=size.context,
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def adapter(
    source: str | Path,
    order: Literal["as written", "shuffled"],
    steps: int,
    device: str | None = None,
    length: int = 64,
) -> Path:
    """Train a LoRA on the reviews, once; return its folder.

    With "shuffled", the tokens of each text stand in random order: what is learnt then
    is wrong for ordinary texts.
    """
    import peft

    model = hs.load(source, device=device)
    settings = {"model": model.source(None).weights, "steps": steps, "length": length}
    place = _place(f"lora-{order.replace(' ', '-')}", settings)

    def build(part: Path) -> None:
        torch.manual_seed(SEED)
        config = peft.LoraConfig(
            r=8,
            lora_alpha=16,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
        adapted: Any = peft.get_peft_model(model.module, config)
        batches = _starts(model, length, shuffled=order == "shuffled")
        for _ in _train(adapted, batches, steps, learning_rate=1e-3):
            pass
        adapted.save_pretrained(part)

    return cache.build_once(place, build)


def _place(name: str, settings: dict[str, Any]) -> Path:
    """Return the folder in the cache for something trained with these settings."""
    key = sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    return cache.cache_folder() / "experiments" / f"{name}-{key}"


def _encoded(tokenizer: Any, texts: Sequence[str]) -> NDArray[np.int64]:
    """Return the ids of all texts, one after another, with an end between them."""
    parts = []
    for start in range(0, len(texts), 1_000):
        some = [END + text for text in texts[start : start + 1_000]]
        parts += tokenizer(some, add_special_tokens=False)["input_ids"]
    return np.concatenate([np.array(part) for part in parts])


def _random_blocks(ids: NDArray[np.int64], size: Size) -> Iterator[Tensor]:
    """Yield batches of random pieces of the corpus."""
    generator = np.random.default_rng(SEED)
    while True:
        starts = generator.integers(0, len(ids) - size.context, size.batch)
        rows = ids[starts[:, None] + np.arange(size.context)]
        yield torch.from_numpy(rows)


def _starts(model: hs.Model, length: int, *, shuffled: bool) -> Iterator[Tensor]:
    """Yield batches of the first tokens of reviews, of which the first stays."""
    generator = np.random.default_rng(SEED)
    rows = []
    for review in corpus().training:
        (ids,) = model.encode(review.text[: 12 * length], truncate=True).ids
        row = np.array(ids[:length])
        if len(row) < length:
            continue
        if shuffled:
            row[1:] = generator.permutation(row[1:])
        rows.append(row)
        if len(rows) == 8:
            yield torch.from_numpy(np.stack(rows))
            rows = []


def _train(
    module: nn.Module, batches: Iterator[Tensor], steps: int, *, learning_rate: float
) -> Iterator[int]:
    """Train a model, and yield the number of steps done, from 0 on."""
    device = next(module.parameters()).device
    weights = [weight for weight in module.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, learning_rate, weight_decay=0.1)
    warmup = max(1, steps // 20)
    module.train()
    yield 0
    with progress.track("Training", total=steps) as advance:
        for step in range(steps):
            ids = next(batches).to(device)
            # A linear rise, then half a cosine down to a tenth.
            fall = 0.55 + 0.45 * np.cos(np.pi * step / steps)
            optimizer.param_groups[0]["lr"] = learning_rate * min(
                (step + 1) / warmup, float(fall)
            )
            output: Any = module(input_ids=ids, labels=ids)
            output.loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            advance(1)
            yield step + 1
    module.eval()
