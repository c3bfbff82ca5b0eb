"""Buffers: the memory that holds the states of a pass, one row per token.

On a GPU the rows are gathered there. They stay there (`keep="device"`), or go to
page-locked host memory on a stream of their own, so that the pass continues meanwhile.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import PassError, TooLarge
from hiddenscope.modules import autograd
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.mixed import SiteValues, groups_of, of_groups

if TYPE_CHECKING:
    from hiddenscope.passes.inputs import Inputs
    from hiddenscope.passes.protocol import PassModel

Keep: TypeAlias = Literal["host", "device"]
"""Where states are kept: in host memory, or on the device that computed them."""

SHARE_OF_FREE_MEMORY = 0.9
MOST_PINNED = 16 * 2**30
# Memory of a block on a GPU, at the least and at the most.
GPU_BLOCK = (512 * 2**20, 4 * 2**30)
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Place(NamedTuple):
    """The rows of the buffer that hold the tokens of one text."""

    start: int
    length: int


class HostMemory:
    """Host memory that buffers use one after another.

    The first write to a fresh page is slow.

    >>> memory = HostMemory()
    >>> first = memory.take(100)
    >>> memory.give_back(first)
    >>> second, third = memory.take(60), memory.take(60)
    >>> second.data_ptr() == first.data_ptr(), third.data_ptr() == first.data_ptr()
    (True, False)
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def has(self, size: int) -> bool:
        """Tell whether this many bytes are free in one piece."""
        return any(part.nbytes >= size for part in self._free)

    def take(self, size: int) -> Tensor:
        """Return at least this many bytes."""
        free = self._free
        # The smallest that is large enough: the buffers of one unit differ in size
        # where the widths of their sites do. The list itself is not sorted, because
        # other threads append to it.
        order = sorted(range(len(free)), key=lambda index: free[index].nbytes)
        for index in order:
            if free[index].nbytes >= size:
                return free.pop(index)
        # One that is too small is dropped for the larger one that is made now.
        if order:
            free.pop(order[-1])
        return _in_huge_pages(size)

    def give_back(self, part: Tensor) -> None:
        """Let the next buffer use memory that nobody reads any more."""
        self._free.append(part)


class MemorySource(NamedTuple):
    """Where the memory of a buffer comes from.

    It is on a `device`, or in host memory, which may be `pinned` (page-locked) or taken
    from `reused` memory. `promised` bytes of the free memory belong to other buffers.
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
        shape = (sites, tokens, width)
        size = sites * tokens * width * dtype.itemsize
        device = source.device
        memory = source.reused
        on_host = device is None or device.type == "cpu"
        if on_host and not (memory is not None and memory.has(size)):
            _require_memory(shape, dtype, size, source.promised)
        self._memory = memory
        self._taken: Tensor | None = None
        self.pinned = source.pinned and size <= MOST_PINNED
        # A tensor that is made in inference mode could not be trained on.
        with autograd.restored(inference=False):
            if self.pinned or device is not None:
                self.values = torch.empty(
                    *shape, dtype=dtype, pin_memory=self.pinned, device=device
                )
            else:
                taken = _in_huge_pages(size) if memory is None else memory.take(size)
                self._taken = taken
                self.values = taken[:size].view(dtype).view(shape)
        self._streams: set[torch.cuda.Stream] = set()
        self._sums: list[Tensor] = []
        self._unsummed: set[int] = set()
        self._last_run: tuple[Sequence[Place], int, slice | None] | None = None

    def write(self, site: int, states: Tensor, places: Sequence[Place]) -> None:
        """Copy the real tokens of a batch [text, token, width] to their rows."""
        states = states.detach()
        self._require_fit(states)
        if states.is_cuda and not self.values.is_cuda:
            self._send(site, states, places)
            return
        self._unsummed.add(site)
        rows: Any = self.values[site]
        run = self._run_of(places, states.shape[1])
        if run is not None:
            rows[run].view_as(states).copy_(states)
            return
        source: Any = states
        if states.device.type == "cpu" and states.dtype == rows.dtype:
            rows, source = _without_threads(rows), _without_threads(states)
        for text, (start, length) in enumerate(places):
            rows[start : start + length] = source[text, :length]

    def finish(self) -> Tensor:
        """Return the values, once everything that was sent has arrived."""
        for stream in self._streams:
            stream.synchronize()
        return self.values

    def release(self) -> None:
        """Give reused memory back; the values must not be read any more."""
        if self._memory is not None and self._taken is not None:
            self._memory.give_back(self._taken)
            self._memory = None

    @property
    def finite(self) -> bool:
        """Tell whether no NaN and no infinity was written: either shows in a sum."""
        if self.values.is_cuda or len(self._unsummed) == len(self.values):
            # A single sum wakes torch's threads once.
            return bool(torch.isfinite(self.values.sum(dtype=torch.float32)))
        # A GPU has summed what it sent on the way.
        sums = list(self._sums)
        for site in self._unsummed:
            sums.append(self.values[site].sum(dtype=torch.float32))
        return bool(torch.isfinite(torch.stack(sums)).all())

    def _send(self, site: int, states: Tensor, places: Sequence[Place]) -> None:
        """Copy states from a GPU to host memory while the pass continues."""
        stream = _side_stream(states.device)
        self._streams.add(stream)
        order = sorted(range(len(places)), key=lambda text: places[text].start)
        ordered = [places[text] for text in order]
        # Gathered on the pass's own stream, because a later block may write over its
        # input.
        gathered = _gather(states, [place.length for place in ordered], order)
        gathered = gathered.to(self.values.dtype)
        total = gathered.sum(dtype=torch.float32)
        stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(stream):
            read = 0
            for start, length in _joined_places(ordered):
                part = gathered[read : read + length]
                rows = self.values[site, start : start + length]
                rows.copy_(part, non_blocking=self.pinned)
                read += length
            # To read a sum on the GPU would wait for the passes that came after it.
            host_total = torch.empty((), pin_memory=self.pinned)
            self._sums.append(host_total.copy_(total, non_blocking=self.pinned))
        gathered.record_stream(stream)
        total.record_stream(stream)

    def _run_of(self, places: Sequence[Place], tokens: int) -> slice | None:
        """Return `_single_run`, kept for the next site: it has the same places."""
        last = self._last_run
        if last is None or last[0] is not places or last[1] != tokens:
            last = places, tokens, _single_run(places, tokens)
            self._last_run = last
        return last[2]

    def _require_fit(self, states: Tensor) -> None:
        width = self.values.shape[2]
        if states.shape[2] != width:
            raise PassError(
                "Cannot keep the states together",
                f"a state is {states.shape[2]} wide, and was {width} wide when the"
                " model was loaded",
                "Load the model again: it has been changed.",
            )
        if not states.dtype.is_floating_point:
            raise PassError(
                "Cannot keep the states as numbers",
                f"a state has dtype {states.dtype}",
                "Load the model in a float dtype.",
            )


class StackBuffer:
    """Collects the states of one stack over any number of passes.

    Sites of one width share a buffer. Its tokens and its source are made last, while a
    GPU may still be at work.
    """

    def __init__(
        self,
        model: PassModel,
        sites: Sequence[Site],
        inputs: Inputs,
        dtype: torch.dtype | None,
        source: MemorySource,
    ) -> None:
        self.model = model
        self.sites = tuple(sites)
        self.inputs = inputs
        self._starts = list(accumulate(inputs.lengths, initial=0))
        self._widths = [model.anatomy.width(site) for site in sites]
        self._groups: dict[int, Buffer] = {}
        dtype = dtype or model.anatomy.stack(sites[0]).proof.dtype
        for width, count in Counter(self._widths).items():
            promised = source.promised + self.nbytes
            self._groups[width] = Buffer(
                count,
                self._starts[-1],
                width,
                dtype,
                source._replace(promised=promised),
            )
        # The buffer of each site, and the site's place in it.
        self._places: dict[Site, tuple[Buffer, int]] = {}
        rows: Counter[int] = Counter()
        for site, width in zip(sites, self._widths, strict=True):
            self._places[site] = self._groups[width], rows[width]
            rows[width] += 1

    @property
    def nbytes(self) -> int:
        """Return the bytes that the states take."""
        return sum(buffer.values.nbytes for buffer in self._groups.values())

    def write(self, site: Site, states: Tensor, places: Sequence[Place]) -> None:
        """Copy the real tokens of a batch [text, token, width] to their rows."""
        buffer, row = self._places[site]
        buffer.write(row, states, places)

    def finish(self) -> SiteValues:
        """Return the values, once everything that was sent has arrived."""
        groups = {width: buffer.finish() for width, buffer in self._groups.items()}
        return of_groups(self.sites, self._widths, groups)

    def release(self) -> None:
        """Give reused memory back; the values must not be read any more."""
        for buffer in self._groups.values():
            buffer.release()

    @property
    def finite(self) -> bool:
        """Tell whether no NaN and no infinity was written."""
        return all(buffer.finite for buffer in self._groups.values())

    def places(self, texts: Sequence[int]) -> list[Place]:
        """Return the rows of some of the texts."""
        starts = self._starts
        return [Place(starts[text], starts[text + 1] - starts[text]) for text in texts]

    def is_finite(self, texts: Sequence[int]) -> bool:
        """Tell whether the states of some texts are finite, after their passes."""
        for values in groups_of(self.finish()):
            for start, length in self.places(texts):
                if not bool(values[:, start : start + length].isfinite().all()):
                    return False
        return True

    def states(self) -> States:
        """Return the states after the last pass; raise NotFinite if one is not."""
        tokens = self.model.text_encoder.tokens(self.inputs)
        source = self.model.source(self.sites[0].stack, checked=True)
        states = States(self.sites, self.finish(), tokens, source)
        if not self.finite:
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
    """Return memory for the states at some sites of some texts, stack by stack."""
    by_stack: dict[str | None, list[Site]] = defaultdict(list)
    for site in sites:
        by_stack[site.stack].append(site)
    buffers: dict[str | None, StackBuffer] = {}
    for stack, stack_sites in by_stack.items():
        source = MemorySource(
            device=model.device if keep == "device" else None,
            pinned=model.device.type == "cuda" and keep == "host",
            promised=sum(other.nbytes for other in buffers.values()),
            reused=memory,
        )
        texts = inputs.of(stack)
        buffers[stack] = StackBuffer(model, stack_sites, texts, dtype, source)
    return buffers


def states_in(buffers: Buffers) -> States | Pair:
    """Return the states of one stack, or the pair of two."""
    return one_or_pair([buffer.states() for buffer in buffers.values()])


def one_or_pair(stacks: Sequence[States]) -> States | Pair:
    """Return the states of an encoder and a decoder as a Pair."""
    return stacks[0] if len(stacks) == 1 else Pair(*stacks)


def stacks_in(states: States | Pair) -> list[States]:
    """Return the states of each stack."""
    if isinstance(states, Pair):
        return [states.encoder, states.decoder]
    return [states]


def _without_threads(values: Tensor) -> NDArray[Any]:
    """Return the same memory as a numpy array, which copies in this thread.

    Waking torch's threads for each text costs far more. Numbers are seen as integers of
    their size, because numpy has no bfloat16.
    """
    integers = values.view(_INTEGER_OF_SIZE[values.dtype.itemsize])
    array: NDArray[Any] = integers.numpy()
    return array


def _in_huge_pages(size: int) -> Tensor:
    # numpy asks for huge pages, torch does not, and small ones fault in far slower.
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which states leave a GPU."""
    # One for all buffers, because torch keeps freed memory by stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _gather(states: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """Return a copy of the real tokens of a batch, text after text in some order."""
    texts, tokens = states.shape[:2]
    if list(lengths) == [tokens] * texts and list(order) == list(range(texts)):
        return states.flatten(0, 1).clone()
    pairs = zip(order, lengths, strict=True)
    return torch.cat([states[text, :length] for text, length in pairs])


def _single_run(places: Sequence[Place], tokens: int) -> slice | None:
    """Return the rows of a batch without padding whose texts follow one another."""
    start = places[0].start
    for text, place in enumerate(places):
        if place != (start + text * tokens, tokens):
            return None
    return slice(start, start + len(places) * tokens)


def _joined_places(places: Sequence[Place]) -> list[Place]:
    """Join places that follow one another."""
    joined: list[Place] = []
    for place in places:
        if joined and sum(joined[-1]) == place.start:
            last = joined.pop()
            place = Place(last.start, last.length + place.length)
        joined.append(place)
    return joined


def _require_memory(
    shape: tuple[int, int, int], dtype: torch.dtype, size: int, promised: int
) -> None:
    """Refuse a buffer that does not fit in the memory that is free and not promised."""
    free = free_memory()
    if promised + size <= free * SHARE_OF_FREE_MEMORY:
        return
    free = max(0, free - promised)
    sites, tokens, width = shape
    name = str(dtype).removeprefix("torch.")
    raise TooLarge(
        f"{sites} sites of {tokens:,} tokens, {width:,} wide in {name}, do not fit in"
        " memory",
        f"they take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
        "Ask for fewer sites, or capture the texts in parts and keep each on disk with"
        " states.save(path).",
    )


def block_memory(device: torch.device, on_cpu: int) -> int:
    """Return the bytes that tensors which are computed together may take.

    On a GPU that is an eighth of what is free, within limits.
    """
    if device.type != "cuda":
        return on_cpu
    smallest, largest = GPU_BLOCK
    free, _ = torch.cuda.mem_get_info(device)
    return min(largest, max(smallest, free // 8))


def free_memory() -> int:
    """Return the bytes of host memory that this machine or container has free."""
    import psutil

    available = int(psutil.virtual_memory().available)
    left = _left_in_container()
    return available if left is None else min(available, left)


def _left_in_container() -> int | None:
    """Return what a memory limit of cgroup v2 leaves; None where there is none."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        # The page cache of files that lie idle gives way.
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()[:2]
            if name == "inactive_file":
                return limit - used + int(value)
        return limit - used
    except (OSError, ValueError):
        return None
