"""What each part adds to a logit: the head reads each part, normed at a frozen scale."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hiddenscope as hs
from tests.oracles.plain import NoTable, Plain, repeated, texts_of, weight_of


def contributions(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return every number but `error`, which rounding makes."""
    if isinstance(asked["answer"], hs.Direction):
        raise NoTable("no oracle along a direction")
    (row,) = texts_of(model, asked["text"], asked.get("targets"))
    question = _Question(Plain(model.module), row)
    data = result.data
    others = [None] * data.sizes["step"]
    # Two answers are compared where they first differ, after what they share.
    answers = data["step_id"].values.tolist()
    if "other_id" in data.coords:
        others = data["other_id"].values.tolist()
    before = _shared(model, asked, answers, compared=others[0] is not None)
    steps = []
    for number, (answer, other) in enumerate(zip(answers, others, strict=True)):
        said = [*before, *answers[:number]]
        steps.append(question.step(said, answer, other, data))
    return {name: np.stack([step[name] for step in steps]) for name in steps[0]}


def _shared(
    model: hs.Model, asked: Mapping[str, Any], answers: list[int], *, compared: bool
) -> list[int]:
    """Return the tokens of the answer before the first that is compared."""
    answer = asked["answer"]
    if isinstance(answer, str):
        answer = model.tokenizer(answer, add_special_tokens=False).input_ids
    if isinstance(answer, int) or not compared:
        return []
    return list(answer)[: list(answer).index(answers[0])]


class _Question:
    def __init__(self, plain: Plain, row: dict[str, Any]) -> None:
        self.plain = plain
        self.row = row
        self.shape = plain.shapes[-1]
        self.prefix = "decoder." if len(plain.shapes) == 2 else ""

    def step(
        self, said: list[int], answer: int, other: int | None, data: Any
    ) -> dict[str, np.ndarray]:
        """Return what each part adds to the logit of one token of the answer."""
        plain, shape, prefix = self.plain, self.shape, self.prefix
        name = "decoder_input_ids" if prefix else "input_ids"
        row = {**self.row, name: [[*self.row[name][0], *said]]}
        depth, heads = plain.depth, data.sizes["head"]
        branches = ["attn", "cross"] if shape.cross else ["attn"]
        sites = [f"{prefix}layer.0", f"{prefix}layer.{depth}"]
        layers = [f"{prefix}layer.{layer}" for layer in range(1, depth + 1)]
        for layer in layers:
            for branch in branches:
                sites.append(f"{layer}.{branch}")
                sites += [f"{layer}.{branch}.head.{head}" for head in range(heads)]
            sites.append(f"{layer}.mlp")
        logits, states = plain.run(row, sites)
        reader = _Reader(plain, row, states[f"{prefix}layer.{depth}"], prefix)

        def adds(site: str) -> float:
            return reader.difference(states[site][0, -1], answer, other)

        numbers: dict[str, Any] = {"embedding": adds(f"{prefix}layer.0")}
        numbers["mlp"] = [adds(f"{layer}.mlp") for layer in layers]
        for branch in branches:
            by_head = []
            for layer in layers:
                sites = [f"{layer}.{branch}.head.{head}" for head in range(heads)]
                by_head.append([adds(site) for site in sites])
            whole = np.array([adds(f"{layer}.{branch}") for layer in layers])
            numbers[f"{branch}_head"] = by_head
            numbers[f"{branch}_bias"] = whole - np.sum(by_head, 1)
        nothing = torch.zeros_like(states[f"{prefix}layer.0"][0, -1])
        numbers["head_bias"] = reader.read(nothing, answer, other)
        of_bias = reader.read(reader.bias, answer, other)
        numbers["norm_bias"] = of_bias - numbers["head_bias"]
        numbers["total"] = sum(np.sum(values) for values in numbers.values())
        cap = getattr(plain.config, "final_logit_softcapping", None)
        last = logits[0, -1]
        wide = cap * torch.atanh(last / cap) if cap else last
        numbers["logit"] = float(wide[answer] - (0 if other is None else wide[other]))
        numbers["probability"] = float(last.softmax(-1)[answer])
        if "neuron" in data:
            numbers["neuron"] = self.neurons(row, reader, (answer, other), data)
        return {name: np.array(values, float) for name, values in numbers.items()}

    def neurons(self, row: Any, reader: "_Reader", words: Any, data: Any) -> np.ndarray:
        """Return what the strongest neurons of all add."""
        effects = []
        for number, block in enumerate(self.plain.blocks(self.shape), 1):
            weight = weight_of(block.get_submodule(self.shape.down or ""))
            layer = f"{self.prefix}layer.{number}"
            sites = [f"{layer}.mlp.neuron.{n}" for n in range(weight.shape[1])]
            states = self.plain.run(row, sites)[1]
            writes = torch.stack([states[site][0, -1] for site in sites])
            effects += reader.differences(writes, *words).tolist()
        strongest = sorted(effects, key=lambda effect: -abs(effect))
        return np.array(strongest[: data.sizes["rank"]])


class _Reader:
    """The final norm at the scale that it has for one state, and the head."""

    def __init__(self, plain: Plain, row: Any, last: Tensor, prefix: str) -> None:
        self.plain = plain
        self.row = row
        self.final = f"{prefix}final"
        norm: Any = plain.base.get_submodule(plain.shapes[-1].norm or "")
        state = last[0, -1]
        self.centred = isinstance(norm, nn.LayerNorm) or "CohereLayerNorm" in str(norm)
        eps = getattr(norm, "eps", None) or getattr(norm, "variance_epsilon", None)
        if self.centred:
            state = state - state.mean()
        gain = norm.weight
        if gain is not None and "Gemma" in type(norm).__name__:
            gain = 1 + gain
        self.gain = (1 if gain is None else gain) / (state.square().mean() + eps).sqrt()
        bias = getattr(norm, "bias", None)
        self.bias = torch.zeros_like(state) if bias is None else bias
        normed = plain.run(row, [self.final])[1][self.final][0, -1]
        assert torch.allclose(normed, state * self.gain + self.bias)

    def reads(self, finals: Tensor, answer: int, other: int | None) -> Tensor:
        """Return the logit, or the difference of two, at final states [row, width]."""

        def change(state: Tensor) -> Tensor:
            return finals[:, None].expand_as(state)

        rows = repeated(self.row, len(finals))
        logits = self.plain.run(rows, (), {self.final: change})[0][:, -1]
        cap = getattr(self.plain.config, "final_logit_softcapping", None)
        if cap:
            logits = cap * torch.atanh(logits / cap)
        return logits[:, answer] - (0 if other is None else logits[:, other])

    def read(self, final: Tensor, answer: int, other: int | None) -> float:
        """Return the same of one final state."""
        return float(self.reads(final[None], answer, other)[0])

    def differences(self, writes: Tensor, answer: int, other: int | None) -> Tensor:
        """Return what each write [row, width] adds to the logit."""
        if self.centred:
            writes = writes - writes.mean(-1, keepdim=True)
        finals = writes * self.gain
        nothing = torch.zeros_like(finals)
        read = self.reads(torch.cat([finals, nothing[:1]]), answer, other)
        return read[:-1] - read[-1]

    def difference(self, write: Tensor, answer: int, other: int | None) -> float:
        """Return what one write adds to the logit."""
        return float(self.differences(write[None], answer, other)[0])
