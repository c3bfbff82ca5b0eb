"""One thing that was checked, and how a check that fails becomes a problem."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "note", "problem"]
"""A `problem` must be mended. A `note` tells of something that not everybody needs."""

# As much of a foreign message as helps.
LONGEST_MESSAGE = 300


@dataclass(frozen=True)
class Check:
    """What one check saw, and what to do about it.

    >>> Check("devices", "cuda", "note", "There is no GPU.").as_json()["status"]
    'note'
    """

    group: str
    name: str
    status: Status
    message: str
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        """Return what `--json` prints."""
        return asdict(self)


def short(error: BaseException) -> str:
    """Return an error in one line.

    >>> short(ImportError("libtorch.so: no such file"))
    'ImportError: libtorch.so: no such file'
    """
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else "without a message"
    return f"{type(error).__name__}: {message[:LONGEST_MESSAGE]}"


def reported(
    group: str, name: str, examine: Callable[[], Iterator[Check]]
) -> Iterator[Check]:
    """Yield what a check sees; if it fails, yield the failure as a problem.

    >>> def examine():
    ...     raise PermissionError("not yours")
    >>> [check.message for check in reported("cache", "folder", examine)]
    ['It cannot be checked (PermissionError: not yours).']
    """
    try:
        yield from examine()
    except Exception as error:
        yield Check(
            group,
            name,
            "problem",
            f"It cannot be checked ({short(error)}).",
            "Mend that, and run `hiddenscope doctor` again.",
        )
