"""A look at a store: what it holds, whether it is intact, what can be removed; and its
states in the formats of other programs.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

import hiddenscope as hs
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, in_bytes, print_json, visible
from hiddenscope.errors import FileError

if TYPE_CHECKING:
    from hiddenscope.store.export import ExportFormat


DETAILS = """
info says what the store holds. verify reads every byte of it, names every unit that is
damaged or missing, and exits with 1 if there is one. gc removes what killed jobs left
behind; a job at work is left alone. export writes Parquet, Zarr, a dataset of Hugging
Face's library, or what Embedding Atlas opens.
"""


@command(
    "store",
    details=DETAILS,
    writes=(),
    without=("model", "device", "dtype", "out"),
)
def store(
    shared: Shared,
    action: Annotated[
        Literal["info", "verify", "gc", "export"], typer.Argument(help="What to do.")
    ],
    path: Annotated[Path, typer.Argument(help="The folder of the store.")],
    damaged: Annotated[
        bool,
        typer.Option(
            "--damaged",
            help="With gc: also remove damaged units, so that extract computes them"
            " anew.",
        ),
    ] = False,
    to: Annotated[
        Path | None, typer.Option(help="With export: the new file or folder.")
    ] = None,
    format: Annotated[  # noqa: A002
        Literal["parquet", "zarr", "dataset", "atlas"] | None,
        typer.Option(
            help="With export: what to write; the suffix .parquet or .zarr says it too."
        ),
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="With export: some of the sites.")
    ] = None,
) -> None:
    """Do what the action says, and print what it reports."""
    options = {"--to": to, "--format": format, "--sites": sites}
    useless = [name for name, value in options.items() if value is not None]
    if action != "export" and useless:
        raise FileError(
            f"Cannot use {', '.join(useless)} with {action}",
            "only export writes states",
            "Leave it out.",
        )
    if action == "export":
        report = _export(path, to, format, sites)
    elif action == "info":
        report = _info(path)
    elif action == "verify":
        report = _verify(path)
    else:
        report = _gc(path, damaged)
    if shared.json:
        print_json(report.facts)
    else:
        echo("\n".join(visible(line) for line in report.lines))
    if report.exit_code:
        raise typer.Exit(report.exit_code)


class Report(NamedTuple):
    """What an action says of a store: in lines, as JSON, and by its exit code."""

    lines: list[str]
    facts: dict[str, Any]
    exit_code: int = 0


def _info(path: Path) -> Report:
    store = hs.open(path)
    plan = store.plan
    size = sum(file.stat().st_size for file in (path / "data").iterdir())
    facts = {
        "model": store.source.model,
        "sites": list(plan.sites),
        "dtype": plan.dtype,
        "pool": plan.pool,
        "every": plan.every,
        "units": len(store.units),
        "planned_units": len(plan.units),
        "complete": store.complete,
        "texts": len(store.texts),
        "rows": len(store),
        "planned_rows": plan.rows,
        "bytes": size,
        "plan": plan.digest,
    }
    lines = [
        *repr(store).splitlines(),
        f"  size    {in_bytes(size)}",
        f"  plan    {plan.digest}",
    ]
    return Report(lines, facts)


def _export(
    path: Path, to: Path | None, name: "ExportFormat | None", sites: str | None
) -> Report:
    if to is None:
        raise FileError(
            "Cannot export the store",
            "nothing says where to",
            "Give --to, such as --to states.parquet.",
        )
    store = hs.open(path)
    written = store.export(to, sites=sites, format=name)
    files = [to] if to.is_file() else [file for file in to.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    facts = {"path": str(to), "format": written, "rows": len(store), "bytes": size}
    lines = [f"Wrote {len(store):,} rows to {to} ({written}, {in_bytes(size)})."]
    if not store.complete:
        lines.append("The store is not complete: texts to come are not in it.")
    if written == "atlas":
        shown = "context" if store.pooled is None else "text"
        lines.append(f"Open it: embedding-atlas {to} --vector vector --text {shown}")
    return Report(lines, facts)


def _verify(path: Path) -> Report:
    verification = hs.Store.verify(path)
    damages = [
        {"unit": damage.unit, "what": damage.what} for damage in verification.damages
    ]
    facts = {
        "intact": verification.intact,
        "complete": verification.complete,
        "damaged_units": list(verification.units),
        "damages": damages,
        "pending": list(verification.pending),
        "unneeded": list(verification.unneeded),
    }
    verdict = "Every byte is as it was written."
    if not verification.intact:
        verdict = f"{len(damages):,} damage{'s' * (len(damages) != 1)}."
        recomputable = [damage.recomputable for damage in verification.damages]
        if any(recomputable):
            verdict += (
                f" Run the `hiddenscope extract ... --to {path}` that made this store"
                " again: it repairs them."
            )
        if not all(recomputable):
            verdict += (
                " A link must be replaced by the file itself, and a record that is not"
                " in the plan be removed."
            )
    if verification.pending:
        verdict += f" {len(verification.pending):,} units are not committed yet."
    if verification.unneeded:
        count = len(verification.unneeded)
        verdict += f" {count:,} files are not needed: `hiddenscope store gc`."
    lines = [*map(str, verification.damages), verdict]
    return Report(lines, facts, 0 if verification.intact else 1)


def _gc(path: Path, damaged: bool) -> Report:
    removed = hs.Store.gc(path, damaged=damaged)
    facts = {
        "removed": list(removed.files),
        "freed": removed.freed,
        "busy": removed.busy,
    }
    lines = [f"Removed {len(removed.files):,} files ({in_bytes(removed.freed)})."]
    if removed.busy:
        lines.append(
            "A job is committing a unit, so that files of states were left alone: run"
            " it again later."
        )
    return Report(lines, facts)
