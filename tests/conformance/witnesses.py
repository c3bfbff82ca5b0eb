"""Whether what a refusal says of a model is so, by plain passes of it.

Each reason has a witness: what must be seen of the module for the reason to hold. A
refusal without one, or with one that denies it, is a fault.
"""

import re
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from laws import OTHER, TARGET, TEXT, Trial
from torch import Tensor

import hiddenscope as hs
from hiddenscope.discovery import arguments

# Of the largest number of a state: rounding is less, and a missing part is more.
ROUNDING = 1e-4


def no_head(trial: Trial) -> str:
    """A pass gives no logits, and no module makes them."""
    output = _output(trial, TEXT)
    if getattr(output, "logits", None) is not None:
        return "a pass of the module gives logits"
    return ""


def two_stacks(trial: Trial) -> str:
    """The last states change with the encoder's text, and with the decoder's."""
    if not getattr(trial.module.config, "is_encoder_decoder", False):
        return "its configuration has no decoder beside an encoder"
    first = _output(trial, TEXT)[0]
    if torch.equal(first, _output(trial, OTHER)[0]):
        return "the encoder's text changes nothing"
    if torch.equal(first, _output(trial, TEXT, [*TARGET[:2], 18])[0]):
        return "the decoder's text changes nothing"
    return ""


def sees_later_tokens(trial: Trial) -> str:
    """Another last token changes what a plain pass gives at the first, in the stack
    that answers.
    """
    texts: list[tuple[list[int], ...]] = [(TEXT,), ([*TEXT[:-1], 14],)]
    if trial.two:
        texts = [(TEXT, TARGET), (TEXT, [*TARGET[:-1], 18])]
    first, second = (_output(trial, *given)[0][0, 0] for given in texts)
    return "the first state does not see the last token" if _near(first, second) else ""


def norms_the_sum(trial: Trial) -> str:
    """A block gives something else than what enters it and what its parts add."""
    for name, block in _blocks(trial):
        if block.kind == "post-norm":
            parts = [f"{name}.{part}" for part in block.parts if part != "mid"]
            layer = int(name.rpartition(".")[2])
            below = f"{name.rpartition('.')[0]}.{layer - 1}"
            seen = _states(trial, [below, name, *parts])
            if _near(sum(seen[site] for site in (below, *parts)), seen[name]):
                return f"what enters {name} and what its parts add are its sum"
            return ""
    return "no block norms the sum"


def no_two_parts(trial: Trial) -> str:
    """No outputs of two modules in a block add up to what it adds, in one block at
    least.
    """
    blocks = [block for _, block in _blocks(trial) if block.refused or not block.parts]
    for block in blocks:
        if _sums_of_two(trial, block.path) is None:
            return ""
    return "in each block two outputs add up to what it adds" if blocks else "no block"


def last_branch_carries(trial: Trial) -> str:
    """The last of two outputs that add up to what a block adds changes at other tokens
    than the one where the first is changed.
    """
    for _, block in _blocks(trial):
        pair = _sums_of_two(trial, block.path) if block.refused else None
        if pair is None:
            continue
        seen = [_second(trial, block.path, pair, change) for change in (0.0, 1.0)]
        if not _near(seen[0][:, 1:], seen[1][:, 1:]):
            return ""
    return "in no block a token's MLP sees another token"


def _second(trial: Trial, path: str, pair: tuple[str, str], change: float) -> Tensor:
    """Return the second of two outputs of a block in a pass in which the first is
    changed at its first token.
    """
    block = trial.module.get_submodule(path)
    seen: list[Tensor] = []

    def put(_: Any, __: Any, output: Any) -> Any:
        whole = isinstance(output, tuple)
        tensor = (output[0] if whole else output).clone()
        tensor[:, 0] += change
        return (tensor, *output[1:]) if whole else tensor

    def keep(_: Any, __: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen.append(tensor.detach().clone())

    first, second = map(block.get_submodule, pair)
    handles = [first.register_forward_hook(put), second.register_forward_hook(keep)]
    try:
        _output(trial, TEXT)
    finally:
        for handle in handles:
            handle.remove()
    return seen[-1]


def _sums_of_two(trial: Trial, path: str) -> tuple[str, str] | None:
    """Return two modules in a block, none in the other, that add all that it adds."""
    block = trial.module.get_submodule(path)
    seen: list[tuple[str, Tensor]] = []
    ends: list[Tensor] = []

    def keep(name: str, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            seen.append((name, tensor.detach().clone()))

    handles = [
        part.register_forward_hook(lambda _, __, out, name=name: keep(name, out))
        for name, part in block.named_modules()
        if name
    ]

    def enter(_: Any, args: Any, kwargs: Any) -> None:
        states = [*args, *kwargs.values()]
        ends.append(next(s for s in states if isinstance(s, Tensor)).detach().clone())

    def leave(_: Any, __: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        ends.append(tensor.detach().clone())

    handles.append(block.register_forward_pre_hook(enter, with_kwargs=True))
    handles.append(block.register_forward_hook(leave))
    try:
        _output(trial, TEXT)
    finally:
        for handle in handles:
            handle.remove()
    if len(ends) < 2 or ends[0].shape != ends[1].shape:
        return None
    added = ends[1] - ends[0]
    alike = [(name, state) for name, state in seen if state.shape == added.shape]
    for (one, first), (two, second) in combinations(alike, 2):
        apart = not f"{two}.".startswith(f"{one}.") and not f"{one}.".startswith(
            f"{two}."
        )
        if apart and _near(first + second, added):
            return one, two
    return None


def no_blocks(trial: Trial) -> str:
    """No module that is called takes in the state below a layer and gives out that
    layer.
    """
    name = f"{trial.subject.prefix}layer."
    ends = _states(trial, [f"{name}1", f"{name}2"])
    blocks: list[str] = []

    def look(path: str, given: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, dict):
            first = next(iter(first.values()))
        is_block = any(_is_state(state, ends[f"{name}1"]) for state in given)
        if is_block and _is_state(first, ends[f"{name}2"]):
            blocks.append(path)

    handles = [
        part.register_forward_hook(
            lambda _, args, kwargs, output, path=path: look(
                path, [*args, *kwargs.values()], output
            ),
            with_kwargs=True,
        )
        for path, part in trial.module.named_modules()
    ]
    try:
        trial.logits(trial.text)
    finally:
        for handle in handles:
            handle.remove()
    return f"{blocks[0]} is the second block" if blocks else ""


def _is_state(given: Any, state: Tensor) -> bool:
    """Tell whether a tensor is the state [token, width] of the one text, either way
    around.
    """
    if not isinstance(given, Tensor) or given.ndim != 3:
        return False
    for one in (given[0], given[0].T):
        if one.shape == state.shape and _near(one, state):
            return True
    return False


def no_weights(trial: Trial) -> str:
    """The heads are refused by the proof of the anatomy, whose oracle found no fault."""
    for name, block in _blocks(trial):
        inside = trial.model.anatomy.block_inside(hs.Site.parse(name))
        branch = inside.branches.get("attn")
        if branch is None or branch.heads is None or branch.refused or block.refused:
            return ""
    return "the anatomy knows the heads of every block"


def more_than_its_own_token(trial: Trial) -> str:
    """The logits of a token are not those of its last state alone."""
    anatomy = trial.model.anatomy
    stack = anatomy.stacks[-1]
    site = f"{trial.subject.prefix}layer.{stack.depth}"
    state = _states(trial, [site])[site]
    at = trial.read_at
    changed = hs.Replace(torch.zeros_like(state[0]), tokens=0)
    before = trial.logits(trial.text)[at]
    after = trial.edited(trial.text, {site: changed})
    if at and not _near(before, after):
        return ""
    return "" if stack.proof.final is None else "each token's logits are its own"


def one_module(trial: Trial) -> str:
    """Two blocks are the same module."""
    paths = [block.path for _, block in _blocks(trial)]
    return "" if len(set(paths)) < len(paths) else "every block is a module of its own"


def no_plain_norm(trial: Trial) -> str:
    """Logits do not grow in a straight line with the final state, or twice the last
    state gives neither the same ones nor twice those.
    """
    prefix, anatomy = trial.subject.prefix, trial.model.anatomy
    zero, one, two = (
        trial.edited(trial.text, {f"{prefix}final": hs.Scale(factor)})
        for factor in (0.0, 1.0, 2.0)
    )
    if not _alike(two - one, one - zero):
        return ""
    site = f"{prefix}layer.{anatomy.stacks[-1].depth}"
    before = trial.logits(trial.text)[trial.read_at]
    after = trial.edited(trial.text, {site: hs.Scale(2.0)})
    if _alike(after, before) or _alike(after, 2 * before):
        return "twice the last state gives the logits that a norm gives"
    return ""


def _alike(first: Tensor, second: Tensor) -> bool:
    """Tell whether two are the same, but for what is added to a variance."""
    return float((first - second).abs().max()) < 0.01 * float(second.abs().max())


def no_generate(trial: Trial) -> str:
    """The module has no `generate`, or none that runs."""
    return "it has generate" if hasattr(trial.module, "generate") else ""


def prompts_alike(trial: Trial) -> str:
    """Plain passes prefer the answer as much after one prompt as after the other."""
    contrast = trial.subject.contrasts[0]
    preferred = []
    for prompt in (contrast.clean, contrast.corrupt):
        logits = trial.logits(list(trial.model.encode(prompt).ids[0]))
        logits = logits[-1 if not trial.subject.fills_in else -2]
        preferred.append(float(logits[contrast.answer] - logits[contrast.other]))
    alike = abs(preferred[0] - preferred[1]) < ROUNDING
    return "" if alike else f"the answer is preferred by {preferred}"


def reads_both(trial: Trial) -> str:
    """The decoder's blocks have one attention, and the encoder's text changes them."""
    if any("cross" in block.parts for _, block in _blocks(trial)):
        return "its blocks have a cross-attention"
    return two_stacks(trial)


# What a reason says, the words it says it in, and what must be seen for it to hold.
WITNESSES: tuple[tuple[str, str, Callable[[Trial], str]], ...] = (
    ("no head", r"has no (language-model )?head|makes no logits", no_head),
    ("an encoder and a decoder", r"an encoder and a decoder|two stacks", two_stacks),
    (
        "blocks norm the sum of a part and the stream",
        r"norms the sum of its parts",
        norms_the_sum,
    ),
    ("sees the whole text", r"sees the whole text|masked language", sees_later_tokens),
    (
        "blocks are no modules of their own",
        r"blocks are no modules of their own",
        no_blocks,
    ),
    (
        "an MLP carries something from token to token",
        r"last branch carries something from token",
        last_branch_carries,
    ),
    (
        "blocks add no attention and MLP to the stream",
        r"adds no attention and MLP|no outputs of its parts sum|one part only"
        r"|adds a third part|carries nothing from token"
        r"|the parts of block",
        no_two_parts,
    ),
    (
        "the heads of some block are not known",
        r"the heads of block|queries and keys of block|not a pattern times values"
        r"|do not add up|by chunks of tokens|not the output of a module with one input",
        no_weights,
    ),
    (
        "logits of a token depend on more than its state",
        r"depend on more than the state",
        more_than_its_own_token,
    ),
    (
        "no plain norm comes before the head",
        r"no plain norm|not a gain, a scale and a bias",
        no_plain_norm,
    ),
    ("reads both stacks at once", r"tokens of both stacks at once", reads_both),
    (
        "prompts that the model does not tell apart",
        r"with a difference of 0 between them|prefer the answers alike",
        prompts_alike,
    ),
    ("no generate method", r"has no generate method", no_generate),
    ("blocks are one module", r"one module that is called repeatedly", one_module),
)


def witnessed(trial: Trial, error: hs.errors.Error) -> tuple[str, str]:
    """Return the kind of a reason, and why it does not hold; empty if it does."""
    if re.search(r"one causal stack and a head", error.reason):
        # Three needs in one sentence: one of them must be lacking.
        kinds = ("no head", "an encoder and a decoder", "sees the whole text")
        for kind, _, witness in WITNESSES:
            if kind in kinds and not witness(trial):
                return kind, ""
        return "needs one causal stack and a head", "it has one"
    for kind, words, witness in WITNESSES:
        if re.search(words, f"{error.problem}: {error.reason}"):
            return kind, witness(trial)
    return "other", "no pass shows that this holds"


def _output(trial: Trial, ids: list[int], target: list[int] = TARGET) -> Any:
    targets = torch.tensor([target]) if trial.two else None
    with torch.no_grad():
        given = arguments(trial.module, torch.tensor([ids]), targets=targets)
        return trial.module(**given, return_dict=True)


def _near(first: Any, second: Any) -> bool:
    allowed = ROUNDING * float(second.abs().max())
    return bool((first - second).abs().max() <= allowed)


def _blocks(trial: Trial) -> Iterator[tuple[str, Any]]:
    """Yield every block of the stack that answers, by the layer that it makes."""
    for layer, block in enumerate(trial.model.anatomy.stacks[-1].blocks, 1):
        yield f"{trial.subject.prefix}layer.{layer}", block


def _states(trial: Trial, sites: list[str]) -> Any:
    return trial.seen(trial.text, sites)
