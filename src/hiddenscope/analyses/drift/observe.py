"""Observe one pass: its states as they are made, the reference's put in their place,
and what rounding does to each.

Every part of a model is measured on equal input. In an ordinary pass the states are
seen as they come. Where a visitor returns other rows, these take the place of the state
after it was seen, so that the next part starts from what the reference started from:
what differs there is that part's doing.

What rounding may do is measured on the reference itself. A private copy of each block,
and of each module outside the blocks, is run in float64 on the very input that the
original has. How far the original's numbers are from these is the noise of that part.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hiddenscope.analyses.drift.calls import map_tensors, to_float64
from hiddenscope.analyses.drift.noise import Noise, gap
from hiddenscope.discovery import Anatomy, Tap
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.module_copy import float64_copy
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

LOGITS = "logits"
BRANCHES = ("attn", "cross", "mlp")


@dataclass(eq=False)
class Side:
    """A model that can be run: its module, where its states are, and the path of the
    block that makes each layer.

    A port has `taps` and `blocks` of its own, and a `call` that runs it on a batch;
    others have the anatomy's. `passes` counts its runs.
    """

    name: str
    module: nn.Module
    anatomy: Anatomy
    pad: int
    dtype: torch.dtype
    taps: Mapping[Site, Tap] = field(default_factory=dict)
    blocks: Mapping[Site, str] = field(default_factory=dict)
    call: Any = None
    passes: float = 0
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.device = hooks.input_device(self.module)
        if not self.taps:
            self.taps, self.blocks = self.anatomy.taps, _block_paths(self.anatomy)

    @property
    def is_port(self) -> bool:
        """Whether its modules are of somebody else's making, with other names than the
        reference's.
        """
        return self.call is not None

    @property
    def kernel(self) -> str:
        """The name of its attention kernel."""
        config = getattr(self.module, "config", None)
        return str(getattr(config, "_attn_implementation", None) or "none")

    @property
    def sites(self) -> list[Site]:
        """The layers, what the branches of every block add, and final."""
        return [site for site in self.taps if site.part in ("", *BRANCHES)]

    def part(self, path: str) -> nn.Module:
        """Find a part of its module."""
        return self.module.get_submodule(path)

    def batch(self, inputs: Inputs) -> PaddedBatch:
        """Pad some texts on its device."""
        targets = None
        if len(self.anatomy.stacks) > 1 and inputs.targets is not None:
            targets = PaddedBatch.of(inputs.targets, self.pad, self.device)
        return PaddedBatch.of(inputs, self.pad, self.device, targets)

    def run(self, batch: PaddedBatch) -> Any:
        """Run the module on a batch.

        A NaN that an attention kernel loses is let through: it may be in padding, and
        what it does elsewhere shows in the comparison.
        """
        with autograd.restored(inference=False), torch.no_grad():
            if self.call is not None:
                return self.call(batch)
            return hooks.run(self.module, batch.arguments(self.module), finite=False)


def _block_paths(anatomy: Anatomy) -> dict[Site, str]:
    paths: dict[Site, str] = {}
    for stack in anatomy.stacks:
        name = stack.name if len(anatomy.stacks) > 1 else None
        for number, block in enumerate(stack.blocks, 1):
            paths[Site(number, "", name)] = block.path
    return paths


@dataclass
class ObservedState:
    """The rows of real tokens at one site, in float64 too where that could be computed,
    and the noise.
    """

    name: str
    rows: Tensor
    exact: Tensor | None = None
    noise: Noise | None = None


Visitor = Callable[[ObservedState], Tensor | None]
"""Takes a state as it is made; what it returns takes the state's place."""


@dataclass
class Observed:
    """The states of one batch by name, the logits under `logits`, and the whole output.

    `notes` say of which blocks the noise could not be measured.
    """

    states: dict[str, ObservedState] = field(default_factory=dict)
    output: Tensor | None = None
    notes: list[str] = field(default_factory=list)

    def rows(self, name: str) -> Tensor:
        """The rows at a site."""
        return self.states[name].rows

    def keep(self, state: ObservedState) -> None:
        """Keep a state; nothing takes its place."""
        self.states[state.name] = state


def observe(
    side: Side,
    inputs: Inputs,
    sites: Sequence[Site],
    *,
    visit: Visitor | None = None,
    noise: bool = False,
) -> Observed:
    """Run a batch of texts once and show every state to `visit`; without one, states
    are kept.

    With `noise` every part is run in float64 too, which counts as another pass.
    """
    observed = Observed()
    batch = side.batch(inputs)
    observation = _Observation(
        side, batch, sites, visit or observed.keep, observed.notes
    )
    watches = observation.watches()
    if noise:
        watches = [*_ExactParts(observation).watches(), *watches]
    side.passes += 2 if noise else 1
    with hooks.watching(watches):
        output = side.run(batch)
    returned = hooks.first_tensor(output)
    if returned is not None:
        observed.output = returned.detach().to("cpu", copy=True)
    logits = _logits(output)
    predicting = batch.of_stack("decoder")
    if logits is not None and logits.shape[:-1] == predicting.ids.shape:
        observation.show_logits(logits)
    return observed


def _logits(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    logits = (
        output.get(LOGITS)
        if isinstance(output, Mapping)
        else getattr(output, LOGITS, None)
    )
    return logits if isinstance(logits, Tensor) else None


class _Observation:
    """Shows the states of one pass, and puts others in their place."""

    def __init__(
        self,
        side: Side,
        batch: PaddedBatch,
        sites: Sequence[Site],
        visit: Visitor,
        notes: list[str],
    ) -> None:
        self.side, self.batch, self.sites, self.visit, self.notes = (
            side,
            batch,
            sites,
            visit,
            notes,
        )
        self.measures_noise = False
        self.exact_rows: dict[str, Tensor] = {}
        # What modules outside the blocks returned since the last site: their noise
        # belongs to the next one.
        self.pending: list[_Outside] = []

    def watches(self) -> list[hooks.Watch]:
        """Watch the tap of every site."""
        return [
            self.side.taps[site].watch(self.side.module, partial(self._pass, site))
            for site in self.sites
        ]

    def real_rows(self, site: Site, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the states [text, token, width] in a tensor, the mask of real tokens,
        and their rows.
        """
        batch = self.batch.of_stack(site.stack)
        states = self.side.taps[site].layout.states(tensor, batch.ids.shape[1])
        mask = batch.mask.bool().to(states.device)
        return states, mask, states[mask]

    def _pass(self, site: Site, tensor: Tensor) -> Tensor | None:
        states, mask, rows = self.real_rows(site, tensor)
        for outside in self.pending:
            if outside.returned is tensor:
                self.exact_rows[str(site)] = self.real_rows(site, outside.exact)[
                    2
                ].cpu()
        replacement = self.show(str(site), rows, in_block=bool(site.layer))
        if replacement is None:
            return None
        changed = states.clone()
        changed[mask] = replacement.to(changed)
        return self.side.taps[site].layout.with_states(tensor, changed)

    def show(self, name: str, rows: Tensor, *, in_block: bool = False) -> Tensor | None:
        """Show the rows of a site, with their noise, and return what takes their place."""
        state = ObservedState(
            name, rows.detach().to("cpu", copy=True), self.exact_rows.pop(name, None)
        )
        if state.exact is not None and not bool(state.exact.isfinite().all()):
            # A kernel may fail on a wholly masked row in float64 and not in the model's
            # dtype.
            state.exact = None
        if self.measures_noise:
            state.noise = self._noise(state, in_block)
        self.pending = []
        return self.visit(state)

    def show_logits(self, logits: Tensor) -> None:
        """Show the logits of real tokens."""
        mask = self.batch.of_stack("decoder").mask.bool()
        for outside in self.pending:
            if outside.returned.shape == logits.shape and torch.equal(
                outside.returned, logits
            ):
                self.exact_rows[LOGITS] = outside.exact[mask].cpu()
        self.show(LOGITS, logits[mask])

    def _noise(self, state: ObservedState, in_block: bool) -> Noise:
        masks = masks_of(self.batch)
        gaps = []
        for outside in self.pending:
            gaps.append(
                gap(real_rows(outside.exact, masks), real_rows(outside.returned, masks))
            )
        if state.exact is not None:
            gaps.append(gap(state.exact, state.rows))
        elif in_block or not gaps:
            return Noise.assumed(state.rows.dtype)
        return Noise.measured(gaps, state.rows.dtype)


class _Outside(NamedTuple):
    """What a module outside the blocks returned, and what its copy in float64 did."""

    returned: Tensor
    exact: Tensor


class _ExactParts:
    """Runs private copies in float64: of each block before it runs itself, and of each
    module outside the blocks.
    """

    def __init__(self, observation: _Observation) -> None:
        self.observation = observation
        self.side = observation.side
        observation.measures_noise = True

    def watches(self) -> list[hooks.Watch]:
        """Watch the blocks, and the modules with weights outside them: embeddings,
        norms, the head.
        """
        layers_of: dict[str, list[Site]] = defaultdict(list)
        for site, path in self.side.blocks.items():
            layers_of[path].append(site)
        watches = [self._block(path, layers) for path, layers in layers_of.items()]
        inside_blocks = tuple(f"{path}." for path in layers_of)
        for path, part in hooks.parts_of(self.side.module).items():
            is_leaf = bool(part._parameters) and not part._modules
            if is_leaf and not f"{path}.".startswith(inside_blocks):
                watches += self._outside(part)
        return watches

    def _block(self, path: str, layers: Sequence[Site]) -> hooks.Watch:
        """Watch a block that makes these layers, one in each of its calls."""
        block = self.side.part(path)
        remaining = list(layers)

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if not remaining:
                return
            layer = remaining.pop(0)
            sites = [
                site
                for site in self.observation.sites
                if (site.layer, site.stack) == (layer.layer, layer.stack)
            ]
            try:
                self._run_block(block, path, sites, args, kwargs)
            except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
                # A kernel that knows no float64, or a block that cannot be copied.
                reason = str(error).partition("\n")[0]
                note = (
                    "The noise of a block is the tolerance of its dtype where float64"
                    f" fails: {reason}"
                )
                self.observation.notes.append(note)

        return hooks.Watch(block, "input", before)

    def _run_block(
        self,
        block: nn.Module,
        path: str,
        sites: Sequence[Site],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> None:
        exact = float64_copy(block)
        watches = []
        for site in sites:
            tap = self.side.taps[site]
            inside = tap.path == path or tap.path.startswith(f"{path}.")
            if inside and tap.side == "output":
                part = exact.get_submodule(tap.path[len(path) :].lstrip("."))
                watches.append(
                    hooks.Watch(part, "output", partial(self._keep_exact, site))
                )
        with hooks.watching(watches):
            run_exactly(exact, args, kwargs)

    def _keep_exact(self, site: Site, output: Any) -> None:
        tensor = hooks.first_tensor(output)
        if tensor is not None:
            rows = self.observation.real_rows(site, tensor)[2]
            self.observation.exact_rows[str(site)] = rows.detach().to("cpu", copy=True)

    def _outside(self, part: nn.Module) -> list[hooks.Watch]:
        expected: list[Tensor] = []

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            expected.clear()
            try:
                output = hooks.first_tensor(in_float64(part, args, kwargs))
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                return
            if output is not None:
                expected.append(output)

        def after(output: Any) -> None:
            returned = hooks.first_tensor(output)
            if (
                expected
                and returned is not None
                and expected[0].shape == returned.shape
            ):
                self.observation.pending.append(_Outside(returned, expected[0]))

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]


def in_float64(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a private copy of a module in float64 on these arguments; the module stays as
    it is.
    """
    return run_exactly(float64_copy(module), args, kwargs)


def run_exactly(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Run a module that is in float64 on arguments in any dtype."""
    with autograd.restored(), torch.no_grad():
        return module(
            *map_tensors(args, to_float64), **map_tensors(dict(kwargs), to_float64)
        )


def masks_of(batch: PaddedBatch) -> list[Tensor]:
    """Mark the places of a batch that hold tokens, for each stack."""
    stacks = [batch] if batch.targets is None else [batch, batch.targets]
    return [stack.mask.bool() for stack in stacks]


def real_rows(tensor: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """Flatten a tensor to rows [row, width], without those of padding wherever its
    shape tells which they are.
    """
    for mask in masks:
        texts, tokens = mask.shape
        places = mask.to(tensor.device)
        count = int(places.sum())
        if tensor.ndim >= 2 and tensor.shape[:2] == mask.shape:
            return tensor[places].reshape(count, -1)
        if tensor.ndim >= 2 and tensor.shape[0] == mask.numel():
            return tensor[places.flatten()].reshape(count, -1)
        if (
            tensor.ndim >= 3
            and tensor.shape[0] == texts
            and tokens in tensor.shape[1:-1]
        ):
            token_axis = 1 + list(tensor.shape[1:-1]).index(tokens)
            return tensor.movedim(token_axis, 1)[places].reshape(count, -1)
    rows = tensor.shape[0] if tensor.ndim > 1 else 1
    return tensor.reshape(rows, -1)
