"""Nothing is lost, nothing is there twice and nothing is silently wrong, whatever
happens to a store.
"""

import errno
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope.cli import main as cli
from hiddenscope.errors import Damaged, Error, FileError, StoreError
from hiddenscope.store import (
    StorePlan,
    discard_damaged,
    gc,
    records,
    resume_store,
    verify,
)
from hiddenscope.store.shard import BLOCK, crc_function, layout_of
from hiddenscope.testing.stores import SITES, tiny_sequences, tiny_store, tiny_values
from labs.chaos.crashes import dying
from labs.chaos.flips import flips, intact, readable
from labs.chaos.kills import files_of
from tests.unit.store.machine import UNITS, StoreMachine, damage, shard

TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=5, stateful_step_count=10, deadline=None
)
Fresh = Callable[[], Path]
Change = Callable[[Path], object]


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_store(tmp_path_factory.mktemp("sound") / "store").path


@pytest.fixture
def fresh(sound: Path, tmp_path: Path) -> Fresh:
    """Give a new copy of a sound store at each call."""

    def copied() -> Path:
        path = tmp_path / f"store {len(list(tmp_path.iterdir()))}"
        return Path(shutil.copytree(sound, path))

    return copied


def read_all(path: Path) -> bool:
    """Read every value; what is not there raises."""
    store = hs.open(path)
    assert store.tokens.texts is not None
    return all(len(np.asarray(store[site])) == len(store.tokens) for site in SITES)


def reseal(path: Path, **changes: Any) -> None:
    """Change fields of a record and give it a checksum that is right."""
    fields = json.loads(path.read_text("utf-8")) | changes
    del fields["seal"]
    path.write_bytes(records.encode_record(fields))


def forge(path: Path, unit: str, tensor: str, values: bytes) -> None:
    """Put other bytes at the start of a tensor, and make every checksum anew."""
    plan = StorePlan.decode((path / "plan.json").read_bytes(), "Cannot forge")
    layout, old = layout_of(plan, plan.by_name[unit]), shard(path, unit)
    content = bytearray(old.read_bytes()[: layout.covered])
    start = layout.places[tensor].start
    content[start : start + len(values)] = values
    blocks = range(0, len(content), BLOCK)
    sums = [crc_function()(content[block : block + BLOCK]) for block in blocks]
    table = np.array(sums, "<u4").tobytes()
    sha256 = hashlib.sha256(content + table).hexdigest()
    old.unlink()
    (path / "data" / f"{sha256}.safetensors").write_bytes(content + table)
    table_sha256 = hashlib.sha256(table).hexdigest()
    reseal(path / "commits" / f"{unit}.json", sha256=sha256, blocks=table_sha256)
    units = json.loads((path / "complete.json").read_bytes())["units"] | {unit: sha256}
    reseal(path / "complete.json", units=units)


def replan(path: Path, name: str, content: bytes) -> None:
    """Put another file into plan/, make every checksum anew, and commit all units by
    the new plan.
    """
    sha256 = hashlib.sha256(content).hexdigest()
    (path / f"plan/{name}.jsonl").write_bytes(content)
    changes: dict[str, Any] = {name: sha256}
    if name in UNITS:
        units = json.loads((path / "plan.json").read_bytes())["units"]
        for unit in units:
            if unit["name"] == name:
                unit["sha256"] = sha256
        changes = {"units": units}
    reseal(path / "plan.json", **changes)
    for record in (path / "complete.json", *(path / "commits").iterdir()):
        record.unlink()
    writer = resume_store(path)
    for unit in writer.pending():
        writer.commit(unit, tiny_values(writer, unit))
    writer.complete()


def test_every_flipped_bit_is_found_by_verify_and_by_reading(tmp_path: Path) -> None:
    path = tiny_store(tmp_path, dtype="bfloat16", width=800).path
    done = flips(path, 60, seed=1)
    assert [flip for flip in done if not (flip.verified and flip.read)] == []
    assert len({flip.file.partition("/")[0] for flip in done}) == 5
    assert intact(path) and readable(path)


def test_verify_names_every_damaged_and_missing_unit(tmp_path: Path) -> None:
    tiny_store(tmp_path, width=800)
    damage(shard(tmp_path, "000000"))
    shard(tmp_path, "000001").unlink()
    (tmp_path / "commits/000002.json").unlink()
    found = verify(tmp_path)
    assert found.units == UNITS and not found.intact
    what = {damage.unit: damage.what for damage in found.damages}
    assert "is damaged in block" in what["000000"]
    assert "is missing" in what["000001"] and "data/" in what["000001"]
    assert what["000002"] == "commits/000002.json is missing"


def test_a_read_raises_only_where_it_touches_what_is_damaged(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, width=20_000)
    damage(shard(tmp_path, "000000"), at=-50_000)  # in the last site
    store, first = hs.open(tmp_path), tiny_values(writer, "000000")
    assert np.array_equal(store["layer.0"][:12], first["layer.0"])
    named = r"Cannot read unit 000000 of .* is damaged in block"
    for read in (
        lambda: np.asarray(store["final"]),
        lambda: list(store.blocks("final")),
        lambda: [store["final"][[number]] for number in range(12)],
    ):
        with pytest.raises(Damaged, match=named):
            read()
    last = tiny_values(writer, "000002")["final"]
    assert np.array_equal(store.of(6)["final"][:], last)


def line(**changes: Any) -> bytes:
    """The texts of the last unit of a tiny store, with other fields."""
    return records.plain_json(tiny_sequences()[2][0].to_json() | changes) + b"\n"


def forged(tensor: str, *values: int) -> Change:
    content = np.array(values, "<i8").tobytes()
    return lambda path: forge(path, "000000", tensor, content)


def resealed(name: str, **changes: Any) -> Change:
    return lambda path: reseal(path / name, **changes)


def replanned(name: str, content: bytes) -> Change:
    return lambda path: replan(path, name, content)


def torn(tear: Callable[[bytes], bytes]) -> Change:
    def change(path: Path) -> None:
        file = shard(path, "000001")
        file.write_bytes(tear(file.read_bytes()))

    return change


def linked(name: str) -> Change:
    def change(path: Path) -> None:
        inside = shard(path, "000001") if name == "shard" else path / name
        outside = path.with_name(f"{path.name} elsewhere")
        inside.rename(outside)
        inside.symlink_to(outside)

    return change


def renamed(path: Path) -> None:
    plan = path / "plan.json"
    plan.write_bytes(plan.read_bytes().replace(b'"toy"', b'"two"'))


ORDER = "unit 000000 of .* has sequences that are not in the order of the corpus"
LINK = "is a link, and nothing in a store may lead elsewhere"
DUPLICATES, STRINGS = r"plan/duplicates\.jsonl: ", r"plan/strings\.jsonl: "
UNIT = {"name": "0", "rows": 1, "tokens": 1, "text_bytes": 0, "sha256": "a" * 64}
# What is done to a store, what a read says of it, and the unit that verify names.
FAULTS: list[tuple[Change, str | None, str | None]] = [
    (forged("text", 99), ORDER, "000000"),
    (forged("text", -1), ORDER, "000000"),
    (forged("offsets", 0, 10**12), ORDER, "000000"),
    (forged("offsets", 0, -5), ORDER, "000000"),
    (forged("offsets", 1), ORDER, "000000"),
    (forged("start", -9), ORDER, "000000"),
    (forged("strings", -1), "unit 000000 of .* a text that is not UTF-8", "000000"),
    (torn(lambda file: file[:3000]), "Cannot read unit 000001", "000001"),
    (torn(lambda file: file[:3000].ljust(len(file), b"\0")), "000001", "000001"),
    (torn(lambda file: file + b"\0"), "Cannot read unit 000001", "000001"),
    (torn(lambda file: b""), "Cannot read unit 000001", "000001"),
    (replanned("duplicates", b"[4,1]\n"), DUPLICATES, None),
    (
        replanned("duplicates", b'{"same_as":1,"text":99999999999999999999}\n'),
        DUPLICATES,
        None,
    ),
    (replanned("duplicates", b'{"same_as":1,"text":-3}\n'), DUPLICATES, None),
    (replanned("duplicates", b'{"same_as":4,"text":4}\n'), DUPLICATES, None),
    (replanned("duplicates", b'{"same_as":0,"text":4}\n' * 2), DUPLICATES, None),
    (replanned("duplicates", b"hello\n"), DUPLICATES, None),
    (replanned("strings", b"[1]\n"), STRINGS, None),
    (replanned("strings", b"[1,5]\n"), STRINGS, None),
    (replanned("strings", b'[[1],"x"]\n'), STRINGS, None),
    (renamed, "its bytes are not those that were written", None),
    (resealed("plan.json", model={}), "of another plan .* plan.json was changed", None),
    (resealed("plan.json", version=3), "of version 3, and this .* reads up to", None),
    (resealed("plan.json", corpus=[]), r"plan\.json is not such a plan", None),
    (resealed("plan.json", environment="x"), r"plan\.json is not such a plan", None),
    (resealed("plan.json", pool=5), r"plan\.json is not such a plan", None),
    (resealed("plan.json", tokenizer=None), None, None),
    (resealed("plan.json", units=[]), None, None),
    (resealed("plan.json", units=[UNIT | {"name": "../x"}]), None, None),
    (resealed("plan.json", units=[UNIT | {"rows": 10**12}]), None, None),
    (resealed("plan.json", sites=["../layer.0"]), None, None),
    (resealed("plan.json", widths={"layer.0": -1}), None, None),
    (resealed("plan.json", dtype="float8"), None, None),
    (resealed("plan.json", more=1), None, None),
    (resealed("plan.json", version="1"), None, None),
    (resealed("plan.json", version=2), None, None),
    (resealed("plan.json", version=2, every=2), None, None),
    (resealed("plan.json", every=2), None, None),
    (resealed("plan.json", duplicates="../../x"), None, None),
    (linked("plan.json"), LINK, None),
    (linked("complete.json"), LINK, None),
    (linked("commits/000001.json"), LINK, None),
    (linked("plan/duplicates.jsonl"), LINK, None),
    (linked("data"), LINK, None),
    (linked("shard"), LINK, "000001"),
]
FAULTS += [
    (resealed("commits/000001.json", sha256=value), "not one of a unit", "000001")
    for value in ("../../../etc/passwd", "a" * 63, "A" * 64, 5, None, ["a" * 64])
]


def change_and_read(path: Path, change: Change) -> None:
    change(path)
    read_all(path)


def test_what_is_damaged_or_forged_is_found_by_reading_and_by_verify(
    fresh: Fresh,
) -> None:
    for number, (change, what, unit) in enumerate(FAULTS):
        path = fresh()
        with pytest.raises((Damaged, StoreError), match=what):
            change_and_read(path, change)
        assert not intact(path), number
        if unit is not None:
            assert verify(path).units == (unit,), number
    # These the writer finds too, so that not every unit is there.
    for name, content, what in (
        ("duplicates", b'{"same_as":0,"text":2}\n', "a copy and has states of its own"),
        ("000002", line(text=0), "a text is in two units that do not follow one"),
        ("000002", line().replace(b":[102", b":[Infinity"), None),
        ("000002", line(ids=[10**30, 1]), None),
        ("000002", line(ids=[1, 2, 3], spans=[[0, 1]] * 3), None),
        ("000002", line(string=5), None),
        ("000002", line(text=10**20), None),
        ("000002", line(spans=[[0, 1]]), None),
        ("000002", line() * 2, None),
        ("000002", b"5\n", None),
    ):
        path = fresh()
        with pytest.raises((Damaged, StoreError), match=what):
            change_and_read(path, replanned(name, content))
        assert not intact(path), content


def test_a_shard_of_other_texts_than_the_plan_is_damaged_though_every_checksum_is_right(
    fresh: Fresh,
) -> None:
    for tensor, values in (
        ("ids", np.array([7, 8], "<i4")),
        ("spans", np.array([1], "<i4")),
        ("start", np.array([2], "<i8")),
        ("offsets", np.array([0, 4], "<i8")),
        ("strings.offsets", np.array([0, 4], "<i8")),
        ("strings", np.frombuffer(b"another text", "u1")),
    ):
        path = fresh()
        forge(path, "000000", tensor, values.tobytes())
        (found,) = verify(path).damages
        said = f"has other {tensor} than plan/000000.jsonl"
        assert found.unit == "000000" and found.what.endswith(said)
        assert discard_damaged(path) == ["000000"]


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(
    tmp_path: Path,
) -> None:
    tiny_store(tmp_path, width=800)
    store = hs.open(tmp_path)
    assert len(store["layer.0"][:]) == 32
    os.truncate(shard(tmp_path, "000000"), 5000)
    with pytest.raises(Damaged, match=r"is shorter than it was|damaged"):
        np.asarray(store["final"])


def test_what_was_damaged_is_put_right_by_the_same_job(
    sound: Path, fresh: Fresh
) -> None:
    path = fresh()
    damage(shard(path, "000001"))
    removed = gc(path, damaged=True)
    assert "commits/000001.json" in removed.files and "complete.json" in removed.files
    assert tiny_store(path).pending() == []
    assert files_of(path) == files_of(sound)
    damage(path / "plan/000000.jsonl", at=-20)
    (found,) = verify(path).damages
    assert found.what == "plan/000000.jsonl is not what the plan was made with"
    assert discard_damaged(path) == [], "a file of the plan is no damage of the shard"
    (path / "plan/strings.jsonl").unlink()
    assert verify(path).units == ("000000",) and len(verify(path).damages) == 2
    tiny_store(path)
    assert files_of(path) == files_of(sound)


def test_gc_removes_what_nobody_holds_and_no_more(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    (tmp_path / f"data/{'a' * 64}.safetensors").write_bytes(bytes(1000))
    (tmp_path / "tmp/notes.txt").write_text("mine")
    (tmp_path / "data/README").write_text("mine")
    with writer.folder.writing() as held:
        (tmp_path / "tmp/0123456789abcdef.tmp").write_bytes(bytes(100))
        (tmp_path / "tmp/fedcba9876543210.tmp").mkdir()
        assert verify(tmp_path).unneeded == (f"data/{'a' * 64}.safetensors",)
        removed = gc(tmp_path)
        assert held.exists() and not removed.busy and removed.freed >= 1100
    assert len(removed.files) == 3 and gc(tmp_path).files == ()
    assert (tmp_path / "tmp/notes.txt").exists() and (tmp_path / "data/README").exists()
    # A job between the two names of its shard.
    with writer.folder.locked("data", shared=True):
        assert gc(tmp_path).busy
    assert intact(tmp_path) and hs.open(tmp_path).units == ("000000",)


def test_the_steps_of_a_commit_reach_the_disk_in_order(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=[])
    states = tiny_values(writer, "000000")
    with dying(10_000) as steps:
        assert writer.commit("000000", states)
    after = [step for step in steps if step != "write"]
    wanted = "fsync replace fsync fsync link fsync unlink unlink"
    assert after == wanted.split(), steps
    # Every write comes before the first fsync.
    assert steps.index("fsync") == len(steps) - len(after)


def test_a_process_that_dies_at_any_step_leaves_a_unit_whole_or_not_there(
    sound: Path, tmp_path: Path
) -> None:
    for steps in range(0, 48, 2):
        path = tmp_path / str(steps)
        with dying(steps) as done:
            tiny_store(path, units=["000000", "000001"])
        if (path / "plan.json").exists():
            store = hs.open(path)
            assert intact(path) and readable(path) and set(store.units) <= set(UNITS)
        tiny_store(path)
        gc(path)
        assert files_of(path) == files_of(sound), done
    assert done[-1] != "died at write"


def test_two_jobs_at_once_make_one_store(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    threads = [threading.Thread(target=tiny_store, args=[path]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tiny_store(path)
    assert files_of(path) == files_of(sound)


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "link"])
def test_an_input_output_error_loses_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    before, states = files_of(tmp_path), tiny_values(writer, "000001")
    write = os.write

    def failing(*given: Any, **_: Any) -> Any:
        # The header of a shard is written, and its sha256 begun.
        if step == "write" and len(given[1]) < 500:
            return write(*given)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(FileError, match="Input/output error"):
            writer.commit("000001", states)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("sha256") for name in names)
    gc(tmp_path)
    assert files_of(tmp_path) == before and intact(tmp_path)
    assert writer.commit("000001", states) and intact(tmp_path)


@pytest.mark.parametrize("step", ["preadv", "open"])
def test_a_disk_that_cannot_be_read_is_an_error_and_no_reason_to_discard_a_unit(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_store(tmp_path)
    before, opened, store = files_of(tmp_path), os.open, hs.open(tmp_path)

    def failing(target: Any, *args: Any, **kwargs: Any) -> Any:
        if step == "open" and ".safetensors" not in str(target):
            return opened(target, *args, **kwargs)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        for call in (
            lambda: np.asarray(store["final"]),
            lambda: discard_damaged(tmp_path),
            lambda: gc(tmp_path, damaged=True),
        ):
            with pytest.raises(FileError, match="Too many open files"):
                call()
    assert files_of(tmp_path) == before and discard_damaged(tmp_path) == []


def test_a_store_in_a_read_only_folder_is_read_and_not_written(fresh: Fresh) -> None:
    path = fresh()
    shutil.rmtree(path / "tmp")
    folders = [folder for folder in path.iterdir() if folder.is_dir()]
    for folder in [path, *folders]:
        folder.chmod(0o555)
    try:
        assert read_all(path) and verify(path).intact
    finally:
        for folder in [path, *folders]:
            folder.chmod(0o755)
    # Where even root cannot write.
    if os.path.isdir("/proc/self"):
        with pytest.raises(FileError, match="Cannot write"):
            tiny_store(Path("/proc/self/store"))


def test_a_folder_that_is_no_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/notes.txt").write_text("mine")
    for name, what in (
        ("none", "no such folder"),
        ("file", "not a folder"),
        ("folder", "has no plan.json"),
    ):
        with pytest.raises(StoreError, match=what):
            hs.open(tmp_path / name)
    with pytest.raises(StoreError, match=r"holds other things, such as notes.txt"):
        tiny_store(tmp_path / "folder")
    (tmp_path / "folder/plan.json").write_text("{}")
    with pytest.raises(Error):
        hs.open(tmp_path / "folder")


def test_records_that_were_lost_or_exchanged_are_found(fresh: Fresh) -> None:
    path = fresh()
    first, second = (path / f"commits/{unit}.json" for unit in UNITS[:2])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(Damaged, match="its record is of unit '000001'"):
        hs.open(path)
    first.write_bytes(content)
    fields = json.loads(second.read_text("utf-8"))
    reseal(first, **{name: fields[name] for name in ("sha256", "blocks", "size")})
    (path / "complete.json").unlink()
    assert verify(path).units == ("000000",)
    with pytest.raises(Damaged, match="unit 000000"):
        read_all(path)
    path = fresh()
    (path / "commits/000001.json").unlink()
    with pytest.raises(Damaged, match="the record of unit 000001 is missing"):
        hs.open(path)
    (path / "complete.json").unlink()
    assert hs.open(path).units == ("000000", "000002")


def test_the_command(tmp_path: Path) -> None:
    path = str(tiny_store(tmp_path, units=["000000"]).path)

    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["store", *words])
        return done.exit_code, done.output

    shown = run("info", path)[1]
    assert "3 sites x 20 rows of 5 texts, 1 of 3 units are committed" in shown
    assert "\\n" not in shown
    assert json.loads(run("info", path, "--json")[1])["planned_units"] == 3
    code, told = run("verify", path)
    sound = "Every byte is as it was written. 2 units are not committed yet."
    assert code == 0 and sound in told
    (tmp_path / "tmp/0123456789abcdef.tmp").write_bytes(bytes(100))
    assert "Removed 1 files (100 bytes)" in run("gc", path)[1]
    damage(shard(tmp_path, "000000"))
    code, told = run("verify", path)
    assert code == 1 and told.startswith("unit 000000: data/")
    again = f"1 damage. Run the `hiddenscope extract ... --to {path}` that made this"
    assert again in told
    assert run("info", str(tmp_path / "none"))[0] == 2
    for lost in ("data", "plan.json"):
        where = tmp_path / lost
        shutil.rmtree(where) if where.is_dir() else where.unlink()
        code, told = run("verify", path)
        assert code == 2
        assert "Run the `hiddenscope extract` that made it again" in told
