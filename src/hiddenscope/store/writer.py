"""Writer: makes a store of a plan, and commits one unit after another.

A unit is committed in six steps: its shard is written under a temporary name and hashed
on the way; the shard is fsynced; it is renamed to its hash; the folder is fsynced; the
record is linked into `commits/` only if there is none; that folder is fsynced. A crash
at any instant leaves a unit committed whole or not at all. Of two processes that commit
one unit, the first to link its record wins, and the other deletes its own shard.
"""

import filecmp
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, FileError, StoreError
from hiddenscope.files import to_disk
from hiddenscope.store import records
from hiddenscope.store.commits import Commit, Complete, committed
from hiddenscope.store.folder import FOLDERS, StoreFolder, shown
from hiddenscope.store.plan import (
    LARGEST,
    StorePlan,
    StoreSequence,
    UnitDigest,
    unit_name,
)
from hiddenscope.store.shard import (
    layout_of,
    sequence_tensors,
    states_to_store,
    write_shard,
)

KEPT = 3  # units whose texts are kept in memory: a job computes one while it writes two


@checked
def create(
    path: str | os.PathLike[str],
    plan: StorePlan | Callable[[], StorePlan],
    units: Iterable[Sequence[StoreSequence]],
    duplicates: Iterable[tuple[int, int]] = (),
    strings: Mapping[int, str] | None = None,
    *,
    every: int = 1,
) -> "Writer":
    """Make a store, or go on with the one that is there if it has the same plan.

    `units` gives the sequences of each unit, in the order of the corpus, and is read
    once. `duplicates` are pairs: a text, and the earlier text that it is a copy of.
    `strings` says how token ids read. `plan` may be a function: it is called when the
    last unit has been read, and may raise. `duplicates` and `strings` may be filled
    till then. `every` is that of the plan: the units count the tokens that are kept.

    >>> import tempfile
    >>> import numpy as np
    >>> plan = StorePlan({"model": "toy"}, {}, ("layer.0",), {"layer.0": 4}, "float32")
    >>> with tempfile.TemporaryDirectory() as path:
    ...     writer = create(path, plan, [[StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)]])
    ...     before = writer.pending()
    ...     _ = writer.commit("000000", {"layer.0": np.zeros((2, 4), "float32")})
    ...     before, writer.pending()
    (['000000'], [])
    """
    folder = StoreFolder(path)
    with _explained(folder):
        _refuse_others(folder)
        folder.make()
        folder.remove_leftovers()
        with folder.writing(folder=True) as fresh:
            whole = _write_texts(
                fresh,
                plan,
                units,
                duplicates,
                {} if strings is None else strings,
                every,
            )
            with folder.locked():
                _publish_plan(folder, fresh, whole)
    return resume(path, digest=whole.digest)


@checked
def resume(path: str | os.PathLike[str], *, digest: str | None = None) -> "Writer":
    """Go on with a store that is there; with `digest`, only if that is the digest of
    its plan.
    """
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
        folder.remove_leftovers()
    return Writer(folder, plan)


class Writer:
    """Commits the units of a store. Several may be at work on one store, in any number
    of processes.
    """

    def __init__(self, folder: StoreFolder, plan: StorePlan) -> None:
        self.folder, self.plan, self.digest = folder, plan, plan.digest
        # Units that were read and are not committed yet.
        self._read: dict[str, list[StoreSequence]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The folder of the store."""
        return self.folder.path

    def pending(self) -> list[str]:
        """The units without a record, in order."""
        done = self.folder.recorded()
        return [unit.name for unit in self.plan.units if unit.name not in done]

    def sequences(self, unit: str) -> list[StoreSequence]:
        """The texts of a unit, checked against the plan."""
        sequences = self._read.get(unit)
        if sequences is None:
            sequences = read_sequences(self.folder, self._unit(unit))
            for oldest in list(self._read)[: 1 - KEPT]:
                self._read.pop(oldest, None)
            self._read[unit] = sequences
        return list(sequences)

    def commit(self, unit: str, values: Mapping[str, Any]) -> bool:
        """Write the states of a unit and record it; False if another was first.

        There is one array for each site, `[token, width]`, or `[text, width]` in a
        pooled store.
        """
        planned = self._unit(unit)
        states = states_to_store(self.plan, planned, values)
        if self.folder.record(unit).exists():
            return False
        tensors = sequence_tensors(self.sequences(unit), self.plan.every) | states
        self._read.pop(unit, None)
        layout = layout_of(self.plan, self.digest, planned)
        with _explained(self.folder), self.folder.writing() as fresh:
            sha256, table = write_shard(fresh, layout, tensors)
            # So that gc does not delete it before its record.
            with self.folder.locked("data", shared=True):
                return self._record(
                    fresh, Commit(self.digest, unit, sha256, layout.size, table)
                )

    def _record(self, fresh: Path, commit: Commit) -> bool:
        final = self.folder.data(commit.sha256)
        os.replace(fresh, final)
        to_disk(final.parent)
        if self.folder.publish(self.folder.record(commit.unit), commit.encode()):
            return True
        with suppress(FileError):  # a damaged record is for verify to name
            if committed(self.folder, self.plan, commit.unit).sha256 != commit.sha256:
                final.unlink(missing_ok=True)
        return False

    def complete(self) -> None:
        """Write the record of all records, when no unit is pending."""
        if missing := self.pending():
            reason = (
                f"{len(missing):,} units are not committed, the first is {missing[0]}"
            )
            raise StoreError(
                f"Cannot complete {self.folder.shown}", reason, "Commit them first."
            )
        commits = {
            unit.name: committed(self.folder, self.plan, unit.name).sha256
            for unit in self.plan.units
        }
        with _explained(self.folder):
            self.folder.publish(
                self.folder.complete, Complete(self.digest, commits).encode()
            )

    def close(self) -> None:
        """Nothing is held between commits; this is here so that a writer may stand in a
        with statement.
        """

    def _unit(self, name: str) -> UnitDigest:
        unit = self.plan.by_name.get(name)
        if unit is None:
            reason = f"it has {len(self.plan.units):,} units"
            raise StoreError(
                f"No unit {str(name)[:40]!r} in {self.folder.shown}",
                reason,
                "Name one of them.",
            )
        return unit


def read_plan(folder: StoreFolder) -> StorePlan:
    """The plan of a store."""
    return StorePlan.decode(folder.read(folder.plan), f"Cannot open {folder.shown}")


@checked
def recover_plan(path: str | os.PathLike[str]) -> StorePlan | None:
    """The plan of a store whose job is run again; None where there is none, or where
    plan.json is damaged.

    Folders of the store that were lost are made again.
    """
    folder = StoreFolder(path)
    if not os.path.lexists(folder.plan):
        return None
    with _explained(folder):
        folder.make()
    return _sound_plan(folder)


def _sound_plan(folder: StoreFolder) -> StorePlan | None:
    """The plan of a store; None where plan.json is missing or damaged."""
    try:
        return read_plan(folder) if os.path.lexists(folder.plan) else None
    except Damaged:
        return None


def read_sequences(folder: StoreFolder, unit: UnitDigest) -> list[StoreSequence]:
    """The texts of a unit, checked against the plan."""
    content = read_beside(folder, unit.name, unit.sha256)
    try:
        sequences = [
            StoreSequence.from_json(records.from_json(line))
            for line in content.splitlines()
        ]
        counted = len(sequences), sum(len(sequence.ids) for sequence in sequences)
        if counted != (unit.sequences, unit.tokens):
            raise ValueError(
                f"it has {counted[0]:,} sequences of {counted[1]:,} tokens, and"
                " plan.json says otherwise"
            )
        return sequences
    except (KeyError, TypeError, ValueError) as error:
        raise Damaged(
            f"Cannot read {folder.shown}",
            f"plan/{unit.name}.jsonl: {error}",
            records.VERIFY,
        ) from error


def read_copies(folder: StoreFolder, plan: StorePlan) -> dict[int, int]:
    """Texts that are copies, and of which earlier text, checked against the plan."""
    pairs = []
    for line in _lines_beside(folder, "duplicates", plan.duplicates):
        text, same = (
            (line.get("text"), line.get("same_as"))
            if isinstance(line, dict)
            else (None, None)
        )
        if (
            type(text) is not int
            or type(same) is not int
            or not 0 <= same < text < LARGEST
        ):
            raise _malformed(
                folder,
                "duplicates",
                "a line names no text and an earlier one that it is a copy of",
            )
        pairs.append((text, same))
    copies = dict(pairs)
    if len(copies) < len(pairs) or copies.keys() & set(copies.values()):
        raise _malformed(
            folder, "duplicates", "a text is there twice, or is a copy of a copy"
        )
    return copies


def read_strings(folder: StoreFolder, plan: StorePlan) -> dict[int, str]:
    """How token ids read, checked against the plan."""
    strings = {}
    for line in _lines_beside(folder, "strings", plan.strings):
        if (
            not isinstance(line, list)
            or len(line) != 2
            or type(line[0]) is not int
            or not isinstance(line[1], str)
        ):
            raise _malformed(folder, "strings", "a line has no id and its string")
        strings[line[0]] = line[1]
    return strings


def _lines_beside(folder: StoreFolder, name: str, sha256: str) -> Iterator[Any]:
    for line in read_beside(folder, name, sha256).splitlines():
        try:
            yield records.from_json(line)
        except ValueError as error:
            raise _malformed(
                folder, name, f"it is not JSON ({str(error)[:100]})"
            ) from error


def _malformed(folder: StoreFolder, name: str, reason: str) -> Damaged:
    return Damaged(
        f"Cannot read {folder.shown}", f"plan/{name}.jsonl: {reason}", records.VERIFY
    )


def read_beside(folder: StoreFolder, name: str, sha256: str) -> bytes:
    """A file of plan/, checked against its hash in the plan."""
    content = folder.read(folder.texts(name))
    if hashlib.sha256(content).hexdigest() != sha256:
        reason = f"plan/{name}.jsonl is not what the plan was made with"
        raise Damaged(f"Cannot read {folder.shown}", reason, records.VERIFY)
    return content


def _refuse_others(folder: StoreFolder) -> None:
    """A store is made in an empty folder, or in one that was begun.

    The folder is listed once: between two looks at it, another job could put its
    plan.json there.
    """
    names = set(os.listdir(folder.path)) if folder.path.is_dir() else set()
    if folder.plan.name in names:
        return
    # A store without its plan.json.
    lost = {folder.complete.name} if "commits" in names else set()
    others = sorted(names - {*FOLDERS, *lost})
    if others:
        reason = f"the folder holds other things, such as {shown(Path(others[0]))}"
        raise StoreError(
            f"Cannot make a store in {folder.shown}",
            reason,
            "Give an empty folder, or a new one.",
        )


def _publish_plan(folder: StoreFolder, fresh: Path, plan: StorePlan) -> None:
    """Put a plan in its place, unless there is one; another plan is refused."""
    stored = _sound_plan(folder)
    if stored is not None:
        if stored.digest != plan.digest:
            reason = "; ".join(stored.differences(plan)[:20])
            remedy = "Give another folder, or ask for the same as before."
            raise StoreError(
                f"Cannot go on with {folder.shown}: it was started with other settings",
                reason,
                remedy,
            )
        _restore_texts(folder, fresh)
        return
    _refuse_records_of_others(folder, plan)
    folder.plan.unlink(missing_ok=True)  # it is damaged
    final = folder.path / "plan"
    # Of a process that was killed before it had a plan.json.
    for leftover in final.iterdir():
        leftover.unlink()
    final.rmdir()
    os.replace(fresh, final)
    to_disk(folder.path)
    folder.publish(folder.plan, plan.encode())


def _refuse_records_of_others(folder: StoreFolder, plan: StorePlan) -> None:
    """Where plan.json was lost, the units that are there say whether this plan is the
    one that they were made by.
    """
    for path in (
        folder.complete,
        *(folder.record(unit) for unit in sorted(folder.recorded())),
    ):
        try:
            named = records.decode(folder.read(path), folder.shown).get("plan")
        except Damaged:  # or missing
            continue
        if named != plan.digest:
            problem = (
                f"Cannot go on with {folder.shown}: its plan.json is damaged or lost"
            )
            reason = (
                f"{path.relative_to(folder.path)} is of plan {str(named)[:12]}, and"
                f" {plan.digest[:12]} is asked for"
            )
            raise StoreError(
                problem, reason, "Ask for the same as before, or give another folder."
            )


def _restore_texts(folder: StoreFolder, fresh: Path) -> None:
    """Put the same files again in the place of those that were damaged or lost since."""
    final = folder.path / "plan"
    for path in sorted(fresh.iterdir()):
        try:
            same = filecmp.cmp(path, final / path.name, shallow=False)
        except OSError:
            same = False
        if not same:
            os.replace(path, final / path.name)
    to_disk(final)


def _write_texts(
    fresh: Path,
    plan: StorePlan | Callable[[], StorePlan],
    units: Iterable[Sequence[StoreSequence]],
    duplicates: Iterable[tuple[int, int]],
    strings: Mapping[int, str],
    every: int,
) -> StorePlan:
    """Write the files of plan/, and the plan with their hashes."""
    order = _Order()
    digests = []
    for number, sequences in enumerate(units):
        for sequence in sequences:
            order.check(sequence)
        sha256 = _write_lines(
            fresh / f"{unit_name(number)}.jsonl",
            (sequence.to_json() for sequence in sequences),
        )
        tokens = sum(len(sequence.ids) for sequence in sequences)
        text_bytes = sum(len(sequence.string_bytes) for sequence in sequences)
        kept = (
            None
            if every == 1
            else sum(len(sequence.kept(every)) for sequence in sequences)
        )
        digests.append(
            UnitDigest(
                unit_name(number), len(sequences), tokens, text_bytes, sha256, kept
            )
        )
        if not sequences:
            raise StoreError(
                "Cannot plan a store",
                f"unit {unit_name(number)} has no texts",
                "Leave it out.",
            )
    if not digests:
        raise StoreError(
            "Cannot plan a store", "there are no texts", "Give a corpus with texts."
        )
    known = plan() if callable(plan) else plan
    if known.every != every:
        raise StoreError(
            "Cannot plan a store",
            f"every is {every}, and {known.every} in the plan",
            "Give the same.",
        )
    copies = sorted(duplicates)
    order.check_copies(copies)
    copied = _write_lines(
        fresh / "duplicates.jsonl",
        ({"text": text, "same_as": same} for text, same in copies),
    )
    reads = _write_lines(
        fresh / "strings.jsonl",
        ([number, strings[number]] for number in sorted(strings)),
    )
    to_disk(fresh)
    filled = known.filled(digests, copied, reads)
    # Tuples become lists, as they are when read.
    return StorePlan.decode(filled.encode(), "Cannot plan a store")


def _write_lines(path: Path, values: Iterable[Any]) -> str:
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for value in values:
            line = records.plain_json(value) + b"\n"
            digest.update(line)
            file.write(line)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


class _Order:
    """Checks that sequences come in the order of the corpus, and that no text is left
    out.
    """

    def __init__(self) -> None:
        self.last, self.missing = (-1, 0), set[int]()

    def check(self, sequence: StoreSequence) -> None:
        problem = f"Cannot plan a store: text {sequence.text}"
        if not sequence.ids or len(sequence.spans) != len(sequence.ids):
            reason = (
                f"it has {len(sequence.ids)} tokens and {len(sequence.spans)} spans"
            )
            raise StoreError(
                problem, reason, "Give at least one token, and one span for each."
            )
        if (sequence.text, sequence.start) <= self.last or sequence.start < 0:
            reason = (
                f"its sequence at {sequence.start} comes after text {self.last[0]} at"
                f" {self.last[1]}"
            )
            raise StoreError(
                problem, reason, "Give sequences in the order of the corpus."
            )
        self.missing.update(range(self.last[0] + 1, sequence.text))
        self.last = sequence.text, sequence.start

    def check_copies(self, copies: Sequence[tuple[int, int]]) -> None:
        problem = "Cannot plan a store: its duplicates"
        texts = {text for text, _ in copies}
        last = max([self.last[0], *texts])
        self.missing.update(range(self.last[0] + 1, last + 1))
        if texts != self.missing or len(texts) != len(copies):
            wrong = min(texts ^ self.missing, default=None)
            reason = (
                f"text {wrong} has sequences and is a duplicate, or has neither"
                if wrong is not None
                else "one is twice"
            )
            raise StoreError(
                problem,
                reason,
                "Give sequences, or an earlier text that it is a copy of.",
            )
        for text, same in copies:
            if same in texts or not 0 <= same < text:
                raise StoreError(
                    problem,
                    f"text {text} is said to be text {same}",
                    "Name an earlier text with sequences.",
                )


@contextmanager
def _explained(folder: StoreFolder) -> Iterator[None]:
    """Say what the system refused, such as a full disk or a folder that may not be
    written.
    """
    try:
        yield
    except OSError as error:
        if isinstance(error, FileError):
            raise
        reason, remedy = (
            error.strerror or str(error),
            "Make room, or choose a folder that can be written; then go on.",
        )
        raise FileError(f"Cannot write {folder.shown}", reason, remedy) from error
