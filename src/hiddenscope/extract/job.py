"""Job: an extraction of a corpus, planned and run, and the function that users call.

It is not a job of the app (`hiddenscope.app.jobs`), which is a question in a queue.
"""

from __future__ import annotations

import errno
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.errors import Error, FileError, PassError, TooLarge, is_out_of_memory
from hiddenscope.extract.compute import Done, Pipeline
from hiddenscope.extract.corpus import Corpus, SeenTexts
from hiddenscope.extract.engine import Engine, EngineKind, compute_units
from hiddenscope.extract.planning import (
    Planner,
    estimated_bytes,
    plan_without_corpus,
)
from hiddenscope.extract.worker import recipe_of
from hiddenscope.files import PathLike, printable
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import hooks
from hiddenscope.passes import EVERYTHING
from hiddenscope.sites import SitePatterns
from hiddenscope.states.pooling import Pooling, vector_pooling
from hiddenscope.store import (
    Store,
    StorePlan,
    Writer,
    create,
    damaged_texts,
    discard_damaged,
    recover_plan,
    resume_store,
)
from hiddenscope.store import open as open_store

# Damaged files and units that are named.
MAX_NAMED = 5


@checked
def extract(
    model: ModelLike,
    corpus: Any,
    to: PathLike,
    *,
    sites: SitePatterns = EVERYTHING,
    pool: Pooling | None = None,
    dtype: str | torch.dtype | None = None,
    engine: EngineKind | Engine = "local",
) -> Store:
    """Store the states of every text of a corpus in the folder `to`.

    `corpus` is whatever `hs.read` takes, a folder of such files, "-" for stdin, or an
    `hs.Corpus` with windows for long texts. It is never whole in memory. `pool` keeps
    one vector for each text ("mean", "max", "last", "first", "cls" or a position),
    `dtype` another precision. `engine` may be an `hs.Engine` with workers. A job that
    was stopped goes on when it is called again.

    >>> import tempfile
    >>> from hiddenscope.testing import tiny_model, tiny_tokenizer
    >>> model = (tiny_model("gpt2"), tiny_tokenizer())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     store = extract(model, ["The rest.", "A cat sat."], folder, sites="layer.*")
    ...     [str(site) for site in store.sites]
    ['layer.0', 'layer.1', 'layer.2', 'layer.3']
    """
    job = ExtractJob.plan(
        model, corpus, to, sites=sites, pool=pool, dtype=dtype, engine=engine
    )
    for line in job.cost.lines():
        progress.note(line)
    reported = 0
    with progress.track("Extracting tokens", total=job.pending_tokens) as advance:

        def report(now: JobProgress) -> None:
            nonlocal reported
            advance(now.tokens_computed - reported)
            reported = now.tokens_computed

        try:
            job.run(report, every_batch=True)
        except KeyboardInterrupt:
            progress.note(f"Stopped: {job.how_to_resume()}")
            raise
    return open_store(to)


@dataclass(frozen=True)
class JobProgress:
    """How far a job is, of the units that were pending when it began.

    Speeds count what this job committed itself, so `seconds_left` is too long while
    another job works on the same store. `tokens_done` are those of units that are kept;
    `tokens_computed` also counts the batches of units that are still at work.
    """

    units: int
    units_done: int
    tokens: int
    tokens_done: int
    tokens_computed: int
    bytes_written: int
    seconds: float
    tokens_per_second: float
    seconds_left: float | None

    def line(self) -> str:
        """Return the progress as one line of text."""
        parts = [
            f"{self.tokens_computed:,} of {self.tokens:,} tokens",
            f"{self.units_done:,} of {self.units:,} units kept",
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the progress as a dict for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class JobCost:
    """What a job will cost, as it was when the job was planned: `run` does not change
    it.

    `units_left` and `bytes_left` are what was not in the store yet. All `tokens` are
    computed; the states of `tokens_kept` of them are written, or in a pooled store of
    none. `damaged` are the files of the plan and the units that were damaged or lost
    since the store was begun, and are written again.
    """

    texts: int
    duplicates: int
    skipped: int
    sequences: int
    tokens: int
    tokens_kept: int
    sites: int
    units: int
    units_left: int
    bytes: int
    bytes_left: int
    bytes_free: int
    damaged: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the cost as lines of text."""
        notes = []
        if self.duplicates:
            notes.append(f"{self.duplicates:,} of them copies of others")
        if self.skipped:
            notes.append(f"{self.skipped:,} broken lines left out besides")
        texts = f"{self.texts:,} texts"
        if notes:
            texts += f" ({', '.join(notes)})"
        tokens = f"{self.tokens:,} tokens"
        if 0 < self.tokens_kept < self.tokens:
            tokens += f" ({self.tokens_kept:,} of them kept)"

        plural = "" if self.units == 1 else "s"
        units = f"{self.units:,} unit{plural}, {format_size(self.bytes)}"
        if self.units_left != self.units:
            units += f"; {self.units - self.units_left:,} are there already"

        left = (
            f"still to write: {format_size(self.bytes_left)}"
            f" ({format_size(self.bytes_free)} free on this disk)"
        )

        lines = [f"{texts}, {tokens}, {self.sites} sites", units, left]
        if self.damaged:
            named = ", ".join(self.damaged[:MAX_NAMED])
            if len(self.damaged) > MAX_NAMED:
                named += f" and {len(self.damaged) - MAX_NAMED:,} more"
            lines.append(f"damaged, and made again: {named}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the cost as a dict for JSON."""
        return asdict(self)


def format_duration(seconds: float) -> str:
    """Return seconds as a person says them.

    >>> format_duration(9), format_duration(200), format_duration(9000)
    ('9 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def format_size(count: float) -> str:
    """Return a number of bytes as a person says it.

    >>> format_size(150), format_size(1500), format_size(2.5e9)
    ('150 bytes', '1.5 kB', '2.5 GB')
    """
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f} {prefix}B"
    return f"{count:.0f} bytes"


@checked
class ExtractJob:
    """A job that is planned: `cost` says what it will take, `run` does it.

    `cost` and `pending` stay as they were when the job was planned; `writer.pending()`
    is what is pending now.

    >>> import tempfile
    >>> from hiddenscope.testing import tiny_model, tiny_tokenizer
    >>> model = (tiny_model("gpt2"), tiny_tokenizer())
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     job = ExtractJob.plan(model, ["The rest.", "A cat sat."], folder)
    ...     job.run()
    ...     job.cost.texts, job.cost.units_left, job.writer.pending()
    (2, 1, [])
    """

    def __init__(
        self,
        model: Model,
        writer: Writer,
        engine: Engine,
        *,
        new: bool,
        damaged: Sequence[str] = (),
    ) -> None:
        self.model = model
        self.writer = writer
        self.engine = engine
        self.pending = writer.pending()
        # Two jobs may work on one store. They begin at different units.
        if not new and self.pending:
            first = random.randrange(len(self.pending))
            self.pending = self.pending[first:] + self.pending[:first]
        plan = writer.plan
        sizes = {}
        for unit in plan.units:
            sizes[unit.name] = estimated_bytes(plan, unit.sequences, unit.tokens)
        self.cost = JobCost(
            texts=plan.corpus["count"],
            duplicates=plan.corpus["duplicates"],
            skipped=plan.corpus["skipped"],
            sequences=sum(unit.sequences for unit in plan.units),
            tokens=sum(unit.tokens for unit in plan.units),
            tokens_kept=plan.rows if plan.pool is None else 0,
            sites=len(plan.sites),
            units=len(plan.units),
            units_left=len(self.pending),
            bytes=sum(sizes.values()),
            bytes_left=sum(sizes[name] for name in self.pending),
            bytes_free=free_on_disk(writer.path),
            damaged=tuple(damaged),
        )

    @classmethod
    def plan(
        cls,
        model: ModelLike,
        corpus: Any,
        to: PathLike,
        *,
        sites: SitePatterns = EVERYTHING,
        pool: Pooling | None = None,
        dtype: str | torch.dtype | None = None,
        engine: EngineKind | Engine = "local",
    ) -> ExtractJob:
        """Read the corpus and plan a job, with the parameters of `hs.extract`.

        This creates the store on disk, with its plan but without states. In a folder
        that holds a job already, the same job is continued and another one is refused.
        The records of damaged units are deleted, so that `run` computes these again.
        """
        if pool is not None:
            pool = vector_pooling(pool, PassError)
        if not isinstance(engine, Engine):
            engine = Engine(engine)
        if not isinstance(corpus, Corpus):
            corpus = Corpus(corpus)
        loaded = as_model(model)
        path = Path(to)
        with _explained(path):
            stored = recover_plan(path)
            environment = engine.unit_limits(stored)
            environment["threads"] = engine.threads_per_worker(stored)
            requested = plan_without_corpus(
                loaded, sites, pool, dtype, corpus.every, environment
            )
            planner = Planner(loaded, corpus, requested)
            writer, damaged = _open_writer(planner, path, stored)
            return cls(loaded, writer, engine, new=stored is None, damaged=damaged)

    @property
    def pending_tokens(self) -> int:
        """Return the tokens of the units that were pending when the job was planned."""
        pending = set(self.pending)
        units = self.writer.plan.units
        return sum(unit.tokens for unit in units if unit.name in pending)

    def run(
        self,
        report: Callable[[JobProgress], None] = lambda progress: None,
        *,
        every_batch: bool = False,
    ) -> None:
        """Compute what is pending, and complete the store.

        `report` is called after every unit, and with `every_batch` also after every
        batch. A cluster reports units alone.
        """
        check_disk(self.writer.path, self.cost.bytes_left)
        with _explained(self.writer.path):
            if self.pending:
                self._compute(_Meter(self, report, every_batch=every_batch))
            # Another job may still be at work on the rest, and then completes it.
            if not self.writer.pending():
                self.writer.complete()

    def _compute(self, meter: _Meter) -> None:
        engine, writer, pending = self.engine, self.writer, self.pending
        workers = engine.workers or 1
        if engine.kind == "local" and workers == 1:
            pipeline = Pipeline(
                self.model, writer, meter.unit_done, batch_done=meter.batch_done
            )
            # Sums over another number of threads have other last bits.
            threads = int(writer.plan.environment["threads"])
            with hooks.threads(threads), pipeline:
                for unit, upcoming in zip_longest(pending, pending[1:]):
                    pipeline.put(unit, upcoming)
            return
        with recipe_of(self.model) as recipe:
            compute_units(
                engine, recipe, writer, pending, meter.unit_done, meter.batch_done
            )

    def how_to_resume(self) -> str:
        """Return a sentence that says how a job that was stopped goes on."""
        units = len(self.writer.plan.units)
        done = units - len(self.writer.pending())
        return (
            f"{done:,} of {units:,} units are kept in {self.writer.folder.shown}; the"
            " same command again goes on."
        )


class _Meter:
    """Counts what is done, and reports it."""

    def __init__(
        self,
        job: ExtractJob,
        report: Callable[[JobProgress], None],
        *,
        every_batch: bool,
    ) -> None:
        self.job = job
        self.report = report
        self.every_batch = every_batch
        self.begin = time.perf_counter()
        self.total_tokens = job.pending_tokens
        self.units_done = 0
        self.bytes_written = 0
        # Tokens of units that this job committed, of units that other jobs committed,
        # and of all batches that this job ran.
        self.own_tokens = 0
        self.foreign_tokens = 0
        self.batch_tokens = 0

    def batch_done(self, tokens: int) -> None:
        """Count one more batch, and report if every batch is reported."""
        self.batch_tokens += tokens
        if self.every_batch:
            self.report(self._progress())

    def unit_done(self, done: Done) -> None:
        """Count one more unit, and report."""
        plan = self.job.writer.plan
        unit = plan.by_name[done.unit]
        self.units_done += 1
        if done.committed_here:
            self.bytes_written += plan.rows_of(unit) * plan.row_bytes
            self.own_tokens += unit.tokens
        else:
            self.foreign_tokens += unit.tokens
        self.report(self._progress())

    def _progress(self) -> JobProgress:
        seconds = time.perf_counter() - self.begin
        # A cluster reports no batches.
        computed = max(self.own_tokens, self.batch_tokens)
        speed = computed / seconds
        # The batches of a unit that two workers computed are counted twice.
        tokens_computed = min(self.total_tokens, self.foreign_tokens + computed)
        if self.units_done == len(self.job.pending):
            tokens_computed = self.total_tokens
        seconds_left = None
        if speed:
            seconds_left = (self.total_tokens - tokens_computed) / speed
        return JobProgress(
            units=len(self.job.pending),
            units_done=self.units_done,
            tokens=self.total_tokens,
            tokens_done=self.own_tokens + self.foreign_tokens,
            tokens_computed=tokens_computed,
            bytes_written=self.bytes_written,
            seconds=seconds,
            tokens_per_second=speed,
            seconds_left=seconds_left,
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise an error of ours where memory, descriptors or temporary files run out."""
    problem = f"Cannot extract states to {str(path)[:200]!a}"
    try:
        yield
    except Exception as error:
        if _has_too_many_files(error):
            remedy = (
                "Close some, give fewer workers, or raise the limit (ulimit -n); the"
                " same call again goes on."
            )
            raise FileError(problem, "too many files are open", remedy) from error
        if isinstance(error, Error):
            raise
        if is_out_of_memory(error):
            remedy = (
                "Give fewer sites or workers, or smaller units, as in"
                " hs.Engine(unit_bytes=10**7)."
            )
            raise TooLarge(problem, "memory ran out", remedy) from error
        if isinstance(error, OSError | sqlite3.Error):
            remedy = (
                "See that there is room for it and for temporary files; the same call"
                " again goes on."
            )
            raise FileError(problem, str(error)[:200], remedy) from error
        raise


def _has_too_many_files(error: BaseException | None) -> bool:
    """Return whether an error comes from too many open files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def free_on_disk(path: Path) -> int:
    """Return the bytes that are free where a folder is, or will be."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(path: Path, needed: int) -> None:
    """Refuse a job for which the disk has no room, before it begins."""
    free = free_on_disk(path)
    if needed > free:
        raise FileError(
            f"Too little room for the states in {str(path)[:200]!a}",
            f"it takes {format_size(needed)}, and {format_size(free)} are free there",
            "Give fewer sites, dtype='bfloat16' or pool='mean', or another disk.",
        )


def _open_writer(
    planner: Planner, path: Path, stored: StorePlan | None
) -> tuple[Writer, list[str]]:
    """Open the store of a job; return its writer, and what was damaged.

    Files of the plan that are damaged are written again here. Damaged units become
    pending.
    """
    requested = planner.plan
    damaged = [] if stored is None else damaged_texts(path)
    # The corpus may be a stream, which can be read only once: where it is read to write
    # the plan, `create` refuses another corpus.
    if stored is None or damaged:
        with SeenTexts() as text_index:
            # Called once the corpus has been read.
            def describe() -> dict[str, Any]:
                size = estimated_bytes(requested, planner.sequences, planner.tokens)
                if stored is None:
                    check_disk(path, size)
                duplicates = planner.texts - text_index.new
                return planner.described() | {"duplicates": duplicates}

            create(
                path,
                requested,
                planner.units(text_index, stored.units if stored else ()),
                text_index.duplicates(),
                planner.strings,
                corpus=describe,
            )
    else:
        for _ in planner.read("Reading the corpus"):
            pass
        described = planner.described()
        # What follows from the texts is not computed again: the hash of the corpus is
        # compared.
        described["duplicates"] = stored.corpus.get("duplicates")
        requested = replace(
            requested,
            corpus=described,
            units=stored.units,
            duplicates=stored.duplicates,
            strings=stored.strings,
        )
        stored.check_same(requested, printable(path))
    writer = resume_store(path)
    # Reading every shard of a large store takes hours, so it is done only where nothing
    # else is left to do.
    bad_units = discard_damaged(path, read_shards=not writer.pending())
    return writer, damaged + [f"unit {unit}" for unit in bad_units]
