"""Grafts: the donor's weights, or its states, in a copy of the model."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from tests.oracles.plain import NoTable, Plain, texts_of


def graft(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return every number but the ends of intervals."""
    data = result.data
    donor = _module(asked["donor"])
    examples = _examples(model, asked["data"])
    plain, other = Plain(model.module), Plain(donor)
    if type(plain.module) is not type(other.module):
        raise NoTable("the donor is not of the model's class")
    windows = _windows(asked, data)
    whole = [plain.run(row)[0][0] for row, _ in examples]
    numbers: dict[str, list[float]] = {name: [] for name in data.data_vars}
    for window in windows:
        grafted = list(_logits(plain, other, asked.get("sites"), window, examples))
        if examples[0][1] is not None:
            right = []
            probability = []
            for logits, (_, answer) in zip(grafted, examples, strict=True):
                right.append(int(logits[-1].argmax()) == answer)
                probability.append(float(logits[-1].softmax(-1)[answer]))
            numbers["accuracy"].append(float(np.mean(right)))
            numbers["probability"].append(float(np.mean(probability)))
            continue
        losses = []
        agreement = []
        for logits, own, (row, _) in zip(grafted, whole, examples, strict=True):
            losses.append((_loss(logits, row), _loss(own, row)))
            same = logits[:-1].argmax(-1) == own[:-1].argmax(-1)
            agreement.append(float(same.double().mean()))
        after, before = np.mean(losses, 0)
        numbers["loss"].append(after)
        numbers["loss_change"].append(after - before)
        numbers["agreement"].append(float(np.mean(agreement)))
    return {name: np.array(values) for name, values in numbers.items() if values}


def _module(donor: Any) -> Any:
    """Return the module of a donor as it was given."""
    if isinstance(donor, tuple):
        return donor[0]
    return getattr(donor, "module", donor)


def _examples(model: hs.Model, data: Any) -> list[tuple[Any, int | None]]:
    """Return the inputs of each example, and its answer; copies are left out."""
    if not isinstance(data, list):
        raise NoTable("no oracle of data that is read")
    found: dict[str, tuple[Any, int | None]] = {}
    for entry in data:
        prompt, answer = entry, None
        is_pair = isinstance(entry, list | tuple) and len(entry) == 2
        if is_pair and not isinstance(entry[0], int):
            prompt, answer = entry
        if isinstance(answer, str):
            (answer,) = model.tokenizer(answer, add_special_tokens=False).input_ids
        (row,) = texts_of(model, prompt if isinstance(prompt, str) else [list(prompt)])
        found.setdefault(str((row, answer)), (row, answer))
    return list(found.values())


def _windows(asked: Mapping[str, Any], data: Any) -> list[list[str]]:
    """Return the sites of each window, from its first and last."""
    windows = []
    ends = zip(data["site"].values, data["last_site"].values, strict=True)
    for first, last in ends:
        if first == last:
            windows.append([str(first)])
            continue
        start, stop = (int(str(site).split(".")[1]) for site in (first, last))
        _, _, *part = str(first).split(".", 2)
        numbers = range(start, stop + 1)
        windows.append([".".join([f"layer.{number}", *part]) for number in numbers])
    return windows


def _logits(
    plain: Plain,
    other: Plain,
    sites: Any,
    window: list[str],
    examples: list[tuple[Any, int | None]],
) -> Iterator[Tensor]:
    """Yield the logits of each example with a window of the donor's."""
    shape = plain.shapes[0]
    if sites is None:
        grafted = Plain(plain.module)
        for site in window:
            number = int(site.split(".")[1]) - 1
            weights = other.blocks(shape)[number].state_dict()
            grafted.blocks(shape)[number].load_state_dict(weights)
        for row, _ in examples:
            yield grafted.run(row)[0][0]
        return
    for row, _ in examples:
        states = other.run(row, window)[1]
        changes = {site: lambda _, s=states[site]: s for site in window}
        yield plain.run(row, (), changes)[0][0]


def _loss(logits: Tensor, row: Mapping[str, Any]) -> float:
    """Return the mean loss of the next tokens of one text."""
    ids = torch.as_tensor(row["input_ids"][0])
    log = logits.log_softmax(-1)
    return float(-log[torch.arange(len(ids) - 1), ids[1:]].mean())
