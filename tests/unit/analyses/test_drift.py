"""Drift: planted faults are found where they are, and harmless changes are none."""

import copy
import dataclasses
import json
import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.analyses.drift.errors import Gap, Noise, gap
from hiddenscope.analyses.drift.live_model import as_live, encode, stored_dtype
from hiddenscope.analyses.drift.observe import ModuleCall
from hiddenscope.analyses.drift.result import FORMAT, read_baseline, write_baseline
from hiddenscope.analyses.drift.search import Search
from hiddenscope.cli.main import app
from hiddenscope.errors import FileError, ModuleError, NotFinite, StatesError, TextError
from hiddenscope.loading import open_source
from hiddenscope.results import story_of, views_of
from hiddenscope.results.pictures import Grid, Lines
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.faults import trial
from labs.faults.pairs import Spec
from labs.faults.ports import PORTS
from tests.unit.analyses.planted import assert_blamed_rightly, compared

TEXTS = [
    [5, 6, 7, 9, 30, 41, 17],
    [50, 60, 70, 80],
    [33, 12, 8, 100, 101, 99, 7, 5, 4, 11],
]
FAMILIES = ["gpt2", "llama", "gemma3_text", "bert", "t5", "mixtral", "mamba", "albert"]
B = "model.layers.1"
UP = f"{B}.mlp.up_proj"
Plant = Callable[[Any], object]
slow = pytest.mark.slow


@cache
def reference(family: str) -> hs.Model:
    module: Any = tiny_model(family)
    if family == "t5":
        module.config.decoder_start_token_id = 0
    return hs.load((module, None))


def port(family: str = "llama", plant: Plant = lambda module: None) -> Any:
    """Copy the reference, and plant a fault or make a change."""
    candidate = copy.deepcopy(reference(family).module)
    plant(candidate)
    return candidate


def scaled(path: str = UP, by: float = 1.01) -> Plant:
    return lambda module: module.get_submodule(path).weight.data.mul_(by)


def facts_of(plant: Plant, family: str = "llama", **options: Any) -> Any:
    return hs.drift(reference(family), port(family, plant), TEXTS, **options).facts


def blamed(facts: Any) -> tuple[str, str]:
    return facts["first_site"], facts["module"]


@pytest.fixture(autouse=True, scope="module")
def _loaded() -> None:
    """Load what the first test would pay for."""
    compared("llama", "noise")
    for spec in PORT_FAULTS:
        trial.model(*spec.reference)
        trial.level(*spec.reference)


# One fault of each sort; tests/slow/faults has all of them.
FAULTS = [
    ("llama", "weight_permuted"),
    ("bert", "layers_swapped"),
    ("llama", "attention_scale"),
    ("gpt2", "mask_off_by_one"),
    ("llama", "rope_base"),
    ("gpt2", "norm_eps"),
    ("llama", "final_norm_twice"),
    ("mixtral", "router_top_k"),
    ("bert", "token_type"),
    ("llama", "logit_scale"),
]


@pytest.mark.parametrize(("family", "kind"), FAULTS)
def test_a_planted_fault_is_found_where_it_is(family: str, kind: str) -> None:
    outcome = compared(family, kind)
    assert outcome.drifted and outcome.beyond > 1


PORT_FAULTS = [
    Spec("split-gpt2", "port", "weight_scaled attn.key"),
    Spec("fused-llama", "port", "kv_heads_tiled mix"),
    Spec("meta-llama", "port", "weight_scaled att.wk"),
]


@pytest.mark.parametrize("spec", PORT_FAULTS, ids=lambda spec: spec.subject)
def test_a_fault_in_a_port_is_blamed_on_no_correct_module(spec: Spec) -> None:
    assert_blamed_rightly(spec)


def hides_first_token(module: nn.Module) -> None:
    def hide(_: nn.Module, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].clone()
        mask[:, 0] = 0
        return args, {**kwargs, "attention_mask": mask}

    module.register_forward_pre_hook(hide, with_kwargs=True)


def second_rotation(module: Any) -> None:
    """Spoil one of the two rotary tables that Gemma takes from one module."""
    module.model.rotary_emb.sliding_attention_attention_scaling = 1.2


GROUP = "albert.encoder.albert_layer_groups.0.albert_layers.0.ffn"
MIXER = "backbone.layers.1.mixer.x_proj"
CROSS = "decoder.block.1.layer.1.EncDecAttention.k"
ROTARY = "model.rotary_emb"
OTHER_MAKES: list[tuple[str, Plant, str, str, str]] = [
    ("albert", scaled(GROUP), "layer.1", GROUP, "scaled_weight"),
    ("mamba", scaled(MIXER), "layer.2", MIXER, "scaled_weight"),
    ("t5", scaled(CROSS), "decoder.layer.2", CROSS, "scaled_weight"),
    ("gemma3_text", second_rotation, "layer.1", ROTARY, "attribute"),
    # No part of the model is at fault: what it is given is.
    ("llama", hides_first_token, "layer.1", "", "block_argument"),
]


@pytest.mark.parametrize(("family", "plant", "site", "module", "fault"), OTHER_MAKES)
def test_a_fault_in_a_model_of_another_make_is_found_and_named(
    family: str, plant: Plant, site: str, module: str, fault: str
) -> None:
    facts = facts_of(plant, family)
    assert blamed(facts) == (site, module)
    assert fault in [hint["fault"] for hint in facts["hints"]], facts["hints"]


def test_states_put_back_restore_the_output() -> None:
    def two(module: Any) -> None:
        scaled("model.layers.0.mlp.up_proj", 1.2)(module)
        scaled("model.layers.2.mlp.up_proj", 1.2)(module)

    one = facts_of(scaled(by=1.2))["consequences"]
    whole = pytest.approx(1, abs=1e-6)
    assert one["kl_mean"] > 0
    assert one["restored"] == [{"sites": ["layer.2"], "share": whole}]
    first, second, both = facts_of(two)["consequences"]["restored"]
    assert (first["sites"], second["sites"]) == (["layer.1"], ["layer.3"])
    assert first["share"] < 0.99
    assert both == {"sites": ["layer.1", "layer.3"], "share": whole}


def eager(module: Any) -> None:
    module.set_attn_implementation("eager")


HARMLESS: dict[str, Plant] = {
    "same": lambda module: None,
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "float16": lambda module: module.to(torch.float16),
    "float64": lambda module: module.to(torch.float64),
    "eager": eager,
    "eager in bfloat16": lambda module: eager(module.to(torch.bfloat16)),
}


def assert_no_drift(*sides: Any) -> Any:
    facts = hs.drift(*sides, TEXTS).facts
    assert not facts["drifted"], facts["drifting_sites"]
    assert facts["first_site"] is facts["module"] is None
    return facts


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gpt2", "bfloat16"),
        ("bert", "float64"),
        ("mixtral", "eager"),
        ("gemma3_text", "eager in bfloat16"),
    ],
)
def test_a_harmless_change_is_no_drift(family: str, change: str) -> None:
    assert_no_drift(reference(family), port(family, HARMLESS[change]))


def assert_saved_or_narrower_is_no_drift(
    family: str, change: str, batch_tokens: int
) -> None:
    narrow = port(family).to(torch.bfloat16)
    assert_no_drift((narrow, None), port(family))
    targets = TEXTS if family == "t5" else None
    saved = hs.load((port(family, HARMLESS[change]), None)).capture(
        TEXTS, targets=targets, batch_tokens=batch_tokens
    )
    assert_no_drift(reference(family), saved)


def test_a_narrower_reference_and_saved_states_of_a_harmless_run_are_no_drift() -> None:
    assert_saved_or_narrower_is_no_drift("llama", "float16", 20)


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_no_harmless_change_of_any_family_is_drift(family: str) -> None:
    for change, plant in HARMLESS.items():
        # Torch's grouped product knows no float64.
        if (family, change) != ("mixtral", "float64"):
            assert_no_drift(reference(family), port(family, plant))
    assert_saved_or_narrower_is_no_drift(family, "eager", 12)


def test_a_part_that_is_called_twice_in_a_block_is_held_against_its_own_call() -> None:
    # XLNet's attention adds the output of a dropout that it first gives its weights.
    facts = facts_of(lambda module: None, "xlnet")
    assert not facts["drifted"]
    assert facts["noise"]["made_of"] == ["float64"]


@slow
def test_a_module_compiled_in_place_is_compared_by_what_it_returns() -> None:
    compiled, wrapped = port(), torch.compile(port(), backend="eager")
    compiled.compile(backend="eager")
    for candidate in (compiled, wrapped):
        facts = assert_no_drift(reference("llama"), candidate)
        assert facts["pairing"]["by"] == "name"
        assert facts["sites"] == 5, "three layers, final and the logits"


def many_texts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(5, 100, (length,), generator=generator).tolist()
        for length in lengths
    ]


@cache
def narrow_llama() -> hs.Model:
    return hs.load((tiny_model("llama", layers=2).bfloat16(), None))


def test_a_fault_that_no_token_shows_is_found_over_all_of_them() -> None:
    model = narrow_llama()
    candidate = copy.deepcopy(model.module)
    scaled(UP, 1.02)(candidate)
    result = hs.drift(model, candidate, many_texts(60, 70, 80))
    facts = result.facts
    assert facts["beyond"] < 1 < facts["systematic"]["beyond"]
    assert blamed(facts) == ("layer.2", UP)
    assert "No token shows it alone" in result.summary()


def test_it_is_said_how_small_a_fault_could_have_been_seen() -> None:
    model = narrow_llama()
    candidate = copy.deepcopy(model.module)
    smallest = hs.drift(model, candidate, many_texts(90, 90)).facts["smallest_fault"]
    assert 0 < smallest["typical"] <= smallest["largest"] < 0.02
    few = hs.drift(model, candidate, many_texts(7)).facts
    assert few["smallest_fault"] is None and few["changed_weights"] == []


def test_a_weight_that_no_state_shows_is_named() -> None:
    """Gemma normalises what the MLP returns, so that a factor in its weights is gone
    afterwards.
    """
    model = hs.load((tiny_model("gemma3_text", layers=2).bfloat16(), None))
    candidate = copy.deepcopy(model.module)
    scaled(f"{B}.mlp.down_proj", 1.02)(candidate)
    result = hs.drift(model, candidate, many_texts(40, 40))
    (weight,) = result.facts["changed_weights"]
    assert weight["name"] == f"{B}.mlp.down_proj.weight"
    assert weight["relative"] == pytest.approx(0.02, rel=0.1)
    told = "One weight differs all the same" in result.summary()
    assert result.facts["drifted"] or told


def test_two_kernels_are_compared_on_equal_terms_and_as_they_were_given() -> None:
    candidate = port()
    is_eager = candidate.config._attn_implementation == "eager"
    candidate.set_attn_implementation("sdpa" if is_eager else "eager")
    result = hs.drift(reference("llama"), candidate, TEXTS)
    facts = result.facts
    assert not facts["drifted"] and facts["beyond"] == 0 < facts["as_given"]["error"]
    largest = float(result.data["relative"].max())
    assert facts["as_given"]["error"] == pytest.approx(largest, rel=1e-6)
    assert "the same bit for bit" in result.summary()
    assert "As they were given" in result.summary()


def test_a_router_that_chooses_otherwise_by_rounding_is_no_drift() -> None:
    """Two experts are nearly as likely at one token, and experts in a loop round
    otherwise than a grouped product.
    """
    layout = PORTS["loop-mixtral"]
    module = layout.reference().bfloat16()
    text = [24, 11, 84, 85, 49, 100, 64, 16, 79, 101, 46, 67, 58, 57, 59, 29]
    text += [75, 60, 16, 49, 58, 34, 52, 63, 105, 32, 51, 118, 39]
    facts = hs.drift((module, None), layout.port(module), [text]).facts
    assert not facts["drifted"], (facts["first_site"], facts["beyond"])


def test_the_gain_is_the_error_over_the_error_before() -> None:
    data = hs.drift(reference("llama"), port("llama", scaled(by=1.1)), TEXTS).data
    inherited, total = data["inherited"], data["relative"]
    expected = inherited.sel(site="layer.3").max() / total.sel(site="layer.2").max()
    gain = float(data["gain"].sel(site="layer.3"))
    assert gain == pytest.approx(float(expected))


def test_values_that_differ_by_more_than_rounding_are_counted() -> None:
    data = hs.drift(reference("llama"), port("llama", scaled(by=1.5)), TEXTS).data
    np.testing.assert_array_equal(data["mismatched"].sel(site="layer.1"), 0)
    assert (data["mismatched"].sel(site="layer.2") > 0.5).all()


def test_few_passes_of_each_model_and_nothing_is_left_behind(
    hanging: Callable[[nn.Module], Any],
) -> None:
    model, candidate = reference("llama"), port()
    before = hanging(model.module), hanging(candidate)
    weights = [weight.clone() for weight in model.module.parameters()]
    facts = hs.drift(model, candidate, TEXTS).facts
    assert facts["passes"] == {"reference": 2, "candidate": 2}
    assert facts["self_check"] == {"observing_changed_nothing": True}
    scaled()(candidate)
    assert hs.drift(model, candidate, TEXTS).facts["hints"]
    assert (hanging(model.module), hanging(candidate)) == before
    narrow = facts_of(HARMLESS["bfloat16"])
    assert narrow["explained_by"] == "dtype" and not narrow["drifted"]
    assert narrow["passes"] == {"reference": 3, "candidate": 2}
    assert all(map(torch.equal, weights, model.module.parameters()))


@pytest.mark.parametrize(
    ("family", "path"),
    [
        ("llama", UP),
        pytest.param("t5", CROSS, marks=slow),
        pytest.param("mixtral", f"{B}.mlp.gate", marks=slow),
    ],
)
def test_in_low_memory_the_verdict_is_the_same(family: str, path: str) -> None:
    candidate = port(family, scaled(path, 1.1))
    whole, streamed = (
        hs.drift(reference(family), candidate, TEXTS, low_memory=low)
        for low in (False, True)
    )
    for key in ("first_site", "module", "beyond", "error", "envelope"):
        assert streamed.facts[key] == whole.facts[key], key
    for name in ("relative", "local", "ulp"):
        np.testing.assert_array_equal(streamed.data[name], whole.data[name])
    assert streamed.facts["passes"] == {"reference": 3, "candidate": 2}


def test_low_memory_holds_two_states_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    observing: Any = import_module("hiddenscope.analyses.drift.observe")
    held: set[int] = set()
    most: list[int] = []

    class Counted(observing.ObservedState):  # type: ignore[misc]
        def __init__(self, *values: Any) -> None:
            super().__init__(*values)
            held.add(id(self))
            most.append(len(held))

        def __del__(self) -> None:
            held.discard(id(self))

    monkeypatch.setattr(observing, "ObservedState", Counted)
    module: Any = tiny_model("llama", layers=8)
    result = hs.drift((module, None), copy.deepcopy(module), TEXTS, low_memory=True)
    assert not result.facts["drifted"]
    assert len(most) > 8 and max(most) <= 4, (
        "the candidate's, and of the reference one beside it, one on its way, one to"
        " come"
    )


def test_an_error_of_the_reference_is_raised_in_low_memory() -> None:
    module = port()
    model = hs.load((module, None))
    module.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hs.drift(model, port(), TEXTS, low_memory=True)


def test_a_module_that_counts_its_calls_fails_the_self_check() -> None:
    candidate = port()
    calls: list[None] = []

    def drifting(_: nn.Module, __: Any, output: Any) -> Any:
        calls.append(None)
        return output * (1 + 1e-4 * len(calls))

    candidate.lm_head.register_forward_hook(drifting)
    facts = hs.drift(reference("llama"), candidate, TEXTS).facts
    assert facts["self_check"] == {"observing_changed_nothing": False}


def test_saved_states_show_the_first_site(tmp_path: Path) -> None:
    model = reference("llama")
    saved = hs.load((port("llama", scaled()), None)).capture(TEXTS)
    saved.save(tmp_path / "run.safetensors")
    facts = hs.drift(model, tmp_path / "run.safetensors", TEXTS).facts
    assert blamed(facts) == ("layer.2", None) and facts["compared"] == "passes"
    assert facts["noise"]["made_of"] == ["float64", "kernel_batch_threads"]
    own = model.capture(TEXTS)
    assert hs.drift(own, saved, None).facts["first_site"] == "layer.2"
    turned = hs.drift(saved, model, TEXTS).facts
    assert turned["first_site"] == "layer.2"
    assert turned["passes"] == {"reference": 0, "candidate": 3}
    finals = [states.select(sites="final") for states in (own, saved)]
    alone = hs.drift(*finals, None)
    assert alone.facts["first_site"] == "final" and alone.data.site.values == ["final"]


def test_another_hidden_size_is_refused_and_another_shape_inside_is_named() -> None:
    model = reference("llama")
    config = copy.deepcopy(model.module.config)
    config.hidden_size //= 2
    narrow = type(model.module)(config).eval()
    for candidate in (narrow, hs.load((narrow, None))):
        with pytest.raises(
            StatesError, match=r"hidden sizes are 64 and 32 at layer\.0"
        ):
            hs.drift(model, candidate, TEXTS)
    other: Any = copy.deepcopy(model.module)
    mlp = other.model.layers[1].mlp
    wide, hidden = mlp.up_proj.weight.shape
    for name in ("gate_proj", "up_proj"):
        setattr(mlp, name, nn.Linear(hidden, wide - 16, bias=False))
    mlp.down_proj = nn.Linear(wide - 16, hidden, bias=False)
    facts = hs.drift(model, other, TEXTS).facts
    assert facts["first_site"] == "layer.2"
    assert facts["hints"][0]["fault"] == "other_shape"


@slow
def test_saved_states_of_an_encoder_and_a_decoder_show_the_first_site() -> None:
    plant = scaled("encoder.block.1.layer.1.DenseReluDense.wo")
    saved = hs.load((port("t5", plant), None)).capture(TEXTS, targets=TEXTS)
    own = reference("t5").capture(TEXTS, targets=TEXTS)
    for sides in ((reference("t5"), saved), (saved, reference("t5")), (own, saved)):
        texts = None if own in sides else TEXTS
        assert hs.drift(*sides, texts).facts["first_site"] == "encoder.layer.2"


def test_saved_states_of_a_bfloat16_checkpoint_are_held_against_their_own_noise() -> (
    None
):
    """Its embeddings are bfloat16 numbers; the run is in float32 all the same."""
    module = port().bfloat16().float()
    faulty = copy.deepcopy(module)
    scaled(f"{B}.self_attn.q_proj", 1.002)(faulty)
    model, saved = hs.load((module, None)), hs.load((faulty, None)).capture(TEXTS)
    facts = hs.drift(model, saved, TEXTS).facts
    assert facts["first_site"] == "layer.2" and "dtype" not in facts["noise"]["made_of"]
    narrow = hs.load((copy.deepcopy(module).bfloat16(), None)).capture(TEXTS)
    widened = dataclasses.replace(narrow, values=narrow.values.float())
    assert "dtype" in assert_no_drift(model, widened)["noise"]["made_of"]
    assert not hs.drift(model.capture(TEXTS), widened, None).facts["drifted"]


def test_a_baseline_is_written_then_applied(tmp_path: Path) -> None:
    file, first = tmp_path / "accepted.json", "model.layers.0.mlp.up_proj"
    model, candidate = reference("llama"), port("llama", scaled(first))

    def result() -> hs.Result:
        return hs.drift(model, candidate, TEXTS, baseline=file)

    def facts() -> Any:
        return result().facts

    written = result()
    assert written.facts["drifted"] and written.facts["baseline"]["written"]
    assert "was written: later runs accept errors up to it" in written.summary()
    again = result()
    assert not again.facts["drifted"] and not again.facts["baseline"]["written"]
    assert "of 6 sites was applied" in again.summary()
    # A new fault is looked for beside the accepted one.
    query = f"{B}.self_attn.q_proj"
    scaled(query, 1.5)(candidate)
    assert blamed(facts()) == ("layer.2", query)
    scaled(first, 1.03)(candidate)
    assert facts()["first_site"] == "layer.1"
    file.write_text("[]")
    with pytest.raises(FileError, match="damaged or of another kind"):
        facts()


def test_a_baseline_is_a_plain_file_of_a_sensible_size(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    (tmp_path / "deep").write_text("[" * 100_000)
    (tmp_path / "negative").write_text(
        json.dumps({"format": FORMAT, "accepted": {"layer.1": -1}})
    )
    other = json.dumps({"format": 0, "accepted": {"layer.1": 1.0}})
    (tmp_path / "other").write_text(other)
    (tmp_path / "folder").mkdir()
    for name in ("pipe", "huge", "deep", "negative", "other", "folder"):
        with pytest.raises(FileError, match="as a baseline"):
            read_baseline(tmp_path / name)
    assert read_baseline(tmp_path / "none") is None
    levels = {"layer.1": 0.5, "layer.2": float("inf")}
    assert write_baseline(tmp_path / "new", levels) == 1
    assert read_baseline(tmp_path / "new") == {"layer.1": 0.5}


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    model, candidate = reference("llama"), port()
    ids, others = [[5, 6, 7]], model.capture([[5, 6, 8]])
    other: Any = tiny_tokenizer(bos=False)
    (tmp_path / "other.safetensors").write_bytes(b"nothing of ours")
    middle = model.capture(ids, "layer.1.mid")
    named = hs.load((candidate, tiny_tokenizer()))
    cases: list[tuple[Any, Any, Any, type[Exception], str]] = [
        (model, others, ids, StatesError, "are of other texts"),
        (others, model.capture(ids), None, StatesError, "different texts"),
        (model, middle, ids, StatesError, "Nothing to compare"),
        (model, candidate, None, StatesError, "No texts"),
        (lambda ids: ids, model, ids, ModuleError, "it is not a model"),
        (named, (candidate, other), "The rest.", TextError, "give different ids"),
        (model, tmp_path / "other.safetensors", ids, FileError, "other.safetensors"),
    ]
    for first, second, texts, error, words in cases:
        with pytest.raises(error, match=words):
            hs.drift(first, second, texts)


def test_a_nan_is_named_by_side_site_and_token() -> None:
    candidate = port("llama", eager)
    candidate.model.layers[1].register_forward_hook(
        lambda _, __, state: state.masked_fill(
            torch.arange(state.shape[1])[:, None] == 2, torch.nan
        )
    )
    where = r"the candidate has a NaN at layer\.2, token '8' \(text 2, position 2\)"
    with pytest.raises(NotFinite, match=where):
        hs.drift(reference("llama"), candidate, TEXTS)
    saved, model = reference("llama").capture(TEXTS), hs.load((port(), None))
    with torch.no_grad():
        model.module.get_submodule("model.embed_tokens").weight[30] = torch.nan
    where = r"has a NaN at layer\.0, token '30' \(text 0, position 4\)"
    with pytest.raises(NotFinite, match=f"the reference {where}"):
        hs.drift(model, saved, TEXTS)
    with pytest.raises(NotFinite, match=f"the candidate {where}"):
        hs.drift(saved, model, TEXTS)


def test_memory_that_runs_out_blames_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate = port("llama", scaled())
    parts = set(candidate.modules())
    repeat = ModuleCall.repeat

    def fail(call: ModuleCall, module: nn.Module, device: torch.device) -> object:
        if module in parts:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return repeat(call, module, device)

    with monkeypatch.context() as patch:
        patch.setattr(ModuleCall, "repeat", fail)
        with pytest.raises(torch.OutOfMemoryError):
            hs.drift(reference("llama"), candidate, TEXTS)

    def fail_in_float64(*arguments: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: you tried to allocate 9 bytes.")

    place = "hiddenscope.analyses.drift.observe.run_exactly"
    monkeypatch.setattr(place, fail_in_float64)
    with pytest.raises(RuntimeError, match="tried to allocate"):
        hs.drift(reference("llama"), port(), TEXTS)


def test_a_gap_by_hand() -> None:
    one = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    found = gap(one, one + torch.tensor([[0.0, 0.5], [0.0, 0.0]]))
    assert found.rows.tolist() == [0.1, 0.0] and found.channel == 0.125
    assert gap(one, one.clone().fill_(torch.nan)).worst == torch.inf
    # Tokens that both sides exclude agree.
    logits = torch.tensor([[3.0, -torch.inf, 4.0]])
    difference = torch.tensor([[0.0, 0.0, 0.5]])
    assert gap(logits, logits + difference).rows.tolist() == [0.1]
    assert gap(logits, torch.tensor([[3.0, 0.0, 4.0]])).worst == torch.inf
    # An infinite error is drift in any noise.
    noise = Noise(torch.tensor([torch.inf, 1.0], dtype=torch.float64), torch.inf)
    error = Gap(torch.tensor([torch.inf, 0.0], dtype=torch.float64), torch.inf)
    assert noise.times_over(error) == torch.inf


def test_complex_tensors_integers_and_masks_are_compared_by_what_they_are() -> None:
    model = as_live(reference("llama"))
    judge = Search(model, model, encode(reference("llama"), TEXTS[:1])).judge
    angles = torch.arange(7 * 8, dtype=torch.float64).reshape(1, 7, 8)
    exact = torch.polar(torch.ones_like(angles), angles)
    table = exact.to(torch.complex64)
    rounded = table * (1 + 1e-7)
    for truth in (exact, None):
        assert judge(table, rounded, truth) <= 1
        assert judge(table.conj(), rounded.conj(), None) <= 1
        assert judge(table, table.conj(), truth) > 1
        assert judge(table, table.real, truth) > 1
    experts = torch.tensor([[2, 0, 5]])
    assert judge(experts, experts.double(), None) <= 1
    assert judge(experts, experts.int(), None) <= 1
    assert judge(experts, experts + 1.0, None) > 1
    assert judge(experts, experts + 1, None) > 1
    mask = torch.tensor([[True, True, False]])
    added = torch.tensor([[0.0, 0.0, -torch.inf]])
    assert judge(mask, added, None) <= 1
    assert judge(mask.long(), added, None) <= 1
    assert judge(mask, ~mask, None) > 1


def test_the_page_says_the_verdict_first() -> None:
    result = hs.drift(reference("llama"), port("llama", scaled()), TEXTS)
    verdict = result.summary().splitlines()[1].strip()
    assert verdict.startswith("Drift: the two first differ at `layer.2`")
    assert [type(view) for view in views_of(result)] == [Grid, Lines]
    assert story_of(result)[0].title == "Drift"
    same = hs.drift(reference("llama"), port("llama", HARMLESS["bfloat16"]), TEXTS)
    assert "No drift" in same.summary().splitlines()[1]
    assert story_of(same)[0].title == "No drift"
    # One model in two dtypes is named by them.
    title = views_of(same)[0].title
    assert "(bfloat16) against" in title and title.endswith("(float32)")


def test_the_command_exits_with_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"good": port(), "bad": port("llama", scaled())}
    models = {
        name: hs.Model(open_source((module, tiny_tokenizer())))
        for name, module in modules.items()
    }
    monkeypatch.setattr(hs, "load", lambda name, **_: models[name or "good"])
    file = str(tmp_path / "run.safetensors")
    models["bad"].capture("The rest.").save(file)

    def run(*arguments: str, model: str = "good") -> tuple[int, str]:
        ran = CliRunner().invoke(app, ["drift", *arguments, "--model", model])
        return ran.exit_code, " ".join(ran.output.split())

    assert run("good", "The rest.")[0] == 0
    code, shown = run("bad", "The rest.", "--json")
    assert code == 1 and json.loads(shown)["facts"]["module"] == UP
    code, shown = run(file)
    assert code == 1 and "layer.2" in shown
    assert run(file, model=file)[0] == 0
    for arguments, model, words in (
        ((file, "Another text."), "good", "other texts"),
        ((file, "--candidate-dtype", "bfloat16"), "good", "the model's alone"),
        ((file, "--dtype", "bfloat16"), file, "both sides were computed already"),
    ):
        code, shown = run(*arguments, model=model)
        assert code == 2 and words in shown, shown


def saved_in(dtype: torch.dtype, module: Any) -> Any:
    """Return the module as it comes back from a file in another dtype."""
    for weight in module.parameters():
        weight.data = weight.data.to(dtype).to(weight.dtype)
    return module


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "bfloat16"),
        ("bert", "float16"),
        pytest.param("t5", "bfloat16", marks=slow),
    ],
)
def test_a_checkpoint_saved_in_fewer_digits_is_no_drift(
    family: str, dtype: str
) -> None:
    before = [weight.clone() for weight in reference(family).module.parameters()]
    candidate = saved_in(getattr(torch, dtype), port(family))
    facts = assert_no_drift(reference(family), candidate)
    assert f"The reference's weights were rounded to {dtype}" in facts["notes"][0]
    assert all(map(torch.equal, before, reference(family).module.parameters()))
    if family == "llama":
        scaled()(candidate)
        faulty = saved_in(torch.bfloat16, candidate)
        facts = hs.drift(reference("llama"), faulty, TEXTS).facts
        assert blamed(facts) == ("layer.2", UP)


def test_more_digits_are_no_drift_if_the_reference_was_rounded_from_them() -> None:
    saved = saved_in(torch.bfloat16, port())
    facts = assert_no_drift((saved, None), port())
    assert "Its weights were rounded to bfloat16" in facts["notes"][0]
    faulty = port("llama", scaled(by=1.05))
    assert blamed(hs.drift((saved, None), faulty, TEXTS).facts) == ("layer.2", UP)
    # Other digits than those that were rounded away are drift.
    other = copy.deepcopy(saved)
    for weight in other.parameters():
        weight.data.mul_(1 + 2**-8)
    facts = hs.drift((saved, None), other, TEXTS).facts
    assert facts["drifted"] and facts["notes"] == []


def test_the_dtype_that_weights_are_stored_in() -> None:
    module = tiny_model("gpt2")
    assert stored_dtype(module) == torch.float32
    assert stored_dtype(copy.deepcopy(module).bfloat16()) == torch.bfloat16
    assert stored_dtype(saved_in(torch.float16, copy.deepcopy(module))) == torch.float16
    narrow: Any = saved_in(torch.bfloat16, module)
    assert stored_dtype(narrow) == torch.bfloat16
    assert stored_dtype(copy.deepcopy(narrow).double()) == torch.bfloat16
    narrow.lm_head.weight.data[77, 3] = 0.1
    assert stored_dtype(narrow) == torch.float32
    assert stored_dtype(nn.Linear(2, 2, device="meta")) == torch.float32
    assert stored_dtype(nn.GELU()) == torch.float32
