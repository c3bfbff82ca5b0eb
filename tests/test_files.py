"""Every file that we write and read back carries a checksum: one flipped bit anywhere is found before it is parsed."""

import os
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import Damaged, FileError
from hiddenscope.files import UNSEALED, check_seal, replacing, seal

FLIPS = int(os.environ.get("HIDDENSCOPE_FLIPS", 60))


def states(tiny: Any, path: Path) -> Callable[[], Any]:
    tiny("gpt2").capture(["The cat sat.", "A dog."]).save(path)
    return lambda: hs.States.load(path)


def result(tiny: Any, path: Path) -> Callable[[], Any]:
    hs.profile(tiny("gpt2"), "The cat sat on the mat.").save(path)
    return lambda: hs.Result.load(path)


def probe(tiny: Any, path: Path) -> Callable[[], Any]:
    generator = np.random.default_rng(0)
    labels = np.array([0, 1] * 10)
    hs.Probe().fit(generator.normal(size=(20, 8)) + labels[:, None], labels).save(path)
    return lambda: hs.Probe.load(path)


def lens(tiny: Any, path: Path) -> Callable[[], Any]:
    texts = [[5 + k, 6, 7, 8, 9 + k] for k in range(12)]
    hs.Lens.fit(tiny("gpt2"), texts, "tuned").save(path)
    return lambda: hs.Lens.load(path)


FILES = {
    "states.safetensors": states,
    "result.json": result,
    "result.nc": result,
    "probe.safetensors": probe,
    "lens.safetensors": lens,
}


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_anywhere_is_found(tiny: Any, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    load = FILES[name](tiny, path)
    load()
    whole, chance = path.read_bytes(), random.Random(3)
    places = [*range(24), *(chance.randrange(len(whole)) for _ in range(FLIPS))]
    for at in places:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << chance.randrange(8)
        path.write_bytes(flipped)
        with pytest.raises(Damaged):
            load()
    for cut in (0, 1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(Damaged):
            load()
    path.write_bytes(whole)
    load()


def test_other_programs_read_the_files_as_ever(tiny: Any, tmp_path: Path) -> None:
    import xarray
    from safetensors.torch import load_file

    states(tiny, tmp_path / "states.safetensors")
    result(tiny, tmp_path / "result.nc")
    assert all(isinstance(tensor, torch.Tensor) for tensor in load_file(tmp_path / "states.safetensors").values())
    assert "norm" in xarray.open_dataset(tmp_path / "result.nc", engine="h5netcdf")


def test_a_text_that_looks_like_a_seal_is_no_seal(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text(f"hiddenscope-sha256:{'f' * 64} {UNSEALED} and then hiddenscope-sha256:{'a' * 64}")
    seal(path)
    check_seal(path, "Cannot read it")
    path.write_bytes(path.read_bytes().replace(b"and", b"amd"))
    with pytest.raises(Damaged):
        check_seal(path, "Cannot read it")


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="a small disk takes root to mount")
@pytest.mark.parametrize("name", ["result.nc", "result.json", "states.safetensors"])
def test_a_full_disk_is_an_error_and_leaves_what_was_there(tiny: Any, tmp_path: Path, name: str) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        (disk / name).write_text("before")
        with pytest.raises(FileError):
            FILES[name](tiny, disk / name)
        assert [entry.name for entry in disk.iterdir()] == [name] and (disk / name).read_text() == "before"
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    def write() -> None:
        with replacing(tmp_path / "note.txt") as fresh:
            fresh.write_text("half")
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        write()
    assert list(tmp_path.iterdir()) == []
