"""Library: the models, datasets and stored states that the page may choose from.

Everything has an opaque name, and no name is a path. Folders and files are looked for
below the root that the server was started with, and nowhere else: a link that leads out
of it is not followed.
"""

import hashlib
import os
import re
import secrets
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from hiddenscope import texts
from hiddenscope.app.schemas import (
    MODEL_NAME,
    ColumnChoice,
    DatasetAnswer,
    ModelAnswer,
    ModelChoice,
    StoreAnswer,
)
from hiddenscope.app.settings import Settings
from hiddenscope.app.stores import describe_states, is_states
from hiddenscope.app.uploads import UPLOAD_NAME, Upload, Uploads
from hiddenscope.errors import LoadError, TextError, UnknownModel
from hiddenscope.files import identity
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

ADAPTER_CONFIG = "adapter_config.json"


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
        models = []
        for entry in zoo.listing():
            models.append(
                ModelAnswer(
                    name=entry.name,
                    label=entry.description,
                    source="zoo",
                    here=entry.cached,
                    headless=outline(entry.name).headless,
                )
            )
        for name in _hub_models():
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
            version = _hub_commit(name) or self._unknown_version
        return f"{name} {choice.dtype} {version}"

    def _with_bases(self, path: Path) -> list[Path]:
        """Return a model and, of an adapter, the folders of the models below it."""
        chain = [path]
        while (base := _base_folder(chain[-1])) is not None and base not in chain:
            if self.root not in (base, *base.parents):
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
        datasets = []
        for name in texts.shipped():
            datasets.append(_describe_dataset(name, texts.read(name)))
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
                if not path.name.isprintable() or not self._is_below_root(path):
                    continue
                if matches(path):
                    match_count += 1
                    yield self._name(path, kind), path
                elif depth < MAX_DEPTH and _is_searched(path):
                    folders.append((path, depth + 1))

    def _is_below_root(self, path: Path) -> bool:
        """Return whether an entry of a folder is not a link that leads out."""
        assert self.root is not None, "nothing is below a missing root"
        try:
            return not path.is_symlink() or path.resolve().is_relative_to(self.root)
        # A link to itself, or one that may not be read.
        except (OSError, RuntimeError):
            return False

    def _name(self, path: Path, kind: str) -> str:
        digest = hashlib.sha256(self._label(path).encode()).hexdigest()
        return f"{kind}:{digest[:16]}"

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


def _is_searched(path: Path) -> bool:
    """Return whether a path is a folder to look into."""
    try:
        # The target of a link is below the root too, and searched under its own name.
        return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
    except OSError:
        return False


def _is_model(path: Path) -> bool:
    try:
        if path.suffix.lower() == ".gguf":
            return path.is_file()
        configs = [path / name for name in ("config.json", ADAPTER_CONFIG)]
        has_config = any(config.is_file() for config in configs)
        return has_config and any(path.glob("*.safetensors"))
    except OSError:
        return False


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
    """Return where huggingface_hub keeps models, without importing it."""
    cache = os.environ.get("HF_HUB_CACHE")
    if cache:
        return Path(cache)
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home, "hub")
    user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(user_cache, "huggingface", "hub")


def _hub_models() -> list[str]:
    """Return the ids of cached models whose weights can be read."""
    names = []
    for path in _entries(_hub_cache()):
        kind, _, folder = path.name.partition("--")
        # The hub allows no two dashes in a row in the name of an owner or a model.
        name = folder.replace("--", "/", 1)
        is_model = kind == "models" and re.fullmatch(MODEL_NAME, name)
        if is_model and any(path.glob("snapshots/*/*.safetensors")):
            names.append(name)
    return names


def _hub_commit(name: str) -> str:
    """Return the commit of a model in the hub's local cache, or nothing."""
    folder = _hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        return (folder / "refs" / "main").read_text("ascii").strip()[:64]
    except (OSError, ValueError):
        return ""
