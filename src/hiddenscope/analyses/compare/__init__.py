"""Where, and by how much, do the states of two texts or of two models differ?

sides       both sides of every text: from one model, from two, or as they were given
alignment   which tokens stand in one column
cells       what is measured there
likeness    every pair of sites, by linear CKA
findings    what it shows
"""

from typing import TYPE_CHECKING, Any

from hiddenscope import progress
from hiddenscope.analyses.compare.cells import Piece, data_of, measured, pieces_of, put_along, stacks_of, texts_of
from hiddenscope.analyses.compare.findings import counts, findings
from hiddenscope.analyses.compare.likeness import Sample, put_cka
from hiddenscope.analyses.compare.sides import Asked, Both, sides_of
from hiddenscope.errors import StatesError
from hiddenscope.model import Model
from hiddenscope.passes import Columns, Texts
from hiddenscope.results import Result
from hiddenscope.states import Pair, Readable

if TYPE_CHECKING:
    import xarray


def compare(
    model: Model | Readable | Pair,
    a: Texts | Readable | Pair,
    b: Texts | None = None,
    *,
    other: Model | None = None,
    sites: Any = "layer.*,final",
    targets: Texts | None = None,
    other_targets: Texts | None = None,
    truncate: bool = False,
) -> Result:
    """Two texts, or one text in two models, token by token and layer by layer.

    `a` and `b` are two texts or two lists of as many; with `other` it is `a` in both models. States need no model:
    `compare(states, others)`. Tokens that only one side has are gaps, NaN. Two models are also compared by linear CKA
    for every pair of sites, and by that alone where their widths differ. `targets` are the texts of a decoder, and
    `other_targets` those of the second side where they are not the same.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> result = hs.compare(hs.load((tiny_model("gpt2"), None)), [[5, 6, 7]], [[5, 6, 8]])
    >>> result.data["l2"].sel(site="layer.0").values[:2].tolist(), result.facts["difference"]["first at"]["position"]
    ([0.0, 0.0], [2, 2])
    """
    both = sides_of(model, Asked(a, b, other, sites, targets, other_targets, truncate))
    pieces, sample = _compared(both, sites, two_models=other is not None, spans=b is None)
    stacks = [[one for one in pieces if one.stack == stack] for stack in dict.fromkeys(one.stack for one in pieces)]
    alone = pieces[0].measures is None
    data = _no_data(pieces[0]) if alone else data_of(stacks)
    data.attrs |= texts_of(stacks)
    facts: dict[str, Any] = {"run": both.run, **_floor(both), "texts": both.count, "tokens": counts(pieces)}
    facts["computed in"] = "float64"
    if not alone:
        put_along(data)
        for some in stacks:
            facts["difference" if len(stacks) == 1 else str(some[0].stack)] = findings(data, some)
    if len(stacks) == 1 and (alone or other is not None or not pieces[0].alike):
        facts |= put_cka(data, pieces[0], sample, needed=alone)
    return Result("compare", data, facts, _source(pieces[0]))


def _compared(both: Both, sites: Any, *, two_models: bool, spans: bool) -> tuple[list[Piece], Sample]:
    """Every text, and a sample of its states where they are wanted for pairs of sites too."""
    pieces, sample = [], Sample()
    with progress.track("Comparing", total=both.count) as advance:
        for number, pair in enumerate(both.sides):
            for piece, sides in pieces_of(number, pair, sites, spans=spans):
                pieces.append(piece)
                if piece.stack is None and spans and (two_models or not piece.alike or piece.measures is None):
                    sample.add(piece, sides)
            advance(1)
    if not pieces:
        raise StatesError("A comparison", "there are no texts", "Give one on each side, at least.")
    return pieces, sample


def _floor(both: Both) -> dict[str, Any]:
    """What rounding alone makes of one text: it is run alone, and again in two copies, or if that fails alone again."""
    if both.floor is None:
        return {}
    alone, again, how = both.floor()
    worst = 0.0
    for one, two in zip(stacks_of(alone), stacks_of(again), strict=True):
        same: Columns = [(row, row) for row in range(len(one.tokens))]
        worst = max(worst, float(measured(one, two.of(0), one.sites, same)["relative"].max()))
    return {"rounding floor": {"relative": worst, "between": how}}


def _source(piece: Piece) -> dict[str, Any]:
    first, second = (source.to_json() for source in piece.source)
    return first if first == second else first | {"other": second}


def _no_data(piece: Piece) -> "xarray.Dataset":
    """What states of two widths can be told cell by cell: nothing."""
    import xarray

    return xarray.Dataset(coords={"site": [str(site) for site in piece.every[0]]})
