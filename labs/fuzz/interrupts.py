"""Ctrl-C at random moments, once and twice, and at random lines of our hooks: nothing of
ours may stay on a module.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from hiddenscope.modules import hooks, installation
from hiddenscope.testing.untouched import state_of
from labs.fuzz.questions import QUESTIONS, asked_model
from labs.fuzz.sandbox import Case
from tests.registry import IDS

TOGETHER = 50  # interrupts to a process
HOOK_FILES = (hooks.__file__, installation.__file__)


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """This many of each kind; fifty to a process."""
    kinds = {
        "interrupts": _signals,
        "double interrupts": partial(_signals, twice=True),
        "at lines of hooks": _at_lines,
    }
    for kind, attempt in kinds.items():
        for number in range(-(-count // TOGETHER)):
            chance = random.Random(f"{kind} {seed} {number}")
            some = min(TOGETHER, count - number * TOGETHER)
            yield Case(
                kind, f"{kind} {seed}/{number}", partial(_tried, attempt, chance, some)
            )


def _tried(attempt: Callable[..., bool], chance: random.Random, count: int) -> str:
    """Interrupt this many questions of one model, and look at the module after each."""
    model = asked_model()
    for ask in QUESTIONS.values():
        ask(model)  # what is tried once is tried now
    before, expected = state_of(model.module), model.capture(IDS).values
    for number in range(count):
        attempt(partial(chance.choice(list(QUESTIONS.values())), model), chance)
        installation.remove_leftovers()  # as the next pass does first
        if state_of(model.module) != before:
            return f"left behind after {number}"
        if not model.lock.acquire(blocking=False):
            return f"locked after {number}"
        model.lock.release()
    return "clean" if torch.equal(model.capture(IDS).values, expected) else "different"


def _signals(
    ask: Callable[[], Any], chance: random.Random, twice: bool = False
) -> bool:
    """Send SIGINT to this process while it asks, at a random moment, and again a little
    later.
    """
    waits = [chance.uniform(0.0, 0.03), chance.uniform(0.0, 0.002)][: 1 + twice]
    done = threading.Event()

    def send() -> None:
        for wait in waits:
            time.sleep(wait)
            if not done.is_set():
                os.kill(os.getpid(), signal.SIGINT)

    sender = threading.Thread(target=send)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = False
    try:
        try:
            sender.start()
            ask()
        finally:
            done.set()
    except KeyboardInterrupt:
        interrupted = True
    while sender.is_alive():  # a late signal is one more moment, in this loop
        try:
            sender.join()
        except KeyboardInterrupt:
            interrupted = True
    signal.signal(signal.SIGINT, handler)
    return interrupted


class AtLine:
    """Raises KeyboardInterrupt at the so-manyth line that installs or calls a hook."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename not in HOOK_FILES:
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def _at_lines(ask: Callable[[], Any], chance: random.Random) -> bool:
    sys.settrace(AtLine(chance.randrange(1, chance.choice((60, 2000)))))
    try:
        ask()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(None)
    return False


# Where modes and hooks are put in place and taken away again, and what does that there.
FILES = (
    "hooks.py",
    "installation.py",
    "overrides.py",
    "operations.py",
    "autograd.py",
    "size_limit.py",
    "grad_mode.py",
    "_python_dispatch.py",
)
FUNCTIONS = {
    "__init__",
    "__enter__",
    "__exit__",
    "__del__",
    "_pop_mode",
    "call",
    "restoring",
    "restored",
}
FUNCTIONS |= {"finite_attention", "_checked_attention", "run", "install", "remove"}


class AtPoint:
    """Raises KeyboardInterrupt at the so-manyth point of a question, and again some
    points later, while it unwinds.

    A point is one at which Python looks for signals: where a function begins or a
    generator goes on. Those of the functions that put modes and hooks in place, and
    take them away, are counted; the second interrupt comes at any. Python removes a
    profiler or a tracer that raises, so the first comes from a profiler and the second
    from a tracer.

    >>> with AtPoint(1) as interrupt:
    ...     list(map(len, ["a"]))
    [1]
    >>> interrupt.left
    1
    """

    def __init__(
        self, at: int, again: int = 0, functions: Collection[str] = FUNCTIONS
    ) -> None:
        self.left, self.again, self.functions = at, again, functions

    def __enter__(self) -> "AtPoint":
        # An interrupt in a destructor is printed, and printing it would be interrupted
        # too.
        self._hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
        sys.settrace(self._trace)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)
        sys.unraisablehook = self._hook

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        is_counted = (
            code.co_name in self.functions
            and os.path.basename(code.co_filename) in FILES
        )
        if event != "call" or not is_counted:
            return
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def _trace(self, frame: FrameType, event: str, arg: Any) -> None:
        if (
            self.left > 0
            or self.again == 0
            or frame.f_code is AtPoint.__exit__.__code__
        ):
            return
        self.again -= 1
        if self.again == 0:
            raise KeyboardInterrupt
