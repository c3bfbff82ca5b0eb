"""What is true of a fault in a port, found with plain torch and without hiddenscope.

A module is at fault if the port is sound with a sound module in its place. It is the
smallest if no part of it would do. A site is the first if the port's state there is the
first that a fault changes.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from labs.faults.ports import PlantedInPort, Port, PortLayout

IDS = torch.randint(3, 128, (3, 16), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits(port: nn.Module, ids: Tensor) -> Tensor:
    """Run a port on whole texts of equal length."""
    out: Tensor = port(ids)
    return out


def objection(layout: PortLayout, reference: nn.Module, planted: PlantedInPort) -> str:
    """Say what a fault declares wrongly, if it moves the output at all."""
    sound = layout.port(reference)
    expected = logits(sound, IDS)
    if torch.equal(logits(planted.module, IDS), expected):
        return ""
    problems = [*_of_modules(sound, planted, expected), *_of_sites(sound, planted)]
    return "; ".join(
        f"{layout.name}, {planted.detail}: {problem}" for problem in problems
    )


def _of_modules(sound: Port, planted: PlantedInPort, expected: Tensor) -> Iterator[str]:
    """Say what is wrong about the modules."""
    if not _sound_with(sound, planted, planted.repaired, expected):
        yield f"a sound `{planted.path}` does not make it sound"
    # A module inside a child would make the child do as well, so children are all that
    # must be tried.
    for name, _ in sound.get_submodule(planted.path).named_children():
        smaller = tuple(f"{path}.{name}".strip(".") for path in planted.repaired)
        if _sound_with(sound, planted, smaller, expected):
            yield f"a sound `{smaller[0]}` is enough"
    for path in planted.also:
        holds = not path or planted.path.startswith(f"{path}.")
        if not holds and _same_weights(
            sound.get_submodule(path), planted.module.get_submodule(path)
        ):
            yield f"`{path}` is correct"


def _sound_with(
    sound: Port, planted: PlantedInPort, paths: tuple[str, ...], expected: Tensor
) -> bool:
    """Check whether the port is sound with sound modules at some paths."""
    if "" in paths:
        return True
    port = planted.module
    faulty = {path: port.get_submodule(path) for path in paths}
    for path in paths:
        port.set_submodule(path, sound.get_submodule(path))
    repaired = torch.equal(logits(port, IDS), expected)
    for path, part in faulty.items():
        port.set_submodule(path, part)
    return repaired


def _same_weights(first: nn.Module, second: nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def _of_sites(sound: Port, planted: PlantedInPort) -> Iterator[str]:
    """Say what is wrong about the first site."""
    port = planted.module
    assert isinstance(port, Port)
    ours, theirs = states(sound), states(port)
    changed = [site for site in ours if not torch.equal(ours[site], theirs[site])]
    first = changed[0]
    if first not in (planted.first_site, *planted.sites):
        yield f"declares {planted.first_site}, and {first} differs first"


@torch.no_grad()
def states(port: Port) -> dict[str, Tensor]:
    """Return the first block's input, all block outputs, the norm's, and the logits."""
    states: dict[str, Tensor] = {}
    blocks = list(port.get_submodule(port.block_list).children())
    start = port.roles.index(port.block_list)

    def entering(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        states["layer.0"] = args[0]

    def leaving(site: str) -> object:
        def hook(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> None:
            states[site] = output

        return hook

    handles = [blocks[0].register_forward_pre_hook(entering)]
    for number, block in enumerate(blocks, 1):
        handles.append(block.register_forward_hook(leaving(f"layer.{number}")))  # type: ignore[arg-type]
    # A port with one part between its blocks and its head has a last norm there; BERT's
    # head has two.
    if len(port.roles) == start + 3:
        norm = port.get_submodule(port.roles[-2])
        handles.append(norm.register_forward_hook(leaving("final")))  # type: ignore[arg-type]
    try:
        states["logits"] = port(IDS)
    finally:
        for handle in handles:
            handle.remove()
    return states
