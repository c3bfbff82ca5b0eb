"""The devices that a model is loaded on: one, or several by a map of its modules.

accelerate spreads the modules. What a map names is checked on a module without weights,
so that a mistake is found before any weight is read.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import finalize

from hiddenscope.errors import LoadError

if TYPE_CHECKING:
    import torch
    from torch import nn

    DeviceName: TypeAlias = str | torch.device | int
    Devices: TypeAlias = DeviceName | Mapping[str, DeviceName] | None

STRATEGIES = ("auto", "balanced", "balanced_low_0", "sequential")
DISK = "disk"


@dataclass(frozen=True)
class Placement:
    """Where a model goes: on one `device`, or over several by a `device_map`."""

    device: torch.device | None
    device_map: str | dict[str, str] | None = None

    @property
    def spreads(self) -> bool:
        """Tell whether accelerate places the modules."""
        return self.device_map is not None

    @property
    def may_use_disk(self) -> bool:
        """Tell whether weights may be left on the disk."""
        if isinstance(self.device_map, dict):
            return DISK in self.device_map.values()
        return self.spreads


def place(devices: Devices) -> Placement:
    """Return where a model is to be loaded; raise if a device is not there.

    >>> place("cpu").device, place({"": "cpu"}).device_map
    (device(type='cpu'), {'': 'cpu'})
    """
    import torch

    if devices is None:
        return Placement(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if isinstance(devices, str) and devices in STRATEGIES:
        _require_accelerate()
        return Placement(None, devices)
    if not isinstance(devices, Mapping):
        return Placement(usable_device(devices))
    _require_accelerate()
    if not devices:
        raise LoadError(
            "Cannot spread the model over devices",
            "the map is empty",
            "Name a device for each module, or {'': 'cpu'} for all of them.",
        )
    device_map = {}
    for name, device in devices.items():
        text = str(device)
        if isinstance(device, int):
            text = f"cuda:{device}"
        if text != DISK:
            text = str(usable_device(text))
        device_map[str(name)] = text
    if set(device_map.values()) == {DISK}:
        raise LoadError(
            "Cannot load on disk alone",
            "no device is named that computes",
            "Put the embeddings on 'cpu' or on a GPU.",
        )
    return Placement(None, device_map)


def usable_device(device: DeviceName) -> torch.device:
    """Return a device that exists and holds numbers."""
    import torch

    try:
        usable = torch.empty(0, device=device).device
        if usable.type == "meta":
            raise RuntimeError("a module on meta has no weights")
    except (RuntimeError, AssertionError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = "Choose 'cpu', or 'auto' for whatever there is."
        raise LoadError(
            f"Cannot load on device {str(device)[:60]!r}", lines[0][:300], remedy
        ) from error
    return usable


def spread_map(device_map: Mapping[str, str], module: nn.Module) -> dict[str, str]:
    """Return the map for accelerate: no name in it lies inside another.

    It raises unless the map names modules that exist and leaves no weight out.
    `module` may be without weights, on the meta device.

    >>> from torch import nn
    >>> two_layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> spread_map({"": "cpu", "1": "disk"}, two_layers)
    {'0': 'cpu', '1': 'disk'}
    """
    _check_map(device_map, module)
    if len(set(device_map.values())) == 1:
        return {"": next(iter(device_map.values()))}
    return dict(_parts_of_map(device_map, module, "", None))


def _parts_of_map(
    device_map: Mapping[str, str], module: nn.Module, path: str, device: str | None
) -> Iterator[tuple[str, str]]:
    """Yield the largest parts that lie on one device; an inner name overrides."""
    device = device_map.get(path, device)
    prefix = f"{path}." if path else ""
    names_inside = [name for name in device_map if name and name.startswith(prefix)]
    if path and device is not None and not names_inside:
        yield path, device
        return
    for name, _ in (*module._parameters.items(), *module._buffers.items()):
        place_of_weight = device_map.get(f"{prefix}{name}", device)
        if place_of_weight is not None:
            yield f"{prefix}{name}", place_of_weight
    for name, part in module.named_children():
        yield from _parts_of_map(device_map, part, f"{prefix}{name}", device)


def _check_map(device_map: Mapping[str, str], module: nn.Module) -> None:
    weights = list(dict(module.named_parameters(remove_duplicate=False)))
    weights += list(dict(module.named_buffers(remove_duplicate=False)))
    known = {*dict(module.named_modules()), *weights}
    problem = "Cannot spread the model over devices"
    for name in device_map:
        if name not in known:
            raise LoadError(
                problem,
                f"the map names {name[:80]!r}, and {type(module).__name__} has no such"
                " module",
                f"Its modules are {_outline(module)}.",
            )
    for weight in weights:
        if not any(_covers(name, weight) for name in device_map):
            raise LoadError(
                problem,
                f"the map leaves out {weight!r}",
                "Name its module, or '' for everything that is not named.",
            )


def _covers(name: str, weight: str) -> bool:
    return not name or weight == name or weight.startswith(f"{name}.")


def _outline(module: nn.Module) -> str:
    """Name the children of a module, and those of the first one with several."""
    names = [name for name, _ in module.named_children()]
    for name, child in module.named_children():
        names += [f"{name}.{inner}" for inner, _ in child.named_children()]
    return ", ".join(names[:8])


def offload_folder() -> Path:
    """Create a folder for weights that are left on the disk."""
    return Path(tempfile.mkdtemp(prefix="hiddenscope-offload-"))


def remove_with(module: nn.Module, folder: Path) -> None:
    """Remove a folder when the module is gone, or with the process."""
    finalize(module, _remove, str(folder))


def _remove(folder: str) -> None:
    import shutil

    with suppress(OSError):
        shutil.rmtree(folder)


def summary(placement: Placement, module: Any) -> str:
    """Say over which devices a spread model lies; empty for a single one."""
    places = getattr(module, "hf_device_map", None)
    if not placement.spreads or not isinstance(places, Mapping):
        return ""
    counts: dict[str, int] = {}
    for device in places.values():
        name = f"cuda:{device}" if isinstance(device, int) else str(device)
        counts[name] = counts.get(name, 0) + 1
    if len(counts) < 2:
        return ""
    parts = [f"{count} on {name}" for name, count in counts.items()]
    return f"Its modules are spread over devices: {', '.join(parts)}."


def _require_accelerate() -> None:
    if importlib.util.find_spec("accelerate") is None:
        raise LoadError(
            "Cannot spread the model over devices",
            "accelerate is not installed",
            "Run: pip install accelerate",
        )
