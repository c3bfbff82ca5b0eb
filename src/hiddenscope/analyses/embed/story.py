"""The story of vectors of texts, as the app tells it."""

from collections.abc import Iterator

import numpy as np

from hiddenscope.results import Aside, Report, Result, Section, frozen
from hiddenscope.results.pictures import Grid, Lines, Measure, Series
from hiddenscope.results.sentences import counted, distinct, neighbours, quote

# More texts than this have no room in a grid.
MOST_TEXTS = 40
CURVES = 4
LONGEST_NAME = 40


@frozen
class EmbedReport(Report):
    """How many vectors there are, and how alike they point."""

    texts: int
    width: int
    mean_cosine: float
    told_apart: float | None = None


def story(report: EmbedReport, result: Result) -> Iterator[Section]:
    """Yield one section: how alike the vectors are, and their components."""
    vectors = result.data["vector"].to_numpy()
    strings = result.data["string"].to_numpy()
    precise = vectors[:MOST_TEXTS].astype(np.float64)
    norms = np.linalg.norm(precise, axis=1, keepdims=True)
    unit = precise / np.where(norms > 0, norms, 1.0)
    cosines = unit @ unit.T
    findings = [f"{counted(report.texts, 'vector')}, {report.width:,} wide."]
    if report.texts > 1:
        mean = report.mean_cosine
        findings.append(f"The mean cosine of two of them is {mean:.2f}.")
        findings += neighbours(report.told_apart)
    if 1 < report.texts <= MOST_TEXTS:
        others = np.where(np.eye(len(cosines)), -np.inf, cosines)
        first, second = divmod(int(others.argmax()), len(others))
        findings.append(
            f"Nearest are {quote(strings[first])} and {quote(strings[second])}, with"
            f" cosine {others.max():.2f}."
        )
    title = result.title.capitalize()
    texts = [" ".join(str(text).split()) for text in strings]
    names = distinct([text[:LONGEST_NAME] for text in texts])
    model, count = result.source["model"], len(names)
    views = []
    if count > 1:
        every = cosines[::-1].astype(np.float32)
        grid = Grid(
            f"The cosine of every two texts in {model}",
            names[:MOST_TEXTS][::-1],
            names[:MOST_TEXTS],
            (Measure("cosine", every, limits=(-1.0, 1.0), meaning="diverging"),),
            note=_first(MOST_TEXTS, count),
            x_name="text",
            y_name="text",
        )
        views.append(grid)
    curves = zip(names[:CURVES], vectors, strict=False)
    lines = Lines(
        f"The components of the vectors in {model}",
        tuple(map(str, range(vectors.shape[1]))),
        tuple(Series(name, vector) for name, vector in curves),
        "component",
        "value",
        note=_first(CURVES, count),
    )
    yield Section(title, tuple(map(Aside, findings)), (*views, lines))


def _first(shown: int, count: int) -> str:
    return f"The first {shown} of {count} texts." if count > shown else ""
