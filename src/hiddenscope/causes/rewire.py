"""Rewire: run a text while chosen parts read something else from chosen parts.

Every reader gets the stream of the run as it is, with what its changed edges carry
exchanged. A reader that reads something else than the stream is computed in a row of
its own: its operand, or what its MLP adds, is then put in place of the run's. The code
that computes is the model's, block after block.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hiddenscope.causes.wiring import OPERANDS, OTHER_WAYS, Kind, Runs
from hiddenscope.errors import PassError
from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.modules.trials import disagreement, rounded_to
from hiddenscope.passes.stepping import Change, Stepper
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.progress import Advance
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Bools


@autograd.without_grad
def rewire(
    model: Model,
    stepper: Stepper,
    runs: Runs,
    changed: Bools,
    advance: Advance = lambda amount: None,
) -> Tensor:
    """Return the logits [row, vocabulary] of runs with changed edges.

    Through the edges in `changed` [row, writer, reader] a reader gets what the writer
    wrote in the other run, through all others what it writes in this one. `advance` is
    called with a number of rows.
    """
    # A row is as much memory as what all parts write at all tokens.
    most = max(1, stepper.rows_at_a_time // len(runs.wiring.layouts))
    logits = []
    for start in range(0, len(changed), most):
        some = changed[start : start + most]
        logits.append(_Rewired(model, stepper, runs, some).logits())
        advance(len(some))
    return torch.cat(logits)


def check_restored(model: Model, stepper: Stepper, runs: Runs) -> float:
    """Return how far all changed edges together are from the other run.

    That is in units of the rounding tolerance. With no changed edge, too, the run has
    to come out as it is; a model where either fails is refused.
    """
    changed = np.zeros((2, *runs.wiring.possible.shape), dtype=bool)
    changed[1] = runs.wiring.possible
    logits = rewire(model, stepper, runs, changed)
    expected = torch.stack([runs.base.logits[runs.at], runs.other.logits[runs.at]])
    depth = len(runs.wiring.layouts)
    dtype = rounded_to(model.dtype)
    off = disagreement(expected[None].to(logits), logits[None], [depth], dtype=dtype)
    if not off <= 1:
        raise PassError(
            f"Cannot tell the edges of {model.name}",
            "its blocks, called one by one, do not give back its runs: logits are off"
            f" by {off:,.1f} times the rounding tolerance",
            OTHER_WAYS,
        )
    return off


class _Rewired:
    """Some rows of rewired runs, of which the blocks so far have been computed.

    `written` [row, writer, token, width] is what every part writes in this row, and
    `rest` [row, token, width] what attention adds besides its heads, its bias.
    """

    def __init__(
        self, model: Model, stepper: Stepper, runs: Runs, changed: Bools
    ) -> None:
        self.model = model
        self.stepper = stepper
        self.runs = runs
        self.wiring = wiring = runs.wiring
        rows = len(changed)
        self.stream = runs.base.states[Site(0)].expand(rows, -1, -1)
        self.written = runs.written[: wiring.summed].repeat(rows, 1, 1, 1)
        self.rest = torch.zeros_like(self.written[:, 0])
        possible = wiring.possible[: wiring.summed]
        changed = changed[:, : wiring.summed] & possible
        self.changed = torch.tensor(changed, device=self.written.device)
        self.kept = torch.tensor(possible & ~changed, device=self.written.device)
        self.place = {site: row for row, site in enumerate(wiring.writers)}

    def logits(self) -> Tensor:
        """Step through all blocks, and return the logits of every row."""
        depth = len(self.wiring.layouts)
        for layer in range(1, depth + 1):
            self._step(layer)
        stream = self._read([len(self.wiring.readers) - 1], self.stream)[:, 0]
        return Unembedding(self.model).logits_of(stream[:, self.runs.at], Site(depth))

    def _read(self, readers: Sequence[int], stream: Tensor) -> Tensor:
        """Return what readers read of the stream [row, reader, token, width].

        It is summed from what their edges carry. The stream less what is cut would be
        rounding where little is left, and norms enlarge that.
        """
        changed, kept = self.changed[:, :, readers], self.kept[:, :, readers]
        other = self.runs.other_written[: self.wiring.summed].to(self.written)
        summed = self.rest[:, None] + torch.einsum(
            "nwr,nwtd->nrtd", kept.to(self.written), self.written
        )
        summed += torch.einsum("nwr,wtd->nrtd", changed.to(other), other)
        is_rewired = changed.any(1)[..., None, None]
        return torch.where(is_rewired, summed.to(stream), stream[:, None])

    def _operands(self, layer: int) -> dict[Kind, Tensor]:
        """Return the queries, keys and values of all heads [row, token, width].

        Heads whose changed edges are the same in every row read the same.
        """
        numbers = self.wiring.columns(layer)
        readers = [*numbers["q"], *numbers["k"], *numbers["v"]]
        columns = self.changed[:, :, readers].flatten(0, 1)
        if not columns.any():
            return {}
        _, inverse = torch.unique(columns, dim=1, return_inverse=True)
        which = dict(zip(readers, inverse.tolist(), strict=True))
        first = {number: reader for reader, number in reversed(which.items())}
        different = [first[number] for number in sorted(first)]
        streams = self._read(different, self.stream)
        sites = {kind: Site(layer, f"attn.{kind}") for kind in OPERANDS}
        read = self.stepper.call(layer, streams.flatten(0, 1), [*sites.values()])
        operands = {}
        for kind, site in sites.items():
            count = len(numbers[kind])
            states = read[site].reshape(*streams.shape[:3], count, -1)
            heads = states.unbind(-2)
            own = []
            for reader, head in zip(numbers[kind], heads, strict=True):
                own.append(head[:, which[reader]])
            operands[kind] = torch.cat(own, -1)
        return operands

    def _step(self, layer: int) -> None:
        """Go on to the next layer, and see what its parts write."""
        layout = self.wiring.layouts[layer - 1]
        rows = len(self.stream)
        heads, mid = Site(layer, "attn.z"), Site(layer, "mid")
        mlp, last = Site(layer, "mlp"), Site(layer)
        own = self.wiring.columns(layer)["mlp"]
        changes: dict[Site, Change] = {}
        for kind, states in self._operands(layer).items():
            changes[Site(layer, f"attn.{kind}")] = partial(_put, states)
        streams = self.stream
        is_rewired = bool(self.changed[:, :, own].any())
        if is_rewired:
            # What the MLP adds is computed in rows below those of the run, whose
            # attention is of no account.
            below = streams
            if layout.parallel:
                below = self._read(own, streams)[:, 0]
            else:
                changes[heads] = lambda z: self._written_by_heads(layer, z)
                changes[mid] = lambda state: self._reading(own, state[:rows])
            streams = torch.cat([streams, below])
            changes[mlp] = lambda state: torch.cat([state[rows:], state[rows:]])
        read = self.stepper.call(layer, streams, [heads, mlp], changes, whole=True)
        if not is_rewired or layout.parallel:
            self._written_by_heads(layer, read[heads])
        self._see(mlp, read[mlp][:rows])
        self.stream = read[last][:rows]

    def _written_by_heads(self, layer: int, z: Tensor) -> Tensor:
        inputs = z[: len(self.stream)]
        heads = []
        for head in range(self.wiring.layouts[layer - 1].heads.heads):
            site = Site(layer, f"attn.head.{head}")
            write = self.model.anatomy.write(self.model.module, site)
            assert write is not None
            self._see(site, write(inputs))
            heads.append(write)
        self.rest += heads[0].bias(inputs).to(self.rest)
        return z

    def _reading(self, reader: Sequence[int], mid: Tensor) -> Tensor:
        """Return the middle of a block with that of the MLP's own rows below it."""
        return torch.cat([mid, self._read(reader, mid)[:, 0]])

    def _see(self, site: Site, state: Tensor) -> None:
        """Note what a part writes in these rows."""
        self.written[:, self.place[site]] = state.to(self.written)


def _put(states: Tensor, before: Tensor) -> Tensor:
    """Return a state whose first rows are other ones."""
    return torch.cat([states.to(before), before[len(states) :]])
