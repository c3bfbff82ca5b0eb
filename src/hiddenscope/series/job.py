"""Ask every member, with one model in memory at a time, and keep their results.

A member has two files in a folder: its result, as `Result.save` writes it, and a record
with its key. The record is written last: without it the result does not count, so that
a job which is killed at any instant loses at most the member that it was computing. The
key hashes the weights, the analysis, its options, the texts and the versions of
libraries: whatever is different has another key, and is computed.
"""

from __future__ import annotations

import gc
import json
import platform
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.errors import Error, TextError
from hiddenscope.files import (
    UNSEALED,
    PathLike,
    check_seal,
    explained,
    printable,
    replacing,
    seal,
)
from hiddenscope.model import Model, load
from hiddenscope.model.model import LIBRARIES
from hiddenscope.results import Result
from hiddenscope.series.identity import MemberIdentity, hash_of, identify
from hiddenscope.series.member import Member
from hiddenscope.series.question import CapturedStates, SeriesQuestion
from hiddenscope.versions import installed_version

FORMAT = 1
LONGEST_NAME = 60
DIGITS = 16


@dataclass(frozen=True)
class MemberRecord:
    """What was seen of a member while it was loaded.

    `source` is that of its states, and `depths` and `widths` have one number for each
    stack. `tokens` is how many tokens it made of the texts, and `ids` their hash.
    """

    source: dict[str, Any]
    depths: dict[str, int]
    widths: dict[str, int]
    tokens: int
    ids: str


@dataclass(frozen=True)
class Answered:
    """A member with its identity, its result and its record.

    `computed_as` is the place of the member whose result it shares: its own, unless an
    earlier one is the same model.
    """

    member: Member
    identity: MemberIdentity
    computed_as: int
    result: Result
    record: MemberRecord


class ResultsFolder:
    """The folder of a job, which is made if it is not there."""

    def __init__(self, path: PathLike) -> None:
        self.path = Path(path)
        problem = f"Cannot keep results in {printable(self.path)}"
        with explained(problem, "Give a folder, or a path where one can be made."):
            self.path.mkdir(parents=True, exist_ok=True)

    def read(self, name: str, key: str) -> tuple[Result, MemberRecord] | None:
        """Return the result of a member if it was kept, and None if not."""
        record_path, result_path = self._paths(name, key)
        if not record_path.is_file():
            return None
        try:
            check_seal(record_path, f"Cannot read {record_path.name}")
            content = json.loads(record_path.read_text("utf-8"))
            if content["key"] != key or content["format"] != FORMAT:
                return None
            record = MemberRecord(**content["record"])
            return Result.load(result_path), record
        except (Error, OSError, ValueError, KeyError, TypeError) as error:
            progress.note(f"{record_path.name}: computed again ({error})")
            return None

    def write(self, name: str, key: str, result: Result, record: MemberRecord) -> None:
        """Keep the result of a member first, then its record."""
        record_path, result_path = self._paths(name, key)
        result.save(result_path)
        content = {
            "format": FORMAT,
            "key": key,
            "member": name,
            "result": result_path.name,
            "record": asdict(record),
            "seal": UNSEALED,
        }
        with replacing(record_path) as fresh:
            fresh.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            seal(fresh)

    def _paths(self, name: str, key: str) -> tuple[Path, Path]:
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:LONGEST_NAME]
        stem = f"{safe or 'member'}-{key[:DIGITS]}"
        return self.path / f"{stem}.member.json", self.path / f"{stem}.nc"


def identify_members(members: Sequence[Member]) -> list[MemberIdentity]:
    """Hash the weights of all members, before anything is computed."""
    identities = []
    for place, member in enumerate(members):
        with _naming(members, place):
            identities.append(identify(member))
    return identities


@dataclass(frozen=True)
class HeldStates:
    """The states of a member that others are compared with, without its weights."""

    place: int
    states: CapturedStates
    record: MemberRecord


@dataclass
class SeriesJob:
    """One run through the members of a series.

    The states of one member at most are held: of the first, or of the one before.
    """

    members: Sequence[Member]
    identities: Sequence[MemberIdentity]
    question: SeriesQuestion
    folder: ResultsFolder | None
    _held: HeldStates | None = None

    def run(self) -> list[Answered]:
        """Ask every member, or read what was kept of an earlier job."""
        answered: list[Answered] = []
        place_of: dict[str, int] = {}
        with progress.track("Members", total=len(self.members)) as advance:
            for place, member in enumerate(self.members):
                identity = self.identities[place]
                key = self._key(place)
                computed_as = place_of.setdefault(key, place)
                if computed_as < place:
                    same = answered[computed_as]
                    result, record = same.result, same.record
                else:
                    with _naming(self.members, place, self.folder):
                        result, record = self._answer(place, key)
                answered.append(Answered(member, identity, computed_as, result, record))
                advance(1)
        return answered

    def _key(self, place: int) -> str:
        """Return what tells an answer from any other.

        The machine and the versions of libraries decide numbers too.
        """
        environment = [platform.machine()]
        if torch.cuda.is_available():
            environment.append(torch.cuda.get_device_name())
        for name in LIBRARIES:
            environment.append(f"{name} {installed_version(name)}")
        parts: list[Any] = [environment, self.question.key, self.identities[place].key]
        if self.question.is_paired:
            reference = self.question.reference(place)
            parts.append(self.identities[reference].key)
        return hash_of(parts)

    def _answer(self, place: int, key: str) -> tuple[Result, MemberRecord]:
        """Read the result of a member if it was kept; otherwise ask, and keep it."""
        name, folder = self.members[place].name, self.folder
        answer = folder.read(name, key) if folder is not None else None
        if answer is not None:
            return answer
        answer = self._ask(place)
        _let_go(self.members[place])
        self.identities[place].require_unchanged()
        if folder is not None:
            folder.write(name, key, *answer)
        return answer

    def _ask(self, place: int) -> tuple[Result, MemberRecord]:
        """Load a member and ask it; its model is let go when this returns."""
        question = self.question
        reference = question.reference(place)
        other = None
        if question.is_paired and reference != place:
            other = self._hold(reference)
        model = _load(self.members[place])
        record = self._record(model)
        if not question.is_paired:
            return question.ask(model), record
        here = HeldStates(place, question.capture(model), record)
        other = other or here
        if other.record.ids != record.ids:
            raise TextError(
                "Cannot compare these members token by token",
                f"its tokenizer makes {record.tokens} tokens of the texts, and that of"
                f" {self.members[reference].name} {other.record.tokens}, or other ones",
                "Leave it out, or run a series of profile, lens, probe or project.",
            )
        result = question.ask_beside(model, here.states, other.states)
        # The next member may be compared with this one.
        if question.reference(place + 1) == place:
            self._held = here
        return result, record

    def _hold(self, place: int) -> HeldStates:
        """Hold the states of a member; it is loaded again if they were let go."""
        if self._held is None or self._held.place != place:
            self._held = None
            model = _load(self.members[place])
            states = self.question.capture(model)
            self._held = HeldStates(place, states, self._record(model))
            del model
            _let_go(self.members[place])
        return self._held

    def _record(self, model: Model) -> MemberRecord:
        inputs = self.question.inputs(model)
        ids = list(inputs.ids)
        if inputs.targets is not None:
            ids += inputs.targets.ids
        stacks = model.anatomy.stacks
        return MemberRecord(
            source=model.source().to_json(),
            depths={stack.name: stack.depth for stack in stacks},
            widths={stack.name: stack.proof.width for stack in stacks},
            tokens=sum(map(len, ids)),
            ids=hash_of(ids),
        )


def _load(member: Member) -> Model:
    if isinstance(member.source, Model):
        return member.source
    with progress.status(f"Loading {member.name}"):
        return load(
            member.source,
            dtype=member.dtype,
            device=member.device,
            revision=member.revision,
        )


def _let_go(member: Member) -> None:
    """Free the memory of a member that was loaded here, before another is loaded."""
    if isinstance(member.source, Model):
        return
    # A model and its parts refer to each other, so that counting references does not
    # free them.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _naming(
    members: Sequence[Member], place: int, folder: ResultsFolder | None = None
) -> Iterator[None]:
    """Say in an error which member it is about, and that the others are kept."""
    name = members[place].name
    where = f"Member {place + 1} of {len(members)}, {name}"
    try:
        yield
    except Error as error:
        remedy = error.remedy
        if folder is not None and place:
            remedy += f" The results of the members before it are in {folder.path}."
        raise type(error)(f"{where}: {error.problem}", error.reason, remedy) from error
    except Exception as error:
        error.add_note(where)
        raise
