"""What can be read off the states of every layer, by a linear probe?"""

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from hiddenscope import progress
from hiddenscope.analyses.probe.labels import Given, Ints, control, given
from hiddenscope.errors import StatesError
from hiddenscope.linear import (
    CrossValidated,
    Learner,
    Problems,
    assign_folds,
    cross_validate,
    logistic,
    mix,
    ridge,
    standardised,
)
from hiddenscope.linear.crossvalidation import MIDDLE, PENALTIES
from hiddenscope.linear.intervals import Interval, accuracy_interval, r2_interval
from hiddenscope.linear.probe import TASKS, Task, unscaled
from hiddenscope.model import Model
from hiddenscope.results import Result
from hiddenscope.sites import summarise
from hiddenscope.states import Pair, Readable
from hiddenscope.vectors import Token

if TYPE_CHECKING:
    import xarray

FOLDS = 5
MOST_CONTROLS, ROWS_OF_CONTROLS = 10, 1_000  # few rows make one control uncertain, so several are taken
MANY = 20  # classes that facts list one by one
SCORE = {"classify": "accuracy", "regress": "r2"}


def probe(
    source: Model | Readable | Pair,
    data: Any,
    *,
    task: Task = "classify",
    sites: Any = "layer.*,final",
    token: Token = "last",
    text: str | None = None,
    label: str | None = None,
    seed: int = 0,
    truncate: bool = False,
) -> Result:
    """A linear probe of every layer: how well a label is read off its states, beside a control and chance.

    With a model, `data` is a dataset: a shipped name, a path, a frame, a Hugging Face dataset, or `(texts, labels)`;
    with states it is the labels. With `token="each"` there is a label a token, and "position", "word-start" and
    "previous-token" are ready. Probes are tested on folds that they did not see, standardised and regularised
    without them; `hs.Probe.of(result, site)` is the one that is fitted to all rows.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[k, k + 1, 5 + k % 2] for k in range(10, 30)]
    >>> result = hs.probe(hs.load((tiny_model("gpt2"), None)), (texts, [k % 2 for k in range(20)]))
    >>> result.facts["best"]["accuracy"], hs.Probe.of(result, "layer.0").coef_.shape
    (1.0, (1, 64))
    """
    if task not in TASKS:
        raise StatesError(f"No task {str(task)[:40]!r}", "there are two", "Ask for classify or regress.")
    found = given(source, data, task, sites, token, text, label, truncate)
    aim = _classes(found) if task == "classify" else _numbers(found)
    setting = _setting(found, aim, seed)
    data_, facts = _probed(found, aim, setting)
    return Result("probe", data_, facts, found.vectors.source)


@dataclass(frozen=True, eq=False)
class _Aim:
    """What is to be told: numbers of classes or standardised values, how it is learnt, and what they stand for."""

    targets: torch.Tensor
    learner: Learner
    classes: NDArray[Any] | None
    level: float = 0.0
    scale: float = 1.0

    @property
    def score(self) -> str:
        return SCORE["regress" if self.classes is None else "classify"]


@dataclass(frozen=True, eq=False)
class _Setting:
    """Which rows are tested together, which belong together, and all sets of targets, the true ones first."""

    folds: Ints
    groups: Ints
    targets: torch.Tensor
    seed: int

    @property
    def count(self) -> int:
        return int(self.folds.max()) + 1


def _classes(found: Given) -> _Aim:
    whole = all(isinstance(one, int | np.integer) for one in found.labels)
    named = found.labels if whole else [str(one) for one in found.labels]
    classes, targets = np.unique(np.array(named, dtype=None if whole else object), return_inverse=True)
    problem = f"A probe of {len(named):,} rows of {found.name}"
    if len(classes) < 2:
        raise StatesError(problem, f"they are all of one class, {str(named[0])[:40]!r}", "Give labels of at least two.")
    texts = {one: set() for one in range(len(classes))}  # type: dict[int, set[str]]
    for one, group in zip(targets.tolist(), found.groups, strict=True):
        texts[one].add(group)
    alone = [one for one, some in texts.items() if len(some) < 2]
    if alone:
        if len(classes) > len(named) / 2:
            found_ = f"there are {len(classes):,} classes, and {len(alone):,} of them have one text only"
            raise StatesError(problem, found_, 'Give fewer classes; for numbers ask for task="regress".')
        found_ = f"the class {str(classes[alone[0]])[:40]!r} is found in one text only"
        raise StatesError(problem, found_, "It cannot be both learnt and tested: give it more texts, or leave it out.")
    return _Aim(torch.from_numpy(targets.reshape(-1)), logistic(len(classes)), classes)


def _numbers(found: Given) -> _Aim:
    problem = f"A regression of {len(found.labels):,} rows of {found.name}"
    values = []
    for row, one in enumerate(found.labels):
        try:
            value = float(one)
        except (TypeError, ValueError):
            value = np.nan
        if not np.isfinite(value):
            said = f"label {row} is {str(one)[:40]!r}, which is no finite number"
            raise StatesError(problem, said, 'Give numbers, or ask for task="classify".')
        values.append(value)
    targets = np.array(values)
    if np.ptp(targets) == 0:
        raise StatesError(problem, f"they are all {targets[0]:g}", "Give numbers that differ.")
    level, scale = float(targets.mean()), float(targets.std())
    return _Aim(torch.from_numpy((targets - level) / scale), ridge(), None, level, scale)


def _setting(found: Given, aim: _Aim, seed: int) -> _Setting:
    names, groups = np.unique(np.array(found.groups, dtype=object), return_inverse=True)
    kinds = aim.targets.numpy() if aim.classes is not None else np.zeros(len(groups), dtype=np.int64)
    texts = [len(np.unique(groups[kinds == kind])) for kind in np.unique(kinds)]
    if len(names) < 2:
        problem = f"A probe of {len(found.labels):,} rows of {found.name}"
        raise StatesError(
            problem, "they are all of one text", "No text is both learnt from and tested on: give several."
        )
    folds = assign_folds(kinds, found.groups, min(FOLDS, *texts, len(names)), seed)
    controls = max(1, min(MOST_CONTROLS, ROWS_OF_CONTROLS // len(groups)))
    sets = [control(aim.targets, found.groups, folds, found.types, seed + 1 + k) for k in range(controls)]
    return _Setting(folds, groups.reshape(-1), torch.stack([aim.targets, *sets]), seed)


def _probed(found: Given, aim: _Aim, setting: _Setting) -> tuple["xarray.Dataset", dict[str, Any]]:
    values, sites = found.vectors.values, found.vectors.sites
    whole: list[CrossValidated] = []
    columns: list[dict[str, Any]] = []
    own = torch.empty(values.shape, dtype=values.dtype)
    equal = []
    with progress.track("Probing", total=len(sites) + 1) as advance:
        for place, states in enumerate(values):
            own[place], mean, deviation = standardised(states)
            if not bool(own[place].any()):
                equal.append(sites[place])
            made = cross_validate(own[place], setting.targets, setting.folds, aim.learner)
            whole.append(made._replace(scores=made.scores[:1]))
            columns.append(_column(made, mean, deviation, aim, setting, len(sites)))
            advance(1)
        mixed = _mixed(own, whole, aim, setting) if len(sites) > 1 else {}
        advance(1)
    data = _data(found, aim, columns, mixed)
    return data, _facts(found, aim, setting, data, columns, mixed) | _remarks(found, equal, whole)


def _column(
    made: CrossValidated, mean: torch.Tensor, deviation: torch.Tensor, aim: _Aim, setting: _Setting, together: int
) -> dict[str, Any]:
    """What goes into the result for one site."""
    scores = [_score(one, aim, setting, number, together) for number, one in enumerate(made.scores)]
    coef, intercept = unscaled(made.whole.coef[..., 0], made.whole.intercept[:, 0], mean, deviation)
    if aim.classes is None:
        coef, intercept = coef[0] * aim.scale, intercept[0] * aim.scale + aim.level
    elif len(aim.classes) == 2:
        coef, intercept = np.concatenate([-coef / 2, coef / 2]), np.concatenate([-intercept / 2, intercept / 2])
    true, controls = scores[0], [one.score for one in scores[1:]]
    return {
        "interval": true,
        "control": float(np.mean(controls)),
        "folds": _by_fold(made.scores[0], aim, setting),
        "penalty": made.penalty.numpy(),
        "penalty_whole": made.whole_penalty,
        "coef": coef,
        "intercept": intercept,
    }


def _score(scores: torch.Tensor, aim: _Aim, setting: _Setting, number: int, together: int) -> Interval:
    targets = setting.targets[number]
    if aim.classes is not None:
        return accuracy_interval((_predicted(scores) == targets).numpy(), setting.groups, together)
    error, base = _errors(scores, targets, setting.folds)
    return r2_interval(error, base, setting.groups, together, setting.seed)


def _by_fold(scores: torch.Tensor, aim: _Aim, setting: _Setting) -> NDArray[np.float64]:
    targets = setting.targets[0]
    if aim.classes is not None:
        right = (_predicted(scores) == targets).numpy()
        return np.array([right[setting.folds == fold].mean() for fold in range(setting.count)])
    error, base = _errors(scores, targets, setting.folds)
    return np.array(
        [1 - error[setting.folds == k].sum() / base[setting.folds == k].sum() for k in range(setting.count)]
    )


def _predicted(scores: torch.Tensor) -> torch.Tensor:
    return scores.argmax(1) if scores.shape[1] > 1 else (scores[:, 0] > 0).long()


def _errors(scores: torch.Tensor, targets: torch.Tensor, folds: Ints) -> tuple[NDArray[Any], NDArray[Any]]:
    """Squared errors, and those of a probe that knows the mean of the other folds and no more."""
    true = targets.numpy()
    means = np.array([true[folds != fold].mean() for fold in range(int(folds.max()) + 1)])
    return (scores[:, 0].double().numpy() - true) ** 2, (means[folds] - true) ** 2


def _mixed(own: torch.Tensor, whole: list[CrossValidated], aim: _Aim, setting: _Setting) -> dict[str, Any]:
    """A mix of all sites, in the same folds, with the penalties of the site that does best on inner folds."""
    lost = torch.stack([one.inner_loss for one in whole])
    grid = torch.tensor(PENALTIES, dtype=torch.float64)
    none = bool(lost.isnan().any())
    each = torch.full((setting.count,), MIDDLE, dtype=torch.float64) if none else grid[lost.amin(0).argmin(0)]
    last = MIDDLE if none else float(grid[lost.mean(2).amin(0).argmin()])
    train = torch.from_numpy(setting.folds[None] != np.arange(setting.count)[:, None])
    targets = aim.targets if aim.classes is not None else aim.targets.to(own)
    problems = Problems(
        torch.cat([train, torch.ones(1, len(setting.folds), dtype=torch.bool)]),
        targets.expand(setting.count + 1, -1),
        torch.cat([each, torch.tensor([last], dtype=torch.float64)]),
    )
    made = mix(own, problems, aim.learner)
    scores = made.scores[torch.arange(len(setting.folds)), :, torch.from_numpy(setting.folds)]
    weights = made.weights.double().numpy()
    return {
        "interval": _score(scores, aim, setting, 0, 1),
        "weights": weights[:, -1],
        "low": weights[:, :-1].min(1),
        "high": weights[:, :-1].max(1),
    }


def _data(found: Given, aim: _Aim, columns: list[dict[str, Any]], mixed: dict[str, Any]) -> "xarray.Dataset":
    import xarray

    score, said = aim.score, "accuracy" if aim.classes is not None else "R²"
    intervals = [one["interval"] for one in columns]
    outer: tuple[str, ...] = ("site", "class") if aim.classes is not None else ("site",)

    def along(name: str) -> NDArray[Any]:
        return np.array([one[name] for one in columns])

    true = np.array([one.score for one in intervals])
    ends = {"low": [one.low for one in intervals], "high": [one.high for one in intervals]}
    variables: dict[str, Any] = {score: ("site", true, {"long_name": said})}
    for end, values in ends.items():
        variables[f"{score}_{end}"] = (
            "site",
            np.array(values),
            {"long_name": f"{said}, {end} end of the 95% interval"},
        )
    control_ = along("control")
    less = {"long_name": f"selectivity: {said} less that on control labels", "meaning": "diverging"}
    chosen, last = "penalty chosen without the fold", "penalty of the probe of all rows"
    variables |= {
        "control": ("site", control_, {"long_name": f"{said} on control labels"}),
        "selectivity": ("site", true - control_, less),
        f"{score}_fold": (("site", "fold"), along("folds"), {"long_name": f"{said} on each fold"}),
        "penalty": (("site", "fold"), along("penalty"), {"long_name": chosen, "scale": "log"}),
        "penalty_whole": ("site", along("penalty_whole"), {"long_name": last, "scale": "log"}),
        "coef": ((*outer, "width"), along("coef"), {"long_name": "coefficients of the probe of all rows"}),
        "intercept": (outer, along("intercept"), {"long_name": "intercept of the probe of all rows"}),
    }
    coords: dict[str, Any] = {"site": [str(site) for site in found.vectors.sites]}
    coords["fold"] = np.arange(columns[0]["penalty"].shape[0])
    if aim.classes is not None:
        coords["class"] = aim.classes
        most = float(torch.bincount(aim.targets).max()) / len(aim.targets)
        variables["majority"] = ((), most, {"long_name": "share of the largest class"})
    if mixed:
        names = {"weights": "mix_weight", "low": "mix_weight_low", "high": "mix_weight_high"}
        words = {"weights": "", "low": ", least of the folds", "high": ", most of the folds"}
        for key, name in names.items():
            variables[name] = ("site", mixed[key], {"long_name": f"weight in the mix{words[key]}"})
        for name, value in zip(("", "_low", "_high"), mixed["interval"], strict=False):
            variables[f"mix_{score}{name}"] = ((), value, {"long_name": f"{said} of the mix{name.replace('_', ', ')}"})
    return xarray.Dataset(variables, coords)


def _facts(
    found: Given,
    aim: _Aim,
    setting: _Setting,
    data: "xarray.Dataset",
    columns: list[dict[str, Any]],
    mixed: dict[str, Any],
) -> dict[str, Any]:
    score = aim.score
    facts: dict[str, Any] = {"data": found.name, "rows": len(setting.folds), "texts": int(setting.groups.max()) + 1}
    if aim.classes is not None:
        counts = Counter(aim.targets.tolist())
        few = {str(one): counts[place] for place, one in enumerate(aim.classes)}
        facts["classes"] = few if len(few) <= MANY else len(few)
    best = int(data[score].to_numpy().argmax())
    own: Interval = columns[best]["interval"]
    chance = float(data["majority"]) if "majority" in data else 0.0
    above = [site for site, one in zip(found.vectors.sites, columns, strict=True) if one["interval"].joint_low > chance]
    facts |= {
        "folds": setting.count,
        "best": {
            "site": found.vectors.sites[best],
            score: own.score,
            "95% interval": [own.low, own.high],
            "control": columns[best]["control"],
            "selectivity": float(data["selectivity"][best]),
        },
        "chance": {
            **({"share of the largest class": chance} if "majority" in data else {"R² of the mean": 0.0}),
            "sites above it": summarise(above) if above else "none",
            "by": f"the lower end of an interval that holds for all {len(columns)} sites together, at 95%",
        },
    }
    if mixed:
        top = int(np.argmax(mixed["weights"]))
        made: Interval = mixed["interval"]
        facts["mix"] = {
            score: made.score,
            "95% interval": [made.low, made.high],
            "largest weight": float(mixed["weights"][top]),
            "at": found.vectors.sites[top],
        }
    kind = "one drawn for each token's id" if found.types is not None else "the true ones, shuffled within folds"
    facts["control labels"] = f"{kind}, {len(setting.targets) - 1} times" if len(setting.targets) > 2 else kind
    return facts


def _remarks(found: Given, equal: list[Any], whole: list[CrossValidated]) -> dict[str, Any]:
    """What a reader has to know besides."""
    said: dict[str, Any] = {}
    if equal:
        said["all states are equal"] = f"at {summarise(equal)}, so that nothing can be read off them"
    if found.left_out:
        said["left out"] = found.left_out
    if bool(whole[0].inner_loss.isnan().any()):
        said["penalty"] = f"{MIDDLE:g} everywhere: with two folds there are no inner ones to choose by"
    if not all(bool(one.whole.converged.all()) for one in whole):
        said["not converged"] = summarise(
            [site for site, one in zip(found.vectors.sites, whole, strict=True) if not bool(one.whole.converged.all())]
        )
    return said
