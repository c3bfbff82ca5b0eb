"""The facts of an anatomy."""

from typing import Literal, TypedDict


class PartFacts(TypedDict):
    """Where a part of a block can be read."""

    site: str
    module: str
    block_kind: str


class AnatomyStackFacts(TypedDict):
    """What one stack is made of, and what was proved about it."""

    stack: str
    blocks: int
    width: int
    block_kind: str
    causal: bool
    final_norm: str | None
    exit: list[str]
    parts: list[PartFacts]
    proof: Literal["hidden_states", "resuming"]
    proved_entries: int
    earlier_entries: int
    largest_difference: float
    raw_difference: float | None


class HeadFacts(TypedDict):
    """The module that computes the logits."""

    path: str
    reads_final: bool
    gives_logits: bool
    tied: bool


class AnatomyFacts(TypedDict):
    """What a model is made of."""

    model_class: str
    stacks: list[AnatomyStackFacts]
    head: HeadFacts | None
    makes_logits: bool
    padded_batches: bool
    notes: list[str]
