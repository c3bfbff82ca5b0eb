"""The one list of analyses, and the list of public names.

Whatever must know which analyses exist reads `ANALYSES`: the public names
(`hiddenscope.__init__`), the commands (`cli`), the forms and requests of the workbench
(`app`), the stories of results (`results/story.py`) and the index of the docs.

To add an analysis, write `analyses/<word>` with its function, `compute.py` and
`story.py`, `docs/<word>.md` and `tests/unit/analyses/test_<word>.py`, and add one entry
to `ANALYSES`. To add another public name, add one line to `NAMES`. The imports that
type checkers read in `hiddenscope/__init__.py` follow these lists; a test prints the
lines that are missing there.

>>> ANALYSIS["lens"].question
'What would each layer predict, if it were the last?'
>>> PUBLIC["lens"], PUBLIC["Site"]
('analyses.lens', 'sites')
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Group: TypeAlias = Literal["describe", "explain", "change", "represent"]

GROUPS: dict[Group, str] = {
    "describe": "What the states of a model are",
    "explain": "What the states hold and where it comes from",
    "change": "What happens when states are changed",
    "represent": "Texts as vectors",
}


@dataclass(frozen=True)
class Analysis:
    """One analysis.

    Its word names the function, the command, the kind of result, the docs page and the
    tests. `result` is False where the function returns something else than a `Result`,
    and `in_app` where the workbench does not offer it. `heading` begins the title of a
    result and is followed by the model's name; without one, that is the word and "of".
    `package` is where its module is. `summary` is what its command says of itself, if
    that is not the question.
    """

    word: str
    question: str
    group: Group
    result: bool = True
    in_app: bool = True
    package: str = "analyses."
    heading: str = ""
    summary: str = ""

    @property
    def module(self) -> str:
        """Return the package that declares it, below `hiddenscope`."""
        return f"{self.package}{self.word}"


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
    ),
    Analysis(
        "compare",
        "Where, and by how much, do two texts or two models differ?",
        "describe",
        heading="comparison in",
    ),
    Analysis(
        "drift",
        "Where do two runs of a model diverge, and which part is at fault?",
        "describe",
        summary="Find where a candidate diverges from --model, whether that is more"
        " than rounding, and which module does it.",
    ),
    Analysis(
        "project",
        "How do labelled texts lie in every layer, and are their classes apart?",
        "describe",
        heading="texts in every layer of",
    ),
    Analysis(
        "series",
        "How does an analysis change along checkpoints, sizes or variants of a model?",
        "describe",
        in_app=False,
        package="",
    ),
    Analysis(
        "lens",
        "What would each layer predict, if it were the last?",
        "explain",
        heading="predictions of each layer of",
        summary="Show what each layer would predict, if it were the last.",
    ),
    Analysis(
        "contributions",
        "Which parts write the answer?",
        "explain",
        heading="parts that write the answer in",
        summary="Show what each head and MLP adds to the logit of an answer.",
    ),
    Analysis(
        "visibility",
        "Which states influence a state, and which does it influence?",
        "explain",
        heading="influence of states in",
    ),
    Analysis(
        "attention",
        "Which tokens does each head read?",
        "explain",
        heading="attention in",
    ),
    Analysis(
        "probe",
        "What can a linear probe read from the states of each layer?",
        "explain",
        heading="linear probes of",
    ),
    Analysis(
        "features",
        "Which features of a dictionary act, and how much of the states do they say?",
        "explain",
        heading="features in",
    ),
    Analysis(
        "examples",
        "Which tokens of a corpus excite a direction?",
        "explain",
        heading="examples of directions in",
    ),
    Analysis(
        "patch",
        "Which states carry an answer from one run to another?",
        "change",
        heading="activation patching in",
        summary="Put each state of one run into another and see how much of the answer"
        " it carries.",
    ),
    Analysis(
        "edges",
        "Which part reads what from which part?",
        "change",
        heading="edges of",
        summary="Show which part reads what from which part, for two prompts.",
    ),
    Analysis(
        "circuit",
        "How few edges carry the answer?",
        "change",
        heading="circuits of",
        summary="Show how few edges carry an answer, beside random ones.",
    ),
    Analysis(
        "variable",
        "Which subspace of a state holds a variable?",
        "change",
        heading="a variable in",
    ),
    Analysis(
        "graft",
        "What do the layers of another model of the same shape do in this one?",
        "change",
        heading="layers of a donor in",
    ),
    Analysis(
        "steer",
        "Can a direction change what the model writes, and what does that cost?",
        "change",
        heading="steering",
        summary="Change what the model answers and writes along the difference of two"
        " sets of texts.",
    ),
    Analysis(
        "embed",
        "Which vector stands for a text?",
        "represent",
        result=False,
        heading="vectors of texts in",
    ),
    Analysis(
        "search",
        "Which texts are nearest to this one?",
        "represent",
        heading="search in",
    ),
    Analysis(
        "cluster",
        "Which texts belong together?",
        "represent",
        heading="clusters in",
    ),
    Analysis(
        "extract",
        "How are the states of a whole corpus computed and kept?",
        "represent",
        result=False,
        in_app=False,
        package="",
    ),
)

ANALYSIS = {analysis.word: analysis for analysis in ANALYSES}

STORIES = {
    analysis.word: f"hiddenscope.{analysis.module}.story"
    for analysis in ANALYSES
    if analysis.word != "extract"
}
"""The module that tells each kind of result; an extraction leaves a store alone.

`@analysis` adds those of other packages, when they are imported. A file names a kind,
never a module.
"""

COMMANDS = {
    "demo": "Write a page that shows a model's hidden states, and print where it is.",
    "capture": "Capture the hidden states of texts.",
    **{analysis.word: analysis.summary or analysis.question for analysis in ANALYSES},
    "store": "Look at the states of a corpus that `extract` wrote.",
    "fit": "Train a sparse dictionary on the states of a corpus.",
    "models": "List the zoo: models that need no model hub.",
    "serve": "Open the workbench: a page in which every question can be asked.",
    "doctor": "Check this installation, and say what to do about whatever is wrong.",
}
"""The words of all commands, each with what its help begins with."""

NAMES = {
    "Adapted": "loading.variants",
    "Add": "passes.changes",
    "Adjustment": "analyses.embed.compute",
    "Contrast": "causes.contrast",
    "Corpus": "extract",
    "Dictionary": "directions.dictionary",
    "Direction": "directions.direction",
    "Encoding": "directions.encoding",
    "Engine": "extract",
    "ExtractJob": "extract",
    "Inputs": "passes.inputs",
    "Interchange": "causes.contrast",
    "Lens": "analyses.lens.fitted",
    "Member": "series.member",
    "Model": "model",
    "Pair": "states",
    "Pass": "passes.record",
    "Pictures": "analyses.project.pictures",
    "Probe": "linear.probe",
    "Project": "passes.changes",
    "Quantised": "loading.variants",
    "Replace": "passes.changes",
    "Result": "results",
    "Sampling": "analyses.visibility.sampling",
    "Scale": "passes.changes",
    "Site": "sites",
    "Source": "states",
    "States": "states",
    "Store": "store",
    "Tokens": "states",
    "Training": "directions.training",
    "each_token": "vectors.vectors",
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
"""Every public name that is not an analysis, and its module."""

PUBLIC = NAMES | {analysis.word: analysis.module for analysis in ANALYSES}
"""Every public name, and the module that it is imported from when it is first used."""

PROVISIONAL = {
    "Adjustment": "how vectors are adjusted for comparison may get other fields",
    "Corpus": "belongs to `ExtractJob`",
    "Encoding": "other dictionaries may need other gates",
    "Engine": "another cluster may need another protocol",
    "ExtractJob": "the parts of a job were named for one engine and Ray alone",
    "Interchange": "belongs to `variable`",
    "Lens": "a fitted lens may be saved in another layout",
    "Member": "belongs to `series`",
    "Pictures": "other methods of projection may need other options",
    "Sampling": "belongs to `visibility`",
    "Training": "how dictionaries are trained is young, and may get other options",
    "cluster": "its choice of the number of clusters is young",
    "circuit": "it is new, and what its report holds may change",
    "edges": "it is new, and what its report holds may change",
    "examples": "it is new, and its choice of examples may change",
    "features": "what it compares with, and on which parts of the texts, may change",
    "graft": "its scores have been tried on few pairs of models",
    "search": "how sources are named may change",
    "series": "it has been tried on few families of models",
    "steer": "its measures of cost have been tried on few models",
    "story": "the parts of a page of several results may get other names",
    "variable": "it is new, and has been tried on few models",
    "visibility": "its averages over many texts are young",
}
"""Public names and commands that may change in any version, and why. Every other name
is stable: docs/stability.md says what that promises, and its table is written from here
by `make docs`.
"""


def is_provisional(name: str) -> bool:
    """Tell whether a public name may change in any version.

    >>> is_provisional("load"), is_provisional("graft")
    (False, True)
    """
    return name in PROVISIONAL
