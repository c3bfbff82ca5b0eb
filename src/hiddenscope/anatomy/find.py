"""Find the states of a module by running it, and prove them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.anatomy.branches import Block, dissect, mixes
from hiddenscope.anatomy.chains import FAMILIES, Chain, chains, same
from hiddenscope.anatomy.findings import Anatomy, Head, Stack
from hiddenscope.anatomy.inputs import accepts, arguments, probe
from hiddenscope.anatomy.proof import Proof, Unproved, prove
from hiddenscope.anatomy.taps import Tap
from hiddenscope.anatomy.trace import Trace, trace
from hiddenscope.errors import AnatomyError


@dataclass(frozen=True)
class Trial:
    """The texts and tokens of a trial pass: the shapes differ between trials, so that no axis is mistaken for another."""

    texts: int
    tokens: int
    targets: int


TRIALS = (Trial(texts=3, tokens=9, targets=5), Trial(texts=5, tokens=6, targets=7))


@dataclass(frozen=True)
class _Run:
    """One trial pass: what went in, what was seen, and the chain and proof of each stack."""

    inputs: Mapping[str, Any]
    traces: tuple[Trace, ...]
    found: tuple[tuple[Chain, Proof], ...]


def find(module: nn.Module, *, name: str = "") -> Anatomy:
    """The anatomy of a module, proved on two trial passes of different shapes; AnatomyError says at which step it fails."""
    name = name or type(module).__name__
    first, second = (_run(module, name, trial) for trial in TRIALS)
    for (_, proof), (_, again) in zip(first.found, second.found, strict=True):
        if not proof.agrees(again):
            raise _refusal(name, "texts of another length or number show its states elsewhere")
    stacks = []
    for i, (chain, proof) in enumerate(first.found):
        blocks = _blocks(module, chain, proof, first.traces[i], first.inputs)
        again = _blocks(module, *second.found[i], second.traces[i], second.inputs)
        kept = tuple(a if a == b else _unsettled(a) for a, b in zip(blocks, again, strict=True))
        causal = not _sees_ahead(module, first.inputs, first.traces[i], proof, i)
        label = ("encoder", "decoder")[i] if len(first.found) > 1 else "decoder" if causal else "encoder"
        stacks.append(Stack(label, proof, kept, causal))
    return Anatomy(tuple(stacks), _head(module, first), name)


def _run(module: nn.Module, name: str, trial: Trial) -> _Run:
    """Make one trial pass and prove every stack on it."""
    two = "decoder_input_ids" in accepts(module)
    device = next(module.parameters()).device
    targets = probe(module, trial.texts, trial.targets, seed=1).to(device) if two else None
    inputs = arguments(module, probe(module, trial.texts, trial.tokens).to(device), targets=targets)
    try:
        seen = trace(module, inputs)
    except Exception as error:
        what = f"a trial pass over {trial.texts} texts of {trial.tokens} tokens stopped with {type(error).__name__}: {error}"
        raise _refusal(name, what) from error
    traces = (seen, replace(seen, tokens=trial.targets)) if two else (seen,)
    found: list[tuple[Chain, Proof]] = []
    for part in traces:
        taken = {chain.taps[0] for chain, _ in found}
        found.append(_first_proved(module, name, part, taken))
    return _Run(inputs, traces, tuple(found))


def _first_proved(module: nn.Module, name: str, seen: Trace, taken: set[Tap]) -> tuple[Chain, Proof]:
    """The first chain that can be proved; the longest one's reason if none can."""
    reasons = []
    for chain in chains(module, seen):
        if chain.taps[0] in taken:
            continue
        try:
            return chain, prove(module, chain, seen)
        except Unproved as reason:
            reasons.append(str(reason))
    if not seen.reports():
        raise _refusal(name, "it gives back no hidden_states to hold its states against")
    raise _refusal(name, reasons[0] if reasons else "no list of blocks in it is run one after another")


def _refusal(name: str, found: str) -> AnatomyError:
    do = "hiddenscope shows only states that it can prove; nothing of this model can be captured."
    return AnatomyError(f"The states of {name} cannot be proved", found, do)


def _blocks(
    module: nn.Module, chain: Chain, proof: Proof, seen: Trace, inputs: Mapping[str, Any]
) -> tuple[Block, ...]:
    """The blocks of a chain with their parts, each new kind of block tried for what its branches do to tokens."""
    if getattr(getattr(module, "config", None), "model_type", "") in FAMILIES:
        return tuple(Block(call.path, "other", refused="this family's blocks are no modules of their own") for call in chain.blocks)
    layout = proof.taps[0].layout
    tried: dict[tuple[str, ...], str] = {}
    blocks = []
    for call, before, value in zip(chain.blocks, proof.taps, chain.values, strict=False):
        block = dissect(call, before, seen, layout.states(value, seen.tokens), layout)
        if block.parts:
            shape = _shape(module, block)
            if shape not in tried:
                tried[shape] = _misnamed(module, inputs, seen.tokens, replace(before, path=call.path, call=call.number, side="input"), block)
            block = replace(block, parts={}, refused=tried[shape]) if tried[shape] else block
        blocks.append(block)
    return tuple(blocks)


def _shape(module: nn.Module, block: Block) -> tuple[str, ...]:
    """What two blocks of the same build have in common."""
    inside = (f"{name}:{tap.path.removeprefix(block.path)}:{tap.side}" for name, tap in sorted(block.parts.items()))
    return (type(module.get_submodule(block.path)).__name__, block.kind, *inside)


def _misnamed(module: nn.Module, inputs: Mapping[str, Any], tokens: int, entry: Tap, block: Block) -> str:
    """Why the branches of a block may not be called attention and MLP; empty if they may."""
    attn, mlp = block.parts["attn"], block.parts["mlp"]
    if not mixes(module, inputs, entry, attn, tokens):
        return "its first branch carries nothing from token to token, as attention does"
    disturbed = entry if block.kind == "parallel" else attn
    if block.kind != "parallel" and mixes(module, inputs, disturbed, mlp, tokens):
        return "its last branch carries something from token to token, as an MLP does not"
    return ""


def _unsettled(block: Block) -> Block:
    return Block(block.path, block.kind, refused="its parts are in other places for texts of another shape")


def _sees_ahead(module: nn.Module, inputs: Mapping[str, Any], seen: Trace, proof: Proof, stack: int) -> bool:
    """Whether the last token reaches the states of earlier ones."""
    name = "decoder_input_ids" if stack else "input_ids"
    changed = inputs[name].clone()
    changed[:, -1] = changed[:, 0].roll(1)
    again = trace(module, {**inputs, name: changed})
    last = proof.taps[-1]
    before, after = (_value(run, last, seen.tokens) for run in (seen, again))
    scale = before[:, :-1].abs().max().item()
    return (before[:, :-1] - after[:, :-1]).abs().max().item() > 64 * torch.finfo(before.dtype).eps * scale


def _value(seen: Trace, tap: Tap, tokens: int) -> Tensor:
    call = next(call for call in seen.calls if call.path == tap.path and call.number == tap.call)
    tensor = call.into if tap.side == "input" else call.out
    assert tensor is not None
    return tap.layout.states(tensor, tokens)


def _head(module: nn.Module, run: _Run) -> Head | None:
    """The part that makes the logits: the one whose output they are, or the one the model names as such."""
    seen = run.traces[-1]
    logits = getattr(seen.output, "logits", None)
    if not isinstance(logits, Tensor):
        return None
    leaves = [call for call in seen.calls if not list(module.get_submodule(call.path).children())]
    made = [call for call in leaves if call.path and call.out is not None and same(call.out, logits)]
    named: Callable[[], nn.Module | None] = getattr(module, "get_output_embeddings", lambda: None)
    paths = {id(part): path for path, part in module.named_modules()}
    path = made[-1].path if made else paths.get(id(named()), "")
    call = next((call for call in reversed(seen.calls) if call.path == path and path), None)
    if call is None:
        return None
    _, proof = run.found[-1]
    last = _value(seen, proof.final or proof.taps[-1], seen.tokens)
    return Head(path, same(call.into, last), bool(made), _tied(module, module.get_submodule(path)))


def _tied(module: nn.Module, head: nn.Module) -> bool:
    """Whether the head's weight is the token embedding's own."""
    try:
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return False
    ours, theirs = getattr(head, "weight", None), getattr(embedding, "weight", None)
    return ours is not None and ours is theirs
