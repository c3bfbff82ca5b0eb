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
from torch import Tensor

from hiddenscope.errors import NotFinite
from hiddenscope.extract.planning import ExtractSpec
from hiddenscope.loading import parse_dtype
from hiddenscope.model import Model
from hiddenscope.passes import (
    HostMemory,
    Inputs,
    buffers_for,
    require_recordable,
    run_pass,
)
from hiddenscope.passes.buffers import Buffers
from hiddenscope.sites import Site
from hiddenscope.states.mixed import SiteValues, groups_of, of_groups
from hiddenscope.states.pool import Pool, as_vectors, check_cls
from hiddenscope.states.pooling import parse_pooling, requires_cls
from hiddenscope.store import StorePlan, StoreSequence, Writer

# Units that are written at once: one core hashes more slowly than a good disk writes.
# With the one that is computed, three are in memory.
WRITERS = 2


@dataclass(frozen=True)
class Done:
    """A unit that has been committed, by this worker or by another one before."""

    unit: str
    tokens: int
    bytes: int
    committed_here: bool


def spec_of(plan: StorePlan) -> ExtractSpec:
    """Return what a plan stores of every text."""
    return ExtractSpec(
        sites=tuple(map(Site.parse, plan.sites)),
        pool=plan.pool,
        dtype=parse_dtype(plan.dtype),
        widths=tuple(plan.widths[site] for site in plan.sites),
        every=plan.every,
    )


class Unit:
    """The states of one unit.

    The forward passes run when this is created. The states may still be on their way
    from a GPU to host memory then; `values` waits for them.
    """

    def __init__(
        self,
        model: Model,
        sequences: Sequence[StoreSequence],
        spec: ExtractSpec,
        memory: HostMemory,
        batch_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        self.sequences = sequences
        self.spec = spec
        self._memory = memory
        self._batch_done = batch_done
        self._buffers: Buffers | None = None
        self._pooled: SiteValues | None = None
        inputs = _inputs(model, sequences)
        with model.lock:
            if spec.pool is None:
                self._buffers = self._record(model, inputs)
            else:
                self._pooled = self._pool(model, inputs, spec.pool)

    def _record(self, model: Model, inputs: Inputs) -> Buffers:
        """Run the passes, recording the states of every token."""
        buffers = buffers_for(
            model, self.spec.sites, inputs, self.spec.dtype, memory=self._memory
        )
        for indices in _batches(self.sequences):
            batch = inputs.some(indices)
            run_pass(model, batch.pad(model), indices, buffers)
            self._batch_done(len(batch.flat))
        return buffers

    def _pool(self, model: Model, inputs: Inputs, pool: str) -> SiteValues:
        """Run the passes; return one vector for each sequence.

        The states of one batch are in memory at a time.
        """
        pooling = parse_pooling(pool)
        if requires_cls(pooling):
            first_tokens = [sequence.ids[0] for sequence in self.sequences]
            source = model.source(self.spec.sites[0].stack)
            check_cls(source, first_tokens, self.sequences[0].text)
        pooled = self._allocate(len(inputs))
        pool_batch = Pool(inputs.lengths, pooling)
        for indices in _batches(self.sequences):
            batch = inputs.some(indices)
            buffers = buffers_for(model, self.spec.sites, batch, memory=self._memory)
            numbers = range(len(batch))
            run_pass(model, batch.pad(model), numbers, buffers, checks=False)
            (stack_buffer,) = buffers.values()
            groups = zip(
                groups_of(pooled), groups_of(stack_buffer.finish()), strict=True
            )
            for target, states in groups:
                vectors = as_vectors(pool_batch(states, indices))
                target[:, indices] = vectors.to(self.spec.dtype)
            stack_buffer.release()
            self._batch_done(len(batch.flat))
        return pooled

    def _allocate(self, rows: int) -> SiteValues:
        """Return memory for the pooled vectors, `[site, text, width]` by width."""
        widths = self.spec.widths
        groups = {}
        for width, count in Counter(widths).items():
            groups[width] = torch.empty(count, rows, width, dtype=self.spec.dtype)
        return of_groups(self.spec.sites, widths, groups)

    def values(self) -> Mapping[str, NDArray[Any]]:
        """Return the values of each site, bfloat16 as its bits.

        A NaN or an infinity raises an error.
        """
        if self._pooled is not None:
            values = self._pooled
            groups = groups_of(values)
            finite = all(bool(group.isfinite().all()) for group in groups)
        else:
            assert self._buffers is not None
            stack_buffer = next(iter(self._buffers.values()))
            values = stack_buffer.finish()
            finite = stack_buffer.finite
        if not finite:
            raise self._not_finite(values)
        rows = self._kept_rows()
        by_site = {}
        for site, site_values in zip(self.spec.sites, values, strict=True):
            if rows is not None:
                site_values = site_values[rows]
            by_site[str(site)] = _as_numpy(site_values)
        return by_site

    def _kept_rows(self) -> Tensor | None:
        """Return the rows of the tokens that are stored, or None where all are."""
        if self.spec.every == 1:
            return None
        rows: list[int] = []
        start = 0
        for sequence in self.sequences:
            rows += [start + index for index in sequence.kept(self.spec.every)]
            start += len(sequence.ids)
        return torch.tensor(rows)

    def release(self) -> None:
        """Let another unit have the memory. What `values` returned is then invalid."""
        if self._buffers is not None:
            for stack_buffer in self._buffers.values():
                stack_buffer.release()

    def _not_finite(self, values: SiteValues) -> NotFinite:
        """Return an error that names the first state that is not finite."""
        problem = "States are not finite"
        for site, site_values in zip(self.spec.sites, values, strict=True):
            bad_rows = (~site_values.isfinite().all(1)).nonzero()
            if len(bad_rows):
                where = self._place(site, int(bad_rows[0]))
                return NotFinite(
                    problem,
                    f"a NaN or an infinity at {where}",
                    "Look at the block that computes it, load the model in a wider"
                    " dtype, or give dtype='float32'.",
                )
        return NotFinite(
            problem, "their sum is not", "Load the model in a wider dtype."
        )

    def _place(self, site: Site, row: int) -> str:
        """Return the text and the position of a row, in words."""
        if self._pooled is not None:
            return f"{site}, text {self.sequences[row].text:,}"
        ends = np.cumsum([len(sequence.ids) for sequence in self.sequences])
        index = int(np.searchsorted(ends, row, side="right"))
        sequence = self.sequences[index]
        row_in_sequence = row - (int(ends[index]) - len(sequence.ids))
        # A later window of a text starts further on.
        position = sequence.start + row_in_sequence
        return f"{site}, text {sequence.text:,}, position {position}"


def _inputs(model: Model, sequences: Sequence[StoreSequence]) -> Inputs:
    return model.encode(Inputs(tuple(sequence.ids for sequence in sequences)))


def _batches(sequences: Sequence[StoreSequence]) -> list[list[int]]:
    """Return the indices of the sequences of each batch, in the order they run."""
    batches: dict[int, list[int]] = defaultdict(list)
    for index, sequence in enumerate(sequences):
        batches[sequence.batch].append(index)
    return [batches[number] for number in sorted(batches)]


def _as_numpy(values: Tensor) -> NDArray[Any]:
    values = values.contiguous()
    # numpy has no bfloat16.
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.numpy()


class Pipeline:
    """Computes units in this thread and commits them in others.

    A slow disk slows the passes down, so that memory stays bounded.

    `report` is called with every unit that has been committed, and `batch_done` with
    the number of tokens of every batch that has been run, both by one thread at a time.
    `failed` is called at once with the error of a unit that could not be committed: the
    next `put` raises it too, but whoever waits for an answer before the next `put`
    would wait for ever.
    """

    def __init__(
        self,
        model: Model,
        writer: Writer,
        report: Callable[[Done], None],
        failed: Callable[[BaseException], None] = lambda error: None,
        batch_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        require_recordable(model.module)
        self.model = model
        self.writer = writer
        self.report = report
        self.failed = failed
        self.spec = spec_of(writer.plan)
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
        for thread in self._writing:
            # An interrupt may have come before the last one was started.
            if thread.ident is not None:
                thread.join()
        if kind is None:
            self._raise_error()

    def put(self, unit: str, upcoming: str | None = None) -> None:
        """Compute a unit and hand it over to be written; skip one that is committed.

        The sequences of the `upcoming` unit are read meanwhile: a GPU would wait for
        them.
        """
        self._raise_error()
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
            self.model, sequences, self.spec, self._memory, self._report_batch
        )
        self._hand_over(unit, computed)

    def _read(self, unit: str) -> None:
        # Whoever asks for them next is told what is wrong with them.
        with suppress(Exception):
            self.writer.sequences(unit)

    def _hand_over(self, unit: str, computed: Unit) -> None:
        """Start a thread that writes a unit, as soon as there may be one more."""
        while not self._free.acquire(timeout=0.2):
            self._raise_error()
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
            with self._reporting:
                self.failed(error)
        finally:
            computed.release()
            self._free.release()

    def _report(self, unit: str, *, committed_here: bool) -> None:
        digest = self.writer.plan.by_name[unit]
        rows = self.writer.plan.rows_of(digest)
        done = Done(
            unit=unit,
            tokens=digest.tokens,
            bytes=rows * self.spec.row_bytes,
            committed_here=committed_here,
        )
        with self._reporting:
            self.report(done)

    def _report_batch(self, tokens: int) -> None:
        with self._reporting:
            self._batch_done(tokens)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
