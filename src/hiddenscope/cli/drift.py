"""Where a candidate diverges from its reference; exits with 1 when it does."""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

import hiddenscope as hs
from hiddenscope.cli.analyses import asks, show_result
from hiddenscope.cli.arguments import check_place, is_store
from hiddenscope.cli.command import Arguments
from hiddenscope.cli.options import Shared, as_variant
from hiddenscope.errors import LoadError
from hiddenscope.interface import Parameter
from hiddenscope.loading.variants import SCHEMES

OPTIONS = (
    Parameter(
        "attention", "word", "The reference's attention kernel alone: eager, sdpa."
    ),
    Parameter(
        "candidate_device",
        "word",
        "The candidate's device alone; --device sets both.",
    ),
    Parameter(
        "candidate_dtype", "word", "The candidate's dtype alone; --dtype sets both."
    ),
    Parameter("candidate_attention", "word", "The candidate's attention kernel alone."),
    Parameter(
        "candidate_quantise",
        "word",
        f"Quantise the candidate alone: {', '.join(SCHEMES)}.",
    ),
    Parameter(
        "candidate_adapter", "word", "The folder of a PEFT adapter on the candidate."
    ),
)
PLACES = ("device", "dtype", "attention")


@asks("drift", *OPTIONS)
def drift(shared: Shared, arguments: Arguments) -> None:
    """Compare a candidate with the reference, and exit with 1 when there is drift.

    So it does where quantisation explains the drift: a baseline accepts it.
    """
    candidate = arguments["candidate"]
    names = ("device", "dtype", "attention", "quantise", "adapter")
    options = {name: arguments[f"candidate_{name}"] for name in names}
    check_place(options["device"], options["dtype"])
    as_variant(candidate, None, options["quantise"])
    if _is_saved(shared.model) and _is_saved(candidate):
        for option in ("dtype", "device"):
            value = getattr(shared, option)
            if value:
                raise LoadError(
                    f"Cannot use --{option} {value} with saved states",
                    "both sides were computed already",
                    f"Leave --{option} out.",
                )
    # A bad file of another program is refused before the reference is loaded.
    if candidate.endswith(".safetensors") and os.path.isfile(candidate):
        # Imported only here, since it needs torch.
        saved = import_module("hiddenscope.analyses.drift.saved")
        saved.open_foreign(Path(candidate))
    reference_options = {
        "attention": arguments["attention"],
        "quantise": shared.quantise,
        "adapter": shared.adapter,
    }
    result = hs.drift(
        _side(shared, shared.model, reference_options),
        _side(shared, candidate, options, prefix="candidate-"),
        arguments["texts"] or None,
        sites=arguments["sites"],
        baseline=arguments["baseline"],
        low_memory=arguments["low_memory"],
    )
    show_result(result, shared)
    if result.facts["drifted"]:
        raise typer.Exit(1)


def _side(
    shared: Shared,
    name: str | None,
    options: Mapping[str, Any],
    prefix: str = "",
) -> Any:
    """Load a model, or return the path of saved states.

    Saved states cannot be computed in another way, so they take no options.
    """
    if not _is_saved(name):
        placed = {key: options[key] for key in PLACES if key in options}
        adapters = options["adapter"]
        if isinstance(adapters, str):
            adapters = [adapters]
        return shared.load_other(
            name, adapters=adapters, scheme=options["quantise"], **placed
        )
    for option, value in options.items():
        if value:
            spelled = f"--{prefix}{option}"
            remedy = f"Leave {spelled} out."
            if prefix and option in ("device", "dtype"):
                remedy = f"Leave {spelled} out; --{option} sets the model's alone then."
            raise LoadError(
                f"Cannot use {spelled} {value} with saved states",
                f"{name} holds states that were computed already",
                remedy,
            )
    return Path(str(name))


def _is_saved(name: str | None) -> bool:
    return name is not None and (name.endswith(".safetensors") or is_store(name))
