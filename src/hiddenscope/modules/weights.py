"""The weights of a module: each by its name, whether any changed, whether all are
finite, and a hash of them.

A NaN in a weight need not show in the states: torch's CPU flash attention on x86-64
gives finite numbers for some rows whose scores are NaN (see `kernels.py`). So the
weights themselves are read, when a model is loaded and again whenever one of them was
changed.
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from hiddenscope.errors import NotFinite

SHOWN = 3
HASHED_WHOLE = 4 * 2**30
SAMPLE = 2**16


class Weight(NamedTuple):
    """A parameter or a buffer of a module, with its path."""

    path: str
    tensor: Tensor
    is_buffer: bool


def weights(module: nn.Module) -> Iterator[Weight]:
    """Every parameter and buffer once, as plain tensors: a quantised weight is the
    tensors that it is made of.

    >>> [weight.path for weight in weights(nn.Sequential(nn.Linear(2, 2)))]
    ['0.weight', '0.bias']
    """
    for named, is_buffer in (
        (module.named_parameters(), False),
        (module.named_buffers(), True),
    ):
        for path, tensor in named:
            yield from (Weight(*plain, is_buffer) for plain in _plain(path, tensor))


class WeightVersions:
    """The tensors of a module and their version counters, to notice when a weight is
    replaced or written to.

    A write through `.data` does not raise the counter, and is not noticed.

    >>> linear = nn.Linear(2, 2)
    >>> versions = WeightVersions(linear)
    >>> versions.match(linear)
    True
    >>> _ = nn.init.zeros_(linear.weight)
    >>> versions.match(linear)
    False
    """

    def __init__(self, module: nn.Module) -> None:
        tensors = _tensors(module)
        self._known, self._states = (
            [ref(tensor) for tensor in tensors],
            _states(tensors),
        )

    def match(self, module: nn.Module) -> bool:
        """Whether every weight is the tensor it was, unchanged."""
        tensors = _tensors(module)
        same = len(tensors) == len(self._known) and all(
            map(is_, (known() for known in self._known), tensors)
        )
        return same and self._states == _states(tensors)


_FINITE: WeakKeyDictionary[nn.Module, WeightVersions] = WeakKeyDictionary()


def check_finite(module: nn.Module) -> None:
    """Raise NotFinite, naming the weights, if a parameter holds a NaN or an infinity,
    or a buffer a NaN.

    Buffers may hold infinities, as causal masks do. Weights that were found finite are
    read again after a change only.

    >>> linear = nn.Linear(2, 2)
    >>> check_finite(linear)
    >>> _ = nn.init.constant_(linear.bias, torch.nan)
    >>> check_finite(linear)
    Traceback (most recent call last):
    hiddenscope.errors.NotFinite: Cannot use Linear: bias has 2 NaN. Repair that weight, or load the model again.
    """
    known = _FINITE.get(module)
    if known is not None and known.match(module):
        return
    versions = WeightVersions(module)
    counts = {weight.path: _count(weight) for weight in _suspects(weights(module))}
    wrong = [f"{path} has {count}" for path, count in counts.items() if count]
    if wrong:
        hidden = len(wrong) - SHOWN
        more = (
            f"; and {hidden:,} more {'weight is' if hidden == 1 else 'weights are'} not"
            " finite"
            if hidden > 0
            else ""
        )
        remedy = "Repair that weight, or load the model again."
        raise NotFinite(
            f"Cannot use {type(module).__name__}",
            "; ".join(wrong[:SHOWN]) + more,
            remedy,
        )
    _FINITE[module] = versions


def trust_finite(module: nn.Module) -> None:
    """Take the weights as finite without reading them, until one is changed: they were
    read in an earlier load.
    """
    _FINITE[module] = WeightVersions(module)


class Fingerprint:
    """The hash of a module's weights, made when it is first asked for and again after
    they have changed.

    Every byte of up to 4 GiB of weights is hashed (`sha256:`); of more, the ends of
    each weight (`sampled-sha256:`). Weights that accelerate keeps elsewhere count by
    name and shape only (`partial-sha256:`). `remembered` is given the function that
    hashes, while the weights are as they were loaded: it may know the hash from an
    earlier load.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> Fingerprint(a).value == Fingerprint(a).value, Fingerprint(a).value == Fingerprint(b).value
    (True, False)
    """

    def __init__(
        self,
        module: nn.Module,
        remembered: Callable[[Callable[[], str]], str] = lambda compute: compute(),
    ) -> None:
        self.module = module
        self._remembered = remembered
        self._versions = _FINITE.get(module) or WeightVersions(module)
        self._value: str | None = None

    @property
    def value(self) -> str:
        """The hash of the weights as they are now."""
        if not self._versions.match(self.module):
            self._versions = WeightVersions(self.module)
            self._value = _hash(self.module)
        if self._value is None:
            self._value = self._remembered(lambda: _hash(self.module))
        return self._value

    @property
    def when_checked(self) -> str:
        """The hash of the weights as they were when `check_finite` last looked at them."""
        unchanged = (
            self._value is not None and _FINITE.get(self.module) is self._versions
        )
        return self._value if unchanged and self._value is not None else self.value


def _hash(module: nn.Module) -> str:
    """The hash of the names, shapes, dtypes and numbers of all weights.

    Each weight is hashed by itself, in as many threads as there are cores: hashlib lets
    other threads run meanwhile.
    """
    listed = list(weights(module))
    whole = sum(weight.tensor.nbytes for weight in listed) <= HASHED_WHOLE

    def digest(weight: Weight) -> bytes:
        own = hashlib.sha256(
            f"{weight.path} {list(weight.tensor.shape)} {weight.tensor.dtype}".encode()
        )
        for part in _bytes(weight.tensor, whole):
            own.update(part)
        return own.digest()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        digests = list(threads.map(digest, listed))
    partial = any(weight.tensor.is_meta for weight in listed)
    kind = "partial-" if partial else "" if whole else "sampled-"
    return f"{kind}sha256:{hashlib.sha256(b''.join(digests)).hexdigest()}"


def _bytes(tensor: Tensor, whole: bool) -> "list[memoryview[int]]":
    """The bytes of a weight, or its first and last ones; one that lies elsewhere
    (offloaded) has none here.
    """
    if tensor.is_meta or tensor.numel() == 0:
        return []
    flat = tensor.detach().reshape(-1)
    parts = [flat] if whole else [flat[:SAMPLE], flat[-SAMPLE:]]
    return [part.cpu().contiguous().view(torch.uint8).numpy().data for part in parts]


def _tensors(module: nn.Module) -> list[Tensor]:
    """Every parameter and buffer. torch's own `parameters()` takes 20 times as long,
    and this precedes each pass.
    """
    tensors: list[Tensor | None] = []
    parts: list[nn.Module | None] = [module]
    seen: set[int] = set()
    for part in parts:
        if part is None:
            continue
        if part._parameters:
            tensors.extend(part._parameters.values())
        if part._buffers:
            tensors.extend(part._buffers.values())
        if part._modules and id(part) not in seen:
            seen.add(id(part))
            parts.extend(part._modules.values())
    return [tensor for tensor in tensors if tensor is not None]


def _states(tensors: list[Tensor]) -> list[tuple[int, int]]:
    """Where each tensor lies, and how often it was written to; one made in inference
    mode does not count.
    """
    return [
        (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
        for tensor in tensors
    ]


def _suspects(found: Iterable[Weight]) -> list[Weight]:
    """The weights whose sum is not finite.

    Every NaN and infinity shows in a sum, which costs one read of the weights. A sum
    may also overflow by itself, so these weights are then looked at more closely. Each
    sum is taken in the weight's own dtype (torch adds up in float32 within): a sum of
    bfloat16 to float32 takes 13 times as long on x86-64, `isfinite` 25 times.
    """
    sums: dict[torch.device, list[tuple[Weight, Tensor]]] = {}
    for weight in found:
        if weight.tensor.is_floating_point() and not weight.tensor.is_meta:
            sums.setdefault(weight.tensor.device, []).append(
                (weight, _addable(weight.tensor).sum().double())
            )
    suspects: list[Weight] = []
    for pairs in sums.values():  # one transfer a device, not one a weight
        finite = torch.stack([total for _, total in pairs]).isfinite().tolist()
        suspects += [
            weight for (weight, _), fine in zip(pairs, finite, strict=True) if not fine
        ]
    return suspects


def _addable(tensor: Tensor) -> Tensor:
    """The same numbers in a dtype that can be added up and compared, which float8
    cannot.
    """
    return tensor.detach().float() if tensor.dtype.itemsize == 1 else tensor.detach()


def _count(weight: Weight) -> str:
    """How many NaN and infinities a weight holds, in words; empty if it holds none that
    count.
    """
    numbers = _addable(weight.tensor)
    if numbers.numel() and all(bool(end.isfinite()) for end in torch.aminmax(numbers)):
        return ""  # only the sum overflowed
    nans, infinities = (
        int(numbers.isnan().sum()),
        0 if weight.is_buffer else int(numbers.isinf().sum()),
    )
    infinite = f"{infinities:,} infinite {'value' if infinities == 1 else 'values'}"
    return " and ".join([f"{nans:,} NaN"] * bool(nans) + [infinite] * bool(infinities))


def _plain(path: str, tensor: Any) -> list[tuple[str, Tensor]]:
    """The plain tensors that a quantised one is made of; a plain one itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [(path, tensor)]
    parts, _ = tensor.__tensor_flatten__()
    return [
        plain
        for part in parts
        for plain in _plain(f"{path}.{part}", getattr(tensor, part))
    ]
