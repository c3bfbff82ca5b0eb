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


@pytest.fixture(scope="module")
def module() -> nn.Module:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def model(module: nn.Module) -> hs.Model:
    return hs.load((module, None))


def outputs(module: Any, ids: Any, mask: Any = None) -> dict[str, Tensor]:
    """What blocks and the final norm return, by a hook of this test's own."""
    seen: dict[str, Tensor] = {}
    handles = []

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            seen[f"{name}.output"] = output[0] if isinstance(output, tuple) else output

        return hook

    for number, block in enumerate(module.model.layers):
        handles.append(block.register_forward_hook(keep(f"model.layers.{number}")))
        handles.append(block.mlp.register_forward_hook(keep(f"mlp.{number}")))
    handles.append(module.model.norm.register_forward_hook(keep("model.norm")))
    try:
        with torch.no_grad():
            module(torch.as_tensor(ids), attention_mask=mask)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def vllm_tensors(module: Any, ids: list[int], layers: list[int]) -> dict[str, Tensor]:
    """As vLLM's connector writes them: layer id k is the state after k blocks."""
    seen = outputs(module, [ids])
    stacked = [seen[f"model.layers.{layer - 1}.output"][0] for layer in layers]
    return {
        "hidden_states": torch.stack(stacked, 1).contiguous(),
        "token_ids": torch.tensor(ids),
    }


class TestVllm:
    def test_a_file_equals_a_capture(
        self, module: nn.Module, model: hs.Model, tmp_path: Path
    ) -> None:
        path = tmp_path / "request.safetensors"
        save_file(vllm_tensors(module, IDS, [1, 2]), path)
        states = hs.States.read(path, sites=[1, 2], source="toy in vLLM")
        captured = model.capture([IDS], "layer.1,layer.2")
        assert states.sites == captured.sites
        assert torch.equal(states.values, captured.values)
        assert states.tokens.ids.tolist() == IDS
        assert states.source.model == "toy in vLLM"
        assert states.source.dtype == "float32"

    def test_files_of_several_texts_are_joined(
        self, module: nn.Module, model: hs.Model, tmp_path: Path
    ) -> None:
        paths = []
        for number, ids in enumerate(TEXTS):
            paths.append(tmp_path / f"{number}.safetensors")
            save_file(vllm_tensors(module, ids, [1, 2]), paths[-1])
        states = hs.States.read(paths, sites="layer.1-2")
        assert states.tokens.lengths.tolist() == [3, 5]
        captured = model.capture(TEXTS, "layer.1,layer.2", batch_tokens=1)
        torch.testing.assert_close(states.values, captured.values)
        with pytest.raises(StatesError, match="2 files"):
            hs.States.read(paths, sites="layer.1-2", tokens=TEXTS)

    def test_a_compressed_file_is_the_same(
        self, module: nn.Module, tmp_path: Path
    ) -> None:
        tensors = vllm_tensors(module, IDS, [1, 2])
        path = tmp_path / "request.safetensors.zst"
        path.write_bytes(zstandard.ZstdCompressor().compress(save(tensors)))
        states = hs.States.read(path, sites=[1, 2])
        expected = tensors["hidden_states"].movedim(1, 0)
        assert torch.equal(states.values, expected)

    def test_which_layers_must_be_said(self, module: nn.Module, tmp_path: Path) -> None:
        path = tmp_path / "request.safetensors"
        save_file(vllm_tensors(module, IDS, [1, 2]), path)
        with pytest.raises(StatesError, match="holds 2 layers and does not say which"):
            hs.States.read(path)
        with pytest.raises(StatesError, match="3 sites are named"):
            hs.States.read(path, sites=[0, 1, 2])

    def test_a_residual_kept_apart_is_added_only_if_named(
        self, module: Any, model: hs.Model
    ) -> None:
        seen = outputs(module, [IDS])
        mlp = torch.stack([seen[f"mlp.{k}.output"][0] for k in range(2)], 1)
        whole = vllm_tensors(module, IDS, [1, 2])["hidden_states"]
        apart = {
            "hidden_states": mlp,
            "residual": whole - mlp,
            "token_ids": torch.tensor(IDS),
        }
        with pytest.raises(StatesError, match="keeps the residual apart"):
            hs.States.read(apart, sites=[1, 2])
        states = hs.States.read(apart, sites=[1, 2], residual="residual")
        captured = model.capture([IDS], "layer.1,layer.2")
        torch.testing.assert_close(states.values, captured.values)
        given = {name: apart[name] for name in ("hidden_states", "token_ids")}
        again = hs.States.read(given, sites=[1, 2], residual=apart["residual"])
        assert torch.equal(again.values, states.values)
        with pytest.raises(StatesError, match="no tensor 'rest'"):
            hs.States.read(apart, sites=[1, 2], residual="rest")
        with pytest.raises(StatesError, match="the residual is"):
            hs.States.read(given, sites=[1, 2], residual=torch.zeros(2, 2))


class TestArrays:
    def test_numpy_torch_and_files_agree(self, model: hs.Model, tmp_path: Path) -> None:
        captured = model.capture([IDS], "layer.*,final")
        array = captured.values.numpy()
        np.save(tmp_path / "a.npy", array)
        np.savez(tmp_path / "a.npz", hidden_states=array.swapaxes(0, 1), token_ids=IDS)
        kinds = [array, captured.values, list(captured.values), tmp_path / "a.npy"]
        for data in kinds:
            states = hs.States.read(data, tokens=IDS, sites=list(captured.sites))
            assert torch.equal(states.values, captured.values)
        states = hs.States.read(tmp_path / "a.npz", sites=captured.sites)
        assert torch.equal(states.values, captured.values)

    def test_padding_needs_its_mask(self, model: hs.Model) -> None:
        captured = model.capture(TEXTS, "layer.1,final")
        values, mask = captured.padded()
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([*TEXTS[0], *TEXTS[1]])
        with pytest.raises(StatesError, match="padded, and the texts have 3 to 5"):
            hs.States.read(values, tokens=TEXTS, sites=["layer.1", "final"])
        tokens = {"input_ids": ids, "attention_mask": mask.long()}
        states = hs.States.read(values, tokens=tokens, sites=["layer.1", "final"])
        assert torch.equal(states.values, captured.values)
        assert states.tokens.ids.tolist() == [*TEXTS[0], *TEXTS[1]]
        left = {"input_ids": ids.flip(1), "attention_mask": mask.long().flip(1)}
        flipped = hs.States.read(
            values.flip(2), tokens=left, sites=["layer.1", "final"]
        )
        assert flipped.tokens.lengths.tolist() == [3, 5]
        with pytest.raises(StatesError, match="attention mask is"):
            hs.States.read(
                values,
                tokens={"input_ids": ids, "attention_mask": mask[:, :2]},
                sites=["layer.1", "final"],
            )

    def test_a_mask_that_is_added_to_scores_is_refused(self) -> None:
        array = torch.ones(1, 2, 3, 4)
        ids = torch.arange(6).reshape(2, 3)
        mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
        added = (1 - mask) * -1e9
        tokens = {"input_ids": ids, "attention_mask": added}
        with pytest.raises(StatesError, match="added to attention scores"):
            hs.States.read(array, tokens=tokens, sites=[1])
        for good in (mask, mask.bool(), mask.float(), mask.tolist()):
            tokens = {"input_ids": ids, "attention_mask": good}
            states = hs.States.read(array, tokens=tokens, sites=[1])
            assert states.tokens.lengths.tolist() == [2, 3]

    def test_negative_ids_are_refused_unless_they_are_padding(self) -> None:
        array = torch.ones(1, 1, 3, 4)
        with pytest.raises(StatesError, match="-100 is not the id of a token"):
            hs.States.read(array, tokens=[[5, 6, -100]], sites=[1])
        tokens = {"input_ids": [[5, 6, -100]], "attention_mask": [[1, 1, 0]]}
        states = hs.States.read(array, tokens=tokens, sites=[1])
        assert states.tokens.ids.tolist() == [5, 6]

    def test_the_name_of_an_array_does_not_say_which_axis_is_which(self) -> None:
        array = torch.randn(3, 2, 4)
        ids = [5, 6, 7]
        for first in (array, array.movedim(1, 0)):
            named = {"hidden_states": first, "input_ids": torch.tensor(ids)}
            states = hs.States.read(named, sites=[1, 2])
            assert torch.equal(states.values, array.movedim(1, 0))
        square = torch.randn(3, 3, 4)
        named = {"hidden_states": square, "input_ids": torch.tensor(ids)}
        with pytest.raises(StatesError, match="tokens or layers come first"):
            hs.States.read(named, sites=[1, 2, 3])
        with pytest.raises(StatesError, match="tokens or layers come first"):
            hs.States.read({"hidden_states": square}, tokens=ids, sites=[1, 2, 3])
        vllm = {"hidden_states": square, "token_ids": torch.tensor(ids)}
        states = hs.States.read(vllm, sites=[1, 2, 3])
        assert torch.equal(states["layer.2"], square[:, 1])
        states = hs.States.read(square, tokens=ids, sites=[1, 2, 3])
        assert torch.equal(states["layer.2"], square[1])

    def test_layers_are_sorted_with_their_names(self) -> None:
        array = torch.arange(12.0).reshape(2, 3, 2)
        states = hs.States.read(array, tokens=[1, 2, 3], sites=["final", "layer.1"])
        assert torch.equal(states["final"], array[0])
        assert torch.equal(states["layer.1"], array[1])

    def test_inputs_of_a_model_are_tokens(self, model: hs.Model) -> None:
        inputs = model.encode(TEXTS)
        captured = model.capture(inputs, "layer.1")
        states = hs.States.read(captured.values, tokens=inputs, sites=[1])
        assert states.tokens.lengths.tolist() == [3, 5]
        again = hs.States.read(captured.values, tokens=captured.tokens, sites=[1])
        assert again.tokens is captured.tokens

    def test_our_own_file_is_loaded(self, model: hs.Model, tmp_path: Path) -> None:
        captured = model.capture([IDS], "layer.1")
        captured.save(tmp_path / "own.safetensors")
        states = hs.States.read(tmp_path / "own.safetensors")
        assert torch.equal(states.values, captured.values)
        assert states.source == captured.source


class TestNames:
    def test_nnsight_saves_equal_a_capture(
        self, module: nn.Module, model: hs.Model
    ) -> None:
        seen = outputs(module, TEXTS[:1])
        saved = {name: seen[name] for name in seen if not name.startswith("mlp")}
        states = hs.States.read(saved, tokens=TEXTS[:1])
        captured = model.capture(TEXTS[:1], list(states.sites))
        assert str(states.sites[-1]) == "final"
        assert torch.equal(states.values, captured.values)
        inputs = {"model.layers.0.input": captured["layer.1"]}
        assert hs.States.read(inputs, tokens=TEXTS[0]).sites == (hs.Site(0),)

    def test_a_tuple_is_what_a_block_returned(self) -> None:
        saved = {"transformer.h.3.output": (torch.ones(1, 3, 4), None)}
        assert hs.States.read(saved, tokens=[1, 2, 3])["layer.4"].shape == (3, 4)

    @pytest.mark.parametrize(
        "name",
        [
            "model.layers.3.output",
            "language_model.model.layers.3.output",
            "model.language_model.layers.3.output",
            "base_model.model.model.layers.3.output",
            "transformer.h.3.output",
            "gpt_neox.layers.3.output",
            "bert.encoder.layer.3.output",
            "h.3.output",
        ],
    )
    def test_blocks_of_a_language_model_are_layers(self, name: str) -> None:
        states = hs.States.read({name: torch.ones(3, 4)}, tokens=[1, 2, 3])
        assert states.sites == (hs.Site(4),)

    @pytest.mark.parametrize(
        "name",
        [
            "vision_tower.encoder.layers.1.output",
            "model.vision_tower.layers.1.output",
            "model.visual.blocks.1.output",
            "visual.norm.output",
            "audio_tower.layers.1.output",
            "model.encoder.layers.1.output",
            "mtp.layers.0.output",
            "model.layers.0.experts.layers.1.output",
        ],
    )
    def test_blocks_of_another_stack_must_be_named(self, name: str) -> None:
        saved = {name: torch.ones(3, 4)}
        with pytest.raises(SiteError, match="is the language model's"):
            hs.States.read(saved, tokens=[1, 2, 3])
        states = hs.States.read(saved, tokens=[1, 2, 3], sites={name: "layer.2"})
        assert states.sites == (hs.Site(2),)

    @pytest.mark.parametrize(
        "other",
        [
            "vision_tower.encoder.layers.1.output",
            "model.blocks.1.output",
            "text_model.layers.1.output",
            "text_model.norm.output",
        ],
    )
    def test_two_stacks_are_not_one(self, other: str) -> None:
        saved = {"model.layers.0.output": torch.ones(3, 4), other: torch.ones(3, 4)}
        with pytest.raises(SiteError, match="2 stacks of blocks"):
            hs.States.read(saved, tokens=[1, 2, 3])

    def test_what_a_module_inside_returns_must_be_named(
        self, module: nn.Module, model: hs.Model
    ) -> None:
        seen = outputs(module, [IDS])
        saved = {"model.layers.0.mlp.output": seen["mlp.0.output"]}
        with pytest.raises(SiteError, match="need not be what the block adds"):
            hs.States.read(saved, tokens=IDS)
        sites = {"model.layers.0.mlp.output": "layer.1.mlp"}
        states = hs.States.read(saved, tokens=IDS, sites=sites)
        assert torch.equal(
            states["layer.1.mlp"], model.capture([IDS], "layer.1.mlp")["layer.1.mlp"]
        )
        with pytest.raises(SiteError, match="no tensor 'x'"):
            hs.States.read(saved, tokens=IDS, sites={"x": "layer.1"})

    def test_unknown_names_are_listed(self) -> None:
        saved = {"foo": torch.ones(3, 4), "bar": torch.ones(3, 4)}
        with pytest.raises(SiteError, match="No site for 'foo', 'bar'"):
            hs.States.read(saved, tokens=[1, 2, 3])
        with pytest.raises(SiteError, match="embed_tokens"):
            hs.States.read(
                {"model.embed_tokens.output": torch.ones(3, 4)}, tokens=[1, 2, 3]
            )

    def test_transformer_lens_names(self, model: hs.Model) -> None:
        captured = model.capture([IDS], "layer.*")
        last = len(captured.sites) - 1
        cache = {"hook_embed": captured["layer.0"][None]}
        for block in range(last):
            cache[f"blocks.{block}.hook_resid_pre"] = captured[block][None]
            cache[f"blocks.{block}.hook_resid_post"] = captured[block + 1][None]
            cache[f"blocks.{block}.attn.hook_pattern"] = torch.ones(1, 2, 5, 5)
        cache["ln_final.hook_scale"] = torch.ones(1, 5, 1)
        states = hs.States.read(cache, tokens=IDS)
        assert states.sites == captured.sites
        assert torch.equal(states.values, captured.values)
        assert any("TransformerLens" in note for note in states.source.notes)
        assert any("left out" in note for note in states.source.notes)
        some = hs.States.read(cache, tokens=IDS, sites=["layer.1"])
        assert some.sites == (hs.Site(1),)
        with pytest.raises(SiteError, match=r"no layer\.9"):
            hs.States.read(cache, tokens=IDS, sites=["layer.9"])
        cache[f"blocks.{last - 1}.hook_resid_pre"] = captured["layer.0"][None] + 1
        with pytest.raises(StatesError, match="two of its tensors"):
            hs.States.read(cache, tokens=IDS)

    def test_a_final_norm_that_nobody_mentions_is_asked_for(self) -> None:
        cache = {"blocks.0.hook_resid_post": torch.ones(1, 3, 4)}
        with pytest.raises(StatesError, match="whether the model has a final norm"):
            hs.States.read(cache, tokens=[1, 2, 3])
        source = hs.Source("gpt2", depth=2, final=True)
        states = hs.States.read(cache, tokens=[1, 2, 3], source=source)
        assert states.sites == (hs.Site(1),)
        assert states.source.depth == 2

    def test_an_activation_cache_says_how_it_was_folded(self) -> None:
        values = torch.randn(1, 3, 8)
        centred = values - values.mean(-1, keepdim=True)
        config = SimpleNamespace(n_layers=1, normalization_type="LNPre")
        hooks = {
            "blocks.0.hook_resid_post": centred,
            "ln_final.hook_scale": torch.ones(1, 3, 1),
        }
        cache = SimpleNamespace(cache_dict=hooks, model=SimpleNamespace(cfg=config))
        notes = " ".join(hs.States.read(cache, tokens=[1, 2, 3]).source.notes)
        assert "folded the weights of norms" in notes
        assert "mean zero" in notes

    def test_a_block_that_norms_its_output_is_noticed(self) -> None:
        parts = torch.randn(2, 1, 3, 8)
        cache = {
            "blocks.0.hook_resid_mid": parts[0],
            "blocks.0.hook_mlp_out": parts[1],
            "blocks.0.hook_resid_post": parts.sum(0),
            "ln_final.hook_scale": torch.ones(1, 3, 1),
        }
        assert len(hs.States.read(cache, tokens=[1, 2, 3]).sites) == 3
        normed = torch.nn.functional.layer_norm(5 * parts.sum(0), (8,))
        cache["blocks.0.hook_resid_post"] = normed
        with pytest.raises(StatesError, match="norms its output"):
            hs.States.read(cache, tokens=[1, 2, 3])

    def test_hugging_face_entries_need_the_depth(self) -> None:
        entries = {f"hidden_states[{k}]": torch.ones(1, 3, 4) * k for k in range(3)}
        with pytest.raises(SiteError, match="number of blocks"):
            hs.States.read(entries, tokens=[1, 2, 3])
        source = hs.Source("gpt2", depth=2, final=True)
        states = hs.States.read(entries, tokens=[1, 2, 3], source=source)
        assert [str(site) for site in states.sites] == ["layer.0", "layer.1", "final"]


BAD = {
    "tokens": (dict(data=torch.ones(1, 3, 4), sites=[1]), "which tokens they are of"),
    "texts": (
        dict(data=torch.ones(1, 3, 4), sites=[1], tokens=["a text"]),
        "only a tokenizer",
    ),
    "rank": (dict(data=torch.ones(3, 4), sites=[1], tokens=[1, 2, 3]), r"is \[3, 4\]"),
    "axes": (
        dict(data=torch.ones(3, 1, 4), sites=[1], tokens=[1, 2, 3]),
        "another order",
    ),
    "count": (
        dict(data=torch.ones(1, 4, 4), sites=[1], tokens=[1, 2, 3]),
        "there are 3 tokens",
    ),
    "integers": (
        dict(data=torch.ones(1, 3, 4).int(), sites=[1], tokens=[1, 2, 3]),
        "int32",
    ),
    "twice": (
        dict(data=torch.ones(2, 3, 4), sites=[1, 1], tokens=[1, 2, 3]),
        "named twice",
    ),
    "nan": (
        dict(data=torch.full((1, 3, 4), torch.nan), sites=[1], tokens=[1, 2, 3]),
        "a NaN at layer.1",
    ),
    "ids": (
        dict(
            data={"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.arange(3)},
            sites=[1],
            tokens=[7, 8, 9],
        ),
        "other token ids",
    ),
    "depth": (
        dict(
            data=torch.ones(1, 3, 4),
            sites=[9],
            tokens=[1, 2, 3],
            source=hs.Source("toy", depth=2),
        ),
        "the model has 2 blocks",
    ),
    "pattern": (
        dict(data=torch.ones(1, 3, 4), sites="layer.-1", tokens=[1, 2, 3]),
        "number of blocks",
    ),
    "objects": (dict(data=object(), sites=[1], tokens=[1]), "not an array"),
    "ragged": (
        dict(data=[torch.ones(3, 4), torch.ones(2, 4)], sites=[1, 2], tokens=[1]),
        "differ in shape",
    ),
    "dtypes": (
        dict(
            data={"layer.1": torch.ones(1, 4), "layer.2": torch.ones(1, 4).double()},
            tokens=[1],
        ),
        "2 dtypes",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_states_are_one_sentence(case: str) -> None:
    arguments, message = BAD[case]
    with pytest.raises(Error, match=message) as raised:
        hs.States.read(**arguments)
    assert "\n" not in str(raised.value)
    if case == "nan":
        assert isinstance(raised.value, NotFinite)


def test_bad_files_are_one_sentence(tmp_path: Path) -> None:
    whole = save({"hidden_states": torch.ones(3, 1, 4), "token_ids": torch.arange(3)})
    for name in ("cut.safetensors", "cut.npy", "cut.npz", "cut.safetensors.zst"):
        path = tmp_path / name
        path.write_bytes(whole[:-20])
        with pytest.raises(FileError, match="damaged, cut short"):
            hs.States.read(path, sites=[1])
    with pytest.raises(FileError, match="no such file"):
        hs.States.read(tmp_path / "nowhere.safetensors", sites=[1])
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(FileError, match="its suffix is"):
        hs.States.read(tmp_path / "a.txt", sites=[1])
    torch.save({"layer.1": torch.ones(3, 4)}, tmp_path / "a.pt")
    with pytest.raises(Unsafe, match="pickle"):
        hs.States.read(tmp_path / "a.pt")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(FileError, match="damaged"):
        hs.States.read(tmp_path / "objects.npy", sites=[1])


def test_a_compressed_bomb_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bomb.safetensors.zst"
    path.write_bytes(zstandard.ZstdCompressor(level=19).compress(bytes(64 * 2**20)))
    with pytest.raises(FileError, match="more than 1000 times its size"):
        hs.States.read(path, sites=[1])
