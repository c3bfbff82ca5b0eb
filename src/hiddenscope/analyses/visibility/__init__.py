"""Which states influence a state, and which does it influence?

maps      measures of the Jacobian, and the map of one text
compute   whole maps of texts: the labelled arrays, and the report
sampling  which states of many texts are drawn
averages  many texts, aligned by distance and depth
outgoing  many texts: what a state does to its own and to later predictions
decay     sums over drawn states, the laws that they follow, and intervals
story     what was found, what is said and shown
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from hiddenscope.analyses.visibility.sampling import Sampling
from hiddenscope.interface import SEED, SITES, TEXTS, analysis, ask, declared

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Inputs,
        Labelled,
        ModelLike,
        Result,
        SitePatterns,
        Texts,
    )


SAMPLING = tuple(replace(field, positional=False) for field in declared(Sampling))
"""What can be asked of the sampling, each by its name."""


@analysis()
def visibility(
    model: "ModelLike",
    texts: Annotated["Texts | Inputs | Labelled", replace(TEXTS, encoded=True)],
    *,
    influence: Annotated[
        Literal["l1", "frobenius", "relative", "logit", "mean", "resample"],
        ask("How influence is measured."),
    ] = "l1",
    sites: Annotated["SitePatterns", SITES] = "layer.*,final",
    target: Annotated[
        str | int | None,
        ask(
            "With logit: the token, in place of the true next one.",
            kind="word",
            aside=True,
        ),
    ] = None,
    sampling: Annotated[
        Sampling | None,
        ask(
            "What is computed of each text, and how texts are averaged.",
            kind="sampling",
            fields=SAMPLING,
            constructor="Sampling",
            aside=True,
        ),
    ] = None,
    seed: Annotated[int, SEED] = 0,
) -> "Result":
    """Map how much every state is influenced by every state before it.

    The map is [site, token, source_site, source_token]. `influence` is "l1", the L1
    norm of the gradient of |h|₁/|h|₂; "frobenius", the norm of the Jacobian, exact for
    narrow states and else estimated by random vectors, with a 95% interval;
    "relative", the same for a relative change at both ends; "logit", the norm of the
    gradient of the log-probability of `target`, or of the true next token, [token,
    source_site, source_token]. A decoder's texts come with `model.encode(texts,
    targets=...)`.

    Of several texts, states are drawn and their influences averaged by distance and
    depth, with intervals over texts; `hs.Sampling` says how. "logit" then tells what a
    state does to its own next-token prediction and to later ones, as do "mean" and
    "resample", which replace the state, by the mean of its site or by that of another
    text, and measure the change of the loss. Texts are taken as
    independent of each other, unless `hs.read(..., group=)` says which belong together.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.visibility(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> below = result.data["l1"].sel(site="layer.2", source_site="layer.1").values
    >>> (below > 0).astype(int).tolist()  # [token, source_token]
    [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    from hiddenscope.analyses.visibility.compute import map_influence

    return map_influence(
        model,
        texts,
        influence=influence,
        sites=sites,
        target=target,
        sampling=sampling or Sampling(),
        seed=seed,
    )
