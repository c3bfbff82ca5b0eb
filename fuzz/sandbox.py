"""One case in a process of its own, which may use so much time and memory and no more."""

import json
import os
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import psutil

from hiddenscope.errors import Error

SECONDS = 10.0
MEMORY = 2 * 2**30
_POLL = 0.02


@dataclass(frozen=True)
class Case:
    """What is tried: a kind, the words that name it in a report, and the attempt.

    The attempt returns a verdict such as "loaded"; an error of ours counts as "refused", any other as "foreign".
    """

    kind: str
    name: str
    attempt: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """What came of a case: its verdict with a detail, and the time and memory that it took."""

    case: Case
    verdict: str
    detail: str = ""
    seconds: float = 0.0
    memory: int = 0


def judged(attempt: Callable[[], str]) -> tuple[str, str]:
    """The verdict on an attempt in this process, with a detail."""
    try:
        return attempt(), ""
    except Error as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in trace if "hiddenscope" in frame.filename][-2:]
        frames = [f"{os.path.basename(f.filename)}:{f.lineno}" for f in (*ours, *trace[-2:])]
        return "foreign", f"{type(error).__name__}: {str(error)[:200]} ({' '.join(frames)})"


def sandboxed(
    cases: Iterable[Case], workers: int = 2, seconds: float = SECONDS, memory: int = MEMORY
) -> Iterator[Outcome]:
    """Run every case in a child of this process, some at a time, and give what came of each."""
    waiting, running = iter(cases), list[_Child]()
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) < workers:
            case = next(waiting, None)
            if case is None:
                exhausted = True
            else:
                running.append(_Child(case))
        select.select([child.pipe for child in running], [], [], _POLL)
        for child in list(running):
            outcome = child.outcome(seconds, memory)
            if outcome is not None:
                running.remove(child)
                yield outcome


class _Child:
    def __init__(self, case: Case) -> None:
        self.case, self.begin, self.said = case, time.monotonic(), b""
        self.waited, self.looked = 0.0, self.begin
        self.before = psutil.Process().memory_info().rss
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _work(case, writing)
        os.close(writing)
        os.set_blocking(self.pipe, False)
        self.process = psutil.Process(self.pid)

    def outcome(self, seconds: float, memory: int) -> Outcome | None:
        """What came of it, once it has ended or has used more than it may."""
        try:
            while chunk := os.read(self.pipe, 2**16):
                self.said += chunk
        except BlockingIOError:
            broken = self._broken_limit(seconds, memory)
            return None if broken is None else self._end(broken)
        return self._end(None)

    def _broken_limit(self, seconds: float, memory: int) -> str | None:
        times = self.process.cpu_times()
        now = time.monotonic()
        # Where others share the processors, a case is not charged for the time in which it could not run: a long gap
        # between two looks means that this process could not run either.
        self.waited += min(now - self.looked, 5 * _POLL)
        self.looked = now
        if max(times.user + times.system, self.waited / 6) > seconds:
            return "timeout"
        return "memory" if self.process.memory_info().rss - self.before > memory else None

    def _end(self, broken: str | None) -> Outcome:
        if broken is not None:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        _, status, used = os.wait4(self.pid, 0)
        took = time.monotonic() - self.begin
        peak = max(0, used.ru_maxrss * 1024 - self.before)
        if broken is not None:
            return Outcome(self.case, broken, "", took, peak)
        if not self.said:
            return Outcome(self.case, "crashed", f"exit status {status}", took, peak)
        verdict, detail = json.loads(self.said)
        over = "memory" if peak > MEMORY else verdict
        return Outcome(self.case, over, detail, took, peak)


def _work(case: Case, writing: int) -> None:
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        warnings.simplefilter("ignore")
        os.write(writing, json.dumps(judged(case.attempt)).encode())
    finally:
        os._exit(0)
