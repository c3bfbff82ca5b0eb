"""What `hs.examples` should say: every direction times every state, sorted.

Which of the other tokens are shown is drawn as the seed says. Left out: the kinds of
tokens that a direction prefers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import hiddenscope as hs
from tests.oracles import naive

AROUND, SPARE, QUARTERS, PER_QUARTER, RANDOM, RANKED, SHOWN = 8, 4, 4, 3, 5, 1024, 8
LOOKED_AT = 4096


def examples(
    source: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected examples of directions in a model's texts."""
    naive.need_model(source)
    texts, k = asked["texts"], asked.get("k", 10)
    threshold = asked.get("threshold", 0.0)
    sites = [str(site) for site in result.data["site"].to_numpy()]
    columns = readings(source, asked["directions"], asked.get("features"), sites)
    numbers, values, share, heats = [], [], [], []
    facts: dict[str, Any] = {}
    for place, (site, act, is_sparse) in enumerate(columns):
        rows = naive.rows_at(source, texts, site)
        left_out = (rows.position == 0) | is_massive(rows.values)
        activation = act(rows.values)
        counted = np.flatnonzero(~left_out)
        share.append(float((activation[counted] > threshold).mean()))
        lowest = threshold if is_sparse else -np.inf
        shown, copies = _shown(rows, activation, counted, k, lowest)
        numbers.append(shown)
        values.append([activation[n] if n >= 0 else np.nan for n in shown])
        if place < SHOWN:
            heats.append(_heat(rows, activation, left_out, shown))
            where = f"facts.listed.{place}"
            facts[f"{where}.share"] = share[-1]
            facts[f"{where}.activation"] = values[-1][0]
            later = rows.position > 0
            if later.sum() > len(counted):
                facts[f"{where}.massive"] = later.sum() - len(counted)
            if copies:
                facts[f"{where}.copies"] = copies
    number = np.array(numbers)
    known = number >= 0
    expected: dict[str, Any] = {
        "activation": np.array(values),
        "number": number,
        "text": np.where(known, rows.text[number], -1),
        "position": np.where(known, rows.position[number], -1),
        "share": np.array(share),
        "heat": np.array(heats),
    }
    every = naive.strings(texts)
    targets = asked.get("targets") or getattr(texts, "targets", None)
    if targets is not None and sites[0].startswith("decoder."):
        # Copies are those of the tokens that are shown.
        every = naive.strings(targets)
    facts |= {
        "facts.texts": len(every),
        "facts.groups": len(
            set(naive.groups_of(every, getattr(texts, "groups", None)))
        ),
        "facts.tokens": (rows.position > 0).sum(),
        "facts.first_left_out": (rows.position == 0).sum(),
        "facts.threshold": threshold,
        "facts.directions": len(columns),
    }
    return {name: np.asarray(value) for name, value in (expected | facts).items()}


def readings(
    model: Any, directions: Any, features: Any, sites: list[str]
) -> list[tuple[str, Callable[[np.ndarray], np.ndarray], bool]]:
    """Return for each direction its site, its activation, and whether it is sparse."""
    items = directions if isinstance(directions, list | tuple) else [directions]
    dictionaries = [item for item in items if hasattr(item, "encoding")]
    others = [item for item in items if not hasattr(item, "encoding")]
    columns: list[Any] = []
    for item in dictionaries:
        numbers = range(len(item)) if features is None else np.ravel(features).tolist()
        is_sparse = item.encoding.gate != "linear"
        for number in numbers:
            columns.append((_feature(item, int(number)), is_sparse))
    by_site: dict[str, list[Any]] = {}
    for item in others:
        for site, act in _linear(model, item, sites):
            by_site.setdefault(site, []).append((act, False))
    for acts in by_site.values():
        columns += acts
    return [(site, *column) for site, column in zip(sites, columns, strict=True)]


def _linear(model: Any, item: Any, sites: list[str]) -> list[tuple[str, Any]]:
    if isinstance(item, str):
        stem, _, number = item.rpartition(".neuron.")
        return [(f"{stem}.neurons", lambda rows, n=int(number): rows[:, n])]
    if hasattr(item, "coef_"):
        weights = np.atleast_2d(item.coef_)
        offsets = np.ravel(item.intercept_)
        pairs = zip(weights, offsets, strict=True)
        return [(item.site, lambda rows, w=w, c=c: rows @ w + c) for w, c in pairs]
    made = []
    for key, vector in item.vectors.items():
        unit = vector.numpy() / np.linalg.norm(vector.numpy())
        pattern = key or item.sites
        if not isinstance(pattern, str) or (pattern not in sites and "*" in pattern):
            raise naive.Uncovered("a direction at several sites")
        found = [site for site in dict.fromkeys(sites) if site.endswith(pattern)]
        for site in found:
            made.append((site, lambda rows, unit=unit: rows @ unit))
    return made


def encode(dictionary: Any, rows: np.ndarray) -> np.ndarray:
    """Return the activation of every feature in every row."""
    encoding = dictionary.encoding
    if encoding.state_norm or encoding.gate not in (
        "linear",
        "relu",
        "threshold",
        "topk",
    ):
        raise naive.Uncovered(f"the gate {encoding.gate}")
    if encoding.centred:
        rows = rows - dictionary.bias.double().numpy()
    if dictionary.encoder is not None:
        rows = rows @ dictionary.encoder.double().numpy()
    sizes = rows + dictionary.encoder_bias.double().numpy()
    if encoding.gate == "linear":
        return sizes
    lengths = np.ones(sizes.shape[1])
    if encoding.by_norm:
        lengths = dictionary.directions.double().norm(dim=1).numpy()
    acting = sizes > 0
    if encoding.gate == "threshold":
        acting &= sizes * lengths > encoding.threshold.double().numpy()
    if encoding.gate == "topk":
        for row, size in enumerate(sizes * lengths):
            acting[row, np.argsort(-size)[encoding.k :]] = False
    return np.where(acting, sizes, 0.0)


def _feature(dictionary: Any, number: int) -> Any:
    return lambda rows: encode(dictionary, rows)[:, number]


def is_massive(states: np.ndarray) -> np.ndarray:
    """Tell which states are over 4 times as long as the median of the first ones."""
    lengths = np.linalg.norm(states, axis=1)
    some = sorted(lengths[:LOOKED_AT])
    return lengths > naive.SINK * some[(len(some) - 1) // 2]


def _around(rows: naive.Rows, number: int) -> list[int]:
    """Return the rows around a token; -1 outside of its text."""
    found = []
    for row in range(number - AROUND, number + AROUND + 1):
        inside = 0 <= row < len(rows.text) and number >= 0
        found.append(row if inside and rows.text[row] == rows.text[number] else -1)
    return found


def _shown(
    rows: naive.Rows, activation: np.ndarray, counted: np.ndarray, k: int, lowest: float
) -> tuple[list[int], int]:
    """Return the tokens that are shown, and how many copies were folded."""
    above = [int(row) for row in counted if activation[row] > lowest]
    later = int((rows.position > 0).sum())
    strongest = sorted(above, key=lambda row: (-activation[row], row))
    strongest = strongest[: min(SPARE * k, later)]
    size = min(k, SPARE * k, later)
    seen, first, copies = set(), [], 0
    for row in strongest:
        around = tuple(rows.ids[n] if n >= 0 else -1 for n in _around(rows, row))
        if around in seen:
            copies += 1
            continue
        seen.add(around)
        first.append(row)
        if len(first) == k:
            break
    shown = first + [-1] * (size - len(first))
    order = np.random.default_rng(1).permutation(len(counted))
    shuffled = [int(row) for row in counted[order]]
    ranked = [place for place, row in enumerate(shuffled) if activation[row] > lowest]
    ranked = ranked[:RANKED]
    ranked.sort(key=lambda place: activation[shuffled[place]])
    for part in np.array_split(np.array(ranked, dtype=int), QUARTERS):
        some = [shuffled[place] for place in sorted(part)[:PER_QUARTER]]
        shown += some + [-1] * (PER_QUARTER - len(some))
    last = shuffled[-RANDOM:]
    return shown + last + [-1] * (RANDOM - len(last)), copies


def _heat(
    rows: naive.Rows, activation: np.ndarray, left_out: np.ndarray, shown: list[int]
) -> list[list[float]]:
    """Return the activations around every example; NaN outside and where left out."""
    heat = []
    for number in shown:
        around = _around(rows, number)
        known = [n >= 0 and not left_out[n] for n in around]
        pairs = zip(around, known, strict=True)
        heat.append([activation[n] if is_known else np.nan for n, is_known in pairs])
    return heat
