"""Job: an extraction (a corpus, a model and a store), what it will cost, and how far it
is.

A job here is an extraction. It is not a job of the app (`hiddenscope.app.jobs`), which
is a question in its queue.
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import torch

from hiddenscope.arguments import checked
from hiddenscope.errors import (
    ArgumentError,
    Error,
    FileError,
    PassError,
    TooLarge,
    is_out_of_memory,
)
from hiddenscope.extract import local
from hiddenscope.extract import ray_engine as cluster
from hiddenscope.extract.compute import Done, Pipeline, bare_speed, cores, spec_of
from hiddenscope.extract.corpus import Corpus, SeenTexts
from hiddenscope.extract.planning import (
    UNIT_BYTES,
    ExtractSpec,
    Planner,
    choose,
    differences,
    plan_without_corpus,
    read_corpus,
)
from hiddenscope.extract.recipe import recipe_of
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
    resume,
)

LISTED = 5  # damaged files and units that are named

EngineKind: TypeAlias = Literal["local", "ray"]


@checked
@dataclass(frozen=True)
class Engine:
    """Where a job is computed: in this process, in several of this machine, or on a Ray
    cluster.

    `workers` are processes, one if not given (with Ray as many as the cluster has room
    for). `threads` are the torch threads per worker. If not given, a resumed job reuses
    the stored value; a new one takes torch's own with one worker, the cores divided by
    the workers with several, and one with Ray. `address` is that of a Ray cluster, such
    as "auto". `unit_bytes` bounds the states of a unit: each worker buffers about three
    units, and a crash loses at most these. `unit_tokens` bounds its tokens. If not
    given, a resumed job keeps the units of the store; in a new one they have 256 MB,
    and on a CPU about a trillion floating-point operations.

    >>> Engine(workers=2).kind
    'local'
    """

    kind: EngineKind = "local"
    workers: int | None = None
    threads: int | None = None
    address: str | None = None
    unit_bytes: int | None = None
    unit_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "unit_bytes", "unit_tokens"):
            value = getattr(self, name)
            if isinstance(value, int) and value < 1:
                raise ArgumentError(
                    f"{name} must be at least 1, got {value}",
                    "it is too small",
                    "Give 1 or more.",
                )
        if self.kind not in get_args(EngineKind):
            reason = f"there are {' and '.join(get_args(EngineKind))}"
            raise ArgumentError(
                f"No engine {str(self.kind)[:40]!r}", reason, "Choose one of them."
            )
        if self.address is not None and self.kind != "ray":
            raise ArgumentError(
                "Cannot use an address",
                f"the engine is {self.kind!r}",
                "Give engine='ray' with it.",
            )

    def threads_of_each(self, stored: StorePlan | None) -> int:
        """The threads of a worker: as given, or as the store was begun with."""
        if self.threads is not None:
            return self.threads
        if stored is not None and isinstance(stored.environment.get("threads"), int):
            return int(stored.environment["threads"])
        if self.kind == "local":
            return (
                torch.get_num_threads()
                if self.workers in (None, 1)
                else max(1, cores() // (self.workers or 1))
            )
        return 1

    def unit_limits(self, stored: StorePlan | None) -> dict[str, int]:
        """Return the limits of a unit by name: as given, or as the store was begun
        with.

        A limit that is neither given nor in the store is left out.
        """
        limits = {} if stored is None else stored.environment
        asked = {"unit_bytes": self.unit_bytes, "unit_tokens": self.unit_tokens}
        if stored is None and self.unit_bytes is None:
            asked["unit_bytes"] = UNIT_BYTES
        chosen = {}
        for name, value in asked.items():
            limit = limits.get(name) if value is None else value
            if isinstance(limit, int):
                chosen[name] = limit
        return chosen


@dataclass(frozen=True)
class JobProgress:
    """How far a job is, of the units that were pending when it began.

    `share_of_bare_pass` is the time of the forward passes alone over the time taken: 1
    means no overhead. It is an estimate, from the speed of one batch that is timed when
    the job is planned. It is None for a job on a cluster, for one that is too small to
    be timed, and until this job has committed a unit. Speeds count what this job
    committed itself, so `seconds_left` is too long while another job works on the same
    store. `tokens_done` are those of units that are kept; `tokens_computed` also counts
    the batches of units that are still at work.
    """

    units: int
    units_done: int
    tokens: int
    tokens_done: int
    tokens_computed: int
    bytes_written: int
    seconds: float
    tokens_per_second: float
    share_of_bare_pass: float | None
    seconds_left: float | None

    def line(self) -> str:
        """The progress as one line of text."""
        share = (
            ""
            if self.share_of_bare_pass is None
            else f", {self.share_of_bare_pass:.0%} of the bare pass"
        )
        left = (
            "" if self.seconds_left is None else f", {duration(self.seconds_left)} left"
        )
        tokens = f"{self.tokens_computed:,} of {self.tokens:,} tokens"
        units = f"{self.units_done:,} of {self.units:,} units kept"
        return f"{tokens}, {units}, {self.tokens_per_second:,.0f} tokens/s{share}{left}"

    def to_json(self) -> dict[str, Any]:
        """The progress as a dictionary for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class JobCost:
    """What a job will cost, as it was when the job was planned: `run` does not change
    it.

    `seconds` is for the forward passes; None where they run elsewhere, or are few.
    `units_left` and `bytes_left` are what was not in the store yet. All `tokens` are
    computed; the states of `tokens_kept` of them are written, or in a pooled store of
    none. `damaged` are the files of the plan and the units that were damaged or lost
    since the store was begun, and are made again.
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
    seconds: float | None
    damaged: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The cost as lines of text."""
        notes = (
            [f"{self.duplicates:,} of them copies of others"] if self.duplicates else []
        )
        notes += (
            [f"{self.skipped:,} broken lines left out besides"] if self.skipped else []
        )
        texts = f"{self.texts:,} texts" + (f" ({', '.join(notes)})" if notes else "")
        kept = (
            f" ({self.tokens_kept:,} of them kept)"
            if 0 < self.tokens_kept < self.tokens
            else ""
        )
        found = (
            ""
            if self.units_left == self.units
            else f"; {self.units - self.units_left:,} are there already"
        )
        time_left = "" if self.seconds is None else f", about {duration(self.seconds)}"
        more = (
            f" and {len(self.damaged) - LISTED:,} more"
            if len(self.damaged) > LISTED
            else ""
        )
        damaged = (
            [f"damaged, and made again: {', '.join(self.damaged[:LISTED])}{more}"]
            if self.damaged
            else []
        )
        return [
            f"{texts}, {self.tokens:,} tokens{kept}, {self.sites} sites",
            f"{self.units:,} unit{'s' * (self.units != 1)}, {size(self.bytes)}{found}",
            (
                f"still to write: {size(self.bytes_left)} ({size(self.bytes_free)} free"
                f" on this disk){time_left}"
            ),
            *damaged,
        ]

    def to_json(self) -> dict[str, Any]:
        """The cost as a dictionary for JSON."""
        return asdict(self)


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(9), duration(200), duration(9000)
    ('9 s', '3 min', '2.5 h')
    """
    return (
        f"{seconds:.0f} s"
        if seconds < 100
        else f"{seconds / 60:.0f} min"
        if seconds < 6000
        else f"{seconds / 3600:.1f} h"
    )


def size(count: float) -> str:
    """Bytes as a person says them.

    >>> size(1500), size(2.5e9)
    ('1.5 kB', '2.5 GB')
    """
    power = next((power for power in (4, 3, 2, 1) if count >= 1000**power), 0)
    return (
        f"{count:.0f} bytes"
        if not power
        else f"{count / 1000**power:.1f} {'kMGT'[power - 1]}B"
    )


@checked
class ExtractJob:
    """A job that is planned: `cost` says what it will take, `run` does it.

    `cost` and `pending` stay as they were when the job was planned; `writer.pending()`
    is what is pending now.

    >>> import tempfile
    >>> from hiddenscope.testing import tiny_model, tiny_tokenizer
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     job = ExtractJob.plan((tiny_model("gpt2"), tiny_tokenizer()), ["The rest.", "A cat sat."], folder)
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
        self.model, self.writer, self.engine = model, writer, engine
        self.spec = spec_of(writer.plan)
        self.pending = writer.pending()
        if not new and self.pending:  # two jobs at once begin at different units
            first = random.randrange(len(self.pending))
            self.pending = self.pending[first:] + self.pending[:first]
        self._speed: float | None = None
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
        """Read the corpus and plan a job, with the parameters of `hs.extract`; no
        states are stored yet.

        This creates the store on disk, with its plan. A local job that is large enough
        runs two batches, of which it times one. In a folder that holds a job already,
        the same one is found again, and another one refused; the records of damaged
        units are deleted, so that `run` computes these again.
        """
        if pool is not None:
            pool = parse_pooling(pool, PassError)
        chosen = engine if isinstance(engine, Engine) else Engine(engine)
        loaded = as_model(model)
        texts = corpus if isinstance(corpus, Corpus) else Corpus(corpus)
        spec = choose(loaded, sites, pool, dtype, texts.every)
        with _explained(Path(to)):
            writer, new, damaged = _writer(loaded, texts, Path(to), spec, chosen)
            return cls(loaded, writer, chosen, new=new, damaged=damaged)

    def _cost(self, damaged: tuple[str, ...]) -> JobCost:
        units, pending = self.writer.plan.units, set(self.pending)
        tokens_left = sum(unit.tokens for unit in units if unit.name in pending)
        bytes_in_all, bytes_left = (
            sum(
                self.spec.bytes(unit.sequences, unit.tokens)
                for unit in units
                if unit.name in names
            )
            for names in ({unit.name for unit in units}, pending)
        )
        seconds = None
        if self.engine.kind == "local" and pending:
            with hooks.threads(self._threads):
                self._speed = bare_speed(
                    self.model,
                    self.writer.sequences(self.pending[0]),
                    self.spec,
                    tokens_left,
                )
            seconds = (
                tokens_left / self._speed / (self.engine.workers or 1)
                if self._speed
                else None
            )
        corpus = self.writer.plan.corpus
        return JobCost(
            texts=corpus["count"],
            duplicates=corpus["duplicates"],
            skipped=corpus["skipped"],
            sequences=sum(unit.sequences for unit in units),
            tokens=sum(unit.tokens for unit in units),
            tokens_kept=self.writer.plan.rows if self.spec.pool is None else 0,
            sites=len(self.writer.plan.sites),
            units=len(units),
            units_left=len(pending),
            bytes=bytes_in_all,
            bytes_left=bytes_left,
            bytes_free=free_on_disk(self.writer.path),
            seconds=seconds,
            damaged=damaged,
        )

    @property
    def _threads(self) -> int:
        return int(self.writer.plan.environment["threads"])

    def run(
        self,
        report: Callable[[JobProgress], None] = lambda progress: None,
        *,
        every_batch: bool = False,
    ) -> None:
        """Compute what is pending, and complete the store.

        `report` is called after every unit, and with `every_batch` also after every
        batch (on a cluster only units are known of).
        """
        check_disk(self.writer.path, self.cost.bytes_left)
        with _explained(self.writer.path):
            if self.pending:
                self._compute(_Meter(self, report, every_batch=every_batch))
            if not self.writer.pending():  # or another job is at work on the rest
                self.writer.folder.remove_leftovers()
                self.writer.complete()

    def _compute(self, meter: _Meter) -> None:
        engine, done = self.engine, meter.unit_done
        if engine.kind == "local" and engine.workers in (None, 1):
            pipeline = Pipeline(
                self.model, self.writer, done, self._speed, batch_done=meter.batch_done
            )
            # Sums over more or fewer threads have other last bits.
            with hooks.threads(self._threads), pipeline:
                for unit in self.pending:
                    pipeline.put(unit)
            return
        with recipe_of(self.model) as recipe:
            if engine.kind == "local":
                workers = engine.workers or 1
                local.run(
                    recipe,
                    self.writer,
                    self.pending,
                    workers,
                    done,
                    meter.batch_done,
                    self._speed,
                )
            else:
                cluster.run(
                    recipe,
                    self.writer,
                    self.pending,
                    engine.workers,
                    engine.address,
                    done,
                )

    def how_to_resume(self) -> str:
        """How a job that was stopped goes on, in a sentence."""
        done, units = (
            len(self.writer.plan.units) - len(self.writer.pending()),
            len(self.writer.plan.units),
        )
        return (
            f"{done:,} of {units:,} units are kept in {self.writer.folder.shown}; the"
            " same command again goes on."
        )


class _Meter:
    """Counts what is done."""

    def __init__(
        self,
        job: ExtractJob,
        report: Callable[[JobProgress], None],
        *,
        every_batch: bool,
    ) -> None:
        self.job, self.report, self.every_batch = job, report, every_batch
        self.begin = time.perf_counter()
        names = set(job.pending)
        self.all_units = len(names)
        self.all_tokens = sum(
            unit.tokens for unit in job.writer.plan.units if unit.name in names
        )
        self.units = self.tokens = self.bytes = 0
        # Tokens of units that this job committed, of those that others did, and of all
        # batches that this job ran.
        self.committed = self.found = self.run = 0
        self.bare = 0.0

    def batch_done(self, tokens: int) -> None:
        """Count one more batch, and report if every batch is reported."""
        self.run += tokens
        if self.every_batch:
            self.report(self._progress())

    def unit_done(self, done: Done) -> None:
        """Count one more unit, and report."""
        self.units += 1
        self.tokens += done.tokens
        if done.committed_here:
            self.bytes += done.bytes
            self.committed += done.tokens
            self.bare += done.bare_seconds
        else:
            self.found += done.tokens
        self.report(self._progress())

    def _progress(self) -> JobProgress:
        seconds = time.perf_counter() - self.begin
        workers = self.job.engine.workers or 1
        # A cluster tells of units alone, and a unit that was begun twice is counted
        # once.
        computed = max(self.committed, self.run)
        in_all = min(self.all_tokens, self.found + computed)
        if self.units == self.all_units:
            in_all = self.all_tokens
        speed = computed / seconds
        return JobProgress(
            units=self.all_units,
            units_done=self.units,
            tokens=self.all_tokens,
            tokens_done=self.tokens,
            tokens_computed=in_all,
            bytes_written=self.bytes,
            seconds=seconds,
            tokens_per_second=speed,
            share_of_bare_pass=self.bare / workers / seconds if self.bare else None,
            seconds_left=(self.all_tokens - in_all) / speed if speed else None,
        )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise an error of ours where memory, descriptors or the disk of temporary files
    run out.
    """
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
    """Tell whether an error, or what it came from, is that of a process that may open
    no more files.
    """
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        # sqlite has one error for everything that keeps it from opening a file.
        if isinstance(
            error, sqlite3.OperationalError
        ) and "unable to open database file" in str(error):
            return not _can_open()
        error = error.__cause__ or error.__context__
    return False


def _can_open() -> bool:
    """Tell whether this process can open one more file."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    return True


def free_on_disk(path: Path) -> int:
    """The bytes that are free where a folder is, or will be."""
    folder = path.absolute()
    while not folder.is_dir():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def check_disk(path: Path, needed: int) -> None:
    """Refuse a job for which the disk has no room, before it begins."""
    free = free_on_disk(path)
    if needed > free:
        reason = f"it takes {size(needed)}, and {size(free)} are free there"
        remedy = "Give fewer sites, dtype='bfloat16' or pool='mean', or another disk."
        raise FileError(
            f"Too little room for the states in {str(path)[:200]!a}", reason, remedy
        )


def _writer(
    model: Model, corpus: Corpus, path: Path, spec: ExtractSpec, engine: Engine
) -> tuple[Writer, bool, list[str]]:
    """The store of a job, whether it is a new one, and what was damaged in it: that is
    made, or is pending, again.
    """
    stored = recover_plan(path)
    damaged = [] if stored is None else damaged_texts(path)
    if stored is None:
        _check_writable(path)
    # The corpus may be a stream, which is read once: `create` refuses another one.
    if stored is None or damaged:
        _plan(model, corpus, path, spec, engine, stored)
    else:
        _check_same_job(stored, model, corpus, spec, engine)
    writer = resume(path)
    # To read every shard of a large store takes hours, so that is done where there is
    # nothing else to do.
    damaged += [
        f"unit {unit}"
        for unit in discard_damaged(path, read_shards=not writer.pending())
    ]
    return writer, stored is None, damaged


def _plan(
    model: Model,
    corpus: Corpus,
    path: Path,
    spec: ExtractSpec,
    engine: Engine,
    stored: StorePlan | None,
) -> None:
    """Write the plan of a store: a new one, or what is damaged of the one that is
    there.
    """
    units = () if stored is None else stored.units
    with SeenTexts() as seen:
        limits = engine.unit_limits(stored)
        unit_bytes = limits.get("unit_bytes", UNIT_BYTES)
        planner = Planner(model, corpus, spec, unit_bytes, limits.get("unit_tokens"))

        def plan() -> StorePlan:
            described = planner.described() | {
                "duplicates": planner.identity.count - seen.new
            }
            if stored is None:
                check_disk(path, spec.bytes(planner.sequences, planner.tokens))
            return replace(_asked(model, spec, engine, stored), corpus=described)

        create(
            path,
            plan,
            planner.units(seen, units),
            seen.duplicates(),
            planner.strings,
            every=spec.every,
        )


def _asked(
    model: Model, spec: ExtractSpec, engine: Engine, stored: StorePlan | None
) -> StorePlan:
    """The plan that is asked for, without its corpus; what is not given is as the store
    was begun with.
    """
    return plan_without_corpus(
        model, spec, engine.threads_of_each(stored), engine.unit_limits(stored)
    )


def _check_same_job(
    stored: StorePlan, model: Model, corpus: Corpus, spec: ExtractSpec, engine: Engine
) -> None:
    """Refuse to go on with a store that was begun with another model, corpus or option."""
    # Which texts are copies follows from the texts, so the number of copies is not
    # counted again.
    described = read_corpus(model, corpus) | {
        "duplicates": stored.corpus.get("duplicates")
    }
    asked = replace(_asked(model, spec, engine, stored), corpus=described)
    if (error := differences(stored, asked)) is not None:
        raise error


def _check_writable(path: Path) -> None:
    """Refuse a folder that cannot be written at once, and not after the corpus has been
    read.
    """
    folder = path.absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        reason = (
            f"{str(folder)[:200]!a} is"
            f" {'read-only' if folder.is_dir() else 'no folder'}"
        )
        raise FileError(
            f"Cannot write a store to {str(path)[:200]!a}",
            reason,
            "Give a folder that can be written.",
        )
