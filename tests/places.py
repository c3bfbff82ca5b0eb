"""Where things lie, so that a test file can move."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
