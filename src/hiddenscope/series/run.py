"""Ask every member, with one model in memory at a time."""

from __future__ import annotations

import gc
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from hiddenscope import progress
from hiddenscope.errors import Error, TextError
from hiddenscope.model import Model, load
from hiddenscope.model.model import LIBRARIES
from hiddenscope.series.folder import MemberAnswer, MemberRecord, ResultsFolder
from hiddenscope.series.identity import MemberIdentity, hash_of, identify
from hiddenscope.series.member import Member
from hiddenscope.series.question import CapturedStates, SeriesQuestion
from hiddenscope.versions import installed_version

T = TypeVar("T")


@dataclass(frozen=True)
class Answered:
    """A member with its identity and its answer.

    `computed_as` is the place of the member whose answer it shares: its own, unless an
    earlier one is the same model.
    """

    member: Member
    identity: MemberIdentity
    answer: MemberAnswer
    computed_as: int


def identify_members(members: Sequence[Member]) -> list[MemberIdentity]:
    """Hash the weights of all members, before anything is computed."""
    identities = []
    for place, member in enumerate(members):
        with _naming(members, place):
            identities.append(identify(member))
    return identities


class SeriesJob:
    """One run through the members of a series.

    Of the members that others are compared with, the states are held and not the
    weights.
    """

    def __init__(
        self,
        members: Sequence[Member],
        identities: Sequence[MemberIdentity],
        question: SeriesQuestion,
        folder: ResultsFolder | None,
    ) -> None:
        self.members = members
        self.identities = identities
        self.question = question
        self.folder = folder
        # The states of one member at most: the first, or the one before.
        self._held: tuple[int, CapturedStates, MemberRecord] | None = None

    def run(self) -> list[Answered]:
        """Ask every member, or read what was kept of an earlier job."""
        answered: list[Answered] = []
        place_of: dict[str, int] = {}
        with progress.track("Members", total=len(self.members)) as advance:
            for place, member in enumerate(self.members):
                key = self._key(place)
                computed_as = place_of.setdefault(key, place)
                if computed_as < place:
                    answer = answered[computed_as].answer
                else:
                    with _naming(self.members, place, self.folder):
                        answer = self._answer(place, key)
                identity = self.identities[place]
                answered.append(Answered(member, identity, answer, computed_as))
                advance(1)
        return answered

    def _key(self, place: int) -> str:
        """Return what tells an answer from any other."""
        parts = [_environment(), self.question.key, self.identities[place].key]
        if self.question.is_paired:
            reference = self.question.reference(place)
            parts.append(self.identities[reference].key)
        return hash_of(parts)

    def _answer(self, place: int, key: str) -> MemberAnswer:
        name = self.members[place].name
        answer = None
        if self.folder is not None:
            answer = self.folder.read(name, key)
        if answer is not None:
            return answer
        if self.question.is_paired:
            answer = self._ask_beside(place)
        else:
            answer = _with_model(self.members[place], self._ask)
        self.identities[place].require_unchanged()
        if self.folder is not None:
            self.folder.write(name, key, answer)
        return answer

    def _ask(self, model: Model) -> MemberAnswer:
        record = self._record(model)
        return MemberAnswer(self.question.ask(model), record)

    def _ask_beside(self, place: int) -> MemberAnswer:
        reference = self.question.reference(place)
        if reference != place:
            self._hold(reference)

        def ask(model: Model) -> MemberAnswer:
            record = self._record(model)
            if reference != place:
                self._check_tokens(reference, record)
            states = self.question.capture(model)
            other = states
            if reference != place:
                assert self._held is not None
                other = self._held[1]
            result = self.question.ask_beside(model, states, other)
            is_next_reference = self.question.reference(place + 1) == place
            if is_next_reference:
                self._held = (place, states, record)
            return MemberAnswer(result, record)

        return _with_model(self.members[place], ask)

    def _hold(self, place: int) -> None:
        """Hold the states of a member; it is loaded again if they were let go."""
        if self._held is not None and self._held[0] == place:
            return
        self._held = None

        def capture(model: Model) -> tuple[CapturedStates, MemberRecord]:
            return self.question.capture(model), self._record(model)

        states, record = _with_model(self.members[place], capture)
        self._held = (place, states, record)

    def _check_tokens(self, reference: int, record: MemberRecord) -> None:
        """Refuse members that make other tokens of the texts."""
        assert self._held is not None
        other = self._held[2]
        if other.ids == record.ids:
            return
        raise TextError(
            "Cannot compare these members token by token",
            f"its tokenizer makes {record.tokens} tokens of the texts, and that of"
            f" {self.members[reference].name} {other.tokens}, or other ones",
            "Leave it out, or run a series of profile, lens, probe or project.",
        )

    def _record(self, model: Model) -> MemberRecord:
        inputs = self.question.inputs(model)
        ids = list(inputs.ids)
        if inputs.targets is not None:
            ids += inputs.targets.ids
        depths, widths = {}, {}
        for stack in model.anatomy.stacks:
            depths[stack.name] = stack.depth
            widths[stack.name] = stack.proof.width
        return MemberRecord(
            source=model.source().to_json(),
            depths=depths,
            widths=widths,
            tokens=sum(map(len, ids)),
            ids=hash_of(ids),
        )


def _with_model(member: Member, act: Callable[[Model], T]) -> T:
    """Load a member, use it, and let it go before anything else is loaded."""
    if isinstance(member.source, Model):
        return act(member.source)
    with progress.status(f"Loading {member.name}"):
        model = load(
            member.source,
            dtype=member.dtype,
            device=member.device,
            revision=member.revision,
        )
    try:
        return act(model)
    finally:
        del model
        release_memory()


def release_memory() -> None:
    """Free what nothing refers to any more.

    A model and its parts refer to each other, so that counting references does not.
    """
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


def _environment() -> list[str]:
    """Return what else decides numbers: the machine, and versions of libraries."""
    parts = [platform.machine()]
    if torch.cuda.is_available():
        parts.append(torch.cuda.get_device_name())
    for name in LIBRARIES:
        parts.append(f"{name} {installed_version(name)}")
    return parts
