"""`hiddenscope serve` as somebody starts it: quickly, without torch, with a link, and
gone after Ctrl-C.
"""

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hiddenscope.cli import main as cli
from hiddenscope.cli.serve import _listener
from tests.workbench.serving import SECONDS


def started(
    tmp_path: Path, *options: str, opens: str = "--no-open", before: str = ""
) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start the command, after the statements in `before`."""
    program = (
        f"{before}\nimport sys; from hiddenscope.cli.main import main; sys.argv[0] ="
        " 'hiddenscope'; main()"
    )
    words = ["serve", opens, "--json", *options]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert process.stdout is not None
    lines = ""
    while not lines.rstrip().endswith("}"):
        lines += process.stdout.readline() or pytest.fail(process.communicate()[1])
    return process, json.loads(lines)


def status(port: int, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()


def test_the_command_serves_until_it_is_stopped_and_never_prints_a_request(
    tmp_path: Path,
) -> None:
    process, told = started(tmp_path)
    try:
        port = int(told["address"].rstrip("/").rpartition(":")[2])
        assert status(port, f"/?token={told['token']}") == 303
        assert (
            status(port, "/api/analyses", Authorization=f"Bearer {told['token']}")
            == 200
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    finally:
        process.kill()
        process.communicate()
    assert told["token"] not in out + err  # the link was printed once, at the start


def test_the_arguments_of_the_browser_hold_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody on a machine can read the arguments of its processes."""
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(
        f'#!/bin/sh\nprintf %s "$1" > {opened}.part && mv {opened}.part {opened}\n'
    )
    browser.chmod(0o700)
    monkeypatch.setenv("BROWSER", f"{browser} %s")
    process, told = started(tmp_path, opens="--open")
    try:
        while not opened.exists():
            assert process.poll() is None
            time.sleep(0.1)
        link = opened.read_text()
        port = int(told["address"].rstrip("/").rpartition(":")[2])
        assert link.startswith(told["address"]) and told["token"] not in link
        assert status(port, "/" + link.removeprefix(told["address"])) == 303
    finally:
        process.kill()
        process.communicate()


def test_two_servers_that_start_at_once_have_two_ports() -> None:
    with _listener("127.0.0.1", 8800) as first, _listener("127.0.0.1", 8800) as second:
        assert first.getsockname() != second.getsockname()
        for one in (first, second):
            with socket.create_connection(one.getsockname()):
                pass  # a visitor who comes before the server is ready waits until it is


def test_the_server_imports_no_torch() -> None:
    program = (
        "import hiddenscope.app as app, sys; app.create_app(app.Settings(token='x'));"
        " print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "transformers"} & set(done.stdout.split())


def test_another_address_needs_a_flag() -> None:
    done = CliRunner().invoke(cli.app, ["serve", "--host", "0.0.0.0", "--no-open"])
    assert done.exit_code == 2 and "--remote" in done.stderr
