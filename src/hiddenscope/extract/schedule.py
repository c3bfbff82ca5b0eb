"""Schedule: which units are to be computed, which are in hand, and which are done. The
store alone decides the last.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from hiddenscope.errors import PassError
from hiddenscope.extract.compute import Done

# Seconds after which a unit in hand may be computed by another worker too, at the
# least.
PATIENCE = 10.0
MOST_DEATHS = 10  # of workers, one after another, with no unit done between


@dataclass
class _Held:
    holder: Hashable
    since: float


class Schedule:
    """Hands units to workers, each once; a unit whose worker died, or stands still, is
    handed out again.

    That a unit is computed twice does no harm: the store keeps the first, and both have
    the same bytes.

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
        self._held: dict[str, _Held] = {}
        self._longest = 0.0
        self._deaths = 0

    @property
    def finished(self) -> bool:
        """Whether every unit is done, or the job has failed."""
        return not self._left or self.error is not None

    def take(self, holder: Hashable) -> str | None:
        """The next unit; None if there is none now. With nothing else to do, one that
        another holds for too long.
        """
        with self.changed:
            if self.finished:
                return None
            if self._waiting:
                unit = self._waiting.popleft()
            else:
                others = [
                    unit for unit, held in self._held.items() if held.holder != holder
                ]
                unit = min(others, key=lambda unit: self._held[unit].since, default="")
                if not unit or time.monotonic() - self._held[unit].since < max(
                    PATIENCE, 3 * self._longest
                ):
                    return None
            self._held[unit] = _Held(holder, time.monotonic())
            return unit

    def done(self, done: Done) -> None:
        """A unit is committed."""
        with self.changed:
            held = self._held.pop(done.unit, None)
            if held is not None:
                self._longest = max(self._longest, time.monotonic() - held.since)
            self._deaths = 0
            if done.unit in self._left:
                self._left.discard(done.unit)
                self.report(done)
            self.changed.notify_all()

    def put_back(self, holder: Hashable, reason: str) -> None:
        """A worker has died: what it held is to be computed by another."""
        with self.changed:
            mine = [unit for unit, held in self._held.items() if held.holder == holder]
            for unit in reversed(mine):
                del self._held[unit]
                if unit in self._left:
                    self._waiting.appendleft(unit)
            self._deaths += 1
            if self._deaths > MOST_DEATHS:
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
        """End the job with an error."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def wake(self) -> None:
        """Let everybody who waits look again."""
        with self.changed:
            self.changed.notify_all()

    def wait(self, seconds: float | None = None) -> None:
        """Wait until something has changed."""
        with self.changed:
            if not self.finished:
                self.changed.wait(seconds)
