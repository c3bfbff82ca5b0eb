"""Vectors of texts, as the app shows them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Result
from hiddenscope.results.pictures import Grid, Lines, Measure, Series, View
from hiddenscope.results.sentences import counted, distinct, quote

if TYPE_CHECKING:
    from hiddenscope.analyses.embed.facts import EmbedFacts

# More texts than this have no room in a grid.
MOST_TEXTS = 40
CURVES = 4
LONGEST_NAME = 40


def views(result: Result) -> Iterator[View]:
    """Yield the cosine of every two texts, then the components of the first vectors."""
    vectors = result.data["vector"].to_numpy()
    texts = [" ".join(str(text).split()) for text in result.data["string"].to_numpy()]
    names = distinct([text[:LONGEST_NAME] for text in texts])
    model, count = result.source["model"], len(names)
    if count > 1:
        cosines = _cosines(vectors[:MOST_TEXTS])[::-1].astype(np.float32)
        yield Grid(
            f"The cosine of every two texts in {model}",
            names[:MOST_TEXTS][::-1],
            names[:MOST_TEXTS],
            (Measure("cosine", cosines, limits=(-1.0, 1.0), meaning="diverging"),),
            note=_first(MOST_TEXTS, count),
            x_name="text",
            y_name="text",
        )
    curves = zip(names[:CURVES], vectors, strict=False)
    yield Lines(
        f"The components of the vectors in {model}",
        tuple(map(str, range(vectors.shape[1]))),
        tuple(Series(name, vector) for name, vector in curves),
        "component",
        "value",
        note=_first(CURVES, count),
    )


def _first(shown: int, count: int) -> str:
    return f"The first {shown} of {count} texts." if count > shown else ""


def findings(result: Result) -> Iterator[str]:
    """Yield how many vectors there are, how alike they point, and which two are
    nearest.
    """
    facts = cast("EmbedFacts", result.facts)
    yield f"{counted(facts['texts'], 'vector')}, {facts['width']:,} wide."
    if facts["texts"] < 2:
        return
    yield f"The mean cosine of two of them is {facts['mean_cosine']:.2f}."
    if facts["texts"] <= MOST_TEXTS:
        cosines = _cosines(result.data["vector"].to_numpy())
        np.fill_diagonal(cosines, -np.inf)
        first, second = divmod(int(cosines.argmax()), len(cosines))
        strings = result.data["string"].to_numpy()
        yield (
            f"Nearest are {quote(strings[first])} and {quote(strings[second])}, with"
            f" cosine {cosines.max():.2f}."
        )


def _cosines(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    precise = vectors.astype(np.float64)
    norms = np.linalg.norm(precise, axis=1, keepdims=True)
    unit = precise / np.where(norms > 0, norms, 1.0)
    cosines: NDArray[np.float64] = unit @ unit.T
    return cosines
