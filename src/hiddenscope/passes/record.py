"""Record: run a model once and keep the requested states.

Hooks copy the rows of real tokens, never padding, straight into one buffer. The pass
stops after the deepest requested site, and the head runs only if logits are requested.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked
from hiddenscope.discovery import EVERYTHING, Anatomy, OperationTap, Tap, Write
from hiddenscope.errors import ModuleError, NotFinite, PassError
from hiddenscope.modules import autograd, calls, hooks, operations
from hiddenscope.modules.quantised import refuse_gradients
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.buffers import Buffers, Keep, buffers_for, states_in
from hiddenscope.passes.inputs import Inputs, PaddedBatch, PassModel, Texts
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, States

# The remedy for a head that gives one row per text, such as a classifier's.
OTHER_HEAD = "Use a model with a language-model head."

Keeper: TypeAlias = Callable[[Site, Tap | OperationTap, Tensor], Tensor | None]
"""Called with the tensor in which a tap shows the state of a site.

What it returns, if anything, takes the tensor's place.
"""

Calls: TypeAlias = dict[tuple[str | None, int], int]
"""How often each watched module was called in this pass, by its stack and a number."""


@dataclass(frozen=True)
class Pass:
    """The states of one pass, and its logits [token, vocabulary] if requested.

    `recorded` is None for a pass without sites. With `grad`, `live` holds the tensors
    themselves. `notes` say what was unusual about how the pass was run.
    """

    recorded: States | Pair | None
    logits: Tensor | None = None
    live: Mapping[Site, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> States | Pair:
        """Return the recorded states; raise PassError where there are none."""
        if self.recorded is None:
            raise PassError(
                "No states",
                "the pass was made with sites=()",
                "Name the sites to keep.",
            )
        return self.recorded


@checked
def record(
    model: PassModel,
    inputs: Texts | Inputs,
    sites: SitePatterns = EVERYTHING,
    *,
    targets: Texts | None = None,
    logits: bool = False,
    grad: bool = False,
    keep: Keep = "host",
) -> Pass:
    """Run the model once over a batch of texts and keep the states at some sites.

    `sites=()` keeps none, for the logits alone. With `logits` the head runs too. With
    `grad` the tensors themselves are kept in `live`, as the model made them, so that
    gradients can flow. `keep="device"` leaves states where they were computed.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> record(model, [[5, 6, 7]], "layer.1").states.values.shape
    torch.Size([1, 3, 64])
    """
    require_recordable(model.module)
    selected = model.anatomy.select(sites)
    encoded = model.encode(inputs, targets=targets)
    return make_pass(model, encoded, selected, logits=logits, grad=grad, keep=keep)


def make_pass(
    model: PassModel,
    inputs: Inputs,
    sites: Sequence[Site],
    *,
    logits: bool = False,
    grad: bool = False,
    keep: Keep = "host",
) -> Pass:
    """Run encoded texts as one batch and keep the states at some sites."""
    check_targets(model, inputs, sites, logits=logits)
    for site in sites:
        if grad and site.index is not None:
            raise PassError(
                f"No gradient at {site}",
                f"what it adds is computed from {site.whole} beside the pass",
                f"Take the gradient at {site.whole}, and its columns.",
            )
    if grad:
        refuse_gradients(model.module)
    batch = inputs.pad(model)
    conflict = batch_conflict(model, batch)
    if conflict is not None:
        raise conflict
    buffers = buffers_for(model, sites, inputs, keep=keep)
    live: dict[Site, Tensor] | None = {} if grad else None
    texts = range(len(inputs))
    with model.lock, autograd.restored(inference=False), torch.set_grad_enabled(grad):
        output = run_pass(model, batch, texts, buffers, logits=logits, live=live)
        return Pass(
            states_in(buffers) if buffers else None,
            token_logits(output, batch, model) if logits else None,
            live or {},
        )


def run_pass(
    model: PassModel,
    batch: PaddedBatch,
    texts: Sequence[int],
    buffers: Buffers,
    *,
    logits: bool = False,
    live: dict[Site, Tensor] | None = None,
    checks: bool = True,
) -> Any:
    """Run one batch and copy its states into the buffers.

    The pass stops after the last of the states unless logits are requested. `texts`
    are the indices that the batch's texts have in the buffers. With `live` gradients
    are on, and the tensors that hold the states are put there. The caller `checks` that
    all states are finite, or attention is checked in every pass.
    """
    # Looked up once: on a GPU every microsecond of a hook delays the launch of the next
    # block.
    lengths = {stack: batch.of_stack(stack).ids.shape[1] for stack in buffers}
    places = {}
    for stack, buffer in buffers.items():
        places[stack] = buffer.places(texts, lengths[stack])

    def keep(site: Site, tap: Tap | OperationTap, tensor: Tensor) -> Tensor | None:
        stack = site.stack
        states = tap.layout.states(tensor, lengths[stack])
        buffers[stack].write(site, states, places[stack])
        if live is None:
            return None
        # Where every weight is frozen, gradients begin at the first state that is kept.
        live[site] = tensor if tensor.requires_grad else tensor.requires_grad_()
        if not site.is_inner:
            return None
        # Another part may read the same tensor, as attention does where one norm feeds
        # both it and the MLP: the gradient is that of this part alone.
        live[site] = tensor.view_as(tensor)
        return live[site]

    sites: list[Site] = []
    for buffer in buffers.values():
        sites += buffer.sites
    module = model.module
    watcher = Watcher(model.anatomy, sites, keep)
    watcher.stops = bool(sites) and not logits and not hooks.is_offloaded(module)
    arguments = batch.arguments(module, masked=model.batching.needs_mask)
    shown = None
    if checks:
        shown = shown_blocks(model.anatomy, sites, logits=logits)
    try:
        with (
            autograd.restored(inference=False),
            torch.set_grad_enabled(live is not None),
            hooks.finite_attention(module, shown=shown),
            hooks.watching(watcher.watches(module)),
        ):
            output = hooks.call_module(module, arguments, finite=False)
    except NotFinite:
        # An attention kernel lost a NaN. If a state shows one too, it is named by its
        # site when the states are put together.
        if all(buffer.is_finite(texts) for buffer in buffers.values()):
            raise
        output = None
    if watcher.missing:
        raise not_reached(model.anatomy, min(watcher.missing))
    return output


def shown_blocks(
    anatomy: Anatomy, sites: Sequence[Site], *, logits: bool
) -> int | None:
    """Count the blocks of a pass, if its last states show any NaN that came up in them.

    They do where every block adds to the stream, or norms it: what is not finite at a
    token stays there. It is None where a block does not, or a stack ends in no state.
    """
    blocks = 0
    for stack in anatomy.stacks:
        deepest = max(
            (site for site in sites if anatomy.stack(site) is stack), default=None
        )
        if deepest is None or deepest.part or "other" in stack.kind:
            return None
        layer = stack.depth if deepest.layer is None else deepest.layer
        if layer < stack.depth and (logits or len(anatomy.stacks) > 1):
            return None
        blocks += layer
    return blocks


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
    states = make_pass(model, inputs, sorted({*sites}), keep="device").states
    assert isinstance(states, States), "the sites are of one stack"
    return {site: states[site][list(rows)] for site in sites}


def require_recordable(module: nn.Module) -> nn.Module:
    """Return the module whose parts are really called.

    A ModuleError says why its states cannot be recorded, and a NotFinite names a weight
    that is not finite. `torch.compile` returns a wrapper around the module; the module
    inside is recorded, and runs uncompiled. Parts in train() mode are refused if their
    code reads `training`.

    >>> require_recordable(nn.Linear(2, 2).eval())
    Linear(in_features=2, out_features=2, bias=True)
    """
    inside: nn.Module = getattr(module, "_orig_mod", module)
    problem = _problem(inside)
    if problem is not None:
        reason, remedy = problem
        raise ModuleError(
            f"Cannot record the states of {type(inside).__name__}", reason, remedy
        )
    check_finite(inside)
    return inside


def _problem(module: nn.Module) -> tuple[str, str] | None:
    """Return the reason why a module cannot be recorded, with the remedy."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return (
            f"{type(module).__name__} runs copies of it",
            "Give the module inside: `module.module`.",
        )
    has_weights = has_meta_weights = is_compiled = False
    for path, part in hooks.parts_of(module).items():
        if part.training and calls.depends_on_mode(part):
            where = f" at {path}" if path else ""
            return (
                f"it is in train() mode{where}, where its code computes something else",
                "Call module.eval() first.",
            )
        is_compiled = is_compiled or part._compiled_call_impl is not None
        for name, weight in part._parameters.items():
            if type(weight).__name__ == "DTensor":
                return (
                    f"`{path}.{name}` is split by tensor parallelism, and a state in"
                    " parts cannot be proved",
                    "Load it on one device, or spread whole layers: device='balanced'.",
                )
            if weight is not None:
                has_weights = True
                has_meta_weights = has_meta_weights or weight.is_meta
    if is_compiled:
        return (
            "it was compiled in place, and compiled code calls no hooks",
            "Give the module before `.compile()`, or wrap it with"
            " `torch.compile(module)` instead.",
        )
    if has_meta_weights and not hooks.is_offloaded(module):
        return (
            "it has weights on the meta device, which hold no numbers",
            "Load its weights first.",
        )
    if not has_weights:
        return "it has no weights", "Give a model."
    return None


def check_targets(
    model: PassModel, inputs: Inputs, sites: Sequence[Site], *, logits: bool
) -> None:
    """Refuse a pass through a decoder that has no text and no start token."""
    if not model.encoder_decoder or inputs.targets is not None:
        return
    encoder_only = bool(sites) and all(site.stack == "encoder" for site in sites)
    if logits or not encoder_only:
        model.text_encoder.required_start()


def batch_conflict(model: PassModel, batch: PaddedBatch) -> PassError | None:
    """Return the error for a batch in which a text gets other states than by itself."""
    batching = model.batching
    if not batching.padding_safe and batch.has_padding:
        return PassError(
            f"Cannot run {len(batch.lengths)} texts of different lengths in one pass",
            "in this model a text in a padded batch does not get the states that it"
            " gets alone",
            "Record one text at a time, or use capture().",
        )
    # With LongRoPE, a text beyond the switch changes the rotary frequencies of its
    # whole batch.
    switch = batching.rope_switch
    if switch is not None and min(batch.lengths) <= switch < max(batch.lengths):
        return PassError(
            "Cannot run short and long texts in one pass",
            "this model computes every text of a batch otherwise once one is longer"
            f" than {switch:,} tokens",
            "Record them apart, or use capture().",
        )
    return None


def not_reached(anatomy: Anatomy, site: Site) -> PassError:
    """Return the error for a site that a pass did not reach."""
    return PassError(
        f"No state at {site} of {anatomy.name}",
        f"the {anatomy.tap(site)} was not called in this pass",
        "Load the model again: it has been changed.",
    )


def load_with_head(model: PassModel) -> str:
    """Return the remedy for a model that was loaded without a language-model head."""
    if calls.plain_parameters(model.module) is not None:
        return OTHER_HEAD
    if model.encoder_decoder:
        return "Load it with task='seq2seq-lm'."
    return "Load it with task='causal-lm' or 'masked-lm'."


def token_logits(output: Any, batch: PaddedBatch, model: PassModel) -> Tensor:
    """Return the logits of real tokens [token, vocabulary], text after text."""
    logits = batch_logits(output, batch, model)
    texts = batch.of_stack("decoder")
    rows = [logits[text, :length] for text, length in enumerate(texts.lengths)]
    real = torch.cat(rows)
    if real.isnan().any():
        raise NotFinite(
            f"No logits of {model.anatomy.name}",
            "the logits hold a NaN and the states none",
            "Look at the weights of the head.",
        )
    return real


def batch_logits(output: Any, batch: PaddedBatch, model: PassModel) -> Tensor:
    """Return the logits [text, token, vocabulary] of a batch, padding included."""
    logits = None
    if model.anatomy.makes_logits:
        logits = hooks.logits_in(output)
    if logits is None:
        reason, remedy = "it has no language-model head", load_with_head(model)
    elif logits.shape[:-1] != batch.of_stack("decoder").ids.shape:
        reason = f"its head gives {list(logits.shape)}, not one row per token"
        remedy = OTHER_HEAD
    else:
        return logits
    raise PassError(f"No logits of {model.anatomy.name}", reason, remedy)


@dataclass(eq=False)
class Watcher:
    """Hands each requested state to `keep(site, tap, tensor)`, once per pass.

    `missing` are the sites that this pass has not shown yet, and with `stops` the pass
    ends when there are none.
    """

    anatomy: Anatomy
    sites: Sequence[Site]
    keep: Keeper
    stops: bool = False
    missing: set[Site] = field(default_factory=set)
    calls: Calls = field(default_factory=dict)

    def begin(self) -> None:
        """Start a new pass, in which calls are counted from the first again."""
        self.missing = set(self.sites)
        self.calls.update(dict.fromkeys(self.calls, 0))

    def watches(self, module: nn.Module) -> list[hooks.Watch]:
        """Return a hook for each tap that shows requested states."""
        self.begin()
        # All heads of a block are read at one tap.
        writes: dict[Tap | OperationTap, dict[Site, Write | None]] = defaultdict(dict)
        for site in self.sites:
            tap = self.anatomy.tap(site)
            writes[tap][site] = None
            if site.index is not None:
                writes[tap][site] = self.anatomy.write(module, site)
        watches = []
        for tap, by_site in writes.items():
            show = partial(self._show, tap, by_site)
            watches.append(watch_tap(module, tap, None, self.calls, show))
        return watches

    def _show(
        self,
        tap: Tap | OperationTap,
        writes: Mapping[Site, Write | None],
        tensor: Tensor,
    ) -> Tensor | None:
        replaced = None
        for site, write in writes.items():
            new = self.keep(site, tap, tensor if write is None else write(tensor))
            replaced = replaced if new is None else new
            self.missing.discard(site)
        if self.stops and not self.missing:
            raise hooks.Stopped
        return replaced


def watch_tap(
    module: nn.Module,
    tap: Tap | OperationTap,
    stack: str | None,
    calls: Calls,
    callback: Callable[[Tensor], Tensor | None],
) -> hooks.Watch:
    """Watch a tap of a stack in the right call of its module.

    The callback gets the tensor, and what it returns takes the tensor's place.
    """
    key = stack, len(calls)
    calls[key] = 0
    forwards: list[object] = []

    def number_call() -> int:
        calls[key] += 1
        return calls[key] - 1

    if isinstance(tap, Tap):
        return tap.watch(module, callback, number_call)

    def at_operation(
        operation: operations.Operation, run: operations.RunOperation
    ) -> Any:
        # Each call of the module has a stand-in of its own.
        if forwards != [operation.forward]:
            forwards[:] = [operation.forward]
            calls[key] += 1
        if calls[key] != tap.call + 1 or not tap.is_at(operation):
            return run(operation)
        # An operand is changed before the operation is made, an output after it.
        if tap.operand < 0:
            output = run(operation)
            new = callback(output)
            return output if new is None else new
        new = callback(operation.operands[tap.operand])
        if new is not None:
            operation = operation.with_operand(tap.operand, new)
        return run(operation)

    return hooks.Watch(module.get_submodule(tap.path), tap.side, at_operation)
