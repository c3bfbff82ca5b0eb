"""Files appear whole or not at all."""

import errno
import io
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from hiddenscope import files
from hiddenscope.app.worker import explain_error
from hiddenscope.cli.endings import _message
from hiddenscope.errors import Damaged, FileError
from hiddenscope.files import (
    check_archive,
    open_tensors,
    read_arrays,
    read_tensors,
    remove_leftovers,
    replacing,
    write_safetensors,
    write_tensors,
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


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "The disk is full: free some space"),
        (errno.EDQUOT, "Your share of the disk is used up"),
        (errno.EFBIG, "Files may not be as large here"),
        (errno.EIO, "The disk fails"),
        (None, "The disk is full: free some space"),
        (errno.EROFS, "The disk can only be read"),
    ],
)
def test_the_remedy_is_that_of_the_error(
    tmp_path: Path, number: int | None, said: str
) -> None:
    # As numpy says it.
    error = OSError("1000 requested and 512 written")
    if number is not None:
        error = OSError(number, os.strerror(number))
    with pytest.raises(FileError) as caught, replacing(tmp_path / "x"):
        raise error
    # Or where it comes to the page or to the terminal as it is.
    for message in (str(caught.value), explain_error(error), _message(error, ())):
        assert said in message


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


def test_a_file_that_is_sealed_is_no_leftover(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    seal = files.seal

    def seal_meanwhile(fresh: Path) -> None:
        # Another process saves under the same name, from beginning to end.
        monkeypatch.setattr(files, "seal", seal)
        write_tensors(path, {"a": torch.zeros(2)}, {"format": "test"})
        seal(fresh)

    monkeypatch.setattr(files, "seal", seal_meanwhile)
    write_tensors(path, {"a": torch.ones(2)}, {"format": "test"})
    tensors, _ = read_tensors(path, "a test", "test")
    assert tensors["a"].tolist() == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


def test_a_temporary_file_is_never_renamed_over(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("new")
    with pytest.raises(AssertionError), replacing(tmp_path / "x") as fresh:
        os.replace(other, fresh)
    assert not list(tmp_path.iterdir())


def test_a_link_that_a_killed_process_left_is_removed_by_its_own_age(
    tmp_path: Path,
) -> None:
    old, fresh = tmp_path / "left.1", tmp_path / "left.2"
    for link in (old, fresh):
        link.symlink_to(tmp_path / "nothing")
    os.utime(old, (0, 0), follow_symlinks=False)
    assert remove_leftovers(tmp_path, re.compile(r"left\.\d")).keys() == {"left.1"}
    assert not old.is_symlink()
    assert fresh.is_symlink()


def test_safetensors_reads_what_is_written_and_two_saves_are_equal(
    tmp_path: Path,
) -> None:
    tensors = {"empty": torch.zeros(0, 3), "scalar": torch.tensor(7)}
    for number, dtype in enumerate(files.SAFETENSORS_DTYPES):
        kind = getattr(torch, dtype)
        tensors[f"{number}é"] = torch.arange(6).reshape(2, 3).to(kind).T
    header = {f"key {number}": f"\n{number}é" for number in range(20)}
    paths = [tmp_path / f"{number}.safetensors" for number in range(2)]
    for path in paths:
        write_safetensors(path, tensors, header)
    written = paths[0].read_bytes()
    assert written == paths[1].read_bytes()
    with safe_open(paths[0], framework="pt") as file:
        assert file.metadata() == header
    read = load_file(paths[0])
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype and read[name].shape == tensor.shape
        assert read[name].tolist() == tensor.tolist()


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


def test_no_tensor_has_thousands_of_axes(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    tensor = {"dtype": "F32", "shape": [1] * 2000, "data_offsets": [0, 4]}
    header = json.dumps({"bias": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(Damaged, match="bias has 2,000 axes"), open_tensors(path, "No"):
        pass


def test_a_link_to_nothing_has_an_identity(tmp_path: Path) -> None:
    link = tmp_path / "notes.txt"
    link.symlink_to("nowhere")
    before = files.identity([link])
    (tmp_path / "nowhere").touch()
    assert files.identity([link]) != before


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
