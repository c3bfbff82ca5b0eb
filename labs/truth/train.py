"""Train a small GPT-2 so that a declared circuit is the one it uses.

Three losses are added. The model must answer as the program does. If what one head or
MLP of the circuit writes at one position is exchanged for that of another run, it must
answer as the program does with that component's variables exchanged (interchange; Geiger
et al., 2022). And whatever is exchanged outside the circuit, any components at any
positions, the answers must stay (strictness; Gupta et al., 2024).
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

from labs.truth.circuit import Circuit, circuit_of
from labs.truth.exchange import Component, Exchanging, Recording
from labs.truth.hosts import POSITIONS
from labs.truth.known import KnownModel
from labs.truth.program import Program, Trace, Value
from labs.truth.tally import Question, Scorecard

FEWEST_BLOCKS, HEADS, WIDTH, NEURONS = 2, 4, 64, 256
# The learning rate is multiplied by the decay after every round.
BATCH, LEARNING_RATE, DECAY = 128, 2e-3, 0.9
# Steps of training, in rounds after each of which the model is examined.
ROUND, MOST_ROUNDS = 100, 40
# A training ends when every component does this well; fewer batches are examined until
# then than at the end.
ENOUGH, EXAMINED_BATCHES, FINAL_BATCHES = 0.99, 4, 8

ACCURACY = Question("training", "inputs whose answers are all the program's", "0.00")
INTERCHANGED = Question(
    "training",
    "exchanges of a component after which all answers are the program's",
    "that of a model trained on answers alone",
)
STRICT = Question(
    "training",
    "exchanges of everything outside the circuit after which all answers stay",
    "that of a model trained on answers alone",
)


class Exchange(NamedTuple):
    """A batch in which components are exchanged, with the answers before and after.

    `is_exchanged` is `[row, position]`.
    """

    components: Sequence[Component]
    bases: list[tuple[str, ...]]
    donors: list[tuple[str, ...]]
    is_exchanged: Tensor
    plain: list[list[Value]]
    wanted: list[list[Value]]


@dataclass(frozen=True)
class Trained:
    """A trained model, its examination, and how many steps it took.

    `untaught` is the examination of a model that was trained on the answers alone.
    """

    known: KnownModel
    steps: int
    examination: Scorecard
    untaught: Scorecard


class Trainer:
    """One training: a program, its circuit, and the module that learns both.

    If it is not `taught` the circuit, it learns the answers alone.
    """

    def __init__(self, program: Program, *, taught: bool = True, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.program = program
        self.circuit = circuit_of(program)
        self.taught = taught
        self.chance = random.Random(seed)
        self.module = untrained(program, self.circuit)
        # An MLP may write several variables.
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

    def train(self) -> int:
        """Train until an examination is passed, and return the number of steps."""
        optimizer = torch.optim.AdamW(self.module.parameters(), LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
        for number in range(1, MOST_ROUNDS + 1):
            self.module.train()
            for _ in range(ROUND):
                loss: Any = self._loss()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                optimizer.step()
            schedule.step()
            if self._is_passed():
                return number * ROUND
        raise RuntimeError(
            f"{self.program.name} was not learned in {MOST_ROUNDS * ROUND:,} steps"
        )

    def _loss(self) -> Tensor:
        """Return the sum of the losses, on a batch each."""
        exchange = self._draw_interchange(self.chance.choice(list(self.variables)))
        base, exchanged = self._logits(exchange)
        loss = self._cross_entropy(base, exchange.plain)
        if not self.taught:
            return loss
        loss = loss + self._cross_entropy(exchanged, exchange.wanted)
        other = self._draw_outside(self.chance.random())
        _, exchanged = self._logits(other)
        return loss + self._cross_entropy(exchanged, other.wanted)

    def _draw_interchange(self, component: Component) -> Exchange:
        """Draw a batch in which one component is exchanged at one position."""
        bases, donors = self._inputs()
        is_exchanged = torch.zeros(BATCH, len(bases[0]), dtype=torch.bool)
        plain, wanted = [], []
        for row, (base, donor) in enumerate(zip(bases, donors, strict=True)):
            position = self.chance.randrange(len(base))
            is_exchanged[row, position] = True
            plain.append(self._answers(self._run(base), base))
            donated = self._run(donor)
            forced = []
            for name in self.variables[component]:
                forced.append((name, position, donated[name][position]))
            wanted.append(self._answers_with(base, tuple(forced)))
        return Exchange([component], bases, donors, is_exchanged, plain, wanted)

    def _draw_outside(self, share: float) -> Exchange:
        """Draw a batch in which a share of all others is exchanged, anywhere."""
        bases, donors = self._inputs()
        components = []
        for component in self.others:
            if self.chance.random() <= share:
                components.append(component)
        shape = BATCH, len(bases[0])
        chances = [self.chance.random() for _ in range(shape[0] * shape[1])]
        is_exchanged = torch.tensor(chances).view(shape) <= share
        plain = [self._answers(self._run(base), base) for base in bases]
        return Exchange(components, bases, donors, is_exchanged, plain, plain)

    def _inputs(self) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
        """Draw two batches of inputs, all of one length."""
        length = self.chance.choice(self.program.lengths)
        inputs = []
        for _ in range(2 * BATCH):
            letters = self.chance.choices(self.program.letters, k=length)
            inputs.append(tuple(self.program.input_of(letters)))
        return inputs[:BATCH], inputs[BATCH:]

    def _answers(self, trace: Trace, tokens: Sequence[str]) -> list[Value]:
        return [trace["output"][place] for place in self.program.answers(tokens)]

    def _uncached_answers_with(
        self, tokens: tuple[str, ...], exchanged: tuple[tuple[str, int, Value], ...]
    ) -> list[Value]:
        """Return what the program answers with some variables exchanged."""
        forced = {(name, position): value for name, position, value in exchanged}
        return self._answers(self.program.run(tokens, forced), tokens)

    def _logits(self, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Return the logits of the answers, as they are and with the exchange."""
        bases, donors = self._tensor(exchange.bases), self._tensor(exchange.donors)
        with Recording(self.module, exchange.components) as recording:
            both = self.module(torch.cat([bases, donors])).logits
        donated = {}
        for component, written in recording.written.items():
            donated[component] = written[BATCH:]
        with Exchanging(self.module, exchange.is_exchanged, donated):
            exchanged = self.module(bases).logits
        places = self.program.answers(exchange.bases[0])
        return both[:BATCH, places], exchanged[:, places]

    def _tensor(self, rows: Sequence[Sequence[Value]]) -> Tensor:
        ids = []
        for row in rows:
            ids.append([self.ids[str(token)] for token in row])
        return torch.tensor(ids)

    def _cross_entropy(self, logits: Tensor, wanted: list[list[Value]]) -> Tensor:
        targets = self._tensor(wanted).flatten()
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets)

    def _is_passed(self) -> bool:
        """Tell whether every component does well enough."""
        for component in [*self.variables, None]:
            card = self.examine(component, EXAMINED_BATCHES)
            for question, cases in card.cases.items():
                is_asked = self.taught or question is ACCURACY
                if is_asked and sum(cases) < ENOUGH * len(cases):
                    return False
        return True

    @torch.no_grad()
    def examine(self, component: Component | None, batches: int) -> Scorecard:
        """Exchange a component of the circuit, or everything outside it if None."""
        self.module.eval()
        card = Scorecard()
        seen: set[tuple[str, ...]] = set()
        for _ in range(batches):
            if component is None:
                self._count(self._draw_outside(1.0), STRICT, card, seen)
            else:
                exchange = self._draw_interchange(component)
                self._count(exchange, INTERCHANGED, card, seen)
        return card

    def _count(
        self,
        exchange: Exchange,
        question: Question,
        card: Scorecard,
        seen: set[tuple[str, ...]],
    ) -> None:
        """Count every row, but inputs that were seen before and idle exchanges."""
        base, exchanged = self._logits(exchange)
        plain, wanted = self._tensor(exchange.plain), self._tensor(exchange.wanted)
        is_accurate = (base.argmax(-1) == plain).all(1)
        is_as_wanted = (exchanged.argmax(-1) == wanted).all(1)
        # An exchange within the circuit that changes nothing asks nothing.
        asks = (plain != wanted).any(1)
        if question is STRICT:
            asks[:] = True
        for row, tokens in enumerate(exchange.bases):
            if tokens not in seen:
                card.count(ACCURACY, bool(is_accurate[row]))
            seen.add(tokens)
            if asks[row]:
                card.count(question, bool(is_as_wanted[row]))

    def final_examination(self) -> Scorecard:
        """Examine every component at length."""
        total = Scorecard()
        for component in [*self.variables, None]:
            card = self.examine(component, FINAL_BATCHES)
            for question, cases in card.cases.items():
                # Answers without any exchange are the same for every component.
                if question is not ACCURACY or component is None:
                    total.cases.setdefault(question, []).extend(cases)
        return total


def train(program: Program) -> Trained:
    """Train a model with its circuit, and one on the answers alone beside it."""
    trainer = Trainer(program)
    steps = trainer.train()
    known = KnownModel("trained", program, trainer.circuit, trainer.module.eval())
    untaught = Trainer(program, taught=False)
    untaught.train()
    return Trained(
        known, steps, trainer.final_examination(), untaught.final_examination()
    )


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
