"""Observe: the states of one batch as a pass makes them, with the reference's states put in, and what rounding does.

Every part of a model is measured on equal input. In an ordinary pass the states are kept as they come. In a pass with
`put`, each state is kept as the part before it made it, and then the reference's own state takes its place, so that
the next part starts from what the reference started from: what differs there is that part's doing.

What rounding may do is measured on the reference itself: each block, and each module outside the blocks, is run again
in float64 on the very input that it had. How far its own numbers are from these is the noise of that part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from hiddenscope import autograd, hooks, trials
from hiddenscope.anatomy import Anatomy, Tap
from hiddenscope.errors import NotFinite
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

LOGITS = "logits"
BRANCHES = ("attn", "cross", "mlp")
# Two correct programs are each about as far from the exact result as the other, and the farthest of a few tokens varies
# by a small factor: the factor that trials allow between two runs of the same texts.
MARGIN = trials.NOISE_FACTOR
# A row or a channel that is next to nothing is measured by the others: rounding there is that of the terms of a sum.
SMALLEST = 1e-3


@dataclass(eq=False)
class Live:
    """A module that can be run, and where its states are; `passes` counts its runs.

    A module of somebody else's making has `taps` and `blocks` of its own in the place of the reference's, and a `call`
    that runs it on a batch.
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
            self.taps, self.blocks = self.anatomy.taps, block_paths(self.anatomy)

    def run(self, batch: PaddedBatch) -> Any:
        """Run the module on a batch.

        A NaN that an attention kernel loses is let through: it may be in padding, and what it does elsewhere shows in
        the comparison.
        """
        if self.call is not None:
            return self.call(batch)
        return hooks.run(self.module, batch.arguments(self.module), finite=False)

    @property
    def kernel(self) -> str:
        """The name of its attention kernel."""
        return str(getattr(getattr(self.module, "config", None), "_attn_implementation", None) or "none")

    def batch(self, inputs: Inputs) -> PaddedBatch:
        """Some texts on its device."""
        targets = None
        if len(self.anatomy.stacks) > 1 and inputs.targets is not None:
            targets = PaddedBatch.of(inputs.targets, self.pad, self.device)
        return PaddedBatch.of(inputs, self.pad, self.device, targets)

    def sites(self) -> list[Site]:
        """The layers, what the branches of every block add, and final."""
        return [site for site in self.taps if site.part in ("", *BRANCHES)]


def block_paths(anatomy: Anatomy) -> dict[Site, str]:
    """The path of the block that makes each layer."""
    two = len(anatomy.stacks) > 1
    return {
        Site(number, "", stack.name if two else None): block.path
        for stack in anatomy.stacks
        for number, block in enumerate(stack.blocks, 1)
    }


class Gap(NamedTuple):
    """How far two computations of rows are apart.

    `rows`: the L2 norm of each row's difference over the norm of the row. `channel`: the largest difference in any
    channel, over that channel's largest value, which shows what happens beside a channel of massive activations.
    """

    rows: Tensor
    channel: float

    @property
    def worst(self) -> float:
        """The largest relative difference of a row."""
        return float(self.rows.max()) if len(self.rows) else 0.0


def gap(reference: Tensor, other: Tensor) -> Gap:
    """How far rows [row, width] are from the reference's; a NaN is infinitely far.

    >>> gap(torch.ones(2, 4), torch.tensor([[1.0] * 4, [2.0] * 4])).rows
    tensor([0., 1.], dtype=torch.float64)
    """
    return gap_of_blocks([(reference, other)])


def gap_of_blocks(pairs: Iterable[tuple[Tensor, Tensor]]) -> Gap:
    """The gap of rows that come in blocks, the same as that of all rows together."""
    apart, sizes = [torch.empty(0, dtype=torch.float64)], [torch.empty(0, dtype=torch.float64)]
    off = largest = torch.zeros((), dtype=torch.float64)
    for reference, other in pairs:
        one, two = reference.detach().cpu().double(), other.detach().cpu().double()
        difference = two - one
        apart.append(difference.norm(dim=-1))
        sizes.append(one.norm(dim=-1))
        if one.numel():
            off, largest = off.maximum(difference.abs().amax(0)), largest.maximum(one.abs().amax(0))
    norms = torch.cat(sizes)
    floor = SMALLEST * float(norms.square().mean().sqrt()) if len(norms) else 0.0
    channels = _over(off, largest.clamp_min(SMALLEST * float(largest.max())))
    return Gap(_over(torch.cat(apart), norms.clamp_min(floor)), float(channels.max()))


def _over(difference: Tensor, size: Tensor) -> Tensor:
    share = torch.where(difference == 0, 0.0, difference / size.clamp_min(torch.finfo(torch.float64).tiny))
    return share.nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True)
class Noise:
    """What rounding does to a part: the worst of a row, and of a channel."""

    row: float
    channel: float

    @classmethod
    def of(cls, gaps: Iterable[Gap], dtype: torch.dtype) -> Noise:
        """The worst of several; at least one unit in the last place of the dtype."""
        listed, unit = list(gaps), torch.finfo(dtype).eps
        worst = [max([unit, *numbers]) for numbers in ([one.worst for one in listed], [one.channel for one in listed])]
        return cls(*worst)

    @classmethod
    def assumed(cls, dtype: torch.dtype) -> Noise:
        """Where it could not be measured: the rounding tolerance of every trial."""
        allowed = trials.tolerance(dtype, 0) / MARGIN
        return cls(allowed, allowed)

    def joined(self, other: Noise) -> Noise:
        """The larger of both."""
        return Noise(max(self.row, other.row), max(self.channel, other.channel))

    def beyond(self, error: Gap) -> float:
        """How many times an error is over the envelope, which is the noise times the margin."""
        return max(error.worst / (MARGIN * self.row), error.channel / (MARGIN * self.channel))


@dataclass
class Observed:
    """The rows of real tokens at every site of one batch, by name, the logits under `logits`, and the whole output."""

    rows: dict[str, Tensor] = field(default_factory=dict)
    output: Tensor | None = None
    noise: dict[str, Noise] = field(default_factory=dict)


Sink = Callable[[str, Tensor, Noise | None], Tensor | None]
"""What takes a state in the place of memory: its name, its rows and their noise; what it returns replaces the state."""


def observe(
    side: Live,
    inputs: Inputs,
    sites: Sequence[Site],
    *,
    put: Mapping[str, Tensor] | None = None,
    noise: bool = False,
    sink: Sink | None = None,
) -> Observed:
    """One pass over a batch of texts. With `put` each state is replaced by the one given, after it was kept.

    With `noise` every part is run again in float64 on its own input, which counts as another pass. With a `sink` no
    state is kept: each is handed to it as it is made.
    """
    batch = side.batch(inputs)
    watcher = _Watcher(side, batch, sites, put or {}, noise=noise)
    watcher.sink = sink
    side.passes += 2 if noise else 1
    with autograd.restored(inference=False), torch.no_grad(), hooks.watching(watcher.watches()):
        output = side.run(batch)
    made = hooks.first_tensor(output)
    watcher.seen.output = None if made is None else made.detach().to("cpu", copy=True)
    logits = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    logits = output.get(LOGITS) if isinstance(output, Mapping) else logits
    own = batch.of_stack("decoder")
    if isinstance(logits, Tensor) and logits.shape[:-1] == own.ids.shape:
        watcher.keep(LOGITS, logits[own.mask.bool()])
    return watcher.seen


class _Watcher:
    """Keeps the states of one pass, puts others in their place, and runs parts again in float64."""

    def __init__(
        self, side: Live, batch: PaddedBatch, sites: Sequence[Site], put: Mapping[str, Tensor], *, noise: bool
    ) -> None:
        self.side, self.batch, self.put, self.noise = side, batch, put, noise
        self.seen = Observed()
        self.sink: Sink | None = None
        self._places: dict[tuple[str, hooks.Side], list[Site]] = defaultdict(list)
        for site in sites:
            tap = side.taps[site]
            self._places[tap.path, tap.side].append(site)
        self._calls: Counter[tuple[str, hooks.Side]] = Counter()
        self._wide: dict[str, Tensor] | None = None  # while a part runs in float64
        self._block: Site | None = None
        self._in_float64: dict[str, Tensor] = {}  # what the block that runs next gave in float64
        self._loose: list[Gap] = []  # the noise of modules outside the blocks, since the last site

    def watches(self) -> list[hooks.Watch]:
        """What is watched, in the order in which it must be asked."""
        watches = self._blocks() + self._outside() if self.noise else []
        for (path, which), sites in self._places.items():
            module = self.side.module.get_submodule(path)
            watches.append(hooks.Watch(module, which, self._at((path, which), sites)))
        return watches

    def keep(self, name: str, rows: Tensor, wide: Tensor | None = None) -> Tensor | None:
        """Keep the rows of a site, and its noise; what takes their place, if anything does."""
        noise = None
        if self.noise:
            gaps = self._loose if wide is None else [gap(wide, rows), *self._loose]
            in_block = "layer.0" not in name and "layer" in name
            measured = wide is not None or (bool(gaps) and not in_block)
            dtype = rows.dtype
            noise = Noise.of(gaps, dtype) if measured else Noise.assumed(dtype)
        self._loose = []
        own = rows.detach().to("cpu", copy=True)
        if self.sink is not None:
            return self.sink(name, own, noise)
        self.seen.rows[name] = own
        if noise is not None:
            self.seen.noise[name] = noise
        return self.put.get(name)

    def _at(self, place: tuple[str, hooks.Side], sites: list[Site]) -> Callable[..., Any]:
        def seen(*what: Any) -> Any:
            if self._wide is not None:
                return self._seen_wide(sites, *what)
            call = self._calls[place]
            self._calls[place] += 1
            changed = None
            for site in sites:
                tap = self.side.taps[site]
                tensor = tap.read(*what) if tap.call == call else None
                if tensor is not None:
                    new = self._pass(site, tap, tensor)
                    if new is not None:
                        changed = tap.written(new, *what)
                        what = changed if place[1] == "input" else (changed,)
            return changed

        return seen

    def _seen_wide(self, sites: list[Site], *what: Any) -> None:
        assert self._wide is not None
        for site in sites:
            if self._block is not None and (site.layer, site.stack) == (self._block.layer, self._block.stack):
                tap = self.side.taps[site]
                tensor = tap.read(*what)
                if tensor is not None and tap.side == "output":
                    self._wide[str(site)] = self._rows(site, tap, tensor)[1].detach().clone()

    def _rows(self, site: Site, tap: Tap, tensor: Tensor) -> tuple[Tensor, Tensor]:
        own = self.batch.of_stack(site.stack)
        states = tap.layout.states(tensor, own.ids.shape[1])
        return states, states[own.mask.bool().to(states.device)]

    def _pass(self, site: Site, tap: Tap, tensor: Tensor) -> Tensor | None:
        """Keep a state, and give what takes its place, if anything does."""
        states, rows = self._rows(site, tap, tensor)
        other = self.keep(str(site), rows, self._in_float64.pop(str(site), None))
        if other is None:
            return None
        new = states.clone()
        new[self.batch.of_stack(site.stack).mask.bool().to(new.device)] = other.to(new)
        return tap.layout.with_states(tensor, new)

    def _blocks(self) -> list[hooks.Watch]:
        """Run each block again in float64 before it runs itself."""
        blocks: dict[str, list[Site]] = defaultdict(list)
        for site, path in self.side.blocks.items():
            blocks[path].append(site)
        return [self._again(path, sites) for path, sites in blocks.items()]

    def _again(self, path: str, sites: list[Site]) -> hooks.Watch:
        module = self.side.module.get_submodule(path)
        calls: list[None] = []

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if self._wide is not None or len(calls) == len(sites):
                return
            self._block, self._wide = sites[len(calls)], {}
            calls.append(None)
            try:
                in_float64(module, args, kwargs)
                self._in_float64.update(self._wide)
            except Exception:  # a kernel that knows no float64: the noise of this block is assumed
                pass
            finally:
                self._wide, self._block = None, None

        return hooks.Watch(module, "input", before)

    def _outside(self) -> list[hooks.Watch]:
        """Run each module with weights that is outside the blocks again in float64: embeddings, norms, the head."""
        inside = tuple(f"{path}." for path in self.side.blocks.values())
        watches: list[hooks.Watch] = []
        for path, part in hooks.parts_of(self.side.module).items():
            if part._parameters and not part._modules and not f"{path}.".startswith(inside):
                watches += self._leaf(part)
        return watches

    def _leaf(self, part: nn.Module) -> list[hooks.Watch]:
        wide: list[Tensor | None] = []

        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if self._wide is None:
                self._wide = {}
                try:
                    wide.append(hooks.first_tensor(in_float64(part, args, kwargs)))
                except Exception:
                    wide.append(None)
                finally:
                    self._wide = None

        def after(output: Any) -> None:
            if self._wide is None and wide:
                expected, made = wide.pop(), hooks.first_tensor(output)
                if expected is not None and made is not None and expected.shape == made.shape:
                    masks = masks_of(self.batch)
                    self._loose.append(gap(real_rows(expected, masks), real_rows(made, masks)))

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]


def masks_of(batch: PaddedBatch) -> list[Tensor]:
    """Which places of a batch hold tokens, for each stack."""
    return [part.mask.bool() for part in (batch, batch.targets) if part is not None]


def real_rows(tensor: Tensor, masks: Sequence[Tensor]) -> Tensor:
    """A tensor as rows [row, width], without those of padding wherever they can be told by the shape."""
    for mask in masks:
        texts, tokens = mask.shape
        places = mask.to(tensor.device)
        if tensor.ndim >= 2 and tensor.shape[:2] == mask.shape:
            return tensor[places].reshape(int(places.sum()), -1)
        if tensor.ndim >= 2 and tensor.shape[0] == mask.numel():
            return tensor[places.flatten()].reshape(int(places.sum()), -1)
        if tensor.ndim >= 3 and tensor.shape[0] == texts and tokens in tensor.shape[1:-1]:
            moved = tensor.movedim(1 + list(tensor.shape[1:-1]).index(tokens), 1)
            return moved[places].reshape(int(places.sum()), -1)
    return tensor.reshape(tensor.shape[0], -1) if tensor.ndim > 1 else tensor.reshape(1, -1)


def in_float64(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What a module makes of its input when its weights and all numbers are float64; the module stays as it is."""
    tensors = [*module.named_parameters(), *module.named_buffers()]
    weights = {name: tensor.detach().double() for name, tensor in tensors if tensor.is_floating_point()}
    given, named = mapped(args, _double), mapped(dict(kwargs), _double)
    with autograd.restored(), torch.no_grad():
        return functional_call(module, weights, given, named)


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same arguments with every tensor changed; objects of other kinds stay as they are."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) is dict:
        return {name: mapped(part, change) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [mapped(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


@contextmanager
def attention_kernel(module: nn.Module, name: str) -> Iterator[None]:
    """Let a module use another attention kernel while the body runs."""
    before = [(config, config._attn_implementation_internal) for config in _configs(module)]
    try:
        set_kernel(module, name)
        yield
    finally:
        for config, kernel in before:
            config._attn_implementation_internal = kernel


def set_kernel(module: nn.Module, name: str) -> None:
    """Set the attention kernel of a module, in the configuration of every part."""
    for config in _configs(module):
        config._attn_implementation_internal = name


def _configs(module: nn.Module) -> list[Any]:
    configs = {id(part.config): part.config for part in module.modules() if hasattr(part, "config")}
    return [config for config in configs.values() if hasattr(config, "_attn_implementation_internal")]


def check_finite(seen: Observed, who: str, shown: Callable[[str, int], str]) -> None:
    """Refuse states with a NaN or an infinity, naming the side, the first site and the token."""
    for name, rows in seen.rows.items():
        broken = ~rows.isfinite().all(-1)
        if bool(broken.any()) and not (name == LOGITS and bool((rows == -torch.inf).any())):
            row = int(broken.nonzero()[0])
            what = "a NaN" if bool(rows[row].isnan().any()) else "an infinity"
            reason = f"the {who} has {what} at {name}, token {shown(name, row)}"
            remedy = "Repair that first: look at the weights of the block that computes it, or use a wider dtype."
            raise NotFinite("Cannot compare the two runs", reason, remedy)
