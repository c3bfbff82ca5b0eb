"""Signatures: what a fault looks like. Each is tried on the module at fault: would it give what the candidate gives?

A hypothesis is a change of the reference's module or of its input: the norm with another eps, the weight transposed,
the positions counted from one. It becomes a hint where what it makes is what the candidate made, up to rounding. Hints
never decide where the fault is: that was measured before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hiddenscope import autograd, hooks
from hiddenscope.analyses.drift.localize import FaultyModule, Hint, ModuleCall, Search, called, leaves, tensors_in
from hiddenscope.analyses.drift.observe import MARGIN, Noise, mapped

FEW_WEIGHTS = 3  # of a module that is no block
EXPLAINED = 0.02  # of the error may be left by a hypothesis, beyond rounding
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "the exact GELU (erf)": functional.gelu,
    "GELU by tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "GELU by a sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "SiLU": functional.silu,
    "ReLU": functional.relu,
    "squared ReLU": lambda x: functional.relu(x).square(),
}
NARROW = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Suspect:
    """The module at fault beside the reference's: what both were given, what each made of it."""

    search: Search
    call: ModuleCall
    path: str
    reference: nn.Module
    candidate: nn.Module
    given: Tensor | None
    expected: Tensor
    made: Tensor

    def explains(self, tensor: Tensor | None) -> bool:
        """Whether a hypothesis gives what the candidate gave."""
        if tensor is None or tensor.shape != self.made.shape:
            return False
        error = self.search._gap(self.expected, self.made).worst
        allowed = max(MARGIN * Noise.assumed(self.expected.dtype).row, EXPLAINED * error)
        return self.search._gap(self.made, tensor.to(self.made)).worst <= allowed

    def again(self, call: ModuleCall | None = None) -> Tensor | None:
        """What the reference's module makes of another input; None where it refuses it."""
        try:
            return hooks.first_tensor(called(self.reference, call or self.call, self.search.reference.device))
        except Exception:
            return None


def hints(search: Search, faulty: FaultyModule) -> list[Hint]:
    """What the fault looks like, the surest first; none where nothing known fits."""
    call = faulty.call
    if call is None:
        return [*faulty.hints]
    reference = search.reference.module.get_submodule(call.path)
    candidate = search.candidate.module.get_submodule(faulty.path)
    found = list(_attributes(reference, candidate))
    if faulty.made is None:  # the parts of a module of another make have other names
        found += _weights(search, call.path, reference, candidate)
    if not search._holds_blocks(call.path) or call.path in search.reference.blocks.values():
        suspect = _suspect(search, faulty, call, reference, candidate)
        if suspect is not None:
            for signature in (_effects, _activation, _inner_activation, _norm, _positions, _masks, _heads, _rotary):
                found += signature(suspect)
    else:
        found += _block_arguments(search, call)
    found += faulty.hints
    return list({(hint["fault"], hint["evidence"]): hint for hint in found}.values())


def _hint(fault: str, evidence: str) -> Hint:
    return {"fault": fault, "evidence": evidence}


def _suspect(
    search: Search, faulty: FaultyModule, call: ModuleCall, reference: nn.Module, candidate: nn.Module
) -> Suspect | None:
    made = faulty.made if faulty.made is not None else _made(search, call, candidate)
    expected = next((tensor for tensor in call.output[0] if tensor.is_floating_point()), None)
    if made is None or expected is None or made.shape != expected.shape:
        return None
    return Suspect(
        search, call, faulty.path, reference, candidate, hooks.state_in(call.args, call.kwargs), expected, made.cpu()
    )


def _made(search: Search, call: ModuleCall, candidate: nn.Module) -> Tensor | None:
    try:
        return hooks.first_tensor(called(candidate, call, search.candidate.device))
    except Exception:
        try:  # a module of another make takes one tensor
            given = next(iter(tensors_in(call.args)))
            return hooks.first_tensor(called(candidate, ModuleCall(call.path, (given,), {}), search.candidate.device))
        except Exception:
            return None


def _attributes(reference: nn.Module, candidate: nn.Module) -> Iterator[Hint]:
    """Plain values that the two modules keep and that differ."""
    for name, value in vars(reference).items():
        other = vars(candidate).get(name)
        plain = isinstance(value, int | float | str) and isinstance(other, int | float | str)
        if plain and not name.startswith("_") and name != "training" and value != other:
            yield _hint("attribute", f"`{name}` is {other!r} in the candidate and {value!r} in the reference.")


def _weights(search: Search, path: str, reference: nn.Module, candidate: nn.Module) -> Iterator[Hint]:
    """How the candidate's weights were made of the reference's; of many, one hint for each kind."""
    theirs, own = dict(candidate.named_parameters()), dict(reference.named_parameters())
    if len(own) > FEW_WEIGHTS:
        yield from _other_block(search, path, theirs)
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, weight in own.items():
        relation = _relation_of(search, f"{path}.{name}", weight, theirs.get(name))
        if relation is not None and relation[0] == "transposed_weight" and type(reference) is not type(candidate):
            continue  # a layout, and no fault: Conv1D keeps the transpose of what Linear keeps
        if relation is not None:
            kinds.setdefault(relation, []).append(name)
    for (fault, words), names in kinds.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield _hint(fault, f"`{names[0]}`{more} of the candidate {words}.")


def _relation_of(search: Search, path: str, weight: Tensor, other: Tensor | None) -> tuple[str, str] | None:
    if other is None:
        missing = path.endswith("bias") and bool(weight.any())
        return ("missing_bias", "is missing, and the reference's is not zero") if missing else None
    mine, theirs = weight.detach().cpu(), other.detach().cpu()
    if mine.shape == theirs.shape and not torch.equal(mine, theirs):
        elsewhere = _found_elsewhere(search, path, theirs)
        if elsewhere:
            return "exchanged_weight", f"is the reference's `{elsewhere}`"
    return _relation(mine, theirs)


def _relation(weight: Tensor, other: Tensor) -> tuple[str, str] | None:
    """How a weight was made of another, if that can be told."""
    if (
        weight.ndim == 2
        and other.shape == weight.T.shape
        and torch.equal(other, weight.T)
        and not torch.equal(other, weight)
    ):
        return "transposed_weight", "is the reference's, transposed"
    if other.shape != weight.shape or torch.equal(other, weight):
        return None
    if not bool(other.any()):
        return ("missing_bias", "is zero") if weight.ndim == 1 else ("zeroed_weight", "is zero")
    for name, dtype in NARROW.items():
        if weight.dtype.itemsize > dtype.itemsize and torch.equal(
            weight.to(dtype).to(weight.dtype), other.to(weight.dtype)
        ):
            return "rounded_weight", f"is the reference's, rounded to {name}"
    size = weight.double().square().sum()
    scale = float((weight.double() * other.double()).sum() / size) if bool(size) else 1.0
    if torch.allclose(other.double(), scale * weight.double(), rtol=1e-5, atol=1e-9):
        return "scaled_weight", f"is the reference's times {scale:.6g}"
    for axis, words in ((0, "rows"), (1, "columns")):
        if weight.ndim > axis and _permuted(weight, other, axis):
            return "permuted_weight", f"has the reference's {words} in another order"
    different = int((weight != other).sum())
    if different <= weight.numel() // 2:
        return "changed_weight", f"differs in {different:,} of {weight.numel():,} elements"
    levels = max(len(row.unique()) for row in other.reshape(len(other), -1)[:8]) if other.ndim > 1 else 0
    if levels and levels < other[0].numel() // 2 and levels <= 256:
        return "quantised_weight", f"has at most {levels} different values in a row"
    return None


def _permuted(weight: Tensor, other: Tensor, axis: int) -> bool:
    """Whether the slices along an axis are the same in another order: sorted by their first numbers they are equal."""
    a, b = (values.movedim(axis, 0).reshape(values.shape[axis], -1) for values in (weight, other))
    return torch.equal(a[a[:, 0].argsort()], b[b[:, 0].argsort()])


def _found_elsewhere(search: Search, path: str, other: Tensor) -> str | None:
    if not bool(other.any()) or bool((other == other.flatten()[0]).all()):
        return None  # a norm that was never trained is like many others
    for known, weight in search.reference.module.named_parameters():
        if known != path and weight.shape == other.shape and torch.equal(weight.cpu(), other):
            return known
    return None


def _other_block(search: Search, path: str, theirs: Mapping[str, Tensor]) -> Iterator[Hint]:
    """A block that holds the weights of another block."""
    for site, block in search.reference.blocks.items():
        own = dict(search.reference.module.get_submodule(block).named_parameters())
        same = own.keys() == theirs.keys() and all(
            own[name].shape == other.shape and torch.equal(own[name].cpu(), other.cpu())
            for name, other in theirs.items()
        )
        if same and block != path:
            yield _hint("swapped_layer", f"The candidate's block holds the weights of `{block}`, which makes `{site}`.")


def _effects(suspect: Suspect) -> Iterator[Hint]:
    """What can be told of the output alone, whatever the module is."""
    given, expected, made = suspect.given, suspect.expected, suspect.made
    block = suspect.call.path in suspect.search.reference.blocks.values()
    what = "block" if block else "module"
    if given is not None and suspect.explains(given):
        yield _hint("layer_skipped" if block else "not_applied", f"The {what} gives back what it is given.")
    if given is not None and given.shape == expected.shape:
        args, kwargs = hooks.with_state_in(suspect.call.args, suspect.call.kwargs, expected)
        if suspect.explains(suspect.again(replace(suspect.call, args=args, kwargs=kwargs))):
            yield _hint("layer_doubled" if block else "applied_twice", f"The {what} is applied twice.")
    size = float(expected.double().square().sum())
    scale = float((expected.double() * made.double()).sum()) / size if size else 1.0
    if suspect.explains(scale * expected) and not math.isclose(scale, 1.0, rel_tol=1e-3):
        yield _hint("scale", f"The output is the reference's times {scale:.6g}.")
    zero = ~made.reshape(-1, made.shape[-1]).any(-1) & expected.reshape(-1, expected.shape[-1]).any(-1)
    if bool(zero.any()):
        yield _hint(
            "zero_rows",
            f"{int(zero.sum()):,} rows of the output are exactly zero, and none of these is in the reference.",
        )


def _activation(suspect: Suspect) -> Iterator[Hint]:
    given = suspect.given
    if given is None or given.shape != suspect.expected.shape or suspect.call.inner:
        return
    for name, function in ACTIVATIONS.items():
        if suspect.explains(function(given)):
            yield _hint("activation", f"The output is that of {name}.")
            return


def _inner_activation(suspect: Suspect) -> Iterator[Hint]:
    """Another activation inside the module, where the reference has one as a module of its own."""
    for call in leaves(suspect.call) if suspect.call.inner else ():
        part = suspect.search.reference.module.get_submodule(call.path)
        given = hooks.state_in(call.args, call.kwargs)
        if next(part.parameters(), None) is not None or given is None or not call.output[0]:
            continue
        for name, function in ACTIVATIONS.items():
            with hooks.substituting({part: function}):
                trial = suspect.again()
            if suspect.explains(trial):
                yield _hint("activation", f"The output is that of {name} in the place of `{call.path}`.")
                return


def _norm(suspect: Suspect) -> Iterator[Hint]:
    """Another eps: the one that each row's scale would come from is the same for all rows."""
    given, expected, made = suspect.given, suspect.expected, suspect.made
    eps = next((v for k, v in vars(suspect.reference).items() if "eps" in k and isinstance(v, float)), None)
    if eps is None or given is None or given.shape != expected.shape:
        return
    x = given.double()
    spread = x.var(-1, correction=0) if isinstance(suspect.reference, nn.LayerNorm) else x.square().mean(-1)
    bias = getattr(suspect.reference, "bias", None)
    shift = 0.0 if bias is None else bias.detach().cpu().double()
    a, b = expected.double() - shift, made.double() - shift
    scales = (a * b).sum(-1) / a.square().sum(-1)
    fitted = float(((spread + eps) / scales.square() - spread).median())
    trial = a * ((spread + eps) / (spread + fitted)).clamp_min(0).sqrt()[..., None] + shift
    if fitted > 0 and suspect.explains(trial.to(made)):
        yield _hint("norm_eps", f"The output is that of a norm with eps {fitted:.2g}; the reference's is {eps:.2g}.")


def _positions(suspect: Suspect) -> Iterator[Hint]:
    """Positions that are shifted, interleaved or missing, in the attention that is given rotary tables."""
    tables = suspect.call.kwargs.get("position_embeddings")
    if not isinstance(tables, tuple) or len(tables) != 2:
        return
    cos, sin = tables
    half = cos.shape[-1] // 2
    trials = {
        "rope_missing": ("no rotary positions", (torch.ones_like(cos), torch.zeros_like(sin))),
        "rope_direction": ("positions that turn the other way", (cos, -sin)),
        "rope_interleaved": (
            "rotary tables in the interleaved order",
            tuple(table[..., :half].repeat_interleave(2, -1) for table in tables),
        ),
        "position_off_by_one": ("positions that are one off", tuple(table.roll(-1, -2) for table in tables)),
    }
    for fault, (words, changed) in trials.items():
        call = replace(suspect.call, kwargs={**suspect.call.kwargs, "position_embeddings": changed})
        if suspect.explains(suspect.again(call)):
            yield _hint(fault, f"The output is that of attention with {words}.")


def _masks(suspect: Suspect) -> Iterator[Hint]:
    """Masks that hide another number of tokens, in the attention."""
    if "attention_mask" not in suspect.call.kwargs or suspect.given is None or suspect.given.ndim != 3:
        return
    texts, tokens = suspect.given.shape[:2]
    lowest = torch.finfo(suspect.given.dtype).min
    rows, columns = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    real = suspect.search.masks[0].cpu()
    real = real if real.shape == (texts, tokens) else torch.ones(texts, tokens, dtype=torch.bool)
    trials = {
        "mask_missing": ("no causal mask", real[:, None, None, :].expand(texts, 1, tokens, tokens)),
        "mask_off_by_one": (
            "a mask that hides the token itself",
            ((columns < rows) | (rows == 0)) & real[:, None, None, :],
        ),
        "mask_looks_ahead": ("a mask that shows the next token", (columns <= rows + 1) & real[:, None, None, :]),
        "window_ignored": ("a causal mask without a window", (columns <= rows) & real[:, None, None, :]),
        "padding_not_masked": ("padding that is not masked", (columns <= rows).expand(texts, 1, tokens, tokens)),
    }
    for fault, (words, seen) in trials.items():
        mask = torch.where(seen, 0.0, lowest).to(suspect.given)
        if suspect.explains(
            suspect.again(replace(suspect.call, kwargs={**suspect.call.kwargs, "attention_mask": mask}))
        ):
            yield _hint(fault, f"The output is that of attention with {words}.")


def _heads(suspect: Suspect) -> Iterator[Hint]:
    """Keys and values repeated in the wrong order: query head h reads group h modulo the number of groups."""
    part: Any = suspect.reference
    groups, width = getattr(part, "num_key_value_groups", 1), getattr(part, "head_dim", None)
    query, output = getattr(part, "q_proj", None), getattr(part, "o_proj", None)
    if groups in (None, 1) or not isinstance(width, int) or query is None or output is None:
        return
    heads = query.weight.shape[0] // width
    order = torch.arange(heads).reshape(groups, heads // groups).T.flatten()
    back = order.argsort()

    def turned(tensor: Tensor, by: Tensor) -> Tensor:
        return tensor.reshape(*tensor.shape[:-1], heads, width)[..., by, :].flatten(-2)

    watches = [
        hooks.Watch(query, "output", lambda made: turned(made, order)),
        hooks.Watch(output, "input", lambda args, kwargs: ((turned(args[0], back),), kwargs)),
    ]
    with hooks.watching(watches):
        trial = suspect.again()
    if suspect.explains(trial):
        read = ", ".join(str(head % (heads // groups)) for head in range(min(heads, 8)))
        more = ", ..." if heads > 8 else ""
        words = f"The output is that of keys and values repeated in turn: the query heads read heads {read}{more}."
        yield _hint("kv_heads", words)


def _rotary(suspect: Suspect) -> Iterator[Hint]:
    """Another base, a scaling or other positions, in the module that makes rotary tables."""
    made = list(tensors_in(_tables(suspect)))
    expected = suspect.call.output[0]
    if len(made) != 2 or len(expected) != 2 or made[0].shape != expected[0].shape or made[0].ndim != 3:
        return
    if made[0].shape[1] < 3 or bool((made[0].abs() > 1.001).any()):
        size = float(made[0].abs().max() / expected[0].abs().max())
        if not math.isclose(size, 1.0, rel_tol=1e-3):
            yield _hint("rope_scaling", f"The rotary tables are the reference's times {size:.4g}.")
        return
    half = made[0].shape[-1] // 2
    angles = [torch.atan2(sin[0, 1, :half].double(), cos[0, 1, :half].double()) for cos, sin in (expected, made)]
    ratio = angles[1] / angles[0]
    if torch.allclose(ratio, ratio.mean().expand_as(ratio), rtol=1e-3) and not math.isclose(
        float(ratio.mean()), 1.0, rel_tol=1e-4
    ):
        yield _hint("rope_scaling", f"The rotary angles are the reference's times {float(ratio.mean()):.4g}.")
        return
    exponents = torch.arange(half, dtype=torch.float64) / half
    bases = [float(torch.exp(-(angle.log() * exponents).sum() / exponents.square().sum())) for angle in angles]
    if torch.allclose(angles[1].log(), -exponents * math.log(bases[1]), atol=1e-3) and not math.isclose(
        *bases, rel_tol=1e-3
    ):
        yield _hint(
            "rope_base", f"The rotary angles have the base {bases[1]:,.0f}; the reference's is {bases[0]:,.0f}."
        )


def _tables(suspect: Suspect) -> Any:
    try:
        return mapped(
            called(suspect.candidate, suspect.call, suspect.search.candidate.device), lambda tensor: tensor.cpu()
        )
    except Exception:
        return ()


def _block_arguments(search: Search, call: ModuleCall) -> Iterator[Hint]:
    """Where the code that runs the blocks is at fault: which of their arguments are others than the reference's."""
    sites = [
        site for site, path in search.reference.blocks.items() if path.startswith(f"{call.path}.") or not call.path
    ]
    if not sites:
        return
    kept: list[dict[str, Any]] = []
    for side in (search.reference, search.candidate):
        part = side.module.get_submodule(side.blocks[sites[0]])
        seen: list[dict[str, Any]] = []
        watch = hooks.Watch(part, "input", lambda args, kwargs, seen=seen: seen.append(dict(kwargs)))
        with autograd.restored(), torch.no_grad(), hooks.watching([watch]):
            side.run(side.batch(search.inputs))
        kept.append(seen[0] if seen else {})
    for name, value in kept[0].items():
        other = kept[1].get(name)
        pairs = list(zip(tensors_in(value), tensors_in(other), strict=False))
        if (value is None) != (other is None):
            given, left = ("the candidate", "the reference") if value is None else ("the reference", "the candidate")
            yield _hint("block_argument", f"The blocks are given `{name}` in {given} and not in {left}.")
        for one, two in pairs[:1]:
            if one.shape == two.shape and not torch.equal(one.cpu(), two.cpu()):
                yield _hint("block_argument", _difference(name, one.cpu(), two.cpu()))


def _difference(name: str, one: Tensor, two: Tensor) -> str:
    if not one.is_floating_point() and one.dtype != torch.bool and bool((two - one == (two - one).flatten()[0]).all()):
        return f"`{name}`, which the blocks are given, is the reference's plus {int((two - one).flatten()[0])}."
    share = int((one != two).sum()), one.numel()
    return f"`{name}`, which the blocks are given, differs in {share[0]:,} of {share[1]:,} elements."
