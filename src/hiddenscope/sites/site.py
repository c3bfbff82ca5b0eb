"""Site: the address of one state, and what Hugging Face and TransformerLens call it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, total_ordering
from numbers import Integral
from typing import Literal

from hiddenscope.arguments import checked
from hiddenscope.errors import SiteError

PARTS = ("attn", "cross", "mid", "mlp")
STACKS = ("encoder", "decoder")
MOST_LAYERS = 1_000_000

# In the order of the forward pass; "" is the layer itself, which a block makes last.
_ORDER = (
    *("attn.q", "attn.k", "attn.v", "attn.z", "attn.head", "attn"),
    *("cross.q", "cross.k", "cross.v", "cross.z", "cross.head", "cross"),
    *("mid", "router", "mlp.neurons", "mlp.neuron", "mlp", ""),
)

_INDEX = "0|[1-9][0-9]{0,5}"
PART = (
    rf"(?:attn|cross)(?:\.(?:[qkvz]|head\.(?:{_INDEX})))?"
    rf"|mid|router|mlp(?:\.(?:neurons|neuron\.(?:{_INDEX})))?"
)
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
    r"\.(?P<hook>(?:(?:attn|cross_attn|mlp)\.)?hook_[a-z_]+)"
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


def nearest(item: str, known: Sequence[str]) -> str:
    """Return the remedy that names the known site that is spelled most alike."""
    names = list(known)
    if not item.startswith(STACKS):
        # Compared without their stacks, which the item does not name.
        names = [re.sub(r"^(encoder|decoder)\.", "", name) for name in names]
    distinct = list(dict.fromkeys(names))
    near = get_close_matches(item[:60].lower(), distinct, n=1, cutoff=0.4)
    if near:
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

    `hidden_states[depth]` is `final` if the model has a final norm: Hugging Face norms
    the last entry and no other. TransformerLens takes the residual stream before a
    post-norm block's own norm, so in a model without a final norm only its
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
        # Hugging Face overwrites the raw last layer with the normed one.
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
        remedy = remedy.format(branch=branch, letter=point[-1])
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
