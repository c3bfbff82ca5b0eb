"""Record: run a model once and keep the states that are asked for.

Hooks copy the rows of real tokens, never padding, straight into one buffer. The pass
stops after the deepest site that is asked for, and the head runs only when logits are.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked
from hiddenscope.discovery import EVERYTHING, Anatomy, Tap
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes.buffers import Buffers, Keep, buffers_for, states_in
from hiddenscope.passes.inputs import Inputs, PaddedBatch, Texts
from hiddenscope.passes.protocol import ModelLike, recordable
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, States


@dataclass(frozen=True)
class Pass:
    """What one pass gave: its states, its logits [token, vocabulary] if asked for, and
    with `grad` the live tensors.

    `kept` is None for a pass without sites. `notes` say what was out of the ordinary in
    how it was run.
    """

    kept: States | Pair | None
    logits: Tensor | None = None
    live: Mapping[Site, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> States | Pair:
        """The states that were kept."""
        if self.kept is None:
            raise PassError(
                "No states",
                "the pass was made with sites=()",
                "Name the sites to keep.",
            )
        return self.kept


@checked
def record(
    model: ModelLike,
    inputs: Texts | Inputs,
    sites: SitePatterns = EVERYTHING,
    *,
    targets: Texts | None = None,
    logits: bool = False,
    grad: bool = False,
    keep: Keep = "host",
) -> Pass:
    """Run the model once over a batch of texts and keep the states at the chosen sites.

    `sites=()` keeps none, for the logits alone. With `logits` the head runs too. With
    `grad` the tensors themselves are kept in `live`, as the model made them, so that
    gradients can flow. `keep="device"` leaves states where they were computed.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> record(load((tiny_model("llama"), None)), [[5, 6, 7]], "layer.1").states.values.shape
    torch.Size([1, 3, 64])
    """
    recordable(model.module)
    chosen = model.anatomy.select(sites)
    return make_pass(
        model,
        model.encode(inputs, targets=targets),
        chosen,
        logits=logits,
        grad=grad,
        keep=keep,
    )


def make_pass(
    model: ModelLike,
    inputs: Inputs,
    sites: Sequence[Site],
    *,
    logits: bool = False,
    grad: bool = False,
    keep: Keep = "host",
) -> Pass:
    """Run encoded texts through the model as one batch and keep the states at some
    sites.
    """
    check_targets(model, inputs, sites, logits=logits)
    batch = inputs.pad(model)
    _check_batch(model, batch)
    buffers = buffers_for(model, sites, inputs, keep=keep)
    live: dict[Site, Tensor] | None = {} if grad else None
    with model.lock, autograd.restored(inference=False), torch.set_grad_enabled(grad):
        output = run(
            model, batch, range(len(inputs)), buffers, logits=logits, live=live
        )
        states = states_in(buffers) if buffers else None
        return Pass(
            states, token_logits(output, batch, model) if logits else None, live or {}
        )


def run(
    model: ModelLike,
    batch: PaddedBatch,
    texts: Sequence[int],
    buffers: Buffers,
    *,
    logits: bool = False,
    live: dict[Site, Tensor] | None = None,
) -> Any:
    """Run one batch, copy its states into the buffers, and stop after the last of them
    unless logits are asked for.

    `texts` are the indices that the batch's texts have in the buffers. With `live` the
    pass is made with gradients on, and the tensors that hold the states are put there.
    """
    places = {stack: buffer.places(texts) for stack, buffer in buffers.items()}
    # Looked up once: on a GPU every microsecond of a hook delays the launch of the next
    # block.
    lengths = {stack: batch.of_stack(stack).ids.shape[1] for stack in buffers}

    def keep(site: Site, tap: Tap, tensor: Tensor) -> None:
        # Where every weight is frozen, gradients begin at the first state that is kept.
        if live is not None:
            live[site] = tensor if tensor.requires_grad else tensor.requires_grad_()
        stack = site.stack
        buffer = buffers[stack]
        buffer.buffer.write(
            buffer.rows[site], tap.layout.states(tensor, lengths[stack]), places[stack]
        )

    sites = [site for buffer in buffers.values() for site in buffer.sites]
    watcher = Watcher(model.anatomy, sites, keep)
    watcher.stops = bool(sites) and not logits and not hooks.is_offloaded(model.module)
    graded = live is not None
    with (
        autograd.restored(inference=False),
        torch.set_grad_enabled(graded),
        hooks.watching(watcher.watches(model.module)),
    ):
        try:
            output = hooks.run(
                model.module,
                batch.arguments(model.module, masked=model.batching.needs_mask),
            )
        except NotFinite:  # an attention kernel lost it
            if all(buffer.is_finite(texts) for buffer in buffers.values()):
                raise
            # A state shows it too, and is named by its site when the states are put
            # together.
            output = None
    if watcher.missing:
        raise not_reached(model.anatomy, min(watcher.missing))
    return output


def check_targets(
    model: ModelLike, inputs: Inputs, sites: Sequence[Site], *, logits: bool
) -> None:
    """Refuse a pass through a decoder that has been given no text."""
    through_decoder = (
        logits or not sites or any(site.stack != "encoder" for site in sites)
    )
    if model.encoder_decoder and inputs.targets is None and through_decoder:
        model.text_encoder.required_start()


def _check_batch(model: ModelLike, batch: PaddedBatch) -> None:
    """Refuse a batch in which a text would get other states than alone."""
    batching = model.batching
    switch = batching.rope_switch
    if not batching.padding_safe and batch.has_padding:
        reason = (
            "in this model a text in a padded batch does not get the states that it"
            " gets alone"
        )
        remedy = "Record one text at a time, or use capture()."
        raise PassError(
            f"Cannot run {len(batch.lengths)} texts of different lengths in one pass",
            reason,
            remedy,
        )
    if switch is not None and min(batch.lengths) <= switch < max(batch.lengths):
        reason = (
            "this model computes every text of a batch otherwise once one is longer"
            f" than {switch:,} tokens"
        )
        raise PassError(
            "Cannot run short and long texts in one pass",
            reason,
            "Record them apart, or use capture().",
        )


def not_reached(anatomy: Anatomy, site: Site) -> PassError:
    """The error for a site that a pass did not come by."""
    reason = f"the {anatomy.taps[site]} was not called in this pass"
    return PassError(
        f"No state at {site} of {anatomy.name}",
        reason,
        "Load the model again: it has been changed.",
    )


def token_logits(output: Any, batch: PaddedBatch, model: ModelLike) -> Tensor:
    """The logits of real tokens [token, vocabulary], text after text."""
    logits = getattr(output, "logits", None)
    problem, own = f"No logits of {model.anatomy.name}", batch.of_stack("decoder")
    if not isinstance(logits, Tensor) or logits.shape[:-1] != own.ids.shape:
        reason = "it has no language-model head"
        if isinstance(logits, Tensor):
            reason = f"its head gives {list(logits.shape)}, not one row per token"
        raise PassError(
            problem, reason, "Load it with task='causal-lm' or 'masked-lm'."
        )
    rows = torch.cat([logits[text, :length] for text, length in enumerate(own.lengths)])
    if bool(rows.isnan().any()):
        reason = "the logits hold a NaN and the states none"
        raise NotFinite(problem, reason, "Look at the weights of the head.")
    return rows


class Watcher:
    """Shows each chosen state once per pass, as `keep(site, tap, tensor)`, and knows
    which are still missing.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        sites: Sequence[Site],
        keep: Callable[[Site, Tap, Tensor], None],
    ) -> None:
        self.anatomy, self.sites, self.keep = anatomy, sites, keep
        self.stops = False
        self.missing = set(sites)
        self._calls: Counter[tuple[str, hooks.Side]] = Counter()
        self._thread = threading.get_ident()

    @property
    def here(self) -> bool:
        """Whether it is called in its own thread, and not in somebody else's pass over
        the same module.
        """
        return threading.get_ident() == self._thread

    def begin(self) -> None:
        """A new pass: calls are counted from the first again."""
        self.missing = set(self.sites)
        self._calls.clear()

    def watches(self, module: nn.Module) -> list[hooks.Watch]:
        """The hooks to hold while the model runs, one for each side of each module that
        shows a chosen state.
        """
        places: dict[tuple[str, hooks.Side], list[Site]] = defaultdict(list)
        for site in self.sites:
            tap = self.anatomy.taps[site]
            places[tap.path, tap.side].append(site)
        return [
            hooks.Watch(
                module.get_submodule(place[0]), place[1], self._seen(place, sites)
            )
            for place, sites in places.items()
        ]

    def _seen(
        self, place: tuple[str, hooks.Side], sites: Sequence[Site]
    ) -> Callable[..., None]:
        taps = [(site, self.anatomy.taps[site]) for site in sites]

        def seen(*arguments: Any) -> None:
            if not self.here:
                return
            call = self._calls[place]
            self._calls[place] = call + 1
            for site, tap in taps:
                if tap.call == call:
                    tensor = tap.read(*arguments)
                    if tensor is None:
                        raise PassError(
                            f"No state at {site}",
                            f"the {tap} holds no tensor",
                            "Report this model.",
                        )
                    self.keep(site, tap, tensor)
                    self.missing.discard(site)
            if self.stops and not self.missing:
                raise hooks.Stopped

        return seen
