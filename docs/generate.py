"""Write the generated pages: `make docs`.

docs/cli.md is made from the commands, docs/questions.md, docs/stability.md and the list
of README.md from the catalog, docs/errors.md from the errors, the lists of docs/index.md and of the
sections' pages from docs/site/structure.toml, and the notebooks from their pages. The
code of docs/coming-from/*.md comes from docs/coming_from.
"""

import os
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from textwrap import fill

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
command was interrupted; 1 means that `drift` found drift, `store verify` damage, or `doctor` something to mend. Control
and other invisible characters of tokens are escaped. `make docs` writes this page from the commands.

## Texts and files

| argument | what it is |
|---|---|
| `"A text."` | a text |
| `@corpus.txt`, `@table.csv`, `--texts corpus.txt` | the texts of a file (.txt .jsonl .csv .tsv .parquet) |
| `-`, `-.csv` | the lines of stdin, or a table on stdin |
| `@@name` | the text `@name` |
| `--states states/`, `--states states.safetensors` | in place of a model and texts: a store, or a file of states |

A command that takes texts takes any number of these. `--text COLUMN` names the column of the texts in a table. An argument that is, or looks like, the path of a file
(`corpus.txt`) is an error. Datasets (`project`, `probe`, `graft`) and the source of `search` are files, and need no `@`.

Arguments are checked before a model is loaded and before torch is imported. On a terminal a line on stderr says what is
being done; `--progress` writes each step as a plain line elsewhere, and `--quiet` nothing. Ctrl-C stops a command within
a second. A file that replaces another is written whole or not at all.

## Results

An analysis prints its findings; `--out lens.html` keeps the pictures, `.csv` the numbers, `.nc` all of it. `--out figure.pdf` (`.png`, `.svg`) draws the main view of a result. `--view lines` chooses another, `--view all` takes
every view, in a PDF each on its own page; `--measure` chooses a measure of a grid by its variable, and `--width column`
or `page` makes it 3.3 or 6.9 inches wide, with letters of 8 points.

## Completion

`hiddenscope --install-completion` teaches your shell (bash, zsh, fish, PowerShell) to complete commands, options, zoo
models and shipped datasets with the Tab key; `--show-completion` prints what that is.

## Shared options

Every command takes these:

{}
Several commands take these, and name them in their last line. There, MODEL stands for `--model --device --dtype --adapter
--quantise`, and FIGURE for `--out --view --measure --width`.

{}"""
TOGETHER = {
    "MODEL": "--model --device --dtype --adapter --quantise",
    "FIGURE": "--out --view --measure --width",
}
# A sentence on what is printed and kept.
KEEPS = re.compile(r"Prints |--out [\w-]+\.html keeps|Says what the job")
# An option that this many commands have in the same words is listed once.
SHARED_BY = 2
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
    helps = {}
    for word, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        context = command.make_context(
            word, [], parent=top, resilient_parsing=True, terminal_width=WIDTH
        )
        helps[word] = _sections(command.get_help(context))
    counts: Counter[str] = Counter()
    for above, options in helps.values():
        arguments = above.partition("\nArguments:\n")[2]
        counts.update([*options, *_entries(arguments)])
    # Of an option that commands say in several ways, the most common is shared.
    shared: dict[str, str] = {}
    for option, count in counts.most_common():
        if option.startswith("-") and count >= SHARED_BY:
            shared.setdefault(option.split()[0], option)
    always = {option for option in shared.values() if counts[option] == len(helps)}
    some = set(shared.values()) - always
    parts = [HEAD.format(_table_of(always), _table_of(some))]
    for word, (above, options) in helps.items():
        own = [option for option in options if option not in always | some]
        text = "\n".join([_without_repeats(above, counts), *own])
        listed = " ".join(option.split()[0] for option in options if option in some)
        for name, options_of in TOGETHER.items():
            listed = listed.replace(options_of, name)
        if listed:
            text += f"\nShared: {listed}"
        wrapped = [
            fill(line, WIDTH + 20, subsequent_indent="  ") for line in text.splitlines()
        ]
        block = _block("\n".join(wrapped))
        parts.append(f"## {word}\n\n{block}")
    return "\n".join(parts)


def _without_repeats(text: str, counts: Counter[str]) -> str:
    """Return the usage, the help and the arguments of a command, without what HEAD says
    once of many commands.
    """
    text, _, arguments = text.partition("\nArguments:\n")
    usage, *paragraphs = text.strip().split("\n\n")
    lines = [usage.removeprefix("Usage: ").replace(" [OPTIONS]", "")]
    for paragraph in paragraphs:
        sentences = re.split(r"(?<=[.;?]) ", " ".join(paragraph.split()))
        lines.append(" ".join(s for s in sentences if not KEEPS.match(s)))
    lines += [line for line in _entries(arguments) if counts[line] < SHARED_BY]
    return "\n".join(filter(None, lines))


def _table_of(options: set[str]) -> str:
    """Return options in a block, by their names."""
    return _block("\n".join(sorted(options)))


def _sections(text: str) -> tuple[str, list[str]]:
    """Split the help of a command into what is above its options, and each option."""
    above, _, listed = text.partition("\nOptions:\n")
    return above, _entries(listed)


def _entries(listed: str) -> list[str]:
    """Return the arguments or options of a help, each in a line."""
    entries: list[str] = []
    for line in listed.splitlines():
        words = line.strip()
        if re.match(r"  \S", line):
            # The columns of the names and of the meanings.
            entries.append(re.sub(r" {2,}", "  ", words))
        elif entries and words:
            # A word that was broken at its hyphen is made whole.
            gap = "" if re.search(r"\w-$", entries[-1]) else " "
            entries[-1] += gap + words
    return [re.sub(r" +\[", " [", entry) for entry in entries]


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


def readme() -> str:
    """Return README.md as it should be."""
    lines = "\n"
    for group, title in GROUPS.items():
        links = []
        for analysis in ANALYSES:
            if analysis.group == group:
                links.append(f"[`hs.{analysis.word}`](docs/{analysis.word}.md)")
        lines += f"- {title}: {', '.join(links)}.\n"
    return _filled("../README", "analyses", lines)


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
    return coming_from.filled(_filled(section.word, "pages", table))


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
        "../README.md": readme,
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
