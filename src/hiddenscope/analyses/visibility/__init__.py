"""What can a hidden state see?

reading   the texts, cut to the positions that all have, and the tokens whose log-probabilities are asked for
measures  which vectors are taken at each target, and what is made of their products with the Jacobian
maps      the map itself, target by target
table     the labelled arrays
findings  how far influence reaches, how it decays, how much stays on the token itself
"""

from functools import partial
from typing import Any

import torch

from hiddenscope import progress
from hiddenscope.analyses.visibility.findings import findings
from hiddenscope.analyses.visibility.maps import Axes, influence, on_logits
from hiddenscope.analyses.visibility.measures import Measure, Name
from hiddenscope.analyses.visibility.reading import read
from hiddenscope.analyses.visibility.table import mean, table
from hiddenscope.errors import TextError, TooLarge
from hiddenscope.model import Model
from hiddenscope.passes import Texts
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.results import Result
from hiddenscope.sites import summarise


def visibility(
    model: Model,
    text: Texts,
    *,
    measure: Name = "l1",
    sites: Any = "layer.*,final",
    probes: int | None = None,
    target: str | int | None = None,
    targets: Texts | None = None,
    seed: int = 0,
) -> Result:
    """How much every state is influenced by every state before it: the map [site, token, source_site, source_token].

    Measures: "l1", the L1 norm of the gradient of |h|₁/|h|₂; "frobenius", the norm of the Jacobian, exact for narrow
    states and else by `probes` with a 95% interval; "relative", that for a relative change at both ends; "logit", the
    norm of the gradient of the log-probability of `target`, or of the true next token, [token, source_site,
    source_token]. Several texts are averaged.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.visibility(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> seen = result.data["l1"].sel(site="layer.2", source_site="layer.1").values
    >>> (seen > 0).astype(int).tolist()  # [token, source_token]
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    chosen = model.anatomy.select(sites)
    asked = Measure.of(measure, probes, seed, max(model.anatomy.width(site) for site in chosen))
    if target is not None and measure != "logit":
        raise TextError(f"The target {target!r:.40}", f"{measure} asks for no token", "Give it with measure='logit'.")
    subject = read(model, text, targets, target, logits=measure == "logit")
    axes = Axes(chosen, subject.lengths)
    _fits(axes, asked)
    generator = torch.Generator().manual_seed(asked.seed)  # one for all texts, so that their probes differ
    one = on_logits if measure == "logit" else partial(influence, generator=generator)
    total = len(subject.texts) * (subject.last_length if measure == "logit" else int(axes.there.sum()))
    with model.lock, torch.inference_mode(False), progress.track("Looking back", total=total) as advance:
        found = mean(one(model, each, axes, asked, advance) for each in subject.texts)
    data = table(subject, axes, asked, found)
    facts: dict[str, Any] = {"texts": len(subject.texts), "tokens": axes.tokens, "sites": summarise(chosen)}
    facts |= subject.notes | {"how": _how(asked)} | findings(data, axes, asked.name, subject.causal)
    return Result("visibility", data, facts, model.source(chosen[0].stack))


def _how(measure: Measure) -> str:
    """How the numbers were had."""
    if measure.name in ("l1", "logit"):
        return "exact: one vector product a target"
    if measure.probes:
        return f"estimated with {measure.probes} random vectors a target; the error is half the 95% interval"
    return "exact: as many vector products a target as it is wide"


def _fits(axes: Axes, measure: Measure) -> None:
    """Refuse a map that memory does not hold: in float64, with room for the sums, a text's map and the mean."""
    targets = axes.tokens if measure.name == "logit" else len(axes.sites) * axes.tokens
    size = targets * len(axes.sites) * axes.tokens * 8 * (6 if measure.probes else 3)
    free = free_memory()
    if size > SHARE_OF_FREE_MEMORY * free:
        problem = f"A map of {len(axes.sites)} sites and {axes.tokens:,} tokens, each with each"
        reason = f"that takes {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB of memory are free"
        raise TooLarge(problem, reason, "Choose fewer sites, such as sites='layer.0,layer.-1', or a shorter text.")
