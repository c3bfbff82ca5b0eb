"""Exchange what heads and MLPs of a GPT-2 write for what they wrote in another run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn


class Component(NamedTuple):
    """A head of a block's attention, or a block's MLP, whose head is None."""

    block: int
    head: int | None


class Recording:
    """Keeps what some components write while the module is called."""

    def __init__(self, module: Any, components: Sequence[Component]) -> None:
        self.places = {each: _Place(module, each) for each in components}
        self.written: dict[Component, Tensor] = {}

    def __enter__(self) -> Recording:
        self._hooks = []
        for component, place in self.places.items():
            self._hooks.append(place.watch(partial(self._keep, component)))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep(self, component: Component, tensor: Tensor) -> None:
        self.written[component] = tensor[..., self.places[component].numbers]


class Exchanging:
    """Puts what components wrote in another run into some positions of each row.

    `is_exchanged` is `[row, position]`, and `donated` has what each component wrote.
    """

    def __init__(
        self, module: Any, is_exchanged: Tensor, donated: Mapping[Component, Tensor]
    ) -> None:
        self.places = {each: _Place(module, each) for each in donated}
        self.is_exchanged, self.donated = is_exchanged, donated

    def __enter__(self) -> None:
        self._hooks = []
        for component, place in self.places.items():
            self._hooks.append(place.watch(partial(self._exchange, component)))

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _exchange(self, component: Component, tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        written = changed[..., self.places[component].numbers]
        written[self.is_exchanged] = self.donated[component][self.is_exchanged]
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

    def watch(self, handle: Callable[[Tensor], Tensor | None]) -> Any:
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
