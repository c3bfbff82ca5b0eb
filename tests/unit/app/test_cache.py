"""Results that are kept: bounded, whole or missing, and found under their question."""

import os
from pathlib import Path

import numpy
import pytest
import xarray

import hiddenscope as hs
from hiddenscope.app import cache as module
from hiddenscope.app.answers import pack_result
from hiddenscope.app.application import SHIPPED
from hiddenscope.app.cache import ResultCache, StoredResult, key_of

KEYS = [f"{number:064x}" for number in range(4)]
RESULT = StoredResult({"request": {}}, b"payload", b"data")


def test_the_cache_drops_what_was_not_used_for_longest(tmp_path: Path) -> None:
    large = StoredResult({"request": {}}, b"p" * 1000, b"")
    cache = ResultCache(tmp_path, 3_500)
    for place, key in enumerate(KEYS[:3]):
        assert cache.put(key, large) == ""
        os.utime(tmp_path / f"{key}.result", (place, place))
    ResultCache(tmp_path, 3_500).get(KEYS[0])  # used last now
    cache.put(KEYS[3], large)
    fresh = ResultCache(tmp_path, 3_500)
    assert [fresh.get(key) is not None for key in KEYS] == [True, False, True, True]


def test_memory_holds_the_last_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the folder cannot be written, too, of which a note warns."""
    monkeypatch.setattr(module, "MEMORY_BYTES", 2 * RESULT.size)
    (tmp_path / "file").write_text("a file where the folder should be")
    cache = ResultCache(tmp_path / "file", 10**6)
    for key in KEYS[:2]:
        assert "could not be kept on disk" in cache.put(key, RESULT)
    cache.get(KEYS[0])
    cache.put(KEYS[2], RESULT)
    assert [cache.get(key) for key in KEYS[:3]] == [RESULT, None, RESULT]


def test_a_damaged_entry_counts_as_missing_and_a_shipped_one_is_found(
    tmp_path: Path,
) -> None:
    folder, shipped = tmp_path / "own", tmp_path / "shipped"
    ResultCache(folder, 10**6).put(KEYS[0], RESULT)
    path = folder / f"{KEYS[0]}.result"
    whole = path.read_bytes()
    assert ResultCache(folder, 10**6).get(KEYS[0]) == RESULT
    for damaged in (whole[:-1], b"", whole.replace(b"payload", b"paXload"), b"x" * 100):
        path.write_bytes(damaged)
        assert ResultCache(folder, 10**6, shipped).get(KEYS[0]) is None
    ResultCache(shipped, 10**6).put(KEYS[0], RESULT)
    assert ResultCache(folder, 10**6, shipped).get(KEYS[0]) == RESULT
    assert ResultCache(tmp_path, 10**6).get("../own/x") is None
    first = next(SHIPPED.glob("*.result"))
    assert StoredResult.read(first) is not None


def test_a_key_is_that_of_the_question_the_models_and_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = key_of({"a": 1, "b": 2}, ["x"])
    assert first == key_of({"b": 2, "a": 1}, ["x"])
    others = {key_of({"a": 1}, ["x"]), key_of({"a": 1, "b": 2}, ["y"])}
    monkeypatch.setattr(hs, "__version__", "0")
    others.add(key_of({"a": 1, "b": 2}, ["x"]))
    assert len(others | {first}) == 4


def test_small_results_are_kept_as_json_and_large_ones_as_netcdf() -> None:
    """JSON is written sooner while it is short; both come back exactly."""
    for tokens, suffix in ((5, ".json"), (50_000, ".nc")):
        norms = numpy.arange(tokens, dtype="float32")[None]
        data = xarray.Dataset(
            {"norm": (("site", "token"), norms)}, {"site": ["layer.0"]}
        )
        stored = pack_result(hs.Result("norms", data, {}, {}))
        assert stored.suffix == suffix
