"""What a model may do is tried once and remembered, checked again, and forgotten when
it no longer holds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope.discovery import find, vocabulary
from hiddenscope.errors import LoadError, TooLarge
from hiddenscope.files import UNSEALED, seal
from hiddenscope.loading import sources
from hiddenscope.model import generation
from hiddenscope.modules import trials
from hiddenscope.passes import try_skipping
from hiddenscope.passes.sweep import run_unpatched, shortcuts_of
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from labs.fuzz import folders

TEXT = [[5, 6, 7, 8]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HIDDENSCOPE_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "model"
    tiny_model("llama", layers=2).save_pretrained(place)  # type: ignore[operator]
    return place


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the names of the models that were proved from the beginning."""
    made: list[str] = []

    def counted(module: nn.Module, *, name: str = "") -> object:
        made.append(name)
        return find(module, name=name)

    monkeypatch.setattr("hiddenscope.model.model.find", counted)
    return made


def memory_of(folder: Path) -> Path:
    (found,) = (folder.parent / "cache" / "trials").glob("*.json")
    return found


def test_the_second_load_remembers_the_proof_and_gives_the_same(
    folder: Path, proofs: list[str]
) -> None:
    hs.load((tiny_model("llama"), None))  # it is remembered nowhere
    assert not (folder.parent / "cache" / "trials").exists()
    proofs.clear()
    first, second = hs.load(folder), hs.load(folder)
    assert proofs == ["model"]
    assert not first.remembered
    assert second.remembered
    assert second.anatomy == first.anatomy
    assert second.batching == first.batching
    assert torch.equal(first.capture(TEXT).values, second.capture(TEXT).values)  # type: ignore[union-attr, arg-type]
    assert first.source() == second.source()


def test_a_remembered_proof_is_made_again_on_one_batch_before_it_is_used(
    folder: Path, proofs: list[str]
) -> None:
    hs.load(folder)
    memory = memory_of(folder)
    text = json.dumps(json.loads(memory.read_text())["outcomes"])
    outcomes = json.loads(text.replace("model.layers.1", "model.layers.0"))
    memory.write_text(json.dumps({"outcomes": outcomes, "seal": UNSEALED}))
    seal(memory)
    model = hs.load(folder)
    assert model.remembered
    assert len(model.anatomy.select("layer.*")) == 3
    assert not model.remembered
    assert proofs == ["model"] * 2
    assert model.anatomy.taps == find(model.module).taps


def test_a_memory_that_cannot_be_read_counts_as_none(
    folder: Path, proofs: list[str]
) -> None:
    hs.load(folder)
    memory = memory_of(folder)
    whole = memory.read_bytes()
    reader = trials.Memory(folder.parent / "cache", "other")
    reader.path = memory
    for damage in ("{", "{}", '{"outcomes": {"anatomy": 3}, "seal": "no"}'):
        memory.write_text(damage)
        assert reader._read() == {}
    assert not hs.load(folder).remembered
    assert len(proofs) == 2
    # A flipped bit is never believed.
    for at in range(0, len(whole), max(1, len(whole) // 40)):
        memory.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert reader._read() in ({}, json.loads(whole)["outcomes"])


def test_other_weights_another_dtype_or_kernel_are_proved_anew(
    folder: Path, proofs: list[str]
) -> None:
    for options in ({}, {"dtype": "bfloat16"}, {"attention": "eager"}):
        assert not hs.load(folder, **options).remembered
        assert hs.load(folder, **options).remembered
    assert len(proofs) == 3
    tiny_model("llama", seed=3, layers=2).save_pretrained(folder)  # type: ignore[operator]
    assert not hs.load(folder).remembered
    assert len(proofs) == 4


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
    assert second.remembered
    assert len(read) == 1
    assert second.capture("the mat", "layer.1").tokens.texts == ("the mat",)
    assert second.tokenizer is second.tokenizer
    assert len(read) == 2
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(LoadError, match="Cannot load the tokenizer"):
        hs.load(folder)


def test_what_is_configured_anew_is_tried_anew_and_not_recalled_from_disk(
    folder: Path,
) -> None:
    hs.load(folder).trials.once("answer", lambda: "first", form=str)
    model = hs.load(folder)
    for tried, expected in (("again", "first"), ("other", "other"), ("last", "other")):
        assert model.trials.once("answer", lambda t=tried: t, form=str) == expected
        if tried == "again":
            model.module.config.use_cache = not model.module.config.use_cache  # type: ignore[union-attr]


def test_the_tolerance_grows_with_depth_and_is_a_share() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        allowed = [trials.tolerance(dtype, depth) for depth in range(80)]
        assert allowed[0] > 0
        assert allowed == sorted(set(allowed))
        assert allowed[-1] < 1


def test_rounding_is_within_the_tolerance_and_a_wrong_position_or_a_nan_is_not(
    tiny: Callable[..., hs.Model],
) -> None:
    captured: Any = tiny("llama").capture(TEXT, "layer.*")
    states, depths = captured.values, [site.layer or 0 for site in captured.sites]
    rounded = (states.double() * (1 + 1e-7)).float()
    moved = states.roll(1, dims=1)
    assert trials.disagreement(states, rounded, depths) < 1
    assert trials.disagreement(states, moved, depths) > 1000
    # What another batch of the same texts makes of it is allowed some times.
    repeated = states + (moved - states) / trials.NOISE_FACTOR
    noise = trials.disagreement(states, moved, depths, repeated)
    assert noise == pytest.approx(1, rel=1e-3)
    broken = states.clone()
    broken[0, 1, 2] = torch.nan
    for one, other in ((states, broken), (broken, states)):
        assert trials.disagreement(one, other, depths) == float("inf")


def row_of(model_class: str) -> dict[str, Any]:
    return next(row for row in folders.rows() if row["model_class"] == model_class)


def test_a_nested_configuration_that_is_changed_is_tried_anew() -> None:
    """Gemma 4 keeps values for each layer in a nested configuration, which transformers
    refuses to compare.
    """
    module = build(row_of("Gemma4ForConditionalGeneration"))
    made, tried = trials.Trials(module), list[int]()
    config: Any = module.config.text_config  # type: ignore[union-attr]
    for value in (None, 30.0, 30.0, 20.0):
        config.final_logit_softcapping = value
        # No field of the class: two configurations with other values of it are equal.
        config.somebody = value
        made.once("count", lambda: tried.append(1))
    config.somebody = 1.0
    made.once("count", lambda: tried.append(1))
    assert len(tried) == 4


def test_a_scale_that_the_module_holds_itself_is_seen_when_it_changes() -> None:
    early, late = build(row_of("CohereForCausalLM")), build(row_of("CohereForCausalLM"))
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


def squash(part: nn.Module, args: Any, output: Any) -> Any:
    return 3 * output.tanh()


def shrink_last(part: nn.Module, args: Any, output: Any) -> Any:
    """Change the last row, which in a padded batch is padding: a hook that knows one
    text at a time only.
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
CONTRAST = hs.Contrast("the cost of it", "the rest of it", " a", " t")


def shown(model: hs.Model) -> dict[str, Any]:
    """Return what captures show of a model, and analyses that rest on trials."""
    states: Any = model.capture([[5, 6, 7, 8], [9, 10]])
    full = hs.record(model, TEXT, "layer.1", logits=True)
    resumed = hs.resume(model, TEXT, "layer.1", full.states["layer.1"])
    direction = hs.Direction.of(torch.linspace(-1, 1, 64), sites="layer.2")
    quality = [[5, 6, 7, 8], [9, 10]]
    results = {
        "lens": hs.lens(model, "the cost of it"),
        "patch": hs.patch(model, CONTRAST),
        "steer": hs.steer(
            model, TEXT, direction, answers=[7], quality=quality, new_tokens=2
        ),
    }
    numbers = {
        f"{name} {key}": torch.from_numpy(values.values.copy())
        for name, result in results.items()
        for key, values in result.data.items()
        if values.dtype.kind == "f"
    }
    return {"states": states.values, "resumed": resumed.logits, **numbers}


FAST = ["kernel", "head", "hook on a block"]
SLOW = [name for name in CHANGES if name not in FAST]


@pytest.mark.parametrize(
    "change", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_what_is_changed_later_is_seen_as_if_it_had_been_there_before(
    change: str,
) -> None:
    early, late = (tiny_model("llama", layers=2) for _ in range(2))
    model = hs.load((early, tiny_tokenizer()))
    shown(model)  # every trial is made
    for module in (early, late):
        CHANGES[change](module)
    ours, expected = shown(model), shown(hs.load((late, tiny_tokenizer())))
    assert ours.keys() == expected.keys()
    for name, value in ours.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-4, atol=1e-5, equal_nan=True, msg=name
        )


def test_the_outcome_of_a_module_with_a_hook_is_kept_nowhere(folder: Path) -> None:
    model = hs.load(folder)
    stored = memory_of(folder).read_text()
    model.module.get_submodule("model.layers.1").register_forward_hook(shrink_last)
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
        lambda model: run_unpatched(model, TEXT, []),
        lambda inputs: bool(inputs.get("use_cache")),
    ),
    "generation": (lambda model: generation.refusal(model, 5), lambda inputs: True),
    "sweep": (shortcuts_of, lambda inputs: len(inputs["input_ids"]) > 2),
}


def run_out(*_: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("name", TRIALS)
def test_memory_that_runs_out_is_no_outcome(name: str) -> None:
    attempt, runs_out = TRIALS[name]
    model = hs.load((tiny_model("llama"), None))

    def perhaps(module: nn.Module, args: Any, inputs: dict[str, Any]) -> None:
        if runs_out(inputs):
            run_out()

    # Inside the model, where the arguments are those that our own hooks have set.
    inner = model.module.get_submodule("model")
    inner.register_forward_pre_hook(perhaps, with_kwargs=True)
    with pytest.raises((torch.OutOfMemoryError, TooLarge)):
        attempt(model)


def test_memory_that_runs_out_tells_neither_a_recipe_for_logits_nor_a_vocabulary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Starved(nn.Module):
        def forward(self, input_ids: Tensor) -> None:
            run_out()

    with pytest.raises(torch.OutOfMemoryError):
        vocabulary(Starved())
    monkeypatch.setattr(Unembedding, "_through_modules", run_out)
    model = hs.load((tiny_model("llama"), None))
    with pytest.raises(torch.OutOfMemoryError):
        Unembedding(model)
