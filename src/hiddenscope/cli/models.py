"""The models of the zoo, which need no model hub."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from hiddenscope import errors, progress
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import print_json, table
from hiddenscope.files import replacing
from hiddenscope.loading import zoo
from hiddenscope.loading.cache import verify_all


@command("models", writes=(".json",), without=("device", "dtype"))
def models(
    shared: Shared,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="First read every cached file and compare it with its checksum.",
        ),
    ] = False,
) -> None:
    """List the zoo: models that need no model hub.

    They are real trained models that come in wheels of a package index. Those in your
    cache are listed with their size.
    """
    if verify:
        progress.note(
            f"{verify_all()} models in the cache hold the bytes that were put there."
        )
    rows = [row for row in zoo.listing() if shared.model in {None, row.name}]
    if not rows:
        names = ", ".join(row.name for row in zoo.listing())
        raise errors.UnknownModel(
            f"No model {shared.model!r} in the zoo",
            f"it has {names}",
            "Name one of those.",
        )
    listing = []
    for row in rows:
        path = str(row.path) if row.path else None
        listing.append({**asdict(row), "path": path})
    if shared.out:
        with replacing(shared.out) as fresh:
            fresh.write_text(json.dumps(listing, indent=2) + "\n", "utf-8")
        shared.report_written()
    if shared.json:
        print_json(listing)
    elif not shared.out:
        _print_rows(rows)


def _print_rows(rows: list[zoo.ZooEntry]) -> None:
    cells = []
    for row in rows:
        cached = f"{row.bytes / 1e6:,.0f} MB" if row.cached else "no"
        cells.append([row.name, row.description, row.licence, cached])
    table(["name", "what it is", "licence", "cached"], cells, text=range(3))
