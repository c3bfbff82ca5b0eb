"""Probes inside `generate` on a GPU."""

from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model


@pytest.mark.parametrize("pool", ["last", "rolling:3", "attention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_inside_generate_equal_those_of_recorded_states(
    pool: str, dtype: torch.dtype
) -> None:
    module: Any = tiny_model("llama").to("cuda", dtype)
    model = hs.load((module, None))
    random = np.random.default_rng(0)
    states = random.normal(size=(40, 64))
    probe = hs.Probe(site="layer.2").fit(states, random.integers(0, 2, 40))
    probe.pool = pool
    if pool == "attention":
        probe.query_ = random.normal(size=64)
    ids = torch.tensor([[0, 0, 7, 8], [9, 10, 11, 12]], device="cuda")
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]], device="cuda")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    bare = module.generate(ids, attention_mask=mask, **options)
    with hs.recording(model, probes={"p": probe}) as rec:
        written = module.generate(ids, attention_mask=mask, **options)
    assert torch.equal(bare, written)
    # Nothing went to the host before it was asked for, and no states were kept.
    assert all(part.readings["p"].is_cuda and not part.states for part in rec.recorded)
    with hs.recording(model, "layer.2", probes={"p": probe}) as kept:
        module.generate(ids, attention_mask=mask, **options)
    for scored, part in zip(kept.scored, kept.passes, strict=True):
        expected = probe.decision_function(part["layer.2"])
        np.testing.assert_allclose(scored["p"], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(rec.scores["p"], kept.scores["p"], rtol=1e-4, atol=1e-4)
    assert rec.scores.tokens.lengths.tolist() == [7, 9]
    probe.threshold(np.full(30, np.median(rec.scores.so_far("p"))), false_positives=0.1)
    assert 0 < rec.scores.alarms("p").sum() < 16


def test_a_probe_that_pools_scores_is_learnt_from_states_of_a_gpu() -> None:
    model = hs.load((tiny_model("llama").to("cuda"), None))
    random = np.random.default_rng(0)
    texts = [random.integers(5, 60, 8 + k % 6).tolist() for k in range(40)]
    labels = [k % 2 for k in range(40)]
    for text, label in zip(texts, labels, strict=True):
        if label:
            text[2:4] = [70, 71]
    facts = hs.probe(model, (texts, labels), pool="softmax", sites="layer.1").facts
    assert facts["best"]["accuracy"] > 0.8


@pytest.mark.parametrize("pad", [0, None])
def test_a_text_that_ended_in_a_batch_is_scored_as_alone(pad: int | None) -> None:
    """Pads after the end count as real in the mask of `generate`, and are not."""
    module: Any = tiny_model("llama").to("cuda")
    random = np.random.default_rng(0)
    states = random.normal(size=(40, 64))
    probe = hs.Probe(site="layer.1").fit(states, random.integers(0, 2, 40))
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]], device="cuda")
    options = {"max_new_tokens": 6, "do_sample": False}
    whole = module.generate(ids, **options)
    # The second token that the second text is given ends it.
    end = int(whole[1, 5])
    assert end != whole[1, 4] and end not in whole[0]
    module.generation_config.eos_token_id = [end]
    alone = []
    for row in range(2):
        with hs.recording(module, probes=probe) as rec:
            module.generate(ids[row : row + 1], **options)
        alone.append(rec.scores)
    with hs.recording(module, probes=probe) as rec:
        module.generate(ids, pad_token_id=pad, **options)
    assert all(part.readings["layer.1"].is_cuda for part in rec.recorded)
    assert rec.scores.tokens.lengths.tolist() == [9, 5]
    for row in range(2):
        part = rec.scores.of(row)
        assert part.tokens.ids.tolist() == alone[row].tokens.ids.tolist()
        np.testing.assert_allclose(
            part["layer.1"], alone[row]["layer.1"], rtol=1e-4, atol=1e-4
        )
