"""The lab of known truth: programs are what they say, models are their programs, and
analyses find in them what is there.
"""

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path

import pytest

import hiddenscope as hs
from tests.slices import sliced
from truth.__main__ import END, MARK, written
from truth.circuit import circuit_of
from truth.exchange import Component
from truth.hosts import HOSTS, compile_into
from truth.known import KnownModel
from truth.outputs import check_outputs
from truth.program import ASK, START
from truth.programs import PROGRAMS
from truth.report import report
from truth.runs import Job, Outcome
from truth.save import save
from truth.scores import patch
from truth.tally import Question, Scorecard, score
from truth.train import ACCURACY, Trainer

# What each program says at its last position, in plain Python.
Letters = Sequence[str]


def followed(letters: Letters) -> str:
    *before, last = letters
    for place in reversed(range(len(before))):
        if before[place] == last:
            return letters[place + 1]
    return START


def skipped(letters: Letters) -> str:
    *before, last = letters
    if last == "c" and "a" in before:
        return "x"
    return "y" if last == "d" and "b" in before else "-"


EXPECTED: dict[str, Callable[[Letters], object]] = {
    "reverse": lambda letters: letters[0],
    "histogram": lambda letters: letters.count(letters[-1]),
    "fraction": lambda letters: str(Fraction(letters.count("x"), len(letters))),
    "sort": lambda letters: max(letters),
    "induction": followed,
    "depth": lambda letters: letters.count("(") - letters.count(")"),
    "maximum": lambda letters: max(letters),
    "parity": lambda letters: "odd" if letters.count("1") % 2 else "even",
    "modular_sum": lambda letters: sum(map(int, letters)) % 3,
    "skip_trigram": skipped,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_says_what_plain_python_says(name: str) -> None:
    program = PROGRAMS[name]()
    for tokens in program.draw(200):
        letters = [token for token in tokens[1:] if token != ASK]
        assert program.run(tokens)["output"][-1] == EXPECTED[name](letters)


def test_question_marks_are_answered_one_by_one() -> None:
    for name, wanted in (("reverse", "cab"), ("sort", "abc")):
        program = PROGRAMS[name]()
        tokens = program.input_of("bac")
        answers = program.run(tokens)["output"]
        assert "".join(answers[place] for place in program.answers(tokens)) == wanted


@pytest.mark.parametrize(
    ("name", "host"),
    sliced([(name, host) for name in PROGRAMS for host in HOSTS], 8),
)
def test_a_compiled_model_is_its_program(name: str, host: str) -> None:
    known = compile_into(host, PROGRAMS[name]())
    outputs = check_outputs(known, most=300)
    assert outputs.wrong == 0
    assert outputs.logit_error < known.program.tolerance
    assert outputs.leak < 0.01


def test_a_circuit_says_who_writes_and_who_reads() -> None:
    circuit = circuit_of(PROGRAMS["induction"]())
    rows = {row["variable"]: row for row in circuit.declared()}
    assert rows["before"]["writer"] == "layer.1.attn.head.0"
    assert rows["before"]["readers"] == ["layer.2.attn.head.0"]
    assert rows["output"]["first_site"] == "layer.2.mid"
    assert rows["output"]["readers"] == ["unembedding"]


def test_a_state_that_was_read_before_the_site_is_not_read_again() -> None:
    program = PROGRAMS["maximum"]()
    circuit = circuit_of(program)
    clean, corrupt = program.input_of("131"), program.input_of("431")
    donor = program.run(clean)
    before = circuit.patched("layer.0", 1, corrupt, donor)
    after = circuit.patched("layer.1.mid", 1, corrupt, donor)
    assert before["output"][-1] == "3"
    assert after["output"][-1] == "4"


@pytest.mark.parametrize("host", ["plain", "gpt2"])
@pytest.mark.parametrize("name", ["maximum", "depth", "induction"])
def test_patching_gives_every_state_and_part_its_effect(
    name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch, "PAIRS", 4)
    card = Scorecard()
    patch.score_patch(compile_into(host, PROGRAMS[name]()), card)
    assert card.cases[patch.STATES] == [1.0] * 4
    assert card.cases[patch.PARTS] == [1.0] * 4
    if host == "plain":
        assert max(card.cases[patch.OUTSIDE]) == 0
    assert max(card.cases[patch.OUTSIDE]) < 1e-4


@pytest.mark.parametrize("host", ["gpt2", "opt", "bert", "llama"])
def test_a_saved_model_loads_like_any_other(host: str, tmp_path: Path) -> None:
    known = compile_into(host, PROGRAMS["maximum"]())
    save(known, tmp_path)
    model = hs.load(tmp_path)
    run = hs.record(model, "1 3 2", (), logits=True)
    assert run.logits is not None
    assert known.program.vocabulary[run.logits[-1].argmax()] == "3"
    declared = json.loads((tmp_path / "circuit.json").read_text())
    assert declared["variables"][-1]["variable"] == "output"


def test_what_an_mlp_writes_is_exchanged_together() -> None:
    trainer = Trainer(PROGRAMS["modular_sum"]())
    assert trainer.variables[Component(0, None)] == ["ones", "twos"]


def test_interchange_wants_the_answers_of_the_exchanged_program() -> None:
    trainer = Trainer(PROGRAMS["maximum"]())
    head = Component(0, 0)
    assert trainer.variables == {head: ["output"]}
    exchange = trainer._draw_interchange(head)
    for row, (base, donor) in enumerate(
        zip(exchange.bases, exchange.donors, strict=True)
    ):
        (position,) = exchange.is_exchanged[row].nonzero().flatten().tolist()
        answers = trainer.program.run(base)["output"]
        answers[position] = trainer.program.run(donor)["output"][position]
        assert exchange.wanted[row] == answers[1:]


def test_everything_outside_the_circuit_is_exchanged_at_once() -> None:
    trainer = Trainer(PROGRAMS["maximum"]())
    exchange = trainer._draw_outside(1.0)
    assert exchange.components == trainer.others
    assert len(trainer.others) == 9
    assert exchange.is_exchanged.all()
    assert exchange.wanted == exchange.plain


def test_a_model_that_has_learned_nothing_fails_its_examination() -> None:
    trainer = Trainer(PROGRAMS["maximum"]())
    card = trainer.examine(Component(0, 0), batches=1)
    assert score(ACCURACY, card.cases[ACCURACY]).value < 0.5
    assert not trainer._is_passed()


def test_scores_are_pooled_by_host_with_intervals() -> None:
    share = Question("patch", "effects", "0")
    largest = Question("patch", "errors", "0", "largest")
    first, second = (Outcome(Job(name, "plain")) for name in ("maximum", "depth"))
    first.card.cases = {share: [1.0] * 10, largest: [0.0, 2e-3]}
    second.card.cases = {share: [1.0] * 8 + [0.0] * 2, largest: [1e-3]}
    second.refused["lens"] = "It has no head."
    tables = report([first, second])
    assert "| effects | 0 | 20 | 0.90 [0.70, 0.97] |" in tables
    assert "| errors | 0 | 3 | 2e-03 |" in tables
    assert "| lens | It has no head. | depth in plain |" in tables


def test_means_have_the_interval_of_their_cases() -> None:
    mean = score(Question("patch", "AUROC", "0.5", "mean"), [0.5, 1.0] * 50)
    assert mean.interval is not None
    low, high = mean.interval
    assert math.isclose(mean.value, 0.75)
    assert 0.69 < low < 0.71 < 0.79 < high < 0.81


def test_tables_are_written_between_the_marks() -> None:
    page = f"before\n{MARK}old\n{END}after\n"
    assert written(page, "new") == f"before\n{MARK}\nnew\n{END}after\n"


def test_a_known_model_names_its_tokens() -> None:
    known = compile_into("plain", PROGRAMS["maximum"]())
    assert isinstance(known, KnownModel)
    assert known.ids([START, "2"]) == [0, 2]
