"""Write the generated pages: `make docs`.

docs/cli.md is made from the commands, and the lists of docs/index.md and
docs/stability.md from the catalog.
"""

import re
from pathlib import Path

from typer.main import get_command

from hiddenscope.catalog import ANALYSES, GROUPS, PROVISIONAL, PUBLIC
from hiddenscope.cli.main import app

DOCS = Path(__file__).parent
WIDTH = 100
HEAD = """# The command line

Results go to stdout, progress and errors to stderr. The exit code is 0 for success, 2 for an error, and 130 when the
command was interrupted; 1 is kept for `drift` when it finds drift, for `store verify` when it finds damage, and for `doctor`
when something must be mended. Control characters and other invisible characters of tokens are escaped before they reach a
terminal.

## Texts and files

| argument | what it is |
|---|---|
| `"A text."` | a text |
| `@corpus.txt`, `@table.csv`, `--texts corpus.txt` | the texts of a file (.txt .jsonl .csv .tsv .parquet) |
| `-`, `-.csv` | the lines of stdin, or a table on stdin |
| `@@name` | the text `@name` |
| `--states states/`, `--states states.safetensors` | in place of a model and texts: a store, or a file of states |

`--text COLUMN` names the column of the texts in a table. An argument that is the path of a file, or looks like one
(`corpus.txt`), is an error: the states of a file's name are never what was meant. Datasets (`project`, `probe`,
`graft`) and the source of `search` are files anyway, and need no `@`.

Arguments are checked before a model is loaded, and before torch is imported: a layer that is not there, by the model's
config, is refused at once. On a terminal a line on stderr says what is being done and for how long; `--progress` writes
each step as a plain line where stderr is no terminal, and `--quiet` writes nothing. Ctrl-C stops a command within a
second. A file that was to replace another is written whole or not at all.

## Figures

`--out figure.pdf` (`.png`, `.svg`) draws the main view of a result. `--view lines` chooses another, `--view all` takes
every view, in a PDF each on a page of its own; `--measure` chooses a measure of a grid by the name of its variable, and
`--width column` or `page` makes it 3.3 or 6.9 inches wide, with letters of 8 points.

## Completion

`hiddenscope --install-completion` teaches your shell (bash, zsh, fish, PowerShell) to complete commands, options, the
names of the zoo's models and of the shipped datasets with the Tab key; `--show-completion` prints what that is.

This page is written by `make docs` from the commands themselves.
"""
LISTED = re.compile(
    r"(?<=<!-- analyses: `make docs` writes them -->\n).*(?=<!-- end of analyses -->)",
    re.DOTALL,
)
NAMED = re.compile(
    r"(?<=<!-- names: `make docs` writes them -->\n).*(?=<!-- end of names -->)",
    re.DOTALL,
)


def commands() -> str:
    """Return docs/cli.md as it should be."""
    group = get_command(app)
    top = group.make_context(
        "hiddenscope",
        [],
        resilient_parsing=True,
        max_content_width=WIDTH,
        terminal_width=WIDTH,
    )
    parts = [HEAD, _block(group.get_help(top))]
    for word, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(
            word, [], parent=top, resilient_parsing=True, terminal_width=WIDTH
        )
        parts.append(f"## {word}\n\n{_block(command.get_help(context))}")
    return "\n".join(parts)


def index() -> str:
    """Return docs/index.md as it should be."""
    tables = ""
    for group, title in GROUPS.items():
        tables += f"\n{title}:\n\n| page | question |\n|---|---|\n"
        for analysis in ANALYSES:
            if analysis.group == group:
                link = f"[{analysis.word}]({analysis.word}.md)"
                tables += f"| {link} | {analysis.question} |\n"
    page, count = LISTED.subn(tables + "\n", (DOCS / "index.md").read_text("utf-8"))
    assert count == 1, "docs/index.md has no place for the analyses"
    return page


def stability() -> str:
    """Return docs/stability.md as it should be."""
    stable = sorted(set(PUBLIC) - set(PROVISIONAL))
    lines = ["", ", ".join(f"`hs.{name}`" for name in stable) + ".", ""]
    lines += ["| provisional | what may change |", "|---|---|"]
    lines += [f"| `hs.{name}` | {why} |" for name, why in sorted(PROVISIONAL.items())]
    table = "\n".join([*lines, "", ""])
    page, count = NAMED.subn(table, (DOCS / "stability.md").read_text("utf-8"))
    assert count == 1, "docs/stability.md has no place for the names"
    return page


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


PAGES = {"cli.md": commands, "index.md": index, "stability.md": stability}

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
        print(f"Wrote docs/{name}")
