"""Jacobian: products of vectors with the Jacobians between the states of one text.

The pass is cut where its states pass: each goes on as a leaf of its own, so that
gradients end there. Products of any number of vectors, from any number of states, then
go through each block together and once, from the top down, and every state below is met
on the way. A state that is seen beside the stream and not in it is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hiddenscope.errors import SiteError
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.quantised import refuse_gradients
from hiddenscope.passes.edit import is_in_stream
from hiddenscope.passes.inputs import Inputs, PassModel, Texts
from hiddenscope.passes.record import not_reached, require_recordable, token_logits
from hiddenscope.sites import Site


@dataclass(frozen=True, eq=False)
class State:
    """One state of a pass, with its graph.

    `value` [token, width] is the state, and `leaf` what went on in its place: the
    gradients of everything above end there. A state that is seen beside the stream has
    no leaf, and its gradient is met at `edge` instead. `read` turns a gradient into
    [vector, token, width].
    """

    value: Tensor
    leaf: Tensor | None
    edge: GradientEdge | None = None
    read: Callable[[Tensor], Tensor] | None = None

    @property
    def end(self) -> Tensor | GradientEdge:
        """Return where gradients with respect to this state are met."""
        end = self.edge if self.leaf is None else self.leaf
        assert end is not None
        return end


@dataclass(frozen=True, eq=False)
class Tape:
    """One pass over one text, cut at its states.

    `logits` are [token, vocabulary], if requested.
    """

    states: Mapping[Site, State]
    logits: Tensor | None = None

    def values(self, site: Site) -> Tensor:
        """Return the state itself, `[token, width]`."""
        return self.states[site].value.detach()

    def pull(
        self, seeds: Mapping[Site, Tensor], beyond: tuple[Tensor, Tensor] | None = None
    ) -> Iterator[tuple[Site, Tensor]]:
        """Yield the products of vectors with the Jacobian with respect to each state.

        `seeds` are vectors [vector, token, width] at each site, `beyond` an output of
        the whole pass and vectors for that. Sites come from the top down, each with
        [vector, token, width]: first the vectors from beyond, then those of the
        uppermost site and so on downwards, as far as its own.
        """
        order = sorted(self.states, reverse=True)
        gradients: dict[Site, Tensor] = {}
        count = 0
        if beyond is not None:
            output, vectors = beyond
            count = len(vectors)
            self._add_products(gradients, output, vectors, order, 0)
        for place, site in enumerate(order):
            state = self.states[site]
            below = order[place + 1 :]
            seed = seeds.get(site)
            before = count
            if seed is not None:
                count += len(seed)
                _add(gradients, site, seed, before)
            if count == 0:
                continue
            nothing = state.value.new_zeros((0, *state.value.shape)).detach()
            gradient = _extended(gradients.pop(site, nothing), count)
            yield site, gradient
            if state.leaf is not None:
                self._add_products(gradients, state.value, gradient, below, 0)
            elif seed is not None:
                self._add_products(gradients, state.value, seed, below, before)

    def _add_products(
        self,
        gradients: dict[Site, Tensor],
        output: Tensor,
        vectors: Tensor,
        below: Sequence[Site],
        row: int,
    ) -> None:
        """Add the products of an output's vectors to the states it was made from."""
        if not output.requires_grad or not below:
            return
        ends = [self.states[site].end for site in below]
        for site, product in zip(below, products(output, ends, vectors), strict=True):
            if product is not None:
                read = self.states[site].read
                _add(gradients, site, product if read is None else read(product), row)


def products(
    output: Tensor, ends: Sequence[Any], vectors: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the products of vectors [vector, ...] with the Jacobian of an output.

    `ends` are tensors or edges of the graph; torch takes a mixture of both, though its
    types do not say so. The products are computed at once where torch can do that.
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
    except RuntimeError:
        # The model has an operation that cannot be batched. Any other error comes up
        # again below.
        single = []
        for vector in vectors:
            single.append(
                torch.autograd.grad(
                    output, ends, vector, retain_graph=True, allow_unused=True
                )
            )
    stacked: list[Tensor | None] = []
    for column in zip(*single, strict=True):
        stacked.append(None if column[0] is None else torch.stack(column))
    return tuple(stacked)


def tape(
    model: PassModel,
    inputs: Texts | Inputs,
    sites: Sequence[Site],
    *,
    logits: bool = False,
) -> Tape:
    """Run the model over one text and keep what gradients need, up to the last site.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> run = tape(model, [[5, 6, 7]], model.anatomy.select("layer.*"))
    >>> gradients = dict(run.pull({Site(2): torch.ones(1, 3, 64)}))
    >>> [str(site) for site in gradients], gradients[Site(0)].shape
    (['layer.2', 'layer.1', 'layer.0'], torch.Size([1, 3, 64]))
    """
    require_recordable(model.module)
    refuse_gradients(model.module)
    batch = model.encode(inputs).pad(model)
    assert len(batch.lengths) == 1, "gradients are those of one text"
    states: dict[Site, State] = {}
    missing = set(sites)
    stops = not logits and not hooks.is_offloaded(model.module)

    def watch(site: Site) -> hooks.Watch:
        if site.is_inner:
            raise SiteError(
                f"No influence is measured at {site}",
                "it lies inside a branch, and gradients are taken in the stream and of"
                " what is added to it",
                "Name a layer, attn, cross, mid, mlp or final.",
            )
        tap = model.anatomy.taps[site]
        tokens = batch.of_stack(site.stack).ids.shape[1]
        is_whole = not site.part and is_in_stream(model.anatomy, site)

        def cut(tensor: Tensor) -> Tensor | None:
            new = None
            if is_whole:
                # End the graph here and let a leaf go on. Rows that are no tokens keep
                # their own gradient.
                rows = tap.layout.states(tensor, tokens)
                leaf = rows.detach().requires_grad_()
                in_order = (tap.layout.text, tap.layout.token) == (0, 1)
                plain = in_order and rows.shape == tensor.shape
                # A copy goes on, because a model may write over its input, and must not
                # write over a leaf.
                new = leaf.clone() if plain else tap.layout.with_states(tensor, leaf)
                states[site] = State(
                    rows[0], leaf, read=lambda gradient: gradient[:, 0]
                )
            else:
                # Leave the state as it is and remember its place in the graph: the
                # tensor itself may be written over later.
                live = tensor if tensor.requires_grad else tensor.requires_grad_()
                value = tap.layout.states(live, tokens)[0].clone()

                def read(gradient: Tensor) -> Tensor:
                    rows = []
                    for vector in gradient:
                        rows.append(tap.layout.gradients(vector, tokens)[0])
                    return torch.stack(rows)

                states[site] = State(value, None, get_gradient_edge(live), read)
            missing.discard(site)
            if stops and not missing:
                raise hooks.Stopped
            return new

        return tap.watch(model.module, cut)

    watches = [watch(site) for site in sorted(sites)]
    arguments = batch.arguments(model.module, masked=model.batching.needs_mask)
    with (
        model.lock,
        autograd.restored(inference=False),
        torch.enable_grad(),
        hooks.watching(watches),
    ):
        output = hooks.call_module(model.module, arguments)
    if missing:
        raise not_reached(model.anatomy, min(missing))
    return Tape(states, token_logits(output, batch, model) if logits else None)


def _extended(gradient: Tensor, count: int) -> Tensor:
    """Make room for the products of all vectors so far.

    Those that have not met the state are zero.
    """
    missing = count - len(gradient)
    if not missing:
        return gradient
    return torch.cat([gradient, gradient.new_zeros((missing, *gradient.shape[1:]))])


def _add(gradients: dict[Site, Tensor], site: Site, new: Tensor, row: int) -> None:
    """Add products to those that a state has met, from a row on."""
    if row:
        new = torch.cat([new.new_zeros((row, *new.shape[1:])), new])
    old = gradients.get(site)
    if old is not None:
        count = max(len(old), len(new))
        new = _extended(old, count) + _extended(new, count)
    gradients[site] = new
