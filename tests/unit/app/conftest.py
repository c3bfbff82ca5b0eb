"""A workbench inside this process, over tiny models in a folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workbench.fixtures import dictionaries, kept, root, store, tiny_name
from tests.workbench.inside import BenchInside, inside

__all__ = ["dictionaries", "kept", "root", "store", "tiny_name"]


@pytest.fixture(scope="session")
def bench(
    root: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BenchInside]:
    with inside(tmp_path_factory.mktemp("app"), root=root) as running:
        yield running
