"""Commits: the record that makes a unit visible, and the record of all records."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hiddenscope.errors import Damaged
from hiddenscope.store import records
from hiddenscope.store.folder import LARGE, SMALL, StoreFolder
from hiddenscope.store.plan import StorePlan

COMMIT = "hiddenscope.store.commit"
COMPLETE = "hiddenscope.store.complete"


@dataclass(frozen=True)
class Commit:
    """The record of a unit: its plan, and the SHA-256 and the length of its shard.

    `blocks` is the SHA-256 of the table of block checksums at the end of the shard. A
    record holds no time, host or process, so that whoever computes a unit writes the
    same.
    """

    plan: str
    unit: str
    sha256: str
    size: int
    blocks: str

    def encode(self) -> bytes:
        """Return the bytes of commits/<unit>.json."""
        return records.encode_record({"format": COMMIT, **asdict(self)})


@dataclass(frozen=True)
class Complete:
    """The record of all records: the SHA-256 of every unit's shard."""

    plan: str
    units: Mapping[str, str]

    def encode(self) -> bytes:
        """Return the bytes of complete.json."""
        fields = {"format": COMPLETE, "plan": self.plan, "units": dict(self.units)}
        return records.encode_record(fields)


def committed(folder: StoreFolder, plan: StorePlan, unit: str) -> Commit:
    """Read the record of a unit, checked by itself and against the plan."""
    problem = f"Cannot read unit {unit} of {folder.shown}"
    fields = records.decode(folder.read(folder.record(unit), SMALL), problem)
    digests = [fields.get(name) for name in ("plan", "sha256", "blocks")]
    if (
        fields.pop("format", None) != COMMIT
        or not all(map(records.is_digest, digests))
        or type(fields.get("size")) is not int
        or len(fields) != 5
    ):
        raise Damaged(problem, "its record is not one of a unit", records.VERIFY)
    commit = Commit(**fields)
    _check_plan(commit.plan, plan, problem)
    if commit.unit != unit:
        reason = f"its record is of unit {str(commit.unit)[:20]!r}"
        raise Damaged(problem, reason, records.VERIFY)
    return commit


def completed(folder: StoreFolder, plan: StorePlan) -> Complete | None:
    """Read the record of all records, checked; None while there is none."""
    if not folder.complete.is_symlink() and not folder.complete.exists():
        return None
    problem = f"Cannot read {folder.shown}"
    fields = records.decode(folder.read(folder.complete, LARGE), problem)
    units = fields.get("units")
    lists_units = isinstance(units, dict) and set(units) == set(plan.by_name)
    if fields.get("format") != COMPLETE or not lists_units:
        reason = "complete.json does not list the units of the plan"
        raise Damaged(problem, reason, records.VERIFY)
    _check_plan(fields.get("plan"), plan, problem)
    return Complete(plan.digest, fields["units"])


def _check_plan(digest: object, plan: StorePlan, problem: str) -> None:
    if digest != plan.digest:
        named = str(digest)[:12]
        raise Damaged(
            problem,
            f"its record is of another plan ({named}), so plan.json was changed",
            "Put back the plan.json that the store was made with.",
        )
