"""States in place of a model: `--states PATH`, one rule for every command whose
analysis reads states.

PATH is a store that `extract` wrote, or a .safetensors file that `capture --out` wrote.
Nothing is computed anew, so the options of a model and of its texts have no use beside
it. Labels come from the file of labelled texts that the states were made of: one for
each text, in the same order.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.arguments import dataset
from hiddenscope.texts import Labelled

STATES_HELP = (
    "States in place of a model: a store that extract wrote, or a file that capture"
    " wrote."
)
StatesOption = Annotated[Path | None, typer.Option("--states", help=STATES_HELP)]
# Options of texts, or of another model, that have no use beside states.
OF_TEXTS = (
    "targets",
    "truncate",
    "other",
)


def is_store(path: str | os.PathLike[str]) -> bool:
    """Whether a path is the folder of a store."""
    return os.path.isdir(path) and os.path.lexists(Path(path) / "plan.json")


def check_states(
    path: Path, of_model: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    """Refuse a path that cannot hold states, and options that have no use beside it,
    before torch is imported.
    """
    if not is_store(path) and not (
        path.suffix.lower() == ".safetensors" and path.is_file()
    ):
        reason = "there is no such file or folder"
        if path.exists():
            reason = (
                "it has no plan.json, so it is not a store"
                if path.is_dir()
                else "it is not a .safetensors file"
            )
        remedy = (
            "Give the folder that `extract --to` wrote, or the file that `capture"
            " --out` wrote."
        )
        raise errors.FileError(
            f"Cannot read states from {str(path)[:80]!r}", reason, remedy
        )
    useless = [name for name, value in of_model.items() if value is not None]
    useless += [name for name in OF_TEXTS if options.get(name)]
    if useless:
        named = ", ".join(f"--{name}" for name in useless)
        raise errors.StatesError(
            f"Cannot use {named} with --states",
            "no model computes anything",
            "Leave one out.",
        )


def read_states(path: Path) -> "hs.Store | hs.States | hs.Pair":
    """The store in a folder, or the states in a file."""
    if is_store(path):
        return hs.open(path)
    # Here, since it needs torch.
    loaded: hs.States | hs.Pair = import_module("hiddenscope.states").load_states(path)
    return loaded


def labels_of(
    states: "hs.Store | hs.States | hs.Pair", name: str, *columns: str | None
) -> Labelled:
    """Read the labels and groups of the texts of states, from the file of labelled
    texts that they were made of.

    `columns` name those of the texts, the labels and the groups.
    """
    chosen: Labelled = import_module("hiddenscope.vectors.dataset").labels_of_states(
        states, dataset(name, *columns)
    )
    return chosen
