"""What every command has: the shared options, errors as messages, and a result that is
saved and printed.
"""

import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, NoReturn, get_type_hints

import typer

import hiddenscope as hs
from hiddenscope import errors, progress
from hiddenscope.cli import interrupt
from hiddenscope.cli.arguments import TextRule, check_place, text_in, texts_in
from hiddenscope.cli.states import check_states
from hiddenscope.cli.terminal import echo, table, visible
from hiddenscope.loading.outline import check_sites, outline
from hiddenscope.loading.zoo import ZOO
from hiddenscope.results import TABLES
from hiddenscope.sites import check_syntax
from hiddenscope.texts import COLUMNS

FIGURES = (".png", ".svg", ".pdf")
RESULTS = (".html", *FIGURES, ".json", ".csv", ".nc")
VIEW = re.compile(r"all|(?:grid|panels|lines)(?:-[0-9]+)?")
KEYWORD = re.compile(
    r"""`?\b(?P<name>[a-z_]+)=(?P<value>'[^']*'|"[^"]*"|-?\w(?:[\w.*]*[\w*])?|)`?"""
)

NEEDS_HEAD = {
    "lens": "read with a lens",
    "patch": "patch",
    "steer": "steer",
    "graft": "graft into",
}

MODEL_HELP = "A zoo name, a Hugging Face id, a folder or a .gguf file."
TEXTS_HELP = "The texts; @FILE reads those of a file, - one from each line of stdin."
TextsArgument = Annotated[list[str] | None, typer.Argument(help=TEXTS_HELP), TextRule()]
TextsOption = Annotated[
    str | None,
    typer.Option("--texts", help="A file of texts: .txt .jsonl .csv .tsv .parquet."),
]
TextOption = Annotated[
    str | None, typer.Option("--text", help="The column of the texts in a file.")
]
TextColumn = Annotated[str | None, typer.Option(help=COLUMNS["text"])]
LabelColumn = Annotated[str | None, typer.Option(help=COLUMNS["label"])]
GroupColumn = Annotated[str | None, typer.Option(help=COLUMNS["group"])]
SitesOption = Annotated[
    str,
    typer.Option(help="Which states: layer.3, layer.*, final, *.attn, a comma list."),
]
TruncateOption = Annotated[
    bool, typer.Option(help="Cut a text that is longer than the model's window.")
]


def zoo_names() -> list[str]:
    """The names of the zoo, for a shell to complete."""
    return list(ZOO)


@dataclass(frozen=True)
class Shared:
    """The options that every command takes; its fields are their names, types and
    defaults.
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
    out: Annotated[
        Path | None, typer.Option(help="Write here; the suffix chooses the format.")
    ] = None
    view: Annotated[
        str | None,
        typer.Option(
            help="Which view a figure shows: grid, lines, lines-2, panels, all."
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
        """The model that the options name."""
        return self.load_other(self.model)

    def load_other(self, name: str | None, **options: str | None) -> "hs.Model":
        """Another model, with the same options except those given."""
        given = {
            "device": self.device,
            "dtype": self.dtype,
            **{key: value for key, value in options.items() if value},
        }
        with progress.status(f"Loading {outline(name).described(given['dtype'])}"):
            return hs.load(name, **given)  # type: ignore[arg-type]

    @property
    def of_model(self) -> dict[str, Any]:
        """Which model, and how it is loaded."""
        return {"model": self.model, "device": self.device, "dtype": self.dtype}

    @property
    def look(self) -> dict[str, Any]:
        """What a figure shows, as `Result.save` takes it."""
        given = {"view": self.view, "measure": self.measure, "width": self.width}
        return {name: value for name, value in given.items() if value is not None}

    def say_written(self) -> None:
        """Tell what --out wrote, and how large it is."""
        if self.out is not None and self.progress is not False:
            echo(
                visible(f"Wrote {self.out} ({in_bytes(self.out.stat().st_size)})."),
                err=True,
            )


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A function as the command of the same name; its first parameter, `shared`,
    becomes the shared options.
    """
    _, *declared = inspect.signature(function, eval_str=True).parameters.values()
    rules = {
        parameter.name: rule for parameter in declared if (rule := _rule(parameter))
    }
    parameters = [*declared, *_file_options(declared, rules)]
    hints = get_type_hints(Shared, include_extras=True)
    suffixes: Sequence[str] = getattr(function, "suffixes", RESULTS)
    unused = {
        *getattr(function, "unused", ()),
        *(() if set(FIGURES) <= set(suffixes) else ("view", "measure", "width")),
    }
    options = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=hints[field.name],
        )
        for field in fields(Shared)
        if field.name not in unused
    ]

    def run(**values: Any) -> None:
        shared = Shared(**{option.name: values.pop(option.name) for option in options})
        progress.show(shared.progress)
        with _errors_as_messages(
            shared.debug, {option.name for option in options} | set(values)
        ):
            _check_writable(shared.out, suffixes)
            _check_look(shared)
            check_place(shared.device, shared.dtype)
            with progress.status(f"Running {function.__name__}"):
                understood = _understood(values, rules)
                _check_outline(function.__name__, shared, understood)
                function(shared, **understood)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__annotations__ = {
        parameter.name: parameter.annotation for parameter in [*parameters, *options]
    }
    run.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]
    return run


def _rule(parameter: inspect.Parameter) -> TextRule | None:
    """How the words of an argument are read as texts; None for any other parameter."""
    return next(
        (
            part
            for part in getattr(parameter.annotation, "__metadata__", ())
            if isinstance(part, TextRule)
        ),
        None,
    )


def _file_options(
    declared: Sequence[inspect.Parameter], rules: Mapping[str, TextRule]
) -> Iterator[inspect.Parameter]:
    """`--texts FILE` and `--text COLUMN`, for a command that takes many texts and has
    no such options of its own.
    """
    if any(rule.many and rule.file_option for rule in rules.values()):
        for name, annotation in (
            ("texts_file", TextsOption),
            ("text_column", TextOption),
        ):
            yield inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=annotation,
            )


def _understood(
    values: dict[str, Any], rules: Mapping[str, TextRule]
) -> dict[str, Any]:
    """The values with texts in place of words, and all checked that can be checked
    without a model.
    """
    for name in ("sites", "site"):
        if values.get(name) is not None:
            check_syntax(values[name])
    given = (values.pop("texts_file", None), values.pop("text_column", None))
    for name, rule in rules.items():
        if not rule.many:
            values[name] = None if values[name] is None else text_in(values[name])
        else:
            file, column = given if rule.file_option else (None, None)
            needed = replace(
                rule, required=rule.required and values.get("states") is None
            )
            values[name] = texts_in(values[name] or (), file, column, needed)
            if (
                values.get("states") is not None
                and values[name]
                and not rule.beside_states
            ):
                remedy = "Leave one of the two out."
                raise errors.TextError(
                    "Cannot use texts with --states",
                    "the states have their own texts",
                    remedy,
                )
    return values


def _check_outline(word: str, shared: Shared, values: Mapping[str, Any]) -> None:
    """Refuse at once what the model's config shows to be impossible, or what cannot be
    used with states.
    """
    models = values.get("models") or [shared.model]
    if values.get("states") is not None:
        queries = word == "search"  # which the model reads
        of_model = {**shared.of_model, "model": models[0]}
        check_states(
            values["states"], {} if queries else of_model, {} if queries else values
        )
        return
    for model in models:
        _check_model(word, model, values)


def _check_model(word: str, model: str | None, values: Mapping[str, Any]) -> None:
    """Refuse what the config of one model shows to be impossible."""
    if model is not None and model.endswith(".safetensors"):
        return
    known = outline(model)
    for name in ("sites", "site"):
        if isinstance(values.get(name), str):
            check_sites(known, values[name])
    if word in NEEDS_HEAD and known.headless:
        reason = "it has no head, a module that makes logits"
        raise errors.PassError(
            f"Cannot {NEEDS_HEAD[word]} {known.name}",
            reason,
            "Give a language model: --model NAME.",
        )


def writes(
    *suffixes: str, unused: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Declare the suffixes of --out, for a command that writes something else than a
    result.

    `unused` are shared options that would do nothing here: the command does not have
    them.
    """

    def declared(function: Callable[..., None]) -> Callable[..., None]:
        function.suffixes = suffixes  # type: ignore[attr-defined]
        function.unused = unused  # type: ignore[attr-defined]
        return function

    return declared


@contextmanager
def _errors_as_messages(debug: bool, options: Collection[str] = ()) -> Iterator[None]:
    """Turn an error into one message on stderr and an exit code, or with `debug` let it
    through.

    What an error says for Python is said for the command line, where the command has
    the option.
    """
    try:
        with interrupt.guarded():
            yield
    except KeyboardInterrupt:
        interrupt.leave()
    except (
        BrokenPipeError
        # Whoever read our output has gone, as in `hiddenscope models | head -1`.
    ):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except errors.Error as error:
        if debug:
            raise
        if _was_interrupted(error):
            interrupt.leave()
        _leave(in_options(str(error), options), 2)
    except (typer.Exit, typer.Abort):
        raise
    except OSError as error:
        if debug:
            raise
        _leave(f"Cannot read or write: {error.strerror or error}.", 2)
    except Exception as error:
        if debug:
            raise
        if _was_interrupted(error):
            interrupt.leave()
        _leave(
            f"{type(error).__name__}: {error}\nThis is unexpected: --debug shows where"
            " it happened.",
            2,
        )


def in_options(message: str, options: Collection[str]) -> str:
    """A message with the options of a command in place of Python's keyword arguments.

    >>> in_options("Split it, or give truncate=True. Name the column: text='...', task='x'.", {"truncate", "text"})
    "Split it, or give --truncate. Name the column: --text '...', task='x'."
    """

    def spelled(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        if name not in options:
            return match[0]
        option = f"--{'no-' if value == 'False' else ''}{name.replace('_', '-')}"
        return option if value in ("", "True", "False") else f"{option} {value}"

    return KEYWORD.sub(spelled, message)


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: transformers turns an interrupted import into
    an error of its own.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


def _check_writable(out: Path | None, suffixes: Sequence[str]) -> None:
    """Refuse a path that cannot be written at once, and not after a long run."""
    if out is None:
        return
    if not out.parent.is_dir():
        reason = f"there is no folder {str(out.parent)!r}"
        raise errors.FileError(
            f"Cannot write {str(out)!r}", reason, "Create it, or give another path."
        )
    if out.suffix.lower() not in suffixes:
        reason = f"this command writes {' '.join(suffixes)}"
        raise errors.FileError(
            f"Cannot write {str(out)!r}", reason, "Give the path one of these suffixes."
        )


def _check_look(shared: Shared) -> None:
    """Refuse the options of a figure where none is written, and a view that no result
    has.
    """
    if shared.look and (shared.out is None or shared.out.suffix.lower() not in FIGURES):
        reason = (
            "no figure is written"
            if shared.out is None
            else f"{str(shared.out)!r} is not a figure"
        )
        options = ", ".join(f"--{name}" for name in shared.look)
        raise errors.FileError(
            f"Cannot use {options}", reason, f"Add --out with {', '.join(FIGURES)}."
        )
    if shared.view is not None and not VIEW.fullmatch(shared.view):
        remedy = "Give grid, panels or lines, lines-2 for the second of a kind, or all."
        raise errors.StatesError(
            f"No view {shared.view!r}", "a view is a grid, panels or lines", remedy
        )


def in_bytes(count: int) -> str:
    """A size as people write it.

    >>> in_bytes(912), in_bytes(249_300), in_bytes(5_400_000)
    ('912 bytes', '249 kB', '5.4 MB')
    """
    for size, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= size:
            return (
                f"{count / size:.3g} {unit}"
                if count < 999.5 * size
                else f"{count / size:,.0f} {unit}"
            )
    return f"{count} bytes"


def _leave(message: str, code: int) -> NoReturn:
    echo(visible(message, keep="\n"), err=True)
    sys.exit(code)


def show(result: "hs.Result", shared: Shared) -> None:
    """Save a result with --out, and print it: as JSON, or its findings and tables.

    Where it cannot be saved it is printed all the same: it may have taken long.
    """
    try:
        if shared.out:
            result.save(shared.out, **shared.look)
    finally:
        _print(result, shared.json)
    shared.say_written()


def _print(result: "hs.Result", as_json: bool) -> None:
    if as_json:
        with TemporaryDirectory() as folder:
            result.save(Path(folder, "result.json"))
            echo(Path(folder, "result.json").read_text("utf-8"))
        return
    echo(visible(result.summary(), keep="\n"))
    for printed in TABLES[result.kind](result) if result.kind in TABLES else ():
        echo(f"\n{visible(printed.title)}" if printed.title else "")
        table(printed.columns, printed.rows, text=printed.text)
