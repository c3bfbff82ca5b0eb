"""What can a hidden state see? The average over 200 film reviews, and random weights.

    python examples/visibility.py --out visibility

It draws a few states of each review, measures which states influence them, and writes
a page, a picture and the numbers. `--texts 8` gives a first look.
"""

import argparse
import time
from pathlib import Path

from reviews import reviews

import hiddenscope as hs

TOKENS = 64


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
