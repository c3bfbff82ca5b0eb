"""Train a small model so that a declared circuit is the one it uses.

Three losses are added. The model must answer as the program does. If what one head or
MLP writes at one position is exchanged for that of another run, it must answer as the
program does with that variable exchanged (interchange). And if anything that is not in
the circuit is exchanged, the answer must stay (strictness).
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
from truth.program import Program, Value

FEWEST_BLOCKS, HEADS, WIDTH, NEURONS = 2, 4, 64, 256
BATCH, LEARNING_RATE = 128, 2e-3
# Steps of training, in rounds after each of which the model is examined.
ROUND, MOST_ROUNDS = 250, 24
ENOUGH = 0.99
EXAMINED = 1_000


class Component(NamedTuple):
    """A head of a block's attention, or a block's MLP, whose head is None."""

    block: int
    head: int | None

    @property
    def site(self) -> str:
        """Return the site of what it writes."""
        if self.head is None:
            return f"layer.{self.block + 1}.mlp"
        return f"layer.{self.block + 1}.attn.head.{self.head}"


@dataclass(frozen=True)
class Examination:
    """How a model does on fresh inputs, as shares of the answers.

    `interchanged` counts only answers that the exchange changes in the program.
    """

    accuracy: float
    interchanged: float
    strict: float

    @property
    def is_enough(self) -> bool:
        """Tell whether all three are as good as they need to be."""
        return min(self.accuracy, self.interchanged, self.strict) >= ENOUGH


class Exchange(NamedTuple):
    """Rows of a batch whose component was exchanged, and what they should answer."""

    bases: list[tuple[str, ...]]
    donors: list[tuple[str, ...]]
    places: list[int]
    component: Component
    wanted: list[list[Value]]
    unchanged: list[list[Value]]


class Trainer:
    """One training: a program, its circuit, and the module that learns both."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.program = program
        self.circuit = circuit_of(program)
        self.chance = random.Random(seed)
        self.module = _module(program, self.circuit)
        self.variables: dict[Component, str] = {}
        for written in self.circuit.written:
            if written.part != "embeddings":
                component = Component(written.block, written.head)
                self.variables[component] = written.variable.name
        self.others = [
            each for each in self._components() if each not in self.variables
        ]
        self.ids = {token: row for row, token in enumerate(program.vocabulary)}
        self.answer = lru_cache(maxsize=None)(self._answer)
        self._trace = lru_cache(maxsize=None)(program.run)

    def _components(self) -> Iterator[Component]:
        for block in range(self.module.config.n_layer):
            for head in range(HEADS):
                yield Component(block, head)
            yield Component(block, None)

    def _answer(
        self,
        tokens: tuple[str, ...],
        name: str = "",
        place: int = 0,
        value: Value = None,
    ) -> list[Value]:
        """Return what the program answers, with one variable exchanged."""
        forced = {(name, place): value} if name else None
        return self.program.run(tokens, forced)["output"]

    def train(self) -> Examination:
        """Train until an examination is passed, or for the longest time."""
        optimizer = torch.optim.AdamW(self.module.parameters(), LEARNING_RATE)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, LEARNING_RATE, ROUND * MOST_ROUNDS, pct_start=0.05
        )
        examination = Examination(0, 0, 0)
        for _ in range(MOST_ROUNDS):
            self.module.train()
            for _ in range(ROUND):
                loss = self._loss()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
                optimizer.step()
                schedule.step()
            examination = self.examine()
            if examination.is_enough:
                break
        return examination

    def _loss(self) -> Tensor:
        """Return the sum of the three losses on a batch each."""
        exchange = self._draw(self.chance.choice(list(self.variables)))
        base, exchanged = self._logits(exchange)
        loss = self._cross_entropy(base, exchange.bases, exchange.unchanged)
        loss = loss + self._cross_entropy(exchanged, exchange.bases, exchange.wanted)
        if self.others:
            other = self._draw(self.chance.choice(self.others))
            _, exchanged = self._logits(other)
            loss = loss + self._cross_entropy(exchanged, other.bases, other.wanted)
        return loss

    def _draw(self, component: Component) -> Exchange:
        """Draw inputs of one length, and positions at which to exchange a component."""
        length = self.chance.choice(self.program.lengths)
        bases = [self._input(length) for _ in range(BATCH)]
        donors = [self._input(length) for _ in range(BATCH)]
        places = [self.chance.randrange(len(base)) for base in bases]
        name = self.variables.get(component)
        wanted, unchanged = [], []
        for base, donor, place in zip(bases, donors, places, strict=True):
            plain = self.answer(base)
            unchanged.append(plain)
            if name is None:
                wanted.append(plain)
                continue
            value = self._value(donor, name, place)
            wanted.append(self.answer(base, name, place, value))
        return Exchange(bases, donors, places, component, wanted, unchanged)

    def _input(self, length: int) -> tuple[str, ...]:
        letters = self.chance.choices(self.program.letters, k=length)
        return tuple(self.program.input_of(letters))

    def _value(self, tokens: tuple[str, ...], name: str, place: int) -> Value:
        return self._trace(tokens)[name][place]

    def _logits(self, exchange: Exchange) -> tuple[Tensor, Tensor]:
        """Return the logits of the bases, and those with the donors' component."""
        component = exchange.component
        bases, donors = self._tensor(exchange.bases), self._tensor(exchange.donors)
        with Recording(self.module, component) as recording:
            both = self.module(torch.cat([bases, donors])).logits
        donated = recording.written[len(bases) :]
        places = torch.tensor(exchange.places)
        with Exchanging(self.module, component, places, donated):
            exchanged = self.module(bases).logits
        return both[: len(bases)], exchanged

    def _tensor(self, inputs: Sequence[Sequence[str]]) -> Tensor:
        rows = [[self.ids[token] for token in tokens] for tokens in inputs]
        return torch.tensor(rows)

    def _cross_entropy(
        self, logits: Tensor, inputs: Sequence[Sequence[str]], wanted: list[list[Value]]
    ) -> Tensor:
        places = self.program.answers(inputs[0])
        targets = self._targets(wanted, places)
        return nn.functional.cross_entropy(logits[:, places].flatten(0, 1), targets)

    def _targets(self, wanted: list[list[Value]], places: list[int]) -> Tensor:
        rows = [[self.ids[str(values[place])] for place in places] for values in wanted]
        return torch.tensor(rows).flatten()

    @torch.no_grad()
    def examine(self) -> Examination:
        """Measure the three shares on fresh inputs."""
        self.module.eval()
        right = {"accuracy": [0, 0], "interchanged": [0, 0], "strict": [0, 0]}
        rounds = -(-EXAMINED // BATCH)
        for component in [*self.variables, *self.others]:
            for _ in range(rounds if component in self.variables else 1):
                self._count(self._draw(component), right)
        shares = {key: hits / max(1, total) for key, (hits, total) in right.items()}
        return Examination(**shares)

    def _count(self, exchange: Exchange, right: dict[str, list[int]]) -> None:
        base, exchanged = self._logits(exchange)
        places = self.program.answers(exchange.bases[0])
        plain = self._targets(exchange.unchanged, places)
        wanted = self._targets(exchange.wanted, places)
        said = base[:, places].flatten(0, 1).argmax(1)
        said_then = exchanged[:, places].flatten(0, 1).argmax(1)
        _add(right["accuracy"], said == plain)
        if exchange.component in self.variables:
            changed = plain != wanted
            _add(right["interchanged"], (said_then == wanted)[changed])
        else:
            _add(right["strict"], said_then == plain)


def _add(counts: list[int], hits: Tensor) -> None:
    counts[0] += int(hits.sum())
    counts[1] += len(hits)


class Recording:
    """Keeps what one component writes while the module is called."""

    def __init__(self, module: Any, component: Component) -> None:
        self.module, self.component = module, component
        self.written = torch.empty(0)

    def __enter__(self) -> Recording:
        block = self.module.transformer.h[self.component.block]
        if self.component.head is None:
            self._hook = block.mlp.register_forward_hook(self._keep_output)
        else:
            self._hook = block.attn.c_proj.register_forward_pre_hook(self._keep_head)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _keep_output(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.written = output

    def _keep_head(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.written = inputs[0][..., _numbers_of(self.component)]


class Exchanging:
    """Puts what a component wrote elsewhere into one position of each row."""

    def __init__(
        self, module: Any, component: Component, places: Tensor, donated: Tensor
    ) -> None:
        self.module, self.component = module, component
        self.places, self.donated = places, donated

    def __enter__(self) -> None:
        block = self.module.transformer.h[self.component.block]
        if self.component.head is None:
            self._hook = block.mlp.register_forward_hook(self._exchange_output)
        else:
            hooked = block.attn.c_proj
            self._hook = hooked.register_forward_pre_hook(self._exchange_head)

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()

    def _exchanged(self, written: Tensor) -> Tensor:
        rows = torch.arange(len(written))
        exchanged = written.clone()
        exchanged[rows, self.places] = self.donated[rows, self.places]
        return exchanged

    def _exchange_output(
        self, module: nn.Module, inputs: Any, output: Tensor
    ) -> Tensor:
        return self._exchanged(output)

    def _exchange_head(
        self, module: nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor]:
        numbers = _numbers_of(self.component)
        changed = inputs[0].clone()
        changed[..., numbers] = self._exchanged(changed[..., numbers])
        return (changed,)


def _numbers_of(component: Component) -> slice:
    assert component.head is not None
    width = WIDTH // HEADS
    return slice(component.head * width, (component.head + 1) * width)


def _module(program: Program, circuit: Circuit) -> Any:
    config = transformers.GPT2Config(
        vocab_size=len(program.vocabulary),
        n_positions=program.longest,
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
