"""`hiddenscope serve` as somebody starts it: quickly, without torch, with a link, and
gone after Ctrl-C.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.workbench.serving import served


def test_the_command_serves_until_it_is_stopped_and_never_prints_a_request(
    tmp_path: Path,
) -> None:
    with served(tmp_path, "--no-open") as server:
        token = server.bench.settings.token
        visit = server.bench.raw("GET", f"/?token={token}")
        assert visit.status == 303 and "server" not in visit.headers
        assert server.bench.ask("GET", "/api/analyses").status == 200
        server.process.send_signal(signal.SIGINT)
        out, err = server.process.communicate()
    assert token not in out + err  # the link was printed once, at the start


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
    with served(tmp_path, "--open") as server:
        while not opened.exists():
            assert server.process.poll() is None
            time.sleep(0.1)
        link = opened.read_text()
        assert link.startswith(server.address)
        assert server.bench.settings.token not in link
        path = "/" + link.removeprefix(server.address)
        assert server.bench.raw("GET", path).status == 303


SERVER = "import hiddenscope.app as app; app.create_app(app.Settings(token='x'))"
DESCRIPTIONS = (
    "from hiddenscope.interface import describe;"
    " from hiddenscope.catalog import ANALYSES;"
    " [describe(one.word) for one in ANALYSES if one.package == 'analyses.']"
)


@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (SERVER, {"torch", "transformers"}),
        (DESCRIPTIONS, {"torch", "numpy", "pydantic"}),
    ],
)
def test_the_server_and_the_descriptions_import_no_torch(
    program: str, heavy: set[str]
) -> None:
    words = [sys.executable, "-c", f"{program}; import sys; print(*sys.modules)"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert not heavy & set(done.stdout.split())
