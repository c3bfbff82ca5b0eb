"""Laws of surfaces: a command, a request and a page say what Python says.

They need the repository: its docs, and a workbench inside the process. Each is called
with the desk on which the models of the subject lie.
"""

import re
import shlex
from typing import Any

import numpy as np
from typer.main import get_command

import hiddenscope as hs
from hiddenscope.cli.endings import in_options
from hiddenscope.cli.main import app
from hiddenscope.cli.terminal import visible
from hiddenscope.results import findings_of
from hiddenscope.testing import Subject
from hiddenscope.testing.checks.law import answer_of, hold, none_of, only_if, result_of
from hiddenscope.testing.comparing import differences, flat_facts
from hiddenscope.testing.entries import Outcome
from tests.checks.desk import Desk, Words, options, parameters_of, question
from tests.places import ROOT
from tests.registry import Entry
from tests.unit.results.test_facts import keys
from tests.workbench.code import run_python


def hold_same(expected: Any, found: Any, who: str) -> None:
    """Hold that two answers are one, to the last digit."""
    none_of(differences(expected, found), who)
    if isinstance(expected, hs.Result):
        hold(found.kind == expected.kind, f"{who} says {found.kind}")
        first, second = (dict(flat_facts(one.facts)) for one in (expected, found))
        other = {key for key in first | second if first.get(key) != second.get(key)}
        told = [
            f"{key} is {second.get(key)!r}, not {first.get(key)!r}" for key in other
        ]
        none_of(told, f"{who}: facts")
        hold(found.summary() == expected.summary(), f"{who} says something else")


def check_the_command_says_what_python_says(
    entry: Entry, subject: Subject, desk: Desk
) -> None:
    """A command writes the numbers that Python gives, prints what they say, and
    refuses what Python refuses.
    """
    words = question(entry, subject)
    hold_commanded(entry, subject, desk, words)


def hold_commanded(entry: Entry, subject: Subject, desk: Desk, words: Words) -> None:
    """Hold that a command does what Python does."""
    came = desk.python(entry, subject, words)
    line = desk.command(entry, subject, words)
    is_result = isinstance(came.answer, hs.Result) or came.error is not None
    said = desk.run(line, ".json" if is_result and entry.word != "embed" else ".npy")
    if came.refused:
        hold_refused(came, said.code, said.complained, entry)
        return
    answer = answer_of(came)
    drifted = is_result and bool(answer.facts.get("drifted"))
    hold(said.code == int(drifted), f"it exits with {said.code}: {said.complained}")
    hold(not said.complained, f"it complains: {said.complained}")
    if not is_result:
        hold_same(answer, np.load(said.wrote), "the command")
        hold(said.printed.startswith(f"{len(answer)} vectors"), said.printed)
        return
    hold_same(answer, hs.Result.load(said.wrote), "the command")
    summary = visible(answer.summary(), keep="\n")
    hold(said.printed.startswith(summary), f"it prints {said.printed[:300]!r}")
    for table in answer.tables:
        for name in table.columns:
            hold(visible(name) in said.printed, f"it prints no column {name}")


def hold_refused(came: Outcome, code: int, told: str, entry: Entry) -> None:
    """Hold that a command refuses in the words of Python, or sooner."""
    hold(code == 2, f"Python refuses it, and the command exits with {code}")
    hold("unexpected" not in told and "Traceback" not in told, told[:400])
    error = came.error
    assert isinstance(error, hs.errors.Error)
    command = get_command(app).commands[entry.word]  # type: ignore[attr-defined]
    names = {part.name for part in command.params}
    parts = (error.reason, in_options(error.reason, names), error.problem)
    hold(any(part in told for part in parts), f"{told!r}, and Python says {error}")


def check_the_request_gives_what_python_gives(
    entry: Entry, subject: Subject, desk: Desk
) -> None:
    """The workbench answers a request as Python does; its code for Python gives the
    same, and its command is the one that says what Python says.
    """
    words = question(entry, subject)
    only_if(fits_a_form(entry, words), "a form takes no text of a decoder by itself")
    hold_requested(entry, subject, desk, words)


def fits_a_form(entry: Entry, words: Words) -> bool:
    """Tell whether a form has a field for the text of a decoder, where there is one."""
    return "targets" not in words or entry.takes("targets")


def check_every_option_reaches_the_analysis(
    entry: Entry, subject: Subject, desk: Desk
) -> None:
    """Each option, in turn, does by a command and by a request what it does in Python,
    and what Python refuses of it they refuse.
    """
    words = question(entry, subject)
    before = desk.python(entry, subject, words)
    moved = 0
    for name, value in options(entry, subject, words):
        more = {**words, name: value}
        came = desk.python(entry, subject, more)
        moved += came.refused or bool(differences(before.answer, came.answer))
        hold_commanded(entry, subject, desk, more)
        if parameters_of(entry)[name].in_form and fits_a_form(entry, words):
            hold_requested(entry, subject, desk, more)
    only_if(not before.refused, "it is refused")
    hold(moved or not words, "no option changes anything")


def hold_requested(entry: Entry, subject: Subject, desk: Desk, words: Words) -> None:
    """Hold that the workbench does what Python does."""
    came = desk.python(entry, subject, words)
    name = desk.listed(desk.model(subject))
    arguments = desk.request(entry, subject, words)
    job = desk.bench.over(entry.word, name, **arguments)
    if came.refused:
        hold(job["state"] == "failed", "Python refuses it, and the page answers")
        told = job["error"] or ""
        assert isinstance(came.error, hs.errors.Error)
        hold(came.error.reason in told, f"{told!r}, and Python says {came.error}")
        return
    expected = answer_of(came)
    hold(job["state"] == "done", f"the page fails: {job.get('error')}")
    answer = desk.bench.ask("GET", f"/api/results/{job['result']}").json
    found = desk.bench.result(answer, desk.data)
    made = run_python(answer, desk.data)
    if not isinstance(expected, hs.Result):
        for vectors in (found.data["vector"].to_numpy(), made["vectors"]):
            hold_same(expected, vectors, "the page")
    else:
        hold_same(expected, found, "the page")
        hold_same(expected, made["result"], "as Python")
        findings = list(findings_of(expected))
        hold(answer["findings"] == findings, f"the page says {answer['findings']}")
        views = [view.title for view in desk.bench.views(answer)]
        hold(views == [view["title"] for view in answer["views"]], f"it draws {views}")
    hold_command_offered(answer, desk.command(entry, subject, words))


def hold_command_offered(answer: dict[str, Any], line: list[str]) -> None:
    """Hold that the command of an answer asks what another one asks."""
    if answer["command"] is None:
        hold("Python only" in answer["command_reason"], "no command, and no reason")
        return
    program, *words = shlex.split(answer["command"])
    hold(program == "hiddenscope" and words[0] == line[0], answer["command"])
    found, expected = parsed(words), parsed(line)
    for name in expected.keys() - {"out", "progress"}:
        first, second = _named(expected[name]), _named(found[name])
        hold(first == second, f"as command, {name} is {second!r}, and was {first!r}")


def _named(value: Any) -> Any:
    """Return a value with the names of files in place of their paths."""
    if isinstance(value, list | tuple):
        return [_named(one) for one in value]
    return re.sub(r"^/.*/", "", value) if isinstance(value, str) else value


def parsed(words: list[str]) -> dict[str, Any]:
    """Return what a command reads in its words."""
    command = get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    with command.make_context(words[0], list(words[1:])) as context:
        return dict(context.params)


def check_the_docs_have_every_key(entry: Entry, subject: Subject, desk: Desk) -> None:
    """The page of an analysis names every key of its facts."""
    result = result_of(entry, subject)
    page = (ROOT / "docs" / f"{entry.word}.md").read_text("utf-8")
    missing = sorted(key for key in set(keys(result.facts)) if f"`{key}`" not in page)
    hold(not missing, f"docs/{entry.word}.md has no {', '.join(missing)}")
