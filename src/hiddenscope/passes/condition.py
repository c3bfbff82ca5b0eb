"""The condition of a module: whether its states can be watched as it is now."""

from torch import nn

from hiddenscope import hooks
from hiddenscope.errors import ModuleError


def watchable(module: nn.Module) -> nn.Module:
    """The module whose parts are really called, or a ModuleError that says why none can be watched.

    `torch.compile` gives a wrapper around the module; the module inside is watched, and runs uncompiled.

    >>> watchable(nn.Linear(2, 2).eval())
    Linear(in_features=2, out_features=2, bias=True)
    """
    inside: nn.Module = getattr(module, "_orig_mod", module)
    name = type(inside).__name__
    for wrong, reason, remedy in _conditions(inside):
        if wrong:
            raise ModuleError(f"Watching the states of {name}", reason, remedy)
    return inside


def _conditions(module: nn.Module) -> list[tuple[bool, str, str]]:
    """What may be wrong, with what it is and what to do about it."""
    parts = hooks.parts_of(module)
    weights = [weight for part in parts.values() for weight in part._parameters.values() if weight is not None]
    training = next((path for path, part in parts.items() if part.training), None)
    return [
        (
            isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel),
            f"{type(module).__name__} runs copies of it",
            "Give the module inside: `module.module`.",
        ),
        (
            training is not None,
            f"it is in train() mode{f' at {training}' if training else ''}, where dropout makes its states random",
            "Call module.eval() first.",
        ),
        (
            any(getattr(part, "_compiled_call_impl", None) is not None for part in parts.values()),
            "it was compiled in place, and compiled code calls no hooks",
            "Give the module before `.compile()`, or wrap it with `torch.compile(module)` instead.",
        ),
        (
            any(weight.is_meta for weight in weights) and not hooks.is_offloaded(module),
            "it has weights on the meta device, which hold no numbers",
            "Load its weights first.",
        ),
        (not weights, "it has no weights", "Give a model."),
    ]
