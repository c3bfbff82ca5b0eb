"""Buffers: the memory in which states land, one row a token, as they come out of a pass.

On a GPU the rows are gathered there and sent to page-locked host memory on a stream of their own, so that the pass goes
on meanwhile.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hiddenscope.errors import PassError, TooLarge

SHARE_OF_FREE_MEMORY = 0.9
MOST_PINNED = 16 * 2**30
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Place:
    """Where the tokens of one text of a batch go: its rows in the buffer."""

    start: int
    length: int


class Buffer:
    """Room for the values [site, token, width] of one stack.

    >>> buffer = Buffer(sites=1, tokens=3, width=2, dtype=torch.float32)
    >>> buffer.write(0, torch.ones(2, 2, 2), [Place(1, 2), Place(0, 1)])
    >>> buffer.finish().sum().item()
    6.0
    """

    def __init__(
        self, sites: int, tokens: int, width: int, dtype: torch.dtype, *, pinned: bool = False, beside: int = 0
    ) -> None:
        self._require(sites, tokens, width, dtype, beside)
        size = sites * tokens * width * dtype.itemsize
        self.pinned = pinned and size <= MOST_PINNED
        with torch.inference_mode(False):  # or nobody could train on them
            self.values = torch.empty(sites, tokens, width, dtype=dtype, pin_memory=self.pinned)
        self._streams: set[torch.cuda.Stream] = set()
        self._sums: list[Tensor] = []
        self._kept_here: set[int] = set()

    def write(self, site: int, states: Tensor, places: Sequence[Place]) -> None:
        """Copy the real tokens of a batch [text, token, width] to their rows; what stands behind a text is left out."""
        states = states.detach()
        self._fits(states)
        if states.is_cuda:
            self._send(site, states, places)
            return
        self._kept_here.add(site)
        rows: Any = self.values[site]
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

    @property
    def finite(self) -> bool:
        """Whether no NaN and no infinity was written: either would show in a sum. A GPU made its sums on the way."""
        sums = [*self._sums, *(self.values[site].sum(dtype=torch.float32) for site in self._kept_here)]
        devices = {total.device for total in sums}
        together = [torch.stack([total for total in sums if total.device == device]) for device in devices]
        return all(bool(torch.isfinite(totals).all()) for totals in together)

    def _send(self, site: int, states: Tensor, places: Sequence[Place]) -> None:
        """Gather on the pass's own stream, for a later block may write over its input; copy on another."""
        stream = _side_stream(states.device)
        self._streams.add(stream)
        order = sorted(range(len(places)), key=lambda text: places[text].start)
        gathered = _gathered(states, [places[text].length for text in order], order).to(self.values.dtype)
        self._sums.append(gathered.sum(dtype=torch.float32))
        stream.wait_stream(torch.cuda.current_stream(states.device))
        with torch.cuda.stream(stream):
            read = 0
            for start, length in _joined([places[text] for text in order]):
                part = gathered[read : read + length]
                self.values[site, start : start + length].copy_(part, non_blocking=self.pinned)
                read += length
        gathered.record_stream(stream)

    def _fits(self, states: Tensor) -> None:
        width = self.values.shape[2]
        if states.shape[2] != width:
            reason = f"a state has width {states.shape[2]} where {width} was proved"
            raise PassError("States of one width", reason, "Capture sites of different widths one after another.")
        if not states.dtype.is_floating_point:
            raise PassError(
                "States as numbers", f"a state has dtype {states.dtype}", "Load the model in a float dtype."
            )

    @staticmethod
    def _require(sites: int, tokens: int, width: int, dtype: torch.dtype, beside: int) -> None:
        """Refuse what does not fit, `beside` so many bytes that are promised and not yet used."""
        size, free = sites * tokens * width * dtype.itemsize, max(0, free_memory() - beside)
        if size > free * SHARE_OF_FREE_MEMORY:
            problem = f"{sites} sites of {tokens:,} tokens, {width:,} wide in {str(dtype).removeprefix('torch.')}"
            reason = f"that is {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free"
            remedy = (
                "Ask for fewer sites, or capture the texts in parts and keep each on disk with `states.save(path)`."
            )
            raise TooLarge(problem, reason, remedy)


def _without_threads(values: Tensor) -> Any:
    """The same memory as numpy sees it, which copies in this thread: waking torch's for each text costs far more.

    Numbers are taken as whole ones of their size, because numpy knows no bfloat16.
    """
    return values.view(_WHOLE[values.dtype.itemsize]).numpy()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which states leave a GPU: one for all buffers, since memory is kept by stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _gathered(states: Tensor, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
    """A copy of the real tokens of a batch, text after text in the given order."""
    if lengths == [states.shape[1]] * len(states) and list(order) == list(range(len(states))):
        return states.flatten(0, 1).clone()
    return torch.cat([states[text, :length] for text, length in zip(order, lengths, strict=True)])


def _joined(places: Sequence[Place]) -> list[tuple[int, int]]:
    """Places that follow one another as one run."""
    runs: list[tuple[int, int]] = []
    for place in places:
        if runs and sum(runs[-1]) == place.start:
            runs[-1] = (runs[-1][0], runs[-1][1] + place.length)
        else:
            runs.append((place.start, place.length))
    return runs


def free_memory() -> int:
    """How many bytes of memory could be had without swapping, on this machine or in this container."""
    return min([_kernel_says_available(), *_container_leaves()])


def _kernel_says_available() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _container_leaves() -> list[int]:
    """What a memory limit of cgroup v2 leaves, if there is one; files that were read and lie idle make way."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        idle = next((int(line[1]) for line in lines if line[0] == "inactive_file"), 0)
        return [limit - used + idle]
    except (OSError, ValueError):
        return []
