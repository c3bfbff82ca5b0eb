"""What a model may do is tried once and remembered, checked again, and forgotten when
it no longer holds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hiddenscope as hs
from fuzz import folders
from hiddenscope.discovery import find, vocabulary
from hiddenscope.discovery import find as find_states
from hiddenscope.errors import LoadError, TooLarge
from hiddenscope.loading import sources
from hiddenscope.model import generation
from hiddenscope.modules import trials
from hiddenscope.passes import try_skipping
from hiddenscope.passes.clean_run import run_clean
from hiddenscope.passes.sweep import shortcuts_of
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from tests.slices import sliced

TEXT = [[5, 6, 7, 8]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "model"
    tiny_model("llama").save_pretrained(place)
    return place


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that were proved from the beginning."""
    made: list[str] = []

    def counted(module: torch.nn.Module, *, name: str = "") -> object:
        made.append(name)
        return find_states(module, name=name)

    monkeypatch.setattr("hiddenscope.model.model.find", counted)
    return made


def memory_of(folder: Path) -> Path:
    (found,) = (folder.parent / "cache" / "trials").glob("*.json")
    return found


def test_the_second_load_remembers_the_proof_and_gives_the_same(
    folder: Path, proofs: list[str]
) -> None:
    first, second = hs.load(folder), hs.load(folder)
    assert proofs == ["model"] and not first.remembered and second.remembered
    assert second.anatomy == first.anatomy and second.batching == first.batching
    assert torch.equal(first.capture(TEXT).values, second.capture(TEXT).values)
    assert first.source() == second.source()


def test_a_remembered_proof_is_made_again_on_one_batch_before_it_is_used(
    folder: Path, proofs: list[str]
) -> None:
    hs.load(folder)
    memory = memory_of(folder)
    stored = json.loads(memory.read_text())
    swapped = (
        json.dumps(stored["outcomes"])
        .replace("model.layers.1", "model.layers.9")
        .replace("layers.2", "layers.1")
    )
    outcomes = json.loads(swapped)
    seal = trials.hashlib.sha256(
        json.dumps(outcomes, sort_keys=True).encode()
    ).hexdigest()
    memory.write_text(json.dumps({"outcomes": outcomes, "sha256": seal}))
    model = hs.load(folder)
    assert model.remembered
    assert [str(site) for site in model.anatomy.select("layer.*")] == [
        f"layer.{k}" for k in range(4)
    ]
    assert not model.remembered and proofs == ["model"] * 2
    assert model.anatomy.taps == find(model.module).taps


@pytest.mark.parametrize(
    "damage", ["{", "{}", '{"outcomes": {"anatomy": 3}, "sha256": "no"}']
)
def test_a_memory_that_cannot_be_read_counts_as_none(
    folder: Path, proofs: list[str], damage: str
) -> None:
    hs.load(folder)
    memory_of(folder).write_text(damage)
    assert not hs.load(folder).remembered and len(proofs) == 2


def test_a_flipped_bit_in_the_memory_is_never_believed(folder: Path) -> None:
    hs.load(folder)
    memory = memory_of(folder)
    whole = memory.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        memory.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        place = trials.Memory(folder.parent / "cache", "other")
        place.path = memory
        assert place._read() in ({}, json.loads(whole)["outcomes"])


def test_other_weights_are_proved_anew(folder: Path, proofs: list[str]) -> None:
    hs.load(folder)
    tiny_model("llama", seed=3).save_pretrained(folder)
    assert not hs.load(folder).remembered and len(proofs) == 2


def test_a_tokenizer_is_read_at_the_first_load_and_then_when_it_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_tokenizer().save_pretrained(folder)
    read: list[int] = []
    plain = sources.load_tokenizer
    monkeypatch.setattr(
        sources, "load_tokenizer", lambda given: (read.append(1), plain(given))[1]
    )
    hs.load(folder)
    assert len(read) == 1
    second = hs.load(folder)
    assert second.remembered and len(read) == 1
    assert (
        second.capture("the mat", "layer.1").tokens.texts == ("the mat",)
        and second.tokenizer is second.tokenizer
    )
    assert len(read) == 2
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="Cannot load the tokenizer"):
        hs.load(folder)


def test_another_dtype_or_kernel_is_tried_by_itself(
    folder: Path, proofs: list[str]
) -> None:
    for options in ({}, {"dtype": "bfloat16"}, {"attention": "eager"}):
        assert not hs.load(folder, **options).remembered
        assert hs.load(folder, **options).remembered
    assert len(proofs) == 3


def test_a_live_module_is_remembered_nowhere(folder: Path) -> None:
    hs.load((tiny_model("llama"), None))
    assert not (folder.parent / "cache" / "trials").exists()


def test_what_is_configured_anew_is_tried_anew() -> None:
    model = hs.load((tiny_model("llama"), None))
    tried: list[int] = []
    for _ in range(2):
        model.trials.once("count", lambda: tried.append(1))
    model.module.config.use_cache = not model.module.config.use_cache  # type: ignore[union-attr]
    model.trials.once("count", lambda: tried.append(1))
    assert len(tried) == 2


@given(
    st.integers(0, 80),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
)
def test_the_tolerance_grows_with_depth_and_is_a_share(
    depth: int, dtype: torch.dtype
) -> None:
    allowed = trials.tolerance(dtype, depth)
    assert 0 < allowed < trials.tolerance(dtype, depth + 1) < 1


def test_rounding_is_within_the_tolerance_and_a_wrong_position_is_not(
    tiny: Callable[..., hs.Model],
) -> None:
    model = tiny("llama")
    states = model.capture(TEXT, "layer.*")
    depths = [site.layer or 0 for site in states.sites]  # type: ignore[union-attr]
    rounded = (states.values.double() * (1 + 1e-7)).float()
    assert trials.disagreement(states.values, rounded, depths) < 1
    assert (
        trials.disagreement(states.values, states.values.roll(1, dims=1), depths) > 1000
    )


def test_a_nested_configuration_that_is_changed_is_tried_anew(tmp_path: Path) -> None:
    """Gemma 4 keeps values for each layer in a nested configuration, which transformers
    refuses to compare.
    """
    row = next(
        row
        for row in folders.rows()
        if row["model_class"] == "Gemma4ForConditionalGeneration"
    )
    build(row).save_pretrained(tmp_path / "gemma4")
    model, tried = hs.load(tmp_path / "gemma4"), list[int]()
    config: Any = model.module.config.text_config  # type: ignore[union-attr]
    for value in (None, 30.0, 30.0, 20.0):
        config.final_logit_softcapping = value
        # No field of the class: two configurations with other values of it are equal.
        config.somebody = value
        model.trials.once("count", lambda: tried.append(1))
    config.somebody = 1.0
    model.trials.once("count", lambda: tried.append(1))
    assert len(tried) == 4


def test_a_scale_that_the_module_holds_itself_is_seen_when_it_changes() -> None:
    row = next(
        row for row in folders.rows() if row["model_class"] == "CohereForCausalLM"
    )
    early, late = build(row), build(row)
    model = hs.load((early, None))
    hs.lens(model, TEXT)
    early.logit_scale = late.logit_scale = 3.0  # type: ignore[assignment]
    ours, expected = hs.lens(model, TEXT), hs.lens(hs.load((late, None)), TEXT)
    assert ours.data["probability"].equals(expected.data["probability"])


def test_another_way_of_generating_is_tried_by_itself() -> None:
    model = hs.load((tiny_model("llama"), None))
    for penalty in (1.0, 1.5, 1.0):
        model.module.generation_config.repetition_penalty = penalty  # type: ignore[union-attr]
        assert not generation.refusal(model, 5)
    assert sum(key[0] == "generation" for key in model.trials._outcomes) == 2  # type: ignore[index]


def test_what_is_configured_anew_is_not_recalled_from_disk(folder: Path) -> None:
    hs.load(folder).trials.once("answer", lambda: "first", form=str)
    model = hs.load(folder)
    assert model.trials.once("answer", lambda: "again", form=str) == "first"
    model.module.config.use_cache = not model.module.config.use_cache  # type: ignore[union-attr]
    assert model.trials.once("answer", lambda: "other", form=str) == "other"


def test_a_nan_never_agrees() -> None:
    states = torch.ones(1, 2, 4)
    broken = states.clone()
    broken[0, 1, 2] = torch.nan
    assert (
        trials.disagreement(states, broken, [1])
        == trials.disagreement(broken, states, [1])
        == float("inf")
    )


def squash(part: nn.Module, args: Any, output: Any) -> Any:
    return 3 * output.tanh()


def shrink_last(part: nn.Module, args: Any, output: Any) -> Any:
    """A hook that knows one text at a time only: it changes the last row, which in a
    padded batch is padding.
    """
    output = output.clone()
    output[:, -1] *= 0.5
    return output


def halve_logits(part: nn.Module, args: Any, output: Any) -> Any:
    output.logits = output.logits / 2
    return output


def exchange_head(module: Any) -> None:
    torch.manual_seed(1)
    module.lm_head = nn.Sequential(nn.Linear(64, 128), nn.Tanh()).eval()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda module: module.to(torch.bfloat16),
    "float64": lambda module: module.to(torch.float64),
    "kernel": lambda module: module.set_attn_implementation("eager"),
    "weights": lambda module: nn.init.eye_(module.model.layers[1].mlp.down_proj.weight),
    "head": exchange_head,
    "hook on the head": lambda module: module.lm_head.register_forward_hook(squash),
    "hook on a block": lambda module: module.model.layers[1].register_forward_hook(
        shrink_last
    ),
    "hook on the whole": lambda module: module.register_forward_hook(halve_logits),
}


def shown(model: hs.Model) -> dict[str, Any]:
    """What captures and analyses that rest on trials show of a model."""
    states = model.capture([[5, 6, 7, 8], [9, 10]])
    assert isinstance(states, hs.States)
    full = hs.record(model, TEXT, "layer.1", logits=True)
    resumed = hs.resume(model, TEXT, "layer.1", full.states["layer.1"])
    contrast = hs.Contrast("the cost of it", "the rest of it", " a", " t")
    results = {
        "lens": hs.lens(model, "the cost of it"),
        "patch": hs.patch(model, contrast),
    }
    direction = hs.Direction.of(torch.linspace(-1, 1, 64), sites="layer.2")
    results["steer"] = hs.steer(
        model,
        TEXT,
        direction,
        answers=[7],
        quality=[[5, 6, 7, 8], [9, 10]],
        new_tokens=2,
    )
    numbers = {
        f"{name} {key}": torch.from_numpy(values.values.copy())
        for name, result in results.items()
        for key, values in result.data.items()
        if values.dtype.kind == "f"
    }
    return {
        "states": states.values,
        "dtype": states.source.dtype,
        "resumed": resumed.logits,
        **numbers,
    }


# On a CPU without bfloat16.
@pytest.mark.parametrize("change", sliced(list(CHANGES), 5))
def test_what_is_changed_later_is_seen_as_if_it_had_been_there_before(
    change: str,
) -> None:
    early, late = (tiny_model("llama") for _ in range(2))
    model = hs.load((early, tiny_tokenizer()))
    shown(model)  # every trial is made
    for module in (early, late):
        CHANGES[change](module)
    ours, expected = shown(model), shown(hs.load((late, tiny_tokenizer())))
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(
                value, expected[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
            )
        else:
            assert value == expected[name], name


def test_the_outcome_of_a_module_with_a_hook_is_kept_nowhere(folder: Path) -> None:
    model = hs.load(folder)
    stored = memory_of(folder).read_text()
    model.module.model.layers[1].register_forward_hook(shrink_last)  # type: ignore[union-attr, index]
    assert not model.batching.padding_safe
    assert memory_of(folder).read_text() == stored
    assert hs.load(folder).batching.padding_safe


Trial = Callable[[hs.Model], object]
# What is tried on a model, and the calls of its module that run out of memory.
TRIALS: dict[str, tuple[Trial, Callable[[dict[str, Any]], bool]]] = {
    "anatomy": (lambda model: find(model.module), lambda inputs: True),
    "batching": (lambda model: model.batching, lambda inputs: True),
    "skip blocks": (try_skipping, lambda inputs: True),
    "keep cache": (
        lambda model: run_clean(model, TEXT, []),
        lambda inputs: bool(inputs.get("use_cache")),
    ),
    "generation": (lambda model: generation.refusal(model, 5), lambda inputs: True),
    "sweep": (shortcuts_of, lambda inputs: len(inputs["input_ids"]) > 2),
}


@pytest.mark.parametrize("name", TRIALS)
def test_memory_that_runs_out_is_no_outcome(name: str) -> None:
    attempt, runs_out = TRIALS[name]
    model = hs.load((tiny_model("llama"), None))

    def run_out(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        if runs_out(inputs):
            raise torch.OutOfMemoryError("CUDA out of memory.")

    # Inside the model, where the arguments are those that our own hooks have set.
    inner: Any = model.module.get_submodule("model")
    inner.register_forward_pre_hook(run_out, with_kwargs=True)
    with pytest.raises((torch.OutOfMemoryError, TooLarge)):
        attempt(model)


def test_memory_that_runs_out_is_no_fault_of_a_recipe_for_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_out(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Unembedding, "_through_modules", run_out)
    model = hs.load((tiny_model("llama"), None))
    with pytest.raises(torch.OutOfMemoryError):
        Unembedding(model, hs.Site(3))


def test_memory_that_runs_out_does_not_tell_a_vocabulary() -> None:
    class Starved(nn.Module):
        def forward(self, input_ids: Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(torch.OutOfMemoryError):
        vocabulary(Starved())
