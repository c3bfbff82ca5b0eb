"""Schedule: which units are waiting, which are in hand, and which are done.

A unit is done when the store says so.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from hiddenscope.errors import PassError
from hiddenscope.extract.compute import Done

# Seconds after which a unit may be given to a second worker, at the least.
PATIENCE = 10.0
# Workers that may end one after another while no unit gets done.
MAX_DEATHS = 10


@dataclass
class _InHand:
    worker: Hashable
    since: float


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
        self._in_hand: dict[str, _InHand] = {}
        self._longest_seconds = 0.0
        self._deaths = 0

    @property
    def finished(self) -> bool:
        """Return whether every unit is done, or the job has failed."""
        return not self._left or self.error is not None

    def take(self, worker: Hashable) -> str | None:
        """Return the next unit for a worker, or None if there is nothing to do now."""
        with self.changed:
            if self.finished:
                return None
            if self._waiting:
                unit: str | None = self._waiting.popleft()
            else:
                unit = self._overdue(worker)
            if unit is not None:
                self._in_hand[unit] = _InHand(worker, time.monotonic())
            return unit

    def _overdue(self, worker: Hashable) -> str | None:
        """Return the unit that another worker has held for longest, if for too long."""
        oldest = None
        for unit, in_hand in self._in_hand.items():
            if in_hand.worker == worker:
                continue
            if oldest is None or in_hand.since < self._in_hand[oldest].since:
                oldest = unit
        if oldest is None:
            return None
        patience = max(PATIENCE, 3 * self._longest_seconds)
        seconds = time.monotonic() - self._in_hand[oldest].since
        return oldest if seconds >= patience else None

    def done(self, done: Done) -> None:
        """Note that a unit is committed."""
        with self.changed:
            in_hand = self._in_hand.pop(done.unit, None)
            if in_hand is not None:
                seconds = time.monotonic() - in_hand.since
                self._longest_seconds = max(self._longest_seconds, seconds)
            self._deaths = 0
            if done.unit in self._left:
                self._left.discard(done.unit)
                self.report(done)
            self.changed.notify_all()

    def put_back(self, worker: Hashable, reason: str) -> None:
        """Note that a worker died, and let others compute its units."""
        with self.changed:
            units = []
            for unit, in_hand in self._in_hand.items():
                if in_hand.worker == worker:
                    units.append(unit)
            for unit in reversed(units):
                del self._in_hand[unit]
                if unit in self._left:
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

    def wake(self) -> None:
        """Wake everyone who waits."""
        with self.changed:
            self.changed.notify_all()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until something has changed."""
        with self.changed:
            if not self.finished:
                self.changed.wait(seconds)
