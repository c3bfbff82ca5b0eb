"""The workbench and the pages that a few tests look at in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from hiddenscope.app import application
from tests.pages.fixtures import contexts, show
from tests.workbench.fixtures import look, root, tiny_name
from tests.workbench.inside import WorkerInside
from tests.workbench.serving import Bench, running

__all__ = ["contexts", "look", "root", "show", "tiny_name"]


@pytest.fixture(scope="session")
def bench(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """A workbench whose worker is in this process, since another takes long to start."""
    with patch.object(application, "ModelWorker", WorkerInside):
        yield from running(tmp_path_factory.mktemp("app"), root=root)
