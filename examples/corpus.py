"""A million tokens of film reviews: extracted, probed and searched.

    python examples/corpus.py

It reads whole reviews, computes their states at three sites and keeps them in a store.
The job is killed on the way and goes on. Then a probe reads the sentiment from each
site, and pieces of reviews are used to find these again. `--quick` takes sentences and
a few thousand tokens. On a GPU: `--model smollm2 --device cuda`. Your own texts:
`--texts FILE.jsonl`, with a `text` and a `label` in every line.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import matplotlib.pyplot as plt
import numpy as np
from numpy.typing import NDArray
from reviews import labelled_reviews

import hiddenscope as hs
from hiddenscope.texts import Labelled

Numbers = NDArray[np.int64]
Value = TypeVar("Value")

# `minilm` was trained on at most 256 tokens. Longer reviews are read window by window.
WINDOW = 256
# Layers with `final`, and their width, in smollm2.
SMOLLM2_SITES, SMOLLM2_WIDTH = 32, 576
# The most words of a review that are a query, and how many neighbours are counted.
EXCERPT_WORDS = 30
NEIGHBOURS = 10
SHUFFLES = 999
# The job is killed as soon as it has kept this many units.
UNITS_BEFORE_KILL = 3
# A word with two meanings, and a sentence for each.
WORD = "score"
MEANINGS = (
    "The orchestral score by the composer is lush and haunting.",
    "The final score of the match was three goals to two.",
)


def main() -> None:
    """Extract, probe and search a corpus, print the findings and write the files."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = hs.load(options.model, device=options.device)
    texts = options.texts or write_texts(model, options)
    if options.extract_only:
        _job(model, texts, options).run()
        return
    data = hs.read(texts, text="text", label="label")
    assert data.labels is not None, f"{texts} has no labels"
    print(f"{model.name}, {model.dtype}, on {model.device}: {len(data):,} texts.")

    store, figures = extract(model, texts, options)
    probe, figures["probe"] = timed(lambda: hs.probe(store, data, pool="mean"))
    print(probe.summary())
    print(f"The probe of {len(store.sites)} sites took {figures['probe']}.\n")

    queries = excerpts(data, options.queries)
    searches = []
    for site in store.sites:
        search = search_again(store, model, queries, data, str(site))
        print(search.sentence())
        searches.append(search)
    figures |= time_queries(store, model)
    show_meanings(store, model, data)

    draw(probe, searches, options.out / "corpus-sites.png")
    print()
    shown = {name: str(value) for name, value in figures.items()}
    for name, value in shown.items():
        print(f"{name:26} {value}")
    record: dict[str, Any] = {**shown}
    record["searches"] = [asdict(search) for search in searches]
    written = json.dumps(record, indent=1)
    (options.out / "figures.json").write_text(written, "utf-8")
    probe.save(options.out / "corpus-probe.html")
    # A borrowed GPU machine may lack it.
    if find_spec("h5netcdf"):
        probe.save(options.out / "corpus-probe.nc")


# The corpus


def write_texts(model: hs.Model, options: argparse.Namespace) -> Path:
    """Write reviews in a random order until they have enough tokens.

    Every review is whole, and copies of another are left out.
    """
    source = "rotten_tomatoes" if options.quick else "imdb"
    order = labelled_reviews(source)
    random.Random(options.seed).shuffle(order)
    path: Path = options.out / "texts.jsonl"
    seen: set[str] = set()
    tokens = 0
    with path.open("w", encoding="utf-8") as file:
        for review in order:
            if tokens >= options.tokens:
                break
            if review.text in seen:
                continue
            seen.add(review.text)
            # Not verbose: a long text is no mistake here.
            encoded = model.tokenizer(review.text, verbose=False)
            tokens += len(encoded.input_ids)
            row = {"text": review.text, "label": review.sentiment}
            file.write(json.dumps(row) + "\n")
    print(f"{path} holds {len(seen):,} texts from {source}, {tokens:,} tokens.")
    return path


# The states


@dataclass(frozen=True)
class Duration:
    """How long a step took, and how long the CPU cores worked on it."""

    seconds: float
    cpu: float

    def __str__(self) -> str:
        """Say both."""
        return f"{self.seconds:,.2f} s ({self.cpu:,.2f} CPU s)"


def timed(step: Callable[[], Value]) -> tuple[Value, Duration]:
    """Return what a step returns, and how long it took."""
    start = time.perf_counter()
    start_cpu = _cpu_seconds()
    value = step()
    seconds = time.perf_counter() - start
    cpu = _cpu_seconds() - start_cpu
    return value, Duration(seconds, cpu)


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of its workers that have ended."""
    return sum(os.times()[:4])


def chosen_sites(model: hs.Model) -> str:
    """Return the first, the middle and the last site of a model."""
    sites = model.anatomy.select("layer.*,final")
    middle = sites[len(sites) // 2]
    return f"{sites[0]},{middle},{sites[-1]}"


def extract(
    model: hs.Model, texts: Path, options: argparse.Namespace
) -> tuple[hs.Store, dict[str, Any]]:
    """Return the store of the corpus and what it took.

    A new job is killed once before it goes on.
    """
    folder = options.out / "states"
    if not folder.exists() and not options.no_kill:
        kill_a_job(texts, options)
    job = _job(model, texts, options)
    cost = job.cost
    print("\n".join(cost.lines()))
    _compare_with_every_site(model, cost.tokens)
    tokens = job.pending_tokens
    _, duration = timed(lambda: job.run(lambda now: print(now.line(), flush=True)))
    verification, checking = timed(lambda: hs.Store.verify(folder))
    assert verification.intact and not verification.pending, verification
    print(f"Every byte is as its checksum says. That took {checking}.\n")
    figures: dict[str, Any] = {
        "texts": cost.texts,
        "windows": cost.sequences,
        "tokens": cost.tokens,
        "bytes of states": cost.bytes,
        "units": cost.units,
        "units kept by killed job": cost.units - cost.units_left,
        "tokens computed after it": tokens,
        "extraction after it": duration,
        "verification": checking,
    }
    if tokens:
        figures["tokens a second"] = f"{tokens / duration.seconds:,.0f}"
        figures["CPU ms a token"] = f"{1000 * duration.cpu / tokens:.2f}"
    return hs.open(folder), figures


def kill_a_job(texts: Path, options: argparse.Namespace) -> None:
    """Run the job in another process and kill it with SIGKILL in the middle."""
    command = [sys.executable, __file__, "--extract-only", "--texts", str(texts)]
    command += ["--model", options.model, "--out", str(options.out)]
    command += ["--unit-tokens", str(options.unit_tokens or 0)]
    if options.device:
        command += ["--device", options.device]
    if options.quick:
        command.append("--quick")
    job = subprocess.Popen(command)
    while job.poll() is None and _units(options) < UNITS_BEFORE_KILL:
        time.sleep(0.02)
    # On POSIX this is SIGKILL: the process cannot notice, and tidies nothing up.
    job.kill()
    job.wait()
    print(f"Killed the job. It left {_units(options)} whole units.")


def _units(options: argparse.Namespace) -> int:
    """Count the units that are committed: each has a record."""
    commits = options.out / "states" / "commits"
    return len(list(commits.glob("*.json")))


def _job(model: hs.Model, texts: Path, options: argparse.Namespace) -> hs.ExtractJob:
    """Plan the job, or plan the rest of one that was stopped."""
    # Every window has its own special tokens. With this stride windows do not overlap.
    stride = WINDOW - special_tokens(model)
    corpus = hs.Corpus(texts, text="text", window=WINDOW, stride=stride)
    return hs.ExtractJob.plan(
        model,
        corpus,
        options.out / "states",
        sites=chosen_sites(model),
        dtype="bfloat16",
        engine=_engine(options),
    )


def special_tokens(model: hs.Model) -> int:
    """Count the tokens that the tokenizer adds to a text."""
    with_special = model.tokenizer("a").input_ids
    without = model.tokenizer("a", add_special_tokens=False).input_ids
    return len(with_special) - len(without)


def _engine(options: argparse.Namespace) -> hs.Engine:
    """Choose one process with a thread for each CPU core, or one process for a GPU."""
    units = options.unit_tokens or None
    if options.device or options.quick:
        return hs.Engine(unit_tokens=units)
    return hs.Engine(workers=os.cpu_count(), threads=1, unit_tokens=units)


def _compare_with_every_site(model: hs.Model, tokens: int) -> None:
    """Say how large all sites would be, in the dtype that they are computed in."""
    every = model.anatomy.select("layer.*,final")
    width = model.anatomy.width(every[0])
    here = len(every) * width * model.dtype.itemsize * tokens
    smollm2 = SMOLLM2_SITES * SMOLLM2_WIDTH * 4 * tokens
    print(
        f"All {len(every)} sites in {str(model.dtype).removeprefix('torch.')} would be"
        f" {here / 1e9:,.1f} GB; those of smollm2 in float32, {smollm2 / 1e9:,.1f} GB."
    )


# The questions


@dataclass(frozen=True)
class Excerpts:
    """Pieces of texts, and the numbers of the texts that they are from."""

    pieces: list[str]
    numbers: Numbers


@dataclass(frozen=True)
class SiteSearch:
    """How often a site finds a text again, and whether its neighbours agree with it."""

    site: str
    first: float
    among_first: float
    same_label: float
    shuffled: tuple[float, float]

    def sentence(self) -> str:
        """Say all of it."""
        low, high = self.shuffled
        return (
            f"{self.site}: a text comes first for a piece of it in {self.first:.0%},"
            f" among the first {NEIGHBOURS} in {self.among_first:.0%}."
            f" {self.same_label:.1%} of its neighbours have its label (shuffled labels:"
            f" {low:.1%} to {high:.1%})."
        )


def excerpts(data: Labelled, count: int) -> Excerpts:
    """Take words from the middle of some texts: half of them, at most 30."""
    count = min(count, len(data))
    numbers = random.Random(1).sample(range(len(data)), count)
    pieces = []
    for number in numbers:
        words = data.texts[number].split()
        half = len(words) // 2
        length = max(1, min(EXCERPT_WORDS, half))
        start = (len(words) - length) // 2
        middle = words[start : start + length]
        pieces.append(" ".join(middle))
    return Excerpts(pieces, np.array(numbers))


def search_again(
    store: hs.Store, model: hs.Model, queries: Excerpts, data: Labelled, site: str
) -> SiteSearch:
    """Search for texts with pieces of them."""
    result = hs.search(
        store, (model, queries.pieces), NEIGHBOURS + 1, site=site, pool="mean"
    )
    nearest = result.data["number"].to_numpy()
    is_source = nearest == queries.numbers[:, None]
    is_first = is_source[:, 0]
    is_among_first = is_source[:, :NEIGHBOURS].any(1)
    others = without_source(nearest, queries.numbers)
    labels = np.array(data.labels)
    share, shuffled = label_agreement(others, queries.numbers, labels)
    return SiteSearch(
        site,
        first=float(is_first.mean()),
        among_first=float(is_among_first.mean()),
        same_label=share,
        shuffled=shuffled,
    )


def without_source(nearest: Numbers, numbers: Numbers) -> Numbers:
    """Return the neighbours of each query, without the text that it is from."""
    rows = []
    for neighbours, number in zip(nearest, numbers, strict=True):
        others = neighbours[neighbours != number]
        rows.append(others[:NEIGHBOURS])
    return np.array(rows)


def label_agreement(
    neighbours: Numbers, numbers: Numbers, labels: NDArray[Any]
) -> tuple[float, tuple[float, float]]:
    """Return the share of neighbours that have the label of the query's text.

    Beside it stands where 95% of the shares lie when the labels of all texts are
    shuffled. Some texts are neighbours of many queries. Shuffling takes account of it,
    and an interval over queries would not.
    """

    def share_of(labels: NDArray[Any]) -> float:
        is_same = labels[neighbours] == labels[numbers, None]
        return float(is_same.mean())

    generator = np.random.default_rng(0)
    shares = []
    for _ in range(SHUFFLES):
        shuffled = generator.permutation(labels)
        shares.append(share_of(shuffled))
    low, high = np.quantile(shares, (0.025, 0.975))
    return share_of(labels), (float(low), float(high))


def time_queries(store: hs.Store, model: hs.Model) -> dict[str, Duration]:
    """Time a query over texts, over texts whose vectors are in memory, and over tokens.

    The first pools every token that it reads from the store.
    """
    query = (model, "a moving story of two brothers in the war")
    last = str(store.sites[-1])
    durations = {}
    _, durations["a query over the store"] = timed(
        lambda: hs.search(store, query, site=last, pool="mean")
    )
    vectors, durations["means of all texts"] = timed(lambda: text_means(store, last))
    _, durations["a query over the means"] = timed(lambda: hs.search(vectors, query))
    state = model.capture(query[1], last)[last][3].float()
    _, durations["a query over all tokens"] = timed(
        lambda: hs.search(hs.each_token(store), state, site=last)
    )
    return durations


def text_means(store: hs.Store, site: str) -> NDArray[np.float32]:
    """Return the mean state of every text, read block by block."""
    states = store[site]
    text = store.tokens.text
    lengths = np.bincount(text)
    sums = np.zeros((len(lengths), states.shape[1]), dtype=np.float64)
    start = 0
    for block in states.blocks():
        stop = start + len(block)
        np.add.at(sums, text[start:stop], block)
        start = stop
    means = sums / lengths[:, None]
    return means.astype(np.float32)


def show_meanings(store: hs.Store, model: hs.Model, data: Labelled) -> None:
    """Print the tokens nearest to a word, for two of its meanings."""
    last = str(store.sites[-1])
    tokens = store.tokens
    for sentence in MEANINGS:
        states = model.capture(sentence, last)
        strings = [string.strip().lower() for string in states.tokens.strings]
        state = states[last][strings.index(WORD)].float()
        near = hs.search(hs.each_token(store), state, 5, site=last)
        print(f'\nTokens nearest to "{WORD}" in "{sentence}":')
        for number in near.data["number"].to_numpy()[0]:
            start, stop = tokens.spans[number]
            text = data.texts[tokens.text[number]]
            before = text[max(0, start - 30) : start]
            after = text[stop : stop + 30]
            # A review is a stranger's text: `repr` keeps it from moving the cursor.
            print("   ", repr(f"{before}[{text[start:stop]}]{after}"))


def draw(probe: hs.Result, searches: list[SiteSearch], path: Path) -> None:
    """Draw what the probe and the search make of each site."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(5, 6.4), sharex=True)
    sites = [search.site for search in searches]
    x = np.arange(len(sites))
    accuracy = probe.data["accuracy"].to_numpy()
    low = accuracy - probe.data["accuracy_low"].to_numpy()
    high = probe.data["accuracy_high"].to_numpy() - accuracy
    label = "probe, 95% interval"
    above.errorbar(x, accuracy, (low, high), fmt="o-", capsize=4, label=label)
    above.plot(x, probe.data["control"], "s:", color="grey", label="control labels")
    chance = float(probe.data["majority"])
    above.axhline(chance, color="black", lw=1, label="largest class")
    above.set(title="Sentiment of texts not seen", ylabel="accuracy", ylim=(0.4, 1.0))

    shuffled = np.array([search.shuffled for search in searches])
    first = [search.first for search in searches]
    same = [search.same_label for search in searches]
    below.plot(x, first, "o-", label="its text comes first")
    below.plot(x, same, "s-", label="neighbours, same label")
    below.fill_between(x, *shuffled.T, color="grey", alpha=0.4, label="labels shuffled")
    below.set(title="Search with a piece of a text", ylabel="share", ylim=(0, 1.05))
    below.set_xticks(x, sites)
    for axes in (above, below):
        axes.legend(fontsize=9, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.1),
                    columnspacing=1, handlelength=1.4, frameon=False)  # fmt: skip
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--device")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--texts", type=Path, help="JSON lines: text and label")
    parser.add_argument("--queries", type=int, default=200)
    # A killed job loses the units that it was at work on: small ones lose little.
    parser.add_argument("--unit-tokens", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-kill", action="store_true")
    parser.add_argument("--extract-only", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("out/corpus"))
    options = parser.parse_args()
    if options.quick:
        options.tokens = 1_800
        options.unit_tokens = 300
        options.queries = 30
    return options


if __name__ == "__main__":
    main()
