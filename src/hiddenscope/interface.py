"""What can be asked: the signature of an analysis's function, annotated, declares it.

A parameter is `Annotated[type, ask("help")]`; its name, its default, whether it is
required and whether it has a place are read from the signature. The command, the
request, the form and the code that repeats a question are made of this, and nothing
else lists the parameters again. No torch is imported to read it: types that need torch
stand in quotation marks.

>>> @analysis(action="Repeat a text")
... def repeat(model: "ModelLike", text: Annotated[str, ask("The text.")], *,
...            times: Annotated[int, ask("How often.", spelling=("-n",))] = 2) -> str:
...     return text * times
>>> [(ask.name, ask.kind, ask.option) for ask in repeat.description.parameters]
[('text', 'word', '--text'), ('times', 'integer', '-n')]
>>> repeat(None, "ab", times=0)
Traceback (most recent call last):
hiddenscope.errors.StatesError: times must be an integer >= 1: got 0. Give a number such as 5.
"""  # noqa: E501

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from types import UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from hiddenscope.arguments import explaining, integer, shown
from hiddenscope.catalog import ANALYSIS, PUBLIC, STORIES
from hiddenscope.errors import ArgumentError, PassError
from hiddenscope.modules import autograd
from hiddenscope.states.pooling import CHOICES, NAMES, SCORE_POOLINGS

Kind: TypeAlias = Literal[
    "text",
    "texts",
    "model",
    "data",
    "sites",
    "pooling",
    "choice",
    "integer",
    "numbers",
    "flag",
    "word",
    "words",
    "path",
    "contrast",
    "pairs",
    "direction",
    "dictionary",
    "sampling",
]
"""What a parameter takes. `data` are labelled texts, `numbers` one number or several, a
`word` is any short string, and `words` are several. A `dictionary` is a path or a
word, and in a form one of those that the workbench lists. What else may be a name or a
path, such as a lens or a corpus, is a `word`: a `path` becomes a `pathlib.Path`.
`pairs` are a path of a file, and in a form JSON lines. A
`contrast`, a `direction` and a `sampling` have fields, which are parameters themselves.
"""

Default: TypeAlias = str | int | float | bool | tuple[float, ...] | None


@dataclass(frozen=True)
class Parameter:
    """One parameter of an analysis, or one field of it.

    A positional parameter is an argument of the command, and any other an option. With
    a `spelling` of its own, such as "-k", a positional one is an option too.

    Three attributes say where a parameter cannot be given:

    - `of_model`: not for stored states, which a model computed before.
    - `in_form`: False where a page must not give it, such as a path.
    - `python_only`: why the command has no option for it; empty where it has one.
    """

    name: str = ""
    kind: Kind = "word"
    help: str = ""
    default: Default = None
    required: bool | None = None
    positional: bool = False
    choices: tuple[str, ...] = ()
    # The smallest integer; None where any will do.
    least: int | None = 1
    fields: tuple["Parameter", ...] = ()
    # The public name that builds the value from the fields, and whether it takes the
    # model before them.
    constructor: str = ""
    takes_model: bool = False
    # The function has no default for it: where it is left out, None is passed.
    explicit: bool = False

    # On the command line.
    spelling: tuple[str, ...] = ()
    repeated: bool = False
    python_only: str = ""
    # Options that make the command use Python's default, if its own differs.
    python_default: tuple[str, ...] = ()
    # `--targets` and `--truncate` say how the texts are encoded, where the function
    # takes encoded texts in their place.
    encoded: bool = False
    # A file may hold states or vectors in place of texts.
    vectors: bool = False

    # In a form.
    label: str = ""
    # None: the same help as on the command line.
    form_help: str | None = None
    # How a list of choices shows that none is chosen; empty where one must be.
    empty_choice: str = "none"
    # Shown below the other fields, under "More options".
    aside: bool = False
    in_form: bool = True
    of_model: bool = False

    @property
    def option(self) -> str:
        """Return how the option is spelled.

        >>> Parameter("low_memory", "flag").option
        '--low-memory'
        """
        if self.spelling:
            return self.spelling[0]
        return f"--{self.name.replace('_', '-')}"

    @property
    def is_argument(self) -> bool:
        """Return whether the command takes it by its place."""
        return self.positional and not self.spelling


@dataclass(frozen=True)
class Need:
    """What an analysis needs of an `anatomy`, and what is said where it is missing."""

    is_met: Callable[[Any], bool]
    reason: str
    remedy: str

    def refusal(self, verb: str, name: str) -> PassError:
        """Return the error about a model that lacks this."""
        return PassError(f"Cannot {verb} {name}", self.reason, self.remedy)


HEAD = Need(
    lambda anatomy: anatomy.makes_logits,
    "it has no head, and makes no logits",
    "Give a language model; in Python, load it with task='causal-lm', 'masked-lm' or"
    " 'seq2seq-lm'.",
)
ONE_STACK = Need(
    lambda anatomy: len(anatomy.stacks) == 1,
    "it has an encoder and a decoder",
    "Give a model with one stack, or use hs.lens or hs.patch.",
)
CAUSAL = Need(
    lambda anatomy: anatomy.stacks[-1].causal,
    "it sees the whole text and predicts no next token",
    "Give a causal model, or use hs.lens or hs.patch.",
)


@dataclass(frozen=True)
class Description:
    """What can be asked of an analysis besides its model, and how it introduces itself.

    With `states`, stored states can be asked in place of a model. `needs` are what the
    model must have, and the error about one that lacks it says the `verb`: "Cannot
    patch ...". Where the argument `directed` is a direction, no head is needed. With
    `changes`, states are changed, and a site at which they cannot be is refused as
    `hs.edit` refuses it. `details` end the help of the command. `action` names it in a
    menu, and `promise` tells the reader of an empty page what the answer will show.
    """

    parameters: tuple[Parameter, ...] = ()
    states: bool = False
    needs: tuple[Need, ...] = ()
    verb: str = ""
    directed: str = ""
    changes: bool = False
    details: str = ""
    action: str = ""
    promise: str = ""

    def require(self, model: Any, arguments: Mapping[str, Any]) -> None:
        """Refuse a model that lacks what is needed, before anything is computed."""
        for need in self.needs:
            if need is HEAD and self.is_directed(arguments):
                continue
            if not need.is_met(model.anatomy):
                raise need.refusal(self.verb, model.name)

    def is_directed(self, arguments: Mapping[str, Any]) -> bool:
        """Tell whether a direction, or its name, takes the place of an answer."""
        value = arguments.get(self.directed)
        return hasattr(value, "vector_at") or str(value).startswith("feature:")


Function = TypeVar("Function", bound=Callable[..., Any])

PLAIN: dict[Any, Kind] = {int: "integer", bool: "flag"}


class _Typed(Parameter):
    """A parameter whose kind follows from its type."""


def ask(
    help: str = "",  # noqa: A002
    kind: Kind | None = None,
    **details: Any,
) -> Parameter:
    """Say what every place that asks for a parameter should know of it; `details` are
    fields of `Parameter`. Without a kind, the type says it.
    """
    if kind is None:
        return _Typed(help=help, **details)
    return Parameter(help=help, kind=kind, **details)


def analysis(**details: Any) -> Callable[[Function], Function]:
    """Declare a function as an analysis; `details` are fields of `Description`.

    Integers are held to their bounds and the model to its `needs` before the analysis
    begins, and what else is wrong with an argument is said in one sentence when it
    fails. Where the package that declares it has a module `story`, that tells its
    results.
    """

    def declare(function: Function) -> Function:
        description = Description(tuple(declared(function)), **details)
        asked = inspect.signature(function).parameters
        names = list(asked)

        def prepare(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            for parameter in description.parameters:
                value = arguments.get(parameter.name)
                # None is a value only where it is the default.
                is_default = value is asked[parameter.name].default
                if parameter.name in arguments and not is_default:
                    _check(parameter, value)
            if not description.needs or names[0] not in arguments:
                return args
            # Its module imports torch, as does whatever asks.
            as_model = import_module("hiddenscope.model").as_model
            model = as_model(arguments[names[0]])
            description.require(model, arguments)
            if names[0] in kwargs:
                kwargs[names[0]] = model
                return args
            return model, *args[1:]

        wrapper: Any = readable(
            explaining(_outside_inference_mode(function), prepare=prepare)
        )
        wrapper.description = description
        word, package = function.__name__, function.__module__
        is_package = hasattr(sys.modules[package], "__path__")
        if word not in STORIES and is_package and find_spec(f"{package}.story"):
            STORIES[word] = f"{package}.story"
        return cast(Function, wrapper)

    return declare


def readable(function: Function) -> Function:
    """Let `help()` show the types of a function or a class, and nothing else."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=_bare(parameter.annotation))
        for parameter in signature.parameters.values()
    ]
    bare: Any = function
    bare.__signature__ = signature.replace(parameters=parameters)
    return function


def _outside_inference_mode(function: Function) -> Function:
    """Call a function outside the user's inference mode, in which gradients are zero
    without a word.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with autograd.restored(inference=False):
            return function(*args, **kwargs)

    return cast(Function, call)


def _check(parameter: Parameter, value: Any) -> None:
    """Refuse a number that is too small, and what is no choice or no flag."""
    if parameter.kind == "integer" and parameter.least is not None:
        # Some take several numbers in place of one.
        if not isinstance(value, list | tuple):
            integer(value, parameter.name, parameter.least)
        return
    if parameter.kind not in ("choice", "flag"):
        return
    # What is declared as one of several words is nothing else.
    choices: tuple[Any, ...] = parameter.choices
    # Some take an object of ours in place of a word.
    is_plain = isinstance(value, bool | int | float | bytes | list | tuple | dict)
    is_wrong = isinstance(parameter, _Typed) and (is_plain or value is None)
    if value is None and parameter.default is None:
        is_wrong = False
    if parameter.kind == "flag":
        # NumPy's are called so too.
        choices, is_wrong = (True, False), "bool" not in type(value).__name__
    elif isinstance(value, str):
        is_wrong = value not in choices
    if is_wrong:
        raise ArgumentError(
            f"{parameter.name} must be {' or '.join(map(repr, choices))}",
            f"got {shown(value)}",
            "Choose one of these.",
        )


def declared(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of a function, or the fields of a dataclass, that say what
    to ask for them.
    """
    if isinstance(function, type):
        function = vars(function)["__init__"]
    for parameter in inspect.signature(function).parameters.values():
        for ask_for in getattr(parameter.annotation, "__metadata__", ()):
            if isinstance(ask_for, Parameter):
                yield _completed(ask_for, parameter)


def _completed(ask_for: Parameter, parameter: inspect.Parameter) -> Parameter:
    """Return what is asked for with what the signature says of it."""
    types = [parameter.annotation.__origin__]
    if get_origin(types[0]) in (Union, UnionType):
        types = list(get_args(types[0]))
    choices, kind, default = ask_for.choices, ask_for.kind, ask_for.default
    for type_ in types:
        if get_origin(type_) is Literal:
            choices = ask_for.choices or get_args(type_)
        if isinstance(ask_for, _Typed):
            kind = PLAIN.get(type_, kind)
    if isinstance(ask_for, _Typed) and choices:
        kind = "choice"
    is_required = parameter.default is parameter.empty
    if default is None and not is_required:
        default = parameter.default
    return replace(
        ask_for,
        name=parameter.name,
        kind=kind,
        default=default,
        required=is_required if ask_for.required is None else ask_for.required,
        positional=parameter.kind is not parameter.KEYWORD_ONLY,
        choices=choices,
    )


def _bare(annotation: Any) -> Any:
    """Return an annotation as `help()` should show it: the type alone."""
    if get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation


@cache
def describe(word: str) -> Description:
    """Return what can be asked of an analysis; this imports no torch.

    >>> [parameter.name for parameter in describe("lens").parameters][:3]
    ['texts', 'k', 'target']
    """
    function = getattr(import_module(f"hiddenscope.{ANALYSIS[word].module}"), word)
    return cast(Description, function.description)


def flattened(parameters: Iterable[Parameter]) -> Iterator[Parameter]:
    """Yield the parameters, with their fields in place of those that have fields."""
    for parameter in parameters:
        yield from parameter.fields or (parameter,)


def build_value(
    parameter: Parameter, model: object, values: Mapping[str, Any]
) -> object:
    """Call the constructor of a parameter with the fields that have a value."""
    fields = {}
    for field in parameter.fields:
        value = values.get(field.name)
        if value is None:
            continue
        if field.repeated and isinstance(value, str):
            value = [value]
        fields[field.name] = value
    public_name = parameter.constructor.partition(".")[0]
    module = import_module(f"hiddenscope.{PUBLIC[public_name]}")
    constructor = attrgetter(parameter.constructor)(module)
    first = (model,) if parameter.takes_model else ()
    return constructor(*first, **fields)


# Parameters that many analyses share.

TEXTS_HELP = "The texts; @FILE reads those of a file, - one from each line of stdin."
SITES_HELP = "Which states: layer.3, layer.*, final, *.attn, a comma list."
# Which pooling is used if none is given, as a form shows it.
POOL_AS_TRAINED = "as trained, or mean"
POOL_BY_STACK = "last of a decoder and mean of an encoder"
SEED_HELP = "The seed of everything that is random."

TARGETS = Parameter(
    "targets",
    "texts",
    "The text of an encoder-decoder's decoder.",
    form_help="",
    aside=True,
    of_model=True,
)
TRUNCATE = Parameter(
    "truncate",
    "flag",
    "Cut a text that is longer than the model's window.",
    default=False,
    aside=True,
    of_model=True,
)
SITE = Parameter(
    "site",
    "sites",
    "Which state: layer.3, final; the last if not given.",
    aside=True,
)
TEXTS = Parameter(
    "texts", "texts", TEXTS_HELP, positional=True, form_help="", of_model=True
)
SITES = Parameter("sites", "sites", SITES_HELP, aside=True)
SEED = Parameter("seed", "integer", SEED_HELP, least=0, aside=True)
POOL = Parameter(
    "pool",
    "pooling",
    f"What stands for a text: {CHOICES}.",
    choices=NAMES,
    label="Pooling",
    empty_choice=POOL_AS_TRAINED,
    aside=True,
)
STACK_POOL = replace(
    POOL,
    help=f"What stands for a text: {CHOICES}; if not given, {POOL_BY_STACK}.",
    empty_choice=POOL_BY_STACK,
    aside=False,
)
PROBE_POOL = replace(
    STACK_POOL,
    help=f"{STACK_POOL.help} Scores of tokens: {', '.join(SCORE_POOLINGS)}.",
    choices=(*NAMES, *SCORE_POOLINGS),
)
