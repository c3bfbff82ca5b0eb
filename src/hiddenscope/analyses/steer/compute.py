"""The numbers of steering: the answers and the perplexity by site and strength, what is
written, and the report.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope import texts
from hiddenscope.analyses.steer.continuations import (
    cannot_generate,
    check_new_tokens,
    continue_prompts,
)
from hiddenscope.analyses.steer.steered import in_model, without_first_tokens
from hiddenscope.analyses.steer.story import (
    Quality,
    Setting,
    Sizes,
    SteeredAnswer,
    SteerReport,
    Written,
    WrittenText,
)
from hiddenscope.analyses.steer.sweep import (
    MASKED,
    How,
    LogProbs,
    Measured,
    Sweep,
    masked_model,
    prompt_reads,
    quality_reads,
)
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import NotFinite, PassError, StatesError, TextError
from hiddenscope.measures.grouped import group_sums, reach_of_all
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.passes.text_encoder import notes_on_spaces
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Variables,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.results.drawing import labels
from hiddenscope.results.report import ABSENT
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States
from hiddenscope.states.arrays import Floats, Ints
from hiddenscope.texts import Belonging, belonging, number_groups
from hiddenscope.vectors.dataset import strings_of

if TYPE_CHECKING:
    import xarray

NEW_TOKENS = 20
# Prompts whose texts are in the report; all are in the data.
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
    "perplexity_change_low": {
        "long_name": "change of the perplexity, low end of the 95% interval"
    },
    "perplexity_change_high": {
        "long_name": "change of the perplexity, high end of the 95% interval"
    },
    "size": {
        "long_name": "norm of the direction over the median norm of the prompts' states"
    },
    "written": {"long_name": "text written after the prompt"},
}


def steer_prompts(
    model: ModelLike,
    prompts: Texts | Inputs,
    direction: Direction,
    strengths: Any,
    answers: str | int | Sequence[str | int] | None,
    quality: Texts | Inputs | None,
    new_tokens: int | None,
) -> Result:
    """Measure the answers, then the perplexity, and write at the best setting."""
    model = as_model(model)
    _check_mask(model)
    steered = in_model(direction, model)
    how, multiples = _strengths(strengths)
    prompt_inputs = model.encode(prompts)
    cannot_write = cannot_generate(model)
    if new_tokens is None:
        new_tokens = 0 if cannot_write else NEW_TOKENS
    # First, so that a model that cannot write says so before the long passes.
    unsteered = _unsteered(model, prompt_inputs, new_tokens)
    listed = [answers] if isinstance(answers, str | int) else answers
    answer_ids = _answer_ids(model, prompt_inputs, listed)
    answer_reads = prompt_reads(model, prompt_inputs, tuple(answer_ids))
    if quality is None:
        quality = texts.read("plain").texts
    text_reads = quality_reads(model, quality)
    if direction.spare_first:
        all_texts = [*answer_reads.inputs.ids, *text_reads.inputs.ids]
        steered = without_first_tokens(model, steered, all_texts)
    # A tokenizer serves one thread at a time.
    with model.lock:
        notes = list(notes_on_spaces(model.tokenizer, listed or ()))
    sweep = Sweep(model, steered, how, multiples, direction.upwards, notes)
    states = model.capture(prompt_inputs, steered.sites)
    on_prompts = sweep.measure("Steering the prompts", answer_reads, states)
    words = model.text_encoder.strings
    # Passes are resumed at whole layers, and not inside a block.
    whole = [site for site in steered.sites if not site.part]
    text_states = model.capture(text_reads.inputs, whole) if whole else None
    on_quality = sweep.measure("Measuring the perplexity", text_reads, text_states)
    prompt_strings = prompt_inputs.texts or map(" ".join, map(words, prompt_inputs.ids))
    together = _belonging(prompts, prompt_inputs)
    of_quality = _belonging(quality, text_reads.inputs).groups
    costs = perplexities(on_quality, number_groups(of_quality))
    data = to_dataset(
        _columns(sweep, on_prompts, costs, states),
        {
            "site": site_names(steered.sites),
            "strength": np.array(multiples),
            "prompt": ("text", text_array(list(prompt_strings))),
            "answer": text_array(words(answer_ids)),
            "id": ("answer", np.array(answer_ids)),
        },
    )
    # Without an answer that was asked for, either way will do.
    asked = np.sign(multiples) if how == "add" and listed else np.zeros(len(multiples))
    best = strongest_setting(data, together, 0, asked)
    strongest = strongest_setting(data, together, 0, asked, within=math.inf)
    sizes = data["size"].values
    report = SteerReport(
        **together.facts,
        towards=bool(asked.any()),
        direction=steered.origin,
        how=how,
        upwards=direction.upwards,
        sites=site_names(steered.sites),
        size=Sizes(smallest=float(sizes.min()), largest=float(sizes.max())),
        settings=len(steered.sites) * len(sweep.steps),
        prompts=len(prompt_inputs),
        quality=Quality(
            texts=len(text_reads.inputs),
            tokens=sum(map(len, text_reads.positions)),
            masked_every=MASKED if masked_model(model) else None,
            perplexity=float(data["perplexity_before"]),
            within=WITHIN,
        ),
        best=best,
        strongest=strongest,
        answers=list(_extremes(data, together)),
        written=None,
        not_written=cannot_write or None,
        notes=sweep.notes,
    )
    if new_tokens:
        written = _write(
            sweep, prompt_inputs, new_tokens, data, unsteered, report.shown
        )
        report = replace(report, written=written, not_written=ABSENT)
    return Result("steer", data, report, model.source(model.anatomy.sites[-1].stack))


def _unsteered(model: Model, prompts: Inputs, new_tokens: int) -> list[str]:
    """Continue the prompts as the model is, or refuse to."""
    if not new_tokens:
        return []
    if cannot_write := cannot_generate(model):
        raise PassError(
            f"{model.name} cannot write {new_tokens} new tokens",
            cannot_write,
            "Leave `new_tokens` out.",
        )
    check_new_tokens(model, prompts, new_tokens)
    (unsteered,) = continue_prompts(model, prompts, new_tokens)
    return unsteered


def _check_mask(model: Model) -> None:
    """Refuse a masked language model whose tokenizer has no mask."""
    mask = getattr(model.tokenizer, "mask_token_id", None)
    if masked_model(model) and not isinstance(mask, int):
        raise PassError(
            f"Cannot steer {model.name}",
            "it is a masked language model, and its tokenizer has no mask token",
            "Load it with the tokenizer that has one.",
        )


def _strengths(strengths: Any) -> tuple[How, tuple[float, ...]]:
    """Return how states are changed, and the multiples of the direction.

    An ablation has the strength 1.
    """
    if isinstance(strengths, str) and strengths == "ablate":
        return "ablate", (1.0,)
    try:
        values = [strengths] if np.ndim(strengths) == 0 else strengths
        numbers = [float(value) for value in values]
    except (TypeError, ValueError):
        raise StatesError(
            "strengths must be numbers or 'ablate'",
            f"got {strengths!r:.60}",
            "Give numbers such as [-1, 1].",
        ) from None
    if not numbers or len(set(numbers)) < len(numbers):
        raise StatesError(
            f"strengths are {numbers}",
            "one comes twice" if numbers else "there are none",
            "Give at least one, and each once.",
        )
    if not all(map(math.isfinite, numbers)):
        raise NotFinite(
            f"strengths are {numbers}", "one is not finite", "Give finite numbers."
        )
    return "add", tuple(sorted(numbers))


def _answer_ids(
    model: Model, prompts: Inputs, answers: Sequence[str | int] | None
) -> list[int]:
    """Return the answers as single tokens: by default those that are the most likely
    after each prompt.
    """
    ids = []
    if answers is None:
        reads = prompt_reads(model, prompts, ())
        for number, (position,) in enumerate(reads.positions):
            logits = record(model, prompts.some([number]), (), logits=True).logits
            assert logits is not None
            ids.append(int(logits[position].argmax()))
        return list(dict.fromkeys(ids))
    with model.lock:
        ids += [model.text_encoder.single(answer, "answer") for answer in answers]
    if not ids or len(set(ids)) < len(ids):
        raise TextError(
            f"Cannot use the answers {answers}",
            "two of them are the same token" if ids else "there are none",
            "Give each once, or leave `answers` out.",
        )
    return ids


def _belonging(texts: Any, inputs: Inputs) -> Belonging:
    """Find which texts belong together."""
    groups = getattr(texts, "groups", None)
    return belonging(strings_of(inputs), [""] * len(inputs), groups)


def perplexities(measured: Measured, groups: Ints) -> dict[str, Floats]:
    """Return the perplexity over all tokens, before and by site and strength, and its
    change as a share with the ends of its interval.

    The mean loss of a token is a ratio of sums over texts. Intervals hold for all
    settings together, so that they allow for a choice among them. Without eight groups
    of texts they are NaN.
    """
    tokens = np.array([len(text) for text in measured.before])
    before = _losses(measured.before)
    after = np.array([list(map(_losses, row)) for row in measured.after])
    shape = after.shape[:2]
    with np.errstate(over="ignore", invalid="ignore"):
        mean_before, means = (np.exp(a.sum(-1) / tokens.sum()) for a in (before, after))
        ratio = means / mean_before
        rises = (after - before).reshape(-1, len(tokens)).T
        reach = reach_of_all(rises, groups, tokens[:, None])
        reach = np.full(shape, np.nan) if reach is None else reach.reshape(shape)
        return {
            "perplexity_before": mean_before,
            "perplexity": means,
            "perplexity_change": ratio - 1,
            "perplexity_change_low": ratio * np.exp(-reach) - 1,
            "perplexity_change_high": ratio * np.exp(reach) - 1,
        }


def _losses(texts: LogProbs) -> Floats:
    return np.array([-text.sum() for text in texts])


def _columns(
    sweep: Sweep, on_prompts: Measured, costs: dict[str, Floats], states: States | Pair
) -> Variables:
    """Return probabilities, log-odds and perplexities by site and strength.

    `costs` are the perplexities. `states` are those of the prompts, beside which the
    direction is large or small.
    """
    settings, cells = ("site", "strength"), ("text", "answer")
    sizes = []
    for site in sweep.steered.sites:
        norms = states[site].double().norm(dim=-1)
        # torch's median is the lower of the two middle values of an even number; a
        # quantile is their mean.
        sizes.append(float(sweep.steered.vectors[site].norm() / norms.quantile(0.5)))
    columns = {
        "probability": (settings + cells, np.exp(on_prompts.answers_after)),
        "log_odds": (settings + cells, _log_odds(on_prompts.answers_after)),
        "probability_before": (cells, np.exp(on_prompts.answers_before)),
        "log_odds_before": (cells, _log_odds(on_prompts.answers_before)),
        "size": (("site",), np.array(sizes)),
    }
    columns |= {name: (settings[: cost.ndim], cost) for name, cost in costs.items()}
    return {
        name: (dims, values, _attributes(name))
        for name, (dims, values) in columns.items()
    }


def _attributes(name: str) -> Attributes:
    """Return the attributes of a variable, also of one before steering."""
    attributes = ATTRIBUTES[name.removesuffix("_before")].copy()
    if name.endswith("_before"):
        attributes["long_name"] += ", before"
    return attributes


def _log_odds(logs: Floats) -> Floats:
    """Return ln p/(1-p) of log-probabilities."""
    # Near p = 1, 1 - p is no smaller than float64 can tell.
    smallest = np.finfo(np.float64).eps
    return logs - np.log(np.maximum(-np.expm1(logs), smallest))


def strongest_setting(
    data: "xarray.Dataset",
    together: Belonging,
    answer: int,
    signs: Floats,
    *,
    within: float = WITHIN,
) -> Setting | None:
    """Return the setting that moves an answer's log-odds most, of those that are cheap:
    up or down by the sign of each strength, and either way with 0.

    It moves them by the median over groups of prompts. A setting is cheap if it changes
    the perplexity by at most `within`, up to the ends of its interval where there is
    one.
    """
    # A prompt that was given again is no further evidence, and a group counts as one.
    distinct = np.flatnonzero(together.first)
    groups = number_groups([together.groups[number] for number in distinct])
    moves = (data["log_odds"] - data["log_odds_before"]).values[..., distinct, answer]
    by_prompt = moves.transpose(2, 0, 1)
    changes = group_sums(by_prompt, groups) / np.bincount(groups)[:, None, None]
    medians = np.median(changes, 0)
    distances = np.where(signs == 0, np.abs(medians), signs * medians)
    costs = [data[f"perplexity_change{end}"].values for end in ("", "_low", "_high")]
    cheap = np.fmax.reduce(np.abs(costs)) <= within
    distances = np.where(cheap & (distances > 0), distances, 0)
    if not distances.any():
        return None
    site, strength = np.unravel_index(np.argmax(distances), distances.shape)
    here = data.isel(site=site, strength=strength)
    before = float(data["probability_before"].isel(answer=answer).mean())
    after = float(here["probability"].isel(answer=answer).mean())
    change, *ends = (float(cost[site, strength]) for cost in costs)
    return Setting(
        answer=str(data["answer"].values[answer]),
        site=str(here["site"].item()),
        strength=float(here["strength"]),
        probability_before=before,
        probability=after,
        ratio=after / before if before else math.nan,
        log_odds_change=float(medians[site, strength]),
        interval=median_interval(changes[:, site, strength], data["perplexity"].size),
        perplexity=float(here["perplexity"]),
        perplexity_change=change,
        perplexity_interval=ends if np.isfinite(ends).all() else None,
    )


def _extremes(data: "xarray.Dataset", together: Belonging) -> Iterator[SteeredAnswer]:
    """Yield how low and how high each answer comes while the model stays as good."""
    down, up = -np.ones(data.sizes["strength"]), np.ones(data.sizes["strength"])
    for place, answer in enumerate(labels(data, "answer")):
        yield SteeredAnswer(
            answer=answer,
            probability=float(data["probability_before"][:, place].mean()),
            lowest=strongest_setting(data, together, place, down),
            highest=strongest_setting(data, together, place, up),
        )


def median_interval(changes: Floats, settings: int) -> list[float] | None:
    """Return the 95% interval of the median of independent changes, one a group.

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


def _write(
    sweep: Sweep,
    prompts: Inputs,
    new_tokens: int,
    data: "xarray.Dataset",
    before: list[str],
    shown: Setting | None,
) -> Written:
    """Continue the prompts before and after steering at one site, and put the texts
    into the data; those of other sites are empty.
    """
    site, strength = sweep.steered.sites[0], sweep.strengths[-1]
    if shown is not None:
        site, strength = Site.parse(shown.site), shown.strength
    steered = []
    if sweep.steps:
        intervention = sweep.intervention(site)
        steered = continue_prompts(sweep.model, prompts, new_tokens, intervention)
    by_strength = sweep.with_unchanged(steered, before)
    dims = ("site", "strength", "text")
    after = np.full([data.sizes[dim] for dim in dims], "", dtype=object)
    after[sweep.steered.sites.index(site)] = by_strength
    data["written"] = dims, after, _attributes("written")
    attributes = _attributes("written_before")
    data["written_before"] = "text", text_array(before), attributes
    data.attrs["written_at"] = str(site)
    prompt_strings = labels(data, "prompt")
    steered_texts = by_strength[sweep.strengths.index(strength)]
    written = map(WrittenText, prompt_strings, before, steered_texts)
    return Written(site=str(site), strength=strength, texts=list(written)[:MOST_TEXTS])
