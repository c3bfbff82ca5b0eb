"""Library: the models, datasets and stored states that the page may choose from.

Everything has an opaque name, and no name is a path. Folders and files are looked for
below the root that the server was started with, and nowhere else: a link that leads out
of it is not followed, and a folder that holds one is not offered. Nothing here imports
torch: a page of texts is answered while a model works.
"""

import hashlib
import json
import os
import re
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.app.schemas import (
    MODEL_NAME,
    ColumnChoice,
    DatasetAnswer,
    DictionaryAnswer,
    ModelAnswer,
    ModelChoice,
    StoreAnswer,
    StoreText,
    StoreTextsAnswer,
)
from hiddenscope.app.settings import Settings
from hiddenscope.app.uploads import UPLOAD_NAME, Upload, Uploads
from hiddenscope.errors import Error, FileError, LoadError, TextError, UnknownModel
from hiddenscope.files import believable, identity, open_tensors, reading
from hiddenscope.loading import zoo
from hiddenscope.loading.folder import read_json
from hiddenscope.loading.outline import outline

# How far, and for how long, the folders below the root are searched.
MAX_MATCHES = 500
MAX_ENTRIES = 20_000
MAX_DEPTH = 4
# What a list of datasets shows of each.
MAX_LABELS = 50
SAMPLE_TEXTS = 5

# What lists show of a text, and of stored states.
MAX_CHARACTERS = 300
MAX_SITES = 500

ADAPTER_CONFIG = "adapter_config.json"
# Each is in the folders of some libraries that train dictionaries.
DICTIONARY_FILES = ("sae_weights.safetensors", "sae.safetensors", "params.npz")
# Of sites of one width, and of sites whose widths differ.
STATES_FORMATS = ("hiddenscope.states/1", "hiddenscope.states/2")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# What a file says of each of its stacks, by the prefix of their tensors.
Stacks: TypeAlias = dict[str, dict[str, Any]]


class Library:
    """The models, datasets and states that a workbench offers."""

    def __init__(self, settings: Settings) -> None:
        self.root = None if settings.root is None else settings.root.resolve()
        self.uploads = Uploads(settings.folder / "uploads")
        # Which version of a model will be downloaded is not known before. Its results
        # are found again until the server stops.
        self._unknown_version = secrets.token_hex(8)

    def models(self) -> list[ModelAnswer]:
        """List the models of the zoo, of the hub's local cache, and below the root."""
        models = [
            ModelAnswer(
                name=model.name,
                label=model.description,
                source="zoo",
                here=model.cached,
                headless=outline(model.name).headless,
            )
            for model in zoo.ZOO.values()
        ]
        for path in _entries(_hub_cache()):
            kind, _, folder = path.name.partition("--")
            # The hub allows no two dashes in a row in the name of an owner or a model.
            name = folder.replace("--", "/", 1)
            is_model = kind == "models" and re.fullmatch(MODEL_NAME, name)
            # Only such weights can be read.
            if is_model and any(path.glob("snapshots/*/*.safetensors")):
                models.append(
                    ModelAnswer(
                        name=name, label=name, source="hub", here=True, headless=False
                    )
                )
        for name, path in self._search(_is_model, "folder"):
            models.append(
                ModelAnswer(
                    name=name,
                    label=self._label(path),
                    source="folder",
                    here=True,
                    headless=outline(str(path)).headless,
                )
            )
        return models

    def model_path(self, name: str) -> str:
        """Return what `hs.load` takes for the name of a model."""
        if not name.startswith("folder:"):
            return name
        return str(self._path(name, _is_model, "folder"))

    def model_identity(self, choice: ModelChoice) -> str:
        """Return what tells a model from others, without loading it."""
        name = choice.name
        if name in zoo.ZOO:
            version = zoo.ZOO[name].revision
        elif name.startswith("folder:"):
            version = ""
            for path in self._with_bases(self._path(name, _is_model, "folder")):
                version += identity(sorted(path.iterdir()) if path.is_dir() else [path])
        else:
            version = self._unknown_version
            folder = _hub_cache() / f"models--{name.replace('/', '--')}"
            # Where it is in the hub's local cache, it has a commit.
            with suppress(OSError, ValueError):
                version = (folder / "refs" / "main").read_text("ascii").strip()[:64]
        return f"{name} {choice.dtype} {version}"

    def _with_bases(self, path: Path) -> list[Path]:
        """Return a model and, of an adapter, the folders of the models below it."""
        chain = [path]
        while (base := _base_folder(chain[-1])) is not None and base not in chain:
            is_below = self.root is not None and base.is_relative_to(self.root)
            if not is_below or not self._is_inside(base):
                raise LoadError(
                    f"Cannot open {self._label(path)}",
                    f"it is an adapter of {str(base)[:200]}, which is not below the"
                    " root",
                    "Start `hiddenscope serve --root FOLDER` above both.",
                )
            chain.append(base)
        return chain

    def datasets(self) -> list[DatasetAnswer]:
        """List the shipped datasets, then the uploads."""
        datasets = [
            _describe_dataset(name, texts.read(name)) for name in texts.shipped()
        ]
        for name in self.uploads.names():
            upload = self.uploads.get(name)
            if upload is not None:
                datasets.append(_describe_dataset(name, upload.data, upload.columns))
        return datasets

    def add_dataset(
        self, file: str, content: bytes, columns: ColumnChoice
    ) -> DatasetAnswer:
        """Parse an uploaded file and keep its texts."""
        name, upload = self.uploads.add(file, content, columns)
        return _describe_dataset(name, upload.data, upload.columns)

    def dataset(self, name: str) -> Upload | None:
        """Return an upload, or None for a shipped dataset; refuse any other name."""
        if UPLOAD_NAME.fullmatch(name):
            upload = self.uploads.get(name)
            if upload is None:
                raise TextError(
                    f"No dataset {name!r}",
                    "it was not uploaded here, or was dropped",
                    "Upload it again.",
                )
            return upload
        if name not in texts.shipped():
            raise TextError(
                f"No dataset {name[:80]!r}",
                f"there are {', '.join(texts.shipped())}",
                "Choose one of these, or upload one.",
            )
        return None

    def dictionaries(self) -> list[DictionaryAnswer]:
        """List the dictionaries of features below the root."""
        matches = self._search(_is_dictionary, "dictionary")
        return [
            DictionaryAnswer(name=n, label=self._label(path)) for n, path in matches
        ]

    def dictionary_path(self, name: str) -> Path:
        """Return the folder of a dictionary."""
        return self._path(name, _is_dictionary, "dictionary")

    def new_dictionary(self, name: str) -> str:
        """Return the folder below the root in which a fitted dictionary is kept."""
        assert self.root is not None, "there are no states without a root"
        folder = self.root / "dictionaries" / name
        if folder.resolve() != folder:
            reason = f"{self._label(folder.parent)} is a link, or what is in it"
            raise FileError(f"Cannot keep {name}", reason, "Remove the link.")
        return str(folder)

    def stores(self) -> list[StoreAnswer]:
        """List the states that are stored below the root, in files and in stores."""
        stores = []
        for name, path in self._search(is_states, "store"):
            described = describe_states(name, self._label(path), path)
            if described is not None:
                stores.append(described)
        return stores

    def store_path(self, name: str) -> Path:
        """Return the file or the folder of stored states."""
        return self._path(name, is_states, "store")

    def _search(
        self, matches: Callable[[Path], bool], kind: str
    ) -> Iterator[tuple[str, Path]]:
        """Yield everything of a kind below the root with its name, breadth first."""
        if self.root is None:
            return
        match_count = entry_count = 0
        folders = deque([(self.root, 0)])
        while folders and match_count < MAX_MATCHES and entry_count < MAX_ENTRIES:
            folder, depth = folders.popleft()
            for path in _entries(folder):
                entry_count += 1
                try:
                    is_link, is_folder = path.is_symlink(), path.is_dir()
                    target = path.resolve() if is_link else path
                # A link to itself, or one that may not be read.
                except (OSError, RuntimeError):
                    continue
                if not target.is_relative_to(self.root) or not path.name.isprintable():
                    continue
                if matches(path):
                    # A store follows no links itself, and may have a million files.
                    if kind != "store" and not self._is_inside(path):
                        continue
                    match_count += 1
                    digest = hashlib.sha256(self._label(path).encode()).hexdigest()
                    yield f"{kind}:{digest[:16]}", path
                    continue
                # The target of a link is below the root too, and searched under its
                # own name.
                is_searched = is_folder and not is_link and path.name[0] != "."
                if is_searched and depth < MAX_DEPTH:
                    folders.append((path, depth + 1))

    def _is_inside(self, path: Path) -> bool:
        """Tell whether nothing in a folder is a link that leads out of the root.

        The snapshots of a hub's cache may link to the blobs beside them.
        """
        assert self.root is not None, "nothing is below a missing root"
        home = path.resolve().parent
        places = [self.root]
        if home.name == "snapshots":
            places.append(home.with_name("blobs"))
        count = 0
        for folder, folders, files in os.walk(path, followlinks=True):
            for name in (*folders, *files):
                count += 1
                target = Path(os.path.realpath(os.path.join(folder, name)))
                if not any(map(target.is_relative_to, places)):
                    return False
            if count > MAX_ENTRIES:
                return False
        return True

    def _label(self, path: Path) -> str:
        assert self.root is not None, "nothing is below a missing root"
        return str(path.relative_to(self.root))

    def _path(self, name: str, matches: Callable[[Path], bool], kind: str) -> Path:
        for known_name, path in self._search(matches, kind):
            if known_name == name:
                return path
        reason = "there is none below the root"
        if self.root is None:
            reason = "no folder was given to look in"
        raise UnknownModel(
            f"No {kind} {name[:80]!r}",
            reason,
            "Start `hiddenscope serve --root FOLDER` above it.",
        )


def _describe_dataset(
    name: str, data: texts.Labelled, columns: ColumnChoice | None = None
) -> DatasetAnswer:
    counts = Counter(str(value)[:80] for value in data.labels or ())
    return DatasetAnswer(
        name=name,
        label=data.name,
        texts=len(data.texts),
        labels=dict(counts.most_common(MAX_LABELS)),
        groups=None if data.groups is None else len(set(data.groups)),
        sample=[text[:200] for text in data.texts[:SAMPLE_TEXTS]],
        columns=columns,
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:MAX_MATCHES]
    except OSError:
        return []


def _is_model(path: Path) -> bool:
    try:
        if path.suffix.lower() == ".gguf":
            return path.is_file()
        configs = [path / name for name in ("config.json", ADAPTER_CONFIG)]
        has_config = any(config.is_file() for config in configs)
        return has_config and any(path.glob("*.safetensors"))
    except OSError:
        return False


def _is_dictionary(path: Path) -> bool:
    return any((path / name).is_file() for name in DICTIONARY_FILES)


def _base_folder(path: Path) -> Path | None:
    """Return where the model that an adapter is of lies, if it is not on the hub."""
    config = path / ADAPTER_CONFIG
    if not config.is_file():
        return None
    base = read_json(config).get("base_model_name_or_path")
    if not isinstance(base, str) or base in zoo.ZOO:
        return None
    folder = os.path.expanduser(base)
    return Path(folder).resolve() if os.path.exists(folder) else None


def _hub_cache() -> Path:
    """Return where huggingface_hub keeps models."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def is_states(path: Path) -> bool:
    """Return whether there is a store or a file of states at this path."""
    try:
        if path.is_dir():
            return (path / "plan.json").is_file() and (path / "commits").is_dir()
        if path.suffix != ".safetensors" or not path.is_file():
            return False
        return _read_stacks(path) is not None
    except OSError:
        return False


def holds_pair(path: Path) -> bool:
    """Return whether a file holds the states of an encoder and a decoder."""
    return "encoder." in (_read_stacks(path) or {})


def store_identity(path: Path) -> str:
    """Return what changes with the states, also when more units are committed."""
    if not path.is_dir():
        return identity([path])
    commits = sorted((path / "commits").iterdir())
    return identity([path / "plan.json", *commits])


def describe_states(name: str, label: str, path: Path) -> StoreAnswer | None:
    """Return what a store or a file of states holds, or None where it is damaged."""
    with suppress(Error), reading(f"Cannot read {label}"):
        if path.is_dir():
            with hs.open(path) as store:
                return StoreAnswer(
                    name=name,
                    label=label,
                    bytes=sum(
                        file.stat().st_size for file in (path / "data").iterdir()
                    ),
                    sites=[str(site) for site in store.sites][:MAX_SITES],
                    tokens=len(store),
                    texts=len(store.texts),
                    model=str(store.source.model)[:200],
                    dtype=store.dtype,
                    width=max(store.plan.widths.values()),
                    complete=store.complete,
                )
        stacks = _read_stacks(path) or {}
        first = next(iter(stacks.values()))
        sites: list[str] = []
        for stack in stacks.values():
            sites += map(str, stack["sites"])
        return StoreAnswer(
            name=name,
            label=label,
            bytes=path.stat().st_size,
            sites=sites[:MAX_SITES],
            tokens=sum(int(stack["shape"][1]) for stack in stacks.values()),
            texts=int(first["count"]),
            model=str(first["source"].get("model", ""))[:200],
            dtype=DTYPES.get(first["dtype"], str(first["dtype"])[:20]),
            width=int(first["shape"][2]),
            complete=True,
        )
    return None


def read_texts(path: Path, first: int, count: int) -> StoreTextsAnswer:
    """Return a page of texts in their order, with the number of tokens of each."""
    page = []

    def add(number: int, text: str, tokens: int) -> None:
        shown, is_cut = text[:MAX_CHARACTERS], len(text) > MAX_CHARACTERS
        page.append(StoreText(number=number, text=shown, cut=is_cut, tokens=tokens))

    if path.is_dir():
        with hs.open(path) as store:
            total = len(store.texts)
            for number in store.texts[first : first + count].tolist():
                tokens = store.of(number).tokens
                # Strings of tokens, where the texts were not kept.
                pieces = tokens.texts or tokens.strings[: MAX_CHARACTERS + 1]
                add(number, "".join(pieces), len(tokens))
    else:
        lengths, file_texts = _read_file_texts(path, store_identity(path))
        total = len(lengths)
        for number in range(first, min(first + count, total)):
            add(number, file_texts[number] if file_texts else "", lengths[number])
    return StoreTextsAnswer(total=total, first=first, texts=page)


def _read_stacks(path: Path) -> Stacks | None:
    """Return what a file of states says of each stack, or None for another file."""
    problem = f"Cannot read {path.name}"
    with suppress(Error), open_tensors(path, problem, "np") as file:
        metadata = file.metadata() or {}
        if metadata.get("format") not in STATES_FORMATS:
            return None
        stacks: Stacks = json.loads(metadata["states"])
        for prefix, stack in stacks.items():
            name = f"{prefix}values"
            # The widest stands for all, as in the description of a store.
            if "widths" in stack:
                name += f".{max(stack['widths'])}"
            values = file.get_slice(name)
            stack |= {"shape": values.get_shape(), "dtype": values.get_dtype()}
            if not 0 <= stack["count"] <= believable(path.stat().st_size):
                return None
        return stacks
    return None


@lru_cache(maxsize=4)
def _read_file_texts(
    path: Path, file_identity: str
) -> tuple[list[int], tuple[str, ...] | None]:
    """Return how many tokens each text of a file has, and the texts if they are stored.

    `file_identity` makes the cache forget a file that has changed.
    """
    problem = f"Cannot read states from {path.name}"
    with open_tensors(path, problem, "np") as file:
        prefix, stack = next(iter((_read_stacks(path) or {}).items()))
        text_of_token = file.get_tensor(f"{prefix}text")
        counts = np.bincount(text_of_token, minlength=int(stack["count"]))
        lengths = counts.tolist()
        # `file` is not a mapping, and has no `in`.
        if f"{prefix}texts" not in file.keys():  # noqa: SIM118
            return lengths, None
        joined = file.get_tensor(f"{prefix}texts").tobytes()
        ends = [0, *file.get_tensor(f"{prefix}texts.ends").tolist()]
        texts = tuple(joined[a:b].decode("utf-8", "replace") for a, b in pairwise(ends))
        if len(texts) != len(lengths):
            raise ValueError(f"{len(texts)} texts, and tokens of {len(lengths)}")
        return lengths, texts
