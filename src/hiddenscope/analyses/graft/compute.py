"""The runs of a graft: answers along the windows, and what they show."""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hiddenscope import progress, texts
from hiddenscope.analyses.graft.losses import compare_losses, with_ends
from hiddenscope.analyses.graft.story import (
    Difference,
    GraftReport,
    Lowest,
    Share,
    Third,
)
from hiddenscope.errors import ModuleError, TextError
from hiddenscope.linear.intervals import wilson
from hiddenscope.measures.grouped import effective_count, group_sums
from hiddenscope.measures.permutations import corrected_sign_flip_p
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import hooks
from hiddenscope.modules.adapters import below_adapters
from hiddenscope.modules.quantised import unpacked_shape
from hiddenscope.passes import (
    Inputs,
    Pass,
    Replace,
    Scale,
    edit,
    record,
    resume,
    try_skipping,
)
from hiddenscope.passes.edit import plan
from hiddenscope.passes.losses import batch_size, measure_losses
from hiddenscope.passes.text_encoder import text_before, token_after
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Coordinates,
    site_names,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states.arrays import Bools, Floats, Ints

Window: TypeAlias = tuple[Site, ...]


def slide_windows(
    model: ModelLike,
    donor: ModelLike,
    data: Any,
    sites: SitePatterns | None,
    layers: int,
) -> Result:
    """Graft every window, and measure answers or losses."""
    model, donor = as_model(model), as_model(donor)
    check_models(model, donor)
    windows = _windows(model, donor, sites, layers)
    examples = encode_examples(model, donor, data)
    # Tried now, while every block is the model's own.
    for padded in (False, True):
        try_skipping(model, padded=padded)
    notes: list[str] = []
    word = "text" if examples.answers is None else "prompt"
    if examples.copies == 1:
        notes.append(f"One {word} is a copy of another and was left out.")
    elif examples.copies:
        notes.append(
            f"{examples.copies:,} {word}s are copies of others and were left out."
        )
    runs = _all_runs(model, donor, examples, windows, sites is None, notes)
    run_count = 2 + len(windows)
    depth = model.anatomy.stacks[0].depth
    if examples.answers is None:
        scores = measure_losses(examples.inputs, runs, run_count)
        tokens = sum(examples.inputs.lengths) - len(examples.inputs)
        losses, variables = compare_losses(
            windows, scores, by_third(windows, depth), examples.groups, tokens
        )
        fields: dict[str, Any] = {"losses": losses}
    else:
        answers, groups = examples.answers, examples.groups
        right = np.zeros((2 + len(windows), len(answers)), dtype=bool)
        probability = np.zeros(right.shape)
        for row, (number,), run in runs:
            assert run.logits is not None
            logits, answer = run.logits[-1], answers[number]
            # An answer that ties with another word is not right.
            right[row, number] = int((logits >= logits[answer]).sum()) == 1
            probability[row, number] = float(logits.double().softmax(-1)[answer])
        ungrafted = {"model": right[0], "donor": right[1]}
        right = right[2:]
        fields = {
            "prompts": len(answers),
            **compare_windows(windows, right, ungrafted, depth, groups),
        }
        count, shares = effective_count(groups), right.mean(1).tolist()
        rows = np.array([(share, *wilson(share, count)) for share in shares])
        units = "share of the prompts"
        variables = with_ends("accuracy", "right answers", units, rows)
        mean = probability[2:].mean(1).astype(np.float32)
        variables["probability"] = "site", mean, "mean probability of the answer"
    report = GraftReport(
        donor=donor.name,
        copies=examples.copies,
        groups=int(examples.groups.max()) + 1,
        grafted="blocks" if sites is None else "states",
        layers=layers,
        **fields,
        notes=list(dict.fromkeys(notes)),
    )
    last_sites = site_names(window[-1] for window in windows)
    coords: Coordinates = {
        "site": site_names(window[0] for window in windows),
        "last_site": ("site", text_array(last_sites)),
    }
    source = {**model.source(None).to_json(), "donor": donor.source(None).to_json()}
    return Result("graft", to_dataset(variables, coords), report, source)


def _all_runs(
    model: Model,
    donor: Model,
    examples: "Examples",
    windows: Sequence[Window],
    blocks: bool,
    notes: list[str],
) -> Iterator[tuple[int, list[int], Pass]]:
    """Yield the runs of all examples: the model and the donor as they are, then the
    model with each window grafted.

    Each comes with its number and the examples in it; what is unusual goes to `notes`.
    """
    # The pass is resumed with the model's states below each window of blocks, or with
    # the donor's states.
    below = {Site(window[0].layer - 1) for window in windows if window[0].layer}
    grafted = set().union(*windows)
    pairs = zip(
        model.anatomy.stacks[0].blocks, donor.anatomy.stacks[0].blocks, strict=True
    )
    paths = [(block.path, donor_block.path) for block, donor_block in pairs]

    def runs(batch: Inputs) -> Iterator[Pass]:
        """Run a batch in both models, and in the model with each window grafted."""
        model_run = record(model, batch, sorted(below) if blocks else (), logits=True)
        donor_run = record(donor, batch, () if blocks else sorted(grafted), logits=True)
        yield model_run
        yield donor_run
        states = model_run.states if blocks else donor_run.states
        for window in windows:
            entry = window[0]
            # The donor's forward in the place of the model's.
            forwards = {}
            if blocks:
                entry = Site((entry.layer or 0) - 1)
                for site in window:
                    path, donor_path = paths[(site.layer or 0) - 1]
                    block = model.module.get_submodule(path)
                    forwards[block] = donor.module.get_submodule(donor_path).forward
            elif entry.part:
                changes: dict[str | Site, Any] = {
                    site: Replace(states[site]) for site in window
                }
                yield edit(model, batch, changes, (), logits=True)
                continue
            with model.lock, hooks.substituting(forwards):
                run = resume(model, batch, entry, states[entry], ())
            yield run

    # Prompts are run one by one, texts in batches if both models can.
    batch_tokens = 1 if examples.answers else batch_size(model)
    batched = donor if model.batching.padding_safe else model
    total = (2 + len(windows)) * len(examples.inputs)
    with progress.track("Grafting", total=total) as advance:
        for numbers, batch in examples.inputs.batches(
            batched, batch_tokens=batch_tokens
        ):
            for row, run in enumerate(runs(batch)):
                yield row, numbers, run
                advance(len(numbers))
            # What the last run says holds for all of them.
            notes += run.notes


def check_models(model: Model, donor: Model) -> None:
    """Refuse models that differ in shape, dtype, device or vocabulary."""
    problem = f"Cannot graft {donor.name} into {model.name}"
    remedy = "Give a donor of the same shape, such as another checkpoint of the model."
    # Adapters and packed weights are other ways to compute the same blocks.
    modules = [below_adapters(model.module), below_adapters(donor.module)]
    shapes = []
    for module in modules:
        named = module.named_parameters()
        shapes.append({(name, unpacked_shape(weight)) for name, weight in named})
    different = shapes[0] ^ shapes[1]
    if different:
        reason = f"their weights differ in shape, at {min(different)[0]}"
        raise ModuleError(problem, reason, remedy)
    if type(modules[0]) is not type(modules[1]):
        raise ModuleError(problem, "they are of different classes", remedy)
    if model.module is donor.module:
        raise ModuleError(
            problem, "they are the same module", "Load the donor separately."
        )
    for name in ("dtype", "device"):
        words = []
        for side in (model, donor):
            values = {str(side.dtype)}
            if name == "device":
                values = {str(weight.device) for weight in side.module.parameters()}
            words.append(", ".join(sorted(values)))
        if words[0] != words[1]:
            raise ModuleError(
                problem,
                f"their states are in {words[0]} and {words[1]}",
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
    plan(model.anatomy, dict.fromkeys(selected, Scale(1.0)))
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


class Examples(NamedTuple):
    """Prompts with the token that answers each, or texts; and which belong together.

    `copies` is how many further ones were the same again, with the same answer.
    """

    inputs: Inputs
    answers: list[int] | None
    groups: Ints
    copies: int


def encode_examples(model: Model, donor: Model, data: Any) -> Examples:
    """Encode prompts and their answers, or texts, and leave out copies."""
    rows = list(_rows(data))
    inputs = model.encode([prompt for prompt, _, _ in rows])
    if inputs.texts and donor.tokenizer:
        prompts = list(inputs.texts)
        donor_ids = donor.encode(prompts).ids
        for prompt, ids, other_ids in zip(prompts, inputs.ids, donor_ids, strict=True):
            if ids != other_ids:
                raise TextError(
                    f"Cannot use {prompt[:40]!r}",
                    f"{model.name} and {donor.name} tokenize it differently",
                    "Give a donor with the same tokenizer.",
                )
    firsts: dict[Hashable, int] = {}
    answers = {}
    # A tokenizer serves one thread at a time.
    with model.lock:
        for number, (text, word, _) in enumerate(rows):
            if word is not None:
                before = text_before(inputs, number, inputs.lengths[number] - 1)
                answers[number] = token_after(model.text_encoder, word, [before])
            elif inputs.lengths[number] < 2:
                raise TextError(
                    f"Cannot measure the loss of {str(text)[:40]!r}",
                    "it has one token, so there is no next one to predict",
                    "Give texts of two tokens or more, or [(prompt, answer), ...].",
                )
            firsts.setdefault((inputs.ids[number], answers.get(number)), number)
    numbers = list(firsts.values())
    inputs = inputs.some(numbers)
    named_groups = [rows[number][2] for number in numbers]
    # A prompt with two answers, or in other letters, is no further evidence.
    groups = texts.number_groups(
        inputs.ids,
        [texts.copy_key(text) for text in inputs.texts or inputs.ids],
        None if None in named_groups else named_groups,
    )
    answered = [answers[number] for number in numbers if number in answers]
    copies = len(rows) - len(numbers)
    return Examples(inputs, answered or None, groups, copies)


def _rows(data: Any) -> Iterator[tuple[Any, Any, Hashable | None]]:
    """Yield prompts with answers and groups, None where the data do not say."""
    if isinstance(data, list) and data:
        is_pair = [_is_pair(row) for row in data]
        if all(is_pair):
            for prompt, answer in data:
                yield prompt, answer, None
            return
        if any(is_pair):
            raise TextError(
                "Cannot tell prompts from texts",
                f"{sum(is_pair):,} of {len(data):,} have an answer",
                "Give every prompt an answer, or none of them.",
            )
        if all(isinstance(row, list | tuple) for row in data):
            # Texts as ids.
            for ids in data:
                yield ids, None, None
            return
    labelled = data if isinstance(data, texts.Labelled) else texts.read(data)
    nothing = [None] * len(labelled)
    yield from zip(
        labelled.texts,
        labelled.labels or nothing,
        labelled.groups or nothing,
        strict=True,
    )


def _is_pair(row: Any) -> bool:
    """Tell a prompt with its answer from a text of two ids."""
    is_two = isinstance(row, list | tuple) and len(row) == 2
    return is_two and not isinstance(row[0], Integral)


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
    # Thirds count from 0, at the bottom.
    thirds = by_third(windows, depth)
    if not {1, 2} <= thirds.keys():
        return fields
    shares = []
    for name, third in (("middle", 1), ("late", 2)):
        rows = thirds[third]
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


def by_third(windows: Sequence[Window], depth: int) -> dict[int, list[int]]:
    """Return the numbers of the windows centred in each third of the depth."""
    thirds: dict[int, list[int]] = {}
    for row, window in enumerate(windows):
        # The middle of a window, in blocks from the bottom: that of the last block is
        # depth - 1/2. `final` counts as the last layer.
        first = depth if window[0].layer is None else window[0].layer
        last = depth if window[-1].layer is None else window[-1].layer
        third = int(3 * max(0.0, (first - 1 + last) / 2) // depth)
        thirds.setdefault(third, []).append(row)
    return thirds


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
    # Of a mean and its opposite, the one above zero.
    return float(corrected_sign_flip_p(np.column_stack([sums, -sums])).min())
