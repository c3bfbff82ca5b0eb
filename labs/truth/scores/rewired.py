"""Ways to rewire one part of a module, and to store it otherwise but equal.

Every host has the same parts under names of its own. All changes are written in terms
of matrices `[output, input]`, whatever way round a host stores them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from labs.truth.circuit import Written
from labs.truth.known import KnownModel
from labs.truth.train import HEADS

Way: TypeAlias = Callable[[nn.Module], "Rewiring"]

PROJECTIONS = ("query", "key", "value")


@dataclass(frozen=True)
class PartNames:
    """The paths of a host's modules; those in a block begin behind the block's path."""

    embeddings: str
    blocks: str
    query: str
    key: str
    value: str
    output: str
    reads: tuple[str, ...]
    writes: str
    unembedding: str
    norm: str | None = None


GPT2 = PartNames(
    embeddings="transformer.wte",
    blocks="transformer.h",
    query="attn.c_attn",
    key="attn.c_attn",
    value="attn.c_attn",
    output="attn.c_proj",
    reads=("mlp.c_fc",),
    writes="mlp.c_proj",
    unembedding="lm_head",
    norm="transformer.ln_f",
)
NAMES = {
    "plain": PartNames(
        embeddings="tokens",
        blocks="blocks",
        query="query",
        key="key",
        value="value",
        output="output",
        reads=("reads",),
        writes="writes",
        unembedding="unembedding",
    ),
    "gpt2": GPT2,
    "trained": GPT2,
    "opt": PartNames(
        embeddings="model.decoder.embed_tokens",
        blocks="model.decoder.layers",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.out_proj",
        reads=("fc1",),
        writes="fc2",
        unembedding="lm_head",
        norm="model.decoder.final_layer_norm",
    ),
    "bert": PartNames(
        embeddings="bert.embeddings.word_embeddings",
        blocks="bert.encoder.layer",
        query="attention.self.query",
        key="attention.self.key",
        value="attention.self.value",
        output="attention.output.dense",
        reads=("intermediate.dense",),
        writes="output.dense",
        unembedding="cls.predictions.decoder",
    ),
    "llama": PartNames(
        embeddings="model.embed_tokens",
        blocks="model.layers",
        query="self_attn.q_proj",
        key="self_attn.k_proj",
        value="self_attn.v_proj",
        output="self_attn.o_proj",
        reads=("mlp.gate_proj", "mlp.up_proj"),
        writes="mlp.down_proj",
        unembedding="lm_head",
        norm="model.norm",
    ),
}


@dataclass(frozen=True)
class Rewiring:
    """What was rewired: in which module, and which site is the first that can move."""

    name: str
    module: str
    site: str


class Rewirer:
    """Changes one part in a copy of a known model's module.

    What is changed is drawn anew by every call.
    """

    def __init__(self, known: KnownModel, seed: int = 0) -> None:
        self.known = known
        self.names = NAMES[known.host]
        self.chance = random.Random(seed)
        self.heads = _heads(known)

    def ways(self) -> list[Way]:
        """Return every way of rewiring that this model has."""
        ways: list[Way] = [self.embeddings, self.scores, self.values, self.unembedding]
        if self._written("mlp"):
            ways.append(self.neuron)
        if self.names.norm is not None:
            ways.append(self.norm)
        return ways

    def embeddings(self, changed: nn.Module) -> Rewiring:
        """Exchange the embeddings of two letters."""
        first, second = self.chance.sample(self.known.program.letters, 2)
        weight = _weight(changed, self.names.embeddings)
        _swap(weight, self.known.id(first), self.known.id(second))
        return Rewiring("embeddings", self.names.embeddings, "layer.0")

    def scores(self, changed: nn.Module) -> Rewiring:
        """Negate the queries of a head of the circuit, so that it looks elsewhere."""
        place = self._drawn("attn")
        for rows in self._head_rows(changed, place.block, "query"):
            rows[place.head or 0].neg_()
        path = self._path(place.block, self.names.query)
        return Rewiring("scores", path, f"layer.{place.block + 1}")

    def values(self, changed: nn.Module) -> Rewiring:
        """Exchange what two of the values of a head of the circuit write."""
        place = self._drawn("attn")
        path = self._path(place.block, self.names.output)
        matrix = self._matrix(changed, path)
        used = len(place.variable.values)
        if place.variable.is_numeric:
            # A number is one value: it changes places with one that is always zero.
            used = 2
        first, second = self.chance.sample(range(used), 2)
        columns = self._by_head(matrix.T)
        _swap(columns[place.head or 0], first, second)
        return Rewiring("values", path, f"layer.{place.block + 1}")

    def neuron(self, changed: nn.Module) -> Rewiring:
        """Negate what one neuron writes."""
        place = self._drawn("mlp")
        path = self._path(place.block, self.names.writes)
        matrix = self._matrix(changed, path)
        matrix[:, self.chance.randrange(matrix.shape[1])].neg_()
        return Rewiring("neuron", path, f"layer.{place.block + 1}")

    def norm(self, changed: nn.Module) -> Rewiring:
        """Double the gain of one channel in the final norm."""
        assert self.names.norm is not None
        gain = _weight(changed, self.names.norm)
        gain[self.chance.randrange(len(gain))].mul_(2)
        return Rewiring("norm", self.names.norm, "final")

    def unembedding(self, changed: nn.Module) -> Rewiring:
        """Exchange the rows of two answers."""
        values = [str(value) for value in self.known.program.output.values]
        first, second = self.chance.sample(values, 2)
        weight = _weight(changed, self.names.unembedding)
        _swap(weight, self.known.id(first), self.known.id(second))
        return Rewiring("unembedding", self.names.unembedding, "logits")

    def forget(self, changed: nn.Module, letter: str) -> None:
        """Empty the embedding of one letter."""
        _weight(changed, self.names.embeddings)[self.known.id(letter)] = 0

    def permute_neurons(self, changed: nn.Module) -> None:
        """Put the neurons of every MLP into another order, which computes the same."""
        for block in range(self._blocks(changed)):
            writes = self._matrix(changed, self._path(block, self.names.writes))
            order = self._shuffled(writes.shape[1])
            _reorder(writes.T, order)
            for name in self.names.reads:
                for rows in self._rows(changed, self._path(block, name)):
                    _reorder(rows, order)

    def permute_heads(self, changed: nn.Module) -> None:
        """Put the heads of every block into another order, which computes the same."""
        for block in range(self._blocks(changed)):
            order = self._shuffled(self.heads)
            for name in PROJECTIONS:
                for rows in self._head_rows(changed, block, name):
                    _reorder(rows, order)
            output = self._matrix(changed, self._path(block, self.names.output))
            _reorder(self._by_head(output.T), order)

    def _written(self, part: str) -> list[Written]:
        return [each for each in self.known.circuit.written if each.part == part]

    def _drawn(self, part: str) -> Written:
        return self.chance.choice(self._written(part))

    def _shuffled(self, count: int) -> list[int]:
        """Return another order than the one that is there."""
        order = list(range(count))
        while count > 1 and order == sorted(order):
            self.chance.shuffle(order)
        return order

    def _blocks(self, module: nn.Module) -> int:
        blocks = module.get_submodule(self.names.blocks)
        assert isinstance(blocks, nn.ModuleList)
        return len(blocks)

    def _path(self, block: int, name: str) -> str:
        return f"{self.names.blocks}.{block}.{name}"

    def _matrix(self, module: nn.Module, path: str) -> Tensor:
        weight = _weight(module, path)
        if isinstance(module.get_submodule(path), Conv1D):
            return weight.T
        return weight

    def _rows(self, module: nn.Module, path: str) -> list[Tensor]:
        """Return what has a row for every output: the matrix, and the bias if any."""
        bias = getattr(module.get_submodule(path), "bias", None)
        matrix = self._matrix(module, path)
        return [matrix] if bias is None else [matrix, bias.data]

    def _head_rows(self, module: nn.Module, block: int, name: str) -> list[Tensor]:
        """Return the rows of one of the three projections, `[head, row, ...]`."""
        by_head = []
        for rows in self._rows(module, self._path(block, getattr(self.names, name))):
            if self.names.query == self.names.value:
                # One matrix holds all three.
                rows = rows.chunk(3)[PROJECTIONS.index(name)]
            by_head.append(self._by_head(rows))
        return by_head

    def _by_head(self, rows: Tensor) -> Tensor:
        """Return a view of rows, those of each head by themselves."""
        return rows.view(self.heads, -1, *rows.shape[1:])


def _heads(known: KnownModel) -> int:
    """Return how many heads each block has."""
    if known.host == "trained":
        return HEADS
    # One more than the circuit has: the idle one.
    return known.circuit.heads + 1


def _weight(module: nn.Module, path: str) -> Tensor:
    weight = module.get_submodule(path).weight
    assert isinstance(weight, Tensor)
    return weight.data


def _swap(rows: Tensor, first: int, second: int) -> None:
    """Exchange two rows in place."""
    rows[[first, second]] = rows[[second, first]]


def _reorder(rows: Tensor, order: list[int]) -> None:
    """Put rows into another order in place."""
    rows.copy_(rows[order])
