"""Try torch on every device of this machine, and print each finding as a line of JSON.

`devices.py` runs this in another process. Each line is flushed before the next step,
because that step may end the process.
"""

import importlib
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator

from hiddenscope.diagnosis.check import Check, reported, short

SIDE = 64


def main() -> int:
    """Print all findings; return the exit code of the process."""
    steps: list[tuple[str, Callable[[], Iterator[Check]]]] = [
        ("cpu", examine_cpu),
        ("cuda", examine_cuda),
        ("mps", examine_mps),
        ("memory", examine_memory),
        ("transformers", examine_transformers),
    ]
    torch_check = examine_torch()
    _print_check(torch_check)
    if torch_check.status == "problem":
        return 0
    for name, step in steps:
        for check in reported("devices", name, step):
            _print_check(check)
    return 0


def examine_torch() -> Check:
    """Import torch."""
    start = time.perf_counter()
    try:
        import torch
    except Exception as error:
        message = f"It cannot be imported ({short(error)})."
        remedy = (
            "Run `pip install --force-reinstall torch`, with the build for this"
            " machine."
        )
        return Check("devices", "torch", "problem", message, remedy)
    seconds = time.perf_counter() - start
    version = str(torch.__version__)
    facts = {"version": version, "import_seconds": round(seconds, 2)}
    message = f"{version} is imported in {seconds:.1f} seconds."
    return Check("devices", "torch", "ok", message, facts=facts)


def examine_cpu() -> Iterator[Check]:
    """Multiply two matrices on the CPU."""
    import torch

    threads = torch.get_num_threads()
    cores = os.cpu_count() or 1
    facts = {"threads": threads, "cores": cores}
    if not product_is_right("cpu"):
        message = "A matrix product is wrong."
        remedy = "Install another build of torch: this one gives wrong numbers here."
        yield Check("devices", "cpu", "problem", message, remedy, facts)
        return
    message = f"A matrix product is right; torch uses {threads} of {cores} cores."
    yield Check("devices", "cpu", "ok", message, facts=facts)


def examine_cuda() -> Iterator[Check]:
    """Multiply two matrices on every GPU of CUDA."""
    import torch

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        yield _without_cuda(torch.version.cuda, [str(note.message) for note in caught])
        return
    for number in range(torch.cuda.device_count()):
        name = f"cuda:{number}"

        def examine(name: str = name, number: int = number) -> Iterator[Check]:
            title = torch.cuda.get_device_name(number)
            free, total = torch.cuda.mem_get_info(number)
            facts = {"name": title, "free_bytes": free, "total_bytes": total}
            memory = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
            yield _gpu_check(name, f"{title}, {memory}", facts)

        yield from reported("devices", name, examine)


def _without_cuda(built_for: str | None, complaints: list[str]) -> Check:
    """Say why there is no CUDA: no GPU, no driver that fits, or a build without it."""
    has_driver = shutil.which("nvidia-smi") is not None
    has_driver = has_driver or os.path.exists("/proc/driver/nvidia/version")
    if built_for is None and has_driver:
        message = "This machine has an NVIDIA driver, and this build of torch no CUDA."
        remedy = "Install the CUDA build of torch to use the GPU."
        return Check("devices", "cuda", "note", message, remedy)
    if complaints:
        message = f"torch cannot use it ({complaints[0][:200]})."
        remedy = "Update the driver, or install a build of torch that fits it."
        return Check("devices", "cuda", "note", message, remedy)
    return Check("devices", "cuda", "note", "There is none on this machine.")


def examine_mps() -> Iterator[Check]:
    """Multiply two matrices on the GPU of a Mac."""
    import torch

    if torch.backends.mps.is_available():
        yield _gpu_check("mps", "The GPU of this Mac", {})
    elif sys.platform == "darwin":
        message = "torch cannot use the GPU of this Mac."
        remedy = "Use a native Python and a recent macOS to have it."
        yield Check("devices", "mps", "note", message, remedy)


def _gpu_check(name: str, title: str, facts: dict[str, object]) -> Check:
    """Check a GPU by a matrix product."""
    remedy = "Use --device cpu, or install a build of torch for this GPU."
    try:
        is_right = product_is_right(name)
    except Exception as error:
        message = f"{title}: a matrix product fails ({short(error)})."
        return Check("devices", name, "problem", message, remedy, facts)
    if not is_right:
        message = f"{title}: a matrix product is wrong."
        return Check("devices", name, "problem", message, remedy, facts)
    return Check(
        "devices", name, "ok", f"{title}: a matrix product is right.", "", facts
    )


def product_is_right(device: str) -> bool:
    """Tell whether a matrix product in float32 equals the one in integers.

    The numbers are small enough for float32, and for TF32, to hold every sum exactly.
    """
    import torch

    left = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 7
    right = torch.arange(SIDE * SIDE).reshape(SIDE, SIDE) % 5
    product = left.float().to(device) @ right.float().to(device)
    return torch.equal(product.cpu().long(), left @ right)


def examine_memory() -> Iterator[Check]:
    """Say how much memory of the host is free, in a container too."""
    # It imports torch, which may be broken: hence not at the top.
    buffers = importlib.import_module("hiddenscope.passes.buffers")
    free = buffers.free_memory()
    message = f"{free / 2**30:.1f} GiB of this machine are free."
    yield Check("devices", "memory", "ok", message, facts={"free_bytes": free})


def examine_transformers() -> Iterator[Check]:
    """Import the part of transformers that loads models."""
    start = time.perf_counter()
    try:
        # Names that transformers imports only when they are asked for.
        from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    except Exception as error:
        message = f"It cannot be imported ({short(error)})."
        remedy = "Run `pip install --force-reinstall transformers tokenizers`."
        yield Check("devices", "transformers", "problem", message, remedy)
        return
    seconds = time.perf_counter() - start
    message = f"Its models and tokenizers are imported in {seconds:.1f} seconds."
    loaders = [AutoModelForCausalLM.__name__, PreTrainedTokenizerFast.__name__]
    facts = {"import_seconds": round(seconds, 2), "loaders": loaders}
    yield Check("devices", "transformers", "ok", message, facts=facts)


def _print_check(check: Check) -> None:
    print(json.dumps(check.as_json()), flush=True)


if __name__ == "__main__":
    sys.exit(main())
