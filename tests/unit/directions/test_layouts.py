"""Files that the originals wrote are read, and compute what the originals computed."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.errors import FileError

FILES = Path(__file__).parent / "files"
FOLDERS = sorted(path.parent for path in FILES.rglob("numbers.safetensors"))
# Folders with a dictionary for each layer.
SETS = [folder for folder in FOLDERS if any(folder.glob("*_0.safetensors"))]
SINGLE = [folder for folder in FOLDERS if folder not in SETS]
LAYERS = 3


def named(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("folder", SINGLE, ids=named)
def test_the_numbers_are_those_of_the_original(folder: Path) -> None:
    numbers = load_file(folder / "numbers.safetensors")
    dictionary = Dictionary.read(folder)
    activations = dictionary.activations(numbers["inputs"])
    close(activations, numbers["activations"])
    close(dictionary.decode(activations, numbers["inputs"]), numbers["outputs"])
    assert dictionary.reads.startswith("layer.")


@pytest.mark.parametrize("folder", SETS, ids=named)
def test_an_output_is_the_sum_of_what_is_written_there(folder: Path) -> None:
    numbers = load_file(folder / "numbers.safetensors")
    members = []
    for layer in range(1, LAYERS + 1):
        members.append(Dictionary.read(folder, site=f"layer.{layer}"))
    for number, member in enumerate(members):
        inputs = numbers["inputs"][number]
        close(member.activations(inputs), numbers["activations"][number])
        total = member.reconstruct(inputs)
        for lower in range(number):
            if members[lower].later is not None:
                above = members[lower].at(member.writes)
                total = total + above.reconstruct(numbers["inputs"][lower])
        close(total, numbers["outputs"][number])


@pytest.mark.parametrize("folder", SINGLE, ids=named)
def test_what_is_saved_reads_as_it_was(folder: Path, tmp_path: Path) -> None:
    inputs = load_file(folder / "numbers.safetensors")["inputs"]
    dictionary = Dictionary.read(folder)
    transcodes = dictionary.reads != dictionary.writes
    gate = dictionary.encoding.gate
    if gate == "groups" or (transcodes and gate == "topk"):
        with pytest.raises(FileError, match="SAELens has none like"):
            dictionary.save(tmp_path / "saved")
        return
    dictionary.save(tmp_path / "saved")
    again = Dictionary.read(tmp_path / "saved")
    assert (again.reads, again.writes) == (dictionary.reads, dictionary.writes)
    assert repr(again) == repr(dictionary)
    close(again.activations(inputs), dictionary.activations(inputs))
    close(again.reconstruct(inputs), dictionary.reconstruct(inputs))
