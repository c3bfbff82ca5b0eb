"""Requests and answers of the API.

The request of an analysis is built from the description of its parameters
(`analyses/<word>/parameters.py`). Parameters that only a program can give, such as
callbacks and paths, are left out: nothing that comes from a page names a path.

Some questions only the page asks. `grid`: the norms of a text while it is typed.
`reads`: which tokens one token reads in each layer. `answers`: two tokens that tell two
texts apart. `state`: all about one state, before and after a change. `continuation`:
what the model writes after the text, before and after that change. `store`, `kept` and
`nearest`: of states that were kept before, the texts nearest to a query, the norms of
one text, and the states nearest to one of it; the last two need no model. `fit`: a
dictionary of features, trained on kept states.

An analysis that reads states is asked of a model, or of kept states: then the request
has a `store` in place of a `model`.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal, TypeAlias, Union

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)

from hiddenscope.catalog import ANALYSES, Analysis
from hiddenscope.interface import Kind, Parameter, describe
from hiddenscope.states.pooling import NAMES, SCORE_POOLINGS

MOST_CHARACTERS = 20_000
MOST_TEXTS = 2_000
# A Hugging Face id has one slash at most; a path is never taken.
PART = r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,95}"
MODEL_NAME = rf"^(?:folder:[0-9a-f]{{16}}|{PART}(?:/{PART})?)$"
DATA_NAME = r"^(?:upload:[0-9a-f]{16}|[A-Za-z0-9_][A-Za-z0-9_\-]{0,95})$"
STORE_NAME = r"^store:[0-9a-f]{16}$"
DICTIONARY = r"^dictionary:[0-9a-f]{16}$"
DICTIONARY_NAME = rf"^(?:neurons|pca|random)$|{DICTIONARY}"
SITES = r"^[A-Za-z0-9_.*,\[\]\- ]{1,200}$"
MOST_NEW_TOKENS = 60


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode.

    Half a surrogate pair, which JSON or a tokenizer may leave, is replaced.

    >>> encodable("half a pair: " + chr(0xD83D))
    'half a pair: ?'
    """
    return text.encode("utf-8", "replace").decode("utf-8")


OneText: TypeAlias = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS)]
SomeTexts: TypeAlias = (
    OneText | Annotated[list[OneText], Field(min_length=1, max_length=MOST_TEXTS)]
)
SitesName: TypeAlias = Annotated[str, Field(pattern=SITES)]
SiteName: TypeAlias = Annotated[str, Field(pattern=r"^[a-z0-9.]{1,40}$")]
TokenNumber: TypeAlias = Annotated[int, Field(ge=0, le=MOST_CHARACTERS)]
HitCount: TypeAlias = Annotated[int, Field(ge=1, le=100)]
Word: TypeAlias = Annotated[str, Field(min_length=1, max_length=200)]
Number: TypeAlias = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
Integer: TypeAlias = Annotated[int, Field(ge=-1_000_000, le=1_000_000)]
POOLING_NAMES = (*NAMES, *SCORE_POOLINGS)
PoolingChoice: TypeAlias = Literal[POOLING_NAMES] | Integer  # type: ignore[valid-type]
StoreName: TypeAlias = Annotated[str, Field(pattern=STORE_NAME)]
TextNumber: TypeAlias = Annotated[int, Field(ge=0, le=10**12)]
Encodable: TypeAlias = Annotated[str, AfterValidator(encodable)]
JobState: TypeAlias = Literal["queued", "running", "done", "failed", "cancelled"]


class Strict(BaseModel):
    """A request: nothing unknown in it, and nothing of another type."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ModelChoice(Strict):
    """A model: a name of the zoo, a Hugging Face id, or a folder that `GET /api/models`
    listed; and its dtype.
    """

    name: Annotated[str, Field(pattern=MODEL_NAME, max_length=200)]
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


class GridArguments(Strict):
    """The norm of every state of a text, by one pass."""

    text: OneText


class ReadsArguments(Strict):
    """Which tokens one token of a text reads in each layer; by default the last one."""

    text: OneText
    token: TokenNumber | None = None


class ChangeChoice(Strict):
    """What is done to a state: taken away, replaced by that of another text, or moved
    along a direction. A feature of the dictionary is added, or what of the state lies
    along it is scaled: 0 takes it out.

    `token` is the token of the other text; without it, the one at the same position.
    """

    kind: Literal["ablate", "replace", "steer", "add", "scale"]
    text: OneText | None = None
    token: TokenNumber | None = None
    toward: OneText | None = None
    away: OneText | None = None
    feature: Annotated[int, Field(ge=0, le=10**9)] | None = None
    strength: Number = 1.0


class AnswersArguments(Strict):
    """Two answers that tell two texts apart: the token that the model finds likeliest
    after each.
    """

    a: OneText
    b: OneText


class StateArguments(Strict):
    """One state of a text, and what the model predicts after the text, before and after
    a change of the state; with a dictionary of its site, the strongest features.
    """

    text: OneText
    site: SiteName
    token: TokenNumber
    dictionary: Annotated[str, Field(pattern=DICTIONARY)] | None = None
    change: ChangeChoice | None = None

    @model_validator(mode="after")
    def check_feature(self) -> "StateArguments":
        """Refuse to add or scale a feature without its number or a dictionary."""
        change = self.change
        if change is None or change.kind not in ("add", "scale"):
            return self
        if change.feature is None or self.dictionary is None:
            reason = "a change of a feature needs its number, in a dictionary"
            raise ValueError(reason)
        return self


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
    k: HitCount = 10


class KeptArguments(Strict):
    """The norm of every state of one text, in states that were kept before."""

    store: StoreName
    text: TextNumber


class NearestArguments(Strict):
    """The nearest states to one of a text, among all kept states of its site."""

    store: StoreName
    text: TextNumber
    site: SiteName
    token: Annotated[int, Field(ge=0, le=10_000_000)]
    k: HitCount = 10


class FitArguments(Strict):
    """Train a dictionary on states that were kept before, and keep it below the root in
    a new folder of this name. What takes hours belongs on the command line.
    """

    to: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_\-]{0,63}$")]
    site: SiteName
    features: Annotated[int, Field(ge=1, le=16_384)] = 1_024
    k: HitCount = 32
    tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1_000_000


TYPES: dict[Kind, Any] = {
    "text": OneText,
    "texts": SomeTexts,
    "pairs": SomeTexts,
    "model": ModelChoice,
    "data": Annotated[str, Field(pattern=DATA_NAME)],
    "dictionary": Annotated[str, Field(pattern=DICTIONARY_NAME)],
    "sites": SitesName,
    "integer": Integer,
    "flag": bool,
    "word": Word,
    "pooling": PoolingChoice,
}
Numbers: TypeAlias = (
    Number | Annotated[list[Number], Field(min_length=1, max_length=50)]
)


def form_parameters(analysis: Analysis) -> tuple[Parameter, ...]:
    """Return the parameters that a page may give an analysis, besides its model.

    >>> from hiddenscope.catalog import ANALYSIS
    >>> [(one.name, one.kind) for one in form_parameters(ANALYSIS["patch"])][:3]
    [('contrasts', 'contrast'), ('sites', 'sites'), ('into', 'choice')]
    """
    parameters = describe(analysis.word).parameters
    return tuple(parameter for parameter in parameters if parameter.in_form)


def _fields(parameters: Iterable[Parameter]) -> dict[str, Any]:
    """Return parameters as pydantic takes the fields of a model."""
    fields: dict[str, Any] = {}
    for parameter in parameters:
        type_ = _type(parameter)
        if parameter.required:
            fields[parameter.name] = (type_, ...)
        else:
            fields[parameter.name] = (type_ | None, None)
    return fields


def _type(parameter: Parameter) -> Any:
    """Return what a request may hold for a parameter."""
    if parameter.fields:
        name = f"{parameter.kind.capitalize()}Choice"
        return create_model(
            name,
            __base__=Strict,
            __doc__=parameter.help,
            **_fields(parameter.fields),
        )
    if parameter.kind == "choice":
        return Literal[parameter.choices]
    if parameter.kind == "numbers":
        return Numbers | Literal[parameter.choices]
    return TYPES[parameter.kind]


class ModelOrStore(Strict):
    """A request to an analysis of states that a model computes, or that were kept."""

    model: ModelChoice | None = None
    store: StoreName | None = None

    @model_validator(mode="after")
    def check_source(self) -> "ModelOrStore":
        """Refuse a request with neither of the two, or with both."""
        if (self.model is None) == (self.store is None):
            raise ValueError("give either a model or a store")
        return self


class OfStore(Strict):
    """A request to what kept states alone answer."""

    store: StoreName


class OfModel(Strict):
    """A request to what a model computes."""

    model: ModelChoice


def _request(
    word: str, arguments: type[BaseModel], source: type[Strict] = OfModel
) -> type[BaseModel]:
    """Return the request of a question about a model, kept states, or either."""
    fields: dict[str, Any] = {
        "analysis": (Literal[word], ...),
        "arguments": (arguments, ...),
    }
    return create_model(
        f"{word.capitalize()}Request",
        __base__=source,
        __doc__=arguments.__doc__,
        **fields,
    )


def _analysis_request(analysis: Analysis) -> type[BaseModel]:
    arguments = create_model(
        f"{analysis.word.capitalize()}Arguments",
        __base__=Strict,
        __doc__=analysis.question,
        **_fields(form_parameters(analysis)),
    )
    source = ModelOrStore if describe(analysis.word).states else OfModel
    return _request(analysis.word, arguments, source)


ASKED = tuple(analysis for analysis in ANALYSES if analysis.in_app)
"""The analyses that the API answers."""

REQUESTS = {
    **{analysis.word: _analysis_request(analysis) for analysis in ASKED},
    "grid": _request("grid", GridArguments),
    "reads": _request("reads", ReadsArguments),
    "answers": _request("answers", AnswersArguments),
    "state": _request("state", StateArguments),
    "continuation": _request("continuation", ContinuationArguments),
    "store": _request("store", StoreArguments),
    "kept": _request("kept", KeptArguments, Strict),
    "nearest": _request("nearest", NearestArguments, Strict),
    "fit": _request("fit", FitArguments, OfStore),
}
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
    state: JobState
    waiting: int = Field(description="How many jobs are before it.")
    progress: Progress | None = None
    partial: int = Field(
        0,
        description=(
            "How many partial results there were; the last is at /api/jobs/ID/partial"
            " while the job runs."
        ),
    )
    result: str | None = None
    error: str | None = None
    note: str = ""


class ViewAnswer(BaseModel):
    """A view of a result: its name, by which it is saved, its title, and whether it is
    a grid, panels, lines, patterns or a graph.
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

    before: Encodable
    after: Encodable | None = None


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
    string: Encodable
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
    """A parameter of an analysis, as a form asks for it."""

    name: str
    kind: Kind
    required: bool
    default: str | int | float | bool | None = None
    choices: list[str]
    empty_choice: str = Field(description="How a list shows that none is chosen.")
    help: str
    label: str
    aside: bool = Field(description="Whether it belongs below the other fields.")
    fields: list["QuestionAnswer"]
    of_states: bool = Field(
        default=True, description="Whether it can be given when kept states are asked."
    )


class AnalysisAnswer(BaseModel):
    """An analysis: its word, its question, and its parameters beside the model."""

    word: str
    question: str
    group: str
    on_states: bool = Field(
        description="Whether kept states can be asked in place of a model."
    )
    action: str = Field(description="What it does, for a menu.")
    promise: str = Field(description="What its answer will show, where that is said.")
    parameters: list[QuestionAnswer]


class ModelAnswer(BaseModel):
    """A model that can be had: from the zoo, from the local cache of the hub, or from a
    folder below the root.
    """

    name: str
    label: str
    source: Literal["zoo", "hub", "folder"]
    here: bool = Field(description="Whether it is on this machine already.")
    headless: bool = Field(
        False, description="Whether its config says that it predicts no tokens."
    )


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
    parameters: list[QuestionAnswer] = Field(
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


class DictionaryAnswer(BaseModel):
    """A dictionary of features below the root."""

    name: str
    label: str


class StoreAnswer(BaseModel):
    """States that were kept in a file or a store below the root."""

    name: str
    label: str
    bytes: int
    sites: list[str]
    tokens: int
    texts: int
    model: Encodable
    dtype: str
    width: int
    complete: bool = Field(description="Whether all units of the store are committed.")


class StoreText(BaseModel):
    """One text of kept states: its number, how it begins, whether it goes on, and how
    many rows it has.
    """

    number: int
    text: Encodable
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
    """List every analysis, with its question and its parameters."""
    answers = []
    for analysis in ASKED:
        description = describe(analysis.word)
        answer = AnalysisAnswer(
            word=analysis.word,
            question=analysis.question,
            group=analysis.group,
            on_states=description.states,
            action=description.action or analysis.word.capitalize(),
            promise=description.promise,
            parameters=[form_field(part) for part in form_parameters(analysis)],
        )
        answers.append(answer)
    return answers


def form_field(parameter: Parameter) -> QuestionAnswer:
    """Return a parameter as a form asks for it."""
    default = parameter.default
    if isinstance(default, tuple):
        # A field shows one default; a list of numbers has an example in its place.
        default = None
    label = parameter.label or parameter.name.replace("_", " ").capitalize()
    fields = parameter.fields
    # A form asks only for what a value needs; a value that needs nothing has options.
    if any(field.required for field in fields):
        fields = tuple(field for field in fields if field.required)
    return QuestionAnswer(
        name=parameter.name,
        kind=parameter.kind,
        required=bool(parameter.required),
        default=default,
        choices=list(parameter.choices),
        empty_choice=parameter.empty_choice,
        help=parameter.help if parameter.form_help is None else parameter.form_help,
        label=label,
        aside=parameter.aside and not parameter.required,
        fields=list(map(form_field, fields)),
        of_states=not parameter.of_model,
    )
