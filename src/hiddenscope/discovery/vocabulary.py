"""The ids that a module takes and how many of them, and trial texts of such ids.

Its embedding or its configuration names the vocabulary, or else the tables that it
looks ids up in. CANINE names no vocabulary: it hashes each character into a few
buckets, and takes every one that Unicode has. The longest text is named by the
configuration. A module in plain PyTorch is tried instead: a table that it looks
positions up in, or the longest of a few short texts that it runs on.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hiddenscope.discovery.trace import arguments
from hiddenscope.errors import is_out_of_memory
from hiddenscope.modules import autograd, calls, hooks

LOOKUPS = ("aten::embedding", "aten::index_select", "aten::index.Tensor")
CHARACTERS = sys.maxunicode + 1
# The ids of a trial stay below this where nothing names the vocabulary.
UNKNOWN = 256
# The longest text of any trial.
LONGEST_TRIAL = 13
WINDOWS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_encoder_position_embeddings",
    "max_target_positions",
)


class TrialShape(NamedTuple):
    """The shape of a trial pass.

    The two passes of a trial differ in all of it, so that no axis is mistaken for
    another.
    """

    texts: int
    tokens: int
    targets: int


def trial_shapes(
    module: nn.Module, usual: Sequence[TrialShape]
) -> Sequence[TrialShape]:
    """Return the usual shapes of two trial passes, or shapes for a short window."""
    needed = max(max(shape[1:]) for shape in usual)
    limits = window(module), target_window(module)
    longest = min([needed, *filter(None, limits)])
    if longest == needed:
        return usual
    return (
        TrialShape(longest + 1, longest, longest - 1),
        TrialShape(longest + 3, longest - 1, longest),
    )


def trial_inputs(
    module: nn.Module, shape: TrialShape, *, seed: int = 0
) -> dict[str, Any]:
    """Return the keyword arguments of a trial pass, with targets for a decoder."""
    device = hooks.input_device(module)
    ids = trial_ids(module, shape.texts, shape.tokens, seed=seed).to(device)
    targets = None
    if "decoder_input_ids" in calls.accepts(module):
        targets = trial_ids(module, shape.texts, shape.targets, seed=seed + 1)
        targets = targets.to(device)
    return arguments(module, ids, targets=targets)


def trial_ids(module: nn.Module, texts: int, tokens: int, *, seed: int = 0) -> Tensor:
    """Return ids [text, token] for a trial pass, the same each time."""
    # Any text could hold these, and none has a special meaning in the configuration.
    config = getattr(module, "config", None)
    configs = [config]
    for name in getattr(config, "sub_configs", {}):
        configs.append(getattr(config, name, None))
    reserved = set()
    for part in configs:
        for name, value in getattr(part, "__dict__", {}).items():
            if name.endswith(("token_id", "token_index")):
                reserved.update(value if isinstance(value, list) else [value])
    size = _declared_vocabulary(module)
    if size is None:
        size = min(UNKNOWN, _measured(module).vocabulary)
    # Control tokens are often among the first hundred.
    start = min(100, size // 8)
    step = max(1, (size - start) // 512)
    ordinary = [token for token in range(start, size, step) if token not in reserved]
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(ordinary), (texts, tokens), generator=generator)
    return torch.tensor(ordinary)[picks]


def vocabulary(module: nn.Module) -> int:
    """Return the number of ids that a module takes.

    >>> from hiddenscope.testing import tiny_model
    >>> vocabulary(tiny_model("gpt2"))
    128
    """
    return _declared_vocabulary(module) or _measured(module).vocabulary


def _declared_vocabulary(module: nn.Module) -> int | None:
    """Return the number of ids that the embedding or the configuration names.

    It is None where neither does.
    """
    sizes = []
    get_embedding = getattr(module, "get_input_embeddings", lambda: None)
    try:
        weight = getattr(get_embedding(), "weight", None)
    except NotImplementedError:
        weight = None
    if weight is not None:
        sizes.append(int(weight.shape[0]))
    size = getattr(text_config(module), "vocab_size", None)
    if isinstance(size, int):
        sizes.append(size)
    return min(sizes, default=None)


def text_config(module: nn.Module, stack: str = "encoder") -> Any:
    """Return the configuration of a module's texts, which may be a part of it.

    A model that is composed of an encoder and a decoder has one for the texts of each.
    """
    config: Any = getattr(module, "config", None)
    for name in (stack, "text_encoder", "text_config"):
        part = getattr(config, name, None)
        config = part if hasattr(part, "to_dict") else config
    return config


def window(module: nn.Module) -> int | None:
    """Return the longest text in tokens; None where nothing limits it.

    The RoBERTa family counts positions from the padding token's on, and ProphetNet
    looks one place ahead: these places of a table of positions stay free.
    """
    config = text_config(module)
    named = _named_window(config)
    limits = [] if named is None else [named]
    # CANINE's positions have a table as long as those of its characters.
    buckets = getattr(config, "num_hash_buckets", None)
    if isinstance(buckets, int):
        limits.append(buckets)
    ahead = "prophetnet" in str(getattr(config, "model_type", ""))
    for path, part in module.named_modules():
        if "position" not in path.rpartition(".")[2]:
            continue
        table = getattr(part, "weight", None)
        padding = getattr(part, "padding_idx", None)
        if isinstance(table, Tensor) and isinstance(padding, int):
            limits.append(table.shape[0] - padding - 1 - ahead)
    if calls.plain_parameters(module) is not None:
        limits += _measured(module).windows
    return min(limits, default=None)


def target_window(module: nn.Module) -> int | None:
    """Return the longest text of a decoder, where it has a limit of its own."""
    config = text_config(module, "decoder")
    if config is text_config(module):
        return getattr(config, "max_decoder_position_embeddings", None)
    return _named_window(config)


def _named_window(config: Any) -> int | None:
    """Return the first limit that a configuration names."""
    limits = (getattr(config, name, None) for name in WINDOWS)
    named = (limit for limit in limits if isinstance(limit, int) and limit > 0)
    return next(named, None)


class _Limits(NamedTuple):
    """What trial passes show of the ids and the lengths that a module takes."""

    vocabulary: int
    windows: list[int]


_MEASURED: WeakKeyDictionary[nn.Module, _Limits] = WeakKeyDictionary()


def _measured(module: nn.Module) -> _Limits:
    """Run a module once on two short texts, shorter ones until it does not fail."""
    if module in _MEASURED:
        return _MEASURED[module]
    # Nothing tells the vocabulary of a module that cannot be run like this: its own
    # pass will refuse an id.
    limits = _Limits(CHARACTERS, [])
    for tokens in range(LONGEST_TRIAL, 0, -1):
        first = torch.arange(tokens)[None] % 2
        try:
            before, after = _lookups(module, first), _lookups(module, 1 - first)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue
        # The lengths of the tables that ids and positions are looked up in. Where the
        # rows are not the ids, as in CANINE, every character is an id.
        ids = first[0]
        # By the length of the table, so that the first of each length counts.
        sizes: dict[int, int] = {}
        windows: list[int] = []
        hashed: set[int] = set()
        for (length, rows), (_, others) in zip(before, after, strict=False):
            if len(rows) != len(ids):
                continue
            # A table that is read in the same way for other ids is not that of the ids.
            is_of_ids = not torch.equal(rows, others)
            offset = rows - (ids if is_of_ids else torch.arange(len(ids)))
            if is_of_ids and (offset != offset[0]).any():
                hashed.add(length)
            elif is_of_ids:
                sizes.setdefault(length, length - int(offset[0]))
            elif (offset == offset[0]).all():
                windows.append(length - int(offset[0]))
        # Some of CANINE's hashes may count on as a table of ids does, but not all.
        plain = [size for length, size in sizes.items() if length not in hashed]
        unknown = CHARACTERS if hashed else UNKNOWN
        limits = _Limits(plain[0] if plain else unknown, windows)
        if not limits.windows and tokens < LONGEST_TRIAL:
            limits.windows.append(tokens)
        break
    _MEASURED[module] = limits
    return limits


class _LookupRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the lookups of a pass: the length of each table, and the rows read."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lookups: list[tuple[int, Tensor]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function.name() in LOOKUPS and isinstance(args[0], Tensor):
            for rows in tree_leaves(args[1:]):
                # The first tensor of integers.
                if isinstance(rows, Tensor) and not rows.is_floating_point():
                    table = args[0].shape[0]
                    self.lookups.append((table, rows.detach().flatten().cpu()))
                    break
        return function(*args, **(kwargs or {}))


def _lookups(module: nn.Module, ids: Tensor) -> list[tuple[int, Tensor]]:
    inputs = arguments(module, ids.to(hooks.input_device(module)))
    recorder = _LookupRecorder()
    with autograd.restored(), torch.no_grad(), hooks.restoring(module), recorder:
        args, kwargs = calls.call_arguments(module, inputs)
        module(*args, **kwargs)
    return recorder.lookups
