"""The one list of analyses, and the list of public names: this module imports nothing
of ours.

Everything that must know which analyses there are reads `ANALYSES`: the public names
(`hiddenscope.__init__`), the commands (`cli`), the kinds of results (`views/kinds`),
the index of the docs and the tests that hold them together.

To add an analysis, write `analyses/<word>`, `views/kinds/<word>.py`, `docs/<word>.md`
and `tests/test_<word>.py`, and add one line to `ANALYSES`. To add another public name,
add one line to `NAMES`. The imports that type checkers read in
`hiddenscope/__init__.py` follow these lists; a test prints the lines that are missing
there.

>>> ANALYSIS["lens"].question
'What would each layer predict, if it were the last?'
>>> PUBLIC["lens"], PUBLIC["Site"]
('analyses.lens', 'sites')
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

Group: TypeAlias = Literal["describe", "explain", "change", "represent"]

GROUPS: dict[Group, str] = {
    "describe": "What the states of a model are",
    "explain": "What the states hold and where it comes from",
    "change": "What happens when states are changed",
    "represent": "Texts as vectors",
}


@dataclass(frozen=True)
class Option:
    """How a generated command presents a parameter: its help, and where they differ its
    spellings and its default.
    """

    help: str
    spellings: tuple[str, ...] = ()
    default: str | None = None


@dataclass(frozen=True)
class Analysis:
    """One analysis. Its word names the function, the command, the kind of result, the
    docs page and the tests.

    Its command is generated from the function, with `options` for the parameters that
    `cli/generated.py` does not know; with `own_command` it has a module of its own,
    `cli/<word>.py`. `result` is False where the function returns something else than a
    `Result`; `in_app` is False where the workbench does not ask it. `heading` begins
    the title of a result and is followed by the model's name; without one, that is its
    word and "of". `package` is where its module is.
    """

    word: str
    question: str
    group: Group
    own_command: bool = False
    result: bool = True
    in_app: bool = True
    package: str = "analyses."
    options: Mapping[str, Option] = field(default_factory=dict)
    heading: str = ""

    @property
    def module(self) -> str:
        """Where its function is, below `hiddenscope`."""
        return f"{self.package}{self.word}.{self.word}"


ANALYSES = (
    Analysis(
        "anatomy",
        "Where do the states of this model live, and how is that known?",
        "describe",
    ),
    Analysis(
        "profile",
        "How large is every state, how do states spread, and how alike are layers?",
        "describe",
        options={
            "final_norm": Option(
                "apart: raw layers only; everywhere: each through the final norm;"
                " mixed: as they are."
            ),
            "sample": Option("At most so many tokens for neighbours and CKA."),
        },
    ),
    Analysis(
        "compare",
        "Where, and by how much, do two texts or two models differ?",
        "describe",
        own_command=True,
        heading="comparison in",
    ),
    Analysis(
        "drift",
        "Where do two runs of a model diverge, and which part is at fault?",
        "describe",
        own_command=True,
    ),
    Analysis(
        "project",
        "How do labelled texts lie in every layer, and are their classes apart?",
        "describe",
        own_command=True,
        heading="texts in every layer of",
    ),
    Analysis(
        "lens",
        "What would each layer predict, if it were the last?",
        "explain",
        own_command=True,
        heading="predictions of each layer of",
    ),
    Analysis(
        "visibility",
        "Which states influence a state, and which does it influence?",
        "explain",
        heading="influence of states in",
        options={
            "influence": Option("How influence is measured."),
            "probes": Option("Random vectors that estimate a Frobenius norm."),
            "target": Option("With logit: the token, in place of the true next one."),
        },
    ),
    Analysis(
        "probe",
        "What can a linear probe read from the states of each layer?",
        "explain",
        own_command=True,
        heading="linear probes of",
    ),
    Analysis(
        "patch",
        "Which states carry an answer from one run to another?",
        "change",
        own_command=True,
        heading="activation patching in",
    ),
    Analysis(
        "graft",
        "What do the layers of another model of the same shape do in this one?",
        "change",
        heading="layers of a donor in",
        options={
            "donor": Option("A model of the same shape, from which layers are taken."),
            "data": Option(
                "Prompts, each labelled with its answer: a file, or a shipped dataset."
            ),
            "sites": Option(
                "Take states in place of blocks: *.attn, *.mlp or layer.*."
            ),
            "layers": Option("How many layers in a row come from the donor."),
        },
    ),
    Analysis(
        "steer",
        "Can a direction change what the model writes, and what does that cost?",
        "change",
        own_command=True,
        heading="steering",
    ),
    Analysis(
        "embed",
        "Which vector stands for a text?",
        "represent",
        own_command=True,
        result=False,
        heading="vectors of texts in",
    ),
    Analysis(
        "search",
        "Which texts are nearest to this one?",
        "represent",
        own_command=True,
        heading="search in",
    ),
    Analysis(
        "cluster",
        "Which texts belong together?",
        "represent",
        own_command=True,
        heading="clusters in",
    ),
    Analysis(
        "extract",
        "How are the states of a whole corpus computed and kept?",
        "represent",
        own_command=True,
        result=False,
        in_app=False,
        package="",
    ),
)

ANALYSIS = {analysis.word: analysis for analysis in ANALYSES}

COMMANDS = ("demo", "capture", *ANALYSIS, "store", "models", "serve")
"""The words of all commands, in the order in which they are listed."""

NAMES = {
    "Add": "passes.changes",
    "Adjustment": "analyses.embed.embed",
    "Contrast": "analyses.patch.contrast",
    "Corpus": "extract",
    "Direction": "analyses.steer.direction",
    "Engine": "extract",
    "ExtractJob": "extract",
    "Inputs": "passes.inputs",
    "Lens": "analyses.lens.fitted",
    "Model": "model",
    "Pair": "states",
    "Pass": "passes.record",
    "Pictures": "analyses.project.pictures",
    "Probe": "linear.probe",
    "Project": "passes.changes",
    "Replace": "passes.changes",
    "Result": "results",
    "Scale": "passes.changes",
    "Site": "sites",
    "Source": "states",
    "States": "states",
    "Store": "store",
    "Tokens": "states",
    "each_token": "vectors.rows",
    "edit": "passes.edit",
    "editing": "passes.edit",
    "load": "model",
    "open": "store",
    "read": "texts",
    "record": "passes.record",
    "recording": "passes.recording",
    "resume": "passes.resume",
    "story": "views.render",
}
"""The public names that are no analysis, and the module of each."""

PUBLIC = NAMES | {analysis.word: analysis.module for analysis in ANALYSES}
"""Every public name, and the module that it is imported from when it is first used."""
