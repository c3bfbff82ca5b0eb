"""Changes: what can be done to a state on its way, and at which tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.arguments import checked
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.passes.inputs import Inputs
from hiddenscope.sites import Site


@checked
@dataclass(frozen=True)
class Replace:
    """Replace a state by a number, a row `[width]`, or a row for each token.

    Rows `[token, width]` stand text after text, as in `States`; `[text, token, width]`
    is taken too. `tokens` are positions in each text: an int, several, a slice or a
    mask; negative ones count from the end.

    >>> Replace([1.0, 2.0], tokens=-1).of(torch.zeros(2, 2))
    tensor([[1., 2.],
            [1., 2.]])
    """

    values: Any
    tokens: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _numbers("Replace", self.values))

    def of(self, rows: Tensor) -> Tensor:
        """Return the changed rows [token, width]."""
        return _like(self.values, rows).expand_as(rows)


@checked
@dataclass(frozen=True)
class Add:
    """Add `scale` times a vector `[width]`, or a row for each token, to a state.

    Wherever a change takes a vector, it takes a `Direction` too, such as a feature.

    >>> Add([1.0, 2.0], scale=10).of(torch.zeros(1, 2))
    tensor([[10., 20.]])
    """

    values: Any
    tokens: Any = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _numbers("Add", self.values))
        object.__setattr__(self, "scale", _finite_number("Add", self.scale))

    def of(self, rows: Tensor) -> Tensor:
        """Return the changed rows [token, width]."""
        return rows + _like(self.values * self.scale, rows)


@checked
@dataclass(frozen=True)
class Scale:
    """Multiply a state by a number, or only what of it lies along a direction.

    >>> Scale(0.5).of(torch.ones(1, 2))
    tensor([[0.5000, 0.5000]])
    >>> Scale(3, along=[0.0, 2.0]).of(torch.ones(1, 2))
    tensor([[1., 3.]])
    """

    factor: float
    tokens: Any = None
    along: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _finite_number("Scale", self.factor))
        if self.along is not None:
            object.__setattr__(self, "along", _one_vector("Scale", self.along))

    def of(self, rows: Tensor) -> Tensor:
        """Return the changed rows [token, width]."""
        if self.along is None:
            return rows * self.factor
        return _scaled_along(rows, self.along, self.factor)


@checked
@dataclass(frozen=True)
class Project:
    """Remove the component of a state along a direction `[width]`.

    >>> Project([0.0, 2.0]).of(torch.ones(1, 2))
    tensor([[1., 0.]])
    """

    direction: Any
    tokens: Any = None

    def __post_init__(self) -> None:
        direction = _one_vector("Project", self.direction)
        object.__setattr__(self, "direction", direction)

    def of(self, rows: Tensor) -> Tensor:
        """Return the changed rows [token, width]; computed in at least float32."""
        return _scaled_along(rows, self.direction, 0.0)


Change: TypeAlias = Replace | Add | Scale | Project | Callable[[Tensor], Tensor]


# Where a change holds what must be as wide as the state: rows, or a direction.
VECTORS = {Replace: "values", Add: "values", Scale: "along", Project: "direction"}


def at_site(change: Any, site: Site, width: int) -> Any:
    """Return a change with the vector that its direction has at a site."""
    name = VECTORS.get(type(change), "")
    direction: Any = getattr(change, name, None)
    if not hasattr(direction, "vector_at"):
        return change
    return replace(change, **{name: direction.vector_at(site, width)})


@dataclass(frozen=True)
class Positions:
    """The positions [text, token] of a pass's tokens in their texts; -1 is padding.

    `lengths` are those of the texts so far, earlier passes with a cache included; None
    where they cannot be known. `whole` says that every text is in this one pass, so
    that a position outside it is a mistake.
    """

    positions: Tensor
    lengths: tuple[int, ...] | None
    whole: bool = True

    @classmethod
    def of(cls, inputs: Inputs) -> Positions:
        """Return the positions of texts padded on the right, in one whole pass.

        >>> Positions.of(Inputs(((5, 6), (7,)))).positions
        tensor([[ 0,  1],
                [ 0, -1]])
        """
        lengths = torch.tensor(inputs.lengths)[:, None]
        columns = torch.arange(int(lengths.max())).expand(len(inputs), -1)
        return cls(columns.masked_fill(columns >= lengths, -1), tuple(inputs.lengths))

    @classmethod
    def by_mask(cls, mask: Tensor, tokens: int) -> Positions:
        """Return the positions that follow from a mask over the texts so far.

        This pass has the last `tokens` of them.

        >>> Positions.by_mask(torch.tensor([[0, 1, 1]]), tokens=2).positions
        tensor([[0, 1]])
        """
        real = mask.bool().cpu()
        positions = (real.long().cumsum(1) - 1).masked_fill(~real, -1)
        recent = positions[:, positions.shape[1] - tokens :]
        return cls(recent, tuple(real.sum(1).tolist()), whole=False)

    def select(self, tokens: Any) -> tuple[Tensor, Tensor]:
        """Return the places (text, token) in this pass of the selected positions.

        They come text after text, in the order of the selection.
        """
        if tokens is None:
            texts, columns = (self.positions >= 0).nonzero(as_tuple=True)
            return texts, columns
        if self.lengths is None:
            raise StatesError(
                f"Cannot find the tokens {tokens!r}",
                "this pass continues from a cache that does not say how many tokens it"
                " holds",
                "Leave `tokens` out to change all of a pass.",
            )
        places: list[tuple[int, int]] = []
        for text, length in enumerate(self.lengths):
            row = self.positions[text].tolist()
            column_of = {position: column for column, position in enumerate(row)}
            selected = _positions(
                tokens, text, length, len(self.lengths), strict=self.whole
            )
            for position in selected:
                if position >= 0 and position in column_of:
                    places.append((text, column_of[position]))
        both = torch.tensor(places, dtype=torch.long).reshape(-1, 2)
        return both[:, 0], both[:, 1]


def changed(change: Change, states: Tensor, where: Positions, site: object) -> Tensor:
    """Return the states [text, token, width] after a change, in a new tensor.

    Padding and tokens that were not selected stay as they are.
    """
    if where.positions.shape != states.shape[:2]:
        raise StatesError(
            f"Cannot change the state at {site} token by token",
            f"the state has {list(states.shape[:2])} texts and tokens, and the inputs"
            f" {list(where.positions.shape)}",
            "Report this model.",
        )
    if not isinstance(change, Replace | Add | Scale | Project):
        new: object = change(states.clone())
        reason = ""
        if not isinstance(new, Tensor):
            reason = type(new).__name__
        elif new.is_nested or new.layout != torch.strided:
            reason = "a tensor that is not dense"
        elif new.shape != states.shape or not new.is_floating_point():
            reason = f"{new.dtype} of the shape {list(new.shape)}"
        if reason or not isinstance(new, Tensor):
            raise StatesError(
                f"Cannot use what the function made of {site}",
                f"it returned {reason}",
                f"Return a tensor {list(states.shape)}.",
            )
        real = (where.positions >= 0).to(states.device)[..., None]
        return torch.where(real, new.to(states), states)
    texts, columns = where.select(change.tokens)
    if not len(texts):
        return states
    places = texts.to(states.device), columns.to(states.device)
    check(change, len(texts), states.shape[-1], site)
    return states.index_put(places, change.of(states[places]).to(states.dtype))


def check(change: Change, rows: int, width: int, site: object) -> None:
    """Refuse values that do not fit this many rows; -1 stands for any number."""
    values = getattr(change, VECTORS.get(type(change), ""), None)
    if not isinstance(values, Tensor) or values.ndim == 0:
        return
    problem = (
        f"Cannot use {type(change).__name__} at {site} with values of the shape"
        f" {list(values.shape)}"
    )
    if values.shape[-1] != width:
        raise StatesError(
            problem,
            f"the states there are {width} wide",
            f"Give rows of {width} numbers.",
        )
    if values.ndim > 1 and rows not in (-1, values.shape[:-1].numel()):
        raise StatesError(
            problem,
            f"there are {rows} tokens to change",
            "Give one row for each, text after text, or one row for all.",
        )


def _positions(
    tokens: Any, text: int, length: int, texts: int, *, strict: bool
) -> list[int]:
    """Return the selected positions of one text, in the order of the selection."""
    if isinstance(tokens, slice):
        return list(range(length))[tokens]
    reason = ""
    array: NDArray[Any] = np.array(())
    try:
        array = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
        is_whole = array.dtype.kind in "iu" or not array.size
        if array.dtype != bool and (array.ndim > 1 or not is_whole):
            reason = f"they are {array.dtype} of the shape {list(array.shape)}"
    except (TypeError, ValueError, RuntimeError) as error:
        # A list whose lists differ in length, or a meta tensor.
        reason = f"they are not an array ({str(error)[:100]})"
    if reason:
        remedy = "Give positions as integers, a slice or a mask."
        raise StatesError("Cannot read the tokens to change", reason, remedy)
    if array.dtype == bool:
        row = array[text] if array.ndim == 2 and len(array) == texts else array
        fits = row.ndim == 1 and len(row) >= length and not row[length:].any()
        if not fits or (array.ndim == 1 and len(row) != length):
            raise StatesError(
                "The mask does not fit the tokens",
                f"it has the shape {list(array.shape)}, and text {text} has {length}"
                " tokens",
                "Give one entry per token, or positions or a slice.",
            )
        return [int(place) for place in np.flatnonzero(row)]
    positions: list[int] = []
    for number in array.astype(np.int64).reshape(-1).tolist():
        position = number + length if number < 0 else number
        if strict and not 0 <= position < length:
            raise StatesError(
                f"No token at position {number}",
                f"text {text} has {length} tokens, 0 to {length - 1}",
                "Give positions that every text has.",
            )
        positions.append(position)
    if len(set(positions)) < len(positions):
        raise StatesError(
            f"Cannot change the tokens {array.tolist()}",
            f"in text {text} one of them comes twice",
            "Name each once.",
        )
    return positions


def _one_vector(name: str, values: Any) -> Any:
    """Return a vector [width] that is not zero, or a direction."""
    vector = _numbers(name, values)
    if hasattr(vector, "vector_at") or (vector.ndim == 1 and vector.any()):
        return vector
    reason = "it is zero"
    if vector.ndim != 1:
        reason = f"it has the shape {list(vector.shape)}"
    raise StatesError(
        "Cannot project along this direction",
        reason,
        "Give one vector [width] that is not zero.",
    )


def _scaled_along(rows: Tensor, direction: Tensor, factor: float) -> Tensor:
    """Return rows with their component along a direction multiplied by a factor."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    direction = direction.to(torch.float64).cpu()
    # Without this, the squares in the norm of an extreme vector leave the range.
    direction = direction / direction.abs().max()
    unit = (direction / direction.norm()).to(rows.device, wide)
    states = rows.to(wide)
    along = (states * unit).sum(-1, keepdim=True)
    scaled: Tensor = states - (1 - factor) * along * unit
    return scaled.to(rows.dtype)


def _numbers(name: str, values: Any) -> Any:
    """Return values as a tensor of finite floating numbers; a direction as it is.

    It is a copy, so that nobody changes them afterwards.
    """
    if hasattr(values, "vector_at"):
        return values
    problem = f"Cannot use the values of {name}"
    try:
        if isinstance(values, Tensor):
            tensor = values.detach().clone()
        else:
            tensor = torch.tensor(np.asarray(values))
    except (TypeError, ValueError) as error:
        reason = f"they are not an array ({error})"
        raise StatesError(problem, reason, "Give a tensor.") from None
    if tensor.ndim == 0 and not tensor.is_complex() and tensor.dtype != torch.bool:
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    reason = remedy = ""
    if not tensor.is_floating_point():
        reason, remedy = f"their dtype is {tensor.dtype}", "Give floating numbers."
    elif tensor.ndim > 3 or not tensor.numel():
        reason = f"their shape is {list(tensor.shape)}"
        remedy = "Give [width] or [token, width]."
    elif tensor.is_meta:
        reason, remedy = "a meta tensor has no values", "Give a tensor with values."
    if reason:
        raise StatesError(problem, reason, remedy)
    if not torch.isfinite(tensor).all():
        raise NotFinite(
            problem, "there is a NaN or an infinity among them", "Give finite numbers."
        )
    return tensor


def _finite_number(name: str, value: Any) -> float:
    number = float(value)
    if not np.isfinite(number):
        raise NotFinite(
            f"{name} takes a finite number, got {number}",
            "it is not finite",
            "Give a finite number.",
        )
    return number


def _like(values: Tensor, rows: Tensor) -> Tensor:
    """Return values on the device and in the dtype of the rows."""
    if values.ndim > 2:
        values = values.flatten(0, -2)
    return values.to(rows.device, rows.dtype)
