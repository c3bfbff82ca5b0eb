"""What can a hidden state see? One state, all states, and the average over 200 texts.

    python examples/visibility.py

The average draws 16 states of each film review and measures which states influence
them, in the model and in a copy with random weights. A drawn state takes a third of a
second of a slow core, so use a GPU if you have one: `--device cuda`. `--quick` gives a
first look, and `--texts-file FILE.jsonl` reads the column "text" of your own file.
"""

import argparse
import time
from pathlib import Path

from one_state import draw_one_state

import hiddenscope as hs
from hiddenscope.results import views_of
from hiddenscope.views.figures.pages import image

SENTENCE = "The capital of France is Paris."
TOKENS = 64
QUICK_TOKENS = 16
QUICK_SITES = "layer.0,layer.6,layer.12,layer.18,layer.24,layer.30,final"

PICTURES = ("by-distance", "own-token", "own-by-depth", "by-depth", "locality", "reach")


def main() -> None:
    """Look at one sentence, then at many texts."""
    options = read_options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load(options.model, device=options.device)

    one_text = hs.visibility(model, SENTENCE, sites=options.sites)
    draw_one_state(one_text, options.out / "one-state.png")
    # Point at a cell of the page, and it shows what influences that state.
    one_text.save(options.out / "all-states.html")

    texts = first_tokens(model, options)
    start = time.perf_counter()
    average = hs.visibility(
        model,
        texts,
        influence=options.influence,
        sites=options.sites,
        sampling=hs.Sampling(per_text=options.per_text, baseline=options.baseline),
    )
    seconds = time.perf_counter() - start
    report = (
        f"{model}\n{one_text.summary()}\n\n{average.summary()}\n"
        f"{len(texts)} texts of {options.tokens} tokens took {seconds:,.0f} s."
    )
    print(report)
    (options.out / "findings.txt").write_text(report + "\n", encoding="utf-8")
    for suffix in ("html", "json"):
        average.save(options.out / f"average.{suffix}")
    for name, view in zip(PICTURES, views_of(average), strict=False):
        picture = image((view,), ".png", dpi=90)
        (options.out / f"{name}.png").write_bytes(picture)


def first_tokens(model: hs.Model, options: argparse.Namespace) -> list[list[int]]:
    """Return the first tokens of the first texts that are long enough."""
    chosen = []
    for text in read_texts(options.texts_file):
        (ids,) = model.encode(text, truncate=True).ids
        start = ids[: options.tokens]
        if len(start) == options.tokens:
            chosen.append(list(start))
        if len(chosen) == options.texts:
            break
    return chosen


def read_texts(file: Path | None) -> list[str]:
    """Read the texts of a file, or film reviews."""
    if file is not None:
        return list(hs.read(file, text="text").texts)
    # Film reviews are fetched the first time; a file needs no network.
    from reviews import reviews

    return reviews()


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", help="such as cuda; by default the CPU")
    parser.add_argument("--texts", type=int, default=200)
    parser.add_argument("--texts-file", type=Path, help="a .jsonl with a column text")
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--per-text", type=int, default=16)
    parser.add_argument("--influence", default="l1", help="l1, frobenius or relative")
    parser.add_argument("--sites", default="layer.*,final")
    parser.add_argument("--baseline", default="random", choices=("random", "none"))
    parser.add_argument("--quick", action="store_true", help="a few seconds")
    parser.add_argument("--out", type=Path, default=Path("out/visibility"))
    options = parser.parse_args()
    if options.baseline == "none":
        options.baseline = None
    if options.quick:
        options.texts = 5
        options.per_text = 2
        options.tokens = QUICK_TOKENS
        options.sites = QUICK_SITES
    return options


if __name__ == "__main__":
    main()
