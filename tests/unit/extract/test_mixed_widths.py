"""A store of sites whose widths differ."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import StatesError, StoreError
from hiddenscope.extract import Engine, ExtractJob, JobProgress
from hiddenscope.store import resume_store, verify

SITES = ["layer.0", "layer.3", "final"]
TEXTS = [
    f"text {number} of the corpus" + " and on" * (number % 5) for number in range(9)
]


@pytest.fixture
def merging(tiny: Callable[..., hs.Model]) -> hs.Model:
    return tiny("deepseek_v4")


def test_a_store_holds_what_capture_gives(merging: hs.Model, tmp_path: Path) -> None:
    store = hs.extract(merging, TEXTS, to=tmp_path / "store", sites=SITES)
    assert store.plan.widths == {"layer.0": 256, "layer.3": 256, "final": 64}
    assert store.plan.version == 1
    states = merging.capture(TEXTS, SITES)
    assert isinstance(states, hs.States)
    for site in SITES:
        assert store[site].shape == states[site].shape
        blocks = torch.cat(list(store.blocks(site, 7)))
        assert torch.equal(blocks, torch.from_numpy(store[site][:]))
        torch.testing.assert_close(blocks, states[site], rtol=1e-5, atol=1e-5)
        assert np.array_equal(store.of(4)[site][:], store[site][store.tokens.rows(4)])
        alone = hs.extract(merging, TEXTS, to=tmp_path / site, sites=site)
        assert np.array_equal(alone[site][:], store[site][:])
        assert store.to_xarray(site).shape == (1, *states[site].shape)
    assert store.tokens.strings == states.tokens.strings
    assert verify(tmp_path / "store").intact
    with pytest.raises(StatesError, match="width"):
        store.to_xarray()
    whole = store.to_states()
    assert whole.sites == states.sites
    for site in SITES:
        assert torch.equal(whole[site], torch.from_numpy(store[site][:]))
    with pytest.raises(StatesError, match="layer.0 is 256 wide and final is 64 wide"):
        hs.project(store, [0, 1, 0] * 3)
    with pytest.raises(StatesError, match="layer.0 is 256 wide and final is 64 wide"):
        hs.compare(store, store)
    assert hs.profile(store).data.sizes["site"] == 3


@pytest.mark.parametrize("pool", ["mean", "last"])
def test_pooled_vectors_have_a_width_for_each_site(
    merging: hs.Model, tmp_path: Path, pool: str
) -> None:
    store = hs.extract(
        merging, TEXTS, to=tmp_path / "store", sites=SITES, pool=pool, dtype="bfloat16"
    )
    states = merging.capture(TEXTS, SITES)
    assert isinstance(states, hs.States)
    for site in SITES:
        expected = states.pool(pool, site)
        stored = torch.from_numpy(store[site][:])
        assert stored.shape == expected.shape
        torch.testing.assert_close(stored, expected, rtol=2e-2, atol=2e-2)


def test_a_job_that_was_stopped_goes_on_and_another_is_refused(
    merging: hs.Model, tmp_path: Path
) -> None:
    engine = Engine(threads=1, unit_tokens=40)
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    hs.extract(merging, TEXTS, to=whole, sites=SITES, engine=engine)
    job = ExtractJob.plan(merging, TEXTS, stopped, sites=SITES, engine=engine)

    def stop(now: JobProgress) -> None:
        if now.units_done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.run(stop)
    left = len(resume_store(stopped).pending())
    assert 0 < left < len(job.writer.plan.units)
    with pytest.raises(StoreError, match="sites: .* there"):
        hs.extract(merging, TEXTS, to=stopped, sites=SITES[:2])
    hs.extract(merging, TEXTS, to=stopped, sites=SITES)
    shards = []
    for folder in (whole, stopped):
        shards.append({path.name for path in (folder / "data").iterdir()})
    assert shards[0] == shards[1]
    assert hs.open(stopped).complete


def test_sites_inside_a_block_are_not_left_out(
    tiny: Callable[..., hs.Model], tmp_path: Path
) -> None:
    sites = ["layer.1", "layer.1.attn.z", "layer.1.mlp.neurons"]
    store = hs.extract(tiny("llama"), TEXTS, to=tmp_path, sites=sites)
    assert store.to_states().sites == store.sites
    part = store.of(2).to_states()
    for site in sites:
        assert torch.equal(part[site], torch.from_numpy(store.of(2)[site][:]))
    narrow = sites[:2]
    (tmp_path / "narrow").mkdir()
    store = hs.extract(tiny("llama"), TEXTS, to=tmp_path / "narrow", sites=narrow)
    assert store.to_xarray()["site"].values.tolist() == list(map(str, store.sites))
