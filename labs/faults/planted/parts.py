"""Find the parts of a model by structure: blocks, attention, norms, the head.

This is a second reading of a model, by the names and shapes of its modules. It does not
use `hiddenscope.discovery`, so that what a planted fault declares does not rest on what
is tested with it.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from hiddenscope.errors import ModuleError

PROJECTIONS = {
    "q": ("q_proj", "q", "query"),
    "k": ("k_proj", "k", "key"),
    "v": ("v_proj", "v", "value"),
    "o": ("o_proj", "out_proj", "o", "c_proj", "dense"),
    "qkv": ("c_attn", "query_key_value"),
}
_ACTIVATION = re.compile(r"(gelu|silu|relu|swish|mish|tanh)", re.IGNORECASE)


@dataclass(frozen=True)
class BlockParts:
    """One block: its path, its number in its stack, and the stack's name as sites carry
    it (`encoder.`, or nothing).
    """

    path: str
    number: int
    stack: str

    @property
    def site(self) -> str:
        """Return the site of the block's output."""
        return f"{self.stack}layer.{self.number + 1}"


class ModelParts:
    """The parts of a module, as paths.

    >>> from hiddenscope.testing import tiny_model
    >>> parts = ModelParts(tiny_model("gpt2"))
    >>> [block.path for block in parts.blocks][:2], parts.head, parts.site("transformer.h.1.attn.c_proj")
    (['transformer.h.0', 'transformer.h.1'], 'lm_head', 'layer.2')
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.modules = dict(module.named_modules(remove_duplicate=False))
        if not self.blocks:
            problem = f"No blocks in {type(module).__name__}"
            raise ModuleError(
                problem, "it has no list of two modules or more", "Give a transformer."
            )

    @cached_property
    def lists(self) -> list[str]:
        """Return the paths of the lists of blocks that lie in no other list."""
        paths = [
            path
            for path, part in self.modules.items()
            if isinstance(part, nn.ModuleList) and len(part) > 1
        ]
        return [
            path
            for path in paths
            if not any(path.startswith(f"{other}.") for other in paths)
        ]

    @cached_property
    def blocks(self) -> list[BlockParts]:
        """Return every block of every stack, in the order of the pass."""
        lists = (
            sorted(self.lists, key=lambda path: "decoder" in path)
            if len(self.lists) == 2
            else self.lists[:1]
        )
        return [
            BlockParts(f"{path}.{k}", k, self.stack_of(path))
            for path in lists
            for k in range(len(self._list(path)))
        ]

    def _list(self, path: str) -> nn.ModuleList:
        blocks = self.modules[path]
        assert isinstance(blocks, nn.ModuleList)
        return blocks

    def stack_of(self, path: str) -> str:
        """Return the stack of a path as sites name it; nothing if there is only one."""
        if len(self.lists) != 2:
            return ""
        return "decoder." if "decoder" in path.split(".") else "encoder."

    @cached_property
    def owners(self) -> list[str]:
        """Return the modules that call the blocks, one for each stack.

        They also make the masks and positions.
        """
        paths = []
        for path in {block.path.rpartition(".")[0]: None for block in self.blocks}:
            owner = path.rpartition(".")[0]
            while (
                owner
                and "input_ids" not in signature(self.modules[owner].forward).parameters
            ):
                owner = owner.rpartition(".")[0]
            paths.append(owner)
        return paths

    @cached_property
    def head(self) -> str | None:
        """Return the path of the unembedding."""
        getter: Any = getattr(self.module, "get_output_embeddings", None)
        return self._path_of(getter()) if getter is not None else None

    @cached_property
    def embedding(self) -> str | None:
        """Return the path of the token embedding."""
        getter: Any = getattr(self.module, "get_input_embeddings", None)
        return self._path_of(getter()) if getter is not None else None

    def _path_of(self, part: nn.Module | None) -> str | None:
        return next(
            (
                path
                for path, other in self.modules.items()
                if other is part and part is not None
            ),
            None,
        )

    @cached_property
    def final_norms(self) -> list[str]:
        """Return the norms after the last block of each stack."""
        paths = []
        for owner in self.owners:
            names = [
                name
                for name, part in self.modules[owner].named_children()
                if is_norm(part) and "emb" not in name
            ]
            paths += [joined(owner, name) for name in names]
        return paths

    @cached_property
    def rotary(self) -> list[str]:
        """Return the modules that make the rotary tables."""
        return [path for path in self.modules if "rotary" in path.rpartition(".")[2]]

    @cached_property
    def config(self) -> Any:
        """Return the configuration of the text model."""
        config: Any = self.module.config
        return (
            config.get_text_config() if hasattr(config, "get_text_config") else config
        )

    @cached_property
    def heads(self) -> int:
        """Return the number of attention heads."""
        return int(self.config.num_attention_heads)

    @cached_property
    def key_heads(self) -> int:
        """Return the number of key and value heads."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.heads)

    @cached_property
    def head_width(self) -> int:
        """Return the width of one head."""
        return int(
            getattr(self.config, "head_dim", None)
            or self.config.hidden_size // self.heads
        )

    def inside(self, block: BlockParts) -> Iterator[tuple[str, nn.Module]]:
        """Return every module inside a block, with its path."""
        for name, part in self.modules[block.path].named_modules():
            if name:
                yield f"{block.path}.{name}", part

    def everywhere(self, wanted: Any) -> list[str]:
        """Return the paths inside all blocks whose module is `wanted`."""
        return [
            path
            for block in self.blocks
            for path, part in self.inside(block)
            if wanted(part)
        ]

    def projection(self, attention: str, role: str) -> str | None:
        """Return the path of a projection of attention, such as its `"q"`.

        BERT keeps its `"o"` beside the attention module.
        """
        for name in PROJECTIONS[role]:
            if joined(attention, name) in self.modules:
                return joined(attention, name)
        beside = joined(attention.rpartition(".")[0], "output.dense")
        return beside if role == "o" and beside in self.modules else None

    def block_of(self, path: str) -> BlockParts | None:
        """Return the block that a path lies in."""
        return next(
            (block for block in self.blocks if f"{path}.".startswith(f"{block.path}.")),
            None,
        )

    def site(self, path: str) -> str:
        """Return the first site at which a fault in a module shows."""
        block = self.block_of(path)
        stack = self.stack_of(path)
        if block is not None:
            return block.site
        if path in self.final_norms:
            return f"{stack}final"
        if path in self.rotary:
            return f"{stack}layer.1"
        return "logits" if self._in_head(path) else f"{stack}layer.0"

    def _in_head(self, path: str) -> bool:
        """Check whether a module comes after the stacks."""
        prefix = str(getattr(self.module, "base_model_prefix", ""))
        inside = (
            path == prefix
            or path.startswith(f"{prefix}.")
            or prefix not in self.modules
        )
        return path == self.head or (bool(path) and not inside)


def joined(parent: str, name: str) -> str:
    """Return the path of a child."""
    return f"{parent}.{name}" if parent else name


def is_linear(part: nn.Module) -> bool:
    """Check whether a module is a product with a matrix."""
    return isinstance(part, nn.Linear | Conv1D)


def is_norm(part: nn.Module) -> bool:
    """Check whether a module is a LayerNorm or an RMSNorm of any class."""
    weight = getattr(part, "weight", None)
    return (
        "norm" in type(part).__name__.lower()
        and weight is not None
        and weight.ndim == 1
    )


def is_layer_norm(part: nn.Module) -> bool:
    """Check whether a norm subtracts the mean."""
    return isinstance(part, nn.LayerNorm)


def is_activation(part: nn.Module) -> bool:
    """Check whether a module is an activation function."""
    leaf = not list(part.children()) and not list(part.parameters())
    return leaf and _ACTIVATION.search(type(part).__name__) is not None


def is_attention(part: nn.Module) -> bool:
    """Check whether a module projects to queries, keys and values itself."""
    children = dict(part.named_children())
    apart = all(any(name in children for name in PROJECTIONS[role]) for role in "qkv")
    return apart or any(name in children for name in PROJECTIONS["qkv"])


def weight_out_first(part: nn.Module) -> Any:
    """Return the weight of a linear as `[output, input]`.

    It is a view: writing to it changes the module.
    """
    weight: Any = part.weight
    return weight.data.T if isinstance(part, Conv1D) else weight.data
