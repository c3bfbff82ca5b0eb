"""Load PEFT adapters onto a base model, from folders that were checked first.

An adapter folder comes from a stranger as any model does: its weights are read from
safetensors alone, and a configuration that would import code, repeat blocks or add
virtual tokens is refused. After loading, every weight of the file must have found its
place: PEFT itself only warns if one did not.
"""

from __future__ import annotations

import importlib.util
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope.errors import Damaged, LoadError, UnknownModel, Unsafe, first_line
from hiddenscope.loading.checkpoint import Loaded, quiet_transformers
from hiddenscope.loading.folder import (
    PICKLES,
    check_files,
    read_json,
    tensors_in,
)
from hiddenscope.loading.folder import WEIGHTS as BASE_WEIGHTS
from hiddenscope.loading.limits import WeightTotals, check_counts, walk
from hiddenscope.loading.outline import local_folder
from hiddenscope.loading.variants import Adapted, Quantised
from hiddenscope.loading.zoo import DEFAULT
from hiddenscope.modules.adapters import changes_base
from hiddenscope.modules.module_copy import private_copy, to_shared

if TYPE_CHECKING:
    from torch import nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Kinds that put virtual tokens before a text, which have no state of a text's token.
VIRTUAL_TOKENS = (
    "PROMPT_TUNING",
    "MULTITASK_PROMPT_TUNING",
    "P_TUNING",
    "PREFIX_TUNING",
    "CARTRIDGE",
    "ADAPTION_PROMPT",
    "CPT",
)
# A rank is at most the longest axis of a weight that it adapts.
_RANKS = re.compile(r"r|.*_r|rank|.*_rank")
_LARGEST_RANK = 65_536


@dataclass(frozen=True)
class AdapterFolder:
    """A checked folder of an adapter, and what its files say.

    `base` is the model that it was trained on, as its configuration names it.
    """

    path: Path
    kind: str
    base: str | None
    config: dict[str, Any]
    tensors: dict[str, tuple[str, list[int]]]

    @property
    def name(self) -> str:
        """Return a name for it that torch accepts as that of a module."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", self.path.resolve().name) or "adapter"


def is_adapter(path: Path) -> bool:
    """Tell whether a folder holds an adapter and not a whole model."""
    return (path / CONFIG).exists()


def check_adapter(path: Path) -> AdapterFolder:
    """Check everything that can be checked before PEFT reads the folder."""
    if not path.is_dir():
        raise UnknownModel(f"No folder {path}", "it does not exist", "Check the path.")
    if not is_adapter(path):
        raise UnknownModel(
            f"No adapter in {path}",
            f"it has no {CONFIG}",
            "Give the folder that PEFT's save_pretrained wrote.",
        )
    check_files(path)
    config = read_json(path / CONFIG)
    kind = config.get("peft_type")
    if not isinstance(kind, str):
        raise Damaged(
            f"Cannot load the adapter {path}",
            f"its {CONFIG} has no peft_type",
            "Save it again with PEFT.",
        )
    _check_config(path, kind, config)
    tensors = _adapter_tensors(path)
    longest = [max(shape, default=0) for _, shape in tensors.values()]
    held = WeightTotals(len(tensors), 0, max(longest, default=0))
    check_counts(walk(config), held, str(path / CONFIG))
    base = config.get("base_model_name_or_path")
    named = base if isinstance(base, str) and base else None
    return AdapterFolder(path, kind, named, config, tensors)


def _check_config(path: Path, kind: str, config: dict[str, Any]) -> None:
    problem = f"Cannot load the adapter {path}"
    if kind in VIRTUAL_TOKENS:
        raise LoadError(
            problem,
            f"{kind} puts virtual tokens before a text, which belong to no token of it",
            "Use an adapter that changes layers, such as LoRA.",
        )
    if config.get("megatron_config"):
        raise Unsafe(
            problem,
            f"its {CONFIG} names a module of Megatron to import",
            "Remove megatron_config from it.",
        )
    if config.get("layer_replication"):
        raise LoadError(
            problem,
            "it repeats blocks of its base (layer_replication)",
            "Load it with PEFT yourself and pass the live (module, tokenizer).",
        )
    for key, value in walk(config):
        is_count = isinstance(value, int) and _RANKS.fullmatch(key)
        if is_count and value > _LARGEST_RANK:
            reason = f"its {CONFIG} asks for {key}={value:,}"
            raise Damaged(problem, reason, "Save it again with PEFT.")


def _adapter_tensors(path: Path) -> dict[str, tuple[str, list[int]]]:
    if (path / WEIGHTS).exists():
        return tensors_in(path / WEIGHTS)
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise Unsafe(
            f"Cannot load the adapter {path}",
            f"its weights are in {pickles[0]} and not in safetensors, and unpickling"
            " can run code",
            "If you trust it, load it with PEFT and save it again, which writes"
            " safetensors.",
        )
    raise Damaged(
        f"Cannot load the adapter {path}",
        f"it has no {WEIGHTS}",
        "Give the folder that PEFT's save_pretrained wrote.",
    )


def load_adapted(
    variant: Adapted,
    open_base: Callable[[Any], Loaded],
    adapter_path: Callable[[str], Path],
) -> Loaded:
    """Load a base and put adapters on it.

    `open_base` loads what the variant names, and `adapter_path` finds an adapter. The
    folders are checked before the base is read. A live module is not touched: the
    adapters are put on a copy of it that shares its weights.
    """
    if importlib.util.find_spec("peft") is None:
        raise LoadError(
            "Cannot load an adapter",
            "peft is not installed",
            "Run: pip install 'hiddenscope[adapters]'",
        )
    folders = [check_adapter(adapter_path(path)) for path in variant.folders]
    base_source = variant.base
    if base_source is None:
        base_source = _named_base(folders)
    innermost = _innermost(base_source)
    if isinstance(innermost, str | os.PathLike):
        _check_shapes(folders, os.fspath(innermost))
    else:
        _check_live(variant, folders)
    loaded = open_base(base_source)
    module = loaded.module
    altered = _altered_weights(folders, module, is_live=loaded.folder is None)
    if loaded.folder is None:
        # PEFT freezes every weight of the base.
        module = private_copy(module, to_shared)
    with quiet_transformers(), warnings.catch_warnings():
        # What PEFT warns of when weights have no place is an error below.
        warnings.simplefilter("ignore")
        adapted = _put_on(module, folders, loaded.name)
        _set_strength(adapted, variant.strength, folders)
        if variant.merged:
            adapted = adapted.merge_and_unload()
    adapted.eval()
    names = " + ".join(folder.name for folder in folders)
    notes = (*loaded.notes, *_notes(variant, folders, innermost))
    if altered:
        notes = (*notes, f"An adapter brings other weights of its base: {altered}.")
    return replace(
        loaded,
        module=adapted,
        name=f"{loaded.name} + {names}",
        notes=notes,
        variant=variant,
        altered=altered,
    )


def base_of(loaded: Loaded, module: nn.Module) -> Loaded:
    """Return what was loaded with the module below its adapters."""
    base: Any = loaded.variant
    while isinstance(base, Adapted):
        base = base.base
    name = loaded.name.partition(" + ")[0]
    variant = base if isinstance(base, Quantised) else None
    # Its trials are its own: those of the folder may be of another placement.
    return replace(loaded, module=module, name=name, folder=None, variant=variant)


def _named_base(folders: list[AdapterFolder]) -> str:
    """Return the base that the adapters' own files name."""
    bases = {folder.base for folder in folders}
    base = folders[0].base
    if len(bases) == 1 and base is not None:
        return base
    reason = f"its {CONFIG} names no base model"
    if len(bases) > 1:
        reason = "the adapters name different base models"
    raise LoadError(
        f"Cannot load the adapter {folders[0].path}",
        reason,
        "Name the base: hs.Adapted(base, folder), or --model.",
    )


def _innermost(source: Any) -> Any:
    """Return what the variants of a source wrap in the end; None is the default."""
    while isinstance(source, Adapted | Quantised):
        source = source.base
    return DEFAULT if source is None else source


def _check_shapes(folders: list[AdapterFolder], base: str) -> None:
    """Refuse an adapter whose matrices do not fit the weight file of its base.

    A name that the file does not have decides nothing: transformers renames weights
    while it loads them.
    """
    path = local_folder(base)
    if path is None or not (path / BASE_WEIGHTS).is_file():
        return
    in_base = tensors_in(path / BASE_WEIGHTS)
    for folder in folders:
        for key, (_, shape) in folder.tensors.items():
            layer, found, _ = key.partition(".lora_A.")
            layer = layer.removeprefix("base_model.model.")
            _, base_shape = in_base.get(f"{layer}.weight", ("", []))
            if found and base_shape and shape[-1] not in base_shape:
                reason = (
                    f"its {layer} reads {shape[-1]} numbers, and that of the base is"
                    f" {' by '.join(map(str, base_shape))}"
                )
                raise _another_base(folder, base, reason)


def _check_live(variant: Adapted, folders: list[AdapterFolder]) -> None:
    """Refuse what would write to the weights of a live module."""
    problem = "Cannot put an adapter on a live module"
    if variant.merged:
        remedy = "Merge it yourself, or name the base by its path."
        raise LoadError(problem, "merging would change its weights", remedy)
    for folder in folders:
        start = folder.config.get("init_lora_weights")
        if changes_base(start):
            reason = f"{folder.name} begins with {start!r}, which changes its weights"
            raise LoadError(problem, reason, "Name the base by its path.")


def _altered_weights(
    folders: list[AdapterFolder], module: nn.Module, *, is_live: bool
) -> str:
    """Name a weight of the base that an adapter's file holds and changes.

    PEFT saves the embeddings with an adapter that is on them, and writes them into the
    base. A live module must not be written to.
    """
    from safetensors import safe_open

    weights = dict(module.named_parameters())
    altered = ""
    for folder in folders:
        with safe_open(folder.path / WEIGHTS, framework="pt") as file:
            for key in folder.tensors:
                name = key.removeprefix("base_model.model.").replace(".base_layer", "")
                # Modules that were trained whole are kept beside those of the base.
                apart = folder.config.get("modules_to_save") or ()
                if name not in weights or name.split(".")[-2] in apart:
                    continue
                if is_live:
                    raise LoadError(
                        f"Cannot put the adapter {folder.name} on a live module",
                        f"it holds weights of the base itself, such as {name}",
                        "Name the base by its path.",
                    )
                base = weights[name].detach().cpu()
                saved = file.get_tensor(key).to(base.dtype)
                if base.shape != saved.shape or not bool((base == saved).all()):
                    altered = name
    return altered


def _put_on(module: nn.Module, folders: list[AdapterFolder], base: str) -> Any:
    """Wrap a module in PEFT's, with all adapters loaded and active."""
    import peft

    kinds = {folder.kind for folder in folders}
    wrap: Any = peft.PeftModel if len(kinds) == 1 else peft.PeftMixedModel
    names: list[str] = []
    adapted: Any = None
    for folder in folders:
        name = _free_name(folder.name, names)
        path = str(folder.path)
        try:
            if adapted is None:
                adapted = wrap.from_pretrained(module, path, adapter_name=name)
            else:
                adapted.load_adapter(path, adapter_name=name)
            state = peft.get_peft_model_state_dict(adapted, adapter_name=name)
        except Exception as error:
            raise _another_base(folder, base, first_line(error)) from error
        _check_complete(folder, set(state), base)
        names.append(name)
    # PeftModel's own method takes one name; its tuner's takes several.
    adapted.base_model.set_adapter(names)
    return adapted


def _free_name(name: str, taken: list[str]) -> str:
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number += 1
    return free


def _check_complete(folder: AdapterFolder, in_module: set[str], base: str) -> None:
    """Raise unless the file and the module hold the same weights of the adapter."""
    unplaced = sorted(set(folder.tensors) - in_module)
    if unplaced:
        reason = (
            f"{base} has no place for {len(unplaced)} of its weights, such as"
            f" {unplaced[0]}"
        )
        raise _another_base(folder, base, reason)
    missing = sorted(in_module - set(folder.tensors))
    if missing:
        reason = f"it has no weights for {len(missing)} parts, such as {missing[0]}"
        raise _another_base(folder, base, reason)


def _another_base(folder: AdapterFolder, base: str, reason: str) -> Damaged:
    trained_on = folder.base or "another model"
    return Damaged(
        f"Cannot put the adapter {folder.name} on {base}",
        reason,
        f"It was trained on {trained_on}: load it on that.",
    )


def _set_strength(adapted: Any, strength: float, folders: list[AdapterFolder]) -> None:
    """Multiply what the adapters add, where that means what it says."""
    if strength == 1:
        return
    for folder in folders:
        variants = ("use_dora", "use_qalora", "arrow_config", "kasa_config")
        special = [key for key in variants if folder.config.get(key)]
        if folder.kind != "LORA" or special:
            kind = special[0] if special else folder.kind
            raise LoadError(
                f"Cannot use {folder.name} at strength {strength:g}",
                f"{kind} does more than add to a layer, so that half of it is not"
                " defined",
                "Leave strength out, or use plain LoRA.",
            )
    for part in adapted.modules():
        if hasattr(part, "scale_layer"):
            part.scale_layer(strength)


def _notes(variant: Adapted, folders: list[AdapterFolder], base: Any) -> list[str]:
    """Note that an adapter was trained on a model of another name."""
    notes = []
    if variant.merged:
        notes.append("Its adapters are merged into its weights.")
    for folder in folders:
        if folder.base is None or not isinstance(base, str | os.PathLike):
            continue
        if Path(folder.base).name != Path(base).name:
            notes.append(
                f"The adapter {folder.name} names {folder.base} as its base; it was"
                f" put on {base}."
            )
    return notes
