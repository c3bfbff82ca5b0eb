"""Local: units over processes of this machine. Each is a plain `python -m
hiddenscope.extract.local`.

It reads what it needs and then the names of units from its standard input, and writes
what it has committed to its standard output, as lines of JSON. No process is forked:
torch may have threads. None imports the caller's main module.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from hiddenscope import errors, progress
from hiddenscope.extract.compute import Done, Pipeline
from hiddenscope.extract.recipe import ModelRecipe
from hiddenscope.extract.schedule import Schedule
from hiddenscope.modules import hooks
from hiddenscope.store import Writer, resume

IN_HAND = 2  # units of a worker: one that it computes, and the next
END_SECONDS = 2.0


def run(
    recipe: ModelRecipe,
    writer: Writer,
    units: Sequence[str],
    workers: int,
    report: Callable[[Done], None],
    batch_done: Callable[[int], None],
    speed: float | None = None,
) -> None:
    """Compute units in so many processes; one that dies is started again."""
    schedule = Schedule(units, report)
    order: dict[str, Any] = {
        "recipe": recipe.to_json(),
        "store": str(writer.path.absolute()),
        "digest": writer.digest,
    }
    order["speed"] = speed
    served = []
    for number in range(workers):
        own_order = order | {"device": _device(recipe, number)}
        served.append(_Served(schedule, own_order, batch_done))
    try:
        for one in served:
            one.start()
        while not schedule.finished:
            schedule.wait(1.0)
    finally:
        schedule.fail(KeyboardInterrupt()) if not schedule.finished else None
        for one in served:
            one.end()
    if schedule.error is not None:
        raise schedule.error


def _device(recipe: ModelRecipe, number: int) -> str:
    """A GPU for each worker, as far as there are so many."""
    import torch

    if not recipe.device.startswith("cuda"):
        return recipe.device
    return f"cuda:{number % torch.cuda.device_count()}"


class _Served(threading.Thread):
    """Feeds one process, and starts another when it dies."""

    def __init__(
        self,
        schedule: Schedule,
        order: dict[str, Any],
        batch_done: Callable[[int], None],
    ) -> None:
        super().__init__(name="hiddenscope-worker", daemon=True)
        self.schedule, self.order, self.batch_done = schedule, order, batch_done
        self.process: subprocess.Popen[bytes] | None = None
        self.feeder: threading.Thread | None = None
        self.held = 0

    def run(self) -> None:
        try:
            while not self.schedule.finished:
                with TemporaryFile() as log:
                    self._serve(log)
                    reason = self._ended(log)
                if not self.schedule.finished:
                    self.schedule.put_back(self, reason)
        except BaseException as error:
            self.schedule.fail(error)

    def _serve(self, log: IO[bytes]) -> None:
        """Start a process and feed it until it ends."""
        self.process, self.feeder, self.held = _start(log), None, 0
        assert self.process.stdout is not None
        # While it was started, so that `end` may not know of it.
        if self.schedule.finished:
            self.process.kill()
        with suppress(OSError):  # it died: what it said before is read all the same
            self._send(self.order)
        for line in self.process.stdout:
            said = json.loads(line)
            if "error" in said:
                self.schedule.fail(_error(said["error"]))
                return
            if "ready" in said:
                self.feeder = threading.Thread(
                    target=self._feed, args=(self.process,), daemon=True
                )
                self.feeder.start()
                continue
            if "batch" in said:
                with self.schedule.changed:
                    self.batch_done(said["batch"])
                continue
            with self.schedule.changed:
                self.held -= 1
            self.schedule.done(Done(**said))

    def _feed(self, process: "subprocess.Popen[bytes]") -> None:
        """Keep the process busy until there is nothing left to do, or it dies."""
        with suppress(OSError, ValueError):
            while not self.schedule.finished and process.poll() is None:
                unit = self.schedule.take(self) if self.held < IN_HAND else None
                if unit is None:
                    self.schedule.wait(0.2)
                else:
                    with self.schedule.changed:
                        self.held += 1
                    self._send({"unit": unit})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def _ended(self, log: IO[bytes]) -> str:
        assert self.process is not None
        code = self.process.wait()
        # Or it could take a unit for this process, and send it to the next one.
        if self.feeder is not None:
            self.schedule.wake()
            self.feeder.join()
        for pipe in (self.process.stdin, self.process.stdout):
            with suppress(OSError):  # it may be gone before it has read everything
                pipe.close()  # type: ignore[union-attr]
        log.seek(0)
        last = log.read().decode("utf-8", "replace").strip().splitlines()[-1:]
        return f"the last ended with code {code}" + (
            f" ({ascii(last[0])[:200]})" if last else ""
        )

    def end(self) -> None:
        """End the process: whatever it still computes is committed already, or not
        wanted any more.
        """
        process = self.process
        if process is not None:
            with suppress(OSError):
                process.stdin.close()  # type: ignore[union-attr]
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS if self.schedule.error is None else 0)
            process.kill()
        if self.ident is not None:  # it was started
            self.join()


def _start(log: IO[bytes]) -> "subprocess.Popen[bytes]":
    ours = str(Path(__file__).parents[2])
    paths = [ours, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(paths),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "hiddenscope.extract.local"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        # Ctrl-C is for the process that was started by hand, which tells the others.
        start_new_session=True,
    )


def _error(said: dict[str, str]) -> BaseException:
    """The error of a worker, of the class that it had there."""
    kind = getattr(errors, said["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.Error):
        return kind(said["problem"], said["reason"], said["remedy"])
    return errors.PassError(
        "A worker failed", f"{said['kind']}: {said['reason']}", "See what it says."
    )


def told(error: BaseException) -> dict[str, str]:
    """An error in JSON."""
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
    """Serve the process that started this one, until it closes the pipe or ends."""
    said = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not be taken for an answer
    progress.show(False)

    def say(message: dict[str, Any]) -> None:
        said.write(json.dumps(message) + "\n")
        said.flush()

    def fail(error: BaseException) -> None:
        # The process that started this one is gone, or has ended the job already.
        with suppress(BrokenPipeError):
            say({"error": told(error)})

    try:
        order = json.loads(sys.stdin.buffer.readline())
        writer = resume(order["store"], digest=order["digest"])
        with hooks.threads(writer.plan.environment["threads"]):
            model = ModelRecipe.from_json(order["recipe"]).model(
                writer.plan, order["device"]
            )
            pipeline = Pipeline(
                model,
                writer,
                lambda done: say(asdict(done)),
                order["speed"],
                fail,
                lambda tokens: say({"batch": tokens}),
            )
            with pipeline:
                say({"ready": os.getpid()})
                for line in sys.stdin.buffer:
                    pipeline.put(json.loads(line)["unit"])
    except BrokenPipeError:
        return  # the process that started this one is gone
    except Exception as error:
        fail(error)


if __name__ == "__main__":
    main()
