"""Edit: run a model while states change on their way.

A change of `layer.k` or `final` is made where that state passes, and so is one of
`attn`, `cross` and `mlp`, which are what a branch adds. In a pre-norm block `mid` is
seen only as it enters a norm, while the stream goes past it: there the change is made
in what the last branch before it adds, so that the stream changes too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.arguments import checked
from hiddenscope.discovery import EVERYTHING, Anatomy, OperationTap, Tap
from hiddenscope.errors import PassError, SiteError, StatesError
from hiddenscope.modules import autograd, hooks
from hiddenscope.passes.changes import (
    Add,
    Change,
    Positions,
    Project,
    Replace,
    Scale,
    at_site,
    changed,
    check,
)
from hiddenscope.passes.inputs import Inputs, PassModel, Texts
from hiddenscope.passes.record import (
    Calls,
    Pass,
    make_pass,
    require_recordable,
    watch_tap,
)
from hiddenscope.passes.recording import (
    UserPass,
    cached_tokens,
    handed_on,
    named_arguments,
    pass_roots,
    take_over,
    user_module,
)
from hiddenscope.sites import Site, SitePatterns

CACHES = ("past_key_values", "cache_params", "state", "mems")


@checked
def edit(
    model: PassModel,
    inputs: Texts | Inputs,
    changes: Mapping[str | Site, Change],
    sites: SitePatterns = EVERYTHING,
    *,
    targets: Texts | None = None,
    logits: bool = False,
    grad: bool = False,
) -> Pass:
    """Run the model once over a batch of texts while the states at some sites change.

    A change is `Replace`, `Add`, `Scale` or `Project`, or a function of the states
    [text, token, width]. The states that are kept are those after the change. Padding
    is never changed, nor any tensor of the model's own. With `grad` the tensors
    themselves are in `live`, and gradients flow through them, and through a function to
    what it is made of.

    >>> from hiddenscope.testing import tiny_model
    >>> from hiddenscope.model import load
    >>> model = load((tiny_model("llama"), None))
    >>> edited = edit(model, [[5, 6, 7]], {"layer.1": Scale(0.0, tokens=1)}, "layer.1")
    >>> edited.states["layer.1"][1].abs().sum()
    tensor(0.)
    """
    require_recordable(model.module)
    planned = plan(model.anatomy, changes)
    selected = model.anatomy.select(sites)
    encoded = model.encode(inputs, targets=targets)
    positions = {site.stack: Positions.of(encoded.of(site.stack)) for site in planned}
    for site, change in planned.items():
        texts, _ = positions[site.stack].select(getattr(change, "tokens", None))
        check(change, len(texts), model.anatomy.width(site), site)
    editor = Editor(model.anatomy, planned, lambda stack, tensor, tap: positions[stack])
    with model.lock, hooks.watching(editor.watches(model.module)):
        return make_pass(model, encoded, selected, logits=logits, grad=grad)


@checked
@contextmanager
def editing(
    model: PassModel | nn.Module, changes: Mapping[str | Site, Change]
) -> Iterator[None]:
    """Change states in every pass inside the `with`, those of `generate` included.

    Positions count over the whole text so far: with a cache, a token is changed in the
    pass that first reads it, and -1 is the last token of each pass.

    >>> import torch
    >>> from hiddenscope.testing import tiny_model
    >>> module, ids = tiny_model("llama"), torch.tensor([[5, 6, 7]])
    >>> before = module(ids).logits
    >>> with editing(module, {"layer.2": Scale(2.0, tokens=-1)}):
    ...     after = module(ids).logits
    >>> (before != after).any(-1)
    tensor([[False, False,  True]])
    """
    anatomy, module, lock = user_module(model, "edit")
    planned = plan(anatomy, changes)
    for site, change in planned.items():
        check(change, -1, anatomy.width(site), site)
    follower = _PassFollower(anatomy, planned, module)
    # As in `recording`: Ctrl-C within torch's own `no_grad` would leave gradients off.
    unchanged = autograd.restored_after_error()
    with lock, unchanged, hooks.watching(follower.watches()):
        try:
            yield
        finally:
            take_over(lock)
    if not follower.passes:
        raise PassError(
            "Nothing was changed",
            "the module was not called inside the `with`",
            "Call the module itself there: a wrapper that torch.compile made before"
            " calls no hooks.",
        )


def plan(anatomy: Anatomy, changes: object) -> dict[Site, Change]:
    """Return each change by its site, in the order of the pass.

    A site that cannot be changed is refused.
    """
    if not isinstance(changes, Mapping) or not changes:
        reason = f"got {type(changes).__name__}"
        if isinstance(changes, Mapping):
            reason = "the dict is empty"
        raise StatesError(
            "No changes",
            reason,
            "Give a dict from sites to changes, as {'layer.3': hs.Scale(0.0)}.",
        )
    planned: dict[Site, Change] = {}
    for pattern, change in changes.items():
        is_change = isinstance(change, Replace | Add | Scale | Project)
        if isinstance(change, type) or not (is_change or callable(change)):
            kind = change if isinstance(change, type) else type(change)
            raise StatesError(
                f"Cannot change {pattern}",
                f"got {kind.__name__}",
                "Give Replace(...), Add(...), Scale(...), Project(...) or a function.",
            )
        for site in anatomy.select(pattern):
            if site in planned:
                raise StatesError(
                    f"Cannot change {site} twice",
                    "a site takes one change",
                    "Give one change for each site.",
                )
            _require_changeable(anatomy, site)
            planned[site] = at_site(change, site, anatomy.width(site))
    return dict(sorted(planned.items()))


def changeable(
    anatomy: Anatomy, sites: Iterable[Site]
) -> tuple[list[Site], list[Site]]:
    """Return the sites whose states can be changed, and those whose cannot.

    If none can, the first is refused.
    """
    able: list[Site] = []
    refused: dict[Site, SiteError] = {}
    for site in sites:
        try:
            _require_changeable(anatomy, site)
        except SiteError as error:
            refused[site] = error
        else:
            able.append(site)
    if refused and not able:
        raise next(iter(refused.values()))
    return able, list(refused)


def _require_changeable(anatomy: Anatomy, site: Site) -> None:
    """Refuse a site where the residual stream goes past the place it is seen at."""
    if site.is_inner:
        # A norm after attention makes what a head writes depend on the others.
        if site.index is not None and anatomy.projection(site).norm:
            raise SiteError(
                f"Cannot change {site} of {anatomy.name}",
                "a norm comes after it, so that what it adds depends on what the others"
                " add",
                f"Change its columns of '{site.whole}'.",
            )
        return
    stack = anatomy.stack(site)
    tap = anatomy.taps[site]
    beside_stream = not is_in_stream(anatomy, site)
    if site.part == "mid" and _is_at_norm(anatomy, site):
        pre_norm = stack.blocks[(site.layer or 0) - 1].kind == "pre-norm"
        beside_stream = beside_stream or not pre_norm
    if beside_stream:
        raise SiteError(
            f"Cannot change {site} of {anatomy.name}",
            f"it is seen only at the {tap}, and the residual stream goes past that",
            "Change another site, such as the layer above.",
        )


def is_in_stream(anatomy: Anatomy, site: Site) -> bool:
    """Tell whether the residual stream does not go past the place a site is seen at."""
    stack = anatomy.stack(site)
    entry = stack.proof.taps[0]
    is_whole = entry.side == "output" or entry.path == stack.blocks[0].path
    return is_whole or anatomy.taps[site] != entry


def _is_at_norm(anatomy: Anatomy, site: Site) -> bool:
    """Tell whether `mid` is seen where it enters a norm, beside the stream itself."""
    block = anatomy.stack(site).blocks[(site.layer or 0) - 1]
    return anatomy.taps[site].side == "input" and block.kind != "parallel"


Where: TypeAlias = Callable[[str | None, Tensor, Tap | OperationTap], Positions]
"""Returns the positions of the tokens in a tensor of a stack."""


@dataclass(eq=False)
class Editor:
    """Makes the changes of a pass.

    `where(stack, tensor, tap)` returns the positions of the tokens in a tensor.
    """

    anatomy: Anatomy
    planned: Mapping[Site, Change]
    where: Where
    _calls: Calls = field(default_factory=dict)

    def begin(self, stacks: Sequence[str | None]) -> None:
        """Start a new pass through some stacks, with calls counted from the first."""
        for key in self._calls:
            if key[0] in stacks:
                self._calls[key] = 0

    def watches(self, module: nn.Module) -> list[hooks.Watch]:
        """Return the hooks in the order of the pass.

        In that order a change sees what the changes before it made.
        """
        watches: list[hooks.Watch] = []
        for site, change in self.planned.items():
            if site.part == "mid" and _is_at_norm(self.anatomy, site):
                watches += self._watch_mid(module, site, change)
            elif site.index is not None:
                watches += self._watch_write(module, site, change)
            else:
                callback = partial(self._changed, site, change)
                watches.append(self._watch(module, site, callback))
        return watches

    def _changed(
        self, site: Site, change: Change, tap: Tap | OperationTap, tensor: Tensor
    ) -> Tensor:
        where = self.where(site.stack, tensor, tap)
        states = tap.layout.states(tensor, where.positions.shape[1])
        return tap.layout.with_states(tensor, changed(change, states, where, site))

    def _watch_write(
        self, module: nn.Module, site: Site, change: Change
    ) -> list[hooks.Watch]:
        """Change what a head or neuron adds, in the output of the last projection."""
        write = self.anatomy.write(module, site)
        tap = self.anatomy.projection(site).tap
        inputs: list[Tensor] = []

        def enter(tap: Tap, tensor: Tensor) -> None:
            inputs[:] = [tensor]

        def leave(tap: Tap, tensor: Tensor) -> Tensor:
            before = write(inputs.pop())
            after = self._changed(site, change, tap, before)
            moved = tensor + (after - before) / write.scale
            # Where nothing changed, the output stays as it is to the last bit.
            return torch.where(after == before, tensor, moved)

        output = replace(tap, side="output")
        return [
            self._watch(module, site, enter, tap),
            self._watch(module, site, leave, output),
        ]

    def _watch_mid(
        self, module: nn.Module, site: Site, change: Change
    ) -> list[hooks.Watch]:
        """Change the stream in the middle of a pre-norm block.

        The change is made in the last branch that is added before the middle.
        """
        stream: list[Tensor] = []

        def states(tap: Tap, tensor: Tensor) -> Tensor:
            tokens = self.where(site.stack, tensor, tap).positions.shape[1]
            return tap.layout.states(tensor, tokens)

        def enter(tap: Tap, tensor: Tensor) -> None:
            stream[:] = [states(tap, tensor)]

        def add(tap: Tap, tensor: Tensor) -> None:
            stream[:] = [stream[0] + states(tap, tensor)]

        def join(tap: Tap, tensor: Tensor) -> Tensor:
            before, branch = stream.pop(), states(tap, tensor)
            mid = before + branch
            new = changed(change, mid, self.where(site.stack, tensor, tap), site)
            # Where nothing changed the branch stays as it is: the difference of the
            # sums would be rounded.
            rest = (new - before).to(branch.dtype)
            return tap.layout.with_states(tensor, torch.where(new == mid, branch, rest))

        attn, cross = replace(site, part="attn"), replace(site, part="cross")
        below = Site((site.layer or 0) - 1, "", site.stack)
        watches = [self._watch(module, below, enter)]
        last = attn
        if cross in self.anatomy.taps:
            watches.append(self._watch(module, attn, add))
            last = cross
        return [*watches, self._watch(module, last, join)]

    def _watch(
        self,
        module: nn.Module,
        site: Site,
        callback: Callable[[Any, Tensor], Tensor | None],
        at: Tap | None = None,
    ) -> hooks.Watch:
        """Watch the tap of a site, or another one, in the right call of its module."""
        tap = at or self.anatomy.tap(site)
        show = partial(callback, tap)
        return watch_tap(module, tap, site.stack, self._calls, show)


@dataclass(eq=False)
class _PassFollower:
    """Follows passes that the user runs.

    Each is a call of the whole module, or of its encoder alone, as `generate` makes it.
    """

    anatomy: Anatomy
    planned: Mapping[Site, Change]
    module: nn.Module
    # By stack, with the number of tokens that the pass continues from.
    passes: dict[str | None, tuple[UserPass, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.editor = Editor(self.anatomy, self.planned, self._where)

    def watches(self) -> list[hooks.Watch]:
        """Return the hooks on the module, its encoder and the edited sites."""
        watches = []
        for root in pass_roots(self.module, self.anatomy):
            stacks: Sequence[str | None] = ("encoder",)
            if root in (self.module, handed_on(self.module)):
                stacks = (None, "encoder", "decoder")
            begin = partial(self._begin, root, stacks)
            watches.append(hooks.Watch(root, "input", begin))
        return [*watches, *self.editor.watches(self.module)]

    def _begin(
        self,
        root: nn.Module,
        stacks: Sequence[str | None],
        args: hooks.Args,
        kwargs: hooks.Kwargs,
    ) -> None:
        current = UserPass(root, named_arguments(root, args, kwargs))
        # Read now, because the first block adds to the cache.
        caches = map(current.arguments.get, CACHES)
        past = cached_tokens(
            next((cache for cache in caches if cache is not None), None)
        )
        for stack in stacks:
            self.passes[stack] = current, 0 if stack == "encoder" else past
        self.editor.begin(stacks)

    def _where(
        self, stack: str | None, tensor: Tensor, tap: Tap | OperationTap
    ) -> Positions:
        """Return the positions of this pass's tokens, by its mask and its cache."""
        unknown = UserPass(self.module, {})
        current, past = self.passes.get(stack, (unknown, 0))
        shape = current.shape(stack)
        if shape is None:
            tokens = tap.layout.length(tensor)
            texts = tap.layout.texts(tensor, tokens)
        else:
            texts, tokens = shape
        mask = current.argument(stack, "attention_mask")
        if (
            mask is not None
            and mask.ndim == 2
            and mask.shape[1] >= tokens + (past or 0)
        ):
            where = Positions.by_mask(mask, tokens)
            if past is None and mask.shape[1] == tokens:
                return replace(where, lengths=None)
            return where
        positions = (torch.arange(tokens) + (past or 0)).expand(texts, tokens)
        lengths = None if past is None else (past + tokens,) * texts
        return Positions(positions, lengths, whole=False)
