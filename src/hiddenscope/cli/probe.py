"""What a linear probe reads from every layer: also labels that tokens bring along."""

from typing import Any

import hiddenscope as hs
from hiddenscope.cli.arguments import check_group, dataset
from hiddenscope.cli.asking import argument_values, asks, show_result, source_of
from hiddenscope.cli.command import EACH_TOKEN, Arguments
from hiddenscope.cli.options import Shared
from hiddenscope.errors import TextError

# Labels that every token has, whatever the text.
READY = ("position", "word-start", "previous-token")
CHANGES: dict[str, dict[str, Any]] = {
    "data": {"required": False, "default": "cities-incomplete"},
    "label": {"help": "The column of the labels, or a ready label of tokens."},
}


@asks("probe", EACH_TOKEN, changes=CHANGES)
def probe(shared: Shared, arguments: Arguments) -> None:
    """Probe labels of texts, or ready labels of tokens."""
    data = arguments.pop("data")
    text, label, group = (arguments[name] for name in ("text", "label", "group"))
    check_group(label, group)
    of_states = arguments["states"] is not None
    if group is not None and (data in READY or (of_states and label in READY)):
        raise TextError(
            f"Cannot use --group {group}",
            "groups are a column of a file, and this label needs none",
            "Give a file with --label, or leave --group out.",
        )
    labels: Any
    if data in READY:
        labels = label if of_states and label in READY else data
    elif label in READY:
        labels = label if of_states else (dataset(data, text, group=group), label)
    else:
        labels = dataset(data, text, label, group)
    source = source_of(shared, arguments)
    values = argument_values("probe", shared, arguments, source)
    if arguments["each_token"]:
        source = hs.each_token(source)
    show_result(hs.probe(source, labels, **values), shared)
