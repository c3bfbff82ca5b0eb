"""What the model answers and writes, changed along a direction."""

from hiddenscope.cli.arguments import dataset, texts_in
from hiddenscope.cli.asking import ask, asks, show_result
from hiddenscope.cli.command import COLUMNS, Arguments
from hiddenscope.cli.options import Shared
from hiddenscope.errors import TextError
from hiddenscope.interface import Parameter
from hiddenscope.texts import Labelled

# On all 40 shipped sentences the perplexity of every setting takes most of the time.
FEW = 10
OPTIONS = (
    Parameter("data", "word", "Labelled texts: a shipped name, or a file."),
    # Of the labels: --text is there already.
    COLUMNS[1],
    Parameter(
        "ablate",
        "flag",
        "Project the direction out instead of adding it.",
        default=False,
        spelling=("--ablate",),
    ),
    Parameter(
        "quality",
        "word",
        "Texts for the perplexity: a file, or plain for all 40 shipped sentences;"
        f" {FEW} of them if not given.",
    ),
)


@asks("steer", *OPTIONS)
def steer(shared: Shared, arguments: Arguments) -> None:
    """Steer along the difference of two sets of texts."""
    if arguments["ablate"]:
        if arguments["strengths"] is not None:
            raise TextError(
                "--strengths and --ablate were both given",
                "an ablation projects the direction out wholly",
                "Leave one of them out.",
            )
        arguments["strengths"] = "ablate"
    data, label = arguments.pop("data"), arguments.pop("label")
    if data is not None:
        data = dataset(data, arguments.pop("text_column"), label)
    elif label is not None:
        raise TextError(
            f"Cannot use --label {label}",
            "it is a column of --data, which is not given",
            "Give --data FILE, or leave --label out.",
        )
    for side in ("toward", "away"):
        arguments[side] = _texts(data, arguments[side])
    if arguments["quality"] is None:
        arguments["quality"] = list(dataset("plain").texts[:FEW])
    else:
        arguments["quality"] = list(dataset(arguments["quality"]).texts)
    show_result(ask("steer", shared, arguments), shared)


def _texts(data: Labelled | None, words: list[str]) -> list[str]:
    """Return one set of texts: those that were typed, or those with these labels."""
    if data is None:
        return texts_in(words)
    labels = [str(label) for label in data.labels or ()]
    for label in words:
        if label not in labels:
            reason = "it has no labels"
            if labels:
                reason = f"its labels are {', '.join(sorted(set(labels)))}"
            raise TextError(
                f"No label {label!r} in {data.name}", reason, "Give one of these."
            )
    pairs = zip(data.texts, labels, strict=True)
    return [text for text, label in pairs if label in words]
