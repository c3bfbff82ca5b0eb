"""Edit: run a model while states change on their way.

A change of `layer.k` or `final` is made where that state passes, and so is one of
`attn`, `cross` and `mlp`, which are what a branch adds. In a pre-norm block `mid` is
seen only as it enters a norm, while the stream goes past it: there the change is made
in what the last branch before it adds, so that the stream changes too.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked, require
from hiddenscope.discovery import EVERYTHING, Anatomy, Tap, find
from hiddenscope.errors import ModuleError, PassError, SiteError, StatesError
from hiddenscope.modules import hooks
from hiddenscope.passes.changes import (
    Add,
    Change,
    Positions,
    Project,
    Replace,
    Scale,
    changed,
    check,
)
from hiddenscope.passes.inputs import Inputs, Texts
from hiddenscope.passes.protocol import ModelLike, recordable
from hiddenscope.passes.record import Pass, make_pass
from hiddenscope.sites import Site, SitePatterns

CACHES = ("past_key_values", "cache_params", "state", "mems")


@checked
def edit(
    model: ModelLike,
    inputs: Texts | Inputs,
    changes: Mapping[str | Site, Change],
    sites: SitePatterns = EVERYTHING,
    *,
    targets: Texts | None = None,
    logits: bool = False,
    grad: bool = False,
) -> Pass:
    """Run the model once over a batch of texts while the states at some sites change;
    keep the states that are wanted.

    A change is `Replace`, `Add`, `Scale` or `Project`, or a function of the states
    [text, token, width]. The states that are kept are those after the change. Padding
    is never changed, nor any tensor of the model's own. With `grad` the tensors
    themselves are in `live`, and gradients flow through them, and through a function to
    what it is made of.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> edit(model, [[5, 6, 7]], {"layer.1": Scale(0.0, tokens=1)}, "layer.1").states["layer.1"][1].abs().sum()
    tensor(0.)
    """
    recordable(model.module)
    planned = plan(model.anatomy, changes)
    chosen = model.anatomy.select(sites)
    encoded = model.encode(inputs, targets=targets)
    positions = {site.stack: Positions.of(encoded.of(site.stack)) for site in planned}
    for site, change in planned.items():
        rows = len(positions[site.stack].chosen(getattr(change, "tokens", None))[0])
        check(change, rows, model.anatomy.width(site), site)
    editor = Editor(model.anatomy, planned, lambda stack, tensor, tap: positions[stack])
    with model.lock, hooks.watching(editor.watches(model.module)):
        return make_pass(model, encoded, chosen, logits=logits, grad=grad)


@contextmanager
def editing(
    model: ModelLike | nn.Module, changes: Mapping[str | Site, Change]
) -> Iterator[None]:
    """Change states in every pass that is run inside the `with`, whoever runs it,
    `generate` included.

    Positions count over the whole text so far: with a cache, a token is changed in the
    pass that it is fed in, and -1 is the last token of each pass.

    >>> import torch
    >>> from hiddenscope.testing import tiny_model
    >>> module, ids = tiny_model("llama"), torch.tensor([[5, 6, 7]])
    >>> before = module(ids).logits
    >>> with editing(module, {"layer.2": Scale(2.0, tokens=-1)}):
    ...     after = module(ids).logits
    >>> (before != after).any(-1)
    tensor([[False, False,  True]])
    """
    if isinstance(model, nn.Module):
        if hasattr(model, "_orig_mod"):
            reason = "it is compiled, and compiled code calls no hooks"
            raise ModuleError(
                "Cannot edit the passes of this module",
                reason,
                "Give and call the module inside it.",
            )
        anatomy, module = find(model), model
        lock: AbstractContextManager[Any] = nullcontext()
    else:
        require(model, ModelLike | nn.Module, "model", "editing")
        anatomy, module, lock = model.anatomy, model.module, model.lock
    planned = plan(anatomy, changes)
    for site, change in planned.items():
        check(change, -1, anatomy.width(site), site)
    following = _Following(anatomy, planned, module)
    with lock, hooks.watching(following.watches()):
        yield
    if not following.given:
        reason = "the module was not called inside the `with`"
        remedy = (
            "Call the module itself there: a wrapper that torch.compile made before"
            " calls no hooks."
        )
        raise PassError("Nothing was changed", reason, remedy)


def plan(anatomy: Anatomy, changes: Any) -> dict[Site, Change]:
    """Each change by its site, in the order of the pass; what cannot be changed is
    refused.
    """
    if not isinstance(changes, Mapping) or not changes:
        reason = (
            "the dict is empty"
            if isinstance(changes, Mapping)
            else f"got {type(changes).__name__}"
        )
        raise StatesError(
            "No changes",
            reason,
            "Give a dict from sites to changes, as {'layer.3': hs.Scale(0.0)}.",
        )
    planned: dict[Site, Change] = {}
    for pattern, change in changes.items():
        if isinstance(change, type) or not (
            isinstance(change, Replace | Add | Scale | Project) or callable(change)
        ):
            kind = (
                change.__name__ if isinstance(change, type) else type(change).__name__
            )
            remedy = (
                "Give Replace(...), Add(...), Scale(...), Project(...) or a function."
            )
            raise StatesError(f"Cannot change {pattern}", f"got {kind}", remedy)
        for site in anatomy.select(pattern):
            if site in planned:
                raise StatesError(
                    f"Cannot change {site} twice",
                    "a site takes one change",
                    "Give one change for each site.",
                )
            _changeable(anatomy, site)
            planned[site] = change
    return dict(sorted(planned.items()))


def _changeable(anatomy: Anatomy, site: Site) -> None:
    """Refuse a site whose state goes on past the place where it is seen."""
    stack = anatomy.stack(site)
    enters = stack.proof.taps[0]
    problem, remedy = (
        f"Cannot change {site} of {anatomy.name}",
        "Change another site, such as the layer above.",
    )
    if anatomy.taps[site] == enters and enters.path != stack.blocks[0].path:
        raise SiteError(
            problem,
            f"it is seen only at the {enters}, and the residual stream goes past that",
            remedy,
        )
    if (
        site.part == "mid"
        and _at_a_norm(anatomy, site)
        and stack.blocks[_layer(site) - 1].kind != "pre-norm"
    ):
        raise SiteError(
            problem,
            f"it is seen only at the {anatomy.taps[site]}, and the residual stream goes"
            " past that",
            remedy,
        )


def _layer(site: Site) -> int:
    return site.layer or 0


def _at_a_norm(anatomy: Anatomy, site: Site) -> bool:
    """Whether `mid` is shown where a norm takes it in, and not where the stream itself
    passes.
    """
    block = anatomy.stack(site).blocks[_layer(site) - 1]
    return anatomy.taps[site].side == "input" and block.kind != "parallel"


Where = Callable[[str | None, Tensor, Tap], Positions]


@dataclass
class _Calls:
    """Counts the calls of one watch in a pass."""

    stack: str | None
    count: int = 0


class Editor:
    """Makes the changes of a pass; `where(stack, tensor, tap)` says where the tokens of
    a tensor stand.
    """

    def __init__(
        self, anatomy: Anatomy, planned: Mapping[Site, Change], where: Where
    ) -> None:
        self.anatomy, self.planned, self.where = anatomy, planned, where
        self._calls: list[_Calls] = []
        self._stream: dict[Site, Tensor] = {}
        self._thread = threading.get_ident()

    @property
    def here(self) -> bool:
        """Whether it is called in its own thread, and not in somebody else's pass over
        the same module.
        """
        return threading.get_ident() == self._thread

    def begin(self, stacks: Sequence[str | None]) -> None:
        """A new pass through some stacks: calls are counted from the first again."""
        for calls in self._calls:
            if calls.stack in stacks:
                calls.count = 0

    def watches(self, module: nn.Module) -> list[hooks.Watch]:
        """The watches to be held, in the order of the pass, so that a change sees what
        those before it made.
        """
        made: list[hooks.Watch] = []
        for site, change in self.planned.items():
            if site.part == "mid" and _at_a_norm(self.anatomy, site):
                made += self._around(module, site, change)
            else:
                made.append(
                    self._watch(module, site, partial(self._changed, site, change))
                )
        return made

    def _changed(self, site: Site, change: Change, tap: Tap, tensor: Tensor) -> Tensor:
        where = self.where(site.stack, tensor, tap)
        states = tap.layout.states(tensor, where.positions.shape[1])
        return tap.layout.with_states(tensor, changed(change, states, where, site))

    def _around(
        self, module: nn.Module, site: Site, change: Change
    ) -> list[hooks.Watch]:
        """A change of the stream in the middle of a pre-norm block, made in the last
        branch that is added before.
        """
        before = Site(_layer(site) - 1, "", site.stack)
        branches = [replace(site, part=part) for part in ("attn", "cross")]
        branches = [branch for branch in branches if branch in self.anatomy.taps]
        enter = self._watch(module, before, partial(self._enter, site))
        passing = [
            self._watch(module, branch, partial(self._pass, site))
            for branch in branches[:-1]
        ]
        return [
            enter,
            *passing,
            self._watch(module, branches[-1], partial(self._join, site, change)),
        ]

    def _states(self, site: Site, tap: Tap, tensor: Tensor) -> Tensor:
        return tap.layout.states(
            tensor, self.where(site.stack, tensor, tap).positions.shape[1]
        )

    def _enter(self, site: Site, tap: Tap, tensor: Tensor) -> None:
        self._stream[site] = self._states(site, tap, tensor)

    def _pass(self, site: Site, tap: Tap, tensor: Tensor) -> None:
        self._stream[site] = self._stream[site] + self._states(site, tap, tensor)

    def _join(self, site: Site, change: Change, tap: Tap, tensor: Tensor) -> Tensor:
        stream, branch = self._stream.pop(site), self._states(site, tap, tensor)
        mid = stream + branch
        new = changed(change, mid, self.where(site.stack, tensor, tap), site)
        return tap.layout.with_states(
            tensor, torch.where(new == mid, branch, (new - stream).to(branch.dtype))
        )

    def _watch(
        self,
        module: nn.Module,
        site: Site,
        seen: Callable[[Tap, Tensor], Tensor | None],
    ) -> hooks.Watch:
        tap, calls = self.anatomy.taps[site], _Calls(site.stack)
        self._calls.append(calls)

        def at(*what: Any) -> Any:
            if not self.here:
                return None
            calls.count += 1
            tensor = tap.read(*what) if calls.count == tap.call + 1 else None
            new = None if tensor is None else seen(tap, tensor)
            if new is None:
                return None
            return tap.written(new, *what)

        return hooks.Watch(module.get_submodule(tap.path), tap.side, at)


class _Following:
    """Follows passes that somebody else runs: each is a call of the whole module, or of
    its encoder alone.
    """

    def __init__(
        self, anatomy: Anatomy, planned: Mapping[Site, Change], module: nn.Module
    ) -> None:
        self.module, self.two = module, len(anatomy.stacks) > 1
        self.editor = Editor(anatomy, planned, self._where)
        self.given: dict[str | None, tuple[Mapping[str, Any], int | None]] = {}

    def watches(self) -> list[hooks.Watch]:
        """The watches to be held."""
        begin = [
            hooks.Watch(
                self.module,
                "input",
                partial(self._begin, self.module, (None, "encoder", "decoder")),
            )
        ]
        encoder: Any = getattr(self.module, "get_encoder", None)
        if encoder is not None and self.two:
            begin.append(
                hooks.Watch(
                    encoder(), "input", partial(self._begin, encoder(), ("encoder",))
                )
            )
        return [*begin, *self.editor.watches(self.module)]

    def _begin(
        self,
        root: nn.Module,
        stacks: Sequence[str | None],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        if self.editor.here:
            names = inspect.signature(root.forward).parameters
            given = {**dict(zip(names, args, strict=False)), **kwargs}
            # Now, for the first block adds to the cache.
            past = 0 if stacks == ("encoder",) else _past(given)
            self.given |= dict.fromkeys(stacks, (given, past))
            self.editor.begin(stacks)

    def _where(self, stack: str | None, tensor: Tensor, tap: Tap) -> Positions:
        """Where the tokens of this pass stand, by the mask and the cache that it was
        given.
        """
        given, past = self.given.get(stack, ({}, 0))
        prefix = "decoder_" if stack == "decoder" else ""
        fed = [given.get(f"{prefix}{name}") for name in ("input_ids", "inputs_embeds")]
        shapes = [tuple(value.shape[:2]) for value in fed if isinstance(value, Tensor)]
        axes = (0, 1) if tap.layout.flat else (tap.layout.text, tap.layout.token)
        texts, tokens = (
            shapes[0] if shapes else (tensor.shape[axes[0]], tensor.shape[axes[1]])
        )
        past = 0 if stack == "encoder" else past
        mask = given.get(f"{prefix}attention_mask")
        if (
            isinstance(mask, Tensor)
            and mask.ndim == 2
            and mask.shape[1] >= tokens + (past or 0)
        ):
            if past is not None or mask.shape[1] > tokens:
                return Positions.by_mask(mask, tokens=tokens, whole=False)
            return Positions(Positions.by_mask(mask).positions, None, whole=False)
        positions = (torch.arange(tokens) + (past or 0)).expand(texts, tokens)
        return Positions(
            positions, None if past is None else (past + tokens,) * texts, whole=False
        )


def _past(given: Mapping[str, Any]) -> int | None:
    """How many tokens a pass goes on from, by the cache it is given; None if that does
    not say.
    """
    caches = [given[name] for name in CACHES if given.get(name) is not None]
    if not caches:
        return 0
    try:
        return int(caches[0].get_seq_length())
    except (AttributeError, ValueError):  # a recurrent state: it has no length
        return None
