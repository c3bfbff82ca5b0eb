"""Local: units over worker processes of this machine.

A worker is a `python -m hiddenscope.extract.local`. It is sent an order, which says
where the store and the model are, and then the names of units. It answers with what it
has committed, so that a worker that dies costs no more than the units it held.
"""

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from tempfile import TemporaryFile
from typing import IO

import torch

from hiddenscope import errors, progress
from hiddenscope.extract.compute import Done, Pipeline
from hiddenscope.extract.recipe import ModelRecipe
from hiddenscope.extract.schedule import Schedule
from hiddenscope.modules import hooks
from hiddenscope.store import Writer, resume_store
from hiddenscope.workers import Channel, Header, WorkerProcess, parent_channel

# A worker holds the unit that it computes, and the next.
UNITS_IN_HAND = 2
END_SECONDS = 2.0
# What sending raises: the first where the worker has died, the second where `end` has
# closed the pipe.
SEND_ERRORS = (OSError, ValueError)


def run_locally(
    recipe: ModelRecipe,
    writer: Writer,
    units: Sequence[str],
    workers: int,
    report: Callable[[Done], None],
    batch_done: Callable[[int], None],
) -> None:
    """Compute units in worker processes; one that dies is started again."""
    schedule = Schedule(units, report)
    supervisors = []
    for number in range(workers):
        order = {
            "recipe": recipe.to_json(),
            "store": str(writer.path.absolute()),
            "digest": writer.digest,
            "device": _device(recipe, number),
        }
        supervisors.append(_Supervisor(schedule, order, batch_done))
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


def _device(recipe: ModelRecipe, number: int) -> str:
    """Return the device of a worker: GPUs are dealt out in turn."""
    if not recipe.device.startswith("cuda"):
        return recipe.device
    return f"cuda:{number % torch.cuda.device_count()}"


class _Supervisor(threading.Thread):
    """Feeds one worker, and starts another when it dies."""

    def __init__(
        self, schedule: Schedule, order: Header, batch_done: Callable[[int], None]
    ) -> None:
        super().__init__(name="hiddenscope-worker", daemon=True)
        self.schedule = schedule
        self.order = order
        self.batch_done = batch_done
        self.process: WorkerProcess | None = None
        self.units_in_hand = 0

    def run(self) -> None:
        try:
            while not self.schedule.finished:
                with TemporaryFile() as log:
                    reason = self._run_worker(log)
                if not self.schedule.finished:
                    self.schedule.put_back(self, reason)
        except BaseException as error:
            self.schedule.fail(error)

    def _run_worker(self, log: IO[bytes]) -> str:
        """Start a worker, feed it until it ends, and return how it ended."""
        process = _start(log)
        self.process = process
        self.units_in_hand = 0
        feeder = threading.Thread(target=self._feed, args=(process,), daemon=True)
        # `end` may have been called meanwhile, and did not know of this process.
        if self.schedule.finished:
            process.kill()
        # A worker that died may have said why, and that is read all the same.
        with suppress(*SEND_ERRORS):
            process.send(self.order)
        while (frame := process.receive()) is not None:
            if frame.header["type"] == "ready":
                feeder.start()
            elif not self._handle(frame.header):
                break
        code = process.wait()
        # The feeder must be gone before the next worker is started: a unit that it
        # takes would count as held by that one, which never gets it.
        if feeder.ident is not None:
            self.schedule.wake()
            feeder.join()
        process.close()
        log.seek(0)
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
        reason = f"the last ended with code {code}"
        if lines:
            reason += f" ({ascii(lines[-1])[:200]})"
        return reason

    def _handle(self, message: Header) -> bool:
        """Take in a message of the worker; return False where it was the last one."""
        if message["type"] == "error":
            self.schedule.fail(_error_from_json(message["error"]))
            return False
        if message["type"] == "batch":
            with self.schedule.changed:
                self.batch_done(message["tokens"])
        else:
            with self.schedule.changed:
                self.units_in_hand -= 1
            self.schedule.done(Done(**message["done"]))
        return True

    def _feed(self, process: WorkerProcess) -> None:
        """Keep the worker busy until every unit is done, or the worker dies."""
        with suppress(*SEND_ERRORS):
            while not self.schedule.finished and process.poll() is None:
                unit = None
                if self.units_in_hand < UNITS_IN_HAND:
                    unit = self.schedule.take(self)
                if unit is None:
                    self.schedule.wait(0.2)
                    continue
                with self.schedule.changed:
                    self.units_in_hand += 1
                process.send({"unit": unit})

    def end(self) -> None:
        """End the worker. What it still computes is committed already, or unwanted."""
        process = self.process
        if process is not None:
            process.channel.close_outgoing()
            process.wait(END_SECONDS if self.schedule.error is None else 0)
            process.kill()
        # A thread that was never started cannot be joined.
        if self.ident is not None:
            self.join()


def _start(log: IO[bytes]) -> WorkerProcess:
    return WorkerProcess(
        ["-m", "hiddenscope.extract.local"],
        stderr=log,
        environment={"TOKENIZERS_PARALLELISM": "false"},
    )


def _error_from_json(described: dict[str, str]) -> BaseException:
    """Return the error of a worker, of the class that it had there."""
    kind = getattr(errors, described["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.Error):
        return kind(described["problem"], described["reason"], described["remedy"])
    return errors.PassError(
        "A worker failed",
        f"{described['kind']}: {described['reason']}",
        "See what it says.",
    )


def _error_to_json(error: BaseException) -> dict[str, str]:
    kind = type(error).__name__
    if isinstance(error, errors.Error):
        return {
            "kind": kind,
            "problem": error.problem,
            "reason": error.reason,
            "remedy": error.remedy,
        }
    return {"kind": kind, "problem": "", "reason": str(error)[:500], "remedy": ""}


def main() -> None:
    """Compute units until the parent closes the pipe, or ends."""
    channel = parent_channel()
    progress.show(False)

    def fail(error: BaseException) -> None:
        # The parent may be gone, or have ended the job already.
        with suppress(BrokenPipeError):
            channel.send({"type": "error", "error": _error_to_json(error)})

    try:
        _compute_units(channel, fail)
    # The parent is gone.
    except BrokenPipeError:
        return
    except Exception as error:
        fail(error)


def _compute_units(channel: Channel, fail: Callable[[BaseException], None]) -> None:
    frame = channel.receive()
    if frame is None:
        return
    order = frame.header
    writer = resume_store(order["store"], digest=order["digest"])
    recipe = ModelRecipe.from_json(order["recipe"])
    # Sums over another number of threads have other last bits.
    with hooks.threads(writer.plan.environment["threads"]):
        pipeline = Pipeline(
            recipe.model(writer.plan, order["device"]),
            writer,
            lambda done: channel.send({"type": "done", "done": asdict(done)}),
            fail,
            lambda tokens: channel.send({"type": "batch", "tokens": tokens}),
        )
        with pipeline:
            channel.send({"type": "ready", "pid": os.getpid()})
            while (frame := channel.receive()) is not None:
                pipeline.put(frame.header["unit"])


if __name__ == "__main__":
    main()
