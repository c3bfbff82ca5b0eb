"""Process: start an isolated Python subprocess, talk to it, and end it.

`concurrent.futures.ProcessPoolExecutor` does not do here. Spawned processes import the
caller's main module: a plain script without `if __name__ == "__main__"` would run again
in each of them. Forked processes are not safe once torch or numba have started threads.
Both unpickle what they are sent. A worker here is a plain `python -P` with two pipes.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from hiddenscope.workers.frames import Channel, Frame, Header

PACKAGE_PARENT = Path(__file__).parents[2]


class WorkerProcess:
    """A running worker, as the process that started it sees it.

    `target` is what follows `python -P` on the command line: `-m` and a module, or a
    file. The worker ends when it has answered and finds its pipe closed, so it never
    outlives its parent for long.

    `new_session` puts it into a session of its own. A Ctrl-C in the terminal is then
    for the parent alone, and `kill` also ends whatever the worker has started. A worker
    that itself belongs to a worker stays in its parent's session, to be killed with it.
    """

    def __init__(
        self,
        target: Sequence[str],
        *,
        stderr: int | IO[bytes] | None = subprocess.DEVNULL,
        folder: str | None = None,
        environment: Mapping[str, str] | None = None,
        new_session: bool = True,
        max_body: int | None = None,
    ) -> None:
        self._has_session = new_session and hasattr(os, "killpg")
        self._process = subprocess.Popen(
            # -P keeps the working folder, and that of a script, off the import path:
            # a file there could otherwise stand in for a module of a library.
            [sys.executable, "-P", *target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=_environment() | dict(environment or {}),
            start_new_session=new_session,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.channel = Channel(self._process.stdout, self._process.stdin, max_body)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, header: Header, body: bytes = b"") -> None:
        """Send a message; raise a BrokenPipeError where the worker has ended."""
        self.channel.send(header, body)

    def receive(self) -> Frame | None:
        """Wait for the next message; return None once the worker has ended."""
        return self.channel.receive()

    def poll(self) -> int | None:
        """Return the exit code, or None while the worker runs."""
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the worker has ended; return its exit code, None on timeout."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def interrupt(self) -> None:
        """Send the worker a SIGINT."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the worker, and with a session of its own also what it has started."""
        # Once the exit code has been collected, the id may belong to another process.
        if self._process.returncode is not None:
            return
        if not self._has_session:
            self._process.kill()
            return
        # macOS answers EPERM where nothing but zombies is left in the group.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the pipes of a worker that has ended."""
        self.channel.close()


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def parent_channel() -> Channel:
    """Return the channel from this worker to its parent; call it once, at the start."""
    outgoing = os.fdopen(os.dup(1), "wb")
    # Whatever a library prints must not come between two frames.
    os.dup2(2, 1)
    return Channel(sys.stdin.buffer, outgoing)


def _environment() -> dict[str, str]:
    """Return an environment in which the worker imports this copy of the package."""
    paths = [str(PACKAGE_PARENT)]
    inherited = os.environ.get("PYTHONPATH")
    if inherited:
        paths.append(inherited)
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
