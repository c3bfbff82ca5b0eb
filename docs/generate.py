"""Write docs/cli.md from the commands themselves: `make docs`."""

from pathlib import Path

from typer.main import get_command

from hiddenscope.cli import app

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100
HEAD = """# The command line

Results go to stdout, progress and errors to stderr. A command exits with 0 when it did what was asked, 2 when it could
not, and 130 when it was interrupted; 1 is kept for `drift`, when it finds some. Whatever a model's tokens hold, control
and other unseen characters are written out before they reach a terminal.

This page is written by `make docs` from the commands themselves.
"""


def page() -> str:
    """The page as it should be."""
    group = get_command(app)
    top = group.make_context("hiddenscope", [], resilient_parsing=True, max_content_width=WIDTH, terminal_width=WIDTH)
    parts = [HEAD, _block(group.get_help(top))]
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(name, [], parent=top, resilient_parsing=True, terminal_width=WIDTH)
        parts.append(f"## {name}\n\n{_block(command.get_help(context))}")
    return "\n".join(parts)


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(f"Wrote {PAGE.relative_to(PAGE.parent.parent)}")
