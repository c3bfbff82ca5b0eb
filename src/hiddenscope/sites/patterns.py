"""Patterns: select several sites, and describe several in a phrase."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any, TypeAlias

from hiddenscope.errors import SiteError
from hiddenscope.sites.site import (
    HIDDEN_STATES,
    MOST_LAYERS,
    PARTS,
    STACK,
    Site,
    from_alias,
    is_alias,
    names_final,
    nearest,
    not_a_site,
    quoted,
)

_PART = "attn|cross|mid|mlp"
_NUMBER = r"-?[0-9]{1,6}"
_INDICES = r"(?:\*|[0-9]{1,6}(?:-[0-9]{1,6})?)"
_INNER = (
    rf"(?:attn|cross)\.(?:[qkvz]|head\.{_INDICES})"
    rf"|mlp\.(?:neurons|neuron\.{_INDICES})|router"
)
_PATTERN = re.compile(
    rf"{STACK}(?:(?P<final>final)|(?P<any>\*)(?:\.(?P<anywhere>{_INNER}|{_PART}))?"
    rf"|layer\.(?:(?P<all>\*)|(?P<low>{_NUMBER})(?:-(?P<high>{_NUMBER}))?)"
    rf"(?:\.(?P<part>\*|{_INNER}|{_PART}))?)"
)
_INNER_PATTERN = re.compile(rf"(?:.*\.)?(?:{_INNER})")

SitePatterns: TypeAlias = str | Site | Iterable[str | Site]
"""A pattern such as `"layer.3-7,final"`, a Site, or several of either."""


def select(
    patterns: SitePatterns,
    sites: Sequence[Site],
    *,
    owner: str = "this model",
    depth: int | None = None,
    final: bool | None = None,
    reported: Mapping[str | None, Sequence[Site | None]] | None = None,
) -> tuple[Site, ...]:
    """Return the sites that patterns select, each once, in the order of the pass.

    `layer.*,final` means every layer and final, as far as they are there; any other
    pattern must match something. `depth` (the number of blocks) and `final` (whether there is a
    final norm) are taken from the sites; give them if the sites are only some of the
    model's, because `layer.-1` and `hidden_states[k]` depend on them. `reported` gives,
    for each stack, the site that every entry of `hidden_states` was proved to be, for
    models (mamba, CLIP) where it is unusual.

    >>> bert = [Site(0), Site(1), Site(1, "attn"), Site(2), Site(2, "attn")]
    >>> [str(site) for site in select("layer.*,final", bert)]
    ['layer.0', 'layer.1', 'layer.2']
    >>> select("layer.20", [Site(k) for k in range(13)], owner="gpt2")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No site 'layer.20' in gpt2: it has layer.0 to layer.12. Did you mean 'layer.2'?
    """  # noqa: E501
    known = _KnownSites(tuple(sorted(set(sites))), owner, depth, final, reported or {})
    items = list(_items(patterns))
    layers = [item for item in items if re.fullmatch(r"(?:\w+\.)?layer\.\*", item)]
    finals = [item for item in items if names_final(item)]
    optional = [*layers, *finals] if layers and finals else []
    selected: set[Site] = set()
    for item in items:
        matches = known.match(item)
        if not matches and item not in optional:
            raise known.missing(item)
        selected |= matches
    if optional and not selected:
        raise known.missing(optional[0])
    return tuple(sorted(selected))


def named_layer(site: Any) -> Any:
    """Return the name of the layer that an integer names; anything else unchanged.

    >>> named_layer(3), named_layer("final")
    ('layer.3', 'final')
    """
    if isinstance(site, bool) or not isinstance(site, Integral):
        return site
    if site < 0:
        raise SiteError(
            f"No site {int(site)}",
            "the last may be the raw last layer or final, and Hugging Face's is either",
            f"Did you mean 'layer.{int(site)}'? Or 'final'.",
        )
    return f"layer.{int(site)}"


def check_syntax(patterns: SitePatterns) -> None:
    """Refuse patterns that no model could match, before one is loaded.

    >>> check_syntax("layer.3-7, final, *.attn, hidden_states[2]")
    >>> check_syntax("")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No site '': it is empty. Choose 'layer.3', 'layer.*' or 'final'.
    """  # noqa: E501
    for item in _items(patterns):
        if not _PATTERN.fullmatch(item) and not is_alias(item):
            raise not_a_site(item)


def names_inner(patterns: SitePatterns) -> bool:
    """Tell whether patterns name sites inside attention or the MLP.

    >>> names_inner("layer.*, *.attn.head.*"), names_inner("layer.3.*")
    (True, False)
    """
    for item in _items(patterns):
        is_hook = ".hook_" in item and is_alias(item)
        if is_hook or _INNER_PATTERN.fullmatch(item):
            return True
    return False


def names_neurons(patterns: SitePatterns) -> bool:
    """Tell whether patterns name single neurons, of which a model has very many."""
    return any(".neuron." in item for item in _items(patterns))


def summarise(sites: Iterable[Site]) -> str:
    """Describe many sites in a short phrase.

    >>> summarise([Site(0), Site(1, "attn"), Site(1), Site(2), Site(9), Site(None)])
    'layer.0 to layer.2, layer.9 with attn inside and final'
    """
    by_stack: dict[str | None, list[Site]] = {}
    for site in sorted(set(sites)):
        by_stack.setdefault(site.stack, []).append(site)
    phrases = [_summarise_stack(of_stack) for of_stack in by_stack.values()]
    return "; ".join(phrases) or "no sites"


def _summarise_stack(sites: list[Site]) -> str:
    prefix = f"{sites[0].stack}." if sites[0].stack else ""
    layers = [site.layer for site in sites if site.layer is not None and not site.part]
    phrase = ", ".join(_runs(layers, prefix))
    present = {site.part for site in sites}
    parts = ", ".join(part for part in PARTS if part in present)
    if parts and phrase:
        phrase = f"{phrase} with {parts} inside"
    elif parts:
        phrase = f"{parts} of some blocks"
    phrases = [phrase] if phrase else []
    phrases += _summarise_inner(sites, prefix)
    # Final sorts last.
    if sites[-1].layer is None:
        phrases.append(f"{prefix}final")
    *others, last = phrases
    return f"{', '.join(others)} and {last}" if others else last


def _summarise_inner(sites: Iterable[Site], prefix: str) -> Iterator[str]:
    """Yield a phrase for each kind of site inside attention and MLP."""
    blocks: dict[str, list[int]] = defaultdict(list)
    counts: dict[str, int] = defaultdict(int)
    for site in sites:
        if site.is_inner and site.layer is not None:
            counts[site.kind] += 1
            if site.layer not in blocks[site.kind]:
                blocks[site.kind].append(site.layer)
    for kind, layers in blocks.items():
        where = ", ".join(_runs(layers, prefix))
        noun = kind.rpartition(".")[2]
        if noun in ("head", "neuron"):
            plural = "" if counts[kind] == 1 else "s"
            yield f"{counts[kind]:,} {kind}{plural} of {where}"
        else:
            yield f"{kind} of {where}"


def _runs(layers: list[int], prefix: str) -> Iterator[str]:
    """Yield `layer.3 to layer.7` for every run of layers that follow one another."""
    start = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end] != layers[end - 1] + 1:
            run = f"{prefix}layer.{layers[start]}"
            if end - start > 1:
                run += f" to {prefix}layer.{layers[end - 1]}"
            yield run
            start = end


@dataclass(frozen=True)
class _KnownSites:
    """The sites to select from, and what is needed to match a pattern with them."""

    sites: tuple[Site, ...]
    owner: str
    depth: int | None
    final: bool | None
    reported: Mapping[str | None, Sequence[Site | None]]

    @cached_property
    def depths(self) -> dict[str | None, int]:
        depths: dict[str | None, int] = {}
        for site in self.sites:
            deepest = max(depths.get(site.stack, 0), site.layer or 0)
            depths[site.stack] = self.depth or deepest
        return depths

    def match(self, item: str) -> set[Site]:
        pattern = _PATTERN.fullmatch(item)
        if pattern:
            layers = {stack: self._layers(pattern, stack) for stack in self.depths}
            return {
                site for site in self.sites if _fits(site, pattern, layers[site.stack])
            }
        entry = HIDDEN_STATES.fullmatch(item)
        if entry and self.reported:
            return self._match_entry(entry)
        if is_alias(item):
            return self._match_alias(item)
        raise not_a_site(item, [str(site) for site in self.sites])

    def missing(self, item: str) -> SiteError:
        problem = f"No site {quoted(item)} in {self.owner}"
        names = [str(site) for site in self.sites]
        has_final = self.final or any(site.layer is None for site in self.sites)
        if names_final(item) and not has_final:
            last_sites = [
                f"'{Site(depth, stack=stack)}'" for stack, depth in self.depths.items()
            ]
            last = ", ".join(last_sites)
            reason = f"it has no final norm; its last state is {last}"
            return SiteError(problem, reason, f"Choose {last}.")
        indexed = re.fullmatch(r"(.*\.(head|neuron))\.([0-9]+)(?:-[0-9]+)?", item)
        siblings = self.match(f"{indexed[1]}.*") if indexed else set()
        if indexed and siblings:
            # It is beyond the last.
            count = max(site.index or 0 for site in siblings) + 1
            noun = indexed[2]
            reason = f"it has {count:,} {noun}s there, counted from 0"
            remedy = f"Choose '{noun}.0' to '{noun}.{count - 1}'."
            return SiteError(problem, reason, remedy)
        reason = f"it has {summarise(self.sites)}"
        return SiteError(problem, reason, nearest(item, names))

    def _layers(self, pattern: re.Match[str], stack: str | None) -> range:
        if pattern["low"] is None:
            return range(MOST_LAYERS)
        ends = []
        for end in filter(None, pattern.group("low", "high")):
            layer = int(end)
            # Negative ones count from the end.
            ends.append(layer + self.depths[stack] + 1 if layer < 0 else layer)
        low, high = ends[0], ends[-1]
        if low > high:
            raise SiteError(
                f"No sites {quoted(pattern[0])} in {self.owner}",
                "the range runs backwards",
                "Write the lower layer first.",
            )
        return range(low, high + 1) if high <= max(self.depths.values()) else range(0)

    def _match_entry(self, entry: re.Match[str]) -> set[Site]:
        """Match an entry of `hidden_states` with the site that it was proved to be."""
        k = int(entry["k"])
        matches: set[Site] = set()
        for stack, reported in self.reported.items():
            if entry["stack"] not in (None, stack):
                continue
            if not -len(reported) <= k < len(reported):
                continue
            site = reported[k]
            if site is None:
                raise SiteError(
                    f"No site '{entry[0]}' in {self.owner}",
                    "it is the output of the stack, and no state of a block or of a"
                    " final norm",
                    "Choose 'layer.-1', the raw last layer.",
                )
            matches.add(site)
        return matches & set(self.sites)

    def _match_alias(self, name: str) -> set[Site]:
        finals = {site.stack for site in self.sites if site.layer is None}
        matches: set[Site] = set()
        refusal: SiteError | None = None
        for stack, depth in self.depths.items():
            final = stack in finals if self.final is None else self.final
            try:
                site = from_alias(name, depth=depth, final=final)
            except SiteError as error:
                refusal = error
                continue
            if site.stack in (None, stack):
                matches.add(Site(site.layer, site.part, stack))
        matches &= set(self.sites)
        if refusal and not matches:
            raise refusal
        return matches


def _fits(site: Site, pattern: re.Match[str], layers: range) -> bool:
    if pattern["stack"] not in (None, site.stack):
        return False
    if pattern["final"]:
        return site.layer is None
    if pattern["any"]:
        anywhere = pattern["anywhere"]
        return not site.is_inner if anywhere is None else _fits_part(site, anywhere)
    if site.layer is None or site.layer not in layers:
        return False
    if pattern["part"] == "*":
        return bool(site.part) and not site.is_inner
    return _fits_part(site, pattern["part"] or "")


def _fits_part(site: Site, part: str) -> bool:
    """Tell whether a site is of a part, or one of several heads or neurons."""
    if site.index is None:
        return site.part == part
    kind, _, numbers = part.rpartition(".")
    if site.kind != kind:
        return False
    if numbers == "*":
        return True
    low, _, high = numbers.partition("-")
    return int(low) <= site.index <= int(high or low)


def _items(patterns: SitePatterns) -> Iterator[str]:
    """Yield the patterns one by one, of lists with commas too."""
    several: list[object] = [patterns]
    # An array without dimensions says that it can be iterated, and cannot.
    is_scalar = getattr(patterns, "shape", None) == ()
    is_single = isinstance(patterns, str | Site) or is_scalar
    if isinstance(patterns, Iterable) and not is_single:
        several = list(patterns)
    if not several:
        raise SiteError(
            "No sites", "the list of patterns is empty", "Choose 'layer.*' or 'final'."
        )
    for pattern in several:
        if not isinstance(pattern, str | Site):
            raise not_a_site(pattern)
        for item in str(pattern).split(","):
            yield item.strip(" \t\n")
