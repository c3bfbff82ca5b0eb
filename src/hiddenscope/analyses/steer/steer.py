"""Can a direction change what the model writes, and what does that cost?"""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hiddenscope import progress, texts
from hiddenscope.analyses.steer.direction import (
    Direction,
    Steered,
    in_model,
    in_stack,
    sites_above,
    without_first_tokens,
)
from hiddenscope.analyses.steer.logprobs import (
    MASKED,
    Advance,
    How,
    Intervention,
    LogProbs,
    Reader,
    Reads,
    cannot_generate,
    check_head,
    check_new_tokens,
    generate,
    log_probs,
    masked_model,
    prompt_reads,
    quality_reads,
    steered_log_probs,
)
from hiddenscope.arguments import checked
from hiddenscope.errors import NotFinite, PassError, StatesError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site
from hiddenscope.states import Pair, States

if TYPE_CHECKING:
    import xarray

Numbers: TypeAlias = NDArray[np.float64]
Setting: TypeAlias = tuple[int, int]  # the places of a site and a strength in the data
Answers: TypeAlias = str | int | Sequence[str | int]

STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
NEW_TOKENS = 20
MOST_TEXTS = 12  # prompts whose texts are among the facts; all are in the data
WITHIN = 0.05  # a change of the perplexity that leaves the model as good as it was
LOOKS: dict[str, dict[str, str]] = {
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


@checked
def steer(
    model: ModelLike,
    prompts: Texts | Inputs,
    direction: Direction,
    *,
    strengths: Sequence[float] | float | Literal["ablate"] = STRENGTHS,
    answers: Answers | None = None,
    quality: Texts | Inputs | None = None,
    new_tokens: int | None = None,
) -> Result:
    """Change the states of a model along a direction, and see what it answers and
    writes, and how good it still is.

    The direction is added to the state of every token, `strengths` times; with
    `strengths="ablate"` it is projected out. `answers` are the tokens to look at, the
    model's most likely ones if not given. `quality` are the texts that the perplexity
    is measured on, 40 plain sentences if not given. `new_tokens` are written after each
    prompt.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> direction = hs.Direction.between(model, [[5, 6]], [[7, 8]])
    >>> result = hs.steer(model, [[5, 6, 7]], direction, answers=[3, 4], quality=[[9, 8, 7, 6]], new_tokens=2)
    >>> dict(result.data["probability"].sizes)
    {'site': 3, 'strength': 5, 'text': 1, 'answer': 2}
    """
    model = as_model(model)
    check_head(model)
    steered, (how, multiples) = in_model(direction, model), _strengths(strengths)
    prompt_inputs = model.encode(prompts)
    new_tokens = _new_tokens(model, prompt_inputs, new_tokens)
    tokens = _answers(model, prompt_inputs, answers)
    answer_reads = prompt_reads(model, prompt_inputs, tuple(tokens))
    text_reads = quality_reads(
        model, texts.read("plain").texts if quality is None else quality
    )
    if direction.spare_first:
        steered = without_first_tokens(
            model, steered, [*answer_reads.inputs.ids, *text_reads.inputs.ids]
        )
    sweep = Sweep(model, steered, how, multiples, direction.upwards)
    states = model.capture(prompt_inputs, steered.sites)
    with progress.track(
        "Steering the prompts", total=sweep.tokens(answer_reads)
    ) as advance:
        on_prompts = sweep.measure(answer_reads, states, advance)
    # The perplexity takes many times as long.
    for line in _first_look(sweep, on_prompts, list(tokens.values())):
        progress.note(line)
    with progress.track(
        "Measuring the perplexity", total=sweep.tokens(text_reads)
    ) as advance:
        on_quality = sweep.measure(text_reads, sweep.capture(text_reads), advance)
    data = _data(sweep, on_prompts, on_quality)
    strings = prompt_inputs.texts or [
        " ".join(map(model.text_encoder.string, ids)) for ids in prompt_inputs.ids
    ]
    data.coords.update(
        {
            "prompt": ("text", _objects(strings)),
            "answer": _objects(list(tokens.values())),
        }
    )
    data.coords["id"] = "answer", np.array(list(tokens))
    data["size"] = "site", _sizes(steered, states), dict(LOOKS["size"])
    best = _best(data, 0)
    if new_tokens:
        _write(sweep, data, prompt_inputs, new_tokens, best)
    facts = {
        **_facts(sweep, data, text_reads, best),
        **_written(data, best, cannot_generate(model)),
        "notes": sweep.notes,
    }
    return Result("steer", data, facts, model.source(model.anatomy.sites[-1].stack))


def _strengths(strengths: Any) -> tuple[How, tuple[float, ...]]:
    """How states are changed, and the multiples of the direction; an ablation is
    written as strength 1.
    """
    if isinstance(strengths, str):
        if strengths != "ablate":
            raise StatesError(
                "strengths must be numbers or 'ablate'",
                f"got {strengths!r:.40}",
                "Give numbers such as [-1, 1].",
            )
        return "ablate", (1.0,)
    try:
        numbers = tuple(
            float(one)
            for one in ([strengths] if np.ndim(strengths) == 0 else strengths)
        )
    except (TypeError, ValueError):
        raise StatesError(
            "strengths must be numbers",
            f"got {strengths!r:.60}",
            "Give numbers such as [-1, 1].",
        ) from None
    if not numbers or len(set(numbers)) < len(numbers):
        reason = "one comes twice" if numbers else "there are none"
        raise StatesError(
            f"strengths are {list(numbers)}",
            reason,
            "Give at least one, and each once.",
        )
    if not all(map(math.isfinite, numbers)):
        raise NotFinite(
            f"strengths are {list(numbers)}",
            "one is not finite",
            "Give finite numbers.",
        )
    return "add", tuple(sorted(numbers))


def _new_tokens(model: Model, prompts: Inputs, new_tokens: Any) -> int:
    """How many tokens are written: as many as are asked for, or some if the model can
    continue a text.
    """
    reason = cannot_generate(model)
    if new_tokens is not None and (not isinstance(new_tokens, int) or new_tokens < 0):
        raise TextError(
            "new_tokens must be an integer >= 0",
            f"got {new_tokens!r}",
            "Give 0 to write nothing.",
        )
    if reason and new_tokens:
        raise PassError(
            f"{model.name} cannot write {new_tokens} new tokens",
            reason,
            "Leave `new_tokens` out.",
        )
    count = 0 if reason else NEW_TOKENS if new_tokens is None else new_tokens
    check_new_tokens(model, prompts, count)
    return count


def _answers(model: Model, prompts: Inputs, answers: Any) -> dict[int, str]:
    """The answers as single tokens, each with its string."""
    if answers is None:
        ids = _most_likely(model, prompts)
    else:
        listed = [answers] if isinstance(answers, str | int) else list(answers)
        if not listed:
            raise TextError(
                "answers must not be empty",
                "the list is empty",
                "Give one, or leave `answers` out.",
            )
        with model.lock:
            ids = [model.text_encoder.single(answer, "answer") for answer in listed]
        if len(set(ids)) < len(ids):
            raise TextError(
                f"Cannot use the answers {listed}",
                "two of them are the same token",
                "Give each once.",
            )
    return {token: model.text_encoder.string(token) for token in ids}


def _most_likely(model: Model, prompts: Inputs) -> list[int]:
    """The most likely next token of each prompt, each once."""
    reads, tokens = prompt_reads(model, prompts, ()), []
    for number, (position,) in enumerate(reads.positions):
        logits = record(model, prompts.some([number]), (), logits=True).logits
        assert logits is not None
        tokens.append(int(logits[position].argmax()))
    return list(dict.fromkeys(tokens))


class Sweep:
    """A direction added or ablated at one site after another, with every strength."""

    def __init__(
        self,
        model: Model,
        steered: Steered,
        how: How,
        strengths: tuple[float, ...],
        upwards: bool,
    ) -> None:
        self.model, self.steered, self.how, self.strengths, self.upwards = (
            model,
            steered,
            how,
            strengths,
            upwards,
        )
        # Strength 0 is the model as it is, and is not run again.
        self.steps = tuple(one for one in strengths if one)
        self.reader, self.notes = Reader(model), list[str]()

    def intervention(self, site: Site) -> Intervention:
        """What is done to steer at one site."""
        changed = sites_above(tuple(self.steered.vectors), site, self.upwards)
        return Intervention(
            self.how, {one: self.steered.vectors[one] for one in changed}, self.steps
        )

    def tokens(self, reads: Reads) -> int:
        """How many tokens go through the model to measure some texts."""
        return sum(reads.inputs.costs) * (1 + len(self.steered.sites) * len(self.steps))

    def capture(self, reads: Reads) -> States | Pair | None:
        """The states at the sites where passes are entered; inside a block they cannot
        be.
        """
        whole = [site for site in self.steered.sites if not site.part]
        return self.model.capture(reads.inputs, whole) if whole else None

    def measure(
        self, reads: Reads, states: States | Pair | None, advance: Advance
    ) -> "Measured":
        """The log-probabilities of some texts: as the model is, and by site and
        strength.
        """
        before = log_probs(self.reader, reads, advance)
        after = []
        for site in self.steered.sites:
            values: Iterator[LogProbs] = iter(())
            if self.steps:
                steered, note = steered_log_probs(
                    self.reader, reads, states, self.intervention(site), advance
                )
                values = iter(steered)
                self.notes += [note] if note and note not in self.notes else []
            after.append(
                [next(values) if strength else before for strength in self.strengths]
            )
        return Measured(before, after)


class Measured(NamedTuple):
    """Log-probabilities of some texts before steering, and after by site and strength."""

    before: LogProbs
    after: list[list[LogProbs]]


def _first_look(
    sweep: Sweep, on_prompts: Measured, answers: Sequence[str]
) -> Iterator[str]:
    """The lowest and the highest probability of each answer, on average over the
    prompts, whatever they cost.
    """
    before = np.exp([text[0] for text in on_prompts.before]).mean(0)
    after = np.exp(
        [[[text[0] for text in cell] for cell in row] for row in on_prompts.after]
    ).mean(2)
    for place, answer in enumerate(answers):
        extremes = []
        for name, find in (("lowest", np.argmin), ("highest", np.argmax)):
            site, strength = np.unravel_index(find(after[..., place]), after.shape[:2])
            where = f"{sweep.steered.sites[site]}" + (
                f", strength {sweep.strengths[strength]:g}" * (sweep.how == "add")
            )
            extremes.append(f"{name} {after[site, strength, place]:.2g} at {where}")
        yield (
            f"{answer!r}: probability {before[place]:.2g} before;"
            f" {'; '.join(extremes)}. The perplexity follows."
        )


def _sizes(steered: Steered, states: States | Pair) -> Numbers:
    """The norm of the direction over the median norm of the prompts' states, at each
    site.
    """
    # torch's median is the lower of the two middle values of an even number; a quantile
    # is their mean.
    norms = [
        in_stack(states, site)[site].double().norm(dim=-1).quantile(0.5)
        for site in steered.sites
    ]
    return np.array(
        [
            float(steered.vectors[site].norm() / norm)
            for site, norm in zip(steered.sites, norms, strict=True)
        ]
    )


def _data(sweep: Sweep, on_prompts: Measured, on_quality: Measured) -> "xarray.Dataset":
    """Probabilities, log-odds and perplexities by site and strength."""
    import xarray

    cells = ("site", "strength", "text", "answer")
    prompts = np.array(
        [[[text[0] for text in cell] for cell in row] for row in on_prompts.after]
    )
    prompts_before = np.array([text[0] for text in on_prompts.before])
    perplexity = np.array(
        [[_perplexity(cell) for cell in row] for row in on_quality.after]
    )
    perplexity_before = _perplexity(on_quality.before)
    columns: dict[str, Any] = {
        "probability": (cells, np.exp(prompts)),
        "log_odds": (cells, _log_odds(prompts)),
        "perplexity": (cells[:2], perplexity),
        "perplexity_change": (cells[:2], perplexity / perplexity_before - 1),
        "probability_before": (cells[2:], np.exp(prompts_before)),
        "log_odds_before": (cells[2:], _log_odds(prompts_before)),
        "perplexity_before": ((), perplexity_before),
    }
    sites = [str(site) for site in sweep.steered.sites]
    data = xarray.Dataset(columns, {"site": sites, "strength": list(sweep.strengths)})
    for name, variable in data.items():
        look = dict(LOOKS[str(name).removesuffix("_before")])
        look["long_name"] += ", before" if str(name).endswith("_before") else ""
        variable.attrs.update(look)
    return data


def _log_odds(logs: Numbers) -> Numbers:
    """ln p/(1-p) of log-probabilities; near p = 1, the largest that float64 can tell."""
    tiny = np.finfo(np.float64).eps
    odds: Numbers = logs - np.log(np.maximum(-np.expm1(logs), tiny))
    return odds


def _perplexity(values: LogProbs) -> float:
    """Over all tokens of all texts."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.concatenate([text[:, 0] for text in values]).mean()))


def _objects(strings: Sequence[str]) -> NDArray[np.object_]:
    return np.array([*strings, None], dtype=object)[:-1]


def _best(
    data: "xarray.Dataset", answer: int, *, within: float = WITHIN
) -> Setting | None:
    """The setting that moves an answer's log-odds most, on average over the prompts,
    and leaves the model as good.
    """
    moves = _moves(data)[:, :, answer]
    allowed = (np.abs(data["perplexity_change"].to_numpy()) <= within) & (moves != 0)
    if not allowed.any():
        return None
    site, strength = np.unravel_index(
        np.argmax(np.where(allowed, np.abs(moves), -1)), moves.shape
    )
    return int(site), int(strength)


def _moves(data: "xarray.Dataset") -> Numbers:
    """The change of the log-odds [site, strength, answer], on average over the prompts."""
    after, before = (
        data[name].mean("text").to_numpy() for name in ("log_odds", "log_odds_before")
    )
    moves: Numbers = after - before
    return moves


def _write(
    sweep: Sweep,
    data: "xarray.Dataset",
    prompts: Inputs,
    new_tokens: int,
    best: Setting | None,
) -> None:
    """The texts before and after, with every strength, at the site of the best setting."""
    place = (best or _best(data, 0, within=math.inf) or (0, 0))[0]
    site = sweep.steered.sites[place]
    (before,) = generate(sweep.model, prompts, new_tokens, None)
    after = np.full(
        (data.sizes["site"], len(sweep.strengths), len(prompts)), "", dtype=object
    )
    steps = iter(
        generate(sweep.model, prompts, new_tokens, sweep.intervention(site))
        if sweep.steps
        else ()
    )
    for row, strength in enumerate(sweep.strengths):
        after[place, row] = next(steps) if strength else before
    data["written"] = ("site", "strength", "text"), after, dict(LOOKS["written"])
    look = {"long_name": f"{LOOKS['written']['long_name']}, before"}
    data["written_before"] = "text", _objects(before), look
    data.attrs["written_at"] = str(site)


def _facts(
    sweep: Sweep, data: "xarray.Dataset", quality: Reads, best: Setting | None
) -> dict[str, Any]:
    sizes, strings = data["size"].to_numpy(), data["answer"].to_numpy().tolist()
    return {
        "direction": sweep.steered.facts,
        "how": sweep.how,
        "upwards": sweep.upwards,
        "sites": [str(site) for site in sweep.steered.sites],
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
        "best": None if best is None else _setting(data, 0, best),
        "answers": [
            _extremes(data, place, string) for place, string in enumerate(strings)
        ],
    }


def _written(data: "xarray.Dataset", best: Setting | None, reason: str) -> Facts:
    """The first prompts with what is written after them, before and at the best
    setting, or the strongest.
    """
    if "written" not in data:
        return {"written": None, "not_written": reason or None}
    strength = -1 if best is None else best[1]
    after = data["written"].sel(site=data.attrs["written_at"]).isel(strength=strength)
    columns = (data["prompt"], data["written_before"], after)
    rows = list(zip(*(column.to_numpy().tolist() for column in columns), strict=True))[
        :MOST_TEXTS
    ]
    shown = [
        {"prompt": prompt, "before": before, "after": now}
        for prompt, before, now in rows
    ]
    return {
        "written": {
            "site": data.attrs["written_at"],
            "strength": float(after["strength"]),
            "texts": shown,
        }
    }


def _extremes(data: "xarray.Dataset", answer: int, string: str) -> Facts:
    """How low and how high an answer can be brought while the model stays as good."""
    facts: dict[str, Any] = {
        "answer": string,
        "probability": float(data["probability_before"][:, answer].mean()),
    }
    moves = _moves(data)[:, :, answer]
    allowed = np.abs(data["perplexity_change"].to_numpy()) <= WITHIN
    for name, sign in (("lowest", -1), ("highest", 1)):
        signed = np.where(allowed, sign * moves, 0)
        site, strength = np.unravel_index(np.argmax(signed), moves.shape)
        facts[name] = (
            _setting(data, answer, (int(site), int(strength)))
            if signed.max() > 0
            else None
        )
    return facts


def _setting(data: "xarray.Dataset", answer: int, setting: Setting) -> Facts:
    """One setting, with what it does to an answer and to the perplexity."""
    here = data.isel(site=setting[0], strength=setting[1])
    before, after = (
        float(one.isel(answer=answer).mean())
        for one in (data["probability_before"], here["probability"])
    )
    return {
        "answer": str(data["answer"].values[answer]),
        "site": str(here["site"].item()),
        "strength": float(here["strength"]),
        "probability_before": before,
        "probability": after,
        "ratio": after / before if before else math.nan,
        "perplexity": float(here["perplexity"]),
        "perplexity_change": float(here["perplexity_change"]),
    }
