"""Find the hidden states of a module by running it on a few tokens, and prove them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count, filterfalse
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.blocks import Block, dissect, mixes_tokens, state_at
from hiddenscope.discovery.find_inside import find_inside
from hiddenscope.discovery.proof import (
    WITHOUT_BLOCK_MODULES,
    Chain,
    HasNaN,
    Proof,
    Unproved,
    block_calls,
    chains,
    differs,
    model_type,
    prove,
    prove_by_cuts,
    same,
    whole_chains,
)
from hiddenscope.discovery.stacks import Anatomy, Head, Stack
from hiddenscope.discovery.trace import Tap, Trace, arguments, trace
from hiddenscope.discovery.vocabulary import (
    TrialShape,
    trial_ids,
    trial_shapes,
    vocabulary,
    window,
)
from hiddenscope.errors import AnatomyError, NotFinite, TooLarge, is_out_of_memory
from hiddenscope.modules import calls, hooks
from hiddenscope.modules.calls import accepts

TRIAL_SHAPES = (
    TrialShape(texts=2, tokens=7, targets=4),
    TrialShape(texts=3, tokens=5, targets=6),
)
# A text has to be shortened, and its first token to be seen by later ones.
SHORTEST_WINDOW = 3


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
    stacks = []
    for number in range(len(first.stacks)):
        stacks.append(_agreed_stack(module, name, number, first, second))
    logits = _logits(module, first.stacks[-1])
    head = None if logits is None else _head(module, first.stacks[-1], logits)
    anatomy = Anatomy(tuple(stacks), head, name, logits is not None)
    return anatomy.with_inside(cache(partial(find_inside, module, anatomy)))


def _agreed_stack(
    module: nn.Module, name: str, number: int, first: _TrialPass, second: _TrialPass
) -> Stack:
    """Return a stack that two passes prove alike, with the parts of its blocks."""
    once, again = first.stacks[number], second.stacks[number]
    if not once.proof.agrees(again.proof):
        raise _refusal(
            module, name, "texts of another length or number show its states elsewhere"
        )
    blocks = []
    # One block of each build is tried, with a pass for each branch.
    reasons: dict[tuple[str, ...], str] = {}
    pairs = zip(_dissect(module, once), _dissect(module, again), strict=True)
    for k, (block, other) in enumerate(pairs):
        reason = ""
        if block != other:
            reason = "its parts are in other places for texts of another shape"
        elif block.parts:
            build = [type(module.get_submodule(block.path)).__name__, block.kind]
            for part, tap in sorted(block.parts.items()):
                build.append(f"{part}:{tap.path.removeprefix(block.path)}:{tap.side}")
            key = tuple(build)
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
    if len(trial.stacks) != len(anatomy.stacks):
        return False
    for stack, again in zip(anatomy.stacks, trial.stacks, strict=True):
        if not stack.proof.agrees(again.proof):
            return False
    return True


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
    device = hooks.input_device(module)
    ids = trial_ids(module, shape.texts, shape.tokens).to(device)
    targets = None
    if "decoder_input_ids" in accepts(module):
        targets = trial_ids(module, shape.texts, shape.targets, seed=1).to(device)
    inputs = arguments(module, ids, targets=targets)
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
    refused: list[tuple[Chain, str]] = []
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
    reason = "no list of blocks in it is run one after another"
    if refused:
        reason = _why_none(refused, stacks - len(taken))
    raise _refusal(module, name, reason)


def _why_none(refused: Sequence[tuple[Chain, str]], stacks: int) -> str:
    """Say why no chain is a stack.

    That is the longest chain's reason, or, if there are more chains than stacks, the
    last one's.
    """
    separate = []
    for chain, reason in refused:
        if not any(chain.within(other) for other, _ in refused):
            separate.append((chain, reason))
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
    for call, tap, value in zip(chain.blocks, proof.taps, chain.values, strict=False):
        into = layout.states(value, traced.tokens)
        blocks.append(dissect(call, tap, traced, into, layout))
    return blocks


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
    return ""


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
    return differs(before[:, 0], after[:, 0], steps=stack.proof.depth)


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
        get_head: Any = getattr(module, "get_output_embeddings", lambda: None)
        paths = {id(part): name for name, part in module.named_modules()}
        path = paths.get(id(get_head()), "")
    if not path or path not in last_calls:
        return None
    last = traced.states_at(stack.proof.final or stack.proof.taps[-1])
    weight = getattr(module.get_submodule(path), "weight", None)
    tables = [part for part in module.modules() if isinstance(part, nn.Embedding)]
    tied = any(part.weight is weight for part in tables)
    return Head(path, same(last_calls[path].into, last), gives_logits, tied)
