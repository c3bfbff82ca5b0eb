"""Compute: the states of one unit, and a pipeline in which units are written while the
next is computed.
"""

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import NotFinite
from hiddenscope.extract.planning import ExtractSpec
from hiddenscope.loading import parse_dtype
from hiddenscope.model import Model
from hiddenscope.passes import HostMemory, Inputs, buffers_for, recordable, run
from hiddenscope.sites import Site
from hiddenscope.states.pool import Pool, as_vectors, check_cls
from hiddenscope.states.pooling import parse_pooling
from hiddenscope.store import StorePlan, StoreSequence, Writer

# Units that are written at once, since one core hashes slower than a good disk writes:
# three are held.
WRITERS = 2
WORTH_TIMING = (
    # A job of at least so many times the tokens of the batch that is timed.
    40
)


@dataclass(frozen=True)
class Done:
    """A unit that has been committed: by this worker, or (`committed_here` is False) by
    another one before.

    `bare_seconds` is what the bare forward pass over the unit would take.
    """

    unit: str
    tokens: int
    bytes: int
    bare_seconds: float
    committed_here: bool


def spec_of(plan: StorePlan) -> ExtractSpec:
    """What a plan asks of every text."""
    sites = tuple(map(Site.parse, plan.sites))
    return ExtractSpec(
        sites,
        plan.pool,
        parse_dtype(plan.dtype),
        plan.widths[plan.sites[0]],
        plan.every,
    )


class Unit:
    """The states of a unit: on their way to host memory when this is made, there when
    `values` is asked.
    """

    def __init__(
        self,
        model: Model,
        sequences: Sequence[StoreSequence],
        spec: ExtractSpec,
        memory: HostMemory,
        batch_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.sequences, self.spec, self._memory = sequences, spec, memory
        self._batch_done = batch_done
        self._buffers: list[Any] = []
        self._pooled: Tensor | None = None
        inputs = model.encode(Inputs(tuple(sequence.ids for sequence in sequences)))
        batches = _batches(sequences)
        with model.lock:
            if spec.pool is None:
                buffers = buffers_for(
                    model, spec.sites, inputs, spec.dtype, memory=memory
                )
                for indices in batches:
                    some = inputs.some(indices)
                    run(model, some.pad(model), indices, buffers)
                    batch_done(len(some.flat))
                self._buffers = list(buffers.values())
            else:
                self._pooled = self._pool(model, inputs, batches, spec.pool)

    def values(self) -> Mapping[str, Any]:
        """The values of each site as numpy sees them, bfloat16 as its bits; a NaN or an
        infinity is an error.
        """
        if self._pooled is not None:
            values, finite = self._pooled, bool(self._pooled.isfinite().all())
        else:
            buffer = self._buffers[0].buffer
            values, finite = buffer.finish(), buffer.finite
        if not finite:
            raise self._not_finite(values)
        kept = self._kept()
        return {
            str(site): _as_numpy(own if kept is None else own[kept])
            for site, own in zip(self.spec.sites, values, strict=True)
        }

    def _kept(self) -> Tensor | None:
        """The rows of the tokens that are kept; None where all are."""
        if self.spec.every == 1:
            return None
        starts = accumulate(
            (len(sequence.ids) for sequence in self.sequences), initial=0
        )
        pairs = zip(self.sequences, starts, strict=False)
        return torch.tensor(
            [
                start + index
                for own, start in pairs
                for index in own.kept(self.spec.every)
            ]
        )

    def release(self) -> None:
        """Let another unit have the memory; what `values` gave must not be read any
        more.
        """
        for buffer in self._buffers:
            buffer.buffer.release()

    def _pool(
        self, model: Model, inputs: Inputs, batches: Sequence[list[int]], how: str
    ) -> Tensor:
        """One vector for each sequence of the plan; the states of one batch are held at
        a time.
        """
        pooling = parse_pooling(how)
        if pooling == "cls":
            firsts = [sequence.ids[0] for sequence in self.sequences]
            check_cls(
                model.source(self.spec.sites[0].stack), firsts, self.sequences[0].text
            )
        pooled = torch.empty(
            len(self.spec.sites), len(inputs), self.spec.width, dtype=self.spec.dtype
        )
        pool = Pool(inputs.lengths, pooling)
        for indices in batches:
            some = inputs.some(indices)
            buffers = buffers_for(model, self.spec.sites, some, memory=self._memory)
            run(model, some.pad(model), range(len(some)), buffers)
            (buffer,) = buffers.values()
            vectors = as_vectors(pool(buffer.buffer.finish(), indices))
            pooled[:, indices] = vectors.to(self.spec.dtype)
            buffer.buffer.release()
            self._batch_done(len(some.flat))
        return pooled

    def _not_finite(self, values: Tensor) -> NotFinite:
        lengths = [
            len(sequence.ids) if self._pooled is None else 1
            for sequence in self.sequences
        ]
        ends = np.cumsum(lengths)
        for site, own in zip(self.spec.sites, values, strict=True):
            wrong = (~own.isfinite().all(1)).nonzero()
            if len(wrong):
                row = int(wrong[0])
                index = int(np.searchsorted(ends, row, side="right"))
                own_row, text = (
                    row - int(ends[index]) + lengths[index],
                    self.sequences[index].text,
                )
                # In the text, also of a later window.
                position = self.sequences[index].start + own_row
                where = f"{site}, text {text:,}" + (
                    f", position {position}" if self._pooled is None else ""
                )
                remedy = (
                    "Look at the block that computes it, load the model in a wider"
                    " dtype, or give dtype='float32'."
                )
                return NotFinite(
                    "States are not finite", f"a NaN or an infinity at {where}", remedy
                )
        return NotFinite(
            "States are not finite",
            "their sum is not",
            "Load the model in a wider dtype.",
        )


def bare_speed(
    model: Model, sequences: Sequence[StoreSequence], spec: ExtractSpec, tokens: int
) -> float | None:
    """Tokens a second of the bare forward pass, up to the deepest site; None where
    measuring would cost too much.

    One batch of a unit is timed, for a job of so many tokens.
    """
    inputs = model.encode(Inputs(tuple(sequence.ids for sequence in sequences)))
    costs, batches = inputs.costs, _batches(sequences)
    sizes = [sum(costs[index] for index in batch) for batch in batches]
    timed = len(batches) // 2
    if tokens < WORTH_TIMING * sizes[timed]:
        return None
    with model.lock:
        # The first pass of a process is a slow one.
        run_bare(model, inputs, [batches[sizes.index(min(sizes))]], spec)
        begin = time.perf_counter()
        run_bare(model, inputs, [batches[timed]], spec)
        return sizes[timed] / (time.perf_counter() - begin)


def run_bare(
    model: Model, inputs: Inputs, batches: Sequence[Sequence[int]], spec: ExtractSpec
) -> None:
    """The forward pass over some batches, up to the deepest site, and nothing else but
    one vector a text.
    """
    for indices in batches:
        some = inputs.some(indices)
        buffers = buffers_for(model, spec.sites[-1:], some, keep="device")
        run(model, some.pad(model), range(len(some)), buffers)
        for buffer in buffers.values():
            buffer.buffer.finish()
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)


def _batches(sequences: Sequence[StoreSequence]) -> list[list[int]]:
    """The indices of the sequences of each batch, in the order in which the batches
    run.
    """
    found: dict[int, list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        found[sequence.batch].append(index)
    return [found[number] for number in sorted(found)]


def _as_numpy(values: Tensor) -> Any:
    values = values.contiguous()
    return (
        values.view(torch.int16).numpy().view(np.uint16)
        if values.dtype == torch.bfloat16
        else values.numpy()
    )


class Pipeline:
    """Computes units in this thread and commits them in others: a slow disk slows the
    pass, and memory stays bounded.

    `report` is called, in one other thread at a time, with every unit that has been
    committed, and `failed` with the error of one that could not be, at once: the next
    `put` raises it too, but whoever waits for an answer before it gives another unit
    would wait for ever. `speed` is that of the bare pass. `batch_done` is called with
    the number of tokens of every batch that has been run.
    """

    def __init__(
        self,
        model: Model,
        writer: Writer,
        report: Callable[[Done], None],
        speed: float | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
        batch_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        recordable(model.module)
        self.model, self.writer, self.report, self.failed = (
            model,
            writer,
            report,
            failed,
        )
        self._batch_done = batch_done
        self.spec = spec_of(writer.plan)
        self._speed = speed
        self._error: BaseException | None = None
        self._reporting = threading.Lock()
        self._memory = HostMemory()
        self._free = threading.Semaphore(WRITERS)
        self._threads = ThreadPoolExecutor(WRITERS, "hiddenscope-write")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.shutdown()  # what was handed over is written
        if kind is None:
            self._raise()

    def put(self, unit: str) -> None:
        """Compute a unit and hand it over to be written; one that somebody else has
        committed is left alone.
        """
        self._raise()
        if self.writer.folder.record(unit).exists():
            self._report(unit, committed_here=False)
            return
        sequences = self.writer.sequences(unit)
        self._hand_over(
            unit,
            Unit(self.model, sequences, self.spec, self._memory, self._report_batch),
        )

    def _hand_over(self, unit: str, computed: Unit) -> None:
        """Give a unit to a thread that writes, when one is free."""
        while not self._free.acquire(timeout=0.2):
            self._raise()
        self._threads.submit(self._write, unit, computed)

    def _write(self, unit: str, computed: Unit) -> None:
        try:
            if self._error is None:
                self._report(
                    unit, committed_here=self.writer.commit(unit, computed.values())
                )
        except BaseException as error:
            self._error = self._error or error
            with self._reporting:
                self.failed(error)
        finally:
            computed.release()
            self._free.release()

    def _report(self, unit: str, *, committed_here: bool) -> None:
        with self._reporting:
            self.report(self._done(unit, committed_here=committed_here))

    def _report_batch(self, tokens: int) -> None:
        with self._reporting:
            self._batch_done(tokens)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _done(self, unit: str, *, committed_here: bool) -> Done:
        digest = self.writer.plan.by_name[unit]
        rows = self.writer.plan.rows_of(digest)
        seconds = digest.tokens / self._speed if self._speed else 0.0
        return Done(
            unit, digest.tokens, rows * self.spec.row_bytes, seconds, committed_here
        )


def cores() -> int:
    """The cores that this process may use."""
    return (
        len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1
    )
