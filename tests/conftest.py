"""Tiny models that are loaded once, real ones where they can be had, and a look at what
hangs on a module.
"""

import os
import random
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.errors import Unreachable
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.durations import Durations
from tests.hanging import pytest_runtest_protocol
from tests.parts import Part

assert pytest_runtest_protocol  # pytest finds it here


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", help="run a part of the slow tests, such as 2/6")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Durations())
    if config.option.part:
        config.pluginmanager.register(Part(config.option.part))


if TYPE_CHECKING:
    from playwright.sync_api import Browser

# As in what a shell runs in the background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

with suppress(ModuleNotFoundError):  # machines without it can run the other tests
    from hypothesis import HealthCheck, settings

    # Nothing is asked to be fast: a busy machine is no fault. --hypothesis-profile=ci
    # also tries the same every time.
    settings.register_profile(
        "here", deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.load_profile("here")

for name in ("no_proxy", "NO_PROXY"):  # servers of tests are on this machine
    os.environ[name] = ",".join(
        filter(None, [os.environ.get(name), "127.0.0.1", "localhost"])
    )

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="session")
def chromium() -> "Iterator[Browser]":
    from playwright.sync_api import (
        # Here, so that machines without it can run the other tests.
        sync_playwright,
    )

    path = (
        os.environ.get("HIDDENSCOPE_CHROMIUM")
        or shutil.which("chromium-headless-shell")
        or shutil.which("chromium")
        or shutil.which("google-chrome")
    )
    if not path:
        missing = (
            "there is no Chromium to draw the views in: `make browser` installs it, as"
            " root and with apt"
        )
        if os.environ.get("HIDDENSCOPE_REQUIRE_BROWSER"):
            pytest.fail(missing)
        pytest.skip(missing)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=FLAGS, timeout=600_000
        )
        yield browser
        browser.close()


@cache
def _tiny(family: str, task: str | None) -> hs.Model:
    module = tiny_model(family, task=task)
    if family == "t5":
        module.config.decoder_start_token_id = 0  # type: ignore[union-attr]
        module.generation_config.decoder_start_token_id = 0  # type: ignore[union-attr]
    return hs.load((module, tiny_tokenizer(cls=family in ("bert", "albert"))))


@pytest.fixture
def tiny() -> Callable[..., hs.Model]:
    """Tiny models by family, with a tokenizer; each is loaded once a session, so no
    test may change one.
    """
    return lambda family, task=None: _tiny(family, task)


class Counting:
    """A tokenizer that notes every call in which texts are encoded for a pass."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls = tokenizer, []  # type: tuple[Any, list[list[str]]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, texts: Any, **options: Any) -> Any:
        if options.get("add_special_tokens", True):
            self.calls.append([texts] if isinstance(texts, str) else list(texts))
        return self.tokenizer(texts, **options)


@pytest.fixture
def counting() -> Callable[[hs.Model], Counting]:
    """Put a counting tokenizer in the place of a model's own."""

    def put(model: hs.Model) -> Counting:
        model.text_encoder.tokenizer = counted = Counting(model.tokenizer)
        return counted

    return put


def _real(name: str) -> hs.Model:
    try:
        # Beside plain torch, whose tensors are in host memory; tests/test_gpu.py has CUDA.
        return hs.load(name, device="cpu")
    except Unreachable as error:
        pytest.skip(f"{name} cannot be had here: {error}")


@pytest.fixture(scope="session")
def smollm2() -> hs.Model:
    return _real("smollm2")


@pytest.fixture(scope="session")
def minilm() -> hs.Model:
    return _real("minilm")


def _hanging(module: nn.Module) -> dict[str, Any]:
    """What a pass could leave behind on each part: hooks, a replaced forward, a flag,
    another child, another weight.
    """
    seen: dict[str, Any] = {}
    for path, part in module.named_modules():
        own = {
            name: list(value)
            for name, value in vars(part).items()
            if name.endswith(("_hooks", "_hooks_with_kwargs"))
        }
        own |= {
            name: vars(part).get(name)
            for name in ("training", "forward", "_output_capturing_hooks_installed")
        }
        own |= {f"child {name}": id(child) for name, child in part._modules.items()}
        own |= {
            f"weight {name}": (id(w), w.requires_grad, w.grad)
            for name, w in part._parameters.items()
            if w is not None
        }
        seen[path] = own
    return seen


@pytest.fixture
def hanging() -> Callable[[nn.Module], dict[str, Any]]:
    return _hanging


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Every test begins with the same random numbers, whichever tests ran before it."""
    torch.manual_seed(0)
    numpy.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True, scope="session")
def _warm() -> None:
    """Import what torch and transformers import late, so that no test is charged for it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 2)))
    _tiny("llama", None).capture("The cat sat.")
