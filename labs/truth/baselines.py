"""The same questions put to TransformerLens, on the same models and pairs."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
from labs.truth.scores import patch
from labs.truth.scores.pairs import Pair, draw_pairs
from labs.truth.tally import Question, Scorecard

# What TransformerLens can build a bridge to, and a folder can name.
SUPPORTED = ("gpt2", "opt", "llama", "trained")


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
            pairs = draw_pairs(known.program, patch.PAIRS)
            path = Path(folder, f"{job.host}-{job.program}")
            module: Any = known.module
            module.save_pretrained(path)
            # TransformerLens tries the tokenizer on words that the program has not.
            tokenizer_of(known.program, unknown=START).save_pretrained(path)
            worker.stdin.write(json.dumps(_request(known, pairs, path)) + "\n")
            worker.stdin.flush()
            answer = worker.stdout.readline()
            if not answer:
                raise RuntimeError(f"TransformerLens stopped at {job}")
            print(f"TransformerLens: {job.program} in {job.host}", file=sys.stderr)
            yield job, _scored(known, pairs, json.loads(answer))
        worker.stdin.close()
        worker.wait()


def _known(job: Job) -> KnownModel:
    if job.host == "trained":
        return trained(job.program).known
    return compile_into(job.host, PROGRAMS[job.program]())


def _request(known: KnownModel, pairs: Sequence[Pair], path: Path) -> dict[str, Any]:
    inputs = []
    for pair in pairs:
        inputs.append(
            {
                "clean": known.ids(pair.clean),
                "corrupt": known.ids(pair.corrupt),
                "answer": known.id(pair.answer),
                "other": known.id(pair.other),
            }
        )
    parts = patch.parts_of(known)
    return {
        "folder": str(path),
        "sites": known.sites,
        "parts": parts,
        "pairs": inputs,
    }


def _scored(
    known: KnownModel, pairs: Sequence[Pair], answers: Sequence[dict[str, Any]]
) -> Scorecard:
    """Put the questions of patching to another library's numbers."""
    card = Scorecard()
    parts = patch.parts_of(known)
    for pair, answer in zip(pairs, answers, strict=True):
        measured = {name: np.array(numbers) for name, numbers in answer.items()}
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
    return card


def _theirs(question: Question) -> Question:
    """Return a question as it is put to TransformerLens."""
    name = question.analysis.replace("patch", "patch by TransformerLens")
    return replace(question, analysis=name, by_program=False)
