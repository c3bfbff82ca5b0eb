"""Every analysis describes its parameters as its function declares them."""

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES, Parameter
from hiddenscope.interface.descriptions import describe, flattened
from hiddenscope.interface.typer_parameters import options_of

WORDS = [analysis.word for analysis in ANALYSES if analysis.package == "analyses."]
BUILT = [word for word in WORDS if any(one.fields for one in describe(word).parameters)]


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
def test_a_description_matches_the_function(word: str) -> None:
    function = getattr(hs, word)
    _, *declared = inspect.signature(function).parameters.values()
    described = describe(word).parameters
    assert [one.name for one in described] == [one.name for one in declared]
    assert [one.positional for one in described] == [
        one.kind is one.POSITIONAL_OR_KEYWORD for one in declared
    ]
    for parameter in described:
        check(parameter, function)


@pytest.mark.parametrize("word", BUILT)
def test_fields_match_what_they_build(word: str) -> None:
    (parameter,) = [one for one in describe(word).parameters if one.fields]
    fields = [field.name for field in parameter.fields]
    constructor = attrgetter(parameter.constructor)(hs)
    declared = inspect.signature(constructor).parameters
    # A group belongs to several contrasts, and a question has one.
    assert fields == [name for name in declared if name not in ("model", "group")]
    for field in parameter.fields:
        check(field, constructor)


@pytest.mark.parametrize("word", WORDS)
def test_a_command_has_no_option_twice(word: str) -> None:
    names = [parameter.name for parameter in options_of(describe(word))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("word", WORDS)
def test_every_parameter_of_a_command_has_a_help_text(word: str) -> None:
    assert all(parameter.help for parameter in options_of(describe(word)))


def test_descriptions_load_no_torch() -> None:
    program = (
        "import sys; from hiddenscope.interface.descriptions import describe;"
        f" [describe(word) for word in {WORDS}];"
        " assert not {'torch', 'numpy', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


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


@pytest.mark.parametrize("word", ["probe", "project", "steer"])
def test_the_empty_choice_of_a_pooling_says_what_the_help_says(word: str) -> None:
    (pool,) = [
        parameter
        for parameter in flattened(describe(word).parameters)
        if parameter.kind == "pooling"
    ]
    assert f"if not given, {pool.empty_choice}." in pool.help
