"""What the tests of extractions share: a folder in memory, and a model."""

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.chaos import memory_folder


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder in memory, where there is one: a job waits for the disk after every
    file.
    """
    with TemporaryDirectory(dir=memory_folder()) as folder:
        yield Path(folder)


@pytest.fixture
def gpt2(tiny: Callable[..., hs.Model]) -> hs.Model:
    return tiny("gpt2")


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model("gpt2").save_pretrained(folder)  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
