"""Arguments of public functions, checked when a call fails.

Python accepts any argument, and a wrong one fails somewhere deep inside, as an
AttributeError that names nothing the caller knows. So when a public function fails with
an error that is not ours, its arguments are compared with its annotations, and the
first that does not fit is named; so is one that fits and cannot be computed with, such
as a sparse tensor. A call that works costs nothing more.

>>> @checked
... def repeat(text: str, times: int = 2) -> str:
...     return text * times
>>> repeat("ab"), repeat("ab", 3)
('abab', 'ababab')
>>> repeat("ab", [3])
Traceback (most recent call last):
hiddenscope.errors.ArgumentError: Cannot call repeat: times must be an integer, got [3]. Give times as documented.
"""  # noqa: E501

import dataclasses
import errno
import functools
import inspect
import itertools
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from hiddenscope.errors import ArgumentError, Error, StatesError

Public = TypeVar("Public")

_WORDS = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "True or False",
    type(None): "None",
}
# How values that are made of parts are read from files.
_READERS = {
    "Dictionary": "hs.Dictionary.read(path)",
    "Lens": "hs.Lens.load(path)",
    "Model": "hs.load(name)",
    "Pair": "hs.Pair.load(path)",
    "Result": "hs.Result.load(path)",
    "States": "hs.States.load(path)",
    "Store": "hs.open(path)",
}
# What others call our parameters.
SYNONYMS = {"layer": "sites", "layers": "sites"}
# Items of a list that are checked.
_MOST_ITEMS = 50
# Bits of an integer that a float holds.
_MOST_BITS = 1023


def checked(target: Public) -> Public:
    """Make a function, or the public methods of a class, explain wrong arguments."""
    if not isinstance(target, type):
        function = typing.cast(Callable[..., Any], target)
        return typing.cast(Public, explaining(function, skip=0))
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in ("__init__", "__getitem__"):
            continue
        if isinstance(member, staticmethod | classmethod):
            skip = int(isinstance(member, classmethod))
            setattr(target, name, type(member)(explaining(member.__func__, skip)))
        elif inspect.isfunction(member):
            setattr(target, name, explaining(member, skip=1))
    return target


def integer(value: object, name: str, lower_bound: int) -> int:
    """Return a parameter that must be an integer of at least this size.

    >>> integer(3, "k", 1)
    3
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_integer and int(value) >= lower_bound:  # type: ignore[call-overload]
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise StatesError(
        f"{name} must be an integer >= {lower_bound}",
        f"got {shown(value)}",
        f"Give a number such as {max(lower_bound, 5)}.",
    )


def explaining(
    function: Callable[..., Any],
    skip: int = 0,
    prepare: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, ...]] | None = None,
) -> Callable[..., Any]:
    """Wrap a function so that it explains wrong arguments.

    The first `skip` arguments (self, cls) are not looked at. `prepare` may refuse
    arguments before the call, or exchange them.
    """
    explain = _explain

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            if prepare is not None:
                args = prepare(args, kwargs)
            return function(*args, **kwargs)
        except Exception as error:
            explain(function, args, kwargs, skip, error)
            raise

    # With the globals of the function itself, because doctest runs only functions whose
    # globals are those of the module.
    wrapper: Any = types.FunctionType(
        call.__code__,
        getattr(function, "__globals__", globals()),
        function.__name__,
        None,
        call.__closure__,
    )
    wrapper.__kwdefaults__ = None
    functools.update_wrapper(wrapper, function)
    return typing.cast(Callable[..., Any], wrapper)


def _explain(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    skip: int,
    error: Exception,
) -> None:
    """Raise ArgumentError in place of a foreign error, if an argument does not fit."""
    if isinstance(error, Error):
        return
    signature = inspect.signature(function)
    called = getattr(function, "__qualname__", str(function)).removesuffix(".__init__")
    if called in _READERS and len(args) == 2 and isinstance(args[1], str | os.PathLike):
        reason = f"it is made of parts, and {shown(args[1])} is a name"
        remedy = f"To read one, call {_READERS[called]}."
        raise ArgumentError(f"Cannot call {called}", reason, remedy) from error
    mismatch = None
    try:
        arguments = signature.bind(*args, **kwargs).arguments
    except TypeError as refusal:
        reason, remedy = str(refusal), f"Call {_usage(function, called)}."
        for name in kwargs:
            if name not in signature.parameters:
                reason = f"it has no parameter {name!r}"
                name = SYNONYMS.get(name, name)
                for near in get_close_matches(name, signature.parameters, 1):
                    remedy = f"Did you mean {near}?"
                takes_texts = {"data", "texts"} & signature.parameters.keys()
                if name in ("text", "label", "group") and takes_texts:
                    remedy = f"Give what hs.read(path, {name}=...) returns."
        mismatch = ArgumentError(f"Cannot call {called}", reason, remedy)
        if kwargs.keys() - signature.parameters:
            raise mismatch from error
        # One of a wrong type may be why there are too many or too few.
        arguments = dict(zip(signature.parameters, args, strict=False))
    for name, value in list(arguments.items())[skip:]:
        parameter = signature.parameters[name]
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if value is parameter.default:
            continue
        try:
            _require_plain(value, name, called)
            _require_path(value, name, called, error)
            hint = _evaluated(parameter.annotation, function.__module__)
            require(value, hint, name, called)
            _require_fields(value, name, called)
        except ArgumentError as explained:
            raise explained from error
    if mismatch is not None:
        raise mismatch from error


def _usage(function: Callable[..., Any], called: str) -> str:
    """Return how a function is called: its parameters and their defaults.

    >>> _usage(integer, "integer")
    'integer(value, name, lower_bound)'
    """
    names = [
        parameter.replace(annotation=parameter.empty)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
    ]
    return f"{called}{inspect.Signature(names)}"


def _require_plain(value: Any, name: str, function: str, depth: int = 3) -> None:
    """Refuse what fits an annotation but cannot be computed with."""
    kind, remedy = _unusual(value)
    if kind:
        raise ArgumentError(f"Cannot call {function}", f"{name} is {kind}", remedy)
    if depth:
        for part_name, part in _named_parts(value, name):
            _require_plain(part, part_name, function, depth - 1)


def _named_parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass or the items of a container, as a caller names
    them.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f"{name}.{field.name}", getattr(value, field.name, None)
    elif isinstance(value, Mapping):
        for key, part in itertools.islice(value.items(), _MOST_ITEMS):
            yield f"{name}[{shown(key)}]", part
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value[:_MOST_ITEMS]):
            yield f"{name}[{number}]", part


def _require_path(value: Any, name: str, function: str, error: Exception) -> None:
    """Refuse a path that no file system takes, if the error is about that."""
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    has_null = isinstance(error, ValueError) and "null byte" in str(error)
    is_about_name = too_long or has_null or isinstance(error, UnicodeEncodeError)
    if not isinstance(value, str | os.PathLike) or not is_about_name:
        return
    problem = f"Cannot call {function}"
    remedy = "Give the path of a file or a folder."
    try:
        os.lstat(value)
    except ValueError:
        reason = f"{name} holds a character that no path may have"
        raise ArgumentError(problem, reason, remedy) from None
    except OSError as refusal:
        if refusal.errno == errno.ENAMETOOLONG:
            reason = f"{name} is longer than a path may be"
            raise ArgumentError(problem, reason, remedy) from None


def _unusual(value: Any) -> tuple[str, str]:
    """Describe a value that cannot be computed with, and what to give in its place.

    Both are empty for any other value.
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return "a number of more digits than a float holds", "Give a smaller one."
    # torch is not imported here: `--help` must not wait for it.
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return "", ""
    if value.is_nested:
        return "a nested tensor", "Give a list of tensors, or one that is padded."
    if value.is_quantized:
        return "a quantized tensor", "Give its dequantize()."
    if value.layout != torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return f"a tensor of the layout {layout}", "Give its to_dense()."
    if value.is_meta:
        return "a meta tensor, which has no values", "Give a tensor with values."
    if value.dtype.itemsize == 1 and value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        return f"a tensor in {dtype}", "Give its float()."
    return "", ""


def require(value: Any, hint: Any, name: str, function: str) -> None:
    """Raise ArgumentError unless a value is of an annotated type.

    Functions that run later than they are called use it themselves.

    >>> require(5, str | None, "text", "read")
    Traceback (most recent call last):
    hiddenscope.errors.ArgumentError: Cannot call read: text must be a string or None, got 5. Give text as documented.
    """  # noqa: E501
    if not fits(value, hint):
        remedy = f"Give {name} as documented."
        first, *_ = *get_args(hint), hint
        if dataclasses.is_dataclass(first) and isinstance(first, type):
            remedy = f"Give hs.{_usage(first, first.__name__)}."
        raise ArgumentError(
            f"Cannot call {function}",
            f"{name} must be {described(hint)}, got {shown(value)}",
            remedy,
        )


def _require_fields(value: Any, name: str, function: str) -> None:
    """Require that the fields of a dataclass, and theirs, fit their annotations."""
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return
    for field in dataclasses.fields(value):
        part = getattr(value, field.name, None)
        if part is field.default:
            continue
        path = f"{name}.{field.name}"
        hint = _evaluated(field.type, type(value).__module__)
        require(part, hint, path, function)
        _require_fields(part, path, function)


def _evaluated(annotation: Any, module: str) -> Any:
    """Return the type that an annotation names.

    It is Any where the annotation names what is imported for type checking alone.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    holder = types.SimpleNamespace(__annotations__={"hint": annotation})
    try:
        # Analyses name types that need torch, which they do not import themselves.
        names = vars(import_module("hiddenscope.annotations"))
        names = names | vars(sys.modules[module])
        return typing.get_type_hints(holder, names)["hint"]
    except Exception:
        return Any


def fits(value: Any, hint: Any) -> bool:
    """Tell whether a value is of an annotated type, as far as its first items show.

    >>> fits([1, 2], Sequence[int]), fits(["a"], Sequence[int]), fits(True, int)
    (True, False, False)
    """
    if hint is Any or hint is object or isinstance(hint, TypeVar | str):
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _is_array_like(hint, value) or any(fits(value, part) for part in inner)
    if origin is Literal:
        # By type too: True equals 1.
        return any(type(value) is type(word) and value == word for word in inner)
    if origin is not None:
        return _fits_container(value, origin, inner)
    if hint is None:
        return value is None
    if not isinstance(hint, type):
        return True
    if getattr(hint, "_is_protocol", False):
        return all(_has(value, name) for name in _members(hint))
    if hint is int or hint is float:
        kind = numbers.Integral if hint is int else numbers.Real
        return isinstance(value, kind) and not isinstance(value, bool)
    return isinstance(value, hint)


def _fits_container(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    if origin is type:
        return isinstance(value, type)
    if not isinstance(origin, type):
        return True
    is_scalar = getattr(value, "shape", None) == ()
    is_container = isinstance(value, origin) and not is_scalar
    if not is_container or isinstance(value, bytes | bytearray):
        return False
    items: Any = value
    # An array is annotated with its shape, not with its items.
    if origin.__module__ == "numpy":
        return True
    if isinstance(items, Mapping):
        if len(inner) != 2:
            return True
        pairs = itertools.islice(items.items(), _MOST_ITEMS)
        return all(fits(key, inner[0]) and fits(part, inner[1]) for key, part in pairs)
    if issubclass(origin, tuple) and not (len(inner) == 2 and inner[1] is Ellipsis):
        return len(inner) == len(items) and all(map(fits, items, inner))
    # To look into an iterator would use it up.
    if not isinstance(items, Collection) or not inner:
        return True
    if isinstance(items, str):
        return fits(items[:1], inner[0])
    return all(fits(item, inner[0]) for item in itertools.islice(items, _MOST_ITEMS))


def _is_array_like(hint: Any, value: Any) -> bool:
    """Tell whether an annotation is numpy's ArrayLike and a value could be one."""
    if "_SupportsArray" not in str(hint):
        return False
    return isinstance(value, numbers.Number | Sequence) or hasattr(value, "__array__")


def _members(protocol: type) -> set[str]:
    members: set[str] = set()
    for base in protocol.__mro__:
        if getattr(base, "_is_protocol", False):
            members |= vars(base).keys()
    return {name for name in members if not name.startswith("_")}


def _has(value: Any, name: str) -> bool:
    try:
        inspect.getattr_static(value, name)
    except AttributeError:
        return False
    return True


def described(hint: Any) -> str:
    """Describe an annotated type in words.

    >>> described(str | Sequence[int] | None), described(Literal["mean", "max"])
    ('a string, a list of integers or None', "'mean' or 'max'")
    >>> described(Exception | str)
    'an Exception or a string'
    """
    if "_SupportsArray" in str(hint):
        return "an array of numbers"
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType, Literal):
        describe = repr if origin is Literal else described
        *others, last = dict.fromkeys(describe(part) for part in inner)
        return f"{', '.join(others)} or {last}" if others else last
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        if not inner:
            return "a list"
        items = described(inner[0])
        if isinstance(inner[0], type) and items.startswith("a"):
            items = f"{items.partition(' ')[2]}s"
        return f"a list of {items}"
    if origin is Callable or hint is Callable:
        return "a function"
    if hint in _WORDS:
        return _WORDS[hint]
    if hint is os.PathLike or origin is os.PathLike:
        return "a path"
    name = getattr(hint, "__name__", str(hint))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def shown(value: Any) -> str:
    """Show a value in an error: short, on one line, and whatever its own repr does.

    >>> shown("x" * 200)[:20], shown(object)
    ("'xxxxxxxxxxxxxxxxxxx", "<class 'object'>")
    """
    if isinstance(
        value, str | int | float | bool | list | tuple | dict | set | type | None
    ):
        try:
            text = ascii(value)
        except Exception:
            text = ""
        if text:
            return text if len(text) <= 60 else f"{text[:57]}..."
    return f"an object of type {type(value).__name__}"
