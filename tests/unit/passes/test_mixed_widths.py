"""Passes over sites whose widths differ.

The streams of DeepSeek V4 are merged before its final norm, so that `final` is narrower
than the layers.
"""

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import NotFinite, PassError, StatesError, TooLarge
from hiddenscope.passes import HostMemory, buffers, buffers_for
from hiddenscope.states import MixedValues
from hiddenscope.testing import tiny_model, tiny_tokenizer

SITES = ["layer.0", "layer.2", "layer.3", "final"]
TEXTS = ["the cat", "a much longer text of the tests, and on", "x", "one two three"]


@pytest.fixture
def merging(tiny: Callable[..., hs.Model]) -> hs.Model:
    return tiny("deepseek_v4")


@pytest.mark.parametrize(("texts", "keep"), [(TEXTS, "host"), ([[5, 6, 7]], "device")])
def test_a_mixed_capture_equals_separate_captures(
    merging: hs.Model,
    texts: str | list[str] | list[list[int]],
    keep: Literal["host", "device"],
) -> None:
    mixed = merging.capture(texts, SITES, keep=keep)
    assert isinstance(mixed, hs.States)
    assert isinstance(mixed.values, MixedValues)
    assert mixed.widths == (256, 256, 256, 64)
    for site in SITES:
        alone = merging.capture(texts, site, keep=keep)
        assert isinstance(alone, hs.States)
        assert isinstance(alone.values, torch.Tensor)
        assert torch.equal(mixed[site], alone[site])
        assert alone.tokens.strings == mixed.tokens.strings
    layers = mixed.select(sites="layer.*")
    together = merging.capture(texts, "layer.0,layer.2,layer.3")
    assert isinstance(together, hs.States)
    assert isinstance(layers.values, torch.Tensor)
    assert isinstance(together.values, torch.Tensor)
    assert torch.equal(layers.values, together.values)


def test_generated_tokens_have_both_widths(merging: hs.Model) -> None:
    states = merging.capture_generation("the cat", max_new_tokens=2, sites=SITES)
    assert isinstance(states, hs.States)
    assert states.widths == (256, 256, 256, 64)
    whole = merging.capture([states.tokens.ids.tolist()], SITES)
    for site in SITES:
        torch.testing.assert_close(states[site], whole[site], rtol=1e-4, atol=1e-4)


def test_the_default_still_leaves_final_out(merging: hs.Model) -> None:
    states = merging.capture("the cat")
    assert isinstance(states, hs.States)
    assert states.width == 256
    assert states.sites == merging.anatomy.select("layer.*")


def test_record_edit_and_the_users_own_passes(merging: hs.Model) -> None:
    ids = [5, 6, 7, 8]
    recorded = hs.record(merging, [ids], SITES, logits=True)
    logits = hs.record(merging, [ids], (), logits=True).logits
    assert recorded.logits is not None
    assert logits is not None
    assert torch.equal(recorded.logits, logits)
    edited = hs.edit(merging, [ids], {"layer.2": hs.Scale(0.0)}, SITES).states
    assert not edited["layer.2"].any()
    assert not torch.equal(edited["final"], recorded.states["final"])
    with hs.recording(merging, SITES) as recording, torch.no_grad():
        merging.module(torch.tensor([ids]))
        merging.module(torch.tensor([ids]))
    twice = recording.states
    assert isinstance(twice, hs.States)
    assert twice.tokens.count == 2
    for site in SITES:
        assert torch.equal(recorded.states[site], twice.of(0)[site])
        assert torch.equal(recorded.states[site], twice.of(1)[site])


def test_a_nan_of_the_narrow_site_is_named() -> None:
    module = tiny_model("deepseek_v4")
    model = hs.load((module, tiny_tokenizer()))
    with pytest.raises(NotFinite, match="a NaN at final"):
        hs.edit(model, [[5, 6]], {"final": lambda rows: rows * torch.nan}, SITES)


def test_one_width_has_one_buffer_and_all_are_counted(
    merging: hs.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = merging.encode([[5, 6, 7]])
    sites = merging.anatomy.select(SITES)
    (mixed,) = buffers_for(merging, sites, inputs).values()
    assert mixed.nbytes == 3 * 4 * (3 * 256 + 64)
    (layers,) = buffers_for(merging, sites[:-1], inputs).values()
    assert isinstance(layers.finish(), torch.Tensor)
    # There is room for the layers, and for `final`, and not for both.
    monkeypatch.setattr(buffers, "free_memory", lambda: 3 * 4 * 3 * 256 * 10 // 9 + 4)
    buffers_for(merging, sites[:-1], inputs)
    buffers_for(merging, sites[-1:], inputs)
    with pytest.raises(TooLarge, match="1 sites of 3 tokens, 64 wide"):
        buffers_for(merging, sites, inputs)


def test_memory_of_several_widths_is_used_again(merging: hs.Model) -> None:
    inputs = merging.encode([[5, 6, 7]])
    sites = merging.anatomy.select(SITES)
    memory = HostMemory()
    addresses = set()
    for _ in range(4):
        (buffer,) = buffers_for(merging, sites, inputs, memory=memory).values()
        addresses |= {values.data_ptr() for values in buffer.finish()}
        buffer.release()
    assert len(addresses) == len(SITES)


@pytest.mark.parametrize(
    "ask",
    [
        lambda model, states: hs.project(states, ["a", "b", "a", "b"], method="pca"),
        lambda model, states: hs.probe(states, ["a", "b", "a", "b"]),
        lambda model, states: hs.compare(states, states),
        lambda model, states: hs.compare(model, TEXTS[0], TEXTS[1], sites=SITES),
    ],
)
def test_an_analysis_of_mixed_states_says_the_widths(
    merging: hs.Model, ask: Callable[[hs.Model, hs.States], object]
) -> None:
    states = merging.capture(TEXTS, SITES)
    assert isinstance(states, hs.States)
    with pytest.raises(StatesError, match="is 256 wide and final is 64 wide"):
        ask(merging, states)


def test_analyses_that_take_each_site_by_itself_take_mixed_states(
    merging: hs.Model,
) -> None:
    states = merging.capture(TEXTS, SITES)
    assert isinstance(states, hs.States)
    lens = hs.lens(merging, TEXTS[0], sites=SITES).data["probability"]
    # The last layer is read through the final norm. On x86-64 a product may round a row
    # differently where it stands elsewhere among the rows.
    last, final = lens.sel(site="layer.3"), lens.sel(site="final")
    np.testing.assert_allclose(final.values, last.values, rtol=1e-6)
    contrast = hs.Contrast("the cat", "the car", " the", " of")
    effects = hs.patch(merging, contrast, sites=SITES).data["effect"]
    of_final = hs.patch(merging, contrast, sites="final").data["effect"]
    assert np.array_equal(
        effects.sel(site="final"), of_final.sel(site="final"), equal_nan=True
    )
    data = hs.profile(states).data
    assert data["site"].values.tolist() == SITES
    for site in SITES:
        alone = hs.profile(states.select(sites=site), sites=site).data
        for name in ("norm", "kurtosis_median"):
            whole = data[name].sel(site=site).values
            assert whole.tolist() == alone[name].sel(site=site).values.tolist()


def test_a_module_that_changed_its_width_is_refused(merging: hs.Model) -> None:
    (site,) = merging.anatomy.select("final")
    (buffer,) = buffers_for(merging, [site], merging.encode([[5, 6]])).values()
    with pytest.raises(PassError, match="is 5 wide, and was 64 wide"):
        buffer.write(site, torch.ones(1, 2, 5), slice(0, 2))
