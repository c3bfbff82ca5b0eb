"""Vectors: pooled as they come, they equal the states captured whole and pooled."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import (
    ArgumentError,
    NotFinite,
    StatesError,
    TextError,
    TooLarge,
)
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model
from hiddenscope.vectors import EachToken, default_pool, pooled, vectors
from hiddenscope.vectors.collection import collection_of

Tiny = Callable[..., hs.Model]

TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house and nothing in the garden.",
    "The end.",
] * 3
LEAST = 6  # tokens in the shortest of them


class Bare:
    """The three members of the protocol and nothing else."""

    def __init__(self, states: hs.States) -> None:
        self.sites = states.sites
        self.tokens = states.tokens
        self.blocks = states.blocks


class Mapped(Bare):
    """States in memory-mapped files, read a few rows at a time: a source that need not
    fit in memory.
    """

    def __init__(self, states: hs.States, folder: Path, rows: int) -> None:
        self.sites = states.sites
        self.tokens = states.tokens
        self.source = states.source
        self.rows = rows
        self.files = {site: folder / f"{site}.npy" for site in states.sites}
        for site, values in zip(states.sites, states.to_numpy(), strict=True):
            np.save(self.files[site], values)

    def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
        mapped = np.load(self.files[Site.parse(str(site))], mmap_mode="r")
        for start in range(0, len(mapped), self.rows):
            yield torch.from_numpy(mapped[start : start + self.rows].copy())


def toy(values: torch.Tensor) -> hs.States:
    """States of a text of three tokens and one of two."""
    strings = [f"t{row}" for row in range(5)]
    tokens = hs.Tokens(None, [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], range(5), strings)
    sites = tuple(Site(k) for k in range(len(values)))
    return hs.States(sites, values, tokens, hs.Source("toy"))


def expected(states: hs.States, token: str | int) -> torch.Tensor:
    """The definition, text by text."""
    place = {"last": -1, "first": 0}.get(token, token)
    rows = [states.of(k).values.float()[:, place] for k in range(states.tokens.count)]
    return torch.stack(rows, 1)


@pytest.mark.parametrize("pool", ["mean", "last", -2, np.int64(1), None])
def test_texts_may_cross_the_borders_of_blocks(
    tiny: Tiny, pool: str | int | None, tmp_path: Path
) -> None:
    states = tiny("llama").capture(TEXTS)
    wanted = states.values
    if pool is not None:
        wanted = states.pool(pool) if pool == "mean" else expected(states, pool)
    for rows in (1, 7):
        source = Mapped(states, tmp_path, rows)
        assert torch.equal(vectors(source, pool=pool).values, wanted)
        each = EachToken(source) if pool is None else source
        blocks = list(collection_of(each, None, "layer.2", pool).blocks())
        assert torch.equal(torch.cat(blocks), wanted[2])
        assert all(len(block) for block in blocks)


def test_cls_is_checked(tiny: Tiny) -> None:
    bert = tiny("bert")
    states = bert.capture(TEXTS)
    assert torch.equal(vectors(states, pool="cls").values, states.pool("cls"))
    assert torch.equal(vectors(bert, TEXTS, pool="cls").values, states.pool("cls"))
    for source, texts in ((tiny("gpt2"), TEXTS), (Bare(states), None)):
        with pytest.raises(StatesError, match="no such token"):
            vectors(source, texts, pool="cls")
    with pytest.raises(StatesError, match="text 1 does not begin with that token"):
        vectors(bert, [states.tokens.ids[:4].tolist(), [9, 8, 7]], pool="cls")


def test_only_some_texts_are_held_at_a_time(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    whole = states.pool("mean")
    monkeypatch.setattr(pooled, "HELD", 1)  # a batch at a time
    held = []
    buffers_for = pooled.buffers_for
    monkeypatch.setattr(
        pooled,
        "buffers_for",
        lambda *given: held.append(given[2].lengths) or buffers_for(*given),
    )
    assert torch.equal(vectors(model, TEXTS, pool="mean").values, whole)
    assert len(held) > 1
    assert max(map(sum, held)) < len(states.tokens)
    assert sum(map(len, held)) == len(TEXTS)
    # Other batches: the same within rounding, in the order given.
    monkeypatch.setattr(pooled, "PORTION", 5)
    portions = vectors(model, TEXTS, pool="mean")
    torch.testing.assert_close(portions.values, whole, rtol=1e-5, atol=1e-6)
    assert portions.texts == tuple(TEXTS)
    streamed = list(collection_of(model, TEXTS, "final", "mean").blocks())
    assert [len(block) for block in streamed] == [5, 5, 2]
    assert torch.equal(torch.cat(streamed), portions["final"])
    # A bad text is named by its number among all.
    with pytest.raises(TextError, match="Text 7: it is empty"):
        vectors(model, [*TEXTS[:7], "", "A dog"])
    with pytest.raises(TextError, match="text 6 has 2 tokens"):
        vectors(model, [[5, 6, 7]] * 6 + [[8, 9]], pool=2)


def test_float64_stays_and_bfloat16_is_widened() -> None:
    values = torch.randn(2, 5, 3, dtype=torch.float64)
    mean = vectors(toy(values), pool="mean").values
    assert torch.equal(mean[0, 1], values[0, 3:].mean(0))
    narrow = toy(values.bfloat16())
    for how in ("mean", "max", "last"):
        found = vectors(narrow, pool=how)
        assert found.values.dtype == torch.float32
        assert torch.equal(found.values, narrow.pool(how).float())
    assert vectors(narrow, pool=None).values.dtype == torch.float32


def test_of_two_stacks_it_is_the_encoders_unless_asked(tiny: Tiny) -> None:
    model, targets = tiny("t5"), TEXTS[::-1]
    pair = model.capture(TEXTS, targets=targets)
    inputs = model.encode(TEXTS, targets=targets)
    assert isinstance(pair, hs.Pair)
    for found in (
        vectors(pair, pool="mean"),
        vectors(model, inputs, pool="mean"),
    ):
        assert torch.equal(found.values, pair.encoder.pool("mean"))
        assert {site.stack for site in found.sites} == {"encoder"}
    asked = "decoder.layer.*,decoder.final"
    decoder = pair.decoder.pool("mean")
    for found in (
        vectors(pair, sites=asked, pool="mean"),
        vectors(model, inputs, sites=asked, pool="mean"),
    ):
        torch.testing.assert_close(found.values, decoder, rtol=1e-5, atol=1e-6)
    assert vectors(model, TEXTS, sites=asked, pool="last").values.shape[1] == len(TEXTS)
    for source in (model, pair):
        pools = default_pool(source), default_pool(source, "decoder.layer.*")
        assert pools == ("mean:sinkless", "last")
    for source, texts in ((pair, None), (model, TEXTS)):
        with pytest.raises(StatesError, match="two stacks"):
            vectors(source, texts, sites="encoder.layer.1,decoder.layer.1")


def test_texts_may_be_ids_and_one_may_be_alone(tiny: Tiny) -> None:
    model = tiny("llama")
    wanted = model.capture([[5, 6, 7]]).pool("mean", "final")
    ids = [5, 6, 7]
    for given in (ids, [ids], np.array(ids), torch.tensor([ids])):
        found = vectors(model, given, sites="final", pool="mean")
        assert torch.equal(found.values[0], wanted)
        assert found.texts is None
    assert vectors(model, "A dog").texts == ("A dog",)
    long = [[5, 6], [5] * ((model.text_encoder.window or 0) + 3)]
    with pytest.raises(TextError, match="truncate=True"):
        vectors(model, long)
    cut = vectors(model, long, pool="mean", truncate=True)
    assert torch.equal(cut.values, model.capture(long, truncate=True).pool("mean"))


def test_what_cannot_be_had_is_said(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    m = tiny("llama")
    s = m.capture(TEXTS)
    later = s.select(tokens=s.tokens.positions > 0)
    cases = [
        (lambda: vectors(m), TextError, "no texts were given"),
        (lambda: vectors(m, []), TextError, "the list is empty"),
        (lambda: vectors(m, 5), TextError, "got int"),
        (lambda: vectors(s, TEXTS), TextError, "the states have their own texts"),
        (lambda: vectors(s, pool="median"), StatesError, "No pooling 'median'"),
        (lambda: vectors(s, pool=True), StatesError, "No pooling 'True'"),
        (lambda: vectors(s, pool=1.5), StatesError, "No pooling '1.5'"),
        (lambda: vectors("states"), StatesError, "str has no states"),
        (lambda: vectors(m, TEXTS, pool=LEAST), TextError, "text 1 has 6 tokens"),
        (lambda: vectors(s, pool=-LEAST - 1), TextError, "text 1 has 6 tokens"),
        (lambda: collection_of(s, None, "layer.*"), StatesError, "names . sites"),
        (lambda: collection_of(m, TEXTS, "layer.*"), StatesError, "names . sites"),
        (lambda: vectors(s, sites="layer.40"), hs.errors.SiteError, "layer.40"),
        (lambda: vectors(s)["layer.*"], StatesError, "names . sites"),
        (lambda: vectors(s.select(tokens=[0, 1])), StatesError, "text 1 has no tokens"),
        (lambda: vectors(later, pool="first"), StatesError, "only some of its tokens"),
        (lambda: vectors(later, pool=0), StatesError, "only some of its tokens"),
    ]
    for call, error, said in cases:
        with pytest.raises(error, match=said):
            call()
    monkeypatch.setattr(pooled, "free_memory", lambda: 1000)
    with pytest.raises(TooLarge, match="12 vectors at 5 sites"):
        vectors(m, TEXTS)


def test_a_nan_is_named_by_site_and_text(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.zeros(2, 5, 3)
    values[1, 3, 0] = float("nan")
    states = toy(values)
    for token in ("mean", "max", 0):
        with pytest.raises(NotFinite, match=r"a NaN at layer\.1, text 1"):
            vectors(states, pool=token)
    with pytest.raises(NotFinite, match=r"text 1, position 0"):
        vectors(states, pool=None)
    assert vectors(states, pool="last").values.isfinite().all()
    values[1, 3, 0] = float("inf")
    with pytest.raises(NotFinite, match="an infinity"):
        vectors(states, pool="mean")
    module = tiny_model("llama")
    model = hs.load((module, None))
    # Not in the weights, where it would be found before any pass.
    module.get_input_embeddings().register_forward_hook(
        lambda _, given, states: states.masked_fill(
            (given[0] == 9)[..., None], torch.nan
        )
    )
    monkeypatch.setattr(pooled, "PORTION", 2)
    with pytest.raises(NotFinite, match=r"a NaN at layer\.0, text 3, position 1"):
        vectors(model, [[5, 6, 7], [5, 6], [8, 7], [7, 9, 5]], pool="last")


def test_states_that_end_too_soon_or_too_late_are_refused() -> None:
    damaged = Bare(toy(torch.zeros(1, 5, 3)))
    for rows in (4, 6, 3):
        damaged.blocks = lambda site, rows=rows: iter([torch.zeros(rows, 3)])
        for token in ("mean", "last", None):
            with pytest.raises(StatesError, match=f"have {rows} rows for 5 tokens"):
                vectors(damaged, pool=token)


def test_rows_that_are_tokens_are_not_pooled(
    tiny: Tiny,
) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    each, labels = hs.each_token(states), ["a"] * len(TEXTS)
    own = "every token is a row of its own"
    for function, given, options, said in (
        (hs.search, (each, np.ones(64)), {"pool": "mean"}, own),
        (hs.project, (each,), {"pool": "mean"}, own),
        (hs.probe, (each, "position"), {"pool": "mean"}, own),
        (hs.search, (states, np.ones(64)), {"pool": "each"}, r"hs\.each_token"),
        (hs.probe, (states, labels), {"pool": "each"}, r"hs\.each_token"),
        (hs.project, (states, labels), {"pool": "each"}, r"hs\.each_token"),
    ):
        with pytest.raises(ArgumentError, match=said):
            function(*given, **options)
