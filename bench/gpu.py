"""What a GPU is asked: capture against the bare pass, the lens against a plain loop, a
patch sweep against one pass.

It runs alone: `PYTHONPATH=src python -m bench.gpu` measures, prints, and writes the
JSON that `make bench` shows.
"""

import json
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hiddenscope as hs
from bench import extract, measure
from bench.measure import Row

TEXTS, TOKENS, LENS_TOKENS, PATCH_TOKENS = 64, 256, 64, 12
KEPT = Path(__file__).parent / "gpu.json"
NO_GPU = "no CUDA"
CAPTURE_BARS = {"135M": 1.2, "1B": 1.05}
LENS_BAR, PATCH_BAR, EXTRACT_BAR = 1.2, 25, 0.9
SHAPES: dict[str, dict[str, int]] = {
    "135M": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49_152,
    },
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128_256,
    },
}


def rows(repeats: int) -> list[Row]:
    """The rows of a GPU that is here, or those that were kept from one."""
    if torch.cuda.is_available():
        found = compare(repeats)
    elif KEPT.exists():  # what was measured elsewhere, by `python -m bench.gpu`
        found = json.loads(KEPT.read_text("utf-8"))
    else:
        return [Row("gpu", "capture, lens and patch on a GPU", skipped=NO_GPU)]
    made = []
    for shape, ratios in found["shapes"].items():
        where = f"{found['gpu']}: Llama-{shape} shape, bfloat16"
        batch = f"{where}, {TEXTS} texts x {TOKENS} tokens, every layer and final"
        device, host = (ratios[f"capture_{place}"] for place in ("device", "host"))
        bar = CAPTURE_BARS.get(shape)
        made += [
            Row(
                "gpu",
                f"{batch}, kept on the GPU: capture / bare pass",
                *_both(device),
                bar,
                judged="wall",
            ),
            Row("gpu", f"{batch}, in host memory: capture / bare pass", *_both(host)),
            Row(
                "gpu",
                f"{batch}: output_hidden_states=True, then .cpu() / bare pass",
                *_both(ratios["usual"]),
            ),
        ]
        what = (
            f"{where}, one text of {LENS_TOKENS} tokens: hs.lens / norm, head, softmax"
            " and top-k a layer"
        )
        made.append(Row("gpu", what, *_both(ratios["lens"]), LENS_BAR, judged="wall"))
        what = f"{where}, {PATCH_TOKENS} tokens, every layer: hs.patch / one bare pass"
        bar = PATCH_BAR if shape == "8B" else None
        made.append(Row("gpu", what, *_both(ratios["patch"]), bar, judged="wall"))
    return [*made, *_extracted(found)]


def _extracted(found: dict[str, Any]) -> list[Row]:
    """The rows of a corpus job, where it was measured."""
    if "extract" not in found:
        return []
    job = found["extract"]
    slow, fast = sorted(job["raw_bytes_per_second"])
    where = f"{found['gpu']}: Llama-1B shape, bfloat16"
    everything = (
        "every layer and final to the local disk at"
        f" {job['bytes_per_second'] / 1e9:.2f} GB/s"
    )
    everything += f" (the disk alone takes {slow / 1e9:.2f} to {fast / 1e9:.2f})"
    # Of all layers the disk is the limit, and not the job.
    shares = {
        everything: (job, None),
        "final alone to the local disk": (job["final_alone"], EXTRACT_BAR),
    }
    return [
        Row(
            "gpu",
            f"{where}, {measured['tokens']:,} tokens, {what}: throughput of extract /"
            " of bare passes",
            None,
            measured["share_of_bare_pass"],
            bar,
            at_least=True,
            judged="wall",
        )
        for what, (measured, bar) in shares.items()
    ]


def _both(ratio: dict[str, float]) -> tuple[float, float]:
    return ratio["cpu"], ratio["wall"]


def compare(repeats: int, shapes: tuple[str, ...] = tuple(SHAPES)) -> dict[str, Any]:
    """The ratios of every shape."""
    found = {}
    for shape in shapes:
        found[shape] = _shape(shape, repeats)
        torch.cuda.empty_cache()
    found_here = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shapes": found,
    }
    if find_spec("crc32c") is None:  # a store cannot be written without it
        return found_here
    return found_here | {"extract": extract.on_gpu(llama("1B"), 3)}


@torch.no_grad()
def _shape(shape: str, repeats: int) -> dict[str, Any]:
    module = llama(shape)
    model = hs.load((module, None))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 32_000, (TEXTS, TOKENS), generator=generator)
    texts, given = (
        model.encode(ids.tolist()),
        {"input_ids": ids.cuda(), "use_cache": False},
    )
    captures: dict[str, Callable[[], Any]] = {
        "bare": lambda: _synchronised(lambda: module.model(**given).last_hidden_state),
        "capture_device": lambda: _synchronised(
            lambda: model.capture(texts, keep="device")
        ),
        "capture_host": lambda: model.capture(texts),
        "usual": lambda: [
            states.cpu()
            for states in module.model(**given, output_hidden_states=True).hidden_states
        ],
    }
    _same(captures["capture_device"](), captures["usual"]())
    ratios = _ratios(captures, "bare", repeats)
    text = ids[:1, :LENS_TOKENS]
    encoded = model.encode(text.tolist())
    lenses: dict[str, Callable[[], Any]] = {
        "plain": lambda: _synchronised(lambda: plain_lens(module, text.cuda())),
        "lens": lambda: hs.lens(model, encoded),
    }
    ratios |= _ratios(lenses, "plain", repeats)
    contrast = hs.Contrast(
        ids[0, :PATCH_TOKENS].tolist(), ids[1, :PATCH_TOKENS].tolist(), 11, 12
    )
    one = {"input_ids": ids[:1, :PATCH_TOKENS].cuda(), "use_cache": False}
    patches: dict[str, Callable[[], Any]] = {
        "one": lambda: _synchronised(lambda: module(**one).logits),
        "patch": lambda: hs.patch(model, contrast, layers=0),
    }
    ratios |= _ratios(patches, "one", max(3, repeats // 2))
    ratios["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return ratios


def plain_lens(module: Any, ids: torch.Tensor, k: int = 5) -> Any:
    """What people write: the states of one pass, then norm, head, softmax and top-k for
    each layer.
    """
    states = module.model(
        input_ids=ids, use_cache=False, output_hidden_states=True
    ).hidden_states
    found = []
    for number, state in enumerate(states):
        normed = state if number == len(states) - 1 else module.model.norm(state)
        found.append(module.lm_head(normed).float().softmax(-1).topk(k))
    return [(best.values.cpu(), best.indices.cpu()) for best in found]


def _ratios(
    ways: dict[str, Callable[[], Any]], against: str, repeats: int
) -> dict[str, Any]:
    for way in ways.values():
        way()
        way()
    costs = measure.interleaved(ways, repeats, before=torch.cuda.synchronize)
    seconds = measure.median(costs[against]).wall
    ratios = measure.ratios(costs, against)
    return {
        name: {"cpu": cost.cpu, "wall": cost.wall} for name, cost in ratios.items()
    } | {f"{against}_s": seconds}


def llama(shape: str) -> Any:
    """A model of the shape of Llama, made where it runs, with random weights."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048)
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def _synchronised(way: Callable[[], Any]) -> Any:
    kept = way()
    torch.cuda.synchronize()
    return kept


def _same(ours: Any, usual: list[torch.Tensor]) -> None:
    """Every state must be the same bit for bit; the last of the usual ones is normed,
    and so is our `final`.
    """
    names = [f"layer.{k}" for k in range(len(usual) - 1)] + ["final"]
    for name, states in zip(names, usual, strict=True):
        if not torch.equal(ours[name].cpu(), states.reshape(-1, states.shape[-1])):
            raise AssertionError(
                f"{name} captured on the GPU differs from what the model gives back"
            )


def main() -> None:
    """Measure the shapes that are named, all of them if none is."""
    if not torch.cuda.is_available():
        print(f"skipped: {NO_GPU}")
        return
    shapes = tuple(sys.argv[1:]) or tuple(SHAPES)
    print(json.dumps(compare(9, shapes), indent=1))


if __name__ == "__main__":
    main()
