"""Other libraries that capture states, each against the bare pass of the same weights, in an environment of their own.

`python -m bench --peers` makes the environment, `.venv-peers`, the first time. Both libraries run the head, so their
bare pass is that of the whole model.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench import measure
from bench.measure import Row

PINNED = {"TransformerLens": "transformer-lens==4.3.0", "nnsight": "nnsight==0.8.1"}
ROOT = Path(__file__).parent.parent
PLACE = ROOT / ".venv-peers"
TEXTS, TOKENS = 8, 64
WHAT = f"smollm2, float32, {TEXTS} texts x {TOKENS} tokens, every layer / bare pass with the head"


def not_asked() -> list[Row]:
    """The rows of a run that leaves the peers out."""
    return [Row("peers", f"{name}: {WHAT}", skipped="asked for with PEERS=1") for name in PINNED]


def rows(repeats: int) -> list[Row]:
    """One row a library, or the reason why it could not be measured."""
    from hiddenscope.loading import zoo  # this file is run in the other environment too, where there is none of ours

    why = _set_up()
    if why:
        return [Row("peers", f"{name}: {WHAT}", skipped=why) for name in PINNED]
    command = [str(PLACE / "bin" / "python"), "-m", "bench.peers", str(zoo.zoo_folder("smollm2")), str(repeats)]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=offline, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [Row("peers", f"{name}: {WHAT}", skipped=f"it stopped ({last[:120]})") for name in PINNED]
    found = json.loads(done.stdout.splitlines()[-1])
    return [Row("peers", f"{PINNED[name]}: {WHAT}", *found[name]) for name in PINNED]


def _set_up() -> str:
    """Make the environment if it is not there; why it could not be made, or nothing."""
    done = PLACE / ".installed"
    if done.exists():
        return ""
    pip = [str(PLACE / "bin" / "python"), "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt")]
    for command in ([sys.executable, "-m", "venv", str(PLACE)], [*pip, *PINNED.values()]):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            return f"not installed ({(made.stderr.strip().splitlines() or ['pip said nothing'])[-1][:120]})"
    done.touch()
    return ""


def _measure(folder: str, repeats: int) -> dict[str, tuple[float, float]]:
    """In the other environment: the ratios of each library."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    bare, inner, bridged = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
        for _ in range(3)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.randint(100, bare.config.vocab_size, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(0))
    ways = {
        "bare": lambda: bare(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False),
        "TransformerLens": _transformer_lens(folder, bridged, tokenizer, ids),
        "nnsight": _nnsight(inner, tokenizer, ids),
    }
    found = measure.ratios(measure.interleaved(ways, repeats), "bare")
    return {name: (found[name].cpu, found[name].wall) for name in PINNED}


def _transformer_lens(folder: str, module: Any, tokenizer: Any, ids: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(folder, hf_model=module, tokenizer=tokenizer, device="cpu")
    return lambda: bridge.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_resid_post"))


def _nnsight(module: Any, tokenizer: Any, ids: Any) -> Any:
    from nnsight import LanguageModel

    model = LanguageModel(module, tokenizer=tokenizer)

    def way() -> list[Any]:
        kept: list[Any] = []
        with model.trace(ids, use_cache=False):
            for layer in model.model.layers:
                kept.append(layer.output.save())  # nnsight reads this source and runs it later
        return kept

    return way


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]))))
