"""What this machine has: the models of the zoo, its health, and the workbench."""

import json
import socket
import sys
import threading
import webbrowser
from collections import Counter
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import echo, print_json, table, visible
from hiddenscope.errors import LoadError, UnknownModel
from hiddenscope.files import replacing
from hiddenscope.loading import zoo
from hiddenscope.loading.cache import size_of, verify_all

if TYPE_CHECKING:
    from hiddenscope.diagnosis import Check


@command(
    "models",
    details="They are real trained models that come in wheels of a package index. Those"
    " in your cache are listed with their size.",
    writes=(".json",),
    without=("device", "dtype"),
)
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
    """List the zoo, or the one model that --model names."""
    if verify:
        progress.note(
            f"{verify_all()} models in the cache hold the bytes that were put there."
        )
    rows: list[dict[str, Any]] = []
    for model in zoo.ZOO.values():
        if shared.model in {None, model.name}:
            rows.append(
                {
                    "name": model.name,
                    "description": model.description,
                    "licence": model.licence,
                    "wheel": model.revision,
                    "cached": model.cached,
                    "bytes": size_of(model.folder),
                    "path": str(model.folder),
                }
            )
    if not rows:
        raise UnknownModel(
            f"No model {shared.model!r} in the zoo",
            f"it has {', '.join(zoo.ZOO)}",
            "Name one of those.",
        )
    if shared.out:
        with replacing(shared.out) as fresh:
            fresh.write_text(json.dumps(rows, indent=2) + "\n", "utf-8")
        shared.report_written()
    if shared.json:
        print_json(rows)
    elif not shared.out:
        cells = []
        for row in rows:
            cached = f"{row['bytes'] / 1e6:,.0f} MB" if row["cached"] else "no"
            cells.append([row["name"], row["description"], row["licence"], cached])
        table(["name", "what it is", "licence", "cached"], cells, text=range(3))


TITLES = {
    "environment": "Python and packages",
    "extras": "What not everybody needs",
    "cache": "The cache of models",
    "devices": "torch and its devices",
}
MARKS = {"ok": "ok", "note": "note", "problem": "MEND"}


@command(
    "doctor",
    details="It looks at Python and the packages, the extras, the cache of models, and"
    " every device on which torch can compute. It exits with 1 if something must be"
    " mended, and never reaches the network.",
    writes=(),
    without=("model", "device", "dtype", "out"),
)
def doctor(shared: Shared) -> None:
    """Print each check as soon as it is done, and the verdict at the end."""
    checks: list[Check] = []
    # What reads the metadata of packages takes a fifth of the time of `--help`.
    diagnosis: Any = import_module("hiddenscope.diagnosis")
    for check in diagnosis.diagnose(hs.__version__):
        is_first = not checks or checks[-1].group != check.group
        checks.append(check)
        if shared.json:
            continue
        if is_first:
            echo(f"\n{TITLES.get(check.group, check.group)}")
        echo(visible(f"  {MARKS[check.status]:4}  {check.name:14}{check.message}"))
        if check.remedy:
            echo(visible(f"        {'':14}{check.remedy}"))
    counts = Counter(check.status for check in checks)
    healthy = counts["problem"] == 0
    if shared.json:
        records = [asdict(check) for check in checks]
        print_json({"healthy": healthy, "checks": records})
    else:
        verdict = "All is well. A note tells of something that not everybody needs."
        if counts["problem"] == 1:
            verdict = "1 thing must be mended: see MEND above."
        elif not healthy:
            verdict = f"{counts['problem']} things must be mended: see MEND above."
        echo(f"\n{verdict}")
    if not healthy:
        raise typer.Exit(1)


# How many ports are tried.
PORTS = 20


@command(
    "serve",
    details="It listens on this machine alone. The link that it prints holds a token;"
    " who has not got it gets nothing.",
    writes=(),
    without=("model", "dtype", "out"),
)
def serve(
    shared: Shared,
    host: Annotated[
        str,
        typer.Option(
            help="The address to listen on; another than loopback needs --remote."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            help="The port; the next free one if it is taken.", min=1, max=65_535
        ),
    ] = 8765,
    root: Annotated[
        Path | None,
        typer.Option(
            help="Offer models and states in folders below this one.",
            exists=True,
            file_okay=False,
        ),
    ] = None,
    remote: Annotated[
        bool,
        typer.Option("--remote", help="Allow others on the network, with the token."),
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in a browser.")
    ] = True,
) -> None:
    """Start the server, print its link, and open the page."""
    try:
        app: Any = import_module("hiddenscope.app")
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
        raise LoadError(
            "Cannot start the workbench", reason, "Run pip install 'hiddenscope[app]'."
        ) from None
    if not app.is_loopback(host) and not remote:
        reason = f"{host} can be reached from other machines"
        raise LoadError(
            "Cannot start the workbench", reason, "Add --remote to allow that."
        )
    listener = _listener(host, port)
    settings = app.Settings(
        host=host,
        port=listener.getsockname()[1],
        root=root,
        device=shared.device,
        remote=remote,
        debug=shared.debug,
    )
    link = f"{settings.address}?token={settings.token}"
    if shared.json:
        print_json({"address": settings.address, "token": settings.token, "link": link})
    else:
        typer.echo(f"hiddenscope is at {link}\nPress Ctrl-C to stop.")
    sys.stdout.flush()
    server = app.server(settings)
    if open_page:
        # A ticket works once. Other users of this machine can read the arguments of a
        # browser, and so the token if it were there.
        ticket_link = f"{settings.address}?token={settings.ticket}"
        arguments = (server, ticket_link)
        threading.Thread(target=_open_when_started, args=arguments, daemon=True).start()
    server.run([listener])


def _open_when_started(server: Any, link: str) -> None:
    pause = threading.Event()
    while not server.started and not server.should_exit:
        pause.wait(0.05)
    if server.started:
        webbrowser.open(link)


def _listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the port, or on the next one that is free.

    It is handed to the server as it is, so no other program can take the port between.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in range(port, min(port + PORTS, 65_536)):
        listener = socket.socket(family)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, candidate))
            listener.listen()
        except OSError:
            listener.close()
            continue
        return listener
    reason = f"no port from {port} on is free at {host}"
    raise LoadError("Cannot start the workbench", reason, "Give another with --port.")
