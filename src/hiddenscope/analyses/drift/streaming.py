"""Run two passes in step, so that at most two layers' states are in memory.

The reference runs in a thread of its own and hands over one state at a time. The
candidate takes each state when it has computed its own, compares the two, and both
continue.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import TypeVar

from hiddenscope.analyses.drift.observe import ObservedState

# Seconds between checks that the other thread is still running.
WAIT = 0.05
Returned = TypeVar("Returned")


class StateQueue:
    """Passes states from one thread to another, one at a time."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.failure: BaseException | None = None
        self._queue: Queue[ObservedState] = Queue(maxsize=1)
        self._ended, self._closed = Event(), Event()

    def give(self, state: ObservedState) -> None:
        """Hand over a state once the last was taken; drop it if the queue is closed."""
        self.names.append(state.name)
        while not self._closed.is_set():
            try:
                self._queue.put(state, timeout=WAIT)
                return
            except Full:
                continue

    def take(self, name: str) -> ObservedState | None:
        """Return the state of this name and drop those before it.

        The result is None if the reference has ended without it.
        """
        while not (self._ended.is_set() and self._queue.empty()):
            try:
                state = self._queue.get(timeout=WAIT)
            except Empty:
                continue
            if state.name == name:
                return state
        return None

    def run_in_step(
        self, reference: Callable[[], object], candidate: Callable[[], Returned]
    ) -> Returned:
        """Run the reference in a thread and the candidate here.

        An error of either is raised here.
        """

        def run_reference() -> None:
            try:
                reference()
            except BaseException as error:
                self.failure = error
            finally:
                self._ended.set()

        thread = Thread(target=run_reference, daemon=True)
        thread.start()
        try:
            returned = candidate()
        finally:
            self._closed.set()
            thread.join()
        if self.failure is not None:
            raise self.failure
        return returned
