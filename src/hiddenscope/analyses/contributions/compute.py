"""The parts of a logit as labelled arrays, and the strongest of them."""

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from hiddenscope.analyses.contributions.parts import (
    BRANCHES,
    Parts,
    check_stack,
    split_logits,
)
from hiddenscope.analyses.contributions.question import (
    AnswerTokens,
    Question,
    encode_question,
)
from hiddenscope.analyses.contributions.story import ContributionsReport, StrongPart
from hiddenscope.directions.direction import Direction
from hiddenscope.errors import PassError, SiteError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    text_array,
    to_dataset,
)
from hiddenscope.sites import Site, summarise

if TYPE_CHECKING:
    import xarray

DIMS = ("step", "layer", "head")
# Parts that are listed for each token of the answer.
MOST_STRONGEST = 20

LONG_NAMES = {
    "attn_head": "contribution of each head",
    "cross_head": "contribution of each head of cross-attention",
    "attn_bias": "contribution of attention's bias",
    "cross_bias": "contribution of cross-attention's bias",
    "attn_whole": "contribution of attention that is not split into heads",
    "cross_whole": "contribution of cross-attention that is not split into heads",
    "mlp": "contribution of each MLP",
    "embedding": "contribution of the embeddings",
    "norm_bias": "contribution of the final norm's bias",
    "head_bias": "contribution of the unembedding's bias",
    "neuron": "contribution of the strongest neurons",
    "logit": "logit",
    "total": "sum of all parts",
    "error": "sum of all parts minus the logit",
    "probability": "probability of the answer's token",
}


def list_parts(
    model: ModelLike,
    text: Texts | Inputs,
    answer: AnswerTokens | Direction,
    other: AnswerTokens | None,
    *,
    neurons: int,
    targets: Texts | None,
) -> Result:
    """Return what each part adds to the logit of every token of the answer."""
    model = as_model(model)
    direction = answer if isinstance(answer, Direction) else None
    stack = check_stack(model)
    question = encode_question(model, text, answer, other, targets)
    last = Site(stack.depth, "", model.anatomy.sites[-1].stack)
    softcap = scale = None
    if direction is not None:
        layers = model.anatomy.select(direction.sites or tuple(direction.vectors))
        answering, last = last.stack, layers[0]
        if len(layers) > 1 or last.part or not last.layer or last.stack != answering:
            raise SiteError(
                f"Cannot split what {model.name} writes along {direction.title}",
                f"it lies at {summarise(layers)}, and parts sum up to one layer",
                "Give hs.Direction.of(direction, sites='layer.3').",
            )
        reader: Unembedding | Tensor = direction.vector_at(
            last, model.anatomy.width(last)
        )
    else:
        reader = Unembedding(model)
        recipe = reader.recipe
        if recipe.method == "whole":
            raise PassError(
                f"Cannot split the logits of {model.name} into parts",
                recipe.reason,
                "Use hs.lens or hs.patch.",
            )
        softcap = recipe.constant if recipe.transform == "softcap" else None
        scale = recipe.constant if recipe.transform == "scale" else None
    parts = split_logits(model, question, last, reader, neurons=neurons)
    with model.lock:
        strings = model.text_encoder.strings
        steps = [direction.title] if direction else strings(question.answers)
        data = contributions_dataset(model, question, parts, steps)
        other_string = None
        if question.others is not None:
            other_string = "".join(strings(question.others))
        report = ContributionsReport(
            answer="".join(steps),
            tokens=len(question.text.ids[0]),
            steps=steps,
            logit=parts.logit.tolist(),
            total=parts.total.tolist(),
            error=parts.error.tolist(),
            allowed_error=parts.allowed.tolist(),
            probability=parts.probability.tolist(),
            strongest=strongest_parts(parts, last.stack),
            norm_subtracts_mean=parts.centred,
            softcap=softcap,
            scale=scale,
            dtype=parts.dtype,
            notes=[*question.notes, *parts.notes],
            other=other_string,
            along=str(last) if direction else "",
        )
    return Result("contributions", data, report, model.source(last.stack))


def contributions_dataset(
    model: Model, question: Question, parts: Parts, steps: list[str]
) -> "xarray.Dataset":
    """Return all parts as one Dataset."""
    arrays = sorted(parts.arrays.items(), key=lambda part: -part[1].ndim)
    numbers = {
        **dict(arrays),
        "logit": parts.logit,
        "total": parts.total,
        "error": parts.error,
        "probability": parts.probability,
    }
    most_heads = 0
    for branch in BRANCHES:
        if f"{branch}_head" in numbers:
            most_heads = max(most_heads, numbers[f"{branch}_head"].shape[2])
    variables: Variables = {}
    for name, values in numbers.items():
        attributes: Attributes = {"long_name": LONG_NAMES[name]}
        if name != "probability":
            attributes |= {"units": "logits", "meaning": "diverging"}
        if values.ndim == len(DIMS):
            # NaN stands for heads that only another attention has.
            padded = np.full((*values.shape[:2], most_heads), np.nan)
            padded[..., : values.shape[2]] = values
            values = padded
        variables[name] = DIMS[: values.ndim], values, attributes
    strings = model.text_encoder.strings
    coords: Coordinates = {
        "step": np.arange(len(question.answers)),
        "step_string": ("step", text_array(steps)),
        "step_id": ("step", np.array(question.answers)),
        "layer": np.arange(1, parts.arrays["mlp"].shape[1] + 1),
        "head": np.arange(most_heads),
        "token_string": ("token", text_array(strings(question.text.ids[0]))),
    }
    if question.others is not None:
        coords["other_string"] = "step", text_array(strings(question.others))
        coords["other_id"] = "step", np.array(question.others)
    data = to_dataset(variables, coords)
    if parts.neurons is not None:
        ranked = ("step", "rank")
        neuron = {"long_name": LONG_NAMES["neuron"], "units": "logits"}
        data["neuron"] = ranked, parts.neurons.effect, neuron
        data = data.assign_coords(
            rank=np.arange(1, parts.neurons.effect.shape[1] + 1),
            neuron_layer=(ranked, parts.neurons.layer),
            neuron_index=(ranked, parts.neurons.number),
        )
    if question.text.texts is not None:
        data.attrs["texts"] = list(question.text.texts)
    return data


def strongest_parts(parts: Parts, stack: str | None) -> list[StrongPart]:
    """Return the parts that add or take most, for each token of the answer."""
    named = [
        (str(Site(0, "", stack)), parts.arrays["embedding"]),
        ("final norm bias", parts.arrays["norm_bias"]),
        ("unembedding bias", parts.arrays["head_bias"]),
    ]
    for name, values in parts.arrays.items():
        branch, _, kind = name.partition("_")
        if values.ndim == 1:
            continue
        for layer, *head in np.ndindex(values.shape[1:]):
            part = branch
            if head:
                part = f"{branch}.head.{head[0]}"
            site = Site(layer + 1, part, stack)
            ending = " bias" if kind == "bias" else ""
            named.append((f"{site}{ending}", values[:, layer, *head]))
    strongest = []
    for step, total in enumerate(parts.total):
        known = np.nan_to_num([values[step] for _, values in named])
        for index in np.argsort(-np.abs(known), kind="stable")[:MOST_STRONGEST]:
            contribution = float(known[index])
            if contribution == 0:
                break
            strongest.append(
                StrongPart(
                    site=named[index][0],
                    contribution=contribution,
                    share=contribution / float(total),
                    step=step,
                )
            )
    return strongest
