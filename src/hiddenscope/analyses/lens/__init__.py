"""What would each layer predict, if it were the last?

compute  the readings as labelled arrays, and the report
reading  the unembedding applied to states, and measures of the logits
fitted   lenses that are fitted to a model, saved and loaded
fitting  the maps of such a lens, and how they are fitted
story    what is said and shown
"""

from typing import TYPE_CHECKING, Annotated

from hiddenscope.files import PathLike
from hiddenscope.interface import HEAD, SITES, TARGETS, TEXTS, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Direction,
        Inputs,
        Lens,
        ModelLike,
        Result,
        SitePatterns,
        Texts,
    )


@analysis(
    needs=(HEAD,),
    verb="read with a lens",
    details="Prints the top tokens after the last token, layer by layer; --out"
    " lens.html keeps the whole grid, .csv the numbers. feature:PATH:17 in place of"
    " texts reads feature 17 of the dictionary at PATH.",
)
def lens(
    model: "ModelLike",
    texts: Annotated["Texts | Inputs | Direction", TEXTS],
    *,
    k: Annotated[
        int,
        ask(
            "How many top tokens for each layer and position.",
            spelling=("-k",),
            label="How many",
        ),
    ] = 5,
    target: Annotated[
        str | int | None,
        ask(
            "A token to follow (' Paris'), or `next` for the true next token.",
            kind="word",
            aside=True,
        ),
    ] = None,
    lens: Annotated[
        "PathLike | Lens",
        ask("logit, or the path of a lens that was fitted.", in_form=False),
    ] = "logit",
    sites: Annotated["SitePatterns", SITES] = "layer.*",
    targets: Annotated["Texts | None", TARGETS] = None,
) -> "Result":
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
    decoder's texts, in an encoder-decoder. A direction in place of texts, such as a
    feature, is read as a state by itself: the words that it writes, and those that its
    opposite does.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.lens(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]])
    >>> dict(result.data["word"].sizes)
    {'site': 4, 'token': 3, 'rank': 5}
    >>> float(result.data["kl"].sel(site="layer.3").max())
    0.0
    """
    from hiddenscope.analyses.lens.compute import read_layers

    return read_layers(model, texts, k, target, lens, sites, targets)
