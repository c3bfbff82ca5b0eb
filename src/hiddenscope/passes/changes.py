"""Changes: what may be done to a state on its way, and at which tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hiddenscope.arguments import checked
from hiddenscope.errors import NotFinite, StatesError
from hiddenscope.passes.inputs import Inputs


@checked
@dataclass(frozen=True)
class Replace:
    """Put values in a state's place: one number, one row `[width]`, or a row for each
    token `[token, width]`.

    Rows stand text after text, as in `States`; `[text, token, width]` is taken too.
    `tokens` are positions in each text: an int, several, a slice or a mask; negative
    ones count from the end.

    >>> Replace([1.0, 2.0], tokens=-1).of(torch.zeros(2, 2))
    tensor([[1., 2.],
            [1., 2.]])
    """

    values: Any
    tokens: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _numbers("Replace", self.values))

    def of(self, rows: Tensor) -> Tensor:
        """What becomes of the chosen rows [token, width]."""
        return _like(self.values, rows).expand_as(rows)


@checked
@dataclass(frozen=True)
class Add:
    """Add `scale` times a vector `[width]`, or a row for each token, to a state.

    >>> Add([1.0, 2.0], scale=10).of(torch.zeros(1, 2))
    tensor([[10., 20.]])
    """

    values: Any
    tokens: Any = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", _numbers("Add", self.values))
        object.__setattr__(self, "scale", _strength("Add", self.scale))

    def of(self, rows: Tensor) -> Tensor:
        """What becomes of the chosen rows [token, width]."""
        return rows + _like(self.values * self.scale, rows)


@checked
@dataclass(frozen=True)
class Scale:
    """Multiply a state by a number; 0 takes it away.

    >>> Scale(0.5).of(torch.ones(1, 2))
    tensor([[0.5000, 0.5000]])
    """

    factor: float
    tokens: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", _strength("Scale", self.factor))

    def of(self, rows: Tensor) -> Tensor:
        """What becomes of the chosen rows [token, width]."""
        return rows * self.factor


@checked
@dataclass(frozen=True)
class Project:
    """Take the part of a state that lies along a direction `[width]` out of it.

    >>> Project([0.0, 2.0]).of(torch.ones(1, 2))
    tensor([[1., 0.]])
    """

    direction: Any
    tokens: Any = None

    def __post_init__(self) -> None:
        direction = _numbers("Project", self.direction)
        if direction.ndim != 1 or not bool(direction.any()):
            reason = (
                "it is zero"
                if direction.ndim == 1
                else f"it has the shape {list(direction.shape)}"
            )
            raise StatesError(
                "Cannot project along this direction",
                reason,
                "Give one vector [width] that is not zero.",
            )
        object.__setattr__(self, "direction", direction)

    @property
    def values(self) -> Tensor:
        """What must be as wide as the state."""
        direction: Tensor = self.direction
        return direction

    def of(self, rows: Tensor) -> Tensor:
        """What becomes of the chosen rows [token, width]; computed in at least float32."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        direction = self.values.to(torch.float64).cpu()
        # So that no square of it is out of range.
        direction = direction / direction.abs().max()
        unit, states = (
            (direction / direction.norm()).to(rows.device, wide),
            rows.to(wide),
        )
        along = (states * unit).sum(-1, keepdim=True)
        projected: Tensor = states - along * unit
        return projected.to(rows.dtype)


Change: TypeAlias = Replace | Add | Scale | Project | Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Positions:
    """Where the tokens of one pass stand in their texts: positions [text, token], -1
    for padding.

    `lengths` are those of the texts so far, earlier passes with a cache included; None
    where they cannot be known. `whole` says that every text is in this one pass, so
    that a position outside it is a mistake.
    """

    positions: Tensor
    lengths: tuple[int, ...] | None
    whole: bool = True

    @classmethod
    def of(cls, inputs: Inputs) -> "Positions":
        """Those of texts that are padded on the right and go through in one pass.

        >>> Positions.of(Inputs(((5, 6), (7,)))).positions
        tensor([[ 0,  1],
                [ 0, -1]])
        """
        lengths = torch.tensor(inputs.lengths)[:, None]
        columns = torch.arange(int(lengths.max())).expand(len(inputs), -1)
        return cls(columns.masked_fill(columns >= lengths, -1), tuple(inputs.lengths))

    @classmethod
    def by_mask(
        cls, mask: Tensor, *, tokens: int | None = None, whole: bool = True
    ) -> "Positions":
        """By a mask over the texts so far, of which this pass has the last so many
        tokens.

        >>> Positions.by_mask(torch.tensor([[0, 1, 1]])).positions
        tensor([[-1,  0,  1]])
        """
        real = mask.bool().cpu()
        positions = (real.long().cumsum(1) - 1).masked_fill(~real, -1)
        kept = (
            positions if tokens is None else positions[:, positions.shape[1] - tokens :]
        )
        return cls(kept, tuple(real.sum(1).tolist()), whole)

    def chosen(self, tokens: Any) -> tuple[Tensor, Tensor]:
        """The places (text, token) in this pass of the chosen positions, text after
        text, in the order chosen.
        """
        if tokens is None:
            texts, columns = (self.positions >= 0).nonzero(as_tuple=True)
            return texts, columns
        if self.lengths is None:
            reason = (
                "this pass continues from a cache that does not say how many tokens it"
                " holds"
            )
            raise StatesError(
                f"Cannot find the tokens {tokens!r}",
                reason,
                "Leave `tokens` out to change all of a pass.",
            )
        places: list[tuple[int, int]] = []
        for text, length in enumerate(self.lengths):
            column = {
                position: at
                for at, position in enumerate(self.positions[text].tolist())
                if position >= 0
            }
            wanted = _positions(
                tokens, text, length, len(self.lengths), strict=self.whole
            )
            places += [
                (text, column[position]) for position in wanted if position in column
            ]
        both = torch.tensor(places, dtype=torch.long).reshape(-1, 2)
        return both[:, 0], both[:, 1]


def changed(change: Change, states: Tensor, where: Positions, site: Any) -> Tensor:
    """The states [text, token, width] after a change, in a new tensor; padding and what
    was not chosen stay.
    """
    if where.positions.shape != states.shape[:2]:
        reason = (
            f"the state has {list(states.shape[:2])} texts and tokens, and the inputs"
            f" {list(where.positions.shape)}"
        )
        raise StatesError(
            f"Cannot change the state at {site} token by token",
            reason,
            "Report this model.",
        )
    if not isinstance(change, Replace | Add | Scale | Project):
        new = change(states.clone())
        _fits_in(new, states, site)
        real = (where.positions >= 0).to(states.device)[..., None]
        return torch.where(real, new.to(states), states)
    places = tuple(place.to(states.device) for place in where.chosen(change.tokens))
    if not len(places[0]):
        return states
    check(change, len(places[0]), states.shape[-1], site)
    return states.index_put(places, change.of(states[places]).to(states.dtype))


def check(change: Change, rows: int, width: int, site: Any) -> None:
    """Refuse values that do not fit so many rows of a width; `rows` of -1 stands for
    any number.
    """
    values = getattr(change, "values", None)
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
    given = values.shape[:-1].numel()
    if values.ndim > 1 and rows not in (-1, given):
        remedy = "Give one row for each, text after text, or one row for all."
        raise StatesError(problem, f"there are {rows} tokens to change", remedy)


def _positions(
    tokens: Any, text: int, length: int, texts: int, *, strict: bool
) -> list[int]:
    """The chosen positions of one text, in the order chosen."""
    if isinstance(tokens, slice):
        return list(range(length))[tokens]
    try:
        array = np.asarray(tokens.cpu() if isinstance(tokens, Tensor) else tokens)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        # A list whose lists differ in length, a meta tensor.
    ) as error:
        reason = f"they are not an array ({str(error)[:100]})"
        remedy = "Give positions as integers, a slice or a mask."
        raise StatesError("Cannot read the tokens to change", reason, remedy) from error
    if array.dtype == bool:
        return _masked(array, text, length, texts)
    if array.ndim > 1 or (array.dtype.kind not in "iu" and array.size):
        reason = f"they are {array.dtype} of the shape {list(array.shape)}"
        raise StatesError(
            "Cannot read the tokens to change",
            reason,
            "Give positions as integers, a slice or a mask.",
        )
    places = [int(p) + length if p < 0 else int(p) for p in array.reshape(-1)]
    wrong = [
        int(p)
        for p, place in zip(array.reshape(-1), places, strict=True)
        if not 0 <= place < length
    ]
    if strict and wrong:
        reason = f"text {text} has {length} tokens, 0 to {length - 1}"
        raise StatesError(
            f"No token at position {wrong[0]}",
            reason,
            "Give positions that every text has.",
        )
    if len(set(places)) < len(places):
        reason = f"in text {text} one of them comes twice"
        raise StatesError(
            f"Cannot change the tokens {array.tolist()}", reason, "Name each once."
        )
    return places


def _masked(
    mask: "np.ndarray[Any, Any]", text: int, length: int, texts: int
) -> list[int]:
    """The positions that a mask [token] or [text, token] chooses in one text."""
    row = mask[text] if mask.ndim == 2 and len(mask) == texts else mask
    if (
        row.ndim != 1
        or len(row) < length
        or (mask.ndim == 1 and len(row) != length)
        or row[length:].any()
    ):
        reason = (
            f"it has the shape {list(mask.shape)}, and text {text} has {length} tokens"
        )
        raise StatesError(
            "The mask does not fit the tokens",
            reason,
            "Give one entry per token, or positions or a slice.",
        )
    return [int(place) for place in np.flatnonzero(row)]


def _numbers(name: str, values: Any) -> Tensor:
    """Values as a tensor of finite floating numbers; a copy, so that nobody changes
    them afterwards.
    """
    problem = f"Cannot use the values of {name}"
    try:
        tensor = (
            values.detach().clone()
            if isinstance(values, Tensor)
            else torch.tensor(np.asarray(values))
        )
    except (TypeError, ValueError) as error:
        raise StatesError(
            problem, f"they are not an array ({error})", "Give a tensor."
        ) from None
    if tensor.ndim == 0 and not tensor.is_complex() and tensor.dtype != torch.bool:
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    if not tensor.is_floating_point():
        raise StatesError(
            problem, f"their dtype is {tensor.dtype}", "Give floating numbers."
        )
    if tensor.ndim > 3 or not tensor.numel():
        raise StatesError(
            problem,
            f"their shape is {list(tensor.shape)}",
            "Give [width] or [token, width].",
        )
    if tensor.is_meta:
        raise StatesError(
            problem, "a meta tensor has no values", "Give a tensor with values."
        )
    if not bool(torch.isfinite(tensor).all()):
        raise NotFinite(
            problem, "there is a NaN or an infinity among them", "Give finite numbers."
        )
    return tensor


def _strength(name: str, strength: Any) -> float:
    try:
        number = float(strength)
    except (TypeError, ValueError):
        raise StatesError(
            f"{name} takes a number, got {strength!r}",
            "it is not a number",
            "Give a number.",
        ) from None
    if not np.isfinite(number):
        raise NotFinite(
            f"{name} takes a finite number, got {number}",
            "it is not finite",
            "Give a finite number.",
        )
    return number


def _like(values: Tensor, rows: Tensor) -> Tensor:
    """Values on the device and in the dtype of the rows, one row for each or one for
    all.
    """
    values = values.flatten(0, -2) if values.ndim > 2 else values
    return values.to(rows.device, rows.dtype)


def _fits_in(new: Any, states: Tensor, site: Any) -> None:
    problem, remedy = (
        f"Cannot use what the function made of {site}",
        f"Return a tensor {list(states.shape)}.",
    )
    if not isinstance(new, Tensor):
        raise StatesError(problem, f"it returned {type(new).__name__}", remedy)
    if new.is_nested or new.layout != torch.strided:
        raise StatesError(problem, "it returned a tensor that is not dense", remedy)
    if new.shape != states.shape or not new.is_floating_point():
        raise StatesError(
            problem, f"it returned {new.dtype} of the shape {list(new.shape)}", remedy
        )
