"""Compute: the states of one unit, and a pipeline that writes a unit while the next is
computed.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope.errors import NotFinite
from hiddenscope.loading import parse_dtype
from hiddenscope.model import Model
from hiddenscope.passes import (
    HostMemory,
    Inputs,
    buffers_for,
    require_recordable,
    run_pass,
)
from hiddenscope.passes.buffers import StackBuffer
from hiddenscope.sites import Site
from hiddenscope.states.mixed import SiteValues, groups_of, of_groups
from hiddenscope.states.pool import Pool, as_vectors
from hiddenscope.states.pooling import parse_pooling
from hiddenscope.store import StorePlan, StoreSequence, Writer

# Units that are written at once: one core hashes more slowly than a good disk writes.
# With the one that is computed, three are in memory.
WRITERS = 2


@dataclass(frozen=True)
class Done:
    """A unit that has been committed, by this worker or by another one before."""

    unit: str
    committed_here: bool


class Unit:
    """The states of one unit.

    The forward passes run when this is created. The states may still be on their way
    from a GPU to host memory then; `values` waits for them.
    """

    def __init__(
        self,
        model: Model,
        sequences: Sequence[StoreSequence],
        plan: StorePlan,
        memory: HostMemory,
        batch_done: Callable[[int], None],
    ) -> None:
        self.sequences = sequences
        self.plan = plan
        self.sites = tuple(map(Site.parse, plan.sites))
        self.dtype = parse_dtype(plan.dtype)
        self._memory = memory
        self._batch_done = batch_done
        self._buffer: StackBuffer | None = None
        self._pooled: SiteValues | None = None
        ids = Inputs(tuple(sequence.ids for sequence in sequences))
        inputs = model.encode(ids)
        with model.lock:
            if plan.pool is None:
                buffers = buffers_for(
                    model, self.sites, inputs, self.dtype, memory=self._memory
                )
                # All sites of a store are of one stack.
                (self._buffer,) = buffers.values()
                for indices in _batches(self.sequences):
                    batch = inputs.some(indices)
                    run_pass(model, batch.pad(model), indices, buffers)
                    self._batch_done(len(batch.flat))
            else:
                self._pooled = self._pool(model, inputs, plan.pool)

    def _pool(self, model: Model, inputs: Inputs, pool: str) -> SiteValues:
        """Run the passes; return one vector for each sequence.

        The states of one batch are in memory at a time.
        """
        pooling = parse_pooling(pool)
        # The pooled vectors, `[site, text, width]` by width.
        groups = {}
        widths = tuple(self.plan.widths[site] for site in self.plan.sites)
        for width, count in Counter(widths).items():
            shape = (count, len(inputs), width)
            groups[width] = torch.empty(shape, dtype=self.dtype)
        pooled = of_groups(self.sites, widths, groups)
        pool_batch = Pool(inputs.lengths, pooling)
        for indices in _batches(self.sequences):
            batch = inputs.some(indices)
            buffers = buffers_for(model, self.sites, batch, memory=self._memory)
            numbers = range(len(batch))
            run_pass(model, batch.pad(model), numbers, buffers, checks=False)
            (stack_buffer,) = buffers.values()
            computed = groups_of(stack_buffer.finish())
            for target, states in zip(groups_of(pooled), computed, strict=True):
                vectors = as_vectors(pool_batch(states, indices))
                target[:, indices] = vectors.to(self.dtype)
            stack_buffer.release()
            self._batch_done(len(batch.flat))
        return pooled

    def values(self) -> Mapping[str, NDArray[Any]]:
        """Return the values of each site, bfloat16 as its bits.

        A NaN or an infinity raises an error.
        """
        if self._pooled is not None:
            values = self._pooled
            groups = groups_of(values)
            finite = all(bool(group.isfinite().all()) for group in groups)
        else:
            assert self._buffer is not None
            values = self._buffer.finish()
            finite = self._buffer.finite
        if not finite:
            # The first state that is not finite is named.
            reason = "their sum is not"
            for site, site_values in zip(self.sites, values, strict=True):
                bad_rows = (~site_values.isfinite().all(1)).nonzero()
                if len(bad_rows):
                    where = self._place(int(bad_rows[0]))
                    reason = f"a NaN or an infinity at {site}, {where}"
                    break
            raise NotFinite(
                "States are not finite",
                reason,
                "Look at the block that computes it, load the model in a wider dtype,"
                " or give dtype='float32'.",
            )
        # The rows of the tokens that are stored, where not all are.
        rows = []
        start = 0
        for sequence in self.sequences:
            rows += [start + index for index in sequence.kept(self.plan.every)]
            start += len(sequence.ids)
        by_site = {}
        for site, site_values in zip(self.sites, values, strict=True):
            if self.plan.every > 1:
                site_values = site_values[torch.tensor(rows)]
            site_values = site_values.contiguous()
            # numpy has no bfloat16.
            if site_values.dtype == torch.bfloat16:
                bits = site_values.view(torch.int16).numpy()
                by_site[str(site)] = bits.view(np.uint16)
            else:
                by_site[str(site)] = site_values.numpy()
        return by_site

    def release(self) -> None:
        """Let another unit have the memory. What `values` returned is then invalid."""
        if self._buffer is not None:
            self._buffer.release()

    def _place(self, row: int) -> str:
        """Return the text and the position of a row, in words."""
        for sequence in self.sequences:
            length = 1 if self._pooled is not None else len(sequence.ids)
            if row < length:
                break
            row -= length
        where = f"text {sequence.text:,}"
        if self._pooled is not None:
            return where
        # A later window of a text starts further on.
        return f"{where}, position {sequence.start + row}"


def _batches(sequences: Sequence[StoreSequence]) -> list[list[int]]:
    """Return the indices of the sequences of each batch, in the order they run."""
    batches = defaultdict(list)
    for index, sequence in enumerate(sequences):
        batches[sequence.batch].append(index)
    return [batches[number] for number in sorted(batches)]


class Pipeline:
    """Computes units in this thread and commits them in others.

    A slow disk slows the passes down, so that memory stays bounded.

    `report` is called with every unit that has been committed, and `batch_done` with
    the number of tokens of every batch that has been run, both by one thread at a time.
    The error of a unit that could not be committed is raised by the next `put`, or by
    `finish`.
    """

    def __init__(
        self,
        model: Model,
        writer: Writer,
        report: Callable[[Done], None],
        batch_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        require_recordable(model.module)
        self.model = model
        self.writer = writer
        self.report = report
        self._batch_done = batch_done
        self._error: BaseException | None = None
        self._reporting = threading.Lock()
        self._memory = HostMemory()
        self._free = threading.Semaphore(WRITERS)
        self._writing: list[threading.Thread] = []
        self._reading: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self.finish(raising=kind is None)

    def finish(self, *, raising: bool = True) -> None:
        """Wait until everything is committed."""
        for thread in self._writing:
            # An interrupt may have come before the last one was started.
            if thread.ident is not None:
                thread.join()
        if raising and self._error is not None:
            raise self._error

    def put(self, unit: str, upcoming: str | None = None) -> None:
        """Compute a unit and hand it over to be written; skip one that is committed.

        The sequences of the `upcoming` unit are read meanwhile: a GPU would wait for
        them.
        """
        if self._error is not None:
            raise self._error
        if self.writer.folder.record(unit).exists():
            self._report(unit, committed_here=False)
            return
        if self._reading is not None:
            self._reading.join()
        sequences = self.writer.sequences(unit)
        if upcoming is not None:
            self._reading = threading.Thread(target=self._read, args=(upcoming,))
            self._reading.start()
        computed = Unit(
            self.model, sequences, self.writer.plan, self._memory, self._report_batch
        )
        self._hand_over(unit, computed)

    def _read(self, unit: str) -> None:
        # Whoever asks for them next is told what is wrong with them.
        with suppress(Exception):
            self.writer.sequences(unit)

    def _hand_over(self, unit: str, computed: Unit) -> None:
        """Start a thread that writes a unit, as soon as there may be one more."""
        self._free.acquire()
        # A thread for each unit: an interrupt at any instant leaves no thread behind
        # that waits for more, as those of a pool would.
        thread = threading.Thread(
            target=self._write, args=(unit, computed), name="hiddenscope-write"
        )
        self._writing = [writing for writing in self._writing if writing.is_alive()]
        self._writing.append(thread)
        thread.start()

    def _write(self, unit: str, computed: Unit) -> None:
        try:
            if self._error is None:
                committed_here = self.writer.commit(unit, computed.values())
                self._report(unit, committed_here=committed_here)
        except BaseException as error:
            self._error = self._error or error
        finally:
            computed.release()
            self._free.release()

    def _report(self, unit: str, *, committed_here: bool) -> None:
        with self._reporting:
            self.report(Done(unit, committed_here))

    def _report_batch(self, tokens: int) -> None:
        with self._reporting:
            self._batch_done(tokens)
