"""Trace: the arguments that a module's forward takes, and one pass with every call of
every submodule recorded.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

from hiddenscope.modules import autograd, hooks

TRIED_VOCABULARY = (
    # Ids that a trial keeps below, where nothing names the vocabulary.
    256
)


def arguments(
    module: nn.Module,
    ids: Tensor,
    mask: Tensor | None = None,
    targets: Tensor | None = None,
) -> dict[str, Any]:
    """The keyword arguments for one pass over `ids` [text, token]; `targets` are an
    encoder-decoder's decoder ids.
    """
    names = accepts(module)
    given: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in names:
        given["attention_mask"] = torch.ones_like(ids) if mask is None else mask
    if "use_cache" in names:
        given["use_cache"] = False
    if "bbox" in names:  # the layout models want a box for each token
        given["bbox"] = torch.zeros(*ids.shape, 4, dtype=torch.long, device=ids.device)
    if targets is not None:
        given["decoder_input_ids"] = targets
    return given


def accepts(module: nn.Module) -> frozenset[str]:
    """The names of the arguments that a module's forward takes."""
    return _parameters(type(module).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> frozenset[str]:
    return frozenset(inspect.signature(forward).parameters)


def trial_ids(module: nn.Module, texts: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Ids [text, token] for a trial pass, the same each time."""
    pool = torch.tensor(_ordinary_ids(module))
    picks = torch.randint(
        len(pool), (texts, tokens), generator=torch.Generator().manual_seed(seed)
    )
    return pool[picks]


def _ordinary_ids(module: nn.Module) -> list[int]:
    """Ids that any text could hold: in the vocabulary, and without a special meaning in
    the configuration.

    They are spread over the vocabulary. The first hundred are left out, because control
    tokens are often there.
    """
    config: Any = getattr(module, "config", None)
    configs = [
        config,
        *(getattr(config, name, None) for name in getattr(config, "sub_configs", {})),
    ]
    reserved: set[int] = set()
    for part in configs:
        for name, value in vars(part).items() if part is not None else ():
            if name.endswith(("token_id", "token_index")):
                reserved.update(value if isinstance(value, list) else [value])
    size = declared_vocabulary(module) or TRIED_VOCABULARY
    start = min(100, size // 8)
    step = max(1, (size - start) // 512)
    return [i for i in range(start, size, step) if i not in reserved]


def declared_vocabulary(module: nn.Module) -> int | None:
    """Give the number of ids that the token embedding or the configuration names; None
    where neither does.
    """
    try:
        embedding = getattr(module, "get_input_embeddings", lambda: None)()
    except NotImplementedError:
        embedding = None
    weight = getattr(embedding, "weight", None)
    sizes = [] if weight is None else [int(weight.shape[0])]
    config: Any = getattr(module, "config", None)
    if config is not None:
        text = (
            config.get_text_config() if hasattr(config, "get_text_config") else config
        )
        sizes += [
            size
            for size in (getattr(text, "vocab_size", None),)
            if isinstance(size, int)
        ]
    return min(sizes, default=None)


@dataclass
class Call:
    """One call of one submodule: the state that went in, the state that came out, and
    when (in ticks of the pass).
    """

    path: str
    number: int
    entered: int
    into: Tensor | None
    left: int = -1
    out: Tensor | None = None


@dataclass
class Trace:
    """The calls of one pass, in the order in which they began, and what Hugging Face
    itself reports of the pass.
    """

    texts: int
    tokens: int
    output: Any = None
    calls: list[Call] = field(default_factory=list)
    reported_inside: list[tuple[Tensor, ...]] = field(default_factory=list)
    last_hidden_states: list[Tensor] = field(default_factory=list)

    def reports(self) -> list[tuple[Tensor, ...]]:
        """Hugging Face's tuples of hidden states: the model's own, or, where it returns
        none, its submodules'.
        """
        return _hidden_states(self.output) or self.reported_inside


def trace(module: nn.Module, inputs: Mapping[str, Any]) -> Trace:
    """Run the module once and record each call of each submodule, with copies of the
    states.
    """
    seen = Trace(*inputs["input_ids"].shape)
    clock = count()
    counts: Counter[str] = Counter()
    open_calls: list[Call] = []

    def watches(path: str, part: nn.Module) -> list[hooks.Watch]:
        def before(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            call = Call(
                path, counts[path], next(clock), _copy(hooks.state_in(args, kwargs))
            )
            counts[path] += 1
            open_calls.append(call)
            seen.calls.append(call)

        def after(output: Any) -> None:
            call = open_calls.pop()
            call.left, call.out = next(clock), _copy(hooks.first_tensor(output))
            if isinstance(output, Mapping):
                named = [
                    value
                    for name, value in output.items()
                    if name.endswith("last_hidden_state")
                ]
                seen.last_hidden_states += [
                    value for value in named if isinstance(value, Tensor)
                ]
                seen.reported_inside += _hidden_states(output)

        return [hooks.Watch(part, "input", before), hooks.Watch(part, "output", after)]

    all_parts = [
        watch for path, part in module.named_modules() for watch in watches(path, part)
    ]
    with (
        autograd.restored(),
        torch.no_grad(),
        hooks.restoring(module),
        hooks.watching(all_parts),
    ):
        seen.output = module(**inputs, output_hidden_states=True, return_dict=True)
    return seen


def _hidden_states(output: Any) -> list[tuple[Tensor, ...]]:
    """The tuples of hidden states in a module's output: `hidden_states`,
    `encoder_hidden_states` and the like.
    """
    return list(_each_tuple(output)) if isinstance(output, Mapping) else []


def _each_tuple(output: Mapping[str, Any]) -> Iterator[tuple[Tensor, ...]]:
    for name, value in output.items():
        if name.endswith("hidden_states") and isinstance(value, tuple | list):
            entries = [hooks.first_tensor(entry) for entry in value]
            if entries and all(entry is not None for entry in entries):
                yield tuple(entry for entry in entries if entry is not None)


def _copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
