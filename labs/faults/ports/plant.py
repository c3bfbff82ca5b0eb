"""Faults in ports: where each kind can be planted, how, and what is then true of it.

A code fault is a mistake that one part makes in its own forward. A weight fault is a
wrong parameter of one module. Both are planted in one block or in every block. What is
declared can be checked without hiddenscope: with the modules at `path` exchanged for
those of a sound port, the port is sound.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hiddenscope.errors import ModuleError
from labs.faults.planted.fault import Planted
from labs.faults.ports.layouts import PortLayout
from labs.faults.ports.maths import EPS_FACTOR, Part, Port

SCALE = 1.05
# The expert that faults are planted in; every text of some length has tokens for it.
EXPERT = 1

# What a hint may truly say of a kind. Any other hint is false of it, unless it says
# what was not compared.
TRUE_HINTS: dict[str, tuple[str, ...]] = {
    "weight_scaled": ("scaled_weight", "changed_weight", "scale"),
    "rows_exchanged": ("permuted_weight", "changed_weight"),
    "bias_missing": ("missing_bias", "zeroed_weight", "changed_weight"),
    "values_scaled": ("scaled_weight", "changed_weight"),
    "queries_keys_exchanged": (
        "permuted_weight",
        "exchanged_weight",
        "exchanged_parts",
        "changed_weight",
    ),
    "experts_exchanged": ("exchanged_weight", "exchanged_parts", "changed_weight"),
    "block_of_another": ("swapped_layer", "exchanged_weight", "changed_weight"),
    "activation": ("activation",),
    "gate_up_exchanged": ("exchanged_parts",),
    "norm_eps": ("norm_eps", "attribute"),
    "norm_identity": ("not_applied",),
    "scale_missing": ("attention_scale", "attribute"),
    "mask_off_by_one": ("mask_looks_ahead",),
    "mask_missing": ("mask_missing",),
    "mask_added": ("causal_mask_added",),
    "kv_heads_tiled": ("kv_heads",),
    "rope_base": ("rope_base", "block_argument"),
    "rope_keys_missing": ("rope_keys_missing",),
    "positions_off_by_one": ("position_off_by_one",),
}
NOT_COMPARED = "not_compared"

PACKED = "the packed weights of this module cannot be called by themselves"
LOOP = "the reference computes all experts in one module"
NO_LAYOUT = "no block agrees, so no layout can be told from a fault"
WHOLE = "every weight of it is wrong, so every module with a weight in it is wrong too"
FOLDED = (
    "the weight of the last norm is in the head: the two can only be compared together"
)
OUTSIDE = "the table is made outside the blocks and handed to them"


@dataclass(frozen=True)
class PortFault:
    """A kind of fault and its place: a path inside a block, or with `outside` a path in
    the port.
    """

    kind: str
    place: str
    every: bool = False
    outside: bool = False

    @property
    def name(self) -> str:
        """Return the fault in words: its kind, its place and its extent."""
        words = [
            self.kind,
            *([self.place] if self.place else []),
            *(["everywhere"] if self.every else []),
        ]
        return " ".join(words)


@dataclass(frozen=True)
class PlantedInPort(Planted):
    """A fault in a port, with what is true of it.

    `also` are modules that are as right as `path`. `sites` are sites that are as right
    as the first. `code` says that the fault is in the own forward code of `path` and
    nowhere else. `hints` are those that may truly be given. `reserved` are correct
    modules that may be named if it is said that what they were given was not compared.
    `repaired` are the modules that must be exchanged for sound ones to make the port
    sound.
    """

    code: bool = False
    sites: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    reserved: tuple[str, ...] = ()
    repaired: tuple[str, ...] = field(default=())

    def names(self, path: str | None, hints: Sequence[str] = ()) -> str:
        """Judge a named module: `right`, `larger` than need be, `wrong` or `none`.

        A container of the faulty module is larger, and right if nothing smaller is
        certain. The port itself is no container: naming it says that the fault is
        outside all its parts. A reserved module is right with the hint that what it was
        given was not compared.
        """
        if path is None:
            return "none"
        if path in self.paths or (path in self.reserved and NOT_COMPARED in hints):
            return "right"
        return "larger" if path and self.path.startswith(f"{path}.") else "wrong"

    def claims_falsely(self, path: str | None, *, own_code: bool) -> bool:
        """Check whether it is false that the fault is in a module's own code."""
        return own_code and not (self.code and path == self.path)

    def false_hints(self, hints: Sequence[str]) -> list[str]:
        """Return the hints that are false."""
        return [hint for hint in hints if hint not in (*self.hints, NOT_COMPARED)]


def faults_of(layout: PortLayout) -> list[PortFault]:
    """List every fault of a port: in one block, in every block, and outside them."""
    port = layout.port(layout.reference())
    blocks = port.get_submodule(port.block_list)
    block = blocks.get_submodule("0")
    single = [*_in_code(block), *_in_weights(block)]
    single.append(PortFault("block_of_another", ""))
    return [*single, *_everywhere(single), *_outside(port)]


def _in_code(block: nn.Module) -> Iterator[PortFault]:
    """Mistakes that the parts of a block can make in their own code."""
    for path, part in block.named_modules():
        if _other_expert(path):
            continue
        if isinstance(part, Part):
            yield from (PortFault(mistake, path) for mistake in part.mistakes)
        if isinstance(part, nn.LayerNorm):
            yield PortFault("norm_eps", path)
        if isinstance(part, nn.GELU):
            yield PortFault("activation", path)


def _other_expert(path: str) -> bool:
    """Check whether a path is in an expert that no faults are planted in."""
    _, separator, after = f"{path}.".partition("experts.")
    return bool(separator and after) and not after.startswith(f"{EXPERT}.")


def _in_weights(block: nn.Module) -> Iterator[PortFault]:
    """Wrong parameters of the modules of a block."""
    for path, part in block.named_modules():
        if _other_expert(path):
            continue
        if isinstance(part, nn.MultiheadAttention):
            kinds = ("queries_keys_exchanged", "values_scaled", "bias_missing")
            yield from (PortFault(kind, path) for kind in kinds)
            continue
        if path.endswith("experts"):
            yield PortFault("experts_exchanged", path)
        if _weight(part) is not None:
            yield PortFault("weight_scaled", path)
        if (
            (weight := _weight(part)) is not None
            and len(weight) > 1
            and weight.ndim > 1
        ):
            yield PortFault("rows_exchanged", path)
        if _bias_name(part):
            yield PortFault("bias_missing", path)


def _everywhere(single: list[PortFault]) -> Iterator[PortFault]:
    """List the same fault in every block: each kind in its first place."""
    kinds = {fault.kind: fault for fault in reversed(single)}
    for fault in single:
        if kinds[fault.kind] is fault and fault.kind not in (
            "block_of_another",
            "experts_exchanged",
        ):
            yield PortFault(fault.kind, fault.place, every=True)


def _outside(port: Port) -> Iterator[PortFault]:
    """Faults before and after the blocks."""
    for mistake in port.mistakes:
        yield PortFault(mistake, "", outside=True)
    for name in port.roles:
        part = port.get_submodule(name)
        if isinstance(part, nn.ModuleList):
            continue
        if isinstance(part, Part):
            mistakes = [
                mistake for mistake in part.mistakes if mistake != "norm_identity"
            ]
            yield from (PortFault(mistake, name, outside=True) for mistake in mistakes)
        if _weight(part) is not None:
            yield PortFault("weight_scaled", name, outside=True)


def plant(
    layout: PortLayout, reference: nn.Module, fault: PortFault | str, seed: int = 0
) -> PlantedInPort:
    """Make a port with a fault, in a block that follows from the seed.

    >>> from labs.faults.ports import PORTS
    >>> meta = PORTS["meta-llama"]
    >>> planted = plant(meta, meta.reference(), "activation feed_forward")
    >>> planted.first_site, planted.path, planted.code
    ('layer.4', 'layers.3.feed_forward', True)
    """
    if isinstance(fault, str):
        fault = _by_name(layout, fault)
    port = layout.port(reference)
    count = len(list(port.get_submodule(port.block_list).children()))
    number = random.Random(f"{layout.name} {fault.name} {seed}").randrange(count)
    if fault.every or fault.outside:
        number = 0
    numbers = range(count) if fault.every else [number]
    starts = [f"{port.block_list}.{block}" for block in numbers]
    paths = (
        [fault.place]
        if fault.outside
        else [_joined(start, fault.place) for start in starts]
    )
    with torch.no_grad():
        for path in paths:
            _change(port, path, fault)
    return _declared(port, fault, paths, number)


def _by_name(layout: PortLayout, name: str) -> PortFault:
    known = {fault.name: fault for fault in faults_of(layout)}
    if name not in known:
        problem = f"Cannot plant {name!r} in {layout.name}"
        raise ModuleError(
            problem, f"there are {', '.join(known)}", "Ask for one of these."
        )
    return known[name]


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def _change(port: Port, path: str, fault: PortFault) -> None:
    """Plant a fault at one path."""
    part = port.get_submodule(path)
    if isinstance(part, Part) and fault.kind in part.mistakes:
        part.mistake = fault.kind
        return
    if fault.kind == "block_of_another":
        _take_over(port, path)
        return
    CHANGES[fault.kind](part)


def _take_over(port: Port, path: str) -> None:
    """Give a block the weights of the next, or the last those of the first."""
    start, _, number = path.rpartition(".")
    blocks = port.get_submodule(start)
    count = len(list(blocks.children()))
    other = blocks.get_submodule(str((int(number) + 1) % count))
    port.get_submodule(path).load_state_dict(other.state_dict())


def _weight(part: nn.Module) -> Tensor | None:
    """Return the only weight that a module holds itself."""
    names = ("weight", "w", "gain", "scale")
    held = [part._parameters.get(name) for name in names]
    return next((weight for weight in held if weight is not None), None)


def _bias_name(part: nn.Module) -> str:
    """Return the name of the bias that a module holds itself, or nothing."""
    names = ("bias", "b", "shift", "in_proj_bias")
    return next((name for name in names if part._parameters.get(name) is not None), "")


def _scale_weight(part: nn.Module) -> None:
    weight = _weight(part)
    assert weight is not None
    weight.mul_(SCALE)


def _exchange_rows(part: nn.Module) -> None:
    weight = _weight(part)
    assert weight is not None
    weight[[0, 1]] = weight[[1, 0]].clone()


def _drop_bias(part: nn.Module) -> None:
    name = _bias_name(part)
    packed = isinstance(part, NonDynamicallyQuantizableLinear)
    if packed or name in ("shift", "in_proj_bias"):
        # Torch's kernels for these have no form with a weight and without a bias.
        getattr(part, name).zero_()
    else:
        part.register_parameter(name, None)


def _exchange_queries_and_keys(part: nn.Module) -> None:
    for weight in (part.in_proj_weight, part.in_proj_bias):
        assert isinstance(weight, Tensor)
        query, key, value = weight.chunk(3)
        weight.copy_(torch.cat([key, query, value]))


def _scale_values(part: nn.Module) -> None:
    weight = part.in_proj_weight
    assert isinstance(weight, Tensor)
    weight[2 * len(weight) // 3 :] *= SCALE


def _exchange_experts(part: nn.Module) -> None:
    first, second = part.get_submodule(str(EXPERT - 1)), part.get_submodule(str(EXPERT))
    states = [
        {name: weight.clone() for name, weight in expert.state_dict().items()}
        for expert in (first, second)
    ]
    first.load_state_dict(states[1])
    second.load_state_dict(states[0])


def _raise_eps(part: nn.Module) -> None:
    assert isinstance(part, nn.LayerNorm)
    part.eps *= EPS_FACTOR


def _other_gelu(part: nn.Module) -> None:
    assert isinstance(part, nn.GELU)
    part.approximate = "tanh"


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    "weight_scaled": _scale_weight,
    "rows_exchanged": _exchange_rows,
    "bias_missing": _drop_bias,
    "queries_keys_exchanged": _exchange_queries_and_keys,
    "values_scaled": _scale_values,
    "experts_exchanged": _exchange_experts,
    "norm_eps": _raise_eps,
    "activation": _other_gelu,
}


def _declared(
    port: Port, fault: PortFault, paths: list[str], number: int
) -> PlantedInPort:
    """Say what is true of a fault that was planted."""
    block = f"{port.block_list}.{number}"
    path = paths[0]
    part = port.get_submodule(path)
    code = isinstance(part, Part) and fault.kind in part.mistakes
    also, why = _as_right(port, fault, path, block)
    first, *sites = (
        _outside_sites(port, fault) if fault.outside else [f"layer.{number + 1}"]
    )
    return PlantedInPort(
        fault.kind,
        port,
        first,
        path,
        also,
        why,
        f"{fault.name} in {path or 'the port itself'}",
        code=code,
        sites=tuple(sites),
        hints=_true_hints(fault),
        reserved=_reserved(port, fault, block),
        repaired=tuple(paths),
    )


def _true_hints(fault: PortFault) -> tuple[str, ...]:
    """Return the hints that are true.

    Scores are as much too large as queries or keys are.
    """
    hints = TRUE_HINTS.get(fault.kind, ())
    role = fault.place.rpartition(".")[2]
    if fault.kind == "weight_scaled" and role in ("q", "k", "wq", "wk", "query", "key"):
        return (*hints, "attention_scale")
    return hints


def _as_right(
    port: Port, fault: PortFault, path: str, block: str
) -> tuple[tuple[str, ...], str]:
    """Return the modules that are as right as the smallest, and why."""
    part = port.get_submodule(path)
    inner = tuple(
        f"{path}.{name}"
        for name, each in part.named_modules()
        if name and each._parameters
    )
    if fault.kind == "block_of_another":
        return inner, WHOLE
    if fault.kind == "experts_exchanged":
        experts = [f"{path}.{number}" for number in (EXPERT - 1, EXPERT)]
        wrong = [
            name
            for name in inner
            if any(name.startswith(f"{expert}.") for expert in experts)
        ]
        return (path.rpartition(".")[0], *experts, *wrong), WHOLE
    if fault.outside:
        return _as_right_outside(port, fault)
    containers = tuple(_containers(path, block))
    if fault.every:
        return containers, NO_LAYOUT
    mixture, inside, _ = path.partition(".experts.")
    if inside and fault.kind == "activation":
        return (
            tuple(
                name
                for name in containers
                if name.startswith(f"{mixture}.") or name == mixture
            ),
            LOOP,
        )
    if path.endswith("mha.out_proj"):
        return (path.rpartition(".")[0],), PACKED
    return (), ""


def _containers(path: str, block: str) -> Iterator[str]:
    """Return the modules that hold a module, up to its block."""
    while path != block:
        path = path.rpartition(".")[0]
        yield path


def _as_right_outside(port: Port, fault: PortFault) -> tuple[tuple[str, ...], str]:
    if fault.kind == "rope_base":
        return ("",), OUTSIDE
    if fault.place in port.roles[-2:] and _is_folded(port):
        return ("",), FOLDED
    return (), ""


def _is_folded(port: Port) -> bool:
    """Check whether the last norm has no weight of its own."""
    return not list(port.get_submodule(port.roles[-2]).parameters())


def _outside_sites(port: Port, fault: PortFault) -> list[str]:
    """Return the first site of a fault outside the blocks, and those as right."""
    if fault.kind == "rope_base":
        return ["layer.1"]
    place = port.roles.index(fault.place) if fault.place else 0
    if place < port.roles.index(port.block_list):
        return ["layer.0"]
    last_norm = (
        len(port.roles) == port.roles.index(port.block_list) + 3
        and place == len(port.roles) - 2
    )
    if not last_norm:
        return ["logits"]
    return ["logits", "final"] if _is_folded(port) else ["final"]


def _reserved(port: Port, fault: PortFault, block: str) -> tuple[str, ...]:
    """Return the correct modules that receive something wrong beside the state."""
    if fault.kind == "rope_base" and fault.outside:
        holder = port.get_submodule(block)
        return (block, *(f"{block}.{name}" for name, _ in holder.named_children()))[:3]
    masked = fault.kind.startswith("mask_") and not fault.outside
    names = [name for name, _ in port.get_submodule(block).named_children()]
    return (f"{block}.mha",) if masked and "mha" in names else ()
