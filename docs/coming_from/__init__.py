"""Show the same ten tasks in four libraries: docs/coming-from/*.md.

Each `in_<library>.py` is a script with a cell for every task. The pages show these
cells and never a copy that somebody typed; `make docs` puts them there. Those of
hiddenscope stand once, on docs/coming-from.md.
`python -m labs.bench.coming_from` runs all four scripts on the same model, compares what
they compute, and writes agreement.json, which the pages show.
"""

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGES = FOLDER.parent / "coming-from"
RECORD = FOLDER / "agreement.json"

# Every task with its title. Loading comes before the ten.
TASKS = {
    "load": "Load a model",
    "states": "The states of a text at every layer",
    "ragged": "Texts of unequal length",
    "stop": "One layer, and no more computed than it needs",
    "lens": "What each layer would predict",
    "edit": "Set a state to zero and see the logits",
    "patch": "Patch every layer and token",
    "steer": "Steer while the model writes",
    "probe": "A linear probe on labelled texts",
    "store": "Store the states of a corpus, and read them back",
    "port": "Where does a port diverge?",
}
LIBRARIES = {
    "hiddenscope": "hiddenscope",
    "hugging_face": "Plain Hugging Face",
    "transformer_lens": "TransformerLens",
    "nnsight": "nnsight",
}
CELL = re.compile(r"^# %% (\w+)\n", re.MULTILINE)
# A comment that names a cell, and the block below it that shows the cell.
CODE = re.compile(
    r"^<!-- code: (?P<library>\w+) (?P<task>\w+) -->\n"
    r"(?:\*\*[^\n]*\*\*\n\n)?(?:```py\n.*?^```\n)?",
    re.MULTILINE | re.DOTALL,
)
AGREEMENT = re.compile(
    r"^<!-- agreement: (?P<library>\w+) -->\n.*?^<!-- end of agreement -->$",
    re.MULTILINE | re.DOTALL,
)


def script(library: str) -> Path:
    """Return the script with the ten tasks in a library."""
    return FOLDER / f"in_{library}.py"


def cells(library: str) -> dict[str, str]:
    """Return the code of a library for every task."""
    parts = CELL.split(script(library).read_text("utf-8"))
    # The first part is the docstring; then names and cells follow in turn.
    return dict(zip(parts[1::2], map(str.strip, parts[2::2]), strict=True))


def page(path: Path) -> str:
    """Return a page as it should be, with its code and how closely results agree."""
    return filled(path.read_text("utf-8"))


def filled(text: str) -> str:
    """Return the text of a page with code and agreement in their places."""
    return AGREEMENT.sub(_agreement, CODE.sub(_code, text))


def _code(place: re.Match[str]) -> str:
    """Return a comment that names a cell, and below it the library and the cell."""
    library, task = place["library"], place["task"]
    comment = f"<!-- code: {library} {task} -->"
    if task == "all":
        parts = [f"# {TASKS[name]}\n{cell}" for name, cell in cells(library).items()]
        script_text = "\n\n".join(parts)
        return f"{comment}\n```py\n{script_text}\n```\n"
    name = LIBRARIES[library]
    return f"{comment}\n**{name}**\n\n```py\n{cells(library)[task]}\n```\n"


def _agreement(place: re.Match[str]) -> str:
    """Return how far a library is from hiddenscope in every task."""
    library = place["library"]
    record = json.loads(RECORD.read_text("utf-8"))
    outcomes: dict[str, list[str]] = {}
    for row in record["rows"][library]:
        compared = f"{row['compared']} ({row['task']})"
        outcomes.setdefault(row["outcome"], []).append(compared)
    # What is equal comes first, in one sentence for all of it.
    lines = []
    for outcome in sorted(
        outcomes, key=lambda outcome: not outcome.startswith("equal")
    ):
        lines.append(f"- {outcome}: {', '.join(outcomes[outcome])}")
    listed = "\n".join(lines)
    return (
        f"<!-- agreement: {library} -->\n\n{_run(record)}\n\n{listed}\n\n"
        "<!-- end of agreement -->"
    )


def _run(record: dict[str, Any]) -> str:
    """Return a sentence that says when and with which versions a run was made."""
    versions = []
    for name, version in record["versions"].items():
        versions.append(f"{name} {version}")
    return (
        f"Last run on {record['date']}, {record['architecture']}, smollm2 in float32:\n"
        f"{', '.join(versions)}."
    )
