"""Which vector stands for a text?

compute  the vectors, and how they are centred or whitened
story    what the app says and shows of them
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from hiddenscope.interface import POOL, SITE, TEXTS, TRUNCATE, analysis, ask

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hiddenscope.annotations import (
        Adjustment,
        Inputs,
        ModelLike,
        Pooling,
        Site,
        Texts,
    )


@analysis(
    details="--out vectors.npy, .safetensors or .csv keeps them, one row for each text"
    " in the order given.",
)
def embed(
    model: "ModelLike | Any",
    texts: Annotated["Texts | Inputs | Any", TEXTS],
    *,
    site: Annotated["str | Site | None", SITE] = None,
    pool: Annotated["Pooling | None", POOL] = None,
    normalize: Annotated[bool, ask("Scale every vector to norm 1.")] = True,
    adjust: Annotated[
        "Literal['centre', 'whiten'] | Adjustment | None",
        ask("centre or whiten the vectors.", choices=("centre", "whiten")),
    ] = None,
    truncate: Annotated[bool, TRUNCATE] = False,
) -> "NDArray[np.float32]":
    """Return one vector for each text, `[text, width]` in float32.

    By default it is the mean of the last hidden states, with norm 1. That is what most
    sentence encoders are trained for. Where a folder of sentence-transformers says
    otherwise (how states are pooled, where texts are cut, what is put before them),
    that is done. States of a causal model are not trained for it: they point nearly the
    same way, and a note on stderr says how nearly. `adjust="centre"` subtracts the mean
    of the texts, `"whiten"` also makes their covariance the identity; an
    `hs.Adjustment` that was fitted to other texts does it with theirs. Texts are
    strings, lists of ids, a path, a frame or a dataset.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> hs.embed(hs.load((tiny_model("bert"), None)), [[5, 6, 7], [8, 9]]).shape
    (2, 64)
    """
    from hiddenscope.analyses.embed.compute import embed_texts

    return embed_texts(model, texts, site, pool, normalize, adjust, truncate)
