"""Every parameter of an analysis can be asked for."""

import inspect
import re
from operator import attrgetter
from pathlib import Path

import pytest

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES
from hiddenscope.cli.command import options_of
from hiddenscope.interface import describe, flattened

WORDS = [analysis.word for analysis in ANALYSES if analysis.package == "analyses."]


@pytest.mark.parametrize("word", WORDS)
def test_every_parameter_is_asked_for_and_fields_are_those_of_a_constructor(
    word: str,
) -> None:
    _, *declared = inspect.signature(getattr(hs, word)).parameters
    described = describe(word).parameters
    assert [parameter.name for parameter in described] == declared
    for parameter in described:
        if parameter.fields:
            fields = [field.name for field in parameter.fields]
            constructor = attrgetter(parameter.constructor)(hs)
            names = inspect.signature(constructor).parameters
            # A group belongs to several contrasts, and a question has one.
            assert fields == [name for name in names if name not in ("model", "group")]


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
    rooms = [package / room for room in ("cli", "app")]
    comparison = re.compile(rf"""(?:word|analysis)\)? ?[!=]==? ?["'](?:{names})["']""")
    found = [
        f"{path.name}: {match[0]}"
        for room in rooms
        for suffix in ("*.py", "static/*.js")
        for path in [*sorted(room.glob(suffix)), package / "interface.py"]
        for match in comparison.finditer(path.read_text("utf-8"))
    ]
    # Project shows one picture while it makes another, and drift has a tab of its own.
    assert found == [
        'questions.py: word == "project"',
        'main.js: word === "drift"',
    ]
