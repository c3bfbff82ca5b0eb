"""Which faults are planted where, and which harmless pairs there are: all of it follows from a number of rounds."""

from collections.abc import Iterator
from dataclasses import dataclass

from faults.models import FAMILIES, REAL, subject
from hiddenscope.testing.faults import HARMLESS, KINDS, UNNAMED

CORE = ("gpt2", "llama", "gemma3_text", "bert", "t5", "mixtral")  # these get a round more
# Changes of a run and not of a module: how texts are batched, threads, the padding side, and which side is the wider.
RUNS = ("one_at_a_time", "more_threads", "padding_side", "from_fp64", "from_bf16")
COMPILED = ("llama", "bert")  # a compiler takes seconds for each module
REAL_KINDS = 16
REAL_HARMLESS = ("copy", "attention_kernel", "attention_plain", "linear_split", "norm_by_hand", "bf16", "one_at_a_time")


@dataclass(frozen=True, order=True)
class Spec:
    """One pair to be compared: a model, what is done to a copy of it, and a seed. `group` is the list of the kind."""

    subject: str
    group: str  # "named", "unnamed", "harmless" or "run"
    kind: str
    seed: int = 0

    @property
    def fault(self) -> bool:
        return self.group in ("named", "unnamed")

    @property
    def rng(self) -> str:
        return f"{self.subject} {self.seed}"


def specs(rounds: int = 1, *, real: bool = True) -> list[Spec]:
    """Every pair: named and unnamed faults, and harmless pairs, in tiny models of every family and in a real one."""
    found = [spec for family in FAMILIES for spec in _tiny(family, rounds)]
    return [*found, *(_real() if real else ())]


def _tiny(family: str, rounds: int) -> Iterator[Spec]:
    module = subject(family).module
    for name, kind in KINDS.items():
        if kind.applies(module):
            yield from (Spec(family, "named", name, seed) for seed in range(rounds + (family in CORE)))
    for name, kind in UNNAMED.items():
        if kind.applies(module):
            yield from (Spec(family, "unnamed", name, seed) for seed in range(2 * rounds))
    for name, change in HARMLESS.items():
        if change.applies(module) and (name != "compiled" or family in COMPILED):
            yield from (Spec(family, "harmless", name, seed) for seed in range(1 if change.everywhere else 2))
    yield from (Spec(family, "run", name) for name in RUNS)


def _real() -> Iterator[Spec]:
    """A share of the kinds in the real model, spread over the list, and the harmless changes that are quick."""
    module = subject(REAL).module
    named = [name for name, kind in KINDS.items() if kind.applies(module)]
    step = max(1, len(named) // REAL_KINDS)
    yield from (Spec(REAL, "named", name) for name in named[::step][:REAL_KINDS])
    yield from (Spec(REAL, "unnamed", name) for name in UNNAMED)
    yield from (Spec(REAL, "run" if name in RUNS else "harmless", name) for name in REAL_HARMLESS)
