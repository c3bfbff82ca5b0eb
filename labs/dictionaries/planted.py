"""One fault in a sound dictionary, and the words that must name what fits."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.layouts import WORDS
from hiddenscope.directions.proof import scaled

SPARSE = ("topk", "threshold")
PARTS = ("attn", "mid", "mlp")


class Fault(NamedTuple):
    """A fault: what it does to a dictionary, and what a refusal has to say."""

    plant: Callable[[Dictionary], Dictionary]
    named: str


def faults(dictionary: Dictionary) -> dict[str, Fault]:
    """Return the faults that can be planted in a dictionary, by name."""
    encoding = dictionary.encoding
    cases = {}
    for name, step in (("one layer too low", -1), ("one layer too high", 1)):
        cases[name] = Fault(lambda sound, step=step: _moved(sound, step), "at layer.2")
    if dictionary.reads == dictionary.writes:
        cases["bias of the decoder not subtracted"] = Fault(
            _encoded(centred=False), "bias subtracted"
        )
        cases["bias of the decoder lost"] = Fault(_without_bias, "may be missing")
        cases["states scaled"] = Fault(_scaled, "states not scaled")
    if encoding.gate == "topk" and encoding.k:
        cases["half of its k"] = Fault(_encoded(k=encoding.k // 2), "; with k=")
    if encoding.threshold is not None:
        higher = encoding.threshold * 2.5
        cases["thresholds 2.5 times as high"] = Fault(
            _encoded(threshold=higher), "; with thresholds"
        )
    if encoding.gate in SPARSE:
        cases["activation lost, read as ReLU"] = Fault(
            _encoded(gate="relu"), "largest activations alone, or a threshold"
        )
    if encoding.gate != "relu":
        cases["called standard in its configuration"] = Fault(
            _called_standard, f"ReLU, and holds .*, as {WORDS[encoding.gate]}"
        )
    if encoding.gate == "relu":
        cases["ReLU read as TopK"] = Fault(
            _encoded(gate="topk", k=4), "with ReLU instead"
        )
    if encoding.gate == "threshold":
        cases["norm of directions left out of the threshold"] = Fault(
            _unequal, "with the norm of the directions"
        )
    return cases


def misplaced() -> dict[str, Fault]:
    """Return what takes a dictionary of the layer for one of its parts, by name."""
    cases = {}
    for part in PARTS:
        there = _at(f"layer.2.{part}")
        cases[f"called {part} of its layer"] = Fault(there, "; at layer.2, ")
    return cases


def _at(site: str) -> Callable[[Dictionary], Dictionary]:
    return lambda sound: replace(sound, reads=site, writes=site)


def _moved(dictionary: Dictionary, step: int) -> Dictionary:
    ends = []
    for site in (dictionary.reads, dictionary.writes):
        ends.append(site.replace("layer.2", f"layer.{2 + step}"))
    return replace(dictionary, reads=ends[0], writes=ends[1])


def _encoded(**fields: Any) -> Callable[[Dictionary], Dictionary]:
    return lambda sound: replace(sound, encoding=replace(sound.encoding, **fields))


def _without_bias(dictionary: Dictionary) -> Dictionary:
    return replace(dictionary, bias=torch.zeros_like(dictionary.bias))


def _scaled(dictionary: Dictionary) -> Dictionary:
    return replace(scaled(dictionary, 0.3), facts={"scale": 0.3})


def _called_standard(dictionary: Dictionary) -> Dictionary:
    """Save it, change its configuration, and read it."""
    with TemporaryDirectory() as folder:
        dictionary.save(folder)
        path = Path(folder) / "cfg.json"
        config = json.loads(path.read_text(encoding="utf-8"))
        config["architecture"] = "standard"
        path.write_text(json.dumps(config), encoding="utf-8")
        return Dictionary.read(folder)


def _unequal(dictionary: Dictionary) -> Dictionary:
    """Give directions other norms, which change nothing if the threshold knows them."""
    generator = torch.Generator().manual_seed(0)
    norms = torch.rand(len(dictionary), generator=generator) * 4 + 0.2
    encoding = dictionary.encoding
    assert encoding.threshold is not None
    sizes = dictionary.directions.norm(dim=1)
    return replace(
        dictionary,
        directions=dictionary.directions * norms[:, None],
        encoder=dictionary.encoder / norms,
        encoder_bias=dictionary.encoder_bias / norms,
        encoding=replace(encoding, threshold=encoding.threshold * sizes),
    )
