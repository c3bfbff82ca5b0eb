"""Patch known models with TransformerLens, in an environment of its own.

A line of standard input is a job: a folder with a model, and pairs of inputs. A line of
standard output is what was measured for it: of states and parts, and of edges.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import pandas
import torch
from torch import Tensor
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis import attribution_patching
from transformers import AutoModelForCausalLM, AutoTokenizer


class Patching:
    """One pair of inputs in one model: its two runs, and what the answer is."""

    def __init__(self, bridge: Any, pair: dict[str, Any]) -> None:
        self.bridge = bridge
        self.clean = torch.tensor([pair["clean"]])
        self.corrupt = torch.tensor([pair["corrupt"]])
        self.answer, self.other = pair["answer"], pair["other"]
        with torch.no_grad():
            logits, self.cache = bridge.run_with_cache(self.clean)
            before, self.corrupt_cache = bridge.run_with_cache(self.corrupt)
        self.best, self.worst = self.difference(logits), self.difference(before)
        self.gradients = self._gradients()

    def difference(self, logits: Tensor) -> Any:
        """Return how far the answer's logit is above the other's."""
        return logits[0, -1, self.answer] - logits[0, -1, self.other]

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradient at every hook of the corrupt run."""
        gradients: dict[str, Tensor] = {}

        def keep(gradient: Tensor, hook: Any) -> None:
            gradients[hook.name] = gradient

        with self.bridge.hooks(bwd_hooks=[(lambda name: True, keep)]):
            self.difference(self.bridge(self.corrupt)).backward()
        return gradients

    def effects(self, site: str) -> list[float]:
        """Return the effect of a state at every token."""
        layer, activation = _residual(site)
        places = range(self.clean.shape[1])
        setter = patching.layer_pos_patch_setter
        return self._patched(layer, "pos", places, activation, setter)

    def effect_of_part(self, part: str) -> float:
        """Return the effect of a head or an MLP at all tokens at once."""
        layer = int(part.split(".")[1]) - 1
        if part.endswith(".mlp"):
            (effect,) = self._patched(layer, "pos", [0], "mlp_out", _set_all)
            return effect
        heads = [int(part.split(".")[-1])]
        setter = patching.layer_head_vector_patch_setter
        (effect,) = self._patched(layer, "head", heads, "z", setter)
        return effect

    def _patched(
        self, layer: int, axis: str, cells: Any, activation: str, setter: Any
    ) -> list[float]:
        rows = [(layer, cell) for cell in cells]
        table = pandas.DataFrame(rows, columns=["layer", axis])
        with torch.no_grad():
            differences = patching.generic_activation_patch(
                self.bridge,
                self.corrupt,
                self.cache,
                self.difference,
                setter,
                activation,
                index_df=table,
            )
        effects: list[float] = self._share(differences - self.worst).tolist()
        return effects

    def _share(self, change: Tensor) -> Tensor:
        share: Tensor = change / (self.best - self.worst)
        return share

    def estimates(self, site: str) -> list[float]:
        """Return the estimate by one gradient of a state's effect at every token."""
        layer, activation = _residual(site)
        estimates: list[float] = self._estimate(layer, activation).sum(-1)[0].tolist()
        return estimates

    def estimate_of_part(self, part: str) -> float:
        """Return the estimate by one gradient of a head's or an MLP's effect."""
        layer = int(part.split(".")[1]) - 1
        if part.endswith(".mlp"):
            return float(self._estimate(layer, "mlp_out").sum())
        head = int(part.split(".")[-1])
        return float(self._estimate(layer, "z")[..., head, :].sum())

    def _estimate(self, layer: int, activation: str) -> Tensor:
        name = patching.utils.get_act_name(activation, layer)
        change = self.cache[name] - self.corrupt_cache[name]
        gradient = self.gradients.get(name)
        if gradient is None:
            # A gradient is kept under the name of the hook that an alias stands for.
            gradient = self.gradients[_hook_of(self.bridge, name)]
        return self._share(change * gradient)


def _residual(site: str) -> tuple[int, str]:
    """Return the block and the name that TransformerLens has for a state."""
    _, layer, *part = site.split(".")
    if layer == "0":
        return 0, "resid_pre"
    return int(layer) - 1, "resid_mid" if part else "resid_post"


def _hook_of(bridge: Any, name: str) -> str:
    hook: str = bridge.hook_dict[name].name
    return hook


def _set_all(tensor: Tensor, index: Any, clean: Tensor) -> Tensor:
    """Replace an activation at all tokens."""
    return clean


class Edges:
    """The edges of one pair of inputs, by TransformerLens's own attribution.

    Its gradients are those of the corrupt run. It has an edge for every token: those of
    one writer and one reader are added up.
    """

    def __init__(self, bridge: Any, pair: dict[str, Any]) -> None:
        self.bridge = bridge
        self.clean = torch.tensor([pair["clean"]])
        self.corrupt = torch.tensor([pair["corrupt"]])
        self.answer, self.other = pair["answer"], pair["other"]
        self.by_token = attribution_patching.attribution_patch(
            bridge,
            self.clean,
            self.corrupt,
            self.difference,
            attribution_patching.EdgeAttributionConfig(granularity="edge"),
        ).edge_scores

    def difference(self, logits: Tensor) -> Tensor:
        """Return how far the answer's logit is above the other's."""
        difference: Tensor = logits[0, -1, self.answer] - logits[0, -1, self.other]
        return difference

    def scores(self, writers: list[str], readers: list[str]) -> list[list[float]]:
        """Return the scores [writer, reader] as shares of the logit difference."""
        table = torch.zeros(len(writers), len(readers), dtype=torch.float64)
        for (writer, reader), score in self.by_token.items():
            place = writers.index(_writer(writer)), readers.index(_reader(reader))
            table[place] += score
        with torch.no_grad():
            runs = [self.bridge(ids) for ids in (self.clean, self.corrupt)]
        best, worst = map(self.difference, runs)
        shares: list[list[float]] = (table / float(best - worst)).tolist()
        return shares

    def kept(self, circuit: list[list[str]]) -> float:
        """Return the share of the logit difference that a circuit alone keeps."""
        kept = []
        for edge in self.by_token:
            if [_writer(edge[0]), _reader(edge[1])] in circuit:
                kept.append(edge)
        found = attribution_patching.faithfulness(
            self.bridge, self.clean, self.corrupt, self.difference, kept
        )
        return float(found.recovered)


def _writer(node: Any) -> str:
    """Return the name that `hs.edges` has for a node that writes."""
    if node.kind == "embed":
        return "layer.0"
    if node.kind == "mlp_out":
        return f"layer.{node.layer + 1}.mlp"
    return f"layer.{node.layer + 1}.attn.head.{node.head}"


def _reader(node: Any) -> str:
    """Return the name that `hs.edges` has for a node that reads."""
    if node.kind == "logits":
        return "logits"
    if node.kind == "mlp_in":
        return f"layer.{node.layer + 1}.mlp"
    return f"layer.{node.layer + 1}.attn.{node.kind[0]}.{node.head}"


def measure(job: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return what TransformerLens says of every pair of a job."""
    module = AutoModelForCausalLM.from_pretrained(job["folder"]).eval()
    tokenizer = AutoTokenizer.from_pretrained(job["folder"])
    tokenizer.pad_token = tokenizer.bos_token
    bridge = TransformerBridge.boot_transformers(
        job["folder"], hf_model=module, tokenizer=tokenizer, device="cpu"
    )
    measured = []
    for pair in job["pairs"]:
        patched = Patching(bridge, pair)
        measured.append(
            {
                "states": [patched.effects(site) for site in job["sites"]],
                "state_estimates": [patched.estimates(site) for site in job["sites"]],
                "parts": [patched.effect_of_part(part) for part in job["parts"]],
                "part_estimates": [
                    patched.estimate_of_part(part) for part in job["parts"]
                ],
            }
        )
    edges = []
    for pair in job["edge_pairs"]:
        found = Edges(bridge, pair)
        scores = found.scores(job["writers"], job["readers"])
        edges.append({"scores": scores, "kept": found.kept(pair["circuit"])})
    return {"parts": measured, "edges": edges}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # Whatever the libraries print goes elsewhere.
    results, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), file=results, flush=True)
