"""Recipe: how another process loads the same model. It travels as JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from hiddenscope.errors import LoadError, ModuleError
from hiddenscope.loading.checkpoint import quiet_transformers
from hiddenscope.loading.variants import steps_of, with_steps
from hiddenscope.model import Model, load
from hiddenscope.modules.adapters import has_adapters
from hiddenscope.store import StorePlan


@dataclass(frozen=True)
class ModelRecipe:
    """Where a model is loaded from, and how.

    On a machine that does not see the folder, the model is loaded by its name.
    """

    folder: str
    name: str
    revision: str | None
    dtype: str
    attention: str | None
    device: str
    # The adapters and the scheme that `loading.variants` puts on the model.
    variants: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the recipe as a dict for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelRecipe:
        """Read what `to_json` returned."""
        return cls(**data)

    def model(self, plan: StorePlan, device: str | None = None) -> Model:
        """Load the model, which must have the weights that the plan names."""
        source = self.folder
        revision = None
        if not os.path.isdir(self.folder):
            source = self.name
            # Only an id of the hub, such as "owner/name", has revisions.
            if "/" in self.name:
                revision = self.revision
        model = load(
            with_steps(source, self.variants),
            revision=revision,
            dtype=self.dtype,
            device=device or self.device,
            attention=self.attention,
        )
        weights = model.source().weights
        if weights != plan.model["weights"]:
            raise LoadError(
                f"Cannot compute with {self.name} in this process",
                f"its weights are {weights[:24]}, and the plan was made with"
                f" {plan.model['weights'][:24]}",
                "Load the model anew.",
            )
        return model


@contextmanager
def recipe_of(model: Model) -> Iterator[ModelRecipe]:
    """Yield how other processes load a model; a live module is saved for them first."""
    module: Any = model.module
    config = getattr(module, "config", None)
    class_name = type(module).__name__
    with ExitStack() as stack:
        folder = model.folder
        architectures = getattr(config, "architectures", None) or [class_name]
        # The folder may name another architecture than the module's class, and others
        # would load that one.
        steps = steps_of(model.variant)
        if has_adapters(module) and not steps:
            raise ModuleError(
                "Cannot give this model to other processes",
                "its adapters were put on a live module",
                "Give workers=1, or load it with hs.Adapted(base, folder).",
            )
        is_other_class = architectures != [class_name] and not steps
        if folder is None or is_other_class:
            if not hasattr(module, "save_pretrained"):
                raise ModuleError(
                    "Cannot give this model to other processes",
                    f"{class_name} has no save_pretrained, by which they could get it",
                    "Give workers=1.",
                )
            folder = stack.enter_context(TemporaryDirectory(prefix="hiddenscope-"))
            with quiet_transformers():
                module.save_pretrained(folder)
                tokenizer: Any = model.tokenizer
                if hasattr(tokenizer, "save_pretrained"):
                    tokenizer.save_pretrained(folder)
        yield ModelRecipe(
            folder=os.path.abspath(folder),
            name=model.name,
            revision=model.revision,
            dtype=str(next(module.parameters()).dtype).removeprefix("torch."),
            attention=getattr(config, "_attn_implementation", None),
            device=str(model.device),
            variants=steps,
        )
