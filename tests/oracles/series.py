"""What `hs.series` should say: the oracle of the analysis, for one member at a time.

The analysis itself is asked for the coordinates of each member's numbers, and for
nothing else. Directions that are followed along a series are left out.
"""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from tests.oracles import naive

PAIRED = ("compare", "drift")
BEST = {"probe": ("accuracy", "r2"), "project": ("silhouette",)}
ALONG = ((), ("site",), ("site", "text"))
BY_NAME = ("l2_", "relative_")


def series(models: Any, asked: Mapping[str, Any], result: Any) -> dict[str, np.ndarray]:
    """Return the expected numbers of every member, along the depths."""
    word, data = asked["analysis"], asked["data"]
    options = dict(asked.get("options") or {})
    if "directions" in options:
        raise naive.Uncovered("directions along a series")
    oracle = getattr(importlib.import_module(f"tests.oracles.{word}"), word)
    members = [as_model(model) for model in models]
    for model in members:
        # Differences of two models are rounding there, or near it.
        if model.dtype not in (torch.float32, torch.float64):
            raise naive.Uncovered(f"members in {model.dtype}")
    answers = []
    for place, model in enumerate(members):
        reference = members[0]
        if asked.get("against", "first") == "previous":
            reference = members[max(0, place - 1)]
        answers.append(_answer(word, oracle, (model, reference), data, options))
    axis = naive.sites_of(result)
    member_sites = [axis] * len(members)
    if "member_site" in result.data.coords:
        member_sites = result.data["member_site"].to_numpy().tolist()
    expected: dict[str, Any] = {}
    for place, (numbers, part) in enumerate(answers):
        sites = naive.sites_of(part)
        for name, values in numbers.items():
            variable, values = _along(
                name, np.asarray(values, float), part, members, place
            )
            if variable is None or variable not in result.data:
                continue
            is_scalar = values.ndim == 0
            shape = (
                len(members),
                *(() if is_scalar else (len(axis), *values.shape[1:])),
            )
            whole = expected.setdefault(variable, np.full(shape, np.nan))
            if is_scalar:
                whole[place] = values
                continue
            for row, site in enumerate(member_sites[place]):
                if site in sites:
                    whole[place, row] = values[sites.index(site)]
    expected |= _facts(asked, result, expected, members, axis)
    return {name: np.asarray(value) for name, value in expected.items()}


def as_model(member: Any) -> hs.Model:
    """Return the model of a member."""
    member = (
        getattr(member, "model", member)
        if type(member).__name__ == "Member"
        else member
    )
    return member if isinstance(member, hs.Model) else hs.load(member)


def _answer(
    word: str, oracle: Any, pair: tuple[Any, Any], data: Any, options: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """Return what the oracle expects of one member, and a result with coordinates."""
    model, reference = pair
    if word == "drift":
        texts = {"texts": data, **options}
        saved = reference.capture(data)
        part = hs.drift(saved, model, **texts)
        return oracle(saved, {"candidate": model, **texts}, part), part
    if word == "compare":
        # A member beside itself is one model: it has no CKA.
        names = {key: options[key] for key in ("targets", "truncate") if key in options}
        states = [each.capture(data, **names) for each in (model, reference)]
        part = hs.compare(*states, sites=options.get("sites", "layer.*,final"))
        return oracle(model, {"a": data, "other": reference, **options}, part), part
    question = {"data" if word in BEST else "texts": data, **options}
    part = getattr(hs, word)(model, **question)
    return oracle(model, question, part), part


def _along(
    name: str, values: np.ndarray, part: Any, members: list[Any], place: int
) -> tuple[str | None, np.ndarray]:
    """Return the name and the values of what a series has along the sites."""
    if name.startswith("facts.") or name not in part.data:
        return None, values
    if part.kind == "compare" and name in ("cka", "cka_chance"):
        # Each site beside that of the other model at its depth.
        sites, others = (
            naive.sites_of(part),
            list(map(str, part.data["source_site"].to_numpy())),
        )
        found = np.full(len(sites), np.nan)
        for row, site in enumerate(sites):
            match = _same_depth(site, sites, others)
            if match:
                found[row] = values[row, others.index(match)]
        return f"{name}_same_depth", found
    if part.data[name].dims not in ALONG:
        return None, values
    return name, values


def _same_depth(site: str, sites: list[str], others: list[str]) -> str:
    """Return the site at the same depth, or else the nearest layer, the lower first."""
    number = site.rpartition("layer.")[2]
    if not number.isdecimal():
        return site if site in others else ""
    layers = {
        name: int(name.rpartition("layer.")[2]) for name in others if "layer." in name
    }
    depth = max(int(name.rpartition("layer.")[2]) for name in sites if "layer." in name)
    wanted = int(number) / max(1, depth)
    other_depth = max(1, *layers.values())
    return min(
        layers,
        key=lambda name: (abs(layers[name] / other_depth - wanted), layers[name]),
    )


def _facts(
    asked: Mapping[str, Any],
    result: Any,
    expected: dict[str, Any],
    members: list[Any],
    axis: list[str],
) -> dict[str, Any]:
    """Return the facts that are numbers."""
    facts: dict[str, Any] = {}
    word = asked["analysis"]
    texts = asked["data"]
    if word in BEST:
        texts = texts.texts if hasattr(texts, "texts") else texts[0]
    for place, model in enumerate(members):
        every = naive.encoded(model, texts)
        states = naive.run(model, every[0])
        numbers = [site.rpartition("layer.")[2] for site in states]
        layers = max(int(number) for number in numbers if number.isdecimal())
        facts[f"facts.members.{place}.layers"] = layers
        facts[f"facts.members.{place}.width"] = max(
            v.shape[1] for s, v in states.items() if s.endswith("layer.0")
        )
    depth = np.asarray(result.data["depth"].to_numpy())
    names = naive.sites_of(result)
    for number, headline in enumerate(result.facts["headlines"]):
        measure = headline["measure"]
        if measure not in expected:
            continue
        for place, value in enumerate(headline["values"]):
            at = value["site"]
            where = f"facts.headlines.{number}.values.{place}.value"
            sites = names
            if "member_site" in result.data.coords:
                sites = result.data["member_site"].to_numpy()[place].tolist()
            column = expected[measure][place]
            if word in BEST:
                facts[where] = np.nanmax(column)
                continue
            rows = [
                row
                for row, site in enumerate(sites)
                if site.removeprefix("decoder.").startswith("layer.")
                and site.rpartition("layer.")[2].isdecimal()
            ]
            wanted = 1.0 if word in PAIRED else 0.5
            if rows:
                row = min(rows, key=lambda row: abs(depth[row] - wanted))
                facts[where] = column[row]
                assert sites[row] == at, f"{where} is at {at}, not at {sites[row]}"
    return facts
