"""Where do two runs of a model diverge, is it rounding or a fault, and which module?

compute      the choice of how two sides are compared
live_model   a side that can be run: its states, its dtypes, and how it is called
pairing      a side of other make, a module or function of token ids, and its states
saved        a side of saved states, and what their layers are
compare      the two comparisons: part by part on equal input, or whole passes
observe      one pass: its states, their rounding, and the calls of modules
errors       errors by site and token, and the test that decides
systematic   the same for faults below the rounding of any single token
search       from the first site that differs to the module at fault
ports        the same in a port, whose modules have other names and layouts
hints        what a fault looks like, by hypotheses about a suspect
cause        what explains a difference: dtypes, weights, quantisation or code
result       errors and findings as a result, and accepted errors in a file
story        the report of what was found, and what is said and shown
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from hiddenscope.files import PathLike
from hiddenscope.interface import SITES, TEXTS, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        Candidate,
        Inputs,
        Reference,
        Result,
        SitePatterns,
        Texts,
    )

# Saved states come with texts of their own: then None is given.
OWN_TEXTS = replace(
    TEXTS,
    help=f"{TEXTS.help} Saved states come with theirs.",
    required=False,
    explicit=True,
)


@analysis(
    details="--dtype and --device set both sides, --candidate-dtype and"
    " --candidate-device the candidate alone. --candidate-quantise int8 asks what"
    " quantisation costs, layer by layer.\n\nExits with 1 when there is drift,"
    " also where quantisation or an adapter explains it (--baseline accepts it), with 0"
    " when there is none, with 2 on failure. --out drift.html keeps the pictures.",
    promise="You will see where the states of the two models part, whether that is"
    " more than rounding, and which module is at fault.",
)
def drift(
    reference: "Reference",
    candidate: Annotated[
        "Candidate",
        ask(
            "What is tested: a zoo name, a Hugging Face id, a folder, a .gguf file, or"
            " states that `capture` or `extract` wrote.",
            kind="model",
        ),
    ],
    texts: Annotated["Texts | Inputs | None", OWN_TEXTS],
    *,
    sites: Annotated["SitePatterns", SITES] = "layer.*,final",
    pairing: Annotated[
        Mapping[str, str] | str | None,
        ask(in_form=False, python_only="A pairing of modules has many parts."),
    ] = None,
    baseline: Annotated[
        PathLike | None,
        ask(
            "A file of accepted errors; it is written where there is none.",
            kind="path",
            in_form=False,
        ),
    ] = None,
    low_memory: Annotated[
        bool,
        ask(
            "Run both in step, with two layers' states in memory.",
            spelling=("--low-memory",),
            aside=True,
        ),
    ] = False,
) -> "Result":
    """Find where a candidate diverges from its reference beyond rounding, and why.

    Either side is a model, anything `hs.load` takes, or states that were saved
    elsewhere. The candidate may also be any module or function of token ids, whose
    tensors `pairing` pairs with sites. Two live models are compared part by part, each
    on the reference's own input. `baseline` names a file of accepted errors, which is
    written if it does not exist. With `low_memory` both models run in step, and only
    two layers' states are held. `sites` are those that the result shows; all of them
    are compared.

    >>> import copy
    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> module = tiny_model("llama")
    >>> port = copy.deepcopy(module)
    >>> _ = port.model.layers[1].mlp.up_proj.weight.data.mul_(1.01)
    >>> facts = hs.drift((module, None), port, [[5, 6, 7], [8, 9]]).facts
    >>> facts["drifted"], facts["first_site"], facts["module"]
    (True, 'layer.2', 'model.layers.1.mlp.up_proj')
    """
    from hiddenscope.analyses.drift.compute import compare_sides

    return compare_sides(
        reference,
        candidate,
        texts,
        sites=sites,
        pairing=pairing,
        baseline=baseline,
        low_memory=low_memory,
    )
