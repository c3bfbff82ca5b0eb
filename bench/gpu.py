"""States from a GPU, against the bare forward pass there. It runs alone, too: `PYTHONPATH=src python -m bench.gpu`."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hiddenscope as hs
from bench import measure
from bench.measure import Row

TEXTS, TOKENS, BAR = 64, 256, 1.05
WHAT = f"Llama-1B shape, bfloat16, {TEXTS} texts x {TOKENS} tokens, every layer and final, in host memory"
NO_GPU = "no CUDA"
MANY = 4
KEPT = Path(__file__).parent / "gpu.json"  # what `python -m bench.gpu` printed where there was a GPU


def rows(repeats: int) -> list[Row]:
    """Ours and the usual way, each for one bare pass of the base model."""
    if torch.cuda.is_available():
        found = compare(repeats)
    elif KEPT.exists():
        found = json.loads(KEPT.read_text("utf-8"))
    else:
        return [Row("gpu", f"{WHAT}: capture / bare pass", bar=BAR, judged="wall", skipped=NO_GPU)]
    if not found["exact"]:
        raise AssertionError("states captured from the GPU differ from the ones copied after the pass")
    ours, usual, first, many = found["capture"], found["usual"], found["first"], found["many"]
    where = f"{found['gpu']}: {WHAT}"
    return [
        Row("gpu", f"{where}: capture / bare pass", ours["cpu"], ours["wall"], BAR, judged="wall"),
        Row("gpu", f"{MANY} times as many texts / {MANY} bare passes", many["cpu"], many["wall"]),
        Row("gpu", "the first capture, which page-locks its memory / bare pass", first["cpu"], first["wall"]),
        Row("gpu", "output_hidden_states=True and then .cpu() / bare pass", usual["cpu"], usual["wall"]),
    ]


@torch.no_grad()
def compare(repeats: int) -> dict[str, Any]:
    """The ratios, and whether what was captured equals what the usual way gives, bit for bit."""
    module = _llama()
    model = hs.load((module, None))
    ids = torch.randint(100, 32_000, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    texts, given = ids.tolist(), {"input_ids": ids.cuda(), "use_cache": False}
    ways = {
        "bare": lambda: _synchronised(lambda: module.model(**given).last_hidden_state),
        "capture": lambda: model.capture(texts),
        "many": lambda: model.capture(texts * MANY),
        "usual": lambda: _usual(module, given),
    }
    ways["bare"]()
    first = _timed(ways["capture"])
    exact = _equal(ways["capture"](), ways["usual"]())
    costs = measure.interleaved(ways, repeats, before=torch.cuda.synchronize)
    bare = measure.median(costs["bare"])
    ratios = {name: {"cpu": cost.cpu, "wall": cost.wall} for name, cost in measure.ratios(costs, "bare").items()}
    ratios["many"] = {kind: ratio / MANY for kind, ratio in ratios["many"].items()}
    memory = {"peak_gib": torch.cuda.max_memory_allocated() / 2**30}
    begun = {"cpu": first.cpu / bare.cpu, "wall": first.wall / bare.wall}
    return {**ratios, "first": begun, "exact": exact, "bare_seconds": bare.wall, **memory, "gpu": _name()}


def _llama() -> Any:
    """A model of the shape of Llama 1B, made where it runs, with random weights."""
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    config = LlamaConfig(**shape, num_key_value_heads=8, vocab_size=32_000, max_position_embeddings=2048)
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def _usual(module: Any, given: dict[str, Any]) -> list[torch.Tensor]:
    """What people write: ask for the hidden states, then copy each."""
    return [states.cpu() for states in module.model(**given, output_hidden_states=True).hidden_states]


def _synchronised(way: Any) -> Any:
    kept = way()
    torch.cuda.synchronize()
    return kept


def _timed(way: Any) -> measure.Cost:
    torch.cuda.synchronize()
    wall, cpu = time.perf_counter(), time.process_time()
    kept = way()
    cost = measure.Cost(time.process_time() - cpu, time.perf_counter() - wall)
    del kept
    return cost


def _equal(ours: Any, usual: list[torch.Tensor]) -> bool:
    """Whether every state is the same, bit for bit; the last of the usual ones is normed, and so is our `final`."""
    names = [f"layer.{k}" for k in range(len(usual) - 1)] + ["final"]
    return all(
        torch.equal(ours[name], states.reshape(-1, states.shape[-1])) for name, states in zip(names, usual, strict=True)
    )


def _name() -> str:
    return torch.cuda.get_device_name()


if __name__ == "__main__":
    if torch.cuda.is_available():
        print(json.dumps(compare(9), indent=1))
    else:
        print(f"skipped: {NO_GPU}")
