"""States, their tokens and their source."""

import json
import os
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from hiddenscope.errors import (
    Damaged,
    FileError,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
)
from hiddenscope.files import write_tensors
from hiddenscope.sites import Site
from hiddenscope.states import (
    Pair,
    Readable,
    Source,
    States,
    Tokens,
    join,
    load_states,
)
from hiddenscope.states.files import write
from hiddenscope.states.pooling import POOLINGS, parse_pooling

HOSTILE = ["", "\0", "a\0b", "\ud800", "\ud83d\ude00", "\U0001f600", "</script>"]
HOSTILE += ["=1+1", "\x1b[31m", "\u202e", "\\", "x" * 10_000]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def make_tokens(lengths: list[int], strings: list[str] | None = None) -> Tokens:
    n = sum(lengths)
    return Tokens(
        tuple(f"text {i}" for i in range(len(lengths))),
        np.repeat(np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(length) for length in [*lengths, 0]]),
        np.arange(n) + 100,
        tuple(strings or [f"t{i}" for i in range(n)]),
        np.stack([np.arange(n), np.arange(n) + 1], 1),
        len(lengths),
    )


def make_states(
    lengths: list[int],
    *,
    sites: str = "layer.0 layer.1 layer.2 final",
    dtype: torch.dtype = torch.float32,
    **source: Any,
) -> States:
    named = tuple(map(Site.parse, sites.split()))
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(len(named), sum(lengths), 8, generator=generator).to(dtype)
    return States(named, values, make_tokens(lengths), Source("toy", **source))


def make_pair(**source: Any) -> Pair:
    sites = "{0}.layer.0 {0}.layer.1"
    return Pair(
        make_states([3], sites=sites.format("encoder"), **source),
        make_states([2], sites=sites.format("decoder"), **source),
    )


def test_sites_are_read_by_name() -> None:
    states = make_states([3, 2])
    assert torch.equal(states["layer.1"], states.values[1])
    assert torch.equal(states[Site(None)], states.values[3])
    assert torch.equal(states["hidden_states[2]"], states.values[3])
    assert torch.equal(states["layer.-1"], states.values[2])
    assert states.width == 8
    near = r"it has layer\.0 to layer\.2 and final\. The last is 'layer\.2'"
    with pytest.raises(SiteError, match=near):
        states["layer.9"]
    with pytest.raises(SiteError, match="it names 3"):
        states["layer.*"]
    # The raw last layer is not the last hidden state.
    some = make_states([2], sites="layer.0 layer.4", depth=4, final=True)
    with pytest.raises(SiteError):
        some["hidden_states[4]"]
    fewer = make_states([2], sites="layer.0 layer.2 final", depth=4, final=True)
    assert torch.equal(fewer["hidden_states[2]"], fewer["layer.2"])
    assert torch.equal(fewer["hidden_states[4]"], fewer["final"])
    # An entry of hidden_states is the site that it was proved to be.
    reported = ("layer.1", "layer.2", "final")
    mamba = make_states([2], depth=2, final=True, reported=reported)
    assert torch.equal(mamba["hidden_states[0]"], mamba["layer.1"])
    assert torch.equal(mamba["hidden_states[-1]"], mamba["final"])


def test_what_does_not_fit_is_refused() -> None:
    for sites, values in (
        ("layer.0", torch.zeros(2, 3, 4)),
        ("layer.0", torch.zeros(1, 4, 4)),
        ("layer.0", torch.zeros(3, 4)),
        ("layer.1 layer.0", torch.zeros(2, 3, 4)),
        ("layer.0 layer.0", torch.zeros(2, 3, 4)),
        ("encoder.layer.0 decoder.layer.0", torch.zeros(2, 3, 4)),
        ("", torch.zeros(0, 3, 4)),
        ("layer.0", torch.zeros(1, 3, 4, dtype=torch.int64)),
    ):
        named = tuple(map(Site.parse, sites.split()))
        with pytest.raises(StatesError):
            States(named, values, make_tokens([2, 1]), Source("toy"))


def test_tokens_are_checked_and_cannot_be_written() -> None:
    right: dict[str, Any] = {"texts": ("a", "b"), "text": [0, 1], "ids": [7, 8]}
    right |= {"positions": [0, 0], "strings": ("a", "b")}
    assert Tokens(**right).count == 2
    for wrong in (
        {"text": [1, 0]},
        {"text": [0, 2]},
        {"text": [-1, 0]},
        {"text": [0]},
        {"ids": [1.5, 2.5]},
        {"ids": [[1], [2]]},
        {"spans": [[1, 2]]},
        {"texts": ("a",)},
        {"count": 3},
    ):
        with pytest.raises(StatesError):
            Tokens(**(right | {"count": 2} | wrong))
    ids = np.array([7, 8])
    tokens = Tokens(None, np.array([0, 0]), np.array([0, 1]), ids, ("a", "b"))
    ids[0] = 9
    assert tokens.ids.tolist() == [7, 8]
    assert tokens.spans.tolist() == [[-1, -1], [-1, -1]]
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids[0] = 1


@settings(deadline=None, max_examples=25)
@given(LENGTHS, st.sampled_from(DTYPES))
def test_texts_among_others_are_the_texts_alone(
    lengths: list[int], dtype: torch.dtype
) -> None:
    """Taken apart and joined, padded, and pooled."""
    states = make_states(lengths, dtype=dtype)
    apart = [states.of(i) for i in range(len(lengths))]
    assert [len(part.tokens) for part in apart] == lengths
    together = join(apart)
    assert torch.equal(together.values, states.values)
    assert together.tokens.equals(states.tokens)
    assert states.of(-1).tokens.equals(apart[-1].tokens)
    assert apart[0].values.data_ptr() == states.values.data_ptr()
    values, mask = states.padded()
    assert values.shape == (4, len(lengths), max(lengths), 8)
    assert mask.sum(1).tolist() == lengths
    assert torch.equal(values[:, mask], states.values)
    assert not values[:, ~mask].any()
    for how in ("mean", "max", "last"):
        pooled = states.pool(how)
        assert pooled.shape == (4, len(lengths), 8)
        assert torch.equal(states.pool(how, "layer.1"), pooled[1])
        for i, part in enumerate(apart):
            assert torch.equal(part.pool(how)[:, 0], pooled[:, i])


def test_join_and_of_refuse_what_is_not_there() -> None:
    states = make_states([2, 1])
    for other in (
        make_states([2], dtype=torch.float64),
        make_states([2], sites="layer.0"),
        make_states([2], cls=1),
    ):
        with pytest.raises(StatesError):
            join([states, other])
    with pytest.raises(StatesError):
        join([])
    for text in (2, -3, 10**30):
        with pytest.raises(StatesError, match="there are 2"):
            states.of(text)


def test_select() -> None:
    states = make_states([3, 2])
    some = states.select(sites="final,layer.0", tokens=[4, 0, 0, -2])
    assert some.sites == (Site(0), Site(None))
    assert torch.equal(some.values, states.values[[0, 3]][:, [0, 3, 4]])
    assert some.tokens.text.tolist() == [0, 1, 1]
    assert some.tokens.strings == ("t0", "t3", "t4")
    assert some.tokens.count == 2
    mask = states.tokens.positions == 0
    for chosen in (mask, torch.from_numpy(mask), mask.tolist(), [0, 3], slice(0, 5, 3)):
        assert states.select(tokens=chosen).tokens.ids.tolist() == [100, 103]
    assert len(states.select(tokens=[]).tokens) == 0
    assert states.select(tokens=slice(0, 3)).tokens.count == 2
    for wrong in ([5], [-6], mask[:3], [0.5], [[0]], "all"):
        with pytest.raises(StatesError):
            states.select(tokens=wrong)


def test_pooling_by_definition() -> None:
    states = make_states([3, 2], dtype=torch.bfloat16, cls=100)
    rows = states["layer.1"]
    mean = states.pool("mean", "layer.1")
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean[0], rows[:3].double().mean(0).float())
    larger = torch.maximum(rows[3], rows[4])
    assert torch.equal(states.pool("max", "layer.1")[1], larger)
    assert torch.equal(states.pool("last", "layer.1"), rows[[2, 4]])
    assert torch.equal(states.of(0).pool("cls", "layer.1"), rows[:1])
    assert make_states([2], dtype=torch.float64).pool("mean").dtype == torch.float64


def test_pooling_that_cannot_be() -> None:
    cases: list[tuple[States, Any, str | None]] = [
        (make_states([2]), "cls", "tokenizer of toy has no such token"),
        (make_states([2, 1], cls=100), "cls", "text 1 does not begin with that token"),
        (make_states([2]), "median", "No pooling 'median'"),
    ]
    for how in [*POOLINGS, 0]:
        cases.append((make_states([2, 0, 1], cls=100), how, None))
        cases.append((make_states([], cls=100), how, None))
    for states, how, said in cases:
        with pytest.raises(StatesError, match=said):
            states.pool(how)
    for pool in ("each", "median", True):
        with pytest.raises(PassError):
            parse_pooling(pool, PassError)


def test_mix() -> None:
    states = make_states([3], dtype=torch.bfloat16)
    expected = 0.5 * states.values[1].float() - 2 * states.values[3].float()
    assert torch.equal(states.mix([0, 0.5, 0, -2]), expected)
    assert torch.equal(states.mix({"layer.1": 0.5, Site(None): -2}), expected)
    weights = torch.zeros(4, requires_grad=True)
    states.mix(weights).sum().backward()
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, states.values.float().sum((1, 2)))
    nan, infinity = float("nan"), float("inf")
    for wrong in ([1, 2], [1, 2, 3, nan], [[1, 2, 3, 4]], {"layer.1": infinity}):
        with pytest.raises(StatesError):
            states.mix(wrong)
    with pytest.raises(SiteError):
        states.mix({"layer.7": 1.0})


def test_not_finite_is_named() -> None:
    states = make_states([3, 2])
    states.check_finite()
    states.values[2, 4, 1] = float("inf")
    states.values[1, 3, 5] = states.values[1, 3, 6] = float("nan")
    with pytest.raises(NotFinite) as caught:
        states.check_finite()
    where = "a NaN at layer.1, token 't3' (text 1, position 0): 2 of its 40 values are"
    assert where in str(caught.value)
    states.values[1] = 0
    with pytest.raises(NotFinite, match=r"an infinity at layer\.2, token 't4'"):
        states.check_finite()


def test_blocks_meet_the_protocol() -> None:
    states = make_states([3, 4])
    assert isinstance(states, Readable)
    blocks = list(states.blocks("layer.1", rows=3))
    assert [len(block) for block in blocks] == [3, 3, 1]
    assert torch.equal(torch.cat(blocks), states["layer.1"])
    assert len(list(states.blocks("layer.1", rows=1))) == 7
    with pytest.raises(StatesError, match="rows must be an integer >= 1"):
        states.blocks("layer.1", rows=0)
    with pytest.raises(SiteError):
        states.blocks("layer.8")


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_or_labelled_is_the_same(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    strings = make_tokens([5, 7], HOSTILE)
    ids, where = strings.ids, (strings.text, strings.positions)
    texts = None if dtype == torch.float16 else ("\ud83d\ude00", "\0")
    tokens = Tokens(texts, *where, ids, HOSTILE, strings.spans)
    names = ("toy\ud800", "main", "sha", "bf16", "cpu", "sdpa")
    source = Source(*names, {"torch": "2"}, ("a", "b"), 3, True, 7)
    values = torch.randn(2, 12, 3).to(dtype)
    values[0, 0, 0] = float("nan")
    states = States((Site(0), Site(1, "mlp")), values, tokens, source)
    states.save(tmp_path / "x.safetensors")
    back = States.load(tmp_path / "x.safetensors")
    assert back.sites == states.sites
    assert back.values.dtype == dtype
    assert torch.equal(back.values.nan_to_num(7), values.nan_to_num(7))
    assert back.tokens.equals(tokens)
    assert back.source == source
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]
    array = states.to_numpy()
    assert array.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    same = torch.from_numpy(array).to(dtype)
    assert torch.equal(same.nan_to_num(7), values.nan_to_num(7))
    labelled = states.to_xarray()
    assert labelled.dims == ("site", "token", "width")
    assert labelled.coords["string"].to_numpy().tolist() == HOSTILE
    assert np.array_equal(labelled.sel(site="layer.1.mlp"), array[1])
    assert Source.from_json(json.loads(labelled.attrs["source"])) == source
    frame = states.to_pandas()
    assert np.array_equal(frame["layer.1.mlp"].to_numpy(), array[1])
    assert list(frame.index.get_level_values("string")) == HOSTILE
    assert frame.index.get_level_values("text").tolist() == tokens.text.tolist()


def test_gradients_do_not_hinder() -> None:
    values = torch.randn(1, 2, 3, requires_grad=True)
    states = States((Site(0),), values, make_tokens([2]), Source("toy"))
    assert states.to_numpy().shape == (1, 2, 3)
    states.pool("mean").sum().backward()
    assert values.grad is not None


def test_views_are_saved_alone_and_shared_memory_twice(tmp_path: Path) -> None:
    states, path = make_states([300, 2]), tmp_path / "x.safetensors"
    states.of(1).save(path)
    assert path.stat().st_size < 4_000
    assert torch.equal(States.load(path).values, states.of(1).values)
    encoder = make_states([3], sites="encoder.layer.0 encoder.layer.1")
    decoder = (Site.parse("decoder.layer.0"),)
    shared = States(decoder, encoder.values[:1], encoder.tokens, encoder.source)
    Pair(encoder, shared).save(path)
    back = Pair.load(path)
    assert torch.equal(back.encoder.values, encoder.values)
    assert torch.equal(back.decoder.values, encoder.values[:1])


def test_a_pair(tmp_path: Path) -> None:
    encoder = make_states([3], sites="encoder.layer.0 encoder.layer.1 encoder.final")
    decoder = make_states([2], sites="decoder.layer.0 decoder.layer.1")
    pair = Pair(encoder, decoder)
    assert torch.equal(pair["decoder.layer.1"], decoder.values[1])
    assert torch.equal(pair["final"], encoder.values[2])
    assert torch.equal(encoder["layer.1"], encoder.values[1])
    for pattern, count in (("layer.1", 2), ("layer.0-1", 4)):
        with pytest.raises(SiteError, match=f"it names {count}"):
            pair[pattern]
    assert repr(pair) == f"{encoder!r}\n{decoder!r}"
    with pytest.raises(StatesError):
        Pair(decoder, encoder)
    # It counts from the end of the model, not of what was kept.
    kept = make_pair(depth=3, final=True)
    assert torch.equal(kept["decoder.layer.-3"], kept.decoder.values[1])
    for gone in ("encoder.layer.-1", "encoder_hidden_states[-1]", "decoder.layer.7"):
        with pytest.raises(SiteError) as caught:
            kept[gone]
        assert f"No site '{gone}'" in str(caught.value)
    both, one = tmp_path / "pair.safetensors", tmp_path / "one.safetensors"
    pair.save(both)
    encoder.save(one)
    for back in (Pair.load(both), load_states(both)):
        assert isinstance(back, Pair)
        assert torch.equal(back.encoder.values, encoder.values)
        assert back.decoder.tokens.equals(decoder.tokens)
    loaded = load_states(one)
    assert isinstance(loaded, States) and torch.equal(loaded.values, encoder.values)
    with pytest.raises(FileError, match="it holds a pair"):
        States.load(both)
    with pytest.raises(FileError, match="it holds one stack"):
        Pair.load(one)
    write(both, {"encoder.": encoder._parts(), "decoder.": encoder._parts()})
    with pytest.raises(FileError, match="Cannot pair an encoder and a decoder"):
        load_states(both)


def test_a_damaged_file_of_states_is_said_to_be_damaged_whatever_its_name(
    tmp_path: Path,
) -> None:
    for name, states in (
        ("a Pair of pairs", make_states([3])),
        ("one stack", make_pair()),
    ):
        path = tmp_path / f"{name}.safetensors"
        states.save(path)
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        other = "its bytes are not those that were written"
        for load in (load_states, States.load, Pair.load):
            with pytest.raises(Damaged, match=other):
                load(path)


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    make_states([3]).save(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors, whole = load_file(path), path.read_bytes()
    bad = tmp_path / "bad.safetensors"
    contents = [b"", b"hello", whole[:-1], whole[:50], b"\0" * 64]
    for content in [*contents, struct.pack("<Q", 2**62) + b"{}"]:
        bad.write_bytes(content)
        with pytest.raises(FileError):
            States.load(bad)
    half = {"format": "hiddenscope.states/1", "states": "{}"}
    cases: list[tuple[dict[str, torch.Tensor], dict[str, str] | None]] = [
        ({"values": torch.zeros(1)}, None),
        ({"values": torch.zeros(1)}, half),
    ]
    for name in ("values", "text", "ids", "strings", "strings.ends", "spans"):
        cases.append((tensors | {name: tensors[name][:-1].clone()}, header))
        others = {key: value for key, value in tensors.items() if key != name}
        cases.append((others, header))
    for given_tensors, given_header in cases:
        save_file(given_tensors, bad, given_header)
        with pytest.raises(FileError):
            States.load(bad)
    # Sealed, by whoever wrote it.
    for count in (-1, 10**10):
        stacks = json.loads(header["states"])
        stacks[""]["count"] = count
        write_tensors(bad, tensors, header | {"states": json.dumps(stacks)})
        with pytest.raises(FileError, match="not this many texts"):
            States.load(bad)
    for absent in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileError):
            States.load(absent)


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    # It may be read by whom the umask lets.
    before = os.umask(0o027)
    try:
        make_states([3]).save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    content = path.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make_states([4]).save(path)
    assert path.read_bytes() == content
    with pytest.raises(FileError, match="Cannot write"):
        make_states([3]).save(tmp_path / "nowhere" / "x.safetensors")
    for name in ("x", "x.npz", "x.html"):
        with pytest.raises(FileError, match=r"a \.safetensors file"):
            make_states([3]).save(tmp_path / name)
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_repr_is_short_and_safe() -> None:
    tokens, values = make_tokens([12], HOSTILE), torch.zeros(1, len(HOSTILE), 2)
    states = States((Site(0),), values, tokens, Source("t\x1boy"))
    said = repr(states)
    assert "1 site x 12 tokens x 2" in said
    assert all(line.isprintable() for line in said.splitlines())
    assert len(said) < 400
    assert repr(tokens).isprintable()
    assert "layer.0 to layer.2 and final" in repr(make_states([3]))
    assert "none" in repr(make_states([]))


def test_a_source_is_json_both_ways() -> None:
    source = Source("toy", None, "sha", versions={"torch": "2"}, notes=("a",), cls=5)
    assert Source.from_json(json.loads(json.dumps(source.to_json()))) == source
    for wrong in ({}, {"model": 3}, {"model": "toy", "surprise": 1}):
        with pytest.raises(StatesError):
            Source.from_json(wrong)
