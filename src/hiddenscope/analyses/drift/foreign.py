"""Foreign: a candidate of somebody else's making, which of its tensors are which states, and which part is at fault.

Its tensors are paired with sites by a table; or by their names, where these are sites or Hugging Face's
`hidden_states`; by its one list of as many blocks as the reference has; by order, where there are as many as sites; or
else by shape and then by correlation.

Its modules have other names than the reference's. Modules with weights are paired by their weights, which a port takes
over from the reference, and then called on the reference's own input.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hiddenscope import hooks
from hiddenscope.analyses.drift.localize import FaultyModule, ModuleCall, Search, called, tensors_in
from hiddenscope.analyses.drift.observe import LOGITS, Live, Noise, in_float64, observe
from hiddenscope.analyses.drift.sides import is_compiled, majority_dtype
from hiddenscope.anatomy import Tap
from hiddenscope.anatomy.taps import layouts
from hiddenscope.errors import PassError, StatesError
from hiddenscope.passes import Inputs, PaddedBatch
from hiddenscope.sites import Site

PAIRING_TOKENS = 256  # of the first texts, on which tensors are paired
LEAST_CORRELATION = 0.5
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

    def facts(self, reference: Live) -> dict[str, Any]:
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

    A compiled Hugging Face model is called as such, and asked for its hidden states.
    """

    function: Callable[..., Any]

    def __call__(self, batch: PaddedBatch) -> Any:
        """Run it on a batch."""
        if is_compiled(self.function):
            inside: Any = getattr(self.function, "_orig_mod", self.function)
            return self.function(**batch.arguments(inside), output_hidden_states=True, return_dict=True)
        mask = self._mask()
        return self.function(batch.ids, **({} if mask is None else {mask: batch.mask}))

    def of(self, module: nn.Module) -> Runner:
        """The same for a copy of the module."""
        return Runner(module)

    def _mask(self) -> str | None:
        """The name of its parameter for the mask."""
        target = self.function.forward if isinstance(self.function, nn.Module) else self.function
        try:
            names = list(inspect.signature(target).parameters)
        except (TypeError, ValueError):
            return None
        return next((name for name in names[1:] if "mask" in name), None)


def values_of(function: Callable[..., Any], batches: Sequence[PaddedBatch]) -> list[Value]:
    """Every tensor of the candidate that has a row for each token, in the order in which it is made."""
    found: dict[str, list[Tensor]] = {}
    taps: dict[str, Tap] = {}
    call = Runner(function)
    inside = isinstance(function, nn.Module) and not is_compiled(function)
    for batch in batches:
        collector = _Collector(*(part.ids.shape[1] for part in (batch, batch.targets) if part is not None))
        watches = collector.watches(function) if isinstance(function, nn.Module) and inside else []
        with torch.no_grad(), hooks.watching(watches):
            output = call(batch)
        for name, tensor in named_tensors(output):
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
    """The tensors that a function returned, by name or by place."""
    if isinstance(output, Tensor):
        yield name or "output", output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from named_tensors(value, str(key))
    elif isinstance(output, tuple | list):
        for place, value in enumerate(output):
            yield from named_tensors(value, f"{name}[{place}]" if name else str(place))


def pair(
    values: Sequence[Value],
    reference: Mapping[str, Tensor],
    side: Live,
    module: nn.Module | None,
    pairing: Mapping[str, str] | str | None,
) -> Pairs:
    """Pair values with the sites of the reference; nothing to pair is an error."""
    if isinstance(pairing, Mapping):
        return _by_table(values, reference, pairing)
    fitting = [value for value in values if any(value.rows.shape == rows.shape for rows in reference.values())]
    ways: list[Callable[[], Pairs | None]] = [
        lambda: _by_names(values, reference, side),
        lambda: None if module is None else _by_blocks(fitting, reference, side, module),
        lambda: _by_order(fitting, reference) if module is None or pairing == "order" else None,
        lambda: _by_correlation(fitting, reference, ordered=module is not None),
    ]
    if pairing not in (None, "order", "auto"):
        reason = f"got {pairing!r}"
        raise StatesError("Cannot read the pairing", reason, "Give a table {site: name}, 'order' or 'auto'.")
    for way in ways:
        pairs = way()
        if pairs is not None and pairs.chosen:
            return pairs
    shapes = sorted({tuple(value.rows.shape) for value in values})[:6]
    width = next(iter(reference.values())).shape
    reason = f"the reference's states are {list(width)}, and the candidate's tensors {[list(s) for s in shapes]}"
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


def _by_names(values: Sequence[Value], reference: Mapping[str, Tensor], side: Live) -> Pairs | None:
    """Names that are sites themselves, or entries of Hugging Face's `hidden_states`."""
    stacks = {"encoder_" if stack.name == "encoder" else "decoder_": stack for stack in side.anatomy.stacks}
    stacks[""] = side.anatomy.stacks[-1]
    entries = {prefix: side.anatomy.reported(stack) for prefix, stack in stacks.items()}
    pairs = Pairs("name")
    for value in values:
        entry = _ENTRY.fullmatch(value.name.removeprefix("output "))
        listed = entries.get(entry[1] or "", ()) if entry else ()
        site = str(listed[int(entry[2])]) if entry and int(entry[2]) < len(listed) else value.name
        if site in reference and value.rows.shape == reference[site].shape:
            pairs.chosen.setdefault(site, value)
    return pairs if len(pairs.chosen) > 1 else None


def _by_blocks(values: Sequence[Value], reference: Mapping[str, Tensor], side: Live, module: nn.Module) -> Pairs | None:
    """By the list of as many modules as the reference has blocks."""
    depth = side.anatomy.stacks[-1].depth
    by_name = {value.name: value for value in values}
    lists = [(path, part) for path, part in module.named_modules() if isinstance(part, nn.ModuleList | nn.Sequential)]
    for path, part in sorted(lists, key=lambda one: one[0].count(".")):
        items = [f"{path}.{name}" for name in part._modules]
        outputs = [by_name.get(f"output of {item}") for item in items]
        entry = by_name.get(f"input of {items[0]}") if items else None
        if len(items) > 1 and len(items) != depth and all(outputs) and entry is not None:
            reason = f"the reference has {depth} blocks, and {path} has {len(items)}"
            raise StatesError("Cannot pair the blocks", reason, "Give a pairing that says which are which.")
        if len(items) != depth or entry is None or not all(outputs):
            continue
        pairs = Pairs("blocks", {"layer.0": entry})
        pairs.chosen |= {f"layer.{k}": value for k, value in enumerate(outputs, 1) if value is not None}
        pairs.chosen |= _after_blocks(values, reference, outputs[-1])
        return pairs
    return None


def _after_blocks(values: Sequence[Value], reference: Mapping[str, Tensor], last: Value | None) -> dict[str, Value]:
    """The final norm: of what comes after the last block, the module's output that is most like it."""
    if "final" not in reference or last is None:
        return {}
    later = [value for value in list(values)[values.index(last) + 1 :] if value.tap and value.tap.side == "output"]
    later = [value for value in later if value.rows.shape == last.rows.shape and not value.rows.equal(last.rows)]
    best = max(later, key=lambda value: _correlation(reference["final"], value.rows), default=None)
    return {} if best is None else {"final": best}


def _by_order(values: Sequence[Value], reference: Mapping[str, Tensor]) -> Pairs | None:
    sites = [site for site in reference if site != LOGITS]
    if len(values) != len(sites):
        return None
    return Pairs("order", dict(zip(sites, values, strict=True)))


def _by_correlation(values: Sequence[Value], reference: Mapping[str, Tensor], *, ordered: bool) -> Pairs | None:
    """The pairs whose correlations add up to most; a module's are in the order in which it makes them."""
    from scipy.optimize import linear_sum_assignment

    sites = [site for site in reference if site != LOGITS]
    scores = np.full((len(sites), len(values)), -1.0)
    for i, site in enumerate(sites):
        for j, value in enumerate(values):
            if value.rows.shape == reference[site].shape:
                scores[i, j] = _correlation(reference[site], value.rows) - LEAST_CORRELATION
    path = _best_path(scores) if ordered else zip(*linear_sum_assignment(scores, maximize=True), strict=True)
    chosen = {sites[i]: values[j] for i, j in path if scores[i, j] > 0}
    return Pairs("correlation", chosen) if chosen else None


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


def as_foreign(module: nn.Module, reference: Live, pairs: Pairs) -> Live | None:
    """A module of somebody else's whose blocks are known, so that the reference's states can be put into it."""
    taps = {Site.parse(site): value.tap for site, value in pairs.chosen.items() if value.tap is not None}
    blocks = {site: tap.path for site, tap in taps.items() if site.layer and tap.side == "output"}
    if len(blocks) < 2:
        return None
    return Live(
        type(module).__name__,
        module,
        reference.anatomy,
        reference.pad,
        majority_dtype(module),
        taps=taps,
        blocks=blocks,
        call=Runner(module),
    )


class ForeignSearch(Search):
    """Looks for the module at fault where the modules have other names: by their weights, then by what they give."""

    def find(self, first: str, beyond: Mapping[str, float], total: float) -> FaultyModule | None:
        """The faulty module behind the first site that differs."""
        site = None if first == LOGITS else Site.parse(first)
        if site is not None and site.layer:
            block = self.reference.blocks[site]
            given = self._given(block, 0)
            if given is None:
                return None
            trace = self._traced(self.reference.module.get_submodule(block), block, given)
            path = self.candidate.blocks[site]
            right: set[str] = set()
            found = self._weights_at_fault([*_every(trace)], path, right=right)
            return (
                found
                or self._values_at_fault(trace, site, path, right)
                or FaultyModule(path, beyond[first], total, own=True)
            )
        inside = tuple(f"{path}." for path in self.candidate.blocks.values())
        found = self._weights_at_fault([*_every(self._trace_outside())], "", without=inside)
        return found or FaultyModule("", beyond[first], total, own=True)

    def _weights_at_fault(
        self, calls: Sequence[ModuleCall], path: str, *, without: tuple[str, ...] = (), right: set[str] | None = None
    ) -> FaultyModule | None:
        """The first module with weights that gives something else than the one of the reference with its weights.

        Those that give the same are added to `right`.
        """
        part = self.candidate.module.get_submodule(path)
        names = [f"{path}.{name}".strip(".") for name, _ in part.named_modules()]
        theirs = [name for name in names if not name.startswith(without)] if without else names
        theirs = [name for name in theirs if self._weights(self.candidate, name)]
        mine = [call for call in calls if self._weights(self.reference, call.path) and not call.inner]
        taken: set[int] = set()
        for name in theirs:
            call = self._partner(name, mine, taken)
            if call is None:
                continue
            verdict = self._given_alike(name, call)
            if verdict is not None and verdict[0] > 1:
                return FaultyModule(name, *verdict, own=False, call=call)
            if verdict is not None and right is not None:
                right.add(name)
        return None

    def _weights(self, side: Live, path: str) -> list[Tensor]:
        part = side.module.get_submodule(path)
        return [weight.detach() for weight in part._parameters.values() if weight is not None]

    def _partner(self, name: str, calls: Sequence[ModuleCall], taken: set[int]) -> ModuleCall | None:
        """The call of the reference's module whose weights are most like those of a module of the candidate."""
        weight = self._weights(self.candidate, name)[0]
        scores: dict[int, float] = {}
        for place, call in enumerate(calls):
            other = self._weights(self.reference, call.path)[0]
            if place not in taken and sorted(other.shape) == sorted(weight.shape):
                scores[place] = _alike(weight, other)
        if not scores:
            return None
        best = max(scores, key=lambda place: scores[place])
        taken.add(best)
        return calls[best]

    def _given_alike(self, name: str, call: ModuleCall) -> tuple[float, float] | None:
        """How far a module of the candidate is off on what the reference's was given; None if it takes other things."""
        given = next(iter(tensors_in(call.args)), None)
        given = next(iter(tensors_in(call.kwargs)), None) if given is None else given
        if given is None:
            return None
        try:
            output = called(
                self.candidate.module.get_submodule(name), ModuleCall(name, (given,), {}), self.candidate.device
            )
            wide = in_float64(self.reference.module.get_submodule(call.path), call.args, call.kwargs)
        except Exception:
            return None
        made, exact, expected = hooks.first_tensor(output), hooks.first_tensor(wide), call.output[0][0]
        if made is None or exact is None or made.shape != expected.shape:
            return None
        error = self._gap(expected, made)
        return Noise.of([self._gap(exact, expected)], expected.dtype).beyond(error), error.worst

    def _values_at_fault(self, trace: ModuleCall, site: Site, path: str, right: set[str]) -> FaultyModule | None:
        """The first part of the candidate's block that gives what is nowhere in the reference's."""
        known = [tensor for call in _every(trace) for tensor in (*tensors_in(call.args), *call.output[0])]
        known += [tensor for call in _every(trace) for tensor in tensors_in(call.kwargs)]
        known = [tensor for tensor in known if tensor.is_floating_point()]
        noise = Noise.assumed(self.candidate.dtype)
        before = str(Site(site.layer - 1, "", site.stack)) if site.layer else ""
        states = observe(self.reference, self.inputs, [Site.parse(before)])
        made: list[tuple[str, Tensor]] = []
        watches = [
            hooks.Watch(part, "output", _keeper(made, f"{path}.{name}"))
            for name, part in self.candidate.module.get_submodule(path).named_modules()
            if name and f"{path}.{name}" not in right
        ]
        with hooks.watching(watches):
            observe(self.candidate, self.inputs, [Site.parse(before)], put=states.rows)
        for name, tensor in made:
            same_shape = [other for other in known if other.shape == tensor.shape]
            if same_shape and min(noise.beyond(self._gap(other, tensor)) for other in same_shape) > 1:
                return FaultyModule(name, inf, inf, own=True)
        return None


def _keeper(made: list[tuple[str, Tensor]], name: str) -> Callable[[Any], None]:
    def keep(output: Any) -> None:
        tensor = hooks.first_tensor(output)
        if tensor is not None:
            made.append((name, tensor.detach().clone()))

    return keep


def _every(call: ModuleCall) -> Iterator[ModuleCall]:
    yield call
    for inner in call.inner:
        yield from _every(inner)


def _alike(one: Tensor, two: Tensor) -> float:
    """How much alike two weights are: 1 if they are equal, as they are or transposed."""
    a, b = one.double().cpu().flatten(), two.double().cpu()
    forms = (
        [b.flatten()]
        if b.ndim < 2 or one.shape != b.shape
        else [b.flatten(), b.T.flatten()]
        if b.shape[0] == b.shape[1]
        else [b.flatten()]
    )
    forms = forms if one.shape == b.shape else [b.T.flatten()]
    scores = [
        float(torch.nn.functional.cosine_similarity(a, form, dim=0)) - float((a - form).norm() > 0) * 1e-6
        for form in forms
    ]
    return max(scores)


def batches_for(side: Live, inputs: Inputs) -> list[PaddedBatch]:
    """The first texts, one at a time, on which tensors are paired."""
    chosen: list[PaddedBatch] = []
    tokens = 0
    for text, length in enumerate(inputs.lengths):
        if chosen and tokens + length > PAIRING_TOKENS:
            break
        chosen.append(side.batch(inputs.some([text])))
        tokens += length
    return chosen


def rows_of_function(
    function: Callable[..., Any], names: Mapping[str, str], side: Live, inputs: Inputs
) -> dict[str, Tensor]:
    """The paired tensors of a function over all texts, by site."""
    values = {
        value.name: value.rows
        for value in values_of(function, [side.batch(inputs.some([t])) for t in range(len(inputs))])
    }
    missing = [name for name in names.values() if name not in values]
    if missing:
        reason = f"{missing[0]} has no row for each token of every text"
        raise PassError("Cannot compare the candidate", reason, "Pair tensors that every text gives.")
    return {site: values[name] for site, name in names.items()}
