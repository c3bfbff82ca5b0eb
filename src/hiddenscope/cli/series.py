"""One analysis along checkpoints, sizes or variants of a model."""

from collections.abc import Iterator
from typing import Any

import hiddenscope as hs
from hiddenscope.cli import endings
from hiddenscope.cli.analyses import show_result
from hiddenscope.cli.arguments import dataset
from hiddenscope.cli.command import COLUMNS, Arguments, command
from hiddenscope.cli.options import MODEL_HELP, Shared
from hiddenscope.errors import ArgumentError, LoadError, TextError
from hiddenscope.interface import Parameter
from hiddenscope.series.options import OPTIONS, check_options

PARAMETERS = (
    Parameter(
        "models",
        "words",
        f"The members, each: {MODEL_HELP[0].lower()}{MODEL_HELP[1:]}",
        required=True,
        positional=True,
        repeated=True,
    ),
    Parameter(
        "analysis",
        "choice",
        "What every member is asked.",
        default="profile",
        choices=tuple(OPTIONS),
    ),
    Parameter(
        "data",
        "data",
        "A file of texts (.txt .jsonl .csv .tsv .parquet) or a shipped dataset;"
        " labelled ones for probe and project.",
        spelling=("--texts",),
    ),
    *COLUMNS,
    Parameter(
        "against",
        "choice",
        "What compare and drift compare each member with.",
        default="first",
        choices=("first", "previous"),
    ),
    Parameter(
        "to",
        "path",
        "Keep the result of each member in this folder. A job that was stopped goes on"
        " there.",
    ),
    Parameter(
        "option",
        "words",
        "An option of the analysis, such as k=10 or sites=layer.*; may be repeated.",
        repeated=True,
    ),
    Parameter(
        "revision",
        "words",
        "A branch, tag or commit of the one model; repeated, each is a member.",
        repeated=True,
    ),
    Parameter(
        "scheme",
        "words",
        "More members: the one model with its weights quantised to int8, nf4 and so on;"
        " repeated, or a comma list.",
        spelling=("--quantise",),
        repeated=True,
    ),
    Parameter(
        "adapter",
        "path",
        "Another member: the one model with this adapter; see --strength.",
    ),
    Parameter(
        "strength",
        "words",
        "How strong the adapter is, 1 as trained; repeated or a comma list, each is a"
        " member.",
        repeated=True,
    ),
)
DETAILS = """
Loads one model at a time and prints the findings. Weights are hashed first: members
with the same ones are reported. Give several models; or one with --revision,
--quantise or --adapter, whose variants are the members. --out series.html keeps the
pictures, .csv the numbers.
"""


@command(
    "series",
    PARAMETERS,
    details=DETAILS,
    without=("model", "adapter", "quantise"),
)
def series(shared: Shared, arguments: Arguments) -> None:
    """Run one analysis on every member, and show them side by side."""
    options = dict(map(_option, arguments["option"] or ()))
    check_options(arguments["analysis"], options)
    # Read before hs.Member is, which imports torch.
    variants = list(_variants(arguments))
    name = arguments["data"]
    if name is None:
        raise TextError(
            "No texts",
            "none were given",
            "Give --texts with a file, or with a shipped dataset such as"
            " cities-incomplete.",
        )
    data = dataset(name, *(arguments[column.name] for column in COLUMNS))
    place: dict[str, Any] = {"dtype": shared.dtype, "device": shared.device}
    members = [hs.Member(**variant, **place) for variant in variants]
    to = arguments["to"]

    def how_to_resume() -> str:
        if to is None:
            return "nothing is kept; --to FOLDER keeps the members that are done."
        count = len(list(to.glob("*.member.json")))
        results = "1 result is" if count == 1 else f"{count} results are"
        return f"{results} kept in {to}; the same command again goes on."

    with endings.explaining_resume(how_to_resume):
        result = hs.series(
            members,
            arguments["analysis"],
            data,
            against=arguments["against"],
            options=options,
            to=to,
        )
    show_result(result, shared)


def _option(words: str) -> tuple[str, Any]:
    """Read an option of the analysis, such as k=10."""
    name, separator, text = words.partition("=")
    if not separator or not name:
        raise ArgumentError(
            f"Cannot read --option {words}", "it has no value", "Write NAME=VALUE."
        )
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return name, constants[text.lower()]
    for number in (int, float):
        try:
            return name, number(text)
        except ValueError:
            continue
    return name, text


def _variants(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yield the members: the models, or the variants of the one model."""
    models = arguments["models"]
    revisions = arguments["revision"] or []
    schemes = _listed(arguments["scheme"])
    adapter, strengths = arguments["adapter"], _listed(arguments["strength"])
    if strengths and adapter is None:
        raise LoadError(
            "Cannot use --strength", "there is no --adapter", "Give --adapter FOLDER."
        )
    if not (revisions or schemes or adapter):
        if len(models) < 2:
            raise ArgumentError(
                "Cannot make a series of one model",
                "there is nothing to compare it with",
                "Name another, or give --revision, --quantise or --adapter.",
            )
        for model in models:
            yield {"source": model}
        return
    if len(models) > 1:
        raise ArgumentError(
            "Cannot make a series of these",
            f"there are {len(models)} models, and --revision, --quantise and --adapter"
            " are of one",
            "Name one model, or leave these options out.",
        )
    (model,) = models
    for revision in revisions:
        yield {"source": model, "revision": revision}
    if not revisions:
        yield {"source": model}
    for scheme in schemes:
        yield {"source": hs.Quantised(model, scheme)}
    if adapter is not None:
        for word in strengths or ["1"]:
            try:
                strength = float(word)
            except ValueError:
                raise LoadError(
                    f"Cannot use --strength {word}",
                    "it is not a number",
                    "Give a number, 1 for the adapter as trained.",
                ) from None
            yield {"source": hs.Adapted(model, adapter, strength=strength)}


def _listed(words: list[str] | None) -> list[str]:
    """Return the words of an option that is repeated, or has a comma list.

    >>> _listed(["int8,fp8", "nf4"])
    ['int8', 'fp8', 'nf4']
    """
    listed = []
    for word in words or ():
        listed += [part.strip() for part in word.split(",")]
    return listed
