"""Job: an extraction of a corpus, planned and run.

It is not a job of the app (`hiddenscope.app.jobs`), which is a question in a queue.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from hiddenscope.arguments import checked
from hiddenscope.errors import Error, FileError, PassError, TooLarge, is_out_of_memory
from hiddenscope.extract import local
from hiddenscope.extract.compute import Done, Pipeline, spec_of
from hiddenscope.extract.corpus import Corpus, SeenTexts
from hiddenscope.extract.engine import Engine, EngineKind
from hiddenscope.extract.planning import (
    UNIT_BYTES,
    ExtractSpec,
    Planner,
    choose,
    plan_without_corpus,
    read_corpus,
)
from hiddenscope.extract.ray_engine import run_on_ray
from hiddenscope.extract.recipe import recipe_of
from hiddenscope.extract.status import JobCost, JobProgress, format_size
from hiddenscope.files import printable
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import hooks
from hiddenscope.passes import EVERYTHING
from hiddenscope.sites import SitePatterns
from hiddenscope.states.pooling import Pooling, parse_pooling
from hiddenscope.store import (
    StorePlan,
    Writer,
    create,
    damaged_texts,
    discard_damaged,
    recover_plan,
    resume_store,
)

# What follows from the texts of a plan.
FROM_TEXTS = ("units", "duplicates", "strings")


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
        self.spec = spec_of(writer.plan)
        self.pending = writer.pending()
        # Two jobs may work on one store. They begin at different units.
        if not new and self.pending:
            first = random.randrange(len(self.pending))
            self.pending = self.pending[first:] + self.pending[:first]
        self.cost = self._cost(tuple(damaged))

    @classmethod
    def plan(
        cls,
        model: ModelLike,
        corpus: Any,
        to: str | os.PathLike[str],
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
            pool = parse_pooling(pool, PassError)
        if not isinstance(engine, Engine):
            engine = Engine(engine)
        if not isinstance(corpus, Corpus):
            corpus = Corpus(corpus)
        loaded = as_model(model)
        spec = choose(loaded, sites, pool, dtype, corpus.every)
        path = Path(to)
        with _explained(path):
            stored = recover_plan(path)
            writer, damaged = _open_writer(loaded, corpus, path, spec, engine, stored)
            return cls(loaded, writer, engine, new=stored is None, damaged=damaged)

    @property
    def pending_tokens(self) -> int:
        """Return the tokens of the units that were pending when the job was planned."""
        pending = set(self.pending)
        units = self.writer.plan.units
        return sum(unit.tokens for unit in units if unit.name in pending)

    def _cost(self, damaged: tuple[str, ...]) -> JobCost:
        plan = self.writer.plan
        pending = set(self.pending)
        total_bytes = bytes_left = 0
        for unit in plan.units:
            unit_bytes = self.spec.bytes(unit.sequences, unit.tokens)
            total_bytes += unit_bytes
            if unit.name in pending:
                bytes_left += unit_bytes
        return JobCost(
            texts=plan.corpus["count"],
            duplicates=plan.corpus["duplicates"],
            skipped=plan.corpus["skipped"],
            sequences=sum(unit.sequences for unit in plan.units),
            tokens=sum(unit.tokens for unit in plan.units),
            tokens_kept=plan.rows if self.spec.pool is None else 0,
            sites=len(plan.sites),
            units=len(plan.units),
            units_left=len(pending),
            bytes=total_bytes,
            bytes_left=bytes_left,
            bytes_free=free_on_disk(self.writer.path),
            damaged=damaged,
        )

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
            if engine.kind == "local":
                local.run_locally(
                    recipe,
                    writer,
                    pending,
                    workers,
                    meter.unit_done,
                    meter.batch_done,
                )
            else:
                run_on_ray(
                    recipe,
                    writer,
                    pending,
                    engine.workers,
                    engine.address,
                    meter.unit_done,
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
        self.report = report
        self.every_batch = every_batch
        self.begin = time.perf_counter()
        self.total_units = len(job.pending)
        self.total_tokens = job.pending_tokens
        self.units_done = 0
        self.tokens_done = 0
        self.bytes_written = 0
        # Tokens of units that this job committed, of units that other jobs committed,
        # and of all batches that this job ran.
        self.committed_tokens = 0
        self.foreign_tokens = 0
        self.batch_tokens = 0

    def batch_done(self, tokens: int) -> None:
        """Count one more batch, and report if every batch is reported."""
        self.batch_tokens += tokens
        if self.every_batch:
            self.report(self._progress())

    def unit_done(self, done: Done) -> None:
        """Count one more unit, and report."""
        self.units_done += 1
        self.tokens_done += done.tokens
        if done.committed_here:
            self.bytes_written += done.bytes
            self.committed_tokens += done.tokens
        else:
            self.foreign_tokens += done.tokens
        self.report(self._progress())

    def _progress(self) -> JobProgress:
        seconds = time.perf_counter() - self.begin
        # A cluster reports no batches.
        computed = max(self.committed_tokens, self.batch_tokens)
        speed = computed / seconds
        # The batches of a unit that two workers computed are counted twice.
        tokens_computed = min(self.total_tokens, self.foreign_tokens + computed)
        if self.units_done == self.total_units:
            tokens_computed = self.total_tokens
        seconds_left = None
        if speed:
            seconds_left = (self.total_tokens - tokens_computed) / speed
        return JobProgress(
            units=self.total_units,
            units_done=self.units_done,
            tokens=self.total_tokens,
            tokens_done=self.tokens_done,
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
        # sqlite has one error for everything that keeps it from opening a file, so try
        # to open another one.
        from_sqlite = isinstance(error, sqlite3.OperationalError)
        if from_sqlite and "unable to open database file" in str(error):
            return not _can_open_files()
        error = error.__cause__ or error.__context__
    return False


def _can_open_files() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


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
    model: Model,
    corpus: Corpus,
    path: Path,
    spec: ExtractSpec,
    engine: Engine,
    stored: StorePlan | None,
) -> tuple[Writer, list[str]]:
    """Open the store of a job; return its writer, and what was damaged.

    Files of the plan that are damaged are written again here. Damaged units become
    pending.
    """
    damaged = []
    if stored is None:
        _check_writable(path)
    else:
        damaged += damaged_texts(path)
    # The corpus may be a stream, which can be read only once: where it is read to write
    # the plan, `create` refuses another corpus.
    if stored is None or damaged:
        _write_plan(model, corpus, path, spec, engine, stored)
    else:
        plan = _requested_plan(model, spec, engine, stored)
        # How many texts are copies follows from the texts, and is not counted again.
        duplicates = stored.corpus.get("duplicates")
        described = read_corpus(model, corpus) | {"duplicates": duplicates}
        # What follows from the texts is compared by the hash of the corpus.
        texts = {name: getattr(stored, name) for name in FROM_TEXTS}
        requested = replace(plan, corpus=described, **texts)
        stored.check_same(requested, printable(path))
    writer = resume_store(path)
    # Reading every shard of a large store takes hours, so it is done only where nothing
    # else is left to do.
    bad_units = discard_damaged(path, read_shards=not writer.pending())
    return writer, damaged + [f"unit {unit}" for unit in bad_units]


def _write_plan(
    model: Model,
    corpus: Corpus,
    path: Path,
    spec: ExtractSpec,
    engine: Engine,
    stored: StorePlan | None,
) -> None:
    """Write the plan of a new store, or the damaged files of an existing plan."""
    stored_units = () if stored is None else stored.units
    limits = engine.unit_limits(stored)
    planner = Planner(
        model,
        corpus,
        spec,
        limits.get("unit_bytes", UNIT_BYTES),
        limits.get("unit_tokens"),
    )
    with SeenTexts() as text_index:
        # Called once the corpus has been read.
        def plan() -> StorePlan:
            if stored is None:
                check_disk(path, spec.bytes(planner.sequences, planner.tokens))
            duplicates = planner.identity.count - text_index.new
            described = planner.described() | {"duplicates": duplicates}
            requested = _requested_plan(model, spec, engine, stored)
            return replace(requested, corpus=described)

        create(
            path,
            plan,
            planner.units(text_index, stored_units),
            text_index.duplicates(),
            planner.strings,
            every=spec.every,
        )


def _requested_plan(
    model: Model, spec: ExtractSpec, engine: Engine, stored: StorePlan | None
) -> StorePlan:
    """Build the requested plan, without its corpus.

    Unset options default to those of the existing store.
    """
    threads = engine.threads_per_worker(stored)
    return plan_without_corpus(model, spec, threads, engine.unit_limits(stored))


def _check_writable(path: Path) -> None:
    """Refuse a folder that cannot be written, before the corpus is read."""
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return
    fault = "read-only" if folder.is_dir() else "no folder"
    raise FileError(
        f"Cannot write a store to {str(path)[:200]!a}",
        f"{str(folder)[:200]!a} is {fault}",
        "Give a folder that can be written.",
    )
