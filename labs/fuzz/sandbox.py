"""One case in a process of its own, which may use so much time and memory and no more."""

import itertools
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

import huggingface_hub.constants
import psutil
import torch

from hiddenscope.errors import Error

SECONDS = 10.0
MEMORY = 2 * 2**30
_POLL = 0.02


@dataclass(frozen=True)
class Case:
    """What is tried: a kind, the words that name it in a report, and the attempt.

    The attempt returns a verdict such as "loaded"; an error of ours counts as
    "refused", any other as "foreign".
    """

    kind: str
    name: str
    attempt: Callable[[], str]


@dataclass(frozen=True)
class Outcome:
    """What came of a case: its verdict with a detail, and the time and memory that it
    took.
    """

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
        frames = [
            f"{os.path.basename(f.filename)}:{f.lineno}" for f in (*ours, *trace[-2:])
        ]
        return (
            "foreign",
            f"{type(error).__name__}: {str(error)[:200]} ({' '.join(frames)})",
        )


def sandboxed(
    cases: Iterable[Case],
    workers: int = 2,
    seconds: float = SECONDS,
    memory: int = MEMORY,
    together: int = 1,
) -> Iterator[Outcome]:
    """Run every case in a child of this process, some children at a time, and give what
    came of each.

    This many cases run one after another in one child `together`; the limits hold for
    each of them.
    """
    groups, running = _groups(iter(cases), together), list[_Child]()
    exhausted = False
    while running or not exhausted:
        while not exhausted and len(running) < workers:
            group = next(groups, None)
            if group is None:
                exhausted = True
            else:
                running.append(_Child(group, memory))
        select.select([child.pipe for child in running], [], [], _POLL)
        for child in list(running):
            yield from child.outcomes(seconds, memory)
            if child.ended:
                running.remove(child)
                if child.cases:
                    running.append(_Child(child.cases, memory))


def _groups(cases: Iterator[Case], together: int) -> Iterator[list[Case]]:
    while group := list(itertools.islice(cases, together)):
        yield group


class _Child:
    """A process that runs cases one after another and says what came of each, until one
    breaks a limit.
    """

    def __init__(self, cases: list[Case], memory: int) -> None:
        self.cases, self.said, self.heard, self.ended = list(cases), b"", False, False
        self.pipe, writing = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _work(cases, writing, memory)
        os.close(writing)
        # What the child holds before its first case, said by itself: mapped files that
        # are resident in this process are not in its fork, so this process's own figure
        # would hide as much of what the cases take.
        self.before = int.from_bytes(os.read(self.pipe, 8), "big")
        os.set_blocking(self.pipe, False)
        self.process = psutil.Process(self.pid)
        self._next()

    def _next(self) -> None:
        """From here on, time is counted for the next case."""
        self.begin = self.looked = time.monotonic()
        self.waited, self.used = 0.0, self._cpu()

    def _cpu(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def outcomes(self, seconds: float, memory: int) -> Iterator[Outcome]:
        """What came of the cases that have ended since the last look, or have used more
        than they may.
        """
        broken: str | None = None
        closed = False
        try:
            while chunk := os.read(self.pipe, 2**16):
                self.said += chunk
            closed = True
        except BlockingIOError:
            broken = self._broken_limit(seconds, memory)
        *lines, self.said = self.said.split(b"\n")
        for line in lines:
            verdict, detail, peak = json.loads(line)
            peak, self.heard = max(0, peak - self.before), True
            yield self._outcome("memory" if peak > memory else verdict, detail, peak)
        if lines and not closed:
            self._next()
        elif broken is not None or closed:
            yield from self._end(broken)

    def _outcome(self, verdict: str, detail: str, peak: int) -> Outcome:
        return Outcome(
            self.cases.pop(0), verdict, detail, time.monotonic() - self.begin, peak
        )

    def _broken_limit(self, seconds: float, memory: int) -> str | None:
        now = time.monotonic()
        # Where others share the processors, a case is not charged for the time in which
        # it could have run and was not let, or was stopped: only for what it used, and
        # for sleep. A long gap between two looks means that this process could not run
        # either.
        if self.process.status() not in (psutil.STATUS_RUNNING, psutil.STATUS_STOPPED):
            self.waited += min(now - self.looked, 5 * _POLL)
        self.looked = now
        if max(self._cpu() - self.used, self.waited / 2) > seconds:
            return "timeout"
        return (
            "memory" if self.process.memory_info().rss - self.before > memory else None
        )

    def _end(self, broken: str | None) -> Iterator[Outcome]:
        if broken is not None:
            os.kill(self.pid, signal.SIGKILL)
        os.close(self.pipe)
        _, status, used = os.wait4(self.pid, 0)
        self.ended = True
        if broken is not None or (self.cases and not (self.heard and status == 0)):
            detail = "" if broken is not None else f"exit status {status}"
            yield self._outcome(
                broken or "crashed", detail, max(0, used.ru_maxrss * 1024 - self.before)
            )


def _work(cases: list[Case], writing: int, memory: int) -> None:
    status = 1
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        quiet = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(quiet, descriptor)
        warnings.simplefilter("ignore")
        # The threads of the parent are not in its fork, and OpenMP waits for them or
        # crashes.
        torch.set_num_threads(1)
        # No case may wait for a network.
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        before = psutil.Process().memory_info().rss
        os.write(writing, before.to_bytes(8, "big"))
        for case in cases:
            verdict, detail = judged(case.attempt)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            os.write(writing, json.dumps([verdict, detail, peak]).encode() + b"\n")
            if peak - before > memory:
                # Or the next ones would be charged for it: they get a process of their
                # own.
                break
        status = 0
    finally:
        os._exit(status)
