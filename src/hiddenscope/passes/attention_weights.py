"""Attention weights: run a model once, and compute them beside its own kernel.

The weights of an attention are computed from the arguments of the operation that uses
them, all alike attentions as one batched product: on a GPU, thirty small ones take
thirty times as long. Only the layers, heads and rows that are asked for are computed.
In every pass some rows are compared with what the pass itself computed: weights times
values must be what the heads hand on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from math import isfinite, sqrt
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from hiddenscope.discovery import Write
from hiddenscope.discovery.anatomy import AttentionHeads, HeadLayout, Projection
from hiddenscope.errors import NotFinite, PassError
from hiddenscope.modules import autograd, hooks, operations
from hiddenscope.modules.trials import ULPS, tolerance
from hiddenscope.passes.buffers import block_memory
from hiddenscope.passes.inputs import Inputs, PassModel
from hiddenscope.passes.record import check_targets, require_recordable
from hiddenscope.sites import Site

# Attentions and rows are computed together while their tensors take no more than this
# on a CPU.
MOST_BYTES = 64 * 2**20
# Scores, a mask, weights and a copy of them are held at a time.
TENSORS = 4
# Rows of each attention that are compared with the pass.
CHECKED_ROWS = 4


@dataclass(frozen=True)
class WatchedAttention:
    """One attention, and the heads of it that are asked for."""

    site: Site
    layout: AttentionHeads
    projection: Projection
    heads: tuple[int, ...]


class WeightRows(NamedTuple):
    """Some rows of weights, `values` [site, text, head, row, key].

    `positions` are those of the queries, and `texts` the indices of the texts. All
    sites share the same heads.
    """

    sites: Sequence[Site]
    texts: Sequence[int]
    positions: Sequence[int]
    values: Tensor


ReceiveWeights: TypeAlias = Callable[[WeightRows], None]


@dataclass
class WeightsReport:
    """What a pass shows besides the weights.

    `write_norms` [head, key] are the norms of what the values of the first text write
    through each head. `smallest_sum` is that of a row of weights. `error` is the
    largest difference between weights times values and what the heads hand on.
    """

    write_norms: dict[Site, Tensor] = field(default_factory=dict)
    smallest_sum: float = 1.0
    error: float = 0.0


def run_weights(
    model: PassModel,
    inputs: Inputs,
    attentions: Sequence[WatchedAttention],
    receive: ReceiveWeights,
    *,
    positions: Sequence[int] | None = None,
    writes: bool = False,
) -> WeightsReport:
    """Run texts of one length, and hand their attention weights to `receive`.

    `positions` are those of the queries, by default all of them. The norms of what the
    values write are computed only with `writes`.
    """
    require_recordable(model.module)
    sites = [part.site for part in attentions]
    check_targets(model, inputs, sites, logits=False)
    report = WeightsReport()
    with model.lock, autograd.restored(inference=False), torch.no_grad():
        for texts, batch in inputs.batches(model):
            of_first = writes and 0 in texts
            watcher = _Watcher(
                model, attentions, texts, receive, report, positions, of_first
            )
            watcher.run(batch)
    return report


@dataclass
class _AttentionCall:
    """One attention of a pass: its operation, and `z`, which its heads hand on.

    `nbytes` is how much memory its tensors and the weights of all rows take.
    """

    part: WatchedAttention
    operation: operations.Operation
    nbytes: int
    z: Tensor | None = None

    @classmethod
    def of(
        cls, part: WatchedAttention, operation: operations.Operation
    ) -> _AttentionCall:
        """Keep what the weights of an attention are computed from."""
        first, *others = operation.operands
        held = sum(tensor.nbytes for tensor in (first, *others))
        if part.layout.is_fused:
            query = part.layout.queries.split(first)
            keys = part.layout.keys.length(others[0])
            rows = query.shape[0] * len(part.heads) * query.shape[2]
            held += TENSORS * rows * keys * _itemsize(query)
        else:
            held += TENSORS * first.nbytes
        return cls(part, operation, held)

    @property
    def form(self) -> tuple[object, ...]:
        """Return the key by which attentions are computed together."""
        layout, named = self.part.layout, self.operation.named
        layouts = layout.heads, layout.queries, layout.keys, layout.values
        options: tuple[object, ...] = ()
        if layout.is_fused:
            options = named.get("is_causal"), named.get("scale")
            mask = named.get("attn_mask")
            if mask is not None:
                # Attentions often share their mask: the same place in memory.
                place = mask.data_ptr(), mask.shape, mask.stride(), mask.dtype
                options = *options, place
        tensors = self.operation.operands
        shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return layout.weights.kind, self.part.heads, layouts, options, *shapes


@dataclass(eq=False)
class _Watcher:
    """Watches some attentions in one pass."""

    model: PassModel
    attentions: Sequence[WatchedAttention]
    texts: Sequence[int]
    receive: ReceiveWeights
    report: WeightsReport
    positions: Sequence[int] | None
    writes: bool
    started: dict[Site, _AttentionCall] = field(default_factory=dict)
    waiting: list[_AttentionCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.missing = {part.site for part in self.attentions}
        self.stops = not hooks.is_offloaded(self.model.module)
        self.memory = block_memory(self.model.device, MOST_BYTES)

    def run(self, inputs: Inputs) -> None:
        """Run one batch."""
        module = self.model.module
        batch = inputs.pad(self.model)
        arguments = batch.arguments(module, masked=self.model.batching.needs_mask)
        watches = []
        for part in self.attentions:
            inside = module.get_submodule(part.layout.weights.path)
            callback = self._operation_callback(part)
            watches.append(hooks.Watch(inside, "inside", callback))
            finish = partial(self._finish, part)
            watches.append(part.projection.tap.watch(module, finish))
        with hooks.watching(watches):
            hooks.call_module(module, arguments)
        self._compute()
        if self.missing:
            raise PassError(
                f"No attention weights at {min(self.missing)}",
                "its attention was not called in this pass",
                "Load the model again: it has been changed.",
            )

    def _operation_callback(
        self, part: WatchedAttention
    ) -> operations.OperationCallback:
        """Return a callback for the operations of a module with an attention."""
        place = part.layout.weights
        forwards: list[object] = []

        def callback(
            operation: operations.Operation, run: operations.RunOperation
        ) -> Any:
            # Each call of the module has an object of its own as its `forward`.
            if operation.forward not in forwards[-1:]:
                forwards.append(operation.forward)
            number = len(forwards) - 1, operation.kind, operation.number
            if number == (place.call, place.kind, place.number):
                self.started[part.site] = _AttentionCall.of(part, operation)
            return run(operation)

        return callback

    def _finish(self, part: WatchedAttention, z: Tensor) -> None:
        """Take what the heads hand on, and compute weights where there are enough."""
        attention = self.started.pop(part.site, None)
        if attention is None:
            return
        attention.z = z
        self.waiting.append(attention)
        self.missing.discard(part.site)
        if sum(attention.nbytes for attention in self.waiting) > self.memory:
            self._compute()
        if self.stops and not self.missing:
            raise hooks.Stopped

    def _compute(self) -> None:
        """Compute the weights of the attentions that wait, alike ones together."""
        groups: dict[tuple[object, ...], list[_AttentionCall]] = defaultdict(list)
        for attention in self.waiting:
            groups[attention.form].append(attention)
        self.waiting.clear()
        for group in groups.values():
            self._deliver(group)

    def _deliver(self, group: Sequence[_AttentionCall]) -> None:
        """Hand on the weights of alike attentions, some rows at a time."""
        source = _source(group)
        sites = [attention.part.site for attention in group]
        by_site = len(group), len(self.texts)
        texts, heads, queries, keys = source.shape
        positions = self.positions
        if positions is None:
            positions = range(queries)
        row_bytes = texts * heads * keys * _itemsize(source.values) * TENSORS
        rows_at_a_time = max(1, self.memory // row_bytes)
        smallest = []
        for start in range(0, len(positions), rows_at_a_time):
            rows = list(positions[start : start + rows_at_a_time])
            weights = source.weights(rows).view(*by_site, heads, len(rows), keys)
            # The smallest of numbers with a NaN is a NaN.
            smallest.append(weights.sum(-1).flatten(1).amin(1))
            self.receive(WeightRows(sites, self.texts, rows, weights))
        if self.writes:
            # Of each site's texts, the first.
            values = source.values[list(self.texts).index(0) :: len(self.texts)]
            parts = [attention.part for attention in group]
            norms = _write_norms(self.model.module, parts, values)
            self.report.write_norms.update(zip(sites, norms, strict=True))
        # Some positions from the first to the last.
        last, steps = len(positions) - 1, max(1, CHECKED_ROWS - 1)
        places = sorted({last * step // steps for step in range(CHECKED_ROWS)})
        some = [positions[place] for place in places]
        errors = _errors(group, source, some, len(self.texts))
        columns = torch.stack([torch.stack(smallest).amin(0), *errors], 1)
        # Reading numbers waits for the device.
        for site, numbers in zip(sites, columns.tolist(), strict=True):
            smallest_sum, error, excess = numbers
            if not isfinite(smallest_sum):
                raise NotFinite(
                    f"No attention weights at {site}",
                    "the scores hold a NaN or an infinity",
                    "Load the model in a wider dtype.",
                )
            # `not <=` refuses a NaN as well, which `>` would let through.
            if not excess <= 1:
                raise PassError(
                    f"Cannot trust the attention weights at {site}",
                    f"weights times values differ by {error:.1e} from what the heads"
                    " handed on in this pass",
                    "Load the model with attention='eager'.",
                )
            self.report.smallest_sum = min(smallest_sum, self.report.smallest_sum)
            self.report.error = max(error, self.report.error)


def _errors(
    group: Sequence[_AttentionCall],
    source: _FusedWeights | _EagerWeights,
    positions: list[int],
    texts: int,
) -> tuple[Tensor, Tensor]:
    """Return how far weights times values are from what the heads hand on, by site.

    The second number is relative to what rounding allows.
    """
    part = group[0].part
    layout = part.projection.tap.layout
    of_sites = []
    for attention in group:
        assert attention.z is not None
        tokens = attention.z.numel() // (texts * part.projection.width)
        of_sites.append(layout.states(attention.z, tokens))
    states = _rows(_joined(of_sites), positions, 1)
    by_head = states.reshape(*states.shape[:2], part.layout.heads, -1).transpose(1, 2)
    weights, rounding = source.rounded_weights(positions)
    values = _wide(source.values)
    # Values of opposite signs may cancel, and then leave their errors.
    sizes = (weights @ values.abs()).norm(dim=-1)
    sizes = sizes.clamp_min(torch.finfo(sizes.dtype).tiny)
    outputs = weights @ values
    z = _rows(by_head, part.heads, 1).to(outputs)
    differences = (z - outputs).norm(dim=-1) / sizes
    allowed = rounding + _tolerance(source.values)
    by_site = len(group), -1
    excess = (differences / allowed).view(by_site)
    return differences.view(by_site).amax(1), excess.amax(1)


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the texts of several attentions one after another."""
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _rows(tensor: Tensor, positions: Sequence[int], dim: int) -> Tensor:
    """Return some rows along an axis; neighbours as a view."""
    start, length = positions[0], len(positions)
    # An index would have to be sent to the GPU, which waits for it.
    if list(positions) == list(range(start, start + length)):
        return tensor.narrow(dim, start, length)
    return tensor.index_select(dim, _index(tuple(positions), tensor.device))


@lru_cache(maxsize=16)
def _index(positions: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(positions, device=device)


def _source(group: Sequence[_AttentionCall]) -> _FusedWeights | _EagerWeights:
    """Return what computes the weights of alike attentions, [site x text, ...]."""
    part = group[0].part
    layout, heads = part.layout, part.heads
    operands = zip(*(attention.operation.operands for attention in group), strict=True)

    def take(layout_of: HeadLayout, tensors: Sequence[Tensor]) -> Tensor:
        split = [layout_of.split(tensor) for tensor in tensors]
        return _take_heads(_joined(split), heads, layout.heads)

    if layout.is_fused:
        queries, keys, values = operands
        named = group[0].operation.named
        mask = named.get("attn_mask")
        if mask is not None:
            # torch broadcasts a mask that has fewer axes.
            mask = mask[(None,) * (4 - mask.ndim)]
            # A mask for all heads stays one: copies would be as large as all weights.
            if mask.shape[1] > 1:
                mask = _take_heads(mask, heads, layout.heads)
            if mask.shape[0] > 1:
                mask = mask.repeat(len(group), 1, 1, 1)
        return _FusedWeights(
            query=take(layout.queries, queries),
            key=take(layout.keys, keys),
            values=take(layout.values, values),
            mask=mask,
            is_causal=bool(named.get("is_causal", False)),
            scale=named.get("scale"),
        )
    patterns, values = operands
    # A pattern is laid out as values are, with all heads.
    pattern_layout = replace(layout.values, heads=layout.heads)
    return _EagerWeights(
        pattern=take(pattern_layout, patterns),
        values=take(layout.values, values),
    )


def _take_heads(tensor: Tensor, heads: tuple[int, ...], count: int) -> Tensor:
    """Return some heads of [text, head, ...]; grouped queries share keys and values."""
    copies = count // tensor.shape[1]
    if copies == 1 and heads == tuple(range(count)):
        return tensor
    return _rows(tensor, [head // copies for head in heads], 1)


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 if it is in float64, else in float32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


@dataclass(frozen=True)
class _EagerWeights:
    """Weights that the code of an attention computes itself."""

    pattern: Tensor
    values: Tensor

    @property
    def shape(self) -> Sequence[int]:
        """Return how many texts, heads, queries and keys there are."""
        return self.pattern.shape

    def weights(self, positions: list[int]) -> Tensor:
        """Return the weights of some queries, [text, head, row, key]."""
        return _wide(_rows(self.pattern, positions, 2))

    def rounded_weights(self, positions: list[int]) -> tuple[Tensor, float]:
        """Return the same, and their relative error: they are the model's own."""
        return self.weights(positions), 0.0


@dataclass(frozen=True)
class _FusedWeights:
    """Weights of torch's attention, computed from its arguments."""

    query: Tensor
    key: Tensor
    values: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None

    @property
    def shape(self) -> Sequence[int]:
        """Return how many texts, heads, queries and keys there are."""
        return *self.query.shape[:3], self.key.shape[2]

    @cached_property
    def wide_key(self) -> Tensor:
        """Return the keys as scores are computed from them."""
        return _wide(self.key)

    @property
    def factor(self) -> float:
        """Return what products of queries and keys are multiplied by."""
        if self.scale is not None:
            return self.scale
        return 1 / sqrt(self.query.shape[-1])

    def weights(self, positions: list[int]) -> Tensor:
        """Return the weights of some queries, [text, head, row, key]."""
        return _softmax(self.scores(positions))

    def scores(self, positions: list[int]) -> Tensor:
        """Return the scores of some queries; minus infinity where a key is hidden."""
        query = _wide(_rows(self.query, positions, 2)) * self.factor
        scores = query @ self.wide_key.mT
        if self.is_causal:
            # torch aligns the first query with the first key.
            rows = _index(tuple(positions), scores.device)
            columns = _index(tuple(range(scores.shape[-1])), scores.device)
            scores.masked_fill_(columns > rows[:, None], -torch.inf)
        if self.mask is None:
            return scores
        mask = self.mask
        if mask.shape[2] > 1:
            mask = _rows(mask, positions, 2)
        if mask.dtype == torch.bool:
            return scores.masked_fill_(~mask, -torch.inf)
        return scores.add_(mask)

    def rounded_weights(self, positions: list[int]) -> tuple[Tensor, Tensor]:
        """Return the same, and their relative error [text, head, row].

        The rounding error of a score grows with the score, and a softmax turns it into
        a relative error of the weights.
        """
        scores = self.scores(positions)
        weights = _softmax(scores)
        query = _wide(_rows(self.query, positions, 2)).norm(dim=-1) * abs(self.factor)
        key = self.wide_key.norm(dim=-1).amax(-1, keepdim=True)
        visible = scores.masked_fill(weights == 0, 0)
        score_size = query * key + visible.abs().amax(-1)
        return weights, score_size * (ULPS * torch.finfo(scores.dtype).eps)


def _softmax(scores: Tensor) -> Tensor:
    weights = scores.softmax(-1)
    # A query that sees no key gets nothing, as torch's attention has it.
    sees_nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return weights.masked_fill_(sees_nothing, 0)


def _tolerance(values: Tensor) -> float:
    """Return how far rounding may move weights times values, as a share."""
    # A GPU may multiply float32 with the digits of TF32, which are those of float16.
    coarse = values.is_cuda and torch.backends.cuda.matmul.allow_tf32
    if values.dtype == torch.float32 and coarse:
        return tolerance(torch.float16, 1)
    return tolerance(values.dtype, 1)


def _itemsize(tensor: Tensor) -> int:
    """Return the bytes of a number that is computed from a tensor."""
    return max(4, tensor.element_size())


def _write_norms(
    module: nn.Module, parts: Sequence[WatchedAttention], values: Tensor
) -> list[Tensor]:
    """Return the norms [head, key] of what values [site, head, key, dim] write.

    A norm after attention multiplies all that a token gets by one number, which depends
    on what all heads write. That number is left out.
    """
    norms = []
    for part, of_site in zip(parts, values, strict=True):
        write = Write(module, part.projection, slice(None))
        if write.weight is None:
            # Only the code of a quantised projection knows its weight.
            weight = write.linear(torch.eye(write.width).to(of_site)).T
        else:
            weight = write.weight.detach() * write.scale
        if write.norm is not None:
            weight = _wide(weight) * _wide(write.gain(weight.T))[:, None]
        wide = _wide(weight).mT
        by_head = wide.reshape(part.layout.heads, -1, wide.shape[-1])
        by_head = _rows(by_head, part.heads, 0)
        row_bytes = by_head[:, 0].numel() * _itemsize(by_head)
        keys_at_a_time = max(1, MOST_BYTES // row_bytes)
        of_keys = []
        for start in range(0, of_site.shape[1], keys_at_a_time):
            some = of_site[:, start : start + keys_at_a_time]
            of_keys.append((_wide(some).to(by_head) @ by_head).norm(dim=-1))
        norms.append(torch.cat(of_keys, dim=-1))
    return norms
