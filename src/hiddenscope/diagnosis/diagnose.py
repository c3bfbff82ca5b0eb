"""All checks, in the order in which they are told: quick ones first."""

from collections.abc import Callable, Iterator
from functools import partial

from hiddenscope.diagnosis.caches import (
    examine_cache_folder,
    examine_cache_size,
    examine_download,
    examine_zoo,
)
from hiddenscope.diagnosis.check import Check, reported
from hiddenscope.diagnosis.devices import examine_devices
from hiddenscope.diagnosis.environment import (
    examine_browser,
    examine_extras,
    examine_folder,
    examine_installation,
    examine_packages,
    examine_python,
    is_installed,
)

Examination = tuple[str, str, Callable[[], Iterator[Check]]]
"""The group, the name and the function of some checks."""


def diagnose(version: str) -> Iterator[Check]:
    """Yield every check as soon as it is done; `version` is the one that runs."""
    for group, name, examine in [*_packages(version), *_machine()]:
        yield from reported(group, name, examine)


def _packages(version: str) -> list[Examination]:
    if not is_installed():
        return [("environment", "hiddenscope", partial(examine_folder, version))]
    return [
        ("environment", "python", examine_python),
        ("environment", "hiddenscope", partial(examine_installation, version)),
        ("environment", "packages", examine_packages),
        ("extras", "extras", examine_extras),
    ]


def _machine() -> list[Examination]:
    return [
        ("extras", "browser", examine_browser),
        ("cache", "folder", examine_cache_folder),
        ("cache", "size", examine_cache_size),
        ("cache", "models", examine_zoo),
        ("cache", "download", examine_download),
        # Last, because torch takes seconds to import.
        ("devices", "torch", examine_devices),
    ]
