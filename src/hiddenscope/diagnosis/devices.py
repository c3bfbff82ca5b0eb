"""Devices, as torch sees them in a process of its own.

A build of torch for another processor, or a driver that does not fit, can end a process
without an exception, or never return. In another process that is an ordinary finding.
"""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator

from hiddenscope.diagnosis.check import LONGEST_MESSAGE, Check

CHILD = "hiddenscope.diagnosis.torch_process"
# The first use of a GPU may compile kernels for a minute.
LONGEST_SECONDS = 180
REINSTALL = (
    "Run `pip install --force-reinstall torch`, with the build for this machine."
)


def examine_devices(seconds: float = LONGEST_SECONDS) -> Iterator[Check]:
    """Yield what the other process finds, and how it ended if it did not end well."""
    # -P keeps Python from importing a `torch.py` of the user's current folder.
    command = [sys.executable, "-P", "-m", CHILD]
    try:
        process = subprocess.run(
            command, capture_output=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        yield from _checks(error.stdout or b"")
        message = f"torch did not answer within {seconds:.0f} seconds."
        yield Check("devices", "torch", "problem", message, REINSTALL)
        return
    yield from _checks(process.stdout)
    if process.returncode != 0:
        message = f"torch ended its process ({_ending(process)})."
        yield Check("devices", "torch", "problem", message, REINSTALL)


def _checks(output: bytes) -> Iterator[Check]:
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            yield Check(**json.loads(line))
        except (ValueError, TypeError):
            # A library printed this.
            continue


def _ending(process: "subprocess.CompletedProcess[bytes]") -> str:
    """Say how a process ended."""
    if process.returncode < 0:
        return f"signal {signal.Signals(-process.returncode).name}"
    lines = process.stderr.decode("utf-8", "replace").strip().splitlines()
    last = lines[-1][:LONGEST_MESSAGE] if lines else "without a message"
    return f"exit code {process.returncode}: {last}"
