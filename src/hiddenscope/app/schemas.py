"""Requests and answers of the API. A request of an analysis is generated from the
signature of its function.

The first parameter of an analysis is the model. Of the others, the type says what may
be given (texts, a second model, a dataset, a contrast, a direction, a number, one of a
few words). Parameters that only a program can give, such as callbacks and paths, are
left out: nothing that comes from a page names a path.

Some questions only the page asks. `grid`: the norms of a text while it is typed.
`answers`: two tokens that tell two texts apart. `state`: all about one state, before
and after a change. `continuation`: what the model writes after the text, before and
after that change. `store`, `kept` and `nearest`: of states that were kept before, the
texts nearest to a query, the norms of one text, and the states nearest to one of it;
the last two need no model.

Analyses that read states (`profile`, `project`, `probe`, `cluster`) are asked of a
model, or of kept states: then the request has a `store` in place of a `model`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias, Union

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from hiddenscope.catalog import ANALYSES, Analysis
from hiddenscope.interface.signatures import Parameter, parameters_of, words_of
from hiddenscope.states.pooling import NAMES as POOLING_NAMES
from hiddenscope.texts import names_a_file

MOST_CHARACTERS = 20_000
MOST_TEXTS = 2_000
MODEL_NAME = r"^(?:folder:[0-9a-f]{16}|[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}(?:/[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95})?)$"
DATA_NAME = r"^(?:upload:[0-9a-f]{16}|[A-Za-z0-9_][A-Za-z0-9_\-]{0,95})$"
STORE_NAME = r"^store:[0-9a-f]{16}$"
SITES = r"^[A-Za-z0-9_.*,\[\]\- ]{1,200}$"
ONLY_IN_PYTHON = {"Callable", "Mapping"}
# Parameters of texts that a model reads: kept states have been computed already.
OF_MODEL = {"texts", "targets", "truncate"}
MOST_NEW_TOKENS = 60
ON_STATES = ("profile", "project", "probe", "cluster")
"""The analyses that can be asked of kept states alone, in place of a model."""

Kind: TypeAlias = Literal[
    "text",
    "texts",
    "model",
    "data",
    "sites",
    "choice",
    "integer",
    "numbers",
    "flag",
    "word",
    "pooling",
    "contrast",
    "direction",
]
OneText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
SomeTexts: TypeAlias = (
    OneText | Annotated[list[OneText], Field(min_length=1, max_length=MOST_TEXTS)]
)
SitesName: TypeAlias = Annotated[str, Field(pattern=SITES)]
Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
Number: TypeAlias = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Integer: TypeAlias = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
Pooling: TypeAlias = Literal[POOLING_NAMES] | Integer  # type: ignore[valid-type]
StoreName: TypeAlias = Annotated[str, Field(pattern=STORE_NAME)]
TextNumber: TypeAlias = Annotated[int, Field(ge=0, le=10**12)]
Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]


class Strict(BaseModel):
    """A request: nothing unknown in it, and nothing of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ModelChoice(Strict):
    """A model: a name of the zoo, a Hugging Face id, or a folder that `GET /api/models`
    listed; and its dtype.
    """

    name: Annotated[str, Field(pattern=MODEL_NAME, max_length=200)]
    dtype: Dtype | None = None


class ContrastChoice(Strict):
    """Two prompts that differ in what matters, and the two answers that tell them
    apart.
    """

    clean: OneText
    corrupt: OneText
    answer: Word
    other: Word
    targets: OneText | None = None
    at: Integer | None = None


class DirectionChoice(Strict):
    """A direction between two sets of texts."""

    toward: SomeTexts
    away: SomeTexts
    sites: SitesName | None = None
    pool: Pooling | None = None
    upwards: bool | None = None
    spare_first: bool | None = None


class GridArguments(Strict):
    """The norm of every state of a text, by one pass."""

    text: OneText


class ChangeChoice(Strict):
    """What is done to a state: taken away, replaced by that of another text, or moved
    along a direction.

    `token` is the token of the other text; without it, the one at the same position.
    """

    kind: Literal["ablate", "replace", "steer"]
    text: OneText | None = None
    token: Annotated[int, Field(ge=0, le=MOST_CHARACTERS)] | None = None
    toward: OneText | None = None
    away: OneText | None = None
    strength: Number = 1.0


class AnswersArguments(Strict):
    """Two answers that tell two texts apart: the token that the model finds likeliest
    after each.
    """

    a: OneText
    b: OneText


class StateArguments(Strict):
    """One state of a text, and what the model predicts after the text, before and after
    a change of the state.
    """

    text: OneText
    site: Annotated[str, Field(pattern=r"^[a-z0-9.]{1,40}$")]
    token: Annotated[int, Field(ge=0, le=MOST_CHARACTERS)]
    change: ChangeChoice | None = None


class ContinuationArguments(StateArguments):
    """What the model writes after a text, before and after a change of one of its
    states.
    """

    new_tokens: Annotated[int, Field(ge=1, le=MOST_NEW_TOKENS)] = 12


class StoreArguments(Strict):
    """The nearest texts to a query, in states that were kept before."""

    store: StoreName
    query: OneText
    site: SitesName | None = None
    k: Annotated[int, Field(ge=1, le=100)] = 10


class KeptArguments(Strict):
    """The norm of every state of one text, in states that were kept before."""

    store: StoreName
    text: TextNumber


class NearestArguments(Strict):
    """The nearest states to one of a text, among all states of its site that were kept."""

    store: StoreName
    text: TextNumber
    site: Annotated[str, Field(pattern=r"^[a-z0-9.]{1,40}$")]
    token: Annotated[int, Field(ge=0, le=10_000_000)]
    k: Annotated[int, Field(ge=1, le=100)] = 10


KINDS: dict[Kind, Any] = {
    "text": OneText,
    "texts": SomeTexts,
    "model": ModelChoice,
    "data": Annotated[str, Field(pattern=DATA_NAME)],
    "sites": SitesName,
    "integer": Integer,
    "numbers": (
        Number
        | Annotated[list[Number], Field(min_length=1, max_length=50)]
        | Literal["ablate"]
    ),
    "flag": bool,
    "word": Word,
    "pooling": Pooling,
    "contrast": ContrastChoice,
    "direction": DirectionChoice,
}


CHOICES: dict[Kind, tuple[str, ...]] = {"pooling": POOLING_NAMES}


@dataclass(frozen=True)
class Question:
    """A parameter of an analysis, as a page asks for it."""

    name: str
    kind: Kind
    required: bool
    positional: bool
    default: Any = None
    choices: tuple[str, ...] = ()
    help: str = ""

    @property
    def type(self) -> Any:
        """What a request may hold for it."""
        return Literal[self.choices] if self.kind == "choice" else KINDS[self.kind]


def questions_of(analysis: Analysis) -> tuple[Question, ...]:
    """What can be asked of an analysis beside its model.

    >>> from hiddenscope.catalog import ANALYSIS
    >>> [(question.name, question.kind) for question in questions_of(ANALYSIS["patch"])][:3]
    [('contrasts', 'contrast'), ('sites', 'sites'), ('into', 'choice')]
    """
    _, *parameters = parameters_of(f"hiddenscope.{analysis.module}", analysis.word)
    return tuple(_questions(analysis, parameters))


def never_a_path(kind: Kind, value: Any) -> Any:
    """Texts of a request as an analysis takes them: some read a single string that
    names a file, but none in a list.

    >>> never_a_path("texts", "diary.txt"), never_a_path("texts", "A text.")
    (['diary.txt'], 'A text.')
    """
    return (
        [value]
        if kind == "texts" and isinstance(value, str) and names_a_file(value)
        else value
    )


def _questions(analysis: Analysis, parameters: list[Parameter]) -> Iterator[Question]:
    for parameter in parameters:
        words = tuple(words_of(parameter.type, f"hiddenscope.{analysis.module}"))
        kind = _kind(analysis, parameter, words)
        if kind is None:
            continue
        optional = any(
            isinstance(node, ast.Constant) and node.value is None
            for node in ast.walk(parameter.type)
        )
        help_ = (
            analysis.options[parameter.name].help
            if parameter.name in analysis.options
            else ""
        )
        yield Question(
            parameter.name,
            kind,
            parameter.required and not optional,
            parameter.positional,
            parameter.default,
            words if kind == "choice" else CHOICES.get(kind, ()),
            help_,
        )


def _kind(
    analysis: Analysis, parameter: Parameter, words: tuple[str, ...]
) -> Kind | None:
    """What a parameter takes; None where only a program can give it."""
    names, name = parameter.names, parameter.name
    if {"Texts", "Query", "Answers"} & names:
        return "text" if analysis.word == "compare" and name in ("a", "b") else "texts"
    if {"Model", "ModelLike"} & names:
        return "model"
    if ONLY_IN_PYTHON & names or "os" in names:  # os.PathLike
        return None
    named: dict[str, Kind] = {
        "data": "data",
        "sites": "sites",
        "site": "sites",
        "strengths": "numbers",
    }
    if name in named:
        return named[name]
    typed: dict[str, Kind] = {
        "Contrast": "contrast",
        "Direction": "direction",
        "bool": "flag",
        "Pooling": "pooling",
    }
    for type_, kind in typed.items():
        if type_ in names:
            return kind
    if words:
        return "choice"
    return "integer" if "int" in names and "str" not in names else "word"


def _arguments(analysis: Analysis) -> type[BaseModel]:
    fields: dict[str, Any] = {
        question.name: (
            (question.type, ...) if question.required else (question.type | None, None)
        )
        for question in questions_of(analysis)
    }
    name = f"{analysis.word.capitalize()}Arguments"
    return create_model(name, __base__=Strict, __doc__=analysis.question, **fields)


class ModelOrStore(Strict):
    """A request to an analysis that reads states: a model computes them, or they were
    kept before.
    """

    model: ModelChoice | None = None
    store: StoreName | None = None

    @model_validator(mode="after")
    def check_source(self) -> "ModelOrStore":
        """Refuse a request with neither of the two, or with both."""
        if (self.model is None) == (self.store is None):
            raise ValueError("give either a model or a store")
        return self


def _request(word: str, arguments: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {
        "analysis": (Literal[word], ...),
        "arguments": (arguments, ...),
    }
    base: type[BaseModel] = Strict
    if word in ON_STATES:
        base = ModelOrStore
    elif word not in WITHOUT_MODEL:
        fields["model"] = (ModelChoice, ...)
    return create_model(
        f"{word.capitalize()}Request",
        __base__=base,
        __doc__=arguments.__doc__,
        **fields,
    )


ASKED = tuple(analysis for analysis in ANALYSES if analysis.in_app)
"""The analyses that the API answers."""

OWN_ARGUMENTS: dict[str, type[BaseModel]] = {
    "grid": GridArguments,
    "answers": AnswersArguments,
    "state": StateArguments,
    "continuation": ContinuationArguments,
    "store": StoreArguments,
    "kept": KeptArguments,
    "nearest": NearestArguments,
}
WITHOUT_MODEL = {"kept", "nearest"}
REQUESTS = {
    analysis.word: _request(analysis.word, _arguments(analysis)) for analysis in ASKED
} | {word: _request(word, arguments) for word, arguments in OWN_ARGUMENTS.items()}
JobRequest: Any = Annotated[
    Union[tuple(REQUESTS.values())],  # noqa: UP007
    Field(discriminator="analysis"),
]


class Problem(BaseModel):
    """Why a request was refused: what was asked, what was found, what to do."""

    detail: str


class Progress(BaseModel):
    """What is being done, how much of it is done, and how much there is, where that is
    known.
    """

    what: str
    done: float
    total: float | None


class JobAnswer(BaseModel):
    """A job: queued, running, done, failed or cancelled. `result` is the id of its
    result once it is done.
    """

    id: str
    analysis: str
    state: Literal["queued", "running", "done", "failed", "cancelled"]
    waiting: int = Field(description="How many jobs are before it.")
    progress: Progress | None = None
    partial: int = Field(
        0,
        description=(
            "How many partial results there were; the last is at /api/jobs/ID/partial."
        ),
    )
    result: str | None = None
    error: str | None = None
    note: str = ""


class ViewAnswer(BaseModel):
    """A view of a result: its name, by which it is saved, its title, and whether it is
    a grid, panels or lines.
    """

    name: str
    title: str
    kind: str


class SectionAnswer(BaseModel):
    """A part of the story of a result: a title, prose, and the places of its views in
    the payload.
    """

    title: str
    prose: str
    views: list[int]


class ContinuationAnswer(BaseModel):
    """What the model writes after a text, as it is and after a change."""

    before: str
    after: str | None = None


class AnswersAnswer(BaseModel):
    """The likeliest token after text A, and another one after text B."""

    answer: str
    other: str


class NearestAnswer(BaseModel):
    """One of the nearest in kept states: the number of the text, its token where a
    state was asked for, and the score.

    `string` is the text, or the token.
    """

    text: int
    token: int | None
    string: str
    score: float


class ResultAnswer(BaseModel):
    """A result as a page shows it; the numbers are in its payload and its files."""

    id: str
    analysis: str
    model: ModelChoice | None
    title: str
    findings: list[str]
    views: list[ViewAnswer]
    sections: list[SectionAnswer]
    python: str | None
    command: str | None
    command_reason: str = Field(
        "", description="Why there is no command, where there is none."
    )
    state: dict[str, Any] | None = Field(None, description="What `state` answers.")
    continuation: ContinuationAnswer | None = Field(
        None, description="What `continuation` answers."
    )
    answers: AnswersAnswer | None = Field(None, description="What `answers` answers.")
    columns: list[int | None] = Field(
        [],
        description=(
            "The token of the first text in each column of the first grid; none given:"
            " one after another."
        ),
    )
    other_columns: list[int | None] = Field(
        [], description="The same for the second text, where there are two."
    )
    nearest: list[NearestAnswer] = Field(
        [], description="What `store` and `nearest` answer, best first."
    )


class QuestionAnswer(BaseModel):
    """A parameter of an analysis."""

    name: str
    kind: Kind
    required: bool
    default: str | int | float | bool | None = None
    choices: list[str]
    help: str
    of_states: bool = Field(
        default=True, description="Whether it can be given when kept states are asked."
    )


class AnalysisAnswer(BaseModel):
    """An analysis: its word, its question, and what can be asked of it beside its
    model.
    """

    word: str
    question: str
    group: str
    on_states: bool = Field(
        description="Whether kept states can be asked in place of a model."
    )
    parameters: list[QuestionAnswer]


class ModelAnswer(BaseModel):
    """A model that can be had: from the zoo, from the local cache of the hub, or from a
    folder below the root.
    """

    name: str
    label: str
    source: Literal["zoo", "hub", "folder"]
    here: bool = Field(description="Whether it is on this machine already.")


class ColumnChoice(BaseModel):
    """Which columns of a table hold the texts, the labels and the groups."""

    text: str | None = None
    label: str | None = None
    group: str | None = None


class TableAnswer(BaseModel):
    """The columns of a table that somebody wants to upload, its first rows, and which
    columns are likely meant.
    """

    file: str
    columns: list[str]
    rows: list[list[str]]
    likely: ColumnChoice
    certain: bool = Field(
        description="Whether the names of the columns say what they are."
    )
    parameters: list["QuestionAnswer"] = Field(
        description="What is chosen from the columns, as a form asks for it."
    )


class DatasetAnswer(BaseModel):
    """A dataset: shipped, or uploaded."""

    name: str
    label: str
    texts: int
    labels: dict[str, int]
    groups: int | None = Field(
        None,
        description="How many groups of texts there are; none where nobody named them.",
    )
    sample: list[str]
    columns: ColumnChoice | None = Field(
        None, description="The columns that were taken, of an uploaded table."
    )


class StoreAnswer(BaseModel):
    """States that were kept in a file or a store below the root."""

    name: str
    label: str
    bytes: int
    sites: list[str]
    tokens: int
    texts: int
    model: str
    dtype: str
    width: int
    complete: bool = Field(description="Whether all units of the store are committed.")


class StoreText(BaseModel):
    """One text of kept states: its number, how it begins, whether it goes on, and how
    many rows it has.
    """

    number: int
    text: str
    cut: bool
    tokens: int


class StoreTextsAnswer(BaseModel):
    """A page of the texts of kept states, in their order; `total` is how many there
    are.
    """

    total: int
    first: int
    texts: list[StoreText]


def analyses() -> list[AnalysisAnswer]:
    """Every analysis that the API answers."""
    return [
        AnalysisAnswer(
            word=analysis.word,
            question=analysis.question,
            group=analysis.group,
            on_states=analysis.word in ON_STATES,
            parameters=[
                QuestionAnswer(
                    name=one.name,
                    kind=one.kind,
                    required=one.required,
                    default=one.default,
                    choices=list(one.choices),
                    help=one.help,
                    of_states=one.name not in OF_MODEL,
                )
                for one in questions_of(analysis)
            ],
        )
        for analysis in ASKED
    ]
