"""Taps: where a hidden state can be read in a module, and which axes of the tensor
there are text, token and width.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hiddenscope.modules import hooks


@dataclass(frozen=True)
class Layout:
    """Which axis of a tensor is the text and which the token; all other axes together
    are the width.

    A block may work on more rows than there are tokens: padding behind the text
    (`at_end=False`), or rows of its own before it, such as a prompt (`at_end=True`).
    `flat` means that texts and tokens share one axis.

    >>> import torch
    >>> Layout(text=1, token=0).states(torch.zeros(7, 2, 64), tokens=7).shape
    torch.Size([2, 7, 64])
    """

    text: int = 0
    token: int = 1
    at_end: bool = False
    flat: bool = False

    def states(self, tensor: Tensor, tokens: int) -> Tensor:
        """The tensor as [text, token, width], without a copy wherever possible."""
        if self.flat:
            return tensor.reshape(-1, tokens, tensor.shape[-1])
        if (self.text, self.token) != (0, 1):
            tensor = tensor.movedim((self.text, self.token), (0, 1))
        if tensor.ndim > 3:
            tensor = tensor.flatten(2)
        extra = tensor.shape[1] - tokens
        return (
            tensor[:, extra:]
            if self.at_end and extra
            else tensor[:, :tokens]
            if extra
            else tensor
        )

    def with_states(self, tensor: Tensor, states: Tensor) -> Tensor:
        """A copy of the tensor with other states [text, token, width] in it; rows that
        are no tokens stay.

        >>> import torch
        >>> Layout(text=1, token=0).with_states(torch.zeros(2, 1, 1), torch.tensor([[[5.0], [6.0]]])).flatten()
        tensor([5., 6.])
        """
        if self.flat:
            return states.reshape(tensor.shape).clone()
        new = tensor.clone()
        rows = new.movedim((self.text, self.token), (0, 1))
        extra = rows.shape[1] - states.shape[1]
        rows = rows[:, extra:] if self.at_end and extra else rows[:, : states.shape[1]]
        rows.copy_(states.reshape(rows.shape))
        return new


PLAIN = Layout()


def layouts(tensor: Tensor, texts: int, tokens: int) -> Iterator[Layout]:
    """Every layout in which the tensor holds one state for each of so many tokens of so
    many texts.
    """
    shape = tensor.shape
    if tensor.ndim == 2 and shape[0] == texts * tokens:
        yield Layout(flat=True)
    if tensor.ndim < 3:
        return
    for token in sorted(
        range(tensor.ndim), key=lambda axis: (shape[axis] != tokens, axis)
    ):
        for text in range(tensor.ndim):
            if text == token or shape[text] != texts or shape[token] < tokens:
                continue
            yield Layout(text, token)
            if shape[token] > tokens:
                yield Layout(text, token, at_end=True)


@dataclass(frozen=True)
class Tap:
    """Where a hidden state can be read: the path of a module, which of its calls in a
    pass, its input or its output.
    """

    path: str
    call: int
    side: hooks.Side
    layout: Layout = PLAIN

    def read(self, *seen: Any) -> Tensor | None:
        """The tensor that holds the state, from what a hook on this side is called
        with.
        """
        return (
            hooks.state_in(*seen)
            if self.side == "input"
            else hooks.first_tensor(seen[0])
        )

    def written(self, new: Tensor, *seen: Any) -> Any:
        """What a hook on this side is called with, with another tensor in the place of
        the state's.
        """
        if self.side == "output":
            return hooks.with_first_tensor(seen[0], new)
        return hooks.with_state_in(seen[0], seen[1], new)

    def watch(
        self, module: nn.Module, seen: Callable[[Tensor], Tensor | None]
    ) -> hooks.Watch:
        """A watch for one pass: it shows the tensor to `seen`, and replaces it by what
        `seen` returns, if anything.
        """
        calls = itertools.count()

        def at(*what: Any) -> Any:
            tensor = self.read(*what)
            new = (
                seen(tensor)
                if next(calls) == self.call and tensor is not None
                else None
            )
            return None if new is None else self.written(new, *what)

        return hooks.Watch(module.get_submodule(self.path), self.side, at)

    def __str__(self) -> str:
        again = f" (call {self.call + 1})" if self.call else ""
        return f"{self.side} of {self.path or 'the module'}{again}"
