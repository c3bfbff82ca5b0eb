"""Moved: how far states move along directions from one member to another.

A shift is the mean over texts of how far the states of a text moved along a direction,
in deviations of the reference's states along it. First tokens and massive states are
left out, as they are where a dictionary is proved: a few of them would be most of the
variance. Random directions with the covariance of the other states are the control:
whatever moves all states moves them too.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.direction import in_stack
from hiddenscope.errors import StatesError
from hiddenscope.measures.grouped import group_sums, reach_of_all
from hiddenscope.measures.massive import is_massive, length_limit
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.arrays import Floats
from hiddenscope.texts import copy_key, number_groups
from hiddenscope.vectors.dataset import strings_of

# Random directions for each that is followed: the bar is the fourth farthest or a later
# one, since the farthest of all would itself be a matter of luck.
DRAWS_OF_EACH = 99
# Tokens whose states make random directions.
SAMPLED = 1000
BLOCK = 1024


def shifts(
    states: States | Pair, reference: States | Pair, dictionary: Dictionary
) -> dict[str, Any]:
    """Return the shift along each direction with its interval, jointly 95%.

    `shift_random` is what a shift along the most moved of as many random directions
    stays below in 95% of cases. With fewer than eight texts there is no interval.
    """
    site = Site.parse(dictionary.writes)
    here, there = in_stack(states, site), in_stack(reference, site)
    rows, before = here[site].double().cpu(), there[site].double().cpu()
    directions = dictionary.directions.double().cpu()
    if rows.shape[1] != directions.shape[1]:
        raise StatesError(
            f"Cannot follow directions of width {directions.shape[1]}",
            f"the states at {site} are {rows.shape[1]} wide",
            "Give directions of these models.",
        )
    massive = is_massive(before, length_limit([before])).numpy()
    later = ~massive & (here.tokens.positions > 0)
    used, text = np.unique(here.tokens.text[later], return_inverse=True)
    if not len(used):
        raise StatesError(
            f"Cannot say what moved at {site}",
            "no text has a second token, and first tokens are left out",
            "Give longer texts.",
        )
    centred = before[later] - before[later].mean(0)
    sums = group_sums((rows - before)[later].numpy(), text)
    moves = torch.from_numpy(sums / np.bincount(text)[:, None])
    parts = []
    for block in torch.split(directions, BLOCK):
        parts.append(moves @ block.T / (centred @ block.T).std(0))
    means: Floats = torch.cat(parts, 1).numpy()
    shift = means.mean(0)
    strings = strings_of(here.tokens)
    groups = number_groups([copy_key(strings[place]) for place in used])
    reach = reach_of_all(means, groups)
    if reach is None:
        reach = np.full(len(shift), np.nan)
    attributes = {"long_name": "shift, in deviations of the reference"}
    columns = {"": shift, "_low": shift - reach, "_high": shift + reach}
    of_tokens = torch.from_numpy(groups[text])
    bar = _bar(centred, of_tokens, moves.mean(0), len(shift))
    columns["_random"] = np.full(len(shift), bar)
    return {
        f"shift{end}": ("direction", values, attributes)
        for end, values in columns.items()
    }


def _bar(centred: Tensor, groups: Tensor, move: Tensor, count: int) -> float:
    """Return what the most moved of `count` random directions stays below, in 95%.

    `groups` numbers the text of each token. A random direction is a mixture of states
    of one half of the texts, and the other half says how states vary along it: along a
    mixture of themselves they vary more than along a direction that comes from outside.
    """
    generator = torch.Generator().manual_seed(0)
    sampled = torch.randperm(len(centred), generator=generator)[:SAMPLED]
    rank = torch.randperm(int(groups.max()) + 1, generator=generator)
    halves = centred[sampled[rank[groups[sampled]].argsort()]].tensor_split(2)
    blocks = -(-DRAWS_OF_EACH * count // (2 * BLOCK))
    farthest = []
    for half, other in (halves, halves[::-1]):
        # As many rows as there are dimensions make the same mixtures.
        mixed = torch.linalg.qr(half).R
        products = mixed @ (other - other.mean(0)).T
        # The principal components of what mixtures vary by.
        variances, components = torch.linalg.eigh(products @ products.T)
        variances /= max(1, len(other) - 1)
        along = components.T @ (mixed @ move)
        for _ in range(blocks):
            size = BLOCK, len(mixed)
            drawn = torch.randn(size, generator=generator, dtype=torch.float64)
            deviation = (drawn.square() @ variances).sqrt()
            farthest.append((drawn @ along).abs() / deviation)
    place = int(0.05 * 2 * BLOCK * blocks / count)
    return float(torch.cat(farthest).topk(place).values[-1])
