"""Say which library lives in which environment, and make an environment from nothing."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from packaging.version import Version

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class Environment:
    """A folder with an interpreter of its own and the pinned packages in it.

    Pins of everything else come from constraints.txt, so torch and transformers are
    the same in all of them.
    """

    folder: str
    pins: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Return the folder in the checkout."""
        return ROOT / self.folder

    @property
    def python(self) -> str:
        """Return the interpreter."""
        return str(self.path / "bin" / "python")

    @property
    def ready(self) -> bool:
        """Tell whether everything is installed."""
        return (self.path / ".installed").exists()


# nnterp 1.3.0 imports a module that nnsight 0.8 no longer has, so it lives alone.
PEERS = Environment(
    ".venv-peers",
    (
        "torch==2.13.0",
        "transformers==5.23.0",
        "transformer-lens==4.3.0",
        "nnsight==0.8.1",
        "torchlens==2.36.1",
        "sentence-transformers==6.2.0",
    ),
)
NNTERP = Environment(
    ".venv-nnterp",
    ("torch==2.13.0", "transformers==5.23.0", "nnterp==1.3.0", "nnsight==0.7.0"),
)

# Packages that were read for docs/coming-from.md and never run.
READ = ("sae-lens==6.54.12",)


def newest_tried() -> dict[str, str]:
    """Return the newest version of every other library that was run or read here.

    The pages that compare libraries may name no older one.
    """
    versions: dict[str, Version] = {}
    for pin in (*PEERS.pins, *NNTERP.pins, *READ):
        name, _, number = pin.partition("==")
        version = Version(number)
        versions[name] = max(version, versions.get(name, version))
    return {name: str(version) for name, version in versions.items()}


@dataclass(frozen=True)
class Library:
    """A library: its name in tables, its module here, and where it is installed.

    `environment` is None for what runs in the environment of this process.
    """

    name: str
    module: str
    environment: Environment | None = None
    imported: str = ""

    @property
    def python(self) -> str:
        """Return the interpreter that has the library."""
        if self.environment is None:
            return sys.executable
        return self.environment.python

    @property
    def missing(self) -> str:
        """Say why the library cannot be measured, or nothing."""
        if self.environment is None or self.environment.ready:
            return ""
        return f"{self.environment.folder} is not installed"


OURS, PLAIN = "hiddenscope", "plain HF"
LIBRARIES = {
    library.name: library
    for library in (
        Library(PLAIN, "plain_", None, "torch, transformers"),
        Library(OURS, "hiddenscope_", None, "hiddenscope"),
        Library("TransformerLens", "transformer_lens_", PEERS, "transformer_lens"),
        Library("nnsight", "nnsight_", PEERS, "nnsight"),
        Library("nnterp", "nnterp_", NNTERP, "nnterp"),
        Library("TorchLens", "torchlens_", PEERS, "torchlens"),
        Library("sentence-transformers", "sentences_", PEERS, "sentence_transformers"),
    )
}


def set_up(environment: Environment) -> str:
    """Make an environment unless it is there; return why it failed, or nothing."""
    if environment.ready:
        return ""
    pip = [environment.python, "-m", "pip", "install", "--quiet"]
    constraints = ["-c", str(ROOT / "constraints.txt")]
    commands = [
        [sys.executable, "-m", "venv", str(environment.path)],
        [*pip, *constraints, *environment.pins],
    ]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["pip said nothing"]
            return f"not installed ({lines[-1][:120]})"
    (environment.path / ".installed").touch()
    return ""


def variables() -> dict[str, str]:
    """Return the variables of a worker: nothing is fetched, nothing is reported."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    return {**os.environ, **quiet}
