"""The writer of a store: it makes one by a plan, and commits unit after unit.

A unit is committed in six steps: its shard is written under a temporary name and hashed
on the way; the shard is fsynced; it is renamed to its hash; the folder is fsynced; the
record is linked into `commits/` only if there is none; that folder is fsynced. A crash
at any instant leaves a unit committed whole or not at all. Of two processes that commit
one unit, the first to link its record wins; a shard of other bytes is left to `gc`.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, StoreError
from hiddenscope.files import PathLike, explained, printable, to_disk
from hiddenscope.store import records
from hiddenscope.store.folder import FOLDERS, StoreFolder
from hiddenscope.store.plan import (
    DTYPES,
    StorePlan,
    StoreSequence,
    UnitDigest,
    read_plan,
    read_sequences,
    unit_name,
)
from hiddenscope.store.records import Commit, committed
from hiddenscope.store.shard import layout_of, sequence_tensors, write_shard

# Units whose texts stay in memory: a job computes one while it writes two and reads
# one ahead, and two more were committed since they were read.
MOST_READ = 6


@checked
def create(
    path: PathLike,
    plan: StorePlan,
    units: Iterable[Sequence[StoreSequence]],
    duplicates: Iterable[tuple[int, int]] = (),
    strings: Mapping[int, str] | None = None,
    *,
    corpus: Callable[[], dict[str, Any]] | None = None,
) -> "Writer":
    """Make a store, or continue an existing one that has the same plan.

    `units` yields the sequences of each unit, in the order of the corpus, and is read
    once. `duplicates` are pairs of a text and the earlier text that it is a copy of.
    `strings` maps token ids to strings. `corpus` gives that of the plan where it is
    known last: it is called when the last unit has been read, and may raise.
    `duplicates` and `strings` may be filled until then.

    >>> import tempfile
    >>> import numpy as np
    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 4}, "float32")
    >>> with tempfile.TemporaryDirectory() as path:
    ...     text = StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)
    ...     writer = create(path, plan, [[text]])
    ...     before = writer.pending()
    ...     _ = writer.commit("000000", {"layer.0": np.zeros((2, 4), "float32")})
    ...     before, writer.pending()
    (['000000'], [])
    """
    folder = StoreFolder(path)
    with _explained(folder):
        _refuse_others(folder)
        folder.make()
        with folder.writing(folder=True) as fresh:
            if strings is None:
                strings = {}
            plan = _write_texts(fresh, plan, units, duplicates, strings, corpus)
            with folder.locked():
                _publish_plan(folder, fresh, plan)
    return resume_store(path, digest=plan.digest)


@checked
def resume_store(path: PathLike, *, digest: str | None = None) -> "Writer":
    """Continue an existing store; with `digest`, only if its plan has that digest."""
    folder = StoreFolder(path)
    folder.check()
    plan = read_plan(folder)
    if digest is not None and plan.digest != digest:
        reason = f"its plan is {plan.digest[:12]}, not {digest[:12]}"
        raise StoreError(
            f"Cannot go on with {folder.shown}", reason, "Give another folder."
        )
    with _explained(folder):
        folder.make()
    return Writer(folder, plan)


class Writer:
    """A writer that commits units; several may work on one store, in any process."""

    def __init__(self, folder: StoreFolder, plan: StorePlan) -> None:
        self.folder = folder
        self.plan = plan
        self.digest = plan.digest

        def read(unit: str) -> list[StoreSequence]:
            return read_sequences(folder, plan.by_name[unit])

        self._read = lru_cache(MOST_READ)(read)

    @property
    def path(self) -> Path:
        """Return the folder of the store."""
        return self.folder.path

    def pending(self) -> list[str]:
        """Return the units without a record, in order."""
        done = self.folder.recorded()
        return [unit.name for unit in self.plan.units if unit.name not in done]

    def sequences(self, unit: str) -> list[StoreSequence]:
        """Return the sequences of a unit, checked against the plan."""
        return list(self._read(unit))

    def commit(self, unit: str, values: Mapping[str, Any]) -> bool:
        """Write the states of a unit and record it; False if another was first.

        There is one array for each site, `[token, width]`, or `[text, width]` in a
        pooled store.
        """
        plan = self.plan
        planned = plan.by_name[unit]
        tensors = {site: np.asarray(values[site]) for site in plan.sites}
        for site, array in tensors.items():
            assert array.shape == (plan.rows_of(planned), plan.widths[site]), site
            assert array.dtype == DTYPES[plan.dtype], site
        if self.folder.record(unit).exists():
            return False
        tensors |= sequence_tensors(self.sequences(unit), plan.every)
        layout = layout_of(plan, planned)
        with _explained(self.folder), self.folder.writing() as fresh:
            sha256, table = write_shard(fresh, layout, tensors)
            commit = Commit(self.digest, unit, sha256, layout.size, table)
            # Locked, or gc could delete the shard before it has its record.
            with self.folder.locked("data", shared=True):
                final = self.folder.data(sha256)
                os.replace(fresh, final)
                to_disk(final.parent)
                return self.folder.publish(self.folder.record(unit), commit.encode())

    def complete(self) -> None:
        """Write the record of all records, once no unit is pending."""
        missing = self.pending()
        if missing:
            raise StoreError(
                f"Cannot complete {self.folder.shown}",
                f"{len(missing):,} units are not committed, the first is {missing[0]}",
                "Commit them first.",
            )
        shards = {}
        for unit in self.plan.by_name:
            shards[unit] = committed(self.folder, self.digest, unit).sha256
        with _explained(self.folder):
            record = {"format": records.COMPLETE, "plan": self.digest, "units": shards}
            self.folder.publish(self.folder.complete, records.encode_record(record))


@checked
def recover_plan(path: PathLike) -> StorePlan | None:
    """Read the plan of a store whose job runs again; None if it is missing or damaged.

    Folders of the store that were lost are made again.
    """
    folder = StoreFolder(path)
    if not os.path.lexists(folder.plan):
        return None
    with _explained(folder):
        folder.make()
    return _sound_plan(folder)


def _sound_plan(folder: StoreFolder) -> StorePlan | None:
    """Read the plan of a store; None if plan.json is missing or damaged."""
    try:
        return read_plan(folder)
    except Damaged:
        return None


def _refuse_others(folder: StoreFolder) -> None:
    """Refuse a folder that is neither empty nor a store."""
    # Listed once: between two looks at it, another job could put its plan.json there.
    names = set(os.listdir(folder.path)) if folder.path.is_dir() else set()
    if folder.plan.name in names:
        return
    known = set(FOLDERS)
    if "commits" in names:
        # A store that lost its plan.json.
        known.add(folder.complete.name)
    others = sorted(names - known)
    if others:
        raise StoreError(
            f"Cannot make a store in {folder.shown}",
            f"the folder holds other things, such as {printable(others[0])}",
            "Give an empty folder, or a new one.",
        )


def _publish_plan(folder: StoreFolder, fresh: Path, plan: StorePlan) -> None:
    """Put a plan in its place, unless there is one already; refuse another plan."""
    texts = folder.path / "plan"
    stored = _sound_plan(folder)
    if stored is not None:
        if stored.digest != plan.digest:
            stored.check_same(plan, folder.shown)
        # Files that were damaged or lost since are replaced; the others are the same.
        for path in sorted(fresh.iterdir()):
            os.replace(path, texts / path.name)
        to_disk(texts)
        return
    # Where plan.json was lost, the records of the units still name their plan.
    commits = [folder.record(unit) for unit in sorted(folder.recorded())]
    for path in (folder.complete, *commits):
        try:
            digest = records.decode(folder.read(path), folder.shown).get("plan")
        except Damaged:
            # Or missing.
            continue
        if digest != plan.digest:
            raise StoreError(
                f"Cannot go on with {folder.shown}: its plan.json is damaged or lost",
                f"{path.relative_to(folder.path)} is of plan {str(digest)[:12]}, and"
                f" {plan.digest[:12]} is asked for",
                "Ask for the same as before, or give another folder.",
            )
    # Only a damaged plan.json can be there.
    folder.plan.unlink(missing_ok=True)
    # Left by a process that was killed before it had a plan.json.
    for leftover in texts.iterdir():
        leftover.unlink()
    texts.rmdir()
    os.replace(fresh, texts)
    to_disk(folder.path)
    folder.publish(folder.plan, plan.encode())


def _write_texts(
    fresh: Path,
    plan: StorePlan,
    units: Iterable[Sequence[StoreSequence]],
    duplicates: Iterable[tuple[int, int]],
    strings: Mapping[int, str],
    corpus: Callable[[], dict[str, Any]] | None,
) -> StorePlan:
    """Write the files of plan/, and return the plan with their hashes."""
    # Texts without sequences, which must be copies, and the place of the last sequence.
    missing: set[int] = set()
    last = (-1, 0)
    digests = []
    for number, sequences in enumerate(units):
        assert sequences, f"unit {number} has no texts"
        for sequence in sequences:
            place = (sequence.text, sequence.start)
            assert place > last, f"text {place} comes after {last}"
            assert len(sequence.spans) == len(sequence.ids) > 0, f"text {place}"
            missing.update(range(last[0] + 1, sequence.text))
            last = place
        name = unit_name(number)
        lines = (sequence.to_json() for sequence in sequences)
        sha256 = _write_lines(fresh / f"{name}.jsonl", lines)
        tokens = sum(len(sequence.ids) for sequence in sequences)
        text_bytes = sum(len(sequence.string_bytes) for sequence in sequences)
        kept = sum(len(sequence.kept(plan.every)) for sequence in sequences)
        unit = UnitDigest(name, len(sequences), tokens, text_bytes, sha256, kept)
        digests.append(unit)
    # This refuses a corpus that is empty.
    described = plan.corpus if corpus is None else corpus()
    assert digests, "there are no texts"
    copies = dict(sorted(duplicates))
    missing.update(range(last[0] + 1, max(copies, default=0) + 1))
    assert copies.keys() == missing, "a text has sequences, or is a copy"
    for text, original in copies.items():
        assert 0 <= original < text, f"text {text} is no copy of an earlier one"
        assert original not in copies, f"text {text} is a copy of a copy"
    copy_lines = ({"text": text, "same_as": copies[text]} for text in copies)
    string_lines = ([number, strings[number]] for number in sorted(strings))
    filled = replace(
        plan,
        corpus=described,
        units=tuple(digests),
        duplicates=_write_lines(fresh / "duplicates.jsonl", copy_lines),
        strings=_write_lines(fresh / "strings.jsonl", string_lines),
    )
    to_disk(fresh)
    # Tuples become lists, as they are when read.
    return StorePlan.decode(filled.encode(), "Cannot plan a store")


def _write_lines(path: Path, values: Iterable[Any]) -> str:
    """Write values as lines of JSON and return the SHA-256 of the file."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for value in values:
            line = records.plain_json(value) + b"\n"
            digest.update(line)
            file.write(line)
    to_disk(path)
    return digest.hexdigest()


def _explained(folder: StoreFolder) -> AbstractContextManager[None]:
    problem = f"Cannot write {folder.shown}, which keeps its finished units"
    return explained(problem, "Choose a folder that can be written.")
