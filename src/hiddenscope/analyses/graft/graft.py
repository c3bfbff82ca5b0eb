"""What does another model of the same shape break or mend?

Its blocks or states are grafted into this one layer by layer. A window of blocks slides
over the depth: inside it the donor computes, everywhere else the model itself does.
"""

from typing import Any

import numpy as np
from torch import Tensor

from hiddenscope import progress
from hiddenscope.analyses.graft.findings import graft_dataset, graft_facts
from hiddenscope.analyses.graft.prompts import encode_prompts
from hiddenscope.analyses.graft.runs import Runs, Window
from hiddenscope.arguments import checked
from hiddenscope.errors import ModuleError, PassError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import try_skipping
from hiddenscope.results import Result
from hiddenscope.sites import Site, SitePatterns


@checked
def graft(
    model: ModelLike,
    donor: ModelLike,
    data: Any,
    *,
    sites: SitePatterns | None = None,
    layers: int = 1,
) -> Result:
    """Graft blocks of a donor into a model, and count the right answers.

    A window of `layers` blocks in a row slides over the depth. The donor is another
    model of the same shape, such as another checkpoint. `data` are prompts and their
    answers, each a single token: `[(prompt, answer), ...]`, or labelled texts as
    `hs.read` takes them, the label being the answer. With `sites` the donor's states
    are grafted in place of its blocks: what its branches add (`"*.attn"`, `"*.mlp"`),
    or the states of one layer at a time (`"layer.*"`). A copy of a prompt counts once.
    Prompts are taken as independent of each other, unless `hs.read(..., group=)` says
    which belong together.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> donor = hs.load((tiny_model("llama", seed=1), None))
    >>> result = hs.graft(model, donor, [([5, 6, 7], 11), ([8, 9], 12)], layers=2)
    >>> result.data["site"].values.tolist(), result.facts["prompts"]
    (['layer.1', 'layer.2'], 2)
    """
    model, donor = as_model(model), as_model(donor)
    _check_shapes(model, donor)
    _check_weights(model, donor)
    _check_vocabularies(model, donor)
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
    facts = {
        "donor": donor.name,
        "prompts": count,
        "copies": prompts.copies,
        "groups": int(prompts.groups.max()) + 1,
        "grafted": "blocks" if sites is None else "states",
        "layers": layers,
        **graft_facts(windows, right, right_ungrafted, depth, prompts.groups),
        "notes": list(dict.fromkeys(notes)),
    }
    data_by_window = graft_dataset(windows, right, probability, prompts.groups)
    source = {**model.source(None).to_json(), "donor": donor.source(None).to_json()}
    return Result("graft", data_by_window, facts, source)


def _is_best(logits: Tensor, answer: int) -> bool:
    """Tell whether an answer is more likely than every other word; a tie is not."""
    return int((logits >= logits[answer]).sum()) == 1


def _check_shapes(model: Model, donor: Model) -> None:
    """Refuse models that are not of one shape, or that make no logits."""
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


def _check_weights(model: Model, donor: Model) -> None:
    """Refuse models whose weights are in other dtypes or on other devices."""
    for name in ("dtype", "device"):
        values = {str(getattr(weight, name)) for weight in model.module.parameters()}
        others = {str(getattr(weight, name)) for weight in donor.module.parameters()}
        if values != others:
            model_values = ", ".join(sorted(values))
            donor_values = ", ".join(sorted(others))
            raise ModuleError(
                f"Cannot graft {donor.name} into {model.name}",
                f"their weights are in {model_values} and {donor_values}",
                f"Load both with the same {name}=.",
            )


def _check_vocabularies(model: Model, donor: Model) -> None:
    """Refuse models whose tokenizers differ."""
    if model.tokenizer is None or donor.tokenizer is None:
        return
    vocabulary = model.tokenizer.get_vocab()
    donor_vocabulary = donor.tokenizer.get_vocab()
    if vocabulary and donor_vocabulary and vocabulary != donor_vocabulary:
        raise ModuleError(
            f"Cannot graft {donor.name} into {model.name}",
            "their tokenizers have different vocabularies",
            "Give a donor with the same tokenizer.",
        )


def _windows(
    model: Model, donor: Model, sites: SitePatterns | None, layers: object
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
    if (
        isinstance(layers, bool)
        or not isinstance(layers, int)
        or not 1 <= layers <= len(selected)
    ):
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
