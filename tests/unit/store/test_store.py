"""A store: what is committed is read back bit for bit, and whatever else is an error
that says so.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
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
    shard_reader,
    site_array,
    verify,
)
from hiddenscope.testing import tiny_store
from hiddenscope.testing.stores import (
    COPIES,
    SITES,
    tiny_sequence,
    tiny_sequences,
    tiny_values,
)
from tests.places import TESTS

WIDTH = 24
STRINGS = {number: f"t{number}" for number in range(200)}


def plan(**changes: Any) -> StorePlan:
    fields: dict[str, Any] = {
        "model": {"model": "toy", "dtype": "float32", "depth": 1, "final": True},
        "tokenizer": {},
        "sites": SITES,
    }
    fields |= {
        "widths": dict.fromkeys(SITES, WIDTH),
        "dtype": "float32",
        "corpus": {"count": 7},
    }
    return StorePlan(**fields | changes)


def texts() -> list[list[StoreSequence]]:
    return tiny_sequences()


def files_of(path: Path) -> Mapping[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def test_the_same_corpus_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    tiny_store(tmp_path / "a")
    writer = tiny_store(tmp_path / "b", units=[])
    for unit in reversed(writer.pending()):
        assert resume_store(tmp_path / "b", digest=writer.digest).commit(
            unit, tiny_values(writer, unit)
        )
    writer.complete()
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    for name, content in files_of(tmp_path / "a").items():
        if name.startswith("data"):
            assert name == f"data/{hashlib.sha256(content).hexdigest()}.safetensors"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_shard_is_a_plain_safetensors_file(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    writer = tiny_store(tmp_path, dtype=dtype)
    record = json.loads((tmp_path / "commits/000001.json").read_text())
    tensors = load_file(tmp_path / "data" / f"{record['sha256']}.safetensors")
    expected = tiny_values(writer, "000001")
    for site in SITES:
        assert tensors[site].dtype == getattr(torch, dtype)
        bits = (
            tensors[site]
            .view(torch.int16 if dtype != "float32" else torch.int32)
            .numpy()
        )
        assert np.array_equal(bits, expected[site].view(bits.dtype))
    assert tensors["text"].tolist() == [3, 3] and tensors["start"].tolist() == [0, 3]
    assert tensors["offsets"].tolist() == [0, 6, 10] and tensors["ids"].tolist()[
        :2
    ] == [51, 52]
    assert tensors["spans"].shape == (10, 2)


def test_a_unit_is_committed_once(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    before = files_of(tmp_path)
    assert (
        not writer.commit("000000", tiny_values(writer, "000000"))
        and files_of(tmp_path) == before
    )
    assert writer.pending() == ["000001", "000002"]
    with pytest.raises(
        StoreError, match="2 units are not committed, the first is 000001"
    ):
        writer.complete()


def test_the_loser_of_a_race_discards_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, other = tiny_store(tmp_path, units=[]), resume_store(tmp_path)
    theirs = {site: array + 1 for site, array in tiny_values(writer, "000000").items()}
    write = os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", write)
        assert other.commit("000000", theirs)

    # The other is first while this one's shard goes to the disk.
    monkeypatch.setattr(os, "fsync", meanwhile)
    assert not writer.commit("000000", tiny_values(writer, "000000"))
    (shard,) = (tmp_path / "data").iterdir()
    assert (
        json.loads((tmp_path / "commits/000000.json").read_text())["sha256"]
        == shard.stem
    )
    assert not list((tmp_path / "tmp").iterdir())


def test_another_plan_is_refused_with_every_difference(tmp_path: Path) -> None:
    tiny_store(tmp_path, units=[])
    with pytest.raises(StoreError) as caught:
        create(
            tmp_path,
            plan(
                dtype="bfloat16",
                model={"model": "toy", "weights": "1f", "depth": 1, "final": True},
            ),
            texts(),
            COPIES,
            STRINGS,
        )
    for difference in (
        "dtype: float32 there, bfloat16 asked",
        "model.dtype: float32 there, nothing asked",
        "model.weights: nothing there, 1f asked",
    ):
        assert difference in str(caught.value)
    with pytest.raises(StoreError, match="units: 3 there, 2 asked"):
        create(tmp_path, plan(), texts()[:2], COPIES, STRINGS)
    changed = texts()
    changed[1][0] = tiny_sequence(3, 5)
    with pytest.raises(StoreError, match="texts of 1 units, the first is 000001"):
        create(tmp_path, plan(), changed, COPIES, STRINGS)
    assert create(tmp_path, plan(), texts(), COPIES, STRINGS).pending() == [
        "000000",
        "000001",
        "000002",
    ]


@pytest.mark.parametrize(
    ("units", "copies", "what"),
    [
        ([], [], "there are no texts"),
        ([[tiny_sequence(0, 2)], []], [], "unit 000001 has no texts"),
        ([[tiny_sequence(1, 2), tiny_sequence(0, 2)]], [], "comes after text 1"),
        ([[tiny_sequence(0, 2), tiny_sequence(0, 2)]], [], "comes after text 0"),
        (
            [[tiny_sequence(0, 2), tiny_sequence(2, 2)]],
            [],
            "text 1 has sequences and is a duplicate, or has neither",
        ),
        (
            [[tiny_sequence(0, 2), tiny_sequence(1, 2)]],
            [(1, 0)],
            "text 1 has sequences and is a duplicate",
        ),
        ([[tiny_sequence(0, 2)]], [(1, 2), (2, 0)], "text 1 is said to be text 2"),
        ([[StoreSequence(0, 0, (), (), 0)]], [], "0 tokens"),
        ([[StoreSequence(0, 0, (1,), (), 0)]], [], "1 tokens and 0 spans"),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(
    tmp_path: Path,
    units: list[list[StoreSequence]],
    copies: list[tuple[int, int]],
    what: str,
) -> None:
    with pytest.raises(StoreError, match=what):
        create(tmp_path / "store", plan(), units, copies)
    assert not (tmp_path / "store/plan.json").exists() and not list(
        (tmp_path / "store/tmp").iterdir()
    )


def test_values_that_do_not_fit_the_plan_are_refused(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=[])
    good = tiny_values(writer, "000000")
    for wrong, what in (
        ({"layer.0": good["layer.0"]}, "the sites are layer.0, and the plan has"),
        (good | {"final": good["final"][1:]}, r"final is float32 \[11, 24\]"),
        (good | {"final": good["final"].astype("f8")}, "final is float64"),
    ):
        with pytest.raises(StoreError, match=what):
            writer.commit("000000", wrong)
    with pytest.raises(StoreError, match="No unit '000009'"):
        writer.commit("000009", good)
    assert not list((tmp_path / "data").iterdir()) and not list(
        (tmp_path / "tmp").iterdir()
    )


def test_texts_that_were_changed_are_not_computed(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=[])
    path = tmp_path / "plan/000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"[0,", b"[1,", 1))
    with pytest.raises(
        Damaged, match=r"plan/000000.jsonl is not what the plan was made with"
    ):
        writer.sequences("000000")


def test_what_is_known_last_may_come_late(tmp_path: Path) -> None:
    strings: dict[int, str] = {}

    def units() -> Iterator[list[StoreSequence]]:
        for number in range(2):
            strings[number] = f"token {number}"
            yield [StoreSequence(number, 0, (number,), ((0, 1),), 0)]

    def late() -> StorePlan:
        assert strings == {0: "token 0", 1: "token 1"}
        return StorePlan(
            {"model": "toy"},
            {},
            ("layer.0",),
            {"layer.0": 2},
            "float32",
            corpus={"count": len(strings)},
        )

    writer = create(tmp_path / "store", late, units(), (), strings)
    assert writer.plan.corpus == {"count": 2}
    assert "token 1" in (tmp_path / "store" / "plan" / "strings.jsonl").read_text(
        "utf-8"
    )

    def refused() -> StorePlan:
        raise StoreError("No", "there is no room", "Make some.")

    with pytest.raises(StoreError, match="no room"):
        create(tmp_path / "other", refused, units())
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]


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
    return (
        (rows.astype(np.uint32) << 16).view(np.float32)
        if writer.plan.dtype == "bfloat16"
        else rows.astype("f4")
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_was_committed_is_read_back_exactly(tmp_path: Path, dtype: str) -> None:
    import torch

    writer = tiny_store(tmp_path, dtype=dtype)
    store = hs.open(tmp_path)
    assert (
        store.complete and store.texts.tolist() == list(range(7)) and len(store) == 32
    )
    for site in SITES:
        wanted, array = expected(writer, site), store[site]
        assert array.shape == wanted.shape and array.dtype == wanted.dtype
        assert np.array_equal(np.asarray(array), wanted)
        blocks = list(store.blocks(site, rows=5))
        assert {block.dtype for block in blocks} == {getattr(torch, dtype)} and max(
            map(len, blocks)
        ) == 5
        assert np.array_equal(torch.cat(blocks).float().numpy(), wanted)
        assert np.array_equal(np.concatenate(list(array.blocks(7))), wanted)
    assert np.array_equal(store[1][3], store["layer.1"][3])
    assert repr(store).startswith(
        f"Store of toy, {dtype}: 3 sites x 32 rows of 7 texts, complete"
    )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_rows_are_those_of_the_whole(
    whole_store: tuple[hs.Store, NDArray[Any]], data: st.DataObject
) -> None:
    store, wanted = whole_store
    count = len(wanted)
    rows = data.draw(
        st.one_of(
            st.integers(-count, count - 1),
            st.slices(count),
            st.lists(st.integers(-count, count - 1), max_size=60).map(
                lambda some: np.array(some, dtype=int)
            ),
            st.lists(st.booleans(), min_size=count, max_size=count).map(np.array),
        )
    )
    columns = data.draw(
        st.one_of(st.none(), st.integers(-WIDTH, WIDTH - 1), st.slices(WIDTH))
    )
    found = store["final"][rows] if columns is None else store["final"][rows, columns]
    right = wanted[rows] if columns is None else wanted[rows, columns]
    assert found.shape == right.shape and np.array_equal(found, right)


def test_rows_and_columns_are_combined_as_numpy_does(
    whole_store: tuple[hs.Store, NDArray[Any]],
) -> None:
    store, wanted = whole_store
    even = np.arange(len(wanted)) % 2 == 0
    keys: list[Any] = [
        ([1, 2], [0, 1]),
        ([[1], [2]], [0, 3]),
        (even, np.arange(16) % WIDTH),
        (3, [1, 2]),
        (),
    ]
    keys += [
        (slice(4), [[1, 2], [3, 0]]),
        (slice(None), ...),
        (..., 3),
        (2, ..., 1),
        (5, None),
        ([4, -1], slice(2)),
    ]
    for key in keys:
        found, right = store["final"][key], wanted[key]
        assert np.shape(found) == np.shape(right) and np.array_equal(found, right), key


@pytest.fixture(scope="module")
def whole_store(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[hs.Store, NDArray[Any]]:
    path = tmp_path_factory.mktemp("store")
    writer = tiny_store(path, dtype="bfloat16")
    return hs.open(path), expected(writer, "final")


def test_rows_that_are_not_there_are_an_error(
    whole_store: tuple[hs.Store, NDArray[Any]],
) -> None:
    array = whole_store[0]["final"]
    outside: list[Any] = [
        32,
        -33,
        [0, 99],
        2**64 - 1,
        np.uint64(2**64 - 1),
        (slice(None), WIDTH),
        slice(None, None, 0),
    ]
    for rows in (
        *outside,
        "a",
        1.5,
        {},
        np.zeros((2, 2), bool),
        (1, 2, 3),
        (..., ...),
        slice("a"),
        ([1, 2], [1, 2, 3]),
    ):
        with pytest.raises(StatesError, match="Cannot index SiteArray"):
            array[rows]
    for number in (0, -1, "a"):
        with pytest.raises(Error):
            list(whole_store[0].blocks("final", number))  # type: ignore[arg-type]
        with pytest.raises(Error):
            list(array.blocks(number))  # type: ignore[arg-type]


def test_rows_are_taken_by_their_numbers_alone(
    whole_store: tuple[hs.Store, NDArray[Any]],
) -> None:
    store, wanted = whole_store
    assert np.array_equal(
        store.rows("final", [3, -1, 3]).float().numpy(), wanted[[3, -1, 3]]
    )
    # A mask, read as numbers, would be rows 0 and 1.
    for rows in (
        np.arange(len(wanted)) > 3,
        [1.5],
        [[1, 2]],
    ):
        with pytest.raises(StatesError, match="Cannot take rows of SiteArray"):
            store.rows("final", rows)  # type: ignore[arg-type]


def test_rows_wider_than_a_block_are_read(tmp_path: Path) -> None:
    width = 9000
    writer = create(
        tmp_path,
        plan(sites=("final",), widths={"final": width}),
        [[tiny_sequence(0, 40)]],
    )
    wanted = np.random.default_rng(0).standard_normal((40, width), dtype=np.float32)
    writer.commit("000000", {"final": wanted})
    array = hs.open(tmp_path)["final"]
    assert np.array_equal(
        array[[39, 3, 3, 20]], wanted[[39, 3, 3, 20]]
    ) and np.array_equal(array[:], wanted)


def test_the_tokens_are_those_of_the_corpus(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    tokens = hs.open(tmp_path).tokens
    assert tokens.lengths.tolist() == [5, 3, 4, 10, 3, 5, 2]
    assert tokens.positions[tokens.rows(3)].tolist() == [
        0,
        1,
        2,
        3,
        4,
        5,
        3,
        4,
        5,
        6,
    ], "windows keep true positions"
    assert (
        tokens.ids[tokens.rows(4)].tolist()
        == tokens.ids[tokens.rows(1)].tolist()
        == [17, 18, 19]
    )
    assert tokens.strings[5:8] == ("t17", "t18", "t19")
    assert tokens.spans[tokens.rows(6)].tolist() == [[0, 2], [2, 4]]
    assert (
        tokens.texts is not None
        and tokens.texts[3] == "ab" * 10
        and tokens.texts[4] == tokens.texts[1] == "ab" * 7
    )


def test_one_text_of_a_store(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, dtype="bfloat16")
    store, wanted = hs.open(tmp_path), expected(writer, "layer.1")
    ends = np.cumsum(store.tokens.lengths)
    for text in range(7):
        part = store.of(text)
        assert np.array_equal(
            part["layer.1"][:],
            wanted[ends[text] - store.tokens.lengths[text] : ends[text]],
        )
        assert part.tokens.equals(store.tokens.of(text))
        assert np.array_equal(
            part.to_states("layer.1").values[0].float().numpy(), part["layer.1"][:]
        )
    with pytest.raises(StatesError, match="No text 7"):
        store.of(7)


def test_pooled_states_have_a_row_a_text(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, pool="mean")
    store = hs.open(tmp_path)
    assert len(store) == 8 and store.tokens.lengths.tolist() == [1, 1, 1, 2, 1, 1, 1]
    assert np.array_equal(store["final"][:], expected(writer, "final"))
    assert store.tokens.positions.tolist() == [0, 0, 0, 0, 3, 0, 0, 0]


def test_only_committed_units_are_shown(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    store = hs.open(tmp_path)
    assert not store.complete and store.units == ("000000",)
    assert store.texts.tolist() == [0, 1, 2, 4, 5] and store.tokens.count == 5
    assert np.array_equal(store["final"][:12], expected(writer, "final")[:12])
    assert store.of(5).tokens.ids.tolist() == store.of(0).tokens.ids.tolist()
    with pytest.raises(
        StatesError, match="No text 3 in .* its unit is not committed, the corpus has 7"
    ):
        store.of(3)
    assert writer.commit("000002", tiny_values(writer, "000002"))
    assert len(store) == 20, "it stays as it was when it was opened"
    assert hs.open(tmp_path).texts.tolist() == [0, 1, 2, 4, 5, 6]
    empty = hs.open(tiny_store(tmp_path / "empty", units=[]).path)
    assert (
        len(empty) == 0
        and empty["final"][:].shape == (0, WIDTH)
        and len(empty.tokens) == 0
    )


def test_a_document_is_there_when_all_its_windows_are(tmp_path: Path) -> None:
    units = [
        [tiny_sequence(0, 2), tiny_sequence(1, 4)],
        [tiny_sequence(1, 4, start=2), tiny_sequence(2, 3)],
    ]
    writer = create(tmp_path, plan(), units)
    writer.commit("000001", tiny_values(writer, "000001"))
    assert hs.open(tmp_path).texts.tolist() == [2]
    writer.commit("000000", tiny_values(writer, "000000"))
    assert hs.open(tmp_path).texts.tolist() == [0, 1, 2]


def test_an_xarray_reads_what_is_asked(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, dtype="bfloat16")
    labelled = hs.open(tmp_path).to_xarray()
    assert (
        labelled.dims == ("site", "token", "width") and not labelled.variable._in_memory
    )
    one = labelled.sel(site="layer.1").isel(token=[3, 30], width=slice(4))
    assert np.array_equal(one.values, expected(writer, "layer.1")[[3, 30], :4])
    assert labelled.isel(site=slice(0, 0), width=[1, 2]).values.shape == (0, 32, 2)
    assert labelled["string"].values[5] == "t17" and labelled["text"].values[-1] == 6
    damage(next((tmp_path / "data").iterdir()))
    with pytest.raises(Damaged):
        hs.open(tmp_path).to_xarray().load()


def damage(path: Path, at: int = 5000, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)


WITHOUT_TORCH = """
import sys
class Refusing:
    def find_spec(self, name, *_):
        if name.split(".")[0] == "torch":
            raise ImportError("no torch here")
sys.meta_path.insert(0, Refusing())
import numpy as np
import hiddenscope as hs
from tests.places import TESTS
store = hs.open(sys.argv[1])
print(store, store["layer.1"][[0, 31]].sum(), store.of(3).tokens, len(store.tokens), store.to_xarray().dims)
"""


def test_a_store_is_read_without_torch(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "32" in done.stdout


GOLDEN = TESTS / "golden"
VALUES = {
    1: {
        "layer.0": "0bda554a61066195",
        "layer.1": "7ccfc1e63a6bf678",
        "final": "95e48e7857001204",
    },
    2: {
        "layer.0": "f0c450ec486227c9",
        "layer.1": "7fb5f6506383be81",
        "final": "f3b56d2a143438b6",
    },
}
LENGTHS = {1: [5, 3, 4, 10, 3, 5, 2], 2: [2, 1, 2, 4, 1, 2, 1]}


@pytest.mark.parametrize("version", [1, 2])
def test_a_store_of_every_version_is_read_and_written_as_ever(
    tmp_path: Path, version: int
) -> None:
    path, golden = tmp_path / "golden", GOLDEN / f"store-{version}"
    shutil.copytree(golden, path)
    store = hs.open(path)
    assert (
        store.plan.version
        == version
        == json.loads((path / "plan.json").read_bytes())["version"]
    )
    digests = {
        str(site): hashlib.sha256(np.asarray(store[site]).tobytes()).hexdigest()[:16]
        for site in store.sites
    }
    assert digests == VALUES[version] and store.complete and verify(path).intact
    assert store.tokens.lengths.tolist() == LENGTHS[version]
    assert store.tokens.strings[:2] == ("t0", f"t{store.every}")
    plan = replace(store.plan, units=(), duplicates="", strings="")
    writer = create(
        tmp_path / "again", plan, texts(), COPIES, STRINGS, every=plan.every
    )
    for unit in writer.pending():
        parts = [
            store.of(text)
            for text in sorted({row.text for row in writer.sequences(unit)})
        ]
        states = {
            site: np.concatenate([np.asarray(part[site]) for part in parts])
            for site in SITES
        }
        writer.commit(
            unit,
            {
                site: (array.view(np.uint32) >> 16).astype("<u2")
                for site, array in states.items()
            },
        )
    writer.complete()
    assert files_of(tmp_path / "again") == files_of(golden)


def wide_store(
    path: Path, units: int = 3, tokens: int = 300, width: int = 2048
) -> Writer:
    """A store with many blocks a layer: 2.4 MB in a unit, at the default width."""
    whole = replace(plan(), sites=("layer.0",), widths={"layer.0": width})
    spans = tuple((place, place + 1) for place in range(tokens))
    writer = create(
        path,
        whole,
        (
            [StoreSequence(unit, 0, tuple(range(tokens)), spans, 0)]
            for unit in range(units)
        ),
    )
    for number, unit in enumerate(writer.pending()):
        values = (
            np.arange(tokens * width, dtype=np.float32).reshape(tokens, width)
            + 10_000_000 * number
        )
        writer.commit(unit, {"layer.0": values})
    writer.complete()
    return writer


@pytest.mark.skipif(
    not hasattr(os, "posix_fadvise"), reason="the system takes no advice"
)
def test_the_disk_is_asked_once_for_each_block_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_store(tmp_path)
    array, numbers = hs.open(tmp_path)["layer.0"], np.arange(7, 900, 31)
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
    assert (
        len(asked) == len(set(asked)) > 20
        and set(blocks) == set(asked)
        and len(blocks) == len(asked)
    )
    assert [step[0] for step in steps] == ["ask"] * len(asked) + ["read"] * len(blocks)
    assert (rows[:, 0] == numbers % 300 * 2048 + numbers // 300 * 10_000_000).all()


def test_rows_of_many_units_and_many_portions_are_those_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_store(tmp_path, units=5, tokens=40)
    store = hs.open(tmp_path)
    whole = np.asarray(store["layer.0"])
    monkeypatch.setattr(site_array, "FEW", 2)
    # Blocks at a time: three rows.
    monkeypatch.setattr(shard_reader, "MAX_BLOCKS_HELD", 6)
    numbers = np.random.default_rng(0).integers(0, 200, 90)
    assert np.array_equal(store["layer.0"][numbers], whole[numbers])


def test_a_plan_is_encoded_once_however_many_units_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide_store(tmp_path, units=12, tokens=1, width=1)
    encoded: list[StorePlan] = []
    encode = StorePlan.encode
    monkeypatch.setattr(
        StorePlan, "encode", lambda self: encoded.append(self) or encode(self)
    )
    assert len(hs.open(tmp_path)) == 12 and len(encoded) == 1


def test_sha256_of_a_shard_that_cannot_be_written_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = create(tmp_path, plan(), texts(), COPIES, STRINGS)
    written = os.write

    def full(descriptor: int, piece: memoryview) -> int:
        if len(piece) > 500:  # the header
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(descriptor, piece)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(Error, match="No space left on device"):
        writer.commit("000000", tiny_values(writer, "000000"))
    assert "sha256" not in {thread.name for thread in threading.enumerate()}
    monkeypatch.undo()
    assert writer.commit("000000", tiny_values(writer, "000000"))
