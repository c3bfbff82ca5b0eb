"""The value of a parameter that has fields, built from what was given for them."""

from collections.abc import Mapping
from importlib import import_module
from operator import attrgetter
from typing import Any

from hiddenscope.catalog import PUBLIC
from hiddenscope.interface import Parameter


def build_value(
    parameter: Parameter, model: object, values: Mapping[str, Any]
) -> object:
    """Call the constructor of a parameter with the fields that have a value."""
    fields = {}
    for field in parameter.fields:
        value = values.get(field.name)
        if value is None:
            continue
        if field.repeated and isinstance(value, str):
            value = [value]
        fields[field.name] = value
    public_name = parameter.constructor.partition(".")[0]
    module = import_module(f"hiddenscope.{PUBLIC[public_name]}")
    constructor = attrgetter(parameter.constructor)(module)
    first = (model,) if parameter.takes_model else ()
    return constructor(*first, **fields)
