"""Buffers: the memory that holds the states of a pass, one row per token, as hooks copy
them out of it.

On a GPU the rows are gathered there. They stay there (`keep="device"`), or go to
page-locked host memory on a stream of their own, so that the pass continues meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import PassError, StatesError, TooLarge
from hiddenscope.modules import autograd
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States

if TYPE_CHECKING:
    from hiddenscope.passes.inputs import Inputs
    from hiddenscope.passes.protocol import PassModel

Keep: TypeAlias = Literal["host", "device"]
"""Where states are kept: in host memory, or on the device that computed them."""

SHARE_OF_FREE_MEMORY = 0.9
MOST_PINNED = 16 * 2**30
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """The rows of the buffer that the tokens of one text go to."""

    start: int
    length: int


class HostMemory:
    """Host memory that buffers use one after another: pages that were never touched are
    slow to come by.

    >>> memory = HostMemory()
    >>> first = memory.take(100)
    >>> memory.give_back(first)
    >>> memory.take(60).data_ptr() == first.data_ptr(), memory.take(60).data_ptr() == first.data_ptr()
    (True, False)
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def has(self, size: int) -> bool:
        """Whether so many bytes are free in one piece."""
        return any(part.nbytes >= size for part in self._free)

    def take(self, size: int) -> Tensor:
        """At least so many bytes."""
        for index, part in enumerate(self._free):
            if part.nbytes >= size:
                return self._free.pop(index)
        if self._free:  # too small: a larger one takes its place
            self._free.pop()
        return _in_huge_pages(size)

    def give_back(self, part: Tensor) -> None:
        """Have the next buffer use memory that nobody reads any more."""
        self._free.append(part)


class MemorySource(NamedTuple):
    """Where the memory of a buffer comes from.

    It is on a `device`, or in host memory, which may be `pinned` (page-locked) or taken
    from `reused` memory. So many bytes of what is free are `promised` to other buffers.
    """

    device: torch.device | None = None
    pinned: bool = False
    promised: int = 0
    reused: HostMemory | None = None


FRESH = MemorySource()


class Buffer:
    """Memory for the values [site, token, width] of one stack.

    >>> buffer = Buffer(sites=1, tokens=3, width=2, dtype=torch.float32)
    >>> buffer.write(0, torch.ones(2, 2, 2), [Place(1, 2), Place(0, 1)])
    >>> buffer.finish().sum().item()
    6.0
    """

    def __init__(
        self,
        sites: int,
        tokens: int,
        width: int,
        dtype: torch.dtype,
        source: MemorySource = FRESH,
    ) -> None:
        size, device, memory = (
            sites * tokens * width * dtype.itemsize,
            source.device,
            source.reused,
        )
        if (device is None or device.type == "cpu") and not (
            memory is not None and memory.has(size)
        ):
            self._require(sites, tokens, width, dtype, source.promised)
        self._memory, self._taken = memory, None
        self.pinned = source.pinned and size <= MOST_PINNED
        with autograd.restored(inference=False):  # or nobody could train on them
            if self.pinned or device is not None:
                self.values = torch.empty(
                    sites,
                    tokens,
                    width,
                    dtype=dtype,
                    pin_memory=self.pinned,
                    device=device,
                )
            else:
                self._taken = (
                    _in_huge_pages(size) if memory is None else memory.take(size)
                )
                self.values = self._taken[:size].view(dtype).view(sites, tokens, width)
        self._streams: set[torch.cuda.Stream] = set()
        self._sums: list[Tensor] = []
        self._unsummed: set[int] = set()
        self._last_run: tuple[Sequence[Place], int, slice | None] | None = None

    def write(self, site: int, states: Tensor, places: Sequence[Place]) -> None:
        """Copy the real tokens of a batch [text, token, width] to their rows; padding
        is left out.
        """
        states = states.detach()
        self._fits(states)
        if states.is_cuda and not self.values.is_cuda:
            self._send(site, states, places)
            return
        self._unsummed.add(site)
        rows: Any = self.values[site]
        if (run := self._run_of(places, states.shape[1])) is not None:
            rows[run].view_as(states).copy_(states)
            return
        given: Any = states
        if states.device.type == "cpu" and states.dtype == rows.dtype:
            rows, given = _without_threads(rows), _without_threads(states)
        for text, place in enumerate(places):
            rows[place.start : place.start + place.length] = given[text, : place.length]

    def finish(self) -> Tensor:
        """The values, once everything that was sent has arrived."""
        for stream in self._streams:
            stream.synchronize()
        return self.values

    def release(self) -> None:
        """Give the memory back to where it was taken from; the values must not be read
        any more.
        """
        if self._memory is not None and self._taken is not None:
            self._memory.give_back(self._taken)
            self._memory = None

    @property
    def finite(self) -> bool:
        """Whether no NaN and no infinity was written: either shows in a sum. A GPU
        makes its sums on the way.
        """
        if self.values.is_cuda or len(self._unsummed) == len(self.values):
            # Torch's threads are woken once for all.
            return bool(torch.isfinite(self.values.sum(dtype=torch.float32)))
        sums = [
            *self._sums,
            *(self.values[site].sum(dtype=torch.float32) for site in self._unsummed),
        ]
        devices = {total.device for total in sums}
        stacked = [
            torch.stack([total for total in sums if total.device == device])
            for device in devices
        ]
        return all(bool(torch.isfinite(totals).all()) for totals in stacked)

    def _send(self, site: int, states: Tensor, places: Sequence[Place]) -> None:
        """Gather on the pass's own stream, because a later block may write over its
        input; copy on another.
        """
        stream = _side_stream(states.device)
        self._streams.add(stream)
        order = sorted(range(len(places)), key=lambda text: places[text].start)
        gathered = _gathered(states, [places[text].length for text in order], order).to(
            self.values.dtype
        )
        self._sums.append(gathered.sum(dtype=torch.float32))
        stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(stream):
            read = 0
            for start, length in _runs([places[text] for text in order]):
                part = gathered[read : read + length]
                self.values[site, start : start + length].copy_(
                    part, non_blocking=self.pinned
                )
                read += length
        gathered.record_stream(stream)

    def _run_of(self, places: Sequence[Place], tokens: int) -> slice | None:
        """`_one_run`, which every site of a pass asks about the same places."""
        if (
            self._last_run is None
            or self._last_run[0] is not places
            or self._last_run[1] != tokens
        ):
            self._last_run = places, tokens, _one_run(places, tokens)
        return self._last_run[2]

    def _fits(self, states: Tensor) -> None:
        width = self.values.shape[2]
        if states.shape[2] != width:
            reason = f"a state is {states.shape[2]} wide and the others {width}"
            raise PassError(
                "Cannot keep the states together",
                reason,
                "Capture sites of different widths separately.",
            )
        if not states.dtype.is_floating_point:
            reason = f"a state has dtype {states.dtype}"
            raise PassError(
                "Cannot keep the states as numbers",
                reason,
                "Load the model in a float dtype.",
            )

    @staticmethod
    def _require(
        sites: int, tokens: int, width: int, dtype: torch.dtype, promised: int
    ) -> None:
        """Refuse what does not fit in free memory, of which so many bytes are promised
        to other buffers.
        """
        size, free = (
            sites * tokens * width * dtype.itemsize,
            max(0, free_memory() - promised),
        )
        if size > free * SHARE_OF_FREE_MEMORY:
            dtype_name = str(dtype).removeprefix("torch.")
            problem = (
                f"{sites} sites of {tokens:,} tokens, {width:,} wide in {dtype_name},"
                " do not fit in memory"
            )
            reason = (
                f"they take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are"
                " free"
            )
            remedy = (
                "Ask for fewer sites, or capture the texts in parts and keep each on"
                " disk with states.save(path)."
            )
            raise TooLarge(problem, reason, remedy)


class StackBuffer:
    """Where the states of one stack are collected, over as many passes as it takes.

    Its tokens and its source are made last, while a GPU may still be at work.
    """

    def __init__(
        self,
        model: PassModel,
        sites: Sequence[Site],
        inputs: Inputs,
        dtype: torch.dtype | None = None,
        keep: Keep = "host",
        promised: int = 0,
        memory: HostMemory | None = None,
    ) -> None:
        anatomy = model.anatomy
        widths = {anatomy.width(site): site for site in sites}
        if len(widths) > 1:
            reason = " and ".join(
                f"{site} is {width} wide" for width, site in widths.items()
            )
            remedy = "Capture 'layer.*' and 'final' one after the other."
            raise StatesError(
                f"Cannot keep these states of {anatomy.name} in one array",
                reason,
                remedy,
            )
        self.model, self.sites, self.inputs = model, tuple(sites), inputs
        self.rows = {site: row for row, site in enumerate(sites)}
        self._starts = list(accumulate(inputs.lengths, initial=0))
        device, pinned = (
            model.device if keep == "device" else None,
            model.device.type == "cuda" and keep == "host",
        )
        own = dtype or anatomy.stack(sites[0]).proof.dtype
        source = MemorySource(device, pinned, promised, memory)
        self.buffer = Buffer(
            len(sites), self._starts[-1], next(iter(widths)), own, source
        )

    def places(self, texts: Sequence[int]) -> list[Place]:
        """The rows of some of the texts."""
        return [
            Place(self._starts[text], self._starts[text + 1] - self._starts[text])
            for text in texts
        ]

    def is_finite(self, texts: Sequence[int]) -> bool:
        """Whether the states of some texts, whose passes have been made, are finite."""
        values = self.buffer.finish()
        return all(
            bool(values[:, start : start + length].isfinite().all())
            for start, length in self.places(texts)
        )

    def states(self) -> States:
        """The states, once every pass has been made; a NaN or an infinity among them is
        an error.
        """
        tokens = self.model.text_encoder.tokens(self.inputs)
        source = self.model.source(self.sites[0].stack, checked=True)
        states = States(self.sites, self.buffer.finish(), tokens, source)
        if not self.buffer.finite:
            states.check_finite()
        return states


Buffers: TypeAlias = Mapping[str | None, StackBuffer]
"""A buffer for each stack that has states to keep."""


def buffers_for(
    model: PassModel,
    sites: Sequence[Site],
    inputs: Inputs,
    dtype: torch.dtype | None = None,
    keep: Keep = "host",
    memory: HostMemory | None = None,
) -> Buffers:
    """Memory for the states at some sites of some texts, stack by stack."""
    by_stack: dict[str | None, list[Site]] = defaultdict(list)
    for site in sites:
        by_stack[site.stack].append(site)
    buffers: dict[str | None, StackBuffer] = {}
    for stack, own_sites in by_stack.items():
        promised = sum(other.buffer.values.nbytes for other in buffers.values())
        buffers[stack] = StackBuffer(
            model, own_sites, inputs.of(stack), dtype, keep, promised, memory
        )
    return buffers


def states_in(buffers: Buffers) -> States | Pair:
    """The states of one stack, or the pair of two."""
    states = [buffer.states() for buffer in buffers.values()]
    return states[0] if len(states) == 1 else Pair(*states)


def _without_threads(values: Tensor) -> Any:
    """The same memory as a numpy array, which copies in this thread: waking torch's for
    each text costs far more.

    Numbers are seen as integers of their size, because numpy has no bfloat16.
    """
    return values.view(_INTEGER_OF_SIZE[values.dtype.itemsize]).numpy()


def _in_huge_pages(size: int) -> Tensor:
    """So many bytes of host memory. numpy asks for huge pages, torch does not, and
    small ones fault in far slower.
    """
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which states leave a GPU: one for all buffers, since memory is kept
    by stream.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _gathered(states: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """A copy of the real tokens of a batch, text after text in the given order."""
    if lengths == [states.shape[1]] * len(states) and list(order) == list(
        range(len(states))
    ):
        return states.flatten(0, 1).clone()
    return torch.cat(
        [states[text, :length] for text, length in zip(order, lengths, strict=True)]
    )


def _one_run(places: Sequence[Place], tokens: int) -> slice | None:
    """The rows of a batch without padding whose texts follow one another; None for any
    other batch.
    """
    start = places[0].start
    if all(
        place == (start + text * tokens, tokens) for text, place in enumerate(places)
    ):
        return slice(start, start + len(places) * tokens)
    return None


def _runs(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Places that follow one another, joined to runs (start, length)."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and sum(runs[-1]) == place.start:
            runs[-1] = (runs[-1][0], runs[-1][1] + place.length)
        else:
            runs.append((place.start, place.length))
    return runs


def free_memory() -> int:
    """How many bytes of host memory are available without swapping, on this machine or
    in this container.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *_left_in_container()])


def _left_in_container() -> list[int]:
    """What a memory limit of cgroup v2 leaves, if there is one; the page cache of files
    that lie idle gives way.
    """
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (
            int((folder / name).read_text())
            for name in ("memory.max", "memory.current")
        )
        lines = (
            line.split() for line in (folder / "memory.stat").read_text().splitlines()
        )
        idle = next((int(line[1]) for line in lines if line[0] == "inactive_file"), 0)
        return [limit - used + idle]
    except (OSError, ValueError):
        return []
