"""Recording: keep the states of passes that somebody else runs, in their own loop or in `generate`."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy import Anatomy, Tap, find
from hiddenscope.errors import PassError
from hiddenscope.passes.encoder import Encoded, Encoder
from hiddenscope.passes.landing import Subject
from hiddenscope.passes.record import EVERYTHING
from hiddenscope.passes.watcher import Watcher
from hiddenscope.sites import Site
from hiddenscope.states import Pair, Source, States, join


@dataclass(frozen=True)
class Seen:
    """One pass as it was seen: the ids and the mask it was given, and each state [text, token, width] it made."""

    given: Mapping[str, Any]
    states: dict[Site, Tensor] = field(default_factory=dict)

    def rows(self, stack: str | None) -> tuple[Tensor | None, Tensor | None]:
        """The ids and the mask of the texts that a stack worked on in this pass; None where it was given none."""
        prefix = "decoder_" if stack == "decoder" else ""
        ids, mask = self.given.get(f"{prefix}input_ids"), self.given.get(f"{prefix}attention_mask")
        fed = ids if ids is not None else self.given.get(f"{prefix}inputs_embeds")
        if fed is None or not isinstance(mask, Tensor) or mask.ndim != 2:
            return ids, None
        return ids, mask[:, -fed.shape[1] :]  # with a cache the mask covers the tokens of earlier passes too


class Recording:
    """What was seen so far: `passes`, one States (or Pair) for each pass, and `states`, all of them joined."""

    def __init__(self, anatomy: Anatomy, encoder: Encoder, sources: Mapping[str | None, Source]) -> None:
        self.anatomy, self.encoder, self.sources = anatomy, encoder, sources
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
            raise PassError("The recorded states", "no pass was run inside the `with`", "Call the module there.")
        if isinstance(passes[0], Pair):
            pairs = [one for one in passes if isinstance(one, Pair)]
            return Pair(join([one.encoder for one in pairs]), join([one.decoder for one in pairs]))
        return join([one for one in passes if isinstance(one, States)])

    def _states(self, seen: Seen) -> States | Pair:
        stacks = list(dict.fromkeys(site.stack for site in seen.states))
        made = [self._stack(seen, stack) for stack in stacks]
        return made[0] if len(made) == 1 else Pair(*made)

    def _stack(self, seen: Seen, stack: str | None) -> States:
        """The states of one stack, padding left out wherever it stood."""
        sites = sorted(site for site in seen.states if site.stack == stack)
        first = seen.states[sites[0]]
        ids, mask = seen.rows(stack)
        real = torch.ones(first.shape[:2], dtype=torch.bool) if mask is None else mask.bool().cpu()
        known = torch.full(first.shape[:2], -1) if ids is None else ids.cpu()
        texts = tuple(tuple(row[keep].tolist()) for row, keep in zip(known, real, strict=True))
        values = torch.stack([seen.states[site][real] for site in sites])
        return States(tuple(sites), values, self.encoder.tokens(Encoded(None, texts)), self.sources[stack])


@contextmanager
def recording(model: Subject | nn.Module, sites: Any = EVERYTHING) -> Iterator[Recording]:
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
        anatomy, module = find(model), model
        recorded = Recording(anatomy, Encoder(None, None, 0), _Unknown(anatomy.name))
        lock: AbstractContextManager[Any] = nullcontext()
    else:
        anatomy, module, lock = model.anatomy, model.module, model.lock
        stacks = {site.stack for site in anatomy.sites}
        recorded = Recording(anatomy, model.encoder, {stack: model.source(stack) for stack in stacks})
    with lock, hooks.watching(_watches(recorded, module, anatomy.select(sites))):
        yield recorded


class _Unknown(dict[str | None, Source]):
    """The source of a bare module's states: its class is all that is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __missing__(self, stack: str | None) -> Source:
        return Source(self.name)


def _watches(recorded: Recording, module: nn.Module, sites: Sequence[Site]) -> list[hooks.Watch]:
    def keep(site: Site, tap: Tap, tensor: Tensor) -> None:
        if not recorded.seen:  # an encoder that `generate` calls by itself, before the first pass of the whole
            recorded.seen.append(Seen({}))
        now = recorded.seen[-1]
        ids, mask = now.rows(site.stack)
        length = next((given.shape[1] for given in (ids, mask) if given is not None), None)
        plain = tap.layout.states(tensor.detach(), length or tensor.shape[tap.layout.token])
        now.states[site] = plain.to("cpu", copy=True)

    watcher = Watcher(recorded.anatomy, sites, keep)
    names = list(inspect.signature(module.forward).parameters)

    def begin(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        watcher.begin()
        recorded.seen.append(Seen({**dict(zip(names, args, strict=False)), **kwargs}))

    return [hooks.Watch(module, "input", begin), *watcher.watches(module)]
