"""Laws of the effects of edges. That an exact one is a run with that edge alone, and an
estimate what autograd gives, is held to `tests/oracles`.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope import Site
from hiddenscope.causes.encoding import ask_contrasts
from hiddenscope.causes.estimate import Effects
from hiddenscope.causes.wiring import Wiring
from hiddenscope.passes.stepping import Stepper
from hiddenscope.states.arrays import Floats
from hiddenscope.testing import tiny_model
from tests.configurations import configured
from tests.slices import with_slow

Tiny = Callable[..., hs.Model]
CLEAN, CORRUPT = [7, 99, 23, 64, 31], [7, 45, 23, 60, 31]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)
METHODS = ["integrated", "gradient", "dropped"]


def effects_of(
    model: hs.Model,
    contrast: hs.Contrast = CONTRAST,
    into: Any = "corrupt",
    neurons: tuple[Site, ...] = (),
) -> Effects:
    (encoded,) = ask_contrasts(model, contrast).encodings
    return Effects(model, Wiring.of(model, neurons), encoded, into)


def exact(effects: Effects) -> Floats:
    """Return the exact effects of all edges [writer, reader]."""
    possible = effects.wiring.possible
    found = np.full(possible.shape, np.nan)
    edges = [(int(writer), int(reader)) for writer, reader in np.argwhere(possible)]
    amounts: list[int] = []
    found[possible] = effects.exact(edges, amounts.append)
    assert sum(amounts) == len(edges)
    return found


def test_what_chooses_the_tokens_reads_the_stream_of_the_run() -> None:
    """An indexer beside the queries is no reader: no edge changes what it chooses."""
    module: Any = configured("MiniMaxM3VLForCausalLM")
    effects = effects_of(hs.load((module, None)))
    writers = [str(writer) for writer in effects.wiring.writers]
    readers = [str(reader) for reader in effects.wiring.readers]
    runs, block, most = effects.runs, module.model.layers[1], 0.0
    with torch.no_grad():
        for number, head in product(range(len(writers)), range(2)):
            reader = readers.index(f"layer.2.attn.v.{head}")
            if not effects.wiring.possible[number, reader]:
                continue
            stream = runs.base.states[Site(1)] + runs.differences[number]
            values = block.self_attn.v_proj(block.input_layernorm(stream))
            own = slice(16 * head, 16 * (head + 1))

            def put(_: Any, __: Any, output: Tensor) -> None:
                output[..., own] = values[..., own]  # noqa: B023

            handle = block.self_attn.v_proj.register_forward_hook(put)
            logits = module(torch.tensor([CORRUPT])).logits[:, -1]
            handle.remove()
            expected = float(effects.measures(logits)[0, 0])
            (found,) = effects.exact([(number, reader)], lambda amount: None)
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-4)
            most = max(most, abs(found))
    assert most > 0.1


ONE_NORM = ["PhiForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM"]
ONE_NORM += ["CodeGenForCausalLM", "FalconForCausalLM"]


@pytest.mark.parametrize(
    "name",
    with_slow(["GPT2LMHeadModel", "GPTJForCausalLM"], [*ONE_NORM, "LlamaForCausalLM"]),
)
def test_an_estimate_is_exact_for_changes_that_are_small(name: str) -> None:
    """Where runs hardly differ, the rest of the model is linear between them.

    Many of these have attention and MLP side by side, and one norm for both.
    """
    module = configured(name).double()
    weight = module.get_input_embeddings().weight
    with torch.no_grad():
        weight[45] = weight[99] + 1e-2 * (weight[45] - weight[99])
    contrast = hs.Contrast([7, 99, 23, 64, 31], [7, 45, 23, 64, 31], 60, 70)
    effects = effects_of(hs.load((module, None)), contrast)
    readers = effects.wiring.readers
    edges = {}
    for kind in ("q", "k", "v", "mlp"):
        own = effects.wiring.possible & [reader.kind == kind for reader in readers]
        edges[kind] = np.argwhere(own)[::5]
    for kind, some in edges.items():
        found = effects.exact(some.tolist(), lambda amount: None)
        for method in ("integrated", "gradient"):
            estimated = effects.estimate(method)[tuple(some.T)]
            off = np.abs(estimated - found).sum()
            assert off < 0.05 * np.abs(found).sum(), (method, kind)


def test_what_writes_the_same_has_no_effect() -> None:
    module: Any = tiny_model("granite")
    with torch.no_grad():
        # Head 1 of block 2 writes nothing.
        module.model.layers[1].self_attn.o_proj.weight[:, 16:32] = 0
    effects = effects_of(hs.load((module, None)))
    writer = effects.wiring.writers.index(Site(2, "attn.head.1"))
    possible = effects.wiring.possible[writer]
    assert (exact(effects)[writer][possible] == 0).all()
    for method in METHODS:
        found = effects.estimate(method)[writer]  # type: ignore[arg-type]
        assert (found[possible] == 0).all()


def test_an_edge_of_a_neuron_is_its_share_of_what_its_mlp_writes() -> None:
    """The estimate is linear in what is written, but for the reader itself."""
    module: Any = tiny_model("granite")
    with torch.no_grad():
        # One neuron of block 1 writes all that its MLP writes.
        weight = module.model.layers[0].mlp.down_proj.weight
        weight[:, torch.arange(64) != 7] = 0
    neurons = Site(1, "mlp.neuron.7"), Site(1, "mlp.neuron.8")
    effects = effects_of(hs.load((module, None)), neurons=neurons)
    mlp = effects.wiring.writers.index(Site(1, "mlp"))
    for found in (effects.estimate("integrated"), exact(effects)):
        np.testing.assert_allclose(found[-2], found[mlp], atol=1e-5)
        possible = effects.wiring.possible[-1]
        assert (found[-1][possible] == 0).all()


def test_few_rows_at_a_time_are_all_rows(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a long text."""
    effects = effects_of(tiny("llama"))
    estimated, found = effects.estimate("integrated"), exact(effects)
    monkeypatch.setattr(Stepper, "rows_at_a_time", 7)
    np.testing.assert_allclose(effects.estimate("integrated"), estimated, atol=1e-5)
    np.testing.assert_allclose(exact(effects), found, atol=1e-5)


@pytest.mark.slow
def test_half_precision(tiny: Tiny) -> None:
    half = effects_of(hs.load((tiny_model("llama").to(torch.bfloat16), None)))
    full = effects_of(tiny("llama"))
    for of in (exact, lambda effects: effects.estimate("integrated")):
        found, expected = of(half), of(full)
        np.testing.assert_allclose(found, expected, atol=0.1)
        assert np.nanmax(np.abs(found - expected)) > 0
