"""Hold every analysis to the same laws, on a few families of models.

What is asked stands in tests/registry.py. `make conformance ANALYSES=1` holds the laws
on every text model of transformers.
"""

from functools import cache
from typing import Any

import pytest
import torch

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES, ANALYSIS
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.testing.untouched import state_of
from labs.fuzz.questions import QUESTIONS, asked_model
from tests.conformance.analyses import LAWS, Subject
from tests.registry import ENTRIES, IDS

FAMILIES = ("llama", "gpt2", "bert", "t5")
# The last layer of these is no sum of parts that are known.
REFUSED = {("bert", "contributions")}


def test_the_registry_has_every_analysis() -> None:
    assert set(ENTRIES) == set(ANALYSIS)
    for analysis in ANALYSES:
        entry = ENTRIES[analysis.word]
        assert bool(entry.results) == analysis.result, analysis.word
        assert (entry.request is not None) == analysis.in_app, analysis.word


@cache
def subject(family: str) -> Subject:
    module = tiny_model(family)
    if module.config.is_encoder_decoder:
        module.config.decoder_start_token_id = 1
    return Subject(module)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("law", LAWS)
def test_an_analysis_gives_what_plain_passes_give(family: str, law: str) -> None:
    if (family, law) in REFUSED:
        with pytest.raises(hs.errors.Error):
            LAWS[law](subject(family))
    else:
        assert LAWS[law](subject(family)) == ""


@pytest.mark.parametrize("word", ENTRIES)
def test_every_analysis_takes_a_module_with_its_tokenizer(word: str) -> None:
    module = _shared_module()
    result = ENTRIES[word].ask((module, tiny_tokenizer()))
    if ANALYSIS[word].result:
        assert (result.kind, result.source["model"]) == (word, "LlamaForCausalLM")
        assert len(result.data.variables) > 0
    else:
        assert len(result) > 0


@cache
def _shared_module() -> torch.nn.Module:
    return tiny_model("llama", layers=2)


@pytest.mark.parametrize("name", QUESTIONS)
def test_a_question_leaves_the_users_module_as_it_was(name: str) -> None:
    model = _shared_model()
    before, gradients = state_of(model.module), torch.is_grad_enabled()
    expected: Any = _expected()
    QUESTIONS[name](model)
    assert state_of(model.module) == before
    assert torch.is_grad_enabled() == gradients
    assert torch.equal(model.capture(IDS).values, expected)


@cache
def _shared_model() -> hs.Model:
    return asked_model()


@cache
def _expected() -> torch.Tensor:
    return _shared_model().capture(IDS).values
