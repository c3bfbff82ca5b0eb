"""Source: where states come from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from hiddenscope.errors import StatesError


@dataclass(frozen=True)
class Source:
    """Where states come from: the model and everything that decides its numbers.

    `depth` and `final` (how many blocks the stack has, whether a final norm) let `layer.-1` and `hidden_states[k]` be
    read when only some sites were kept; None means that all were. `cls` is the id of the tokenizer's classification
    token, `reported` the site that each entry of Hugging Face's `hidden_states` was proved to be ("" for none).

    >>> Source.from_json(Source("gpt2", dtype="float32").to_json()) == Source("gpt2", dtype="float32")
    True
    """

    model: str
    revision: str | None = None
    weights: str = ""
    dtype: str = ""
    device: str = ""
    attention: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    depth: int | None = None
    final: bool | None = None
    cls: int | None = None
    reported: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "notes", tuple(self.notes))
        object.__setattr__(self, "reported", tuple(self.reported))

    def to_json(self) -> dict[str, Any]:
        """As JSON takes it."""
        return asdict(self) | {"notes": list(self.notes), "reported": list(self.reported)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """From what `to_json` gave."""
        known = {name.name for name in fields(cls)}
        if not isinstance(data.get("model"), str) or not set(data) <= known:
            reason = f"it has {', '.join(sorted(map(ascii, data)))[:200] or 'no fields'}"
            raise StatesError("No source of states", reason, f"Its fields are {', '.join(sorted(known))}.")
        return cls(**data)
