"""States, their tokens and their source."""

import json
import os
import re
import stat
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from hiddenscope.errors import (
    Damaged,
    FileError,
    NotFinite,
    PassError,
    SiteError,
    StatesError,
)
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
from hiddenscope.states.pooling import POOLINGS, NamedPooling, parse_pooling

HOSTILE = [
    "",
    "\0",
    "a\0b",
    "\ud800",
    "\ud83d\ude00",
    "\U0001f600",
    "</script>",
    "=1+1",
    "\x1b[31m",
    "\u202e",
    "\\",
    "x" * 10_000,
]


def make_tokens(
    lengths: list[int], *, texts: bool = True, strings: list[str] | None = None
) -> Tokens:
    n = sum(lengths)
    return Tokens(
        tuple(f"text {i}" for i in range(len(lengths))) if texts else None,
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
    values = torch.randn(
        len(named), sum(lengths), 8, generator=torch.Generator().manual_seed(1)
    ).to(dtype)
    return States(named, values, make_tokens(lengths), Source("toy", **source))


LENGTHS = st.lists(st.integers(1, 7), min_size=1, max_size=6)


def test_sites_are_read_by_name() -> None:
    states = make_states([3, 2])
    assert torch.equal(states["layer.1"], states.values[1])
    assert torch.equal(states[Site(None)], states.values[3])
    assert torch.equal(states["hidden_states[2]"], states.values[3])
    assert torch.equal(states["layer.-1"], states.values[2])
    assert states.width == 8
    with pytest.raises(
        SiteError,
        match=r"it has layer\.0 to layer\.2 and final\. Did you mean 'layer\.2'",
    ):
        states["layer.9"]
    with pytest.raises(SiteError, match="it names 3"):
        states["layer.*"]


def test_the_raw_last_layer_is_not_the_last_hidden_state() -> None:
    some = make_states([2], sites="layer.0 layer.4", depth=4, final=True)
    with pytest.raises(SiteError):
        some["hidden_states[4]"]
    fewer = make_states([2], sites="layer.0 layer.2 final", depth=4, final=True)
    assert torch.equal(fewer["hidden_states[2]"], fewer["layer.2"])
    assert torch.equal(fewer["hidden_states[4]"], fewer["final"])


@pytest.mark.parametrize(
    ("sites", "shape"),
    [
        ("layer.0", (2, 3, 4)),
        ("layer.0", (1, 4, 4)),
        ("layer.0", (3, 4)),
        ("layer.1 layer.0", (2, 3, 4)),
        ("layer.0 layer.0", (2, 3, 4)),
        ("encoder.layer.0 decoder.layer.0", (2, 3, 4)),
        ("", (0, 3, 4)),
    ],
)
def test_what_does_not_fit_is_refused(sites: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(StatesError):
        States(
            tuple(map(Site.parse, sites.split())),
            torch.zeros(shape),
            make_tokens([2, 1]),
            Source("toy"),
        )


def test_states_are_floats() -> None:
    with pytest.raises(StatesError, match=r"torch\.int64"):
        States(
            (Site(0),),
            torch.zeros(1, 1, 2, dtype=torch.int64),
            make_tokens([1]),
            Source("toy"),
        )


@pytest.mark.parametrize(
    "wrong",
    [
        {"text": [1, 0]},
        {"text": [0, 2]},
        {"text": [-1, 0]},
        {"text": [0]},
        {"ids": [1.5, 2.5]},
        {"ids": [[1], [2]]},
        {"spans": [[1, 2]]},
        {"texts": ("a",)},
        {"count": 3},
    ],
)
def test_tokens_are_checked(wrong: dict[str, Any]) -> None:
    right = {
        "texts": ("a", "b"),
        "text": [0, 1],
        "positions": [0, 0],
        "ids": [7, 8],
        "strings": ("a", "b"),
    }
    assert Tokens(**right).count == 2  # type: ignore[arg-type]
    with pytest.raises(StatesError):
        Tokens(**(right | {"count": 2} | wrong))


def test_tokens_cannot_be_written() -> None:
    ids = np.array([7, 8])
    tokens = Tokens(None, np.array([0, 0]), np.array([0, 1]), ids, ("a", "b"))
    ids[0] = 9
    assert tokens.ids.tolist() == [7, 8]
    assert tokens.spans.tolist() == [[-1, -1], [-1, -1]]
    with pytest.raises(ValueError, match="read-only"):
        tokens.ids[0] = 1


@settings(deadline=None)
@given(LENGTHS)
def test_the_texts_taken_apart_and_joined_are_the_same(lengths: list[int]) -> None:
    states = make_states(lengths)
    apart = [states.of(i) for i in range(len(lengths))]
    assert [len(part.tokens) for part in apart] == lengths
    together = join(apart)
    assert torch.equal(together.values, states.values)
    assert together.tokens.equals(states.tokens)
    assert states.of(-1).tokens.equals(apart[-1].tokens)
    assert apart[0].values.data_ptr() == states.values.data_ptr()


def test_join_refuses_what_differs() -> None:
    states = make_states([2])
    for other in (
        make_states([2], dtype=torch.float64),
        make_states([2], sites="layer.0"),
        make_states([2], cls=1),
    ):
        with pytest.raises(StatesError):
            join([states, other])
    with pytest.raises(StatesError):
        join([])


@pytest.mark.parametrize("text", [2, -3, 10**30])
def test_there_is_no_such_text(text: int) -> None:
    with pytest.raises(StatesError, match="there are 2"):
        make_states([2, 1]).of(text)


def test_select() -> None:
    states = make_states([3, 2])
    some = states.select(sites="final,layer.0", tokens=[4, 0, 0, -2])
    assert some.sites == (Site(0), Site(None))
    assert torch.equal(some.values, states.values[[0, 3]][:, [0, 3, 4]])
    assert some.tokens.text.tolist() == [0, 1, 1]
    assert some.tokens.strings == ("t0", "t3", "t4")
    assert some.tokens.count == 2
    mask = states.tokens.positions == 0
    for chosen in (
        mask,
        torch.from_numpy(mask),
        mask.tolist(),
        [0, 3],
        slice(None, None, 3),
    ):
        assert states.select(tokens=chosen).tokens.ids.tolist() == [100, 103]
    assert len(states.select(tokens=[]).tokens) == 0
    assert states.select(tokens=slice(0, 3)).tokens.count == 2
    for wrong in ([5], [-6], mask[:3], [0.5], [[0]], "all"):
        with pytest.raises(StatesError):
            states.select(tokens=wrong)


@settings(deadline=None)
@given(
    LENGTHS,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
)
def test_a_text_pooled_among_others_equals_the_text_alone(
    lengths: list[int], dtype: torch.dtype
) -> None:
    states = make_states(lengths, dtype=dtype)
    for how in ("mean", "max", "last"):
        pooled = states.pool(how)
        assert pooled.shape == (4, len(lengths), 8)
        assert torch.equal(states.pool(how, "layer.1"), pooled[1])
        for i in range(len(lengths)):
            assert torch.equal(states.of(i).pool(how)[:, 0], pooled[:, i])


def test_pooling_by_definition() -> None:
    states = make_states([3, 2], dtype=torch.bfloat16, cls=100)
    rows = states["layer.1"]
    assert states.pool("mean", "layer.1").dtype == torch.float32
    torch.testing.assert_close(
        states.pool("mean", "layer.1")[0], rows[:3].double().mean(0).float()
    )
    assert torch.equal(
        states.pool("max", "layer.1")[1], torch.maximum(rows[3], rows[4])
    )
    assert torch.equal(states.pool("last", "layer.1"), rows[[2, 4]])
    assert torch.equal(states.of(0).pool("cls", "layer.1"), rows[:1])
    assert make_states([2], dtype=torch.float64).pool("mean").dtype == torch.float64


def test_pooling_that_cannot_be() -> None:
    with pytest.raises(StatesError, match="tokenizer of toy has no such token"):
        make_states([2]).pool("cls")
    with pytest.raises(StatesError, match="text 1 does not begin with that token"):
        make_states([2, 1], cls=100).pool("cls")
    with pytest.raises(StatesError, match="No pooling 'median'"):
        make_states([2]).pool("median")  # type: ignore[arg-type]
    for how in [*POOLINGS, 0]:
        with pytest.raises(StatesError):
            make_states([2, 0, 1], cls=100).pool(how)  # type: ignore[arg-type]
        with pytest.raises(StatesError):
            make_states([], cls=100).pool(how)  # type: ignore[arg-type]


def test_a_pooling_is_a_position_or_a_reduction() -> None:
    both = {"position": 0, "reduce": lambda states, dtype: states[:, 0]}
    parts: dict[str, Any]
    for parts in ({}, both):
        with pytest.raises(TypeError, match="either a position or a reduction"):
            NamedPooling("neither or both", **parts)


@pytest.mark.parametrize("pool", ["each", "median", True])
def test_a_refused_pooling_is_the_error_that_the_caller_names(pool: object) -> None:
    with pytest.raises(PassError):
        parse_pooling(pool, PassError)


def test_mix() -> None:
    states = make_states([3], dtype=torch.bfloat16)
    expected = 0.5 * states.values[1].float() - 2 * states.values[3].float()
    assert torch.equal(states.mix([0, 0.5, 0, -2]), expected)
    assert torch.equal(states.mix({"layer.1": 0.5, Site(None): -2}), expected)
    weights = torch.zeros(4, requires_grad=True)
    states.mix(weights).sum().backward()  # type: ignore[no-untyped-call]
    assert weights.grad is not None
    torch.testing.assert_close(weights.grad, states.values.float().sum((1, 2)))
    for wrong in (
        [1, 2],
        [1, 2, 3, float("nan")],
        [[1, 2, 3, 4]],
        {"layer.1": float("inf")},
    ):
        with pytest.raises(StatesError):
            states.mix(wrong)  # type: ignore[arg-type]
    with pytest.raises(SiteError):
        states.mix({"layer.7": 1.0})


@settings(deadline=None)
@given(LENGTHS)
def test_padded_holds_the_same_rows(lengths: list[int]) -> None:
    states = make_states(lengths)
    values, mask = states.padded()
    assert values.shape == (4, len(lengths), max(lengths), 8)
    assert mask.sum(1).tolist() == lengths
    assert torch.equal(values[:, mask], states.values)
    assert not values[:, ~mask].any()


def test_not_finite_is_named() -> None:
    states = make_states([3, 2])
    states.check_finite()
    states.values[2, 4, 1] = float("inf")
    states.values[1, 3, 5] = states.values[1, 3, 6] = float("nan")
    with pytest.raises(NotFinite) as caught:
        states.check_finite()
    assert (
        "a NaN at layer.1, token 't3' (text 1, position 0): 2 of its 40 values are not"
        " finite" in str(caught.value)
    )
    states.values[1] = 0
    with pytest.raises(NotFinite, match=r"an infinity at layer\.2, token 't4'"):
        states.check_finite()


def test_blocks_meet_the_protocol() -> None:
    states = make_states([3, 4])
    assert isinstance(states, Readable)
    blocks = list(states.blocks("layer.1", rows=3))
    assert [len(block) for block in blocks] == [3, 3, 1]
    assert torch.equal(torch.cat(blocks), states["layer.1"])
    with pytest.raises(SiteError):
        states.blocks("layer.8")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
def test_numpy_xarray_and_pandas_hold_the_same(dtype: torch.dtype) -> None:
    states = States(
        (Site(0), Site(1)),
        torch.randn(2, len(HOSTILE), 3).to(dtype),
        make_tokens([5, 7], strings=HOSTILE),
        Source("toy"),
    )
    array = states.to_numpy()
    assert array.dtype == (np.float64 if dtype == torch.float64 else np.float32)
    assert torch.equal(torch.from_numpy(array).to(dtype), states.values)
    labelled = states.to_xarray()
    assert labelled.dims == ("site", "token", "width")
    assert labelled.coords["string"].to_numpy().tolist() == HOSTILE
    assert np.array_equal(labelled.sel(site="layer.1"), array[1])
    assert Source.from_json(json.loads(labelled.attrs["source"])) == states.source
    frame = states.to_pandas()
    assert np.array_equal(frame["layer.1"].to_numpy(), array[1])
    assert list(frame.index.get_level_values("string")) == HOSTILE
    assert frame.index.get_level_values("text").tolist() == states.tokens.text.tolist()


def test_gradients_do_not_hinder() -> None:
    values = torch.randn(1, 2, 3, requires_grad=True)
    states = States((Site(0),), values, make_tokens([2]), Source("toy"))
    assert states.to_numpy().shape == (1, 2, 3)
    states.pool("mean").sum().backward()  # type: ignore[no-untyped-call]
    assert values.grad is not None


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("texts", [True, False])
def test_what_is_saved_comes_back(
    tmp_path: Path, dtype: torch.dtype, texts: bool
) -> None:
    tokens = make_tokens([5, 7], texts=texts, strings=HOSTILE)
    if texts:
        tokens = Tokens(
            ("\ud83d\ude00", "\0"),
            tokens.text,
            tokens.positions,
            tokens.ids,
            tokens.strings,
            tokens.spans,
        )
    source = Source(
        "toy\ud800",
        "main",
        "sha",
        "bf16",
        "cpu",
        "sdpa",
        {"torch": "2"},
        ("a", "b"),
        3,
        True,
        7,
    )
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


@settings(deadline=None)
@given(st.lists(st.text(st.characters()), max_size=8))
def test_any_string_comes_back(
    tmp_path_factory: pytest.TempPathFactory, strings: list[str]
) -> None:
    path = tmp_path_factory.mktemp("states") / "x.safetensors"
    zeros = np.zeros(len(strings), dtype=np.int64)
    tokens = Tokens(
        tuple(strings), np.arange(len(strings)), zeros, zeros, tuple(strings)
    )
    States((Site(0),), torch.zeros(1, len(strings), 1), tokens, Source("toy")).save(
        path
    )
    assert States.load(path).tokens.equals(tokens)


def test_a_view_is_saved_alone(tmp_path: Path) -> None:
    states = make_states([300, 2])
    states.of(1).save(tmp_path / "x.safetensors")
    assert (tmp_path / "x.safetensors").stat().st_size < 4_000
    assert torch.equal(
        States.load(tmp_path / "x.safetensors").values, states.of(1).values
    )


def test_a_pair(tmp_path: Path) -> None:
    encoder = make_states([3], sites="encoder.layer.0 encoder.layer.1 encoder.final")
    decoder = make_states([2], sites="decoder.layer.0 decoder.layer.1")
    pair = Pair(encoder, decoder)
    assert torch.equal(pair["decoder.layer.1"], decoder.values[1])
    assert torch.equal(pair["final"], encoder.values[2])
    assert torch.equal(encoder["layer.1"], encoder.values[1])
    with pytest.raises(SiteError, match="it names 2"):
        pair["layer.1"]
    with pytest.raises(SiteError, match="it names 4"):
        pair["layer.0-1"]
    assert repr(pair) == f"{encoder!r}\n{decoder!r}"
    with pytest.raises(StatesError):
        Pair(decoder, encoder)
    pair.save(tmp_path / "pair.safetensors")
    back = Pair.load(tmp_path / "pair.safetensors")
    assert torch.equal(back.encoder.values, encoder.values)
    assert back.decoder.tokens.equals(decoder.tokens)
    with pytest.raises(FileError, match="it holds a pair"):
        States.load(tmp_path / "pair.safetensors")
    encoder.save(tmp_path / "one.safetensors")
    with pytest.raises(FileError, match="it holds one stack"):
        Pair.load(tmp_path / "one.safetensors")


def test_a_file_of_states_is_opened_whichever_it_holds(tmp_path: Path) -> None:
    one = make_states([3], sites="encoder.layer.0")
    pair = Pair(one, make_states([2], sites="decoder.layer.0"))
    one.save(tmp_path / "one.safetensors")
    pair.save(tmp_path / "pair.safetensors")
    loaded = load_states(tmp_path / "one.safetensors")
    assert isinstance(loaded, States) and torch.equal(loaded.values, one.values)
    both = load_states(tmp_path / "pair.safetensors")
    assert isinstance(both, Pair) and both.decoder.tokens.equals(pair.decoder.tokens)


def test_a_damaged_file_of_states_is_said_to_be_damaged_whatever_its_name(
    tmp_path: Path,
) -> None:
    for name, states in (
        ("a Pair of pairs", make_states([3])),
        ("one stack", _a_pair()),
    ):
        path = tmp_path / f"{name}.safetensors"
        states.save(path)
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        for load in (load_states, States.load, Pair.load):
            with pytest.raises(
                Damaged, match="its bytes are not those that were written"
            ):
                load(path)


def test_a_pair_whose_stacks_share_memory_is_saved(tmp_path: Path) -> None:
    encoder = make_states([3], sites="encoder.layer.0 encoder.layer.1")
    decoder = States(
        (Site.parse("decoder.layer.0"),),
        encoder.values[:1],
        encoder.tokens,
        encoder.source,
    )
    Pair(encoder, decoder).save(tmp_path / "x.safetensors")
    back = Pair.load(tmp_path / "x.safetensors")
    assert torch.equal(back.encoder.values, encoder.values) and torch.equal(
        back.decoder.values, encoder.values[:1]
    )


def test_a_pair_of_two_encoders_is_no_pair(tmp_path: Path) -> None:
    pair = _a_pair()
    write(
        tmp_path / "x.safetensors",
        {"encoder.": pair.encoder._parts(), "decoder.": pair.encoder._parts()},
    )
    with pytest.raises(FileError, match="Cannot pair an encoder and a decoder"):
        load_states(tmp_path / "x.safetensors")


def _a_pair() -> Pair:
    return Pair(
        make_states([3], sites="encoder.layer.0"),
        make_states([2], sites="decoder.layer.0"),
    )


def test_a_pair_counts_from_the_end_of_the_model_not_of_what_was_kept() -> None:
    some = "{0}.layer.0 {0}.layer.1"
    kept = Pair(
        *(
            make_states([2], sites=some.format(name), depth=3, final=True)
            for name in ("encoder", "decoder")
        )
    )
    assert torch.equal(kept["decoder.layer.-3"], kept.decoder.values[1])
    for gone in ("encoder.layer.-1", "encoder_hidden_states[-1]", "decoder.layer.7"):
        with pytest.raises(SiteError, match=re.escape(f"No site '{gone}'")):
            kept[gone]


def test_files_that_are_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    make_states([3]).save(path)
    whole = path.read_bytes()
    save_file({"values": torch.zeros(1)}, tmp_path / "other.safetensors")
    save_file(
        {"values": torch.zeros(1)},
        tmp_path / "half.safetensors",
        {"format": "hiddenscope.states/1", "states": "{}"},
    )
    for i, content in enumerate(
        [
            b"",
            b"hello",
            whole[:-1],
            whole[:50],
            struct.pack("<Q", 2**62) + b"{}",
            b"\0" * 64,
        ]
    ):
        (tmp_path / f"bad{i}.safetensors").write_bytes(content)
    for bad in [
        *tmp_path.glob("bad*"),
        *tmp_path.glob("other*"),
        *tmp_path.glob("half*"),
        tmp_path,
        tmp_path / "none",
    ]:
        with pytest.raises(FileError):
            States.load(bad)


@pytest.mark.parametrize(
    "name", ["values", "text", "ids", "strings", "strings.ends", "spans"]
)
def test_a_file_whose_tensors_do_not_fit(tmp_path: Path, name: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file

    path = tmp_path / "x.safetensors"
    make_states([3]).save(path)
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:-1].clone()}, path, header)
    with pytest.raises(FileError):
        States.load(path)
    save_file({key: tensors[key] for key in tensors if key != name}, path, header)
    with pytest.raises(FileError):
        States.load(path)


def test_a_failed_save_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    make_states([3]).save(path)
    before = path.read_bytes()

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_states([4]).save(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["x.safetensors"]
    with pytest.raises(FileError, match="Cannot write"):
        make_states([3]).save(tmp_path / "nowhere" / "x.safetensors")


def test_a_saved_file_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        make_states([3]).save(tmp_path / "x.safetensors")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x.safetensors").stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["x", "x.npz", "x.html"])
def test_a_suffix_that_promises_another_format(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match=r"states are saved as \.safetensors"):
        make_states([3]).save(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_the_repr_is_short_and_safe() -> None:
    states = States(
        (Site(0),),
        torch.zeros(1, len(HOSTILE), 2),
        make_tokens([12], strings=HOSTILE),
        Source("t\x1boy"),
    )
    said = repr(states)
    assert "1 site x 12 tokens x 2" in said
    assert all(line.isprintable() for line in said.splitlines())
    assert len(said) < 400
    assert repr(states.tokens).isprintable()
    assert "layer.0 to layer.2 and final" in repr(make_states([3]))
    assert "none" in repr(make_states([]))


def test_a_source_is_json_both_ways() -> None:
    source = Source(
        "toy", None, "sha", versions={"torch": "2.13"}, notes=("truncated",), cls=5
    )
    assert Source.from_json(json.loads(json.dumps(source.to_json()))) == source
    for wrong in ({}, {"model": 3}, {"model": "toy", "surprise": 1}):
        with pytest.raises(StatesError):
            Source.from_json(wrong)


def test_an_entry_of_hidden_states_is_the_site_it_was_proved_to_be():
    mamba = Source(
        "mamba", depth=2, final=True, reported=("layer.1", "layer.2", "final")
    )
    tokens = Tokens(None, [0], [0], [5], ("a",))
    values = torch.arange(4.0).reshape(4, 1, 1)
    states = States((Site(0), Site(1), Site(2), Site(None)), values, tokens, mamba)
    assert states["hidden_states[0]"].item() == states["layer.1"].item() == 1
    assert states["hidden_states[-1]"].item() == states["final"].item()
