"""What every command has: the shared options, errors in words, and a result that is saved and printed."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NoReturn, get_type_hints

import typer

import hiddenscope as hs
from hiddenscope import errors, progress
from hiddenscope.cli.terminal import table, visible
from hiddenscope.results import TABLES

RESULTS = (".html", ".png", ".svg", ".pdf", ".json", ".csv", ".nc")

TextsArgument = Annotated[list[str], typer.Argument(help="The texts; - reads one a line from stdin.")]
SitesOption = Annotated[str, typer.Option(help="Which states: layer.3, layer.*, final, *.attn, a comma list.")]
TruncateOption = Annotated[bool, typer.Option(help="Cut a text that is longer than the model's window.")]


@dataclass(frozen=True)
class Shared:
    """The options that every command takes; its fields are their names, types and defaults."""

    model: Annotated[str | None, typer.Option(help="A zoo name, a Hugging Face id, a folder or a .gguf file.")] = None
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, mps, or auto to spread a large model.")] = None
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16, in place of the model's own.")] = None
    out: Annotated[Path | None, typer.Option(help="Write here; the suffix chooses the format.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
    progress: Annotated[
        bool | None, typer.Option("--progress/--quiet", help="Show progress on stderr, or nothing.")
    ] = None
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False

    def load(self) -> "hs.Model":
        """The model that was asked for."""
        return hs.load(self.model, device=self.device, dtype=self.dtype)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A function as a command of its own name; its first parameter, `shared`, becomes the shared options."""
    _, *own = inspect.signature(function, eval_str=True).parameters.values()
    hints = get_type_hints(Shared, include_extras=True)
    options = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
        )
        for field in fields(Shared)
    ]

    def run(**given: Any) -> None:
        shared = Shared(**{field.name: given.pop(field.name) for field in fields(Shared)})
        progress.show(shared.progress)
        with _errors_in_words(shared.debug):
            _can_be_written(shared.out, getattr(function, "suffixes", RESULTS))
            function(shared, **given)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    return run


def writes(*suffixes: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Say what a command writes with --out, where that is something else than a result."""

    def said(function: Callable[..., None]) -> Callable[..., None]:
        function.suffixes = suffixes  # type: ignore[attr-defined]
        return function

    return said


@contextmanager
def _errors_in_words(debug: bool) -> Iterator[None]:
    """Turn what goes wrong into one message on stderr and an exit code, or with `debug` let it through."""
    try:
        yield
    except KeyboardInterrupt:
        _leave("Stopped.", 130)
    except BrokenPipeError:  # whoever read our output has gone, as in `hiddenscope models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except errors.Error as error:
        if debug:
            raise
        if _was_interrupted(error):
            _leave("Stopped.", 130)
        _leave(str(error), 2)
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if debug:
            raise
        if _was_interrupted(error):
            _leave("Stopped.", 130)
        _leave(f"{type(error).__name__}: {error}\nThis was not foreseen: --debug shows where it happened.", 2)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: transformers makes one of an import that was broken off."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _can_be_written(out: Path | None, suffixes: Sequence[str]) -> None:
    """Say at once, and not after a long run, that nothing can be written there."""
    if out is None:
        return
    if not out.parent.is_dir():
        reason = f"there is no folder {str(out.parent)!r}"
        raise errors.FileError(f"Cannot write {str(out)!r}", reason, "Make it, or name another.")
    if out.suffix.lower() not in suffixes:
        reason = f"what is written here is {' '.join(suffixes)}"
        raise errors.FileError(f"Cannot write {str(out)!r}", reason, "Give the path such a suffix.")


def _leave(message: str, code: int) -> NoReturn:
    typer.echo(visible(message, keep="\n"), err=True)
    sys.exit(code)


def handed_out(result: "hs.Result", shared: Shared) -> bool:
    """Save a result where that was asked for, and print it as JSON where that was; whether it was printed."""
    if shared.out:
        result.save(shared.out)
    if shared.json:
        with TemporaryDirectory() as folder:
            result.save(Path(folder, "result.json"))
            typer.echo(Path(folder, "result.json").read_text("utf-8"))
    return shared.json


def show(result: "hs.Result", shared: Shared) -> None:
    """Save a result where that was asked for, and print it: as JSON, or in words."""
    if not handed_out(result, shared):
        typer.echo(visible(result.summary(), keep="\n"))
        for printed in TABLES[result.kind](result) if result.kind in TABLES else ():
            typer.echo(f"\n{visible(printed.title)}" if printed.title else "")
            table(printed.columns, printed.rows, text=printed.text)
