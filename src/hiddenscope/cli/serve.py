"""The workbench in a browser."""

import ipaddress
import socket
import sys
import threading
import webbrowser
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from hiddenscope.cli.command import command
from hiddenscope.cli.options import Shared
from hiddenscope.cli.terminal import print_json
from hiddenscope.errors import LoadError

# How many ports are tried.
PORTS = 20


@command("serve", writes=(), without=("model", "dtype", "out"))
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
    """Open the workbench: a page in which every question can be asked.

    It listens on this machine alone. The link that it prints holds a token; who has not
    got it gets nothing.
    """
    try:
        app: Any = import_module("hiddenscope.app")
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed"
        raise LoadError(
            "Cannot start the workbench", reason, "Run pip install 'hiddenscope[app]'."
        ) from None
    if not _is_loopback(host) and not remote:
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


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
