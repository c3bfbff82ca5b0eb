"""Probe: a linear map that was fitted to states, with scikit-learn's words for it, kept as safetensors."""

import json
import os
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from hiddenscope.errors import FileError, SiteError, StatesError
from hiddenscope.files import read_tensors, write_tensors
from hiddenscope.linear.logistic import logistic
from hiddenscope.linear.problems import Problems, standardised
from hiddenscope.linear.ridge import ridge
from hiddenscope.results import Result

Floats: TypeAlias = NDArray[np.float64]
Task: TypeAlias = Literal["classify", "regress"]

TASKS = ("classify", "regress")
_FORMAT = "hiddenscope.probe/1"


class Probe:
    """A linear probe of states as they are: it standardises nothing, its coefficients have taken that in.

    `coef_` is `[class, width]` (`[1, width]` for two classes, `[width]` for a regression), `intercept_` goes with it.

    >>> probe = Probe().fit([[0.0], [1.0], [2.0], [3.0]], ["low", "low", "high", "high"])
    >>> probe.predict([[0.5], [2.5]]).tolist(), probe.score([[0.0], [3.0]], ["low", "high"])
    (['low', 'high'], 1.0)
    """

    coef_: Floats
    intercept_: Floats
    classes_: NDArray[Any]

    def __init__(self, task: Task = "classify", penalty: float = 1.0, site: str = "") -> None:
        if task not in TASKS:
            raise StatesError(f"No task {str(task)[:40]!r}", "there are two", "Ask for classify or regress.")
        self.task, self.penalty, self.site = task, float(penalty), site

    def __repr__(self) -> str:
        said = f"Probe({self.task}{f' at {self.site}' if self.site else ''}, penalty {self.penalty:g}"
        return f"{said}, width {self.n_features_in_})" if hasattr(self, "coef_") else f"{said}, not fitted)"

    def fit(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> "Probe":
        """Fit states `[row, width]` to one label a row; the penalty is a ridge's `alpha`, 1 / `C` of a logistic fit."""
        rows = _rows(states)
        own, mean, deviation = standardised(torch.from_numpy(rows))
        if self.task == "classify":
            self.classes_, targets = np.unique(np.asarray(labels), return_inverse=True)
            if len(self.classes_) < 2:
                raise StatesError("A probe of classes", "there is one class only", "Give labels of at least two.")
            learner, aims = logistic(len(self.classes_), 1e-6), torch.from_numpy(targets.reshape(-1))
        else:
            learner, aims = ridge(), torch.from_numpy(np.asarray(labels, dtype=np.float64).reshape(-1))
        if len(aims) != len(rows):
            reason = f"there are {len(aims)} labels"
            raise StatesError(f"A probe of {len(rows)} states", reason, "Give one label a state.")
        every = torch.ones(1, len(rows), dtype=torch.bool)
        fitted = learner.fit(own, Problems(every, aims[None], torch.tensor([self.penalty], dtype=torch.float64)))
        coef, intercept = unscaled(fitted.coef[..., 0], fitted.intercept[:, 0], mean, deviation)
        self.coef_, self.intercept_ = (coef[0], intercept[0]) if self.task == "regress" else (coef, intercept)
        return self

    @property
    def n_features_in_(self) -> int:
        """The width of the states that it takes."""
        return int(self.coef_.shape[-1])

    def decision_function(self, states: ArrayLike | torch.Tensor) -> Floats:
        """The scores: one a class, or a single one, for the second of two."""
        if not hasattr(self, "coef_"):
            raise StatesError("A probe's scores", "it is not fitted", "Call .fit(states, labels), or load one.")
        rows = _rows(states)
        if rows.shape[1] != self.n_features_in_:
            reason = f"the states are {rows.shape[1]} wide"
            raise StatesError(f"A probe of width {self.n_features_in_}", reason, "Give states of the site it is of.")
        scores: Floats = rows @ self.coef_.T + self.intercept_
        return scores[:, 0] if scores.ndim == 2 and scores.shape[1] == 1 else scores

    def predict_proba(self, states: ArrayLike | torch.Tensor) -> Floats:
        """The probability of every class."""
        if self.task != "classify":
            raise StatesError("Probabilities of a regression", "it has no classes", "Call .predict().")
        scores = self.decision_function(states)
        scores = np.stack([0 * scores, scores], 1) if scores.ndim == 1 else scores
        raised = np.exp(scores - scores.max(1, keepdims=True))
        shares: Floats = raised / raised.sum(1, keepdims=True)
        return shares

    def predict(self, states: ArrayLike | torch.Tensor) -> NDArray[Any]:
        """The class of each state, or its number."""
        scores = self.decision_function(states)
        if self.task == "regress":
            return scores
        chosen: NDArray[Any] = self.classes_[scores.argmax(1) if scores.ndim == 2 else (scores > 0).astype(int)]
        return chosen

    def score(self, states: ArrayLike | torch.Tensor, labels: ArrayLike) -> float:
        """The share of labels that it predicts, or R² of a regression."""
        found, wanted = self.predict(states), np.asarray(labels)
        if self.task == "classify":
            return float((found == wanted).mean())
        return float(1 - ((wanted - found) ** 2).sum() / ((wanted - wanted.mean()) ** 2).sum())

    @classmethod
    def of(cls, result: Result, site: str = "") -> "Probe":
        """The probe that `hs.probe` fitted to all rows of a site; of the best one if none is named."""
        if result.kind != "probe":
            raise StatesError("A fitted probe", f"this is a result of {result.kind}", "Give one of hs.probe.")
        data, site = result.data, site or str(result.facts["best"]["site"])
        sites = data["site"].to_numpy().tolist()
        if site not in sites:
            reason = f"it has {sites[0]} to {sites[-1]}"
            raise SiteError(f"No site {site[:60]!r} in this result", reason, "Ask for one of these.")
        own = data.sel(site=site)
        probe = cls("classify" if "class" in data.coords else "regress", float(own["penalty_whole"]), site)
        coef, intercept = (own[name].to_numpy().astype(np.float64) for name in ("coef", "intercept"))
        if probe.task == "classify":
            probe.classes_ = data["class"].to_numpy()
            if len(probe.classes_) == 2:
                coef, intercept = coef[1:] - coef[:1], intercept[1:] - intercept[:1]
        probe.coef_, probe.intercept_ = coef, intercept
        return probe

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a safetensors file, whole or not at all; `Probe.load` gives it back exactly."""
        if Path(path).suffix.lower() != ".safetensors":
            reason = "probes are kept as .safetensors"
            raise FileError(f"Cannot save a probe as {os.fspath(path)}", reason, "Give the path that suffix.")
        if not hasattr(self, "coef_"):
            raise StatesError("A probe to be saved", "it is not fitted", "Call .fit(states, labels) first.")
        said: dict[str, Any] = {"task": self.task, "penalty": self.penalty, "site": self.site}
        if self.task == "classify":
            said["classes"] = self.classes_.tolist()
        tensors = {name: torch.as_tensor(np.array(getattr(self, f"{name}_"))) for name in ("coef", "intercept")}
        write_tensors(path, tensors, {"format": _FORMAT, "probe": json.dumps(said)})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Probe":
        """Read what `save` wrote."""
        tensors, header = read_tensors(path, "a probe", _FORMAT)
        try:
            said: dict[str, Any] = json.loads(header["probe"])
            probe = cls(said["task"], said["penalty"], said["site"])
            probe.coef_, probe.intercept_ = tensors["coef"].numpy(), tensors["intercept"].numpy()
            if probe.task == "classify":
                probe.classes_ = _array(said["classes"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"Cannot read a probe from {os.fspath(path)}"
            raise FileError(problem, f"it is damaged or of another kind ({error})", "Save it again.") from error
        return probe


def unscaled(
    coef: torch.Tensor, intercept: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor
) -> tuple[Floats, Floats]:
    """Coefficients `[output, width]` and intercepts for states as they are, from those for standardised ones."""
    plain = coef.double() / deviation[:, None]
    return plain.T.numpy().copy(), (intercept.double() - mean @ plain).numpy()


def _rows(states: ArrayLike | torch.Tensor) -> Floats:
    given = states.detach().cpu().double().numpy() if isinstance(states, torch.Tensor) else states
    rows = np.asarray(given, dtype=np.float64)
    if rows.ndim != 2:
        raise StatesError("States for a probe", f"the shape is {list(rows.shape)}", "Give [row, width].")
    if not np.isfinite(rows).all():
        row = int(np.argmin(np.isfinite(rows).all(1)))
        raise StatesError("States for a probe", f"row {row} is not finite", "Leave it out.")
    return rows


def _array(classes: list[Any]) -> NDArray[Any]:
    if all(isinstance(one, str) for one in classes):
        return np.array([*classes, None], dtype=object)[:-1]
    return np.array(classes)
