"""Train a small GPT-2 so that a declared circuit is the one it uses.

Three losses are added. The model must answer as the program does. If what one head or
MLP writes at one position is exchanged for that of another run, it must answer as the
program does with what it writes exchanged (interchange). And if anything that is not in
the circuit is exchanged, the answers must stay (strictness).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from truth.circuit import Circuit, circuit_of
from truth.exchange import Component, Exchanging, Recording
from truth.hosts import POSITIONS
from truth.known import KnownModel
from truth.program import Program, Value
from truth.tally import Question, Scorecard

FEWEST_BLOCKS, HEADS, WIDTH, NEURONS = 2, 4, 64, 256
# The learning rate is multiplied by the decay after every round.
BATCH, LEARNING_RATE, DECAY = 128, 2e-3, 0.9
# Steps of training, in rounds after each of which the model is examined.
ROUND, MOST_ROUNDS = 100, 40
# A training ends when all shares are this good; fewer batches are examined until then.
ENOUGH, EXAMINED_BATCHES, FINAL_BATCHES = 0.99, 2, 8

ACCURACY = Question("training", "inputs whose answers are all the program's", "0.00")
INTERCHANGED = Question(
    "training",
    "exchanges of a variable after which all answers are the program's",
    "0.00: only exchanges that change an answer are counted",
)
STRICT = Question(
    "training",
    "exchanges outside the circuit after which all answers stay",
    "1.00 for a part that nothing reads",
)


class Exchange(NamedTuple):
    """A batch whose component is exchanged, with the answers before and after."""

    component: Component
    bases: list[tuple[str, ...]]
    donors: list[tuple[str, ...]]
    positions: list[int]
    plain: list[list[Value]]
    wanted: list[list[Value]]


@dataclass(frozen=True)
class Trained:
    """A trained model, its examination, and how many steps it took."""

    known: KnownModel
    examination: Scorecard
    steps: int


class Trainer:
    """One training: a program, its circuit, and the module that learns both."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.program = program
        self.circuit = circuit_of(program)
        self.chance = random.Random(seed)
        self.module = untrained(program, self.circuit)
        # An MLP may write several.
        self.variables: dict[Component, list[str]] = {}
        for written in self.circuit.written:
            if written.part != "embeddings":
                component = Component(written.block, written.head)
                names = self.variables.setdefault(component, [])
                names.append(written.variable.name)
        self.others = []
        for component in self._components():
            if component not in self.variables:
                self.others.append(component)
        self.ids = {token: row for row, token in enumerate(program.vocabulary)}
        # The same short inputs come up again and again.
        self._run = lru_cache(maxsize=None)(self.program.run)
        self._answers_with = lru_cache(maxsize=None)(self._uncached_answers_with)

    def _components(self) -> Iterator[Component]:
        for block in range(self.module.config.n_layer):
            for head in range(HEADS):
                yield Component(block, head)
            yield Component(block, None)

    def train(self) -> Trained:
        """Train until an examination is passed, or for the longest time."""
        optimizer = torch.optim.AdamW(self.module.parameters(), LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
        steps = 0
        for _ in range(MOST_ROUNDS):
            self.module.train()
            for _ in range(ROUND):
                loss = self._loss()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                optimizer.step()
            steps += ROUND
            schedule.step()
            if is_passed(self.examine(EXAMINED_BATCHES)):
                break
        self.module.eval()
        known = KnownModel("trained", self.program, self.circuit, self.module)
        return Trained(known, self.examine(FINAL_BATCHES), steps)

    def _loss(self) -> Tensor:
        """Return the sum of the three losses, on a batch each."""
        exchange = self._draw(self.chance.choice(list(self.variables)))
        base, exchanged = self._logits(exchange)
        loss = self._cross_entropy(base, exchange.plain)
        loss = loss + self._cross_entropy(exchanged, exchange.wanted)
        if self.others:
            other = self._draw(self.chance.choice(self.others))
            _, exchanged = self._logits(other)
            loss = loss + self._cross_entropy(exchanged, other.wanted)
        return loss

    def _draw(self, component: Component) -> Exchange:
        """Draw inputs of one length, and positions at which to exchange a component."""
        length = self.chance.choice(self.program.lengths)
        bases = [self._input(length) for _ in range(BATCH)]
        donors = [self._input(length) for _ in range(BATCH)]
        positions = [self.chance.randrange(len(base)) for base in bases]
        names = self.variables.get(component, [])
        plain, wanted = [], []
        for base, donor, position in zip(bases, donors, positions, strict=True):
            answers = self._answers(self._run(base), base)
            plain.append(answers)
            if names:
                donated = self._run(donor)
                forced = [(name, position, donated[name][position]) for name in names]
                answers = self._answers_with(base, tuple(forced))
            wanted.append(answers)
        return Exchange(component, bases, donors, positions, plain, wanted)

    def _input(self, length: int) -> tuple[str, ...]:
        letters = self.chance.choices(self.program.letters, k=length)
        return tuple(self.program.input_of(letters))

    def _answers(
        self, trace: dict[str, list[Value]], tokens: Sequence[str]
    ) -> list[Value]:
        return [trace["output"][place] for place in self.program.answers(tokens)]

    def _uncached_answers_with(
        self, tokens: tuple[str, ...], exchanged: tuple[tuple[str, int, Value], ...]
    ) -> list[Value]:
        """Return what the program answers with some variables exchanged."""
        forced = {(name, position): value for name, position, value in exchanged}
        return self._answers(self.program.run(tokens, forced), tokens)

    def _logits(self, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Return the logits of the answers, as they are and with the exchange."""
        component = exchange.component
        bases, donors = self._tensor(exchange.bases), self._tensor(exchange.donors)
        with Recording(self.module, component) as recording:
            both = self.module(torch.cat([bases, donors])).logits
        donated = recording.written[len(bases) :]
        positions = torch.tensor(exchange.positions)
        with Exchanging(self.module, component, positions, donated):
            exchanged = self.module(bases).logits
        places = self.program.answers(exchange.bases[0])
        return both[: len(bases), places], exchanged[:, places]

    def _tensor(self, rows: Sequence[Sequence[Value]]) -> Tensor:
        ids = []
        for row in rows:
            ids.append([self.ids[str(token)] for token in row])
        return torch.tensor(ids)

    def _cross_entropy(self, logits: Tensor, wanted: list[list[Value]]) -> Tensor:
        targets = self._tensor(wanted).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    @torch.no_grad()
    def examine(self, batches: int) -> Scorecard:
        """Count the three shares on inputs that are drawn anew."""
        self.module.eval()
        card = Scorecard()
        for component in [*self.variables, *self.others]:
            for _ in range(batches):
                self._count(self._draw(component), card)
        return card

    def _count(self, exchange: Exchange, card: Scorecard) -> None:
        base, exchanged = self._logits(exchange)
        plain, wanted = self._tensor(exchange.plain), self._tensor(exchange.wanted)
        is_accurate = (base.argmax(-1) == plain).all(1)
        is_as_wanted = (exchanged.argmax(-1) == wanted).all(1)
        changes_answers = (plain != wanted).any(1)
        for row in range(BATCH):
            card.count(ACCURACY, bool(is_accurate[row]))
            if exchange.component not in self.variables:
                card.count(STRICT, bool(is_as_wanted[row]))
            elif changes_answers[row]:
                card.count(INTERCHANGED, bool(is_as_wanted[row]))


def is_passed(examination: Scorecard) -> bool:
    """Tell whether all shares of an examination are good enough."""
    for cases in examination.cases.values():
        if sum(cases) < ENOUGH * len(cases):
            return False
    return True


def untrained(program: Program, circuit: Circuit) -> Any:
    """Build the module that is trained, with random weights."""
    config = transformers.GPT2Config(
        vocab_size=len(program.vocabulary),
        n_positions=POSITIONS,
        n_embd=WIDTH,
        n_layer=max(FEWEST_BLOCKS, circuit.blocks),
        n_head=HEADS,
        n_inner=NEURONS,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=None,
    )
    return transformers.GPT2LMHeadModel(config)
