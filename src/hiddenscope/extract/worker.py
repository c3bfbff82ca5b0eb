"""Worker: what another process, or an actor of a Ray cluster, does for a job.

It is sent an order, which says where the store and the model are, and then the names of
units, one at a time. It answers with what it has committed since its last answer, so
that a worker that dies costs no more than the units it held. A process of this machine
is a `python -m hiddenscope.extract.worker`, and also says how many tokens each batch
had.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from hiddenscope import errors
from hiddenscope.errors import LoadError, ModuleError
from hiddenscope.extract.compute import Done, Pipeline
from hiddenscope.loading.checkpoint import quiet_transformers
from hiddenscope.loading.variants import variant_steps, with_steps
from hiddenscope.model import Model, load
from hiddenscope.modules import hooks
from hiddenscope.modules.adapters import has_adapters
from hiddenscope.store import StorePlan, resume_store
from hiddenscope.workers import Channel, Header, parent_channel


@dataclass(frozen=True)
class ModelRecipe:
    """Where a model is loaded from, and how. It travels as JSON.

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

    def model(self, plan: StorePlan) -> Model:
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
            device=self.device,
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
    problem = "Cannot give this model to other processes"
    steps = variant_steps(model.variant)
    if has_adapters(module) and not steps:
        raise ModuleError(
            problem,
            "its adapters were put on a live module",
            "Give workers=1, or load it with hs.Adapted(base, folder).",
        )
    # The folder may name another architecture than the module's class, and others would
    # load that one.
    architectures = getattr(config, "architectures", None) or [class_name]
    is_other_class = architectures != [class_name] and not steps
    with ExitStack() as stack:
        folder = model.folder
        if folder is None or is_other_class:
            if not hasattr(module, "save_pretrained"):
                raise ModuleError(
                    problem,
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


class UnitWorker:
    """One model, and a pipeline of units."""

    def __init__(
        self,
        order: Mapping[str, Any],
        batch_done: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        writer = resume_store(order["store"], digest=order["digest"])
        self._stack = ExitStack()
        # Sums over another number of threads have other last bits.
        threads = hooks.threads(writer.plan.environment["threads"])
        self._stack.enter_context(threads)
        model = ModelRecipe(**order["recipe"]).model(writer.plan)
        self._done: list[Done] = []
        self._pipeline = Pipeline(model, writer, self._done.append, batch_done)

    def compute(self, unit: str | None) -> list[Done]:
        """Compute a unit; return what was committed since the last call.

        The unit itself may still be on its way to the disk. Without one, wait until
        everything is committed.
        """
        if unit is None:
            self._pipeline.finish()
        else:
            self._pipeline.put(unit)
        # A thread of the pipeline may append meanwhile, so remove only what was copied.
        done = self._done[:]
        del self._done[: len(done)]
        return done

    def close(self) -> None:
        """Use the threads of before again."""
        self._stack.close()


def serve(channel: Channel) -> None:
    """Compute units until the parent closes the pipe, or ends."""
    # The parent may end at any instant.
    with suppress(BrokenPipeError), ExitStack() as stack:
        try:
            frame = channel.receive()
            if frame is None:
                return
            worker = UnitWorker(
                frame.header, lambda tokens: channel.send({"tokens": tokens})
            )
            stack.callback(worker.close)
            while (frame := channel.receive()) is not None:
                done = worker.compute(frame.header["unit"])
                channel.send({"done": list(map(asdict, done))})
        except BrokenPipeError:
            raise
        except Exception as error:
            channel.send({"error": error_to_json(error)})


def error_to_json(error: BaseException) -> Header:
    """Return an error as a dict for JSON."""
    kind = type(error).__name__
    if isinstance(error, errors.Error):
        return {"kind": kind, "parts": [error.problem, error.reason, error.remedy]}
    return {"kind": kind, "parts": [str(error)[:500]]}


def error_from_json(described: Header) -> errors.Error:
    """Return the error of a worker, of the class that it had there."""
    kind = getattr(errors, described["kind"], None)
    parts = described["parts"]
    if isinstance(kind, type) and issubclass(kind, errors.Error):
        return kind(*parts)
    reason = f"{described['kind']}: {parts[0]}"
    return errors.PassError("A worker failed", reason, "See what it says.")


if __name__ == "__main__":
    serve(parent_channel())
