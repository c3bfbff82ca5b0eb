"""Where a candidate diverges from its reference; exits with 1 when it does."""

from pathlib import Path
from typing import Annotated, Any

import typer

import hiddenscope as hs
from hiddenscope.cli.arguments import TextRule, check_place
from hiddenscope.cli.command import TEXTS_HELP, Shared, SitesOption, command, show
from hiddenscope.cli.states import is_store
from hiddenscope.errors import LoadError

SIDE = "a zoo name, a Hugging Face id, a folder, a .gguf file, or states that `capture` or `extract` wrote"
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
    attention: Annotated[str | None, typer.Option(help="The reference's attention kernel: eager, sdpa.")] = None,
    candidate_device: Annotated[str | None, typer.Option(help="The candidate's device, if it differs.")] = None,
    candidate_dtype: Annotated[str | None, typer.Option(help="The candidate's dtype, if it differs.")] = None,
    candidate_attention: Annotated[str | None, typer.Option(help="The candidate's attention kernel.")] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="A file of accepted errors; it is written where there is none.")
    ] = None,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Run both in step, with two layers' states in memory.")
    ] = False,
) -> None:
    """Find where a candidate diverges from --model, whether that is more than rounding, and which module does it.

    Exits with 1 when there is drift, with 0 when there is none, with 2 on failure. --out drift.html keeps the pictures.
    """
    check_place(candidate_device, candidate_dtype)
    first = _side(shared, shared.model, attention=attention)
    options = {"device": candidate_device, "dtype": candidate_dtype, "attention": candidate_attention}
    second = _side(shared, candidate, **options)
    result = hs.drift(first, second, texts or None, sites=sites, baseline=baseline, low_memory=low_memory)
    show(result, shared)
    if result.facts["drifted"]:
        raise typer.Exit(1)


def _side(shared: Shared, name: str | None, **options: str | None) -> Any:
    """A model, or the path of saved states, or of a store, as it is: these are not computed again in another way."""
    if name is not None and (name.endswith(".safetensors") or is_store(name)):
        given = [key for key, value in options.items() if value]
        if given:
            reason = f"{name} holds states that were computed already"
            raise LoadError(f"Cannot choose the {given[0]} of saved states", reason, "Leave that option out.")
        return Path(name)
    return shared.load_other(name, **options)
