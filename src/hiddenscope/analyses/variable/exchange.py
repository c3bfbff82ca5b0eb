"""Exchange a part of some states with that of other prompts, and learn which part.

The part is a subspace with orthonormal rows `[rank, width]`. Maps are linear alone:
with free ones any network fits any algorithm (2507.08802).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hiddenscope.model import Model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs, edit, resume
from hiddenscope.passes.losses import batch_size
from hiddenscope.sites import Site
from hiddenscope.states import States
from hiddenscope.states.arrays import Floats, Ints

# Steps of learning, and the first and the last before momentum, in radians.
STEPS = 16
ANGLES = 0.15, 0.01
MOMENTUM = 0.8
# What the answers read are the directions with this share of the energy of gradients.
READ = 0.9


class Place(NamedTuple):
    """A site, and a position in every prompt."""

    site: Site
    positions: Ints


class Prompts(NamedTuple):
    """Prompts in a model, the tokens at which they are answered, and their states.

    `candidates` are the answers of all pairs; `answer` and `target` are the places of
    each answer and counterfactual among them. `logits` [prompt, candidate] are those of
    the runs as they are.
    """

    model: Model
    inputs: Inputs
    at: Ints
    candidates: Tensor
    answer: Tensor
    target: Tensor
    logits: Tensor
    states: States

    def rows(self, place: Place) -> Tensor:
        """Return the states [prompt, width] at a place."""
        starts = np.cumsum([0, *self.inputs.lengths[:-1]])
        return self.states[place.site][starts + place.positions].double().cpu()

    def hits(self, place: Place, values: Tensor) -> Floats:
        """Put values [prompt, width] in place, and return which counterfactuals are
        above all other candidates.
        """
        hits = np.zeros(len(self.inputs))
        everything = range(len(self.inputs))
        for numbers, logits, _ in self._passes(place, values, everything):
            hits[numbers] = first_places(logits, self.target[numbers])
        return hits

    def gradients(
        self, place: Place, values: Tensor, selected: Sequence[int]
    ) -> tuple[Tensor, float]:
        """Return the gradients of the losses of some prompts with values in place, and
        the mean loss.
        """
        gradients, total = torch.zeros_like(values), 0.0
        site, positions = place
        passes = self._passes(place, values, selected, grad=True)
        for numbers, logits, leaf in passes:
            target = self.target[numbers].to(logits.device)
            with autograd.restored(), torch.enable_grad():
                loss = torch.nn.functional.cross_entropy(
                    logits, target, reduction="sum"
                )
            (gradient,) = torch.autograd.grad(loss, leaf)
            if not site.part:
                tokens = max(self.inputs.some(numbers).lengths)
                whole = self.model.anatomy.tap(site).layout.states(gradient, tokens)
                gradient = whole[range(len(numbers)), positions[numbers]]
            gradients[numbers] = gradient.double().cpu()
            total += float(loss.detach())
        return gradients[selected], total / len(selected)

    def _passes(
        self, place: Place, values: Tensor, selected: Sequence[int], grad: bool = False
    ) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Yield prompts, their logits of the candidates, and where gradients end: the
        values, or the states [prompt, token, width] that they are in.
        """
        site, positions = place
        model, tokens, states = self.model, self.states.tokens, self.states[site]
        inputs = self.inputs.some(selected)
        for texts, batch in inputs.batches(model, batch_tokens=batch_size(model)):
            numbers = [selected[text] for text in texts]
            places = torch.arange(len(texts)), torch.from_numpy(positions[numbers])
            leaf = values[numbers].to(model.device, model.dtype).requires_grad_(grad)
            if site.part:

                def put(whole: Tensor, leaf: Tensor = leaf, at: Any = places) -> Tensor:
                    whole[at] = leaf
                    return whole

                run = edit(model, batch, {site: put}, (), logits=True, grad=grad)
            else:
                rows = []
                for number, value in zip(numbers, leaf, strict=True):
                    row = states[tokens.rows(number)].clone()
                    row[positions[number]] = value.detach()
                    rows.append(row)
                kept = (site,) if grad else ()
                run = resume(model, batch, site, torch.cat(rows), kept, grad=grad)
                if grad:
                    leaf = run.live[site]
            assert run.logits is not None
            starts = np.cumsum([0, *batch.lengths[:-1]])
            columns = self.candidates.to(run.logits.device)
            with autograd.restored(), torch.set_grad_enabled(grad):
                logits = run.logits[starts + self.at[numbers]][:, columns].double()
            yield numbers, logits, leaf


def first_places(logits: Tensor, target: Tensor) -> Floats:
    """Return 1.0 where the target's logit is above all others, and 0.0 elsewhere."""
    logits = logits.cpu()
    above = (logits >= logits.gather(1, target[:, None])).sum(1)
    firsts: Floats = (above == 1).double().numpy()
    return firsts


def exchanged(difference: Tensor, basis: Tensor) -> Tensor:
    """Return what lies in a subspace of differences [pair, width]."""
    return difference @ basis.T @ basis


def learn(
    prompts: Prompts,
    place: Place,
    difference: Tensor,
    selected: Sequence[int],
    rank: int,
    seed: int,
) -> Tensor:
    """Learn the subspace in which taking the differences [pair, width] makes the loss
    of the selected pairs smallest.

    It begins where the loss falls fastest, to the first order: its change is the sum of
    g·P d over pairs, with the gradient g, the difference d and the projection P. Then
    it turns down the gradient, by smaller and smaller angles; the best one is returned.
    """
    base = prompts.rows(place)
    difference = difference[selected]
    gradient, _ = prompts.gradients(place, base, selected)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(rank, base.shape[1], generator=generator, dtype=base.dtype)
    # All that matters lies in this span, which is narrower than states where pairs
    # are few.
    span = torch.linalg.qr(torch.cat([difference, gradient, drawn]).T)[0]
    product = (difference @ span).T @ (gradient @ span)
    _, vectors = torch.linalg.eigh(product + product.T)
    basis = (span @ vectors[:, :rank]).T
    best, least = basis, float("inf")
    momentum = torch.zeros_like(basis)
    for angle in np.geomspace(*ANGLES, STEPS):
        along = difference @ basis.T
        values = base.clone()
        values[selected] += along @ basis
        gradient, loss = prompts.gradients(place, values, selected)
        if loss < least:
            best, least = basis, loss
        slope = along.T @ gradient
        slope += (gradient @ basis.T).T @ difference
        tangent = slope - exchanged(slope, basis)
        momentum = MOMENTUM * momentum + tangent / tangent.norm().clamp_min(1e-30)
        turned = basis - angle * momentum
        # The nearest orthonormal rows.
        left, _, right = torch.linalg.svd(turned, full_matrices=False)
        basis = left @ right
    found: Tensor = best
    return found


def read_alone(
    basis: Tensor, gradients: Tensor, difference: Tensor
) -> tuple[Tensor, float]:
    """Return the moves inside a subspace that come nearest to differences [pair, width]
    for what the answers read, and the share of the subspace that they do not read.

    A dormant pathway takes what it moves from where nobody reads: there it finds
    nothing.

    >>> basis = torch.tensor([[0.5, 0.5, 0.0]]).sqrt()
    >>> moves, unread = read_alone(basis, torch.eye(3)[:1], torch.eye(3)[1:2])
    >>> float(moves.abs().sum()), round(unread, 2)
    (0.0, 0.5)
    """
    rows = torch.nn.functional.normalize(gradients)
    _, sizes, directions = torch.linalg.svd(rows, full_matrices=False)
    energy = sizes.square().cumsum(0)
    count = int((energy < READ * energy[-1]).sum()) + 1
    read = directions[:count]
    inside = basis @ read.T
    products = inside @ inside.T
    along = difference @ read.T @ inside.T
    # Of a direction that is read no more than what was left out, nothing is known: far
    # along it, any other difference that is read would seem to be its own.
    inverse = torch.linalg.pinv(products, atol=1 - READ, rtol=0.0, hermitian=True)
    moves: Tensor = along @ inverse @ basis
    return moves, 1 - float(products.trace()) / len(basis)
