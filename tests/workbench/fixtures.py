"""A workbench over tiny real models in a folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import hiddenscope as hs
from hiddenscope.directions.encoding import Encoding
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.workbench.models import save_word_model
from tests.workbench.pages import Opener, Workbench
from tests.workbench.serving import SECONDS, TOKEN, Bench, running
from tests.workbench.texts import TEXTS

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of one shape, one whose tokens are words, and an encoder
    without a head.
    """
    folder = tmp_path_factory.mktemp("root")
    save_word_model(folder / "models" / "words")
    tiny_model("bert", task="base").save_pretrained(folder / "models" / "encoder")  # type: ignore[operator]
    tiny_tokenizer(cls=True).save_pretrained(folder / "models" / "encoder")
    for name, seed in (("tiny", 0), ("other", 1)):
        tiny_model("llama", seed=seed).save_pretrained(folder / "models" / name)  # type: ignore[operator]
        tiny_tokenizer().save_pretrained(folder / "models" / name)
    return folder


@pytest.fixture(scope="session")
def store(root: Path) -> hs.Store:
    """What `hs.extract` made of a tiny model, below the root of the workbench."""
    return hs.extract(
        hs.load(root / "models" / "tiny"), list(TEXTS), to=root / "corpora" / "states"
    )


@pytest.fixture(scope="session")
def kept(root: Path) -> hs.States:
    """States in a file."""
    states = hs.load(root / "models" / "tiny").capture(list(TEXTS[:5]))
    assert isinstance(states, hs.States)
    (root / "corpora").mkdir(exist_ok=True)
    states.save(root / "corpora" / "kept.safetensors")
    return states


@pytest.fixture(scope="session")
def dictionaries(root: Path) -> dict[str, hs.Dictionary]:
    """Dictionaries of the tiny model, of a layer and of an MLP: principal components
    and their opposites. Each is below the root, in a folder named like its site.
    """
    model = hs.load(root / "models" / "tiny")
    saved = {}
    for site in ("layer.2", "layer.2.mlp"):
        states = model.capture(list(TEXTS), site)
        assert isinstance(states, hs.States)
        components = hs.Dictionary.pca(states, 16, site)
        rows = torch.cat([components.directions, -components.directions])
        saved[site] = replace(
            components,
            directions=rows,
            encoder=rows.T.contiguous(),
            encoder_bias=torch.zeros(len(rows)),
            encoding=Encoding("relu", centred=True),
        )
        saved[site].save(root / "dictionaries" / site)
    return saved


@pytest.fixture(scope="session")
def _offline() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def bench(
    root: Path, tmp_path_factory: pytest.TempPathFactory, _offline: None
) -> Iterator[Bench]:
    yield from running(tmp_path_factory.mktemp("app"), root=root)


@pytest.fixture
def another(root: Path, tmp_path: Path, _offline: None) -> Callable[..., Any]:
    """Another workbench of one's own, with other settings."""

    @contextmanager
    def made(**options: Any) -> Iterator[Bench]:
        yield from running(tmp_path, **{"root": root} | options)

    return made


@pytest.fixture(scope="session")
def tiny_name(bench: Bench) -> str:
    return bench.folder("models/tiny")


@pytest.fixture
def look(chromium: "Browser", bench: Bench) -> Iterator[Opener]:
    """Open the workbench in a browser. Afterwards: nothing else was asked for, and
    nothing went wrong.
    """
    wrong: list[str] = []
    contexts = []

    def opened(
        fragment: str = "",
        *,
        at: Bench = bench,
        expected: tuple[str, ...] = (),
        **options: Any,
    ) -> Workbench:
        size = {
            "width": options.pop("width", 1440),
            "height": options.pop("height", 1000),
        }
        context = chromium.new_context(viewport=size, **options)
        contexts.append(context)
        context.set_default_timeout(1000 * SECONDS)
        own = f"http://{at.netloc}/"
        page = context.new_page()

        def note(words: str) -> None:
            if not any(one in words for one in expected):
                wrong.append(words)

        def listen(message: Any) -> None:
            if message.type in ("error", "warning"):
                note(message.text)

        def route(route: Any) -> None:
            if route.request.url.startswith((own, "data:", "blob:")):
                route.continue_()
            else:
                note(f"a request for {route.request.url[:200]}")
                route.abort()

        context.route("**/*", route)
        page.on("console", listen)
        page.on("pageerror", lambda error: note(str(error)))
        page.on("dialog", lambda dialog: note(dialog.message))
        if fragment:
            # The cookie without the page, which would be loaded twice.
            assert context.request.get(f"{own}?token={TOKEN}").ok
            page.goto(f"{own}{fragment}")
        else:
            page.goto(f"{own}?token={TOKEN}")
        assert page.url.split("#")[0] == own
        shown = Workbench(page)
        shown.until("() => document.documentElement.dataset.ready === 'true'")
        shown.settle()
        return shown

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []
