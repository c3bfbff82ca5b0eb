"""Find what is inside the blocks of a module: heads, neurons and routers, proved.

The trial pass is traced with its operations. The last projection of a branch is the
module whose output the branch is; what it makes of parts of its input is proved to add
up. An attention is the operation whose output, head by head, is what enters that
projection. So pattern times values is `z`, and the heads' writes and the bias sum up to
what attention adds, or the block's heads are refused with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.blocks import Block
from hiddenscope.discovery.inside import (
    AttentionHeads,
    Branch,
    HeadLayout,
    Inside,
    InsideBlock,
    OperationPlace,
    OperationTap,
    Projection,
    Write,
    bias_of,
)
from hiddenscope.discovery.proof import fitting_layout, same
from hiddenscope.discovery.stacks import Anatomy, Stack
from hiddenscope.discovery.trace import (
    Call,
    Layout,
    Tap,
    Trace,
    TracedOperation,
    arguments,
    trace,
)
from hiddenscope.discovery.vocabulary import TrialShape, trial_ids, trial_shapes
from hiddenscope.errors import is_out_of_memory
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.calls import accepts
from hiddenscope.modules.trials import tolerance

# Two trial passes whose numbers of texts, tokens and targets are all different, and
# unlike the usual numbers of heads.
TRIALS = (TrialShape(3, 7, 5), TrialShape(5, 11, 13))
HIDING_KERNELS = ("flash_attention", "flex_attention", "paged", "kernels-community")

NO_PROJECTION = "what it adds is not the output of a module with one input"
NOT_ADDITIVE = "what the parts of its last module's input add do not add up"
NO_ATTENTION = (
    "what enters its last projection is not a pattern times values: the code has no"
    " softmax attention, or changes its result afterwards"
)
IN_PIECES = (
    "several operations each make a piece of what enters its last projection, by chunks"
    " of tokens or groups of heads: heads are shown where one makes all of it"
)
IN_ANOTHER_FORM = (
    "pattern and values are multiplied in a form that is not understood: write the"
    " einsum as pattern times values, without '...', or use torch.matmul"
)


def find_inside(module: nn.Module, anatomy: Anatomy) -> Inside:
    """Return what is inside every block, proved on two trial passes.

    What the two passes show in different places is refused.
    """
    first, second = (
        _trial(module, anatomy, *shape) for shape in trial_shapes(module, TRIALS)
    )
    stacks = []
    for one_stack, other_stack in zip(first, second, strict=True):
        blocks = []
        for block, other in zip(one_stack, other_stack, strict=True):
            blocks.append(_agreed(block, other))
        stacks.append(tuple(blocks))
    return Inside(tuple(stacks))


def _agreed(block: InsideBlock, other: InsideBlock) -> InsideBlock:
    """Return what two trials have in common; the rest is refused."""
    branches = {}
    for name, branch in block.branches.items():
        if branch != other.branches[name] and not branch.refused:
            reason = other.branches[name].refused
            branch = Branch(refused=reason or "its heads are elsewhere in other texts")
        branches[name] = branch
    if block.router != other.router:
        return InsideBlock(branches, no_router="its router is elsewhere in other texts")
    return InsideBlock(branches, block.router, block.experts, block.no_router)


def _trial(
    module: nn.Module, anatomy: Anatomy, texts: int, tokens: int, targets: int
) -> list[list[InsideBlock]]:
    """Return what one trial pass shows inside the blocks of each stack."""
    device = hooks.input_device(module)
    ids = trial_ids(module, texts, tokens, seed=3).to(device)
    decoder_ids = None
    if "decoder_input_ids" in accepts(module):
        decoder_ids = trial_ids(module, texts, targets, seed=4).to(device)
    inputs = arguments(module, ids, targets=decoder_ids)
    traced = trace(module, inputs, with_operations=True)
    stacks = []
    for stack in anatomy.stacks:
        length = tokens
        if decoder_ids is not None and stack.name == "decoder":
            length = targets
        search = _Search(module, stack, traced, length)
        stacks.append([search.inside(block) for block in stack.blocks])
    return stacks


@dataclass(frozen=True)
class _Window:
    """The calls and operations inside one call of a block."""

    calls: Sequence[Call]
    operations: Sequence[TracedOperation]


class _Search:
    """Searches the blocks of one stack in a traced pass."""

    def __init__(
        self, module: nn.Module, stack: Stack, traced: Trace, tokens: int
    ) -> None:
        self.module = module
        self.traced = Trace(traced.texts, tokens, calls=traced.calls)
        self.operations = traced.operations
        self.tokens = tokens
        self.layout = stack.proof.taps[0].layout
        config: Any = getattr(module, "config", None)
        self.kernel = str(getattr(config, "_attn_implementation", None) or "")

    def inside(self, block: Block) -> InsideBlock:
        """Return what is inside a block."""
        if not block.parts:
            refused = block.refused or "its parts are not shown"
            branches = dict.fromkeys(("attn", "mlp"), Branch(refused=refused))
            return InsideBlock(branches, no_router=refused)
        window = self._window(block)
        branches = {}
        for name in ("attn", "cross", "mlp"):
            if name in block.parts:
                branches[name] = self._branch(name, block.parts[name], window)
        router, experts, no_router = self._router(block, window)
        return InsideBlock(branches, router, experts, no_router)

    def _window(self, block: Block) -> _Window:
        """Return what happens in the call of a block that makes its parts."""
        part = self.traced.call_at(block.parts["attn"])
        around = part
        for call in self.traced.calls:
            if call.path == block.path and _contains(call, part):
                around = call
        inner = [call for call in self.traced.calls if _contains(around, call)]
        operations = []
        for operation in self.operations:
            if around.entered < operation.time < around.left:
                operations.append(operation)
        return _Window(inner, operations)

    def _branch(self, name: str, tap: Tap, window: _Window) -> Branch:
        call = self.traced.call_at(tap)
        output = call.into if tap.side == "input" else call.out
        reason = NO_PROJECTION
        for projection, last in self._projections(output, window):
            if not self._adds_up(projection, last, output):
                if reason == NO_PROJECTION:
                    reason = NOT_ADDITIVE
                continue
            if name == "mlp":
                return Branch(projection)
            heads = self._heads(name, projection, last, window)
            if isinstance(heads, AttentionHeads):
                return Branch(projection, heads)
            reason = heads
        return Branch(refused=reason)

    def _projections(
        self, output: Tensor | None, window: _Window
    ) -> Iterator[tuple[Projection, Call]]:
        """Yield the calls that may be the last projection, innermost first.

        They are followed by those that a norm comes after.
        """
        ends = [call for call in reversed(window.calls) if same(call.out, output)]
        pairs: list[tuple[Call, str]] = []
        for call in ends:
            # Dropout hands on what it is given.
            if not same(call.into, output):
                pairs.append((call, ""))
        for norm in ends:
            for call in reversed(window.calls):
                if call.left < norm.entered and same(call.out, norm.into):
                    pairs.append((call, norm.path))
        for call, norm_path in pairs:
            # A weight has two axes; wider layouts would be no plain map of the last.
            if call.into is None or call.into.ndim > 3:
                continue
            layout = fitting_layout(call.into, self.traced, self.layout)
            if layout is not None:
                tap = Tap(call.path, call.number, "input", layout)
                yield Projection(tap, call.into.shape[-1], norm_path), call

    def _adds_up(
        self, projection: Projection, call: Call, output: Tensor | None
    ) -> bool:
        """Tell whether the writes of any split of the input sum up to the branch."""
        assert call.into is not None
        assert output is not None
        width = projection.width
        cut = max(1, width // 3)
        pieces = (slice(0, cut), slice(cut, 2 * cut), slice(2 * cut, width))
        writes_elsewhere = False
        try:
            with autograd.restored(), torch.no_grad():
                total = bias_of(self.module, projection, call.into).double()
                for piece in pieces:
                    write = Write(self.module, projection, piece)
                    written = write(call.into).double()
                    total = total + written
                    is_square = width == written.shape[-1]
                    if not is_square or not _is_scale(written, call.into, piece):
                        writes_elsewhere = True
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # A module that takes or gives more than a state is no projection, and its
            # code may raise anything.
            return False
        # A scale of channels is no projection. Some heads of a sparse projection may
        # look like one, but not all.
        if total.shape != output.shape or not writes_elsewhere:
            return False
        # Norms of transformers compute in float32, whatever the dtype of the model.
        coarsest = torch.float32 if projection.norm else torch.float64
        eps_dtype = max(
            (output.dtype, coarsest), key=lambda dtype: torch.finfo(dtype).eps
        )
        allowed = tolerance(eps_dtype, 1) * output.double().norm(dim=-1)
        difference = (total - output.double()).norm(dim=-1)
        return bool((difference <= allowed).all())

    def _heads(
        self, name: str, projection: Projection, call: Call, window: _Window
    ) -> AttentionHeads | str:
        """Return the heads of an attention, or why they cannot be told apart."""
        if any(name in self.kernel for name in HIDING_KERNELS):
            return (
                f"its kernel, {self.kernel}, hides queries and keys: load the model"
                " with attention='sdpa' or 'eager'"
            )
        assert call.into is not None
        z = projection.tap.layout.states(call.into, self.tokens)
        before = []
        for operation in window.operations:
            if operation.time < call.entered:
                before.append(operation)
        for operation in reversed(before):
            if operation.kind == "softmax" or not operation.operands:
                continue
            heads = self._split_like(operation, z)
            if heads is None:
                continue
            if operation.kind == "attention":
                return self._fused(name, operation, heads)
            return self._eager(name, operation, heads, before)
        makers = []
        for operation in before:
            if operation.kind != "softmax" and torch.isin(operation.output, z).all():
                makers.append(operation)
        if not makers:
            return NO_ATTENTION
        return IN_PIECES if len(makers) > 1 else IN_ANOTHER_FORM

    def _split_like(self, operation: TracedOperation, z: Tensor) -> HeadLayout | None:
        """Return the layout in which an operation's output is z, head by head."""
        output, texts = operation.output, self.traced.texts
        if output.ndim == 4:
            # An einsum may put tokens before heads.
            if output.shape[2] != self.tokens:
                output = output.transpose(1, 2)
            layout = HeadLayout(output.shape[1])
        elif output.ndim == 3 and output.shape[0] % texts == 0:
            count = output.shape[0] // texts
            layout = HeadLayout(count, flat_heads=count)
        else:
            return None
        if layout.split(output).shape[::2] != (texts, self.tokens):
            return None
        return layout if same(layout.states(output, self.tokens), z) else None

    def _fused(
        self, name: str, operation: TracedOperation, heads: HeadLayout
    ) -> AttentionHeads | str:
        queries, keys, values = operation.operands
        if queries.ndim != 4:
            return "its queries are not laid out head by head"
        place = _place(operation)
        key_layout = _key_layout(keys, HeadLayout(keys.shape[1]))
        value_layout = _key_layout(values, HeadLayout(values.shape[1]))
        return AttentionHeads(
            heads=heads.heads,
            key_heads=key_layout.heads,
            dim=values.shape[-1],
            key_dim=queries.shape[-1],
            weights=place,
            scores=place,
            queries=HeadLayout(queries.shape[1]),
            keys=key_layout,
            values=value_layout,
            has_other_keys=name == "cross" or keys.shape[2] != self.tokens,
        )

    def _eager(
        self,
        name: str,
        operation: TracedOperation,
        heads: HeadLayout,
        before: Sequence[TracedOperation],
    ) -> AttentionHeads | str:
        """Return heads whose pattern the code itself makes with a softmax."""
        earlier = [other for other in before if other.time < operation.time]
        pattern, values = operation.operands
        rows = heads.split(pattern)
        softmax = _softmax_of(rows, earlier, heads)
        if softmax is None:
            return NO_ATTENTION
        value_layout = _key_layout(values, heads)
        makers = []
        for product in earlier:
            if product.kind != "product" or product.time > softmax.time:
                continue
            # It has a number for each pair of a query and a key.
            output = product.output
            is_whole = output.numel() == rows.numel() or output.ndim >= 3
            if is_whole and output.shape[-2:] == rows.shape[-2:]:
                makers.append(product)
        scores, queries, keys = None, heads, heads
        key_dim = values.shape[-1]
        # Not every einsum says which factor holds the queries.
        if len(makers) == 1 and makers[0].operands:
            scores = _place(makers[0])
            query, key = makers[0].operands
            flat_heads = heads.heads if query.ndim == 3 else 0
            queries = HeadLayout(heads.heads, flat_heads)
            keys = _key_layout(key, HeadLayout(heads.heads, flat_heads, True))
            key_dim = query.shape[-1]
        return AttentionHeads(
            heads=heads.heads,
            key_heads=value_layout.heads,
            dim=values.shape[-1],
            key_dim=key_dim,
            weights=_place(operation),
            scores=scores,
            queries=queries,
            keys=keys,
            values=value_layout,
            has_sink=softmax.output.shape[-1] != rows.shape[-1],
            has_other_keys=name == "cross" or rows.shape[-1] != self.tokens,
        )

    def _router(
        self, block: Block, window: _Window
    ) -> tuple[OperationTap | None, int, str]:
        """Return the softmax over a number of experts, or why there is none."""
        start = self.traced.call_at(block.parts["attn"]).left
        if block.kind == "parallel":
            start = -1
        softmaxes = []
        for operation in window.operations:
            output = operation.output
            is_late = operation.kind == "softmax" and operation.time > start
            if not is_late or output.ndim > 3 or output.shape[-1] < 2:
                continue
            layout = fitting_layout(output, self.traced, Layout(flat=True))
            if layout is not None:
                softmaxes.append((operation, layout))
        if len(softmaxes) != 1:
            reason = "its MLP has several softmaxes"
            if not softmaxes:
                reason = "its MLP has no softmax over experts"
            return None, 0, reason
        operation, layout = softmaxes[0]
        # Logits that come sorted in every row are those of the chosen experts alone:
        # then a column is a rank, and not an expert.
        if bool((operation.operands[0].diff(dim=-1) <= 0).all()):
            return None, 0, "its router's softmax is over the chosen experts alone"
        tap = OperationTap(_place(operation), -1, layout)
        return tap, operation.output.shape[-1], ""


def _is_scale(written: Tensor, inputs: Tensor, columns: slice) -> bool:
    """Tell whether columns write to themselves alone, as a scale of channels does.

    A scale writes nothing to a channel that holds nothing.
    """
    others = written.clone()
    others[..., columns] *= inputs[..., columns] == 0
    return not bool(others.any())


def _contains(outer: Call, inner: Call) -> bool:
    return outer.entered <= inner.entered and inner.left <= outer.left


def _place(operation: TracedOperation) -> OperationPlace:
    """Return the place of an operation in the innermost module that makes it."""
    path, call, number = operation.places[-1]
    return OperationPlace(path, call, operation.kind, number)


def _key_layout(tensor: Tensor, layout: HeadLayout) -> HeadLayout:
    """Return the layout of keys or values with the number of different heads.

    Heads that are all zero, as pruned ones are, count as different.
    """
    heads = layout.split(tensor)
    count = heads.shape[1]
    for copies in range(count, 1, -1):
        if count % copies or not heads.any():
            continue
        groups = heads.reshape(len(heads), -1, copies, *heads.shape[2:])
        if bool((groups == groups[:, :, :1]).all()):
            return replace(layout, heads=count // copies)
    return replace(layout, heads=count)


def _softmax_of(
    rows: Tensor, earlier: Sequence[TracedOperation], heads: HeadLayout
) -> TracedOperation | None:
    """Return the softmax that made the rows of a pattern [text, head, query, key].

    A sink has a column of its own, which is dropped afterwards.
    """
    for operation in reversed(earlier):
        if operation.kind != "softmax":
            continue
        output = operation.output
        if output.ndim == 3:
            output = output.reshape(-1, heads.heads, *output.shape[1:])
        columns = rows.shape[-1]
        if output.ndim != 4 or output.shape[-1] not in (columns, columns + 1):
            continue
        if output.shape[:-1] != rows.shape[:-1]:
            continue
        if bool((output[..., :columns].to(rows.dtype) == rows).all()):
            return operation
    return None
