"""Other libraries that capture and patch states, against bare passes of the same
weights, in their own environment.

`python -m bench --peers` makes the environment, `.venv-peers`, the first time. Both
libraries run the head, so their bare pass is that of the whole model. `ask` runs one of
the measurements of this file there.
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
WHAT = (
    f"smollm2, float32, {TEXTS} texts x {TOKENS} tokens, every layer / bare pass with"
    " the head"
)


def not_asked() -> list[Row]:
    """The rows of a run that leaves the peers out."""
    return [
        Row("peers", f"{name}: {WHAT}", skipped="asked for with PEERS=1")
        for name in PINNED
    ]


def rows(repeats: int) -> list[Row]:
    """One row a library, or the reason why it could not be measured."""
    found = ask("capture", repeats)
    if isinstance(found, str):
        return [Row("peers", f"{name}: {WHAT}", skipped=found) for name in PINNED]
    return [Row("peers", f"{PINNED[name]}: {WHAT}", *found[name]) for name in PINNED]


def ask(what: str, repeats: int, given: Any = None) -> Any:
    """What a measurement gives in the other environment, as JSON brings it; why it
    could not be made, as a string.
    """
    from hiddenscope.loading import (
        # This file is run in the other environment too, where there is none of ours.
        zoo,
    )

    why = _set_up()
    if why:
        return why
    command = [
        str(PLACE / "bin" / "python"),
        "-m",
        "bench.peers",
        what,
        str(zoo.zoo_folder("smollm2")),
        str(repeats),
    ]
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=offline,
        capture_output=True,
        text=True,
        check=False,
        input=json.dumps(given),
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return f"it stopped ({last[:120]})"
    return json.loads(done.stdout.splitlines()[-1])


def _set_up() -> str:
    """Make the environment if it is not there; why it could not be made, or nothing."""
    done = PLACE / ".installed"
    if done.exists():
        return ""
    pip = [
        str(PLACE / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        "-c",
        str(ROOT / "constraints.txt"),
    ]
    for command in (
        [sys.executable, "-m", "venv", str(PLACE)],
        [*pip, *PINNED.values()],
    ):
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            return (
                "not installed"
                f" ({(made.stderr.strip().splitlines() or ['pip said nothing'])[-1][:120]})"
            )
    done.touch()
    return ""


def _capture(folder: str, repeats: int, given: Any) -> dict[str, tuple[float, float]]:
    """In the other environment: the ratios of each library."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    bare, inner, bridged = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        for _ in range(3)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.randint(
        100,
        bare.config.vocab_size,
        (TEXTS, TOKENS),
        generator=torch.Generator().manual_seed(0),
    )
    ways = {
        "bare": lambda: bare(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
        ),
        "TransformerLens": _transformer_lens(folder, bridged, tokenizer, ids),
        "nnsight": _nnsight(inner, tokenizer, ids),
    }
    found = measure.ratios(measure.interleaved(ways, repeats), "bare")
    return {name: (found[name].cpu, found[name].wall) for name in PINNED}


def _transformer_lens(folder: str, module: Any, tokenizer: Any, ids: Any) -> Any:
    bridge = _bridge(folder, module, tokenizer)
    return lambda: bridge.run_with_cache(
        ids, names_filter=lambda name: name.endswith("hook_resid_post")
    )


def _bridge(folder: str, module: Any, tokenizer: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers(
        folder, hf_model=module, tokenizer=tokenizer, device="cpu"
    )


def _nnsight(module: Any, tokenizer: Any, ids: Any) -> Any:
    from nnsight import LanguageModel

    model = LanguageModel(module, tokenizer=tokenizer)

    def way() -> list[Any]:
        kept: list[Any] = []
        with model.trace(ids, use_cache=False):
            for layer in model.model.layers:
                # Nnsight reads this source and runs it later.
                kept.append(layer.output.save())
        return kept

    return way


def _patch(folder: str, repeats: int, given: Any) -> dict[str, Any]:
    """In the other environment: TransformerLens's patching against a plain loop, and
    what both libraries find.

    `given` are two texts as ids, two answers, and cells (layer, token), of which each
    is one pass.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    bare, inner, bridged = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        for _ in range(3)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    clean, corrupt = (torch.tensor([given[name]]) for name in ("clean", "corrupt"))
    lens = _lens_patching(_bridge(folder, bridged, tokenizer), clean, corrupt, given)
    ways = {
        "plain": lambda: [
            bare(input_ids=corrupt, use_cache=False) for _ in given["cells"]
        ],
        "lens": lens,
    }
    found = measure.ratios(measure.interleaved(ways, repeats), "plain")["lens"]
    traced = _nnsight_patching(inner, tokenizer, clean, corrupt, given)
    return {
        "ratio": (found.cpu, found.wall),
        "TransformerLens": lens(),
        "nnsight": traced,
    }


def _lens_patching(bridge: Any, clean: Any, corrupt: Any, given: Any) -> Any:
    """The logit difference of each cell by TransformerLens's own generic patching."""
    import pandas
    from transformer_lens import patching

    _, cache = bridge.run_with_cache(
        clean, names_filter=lambda name: name.endswith("hook_resid_post")
    )
    cells = pandas.DataFrame(
        [(layer - 1, token) for layer, token in given["cells"]],
        columns=["layer", "pos"],
    )

    def metric(logits: Any) -> Any:
        return logits[0, -1, given["answer"]] - logits[0, -1, given["other"]]

    def way() -> list[float]:
        found = patching.generic_activation_patch(
            bridge,
            corrupt,
            cache,
            metric,
            patching.layer_pos_patch_setter,
            "resid_post",
            index_df=cells,
        )
        differences: list[float] = found.tolist()
        return differences

    return way


def _nnsight_patching(
    module: Any, tokenizer: Any, clean: Any, corrupt: Any, given: Any
) -> list[float]:
    """The logit difference of a few cells by nnsight."""
    from nnsight import LanguageModel

    model, found = LanguageModel(module, tokenizer=tokenizer), []
    for layer, token in given["cells"][:: len(given["cells"]) // 3]:
        place = layer - 1
        with model.trace(clean, use_cache=False):
            state = model.model.layers[place].output.save()
        with model.trace(corrupt, use_cache=False):
            model.model.layers[place].output[:, token] = state[:, token]
            logits = model.lm_head.output.save()
        found.append(
            float(logits[0, -1, given["answer"]] - logits[0, -1, given["other"]])
        )
    return found


def _lens(folder: str, repeats: int, given: Any) -> dict[str, Any]:
    """In the other environment: the probabilities of the best words, and the entropy,
    after every block and token.

    `given` is a text as ids; each library goes through its own norm and unembedding.
    """
    import torch
    from transformer_lens.tools.analysis.logit_lens import logit_readout
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_grad_enabled(False)
    inner, bridged = (
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        for _ in range(2)
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids, k = torch.tensor([given["ids"]]), given["k"]
    bridge = _bridge(folder, bridged, tokenizer)
    _, cache = bridge.run_with_cache(
        ids, names_filter=lambda name: name.endswith("hook_resid_post")
    )
    stream = torch.stack(
        [
            cache[f"blocks.{block}.hook_resid_post"][0]
            for block in range(given["blocks"])
        ]
    )
    read = logit_readout(bridge, stream, top_k=k, return_type="probs")
    shares = (
        torch.stack([one[0] for one in _nnsight_lens(inner, tokenizer, ids)])
        .double()
        .softmax(-1)
    )
    entropy = torch.special.entr(shares).sum(-1)
    return {
        "TransformerLens": {
            "probability": read.values.tolist(),
            "entropy": read.entropy.tolist(),
        },
        "nnsight": {
            "probability": shares.topk(k).values.tolist(),
            "entropy": entropy.tolist(),
        },
    }


def _nnsight_lens(module: Any, tokenizer: Any, ids: Any) -> list[Any]:
    from nnsight import LanguageModel

    model = LanguageModel(module, tokenizer=tokenizer)
    kept: list[Any] = []
    with model.trace(ids, use_cache=False):
        for layer in model.model.layers:
            kept.append(model.lm_head(model.model.norm(layer.output)).save())
    return kept


MEASURED = {"capture": _capture, "lens": _lens, "patch": _patch}

if __name__ == "__main__":
    print(
        json.dumps(
            MEASURED[sys.argv[1]](sys.argv[2], int(sys.argv[3]), json.load(sys.stdin))
        )
    )
