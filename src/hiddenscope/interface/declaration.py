"""The declaration of an analysis: the signature of its function, annotated.

A parameter is `Annotated[type, ask("help")]`; its name, its default, whether it is
required and whether it has a place are read from the signature. The command, the
request, the form and the code that repeats a question are made of this, and nothing
else lists the parameters again. No torch is imported to read it: types that need torch
stand in quotation marks.

>>> @analysis(summary="Repeat a text.")
... def repeat(model: "ModelLike", text: Annotated[str, ask("The text.")], *,
...            times: Annotated[int, ask("How often.", spelling=("-n",))] = 2) -> str:
...     return text * times
>>> [(one.name, one.kind, one.option) for one in repeat.description.parameters]
[('text', 'word', '--text'), ('times', 'integer', '-n')]
>>> repeat(None, "ab", times=0)
Traceback (most recent call last):
hiddenscope.errors.StatesError: times must be an integer >= 1: got 0. Give a number such as 5.
"""  # noqa: E501

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ForwardRef,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
)

from hiddenscope.arguments import explaining, integer
from hiddenscope.interface.parameters import Description, Kind, Parameter

Function = TypeVar("Function", bound=Callable[..., Any])

PLAIN: dict[Any, Kind] = {int: "integer", bool: "flag"}


def ask(help: str = "", **details: Any) -> Parameter:  # noqa: A002
    """Say what every place that asks for a parameter should know of it; `details` are
    fields of `Parameter`.
    """
    return Parameter(help=help, **details)


def analysis(**details: Any) -> Callable[[Function], Function]:
    """Declare a function as an analysis; `details` are fields of `Description`.

    Integers are held to their bounds before the analysis begins, and what else is wrong
    with an argument is said in one sentence when it fails.
    """

    def declare(function: Function) -> Function:
        parameters = tuple(declared(function))
        signature = inspect.signature(function)

        def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = dict(zip(signature.parameters, args, strict=False))
            arguments |= kwargs
            for parameter in parameters:
                value = arguments.get(parameter.name)
                is_bounded = parameter.kind == "integer" and value is not None
                if is_bounded and parameter.least is not None:
                    integer(value, parameter.name, parameter.least)

        wrapper: Any = explaining(function, check=check)
        wrapper.__signature__ = signature.replace(
            parameters=[
                parameter.replace(annotation=_bare(parameter.annotation))
                for parameter in signature.parameters.values()
            ]
        )
        wrapper.description = Description(parameters, **details)
        return cast(Function, wrapper)

    return declare


def declared(function: Callable[..., Any]) -> Iterator[Parameter]:
    """Yield the parameters of a function, or the fields of a dataclass, that say what
    to ask for them.
    """
    for parameter in inspect.signature(function).parameters.values():
        metadata = getattr(parameter.annotation, "__metadata__", ())
        asked = next(filter(_is_parameter, metadata), None)
        if asked is None:
            continue
        type_ = parameter.annotation.__origin__
        is_required = parameter.default is parameter.empty
        default = None if is_required else parameter.default
        choices = asked.choices or _choices(type_)
        yield replace(
            asked,
            name=parameter.name,
            kind=asked.kind or _kind(type_, choices),
            default=asked.default if asked.default is not None else default,
            required=is_required if asked.required is None else asked.required,
            positional=parameter.kind is not parameter.KEYWORD_ONLY,
            choices=choices,
        )


def _is_parameter(value: object) -> bool:
    return isinstance(value, Parameter)


def _kind(type_: Any, choices: tuple[str, ...]) -> Kind:
    """Return what a parameter of this type takes, where it does not say so itself."""
    if choices:
        return "choice"
    for part in _parts(type_):
        if part in PLAIN:
            return PLAIN[part]
    return "word"


def _choices(type_: Any) -> tuple[str, ...]:
    choices: tuple[str, ...] = ()
    for part in _parts(type_):
        if get_origin(part) is Literal:
            choices += get_args(part)
    return choices


def _parts(type_: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    if get_origin(type_) in (Union, UnionType):
        return tuple(part for part in get_args(type_) if part is not NoneType)
    return (type_,)


def _bare(annotation: Any) -> Any:
    """Return an annotation as `help()` should show it: the type alone."""
    if get_origin(annotation) is Annotated:
        annotation = annotation.__origin__
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation
