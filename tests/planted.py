"""Tiny models with something planted, for the tests that must find it."""

from typing import Any

import torch

from hiddenscope.testing import tiny_model


def previous_token_model() -> Any:
    """A GPT-2 whose head 2 of block 1 reads the previous token by its position."""
    module: Any = tiny_model("gpt2")
    generator = torch.Generator().manual_seed(0)
    width, dim = 64, 16
    # One direction of the residual stream for each position, and one key for each.
    keys = torch.nn.functional.normalize(torch.randn(width, dim, generator=generator))
    block = module.transformer.h[0]
    with torch.no_grad():
        module.transformer.wpe.weight.zero_()
        module.transformer.wpe.weight[:width] = 100 * torch.eye(width)
        block.ln_1.weight.fill_(1)
        block.ln_1.bias.zero_()
        for start, rows in ((0, keys.roll(1, 0)), (width, keys)):
            columns = slice(start + 2 * dim, start + 3 * dim)
            block.attn.c_attn.weight[:, columns] = 2 * rows
            block.attn.c_attn.bias[columns] = 0
    return module
