"""Batching: which texts go through the model together, and whether they may.

Padding is not safe in every model, so it is tried on the model itself: texts of different lengths together and apart. A
model that gives a text other states in a batch than alone is run text by text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hiddenscope.anatomy import probe
from hiddenscope.errors import Error
from hiddenscope.passes import Encoded, Subject, landings, make_batch, run, together
from hiddenscope.states import Pair, States

LENGTHS = (3, 11)
TARGETS = (6, 2)
# What rounding may make of a token's state, as a share of its norm, at depth k: ROOM units in the last place times the
# root of k + 1, but never more than MOST of it (bfloat16 has few places), or a few times what two copies differ by.
ROOM, MOST, COPIES = 64, 0.05, 8


@dataclass(frozen=True)
class Batching:
    """Whether padded batches give each text what it gets alone, and how that was found.

    `worst` is the largest difference that was seen, as a share of what rounding may make.
    """

    padded: bool
    worst: float
    why: str


def plan(lengths: Sequence[int], budget: int, *, padded: bool = True) -> list[list[int]]:
    """Batches of texts of about one length, each of at most `budget` tokens with its padding; the longest come first.

    >>> plan([2, 9, 3, 8], budget=18)
    [[1, 3], [2, 0]]
    >>> plan([2, 9], budget=18, padded=False)
    [[1], [0]]
    """
    batches: list[list[int]] = []
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        if batches and padded and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(text)
        else:
            batches.append([text])
    return batches


def check(model: Subject) -> Batching:
    """Run texts of different lengths together and apart, and compare every state of every token."""
    window = model.encoder.window or max(LENGTHS)
    encoded = _trial(model, [min(length, window) for length in LENGTHS], seed=2)
    targets = _trial(model, list(TARGETS), seed=3) if len(model.anatomy.stacks) > 1 else None
    try:
        mixed = _captured(model, encoded, targets)
        worst = max(_off(model, mixed, encoded, targets, text) for text in range(len(LENGTHS)))
    except (RuntimeError, ValueError, IndexError, Error) as error:
        return Batching(False, math.inf, f"a padded batch stopped with {type(error).__name__}: {error}")
    if worst <= 1:
        return Batching(True, worst, "texts padded on the right gave the same states as alone, within rounding")
    return Batching(False, worst, f"texts in a padded batch came out {worst:,.0f} times farther off than rounding may")


def _off(model: Subject, mixed: Sequence[States], encoded: Encoded, targets: Encoded | None, text: int) -> float:
    """How far one text of a mixed batch is off what it gives alone; two copies of it show what rounding alone does."""
    one = Encoded(None, (encoded.ids[text],))
    aim = targets and Encoded(None, (targets.ids[text],))
    alone = _captured(model, one, aim)
    batched = [part.of(text) for part in mixed]
    worst = max(map(disagreement, alone, batched))
    if worst <= 1:
        return worst
    double = _captured(model, Encoded(None, one.ids * 2), aim and Encoded(None, aim.ids * 2))
    return max(map(disagreement, alone, batched, [part.of(0) for part in double]))


def disagreement(one: States, other: States, floor: States | None = None) -> float:
    """The largest difference between two computations of the same states, as a share of what rounding may make.

    `floor` is the first again, run in two copies, which differs from it by nothing but rounding.
    """
    unit = min(ROOM * torch.finfo(one.values.dtype).eps, MOST)
    worst = 0.0
    for row, site in enumerate(one.sites):
        depth = len(one.sites) if site.layer is None else site.layer
        a, b = one.values[row].float(), other.values[row].float()
        norm = a.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
        copies = (a - floor.values[row].float()).norm(dim=-1) / norm if floor is not None else torch.zeros_like(norm)
        allowed = (COPIES * copies).clamp_min(unit * math.sqrt(depth + 1))
        worst = max(worst, ((a - b).norm(dim=-1) / norm / allowed).max().item())
    return worst


def _trial(model: Subject, lengths: Sequence[int], seed: int) -> Encoded:
    ids = probe(model.module, len(lengths), max(lengths), seed=seed).tolist()
    return Encoded(None, tuple(tuple(row[:length]) for row, length in zip(ids, lengths, strict=True)))


def _captured(model: Subject, encoded: Encoded, targets: Encoded | None) -> list[States]:
    """The layers of one pass over the texts, stack by stack."""
    texts = range(len(encoded.ids))
    landed = landings(model, model.anatomy.select("layer.*"), encoded, targets)
    run(model, make_batch(model, encoded, targets, texts), texts, landed)
    states = together(landed)
    return [states.encoder, states.decoder] if isinstance(states, Pair) else [states]
