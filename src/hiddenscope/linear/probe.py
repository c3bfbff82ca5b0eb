"""Probe: a linear map fitted to states, with scikit-learn's interface."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np
import torch
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, FileError, SiteError, StatesError
from hiddenscope.files import read_tensors, write_tensors
from hiddenscope.linear.logistic import logistic
from hiddenscope.linear.problems import Problems, ridge, standardised
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states.arrays import Floats, Labels
from hiddenscope.versions import installed_version

Task: TypeAlias = Literal["classify", "regress"]

TASKS = ("classify", "regress")
_FORMAT = "hiddenscope.probe/1"


class _Settings(TypedDict, total=False):
    """What a file says of a probe beside its tensors; a regression has no classes.

    `source` is that of the states that it was fitted to.
    """

    task: Task
    penalty: float
    site: str
    classes: list[Any]
    source: dict[str, Any]
    version: str


@checked
class Probe:
    """A linear probe of states; its coefficients include the standardisation.

    `coef_` is `[class, width]` (`[1, width]` for two classes, `[width]` for a
    regression), `intercept_` goes with it. `source` says of which model the states
    were, with the hash of its weights, if the probe came from `hs.probe`.

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
        check_task(task)
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

    def __repr__(self) -> str:
        place = f" at {self.site}" if self.site else ""
        width = "not fitted"
        if self._is_fitted:
            width = f"width {self.n_features_in_}"
        return f"Probe({self.task}{place}, penalty {self.penalty:g}, {width})"

    @property
    def _is_fitted(self) -> bool:
        return hasattr(self, "coef_")

    def fit(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> "Probe":
        """Fit states `[row, width]` to one label per row.

        The penalty is `alpha` of a ridge regression, and 1 / `C` of a logistic one.
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
        self.coef_ = coef
        self.intercept_ = intercept
        return self

    @property
    def n_features_in_(self) -> int:
        """Return the width of the states that it takes."""
        return int(self.coef_.shape[-1])

    def decision_function(self, states: ArrayLike | torch.Tensor) -> Floats:
        """Return one score per class; for two classes a single one, of the second."""
        if not self._is_fitted:
            raise StatesError(
                "Cannot score states",
                "this probe is not fitted",
                "Call .fit(states, labels), or load one.",
            )
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
        coefficients = np.atleast_2d(self.coef_)
        # Row by row: a product of matrices rounds a row by how many others there are,
        # and a token scored as it is generated must equal the token scored later.
        products: Floats = np.vecdot(rows[:, None, :], coefficients[None])
        scores: Floats = products + self.intercept_
        if scores.ndim == 2 and scores.shape[1] == 1:
            return scores[:, 0]
        return scores

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
        return probe

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file atomically; `Probe.load` restores it exactly."""
        if Path(path).suffix.lower() != ".safetensors":
            reason = "probes are saved as .safetensors"
            raise FileError(
                f"Cannot save a probe as {os.fspath(path)}",
                reason,
                "Give the path that suffix.",
            )
        if not self._is_fitted:
            raise StatesError(
                "Cannot save the probe",
                "it is not fitted",
                "Call .fit(states, labels) first.",
            )
        settings: _Settings = {
            "task": self.task,
            "penalty": self.penalty,
            "site": self.site,
            "source": dict(self.source),
            "version": installed_version("hiddenscope"),
        }
        if self.task == "classify":
            settings["classes"] = self.classes_.tolist()
        tensors = {
            "coef": torch.as_tensor(np.array(self.coef_)),
            "intercept": torch.as_tensor(np.array(self.intercept_)),
        }
        write_tensors(path, tensors, {"format": _FORMAT, "probe": json.dumps(settings)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Probe":
        """Read what `save` wrote."""
        tensors, header = read_tensors(path, "a probe", _FORMAT)
        problem = f"Cannot read a probe from {os.fspath(path)}"
        try:
            settings: _Settings = json.loads(header["probe"])
            probe = cls(settings["task"], settings["penalty"], settings["site"])
            probe.coef_ = tensors["coef"].numpy()
            probe.intercept_ = tensors["intercept"].numpy()
            # Older files do not say it.
            probe.source = dict(settings.get("source", {}))
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
        if not _all_finite(self.intercept_):
            return "its intercepts are not all finite numbers"
        return ""


def check_task(task: object) -> None:
    """Raise if there is no such task."""
    if task not in TASKS:
        raise StatesError(
            f"No task {str(task)[:40]!r}",
            "there are two tasks",
            'Use "classify" or "regress".',
        )


def unscaled(
    coef: torch.Tensor,
    intercept: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
) -> tuple[Floats, Floats]:
    """Turn a fit of standardised states into `[output, width]` for the states as is."""
    plain = coef.double() / deviation[:, None]
    return plain.T.numpy().copy(), (intercept.double() - mean @ plain).numpy()


def _all_finite(values: Floats) -> bool:
    return np.issubdtype(values.dtype, np.floating) and bool(np.isfinite(values).all())


def _labels(labels: ArrayLike, dtype: DTypeLike | None = None) -> Labels:
    try:
        return np.asarray(labels, dtype)
    # Lists of several lengths, a meta tensor, words as numbers.
    except (TypeError, ValueError, RuntimeError) as error:
        raise StatesError(
            "Cannot read the labels", str(error)[:150], "Give one label for each state."
        ) from error


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
