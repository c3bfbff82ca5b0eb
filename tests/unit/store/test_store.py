"""A store: what is committed is read back bit for bit, and whatever else is an error
that says so.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import hiddenscope as hs
from hiddenscope.errors import Damaged, Error, StatesError, StoreError
from hiddenscope.store import (
    StorePlan,
    StoreSequence,
    Writer,
    create,
    resume_store,
)
from hiddenscope.testing.stores import (
    COPIES,
    SITES,
    tiny_sequence,
    tiny_sequences,
    tiny_store,
    tiny_values,
)
from labs.chaos.kills import files_of
from tests.unit.store.machine import damage

WIDTH = 24
STRINGS = {number: f"t{number}" for number in range(200)}
MODEL = {"model": "toy", "dtype": "float32", "depth": 1, "final": True}
PLAN = StorePlan(
    MODEL, {}, SITES, dict.fromkeys(SITES, WIDTH), "float32", corpus={"count": 7}
)


def expected(writer: Writer, site: str) -> NDArray[np.float32]:
    """All rows of a site in the order of the corpus, copies too, as float32."""
    by_text: dict[int, list[NDArray[Any]]] = {}
    for unit in writer.plan.units:
        states, done = tiny_values(writer, unit.name)[site], 0
        for one in writer.sequences(unit.name):
            length = len(one.ids) if writer.plan.pool is None else 1
            by_text.setdefault(one.text, []).append(states[done : done + length])
            done += length
    for text, same in COPIES:
        by_text[text] = by_text[same]
    rows = np.concatenate([part for text in sorted(by_text) for part in by_text[text]])
    if writer.plan.dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.astype("f4")


def test_the_same_corpus_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    tiny_store(tmp_path / "a")
    writer = tiny_store(tmp_path / "b", units=[])
    for unit in reversed(writer.pending()):
        other = resume_store(tmp_path / "b", digest=writer.digest)
        assert other.commit(unit, tiny_values(writer, unit))
    writer.complete()
    files = files_of(tmp_path / "a")
    assert files == files_of(tmp_path / "b")
    shards = [name for name in files if name.startswith("data")]
    assert len(shards) == 3
    for name in shards:
        assert name == f"data/{files[name]}.safetensors"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_committed_is_read_back_exactly(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    writer = tiny_store(tmp_path, dtype=dtype)
    store = hs.open(tmp_path)
    assert store.complete and len(store) == 32
    assert store.texts.tolist() == list(range(7))
    for site in SITES:
        wanted, array = expected(writer, site), store[site]
        assert array.shape == wanted.shape and array.dtype == wanted.dtype
        assert np.array_equal(np.asarray(array), wanted)
        blocks = list(store.blocks(site, rows=5))
        assert {block.dtype for block in blocks} == {getattr(torch, dtype)}
        assert max(map(len, blocks)) == 5
        assert np.array_equal(torch.cat(blocks).float().numpy(), wanted)
        assert np.array_equal(np.concatenate(list(array.blocks(7))), wanted)
    assert np.array_equal(store[1][3], store["layer.1"][3])
    said = f"Store of toy, {dtype}: 3 sites x 32 rows of 7 texts, complete"
    assert repr(store).startswith(said)
    # A shard is a plain safetensors file.
    record = json.loads((tmp_path / "commits/000001.json").read_text())
    tensors = load_file(tmp_path / "data" / f"{record['sha256']}.safetensors")
    for site, committed in tiny_values(writer, "000001").items():
        bits = torch.int32 if dtype == "float32" else torch.int16
        assert tensors[site].dtype == getattr(torch, dtype)
        found = tensors[site].view(bits).numpy()
        assert np.array_equal(found, committed.view(found.dtype))
    assert tensors["text"].tolist() == [3, 3] and tensors["start"].tolist() == [0, 3]
    assert tensors["offsets"].tolist() == [0, 6, 10]
    assert tensors["ids"].tolist()[:2] == [51, 52]
    assert tensors["spans"].shape == (10, 2)


def test_a_unit_is_committed_once(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    before = files_of(tmp_path)
    assert not writer.commit("000000", tiny_values(writer, "000000"))
    assert files_of(tmp_path) == before
    assert writer.pending() == ["000001", "000002"]
    left = "2 units are not committed, the first is 000001"
    with pytest.raises(StoreError, match=left):
        writer.complete()


def test_another_plan_is_refused_with_every_difference(tmp_path: Path) -> None:
    tiny_store(tmp_path, units=[])
    model = {"model": "toy", "weights": "1f", "depth": 1, "final": True}
    other = replace(PLAN, dtype="bfloat16", model=model)
    with pytest.raises(StoreError) as caught:
        create(tmp_path, other, tiny_sequences(), COPIES, STRINGS)
    for difference in (
        "dtype: float32 there, bfloat16 asked",
        "model.dtype: float32 there, nothing asked",
        "model.weights: nothing there, 1f asked",
    ):
        assert difference in str(caught.value)
    with pytest.raises(StoreError, match="units: 3 there, 2 asked"):
        create(tmp_path, PLAN, tiny_sequences()[:2], COPIES, STRINGS)
    same = create(tmp_path, PLAN, tiny_sequences(), COPIES, STRINGS)
    assert same.pending() == ["000000", "000001", "000002"]


def test_a_plan_keeps_every_nth_token_or_pools_them() -> None:
    for wrong in ({"every": 0}, {"every": 2, "pool": "mean"}):
        with pytest.raises(StoreError, match="every n-th token, n from 1 on, or pools"):
            replace(PLAN, **wrong)


ZERO, ONE = tiny_sequence(0, 2), tiny_sequence(1, 2)
MISFITS: list[tuple[list[list[StoreSequence]], list[tuple[int, int]], str]] = [
    ([], [], "there are no texts"),
    ([[ZERO], []], [], "unit 1 has no texts"),
    ([[ONE, ZERO]], [], r"\(0, 0\) comes after \(1, 0\)"),
    ([[ZERO, ZERO]], [], r"\(0, 0\) comes after \(0, 0\)"),
    ([[ZERO, tiny_sequence(2, 2)]], [], "a text has sequences, or is a copy"),
    ([[ZERO, ONE]], [(1, 0)], "a text has sequences, or is a copy"),
    ([[ZERO]], [(1, 2), (2, 0)], "text 1 is no copy of an earlier one"),
    ([[ZERO]], [(1, 0), (2, 1)], "text 2 is a copy of a copy"),
    ([[StoreSequence(0, 0, (), (), 0)]], [], r"text \(0, 0\)"),
    ([[StoreSequence(0, 0, (1,), (), 0)]], [], r"text \(0, 0\)"),
]


def test_a_plan_that_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    for number, (units, copies, what) in enumerate(MISFITS):
        path = tmp_path / str(number)
        with pytest.raises(AssertionError, match=what):
            create(path, PLAN, units, copies)
        assert not (path / "plan.json").exists(), what
        assert not list((path / "tmp").iterdir()), what


def test_values_that_do_not_fit_the_plan_are_refused(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=[])
    good = tiny_values(writer, "000000")
    for wrong in (
        {"layer.0": good["layer.0"]},
        good | {"final": good["final"][1:]},
        good | {"final": good["final"].astype("f8")},
    ):
        with pytest.raises((AssertionError, KeyError), match="layer.1|final"):
            writer.commit("000000", wrong)
    assert not list((tmp_path / "data").iterdir())
    assert not list((tmp_path / "tmp").iterdir())
    path = tmp_path / "plan/000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"[0,", b"[1,", 1))
    changed = r"plan/000000.jsonl is not what the plan was made with"
    with pytest.raises(Damaged, match=changed):
        resume_store(tmp_path).sequences("000000")


def test_what_is_known_last_may_come_late(tmp_path: Path) -> None:
    strings: dict[int, str] = {}

    def units() -> Iterator[list[StoreSequence]]:
        for number in range(2):
            strings[number] = f"token {number}"
            yield [StoreSequence(number, 0, (number,), ((0, 1),), 0)]

    def late() -> dict[str, Any]:
        assert strings == {0: "token 0", 1: "token 1"}
        return {"count": len(strings)}

    writer = create(tmp_path / "store", PLAN, units(), (), strings, corpus=late)
    assert writer.plan.corpus == {"count": 2}
    assert "token 1" in (tmp_path / "store/plan/strings.jsonl").read_text("utf-8")

    def refused() -> dict[str, Any]:
        raise StoreError("No", "there is no room", "Make some.")

    with pytest.raises(StoreError, match="no room"):
        create(tmp_path / "other", PLAN, units(), corpus=refused)
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]


Whole = tuple[hs.Store, NDArray[Any]]


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    path = tmp_path_factory.mktemp("store")
    writer = tiny_store(path, dtype="bfloat16")
    return hs.open(path), expected(writer, "final")


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_rows_are_those_of_the_whole(
    whole_store: Whole, data: st.DataObject
) -> None:
    store, wanted = whole_store
    count = len(wanted)
    numbers = st.integers(-count, count - 1)
    some = st.lists(numbers, max_size=60).map(lambda rows: np.array(rows, dtype=int))
    mask = st.lists(st.booleans(), min_size=count, max_size=count).map(np.array)
    rows = data.draw(st.one_of(numbers, st.slices(count), some, mask))
    columns = data.draw(
        st.one_of(st.none(), st.integers(-WIDTH, WIDTH - 1), st.slices(WIDTH))
    )
    key = rows if columns is None else (rows, columns)
    found, right = store["final"][key], wanted[key]
    assert found.shape == right.shape and np.array_equal(found, right)


def test_rows_and_columns_are_combined_as_numpy_does(whole_store: Whole) -> None:
    store, wanted = whole_store
    even = np.arange(len(wanted)) % 2 == 0
    keys: list[Any] = [([1, 2], [0, 1]), ([[1], [2]], [0, 3]), (3, [1, 2]), ()]
    keys += [(even, np.arange(16) % WIDTH), (slice(4), [[1, 2], [3, 0]]), (5, None)]
    keys += [(slice(None), ...), (..., 3), (2, ..., 1), ([4, -1], slice(2))]
    for key in keys:
        found, right = store["final"][key], wanted[key]
        assert np.shape(found) == np.shape(right) and np.array_equal(found, right), key


def test_rows_that_are_not_there_are_an_error(whole_store: Whole) -> None:
    store, wanted = whole_store
    array = store["final"]
    wrong: list[Any] = [32, -33, [0, 99], 2**64 - 1, np.uint64(2**64 - 1)]
    wrong += [(slice(None), WIDTH), slice(None, None, 0), "a", 1.5, {}]
    wrong += [np.zeros((2, 2), bool), (1, 2, 3), (..., ...), ([1, 2], [1, 2, 3])]
    for rows in [*wrong, slice("a")]:
        with pytest.raises(StatesError, match="Cannot index SiteArray"):
            array[rows]
    for number in (0, -1, "a"):
        for blocks in (lambda k: store.blocks("final", k), array.blocks):
            with pytest.raises(Error):
                list(blocks(number))
    assert len(list(array.blocks(1))) == len(list(store.blocks("final", 1))) == 32
    taken = store.rows("final", [3, -1, 3]).float().numpy()
    assert np.array_equal(taken, wanted[[3, -1, 3]])
    # A mask, read as numbers, would be rows 0 and 1.
    for rows in (np.arange(len(wanted)) > 3, [1.5], [[1, 2]]):
        with pytest.raises(StatesError, match="Cannot take rows of SiteArray"):
            store.rows("final", rows)


def test_the_tokens_are_those_of_the_corpus(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    tokens = hs.open(tmp_path).tokens
    assert tokens.lengths.tolist() == [5, 3, 4, 10, 3, 5, 2]
    # Windows keep true positions.
    positions = tokens.positions[tokens.rows(3)].tolist()
    assert positions == [*range(6), *range(3, 7)]
    for text in (1, 4):
        assert tokens.ids[tokens.rows(text)].tolist() == [17, 18, 19]
    assert tokens.strings[5:8] == ("t17", "t18", "t19")
    assert tokens.spans[tokens.rows(6)].tolist() == [[0, 2], [2, 4]]
    assert tokens.texts is not None and tokens.texts[3] == "ab" * 10
    assert tokens.texts[4] == tokens.texts[1] == "ab" * 7


def test_one_text_of_a_store(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, dtype="bfloat16")
    store, wanted = hs.open(tmp_path), expected(writer, "layer.1")
    ends = np.cumsum(store.tokens.lengths)
    for text in range(7):
        part, begin = store.of(text), ends[text] - store.tokens.lengths[text]
        assert np.array_equal(part["layer.1"][:], wanted[begin : ends[text]])
        assert part.tokens.equals(store.tokens.of(text))
        values = part.to_states("layer.1").values[0].float().numpy()
        assert np.array_equal(values, part["layer.1"][:])
    with pytest.raises(StatesError, match="No text 7"):
        store.of(7)


def test_pooled_states_have_a_row_a_text(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, pool="mean")
    store = hs.open(tmp_path)
    assert len(store) == 8 and store.tokens.lengths.tolist() == [1, 1, 1, 2, 1, 1, 1]
    assert np.array_equal(store["final"][:], expected(writer, "final"))
    assert store.tokens.positions.tolist() == [0, 0, 0, 0, 3, 0, 0, 0]


def test_only_committed_units_are_shown(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path / "some", units=["000000"])
    store = hs.open(writer.path)
    assert not store.complete and store.units == ("000000",)
    assert store.texts.tolist() == [0, 1, 2, 4, 5] and store.tokens.count == 5
    assert np.array_equal(store["final"][:12], expected(writer, "final")[:12])
    assert store.of(5).tokens.ids.tolist() == store.of(0).tokens.ids.tolist()
    lacking = "No text 3 in .* its unit is not committed, the corpus has 7"
    with pytest.raises(StatesError, match=lacking):
        store.of(3)
    assert writer.commit("000002", tiny_values(writer, "000002"))
    assert len(store) == 20, "it stays as it was when it was opened"
    assert hs.open(writer.path).texts.tolist() == [0, 1, 2, 4, 5, 6]
    empty = hs.open(tiny_store(tmp_path / "empty", units=[]).path)
    assert len(empty) == len(empty.tokens) == 0
    assert empty["final"][:].shape == (0, WIDTH)
    # A document is there when all its windows are.
    windows = [tiny_sequence(1, 4), tiny_sequence(1, 4, start=2)]
    units = [[ZERO, windows[0]], [windows[1], tiny_sequence(2, 3)]]
    writer = create(tmp_path / "windows", PLAN, units)
    for unit, texts in (("000001", [2]), ("000000", [0, 1, 2])):
        writer.commit(unit, tiny_values(writer, unit))
        assert hs.open(writer.path).texts.tolist() == texts


def test_an_xarray_reads_what_is_asked(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, dtype="bfloat16")
    labelled = hs.open(tmp_path).to_xarray()
    assert labelled.dims == ("site", "token", "width")
    assert not labelled.variable._in_memory
    one = labelled.sel(site="layer.1").isel(token=[3, 30], width=slice(4))
    assert np.array_equal(one.values, expected(writer, "layer.1")[[3, 30], :4])
    assert labelled.isel(site=slice(0, 0), width=[1, 2]).values.shape == (0, 32, 2)
    assert labelled["string"].values[5] == "t17" and labelled["text"].values[-1] == 6
    damage(next((tmp_path / "data").iterdir()), at=-500)
    with pytest.raises(Damaged):
        hs.open(tmp_path).to_xarray().load()


def wide_store(path: Path, units: int, tokens: int, width: int = 2048) -> hs.Store:
    """A store of one site with many blocks, whose values count up."""
    whole = replace(PLAN, sites=("layer.0",), widths={"layer.0": width})
    ids = tuple(range(tokens))
    spans = tuple((place, place + 1) for place in ids)
    rows = ([StoreSequence(unit, 0, ids, spans, 0)] for unit in range(units))
    writer = create(path, whole, rows)
    counted = np.arange(tokens * width, dtype=np.float32).reshape(tokens, width)
    for number, unit in enumerate(writer.pending()):
        writer.commit(unit, {"layer.0": counted + 10_000_000 * number})
    writer.complete()
    return hs.open(path)


@pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="the system takes no advice"
)
def test_the_disk_is_asked_once_for_each_block_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = wide_store(tmp_path, units=3, tokens=300)["layer.0"]
    numbers = np.arange(7, 900, 31)
    steps: list[tuple[str, int, int, int]] = []
    advise, read = os.posix_fadvise, os.preadv

    def advising(descriptor: int, start: int, length: int, what: int) -> None:
        steps.append(("ask", descriptor, start, start + length))
        advise(descriptor, start, length, what)

    def reading(descriptor: int, buffers: list[memoryview], start: int) -> int:
        steps.append(("read", descriptor, start, start + len(buffers[0])))
        return read(descriptor, buffers, start)

    monkeypatch.setattr(os, "posix_fadvise", advising)
    monkeypatch.setattr(os, "preadv", reading)
    rows = array[numbers]
    asked = [step[1:] for step in steps if step[0] == "ask"]
    blocks = [step[1:] for step in steps if step[0] == "read"]
    assert len(asked) == len(set(asked)) == len(blocks) > 20
    assert set(blocks) == set(asked)
    assert [step[0] for step in steps] == ["ask"] * len(asked) + ["read"] * len(blocks)
    assert (rows[:, 0] == numbers % 300 * 2048 + numbers // 300 * 10_000_000).all()


def test_wide_rows_of_many_units_and_many_portions_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A row is wider than a block.
    store = wide_store(tmp_path, units=5, tokens=10, width=9000)
    whole = np.asarray(store["layer.0"])
    assert whole[[0, 49], [8999, 0]].tolist() == [8999, 40_000_000 + 81_000]
    numbers = np.random.default_rng(0).integers(0, 50, 60)
    assert np.array_equal(store["layer.0"][numbers], whole[numbers])
    monkeypatch.setattr("hiddenscope.store.rows.FEW", 2)
    monkeypatch.setattr("hiddenscope.store.shard.MOST_ROWS", 3)
    assert np.array_equal(store["layer.0"][numbers], whole[numbers])
