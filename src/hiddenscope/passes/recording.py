"""Recording: keep the states of passes that somebody else runs, in their own loop or in
`generate`.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.arguments import require
from hiddenscope.discovery import EVERYTHING, Anatomy, Tap, find
from hiddenscope.errors import ModuleError, PassError
from hiddenscope.modules import hooks
from hiddenscope.modules.weights import check_finite
from hiddenscope.passes.inputs import Inputs
from hiddenscope.passes.protocol import ModelLike
from hiddenscope.passes.record import Watcher
from hiddenscope.passes.text_encoder import TextEncoder
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, Source, States, join


@dataclass(frozen=True)
class Seen:
    """One pass as it was seen: what was called and with what, and each state [text,
    token, width] that it made.
    """

    root: nn.Module
    given: Mapping[str, Any]
    states: dict[Site, Tensor] = field(default_factory=dict)

    def length(self, stack: str | None) -> int | None:
        """How many tokens a stack worked on in this pass; None where it does not show."""
        prefix = "decoder_" if stack == "decoder" else ""
        fed = [
            self.given.get(f"{prefix}{name}") for name in ("input_ids", "inputs_embeds")
        ]
        return next(
            (tensor.shape[1] for tensor in fed if isinstance(tensor, Tensor)), None
        )

    def rows(self, stack: str | None) -> tuple[Tensor | None, Tensor | None]:
        """The ids and the mask of the texts that a stack worked on in this pass; None
        where it was given none.
        """
        prefix = "decoder_" if stack == "decoder" else ""
        ids, mask = (
            self.given.get(f"{prefix}input_ids"),
            self.given.get(f"{prefix}attention_mask"),
        )
        length = self.length(stack)
        if length is None or not isinstance(mask, Tensor) or mask.ndim != 2:
            return ids, None
        # With a cache the mask covers the tokens of earlier passes too.
        return ids, mask[:, -length:]


class Recording:
    """What was seen so far: `passes`, one States (or Pair) for each pass, and `states`,
    all of them joined.
    """

    def __init__(
        self,
        anatomy: Anatomy,
        text_encoder: TextEncoder,
        sources: Mapping[str | None, Source],
    ) -> None:
        self.anatomy, self.text_encoder, self.sources = anatomy, text_encoder, sources
        self.seen: list[Seen] = []

    @property
    def passes(self) -> list[States | Pair]:
        """The states of each pass, real tokens only."""
        return [self._states(seen) for seen in self.seen if seen.states]

    @property
    def states(self) -> States | Pair:
        """The states of every pass, text after text."""
        passes = self.passes
        if not passes:
            raise PassError(
                "No recorded states",
                "no pass was run inside the `with`",
                "Call the module there.",
            )
        parts = [
            part
            for one in passes
            for part in ([one.encoder, one.decoder] if isinstance(one, Pair) else [one])
        ]
        stacks = dict.fromkeys(part.sites[0].stack for part in parts)
        joined = [
            join([part for part in parts if part.sites[0].stack == stack])
            for stack in stacks
        ]
        return joined[0] if len(joined) == 1 else Pair(*joined)

    def _states(self, seen: Seen) -> States | Pair:
        stacks = list(dict.fromkeys(site.stack for site in seen.states))
        made = [self._stack(seen, stack) for stack in stacks]
        return made[0] if len(made) == 1 else Pair(*made)

    def _stack(self, seen: Seen, stack: str | None) -> States:
        """The states of one stack, padding left out wherever it stood."""
        sites = sorted(site for site in seen.states if site.stack == stack)
        first = seen.states[sites[0]]
        ids, mask = seen.rows(stack)
        real = (
            torch.ones(first.shape[:2], dtype=torch.bool)
            if mask is None
            else mask.bool().cpu()
        )
        known = torch.full(first.shape[:2], -1) if ids is None else ids.cpu()
        texts = tuple(
            tuple(row[keep].tolist()) for row, keep in zip(known, real, strict=True)
        )
        values = torch.stack([seen.states[site][real] for site in sites])
        return States(
            tuple(sites),
            values,
            self.text_encoder.tokens(Inputs(texts)),
            self.sources[stack],
        )


@contextmanager
def recording(
    model: ModelLike | nn.Module, sites: SitePatterns = EVERYTHING
) -> Iterator[Recording]:
    """Keep the states of every pass that is run inside the `with`, whoever runs it.

    `model` is a Model, or a module, whose states are then found and proved first.

    >>> import torch
    >>> from hiddenscope.testing import tiny_model
    >>> module = tiny_model("llama")
    >>> with recording(module, "layer.1,final") as rec:
    ...     _ = module(torch.tensor([[5, 6, 7]]))
    >>> rec.states.values.shape
    torch.Size([2, 3, 64])
    """
    if isinstance(model, nn.Module):
        if hasattr(model, "_orig_mod"):
            reason = "it is compiled, and compiled code calls no hooks"
            raise ModuleError(
                "Cannot record the passes of this module",
                reason,
                "Give and call the module inside it.",
            )
        anatomy, module = find(model), model
        recorded = Recording(
            anatomy, TextEncoder(None, None, 0), _bare_sources(anatomy)
        )
        lock: AbstractContextManager[Any] = nullcontext()
    else:
        require(model, ModelLike | nn.Module, "model", "recording")
        anatomy, module, lock = model.anatomy, model.module, model.lock
        stacks = {site.stack for site in anatomy.sites}
        recorded = Recording(
            anatomy,
            model.text_encoder,
            {stack: model.source(stack) for stack in stacks},
        )
    check_finite(module)
    watches = _Following(recorded, module, anatomy.select(sites)).watches()
    with lock, hooks.finite_attention(), hooks.watching(watches):
        yield recorded


def _bare_sources(anatomy: Anatomy) -> dict[str | None, Source]:
    """Where the states of a bare module come from: its class, and what its proof says
    of each stack.
    """
    sources: dict[str | None, Source] = {}
    for stack in {site.stack for site in anatomy.sites}:
        found = next(part for part in anatomy.stacks if stack in (None, part.name))
        reported = tuple(
            "" if site is None else str(site) for site in anatomy.reported(found)
        )
        dtype = str(found.proof.dtype).removeprefix("torch.")
        final = found.proof.final is not None
        sources[stack] = Source(
            anatomy.name, dtype=dtype, depth=found.depth, final=final, reported=reported
        )
    return sources


class _Following:
    """Tells the passes apart: each is a call of the whole module, or of its encoder
    alone, as `generate` makes it.
    """

    def __init__(
        self, recorded: Recording, module: nn.Module, sites: Sequence[Site]
    ) -> None:
        self.recorded, self.module = recorded, module
        self.watcher = Watcher(recorded.anatomy, sites, self._keep)
        self.now: Seen | None = None

    def watches(self) -> list[hooks.Watch]:
        """The watches to be held; a pass that ends in an error is not kept."""
        roots = [self.module]
        encoder: Any = getattr(self.module, "get_encoder", None)
        if encoder is not None and len(self.recorded.anatomy.stacks) > 1:
            roots.append(encoder())
        begin = [
            hooks.Watch(root, "input", partial(self._begin, root)) for root in roots
        ]
        end = [hooks.Watch(root, "output", partial(self._end, root)) for root in roots]
        return [*begin, *self.watcher.watches(self.module), *end]

    def _begin(
        self, root: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        within = (
            root is not self.module and self.now is not None and not self.now.states
        )
        if self.watcher.here and not within:
            names = inspect.signature(root.forward).parameters
            self.now = Seen(root, {**dict(zip(names, args, strict=False)), **kwargs})
            self.watcher.begin()

    def _keep(self, site: Site, tap: Tap, tensor: Tensor) -> None:
        if self.now is None:
            reason = (
                f"the {tap} was reached, and {type(self.module).__name__} itself was"
                " not called"
            )
            raise PassError(
                f"Cannot place the state at {site}",
                reason,
                "Call the whole module, or record the part.",
            )
        length = self.now.length(site.stack) or tensor.shape[tap.layout.token]
        self.now.states[site] = tap.layout.states(tensor.detach(), length).to(
            "cpu", copy=True
        )

    def _end(self, root: nn.Module, output: Any) -> None:
        if self.watcher.here and self.now is not None and self.now.root is root:
            self.recorded.seen.append(self.now)
            self.now = None
