"""Exports of a store, each read back by its own library and compared bit for bit."""

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli import main as cli
from hiddenscope.errors import Damaged, Error, FileError, SiteError
from hiddenscope.store import StorePlan, StoreSequence, create
from hiddenscope.store import export as exports
from hiddenscope.testing.stores import tiny_sequence, tiny_store
from tests.places import ROOT
from tests.unit.store.machine import damage, shard

SUFFIXES = {"parquet": ".parquet", "zarr": ".zarr", "dataset": ""}
# Only `make test-all` has the libraries of the others.
EACH_FORMAT = pytest.mark.parametrize(
    "name",
    [
        "parquet",
        pytest.param("zarr", marks=pytest.mark.slow),
        pytest.param("dataset", marks=pytest.mark.slow),
    ],
)


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


Export = Callable[..., Exported]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Export a store to a new path, and read that back."""

    def exported(store: hs.Store, name: str, **options: Any) -> Exported:
        target = tmp_path / f"out {len(os.listdir(tmp_path))}{SUFFIXES[name]}"
        assert store.export(target, format=name, **options) == name
        return Exported(target, name)

    return exported


@EACH_FORMAT
def test_each_format_gives_back_the_store(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, export: Export
) -> None:
    # Blocks end inside texts and units.
    monkeypatch.setattr("hiddenscope.store.export.BLOCK_ROWS", 7)
    for number, options in enumerate(
        (
            {},
            {"dtype": "float16"},
            {"dtype": "bfloat16"},
            {"pool": "mean"},
            {"every": 2, "units": ["000000", "000002"]},
        )
    ):
        store = hs.open(tiny_store(tmp_path / str(number), **options).path)
        before = set(os.listdir(tmp_path))
        dtype, pool = store.plan.dtype, store.plan.pool
        sites = "final" if pool else "layer.*,final"
        exported, tokens = export(store, name, sites=sites), store.tokens
        assert set(os.listdir(tmp_path)) == before | {exported.path.name}
        columns = {
            "text_index": store.texts[tokens.text],
            "position": tokens.positions,
            "id": tokens.ids,
            "start": tokens.spans[:, 0],
            "end": tokens.spans[:, 1],
        }
        for column, values in columns.items():
            if column in ("text_index", "position") or not pool:
                assert exported.column(column) == values.tolist(), column
        if pool:
            texts = [tokens.texts[text] for text in tokens.text]
            assert exported.column("text") == texts
        else:
            assert exported.column("token") == list(tokens.strings)
            assert set(exported.column("context")) == set(tokens.texts)
        provenance = exported.provenance
        for site in provenance["sites"]:
            vectors = exported.vectors(site)
            assert vectors.dtype == (np.float16 if dtype == "float16" else np.float32)
            # float32 holds every number of all three exactly.
            np.testing.assert_array_equal(vectors.astype(np.float32), store[site][:])
        named = ["final"] if pool else list(map(str, store.sites))
        assert provenance["sites"] == named
        source = json.loads(json.dumps(store.source.to_json()))
        assert provenance["source"] == source
        assert provenance["plan"] == store.plan.digest
        assert (provenance["dtype"], provenance["pool"]) == (dtype, pool)
        assert provenance["complete"] == store.complete
        assert provenance["versions"]["hiddenscope"]


@EACH_FORMAT
def test_widths_may_differ_and_strings_be_hostile(
    name: str, tmp_path: Path, export: Export
) -> None:
    widths = {"layer.0": 6, "layer.1.attn.z": 4, "layer.1": 6}
    plan = StorePlan({"model": "toy"}, {}, tuple(widths), widths, "float32")
    writer = create(tmp_path / "states", plan, [[tiny_sequence(0, 5)]])
    rng = np.random.default_rng(0)
    values = {}
    for site, width in widths.items():
        values[site] = rng.normal(size=(5, width)).astype(np.float32)
    writer.commit("000000", values)
    exported = export(hs.open(writer.path), name)
    for site, expected in values.items():
        np.testing.assert_array_equal(exported.vectors(site), expected)
    plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 2}, "float32")
    text = StoreSequence(0, 0, (5,), ((0, 1),), 0, "\ud800\0=1+1")
    writer = create(tmp_path / "hostile", plan, [[text]], strings={5: "\ud800"})
    assert export(hs.open(writer.path), name).column("id") == []
    writer.commit("000000", {"layer.0": np.ones((1, 2), np.float32)})
    exported = export(hs.open(writer.path), name)
    assert exported.column("token") == ["���"]
    assert exported.column("context") == ["���\0=1+1"]


def test_what_embedding_atlas_opens(tmp_path: Path) -> None:
    store = hs.open(tiny_store(tmp_path / "a", dtype="float16", pool="mean").path)
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
    assert store.tokens.texts is not None
    assert frame["text"].tolist() == [store.tokens.texts[k] for k in store.tokens.text]


@pytest.mark.slow
def test_xarray_reads_the_zarr_group(tmp_path: Path) -> None:
    import xarray

    store = hs.open(tiny_store(tmp_path / "states").path)
    store.export(tmp_path / "out.zarr")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = xarray.open_zarr(tmp_path / "out.zarr")
    np.testing.assert_array_equal(data["layer.1"].to_numpy(), store["layer.1"][:])


def test_progress_is_shown_and_what_a_killed_export_left_is_removed(
    tmp_path: Path,
) -> None:
    store = hs.open(tiny_store(tmp_path / "states").path)
    (tmp_path / ".out.export.0123abcd.parquet").write_text("half")
    said: list[tuple[str, float, float | None]] = []
    with progress.sent_to(lambda *step: said.append(step)):
        store.export(tmp_path / "out.parquet")
    assert said[-1] == ("Exporting to out.parquet", len(store), len(store))
    assert sorted(os.listdir(tmp_path)) == ["out.parquet", "states"]


@EACH_FORMAT
def test_an_interrupted_or_damaged_export_leaves_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hs.open(tiny_store(tmp_path / "states").path)
    monkeypatch.setattr("hiddenscope.store.export.BLOCK_ROWS", 7)
    target = tmp_path / f"out{SUFFIXES[name]}"
    for error, expected in (
        (KeyboardInterrupt(), KeyboardInterrupt),
        (OSError("disk full"), FileError),
    ):
        seen = []

        def stop(
            what: str, done: float, total: float | None, error: Any = error
        ) -> None:
            seen.append(done)  # noqa: B023
            if done > 10:
                raise error

        with pytest.raises(expected), progress.sent_to(stop):
            store.export(target, format=name)
        assert len(seen) > 2
        assert os.listdir(tmp_path) == ["states"]
    damage(shard(store.path, "000001"), at=-2000)
    with pytest.raises(Damaged):
        hs.open(store.path).export(target, format=name)
    assert os.listdir(tmp_path) == ["states"]


def test_bad_targets_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = hs.open(tiny_store(tmp_path / "states").path)
    (tmp_path / "old.parquet").write_text("mine")
    for name, options, message in (
        ("old.parquet", {}, "exists already"),
        ("no/new.parquet", {}, "folder does not exist"),
        ("new.csv", {}, "Cannot tell the format"),
        ("new", {}, "Cannot tell the format"),
        ("new", {"format": "parquet"}, "does not end in .parquet"),
        ("new", {"format": "csv"}, "no such format"),
        ("new.parquet", {"sites": "layer.9"}, "No site"),
    ):
        with pytest.raises(Error, match=message) as raised:
            store.export(tmp_path / name, **options)
        assert "\n" not in str(raised.value)
    assert (tmp_path / "old.parquet").read_text() == "mine"
    monkeypatch.setattr(exports, "find_spec", lambda library: None)
    with pytest.raises(FileError, match=r"pip install 'hiddenscope\[export\]'"):
        store.export(tmp_path / "new.zarr")
    assert sorted(os.listdir(tmp_path)) == ["old.parquet", "states"]


def test_the_command_exports_and_refuses(tmp_path: Path) -> None:
    states = tiny_store(tmp_path / "states").path
    target = tmp_path / "out.parquet"

    def run(*words: object) -> Any:
        return CliRunner().invoke(cli.app, ["store", *map(str, words)])

    finished = run("export", states, "--to", target, "--json")
    assert finished.exit_code == 0, finished.stderr
    facts = json.loads(finished.stdout)
    assert facts["format"] == "parquet"
    assert facts["rows"] == Exported(target, "parquet").table.num_rows
    atlas = ["--to", tmp_path / "a.parquet", "--format", "atlas", "--sites", "layer.1"]
    assert "--vector vector --text context" in run("export", states, *atlas).stdout
    for words, message in (
        (["export", states, "--to", target], "exists already"),
        (["export", states], "nothing says where to"),
        (["info", states, "--to", target], "only export writes"),
    ):
        refused = run(*words)
        assert refused.exit_code == 2
        assert message in refused.stderr


MEASURE = """
import resource, sys
from pathlib import Path
import hiddenscope as hs
small, large, target, name = sys.argv[1:]
hs.open(small).export(target + ".warm" + Path(target).suffix, format=name)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
hs.open(large).export(target, format=name)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert "torch" not in sys.modules
print((after - before) * 1024)
"""


@pytest.mark.slow
def test_memory_is_bounded_by_a_block(tmp_path: Path) -> None:
    """Of a store of 256 MiB."""
    width, length, texts = 1024, 512, 16
    plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": width}, "float32")
    ids, spans = tuple(range(length)), ((0, 1),) * length
    units = []
    for unit in range(8):
        numbers = range(unit * texts, (unit + 1) * texts)
        units.append([StoreSequence(n, 0, ids, spans, n, "a text") for n in numbers])
    writer = create(tmp_path / "large", plan, units)
    rng = np.random.default_rng(0)
    for name in writer.pending():
        values = rng.normal(size=(texts * length, width)).astype(np.float32)
        writer.commit(name, {"layer.0": values})
    writer.complete()
    small = tiny_store(tmp_path / "small").path
    for name, suffix in SUFFIXES.items():
        words = [small, writer.path, tmp_path / f"out{suffix}", name]
        command = [sys.executable, "-c", MEASURE, *map(str, words)]
        finished = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT
        )
        assert finished.returncode == 0, finished.stderr
        assert int(finished.stdout) < 128 * 2**20, name
