"""Rows: run a model once over one text and keep the states of some of its tokens.

A question about single tokens needs no buffer for all of them: the neurons of every
block and token take more memory than the model.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from hiddenscope.discovery import OperationTap, Tap
from hiddenscope.errors import NotFinite
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.protocol import PassModel, require_recordable
from hiddenscope.passes.record import Watcher, check_targets, not_reached
from hiddenscope.sites import Site


def record_rows(
    model: PassModel, inputs: Inputs, sites: Sequence[Site], rows: Sequence[int]
) -> dict[Site, Tensor]:
    """Return the states [row, width] at some tokens of a single text, on the device.

    The pass stops after the last of the sites, and the head does not run.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> states = record_rows(model, Inputs(((5, 6, 7),)), [Site(1)], rows=[0, 2])
    >>> states[Site(1)].shape
    torch.Size([2, 64])
    """
    require_recordable(model.module)
    check_targets(model, inputs, sites, logits=False)
    batch = inputs.pad(model)
    lengths = {site: batch.of_stack(site.stack).ids.shape[1] for site in sites}
    selected = list(rows)
    states: dict[Site, Tensor] = {}

    def keep(site: Site, tap: Tap | OperationTap, tensor: Tensor) -> None:
        text = tap.layout.states(tensor, lengths[site])[0]
        # Indexing copies: the code of a block may change its tensor in place later.
        states[site] = text[selected].detach()

    watcher = Watcher(model.anatomy, sites, keep)
    watcher.stops = not hooks.is_offloaded(model.module)
    with (
        model.lock,
        autograd.restored(inference=False),
        torch.no_grad(),
        hooks.watching(watcher.watches(model.module)),
    ):
        arguments = batch.arguments(model.module, masked=model.batching.needs_mask)
        hooks.call_module(model.module, arguments)
    if watcher.missing:
        raise not_reached(model.anatomy, min(watcher.missing))
    for site in sorted(states):
        if not bool(states[site].isfinite().all()):
            raise NotFinite(
                f"No finite state at {site} of {model.anatomy.name}",
                "it holds a NaN or an infinity",
                "Look at the weights, or load the model in float32.",
            )
    return states
