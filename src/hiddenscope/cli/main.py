"""The `hiddenscope` command: parse, call, print. Most commands are generated; the
others have a module each.

Results go to stdout, progress and errors to stderr. The exit code is 0 for success, 1
when `drift` finds drift or `store verify` damage, 2 for an error, and 130 when the
command was interrupted.
"""

import io
import sys
from collections import Counter
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.catalog import ANALYSES, COMMANDS, GROUPS, Group
from hiddenscope.cli import interrupt
from hiddenscope.cli.arguments import with_stdin
from hiddenscope.cli.asking import generated
from hiddenscope.cli.command import Function
from hiddenscope.cli.failures import discard_output


class CommandGroup(NamedTuple):
    """Commands that belong together, with one to try."""

    title: str
    words: tuple[str, ...]
    example: str


ON_DISK = CommandGroup(
    "States of a whole corpus, on disk",
    ("extract", "store"),
    "extract cities-complete --to states",
)


def _of_group(group: Group, example: str, *more: str) -> CommandGroup:
    words = (
        one.word
        for one in ANALYSES
        if one.group == group and one.word not in ON_DISK.words
    )
    return CommandGroup(GROUPS[group], (*more, *words), example)


CONTRAST = (
    '"The capital of France is" "The capital of Germany is" --answer " Paris" --other "'
    ' Berlin"'
)
COMMAND_GROUPS = (
    CommandGroup("Begin here", ("demo", "serve", "models"), "demo"),
    _of_group(
        "describe",
        'profile "The capital of France is Paris." --out profile.html',
        "capture",
    ),
    _of_group("explain", 'lens "The capital of France is"'),
    _of_group("change", f"patch {CONTRAST}"),
    _of_group("represent", 'search cities-complete "The CN Tower" --model minilm -k 3'),
    ON_DISK,
)


class _Command(TyperCommand):
    """A command that refuses an option which is given twice: typer would drop all
    values but the last.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not ctx.resilient_parsing:
            # The parser takes words off its list, and the list is needed once more
            # below.
            _, _, order = self.make_parser(ctx).parse_args(args=list(args))
            self._refuse_repeated(ctx, order)
        return super().parse_args(ctx, args)

    def _refuse_repeated(self, ctx: Any, order: list[Any]) -> None:
        """Refuse every option that comes more than once, and is not meant to."""
        for parameter, count in Counter(order).items():
            once = parameter.param_type_name == "option" and not parameter.multiple
            if once and count > 1:
                ctx.fail(
                    f"{parameter.opts[0]} was given {count} times, and it is taken"
                    " once. Leave all but one out."
                )


class _Commands(TyperGroup):
    """The commands in groups, with an example of each; without a command they are
    listed.
    """

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
            progress.clear()  # before typer says which argument is wrong

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        placed = {word for group in COMMAND_GROUPS for word in group.words}
        others = CommandGroup(
            "More",
            tuple(word for word in self.list_commands(ctx) if word not in placed),
            "",
        )
        for group in (*COMMAND_GROUPS, others):
            commands = {word: self.get_command(ctx, word) for word in group.words}
            rows = [
                (word, found.get_short_help_str(1_000))
                for word, found in commands.items()
                if found is not None
            ]
            if rows:
                with formatter.section(group.title):
                    formatter.write_dl(rows)
                    if group.example:
                        formatter.write(
                            f"\n{'':{formatter.current_indent}}$ hiddenscope"
                            f" {group.example}\n"
                        )


app = typer.Typer(
    name="hiddenscope",
    cls=_Commands,
    help="See, measure, store and change every hidden state of a transformer model.",
    rich_markup_mode=None,  # rich alone would double the time that --help takes
    pretty_exceptions_enable=False,
)


def _command_of(word: str) -> Function:
    """Return the command in `cli/<word>.py`, or else a generated one."""
    name = f"hiddenscope.cli.{word}"
    if find_spec(name) is None:
        return generated(word)
    function: Function = getattr(import_module(name), word)
    return function


for _word in COMMANDS:
    app.command(cls=_Command)(_command_of(_word))


def _version(asked: bool) -> None:
    if asked:
        typer.echo(hs.__version__)
        raise typer.Exit


@app.callback()
def _hiddenscope(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_version,
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
            stream.reconfigure(
                errors="backslashreplace"
            )  # a terminal that cannot show a token must not stop the command
    if sys.stdout is None:
        sys.exit("Cannot print: stdout is closed.")
    interrupt.watch()
    try:
        try:
            app(prog_name="hiddenscope")
        finally:
            sys.stdout.flush()  # a full disk or a reader that has gone shows only now
    except BrokenPipeError:
        discard_output()
        sys.exit(141)
    except OSError as error:
        if "--debug" in sys.argv:
            raise
        discard_output()
        print(f"Cannot print: {error.strerror}.", file=sys.stderr)
        sys.exit(2)
