"""Load PEFT adapters onto a base model, from folders that were checked first.

An adapter folder comes from a stranger as any model does: its weights are read from
safetensors alone, and a configuration that would import code, repeat blocks or add
virtual tokens is refused. After loading, every weight of the file must have found its
place: PEFT itself only warns if one did not.
"""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiddenscope.errors import (
    Damaged,
    LoadError,
    UnknownModel,
    Unsafe,
    first_line,
)
from hiddenscope.loading.checkpoint import AdaptedBase, Loaded, quiet_transformers
from hiddenscope.loading.folder import (
    check_files,
    read_json,
    refuse_pickles,
    stored_tensors,
    weight_totals,
)
from hiddenscope.loading.limits import (
    WeightTotals,
    building,
    check_counts,
    walk,
)
from hiddenscope.loading.size_limit import SizeLimit
from hiddenscope.loading.variants import Adapted, Quantised, require_package
from hiddenscope.loading.zoo import DEFAULT
from hiddenscope.modules import hooks
from hiddenscope.modules.adapters import changes_base, has_adapters
from hiddenscope.modules.module_copy import private_copy, to_shared

if TYPE_CHECKING:
    from torch import nn

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Kinds that change layers, and read nothing but their own file. Others put virtual
# tokens before a text (prompt and prefix tuning), which belong to no token of it, or
# load more adapters from wherever their configuration says (X-LoRA).
KINDS = {
    "ADALORA",
    "BOFT",
    "BONE",
    "C3A",
    "DELORA",
    "FOURIERFT",
    "HRA",
    "IA3",
    "LN_TUNING",
    "LOHA",
    "LOKR",
    "LORA",
    "MISS",
    "OFT",
    "RANDLORA",
    "ROAD",
    "SHIRA",
    "TRAINABLE_TOKENS",
    "VBLORA",
    "VERA",
    "WAVEFT",
}
_ITERATIONS = re.compile(r".*_n?iter_([0-9]+)")
_MOST_ITERATIONS = 100
# PEFT looks for these among names and their ends, or `_settings` takes them away. It
# takes every other string for a regular expression, or may.
_NO_PATTERNS = ("target_modules", "exclude_modules", "base_model_name_or_path")
_REPEAT = "*+?{"
_GROUPS = re.compile(r"\)[*+?{]|\(.*\(")
_MOST_REPEATS, _LONGEST_PATTERN, _MOST_PATTERNS = 2, 300, 2_000
# No kind has more tensors for a layer.
_TENSORS_PER_MODULE = 16
# Tables that PEFT makes anew, and saves in no file, are small beside the base.
_SHARE_OF_BASE = 64
# Options of LoRA by which it does more than add a product to a layer's output.
_NOT_ADDED = (
    "arrow_config",
    "kasa_config",
    "modules_to_save",
    "monteclora_config",
    "trainable_token_indices",
    "use_dora",
    "use_qalora",
)
_MISMATCH = re.compile(r"size mismatch for .*|.*not found in the base model.*")


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
    held: WeightTotals

    @property
    def name(self) -> str:
        """Return a name for it that torch accepts as that of a module."""
        return re.sub(r"[^A-Za-z0-9_-]", "_", self.path.resolve().name) or "adapter"


def is_adapter(path: Path) -> bool:
    """Tell whether a folder holds an adapter and not a whole model."""
    # For a name that is too long, Path would raise.
    return os.path.exists(path / CONFIG)


def check_adapter(path: Path) -> AdapterFolder:
    """Check everything that can be checked before PEFT reads the folder."""
    written = "Give the folder that PEFT's save_pretrained wrote."
    if not is_adapter(path):
        reason = f"it has no {CONFIG}" if path.is_dir() else "it does not exist"
        raise UnknownModel(f"No adapter in {path}", reason, written)
    check_files(path)
    config = read_json(path / CONFIG)
    kind = config.get("peft_type")
    problem = f"Cannot load the adapter {path}"
    if not isinstance(kind, str):
        reason = f"its {CONFIG} has no peft_type"
        raise Damaged(problem, reason, "Save it again with PEFT.")
    if not (path / WEIGHTS).exists():
        refuse_pickles(problem, os.listdir(path))
        raise Damaged(problem, f"it has no {WEIGHTS}", written)
    *_, held = weight_totals([path / WEIGHTS])
    # Refuse what would run code, take forever, or not be an adapter of layers.
    if kind not in KINDS:
        raise LoadError(
            problem,
            f"its kind is {kind[:40]}, which is not known to change layers alone",
            "Load it with PEFT yourself and pass the live (module, tokenizer).",
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
    reason = ""
    patterns = []
    for key, value in walk(config):
        if key not in _NO_PATTERNS:
            patterns += [text for text in (key, value) if isinstance(text, str)]
        if isinstance(value, float) and not math.isfinite(value):
            reason = f"has {key}={value}"
        if isinstance(value, int | str):
            iterations = _ITERATIONS.fullmatch(f"{key}_{value}"[-99:])
            if iterations and int(iterations[1]) > _MOST_ITERATIONS:
                reason = f"asks for {iterations[1]} iterations"
    if len(patterns) > _MOST_PATTERNS:
        reason = f"has more than {_MOST_PATTERNS:,} names and patterns"
    slow = [pattern for pattern in patterns if not _is_simple(pattern)]
    if slow:
        reason = f"has a pattern that may take forever: {slow[0][:40]!r}"
    if reason:
        raise Damaged(problem, f"its {CONFIG} {reason}", "Save it again with PEFT.")
    check_counts(walk(config), held, str(path / CONFIG))
    base = config.get("base_model_name_or_path")
    named = base if isinstance(base, str) and base else None
    tensors = stored_tensors(path / WEIGHTS)
    return AdapterFolder(path, kind, named, config, tensors, held)


def _is_simple(pattern: str) -> bool:
    """Tell whether a regular expression takes little time on the name of any layer.

    >>> _is_simple(r"^model\\.layers\\.[0-9]+\\.(q|k)_proj"), _is_simple(".*.*.*z")
    (True, False)
    """
    if len(pattern) > _LONGEST_PATTERN:
        return False
    repeats = sum(pattern.count(mark) for mark in _REPEAT)
    return repeats <= _MOST_REPEATS and not _GROUPS.search(pattern)


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
    package = "'hiddenscope[adapters]'"
    require_package("Cannot load an adapter", "it needs PEFT", "peft", package)
    variant = _flattened(variant)
    folders = [check_adapter(adapter_path(path)) for path in variant.folders]
    base_source = variant.base
    if base_source is None:
        base_source = _named_base(folders)
    innermost: Any = base_source
    while isinstance(innermost, Adapted | Quantised):
        innermost = innermost.base
    if innermost is None:
        innermost = DEFAULT
    loaded = open_base(base_source)
    module = loaded.module
    is_live = loaded.folder is None
    if has_adapters(module):
        raise LoadError(
            f"Cannot put another adapter on {loaded.name}",
            "it has adapters already, which would be switched off",
            "Give hs.Adapted all folders at once.",
        )
    if is_live:
        _check_live(variant, folders)
    altered = _altered_weights(folders, module, is_live=is_live)
    if is_live:
        # PEFT freezes every weight of the base.
        module = private_copy(module, to_shared)
    with quiet_transformers(), warnings.catch_warnings():
        # What PEFT warns of when weights have no place is an error below.
        warnings.simplefilter("ignore")
        adapted = _put_on(module, folders, loaded.name)
        _set_strength(adapted, variant.strength, folders, altered)
        if variant.merged:
            adapted = adapted.merge_and_unload()
    adapted.eval()
    names = tuple(folder.name for folder in folders)
    notes = [*loaded.notes]
    if variant.merged:
        notes.append("Its adapters are merged into its weights.")
    for folder in folders:
        is_named = folder.base and isinstance(innermost, str | os.PathLike)
        if is_named and Path(str(folder.base)).name != Path(innermost).name:
            notes.append(
                f"The adapter {folder.name} names {folder.base} as its base; it was"
                f" put on {innermost}."
            )
    if altered:
        notes.append(f"An adapter brings other weights of its base: {altered}.")
    return replace(
        loaded,
        module=adapted,
        name=" + ".join((loaded.name, *names)),
        notes=tuple(notes),
        variant=variant,
        adapted=AdaptedBase(loaded.name, names, altered),
    )


def base_of(loaded: Loaded, module: nn.Module) -> Loaded:
    """Return what was loaded with the module below its adapters."""
    base: Any = loaded.variant
    while isinstance(base, Adapted):
        base = base.base
    variant = base if isinstance(base, Quantised) else None
    name = loaded.name if loaded.adapted is None else loaded.adapted.name
    # Its trials are its own: those of the folder may be of another placement.
    return replace(
        loaded, module=module, name=name, folder=None, variant=variant, adapted=None
    )


def _flattened(variant: Adapted) -> Adapted:
    """Return nested adapters as several on one base."""
    inner = variant.base
    if not isinstance(inner, Adapted) or inner.merged:
        return variant
    inner = _flattened(inner)
    if inner.strength != variant.strength:
        raise LoadError(
            "Cannot put adapters of two strengths on a model",
            f"they are {inner.strength:g} and {variant.strength:g}",
            "Use one strength, or merge the first.",
        )
    return replace(variant, base=inner.base, adapters=inner.folders + variant.folders)


def _named_base(folders: list[AdapterFolder]) -> str:
    """Return the base that the adapters' own files name."""
    bases = {folder.base for folder in folders}
    base = folders[0].base
    remedy = "Name the base: hs.Adapted(base, folder), or --model."
    if len(bases) > 1:
        reason = "the adapters name different base models"
    elif base is None:
        reason = f"its {CONFIG} names no base model"
    elif is_adapter(Path(base).expanduser()):
        # It might name the first in turn.
        reason = f"the base that its {CONFIG} names is an adapter too"
        remedy = "Name the base and both: hs.Adapted(base, [first, second])."
    else:
        return base
    raise LoadError(f"Cannot load the adapter {folders[0].path}", reason, remedy)


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
    base. A live module must not be written to, so such an adapter is refused there.
    """
    from safetensors import safe_open

    weights = dict(module.named_parameters(remove_duplicate=False))
    altered = ""
    for folder in folders:
        with safe_open(folder.path / WEIGHTS, framework="pt") as file:
            for key in folder.tensors:
                name = key.removeprefix("base_model.model.").replace(".base_layer", "")
                if name not in weights:
                    continue
                # Modules that were trained whole are kept beside those of the base.
                apart = folder.config.get("modules_to_save") or ()
                if any(f".{part}." in f".{name}" for part in apart):
                    continue
                if is_live:
                    raise LoadError(
                        f"Cannot put the adapter {folder.name} on a live module",
                        f"it holds weights of the base itself, such as {name}",
                        "Name the base by its path.",
                    )
                base = weights[name].detach().cpu()
                saved = file.get_tensor(key).to(base.dtype)
                if base.shape != saved.shape or not (base == saved).all():
                    altered = name
    return altered


def _settings(folder: AdapterFolder, module: nn.Module) -> Any:
    """Return PEFT's configuration of an adapter, without patterns for its layers.

    A regular expression from a stranger may take years. The layers that it is meant
    for are known without it: the file has weights for them.
    """
    import peft

    settings = peft.PeftConfig.from_pretrained(str(folder.path))
    settings.inference_mode = True
    lists = [getattr(settings, name, None) or () for name in _NO_PATTERNS[:2]]
    if any(isinstance(names, str) or len(names) > _MOST_PATTERNS for names in lists):
        mark = f".{peft.PEFT_TYPE_TO_TUNER_MAPPING[settings.peft_type].prefix}"
        layers = {key.rpartition(mark)[0] for key in folder.tensors}
        layers = {name.removeprefix("base_model.model.") for name in layers if name}
        settings.target_modules = layers & {name for name, _ in module.named_modules()}
        vars(settings).update(
            exclude_modules=None, layers_to_transform=None, layers_pattern=None
        )
    return settings


def _put_on(module: nn.Module, folders: list[AdapterFolder], base: str) -> Any:
    """Wrap a module in PEFT's, with all adapters loaded and active."""
    import peft

    modules = len(list(module.modules()))
    of_base = sum(weight.nbytes for weight in module.parameters()) // _SHARE_OF_BASE
    kinds = {folder.kind for folder in folders}
    wrap = peft.PeftModel if len(kinds) == 1 else peft.PeftMixedModel
    names: list[str] = []
    adapted: Any = None
    for folder in folders:
        # PEFT looks for the name in the paths of weights, so that the folder's own name
        # might be taken for a part of the model.
        name = f"default_{len(names)}"
        path = str(folder.path)
        held = replace(folder.held, bytes=folder.held.bytes + of_base)
        if len(folder.tensors) > _TENSORS_PER_MODULE * modules:
            counts = f"{len(folder.tensors):,} tensors for {modules:,} modules"
            raise _another_base(folder, base, f"it has {counts}")
        limit = SizeLimit(module, folder.name)
        limit.config = folder.config
        try:
            with building(held, folder.config, path), hooks.dispatching(limit):
                settings = _settings(folder, module)
                if adapted is None:
                    adapted = wrap.from_pretrained(module, path, name, config=settings)
                else:
                    adapted.add_adapter(name, settings)
                    adapted.load_adapter(path, adapter_name=name)
            state = peft.get_peft_model_state_dict(adapted, adapter_name=name)
        except LoadError:
            raise
        except Exception as error:
            mismatch = _MISMATCH.search(str(error))
            if mismatch is not None:
                raise _another_base(folder, base, mismatch[0][:300]) from error
            raise LoadError(
                f"Cannot load the adapter {folder.path}",
                f"PEFT stopped with {type(error).__name__}: {first_line(error)}",
                "Check the folder, or load it with PEFT yourself and pass the live"
                " (module, tokenizer).",
            ) from error
        # The file and the module must hold the same weights of the adapter.
        unplaced = sorted(folder.tensors.keys() - state.keys())
        missing = sorted(state.keys() - folder.tensors.keys())
        reason = ""
        if missing:
            reason = f"it has no weights for {len(missing)} parts, such as {missing[0]}"
        if unplaced:
            reason = f"{base} has no place for {len(unplaced)} of its weights, such as"
            reason += f" {unplaced[0]}"
        if reason:
            raise _another_base(folder, base, reason)
        names.append(name)
    # PeftModel's own method takes one name; its tuner's takes several.
    adapted.base_model.set_adapter(names)
    return adapted


def _another_base(folder: AdapterFolder, base: str, reason: str) -> Damaged:
    trained_on = folder.base or "another model"
    return Damaged(
        f"Cannot put the adapter {folder.name} on {base}",
        reason,
        f"It was trained on {trained_on}: load it on that.",
    )


def _set_strength(
    adapted: Any, strength: float, folders: list[AdapterFolder], altered: str
) -> None:
    """Multiply what the adapters add, where that means what it says."""
    if strength == 1:
        return
    for folder in folders:
        special = [key for key in _NOT_ADDED if folder.config.get(key)]
        if str(folder.config.get("bias", "none")) != "none":
            special.append("bias")
        start = folder.config.get("init_lora_weights")
        if changes_base(start):
            special.append(str(start))
        if altered:
            special.append(f"its own {altered}")
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
            # PEFT's own `scale_layer` leaves embeddings out.
            for name in part.scaling:
                part.scaling[name] *= strength
