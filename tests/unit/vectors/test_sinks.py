"""Sinks: tokens that would rule every mean are left out of it, and that is said."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import StatesError
from hiddenscope.measures.neighbours import explained_by_chance, told_apart
from hiddenscope.results.report import MostAt
from hiddenscope.states import Source, Tokens
from hiddenscope.testing import tiny_model
from hiddenscope.vectors import vectors

Tiny = Callable[..., hs.Model]

WIDTH = 16
LENGTHS = [3, 4, 5, 6, 12, 13, 14, 15] * 2


def states_with_sinks(lengths: list[int] = LENGTHS, sink: int = 0) -> hs.States:
    """Return noise in which a token of each text has one huge state, at layer.1."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, sum(lengths), WIDTH, generator=generator)
    starts = np.cumsum(lengths) - lengths
    values[1, torch.from_numpy(starts + sink), 3] = 5_000.0
    text = np.repeat(range(len(lengths)), lengths)
    positions = np.arange(sum(lengths)) - starts[text]
    names = tuple(f"text number {number}" for number in range(len(lengths)))
    tokens = Tokens(names, text, positions, 5 + positions, ("a",) * sum(lengths))
    sites = hs.Site.parse("layer.0"), hs.Site.parse("layer.1")
    return hs.States(sites, values, tokens, Source("toy"))


LABELS = ["short" if length < 8 else "long" for length in LENGTHS]


@pytest.mark.parametrize("sink", [0, 2])
def test_means_leave_sinks_out_wherever_they_stand(sink: int) -> None:
    states = states_with_sinks(sink=sink)
    found = vectors(states, pool="mean:sinkless")
    start = 0
    for text, length in enumerate(LENGTHS):
        rows = [start + k for k in range(length) if k != sink]
        expected = states["layer.1"][rows].mean(0)
        torch.testing.assert_close(found["layer.1"][text], expected)
        start += length
    # Where there is no sink, and in States.pool, every token counts.
    assert torch.equal(found["layer.0"], states.pool("mean", "layer.0"))
    assert states.pool("mean", "layer.1")[:, 3].min() > 300
    assert found.pooled is not None
    assert found.pooled.sinks == MostAt(most=16, at=["layer.1"])


def test_lengths_no_longer_part_the_classes() -> None:
    states = states_with_sinks()
    kept = hs.project(states, LABELS, method="pca", pool="mean:all")
    separation = kept.facts["parts"][0]["separation"]
    assert separation["apart_at"] == ["layer.1"]
    assert separation["best"]["silhouette"] > 0.6
    assert "the lengths of their texts" in kept.summary()
    assert 'pool="mean" leaves them out' in kept.summary()
    left = hs.project(states, LABELS, method="pca", pool="mean")
    assert left.facts["token"] == "mean:sinkless"
    assert left.facts["parts"][0]["separation"]["best"]["silhouette"] < 0.1
    assert "16 of 144 tokens, at layer.1" in left.summary()
    assert "the lengths of" not in left.summary()


def test_a_text_has_the_same_vector_in_any_company() -> None:
    model = hs.load((tiny_model("gpt2"), None))
    with torch.no_grad():
        model.module.transformer.wpe.weight[0] *= 3_000
    texts = [[5, 6, 7, 8], [9], [9, 4], [3, 9, 7, 2, 5, 6]]
    alone = [hs.embed(model, [text], site="layer.1") for text in texts]
    together = hs.embed(model, texts, site="layer.1")
    np.testing.assert_allclose(np.concatenate(alone), together, atol=1e-6)
    captured = model.capture(texts)
    of_states = vectors(captured, sites="layer.1", pool="mean:sinkless")
    rows = of_states.values[0]
    np.testing.assert_allclose(
        rows / rows.norm(dim=1, keepdim=True), together, atol=1e-6
    )
    # A text of a sink alone is that sink, and the vector says so.
    report = of_states.pooled
    assert report is not None and report.sinks and report.massive
    assert (report.sinks.most, report.massive.most) == (3, 1)


def test_two_means_are_never_mixed(tiny: Tiny, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("The cat sat.\nA dog.\nNothing at all.\n")
    model = tiny("gpt2")
    kept = hs.extract(model, texts, to=tmp_path / "kept", pool="mean:all")
    left = hs.extract(model, texts, to=tmp_path / "left", pool="mean")
    assert (kept.pooled, left.pooled) == ("mean:all", "mean:sinkless")
    hs.search(left, np.ones(64), k=1, pool="mean")
    hs.search(kept, np.ones(64), k=1, pool="mean:all")
    with pytest.raises(StatesError, match="mean:all"):
        hs.search(kept, np.ones(64), k=1, pool="mean")
    with pytest.raises(StatesError, match="not the same"):
        hs.drift(kept, left, None)


def test_a_search_says_what_chance_explains() -> None:
    generator = np.random.default_rng(0)
    noise = generator.normal(size=(60, 32)) + 20.0
    result = hs.search(noise, noise[:1] + 0.7 * generator.normal(size=32), k=3)
    assert not result.facts["nearest"][0].get("by_chance")
    result = hs.search(noise, generator.normal(size=32) + 20.0, k=3)
    assert result.facts["nearest"][0]["by_chance"]
    assert "which chance alone explains" in result.summary()
    assert result.facts["typical"] > 0.99
    topics = generator.normal(size=(10, 32)).repeat(6, 0)
    near = topics + 0.3 * generator.normal(size=topics.shape) + 20.0
    assert "which chance alone explains" not in hs.search(near, near[7], k=3).summary()
    assert hs.cluster(noise).facts["told_apart"] < 0.15 < 0.9
    assert hs.cluster(near).facts["told_apart"] > 0.9


@pytest.mark.parametrize("count", [10, 20, 36])
def test_few_unrelated_rows_are_hardly_ever_told_apart(count: int) -> None:
    generator = np.random.default_rng(count)
    told = []
    among = []
    for _ in range(60):
        rows = torch.from_numpy(generator.normal(size=(count, 384)))
        queries = torch.from_numpy(generator.normal(size=(5, 384)))
        nearest = rows[(queries @ rows.T).argmax(1)]
        chance = explained_by_chance(rows, queries, nearest, count)
        assert chance is not None
        told.append(1 - float(chance.double().mean()))
        share = told_apart(rows)
        assert share is not None
        among.append(share)
    # A normal distribution told 92, 62 and 31% of such queries apart.
    assert max(np.mean(told), np.mean(among)) < 0.12


def test_a_probe_scores_a_text_so_far_without_its_sinks() -> None:
    states = states_with_sinks(sink=2)
    result = hs.probe(states, LABELS, pool="mean", sites="layer.1")
    probe = hs.Probe.of(result)
    assert probe.pool == "mean:sinkless"
    pooled = vectors(states, sites="layer.1", pool=probe.pool).values[0]
    for text in (0, 6):
        scores = probe.so_far(probe.readings(states.of(text)["layer.1"]))
        assert scores[-1] == pytest.approx(probe.decision_function(pooled)[text])
        assert len(scores) == LENGTHS[text]
