"""Which states carry the answer?

cells    every site and token patched, and whole layers
compute  what is patched, the labelled arrays, and the report
story    what is said and shown
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from hiddenscope.causes.contrast import CONTRASTS, Contrast
from hiddenscope.interface import HEAD, SITES, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import ModelLike, Result, SitePatterns


@analysis(
    needs=(HEAD,),
    verb="patch",
    changes=True,
    details="Prints where the answer is carried; --out patch.html keeps the picture,"
    " .csv the numbers.",
)
def patch(
    model: "ModelLike",
    contrasts: Annotated[Contrast | Sequence[Contrast], CONTRASTS],
    *,
    sites: Annotated["SitePatterns", SITES] = "layer.*",
    into: Annotated[
        Literal["corrupt", "clean"],
        ask("The run that states of the other one are put into."),
    ] = "corrupt",
    window: Annotated[
        int | Sequence[int] | None,
        ask(
            "How many tokens are patched at a time: one by default, and all for heads"
            " and neurons.",
            aside=True,
        ),
    ] = None,
    layers: Annotated[
        int | None,
        ask("How many whole layers are patched in a row.", least=0, aside=True),
    ] = None,
    method: Annotated[
        Literal["exact", "attribution", "both", "zero", "mean", "resample"],
        ask(
            "A pass for each state, an estimate by one gradient, or both; or ablate the"
            " clean run with zeros, means or the corrupt run."
        ),
    ] = "exact",
) -> "Result":
    """Patch states of the clean run into the corrupt run and see what they restore.

    One token is patched at one site at a time. The effect is the share of the logit
    difference between `answer` and `other` that comes back: 0 as in the corrupt run, 1
    as in the clean one. With `into="clean"` corrupt states go into the clean run, and
    it is the share that is lost. `window` tokens are patched at a time, or those at a
    list of positions of the clean prompt at once; by default one token, and all tokens
    of heads and neurons. Whole layers are patched too, `layers` of them in a row (0:
    none). Several contrasts are averaged; a copy counts once, and those of a `group`
    belong together. `method="attribution"` estimates all effects from one gradient. The
    methods "zero", "mean" and "resample" ablate: they put zeros, the mean over all
    prompts, or the corrupt run's states into the clean run.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> result = hs.patch(model, hs.Contrast([5, 6, 7], [5, 9, 7], answer=11, other=12))
    >>> result.data["effect"].sel(site="layer.0").values.round(5).tolist()
    [0.0, 1.0, 0.0]
    """
    from hiddenscope.analyses.patch.compute import patch_all

    return patch_all(
        model,
        contrasts,
        sites=sites,
        into=into,
        window=window,
        layers=layers,
        method=method,
    )
