"""Asked: which states of which texts a lens reads, and is fitted on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hiddenscope.errors import PassError, SiteError
from hiddenscope.model import Model
from hiddenscope.passes import Encoded, Texts
from hiddenscope.sites import Site
from hiddenscope.states import States

TOKENS = 2_048  # of a group of texts whose states are held at one time


@dataclass(frozen=True)
class Asked:
    """Texts one by one, with the decoder's where there are any, and how many tokens the lens sees of each."""

    texts: list[Any]
    targets: list[Any] | None
    lengths: list[int]

    def some(self, numbers: Sequence[int]) -> "Asked":
        """Some of the texts."""
        targets = None if self.targets is None else [self.targets[number] for number in numbers]
        return Asked([self.texts[n] for n in numbers], targets, [self.lengths[n] for n in numbers])

    def groups(self) -> Iterator[slice]:
        """Runs of texts of a few thousand tokens together."""
        begin = held = 0
        for end, length in enumerate(self.lengths):
            if held and held + length > TOKENS:
                yield slice(begin, end)
                begin, held = end, 0
            held += length
        yield slice(begin, len(self.lengths))


@dataclass(frozen=True)
class Plan:
    """Which states are read: whole layers of the stack that the head stands on, the last always, `final` if asked."""

    layers: tuple[Site, ...]
    final: Site | None
    asked: tuple[Site, ...]
    causal: bool

    @property
    def last(self) -> Site:
        """The last layer, whose words are the model's own."""
        return self.layers[-1]

    @property
    def rows(self) -> tuple[Site, ...]:
        """Every state that is read."""
        return (*self.layers, *([self.final] if self.final else []))


def plan_of(model: Model, sites: Any) -> Plan:
    """Which states the sites mean; what the head does not stand on is refused."""
    stack = model.anatomy.stacks[-1]
    name = stack.name if len(model.anatomy.stacks) > 1 else None
    chosen = model.anatomy.select(sites)
    asked = tuple(site for site in chosen if site.stack == name)
    inside = [site for site in asked if site.part]
    if inside or not asked:
        what = f"{inside[0]} is inside a block" if inside else f"the head reads the {name}, and these are elsewhere"
        remedy = f"Ask for whole layers{f' of the {name}' if name else ''}, or `final`."
        raise SiteError(f"A lens of {model.name} at {sites}", what, remedy)
    last = Site(stack.depth, "", name)
    final = next((site for site in asked if site.layer is None), None)
    layers = sorted({*(site for site in asked if site.layer is not None), last})
    return Plan(tuple(layers), final, asked, stack.causal)


def states_of(model: Model, texts: Asked, some: slice, plan: Plan) -> States:
    """The states of a run of the texts."""
    targets = None if texts.targets is None else texts.targets[some]
    states = model.capture(texts.texts[some], list(plan.rows), targets=targets)
    assert isinstance(states, States), "the sites are in one stack"
    return states


def listed(model: Model, text: Texts, targets: Texts | None) -> Asked:
    """The texts and the decoder's texts one by one: strings, or lists of ids."""
    two = len(model.anatomy.stacks) > 1
    if targets is not None and not two:
        raise PassError("Targets for a decoder", f"{model.name} has one stack", "Leave `targets` out.")
    with model.lock:
        encoded = model.encoder.encode(text)
        seen = model.encoder.targets(targets, len(encoded.ids)) if two else encoded
        given = None if targets is None else model.encoder.encode(targets)
    return Asked(_items(encoded), None if given is None else _items(given), seen.lengths)


def _items(encoded: Encoded) -> list[Any]:
    return list(encoded.texts or map(list, encoded.ids))
