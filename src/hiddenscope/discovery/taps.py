"""Taps: where a hidden state can be read in a module, and the layout of its tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hiddenscope.modules import hooks


@dataclass(frozen=True)
class Layout:
    """Which axis of a tensor is the text and which the token.

    All other axes together are the width. A block may work on more rows than there are
    tokens: padding behind the text (`at_end=False`), or rows before it, such as a
    prompt of its own (`at_end=True`). `flat` means that texts and tokens share one
    axis.

    >>> import torch
    >>> Layout(text=1, token=0).states(torch.zeros(7, 2, 64), tokens=7).shape
    torch.Size([2, 7, 64])
    """

    text: int = 0
    token: int = 1
    at_end: bool = False
    flat: bool = False

    def texts(self, tensor: Tensor, tokens: int) -> int:
        """Return the number of texts in a tensor, each of `tokens` tokens."""
        return tensor.shape[0] // tokens if self.flat else tensor.shape[self.text]

    def length(self, tensor: Tensor) -> int:
        """Return the number of tokens of each text in a tensor."""
        return tensor.shape[1] if self.flat else tensor.shape[self.token]

    def states(self, tensor: Tensor, tokens: int) -> Tensor:
        """Return the tensor as [text, token, width], without a copy where possible."""
        if self.flat:
            return tensor.reshape(-1, tokens, tensor.shape[-1])
        if (self.text, self.token) != (0, 1):
            tensor = tensor.movedim((self.text, self.token), (0, 1))
        if tensor.ndim > 3:
            tensor = tensor.flatten(2)
        extra = tensor.shape[1] - tokens
        if not extra:
            return tensor
        return tensor[:, extra:] if self.at_end else tensor[:, :tokens]

    def with_states(self, tensor: Tensor, states: Tensor) -> Tensor:
        """Return a copy of the tensor that holds other states [text, token, width].

        >>> import torch
        >>> states = torch.tensor([[[5.0], [6.0]]])
        >>> Layout(text=1, token=0).with_states(torch.zeros(2, 1, 1), states).flatten()
        tensor([5., 6.])
        """
        if self.flat:
            return states.reshape(tensor.shape).clone()
        new = tensor.clone()
        rows = new.movedim((self.text, self.token), (0, 1))
        tokens = states.shape[1]
        extra = rows.shape[1] - tokens
        rows = rows[:, extra:] if self.at_end and extra else rows[:, :tokens]
        rows.copy_(states.reshape(rows.shape))
        return new


PLAIN = Layout()


def layouts(tensor: Tensor, texts: int, tokens: int) -> Iterator[Layout]:
    """Yield every layout in which a tensor holds a state for each token of the texts.

    Axes as long as the tokens come before longer ones.
    """
    shape = tensor.shape
    if tensor.ndim == 2 and shape[0] == texts * tokens:
        yield Layout(flat=True)
    if tensor.ndim < 3:
        return
    axes = range(tensor.ndim)
    for token in sorted(axes, key=lambda axis: (shape[axis] != tokens, axis)):
        for text in axes:
            if text == token or shape[text] != texts or shape[token] < tokens:
                continue
            yield Layout(text, token)
            if shape[token] > tokens:
                yield Layout(text, token, at_end=True)


@dataclass(frozen=True)
class Tap:
    """Where a hidden state can be read.

    That is the path of a module, the number of its call in a pass, and its input or its
    output.
    """

    path: str
    call: int
    side: hooks.Side
    layout: Layout = PLAIN

    def read(self, *arguments: Any) -> Tensor | None:
        """Return the tensor of the state, from the arguments of a hook on this side."""
        if self.side == "input":
            return hooks.state_in(*arguments)
        return hooks.first_tensor(arguments[0])

    def written(self, tensor: Tensor, *arguments: Any) -> Any:
        """Return the input or output of a hook with another tensor for the state."""
        if self.side == "output":
            return hooks.with_first_tensor(arguments[0], tensor)
        return hooks.with_state_in(arguments[0], arguments[1], tensor)

    def watch(
        self, module: nn.Module, callback: Callable[[Tensor], Tensor | None]
    ) -> hooks.Watch:
        """Return a watch for one pass that calls back with the tensor.

        A tensor that the callback returns takes its place.
        """
        calls = itertools.count()

        def at_call(*arguments: Any) -> Any:
            if next(calls) != self.call:
                return None
            tensor = self.read(*arguments)
            new = None if tensor is None else callback(tensor)
            return None if new is None else self.written(new, *arguments)

        return hooks.Watch(module.get_submodule(self.path), self.side, at_call)

    def __str__(self) -> str:
        again = f" (call {self.call + 1})" if self.call else ""
        return f"{self.side} of {self.path or 'the module'}{again}"
