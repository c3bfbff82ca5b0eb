"""What a store holds, whether it is intact, and what can be removed from it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import hiddenscope as hs
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, in_bytes, print_json, visible

if TYPE_CHECKING:
    from hiddenscope.store.verify import Verification


@command("store", writes=(), without=("model", "device", "dtype", "out"))
def store(
    shared: Shared,
    action: Annotated[
        Literal["info", "verify", "gc"], typer.Argument(help="What to do.")
    ],
    path: Annotated[Path, typer.Argument(help="The folder of the store.")],
    damaged: Annotated[
        bool,
        typer.Option(
            "--damaged",
            help=(
                "With gc: also remove damaged units, so that extract computes them"
                " anew."
            ),
        ),
    ] = False,
) -> None:
    """Look at the states of a corpus that `extract` wrote.

    info says what the store holds. verify reads every byte of it, names every unit that
    is damaged or missing, and exits with 1 if there is one. gc removes what killed jobs
    left behind; a job at work is left alone.
    """
    lines, facts, code = {"info": _info, "verify": _verify, "gc": _gc}[action](
        path, damaged
    )
    if shared.json:
        print_json(facts)
    else:
        echo("\n".join(visible(line) for line in lines))
    if code:
        raise typer.Exit(code)


def _info(path: Path, _: bool) -> tuple[list[str], dict[str, Any], int]:
    found = hs.open(path)
    plan = found.plan
    size = sum(file.stat().st_size for file in (path / "data").iterdir())
    facts = {
        "model": found.source.model,
        "sites": list(plan.sites),
        "dtype": plan.dtype,
        "pool": plan.pool,
        "every": plan.every,
        "units": len(found.units),
        "planned_units": len(plan.units),
        "complete": found.complete,
        "texts": len(found.texts),
        "rows": len(found),
        "planned_rows": plan.rows,
        "bytes": size,
        "plan": plan.digest,
    }
    return (
        [
            *repr(found).splitlines(),
            f"  size    {in_bytes(size)}",
            f"  plan    {plan.digest}",
        ],
        facts,
        0,
    )


def _verify(path: Path, _: bool) -> tuple[list[str], dict[str, Any], int]:
    found = hs.Store.verify(path)
    facts = {
        "intact": found.intact,
        "complete": found.complete,
        "damaged_units": list(found.units),
        "damages": [
            {"unit": damage.unit, "what": damage.what} for damage in found.damages
        ],
        "pending": list(found.pending),
        "unneeded": list(found.unneeded),
    }
    lines = [str(damage) for damage in found.damages]
    verdict = (
        "Every byte is as it was written." if found.intact else _remedies(found, path)
    )
    waiting = (
        f" {len(found.pending):,} units are not committed yet." if found.pending else ""
    )
    unneeded = (
        f" {len(found.unneeded):,} files are not needed: `hiddenscope store gc`."
        if found.unneeded
        else ""
    )
    return [*lines, verdict + waiting + unneeded], facts, 0 if found.intact else 1


def _remedies(found: "Verification", path: Path) -> str:
    """How much is damaged, and which command puts it right."""
    said = [f"{len(found.damages):,} damage{'s' * (len(found.damages) != 1)}."]
    if any(damage.recomputable for damage in found.damages):
        said.append(
            f"Run the `hiddenscope extract ... --to {path}` that made this store again:"
            " it repairs them."
        )
    if not all(damage.recomputable for damage in found.damages):
        said.append(
            "A link must be replaced by the file itself, and a record that is not in"
            " the plan be removed."
        )
    return " ".join(said)


def _gc(path: Path, damaged: bool) -> tuple[list[str], dict[str, Any], int]:
    removed = hs.Store.gc(path, damaged=damaged)
    facts = {
        "removed": list(removed.files),
        "freed": removed.freed,
        "busy": removed.busy,
    }
    lines = [f"Removed {len(removed.files):,} files ({in_bytes(removed.freed)})."]
    return lines + [BUSY] if removed.busy else lines, facts, 0


BUSY = (
    "A job is committing a unit, so that files of states were left alone: run it again"
    " later."
)
