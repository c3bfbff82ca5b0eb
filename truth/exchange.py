"""Exchange what one head or MLP of a GPT-2 writes for what it wrote in another run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn


class Component(NamedTuple):
    """A head of a block's attention, or a block's MLP, whose head is None."""

    block: int
    head: int | None


class Recording:
    """Keeps what one component writes while the module is called."""

    def __init__(self, module: Any, component: Component) -> None:
        self.place = _Place(module, component)
        self.written = torch.empty(0)

    def __enter__(self) -> Recording:
        self._hook = self.place.watch(self._keep)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _keep(self, tensor: Tensor) -> None:
        self.written = tensor[..., self.place.numbers]


class Exchanging:
    """Puts what a component wrote elsewhere into one position of each row."""

    def __init__(
        self, module: Any, component: Component, positions: Tensor, donated: Tensor
    ) -> None:
        self.place = _Place(module, component)
        self.positions, self.donated = positions, donated

    def __enter__(self) -> None:
        self._hook = self.place.watch(self._exchange)

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _exchange(self, tensor: Tensor) -> Tensor:
        rows = torch.arange(len(tensor))
        changed = tensor.clone()
        written = changed[..., self.place.numbers]
        written[rows, self.positions] = self.donated[rows, self.positions]
        return changed


class _Place:
    """Where a component's output is: some numbers of what passes a module."""

    def __init__(self, module: Any, component: Component) -> None:
        self.block = module.transformer.h[component.block]
        self.is_head = component.head is not None
        self.numbers = slice(None)
        if component.head is not None:
            width = module.config.n_embd // module.config.n_head
            self.numbers = slice(component.head * width, (component.head + 1) * width)

    def watch(self, handle: Any) -> Any:
        """Hook a function that is given the tensor, and may return another one."""
        if not self.is_head:
            return self.block.mlp.register_forward_hook(
                lambda module, inputs, output: handle(output)
            )

        def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
            changed = handle(inputs[0])
            return None if changed is None else (changed,)

        # Heads lie side by side in what the last projection of attention is given.
        return self.block.attn.c_proj.register_forward_pre_hook(before)
