"""The lab of known truth: programs are what they say, models are their programs, and
analyses find in them what is there.
"""

import json
import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.causes.wiring import Wiring
from hiddenscope.errors import TextError
from hiddenscope.testing import tiny_model
from labs.truth import wires
from labs.truth.__main__ import main
from labs.truth.circuit import circuit_of
from labs.truth.eap_ig import eap_ig
from labs.truth.exchange import Component
from labs.truth.hosts import HOSTS, compile_into
from labs.truth.outputs import check_outputs
from labs.truth.program import ASK, START
from labs.truth.programs import PROGRAMS
from labs.truth.report import report
from labs.truth.runs import Job, Outcome, require_program, run
from labs.truth.save import save
from labs.truth.scores import (
    attention,
    contributions,
    drift,
    edges,
    lens,
    maps,
    patch,
    probe,
    steer,
    visibility,
)
from labs.truth.tally import Question, Scorecard, score
from labs.truth.train import ACCURACY, Trainer
from labs.truth.wires import Edge, declared_edges
from tests.slices import sliced

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


@pytest.mark.parametrize(("name", "host"), [("depth", "plain"), ("induction", "gpt2")])
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


def test_a_circuit_says_which_operand_reads_what() -> None:
    edges_of = declared_edges(circuit_of(PROGRAMS["induction"]()))
    before, output = "layer.1.attn.head.0", "layer.2.attn.head.0"
    assert edges_of[Edge(before, "layer.2.attn.k.0")] == ["before"]
    assert edges_of[Edge("layer.0", "layer.2.attn.q.0")] == ["token"]
    assert edges_of[Edge("layer.0", "layer.2.attn.k.0")] == ["position"]
    assert edges_of[Edge(output, "logits")] == ["output"]
    assert Edge(before, "layer.2.attn.v.0") not in edges_of


def test_a_program_says_what_one_edge_does() -> None:
    program = PROGRAMS["maximum"]()
    circuit = circuit_of(program)
    clean, corrupt = program.input_of("131"), program.input_of("431")
    donor = program.run(clean)

    def answer(reader: str) -> object:
        edge = Edge("layer.0", f"layer.1.attn.{reader}.0")
        return wires.with_edge(circuit, edge, corrupt, donor)["output"][-1]

    # With the keys of 131 the head looks at the 3; with its values it finds a 1.
    assert (answer("k"), answer("v")) == ("3", "1")
    # With the keys of 331 it looks at two digits, and finds a 4 and a 3.
    donor = program.run(program.input_of("331"))
    with pytest.raises(ValueError, match="2 values at once"):
        answer("k")


@pytest.mark.parametrize(("name", "host"), [("depth", "plain"), ("sort", "gpt2")])
def test_edges_have_the_effects_of_the_program(
    name: str, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edges, "PAIRS", 2)
    card = Scorecard()
    edges.score_edges(compile_into(host, PROGRAMS[name]()), card)
    for question in (
        edges.RIGHT,
        edges.ranked(edges.EXACT),
        edges.precise(edges.EXACT),
        edges.enough(),
        edges.NEEDED,
    ):
        assert card.cases[question] == [1.0] * 2, question.asked
    assert max(card.cases[edges.OUTSIDE]) < 1e-3
    published = edges.ranked("EAP-IG, own implementation")
    assert (published in card.cases) == (host == "gpt2")


def test_edges_of_a_host_that_norms_its_sums_are_refused() -> None:
    outcome = run(Job("maximum", "bert"), scores=["edges"])
    assert "norms the sum of its parts" in outcome.refused["edges"]
    assert "norms the sum of its parts" in report([outcome])


def test_precision_shares_a_tie_at_the_border() -> None:
    is_true = np.array([True, True, False, False])
    assert edges.precision(is_true, np.array([2.0, 1, 1, 0])) == 0.75
    assert edges.precision(is_true, np.array([3.0, 2, 1, 0])) == 1.0
    assert edges.precision(is_true, np.zeros(4)) == 0.5


@pytest.mark.parametrize("reader", ["layer.2.attn.q.1", "layer.2.mlp", "logits"])
def test_a_published_estimate_is_the_slope_of_an_edge(reader: str) -> None:
    module: Any = tiny_model("gpt2").double()
    clean, corrupt = [5, 6, 7], [5, 9, 7]
    scores = eap_ig(module, clean, corrupt, 11, 12, steps=1)
    wiring = Wiring.of(hs.load((module, None)))
    writers, readers = map(str, wiring.writers), map(str, wiring.readers)
    place = [*writers].index("layer.1.mlp"), [*readers].index(reader)
    outputs = [_differences(module, ids, reader) for ids in (clean, corrupt)]
    change = outputs[0][1] - outputs[1][1]
    step = 1e-4
    ahead, _ = _differences(module, corrupt, reader, step * change)
    behind, _ = _differences(module, corrupt, reader, -step * change)
    slope = (ahead - behind) / (2 * step) / (outputs[0][0] - outputs[1][0])
    assert np.isnan(scores).sum() == (~wiring.possible).sum()
    assert scores[place] == pytest.approx(float(slope), rel=1e-5)


def _differences(
    module: Any, ids: list[int], reader: str, change: Any = 0.0
) -> tuple[Any, Any]:
    """Return the logit difference, and what the first MLP writes.

    A reader in the second block, or the logits, reads something besides.
    """
    first, second = module.transformer.h[:2]
    width = module.config.n_embd // module.config.n_head
    kept: list[Any] = []
    heard: list[Any] = []

    def add(norm: Any, inputs: Any) -> Any:
        return (inputs[0] + change,)

    def listen(norm: Any, inputs: Any, output: Any) -> None:
        heard[:] = [norm.forward(inputs[0] + change)]

    def put(projection: Any, inputs: Any, output: Any) -> Any:
        output = output.clone()
        columns = slice(width, 2 * width)
        output[..., columns] = projection.forward(heard[0])[..., columns]
        return output

    norms = {"layer.2.mlp": second.ln_2, "logits": module.transformer.ln_f}
    hooks = [first.mlp.register_forward_hook(lambda *called: kept.append(called[2]))]
    if reader in norms:
        hooks.append(norms[reader].register_forward_pre_hook(add))
    else:
        hooks.append(second.ln_1.register_forward_hook(listen))
        hooks.append(second.attn.c_attn.register_forward_hook(put))
    with torch.no_grad():
        logits = module(torch.tensor([ids])).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return logits[11] - logits[12], kept[0]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask about fewer cases than `make truth` does."""
    monkeypatch.setattr(attention, "INPUTS", 3)
    monkeypatch.setattr(contributions, "PAIRS", 3)
    monkeypatch.setattr(lens, "INPUTS", 5)
    monkeypatch.setattr(steer, "CASES", 4)
    monkeypatch.setattr(steer, "STEERED_CASES", 1)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    ("name", "host"), [("depth", "plain"), ("skip_trigram", "gpt2")]
)
def test_analyses_find_what_is_there(name: str, host: str) -> None:
    known = compile_into(host, PROGRAMS[name]())
    card = Scorecard()
    lens.score_lens(known, card)
    attention.score_attention(known, card)
    contributions.score_contributions(known, card)
    steer.score_steer(known, card)
    maps.score_maps(known, card)
    for question in (
        lens.READ,
        lens.SETTLED,
        attention.PATTERN,
        contributions.LARGEST,
        contributions.ALONE,
        steer.EXACT,
        steer.REPLACED,
        maps.APART,
    ):
        assert set(card.cases[question]) == {1.0}, question.asked
    assert max(card.cases[contributions.SUM]) < 1e-6


def test_drift_names_the_part_that_was_rewired() -> None:
    card = Scorecard()
    drift.score_drift(compile_into("gpt2", PROGRAMS["depth"]()), card)
    for question in (drift.SITE, drift.ONLY, drift.MODULE, drift.TWO, drift.EQUAL):
        assert set(card.cases[question]) == {1.0}, question.asked


def test_a_probe_reads_what_is_written_and_claims_no_coin() -> None:
    card = Scorecard()
    probe.score_probe(compile_into("gpt2", PROGRAMS["maximum"]()), card)
    assert min(card.cases[probe.READ]) > 0.99
    assert card.cases[probe.COIN] == [0.0]


def test_visibility_is_zero_for_later_tokens() -> None:
    card = Scorecard()
    visibility.score_visibility(compile_into("plain", PROGRAMS["maximum"]()), card)
    later, read = 0, 0
    for question, cases in card.cases.items():
        if "later token" in question.asked:
            later += 1
            assert max(cases) == 0
        if question.asked.endswith("a head of the circuit reads"):
            read += 1
            assert min(cases) == 1
    assert (later, read) == (2, 2)


@pytest.mark.usefixtures("few")
def test_scores_drop_when_a_head_of_the_circuit_is_silent() -> None:
    known = compile_into("gpt2", PROGRAMS["maximum"]())
    module: Any = known.module
    width = module.config.n_embd // module.config.n_head
    with torch.no_grad():
        module.transformer.h[0].attn.c_proj.weight[:width] = 0
    card = Scorecard()
    lens.score_lens(known, card)
    assert sum(card.cases[lens.SETTLED]) == 0
    with pytest.raises(RuntimeError, match="is not its program"):
        require_program(known, check_outputs(known, most=100))


@pytest.mark.parametrize("host", ["bert", "llama"])
def test_a_saved_model_loads_like_any_other(host: str, tmp_path: Path) -> None:
    known = compile_into(host, PROGRAMS["maximum"]())
    save(known, tmp_path)
    model = hs.load(tmp_path)
    run = hs.record(model, "1 3 2", (), logits=True)
    assert run.logits is not None
    assert known.program.vocabulary[run.logits[-1].argmax()] == "3"
    assert model.text_encoder.frame() == ([known.id(START)], [])
    with pytest.raises(TextError, match="Cannot encode the texts: its library stopped"):
        model.capture("1 x")
    declared = json.loads((tmp_path / "circuit.json").read_text())
    assert declared["variables"][-1]["variable"] == "output"


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


def test_a_model_is_scored_in_a_process_of_its_own(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--only", "maximum", "plain", "--workers", "1"]) == 0
    printed = capsys.readouterr()
    assert "1 of 1: maximum in plain" in printed.err
    assert "### drift" in printed.out
