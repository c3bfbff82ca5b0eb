"""Find the states of a module by running it, and prove them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.anatomy.branches import Block, differs, dissect, mixes, shown
from hiddenscope.anatomy.chains import FAMILIES, Chain, chains, same
from hiddenscope.anatomy.findings import Anatomy, Head, Stack
from hiddenscope.anatomy.inputs import accepts, arguments, probe
from hiddenscope.anatomy.proof import Broken, Proof, Unproved, prove
from hiddenscope.anatomy.taps import Tap
from hiddenscope.anatomy.trace import Trace, trace
from hiddenscope.errors import AnatomyError, NotFinite


@dataclass(frozen=True)
class Trial:
    """The shape of a trial pass; trials differ in it, so that no axis is mistaken for another."""

    texts: int
    tokens: int
    targets: int


TRIALS = (Trial(texts=2, tokens=7, targets=4), Trial(texts=3, tokens=5, targets=6))


@dataclass(frozen=True)
class _Run:
    """One trial pass: what went in, what was seen, and the chain and proof of each stack."""

    inputs: Mapping[str, Any]
    traces: tuple[Trace, ...]
    found: tuple[tuple[Chain, Proof], ...]


def find(module: nn.Module, *, name: str = "") -> Anatomy:
    """The anatomy of a module, proved on two trial passes of different shapes, or an AnatomyError that says why not."""
    name = name or type(module).__name__
    first, second = (_run(module, name, trial) for trial in TRIALS)
    for (_, proof), (_, again) in zip(first.found, second.found, strict=True):
        if not proof.agrees(again):
            raise _refusal(name, "texts of another length or number show its states elsewhere")
    stacks = []
    for i, (_, proof) in enumerate(first.found):
        pairs = zip(_dissected(module, first, i), _dissected(module, second, i), strict=True)
        blocks = tuple(once if once == again else _unsettled(once) for once, again in pairs)
        causal = not _sees_ahead(module, first, i)
        label = ("encoder", "decoder")[i] if len(first.found) > 1 else "decoder" if causal else "encoder"
        stacks.append(Stack(label, proof, _rightly_named(module, first, i, blocks), causal))
    return Anatomy(tuple(stacks), _head(module, first), name)


def still_holds(module: nn.Module, anatomy: Anatomy) -> bool:
    """Whether an anatomy that was remembered is proved again on one batch."""
    try:
        run = _run(module, anatomy.name, TRIALS[0])
    except (AnatomyError, NotFinite):
        return False
    proofs = [proof for _, proof in run.found]
    return len(proofs) == len(anatomy.stacks) and all(
        stack.proof.agrees(proof) for stack, proof in zip(anatomy.stacks, proofs, strict=True)
    )


def _run(module: nn.Module, name: str, trial: Trial) -> _Run:
    """Make one trial pass and prove every stack on it."""
    two = "decoder_input_ids" in accepts(module)
    device = hooks.input_device(module)
    targets = probe(module, trial.texts, trial.targets, seed=1).to(device) if two else None
    inputs = arguments(module, probe(module, trial.texts, trial.tokens).to(device), targets=targets)
    try:
        seen = trace(module, inputs)
    except Exception as error:
        stopped = f"a trial pass over {trial.texts} texts of {trial.tokens} tokens stopped with"
        raise _refusal(name, f"{stopped} {type(error).__name__}: {error}") from error
    traces = (seen, replace(seen, tokens=trial.targets)) if two else (seen,)
    found: list[tuple[Chain, Proof]] = []
    for part in traces:
        taken = {chain.taps[0] for chain, _ in found}
        found.append(_first_proved(module, name, part, taken))
    return _Run(inputs, traces, tuple(found))


def _first_proved(module: nn.Module, name: str, seen: Trace, taken: set[Tap]) -> tuple[Chain, Proof]:
    """The first chain that can be proved; the longest one's reason if none can."""
    stacks = 2 if "decoder_input_ids" in accepts(module) else 1
    tried: list[tuple[Chain, str]] = []
    for chain in chains(module, seen):
        if chain.taps[0] in taken:
            continue
        try:
            return chain, prove(module, chain, seen)
        except Broken as broken:
            stack = "" if stacks == 1 else "decoder." if taken else "encoder."
            found = f"a NaN at {stack}layer.{broken.layer}, in a trial pass"
            remedy = "Look at the weights of the block that makes it, or load the model in a wider dtype."
            raise NotFinite(f"States of {name}", found, remedy) from None
        except Unproved as reason:
            tried.append((chain, str(reason)))
    if not seen.reports():
        raise _refusal(name, "it gives back no hidden_states to hold its states against")
    raise _refusal(
        name, _why_none(tried, stacks - len(taken)) if tried else "no list of blocks in it is run one after another"
    )


def _why_none(tried: list[tuple[Chain, str]], stacks: int) -> str:
    """Why no chain is a stack: the longest one's reason, and, where more were run than there are stacks, which."""
    _, reason = max(tried, key=lambda pair: len(pair[0].blocks))
    apart = [chain for chain, _ in tried if not any(chain.within(other) for other, _ in tried)]
    if len(apart) <= stacks:
        return reason
    lists = [chain.blocks[0].path.rpartition(".")[0] for chain in sorted(apart, key=lambda c: c.ended)]
    where = ", ".join(dict.fromkeys(lists))
    return f"it runs {len(apart)} chains of blocks ({where}) and none is a stack by itself: of the longest, {reason}"


def _refusal(name: str, found: str) -> AnatomyError:
    remedy = "hiddenscope shows only states that it can prove; nothing of this model can be captured."
    return AnatomyError(f"The states of {name} cannot be proved", found, remedy)


def _dissected(module: nn.Module, run: _Run, stack: int) -> tuple[Block, ...]:
    """The blocks of a stack with the parts that were found in them."""
    chain, proof = run.found[stack]
    if getattr(getattr(module, "config", None), "model_type", "") in FAMILIES:
        why = "this family's blocks are no modules of their own"
        return tuple(Block(call.path, "other", refused=why) for call in chain.blocks)
    seen, layout = run.traces[stack], proof.taps[0].layout
    steps = zip(chain.blocks, proof.taps, chain.values, strict=False)
    return tuple(dissect(call, tap, seen, layout.states(value, seen.tokens), layout) for call, tap, value in steps)


def _rightly_named(module: nn.Module, run: _Run, stack: int, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """The blocks again, less the parts of those whose branches do not to tokens what attention and an MLP do.

    One block of each build is tried, for a pass each time.
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
    inside = (f"{name}:{tap.path.removeprefix(block.path)}:{tap.side}" for name, tap in sorted(block.parts.items()))
    return (type(module.get_submodule(block.path)).__name__, block.kind, *inside)


def _misnamed(module: nn.Module, run: _Run, stack: int, k: int, block: Block) -> str:
    """Why the branches of a block may not be called attention and MLP; empty if they may."""
    chain, proof = run.found[stack]
    seen = run.traces[stack]
    entry = Tap(chain.blocks[k].path, chain.blocks[k].number, "input", proof.taps[k].layout)
    attn, mlp = block.parts["attn"], block.parts["mlp"]
    if not mixes(module, run.inputs, entry, attn, _value(seen, attn)):
        return "its first branch carries nothing from token to token, as attention does"
    disturbed = entry if block.kind == "parallel" else attn
    if mixes(module, run.inputs, disturbed, mlp, _value(seen, mlp)):
        return "its last branch carries something from token to token, as an MLP does not"
    return ""


def _unsettled(block: Block) -> Block:
    return Block(block.path, block.kind, refused="its parts are in other places for texts of another shape")


def _sees_ahead(module: nn.Module, run: _Run, stack: int) -> bool:
    """Whether other tokens behind it change the state of a text's first."""
    name = "decoder_input_ids" if stack else "input_ids"
    ids = run.inputs[name]
    others = probe(module, *ids.shape, seed=2).to(ids.device)
    proof, tokens = run.found[stack][1], run.traces[stack].tokens
    changed = {**run.inputs, name: torch.cat([ids[:, :1], others[:, 1:]], dim=1)}
    after = shown(module, changed, proof.taps[-1], tokens)
    return differs(_value(run.traces[stack], proof.taps[-1])[:, 0], after[:, 0], steps=proof.depth)


def _value(seen: Trace, tap: Tap) -> Tensor:
    """The states that a tap showed in a trace."""
    call = next(call for call in seen.calls if call.path == tap.path and call.number == tap.call)
    tensor = call.into if tap.side == "input" else call.out
    assert tensor is not None, f"{tap} was found in a trace and so has a value there"
    return tap.layout.states(tensor, seen.tokens)


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
    last = _value(seen, proof.final or proof.taps[-1])
    return Head(path, same(call.into, last), bool(made), _tied(module, module.get_submodule(path)))


def _tied(module: nn.Module, head: nn.Module) -> bool:
    """Whether the head's weight is the token embedding's own."""
    try:
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        return False
    ours, theirs = getattr(head, "weight", None), getattr(embedding, "weight", None)
    return ours is not None and ours is theirs
