"""Jacobian: how the states of one text depend on those before them, in products with
vectors.

The pass is cut where its states pass: each goes on as a leaf of its own, so that
gradients end there. Products of any number of vectors, from any number of states, then
go through each block together and once, from the top down, and every state below is met
on the way. Where a state is seen beside the stream and not in it, it is left as it is.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hiddenscope.discovery import Anatomy, Tap
from hiddenscope.errors import PassError
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes.inputs import Inputs, Texts
from hiddenscope.passes.protocol import PassModel, recordable
from hiddenscope.passes.record import not_reached, token_logits
from hiddenscope.sites import Site


@dataclass(frozen=True, eq=False)
class State:
    """One state of a pass: what was made [token, width], with its graph, and where the
    gradients of what is above end.

    `leaf` is what went on in its place; a state that is seen beside the stream has
    none, and `edge` is where its own gradient is met instead.
    """

    made: Tensor
    leaf: Tensor | None
    edge: GradientEdge | None = None
    read: Callable[[Tensor], Tensor] | None = None

    @property
    def end(self) -> Tensor | GradientEdge:
        """Where gradients with respect to this state are met."""
        found = self.edge if self.leaf is None else self.leaf
        assert found is not None
        return found


@dataclass(frozen=True, eq=False)
class Tape:
    """One pass over one text, cut at its states; `logits` [token, vocabulary] where
    they were asked for.
    """

    states: Mapping[Site, State]
    logits: Tensor | None = None

    def values(self, site: Site) -> Tensor:
        """The state itself, `[token, width]`."""
        return self.states[site].made.detach()

    def pull(
        self, seeds: Mapping[Site, Tensor], beyond: tuple[Tensor, Tensor] | None = None
    ) -> Iterator[tuple[Site, Tensor]]:
        """The products of vectors at some states with the Jacobian with respect to each
        state, from the top down.

        `seeds` are vectors [vector, token, width] at each site, `beyond` an output of
        the whole pass and vectors for that. Each site comes with [vector, token,
        width]: first the vectors from beyond, then those of the uppermost site and so
        on downwards, as far as its own; those of lower sites do not see it.
        """
        order = sorted(self.states, reverse=True)
        met: dict[Site, Tensor] = {}
        count = 0
        if beyond is not None:
            count = len(beyond[1])
            self._into(met, beyond[0], beyond[1], order, 0)
        for place, site in enumerate(order):
            state, own = self.states[site], seeds.get(site)
            before = count
            if own is not None:
                count += len(own)
                _add(met, site, own, before)
            if count == 0:
                continue
            here = _grown(met.pop(site, None), count, state.made)
            yield site, here
            if state.leaf is not None:
                self._into(met, state.made, here, order[place + 1 :], 0)
            elif own is not None:
                self._into(met, state.made, own, order[place + 1 :], before)

    def _into(
        self,
        met: dict[Site, Tensor],
        output: Tensor,
        vectors: Tensor,
        below: Sequence[Site],
        row: int,
    ) -> None:
        """Add what an output's vectors make of the states that it was made from."""
        if not output.requires_grad or not below:
            return
        ends = [self.states[site].end for site in below]
        for site, found in zip(below, products(output, ends, vectors), strict=True):
            if found is not None:
                read = self.states[site].read
                _add(met, site, found if read is None else read(found), row)


def products(
    output: Tensor, ends: Sequence[Any], vectors: Tensor
) -> tuple[Tensor | None, ...]:
    """The products of vectors [vector, ...] with the Jacobian of an output, all at once
    where torch can do that.
    """
    try:
        return torch.autograd.grad(
            output,
            ends,
            vectors,
            retain_graph=True,
            allow_unused=True,
            is_grads_batched=True,
        )
    # An operation of the model's own that cannot be batched; what is really wrong comes
    # up again.
    except RuntimeError:
        each = [
            torch.autograd.grad(output, ends, v, retain_graph=True, allow_unused=True)
            for v in vectors
        ]
    columns = zip(*each, strict=True)
    return tuple(None if some[0] is None else torch.stack(some) for some in columns)


def tape(
    model: PassModel,
    inputs: Texts | Inputs,
    sites: Sequence[Site],
    *,
    logits: bool = False,
) -> Tape:
    """Run the model over one text and keep what gradients need, up to the last of the
    sites.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> run = tape(model, [[5, 6, 7]], model.anatomy.select("layer.*"))
    >>> found = dict(run.pull({Site(2): torch.ones(1, 3, 64)}))
    >>> [str(site) for site in found], found[Site(0)].shape
    (['layer.2', 'layer.1', 'layer.0'], torch.Size([1, 3, 64]))
    """
    recordable(model.module)
    batch = model.encode(inputs).pad(model)
    if len(batch.lengths) != 1:
        raise PassError(
            "Cannot take gradients of a pass",
            f"got {len(batch.lengths)} texts",
            "Give one at a time.",
        )
    kept: dict[Site, State] = {}
    missing = set(sites)
    stops = not logits and not hooks.is_offloaded(model.module)

    def watch(site: Site) -> hooks.Watch:
        tap = model.anatomy.taps[site]
        tokens = batch.of_stack(site.stack).ids.shape[1]

        def seen(tensor: Tensor) -> Tensor | None:
            kept[site], new = (
                _cut(tap, tensor, tokens)
                if _passes(model.anatomy, site)
                else _beside(tap, tensor, tokens)
            )
            missing.discard(site)
            if stops and not missing:
                raise hooks.Stopped
            return new

        return tap.watch(model.module, seen)

    watches = [watch(site) for site in sorted(sites)]
    with (
        model.lock,
        autograd.restored(inference=False),
        torch.enable_grad(),
        hooks.watching(watches),
    ):
        output = hooks.run(
            model.module,
            batch.arguments(model.module, masked=model.batching.needs_mask),
        )
    if missing:
        raise not_reached(model.anatomy, min(missing))
    return Tape(kept, token_logits(output, batch, model) if logits else None)


def _cut(tap: Tap, tensor: Tensor, tokens: int) -> tuple[State, Tensor]:
    """End the graph here and let a leaf go on; rows that are no tokens keep their own
    gradient.
    """
    rows = tap.layout.states(tensor, tokens)
    leaf = rows.detach().requires_grad_()
    plain = rows.shape == tensor.shape and (tap.layout.text, tap.layout.token) == (0, 1)
    # A copy goes on, for a model may write over what it is given, and not over a leaf.
    new = leaf.clone() if plain else tap.layout.with_states(tensor, leaf)
    return State(rows[0], leaf, read=lambda found: found[:, 0]), new


def _beside(tap: Tap, tensor: Tensor, tokens: int) -> tuple[State, None]:
    """Leave the state as it is; its place in the graph is kept, for the tensor may be
    written over later.
    """
    live = tensor if tensor.requires_grad else tensor.requires_grad_()
    made = tap.layout.states(live, tokens)[0].clone()

    def read(found: Tensor) -> Tensor:
        return torch.stack([tap.layout.states(one, tokens)[0] for one in found])

    return State(made, None, get_gradient_edge(live), read), None


def _passes(anatomy: Anatomy, site: Site) -> bool:
    """Whether the stream itself passes where a site is seen, so that what goes on there
    is all that goes on.
    """
    stack = anatomy.stack(site)
    enters = stack.proof.taps[0]
    return not site.part and not (
        anatomy.taps[site] == enters and enters.path != stack.blocks[0].path
    )


def _grown(found: Tensor | None, count: int, like: Tensor) -> Tensor:
    """Room for the products of all vectors so far: those that have not met the state
    are zero.
    """
    if found is None:
        return like.new_zeros((count, *like.shape)).detach()
    return (
        found
        if len(found) == count
        else torch.cat([found, found.new_zeros((count - len(found), *found.shape[1:]))])
    )


def _add(met: dict[Site, Tensor], site: Site, new: Tensor, row: int) -> None:
    """Add products to those that a state has met, from a row on."""
    old = met.get(site)
    if old is None:
        met[site] = (
            new if row == 0 else torch.cat([new.new_zeros((row, *new.shape[1:])), new])
        )
    elif len(old) == row:
        met[site] = torch.cat([old, new])
    else:
        grown = _grown(old, max(len(old), row + len(new)), old[0]).clone()
        grown[row : row + len(new)] += new
        met[site] = grown
