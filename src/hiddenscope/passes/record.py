"""Record: run a model and keep the states that are wanted.

Hooks copy the rows of real tokens, never padding, straight into one buffer; the pass stops when the last wanted state
has been seen, and the head runs only when logits are asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hiddenscope import hooks
from hiddenscope.anatomy import EVERYTHING, Tap
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.passes.batch import Batch
from hiddenscope.passes.condition import watchable
from hiddenscope.passes.encoder import Encoded, Texts
from hiddenscope.passes.landing import Landing, Subject, landings, together
from hiddenscope.passes.watcher import Watcher
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States

Prepared: TypeAlias = tuple[Encoded, Encoded | None, Batch]


@dataclass(frozen=True)
class Pass:
    """What one pass gave: states, logits [token, vocabulary] if asked for, and with `grad` the live tensors.

    `notes` say what was done otherwise than usual.
    """

    states: States | Pair
    logits: Tensor | None = None
    live: Mapping[Site, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def run(
    subject: Subject,
    batch: Batch,
    texts: Sequence[int],
    landed: Mapping[str | None, Landing],
    *,
    logits: bool = False,
    live: dict[Site, Tensor] | None = None,
) -> Any:
    """Make one pass over a batch, let its states land, and stop after the last of them unless logits are wanted.

    `texts` are the numbers that the batch's texts have in the landings. With `live` the pass is made with gradients on,
    and the tensors that hold the states are put there.
    """
    rows = {stack: {site: row for row, site in enumerate(landing.sites)} for stack, landing in landed.items()}
    places = {stack: landing.places(texts) for stack, landing in landed.items()}

    def keep(site: Site, tap: Tap, tensor: Tensor) -> None:
        if live is not None:  # where every weight is frozen, gradients begin at the first state that is kept
            live[site] = tensor if tensor.requires_grad else tensor.requires_grad_()
        length = batch.tokens(site.stack).ids.shape[1]
        stack = site.stack
        landed[stack].buffer.write(rows[stack][site], tap.layout.states(tensor, length), places[stack])

    watcher = Watcher(subject.anatomy, [site for landing in landed.values() for site in landing.sites], keep)
    watcher.stops = not logits and not hooks.is_offloaded(subject.module)
    graded = live is not None
    with torch.inference_mode(False), torch.set_grad_enabled(graded), hooks.watching(watcher.watches(subject.module)):
        output = hooks.run(subject.module, batch.arguments(subject.module, masked=subject.masks))
    _all_seen(watcher, subject)
    return output


def record(
    model: Subject,
    batch: Texts,
    sites: Any = EVERYTHING,
    *,
    targets: Texts | None = None,
    logits: bool = False,
    grad: bool = False,
) -> Pass:
    """Run the model once over a batch of texts and keep the states that are wanted.

    With `logits` the head runs too. With `grad` the tensors themselves are kept in `live`, as the model made them, so
    that gradients can flow.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> record(load((tiny_model("llama"), None)), [[5, 6, 7]], "layer.1").states.values.shape
    torch.Size([1, 3, 64])
    """
    watchable(model.module)
    wanted = model.anatomy.select(sites)
    return make(model, prepare(model, batch, targets), wanted, logits=logits, grad=grad)


def make(model: Subject, prepared: Prepared, wanted: Sequence[Site], *, logits: bool, grad: bool = False) -> Pass:
    """Make the pass over one batch that was prepared, and keep the wanted sites."""
    encoded, aims, filled = prepared
    if not model.batches and (filled.padded or (filled.targets is not None and filled.targets.padded)):
        reason = "a text in a padded batch does not give what it gives alone, in this model"
        raise PassError(f"One pass over {len(filled.lengths)} texts", reason, "Record one at a time, or use capture().")
    if model.turn is not None and min(filled.lengths) <= model.turn < max(filled.lengths):
        reason = f"this model computes every text otherwise once one is longer than {model.turn:,} tokens"
        raise PassError("One pass over short and long texts", reason, "Record them apart, or use capture().")
    landed = landings(model, wanted, encoded, aims)
    live: dict[Site, Tensor] | None = {} if grad else None
    with model.lock, torch.inference_mode(False), torch.set_grad_enabled(grad):
        output = run(model, filled, range(len(filled.lengths)), landed, logits=logits, live=live)
        states = together(landed)
        return Pass(states, _logits(output, filled, model) if logits else None, live or {})


def prepare(model: Subject, texts: Texts, targets: Texts | None) -> Prepared:
    """Texts, and a decoder's targets where there is one, encoded and filled up to one batch."""
    with model.lock:  # a tokenizer serves one thread at a time
        encoded = model.encoder.encode(texts)
    two = len(model.anatomy.stacks) > 1
    if targets is not None and not two:
        raise PassError("Targets for a decoder", f"{model.anatomy.name} has one stack", "Leave `targets` out.")
    aims = model.encoder.targets(targets, len(encoded.ids)) if two else None
    return encoded, aims, make_batch(model, encoded, aims, range(len(encoded.ids)))


def make_batch(model: Subject, encoded: Encoded, targets: Encoded | None, texts: Sequence[int]) -> Batch:
    """Some of the encoded texts as one batch."""
    pad = model.encoder.pad
    aims = None if targets is None else Batch.of([targets.ids[i] for i in texts], pad, model.device)
    return Batch.of([encoded.ids[i] for i in texts], pad, model.device, aims)


def _all_seen(watcher: Watcher, model: Subject) -> None:
    if watcher.missing:
        site = min(watcher.missing)
        reason = f"the {model.anatomy.taps[site]} was not called in this pass"
        raise PassError(f"The state at {site} of {model.anatomy.name}", reason, "Load the model anew: it was changed.")


def _logits(output: Any, batch: Batch, model: Subject) -> Tensor:
    """The logits of real tokens, text after text."""
    logits = getattr(output, "logits", None)
    problem, fed = f"Logits of {model.anatomy.name}", batch.targets or batch
    if not isinstance(logits, Tensor) or logits.shape[:-1] != fed.ids.shape:
        gives = f"its head gives {list(logits.shape)}, not one row a token" if isinstance(logits, Tensor) else ""
        remedy = "Load it with task='causal-lm' or 'masked-lm'."
        raise PassError(problem, gives or "it has no head that gives any", remedy)
    rows = torch.cat([logits[text, :length] for text, length in enumerate(fed.lengths)])
    if bool(rows.isnan().any()):
        raise NotFinite(
            problem, "there is a NaN among them, and none in the states", "Look at the weights of the head."
        )
    return rows
