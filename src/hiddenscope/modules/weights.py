"""The weights of a module: where they are, whether they changed or are finite, a hash.

A NaN in a weight need not show in the states: torch's CPU flash attention returns
finite numbers for some rows whose scores are NaN (see `operations.py`). So the weights
themselves are read when a model is loaded, and again whenever one of them was changed.

accelerate puts a weight that is offloaded on the meta device and brings it in for each
call. Its hooks know where it is.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hiddenscope.errors import NotFinite
from hiddenscope.modules.quantised import packed_tensors

SHOWN = 3
HASHED_WHOLE = 4 * 2**30
SAMPLE = 2**16


class Weight(NamedTuple):
    """A parameter or a buffer of a module, with its path.

    `elsewhere` reads a weight that accelerate keeps in another place; its tensor is
    then on the meta device.
    """

    path: str
    tensor: Tensor
    is_buffer: bool
    elsewhere: Callable[[], Tensor | None] | None = None

    def read(self) -> Tensor:
        """Return the numbers, from wherever they are; a meta tensor if nowhere."""
        if self.elsewhere is None:
            return self.tensor
        value = self.elsewhere()
        return self.tensor if value is None else value


def weight_tensors(module: nn.Module) -> Iterator[Weight]:
    """Yield every parameter and buffer once, as plain tensors.

    A quantised weight is yielded as the tensors that it is made of.

    >>> [weight.path for weight in weight_tensors(nn.Sequential(nn.Linear(2, 2)))]
    ['0.weight', '0.bias']
    """
    tied = getattr(module, "all_tied_weights_keys", {})
    for path, parameter in module.named_parameters():
        # accelerate parts tied weights when it offloads them.
        if not parameter.is_meta or path not in tied:
            yield from _plain_weights(module, path, is_buffer=False)
    for path, _ in module.named_buffers():
        yield from _plain_weights(module, path, is_buffer=True)


def _plain_weights(
    module: nn.Module, path: str, *, is_buffer: bool
) -> Iterator[Weight]:
    container, _, name = path.rpartition(".")
    part = module.get_submodule(container)
    prefix = f"{container}." if container else ""
    for plain_name, tensor in packed_tensors(part, name):
        elsewhere = None
        if tensor.is_meta and plain_name == name:
            elsewhere = partial(offloaded_tensor, part, name)
        yield Weight(f"{prefix}{plain_name}", tensor, is_buffer, elsewhere)


def tensors_of(module: nn.Module) -> list[Tensor]:
    """Return every parameter and buffer of a module."""
    # torch's `parameters()` takes 20 times as long, and this precedes each pass.
    tensors: list[Tensor | None] = []
    parts: list[nn.Module | None] = [module]
    visited = set()
    for part in parts:
        if part is None:
            continue
        if part._parameters:
            tensors.extend(part._parameters.values())
        if part._buffers:
            tensors.extend(part._buffers.values())
        if part._modules and id(part) not in visited:
            visited.add(id(part))
            parts.extend(part._modules.values())
    return [tensor for tensor in tensors if tensor is not None]


class WeightVersions:
    """The tensors of a module and their version counters.

    They show when a weight is replaced or written to. A write through `.data` does not
    raise the counter, and is not noticed; nor is one to an offloaded weight.

    >>> linear = nn.Linear(2, 2)
    >>> versions = WeightVersions(linear)
    >>> versions.match(linear)
    True
    >>> _ = nn.init.zeros_(linear.weight)
    >>> versions.match(linear)
    False
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = tensors_of(module)
        self._tensors = []
        for tensor in tensors:
            # accelerate puts another meta tensor in the place of an offloaded weight
            # after each pass.
            self._tensors.append(None if tensor.is_meta else ref(tensor))
        self._versions = _versions(tensors)

    def match(self, module: nn.Module) -> bool:
        """Tell whether every weight is still the same tensor, unchanged."""
        tensors = tensors_of(module)
        if len(tensors) != len(self._tensors):
            return False
        for known, tensor in zip(self._tensors, tensors, strict=True):
            expected = None if known is None else known()
            if expected is not tensor and not (known is None and tensor.is_meta):
                return False
        return self._versions == _versions(tensors)


def _versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the address of each tensor and how often it was written to."""
    versions = []
    for tensor in tensors:
        address = writes = 0
        # torch counts no writes to tensors that were created in inference mode.
        if not tensor.is_inference() and not tensor.is_meta:
            writes = tensor._version
        if not tensor.is_meta:
            address = tensor.data_ptr()
        versions.append((address, writes))
    return versions


# The weights as `check_finite` last saw them, to be told by identity.
FINITE: WeakKeyDictionary[nn.Module, WeightVersions] = WeakKeyDictionary()


def check_finite(module: nn.Module) -> None:
    """Raise NotFinite if a parameter holds a NaN or an infinity, or a buffer a NaN.

    Buffers may hold infinities, as causal masks do. Finite weights are read again only
    after a change.

    >>> linear = nn.Linear(2, 2)
    >>> check_finite(linear)
    >>> _ = nn.init.constant_(linear.bias, torch.nan)
    >>> check_finite(linear)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    hiddenscope.errors.NotFinite: Cannot use Linear: bias has 2 NaN. Repair that ...
    """
    known = FINITE.get(module)
    if known is not None and known.match(module):
        return
    versions = WeightVersions(module)
    problems = []
    for weight in weight_tensors(module):
        tensor = weight.read()
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        numbers = tensor.detach()
        # Numbers of float8 can be neither added nor compared.
        if numbers.dtype.itemsize == 1:
            numbers = numbers.float()
        # Every NaN and infinity shows in a sum, which costs one read of the weights.
        # It is in its own dtype, in which torch accumulates in float32 anyway: a sum of
        # bfloat16 to float32 takes 13 times as long on x86-64, `isfinite` 25 times.
        if numbers.sum().isfinite():
            continue
        low, high = torch.aminmax(numbers)
        # Only the sum overflowed.
        if low.isfinite() and high.isfinite():
            continue
        nans = int(numbers.isnan().sum())
        infinities = 0 if weight.is_buffer else int(numbers.isinf().sum())
        counts = []
        if nans:
            counts.append(f"{nans:,} NaN")
        if infinities:
            noun = "value" if infinities == 1 else "values"
            counts.append(f"{infinities:,} infinite {noun}")
        if counts:
            problems.append(f"{weight.path} has {' and '.join(counts)}")
    if problems:
        reason = "; ".join(problems[:SHOWN])
        hidden = len(problems) - SHOWN
        if hidden > 0:
            noun = "weight is" if hidden == 1 else "weights are"
            reason += f"; and {hidden:,} more {noun} not finite"
        raise NotFinite(
            f"Cannot use {type(module).__name__}",
            reason,
            "Repair that weight, or load the model again.",
        )
    FINITE[module] = versions


def trust_finite(module: nn.Module) -> None:
    """Take the weights as finite until one is changed: an earlier load read them."""
    FINITE[module] = WeightVersions(module)


class Fingerprint:
    """The hash of a module's weights, computed on demand and again after a change.

    Every byte of up to 4 GiB of weights is hashed (`sha256:`); of more, the ends of
    each weight (`sampled-sha256:`). Weights that accelerate keeps elsewhere are read
    from there; any that cannot be read counts by name and shape only
    (`partial-sha256:`). While the weights are as they were loaded,
    `remembered` is called with the function that hashes them: it may know the hash from
    an earlier load. `notes` are for what else is known of the weights; a change empties
    them.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> Fingerprint(a).value == Fingerprint(a).value
    True
    >>> Fingerprint(a).value == Fingerprint(b).value
    False
    """

    def __init__(
        self,
        module: nn.Module,
        remembered: Callable[[Callable[[], str]], str] = lambda compute: compute(),
    ) -> None:
        self.module = module
        self._remembered = remembered
        self._versions = FINITE.get(module) or WeightVersions(module)
        self._value: str | None = None
        self.notes: dict[str, str] = {}

    @property
    def value(self) -> str:
        """Return the hash of the weights as they are now."""
        if not self._versions.match(self.module):
            self._versions = WeightVersions(self.module)
            self._value = self._hash()
            self.notes.clear()
        if self._value is None:
            self._value = self._remembered(self._hash)
        return self._value

    def _hash(self) -> str:
        return hash_weights(list(weight_tensors(self.module)))

    @property
    def when_checked(self) -> str:
        """Return the hash of the weights as `check_finite` last saw them."""
        if self._value is not None and FINITE.get(self.module) is self._versions:
            return self._value
        return self.value


def hash_weights(listed: list[Weight]) -> str:
    """Hash the names, shapes, dtypes and numbers of weights."""
    whole = sum(weight.tensor.nbytes for weight in listed) <= HASHED_WHOLE
    unread = []

    def digest(weight: Weight) -> bytes:
        # An offloaded weight is read here, so that only some are in memory at once.
        tensor = weight.read()
        if tensor.is_meta:
            unread.append(weight.path)
        name = f"{weight.path} {list(tensor.shape)} {tensor.dtype}"
        hashed = hashlib.sha256(name.encode())
        if not tensor.is_meta and tensor.numel():
            flat = tensor.detach().reshape(-1)
            for part in [flat] if whole else [flat[:SAMPLE], flat[-SAMPLE:]]:
                plain = part.cpu().contiguous().view(torch.uint8)
                hashed.update(plain.numpy().data)
        return hashed.digest()

    # hashlib lets other threads run while it hashes.
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        digests = list(threads.map(digest, listed))
    total = hashlib.sha256(b"".join(digests)).hexdigest()
    if unread:
        return f"partial-sha256:{total}"
    if not whole:
        return f"sampled-sha256:{total}"
    return f"sha256:{total}"


def accelerate_hooks(part: nn.Module) -> Iterator[Any]:
    """Yield accelerate's hooks on one part, which has a single one or a sequence."""
    hook = vars(part).get("_hf_hook")
    if hook is not None:
        yield from getattr(hook, "hooks", [hook])


def offloaded_tensor(part: nn.Module, name: str) -> Tensor | None:
    """Read an offloaded weight from where accelerate keeps it; None if unknown.

    >>> offloaded_tensor(nn.Linear(2, 2), "weight") is None
    True
    """
    for hook in accelerate_hooks(part):
        weights = getattr(hook, "weights_map", None)
        if not isinstance(weights, Mapping):
            continue
        try:
            value = weights[name]
        except KeyError:
            continue
        if isinstance(value, Tensor):
            return value.detach()
    return None


def execution_device(part: nn.Module) -> torch.device | None:
    """Return the device that accelerate runs one part on; None without its hooks."""
    for hook in accelerate_hooks(part):
        device = getattr(hook, "execution_device", None)
        # As in accelerate, a number is that of a GPU.
        if isinstance(device, int):
            return torch.device("cuda", device)
        if device is not None:
            return torch.device(device)
    return None


def devices_of(module: nn.Module) -> list[str]:
    """Name every place that holds weights of a module, in the order of the weights.

    Weights that accelerate reads from files are on "disk".
    """
    places: dict[str, None] = {}
    for part in module.modules():
        for name, weight in (*part._parameters.items(), *part._buffers.items()):
            if weight is not None:
                places[_place(part, name, weight)] = None
    return list(places)


def _place(part: nn.Module, name: str, weight: Tensor) -> str:
    if not weight.is_meta:
        return str(weight.device)
    for hook in accelerate_hooks(part):
        weights: Any = getattr(hook, "weights_map", None)
        full_name = name
        # A part sees the map of the whole model through a prefix.
        while hasattr(weights, "dataset"):
            full_name = f"{weights.prefix}{full_name}"
            weights = weights.dataset
        # accelerate's index of files.
        if full_name in getattr(weights, "index", ()):
            return "disk"
    value = offloaded_tensor(part, name)
    return "disk" if value is None else str(value.device)
