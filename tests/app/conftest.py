"""A workbench over tiny real models in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from serving import Bench, running, settings_in

from hiddenscope.testing import tiny_model, tiny_tokenizer


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of one shape."""
    folder = tmp_path_factory.mktemp("root")
    for name, seed in (("tiny", 0), ("other", 1)):
        tiny_model("llama", seed=seed).save_pretrained(folder / "models" / name)  # type: ignore[operator]
        tiny_tokenizer().save_pretrained(folder / "models" / name)
    return folder


@pytest.fixture(scope="session")
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def bench(root: Path, tmp_path_factory: pytest.TempPathFactory, _offline: None) -> Iterator[Bench]:
    yield from running(settings_in(tmp_path_factory.mktemp("app"), root=root))


@pytest.fixture
def another(root: Path, tmp_path: Path, _offline: None) -> Callable[..., Any]:
    """Another workbench of one's own, with other settings."""

    @contextmanager
    def made(**options: Any) -> Iterator[Bench]:
        yield from running(settings_in(tmp_path, **{"root": root} | options))

    return made


@pytest.fixture(scope="session")
def tiny_name(bench: Bench) -> str:
    return bench.folder("models/tiny")
