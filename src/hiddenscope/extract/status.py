"""Status: what a job will cost, and how far it is."""

from dataclasses import asdict, dataclass
from typing import Any

# Damaged files and units that are named.
MAX_NAMED = 5


@dataclass(frozen=True)
class JobProgress:
    """How far a job is, of the units that were pending when it began.

    Speeds count what this job committed itself, so `seconds_left` is too long while
    another job works on the same store. `tokens_done` are those of units that are kept;
    `tokens_computed` also counts the batches of units that are still at work.
    """

    units: int
    units_done: int
    tokens: int
    tokens_done: int
    tokens_computed: int
    bytes_written: int
    seconds: float
    tokens_per_second: float
    seconds_left: float | None

    def line(self) -> str:
        """Return the progress as one line of text."""
        parts = [
            f"{self.tokens_computed:,} of {self.tokens:,} tokens",
            f"{self.units_done:,} of {self.units:,} units kept",
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.seconds_left is not None:
            parts.append(f"{format_duration(self.seconds_left)} left")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the progress as a dict for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class JobCost:
    """What a job will cost, as it was when the job was planned: `run` does not change
    it.

    `units_left` and `bytes_left` are what was not in the store yet. All `tokens` are
    computed; the states of `tokens_kept` of them are written, or in a pooled store of
    none. `damaged` are the files of the plan and the units that were damaged or lost
    since the store was begun, and are written again.
    """

    texts: int
    duplicates: int
    skipped: int
    sequences: int
    tokens: int
    tokens_kept: int
    sites: int
    units: int
    units_left: int
    bytes: int
    bytes_left: int
    bytes_free: int
    damaged: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the cost as lines of text."""
        notes = []
        if self.duplicates:
            notes.append(f"{self.duplicates:,} of them copies of others")
        if self.skipped:
            notes.append(f"{self.skipped:,} broken lines left out besides")
        texts = f"{self.texts:,} texts"
        if notes:
            texts += f" ({', '.join(notes)})"
        tokens = f"{self.tokens:,} tokens"
        if 0 < self.tokens_kept < self.tokens:
            tokens += f" ({self.tokens_kept:,} of them kept)"

        plural = "" if self.units == 1 else "s"
        units = f"{self.units:,} unit{plural}, {format_size(self.bytes)}"
        if self.units_left != self.units:
            units += f"; {self.units - self.units_left:,} are there already"

        left = (
            f"still to write: {format_size(self.bytes_left)}"
            f" ({format_size(self.bytes_free)} free on this disk)"
        )

        lines = [f"{texts}, {tokens}, {self.sites} sites", units, left]
        if self.damaged:
            named = ", ".join(self.damaged[:MAX_NAMED])
            if len(self.damaged) > MAX_NAMED:
                named += f" and {len(self.damaged) - MAX_NAMED:,} more"
            lines.append(f"damaged, and made again: {named}")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Return the cost as a dict for JSON."""
        return asdict(self)


def format_duration(seconds: float) -> str:
    """Return seconds as a person says them.

    >>> format_duration(9), format_duration(200), format_duration(9000)
    ('9 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def format_size(count: float) -> str:
    """Return a number of bytes as a person says it.

    >>> format_size(150), format_size(1500), format_size(2.5e9)
    ('150 bytes', '1.5 kB', '2.5 GB')
    """
    for power, prefix in ((4, "T"), (3, "G"), (2, "M"), (1, "k")):
        if count >= 1000**power:
            return f"{count / 1000**power:.1f} {prefix}B"
    return f"{count:.0f} bytes"
