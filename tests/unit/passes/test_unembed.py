"""The unembedding takes rows with the site they were read at."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hiddenscope as hs
from hiddenscope.analyses.features.compute import written_words
from hiddenscope.errors import SiteError, StatesError
from hiddenscope.passes.unembed import Unembedding

Tiny = Callable[..., hs.Model]
IDS = [[5, 6, 7, 8]]


def test_final_goes_through_the_head_alone_and_all_else_through_the_norm(
    tiny: Tiny,
) -> None:
    model: Any = tiny("llama")
    norm, head = model.module.model.norm, model.module.lm_head
    sites = ["layer.0", "layer.2", "layer.2.mlp", "layer.2.attn.head.1", "layer.3"]
    run = hs.record(model, IDS, [*sites, "final"], logits=True)
    unembedding = Unembedding(model)
    with torch.no_grad():
        for site in sites:
            logits = unembedding.logits_of(run.states[site], hs.Site.parse(site))
            torch.testing.assert_close(logits, head(norm(run.states[site])))
        logits = unembedding.logits_of(run.states["final"], hs.Site.parse("final"))
    torch.testing.assert_close(logits, run.logits)


@pytest.mark.parametrize("family", ["t5", "bart", "bert", "gemma3_text", "mamba"])
def test_the_last_state_makes_the_models_logits(tiny: Tiny, family: str) -> None:
    model = tiny(family)
    last = hs.Site(model.anatomy.stacks[-1].depth, "", model.anatomy.sites[-1].stack)
    targets = {"targets": IDS} if model.encoder_decoder else {}
    run: Any = hs.record(model, IDS, [last], logits=True, **targets)
    rows = list(Unembedding(model).blocks(run.states[last], last, 3))
    assert list(map(len, rows)) == [3, 1]
    torch.testing.assert_close(torch.cat(rows).to(run.logits), run.logits)


@pytest.mark.parametrize(
    ("family", "site", "words"),
    [
        ("llama", "layer.1.attn.q", "is not written to the residual stream"),
        ("llama", "layer.1.attn.z", "is not written to the residual stream"),
        ("llama", "layer.1.mlp.neurons", "is not written to the residual stream"),
        ("mixtral", "layer.1.router", "is not written to the residual stream"),
        ("t5", "encoder.layer.1", "the head reads the decoder"),
        ("t5", "encoder.final", "the head reads the decoder"),
        ("t5", "layer.1", "the head reads the decoder"),
        ("bert", "final", "final"),
        ("llama", "layer.4", "layer.4"),
    ],
)
def test_a_state_that_the_head_does_not_read_is_refused(
    tiny: Tiny, family: str, site: str, words: str
) -> None:
    model = tiny(family)
    unembedding = Unembedding(model)
    with pytest.raises(SiteError, match=words):
        unembedding.head_inputs(torch.zeros(2, 64), hs.Site.parse(site))


def test_rows_of_another_width_are_refused(tiny: Tiny) -> None:
    with pytest.raises(StatesError, match="63 wide, and layer.1 64"):
        Unembedding(tiny("llama")).logits_of(torch.zeros(2, 63), hs.Site(1))


@pytest.mark.parametrize(
    ("family", "task", "site"),
    [
        ("llama", "base", "layer.1"),
        ("t5", None, "encoder.layer.1"),
        ("t5", None, "decoder.layer.1"),
    ],
)
def test_features_have_words_where_the_head_reads_their_site(
    tiny: Tiny, family: str, task: str | None, site: str
) -> None:
    named = hs.Dictionary.of(torch.eye(64)[:3].numpy(), site)
    words = written_words(tiny(family, task), named, torch.tensor([0, 2]))
    assert list(map(bool, words)) == 2 * [site == "decoder.layer.1"]
