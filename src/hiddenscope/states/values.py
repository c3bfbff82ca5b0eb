"""States: the values, what can be done with them, and the protocol by which analyses
read them.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from hiddenscope.arguments import checked, integer
from hiddenscope.errors import FileError, NotFinite, SiteError, StatesError
from hiddenscope.files import PathLike
from hiddenscope.sites import Site, SitePatterns, named_layer, summarise
from hiddenscope.states.arrays import Ints
from hiddenscope.states.files import StackParts, open_foreign, read_file, write
from hiddenscope.states.foreign import read_foreign
from hiddenscope.states.mixed import (
    MixedValues,
    SiteValues,
    each_group,
    join_tokens,
    one_tensor,
    take,
    take_sites,
)
from hiddenscope.states.pool import Pool, check_cls, check_lengths, wide
from hiddenscope.states.pooling import Pooling, parse_pooling, requires_cls
from hiddenscope.states.tokens import (
    Source,
    Tokens,
    coordinates,
    row_indices,
    show_tokens,
    terminal_safe,
)

if TYPE_CHECKING:
    import pandas
    import xarray


@runtime_checkable
class Readable(Protocol):
    """A source of states for an analysis: `States`, or a store larger than memory."""

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the sites, in the order of the forward pass."""

    @property
    def tokens(self) -> Tokens:
        """Return the tokens, one row each."""

    def blocks(self, site: str | Site) -> Iterator[Tensor]:
        """Yield the rows of one site in order, `[some tokens, width]` at a time."""


@checked
@dataclass(frozen=True, repr=False, eq=False)
class States:
    """Values `[site, token, width]` in the dtype they were computed in, with their
    sites, tokens and source.

    Sites whose widths differ make no tensor: `values` is then a `MixedValues`, and
    `states[site]` is the tensor `[token, width]` of a site, as always.

    >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
    >>> values = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
    >>> States((Site(0), Site(1)), values, tokens, Source("toy"))["layer.1"]
    tensor([[3., 4.]])
    """

    sites: tuple[Site, ...]
    values: SiteValues
    tokens: Tokens
    source: Source

    def __post_init__(self) -> None:
        object.__setattr__(self, "sites", tuple(self.sites))
        problem = "Cannot make these states"
        values = self.values
        count = len(self.tokens)
        if isinstance(values, MixedValues):
            fits = (values.sites, values.tokens) == (self.sites, count)
        else:
            fits = values.ndim == 3 and values.shape[:2] == (len(self.sites), count)
        if not fits:
            if isinstance(values, MixedValues):
                shape = f"those of {summarise(values.sites)}, of {values.tokens} tokens"
            else:
                shape = str(list(values.shape))
            raise StatesError(
                problem,
                f"the values are {shape}, and with these sites and tokens they must be"
                f" [{len(self.sites)}, {count}, width]",
                f"Give those of {summarise(self.sites)}, [site, token, width].",
            )
        if not self.values.dtype.is_floating_point:
            reason = f"the values are {self.values.dtype}"
            raise StatesError(problem, reason, "Give them in a floating-point dtype.")
        stacks = {site.stack for site in self.sites}
        if len(stacks) != 1 or list(self.sites) != sorted(set(self.sites)):
            raise StatesError(
                problem,
                f"the sites are {summarise(self.sites)}",
                "Give sites of one stack, each once, in the order of the forward pass.",
            )

    @property
    def width(self) -> int:
        """Return how many numbers a state has; an error where sites differ in that."""
        return self.values.shape[2]

    @property
    def widths(self) -> tuple[int, ...]:
        """Return how many numbers a state has, for each site."""
        if isinstance(self.values, MixedValues):
            return self.values.widths
        return (self.width,) * len(self.sites)

    def __getitem__(self, site: str | Site | int) -> Tensor:
        return self.values[self._index(named_layer(site))]

    def __repr__(self) -> str:
        dtype = str(self.values.dtype).removeprefix("torch.")
        sites = _counted(len(self.sites), "site")
        tokens = _counted(len(self.tokens), "token")
        texts = _counted(self.tokens.count, "text")
        model = terminal_safe(self.source.model)
        if self.source.quantisation:
            model += f" ({terminal_safe(self.source.quantisation)})"
        by_width: dict[int, list[Site]] = {}
        for site, width in zip(self.sites, self.widths, strict=True):
            by_width.setdefault(width, []).append(site)
        widths = " or ".join(map(str, by_width))
        summary = summarise(self.sites)
        if len(by_width) > 1:
            parts = [
                f"{summarise(by_width[width])} ({width} wide)" for width in by_width
            ]
            summary = "; ".join(parts)
        return "\n".join(
            [
                f"States of {model}, {dtype}: {sites} x {tokens} x {widths}",
                f"  sites   {summary}",
                f"  tokens  {show_tokens(self.tokens.strings)} ({texts})",
            ]
        )

    def of(self, text: int) -> "States":
        """Return the states of one text, sharing memory; -1 is the last."""
        rows = self.tokens.rows(text)
        values = each_group(self.values, lambda group: group[:, rows])
        return replace(self, values=values, tokens=self.tokens.of(text))

    def select(
        self,
        *,
        sites: SitePatterns | None = None,
        tokens: ArrayLike | slice | None = None,
    ) -> "States":
        """Return some sites (a pattern) and tokens (a mask, a slice or indices).

        Both keep the order that they have here.

        >>> tokens = Tokens(("hi you",), [0, 0], [0, 1], [7, 8], ("hi", " you"))
        >>> values = torch.zeros(2, 2, 4)
        >>> states = States((Site(0), Site(1)), values, tokens, Source("toy"))
        >>> states.select(sites="layer.1", tokens=tokens.ids == 8).values.shape
        torch.Size([1, 1, 4])
        """
        selected = self.sites
        values = self.values
        selected_tokens = self.tokens
        if sites is not None:
            selected = self._select(sites)
            places = [self.sites.index(site) for site in selected]
            values = take_sites(values, np.array(places))
        if tokens is not None:
            rows = row_indices(tokens, len(self.tokens))
            values = each_group(values, lambda group: take(group, 1, rows))
            selected_tokens = self.tokens.select(rows)
        return States(selected, values, selected_tokens, self.source)

    def pool(self, how: Pooling, site: str | Site | None = None) -> Tensor:
        """Return one row per text: `[text, width]` of a site, `[site, text, width]` of
        all.

        `how` is the name of a pooling, such as "mean" or "last", or a position. Padding
        never counts. A mean is computed and returned in float32 (float64 stays); other
        poolings keep the dtype. A text pooled among others equals the text pooled by
        itself, bit for bit.

        >>> tokens = Tokens(None, [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", "b", "c"))
        >>> values = torch.tensor([[[1.0], [3.0], [5.0]]])
        >>> states = States((Site(0),), values, tokens, Source("toy"))
        >>> states.pool("mean", "layer.0").tolist()
        [[2.0], [5.0]]
        """
        pool = parse_pooling(how)
        tokens = self.tokens
        check_lengths(tokens.lengths)
        if requires_cls(pool):
            starts = np.cumsum(tokens.lengths) - tokens.lengths
            check_cls(self.source, tokens.ids[starts], 0)
        pooled = Pool(tokens.lengths, pool)
        if site is None:
            return pooled(one_tensor(self.values))
        return pooled(self.values[self._index(site)][None])[0]

    def mix(
        self, weights: Mapping[str | Site, float] | Sequence[float] | Tensor
    ) -> Tensor:
        """Return the weighted sum of the sites, `[token, width]` in float32 (float64
        stays).

        A mapping may leave sites out; a sequence has one weight per site. A tensor of
        weights keeps its gradient.

        >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
        >>> values = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]])
        >>> states = States((Site(0), Site(1)), values, tokens, Source("toy"))
        >>> states.mix([0.5, 0.5]).tolist(), states.mix({"layer.1": 2.0}).tolist()
        ([[2.0, 3.0]], [[6.0, 8.0]])
        """
        if isinstance(weights, Mapping):
            listed = torch.zeros(len(self.sites), dtype=torch.float64)
            for site, weight in weights.items():
                listed[self._index(site)] += weight
        else:
            listed = torch.as_tensor(weights)
        if listed.shape != (len(self.sites),) or not listed.isfinite().all():
            reason = f"the weights are {list(listed.shape)}"
            if listed.ndim == 1:
                reason = f"there are {len(listed)} weights"
            raise StatesError(
                f"Cannot mix {len(self.sites)} sites",
                reason,
                "Give one finite weight per site.",
            )
        dtype = wide(self.values.dtype)
        # Site by site: converting all values at once would double the memory.
        mixed = self.values.new_zeros(self.values.shape[1:], dtype=dtype)
        for weight, values in zip(listed.to(mixed), self.values, strict=True):
            mixed = mixed + weight * values.to(dtype)
        return mixed

    def padded(self) -> tuple[Tensor, Tensor]:
        """Return values `[site, text, token, width]` and their mask `[text, token]`.

        The values are zero where the mask is False.

        >>> tokens = Tokens(None, [0, 0, 1], [0, 1, 0], [5, 6, 7], ("a", "b", "c"))
        >>> states = States((Site(0),), torch.ones(1, 3, 4), tokens, Source("toy"))
        >>> values, mask = states.padded()
        >>> values.shape, mask.tolist()
        (torch.Size([1, 2, 2, 4]), [[True, True], [True, False]])
        """
        rows = one_tensor(self.values)
        lengths = torch.from_numpy(self.tokens.lengths).to(rows.device)
        longest = int(lengths.max()) if len(lengths) else 0
        mask = torch.arange(longest, device=lengths.device) < lengths[:, None]
        shape = (len(self.sites), len(lengths), longest, self.width)
        values = rows.new_zeros(shape)
        values[:, mask] = rows
        return values, mask

    def check_finite(self) -> None:
        """Raise `NotFinite`, with the site and token, for a NaN or an infinity."""
        tokens = self.tokens
        for site, values in zip(self.sites, self.values, strict=True):
            infinite = ~values.isfinite()
            if not infinite.any():
                continue
            row = int(infinite.any(1).nonzero()[0])
            what = "a NaN" if values[row].isnan().any() else "an infinity"
            token = show_tokens(tokens.strings[row : row + 1])
            place = f"text {tokens.text[row]}, position {tokens.positions[row]}"
            count = f"{int(infinite.sum()):,} of its {infinite.numel():,} values"
            raise NotFinite(
                f"The states of {terminal_safe(self.source.model)} are not finite",
                f"{what} at {site}, token {token} ({place}): {count} are not finite",
                "Look at the weights of the block that computes it, or load the model"
                " in a wider dtype.",
            )

    def blocks(self, site: str | Site, rows: int = 65_536) -> Iterator[Tensor]:
        """Yield the rows of one site in order, at most `rows` at a time."""
        rows = integer(rows, "rows", 1)
        values = self[site]
        return iter(torch.split(values, min(rows, max(1, len(values)))))

    def to_numpy(self) -> NDArray[Any]:
        """Return the values as a numpy array, which has no bfloat16.

        Types narrower than float32 are widened to it, which is exact.
        """
        values = self.values.detach().cpu()
        return values.to(wide(values.dtype)).numpy()

    def to_xarray(self) -> "xarray.DataArray":
        """Return a DataArray with dims site, token, width and named coordinates.

        The coordinates are site, text, position, id and string.

        >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
        >>> states = States((Site(0),), torch.zeros(1, 1, 2), tokens, Source("toy"))
        >>> states.to_xarray().sel(site="layer.0").dims
        ('token', 'width')
        """
        import xarray

        return xarray.DataArray(
            self.to_numpy(),
            coordinates(self.sites, self.tokens),
            ("site", "token", "width"),
            "states",
            {"source": json.dumps(self.source.to_json())},
        )

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a frame with one row per token and the columns (site, channel).

        Its index is text, position, id and string.

        >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
        >>> states = States((Site(0),), torch.zeros(1, 1, 2), tokens, Source("toy"))
        >>> states.to_pandas()["layer.0"].shape
        (1, 2)
        """
        import pandas

        tokens = self.tokens
        index = pandas.MultiIndex.from_arrays(
            [
                tokens.text,
                tokens.positions,
                tokens.ids,
                pandas.Index(list(tokens.strings), dtype=object),
            ],
            names=["text", "position", "id", "string"],
        )
        columns = pandas.MultiIndex.from_product(
            [map(str, self.sites), range(self.width)], names=["site", "channel"]
        )
        rows = self.to_numpy().swapaxes(0, 1).reshape(len(tokens), -1)
        return pandas.DataFrame(rows, index, columns)

    def save(self, path: PathLike) -> None:
        """Write a safetensors file in the native dtype, whole or not at all.

        `States.load` returns it exactly.
        """
        write(path, {"": self._parts()})

    @classmethod
    def load(cls, path: PathLike) -> "States":
        """Read a file that `save` wrote."""
        loaded = load_states(path)
        if isinstance(loaded, Pair):
            raise FileError(
                f"Cannot read {path} as States",
                "it holds a pair",
                "Read it with Pair.load().",
            )
        return loaded

    @classmethod
    def read(
        cls,
        data: Any,
        *,
        tokens: Any = None,
        sites: SitePatterns | Sequence[str | Site | int] | Mapping[str, Any] | None = (
            None
        ),
        residual: Any = None,
        source: Source | str = "",
    ) -> "States":
        """Read states that another program computed, from its file or its objects.

        `data` is what vLLM's `extract_hidden_states` wrote (or a list of such files,
        one for each text), a `.safetensors`, `.npy` or `.npz` file, an array `[layer,
        token, width]` (always in this order) or `[layer, text, token, width]`, a dict
        of tensors by the names of nnsight, TransformerLens or Hugging Face, or an
        ActivationCache. `sites` say what each layer of an array is, or, as a mapping,
        what a name means. `tokens` are the ids of each text, unless the file has them;
        what a tokenizer returned, with its attention mask; or `model.encode(texts)`.
        `residual` names the tensor of a residual that is kept apart, which is added.
        What is not known is asked for.

        >>> layers = torch.zeros(2, 3, 8)
        >>> States.read(layers, tokens=[5, 6, 7], sites=["layer.0", "final"]).sites
        (Site('layer.0'), Site('final'))
        >>> States.read(layers, tokens=[5, 6, 7])
        Traceback (most recent call last):
        hiddenscope.errors.StatesError: Cannot read states from a Tensor: it holds 2 layers and does not say which. Give sites=, one for each layer: [1, 2] is the state after block 1 and after block 2, as vLLM numbers them.
        """  # noqa: E501
        items = data if isinstance(data, list | tuple) else ()
        if items and all(isinstance(item, str | os.PathLike) for item in items):
            if tokens is not None:
                raise StatesError(
                    f"Cannot read states from {len(data)} files",
                    "tokens are given for all of them together",
                    "Leave tokens out, or read the files one at a time.",
                )
            options = {"sites": sites, "residual": residual, "source": source}
            parts = [cls.read(path, **options) for path in data]
            return join([replace(part, source=parts[0].source) for part in parts])
        foreign = open_foreign(data)
        if foreign.header.get("format", "").startswith("hiddenscope.states/"):
            return cls.load(data)
        if isinstance(source, str):
            source = Source(source or foreign.name)
        states = cls(*read_foreign(foreign, tokens, sites, residual, source))
        states.check_finite()
        return states

    def _parts(self) -> StackParts:
        return StackParts(self.sites, self.values, self.tokens, self.source)

    def _select(self, patterns: SitePatterns) -> tuple[Site, ...]:
        owner = f"these states of {terminal_safe(self.source.model)}"
        return self.source.select_sites(patterns, self.sites, owner)

    def _index(self, site: str | Site) -> int:
        selected = self._select(site)
        if len(selected) > 1:
            raise SiteError(
                f"Cannot get the site {str(site)[:60]!r}",
                f"it names {len(selected)} sites",
                "Name one, or use .select(sites=...).",
            )
        return self.sites.index(selected[0])


@checked
@dataclass(frozen=True, repr=False)
class Pair:
    """The states of an encoder and of a decoder, each with its own tokens.

    >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
    >>> sites = Site.parse("encoder.layer.0"), Site.parse("decoder.layer.0")
    >>> values = torch.zeros(1, 1, 2)
    >>> stacks = [States((site,), values, tokens, Source("t5")) for site in sites]
    >>> Pair(*stacks)["decoder.layer.0"].shape
    torch.Size([1, 2])
    """

    encoder: States
    decoder: States

    def __post_init__(self) -> None:
        stacks = self.encoder.sites[0].stack, self.decoder.sites[0].stack
        if stacks != ("encoder", "decoder"):
            raise StatesError(
                "Cannot pair an encoder and a decoder",
                f"the stacks of its sites are {stacks}",
                "Name the stack of each site.",
            )

    @property
    def sites(self) -> tuple[Site, ...]:
        """Return the sites of both stacks."""
        return self.encoder.sites + self.decoder.sites

    def __repr__(self) -> str:
        return f"{self.encoder!r}\n{self.decoder!r}"

    def __getitem__(self, site: str | Site | int) -> Tensor:
        matches = []
        refusals = []
        for states in (self.encoder, self.decoder):
            try:
                selected = states._select(named_layer(site))
            except SiteError as error:
                refusals.append(error)
                continue
            matches += [(states, match) for match in selected]
        if not matches:
            raise refusals[str(site).startswith("decoder")]
        if len(matches) > 1:
            raise SiteError(
                f"Cannot get the site {str(site)[:60]!r}",
                f"it names {len(matches)} sites",
                "Name one, with its stack.",
            )
        states, match = matches[0]
        return states[match]

    def save(self, path: PathLike) -> None:
        """Write both to one safetensors file; `Pair.load` returns them exactly."""
        parts = {"encoder.": self.encoder._parts(), "decoder.": self.decoder._parts()}
        write(path, parts)

    @classmethod
    def load(cls, path: PathLike) -> "Pair":
        """Read a file that `save` wrote."""
        loaded = load_states(path)
        if isinstance(loaded, States):
            raise FileError(
                f"Cannot read {path} as a Pair",
                "it holds one stack",
                "Read it with States.load().",
            )
        return loaded


def join(parts: Sequence[States]) -> States:
    """Join the states of several captures, text after text.

    Sites, widths, dtype and source must agree.

    >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
    >>> states = States((Site(0),), torch.zeros(1, 1, 2), tokens, Source("toy"))
    >>> join([states, states]).tokens.count
    2
    """
    if not parts:
        raise StatesError(
            "Cannot join states", "the list is empty", "Give at least one."
        )
    first = parts[0]
    if any(_make(part) != _make(first) for part in parts[1:]):
        reason = "they differ in sites, width, dtype, source, or in having texts"
        raise StatesError(
            "Cannot join states", reason, "Join states that were captured alike."
        )
    all_tokens = [part.tokens for part in parts]
    lengths = [len(tokens) for tokens in all_tokens]
    # The number that the first text of each part gets, and the number of all.
    *starts, count = accumulate((tokens.count for tokens in all_tokens), initial=0)
    texts = chain.from_iterable(tokens.texts or () for tokens in all_tokens)

    def gather(name: str) -> Ints:
        return np.concatenate([getattr(tokens, name) for tokens in all_tokens])

    joined = Tokens(
        None if first.tokens.texts is None else tuple(texts),
        gather("text") + np.repeat(starts, lengths),
        gather("positions"),
        gather("ids"),
        tuple(chain.from_iterable(tokens.strings for tokens in all_tokens)),
        gather("spans"),
        count,
    )
    values = join_tokens([part.values for part in parts])
    return States(first.sites, values, joined, first.source)


def _make(states: States) -> tuple[object, ...]:
    """Return what two captures must share to be joined."""
    has_texts = states.tokens.texts is not None
    return states.sites, states.widths, states.values.dtype, states.source, has_texts


def load_states(path: PathLike) -> States | Pair:
    """Read the states of a file, of one stack or of an encoder and a decoder.

    >>> import tempfile
    >>> tokens = Tokens(("hi",), [0], [0], [7], ("hi",))
    >>> states = States((Site(0),), torch.zeros(1, 1, 2), tokens, Source("toy"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     states.save(f"{folder}/states.safetensors")
    ...     load_states(f"{folder}/states.safetensors")["layer.0"].shape
    torch.Size([1, 2])
    """
    try:
        stacks = {prefix: States(*part) for prefix, part in read_file(path).items()}
        if "" in stacks:
            return stacks[""]
        return Pair(stacks["encoder."], stacks["decoder."])
    except StatesError as error:
        raise FileError(
            f"Cannot read states from {os.fspath(path)}",
            str(error),
            "Save the states again.",
        ) from error


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
