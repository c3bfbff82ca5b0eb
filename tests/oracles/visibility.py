"""Influence: the gradient of every state with respect to every state, one at a time."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.texts import Labelled
from tests.oracles.plain import NoTable, Plain, texts_of

FEWEST_TOKENS = 4
STACKS = {"encoder": "input_ids", "decoder": "decoder_input_ids"}


def visibility(
    model: hs.Model, asked: Mapping[str, Any], result: hs.Result
) -> dict[str, np.ndarray]:
    """Return exact maps, and what is summed up of them."""
    texts = asked["texts"]
    if isinstance(texts, Labelled):
        texts = texts.texts
    rows = texts_of(model, texts)
    data = result.data
    name = asked.get("influence", "l1")
    if name not in data or f"{name}_error" in data:
        raise NoTable("no oracle of influences that are drawn")
    maps = _Maps(Plain(model.module), data, name)
    predicted = [maps.predicted(row, asked.get("target"), model) for row in rows]
    lengths = {}
    for key in rows[0]:
        lengths[key] = min(len(row[key][0]) for row in rows)
    found = []
    for row, words in zip(rows, predicted, strict=True):
        cut = {key: [ids[0][: lengths[key]]] for key, ids in row.items()}
        found.append(maps.of_text(cut, words))
    values = np.mean(found, 0)
    numbers = {name: values}
    for stack in maps.stacks:
        for key, array in maps.summed(values, stack).items():
            known = numbers.get(key)
            numbers[key] = array if known is None else np.fmax(known, array)
    return {key: array for key, array in numbers.items() if key in data}


class _Maps:
    def __init__(self, plain: Plain, data: Any, name: str) -> None:
        self.plain = plain
        self.data = data
        self.name = name
        self.sites = data["source_site"].values.tolist()
        prefix = "source_" if name == "logit" else ""
        tokens = data.sizes["source_token" if name == "logit" else "token"]
        self.columns = {"": np.arange(tokens)}
        if len(plain.shapes) == 2:
            self.columns = {"encoder": np.arange(tokens)}
        if f"{prefix}stack" in data.coords:
            of_token = data[f"{prefix}stack"].values
            names = dict.fromkeys(of_token.tolist())
            self.columns = {stack: np.flatnonzero(of_token == stack) for stack in names}
        self.stacks = [*self.columns]
        encoders = ("bert", "roberta")
        self.causal = plain.config.model_type not in encoders

    def stack_of(self, site: str) -> str:
        """Return the stack of a site, if there are two."""
        name = site.split(".")[0]
        return name if name in STACKS else ""

    def is_causal(self, stack: str) -> bool:
        """Tell whether the states of a stack see no later token."""
        return self.causal and stack != "encoder"

    def rows(self, stack: str) -> list[int]:
        """Return the rows of the sites of a stack."""
        return [
            row for row, site in enumerate(self.sites) if self.stack_of(site) == stack
        ]

    def predicted(
        self, row: Mapping[str, Any], target: Any, model: hs.Model
    ) -> list[int]:
        """Return the tokens whose log-probabilities are measured."""
        if self.name != "logit":
            return []
        ids = row.get("decoder_input_ids", row["input_ids"])[0]
        if target is not None:
            if isinstance(target, str):
                split = model.tokenizer(target, add_special_tokens=False)
                (target,) = split.input_ids
            return [target] * len(ids)
        if not self.causal:
            return list(ids)
        last = self.plain.run(row)[0][0, -1].argmax()
        return [*ids[1:], int(last)]

    def of_text(self, row: Mapping[str, Any], words: list[int]) -> np.ndarray:
        """Return the map of one text."""
        if self.name == "logit":
            return self._of_words(row, words)
        tokens = self.data.sizes["token"]
        size = len(self.sites), tokens
        values = np.full((*size, *size), np.nan)
        norms = np.full(size, np.nan)
        _, states = self.plain.run(row, self.sites)
        for number, site in enumerate(self.sites):
            columns = self.columns[self.stack_of(site)]
            norms[number, columns] = states[site][0].norm(dim=-1).numpy()
        for source, site in enumerate(self.sites):
            into = self.columns[self.stack_of(site)]
            leaf, _, targets = self._run(row, site)
            for number, target in enumerate(self.sites):
                columns = self.columns[self.stack_of(target)]
                for place, column in enumerate(columns):
                    of_state = self._influence(targets[target][0, place], leaf)
                    values[number, column, source, into] = of_state
        if self.name == "relative":
            values = values * norms / norms[:, :, None, None]
        return values

    def _of_words(self, row: Mapping[str, Any], words: list[int]) -> np.ndarray:
        tokens = self.data.sizes["token"]
        shape = tokens, len(self.sites), self.data.sizes["source_token"]
        values = np.full(shape, np.nan)
        for source, site in enumerate(self.sites):
            into = self.columns[self.stack_of(site)]
            leaf, logits, _ = self._run(row, site)
            for token in range(tokens):
                log = logits[0, token].log_softmax(-1)[words[token]]
                gradient = _gradients(log[None], leaf)[0]
                values[token, source, into] = gradient.norm(dim=-1).numpy()
        return values

    def _run(
        self, row: Mapping[str, Any], site: str
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Run a text with the state at a site as a leaf."""
        leaves: list[Tensor] = []

        def leaf(state: Tensor) -> Tensor:
            leaves.append(state.detach().clone().requires_grad_())
            return leaves[0]

        change: dict[str, Callable[[Tensor], Tensor]] = {site: leaf}
        logits, states = self.plain.run(row, self.sites, change, grad=True)
        return leaves[0], logits, states

    def _influence(self, state: Tensor, leaf: Tensor) -> np.ndarray:
        """Return the influence of every token of the leaf on one state."""
        if self.name == "l1":
            share = state.abs().sum() / state.norm()
            return _gradients(share[None], leaf)[0].abs().sum(-1).numpy()
        jacobian = _gradients(state, leaf)
        return jacobian.square().sum((0, -1)).sqrt().numpy()

    def summed(self, values: np.ndarray, stack: str) -> dict[str, np.ndarray]:
        """Return shares, reach and decays within a stack."""
        rows, columns = self.rows(stack), self.columns[stack]
        causal = self.is_causal(stack)
        if not rows or len(columns) < 2:
            return {}
        ending = f"_{stack}" if stack else ""
        whole = np.full(len(self.sites), np.nan)
        if self.name == "logit":
            if stack not in ("", "decoder"):
                return {}
            inside = values[:, rows][..., columns]
            own = whole.copy()
            for place, row in enumerate(rows):
                own[row] = _own(inside[:, place], causal)
            return {"own": own, "decay_first": _decay(inside[:, 0], causal)}
        inside = values[rows][:, columns][:, :, rows][..., columns]
        below = [inside[row, :, row - 1] for row in range(1, len(rows))]
        numbers = {name: whole.copy() for name in ("own_below", "own_first", "reach")}
        numbers["own_below"][rows[1:]] = [_own(part, causal) for part in below]
        numbers["own_first"][rows] = [_own(part[:, 0], causal) for part in inside]
        numbers["reach"][rows[:-1]] = inside[-1].sum(-1).mean(0)[:-1]
        decays = [_decay(part, causal) for part in below]
        known = [decay for decay in decays if np.isfinite(decay).all()]
        numbers[f"decay_first{ending}"] = _decay(inside[-1, :, 0], causal)
        if known:
            numbers[f"decay_below{ending}"] = np.mean(known, 0)
        for name in (f"decay_first{ending}", f"decay_below{ending}"):
            if name in numbers and name in self.data:
                padded = np.full(self.data.sizes["distance"], np.nan)
                padded[: len(numbers[name])] = numbers[name]
                numbers[name] = padded
        return numbers


def _gradients(outputs: Tensor, leaf: Tensor) -> Tensor:
    """Return the gradient of each output [output, token, width]."""
    if not outputs.requires_grad:
        return torch.zeros(len(outputs), *leaf[0].shape, dtype=leaf.dtype)
    units = torch.eye(len(outputs), dtype=outputs.dtype)
    (gradients,) = torch.autograd.grad(
        outputs,
        leaf,
        units,
        allow_unused=True,
        retain_graph=True,
        is_grads_batched=True,
    )
    if gradients is None:
        return torch.zeros(len(outputs), *leaf[0].shape, dtype=leaf.dtype)
    return gradients[:, 0]


def _own(influence: np.ndarray, causal: bool) -> float:
    """Return the mean share of the same token; a causal first token sees only itself."""
    shares = []
    for token in range(1 if causal else 0, len(influence)):
        total = influence[token].sum()
        if total > 0:
            shares.append(influence[token, token] / total)
    return float(np.mean(shares)) if shares else np.nan


def _decay(influence: np.ndarray, causal: bool) -> np.ndarray:
    """Return the mean influence at each distance, relative to that of the same token."""
    if causal and len(influence) >= FEWEST_TOKENS:
        influence = influence[1:, 1:]
    if not causal:
        influence = (influence + influence.T) / 2
    means = []
    for distance in range(len(influence)):
        means.append(np.diagonal(influence, -distance).mean())
    if not means[0] > 0:
        return np.full(len(means), np.nan)
    return np.array(means) / means[0]
