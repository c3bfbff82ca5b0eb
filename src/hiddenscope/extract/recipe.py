"""Recipe: how another process comes by the same model, told in JSON; nothing is
pickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from tempfile import TemporaryDirectory
from typing import Any

from hiddenscope.errors import LoadError, ModuleError
from hiddenscope.loading.checkpoint import quiet_transformers
from hiddenscope.model import Model, load
from hiddenscope.store import StorePlan


@dataclass(frozen=True)
class ModelRecipe:
    """Where a model is loaded from, and how: a folder, or where there is no such folder
    its name.
    """

    folder: str
    name: str
    revision: str | None
    dtype: str
    attention: str | None
    device: str

    def to_json(self) -> dict[str, Any]:
        """A dict that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecipe:
        """What `to_json` was made from."""
        return cls(**data)

    def model(self, plan: StorePlan, device: str | None = None) -> Model:
        """The model, which must have the weights that the plan names."""
        here = os.path.isdir(self.folder)
        source, revision = (self.folder, None) if here else (self.name, self.revision)
        options: dict[str, Any] = {
            "dtype": self.dtype,
            "device": device or self.device,
            "attention": self.attention,
        }
        made = load(
            source, revision=revision if not here and "/" in source else None, **options
        )
        if (found := made.source().weights) != plan.model["weights"]:
            reason = (
                f"its weights are {found[:24]}, and the plan was made with"
                f" {plan.model['weights'][:24]}"
            )
            raise LoadError(
                f"Cannot compute with {self.name} in this process",
                reason,
                "Load the model anew.",
            )
        return made


@contextmanager
def recipe_of(model: Model) -> Iterator[ModelRecipe]:
    """How other processes load a model while the body runs; a live module is saved for
    them first.
    """
    module: Any = model.module
    config = getattr(module, "config", None)
    with ExitStack() as stack:
        folder = model.folder
        named = getattr(config, "architectures", None) or [type(module).__name__]
        if folder is None or named != [type(module).__name__]:
            if not hasattr(module, "save_pretrained"):
                reason = (
                    f"{type(module).__name__} has no save_pretrained, by which they"
                    " could get it"
                )
                raise ModuleError(
                    "Cannot give this model to other processes",
                    reason,
                    "Give workers=1.",
                )
            folder = stack.enter_context(TemporaryDirectory(prefix="hiddenscope-"))
            with quiet_transformers():
                module.save_pretrained(folder)
                tokenizer: Any = model.tokenizer
                if hasattr(tokenizer, "save_pretrained"):
                    tokenizer.save_pretrained(folder)
        attention = getattr(config, "_attn_implementation", None)
        dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
        yield ModelRecipe(
            os.path.abspath(folder),
            model.name,
            model.revision,
            dtype,
            attention,
            str(model.device),
        )
