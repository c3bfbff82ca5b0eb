"""Cluster: units over Ray actors, on any number of machines that see the folder of the
store.

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
from hiddenscope.store import Writer, resume

IN_HAND = 2


class RayWorker:
    """What runs in an actor: one model, and a pipeline of units."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        progress.show(False)
        writer = resume(order["store"], digest=order["digest"])
        # Held for as long as the actor lives.
        self._threads = hooks.threads(writer.plan.environment["threads"])
        self._threads.__enter__()
        # Ray shows an actor its own GPUs.
        device = "cuda" if order["recipe"]["device"].startswith("cuda") else None
        self._model = ModelRecipe.from_json(order["recipe"]).model(writer.plan, device)
        self._done: list[Done] = []
        self._pipeline = Pipeline(self._model, writer, self._done.append)
        self._writer = writer

    def ready(self) -> int:
        """Answers once the model is loaded: with the id of its process."""
        return os.getpid()

    def compute(self, unit: str) -> list[Done]:
        """Compute a unit, and say which are committed: this one may still be on its way
        to the disk.
        """
        self._pipeline.put(unit)
        return self._taken()

    def flush(self) -> list[Done]:
        """Wait until everything is committed."""
        with self._pipeline:
            pass
        self._pipeline = Pipeline(self._model, self._writer, self._done.append)
        return self._taken()

    def _taken(self) -> list[Done]:
        taken = self._done[:]
        del self._done[: len(taken)]
        return taken


def run(
    recipe: ModelRecipe,
    writer: Writer,
    units: Sequence[str],
    workers: int | None,
    address: str | None,
    report: Callable[[Done], None],
) -> None:
    """Compute units in actors of a Ray cluster; one that dies is started again,
    wherever there is room.
    """
    ray = _ray(address)
    gpus = 1 if recipe.device.startswith("cuda") else 0
    cpus = int(writer.plan.environment["threads"])
    order = {
        "recipe": recipe.to_json(),
        "store": str(writer.path.absolute()),
        "digest": writer.digest,
    }
    count = workers or _room(ray, cpus, gpus)
    make = ray.remote(num_cpus=cpus, num_gpus=gpus, max_restarts=0, max_task_retries=0)(
        RayWorker
    )
    actors = _Actors(ray, lambda: make.remote(order), Schedule(units, report))
    try:
        actors.run(count)
    finally:
        actors.end()


class _Actors:
    """The actors of a job, and the tasks that they have."""

    def __init__(self, ray: Any, make: Callable[[], Any], schedule: Schedule) -> None:
        self.ray, self.make, self.schedule = ray, make, schedule
        # A task, its actor and what it does.
        self.tasks: dict[Any, tuple[int, str]] = {}
        self.actors: dict[int, Any] = {}
        self.started = 0

    def run(self, count: int) -> None:
        """Keep so many actors busy until every unit is done."""
        for _ in range(count):
            self._start()
        while not self.schedule.finished:
            if not self.tasks:
                self._feed()
            done, _ = self.ray.wait(list(self.tasks), num_returns=1, timeout=1.0)
            for task in done:
                self._take(task, *self.tasks.pop(task))
            self._feed()
        if self.schedule.error is not None:
            raise self.schedule.error

    def _start(self) -> None:
        number, self.started = self.started, self.started + 1
        self.actors[number] = self.make()
        self.tasks[self.actors[number].ready.remote()] = number, "ready"

    def _take(self, task: Any, number: int, what: str) -> None:
        """Take what a task gave; if its actor has died, start another."""
        if number not in self.actors:
            return
        try:
            given = self.ray.get(task)
        except self.ray.exceptions.RayTaskError as error:
            self.schedule.fail(
                error.cause
                if isinstance(getattr(error, "cause", None), Exception)
                else error
            )
        except self.ray.exceptions.RayError as error:
            del self.actors[number]
            self.schedule.put_back(
                number, f"the last ended with {type(error).__name__}"
            )
            if not self.schedule.finished:
                self._start()
        else:
            for done in given if what != "ready" else ():
                self.schedule.done(done)

    def _feed(self) -> None:
        """Give every actor that is ready its next units; one that has none commits what
        it holds.
        """
        for number, actor in self.actors.items():
            mine = [what for owner, what in self.tasks.values() if owner == number]
            if "ready" in mine:
                continue
            while (
                len(mine) < IN_HAND and (unit := self.schedule.take(number)) is not None
            ):
                self.tasks[actor.compute.remote(unit)] = number, unit
                mine.append(unit)
            if not mine and not self.schedule.finished:
                self.tasks[actor.flush.remote()] = number, "flush"

    def end(self) -> None:
        """Let the actors go."""
        for actor in self.actors.values():
            self.ray.kill(actor)


def _ray(address: str | None) -> Any:
    """Ray, connected to a cluster: the one at an address, or one of this machine alone."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        reason = "Ray is not installed"
        raise LoadError(
            "Cannot use the engine 'ray'",
            reason,
            "Install it: pip install hiddenscope[ray].",
        ) from error
    if not ray.is_initialized():
        options: dict[str, Any] = (
            {"include_dashboard": False} if address is None else {}
        )
        ray.init(
            address=address, log_to_driver=False, logging_level=logging.ERROR, **options
        )
    return ray


def _room(ray: Any, cpus: int, gpus: int) -> int:
    """How many workers the cluster has room for."""
    resources = ray.cluster_resources()
    return max(
        1,
        int(
            resources.get("GPU", 0) // gpus if gpus else resources.get("CPU", 1) // cpus
        ),
    )
