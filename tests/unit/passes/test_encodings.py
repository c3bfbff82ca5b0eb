"""What people have at hand is taken: a name or a module for a model, a tokenizer's
output or a chat for texts.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

import hiddenscope as hs
from hiddenscope.errors import LoadError, SiteError, TextError
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXTS = ["The cat sat.", "A dog", "Is it", "The end."] * 3
LABELLED = (TEXTS, [0, 1] * 6)
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "The cat sat."}]
ANSWERED = [*CHAT, {"role": "assistant", "content": "A dog"}]


def _averaged(model: Any) -> hs.Result:
    """Average several texts, which are drawn from."""
    texts = [f"{TEXTS[0]} {TEXTS[1]} {text}" for text in TEXTS[:3]]
    sampling = hs.Sampling(per_text=2)
    return hs.visibility(model, texts, sites="layer.*", sampling=sampling)


def test_many_texts_are_averaged_with_a_module_and_its_tokenizer() -> None:
    result = _averaged((tiny_model("llama"), tiny_tokenizer()))
    assert result.source["model"] == "LlamaForCausalLM"
    assert result.facts["aligned"]["groups"] == 3


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return tiny_model("llama")


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def test_a_name_and_a_bare_module_are_models(module: Any, tmp_path: Path) -> None:
    module.save_pretrained(tmp_path)
    wanted = hs.lens((module, None), [[5, 6, 7]]).data["probability"].values
    for given in (module, tmp_path, str(tmp_path)):
        assert (hs.lens(given, [[5, 6, 7]]).data["probability"].values == wanted).all()
    sides = hs.compare(module, [[5, 6, 7]], other=str(tmp_path))
    assert float(sides.data["l2"].max()) == 0
    with pytest.raises(LoadError, match="No model"):
        hs.lens("smolm2", "A text.")


def test_a_module_is_loaded_with_its_tokenizer(
    module: Any, tokenizer: Any, tmp_path: Path
) -> None:
    pair, apart = hs.load((module, tokenizer)), hs.load(module, tokenizer)
    assert torch.equal(pair.capture(TEXTS[0]).values, apart.capture(TEXTS[0]).values)
    module.save_pretrained(tmp_path)
    assert hs.load(tmp_path, dtype="float64", device="cpu").dtype == torch.float64
    with pytest.raises(LoadError):
        hs.load(tmp_path, tokenizer=tokenizer)


def test_what_a_tokenizer_returned_is_taken_without_its_padding(
    module: Any, tokenizer: Any
) -> None:
    model = hs.load(module, tokenizer)
    wanted = model.encode(TEXTS[:2]).ids
    for side in ("left", "right"):
        tokenizer.padding_side = side
        encoding = tokenizer(TEXTS[:2], return_tensors="pt", padding=True)
        assert model.encode(encoding).ids == wanted
    assert model.encode(tokenizer(TEXTS[0])).ids == wanted[:1]
    assert model.encode(torch.tensor(wanted[0])).ids == wanted[:1]
    assert model.encode(torch.tensor([wanted[0], wanted[0]])).ids == (wanted[0],) * 2
    refused: list[Any] = [
        torch.tensor(5),
        torch.zeros(1, 2, 3, dtype=torch.long),
        {"ids": [5]},
        {"input_ids": [[5, 6]], "token_type_ids": [[0, 1]]},
        {"input_ids": [[5, 6]], "position_ids": [[1, 0]]},
        {"input_ids": [[5, 6]], "decoder_input_ids": [[0, 1]]},
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 0, 1]]},
        {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1]]},
    ]
    for given in refused:
        with pytest.raises(TextError):
            model.encode(given)


def test_chat_messages_go_through_the_tokenizers_own_template(
    module: Any, tokenizer: Any
) -> None:
    model = hs.load(module, tokenizer)
    with pytest.raises(TextError, match="no chat template"):
        model.encode(CHAT)
    with pytest.raises(TextError, match="without a tokenizer"):
        hs.load(module).encode(CHAT)
    tokenizer.chat_template = TEMPLATE
    for chat, opened in ((CHAT, True), (ANSWERED, False)):
        text = tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=opened
        )
        inputs = model.encode(chat)
        assert inputs.texts == (text,)
        assert (
            list(inputs.ids[0])
            == tokenizer(text, add_special_tokens=False)["input_ids"]
        )
    assert len(model.encode([CHAT, ANSWERED])) == 2
    assert hs.embed(model, CHAT).shape[0] == 1
    assert hs.profile(model, ANSWERED).facts is not None
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(TextError, match="no system role"):
        model.encode(CHAT)


def test_a_number_is_a_layer_of_states(module: Any) -> None:
    states = hs.load(module).capture([[5, 6, 7]])
    assert isinstance(states, hs.States)
    for layer in (0, 3):
        assert torch.equal(states[layer], states[f"layer.{layer}"])
    for wrong in (4, -1, True):
        with pytest.raises(SiteError):
            states[wrong]
