"""Mixed values: the values of sites whose widths differ, which make no single tensor.

Sites of one width still lie in one tensor, a group. So selecting the sites of one width
takes no copy, and a file holds one tensor for each width.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Never, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.errors import StatesError
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Ints


@dataclass(frozen=True, repr=False, eq=False)
class MixedValues:
    """Values of sites of different widths: a tensor `[token, width]` for each site.

    It stands where sites of one width have a tensor `[site, token, width]`. It can be
    indexed by site and iterated; whatever else a tensor can do raises an error that
    says which widths there are. `groups` holds the sites of each width together, in
    their order.

    >>> wide, narrow = torch.zeros(3, 8), torch.ones(3, 4)
    >>> values = stack_sites((Site(1), Site(None)), [wide, narrow])
    >>> len(values), values[1].shape, values.widths
    (2, torch.Size([3, 4]), (8, 4))
    >>> values.shape
    Traceback (most recent call last):
    hiddenscope.errors.StatesError: Cannot read these states as one tensor: layer.1 is 8 wide and final is 4 wide. Select sites of one width with .select(sites=...), or read one with states['final'].
    """  # noqa: E501

    sites: tuple[Site, ...]
    widths: tuple[int, ...]
    groups: Mapping[int, Tensor]

    def __post_init__(self) -> None:
        reason = self._fault()
        if reason:
            remedy = "Give one tensor [site, token, width] for each width."
            raise StatesError("Cannot make mixed values", reason, remedy)

    def _fault(self) -> str:
        """Say how the groups do not fit the sites; empty if they do."""
        if len(self.widths) != len(self.sites):
            return f"there are {len(self.sites)} sites and {len(self.widths)} widths"
        if len(self.groups) < 2 or set(self.groups) != set(self.widths):
            return f"the widths are {self.widths}, the groups {tuple(self.groups)}"
        first = self._first
        for width, group in self.groups.items():
            expected = (self.widths.count(width), first.shape[1], width)
            if group.shape != expected:
                return f"a group is {list(group.shape)}, and must be {list(expected)}"
            if (group.dtype, group.device) != (first.dtype, first.device):
                return "the groups differ in dtype or device"
        return ""

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of all values."""
        return self._first.dtype

    @property
    def device(self) -> torch.device:
        """Return the device that all values are on."""
        return self._first.device

    @property
    def nbytes(self) -> int:
        """Return the bytes of all values."""
        return sum(group.nbytes for group in self.groups.values())

    @property
    def tokens(self) -> int:
        """Return the number of rows that each site has."""
        return self._first.shape[1]

    @property
    def _first(self) -> Tensor:
        return next(iter(self.groups.values()))

    def __len__(self) -> int:
        return len(self.sites)

    def __getitem__(self, site: int) -> Tensor:
        try:
            place = operator.index(site)
        except TypeError:
            # A slice, a tuple or a mask asks for more than the rows of one site.
            self._refuse()
        width = self.widths[place]
        before = self.widths[: range(len(self))[place]]
        return self.groups[width][before.count(width)]

    def __iter__(self) -> Iterator[Tensor]:
        for site in range(len(self)):
            yield self[site]

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        widths = " and ".join(map(str, self.groups))
        return f"<MixedValues {dtype}: {len(self)} sites, {widths} wide>"

    def __getattr__(self, name: str) -> Never:
        # Only for what a tensor has: notebooks and `copy` look for methods by name.
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"MixedValues has no attribute {name!r}")
        self._refuse()

    def _refuse(self, *_: object) -> Never:
        raise different_widths(self.sites, self.widths)

    # Python looks these up on the class, past `__getattr__`. Without them, `==` would
    # be False and `+` a TypeError.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __sub__ = __mul__ = __truediv__ = __pow__ = __matmul__ = _refuse
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rpow__ = __rmatmul__ = _refuse
    __neg__ = __abs__ = __invert__ = __and__ = __or__ = __array__ = _refuse
    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Never:
        """Refuse to be an argument of any function of torch, such as `torch.stack`."""
        pending = [*args, *(kwargs or {}).values()]
        while pending:
            argument = pending.pop()
            if isinstance(argument, MixedValues):
                argument._refuse()
            if isinstance(argument, list | tuple):
                pending += argument
        raise AssertionError("torch calls this only with such an argument")


SiteValues: TypeAlias = Tensor | MixedValues
"""Values `[site, token, width]`, or those of sites whose widths differ."""


def different_widths(sites: Sequence[Site], widths: Sequence[int]) -> StatesError:
    """Return the error that names two sites whose widths differ."""
    other = next(place for place, width in enumerate(widths) if width != widths[0])
    return StatesError(
        "Cannot read these states as one tensor",
        f"{sites[0]} is {widths[0]} wide and {sites[other]} is {widths[other]} wide",
        "Select sites of one width with .select(sites=...), or read one with"
        f" states['{sites[other]}'].",
    )


def check_one_width(sites: Sequence[Site], widths: Sequence[int]) -> None:
    """Refuse sites whose widths differ."""
    if len(set(widths)) > 1:
        raise different_widths(sites, widths)


def one_tensor(values: SiteValues) -> Tensor:
    """Return values `[site, token, width]`; refuse those of sites whose widths differ.

    >>> one_tensor(torch.zeros(2, 3, 8)).shape
    torch.Size([2, 3, 8])
    """
    if isinstance(values, MixedValues):
        values._refuse()
    return values


def stack_sites(sites: Sequence[Site], rows: Sequence[Tensor]) -> SiteValues:
    """Put the rows `[token, width]` of each site together, whatever their widths are.

    >>> stack_sites((Site(0), Site(1)), [torch.zeros(3, 8), torch.ones(3, 8)]).shape
    torch.Size([2, 3, 8])
    """
    by_width: dict[int, list[Tensor]] = {}
    for values in rows:
        by_width.setdefault(values.shape[-1], []).append(values)
    groups = {width: torch.stack(group) for width, group in by_width.items()}
    return of_groups(sites, [values.shape[-1] for values in rows], groups)


def of_groups(
    sites: Sequence[Site], widths: Sequence[int], groups: Mapping[int, Tensor]
) -> SiteValues:
    """Return the only group, or the groups as mixed values."""
    if len(groups) == 1:
        return next(iter(groups.values()))
    return MixedValues(tuple(sites), tuple(widths), groups)


def groups_of(values: SiteValues) -> list[Tensor]:
    """Return the tensors `[site, token, width]` that values are made of."""
    if isinstance(values, MixedValues):
        return list(values.groups.values())
    return [values]


def each_group(values: SiteValues, change: Callable[[Tensor], Tensor]) -> SiteValues:
    """Apply a function of `[site, token, width]` that keeps sites and widths."""
    if isinstance(values, Tensor):
        return change(values)
    groups = {width: change(group) for width, group in values.groups.items()}
    return MixedValues(values.sites, values.widths, groups)


def take_sites(values: SiteValues, places: Ints) -> SiteValues:
    """Return the values of some sites; a tensor if they are of one width."""
    if isinstance(values, Tensor):
        return take(values, 0, places)
    widths = np.array(values.widths)
    groups = {}
    for width in dict.fromkeys(widths[places].tolist()):
        members = np.flatnonzero(widths == width)
        selected = places[widths[places] == width]
        groups[width] = take(
            values.groups[width], 0, np.searchsorted(members, selected)
        )
    sites = [values.sites[place] for place in places]
    return of_groups(sites, widths[places].tolist(), groups)


def join_tokens(parts: Sequence[SiteValues]) -> SiteValues:
    """Join values of the same sites and widths, token after token."""
    first = parts[0]
    groups = zip(*map(groups_of, parts), strict=True)
    joined = [torch.cat(group, 1) for group in groups]
    if isinstance(first, Tensor):
        return joined[0]
    by_width = dict(zip(first.groups, joined, strict=True))
    return MixedValues(first.sites, first.widths, by_width)


def take(values: Tensor, dim: int, indices: Ints) -> Tensor:
    """Return some slices of the values, sharing memory if they are one run."""
    if len(indices) and indices[-1] - indices[0] + 1 == len(indices):
        return values.narrow(dim, int(indices[0]), len(indices))
    return values.index_select(dim, torch.from_numpy(indices).to(values.device))
