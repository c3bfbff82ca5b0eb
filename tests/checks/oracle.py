"""The law of oracles: each number is what a naive implementation gives."""

from hiddenscope.testing import Entry, Subject
from hiddenscope.testing.checks.law import law, none_of, only_if, usual_answer
from tests.oracles import ORACLES, NoTable, Uncovered, disagreements


@law()
def check_the_oracle_agrees(entry: Entry, subject: Subject) -> None:
    """The numbers are those of plain hooks, loops and float64."""
    only_if(entry.word in ORACLES, "it has no oracle")
    answer = usual_answer(entry, subject)
    arguments = entry.arguments(subject)
    model = arguments.pop(entry.model_name)
    try:
        problems = disagreements(entry.word, model, arguments, answer)
    except (NoTable, Uncovered) as reason:
        only_if(False, str(reason))
    else:
        none_of(problems, "the oracle")
