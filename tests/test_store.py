"""A store: what is committed is read back bit for bit, and whatever else is an error that says so."""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hiddenscope.errors import Damaged, StoreError
from hiddenscope.store import StorePlan, StoreRow, Writer, create, resume

SITES = ("layer.0", "layer.1", "final")
WIDTH = 24


def plan(**changes: Any) -> StorePlan:
    fields: dict[str, Any] = {"model": {"model": "toy", "dtype": "float32"}, "tokenizer": {}, "sites": SITES}
    fields |= {"widths": dict.fromkeys(SITES, WIDTH), "dtype": "float32", "corpus": {"count": 7}}
    return StorePlan(**fields | changes)


def texts() -> list[list[StoreRow]]:
    """Three units: of three texts, of a document in two windows, and of one text after two copies."""
    rows = [row(0, 5), row(1, 3, batch=1), row(2, 4)], [row(3, 6), row(3, 4, start=3)], [row(6, 2)]
    return [list(unit) for unit in rows]


COPIES = [(4, 1), (5, 0)]
STRINGS = {number: f"t{number}" for number in range(200)}


def row(text: int, length: int, start: int = 0, batch: int = 0) -> StoreRow:
    ids = tuple((text * 17 + start + place) % 200 for place in range(length))
    spans = tuple((2 * (start + place), 2 * (start + place) + 2) for place in range(length))
    return StoreRow(text, start, ids, spans, batch, None if start else "ab" * (length + 4))


def values(writer: Writer, unit: str) -> dict[str, NDArray[Any]]:
    """States that depend on the site, the text, the position and the channel."""
    from hiddenscope.store.plan import DTYPES

    made = {}
    for number, site in enumerate(writer.plan.sites):
        rows = [
            np.sin(np.arange(WIDTH) + 100 * number + 10 * one.text + one.start + place)
            for one in writer.rows(unit)
            for place in range(len(one.ids) if writer.plan.pool is None else 1)
        ]
        wide = np.array(rows, dtype=np.float32)
        narrow = wide.view(np.uint32) >> 16 if writer.plan.dtype == "bfloat16" else wide
        made[site] = narrow.astype(DTYPES[writer.plan.dtype])
    return made


def made(path: Path, units: Sequence[str] | None = None, **changes: Any) -> Writer:
    writer = create(path, plan(**changes), texts(), COPIES, STRINGS)
    for unit in writer.pending() if units is None else units:
        assert writer.commit(unit, values(writer, unit))
    if not writer.pending():
        writer.complete()
    return writer


def files_of(path: Path) -> Mapping[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def test_the_same_corpus_gives_the_same_bytes_in_any_order(tmp_path: Path) -> None:
    made(tmp_path / "a")
    writer = made(tmp_path / "b", [])
    for unit in reversed(writer.pending()):
        assert resume(tmp_path / "b", digest=writer.digest).commit(unit, values(writer, unit))
    writer.complete()
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    for name, content in files_of(tmp_path / "a").items():
        if name.startswith("data"):
            assert name == f"data/{hashlib.sha256(content).hexdigest()}.safetensors"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_shard_is_a_plain_safetensors_file(tmp_path: Path, dtype: str) -> None:
    import torch
    from safetensors.torch import load_file

    writer = made(tmp_path, dtype=dtype)
    record = json.loads((tmp_path / "commits/000001.json").read_text())
    tensors = load_file(tmp_path / "data" / f"{record['sha256']}.safetensors")
    expected = values(writer, "000001")
    for site in SITES:
        assert tensors[site].dtype == getattr(torch, dtype)
        bits = tensors[site].view(torch.int16 if dtype != "float32" else torch.int32).numpy()
        assert np.array_equal(bits, expected[site].view(bits.dtype))
    assert tensors["text"].tolist() == [3, 3] and tensors["start"].tolist() == [0, 3]
    assert tensors["offsets"].tolist() == [0, 6, 10] and tensors["ids"].tolist()[:2] == [51, 52]
    assert tensors["spans"].shape == (10, 2)


def test_a_unit_is_committed_once(tmp_path: Path) -> None:
    writer = made(tmp_path, ["000000"])
    before = files_of(tmp_path)
    assert not writer.commit("000000", values(writer, "000000")) and files_of(tmp_path) == before
    assert writer.pending() == ["000001", "000002"]
    with pytest.raises(StoreError, match="2 units are not committed, the first is 000001"):
        writer.complete()


def test_the_loser_of_a_race_discards_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, other = made(tmp_path, []), resume(tmp_path)
    theirs = {site: array + 1 for site, array in values(writer, "000000").items()}
    write = os.fsync

    def meanwhile(descriptor: int) -> None:
        monkeypatch.setattr(os, "fsync", write)
        assert other.commit("000000", theirs)

    monkeypatch.setattr(os, "fsync", meanwhile)  # the other is first while this one's shard goes to the disk
    assert not writer.commit("000000", values(writer, "000000"))
    (shard,) = (tmp_path / "data").iterdir()
    assert json.loads((tmp_path / "commits/000000.json").read_text())["sha256"] == shard.stem
    assert not list((tmp_path / "tmp").iterdir())


def test_another_plan_is_refused_with_every_difference(tmp_path: Path) -> None:
    made(tmp_path, [])
    with pytest.raises(StoreError) as caught:
        create(tmp_path, plan(dtype="bfloat16", model={"model": "toy", "weights": "1f"}), texts(), COPIES, STRINGS)
    for difference in (
        "dtype: float32 there, bfloat16 asked",
        "model.dtype: float32 there, nothing asked",
        "model.weights: nothing there, 1f asked",
    ):
        assert difference in str(caught.value)
    with pytest.raises(StoreError, match="units: 3 there, 2 asked"):
        create(tmp_path, plan(), texts()[:2], COPIES, STRINGS)
    changed = texts()
    changed[1][0] = row(3, 5)
    with pytest.raises(StoreError, match="texts of 1 units, the first is 000001"):
        create(tmp_path, plan(), changed, COPIES, STRINGS)
    assert create(tmp_path, plan(), texts(), COPIES, STRINGS).pending() == ["000000", "000001", "000002"]


@pytest.mark.parametrize(
    ("units", "copies", "what"),
    [
        ([], [], "there are no texts"),
        ([[row(0, 2)], []], [], "unit 000001 has no texts"),
        ([[row(1, 2), row(0, 2)]], [], "comes after text 1"),
        ([[row(0, 2), row(0, 2)]], [], "comes after text 0"),
        ([[row(0, 2), row(2, 2)]], [], "text 1 has rows and is a duplicate, or has neither"),
        ([[row(0, 2), row(1, 2)]], [(1, 0)], "text 1 has rows and is a duplicate"),
        ([[row(0, 2)]], [(1, 2), (2, 0)], "text 1 is said to be text 2"),
        ([[StoreRow(0, 0, (), (), 0)]], [], "0 tokens"),
        ([[StoreRow(0, 0, (1,), (), 0)]], [], "1 tokens and 0 spans"),
    ],
)
def test_a_plan_that_does_not_fit_together_is_refused(
    tmp_path: Path, units: list[list[StoreRow]], copies: list[tuple[int, int]], what: str
) -> None:
    with pytest.raises(StoreError, match=what):
        create(tmp_path / "store", plan(), units, copies)
    assert not (tmp_path / "store/plan.json").exists() and not list((tmp_path / "store/tmp").iterdir())


def test_values_that_do_not_fit_the_plan_are_refused(tmp_path: Path) -> None:
    writer = made(tmp_path, [])
    good = values(writer, "000000")
    for wrong, what in (
        ({"layer.0": good["layer.0"]}, "the sites are layer.0, and the plan has"),
        (good | {"final": good["final"][1:]}, r"final is float32 \[11, 24\]"),
        (good | {"final": good["final"].astype("f8")}, "final is float64"),
    ):
        with pytest.raises(StoreError, match=what):
            writer.commit("000000", wrong)
    with pytest.raises(StoreError, match="No unit '000009'"):
        writer.commit("000009", good)
    assert not list((tmp_path / "data").iterdir()) and not list((tmp_path / "tmp").iterdir())


def test_texts_that_were_changed_are_not_computed(tmp_path: Path) -> None:
    writer = made(tmp_path, [])
    path = tmp_path / "plan/000000.jsonl"
    path.write_bytes(path.read_bytes().replace(b"[0,", b"[1,", 1))
    with pytest.raises(Damaged, match=r"plan/000000.jsonl is not what the plan was made with"):
        writer.rows("000000")


def test_what_is_known_last_may_come_late(tmp_path: Path) -> None:
    strings: dict[int, str] = {}

    def units() -> Iterator[list[StoreRow]]:
        for number in range(2):
            strings[number] = f"token {number}"
            yield [StoreRow(number, 0, (number,), ((0, 1),), 0)]

    def late() -> StorePlan:
        assert strings == {0: "token 0", 1: "token 1"}
        return StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 2}, "float32", corpus={"count": len(strings)})

    writer = create(tmp_path / "store", late, units(), (), strings)
    assert writer.plan.corpus == {"count": 2}
    assert "token 1" in (tmp_path / "store" / "plan" / "strings.jsonl").read_text("utf-8")

    def refused() -> StorePlan:
        raise StoreError("No", "there is no room", "Make some.")

    with pytest.raises(StoreError, match="no room"):
        create(tmp_path / "other", refused, units())
    assert not [path for path in (tmp_path / "other").rglob("*") if path.is_file()]
