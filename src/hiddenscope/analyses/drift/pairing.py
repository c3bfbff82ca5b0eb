"""Pairing: which tensors of a candidate of somebody else's making are which states of the reference.

They are paired by a table; or by the modules of the candidate that are its blocks, as many of one kind as the reference
has; by their names, where these are sites or Hugging Face's `hidden_states`; by order, where a function gives as many
as there are sites; or else by shape and then by correlation. A tensor that is left over while a site is, is an error;
other sites without a tensor are named in the notes of the result.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hiddenscope import autograd, hooks
from hiddenscope.analyses.drift.noise import gap
from hiddenscope.analyses.drift.observe import LOGITS, Side
from hiddenscope.analyses.drift.sides import is_compiled
from hiddenscope.anatomy import Tap
from hiddenscope.anatomy.taps import layouts
from hiddenscope.errors import PassError, StatesError
from hiddenscope.passes import Inputs, PaddedBatch

PAIRING_TOKENS = 256  # of the first texts, on which tensors are paired
LEAST_CORRELATION = 0.5
CLEARLY_BETTER = 0.1  # by which the mean correlation of another order must be larger before it is believed
_ENTRY = re.compile(r"(encoder_|decoder_)?hidden_states\[(\d+)\]")


@dataclass
class Value:
    """A tensor of the candidate as rows [token, width]: its name, and where it is seen if it is a module's."""

    name: str
    rows: Tensor
    tap: Tap | None = None


@dataclass
class Pairs:
    """Which value of the candidate is which site, and by what they were paired."""

    by: str
    chosen: dict[str, Value] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def facts(self, reference: Side) -> dict[str, Any]:
        """The pairing as it is shown; the table `{site: candidate}` of it can be given back, changed."""
        taps = {str(site): str(tap) for site, tap in reference.taps.items()}
        pairs = [
            {"site": site, "reference": taps.get(site, site), "candidate": value.name}
            for site, value in self.chosen.items()
        ]
        return {"by": self.by, "pairs": pairs}


@dataclass(frozen=True)
class Runner:
    """How a module or a function of somebody else's is called: with ids, and with a mask if it takes one.

    One with a decoder is given the decoder's ids too, and a compiled Hugging Face model is called as such, and asked
    for its hidden states.
    """

    function: Callable[..., Any]

    def __call__(self, batch: PaddedBatch) -> Any:
        """Run it on a batch."""
        if is_compiled(self.function):
            inside: Any = getattr(self.function, "_orig_mod", self.function)
            return self.function(**batch.arguments(inside), output_hidden_states=True, return_dict=True)
        named = {name: getattr(batch, what) for name, what in self._names(batch.targets is not None).items()}
        given = {name: value.ids if isinstance(value, PaddedBatch) else value for name, value in named.items()}
        return self.function(batch.ids, **given)

    def of(self, module: nn.Module) -> Runner:
        """The same for a copy of the module."""
        return Runner(module)

    def _names(self, with_targets: bool) -> dict[str, str]:
        """Its parameters for the mask and for the decoder's ids; another that it needs is an error."""
        target = self.function.forward if isinstance(self.function, nn.Module) else self.function
        try:
            parameters = list(inspect.signature(target).parameters.values())[1:]
        except (TypeError, ValueError):
            return {}
        named = [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        masks = [name for name in named if "mask" in name and "decoder" not in name]
        given = dict.fromkeys(masks[:1], "mask")
        if with_targets:
            words = ("decoder_input", "decoder", "target", "tgt")
            theirs = [name for word in words for name in named if word in name and "mask" not in name]
            given |= dict.fromkeys(theirs[:1], "targets")
        needed = [one.name for one in parameters if one.name in named and one.default is one.empty]
        missing = [name for name in needed if name not in given]
        if missing:
            reason = f"it needs {missing[0]!r} as well as token ids"
            raise PassError("Cannot call the candidate", reason, "Give a function of token ids that calls it.")
        return given


def values_of(function: Callable[..., Any], batches: Sequence[PaddedBatch]) -> list[Value]:
    """Every tensor of the candidate that has a row for each token, in the order in which it is made."""
    found: dict[str, list[Tensor]] = {}
    taps: dict[str, Tap] = {}
    call = Runner(function)
    inside = isinstance(function, nn.Module) and not is_compiled(function)
    for batch in batches:
        collector = _Collector(*(part.ids.shape[1] for part in (batch, batch.targets) if part is not None))
        watches = collector.watches(function) if isinstance(function, nn.Module) and inside else []
        with autograd.restored(), torch.no_grad(), hooks.watching(watches):
            output = [*named_tensors(call(batch))]
        for name, tensor in collector.unstacked(output):
            collector.add(name if inside is False else f"output {name}".strip(), tensor, None)
        for name, (rows, tap) in collector.found.items():
            found.setdefault(name, []).append(rows)
            if tap is not None:
                taps[name] = tap
    whole = [(name, parts) for name, parts in found.items() if len(parts) == len(batches)]
    fitting = [(name, parts) for name, parts in whole if len({part.shape[-1] for part in parts}) == 1]
    return [Value(name, torch.cat(parts), taps.get(name)) for name, parts in fitting]


class _Collector:
    """The tensors of one text, as rows, wherever their shape allows it."""

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens
        self.found: dict[str, tuple[Tensor, Tap | None]] = {}
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, tensor: Tensor, place: tuple[str, int, hooks.Side] | None) -> None:
        """Keep a tensor, if it has a row for each token."""
        if not tensor.is_floating_point():
            return
        for tokens in self.tokens:
            whole = tensor[None] if tensor.ndim == 2 and len(tensor) == tokens else tensor
            layout = next(layouts(whole, 1, tokens), None)
            if layout is not None and whole.shape[layout.token] == tokens:
                rows = layout.states(whole, tokens)[0].detach().to("cpu", copy=True)
                self.found[name] = rows, None if place is None else Tap(*place, layout)
                return

    def unstacked(self, output: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """What was returned, with the states of several layers in one tensor [layer, text, token, width] apart."""
        for name, tensor in output:
            stacked = tensor.ndim == 4 and tensor.shape[1] == 1 and tensor.shape[2] in self.tokens
            alone = len(output) == 1 or name == "hidden_states"
            if stacked or (alone and tensor.ndim == 3 and len(tensor) > 1 and tensor.shape[1] in self.tokens):
                yield from ((f"{name}[{layer}]", part) for layer, part in enumerate(tensor))
            else:
                yield name, tensor

    def watches(self, module: nn.Module) -> list[hooks.Watch]:
        """Watch both sides of every part."""
        watches: list[hooks.Watch] = []
        for path, part in hooks.parts_of(module).items():
            if path:
                watches += [
                    hooks.Watch(part, "input", self._before(path)),
                    hooks.Watch(part, "output", self._after(path)),
                ]
        return watches

    def _before(self, path: str) -> Callable[..., None]:
        def seen(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            self._keep(path, "input", hooks.state_in(args, kwargs))

        return seen

    def _after(self, path: str) -> Callable[..., None]:
        def seen(output: Any) -> None:
            self._keep(path, "output", hooks.first_tensor(output))

        return seen

    def _keep(self, path: str, side: hooks.Side, tensor: Tensor | None) -> None:
        call = self._calls[path, side]
        self._calls[path, side] += 1
        if tensor is not None:
            self.add(str(Tap(path, call, side)), tensor, (path, call, side))


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors and arrays that a function returned or yields, by name or by place."""
    if dataclasses.is_dataclass(output) and not isinstance(output, Mapping | type):
        output = vars(output)
    if isinstance(output, Tensor):
        yield name or "output", output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(value, str(key))
    elif isinstance(output, tuple | list | Iterator):
        for place, value in enumerate(output):
            yield from named_tensors(value, f"{name}[{place}]" if name else str(place))
    elif hasattr(output, "__array__"):
        array = np.asarray(output)
        if array.dtype.kind in "fV":  # numpy knows bfloat16 as a kind of its own
            exact = array if array.dtype in (np.float16, np.float32, np.float64) else array.astype(np.float32)
            yield name or "output", torch.from_numpy(exact.copy())


def pair(
    values: Sequence[Value],
    reference: Mapping[str, Tensor],
    side: Side,
    module: nn.Module | None,
    pairing: Mapping[str, str] | str | None,
) -> Pairs:
    """Pair values with the sites of the reference; nothing to pair is an error."""
    if isinstance(pairing, Mapping):
        return _by_table(values, reference, pairing)
    if pairing not in (None, "order", "auto"):
        reason = f"got {pairing!r}"
        raise StatesError("Cannot read the pairing", reason, "Give a table {site: name}, 'order' or 'auto'.")
    fitting = [value for value in values if any(value.rows.shape == rows.shape for rows in reference.values())]
    if pairing == "order":
        return _in_order(fitting, reference, side)
    ways: list[Callable[[], Pairs | None]] = [
        lambda: None if module is None else _by_blocks(fitting, reference, side, module),
        lambda: _by_names(values, reference, side),
        lambda: _by_order(fitting, reference) if module is None or pairing else None,
        lambda: _by_correlation(fitting, reference, ordered=module is not None),
        lambda: _by_reported_order(fitting, reference, side) if module is None else None,
    ]
    for way in ways:
        pairs = way()
        if pairs is not None and pairs.chosen:
            return pairs
    shapes = sorted({tuple(value.rows.shape) for value in values})[:6]
    width = next(iter(reference.values())).shape
    reason = f"the reference's states are {list(width)}, and the candidate's tensors {[list(s) for s in shapes]}"
    if fitting:
        reason = f"not every one of its {len(fitting)} tensors of that shape correlates with a state of the reference"
    raise StatesError("Nothing to compare", reason, "Give a pairing: {'layer.3': 'blocks.2'}.")


def _by_table(values: Sequence[Value], reference: Mapping[str, Tensor], table: Mapping[str, str]) -> Pairs:
    pairs = Pairs("table")
    for site, name in table.items():
        if site not in reference:
            reason = f"the reference has {', '.join(list(reference)[:4])} and so on"
            raise StatesError(f"No site {site!r} to pair", reason, "Give sites of the reference.")
        named = [value for value in values if value.name in (name, f"output of {name}", f"output {name}")]
        if not named:
            reason = f"there are {', '.join(value.name for value in values[:6])} and so on"
            raise StatesError(f"No tensor {name!r} in the candidate", reason, "Give one of these.")
        if named[0].rows.shape != reference[site].shape:
            reason = f"it is {list(named[0].rows.shape)} and {site} is {list(reference[site].shape)}"
            raise StatesError(f"Cannot pair {name!r} with {site}", reason, "Pair tensors of one shape.")
        pairs.chosen[site] = named[0]
    return pairs


def _by_names(values: Sequence[Value], reference: Mapping[str, Tensor], side: Side) -> Pairs | None:
    """Names that are sites themselves, or entries of Hugging Face's `hidden_states`."""
    stacks = {"encoder_" if stack.name == "encoder" else "decoder_": stack for stack in side.anatomy.stacks}
    stacks[""] = side.anatomy.stacks[-1]
    entries = {prefix: side.anatomy.reported(stack) for prefix, stack in stacks.items()}
    pairs = Pairs("name")
    for value in values:
        entry = _ENTRY.fullmatch(value.name.removeprefix("output "))
        listed = entries.get(entry[1] or "", ()) if entry else ()
        site = str(listed[int(entry[2])]) if entry and int(entry[2]) < len(listed) else value.name
        site = _normed_or_not(site, value, reference) if entry else site
        if site in reference and value.rows.shape == reference[site].shape:
            pairs.chosen.setdefault(site, value)
    return pairs if set(pairs.chosen) - {LOGITS} else None


def _normed_or_not(site: str, value: Value, reference: Mapping[str, Tensor]) -> str:
    """The last entry is `final` in Hugging Face's list; many ports keep the last layer there, before the norm."""
    if not site.endswith("final") or site not in reference or value.rows.shape != reference[site].shape:
        return site
    last = [name for name in reference if name.startswith(site.removesuffix("final")) and "layer." in name][-1]
    return min((site, last), key=lambda name: gap(reference[name], value.rows).worst)


def _by_blocks(values: Sequence[Value], reference: Mapping[str, Tensor], side: Side, module: nn.Module) -> Pairs | None:
    """By the modules that are its blocks: for every stack as many of one kind, under one parent, as it has blocks."""
    chosen: dict[str, Value] = {}
    taken: set[str] = set()
    for stack in side.anatomy.stacks:
        prefix = f"{stack.name}." if len(side.anatomy.stacks) > 1 else ""
        groups = [group for group in _groups(module, values) if not taken & set(group)]
        group = next((group for group in groups if len(group) == stack.depth), None)
        if group is None:
            lists = [group for group in groups if len(group) > 1 and _is_list(module, group)]
            if lists and len(side.anatomy.stacks) == 1:
                reason = f"the reference has {stack.depth} blocks, and {_parent(lists[0][0])} has {len(lists[0])}"
                raise StatesError("Cannot pair the blocks", reason, "Give a pairing that says which are which.")
            return None
        taken |= set(group)
        chosen |= _of_group(group, values, reference, prefix)
    return Pairs("blocks", chosen)


def _groups(module: nn.Module, values: Sequence[Value]) -> list[list[str]]:
    """Modules of one kind under one parent that give states, the outermost first, in the order of their first call."""
    seen = [value.tap.path for value in values if value.tap is not None and value.tap.side == "output"]
    found: dict[tuple[str, object], list[str]] = {}
    for path, part in module.named_modules():
        if path and isinstance(module.get_submodule(_parent(path)), nn.ModuleList | nn.Sequential):
            found.setdefault((_parent(path), "list"), []).append(path)
        if path and part._modules:
            found.setdefault((_parent(path), type(part)), []).append(path)
    groups = [group for group in found.values() if len(group) > 1 and any(path in seen for path in group)]
    groups = [group for group in groups if sum(path in seen for path in group) > len(group) / 2]
    first = {id(group): min(seen.index(path) for path in group if path in seen) for group in groups}
    return sorted(groups, key=lambda group: (group[0].count("."), first[id(group)]))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _is_list(module: nn.Module, group: Sequence[str]) -> bool:
    return isinstance(module.get_submodule(_parent(group[0])), nn.ModuleList | nn.Sequential)


def _of_group(
    group: Sequence[str], values: Sequence[Value], reference: Mapping[str, Tensor], prefix: str
) -> dict[str, Value]:
    """Blocks as layers, in the order in which they are called; or, if not each is called once, in that of the list."""
    taps = [(value, value.tap) for value in values if value.tap is not None and value.tap.path in group]
    outputs = [(value, tap) for value, tap in taps if tap.side == "output"]
    called = [tap.path for _, tap in outputs]
    order = called if sorted(called) == sorted(group) else group
    last = {tap.path: value for value, tap in outputs}  # of several calls the last
    layers = [last.get(path) or Value(f"output of {path}", torch.empty(0), Tap(path, 0, "output")) for path in order]
    entry = next((value for value, tap in taps if tap.side == "input"), None)
    chosen = {} if entry is None else {f"{prefix}layer.0": entry}
    chosen |= {f"{prefix}layer.{k}": value for k, value in enumerate(layers, 1)}
    return chosen | _after_blocks(values, reference, outputs[-1][0], prefix)


def _after_blocks(
    values: Sequence[Value], reference: Mapping[str, Tensor], last: Value, prefix: str
) -> dict[str, Value]:
    """The final norm: of what comes after the last block, the module's output that is most like it."""
    site = f"{prefix}final"
    if site not in reference:
        return {}
    later = [value for value in list(values)[values.index(last) + 1 :] if value.tap and value.tap.side == "output"]
    later = [value for value in later if value.rows.shape == last.rows.shape and not value.rows.equal(last.rows)]
    best = max(later, key=lambda value: _correlation(reference[site], value.rows), default=None)
    return {} if best is None else {site: best}


def _in_order(values: Sequence[Value], reference: Mapping[str, Tensor], side: Side) -> Pairs:
    """By order, because that was asked for: all sites, or those that Hugging Face reports."""
    sites = [site for site in reference if site != LOGITS]
    if len(values) == len(sites):
        return Pairs("order", dict(zip(sites, values, strict=True)))
    if (pairs := _by_reported_order(values, reference, side)) is not None:
        return pairs
    reason = f"it has {len(values)} tensors of the shape of a state, and the reference {len(sites)} sites"
    raise StatesError("Cannot pair the candidate by order", reason, "Give a table: {'layer.3': 'blocks.2'}.")


def _by_order(values: Sequence[Value], reference: Mapping[str, Tensor]) -> Pairs | None:
    """By order, unless another order is clearly more like the reference."""
    sites = [site for site in reference if site != LOGITS]
    if len(values) != len(sites):
        return None
    if (other := _by_correlation(values, reference, ordered=False)) is not None:
        mine = np.mean([_correlation(reference[site], value.rows) for site, value in zip(sites, values, strict=True)])
        theirs = np.mean([_correlation(reference[site], value.rows) for site, value in other.chosen.items()])
        if theirs > mine + CLEARLY_BETTER:
            return other
    return Pairs("order", dict(zip(sites, values, strict=True)))


def _by_reported_order(values: Sequence[Value], reference: Mapping[str, Tensor], side: Side) -> Pairs | None:
    """As many as Hugging Face reports: layers 0 to L-1, and then the last, with or without the final norm."""
    reported = [str(site) for site in side.anatomy.reported(side.anatomy.stacks[-1])]
    if len(side.anatomy.stacks) > 1 or len(values) != len(reported) or not set(reported) <= set(reference):
        return None
    pairs = Pairs("order", dict(zip(reported[:-1], values, strict=False)))
    pairs.chosen[_normed_or_not(reported[-1], values[-1], reference)] = values[-1]
    return pairs


def _by_correlation(values: Sequence[Value], reference: Mapping[str, Tensor], *, ordered: bool) -> Pairs | None:
    """The pairs whose correlations add up to most; a module's are in the order in which it makes them.

    None if a tensor is left over while a site is: what a fault has changed beyond recognition must not be left out.
    """
    from scipy.optimize import linear_sum_assignment

    sites = [site for site in reference if site != LOGITS]
    scores = np.full((len(sites), len(values)), -1.0)
    for i, site in enumerate(sites):
        for j, value in enumerate(values):
            if value.rows.shape == reference[site].shape:
                scores[i, j] = _correlation(reference[site], value.rows) - LEAST_CORRELATION
    path = _best_path(scores) if ordered else zip(*linear_sum_assignment(scores, maximize=True), strict=True)
    chosen = {sites[i]: values[j] for i, j in path if scores[i, j] > 0}
    return Pairs("correlation", chosen) if chosen and len(chosen) == min(scores.shape) else None


def _best_path(scores: NDArray[np.float64]) -> list[tuple[int, int]]:
    """Pairs (i, j), both rising, with the largest sum of scores."""
    rows, columns = scores.shape
    best = np.zeros((rows + 1, columns + 1))
    for i in range(rows):
        for j in range(columns):
            best[i + 1, j + 1] = max(best[i, j + 1], best[i + 1, j], best[i, j] + scores[i, j])
    path, i, j = [], rows, columns
    while i and j:
        if best[i, j] == best[i, j - 1]:
            j -= 1
        elif best[i, j] == best[i - 1, j]:
            i -= 1
        else:
            i, j = i - 1, j - 1
            path.append((i, j))
    return path[::-1]


def _correlation(one: Tensor, two: Tensor) -> float:
    """The mean correlation of the channels over the tokens, so that no massive channel decides it alone."""
    a, b = (values.double() - values.double().mean(0) for values in (one.cpu(), two.cpu()))
    sizes = (a.square().sum(0) * b.square().sum(0)).sqrt()
    shares = torch.where(sizes > 0, (a * b).sum(0) / sizes.clamp_min(torch.finfo(torch.float64).tiny), 0.0)
    return float(shares.mean().nan_to_num())


def batches_for(side: Side, inputs: Inputs) -> list[PaddedBatch]:
    """The first texts, one at a time, on which tensors are paired."""
    chosen: list[PaddedBatch] = []
    tokens = 0
    for text, length in enumerate(inputs.lengths):
        if chosen and tokens + length > PAIRING_TOKENS:
            break
        chosen.append(side.batch(inputs.some([text])))
        tokens += length
    return chosen
