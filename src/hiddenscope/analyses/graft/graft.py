"""What does another model of the same shape break or mend? Its blocks or states,
grafted into this one layer by layer.

A window of blocks slides over the depth: inside it the donor computes, everywhere else
the model itself does.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from hiddenscope import progress, texts
from hiddenscope.arguments import checked
from hiddenscope.errors import ModuleError, PassError, TextError
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import Ints, effective_count, group_sums, joined
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs, Replace, edit, record, resume, try_skipping
from hiddenscope.passes.answers import text_before, token_after
from hiddenscope.results import Facts, Result
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import States

if TYPE_CHECKING:
    import xarray

Flags: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]

FLIPS = 9_999  # random sign flips of the test, where not all of them can be tried
MOST_EXACT = 12  # prompts for which all 4,096 sign flips are tried


@checked
def graft(
    model: ModelLike,
    donor: ModelLike,
    data: Any,
    *,
    sites: SitePatterns | None = None,
    layers: int = 1,
) -> Result:
    """Graft blocks of a donor into a model, `layers` in a row, and count the right
    answers for every window of layers.

    The donor is another model of the same shape, such as another checkpoint. `data` are
    prompts and their answers, each a single token: `[(prompt, answer), ...]`, or
    labelled texts as `hs.read` takes them, the label being the answer. With `sites` the
    donor's states are grafted in place of its blocks: what its branches add
    (`"*.attn"`, `"*.mlp"`), or the states of one layer at a time (`"layer.*"`). A copy
    of a prompt counts once. Prompts are taken as independent of each other, unless
    `hs.read(..., group=)` says which belong together.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model, donor = (hs.load((tiny_model("llama", seed=seed), None)) for seed in (0, 1))
    >>> result = hs.graft(model, donor, [([5, 6, 7], 11), ([8, 9], 12)], layers=2)
    >>> result.data["site"].values.tolist(), result.facts["prompts"]
    (['layer.1', 'layer.2'], 2)
    """
    model, donor = as_model(model), as_model(donor)
    _check_shapes(model, donor)
    _check_dtype_device_tokenizer(model, donor)
    windows = _windows(model, donor, sites, layers)
    prompts, answers, groups, copies = _prompts(model, donor, data)
    try_skipping(model)  # tried now, while every block is the model's own
    right, probability = (
        np.zeros((len(windows), len(prompts)), dtype=kind) for kind in (bool, float)
    )
    alone = {
        "model": np.zeros(len(prompts), dtype=bool),
        "donor": np.zeros(len(prompts), dtype=bool),
    }
    notes: dict[str, None] = {}
    if copies:
        notes[_note_on_copies(copies)] = None
    with progress.track("Grafting", total=len(windows) * len(prompts)) as advance:
        for column, answer in enumerate(answers):
            runs = _Runs(
                model, donor, prompts.some([column]), windows, blocks=sites is None
            )
            for name, logits in runs.alone.items():
                alone[name][column] = int(logits.argmax()) == answer
            for row, logits in enumerate(runs.grafted()):
                right[row, column] = int(logits.argmax()) == answer
                probability[row, column] = float(logits.double().softmax(-1)[answer])
                advance(1)
            notes |= dict.fromkeys(runs.notes)
    facts = {
        "donor": donor.name,
        "prompts": len(prompts),
        "copies": copies,
        "groups": int(groups.max()) + 1,
        "grafted": "blocks" if sites is None else "states",
        "layers": layers,
        **_facts(windows, right, alone, model.anatomy.stacks[0].depth, groups),
        "notes": [*notes],
    }
    source = {**model.source(None).to_json(), "donor": donor.source(None).to_json()}
    return Result("graft", _data(windows, right, probability, groups), facts, source)


def _check_shapes(model: Model, donor: Model) -> None:
    problem = f"Cannot graft {donor.name} into {model.name}"
    if (
        len(model.anatomy.stacks) > 1
        or not model.anatomy.stacks[0].causal
        or model.anatomy.head is None
    ):
        remedy = "Load it with task='causal-lm'."
        raise PassError(
            problem, "this needs one causal stack and a head that gives logits", remedy
        )
    shapes = [
        {name: tuple(weight.shape) for name, weight in one.module.named_parameters()}
        for one in (model, donor)
    ]
    if shapes[0] != shapes[1] or type(model.module) is not type(donor.module):
        differing = sorted(
            name
            for name in {*shapes[0], *shapes[1]}
            if shapes[0].get(name) != shapes[1].get(name)
        )
        reason = (
            f"their weights differ in shape, at {differing[0]}"
            if differing
            else "they are of different classes"
        )
        raise ModuleError(
            problem,
            reason,
            "Give a donor of the same shape, such as another checkpoint of the model.",
        )
    if model.module is donor.module:
        raise ModuleError(
            problem, "they are the same module", "Load the donor separately."
        )


def _check_dtype_device_tokenizer(model: Model, donor: Model) -> None:
    problem = f"Cannot graft {donor.name} into {model.name}"
    for name in ("dtype", "device"):
        mine, theirs = (
            {str(getattr(weight, name)) for weight in one.module.parameters()}
            for one in (model, donor)
        )
        if mine != theirs:
            reason = (
                f"their weights are in {', '.join(sorted(mine))} and"
                f" {', '.join(sorted(theirs))}"
            )
            raise ModuleError(problem, reason, f"Load both with the same {name}=.")
    vocabularies = [
        one.tokenizer and one.tokenizer.get_vocab() for one in (model, donor)
    ]
    if all(vocabularies) and vocabularies[0] != vocabularies[1]:
        reason = "their tokenizers have different vocabularies"
        raise ModuleError(problem, reason, "Give a donor with the same tokenizer.")


def _windows(
    model: Model, donor: Model, sites: SitePatterns | None, layers: Any
) -> list[tuple[Site, ...]]:
    """The windows that slide over the depth, each as its sites; a block is named by the
    layer that it makes.
    """
    if sites is None:
        paths = [block.path for block in model.anatomy.stacks[0].blocks]
        if len(set(paths)) < len(paths):
            problem = f"Cannot graft blocks of {donor.name} into {model.name}"
            reason = "its blocks are one module that is called repeatedly"
            raise ModuleError(problem, reason, "Graft states: sites='layer.*'.")
    depth = model.anatomy.stacks[0].depth
    chosen = (
        tuple(Site(k) for k in range(1, depth + 1))
        if sites is None
        else model.anatomy.select(sites)
    )
    if (
        isinstance(layers, bool)
        or not isinstance(layers, int)
        or not 1 <= layers <= len(chosen)
    ):
        reason = f"got {layers!r}"
        raise TextError(
            f"layers must be an integer from 1 to {len(chosen)}",
            reason,
            "Give one of these.",
        )
    if (
        sites is not None
        and layers > 1
        and any(site.part in ("", "mid") for site in chosen)
    ):
        reason = (
            "the states of one layer determine all layers above, so only the last layer"
            " would count"
        )
        raise TextError(
            f"Cannot graft the whole states of {layers} layers",
            reason,
            "Give layers=1, or leave `sites` out.",
        )
    return [chosen[start : start + layers] for start in range(len(chosen) - layers + 1)]


class _Prompts(NamedTuple):
    """The prompts as both models take them, each once, the token that answers each, and
    which belong together.

    `copies` is how many further prompts were the same again, with the same answer.
    """

    inputs: Inputs
    answers: list[int]
    groups: Ints
    copies: int


class _Row(NamedTuple):
    """A prompt, its answer, and what group it is of; None where nobody said."""

    prompt: Any
    answer: Any
    group: Any = None


def _prompts(model: Model, donor: Model, data: Any) -> _Prompts:
    """Encode the prompts and their answers, and leave out copies."""
    rows = list(_rows(data))
    inputs = model.encode([row.prompt for row in rows])
    if inputs.texts and donor.tokenizer:
        _check_tokenized_alike(model, donor, inputs)
    befores = [
        text_before(inputs, number, length - 1)
        for number, length in enumerate(inputs.lengths)
    ]
    with model.lock:  # a tokenizer serves one thread at a time
        answers = [
            token_after(model.text_encoder, row.answer, [before])
            for row, before in zip(rows, befores, strict=True)
        ]
    firsts = _firsts(list(zip(inputs.ids, answers, strict=True)))
    inputs = inputs.some(firsts)
    given = [rows[number].group for number in firsts]
    # A prompt with two answers, or in other letters, is no further evidence.
    groups = joined(
        inputs.ids,
        texts.copy_groups(inputs.texts or inputs.ids),
        None if None in given else given,
    )
    return _Prompts(
        inputs, [answers[number] for number in firsts], groups, len(rows) - len(firsts)
    )


def _firsts(values: Sequence[Any]) -> list[int]:
    """Where each value comes first."""
    first: dict[Any, int] = {}
    for number, value in enumerate(values):
        first.setdefault(value, number)
    return list(first.values())


def _check_tokenized_alike(model: Model, donor: Model, inputs: Inputs) -> None:
    """Refuse a prompt of which the two tokenizers make other ids."""
    theirs = donor.encode(list(inputs.texts or ()))
    for text, ids, others in zip(
        inputs.texts or (), inputs.ids, theirs.ids, strict=True
    ):
        if ids != others:
            reason = f"{model.name} and {donor.name} tokenize it differently"
            raise TextError(
                f"Cannot use the prompt {text[:40]!r}",
                reason,
                "Give a donor with the same tokenizer.",
            )


def _note_on_copies(copies: int) -> str:
    if copies == 1:
        return "One prompt is a copy of another and was left out."
    return f"{copies:,} prompts are copies of others and were left out."


def _rows(data: Any) -> Iterator[_Row]:
    """Prompts with their answers and groups, from a list of pairs or from labelled
    texts.
    """
    if (
        isinstance(data, list)
        and data
        and all(isinstance(row, list | tuple) and len(row) == 2 for row in data)
    ):
        yield from (_Row(prompt, answer) for prompt, answer in data)
        return
    labelled = data if isinstance(data, texts.Labelled) else texts.read(data)
    if labelled.labels is None:
        remedy = "Label each prompt with its answer, or give [(prompt, answer), ...]."
        raise TextError(
            f"Cannot use the prompts of {labelled.name}", "they have no labels", remedy
        )
    groups = labelled.groups or [None] * len(labelled)
    yield from map(_Row, labelled.texts, labelled.labels, groups)


class _Runs:
    """One prompt in both models, and in the model with each window grafted."""

    def __init__(
        self,
        model: Model,
        donor: Model,
        prompt: Inputs,
        windows: Sequence[tuple[Site, ...]],
        *,
        blocks: bool,
    ) -> None:
        self.model, self.donor, self.prompt, self.windows, self.blocks = (
            model,
            donor,
            prompt,
            windows,
            blocks,
        )
        sites = {
            "model": (
                sorted(
                    {Site(window[0].layer - 1) for window in windows if window[0].layer}
                )
                if blocks
                else ()
            ),
            "donor": (
                ()
                if blocks
                else sorted({site for window in windows for site in window})
            ),
        }
        runs = {
            name: record(one, prompt, sites[name], logits=True)
            for name, one in (("model", model), ("donor", donor))
        }
        self.alone = {name: _last(run.logits) for name, run in runs.items()}
        states = runs["model" if blocks else "donor"].states
        assert isinstance(states, States)
        # Of the model below each window of blocks, or else those of the donor.
        self.states = states
        self.notes: tuple[str, ...] = ()

    def grafted(self) -> Iterator[Tensor]:
        """The logits of the last token with each window grafted."""
        for window in self.windows:
            entry = Site((window[0].layer or 0) - 1) if self.blocks else window[0]
            if entry.part:
                changes: dict[str | Site, Any] = {
                    site: Replace(self.states[site]) for site in window
                }
                yield _last(
                    edit(self.model, self.prompt, changes, (), logits=True).logits
                )
                continue
            blocks: AbstractContextManager[None] = nullcontext()
            if self.blocks:
                blocks = hooks.substituting(_forwards(self.model, self.donor, window))
            with blocks:
                run = resume(self.model, self.prompt, entry, self.states[entry], ())
            self.notes = run.notes
            yield _last(run.logits)


def _forwards(
    model: Model, donor: Model, window: Sequence[Site]
) -> dict[nn.Module, Any]:
    """The donor's forward for each of the model's blocks in a window."""
    numbers = [site.layer - 1 for site in window if site.layer]
    mine, theirs = (
        [one.anatomy.stacks[0].blocks[k].path for k in numbers]
        for one in (model, donor)
    )
    return {
        model.module.get_submodule(path): donor.module.get_submodule(other).forward
        for path, other in zip(mine, theirs, strict=True)
    }


def _last(logits: Tensor | None) -> Tensor:
    assert logits is not None
    return logits[-1]


def _data(
    windows: Sequence[tuple[Site, ...]], right: Flags, probability: Floats, groups: Ints
) -> "xarray.Dataset":
    """Along the windows, each named by its first site."""
    import xarray

    count = effective_count(groups)
    intervals = np.array([wilson(float(row.mean()), count) for row in right])
    values = {
        "accuracy": right.mean(1),
        "accuracy_low": intervals[:, 0],
        "accuracy_high": intervals[:, 1],
    }
    names = {
        "accuracy": "right answers",
        "accuracy_low": "lower end, 95%",
        "accuracy_high": "upper end, 95%",
    }
    variables: dict[str, Any] = {
        name: (
            "site",
            values[name].astype(np.float32),
            {"long_name": long_name, "units": "share of the prompts"},
        )
        for name, long_name in names.items()
    }
    look = {"long_name": "mean probability of the answer"}
    variables["probability"] = ("site", probability.mean(1).astype(np.float32), look)
    first, last = ([str(window[end]) for window in windows] for end in (0, -1))
    return xarray.Dataset(
        variables,
        {
            "site": first,
            "last_site": ("site", np.array([*last, None], dtype=object)[:-1]),
        },
    )


def _facts(
    windows: Sequence[tuple[Site, ...]],
    right: Flags,
    alone: dict[str, Flags],
    depth: int,
    groups: Ints,
) -> Facts:
    """Both models alone, the lowest window, and windows in the middle third of the
    depth against those in the last.
    """
    lowest = int(right.mean(1).argmin())
    facts: dict[str, Any] = {
        f"{name}_alone": _accuracy(flags, groups) for name, flags in alone.items()
    }
    facts["lowest"] = {
        **_accuracy(right[lowest], groups, len(windows)),
        **_ends([windows[lowest]]),
    }
    thirds = [3 * _centre(window, depth) // depth for window in windows]
    middle, late = (
        [row for row, third in enumerate(thirds) if third == k] for k in (1, 2)
    )
    if middle and late:
        parts = {"middle": right[middle].mean(0), "late": right[late].mean(0)}
        for (name, values), rows in zip(parts.items(), (middle, late), strict=True):
            facts[name] = {
                "accuracy": float(values.mean()),
                **_ends([windows[row] for row in rows]),
            }
        differences = parts["middle"] - parts["late"]
        facts["middle_less_late"] = {
            "value": float(differences.mean()),
            "p": sign_flip_p(differences, groups),
        }
    return facts


def _centre(window: tuple[Site, ...], depth: int) -> float:
    """The depth in the middle of a window, in blocks from the bottom; the last block's
    own middle is depth - 1/2.
    """
    first, last = (
        depth if site.layer is None else site.layer for site in (window[0], window[-1])
    )
    return max(0.0, (first - 1 + last) / 2)


def _ends(windows: Sequence[tuple[Site, ...]]) -> dict[str, str]:
    return {"from": str(windows[0][0]), "to": str(windows[-1][-1])}


def _accuracy(flags: Flags, groups: Ints, shares: int = 1) -> dict[str, float]:
    """The share of right answers with its 95% interval, jointly for so many shares."""
    low, high = wilson(float(flags.mean()), effective_count(groups), shares)
    return {"accuracy": float(flags.mean()), "low": low, "high": high}


def sign_flip_p(differences: Floats, groups: Ints | None = None) -> float:
    """How often a mean so far from zero comes up if each difference is as likely to
    have the other sign.

    The differences of a group have one sign together. It is exact for few prompts,
    where a bootstrap interval is too narrow: of two prompts that agree it shows
    nothing.

    >>> sign_flip_p(np.array([0.5, 0.5])), sign_flip_p(np.full(6, 0.5))
    (0.5, 0.03125)
    >>> sign_flip_p(np.full(6, 0.5), np.array([0, 0, 0, 1, 1, 1]))
    0.5
    """
    sums = differences if groups is None else group_sums(differences, groups)
    count = len(sums)
    if count <= MOST_EXACT:
        signs = np.array(list(product((1, -1), repeat=count)), dtype=float)
    else:
        drawn = np.random.default_rng(0).choice((1.0, -1.0), (FLIPS, count))
        signs = np.concatenate([np.ones((1, count)), drawn])
    totals = np.abs(signs @ sums)
    return float((totals >= totals[0] * (1 - 1e-9)).mean())
