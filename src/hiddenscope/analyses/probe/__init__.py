"""What can a linear probe read from the states of each layer?

labels        what is predicted: given or ready-made labels, and control labels
design        the folds, and the other targets that the same probes are trained on
monitor       probes that pool the scores of tokens, and tests on other texts
significance  the scores under permuted labels, and the interval of a score
compute       the probes of every site and of their mix, and the report
story         what is said and shown
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from hiddenscope.interface import PROBE_POOL, SITES, analysis, ask

if TYPE_CHECKING:
    from hiddenscope.annotations import (
        EachToken,
        ModelLike,
        Pair,
        Pooling,
        Readable,
        Result,
        SitePatterns,
    )


@analysis(
    states=True,
    details="Prints the findings. --out probe.html keeps the pictures, probe.nc the"
    " probes. With --states, DATA has the labels of the texts that the states were"
    " made of.",
    action="Probe the labels",
    promise="You will see, layer by layer, how well a linear probe reads the label"
    " from the states, and what chance would give.",
)
def probe(
    source: "ModelLike | Readable | Pair | EachToken",
    data: Annotated[
        Any,
        ask(
            "A shipped dataset, a file, - for stdin; or position, word-start,"
            " previous-token with --each-token.",
            kind="data",
            label="Dataset",
            form_help="",
        ),
    ],
    *,
    task: Annotated[
        Literal["classify", "regress"], ask("Classes, or numbers.")
    ] = "classify",
    test: Annotated[
        Any,
        ask(
            "Other labelled texts that the probes are tested on.",
            kind="data",
            label="Test on",
            of_model=True,
        ),
    ] = None,
    pool: Annotated["Pooling | None", PROBE_POOL] = None,
    sites: Annotated["SitePatterns", SITES] = "layer.*,final",
    seed: Annotated[
        int,
        ask("The seed of the folds and of the control labels.", least=0, aside=True),
    ] = 0,
) -> "Result":
    """Train a linear probe of every layer, and compare it with a control and chance.

    With a model, `data` is a dataset: a shipped name, a path, a frame, a Hugging Face
    dataset, `(texts, labels)`, or what `hs.read` gave (texts longer than the model's
    window: `(model.encode(texts, truncate=True), labels)`); with states, it is a list
    of labels, or a dataset of the same texts. Texts are taken as independent unless the
    data have groups (`hs.read(..., group=)`). `pool` is what stands for a text: if not
    given, the last token in a decoder, and in an encoder the mean or what the model was
    trained for; "rolling", "softmax" and "attention" pool the scores of tokens, and are
    learnt with the probe. `test` is another dataset (with states, `(states, labels)`):
    texts of another kind, on which the probes are tested too. With
    `hs.each_token(source)` there is a label for each token; "position", "word-start"
    and "previous-token" are ready. Probes are tested on folds that they did not see,
    standardised and regularised without them; `hs.Probe.of(result, site)` is fitted to
    all rows.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> texts = [[k, k + 1, 5 + k % 2] for k in range(10, 30)]
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> result = hs.probe(model, (texts, [k % 2 for k in range(20)]))
    >>> result.facts["best"]["accuracy"], hs.Probe.of(result, "layer.0").coef_.shape
    (1.0, (1, 64))
    """
    from hiddenscope.analyses.probe.compute import train_probes

    return train_probes(source, data, test, task, pool, sites, int(seed))
