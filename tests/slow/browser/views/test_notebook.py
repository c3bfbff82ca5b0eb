"""A result in a notebook, as somebody sees it there, in Chromium.

JupyterLab runs for real, on loopback. VS Code and marimo do not: the output is put into
a page as they do it, under what their renderers allow, as far as is known from their
sources.
"""

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

import pytest
from playwright.sync_api import Browser, Frame, Page

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.pages.looking import PAINTED, PATIENCE

CELL = """\
import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
hs.profile(hs.load((tiny_model("gpt2"), tiny_tokenizer())), "The cat sat on the mat.")"""
SECONDS = PATIENCE // 1000


def notebook(source: str) -> str:
    cell = {"cell_type": "code", "id": "one", "source": source, "metadata": {}}
    cell |= {"outputs": [], "execution_count": None}
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": [cell], "metadata": {"kernelspec": kernel}}
    return json.dumps(whole | {"nbformat": 4, "nbformat_minor": 5})


def free_port() -> int:
    """A port that is free, and below those that Linux gives to connections, so that
    none takes it meanwhile.
    """
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as trial:
            if trial.connect_ex(("127.0.0.1", port)):
                return port


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """A JupyterLab of its own, which keeps everything in this folder; it ends with the
    test.
    """
    pytest.importorskip("jupyterlab")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "first.ipynb").write_text(notebook(CELL), "utf-8")
    port, token = free_port(), secrets.token_hex(16)
    folders = {f"JUPYTER_{name}_DIR": name for name in ("CONFIG", "DATA", "RUNTIME")}
    folders |= {"JUPYTERLAB_SETTINGS_DIR": "settings", "IPYTHONDIR": "ipython"}
    folders["JUPYTERLAB_WORKSPACES_DIR"] = "spaces"
    own = {name: str(tmp_path / folder) for name, folder in folders.items()}
    own |= {"JUPYTER_TOKEN": token, "OMP_NUM_THREADS": "1"}
    given = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.port={port}",
        "--ServerApp.port_retries=0",
        f"--ServerApp.root_dir={tmp_path / 'work'}",
        "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]
    command = [sys.executable, "-m", "jupyterlab", *given]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log)
        try:
            wait_for(f"http://127.0.0.1:{port}/api", server, tmp_path / "log")
            yield f"http://127.0.0.1:{port}/lab/tree/first.ipynb?token={token}"
        finally:
            server.terminate()
            server.wait(timeout=SECONDS)


def wait_for(address: str, server: "subprocess.Popen[bytes]", log: Path) -> None:
    for _ in range(SECONDS * 5):
        try:
            with build_opener(ProxyHandler({})).open(address):
                return
        except URLError:
            assert server.poll() is None, log.read_text()
            time.sleep(0.2)
    raise AssertionError(log.read_text())


def run_the_cell(page: Page) -> Frame:
    """Run the only cell, and give the frame in which its result is shown."""
    page.get_by_text("| Idle").wait_for()  # the kernel has started
    page.locator(".jp-Notebook .jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    shown = page.wait_for_selector(".jp-OutputArea-output iframe", state="attached")
    assert shown is not None
    frame = shown.content_frame()
    assert frame is not None
    frame.wait_for_selector("html[data-ready=true]", state="attached")
    return frame


def check_alive(page: Page, frame: Frame) -> None:
    """The grid is shown, says what the pointer is at, and hands out its numbers."""
    grid = frame.locator('section[data-view="0"]')
    grid.locator("canvas.front").hover(position={"x": 200, "y": 60})
    frame.evaluate(PAINTED)
    said = grid.locator(".readout").inner_text()
    assert "norm" in said and "layer." in said
    with page.expect_download() as waiting:
        grid.get_by_role("button", name="CSV", exact=True).click()
    assert waiting.value.suggested_filename.endswith(".csv")
    assert Path(waiting.value.path()).stat().st_size > 100


def test_a_result_shows_hovers_and_downloads_in_jupyterlab(
    chromium: Browser, lab: str
) -> None:
    context = chromium.new_context(viewport={"width": 1366, "height": 900})
    context.set_default_timeout(PATIENCE)
    context.route(
        "**/*",
        lambda route: (
            route.continue_() if "127.0.0.1" in route.request.url else route.abort()
        ),
    )
    page = context.new_page()
    page.goto(lab)
    frame = run_the_cell(page)
    check_alive(page, frame)
    warned = page.locator(
        '.jp-OutputArea-output[data-mime-type="application/vnd.jupyter.stderr"]'
    )
    assert warned.all_inner_texts() == [], "nothing is said before the result"
    page.wait_for_function(
        "() => Number(document.querySelector('.jp-OutputArea-output iframe').height)"
        " > 700"
    )
    assert frame.locator(".contents").count() == 0, (
        "a result by itself needs no contents"
    )
    context.close()


# How a host shows an output. VS Code: in a sandboxed frame under a policy, with scripts
# made anew so that they run. marimo: as markup whose own scripts do not run, here in a
# shadow root too.
VSCODE = """<!doctype html><meta http-equiv="Content-Security-Policy" content="default-src 'none';
script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; img-src https: http: data:; font-src https:;
connect-src https:; child-src https: data:;"><div id="output"></div><script>
const place = document.getElementById("output");
place.innerHTML = OUTPUT;
for (const old of place.querySelectorAll("script")) {
  const fresh = document.createElement("script");
  fresh.textContent = old.textContent;
  old.replaceWith(fresh);
}</script>"""
INERT = """<!doctype html><div id="output"></div><script>
document.getElementById("output").innerHTML = OUTPUT;</script>"""
SHADOW = """<!doctype html><div id="output"></div><script>
document.getElementById("output").attachShadow({ mode: "open" }).innerHTML = OUTPUT;</script>"""
RIGHTS = (
    "allow-scripts allow-same-origin allow-forms allow-pointer-lock allow-downloads"
)
HOSTS = {
    "vscode": (VSCODE, RIGHTS),
    "marimo": (INERT, ""),
    "marimo-shadow": (SHADOW, ""),
}


@pytest.mark.parametrize("host", HOSTS)
def test_an_output_is_alive_under_the_rules_of_other_notebooks(
    host: str, chromium: Browser, tmp_path: Path
) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    output = hs.profile(model, "The cat sat on the mat.")._repr_mimebundle_()[
        "text/html"
    ]
    markup, sandbox = HOSTS[host]
    body = markup.replace("OUTPUT", json.dumps(output).replace("</", "<\\/"))
    if sandbox:
        body = (
            f'<!doctype html><iframe sandbox="{sandbox}" width="1000" height="800"'
            f' srcdoc="{escape(body)}"></iframe>'
        )
    (tmp_path / "host.html").write_text(body, "utf-8")
    context = chromium.new_context(
        viewport={"width": 1100, "height": 900}, offline=True
    )
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "console",
        lambda message: wrong.append(message.text) if message.type == "error" else None,
    )
    page.goto((tmp_path / "host.html").as_uri())
    depth = 3 if sandbox else 2  # the page, the host's frame where it has one, and ours
    while len(page.frames) < depth:
        page.wait_for_timeout(50)
    frame = page.frames[-1]
    frame.wait_for_selector("html[data-ready=true]", state="attached")
    top = frame.locator("canvas.front").first.evaluate(
        "(canvas) => canvas.getBoundingClientRect().top + scrollY"
    )
    assert top <= 400, "the picture is in sight where the output begins"
    # One picture is open; the others are a click away.
    assert frame.locator("section[data-view]:visible").count() == 1
    frame.locator("details.fold summary").first.click()
    frame.locator('section[data-view="1"] canvas.front').wait_for()
    check_alive(page, frame)
    assert wrong == []
    context.close()
