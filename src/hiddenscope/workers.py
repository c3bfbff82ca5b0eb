"""Workers: isolated subprocesses, and how they talk to the process that starts them.

A message on a pipe is a frame: a JSON header and raw bytes, each preceded by its
length. Nothing is pickled: reading a frame never runs code that its sender chose.

>>> import io
>>> read_frame(io.BytesIO(pack_frame({"type": "result"}, b"bytes")))
Frame(header={'type': 'result'}, body=b'bytes')

`concurrent.futures.ProcessPoolExecutor` does not do here. Spawned processes import the
caller's main module: a plain script without `if __name__ == "__main__"` would run again
in each of them. Forked processes are not safe once torch or numba have started threads.
Both unpickle what they are sent. A worker here is a plain `python -P` with two pipes.
"""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeAlias

Header: TypeAlias = dict[str, Any]

LENGTHS = struct.Struct("<IQ")
MAX_HEADER_BYTES = 64 * 2**20
PACKAGE_PARENT = Path(__file__).parents[1]


class Frame(NamedTuple):
    """One message."""

    header: Header
    body: bytes


def pack_frame(header: Header, body: bytes = b"") -> bytes:
    """Return a message as the bytes of one frame."""
    text = json.dumps(header, ensure_ascii=True, separators=(",", ":")).encode("ascii")
    return LENGTHS.pack(len(text), len(body)) + text + body


def read_frame(stream: IO[bytes], max_body: int | None = None) -> Frame | None:
    """Read the next frame, or return None where the stream ends before it is whole.

    Raise a ValueError where the frame announces more than `max_body` bytes, before any
    memory is allocated for them.
    """
    lengths = stream.read(LENGTHS.size)
    if len(lengths) < LENGTHS.size:
        return None
    header_bytes, body_bytes = LENGTHS.unpack(lengths)
    body_too_large = max_body is not None and body_bytes > max_body
    if header_bytes > MAX_HEADER_BYTES or body_too_large:
        raise ValueError(
            f"a frame of {header_bytes:,} and {body_bytes:,} bytes is too large"
        )
    text = stream.read(header_bytes)
    body = stream.read(body_bytes)
    if len(text) < header_bytes or len(body) < body_bytes:
        return None
    return Frame(json.loads(text), body)


class Channel:
    """Two pipes, one to read frames from and one to write frames to.

    Several threads may send. Only one may receive.
    """

    def __init__(
        self, incoming: IO[bytes], outgoing: IO[bytes], max_body: int | None = None
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._max_body = max_body
        self._sending = threading.Lock()

    def send(self, header: Header, body: bytes = b"") -> None:
        """Write one frame; raise a BrokenPipeError where the other side has ended."""
        frame = pack_frame(header, body)
        with self._sending:
            self._outgoing.write(frame)
            self._outgoing.flush()

    def receive(self) -> Frame | None:
        """Wait for the next frame; return None once the other side has ended."""
        return read_frame(self._incoming, self._max_body)

    def close_outgoing(self) -> None:
        """Tell the other side that nothing more will be sent."""
        # Closing flushes, which fails where the other side has ended.
        with suppress(OSError):
            self._outgoing.close()

    def close(self) -> None:
        """Close both pipes. No thread may be receiving."""
        self.close_outgoing()
        self._incoming.close()


class WorkerProcess(Channel):
    """A running worker, as the process that started it sees it: a channel to it.

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
        # The worker imports this copy of the package.
        paths = [str(PACKAGE_PARENT), os.environ.get("PYTHONPATH")]
        python_path = os.pathsep.join(filter(None, paths))
        self._process = subprocess.Popen(
            # -P keeps the working folder, and that of a script, off the import path:
            # a file there could otherwise stand in for a module of a library.
            [sys.executable, "-P", *target],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": python_path} | dict(environment or {}),
            start_new_session=new_session,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        super().__init__(self._process.stdout, self._process.stdin, max_body)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

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
