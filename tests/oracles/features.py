"""What `hs.features` should say: every state said again, and every loss measured.

Left out: random directions, which are drawn, and the intervals, by a bootstrap.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

import hiddenscope as hs
from tests.oracles import naive
from tests.oracles.examples import encode, is_massive
from tests.oracles.project import labelled

COMPONENTS, RANKS, LISTED = 32, 8, 10
# Here a norm scales what neurons write, token by token.
NORMED = ("gemma3_text",)


class Fit(NamedTuple):
    """Directions `[feature, width]`, and what all that act write besides."""

    directions: np.ndarray
    bias: np.ndarray
    dictionary: Any = None
    neurons: bool = False

    def activations(self, rows: np.ndarray) -> np.ndarray:
        """Return the activation of every feature in every row."""
        if self.dictionary is not None:
            return encode(self.dictionary, rows)
        if self.neurons:
            return rows
        return (rows - self.bias) @ self.directions.T

    def said(self, rows: np.ndarray) -> np.ndarray:
        """Return what is said of every row."""
        return self.activations(rows) @ self.directions + self.bias

    def said_by_few(self, rows: np.ndarray, mean: np.ndarray, few: int) -> np.ndarray:
        """Return what the neurons farthest from their mean say; others are at it."""
        lengths = np.linalg.norm(self.directions, axis=1)
        kept = np.tile(mean, (len(rows), 1))
        for number, row in enumerate(rows):
            farthest = np.argsort(-np.abs(row - mean) * lengths)[:few]
            kept[number, farthest] = row[farthest]
        return self.said(kept)


def features(
    source: hs.Model | Any, asked: Mapping[str, Any], result: Any
) -> dict[str, np.ndarray]:
    """Return what a dictionary and simpler ways are expected to say of states."""
    naive.need_model(source)
    dictionary, site = asked.get("dictionary", "pca"), result.facts["site"]
    reads = result.facts["reads"]
    texts, labels, groups = asked.get("texts"), None, None
    if asked.get("data") is not None:
        texts, labels, groups = labelled(asked["data"])
    given_groups = getattr(texts, "groups", groups)
    outputs, inputs = (naive.rows_at(source, texts, place) for place in (site, reads))
    every = naive.strings(texts)
    group_of = naive.groups_of(every, given_groups)
    order = np.random.default_rng(0).permutation(len(set(group_of.tolist())))
    half_of_text = order[group_of] % 2
    counted = (
        (outputs.position > 0)
        & ~is_massive(outputs.values)
        & ~is_massive(inputs.values)
    )
    neurons, rows_of_neurons = _of_layer(source, site), None
    if neurons is not None and (site.endswith(".mlp") or labels is not None):
        rows_of_neurons = naive.rows_at(source, texts, _neurons_of(site)).values
        counted &= ~is_massive(rows_of_neurons)
    states, read = outputs.values[counted], inputs.values[counted]
    text, half = outputs.text[counted], half_of_text[outputs.text[counted]]
    is_compared = len(set(half.tolist())) == 2
    made = []
    for number in (0, 1):
        others = half != number if is_compared else half >= 0
        made.append(_fit(source, dictionary, states[others], reads))
    named = made[1]
    activations = named.activations(read)
    expected = _by_token(named, activations, counted, asked.get("k", RANKS))
    if dictionary == "pca":
        # The sign of a component is any.
        signs = np.sign(result.data["activation"].to_numpy())
        expected["activation"] = np.abs(expected["activation"]) * signs
    active = (activations != 0).sum(1)
    mean = states.mean(0)
    few = max(1, round(active.sum() / len(active)))
    ways = {"the dictionary": [each.said(read) for each in made]}
    if is_compared:
        ways["principal components"] = [
            _components(states[half != number], few).said(states) for number in (0, 1)
        ]
    if is_compared and rows_of_neurons is not None:
        rows_of_neurons = rows_of_neurons[counted]
        ways["neurons"] = []
        for number in (0, 1):
            middle = rows_of_neurons[half != number].mean(0)
            ways["neurons"].append(neurons.said_by_few(rows_of_neurons, middle, few))
    if not site.endswith(".mlp"):
        # A layer holds more than what its neurons write.
        ways.pop("neurons", None)
    said = {}
    for name, by_half in ways.items():
        said[name] = np.where(half[:, None] == 0, by_half[0], by_half[1])
    errors = ((states - said["the dictionary"]) ** 2).sum(1)
    spread = ((states - mean) ** 2).sum(1)
    expected["unexplained"] = _at_tokens(errors / spread, counted)
    facts: dict[str, Any] = {
        "features": len(named.directions),
        "silent": ((activations != 0).sum(0) == 0).sum(),
        "texts": len(every),
        "tokens": len(states),
        "active.value": active.sum() / len(active),
    }
    left_out = (outputs.position > 0).sum() - len(states)
    if left_out:
        facts["massive"] = left_out
    written = np.abs(activations).sum(0) * np.linalg.norm(named.directions, axis=1)
    tokens = (activations != 0).sum(0)
    listed = sorted(range(len(written)), key=lambda k: -written[k])[:LISTED]
    for rank, feature in enumerate(listed):
        facts[f"strongest.{rank}.feature"] = feature
        facts[f"strongest.{rank}.tokens"] = tokens[feature]
        facts[f"strongest.{rank}.written"] = written[feature] / max(1, tokens[feature])
    measured: dict[str, dict[str, float]] = {"unexplained": {}}
    for name, rows in said.items():
        share = ((states - rows) ** 2).sum() / spread.sum()
        measured["unexplained"][name] = float(share)
    if result.facts.get("losses"):
        measured |= _losses(
            source,
            texts,
            site,
            counted,
            {"": np.tile(mean, (len(states), 1)), **said},
            facts,
        )
    if labels is not None:
        detected = {"the dictionary": activations}
        if is_compared:
            half_others = states[half != 1]
            detected["principal components"] = _components(
                half_others, few
            ).activations(states)
        if rows_of_neurons is not None:
            detected["neurons"] = rows_of_neurons
        measured["auroc"] = _auroc(detected, text, half_of_text, labels, read)
    facts |= _comparisons(result, measured)
    expected |= {f"facts.{name}": value for name, value in facts.items()}
    return {name: np.asarray(value) for name, value in expected.items()}


def _of_layer(model: Any, site: str) -> Fit | None:
    """Return the neurons of the layer of a site, if they write without a norm."""
    stack, _, rest = site.rpartition("layer.")
    number = rest.partition(".")[0]
    module = naive.in_float64(model)
    family = getattr(getattr(module, "config", None), "model_type", "")
    if number in ("", "0", "final") or family not in naive.MLPS or family in NORMED:
        return None
    block = naive.blocks_of(naive.stacks_of(module)[stack])[int(number) - 1]
    down = naive.inside(block, naive.MLPS[family][1])
    scale = getattr(getattr(module, "config", None), "residual_multiplier", 1.0)
    width = naive.run(model, [5, 6])[f"{stack}layer.{number}.mlp.neurons"].shape[1]
    with torch.no_grad():
        bias = down(torch.zeros(1, width, dtype=torch.float64)).numpy()
        written = down(torch.eye(width, dtype=torch.float64)).numpy() - bias
    return Fit(scale * written, scale * bias[0], neurons=True)


def _neurons_of(site: str) -> str:
    stack, _, rest = site.rpartition("layer.")
    return f"{stack}layer.{rest.partition('.')[0]}.mlp.neurons"


def _fit(model: Any, dictionary: Any, states: np.ndarray, reads: str) -> Fit:
    """Return a dictionary, or what a word makes of the states of one half."""
    if isinstance(dictionary, str):
        if dictionary == "pca":
            return _components(states, COMPONENTS)
        neurons = _of_layer(model, reads)
        if dictionary == "neurons" and neurons is not None:
            return neurons
        raise naive.Uncovered(f"a dictionary of {dictionary}")
    directions = dictionary.directions.double().numpy()
    return Fit(directions, dictionary.bias.double().numpy(), dictionary)


def _components(states: np.ndarray, count: int) -> Fit:
    """Return the first principal components of some states."""
    mean = states.mean(0)
    _, axes = np.linalg.eigh(np.cov(states.T, bias=True))
    return Fit(axes.T[::-1][:count], mean)


def _at_tokens(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Return values at all tokens, NaN where they do not count."""
    whole = np.full((1, len(counted), *values.shape[1:]), np.nan)
    whole[0, counted] = values
    return whole


def _by_token(
    named: Fit, activations: np.ndarray, counted: np.ndarray, k: int
) -> dict[str, np.ndarray]:
    """Return the strongest features of every token."""
    lengths = np.linalg.norm(named.directions, axis=1)
    sizes = np.abs(activations) * lengths
    places = np.argsort(-sizes, axis=1, kind="stable")[:, : min(k, len(lengths))]
    top = np.take_along_axis(sizes, places, 1)
    values = np.take_along_axis(activations, places, 1)
    return {
        "active": _at_tokens((activations != 0).sum(1), counted),
        "share": _at_tokens(top / sizes.sum(1, keepdims=True), counted),
        "activation": _at_tokens(values, counted),
        "tokens": (activations != 0).sum(0),
        "written": sizes.sum(0),
    }


def _losses(
    model: Any,
    texts: Any,
    site: str,
    counted: np.ndarray,
    variants: Mapping[str, np.ndarray],
    facts: dict[str, Any],
) -> dict[str, dict[str, float]]:
    """Run every text with each of these in the place of its states."""
    start = np.cumsum(counted) - 1
    losses: dict[str, list[float]] = {name: [] for name in ("as it is", *variants)}
    apart: dict[str, list[float]] = {name: [] for name in variants}
    done = 0
    for ids in naive.encoded(model, texts):
        rows = range(done, done + len(ids))
        done += len(ids)
        inside = [row - rows.start for row in rows if counted[row]]
        plain = _log_probabilities(model, ids, site, {})
        losses["as it is"].append(_loss(plain, ids))
        for name, said in variants.items():
            changes = {place: said[start[rows.start + place]] for place in inside}
            changed = _log_probabilities(model, ids, site, changes)
            losses[name].append(_loss(changed, ids))
            divergence = (np.exp(plain) * (plain - changed)).sum(1)[:-1]
            apart[name].append(float(divergence.mean()))
    loss = {name: float(np.mean(of_texts)) for name, of_texts in losses.items()}
    harm = loss[""] - loss["as it is"]
    facts["losses.0.value"], facts["losses.1.value"] = loss["as it is"], loss[""]
    facts["losses.2.value"] = harm
    names = [name for name in variants if name]
    return {
        "divergence": {name: float(np.mean(apart[name])) for name in names},
        "recovered": {name: (loss[""] - loss[name]) / harm for name in names},
    }


def _log_probabilities(
    model: Any, ids: list[int], site: str, changes: Mapping[int, np.ndarray]
) -> np.ndarray:
    """Run a text with other states at some tokens of a layer, or what its MLP adds."""
    module = naive.in_float64(model)
    layer, _, part = site.removeprefix("layer.").partition(".")
    blocks = naive.blocks_of(naive.stacks_of(module)[""])

    def put(state: torch.Tensor) -> torch.Tensor:
        state = state.clone()
        for place, values in changes.items():
            state[0, place] = torch.from_numpy(values).reshape(state[0, place].shape)
        return state

    if not layer.isdecimal() or part not in ("", "mlp"):
        raise naive.Uncovered(f"a change at {site}")
    if part:
        family = getattr(getattr(module, "config", None), "model_type", "")
        if family not in ("llama", "gpt2"):
            raise naive.Uncovered(f"a change at {site} of {family}")
        place = blocks[int(layer) - 1].mlp
        hook = place.register_forward_hook(lambda _, inputs, output: put(output))
    elif layer == "0":
        hook = blocks[0].register_forward_pre_hook(
            lambda _, inputs: (put(inputs[0]), *inputs[1:])
        )
    else:

        def leave(_: Any, inputs: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (put(output[0]), *output[1:])
            return put(output)

        hook = blocks[int(layer) - 1].register_forward_hook(leave)
    try:
        with torch.no_grad():
            output = naive.called(module, {"input_ids": torch.tensor([ids])})
        logits = getattr(output, "logits", output)[0]
    finally:
        hook.remove()
    # Excluded words have no share; minus infinity would make a NaN of it.
    return torch.log_softmax(logits, -1).clamp_min(-1e30).numpy()


def _loss(scores: np.ndarray, ids: list[int]) -> float:
    """Return the mean loss of the next tokens of a text."""
    losses = [-scores[place, ids[place + 1]] for place in range(len(ids) - 1)]
    return float(np.mean(losses))


def _auroc(
    detected: Mapping[str, np.ndarray],
    text: np.ndarray,
    half: np.ndarray,
    labels: list[Any],
    read: np.ndarray,
) -> dict[str, float]:
    """Select one number on the first half of the texts, and score it on the other."""
    names = sorted(set(map(str, labels)))
    positive = np.array([str(label) == names[-1] for label in labels])
    count = len(labels)
    by_text = {name: means(rows, text, count) for name, rows in detected.items()}
    of_states = means(read, text, count)
    train, test = half == 0, half == 1
    toward = of_states[train & positive].mean(0) - of_states[train & ~positive].mean(0)
    by_text["difference of means"] = (of_states @ toward)[:, None]
    scores = {}
    for name, values in by_text.items():
        selected = [auroc(column[train], positive[train]) for column in values.T]
        best = max(range(len(selected)), key=lambda k: abs(selected[k] - 0.5))
        sign = 1 if selected[best] > 0.5 else -1
        scores[name] = auroc(sign * values[test, best], positive[test])
    return scores


def means(rows: np.ndarray, text: np.ndarray, count: int) -> np.ndarray:
    """Return the mean over the tokens of each text."""
    return np.array([rows[text == number].mean(0) for number in range(count)])


def auroc(values: np.ndarray, positive: np.ndarray) -> float:
    """Return how often a positive value is above a negative one."""
    wins = []
    for value in values[positive]:
        for other in values[~positive]:
            wins.append(0.5 if abs(value - other) < 1e-12 else float(value > other))
    return float(np.mean(wins))


def _comparisons(
    result: Any, measured: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Return every number of every way that was measured, where the result has it."""
    facts = {}
    for number, comparison in enumerate(result.facts["comparisons"]):
        found = measured.get(comparison["measure"], {})
        for place, score in enumerate(comparison["scores"]):
            where = f"comparisons.{number}.scores.{place}"
            if score["way"] not in found:
                continue
            value = found[score["way"]]
            facts[f"{where}.value"] = value
            if place and comparison["measure"] != "auroc":
                facts[f"{where}.gap.value"] = found["the dictionary"] - value
    return facts
