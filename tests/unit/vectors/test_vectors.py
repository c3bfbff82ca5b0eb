"""Vectors: pooled as they come, they equal the states captured whole and pooled."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli.main import app
from hiddenscope.errors import (
    ArgumentError,
    NotFinite,
    PassError,
    StatesError,
    TextError,
    TooLarge,
)
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.vectors import blocks, computed, default_pool, stored, vectors

TEXTS = [
    "The cat sat on the mat.",
    "A dog",
    "There is nothing in the house and nothing in the garden.",
    "The end.",
] * 3
LEAST = 6  # tokens in the shortest of them


class Mapped:
    """States in memory-mapped files, read a few rows at a time: a source that need not
    fit in memory.
    """

    def __init__(self, states: hs.States, folder: Path, rows: int) -> None:
        self.sites, self.tokens, self.source, self.rows = (
            states.sites,
            states.tokens,
            states.source,
            rows,
        )
        self.files = {site: folder / f"{site}.npy" for site in states.sites}
        for site, values in zip(states.sites, states.to_numpy(), strict=True):
            np.save(self.files[site], values)

    def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
        mapped = np.load(self.files[Site.parse(str(site))], mmap_mode="r")
        for start in range(0, len(mapped), self.rows):
            yield torch.from_numpy(mapped[start : start + self.rows].copy())


def toy(values: torch.Tensor, text: list[int], positions: list[int]) -> hs.States:
    tokens = hs.Tokens(
        None, text, positions, range(len(text)), [f"t{row}" for row in range(len(text))]
    )
    return hs.States(
        tuple(Site(k) for k in range(len(values))), values, tokens, hs.Source("toy")
    )


def expected(states: hs.States, token: str | int) -> torch.Tensor:
    """The definition, text by text."""
    made = []
    for text in range(states.tokens.count):
        values = states.of(text).values.float()
        chosen = {"last": values[:, -1], "first": values[:, 0], "cls": values[:, 0]}
        made.append(chosen[token] if isinstance(token, str) else values[:, token])
    return torch.stack(made, 1)


@pytest.mark.parametrize("family", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("how", ["mean", "max", "last"])
def test_a_models_vectors_are_its_pooled_states_bit_for_bit(
    tiny: Callable[..., hs.Model], family: str, how: str
) -> None:
    model = tiny(family)
    states = model.capture(TEXTS)
    found = vectors(model, TEXTS, pool=how)
    assert torch.equal(found.values, states.pool(how))  # type: ignore[arg-type]
    assert found.values.dtype == torch.float32
    assert found.sites == states.sites
    assert found.texts == tuple(TEXTS)
    assert found.tokens is None
    assert found.source == states.source
    assert torch.equal(found["layer.1"], states.pool(how, "layer.1"))  # type: ignore[arg-type]


@pytest.mark.parametrize("token", ["first", "last", 0, 1, -1, -2, np.int64(1)])
def test_one_token_stands_for_each_text(
    tiny: Callable[..., hs.Model], token: str | int, tmp_path: Path
) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    reference = expected(states, token)
    for source in (states, Mapped(states, tmp_path, 4)):
        assert torch.equal(vectors(source, pool=token).values, reference)
    assert torch.equal(vectors(model, TEXTS, pool=token).values, reference)


def test_cls_is_checked(tiny: Callable[..., hs.Model]) -> None:
    states = tiny("bert").capture(TEXTS)
    assert torch.equal(vectors(states, pool="cls").values, states.pool("cls"))
    assert torch.equal(
        vectors(tiny("bert"), TEXTS, pool="cls").values, states.pool("cls")
    )
    for call in (
        lambda: vectors(tiny("gpt2"), TEXTS, pool="cls"),
        lambda: vectors(Bare(states), pool="cls"),
    ):
        with pytest.raises(StatesError, match="no such token"):
            call()
    with pytest.raises(StatesError, match="text 1 does not begin with that token"):
        vectors(tiny("bert"), [states.tokens.ids[:4].tolist(), [9, 8, 7]], pool="cls")


class Bare:
    """The three members of the protocol and nothing else."""

    def __init__(self, states: hs.States) -> None:
        self.sites, self.tokens, self.blocks = (
            states.sites,
            states.tokens,
            states.blocks,
        )


def test_each_token_is_a_row(tiny: Callable[..., hs.Model], tmp_path: Path) -> None:
    model = tiny("llama")
    states = model.capture(TEXTS)
    for found in (
        vectors(model, TEXTS, pool=None),
        vectors(Mapped(states, tmp_path, 5), pool=None),
    ):
        assert torch.equal(found.values, states.values)
        assert found.tokens is not None
        assert found.tokens.equals(states.tokens)
    assert torch.equal(
        torch.cat(list(blocks(model, TEXTS, site="final", pool=None))),
        states["final"],
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("token", ["mean", "max", "last", 1])
def test_texts_are_pooled_across_the_borders_of_blocks(
    tiny: Callable[..., hs.Model], rows: int, token: str | int, tmp_path: Path
) -> None:
    states = tiny("llama").capture(TEXTS)
    mapped = Mapped(states, tmp_path, rows)
    whole = vectors(states, pool=token)
    assert torch.equal(vectors(mapped, pool=token).values, whole.values)
    streamed = list(blocks(mapped, site="layer.2", pool=token))
    assert torch.equal(torch.cat(streamed), whole["layer.2"])
    assert all(len(block) for block in streamed)
    assert vectors(Bare(states), pool=token).source == {}


def test_only_some_texts_are_held_at_a_time(
    tiny: Callable[..., hs.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("llama")
    whole = model.capture(TEXTS).pool("mean")
    monkeypatch.setattr(computed, "HELD", 1)  # a batch at a time
    held = []
    buffers_for = computed.buffers_for
    monkeypatch.setattr(
        computed,
        "buffers_for",
        lambda *given: held.append(given[2].lengths) or buffers_for(*given),
    )
    assert torch.equal(vectors(model, TEXTS, pool="mean").values, whole)
    assert len(held) > 1
    assert max(map(sum, held)) < len(model.capture(TEXTS).tokens)
    assert sum(map(len, held)) == len(TEXTS)
    # Other batches: the same within rounding, in the order given.
    monkeypatch.setattr(computed, "PORTION", 5)
    portions = vectors(model, TEXTS, pool="mean")
    torch.testing.assert_close(portions.values, whole, rtol=1e-5, atol=1e-6)
    assert portions.texts == tuple(TEXTS)
    streamed = list(blocks(model, TEXTS, site="final", pool="mean"))
    assert [len(block) for block in streamed] == [5, 5, 2]
    assert torch.equal(torch.cat(streamed), portions["final"])


def test_float64_stays_and_bfloat16_is_widened() -> None:
    values = torch.randn(2, 5, 3, dtype=torch.float64)
    states = toy(values, [0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    assert torch.equal(vectors(states, pool="mean").values[0, 1], values[0, 3:].mean(0))
    narrow = toy(values.bfloat16(), [0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    for how in ("mean", "max", "last"):
        found = vectors(narrow, pool=how)
        assert found.values.dtype == torch.float32
        assert torch.equal(found.values, narrow.pool(how).float())  # type: ignore[arg-type]
    assert vectors(narrow, pool=None).values.dtype == torch.float32


def test_of_two_stacks_it_is_the_encoders_unless_asked(
    tiny: Callable[..., hs.Model],
) -> None:
    model = tiny("t5")
    pair = model.capture(TEXTS, targets=TEXTS[::-1])
    assert isinstance(pair, hs.Pair)
    for found in (
        vectors(pair, pool="mean"),
        vectors(model, TEXTS, pool="mean", targets=TEXTS[::-1]),
    ):
        assert torch.equal(found.values, pair.encoder.pool("mean"))
        assert {site.stack for site in found.sites} == {"encoder"}
    asked = "decoder.layer.*,decoder.final"
    for found in (
        vectors(pair, sites=asked, pool="mean"),
        vectors(model, TEXTS, sites=asked, pool="mean", targets=TEXTS[::-1]),
    ):
        torch.testing.assert_close(
            found.values, pair.decoder.pool("mean"), rtol=1e-5, atol=1e-6
        )
    assert vectors(model, TEXTS, sites=asked, pool="last").values.shape[1] == len(TEXTS)
    for source, texts in ((pair, None), (model, TEXTS)):
        with pytest.raises(StatesError, match="two stacks"):
            vectors(source, texts, sites="encoder.layer.1,decoder.layer.1")
    with pytest.raises(TextError, match="there are 12 texts and 1 targets"):
        vectors(model, TEXTS, targets="one")
    with pytest.raises(PassError, match="has one stack"):
        vectors(tiny("llama"), TEXTS, targets=TEXTS)


def test_texts_may_be_ids_and_one_may_be_alone(tiny: Callable[..., hs.Model]) -> None:
    model = tiny("llama")
    for given in (
        [5, 6, 7],
        [[5, 6, 7]],
        np.array([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
    ):
        found = vectors(model, given, sites="final", pool="mean")  # type: ignore[arg-type]
        assert torch.equal(
            found.values[0], model.capture([[5, 6, 7]]).pool("mean", "final")
        )
        assert found.texts is None
    assert vectors(model, "A dog").texts == ("A dog",)


def test_longer_texts_are_cut_when_asked(tiny: Callable[..., hs.Model]) -> None:
    model = tiny("llama")
    ids = [5] * ((model.text_encoder.window or 0) + 3)
    with pytest.raises(TextError, match="truncate=True"):
        vectors(model, [[5, 6], ids])
    cut = vectors(model, [[5, 6], ids], pool="mean", truncate=True)
    assert torch.equal(
        cut.values, model.capture([[5, 6], ids], truncate=True).pool("mean")
    )


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda m, s: vectors(m), TextError, "no texts were given"),
        (lambda m, s: vectors(m, []), TextError, "the list is empty"),
        (lambda m, s: vectors(m, 5), TextError, "got int"),
        (lambda m, s: vectors(s, TEXTS), TextError, "the states have their own texts"),
        (lambda m, s: vectors(s, pool="median"), StatesError, "No pooling 'median'"),
        (lambda m, s: vectors(s, pool=True), StatesError, "No pooling 'True'"),
        (lambda m, s: vectors(s, pool=1.5), StatesError, "No pooling '1.5'"),
        (lambda m, s: vectors("states"), StatesError, "str has no states"),
        (lambda m, s: vectors(m, TEXTS, pool=LEAST), TextError, "text 1 has 6 tokens"),
        (lambda m, s: vectors(s, pool=-LEAST - 1), TextError, "text 1 has 6 tokens"),
        (lambda m, s: blocks(s, site="layer.*"), StatesError, "names . sites"),
        (lambda m, s: blocks(m, TEXTS, site="layer.*"), StatesError, "names . sites"),
        (lambda m, s: vectors(s, sites="layer.40"), hs.errors.SiteError, "layer.40"),
        (lambda m, s: vectors(s)["layer.*"], StatesError, "names . sites"),
        (
            lambda m, s: vectors(s.select(tokens=[0, 1])),
            StatesError,
            "text 1 has no tokens here",
        ),
        (
            lambda m, s: vectors(s.select(tokens=s.tokens.positions > 0), pool="first"),
            StatesError,
            "only some of its tokens",
        ),
        (
            lambda m, s: vectors(s.select(tokens=s.tokens.positions > 0), pool=0),
            StatesError,
            "only some of its tokens",
        ),
    ],
)
def test_what_cannot_be_had_is_said(
    tiny: Callable[..., hs.Model], call: Callable[..., object], error: type, said: str
) -> None:
    model = tiny("llama")
    with pytest.raises(error, match=said):
        call(model, model.capture(TEXTS))


def test_a_bad_text_is_named_by_its_number_among_all(
    tiny: Callable[..., hs.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(computed, "PORTION", 5)
    with pytest.raises(TextError, match="Text 7: it is empty"):
        vectors(tiny("llama"), [*TEXTS[:7], "", "A dog"])
    with pytest.raises(TextError, match="text 6 has 2 tokens"):
        vectors(tiny("llama"), [[5, 6, 7]] * 6 + [[8, 9]], pool=2)


def test_a_nan_is_named_by_site_and_text() -> None:
    values = torch.zeros(2, 5, 3)
    values[1, 3, 0] = float("nan")
    states = toy(values, [0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    for token in ("mean", "max", 0):
        with pytest.raises(NotFinite, match=r"a NaN at layer\.1, text 1"):
            vectors(states, pool=token)
    with pytest.raises(NotFinite, match=r"text 1, position 0"):
        vectors(states, pool=None)
    assert vectors(states, pool="last").values.isfinite().all()
    values[1, 3, 0] = float("inf")
    with pytest.raises(NotFinite, match="an infinity"):
        vectors(states, pool="mean")


def test_a_nan_in_a_model_is_named_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    module = tiny_model("llama")
    model = hs.load((module, None))
    # Not in the weights, where it would be found before any pass.
    module.get_input_embeddings().register_forward_hook(  # type: ignore[operator]
        lambda _, given, states: states.masked_fill(
            (given[0] == 9)[..., None], torch.nan
        )
    )
    monkeypatch.setattr(computed, "PORTION", 2)
    with pytest.raises(NotFinite, match=r"a NaN at layer\.0, text 3, position 1"):
        vectors(model, [[5, 6, 7], [5, 6], [8, 7], [7, 9, 5]], pool="last")


@pytest.mark.parametrize("token", ["mean", "last", None])
def test_states_that_end_too_soon_or_too_late_are_refused(token: str) -> None:
    states = toy(torch.zeros(1, 5, 3), [0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    for rows in (4, 6, 3):
        damaged = Bare(states)
        damaged.blocks = lambda site, rows=rows: iter([torch.zeros(rows, 3)])
        with pytest.raises(StatesError, match=f"have {rows} rows for 5 tokens"):
            vectors(damaged, pool=token)


def test_more_than_the_memory_is_refused(
    tiny: Callable[..., hs.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "free_memory", lambda: 1000)
    with pytest.raises(TooLarge, match="12 vectors at 5 sites"):
        vectors(tiny("llama"), TEXTS)


def test_the_order_of_texts_is_that_of_the_rows(tiny: Callable[..., hs.Model]) -> None:
    model = tiny("llama")
    order = np.random.default_rng(0).permutation(len(TEXTS))
    one = vectors(model, TEXTS, pool="mean").values
    other = vectors(model, [TEXTS[i] for i in order], pool="mean").values
    torch.testing.assert_close(other, one[:, order.tolist()], rtol=1e-5, atol=1e-6)


ENCODERS, DECODERS = ("bert", "roberta"), ("gpt2", "llama")


@pytest.mark.parametrize("family", [*ENCODERS, *DECODERS])
def test_what_stands_for_a_text_is_chosen_by_the_model_and_said(family: str) -> None:
    """In an encoder the last token is a separator: there it is the mean."""
    model = hs.load((tiny_model(family), tiny_tokenizer()))
    expected = "mean" if family in ENCODERS else "last"
    texts = [[5 + k, 9, 7 + k % 2, 12] for k in range(24)]
    data = (texts, [k % 2 for k in range(24)])
    probed, projected = (
        hs.probe(model, data, sites="layer.1"),
        hs.project(model, data, sites="layer.1", method="pca"),
    )
    assert (
        probed.facts["token"]
        == projected.facts["token"]
        == default_pool(model)
        == expected
    )
    assert (
        f"the {'mean over the tokens' if expected == 'mean' else 'last token'} of each"
        " text" in probed.summary()
    )
    explicit = hs.probe(model, data, sites="layer.1", pool=expected)
    assert explicit.equals(probed)
    assert (
        hs.probe(model, data, sites="layer.1", pool="first").facts["token"] == "first"
    )
    direction = hs.Direction.between(model, texts[:3], texts[3:6], sites="layer.1")
    assert direction.facts["pool"] == expected


def test_what_stands_for_a_text_of_an_encoder_decoder_is_that_of_its_stack() -> None:
    model = hs.load((tiny_model("t5"), None))
    assert (default_pool(model), default_pool(model, "decoder.layer.*")) == (
        "mean",
        "last",
    )
    states = model.capture([[5, 6, 7]], targets=[[0, 8]])
    assert (default_pool(states), default_pool(states, "decoder.layer.*")) == (
        "mean",
        "last",
    )


def test_models_side_by_side_share_what_stands_for_a_text() -> None:
    models = [hs.load((tiny_model(family), None)) for family in ("bert", "gpt2")]
    data = ([[5, 6, k] for k in range(8, 16)], ["a", "b"] * 4)
    assert (
        hs.project(models, data, sites="layer.1", method="pca").facts["token"] == "mean"
    )


def test_old_spellings_name_the_new_ones(tiny: Callable[..., hs.Model]) -> None:
    states = tiny("llama").capture(TEXTS)
    for function in (hs.probe, hs.project):
        with pytest.raises(ArgumentError, match="token is now called pool"):
            function(states, ["a"] * len(TEXTS), token="mean")  # type: ignore[call-arg]
        with pytest.raises(ArgumentError, match=r"hs\.each_token\(source\)"):
            function(states, ["a"] * len(TEXTS), token="each")  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match=r"hs\.each_token\(source\)"):
        hs.search(states, np.ones(64), pool="each")
    for function in (hs.lens, hs.visibility):
        with pytest.raises(ArgumentError, match="text is now called texts"):
            function(tiny("llama"), text=TEXTS)  # type: ignore[call-arg]


def test_rows_that_are_tokens_are_not_pooled(tiny: Callable[..., hs.Model]) -> None:
    each = hs.each_token(tiny("llama").capture(TEXTS))
    for call in (
        lambda: hs.search(each, np.ones(64), pool="mean"),
        lambda: hs.project(each, pool="mean"),
        lambda: hs.probe(each, "position", pool="mean"),
    ):
        with pytest.raises(ArgumentError, match="every token is a row of its own"):
            call()


def test_the_names_of_poolings_are_read_without_numpy() -> None:
    program = "import hiddenscope.states.pooling, sys; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"numpy", "torch"} & set(loaded.stdout.split())


@pytest.mark.parametrize(
    ("old", "new"), [("each", "--each-token"), ("mean", "--pool mean")]
)
def test_the_old_option_names_the_new_one(old: str, new: str) -> None:
    for command in ("probe", "project"):
        result = CliRunner().invoke(app, [command, "position", "--token", old])
        assert result.exit_code == 2
        assert f"it is now {new}" in result.output
