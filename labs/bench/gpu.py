"""Measure a GPU: every task against plain Hugging Face there.

It runs alone. `PYTHONPATH=src python -m labs.bench.gpu --to gpu.json` measures, prints the
rows, and writes those that `make bench` shows. A part that fails or would begin too
late is a row that says so, and the others are kept.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hiddenscope as hs
from hiddenscope.testing import tiny_tokenizer
from labs.bench import extract, measure, plain, ragged
from labs.bench.measure import Cost, Row

TEXTS, TOKENS, LENS_TOKENS, PATCH_TOKENS, MAP_TOKENS = 64, 256, 64, 12, 8
PATTERN_TOKENS = 64
EMBEDDED, ROUNDS, LIMIT_S = 512, 9, 200
SAVED = Path(__file__).parent / "gpu.json"
NO_GPU = "no CUDA"
# One token of the tiny tokenizer.
WORD = " the"
CAPTURE_BARS = {"135M": 1.2, "1B": 1.05}
LENS_BAR, PATCH_BAR, EXTRACT_BAR, EDGES_BAR = 1.2, 25, 0.9, 60
HEADS_BAR, Z_BAR, PATTERN_BAR = 25, 1.1, 1.2
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
    # Small enough for a CPU, where `--device cpu` shows that the parts run.
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 40_000,
    },
}
PARTS = {
    "tiny": ("capture", "lens", "patch", "edges", "heads", "visibility", "embed"),
    "135M": ("capture", "lens", "patch", "edges", "heads", "visibility", "embed"),
    "1B": ("capture", "lens", "patch", "edges", "heads", "embed", "extract"),
    "8B": ("capture", "lens", "patch", "edges", "heads"),
}


@dataclass(frozen=True)
class Subject:
    """A model of one shape, where it is measured, and its name in the rows."""

    shape: str
    module: Any
    where: str

    @property
    def device(self) -> Any:
        """Return the device of the weights."""
        return self.module.device

    def ids(self, texts: int, tokens: int) -> Tensor:
        """Draw a batch without padding, the same each time."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(100, 32_000, (texts, tokens), generator=generator)
        return drawn.to(self.device)


def rows() -> list[Row]:
    """Return the rows that were measured on a GPU and saved."""
    if not SAVED.exists():
        return [Row("gpu", "capture, lens and patch on a GPU", skipped=NO_GPU)]
    saved = json.loads(SAVED.read_text("utf-8"))
    return [Row.from_json(row) for row in saved["rows"]]


def measured(shapes: list[str], device: str, rounds: int) -> Iterator[Row]:
    """Measure every part of every shape and yield its rows as they are known."""
    begin = time.perf_counter()
    for shape in shapes:
        subject = _subject(shape, device)
        for part in PARTS[shape]:
            if time.perf_counter() - begin > LIMIT_S:
                yield Row("gpu", f"{subject.where}: {part}", skipped="no time was left")
                continue
            yield from _rows_of(part, subject, rounds)
        del subject
        _release()


def _rows_of(part: str, subject: Subject, rounds: int) -> list[Row]:
    """Measure one part; a failure is a row, so that it costs no other part."""
    begin = time.perf_counter()
    try:
        with torch.no_grad():
            made = MEASURES[part](subject, rounds)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        made = [Row("gpu", f"{subject.where}: {part}", skipped=reason)]
    print(f"{subject.shape} {part}: {time.perf_counter() - begin:.1f} s", flush=True)
    return made


def _capture(subject: Subject, rounds: int) -> list[Row]:
    """Capture every layer against the bare pass and against Hugging Face's own way."""
    base = plain.base_model(subject.module)
    model = hs.load((subject.module, None))
    ids = subject.ids(TEXTS, TOKENS)
    texts = model.encode(ids.tolist())

    def usual() -> list[Tensor]:
        return [state.cpu() for state in plain.hidden_states(subject.module, ids)]

    ways: dict[str, Callable[[], Any]] = {
        "bare": lambda: base(input_ids=ids, use_cache=False)[0],
        "device": lambda: model.capture(texts, keep="device"),
        "host": lambda: model.capture(texts),
        "usual": usual,
        "usual on the GPU": lambda: plain.hidden_states(subject.module, ids),
    }
    _same(ways["device"](), usual())
    costs = _interleaved(ways, rounds)
    cost = measure.ratios(costs, "bare")
    seconds = measure.median(costs["bare"]).wall
    what = f"{subject.where}, {TEXTS} texts x {TOKENS} tokens, every layer and final"
    bare = f"bare pass ({seconds * 1000:.1f} ms)"
    bar = CAPTURE_BARS.get(subject.shape)
    on_device = f"{what}, left on the GPU"
    return [
        _row(f"{on_device}: capture / {bare}", cost["device"], bar),
        _row(
            f"{on_device}: output_hidden_states=True / bare pass",
            cost["usual on the GPU"],
        ),
        _row(f"{what}, in host memory: capture / bare pass", cost["host"]),
        _row(
            f"{what}, in host memory: output_hidden_states=True and .cpu() / bare pass",
            cost["usual"],
        ),
    ]


def _lens(subject: Subject, rounds: int) -> list[Row]:
    """Read every layer against the loop of norm, head, softmax and top-k."""
    model = hs.load((subject.module, None))
    ids = subject.ids(1, LENS_TOKENS)
    texts = model.encode(ids.tolist())
    sites = f"layer.1-{subject.module.config.num_hidden_layers}"
    ways = {
        "plain": lambda: plain.lens(subject.module, ids, 5),
        "ours": lambda: hs.lens(model, texts, k=5, sites=sites),
    }
    cost = measure.ratios(_interleaved(ways, rounds), "plain")["ours"]
    what = f"{subject.where}, one text of {LENS_TOKENS} tokens"
    against = "norm, head, softmax and top-k of each layer"
    return [_row(f"{what}: hs.lens / {against}", cost, LENS_BAR)]


def _patch(subject: Subject, rounds: int) -> list[Row]:
    """Sweep every layer and token against one pass and against a loop of passes."""
    model = hs.load((subject.module, None))
    clean, corrupt = subject.ids(2, PATCH_TOKENS).split(1)
    contrast = hs.Contrast(clean[0].tolist(), corrupt[0].tolist(), 11, 12)
    depth = subject.module.config.num_hidden_layers
    # One cell of each layer is timed, and counts for all tokens of its layer.
    cells = [(layer, 5 * layer % PATCH_TOKENS) for layer in range(1, depth + 1)]
    ways = {
        "bare": lambda: subject.module(input_ids=corrupt, use_cache=False).logits,
        "ours": lambda: hs.patch(model, contrast, layers=0),
        "loop": lambda: plain.patch(subject.module, clean, corrupt, cells),
    }
    costs = _interleaved(ways, max(3, rounds // 3))
    to_pass = measure.ratios(costs, "bare")["ours"]
    to_ours = _times(measure.ratios(costs, "ours")["loop"], PATCH_TOKENS)
    bar = PATCH_BAR if subject.shape == "8B" else None
    what = f"{subject.where}, {PATCH_TOKENS} tokens, every layer"
    return [
        _row(f"{what}: hs.patch / one bare pass", to_pass, bar),
        _row(f"{what}: a loop of one pass for each cell / hs.patch", to_ours),
    ]


def _edges(subject: Subject, rounds: int) -> list[Row]:
    """Tell all edges against one bare forward and backward pass."""
    model = hs.load((subject.module, None))
    clean, corrupt = subject.ids(2, PATCH_TOKENS).split(1)
    contrast = hs.Contrast(clean[0].tolist(), corrupt[0].tolist(), 11, 12)

    def bare() -> None:
        with torch.enable_grad():
            logits = subject.module(input_ids=corrupt, use_cache=False).logits[0, -1]
            (logits[11] - logits[12]).backward()
        subject.module.zero_grad(set_to_none=True)

    ways = {"bare": bare, "ours": lambda: hs.edges(model, contrast)}
    cost = measure.ratios(_interleaved(ways, max(3, rounds // 3)), "bare")["ours"]
    bar = EDGES_BAR if subject.shape == "8B" else None
    what = f"{subject.where}, {PATCH_TOKENS} tokens, all edges"
    return [_row(f"{what}: hs.edges / one bare forward and backward pass", cost, bar)]


def _heads(subject: Subject, rounds: int) -> list[Row]:
    """Sweep every head against one pass, and capture every head's output."""
    model = hs.load((subject.module, None))
    clean, corrupt = subject.ids(2, PATCH_TOKENS).split(1)
    contrast = hs.Contrast(clean[0].tolist(), corrupt[0].tolist(), 11, 12)
    config = subject.module.config
    passes = {
        "bare": lambda: subject.module(input_ids=corrupt, use_cache=False).logits,
        "ours": lambda: hs.patch(model, contrast, sites="*.attn.head.*"),
    }
    sweep = measure.ratios(_interleaved(passes, max(3, rounds // 3)), "bare")["ours"]
    heads = f"{config.num_hidden_layers} x {config.num_attention_heads} heads"
    what = f"{subject.where}, {PATCH_TOKENS} tokens, {heads}"
    bar = HEADS_BAR if subject.shape == "8B" else None
    ids = subject.ids(TEXTS, TOKENS)
    texts = model.encode(ids.tolist())
    base = subject.module.model
    captures = {
        "bare": lambda: base(input_ids=ids, use_cache=False),
        "ours": lambda: model.capture(texts, "*.attn.z", keep="device"),
    }
    capture = measure.ratios(_interleaved(captures, rounds), "bare")["ours"]
    of_z = f"{subject.where}, {TEXTS} texts x {TOKENS} tokens, every z, left on the GPU"
    z_bar = Z_BAR if subject.shape == "1B" else None
    return [
        _row(f"{what}: hs.patch of every head / one bare pass", sweep, bar),
        _row(f"{of_z}: capture / bare pass", capture, z_bar),
        *_patterns(subject, model, rounds),
    ]


def _patterns(subject: Subject, model: hs.Model, rounds: int) -> list[Row]:
    """Compute every pattern against the pass that reports them."""
    eager: Any = deepcopy(subject.module)
    eager.set_attn_implementation("eager")
    ids = subject.ids(1, PATTERN_TOKENS)
    texts = model.encode(ids.tolist())
    ways = {
        "eager": lambda: eager(input_ids=ids, use_cache=False, output_attentions=True),
        "ours": lambda: hs.attention(model, texts, draws=0),
    }
    cost = measure.ratios(_interleaved(ways, rounds), "eager")["ours"]
    what = f"{subject.where}, one text of {PATTERN_TOKENS} tokens, every pattern"
    against = "eager pass with output_attentions=True"
    return [_row(f"{what}: hs.attention / {against}", cost, PATTERN_BAR)]


def _visibility(subject: Subject, rounds: int) -> list[Row]:
    """Map what every state sees against one backward pass for each target."""
    # Gradients of random weights in bfloat16 are too coarse to be compared.
    module = _llama(subject.shape, str(subject.device), torch.float32)
    model = hs.load((module, None))
    ids = subject.ids(1, MAP_TOKENS)
    depth = module.config.num_hidden_layers
    sites = f"layer.0-{depth - 1},final"
    texts = ids.tolist()
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: hs.visibility(model, texts, sites=sites),
        "loop": lambda: plain.visibility(module, ids),
    }
    ours = torch.from_numpy(ways["ours"]().data["l1"].to_numpy())
    difference = _difference(ours, ways["loop"]())
    cost = measure.ratios(_interleaved(ways, 2), "ours")["loop"]
    targets = MAP_TOKENS * (depth + 1)
    where = subject.where.replace("bfloat16", "float32")
    what = f"{where}, {MAP_TOKENS} tokens: {targets} backward passes, one a target"
    return [_row(f"{what} / hs.visibility ({difference})", cost)]


def _embed(subject: Subject, rounds: int) -> list[Row]:
    """Embed texts of many lengths against padded batches in their order."""
    tokenizer = tiny_tokenizer()
    model = hs.load((subject.module, tokenizer))
    texts = [WORD * length for length in ragged.lengths(EMBEDDED)]
    ways: dict[str, Callable[[], Any]] = {
        "ours": lambda: hs.embed(model, texts, site="final", pool="mean"),
        "plain": lambda: plain.embed(subject.module, tokenizer, texts),
    }
    difference = _difference(torch.from_numpy(ways["ours"]()), ways["plain"]())
    cost = measure.ratios(_interleaved(ways, rounds), "ours")["plain"]
    what = f"{subject.where}, {EMBEDDED} texts of 8 to 256 tokens: texts a second of"
    against = f"hs.embed / of batches of {plain.BATCH} in their order ({difference})"
    return [_row(f"{what} {against}", cost)]


def _extract(subject: Subject, rounds: int) -> list[Row]:
    """Write a corpus to the disk against the bare passes of its batches."""
    if find_spec("crc32c") is None:
        reason = "a store needs the package crc32c"
        return [Row("gpu", f"{subject.where}: extract", skipped=reason)]
    job = extract.on_gpu(subject.module, 3)
    slow, fast = sorted(job["raw_bytes_per_second"])
    speed = job["bytes_per_second"]
    everything = (
        f"every layer and final to the local disk at {speed / 1e9:.2f} GB/s"
        f" (the disk alone takes {slow / 1e9:.2f} to {fast / 1e9:.2f})"
    )
    # The disk limits the first job, so only the second has a bar.
    return [
        _share(subject, job, everything, None),
        _share(
            subject, job["final_alone"], "final alone to the local disk", EXTRACT_BAR
        ),
    ]


def _share(subject: Subject, job: Any, what: str, bar: float | None) -> Row:
    what = f"{subject.where}, {job['tokens']:,} tokens, {what}"
    what = f"{what}: throughput of extract / of bare passes"
    share = job["share_of_bare_pass"]
    return Row("gpu", what, None, share, bar, at_least=True, judged="wall")


MEASURES: dict[str, Callable[[Subject, int], list[Row]]] = {
    "capture": _capture,
    "lens": _lens,
    "patch": _patch,
    "edges": _edges,
    "heads": _heads,
    "visibility": _visibility,
    "embed": _embed,
    "extract": _extract,
}


def _row(what: str, cost: Cost, bar: float | None = None) -> Row:
    return Row("gpu", what, cost.cpu, cost.wall, bar, judged="wall")


def _times(cost: Cost, factor: float) -> Cost:
    return Cost(cost.cpu * factor, cost.wall * factor)


def _interleaved(
    ways: Mapping[str, Callable[[], Any]], rounds: int
) -> dict[str, list[Cost]]:
    """Run ways in turn, each until the GPU has finished."""
    finished = {name: _finished(way) for name, way in ways.items()}
    for way in finished.values():
        way()
    return measure.interleaved(finished, rounds, before=_synchronize)


def _finished(way: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        value = way()
        _synchronize()
        return value

    return run


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _release() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _difference(ours: Tensor, theirs: Tensor) -> str:
    """Say how far apart two answers are, relative to the largest number."""
    ours, theirs = ours.double(), theirs.double()
    largest = float((ours - theirs).abs().max() / theirs.abs().max())
    return f"largest difference {largest:.0e}"


def _same(ours: Any, usual: list[Tensor]) -> None:
    """Check that every state is the same bit for bit.

    The last of Hugging Face's states is normed, and so is our `final`.
    """
    names = [f"layer.{number}" for number in range(len(usual) - 1)]
    for name, states in zip([*names, "final"], usual, strict=True):
        if not torch.equal(ours[name].cpu(), states.reshape(-1, states.shape[-1])):
            raise AssertionError(f"{name} differs from what the model returns")


def _subject(shape: str, device: str) -> Subject:
    if device != "cuda":
        where = f"CPU: Llama-{shape} shape, float32"
        return Subject(shape, _llama(shape, device, torch.float32), where)
    where = f"{torch.cuda.get_device_name()}: Llama-{shape} shape, bfloat16"
    return Subject(shape, _llama(shape, device, torch.bfloat16), where)


def _llama(shape: str, device: str, dtype: torch.dtype) -> Any:
    """Build a model of Llama's shape with random weights, where it runs."""
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=2048)
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(usual)


def main() -> None:
    """Measure the named shapes, print their rows and write them."""
    options = _options()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"skipped: {NO_GPU}")
        return
    record: dict[str, Any] = {"torch": torch.__version__, "rows": []}
    for row in measured(options.shapes, options.device, options.rounds):
        record["rows"].append(row.to_json())
        # Written after every row: a run that is stopped leaves what it measured.
        options.to.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{row.what}: {row.cpu} {row.wall} {row.verdict}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m labs.bench.gpu", description="Measure hiddenscope on a GPU."
    )
    parser.add_argument("shapes", nargs="*", default=["135M", "1B", "8B"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--to", type=Path, default=SAVED, help="the file to write")
    return parser.parse_args()


if __name__ == "__main__":
    main()
