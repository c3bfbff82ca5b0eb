"""What `hs.compare` should say: the formulas of docs/compare.md, token by token.

Which tokens stand in one column is taken from the result: it is a coordinate.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

import hiddenscope as hs
from tests.oracles import naive

MEASURES = ("l2", "relative", "cosine", "mean", "deviation")


def compare(
    model: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected differences of two texts, or of one text in two models."""
    naive.need_model(model)
    other = asked.get("other")
    second = model if other is None else as_model(other)
    sides = asked["a"], asked["a"] if asked.get("b") is None else asked["b"]
    data = result.data
    if "l2" not in data:
        return _cka(model, second, sides, asked, result)
    sites = naive.sites_of(result)
    states = []
    for at, texts in zip((model, second), sides, strict=True):
        targets = asked.get("targets")
        pairs = naive.runs(at, texts, targets, asked.get("truncate", False))
        states.append([each for _, each in pairs])
    cells = {name: np.full(data["l2"].shape, np.nan) for name in MEASURES}
    along = None
    if hasattr(asked.get("sites"), "vectors"):
        along = cells["along"] = np.full(data["l2"].shape, np.nan)
    places = zip(
        data["text"].to_numpy().tolist(),
        data["position"].to_numpy().tolist(),
        data["other_position"].to_numpy().tolist(),
        strict=True,
    )
    for column, (text, position, other_position) in enumerate(places):
        for row, site in enumerate(sites):
            if position < 0 or other_position < 0 or not _in_stack(data, column, site):
                continue
            if site not in states[0][text]:
                raise naive.Uncovered(site)
            x = states[0][text][site][position]
            y = states[1][text][site][other_position]
            numbers = measure(x, y)
            for name in MEASURES:
                cells[name][row, column] = numbers[name]
            if along is not None:
                vector = asked["sites"].vector_at(site, len(x)).numpy()
                along[row, column] = (y - x) @ vector / np.linalg.norm(vector)
    l2 = cells["l2"]
    differ = (np.nan_to_num(l2) > 0).any(0)
    if not differ.any():
        differ = np.isfinite(l2).any(0)
    expected: dict[str, Any] = dict(cells)
    for name in ("l2", "relative"):
        for end, share in (("median", 0.5), ("largest", 1.0)):
            numbers = [naive.quantile(row[differ], share) for row in cells[name]]
            expected[f"{name}_{end}"] = np.array(numbers)
    expected |= _facts(result, sites, cells, expected)
    if "cka" in data:
        expected |= _cka(model, second, sides, asked, result)
    return {name: np.asarray(value) for name, value in expected.items()}


def as_model(other: Any) -> hs.Model:
    """Return a model of whatever names it."""
    return other if isinstance(other, hs.Model) else hs.load(other)


def measure(x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Measure the difference of two states."""
    difference = y - x
    norms = np.linalg.norm(x), np.linalg.norm(y)
    l2 = np.linalg.norm(difference)
    # What differs by rounding is equal: norms round to float32, and experts group
    # tokens.
    if l2 <= 1e-6 * sum(norms):
        difference, l2 = np.zeros_like(x), 0.0
    return {
        "l2": float(l2),
        "relative": float(l2 / (sum(norms) / 2)) if l2 else 0.0,
        "cosine": float(x @ y / (norms[0] * norms[1])),
        "mean": float(difference.mean()),
        "deviation": float(difference.std()),
    }


def _in_stack(data: Any, column: int, site: str) -> bool:
    if "stack" not in data.coords:
        return True
    return site.startswith(str(data["stack"].to_numpy()[column]))


def _cka(
    model: Any, second: Any, sides: Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the CKA of every pair of sites, over the tokens that are in both."""
    data = result.data
    if "position" not in data:
        raise naive.Uncovered("the columns of models of other widths are not kept")
    both = (data["position"].to_numpy() >= 0) & (data["other_position"].to_numpy() >= 0)
    if both.sum() > 1000:
        return {}
    columns = []
    for at, texts, prefix in zip((model, second), sides, ("", "other_"), strict=True):
        runs = [states for _, states in naive.runs(at, texts)]
        rows: dict[str, list[np.ndarray]] = {}
        text_of = data["text"].to_numpy()[both].tolist()
        position_of = data[f"{prefix}position"].to_numpy()[both].tolist()
        for text, position in zip(text_of, position_of, strict=True):
            for site, values in runs[text].items():
                if site != "logits":
                    rows.setdefault(site, []).append(values[position])
        columns.append({site: np.array(values) for site, values in rows.items()})
    names = naive.sites_of(result)
    others = [str(site) for site in data["source_site"].to_numpy()]
    shape = len(names), len(others)
    squares = {"cka": np.full(shape, np.nan), "cka_chance": np.full(shape, np.nan)}
    for i, site in enumerate(names):
        for j, source in enumerate(others):
            x, y = columns[0][site], columns[1][source]
            squares["cka"][i, j] = naive.cka(x, y)
            squares["cka_chance"][i, j] = naive.cka_by_chance(x, y)
    facts = {
        "facts.cka.tokens": both.sum(),
        "facts.cka.sampled_tokens": both.sum(),
        "facts.cka.median": np.nanmedian(squares["cka"]),
        "facts.cka.median_by_chance": np.nanmedian(squares["cka_chance"]),
        "facts.cka.most_alike.cka": np.nanmax(squares["cka"]),
    }
    return squares | {name: np.asarray(value) for name, value in facts.items()}


def _facts(
    result: Any, sites: list[str], cells: dict[str, np.ndarray], expected: Any
) -> dict[str, Any]:
    """Return the facts that are numbers."""
    data = result.data
    both = (data["position"].to_numpy() >= 0) & (data["other_position"].to_numpy() >= 0)
    facts: dict[str, Any] = {
        "facts.texts": len(np.unique(data["text"].to_numpy())),
        "facts.tokens_compared": both.sum(),
        "facts.gaps": (~both).sum(),
    }
    stacks = list(
        dict.fromkeys(site.partition("layer")[0].replace("final", "") for site in sites)
    )
    for number, stack in enumerate(stacks):
        where = f"facts.stacks.{number}"
        rows = [i for i, site in enumerate(sites) if site.startswith(stack)]
        inside = [
            _in_stack(data, column, sites[rows[0]]) for column in range(len(both))
        ]
        columns = np.flatnonzero(inside)
        l2 = cells["l2"][np.ix_(rows, columns)]
        relative = cells["relative"][np.ix_(rows, columns)]
        facts[f"{where}.tokens_compared"] = np.isfinite(l2).any(0).sum()
        facts[f"{where}.tokens_equal"] = (l2 == 0).all(0).sum()
        if not (np.nan_to_num(l2) > 0).any():
            continue
        facts[f"{where}.largest_relative.relative"] = np.nanmax(relative)
        medians = expected["l2_median"][rows]
        layers = [
            k
            for k, i in enumerate(rows)
            if sites[i].rpartition("layer.")[2].isdecimal()
        ]
        rises = [
            medians[b] - medians[a] for a, b in zip(layers, layers[1:], strict=False)
        ]
        if rises and max(rises) > 0:
            k = int(np.argmax(rises))
            facts[f"{where}.largest_jump.from.median"] = medians[layers[k]]
            facts[f"{where}.largest_jump.to.median"] = medians[layers[k + 1]]
        ends_final = sites[rows[-1]].endswith("final") and layers[-1:] == [
            len(rows) - 2
        ]
        if ends_final and len(layers) > 1:
            before, last, final = medians[layers[-2]], medians[-2], medians[-1]
            facts[f"{where}.end.before_last.median"] = before
            facts[f"{where}.end.last.median"] = last
            facts[f"{where}.end.final.median"] = final
            if before > final and last > final:
                share = min(1.0, (last - final) / (before - final))
                facts[f"{where}.end.share_of_drop_by_final_norm"] = share
    return facts
