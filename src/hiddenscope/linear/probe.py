"""Probe: a linear map that was fitted to states, with scikit-learn's interface, saved
as safetensors.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hiddenscope.arguments import checked
from hiddenscope.errors import Damaged, FileError, SiteError, StatesError
from hiddenscope.files import read_tensors, write_tensors
from hiddenscope.linear.logistic import logistic
from hiddenscope.linear.problems import Problems, ridge, standardised
from hiddenscope.results import Result
from hiddenscope.sites import Site

Floats: TypeAlias = NDArray[np.float64]
Task: TypeAlias = Literal["classify", "regress"]

TASKS = ("classify", "regress")
_FORMAT = "hiddenscope.probe/1"


@checked
class Probe:
    """A linear probe of states as they are: its coefficients include the
    standardisation.

    `coef_` is `[class, width]` (`[1, width]` for two classes, `[width]` for a
    regression), `intercept_` goes with it.

    >>> probe = Probe().fit([[0.0], [1.0], [2.0], [3.0]], ["low", "low", "high", "high"])
    >>> probe.predict([[0.5], [2.5]]).tolist(), probe.score([[0.0], [3.0]], ["low", "high"])
    (['low', 'high'], 1.0)
    """

    coef_: Floats
    intercept_: Floats
    classes_: NDArray[Any]

    def __init__(
        self, task: Task = "classify", penalty: float = 1.0, site: str = ""
    ) -> None:
        if task not in TASKS:
            raise StatesError(
                f"No task {str(task)[:40]!r}",
                "there are two tasks",
                'Use "classify" or "regress".',
            )
        self.task, self.penalty, self.site = task, _checked_penalty(penalty), site

    def __repr__(self) -> str:
        start = (
            f"Probe({self.task}{f' at {self.site}' if self.site else ''}, penalty"
            f" {self.penalty:g}"
        )
        return (
            f"{start}, width {self.n_features_in_})"
            if hasattr(self, "coef_")
            else f"{start}, not fitted)"
        )

    def fit(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> "Probe":
        """Fit states `[row, width]` to one label a row; the penalty is a ridge's
        `alpha`, 1 / `C` of a logistic fit.
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
            learner, targets = (
                logistic(len(self.classes_), 1e-6),
                torch.from_numpy(codes.reshape(-1)),
            )
        else:
            learner, targets = (
                ridge(),
                torch.from_numpy(_labels(labels, np.float64).reshape(-1)),
            )
        if len(targets) != len(rows):
            reason = f"there are {len(rows)} states and {len(targets)} labels"
            raise StatesError(
                "Cannot fit a probe", reason, "Give one label for each state."
            )
        train, penalty = (
            torch.ones(1, len(rows), dtype=torch.bool),
            torch.tensor([self.penalty], dtype=torch.float64),
        )
        fitted = learner.fit(scaled, Problems(train, targets[None], penalty))
        coef, intercept = unscaled(
            fitted.coef[..., 0], fitted.intercept[:, 0], mean, deviation
        )
        self.coef_, self.intercept_ = (
            (coef[0], intercept[0]) if self.task == "regress" else (coef, intercept)
        )
        return self

    @property
    def n_features_in_(self) -> int:
        """The width of the states that it takes."""
        return int(self.coef_.shape[-1])

    def decision_function(self, states: ArrayLike | torch.Tensor) -> Floats:
        """The scores: one for each class, or for two classes a single one, that of the
        second.
        """
        if not hasattr(self, "coef_"):
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
        scores: Floats = rows @ self.coef_.T + self.intercept_
        return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores

    def predict_proba(self, states: ArrayLike | torch.Tensor) -> Floats:
        """The probability of every class."""
        if self.task != "classify":
            raise StatesError(
                "No probabilities",
                "this probe is a regression, without classes",
                "Call .predict().",
            )
        scores = self.decision_function(states)
        scores = np.stack([0 * scores, scores], 1) if scores.ndim == 1 else scores
        exponentials = np.exp(scores - scores.max(1, keepdims=True))
        probabilities: Floats = exponentials / exponentials.sum(1, keepdims=True)
        return probabilities

    def predict(self, states: ArrayLike | torch.Tensor) -> NDArray[Any]:
        """The class of each state, or its value for a regression."""
        scores = self.decision_function(states)
        if self.task == "regress":
            return scores
        chosen: NDArray[Any] = self.classes_[
            scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)
        ]
        return chosen

    def score(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> float:
        """The accuracy, or R² of a regression."""
        predicted, true = (
            self.predict(states),
            _labels(labels, np.float64 if self.task == "regress" else None),
        )
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
        return float(
            1 - ((true - predicted) ** 2).sum() / ((true - true.mean()) ** 2).sum()
        )

    @classmethod
    def of(cls, result: Result, site: str | Site | None = None) -> "Probe":
        """The probe that `hs.probe` fitted to all rows of a site, by default the best
        one.
        """
        if result.kind != "probe":
            raise StatesError(
                "No fitted probe",
                f"this is a result of {result.kind}",
                "Give a result of hs.probe.",
            )
        data, site = (
            result.data,
            str(result.facts["best"]["site"] if site is None else site),
        )
        sites = data["site"].to_numpy().tolist()
        if site not in sites:
            reason = f"it has {sites[0]} to {sites[-1]}"
            raise SiteError(
                f"No site {site[:60]!r} in this result", reason, "Choose one of these."
            )
        here = data.sel(site=site)
        probe = cls(
            "classify" if "class" in data.coords else "regress",
            float(here["penalty_whole"]),
            site,
        )
        coef, intercept = (
            here[name].to_numpy().astype(np.float64) for name in ("coef", "intercept")
        )
        if probe.task == "classify":
            probe.classes_ = data["class"].to_numpy()
            if len(probe.classes_) == 2:
                coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        probe.coef_, probe.intercept_ = coef, intercept
        return probe

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all; `Probe.load` gives it back
        exactly.
        """
        if Path(path).suffix.lower() != ".safetensors":
            reason = "probes are saved as .safetensors"
            raise FileError(
                f"Cannot save a probe as {os.fspath(path)}",
                reason,
                "Give the path that suffix.",
            )
        if not hasattr(self, "coef_"):
            raise StatesError(
                "Cannot save the probe",
                "it is not fitted",
                "Call .fit(states, labels) first.",
            )
        settings: dict[str, Any] = {
            "task": self.task,
            "penalty": self.penalty,
            "site": self.site,
        }
        if self.task == "classify":
            settings["classes"] = self.classes_.tolist()
        tensors = {
            name: torch.as_tensor(np.array(getattr(self, f"{name}_")))
            for name in ("coef", "intercept")
        }
        write_tensors(path, tensors, {"format": _FORMAT, "probe": json.dumps(settings)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Probe":
        """Read what `save` wrote."""
        tensors, header = read_tensors(path, "a probe", _FORMAT)
        problem = f"Cannot read a probe from {os.fspath(path)}"
        try:
            settings: dict[str, Any] = json.loads(header["probe"])
            probe = cls(settings["task"], settings["penalty"], settings["site"])
            probe.coef_, probe.intercept_ = (
                tensors["coef"].numpy(),
                tensors["intercept"].numpy(),
            )
            if probe.task == "classify":
                probe.classes_ = _array(settings["classes"])
        except (KeyError, TypeError, ValueError) as error:
            raise FileError(
                problem, f"it is damaged or of another kind ({error})", "Save it again."
            ) from error
        if fault := probe._fault():
            raise Damaged(problem, fault, "Save it again.")
        return probe

    def _fault(self) -> str:
        """What is wrong with the shapes or the numbers of a probe that was read, or
        nothing.
        """
        coef, intercept = self.coef_.shape, self.intercept_.shape
        if self.task == "regress":
            fits, said = (
                len(coef) == 1 and intercept == (),
                "a regression has [width] and a number",
            )
        else:
            classes = self.classes_.shape[0] if self.classes_.ndim == 1 else 0
            outputs = 1 if classes == 2 else classes
            fits = (
                classes >= 2
                and len(coef) == 2
                and coef[0] == outputs
                and intercept == (outputs,)
            )
            said = f"{classes} classes have [{outputs}, width] and [{outputs}]"
        if not fits or not coef[-1]:
            return (
                f"its coefficients are {list(coef)} and its intercepts"
                f" {list(intercept)}, where {said}"
            )
        for name, values in (
            ("coefficients", self.coef_),
            ("intercepts", self.intercept_),
        ):
            if (
                not np.issubdtype(values.dtype, np.floating)
                or not np.isfinite(values).all()
            ):
                return f"its {name} are not all finite numbers"
        return ""


def unscaled(
    coef: torch.Tensor,
    intercept: torch.Tensor,
    mean: torch.Tensor,
    deviation: torch.Tensor,
) -> tuple[Floats, Floats]:
    """Coefficients `[output, width]` and intercepts for states as they are, from those
    for standardised ones.
    """
    plain = coef.double() / deviation[:, None]
    return plain.T.numpy().copy(), (intercept.double() - mean @ plain).numpy()


def _checked_penalty(penalty: float) -> float:
    try:
        value = float(penalty)
    except (TypeError, ValueError):
        value = np.nan
    if not 0 < value < np.inf:
        problem = f"penalty must be a finite number > 0, got {str(penalty)[:40]}"
        raise StatesError(
            problem,
            "without a penalty the weights of a fit may grow without bound",
            "Give a number such as 1.0.",
        )
    return value


def _labels(labels: ArrayLike, dtype: Any = None) -> "NDArray[Any]":
    try:
        return np.asarray(labels, dtype)
    except (
        TypeError,
        ValueError,
        RuntimeError,
        # Lists of several lengths, a meta tensor, words as numbers.
    ) as error:
        raise StatesError(
            "Cannot read the labels", str(error)[:150], "Give one label for each state."
        ) from error


def _classes(labels: ArrayLike) -> "tuple[NDArray[Any], NDArray[np.intp]]":
    """The classes in order, and the number of each label's class."""
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
    try:
        host = (
            states.detach().cpu().double().numpy()
            if isinstance(states, torch.Tensor)
            else states
        )
        rows = np.asarray(host, dtype=np.float64)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        reason = f"a {type(states).__name__} does not hold numbers ({error})"
        raise StatesError(
            "A probe takes states [row, width]", reason, "Give an array of numbers."
        ) from error
    if rows.ndim != 2:
        raise StatesError(
            "A probe takes states [row, width]",
            f"the shape is {list(rows.shape)}",
            "Reshape them.",
        )
    if not np.isfinite(rows).all():
        row = int(np.argmin(np.isfinite(rows).all(1)))
        raise StatesError(
            "A probe takes finite states",
            f"row {row} has a NaN or an infinity",
            "Leave it out.",
        )
    return rows


def _array(classes: list[Any]) -> NDArray[Any]:
    if all(isinstance(one, str) for one in classes):
        return np.array([*classes, None], dtype=object)[:-1]
    return np.array(classes)
