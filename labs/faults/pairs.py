"""List the pairs to compare: faults, harmless changes, runs and ports."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from labs.faults.models import FAMILIES, REAL, subject
from labs.faults.planted import HARMLESS, KINDS, UNNAMED
from labs.faults.ports import PORTS, faults_of

# These get a round more.
CORE = (
    "gpt2",
    "llama",
    "gemma3_text",
    "bert",
    "t5",
    "mixtral",
)
# Changes of a run and not of a module: how texts are batched, threads, the padding
# side, and which side is the wider.
RUNS = ("one_at_a_time", "more_threads", "padding_side", "from_fp64", "from_bf16")
COMPILED = ("llama", "bert")  # a compiler takes seconds for each module
REAL_KINDS = 16
REAL_HARMLESS = (
    "copy",
    "attention_kernel",
    "attention_plain",
    "linear_split",
    "norm_by_hand",
    "bf16",
    "one_at_a_time",
)


SOUND = "sound"  # the kind of a port without a fault
SOUND_SEEDS = 3  # references that each port is made of without a fault
PORT_DTYPES = ("float32", "bfloat16")
# A compiler for every process; a model that comes back on the CPU.
NOT_ON_A_DEVICE = (
    "compiled",
    "round_trip",
)


@dataclass(frozen=True, order=True)
class Spec:
    """One pair to be compared: a model, what is done to a copy of it, and a seed.
    `group` is the list of the kind.

    `device` is where both are, or where each is: `cpu-cuda` has the reference on the
    CPU.
    """

    subject: str
    group: str  # "named", "unnamed", "harmless", "run" or "port"
    kind: str
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def fault(self) -> bool:
        return self.group in ("named", "unnamed") or (
            self.group == "port" and self.kind != SOUND
        )

    @property
    def rng(self) -> str:
        return f"{self.subject} {self.seed}"

    @property
    def reference(self) -> tuple[str, str, str, int]:
        """Return what the reference is built by; a port has another for every seed."""
        seed = self.seed if self.group == "port" else 0
        return self.subject, self.dtype, self.device.partition("-")[0], seed

    @property
    def candidate_device(self) -> str:
        return self.device.rpartition("-")[2]


def specs(rounds: int = 1, *, real: bool = True) -> list[Spec]:
    """List every pair, in tiny models and in a real one."""
    pairs: list[Spec] = []
    for family in FAMILIES:
        pairs += _tiny(family, rounds)
    for dtype in PORT_DTYPES:
        pairs += port_specs(dtype)
    if real:
        pairs += _real()
    return pairs


def device_specs(device: str) -> list[Spec]:
    """List the pairs for another device: both sides there, or the reference on the CPU.

    Named faults, unnamed ones and harmless changes once each, and all ports.
    """
    pairs = []
    for family in FAMILIES:
        for spec in _tiny(family, 1):
            is_change = spec.group != "run" and spec.kind not in NOT_ON_A_DEVICE
            if spec.seed == 0 and is_change:
                pairs.append(spec)
    pairs += port_specs("float32")
    there = [replace(spec, device=device) for spec in [*pairs, *port_specs("bfloat16")]]
    between = [replace(spec, device=f"cpu-{device}") for spec in pairs]
    return [*there, *between]


def port_specs(dtype: str) -> list[Spec]:
    """List the ports in one dtype: each fault once, and some without a fault."""
    pairs = []
    for name, layout in PORTS.items():
        kinds = [fault.name for fault in faults_of(layout)]
        pairs += [Spec(name, "port", kind, 0, dtype) for kind in kinds]
        pairs += [Spec(name, "port", SOUND, seed, dtype) for seed in range(SOUND_SEEDS)]
    return pairs


def _tiny(family: str, rounds: int) -> Iterator[Spec]:
    module = subject(family).module
    for name, kind in KINDS.items():
        if kind.applies(module):
            for seed in range(rounds + (family in CORE)):
                yield Spec(family, "named", name, seed)
    for name, kind in UNNAMED.items():
        if kind.applies(module):
            for seed in range(2 * rounds):
                yield Spec(family, "unnamed", name, seed)
    for name, change in HARMLESS.items():
        if change.applies(module) and (name != "compiled" or family in COMPILED):
            for seed in range(1 if change.everywhere else 2):
                yield Spec(family, "harmless", name, seed)
    for name in RUNS:
        yield Spec(family, "run", name)


def _real() -> Iterator[Spec]:
    """Yield some kinds in the real model, and the harmless changes that are quick."""
    module = subject(REAL).module
    named = [name for name, kind in KINDS.items() if kind.applies(module)]
    step = max(1, len(named) // REAL_KINDS)
    for name in named[::step][:REAL_KINDS]:
        yield Spec(REAL, "named", name)
    for name in UNNAMED:
        yield Spec(REAL, "unnamed", name)
    for name in REAL_HARMLESS:
        yield Spec(REAL, "run" if name in RUNS else "harmless", name)
