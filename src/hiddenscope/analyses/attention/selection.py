"""Selection: the attentions, heads and queries that are asked for."""

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple, TypeAlias

from hiddenscope.arguments import shown
from hiddenscope.discovery.anatomy import why_refused
from hiddenscope.errors import SiteError, TextError
from hiddenscope.model import Model
from hiddenscope.passes.attention_weights import WatchedAttention
from hiddenscope.sites import Site

NumberChoice: TypeAlias = int | Sequence[int] | str
"""One number, several, or a string such as "3", "0-3" or "1,7"."""

Layers: TypeAlias = int | str | Site | Sequence[int | str | Site]
"""Layers by their numbers, or patterns of sites such as "decoder.layer.2-4.cross"."""

_RANGE = r"(?:-?[0-9]{1,6}|[0-9]{1,6}-[0-9]{1,6})"
_NUMBERS = re.compile(rf"{_RANGE}(?:\s*,\s*{_RANGE})*")
_BRANCHES = ("attn", "cross")


class Selection(NamedTuple):
    """Attentions of one stack, all of itself or all of the encoder.

    `notes` say which were left out.
    """

    attentions: tuple[WatchedAttention, ...]
    notes: tuple[str, ...]

    @property
    def sites(self) -> list[Site]:
        """Return the sites of the attentions."""
        return [part.site for part in self.attentions]

    @property
    def stack(self) -> str | None:
        """Return the stack whose tokens read."""
        return self.attentions[0].site.stack

    @property
    def key_stack(self) -> str | None:
        """Return the stack whose tokens are read."""
        return "encoder" if self.is_cross else self.stack

    @property
    def is_cross(self) -> bool:
        """Tell whether a decoder reads the tokens of its encoder."""
        return self.attentions[0].site.part == "cross"

    @property
    def heads(self) -> list[int]:
        """Return the heads of all attentions."""
        return sorted({*chain(*[part.heads for part in self.attentions])})

    @property
    def columns(self) -> dict[Site, list[int]]:
        """Return where the heads of each attention stand among all heads."""
        heads = self.heads
        return {
            part.site: list(map(heads.index, part.heads)) for part in self.attentions
        }


def select_attentions(
    model: Model, layers: Layers | None, heads: NumberChoice | None
) -> Selection:
    """Return the attentions that are asked for; refuse what is not there."""
    sites = _sites(model, layers)
    # Queries, and keys, must be tokens of one text.
    kinds = sorted({(site.stack or "", site.part) for site in sites})
    if len(kinds) > 1:
        patterns = [f"'{stack}.*.{part}'" for stack, part in kinds]
        raise SiteError(
            f"Cannot show these attentions of {model.name} together",
            "an encoder, a decoder and cross-attention read different tokens",
            f"Choose one of {', '.join(patterns)}.",
        )
    known = []
    reasons: dict[str, list[Site]] = {}
    # The kernel may have been changed since the last look.
    model.anatomy.look_inside()
    for site in sites:
        block = model.anatomy.block_inside(site)
        branch = block.branches.get(site.branch)
        if branch is None or branch.heads is None or branch.projection is None:
            inner = Site(site.layer, f"{site.part}.z", site.stack)
            reason = why_refused(block, inner) or "its heads cannot be told apart"
            reasons.setdefault(reason, []).append(site)
            continue
        if branch.heads.has_other_keys and site.part == "attn":
            reason = "it reads the tokens of both stacks at once"
            reasons.setdefault(reason, []).append(site)
            continue
        every_head = tuple(range(branch.heads.heads))
        known.append(
            WatchedAttention(site, branch.heads, branch.projection, every_head)
        )
    # Layers that were named must be there; of all layers, some may have no attention.
    if reasons and (layers is not None or not known):
        reason, refused = next(iter(reasons.items()))
        remedy = "Record whole layers, such as 'layer.*', or use another model."
        if known:
            remedy = f"Choose others, such as {str(known[0].site)!r}."
        raise SiteError(
            f"No attention weights at {refused[0]} of {model.name}",
            reason,
            remedy,
        )
    notes = []
    for reason, refused in reasons.items():
        names = ", ".join(map(str, refused))
        notes.append(f"Without {names}: {reason}.")
    if heads is not None:
        numbers = parse_numbers(heads, "heads")
        most = max(len(part.heads) for part in known)
        for head in numbers:
            if not 0 <= head < most:
                raise SiteError(
                    f"No head {head} in {model.name}",
                    f"an attention has {most} heads there, counted from 0",
                    f"Choose 0 to {most - 1}.",
                )
        some = []
        for part in known:
            # Blocks may differ in their number of heads.
            present = set(part.heads) & set(numbers)
            if present:
                some.append(replace(part, heads=tuple(sorted(present))))
        known = some
    return Selection(tuple(known), tuple(notes))


def _sites(model: Model, layers: Layers | None) -> list[Site]:
    """Return the sites of the attentions that are asked for."""
    stack = model.anatomy.stacks[-1]
    name = model.anatomy.sites[-1].stack
    numbers = range(1, stack.depth + 1)
    if layers is None:
        return [Site(layer, "attn", name) for layer in numbers]
    sites: set[Site] = set()
    items = [layers] if isinstance(layers, int | str | Site) else list(layers)
    if not items:
        raise SiteError(
            "No layers to show", "the list is empty", f"Choose 1 to {stack.depth}."
        )
    for item in items:
        if not _NUMBERS.fullmatch(str(item).strip()):
            sites.update(model.anatomy.select([str(item)]))
            continue
        for number in parse_numbers(str(item), "layers"):
            # -1 is the last layer, as in the pattern layer.-1.
            layer = number + stack.depth + 1 if number < 0 else number
            if layer not in numbers:
                raise SiteError(
                    f"No attention in layer {number} of {model.name}",
                    f"its {stack.depth} blocks make layer 1 to layer {stack.depth}",
                    "Choose some of these.",
                )
            sites.add(Site(layer, "attn", name))
    for site in sorted(sites):
        if site.part not in _BRANCHES:
            place = "*" if site.layer is None else f"layer.{site.layer}"
            raise SiteError(
                f"No attention weights at {site}",
                "weights are of a whole attention, attn or cross",
                f"Choose '{place}.attn', and heads= for some of its heads.",
            )
    return sorted(sites)


def select_positions(queries: NumberChoice | None, tokens: int) -> list[int]:
    """Return the positions of the queries that are asked for, in order.

    >>> select_positions([-1, 0], 7), select_positions("2-4", 7)
    ([0, 6], [2, 3, 4])
    """
    if queries is None:
        return list(range(tokens))
    positions = set()
    for number in parse_numbers(queries, "queries"):
        position = number + tokens if number < 0 else number
        if not 0 <= position < tokens:
            raise TextError(
                f"No query {number}",
                f"the text has {tokens:,} tokens",
                f"Choose 0 to {tokens - 1}, or -1 for the last.",
            )
        positions.add(position)
    return sorted(positions)


def parse_numbers(value: NumberChoice, name: str) -> list[int]:
    """Return the different numbers of a list, or of a string of numbers and ranges.

    >>> parse_numbers("0-2, 7", "heads"), parse_numbers(-1, "queries")
    ([0, 1, 2, 7], [-1])
    """
    if isinstance(value, int):
        return [value]
    numbers = []
    if not isinstance(value, str):
        numbers = [int(number) for number in value]
    elif _NUMBERS.fullmatch(value.strip()):
        for word in value.split(","):
            ends = re.fullmatch(r"\s*([0-9]+)-([0-9]+)\s*", word)
            if ends is None:
                numbers.append(int(word))
            else:
                numbers += range(int(ends[1]), int(ends[2]) + 1)
    if not numbers:
        raise TextError(
            f"Cannot read {name}={shown(value)}",
            "it names no number",
            f"Give {name} such as 3, '0-3' or '1,7'.",
        )
    return list(dict.fromkeys(numbers))
