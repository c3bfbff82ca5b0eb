"""States: the values, what can be done with them, and the protocol by which analyses
read them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hiddenscope.arguments import checked
from hiddenscope.errors import FileError, NotFinite, SiteError, StatesError
from hiddenscope.sites import Site, SitePatterns, named_layer, select, summarise
from hiddenscope.states.files import StackParts, read, write
from hiddenscope.states.pool import Pool, check_cls, check_lengths, wide
from hiddenscope.states.pooling import Pooling, parse_pooling
from hiddenscope.states.tokens import Ints, Source, Tokens, chosen_rows, plain, shown

if TYPE_CHECKING:
    import pandas
    import xarray


@runtime_checkable
class Readable(Protocol):
    """What an analysis reads states from: `States`, or anything larger than memory with
    the same three members.
    """

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites, in the order of the forward pass."""

    @property
    def tokens(self) -> Tokens:
        """The tokens, one row each."""

    def blocks(self, site: str | Site) -> Iterator[torch.Tensor]:
        """The rows of one site in order, `[some tokens, width]` at a time."""


@checked
@dataclass(frozen=True, repr=False, eq=False)
class States:
    """Values `[site, token, width]` in the dtype they were computed in, with their
    sites, tokens and source.

    >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
    >>> States((Site(0), Site(1)), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), tokens, Source("toy"))["layer.1"]
    tensor([[3., 4.]])
    """

    sites: tuple[Site, ...]
    values: torch.Tensor
    tokens: Tokens
    source: Source

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        shape = tuple(self.values.shape)
        if len(shape) != 3 or shape[:2] != (len(self.sites), len(self.tokens)):
            expected = f"[{len(self.sites)}, {len(self.tokens)}, width]"
            reason = (
                f"the values are {list(shape)}, and with these sites and tokens they"
                f" must be {expected}"
            )
            raise StatesError(
                "Cannot make these states", reason, "Give values [site, token, width]."
            )
        if not self.values.is_floating_point():
            reason = f"the values are {self.values.dtype}"
            raise StatesError(
                "Cannot make these states",
                reason,
                "Give them in a floating-point dtype.",
            )
        if (
            not self.sites
            or list(self.sites) != sorted(set(self.sites))
            or len({s.stack for s in self.sites}) > 1
        ):
            reason = f"the sites are {summarise(self.sites)}"
            remedy = (
                "Give sites of one stack, each once, in the order of the forward pass."
            )
            raise StatesError("Cannot make these states", reason, remedy)

    @property
    def width(self) -> int:
        """The hidden size: how many numbers a state has."""
        return self.values.shape[2]

    def __getitem__(self, site: str | Site | int) -> torch.Tensor:
        return self.values[self._index(named_layer(site))]

    def __repr__(self) -> str:
        dtype = str(self.values.dtype).removeprefix("torch.")
        shape = (
            f"{_many(len(self.sites), 'site')} x {_many(len(self.tokens), 'token')} x"
            f" {self.width}"
        )
        lines = [
            f"States of {plain(self.source.model)}, {dtype}: {shape}",
            f"  sites   {summarise(self.sites)}",
        ]
        texts = _many(self.tokens.count, "text")
        return "\n".join([*lines, f"  tokens  {shown(self.tokens.strings)} ({texts})"])

    def of(self, text: int) -> "States":
        """The states of one text, sharing memory with these; -1 is the last."""
        return replace(
            self,
            values=self.values[:, self.tokens.rows(text)],
            tokens=self.tokens.of(text),
        )

    def select(
        self,
        *,
        sites: SitePatterns | None = None,
        tokens: ArrayLike | slice | None = None,
    ) -> "States":
        """Some sites (a pattern) and some tokens (a mask, a slice or indices), both in
        the order they have here.

        >>> tokens = Tokens(("hi you",), [0, 0], [0, 1], [7, 8], ("hi", " you"))
        >>> states = States((Site(0), Site(1)), torch.zeros(2, 2, 4), tokens, Source("toy"))
        >>> states.select(sites="layer.1", tokens=states.tokens.ids == 8).values.shape
        torch.Size([1, 1, 4])
        """
        chosen_sites, values, chosen_tokens = self.sites, self.values, self.tokens
        if sites is not None:
            chosen_sites = self._choose(sites)
            values = _take(
                values, 0, np.array([self.sites.index(site) for site in chosen_sites])
            )
        if tokens is not None:
            rows = chosen_rows(tokens, len(chosen_tokens))
            values, chosen_tokens = _take(values, 1, rows), chosen_tokens.select(rows)
        return States(chosen_sites, values, chosen_tokens, self.source)

    def pool(self, how: Pooling, site: str | Site | None = None) -> torch.Tensor:
        """One row per text: `[text, width]` of one site, or `[site, text, width]` of
        all.

        `how` is the name of a pooling, such as "mean" or "last", or a position. Padding
        never counts. A mean is computed and returned in float32 (float64 stays); other
        poolings keep the dtype. A text pooled among others equals the text pooled by
        itself, bit for bit.

        >>> tokens = Tokens(("a b", "c"), [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", " b", "c"))
        >>> states = States((Site(0),), torch.tensor([[[1.0], [3.0], [5.0]]]), tokens, Source("toy"))
        >>> states.pool("mean", "layer.0").tolist(), states.pool("last", "layer.0").tolist()
        ([[2.0], [5.0]], [[3.0], [5.0]])
        """
        pool = parse_pooling(how)
        tokens = self.tokens
        check_lengths(tokens.lengths)
        if pool == "cls":
            starts = np.cumsum(tokens.lengths) - tokens.lengths
            check_cls(self.source, tokens.ids[starts], 0)
        pooled = Pool(tokens.lengths, pool)
        if site is None:
            return pooled(self.values)
        return pooled(self.values[self._index(site)][None])[0]

    def mix(
        self, weights: Mapping[str | Site, float] | Sequence[float] | torch.Tensor
    ) -> torch.Tensor:
        """The sum of the sites, each times its weight, `[token, width]` in float32
        (float64 stays).

        A mapping may leave sites out; a sequence has one weight per site. A tensor of
        weights keeps its gradient.

        >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
        >>> states = States((Site(0), Site(1)), torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), tokens, Source("toy"))
        >>> states.mix([0.5, 0.5]).tolist(), states.mix({"layer.1": 2.0}).tolist()
        ([[2.0, 3.0]], [[6.0, 8.0]])
        """
        if isinstance(weights, Mapping):
            listed = torch.zeros(len(self.sites), dtype=torch.float64)
            for site, weight in weights.items():
                listed[self._index(site)] += weight
        else:
            listed = torch.as_tensor(weights)
        if listed.shape != (len(self.sites),) or not bool(listed.isfinite().all()):
            reason = (
                f"there are {len(listed)} weights"
                if listed.ndim == 1
                else f"the weights are {list(listed.shape)}"
            )
            raise StatesError(
                f"Cannot mix {len(self.sites)} sites",
                reason,
                "Give one finite weight per site.",
            )
        dtype = wide(self.values.dtype)
        mixed = torch.zeros(
            self.values.shape[1:], dtype=dtype, device=self.values.device
        )
        for weight, values in zip(listed.to(mixed), self.values, strict=True):
            mixed = mixed + weight * values.to(dtype)
        return mixed

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The batch shape: values `[site, text, token, width]`, zero where the mask
        `[text, token]` is False.

        >>> tokens = Tokens(("a b", "c"), [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", " b", "c"))
        >>> values, mask = States((Site(0),), torch.ones(1, 3, 4), tokens, Source("toy")).padded()
        >>> values.shape, mask.tolist()
        (torch.Size([1, 2, 2, 4]), [[True, True], [True, False]])
        """
        lengths = torch.from_numpy(self.tokens.lengths).to(self.values.device)
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        values = self.values.new_zeros(
            len(self.sites), len(lengths), longest, self.width
        )
        values[:, mask] = self.values
        return values, mask

    def check_finite(self) -> None:
        """Raise `NotFinite` naming the first site and token with a NaN or an infinity,
        if there is one.
        """
        for site, values in zip(self.sites, self.values, strict=True):
            infinite = ~values.isfinite()
            if not bool(infinite.any()):
                continue
            row = int(infinite.any(1).nonzero()[0])
            what = "a NaN" if bool(values[row].isnan().any()) else "an infinity"
            token = (
                f"{shown(self.tokens.strings[row : row + 1])} (text"
                f" {self.tokens.text[row]}, "
            )
            token += f"position {self.tokens.positions[row]})"
            count = (
                f"{int(infinite.sum()):,} of its {infinite.numel():,} values are not"
                " finite"
            )
            reason = f"{what} at {site}, token {token}: {count}"
            remedy = (
                "Look at the weights of the block that computes it, or load the model"
                " in a wider dtype."
            )
            raise NotFinite(
                f"The states of {plain(self.source.model)} are not finite",
                reason,
                remedy,
            )

    def blocks(self, site: str | Site, rows: int = 65_536) -> Iterator[torch.Tensor]:
        """The rows of one site in order, at most `rows` at a time, as `Readable`
        promises.
        """
        if rows < 1:
            raise StatesError(
                f"rows must be at least 1, got {rows}",
                "a block holds rows",
                "Give a larger number.",
            )
        values = self[site]
        return iter(torch.split(values, min(rows, max(1, len(values)))))

    def to_numpy(self) -> NDArray[Any]:
        """The values as a numpy array: float32 and float64 as they are, narrower ones
        widened to float32 (exact).
        """
        values = self.values.detach().cpu()
        array: NDArray[Any] = values.to(wide(values.dtype)).numpy()
        return array

    def to_xarray(self) -> "xarray.DataArray":
        """A DataArray with dims site, token, width and the coordinates site, text,
        position, id, string.

        >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
        >>> States((Site(0),), torch.zeros(1, 1, 2), tokens, Source("toy")).to_xarray().sel(site="layer.0").dims
        ('token', 'width')
        """
        import xarray

        coords = {
            "site": [str(site) for site in self.sites],
            "text": ("token", self.tokens.text),
            "position": ("token", self.tokens.positions),
            "id": ("token", self.tokens.ids),
            # fastpath: with pyarrow installed, pandas would refuse half of a surrogate
            # pair
            "string": xarray.Variable(
                "token",
                np.array([*self.tokens.strings, None], dtype=object)[:-1],
                fastpath=True,
            ),
        }
        attrs = {"source": json.dumps(self.source.to_json())}
        return xarray.DataArray(
            self.to_numpy(), coords, ("site", "token", "width"), "states", attrs
        )

    def to_pandas(self) -> "pandas.DataFrame":
        """A frame with one row per token, indexed by text, position, id and string; its
        columns are (site, channel).

        >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
        >>> States((Site(0),), torch.zeros(1, 1, 2), tokens, Source("toy")).to_pandas()["layer.0"].shape
        (1, 2)
        """
        import pandas

        tokens, names = self.tokens, ["text", "position", "id", "string"]
        strings = pandas.Index(list(tokens.strings), dtype=object)
        index = pandas.MultiIndex.from_arrays(
            [tokens.text, tokens.positions, tokens.ids, strings], names=names
        )
        columns = pandas.MultiIndex.from_product(
            [map(str, self.sites), range(self.width)], names=["site", "channel"]
        )
        return pandas.DataFrame(
            self.to_numpy().swapaxes(0, 1).reshape(len(tokens), -1), index, columns
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, in the native dtype, whole or not at all;
        `States.load` gives it back exactly.
        """
        write(path, {"": self._parts()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "States":
        """Read what `save` wrote."""
        loaded = load_states(path)
        if isinstance(loaded, Pair):
            raise FileError(
                f"Cannot read {path} as States",
                "it holds a pair",
                "Read it with Pair.load().",
            )
        return loaded

    def _parts(self) -> StackParts:
        return StackParts(self.sites, self.values, self.tokens, self.source)

    def _choose(self, patterns: SitePatterns) -> tuple[Site, ...]:
        owner = f"these states of {plain(self.source.model)}"
        named = [Site.parse(name) if name else None for name in self.source.reported]
        reported = {self.sites[0].stack: named} if named and self.sites else None
        depth, final = self.source.depth, self.source.final
        return select(
            patterns,
            self.sites,
            owner=owner,
            depth=depth,
            final=final,
            reported=reported,
        )

    def _index(self, site: str | Site) -> int:
        chosen = self._choose(site)
        if len(chosen) > 1:
            reason = f"it names {len(chosen)} sites"
            raise SiteError(
                f"Cannot get the site {str(site)[:60]!r}",
                reason,
                "Name one, or use .select(sites=...).",
            )
        return self.sites.index(chosen[0])


@checked
@dataclass(frozen=True, repr=False)
class Pair:
    """What capturing an encoder-decoder gives: the states of its two stacks, each with
    its own tokens.

    >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
    >>> sites = Site.parse("encoder.layer.0"), Site.parse("decoder.layer.0")
    >>> stacks = [States((site,), torch.zeros(1, 1, 2), tokens, Source("t5")) for site in sites]
    >>> Pair(*stacks)["decoder.layer.0"].shape
    torch.Size([1, 2])
    """

    encoder: States
    decoder: States

    def __post_init__(self) -> None:
        stacks = self.encoder.sites[0].stack, self.decoder.sites[0].stack
        if stacks != ("encoder", "decoder"):
            reason = f"the stacks of its sites are {stacks}"
            raise StatesError(
                "Cannot pair an encoder and a decoder",
                reason,
                "Name the stack of each site.",
            )

    @property
    def sites(self) -> tuple[Site, ...]:
        """The sites of both stacks."""
        return self.encoder.sites + self.decoder.sites

    def __repr__(self) -> str:
        return f"{self.encoder!r}\n{self.decoder!r}"

    def __getitem__(self, site: str | Site | int) -> torch.Tensor:
        named: str | Site = named_layer(site)
        chosen: list[tuple[States, Site]] = []
        refused: dict[str, SiteError] = {}
        for stack, states in (("encoder", self.encoder), ("decoder", self.decoder)):
            try:
                chosen += [(states, own_site) for own_site in states._choose(named)]
            except SiteError as error:
                refused[stack] = error
        if not chosen:
            raise refused["decoder" if str(site).startswith("decoder") else "encoder"]
        if len(chosen) > 1:
            reason = f"it names {len(chosen)} sites"
            raise SiteError(
                f"Cannot get the site {str(site)[:60]!r}",
                reason,
                "Name one, with its stack.",
            )
        states, own_site = chosen[0]
        return states[own_site]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write both to one safetensors file; `Pair.load` gives them back exactly."""
        write(
            path, {"encoder.": self.encoder._parts(), "decoder.": self.decoder._parts()}
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Pair":
        """Read what `save` wrote."""
        loaded = load_states(path)
        if isinstance(loaded, States):
            raise FileError(
                f"Cannot read {path} as a Pair",
                "it holds one stack",
                "Read it with States.load().",
            )
        return loaded


def join(parts: Sequence[States]) -> States:
    """The states of several captures as one, texts one after another; sites, dtype and
    source must agree.

    >>> one = States((Site(0),), torch.zeros(1, 1, 2), Tokens(("hi",), [0], [0], [7], ("hi",)), Source("toy"))
    >>> join([one, one]).tokens.count
    2
    """
    if not parts:
        raise StatesError(
            "Cannot join states", "the list is empty", "Give at least one."
        )
    first = parts[0]
    for part in parts[1:]:
        mine = (
            first.sites,
            first.width,
            first.values.dtype,
            first.source,
            first.tokens.texts is None,
        )
        if (
            part.sites,
            part.width,
            part.values.dtype,
            part.source,
            part.tokens.texts is None,
        ) != mine:
            reason = "they differ in sites, width, dtype, source, or in having texts"
            raise StatesError(
                "Cannot join states", reason, "Join states that were captured alike."
            )
    every = [part.tokens for part in parts]
    offsets = np.cumsum([0, *(tokens.count for tokens in every)])
    tokens = Tokens(
        (
            None
            if first.tokens.texts is None
            else tuple(text for tokens in every for text in tokens.texts or ())
        ),
        np.concatenate(
            [
                tokens.text + offset
                for tokens, offset in zip(every, offsets, strict=False)
            ]
        ),
        np.concatenate([tokens.positions for tokens in every]),
        np.concatenate([tokens.ids for tokens in every]),
        tuple(string for tokens in every for string in tokens.strings),
        np.concatenate([tokens.spans for tokens in every]),
        int(offsets[-1]),
    )
    return States(
        first.sites, torch.cat([part.values for part in parts], 1), tokens, first.source
    )


def load_states(path: str | os.PathLike[str]) -> States | Pair:
    """The states in a file, whichever of the two it holds: of one stack, or of an
    encoder and a decoder.

    >>> import tempfile
    >>> one = States((Site(0),), torch.zeros(1, 1, 2), Tokens(("hi",), [0], [0], [7], ("hi",)), Source("toy"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one.save(f"{folder}/states.safetensors")
    ...     load_states(f"{folder}/states.safetensors")["layer.0"].shape
    torch.Size([1, 2])
    """
    try:
        parts = {prefix: States(*part) for prefix, part in read(path).items()}
        return parts[""] if "" in parts else Pair(parts["encoder."], parts["decoder."])
    except StatesError as error:
        raise FileError(
            f"Cannot read states from {os.fspath(path)}",
            str(error),
            "Save the states again.",
        ) from error


def _take(values: torch.Tensor, dim: int, indices: Ints) -> torch.Tensor:
    """These slices of the values: shared where they are one run, else copied."""
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
        return values.narrow(dim, int(indices[0]), len(indices))
    return values.index_select(dim, torch.from_numpy(indices).to(values.device))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
