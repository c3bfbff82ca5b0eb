"""Results that are kept member by member, so that a job can be resumed.

A member has two files: its result, as `Result.save` writes it, and a record with its
key. The record is written last: without it the result does not count, so that a job
which is killed at any instant loses at most the member that it was computing. The key
hashes the weights, the analysis, its options, the texts and the versions of libraries:
whatever is different has another key, and is computed.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hiddenscope import progress
from hiddenscope.errors import Error, FileError
from hiddenscope.files import UNSEALED, check_seal, replacing, seal
from hiddenscope.results import Result

FORMAT = 1
LONGEST_NAME = 60
DIGITS = 16


@dataclass(frozen=True)
class MemberRecord:
    """What was seen of a member while it was loaded.

    `source` is that of its states, and `depths` and `widths` have one number for each
    stack. `tokens` is how many tokens it made of the texts, and `ids` their hash.
    """

    source: dict[str, Any]
    depths: dict[str, int]
    widths: dict[str, int]
    tokens: int
    ids: str


@dataclass(frozen=True)
class MemberAnswer:
    """The result of one member, with its record."""

    result: Result
    record: MemberRecord


class ResultsFolder:
    """The folder of a job, which is made if it is not there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FileError(
                f"Cannot keep results in {str(self.path)[:200]}",
                error.strerror or "it cannot be made",
                "Give a folder, or a path where one can be made.",
            ) from error

    def read(self, name: str, key: str) -> MemberAnswer | None:
        """Return the answer of a member if it was kept, and None if not."""
        record_path, result_path = self._paths(name, key)
        if not record_path.is_file():
            return None
        try:
            check_seal(record_path, f"Cannot read {record_path.name}")
            content = json.loads(record_path.read_text("utf-8"))
            if content["key"] != key or content["format"] != FORMAT:
                return None
            record = MemberRecord(**content["record"])
            return MemberAnswer(Result.load(result_path), record)
        except (Error, OSError, ValueError, KeyError, TypeError) as error:
            progress.note(f"{record_path.name}: computed again ({error})")
            return None

    def write(self, name: str, key: str, answer: MemberAnswer) -> None:
        """Keep the answer of a member: the result first, then the record."""
        record_path, result_path = self._paths(name, key)
        answer.result.save(result_path)
        content = {
            "format": FORMAT,
            "key": key,
            "member": name,
            "result": result_path.name,
            "record": asdict(answer.record),
            "seal": UNSEALED,
        }
        with replacing(record_path) as fresh:
            fresh.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            seal(fresh)

    def _paths(self, name: str, key: str) -> tuple[Path, Path]:
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:LONGEST_NAME]
        stem = f"{safe or 'member'}-{key[:DIGITS]}"
        return self.path / f"{stem}.member.json", self.path / f"{stem}.nc"
