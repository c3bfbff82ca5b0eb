"""Variables: how often a subspace that holds nothing is said to hold a variable, and how
often the interval of its accuracy holds the truth.
"""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model
from labs.calibrate.trials import Claim, Experiment, Study, each

# Tokens that answer, that carry a sign, and that mean nothing.
ANSWERS = (11, 12, 13, 14)
SIGNS = range(20, 60)
FILLERS = range(60, 95)
# Pairs that estimate the accuracy on others.
FRESH = 4_000


class Outcome(NamedTuple):
    """Whether anything was found, and whether the interval holds the accuracy."""

    found: float
    held: float


@cache
def _random_model(seed: int) -> hs.Model:
    return hs.load((tiny_model("llama", layers=2, seed=seed), None))


@cache
def _signed_model() -> hs.Model:
    """A model in which two numbers of the last token's embedding decide between two
    answers, by the sign of their sum; the first of them is exchanged.
    """
    module: Any = tiny_model("llama", layers=2)
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.o_proj.weight.mul_(1e-3)
            block.mlp.down_proj.weight.mul_(1e-3)
        generator = torch.Generator().manual_seed(0)
        embeddings = module.model.embed_tokens.weight
        embeddings[:, :2] = 4 * torch.randn(len(embeddings), 2, generator=generator)
        head = module.lm_head.weight
        head[list(ANSWERS[:2])] = 0
        head[ANSWERS[0], :2], head[ANSWERS[1], :2] = 1, -1
    return hs.load((module, None))


def noise(seed: int, sizes: Sequence[int], answers: int, copies: int = 1) -> Outcome:
    """Pairs whose counterfactual is any other answer, whatever their source is."""
    random = np.random.default_rng(seed)
    model = _random_model(seed % 4)
    candidates = ANSWERS[:answers]
    pairs = []
    for group, size in enumerate(sizes):
        for _ in range(size):
            prompt = random.choice(FILLERS, 4).tolist()
            source = prompt[:1] + random.choice(SIGNS, 1).tolist() + prompt[2:]
            answer = _answer(model, prompt, candidates)
            others = [token for token in candidates if token != answer]
            other = int(random.choice(others))
            pairs += [
                hs.Interchange(prompt, source, answer, other, group=group)
            ] * copies
    result = hs.variable(model, pairs, seed=seed)
    found = any(not cell["failed"] for cell in result.facts["cells"])
    return Outcome(float(found), np.nan)


def planted(seed: int, sizes: Sequence[int]) -> Outcome:
    """One of two numbers that decide is exchanged; bases of a group are alike."""
    result = _exchanged(seed, tuple(sizes))
    (cell,) = result.facts["cells"]
    held = cell["low"] <= _truth() <= cell["high"]
    return Outcome(float(not cell["failed"]), float(held))


@cache
def _truth() -> float:
    """Return the accuracy of many fresh pairs."""
    (cell,) = _exchanged(10**6, (1,) * FRESH).facts["cells"]
    return float(cell["value"])


def _exchanged(seed: int, sizes: tuple[int, ...]) -> hs.Result:
    random, model = np.random.default_rng(seed), _signed_model()
    first = model.module.get_input_embeddings().weight[:, 0]  # type: ignore[operator]
    pairs = []
    for group, size in enumerate(sizes):
        base = int(random.choice(SIGNS))
        for _ in range(size):
            filler, other = random.choice(FILLERS, 2, replace=False).tolist()
            source = int(random.choice([token for token in SIGNS if token != base]))
            answer = _answer(model, [filler, base], ANSWERS[:2])
            follows = ANSWERS[int(first[source] < 0)]
            pairs.append(
                hs.Interchange(
                    [filler, base], [other, source], answer, follows, group=group
                )
            )
    row = np.eye(64)[0]
    return hs.variable(model, pairs, sites="layer.1", subspace=row, seed=seed)


def _answer(model: hs.Model, prompt: Sequence[int], candidates: Sequence[int]) -> int:
    with torch.no_grad():
        logits = model.module(input_ids=torch.tensor([list(prompt)])).logits[0, -1]
    return candidates[int(logits[list(candidates)].argmax())]


def sum_up(records: Sequence[Any]) -> Mapping[str, Sequence[float]]:
    """Collect what came of all trials, by claim."""
    return {
        "found": [record.found for record in records if record.held != record.held],
        "held": [record.held for record in records if record.held == record.held],
    }


UNEQUAL = tuple(max(1, 8 // rank) for rank in range(1, 17))
NOISE = {
    "30 pairs, 2 answers": partial(noise, sizes=(1,) * 30, answers=2),
    "30 pairs, 4 answers": partial(noise, sizes=(1,) * 30, answers=4),
    "30 pairs, 4 answers, three times": partial(
        noise, sizes=(1,) * 30, answers=4, copies=3
    ),
    "16 groups of 1 to 8 pairs": partial(noise, sizes=UNEQUAL, answers=3),
    "4 pairs, 3 answers": partial(noise, sizes=(1,) * 4, answers=3),
    "6 pairs, 3 answers": partial(noise, sizes=(1,) * 6, answers=3),
    "6 groups of 4 paraphrases": partial(noise, sizes=(4,) * 6, answers=3),
    "15 groups of 2 paraphrases": partial(noise, sizes=(2,) * 15, answers=3),
}
PLANTED = {
    "30 pairs": (1,) * 30,
    "20 groups of 4 pairs": (4,) * 20,
    "16 groups of 1 to 8 pairs": UNEQUAL,
    "4 pairs": (1,) * 4,
    "6 pairs": (1,) * 6,
    "6 groups of 4 pairs": (4,) * 6,
    "20 groups of 2 pairs": (2,) * 20,
}
STUDY = Study(
    "variable",
    "Pairs of prompts in tiny random models, with counterfactuals at random, at all"
    " sites and two tokens. Then a\nvariable that decides together with another number,"
    " so that exchanging it alone does not always turn the answer;\nthe pairs of a group"
    " share their base.",
    {
        "found": Claim("a variable is found in noise", high=0.05),
        "held": Claim("the interval of the accuracy holds it", 0.93),
    },
    [Experiment(f"noise, {what}", each(trial), sum_up) for what, trial in NOISE.items()]
    + [
        Experiment(f"planted, {what}", each(partial(planted, sizes=sizes)), sum_up)
        for what, sizes in PLANTED.items()
    ],
)
