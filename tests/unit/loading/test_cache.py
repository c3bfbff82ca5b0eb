"""Folders that appear whole or not at all, and whose bytes are those that were put there.

tests/slow/process has several processes at work.
"""

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


def build(part: Path) -> None:
    (part / "x").write_bytes(b"abc")


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    built: list[Path] = []

    def counted(part: Path) -> None:
        built.append(part)
        (part / "sub").mkdir()
        (part / "sub" / "x").write_bytes(b"abc")

    place = tmp_path / "a" / "model"
    assert build_once(place, counted) == build_once(place, counted) == place
    assert len(built) == 1
    assert built[0].parent == place.parent
    assert not built[0].exists()
    assert is_complete(place)
    assert size_of(place) >= 3


def test_whoever_finishes_first_serves_the_others(tmp_path: Path) -> None:
    place = tmp_path / "model"

    def overtaken(part: Path) -> None:
        (part / "x").write_bytes(b"late")
        build_once(place, build)

    assert build_once(place, overtaken) == place
    assert (place / "x").read_bytes() == b"abc"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_nothing_is_left_after_an_exception_or_an_interrupt(
    tmp_path: Path, error: BaseException
) -> None:
    def stopped(part: Path) -> None:
        build(part)
        raise error

    with pytest.raises(type(error)):
        build_once(tmp_path / "model", stopped)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_changed_is_not_believed(tmp_path: Path) -> None:
    place = build_once(tmp_path / "model", build)
    (place / "x").write_bytes(b"ab")
    with pytest.raises(Damaged, match="Remove that folder"):
        is_complete(place)
    (place / "x").unlink()
    with pytest.raises(Damaged):
        is_complete(place)
    (place / "hiddenscope.json").write_text("[]")
    with pytest.raises(Damaged):
        build_once(place, build)


def test_the_cache_may_be_elsewhere_and_one_that_cannot_be_written_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("HIDDENSCOPE_CACHE")
    assert cache_folder().name == "hiddenscope"
    assert cache_folder() != tmp_path
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="HIDDENSCOPE_CACHE"):
        build_once(tmp_path / "file" / "model", build)


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

    def weights(part: Path) -> None:
        (part / "weights").write_bytes(bytes(range(256)) * 40)
        (part / "config.json").write_text("{}")

    build_once(place, weights)
    read: list[Path] = []
    hashed = cache._sha256
    monkeypatch.setattr(
        cache, "_sha256", lambda path: read.append(path) or hashed(path)
    )
    verify_folder(place)
    assert read == [], "it was compared when it was built"
    assert verify_all() == 1
    assert len(read) == 2
    for bit in (0, 4001, 81_919):
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
    place = build_once(own_cache / "gguf" / "model", build)
    record = next((own_cache / "verified").iterdir())
    (place / "x").write_bytes(b"abd")
    record.write_text(cache.identity([place / "x"]))  # as if the times had stayed
    verify_folder(place)
    with pytest.raises(Damaged, match="the bytes of x"):
        verify_all()


def test_a_folder_outside_the_cache_is_the_users_own(
    own_cache: Path, tmp_path: Path
) -> None:
    mine = build_once(tmp_path / "mine", build)
    flip(mine / "x", 1)
    verify_folder(mine)
    assert not own_cache.exists()
