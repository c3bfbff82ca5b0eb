"""Site: the address of one state."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, total_ordering
from numbers import Integral

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
