"""Every analysis describes its parameters as its function declares them."""

import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES
from hiddenscope.interface import Parameter
from hiddenscope.interface.descriptions import describe, flattened
from hiddenscope.interface.typer_parameters import options_of

WORDS = [analysis.word for analysis in ANALYSES if analysis.package == "analyses."]


def words_of(hint: Any) -> Iterator[str]:
    """Yield the words of every Literal in a type."""
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    for part in get_args(hint):
        yield from words_of(part)


def hints_of(function: Any) -> dict[str, Any]:
    if not isinstance(function, type):
        function = inspect.unwrap(function)
    try:
        return get_type_hints(function)
    except NameError:  # a type that is imported for type checkers alone
        return {}


def check(parameter: Parameter, function: Any) -> None:
    declared = inspect.signature(function).parameters[parameter.name]
    has_default = declared.default is not declared.empty
    assert has_default != (parameter.required or parameter.explicit)
    if has_default:
        assert parameter.default == declared.default
    if parameter.kind in ("choice", "numbers"):
        declared_words = set(words_of(hints_of(function)[parameter.name]))
        assert set(parameter.choices) == declared_words


@pytest.mark.parametrize("word", WORDS)
def test_a_description_matches_the_function_and_what_its_fields_build(
    word: str,
) -> None:
    function = getattr(hs, word)
    _, *declared = inspect.signature(function).parameters.values()
    described = describe(word).parameters
    assert [one.name for one in described] == [one.name for one in declared]
    assert [one.positional for one in described] == [
        one.kind is one.POSITIONAL_OR_KEYWORD for one in declared
    ]
    for parameter in described:
        check(parameter, function)
        if not parameter.fields:
            continue
        fields = [field.name for field in parameter.fields]
        constructor = attrgetter(parameter.constructor)(hs)
        names = inspect.signature(constructor).parameters
        # A group belongs to several contrasts, and a question has one.
        assert fields == [name for name in names if name not in ("model", "group")]
        for field in parameter.fields:
            check(field, constructor)


def test_every_option_of_a_command_has_its_own_name_and_a_help_text() -> None:
    for word in WORDS:
        options = options_of(describe(word))
        names = [option.name for option in options]
        assert len(names) == len(set(names)), word
        assert all(option.help for option in options), word
        for parameter in flattened(describe(word).parameters):
            if parameter.kind == "pooling" and word in ("probe", "project", "steer"):
                assert f"if not given, {parameter.empty_choice}." in parameter.help


def test_no_code_asks_for_the_word_of_an_analysis() -> None:
    """What an analysis needs is described; no program or page compares its word."""
    package = Path(hs.__file__).parent
    names = "|".join(WORDS)
    rooms = [package / room for room in ("interface", "cli", "app")]
    comparison = re.compile(rf"""(?:word|analysis)\)? ?[!=]==? ?["'](?:{names})["']""")
    found = [
        f"{path.name}: {match[0]}"
        for room in rooms
        for suffix in ("*.py", "static/*.js")
        for path in sorted(room.glob(suffix))
        for match in comparison.finditer(path.read_text("utf-8"))
    ]
    # Drift has a tab of its own, which looks for its analysis.
    assert found == ['main.js: word === "drift"']
