"""Buffers: the memory that holds the states of a pass, one row per token.

On a GPU the rows are gathered there. They stay there (`keep="device"`), or go to
page-locked host memory on a stream of their own, so that the pass continues meanwhile.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import PassError, TooLarge
from hiddenscope.modules import autograd
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.mixed import SiteValues, groups_of, of_groups

if TYPE_CHECKING:
    from hiddenscope.passes.inputs import Inputs, PassModel

Keep: TypeAlias = Literal["host", "device"]
"""Where states are kept: in host memory, or on the device that computed them."""

SHARE_OF_FREE_MEMORY = 0.9
MOST_PINNED = 16 * 2**30
# Memory of a block on a GPU, at the least and at the most.
GPU_BLOCK = (512 * 2**20, 4 * 2**30)
_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


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


@dataclass(eq=False)
class StackBuffer:
    """Collects the states of one stack over any number of passes.

    Sites of one width share a tensor [site, token, width]. Its tokens and its source
    are made last, while a GPU may still be at work.
    """

    model: PassModel
    sites: tuple[Site, ...]
    inputs: Inputs
    dtype: torch.dtype
    keep: Keep
    reused: HostMemory | None = None
    # Bytes of the free memory that belong to other buffers.
    promised: int = 0
    nbytes: int = 0

    def __post_init__(self) -> None:
        self._starts = list(accumulate(self.inputs.lengths, initial=0))
        self._widths = [self.model.anatomy.width(site) for site in self.sites]
        self._pinned = self.model.device.type == "cuda" and self.keep == "host"
        self._taken: list[Tensor] = []
        self._groups: dict[int, Tensor] = {}
        for width, count in Counter(self._widths).items():
            self._groups[width] = self._allocate((count, self._starts[-1], width))
            self.nbytes += self._groups[width].nbytes
        # The rows [token, width] of each site.
        self._rows: dict[Site, Tensor] = {}
        groups = {width: iter(values) for width, values in self._groups.items()}
        for site, width in zip(self.sites, self._widths, strict=True):
            self._rows[site] = next(groups[width])
        self._streams: set[torch.cuda.Stream] = set()
        # A GPU sums what it sends on the way; other sites are summed in the end.
        self._sums: list[Tensor] = []
        self._is_summed = True

    def _allocate(self, shape: tuple[int, int, int]) -> Tensor:
        """Return memory for the states of one width, if there is enough."""
        dtype, reused = self.dtype, self.reused
        size = math.prod(shape) * dtype.itemsize
        device = self.model.device if self.keep == "device" else None
        on_host = device is None or device.type == "cpu"
        if on_host and not (reused is not None and reused.has(size)):
            free = free_memory()
            promised = self.promised + self.nbytes
            if promised + size > free * SHARE_OF_FREE_MEMORY:
                sites, tokens, width = shape
                name = str(dtype).removeprefix("torch.")
                free = max(0, free - promised)
                raise TooLarge(
                    f"{sites} sites of {tokens:,} tokens, {width:,} wide in {name}, do"
                    " not fit in memory",
                    f"they take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB"
                    " are free",
                    "Ask for fewer sites, or capture the texts in parts and keep each"
                    " on disk with states.save(path).",
                )
        self._pinned = self._pinned and size <= MOST_PINNED
        # A tensor that is made in inference mode could not be trained on.
        with autograd.restored(inference=False):
            if self._pinned or device is not None:
                return torch.empty(
                    shape, dtype=dtype, pin_memory=self._pinned, device=device
                )
            taken = _in_huge_pages(size) if reused is None else reused.take(size)
            self._taken.append(taken)
            return taken[:size].view(dtype).view(shape)

    def places(self, texts: Sequence[int], tokens: int) -> slice | list[slice]:
        """Return the rows of some texts in a batch of this many tokens.

        They are a single slice where no text is padded and all follow one another.
        """
        starts = self._starts
        places = [slice(starts[text], starts[text + 1]) for text in texts]
        joined = _joined(places)
        if len(joined) == 1 and joined[0].stop - joined[0].start == len(texts) * tokens:
            return joined[0]
        return places

    def write(self, site: Site, states: Tensor, places: slice | list[slice]) -> None:
        """Copy the real tokens of a batch [text, token, width] to their rows."""
        states, rows = states.detach(), self._rows[site]
        if states.shape[2] != rows.shape[1]:
            raise PassError(
                "Cannot keep the states together",
                f"a state is {states.shape[2]} wide, and was {rows.shape[1]} wide when"
                " the model was loaded",
                "Load the model again: it has been changed.",
            )
        if states.is_cuda and not rows.is_cuda:
            self._send(rows, states, places)
            return
        self._is_summed = False
        if isinstance(places, slice):
            rows[places].view_as(states).copy_(states)
            return
        source: Any = states
        target: Any = rows
        if states.device.type == "cpu" and states.dtype == rows.dtype:
            # numpy copies in this thread; waking torch's threads for each text costs
            # far more. It has no bfloat16, so numbers are seen as integers.
            integer = _INTEGER_OF_SIZE[rows.dtype.itemsize]
            source, target = states.view(integer).numpy(), rows.view(integer).numpy()
        for text, place in enumerate(places):
            target[place] = source[text, : place.stop - place.start]

    def _send(self, rows: Tensor, states: Tensor, places: slice | list[slice]) -> None:
        """Copy states from a GPU to host memory while the pass continues."""
        stream = _side_stream(states.device)
        self._streams.add(stream)
        # Gathered on the pass's own stream, because a later block may write over its
        # input.
        if isinstance(places, slice):
            places, gathered = [places], states.flatten(0, 1).clone()
        else:
            starts = [place.start for place in places]
            order = sorted(range(len(starts)), key=starts.__getitem__)
            places = [places[text] for text in order]
            real = zip(order, places, strict=True)
            parts = [states[text, : place.stop - place.start] for text, place in real]
            places, gathered = _joined(places), torch.cat(parts)
        gathered = gathered.to(rows.dtype)
        total = gathered.sum(dtype=torch.float32)
        stream.wait_stream(torch.cuda.current_stream(states.device))
        pinned = self._pinned
        with torch.cuda.stream(stream):
            read = 0
            for place in places:
                length = place.stop - place.start
                rows[place].copy_(gathered[read : read + length], non_blocking=pinned)
                read += length
            # To read a sum on the GPU would wait for the passes that came after it.
            host_total = torch.empty((), pin_memory=pinned)
            self._sums.append(host_total.copy_(total, non_blocking=pinned))
        gathered.record_stream(stream)
        total.record_stream(stream)

    def finish(self) -> SiteValues:
        """Return the values, once everything that was sent has arrived."""
        for stream in self._streams:
            stream.synchronize()
        return of_groups(self.sites, self._widths, self._groups)

    def release(self) -> None:
        """Give reused memory back; the values must not be read any more."""
        while self.reused is not None and self._taken:
            self.reused.give_back(self._taken.pop())

    @property
    def finite(self) -> bool:
        """Tell whether no NaN and no infinity was written: either shows in a sum."""
        sums = list(self._sums)
        if not self._is_summed:
            # One sum for each width wakes torch's threads once.
            sums += [
                values.sum(dtype=torch.float32) for values in self._groups.values()
            ]
        return bool(torch.isfinite(torch.stack(sums)).all())

    def is_finite(self, texts: Sequence[int]) -> bool:
        """Tell whether the states of some texts are finite, after their passes."""
        starts = self._starts
        for values in groups_of(self.finish()):
            for text in texts:
                some = values[:, starts[text] : starts[text + 1]]
                if not some.isfinite().all():
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
        promised = sum(other.nbytes for other in buffers.values())
        stack_dtype = dtype or model.anatomy.stack_named(stack).proof.dtype
        buffers[stack] = StackBuffer(
            model,
            tuple(stack_sites),
            inputs.of(stack),
            stack_dtype,
            keep,
            memory,
            promised,
        )
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


def _in_huge_pages(size: int) -> Tensor:
    # numpy asks for huge pages, torch does not, and small ones fault in far slower.
    return torch.from_numpy(np.empty(size, dtype=np.uint8))


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which states leave a GPU."""
    # One for all buffers, because torch keeps freed memory by stream.
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _joined(places: Sequence[slice]) -> list[slice]:
    """Join places that follow one another."""
    joined: list[slice] = []
    for place in places:
        if joined and joined[-1].stop == place.start:
            place = slice(joined.pop().start, place.stop)
        joined.append(place)
    return joined


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
    # A container may have a memory limit of cgroup v2.
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        # The page cache of files that lie idle gives way.
        for line in (folder / "memory.stat").read_text().splitlines():
            name, value = line.split()[:2]
            if name == "inactive_file":
                used -= int(value)
    except (OSError, ValueError):
        return available
    return min(available, limit - used)
