"""Write the generated pages: `make docs`.

docs/cli.md is made from the commands, docs/questions.md and docs/stability.md from the
catalog, docs/errors.md from the errors, the lists of docs/index.md and of the
sections' pages from docs/site/structure.toml, and the notebooks from their pages. The
code of docs/coming-from/*.md comes from docs/coming_from.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from typer.main import get_command

import hiddenscope
from docs import coming_from
from docs.site.notebooks import notebook_text
from docs.site.structure import ROOT, Section, name_groups, sections
from hiddenscope import errors
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
HEADER = "\n| page | question |\n|---|---|\n"


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
    lines = "\n"
    for section in sections():
        lines += f"- [**{section.title}**]({section.word}.md)<br>{section.line}\n"
    return _filled("index", "sections", lines)


def questions() -> str:
    """Return docs/questions.md as it should be."""
    tables = ""
    for group, title in GROUPS.items():
        tables += f"\n## {title}\n{HEADER}"
        for analysis in ANALYSES:
            if analysis.group == group:
                link = f"[{analysis.word}]({analysis.word}.md)"
                tables += f"| {link} | {analysis.question} |\n"
    return _filled("questions", "analyses", tables)


def error_table() -> str:
    """Return docs/errors.md as it should be."""
    table = "\n| error | is also | raised for |\n|---|---|---|\n"
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.Error):
            others = []
            for base in value.__bases__:
                others.append(f"`{base.__name__}`")
            meaning = str(value.__doc__).split("\n")[0]
            table += f"| `{value.__name__}` | {', '.join(others)} | {meaning} |\n"
    return _filled("errors", "errors", table)


def section_page(section: Section) -> str:
    """Return the page of a section as it should be."""
    table = HEADER
    for page in section.pages:
        link = Path(os.path.relpath(page.path, ROOT / "docs")).as_posix()
        table += f"| [{page.title}]({link}) | {page.line} |\n"
    if section.word == "reference":
        table += _names()
    return _filled(section.word, "pages", table)


def _names() -> str:
    """List the public names and what each does, in the groups of the API reference."""
    text = ""
    for group in name_groups():
        text += f"\n## {group.title}\n\n| name | what it does |\n|---|---|\n"
        for name in group.names:
            first = str(getattr(hiddenscope, name).__doc__).strip().split("\n\n")[0]
            # A line break inside a cell would end its row.
            line = " ".join(first.split()).replace("|", "\\|")
            text += f"| `hs.{name}` | {line} |\n"
    return text


def _filled(page: str, mark: str, text: str) -> str:
    """Return a page with a text between the two comments that mark its place."""
    begin, end = (
        f"<!-- {mark}: `make docs` writes them -->\n",
        f"<!-- end of {mark} -->",
    )
    old = (DOCS / f"{page}.md").read_text("utf-8")
    above, found, rest = old.partition(begin)
    assert found and end in rest, f"docs/{page}.md has no place for the {mark}"
    below = rest.partition(end)[2]
    return f"{above}{begin}{text}\n{end}{below}"


def stability() -> str:
    """Return docs/stability.md as it should be."""
    stable = sorted(set(PUBLIC) - set(PROVISIONAL))
    lines = ["", ", ".join(f"`hs.{name}`" for name in stable) + ".", ""]
    lines += ["| provisional | what may change |", "|---|---|"]
    lines += [f"| `hs.{name}` | {why} |" for name, why in sorted(PROVISIONAL.items())]
    table = "\n".join([*lines, "", ""])
    return _filled("stability", "names", table)


def _block(text: str) -> str:
    return f"```text\n{text.strip()}\n```\n"


def _pages() -> dict[str, Callable[[], str]]:
    pages = {
        "cli.md": commands,
        "index.md": index,
        "questions.md": questions,
        "errors.md": error_table,
        "stability.md": stability,
    }
    for section in sections():
        name = f"{section.word}.md"
        if section.pages and name not in pages:
            pages[name] = partial(section_page, section)
    for path in sorted(coming_from.PAGES.glob("*.md")):
        pages[f"{coming_from.PAGES.name}/{path.name}"] = partial(coming_from.page, path)
    for page in sorted((DOCS / "notebooks").glob("*.md")):
        pages[f"notebooks/{page.stem}.ipynb"] = partial(notebook_text, page)
    return pages


PAGES = _pages()

if __name__ == "__main__":
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), "utf-8")
        print(f"Wrote docs/{name}")
