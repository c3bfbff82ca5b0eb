"""Laws of states from inside generate: each token's once, what a full pass gives, of
the text that generate writes.
"""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import GenerationConfig

import hiddenscope as hs
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import generation
from hiddenscope.model.batching import states_disagreement
from hiddenscope.model.generation import attention_windows
from hiddenscope.states import Pair
from hiddenscope.testing import build, tiny_model, tiny_tokenizer
from tests.configs import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
PROMPT = [7, 99, 23, 64, 31]


def written(
    module: nn.Module, prompt: list[int], count: int, **options: Any
) -> list[int]:
    ids = torch.tensor([prompt])
    given = {"do_sample": False, "pad_token_id": 0, **options}
    return module.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **given
    )[0].tolist()  # type: ignore


@pytest.mark.parametrize(
    "family",
    with_slow(
        ["llama", "mamba", "gemma3_text"],
        ["gpt2", "gpt_neox", "opt", "mixtral", "bloom", "falcon", "hrm_text"],
    ),
)
def test_each_tokens_state_is_what_a_full_pass_gives(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    states = model.capture_generation([PROMPT], max_new_tokens=6, min_new_tokens=7)
    ids = states.tokens.ids.tolist()
    assert ids == written(model.module, PROMPT, 6, min_new_tokens=6), (
        "the greedy text is what generate gives"
    )
    whole = model.capture([ids])
    assert states.sites == whole.sites and states.tokens.count == 1
    torch.testing.assert_close(states.values, whole.values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_what_an_adapted_model_writes_is_recorded_and_steered(task: str | None) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type=task)
    adapted: Any = peft.get_peft_model(tiny_model("llama"), config)
    module = adapted.eval()
    # So that the adapter makes a difference.
    for name, weight in module.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.3)
    model = hs.load((module, tiny_tokenizer()))
    states = model.capture_generation([PROMPT], max_new_tokens=4)
    whole = model.capture([states.tokens.ids.tolist()])
    torch.testing.assert_close(states.values, whole.values, rtol=1e-4, atol=1e-4)
    with hs.recording(model, "layer.1") as recorded:
        module(torch.tensor([PROMPT]))
        text = written(module, PROMPT, 2)
    assert [len(part.tokens) for part in recorded.passes] == [5, 5, 1]
    # The last token of a prompt is changed, wherever the text is read again.
    change = {"layer.1": hs.Replace(torch.linspace(-9, 9, 64), tokens=4)}
    with hs.editing(model, change):
        steered = written(module, PROMPT, 1)
    logits = hs.edit(model, [PROMPT], change, (), logits=True).logits
    assert logits is not None
    assert steered[5] == int(logits[-1].argmax()) != text[5]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_each_state_of_two_stacks_is_what_a_full_pass_gives(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    made = model.capture_generation([PROMPT], max_new_tokens=5, min_new_tokens=6)
    assert isinstance(made, Pair) and made.encoder.tokens.ids.tolist() == PROMPT
    ids = made.decoder.tokens.ids.tolist()
    assert ids == written(model.module, PROMPT, 6, min_new_tokens=6)[:-1], (
        "BART ends on a token that is forced"
    )
    whole = model.capture([PROMPT], targets=[ids])
    assert isinstance(whole, Pair)
    for part, full in ((made.encoder, whole.encoder), (made.decoder, whole.decoder)):
        torch.testing.assert_close(part.values, full.values, rtol=1e-4, atol=1e-4)


def test_a_decoder_goes_on_after_its_targets() -> None:
    """Also where the configuration names its start, and not that of generation."""
    module: Any = tiny_model("t5")
    module.config.decoder_start_token_id = 3
    model = hs.load((module, None))
    started = model.capture_generation([PROMPT], max_new_tokens=2)
    assert started.decoder.tokens.ids[0] == 3  # type: ignore[union-attr]
    prompt = model.encode([PROMPT], targets=[[3, 8, 9]])
    made = model.capture_generation(prompt, max_new_tokens=3, min_new_tokens=4)
    assert isinstance(made, Pair)
    ids = made.decoder.tokens.ids.tolist()
    assert len(ids) == 6 and ids[:3] == [3, 8, 9]
    whole = model.capture([PROMPT], targets=[ids])
    assert isinstance(whole, Pair)
    values = made.decoder.values
    torch.testing.assert_close(values, whole.decoder.values, rtol=1e-4, atol=1e-4)


def test_one_stack_of_two_may_be_asked_for_alone(tiny: Tiny) -> None:
    both = tiny("t5").capture_generation([PROMPT], max_new_tokens=3)
    for stack in ("encoder", "decoder"):
        one = tiny("t5").capture_generation(
            [PROMPT], max_new_tokens=3, sites=f"{stack}.layer.2"
        )
        assert torch.equal(one.values[0], both[f"{stack}.layer.2"])  # type: ignore[union-attr]


def test_decoders_that_generate_gives_other_positions_are_refused_with_the_reason() -> (
    None
):
    from hiddenscope.testing.models import _table

    row = _table()["roberta"]
    config = {**row["config"], "is_decoder": True}
    model = hs.load(
        (build({**row, "model_class": "RobertaForCausalLM", "config": config}), None)
    )
    with pytest.raises(
        PassError, match="times the rounding tolerance.*Generate first"
    ) as caught:
        model.capture_generation([PROMPT])
    assert "RobertaForCausalLM" in caught.value.problem


@pytest.mark.parametrize(
    ("family", "task"), [("bert", "masked-lm"), ("xlnet", "causal-lm")]
)
def test_models_that_see_ahead_are_refused(tiny: Tiny, family: str, task: str) -> None:
    with pytest.raises(PassError, match="it is not causal"):
        tiny(family, task).capture_generation([PROMPT])


def test_a_model_without_a_head_is_refused(tiny: Tiny) -> None:
    with pytest.raises(PassError, match="no language-model head"):
        tiny("gpt2", "base").capture_generation([PROMPT])


@pytest.mark.parametrize("config", [True, False], ids=["config", "keyword"])
def test_sampling_with_a_seed_is_the_same_text_again(tiny: Tiny, config: bool) -> None:
    sampling = {"do_sample": True, "temperature": 2.0, "top_k": 0}
    options = (
        {"generation_config": GenerationConfig(**sampling, pad_token_id=0)}
        if config
        else sampling
    )
    model, texts = tiny("llama"), []
    model.capture_generation([PROMPT], max_new_tokens=1)
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        texts.append(
            model.capture_generation(
                [PROMPT], max_new_tokens=8, **options
            ).tokens.ids.tolist()
        )  # type: ignore
    torch.manual_seed(3)
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == written(model.module, PROMPT, 8, **sampling)
    assert texts[0] != written(model.module, PROMPT, 8)


@pytest.mark.parametrize(
    "option",
    [{"num_beams": 2}, {"num_return_sequences": 2}, {"prompt_lookup_num_tokens": 2}],
)
def test_several_texts_in_one_pass_are_refused(
    tiny: Tiny, option: dict[str, int]
) -> None:
    with pytest.raises(PassError, match=next(iter(option))):
        tiny("llama").capture_generation([PROMPT], **option)
    assert (
        tiny("llama")
        .capture_generation([PROMPT], max_new_tokens=2, num_beams=1)
        .tokens.count
        == 1
    )  # type: ignore


def test_beams_that_the_models_own_settings_ask_for_are_left_out() -> None:
    module = tiny_model("llama")
    module.generation_config.num_beams = 3  # type: ignore[union-attr]
    states = hs.load((module, None)).capture_generation(
        [PROMPT], max_new_tokens=4, min_new_tokens=5
    )
    assert states.tokens.ids.tolist() == written(
        tiny_model("llama"), PROMPT, 4, min_new_tokens=4
    )  # type: ignore
    assert module.generation_config.num_beams == 3  # type: ignore[union-attr]


def test_passes_over_another_text_are_not_taken_for_this_one(tiny: Tiny) -> None:
    """Guidance runs the model twice a token, once without the prompt."""
    with pytest.raises(PassError, match="other tokens than those that it returned"):
        tiny("llama").capture_generation(
            [PROMPT], max_new_tokens=4, min_new_tokens=5, guidance_scale=2.0
        )


def test_the_end_of_a_text_is_never_fed_in_and_has_no_state(tiny: Tiny) -> None:
    model = tiny("llama")
    text = written(model.module, PROMPT, 12, min_new_tokens=12)[len(PROMPT) :]
    end = next(
        token
        for place, token in enumerate(text)
        if place >= 2 and token not in text[:place]
    )
    length = text.index(end)
    states = model.capture_generation([PROMPT], max_new_tokens=12, eos_token_id=end)
    assert states.tokens.ids.tolist() == PROMPT + text[:length]  # type: ignore[union-attr]
    whole = model.capture([PROMPT + text[:length]])
    torch.testing.assert_close(states.values, whole.values, rtol=1e-4, atol=1e-4)  # type: ignore[union-attr]


def test_nothing_to_generate_is_refused(tiny: Tiny) -> None:
    with pytest.raises(TextError, match="0 new tokens"):
        tiny("llama").capture_generation([PROMPT], max_new_tokens=0)


@pytest.mark.parametrize("family", ["gpt2"])
def test_the_window_bounds_what_may_be_written(tiny: Tiny, family: str) -> None:
    prompt = PROMPT * 24
    states = tiny(family).capture_generation(
        [prompt], max_new_tokens=8, min_new_tokens=8
    )
    assert len(states.tokens) == 128  # type: ignore[union-attr]
    with pytest.raises(TextError, match="that makes 129 tokens, and .* takes 128"):
        tiny(family).capture_generation([prompt], max_new_tokens=9)


def test_one_prompt_at_a_time() -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    with pytest.raises(PassError, match="got 2 prompts"):
        model.capture_generation(["the one", "the other"])
    states = model.capture_generation("the one", max_new_tokens=3)
    assert "".join(states.tokens.strings).startswith("<bos>the one")  # type: ignore[union-attr]


def test_a_window_shorter_than_the_text_is_tried_by_itself() -> None:
    module = configured("MistralForCausalLM", sliding_window=8)
    model = hs.load((module, None))
    assert 8 in attention_windows(model)
    states = model.capture_generation(PROMPT[:6], max_new_tokens=8, min_new_tokens=9)
    whole = model.capture([states.tokens.ids.tolist()])  # type: ignore[union-attr]
    assert states_disagreement(whole, states) < 8  # type: ignore[arg-type]


def test_windows_of_single_layers_and_of_attention_that_keeps_so_many_tokens_are_known() -> (
    None
):
    assert {4, 1024} <= attention_windows(
        hs.load((configured("NeoMMEForMaskedLM"), None))
    )
    assert 8 in attention_windows(
        hs.load((configured("DogeForCausalLM", keep_window_size=8), None))
    )


def test_the_trial_is_longer_than_a_window_and_than_two_where_the_text_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = {"sliding_window": None}
    model, tried = (
        hs.load((configured("DogeForCausalLM", **only, keep_window_size=20), None)),
        list[int](),
    )
    monkeypatch.setattr(
        generation, "_try_generation", lambda _, prompt: tried.append(prompt) or ""
    )
    for length in (12, 20, 21, 40, 41, 41):
        generation.refusal(model, length)
    assert tried == [6, 22, 42]
