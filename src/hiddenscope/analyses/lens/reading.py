"""Apply the model's own unembedding to states, and measure the logits.

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
from torch import Tensor

from hiddenscope.errors import NotFinite, SiteError
from hiddenscope.model import Model
from hiddenscope.passes.buffers import block_memory
from hiddenscope.passes.unembed import Unembedding, entry_of
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states.arrays import Bools, Floats32, Ints

Part: TypeAlias = tuple[Tensor, Site]
"""States [site, token, width], and the site as whose states they are read."""

# Bytes for a block of logits and a buffer of the same size, on a CPU.
CPU_MEMORY = 40 * 2**20
# The size of a block on a CPU.
WORDS = 2048
ROWS = 512
# exp(-80) is nothing beside exp(0) = 1, and still a normal number: CPUs take 50 times
# as long for subnormal ones.
SMALLEST_EXPONENT = -80.0
# Words are alike if the top one is likelier than the average by less than this share.
EVEN = 1e-3
# Two words that are equally likely have an entropy of ln 2, and no tie has a lower one.
ENTROPY_OF_TWO = 0.69
# Stands for a logit of -inf: its probability is zero in any dtype.
LOWEST_LOGIT = -1e6


@dataclass(frozen=True)
class LensSites:
    """The states to read: layers and parts of the stack below the head, and `final`.

    `entering` are in order; they are read as if they were the last layer, which is
    always the last of them. `selected` are the sites that the user named.
    """

    entering: tuple[Site, ...]
    final: Site | None
    selected: tuple[Site, ...]
    causal: bool

    @property
    def layers(self) -> tuple[Site, ...]:
        """Return the whole layers, the last one always among them."""
        return tuple(site for site in self.entering if not site.part)

    @property
    def parts(self) -> tuple[Site, ...]:
        """Return the sites inside a block, such as heads."""
        return tuple(site for site in self.entering if site.part)

    @property
    def last(self) -> Site:
        """Return the last layer, whose prediction is the model's own."""
        return self.entering[-1]

    @property
    def all(self) -> tuple[Site, ...]:
        """Return every site that is read."""
        if self.final is None:
            return self.entering
        return (*self.entering, self.final)

    @classmethod
    def of(cls, model: Model, sites: SitePatterns = "layer.*") -> "LensSites":
        """Select sites; refuse those that the head cannot read."""
        stack = model.anatomy.stacks[-1]
        name = stack.name if model.encoder_decoder else None
        selected = tuple(
            site for site in model.anatomy.select(sites) if site.stack == name
        )
        if not model.anatomy.select(sites):
            remedy = "Name at least one, such as 'layer.*'."
            raise SiteError("No sites to read", "the list is empty", remedy)
        # One of another stack says so.
        for site in selected or model.anatomy.select(sites)[:1]:
            entry_of(model.anatomy, site)
        last = Site(stack.depth, "", name)
        entering = {site for site in selected if site.layer is not None} | {last}
        final = next((site for site in selected if site.layer is None), None)
        return cls(tuple(sorted(entering)), final, selected, stack.causal)


@dataclass(frozen=True)
class Reading:
    """Measures of the logits: `top_ids` and `probability` by site, token and rank.

    The others are by site and token. `top_ids` are the most probable words of the
    vocabulary. `target_log_probability` and `target_rank` are those of a target word;
    NaN and 0 without one. The rank is the number of words that are at least as
    probable, the target among them: a word that ties with others is not the best.
    """

    top_ids: Ints
    probability: Floats32
    entropy: Floats32
    kl: Floats32
    target_log_probability: Floats32
    target_rank: Ints

    @classmethod
    def join(cls, readings: Sequence["Reading"], rows: Sequence[Ints]) -> "Reading":
        """Join the readings of several batches.

        `rows` are the places of each batch's tokens among all tokens.
        """
        order = np.argsort(np.concatenate(rows))
        columns = {}
        for field in fields(cls):
            parts = [getattr(reading, field.name) for reading in readings]
            columns[field.name] = np.concatenate(parts, axis=1)[:, order]
        return cls(**columns)

    @property
    def tied(self) -> Bools:
        """Tell where several words share all of the probability alike.

        There the probability of the top one, which is any of them, times the
        exponential of the entropy is 1, the least that it can be.
        """
        ratio = self.probability[:, :, 0] * np.exp(self.entropy)
        tied = ratio <= 1 + EVEN
        return tied & (self.entropy >= ENTROPY_OF_TWO)

    def predicts(self, words: Ints) -> Bools:
        """Tell for each site whether it predicts the word given for each token, and
        not any of several that are alike.
        """
        predicted: Bools = self.top_ids[:, :, 0] == words
        return predicted & ~self.tied

    def at(self, sites: Sequence[int]) -> "Reading":
        """Return the reading of some sites."""
        columns = [getattr(self, field.name) for field in fields(self)]
        return Reading(*(column[list(sites)] for column in columns))


def read_predictions(
    unembedding: Unembedding,
    parts: Sequence[Part],
    answer: int,
    *,
    k: int,
    targets: Ints | None = None,
    advance: Callable[[float], None] = lambda amount: None,
) -> Reading:
    """Read states of one set of tokens.

    `answer` is the site, counted through all parts, whose prediction is the model's
    own. `targets` is a word for each token, -1 for none.
    """
    # A word that can never be predicted has the logit -inf. Then all is read again.
    attempts = ((advance, None), (lambda amount: None, LOWEST_LOGIT))
    for report, lowest in attempts:
        columns = _measure(unembedding, parts, answer, k, targets, report, lowest)
        if (columns["entropy"] + columns["kl"]).isfinite().all():
            return Reading(**{name: part.numpy() for name, part in columns.items()})
    raise NotFinite(
        "Cannot read the logits of a lens",
        "they hold a NaN or an infinity",
        "Look at the states.",
    )


def _measure(
    unembedding: Unembedding,
    parts: Sequence[Part],
    answer: int,
    k: int,
    targets: Ints | None,
    advance: Callable[[float], None],
    lowest: float | None,
) -> dict[str, Tensor]:
    """Measure the logits of all parts; `lowest` takes the place of -inf."""
    device = unembedding.device
    sites = sum(len(values) for values, _ in parts)
    tokens = parts[0][0].shape[1]
    blocks, at_once = _blocks(unembedding, k, targets)
    step = max(1, min(tokens, at_once // sites))
    size = sites * step * max(words.stop - words.start for words in blocks)
    buffers = torch.empty(2, size, dtype=unembedding.dtype, device=device)
    all_targets = None if targets is None else torch.from_numpy(targets).to(device)
    chunks = []
    for start in range(0, tokens, step):
        here = slice(start, min(tokens, start + step))
        shape = sites, here.stop - start
        rows = sites * shape[1]
        chunk_targets = None
        if all_targets is not None:
            chunk_targets = all_targets[here].repeat(sites)
        head_inputs = [
            unembedding.head_inputs(values[:, here].flatten(0, 1), site)
            for values, site in parts
        ]
        measures = _Measures(shape, answer, k, chunk_targets)
        for words in blocks:
            count = words.stop - words.start
            logits, scratch = buffers[:, : rows * count].view(2, rows, count)
            first_row = 0
            for part in head_inputs:
                last_row = first_row + len(part.rows)
                unembedding.logits(part, words, out=logits[first_row:last_row])
                first_row = last_row
            if lowest is not None:
                logits.masked_fill_(logits == -torch.inf, lowest)
            measures.add(logits, scratch, words.start)
        combined = measures.combined()
        chunks.append(
            {
                name: values.view(*shape, *values.shape[1:])
                for name, values in combined.items()
            }
        )
        advance(rows)
    return {
        name: torch.cat([chunk[name] for chunk in chunks], 1).cpu()
        for name in chunks[0]
    }


def _blocks(
    unembedding: Unembedding, k: int, targets: Ints | None
) -> tuple[list[slice], int]:
    """Cut the vocabulary on a CPU; elsewhere it is one block.

    Return the blocks, and how many rows are read at a time. The block of the target
    comes first, because its logit is compared with all others.
    """
    count = unembedding.vocabulary
    target_blocks = set()
    if targets is not None:
        target_blocks.update((targets[targets >= 0] // WORDS).tolist())
    blocked = (
        unembedding.device.type == "cpu"
        and unembedding.recipe.method != "whole"
        and k <= WORDS
        and len(target_blocks) <= 1
    )
    width = min(WORDS, count) if blocked else count
    row_bytes = 2 * width * unembedding.dtype.itemsize
    rows = block_memory(unembedding.device, CPU_MEMORY) // row_bytes
    starts = list(range(0, count, width))
    if blocked:
        rows = min(rows, ROWS)
        starts.sort(key=lambda start: start // WORDS not in target_blocks)
    return [slice(start, min(count, start + width)) for start in starts], rows


class _Measures:
    """Measures of the logits of some tokens, block after block of the vocabulary.

    Within a block, sums over words are relative to its largest logit and in the dtype
    of the logits, which torch adds pairwise; the blocks are combined in float64. The KL
    divergence is a difference of two cross entropies that are computed alike, so that
    it is exactly zero at the answer's own site.
    """

    def __init__(
        self, shape: tuple[int, int], answer: int, k: int, targets: Tensor | None
    ) -> None:
        self.shape = shape
        self.answer = answer
        self.k = k
        self.targets = targets
        self.sums: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        self.best = torch.empty(0)
        self.top_ids = torch.empty(0)
        self.target = torch.empty(0)
        self.rank = torch.empty(0)

    def add(self, logits: Tensor, scratch: Tensor, start: int) -> None:
        """Measure the logits [site x token, word] of the words from `start` on.

        Both the logits and the scratch are overwritten.
        """
        if self.targets is not None:
            # The target is in the first block. Its rank is the number of words whose
            # logit is at least as large.
            if not self.sums:
                places = (self.targets - start).clamp_min(0)
                self.target = logits.gather(1, places[:, None])
                self.rank = torch.zeros_like(self.targets)
            self.rank += torch.ge(logits, self.target, out=scratch).sum(1).long()
        largest = self._keep_best(logits, start)
        centred = logits.sub_(largest)
        exponents = centred
        # A GPU takes no longer for subnormal numbers.
        if logits.device.type == "cpu":
            exponents = torch.clamp(centred, min=SMALLEST_EXPONENT, out=scratch)
        weights = torch.exp(exponents, out=scratch)
        total = weights.sum(1)
        answer_weights = self._cells(weights)[self.answer].clone()
        mean = weights.mul_(centred).sum(1)
        products = torch.mul(
            self._cells(centred), answer_weights, out=self._cells(scratch)
        )
        cross = products.sum(2).flatten()
        self.sums.append((largest[:, 0], total, mean, cross))

    def combined(self) -> dict[str, Tensor]:
        """Return every measure over the whole vocabulary, [site x token, ...]."""
        largest, total, mean, cross = (
            torch.stack(parts).double() for parts in zip(*self.sums, strict=True)
        )
        # The sums of each block are relative to its own largest logit; bring all to the
        # largest of the whole vocabulary.
        offset = largest - self.best[:, 0].double()
        scale = offset.exp()
        whole = (scale * total).sum(0)
        log_whole = whole.log()
        mean = (scale * (mean + total * offset)).sum(0) / whole
        by_block = len(self.sums), *self.shape
        answer_scale = scale.view(by_block)[:, self.answer, None]
        answer_total = total.view(by_block)[:, self.answer, None]
        shifted = cross.view(by_block) + answer_total * offset.view(by_block)
        answer_whole = self._cells(whole)[self.answer]
        expected = (answer_scale * shifted).sum(0) / answer_whole
        # Of each site [site, token], under the answer.
        cross_entropy = self._cells(log_whole) - expected
        kl = cross_entropy - cross_entropy[self.answer]
        relative = (self.best - self.best[:, :1]).double()
        probability = relative.exp() / whole[:, None]
        # Rounding may leave an entropy or a divergence slightly below zero.
        measures = {
            "top_ids": self.top_ids,
            "probability": probability.float(),
            "entropy": (log_whole - mean).clamp_min(0).float(),
            "kl": kl.clamp_min(0).float().flatten(),
        }
        if self.targets is None:
            nothing = torch.full_like(measures["entropy"], torch.nan)
            measures["target_log_probability"] = nothing
            measures["target_rank"] = torch.zeros_like(self.top_ids[:, 0])
            return measures
        without = self.targets < 0
        target_logit = (self.target - self.best[:, :1])[:, 0].double()
        log_probability = (target_logit - log_whole).float()
        measures["target_log_probability"] = log_probability.masked_fill(
            without, torch.nan
        )
        measures["target_rank"] = self.rank.masked_fill(without, 0)
        return measures

    def _cells(self, values: Tensor) -> Tensor:
        """View values [site x token, ...] as [site, token, ...]."""
        return values.view(*self.shape, *values.shape[1:])

    def _keep_best(self, logits: Tensor, start: int) -> Tensor:
        """Keep the top k words so far; return the largest logit of each row here."""
        if not self.sums:
            self.best, places = logits.topk(self.k)
            self.top_ids = places + start
            return self.best[:, :1].clone()
        # After the first block, most rows have nothing better in most blocks, and
        # `topk` costs more than any other step.
        largest = logits.amax(1, keepdim=True)
        rows = (largest[:, 0] > self.best[:, -1]).nonzero()[:, 0]
        best, places = logits[rows].topk(min(self.k, logits.shape[1]))
        best, order = torch.cat([self.best[rows], best], 1).topk(self.k)
        ids = torch.cat([self.top_ids[rows], places + start], 1)
        self.best[rows] = best
        self.top_ids[rows] = ids.gather(1, order)
        return largest
