"""What is measured of a Jacobian: which vectors are taken at each target, and what is made of their products."""

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hiddenscope.errors import StatesError

Name: TypeAlias = Literal["l1", "frobenius", "relative", "logit"]
Numbers: TypeAlias = NDArray[np.float64]

WIDE = 128  # up to this width the Frobenius norm is exact if nothing else is asked for
USUAL_PROBES = 16
LONG = {
    "l1": "L1 norm of the gradient of |h|₁/|h|₂",
    "frobenius": "Frobenius norm of the Jacobian",
    "relative": "relative change for a relative change",
    "logit": "norm of the gradient of a token's log-probability",
}
UNITS = {"l1": "L1", "frobenius": "L2", "relative": "", "logit": "nats per L2"}


@dataclass(frozen=True)
class Measure:
    """One measure: its name, and how many probes estimate it; 0 where it is exact."""

    name: str
    probes: int = 0
    seed: int = 0

    @classmethod
    def of(cls, name: str, probes: Any, seed: int, width: int) -> "Measure":
        """What was asked for, checked; a Frobenius norm is exact if the states are narrow, or the probes as many."""
        if name not in get_args(Name):
            raise StatesError(
                f"No measure {str(name)[:40]!r}", "there are four", f"Ask for {', '.join(get_args(Name))}."
            )
        if name in ("l1", "logit"):
            if probes is not None:
                reason = "it is exact with one vector a target"
                raise StatesError(f"{probes} probes for {name}", reason, "Leave `probes` out, or ask for frobenius.")
            return cls(name)
        if probes is None:
            probes = width if width <= WIDE else USUAL_PROBES
        if isinstance(probes, bool) or not isinstance(probes, int) or probes < 2:
            reason = "error bars need at least two"
            raise StatesError(f"{str(probes)[:40]} probes", reason, f"Give 2 to {width}, which is exact.")
        return cls(name, 0 if probes >= width else probes, seed)

    def count(self, width: int) -> int:
        """How many vectors each target takes."""
        return 1 if self.name in ("l1", "logit") else self.probes or width

    def vectors(self, states: Tensor, generator: torch.Generator) -> Tensor:
        """The vectors at some states [token, width]: [token, vector, width]."""
        if self.name == "l1":
            return scale_free(states)[:, None]
        tokens, width = states.shape
        if not self.probes:
            units: Tensor = torch.eye(width, dtype=states.dtype, device=states.device)
            return units.expand(tokens, width, width)
        drawn: Tensor = torch.randn(tokens, self.probes, width, generator=generator, dtype=torch.float64)
        lengths = torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)
        drawn *= width**0.5 / lengths  # on a sphere: exact where the Jacobian is a rotation
        return drawn.to(dtype=states.dtype, device=states.device)

    def size(self, products: Tensor) -> Tensor:
        """What is added up over the vectors of a target: [vector, token] of products [vector, token, width]."""
        wide = torch.float64 if products.dtype == torch.float64 else torch.float32
        norms = torch.linalg.vector_norm(products, 1 if self.name == "l1" else 2, dim=-1, dtype=wide).double()
        sizes: Tensor = norms if self.name == "l1" else norms.square()
        return sizes

    def values(self, sums: Numbers, squares: Numbers) -> tuple[Numbers, Numbers | None]:
        """The measure, and half of its 95% interval where it is estimated."""
        if self.name == "l1":
            return sums, None
        if not self.probes:
            return np.sqrt(sums), None
        mean = sums / self.probes
        spread = np.maximum(squares / self.probes - mean**2, 0) / (self.probes - 1)
        norm = np.sqrt(mean)
        with np.errstate(invalid="ignore", divide="ignore"):
            half = quantile(self.probes) * np.sqrt(spread) / (2 * norm)
        return norm, np.where(norm > 0, half, 0.0)


def scale_free(states: Tensor) -> Tensor:
    """The gradient of |h|₁/|h|₂ with respect to h, for rows of states: it is orthogonal to h."""
    wide = states if states.dtype == torch.float64 else states.float()
    length = wide.norm(dim=-1, keepdim=True)
    gradient: Tensor = wide.sign() / length - wide.abs().sum(-1, keepdim=True) * wide / length**3
    return gradient.to(states.dtype)


def quantile(probes: int) -> float:
    """How many standard errors hold 95%.

    Squared norms of few probes are skewed to the right, the more so the fewer directions a Jacobian has, and Student's
    own quantile would hold too little: it is taken with a quarter of the degrees of freedom.
    """
    from scipy.stats import t

    return float(t.ppf(0.975, max(1.0, (probes - 1) / 4)))
