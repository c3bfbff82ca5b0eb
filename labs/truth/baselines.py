"""The same questions put to TransformerLens, on the same models and pairs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from labs.bench.peers.environments import PEERS, ROOT, set_up, variables
from labs.truth.cache import trained
from labs.truth.hosts import compile_into
from labs.truth.known import KnownModel
from labs.truth.program import START
from labs.truth.programs import PROGRAMS
from labs.truth.runs import Job
from labs.truth.save import tokenizer_of
from labs.truth.scores import edges, patch
from labs.truth.scores.edges import TrueEdges
from labs.truth.scores.pairs import Pair, draw_pairs
from labs.truth.tally import Question, Scorecard
from labs.truth.wires import declared_edges

LIBRARY = "TransformerLens"

# What TransformerLens can build a bridge to, and a folder can name.
SUPPORTED = ("gpt2", "opt", "llama", "trained")
# Of OPT it does not tell what each head writes, and so has no edges. Of a trained model
# it is not known which operand of a head reads what.
WITH_EDGES = ("gpt2", "llama")


def score_with_transformer_lens(jobs: Sequence[Job]) -> Iterator[tuple[Job, Scorecard]]:
    """Yield what TransformerLens scores on each model that it supports."""
    failed = set_up(PEERS)
    if failed:
        raise RuntimeError(f"TransformerLens is {failed}")
    with tempfile.TemporaryDirectory() as folder:
        command = [PEERS.python, "-m", "labs.truth.transformer_lens_worker"]
        worker = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=variables(),
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        for job in jobs:
            if job.host not in SUPPORTED:
                continue
            known = _known(job)
            asked = _Asked.of(known)
            path = Path(folder, f"{job.host}-{job.program}")
            module: Any = known.module
            module.save_pretrained(path)
            # TransformerLens tries the tokenizer on words that the program has not.
            tokenizer_of(known.program, unknown=START).save_pretrained(path)
            worker.stdin.write(json.dumps(asked.request(path)) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
            if not answer:
                raise RuntimeError(f"TransformerLens stopped at {job}")
            print(f"TransformerLens: {job.program} in {job.host}", file=sys.stderr)
            yield job, asked.score(json.loads(answer))
        worker.stdin.close()
        worker.wait()


def _known(job: Job) -> KnownModel:
    if job.host == "trained":
        return trained(job.program).known
    return compile_into(job.host, PROGRAMS[job.program]())


@dataclass(frozen=True)
class _Asked:
    """What is asked of one model: pairs to patch, and pairs whose edges are told."""

    known: KnownModel
    pairs: list[Pair]
    edges: list[TrueEdges]

    @classmethod
    def of(cls, known: KnownModel) -> _Asked:
        pairs = draw_pairs(known.program, patch.PAIRS)
        told = []
        if known.host in WITH_EDGES:
            told = edges.pairs_with_truth(known)
        return cls(known, pairs, told)

    def request(self, path: Path) -> dict[str, Any]:
        """Return the job, as it is written to the worker."""
        edge_pairs = []
        for true in self.edges:
            circuit = [list(edge) for edge in declared_edges(self.known.circuit)]
            edge_pairs.append({**self._inputs(true.pair), "circuit": circuit})
        request = {
            "folder": str(path),
            "sites": self.known.sites,
            "parts": patch.parts_of(self.known),
            "pairs": [self._inputs(pair) for pair in self.pairs],
            "edge_pairs": edge_pairs,
        }
        if self.edges:
            request["writers"] = self.edges[0].writers
            request["readers"] = self.edges[0].readers
        return request

    def _inputs(self, pair: Pair) -> dict[str, Any]:
        known = self.known
        return {
            "clean": known.ids(pair.clean),
            "corrupt": known.ids(pair.corrupt),
            "answer": known.id(pair.answer),
            "other": known.id(pair.other),
        }

    def score(self, answers: dict[str, list[dict[str, Any]]]) -> Scorecard:
        """Put the questions of patching and of edges to another library's numbers."""
        card = Scorecard()
        for pair, answer in zip(self.pairs, answers["parts"], strict=True):
            measured = {name: np.array(numbers) for name, numbers in answer.items()}
            _score_patch(card, self.known, pair, measured)
        for true, answer in zip(self.edges, answers["edges"], strict=True):
            edges.score_ranks(card, LIBRARY, true, np.array(answer["scores"]))
            edges.score_kept(card, f" by {LIBRARY}", answer["kept"])
        return card


def _score_patch(
    card: Scorecard, known: KnownModel, pair: Pair, measured: dict[str, Any]
) -> None:
    parts = patch.parts_of(known)
    truth = patch.state_effects(known, pair)
    card.count(_theirs(patch.STATES), patch.is_right(measured["states"], truth))
    patch.rank(card, _theirs(patch.RANKED), truth, measured["states"])
    estimates = measured["state_estimates"]
    patch.rank(card, _theirs(patch.ESTIMATED), truth, estimates)
    is_near = patch.is_right(estimates, truth, patch.FAR)
    card.count(_theirs(patch.NEAR), is_near)
    truth = patch.part_effects(known, pair, parts)
    card.count(_theirs(patch.PARTS), patch.is_right(measured["parts"], truth))
    patch.rank(card, _theirs(patch.RANKED_PARTS), truth, measured["parts"])
    estimates = measured["part_estimates"]
    patch.rank(card, _theirs(patch.ESTIMATED_PARTS), truth, estimates)


def _theirs(question: Question) -> Question:
    """Return a question as it is put to TransformerLens."""
    name = question.analysis.replace("patch", f"patch by {LIBRARY}")
    return replace(question, analysis=name, by_program=False)
