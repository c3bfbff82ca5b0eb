"""The `hiddenscope` command, made of all commands.

Results go to stdout, progress and errors to stderr. The exit code is 0 for success, 1
when `drift` finds drift, `store verify` damage or `doctor` a problem, 2 for an error,
and 130 when the command was interrupted.
"""

import io
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.catalog import ANALYSES, COMMANDS, GROUPS, Group
from hiddenscope.cli.endings import discard_output, watch
from hiddenscope.cli.terminal import with_stdin


class CommandGroup(NamedTuple):
    """Commands that belong together, with one to try."""

    title: str
    words: tuple[str, ...]
    example: str


# Where a command is written, unless it only asks an analysis.
MODULES = {
    "capture": "corpus",
    "demo": "demo",
    "doctor": "machine",
    "extract": "corpus",
    "fit": "corpus",
    "models": "machine",
    "series": "series",
    "serve": "machine",
    "store": "store",
}
ON_DISK = CommandGroup(
    "States of a whole corpus, on disk",
    ("extract", "store", "fit"),
    "extract cities-complete --to states",
)


def _analysis_group(group: Group, example: str, *others: str) -> CommandGroup:
    words = [analysis.word for analysis in ANALYSES if analysis.group == group]
    on_screen = [word for word in words if word not in ON_DISK.words]
    return CommandGroup(GROUPS[group], (*others, *on_screen), example)


COMMAND_GROUPS = (
    CommandGroup("Begin here", ("demo", "serve", "models", "doctor"), "demo"),
    _analysis_group(
        "describe",
        'profile "The capital of France is Paris." --out profile.html',
        "capture",
    ),
    _analysis_group("explain", 'lens "The capital of France is"'),
    _analysis_group(
        "change",
        'patch "The capital of France is" "The capital of Germany is"'
        ' --answer " Paris" --other " Berlin"',
    ),
    _analysis_group(
        "represent", 'search cities-complete "The CN Tower" --model minilm -k 3'
    ),
    ON_DISK,
)


class _Command(TyperCommand):
    """A command that refuses an option which is given twice.

    typer would drop all values but the last.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            try:
                # A copy, because the parser empties the list that it is given.
                _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            except Exception as error:
                unknown: Any = error
                # None if nothing is similar, and missing in other errors.
                if similar := getattr(unknown, "possibilities", None):
                    # Some letters in common are too little.
                    option = unknown.option_name
                    near = [name for name in similar if name[:4] == option[:4]]
                    if option == "--layer" and not near:
                        near = ["--sites"]
                    unknown.possibilities = near
                raise
            for parameter, count in Counter(order).items():
                is_option = parameter.param_type_name == "option"
                if is_option and not parameter.multiple and count > 1:
                    ctx.fail(
                        f"{parameter.opts[0]} was given {count} times, and it is taken"
                        " once. Leave all but one out."
                    )
        return super().parse_args(ctx, args)


@cache
def _build(word: str) -> Any:
    """Return a command, from the function that its module has for it."""
    module = import_module(f"hiddenscope.cli.{MODULES.get(word, 'analyses')}")
    function = getattr(module, word, None) or module.generated(word)
    single = typer.Typer(rich_markup_mode=None, add_completion=False)
    single.command(cls=_Command)(function)
    return typer.main.get_command(single)


class _Built(Mapping[str, Any]):
    """The commands by their words, each built when it is first needed."""

    def __getitem__(self, word: str) -> Any:
        if word not in COMMANDS:
            raise KeyError(word)
        return _build(word)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Commands(TyperGroup):
    """The commands, listed in groups with an example of each."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # The list needs one sentence of each, and to build them all takes most of the
        # time of `--help`.
        self.commands = _Built()  # type: ignore[assignment]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            ctx.exit()
        # A word may be -.csv, for a table on stdin.
        return super().parse_args(ctx, with_stdin(args))

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        finally:
            # Before typer says which argument is wrong.
            progress.clear()

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group in COMMAND_GROUPS:
            rows = [(word, COMMANDS[word]) for word in group.words]
            with formatter.section(group.title):
                formatter.write_dl(rows)
                indent = " " * formatter.current_indent
                formatter.write(f"\n{indent}$ hiddenscope {group.example}\n")


app = typer.Typer(
    name="hiddenscope",
    cls=_Commands,
    help="See, measure, store and change every hidden state of a transformer model.",
    # rich single would double the time that --help takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(is_set: bool) -> None:
    if is_set:
        typer.echo(hs.__version__)
        raise typer.Exit


@app.callback()
def _hiddenscope(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a token must not stop the command.
            stream.reconfigure(errors="backslashreplace")
    if sys.stdout is None:
        sys.exit("Cannot print: stdout is closed.")
    watch()
    try:
        try:
            app(prog_name="hiddenscope")
        finally:
            # A full disk, or a reader that has gone, shows only now.
            sys.stdout.flush()
    except BrokenPipeError:
        discard_output()
        sys.exit(141)
    except OSError as error:
        if "--debug" in sys.argv:
            raise
        discard_output()
        print(f"Cannot print: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
