"""What would each layer predict, if it were the last?"""

import os
from itertools import accumulate

import numpy as np

from hiddenscope import progress
from hiddenscope.analyses.lens.findings import (
    Predictions,
    Target,
    dataset,
    facts_of,
    next_ids,
)
from hiddenscope.analyses.lens.fitted import Lens, mapped, resolve
from hiddenscope.analyses.lens.reading import Ints, LensSites, Part, Reading, read
from hiddenscope.arguments import checked
from hiddenscope.errors import PassError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Facts, Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import States, Tokens

NEXT = "next"
BATCH_TOKENS = 2_048  # tokens whose states are held at a time


@checked
def lens(
    model: ModelLike,
    text: Texts | Inputs,
    *,
    k: int = 5,
    target: str | int | None = None,
    lens: str | os.PathLike[str] | Lens = "logit",
    sites: SitePatterns = "layer.*",
    targets: Texts | None = None,
) -> Result:
    """What every layer would predict at every token: the model's own unembedding,
    applied to its states.

    For each site and token: the `k` most likely words of the vocabulary with their
    probabilities, the entropy, and the KL divergence of this prediction from the
    model's own. `target` is a word of the vocabulary to follow, as a string or an id,
    or "next" for the token that comes next in the text: its probability and its rank.
    Along the sites, two rates: how often the top token is the model's own, and how
    often it is the true next token. `lens` is "logit"; or a fitted lens
    (`hs.Lens.fit`), which first maps the states nearer to the last layer; or the path
    of one that was saved. `targets` are the decoder's texts, in an encoder-decoder.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.lens(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["word"].sizes), float(result.data["kl"].sel(site="layer.3").max())
    ({'site': 4, 'token': 3, 'rank': 5}, 0.0)
    """
    model = as_model(model)
    chosen = LensSites.of(model, sites)
    fitted = resolve(model, lens)
    unembeddings = {
        site: Unembedding(model, site)
        for site in (chosen.last, chosen.final)
        if site is not None
    }
    unembedding = unembeddings[chosen.last]
    if type(k) is not int or not 1 <= k <= unembedding.vocabulary:
        reason = f"the vocabulary of {model.name} has {unembedding.vocabulary:,} tokens"
        raise PassError(
            f"k must be an integer from 1 to {unembedding.vocabulary:,}, got {k!r}",
            reason,
            "Give such a k.",
        )
    inputs = model.encode(text, targets=targets)
    followed = _target(model, target, chosen, inputs)
    readings: list[Reading] = []
    rows: list[Ints] = []
    starts = list(accumulate(inputs.of(chosen.last.stack).lengths, initial=0))
    source = None
    with progress.track("Reading", total=starts[-1] * len(chosen.all)) as advance:
        for indices, batch in inputs.batches(model, batch_tokens=BATCH_TOKENS):
            states = record(model, batch, chosen.pattern, keep="device").states
            assert isinstance(states, States), "the sites are in one stack"
            layers = states.values[: len(chosen.layers)]
            parts: list[Part] = [
                (
                    unembedding,
                    (
                        layers
                        if fitted is None
                        else mapped(layers, chosen.layers, fitted.maps)
                    ),
                )
            ]
            if chosen.final is not None:
                parts.append((unembeddings[chosen.final], states[chosen.final][None]))
            ids = _target_ids(followed, states.tokens)
            readings.append(
                read(parts, len(chosen.layers) - 1, k=k, targets=ids, advance=advance)
            )
            rows.append(
                np.concatenate([np.arange(starts[i], starts[i + 1]) for i in indices])
            )
            source = states.source
    with model.lock:
        tokens = model.text_encoder.tokens(inputs.of(chosen.last.stack))
        predictions = Predictions.of(Reading.join(readings, rows), chosen, tokens)
        data = dataset(predictions, model.text_encoder.strings, followed)
        facts = facts_of(predictions, data, followed, model.text_encoder.string)
    reason = unembedding.recipe.reason
    facts = {
        "lens": "logit" if fitted is None else fitted.kind,
        **facts,
        "unembedding": _recipe(unembedding),
        "notes": (
            [f"The logits were made by whole passes, because {reason}."]
            if reason
            else []
        ),
    }
    assert source is not None, "there is at least one batch"
    return Result("lens", data, facts, source)


def _target(
    model: Model, target: str | int | None, sites: LensSites, inputs: Inputs
) -> Target | None:
    """The word to follow, or a TextError where it is not one token, or no token comes
    next.
    """
    if target is None:
        return None
    if target != NEXT:
        with model.lock:
            single = model.text_encoder.single(target)
            return Target(repr(model.text_encoder.string(single)), single)
    if not sites.causal:
        reason = (
            f"{model.name} sees the whole text and does not predict what comes next"
        )
        raise TextError(
            "Cannot track the next token", reason, "Give a token as the target."
        )
    lengths = inputs.of(sites.last.stack).lengths
    short = next((number for number, length in enumerate(lengths) if length < 2), None)
    if short is not None:
        raise TextError(
            f"Text {short} has no next token",
            "it is one token long",
            "Give a longer one.",
        )
    return Target("the next token", None)


def _target_ids(target: Target | None, tokens: Tokens) -> Ints | None:
    """The id to follow at each token, -1 for none."""
    if target is None:
        return None
    return (
        next_ids(tokens)
        if target.id is None
        else np.full(len(tokens), target.id, dtype=np.int64)
    )


def _recipe(unembedding: Unembedding) -> Facts:
    """How the logits were made, as facts."""
    recipe = unembedding.recipe
    constant = None if recipe.transform == "none" else recipe.constant
    return {
        "vocabulary": recipe.vocabulary,
        "method": recipe.method,
        "transform": recipe.transform,
        "constant": constant,
    }
