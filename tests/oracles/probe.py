"""What `hs.probe` should say: scikit-learn's regressions, one for each fold.

Left out: what labels in random orders give (`p`, `control`, `selectivity`, the ends of
intervals), the weights of the mix, which has no minimum of its own, and tests on
other texts.
"""

import hashlib
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
from sklearn.linear_model import LogisticRegression, Ridge

import hiddenscope as hs
from tests.oracles import naive
from tests.oracles.project import labelled

PENALTIES = (1.0, 10.0, 100.0, 1_000.0, 10_000.0)
FIXED_PENALTY = 100.0
FOLDS = 5
LISTED = 20
# A channel with less variance than this share of that of all rows is constant.
CONSTANT = 1e-6


def probe(
    source: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return the expected scores of the probes of texts."""
    naive.need_model(source)
    sites = naive.sites_of(result)
    pool = asked.get("pool") or naive.default_pool(source, sites)
    if str(pool).partition(":")[0] in ("rolling", "softmax", "attention"):
        raise naive.Uncovered("a pooling of scores")
    texts, labels, groups = labelled(asked["data"])
    first = _firsts(texts, labels)
    names = _group_names(texts, groups)
    names = [names[number] for number in first]
    some = [labels[number] for number in first]
    is_number = asked.get("task", "classify") == "regress"
    score = "r2" if is_number else "accuracy"
    targets, classes = _targets(some, is_number)
    folds = assigned_folds(targets, names, is_number, asked.get("seed", 0))
    data: dict[str, list[Any]] = {}
    held_out = []
    least = []
    for site in sites:
        rows = naive.vectors(source, texts, site, pool)[first]
        at_site = _Site(rows, targets, folds, classes)
        held_out.append(at_site.held_out)
        least.append(at_site.losses)
        numbers = {
            score: at_site.score(folds >= 0),
            f"{score}_fold": [
                at_site.score(folds == k) for k in range(folds.max() + 1)
            ],
            "penalty": at_site.penalty,
            "penalty_whole": at_site.penalty_whole,
        }
        for name, value in numbers.items():
            data.setdefault(name, []).append(value)
    expected: dict[str, Any] = {name: np.array(value) for name, value in data.items()}
    chance = 0.0
    if not is_number:
        chance = max(np.bincount(targets)) / len(targets)
        expected["majority"] = chance
    if len(sites) > 1:
        losses = np.array(least).min(0)
        best = np.array(PENALTIES)[losses.argmin(0)]
        if np.isnan(losses).any():
            best = np.full(folds.max() + 1, FIXED_PENALTY)
        expected["mix_penalty"] = best
    facts: dict[str, Any] = {
        "rows": len(first),
        "texts": len(first),
        "groups": len(set(names)),
        "folds": folds.max() + 1,
        "chance": chance,
        f"best.{score}": expected[score].max(),
    }
    if not is_number:
        facts["class_count"] = len(classes)
        for code in range(min(LISTED, len(classes))):
            facts[f"classes.{code}.rows"] = (targets == code).sum()
    if result.facts.get("centre") is not None:
        facts |= _centre(sites, expected["accuracy"], chance)
    expected |= {f"facts.{name}": value for name, value in facts.items()}
    return {name: np.asarray(value) for name, value in expected.items()}


def _firsts(texts: list[Any], labels: list[Any]) -> list[int]:
    """Return the texts that are no copies: of these the first in the alphabet counts."""
    keys = [
        (naive.copy_key(text), str(label))
        for text, label in zip(texts, labels, strict=True)
    ]
    first = []
    for number, key in enumerate(keys):
        same = [k for k, other in enumerate(keys) if other == key]
        if number == min(same, key=lambda k: (str(texts[k]), k)):
            first.append(number)
    return first


def _group_names(texts: list[Any], groups: Any) -> list[str]:
    """Name the group of each text by the first of its keys in the alphabet."""
    part = naive.groups_of(texts, groups)
    keys = [naive.copy_key(text) for text in texts]
    names = []
    for number in part:
        inside = zip(keys, part, strict=True)
        names.append(min(key for key, other in inside if other == number))
    return names


def _targets(labels: list[Any], is_number: bool) -> tuple[np.ndarray, list[Any]]:
    if is_number:
        numbers = np.array([float(label) for label in labels])
        return (numbers - numbers.mean()) / numbers.std(), []
    names = (
        labels
        if all(isinstance(label, int) for label in labels)
        else list(map(str, labels))
    )
    classes = sorted(set(names))
    return np.array([classes.index(name) for name in names]), classes


def assigned_folds(
    targets: np.ndarray, names: list[str], is_number: bool, seed: int
) -> np.ndarray:
    """Deal whole groups to folds, the largest first, each to where it is lacked most.

    Groups of one size come in the order of a hash of the seed and their name.
    """
    codes = np.zeros(len(names), dtype=int) if is_number else targets
    per_class = [
        len({n for n, c in zip(names, codes, strict=True) if c == code})
        for code in set(codes)
    ]
    count = min(FOLDS, *per_class, len(set(names)))
    totals = np.bincount(codes)
    members = {name: np.zeros(len(totals)) for name in names}
    for name, code in zip(names, codes, strict=True):
        members[name][code] += 1

    def order(name: str) -> tuple[float, int]:
        content = f"{seed}:".encode() + name.encode("utf-8", "surrogatepass")
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return -members[name].sum(), int.from_bytes(digest, "big")

    shares = np.zeros((count, len(totals)))
    sizes = np.zeros(count)
    fold_of = {}
    for name in sorted(members, key=order):
        share = members[name] / totals
        growth = [round(float(shares[fold] @ share), 12) for fold in range(count)]
        fold = min(range(count), key=lambda fold: (growth[fold], sizes[fold]))
        shares[fold] += share
        sizes[fold] += members[name].sum()
        fold_of[name] = fold
    return np.array([fold_of[name] for name in names])


class _Site:
    """The probes of one site: a penalty chosen on inner folds, then one fit a fold."""

    def __init__(
        self,
        rows: np.ndarray,
        targets: np.ndarray,
        folds: np.ndarray,
        classes: list[Any],
    ) -> None:
        self.targets, self.classes = targets, classes
        deviation = rows.std(0)
        deviation[deviation <= 1e-6 * np.abs(rows).max()] = np.inf
        self.rows = (rows - rows.mean(0)) / deviation
        count = folds.max() + 1
        self.losses = np.full((len(PENALTIES), count), np.nan)
        self.penalty = [FIXED_PENALTY] * count
        self.penalty_whole = FIXED_PENALTY
        if count > 2:
            self._choose(folds, count)
        outputs = max(1, len(classes)) if len(classes) != 2 else 1
        self.held_out = np.zeros((len(rows), outputs))
        for fold in range(count):
            inside = folds == fold
            scores = self._fit(~inside, self.penalty[fold])
            self.held_out[inside] = scores[inside]

    def _choose(self, folds: np.ndarray, count: int) -> None:
        """Choose the penalty of each fold on the other folds; of equals the largest."""
        sums = np.zeros((len(PENALTIES), count))
        sizes = np.zeros(count)
        for a, b in combinations(range(count), 2):
            train = (folds != a) & (folds != b)
            for number, penalty in enumerate(PENALTIES):
                losses = self._losses(self._fit(train, penalty))
                sums[number, a] += losses[folds == b].sum()
                sums[number, b] += losses[folds == a].sum()
            sizes[a] += (folds == b).sum()
            sizes[b] += (folds == a).sum()
        self.losses = sums / sizes
        self.penalty = [least(column) for column in self.losses.T]
        self.penalty_whole = least(self.losses.mean(1))

    def _fit(self, train: np.ndarray, penalty: float) -> np.ndarray:
        """Return the scores of all rows by a fit of some, standardised on these."""
        inside = self.rows[train]
        variance = inside.var(0)
        deviation = np.sqrt(np.where(variance <= CONSTANT, 1.0, variance))
        scaled = (self.rows - inside.mean(0)) / deviation
        if not self.classes:
            fit = Ridge(alpha=penalty).fit(scaled[train], self.targets[train])
            return fit.predict(scaled)[:, None]
        fit = LogisticRegression(C=1 / penalty, tol=1e-6, max_iter=1000)
        scores = fit.fit(scaled[train], self.targets[train]).decision_function(scaled)
        return scores.reshape(len(scaled), -1)

    def _losses(self, scores: np.ndarray) -> np.ndarray:
        if not self.classes:
            return 0.5 * (scores[:, 0] - self.targets) ** 2
        if scores.shape[1] == 1:
            scores = np.hstack([np.zeros_like(scores), scores])
        own = scores[np.arange(len(scores)), self.targets]
        return np.logaddexp.reduce(scores, 1) - own

    def score(self, rows: np.ndarray) -> float:
        """Return the accuracy, or R², on some rows."""
        scores, targets = self.held_out[rows], self.targets[rows]
        if not self.classes:
            errors = (scores[:, 0] - targets) ** 2
            return 1 - errors.sum() / ((targets - self.targets.mean()) ** 2).sum()
        predicted = scores.argmax(1) if scores.shape[1] > 1 else scores[:, 0] > 0
        return float((predicted == targets).mean())


def least(losses: np.ndarray) -> float:
    """Return the penalty with the least loss, of equals the largest."""
    return max(
        p for p, loss in zip(PENALTIES, losses, strict=True) if loss == losses.min()
    )


def _centre(sites: list[str], accuracy: np.ndarray, chance: float) -> dict[str, float]:
    """Return the centre of gravity of the gains of layers above chance."""
    depths, scores = [], []
    for site, score in zip(sites, accuracy, strict=True):
        layer = site.rpartition("layer.")[2]
        if layer.isdecimal():
            depths.append(int(layer))
            scores.append(score)
    gains = [score - chance for score in scores]
    products = [d * gain for d, gain in zip(depths, gains, strict=True)]
    centre = sum(products) / sum(gains)
    away = [gain * (d - centre) ** 2 for d, gain in zip(depths, gains, strict=True)]
    rises, best = [], chance
    for score in scores:
        rises.append(max(0.0, score - best))
        best = max(best, score)
    clipped = min(max(centre, depths[0]), depths[-1])
    rising = [d * rise for d, rise in zip(depths, rises, strict=True)]
    return {
        "centre.layer": clipped,
        "centre.depth": (clipped - depths[0]) / (depths[-1] - depths[0]),
        "centre.spread": float(np.sqrt(max(0.0, sum(away) / sum(gains)))),
        "centre.middle": float(np.mean(depths)),
        "centre.gained": sum(rising) / sum(rises),
    }
