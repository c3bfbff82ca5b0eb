"""Circuits: which variable is written where, and by what.

Every variable is written as early as what it reads allows: by the embeddings, by a head
of a block's attention, or by a block's MLP, which also reads what the attention of its
block has written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from labs.truth.program import (
    Attended,
    Forced,
    Positions,
    Program,
    Tokens,
    Trace,
    Variable,
)

Part = Literal["embeddings", "attn", "mlp"]


@dataclass(frozen=True)
class Written:
    """Where one variable is written: by which part of which block, and which head."""

    variable: Variable
    part: Part
    block: int = 0
    head: int | None = None

    @property
    def step(self) -> tuple[int, int]:
        """Return its place in the order of the forward pass."""
        if self.part == "embeddings":
            return (-1, 0)
        return (self.block, int(self.part == "mlp"))

    @property
    def writer(self) -> str:
        """Return the site of what writes it: an embedding, a head or an MLP."""
        if self.part == "embeddings":
            return "embeddings"
        if self.part == "attn":
            return f"layer.{self.block + 1}.attn.head.{self.head}"
        return f"layer.{self.block + 1}.mlp"

    @property
    def first_site(self) -> str:
        """Return the first state of the residual stream that holds it."""
        if self.part == "embeddings":
            return "layer.0"
        suffix = ".mid" if self.part == "attn" else ""
        return f"layer.{self.block + 1}{suffix}"


@dataclass(frozen=True)
class Circuit:
    """The declared circuit of a program: all variables in the order of writing."""

    program: Program
    written: tuple[Written, ...]

    @property
    def blocks(self) -> int:
        """Return how many blocks it needs."""
        return max(1, 1 + max(place.block for place in self.written))

    @property
    def heads(self) -> int:
        """Return the largest number of heads in a block."""
        return 1 + max((place.head or 0) for place in self.written)

    def place(self, name: str) -> Written:
        """Return where a variable is written."""
        for place in self.written:
            if place.variable.name == name:
                return place
        raise KeyError(name)

    def readers(self, name: str) -> list[str]:
        """Return what reads a variable: heads, MLPs, and the unembedding."""
        readers = []
        for written in self.written:
            if any(read.name == name for read in written.variable.reads):
                readers.append(written.writer)
        if name == self.program.output.name:
            readers.append("unembedding")
        return list(dict.fromkeys(readers))

    def declared(self) -> list[dict[str, object]]:
        """Return the whole circuit: what is written where, by what, and read by what."""
        rows = []
        for written in self.written:
            name = written.variable.name
            rows.append(
                {
                    "variable": name,
                    "values": [str(value) for value in written.variable.values],
                    "first_site": written.first_site,
                    "writer": written.writer,
                    "readers": self.readers(name),
                }
            )
        return rows

    def present(self, site: str) -> list[str]:
        """Return the variables that a state of the residual stream holds.

        A site is `layer.2`, or `layer.2.mid` between the attention and the MLP.
        """
        block = int(site.split(".")[1]) - 1
        last = (block, 0 if site.endswith(".mid") else 1)
        if block < 0:
            last = (-1, 0)
        return [each.variable.name for each in self.written if each.step <= last]

    def sites(self, blocks: int | None = None) -> list[str]:
        """Return the states of the residual stream, from the bottom up."""
        sites = ["layer.0"]
        for block in range(blocks or self.blocks):
            sites += [f"layer.{block + 1}.mid", f"layer.{block + 1}"]
        return sites

    def patched(
        self, site: str, place: int, tokens: Sequence[str], donor: Trace
    ) -> Trace:
        """Run the program with one state of the residual stream from another run."""
        trace = self.program.run(tokens)
        forced: dict[tuple[str, int], object] = {}
        for name in self.present(site):
            # At other positions, what was written before the site stays as it was.
            for other, value in enumerate(trace[name]):
                forced[name, other] = value
            forced[name, place] = donor[name][place]
        return self.program.run(tokens, forced)

    def with_writer(
        self, writer: str, places: Sequence[int], tokens: Sequence[str], donor: Trace
    ) -> Trace:
        """Run the program with what one head or MLP writes from another run."""
        forced: Forced = {}
        for each in self.written:
            if each.writer == writer:
                name = each.variable.name
                forced |= {(name, place): donor[name][place] for place in places}
        return self.program.run(tokens, forced)


def circuit_of(program: Program) -> Circuit:
    """Place every variable of a program, as early as possible."""
    placed: dict[str, Written] = {}
    heads_in: dict[int, int] = {}
    for variable in program.variables:
        if isinstance(variable, Tokens | Positions):
            placed[variable.name] = Written(variable, "embeddings")
            continue
        reads = [placed[read.name].step for read in variable.reads]
        last_block, last_part = max(reads)
        if isinstance(variable, Attended):
            # Attention reads what stood there before its block.
            block = last_block + 1
            head = heads_in.get(block, 0)
            heads_in[block] = head + 1
            placed[variable.name] = Written(variable, "attn", block, head)
            continue
        # An MLP reads what the attention of its block wrote.
        is_after_attention = last_block >= 0 and last_part == 0
        block = last_block if is_after_attention else last_block + 1
        placed[variable.name] = Written(variable, "mlp", max(block, 0))
    written = sorted(placed.values(), key=lambda each: each.step)
    return Circuit(program, tuple(written))
