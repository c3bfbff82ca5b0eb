"""Extract a corpus, against the bare passes of its batches and the loop people write.

Everything is counted: reading the file, tokenising, planning, the passes, the
checksums, and the bytes on the disk. The share of the bare pass is that of a corpus
whose passes take about a minute: in a job of seconds, most of what is beyond the passes
is the first touch of memory and the last fsync, which a corpus pays once.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

import hiddenscope as hs
from hiddenscope.extract import JobProgress
from hiddenscope.passes import Inputs
from hiddenscope.testing import tiny_tokenizer
from labs.bench import measure, ragged
from labs.bench.measure import Row

TEXTS, BATCH = 64, 32
SHARE_TEXTS = 256  # of the row of the share: half a minute of passes on two cores
SHARE_BAR, LOOP_BAR, WORKERS_BAR, MEMORY_BAR = 0.9, 2.5, 1.0, 1.1
SITES = "layer.*,final"
# Of the row of workers: many units, so that the last, which one worker has alone,
# weighs little.
UNIT_BYTES = 16 * 10**6
FEW, MANY = 2_000, 20_000
GPU_TEXTS, GPU_TOKENS, LONGER, RAW_BYTES = 1_024, 256, 8, 8 * 10**9
GPU_OPTIONS: dict[str, Any] = {"engine": hs.Engine(unit_bytes=2 * 10**9)}


@torch.no_grad()
def rows(repeats: int) -> list[Row]:
    """Compare a short job with the loop, two workers with one, and memory."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    with TemporaryDirectory() as name:
        folder = Path(name)
        corpus, what = _corpus(model, folder, TEXTS)
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: extracted(model, corpus, folder / "store"),
            "loop": lambda: _loop(model, corpus, folder / "loop"),
        }
        gain = measure.ratios(measure.interleaved(ways, repeats), "ours")["loop"]
        loop = f"batches of {BATCH} in order, output_hidden_states=True, torch.save"
        return [
            Row(
                "extract",
                f"{what}: throughput of extract / of {loop}",
                gain.cpu,
                gain.wall,
                LOOP_BAR,
                True,
            ),
            _workers(model, corpus, folder, repeats),
            _memory(),
        ]


@torch.no_grad()
def share_rows(repeats: int) -> list[Row]:
    """Compare one whole job over a corpus with one run of all its passes."""
    model = hs.load("smollm2", dtype="float32", device="cpu")
    with TemporaryDirectory() as name:
        folder = Path(name)
        corpus, what = _corpus(model, folder, SHARE_TEXTS)
        # Which runs two batches, so that nothing is cold.
        bare = bare_passes(model, corpus, folder / "planned")
        ways: dict[str, Callable[[], Any]] = {
            "ours": lambda: extracted(model, corpus, folder / "store"),
            "bare": bare,
        }
        share = measure.ratios(measure.interleaved(ways, repeats, warm=False), "ours")[
            "bare"
        ]
    what = f"{what}: throughput of extract / of bare passes over the same batches"
    return [Row("extract share", what, share.cpu, share.wall, SHARE_BAR, at_least=True)]


def _corpus(model: hs.Model, folder: Path, count: int) -> tuple[Path, str]:
    """Write a file of reviews; return it and what is extracted, in words."""
    texts, kind = ragged.texts(model.tokenizer, count)
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8"
    )
    what = (
        f"smollm2, float32, {len(texts)} {kind} of {ragged.SHORTEST} to"
        f" {ragged.LONGEST} tokens, {SITES}"
    )
    return corpus, what


def extracted(model: hs.Model, corpus: Any, to: Path, **options: Any) -> None:
    """Run the whole job into a folder that is removed first."""
    shutil.rmtree(to, ignore_errors=True)
    hs.extract(model, corpus, to, sites=SITES, **options)


def bare_passes(
    model: hs.Model, corpus: Any, to: Path, **options: Any
) -> Callable[[], None]:
    """Return what runs the base model over the batches of a job and nothing else."""
    shutil.rmtree(to, ignore_errors=True)
    writer = hs.ExtractJob.plan(model, corpus, to, sites=SITES, **options).writer
    base: Any = getattr(model.module, "model", model.module)
    batches = []
    for unit in writer.plan.units:
        by_batch: dict[int, list[Any]] = {}
        for row in writer.sequences(unit.name):
            by_batch.setdefault(row.batch, []).append(row.ids)
        batches += [Inputs(tuple(ids)).pad(model) for ids in by_batch.values()]
    given = [
        batch.arguments(base, masked=model.batching.needs_mask) | {"use_cache": False}
        for batch in batches
    ]

    def run() -> None:
        for arguments in given:
            base(**arguments)
        if model.device.type == "cuda":
            torch.cuda.synchronize()

    return run


def _loop(model: hs.Model, corpus: Path, to: Path) -> None:
    """Run the loop that people write."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    tokenizer: Any = model.tokenizer
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    texts = [
        json.loads(line)["text"] for line in corpus.read_text("utf-8").splitlines()
    ]
    for start in range(0, len(texts), BATCH):
        filled = tokenizer(
            texts[start : start + BATCH], padding=True, return_tensors="pt"
        )
        output = model.module(**filled, output_hidden_states=True)
        torch.save(
            [states.clone() for states in output.hidden_states], to / f"{start}.pt"
        )


def _workers(model: hs.Model, corpus: Path, folder: Path, repeats: int) -> Row:
    """Compare tokens a second of two processes of a thread with one of two."""
    ratios = []
    for _ in range(repeats):
        two, one = (
            _speed(model, corpus, folder / "workers", *given)
            for given in ((2, 1), (1, 2))
        )
        ratios.append(two / one)
    what = (
        "the same, once started: tokens a second of two workers with a thread each / of"
        " one process with two threads"
    )
    return Row(
        "extract",
        what,
        None,
        statistics.median(ratios),
        WORKERS_BAR,
        at_least=True,
        judged="wall",
    )


def _speed(
    model: hs.Model, corpus: Path, to: Path, workers: int, threads: int
) -> float:
    seen: list[tuple[float, JobProgress]] = []
    shutil.rmtree(to, ignore_errors=True)
    engine = hs.Engine(workers=workers, threads=threads, unit_bytes=UNIT_BYTES)
    job = hs.ExtractJob.plan(model, corpus, to, sites=SITES, engine=engine)
    job.run(lambda now: seen.append((time.perf_counter(), now)))
    (begin, first), (end, last) = seen[workers - 1], seen[-1]
    return (last.tokens_done - first.tokens_done) / (end - begin)


def _memory() -> Row:
    """Compare the peak of a process with that of one that extracts a tenth."""
    what = f"peak memory of a job over {MANY:,} texts / over {FEW:,}"
    if not sys.platform.startswith("linux"):
        return Row(
            "extract", what, skipped="the peak is read from /proc, which Linux has"
        )
    peaks = []
    for count in (FEW, MANY):
        command = [sys.executable, "-m", "labs.bench.extract", "memory", str(count)]
        peaks.append(
            int(
                subprocess.run(
                    command, capture_output=True, text=True, check=True
                ).stdout.split()[-1]
            )
        )
    return Row("extract", what, peaks[1] / peaks[0], None, MEMORY_BAR)


def _peak(count: int) -> int:
    """Return the peak of this process over a job with many units."""
    from hiddenscope.testing import tiny_model

    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    texts = (
        f"The cat number {number} sat on the mat, and so did the dog."
        for number in range(count)
    )
    with TemporaryDirectory() as folder:
        hs.extract(
            model, texts, Path(folder, "store"), engine=hs.Engine(unit_bytes=4 * 10**6)
        )
    return measure.resident("VmHWM")


def on_gpu(module: Any, repeats: int) -> dict[str, Any]:
    """Measure on a GPU the share of the bare pass that a job reaches, and the disk.

    The same with `final` alone, where the disk is not the limit. Planning is told
    apart: it takes one core and no GPU.
    """
    model = hs.load((module, tiny_tokenizer()))
    with TemporaryDirectory() as name:
        folder = Path(name)
        corpus = _corpus_of(GPU_TEXTS)
        bare = bare_passes(model, corpus, folder / "planned", **GPU_OPTIONS)
        seconds = measure.median(
            measure.interleaved({"bare": bare}, repeats)["bare"]
        ).wall
        before = _raw_speed(folder / "raw")
        found = _job_on_gpu(model, corpus, folder / "store", SITES, GPU_OPTIONS)
        # A disk may be slower when its own cache is full.
        after = _raw_speed(folder / "raw")
        longer = _corpus_of(
            GPU_TEXTS * LONGER
        )  # or the first and the last unit, which overlap with nothing, weigh most
        one_site = _job_on_gpu(model, longer, folder / "final", "final", {})
    speed = found["tokens"] / seconds
    for job in (found, one_site):
        job |= {
            "bare_tokens_per_second": speed,
            "share_of_bare_pass": job["tokens_per_second"] / speed,
        }
    return found | {"raw_bytes_per_second": [before, after], "final_alone": one_site}


def _corpus_of(texts: int) -> Any:
    words = "the cat sat on " * (GPU_TOKENS // 4)
    return hs.Corpus(
        [f"{number:06} {words}" for number in range(texts)],
        window=GPU_TOKENS,
        stride=GPU_TOKENS - 8,
    )


def _job_on_gpu(
    model: hs.Model, corpus: Any, path: Path, sites: str, options: dict[str, Any]
) -> dict[str, Any]:
    begin = time.perf_counter()
    job = hs.ExtractJob.plan(model, corpus, path, sites=sites, **options)
    planned = time.perf_counter() - begin
    seen: list[JobProgress] = []
    job.run(seen.append)
    last = seen[-1]
    return {
        "tokens": last.tokens,
        "bytes": last.bytes_written,
        "tokens_per_second": last.tokens / last.seconds,
        "bytes_per_second": last.bytes_written / last.seconds,
        "plan_seconds": planned,
    }


def _raw_speed(path: Path) -> float:
    """Return the bytes a second that the disk takes in one sequential write."""
    import os

    piece, begin, written = os.urandom(2**26), time.perf_counter(), 0
    with path.open("wb", buffering=0) as file:
        while written < RAW_BYTES:
            written += file.write(piece)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return written / seconds


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        print(_peak(int(sys.argv[2])))
