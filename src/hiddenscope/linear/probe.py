"""Probe: a linear map fitted to states, with scikit-learn's interface."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hiddenscope.arguments import checked, require
from hiddenscope.errors import Damaged, FileError, SiteError, StatesError
from hiddenscope.files import PathLike, printable, read_tensors, save_tensors
from hiddenscope.linear.crossvalidation import stable_hash
from hiddenscope.linear.logistic import logistic
from hiddenscope.linear.problems import Problems, ridge, standardised
from hiddenscope.measures.massive import MASSIVE
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states import States
from hiddenscope.states.arrays import Floats, Labels
from hiddenscope.states.pooling import (
    SINKLESS,
    Pooling,
    meaning_of,
    score_pooling,
)
from hiddenscope.texts import Labelled, belonging, copy_key, number_groups
from hiddenscope.versions import installed_version

Task: TypeAlias = Literal["classify", "regress"]

_FORMAT = "hiddenscope.probe/1"


@dataclass(frozen=True)
class Threshold:
    """Where a probe rings: above `value`, as `alarms` of the `negatives` do.

    With 95% confidence at most the share `at_most` of fresh negatives would, which is
    no more than the rate that was wanted. Of the texts, `near_duplicates` nearly repeat
    one of another group: then more may ring.
    """

    value: float
    alarms: int
    negatives: int
    at_most: float
    near_duplicates: int = 0


@checked
class Probe:
    """A linear probe of states; its coefficients include the standardisation.

    `coef_` is `[class, width]` (`[1, width]` for two classes, `[width]` for a
    regression), `intercept_` goes with it. `source` says of which model the states
    were, with the hash of its weights, if the probe came from `hs.probe`; then `pool`
    says what stands for a text, and `query_` weighs tokens if attention was learnt.

    >>> states, labels = [[0.0], [1.0], [2.0], [3.0]], ["low", "low", "high", "high"]
    >>> probe = Probe().fit(states, labels)
    >>> probe.predict([[0.5], [2.5]]).tolist(), probe.score(states, labels)
    (['low', 'high'], 1.0)
    """

    coef_: Floats
    intercept_: Floats
    classes_: Labels

    def __init__(
        self, task: Task = "classify", penalty: float = 1.0, site: str = ""
    ) -> None:
        require(task, Task, "task", "Probe")
        self.task: Task = task
        try:
            self.penalty = float(penalty)
        except (TypeError, ValueError):
            self.penalty = np.nan
        if not 0 < self.penalty < np.inf:
            raise StatesError(
                f"penalty must be a finite number > 0, got {str(penalty)[:40]}",
                "without a penalty the weights of a fit may grow without bound",
                "Give a number such as 1.0.",
            )
        self.site = site
        self.source: Mapping[str, Any] = {}
        self.pool: Pooling = ""
        self.query_: Floats | None = None
        self.threshold_: Threshold | None = None
        self.trained_: frozenset[int] = frozenset()

    def __repr__(self) -> str:
        place = f" at {printable(self.site)}" if self.site else ""
        width = "not fitted"
        if hasattr(self, "coef_"):
            width = f"width {self.n_features_in_}"
        return f"Probe({self.task}{place}, penalty {self.penalty:g}, {width})"

    def _check_fitted(self, problem: str) -> None:
        if not hasattr(self, "coef_"):
            remedy = "Call .fit(states, labels), or load one."
            raise StatesError(problem, "this probe is not fitted", remedy)

    def fit(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> "Probe":
        """Fit states `[row, width]` to one label per row.

        The penalty is `alpha` of a ridge regression, and 1 / `C` of a logistic one. A
        threshold, or a pooling, that it had is forgotten.
        """
        rows = _rows(states)
        scaled, mean, deviation = standardised(torch.from_numpy(rows))
        if self.task == "classify":
            self.classes_, codes = _classes(labels)
            if len(self.classes_) < 2:
                raise StatesError(
                    "Cannot fit a probe",
                    "the labels are all of one class",
                    "Give at least two classes.",
                )
            learner = logistic(len(self.classes_), 1e-6)
            targets = torch.from_numpy(codes.reshape(-1))
        else:
            learner = ridge()
            targets = torch.from_numpy(_labels(labels, np.float64).reshape(-1))
        if len(targets) != len(rows):
            reason = f"there are {len(rows)} states and {len(targets)} labels"
            raise StatesError(
                "Cannot fit a probe", reason, "Give one label for each state."
            )
        all_rows = torch.ones(1, len(rows), dtype=torch.bool)
        penalty = torch.tensor([self.penalty], dtype=torch.float64)
        fitted = learner.fit(scaled, Problems(all_rows, targets[None], penalty))
        coef, intercept = unscaled(
            fitted.coef[..., 0], fitted.intercept[:, 0], mean, deviation
        )
        if self.task == "regress":
            coef, intercept = coef[0], intercept[0]
        self.coef_, self.intercept_ = coef, intercept
        self.source, self.pool, self.query_, self.threshold_ = {}, "", None, None
        self.trained_ = frozenset()
        return self

    @property
    def n_features_in_(self) -> int:
        """Return the width of the states that it takes."""
        return int(self.coef_.shape[-1])

    @property
    def outputs(self) -> tuple[Floats, Floats]:
        """Return coefficients and intercepts `[output]`, those of attention last."""
        coef, intercept = np.atleast_2d(self.coef_), np.atleast_1d(self.intercept_)
        if self.query_ is not None:
            coef, intercept = np.vstack([coef, self.query_]), np.append(intercept, 0.0)
        return coef, intercept

    def decision_function(self, states: ArrayLike | torch.Tensor) -> Floats:
        """Return one score per class; for two classes a single one, of the second.

        A list of the states `[token, width]` of texts has one for each text, if the
        probe pools scores of tokens.
        """
        if isinstance(states, list) and score_pooling(self.pool):
            return np.array([self.so_far(self.readings(text))[-1] for text in states])
        return self.scores(self.readings(states))

    def scores(self, readings: Floats) -> Floats:
        """Return the scores in readings, without what weighs them."""
        is_weighed = self.query_ is not None or self.pool == SINKLESS
        outputs = readings.shape[1] - is_weighed
        return readings[:, 0] if outputs == 1 else readings[:, :outputs]

    def readings(self, states: ArrayLike | torch.Tensor) -> Floats:
        """Return every output `[row, output]`: scores, and what weighs them.

        That is the input of attention, or the length of a state, which tells sinks.
        """
        self._check_fitted("Cannot score states")
        rows = _rows(states)
        if rows.shape[1] != self.n_features_in_:
            reason = (
                f"the states are {rows.shape[1]} wide, and the probe was fitted to"
                f" width {self.n_features_in_}"
            )
            raise StatesError(
                "Cannot score states",
                reason,
                "Give states of the site that it was fitted at.",
            )
        coefficients, intercepts = self.outputs
        # Row by row: a product of matrices rounds a row by how many others there are,
        # and a token scored as it is generated must equal the token scored later.
        products: Floats = np.vecdot(rows[:, None, :], coefficients[None])
        if self.pool != SINKLESS:
            return products + intercepts
        return np.column_stack([products + intercepts, np.linalg.norm(rows, axis=1)])

    def so_far(self, readings: Floats) -> Floats:
        """Return the score of a text up to each token, from the readings of its tokens.

        The last is that of the whole text. Where every token has a label, or the last
        stands for the text, it is the score of the token itself. A pooling that is
        learnt leaves out the first token, whose state is often a hundred times as
        large, unless there is no other.

        >>> probe = Probe()
        >>> probe.pool = "mean"
        >>> probe.so_far(np.array([[1.0], [3.0], [8.0]])).tolist()
        [1.0, 2.0, 4.0]
        """
        scores = self.scores(readings)
        if self.pool in ("", "each", "last", -1):
            return scores
        if self.pool in ("mean", "mean:all"):
            return _means(scores)
        if self.pool == SINKLESS:
            pooled = []
            for end in range(1, len(scores) + 1):
                lengths = readings[:end, -1]
                median = np.sort(lengths)[(end - 1) // 2]
                pooled.append(scores[:end][lengths <= MASSIVE * median].mean(0))
            return np.array(pooled)
        if self.pool in ("first", "cls", 0):
            return np.repeat(scores[:1], len(scores), 0)
        pooling = score_pooling(self.pool)
        if pooling is None:
            raise StatesError(
                "Cannot score a text up to each token",
                f"the probe reads {meaning_of(self.pool)}, which scores do not tell",
                'Fit it with another pool, such as "softmax".',
            )
        later = scores[1:]
        if str(self.pool).startswith("rolling"):
            size = int(max(1, pooling.setting))
            sums = np.append(0.0, later.cumsum())
            highest = np.maximum.accumulate((sums[size:] - sums[:-size]) / size)
            return np.concatenate([scores[:1], _means(later[: size - 1]), highest])
        logits = readings[1:, -1] / (pooling.setting or 1.0)
        shares = np.exp(logits - np.logaddexp.accumulate(logits))
        parts = zip(later, shares, strict=True)
        means = accumulate(
            parts, lambda mean, part: mean + part[1] * (part[0] - mean), initial=0.0
        )
        return np.append(scores[:1], [*means][1:])

    def highest(self, states: ArrayLike | torch.Tensor) -> float:
        """Return the highest score that a text reaches, at a token after the first."""
        scores = self.so_far(self.readings(states))
        return float(scores[min(1, len(scores) - 1) :].max())

    def threshold(
        self,
        negatives: States | tuple[States, Labelled] | ArrayLike,
        *,
        false_positives: float = 0.01,
    ) -> Threshold:
        """Set the score above which the probe rings, and return it with its error.

        At most the share `false_positives` of fresh negatives ring, with 95%
        confidence. `negatives` are states of texts of the first class, which count by
        the highest score that each reaches at any token after the first. Of copies, and
        of texts that belong together (`(states, hs.read(..., group=))`), the loudest
        counts. Or they are a score for each text, which must be independent. They must
        not have trained the probe; texts that `hs.probe` trained it on are refused.

        >>> probe = Probe().fit([[0.0], [1.0], [2.0], [3.0]], [0, 0, 1, 1])
        >>> probe.threshold(np.arange(500), false_positives=0.01).alarms
        1
        """
        from scipy.stats import beta

        problem = "Cannot set a threshold"
        if len(getattr(self, "classes_", ())) != 2:
            reason = "the probe is not fitted, or not to two classes"
            raise StatesError(problem, reason, "Fit it to two.")
        near = 0
        match negatives:
            case States():
                negatives, near = self._loudest(negatives, None, problem)
            case (States() as states, Labelled() as data):
                negatives, near = self._loudest(states, data, problem)
        scores = _labels(negatives, np.float64)
        if scores.ndim != 1 or not len(scores):
            reason = f"it takes a list of scores, not the shape {list(scores.shape)}"
            raise StatesError(problem, reason, "Give states, or a score of each.")
        if not 0 < false_positives < 1:
            reason = f"false_positives is {false_positives}, and a rate is from 0 to 1"
            raise StatesError(problem, reason, "Give a rate such as 0.01.")
        scores, count = np.sort(scores), len(scores)
        # The share of fresh scores above the k-th highest of n is that of uniform
        # numbers below the k-th lowest of n, whatever the scores are.
        above = np.arange(count)
        bounds = beta.ppf(0.95, above + 1, count - above)
        allowed = int((bounds <= false_positives).sum())
        if not allowed:
            needed = negatives_needed(false_positives)
            raise StatesError(
                f"Too few negatives to say where {false_positives:.3g} of them ring",
                f"that takes {needed:,}, and there are {count:,}",
                "Give more, or allow a higher rate.",
            )
        value = float(scores[count - allowed])
        alarms = int((scores > value).sum())
        self.threshold_ = Threshold(value, alarms, count, float(bounds[alarms]), near)
        return self.threshold_

    def _loudest(
        self, states: States, data: Labelled | None, problem: str
    ) -> tuple[Floats, int]:
        """Return the highest score of each group of texts, and how many texts nearly
        repeat one of another.
        """
        groups = None
        if data is not None:
            groups = data.groups
            if states.tokens.texts not in (None, data.texts):
                reason = f"{data.name} has other texts than the states"
                raise StatesError(problem, reason, "Give what they were made of.")
        texts = states.tokens.contents
        trained = sum(key_number(copy_key(text)) in self.trained_ for text in texts)
        if trained:
            reason = f"{trained:,} of the {len(texts):,} texts trained the probe"
            raise StatesError(problem, reason, "Give others.")
        together = belonging(texts, [""] * len(texts), groups)
        parts = torch.split(states[self.site], states.tokens.lengths.tolist())
        numbers = number_groups(together.groups)
        loudest = np.full(numbers.max() + 1, -np.inf)
        np.maximum.at(loudest, numbers, [self.highest(part) for part in parts])
        return loudest, together.alike.texts if together.alike else 0

    def predict_proba(self, states: ArrayLike | torch.Tensor) -> Floats:
        """Return the probability of every class."""
        from scipy.special import softmax

        if self.task != "classify":
            raise StatesError(
                "No probabilities",
                "this probe is a regression, without classes",
                "Call .predict().",
            )
        scores = self.decision_function(states)
        if scores.ndim == 1:
            scores = np.stack([0 * scores, scores], 1)
        probabilities: Floats = softmax(scores, axis=1)
        return probabilities

    def predict(self, states: ArrayLike | torch.Tensor) -> Labels:
        """Return the class of each state, or its value for a regression."""
        scores = self.decision_function(states)
        if self.task == "regress":
            return scores
        codes = scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)
        predicted: Labels = self.classes_[codes]
        return predicted

    def score(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> float:
        """Return the accuracy, or R² of a regression."""
        predicted = self.predict(states)
        true = _labels(labels, np.float64 if self.task == "regress" else None)
        if true.shape != predicted.shape:
            reason = (
                f"there are {len(predicted):,} states, and labels of shape"
                f" {list(true.shape)}"
            )
            raise StatesError(
                "Cannot score a probe", reason, "Give one label for each state."
            )
        if self.task == "classify":
            return float((predicted == true).mean())
        error = ((true - predicted) ** 2).sum()
        return float(1 - error / ((true - true.mean()) ** 2).sum())

    @classmethod
    def of(cls, result: Result, site: str | Site | None = None) -> "Probe":
        """Return the probe that `hs.probe` fitted to all rows of a site.

        Without a site, it is the one with the best score.
        """
        if result.kind != "probe":
            raise StatesError(
                "No fitted probe",
                f"this is a result of {result.kind}",
                "Give a result of hs.probe.",
            )
        data = result.data
        name = str(result.facts["best"]["site"] if site is None else site)
        sites = data["site"].to_numpy().tolist()
        if name not in sites:
            reason = f"it has {sites[0]} to {sites[-1]}"
            raise SiteError(
                f"No site {name[:60]!r} in this result", reason, "Choose one of these."
            )
        here = data.sel(site=name)
        task: Task = "classify" if "class" in data.coords else "regress"
        probe = cls(task, float(here["penalty_whole"]), name)
        coef = here["coef"].to_numpy().astype(np.float64)
        intercept = here["intercept"].to_numpy().astype(np.float64)
        if task == "classify":
            probe.classes_ = data["class"].to_numpy()
            if len(probe.classes_) == 2:
                # A result has one row per class, a probe of two classes has only one.
                coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        probe.coef_ = coef
        probe.intercept_ = intercept
        probe.source = dict(result.source)
        probe.pool = result.facts["token"]
        if "trained_on" in data:
            probe.trained_ = frozenset(data["trained_on"].to_numpy().tolist())
        if "query" in here:
            probe.query_ = here["query"].to_numpy().astype(np.float64)
        return probe

    def save(self, path: PathLike) -> None:
        """Write a safetensors file atomically; `Probe.load` restores it exactly."""
        self._check_fitted("Cannot save the probe")
        settings: dict[str, Any] = {
            "task": self.task,
            "penalty": self.penalty,
            "site": self.site,
            "source": dict(self.source),
            "version": installed_version("hiddenscope"),
            "pool": self.pool,
            "threshold": None if self.threshold_ is None else vars(self.threshold_),
        }
        if self.task == "classify":
            settings["classes"] = self.classes_.tolist()
        tensors = {
            "coef": torch.as_tensor(np.array(self.coef_)),
            "intercept": torch.as_tensor(np.array(self.intercept_)),
        }
        if self.trained_:
            tensors["trained"] = torch.tensor(sorted(self.trained_))
        if self.query_ is not None:
            tensors["query"] = torch.as_tensor(self.query_)
        save_tensors(path, tensors, {"format": _FORMAT, "probe": json.dumps(settings)})

    @classmethod
    def load(cls, path: PathLike) -> "Probe":
        """Read what `save` wrote."""
        tensors, header = read_tensors(path, "a probe", _FORMAT)
        problem = f"Cannot read a probe from {os.fspath(path)}"
        try:
            settings: dict[str, Any] = json.loads(header["probe"])
            if not isinstance(settings["site"], str):
                raise TypeError("its site is no name")
            probe = cls(settings["task"], settings["penalty"], settings["site"])
            probe.coef_ = tensors["coef"].numpy()
            probe.intercept_ = tensors["intercept"].numpy()
            # Older files do not say these.
            probe.source = dict(settings.get("source", {}))
            probe.pool = settings.get("pool", "")
            if threshold := settings.get("threshold"):
                probe.threshold_ = Threshold(**threshold)
            if "trained" in tensors:
                probe.trained_ = frozenset(tensors["trained"].tolist())
            if "query" in tensors:
                probe.query_ = tensors["query"].numpy()
            if probe.task == "classify":
                # Names are objects, as those of a result are.
                names = settings["classes"]
                are_strings = all(isinstance(name, str) for name in names)
                probe.classes_ = np.array(names, dtype=object if are_strings else None)
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                problem, f"it is damaged or of another kind ({error})", "Save it again."
            ) from error
        if fault := probe._fault():
            raise Damaged(problem, fault, "Save it again.")
        return probe

    def _fault(self) -> str:
        """Describe what is wrong with a probe that was read, or return nothing."""
        coef = self.coef_.shape
        intercept = self.intercept_.shape
        if self.task == "regress":
            fits = len(coef) == 1 and intercept == ()
            expected = "a regression has [width] and a number"
        else:
            classes = self.classes_.shape[0] if self.classes_.ndim == 1 else 0
            outputs = 1 if classes == 2 else classes
            fits = coef[:-1] == intercept == (outputs,) and classes >= 2
            expected = f"{classes} classes have [{outputs}, width] and [{outputs}]"
        if not fits or not coef[-1]:
            return (
                f"its coefficients are {list(coef)} and its intercepts"
                f" {list(intercept)}, where {expected}"
            )
        if not _all_finite(self.coef_):
            return "its coefficients are not all finite numbers"
        if self.query_ is not None and self.query_.shape != coef[-1:]:
            return f"its query is {list(self.query_.shape)}, and its width {coef[-1]}"
        if not _all_finite(self.intercept_):
            return "its intercepts are not all finite numbers"
        return ""


def key_number(key: str) -> int:
    """Return a number that stands for a text and its copies, by their key."""
    return stable_hash(key, 0) >> 1


def negatives_needed(false_positives: float) -> int:
    """Return how many negatives can show that no more than this share of them ring.

    >>> [negatives_needed(rate) for rate in (0.05, 0.01, 0.001)]
    [59, 299, 2995]
    """
    return int(np.ceil(np.log(0.05) / np.log1p(-false_positives)))


def unscaled(
    coef: torch.Tensor,
    intercept: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
) -> tuple[Floats, Floats]:
    """Turn a fit of standardised states into `[output, width]` for the states as is."""
    plain = coef.double() / deviation[:, None]
    return plain.T.numpy().copy(), (intercept.double() - mean @ plain).numpy()


def _means(scores: Floats) -> Floats:
    """Return the mean up to each score."""
    means: Floats = (scores.T.cumsum(-1) / np.arange(1, len(scores) + 1)).T
    return means


def _all_finite(values: Floats) -> bool:
    return np.issubdtype(values.dtype, np.floating) and bool(np.isfinite(values).all())


def _labels(labels: ArrayLike, dtype: DTypeLike | None = None) -> Labels:
    try:
        values = np.asarray(labels, dtype)
    # Lists of several lengths, a meta tensor, words as numbers.
    except (TypeError, ValueError, RuntimeError) as error:
        raise StatesError(
            "Cannot read labels or scores",
            str(error)[:150],
            "Give one label for each state.",
        ) from error
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        reason = "one of them is missing, NaN or infinite"
        raise StatesError("Cannot read labels or scores", reason, "Leave it out.")
    return values


def _classes(labels: ArrayLike) -> tuple[Labels, NDArray[np.intp]]:
    """Return the classes in order, and the index of each label's class."""
    try:
        classes, codes = np.unique(_labels(labels), return_inverse=True)
    except TypeError as error:
        reason = f"the labels cannot be sorted into classes ({str(error)[:100]})"
        raise StatesError(
            "Cannot fit a probe",
            reason,
            "Give labels of one type, all strings or all numbers.",
        ) from error
    return classes, codes


def _rows(states: ArrayLike | torch.Tensor) -> Floats:
    """Return states as a finite float64 array `[row, width]`, or raise."""
    problem = "A probe takes states [row, width]"
    try:
        if isinstance(states, torch.Tensor):
            states = states.detach().cpu().double().numpy()
        rows = np.asarray(states, dtype=np.float64)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = f"a {type(states).__name__} does not hold numbers ({error})"
        raise StatesError(problem, reason, "Give an array of numbers.") from error
    if rows.ndim != 2:
        raise StatesError(problem, f"the shape is {list(rows.shape)}", "Reshape them.")
    finite = np.isfinite(rows).all(1)
    if not finite.all():
        raise StatesError(
            "A probe takes finite states",
            f"row {int(np.argmin(finite))} has a NaN or an infinity",
            "Leave it out.",
        )
    return rows
