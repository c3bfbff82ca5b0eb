"""Vectors of texts, as the workbench shows them: views and findings."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hiddenscope.results import Result
from hiddenscope.views.drawing import quoted
from hiddenscope.views.values import Grid, Lines, Measure, Series, View

TEXTS, CURVES, SHORT = 40, 4, 40


def views(result: Result) -> Iterator[View]:
    """The cosine of every two texts, then the components of the first vectors."""
    vectors = result.data["vector"].to_numpy()
    names = _names(result)
    model = result.source["model"]
    if len(names) > 1:
        note = f"The first {TEXTS} of {len(names)} texts." if len(names) > TEXTS else ""
        measure = Measure(
            "cosine",
            _cosines(vectors[:TEXTS])[::-1].astype(np.float32),
            limits=(-1.0, 1.0),
            meaning="diverging",
        )
        title = f"The cosine of every two texts in {model}"
        shown = names[:TEXTS]
        yield Grid(
            title,
            shown[::-1],
            shown,
            (measure,),
            note=note,
            x_name="text",
            y_name="text",
        )
    curves = tuple(
        Series(name, vector)
        for name, vector in zip(names[:CURVES], vectors, strict=False)
    )
    note = f"The first {CURVES} of {len(names)} texts." if len(names) > CURVES else ""
    places = tuple(map(str, range(vectors.shape[1])))
    yield Lines(
        f"The components of the vectors in {model}",
        places,
        curves,
        "component",
        "value",
        note=note,
    )


def findings(result: Result) -> Iterator[str]:
    """How many vectors there are, how alike they point, and which two are nearest."""
    facts = result.facts
    yield f"{facts['texts']:,} vectors, each {facts['width']:,} wide."
    if facts["texts"] < 2:
        return
    yield f"The mean cosine of two of them is {facts['mean_cosine']:.2f}."
    if facts["texts"] <= TEXTS:
        cosines = _cosines(result.data["vector"].to_numpy())
        np.fill_diagonal(cosines, -np.inf)
        first, second = divmod(int(cosines.argmax()), len(cosines))
        strings = result.data["string"].to_numpy()
        yield (
            f"Nearest are {quoted(strings[first])} and {quoted(strings[second])}, with"
            f" cosine {cosines.max():.2f}."
        )


def _cosines(vectors: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = vectors.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1, keepdims=True)
    unit = wide / np.where(norms > 0, norms, 1.0)
    cosines: NDArray[np.float64] = unit @ unit.T
    return cosines


def _names(result: Result) -> tuple[str, ...]:
    """Each text, short, and with its number where two would look the same."""
    short = [
        " ".join(str(text).split())[:SHORT] for text in result.data["string"].to_numpy()
    ]
    return tuple(
        f"{name} ({n})" if short.count(name) > 1 else name
        for n, name in enumerate(short)
    )
