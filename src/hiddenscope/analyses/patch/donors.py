"""Donors: windows of blocks or states come from another model of the same shape, sliding over the depth."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hiddenscope import hooks, progress
from hiddenscope.analyses.patch.pairs import single, text_before
from hiddenscope.errors import ModuleError, PassError, TextError
from hiddenscope.linear.intervals import wilson
from hiddenscope.model import Model
from hiddenscope.passes import Replace, edit, record, resume, skipping
from hiddenscope.results import Result
from hiddenscope.sites import Site
from hiddenscope.states import States

if TYPE_CHECKING:
    import xarray

Flags: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]

DRAWS = 2_000


@dataclass(frozen=True)
class Prompt:
    """A prompt as ids, and the one token that answers it."""

    ids: tuple[int, ...]
    answer: int


def patch_from(model: Model, donor: Model | None, data: Any, *, what: str, window: Any) -> Result:
    """How often the model answers rightly while a window of its depth comes from a donor, for every window."""
    if donor is None or data is None:
        missing = "donor" if donor is None else "data"
        remedy = "Give donor=another_model and data=[(prompt, answer), ...]."
        raise TextError(f"Patching {model.name} from a donor", f"there is no {missing}", remedy)
    if what not in ("block", "layer", "attn", "mlp"):
        raise TextError(f"what={what!r}", "there are 'block', 'layer', 'attn' and 'mlp'", "Choose one of these.")
    _one_shape(model, donor)
    _one_place(model, donor)
    if what == "block":
        _own_blocks(model, donor)
    depth = model.anatomy.stacks[0].depth
    if isinstance(window, bool) or not isinstance(window, int) or not 1 <= window <= depth:
        raise TextError(f"window={window!r}", f"{model.name} has {depth} blocks", f"Give 1 to {depth}.")
    if what == "layer" and window > 1:
        reason = "the states of one layer make all that is above, so that of several the last alone would count"
        raise TextError(f"window={window} of whole states", reason, "Give window=1, or what='block'.")
    prompts = _prompts(model, donor, data)
    skipping(model)  # tried now, while every block is the model's own
    starts = range(depth - window + 1)
    right, probability = (np.zeros((len(starts), len(prompts)), dtype=kind) for kind in (bool, float))
    alone = {"model": np.zeros(len(prompts), dtype=bool), "donor": np.zeros(len(prompts), dtype=bool)}
    notes: dict[str, None] = {}
    with progress.track("Patching", total=len(starts) * len(prompts)) as advance:
        for column, prompt in enumerate(prompts):
            sweep = _Sweep(model, donor, prompt, what, window)
            alone["model"][column], alone["donor"][column] = sweep.right
            for row, start in enumerate(starts):
                logits = sweep.at(start)
                right[row, column] = int(logits.argmax()) == prompt.answer
                probability[row, column] = float(logits.double().softmax(-1)[prompt.answer])
                advance(1)
            notes |= dict.fromkeys(sweep.notes)
    facts = _facts(what, window, starts, right, alone) | ({"notes": [*notes]} if notes else {})
    return Result(
        "patch", _data(window, starts, right, probability), facts, {**_source(model), "donor": _source(donor)}
    )


def _source(model: Model) -> dict[str, Any]:
    return model.source(None).to_json()


class _Sweep:
    """One prompt: the states of both models, and the passes that begin with the model's own below the window."""

    def __init__(self, model: Model, donor: Model, prompt: Prompt, what: str, window: int) -> None:
        self.model, self.donor, self.what, self.window = model, donor, what, window
        self.ids = [list(prompt.ids)]
        parts = [] if what in ("block", "layer") else [f"*.{what}"]
        made = [record(one, self.ids, ["layer.*", *parts], logits=True) for one in (model, donor)]
        self.own, self.other = (_states(one.states) for one in made)
        self.right = [int(_last(one.logits).argmax()) == prompt.answer for one in made]
        self.notes: tuple[str, ...] = ()

    def at(self, start: int) -> Tensor:
        """The logits of the last token with blocks or states from `start` on, counted from 0, the donor's."""
        if self.what in ("attn", "mlp"):
            changes: dict[str | Site, Any] = {
                Site(k + 1, self.what): Replace(self.other[Site(k + 1, self.what)])
                for k in range(start, start + self.window)
            }
            return _last(edit(self.model, self.ids, changes, "layer.0", logits=True).logits)
        if self.what == "layer":  # a window of one: all states of a layer make everything above
            entry, values = Site(start + 1), self.other[Site(start + 1)]
            blocks: AbstractContextManager[None] = nullcontext()
        else:
            entry, values = Site(start), self.own[Site(start)]
            blocks = hooks.substituting(_exchanged(self.model, self.donor, range(start, start + self.window)))
        with blocks:
            made = resume(self.model, self.ids, entry, values, entry)
        self.notes = made.notes
        return _last(made.logits)


def _exchanged(model: Model, donor: Model, blocks: Sequence[int]) -> dict[nn.Module, Any]:
    """The donor's forward in the place of the model's own, for some blocks counted from 0."""
    paths = [[block.path for block in one.anatomy.stacks[0].blocks] for one in (model, donor)]
    return {model.module.get_submodule(paths[0][k]): donor.module.get_submodule(paths[1][k]).forward for k in blocks}


def _states(states: Any) -> States:
    assert isinstance(states, States)
    return states


def _last(logits: Tensor | None) -> Tensor:
    assert logits is not None
    return logits[-1]


def _one_shape(model: Model, donor: Model) -> None:
    problem = f"Patching {model.name} from {donor.name}"
    if len(model.anatomy.stacks) > 1 or not model.anatomy.stacks[0].causal or model.anatomy.head is None:
        remedy = "Load it with task='causal-lm'."
        raise PassError(problem, "this needs one causal stack with a head that gives logits", remedy)
    shapes = [{name: tuple(weight.shape) for name, weight in one.module.named_parameters()} for one in (model, donor)]
    if shapes[0] != shapes[1] or type(model.module) is not type(donor.module):
        wrong = next((name for name in {*shapes[0], *shapes[1]} if shapes[0].get(name) != shapes[1].get(name)), "")
        reason = f"their weights differ in shape, at {wrong}" if wrong else "they are of different classes"
        raise ModuleError(problem, reason, "Give a donor of the same shape: another checkpoint of one model.")
    if model.module is donor.module:
        raise ModuleError(problem, "they are one and the same module", "Load the donor by itself.")


def _one_place(model: Model, donor: Model) -> None:
    """Refuse a donor that computes elsewhere, in other numbers, or knows tokens by other ids."""
    problem = f"Patching {model.name} from {donor.name}"
    for name in ("dtype", "device"):
        own, other = ({getattr(weight, name) for weight in one.module.parameters()} for one in (model, donor))
        if own != other:
            said = " and ".join(", ".join(sorted(map(str, some))) for some in (own, other))
            raise ModuleError(problem, f"their weights are in {said}", f"Load both with the same {name}=.")
    vocabularies = [one.tokenizer and one.tokenizer.get_vocab() for one in (model, donor)]
    if all(vocabularies) and vocabularies[0] != vocabularies[1]:
        raise ModuleError(
            problem, "their tokenizers have different vocabularies", "Give a donor of the same tokenizer."
        )


def _own_blocks(model: Model, donor: Model) -> None:
    """Refuse blocks that cannot be exchanged one by one."""
    blocks = [block.path for block in model.anatomy.stacks[0].blocks]
    if len(set(blocks)) < len(blocks):
        problem = f"Blocks of {donor.name} in {model.name}"
        raise ModuleError(problem, "its blocks are one module called again and again", "Use what='layer'.")


def _prompts(model: Model, donor: Model, data: Any) -> list[Prompt]:
    listed = list(data) if isinstance(data, list | tuple) else []
    if not listed or not all(isinstance(row, list | tuple) and len(row) == 2 for row in listed):
        raise TextError("Data to be answered", "it is no list of pairs", "Give [(prompt, answer), ...].")
    with donor.lock:  # one lock after the other: two threads may patch two models from one another
        known = [isinstance(text, str) and donor.tokenizer and donor.encoder.encode(text).ids for text, _ in listed]
    with model.lock:
        rows = [(model.encoder.encode(text), answer) for text, answer in listed]
        for (text, _), (encoded, _), ids in zip(listed, rows, known, strict=True):
            if ids and ids != encoded.ids:
                reason = f"{model.name} and {donor.name} make other tokens of it"
                raise TextError(f"The prompt {text[:40]!r}", reason, "Give a donor of the same tokenizer.")
        befores = [text_before(encoded, 0, len(encoded.ids[0]) - 1) for encoded, _ in rows]
        return [
            Prompt(encoded.ids[0], single(model, answer, [before]))
            for (encoded, answer), before in zip(rows, befores, strict=True)
        ]


def _data(window: int, starts: range, right: Flags, probability: Floats) -> "xarray.Dataset":
    """Along the windows, each named by the first layer that it makes."""
    import xarray

    sites = [str(Site(start + 1)) for start in starts]
    ends = [str(Site(start + window)) for start in starts]
    intervals = np.array([wilson(float(row.mean()), len(row)) for row in right])
    looks = {"accuracy": "right answers", "accuracy_low": "lower end, 95%", "accuracy_high": "upper end, 95%"}
    values = {"accuracy": right.mean(1), "accuracy_low": intervals[:, 0], "accuracy_high": intervals[:, 1]}
    variables: dict[str, Any] = {
        name: ("site", values[name].astype(np.float32), {"long_name": said, "units": "share of the prompts"})
        for name, said in looks.items()
    }
    told = {"long_name": "mean probability of the answer"}
    variables["probability"] = ("site", probability.mean(1).astype(np.float32), told)
    last = ("site", np.array([*ends, None], dtype=object)[:-1])
    return xarray.Dataset(variables, {"site": sites, "last_site": last})


def _facts(what: str, window: int, starts: range, right: Flags, alone: dict[str, Flags]) -> dict[str, Any]:
    """Both models by themselves, and windows in the middle third of the depth against those in the last third."""
    count = right.shape[1]
    facts: dict[str, Any] = {"prompts": count, "from the donor": what, "window": window}
    for name, flags in alone.items():
        facts[f"{name} alone"] = _share(flags)
    third = len(starts) // 3
    if third:
        middle, late = right[third : len(starts) - third].mean(0), right[len(starts) - third :].mean(0)
        facts["middle windows"], facts["late windows"] = float(middle.mean()), float(late.mean())
        facts["middle less late"] = _bootstrap(middle - late)
    worst = int(right.mean(1).argmin())
    where = {"from": str(Site(starts[worst] + 1)), "to": str(Site(starts[worst] + window))}
    facts["lowest"] = {**_share(right[worst]), **where}
    return facts


def _share(flags: Flags) -> dict[str, Any]:
    return {"right": float(flags.mean()), "95% interval": list(wilson(float(flags.mean()), len(flags)))}


def _bootstrap(differences: Floats) -> dict[str, Any]:
    """The mean over prompts, and where it lies when prompts are drawn again, in 95% of 2,000 draws."""
    generator = np.random.default_rng(0)
    draws = generator.integers(0, len(differences), (DRAWS, len(differences)))
    means = torch.from_numpy(differences)[torch.from_numpy(draws)].mean(1).numpy()
    return {"difference": float(differences.mean()), "95% interval": np.quantile(means, [0.025, 0.975]).tolist()}
