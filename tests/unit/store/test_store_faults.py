"""Nothing is lost, nothing is there twice and nothing is silently wrong, whatever
happens to a store.
"""

import errno
import hashlib
import json
import os
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from typer.testing import CliRunner

import hiddenscope as hs
from chaos import interleavings
from chaos.crashes import dying
from chaos.flips import flips, intact, readable
from chaos.power import power_losses
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
from hiddenscope.store import writer as store_writer
from hiddenscope.store.checksums import block_sums
from hiddenscope.store.shard import layout_of
from hiddenscope.testing import tiny_store
from hiddenscope.testing.stores import SITES, tiny_plan, tiny_sequences, tiny_values

UNITS = ("000000", "000001", "000002")


def shard(path: Path, unit: str) -> Path:
    record = json.loads((path / f"commits/{unit}.json").read_text("utf-8"))
    return path / "data" / f"{record['sha256']}.safetensors"


def damage(path: Path, at: int = -9000) -> None:
    content = bytearray(path.read_bytes())
    content[max(at, -len(content))] ^= 8
    path.write_bytes(content)


def reseal(path: Path, **changes: Any) -> None:
    """Change fields of a record and give it a checksum that is right."""
    fields = {
        key: value
        for key, value in json.loads(path.read_text("utf-8")).items()
        if key != "seal"
    }
    path.write_bytes(records.encode_record(fields | changes))


def test_every_flipped_bit_is_found_by_verify_and_by_reading(tmp_path: Path) -> None:
    path = tiny_store(tmp_path, dtype="bfloat16", width=800).path
    done = flips(path, 90, seed=1)
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
    store = hs.open(tmp_path)
    assert np.array_equal(
        store["layer.0"][:12], tiny_values(writer, "000000")["layer.0"]
    )
    with pytest.raises(
        Damaged, match=r"Cannot read unit 000000 of .* is damaged in block"
    ):
        np.asarray(store["final"])
    with pytest.raises(Damaged, match="unit 000000"):
        list(store.blocks("final"))
    with pytest.raises(Damaged, match="unit 000000"):
        [store["final"][[number]] for number in range(12)]
    assert np.array_equal(
        store.of(6)["final"][:], tiny_values(writer, "000002")["final"]
    )


def forge(path: Path, unit: str, tensor: str, values: bytes) -> None:
    """Put other bytes at the start of a tensor, and make every checksum anew."""
    plan = StorePlan.decode((path / "plan.json").read_bytes(), "Cannot forge")
    layout, old = layout_of(plan, plan.digest, plan.by_name[unit]), shard(path, unit)
    content, start = (
        bytearray(old.read_bytes()[: layout.covered]),
        layout.places[tensor].start,
    )
    content[start : start + len(values)] = values
    table = np.array(block_sums(memoryview(content)), "<u4").tobytes()
    sha256 = hashlib.sha256(content + table).hexdigest()
    old.unlink()
    (path / "data" / f"{sha256}.safetensors").write_bytes(content + table)
    reseal(
        path / "commits" / f"{unit}.json",
        sha256=sha256,
        blocks=hashlib.sha256(table).hexdigest(),
    )
    units = json.loads((path / "complete.json").read_bytes())["units"] | {unit: sha256}
    reseal(path / "complete.json", units=units)


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        ("text", [99]),
        ("text", [-1]),
        ("offsets", [0, 10**12]),
        ("offsets", [0, -5]),
        ("offsets", [1]),
        ("start", [-9]),
    ],
)
def test_a_shard_whose_sequences_do_not_add_up_is_damaged(
    tmp_path: Path, tensor: str, values: list[int]
) -> None:
    tiny_store(tmp_path)
    forge(tmp_path, "000000", tensor, np.array(values, "<i8").tobytes())
    with pytest.raises(
        Damaged,
        match="unit 000000 of .* has sequences that are not in the order of the corpus",
    ):
        len(hs.open(tmp_path))
    assert verify(tmp_path).units == ("000000",)


@pytest.mark.parametrize(
    ("tensor", "values"),
    [
        ("ids", np.array([7, 8], "<i4")),
        ("spans", np.array([1], "<i4")),
        ("start", np.array([2], "<i8")),
        ("offsets", np.array([0, 4], "<i8")),
        ("strings.offsets", np.array([0, 4], "<i8")),
        ("strings", np.frombuffer(b"another text", "u1")),
    ],
)
def test_a_shard_of_other_texts_than_the_plan_is_damaged_though_every_checksum_is_right(
    tmp_path: Path, tensor: str, values: np.ndarray[Any, Any]
) -> None:
    tiny_store(tmp_path)
    forge(tmp_path, "000000", tensor, values.tobytes())
    found = verify(tmp_path)
    (damage,) = found.damages
    assert found.units == ("000000",) and damage.what.endswith(
        f"has other {tensor} than plan/000000.jsonl"
    )
    assert discard_damaged(tmp_path) == ["000000"]


def test_a_damaged_file_of_the_plan_is_no_damage_of_the_shard(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    damage(tmp_path / "plan/000000.jsonl", at=-20)
    (found,) = verify(tmp_path).damages
    assert found.what == "plan/000000.jsonl is not what the plan was made with"
    assert discard_damaged(tmp_path) == []


def replan(path: Path, name: str, content: bytes) -> None:
    """Put another file into plan/, make every checksum anew, and commit all units by
    the new plan.
    """
    fields = json.loads((path / "plan.json").read_bytes())
    sha256 = hashlib.sha256(content).hexdigest()
    (path / f"plan/{name}.jsonl").write_bytes(content)
    units = [
        unit | ({"sha256": sha256} if unit["name"] == name else {})
        for unit in fields["units"]
    ]
    reseal(path / "plan.json", units=units, **({} if name in UNITS else {name: sha256}))
    for record in (path / "complete.json", *(path / "commits").iterdir()):
        record.unlink()
    writer = resume_store(path)
    for unit in writer.pending():
        writer.commit(unit, tiny_values(writer, unit))
    writer.complete()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("duplicates", b"[4,1]\n"),
        ("duplicates", b'{"same_as":"x","text":"y"}\n'),
        ("duplicates", b'{"same_as":1,"text":99999999999999999999999}\n'),
        ("duplicates", b'{"same_as":1,"text":-3}\n'),
        ("duplicates", b'{"same_as":4,"text":4}\n'),
        ("duplicates", b'{"same_as":0,"text":4}\n{"same_as":1,"text":4}\n'),
        ("duplicates", b"hello\n"),
        ("strings", b'{"a":1}\n'),
        ("strings", b"[1]\n"),
        ("strings", b"[1,5]\n"),
        ("strings", b'[[1],"x"]\n'),
    ],
)
def test_a_file_of_the_plan_that_is_not_as_the_format_says_is_damaged(
    tmp_path: Path, name: str, content: bytes
) -> None:
    tiny_store(tmp_path)
    replan(tmp_path, name, content)
    with pytest.raises(Damaged, match=rf"plan/{name}\.jsonl: "):
        hs.open(tmp_path).tokens  # noqa: B018
    (damage,) = verify(tmp_path).damages
    assert damage.what.startswith(f"plan/{name}.jsonl: ")


def test_a_text_with_states_of_its_own_is_no_copy(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    replan(tmp_path, "duplicates", b'{"same_as":0,"text":2}\n')
    with pytest.raises(Damaged, match="is a copy and has states of its own"):
        len(hs.open(tmp_path))


def line(**changes: Any) -> bytes:
    """The texts of the last unit of a tiny store, with other fields."""
    return records.plain_json(tiny_sequences()[2][0].to_json() | changes) + b"\n"


@pytest.mark.parametrize(
    "content",
    [
        line().replace(b'"ids":[102', b'"ids":[Infinity'),
        line(ids=[10**30, 1]),
        line(ids=[1, 2, 3], spans=[[0, 1]] * 3),
        line(ids=["a", "b"]),
        line(string=5),
        line(text=10**20),
        line(text=-1),
        line(spans=[[0, 1]]),
        line() * 2,
        b"5\n",
    ],
)
def test_sequences_of_a_plan_that_are_none_are_an_error_of_ours(
    tmp_path: Path, content: bytes
) -> None:
    tiny_store(tmp_path)
    with pytest.raises((Damaged, StoreError)):
        replan(tmp_path, "000002", content)


def test_a_text_in_two_units_that_do_not_follow_one_another_is_damaged(
    tmp_path: Path,
) -> None:
    tiny_store(tmp_path)
    replan(tmp_path, "000002", line(text=0))
    with pytest.raises(
        Damaged, match="a text is in two units that do not follow one another"
    ):
        len(hs.open(tmp_path))


@pytest.mark.parametrize(
    "change", [{"corpus": []}, {"environment": "x"}, {"pool": 5}, {"tokenizer": None}]
)
def test_a_plan_whose_parts_are_no_objects_is_damaged(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    tiny_store(tmp_path)
    reseal(tmp_path / "plan.json", **change)
    with pytest.raises(Damaged, match=r"plan\.json is not such a plan"):
        hs.open(tmp_path)


def test_a_text_that_is_no_text_is_damaged(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    forge(tmp_path, "000000", "strings", b"\xff\xff")
    with pytest.raises(Damaged, match="unit 000000 of .* has a text that is not UTF-8"):
        hs.open(tmp_path).tokens.texts  # noqa: B018


@pytest.mark.parametrize("cut", ["short", "zeros", "longer", "empty"])
def test_a_torn_write_is_found(tmp_path: Path, cut: str) -> None:
    tiny_store(tmp_path, width=800)
    file = shard(tmp_path, "000001")
    content = file.read_bytes()
    half = content[: len(content) // 2]
    torn = {
        "short": half,
        "zeros": half.ljust(len(content), b"\0"),
        "longer": content + b"\0",
        "empty": b"",
    }
    file.write_bytes(torn[cut])
    assert verify(tmp_path).units == ("000001",)
    with pytest.raises(Damaged, match="Cannot read unit 000001"):
        np.asarray(hs.open(tmp_path)["final"])


def test_a_file_that_becomes_shorter_while_it_is_read_is_an_error(
    tmp_path: Path,
) -> None:
    tiny_store(tmp_path, width=800)
    store = hs.open(tmp_path)
    assert len(store["layer.0"][:]) == 32
    os.truncate(shard(tmp_path, "000000"), 5000)
    with pytest.raises(Damaged, match=r"is shorter than it was|damaged"):
        np.asarray(store["final"])


def test_damaged_units_are_computed_anew(tmp_path: Path) -> None:
    tiny_store(tmp_path / "sound", width=800)
    writer = tiny_store(tmp_path / "store", width=800)
    damage(shard(writer.path, "000001"))
    removed = gc(writer.path, damaged=True)
    assert "commits/000001.json" in removed.files and "complete.json" in removed.files
    again = tiny_store(writer.path, width=800)
    assert again.pending() == [] and everything(tmp_path / "store") == everything(
        tmp_path / "sound"
    )


def test_texts_that_were_damaged_are_put_right_by_the_same_job(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path)
    damage(tmp_path / "plan/000001.jsonl", at=5)
    (tmp_path / "plan/strings.jsonl").unlink()
    assert verify(tmp_path).units == ("000001",) and len(verify(tmp_path).damages) == 2
    tiny_store(tmp_path)
    assert intact(tmp_path) and writer.sequences("000001") == tiny_sequences()[1]


def everything(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def test_gc_removes_what_nobody_holds_and_no_more(tmp_path: Path) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    (tmp_path / "tmp/0123456789abcdef.tmp").write_bytes(bytes(100))
    (tmp_path / "tmp/fedcba9876543210.tmp").mkdir()
    (tmp_path / f"data/{'a' * 64}.safetensors").write_bytes(bytes(1000))
    (tmp_path / "tmp/notes.txt").write_text("mine")
    (tmp_path / "data/README").write_text("mine")
    with writer.folder.writing() as held:
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
    assert after == [
        "fsync",
        "replace",
        "fsync",
        "fsync",
        "link",
        "fsync",
        "unlink",
        "unlink",
    ], steps
    assert steps.index("fsync") == len(steps) - len(after), (
        "every write comes before the first fsync"
    )


def test_a_process_that_dies_at_any_step_leaves_a_unit_whole_or_not_there(
    tmp_path: Path,
) -> None:
    sound = everything(tiny_store(tmp_path / "sound").path)
    for steps in range(0, 48, 2):
        path = tmp_path / str(steps)
        with dying(steps) as done:
            tiny_store(path, units=["000000", "000001"])
        if path.exists() and (path / "plan.json").exists():
            store = hs.open(path)
            assert intact(path) and readable(path) and set(store.units) <= set(UNITS)
        tiny_store(path)
        gc(path)
        assert everything(path) == sound, done
    assert done[-1] != "died at write"


NO_PROC = pytest.mark.skipif(
    not os.path.isdir("/proc/self/fd"),
    reason="what a descriptor holds is not told here",
)


@NO_PROC
def test_the_power_may_go_at_any_instant(tmp_path: Path) -> None:
    done, points, wrong = power_losses(tmp_path, 80)
    assert (done, wrong) == (80, []) and points > 40


@NO_PROC
def test_a_folder_that_is_not_brought_to_the_disk_would_be_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_writer, "to_disk", lambda path: None)
    _, points, wrong = power_losses(tmp_path, 60)
    assert points < 60 and any(
        "is not intact" in fault or "is lost" in fault for fault in wrong
    )


def test_two_jobs_at_once_make_one_store(tmp_path: Path) -> None:
    sound = everything(tiny_store(tmp_path / "sound").path)
    threads = [
        threading.Thread(target=tiny_store, args=[tmp_path / "store"]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tiny_store(tmp_path / "store")
    assert everything(tmp_path / "store") == sound


def test_a_second_job_may_run_at_any_line_of_the_first() -> None:
    done, *wrong = interleavings.run(20)
    assert "at each of 1" in done and wrong == []


def test_a_folder_in_which_another_job_puts_its_plan_meanwhile_is_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed, path = os.listdir, tmp_path / "store"
    path.mkdir()

    def list_late(folder: Any = ".") -> list[str]:
        monkeypatch.setattr(os, "listdir", listed)
        tiny_store(path, units=["000000"])
        return listed(folder)

    monkeypatch.setattr(os, "listdir", list_late)
    assert tiny_store(path).pending() == [] and intact(path)


@pytest.mark.skipif(os.name == "nt", reason="no limits there")
def test_a_file_that_cannot_grow_is_an_error_and_the_rest_stays(tmp_path: Path) -> None:
    import resource

    tiny_store(tmp_path, units=["000002"], width=4000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, before[1]))
    try:
        with pytest.raises(FileError, match=r"Cannot write .*File too large"):
            tiny_store(tmp_path, width=4000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "tmp").iterdir()) and hs.open(tmp_path).units == (
        "000002",
    )
    tiny_store(tmp_path, width=4000)
    assert intact(tmp_path) and hs.open(tmp_path).complete


def test_a_full_disk_is_an_error_and_the_job_goes_on_later(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", tmp_path],
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        path = tmp_path / "store"
        with pytest.raises(FileError, match="No space left on device"):
            tiny_store(path, width=4000)
        assert intact(path) and not list((path / "tmp").iterdir())
        subprocess.run(["mount", "-o", "remount,size=20m", tmp_path], check=True)
        tiny_store(path, width=4000)
        assert intact(path) and hs.open(path).complete
    finally:
        # Whoever still looks at it.
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "link"])
def test_an_input_output_error_loses_nothing(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = tiny_store(tmp_path, units=["000000"])
    before, states = everything(tmp_path), tiny_values(writer, "000001")

    def failing(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(FileError, match="Input/output error"):
            writer.commit("000001", states)
    gc(tmp_path)
    assert everything(tmp_path) == before and intact(tmp_path)
    assert writer.commit("000001", states) and intact(tmp_path)


def test_a_disk_that_cannot_be_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_store(tmp_path)
    store = hs.open(tmp_path)

    def failing(*_: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    with pytest.raises(
        FileError, match="Cannot read unit 000000 of .*Input/output error"
    ):
        np.asarray(store["final"])


@pytest.mark.parametrize("step", ["preadv", "open"])
def test_a_disk_that_cannot_be_read_is_no_reason_to_discard_a_unit(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_store(tmp_path)
    before, opened = everything(tmp_path), os.open

    def failing(target: Any, *args: Any, **kwargs: Any) -> Any:
        if step == "open" and ".safetensors" not in str(target):
            return opened(target, *args, **kwargs)
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, step, failing)
        with pytest.raises(FileError, match="Too many open files"):
            discard_damaged(tmp_path)
        with pytest.raises(FileError, match="Too many open files"):
            gc(tmp_path, damaged=True)
    assert everything(tmp_path) == before and discard_damaged(tmp_path) == []


@pytest.mark.skipif(
    not os.path.isdir("/proc/self"), reason="a folder in which even root cannot write"
)
def test_a_folder_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(FileError, match="Cannot write"):
        tiny_store(Path("/proc/self/store"))


def test_a_store_in_a_read_only_folder_is_read(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    shutil.rmtree(tmp_path / "tmp")
    for folder in [tmp_path, *tmp_path.iterdir()]:
        if folder.is_dir():
            folder.chmod(0o555)
    try:
        assert readable_values(tmp_path) and verify(tmp_path).intact
    finally:
        for folder in [tmp_path, *tmp_path.iterdir()]:
            if folder.is_dir():
                folder.chmod(0o755)


def readable_values(path: Path) -> bool:
    store = hs.open(path)
    return all(len(np.asarray(store[site])) == len(store.tokens) for site in SITES)


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


def test_a_newer_version_is_refused(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    reseal(tmp_path / "plan.json", version=3)
    with pytest.raises(
        StoreError,
        match=r"it is of version 3, and this hiddenscope reads up to version 2",
    ):
        hs.open(tmp_path)


def test_a_plan_that_was_edited_is_refused(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    plan = tmp_path / "plan.json"
    sound = plan.read_bytes()
    plan.write_bytes(sound.replace(b'"toy"', b'"two"'))
    with pytest.raises(Damaged, match="its bytes are not those that were written"):
        hs.open(tmp_path)
    plan.write_bytes(sound)
    reseal(plan, model={"model": "two"})  # with a checksum that is right
    with pytest.raises(Damaged, match=r"of another plan .* so plan.json was changed"):
        hs.open(tmp_path)
    assert not verify(tmp_path).intact


@pytest.mark.parametrize(
    "name",
    [
        "plan.json",
        "complete.json",
        "commits/000001.json",
        "plan/duplicates.jsonl",
        "data",
    ],
)
def test_links_inside_a_store_are_refused(tmp_path: Path, name: str) -> None:
    tiny_store(tmp_path / "store")
    inside, outside = tmp_path / "store" / name, tmp_path / "elsewhere"
    inside.rename(outside)
    inside.symlink_to(outside)
    with pytest.raises(
        StoreError, match="is a link, and nothing in a store may lead elsewhere"
    ):
        readable_values(tmp_path / "store")
    if name == "data":
        with pytest.raises(StoreError, match="is a link"):
            verify(tmp_path / "store")
    else:
        assert any(
            f"{name} is a link" in str(damage)
            for damage in verify(tmp_path / "store").damages
        )


def test_a_shard_that_is_a_link_is_refused(tmp_path: Path) -> None:
    tiny_store(tmp_path / "store")
    file = shard(tmp_path / "store", "000001")
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="is a link"):
        readable_values(tmp_path / "store")
    assert verify(tmp_path / "store").units == ("000001",)


@pytest.mark.parametrize(
    "value",
    ["../../../etc/passwd", "a" * 63, "A" * 64, 5, None, ["a" * 64], "../" + "a" * 61],
)
@pytest.mark.parametrize("field", ["sha256", "blocks"])
def test_a_hash_that_is_no_hash_is_refused(
    tmp_path: Path, field: str, value: Any
) -> None:
    tiny_store(tmp_path)
    reseal(tmp_path / "commits/000001.json", **{field: value})
    with pytest.raises(Damaged, match="its record is not one of a unit"):
        hs.open(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"units": []},
        {
            "units": [
                {
                    "name": "../x",
                    "rows": 1,
                    "tokens": 1,
                    "text_bytes": 0,
                    "sha256": "a" * 64,
                }
            ]
        },
        {
            "units": [
                {
                    "name": "000000",
                    "rows": 10**12,
                    "tokens": 1,
                    "text_bytes": 0,
                    "sha256": "a" * 64,
                }
            ]
        },
        {"units": 5},
        {"sites": ["../layer.0"]},
        {"sites": []},
        {"widths": {"layer.0": -1}},
        {"dtype": "float8"},
        {"more": 1},
        {"version": "1"},
        {"version": 2},
        {"version": 2, "every": 2},
        {"every": 2},
        {"duplicates": "../../x"},
    ],
)
def test_a_plan_with_other_fields_is_an_error_of_ours(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    tiny_store(tmp_path)
    reseal(tmp_path / "plan.json", **change)
    with pytest.raises(Error):
        hs.open(tmp_path)
    assert not intact(tmp_path)


def test_records_that_were_exchanged_are_found(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    first, second = (tmp_path / f"commits/{unit}.json" for unit in UNITS[:2])
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    with pytest.raises(Damaged, match="its record is of unit '000001'"):
        hs.open(tmp_path)
    first.write_bytes(content)
    fields = json.loads(second.read_text("utf-8"))
    reseal(first, sha256=fields["sha256"], blocks=fields["blocks"], size=fields["size"])
    (tmp_path / "complete.json").unlink()
    assert verify(tmp_path).units == ("000000",)
    with pytest.raises(Damaged, match="unit 000000"):
        readable_values(tmp_path)


def test_a_lost_record_shows_when_the_store_was_complete(tmp_path: Path) -> None:
    tiny_store(tmp_path)
    (tmp_path / "commits/000001.json").unlink()
    with pytest.raises(Damaged, match="the record of unit 000001 is missing"):
        hs.open(tmp_path)
    (tmp_path / "complete.json").unlink()
    assert hs.open(tmp_path).units == ("000000", "000002")


def test_the_command(tmp_path: Path) -> None:
    run = CliRunner().invoke
    path = str(tiny_store(tmp_path, units=["000000"]).path)
    assert (
        "3 sites x 20 rows of 5 texts, 1 of 3 units are committed"
        in run(cli.app, ["store", "info", path]).output
    )
    assert "\\n" not in run(cli.app, ["store", "info", path]).output
    assert (
        json.loads(run(cli.app, ["store", "info", path, "--json"]).output)[
            "planned_units"
        ]
        == 3
    )
    sound = run(cli.app, ["store", "verify", path])
    assert (
        sound.exit_code == 0
        and "Every byte is as it was written. 2 units are not committed yet."
        in sound.output
    )
    (tmp_path / "tmp/0123456789abcdef.tmp").write_bytes(bytes(100))
    assert "Removed 1 files (100 bytes)" in run(cli.app, ["store", "gc", path]).output
    damage(shard(tmp_path, "000000"))
    wrong = run(cli.app, ["store", "verify", path])
    assert wrong.exit_code == 1 and wrong.output.startswith("unit 000000: data/")
    assert (
        f"1 damage. Run the `hiddenscope extract ... --to {path}` that made this store"
        " again" in wrong.output
    )
    assert run(cli.app, ["store", "info", str(tmp_path / "none")]).exit_code == 2
    assert run(cli.app, ["store", "verify", path]).exit_code == 1
    for lost in ("data", "plan.json"):
        where = tmp_path / lost
        shutil.rmtree(where) if where.is_dir() else where.unlink()
        told = run(cli.app, ["store", "verify", path])
        assert (
            told.exit_code == 2
            and "Run the `hiddenscope extract` that made it again" in told.output
        )


class StoreMachine(RuleBasedStateMachine):
    """A store that is made, crashed, gone on with, read, verified and tidied in any
    order, beside a plain set.
    """

    def __init__(self) -> None:
        super().__init__()
        self.committed: set[str] = set()
        self.begun = False

    @initialize()
    def make(self) -> None:
        import tempfile

        self.folder = Path(tempfile.mkdtemp())
        self.path = self.folder / "store"

    def teardown(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def learn(self) -> None:
        """After a crash, what is there is what counts; nothing that was there may be
        gone.
        """
        now = (
            {path.stem for path in (self.path / "commits").glob("*.json")}
            if self.path.exists()
            else set()
        )
        assert self.committed <= now
        self.committed, self.begun = now, (self.path / "plan.json").exists()

    @rule(units=st.lists(st.sampled_from(UNITS), unique=True))
    def work(self, units: list[str]) -> None:
        writer = tiny_store(self.path, units=[])
        for unit in units:
            assert writer.commit(unit, tiny_values(writer, unit)) == (
                unit not in self.committed
            )
        self.committed |= set(units)
        self.begun = True

    @rule(steps=st.integers(0, 60), units=st.lists(st.sampled_from(UNITS), unique=True))
    def crash(self, steps: int, units: list[str]) -> None:
        with dying(steps):
            tiny_store(self.path, units=units)
        self.learn()

    @precondition(lambda self: self.begun)
    @rule()
    def tidy(self) -> None:
        assert not gc(self.path).busy

    @precondition(lambda self: self.begun)
    @rule(steps=st.integers(0, 5))
    def tidy_and_crash(self, steps: int) -> None:
        with dying(steps):
            gc(self.path)
        self.learn()

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def damage_and_mend(self, data: st.DataObject) -> None:
        unit = data.draw(st.sampled_from(sorted(self.committed)))
        damage(shard(self.path, unit), at=data.draw(st.integers(-3000, -1)))
        assert verify(self.path).units == (unit,)
        gc(self.path, damaged=True)
        self.committed.discard(unit)

    @precondition(lambda self: self.begun)
    @rule(data=st.data(), deleted=st.booleans())
    def damage_anything_and_heal(self, data: st.DataObject, deleted: bool) -> None:
        files = sorted(
            file
            for file in self.path.rglob("*")
            if file.is_file() and file.parent.name != "tmp"
        )
        file = data.draw(st.sampled_from(files))
        file.unlink() if deleted else damage(file, at=data.draw(st.integers(-3000, -1)))
        tiny_plan(self.path)
        discard_damaged(self.path)
        left = {path.stem for path in (self.path / "commits").glob("*.json")}
        assert left <= self.committed and len(self.committed - left) <= (
            file.parent.name in ("data", "commits")
        )
        self.committed = left

    @precondition(lambda self: self.begun)
    @rule()
    def complete(self) -> None:
        writer = resume_store(self.path)
        if len(self.committed) == len(UNITS):
            writer.complete()
        else:
            with pytest.raises(StoreError, match="are not committed"):
                writer.complete()

    @invariant()
    def reads_what_was_committed(self) -> None:
        if self.begun:
            store = hs.open(self.path)
            assert set(store.units) == self.committed and verify(self.path).intact
            writer = resume_store(self.path)
            for unit in self.committed:
                texts = {row.text for row in writer.sequences(unit)}
                found = [store.of(text)["final"][:] for text in sorted(texts)]
                assert np.array_equal(
                    np.concatenate(found), tiny_values(writer, unit)["final"]
                )


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=int(os.environ.get("HIDDENSCOPE_MACHINES", "8")),
    stateful_step_count=12,
    deadline=None,
)
