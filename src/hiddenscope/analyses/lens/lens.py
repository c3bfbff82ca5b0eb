"""What would each layer predict, if it were the last?"""

import os
from itertools import accumulate

import numpy as np

from hiddenscope import progress
from hiddenscope.analyses.lens.facts import UnembeddingFacts
from hiddenscope.analyses.lens.findings import (
    Predictions,
    Target,
    lens_dataset,
    lens_facts,
    next_ids,
)
from hiddenscope.analyses.lens.fitted import Lens, resolve
from hiddenscope.analyses.lens.maps import mapped
from hiddenscope.analyses.lens.reading import LensSites, Part, Reading, read_predictions
from hiddenscope.arguments import checked, renamed
from hiddenscope.errors import PassError, SiteError, TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.passes.answers import notes_on_spaces
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Result
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Source, States, Tokens
from hiddenscope.states.arrays import Ints
from hiddenscope.states.mixed import one_tensor, take_sites

NEXT = "next"
# Tokens whose states are held at a time, of up to so many sites; fewer of more sites.
BATCH_TOKENS = 2_048
BATCH_SITES = 128


@checked
@renamed(text="texts")
def lens(
    model: ModelLike,
    texts: Texts | Inputs,
    *,
    k: int = 5,
    target: str | int | None = None,
    lens: str | os.PathLike[str] | Lens = "logit",
    sites: SitePatterns = "layer.*",
    targets: Texts | None = None,
) -> Result:
    """Read what every layer would predict at every token, if it were the last.

    The model's own unembedding is applied to its states. For each site and token: the
    `k` most likely words of the vocabulary with their probabilities, the entropy, and
    the KL divergence of this prediction from the model's own. `target` is a word of the
    vocabulary to follow, as a string or an id, or "next" for the token that comes next
    in the text: its probability and its rank. Along the sites, two rates: how often the
    top token is the model's own, and how often it is the true next token. `lens` is
    "logit"; or a fitted lens (`hs.Lens.fit`), which first maps the states nearer to the
    last layer; or the path of one that was saved. `sites` may name parts too, such as
    "*.mlp" or "*.attn.head.*": what a part adds is read by itself. `targets` are the
    decoder's texts, in an encoder-decoder.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.lens(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["word"].sizes)
    {'site': 4, 'token': 3, 'rank': 5}
    >>> float(result.data["kl"].sel(site="layer.3").max())
    0.0
    """
    model = as_model(model)
    selected = LensSites.of(model, sites)
    fitted = resolve(model, lens)
    if fitted is not None and selected.parts:
        raise SiteError(
            f"Cannot read {selected.parts[0]} with the {fitted.kind} lens",
            "it was fitted to whole layers",
            "Ask for whole layers, or use lens='logit'.",
        )
    unembedding = Unembedding(model, selected.last)
    if type(k) is not int or not 1 <= k <= unembedding.vocabulary:
        reason = f"the vocabulary of {model.name} has {unembedding.vocabulary:,} tokens"
        raise PassError(
            f"k must be an integer from 1 to {unembedding.vocabulary:,}, got {k!r}",
            reason,
            "Give such a k.",
        )
    inputs = model.encode(texts, targets=targets)
    followed = _target(model, target, selected, inputs)
    reading, source = _read_batches(
        model, inputs, selected, unembedding, fitted, followed, k
    )
    # A tokenizer serves one thread at a time.
    with model.lock:
        encoder = model.text_encoder
        tokens = encoder.tokens(inputs.of(selected.last.stack))
        predictions = Predictions.of(reading, selected, tokens)
        data = lens_dataset(predictions, encoder.strings, followed)
        facts = lens_facts(predictions, data, followed, encoder.string)
        spelled = () if target == NEXT else (target,)
        notes = [*notes_on_spaces(model.tokenizer, spelled)]
    reason = unembedding.recipe.reason
    if reason:
        notes.append(f"The logits were made by whole passes, because {reason}.")
    facts = {
        "lens": "logit" if fitted is None else fitted.kind,
        **facts,
        "unembedding": _recipe(unembedding),
        "notes": notes,
    }
    return Result("lens", data, facts, source)


def _read_batches(
    model: Model,
    inputs: Inputs,
    sites: LensSites,
    unembedding: Unembedding,
    fitted: Lens | None,
    target: Target | None,
    k: int,
) -> tuple[Reading, Source]:
    """Read every text, batch by batch, and put the tokens back into their order."""
    final_unembedding = None
    if sites.final is not None:
        final_unembedding = Unembedding(model, sites.final)
    readings: list[Reading] = []
    rows: list[Ints] = []
    source = None
    starts = list(accumulate(inputs.of(sites.last.stack).lengths, initial=0))
    batch_tokens = BATCH_TOKENS
    if len(sites.all) > BATCH_SITES:
        batch_tokens = max(1, BATCH_TOKENS * BATCH_SITES // len(sites.all))
    with progress.track("Reading", total=starts[-1] * len(sites.all)) as advance:
        for texts, batch in inputs.batches(model, batch_tokens=batch_tokens):
            # On a GPU the states never go through host memory.
            states = record(model, batch, sites.pattern, keep="device").states
            assert isinstance(states, States), "the sites are in one stack"
            count = len(sites.entering)
            entering = one_tensor(take_sites(states.values, np.arange(count)))
            if fitted is not None:
                entering = mapped(entering, sites.entering, fitted.maps)
            parts: list[Part] = [(unembedding, entering)]
            if sites.final is not None and final_unembedding is not None:
                parts.append((final_unembedding, states[sites.final][None]))
            readings.append(
                read_predictions(
                    parts,
                    count - 1,
                    k=k,
                    targets=_target_ids(target, states.tokens),
                    advance=advance,
                )
            )
            places = [np.arange(starts[text], starts[text + 1]) for text in texts]
            rows.append(np.concatenate(places))
            source = states.source
    assert source is not None, "there is at least one batch"
    return Reading.join(readings, rows), source


def _target(
    model: Model, target: str | int | None, sites: LensSites, inputs: Inputs
) -> Target | None:
    """Return the word to follow; refuse one that is not a single token."""
    if target is None:
        return None
    if target != NEXT:
        with model.lock:
            token = model.text_encoder.single(target)
            return Target(repr(model.text_encoder.string(token)), token)
    if not sites.causal:
        reason = (
            f"{model.name} sees the whole text and does not predict what comes next"
        )
        raise TextError(
            "Cannot track the next token", reason, "Give a token as the target."
        )
    for text, length in enumerate(inputs.of(sites.last.stack).lengths):
        if length < 2:
            raise TextError(
                f"Text {text} has no next token",
                "it is one token long",
                "Give a longer one.",
            )
    return Target("the next token", None)


def _target_ids(target: Target | None, tokens: Tokens) -> Ints | None:
    """Return the id to follow at each token, -1 where there is none."""
    if target is None:
        return None
    if target.id is None:
        return next_ids(tokens)
    return np.full(len(tokens), target.id, dtype=np.int64)


def _recipe(unembedding: Unembedding) -> UnembeddingFacts:
    """Return how the logits were made, as facts."""
    recipe = unembedding.recipe
    return {
        "vocabulary": recipe.vocabulary,
        "method": recipe.method,
        "transform": recipe.transform,
        "constant": None if recipe.transform == "none" else recipe.constant,
    }
