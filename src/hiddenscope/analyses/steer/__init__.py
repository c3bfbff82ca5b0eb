"""Can what the model says be changed along a direction, and what does that cost?

directions  along what its states are changed
questions   what is asked of it: answers to prompts, and every token of plain texts
running     what it says, as it is or while its states are changed
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from hiddenscope import progress, texts
from hiddenscope.analyses.steer.directions import Directions, above, directions, part_at, sparing
from hiddenscope.analyses.steer.questions import (
    Answers,
    Question,
    answers_of,
    check_head,
    masked,
    plain_texts_of,
    prompts_of,
)
from hiddenscope.analyses.steer.running import (
    SKIPPED,
    How,
    Said,
    Steering,
    as_it_is,
    check_room,
    refuses_to_write,
    steered,
    written,
)
from hiddenscope.errors import NotFinite, PassError, StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Texts, record
from hiddenscope.results import Result
from hiddenscope.sites import Site, summarise
from hiddenscope.states import Pair, States

if TYPE_CHECKING:
    import xarray

Numbers: TypeAlias = NDArray[np.float64]

STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
NEW_TOKENS = 20
TOLD = 12  # prompts whose texts are among the facts; all are in the data
WITHIN = 0.05  # a change of the perplexity that leaves the model as good as it was
LOOKS: dict[str, dict[str, str]] = {
    "probability": {"long_name": "probability of the answer"},
    "log_odds": {"long_name": "log-odds of the answer", "units": "nats", "meaning": "diverging"},
    "perplexity": {"long_name": "perplexity on other texts", "scale": "log"},
    "perplexity_change": {"long_name": "change of the perplexity, as a share of it", "meaning": "diverging"},
    "size": {"long_name": "norm of the direction over the median norm of the prompts' states"},
    "written": {"long_name": "text written after the prompt"},
}


def steer(
    model: Model,
    prompts: Texts,
    *,
    along: Any,
    how: How = "add",
    strengths: Sequence[float] | float | None = None,
    sites: Any = None,
    upwards: bool = False,
    answers: Any = None,
    quality: Texts | None = None,
    pool: str = "last",
    spare_first: bool = False,
    new_tokens: int | None = None,
) -> Result:
    """Change what the model says along a direction, and see what it says then, and how good it still is.

    `along` is two sets of texts (the mean state of the first less that of the second, pooled by `pool`), a vector, a
    fitted probe, or either by site. It is added at every token, `strengths` times, or with `how="ablate"` taken out of
    every state; at one of `sites` at a time (a probe's own, if not given), or with `upwards` there and in every layer
    above. `answers` are the tokens to look at, the model's own first choices if not given. `quality` are texts that its
    perplexity is measured on.
    `spare_first` takes the first token's state out of the direction: attention rests there, and it is easily broken.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model, others = hs.load((tiny_model("llama"), None)), [[9, 8, 7, 6]]
    >>> result = hs.steer(model, [[5, 6, 7]], along=([[5, 6]], [[7, 8]]), answers=[3, 4], quality=others, new_tokens=2)
    >>> dict(result.data["probability"].sizes)
    {'site': 3, 'strength': 5, 'text': 1, 'answer': 2}
    """
    check_head(model)
    chosen = _strengths(how, strengths)
    new = _new_tokens(model, new_tokens)
    asked, named = prompts_of(model, prompts)
    looked = answers_of(model, _own_choices(model, asked) if answers is None else answers)
    asked, _ = prompts_of(model, prompts, looked.ids)
    if new:
        check_room(model, asked, new)
    others = plain_texts_of(model, texts.read("plain").texts if quality is None else quality)
    found = directions(model, along, sites, pool, upwards=upwards)
    if spare_first:
        found = sparing(model, found, [question.ids for question in (*asked, *others)])
    run = _Run(model, how, chosen, upwards, found, [*asked, *others], len(asked))
    data = run.measured(looked, named)
    best = _best(data, 0)
    if new:
        _write(run, data, asked, new, best)
    facts = _facts(run, data, looked, best) | _texts(data, best, refuses_to_write(model))
    return Result("steer", data, facts, model.source(model.anatomy.sites[-1].stack))


def _strengths(how: Any, strengths: Any) -> tuple[float, ...]:
    if how not in get_args(How):
        raise StatesError(f"Steering by {str(how)[:40]!r}", "there are two ways", "Ask for 'add' or 'ablate'.")
    if how == "ablate":
        if strengths is not None:
            reason = "what lies along the direction is taken out whole"
            raise StatesError("A strength of ablation", reason, "Leave `strengths` out, or ask for how='add'.")
        return (1.0,)
    given = STRENGTHS if strengths is None else [strengths] if np.ndim(strengths) == 0 else strengths
    try:
        numbers = tuple(float(one) for one in given)
    except (TypeError, ValueError):
        raise StatesError(f"The strengths {given!r}", "they are no numbers", "Give numbers, such as [-1, 1].") from None
    if not numbers or len(set(numbers)) < len(numbers):
        reason = "one comes twice" if numbers else "there are none"
        raise StatesError(f"The strengths {list(numbers)}", reason, "Give each once, and one at least.")
    if not all(map(math.isfinite, numbers)):
        raise NotFinite(f"The strengths {list(numbers)}", "one is not finite", "Give finite numbers.")
    return tuple(sorted(numbers))


def _new_tokens(model: Model, asked: int | None) -> int:
    """How many tokens are written: those that were asked for, or some if the model writes at all."""
    why_not = refuses_to_write(model)
    if why_not and asked:
        raise PassError(f"{asked} new tokens of {model.name}", why_not, "Leave `new_tokens` out.")
    return 0 if why_not else NEW_TOKENS if asked is None else asked


def _own_choices(model: Model, asked: Sequence[Question]) -> list[int]:
    """The most likely token of each prompt."""
    found = []
    for question in asked:
        aim = None if question.aim is None else [list(question.aim)]
        logits = record(model, [list(question.ids)], model.anatomy.sites[-1], targets=aim, logits=True).logits
        assert logits is not None
        found.append(int(logits[question.rows[0]].argmax()))
    return list(dict.fromkeys(found))


class _Run:
    """One sweep over sites and strengths; the first questions are the prompts, the others measure quality."""

    def __init__(
        self,
        model: Model,
        how: How,
        strengths: tuple[float, ...],
        upwards: bool,
        found: Directions,
        asked: list[Question],
        prompts: int,
    ) -> None:
        self.model, self.how, self.strengths, self.upwards = model, how, strengths, upwards
        self.found, self.asked, self.prompts = found, asked, prompts
        self.ways: list[str] = []
        self.steps = tuple(one for one in strengths if one)  # strength 0 is the model as it is, and is not run again

    def doing(self, site: Site) -> Steering:
        """What is done when one site is steered."""
        changed = above(tuple(self.found.vectors), site, self.upwards)
        return Steering(self.how, {one: self.found.vectors[one] for one in changed}, self.steps)

    def measured(self, answers: Answers, prompts: list[str]) -> "xarray.Dataset":
        """Everything but the texts that are written."""
        sites = self.found.sites
        states = self._states([site for site in sites if not site.part])
        tokens = sum(len(question.ids) + len(question.aim or ()) for question in self.asked)
        with progress.track("Steering", total=tokens * (1 + len(sites) * len(self.steps))) as advance:
            before = as_it_is(self.model, self.asked, advance)
            after: list[list[Said]] = []
            for site in sites:
                held = None if site.part else states
                said: list[Said] = []
                if self.steps:
                    said, how = steered(self.model, self.asked, held, self.doing(site), advance)
                    self.ways.append(how)
                steps = iter(said)
                after.append([next(steps) if strength else before for strength in self.strengths])
        data = _data(sites, self.strengths, self.prompts, before, after)
        data.coords.update({"prompt": ("text", _objects(prompts)), "answer": _objects(list(answers.strings))})
        data.coords["id"] = "answer", np.array(answers.ids)
        data["size"] = "site", self._sizes(states), dict(LOOKS["size"])
        return data

    def _states(self, sites: list[Site]) -> States | Pair | None:
        """The states of all questions where passes are entered."""
        if not sites:
            return None
        aims = [list(question.aim) for question in self.asked if question.aim is not None] or None
        ids = [list(question.ids) for question in self.asked]
        return self.model.capture(ids, list(map(str, sites)), targets=aims)

    def _sizes(self, states: States | Pair | None) -> Numbers:
        """The norm of each direction over the median norm of the prompts' states."""
        aims = [list(question.aim) for question in self.asked[: self.prompts] if question.aim is not None] or None
        ids = [list(question.ids) for question in self.asked[: self.prompts]]
        sizes = []
        for site in self.found.sites:
            whole = self.model.capture(ids, str(site), targets=aims) if site.part or states is None else states
            own = part_at(whole, site)
            rows = own[site][own.tokens.text < self.prompts].double()
            sizes.append(float(self.found.vectors[site].norm()) / float(rows.norm(dim=-1).median()))
        return np.array(sizes)


def _data(
    sites: Sequence[Site], strengths: Sequence[float], prompts: int, before: Said, after: list[list[Said]]
) -> "xarray.Dataset":
    """Log-probabilities as they are read."""
    import xarray

    cells = ("site", "strength", "text", "answer")
    said = np.array([[[one[0] for one in cell[:prompts]] for cell in row] for row in after])
    perplexity = np.array([[_perplexity(cell[prompts:]) for cell in row] for row in after])
    first = np.array([one[0] for one in before[:prompts]])
    was = _perplexity(before[prompts:])
    columns: dict[str, Any] = {
        "probability": (cells, np.exp(said)),
        "log_odds": (cells, _log_odds(said)),
        "perplexity": (cells[:2], perplexity),
        "perplexity_change": (cells[:2], perplexity / was - 1),
        "probability_before": (cells[2:], np.exp(first)),
        "log_odds_before": (cells[2:], _log_odds(first)),
        "perplexity_before": ((), was),
    }
    data = xarray.Dataset(columns, {"site": [str(site) for site in sites], "strength": list(strengths)})
    for name, variable in data.items():
        look = dict(LOOKS[str(name).removesuffix("_before")])
        look["long_name"] += ", before" if str(name).endswith("_before") else ""
        variable.attrs.update(look)
    return data


def _log_odds(said: Numbers) -> Numbers:
    """ln p/(1-p) of log-probabilities; where nothing is left for the others, the largest that float64 can tell."""
    tiny = np.finfo(np.float64).eps
    odds: Numbers = said - np.log(np.maximum(-np.expm1(said), tiny))
    return odds


def _perplexity(said: Said) -> float:
    """Over all tokens of all texts."""
    with np.errstate(over="ignore"):
        return float(np.exp(-np.concatenate([one[:, 0] for one in said]).mean()))


def _objects(strings: list[str]) -> NDArray[np.object_]:
    return np.array([*strings, None], dtype=object)[:-1]


Setting: TypeAlias = tuple[int, int]


def _best(data: "xarray.Dataset", answer: int, *, within: float = WITHIN) -> Setting | None:
    """The setting that moves an answer's log-odds most, on average over the prompts, and leaves the model as good."""
    moves = _moves(data)[:, :, answer]
    allowed = (np.abs(data["perplexity_change"].to_numpy()) <= within) & (moves != 0)
    if not allowed.any():
        return None
    site, strength = np.unravel_index(np.argmax(np.where(allowed, np.abs(moves), -1)), moves.shape)
    return int(site), int(strength)


def _moves(data: "xarray.Dataset") -> Numbers:
    """The change of the log-odds `[site, strength, answer]`, on average over the prompts."""
    after, before = (data[name].mean("text").to_numpy() for name in ("log_odds", "log_odds_before"))
    moves: Numbers = after - before
    return moves


def _write(run: _Run, data: "xarray.Dataset", prompts: list[Question], new_tokens: int, best: Setting | None) -> None:
    """The texts before and after, with every strength, at the site of the best setting."""
    place = (best or _best(data, 0, within=math.inf) or (0, 0))[0]
    (before,) = written(run.model, prompts, new_tokens, None)
    after = np.full((data.sizes["site"], len(run.strengths), len(prompts)), "", dtype=object)
    steps = iter(written(run.model, prompts, new_tokens, run.doing(run.found.sites[place])) if run.steps else ())
    for row, strength in enumerate(run.strengths):
        after[place, row] = next(steps) if strength else before
    data["written"] = ("site", "strength", "text"), after, dict(LOOKS["written"])
    look = {"long_name": f"{LOOKS['written']['long_name']}, before"}
    data["written_before"] = "text", _objects(before), look
    data.attrs["written_at"] = str(run.found.sites[place])


def _facts(run: _Run, data: "xarray.Dataset", answers: Answers, best: Setting | None) -> dict[str, Any]:
    where = "at the site and every layer above it" if run.upwards else "at one site at a time"
    done = "added to the state of every token" if run.how == "add" else "taken out of the state of every token"
    facts: dict[str, Any] = {"direction": run.found.said, "how": f"{done}, {where}"}
    if run.how == "add":
        facts["strength 1"] = run.found.unit
    sizes = data["size"].to_numpy()
    facts["size of the direction, of the states' norm"] = {"smallest": sizes.min(), "largest": sizes.max()}
    facts["sites"] = summarise(run.found.sites)
    tokens = sum(len(question.rows) for question in run.asked[run.prompts :])
    plain: dict[str, Any] = {"texts": len(run.asked) - run.prompts, "tokens": tokens}
    if masked(run.model):
        plain["tokens hidden"] = f"every sixth, {tokens} in all"
    facts |= {"prompts": run.prompts, "perplexity": plain | {"before": float(data["perplexity_before"])}}
    first = answers.strings[0]
    none = f"none: no setting moved {first!r} and the perplexity by at most {WITHIN:.0%}"
    facts["best"] = none if best is None else {"answer": first, **_setting(data, 0, best)}
    facts["answers"] = {name: _extremes(data, place) for place, name in enumerate(answers.strings)}
    facts["run"] = next((how for how in run.ways if how != SKIPPED), SKIPPED)
    return facts


def _texts(data: "xarray.Dataset", best: Setting | None, silent: str) -> dict[str, Any]:
    """The first prompts with what is written after them, as the model is and at the best setting, or the strongest."""
    if "written" not in data:
        return {"nothing is written": silent} if silent else {}
    strength = -1 if best is None else best[1]
    after = data["written"].sel(site=data.attrs["written_at"]).isel(strength=strength)
    columns = (data["prompt"], data["written_before"], after)
    rows = list(zip(*(column.to_numpy().tolist() for column in columns), strict=True))[:TOLD]
    told = [{"prompt": prompt, "before": before, "after": now} for prompt, before, now in rows]
    return {"written": {"site": data.attrs["written_at"], "strength": float(after["strength"]), "texts": told}}


def _extremes(data: "xarray.Dataset", answer: int) -> dict[str, Any]:
    """How low and how high an answer can be brought while the model stays as good."""
    before = float(data["probability_before"][:, answer].mean())
    facts: dict[str, Any] = {"before": before}
    moves = _moves(data)[:, :, answer]
    allowed = np.abs(data["perplexity_change"].to_numpy()) <= WITHIN
    for name, sign in (("lowest", -1), ("highest", 1)):
        signed = np.where(allowed, sign * moves, 0)
        if signed.max() > 0:
            site, strength = np.unravel_index(np.argmax(signed), moves.shape)
            facts[name] = _setting(data, answer, (int(site), int(strength)))
    return facts


def _setting(data: "xarray.Dataset", answer: int, setting: Setting) -> dict[str, Any]:
    """One setting, with what it does to an answer and to the perplexity."""
    here = data.isel(site=setting[0], strength=setting[1])
    before, after = (float(one.isel(answer=answer).mean()) for one in (data["probability_before"], here["probability"]))
    facts = {"site": str(here["site"].item()), "strength": float(here["strength"])}
    facts |= {"probability": [before, after], "times": after / before if before else math.nan}
    facts["perplexity"] = [float(data["perplexity_before"]), float(here["perplexity"])]
    return facts | {"perplexity change": float(here["perplexity_change"])}
