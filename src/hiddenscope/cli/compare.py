"""Two texts, or one text in two models; the second side may be computed otherwise."""

import hiddenscope as hs
from hiddenscope.cli.arguments import check_place
from hiddenscope.cli.asking import asks, show_result
from hiddenscope.cli.command import Arguments
from hiddenscope.cli.options import Shared
from hiddenscope.errors import TextError
from hiddenscope.interface import Parameter

OPTIONS = (
    Parameter(
        "other_dtype", "word", "The other side's dtype alone; --dtype sets both."
    ),
    Parameter(
        "other_device", "word", "The other side's device alone; --device sets both."
    ),
    Parameter(
        "other_target",
        "word",
        "The decoder's text of the second side, if it differs.",
        spelling=("--other-target", "--other-targets"),
    ),
)


@asks("compare", *OPTIONS)
def compare(shared: Shared, arguments: Arguments) -> None:
    """Compare two texts in one model, or one text in two models."""
    text, other_text = arguments["a"], arguments["b"]
    device, dtype = arguments["other_device"], arguments["other_dtype"]
    check_place(device, dtype)
    other = arguments["other"]
    if other is None and (dtype or device):
        # The same model on both sides.
        other = shared.model or ""
    _check_sides(other_text, other)
    options = {name: arguments[name] for name in ("sites", "targets", "truncate")}
    other_target = arguments["other_target"]
    model = shared.load()
    if other is None:
        if other_target is not None:
            other_text = model.encode(
                other_text, targets=other_target, truncate=arguments["truncate"]
            )
        show_result(hs.compare(model, text, other_text, **options), shared)
        return
    is_same = (other or None) == shared.model and not (device or dtype)
    if is_same and shared.adapter:
        # The same weights serve both sides.
        other_model = model.without_adapters()
    else:
        other_model = shared.load_other(other or None, device=device, dtype=dtype)
    if other_target is None:
        show_result(hs.compare(model, text, other=other_model, **options), shared)
        return
    # `hs.compare` gives both models the same targets, so each is captured by itself.
    states = model.capture(text, **options)
    other_states = other_model.capture(text, **options | {"targets": other_target})
    show_result(hs.compare(states, other_states), shared)


def _check_sides(other_text: str | None, other: str | None) -> None:
    if (other_text is None) != (other is None):
        return
    reason = "a second text and another model"
    if other_text is None:
        reason = "there is no second text and no other model"
    raise TextError("Cannot compare", reason, "Give a second text, or --other.")
