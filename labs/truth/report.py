"""Every table of what came of the models: labs/truth/tables.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from labs.truth.circuit import circuit_of
from labs.truth.hosts import HOSTS
from labs.truth.outputs import Outputs
from labs.truth.program import Program
from labs.truth.programs import PROGRAMS
from labs.truth.rewrite import with_counted_positions
from labs.truth.runs import Outcome
from labs.truth.tally import Question, Score, score
from labs.truth.train import ACCURACY, INTERCHANGED, STRICT

NAMES = {
    "plain": "plain",
    "gpt2": "GPT-2",
    "opt": "OPT",
    "bert": "BERT",
    "llama": "Llama",
    "trained": "trained",
}

EXAMINED = (ACCURACY, INTERCHANGED, STRICT)


def report(outcomes: Sequence[Outcome]) -> str:
    """Return all tables as Markdown."""
    parts = [
        "### Compiled models",
        _compiled_table(outcomes),
        "### Trained models",
        _trained_table(outcomes),
    ]
    questions = _questions(outcomes)
    for analysis in _in_order(question.analysis for question in questions):
        asked = [each for each in questions if each.analysis == analysis]
        parts += [f"### {analysis}", _score_table(asked, outcomes)]
        for question in asked:
            if question.by_program:
                parts += [
                    f"By program: {question.asked}.",
                    _by_program(question, outcomes),
                ]
    refusals = _refusals(outcomes)
    if refusals:
        parts += ["### Refused", refusals]
    return "\n\n".join(parts) + "\n"


def _compiled_table(outcomes: Sequence[Outcome]) -> str:
    """Return what every program is, and how exact its models are."""
    header = ["program", "its output", "tokens", "longest input", "blocks"]
    header += ["inputs tried", "wrong", "tolerance"]
    header += [NAMES[host] for host in HOSTS]
    rows = []
    for name, make in PROGRAMS.items():
        program = make()
        checked = {}
        for outcome in outcomes:
            if outcome.job.program == name and outcome.outputs is not None:
                checked[outcome.job.host] = outcome.outputs
        if not checked:
            continue
        first = next(iter(checked.values()))
        tried = f"{first.inputs:,}" + " (all)" * first.is_every_input
        wrong = sum(outputs.wrong for outputs in checked.values())
        row = [name, program.task, str(len(program.vocabulary))]
        row += [str(program.longest), _blocks(program), tried]
        row += [str(wrong), str(program.tolerance)]
        for host in HOSTS:
            row.append(_errors(checked.get(host)))
        rows.append(row)
    return _table(header, rows)


def _blocks(program: Program) -> str:
    """Return the number of blocks, with Llama's if it needs more."""
    blocks = circuit_of(program).blocks
    in_llama = circuit_of(with_counted_positions(program)).blocks
    return str(blocks) if blocks == in_llama else f"{blocks} (Llama {in_llama})"


def _errors(outputs: Outputs | None) -> str:
    """Return the largest error of a logit, and that of a channel of a state."""
    if outputs is None:
        return ""
    return f"{outputs.logit_error:.0e}, {outputs.leak:.0e}"


def _trained_table(outcomes: Sequence[Outcome]) -> str:
    """Return how the trained models did, and those that learned answers alone."""
    header = ["program", "steps", "circuit taught"]
    header += [question.asked for question in EXAMINED]
    rows = []
    for outcome in outcomes:
        training = outcome.training
        if training is None:
            continue
        cards = {f"{training.steps:,}": training.examination, "": training.untaught}
        for steps, card in cards.items():
            row = [outcome.job.program, steps, "yes" if steps else "no"]
            for question in EXAMINED:
                row.append(_cell(score(question, card.cases[question])))
            rows.append(row)
    return _table(header, rows) if rows else "None."


def _in_order(analyses: Iterable[str]) -> list[str]:
    """Return every analysis once, all kinds of one analysis together."""
    distinct = list(dict.fromkeys(analyses))
    words = [name.split()[0] for name in distinct]
    return sorted(distinct, key=lambda name: words.index(name.split()[0]))


def _questions(outcomes: Iterable[Outcome]) -> list[Question]:
    """Return every question once, in the order in which they were asked."""
    asked: dict[Question, None] = {}
    for outcome in outcomes:
        asked |= dict.fromkeys(outcome.card.cases)
    return list(asked)


def _score_table(questions: Sequence[Question], outcomes: Sequence[Outcome]) -> str:
    """Return the scores of some questions, over all programs of each host."""
    hosts = _hosts(questions, outcomes)
    header = ["what", "if it knew nothing", "cases", *(NAMES[host] for host in hosts)]
    rows = []
    for question in questions:
        row = [question.asked, question.null]
        counts, cells = [], []
        for host in hosts:
            cases = _cases(question, outcomes, host)
            counts.append(len(cases))
            cells.append(_cell(score(question, cases)) if cases else "")
        row.append(_span(counts))
        rows.append([*row, *cells])
    return _table(header, rows)


def _by_program(question: Question, outcomes: Sequence[Outcome]) -> str:
    """Return the scores of one question, program by program."""
    hosts = _hosts([question], outcomes)
    rows = []
    for program in PROGRAMS:
        row = [program]
        for host in hosts:
            cases = _cases(question, outcomes, host, program)
            row.append(f"{score(question, cases).value:.2f}" if cases else "")
        rows.append(row)
    return _table(["program", *(NAMES[host] for host in hosts)], rows)


def _hosts(questions: Sequence[Question], outcomes: Sequence[Outcome]) -> list[str]:
    """Return the hosts that have a case of any of the questions."""
    hosts = []
    for host in NAMES:
        if any(_cases(question, outcomes, host) for question in questions):
            hosts.append(host)
    return hosts


def _cases(
    question: Question, outcomes: Sequence[Outcome], host: str, program: str = ""
) -> list[float]:
    """Return the cases of a question on a host, of one program or of all."""
    cases: list[float] = []
    for outcome in outcomes:
        if outcome.job.host == host and program in ("", outcome.job.program):
            cases += outcome.card.cases.get(question, [])
    return cases


def _cell(result: Score) -> str:
    """Write a score with its interval; the largest of some numbers has none."""
    if result.interval is None:
        return f"{result.value:.0e}" if result.value else "0"
    low, high = result.interval
    return f"{result.value:.2f} [{low:.2f}, {high:.2f}]"


def _span(counts: Sequence[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


def _refusals(outcomes: Sequence[Outcome]) -> str:
    """Return the analyses that refused a model, with the reason and the models."""
    rows = _refusal_rows(outcomes)
    return _table(["analysis", "what it says", "models"], rows) if rows else ""


def _refusal_rows(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Return each refusal once, with all models that it is of."""
    models: dict[tuple[str, str], list[str]] = {}
    for outcome in outcomes:
        for analysis, reason in outcome.refused.items():
            known = models.setdefault((analysis, reason), [])
            known.append(f"{outcome.job.program} in {NAMES[outcome.job.host]}")
    rows = []
    for (analysis, reason), names in models.items():
        rows.append([analysis, reason, ", ".join(names)])
    return rows


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_line(header), "|" + "---|" * len(header)]
    lines += map(_line, rows)
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
