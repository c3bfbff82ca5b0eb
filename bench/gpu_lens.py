"""hs.lens on a GPU, against the loop that people write by hand: `PYTHONPATH=src python -m bench.gpu_lens`.

The loop runs the model with `output_hidden_states=True`, then takes every layer through the norm, the head, a softmax
and a top-k, and copies words and probabilities to the host. It computes neither entropy nor KL. `--profile` prints what
torch's profiler says of hs.lens, `--python` where Python's own time goes.
"""

import argparse
import cProfile
import json
import pstats
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hiddenscope as hs
from bench import measure

TOKENS, K, BAR = 64, 5, 1.2
SHAPES = {
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "vocab_size": 49_152, "tie_word_embeddings": True},
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": True},
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False},
}


def main() -> None:
    """Measure each shape, print a table, and the ratios as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shapes", nargs="*", default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--python", action="store_true")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, bfloat16, one text of {TOKENS} tokens, {K} best words; bar {BAR}")
    print(f"{'shape':>6} {'lens ms':>9} {'loop ms':>9} {'lens/loop':>10} {'pass ms':>9} {'capture ms':>11}")
    ratios = {}
    for shape in options.shapes:
        model, text, ids = _model(shape)
        ways = _ways(model, text, ids)
        _agree(ways)
        costs = measure.interleaved(ways, options.repeats, before=torch.cuda.synchronize)
        wall = {name: measure.median(cost).wall * 1e3 for name, cost in costs.items()}
        ratios[shape] = measure.ratios(costs, "loop")["lens"].wall
        numbers = f"{wall['lens']:9.2f} {wall['loop']:9.2f} {ratios[shape]:10.2f} {wall['pass']:9.2f}"
        print(f"{shape:>6} {numbers} {wall['capture']:11.2f}", flush=True)
        if options.profile:
            _profile(ways["lens"])
        if options.python:
            _python(ways["lens"])
        del model, ways
        torch.cuda.empty_cache()
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "lens / loop": ratios}))


def _model(shape: str) -> tuple[hs.Model, list[list[int]], torch.Tensor]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        module = LlamaForCausalLM(LlamaConfig(**SHAPES[shape], max_position_embeddings=2048)).eval()
        torch.set_default_dtype(default)
    ids = torch.randint(100, SHAPES[shape]["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return hs.load((module, None)), ids.tolist(), ids.cuda()


def _ways(model: hs.Model, text: list[list[int]], ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
    module: Any = model.module

    @torch.no_grad()
    def one_pass() -> Any:
        states = module.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        torch.cuda.synchronize()
        return states

    @torch.no_grad()
    def loop() -> Any:
        states = module.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states
        normed = [*(module.model.norm(state) for state in states[:-1]), states[-1]]  # the last one comes normed
        best = [module.lm_head(state).softmax(-1).topk(K) for state in normed]
        return torch.cat([one.values for one in best]).cpu(), torch.cat([one.indices for one in best]).cpu()

    def capture() -> Any:
        states = model.capture(text, "layer.*", keep="device")
        torch.cuda.synchronize()
        return states

    return {"loop": loop, "lens": lambda: hs.lens(model, text, k=K), "pass": one_pass, "capture": capture}


def _agree(ways: dict[str, Callable[[], Any]]) -> None:
    """Both give the same probabilities, as far as the loop's bfloat16 softmax goes."""
    probabilities = torch.from_numpy(ways["lens"]().data["probability"].to_numpy())
    torch.testing.assert_close(ways["loop"]()[0].float(), probabilities, rtol=0.05, atol=1e-3)


def _profile(way: Callable[[], Any]) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        way()
        torch.cuda.synchronize()
    print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=15, max_name_column_width=48))
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=15, max_name_column_width=48))


def _python(way: Callable[[], Any]) -> None:
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(5):
        way()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("cumulative").print_stats(45)


if __name__ == "__main__":
    main()
