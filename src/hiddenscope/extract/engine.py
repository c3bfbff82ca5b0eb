"""Engine: where a job is computed, with how many workers, in units of which size."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import torch

from hiddenscope.arguments import checked, integer
from hiddenscope.errors import ArgumentError
from hiddenscope.extract.planning import UNIT_BYTES
from hiddenscope.store import StorePlan
from hiddenscope.workers import available_cores

EngineKind: TypeAlias = Literal["local", "ray"]


@checked
@dataclass(frozen=True)
class Engine:
    """Where a job is computed: in this process, in several of this machine, or on a Ray
    cluster.

    `workers` are processes, by default one (with Ray as many as the cluster has room
    for). `threads` are the torch threads per worker. By default a resumed job reuses
    the stored value; a new one takes torch's own with one worker, the cores divided by
    the workers with several, and one with Ray. `address` is that of a Ray cluster, such
    as "auto". `unit_bytes` bounds the states of a unit: each worker buffers about three
    units, and a crash loses at most these. `unit_tokens` bounds its tokens. By default
    a resumed job keeps the units of the store; in a new one they have 256 MB, and on a
    CPU about a trillion floating-point operations.

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
            if value is not None:
                integer(value, name, 1)
        if self.kind not in get_args(EngineKind):
            raise ArgumentError(
                f"No engine {str(self.kind)[:40]!r}",
                f"there are {' and '.join(get_args(EngineKind))}",
                "Choose one of them.",
            )
        if self.address is not None and self.kind != "ray":
            raise ArgumentError(
                "Cannot use an address",
                f"the engine is {self.kind!r}",
                "Give engine='ray' with it.",
            )

    def threads_per_worker(self, stored: StorePlan | None) -> int:
        """Return the torch threads of a worker; unset, they are those of the store."""
        if self.threads is not None:
            return self.threads
        if stored is not None and isinstance(stored.environment.get("threads"), int):
            return int(stored.environment["threads"])
        if self.kind == "ray":
            return 1
        if self.workers is None or self.workers == 1:
            return torch.get_num_threads()
        return max(1, available_cores() // self.workers)

    def unit_limits(self, stored: StorePlan | None) -> dict[str, int]:
        """Return the limits of a unit by name; unset, they are those of the store.

        A limit that is neither set nor in the store is left out.
        """
        defaults: Mapping[str, object] = {"unit_bytes": UNIT_BYTES}
        if stored is not None:
            defaults = stored.environment
        limits = {}
        for name in ("unit_bytes", "unit_tokens"):
            limit = getattr(self, name) or defaults.get(name)
            if isinstance(limit, int):
                limits[name] = limit
        return limits
