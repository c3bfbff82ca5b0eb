"""Modules in plain PyTorch, as students write them: their states are those that hooks
placed by hand show, and what is no chain of blocks is refused.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hiddenscope as hs
from hiddenscope.errors import AnatomyError, ModuleError, PassError, TextError
from hiddenscope.testing import tiny_model

VOCABULARY, WIDTH, WINDOW, DEPTH, HEADS = 41, 16, 12, 3, 2
TEXT, OTHER = [5, 9, 30, 12, 17], [7, 9, 30, 12, 17]


class Attention(nn.Module):
    """Attention in one module, as in nanoGPT; `rotary` turns queries and keys."""

    def __init__(self, *, causal: bool = True, rotary: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal, self.rotary = causal, rotary

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3 * HEADS, -1)).transpose(1, 2)
        q, k, v = parts.chunk(3, 1)
        if self.rotary:
            q, k = turned(q), turned(k)
        z = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(z.transpose(1, 2).flatten(2))


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[-2])[:, None] / 10 ** torch.arange(half)
    a, b = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
    )


class Block(nn.Module):
    """A pre-norm block with dropout."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = Attention(**options), mlp()
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Any:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class PostNorm(Block):
    def forward(self, x: Tensor) -> Any:
        x = self.ln_1(x + self.attn(x))
        return self.ln_2(x + self.mlp(x))


class Parallel(Block):
    def forward(self, x: Tensor) -> Any:
        normed = self.ln_1(x)
        return x + self.attn(normed) + self.mlp(normed)


class InTuple(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


class GPT(nn.Module):
    """The small GPT that every student writes."""

    block: type[Block] = Block

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(WINDOW, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.blocks: Any = self.made([self.block(**options) for _ in range(DEPTH)])
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def made(self, blocks: list[Block]) -> nn.Module:
        return nn.ModuleList(blocks)

    def order(self) -> list[nn.Module]:
        return list(self.blocks)

    def embedded(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        return self.drop(self.tokens(ids) + self.positions(places))

    def run(self, x: Tensor) -> Tensor:
        for block in self.order():
            x = block(x)
        return x

    def logits(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.run(self.embedded(ids))))

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        logits, loss = self.logits(idx), None
        if targets is not None:
            logits = logits.flatten(0, 1)
            loss = functional.cross_entropy(logits, targets.flatten())
        return logits, loss


class NanoGPT(GPT):
    """Without targets it gives the logits of the last token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": self.tokens,
                "wpe": self.positions,
                "h": self.blocks,
                "ln_f": self.norm,
            }
        )
        del self.tokens, self.positions, self.blocks, self.norm
        self.head.weight = self.transformer.wte.weight

    def order(self) -> list[nn.Module]:
        return list(self.transformer.h)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        assert idx.shape[1] <= WINDOW, "too long"
        parts = self.transformer
        x = parts.wte(idx) + parts.wpe(torch.arange(idx.shape[1]))
        x = parts.ln_f(self.run(x))
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


class Rotary(GPT):
    """No positions, no final norm, an unusual name of the ids, a tensor as output."""

    def __init__(self) -> None:
        super().__init__(rotary=True)
        self.norm = nn.Identity()

    def embedded(self, ids: Tensor) -> Tensor:
        return self.tokens(ids)

    def forward(self, tokens: Tensor, /) -> Any:  # type: ignore[override]
        return self.logits(tokens)


class Tied(GPT):
    """No module makes its logits, which are in a dict behind the loss."""

    block = PostNorm

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        x = self.norm(self.run(self.embedded(x)))
        return {"loss": x.new_zeros(()), "out": x @ self.tokens.weight.T}


class AsAttributes(GPT):
    block = Parallel

    def made(self, blocks: list[Block]) -> nn.Module:
        for number, block in enumerate(blocks):
            setattr(self, f"block{number}", block)
        return nn.Identity()

    def order(self) -> list[nn.Module]:
        return [getattr(self, f"block{number}") for number in range(DEPTH)]


class AsDict(GPT):
    def made(self, blocks: list[Block]) -> nn.Module:
        return nn.ModuleDict({f"b{number}": b for number, b in enumerate(blocks)})

    def order(self) -> list[nn.Module]:
        return list(self.blocks.values())


class AsSequential(GPT):
    def made(self, blocks: list[Block]) -> nn.Module:
        return nn.Sequential(*blocks)

    def run(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class OfTuples(GPT):
    block = InTuple

    def run(self, x: Tensor) -> Tensor:
        for block in self.order():
            x, _ = block(x)
        return x


class Shared(GPT):
    """One block, run three times."""

    def made(self, blocks: list[Block]) -> nn.Module:
        return blocks[0]

    def order(self) -> list[nn.Module]:
        return [self.blocks] * DEPTH


class Reversed(GPT):
    def order(self) -> list[nn.Module]:
        return list(reversed(self.blocks))


class Twice(GPT):
    def order(self) -> list[nn.Module]:
        return [*self.blocks, *self.blocks]


class TimeFirst(GPT):
    """Blocks on states [token, text, width], and no causality."""

    class Turned(Block):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.transpose(0, 1)).transpose(0, 1)

    block = Turned

    def __init__(self) -> None:
        super().__init__(causal=False)

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.transpose(0, 1)).transpose(0, 1)


class OfTorch(GPT):
    """torch's own blocks, which run another kernel where nothing is hooked."""

    class Layer(nn.TransformerEncoderLayer):
        def __init__(self) -> None:
            super().__init__(WIDTH, HEADS, 2 * WIDTH, batch_first=True)

    block = Layer  # type: ignore[assignment]

    def run(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.order():
            x = block(x, mask, is_causal=True)
        return x


class Encoder(GPT):
    """An encoder that gives back its states, and takes a mask."""

    def __init__(self) -> None:
        super().__init__(causal=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
        return self.norm(self.run(self.embedded(input_ids)))


PROVED: list[Callable[[], GPT]] = [
    GPT,
    NanoGPT,
    Rotary,
    Tied,
    AsAttributes,
    AsDict,
    AsSequential,
    OfTuples,
    Shared,
    Reversed,
    Twice,
    TimeFirst,
    OfTorch,
    Encoder,
]


class Loaded(NamedTuple):
    module: GPT
    model: hs.Model


@cache
def loaded(build: Callable[[], GPT]) -> Loaded:
    torch.manual_seed(0)
    module = build().eval()
    return Loaded(module, hs.load(module))


def by_hand(module: GPT, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """Return every state and the output of a pass, by hooks on the blocks."""
    states: list[Tensor] = []
    order = module.order()
    handles = []
    for part in dict.fromkeys(order):

        def after(_: Any, args: Any, output: Any) -> None:
            states.extend([args[0]] if not states else [])
            states.append(output[0] if isinstance(output, tuple) else output)

        handles.append(part.register_forward_hook(after))
    tensor = torch.tensor([ids])
    with torch.no_grad():
        if isinstance(module, NanoGPT):
            output, _ = module(tensor, tensor)
        elif isinstance(module, Encoder):
            output = module(tensor, None)
        else:
            output = module(tensor)
    for handle in handles:
        handle.remove()
    turn = isinstance(module, TimeFirst)
    rows = [state[:, 0] if turn else state[0] for state in states]
    if isinstance(output, dict):
        output = output["out"]
    return rows, output[0][0] if isinstance(output, tuple) else output[0]


@pytest.mark.parametrize("build", PROVED)
def test_states_are_those_that_hooks_placed_by_hand_show(
    build: Callable[[], GPT],
) -> None:
    module, model = loaded(build)
    states, output = by_hand(module, TEXT)
    (stack,) = model.anatomy.stacks
    assert stack.depth == len(module.order())
    assert stack.causal == (build not in (TimeFirst, Encoder))
    captured = model.capture([TEXT, TEXT[:2], OTHER], "layer.*").of(0)
    for k, state in enumerate(states):
        torch.testing.assert_close(captured[f"layer.{k}"], state)
    facts = hs.anatomy(model).facts
    assert facts["stacks"][0]["proof"] == "resuming"
    assert model.text_encoder.vocabulary == VOCABULARY
    assert model.text_encoder.window == (None if build is Rotary else WINDOW)
    if build is Encoder:
        assert not facts["makes_logits"]
        assert torch.equal(hs.record(model, [TEXT]).states["final"], output)
        with pytest.raises(PassError, match="no head, and makes no logits"):
            hs.lens(model, TEXT)
        return
    assert torch.equal(hs.record(model, [TEXT], (), logits=True).logits, output)
    assert facts["makes_logits"]
    assert (facts["head"] is None) == (build is Tied)
    assert (stack.proof.final is None) == (build is Rotary)


@pytest.mark.parametrize("build", [b for b in PROVED if b is not Encoder])
def test_what_is_asked_of_a_plain_model(build: Callable[[], GPT]) -> None:
    _, model = loaded(build)
    text = [TEXT, OTHER, TEXT[:3]]
    full = hs.record(model, [TEXT], logits=True)
    again = hs.resume(model, [TEXT], "layer.2", full.states["layer.2"])
    assert torch.equal(again.logits, full.logits)
    changed = hs.edit(model, [TEXT], {"layer.1": hs.Scale(0.0)}, "layer.1", logits=True)
    assert not changed.states["layer.1"].any()
    assert not torch.equal(changed.logits, full.logits)
    best = int(full.logits[-1].argmax())
    lens = hs.lens(model, [TEXT], target=best)
    assert lens.data["target_rank"].to_numpy()[-1, -1] == 1
    contrast = hs.Contrast(TEXT, OTHER, best, (best + 1) % VOCABULARY, at=-1)
    effects = hs.patch(model, contrast).data["effect"].to_numpy()
    # All of the difference is in the first token before the blocks, and in the last
    # one after them.
    assert effects[0, 0] == pytest.approx(1)
    assert effects[-1, -1] == pytest.approx(1)
    for result in (
        hs.profile(model, text),
        hs.compare(model, [TEXT], [OTHER]),
        hs.drift(model, model.module, [TEXT]),
    ):
        assert result.summary()


def test_what_is_inside_the_blocks_of_a_plain_model() -> None:
    module, model = loaded(NanoGPT)
    patterns = hs.attention(model, [TEXT]).data["pattern"].to_numpy()
    assert patterns.shape == (DEPTH, HEADS, len(TEXT), len(TEXT))
    states = hs.record(model, [TEXT], "layer.2.attn, layer.2.attn.head.*").states
    bias = module.order()[1].attn.out.bias
    total = bias + sum(states[f"layer.2.attn.head.{head}"] for head in range(HEADS))
    torch.testing.assert_close(total, states["layer.2.attn"])
    contributions = hs.contributions(model, [TEXT], 3, 4)
    logits = hs.record(model, [TEXT], (), logits=True).logits[-1]
    total = contributions.data["total"].item()
    assert total == pytest.approx(float(logits[3] - logits[4]), abs=1e-4)


class Skipping(GPT):
    """What the first block gives is added before the last, outside any block."""

    def run(self, x: Tensor) -> Tensor:
        first, middle, last = self.order()
        skipped = first(x)
        return last(middle(skipped) + skipped)


class TakingSkips(GPT):
    """A U-net whose blocks are given what earlier ones gave."""

    class Joining(Block):
        def forward(self, x: Tensor, skipped: Any = None) -> Any:
            return super().forward(x if skipped is None else x + skipped)

    block = Joining

    def run(self, x: Tensor) -> Tensor:
        first, middle, last = self.order()
        skipped = first(x)
        return last(middle(skipped), skipped)


class AroundTheBlocks(GPT):
    def run(self, x: Tensor) -> Tensor:
        return super().run(x) + x


class TwoLists(GPT):
    """Something between two lists."""

    def __init__(self) -> None:
        super().__init__()
        self.more = nn.ModuleList([Block(), Block()])

    def run(self, x: Tensor) -> Tensor:
        x = self.norm(super().run(x))
        for block in self.more:
            x = block(x)
        return x


class NormedBetween(GPT):
    def run(self, x: Tensor) -> Tensor:
        for block in self.order():
            x = self.norm(block(x))
        return x


class NoBlocks(GPT):
    """Attention and MLPs in two lists, so that no module is a block."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.order():
            x = x + block.attn(block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
        return x


class AlwaysDropping(GPT):
    def embedded(self, ids: Tensor) -> Tensor:
        return functional.dropout(super().embedded(ids), 0.1)


class MixingTexts(GPT):
    """States [token, text, width] for blocks that take [text, token, width]."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(x.transpose(0, 1)).transpose(0, 1)


class Backwards(GPT):
    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids).flip(1)


class WithFirstRow(GPT):
    """A row of its own before those of the tokens."""

    def run(self, x: Tensor) -> Tensor:
        return super().run(torch.cat([x[:, :1] * 0 + 1, x], 1))[:, 1:]


class Deaf(GPT):
    def embedded(self, ids: Tensor) -> Tensor:
        return super().embedded(ids * 0)


class Silent(GPT):
    def forward(self, idx: Tensor) -> Any:  # type: ignore[override]
        return self.logits(idx).argmax(-1)


class Reminded(GPT):
    """Every block is given the embeddings."""

    def run(self, x: Tensor) -> Tensor:
        first = x
        for block in self.order():
            x = block(x, first)
        return x

    block = TakingSkips.Joining


class Translating(GPT):
    def forward(self, source: Tensor, target: Tensor) -> Any:  # type: ignore[override]
        return self.logits(source)


REFUSED = {
    Skipping: "no list of blocks",
    TakingSkips: r"layer\.2 does not decide the output",
    AroundTheBlocks: r"layer\.0 does not decide the output",
    TwoLists: "no list of blocks",
    NormedBetween: "no list of blocks",
    NoBlocks: "no list of blocks",
    AlwaysDropping: "a second pass over the same text",
    MixingTexts: "depend on the other texts",
    Backwards: "first row of layer.0",
    WithFirstRow: r"\[2, 8, 16\] for 2 texts of 7 tokens",
    Deaf: "does not depend on the text",
    Silent: "no tensor to compare",
    Reminded: r"layer\.0 does not decide the output",
    Translating: "missing 1 required positional argument: 'target'",
}


@pytest.mark.parametrize("build", REFUSED)
def test_what_is_no_chain_of_blocks_is_refused(build: Callable[[], GPT]) -> None:
    torch.manual_seed(0)
    with pytest.raises(AnatomyError, match=REFUSED[build]) as refused:
        hs.load(build().eval())
    assert "nn.ModuleList" in str(refused.value)


def test_a_plain_model_in_train_mode_is_refused() -> None:
    with pytest.raises(ModuleError, match=r"module\.eval\(\)"):
        hs.load(GPT())


class Short(GPT):
    """A window that no table of positions shows."""

    def embedded(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions.weight[: ids.shape[1]][:4]


def test_the_window_of_a_plain_model() -> None:
    model = hs.load(Short().eval())
    assert model.text_encoder.window == 4
    with pytest.raises(TextError, match="at most 4"):
        model.capture([TEXT])
    assert model.capture([TEXT[:4], TEXT[:2]]).values.shape[1] == 6
    # A limit that is farther away is said by the model itself.
    module = Rotary().eval()
    model = hs.load(module)
    limited = module.register_forward_pre_hook(require_short)
    with pytest.raises(PassError, match="AssertionError: too long"):
        model.capture([TEXT * 8])
    limited.remove()


def require_short(_: nn.Module, args: tuple[Tensor]) -> None:
    assert args[0].shape[1] <= 32, "too long"


def test_recording_and_editing_the_passes_of_a_plain_model() -> None:
    module, model = loaded(GPT)
    ids = torch.tensor([TEXT])
    with hs.recording(module, "layer.1") as recorded:
        module(idx=ids)
    assert recorded.states.tokens.ids.tolist() == TEXT
    (state,) = model.capture([TEXT], "layer.1").values
    assert torch.equal(recorded.states["layer.1"], state)
    before, _ = module(ids)
    with hs.editing(module, {"layer.3": hs.Scale(2.0, tokens=-1)}):
        after, _ = module(ids)
    assert (before != after).any(-1).tolist() == [[False] * 4 + [True]]


class Int8(nn.Linear):
    """A projection whose inputs are rounded with one scale for the whole pass."""

    def forward(self, x: Tensor) -> Tensor:
        step = x.abs().max() / 127
        return functional.linear((x / step).round() * step, self.weight, self.bias)


@pytest.mark.parametrize(("family", "causal"), [("llama", True), ("bert", False)])
def test_a_scale_that_all_tokens_share_makes_no_decoder_look_ahead(
    family: str, causal: bool
) -> None:
    module = tiny_model(family)
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = Int8
    assert hs.load((module, None)).anatomy.stacks[-1].causal is causal
