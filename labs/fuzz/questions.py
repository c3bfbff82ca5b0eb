"""One question of every kind that runs a model, for interrupts and for threads; and all
that a question may not change.

`QUESTIONS` has every verb, and every analysis of the tests' registry. Each takes a
model of `asked_model()`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import hiddenscope as hs
from hiddenscope.modules import hooks
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.registry import CONTRAST, ENTRIES, IDS

# Long enough to have distances.
LONGER = [[5, 6, 7, 8, 9, 10, 11, 12], [9, 8, 7, 6, 5, 4, 3, 2]]
INSIDE = "*.attn.q,*.attn.k,*.attn.v,*.attn.head.*,*.mlp.neurons"


def asked_model() -> hs.Model:
    """Load a tiny model that nobody else has."""
    return hs.load((tiny_model("llama", layers=2), tiny_tokenizer()))


def _recording(model: hs.Model) -> None:
    with hs.recording(model, "layer.1"), torch.no_grad():
        model.module(input_ids=torch.tensor(IDS))


def _editing(model: hs.Model) -> None:
    with hs.editing(model, {"layer.1": hs.Scale(0.5)}), torch.no_grad():
        model.module(input_ids=torch.tensor(IDS))


QUESTIONS: dict[str, Callable[[hs.Model], Any]] = {
    "capture": lambda model: model.capture(IDS),
    "capture_generation": lambda model: model.capture_generation(IDS, max_new_tokens=2),
    "load": lambda model: hs.load((model.module, None)),
    "record": lambda model: hs.record(model, IDS, grad=True, logits=True),
    "recording": _recording,
    "capture inside": lambda model: model.capture(IDS, INSIDE),
    "edit inside": lambda model: hs.edit(
        model, IDS, {"*.attn.q": hs.Scale(2.0), "*.attn.head.1": hs.Scale(0.0)}
    ),
    "patch heads": lambda model: hs.patch(model, CONTRAST, sites="*.attn.head.*"),
    "edit": lambda model: hs.edit(model, IDS, {"layer.1": hs.Scale(2.0)}, "layer.2"),
    "editing": _editing,
    "resume": lambda model: hs.resume(model, IDS, "layer.2", torch.ones(5, 64)),
    "visibility of many texts": lambda model: hs.visibility(
        model, LONGER, sampling=hs.Sampling(per_text=1, baseline="random")
    ),
}
QUESTIONS |= {word: entry.ask for word, entry in ENTRIES.items()}


def state_of(module: nn.Module) -> dict[str, Any]:
    """Describe all of a module that a question may not change, to be compared with what
    it is later.

    Weights are described by the tensor object, its memory, its dtype and its bytes.
    """
    state: dict[str, Any] = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs")):
                state[f"{path} {name}"] = list(value)
        for name in ("training", "forward", "_output_capturing_hooks_installed"):
            state[f"{path} {name}"] = vars(part).get(name)
        for name, child in part._modules.items():
            state[f"{path} child {name}"] = id(child)
        config = getattr(part, "config", None)
        if config is not None:
            state[f"{path} config"] = repr(sorted(vars(config).items(), key=str))
    for path, weight in hooks.parts_of(module).items():
        for name, tensor in (weight._parameters | weight._buffers).items():
            if tensor is not None:
                state[f"{path} weight {name}"] = _weight(tensor)
    return state


def _weight(tensor: torch.Tensor) -> tuple[Any, ...]:
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return (
        id(tensor),
        tensor.data_ptr(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.grad,
        hash(values),
    )
