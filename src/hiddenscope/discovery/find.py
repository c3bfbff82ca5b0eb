"""Find the hidden states of a module by running it on a few tokens, and prove them."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.discovery.blocks import Block, differs, dissect, mixes_tokens, state_at
from hiddenscope.discovery.proof import (
    WITHOUT_BLOCK_MODULES,
    Chain,
    HasNaN,
    Proof,
    Unproved,
    block_calls,
    chains,
    model_type,
    prove,
    same,
)
from hiddenscope.discovery.stacks import Anatomy, Head, Stack
from hiddenscope.discovery.taps import Tap
from hiddenscope.discovery.trace import Trace, accepts, arguments, trace, trial_ids
from hiddenscope.errors import AnatomyError, NotFinite
from hiddenscope.modules import hooks


@dataclass(frozen=True)
class TrialShape:
    """The shape of a trial pass. The two passes differ in all of it, so that no axis is
    mistaken for another.
    """

    texts: int
    tokens: int
    targets: int

    def avoiding(self, sizes: Set[int]) -> "TrialShape":
        """A shape without these numbers; in steps of three, in which the two passes
        never meet.
        """
        texts, tokens, targets = (
            next(n for n in count(size, 3) if n not in sizes)
            for size in (self.texts, self.tokens, self.targets)
        )
        return TrialShape(texts, tokens, targets)


TRIAL_SHAPES = (
    TrialShape(texts=2, tokens=7, targets=4),
    TrialShape(texts=3, tokens=5, targets=6),
)


@dataclass(frozen=True)
class _TrialPass:
    """One trial pass: its inputs, and for each stack the trace, the chain of blocks and
    its proof.
    """

    inputs: Mapping[str, Any]
    traces: tuple[Trace, ...]
    stacks: tuple[tuple[Chain, Proof], ...]


def find(module: nn.Module, *, name: str = "") -> Anatomy:
    """The anatomy of a module, proved on two trial passes of different shapes, or an
    AnatomyError that says why not.
    """
    name = name or type(module).__name__
    first, second = (_trial_pass(module, name, shape) for shape in TRIAL_SHAPES)
    for (_, proof), (_, again) in zip(first.stacks, second.stacks, strict=True):
        if not proof.agrees(again):
            raise _refusal(
                name, "texts of another length or number show its states elsewhere"
            )
    stacks = []
    for i, (_, proof) in enumerate(first.stacks):
        pairs = zip(
            _dissected(module, first, i), _dissected(module, second, i), strict=True
        )
        blocks = tuple(
            once if once == again else _unsettled(once) for once, again in pairs
        )
        causal = not _sees_ahead(module, first, i)
        label = (
            ("encoder", "decoder")[i]
            if len(first.stacks) > 1
            else "decoder"
            if causal
            else "encoder"
        )
        stacks.append(
            Stack(label, proof, _rightly_named(module, first, i, blocks), causal)
        )
    makes_logits = isinstance(getattr(first.traces[-1].output, "logits", None), Tensor)
    return Anatomy(tuple(stacks), _head(module, first), name, makes_logits)


def still_holds(module: nn.Module, anatomy: Anatomy) -> bool:
    """Whether an anatomy that was remembered from an earlier load is proved again on
    one batch.
    """
    try:
        run = _trial_pass(module, anatomy.name, TRIAL_SHAPES[0])
    except (AnatomyError, NotFinite):
        return False
    proofs = [proof for _, proof in run.stacks]
    return len(proofs) == len(anatomy.stacks) and all(
        stack.proof.agrees(proof)
        for stack, proof in zip(anatomy.stacks, proofs, strict=True)
    )


def _trial_pass(module: nn.Module, name: str, shape: TrialShape) -> _TrialPass:
    """Run one trial pass and prove every stack on it."""
    two = "decoder_input_ids" in accepts(module)
    inputs, seen = _traced(module, name, shape)
    streams = _stream_sizes(
        module, seen, (shape.texts, shape.tokens, *([shape.targets] if two else []))
    )
    if streams & {shape.texts, shape.tokens}:
        shape = shape.avoiding(streams)
        inputs, seen = _traced(module, name, shape)
    traces = (seen, replace(seen, tokens=shape.targets)) if two else (seen,)
    stacks: list[tuple[Chain, Proof]] = []
    for one in traces:
        taken = {chain.taps[0] for chain, _ in stacks}
        stacks.append(_first_proved(module, name, one, taken))
    return _TrialPass(inputs, traces, tuple(stacks))


def _traced(
    module: nn.Module, name: str, shape: TrialShape
) -> tuple[dict[str, Any], Trace]:
    """The inputs of a trial pass, and what was recorded of it."""
    two = "decoder_input_ids" in accepts(module)
    device = hooks.input_device(module)
    targets = (
        trial_ids(module, shape.texts, shape.targets, seed=1).to(device)
        if two
        else None
    )
    inputs = arguments(
        module, trial_ids(module, shape.texts, shape.tokens).to(device), targets=targets
    )
    try:
        return inputs, trace(module, inputs)
    except Exception as error:
        if missing := _missing_parameters(module):
            raise _not_like_transformers(module, name, missing) from error
        stopped = (
            f"a trial pass over {shape.texts} texts of {shape.tokens} tokens stopped"
            " with"
        )
        raise _refusal(name, f"{stopped} {type(error).__name__}: {error}") from error


def _missing_parameters(module: nn.Module) -> list[str]:
    """The parameters of a Hugging Face model that a module's forward does not take."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    names = {parameter.name for parameter in parameters}
    return [name for name in ("input_ids", "output_hidden_states") if name not in names]


def _not_like_transformers(
    module: nn.Module, name: str, missing: Sequence[str]
) -> AnatomyError:
    """The error for a module that is not called like a Hugging Face model."""
    _, *takes = inspect.signature(type(module).forward).parameters
    reason = (
        f"its forward takes {', '.join(takes)[:80] or 'nothing'}, and no"
        f" {' or '.join(missing)}, as the models of transformers do"
    )
    remedy = (
        "Give a model of transformers. A module of your own can be the candidate of "
        "hs.drift(reference, module, texts), where the reference is such a model."
    )
    return AnatomyError(f"Cannot read the states of {name}", reason, remedy)


def _stream_sizes(module: nn.Module, seen: Trace, sizes: Sequence[int]) -> set[int]:
    """The sizes of further axes in blocks' states, as where a block carries several
    streams (Gemma 3n, DeepSeek-V4).
    """
    shapes = [
        call.into.shape
        for call in block_calls(module, seen)
        if call.into is not None and call.into.ndim > 3
    ]
    return {size for shape in shapes for size in Counter(shape) - Counter(sizes)}


def _first_proved(
    module: nn.Module, name: str, seen: Trace, taken: set[Tap]
) -> tuple[Chain, Proof]:
    """The first chain that can be proved; an error with the reason if none can."""
    stacks = 2 if "decoder_input_ids" in accepts(module) else 1
    refused: list[tuple[Chain, str]] = []
    for chain in chains(module, seen):
        if chain.taps[0] in taken:
            continue
        try:
            return chain, prove(module, chain, seen)
        except HasNaN as broken:
            stack = "" if stacks == 1 else "decoder." if taken else "encoder."
            reason = f"there is a NaN at {stack}layer.{broken.layer} in a trial pass"
            remedy = (
                "Look at the weights of the block that makes it, or load the model in a"
                " wider dtype."
            )
            raise NotFinite(
                f"The states of {name} are not finite", reason, remedy
            ) from None
        except Unproved as reason:
            refused.append((chain, str(reason)))
    if not seen.reports():
        raise _refusal(
            name, "it gives back no hidden_states to compare its states with"
        )
    if not refused:
        raise _refusal(name, "no list of blocks in it is run one after another")
    raise _refusal(name, _why_none(refused, stacks - len(taken)))


def _why_none(refused: list[tuple[Chain, str]], stacks: int) -> str:
    """Why no chain is a stack: the longest one's reason, or, if there are more chains
    than stacks, the last one's.
    """
    apart = [
        pair
        for pair in refused
        if not any(pair[0].within(other) for other, _ in refused)
    ]
    if len(apart) <= stacks:
        return max(refused, key=lambda pair: len(pair[0].blocks))[1]
    in_order = sorted(apart, key=lambda pair: pair[0].ended)
    lists = [chain.blocks[0].path.rpartition(".")[0] for chain, _ in in_order]
    where, reason = ", ".join(dict.fromkeys(lists)), in_order[-1][1]
    return (
        f"it runs {len(apart)} chains of blocks ({where}) and none is a stack by"
        f" itself: {reason}"
    )


def _refusal(name: str, reason: str) -> AnatomyError:
    remedy = (
        "hiddenscope shows only states that it can prove; nothing of this model can be"
        " captured."
    )
    return AnatomyError(f"The states of {name} cannot be proved", reason, remedy)


def _dissected(module: nn.Module, run: _TrialPass, stack: int) -> tuple[Block, ...]:
    """The blocks of a stack with their parts."""
    chain, proof = run.stacks[stack]
    if model_type(module) in WITHOUT_BLOCK_MODULES:
        why = "this family's blocks are no modules of their own"
        return tuple(Block(call.path, "other", refused=why) for call in chain.blocks)
    seen, layout = run.traces[stack], proof.taps[0].layout
    steps = zip(chain.blocks, proof.taps, chain.values, strict=False)
    return tuple(
        dissect(call, tap, seen, layout.states(value, seen.tokens), layout)
        for call, tap, value in steps
    )


def _unsettled(block: Block) -> Block:
    return Block(
        block.path,
        block.kind,
        refused="its parts are in other places for texts of another shape",
    )


def _rightly_named(
    module: nn.Module, run: _TrialPass, stack: int, blocks: tuple[Block, ...]
) -> tuple[Block, ...]:
    """The blocks, without the parts of those whose branches do not move what attention
    and an MLP move between tokens.

    One block of each build is tried, with a pass for each branch.
    """
    tried: dict[tuple[str, ...], str] = {}
    named = []
    for k, block in enumerate(blocks):
        build = _build(module, block)
        if block.parts and build not in tried:
            tried[build] = _misnamed(module, run, stack, k, block)
        why = tried.get(build, "")
        named.append(Block(block.path, block.kind, refused=why) if why else block)
    return tuple(named)


def _build(module: nn.Module, block: Block) -> tuple[str, ...]:
    """What two blocks of the same build have in common."""
    inside = (
        f"{name}:{tap.path.removeprefix(block.path)}:{tap.side}"
        for name, tap in sorted(block.parts.items())
    )
    return (type(module.get_submodule(block.path)).__name__, block.kind, *inside)


def _misnamed(
    module: nn.Module, run: _TrialPass, stack: int, k: int, block: Block
) -> str:
    """Why the branches of a block may not be called attention and MLP; empty if they
    may.
    """
    chain, proof = run.stacks[stack]
    seen = run.traces[stack]
    entry = Tap(
        chain.blocks[k].path, chain.blocks[k].number, "input", proof.taps[k].layout
    )
    attn, mlp = block.parts["attn"], block.parts["mlp"]
    if not mixes_tokens(module, run.inputs, entry, attn, _recorded(seen, attn)):
        return "its first branch carries nothing from token to token, as attention does"
    disturbed = entry if block.kind == "parallel" else attn
    if mixes_tokens(module, run.inputs, disturbed, mlp, _recorded(seen, mlp)):
        return (
            "its last branch carries something from token to token, as an MLP does not"
        )
    return ""


def _sees_ahead(module: nn.Module, run: _TrialPass, stack: int) -> bool:
    """Whether the state of a text's first token changes with the tokens behind it."""
    name = "decoder_input_ids" if stack else "input_ids"
    ids = run.inputs[name]
    others = trial_ids(module, *ids.shape, seed=2).to(ids.device)
    proof, tokens = run.stacks[stack][1], run.traces[stack].tokens
    changed = {**run.inputs, name: torch.cat([ids[:, :1], others[:, 1:]], dim=1)}
    after = state_at(module, changed, proof.taps[-1], tokens)
    return differs(
        _recorded(run.traces[stack], proof.taps[-1])[:, 0],
        after[:, 0],
        steps=proof.depth,
    )


def _recorded(seen: Trace, tap: Tap) -> Tensor:
    """The states at a tap in a trace."""
    call = next(
        call for call in seen.calls if call.path == tap.path and call.number == tap.call
    )
    tensor = call.into if tap.side == "input" else call.out
    assert tensor is not None, f"{tap} was found in a trace and so has a value there"
    return tap.layout.states(tensor, seen.tokens)


def _head(module: nn.Module, run: _TrialPass) -> Head | None:
    """The unembedding: the submodule whose output the logits are, or the one that the
    model names as such.
    """
    seen = run.traces[-1]
    logits = getattr(seen.output, "logits", None)
    if not isinstance(logits, Tensor):
        return None
    leaves = [
        call
        for call in seen.calls
        if not list(module.get_submodule(call.path).children())
    ]
    makers = [
        call
        for call in leaves
        if call.path and call.out is not None and same(call.out, logits)
    ]
    named: Callable[[], nn.Module | None] = getattr(
        module, "get_output_embeddings", lambda: None
    )
    paths = {id(part): path for path, part in module.named_modules()}
    path = makers[-1].path if makers else paths.get(id(named()), "")
    call = next(
        (call for call in reversed(seen.calls) if call.path == path and path), None
    )
    if call is None:
        return None
    _, proof = run.stacks[-1]
    last = _recorded(seen, proof.final or proof.taps[-1])
    return Head(
        path,
        same(call.into, last),
        bool(makers),
        _is_tied(module, module.get_submodule(path)),
    )


def _is_tied(module: nn.Module, head: nn.Module) -> bool:
    """Whether the head's weight is the token embedding's own."""
    try:
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return False
    ours, theirs = getattr(head, "weight", None), getattr(embedding, "weight", None)
    return ours is not None and ours is theirs
