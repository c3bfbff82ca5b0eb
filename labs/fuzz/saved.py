"""Single bits flipped in every kind of file that is saved, and in models in the cache.

What was flipped must be refused, or make no difference. And headers with other values,
in files whose seal was made again: whatever they say is loaded or refused.
"""

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

import hiddenscope as hs
from hiddenscope.files import UNSEALED, seal, write_tensors
from labs.fuzz import folders
from labs.fuzz.calls import LABELS, TEXTS, model, result, states
from labs.fuzz.sandbox import Case


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """This many flips in each kind of file."""
    for kind, (path, read) in _sound(work).items():
        for number in range(count):
            chance = random.Random(f"{kind} {seed} {number}")
            yield Case(
                f"saved {kind}",
                f"{kind} {seed}/{number}",
                _flipped(path, read, chance, work),
            )
            if kind != "nc":
                yield Case(
                    f"sealed {kind}",
                    f"sealed {kind} {seed}/{number}",
                    _resealed(path, read, chance, work),
                )
    for number in range(count):
        chance = random.Random(f"cached {seed} {number}")
        yield Case(
            "cached model", f"cached {seed}/{number}", _flipped_cache(chance, work)
        )


@cache
def _sound(work: Path) -> dict[str, tuple[Path, Callable[[Path], Any]]]:
    folder = work / "sound"
    folder.mkdir(parents=True, exist_ok=True)
    probe = hs.Probe().fit(states().pool("mean", "layer.1").numpy(), LABELS)
    lens = hs.Lens.fit(model(), TEXTS, "jacobian")
    made: dict[str, tuple[Any, str, Callable[[Path], Any]]] = {
        "states": (
            states(),
            "states.safetensors",
            lambda path: hs.States.load(path).values.tolist(),
        ),
        "json": (result(), "result.json", lambda path: _content(hs.Result.load(path))),
        "nc": (result(), "result.nc", lambda path: _content(hs.Result.load(path))),
        "lens": (lens, "lens.safetensors", lambda path: _lens(hs.Lens.load(path))),
        "probe": (
            probe,
            "probe.safetensors",
            lambda path: hs.Probe.load(path).coef_.tolist(),
        ),
    }
    for value, name, _ in made.values():
        value.save(folder / name)
    return {kind: (folder / name, read) for kind, (_, name, read) in made.items()}


def _content(loaded: hs.Result) -> str:
    return repr(
        (loaded.kind, loaded.data.to_dict(), dict(loaded.facts), dict(loaded.source))
    )


def _lens(loaded: hs.Lens) -> str:
    maps = [
        [part.tolist() for part in vars(one).values() if isinstance(part, torch.Tensor)]
        for one in loaded.maps.values()
    ]
    return repr((loaded.kind, maps, loaded.model, loaded.weights, dict(loaded.facts)))


def _flip(path: Path, chance: random.Random) -> None:
    with path.open("r+b") as file:
        at = chance.randrange(path.stat().st_size)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << chance.randrange(8)]))


def _flipped(
    sound: Path, read: Callable[[Path], Any], chance: random.Random, work: Path
) -> Callable[[], str]:
    def attempt() -> str:
        folder = work / f"case-{os.getpid()}"
        folder.mkdir()
        try:
            path = folder / sound.name
            shutil.copy(sound, path)
            _flip(path, chance)
            return "loaded" if read(path) == read(sound) else "different"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return attempt


def _resealed(
    sound: Path, read: Callable[[Path], Any], chance: random.Random, work: Path
) -> Callable[[], str]:
    def attempt() -> str:
        folder = work / f"case-{os.getpid()}"
        folder.mkdir()
        try:
            path = folder / sound.name
            if path.suffix == ".json":
                content = _mutated(json.loads(sound.read_text()), chance)
                path.write_text(json.dumps(content | {"seal": UNSEALED}))
                seal(path)
            else:
                with safe_open(sound, framework="pt") as file:
                    header = {**file.metadata()}
                for name in set(header) - {"format", "seal"}:
                    header[name] = json.dumps(_mutated(_parsed(header[name]), chance))
                write_tensors(path, load_file(sound), header)
            read(path)
            return "loaded"
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return attempt


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"": text}


def _mutated(content: Any, chance: random.Random) -> Any:
    places = folders._places(content)
    if not places:
        return folders._value(chance)
    container, key = chance.choice(places)
    container[key] = folders._value(chance)
    return content


def _flipped_cache(chance: random.Random, work: Path) -> Callable[[], str]:
    """A GGUF file is converted into a cache, and a bit of any file there flipped before
    the second load.
    """
    sound = folders.sound_gguf(work)
    cached = work / "sound" / "cache"

    def attempt() -> str:
        folder = work / f"case-{os.getpid()}"
        try:
            os.environ["HIDDENSCOPE_CACHE"] = str(cached)
            expected = hs.load(sound).module.state_dict()
            # not what another case is writing there at this moment
            shutil.copytree(
                cached, folder / "cache", ignore=shutil.ignore_patterns(".*")
            )
            os.environ["HIDDENSCOPE_CACHE"] = str(folder / "cache")
            hs.load(sound)
            files = sorted(
                path
                for path in (folder / "cache" / "gguf").rglob("*")
                if path.is_file()
            )
            _flip(chance.choice(files), chance)
            again = hs.load(sound).module.state_dict()
            return (
                "loaded"
                if all(torch.equal(expected[name], again[name]) for name in expected)
                else "different"
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return attempt
