"""Names of a package that are imported when they are first used."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def lazy_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return a `__getattr__` for a package, which imports the module of a name.

    `modules` has the module of every name, without the package before it.

    >>> find = lazy_names("hiddenscope.states", {"Pooling": "pooling"})
    >>> find("States")
    Traceback (most recent call last):
    ...
    AttributeError: module 'hiddenscope.states' has no attribute 'States'
    """

    def find(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{modules[name]}"), name)
        # From now on Python finds the name without calling this.
        setattr(sys.modules[package], name, value)
        return value

    return find
