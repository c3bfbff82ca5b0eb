"""Files appear whole or not at all."""

import io
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hiddenscope.errors import Damaged, FileError
from hiddenscope.files import (
    check_archive,
    open_tensors,
    read_arrays,
    read_tensors,
    replacing,
)

E = np.eye(3)[:, :2]


@pytest.mark.parametrize(
    "error", [ValueError("no"), KeyboardInterrupt(), SystemExit(1)]
)
def test_nothing_is_left_after_an_error(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "x").write_text("old")

    def save() -> None:
        with replacing(tmp_path / "x") as fresh:
            fresh.write_text("half")
            raise error

    with pytest.raises(type(error)):
        save()
    assert [path.name for path in tmp_path.iterdir()] == ["x"] and (
        tmp_path / "x"
    ).read_text() == "old"


@pytest.mark.parametrize(
    "name", ["x" * 300, "ü" * 200 + ".nc", "no/such/folder/x", "file/x", "x\0y"]
)
def test_a_place_that_cannot_be_written_is_a_file_error(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError) as caught, replacing(tmp_path / name) as fresh:
        fresh.write_text("new")
    assert "Cannot write" in str(caught.value) and len(str(caught.value)) < 500
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="a folder in which even root cannot write"
)
def test_a_folder_in_which_nobody_can_write_is_a_file_error() -> None:
    with (
        pytest.raises(FileError, match="Cannot write"),
        replacing("/proc/self/x") as fresh,
    ):
        fresh.write_text("new")


@pytest.mark.skipif(
    os.name == "nt", reason="a file that is open cannot be removed there"
)
def test_a_folder_that_vanishes_while_it_is_written_is_a_file_error(
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(FileError, match="Cannot write"),
        replacing(tmp_path / "folder" / "x") as fresh,
    ):
        shutil.rmtree(fresh.parent)


@pytest.mark.skipif(
    os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere"
)
def test_a_read_only_folder_is_a_file_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        pytest.raises(FileError, match="Cannot write"),
        replacing(tmp_path / "x") as fresh,
    ):
        fresh.write_text("new")
    tmp_path.chmod(0o700)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_what_is_no_file_is_never_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    for name, said in {
        "pipe": "pipe is a named pipe",
        "zero": "zero is a device",
        "nowhere": "nowhere cannot be opened",
        "none": "there is no such file",
        "x\0y": "there is no such file",
        ".": "is a folder",
    }.items():
        path = tmp_path / name
        for read in (read_arrays, read_tensors, check_archive):
            with pytest.raises(FileError, match=said):
                read(path, "Cannot read it")
        with pytest.raises(FileError, match=said), open_tensors(path, "No"):
            pass


@pytest.mark.parametrize("shape", [[10**9, 0], [2, 2 * 10**6, 0], [0, 2**62, 2**62]])
def test_shapes_that_a_file_cannot_fill_are_refused(
    tmp_path: Path, shape: list[int]
) -> None:
    path = tmp_path / "w.safetensors"
    tensor = {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}
    header = json.dumps({"bias": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(Damaged, match="bias is"), open_tensors(path, "No"):
        pass
    with zipfile.ZipFile(tmp_path / "w.npz", "w") as archive:
        archive.writestr("bias.npy", npy_header(shape))
    (tmp_path / "w.npy").write_bytes(npy_header(shape))
    for name in ("w.npz", "w.npy"):
        with pytest.raises(Damaged, match="(bias|array) is|cut short"):
            read_arrays(tmp_path / name, "No")


def npy_header(shape: list[int]) -> bytes:
    content = io.BytesIO()
    entries = {"descr": "<f4", "fortran_order": False, "shape": tuple(shape)}
    np.lib.format.write_array_header_1_0(content, entries)
    return content.getvalue()


def test_an_array_claims_no_more_than_its_file_holds(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(6.0).reshape(2, 3))
    np.savez_compressed(tmp_path / "a.npz", a=np.arange(3), b=np.asfortranarray(E))
    assert read_arrays(tmp_path / "a.npy", "No")[""].tolist() == [[0, 1, 2], [3, 4, 5]]
    arrays = read_arrays(tmp_path / "a.npz", "No")
    assert arrays["a"].tolist() == [0, 1, 2] and (arrays["b"] == E).all()
    assert all(array.flags.writeable for array in arrays.values())
    # A dtype may have no bytes.
    for header in (npy_header([10**12]), npy_header([10**9]).replace(b"<f4", b"|V0")):
        (tmp_path / "b.npy").write_bytes(header)
        with zipfile.ZipFile(tmp_path / "b.npz", "w") as archive:
            archive.writestr("b.npy", header)
        for name in ("b.npy", "b.npz"):
            with pytest.raises(Damaged, match="(b|array) is|cut short"):
                read_arrays(tmp_path / name, "No")


def test_a_packed_file_takes_no_more_memory_than_its_size_allows(
    tmp_path: Path,
) -> None:
    """What a library makes of it counts: several copies, not one."""
    path = tmp_path / "bomb.npz"
    # 100 times its size.
    noise = np.random.default_rng(0).integers(0, 99, 2**17, np.int8)
    np.savez_compressed(path, noise, np.zeros(100 * 2**17, np.int8))
    for check in (check_archive, read_arrays):
        with pytest.raises(Damaged, match="unpacks to more than"):
            check(path, "No")
