"""Findings of steering: labelled arrays, and the facts they show."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from hiddenscope.analyses.steer.direction import in_stack
from hiddenscope.analyses.steer.facts import SettingFacts
from hiddenscope.analyses.steer.logprobs import LogProbs
from hiddenscope.analyses.steer.reads import MASKED, Reads, masked_model
from hiddenscope.analyses.steer.sweep import Measured, Sweep
from hiddenscope.results import Facts
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.states import Pair, States
from hiddenscope.states.arrays import Floats

if TYPE_CHECKING:
    import xarray

Setting: TypeAlias = tuple[int, int]
"""The places of a site and a strength in the data."""

# Prompts whose texts are among the facts; all are in the data.
MOST_TEXTS = 12
# A change of the perplexity that leaves the model as good as it was.
WITHIN = 0.05
LEVEL = 0.95
ATTRIBUTES: Mapping[str, Attributes] = {
    "probability": {"long_name": "probability of the answer"},
    "log_odds": {
        "long_name": "log-odds of the answer",
        "units": "nats",
        "meaning": "diverging",
    },
    "perplexity": {"long_name": "perplexity on other texts", "scale": "log"},
    "perplexity_change": {
        "long_name": "change of the perplexity, as a share of it",
        "meaning": "diverging",
    },
    "size": {
        "long_name": "norm of the direction over the median norm of the prompts' states"
    },
    "written": {"long_name": "text written after the prompt"},
}


class Written(NamedTuple):
    """Continuations of the prompts before steering, and after it for each strength.

    `place` is the place of the steered site.
    """

    place: int
    before: list[str]
    after: list[list[str]]


def steer_dataset(
    sweep: Sweep,
    on_prompts: Measured,
    on_quality: Measured,
    states: States | Pair,
    prompts: Sequence[str],
    answers: Mapping[int, str],
) -> "xarray.Dataset":
    """Return probabilities, log-odds and perplexities by site and strength.

    `states` are those of the prompts, beside which the direction is large or small.
    """
    settings = ("site", "strength")
    cells = ("text", "answer")
    logs, logs_before = on_prompts.prompts_after, on_prompts.prompts_before
    perplexities = [[_perplexity(texts) for texts in row] for row in on_quality.after]
    perplexity = np.array(perplexities)
    perplexity_before = np.array(_perplexity(on_quality.before))
    columns = {
        "probability": (settings + cells, np.exp(logs)),
        "log_odds": (settings + cells, _log_odds(logs)),
        "perplexity": (settings, perplexity),
        "perplexity_change": (settings, perplexity / perplexity_before - 1),
        "probability_before": (cells, np.exp(logs_before)),
        "log_odds_before": (cells, _log_odds(logs_before)),
        "perplexity_before": ((), perplexity_before),
        "size": (("site",), _sizes(sweep, states)),
    }
    variables: Variables = {}
    for name, (dims, values) in columns.items():
        variables[name] = dims, values, _attributes(name)
    coords: Coordinates = {
        "site": site_names(sweep.steered.sites),
        "strength": np.array(sweep.strengths),
        "prompt": ("text", text_array(prompts)),
        "answer": text_array(list(answers.values())),
        "id": ("answer", np.array(list(answers))),
    }
    return to_dataset(variables, coords)


def _attributes(name: str) -> Attributes:
    """Return the attributes of a variable, also of one before steering."""
    attributes = ATTRIBUTES[name.removesuffix("_before")].copy()
    if name.endswith("_before"):
        attributes["long_name"] += ", before"
    return attributes


def _sizes(sweep: Sweep, states: States | Pair) -> Floats:
    """Return the norm of the direction over the median norm of the prompts' states."""
    sizes = []
    for site in sweep.steered.sites:
        norms = in_stack(states, site)[site].double().norm(dim=-1)
        # torch's median is the lower of the two middle values of an even number; a
        # quantile is their mean.
        median = norms.quantile(0.5)
        sizes.append(float(sweep.steered.vectors[site].norm() / median))
    return np.array(sizes)


def _log_odds(logs: Floats) -> Floats:
    """Return ln p/(1-p) of log-probabilities."""
    # Near p = 1, 1 - p is no smaller than float64 can tell.
    smallest = np.finfo(np.float64).eps
    odds: Floats = logs - np.log(np.maximum(-np.expm1(logs), smallest))
    return odds


def _perplexity(texts: LogProbs) -> float:
    """Return the perplexity over all tokens of all texts."""
    logs = np.concatenate([text[:, 0] for text in texts])
    with np.errstate(over="ignore"):
        return float(np.exp(-logs.mean()))


def best_setting(
    data: "xarray.Dataset", answer: int, *, within: float = WITHIN
) -> Setting | None:
    """Return the setting that moves an answer's log-odds most, of those that are cheap.

    Log-odds are averaged over the prompts. A setting is cheap if it changes the
    perplexity by at most `within`.
    """
    moves = _moves(data)[:, :, answer]
    allowed = (np.abs(data["perplexity_change"].to_numpy()) <= within) & (moves != 0)
    if not allowed.any():
        return None
    return _largest(np.where(allowed, np.abs(moves), -1))


def _largest(values: Floats) -> Setting:
    site, strength = np.unravel_index(np.argmax(values), values.shape)
    return int(site), int(strength)


def _moves(data: "xarray.Dataset") -> Floats:
    """Return the mean change of the log-odds over prompts, [site, strength, answer]."""
    after = data["log_odds"].mean("text").to_numpy()
    before = data["log_odds_before"].mean("text").to_numpy()
    moves: Floats = after - before
    return moves


def median_interval(changes: Floats, settings: int) -> list[float] | None:
    """Return the 95% interval of the median of independent changes.

    Its ends are two of them, which hold the median whatever the distribution (Thompson
    1936), corrected for the choice among settings by Bonferroni's inequality. Too few
    changes have none.
    """
    from scipy.stats import binom

    beyond = int(binom.ppf((1 - LEVEL) / 2 / settings, len(changes), 0.5))
    if not beyond:
        return None
    ranked = np.sort(changes).tolist()
    return [ranked[beyond - 1], ranked[-beyond]]


def put_written(data: "xarray.Dataset", sweep: Sweep, written: Written) -> None:
    """Put continuations into the data; those of other sites are empty."""
    dims = ("site", "strength", "text")
    shape = [data.sizes[dim] for dim in dims]
    after = np.full(shape, "", dtype=object)
    for row, strings in enumerate(written.after):
        after[written.place, row] = strings
    data["written"] = dims, after, _attributes("written")
    before = text_array(written.before)
    data["written_before"] = "text", before, _attributes("written_before")
    data.attrs["written_at"] = str(sweep.steered.sites[written.place])


def steer_facts(sweep: Sweep, data: "xarray.Dataset", quality: Reads) -> dict[str, Any]:
    """Return what was steered, and how low and how high the answers came."""
    sizes = data["size"].to_numpy()
    answers = data["answer"].to_numpy().tolist()
    return {
        "direction": sweep.steered.facts,
        "how": sweep.how,
        "upwards": sweep.upwards,
        "sites": site_names(sweep.steered.sites),
        "size": {"smallest": float(sizes.min()), "largest": float(sizes.max())},
        "settings": len(sweep.steered.sites) * len(sweep.steps),
        "prompts": data.sizes["text"],
        "quality": {
            "texts": len(quality.inputs),
            "tokens": quality.count,
            "masked_every": MASKED if masked_model(sweep.model) else None,
            "perplexity": float(data["perplexity_before"]),
            "within": WITHIN,
        },
        "best": _setting_facts(data, 0, best_setting(data, 0)),
        "strongest": _setting_facts(data, 0, best_setting(data, 0, within=math.inf)),
        "answers": [
            _answer_facts(data, place, answer) for place, answer in enumerate(answers)
        ],
    }


def written_facts(data: "xarray.Dataset", best: Setting | None, reason: str) -> Facts:
    """Return continuations of the first prompts, at the best setting or the strongest.

    `reason` says why the model cannot write.
    """
    if "written" not in data:
        return {"written": None, "not_written": reason or None}
    site = data.attrs["written_at"]
    strength = -1 if best is None else best[1]
    written = data["written"].sel(site=site).isel(strength=strength)
    texts = []
    for prompt, before, after in zip(
        data["prompt"].to_numpy()[:MOST_TEXTS],
        data["written_before"].to_numpy()[:MOST_TEXTS],
        written.to_numpy()[:MOST_TEXTS],
        strict=True,
    ):
        texts.append({"prompt": prompt, "before": before, "after": after})
    return {
        "written": {
            "site": site,
            "strength": float(written["strength"]),
            "texts": texts,
        }
    }


def _answer_facts(data: "xarray.Dataset", answer: int, string: str) -> Facts:
    """Return how low and how high an answer comes while the model stays as good."""
    facts: dict[str, Any] = {
        "answer": string,
        "probability": float(data["probability_before"][:, answer].mean()),
    }
    moves = _moves(data)[:, :, answer]
    allowed = np.abs(data["perplexity_change"].to_numpy()) <= WITHIN
    for name, sign in (("lowest", -1), ("highest", 1)):
        signed = np.where(allowed, sign * moves, 0)
        facts[name] = None
        if signed.max() > 0:
            facts[name] = _setting_facts(data, answer, _largest(signed))
    return facts


def _setting_facts(
    data: "xarray.Dataset", answer: int, setting: Setting | None
) -> SettingFacts | None:
    """Return one setting, and what it does to an answer and to the perplexity."""
    if setting is None:
        return None
    site, strength = setting
    # A prompt that was given again is no further evidence.
    _, distinct = np.unique(data["prompt"], return_index=True)
    here = data.isel(site=site, strength=strength)
    moves = (here["log_odds"] - here["log_odds_before"]).to_numpy()
    changes = moves[distinct, answer]
    before = float(data["probability_before"].isel(answer=answer).mean())
    after = float(here["probability"].isel(answer=answer).mean())
    return {
        "answer": str(data["answer"].values[answer]),
        "site": str(here["site"].item()),
        "strength": float(here["strength"]),
        "probability_before": before,
        "probability": after,
        "ratio": after / before if before else math.nan,
        "log_odds_change": float(np.median(changes)),
        "interval": median_interval(changes, data["perplexity"].size),
        "perplexity": float(here["perplexity"]),
        "perplexity_change": float(here["perplexity_change"]),
    }
