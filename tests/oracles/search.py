"""What `hs.search` should say: every text compared with the query, one by one."""

from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
from scipy.stats import t

import hiddenscope as hs
from tests.oracles import naive

FEWEST = 10


def search(
    source: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected rows and scores of every query."""
    rows, tokens = rows_of(source, asked, result)
    query, nearness = asked["query"], asked.get("nearness", "cosine")
    made: list[Any] = []
    if _is_text(query):
        site = result.facts["site"]
        pool = asked.get("pool") or "mean"
        made = list(naive.vectors(source, query, site, pool))
    else:
        made = list(np.atleast_2d(np.asarray(query, dtype=float)))
    count = min(asked.get("k", 10), len(rows))
    score, number = np.zeros((2, len(made), count))
    for place, vector in enumerate(made):
        nearnesses = [near(vector, row, nearness) for row in rows]
        sign = 1 if nearness == "l2" else -1
        # Equal rows come in the order of the source.
        order = sorted(
            range(len(rows)), key=lambda k: (round(sign * nearnesses[k], 9), k)
        )
        number[place] = order[:count]
        score[place] = [nearnesses[k] for k in order[:count]]
    expected: dict[str, Any] = {"score": score, "number": number}
    if tokens is not None:
        expected["text"] = tokens.text[number.astype(int)]
        expected["position"] = tokens.position[number.astype(int)]
    expected["facts.searched"] = len(rows)
    for place in range(min(5, len(made))):
        expected[f"facts.nearest.{place}.number"] = number[place, 0]
        expected[f"facts.nearest.{place}.score"] = score[place, 0]
    if nearness == "cosine":
        expected["facts.typical"] = mean_cosine(rows)
        if FEWEST <= len(rows) <= 500:
            for place, vector in enumerate(made[:5]):
                nearest = rows[int(number[place, 0])]
                if by_chance(rows, vector, nearest, len(rows), is_row=False):
                    expected[f"facts.nearest.{place}.by_chance"] = 1
    return {name: np.asarray(value) for name, value in expected.items()}


def rows_of(
    source: Any, asked: Mapping[str, Any], result: Any
) -> tuple[np.ndarray, naive.Rows | None]:
    """Return the rows of a model's texts, or of an array; and the tokens if they are."""
    if hasattr(source, "shape"):
        return np.asarray(source, dtype=float), None
    by_token = type(source).__name__ == "EachToken"
    model = source.source if by_token else source
    naive.need_model(model)
    site = result.facts["site"]
    if by_token:
        tokens = naive.rows_at(model, asked["texts"], site)
        return tokens.values, tokens
    pool = asked.get("pool") or "mean"
    truncate = asked.get("truncate", False)
    return naive.vectors(model, asked["texts"], site, pool, truncate), None


def _is_text(query: Any) -> bool:
    if isinstance(query, list | tuple):
        return bool(query) and isinstance(query[0], str)
    return isinstance(query, str) or hasattr(query, "ids")


def near(query: np.ndarray, row: np.ndarray, nearness: str) -> float:
    """Compare a query with a row."""
    if nearness == "l2":
        return float(np.sqrt(((query - row) ** 2).sum()))
    product = float((query * row).sum())
    if nearness == "dot":
        return product
    return product / float(np.sqrt((query**2).sum() * (row**2).sum()))


def mean_cosine(rows: np.ndarray) -> float:
    """Return the mean cosine of two different rows."""
    cosines = []
    for i, x in enumerate(rows):
        cosines += [near(x, y, "cosine") for y in rows[:i]]
    return float(np.mean(cosines)) if cosines else 1.0


def by_chance(
    rows: np.ndarray, query: np.ndarray, nearest: np.ndarray, count: int, is_row: bool
) -> bool:
    """Tell whether chance explains how near the nearest of `count` rows is.

    The cosines of all pairs, without the mean, tell what chance gives: Student's
    distribution with n - 6 degrees of freedom is put through two of their lower
    quantiles, and its largest of `count` is the bar.
    """
    mean = rows.mean(0)
    centred = rows - mean
    cosines = []
    for i, x in enumerate(centred):
        cosines += [near(x, y, "cosine") for y in centred[:i]]
    low, quarter = naive.quantile(cosines, 0.05), naive.quantile(cosines, 0.25)
    normal = NormalDist()
    far, middle = normal.inv_cdf(0.05), normal.inv_cdf(0.25)
    highest = float(t.ppf(0.95 ** (1 / count), len(rows) - 6))
    bar = quarter + (highest - middle) * (quarter - low) / (middle - far)
    if not is_row:
        # A row is part of the mean, a query is not.
        bar += 1 / (len(rows) - 1)
    return near(query - mean, nearest - mean, "cosine") <= bar


def told_apart(rows: np.ndarray) -> float:
    """Return the share of rows whose nearest is nearer than chance explains."""
    centred = rows - rows.mean(0)
    apart = []
    for i, row in enumerate(rows):
        others = [j for j in range(len(rows)) if j != i]
        best = max(others, key=lambda j: near(centred[i], centred[j], "cosine"))
        apart.append(not by_chance(rows, row, rows[best], len(rows) - 1, is_row=True))
    return float(np.mean(apart))
