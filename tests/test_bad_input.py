"""What a model cannot take is refused before it is run: an error of ours, of a builtin's kind, that says what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import Error, NotFinite, PassError, SiteError, TextError
from hiddenscope.testing import nan_weight, tiny_model, tiny_tokenizer

Tiny = Callable[..., hs.Model]
TEXT = [7, 99, 23, 64, 31]


def refused(
    work: Callable[[], Any], kind: type[Error], builtin: type[Exception], *words: str, model: hs.Model, hanging: Any
) -> Error:
    """The error that some work ends in, once it has been seen to be a good one and to leave nothing behind."""
    passes: list[int] = []
    handle = model.module.register_forward_pre_hook(lambda *_: passes.append(1))
    before = hanging(model.module)
    with pytest.raises(kind) as caught:
        work()
    assert hanging(model.module) == before
    handle.remove()
    error = caught.value
    assert isinstance(error, builtin)
    assert error.problem and error.reason and error.remedy and error.remedy.endswith((".", "?"))
    assert all(word in str(error) for word in words), str(error)
    assert not passes or kind in (NotFinite, PassError)
    return error


TEXTS: dict[str, tuple[Any, str]] = {
    "an empty text": ("", "there is nothing in it"),
    "an empty text among others": (["the one", ""], "Text 1"),
    "white space": (" \n\t\u3000", "nothing in it but white space"),
    "a lone surrogate": ("the \ud800 one", "character at 4 is a lone surrogate"),
    "too long": ("the cat " * 200, "takes 128"),
    "100k characters": ("a" * 100_000, "takes 128"),
    "too many ids": ([[5] * 129], "129 tokens and GPT2LMHeadModel takes 128"),
    "a negative id": ([[5, -1]], "id -1 is outside the vocabulary of GPT2LMHeadModel, 0 to 127"),
    "an id too large": ([[5, 6], [128]], "Text 1: id 128"),
    "an absurd id": ([[2**70]], "outside the vocabulary"),
    "strings and ids": (["the one", [5, 6]], "strings only, or lists of token ids only"),
    "ids and strings": ([5, "the one"], "strings only, or lists of token ids only"),
    "nothing": ([], "there are none"),
    "no ids": ([[]], "it has no tokens"),
    "flags": ([[True, False]], "no list of whole numbers"),
    "flat flags": ([True, False], "no list of whole numbers"),
    "fractions": ([[5.0, 6.5]], "no list of whole numbers"),
    "a tensor of fractions": (torch.tensor([[5.0]]), "no list of whole numbers"),
    "nested too deep": ([[[5, 6]]], "no list of whole numbers"),
    "None": (None, "it is NoneType"),
    "None among texts": ([None], "no list of whole numbers"),
    "a number": (5, "it is int"),
    "bytes": (b"the one", "it is bytes"),
    "bytes among texts": ([b"the one"], "text 0 is bytes"),
    "what a tokenizer gives": ({"input_ids": [[5, 6]]}, "it is dict"),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_a_model_cannot_take(tiny: Tiny, case: str, hanging: Any) -> None:
    model, (texts, words) = tiny("gpt2"), TEXTS[case]
    ways = [lambda: model.capture(texts), lambda: hs.record(model, texts), lambda: model.capture_generation(texts)]
    model.capture_generation([TEXT], max_new_tokens=1)
    for work in ways:
        refused(work, TextError, ValueError, words, model=model, hanging=hanging)


def test_a_text_that_is_too_long_is_said_to_be_how_long_and_may_be_cut(tiny: Tiny, hanging: Any) -> None:
    model = tiny("bert")
    text = "the cat sat " * 40
    length = len(model.tokenizer(text, verbose=False).input_ids)
    words = (f"{length:,} tokens", "takes 128", "truncate=True")
    refused(lambda: model.capture(text), TextError, ValueError, *words, model=model, hanging=hanging)
    states = model.capture([text, "on"], truncate=True)
    assert states.tokens.lengths.tolist()[0] == 128
    assert states.of(0).tokens.strings[-1] == "<sep>", "a cut text ends as every text does"
    assert model.capture([[5] * 500], truncate=True).tokens.ids.tolist() == [5] * 128
    assert len(model.capture("a" * 100_000, "layer.1", truncate=True).tokens) == 128
    assert model.capture(text[:30]).tokens.lengths.tolist()[0] < 128, "and nothing is cut that was not asked for"


def test_a_text_without_a_tokenizer(hanging: Any) -> None:
    model = hs.load((tiny_model("gpt2"), None))
    words = ("'the one'", "without a tokenizer", "lists of token ids")
    refused(lambda: model.capture("the one"), TextError, ValueError, *words, model=model, hanging=hanging)
    assert model.capture([TEXT]).tokens.strings == tuple(map(str, TEXT))


SITES = {
    "layer.40": "Did you mean 'layer.",
    "layer.3.attnn": "layer.3.attn",
    "finl": "final",
    "layer.1.cross": "layer.0 to layer.3",
    "hidden_states[9]": "hidden_states[9]",
    "encoder.layer.1": "Did you mean 'layer.1'?",
    "": "",
}


@pytest.mark.parametrize("site", SITES)
def test_sites_that_a_model_has_not(tiny: Tiny, site: str, hanging: Any) -> None:
    model = tiny("gpt2")
    for work in (lambda: model.capture([TEXT], site), lambda: hs.record(model, [TEXT], site)):
        refused(work, SiteError, LookupError, SITES[site], model=model, hanging=hanging)
    with pytest.raises(SiteError), hs.recording(model, site):
        pass


def test_logits_of_a_model_without_a_head(tiny: Tiny, hanging: Any) -> None:
    model = tiny("gpt2", "base")
    words = ("Logits of GPT2Model", "no head", "task='causal-lm'")
    work = lambda: hs.record(model, [TEXT], logits=True)  # noqa: E731
    refused(work, PassError, RuntimeError, *words, model=model, hanging=hanging)


def test_logits_that_are_no_row_a_token(hanging: Any) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = hs.load((BertForSequenceClassification(BertConfig(vocab_size=128, **sizes)).eval(), None))
    work = lambda: hs.record(model, [TEXT, TEXT], logits=True)  # noqa: E731
    refused(work, PassError, RuntimeError, "[2, 2], not one row a token", model=model, hanging=hanging)
    assert model.capture([TEXT]).values.shape == (3, 5, 32)


def test_targets_that_do_not_fit(tiny: Tiny, hanging: Any) -> None:
    one, two = tiny("gpt2"), tiny("bart")
    for work in (
        lambda: one.capture([TEXT], targets=[TEXT]),
        lambda: hs.record(one, [TEXT], targets=[TEXT]),
    ):
        refused(work, PassError, RuntimeError, "one stack", model=one, hanging=hanging)
    cases: list[tuple[Any, str]] = [
        ([TEXT, TEXT], "there are 2 targets"),
        ([[]], "no tokens"),
        ([], "there are none"),
        ([[500]], "id 500"),
        ([[5] * 129], "takes 128"),
        ([["a", 5]], "whole numbers"),
    ]
    for targets, words in cases:
        for work in (
            lambda targets=targets: two.capture([TEXT], targets=targets),
            lambda targets=targets: hs.record(two, [TEXT], targets=targets),
        ):
            refused(work, TextError, ValueError, words, model=two, hanging=hanging)
    cut = two.capture([TEXT], targets=["the cat " * 100], truncate=True)
    assert len(cut.decoder.tokens) == 128  # type: ignore[union-attr]


def test_a_decoder_without_a_start_token(hanging: Any) -> None:
    module = tiny_model("t5")
    module.config.decoder_start_token_id = module.generation_config.decoder_start_token_id = None  # type: ignore
    model = hs.load((module, None))
    words = ("decoder_start_token_id", "`targets=`")
    refused(lambda: model.capture([TEXT]), TextError, ValueError, *words, model=model, hanging=hanging)
    assert model.capture([TEXT], targets=[[5]]).decoder.tokens.ids.tolist() == [5]  # type: ignore[union-attr]


@pytest.mark.parametrize(("part", "site"), [("mlp.down_proj", "layer.2"), ("self_attn.q_proj", "layer.2")])
def test_a_nan_in_the_weights_is_named_by_the_site_where_it_comes_up(part: str, site: str, hanging: Any) -> None:
    module = tiny_model("llama")
    model = hs.load((module, tiny_tokenizer()))
    right = model.capture([TEXT], "layer.0-1").values
    with torch.no_grad():
        module.get_submodule(f"model.layers.1.{part}").weight[0, 0] = torch.nan  # type: ignore[index, operator]
    words = ("a NaN", f"at {site}, token", "text 0, position 0", "weights of the block")
    for work in (lambda: model.capture([TEXT, TEXT[:2]]), lambda: hs.record(model, [TEXT], logits=True)):
        refused(work, NotFinite, ArithmeticError, *words, model=model, hanging=hanging)
    again = lambda: hs.load((module, None)).capture([TEXT])  # noqa: E731
    refused(again, NotFinite, ArithmeticError, f"a NaN at {site}", model=model, hanging=hanging)
    assert torch.equal(model.capture([TEXT], "layer.0-1").values, right), "what is computed before it is right"
    with pytest.raises(NotFinite, match="layer.2.mid" if part.startswith("self") else "layer.2.mlp"):
        model.capture([TEXT], "layer.2.mid,layer.2.mlp,layer.2")


def test_a_nan_in_the_last_block_in_one_embedding_and_in_the_head(hanging: Any) -> None:
    module = tiny_model("llama")
    nan_weight(module, block=3)
    model = hs.load((module, None))
    assert not model.batches and "NotFinite" in model.batching.why
    refused(lambda: model.capture([TEXT]), NotFinite, ArithmeticError, "at layer.3", model=model, hanging=hanging)
    module = tiny_model("llama")
    model = hs.load((module, None))
    with torch.no_grad():
        module.model.embed_tokens.weight[99, 3] = torch.inf  # type: ignore[union-attr, index]
    words = ("an infinity at layer.0", "position 1")
    refused(lambda: model.capture([TEXT]), NotFinite, ArithmeticError, *words, model=model, hanging=hanging)
    assert model.capture([[5, 6]]).values.isfinite().all()
    with torch.no_grad():
        module.lm_head.weight[0, 0] = torch.nan  # type: ignore[union-attr, index]
    work = lambda: hs.record(model, [[5, 6]], logits=True)  # noqa: E731
    words = ("Logits of LlamaForCausalLM", "a NaN", "weights of the head")
    refused(work, NotFinite, ArithmeticError, *words, model=model, hanging=hanging)


def test_a_nan_in_a_decoder_is_named_with_its_stack(hanging: Any) -> None:
    module = tiny_model("bart")
    model = hs.load((module, None))
    with torch.no_grad():
        module.model.decoder.layers[1].fc1.weight[0, 0] = torch.nan  # type: ignore
    refused(lambda: model.capture([TEXT]), NotFinite, ArithmeticError, "decoder.layer.2", model=model, hanging=hanging)
    with pytest.raises(NotFinite, match="a NaN at decoder.layer.2, in a trial pass"):
        hs.load((module, None))
    assert model.capture([TEXT], "encoder.layer.*").values.isfinite().all()
