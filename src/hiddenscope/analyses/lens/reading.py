"""Reading: what logits say, a few rows at a time, so that those of every layer and token are never held at once."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import e, log2
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import NotFinite
from hiddenscope.passes.tail import Tail

Array: TypeAlias = NDArray[np.float32]
Part: TypeAlias = tuple[Tail, Tensor]

MOST = 40 * 2**20  # bytes for the logits of a chunk and the numbers made of them
BLOCK = 128  # words among which only the best is looked at first
READY = 1024  # rows that are brought as far as the head's product at once
UNSAID = 1e4  # so far below the best, a word has no probability in any dtype


@dataclass(frozen=True)
class Read:
    """What was read of every site and token: `[site, token, rank]` and `[site, token]`.

    `target` is the logarithm of a target's probability and `place` its rank, counted from 1; NaN and 0 without one.
    """

    words: NDArray[np.int64]
    probability: Array
    entropy: Array
    kl: Array
    target: Array
    place: NDArray[np.int64]

    @classmethod
    def empty(cls, sites: int, tokens: int, k: int) -> "Read":
        """Room for so many."""
        cells = (sites, tokens)
        entropy, kl, target = (np.full(cells, np.nan, dtype=np.float32) for _ in range(3))
        words, shares = np.zeros((*cells, k), dtype=np.int64), np.zeros((*cells, k), dtype=np.float32)
        return cls(words, shares, entropy, kl, target, np.zeros(cells, dtype=np.int64))

    def put(self, sites: slice, tokens: slice, found: dict[str, Tensor]) -> None:
        """Keep what one chunk said."""
        for name, values in found.items():
            getattr(self, name)[sites, tokens] = values.cpu().numpy()


def read(
    parts: Sequence[Part],
    answer: int,
    *,
    k: int,
    targets: NDArray[np.int64] | None = None,
    most: int = MOST,
    advance: Callable[[float], None] = lambda amount: None,
) -> Read:
    """Read the states of some parts of the pass, each `[site, token, width]` with the tail that it goes through.

    `answer` is the site, counted through all parts, whose words are the model's own; `targets` is a word for each
    token, -1 for none. The chunks are as large as `most` bytes allow.
    """
    sites, tokens = sum(len(values) for _, values in parts), parts[0][1].shape[1]
    tail = parts[0][0]
    found = Read.empty(sites, tokens, k)
    rows = max(1, most // (2 * tail.words * tail.dtype.itemsize))
    width = max(1, min(tokens, rows // sites))  # tokens of a chunk
    group = width * max(1, READY // (width * sites))
    scratch = _Scratch(rows, tail)
    for start in range(0, tokens, group):
        ready = [(one, _ready(one, values[:, start : start + group])) for one, values in parts]
        for first in range(start, min(tokens, start + group), width):
            here = slice(first, min(tokens, first + width))
            aims = None if targets is None else torch.from_numpy(targets[here])
            own: _Own | None = None
            inside = slice(first - start, here.stop - start)
            for span, logits in _chunks(ready, inside, answer, rows, scratch):
                said, own = _say(logits, k, own, answer - span.start, aims, scratch)
                found.put(span, here, said)
            advance(sites * (here.stop - first))
    return found


def _ready(tail: Tail, values: Tensor) -> Tensor:
    """Every row, near its logits, `[site, token, width]`."""
    made = tail.ready(values.flatten(0, 1))
    return made.view(len(values), values.shape[1], -1)


def _chunks(
    ready: Sequence[Part], tokens: slice, answer: int, rows: int, scratch: "_Scratch"
) -> Iterator[tuple[slice, Tensor]]:
    """The logits `[site, token, word]` of some tokens, in as many runs of sites as it takes; the answer's is first."""
    spans: list[tuple[int, slice, Tail, Tensor]] = []
    begin = 0
    for tail, values in ready:
        count, length = len(values), tokens.stop - tokens.start
        step = max(1, rows // length)
        for end in range(count, 0, -step):
            own = slice(max(0, end - step), end)
            spans.append((begin, own, tail, values))
        begin += count
    spans.sort(key=lambda span: not span[0] + span[1].start <= answer < span[0] + span[1].stop)
    for offset, own, tail, values in spans:
        some = values[own, tokens]
        count = some.shape[0] * some.shape[1]
        flat = tail.logits(some.flatten(0, 1), scratch.logits[:count], scratch.other[:count])
        yield slice(offset + own.start, offset + own.stop), flat.view(*some.shape[:2], -1)


class _Scratch:
    """Memory for the logits of a chunk and for what is made of them, used again and again."""

    def __init__(self, rows: int, tail: Tail) -> None:
        self.logits = torch.empty(rows, tail.words, dtype=tail.dtype, device=tail.device)
        self.other = torch.empty_like(self.logits)


@dataclass
class _Own:
    """The model's own answer for some tokens: the probabilities `[token, word]`, and its cross entropy with itself."""

    probabilities: Tensor
    cross: Tensor


def _say(
    logits: Tensor, k: int, own: _Own | None, answer: int, aims: Tensor | None, scratch: _Scratch
) -> tuple[dict[str, Tensor], _Own]:
    """Everything that is read of the logits `[site, token, word]` of one chunk; they are written over."""
    cells, flat = logits.shape[:2], logits.flatten(0, 1)
    powers = scratch.other[: len(flat)]
    best, words = top(flat, k)
    below = flat.sub_(best[:, :1])  # by how much less than the best
    total, mean = _sums(below, powers)
    if not bool(torch.isfinite(mean).all()):  # a word that is never said has the logit -inf
        total, mean = _sums(below.clamp_(min=-UNSAID), powers)
    if not bool(torch.isfinite(mean).all()):
        raise NotFinite("The logits of a lens", "there is a NaN or an infinity among them", "Look at the states.")
    size = total.log()
    if own is None:
        shares = (powers.view(logits.shape)[answer] / total.view(cells)[answer, :, None]).to(logits.dtype)
        own = _Own(shares, torch.empty(0))
    cross = size.view(cells) - _dots(logits, own.probabilities)
    own.cross = own.cross if own.cross.numel() else cross[answer]
    said = {
        "words": words.view(*cells, k),
        "probability": (best - best[:, :1]).double().exp().div(total[:, None]).view(*cells, k),
        "entropy": (size - mean).clamp_min(0).view(cells),
        "kl": (cross - own.cross).clamp_min(0),
    }
    if aims is not None:
        lower, place = _aimed(below, aims.to(below.device).repeat(cells[0]), powers)
        said |= {"target": (lower - size).view(cells), "place": place.view(cells)}
    return said, own


def top(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best words of each row, in two stages: the best blocks of words first, then the best words in them.

    >>> best, words = top(torch.arange(1000.0)[None], 2)
    >>> best.tolist(), words.tolist()
    ([[999.0, 998.0]], [[999, 998]])
    """
    rows, count = logits.shape
    blocks = count // BLOCK
    if blocks <= k:
        best, words = logits.topk(k)
        return best, words
    whole = logits[:, : blocks * BLOCK].view(rows, blocks, BLOCK)
    chosen = whole.amax(2).topk(k).indices
    among = whole.gather(1, chosen[:, :, None].expand(rows, k, BLOCK)).flatten(1)
    numbers = (chosen[:, :, None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(blocks * BLOCK, count, device=logits.device).expand(rows, -1)
    best, places = torch.cat([among, logits[:, blocks * BLOCK :]], 1).topk(k)
    return best, torch.cat([numbers, rest], 1).gather(1, places)


def _sums(below: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the powers of each row, which are left in `powers`, and the mean of what is below the best."""
    torch.mul(below, log2(e), out=powers).exp2_()  # cheaper than exp
    total = powers.sum(1).double()
    return total, torch.bmm(powers[:, None], below[:, :, None]).view(-1).double() / total


def _dots(logits: Tensor, shares: Tensor) -> Tensor:
    """The mean of each row `[site, token]` under the shares of its token."""
    return torch.stack([logits[:, t] @ shares[t] for t in range(logits.shape[1])], 1).double()


def _aimed(below: Tensor, aims: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """By how much less than the best the target of each row is, and how many words are before it, counted from 1."""
    at = below.gather(1, aims.clamp_min(0)[:, None])
    before = torch.gt(below, at, out=powers).sum(1)
    none = aims < 0
    return at[:, 0].double().masked_fill(none, torch.nan), (before.long() + 1).masked_fill(none, 0)
