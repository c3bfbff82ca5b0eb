"""Drift: is the part that was rewired found, and nothing where all is equal?"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hiddenscope as hs
from labs.truth.known import KnownModel
from labs.truth.scores.rewired import Rewirer, Rewiring, Way
from labs.truth.tally import Question, Scorecard

INPUTS = 6
# How often a part is rewired again, until the inputs exercise it.
DRAWS = 20
# A part is exercised if it moves some state by this share of its norm. The gain of the
# final norm moves least: one of the two channels of a value of 1, in a state whose norm
# is that of two constants of 100, so 1 / (sqrt(2) * 100) = 0.7%. Shares are down to a
# seventh of that, and a leak is far below a hundredth of it.
EXERCISED = 1e-4

SITE = Question(
    "drift",
    "one part is rewired: the first site that differs is its own",
    "the row of a site drawn at random",
)
SITE_GUESSED = Question(
    "drift",
    "the same, for a site drawn at random (null)",
    "null",
    "mean",
)
SITE_LARGEST = Question(
    "drift",
    "the same, for the site where whole passes differ most (baseline)",
    "the row of a site drawn at random",
)
ONLY = Question(
    "drift",
    "one part is rewired: its site is said to drift, and no other",
    "the row of sites where whole passes differ",
)
ONLY_WHOLE = Question(
    "drift",
    "the same, for all sites where whole passes differ (null)",
    "null",
)
MODULE = Question(
    "drift",
    "one part is rewired: the module is the one that holds it",
    "the row of a module drawn at random",
)
MODULE_GUESSED = Question(
    "drift",
    "the same, for a module with weights drawn at random (null)",
    "null",
    "mean",
)
CAUSE = Question(
    "drift",
    "one part is rewired: the weights are said to explain it",
    "1.00 for an analysis that always says so",
)
WEIGHT = Question(
    "drift",
    "one part is rewired: its weights are named, and no other",
    "1.00 for a plain comparison of weights",
)
TWO = Question(
    "drift",
    "two parts at two sites are rewired: exactly these two sites are named",
    "the row of two sites drawn at random",
)
TWO_GUESSED = Question(
    "drift",
    "the same, for two sites drawn at random (null)",
    "null",
    "mean",
)
EQUAL = Question(
    "drift",
    "an equal copy does not drift",
    "1.00 for an analysis that always says so",
)
PERMUTED = Question(
    "drift",
    "heads or neurons in another order do not drift",
    "1.00 for an analysis that never finds anything, 0.00 for a comparison of weights",
)
PERMUTED_ERROR = Question(
    "drift",
    "largest error of another order, in noise envelopes",
    "1.00: beyond that it would be drift",
    "largest",
)
UNUSED = Question(
    "drift",
    "a part is rewired that no input exercises: no drift, but its weights are named",
    "0.00 for an analysis of weights alone or of states alone",
)


def score_drift(known: KnownModel, card: Scorecard) -> None:
    """Rewire one part after another, and compare with the model as it was."""
    inputs = [known.ids(tokens) for tokens in known.program.draw(INPUTS)]
    rewirer = Rewirer(known)
    rewirings = _Rewirings(known.module, inputs)
    for way in rewirer.ways():
        rewirings.draw(way)
    for case in rewirings.exercised:
        _score_one(known, card, case, hs.drift(known.model, case.module, inputs))
    both = rewirings.two_at_once()
    if both is not None:
        result = hs.drift(known.model, both.module, inputs)
        card.count(TWO, _drifting_sites(result.facts) == both.sites)
        card.add(TWO_GUESSED, 1 / math.comb(result.data.sizes["site"], 2))
    _score_unused(known, card, rewirer)
    equal = copy.deepcopy(known.module)
    card.count(EQUAL, not hs.drift(known.model, equal, inputs).facts["drifted"])
    for permute in (rewirer.permute_heads, rewirer.permute_neurons):
        permuted = copy.deepcopy(known.module)
        permute(permuted)
        if not _changed_in(known.module, permuted):
            # An MLP of one neuron has no other order.
            continue
        facts = hs.drift(known.model, permuted, inputs).facts
        card.count(PERMUTED, not facts["drifted"])
        card.add(PERMUTED_ERROR, facts["beyond"])


def _score_unused(known: KnownModel, card: Scorecard, rewirer: Rewirer) -> None:
    """Take the embedding away from a letter, and give inputs without that letter."""
    other, *_, letter = known.program.letters
    exchanged = {letter: other}
    ids = []
    for tokens in known.program.draw(INPUTS):
        ids.append(known.ids([exchanged.get(token, token) for token in tokens]))
    changed = copy.deepcopy(known.module)
    rewirer.forget(changed, letter)
    facts = hs.drift(known.model, changed, ids).facts
    wanted = _changed_only_in(rewirer.names.embeddings, known.module, changed)
    is_named = _changed_weights(facts) == wanted
    card.count(UNUSED, not facts["drifted"] and is_named)


def _score_one(
    known: KnownModel, card: Scorecard, case: _Case, result: hs.Result
) -> None:
    """Count what drift says of one rewired part."""
    facts = result.facts
    site, module = case.rewiring.site, case.rewiring.module
    card.count(SITE, facts["first_site"] == site)
    differences = result.data["total_error"]
    card.count(SITE_LARGEST, differences.idxmax("site").item() == site)
    card.add(SITE_GUESSED, 1 / differences.sizes["site"])
    card.count(ONLY, _drifting_sites(facts) == {site})
    is_different = (differences > EXERCISED).to_numpy()
    card.count(ONLY_WHOLE, set(differences["site"].values[is_different]) == {site})
    card.count(MODULE, facts["module"] == module)
    card.add(MODULE_GUESSED, 1 / _count_with_weights(case.module))
    wanted = _changed_only_in(module, known.module, case.module)
    card.count(WEIGHT, _changed_weights(facts) == wanted)
    card.count(CAUSE, facts["explained_by"] == "weights")


@dataclass(frozen=True)
class _Case:
    """A copy of a module, and what was rewired in it."""

    module: nn.Module
    rewiring: Rewiring


@dataclass(frozen=True)
class _DoubleCase:
    """A copy of a module with two parts rewired, and the sites where they are."""

    module: nn.Module
    sites: set[str]


class _Rewirings:
    """Copies of a module, each with one part rewired that the inputs exercise."""

    def __init__(self, module: nn.Module, inputs: list[list[int]]) -> None:
        self.module, self.inputs = module, inputs
        self.states = _all_states(module, inputs)
        self.exercised: list[_Case] = []

    def draw(self, way: Way) -> None:
        """Rewire in one way, again and again until the inputs exercise it."""
        for _ in range(DRAWS):
            module = copy.deepcopy(self.module)
            case = _Case(module, way(module))
            if _moved(self.states, _all_states(module, self.inputs)) > EXERCISED:
                self.exercised.append(case)
                return

    def two_at_once(self) -> _DoubleCase | None:
        """Return a copy with the first and the last of the rewired parts.

        The first may take away what exercises the last: then the one before it is
        taken. If no part at another site is left, there is none.
        """
        ordered = sorted(self.exercised, key=lambda case: _order(case.rewiring.site))
        first, *others = ordered
        states = _all_states(first.module, self.inputs)
        for last in reversed(others):
            if last.rewiring.site == first.rewiring.site:
                return None
            module = copy.deepcopy(first.module)
            path = last.rewiring.module
            rewired = last.module.get_submodule(path).state_dict()
            module.get_submodule(path).load_state_dict(rewired)
            if _moved(states, _all_states(module, self.inputs)) > EXERCISED:
                return _DoubleCase(module, {first.rewiring.site, last.rewiring.site})
        return None


def _moved(states: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return how far any state is moved, as a share of its norm."""
    farthest = 0.0
    for before, after in zip(states, others, strict=True):
        moved = (after - before).norm(dim=-1) / before.norm(dim=-1)
        farthest = max(farthest, moved.max().item())
    return farthest


@torch.no_grad()
def _all_states(module: nn.Module, inputs: list[list[int]]) -> list[Tensor]:
    """Run a module by itself, and return all states and the logits of every input."""
    states: list[Tensor] = []
    device = next(module.parameters()).device
    for ids in inputs:
        row = torch.tensor([ids], device=device)
        output = module(row, output_hidden_states=True)
        states += [*output.hidden_states, output.logits]
    return states


def _changed_in(module: nn.Module, other: nn.Module) -> set[str]:
    """Return the names of the weights in which a copy differs from a module."""
    weights = dict(module.named_parameters())
    different = set()
    for name, weight in other.named_parameters():
        if not torch.equal(weight, weights[name]):
            different.add(name)
    return different


def _changed_only_in(path: str, module: nn.Module, other: nn.Module) -> set[str]:
    """Return the changed weights, after making sure that one module holds them all.

    So what is asked of an analysis is what was rewired, and not merely what differs.
    """
    changed = _changed_in(module, other)
    owners = {name.rpartition(".")[0] for name in changed}
    assert owners == {path}, (owners, path)
    return changed


def _count_with_weights(module: nn.Module) -> int:
    """Count the modules that hold weights of their own."""
    owners = {name.rpartition(".")[0] for name, _ in module.named_parameters()}
    return len(owners)


def _drifting_sites(facts: Mapping[str, Any]) -> set[str]:
    return {each["site"] for each in facts["drifting_sites"]}


def _changed_weights(facts: Mapping[str, Any]) -> set[str]:
    return {each["name"] for each in facts["changed_weights"]}


def _order(site: str) -> tuple[int, int]:
    """Return where a site is in the order of the forward pass."""
    if site.startswith("layer."):
        return (0, int(site.split(".")[1]))
    return (1, int(site == "logits"))
