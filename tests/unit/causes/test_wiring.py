"""Laws of the wiring: neurons write what their MLP writes, and models whose parts do not
sum up are refused.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope import Site
from hiddenscope.causes.encoding import ask_contrasts
from hiddenscope.causes.wiring import Runs, Wiring
from hiddenscope.errors import PassError, TextError
from hiddenscope.testing import tiny_model

Tiny = Callable[..., hs.Model]

CONTRAST = hs.Contrast([7, 99, 23, 64, 31], [7, 45, 23, 60, 31], 60, 70)
REFUSED = {
    "bert": "block 1 norms the sum of its parts and the stream",
    "mamba": "block 1 adds no attention and MLP to its stream",
    "deepseek_v4": "block 1 adds no attention and MLP to its stream",
    "albert": "block 1",
    "cpmant": "block 1",
}


def runs_of(model: hs.Model, *neurons: Site) -> Runs:
    (encoded,) = ask_contrasts(model, CONTRAST).encodings
    return Runs.of(model, Wiring.of(model, neurons), encoded, "corrupt")


def test_heads_that_share_keys_read_once(tiny: Tiny) -> None:
    wiring = Wiring.of(tiny("granite"))
    columns = wiring.columns(1)
    counts = {kind: len(numbers) for kind, numbers in columns.items()}
    assert counts == {"q": 4, "k": 2, "v": 2, "mlp": 1}


def test_neurons_write_what_their_mlp_writes(tiny: Tiny) -> None:
    model = tiny("llama")
    neurons = [Site(2, f"mlp.neuron.{number}") for number in range(64)]
    runs = runs_of(model, *neurons)
    wiring = runs.wiring
    mlp = wiring.writers.index(Site(2, "mlp"))
    assert wiring.summed == len(wiring.writers) - 64
    summed = runs.differences[wiring.summed :].sum(0)
    torch.testing.assert_close(summed, runs.differences[mlp], rtol=1e-4, atol=1e-5)
    same = np.broadcast_to(wiring.possible[mlp], (64, len(wiring.readers)))
    np.testing.assert_array_equal(wiring.possible[wiring.summed :], same)


@pytest.mark.parametrize("family", REFUSED)
def test_families_whose_parts_do_not_sum_up_are_refused(
    tiny: Tiny, family: str
) -> None:
    with pytest.raises(PassError, match=REFUSED[family]) as caught:
        Wiring.of(tiny(family))
    assert caught.value.problem.startswith("Cannot tell the edges of ")
    assert caught.value.remedy == "Use hs.patch."
    assert "\n" not in str(caught.value)


def test_prompts_that_do_not_align_are_refused(tiny: Tiny) -> None:
    model = tiny("llama")
    wiring = Wiring.of(model)
    for corrupt in ([7, 45, 31], [7, 99, 23, 64, 31, 5], [99, 23, 64, 31, 7]):
        contrast = hs.Contrast([7, 99, 23, 64, 31], corrupt, 60, 70)
        (encoded,) = ask_contrasts(model, contrast).encodings
        with pytest.raises(TextError, match="two prompts that do not align"):
            Runs.of(model, wiring, encoded, "corrupt")


def test_a_stream_that_something_else_moves_is_refused() -> None:
    """A hook of the user's adds to a block what none of its parts writes."""
    module: Any = tiny_model("llama")
    model = hs.load((module, None))
    runs_of(model)

    def add(_: Any, __: Any, output: Any) -> Any:
        return output + torch.linspace(0, 1, output.shape[1])[:, None]

    handle = module.model.layers[1].register_forward_hook(add)
    try:
        with pytest.raises(PassError, match="does not sum to its last layer"):
            runs_of(model)
    finally:
        handle.remove()


def test_a_large_token_says_nothing_of_the_others() -> None:
    """What is summed is off by rounding, and that of a sink is large."""
    module: Any = tiny_model("llama", layers=6)
    with torch.no_grad():
        module.model.embed_tokens.weight[7] *= 1e4
    model = hs.load((module.to(torch.bfloat16), None))
    assert runs_of(model).base.states[Site(6)].norm(dim=-1)[0] > 1e3
