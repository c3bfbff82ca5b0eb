"""Ray engine: units over Ray actors, on all machines that see the folder of the store.

An actor may die at any instant, and its machine with it. Nothing is kept in Ray: what
is done is what the store says.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hiddenscope import progress
from hiddenscope.errors import LoadError
from hiddenscope.extract.compute import Done, Pipeline
from hiddenscope.extract.recipe import ModelRecipe
from hiddenscope.extract.schedule import Schedule
from hiddenscope.modules import hooks
from hiddenscope.store import Writer, resume_store

# An actor holds the unit that it computes, and the next.
UNITS_IN_HAND = 2
# What an actor does besides computing units.
READY = "ready"
FLUSH = "flush"


class RayWorker:
    """What runs in an actor: one model, and a pipeline of units."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        progress.show(False)
        self._writer = resume_store(order["store"], digest=order["digest"])
        plan = self._writer.plan
        # Held for as long as the actor lives.
        self._threads = hooks.threads(plan.environment["threads"])
        self._threads.__enter__()
        # Ray numbers the GPUs of an actor from 0, whichever they are on the machine.
        device = "cuda" if order["recipe"]["device"].startswith("cuda") else None
        self._model = ModelRecipe.from_json(order["recipe"]).model(plan, device)
        self._done: list[Done] = []
        self._pipeline = Pipeline(self._model, self._writer, self._done.append)

    def ready(self) -> int:
        """Return the process id, once the model is loaded."""
        return os.getpid()

    def compute(self, unit: str) -> list[Done]:
        """Compute a unit; return what was committed since the last call.

        The unit itself may still be on its way to the disk.
        """
        self._pipeline.put(unit)
        return self._take_done()

    def flush(self) -> list[Done]:
        """Wait until everything is committed; return what was since the last call."""
        with self._pipeline:
            pass
        self._pipeline = Pipeline(self._model, self._writer, self._done.append)
        return self._take_done()

    def _take_done(self) -> list[Done]:
        # A thread of the pipeline may append meanwhile, so remove only what was copied.
        done = self._done[:]
        del self._done[: len(done)]
        return done


def run_on_ray(
    recipe: ModelRecipe,
    writer: Writer,
    units: Sequence[str],
    workers: int | None,
    address: str | None,
    report: Callable[[Done], None],
) -> None:
    """Compute units in Ray actors; one that dies is replaced where there is room."""
    ray = _connect(address)
    gpus = 1 if recipe.device.startswith("cuda") else 0
    cpus = int(writer.plan.environment["threads"])
    order = {
        "recipe": recipe.to_json(),
        "store": str(writer.path.absolute()),
        "digest": writer.digest,
    }
    # Ray must not retry by itself: the schedule knows which units are still wanted.
    as_actor = ray.remote(
        num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0
    )
    actor_class = as_actor(RayWorker)
    actors = _RayActors(ray, lambda: actor_class.remote(order), Schedule(units, report))
    try:
        actors.run(workers or _worker_count(ray, cpus, gpus))
    finally:
        actors.end()


class _RayActors:
    """The actors of a job, and the tasks that they have."""

    def __init__(
        self, ray: Any, start_actor: Callable[[], Any], schedule: Schedule
    ) -> None:
        self.ray = ray
        self.start_actor = start_actor
        self.schedule = schedule
        self.actors: dict[int, Any] = {}
        # By task: the number of its actor, and the unit, READY or FLUSH.
        self.tasks: dict[Any, tuple[int, str]] = {}
        self.started = 0

    def run(self, count: int) -> None:
        """Keep that many actors busy until every unit is done."""
        for _ in range(count):
            self._start()
        while not self.schedule.finished:
            if not self.tasks:
                self._feed()
            done, _ = self.ray.wait(list(self.tasks), num_returns=1, timeout=1.0)
            for task in done:
                self._collect(task, *self.tasks.pop(task))
            self._feed()
        if self.schedule.error is not None:
            raise self.schedule.error

    def _start(self) -> None:
        actor = self.start_actor()
        self.actors[self.started] = actor
        self.tasks[actor.ready.remote()] = self.started, READY
        self.started += 1

    def _collect(self, task: Any, number: int, name: str) -> None:
        """Take what a task returned; if its actor has died, start another."""
        if number not in self.actors:
            return
        try:
            returned = self.ray.get(task)
        # Our code in the actor raised an error: it would again.
        except self.ray.exceptions.RayTaskError as error:
            cause = getattr(error, "cause", None)
            self.schedule.fail(cause if isinstance(cause, Exception) else error)
        # The actor is gone.
        except self.ray.exceptions.RayError as error:
            del self.actors[number]
            self.schedule.put_back(
                number, f"the last ended with {type(error).__name__}"
            )
            if not self.schedule.finished:
                self._start()
        else:
            if name != READY:
                for done in returned:
                    self.schedule.done(done)

    def _feed(self) -> None:
        """Give every actor that is ready its next units.

        One that gets none is asked to commit what it holds.
        """
        for number, actor in self.actors.items():
            names = [name for owner, name in self.tasks.values() if owner == number]
            if READY in names:
                continue
            while len(names) < UNITS_IN_HAND:
                unit = self.schedule.take(number)
                if unit is None:
                    break
                self.tasks[actor.compute.remote(unit)] = number, unit
                names.append(unit)
            if not names and not self.schedule.finished:
                self.tasks[actor.flush.remote()] = number, FLUSH

    def end(self) -> None:
        """Let the actors go."""
        for actor in self.actors.values():
            self.ray.kill(actor)


def _connect(address: str | None) -> Any:
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
        options: dict[str, Any] = {}
        # A cluster that runs already has decided about its dashboard.
        if address is None:
            options["include_dashboard"] = False
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, **options
        )
    return ray


def _worker_count(ray: Any, cpus: int, gpus: int) -> int:
    """Return how many workers the cluster has room for."""
    resources = ray.cluster_resources()
    if gpus:
        return max(1, int(resources.get("GPU", 0) // gpus))
    return max(1, int(resources.get("CPU", 1) // cpus))
