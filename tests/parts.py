"""Run a part of the slow tests: `--part 2/6` runs the second of six.

A file belongs to one part, by the hash of its name, so that all parts together run
every slow test once.
"""

from pathlib import Path
from zlib import crc32

import pytest

from tests.places import ROOT, TESTS


class Part:
    """Leave out the files of other parts, and the fast tests of the rest."""

    def __init__(self, choice: str) -> None:
        number, count = map(int, choice.split("/"))
        if not 1 <= number <= count:
            raise pytest.UsageError(f"--part {choice}: there is no such part")
        self.number, self.count = number, count

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Leave out a file of another part before it is imported."""
        if not collection_path.name.startswith("test_"):
            return None
        name = collection_path.relative_to(ROOT).as_posix()
        is_ours = crc32(name.encode()) % self.count == self.number - 1
        return None if is_ours else True

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Keep what `make test` leaves out."""
        fast = [item for item in items if not _is_slow(item)]
        config.hook.pytest_deselected(items=fast)
        items[:] = [item for item in items if _is_slow(item)]


def _is_slow(item: pytest.Item) -> bool:
    in_folder = item.path.is_relative_to(TESTS / "slow")
    return in_folder or item.get_closest_marker("slow") is not None
