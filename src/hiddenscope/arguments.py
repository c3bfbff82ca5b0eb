"""Public functions say plainly when they are given something that they do not take.

Python lets anything in, and what does not fit fails somewhere deep inside, as an
AttributeError that names nothing the caller knows. So when a public function fails with
an error that is not ours, its arguments are held against its annotations, and the first
that does not fit is named; so is one that fits and cannot be computed with, such as a
sparse tensor. A call that works costs nothing more.

>>> @checked
... def repeat(text: str, times: int = 2) -> str:
...     return text * times
>>> repeat("ab"), repeat("ab", 3)
('abab', 'ababab')
>>> repeat("ab", [3])
Traceback (most recent call last):
hiddenscope.errors.ArgumentError: Cannot call repeat: times must be an integer, got [3]. Give times as documented.
"""

import dataclasses
import errno
import inspect
import itertools
import numbers
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
_LOOKED_AT = 50  # items of a list
_MOST_BITS = 1023  # of an integer that a float holds


def checked(target: Public) -> Public:
    """Have a public function, or every public method of a class, explain arguments that
    do not fit its annotations.
    """
    if not isinstance(target, type):
        return typing.cast(
            Public, _explaining(typing.cast(Callable[..., Any], target), skip=0)
        )
    for name, member in list(vars(target).items()):
        if name.startswith("_") and name not in ("__init__", "__getitem__"):
            continue
        if isinstance(member, staticmethod | classmethod):
            skip = int(isinstance(member, classmethod))
            setattr(target, name, type(member)(_explaining(member.__func__, skip)))
        elif inspect.isfunction(member):
            setattr(target, name, _explaining(member, skip=1))
    return target


def renamed(**names: str) -> Callable[[Public], Public]:
    """Name the parameters of a `checked` function that had another name before.

    >>> @checked
    ... @renamed(token="pool")
    ... def probe(pool: str = "last") -> str:
    ...     return pool
    >>> probe(token="mean")
    Traceback (most recent call last):
    hiddenscope.errors.ArgumentError: Cannot call probe: token is now called pool. Give pool='mean'.
    """

    def mark(function: Public) -> Public:
        vars(function)["__renamed__"] = names
        return function

    return mark


def integer(value: object, name: str, lower_bound: int) -> int:
    """Return a parameter that must be an integer of at least this size.

    >>> integer(3, "k", 1)
    3
    """
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if is_integer and int(value) >= lower_bound:  # type: ignore[call-overload]
        return int(value)  # type: ignore[call-overload, no-any-return]
    raise StatesError(
        f"{name} must be an integer >= {lower_bound}, got {str(value)[:40]}",
        f"it is of type {type(value).__name__}",
        f"Give a number such as {max(lower_bound, 5)}.",
    )


def _explaining(function: Callable[..., Any], skip: int) -> Callable[..., Any]:
    explain = _explain

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            explain(function, args, kwargs, skip, error)
            raise

    # With the globals of the function itself, so that doctest takes the wrapper for one
    # of its module's.
    own: Any = types.FunctionType(
        call.__code__,
        getattr(function, "__globals__", globals()),
        function.__name__,
        None,
        call.__closure__,
    )
    own.__kwdefaults__ = None
    for name in (
        "__module__",
        "__qualname__",
        "__doc__",
        "__dict__",
        "__annotations__",
    ):
        value = getattr(function, name)
        if name == "__dict__":
            own.__dict__.update(value)
        else:
            setattr(own, name, value)
    own.__wrapped__ = function
    return typing.cast(Callable[..., Any], own)


def _explain(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    skip: int,
    error: Exception,
) -> None:
    """Raise ArgumentError in the place of a foreign error, if an argument does not fit
    its annotation.
    """
    if isinstance(error, Error):
        return
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError:
        # A parameter is missing or unknown, which Python says well; but it does not
        # know what has been renamed.
        for old, new in getattr(function, "__renamed__", {}).items():
            if old in kwargs:
                raise ArgumentError(
                    f"Cannot call {function.__name__}",
                    f"{old} is now called {new}",
                    f"Give {new}={shown(kwargs[old])}.",
                ) from error
        return
    for number, (name, value) in enumerate(given.items()):
        parameter = signature.parameters[name]
        if number < skip or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if value is not parameter.default:
            called = getattr(function, "__qualname__", str(function)).removesuffix(
                ".__init__"
            )
            try:
                _require_plain(value, name, called)
                _require_path(value, name, called, error)
                require(
                    value,
                    _evaluated(parameter.annotation, function.__module__),
                    name,
                    called,
                )
                _require_fields(value, name, called)
            except ArgumentError as explained:
                raise explained from error


def _require_plain(value: Any, name: str, function: str, depth: int = 3) -> None:
    """Refuse what fits an annotation and cannot be computed with: tensors that are not
    dense, and endless numbers.
    """
    kind, remedy = _unusual(value)
    if kind:
        raise ArgumentError(f"Cannot call {function}", f"{name} is {kind}", remedy)
    if not depth:
        return
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            _require_plain(
                getattr(value, field.name, None),
                f"{name}.{field.name}",
                function,
                depth - 1,
            )
    elif isinstance(value, Mapping):
        for key, part in itertools.islice(value.items(), _LOOKED_AT):
            _require_plain(part, f"{name}[{shown(key)}]", function, depth - 1)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value[:_LOOKED_AT]):
            _require_plain(part, f"{name}[{number}]", function, depth - 1)


def _require_path(value: Any, name: str, function: str, error: Exception) -> None:
    """Refuse the name of a file that no file system takes, if that is what the error is
    about.
    """
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    no_name = isinstance(error, UnicodeEncodeError) or (
        isinstance(error, ValueError) and "null byte" in str(error)
    )
    if not isinstance(value, str | os.PathLike) or not (too_long or no_name):
        return
    problem, remedy = f"Cannot call {function}", "Give the path of a file or a folder."
    try:
        os.lstat(value)
    except ValueError:
        raise ArgumentError(
            problem, f"{name} holds a character that no path may have", remedy
        ) from None
    except OSError as refused:
        if refused.errno == errno.ENAMETOOLONG:
            raise ArgumentError(
                problem, f"{name} is longer than a path may be", remedy
            ) from None


def _unusual(value: Any) -> tuple[str, str]:
    """What a value is that cannot be computed with, and what to give in its place;
    empty for any other.
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
        return (
            f"a tensor of the layout {str(value.layout).removeprefix('torch.')}",
            "Give its to_dense().",
        )
    if value.is_meta:
        return "a meta tensor, which has no values", "Give a tensor with values."
    if value.dtype.itemsize == 1 and value.is_floating_point():
        return (
            f"a tensor in {str(value.dtype).removeprefix('torch.')}",
            "Give its float().",
        )
    return "", ""


def require(value: Any, hint: Any, name: str, function: str) -> None:
    """Raise ArgumentError unless a value is of an annotated type, for functions that
    run later than they are called.

    >>> require(5, str | None, "text", "read")
    Traceback (most recent call last):
    hiddenscope.errors.ArgumentError: Cannot call read: text must be a string or None, got 5. Give text as documented.
    """
    if not fits(value, hint):
        reason = f"{name} must be {described(hint)}, got {shown(value)}"
        raise ArgumentError(
            f"Cannot call {function}", reason, f"Give {name} as documented."
        )


def _require_fields(value: Any, name: str, function: str) -> None:
    """Require that the fields of a dataclass fit their annotations, and the fields of
    these.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            given, path = getattr(value, field.name, None), f"{name}.{field.name}"
            if given is not field.default:
                require(
                    given,
                    _evaluated(field.type, type(value).__module__),
                    path,
                    function,
                )
                _require_fields(given, path, function)


def _evaluated(annotation: Any, module: str) -> Any:
    """An annotation as a type; Any where it names what is imported for type checking
    alone.
    """
    if annotation is inspect.Parameter.empty:
        return Any
    named = types.SimpleNamespace(__annotations__={"one": annotation})
    try:
        return typing.get_type_hints(named, vars(sys.modules[module]))["one"]
    except Exception:
        return Any


def fits(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type, as far as can be told; of a list, the
    first items are looked at.

    >>> fits([1, 2], Sequence[int]), fits(["a"], Sequence[int]), fits("mean", Literal["mean", "max"]), fits(True, int)
    (True, False, True, False)
    """
    if hint is Any or hint is object or isinstance(hint, TypeVar | str):
        return True
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _is_array_like(hint, value) or any(fits(value, part) for part in inner)
    if origin is Literal:
        return any(type(value) is type(one) and value == one for one in inner)
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
    if (
        not isinstance(value, origin)
        or isinstance(value, bytes | bytearray)
        or getattr(value, "shape", None) == ()
    ):
        return False
    given: Any = value
    if isinstance(given, Mapping):
        pairs = list(given.items())[:_LOOKED_AT]
        return len(inner) != 2 or all(
            fits(key, inner[0]) and fits(item, inner[1]) for key, item in pairs
        )
    if issubclass(origin, tuple) and not (len(inner) == 2 and inner[1] is Ellipsis):
        return len(inner) == len(given) and all(map(fits, given, inner))
    if not isinstance(given, Collection) or not inner:
        return True  # an iterator is not looked into: that would use it up
    if isinstance(given, str):
        return fits(given[:1], inner[0])
    return all(fits(item, inner[0]) for item in itertools.islice(given, _LOOKED_AT))


def _is_array_like(hint: Any, value: Any) -> bool:
    """Whether an annotation is numpy's ArrayLike and the value could be one: numbers,
    or something that holds them.
    """
    if "_SupportsArray" not in str(hint):
        return False
    return isinstance(value, numbers.Number | Sequence) or hasattr(value, "__array__")


def _members(protocol: type) -> set[str]:
    bases = [base for base in protocol.__mro__ if getattr(base, "_is_protocol", False)]
    return {name for base in bases for name in vars(base) if not name.startswith("_")}


def _has(value: Any, name: str) -> bool:
    try:
        inspect.getattr_static(value, name)
    except AttributeError:
        return False
    return True


def described(hint: Any) -> str:
    """An annotated type in words.

    >>> described(str | Sequence[int] | None), described(Literal["mean", "max"])
    ('a string, a list of integers or None', "'mean' or 'max'")
    """
    if "_SupportsArray" in str(hint):
        return "an array of numbers"
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType, Literal):
        each = [repr(part) if origin is Literal else described(part) for part in inner]
        each = list(dict.fromkeys(each))
        return f"{', '.join(each[:-1])} or {each[-1]}" if len(each) > 1 else each[0]
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if origin is not None and isinstance(origin, type) and issubclass(origin, Iterable):
        many = {str: "strings", int: "integers", float: "numbers"}
        of = f" of {many.get(inner[0], described(inner[0]))}" if inner else ""
        return f"a list{of}"
    if origin is Callable or hint is Callable:
        return "a function"
    if hint in _WORDS:
        return _WORDS[hint]
    if hint is os.PathLike or origin is os.PathLike:
        return "a path"
    return f"a {getattr(hint, '__name__', str(hint))}"


def shown(value: Any) -> str:
    """A value as an error shows it: short, on one line, and whatever its own repr does.

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
