"""A copy with random weights: another model, and the first one as it was."""

import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import ArgumentError
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.testing.untouched import state_of

IDS = [[5, 6, 7], [8, 9, 10, 11]]


def values(model: hs.Model) -> torch.Tensor:
    states: torch.Tensor = model.capture(IDS).values  # type: ignore[union-attr, assignment]
    return states


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_the_model_is_as_it_was_and_its_copy_is_another(family: str) -> None:
    model = hs.load((tiny_model(family), tiny_tokenizer()))
    before, expected = state_of(model.module), values(model)
    control = model.randomised()
    assert not torch.equal(values(control), expected)
    assert torch.equal(values(model), expected)
    assert state_of(model.module) == before
    own = {weight.data_ptr() for weight in model.module.parameters() if weight.ndim > 1}
    drawn = {
        weight.data_ptr() for weight in control.module.parameters() if weight.ndim > 1
    }
    assert not own & drawn
    # Its states are proved by passes of its own.
    assert control.anatomy is not model.anatomy
    assert control.source().weights != model.source().weights
    assert control.encode("The cat").ids == model.encode("The cat").ids


def test_a_seed_decides_the_weights() -> None:
    model = hs.load((tiny_model("llama", layers=2), None))
    first = values(model.randomised(seed=3))
    torch.manual_seed(99)
    assert torch.equal(values(model.randomised(seed=3)), first)
    assert not torch.equal(values(model.randomised(seed=4)), first)


def test_matrices_keep_their_spread_and_vectors_their_values() -> None:
    module = tiny_model("gpt2", layers=2)
    control = hs.load(module).randomised().module
    drawn = dict(control.named_parameters())
    for name, weight in module.named_parameters():
        if weight.ndim < 2:
            assert torch.equal(drawn[name], weight)
        else:
            assert drawn[name].std().item() == pytest.approx(weight.std().item(), 0.1)
    assert control.get_output_embeddings().weight is (  # type: ignore[operator]
        control.get_input_embeddings().weight  # type: ignore[operator]
    )


def test_what_is_stored_names_the_control() -> None:
    model = hs.load((tiny_model("llama", layers=2), None))
    assert model.randomised(2).name == f"{model.name} with random weights (seed 2)"
    with pytest.raises(ArgumentError, match="seed"):
        model.randomised("0")  # type: ignore[arg-type]
