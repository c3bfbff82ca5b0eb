"""What the page may choose from: models, datasets and kept states. Everything has an
opaque name, and none is a path.

Folders and files are looked for below a root that was given at the start, and nowhere
else: a link that leads out of it is not followed. Uploads are parsed here, under
limits, and kept as plain JSON.
"""

import hashlib
import io
import json
import os
import re
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hiddenscope import texts
from hiddenscope.app.code import Named
from hiddenscope.app.schemas import (
    MOST_CHARACTERS,
    ColumnChoice,
    DatasetAnswer,
    ModelAnswer,
    ModelChoice,
    StoreAnswer,
)
from hiddenscope.app.settings import Settings
from hiddenscope.app.stores import describe, is_states
from hiddenscope.app.tables import upload_format
from hiddenscope.errors import TextError, UnknownModel
from hiddenscope.files import identity, replacing
from hiddenscope.loading import zoo

MOST_ROWS = 20_000
MOST_UPLOADS = 50
MOST_FOUND = 500
DEEPEST = 4
MOST_LOOKED = 20_000

_UPLOAD = re.compile(r"upload:[0-9a-f]{16}")
_HUB_FOLDER = re.compile(r"models--([A-Za-z0-9_.\-]+)(?:--([A-Za-z0-9_.\-]+))?")


@dataclass(frozen=True)
class Upload:
    """Texts that somebody uploaded, the file's name, and the columns that were taken."""

    file: str
    texts: tuple[str, ...]
    labels: tuple[Any, ...] | None
    groups: tuple[Any, ...] | None = None
    columns: ColumnChoice = field(default_factory=ColumnChoice)

    def as_argument(self) -> dict[str, Any]:
        """What the worker takes for a dataset."""
        return {
            "file": self.file,
            "texts": self.texts,
            "labels": self.labels,
            "groups": self.groups,
        }

    @property
    def packed(self) -> str:
        """All of it as JSON."""
        return json.dumps({**self.as_argument(), "columns": self.columns.model_dump()})

    @classmethod
    def unpacked(cls, content: str) -> "Upload":
        """Read what `packed` wrote."""
        parts = json.loads(content)
        labels, groups = parts["labels"], parts["groups"]
        columns = ColumnChoice(**parts["columns"])
        return cls(
            parts["file"],
            tuple(parts["texts"]),
            labels and tuple(labels),
            groups and tuple(groups),
            columns,
        )

    @property
    def named(self) -> Named:
        """The file as code names it: a name that begins like an option or like stdin is
        written as a path.
        """
        return Named(
            self.file if self.file[:1].isalnum() else f"./{self.file}", self.columns
        )


class Library:
    """The models, datasets and states that a workbench offers."""

    def __init__(self, settings: Settings) -> None:
        self.root = None if settings.root is None else settings.root.resolve()
        self.uploads_folder = settings.folder / "uploads"
        self._uploads: OrderedDict[str, Upload] = OrderedDict()
        self._lock = threading.Lock()  # requests come in threads
        # Of a model that is yet to come, nobody knows the version.
        self._not_here = secrets.token_hex(8)

    def models(self) -> list[ModelAnswer]:
        """Those of the zoo, those in the local cache of the hub, and folders below the
        root.
        """
        of_zoo = [
            ModelAnswer(
                name=entry.name,
                label=entry.description,
                source="zoo",
                here=entry.cached,
            )
            for entry in zoo.listing()
        ]
        of_hub = [
            ModelAnswer(name=name, label=name, source="hub", here=True)
            for name in _hub_models()
        ]
        folders = [
            ModelAnswer(name=name, label=self._label(path), source="folder", here=True)
            for name, path in self._found(_is_model, "folder")
        ]
        return [*of_zoo, *of_hub, *folders]

    def model_path(self, name: str) -> str:
        """What `hs.load` takes for the name of a model; an UnknownModel where a folder
        is not below the root.
        """
        if not name.startswith("folder:"):
            return name
        return str(self._path(name, _is_model, "folder"))

    def model_identity(self, choice: ModelChoice) -> str:
        """What tells a model from others without loading it: the zoo's version, the
        hub's commit, a folder's files.
        """
        name = choice.name
        if name in zoo.ZOO:
            mark = zoo.ZOO[name].revision
        elif name.startswith("folder:"):
            path = self._path(name, _is_model, "folder")
            mark = identity(sorted(path.iterdir()) if path.is_dir() else [path])
        else:
            mark = _hub_commit(name) or self._not_here
        return f"{name} {choice.dtype} {mark}"

    def datasets(self) -> list[DatasetAnswer]:
        """The shipped datasets, then the uploads."""
        shipped = [(name, name, texts.read(name)) for name in texts.shipped()]
        known = [
            (name, upload.file, upload)
            for name in self._upload_names()
            if (upload := self._upload(name))
        ]
        return [_dataset(*one) for one in (*shipped, *known)]

    def add_dataset(
        self, file: str, content: bytes, columns: ColumnChoice
    ) -> DatasetAnswer:
        """Parse an uploaded file and keep its texts; a TextError says what is wrong
        with it.
        """
        suffix = upload_format(file)
        stream = io.BytesIO(content)
        stream.name = f"upload{suffix}"
        rows: list[texts.Row] = []
        for row in texts.rows(stream, **columns.model_dump()):
            if len(rows) == MOST_ROWS or len(row.text) > MOST_CHARACTERS:
                reason = (
                    f"line {row.line:,} is row {len(rows) + 1:,} and has"
                    f" {len(row.text):,} characters"
                )
                remedy = (
                    f"Upload at most {MOST_ROWS:,} rows of {MOST_CHARACTERS:,}"
                    " characters; Python takes more."
                )
                raise TextError(f"{file[:80]!r} is too large", reason, remedy)
            for name, value in (("label", row.label), ("group", row.group)):
                if isinstance(value, list | dict):
                    reason = f"line {row.line:,} has a {name} with parts"
                    remedy = f"Give every text one word or number as its {name}."
                    raise TextError(f"Cannot read {file[:80]!r}", reason, remedy)
            rows.append(row)
        groups = [row.group for row in rows] if columns.group else None
        read = texts.read(
            (
                ([row.text for row in rows], [row.label for row in rows])
                if _labelled(rows)
                else _texts(rows)
            ),
            group=groups,
        )
        upload = Upload(Path(file).name, read.texts, read.labels, read.groups, columns)
        name = f"upload:{hashlib.sha256(upload.packed.encode()).hexdigest()[:16]}"
        self._keep(name, upload)
        return _dataset(name, upload.file, upload)

    def dataset(self, name: str) -> Upload | None:
        """An upload, or None for the name of a shipped dataset; a TextError where there
        is neither.
        """
        if _UPLOAD.fullmatch(name):
            upload = self._upload(name)
            if upload is None:
                raise TextError(
                    f"No dataset {name!r}",
                    "it was not uploaded here, or was dropped",
                    "Upload it again.",
                )
            return upload
        if name not in texts.shipped():
            listed = ", ".join(texts.shipped())
            raise TextError(
                f"No dataset {name[:80]!r}",
                f"there are {listed}",
                "Choose one of these, or upload one.",
            )
        return None

    def stores(self) -> list[StoreAnswer]:
        """States that were kept below the root, in files and in stores."""
        listed = (
            describe(name, self._label(path), path)
            for name, path in self._found(is_states, "store")
        )
        return [one for one in listed if one is not None]

    def store_path(self, name: str) -> Path:
        """The file or the folder of kept states."""
        return self._path(name, is_states, "store")

    def _found(
        self, fits: Callable[[Path], bool], kind: str
    ) -> Iterator[tuple[str, Path]]:
        """Everything of a kind below the root, each with its name."""
        if self.root is None:
            return
        count, looked, waiting = 0, 0, deque([(self.root, 0)])
        while waiting and count < MOST_FOUND and looked < MOST_LOOKED:
            folder, depth = waiting.popleft()
            for path in _entries(folder):
                looked += 1
                if not path.name.isprintable() or not self._is_below_root(path):
                    continue
                if fits(path):
                    count += 1
                    yield self._name(path, kind), path
                elif depth < DEEPEST and _is_folder(path):
                    waiting.append((path, depth + 1))

    def _is_below_root(self, path: Path) -> bool:
        """Whether what is found in a folder below the root is below it too: all but a
        link that leads elsewhere.
        """
        assert self.root is not None, "there is nothing below no root"
        try:
            return not path.is_symlink() or path.resolve().is_relative_to(self.root)
        except (OSError, RuntimeError):  # a link to itself, or one that may not be read
            return False

    def _name(self, path: Path, kind: str) -> str:
        return f"{kind}:{hashlib.sha256(self._label(path).encode()).hexdigest()[:16]}"

    def _label(self, path: Path) -> str:
        assert self.root is not None, "there is nothing below no root"
        return str(path.relative_to(self.root))

    def _path(self, name: str, fits: Callable[[Path], bool], kind: str) -> Path:
        for known, path in self._found(fits, kind):
            if known == name:
                return path
        where = (
            "no folder was given to look in"
            if self.root is None
            else "there is none below the root"
        )
        raise UnknownModel(
            f"No {kind} {name[:80]!r}",
            where,
            "Start `hiddenscope serve --root FOLDER` above it.",
        )

    def _keep(self, name: str, upload: Upload) -> None:
        with self._lock:
            self._uploads[name] = upload
            self._uploads.move_to_end(name)
            while len(self._uploads) > MOST_UPLOADS:
                self._uploads.popitem(last=False)
        try:
            self.uploads_folder.mkdir(parents=True, exist_ok=True)
            with replacing(self._upload_path(name)) as fresh:
                fresh.write_text(upload.packed, "utf-8")
            files = sorted(
                self.uploads_folder.glob("*.json"),
                key=lambda path: path.stat().st_mtime_ns,
            )
            for path in files[:-MOST_UPLOADS]:
                path.unlink(missing_ok=True)
        except OSError:  # a full disk: it is known until the server stops
            return

    def _upload_path(self, name: str) -> Path:
        return self.uploads_folder / f"{name.removeprefix('upload:')}.json"

    def _upload_names(self) -> list[str]:
        kept = [
            f"upload:{path.stem}" for path in sorted(self.uploads_folder.glob("*.json"))
        ]
        with self._lock:
            return list(
                dict.fromkeys([*self._uploads, *filter(_UPLOAD.fullmatch, kept)])
            )

    def _upload(self, name: str) -> Upload | None:
        with self._lock:
            if name in self._uploads:
                return self._uploads[name]
        try:
            upload = Upload.unpacked(self._upload_path(name).read_text("utf-8"))
        except (OSError, ValueError, TypeError, LookupError):
            return None
        with self._lock:
            return self._uploads.setdefault(name, upload)


def _labelled(rows: list[texts.Row]) -> bool:
    return bool(rows) and any(row.label is not None for row in rows)


def _texts(rows: list[texts.Row]) -> list[str]:
    return [row.text for row in rows]


def _dataset(name: str, label: str, data: Any) -> DatasetAnswer:
    counts = Counter(str(one)[:80] for one in data.labels or ())
    return DatasetAnswer(
        name=name,
        label=label,
        texts=len(data.texts),
        labels=dict(counts.most_common(50)),
        groups=None if data.groups is None else len(set(data.groups)),
        sample=[text[:200] for text in data.texts[:5]],
        columns=getattr(data, "columns", None),
    )


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())[:MOST_FOUND]
    except OSError:
        return []


def _is_folder(path: Path) -> bool:
    """Whether it is a folder to look into; where a link leads is looked into under its
    own name.
    """
    try:
        return path.is_dir() and not path.is_symlink() and not path.name.startswith(".")
    except OSError:
        return False


def _is_model(path: Path) -> bool:
    try:
        if path.suffix.lower() == ".gguf":
            return path.is_file()
        return (
            path.is_dir()
            and (path / "config.json").is_file()
            and any(path.glob("*.safetensors"))
        )
    except OSError:
        return False


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or Path(
        os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "huggingface"
    )
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub"))


def _hub_models() -> list[str]:
    """The ids of models in the local cache of the hub that have weights which can be
    read.
    """
    names = []
    for path in _entries(_hub_cache()):
        match = _HUB_FOLDER.fullmatch(path.name)
        if match and any(path.glob("snapshots/*/*.safetensors")):
            names.append("/".join(filter(None, match.groups())))
    return names


def _hub_commit(name: str) -> str:
    """The commit of a hub id in the local cache; nothing where it is not there."""
    try:
        return (
            (_hub_cache() / f"models--{name.replace('/', '--')}" / "refs" / "main")
            .read_text("ascii")
            .strip()[:64]
        )
    except (OSError, ValueError):
        return ""
