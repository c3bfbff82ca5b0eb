"""Fingerprint: a hash by which the weights of a module are known again."""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

WHOLE = 4 * 2**30
SAMPLE = 2**16


class Fingerprint:
    """The hash of a module's weights, made when it is first asked for and again when they have changed.

    Every byte of up to 4 GiB of weights is hashed (`sha256:`); of more, the ends of each weight (`sampled-sha256:`).
    Weights that accelerate keeps elsewhere are known by name and shape only (`partial-sha256:`).

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> Fingerprint(a).value == Fingerprint(a).value, Fingerprint(a).value == Fingerprint(b).value
    (True, False)
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._known: tuple[tuple[tuple[int, int], ...], str] | None = None

    @property
    def value(self) -> str:
        """The hash of the weights as they are now."""
        state = tuple((weight.data_ptr(), _version(weight)) for _, weight in self._weights())
        if self._known is None or self._known[0] != state:
            self._known = (state, self._hash())
        return self._known[1]

    def _weights(self) -> list[tuple[str, Tensor]]:
        """What the module learned: quantised modules keep some of it in buffers."""
        named = [*self.module.named_parameters(), *self.module.named_buffers()]
        return [plain for name, weight in named for plain in _inside(name, weight)]

    def _hash(self) -> str:
        weights = self._weights()
        whole = sum(weight.nbytes for _, weight in weights) <= WHOLE
        digest = hashlib.sha256()
        for name, weight in weights:
            digest.update(f"{name} {list(weight.shape)} {weight.dtype}".encode())
            for part in _bytes(weight, whole):
                digest.update(part)
        partial = any(weight.is_meta for _, weight in weights)
        return ("partial-" if partial else "" if whole else "sampled-") + "sha256:" + digest.hexdigest()


def _inside(name: str, weight: Any) -> list[tuple[str, Tensor]]:
    """The plain tensors that a quantised one is made of; a plain one itself."""
    if not hasattr(weight, "__tensor_flatten__"):
        return [(name, weight)]
    parts, _ = weight.__tensor_flatten__()
    return [plain for part in parts for plain in _inside(f"{name}.{part}", getattr(weight, part))]


def _version(weight: Tensor) -> int:
    """How often a weight was written to; one made in inference mode does not count."""
    return 0 if weight.is_inference() else weight._version


def _bytes(weight: Tensor, whole: bool) -> "list[memoryview[int]]":
    """The bytes of a weight, or its first and last ones; a weight that lies elsewhere (offloaded) has none here."""
    if weight.is_meta or weight.numel() == 0:
        return []
    flat = weight.detach().reshape(-1)
    parts = [flat] if whole else [flat[:SAMPLE], flat[-SAMPLE:]]
    return [part.cpu().contiguous().view(torch.uint8).numpy().data for part in parts]
