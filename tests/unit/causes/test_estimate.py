"""Laws of the effects of edges: an exact one is a run with that edge alone, and an
estimate is what autograd gives in plain PyTorch.
"""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hiddenscope as hs
from hiddenscope import Site
from hiddenscope.causes.encoding import ask_contrasts
from hiddenscope.causes.estimate import Effects
from hiddenscope.causes.rewire import rewire
from hiddenscope.causes.wiring import Wiring
from hiddenscope.passes.stepping import Stepper
from hiddenscope.states.arrays import Floats
from hiddenscope.testing import tiny_model
from tests.configurations import configured
from tests.slices import with_slow
from tests.unit.causes.by_hand import HANDS, Run, grouped_llama

Tiny = Callable[..., hs.Model]
Hanging = Callable[[nn.Module], dict[str, Any]]

CLEAN, CORRUPT = [7, 99, 23, 64, 31], [7, 45, 23, 60, 31]
CONTRAST = hs.Contrast(CLEAN, CORRUPT, answer=60, other=70)
FAST = ["llama", "gptj"]
SLOW = [
    "gemma3_text",
    "granite",
    "gpt2",
    "qwen3",
    "opt",
    "bloom",
    "gpt_neox",
    "falcon",
    "mixtral",
]
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


@pytest.mark.parametrize("into", with_slow(["corrupt"], ["clean"]))
@pytest.mark.parametrize("family", with_slow(FAST, SLOW))
def test_an_exact_edge_is_a_run_with_that_edge_alone(
    tiny: Tiny, family: str, into: str
) -> None:
    """A sweep enters above the reader; a rewired run steps through every block."""
    effects = effects_of(tiny(family), into=into)
    possible = effects.wiring.possible
    edges = np.argwhere(possible)
    some = edges[:: 1 if family == "llama" else 5]
    changed = np.zeros((len(some), *possible.shape), dtype=bool)
    for row, (writer, reader) in enumerate(some):
        changed[row, writer, reader] = True
    logits = rewire(effects.model, effects.stepper, effects.runs, changed)
    expected = effects.measures(logits)[:, 0].numpy()
    found = exact(effects)
    assert np.isnan(found[~possible]).all()
    np.testing.assert_allclose(found[tuple(some.T)], expected, rtol=1e-4, atol=1e-4)
    assert np.abs(expected).max() > 0.1


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


@pytest.mark.parametrize("family", with_slow(["llama"], ["gptj"]))
def test_exact_edges_are_those_of_a_model_written_by_hand(family: str) -> None:
    module = HANDS[family]()
    effects = effects_of(hs.load((module, None)))
    wiring = effects.wiring
    found = exact(effects)
    clean, corrupt = Run(module, CLEAN), Run(module, CORRUPT)

    def difference(run: Run) -> float:
        return float(run.logits[-1, 60] - run.logits[-1, 70])

    span = difference(clean) - difference(corrupt)
    for writer, reader in np.argwhere(wiring.possible)[::13]:
        edge = str(wiring.writers[writer]), str(wiring.readers[reader])
        run = Run(module, CORRUPT, clean.written, [edge])
        effect = (difference(run) - difference(corrupt)) / span
        assert found[writer, reader] == pytest.approx(effect, rel=1e-4, abs=1e-4), edge


def gradients(module: Any, share: float, dropped: int | None) -> dict[str, Tensor]:
    """Return the gradients of the logit difference in plain PyTorch, by part.

    They are those of what enters the projection of all heads, and of every MLP's
    input, on a share of the way between the runs, with what one layer adds detached.
    """
    model = module.model
    base, other = (model.embed_tokens.weight[ids].detach() for ids in (CORRUPT, CLEAN))
    inputs: dict[str, Tensor] = {}
    handles = []

    def note(name: str, _: Any, args: Any) -> None:
        inputs[name] = args[0]

    def cut(_: Any, args: Any, output: Tensor) -> Tensor:
        return args[0] + (output - args[0]).detach()

    for layer, block in enumerate(model.layers):
        parts = {"heads": block.self_attn.o_proj, "mlp": block.mlp}
        for name, part in parts.items():
            hook = partial(note, f"{name}.{layer + 1}")
            handles.append(part.register_forward_pre_hook(hook))
        if layer == dropped:
            handles.append(block.register_forward_hook(cut))
    embeds = (base + share * (other - base))[None].requires_grad_()
    logits = module(inputs_embeds=embeds).logits[0, -1]
    for handle in handles:
        handle.remove()
    live = [*inputs.values()]
    found = torch.autograd.grad(
        logits[60] - logits[70], live, allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, [slope[0] for slope in found], strict=True))


PASSES: dict[str, list[tuple[float, int | None]]] = {
    "integrated": [(step / 5, None) for step in range(5)],
    "gradient": [(0.0, None)],
    "dropped": [(0.0, layer) for layer in range(3)],
}


@pytest.mark.parametrize("method", with_slow(["integrated", "dropped"], ["gradient"]))
def test_an_estimate_is_that_of_autograd_in_plain_pytorch(method: Any) -> None:
    module = grouped_llama()
    effects = effects_of(hs.load((module, None)))
    wiring = effects.wiring
    found = effects.estimate(method)
    assert np.isnan(found[~wiring.possible]).all()
    clean, corrupt = Run(module, CLEAN), Run(module, CORRUPT)
    span = effects.measures.span
    passes = [gradients(module, *options) for options in PASSES[method]]
    for writer, reader in np.argwhere(wiring.possible)[::13]:
        place = wiring.readers[reader]
        if place.kind == "logits":
            continue
        edge = str(wiring.writers[writer]), str(place)
        inside = Run(module, CORRUPT, clean.written, [edge]).inside
        values = []
        for slope in passes:
            value = 0.0
            if place.kind == "mlp":
                away = inside[str(place)] - corrupt.inside[str(place)]
                value += float((away * slope[f"mlp.{place.layer}"]).sum())
            for head in range(4) if place.kind != "mlp" else ():
                name = f"layer.{place.layer}.attn.head.{head}"
                away = inside[name] - corrupt.inside[name]
                columns = slope[f"heads.{place.layer}"][:, 16 * head : 16 * head + 16]
                value += float((away * columns).sum())
            values.append(abs(value) if method == "dropped" else value)
        scale = abs(span) if method == "dropped" else span
        # A reader whose own layer is dropped has no gradient, and does not count.
        counted = len(passes) - (method == "dropped")
        expected = pytest.approx(np.sum(values) / counted / scale, abs=1e-5)
        assert found[writer, reader] == expected, edge


@pytest.mark.parametrize("family", with_slow(FAST, SLOW))
def test_an_estimate_into_the_logits_is_exact(tiny: Tiny, family: str) -> None:
    effects = effects_of(tiny(family))
    last = len(effects.wiring.readers) - 1
    edges = [(writer, last) for writer in range(len(effects.wiring.writers))]
    found = effects.exact(edges, lambda amount: None)
    for method in ("integrated", "gradient"):
        np.testing.assert_array_equal(effects.estimate(method)[:, -1], found)


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
            assert off < 0.01 * np.abs(found).sum(), (method, kind)


@pytest.mark.parametrize("into", ["corrupt", "clean"])
def test_dropped_gradients_are_sizes(tiny: Tiny, into: str) -> None:
    """They are not below zero, whichever answer a run prefers, and do not cancel."""
    model = tiny("llama")
    turned = hs.Contrast(CLEAN, CORRUPT, answer=70, other=60)
    for contrast in (CONTRAST, turned):
        effects = effects_of(model, contrast, into)
        sizes = effects.estimate("dropped")[:, :-1]
        assert np.nanmin(sizes) >= 0 and np.nanmax(sizes) > 0.01


def test_what_writes_the_same_has_no_effect() -> None:
    module: Any = grouped_llama()
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


def test_what_every_part_writes_together_is_the_other_run(tiny: Tiny) -> None:
    """Into the logits, the edges together are all of the answer."""
    effects = effects_of(tiny("llama"))
    changed = effects.wiring.possible[None].copy()
    changed[:, :, :-1] = False
    logits = rewire(effects.model, effects.stepper, effects.runs, changed)
    assert float(effects.measures(logits)[0, 0]) == pytest.approx(1, abs=1e-4)


def test_an_edge_of_a_neuron_is_its_share_of_what_its_mlp_writes() -> None:
    """The estimate is linear in what is written, but for the reader itself."""
    module: Any = grouped_llama()
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


@pytest.mark.parametrize(
    ("method", "mode"),
    [
        ("dropped", torch.inference_mode),
        pytest.param("integrated", torch.no_grad, marks=pytest.mark.slow),
    ],
)
def test_gradients_leave_nothing(method: Any, mode: Any, hanging: Hanging) -> None:
    module = tiny_model("llama")
    model = hs.load((module, None))
    before = hanging(module)
    outside = effects_of(model).estimate(method)
    assert torch.is_grad_enabled()
    with mode():
        inside = effects_of(model).estimate(method)
        assert not torch.is_grad_enabled()
    np.testing.assert_array_equal(inside, outside)
    assert hanging(module) == before
    assert all(weight.grad is None for weight in module.parameters())
    # Weights that are frozen have the same effects, and stay frozen.
    module.requires_grad_(False)
    np.testing.assert_array_equal(effects_of(model).estimate(method), outside)
    assert not any(weight.requires_grad for weight in module.parameters())


@pytest.mark.slow
def test_half_precision(tiny: Tiny) -> None:
    half = effects_of(hs.load((tiny_model("llama").to(torch.bfloat16), None)))
    full = effects_of(tiny("llama"))
    for of in (exact, lambda effects: effects.estimate("integrated")):
        found, expected = of(half), of(full)
        np.testing.assert_allclose(found, expected, atol=0.1)
        assert np.nanmax(np.abs(found - expected)) > 0
