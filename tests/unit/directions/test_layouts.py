"""Files that the originals wrote are read, and compute what the originals computed."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hiddenscope as hs
from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.errors import FileError, StatesError
from hiddenscope.testing import tiny_model

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


def normed_transcoder(folder: Path) -> dict[str, torch.Tensor]:
    """Write a transcoder with a skip that reads what TransformerLens calls normed."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tensors = {"W_enc": drawn(64, 16), "W_dec": drawn(16, 64), "b_enc": drawn(16)}
    tensors |= {"b_dec": drawn(64), "W_skip": drawn(64, 64)}
    save_file(tensors, folder / "sae_weights.safetensors")
    names = {"hook_name": "blocks.1.ln2.hook_normalized"}
    names["hook_name_out"] = "blocks.1.hook_mlp_out"
    config = {"architecture": "skip_transcoder", "metadata": names}
    (folder / "cfg.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_normed_state_is_the_model_s_and_the_skip_reads_it_too(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = normed_transcoder(tmp_path)
    model = hs.load((tiny_model(family), None))
    monkeypatch.setattr("hiddenscope.directions.dictionary.prove", Mock())
    texts = np.random.default_rng(0).integers(5, 60, (5, 9)).tolist()
    dictionary = Dictionary.read(tmp_path, model, texts=texts)
    rows = model.capture(texts, "layer.2.mid")["layer.2.mid"].double()
    if family == "gpt2":
        rows = rows - rows.mean(1, keepdim=True)
    # By hand, as TransformerLens norms a state.
    normed = (rows / rows.square().mean(1, keepdim=True).sqrt()).float()
    expected = (normed @ tensors["W_enc"] + tensors["b_enc"]).relu()
    states = model.capture(texts, "layer.2.mid")["layer.2.mid"]
    activations = dictionary.activations(states)
    close(activations, expected)
    decoded = expected @ tensors["W_dec"] + tensors["b_dec"]
    decoded = decoded + normed @ tensors["W_skip"].T
    torch.testing.assert_close(
        dictionary.decode(activations, states), decoded, atol=1e-3, rtol=1e-4
    )


def test_a_normed_state_is_not_guessed_without_a_model(tmp_path: Path) -> None:
    tensors = normed_transcoder(tmp_path)
    dictionary = Dictionary.read(tmp_path)
    assert torch.equal(dictionary[3].vectors["layer.2.mlp"], tensors["W_dec"][3])
    for use in (dictionary.activations, partial(dictionary.decode, torch.zeros(2, 16))):
        with pytest.raises(StatesError, match=r"Dictionary\.read\(path, model\)"):
            use(torch.ones(2, 64))
    dictionary.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "cfg.json").read_text())
    assert again["metadata"]["hook_name"] == "blocks.1.ln2.hook_normalized"


@pytest.mark.parametrize(
    ("name", "transcodes", "sites"),
    [
        ("layers.1.self_attn", False, ("layer.2.attn", "layer.2.attn")),
        ("h.1.attn", False, ("layer.2.attn", "layer.2.attn")),
        ("layers.1", True, ("layer.1", "layer.2")),
        ("layers.1.mlp/seed3", True, ("layer.2.mlp.input", "layer.2.mlp")),
    ],
)
def test_the_modules_of_sparsify(
    tmp_path: Path, name: str, transcodes: bool, sites: tuple[str, str]
) -> None:
    kind = "transcode/layers.1.mlp" if transcodes else "topk/layers.1"
    folder = shutil.copytree(FILES / f"sparsify_{kind}", tmp_path / name)
    dictionary = Dictionary.read(folder)
    assert (dictionary.reads, dictionary.writes) == sites
    # What enters attention has no name.
    folder = shutil.copytree(FILES / "sparsify_transcode/layers.1.mlp", tmp_path / "a")
    with pytest.raises(FileError, match="what enters attention"):
        Dictionary.read(folder.rename(tmp_path / "layers.2.self_attn"))


def test_pickles_of_tensors_by_goodfire_and_qwen(tmp_path: Path) -> None:
    drawn = {name: torch.randn(shape) for name, shape in (("e", (16, 6)), ("b", (16,)))}
    drawn |= {"d": torch.randn(6, 16), "c": torch.randn(6)}
    inputs = torch.randn(5, 6)
    products = inputs @ drawn["e"].T + drawn["b"]
    names = "encoder_linear.weight", "encoder_linear.bias", "decoder_linear.weight"
    goodfire = dict(zip((*names, "decoder_linear.bias"), drawn.values(), strict=True))
    torch.save(goodfire, tmp_path / "Llama-3.1-8B-Instruct-SAE-l19.pth")
    dictionary = Dictionary.read(tmp_path)
    assert (dictionary.reads, dictionary.writes) == ("layer.20", "layer.20")
    close(dictionary.activations(inputs), products.relu())
    decoded = products.relu() @ drawn["d"].T + drawn["c"]
    close(dictionary.reconstruct(inputs), decoded)

    folder = tmp_path / "models--Qwen--SAE-Res-Qwen3-8B-Base-W64K-L0_4" / "snapshots"
    folder.mkdir(parents=True)
    qwen = {"W_enc": drawn["e"], "W_dec": drawn["d"]}
    qwen |= {"b_enc": drawn["b"], "b_dec": drawn["c"]}
    for layer in (3, 12):
        torch.save(qwen, folder / f"layer{layer}.sae.pt")
    dictionary = Dictionary.read(folder, site="layer.13")
    assert (dictionary.reads, dictionary.encoding.k) == ("layer.13", 4)
    top = products.relu() * (products >= products.topk(4).values[:, -1:])
    close(dictionary.activations(inputs), top)
    assert Dictionary.read(folder / "layer3.sae.pt").reads == "layer.4"
    with pytest.raises(FileError, match=r"Name it as its repository is: \.\.\.-L0_50"):
        Dictionary.read(shutil.copytree(folder, tmp_path / "qwen"), site="layer.4")


def test_a_site_may_be_an_alias_and_must_be_the_one_that_is_named() -> None:
    folder = FILES / "saelens_standard"
    assert Dictionary.read(folder, site="blocks.1.hook_resid_post").reads == "layer.2"
    for site in ("layer.3", "layer.2.mlp", "blocks.2.hook_resid_post"):
        with pytest.raises(FileError, match=r"say that it lies at layer\.2, and not"):
            Dictionary.read(folder, site=site)
    transcoder = Dictionary.read(FILES / "saelens_transcoder", site="layer.2")
    assert transcoder.writes == "layer.2.mlp"


@pytest.mark.parametrize("family", ["granite", "gemma3_text"])
def test_a_module_whose_output_is_changed_before_it_is_added_is_refused(
    family: str,
) -> None:
    """Our `mlp` is what is added: after a norm, or times a number."""
    model = hs.load((tiny_model(family), None))
    drawn = torch.randn(8, model.module.config.hidden_size)
    dictionary = Dictionary.of(drawn, "layer.2.mlp")
    dictionary = replace(dictionary, facts={"origin": "sparsify"})
    with pytest.raises(StatesError, match="it is of what a module gives"):
        dictionary.proved(model, [[7, 99, 23, 64]] * 4)
