"""Say how long the run took, and which tests of the fast tier need more than a second.

What counts is the CPU time of the test itself: a busy machine makes nobody's test slow,
and a fixture that many tests share is nobody's. Tests above `NOTICE` are named; one
above `LIMIT`, which no processor's age explains, fails the run, so that it is sped up,
marked slow or moved to tests/slow.
"""

import os
import time
from collections.abc import Generator
from typing import Any

import pytest

NOTICE, LIMIT = 1.0, 20.0


def _used() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


class Durations:
    """Measure each test, and report the long ones at the end."""

    def __init__(self) -> None:
        self.begun = time.monotonic()
        self.long: list[tuple[float, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Note the CPU time of a test where its report takes it along to the end."""
        before = _used()
        try:
            return (yield)
        finally:
            item.user_properties.append(("cpu", _used() - before))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect the tests that took long, from every worker."""
        seconds = dict(report.user_properties).get("cpu", 0.0)
        exempt = {"slow", "smoke"} & set(report.keywords)
        if report.when == "call" and seconds > NOTICE and not exempt:
            self.long.append((seconds, report.nodeid))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that passed, but for a test that is far too long."""
        if not self.is_fast(session.config) or session.exitstatus != 0:
            return
        if any(seconds > LIMIT for seconds, _ in self.long):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(
        self, terminalreporter: Any, config: pytest.Config
    ) -> None:
        """Print the long tests of the fast tier, and how long all of it took."""
        write = terminalreporter.write_line
        if self.is_fast(config):
            for seconds, name in sorted(self.long, reverse=True):
                advice = "speed it up, mark it slow, or move it to tests/slow"
                write(f"{seconds:.1f} CPU seconds: {name}: {advice}")
        took = time.monotonic() - self.begun
        write(f"This took {took / 60:.1f} minutes. `make test-all` runs everything.")

    @staticmethod
    def is_fast(config: pytest.Config) -> bool:
        """Tell whether slow tests are left out of this run."""
        return config.option.markexpr == "not slow"
