"""The lens on the command line, and the fitting of lenses."""

from typing import Any

import hiddenscope as hs
from hiddenscope import errors
from hiddenscope.cli.asking import ask, asks, show_result
from hiddenscope.cli.command import Arguments
from hiddenscope.cli.options import RESULTS, Shared
from hiddenscope.cli.terminal import echo, print_json, visible
from hiddenscope.interface import Parameter

FIT = Parameter(
    "fit",
    "choice",
    "Fit a lens on the texts, which --out keeps.",
    choices=("tuned", "jacobian"),
)


@asks("lens", FIT, writes=(*RESULTS, ".safetensors"))
def lens(shared: Shared, arguments: Arguments) -> None:
    """Ask the lens, or fit one."""
    kind = arguments["fit"]
    if kind is None:
        show_result(ask("lens", shared, arguments), shared)
    else:
        _fit(shared, arguments["texts"], kind)


def _fit(shared: Shared, texts: list[str], kind: Any) -> None:
    """Fit a lens and save it.

    The fit of a Jacobian lens takes long: when it is interrupted, the same command
    continues it from a file beside --out.
    """
    if shared.out is None:
        raise errors.FileError(
            f"Cannot keep the {kind} lens",
            "no path was given",
            "Add --out lens.safetensors.",
        )
    partial = None
    if kind == "jacobian":
        partial = shared.out.with_suffix(".partial.safetensors")
    fitted = hs.Lens.fit(shared.load(), texts, kind, partial=partial)
    fitted.save(shared.out)
    shared.report_written()
    if partial is not None:
        partial.unlink(missing_ok=True)
    if shared.json:
        print_json(fitted.facts)
    else:
        echo(visible(f"{fitted!r}, kept in {shared.out}"))
