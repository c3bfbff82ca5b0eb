"""Engine: where a job is computed, and how its units come to the workers there.

A worker is a process of this machine, or an actor of a Ray cluster on any machine that
sees the folder of the store. It may die at any instant, and its machine with it. A unit
is done when the store says so: nothing else is kept of it.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any, Literal, TypeAlias, get_args

import torch

from hiddenscope.arguments import checked, integer
from hiddenscope.errors import ArgumentError, LoadError, PassError
from hiddenscope.extract.compute import Done
from hiddenscope.extract.planning import UNIT_BYTES
from hiddenscope.extract.worker import ModelRecipe, UnitWorker, error_from_json
from hiddenscope.store import StorePlan, Writer
from hiddenscope.workers import Header, WorkerProcess, available_cores

EngineKind: TypeAlias = Literal["local", "ray"]

# Seconds after which a unit may be given to a second worker, at the least.
PATIENCE = 10.0
# Workers that may end one after another while no unit gets done.
MAX_DEATHS = 10
# Seconds in which a worker may end by itself.
END_SECONDS = 2.0


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
        defaults = {"unit_bytes": UNIT_BYTES}
        if stored is not None:
            defaults = stored.environment
        limits = {}
        for name in ("unit_bytes", "unit_tokens"):
            limit = getattr(self, name) or defaults.get(name)
            if isinstance(limit, int):
                limits[name] = limit
        return limits


class Schedule:
    """Hands units to workers, each once.

    A unit whose worker died, or takes too long, is handed out again. Computing a unit
    twice does no harm: the store keeps the first, and both have the same bytes.

    >>> schedule = Schedule(["000000", "000001"], lambda done: None)
    >>> schedule.take("a"), schedule.take("b"), schedule.take("b")
    ('000000', '000001', None)
    >>> schedule.put_back("a", "it was killed")
    >>> schedule.take("b")
    '000000'
    """

    def __init__(self, units: Iterable[str], report: Callable[[Done], None]) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.report = report
        self.error: BaseException | None = None
        self._waiting = deque(units)
        self._left = set(self._waiting)
        # By unit: its worker, and since when that has it.
        self._in_hand: dict[str, tuple[Hashable, float]] = {}
        self._longest_seconds = 0.0
        self._deaths = 0

    @property
    def finished(self) -> bool:
        """Return whether every unit is done, or the job has failed."""
        return not self._left or self.error is not None

    def take(self, worker: Hashable) -> str | None:
        """Return the next unit for a worker, or None if there is nothing to do now.

        Where none waits, it is the unit that another worker has held for longest, if
        for too long.
        """
        with self.changed:
            if self.finished:
                return None
            now = time.monotonic()
            unit = None
            if self._waiting:
                unit = self._waiting.popleft()
            else:
                patience = max(PATIENCE, 3 * self._longest_seconds)
                # The dict has the oldest first.
                for other, (owner, since) in self._in_hand.items():
                    if owner != worker and now - since >= patience:
                        unit = other
                        break
            if unit is not None:
                self._in_hand.pop(unit, None)
                self._in_hand[unit] = worker, now
            return unit

    def done(self, done: Done) -> None:
        """Note that a unit is committed."""
        with self.changed:
            if done.unit in self._in_hand:
                _, since = self._in_hand.pop(done.unit)
                seconds = time.monotonic() - since
                self._longest_seconds = max(self._longest_seconds, seconds)
            self._deaths = 0
            if done.unit in self._left:
                self._left.discard(done.unit)
                self.report(done)
            self.changed.notify_all()

    def put_back(self, worker: Hashable, reason: str) -> None:
        """Note that a worker died, and let others compute its units."""
        with self.changed:
            in_hand = list(self._in_hand.items())
            for unit, (owner, _) in reversed(in_hand):
                if owner == worker:
                    del self._in_hand[unit]
                    self._waiting.appendleft(unit)
            self._deaths += 1
            if self._deaths > MAX_DEATHS:
                problem = (
                    f"{self._deaths} workers ended one after another, and no unit was"
                    " done between"
                )
                remedy = (
                    "Give fewer workers, or smaller units; the same command again"
                    " goes on."
                )
                self.fail(PassError(problem, reason, remedy))
            self.changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the job with an error; the first one counts."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until something has changed."""
        with self.changed:
            if not self.finished:
                self.changed.wait(seconds)


class WorkerDied(Exception):
    """A worker that is gone; the message says how it ended."""


class LocalWorker:
    """A worker that is a process of this machine."""

    def __init__(self, order: Header, batch_done: Callable[[int], None]) -> None:
        self._batch_done = batch_done
        self._log = TemporaryFile()  # noqa: SIM115
        self._process = start_process(self._log)
        self._send(order)

    def compute(self, unit: str | None) -> Sequence[Done]:
        """Have a unit computed, or without one all that is computed committed.

        Return what was committed since the last call. Raise WorkerDied where the worker
        is gone.
        """
        self._send({"unit": unit})
        while (frame := self._process.receive()) is not None:
            message = frame.header
            if "error" in message:
                raise error_from_json(message["error"])
            if "done" in message:
                return [Done(**done) for done in message["done"]]
            self._batch_done(message["tokens"])
        code = self._process.wait()
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", "replace").strip().splitlines()
        reason = f"the last ended with code {code}"
        if lines:
            reason += f" ({ascii(lines[-1])[:200]})"
        raise WorkerDied(reason)

    def _send(self, message: Header) -> None:
        # A worker that died may have said why, and that is read all the same.
        with suppress(OSError):
            self._process.send(message)

    def kill(self) -> None:
        """End the process at once; a `compute` in another thread raises then."""
        self._process.kill()

    def end(self) -> None:
        """Close the pipe, at which the process ends."""
        self._process.close_outgoing()
        self._process.wait(END_SECONDS)
        self._process.kill()
        self._process.wait()
        self._process.close()
        self._log.close()


def start_process(log: IO[bytes]) -> WorkerProcess:
    """Start a process that waits for its order."""
    return WorkerProcess(
        ["-m", "hiddenscope.extract.worker"],
        stderr=log,
        environment={"TOKENIZERS_PARALLELISM": "false"},
    )


class RayActor:
    """A worker that is an actor of a Ray cluster."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray = ray
        self._actor = actor

    def compute(self, unit: str | None) -> Sequence[Done]:
        """Do what `LocalWorker.compute` does."""
        exceptions = self._ray.exceptions
        try:
            done: Sequence[Done] = self._ray.get(self._actor.compute.remote(unit))
            return done
        # Our code in the actor raised an error: it would again.
        except exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            raise cause if isinstance(cause, Exception) else error from None
        # The actor is gone.
        except exceptions.RayError as error:
            raise WorkerDied(f"the last ended with {type(error).__name__}") from error

    def kill(self) -> None:
        """Let the actor go."""
        self._ray.kill(self._actor)

    end = kill


RemoteWorker: TypeAlias = LocalWorker | RayActor


class Supervisor(threading.Thread):
    """Feeds one worker, and starts another when it dies."""

    def __init__(self, schedule: Schedule, start: Callable[[], RemoteWorker]) -> None:
        super().__init__(name="hiddenscope-worker", daemon=True)
        self.schedule = schedule
        self.start_worker = start
        self.worker: RemoteWorker | None = None

    def run(self) -> None:
        """Keep a worker busy until every unit is done."""
        try:
            while not self.schedule.finished:
                self.worker = self.start_worker()
                try:
                    # The first answer comes when the model is loaded.
                    unit = None
                    while not self.schedule.finished:
                        committed = self.worker.compute(unit)
                        for done in committed:
                            self.schedule.done(done)
                        if unit is None and not committed:
                            self.schedule.wait(0.2)
                        unit = self.schedule.take(self)
                except WorkerDied as death:
                    if not self.schedule.finished:
                        self.schedule.put_back(self, str(death))
                finally:
                    self.worker.end()
        except BaseException as error:
            self.schedule.fail(error)

    def end(self) -> None:
        """End the worker. What it still computes is committed already, or unwanted."""
        # A thread that was never started cannot be joined.
        if self.ident is None:
            return
        if self.schedule.error is None:
            self.join(END_SECONDS)
        if self.is_alive() and self.worker is not None:
            self.worker.kill()
        self.join()


def compute_units(
    engine: Engine,
    recipe: ModelRecipe,
    writer: Writer,
    units: Sequence[str],
    report: Callable[[Done], None],
    batch_done: Callable[[int], None],
) -> None:
    """Compute units in workers; one that dies is replaced, where there is room."""
    schedule = Schedule(units, report)
    on_gpu = recipe.device.startswith("cuda")
    count = engine.workers
    if engine.kind == "ray":
        ray = connect_ray(engine.address)
        cpus = int(writer.plan.environment["threads"])
        if count is None:
            # As many as the cluster has room for.
            kind, needed = ("GPU", 1) if on_gpu else ("CPU", cpus)
            count = int(ray.cluster_resources().get(kind, 1) // needed)
        # Ray must not retry by itself: the schedule knows which units are still wanted.
        as_actor = ray.remote(
            num_cpus=cpus, num_gpus=int(on_gpu), max_restarts=0, max_task_retries=0
        )
        actor_class = as_actor(UnitWorker)

    def count_batch(tokens: int) -> None:
        with schedule.changed:
            batch_done(tokens)

    def start(number: int) -> RemoteWorker:
        device = recipe.device
        if on_gpu and engine.kind == "ray":
            # Ray numbers the GPUs of an actor from 0, whichever they are.
            device = "cuda"
        elif on_gpu:
            # GPUs are dealt out in turn.
            device = f"cuda:{number % torch.cuda.device_count()}"
        order = {
            "recipe": asdict(replace(recipe, device=device)),
            "store": str(writer.path.absolute()),
            "digest": writer.digest,
        }
        if engine.kind == "ray":
            return RayActor(ray, actor_class.remote(order))
        return LocalWorker(order, count_batch)

    supervisors = [
        Supervisor(schedule, partial(start, number)) for number in range(count or 1)
    ]
    try:
        for supervisor in supervisors:
            supervisor.start()
        while not schedule.finished:
            schedule.wait(1.0)
    finally:
        if not schedule.finished:
            schedule.fail(KeyboardInterrupt())
        for supervisor in supervisors:
            supervisor.end()
    if schedule.error is not None:
        raise schedule.error


def connect_ray(address: str | None) -> Any:
    """Return Ray, connected to the cluster at an address, or to one of this machine."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise LoadError(
            "Cannot use the engine 'ray'",
            "Ray is not installed",
            "Install it: pip install hiddenscope[ray].",
        ) from error
    if not ray.is_initialized():
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            # A cluster that runs already has decided about its own.
            include_dashboard=False if address is None else None,
        )
    return ray
