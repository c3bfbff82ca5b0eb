"""PEFT adapters: folders and live modules, proved, named, switched off and compared."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import hiddenscope as hs
from hiddenscope.errors import Damaged, LoadError, ModuleError, UnknownModel, Unsafe
from hiddenscope.loading import open_source
from hiddenscope.modules.adapters import adapters_on
from tests.folders import change, tiny_llama
from tests.unit.loading.adapters import KINDS, write_adapter

IDS = [[5, 6, 7, 8, 9], [10, 11, 12]]


def load(source: Any) -> hs.Model:
    """Load on the CPU, where PEFT's numbers come from, also where there is a GPU."""
    is_live = isinstance(getattr(source, "base", source), tuple)
    return hs.load(source, device=None if is_live else "cpu")


def states_of(model: hs.Model) -> Tensor:
    values: Tensor = model.capture(IDS).values  # type: ignore[union-attr, assignment]
    return values


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write an adapter of each kind once; no test may change it."""

    @cache
    def write(kind: str, seed: int = 1) -> Path:
        folder = tmp_path_factory.mktemp("adapters") / kind
        return write_adapter(folder, kind, tiny_llama(), seed)

    return write


@pytest.fixture(scope="module")
def lora(folder_of: Callable[..., Path]) -> Path:
    return folder_of("lora")


@pytest.fixture
def own_lora(lora: Path, tmp_path: Path) -> Path:
    """Copy the adapter, for the test to damage as it likes."""
    return Path(shutil.copytree(lora, tmp_path / "lora"))


@pytest.fixture(scope="module")
def base(saved_llama: Path) -> hs.Model:
    return load(saved_llama)


@pytest.fixture(scope="module")
def adapted(saved_llama: Path, lora: Path) -> hs.Model:
    return load(hs.Adapted(saved_llama, lora))


@pytest.fixture(scope="module")
def merged(saved_llama: Path, lora: Path) -> hs.Model:
    return load(hs.Adapted(saved_llama, lora, merged=True))


def as_peft_loads(folder: Path) -> Any:
    """Load with PEFT itself: the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(tiny_llama(), str(folder)).eval()


def live_lora(alpha: int = 8, name: str = "default", **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"init_lora_weights": False, **options}
    config = peft.LoraConfig(
        r=2, lora_alpha=alpha, target_modules=["q_proj"], **options
    )
    return peft.get_peft_model(tiny_llama(), config, adapter_name=name).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_peft_and_the_model_below_is_the_base(
    kind: str, folder_of: Callable[..., Path], saved_llama: Path, base: hs.Model
) -> None:
    model = load(hs.Adapted(saved_llama, folder_of(kind)))
    oracle = as_peft_loads(folder_of(kind))
    for ids in IDS:
        with torch.no_grad():
            output = oracle(input_ids=torch.tensor([ids]), output_hidden_states=True)
        states = model.capture([ids])
        for layer, expected in enumerate(output.hidden_states[:-1]):
            assert torch.equal(states[f"layer.{layer}"], expected[0])
    before = states_of(model).clone()
    # The planted adapter changes something, so that a silent fallback would show.
    assert not torch.equal(states_of(base), before)
    below = model.without_adapters()
    assert torch.equal(states_of(below), states_of(base))
    assert torch.equal(states_of(model), before)
    assert below.source().weights == base.source().weights
    assert model.source().base_weights == base.source().weights
    assert below.source().adapters == ()
    assert model.source().adapters[0].strength == 1.0
    # No second copy of the base, and no part that could be switched off for others.
    addresses = {weight.data_ptr() for weight in model.module.parameters()}
    assert all(weight.data_ptr() in addresses for weight in below.module.parameters())
    parts = {id(part) for part in model.module.modules()}
    assert not parts & {id(part) for part in below.module.modules()}


def test_the_source_names_base_and_adapter(
    adapted: hs.Model, lora: Path, saved_llama: Path
) -> None:
    source = adapted.source()
    (adapter,) = source.adapters
    assert source.model == f"{saved_llama.name} + lora"
    assert (adapter.name, adapter.kind, adapter.strength) == ("lora", "LORA", 1.0)
    assert adapter.weights.startswith("sha256:")
    assert hs.Source.from_json(json.loads(json.dumps(source.to_json()))) == source
    live = load((as_peft_loads(lora), None)).source()
    # The same adapter under another name has the same hash.
    assert live.adapters[0].name == "default"
    assert live.adapters[0].weights == adapter.weights
    assert live.base_weights == source.base_weights
    alphas = {"default": 8, "q_proj": 8, "other": 64}
    hashes = {}
    for name, alpha in alphas.items():
        (named,) = load((live_lora(alpha, name), None)).source().adapters
        hashes[name] = named.weights
    assert hashes["default"] == hashes["q_proj"] != hashes["other"]


@pytest.mark.parametrize("name", ["type", "run_lm_head"])
def test_a_folder_may_have_any_name(
    name: str, folder_of: Callable[..., Path], tmp_path: Path, saved_llama: Path
) -> None:
    """Also that of a method of modules, or one that holds the path of a part."""
    folder = shutil.copytree(folder_of("saved_head"), tmp_path / name)
    model = load(hs.Adapted(saved_llama, folder))
    other = load(hs.Adapted(saved_llama, folder_of("saved_head")))
    assert model.source().adapters[0].name == name
    assert model.source().weights == other.source().weights


def test_a_folder_names_its_base(
    own_lora: Path, saved_llama: Path, adapted: hs.Model
) -> None:
    with pytest.raises(LoadError, match="names no base model"):
        load(own_lora)
    change(own_lora / "adapter_config.json", base_model_name_or_path=str(saved_llama))
    assert torch.equal(states_of(load(own_lora)), states_of(adapted))


UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:k_proj|q_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|down_proj)))"
)


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": UNSLOTH},
        {"target_modules": ".*" * 14 + "z"},
        {"target_modules": ["q_proj", "down_proj"], "exclude_modules": ".?" * 45 + "!"},
        {"target_modules": ["q_proj", *(f"x.{i}.down_proj" for i in range(30_000))]},
    ],
)
def test_layers_named_by_a_pattern_are_those_of_the_file(
    changes: dict[str, Any], own_lora: Path, saved_llama: Path, adapted: hs.Model
) -> None:
    change(own_lora / "adapter_config.json", **changes)
    model = load(hs.Adapted(saved_llama, own_lora))
    assert torch.equal(states_of(model), states_of(adapted))


def test_strength_scales_what_lora_adds(
    folder_of: Callable[..., Path], saved_llama: Path, base: hs.Model
) -> None:
    lora = folder_of("lora")
    off = load(hs.Adapted(saved_llama, lora, strength=0.0))
    assert torch.equal(states_of(off), states_of(base))
    half = load(hs.Adapted(saved_llama, lora, strength=0.5))
    assert half.source().adapters[0].strength == 0.5
    layer: Any = half.module.get_submodule("base_model.model.model.layers.0.self_attn")
    x = torch.randn(2, 16)
    added = layer.q_proj.lora_B["default_0"](layer.q_proj.lora_A["default_0"](x))
    whole = layer.q_proj.lora_alpha["default_0"] / layer.q_proj.r["default_0"]
    expected = layer.q_proj.base_layer(x) + 0.5 * whole * added
    torch.testing.assert_close(layer.q_proj(x), expected)
    for kind in ("dora", "ia3", "saved_head"):
        with pytest.raises(LoadError, match="half of it is not defined"):
            load(hs.Adapted(saved_llama, folder_of(kind), strength=0.5))


@pytest.mark.parametrize("kind", ["rslora", "embedding", "parameter"])
def test_strength_scales_every_kind_of_tensor(
    kind: str, folder_of: Callable[..., Path], saved_llama: Path, base: hs.Model
) -> None:
    folder = folder_of(kind)

    def weights(strength: float) -> dict[str, Tensor]:
        source = hs.Adapted(saved_llama, folder, strength=strength, merged=True)
        return open_source(source, device="cpu").module.state_dict()

    off, half, whole = weights(0.0), weights(0.5), weights(1.0)
    changed = 0
    for name, weight in base.module.state_dict().items():
        torch.testing.assert_close(off[name], weight)
        torch.testing.assert_close(half[name], (off[name] + whole[name]) / 2)
        changed += not torch.equal(whole[name], weight)
    assert changed
    live = load(hs.Adapted(saved_llama, folder, strength=0.5))
    (adapter,) = adapters_on(live.module)
    assert set(adapter.strengths) == {0.5}
    assert live.source().adapters[0].strength == 0.5
    plain = tiny_llama()
    plain.load_state_dict(half)
    torch.testing.assert_close(states_of(live), states_of(load((plain.eval(), None))))


def test_strength_of_a_change_of_the_base_is_refused(
    tmp_path: Path, saved_llama: Path, own_lora: Path
) -> None:
    other = tiny_llama()
    other.model.embed_tokens.weight.data.add_(1)
    brings = write_adapter(tmp_path / "embedding", "embedding", other)
    change(own_lora / "adapter_config.json", init_lora_weights="pissa")
    for folder, reason in ((brings, "embed_tokens"), (own_lora, "pissa")):
        with pytest.raises(LoadError, match=reason) as failure:
            load(hs.Adapted(saved_llama, folder, strength=0.5))
        assert "at strength 0.5" in str(failure.value)


def test_several_adapters_add_up(
    folder_of: Callable[..., Path], tmp_path: Path, saved_llama: Path, adapted: hs.Model
) -> None:
    first = shutil.copytree(folder_of("lora", 0), tmp_path / "first")
    second = shutil.copytree(folder_of("lora", 1), tmp_path / "second")
    model = load(hs.Adapted(saved_llama, [first, second]))
    assert [adapter.name for adapter in model.source().adapters] == ["first", "second"]
    part: Any = model.module.get_submodule("base_model.model.model.layers.0.self_attn")
    x = torch.randn(2, 16)
    expected = part.q_proj.base_layer(x)
    for name in ("default_0", "default_1"):
        expected += part.q_proj.lora_B[name](part.q_proj.lora_A[name](x)) * 8 / 3
    torch.testing.assert_close(part.q_proj(x), expected)
    nested = load(hs.Adapted(hs.Adapted(saved_llama, first), second))
    assert torch.equal(states_of(nested), states_of(model))
    weaker = hs.Adapted(hs.Adapted(saved_llama, first), second, strength=0.5)
    with pytest.raises(LoadError, match="adapters of two strengths"):
        load(weaker)
    with pytest.raises(LoadError, match="adapters already"):
        load(hs.Adapted((live_lora(), None), first))
    two_kinds = load(hs.Adapted(saved_llama, [folder_of("lora"), folder_of("loha")]))
    kinds = [adapter.kind for adapter in two_kinds.source().adapters]
    assert kinds == ["LORA", "LOHA"]
    assert not torch.equal(states_of(two_kinds), states_of(adapted))


ANALYSES: dict[str, Callable[[hs.Model], hs.Result]] = {
    "lens": lambda model: hs.lens(model, IDS),
    "contributions": lambda model: hs.contributions(model, IDS[:1], 11, 12),
    "patch": lambda model: hs.patch(model, hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12)),
}


def test_merging_is_rounding(adapted: hs.Model, merged: hs.Model) -> None:
    assert "merged into its weights" in " ".join(merged.notes)
    facts = hs.drift(adapted, merged, IDS).facts
    assert not facts["drifted"]
    assert facts["as_given"]["error"] > 0
    for ask in ANALYSES.values():
        found, expected = ask(adapted).data, ask(merged).data
        for name, values in found.data_vars.items():
            if values.dtype.kind == "f":
                np.testing.assert_allclose(values, expected[name], rtol=1e-3, atol=1e-4)


def test_drift_and_compare_see_the_adapter(adapted: hs.Model, base: hs.Model) -> None:
    off = adapted.without_adapters()
    facts = hs.drift(off, adapted, IDS).facts
    assert facts["drifted"]
    assert facts["first_site"] == "layer.1"
    assert not hs.drift(off, base, IDS).facts["drifted"]
    difference = states_of(adapted) - states_of(off)
    # Of the first text at layer.2.
    expected = difference[2, : len(IDS[0])].norm(dim=-1)
    measured = hs.compare(adapted, IDS[0], other=off).data["l2"].sel(site="layer.2")
    np.testing.assert_allclose(measured.to_numpy(), expected.numpy(), rtol=1e-5)


def test_a_live_base_is_not_touched(lora: Path) -> None:
    module = tiny_llama()
    names = [name for name, _ in module.named_modules()]
    flags = [weight.requires_grad for weight in module.parameters()]
    model = load(hs.Adapted((module, None), lora))
    assert len(model.source().adapters) == 1
    assert [name for name, _ in module.named_modules()] == names
    assert [weight.requires_grad for weight in module.parameters()] == flags
    with torch.no_grad():
        plain = tiny_llama()(input_ids=torch.tensor(IDS[:1])).logits
        assert torch.equal(module(input_ids=torch.tensor(IDS[:1])).logits, plain)
    with pytest.raises(LoadError, match="merging would change its weights"):
        load(hs.Adapted((module, None), lora, merged=True))


def test_a_frozen_live_module_stays_frozen(own_lora: Path) -> None:
    module = tiny_llama(attention_bias=True).requires_grad_(False)
    change(own_lora / "adapter_config.json", bias="all", inference_mode=False)
    with pytest.raises(LoadError):
        load(hs.Adapted((module, None), own_lora))
    assert not any(weight.requires_grad for weight in module.parameters())


def test_what_transformers_loaded_itself_is_seen(lora: Path, base: hs.Model) -> None:
    module = tiny_llama()
    module.load_adapter(str(lora), adapter_name="mine")
    model = load((module.eval(), None))
    assert [adapter.name for adapter in model.source().adapters] == ["mine"]
    assert torch.equal(states_of(model.without_adapters()), states_of(base))


def test_strengths_are_reported_as_they_are() -> None:
    module = live_lora()
    model = load((module, None))
    whole = model.source().adapters[0]
    with module.disable_adapter():
        assert [adapter.strength for adapter in adapters_on(module)] == [0.0]
        assert model.source().adapters[0].strength == 0.0
    assert model.source().adapters[0] == whole
    layers = module.base_model.model.model.layers
    layers[-1].self_attn.q_proj.scale_layer(0.0)
    partly = model.source().adapters[0]
    assert partly.strength == 1.0
    assert partly.weights != whole.weights
    assert load((live_lora(0), None)).source().adapters[0].strength == 1.0


def test_what_is_no_longer_the_base_below_cannot_be_switched_off(
    merged: hs.Model,
) -> None:
    with pytest.raises(ModuleError, match="none that could be switched off"):
        merged.without_adapters()
    module = live_lora()
    module.merge_adapter()
    model = load((module, None))
    source = model.source()
    assert source.adapters[0].merged
    assert source.base_weights == ""
    with pytest.raises(ModuleError, match="merged into the weights"):
        model.without_adapters()
    # Biases that were trained in place.
    model = load((live_lora(bias="all"), None))
    with pytest.raises(ModuleError, match="also changed the base: bias='all'"):
        model.without_adapters()


def test_an_adapter_that_brings_other_embeddings_is_named(
    tmp_path: Path, saved_llama: Path
) -> None:
    other = tiny_llama()
    other.model.embed_tokens.weight.data.add_(1)
    folder = write_adapter(tmp_path / "embedding", "embedding", other)
    model = load(hs.Adapted(saved_llama, folder))
    assert "other weights of its base" in " ".join(model.notes)
    with pytest.raises(ModuleError, match="brought other weights"):
        model.without_adapters()
    # A live module is not written to.
    module = tiny_llama()
    before = module.model.embed_tokens.weight.clone()
    with pytest.raises(LoadError, match="weights of the base itself"):
        load(hs.Adapted((module, None), folder))
    assert torch.equal(module.model.embed_tokens.weight, before)


class TestBadInput:
    def test_an_adapter_of_another_base(self, lora: Path, tmp_path: Path) -> None:
        wide = tmp_path / "wide"
        tiny_llama(hidden_size=32).save_pretrained(wide)
        with pytest.raises(Damaged, match="size mismatch for .*lora_A"):
            load(hs.Adapted(wide, lora))
        for changes, reason in (
            ({"hidden_size": 32}, "Cannot put the adapter lora on"),
            ({"num_hidden_layers": 1}, "no place for 4 of its weights"),
            ({"num_hidden_layers": 3}, "no weights for 4 parts"),
        ):
            with pytest.raises(Damaged, match=reason):
                load(hs.Adapted((tiny_llama(**changes), None), lora))

    def test_weights_that_are_pickled_cut_short_or_not_there(
        self, own_lora: Path, saved_llama: Path
    ) -> None:
        weights = own_lora / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-20])
        with pytest.raises(Damaged, match=r"Cannot read adapter_model\.safetensors"):
            load(hs.Adapted(saved_llama, own_lora))
        weights.rename(own_lora / "adapter_model.bin")
        with pytest.raises(Unsafe, match="unpickling can run code"):
            load(hs.Adapted(saved_llama, own_lora))
        with pytest.raises(UnknownModel, match="does not exist"):
            load(hs.Adapted(saved_llama, "./nowhere"))
        with pytest.raises(UnknownModel, match=r"no adapter_config\.json"):
            load(hs.Adapted(saved_llama, saved_llama))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"peft_type": "PREFIX_TUNING"}, "not known to change layers alone"),
            ({"peft_type": None}, "no peft_type"),
            ({"r": 10**9}, "r=1,000,000,000"),
            ({"rank_pattern": {"q_proj": 10**9}}, "q_proj=1,000,000,000"),
            ({"r": 10**6}, "r=1,000,000"),
            ({"rank_pattern": {".*" * 14 + "z": 2}}, "may take forever"),
            ({"alpha_pattern": {".?" * 45 + "!": 2}}, "may take forever"),
            ({"modules_to_save": ["(([a-z_.0-9]+)+)+#"]}, "may take forever"),
            (
                {"layers_pattern": r"(.*)(.*)\1\2#", "layers_to_transform": [0]},
                "take for",
            ),
            ({"rank_pattern": {f"x{i}": 2 for i in range(3000)}}, "than 2,000 names"),
            ({"init_lora_weights": "pissa_niter_100000000"}, "100000000 iterations"),
            ({"loftq_config": {"loftq_iter": 10**9}}, "1000000000 iterations"),
            ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
            ({"task_type": "NONSENSE"}, "PEFT stopped with"),
            ({"megatron_config": {"a": 1}}, "Megatron to import"),
            ({"layer_replication": [[0, 2], [0, 2]]}, "repeats blocks"),
        ],
    )
    def test_a_configuration(
        self, changes: dict[str, Any], message: str, own_lora: Path, saved_llama: Path
    ) -> None:
        change(own_lora / "adapter_config.json", **changes)
        with pytest.raises(LoadError, match=message):
            load(hs.Adapted(saved_llama, own_lora))

    def test_an_adapter_as_base_of_an_adapter(
        self, own_lora: Path, lora: Path, tmp_path: Path
    ) -> None:
        second = Path(shutil.copytree(lora, tmp_path / "second"))
        for base in (own_lora, second):
            change(own_lora / "adapter_config.json", base_model_name_or_path=str(base))
            change(second / "adapter_config.json", base_model_name_or_path="lora")
            with pytest.raises(LoadError, match="is an adapter too"):
                load(own_lora)
        change(own_lora / "adapter_config.json", base_model_name_or_path="a" * 5_000)
        with pytest.raises(UnknownModel, match="not a hub id"):
            load(own_lora)

    def test_a_file_of_very_many_tensors(
        self, own_lora: Path, saved_llama: Path
    ) -> None:
        weights = own_lora / "adapter_model.safetensors"
        tensors = load_file(weights)
        for number in range(2_000):
            tensors[f"base_model.model.x{number}.lora_A.weight"] = torch.zeros(1)
        save_file(tensors, weights)
        with pytest.raises(Damaged, match="2,008 tensors for"):
            load(hs.Adapted(saved_llama, own_lora))

    def test_an_empty_tensor_allows_no_larger_rank(
        self, own_lora: Path, saved_llama: Path
    ) -> None:
        weights = own_lora / "adapter_model.safetensors"
        header, rest = weights.read_bytes()[8:].split(b"}}", 1)
        header += b'},"x":{"dtype":"F32","shape":[0,1000000],"data_offsets":[0,0]}}'
        weights.write_bytes(len(header).to_bytes(8, "little") + header + rest.lstrip())
        for key in ("r", "num_labels"):
            change(own_lora / "adapter_config.json", **{key: 10**8})
            with pytest.raises(LoadError, match=f"{key}=100,000,000"):
                load(hs.Adapted(saved_llama, own_lora))
            change(own_lora / "adapter_config.json", **{key: 3})

    def test_values(self) -> None:
        with pytest.raises(LoadError, match="list of adapters is empty"):
            hs.Adapted("smollm2", [])
        with pytest.raises(LoadError, match="not a finite number"):
            hs.Adapted("smollm2", "lora", strength=float("nan"))
        with pytest.raises(LoadError, match="No scheme 'int3'"):
            hs.Quantised("smollm2", "int3")
