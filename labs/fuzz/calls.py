"""Public functions and methods, called with one or two arguments of a wrong type or
value.

Each must answer, or raise one of hiddenscope's own errors.
"""

import math
import os
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer
from labs.fuzz.sandbox import Case

IDS = [[5, 6, 7, 8, 9], [9, 8, 7]]
TEXTS = [
    "The rest is silence.",
    "A cat sat on the mat.",
    "It is raining here.",
    "The dog ran home.",
] * 3
LABELS = ["a", "b", "a", "b"] * 3


@dataclass(frozen=True)
class Call:
    """A function with arguments that it takes."""

    name: str
    function: Callable[..., Any]
    arguments: Mapping[str, Any]


@cache
def model(family: str = "llama") -> hs.Model:
    """A tiny model with a tokenizer."""
    return hs.load((tiny_model(family), tiny_tokenizer(cls=family == "bert")))


@cache
def states() -> hs.States:
    """The states of some texts."""
    return model().capture(TEXTS, "layer.*")  # type: ignore[return-value]


@cache
def direction() -> hs.Direction:
    """A direction to steer along."""
    return hs.Direction.between(model(), TEXTS[:2], TEXTS[2:4], sites="layer.1")


@cache
def result() -> hs.Result:
    """A result of some analysis."""
    return hs.lens(model(), "The rest")


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "7": lambda: 7,
    "10**30": lambda: 10**30,
    "0.5": lambda: 0.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "complex": lambda: 1j,
    "empty string": lambda: "",
    "word": lambda: "nothing",
    "site": lambda: "layer.1",
    "no site": lambda: "layer.99",
    "null character": lambda: "a\0b",
    "surrogate": lambda: "\ud800",
    "long string": lambda: "x" * 300,
    "bytes": lambda: b"layer.1",
    "bytearray": lambda: bytearray(b"x"),
    "empty list": list,
    "list of an empty list": lambda: [[]],
    "list of None": lambda: [None],
    "list of strings": lambda: ["a", "b"],
    "mixed list": lambda: ["a", 1, None],
    "list of numbers": lambda: [1, 2.5],
    "nested list": lambda: [[[1, [2]]]],
    "ragged list": lambda: [[1, 2], [3]],
    "list of dicts": lambda: [{"a": 1}],
    "empty tuple": tuple,
    "pair": lambda: ("a", "b"),
    "empty dict": dict,
    "dict": lambda: {"a": 1},
    "dict of a site": lambda: {"layer.1": 3},
    "dict of numbers": lambda: {1: 2},
    "set": lambda: {1, "a"},
    "frozenset": lambda: frozenset(["a"]),
    "generator": lambda: (number for number in range(3)),
    "range": lambda: range(3),
    "object": object,
    "class": lambda: int,
    "function": lambda: len,
    "path": lambda: Path("no-such-file"),
    "folder": lambda: Path(),
    "slice": lambda: slice(1, 2),
    "array of 0 axes": lambda: np.array(3),
    "array": lambda: np.arange(3.0),
    "array of NaN": lambda: np.full((3, 4), np.nan),
    "array of objects": lambda: np.array([None, "a"], object),
    "array of strings": lambda: np.array(["a", "b"]),
    "empty array": lambda: np.zeros((0, 64)),
    "matrix": lambda: np.ones((4, 64), np.float32),
    "frame": lambda: pd.DataFrame({"text": ["a b", "c d"], "label": [0, 1]}),
    "empty frame": pd.DataFrame,
    "series": lambda: pd.Series(["a b", "c d"]),
    "tensor": lambda: torch.ones(4, 64),
    "tensor of integers": lambda: torch.tensor([1, 2]),
    "meta tensor": lambda: torch.ones(4, 64, device="meta"),
    "scalar tensor": lambda: torch.tensor(2.0),
    "dtype": lambda: torch.int32,
    "module": lambda: torch.nn.Linear(2, 2),
    "model": model,
    "another model": lambda: model("bert"),
    "states": states,
    "result": result,
    "direction": direction,
    "Site": lambda: hs.Site.parse("layer.1"),
    "Inputs": lambda: model().encode([[5, 6]]),
    "Scale": lambda: hs.Scale(2.0),
}


@cache
def calls() -> tuple[Call, ...]:
    """Every public function and method, with arguments that work."""
    own, some = model(), states()
    contrast = hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12)
    labelled = (TEXTS, LABELS)
    rows = some.pool("mean", "layer.1").numpy()
    probe = hs.Probe().fit(rows, LABELS)
    lens = hs.Lens.fit(own, TEXTS, "jacobian")
    made = [
        Call("load", hs.load, dict(source=(own.module, None), task=None, dtype=None, device=None, revision=None)),
        Call("encode", own.encode, dict(texts=TEXTS, targets=None, truncate=False)),
        Call("capture", own.capture, dict(texts=IDS, sites="layer.1", targets=None, batch_tokens=None, dtype=None)
             | dict(truncate=False, keep="host")),
        Call("capture_generation", own.capture_generation, dict(prompt=IDS[0], max_new_tokens=2, sites="layer.1")
             | dict(do_sample=False)),
        Call("source", own.source, dict(stack=None)),
        Call("record", hs.record, dict(model=own, inputs=IDS, sites="layer.1", targets=None, logits=True, grad=False)
             | dict(keep="host")),
        Call("edit", hs.edit, dict(model=own, inputs=IDS, changes={"layer.1": hs.Scale(2.0)}, sites="layer.2")
             | dict(targets=None, logits=True, grad=False)),
        Call("edit values", lambda **change: hs.edit(own, IDS, {"layer.1": hs.Replace(**change)}, "layer.2"),
             dict(values=torch.ones(64), tokens=[1])),
        Call("edit added", lambda **change: hs.edit(own, IDS, {"layer.1": hs.Add(**change)}, "layer.2"),
             dict(values=torch.ones(64), tokens=[1], scale=2.0)),
        Call("edit projected", lambda **change: hs.edit(own, IDS, {"layer.1": hs.Project(**change)}, "layer.2"),
             dict(direction=torch.ones(64), tokens=None)),
        Call("edit scaled", lambda **change: hs.edit(own, IDS, {"layer.1": hs.Scale(**change)}, "layer.2"),
             dict(factor=2.0, tokens=[1])),
        Call("editing", _entered(hs.editing), dict(model=own, changes={"layer.1": hs.Scale(2.0)})),
        Call("recording", _entered(hs.recording), dict(model=own, sites="layer.1")),
        Call("resume", hs.resume, dict(model=own, inputs=IDS, site="layer.2", values=torch.ones(8, 64), sites=None)
             | dict(logits=True, grad=False)),
        Call("anatomy", hs.anatomy, dict(model=own)),
        Call("profile", hs.profile, dict(source=own, texts=TEXTS, sites="layer.1", final_norm="apart", sample=10)
             | dict(targets=None, truncate=False)),
        Call("compare", hs.compare, dict(model=own, a=TEXTS[0], b=TEXTS[1], other=None, sites="layer.1", targets=None)
             | dict(truncate=False)),
        Call("lens", hs.lens, dict(model=own, texts=TEXTS[0], k=3, target=None, lens="logit", sites="layer.1")
             | dict(targets=None)),
        Call("Lens.fit", hs.Lens.fit, dict(model=own, texts=TEXTS, kind="jacobian", targets=None, partial=None)),
        Call("Lens.save", lens.save, dict(path="lens.safetensors")),
        Call("Lens.load", hs.Lens.load, dict(path="x")),
        Call("Lens.check", lens.check, dict(model=own)),
        Call("visibility", hs.visibility, dict(model=own, texts=IDS[1], influence="l1", sites="layer.1", sampling=None)
             | dict(target=None, seed=0)),
        Call("patch", hs.patch, dict(model=own, contrasts=contrast, sites="layer.1", into="corrupt", window=1)
             | dict(layers=None, method="exact")),
        Call("Contrast", lambda **given: hs.patch(own, hs.Contrast(**given), sites="layer.1"),
             dict(clean=[5, 6, 7], corrupt=[5, 9, 7], answer=11, other=12, targets=None, at=None)),
        Call("graft", hs.graft, dict(model=own, donor=own, data=[contrast], sites="layer.1", layers=1)),
        Call("steer", hs.steer, dict(model=own, prompts=[IDS[0]], direction=direction(), strengths=(0.0, 1.0))
             | dict(answers=None, quality=None, new_tokens=None)),
        Call("Direction.between", hs.Direction.between, dict(model=own, toward=TEXTS[:2], away=TEXTS[2:4])
             | dict(sites="layer.1", pool="last", upwards=False, spare_first=False)),
        Call("Direction.of", lambda **given: hs.steer(own, [IDS[0]], hs.Direction.of(**given), strengths=1.0),
             dict(vector=torch.ones(64), sites="layer.1", upwards=False, spare_first=False)),
        Call("project", hs.project, dict(source=own, data=labelled, method="pca", pool="last", sites="layer.1")
             | dict(seed=0, truncate=False)),
        Call("Pictures", lambda **given: hs.project(own, labelled, method=hs.Pictures(**given), sites="layer.1"),
             dict(method="pca", neighbours=5, preview=None)),
        Call("probe", hs.probe, dict(source=own, data=labelled, task="classify", pool="last", sites="layer.1")
             | dict(seed=0, truncate=False)),
        Call("probe states", hs.probe, dict(source=some, data=LABELS, pool="last", sites="layer.1")),
        Call("Probe", lambda task, penalty, site: hs.Probe(task, penalty, site).fit(rows, LABELS),
             dict(task="classify", penalty=1.0, site="")),
        Call("Probe.fit", hs.Probe().fit, dict(states=rows, labels=LABELS)),
        Call("Probe.predict", probe.predict, dict(states=rows)),
        Call("Probe.predict_proba", probe.predict_proba, dict(states=rows)),
        Call("Probe.decision_function", probe.decision_function, dict(states=rows)),
        Call("Probe.score", probe.score, dict(states=rows, labels=LABELS)),
        Call("Probe.save", probe.save, dict(path="probe.safetensors")),
        Call("Probe.load", hs.Probe.load, dict(path="x")),
        Call("Probe.of", hs.Probe.of, dict(result=result(), site="")),
        Call("embed", hs.embed, dict(model=own, texts=TEXTS, site="layer.1", pool="mean", normalize=True, adjust=None)
             | dict(truncate=False)),
        Call("Adjustment.fit", hs.Adjustment.fit, dict(values=rows, how="centre")),
        Call("search", hs.search, dict(source=own, query=TEXTS[0], k=3, texts=TEXTS, site="layer.1", pool="mean")
             | dict(nearness="cosine")),
        Call("search rows", hs.search, dict(source=rows, query=rows[:2], k=3)),
        Call("cluster", hs.cluster, dict(source=own, texts=TEXTS, site="layer.1", pool="mean", smallest=3)
             | dict(truncate=False)),
        Call("read", hs.read, dict(source=labelled, text=None, label=None)),
        Call("story", hs.story, dict(results=[result()], path="story.html", title="", opening="", closing="")),
        Call("Site", hs.Site, dict(layer=1, part="", stack=None)),
        Call("Site.parse", hs.Site.parse, dict(text="layer.1")),
        Call("Inputs", lambda **given: own.capture(hs.Inputs(**given)),
             dict(ids=((5, 6),), texts=None, spans=None, targets=None)),
        Call("Inputs.some", own.encode(IDS).some, dict(indices=[0])),
        Call("Inputs.with_targets", own.encode(IDS).with_targets, dict(targets=None)),
        Call("Inputs.batches", lambda **given: list(own.encode(IDS).batches(**given)),
             dict(model=own, batch_tokens=None)),
        Call("States", hs.States, dict(sites=some.sites, values=some.values, tokens=some.tokens, source=some.source)),
        Call("states[site]", some.__getitem__, dict(site="layer.1")),
        Call("States.blocks", lambda **given: list(some.blocks(**given)), dict(site="layer.1", rows=4)),
        Call("States.mix", some.mix, dict(weights=[0.25] * len(some.sites))),
        Call("States.of", some.of, dict(text=0)),
        Call("States.pool", some.pool, dict(how="mean", site="layer.1")),
        Call("States.select", some.select, dict(sites="layer.1", tokens=[0, 1])),
        Call("States.save", some.save, dict(path="states.safetensors")),
        Call("States.load", hs.States.load, dict(path="x")),
        Call("Pair.load", hs.Pair.load, dict(path="x")),
        Call("Pair", hs.Pair, dict(encoder=some, decoder=some)),
        Call("Tokens.of", some.tokens.of, dict(text=0)),
        Call("Tokens.rows", some.tokens.rows, dict(text=0)),
        Call("Tokens.select", some.tokens.select, dict(rows=[0, 1])),
        Call("Tokens.equals", some.tokens.equals, dict(other=some.tokens)),
        Call("Source.from_json", hs.Source.from_json, dict(data=some.source.to_json())),
        Call("Result", hs.Result, dict(kind="lens", data=result().data, facts={}, source={})),
        Call("Result.save", result().save, dict(path="result.json")),
        Call("Result.load", hs.Result.load, dict(path="x")),
        Call("Result.equals", result().equals, dict(other=result())),
    ]  # fmt: skip
    return tuple(made)


def _entered(manager: Callable[..., Any]) -> Callable[..., Any]:
    def enter(**given: Any) -> None:
        with manager(**given):
            model().module(torch.tensor(IDS[:1]))

    return enter


def slots() -> list[tuple[Call, str, str]]:
    """Every argument of every call with every value that may take its place."""
    skipped = {("load", "source", "None")}  # which is the default model
    found = [
        (call, name, value)
        for call in calls()
        for name in call.arguments
        for value in VALUES
    ]
    return [
        (call, name, value)
        for call, name, value in found
        if (call.name, name, value) not in skipped
    ]


def cases(count: int, seed: int, work: Path) -> Iterator[Case]:
    """Calls with one wrong argument, each of them once, and then with two."""
    chance = random.Random(f"calls {seed}")
    singles = slots()
    chance.shuffle(singles)
    for number in range(count):
        call, *given = singles[number % len(singles)]
        changed = {given[0]: given[1]}
        if number >= len(singles):
            changed[chance.choice([*call.arguments])] = chance.choice([*VALUES])
        words = ", ".join(f"{name}={value}" for name, value in changed.items())
        yield Case(
            "calls", f"{call.name}({words})", partial(called, call, changed, work)
        )


def called(call: Call, changed: Mapping[str, str], work: Path) -> str:
    """Call it with some arguments changed to the named values."""
    folder = work / "calls"
    folder.mkdir(parents=True, exist_ok=True)
    before = os.getcwd()
    os.chdir(folder)
    try:
        arguments = {
            **call.arguments,
            **{name: VALUES[value]() for name, value in changed.items()},
        }
        # positional, where the parameters of a built-in method have no names
        (
            call.function(*arguments.values())
            if call.name == "states[site]"
            else call.function(**arguments)
        )
        return "answered"
    finally:
        os.chdir(before)
