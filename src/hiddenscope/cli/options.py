"""The options that every command has."""

import inspect
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.arguments import check_place
from hiddenscope.cli.terminal import echo, in_bytes, visible
from hiddenscope.errors import FileError, StatesError
from hiddenscope.loading.outline import outline
from hiddenscope.loading.variants import SCHEMES, Adapted, ModelVariant, Quantised
from hiddenscope.loading.zoo import ZOO

MODEL_HELP = "A zoo name, a Hugging Face id, a folder or a .gguf file."
FIGURES = (".png", ".svg", ".pdf")
RESULTS = (".html", *FIGURES, ".json", ".csv", ".nc")
VIEW = re.compile(r"all|(?:grid|panels|lines|patterns|graph)(?:-[0-9]+)?")


def zoo_names() -> list[str]:
    """Return the names of the zoo, for a shell to complete."""
    return list(ZOO)


@dataclass(frozen=True)
class Shared:
    """The options that every command takes.

    The fields are their names, types and defaults.
    """

    model: Annotated[
        str | None, typer.Option(help=MODEL_HELP, autocompletion=zoo_names)
    ] = None
    device: Annotated[
        str | None,
        typer.Option(help="cpu, cuda, cuda:1, mps, or auto to spread a large model."),
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(help="float32, bfloat16 or float16, in place of the model's own."),
    ] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="The folder of a PEFT adapter on the model; repeatable."),
    ] = None
    quantise: Annotated[
        str | None,
        typer.Option(help=f"Quantise the model's weights: {', '.join(SCHEMES)}."),
    ] = None
    out: Annotated[
        Path | None, typer.Option(help="Write here; the suffix chooses the format.")
    ] = None
    view: Annotated[
        str | None,
        typer.Option(
            help="A view for a figure, such as grid, lines, lines-2, graph, or all."
        ),
    ] = None
    measure: Annotated[
        str | None, typer.Option(help="Which measure of a grid a figure shows.")
    ] = None
    width: Annotated[
        Literal["column", "page"] | None,
        typer.Option(help="How wide a figure is: 3.3 or 6.9 inches."),
    ] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    progress: Annotated[
        bool | None,
        typer.Option("--progress/--quiet", help="Show progress on stderr, or nothing."),
    ] = None
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False

    def load(self) -> "hs.Model":
        """Load the model that the options name, with its adapters."""
        return self.load_other(self.model, adapters=self.adapter, scheme=self.quantise)

    def load_other(
        self,
        name: str | None,
        *,
        device: str | None = None,
        dtype: str | None = None,
        attention: str | None = None,
        adapters: Sequence[str] | None = None,
        scheme: str | None = None,
    ) -> "hs.Model":
        """Load another model, on the same device and in the same dtype by default."""
        device = device or self.device
        dtype = dtype or self.dtype
        source = as_variant(name, adapters, scheme)
        with progress.status(f"Loading {outline(name).described(dtype)}"):
            return hs.load(source, device=device, dtype=dtype, attention=attention)

    @property
    def of_model(self) -> dict[str, Any]:
        """Return which model is named, and how it is loaded."""
        return {
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "adapter": self.adapter or None,
            "quantise": self.quantise,
        }

    @property
    def look(self) -> dict[str, Any]:
        """Return what a figure shows, as `Result.save` takes it."""
        look = {"view": self.view, "measure": self.measure, "width": self.width}
        return {name: value for name, value in look.items() if value is not None}

    def check(self, suffixes: Sequence[str]) -> None:
        """Refuse at once what would fail only after a long run."""
        writes_figure = False
        reason = "no figure is written"
        if self.out is not None:
            problem, suffix = f"Cannot write {str(self.out)!r}", self.out.suffix.lower()
            if not self.out.parent.is_dir():
                raise FileError(
                    problem,
                    f"there is no folder {str(self.out.parent)!r}",
                    "Create it, or give another path.",
                )
            if suffix not in suffixes:
                raise FileError(
                    problem,
                    f"this command writes {' '.join(suffixes)}",
                    "Give the path one of these suffixes.",
                )
            writes_figure = suffix in FIGURES
            reason = f"{str(self.out)!r} is not a figure"
        if self.look and not writes_figure:
            options = ", ".join(f"--{name}" for name in self.look)
            remedy = f"Add --out with {', '.join(FIGURES)}."
            raise FileError(f"Cannot use {options}", reason, remedy)
        if self.view is not None and not VIEW.fullmatch(self.view):
            reason = "a view is a grid, panels, lines, patterns or a graph"
            remedy = (
                "Give lines, for example, lines-2 for the second of a kind, or all."
            )
            raise StatesError(f"No view {self.view!r}", reason, remedy)
        check_place(self.device, self.dtype)
        as_variant(self.model, self.adapter, self.quantise)

    def report_written(self) -> None:
        """Print what --out wrote, and how large it is."""
        if self.out is not None and self.progress is not False:
            size = in_bytes(self.out.stat().st_size)
            echo(visible(f"Wrote {self.out} ({size})."), err=True)


def as_variant(
    name: str | None, adapters: Sequence[str] | None, scheme: str | None
) -> str | ModelVariant | None:
    """Return a model with adapters or quantised weights as `hs.load` takes it.

    >>> as_variant("smollm2", (), "int8")
    Quantised(base='smollm2', scheme='int8')
    """
    source: str | ModelVariant | None = name
    if scheme is not None:
        source = Quantised(name, scheme)
    if adapters:
        # Without a model, the files of an adapter name its base.
        source = Adapted(source, tuple(adapters))
    return source


def shared_parameters(
    suffixes: Sequence[str], without: Collection[str]
) -> Iterator[inspect.Parameter]:
    """Yield the shared options of a command as typer reads them.

    A command has no option that would do nothing, such as the look of a figure where it
    writes none.
    """
    hints = get_type_hints(Shared, include_extras=True)
    unused = set(without)
    if not set(FIGURES) <= set(suffixes):
        unused |= {"view", "measure", "width"}
    if unused & {"model", "dtype"}:
        unused |= {"adapter", "quantise"}
    for field in fields(Shared):
        if field.name not in unused:
            yield inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=field.default,
                annotation=hints[field.name],
            )
