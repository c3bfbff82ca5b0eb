"""Score every token while a model generates, against the bare generation.

`PYTHONPATH=src python -m labs.bench.monitor --device cuda` measures a GPU, with random
weights of smollm2's shape where smollm2 itself is not there.
"""

import argparse
from typing import Any

import numpy as np
import torch

import hiddenscope as hs
from labs.bench import measure
from labs.bench.measure import Row

PROMPT, NEW, BAR = 16, 32, 1.05
SITES = ("layer.10", "layer.15", "layer.20")
SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49_152,
}


def rows(repeats: int, device: str = "cpu", texts: int = 1) -> list[Row]:
    """Generate greedily, bare and with one probe and three; the tokens must be equal."""
    model, name = _model(device)
    module: Any = model.module
    drawn = torch.Generator().manual_seed(0)
    ids = torch.randint(100, 40_000, (texts, PROMPT), generator=drawn).to(model.device)
    probes = _probes(model.anatomy.width(hs.Site.parse(SITES[0])))
    written = []

    def generate() -> None:
        options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False}
        mask = torch.ones_like(ids)
        written.append(
            module.generate(ids, attention_mask=mask, pad_token_id=0, **options)
        )
        if device != "cpu":
            torch.cuda.synchronize()

    def monitored(count: int) -> None:
        some = dict(list(probes.items())[:count])
        with hs.recording(model, probes=some) as recorded:
            generate()
        assert len(recorded.scores[SITES[0]]) == texts * (PROMPT + NEW - 1)

    ways = {
        "bare": generate,
        "one": lambda: monitored(1),
        "three": lambda: monitored(3),
    }
    costs = measure.ratios(measure.interleaved(ways, repeats), "bare")
    assert all(torch.equal(part, written[0]) for part in written)
    what = f"{name}, {texts} x {PROMPT} tokens and {NEW} generated greedily"
    made = []
    for count in ("one", "three"):
        probes_named = f"{count} probe{'s' * (count != 'one')}"
        cost = costs[count]
        text = f"{what}: with scores of {probes_named} / bare generate"
        judged = "cpu" if device == "cpu" else "wall"
        made.append(Row("monitor", text, cost.cpu, cost.wall, BAR, judged=judged))
    return made


def _model(device: str) -> tuple[hs.Model, str]:
    if device == "cpu":
        return hs.load("smollm2", dtype="float32", device=device), "smollm2, float32"
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=2048)
    module = LlamaForCausalLM(config).to(device, torch.bfloat16).eval()
    return hs.load((module, None)), f"135M, bfloat16, {torch.cuda.get_device_name()}"


def _probes(width: int) -> dict[str, hs.Probe]:
    random = np.random.default_rng(0)
    probes = {}
    for site in SITES:
        states = random.normal(size=(50, width))
        probes[site] = hs.Probe(site=site).fit(states, random.integers(0, 2, 50))
    return probes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    for texts in (1, 8):
        for row in rows(arguments.repeats, arguments.device, texts):
            print(row.name, row.what, f"cpu {row.cpu:.3f} wall {row.wall:.3f}")
