"""Commit and Complete: the record that makes a unit visible, and the record of all
records.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hiddenscope.errors import Damaged
from hiddenscope.store import records
from hiddenscope.store.folder import LARGE, SMALL, StoreFolder
from hiddenscope.store.plan import StorePlan

COMMIT, COMPLETE = "hiddenscope.store.commit", "hiddenscope.store.complete"


@dataclass(frozen=True)
class Commit:
    """One unit's record: its plan, and the SHA-256 and the length of its shard.

    `blocks` is the SHA-256 of the table of block checksums at the end of the shard; the
    record's format has that key. It holds no time, no host and no process, so that
    whoever computes a unit writes the same.
    """

    plan: str
    unit: str
    sha256: str
    size: int
    blocks: str

    def encode(self) -> bytes:
        """The bytes of commits/<unit>.json."""
        return records.encode({"format": COMMIT, **asdict(self)})


@dataclass(frozen=True)
class Complete:
    """The record of all records: the SHA-256 of every unit's shard."""

    plan: str
    units: Mapping[str, str]

    def encode(self) -> bytes:
        """The bytes of complete.json."""
        return records.encode(
            {"format": COMPLETE, "plan": self.plan, "units": dict(self.units)}
        )


def committed(folder: StoreFolder, plan: StorePlan, unit: str) -> Commit:
    """The record of a unit, checked by itself and against the plan."""
    problem = f"Cannot read unit {unit} of {folder.shown}"
    fields = records.decode(folder.read(folder.record(unit), SMALL), problem)
    hashes = all(
        records.is_digest(fields.get(name)) for name in ("plan", "sha256", "blocks")
    )
    if (
        fields.pop("format", None) != COMMIT
        or not hashes
        or type(fields.get("size")) is not int
        or len(fields) != 5
    ):
        raise Damaged(problem, "its record is not one of a unit", records.VERIFY)
    commit = Commit(**fields)
    _same_plan(commit.plan, plan, problem)
    if commit.unit != unit:
        raise Damaged(
            problem, f"its record is of unit {str(commit.unit)[:20]!r}", records.VERIFY
        )
    return commit


def completed(folder: StoreFolder, plan: StorePlan) -> Complete | None:
    """The record of all records, checked; None while there is none."""
    if not folder.complete.is_symlink() and not folder.complete.exists():
        return None
    problem = f"Cannot read {folder.shown}"
    fields = records.decode(folder.read(folder.complete, LARGE), problem)
    units = fields.get("units")
    if (
        fields.get("format") != COMPLETE
        or not isinstance(units, dict)
        or set(units) != set(plan.by_name)
    ):
        raise Damaged(
            problem, "complete.json does not list the units of the plan", records.VERIFY
        )
    _same_plan(fields.get("plan"), plan, problem)
    return Complete(plan.digest, units)


def _same_plan(named: object, plan: StorePlan, problem: str) -> None:
    if named != plan.digest:
        reason = (
            f"its record is of another plan ({str(named)[:12]}), so plan.json was"
            " changed"
        )
        raise Damaged(
            problem, reason, "Put back the plan.json that the store was made with."
        )
