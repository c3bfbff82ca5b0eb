"""The runs of a graft: accuracies along the windows, and what they show."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from hiddenscope import progress
from hiddenscope.analyses.graft.prompts import encode_prompts
from hiddenscope.analyses.graft.story import (
    Difference,
    GraftReport,
    Lowest,
    Share,
    Third,
)
from hiddenscope.errors import ModuleError, PassError, TextError
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import effective_count, group_sums
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import hooks
from hiddenscope.passes import Inputs, Pass, Replace, edit, record, resume, try_skipping
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import States
from hiddenscope.states.arrays import Bools, Floats, Ints

Window: TypeAlias = tuple[Site, ...]

# Random sign flips of the test, where not all of them can be tried.
FLIPS = 9_999
# Prompts for which all 4,096 sign flips are tried.
MOST_EXACT = 12
ATTRIBUTES: Mapping[str, Attributes] = {
    "accuracy": {"long_name": "right answers", "units": "share of the prompts"},
    "accuracy_low": {"long_name": "lower end, 95%", "units": "share of the prompts"},
    "accuracy_high": {"long_name": "upper end, 95%", "units": "share of the prompts"},
    "probability": {"long_name": "mean probability of the answer"},
}


def slide_windows(
    model: ModelLike,
    donor: ModelLike,
    data: Any,
    sites: SitePatterns | None,
    layers: int,
) -> Result:
    """Graft every window, and count the right answers."""
    model, donor = as_model(model), as_model(donor)
    check_models(model, donor)
    windows = _windows(model, donor, sites, layers)
    prompts = encode_prompts(model, donor, data)
    # Tried now, while every block is the model's own.
    try_skipping(model)
    count = len(prompts.answers)
    right = np.zeros((len(windows), count), dtype=bool)
    probability = np.zeros((len(windows), count))
    right_ungrafted = {
        "model": np.zeros(count, dtype=bool),
        "donor": np.zeros(count, dtype=bool),
    }
    notes: list[str] = []
    if prompts.copies == 1:
        notes.append("One prompt is a copy of another and was left out.")
    elif prompts.copies:
        notes.append(
            f"{prompts.copies:,} prompts are copies of others and were left out."
        )
    with progress.track("Grafting", total=len(windows) * count) as advance:
        for column, answer in enumerate(prompts.answers):
            prompt = prompts.inputs.some([column])
            runs = Runs(model, donor, prompt, windows, blocks=sites is None)
            for name, logits in runs.ungrafted.items():
                right_ungrafted[name][column] = _is_best(logits, answer)
            for row, logits in enumerate(runs.grafted()):
                right[row, column] = _is_best(logits, answer)
                probability[row, column] = float(logits.double().softmax(-1)[answer])
                advance(1)
            notes += runs.notes
    depth = model.anatomy.stacks[0].depth
    report = GraftReport(
        donor=donor.name,
        prompts=count,
        copies=prompts.copies,
        groups=int(prompts.groups.max()) + 1,
        grafted="blocks" if sites is None else "states",
        layers=layers,
        **compare_windows(windows, right, right_ungrafted, depth, prompts.groups),
        notes=list(dict.fromkeys(notes)),
    )
    accuracy = right.mean(1)
    even_count = effective_count(prompts.groups)
    intervals = np.array([wilson(float(share), even_count) for share in accuracy])
    columns = {
        "accuracy": accuracy,
        "accuracy_low": intervals[:, 0],
        "accuracy_high": intervals[:, 1],
        "probability": probability.mean(1),
    }
    variables: Variables = {}
    for name, values in columns.items():
        variables[name] = "site", values.astype(np.float32), ATTRIBUTES[name]
    last_sites = site_names(window[-1] for window in windows)
    coords: Coordinates = {
        "site": site_names(window[0] for window in windows),
        "last_site": ("site", text_array(last_sites)),
    }
    source = {**model.source(None).to_json(), "donor": donor.source(None).to_json()}
    return Result("graft", to_dataset(variables, coords), report, source)


def _is_best(logits: Tensor, answer: int) -> bool:
    """Tell whether an answer is more likely than every other word; a tie is not."""
    return int((logits >= logits[answer]).sum()) == 1


def check_models(model: Model, donor: Model) -> None:
    """Refuse models that make no logits, or that differ in shape, dtype, device or
    vocabulary.
    """
    problem = f"Cannot graft {donor.name} into {model.name}"
    if (
        len(model.anatomy.stacks) > 1
        or not model.anatomy.stacks[0].causal
        or model.anatomy.head is None
    ):
        raise PassError(
            problem,
            "this needs one causal stack and a head that gives logits",
            "Load it with task='causal-lm'.",
        )
    remedy = "Give a donor of the same shape, such as another checkpoint of the model."
    shapes = {name: weight.shape for name, weight in model.module.named_parameters()}
    donor_shapes = {
        name: weight.shape for name, weight in donor.module.named_parameters()
    }
    for name in sorted({*shapes, *donor_shapes}):
        if shapes.get(name) != donor_shapes.get(name):
            reason = f"their weights differ in shape, at {name}"
            raise ModuleError(problem, reason, remedy)
    if type(model.module) is not type(donor.module):
        raise ModuleError(problem, "they are of different classes", remedy)
    if model.module is donor.module:
        raise ModuleError(
            problem, "they are the same module", "Load the donor separately."
        )
    for name in ("dtype", "device"):
        values = {str(getattr(weight, name)) for weight in model.module.parameters()}
        others = {str(getattr(weight, name)) for weight in donor.module.parameters()}
        if values != others:
            model_values = ", ".join(sorted(values))
            donor_values = ", ".join(sorted(others))
            raise ModuleError(
                problem,
                f"their weights are in {model_values} and {donor_values}",
                f"Load both with the same {name}=.",
            )
    if model.tokenizer is None or donor.tokenizer is None:
        return
    vocabulary = model.tokenizer.get_vocab()
    donor_vocabulary = donor.tokenizer.get_vocab()
    if vocabulary and donor_vocabulary and vocabulary != donor_vocabulary:
        raise ModuleError(
            problem,
            "their tokenizers have different vocabularies",
            "Give a donor with the same tokenizer.",
        )


def _windows(
    model: Model, donor: Model, sites: SitePatterns | None, layers: int
) -> list[Window]:
    """Return the windows that slide over the depth, each as its sites.

    A block is named by the layer that it makes.
    """
    stack = model.anatomy.stacks[0]
    if sites is None:
        paths = {block.path for block in stack.blocks}
        if len(paths) < len(stack.blocks):
            raise ModuleError(
                f"Cannot graft blocks of {donor.name} into {model.name}",
                "its blocks are one module that is called repeatedly",
                "Graft states: sites='layer.*'.",
            )
        selected = tuple(Site(layer) for layer in range(1, stack.depth + 1))
    else:
        selected = model.anatomy.select(sites)
    if layers > len(selected):
        raise TextError(
            f"layers must be an integer from 1 to {len(selected)}",
            f"got {layers!r}",
            "Give one of these.",
        )
    whole_states = any(site.part in ("", "mid") for site in selected)
    if sites is not None and layers > 1 and whole_states:
        reason = (
            "the states of one layer determine all layers above, so only the last layer"
            " would count"
        )
        raise TextError(
            f"Cannot graft the whole states of {layers} layers",
            reason,
            "Give layers=1, or leave `sites` out.",
        )
    starts = range(len(selected) - layers + 1)
    return [selected[start : start + layers] for start in starts]


class Runs:
    """One prompt in both models, and in the model with each window grafted.

    `ungrafted` are the logits of both models as they are.
    """

    def __init__(
        self,
        model: Model,
        donor: Model,
        prompt: Inputs,
        windows: Sequence[Window],
        *,
        blocks: bool,
    ) -> None:
        self.model = model
        self.donor = donor
        self.prompt = prompt
        self.windows = windows
        self.blocks = blocks
        self.notes: tuple[str, ...] = ()
        # The pass is resumed with the model's states below each window of blocks, or
        # with the donor's states.
        below = {Site(window[0].layer - 1) for window in windows if window[0].layer}
        grafted = set().union(*windows)
        model_sites = sorted(below) if blocks else ()
        donor_sites = () if blocks else sorted(grafted)
        model_run = record(model, prompt, model_sites, logits=True)
        donor_run = record(donor, prompt, donor_sites, logits=True)
        self.ungrafted = {"model": _last(model_run), "donor": _last(donor_run)}
        states = model_run.states if blocks else donor_run.states
        assert isinstance(states, States)
        self.states = states

    def grafted(self) -> Iterator[Tensor]:
        """Yield the logits of the last token with each window grafted."""
        for window in self.windows:
            if self.blocks:
                entry = Site((window[0].layer or 0) - 1)
                forwards: dict[nn.Module, Callable[..., Any]] = {}
                for site in window:
                    # The donor's forward in the place of the model's.
                    number = (site.layer or 0) - 1
                    path = self.model.anatomy.stacks[0].blocks[number].path
                    donor_path = self.donor.anatomy.stacks[0].blocks[number].path
                    block = self.model.module.get_submodule(path)
                    forwards[block] = self.donor.module.get_submodule(
                        donor_path
                    ).forward
                with hooks.substituting(forwards):
                    run = self._resume(entry)
            elif window[0].part:
                changes: dict[str | Site, Any] = {
                    site: Replace(self.states[site]) for site in window
                }
                run = edit(self.model, self.prompt, changes, (), logits=True)
            else:
                run = self._resume(window[0])
            yield _last(run)

    def _resume(self, entry: Site) -> Pass:
        run = resume(self.model, self.prompt, entry, self.states[entry], ())
        self.notes = run.notes
        return run


def _last(run: Pass) -> Tensor:
    assert run.logits is not None
    return run.logits[-1]


def compare_windows(
    windows: Sequence[Window],
    right: Bools,
    right_ungrafted: Mapping[str, Bools],
    depth: int,
    groups: Ints,
) -> dict[str, Any]:
    """Return both models' own accuracy, the lowest window, and middle against late, as
    fields of the report.
    """
    # The interval of the lowest holds for all windows jointly.
    row = int(right.mean(1).argmin())
    accuracy = float(right[row].mean())
    low, high = wilson(accuracy, effective_count(groups), len(windows))
    lowest = Lowest(
        accuracy=accuracy,
        low=low,
        high=high,
        from_=str(windows[row][0]),
        to=str(windows[row][-1]),
    )
    fields: dict[str, Any] = {
        "model_alone": _share(right_ungrafted["model"], groups),
        "donor_alone": _share(right_ungrafted["donor"], groups),
        "lowest": lowest,
    }
    by_third: dict[int, list[int]] = {}
    for row, window in enumerate(windows):
        # The middle of a window, in blocks from the bottom: that of the last block is
        # depth - 1/2. `final` counts as the last layer.
        first = depth if window[0].layer is None else window[0].layer
        last = depth if window[-1].layer is None else window[-1].layer
        third = int(3 * max(0.0, (first - 1 + last) / 2) // depth)
        by_third.setdefault(third, []).append(row)
    # Thirds count from 0, at the bottom.
    if not {1, 2} <= by_third.keys():
        return fields
    shares = []
    for name, third in (("middle", 1), ("late", 2)):
        rows = by_third[third]
        # The share of right answers of each prompt, over the windows.
        shares.append(right[rows].mean(0))
        fields[name] = Third(
            accuracy=float(shares[-1].mean()),
            from_=str(windows[rows[0]][0]),
            to=str(windows[rows[-1]][-1]),
        )
    differences = shares[0] - shares[1]
    fields["middle_less_late"] = Difference(
        value=float(differences.mean()), p=sign_flip_p(differences, groups)
    )
    return fields


def _share(flags: Bools, groups: Ints) -> Share:
    accuracy = float(flags.mean())
    low, high = wilson(accuracy, effective_count(groups))
    return Share(accuracy=accuracy, low=low, high=high)


def sign_flip_p(differences: Floats, groups: Ints | None = None) -> float:
    """Return the p-value of a mean difference, by flipping signs at random.

    It is how often a mean so far from zero comes up if each difference is as likely to
    have the other sign. The differences of a group have one sign together. It is exact
    for few prompts, where a bootstrap interval is too narrow: of two prompts that agree
    it shows nothing.

    >>> sign_flip_p(np.array([0.5, 0.5])), sign_flip_p(np.full(6, 0.5))
    (0.5, 0.03125)
    >>> sign_flip_p(np.full(6, 0.5), np.array([0, 0, 0, 1, 1, 1]))
    0.5
    """
    sums = differences if groups is None else group_sums(differences, groups)
    count = len(sums)
    # Few sums get every combination of signs, and many get random ones.
    if count <= MOST_EXACT:
        signs = np.array(list(product((1, -1), repeat=count)), dtype=float)
    else:
        random_signs = np.random.default_rng(0).choice((1.0, -1.0), (FLIPS, count))
        signs = np.concatenate([np.ones((1, count)), random_signs])
    totals = np.abs(signs @ sums)
    # The first row is the data as they are; rounding must not tell equal sums apart.
    return float((totals >= totals[0] * (1 - 1e-9)).mean())
