"""Names for the kinds of numpy arrays that rooms exchange."""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]
Floats32: TypeAlias = NDArray[np.float32]
Bools: TypeAlias = NDArray[np.bool_]
# Rows that a caller brings, of whatever dtype.
AnyArray: TypeAlias = NDArray[Any]
# Labels are strings, numbers or whatever the user's frame holds.
Labels: TypeAlias = NDArray[Any]
