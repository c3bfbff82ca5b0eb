"""The engine of the lens: the model's own unembedding applied to states, and what is
measured of the logits.

The logits of all layers and tokens are never held together. On a CPU some 500 rows are
taken through 2,048 words of the vocabulary at a time: a product with many rows reads
the weight seldom, and a block is still in the cache when it is measured. The measures
of the blocks are combined in float64. On a GPU the whole vocabulary is one block, and
nothing waits for a result: all of them are copied to the host at the end.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import NotFinite, SiteError
from hiddenscope.model import Model
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.sites import Site, SitePatterns

Floats: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Part: TypeAlias = tuple[Unembedding, Tensor]
"""States [site, token, width], and the unembedding that reads them."""

# Bytes for a block of logits and a buffer of the same size, on a CPU.
MEMORY = 40 * 2**20
# The same on a GPU: an eighth of what is free there, within these limits.
ON_GPU = (
    512 * 2**20,
    4 * 2**30,
)
WORDS, ROWS = 2048, 512  # of a block, on a CPU
# exp(-80) is nothing beside exp(0) = 1, and still a normal number: CPUs take 50 times
# as long for subnormal ones.
LEAST_EXPONENT = -80.0
LOWEST = -1e6  # stands for a logit of -inf: its probability is zero in any dtype


@dataclass(frozen=True)
class LensSites:
    """Which states are read: whole layers of the stack below the head, always the last
    one, and `final` if chosen.

    `layers` are in order; `chosen` are the sites that the user named.
    """

    layers: tuple[Site, ...]
    final: Site | None
    chosen: tuple[Site, ...]
    causal: bool

    @property
    def last(self) -> Site:
        """The last layer, whose prediction is the model's own."""
        return self.layers[-1]

    @property
    def all(self) -> tuple[Site, ...]:
        """Every site that is read."""
        return self.layers if self.final is None else (*self.layers, self.final)

    @property
    def pattern(self) -> str:
        """The same as a pattern of sites: the anatomy remembers what a pattern selects."""
        return ",".join(map(str, self.all))

    @classmethod
    def of(cls, model: Model, sites: SitePatterns = "layer.*") -> "LensSites":
        """The sites that the patterns name; those that the head does not stand on are
        refused.
        """
        stack = model.anatomy.stacks[-1]
        name = stack.name if model.encoder_decoder else None
        chosen = tuple(
            site for site in model.anatomy.select(sites) if site.stack == name
        )
        inside = [site for site in chosen if site.part]
        if inside or not chosen:
            reason = (
                f"{inside[0]} is inside a block"
                if inside
                else f"the head reads the {name}, and none is there"
            )
            remedy = (
                f"Ask for whole layers{f' of the {name}' if name else ''}, or `final`."
            )
            raise SiteError(
                f"Cannot read {sites} of {model.name} with a lens", reason, remedy
            )
        last = Site(stack.depth, "", name)
        layers = sorted({*(site for site in chosen if site.layer is not None), last})
        final = next((site for site in chosen if site.layer is None), None)
        return cls(tuple(layers), final, chosen, stack.causal)


@dataclass(frozen=True)
class Reading:
    """What was measured of the logits of every site and token: `[site, token, rank]`
    and `[site, token]`.

    `top_ids` are the most probable words of the vocabulary. `target_log_probability`
    and `target_rank`, counted from 1, are those of a target word; NaN and 0 without
    one.
    """

    top_ids: Ints
    probability: Floats
    entropy: Floats
    kl: Floats
    target_log_probability: Floats
    target_rank: Ints

    @classmethod
    def join(cls, readings: Sequence["Reading"], rows: Sequence[Ints]) -> "Reading":
        """The readings of several batches as one; `rows` are the places of each batch's
        tokens among all.
        """
        order = np.argsort(np.concatenate(rows))
        parts = (
            [getattr(reading, field.name) for reading in readings]
            for field in fields(cls)
        )
        return cls(*(np.concatenate(part, axis=1)[:, order] for part in parts))

    def at(self, sites: Sequence[int]) -> "Reading":
        """The same of some sites."""
        return Reading(
            *(getattr(self, field.name)[list(sites)] for field in fields(self))
        )


def read(
    parts: Sequence[Part],
    answer: int,
    *,
    k: int,
    targets: Ints | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> Reading:
    """Read states of one set of tokens, in parts that each have an unembedding of their
    own.

    `answer` is the site, counted through all parts, whose prediction is the model's
    own. `targets` is a word for each token, -1 for none.
    """
    first, states = parts[0]
    sites, tokens = sum(len(values) for _, values in parts), states.shape[1]
    vocabulary = _Vocabulary.of(first, k, targets)
    step = max(1, min(tokens, vocabulary.rows // sites))
    buffers = torch.empty(
        2, sites * step * vocabulary.step, dtype=first.dtype, device=first.device
    )
    wanted = None if targets is None else torch.from_numpy(targets).to(first.device)
    # The second time only if a word that can never be predicted has the logit -inf.
    for lowest in (
        None,
        LOWEST,
    ):
        chunks: list[dict[str, Tensor]] = []
        for start in range(0, tokens, step):
            here = slice(start, min(tokens, start + step))
            rows = [
                (own, own.head_inputs(values[:, here].flatten(0, 1)))
                for own, values in parts
            ]
            shape = sites, here.stop - start
            measures = _Measures(
                shape, answer, k, None if wanted is None else wanted[here].repeat(sites)
            )
            for words in vocabulary.blocks:
                logits, scratch = (
                    _view(buffer, sites * shape[1], words) for buffer in buffers
                )
                _logits(rows, words, logits)
                if lowest is not None:
                    logits.masked_fill_(logits == -torch.inf, lowest)
                measures.add(logits, scratch, words.start)
            chunks.append(
                {
                    name: values.view(*shape, *values.shape[1:])
                    for name, values in measures.combined().items()
                }
            )
            advance(sites * shape[1] if lowest is None else 0)
        columns = {
            name: torch.cat([chunk[name] for chunk in chunks], 1).cpu()
            for name in chunks[0]
        }
        if columns["entropy"].isfinite().all() and columns["kl"].isfinite().all():
            return Reading(**{name: values.numpy() for name, values in columns.items()})
    raise NotFinite(
        "Cannot read the logits of a lens",
        "they hold a NaN or an infinity",
        "Look at the states.",
    )


@dataclass(frozen=True)
class _Vocabulary:
    """The blocks of words that are taken one after another, of `step` words each, and
    how many rows at a time.
    """

    blocks: list[slice]
    step: int
    rows: int

    @classmethod
    def of(
        cls, unembedding: Unembedding, k: int, targets: Ints | None
    ) -> "_Vocabulary":
        """Blocks on a CPU; the block of a target comes first, because its logit is
        compared with all others.
        """
        count, device = unembedding.vocabulary, unembedding.device.type
        first = (
            set()
            if targets is None
            else {int(target) // WORDS for target in targets[targets >= 0]}
        )
        blocked = (
            device == "cpu"
            and unembedding.recipe.method != "whole"
            and k <= WORDS
            and len(first) <= 1
        )
        step = min(WORDS, count) if blocked else count
        rows = _memory(unembedding.device) // (2 * step * unembedding.dtype.itemsize)
        starts = sorted(
            range(0, count, step),
            key=lambda start: blocked and start // WORDS not in first,
        )
        blocks = [slice(start, min(count, start + step)) for start in starts]
        return cls(blocks, step, min(rows, ROWS) if blocked else rows)


def _memory(device: torch.device) -> int:
    """Bytes for a block of logits and its buffer."""
    if device.type != "cuda":
        return MEMORY
    least, most = ON_GPU
    return min(most, max(least, torch.cuda.mem_get_info(device)[0] // 8))


def _view(buffer: Tensor, rows: int, words: slice) -> Tensor:
    count = words.stop - words.start
    return buffer[: rows * count].view(rows, count)


def _logits(rows: Sequence[Part], words: slice, out: Tensor) -> None:
    """The logits [site x token, word] of some words of the vocabulary, part after part."""
    start = 0
    for unembedding, head_inputs in rows:
        unembedding.logits(
            head_inputs, words, out=out[start : start + len(head_inputs)]
        )
        start += len(head_inputs)


class _Measures:
    """What is measured of the logits of some tokens at every site, block after block of
    the vocabulary.

    Within a block, sums over words are relative to its largest logit and in the dtype
    of the logits, which torch adds pairwise; the blocks are combined in float64. The KL
    divergence is a difference of two cross entropies that are computed alike, so that
    it is exactly zero at the answer's own site.
    """

    def __init__(
        self, shape: tuple[int, int], answer: int, k: int, targets: Tensor | None
    ) -> None:
        self.shape, self.answer, self.k, self.targets = shape, answer, k, targets
        self.sums: list[tuple[Tensor, ...]] = []
        self.best, self.top_ids = torch.empty(0), torch.empty(0)
        self.target, self.rank = torch.empty(0), torch.empty(0)

    def add(self, logits: Tensor, scratch: Tensor, start: int) -> None:
        """Measure the logits [site x token, word] of the words from `start` on; they
        and the scratch are used up.
        """
        if self.targets is not None:
            self._compare(logits, scratch, self.targets, start)
        largest = self._keep_best(logits, start)
        centred = logits.sub_(largest)
        exponents = (
            torch.clamp(centred, min=LEAST_EXPONENT, out=scratch)
            if logits.device.type == "cpu"
            else centred
        )
        weights = torch.exp(exponents, out=scratch)
        total = weights.sum(1)
        answer_weights = self._cells(weights)[self.answer].clone()
        mean = weights.mul_(centred).sum(1)
        products = torch.mul(
            self._cells(centred), answer_weights, out=self._cells(scratch)
        )
        self.sums.append((largest[:, 0], total, mean, products.sum(2).flatten()))

    def combined(self) -> dict[str, Tensor]:
        """Every measure over the whole vocabulary, [site x token] and [site x token,
        rank].
        """
        largest, total, mean, cross = (
            torch.stack(parts).double() for parts in zip(*self.sums, strict=True)
        )
        offset = largest - self.best[:, 0].double()
        scale = offset.exp()
        whole = (scale * total).sum(0)
        log_whole = whole.log()
        mean = (scale * (mean + total * offset)).sum(0) / whole
        blocks = len(self.sums)
        answer_scale, answer_total = (
            values.view(blocks, *self.shape)[:, self.answer, None]
            for values in (scale, total)
        )
        cross, offset = (values.view(blocks, *self.shape) for values in (cross, offset))
        expected = (answer_scale * (cross + answer_total * offset)).sum(
            0
        ) / self._cells(whole)[self.answer]
        cross_entropy = self._cells(log_whole) - expected
        relative = (self.best - self.best[:, :1]).double()
        measures = {
            "top_ids": self.top_ids,
            "probability": (relative.exp() / whole[:, None]).float(),
            "entropy": (log_whole - mean).clamp_min(0).float(),
            "kl": (
                (cross_entropy - cross_entropy[self.answer])
                .clamp_min(0)
                .float()
                .flatten()
            ),
        }
        if self.targets is None:
            nothing = torch.full_like(measures["entropy"], torch.nan)
            return measures | {
                "target_log_probability": nothing,
                "target_rank": torch.zeros_like(self.top_ids[:, 0]),
            }
        none = self.targets < 0
        log_probability = (self.target - self.best[:, :1])[:, 0].double() - log_whole
        measures["target_log_probability"] = log_probability.float().masked_fill(
            none, torch.nan
        )
        measures["target_rank"] = (self.rank + 1).masked_fill(none, 0)
        return measures

    def _cells(self, values: Tensor) -> Tensor:
        """Values [site x token, ...] as [site, token, ...]."""
        return values.view(*self.shape, *values.shape[1:])

    def _keep_best(self, logits: Tensor, start: int) -> Tensor:
        """Keep the k top tokens so far, and return the largest logit of each row of
        this block.

        After the first block, most rows have nothing better in most blocks, and `topk`
        costs more than any other step.
        """
        if not self.sums:
            self.best, places = logits.topk(self.k)
            self.top_ids = places + start
            return self.best[:, :1].clone()
        largest = logits.amax(1, keepdim=True)
        rows = (largest[:, 0] > self.best[:, -1]).nonzero()[:, 0]
        best, places = logits[rows].topk(min(self.k, logits.shape[1]))
        best, order = torch.cat([self.best[rows], best], 1).topk(self.k)
        self.best[rows] = best
        self.top_ids[rows] = torch.cat([self.top_ids[rows], places + start], 1).gather(
            1, order
        )
        return largest

    def _compare(
        self, logits: Tensor, scratch: Tensor, targets: Tensor, start: int
    ) -> None:
        """Count the words that have a larger logit than the target, which is in the
        first block.
        """
        if not self.sums:
            self.target = logits.gather(1, (targets - start).clamp_min(0)[:, None])
            self.rank = torch.zeros_like(targets)
        self.rank += torch.gt(logits, self.target, out=scratch).sum(1).long()
