"""What does another model of the same shape break or mend?

Its blocks or states are grafted into this one layer by layer. A window of blocks slides
over the depth: inside it the donor computes, everywhere else the model itself does.

compute  the prompts or texts, the runs with each window grafted, and right answers
losses   the losses of texts, and what the windows change in them
story    what is said and shown
"""

from typing import TYPE_CHECKING, Annotated, Any

from hiddenscope.interface import CAUSAL, HEAD, ONE_STACK, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import ModelLike, Result, SitePatterns


@analysis(
    needs=(HEAD, ONE_STACK, CAUSAL),
    verb="graft into",
    changes=True,
    action="Graft another model",
    promise="You will see, layer by layer, what becomes of the answers or of the loss"
    " when blocks of the other model take the place of this one's.",
)
def graft(
    model: "ModelLike",
    donor: Annotated[
        "ModelLike",
        ask("A model of the same shape, from which layers are taken.", kind="model"),
    ],
    data: Annotated[
        Any,
        ask(
            "Prompts, each labelled with its answer, or texts: a file, or a shipped"
            " dataset.",
            kind="data",
            label="Dataset",
        ),
    ],
    *,
    sites: Annotated[
        "SitePatterns | None",
        ask(
            "Take states in place of blocks: *.attn, *.mlp or layer.*.",
            kind="sites",
            aside=True,
        ),
    ] = None,
    layers: Annotated[
        int, ask("How many layers in a row come from the donor.", aside=True)
    ] = 1,
) -> "Result":
    """Graft blocks of a donor into a model, and measure right answers or the loss.

    A window of `layers` blocks in a row slides over the depth. The donor is another
    model of the same shape, such as another checkpoint; it may have adapters or
    quantised weights. `data` are prompts and their answers, each a single token:
    `[(prompt, answer), ...]`, or labelled texts as `hs.read` takes them, the label
    being the answer. Of texts without labels, the loss of every next token is measured,
    and whether its prediction changes. With `sites` the donor's states are grafted in
    place of its blocks: what its branches add (`"*.attn"`, `"*.mlp"`), or the states of
    one layer at a time (`"layer.*"`). A copy of a prompt or a text counts once. They
    are taken as independent of each other, unless `hs.read(..., group=)` says which
    belong together.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> donor = hs.load((tiny_model("llama", seed=1), None))
    >>> result = hs.graft(model, donor, [([5, 6, 7], 11), ([8, 9], 12)], layers=2)
    >>> result.data["site"].values.tolist(), result.facts["prompts"]
    (['layer.1', 'layer.2'], 2)
    >>> losses = hs.graft(model, donor, [[5, 6, 7], [8, 9]]).facts["losses"]
    >>> losses["texts"], losses["tokens"]
    (2, 3)
    """
    from hiddenscope.analyses.graft.compute import slide_windows

    return slide_windows(model, donor, data, sites, layers)
