"""The `hiddenscope` command: parse, call, print.

Results go to stdout, progress and errors to stderr. A command exits with 0 when it did what was asked, 1 when it found
drift, 2 when it could not do what was asked, and 130 when it was interrupted.
"""

import inspect
import io
import json
import math
import os
import sys
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer

import hiddenscope as hs
from hiddenscope import errors, progress
from hiddenscope.loading import zoo
from hiddenscope.results import replacing

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(
    name="hiddenscope",
    help="See, measure, store and change every hidden state of a transformer model.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # rich alone would double the time that --help takes
    pretty_exceptions_enable=False,
)


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


def _command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command of its own name; its first parameter, `shared`, becomes the shared options."""
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
            _has_a_folder(shared.out)
            function(shared, **given)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *options]}
    run.__signature__ = inspect.Signature([*own, *options])  # type: ignore[attr-defined]
    app.command()(run)
    return function


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


def _has_a_folder(out: Path | None) -> None:
    """Say at once, and not after a long run, that there is no place to write to."""
    if out is not None and not out.parent.is_dir():
        found = f"there is no folder {str(out.parent)!r}"
        raise errors.FileError(f"Cannot write {str(out)!r}", found, "Make it, or name another.")


def _leave(message: str, code: int) -> NoReturn:
    typer.echo(visible(message, keep="\n"), err=True)
    sys.exit(code)


def visible(text: str, *, keep: str = "") -> str:
    r"""A text as it may reach a terminal: control, bidirectional and other unseen characters are written out.

    >>> print(visible("a\x1b[31mb\u202ec"))
    a\x1b[31mb\u202ec
    """
    return "".join(char if char in keep or _harmless(char) else _written_out(char) for char in text)


def _harmless(char: str) -> bool:
    return unicodedata.category(char) not in {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}


def _written_out(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


WIDE = 400  # for a table that goes to a file or another program, where nothing is gained by folding it


def _console() -> "Console":
    from rich.console import Console

    width = None if sys.stdout.isatty() else WIDE
    return Console(markup=False, emoji=False, highlight=False, width=width)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, text: Collection[int] = (0,)) -> None:
    """Print a table; the columns at the places in `text` hold text, the others numbers."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(Text(visible(name)), justify="left" if place in text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(visible(cell)) for cell in row))
    _console().print(table)


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(hs.__version__)
        raise typer.Exit


@app.callback()
def _hiddenscope(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@_command
def demo(shared: Shared) -> None:
    """Write a page that shows a model's states, and say where it lies.

    The page needs no network: it proves where the states live, paints the size of every state of a sentence, and
    compares that sentence with another.
    """
    page = shared.out or Path("hiddenscope-demo.html")
    model = shared.load()
    proof, norms, difference = hs.anatomy(model), hs.profile(model, SENTENCE), hs.compare(model, SENTENCE, ANOTHER)
    results = [proof, norms, difference]
    hs.story(results, page, title=f"The hidden states of {model.name}", opening=OPENING, closing=CLOSING)
    if shared.json:
        facts = {result.kind: result.facts for result in results}
        _print_json({"page": str(page), "text": SENTENCE, "other text": ANOTHER, **facts})
        return
    typer.echo(visible(f"{proof.summary()}\n\n{norms.summary()}\n", keep="\n"))
    _print_grid(norms)
    typer.echo(visible(f"\n{difference.summary()}", keep="\n"))
    typer.echo(f"\nThe whole story, to look at and to touch: {visible(str(page.resolve()))}\n{NEXT}")


SENTENCE = "The capital of France is Paris."
ANOTHER = "The capital of Germany is Berlin."

OPENING = """
A transformer turns every token into a vector and changes that vector block by block: its hidden states. This page shows
those of one sentence, in a small real model, and how those of another sentence differ from them. It needs no network,
and everything in it was computed when it was made.
"""

CLOSING = """
# Go on

- `hiddenscope profile "Your own text." --out norms.html` makes such a page of your own text; `.pdf` makes a figure.
- `hiddenscope compare "One text." "Another text." --out difference.html` shows where two texts of yours part.
- `hiddenscope anatomy --model gpt2` proves another model; a folder or a `.gguf` file will do too.
- `hs.profile(hs.load(), "Your own text.").data` is an xarray Dataset, to go on with.
"""

NEXT = """
Try next:
  hiddenscope anatomy                                    the whole proof, layer by layer
  hiddenscope profile "Your own text." --out norms.html  the same picture of your own text
  hiddenscope compare "One text." "Another text."        where, and by how much, their states differ
  hiddenscope capture "Your own text." --sites final     its states; --out states.safetensors keeps them
  hiddenscope models                                     other models for a machine that reaches no model hub"""


def _print_grid(profile: "hs.Result") -> None:
    """Some layers of the grid, the first and the last two among them; the shade is the logarithm of the number."""
    norm = profile.data["norm"]
    logs = [math.log(max(value, 1e-9)) for value in norm.to_numpy().ravel().tolist() if math.isfinite(value)]
    low, span = min(logs), (max(logs) - min(logs)) or 1.0

    def cell(value: float) -> str:
        if not math.isfinite(value):
            return ""
        shade = " ░▒▓█"[round(4 * (math.log(max(value, 1e-9)) - low) / span)]
        return f"{shade} {value:,.0f}" if value >= 10 else f"{shade} {value:.1f}"

    rows = [[site, *map(cell, row)] for site, row in zip(norm["site"].values, norm.values.tolist(), strict=True)]
    step = max(1, len(rows) // 8)
    shown = [row for place, row in enumerate(rows) if place % step == 0 or place >= len(rows) - 2]
    _table(["", *norm["string"].values.tolist()], reversed(shown))


@_command
def anatomy(shared: Shared) -> None:
    """Say where a model's states live, and prove it.

    The table gives, for every layer, the largest difference from Hugging Face's own `hidden_states`.
    """
    result = hs.anatomy(shared.load())
    if _handed_out(result, shared):
        return
    typer.echo(visible(result.summary(), keep="\n"))
    columns = [name for name, column in result.data.data_vars.items() if column.dims == ("site",)]
    table = zip(result.data["site"].values, *(result.data[name].values.tolist() for name in columns), strict=True)
    text = [0, *(place for place, name in enumerate(columns, 1) if result.data[name].dtype.kind not in "iuf")]
    _table(["site", *map(str, columns)], ([_shown(cell) for cell in row] for row in table), text=text)


def _handed_out(result: "hs.Result", shared: Shared) -> bool:
    """Save a result where that was asked for, and print it as JSON where that was; whether it was printed."""
    if shared.out:
        result.save(shared.out)
    if shared.json:
        with TemporaryDirectory() as folder:
            result.save(Path(folder, "result.json"))
            typer.echo(Path(folder, "result.json").read_text("utf-8"))
    return shared.json


def _shown(cell: object) -> str:
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


@_command
def capture(
    shared: Shared,
    texts: TextsArgument,
    sites: SitesOption = "layer.*,final",
    generate: Annotated[int, typer.Option(help="Let the model continue by so many tokens, and capture those too.")] = 0,
    truncate: TruncateOption = False,
) -> None:
    """Capture the hidden states of texts.

    Prints what was captured; --out states.safetensors keeps the values.
    """
    texts = _lines_of(texts)
    if generate and len(texts) != 1:
        raise errors.TextError(f"--generate {generate}", f"there are {len(texts)} texts", "Give exactly one.")
    model = shared.load()
    captured: hs.States | hs.Pair
    if generate:
        captured = model.capture_generation(texts[0], max_new_tokens=generate, sites=sites)
    else:
        captured = model.capture(texts, sites, truncate=truncate)
    if shared.out:
        captured.save(shared.out)
    if shared.json:
        _print_json(_described(captured))
    elif not shared.out:
        typer.echo(visible(repr(captured), keep="\n"))


def _described(captured: "hs.States | hs.Pair") -> dict[str, object]:
    if isinstance(captured, hs.Pair):
        return {"encoder": _described(captured.encoder), "decoder": _described(captured.decoder)}
    tokens = captured.tokens
    columns = {name: getattr(tokens, name).tolist() for name in ("text", "positions", "ids", "spans")}
    return {
        "sites": [str(site) for site in captured.sites],
        "shape": list(captured.values.shape),
        "dtype": str(captured.values.dtype).removeprefix("torch."),
        "texts": tokens.texts,
        "tokens": columns | {"strings": tokens.strings},
        "source": captured.source.to_json(),
    }


@_command
def profile(
    shared: Shared,
    texts: TextsArgument,
    sites: SitesOption = "layer.*,final",
    truncate: TruncateOption = False,
) -> None:
    """Measure the size of every state.

    Prints what the norms show; --out norms.html keeps the picture, --out norms.csv the numbers.
    """
    result = hs.profile(shared.load(), _lines_of(texts), sites=sites, truncate=truncate)
    if not _handed_out(result, shared):
        typer.echo(visible(result.summary(), keep="\n"))


@_command
def compare(
    shared: Shared,
    a: Annotated[str, typer.Argument(help="A text.")],
    b: Annotated[str | None, typer.Argument(help="The text that it is compared with.")] = None,
    other: Annotated[str | None, typer.Option(help="Compare the one text in this model too, in place of two.")] = None,
    sites: SitesOption = "layer.*,final",
) -> None:
    """Compare two texts, or one text in two models.

    Prints where they part and where the difference grows; --out difference.html keeps the picture, .csv the numbers.
    """
    model = shared.load()
    second = hs.load(other, device=shared.device, dtype=shared.dtype) if other is not None else None
    result = hs.compare(model, a, b, other=second, sites=sites)
    if not _handed_out(result, shared):
        typer.echo(visible(result.summary(), keep="\n"))


def _lines_of(texts: list[str]) -> list[str]:
    return [line for text in texts for line in ([text] if text != "-" else _lines(sys.stdin.read()))]


def _lines(text: str) -> list[str]:
    """The lines of a file; only a newline ends one, and not all that Unicode calls a line's end."""
    return text.removesuffix("\n").split("\n") if text else []


@_command
def models(shared: Shared) -> None:
    """List the zoo: models that need no model hub.

    They are real trained models that travel in wheels of a package index; what is cached is listed with its size.
    """
    rows = [row for row in zoo.listing() if shared.model in {None, row.name}]
    if not rows:
        names = ", ".join(row.name for row in zoo.listing())
        raise errors.UnknownModel(f"No model {shared.model!r} in the zoo", f"it has {names}", "Name one of those.")
    listing = [{**asdict(row), "path": str(row.path) if row.path else None} for row in rows]
    if shared.out:
        if shared.out.suffix.lower() != ".json":
            raise errors.FileError(
                f"Cannot save a list as {shared.out}", "it is JSON", "Give the path the suffix .json."
            )
        with replacing(shared.out) as fresh:
            fresh.write_text(json.dumps(listing, indent=2) + "\n", "utf-8")
    if shared.json:
        _print_json(listing)
    elif not shared.out:
        cells = ([row.name, row.description, row.licence, _size(row.bytes if row.cached else None)] for row in rows)
        _table(["name", "what it is", "licence", "cached"], cells, text=range(3))


def _size(count: int | None) -> str:
    return "no" if count is None else f"{count / 1e6:,.0f} MB"


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a token is no reason to fail
    app()
