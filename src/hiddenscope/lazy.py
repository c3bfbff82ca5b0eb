"""Names of a package that are imported when they are first used."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module


def lazy_names(
    package: str, names: Sequence[str], *modules: str
) -> Callable[[str], object]:
    """Return a `__getattr__` for a package, which imports the module of a name.

    The first of `modules` that has the name is taken; none after it is imported, so
    those that need more stand last.

    >>> find = lazy_names("hiddenscope.states", ["Pooling"], "pooling", "values")
    >>> find("States")
    Traceback (most recent call last):
    ...
    AttributeError: module 'hiddenscope.states' has no attribute 'States'
    """

    def find(name: str) -> object:
        for module_name in modules if name in names else ():
            module = import_module(f"{package}.{module_name}")
            if hasattr(module, name):
                # From now on Python finds the name without calling this.
                setattr(sys.modules[package], name, getattr(module, name))
                return getattr(module, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return find
