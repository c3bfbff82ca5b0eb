"""Batching: which texts go through the model together, and whether they may.

Padding is not safe in every model, so it is tried on the model itself: texts of different lengths together and apart. A
model that gives a text other states in a batch than alone is run text by text.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hiddenscope.anatomy import probe, shown
from hiddenscope.passes import Batch, Encoded, Subject, landings, make_batch, run, together
from hiddenscope.states import Pair, States

LENGTHS = (3, 11)
TARGETS = (6, 2)
# What rounding may make of a token's state, as a share of its norm, at depth k: ROOM units in the last place times the
# root of k + 1, but never more than MOST of it (bfloat16 has few places), or a few times what two copies differ by.
ROOM, MOST, COPIES = 64, 0.05, 8


@dataclass(frozen=True)
class Batching:
    """Whether padded batches give each text what it gets alone, and how that was found.

    `worst` is the largest difference that was seen, as a share of what rounding may make. `masked` says whether texts
    of one length must carry a mask although it hides nothing; without one a GPU need not wait for a look at it.
    `turn` is the length beyond which every text of a batch is computed otherwise, if there is one.
    """

    padded: bool
    worst: float
    why: str
    masked: bool = True
    turn: int | None = None


def plan(
    lengths: Sequence[int], budget: int, *, padded: bool = True, turn: int | None = None, another: int = 64
) -> list[list[int]]:
    """Batches of texts of about one length, each of at most `budget` tokens with its padding; the longest come first.

    Texts of up to `turn` tokens and longer ones are kept apart. A batch costs as much as `another` tokens, whatever is
    in it, so none is filled up with more padding than that.

    >>> plan([2, 9, 3, 8], budget=18)
    [[1, 3], [2, 0]]
    >>> plan([100, 100, 10, 10], budget=1000)
    [[0, 1], [2, 3]]
    >>> plan([2, 9], budget=18, padded=False)
    [[1], [0]]
    """
    batches: list[list[int]] = []
    padding = 0
    for text in sorted(range(len(lengths)), key=lambda text: -lengths[text]):
        longest = lengths[batches[-1][0]] if batches else 0
        padding += longest - lengths[text]
        fits = batches and (len(batches[-1]) + 1) * longest <= budget and padding <= another
        if fits and padded and (turn is None or lengths[text] > turn or longest <= turn):
            batches[-1].append(text)
        else:
            batches.append([text])
            padding = 0
    return batches


def check(model: Subject) -> Batching:
    """Run texts of different lengths together and apart, and compare every state of every token."""
    window = model.encoder.window or max(LENGTHS)
    encoded = _trial(model, [min(length, window) for length in LENGTHS], seed=2)
    targets = _trial(model, list(TARGETS), seed=3) if len(model.anatomy.stacks) > 1 else None
    try:
        mixed = _captured(model, encoded, targets)
        worst = max(_off(model, mixed, encoded, targets, text) for text in range(len(LENGTHS)))
    except Exception as error:
        return Batching(False, math.inf, f"a padded batch stopped with {type(error).__name__}: {error}")
    masked = not _same_without_mask(model)
    config: Any = getattr(model.module, "config", None)
    if getattr(config, "attention_type", None) == "block_sparse":  # BigBird
        return Batching(False, worst, "its sparse attention depends on how long the longest text of a batch is", masked)
    if worst <= 1:
        why = "texts padded on the right gave the same states as alone, within rounding"
        return Batching(True, worst, why, masked, _turn(config))
    why = f"texts in a padded batch came out {worst:,.0f} times farther off than rounding may"
    return Batching(False, worst, why, masked)


def _turn(config: Any) -> int | None:
    """The length beyond which rotary positions are scaled (LongRoPE): one such text does it to its whole batch."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    known = rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return known if isinstance(known, int) else None


def _same_without_mask(model: Subject) -> bool:
    """Whether a mask that hides nothing changes nothing, bit for bit, even where the text holds the padding token."""
    texts = probe(model.module, 2, min(6, model.encoder.window or 6), seed=5)
    texts[:, 1] = model.encoder.pad
    targets = Batch.of([[1, 2], [3, 4]], 0, model.device) if len(model.anatomy.stacks) > 1 else None
    batch = Batch.of(texts.tolist(), model.encoder.pad, model.device, targets)
    tap = model.anatomy.stacks[0].proof.taps[-1]
    given = [batch.arguments(model.module, masked=masked) for masked in (True, False)]
    with_mask, without = (shown(model.module, inputs, tap, texts.shape[1]) for inputs in given)
    return torch.equal(with_mask, without)


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
        a, b = one.values[row].double(), other.values[row].double()
        norm = a.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        copies = (a - floor.values[row].double()).norm(dim=-1) / norm if floor is not None else torch.zeros_like(norm)
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
