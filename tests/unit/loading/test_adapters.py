"""PEFT adapters: folders and live modules, proved, named, switched off and compared."""

from __future__ import annotations

import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.errors import Damaged, LoadError, ModuleError, UnknownModel, Unsafe
from hiddenscope.modules.adapters import adapters_on
from tests.unit.loading.conftest import tiny_llama

IDS = [[5, 6, 7, 8, 9], [10, 11, 12]]
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"]),
    "rslora": lambda: peft.LoraConfig(
        r=4, lora_alpha=2, use_rslora=True, target_modules=["v_proj"]
    ),
    "dora": lambda: peft.LoraConfig(r=3, use_dora=True, target_modules=["q_proj"]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]
    ),
    "loha": lambda: peft.LoHaConfig(r=2, target_modules=["o_proj"]),
    "embedding": lambda: peft.LoraConfig(r=2, target_modules=["embed_tokens"]),
    "saved_head": lambda: peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
    ),
}


def write_adapter(folder: Path, kind: str, base: nn.Module, seed: int = 1) -> Path:
    """Save an adapter that changes every layer that it is on."""
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(base, KINDS[kind]())
    for name, weight in adapted.named_parameters():
        if weight.requires_grad:
            noise = 0.3 * torch.randn_like(weight)
            weight.data.add_(noise if "head" not in name else 0.1 * noise)
    with warnings.catch_warnings():
        # PEFT says that it saves the embeddings as well.
        warnings.simplefilter("ignore")
        adapted.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load on the CPU, where PEFT's numbers come from, also where there is a GPU."""
    load = hs.load

    def on_cpu(source: Any) -> hs.Model:
        is_live = isinstance(getattr(source, "base", source), tuple)
        return load(source, device=None if is_live else "cpu")

    monkeypatch.setattr(hs, "load", on_cpu)


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "lora", "lora", tiny_llama())


def as_peft_loads(folder: Path) -> Any:
    """Load with PEFT itself: the oracle."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(tiny_llama(), str(folder)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_those_of_peft(kind: str, tmp_path: Path, saved_llama: Path) -> None:
    folder = write_adapter(tmp_path / kind, kind, tiny_llama())
    model = hs.load(hs.Adapted(saved_llama, folder))
    oracle = as_peft_loads(folder)
    for ids in IDS:
        with torch.no_grad():
            output = oracle(input_ids=torch.tensor([ids]), output_hidden_states=True)
        states = model.capture([ids])
        for layer, expected in enumerate(output.hidden_states[:-1]):
            torch.testing.assert_close(
                states[f"layer.{layer}"], expected[0], rtol=0, atol=0
            )
    base = hs.load(saved_llama)
    # The planted adapter changes something, so that a silent fallback would show.
    assert not torch.equal(base.capture(IDS).values, model.capture(IDS).values)


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_below_is_the_base(
    kind: str, tmp_path: Path, saved_llama: Path
) -> None:
    folder = write_adapter(tmp_path / kind, kind, tiny_llama())
    model = hs.load(hs.Adapted(saved_llama, folder))
    base = hs.load(saved_llama)
    before = model.capture(IDS).values.clone()
    below = model.without_adapters()
    assert torch.equal(below.capture(IDS).values, base.capture(IDS).values)
    assert torch.equal(model.capture(IDS).values, before)
    assert below.source().weights == base.source().weights
    assert model.source().base_weights == base.source().weights
    assert below.source().adapters == ()
    # No second copy of the base.
    addresses = {weight.data_ptr() for weight in model.module.parameters()}
    assert all(weight.data_ptr() in addresses for weight in below.module.parameters())


def test_the_source_names_base_and_adapter(lora: Path, saved_llama: Path) -> None:
    source = hs.load(hs.Adapted(saved_llama, lora)).source()
    (adapter,) = source.adapters
    assert source.model == f"{saved_llama.name} + lora"
    assert (adapter.name, adapter.kind, adapter.strength) == ("lora", "LORA", 1.0)
    assert adapter.weights.startswith("sha256:")
    assert hs.Source.from_json(json.loads(json.dumps(source.to_json()))) == source
    live = hs.load((as_peft_loads(lora), None)).source()
    # The same adapter under another name has the same hash.
    assert live.adapters[0].name == "default"
    assert live.adapters[0].weights == adapter.weights
    assert live.base_weights == source.base_weights


def test_a_folder_names_its_base(tmp_path: Path, saved_llama: Path) -> None:
    module = tiny_llama()
    module.name_or_path = str(saved_llama)
    folder = write_adapter(tmp_path / "lora", "lora", module)
    by_folder = hs.load(folder)
    by_value = hs.load(hs.Adapted(saved_llama, folder))
    assert torch.equal(by_folder.capture(IDS).values, by_value.capture(IDS).values)


def test_strength_scales_what_lora_adds(lora: Path, saved_llama: Path) -> None:
    base = hs.load(saved_llama)
    off = hs.load(hs.Adapted(saved_llama, lora, strength=0.0))
    assert torch.equal(off.capture(IDS).values, base.capture(IDS).values)
    half = hs.load(hs.Adapted(saved_llama, lora, strength=0.5))
    assert half.source().adapters[0].strength == 0.5
    layer = half.module.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 16)
    added = layer.lora_B["default_0"](layer.lora_A["default_0"](x))
    whole = layer.lora_alpha["default_0"] / layer.r["default_0"]
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 0.5 * whole * added)


def test_several_adapters_add_up(tmp_path: Path, saved_llama: Path) -> None:
    folders = [
        write_adapter(tmp_path / name, "lora", tiny_llama(), seed)
        for seed, name in enumerate(("first", "second"))
    ]
    model = hs.load(hs.Adapted(saved_llama, folders))
    assert [adapter.name for adapter in model.source().adapters] == ["first", "second"]
    layer = model.module.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 16)
    expected = layer.base_layer(x)
    for name in ("default_0", "default_1"):
        expected = expected + layer.lora_B[name](layer.lora_A[name](x)) * 8 / 3
    torch.testing.assert_close(layer(x), expected)


def test_adapters_of_two_kinds_work_together(tmp_path: Path, saved_llama: Path) -> None:
    lora = write_adapter(tmp_path / "lora", "lora", tiny_llama())
    loha = write_adapter(tmp_path / "loha", "loha", tiny_llama())
    model = hs.load(hs.Adapted(saved_llama, [lora, loha]))
    kinds = {adapter.kind for adapter in model.source().adapters}
    assert kinds == {"LORA", "LOHA"}
    one = hs.load(hs.Adapted(saved_llama, lora))
    assert not torch.equal(model.capture(IDS).values, one.capture(IDS).values)


def test_merging_is_rounding(lora: Path, saved_llama: Path) -> None:
    unmerged = hs.load(hs.Adapted(saved_llama, lora))
    merged = hs.load(hs.Adapted(saved_llama, lora, merged=True))
    assert "merged into its weights" in " ".join(merged.notes)
    facts = hs.drift(unmerged, merged, IDS).facts
    assert not facts["drifted"]
    assert facts["as_given"]["error"] > 0


def test_drift_and_compare_see_the_adapter(lora: Path, saved_llama: Path) -> None:
    model = hs.load(hs.Adapted(saved_llama, lora))
    off = model.without_adapters()
    facts = hs.drift(off, model, IDS).facts
    assert facts["drifted"]
    assert facts["first_site"] == "layer.1"
    assert not hs.drift(off, hs.load(saved_llama), IDS).facts["drifted"]
    difference = hs.compare(model, IDS[0], other=off)
    on, without = model.capture([IDS[0]]), off.capture([IDS[0]])
    expected = (on["layer.2"] - without["layer.2"]).norm(dim=-1)
    measured = difference.data["l2"].sel(site="layer.2").to_numpy()
    np.testing.assert_allclose(measured, expected.numpy(), rtol=1e-5)


def test_other_threads_never_see_the_adapter_off(lora: Path) -> None:
    module = as_peft_loads(lora)
    model = hs.load((module, None))
    ids = torch.tensor(IDS[:1])
    with torch.no_grad():
        expected = module(input_ids=ids).logits
    wrong: list[Tensor] = []
    done = threading.Event()

    def call() -> None:
        while not done.is_set():
            with torch.no_grad():
                logits = module(input_ids=ids).logits
            if not torch.equal(logits, expected):
                wrong.append(logits)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(5):
            off = model.without_adapters()
            hs.compare(model, IDS[0], other=off)
            hs.drift(off, model, IDS)
    finally:
        done.set()
        thread.join()
    assert not wrong


def test_a_live_base_is_not_touched(lora: Path) -> None:
    module = tiny_llama()
    names = [name for name, _ in module.named_modules()]
    flags = [weight.requires_grad for weight in module.parameters()]
    model = hs.load(hs.Adapted((module, None), lora))
    assert len(model.source().adapters) == 1
    assert [name for name, _ in module.named_modules()] == names
    assert [weight.requires_grad for weight in module.parameters()] == flags
    with torch.no_grad():
        plain = tiny_llama()(input_ids=torch.tensor(IDS[:1])).logits
        assert torch.equal(module(input_ids=torch.tensor(IDS[:1])).logits, plain)


def test_what_transformers_loaded_itself_is_seen(lora: Path) -> None:
    module = tiny_llama()
    module.load_adapter(str(lora), adapter_name="mine")
    module.eval()
    model = hs.load((module, None))
    assert [adapter.name for adapter in model.source().adapters] == ["mine"]
    base = hs.load((tiny_llama(), None))
    below = model.without_adapters()
    assert torch.equal(below.capture(IDS).values, base.capture(IDS).values)


def test_a_switch_in_place_shows_in_the_source(lora: Path) -> None:
    module = as_peft_loads(lora)
    model = hs.load((module, None))
    with module.disable_adapter():
        assert [adapter.strength for adapter in adapters_on(module)] == [0.0]
        assert model.source().adapters[0].strength == 0.0
    assert model.source().adapters[0].strength == 1.0


def test_a_model_with_adapters_is_extracted_by_workers(
    lora: Path, saved_llama: Path, tmp_path: Path
) -> None:
    model = hs.load(hs.Adapted(saved_llama, lora, strength=0.5))
    texts = ["the capital of France"] * 3
    store = hs.extract(model, texts, tmp_path / "s", engine=hs.Engine(workers=2))
    expected = model.capture(["the capital of France"])
    rows = store[store.sites[-1]][: len(expected.tokens)]
    np.testing.assert_array_equal(np.asarray(rows), expected[store.sites[-1]].numpy())
    assert store.source.adapters[0].strength == 0.5


def test_merged_adapters_cannot_be_switched_off(lora: Path, saved_llama: Path) -> None:
    merged = hs.load(hs.Adapted(saved_llama, lora, merged=True))
    with pytest.raises(ModuleError, match="none that could be switched off"):
        merged.without_adapters()
    module = as_peft_loads(lora)
    module.merge_adapter()
    with pytest.raises(ModuleError, match="merged into the weights"):
        hs.load((module, None)).without_adapters()


def test_biases_that_were_trained_in_place_are_named(tmp_path: Path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], bias="all")
    model = hs.load((peft.get_peft_model(tiny_llama(), config).eval(), None))
    with pytest.raises(ModuleError, match="also changed the base: bias='all'"):
        model.without_adapters()


def test_an_adapter_that_brings_other_embeddings_is_named(
    tmp_path: Path, saved_llama: Path
) -> None:
    base = tiny_llama()
    base.model.embed_tokens.weight.data.add_(1)
    folder = write_adapter(tmp_path / "embedding", "embedding", base)
    model = hs.load(hs.Adapted(saved_llama, folder))
    assert "other weights of its base" in " ".join(model.notes)
    with pytest.raises(ModuleError, match="brought other weights"):
        model.without_adapters()
    with pytest.raises(LoadError, match="weights of the base itself"):
        hs.load(hs.Adapted((tiny_llama(), None), folder))


ANALYSES: dict[str, Callable[[hs.Model], hs.Result]] = {
    "profile": lambda model: hs.profile(model, IDS),
    "lens": lambda model: hs.lens(model, IDS),
    "attention": lambda model: hs.attention(model, IDS[:1]),
    "contributions": lambda model: hs.contributions(model, IDS[:1], 11, 12),
    "visibility": lambda model: hs.visibility(model, IDS[:1]),
    "patch": lambda model: hs.patch(
        model, hs.Contrast([5, 6, 7, 8], [5, 6, 9, 8], 11, 12)
    ),
}


@pytest.mark.parametrize("word", ANALYSES)
def test_analyses_of_an_adapted_model_are_those_of_the_merged_one(
    word: str, lora: Path, saved_llama: Path
) -> None:
    unmerged = ANALYSES[word](hs.load(hs.Adapted(saved_llama, lora)))
    merged = ANALYSES[word](hs.load(hs.Adapted(saved_llama, lora, merged=True)))
    for name, variable in unmerged.data.data_vars.items():
        if variable.dtype.kind == "f":
            expected = merged.data[name].to_numpy()
            np.testing.assert_allclose(variable, expected, rtol=1e-3, atol=1e-4)


def test_a_tied_head_of_a_live_module_is_not_written_to(tmp_path: Path) -> None:
    tied = tiny_llama(tie_word_embeddings=True)
    config = peft.LoraConfig(r=2, target_modules=["lm_head"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(tied, config)
        tied.model.embed_tokens.weight.data.add_(1)
        adapted.save_pretrained(tmp_path / "head", save_embedding_layers=True)
    module = tiny_llama(tie_word_embeddings=True)
    before = module.model.embed_tokens.weight.clone()
    with pytest.raises(LoadError, match="weights of the base itself"):
        hs.load(hs.Adapted((module, None), tmp_path / "head"))
    assert torch.equal(module.model.embed_tokens.weight, before)


def test_a_frozen_live_module_stays_frozen(tmp_path: Path) -> None:
    module = tiny_llama(attention_bias=True).requires_grad_(False)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    base = tiny_llama(attention_bias=True)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    changes = {"bias": "all", "inference_mode": False}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    with pytest.raises(LoadError):
        hs.load(hs.Adapted((module, None), tmp_path / "a"))
    assert not any(weight.requires_grad for weight in module.parameters())


def live_lora(alpha: int, name: str = "default") -> Any:
    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=2, lora_alpha=alpha, target_modules=["q_proj"], init_lora_weights=False
    )
    return peft.get_peft_model(tiny_llama(), config, adapter_name=name).eval()


def test_one_adapter_has_one_hash_and_two_have_two() -> None:
    by_name = {}
    for name in ("default", "0", "model", "q_proj", "lora_A", "weight"):
        (adapter,) = hs.load((live_lora(8, name), None)).source().adapters
        by_name[name] = adapter.weights
    assert len(set(by_name.values())) == 1
    (other,) = hs.load((live_lora(64), None)).source().adapters
    assert other.weights != by_name["default"]


def test_strengths_are_reported_as_they_are() -> None:
    module = live_lora(8)
    model = hs.load((module, None))
    whole = model.source().adapters[0]
    layers = module.base_model.model.model.layers
    layers[-1].self_attn.q_proj.scale_layer(0.0)
    partly = model.source().adapters[0]
    assert partly.strength == 1.0
    assert partly.weights != whole.weights
    merged = live_lora(8)
    merged.merge_adapter()
    source = hs.load((merged, None)).source()
    assert source.adapters[0].merged
    assert source.base_weights == ""
    assert hs.load((live_lora(0), None)).source().adapters[0].strength == 1.0


@pytest.mark.parametrize("name", ["train", "type", "half", "run_lm_head", "q_proj"])
def test_a_folder_may_have_any_name(
    name: str, tmp_path: Path, saved_llama: Path
) -> None:
    folder = write_adapter(tmp_path / name, "saved_head", tiny_llama())
    same = write_adapter(tmp_path / "run5", "saved_head", tiny_llama())
    model = hs.load(hs.Adapted(saved_llama, folder))
    other = hs.load(hs.Adapted(saved_llama, same))
    assert model.source().adapters[0].name == name
    assert model.source().weights == other.source().weights


def test_nested_adapters_are_several_on_one_base(
    tmp_path: Path, saved_llama: Path
) -> None:
    first = write_adapter(tmp_path / "first", "lora", tiny_llama(), 1)
    second = write_adapter(tmp_path / "second", "lora", tiny_llama(), 2)
    nested = hs.load(hs.Adapted(hs.Adapted(saved_llama, first), second))
    flat = hs.load(hs.Adapted(saved_llama, [first, second]))
    assert torch.equal(nested.capture(IDS).values, flat.capture(IDS).values)
    weaker = hs.Adapted(hs.Adapted(saved_llama, first), second, strength=0.5)
    with pytest.raises(LoadError, match="adapters of two strengths"):
        hs.load(weaker)
    with pytest.raises(LoadError, match="adapters already"):
        hs.load(hs.Adapted((live_lora(8), None), first))


def test_modules_that_were_trained_whole_are_no_part_of_the_base(
    tmp_path: Path,
) -> None:
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], modules_to_save=["self_attn.o_proj", "mlp"]
    )
    adapted = peft.get_peft_model(tiny_llama(), config)
    for weight in adapted.parameters():
        if weight.requires_grad:
            weight.data.add_(0.01)
    adapted.save_pretrained(tmp_path / "whole")
    base = hs.load((tiny_llama(), None))
    model = hs.load(hs.Adapted((tiny_llama(), None), tmp_path / "whole"))
    below = model.without_adapters()
    assert torch.equal(below.capture(IDS).values, base.capture(IDS).values)


class TestBadInput:
    def test_an_adapter_of_another_base(self, lora: Path, tmp_path: Path) -> None:
        wide = tmp_path / "wide"
        tiny_llama(hidden_size=32).save_pretrained(wide)
        # Known from the two files, before the base is loaded.
        with pytest.raises(Damaged, match="reads 16 numbers, and that of the base"):
            hs.load(hs.Adapted(wide, lora))
        with pytest.raises(Damaged, match="Cannot put the adapter lora on"):
            hs.load(hs.Adapted((tiny_llama(hidden_size=32), None), lora))
        shallow = tiny_llama(num_hidden_layers=1)
        with pytest.raises(Damaged, match="no place for 4 of its weights"):
            hs.load(hs.Adapted((shallow, None), lora))
        deep = tiny_llama(num_hidden_layers=3)
        with pytest.raises(Damaged, match="no weights for 4 parts"):
            hs.load(hs.Adapted((deep, None), lora))

    def test_a_folder_that_names_no_base(self, lora: Path) -> None:
        with pytest.raises(LoadError, match="names no base model"):
            hs.load(lora)

    def test_a_folder_that_is_not_there(self, saved_llama: Path) -> None:
        with pytest.raises(UnknownModel, match="does not exist"):
            hs.load(hs.Adapted(saved_llama, "./nowhere"))
        with pytest.raises(UnknownModel, match=r"no adapter_config\.json"):
            hs.load(hs.Adapted(saved_llama, saved_llama))

    def test_pickled_weights(self, lora: Path, saved_llama: Path) -> None:
        (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
        with pytest.raises(Unsafe, match="unpickling can run code"):
            hs.load(hs.Adapted(saved_llama, lora))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"peft_type": "PREFIX_TUNING"}, "not known to change layers alone"),
            ({"peft_type": "XLORA"}, "not known to change layers alone"),
            ({"rank_pattern": {"q_proj": 10**9}}, "q_proj=1,000,000,000"),
            ({"target_modules": "(([a-z_.0-9]+)+)+#"}, "a repeated group"),
            ({"init_lora_weights": "pissa_niter_100000000"}, "100000000 iterations"),
            ({"lora_alpha": float("nan")}, "lora_alpha=nan"),
            ({"task_type": "NONSENSE"}, "PEFT stopped with"),
            ({"megatron_config": {"a": 1}}, "Megatron to import"),
            ({"layer_replication": [[0, 2], [0, 2]]}, "repeats blocks"),
            ({"r": 10**9}, "r=1,000,000,000"),
            ({"peft_type": None}, "no peft_type"),
        ],
    )
    def test_a_configuration(
        self, changes: dict[str, Any], message: str, lora: Path, saved_llama: Path
    ) -> None:
        path = lora / "adapter_config.json"
        config = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps(config | changes), "utf-8")
        with pytest.raises(LoadError, match=message):
            hs.load(hs.Adapted(saved_llama, lora))

    def test_strength_of_what_does_not_add(
        self, tmp_path: Path, saved_llama: Path
    ) -> None:
        for kind in ("dora", "ia3", "saved_head"):
            folder = write_adapter(tmp_path / kind, kind, tiny_llama())
            with pytest.raises(LoadError, match="half of it is not defined"):
                hs.load(hs.Adapted(saved_llama, folder, strength=0.5))

    def test_values(self) -> None:
        with pytest.raises(LoadError, match="list of adapters is empty"):
            hs.Adapted("smollm2", [])
        with pytest.raises(LoadError, match="not a finite number"):
            hs.Adapted("smollm2", "lora", strength=float("nan"))
        with pytest.raises(LoadError, match="No scheme 'int3'"):
            hs.Quantised("smollm2", "int3")

    def test_merging_into_a_live_module(self, lora: Path) -> None:
        with pytest.raises(LoadError, match="merging would change its weights"):
            hs.load(hs.Adapted((tiny_llama(), None), lora, merged=True))

    def test_a_truncated_file(self, lora: Path, saved_llama: Path) -> None:
        weights = lora / "adapter_model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-20])
        with pytest.raises(Damaged, match=r"Cannot read adapter_model\.safetensors"):
            hs.load(hs.Adapted(saved_llama, lora))
