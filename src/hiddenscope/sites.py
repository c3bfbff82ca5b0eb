"""Sites: the addresses of states, the patterns that select several, and the names that
other tools give them.

    layer.3              the hidden state (residual stream) after three blocks
    layer.0              the state that enters the first block
    layer.3.attn         inside the block that makes layer 3: attn, cross, mid, mlp
    layer.3.attn.head.5  inside its attention: q, k, v, z, head.0, head.1, ...
    layer.3.mlp.neurons  inside its MLP: input, neurons, neuron.0, neuron.1, ...
    layer.3.router       the probabilities over the experts of its MLP
    final                the last layer after the model's final norm
    encoder.layer.3      the same with two stacks: encoder.*, decoder.*

    layer.*          every layer
    layer.3-7        some layers
    layer.-1         the last layer
    layer.3.*        attn, cross, mid and mlp of block 3
    *.attn           one part of every block
    *.attn.head.*    every head; head.0-3 are some of a block
    *                everything but the sites inside attention and MLP
    a,b              a list

A pattern without a stack matches both.

>>> gpt2 = [*(Site(k) for k in range(13)), Site(None)]
>>> [str(site) for site in select("layer.3-5, hidden_states[12]", gpt2)]
['layer.3', 'layer.4', 'layer.5', 'final']
"""

import re
from collections import defaultdict
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

# In the order of the forward pass; "" is the layer itself, which a block makes last.
_ORDER = (
    *("attn.q", "attn.k", "attn.v", "attn.z", "attn.head", "attn"),
    *("cross.q", "cross.k", "cross.v", "cross.z", "cross.head", "cross"),
    *("mid", "mlp.input", "router", "mlp.neurons", "mlp.neuron", "mlp", ""),
)

_INDEX = "(?:0|[1-9][0-9]{0,5})"
_WHOLE = "attn|cross|mid|mlp"
# Inside attention and the MLP; the braces hold numbers of heads or neurons.
_INSIDE = (
    r"(?:attn|cross)\.(?:[qkvz]|head\.{0})|mlp\.(?:input|neurons|neuron\.{0})|router"
)
PART = f"{_INSIDE.format(_INDEX)}|{_WHOLE}"
STACK = r"(?:(?P<stack>encoder|decoder)\.)?"
_PART = re.compile(PART)
_SITE = re.compile(
    rf"{STACK}(?:final|layer\.(?P<layer>{_INDEX})(?:\.(?P<part>{PART}))?)"
)

HIDDEN_STATES = re.compile(
    r"(?:(?P<stack>encoder|decoder)_)?hidden_states\[(?P<k>-?[0-9]{1,6})\]"
)
_LENS = re.compile(
    r"(?P<stack>blocks|encoder|decoder)\.(?P<block>[0-9]{1,6})"
    r"\.(?P<hook>(?:(?:attn|cross_attn|ln2|mlp)\.)?hook_[a-z_]+)"
)
_LENS_FINAL = "ln_final.hook_normalized"
_HOOKS = {
    "hook_attn_out": "attn",
    "hook_cross_attn_out": "cross",
    "hook_resid_mid": "mid",
    "hook_mlp_out": "mlp",
}
_INNER_HOOKS = {
    "attn.hook_rot_q": "attn.q",
    "attn.hook_rot_k": "attn.k",
    "attn.hook_v": "attn.v",
    "attn.hook_z": "attn.z",
    "cross_attn.hook_z": "cross.z",
    "mlp.hook_in": "mlp.input",
    "mlp.hook_post": "mlp.neurons",
}
# Not every model of TransformerLens has these, so no site is printed like this.
_NEVER_PRINTED = ("attn.q", "attn.k")
# Hooks of TransformerLens that are not a single site: why, and what is.
_NO_SITE = dict.fromkeys(
    ("hook_q", "hook_k"),
    (
        "TransformerLens takes it before rotary positions, which the scores use",
        "Choose '{branch}.{letter}', after them.",
    ),
)
_NO_SITE["hook_result"] = (
    "it holds what every head adds",
    "Choose '{branch}.head.*'.",
)
_NO_SITE["hook_normalized"] = (
    "TransformerLens takes it before or after the norm's own weight, as the norm is",
    "Choose '{block}.mlp.input', after it.",
)
_NO_SITE |= dict.fromkeys(
    ("hook_pattern", "hook_attn_scores"),
    (
        "weights of attention are not the state of a token",
        "Use hs.attention(model, text).",
    ),
)


@checked
@total_ordering
@dataclass(frozen=True)
class Site:
    """The address of one state; sites sort in the order of the forward pass.

    >>> Site.parse("encoder.layer.3.mlp")
    Site('encoder.layer.3.mlp')
    >>> Site(2) < Site(3, "attn") < Site(3, "mlp") < Site(3) < Site(None)
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
        if self.part and not _PART.fullmatch(self.part):
            reason = (
                f"the parts of a block are {', '.join(PARTS)}, and inside them such as"
                " attn.head.0 or mlp.neurons"
            )
        if self.stack not in (None, *STACKS):
            reason = (
                f"a stack is {' or '.join(STACKS)}, or None in a model with one stack"
            )
        if reason:
            raise SiteError(
                f"No site with layer {quoted(self.layer)}, part {quoted(self.part)},"
                f" stack {quoted(self.stack)}",
                reason,
                "Try Site(3), Site(3, 'mlp') or Site(None).",
            )

    @classmethod
    def parse(cls, text: str) -> "Site":
        """Read an address as `str(site)` prints it.

        >>> Site.parse("layer.3").layer, Site.parse("decoder.final").layer
        (3, None)
        """
        match = _SITE.fullmatch(str(text))
        if match is None:
            raise not_a_site(text)
        layer = None if match["layer"] is None else int(match["layer"])
        return cls(layer, match["part"] or "", match["stack"])

    @property
    def is_inner(self) -> bool:
        """Tell whether it is inside attention or the MLP.

        >>> Site(3, "attn.z").is_inner, Site(3, "attn").is_inner
        (True, False)
        """
        return self.part not in ("", *PARTS)

    @property
    def branch(self) -> str:
        """Return the part of the block that it is or is inside of.

        >>> Site(3, "attn.head.5").branch, Site(3, "router").branch
        ('attn', 'mlp')
        """
        return "mlp" if self.part == "router" else self.part.partition(".")[0]

    @property
    def kind(self) -> str:
        """Return its part without the number of the head or neuron.

        >>> Site(3, "attn.head.5").kind, Site(3, "mlp.neurons").kind
        ('attn.head', 'mlp.neurons')
        """
        return self.part if self.index is None else self.part.rpartition(".")[0]

    @cached_property
    def index(self) -> int | None:
        """Return the number of the head or neuron; None for any other site.

        >>> Site(3, "attn.head.5").index
        5
        """
        number = self.part.rpartition(".")[2]
        return int(number) if number.isdecimal() else None

    @property
    def whole(self) -> "Site":
        """Return the site of all heads or neurons that a head or neuron is one of.

        >>> Site(3, "attn.head.5").whole
        Site('layer.3.attn.z')
        """
        name = "neurons" if self.branch == "mlp" else "z"
        return Site(self.layer, f"{self.branch}.{name}", self.stack)

    def __str__(self) -> str:
        name = "final" if self.layer is None else f"layer.{self.layer}"
        return ".".join(step for step in (self.stack, name, self.part) if step)

    def __repr__(self) -> str:
        return f"Site({str(self)!r})"

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Site):
            return NotImplemented
        return self._order < other._order

    @cached_property
    def _order(self) -> tuple[int, int, int, int]:
        stack = 0 if self.stack is None else 1 + STACKS.index(self.stack)
        layer = MOST_LAYERS if self.layer is None else self.layer
        return stack, layer, _ORDER.index(self.kind), self.index or 0


def names_final(item: str) -> bool:
    """Tell whether a pattern names `final` and nothing else."""
    return _SITE.fullmatch(item) is not None and item.endswith("final")


def not_a_site(pattern: object, known: Sequence[str] = ()) -> SiteError:
    """Return the error for what is not a pattern, with the nearest known site."""
    if not isinstance(pattern, bool) and isinstance(pattern, Integral):
        number = quoted(int(pattern))
        return SiteError(
            f"No site {number}", "a site is a string", f"Did you mean 'layer.{number}'?"
        )
    remedy = "Choose 'layer.3', 'layer.*' or 'final'."
    if isinstance(pattern, str) and not pattern:
        return SiteError("No site ''", "it is empty", remedy)
    if isinstance(pattern, str):
        remedy = nearest(pattern, _same_layer(pattern, known))
    return SiteError(
        f"No site {quoted(pattern)}",
        "sites look like 'layer.3', 'layer.3.attn', 'layer.3.attn.head.0' or 'final'",
        remedy,
    )


def _same_layer(item: str, known: Sequence[str]) -> Sequence[str]:
    """Return the sites that a misspelt one may mean: those of its layer, if any."""
    number = re.search("[0-9]{1,9}", item)
    if number is None:
        return known or ["layer.*", "final"]
    layer = f"layer.{int(number[0])}"
    of_layer = [site for site in known if f".{layer}." in f".{site}."]
    return of_layer or [layer, *(f"{layer}.{part}" for part in PARTS)]


# A layer by its number.
LAYER = re.compile(r"(encoder\.|decoder\.)?layer\.([0-9]{1,9})")


def nearest(item: str, known: Sequence[str]) -> str:
    """Return the remedy that names the known site that is spelled most alike."""
    names = list(known)
    beyond = LAYER.fullmatch(item)
    for layer in map(LAYER.fullmatch, reversed(names)):
        if beyond and layer and layer[1] == beyond[1]:
            if int(beyond[2]) > int(layer[2]):
                return f"The last is '{layer[0]}'."
            break
    if not item.startswith(STACKS):
        # Compared without their stacks, which the item does not name.
        names = [re.sub(r"^(encoder|decoder)\.", "", name) for name in names]
    distinct = list(dict.fromkeys(names))
    near = get_close_matches(item[:60].lower(), distinct, n=1, cutoff=0.4)
    if near and near[0] != item:
        return f"Did you mean '{near[0]}'?"
    others = "" if item.endswith("*") else ", or 'layer.*'"
    return f"Choose one of those{others}."


def quoted(value: object) -> str:
    """Return a value as an error shows it, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not print an int of more than 4,300 digits.
        text = "a very large number"
    return text if len(text) <= 60 else f"{text[:40]}...{text[-10:]}"


def is_alias(name: str) -> bool:
    """Tell whether a name is spelled like those of Hugging Face or TransformerLens."""
    if name == _LENS_FINAL:
        return True
    return bool(HIDDEN_STATES.fullmatch(name) or _LENS.fullmatch(name))


def from_alias(name: str, *, depth: int, final: bool) -> Site:
    """Return the site that Hugging Face or TransformerLens calls `name`.

    `hidden_states[depth]` is `final` if the model has a final norm: by default Hugging
    Face norms the last entry and no other. TransformerLens takes the residual stream
    before a post-norm block's own norm, so in a model without a final norm only its
    `hook_resid_pre` and `hook_normalized_resid_post` are sites.

    >>> from_alias("hidden_states[12]", depth=12, final=True)
    Site('final')
    >>> from_alias("blocks.4.hook_resid_post", depth=12, final=True)
    Site('layer.5')
    >>> from_alias("blocks.4.attn.hook_z", depth=12, final=True)
    Site('layer.5.attn.z')
    """
    match = HIDDEN_STATES.fullmatch(name)
    if match:
        k = int(match["k"])
        if k < 0:
            k += depth + 1
        if not 0 <= k <= depth:
            raise SiteError(
                f"No {quoted(name)}",
                f"the tuple has {depth + 1} entries",
                f"Choose 0 to {depth}.",
            )
        layer = None if final and k == depth else k
        return Site(layer, stack=match["stack"])
    match = _LENS.fullmatch(name)
    if match:
        return _from_lens(name, match, depth, final)
    if name == _LENS_FINAL:
        raise SiteError(
            f"No site for {quoted(name)}",
            "TransformerLens records it before the norm's own weight, so it is not"
            " final",
            "Choose 'final', or the raw last layer, 'layer.-1'.",
        )
    raise not_a_site(name)


def to_alias(
    site: Site,
    kind: Literal["hidden_states", "transformer_lens"],
    *,
    depth: int,
    final: bool,
) -> str | None:
    """Return what Hugging Face or TransformerLens calls a site; None if nothing.

    >>> to_alias(Site(5), "transformer_lens", depth=12, final=True)
    'blocks.4.hook_resid_post'
    >>> print(to_alias(Site(12), "hidden_states", depth=12, final=True))
    None
    """
    if (site.layer or 0) > depth or (site.layer is None and not final):
        return None
    if kind == "hidden_states":
        # By default Hugging Face overwrites the raw last layer with the normed one.
        if site.part or (final and site.layer == depth):
            return None
        k = depth if site.layer is None else site.layer
        prefix = f"{site.stack}_" if site.stack else ""
        return f"{prefix}hidden_states[{k}]"
    if kind == "transformer_lens":
        hook = _lens_hook(site, final)
        block = max(0, (site.layer or 0) - 1)
        return f"{site.stack or 'blocks'}.{block}.{hook}" if hook else None
    raise SiteError(
        f"No names of the kind {quoted(kind)}",
        "the kinds are 'hidden_states' and 'transformer_lens'",
        "Choose one of them.",
    )


def _from_lens(name: str, match: re.Match[str], depth: int, final: bool) -> Site:
    block = int(match["block"])
    hook = match["hook"]
    stack = None if match["stack"] == "blocks" else match["stack"]
    if block >= depth:
        reason = f"there are {depth} blocks, counted from 0"
        raise SiteError(
            f"No block {block} for {quoted(name)}",
            reason,
            f"Choose 0 to {depth - 1}.",
        )
    if hook == "hook_resid_pre":
        return Site(block, stack=stack)
    if hook == ("hook_resid_post" if final else "hook_normalized_resid_post"):
        return Site(block + 1, stack=stack)
    if hook in _INNER_HOOKS:
        return Site(block + 1, _INNER_HOOKS[hook], stack)
    if not final and (hook == "hook_resid_post" or hook in _HOOKS):
        raise SiteError(
            f"No site for {quoted(name)}",
            "in a model without a final norm TransformerLens takes it before the"
            " block's own norm",
            f"Choose 'layer.{block + 1}', the block's output.",
        )
    # A decoder's block has two middles, of which the one after cross-attention is
    # before the MLP.
    if stack == "decoder" and hook == "hook_resid_mid":
        raise not_a_site(name)
    if stack == "decoder" and hook == "hook_resid_mid_cross":
        hook = "hook_resid_mid"
    module, _, point = hook.rpartition(".")
    if point in _NO_SITE:
        part = "cross" if module == "cross_attn" else "attn"
        branch = Site(block + 1, part, stack)
        reason, remedy = _NO_SITE[point]
        remedy = remedy.format(
            branch=branch, letter=point[-1], block=Site(block + 1, stack=stack)
        )
        raise SiteError(f"No site for {quoted(name)}", reason, remedy)
    if hook not in _HOOKS:
        raise not_a_site(name)
    return Site(block + 1, _HOOKS[hook], stack)


def _lens_hook(site: Site, final: bool) -> str | None:
    if site.layer is None or site.part in _NEVER_PRINTED:
        return None
    if site.layer == 0:
        return "hook_resid_pre"
    if not site.part:
        return "hook_resid_post" if final else "hook_normalized_resid_post"
    if not (final or site.is_inner):
        return None
    if site.stack == "decoder" and site.part == "mid":
        return "hook_resid_mid_cross"
    hooks = {part: hook for hook, part in (_HOOKS | _INNER_HOOKS).items()}
    return hooks.get(site.part)


# Patterns, which select several sites.

_NUMBER = r"-?[0-9]{1,6}"
_INDICES = r"(?:\*|[0-9]{1,6}(?:-[0-9]{1,6})?)"
_INNER = _INSIDE.format(_INDICES)
_PATTERN = re.compile(
    rf"{STACK}(?:(?P<final>final)|(?P<any>\*)(?:\.(?P<anywhere>{_INNER}|{_WHOLE}))?"
    rf"|layer\.(?:(?P<all>\*)|(?P<low>{_NUMBER})(?:-(?P<high>{_NUMBER}))?)"
    rf"(?:\.(?P<part>\*|{_INNER}|{_WHOLE}))?)"
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
    hiddenscope.errors.SiteError: No site 'layer.20' in gpt2: it has layer.0 to layer.12. The last is 'layer.12'.
    """  # noqa: E501
    # There may be a neuron for each channel of each block: comparing is slow.
    ordered = tuple(sorted(set(sites), key=lambda site: site._order))
    known = _KnownSites(ordered, owner, depth, final, reported or {})
    items = list(split_patterns(patterns))
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
    for item in split_patterns(patterns):
        if not _PATTERN.fullmatch(item) and not is_alias(item):
            raise not_a_site(item)


def names_inner(patterns: SitePatterns) -> bool:
    """Tell whether patterns name sites inside attention or the MLP.

    >>> names_inner("layer.*, *.attn.head.*"), names_inner("layer.3.*")
    (True, False)
    """
    for item in split_patterns(patterns):
        is_hook = ".hook_" in item and is_alias(item)
        if is_hook or _INNER_PATTERN.fullmatch(item):
            return True
    return False


def names_neurons(patterns: SitePatterns) -> bool:
    """Tell whether patterns name single neurons, of which a model has very many."""
    return any(".neuron." in item for item in split_patterns(patterns))


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
    layers: dict[str, list[int]] = defaultdict(list)
    for site in sites:
        if site.layer is not None:
            layers[site.kind].append(site.layer)
    phrase = ", ".join(_runs(layers.pop("", []), prefix))
    parts = ", ".join(part for part in PARTS if layers.pop(part, []))
    if parts and phrase:
        phrase = f"{phrase} with {parts} inside"
    elif parts:
        phrase = f"{parts} of some blocks"
    phrases = [phrase] if phrase else []
    # Kinds of sites inside attention and MLP remain.
    for kind, blocks in layers.items():
        where = ", ".join(_runs(sorted(set(blocks)), prefix))
        if kind.endswith((".head", ".neuron")):
            plural = "" if len(blocks) == 1 else "s"
            kind = f"{len(blocks):,} {kind}{plural}"
        phrases.append(f"{kind} of {where}")
    # Final sorts last.
    if sites[-1].layer is None:
        phrases.append(f"{prefix}final")
    *others, last = phrases
    return f"{', '.join(others)} and {last}" if others else last


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


def split_patterns(patterns: SitePatterns) -> Iterator[str]:
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
