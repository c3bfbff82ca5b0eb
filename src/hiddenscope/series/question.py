"""What every member of a series is asked: an analysis, its options and its texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeAlias, cast, get_args

from hiddenscope.analyses.compare import compare
from hiddenscope.analyses.drift import drift
from hiddenscope.analyses.lens import lens
from hiddenscope.analyses.probe import probe
from hiddenscope.analyses.profile import profile
from hiddenscope.analyses.project import project
from hiddenscope.arguments import shown
from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import ArgumentError, TextError
from hiddenscope.model import Model
from hiddenscope.passes import Inputs
from hiddenscope.results import Result
from hiddenscope.results.export import to_plain
from hiddenscope.series.identity import hash_of
from hiddenscope.series.moved import shifts
from hiddenscope.series.options import (
    LABELLED,
    PAIRED,
    AgainstMember,
    SeriesAnalysis,
    check_options,
)
from hiddenscope.states import Pair, States
from hiddenscope.texts import Labelled
from hiddenscope.texts.reader import as_list
from hiddenscope.vectors.dataset import dataset_of, without_labels

CapturedStates: TypeAlias = States | Pair

ASK: dict[str, Callable[..., Result]] = {
    "profile": profile,
    "lens": lens,
    "probe": probe,
    "project": project,
}
EVERY_SITE = "layer.*,final"


@dataclass(frozen=True)
class SeriesQuestion:
    """An analysis with its options and its texts, and the hash of all three."""

    analysis: SeriesAnalysis
    data: Any
    options: Mapping[str, Any]
    against: AgainstMember
    key: str
    directions: Dictionary | None = None

    @property
    def is_paired(self) -> bool:
        """Tell whether each member is compared with another one."""
        return self.analysis in PAIRED

    @property
    def texts(self) -> Any:
        """Return the texts without their labels."""
        if isinstance(self.data, Labelled):
            return list(self.data.texts)
        return self.data[0] if self.analysis in LABELLED else self.data

    def reference(self, place: int) -> int:
        """Return the place of the member that one is compared with.

        The first is compared with itself, which shows what rounding does.
        """
        if not self.is_paired or self.against == "first":
            return 0
        return max(0, place - 1)

    def capture(self, model: Model) -> CapturedStates:
        """Capture the states that members are compared by."""
        names = ("targets", "truncate")
        how = {name: self.options[name] for name in names if name in self.options}
        sites: Any = EVERY_SITE
        if self.analysis == "compare":
            sites = self.options.get("sites", EVERY_SITE)
        if self.directions is not None:
            several = [sites] if isinstance(sites, str) else sites
            sites = [*several, self.directions.writes]
        return model.capture(self.texts, sites, **how)

    def inputs(self, model: Model) -> Inputs:
        """Encode the texts as the analysis does."""
        targets = self.options.get("targets")
        truncate = self.options.get("truncate", False)
        return model.encode(self.texts, targets=targets, truncate=truncate)

    def ask(self, model: Model) -> Result:
        """Run an analysis that needs one model."""
        return ASK[self.analysis](model, self.data, **self.options)

    def ask_beside(
        self, model: Model, states: CapturedStates, reference: CapturedStates
    ) -> Result:
        """Compare a model, whose states were captured, with those of another."""
        sites = self.options.get("sites", EVERY_SITE)
        if self.analysis == "compare":
            result = compare(states, reference, sites=sites)
            if self.directions is not None:
                result.data.update(shifts(states, reference, self.directions))
            return result
        saved: Any = reference
        return drift(saved, model, self.texts, sites=sites)


def question_of(
    analysis: str, data: Any, options: Mapping[str, Any], against: str
) -> SeriesQuestion:
    """Check what is asked of the members, and read the texts once for all of them."""
    options = dict(options)
    directions = options.get("directions") if analysis == "compare" else None
    if isinstance(directions, Direction):
        directions = [directions]
    if isinstance(directions, list) and all(
        isinstance(item, Direction) for item in directions
    ):
        directions = Dictionary.of(directions)
    if isinstance(directions, Dictionary):
        vectors = directions.directions.double().cpu().numpy()
        digest = sha256(vectors.tobytes()).hexdigest()
        options["directions"] = f"{directions!r} sha256:{digest}"
    elif directions is not None:
        reason = f"directions are {shown(directions)}"
        remedy = "Give hs.Direction, a list of them, or hs.Dictionary.of([...])."
        raise ArgumentError("Cannot follow these directions", reason, remedy)
    check_options(analysis, options)
    if against not in get_args(AgainstMember):
        raise ArgumentError(
            f"Cannot compare with {shown(against)}",
            "a member is compared with the 'first' or with the 'previous' one",
            "Choose one of the two.",
        )
    read = _labelled if analysis in LABELLED else _texts
    texts = read(data, f"Cannot run a series of {analysis}")
    content: Any = texts
    if isinstance(texts, Labelled):
        content = [texts.texts, texts.labels, texts.name, texts.groups]
    plain = to_plain([content, options], "the texts or options of a series")
    # Only a comparison depends on what is compared with.
    key = hash_of([analysis, plain, against if analysis in PAIRED else ""])
    return SeriesQuestion(
        cast(SeriesAnalysis, analysis),
        texts,
        options,
        cast(AgainstMember, against),
        key,
        directions,
    )


def _texts(data: Any, problem: str) -> Any:
    if data is None:
        raise TextError(problem, "there are no texts", "Give some.")
    if isinstance(data, str):
        return data
    listed = data.tolist() if hasattr(data, "tolist") else data
    is_other = isinstance(data, Inputs | Mapping | States | Pair | bytes)
    if is_other or not isinstance(listed, Iterable):
        raise TextError(
            problem,
            f"got {type(data).__name__}, and every member encodes the texts itself",
            "Give texts, or lists of ids.",
        )
    # What can be read once must serve all members.
    listed = as_list(listed)
    if not listed:
        raise TextError(problem, "the list of texts is empty", "Give some.")
    return listed


def _labelled(data: Any, problem: str) -> Any:
    """Read labelled texts once, as every member takes them."""
    if data is None:
        raise TextError(
            problem,
            "there are no labelled texts",
            "Give a dataset: a shipped name, a path, or (texts, labels).",
        )
    if isinstance(data, Mapping):
        raise TextError(
            problem,
            "several datasets were given",
            "Give one, and run a series for each.",
        )
    dataset = dataset_of(data)
    texts = _texts(dataset.texts, problem)
    if dataset.labels is None:
        raise without_labels(dataset, problem)
    if all(isinstance(text, str) for text in texts):
        labels = tuple(dataset.labels)
        return Labelled(tuple(texts), labels, dataset.name, dataset.groups)
    return (texts, list(dataset.labels))
