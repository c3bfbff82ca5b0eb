"""Where a candidate diverges from its reference; exits with 1 when it does."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import TextRule, check_place
from hiddenscope.cli.command import TEXTS_HELP, Shared, SitesOption, command, show
from hiddenscope.cli.states import is_store
from hiddenscope.errors import LoadError

SIDE = (
    "a zoo name, a Hugging Face id, a folder, a .gguf file, or states that `capture` or"
    " `extract` wrote"
)
TextsArgument = Annotated[
    list[str] | None,
    typer.Argument(help=f"{TEXTS_HELP} Saved states come with theirs."),
    TextRule(required=False),
]


@command
def drift(
    shared: Shared,
    candidate: Annotated[str, typer.Argument(help=f"What is tested: {SIDE}.")],
    texts: TextsArgument = None,
    sites: SitesOption = "layer.*,final",
    attention: Annotated[
        str | None,
        typer.Option(help="The reference's attention kernel alone: eager, sdpa."),
    ] = None,
    candidate_device: Annotated[
        str | None,
        typer.Option(help="The candidate's device alone; --device sets both."),
    ] = None,
    candidate_dtype: Annotated[
        str | None, typer.Option(help="The candidate's dtype alone; --dtype sets both.")
    ] = None,
    candidate_attention: Annotated[
        str | None, typer.Option(help="The candidate's attention kernel alone.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="A file of accepted errors; it is written where there is none."
        ),
    ] = None,
    low_memory: Annotated[
        bool,
        typer.Option(
            "--low-memory", help="Run both in step, with two layers' states in memory."
        ),
    ] = False,
) -> None:
    """Find where a candidate diverges from --model, whether that is more than rounding,
    and which module does it.

    --dtype and --device set both sides, --candidate-dtype and --candidate-device the candidate alone.

    Exits with 1 when there is drift, with 0 when there is none, with 2 on failure.
    --out drift.html keeps the pictures.
    """
    check_place(candidate_device, candidate_dtype)
    _check_saved(shared, candidate)
    first = _side(shared, shared.model, {"--attention": attention})
    options = {
        "--device": candidate_device,
        "--dtype": candidate_dtype,
        "--attention": candidate_attention,
    }
    second = _side(shared, candidate, options, prefix="candidate-")
    result = hs.drift(
        first,
        second,
        texts or None,
        sites=sites,
        baseline=baseline,
        low_memory=low_memory,
    )
    show(result, shared)
    if result.facts["drifted"]:
        raise typer.Exit(1)


def _check_saved(shared: Shared, candidate: str) -> None:
    """Refuse a dtype or a device where both sides were computed already."""
    if not (_is_saved(shared.model) and _is_saved(candidate)):
        return
    for option, value in {"--dtype": shared.dtype, "--device": shared.device}.items():
        if value:
            problem = f"Cannot use {option} {value} with saved states"
            raise LoadError(
                problem, "both sides were computed already", f"Leave {option} out."
            )


def _side(
    shared: Shared,
    name: str | None,
    options: Mapping[str, str | None],
    prefix: str = "",
) -> Any:
    """Load a model, or return the path of saved states or of a store: these are not
    computed again in another way.
    """
    if not _is_saved(name):
        return shared.load_other(
            name,
            **{option.removeprefix("--"): value for option, value in options.items()},
        )
    for option, value in options.items():
        if value:
            given = option.replace("--", f"--{prefix}")
            reason = f"{name} holds states that were computed already"
            remedy = f"Leave {given} out."
            if prefix and option != "--attention":
                remedy = f"Leave {given} out; {option} sets the model's alone then."
            raise LoadError(
                f"Cannot use {given} {value} with saved states", reason, remedy
            )
    return Path(str(name))


def _is_saved(name: str | None) -> bool:
    return name is not None and (name.endswith(".safetensors") or is_store(name))
