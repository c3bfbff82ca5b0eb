"""Exports of a store, each read back by its own library and compared bit for bit."""

import json
import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.errors import Damaged, Error, FileError, SiteError
from hiddenscope.store import StorePlan, StoreSequence, create
from hiddenscope.store.export import formats
from hiddenscope.testing import tiny_store
from hiddenscope.testing.stores import tiny_sequence
from tests.places import ROOT

FORMATS = {"parquet": "out.parquet", "zarr": "out.zarr", "dataset": "out"}


class Exported:
    """What a library reads back: columns, vectors of a site, and the provenance."""

    def __init__(self, path: Path, name: str) -> None:
        self.path = path
        self.name = name
        self.provenance: dict[str, Any] = {}
        if name in ("parquet", "atlas"):
            import pyarrow.parquet

            self.table = pyarrow.parquet.read_table(path)
            metadata = pyarrow.parquet.read_schema(path).metadata
            self.provenance = json.loads(metadata[b"hiddenscope"])
        elif name == "zarr":
            import zarr

            self.table = zarr.open_group(path, mode="r")
            self.provenance = dict(self.table.attrs["hiddenscope"])
        else:
            import datasets

            self.table = datasets.load_from_disk(path)
            description = self.table.info.description
            self.provenance = json.loads(description.partition(": ")[2])

    def column(self, name: str) -> list[Any]:
        if self.name == "zarr":
            return self.table[name][:].tolist()
        if self.name == "dataset":
            return list(self.table[name])
        return self.table[name].to_pylist()

    def vectors(self, name: str) -> np.ndarray:
        if self.name == "zarr":
            return self.table[name][:]
        rows = self.table.data[name] if self.name == "dataset" else self.table[name]
        rows = rows.combine_chunks()
        return rows.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), -1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
def test_each_format_gives_back_the_store(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_store(tmp_path / "states", dtype=dtype)
    store = hs.open(tmp_path / "states")
    # Blocks end inside texts and units.
    monkeypatch.setattr("hiddenscope.store.row_blocks.BLOCK_ROWS", 7)
    target = tmp_path / FORMATS[name]
    assert store.export(target, format=name) == name
    exported = Exported(target, name)
    tokens = store.tokens
    texts = store.texts[tokens.text]
    assert exported.column("text_index") == texts.tolist()
    assert exported.column("position") == tokens.positions.tolist()
    assert exported.column("id") == tokens.ids.tolist()
    assert exported.column("token") == list(tokens.strings)
    assert exported.column("start") == tokens.spans[:, 0].tolist()
    assert exported.column("end") == tokens.spans[:, 1].tolist()
    assert set(exported.column("context")) == set(tokens.texts or ())
    for site in map(str, store.sites):
        vectors = exported.vectors(site)
        expected = np.float16 if dtype == "float16" else np.float32
        assert vectors.dtype == expected
        # float32 holds every number of all three exactly.
        np.testing.assert_array_equal(vectors.astype(np.float32), store[site][:])
    assert exported.provenance["source"] == json.loads(
        json.dumps(store.source.to_json())
    )
    assert exported.provenance["plan"] == store.plan.digest
    assert exported.provenance["dtype"] == dtype
    assert exported.provenance["versions"]["hiddenscope"]
    assert sorted(os.listdir(tmp_path)) == sorted(["states", target.name])


@pytest.mark.parametrize("name", FORMATS)
def test_pooled_rows_have_their_texts(name: str, tmp_path: Path) -> None:
    tiny_store(tmp_path / "states", pool="mean")
    store = hs.open(tmp_path / "states")
    store.export(tmp_path / FORMATS[name], format=name, sites="final")
    exported = Exported(tmp_path / FORMATS[name], name)
    texts = [store.tokens.texts[text] for text in store.tokens.text]
    assert exported.column("text") == texts
    assert exported.column("position") == store.tokens.positions.tolist()
    np.testing.assert_array_equal(exported.vectors("final"), store["final"][:])
    assert exported.provenance["pool"] == "mean"
    assert exported.provenance["sites"] == ["final"]


@pytest.mark.parametrize("name", FORMATS)
def test_every_second_token_and_some_units(name: str, tmp_path: Path) -> None:
    tiny_store(tmp_path / "states", every=2, units=["000000", "000002"])
    store = hs.open(tmp_path / "states")
    store.export(tmp_path / FORMATS[name], format=name)
    exported = Exported(tmp_path / FORMATS[name], name)
    assert exported.column("position") == store.tokens.positions.tolist()
    assert exported.column("id") == store.tokens.ids.tolist()
    assert exported.provenance["complete"] is False
    np.testing.assert_array_equal(exported.vectors("layer.1"), store["layer.1"][:])


@pytest.mark.parametrize("name", FORMATS)
def test_widths_may_differ(name: str, tmp_path: Path) -> None:
    widths = {"layer.0": 6, "layer.1.attn.z": 4, "layer.1": 6}
    plan = StorePlan({"model": "toy"}, {}, tuple(widths), widths, "float32")
    writer = create(tmp_path / "states", plan, [[tiny_sequence(0, 5)]])
    rng = np.random.default_rng(0)
    values = {}
    for site, width in widths.items():
        values[site] = rng.normal(size=(5, width)).astype(np.float32)
    writer.commit("000000", values)
    writer.complete()
    hs.open(tmp_path / "states").export(tmp_path / FORMATS[name], format=name)
    exported = Exported(tmp_path / FORMATS[name], name)
    for site, expected in values.items():
        np.testing.assert_array_equal(exported.vectors(site), expected)


def test_an_empty_store_and_hostile_strings(tmp_path: Path) -> None:
    plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 2}, "float32")
    text = StoreSequence(0, 0, (5,), ((0, 1),), 0, "\ud800\0=1+1")
    writer = create(tmp_path / "states", plan, [[text]], strings={5: "\ud800"})
    for name, file in FORMATS.items():
        hs.open(tmp_path / "states").export(tmp_path / f"empty-{file}", format=name)
        assert Exported(tmp_path / f"empty-{file}", name).column("id") == []
    writer.commit("000000", {"layer.0": np.ones((1, 2), np.float32)})
    for name, file in FORMATS.items():
        hs.open(tmp_path / "states").export(tmp_path / file, format=name)
        exported = Exported(tmp_path / file, name)
        assert exported.column("token") == ["���"]
        assert exported.column("context") == ["���\0=1+1"]


def test_what_embedding_atlas_opens(tmp_path: Path) -> None:
    tiny_store(tmp_path / "states", dtype="float16", pool="mean")
    store = hs.open(tmp_path / "states")
    target = tmp_path / "atlas.parquet"
    with pytest.raises(SiteError, match="shows one site, and 3 are chosen"):
        store.export(target, format="atlas")
    assert store.export(target, format="atlas", sites="layer.1") == "atlas"
    # Its command line reads the file with pandas, and takes the columns by name.
    import pandas

    frame = pandas.read_parquet(target)
    assert frame["vector"].dtype == object
    vectors = np.stack(frame["vector"].to_numpy())
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, store["layer.1"][:])
    assert frame["text"].tolist() == [store.tokens.texts[k] for k in store.tokens.text]


def test_xarray_reads_the_zarr_group(tmp_path: Path) -> None:
    import xarray

    tiny_store(tmp_path / "states")
    store = hs.open(tmp_path / "states")
    store.export(tmp_path / "out.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = xarray.open_zarr(tmp_path / "out.zarr")
    np.testing.assert_array_equal(data["layer.1"].to_numpy(), store["layer.1"][:])


def test_progress_is_shown(tmp_path: Path) -> None:
    tiny_store(tmp_path / "states")
    store = hs.open(tmp_path / "states")
    said: list[tuple[str, float, float | None]] = []
    with progress.sent_to(lambda *step: said.append(step)):
        store.export(tmp_path / "out.parquet")
    assert said[-1] == ("Exporting to out.parquet", len(store), len(store))


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError("disk full")])
@pytest.mark.parametrize("name", FORMATS)
def test_an_interrupted_export_leaves_nothing(
    name: str, error: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_store(tmp_path / "states")
    store = hs.open(tmp_path / "states")
    monkeypatch.setattr("hiddenscope.store.row_blocks.BLOCK_ROWS", 7)
    seen = []

    def stop(what: str, done: float, total: float | None) -> None:
        seen.append(done)
        if done > 10:
            raise error

    expected = FileError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected), progress.sent_to(stop):
        store.export(tmp_path / FORMATS[name], format=name)
    assert len(seen) > 2
    assert os.listdir(tmp_path) == ["states"]


def test_what_a_killed_export_left_is_removed(tmp_path: Path) -> None:
    tiny_store(tmp_path / "states")
    (tmp_path / ".out.export.0123abcd.parquet").write_text("half")
    hs.open(tmp_path / "states").export(tmp_path / "out.parquet")
    assert sorted(os.listdir(tmp_path)) == ["out.parquet", "states"]


def test_bad_targets_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_store(tmp_path / "states")
    store = hs.open(tmp_path / "states")
    (tmp_path / "old.parquet").write_text("mine")
    cases = [
        ({"path": tmp_path / "old.parquet"}, "exists already"),
        ({"path": tmp_path / "no" / "new.parquet"}, "folder does not exist"),
        ({"path": tmp_path / "new.csv"}, "Cannot tell the format"),
        ({"path": tmp_path / "new"}, "Cannot tell the format"),
        ({"path": tmp_path / "new", "format": "parquet"}, "does not end in .parquet"),
        ({"path": tmp_path / "new", "format": "csv"}, "no such format"),
        ({"path": tmp_path / "new.zarr", "sites": "layer.9"}, "No site"),
    ]
    for arguments, message in cases:
        with pytest.raises(Error, match=message) as raised:
            store.export(**arguments)
        assert "\n" not in str(raised.value)
    assert (tmp_path / "old.parquet").read_text() == "mine"
    monkeypatch.setattr(formats, "find_spec", lambda library: None)
    with pytest.raises(FileError, match=r"pip install 'hiddenscope\[export\]'"):
        store.export(tmp_path / "new.zarr")
    assert sorted(os.listdir(tmp_path)) == ["old.parquet", "states"]


def test_a_damaged_store_is_not_exported(tmp_path: Path) -> None:
    tiny_store(tmp_path / "states")
    shard = next((tmp_path / "states" / "data").iterdir())
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.chmod(0o644)
    shard.write_bytes(content)
    with pytest.raises(Damaged):
        hs.open(tmp_path / "states").export(tmp_path / "out.parquet")
    assert os.listdir(tmp_path) == ["states"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hiddenscope", "store", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )


def test_the_command_exports_and_refuses(tmp_path: Path) -> None:
    tiny_store(tmp_path / "states")
    target = tmp_path / "out.parquet"
    finished = run("export", tmp_path / "states", "--to", target, "--json")
    assert finished.returncode == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert facts["format"] == "parquet"
    assert facts["rows"] == Exported(target, "parquet").table.num_rows
    atlas = ["--format", "atlas", "--sites", "layer.1"]
    shown = run("export", tmp_path / "states", "--to", tmp_path / "a.parquet", *atlas)
    assert "--vector vector --text context" in shown.stdout
    for arguments, message in [
        (["export", tmp_path / "states", "--to", target], "exists already"),
        (["export", tmp_path / "states"], "nothing says where to"),
        (["info", tmp_path / "states", "--to", target], "only export writes"),
    ]:
        refused = run(*arguments)
        assert refused.returncode == 2
        assert message in refused.stderr


MEASURE = """
import resource, sys
from pathlib import Path
import hiddenscope as hs
from tests.places import ROOT
small, large, target, name = sys.argv[1:]
hs.open(small).export(target + ".warm" + Path(target).suffix, format=name)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
store = hs.open(large)
store.export(target, format=name)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert "torch" not in sys.modules
print((after - before) * 1024)
"""


@pytest.fixture(scope="module")
def large_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of 256 MiB."""
    path = tmp_path_factory.mktemp("large") / "states"
    width, length, texts = 1024, 512, 16
    plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": width}, "float32")
    ids = tuple(range(length))
    spans = ((0, 1),) * length
    units = []
    for unit in range(8):
        numbers = range(unit * texts, (unit + 1) * texts)
        units.append([StoreSequence(n, 0, ids, spans, n, "a text") for n in numbers])
    writer = create(path, plan, units)
    rng = np.random.default_rng(0)
    for unit in writer.pending():
        values = rng.normal(size=(texts * length, width)).astype(np.float32)
        writer.commit(unit, {"layer.0": values})
    writer.complete()
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_memory_is_bounded_by_a_block(
    name: str, large_store: Path, tmp_path: Path
) -> None:
    tiny_store(tmp_path / "small")
    target = tmp_path / FORMATS[name]
    script = textwrap.dedent(MEASURE)
    arguments = [tmp_path / "small", large_store, target, name]
    finished = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert finished.returncode == 0, finished.stderr
    assert int(finished.stdout) < 128 * 2**20
