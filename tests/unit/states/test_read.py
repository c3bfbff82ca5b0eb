"""States of other programs: right names, or a refusal that says what is missing."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from safetensors.torch import save, save_file
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.errors import (
    Error,
    FileError,
    NotFinite,
    SiteError,
    StatesError,
    Unsafe,
)
from hiddenscope.testing import tiny_model

IDS = [5, 6, 7, 8, 9]
TEXTS = [[5, 6, 7], [8, 9, 10, 11, 12]]
read = hs.States.read


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model(module: nn.Module) -> hs.Model:
    return hs.load((module, None))


def outputs(module: Any, ids: Any) -> dict[str, Tensor]:
    """What blocks and the final norm return, by a hook of this test's own."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[f"{name}.output"] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [module.model.norm.register_forward_hook(keep("model.norm"))]
    for number, block in enumerate(module.model.layers):
        handles.append(block.register_forward_hook(keep(f"model.layers.{number}")))
        handles.append(block.mlp.register_forward_hook(keep(f"mlp.{number}")))
    try:
        with torch.no_grad():
            module(torch.as_tensor(ids))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def vllm_tensors(module: Any, ids: list[int]) -> dict[str, Tensor]:
    """As vLLM's connector writes layers 1 and 2: k is the state after k blocks."""
    seen = outputs(module, [ids])
    stacked = [seen[f"model.layers.{block}.output"][0] for block in (0, 1)]
    states = torch.stack(stacked, 1).contiguous()
    return {"hidden_states": states, "token_ids": torch.tensor(ids)}


def test_a_file_of_vllm_equals_a_capture(
    module: nn.Module, model: hs.Model, tmp_path: Path
) -> None:
    path, packed = tmp_path / "a.safetensors", tmp_path / "b.safetensors.zst"
    tensors = vllm_tensors(module, IDS)
    save_file(tensors, path)
    packed.write_bytes(zstandard.ZstdCompressor().compress(save(tensors)))
    captured = model.capture([IDS], "layer.1,layer.2")
    for file in (path, packed):
        states = read(file, sites=[1, 2], source="toy in vLLM")
        assert states.sites == captured.sites
        assert torch.equal(states.values, captured.values)
        assert states.tokens.ids.tolist() == IDS
        assert states.source.model == "toy in vLLM"
        assert states.source.dtype == "float32"
    with pytest.raises(StatesError, match="holds 2 layers and does not say which"):
        read(path)
    with pytest.raises(StatesError, match="3 sites are named"):
        read(path, sites=[0, 1, 2])
    # Files of several texts are joined.
    paths = []
    for number, ids in enumerate(TEXTS):
        paths.append(tmp_path / f"{number}.safetensors")
        save_file(vllm_tensors(module, ids), paths[-1])
    states = read(paths, sites="layer.1-2")
    assert states.tokens.lengths.tolist() == [3, 5]
    captured = model.capture(TEXTS, "layer.1,layer.2", batch_tokens=1)
    torch.testing.assert_close(states.values, captured.values)
    with pytest.raises(StatesError, match="2 files"):
        read(paths, sites="layer.1-2", tokens=TEXTS)


def test_a_residual_kept_apart_is_added_only_if_named(
    module: Any, model: hs.Model
) -> None:
    seen, named = outputs(module, [IDS]), vllm_tensors(module, IDS)
    mlp = torch.stack([seen[f"mlp.{k}.output"][0] for k in range(2)], 1)
    residual = named["hidden_states"] - mlp
    given = named | {"hidden_states": mlp}
    apart = given | {"residual": residual}
    with pytest.raises(StatesError, match="keeps the residual apart"):
        read(apart, sites=[1, 2])
    states = read(apart, sites=[1, 2], residual="residual")
    captured = model.capture([IDS], "layer.1,layer.2")
    torch.testing.assert_close(states.values, captured.values)
    again = read(given, sites=[1, 2], residual=residual)
    assert torch.equal(again.values, states.values)
    with pytest.raises(StatesError, match="no tensor 'rest'"):
        read(apart, sites=[1, 2], residual="rest")
    with pytest.raises(StatesError, match="the residual is"):
        read(given, sites=[1, 2], residual=torch.zeros(2, 2))


def test_numpy_torch_and_files_agree(model: hs.Model, tmp_path: Path) -> None:
    captured = model.capture([IDS], "layer.*,final")
    array = captured.values.numpy()
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", hidden_states=array.swapaxes(0, 1), token_ids=IDS)
    captured.save(tmp_path / "own.safetensors")
    for data in (array, captured.values, list(captured.values), tmp_path / "a.npy"):
        states = read(data, tokens=IDS, sites=list(captured.sites))
        assert torch.equal(states.values, captured.values)
    states = read(tmp_path / "a.npz", sites=captured.sites)
    assert torch.equal(states.values, captured.values)
    own = read(tmp_path / "own.safetensors")
    assert torch.equal(own.values, captured.values)
    assert own.source == captured.source
    # Layers are sorted with their names.
    swapped = read(array[:2], tokens=IDS, sites=["final", "layer.1"])
    assert torch.equal(swapped["final"], captured.values[0])
    assert torch.equal(swapped["layer.1"], captured.values[1])


def test_padding_needs_its_mask(model: hs.Model) -> None:
    sites = ["layer.1", "final"]
    captured = model.capture(TEXTS, sites)
    values, mask = captured.padded()
    ids = torch.zeros(mask.shape, dtype=torch.long)
    ids[mask] = torch.tensor([*TEXTS[0], *TEXTS[1]])
    with pytest.raises(StatesError, match="padded, and the texts have 3 to 5"):
        read(values, tokens=TEXTS, sites=sites)
    for good in (mask.long(), mask, mask.float(), mask.tolist()):
        tokens = {"input_ids": ids, "attention_mask": good}
        states = read(values, tokens=tokens, sites=sites)
        assert torch.equal(states.values, captured.values)
        assert states.tokens.ids.tolist() == [*TEXTS[0], *TEXTS[1]]
    left = {"input_ids": ids.flip(1), "attention_mask": mask.long().flip(1)}
    flipped = read(values.flip(2), tokens=left, sites=sites)
    assert flipped.tokens.lengths.tolist() == [3, 5]
    for bad, said in (
        (mask[:, :2], "attention mask is"),
        ((1 - mask.long()) * -1e9, "added to attention scores"),
    ):
        with pytest.raises(StatesError, match=said):
            read(values, tokens={"input_ids": ids, "attention_mask": bad}, sites=sites)
    inputs = model.encode(TEXTS)
    states = read(captured.values, tokens=inputs, sites=sites)
    assert states.tokens.lengths.tolist() == [3, 5]
    again = read(captured.values, tokens=captured.tokens, sites=sites)
    assert again.tokens is captured.tokens
    # A negative id is padding, or wrong.
    array = torch.ones(1, 1, 3, 4)
    with pytest.raises(StatesError, match="-100 is not the id of a token"):
        read(array, tokens=[[5, 6, -100]], sites=[1])
    padded = {"input_ids": [[5, 6, -100]], "attention_mask": [[1, 1, 0]]}
    assert read(array, tokens=padded, sites=[1]).tokens.ids.tolist() == [5, 6]


def test_the_name_of_an_array_does_not_say_which_axis_is_which() -> None:
    array, ids = torch.randn(3, 2, 4), [5, 6, 7]
    for first in (array, array.movedim(1, 0)):
        named = {"hidden_states": first, "input_ids": torch.tensor(ids)}
        states = read(named, sites=[1, 2])
        assert torch.equal(states.values, array.movedim(1, 0))
    square = torch.randn(3, 3, 4)
    named = {"hidden_states": square, "input_ids": torch.tensor(ids)}
    for data, tokens in ((named, None), ({"hidden_states": square}, ids)):
        with pytest.raises(StatesError, match="tokens or layers come first"):
            read(data, tokens=tokens, sites=[1, 2, 3])
    vllm = {"hidden_states": square, "token_ids": torch.tensor(ids)}
    assert torch.equal(read(vllm, sites=[1, 2, 3])["layer.2"], square[:, 1])
    cut = {**vllm, "hidden_states": torch.randn(2, 2, 4)}
    with pytest.raises(StatesError, match=r"prefix cache.*enable_prefix_caching=False"):
        read(cut, sites=[1, 2])
    states = read(square, tokens=ids, sites=[1, 2, 3])
    assert torch.equal(states["layer.2"], square[1])


def test_nnsight_saves_equal_a_capture(module: nn.Module, model: hs.Model) -> None:
    seen = outputs(module, [IDS])
    saved = {name: seen[name] for name in seen if not name.startswith("mlp")}
    states = read(saved, tokens=[IDS])
    captured = model.capture([IDS], list(states.sites))
    assert str(states.sites[-1]) == "final"
    assert torch.equal(states.values, captured.values)
    inputs = {"model.layers.0.input": captured["layer.1"]}
    assert read(inputs, tokens=IDS).sites == (hs.Site(0),)
    # A tuple is what a block returned.
    saved = {"transformer.h.3.output": (torch.ones(1, 3, 4), None)}
    assert read(saved, tokens=[1, 2, 3])["layer.4"].shape == (3, 4)
    # What a module inside returns must be named.
    name = "model.layers.0.mlp.output"
    saved = {name: seen["mlp.0.output"]}
    with pytest.raises(SiteError, match="need not be what the block adds"):
        read(saved, tokens=IDS)
    states = read(saved, tokens=IDS, sites={name: "layer.1.mlp"})
    captured = model.capture([IDS], "layer.1.mlp")
    assert torch.equal(states["layer.1.mlp"], captured["layer.1.mlp"])
    with pytest.raises(SiteError, match="no tensor 'x'"):
        read(saved, tokens=IDS, sites={"x": "layer.1"})


def test_blocks_of_a_language_model_are_layers_and_of_another_must_be_named() -> None:
    tokens, state = [1, 2, 3], torch.ones(3, 4)
    for name in (
        "model.layers.3",
        "language_model.model.layers.3",
        "base_model.model.model.layers.3",
        "transformer.h.3",
        "bert.encoder.layer.3",
        "h.3",
    ):
        states = read({f"{name}.output": state}, tokens=tokens)
        assert states.sites == (hs.Site(4),), name
    for name in (
        "vision_tower.encoder.layers.1.output",
        "visual.norm.output",
        "model.encoder.layers.1.output",
        "mtp.layers.0.output",
        "model.layers.0.experts.layers.1.output",
    ):
        with pytest.raises(SiteError, match="is the language model's"):
            read({name: state}, tokens=tokens)
        states = read({name: state}, tokens=tokens, sites={name: "layer.2"})
        assert states.sites == (hs.Site(2),), name
    for other in (
        "vision_tower.encoder.layers.1.output",
        "model.blocks.1.output",
        "text_model.layers.1.output",
        "text_model.norm.output",
    ):
        with pytest.raises(SiteError, match="2 stacks of blocks"):
            read({"model.layers.0.output": state, other: state}, tokens=tokens)
    for names, said in (
        (("foo", "bar"), "No site for 'foo', 'bar'"),
        (("model.embed_tokens.output",), "embed_tokens"),
    ):
        with pytest.raises(SiteError, match=said):
            read(dict.fromkeys(names, state), tokens=tokens)


def test_transformer_lens_names(model: hs.Model) -> None:
    captured = model.capture([IDS], "layer.*")
    last = len(captured.sites) - 1
    cache = {"hook_embed": captured["layer.0"][None]}
    for block in range(last):
        cache[f"blocks.{block}.hook_resid_pre"] = captured[block][None]
        cache[f"blocks.{block}.hook_resid_post"] = captured[block + 1][None]
        cache[f"blocks.{block}.attn.hook_pattern"] = torch.ones(1, 2, 5, 5)
    cache["ln_final.hook_scale"] = torch.ones(1, 5, 1)
    states = read(cache, tokens=IDS)
    assert states.sites == captured.sites
    assert torch.equal(states.values, captured.values)
    assert any("TransformerLens" in note for note in states.source.notes)
    assert any("left out" in note for note in states.source.notes)
    some = read(cache, tokens=IDS, sites=["layer.1"])
    assert some.sites == (hs.Site(1),)
    with pytest.raises(SiteError, match=r"no layer\.9"):
        read(cache, tokens=IDS, sites=["layer.9"])
    cache[f"blocks.{last - 1}.hook_resid_pre"] = captured["layer.0"][None] + 1
    with pytest.raises(StatesError, match="two of its tensors"):
        read(cache, tokens=IDS)


def test_what_a_cache_does_not_say_is_asked_for() -> None:
    tokens, source = [1, 2, 3], hs.Source("gpt2", depth=2, final=True)
    cache: Any = {"blocks.0.hook_resid_post": torch.ones(1, 3, 4)}
    with pytest.raises(StatesError, match="whether the model has a final norm"):
        read(cache, tokens=tokens)
    states = read(cache, tokens=tokens, source=source)
    assert states.sites == (hs.Site(1),)
    assert states.source.depth == 2
    entries = {f"hidden_states[{k}]": torch.ones(1, 3, 4) * k for k in range(3)}
    with pytest.raises(SiteError, match="number of blocks"):
        read(entries, tokens=tokens)
    states = read(entries, tokens=tokens, source=source)
    assert [str(site) for site in states.sites] == ["layer.0", "layer.1", "final"]
    # An activation cache says how it was folded.
    values, scale = torch.randn(1, 3, 8), torch.ones(1, 3, 1)
    config = SimpleNamespace(n_layers=1, normalization_type="LNPre")
    centred = values - values.mean(-1, keepdim=True)
    hooks = {"blocks.0.hook_resid_post": centred, "ln_final.hook_scale": scale}
    cache = SimpleNamespace(cache_dict=hooks, model=SimpleNamespace(cfg=config))
    notes = " ".join(read(cache, tokens=tokens).source.notes)
    assert "folded the weights of norms" in notes
    assert "mean zero" in notes
    # A block that norms its output is noticed.
    parts = torch.randn(2, 1, 3, 8)
    cache = {
        "blocks.0.hook_resid_mid": parts[0],
        "blocks.0.hook_mlp_out": parts[1],
        "blocks.0.hook_resid_post": parts.sum(0),
        "ln_final.hook_scale": scale,
    }
    assert len(read(cache, tokens=tokens).sites) == 3
    normed = torch.nn.functional.layer_norm(5 * parts.sum(0), (8,))
    cache["blocks.0.hook_resid_post"] = normed
    with pytest.raises(StatesError, match="norms its output"):
        read(cache, tokens=tokens)


def test_bad_states_are_one_sentence() -> None:
    one, tokens = torch.ones(1, 3, 4), [1, 2, 3]
    right: dict[str, Any] = {"data": one, "sites": [1], "tokens": tokens}
    other_ids = {"hidden_states": one.movedim(1, 0), "token_ids": torch.arange(3)}
    dtypes = {"layer.1": torch.ones(3, 4), "layer.2": torch.ones(3, 4).double()}
    for wrong, message in (
        ({"tokens": None}, "which tokens they are of"),
        ({"tokens": ["a text"]}, "only a tokenizer"),
        ({"data": torch.ones(3, 4)}, r"is \[3, 4\]"),
        ({"data": torch.ones(3, 1, 4)}, "another order"),
        ({"data": torch.ones(1, 4, 4)}, "there are 3 tokens"),
        ({"data": one.int()}, "int32"),
        ({"data": torch.ones(2, 3, 4), "sites": [1, 1]}, "named twice"),
        ({"data": one * torch.nan}, "a NaN at layer.1"),
        ({"data": other_ids, "tokens": [7, 8, 9]}, "other token ids"),
        ({"sites": [9], "source": hs.Source("a", depth=2)}, "the model has 2 blocks"),
        ({"sites": "layer.-1"}, "number of blocks"),
        ({"data": object(), "tokens": [1]}, "not an array"),
        ({"data": [one[0], one[0, :2]], "sites": [1, 2]}, "differ in shape"),
        ({"data": dtypes, "sites": None}, "2 dtypes"),
    ):
        with pytest.raises(Error, match=message) as raised:
            read(**right | wrong)
        assert "\n" not in str(raised.value)
        assert isinstance(raised.value, NotFinite) == ("NaN" in message)


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    whole = save({"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.arange(3)})
    for name in ("cut.safetensors", "cut.npy", "cut.npz", "cut.safetensors.zst"):
        (tmp_path / name).write_bytes(whole[:-20])
    (tmp_path / "a.txt").write_text("x")
    torch.save({"layer.1": torch.ones(3, 4)}, tmp_path / "a.pt")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(2**24))
    (tmp_path / "bomb.safetensors.zst").write_bytes(bomb)
    np.savez_compressed(tmp_path / "bomb.npz", *[np.zeros(2**20, np.int8)] * 8)
    for name, error, said in (
        ("cut.safetensors", FileError, "damaged, cut short"),
        ("cut.npy", FileError, "damaged, cut short"),
        ("cut.npz", FileError, "damaged, cut short"),
        ("cut.safetensors.zst", FileError, "damaged, cut short"),
        ("nowhere.safetensors", FileError, "no such file"),
        ("a.txt", FileError, "its suffix is"),
        ("a.pt", Unsafe, "pickle"),
        ("objects.npy", FileError, "damaged"),
        ("bomb.safetensors.zst", FileError, "more than 4,194,304 bytes"),
        ("bomb.npz", FileError, "more than 4,194,304 bytes"),
    ):
        with pytest.raises(error, match=said):
            read(tmp_path / name, sites=[1])
