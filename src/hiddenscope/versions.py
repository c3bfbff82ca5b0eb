"""Versions of libraries, for what results and files say of their making."""

from importlib.metadata import PackageNotFoundError, version


def installed_version(library: str) -> str:
    """Return the version of a library; one that runs from its sources has none.

    >>> installed_version("no-such-library")
    'not installed'
    """
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
