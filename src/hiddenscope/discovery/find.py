"""Find the hidden states of a module by running it on a few tokens, and prove them.

What is inside the blocks is found when it is first asked for: heads, neurons, routers
and what enters the MLP. The trial pass is then traced with its operations. The last
projection of a branch is the module whose output the branch is; what it makes of parts
of its input is proved to add up. An attention is the operation whose output, head by
head, is what enters that projection. So pattern times values is `z`, and the heads'
writes and the bias sum up to what attention adds, or the block's heads are refused with
the reason. What enters the MLP is the middle of the block or a norm of it: held fixed,
it fixes what the MLP adds, whatever else is disturbed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, filterfalse, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.anatomy import (
    Anatomy,
    AttentionHeads,
    Branch,
    Head,
    HeadLayout,
    Inside,
    InsideBlock,
    OperationTap,
    Projection,
    Stack,
    Write,
)
from hiddenscope.discovery.blocks import (
    Block,
    decides,
    dissect,
    mixes_tokens,
    state_at,
)
from hiddenscope.discovery.proof import (
    WITHOUT_BLOCK_MODULES,
    Chain,
    HasNaN,
    Proof,
    Unproved,
    block_calls,
    chains,
    differs,
    fitting_layout,
    interrupted_chains,
    model_type,
    prove,
    prove_by_cuts,
    same,
    whole_chains,
)
from hiddenscope.discovery.trace import (
    Call,
    Layout,
    Tap,
    Trace,
    TracedOperation,
    trace,
)
from hiddenscope.discovery.vocabulary import (
    TrialShape,
    trial_ids,
    trial_inputs,
    trial_shapes,
    vocabulary,
    window,
)
from hiddenscope.errors import AnatomyError, NotFinite, TooLarge, is_out_of_memory
from hiddenscope.modules import autograd, calls, hooks
from hiddenscope.modules.calls import accepts
from hiddenscope.modules.trials import rounded_to, tolerance

TRIAL_SHAPES = (
    TrialShape(texts=2, tokens=7, targets=4),
    TrialShape(texts=3, tokens=5, targets=6),
)
# A text has to be shortened, and its first token to be seen by later ones.
SHORTEST_WINDOW = 3
# For what is inside blocks: all numbers of texts, tokens and targets are different, and
# unlike the usual numbers of heads.
INSIDE_SHAPES = (TrialShape(3, 7, 5), TrialShape(5, 11, 13))
HIDING_KERNELS = ("flash_attention", "flex_attention", "paged", "kernels-community")

INTERRUPTED = "its output is changed before the next block takes it in"
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


# Sizes of a state at which a norm gives the same.
NORM_SIZES = (32.0, 64.0)


@dataclass(frozen=True)
class _TrialStack:
    """One stack in a trial pass: the trace, its chain of blocks, and the proof."""

    trace: Trace
    chain: Chain
    proof: Proof


@dataclass(frozen=True)
class _TrialPass:
    """One trial pass: its inputs and its stacks."""

    inputs: Mapping[str, Any]
    stacks: tuple[_TrialStack, ...]


def find(module: nn.Module, *, name: str = "") -> Anatomy:
    """Return the anatomy of a module, proved on two trial passes.

    An AnatomyError says why it cannot be proved.
    """
    name = name or type(module).__name__
    longest = window(module)
    if longest is not None and longest < SHORTEST_WINDOW:
        raise _refusal(
            module,
            name,
            f"it takes texts of at most {longest} tokens, and a proof needs"
            f" {SHORTEST_WINDOW}",
        )
    first, second = (
        _trial_pass(module, name, shape) for shape in trial_shapes(module, TRIAL_SHAPES)
    )
    stacks = [
        _agreed_stack(module, name, number, first, second)
        for number in range(len(first.stacks))
    ]
    logits = _logits(module, first.stacks[-1])
    head = None if logits is None else _head(module, first.stacks[-1], logits)
    anatomy = Anatomy(tuple(stacks), head, name, logits is not None)
    return anatomy.with_inside(cache(partial(find_inside, module, anatomy)))


def _agreed_stack(
    module: nn.Module, name: str, number: int, first: _TrialPass, second: _TrialPass
) -> Stack:
    """Return a stack that two passes prove alike, with the parts of its blocks."""
    once, again = first.stacks[number], second.stacks[number]
    if once.proof != again.proof:
        raise _refusal(
            module, name, "texts of another length or number show its states elsewhere"
        )
    blocks = []
    # One block of each build is tried, with a pass for each branch.
    reasons = {}
    pairs = zip(_dissect(module, once), _dissect(module, again), strict=True)
    for k, (block, other) in enumerate(pairs):
        reason = ""
        if block != other:
            reason = "its parts are in other places for texts of another shape"
        elif block.parts:
            places = [type(module.get_submodule(block.path)).__name__, block.kind]
            for part, tap in sorted(block.parts.items()):
                places += [part, tap.path.removeprefix(block.path), tap.side]
            key = tuple(places)
            if key not in reasons:
                reasons[key] = _why_misnamed(module, first, once, k, block)
            reason = reasons[key]
        if reason:
            block = Block(block.path, block.kind, refused=reason)
        blocks.append(block)
    causal = not _sees_ahead(module, first, number)
    label = "decoder" if causal else "encoder"
    if len(first.stacks) > 1:
        label = ("encoder", "decoder")[number]
    return Stack(label, once.proof, tuple(blocks), causal)


def still_holds(module: nn.Module, anatomy: Anatomy) -> bool:
    """Tell whether an anatomy from an earlier load is proved again on one batch."""
    try:
        shape, _ = trial_shapes(module, TRIAL_SHAPES)
        trial = _trial_pass(module, anatomy.name, shape)
    except (AnatomyError, NotFinite):
        return False
    proofs = [stack.proof for stack in anatomy.stacks]
    return proofs == [stack.proof for stack in trial.stacks]


def _trial_pass(module: nn.Module, name: str, shape: TrialShape) -> _TrialPass:
    """Run one trial pass and prove every stack on it."""
    encoder_decoder = "decoder_input_ids" in accepts(module)
    inputs, traced = _trace(module, name, shape)
    sizes = [shape.texts, shape.tokens]
    if encoder_decoder:
        sizes.append(shape.targets)
    # The blocks of Gemma 3n and DeepSeek-V4 carry several streams, on further axes.
    streams: set[int] = set()
    for call in block_calls(module, traced):
        if call.into is not None and call.into.ndim > 3:
            streams.update(Counter(call.into.shape) - Counter(sizes))
    if streams & {shape.texts, shape.tokens}:
        # In steps of three, in which the two passes never meet.
        free = [filterfalse(streams.__contains__, count(size, 3)) for size in shape]
        shape = TrialShape(*map(next, free))
        inputs, traced = _trace(module, name, shape)
    traces = [traced]
    if encoder_decoder:
        traces.append(replace(traced, tokens=shape.targets))
    stacks: list[_TrialStack] = []
    for stack_trace in traces:
        taken = {stack.chain.taps[0] for stack in stacks}
        chain, proof = _first_proved(module, name, stack_trace, taken)
        stacks.append(_TrialStack(stack_trace, chain, proof))
    return _TrialPass(inputs, tuple(stacks))


def _trace(
    module: nn.Module, name: str, shape: TrialShape
) -> tuple[dict[str, Any], Trace]:
    """Return the inputs of a trial pass, and its trace."""
    inputs = trial_inputs(module, shape)
    trial = f"a trial pass over {shape.texts} texts of {shape.tokens} tokens"
    try:
        return _with_all_logits(module, inputs, trace(module, inputs))
    except Exception as error:
        if is_out_of_memory(error):
            raise TooLarge(
                f"Cannot read the states of {name}",
                f"memory ran out in {trial}",
                "Free some memory, or load it in a smaller dtype.",
            ) from error
        reason = f"{trial} stopped with {type(error).__name__}: {error}"
        raise _refusal(module, name, reason) from error


def _with_all_logits(
    module: nn.Module, inputs: dict[str, Any], traced: Trace
) -> tuple[dict[str, Any], Trace]:
    """Give the ids as targets, too, if only that gives logits of every token.

    nanoGPT is such a model.
    """
    for name in list(calls.plain_parameters(module) or ())[1:2]:
        ids = inputs["input_ids"]
        vocabulary_size = vocabulary(module)
        whole = (*ids.shape, vocabulary_size)
        shape = getattr(hooks.logits_in(traced.output), "shape", ())
        # As targets of anything but logits, ids may be out of bounds.
        if shape == whole or shape[-1:] != (vocabulary_size,):
            break
        with_targets = {**inputs, name: ids}
        try:
            again = trace(module, with_targets)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            break
        if getattr(hooks.logits_in(again.output), "shape", ()) == whole:
            calls.GIVEN_IDS_TOO[type(calls.below_wrapper(module))] = name
            return with_targets, again
    return inputs, traced


def _first_proved(
    module: nn.Module, name: str, traced: Trace, taken: set[Tap]
) -> tuple[Chain, Proof]:
    """Return the first chain that can be proved, with its proof."""
    stacks = 2 if "decoder_input_ids" in accepts(module) else 1
    refused = []
    find_chains, prove_chain = chains, prove
    if not traced.reports():
        if stacks == 2:
            reason = "it gives back no hidden_states to compare its states with"
            raise _refusal(module, name, reason)
        find_chains, prove_chain = whole_chains, prove_by_cuts
    for chain in find_chains(module, traced):
        if chain.taps[0] in taken:
            continue
        try:
            return chain, prove_chain(module, chain, traced)
        except HasNaN as broken:
            stack = ""
            if stacks == 2:
                stack = "decoder." if taken else "encoder."
            raise NotFinite(
                f"The states of {name} are not finite",
                f"there is a NaN at {stack}layer.{broken.layer} in a trial pass",
                "Look at the weights of the block that makes it, or load the model in a"
                " wider dtype.",
            ) from None
        except Unproved as unproved:
            refused.append((chain, str(unproved)))
    if stacks == 1 and traced.reports():
        for chain in interrupted_chains(module, traced):
            # What comes between two blocks may add what no block has seen.
            with suppress(Unproved):
                prove_by_cuts(module, chain, traced)
                return chain, prove(module, chain, traced)
    reason = "no list of blocks in it is run one after another"
    if refused:
        reason = _why_none(refused, stacks - len(taken))
    raise _refusal(module, name, reason)


def _why_none(refused: Sequence[tuple[Chain, str]], stacks: int) -> str:
    """Say why no chain is a stack.

    That is the longest chain's reason, or, if there are more chains than stacks, the
    last one's.
    """
    separate = [
        (chain, reason)
        for chain, reason in refused
        if not any(chain.within(other) for other, _ in refused)
    ]
    if len(separate) <= stacks:
        _, reason = max(refused, key=lambda pair: len(pair[0].blocks))
        return reason
    separate.sort(key=lambda pair: pair[0].ended)
    lists = [chain.blocks[0].path.rpartition(".")[0] for chain, _ in separate]
    where = ", ".join(dict.fromkeys(lists))
    return (
        f"it runs {len(separate)} chains of blocks ({where}) and none is a stack by"
        f" itself: {separate[-1][1]}"
    )


def _refusal(module: nn.Module, name: str, reason: str) -> AnatomyError:
    remedy = (
        "hiddenscope shows only states that it can prove; nothing of this model can be"
        " captured."
    )
    if calls.plain_parameters(module) is not None:
        remedy = (
            "Let its forward take ids alone and run the blocks of one nn.ModuleList,"
            " each on the state that the one before returned, or let it return"
            " hidden_states as models of transformers do. As it is, it can be the"
            " candidate of hs.drift(reference, module, texts)."
        )
    return AnatomyError(f"The states of {name} cannot be proved", reason, remedy)


def _dissect(module: nn.Module, stack: _TrialStack) -> list[Block]:
    """Return the blocks of a stack with their parts."""
    chain, proof, traced = stack.chain, stack.proof, stack.trace
    if model_type(module) in WITHOUT_BLOCK_MODULES:
        reason = "this family's blocks are no modules of their own"
        return [Block(call.path, "other", refused=reason) for call in chain.blocks]
    layout = proof.taps[0].layout
    blocks = []
    taps = pairwise(proof.taps)
    for call, (tap, after), value in zip(
        chain.blocks, taps, chain.values, strict=False
    ):
        if after.side == "input":
            blocks.append(Block(call.path, "other", refused=INTERRUPTED))
            continue
        into = layout.states(value, traced.tokens)
        scales = _scales(module.get_submodule(call.path))
        blocks.append(dissect(call, tap, traced, into, layout, scales))
    return blocks


def _scales(block: nn.Module) -> list[float]:
    """Return the numbers of a block by which it may multiply what a branch gives."""
    numbers = {value for value in vars(block).values() if isinstance(value, float)}
    return sorted(numbers - {0.0, 1.0})


def _why_misnamed(
    module: nn.Module,
    trial: _TrialPass,
    stack: _TrialStack,
    number: int,
    block: Block,
) -> str:
    """Say why the branches of a block are no attention and MLP; empty if they are."""
    call = stack.chain.blocks[number]
    layout = stack.proof.taps[number].layout
    entry = Tap(call.path, call.number, "input", layout)
    attn, mlp = block.parts["attn"], block.parts["mlp"]
    plain = stack.trace.states_at(attn)
    if not mixes_tokens(module, trial.inputs, entry, attn, plain):
        return "its first branch carries nothing from token to token, as attention does"
    disturbed = entry if block.kind == "parallel" else attn
    plain = stack.trace.states_at(mlp)
    if mixes_tokens(module, trial.inputs, disturbed, mlp, plain):
        return (
            "its last branch carries something from token to token, as an MLP does not"
        )
    if "cross" in block.parts and len(trial.stacks) == 1:
        # Gemma 4 adds what it keeps of each token for the layer, X-MOD an adapter.
        return "it adds a third part after attention and the MLP"
    return ""


# Later tokens that a state reads change it this many times as much as texts beside it.
SCALED = 4


def _sees_ahead(module: nn.Module, trial: _TrialPass, number: int) -> bool:
    """Tell whether the state of the first token changes with the tokens after it."""
    stack = trial.stacks[number]
    name = "decoder_input_ids" if number else "input_ids"
    ids = trial.inputs[name]
    others = trial_ids(module, *ids.shape, seed=2).to(ids.device)
    inputs = {**trial.inputs, name: torch.cat([ids[:, :1], others[:, 1:]], dim=1)}
    last = stack.proof.taps[-1]
    before = stack.trace.states_at(last)
    after = state_at(module, inputs, last, stack.trace.tokens)
    if not differs(before[:, 0], after[:, 0], steps=len(stack.chain.blocks)):
        return False
    # Activations that are quantised with one scale for a whole pass change with every
    # token of it, those of other texts too.
    inputs[name] = torch.cat([ids[:1], others[1:]])
    beside = state_at(module, inputs, last, stack.trace.tokens)
    first = before[0, 0].double()
    by_others = (beside[0, 0].double() - first).norm()
    return bool((after[0, 0].double() - first).norm() > SCALED * by_others)


def _logits(module: nn.Module, stack: _TrialStack) -> Tensor | None:
    """Return the logits of a trial pass; None of a model that makes none.

    Those of a module in plain PyTorch have a number for each id, and are no state.
    """
    traced, proof = stack.trace, stack.proof
    if proof.entries:
        named = getattr(traced.output, "logits", None)
        return named if isinstance(named, Tensor) else None
    logits = hooks.logits_in(traced.output)
    last = traced.states_at(proof.final or proof.taps[-1])
    if logits is None or logits.shape[-1] != vocabulary(module) or same(logits, last):
        return None
    return logits


def _head(module: nn.Module, stack: _TrialStack, logits: Tensor) -> Head | None:
    """Return the unembedding, or None if no module is one.

    It is the submodule whose output the logits are, or the one that the model names.
    """
    traced = stack.trace
    last_calls = {call.path: call for call in traced.calls}
    path = ""
    for call in reversed(traced.calls):
        has_parts = any(module.get_submodule(call.path).children())
        if call.path and not has_parts and same(call.out, logits):
            path = call.path
            break
    gives_logits = bool(path)
    if not gives_logits:
        get_head = getattr(module, "get_output_embeddings", lambda: None)
        paths = {id(part): name for name, part in module.named_modules()}
        path = paths.get(id(get_head()), "")
    if not path or path not in last_calls:
        return None
    last = traced.states_at(stack.proof.final or stack.proof.taps[-1])
    weight = getattr(module.get_submodule(path), "weight", None)
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    tied = any(part.weight is weight for part in tables)
    return Head(path, same(last_calls[path].into, last), gives_logits, tied)


def find_inside(module: nn.Module, anatomy: Anatomy) -> Inside:
    """Return what is inside every block, proved on two trial passes.

    What the two passes show in different places is refused.
    """
    first, second = (
        _trial(module, anatomy, shape) for shape in trial_shapes(module, INSIDE_SHAPES)
    )
    stacks = []
    for one_stack, other_stack in zip(first, second, strict=True):
        blocks = [
            _agreed(block, other)
            for block, other in zip(one_stack, other_stack, strict=True)
        ]
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
    agreed = replace(block, branches=branches)
    if block.router != other.router:
        reason = "its router is elsewhere in other texts"
        agreed = replace(agreed, router=None, experts=0, no_router=reason)
    if block.mlp_input != other.mlp_input:
        agreed = replace(agreed, mlp_input=None)
    return agreed


def _trial(
    module: nn.Module, anatomy: Anatomy, shape: TrialShape
) -> list[list[InsideBlock]]:
    """Return what one trial pass shows inside the blocks of each stack."""
    inputs = trial_inputs(module, shape, seed=3)
    encoder_pass = trace(module, inputs, with_operations=True)
    decoder_pass = replace(encoder_pass, tokens=shape.targets)
    stacks = []
    for stack in anatomy.stacks:
        traced = encoder_pass
        if "decoder_input_ids" in inputs and stack.name == "decoder":
            traced = decoder_pass
        search = _Search(module, stack, traced)
        stacks.append([search.inside(block) for block in stack.blocks])
    return stacks


class _Search:
    """Searches the blocks of one stack in a traced pass."""

    def __init__(self, module: nn.Module, stack: Stack, traced: Trace) -> None:
        self.module = module
        self.traced = traced
        # One block of each build is tried.
        self.decided: dict[tuple[str, ...], bool] = {}
        self.tokens = traced.tokens
        self.layout = stack.proof.taps[0].layout
        config = getattr(module, "config", None)
        self.kernel = str(getattr(config, "_attn_implementation", None) or "")

    def inside(self, block: Block) -> InsideBlock:
        """Return what is inside a block."""
        if not block.parts:
            refused = block.refused or "its parts are not shown"
            branches = dict.fromkeys(("attn", "mlp"), Branch(refused=refused))
            return InsideBlock(branches, no_router=refused, no_input=refused)
        # What happens in the call of the block that makes its parts.
        part = self.traced.call_at(block.parts["attn"])
        around = part
        for call in self.traced.calls:
            if call.path == block.path and call.contains(part):
                around = call
        inner = self.traced.within(around)
        branches = {}
        for name in ("attn", "cross", "mlp"):
            if name in block.parts:
                branches[name] = self._branch(name, block.parts[name], inner)
        entrance = self._mlp_input(block, around, inner)
        return InsideBlock(branches, *self._router(block, inner), entrance)

    def _mlp_input(self, block: Block, around: Call, inner: Trace) -> Tap | None:
        """Return the tap of what decides what the MLP adds; None if there is none.

        That is a norm of the middle of the block, or the middle itself. It is tapped
        where the outermost module takes it in: another part may read the same norm.
        """
        mid = self.traced.states_at(block.parts["mid"])
        taps: list[Tap] = []
        direct = []
        outputs = []
        try:
            for tap in self._entrances(inner, mid):
                if self._is_norm(inner, tap):
                    outputs.append(replace(tap, side="output"))
                else:
                    direct.append(tap)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # It may be a norm that needs more than a state.
            return None
        for output in outputs:
            taps += self._entrances(inner, self.traced.states_at(output))
        taps += direct
        # In a parallel block attention may read the same.
        if block.kind != "parallel":
            taps += outputs
        entry = Tap(around.path, around.number, "input", self.layout)
        build = type(self.module.get_submodule(block.path)).__name__, block.kind
        for tap in taps:
            # A module that gives the layer adds the stream too.
            if same(self.traced.call_at(tap).out, around.out):
                continue
            key = (*build, tap.path.removeprefix(block.path), tap.side)
            if key not in self.decided:
                places = entry, tap, block.parts["mlp"]
                self.decided[key] = decides(self.module, self.traced, places)
            if self.decided[key]:
                return tap
        return None

    def _entrances(self, inner: Trace, value: Tensor) -> Iterator[Tap]:
        """Yield where modules take in a value, the outermost first."""
        for call in inner.calls:
            if call.into is None:
                continue
            layout = fitting_layout(call.into, self.traced, self.layout)
            if layout and same(layout.states(call.into, self.tokens), value):
                yield Tap(call.path, call.number, "input", layout)

    def _is_norm(self, inner: Trace, tap: Tap) -> bool:
        """Tell whether a module gives the same at any size of a state.

        A module with parts is an MLP, unless weights take in what it gives: AXK2's norm
        has a gate.
        """
        part = self.module.get_submodule(tap.path)
        call = self.traced.call_at(tap)
        assert call.into is not None
        if getattr(call.out, "shape", ()) != call.into.shape:
            return False
        output = self.traced.states_at(replace(tap, side="output"))
        if any(part.children()) and not self._enters_weights(inner, output):
            return False
        unit = call.into / call.into.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        with autograd.restored(), torch.no_grad():
            small, large = (part.forward(size * unit) for size in NORM_SIZES)
        return bool((large - small).norm() < small.norm() / 8)

    def _enters_weights(self, inner: Trace, value: Tensor) -> bool:
        """Tell whether a module with a matrix takes in a value."""
        for tap in self._entrances(inner, value):
            for weight in self.module.get_submodule(tap.path).parameters():
                if weight.dim() > 1:
                    return True
        return False

    def _branch(self, name: str, tap: Tap, inner: Trace) -> Branch:
        call = self.traced.call_at(tap)
        output = call.into if tap.side == "input" else call.out
        reason = NO_PROJECTION
        for projection, last in self._projections(output, inner):
            if not self._adds_up(projection, last, output):
                if reason == NO_PROJECTION:
                    reason = NOT_ADDITIVE
                continue
            # The last module's output is added times the scale of its branch.
            projection = replace(projection, scale=tap.layout.scale)
            if name == "mlp":
                return Branch(projection)
            heads = self._heads(name, projection, last, inner)
            if isinstance(heads, AttentionHeads):
                return Branch(projection, heads)
            reason = heads
        return Branch(refused=reason)

    def _projections(
        self, output: Tensor | None, inner: Trace
    ) -> Iterator[tuple[Projection, Call]]:
        """Yield the calls that may be the last projection, innermost first.

        They are followed by those that a norm comes after.
        """
        ends = [call for call in reversed(inner.calls) if same(call.out, output)]
        pairs = []
        for call in ends:
            # Dropout hands on what it is given.
            if not same(call.into, output):
                pairs.append((call, ""))
        for norm in ends:
            for call in reversed(inner.calls):
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
                whole = Write(self.module, projection, slice(None))
                total = whole.bias(call.into).double()
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
        dtype = rounded_to(output.dtype) if projection.norm else output.dtype
        allowed = tolerance(dtype, 1) * output.double().norm(dim=-1)
        difference = (total - output.double()).norm(dim=-1)
        return bool((difference <= allowed).all())

    def _heads(
        self, name: str, projection: Projection, call: Call, inner: Trace
    ) -> AttentionHeads | str:
        """Return the heads of an attention, or why they cannot be told apart."""
        if any(name in self.kernel for name in HIDING_KERNELS):
            return (
                f"its kernel, {self.kernel}, hides queries and keys: load the model"
                " with attention='sdpa' or 'eager'"
            )
        assert call.into is not None
        z = projection.tap.layout.states(call.into, self.tokens)
        before = [
            operation for operation in inner.operations if operation.time < call.entered
        ]
        for operation in reversed(before):
            if operation.kind == "softmax" or not operation.operands:
                continue
            heads = self._split_like(operation, z)
            if heads is not None:
                return self._attention(name, operation, heads, before)
        makers = [
            operation
            for operation in before
            if operation.kind != "softmax" and torch.isin(operation.output, z).all()
        ]
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

    def _attention(
        self,
        name: str,
        operation: TracedOperation,
        heads: HeadLayout,
        before: Sequence[TracedOperation],
    ) -> AttentionHeads | str:
        """Return the heads of the operation that makes what they give."""
        weights = operation.place
        *_, values = operation.operands
        scores = None
        queries, keys, key_dim = heads, heads, values.shape[-1]
        if operation.kind == "attention":
            query, key, _ = operation.operands
            if query.ndim != 4:
                return "its queries are not laid out head by head"
            scores = weights
            keys, key_dim = _key_layout(key), query.shape[-1]
            length = key.shape[2]
        else:
            # The code itself makes the pattern, with a softmax.
            earlier = [other for other in before if other.time < operation.time]
            rows = heads.split(operation.operands[0])
            length = rows.shape[-1]
            softmax = _softmax_of(rows, earlier, heads)
            if softmax is None:
                return NO_ATTENTION
            makers = []
            for product in earlier:
                if product.kind != "product" or product.time > softmax.time:
                    continue
                # It has a number for each pair of a query and a key.
                output = product.output
                is_whole = output.numel() == rows.numel() or output.ndim >= 3
                if is_whole and output.shape[-2:] == rows.shape[-2:]:
                    makers.append(product)
            # Not every einsum says which factor holds the queries.
            if len(makers) == 1 and makers[0].operands:
                scores = makers[0].place
                query, key = makers[0].operands
                flat_heads = heads.heads if query.ndim == 3 else 0
                queries = HeadLayout(heads.heads, flat_heads)
                keys = _key_layout(key, flat_heads, transposed=True)
                key_dim = query.shape[-1]
        return AttentionHeads(
            heads=heads.heads,
            dim=values.shape[-1],
            key_dim=key_dim,
            weights=weights,
            scores=scores,
            queries=queries,
            keys=keys,
            values=_key_layout(values, heads.flat_heads),
            has_other_keys=name == "cross" or length != self.tokens,
        )

    def _router(
        self, block: Block, inner: Trace
    ) -> tuple[OperationTap | None, int, str]:
        """Return the softmax over a number of experts, or why there is none."""
        start = self.traced.call_at(block.parts["attn"]).left
        if block.kind == "parallel":
            start = -1
        softmaxes = []
        for operation in inner.operations:
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
        if (operation.operands[0].diff(dim=-1) <= 0).all():
            return None, 0, "its router's softmax is over the chosen experts alone"
        tap = OperationTap(operation.place, -1, layout)
        return tap, operation.output.shape[-1], ""


def _is_scale(written: Tensor, inputs: Tensor, columns: slice) -> bool:
    """Tell whether columns write to themselves alone, as a scale of channels does.

    A scale writes nothing to a channel that holds nothing.
    """
    others = written.clone()
    others[..., columns] *= inputs[..., columns] == 0
    return not others.any()


def _key_layout(
    tensor: Tensor, flat_heads: int = 0, *, transposed: bool = False
) -> HeadLayout:
    """Return the layout of keys or values with the number of different heads.

    Heads that are all zero, as pruned ones are, count as different.
    """
    heads = HeadLayout(1, flat_heads, transposed).split(tensor)
    count = heads.shape[1]
    most_copies = count if heads.any() else 1
    for copies in range(most_copies, 0, -1):
        if count % copies:
            continue
        groups = heads.reshape(len(heads), -1, copies, *heads.shape[2:])
        if (groups == groups[:, :, :1]).all():
            break
    return HeadLayout(count // copies, flat_heads, transposed)


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
        if (output[..., :columns].to(rows.dtype) == rows).all():
            return operation
    return None
