"""Draws: states with labels whose truth is known, of noise and of a model, and fresh
ones of the same distribution.
"""

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import exp
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from hiddenscope.files import replacing
from hiddenscope.linear import standardised

SITES, WIDTH, FRESH = 6, 64, 400
TOKENS = 4  # of a text
# How far apart the classes are, in standard deviations / 2.
STRENGTHS = (
    0.0,
    0.5,
    1.0,
    1.5,
    2.0,
    3.0,
)
NONE = (0.0,) * SITES  # nothing is planted
FLAT = (1.0,) * SITES
EARLY = (2.0, 1.5, 1.0, 0.5, 0.0, 0.0)
LAST = (0.0, 0.0, 0.0, 0.0, 0.0, 2.0)
STRONG = (2.0, 3.0, 4.0, 6.0, 8.0, 12.0)  # many probes make no error
REAL_SITES = "layer.0,layer.6,layer.12,layer.18,layer.24,layer.30"


class Drawn(NamedTuple):
    """States `[site, row, width]` with targets, and fresh ones; `fresh_targets` are
    P(class 1), or numbers.

    This many rows one after the other are the tokens of one text. Or `groups` has the
    group of each row: the tokens of a text where `as_tokens`, else texts that belong
    together.
    """

    states: torch.Tensor
    targets: torch.Tensor
    fresh: torch.Tensor
    fresh_targets: torch.Tensor
    tokens: int = 1
    groups: tuple[int, ...] | None = None
    as_tokens: bool = False


def noise(seed: int, rows: int, share: float) -> Drawn:
    """Independent sites that tell nothing."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(SITES, rows + FRESH, WIDTH, generator=generator)
    targets = _classes(torch.full((rows,), share), generator)
    return Drawn(
        states[:, :rows], targets, states[:, rows:], torch.full((FRESH,), share)
    )


def planted(seed: int, rows: int, share: float) -> Drawn:
    """Independent sites in which one direction tells the class, from not at all to
    well.
    """
    generator = torch.Generator().manual_seed(seed)
    shares = torch.full((rows,), share)
    targets = torch.cat(
        [_classes(shares, generator), torch.rand(FRESH, generator=generator) < share]
    ).long()
    states = torch.randn(SITES, rows + FRESH, WIDTH, generator=generator)
    states[:, :, 0] += torch.tensor(STRENGTHS)[:, None] * (2 * targets - 1)
    return Drawn(
        states[:, :rows], targets[:rows], states[:, rows:], targets[rows:].float()
    )


def planted_tokens(seed: int, texts: int, share: float) -> Drawn:
    """As `planted`, with texts of several tokens: half of the variance of a token is
    that of its text.
    """
    generator = torch.Generator().manual_seed(seed)
    new = FRESH // TOKENS
    classes = torch.cat(
        [
            _classes(torch.full((texts,), share), generator),
            torch.rand(new, generator=generator) < share,
        ]
    )
    targets = classes.long().repeat_interleave(TOKENS)
    own = torch.randn(SITES, texts + new, WIDTH, generator=generator).repeat_interleave(
        TOKENS, 1
    )
    states = (own + torch.randn(own.shape, generator=generator)) / 2**0.5
    states[:, :, 0] += torch.tensor(STRENGTHS)[:, None] * (2 * targets - 1)
    rows = texts * TOKENS
    return Drawn(
        states[:, :rows],
        targets[:rows],
        states[:, rows:],
        targets[rows:].float(),
        TOKENS,
    )


def zipf_sizes(groups: int) -> list[int]:
    """Group sizes that fall as 1 / rank: a few large ones, and many of one text."""
    return [max(1, round(groups / 4 / (1 + rank))) for rank in range(groups)]


def lognormal_sizes(groups: int) -> list[int]:
    """Lengths of texts as they are distributed in corpora: the quantiles of a lognormal
    distribution.
    """
    places = [(rank + 0.5) / groups for rank in range(groups)]
    return [max(1, round(3 * exp(NormalDist().inv_cdf(place)))) for place in places]


def single_sizes(groups: int) -> list[int]:
    """One text in every group."""
    return [1] * groups


def equal_sizes(groups: int) -> list[int]:
    """Four texts in every group."""
    return [TOKENS] * groups


def grouped(
    seed: int,
    groups: int,
    share: float,
    sizes: Callable[[int], list[int]],
    strengths: Sequence[float],
    as_tokens: bool,
) -> Drawn:
    """Groups of these sizes with one class each; half of the variance of a row is that
    of its group.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(groups, generator=generator).tolist()
    counts = [sizes(groups)[rank] for rank in order]
    classes = _classes(torch.full((groups,), share), generator)
    fresh = (torch.rand(FRESH, generator=generator) < share).long()
    number = torch.repeat_interleave(torch.arange(groups), torch.tensor(counts))
    rows = len(number)
    shared = torch.randn(SITES, groups + FRESH, WIDTH, generator=generator)
    shared = shared[:, torch.cat([number, torch.arange(groups, groups + FRESH)])]
    targets = torch.cat([classes[number], fresh])
    states = (shared + torch.randn(shared.shape, generator=generator)) / 2**0.5
    states[:, :, 0] += torch.tensor(strengths)[:, None] * (2 * targets - 1)
    names = tuple(number.tolist())
    return Drawn(
        states[:, :rows],
        targets[:rows],
        states[:, rows:],
        targets[rows:].float(),
        1,
        names,
        as_tokens,
    )


def minimal_pairs(
    seed: int, pairs: int, share: float, strengths: Sequence[float]
) -> Drawn:
    """Pairs of texts that share nine tenths of their variance, one of each class."""
    generator = torch.Generator().manual_seed(seed)
    number = torch.arange(pairs + FRESH // 2).repeat_interleave(2)
    shared = torch.randn(SITES, pairs + FRESH // 2, WIDTH, generator=generator)[
        :, number
    ]
    states = 0.9**0.5 * shared + 0.1**0.5 * torch.randn(
        shared.shape, generator=generator
    )
    first = (torch.rand(pairs + FRESH // 2, generator=generator) < 0.5).long()[number]
    targets = (first + torch.arange(len(number))) % 2
    states[:, :, 0] += torch.tensor(strengths)[:, None] * (2 * targets - 1)
    rows = 2 * pairs
    names = tuple(number[:rows].tolist())
    return Drawn(
        states[:, :rows],
        targets[:rows],
        states[:, rows:],
        targets[rows:].float(),
        1,
        names,
    )


def real(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, whose layers go together, with labels that are drawn."""
    generator = torch.Generator().manual_seed(seed)
    pool = _pool()
    order = torch.randperm(pool.shape[1], generator=generator)
    targets = _classes(torch.full((rows,), share), generator)
    new = order[rows : rows + FRESH]
    return Drawn(
        pool[:, order[:rows]], targets, pool[:, new], torch.full((len(new),), share)
    )


def real_planted(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, with labels that follow one direction of layer.18, of which a
    fifth are drawn anew.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = _pool()
    order = torch.randperm(pool.shape[1], generator=generator)
    along = _direction()
    likely = torch.where(
        along > along.quantile(1 - share), 0.8 + 0.2 * share, 0.2 * share
    )[order]
    targets = _classes(likely[:rows], generator)
    new = slice(rows, rows + FRESH)
    return Drawn(pool[:, order[:rows]], targets, pool[:, order[new]], likely[new])


def numbers(seed: int, rows: int, share: float) -> Drawn:
    """Numbers, of which `share` of the variance lies along a direction that each site
    shows more or less of.
    """
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(SITES, rows + FRESH, WIDTH, generator=generator)
    hidden = torch.randn(rows + FRESH, generator=generator)
    states[:, :, 0] += torch.tensor(STRENGTHS)[:, None] * hidden
    targets = share**0.5 * hidden + (1 - share) ** 0.5 * torch.randn(
        rows + FRESH, generator=generator
    )
    return Drawn(states[:, :rows], targets[:rows], states[:, rows:], targets[rows:])


def real_numbers(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, with numbers that are drawn."""
    drawn, generator = (
        real(seed, rows, 0.5),
        torch.Generator().manual_seed(seed + 1_000_000),
    )
    targets = torch.randn(rows + drawn.fresh.shape[1], generator=generator)
    return drawn._replace(targets=targets[:rows], fresh_targets=targets[rows:])


def real_planted_numbers(seed: int, rows: int, share: float) -> Drawn:
    """States of a model, with numbers of which `share` of the variance lies along one
    direction of layer.18.
    """
    generator = torch.Generator().manual_seed(seed)
    pool = _pool()
    order = torch.randperm(pool.shape[1], generator=generator)[: rows + FRESH]
    along = _direction()[order] * pool.shape[1] ** 0.5
    targets = share**0.5 * along + (1 - share) ** 0.5 * torch.randn(
        len(order), generator=generator
    )
    return Drawn(
        pool[:, order[:rows]], targets[:rows], pool[:, order[rows:]], targets[rows:]
    )


def _classes(shares: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drawn classes; again where one of them has fewer than two rows, which no probe
    takes.
    """
    while True:
        drawn = (torch.rand(len(shares), generator=generator) < shares).long()
        if 2 <= int(drawn.sum()) <= len(drawn) - 2:
            return drawn


@lru_cache
def _direction() -> torch.Tensor:
    """Where each token of the pool is along the second principal direction of layer.18."""
    own, *_ = standardised(_pool()[3])
    along: torch.Tensor = torch.linalg.svd(own, full_matrices=False)[0][:, 1]
    return along


@lru_cache
def _pool() -> torch.Tensor:
    """The states of all different tokens, but first ones, of the shipped texts;
    computed once for all processes.
    """
    path = (
        Path(tempfile.gettempdir())
        / f"hiddenscope-calibrate-{os.getuid()}-{hs.__version__}.npy"
    )
    if not path.exists():
        model = hs.load()
        texts = [
            text
            for name in ("cities-complete", "cities-incomplete", "plain")
            for text in hs.read(name).texts
        ]
        states = model.capture(texts, REAL_SITES)
        assert isinstance(states, hs.States)
        values = states.values[
            :, torch.from_numpy(np.asarray(states.tokens.positions) > 0)
        ].float()
        _, first = np.unique(values[-1].numpy().round(3), axis=0, return_index=True)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            np.save(file, values[:, torch.from_numpy(np.sort(first))].numpy())
    return torch.from_numpy(np.load(path))
