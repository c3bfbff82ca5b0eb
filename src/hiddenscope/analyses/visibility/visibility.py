"""Which states influence a state, and which does it influence?"""

from collections.abc import Sequence

import numpy as np
import torch

from hiddenscope import progress
from hiddenscope.analyses.visibility.aligned import aligned
from hiddenscope.analyses.visibility.findings import (
    measurement_facts,
    put_findings,
    visibility_dataset,
)
from hiddenscope.analyses.visibility.maps import (
    Axes,
    InfluenceMeasure,
    Measurement,
    MeasureName,
    cut_texts,
    influence_on_log_probability,
    influence_on_states,
)
from hiddenscope.analyses.visibility.sampling import Sampling
from hiddenscope.arguments import checked, renamed
from hiddenscope.errors import PassError, TextError, TooLarge
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.modules import autograd
from hiddenscope.passes import Inputs, Texts, record
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.results import Result
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states.arrays import Floats, Ints
from hiddenscope.texts import Labelled, copy_groups, number_groups


@checked
@renamed(
    {"probes": "Give sampling=hs.Sampling(probes=...)."},
    text="texts",
    probes="sampling",
)
def visibility(
    model: ModelLike,
    texts: Texts | Inputs | Labelled,
    *,
    influence: MeasureName = "l1",
    sites: SitePatterns = "layer.*,final",
    target: str | int | None = None,
    sampling: Sampling | None = None,
    seed: int = 0,
) -> Result:
    """Map how much every state is influenced by every state before it.

    The map is [site, token, source_site, source_token]. `influence` is "l1", the L1
    norm of the gradient of |h|₁/|h|₂; "frobenius", the norm of the Jacobian, exact for
    narrow states and else estimated by random vectors, with a 95% interval;
    "relative", the same for a relative change at both ends; "logit", the norm of the
    gradient of the log-probability of `target`, or of the true next token, [token,
    source_site, source_token]. A decoder's texts come with `model.encode(texts,
    targets=...)`.

    Of several texts, states are drawn and their influences averaged by distance and
    depth, with intervals over texts; `hs.Sampling` says how. Texts are taken as
    independent of each other, unless `hs.read(..., group=)` says which belong together.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.visibility(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> below = result.data["l1"].sel(site="layer.2", source_site="layer.1").values
    >>> (below > 0).astype(int).tolist()  # [token, source_token]
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    model = as_model(model)
    selected = model.anatomy.select(sites)
    if not selected:
        raise PassError(
            "No sites to measure",
            "the list is empty",
            "Name at least one, such as 'layer.*'.",
        )
    width = max(model.anatomy.width(site) for site in selected)
    sampling = sampling or Sampling()
    measure = InfluenceMeasure.of(influence, sampling.probes, seed, width)
    if target is not None and influence != "logit":
        raise TextError(
            f"Cannot use the target {target!r:.40}",
            f"the measure {influence} reads no token",
            "Give it with influence='logit'.",
        )
    plain_texts = texts.texts if isinstance(texts, Labelled) else texts
    inputs = model.encode(plain_texts)
    # Whole maps of many texts take too long, so a few states of each are drawn.
    if len(inputs) > 1 and sampling.align == "distance":
        groups = _groups(inputs, texts)
        _check_alignable(inputs, selected, influence)
        return aligned(model, inputs, selected, measure, sampling, groups, seed)
    return _whole_maps(model, inputs, selected, measure, target)


def _whole_maps(
    model: Model,
    inputs: Inputs,
    sites: tuple[Site, ...],
    measure: InfluenceMeasure,
    target: str | int | None,
) -> Result:
    """Average the whole maps of texts, place by place."""
    is_logit = measure.name == "logit"
    stacks = _stacks(model, inputs, sites, logit=is_logit)
    predicted: list[tuple[int, ...]] = []
    if is_logit:
        *_, last_stack = stacks.values()
        predicted = _predicted(model, last_stack, inputs, target)
    lengths = {}
    is_cut = False
    for name, of_stack in stacks.items():
        shortest = min(of_stack.lengths)
        lengths[name] = shortest
        is_cut |= shortest < max(of_stack.lengths)
        inputs = cut_texts(inputs, name, shortest)
    axes = Axes(sites, lengths)
    _check_memory(axes, measure)
    values, half_interval = _mean_map(model, inputs, axes, measure, predicted)
    # A tokenizer serves one thread at a time.
    with model.lock:
        encoder = model.text_encoder
        tokens = {name: encoder.tokens(inputs.of(name)) for name in lengths}
        strings = [list(map(encoder.string, row)) for row in predicted]
    data = visibility_dataset(axes, measure, values, half_interval, tokens, strings)
    # Without targets, an encoder-decoder has only the first of its stacks here.
    pairs = zip(stacks, model.anatomy.stacks, strict=False)
    causal = {name: stack.causal for name, stack in pairs}
    facts = measurement_facts(measure, sites, len(inputs), axes.tokens)
    facts["cut"] = is_cut
    facts |= put_findings(data, axes, measure.name, causal)
    return Result("visibility", data, facts, model.source(sites[0].stack))


def _groups(inputs: Inputs, texts: object) -> Ints:
    """Number the groups of texts: copies, and texts that the data keep together."""
    copies = copy_groups(inputs.texts or inputs.ids)
    return number_groups(copies, getattr(texts, "groups", None))


def _check_alignable(inputs: Inputs, sites: Sequence[Site], influence: str) -> None:
    """Refuse what has no distance or no depth."""
    stacks = {site.stack for site in sites}
    reason = ""
    if influence == "logit":
        reason = "predictions have no layers to align"
    elif len(stacks) > 1 or inputs.targets is not None:
        reason = "an encoder and a decoder have no distances between them"
    if reason:
        raise TextError(
            "Cannot align these texts by distance",
            reason,
            "Give Sampling(align='position'), or other sites or another measure.",
        )


def _stacks(
    model: Model, inputs: Inputs, sites: Sequence[Site], *, logit: bool
) -> dict[str | None, Inputs]:
    """Return the texts of each stack; refuse texts that cannot be averaged.

    An encoder-decoder without targets has only its encoder, unless its decoder is
    measured.
    """
    names: list[str | None] = [None]
    if model.encoder_decoder:
        names = ["encoder", "decoder"]
        if inputs.targets is None:
            if logit or any(site.stack == "decoder" for site in sites):
                model.text_encoder.required_start()
            names = ["encoder"]
    stacks = {name: inputs.of(name) for name in names}
    tokens = 0
    for of_stack, stack in zip(stacks.values(), model.anatomy.stacks, strict=False):
        shortest = min(of_stack.lengths)
        longest = max(of_stack.lengths)
        tokens += shortest
        if shortest < longest and not stack.causal:
            reason = (
                f"they have {shortest:,} to {longest:,} tokens, and in this model a"
                " state depends on the whole text"
            )
            raise TextError(
                "Cannot average over these texts",
                reason,
                "Give texts with the same number of tokens.",
            )
    if tokens < 2:
        raise TextError(
            "No influence to measure",
            "a text has only one token, which no other token can influence",
            "Give longer texts.",
        )
    return stacks


def _predicted(
    model: Model, of_stack: Inputs, inputs: Inputs, target: str | int | None
) -> list[tuple[int, ...]]:
    """Return the token whose log-probability is measured at each place of every text.

    Without a target: in a causal stack the token that follows, and after the last what
    the model predicts; in an encoder the token that is there.
    """
    if target is not None:
        with model.lock:
            token = model.text_encoder.single(target)
        return [(token,) * len(ids) for ids in of_stack.ids]
    if not model.anatomy.stacks[-1].causal:
        return list(of_stack.ids)
    predicted = []
    for number, ids in enumerate(of_stack.ids):
        text = inputs.some([number])
        logits = record(model, text, (), logits=True).logits
        assert logits is not None
        after_last = int(logits[-1].argmax())
        predicted.append((*ids[1:], after_last))
    return predicted


def _mean_map(
    model: Model,
    inputs: Inputs,
    axes: Axes,
    measure: InfluenceMeasure,
    predicted: Sequence[Sequence[int]],
) -> tuple[Floats, Floats | None]:
    """Return the mean of the texts' maps, and half its 95% interval if estimated.

    Each text has probes of its own, so that the errors are independent and shrink with
    the number of texts.
    """
    total: Floats = np.zeros(())
    squares: Floats = np.zeros(())
    generator = torch.Generator().manual_seed(measure.seed)
    measurement = Measurement(model, axes, measure, generator)
    count = len(inputs)
    targets = int(axes.filled.sum())
    if measure.name == "logit":
        targets = axes.lengths[axes.last_stack]
    with (
        model.lock,
        autograd.restored(inference=False),
        progress.track("Looking back", targets * count) as advance,
    ):
        for number in range(count):
            text = inputs.some([number])
            half = None
            if measure.name == "logit":
                values = influence_on_log_probability(
                    measurement, text, predicted[number], advance
                )
            else:
                values, half = influence_on_states(measurement, text, advance)
            total = total + values
            if half is not None:
                squares = squares + half**2
    mean = total / count
    if not measure.estimated:
        return mean, None
    return mean, np.sqrt(squares) / count


def _check_memory(axes: Axes, measure: InfluenceMeasure) -> None:
    """Refuse a map that memory does not hold."""
    sites, tokens = axes.cells
    sources = sites * tokens
    targets = tokens if measure.name == "logit" else sources
    # The sums, one text's map and the mean, in float64; an interval has as many again.
    copies = 6 if measure.estimated else 3
    size = targets * sources * 8 * copies
    free = free_memory()
    if size > SHARE_OF_FREE_MEMORY * free:
        raise TooLarge(
            f"A map of {sites} sites and {tokens:,} tokens does not fit in memory",
            f"it takes {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "Choose fewer sites, such as sites='layer.0,layer.-1', or a shorter text.",
        )
