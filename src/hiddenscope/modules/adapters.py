"""PEFT adapters on a module: which are active, their weights, and what is below them.

PEFT replaces a layer by one that wraps it and adds what the adapter computes. Switching
an adapter off in place would be seen by every thread that calls the module, so the
module below the adapters is a copy whose wrappers are replaced by what they wrap. It
shares all weights.

PEFT is not imported here: a module can only have adapters if somebody has imported it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from hiddenscope.errors import ModuleError
from hiddenscope.modules import hooks
from hiddenscope.modules.module_copy import private_copy
from hiddenscope.modules.weights import Weight, weight_tensors

# Ways of initialising LoRA that subtract something from the weights of the base.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


# Of a configuration, what decides no number.
_UNDECIDING = (
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "peft_version",
    "revision",
    "task_type",
)


class Adapter(NamedTuple):
    """An adapter on a module: its name, its kind, and how strongly each layer uses it.

    `kind` is as PEFT calls it ("LORA"). `strengths` are relative to how it was trained,
    one for each layer that it is on; none where it is off. `is_merged` tells that some
    layer has it in its weights.
    """

    name: str
    kind: str
    strengths: tuple[float, ...] = ()
    is_merged: bool = False

    @property
    def strength(self) -> float:
        """Return the largest strength of a layer; 0 where it is off."""
        return max(self.strengths, key=abs, default=0.0)


def has_adapters(module: nn.Module) -> bool:
    """Tell whether PEFT has put adapters on a module.

    >>> has_adapters(nn.Linear(2, 2))
    False
    """
    return next(_wrappers(module), None) is not None


def adapters_on(module: nn.Module) -> list[Adapter]:
    """Return the adapters on a module, active or not."""
    wrappers = [wrapper for _, wrapper in _wrappers(module)]
    adapters = []
    for name, config in adapter_configs(module).items():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        strengths = []
        for wrapper in wrappers:
            is_on = not wrapper.disable_adapters and name in wrapper.active_adapters
            if is_on or name in _merged(wrapper):
                strengths.append(_strength(wrapper, name))
        is_merged = any(name in _merged(wrapper) for wrapper in wrappers)
        adapters.append(Adapter(name, kind, tuple(strengths), is_merged))
    return adapters


def adapter_configs(module: nn.Module) -> dict[str, Any]:
    """Return PEFT's configuration of each adapter by its name."""
    configs = getattr(module, "peft_config", None)
    return dict(configs) if isinstance(configs, dict) else {}


def adapter_settings(module: nn.Module, adapter: Adapter) -> str:
    """Return what decides the numbers of an adapter besides its weights, as JSON."""
    config = adapter_configs(module)[adapter.name]
    settings = {}
    for key, value in sorted(vars(config).items()):
        if key not in _UNDECIDING:
            settings[key] = sorted(value) if isinstance(value, set) else value
    strengths = sorted(set(adapter.strengths))
    if len(strengths) > 1:
        settings["strengths"] = adapter.strengths
    return json.dumps(settings, sort_keys=True, default=str)


def adapter_weights(module: nn.Module, name: str) -> list[Weight]:
    """Return the weights of one adapter.

    Their paths do not hold the adapter's name, so that one adapter has the same paths
    under any name.
    """
    weights = []
    below = {id(weight.tensor) for weight in weight_tensors(below_adapters(module))}
    for weight in weight_tensors(module):
        parts = weight.path.split(".")
        if id(weight.tensor) not in below and name in parts:
            # The last one: a module may have the name of the adapter too.
            del parts[len(parts) - 1 - parts[::-1].index(name)]
            weights.append(weight._replace(path=".".join(parts)))
    return weights


def below_adapters(module: nn.Module) -> nn.Module:
    """Copy a module without its adapters; the copy shares the module's weights.

    A module without adapters is returned as it is.
    """
    if not has_adapters(module):
        return module
    get_base = getattr(module, "get_base_model", lambda: module)
    copied = private_copy(get_base())
    for path, wrapper in list(_wrappers(copied)):
        layer = wrapper
        # PEFT may have wrapped a layer more than once.
        while isinstance(_inside(layer), nn.Module):
            layer = _inside(layer)
        parent, _, name = path.rpartition(".")
        # A ModuleList keeps its parts under numbers, which setattr would not find.
        copied.get_submodule(parent)._modules[name] = layer
    # transformers remembers adapters that it has loaded itself.
    for name in ("peft_config", "_hf_peft_config_loaded"):
        vars(copied).pop(name, None)
    return copied


def require_separable(module: nn.Module, name: str, altered: str = "") -> None:
    """Raise ModuleError if the weights below the adapters are not those of the base.

    `altered` names a weight of the base that an adapter brought with it.
    """
    problem = f"Cannot use {name} without its adapters"
    merged = [path for path, wrapper in _wrappers(module) if _merged(wrapper)]
    if merged:
        reason = f"they are merged into the weights of {merged[0]}"
        raise ModuleError(problem, reason, "Call module.unmerge_adapter() first.")
    if not has_adapters(module):
        reason = "it has none that could be switched off"
        remedy = "Load it with hs.Adapted(base, folder), which does not merge them."
        raise ModuleError(problem, reason, remedy)
    if altered:
        reason = f"one of them brought other weights of its base: {altered}"
        raise ModuleError(problem, reason, "Load the base by itself.")
    if hooks.is_dispatched(module):
        reason = "accelerate has spread its weights over devices, and moves them"
        raise ModuleError(problem, reason, "Load the base by itself.")
    for adapter, config in adapter_configs(module).items():
        start = getattr(config, "init_lora_weights", True)
        change = ""
        if str(getattr(config, "bias", "none")) not in ("none", "False"):
            change = f"bias={config.bias!r}"
        elif changes_base(start):
            change = f"init_lora_weights={start!r}"
        if change:
            reason = f"the adapter {adapter!r} also changed the base: {change}"
            raise ModuleError(problem, reason, "Load the base by itself.")


def changes_base(init_lora_weights: object) -> bool:
    """Tell whether a way of initialising LoRA changes the weights of the base.

    >>> changes_base("pissa_niter_4"), changes_base("gaussian"), changes_base(True)
    (True, False, False)
    """
    start = init_lora_weights
    return isinstance(start, str) and start.lower().startswith(CHANGES_BASE)


def _wrappers(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the outermost layers that PEFT has put around others, with their paths."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    other = sys.modules.get("peft.utils.other")
    if tuners is None or other is None:
        return
    kinds = (tuners.BaseTunerLayer, other.AuxiliaryTrainingWrapper)
    outer = None
    for path, part in module.named_modules():
        # Modules are listed in order, so only the last wrapper can contain this one.
        is_inside = outer is not None and path.startswith(f"{outer}.")
        if isinstance(part, kinds) and not is_inside:
            outer = path
            yield path, part


def _inside(layer: Any) -> Any:
    """Return the layer that PEFT has wrapped; None for one that is no wrapper."""
    inner = getattr(layer, "original_module", None)
    return getattr(layer, "base_layer", None) if inner is None else inner


def _merged(wrapper: Any) -> Sequence[str]:
    return getattr(wrapper, "merged_adapters", ())


def _strength(wrapper: Any, name: str) -> float:
    """Return by what LoRA multiplies an adapter, relative to how it was trained."""
    scaling = getattr(wrapper, "scaling", {}).get(name)
    ranks = getattr(wrapper, "r", {})
    alphas = getattr(wrapper, "lora_alpha", {})
    if scaling is None or name not in ranks or name not in alphas:
        return 1.0
    rank, alpha = ranks[name], alphas[name]
    if not alpha:
        return 1.0
    as_trained = alpha / rank
    if getattr(wrapper, "use_rslora", {}).get(name, False):
        as_trained = alpha / rank**0.5
    return round(float(scaling / as_trained), 9)
