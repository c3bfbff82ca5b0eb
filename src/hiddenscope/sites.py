"""Site: the address of a state, the patterns that choose several, and the names other
tools give them.

    layer.3          the hidden state (residual stream) after three blocks; layer.0 enters the first
    layer.3.attn     inside the block that makes layer 3: attn, cross, mid, mlp
    final            the last layer after the model's final norm
    encoder.layer.3  the same with two stacks: encoder.*, decoder.*

    layer.*          every layer               layer.3-7    some            layer.-1    the last
    layer.3.*        every part of block 3     *.attn       one part of every block
    *                everything                a,b          a list; a pattern without a stack matches both

>>> gpt2 = [*(Site(k) for k in range(13)), Site(None)]
>>> [str(site) for site in select("layer.3-5, hidden_states[12]", gpt2)]
['layer.3', 'layer.4', 'layer.5', 'final']
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, total_ordering
from numbers import Integral
from typing import Any, Literal, TypeAlias

from hiddenscope.arguments import checked
from hiddenscope.errors import SiteError

PARTS = ("attn", "cross", "mid", "mlp")
STACKS = ("encoder", "decoder")
MOST_LAYERS = 1_000_000

_PART = "attn|cross|mid|mlp"
_STACK = r"(?:(?P<stack>encoder|decoder)\.)?"
_SITE = re.compile(
    rf"{_STACK}(?:final|layer\.(?P<layer>0|[1-9][0-9]{{0,5}})(?:\.(?P<part>{_PART}))?)"
)
_NUMBER = r"-?[0-9]{1,6}"
_PATTERN = re.compile(
    rf"{_STACK}(?:(?P<final>final)|(?P<any>\*)(?:\.(?P<anywhere>{_PART}))?"
    rf"|layer\.(?:(?P<all>\*)|(?P<low>{_NUMBER})(?:-(?P<high>{_NUMBER}))?)(?:\.(?P<part>\*|{_PART}))?)"
)
_HIDDEN = re.compile(
    rf"(?:(?P<stack>encoder|decoder)_)?hidden_states\[(?P<k>{_NUMBER})\]"
)
_LENS = re.compile(
    r"(?P<stack>blocks|encoder|decoder)\.(?P<block>[0-9]{1,6})\.hook_(?P<hook>[a-z_]+)"
)
_HOOKS = {
    "attn_out": "attn",
    "cross_attn_out": "cross",
    "resid_mid": "mid",
    "mlp_out": "mlp",
}


@checked
@total_ordering
@dataclass(frozen=True)
class Site:
    """The address of one state; sites sort in the order of the forward pass.

    >>> Site.parse("encoder.layer.3.mlp")
    Site('encoder.layer.3.mlp')
    >>> Site(2) < Site(3, "attn") < Site(3, "mid") < Site(3, "mlp") < Site(3) < Site(None)
    True
    """

    layer: int | None
    part: str = ""
    stack: str | None = None

    def __post_init__(self) -> None:
        reason = ""
        if self.layer is None:
            reason = "final has no parts" if self.part else ""
        elif isinstance(self.layer, bool) or not isinstance(self.layer, int):
            reason = "a layer is an integer, or None for final"
        elif not 0 <= self.layer < MOST_LAYERS:
            reason = f"a layer is from 0 to {MOST_LAYERS - 1:,}"
        elif self.layer == 0 and self.part:
            reason = "layer.0 enters the first block, so it has no parts"
        if self.part not in ("", *PARTS):
            reason = f"the parts of a block are {', '.join(PARTS)}"
        if self.stack not in (None, *STACKS):
            reason = (
                f"a stack is {' or '.join(STACKS)}, or None in a model with one stack"
            )
        if reason:
            problem = (
                f"No site with layer {_shown(self.layer)}, part {_shown(self.part)},"
                f" stack {_shown(self.stack)}"
            )
            raise SiteError(
                problem, reason, "Try Site(3), Site(3, 'mlp') or Site(None)."
            )

    @classmethod
    def parse(cls, text: str) -> "Site":
        """Read an address as `str(site)` prints it.

        >>> Site.parse("layer.3").layer, Site.parse("decoder.final").layer
        (3, None)
        """
        match = _SITE.fullmatch(str(text))
        if match is None:
            raise _unreadable(text)
        layer = match["layer"]
        return cls(
            None if layer is None else int(layer), match["part"] or "", match["stack"]
        )

    def __str__(self) -> str:
        steps = (
            self.stack,
            "final" if self.layer is None else f"layer.{self.layer}",
            self.part,
        )
        return ".".join(step for step in steps if step)

    def __repr__(self) -> str:
        return f"Site({str(self)!r})"

    def __lt__(self, other: object) -> bool:
        return self._order < other._order if isinstance(other, Site) else NotImplemented

    @cached_property
    def _order(self) -> tuple[int, int, int]:
        stack = 0 if self.stack is None else 1 + STACKS.index(self.stack)
        layer = MOST_LAYERS if self.layer is None else self.layer
        return stack, layer, (*PARTS, "").index(self.part)


SitePatterns: TypeAlias = str | Site | Iterable[str | Site]
"""What chooses sites: a pattern such as `"layer.3-7,final"`, a Site, or several of
either.
"""


def select(
    patterns: SitePatterns,
    sites: Sequence[Site],
    *,
    owner: str = "this model",
    depth: int | None = None,
    final: bool | None = None,
    reported: Mapping[str | None, Sequence[Site | None]] | None = None,
) -> tuple[Site, ...]:
    """The sites that the patterns choose from the given ones, each once, in the order
    of the forward pass.

    `layer.*,final` means every layer, and final if there is one; any other pattern must
    match something. `depth` (the number of blocks) and `final` (whether there is a
    final norm) are taken from the sites; give them if the sites are only some of the
    model's, because `layer.-1` and `hidden_states[k]` depend on them. `reported` gives,
    for each stack, the site that every entry of `hidden_states` was proved to be, for
    models (mamba, CLIP) where it is unusual.

    >>> bert = [Site(0), Site(1), Site(1, "attn"), Site(2), Site(2, "attn")]
    >>> [str(site) for site in select("layer.*,final", bert)], [str(site) for site in select("*.attn", bert)]
    (['layer.0', 'layer.1', 'layer.2'], ['layer.1.attn', 'layer.2.attn'])
    >>> select("layer.20", [Site(k) for k in range(13)], owner="gpt2")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No site 'layer.20' in gpt2: it has layer.0 to layer.12. Did you mean 'layer.2'?
    """
    known = _KnownSites(tuple(sorted(set(sites))), owner, depth, final, reported or {})
    items = list(_items(patterns))
    every_layer = any(re.fullmatch(r"(?:\w+\.)?layer\.\*", item) for item in items)
    chosen: set[Site] = set()
    for item in items:
        matching = known.match(item)
        if not matching and not (
            every_layer and item.rpartition(".")[2] == "final" and _SITE.fullmatch(item)
        ):
            raise known.missing(item)
        chosen |= matching
    return tuple(sorted(chosen))


def named_layer(site: Any) -> Any:
    """A whole number as the layer that it names; anything else as it is.

    >>> named_layer(3), named_layer("final")
    ('layer.3', 'final')
    """
    if isinstance(site, bool) or not isinstance(site, Integral):
        return site
    if site < 0:
        reason = (
            "the last may be the raw last layer or final, and Hugging Face's is either"
        )
        raise SiteError(
            f"No site {int(site)}",
            reason,
            f"Did you mean 'layer.{int(site)}'? Or 'final'.",
        )
    return f"layer.{int(site)}"


def check_syntax(patterns: SitePatterns) -> None:
    """Refuse patterns that no model could match, before one is loaded.

    >>> check_syntax("layer.3-7, final, *.attn, hidden_states[2]")
    >>> check_syntax("")
    Traceback (most recent call last):
    hiddenscope.errors.SiteError: No site '': it is empty. Choose 'layer.3', 'layer.*' or 'final'.
    """
    for item in _items(patterns):
        if (
            not any(form.fullmatch(item) for form in (_PATTERN, _HIDDEN, _LENS))
            and item != "ln_final.hook_normalized"
        ):
            raise _unreadable(item)


def from_alias(name: str, *, depth: int, final: bool) -> Site:
    """The site that Hugging Face or TransformerLens calls `name`, in a stack of `depth`
    blocks.

    `hidden_states[depth]` is `final` if the model has a final norm: Hugging Face norms
    the last entry and no other. TransformerLens takes the residual stream before a
    post-norm block's own norm, so in a model without a final norm only its
    `hook_resid_pre` and `hook_normalized_resid_post` are sites.

    >>> from_alias("hidden_states[5]", depth=12, final=True), from_alias("hidden_states[12]", depth=12, final=True)
    (Site('layer.5'), Site('final'))
    >>> from_alias("blocks.4.hook_resid_post", depth=12, final=True)
    Site('layer.5')
    """
    if match := _HIDDEN.fullmatch(name):
        k = int(match["k"])
        k += depth + 1 if k < 0 else 0
        if not 0 <= k <= depth:
            raise SiteError(
                f"No {_shown(name)}",
                f"the tuple has {depth + 1} entries",
                f"Choose 0 to {depth}.",
            )
        return Site(None if final and k == depth else k, stack=match["stack"])
    if match := _LENS.fullmatch(name):
        return _from_lens(name, match, depth, final)
    if name == "ln_final.hook_normalized":
        reason = (
            "TransformerLens records it before the norm's own weight, so it is not"
            " final"
        )
        remedy = "Choose 'final', or the raw last layer, 'layer.-1'."
        raise SiteError(f"No site for {_shown(name)}", reason, remedy)
    raise _unreadable(name)


def to_alias(
    site: Site,
    kind: Literal["hidden_states", "transformer_lens"],
    *,
    depth: int,
    final: bool,
) -> str | None:
    """What Hugging Face or TransformerLens calls this site; None if it has no name
    there.

    >>> to_alias(Site(5), "transformer_lens", depth=12, final=True)
    'blocks.4.hook_resid_post'
    >>> print(to_alias(Site(12), "hidden_states", depth=12, final=True))  # Hugging Face overwrites the raw last layer
    None
    """
    if (site.layer or 0) > depth or (site.layer is None and not final):
        return None
    if kind == "hidden_states":
        if site.part or (final and site.layer == depth):
            return None
        k = depth if site.layer is None else site.layer
        return (
            f"{site.stack}_hidden_states[{k}]" if site.stack else f"hidden_states[{k}]"
        )
    if kind == "transformer_lens":
        return _to_lens(site, final)
    raise SiteError(
        f"No names of the kind {_shown(kind)}",
        "the kinds are 'hidden_states' and 'transformer_lens'",
        "Choose one of them.",
    )


def summarise(sites: Iterable[Site]) -> str:
    """A short phrase for many sites.

    >>> summarise([Site(0), Site(1, "attn"), Site(1), Site(2), Site(9), Site(None)])
    'layer.0 to layer.2, layer.9 with attn inside and final'
    """
    ordered = sorted(set(sites))
    phrases = [
        _summarise_stack([site for site in ordered if site.stack == stack])
        for stack in (None, *STACKS)
    ]
    return "; ".join(phrase for phrase in phrases if phrase) or "no sites"


def _summarise_stack(sites: list[Site]) -> str:
    if not sites:
        return ""
    prefix = f"{sites[0].stack}." if sites[0].stack else ""
    layers = ", ".join(
        _runs(
            [site.layer for site in sites if site.layer is not None and not site.part],
            prefix,
        )
    )
    parts = [part for part in PARTS if any(site.part == part for site in sites)]
    if parts:
        layers = (
            f"{layers} with {', '.join(parts)} inside"
            if layers
            else f"{', '.join(parts)} of some blocks"
        )
    final = f"{prefix}final" if any(site.layer is None for site in sites) else ""
    return " and ".join(phrase for phrase in (layers, final) if phrase)


def _runs(layers: list[int], prefix: str) -> Iterator[str]:
    start = 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or layers[end] != layers[end - 1] + 1:
            first, last = (
                f"{prefix}layer.{layers[start]}",
                f"{prefix}layer.{layers[end - 1]}",
            )
            yield first if end - start == 1 else f"{first} to {last}"
            start = end


@dataclass(frozen=True)
class _KnownSites:
    """The sites to choose from, and what is needed to match a pattern against them."""

    sites: tuple[Site, ...]
    owner: str
    depth: int | None
    final: bool | None
    reported: Mapping[str | None, Sequence[Site | None]]

    @cached_property
    def depths(self) -> dict[str | None, int]:
        depths: dict[str | None, int] = {}
        for site in self.sites:
            depths[site.stack] = self.depth or max(
                depths.get(site.stack, 0), site.layer or 0
            )
        return depths

    def match(self, item: str) -> set[Site]:
        if pattern := _PATTERN.fullmatch(item):
            layers = {stack: self._layers(pattern, stack) for stack in self.depths}
            return {
                site for site in self.sites if _fits(site, pattern, layers[site.stack])
            }
        if self.reported and (entry := _HIDDEN.fullmatch(item)):
            return self._match_entry(entry)
        if (
            _HIDDEN.fullmatch(item)
            or _LENS.fullmatch(item)
            or item == "ln_final.hook_normalized"
        ):
            return self._match_alias(item)
        raise _unreadable(item, [str(site) for site in self.sites])

    def missing(self, item: str) -> SiteError:
        problem = f"No site {_shown(item)} in {self.owner}"
        wants_final = _SITE.fullmatch(item) is not None and item.endswith("final")
        if (
            wants_final
            and self.final is not True
            and not any(site.layer is None for site in self.sites)
        ):
            last = ", ".join(
                f"'{Site(depth, stack=stack)}'" for stack, depth in self.depths.items()
            )
            return SiteError(
                problem,
                f"it has no final norm; its last state is {last}",
                f"Choose {last}.",
            )
        return SiteError(
            problem,
            f"it has {summarise(self.sites)}",
            _nearest(item, [str(site) for site in self.sites]),
        )

    def _layers(self, pattern: re.Match[str], stack: str | None) -> range:
        if pattern["low"] is None:
            return range(MOST_LAYERS)
        ends = [int(end) for end in (pattern["low"], pattern["high"] or pattern["low"])]
        low, high = (end + self.depths[stack] + 1 if end < 0 else end for end in ends)
        if low > high:
            problem = f"No sites {_shown(pattern[0])} in {self.owner}"
            raise SiteError(
                problem, "the range runs backwards", "Write the lower layer first."
            )
        return range(low, high + 1) if high <= max(self.depths.values()) else range(0)

    def _match_entry(self, entry: re.Match[str]) -> set[Site]:
        k = int(entry["k"])
        stacks = [
            named
            for stack, named in self.reported.items()
            if entry["stack"] in (None, stack)
        ]
        entries = [named[k] for named in stacks if -len(named) <= k < len(named)]
        if None in entries:
            reason = (
                "it is the output of the stack, and no state of a block or of a final"
                " norm"
            )
            raise SiteError(
                f"No site '{entry[0]}' in {self.owner}",
                reason,
                "Choose 'layer.-1', the raw last layer.",
            )
        return {site for site in entries if site is not None} & set(self.sites)

    def _match_alias(self, name: str) -> set[Site]:
        matching: set[Site] = set()
        refusal: SiteError | None = None
        for stack, depth in self.depths.items():
            final = self.final
            if final is None:
                final = any(
                    site.layer is None and site.stack == stack for site in self.sites
                )
            try:
                site = from_alias(name, depth=depth, final=final)
            except SiteError as error:
                refusal = error
            else:
                matching |= (
                    {Site(site.layer, site.part, stack)}
                    if site.stack in (None, stack)
                    else set()
                )
        matching &= set(self.sites)
        if refusal and not matching:
            raise refusal
        return matching


def _fits(site: Site, pattern: re.Match[str], layers: range) -> bool:
    if pattern["stack"] not in (None, site.stack):
        return False
    if pattern["final"]:
        return site.layer is None
    if pattern["any"]:
        return pattern["anywhere"] in (None, site.part)
    part = pattern["part"] or ""
    return (
        site.layer is not None
        and site.layer in layers
        and (bool(site.part) if part == "*" else site.part == part)
    )


def _items(patterns: SitePatterns) -> Iterator[str]:
    given: object = patterns
    many = (
        isinstance(given, Iterable)
        and not isinstance(given, str | Site)
        and getattr(given, "shape", None) != ()
    )
    listed: list[object] = (
        list(given) if many and isinstance(given, Iterable) else [given]
    )
    if not listed:
        raise SiteError(
            "No sites", "the list of patterns is empty", "Choose 'layer.*' or 'final'."
        )
    for pattern in listed:
        if not isinstance(pattern, str | Site):
            raise _unreadable(pattern)
        yield from (item.strip(" \t\n") for item in str(pattern).split(","))


def _from_lens(name: str, match: re.Match[str], depth: int, final: bool) -> Site:
    block, hook = int(match["block"]), match["hook"]
    stack = None if match["stack"] == "blocks" else match["stack"]
    if block >= depth:
        reason = f"there are {depth} blocks, counted from 0"
        raise SiteError(
            f"No block {block} for {_shown(name)}", reason, f"Choose 0 to {depth - 1}."
        )
    if hook == "resid_pre":
        return Site(block, stack=stack)
    if hook == ("resid_post" if final else "normalized_resid_post"):
        return Site(block + 1, stack=stack)
    if not final and (hook == "resid_post" or hook in _HOOKS):
        reason = (
            "in a model without a final norm TransformerLens takes it before the"
            " block's own norm"
        )
        raise SiteError(
            f"No site for {_shown(name)}",
            reason,
            f"Choose 'layer.{block + 1}', the block's output.",
        )
    if stack == "decoder" and hook in ("resid_mid", "resid_mid_cross"):
        hook = "resid_mid" if hook == "resid_mid_cross" else ""
    if hook not in _HOOKS:
        raise _unreadable(name)
    return Site(block + 1, _HOOKS[hook], stack)


def _to_lens(site: Site, final: bool) -> str | None:
    if site.layer is None or (site.part and not final):
        return None
    blocks = site.stack or "blocks"
    if site.layer == 0:
        return f"{blocks}.0.hook_resid_pre"
    hooks = {part: hook for hook, part in _HOOKS.items()} | {
        "": "resid_post" if final else "normalized_resid_post"
    }
    hook = (
        "resid_mid_cross"
        if site.stack == "decoder" and site.part == "mid"
        else hooks[site.part]
    )
    return f"{blocks}.{site.layer - 1}.hook_{hook}"


def _unreadable(given: object, known: Sequence[str] = ()) -> SiteError:
    if not isinstance(given, bool) and isinstance(given, Integral):
        number = _shown(int(given))
        return SiteError(
            f"No site {number}", "a site is a string", f"Did you mean 'layer.{number}'?"
        )
    if isinstance(given, str) and not given:
        return SiteError(
            "No site ''", "it is empty", "Choose 'layer.3', 'layer.*' or 'final'."
        )
    hint = "Choose 'layer.3', 'layer.*' or 'final'."
    if isinstance(given, str):
        hint = _nearest(given, _same_layer(given, known))
    return SiteError(
        f"No site {_shown(given)}",
        "sites look like 'layer.3', 'layer.3.attn' or 'final'",
        hint,
    )


def _same_layer(item: str, known: Sequence[str]) -> Sequence[str]:
    """The sites that a misspelt one may stand for: of the layer that it names, where it
    names one.
    """
    number = re.search("[0-9]{1,9}", item)
    if number is None:
        return known or ["layer.*", "final"]
    layer = f"layer.{int(number[0])}"
    of_layer = [site for site in known if f".{layer}." in f".{site}."]
    return of_layer or [layer, *(f"{layer}.{part}" for part in PARTS)]


def _nearest(item: str, known: Sequence[str]) -> str:
    bare = not item.startswith(STACKS)
    forms = dict.fromkeys(
        form.partition(".")[2] if bare and form.startswith(STACKS) else form
        for form in known
    )
    near = get_close_matches(item[:60].lower(), forms, n=1, cutoff=0.4)
    return (
        f"Did you mean '{near[0]}'?" if near else "Choose one of those, or 'layer.*'."
    )


def _shown(given: object) -> str:
    try:
        text = repr(given)
    except ValueError:  # Python prints no int of more than 4,300 digits
        text = "a very large number"
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"
