"""Folders that appear whole or not at all, whoever else is at work."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hiddenscope.errors import Damaged, FileError
from hiddenscope.loading import cache
from hiddenscope.loading.cache import (
    build_once,
    cache_folder,
    is_complete,
    size_of,
    verify_all,
    verify_folder,
)

SLOW = """
import sys
from pathlib import Path
from hiddenscope.loading.cache import build_once

def build(part):
    for number in range(20):
        (part / f"{number}.bin").write_bytes(bytes([number]) * 1000)
        if number == 9:
            print("busy", flush=True)
            sys.stdin.readline()  # until it is told to go on

print(build_once(Path(sys.argv[1]), build))
"""


def building(place: Path) -> "subprocess.Popen[str]":
    """A process that has built half of a folder, and waits for a line on its stdin, or
    for its end.
    """
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.DEVNULL,
    }
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, str(place)], text=True, **pipes
    )  # type: ignore[call-overload]
    assert process.stdout.readline() == "busy\n"
    return process  # type: ignore[no-any-return]


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def build(part: Path) -> None:
        built.append(part)
        (part / "sub").mkdir()
        (part / "sub" / "x").write_bytes(b"abc")

    place = tmp_path / "a" / "model"
    assert build_once(place, build) == build_once(place, build) == place
    assert len(built) == 1 and built[0].parent == place.parent and not built[0].exists()
    assert is_complete(place) and size_of(place) >= 3


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)]
)
def test_nothing_is_left_after_an_exception_or_an_interrupt(
    tmp_path: Path, error: BaseException
) -> None:
    def build(part: Path) -> None:
        (part / "half").write_bytes(b"abc")
        raise error

    with pytest.raises(type(error)):
        build_once(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_two_processes_at_once_agree(tmp_path: Path) -> None:
    place = tmp_path / "model"
    # Both have built half of it before either goes on.
    two = [building(place) for _ in range(2)]
    said = [process.communicate("\n")[0].splitlines() for process in two]
    assert [process.returncode for process in two] == [0, 0]
    assert [lines[-1] for lines in said] == [str(place)] * 2
    assert [file.name for file in tmp_path.iterdir()] == ["model"] and is_complete(
        place
    )
    assert all(
        (place / f"{number}.bin").read_bytes() == bytes([number]) * 1000
        for number in range(20)
    )


def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    with building(tmp_path / "model") as process:
        process.send_signal(signal.SIGINT)
        process.wait()
    assert process.returncode != 0 and list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_use_and_what_is_in_use_stays(
    tmp_path: Path,
) -> None:
    with building(tmp_path / "one") as killed, building(tmp_path / "two") as alive:
        assert len(list(tmp_path.iterdir())) == 2
        killed.kill()
        killed.wait()
        build_once(tmp_path / "three", lambda part: None)
        names = {
            path.name.split(".")[1] if path.name.startswith(".") else path.name
            for path in tmp_path.iterdir()
        }
        assert names == {"two", "three"}
        alive.communicate("\n")
    assert alive.returncode == 0 and {path.name for path in tmp_path.iterdir()} == {
        "two",
        "three",
    }


def test_a_folder_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    place = build_once(
        tmp_path / "model", lambda part: (part / "x").write_bytes(b"abc") and None
    )
    (place / "x").write_bytes(b"ab")
    with pytest.raises(Damaged, match="Remove that folder"):
        is_complete(place)
    (place / "x").unlink()
    with pytest.raises(Damaged):
        is_complete(place)
    (place / "hiddenscope.json").write_text("[]")
    with pytest.raises(Damaged):
        build_once(place, lambda part: None)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="HIDDENSCOPE_CACHE"):
        build_once(tmp_path / "file" / "model", lambda part: None)


def test_the_cache_may_be_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HIDDENSCOPE_CACHE")
    assert cache_folder().name == "hiddenscope" and cache_folder() != tmp_path


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    before = cache.identity([path])
    # The clock of a file system goes on in steps of some milliseconds.
    while cache.identity([path]) == before:
        path.write_bytes(content)


def test_a_flipped_bit_is_found_and_what_was_compared_is_not_read_again(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = own_cache / "zoo" / "model"

    def build(part: Path) -> None:
        (part / "weights").write_bytes(bytes(range(256)) * 40)
        (part / "config.json").write_text("{}")

    build_once(place, build)
    read: list[Path] = []
    hashed = cache._sha256
    monkeypatch.setattr(
        cache, "_sha256", lambda path: read.append(path) or hashed(path)
    )
    verify_folder(place)
    assert read == [], "it was compared when it was built"
    assert verify_all() == 1 and len(read) == 2
    for bit in (0, 7, 4001, 81_919):
        flip(place / "weights", bit)
        with pytest.raises(Damaged, match=r"the bytes of weights are not those"):
            verify_folder(place)
        with pytest.raises(Damaged, match="Remove that folder"):
            verify_all()
        flip(place / "weights", bit)
        read.clear()
        verify_folder(place)  # the bytes are right again, and the times are new
        assert len(read) == 2
        verify_folder(place)
        assert len(read) == 2
    (place / "generation_config.json").write_text("{}")
    with pytest.raises(Damaged, match=r"generation_config\.json"):
        verify_folder(place)


def test_rot_that_no_time_shows_is_found_on_request(own_cache: Path) -> None:
    place = build_once(
        own_cache / "gguf" / "model",
        lambda part: (part / "x").write_bytes(b"abc") and None,
    )
    record = next((own_cache / "verified").iterdir())
    (place / "x").write_bytes(b"abd")
    record.write_text(cache.identity([place / "x"]))  # as if the times had stayed
    verify_folder(place)
    with pytest.raises(Damaged, match="the bytes of x"):
        verify_all()


def test_a_folder_of_an_older_version_gets_its_checksums(own_cache: Path) -> None:
    place = build_once(
        own_cache / "zoo" / "model",
        lambda part: (part / "x").write_bytes(b"abc") and None,
    )
    (place / "hiddenscope.json").write_text('{"files": {"x": 3}}')
    verify_folder(place)
    flip(place / "x", 1)
    with pytest.raises(Damaged):
        verify_folder(place)


def test_a_folder_outside_the_cache_is_the_users_own(
    own_cache: Path, tmp_path: Path
) -> None:
    place = build_once(
        tmp_path / "mine", lambda part: (part / "x").write_bytes(b"abc") and None
    )
    flip(place / "x", 1)
    verify_folder(place)
    assert not own_cache.exists()
