"""How does an analysis change along checkpoints, sizes or variants of a model?"""

import os
from collections.abc import Mapping
from typing import Any

from hiddenscope import progress
from hiddenscope.arguments import checked
from hiddenscope.results import Result
from hiddenscope.series.arrays import series_dataset
from hiddenscope.series.findings import series_facts
from hiddenscope.series.folder import ResultsFolder
from hiddenscope.series.member import Members, members_of
from hiddenscope.series.question import question_of
from hiddenscope.series.run import Answered, SeriesJob, identify_members


@checked
def series(
    models: Members,
    analysis: str,
    data: Any = None,
    *,
    against: str = "first",
    options: Mapping[str, Any] | None = None,
    to: str | os.PathLike[str] | None = None,
) -> Result:
    """Run one analysis on every model of a series, one model in memory at a time.

    `models` are checkpoints, sizes or variants: anything `hs.load` takes, a model, or
    `hs.Member` with a revision, a name or a place on the axis. `analysis` is
    "profile", "lens", "probe", "project", "compare" or "drift"; the last two compare
    every member with the `against="first"` or the "previous" one, by its states.
    `data` are the texts, or labelled ones, and `options` those of the analysis. With
    the folder `to`, the result of each member is kept there, and the same call again
    resumes. Weights are hashed first: members with the same ones are reported.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> models = [(tiny_model("gpt2", seed=seed), None) for seed in (0, 1, 0)]
    >>> result = hs.series(models, "profile", [[5, 6, 7]])
    >>> dict(result.data["norm_median"].sizes)
    {'member': 3, 'site': 5}
    >>> result.facts["same_weights"][0]["members"]
    ['GPT2LMHeadModel (1)', 'GPT2LMHeadModel (3)']
    """
    members = members_of(models)
    question = question_of(analysis, data, options, against)
    folder = None if to is None else ResultsFolder(to)
    identities = identify_members(members)
    _tell_of_copies([identity.weights for identity in identities])
    answered = SeriesJob(members, identities, question, folder).run()
    answers = [part.answer for part in answered]
    references = [answers[question.reference(place)] for place in range(len(answers))]
    dataset = series_dataset(members, answers, references)
    facts = series_facts(answered, question, dataset)
    return Result("series", dataset, facts, _source(answered))


def _tell_of_copies(weights: list[str]) -> None:
    copies = len(weights) - len(set(weights))
    if copies:
        progress.note(f"{copies} of {len(weights)} members repeat earlier weights.")


def _source(answered: list[Answered]) -> dict[str, Any]:
    """Name the model where all members are revisions of one, else the first."""
    names = list(dict.fromkeys(part.identity.name for part in answered))
    model = names[0]
    others = len(answered) - 1
    if len(names) > 1:
        model = f"{answered[0].member.name} and {others} other"
        if others > 1:
            model += "s"
    return {
        "model": model,
        "members": [part.answer.record.source for part in answered],
    }
