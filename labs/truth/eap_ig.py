"""EAP-IG as published, own implementation: edge attribution patching with integrated
gradients, for GPT-2 in plain PyTorch.

Hanna, Pezzelle and Belinkov, "Have Faith in Faithfulness" (arXiv 2403.17806). An edge's
score is what its writer wrote in the clean run less what it wrote in the corrupt run,
times the gradient of the logit difference by what its reader reads. The gradient is the
mean of those at steps from the corrupt input's embeddings to the clean one's. With one
step it is that of the corrupt run, which is plain edge attribution patching (Syed et
al., arXiv 2310.10348).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

# As in the paper.
STEPS = 5


@dataclass
class _Run:
    """A run: what is written, what is read, each by layer, and the last logits."""

    written: list[Tensor] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))


def eap_ig(
    module: Any,
    clean: list[int],
    corrupt: list[int],
    answer: int,
    other: int,
    steps: int = STEPS,
) -> NDArray[np.float64]:
    """Return the score of every edge [writer, reader], as a share; NaN if there is none.

    Writers are the embeddings, then the heads and the MLP of each layer. Readers are
    the queries, keys and values of all heads and the MLP of each layer, and the logits.
    """
    clean_input, corrupt_input = (_embedded(module, ids) for ids in (clean, corrupt))
    with torch.no_grad():
        runs = [_run(module, inputs) for inputs in (clean_input, corrupt_input)]
    written = [torch.cat(run.written) for run in runs]
    change = written[0] - written[1]
    between = [float(run.logits[answer] - run.logits[other]) for run in runs]
    slopes: list[Tensor] = []
    for step in range(steps):
        inputs = corrupt_input + step / steps * (clean_input - corrupt_input)
        with torch.enable_grad():
            run = _run(module, inputs.requires_grad_())
            difference = run.logits[answer] - run.logits[other]
            found = torch.autograd.grad(difference, run.read)
        if not slopes:
            slopes = [torch.zeros_like(slope) for slope in found]
        for total, slope in zip(slopes, found, strict=True):
            total += slope / steps
    scores = torch.einsum("wtd,rtd->wr", change, torch.cat(slopes))
    shares: NDArray[np.float64] = (scores.double() / (between[0] - between[1])).numpy()
    shares[~_possible(module)] = np.nan
    return shares


def _embedded(module: Any, ids: list[int]) -> Tensor:
    """Return the embeddings of tokens and positions [token, width]."""
    body = module.transformer
    with torch.no_grad():
        embedded: Tensor = body.wte(torch.tensor(ids)) + body.wpe.weight[: len(ids)]
    return embedded


def _run(module: Any, stream: Tensor) -> _Run:
    """Run the model with a copy of the stream for every part that reads it."""
    config = module.config
    heads, width = config.n_head, config.n_embd // config.n_head
    run = _Run(written=[stream[None]])
    tokens = len(stream)
    for block in module.transformer.h:
        # One copy for the queries, keys and values of each head.
        read = stream.expand(3 * heads, tokens, -1).clone()
        normed = block.ln_1(read).view(3, heads, tokens, -1)
        weight = block.attn.c_attn.weight.view(-1, 3, heads, width)
        bias = block.attn.c_attn.bias.view(3, heads, 1, width)
        operands = torch.einsum("ohtd,dohw->ohtw", normed, weight) + bias
        gathered = functional.scaled_dot_product_attention(
            operands[:1], operands[1:2], operands[2:], is_causal=True
        )[0]
        by_head = block.attn.c_proj.weight.view(heads, width, -1)
        added = gathered @ by_head
        stream = stream + added.sum(0) + block.attn.c_proj.bias
        before = stream.expand(1, tokens, -1).clone()
        computed = block.mlp(block.ln_2(before))
        stream = stream + computed[0]
        run.written += [added, computed]
        run.read += [read, before]
    last = stream.expand(1, tokens, -1).clone()
    run.read.append(last)
    run.logits = module.lm_head(module.transformer.ln_f(last[0, -1]))
    return run


def _possible(module: Any) -> NDArray[np.bool_]:
    """Tell which readers come after which writers [writer, reader]."""
    heads = module.config.n_head
    written, read = [-1], []
    for layer in range(module.config.n_layer):
        written += [2 * layer] * heads + [2 * layer + 1]
        read += [2 * layer] * 3 * heads + [2 * layer + 1]
    read.append(2 * module.config.n_layer)
    return np.less.outer(written, read)
