"""Python, the package itself, what it requires, and what it can do without.

What is required is read from the metadata of the installed package, which the build
wrote from `pyproject.toml`.
"""

import platform
import webbrowser
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hiddenscope.diagnosis.check import Check, short

PROJECT = "hiddenscope"
INSTALL = "Run `pip install hiddenscope` again, from the same place as before."
# For work on the package itself.
NOT_FOR_USERS = {"check", "dev", "docs", "test"}


def is_installed() -> bool:
    """Say whether pip knows the package; a folder on the path is not enough."""
    return _is_installed(PROJECT)


def examine_folder(running: str) -> Iterator[Check]:
    """Say that the package runs from a folder, so that nothing can be compared."""
    folder = str(Path(__file__).parents[1])
    facts = {"version": running, "folder": folder}
    message = (
        f"{running} runs from {folder} and is not installed. What it requires is"
        " therefore not known."
    )
    remedy = "Run `pip install .` in the checkout."
    yield Check("environment", PROJECT, "note", message, remedy, facts)


def examine_python() -> Iterator[Check]:
    """Compare the version of Python with what the package asks for."""
    version = platform.python_version()
    machine = f"{platform.system()} {platform.machine()}"
    facts = {"version": version, "platform": platform.platform()}
    wanted = metadata.metadata(PROJECT)["Requires-Python"] or ""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        message = f"{version} on {machine}."
        yield Check("environment", "python", "ok", message, facts=facts)
        return
    message = f"{version} is not {wanted}, which hiddenscope needs."
    remedy = "Make an environment with a newer Python."
    yield Check("environment", "python", "problem", message, remedy, facts)


def examine_installation(running: str) -> Iterator[Check]:
    """Compare the version that runs with the one that is installed."""
    folder = str(Path(__file__).parents[1])
    facts = {"version": running, "folder": folder}
    installed = metadata.version(PROJECT)
    if installed == running:
        message = f"{running} in {folder}."
        yield Check("environment", PROJECT, "ok", message, facts=facts)
        return
    message = f"{running} runs from {folder}, but {installed} is what pip installed."
    yield Check("environment", PROJECT, "problem", message, INSTALL, facts)


def examine_packages() -> Iterator[Check]:
    """Compare every required package with the version that is asked for."""
    versions = {}
    for requirement in requirements():
        problem = compare_package(requirement)
        if problem is not None:
            yield Check("environment", requirement.name, "problem", *problem)
            continue
        versions[requirement.name] = metadata.version(requirement.name)
    named = [f"{name} {version}" for name, version in versions.items()]
    message = f"{len(named)} are as they must be: {', '.join(named)}."
    yield Check("environment", "packages", "ok", message, facts=versions)


def examine_extras() -> Iterator[Check]:
    """Say which extras are installed, and how to install the others."""
    extras = metadata.metadata(PROJECT).get_all("Provides-Extra") or []
    for extra in sorted(set(extras) - NOT_FOR_USERS):
        yield _examine_extra(extra)


def _examine_extra(extra: str) -> Check:
    remedy = f"Run `pip install 'hiddenscope[{extra}]'`."
    required = requirements(extra)
    missing = [part.name for part in required if not _is_installed(part.name)]
    if missing:
        message = f"Not installed ({', '.join(missing)})."
        return Check("extras", extra, "note", message, remedy)
    for requirement in required:
        problem = compare_package(requirement)
        if problem is not None:
            return Check("extras", extra, "problem", *problem)
    versions = {part.name: metadata.version(part.name) for part in required}
    named = [f"{name} {version}" for name, version in versions.items()]
    return Check("extras", extra, "ok", f"{', '.join(named)}.", facts=versions)


def examine_browser() -> Iterator[Check]:
    """Look for a browser that `hiddenscope serve` can open."""
    try:
        browser = webbrowser.get()
    except webbrowser.Error:
        message = "None can be opened from here, so `serve` cannot show its page."
        remedy = "Open the link that `hiddenscope serve` prints."
        yield Check("extras", "browser", "note", message, remedy)
        return
    name = getattr(browser, "name", type(browser).__name__)
    yield Check("extras", "browser", "ok", f"`serve` opens its page with {name}.")


def requirements(extra: str = "") -> list[Requirement]:
    """Return what the package requires, or what one of its extras adds to that."""
    wanted = []
    for line in metadata.requires(PROJECT) or []:
        requirement = Requirement(line)
        marker = requirement.marker
        for_extra = marker is not None and "extra" in str(marker)
        if for_extra != bool(extra):
            continue
        if marker is None or marker.evaluate({"extra": extra}):
            wanted.append(requirement)
    return wanted


def compare_package(requirement: Requirement) -> tuple[str, str] | None:
    """Return the problem with an installed package and its remedy, if there is one."""
    remedy = f"Run `pip install '{requirement.name}{requirement.specifier}'`."
    try:
        version = metadata.version(requirement.name)
        is_right = requirement.specifier.contains(version, prereleases=True)
    except metadata.PackageNotFoundError:
        return "It is not installed.", remedy
    except Exception as error:
        # Metadata of other projects can be damaged in any way.
        return f"Its version cannot be read ({short(error)}).", remedy
    if is_right:
        return None
    return f"{version} is not {requirement.specifier}.", remedy


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    except Exception:
        # It is there, and damaged: `compare_package` says how.
        return True
    return True
