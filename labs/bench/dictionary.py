"""Measure Dictionary.fit: a step against its bare products, and a store of many tokens.

It runs alone: `PYTHONPATH=src python -m labs.bench.dictionary --to dictionary.json`, on a
GPU, or small with `--device cpu`, as `python -m labs.bench fit` does. A step is held against five products of the same
shapes in the same precision: encoder, decoder and their three gradients, and nothing
else. The store holds fewer tokens than are trained on: they are read in several passes,
from the disk or from what the system keeps of it in memory.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.directions.feed import PORTION, RUN, feed_of
from hiddenscope.directions.training import Trainer
from hiddenscope.store import StorePlan, StoreSequence, create
from labs.bench import measure
from labs.bench.measure import Row

# Steps that are timed together.
AT_ONCE = 8
STEP_BAR, MINUTES_BAR = 1.15, 15.0
SITE = "layer.1"
# Directions that states are made of, and how many act in each.
TRUE, ACTIVE = 4096, 24
TEXT, TEXTS_PER_UNIT = 512, 256
# Seconds after which the time of a small run is extrapolated.
SHORT_S = 60.0


@dataclass(frozen=True)
class Size:
    """How large a dictionary is, how much it is trained, and how much is stored."""

    width: int
    features: int
    k: int
    batch: int
    tokens: int
    stored: int


SIZES = {
    "cuda": Size(576, 16_384, 32, 4096, 100_000_000, 12_582_912),
    "cpu": Size(128, 1024, 32, 4096, 1_000_000, 131_072),
}


def main() -> None:
    """Measure, print the rows, and write them."""
    options = _options()
    size = SIZES[options.device]
    record: dict[str, Any] = {"torch": torch.__version__, "rows": [], "facts": []}
    parts: list[Iterator[Row]] = []
    if "step" in options.parts:
        parts.append(steps(size, options.device, options.rounds))
    if "store" in options.parts:
        parts.append(from_store(size, options.device, record["facts"], options.seconds))
    for part in parts:
        for row in part:
            record["rows"].append(row.to_json())
            options.to.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
            print(f"{row.what}: {row.wall:.3f} {row.verdict}", flush=True)
    if options.profile:
        table = profile(size, options.device)
        options.to.with_suffix(".txt").write_text(table, "utf-8")


def rows(rounds: int) -> list[Row]:
    """Measure a small one on the CPU; the bars are those of a GPU."""
    size = SIZES["cpu"]
    several = [*steps(size, "cpu", rounds), *from_store(size, "cpu", [], SHORT_S)]
    return [replace(row, name="fit", bar=None) for row in several]


def steps(size: Size, device: str, rounds: int) -> Iterator[Row]:
    """Compare a step with its bare products, in both precisions that a GPU has."""
    precisions = ("highest", "high") if device == "cuda" else ("highest",)
    for prefixes in ((), (size.features // 32, size.features // 4)):
        for precision in precisions:
            torch.set_float32_matmul_precision(precision)
            trainer, batches = prepared(size, device, prefixes)
            several = cycle(islice(batches, 8))
            ways: dict[str, Callable[[], Any]] = {
                "bare": _finished(bare(trainer, next(several))),
                "step": _finished(learning(trainer, several)),
            }
            costs = measure.interleaved(ways, rounds)
            milliseconds = {
                name: measure.median(cost).wall * 1000 / AT_ONCE
                for name, cost in costs.items()
            }
            cost = measure.ratios(costs, "bare")["step"]
            kind = "Matryoshka BatchTopK" if prefixes else "BatchTopK"
            what = (
                f"{_where(device)}: {kind}, {size.features:,} features, {size.width}"
                f" wide, k {size.k}, {size.batch:,} states, float32 products at"
                f" {precision!r}: a step ({milliseconds['step']:.2f} ms) / its five bare"
                f" products ({milliseconds['bare']:.2f} ms)"
            )
            yield Row("gpu", what, cost.cpu, cost.wall, STEP_BAR, judged="wall")
    torch.set_float32_matmul_precision("highest")


def prepared(
    size: Size, device: str, prefixes: tuple[int, ...]
) -> tuple[Trainer, Iterator[Tensor]]:
    """Return a trainer after some steps, and more states."""
    training = hs.Training(prefixes=prefixes, device=device)
    trainer = Trainer(size.width, size.features, size.k, training, 10_000)
    batches = drawn(size.width, size.batch, device)
    trainer.measure(next(batches))
    for states in islice(batches, 30):
        trainer.learn(states)
    return trainer, batches


def learning(trainer: Trainer, batches: Iterator[Tensor]) -> Callable[[], Any]:
    """Return a step with the next states."""
    return lambda: trainer.learn(next(batches))


def bare(trainer: Trainer, states: Tensor) -> Callable[[], Any]:
    """Return the five products of a step without anything between them."""
    directions, encoder, _, _ = trainer.parts(trainer.weights.detach())
    activations = states @ encoder.T

    def products() -> list[Tensor]:
        return [
            states @ encoder.T,
            activations @ directions,
            states @ directions.T,
            activations.T @ states,
            activations.T @ states,
        ]

    return products


def drawn(width: int, batch: int, device: str) -> Iterator[Tensor]:
    """Yield states made of a few of many directions, some of which act everywhere."""
    generator = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": generator, "device": device}
    directions = normalize(torch.randn(TRUE, width, **options))
    # As in models: a few directions act nearly always, most rarely.
    rates = 1 / torch.arange(1, TRUE + 1, device=device)
    rates = (rates * ACTIVE / rates.sum()).clamp(max=0.9)
    while True:
        acts = (torch.rand(batch, TRUE, **options) < rates).float()
        acts *= 0.5 + torch.rand(batch, TRUE, **options)
        noise = torch.randn(batch, width, **options) * (0.3 / width**0.5)
        yield acts @ directions + noise + 0.2


def from_store(
    size: Size, device: str, facts: list[Any], seconds: float
) -> Iterator[Row]:
    """Train on a store, and yield how long all of it took, in minutes."""
    with tempfile.TemporaryDirectory(prefix="hiddenscope-bench-") as folder:
        begin = time.perf_counter()
        store = stored(Path(folder, "states"), size, device)
        print(f"a store of {len(store):,} states: {_since(begin):.1f} s", flush=True)
        begin = time.perf_counter()
        for _ in store.blocks(SITE):
            pass
        rate = len(store) * size.width * 2 / _since(begin) / 1e9
        print(f"reading it once in order: {rate:.2f} GB/s", flush=True)
        print(f"reading random runs of it: {_random(store, size):.2f} GB/s", flush=True)
        training = hs.Training(tokens=size.tokens, batch=size.batch, device=device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        clock = _Clock(seconds)
        try:
            with progress.sent_to(clock):
                fitted = hs.Dictionary.fit(
                    store, SITE, features=size.features, k=size.k, training=training
                )
            facts.append(dict(fitted.facts))
            print(fitted.facts, _held_out(fitted, size, device), flush=True)
        except _Enough:
            print(f"stopped after {clock.seconds:.0f} s", flush=True)
    trained = clock.steps * size.batch
    minutes = clock.seconds / 60 * size.tokens / trained
    memory = ""
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        memory = f", at most {peak:.1f} GiB on the device"
    what = (
        f"{_where(device)}: BatchTopK, {size.features:,} features, {size.width} wide,"
        f" {size.tokens / 1e6:.0f} million states of a store of"
        f" {size.stored / 1e6:.1f} million in bfloat16 (measured on"
        f" {trained / 1e6:.1f} million), read {rate:.2f} GB/s in order{memory}: minutes"
    )
    yield Row("gpu", what, None, minutes, MINUTES_BAR, judged="wall")


class _Enough(Exception):
    """The time for the measurement is over."""


class _Clock:
    """Counts steps and seconds from the first step on, and prints both now and then."""

    def __init__(self, most: float) -> None:
        self.most = most
        self.begin = self.shown = time.perf_counter()
        self.steps = 0.0

    @property
    def seconds(self) -> float:
        return _since(self.begin)

    def __call__(self, what: str, done: float, total: float | None) -> None:
        self.steps = done
        if _since(self.shown) > 20:
            self.shown = time.perf_counter()
            print(f"{done:.0f} of {total:.0f} steps, {self.seconds:.0f} s", flush=True)
        if self.seconds > self.most:
            raise _Enough


def _random(store: hs.Store, size: Size) -> float:
    """Return how fast a portion of random runs is read, in GB/s."""
    feed = feed_of(store, SITE, None, False)
    count = min(len(feed.counts), PORTION // (RUN * size.width * 2))
    pieces = np.random.default_rng(0).permutation(len(feed.counts))[:count]
    begin = time.perf_counter()
    rows = feed.read(np.sort(pieces))
    return len(rows) * size.width * 2 / _since(begin) / 1e9


def _held_out(fitted: hs.Dictionary, size: Size, device: str) -> str:
    """Say how the dictionary does on states that it was not trained on."""
    states = next(islice(drawn(size.width, 20_000, device), 3, None))
    active = (fitted.activations(states) > 0).sum(1).float().mean()
    left = (states - fitted.reconstruct(states)).square().sum()
    left /= (states - states.mean(0)).square().sum()
    return f"held out: {left:.4f} left, {active:.2f} act"


def stored(path: Path, size: Size, device: str) -> hs.Store:
    """Write a store of states in bfloat16."""
    plan = StorePlan({"model": "drawn"}, {}, (SITE,), {SITE: size.width}, "bfloat16")
    ids = tuple(range(TEXT))
    spans = ((0, 1),) * TEXT
    per_unit = TEXT * TEXTS_PER_UNIT
    count = size.stored // per_unit
    units = (
        [StoreSequence(text, 0, ids, spans, unit) for text in _texts(unit)]
        for unit in range(count)
    )
    writer = create(path, plan, units)
    batches = drawn(size.width, per_unit // 8, device)
    for unit in writer.pending():
        states = torch.cat(list(islice(batches, 8))).bfloat16().cpu()
        writer.commit(unit, {SITE: states.view(torch.int16).numpy().view(np.uint16)})
    writer.complete()
    return hs.open(path)


def _texts(unit: int) -> range:
    return range(unit * TEXTS_PER_UNIT, (unit + 1) * TEXTS_PER_UNIT)


def profile(size: Size, device: str) -> str:
    """Return what a step spends its time on."""
    from torch.profiler import ProfilerActivity, profile

    trainer, batches = prepared(size, device, ())
    several = list(islice(batches, 20))
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        for states in several:
            trainer.learn(states)
        _synchronize()
    order = f"self_{device}_time_total"
    averages = profiled.key_averages()
    return averages.table(sort_by=order, row_limit=50, max_name_column_width=70)


def _finished(way: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> None:
        # As in training, nobody waits for the GPU after each step.
        for _ in range(AT_ONCE):
            way()
        _synchronize()

    return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _since(begin: float) -> float:
    return time.perf_counter() - begin


def _where(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m labs.bench.dictionary", description=__doc__.splitlines()[0]
    )
    parser.add_argument("parts", nargs="*", default=["step", "store"])
    parser.add_argument("--device", default="cuda", choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument(
        "--seconds", type=float, default=1e9, help="stop training after these"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--to", type=Path, default=Path("dictionary.json"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
