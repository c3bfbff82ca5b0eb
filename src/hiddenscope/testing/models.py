"""Tiny real models of many families, a tokenizer, and three damages to do to them.

>>> module = tiny_model("gpt2")
>>> type(module).__name__, module.num_parameters() < 200_000
('GPT2LMHeadModel', True)
"""

import json
import re
from collections.abc import Callable, Mapping
from copy import deepcopy
from difflib import get_close_matches
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hiddenscope.errors import UnknownModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_WEIGHTS = 5_000_000
LAYERS = 3

_DEPTH = re.compile(r"(n|num|num_hidden|num_decoder|encoder|decoder)_layers?")
_SPECIAL = {
    "pad": "<pad>",
    "bos": "<bos>",
    "eos": "<eos>",
    "unk": "<unk>",
    "cls": "<cls>",
    "sep": "<sep>",
}
# The pieces that byte-level BPE merges into one token, in order. Ġ stands for a space.
_MERGES = (
    "Ġ t|Ġ a|h e|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|n d|Ġ c|i s|Ġ o|o r|Ġ i|e s|e n|in"
    " g|a l|Ġo f|Ġ p|i t|Ġa nd|Ġ f"
)


def tiny_model(
    family: str, *, task: str | None = None, layers: int = LAYERS, seed: int = 0
) -> nn.Module:
    """Build a real model of a family in eval mode, in which every block has an effect.

    `task` is one of those that `families()` lists for the family, by default the first.

    >>> module = tiny_model("bert", task="base", layers=2)
    >>> type(module).__name__, module.config.num_hidden_layers, module.training
    ('BertModel', 2, False)
    """
    known = _table()
    if family not in known:
        remedy = "Build it from a configuration with build()."
        for near in get_close_matches(family, known, n=1):
            remedy = f"Did you mean {near!r}?"
        reason = f"there are {', '.join(known)}"
        raise UnknownModel(f"No tiny model {family!r}", reason, remedy)
    row = known[family]
    classes = row["classes"]
    if task is not None and task not in classes:
        reason = f"it is there for {', '.join(classes)}"
        raise UnknownModel(f"No tiny {family} for {task!r}", reason, "Ask for these.")
    model_class = classes[task or next(iter(classes))]
    config = dict(row["config"])
    for name, value in row["config"].items():
        if _DEPTH.fullmatch(name):
            config[name] = layers
        elif isinstance(value, list) and name.endswith("layer_types"):
            # It has an entry for each layer.
            config[name] = [value[i % len(value)] for i in range(layers)]
    return build({**row, "model_class": model_class, "config": config}, seed=seed)


def families() -> dict[str, tuple[str, ...]]:
    """Return the families that have tiny models, and the tasks of each.

    >>> families()["gpt2"]
    ('causal-lm', 'base')
    """
    return {family: tuple(row["classes"]) for family, row in _table().items()}


def build(
    row: Mapping[str, Any], *, seed: int = 0, most: int = MOST_WEIGHTS
) -> nn.Module:
    """Build a tiny model from its `model_class`, `config_class` and `config`.

    More than `most` weights raise a ValueError.

    >>> row = {"model_class": "GPT2Model", "config_class": "GPT2Config"}
    >>> config = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}
    >>> type(build({**row, "config": config})).__name__
    'GPT2Model'
    """
    import transformers

    names = row["config_class"], row["model_class"]
    missing = [name for name in names if not hasattr(transformers, name)]
    if missing:
        reason = f"transformers {transformers.__version__} has none"
        raise UnknownModel(
            f"No {' and no '.join(missing)}", reason, "Install a version that has."
        )
    config_class = getattr(transformers, row["config_class"])
    model_class = getattr(transformers, row["model_class"])
    # Buffers such as hash tables keep the numbers of their own initialisation, so the
    # global generator counts too.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Some configurations take entries out of the dicts that they are given.
        config = config_class(**deepcopy(dict(row["config"])))
        module: nn.Module = model_class(config).eval()
    weights = sum(weight.numel() for weight in module.parameters())
    if weights > most:
        raise ValueError(
            f"a tiny {names[1]} has at most {most:,} weights, and this has {weights:,}:"
            " check its config"
        )
    # Matrices that preserve the size of states, and vectors near their values.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in filter(Tensor.is_floating_point, module.parameters()):
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(noise * 0.7 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * noise)
    return module


def tiny_tokenizer(
    *, bos: bool = True, cls: bool = False, pad: bool = True
) -> "PreTrainedTokenizerFast":
    """Build a byte-level BPE tokenizer of 128 tokens in memory.

    It knows ASCII; other bytes become `<unk>`. A text begins with `<bos>`, or stands
    between `<cls>` and `<sep>`, or is left as it is. The ids of `<pad>`, `<bos>` and
    `<eos>` are 0, 1 and 2, as in the tiny models.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.convert_ids_to_tokens(tokenizer("The rest.").input_ids)
    ['<bos>', 'T', 'he', 'Ġ', 're', 's', 't', '.']
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ascii_bytes = [chr(byte) for byte in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
    pieces = [*_SPECIAL.values(), *ascii_bytes]
    merges = []
    for merge in _MERGES.split("|"):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
        pieces.append(left + right)
    ids = {piece: i for i, piece in enumerate(pieces)}
    fast = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    frame, names = "$A", ["unk", "eos"]
    if cls:
        frame = "<cls> $A <sep>"
        names += ["cls", "sep"]
    elif bos:
        frame = "<bos> $A"
        names.append("bos")
    if pad:
        names.append("pad")
    framing = [(token, ids[token]) for token in _SPECIAL.values() if token in frame]
    fast.post_processor = processors.TemplateProcessing(
        single=frame, pair=None, special_tokens=framing
    )
    special = {f"{name}_token": _SPECIAL[name] for name in names}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=128, **special
    )  # type: ignore[no-untyped-call]


def identity_block(module: nn.Module, block: int = 1) -> str:
    """Make a pre-norm block, counted from 1, add nothing, and return its path.

    >>> identity_block(tiny_model("gpt2"), block=2)
    'transformer.h.1'
    """
    path = block_path(module, block)
    with torch.no_grad():
        for weight in module.get_submodule(path).parameters():
            weight.zero_()
    return path


def nan_weight(module: nn.Module, block: int = 1) -> str:
    """Put a NaN into the first matrix of a block, and return the path of that weight.

    Blocks are counted from 1.

    >>> nan_weight(tiny_model("gpt2"))
    'transformer.h.0.attn.c_attn.weight'
    """
    path = block_path(module, block)
    weights = module.get_submodule(path).named_parameters()
    name, matrix = next((name, weight) for name, weight in weights if weight.ndim >= 2)
    with torch.no_grad():
        matrix.flatten()[0] = float("nan")
    return f"{path}.{name}"


def misreport(
    module: nn.Module, change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
) -> nn.Module:
    """Change the `hidden_states` that a module reports, and return the module.

    In an encoder-decoder those of the decoder are changed.

    >>> module = misreport(tiny_model("gpt2"), lambda states: states[::-1])
    >>> honest, ids = tiny_model("gpt2"), torch.tensor([[7, 8]])
    >>> reported = module(ids, output_hidden_states=True).hidden_states
    >>> true = honest(ids, output_hidden_states=True).hidden_states
    >>> torch.equal(reported[0], true[-1])
    True
    """
    original = type(module)

    class Misreporting(original):  # type: ignore[misc, valid-type]
        @wraps(original.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            for name in ("hidden_states", "decoder_hidden_states"):
                if isinstance(output, Mapping) and output.get(name) is not None:
                    output[name] = change(output[name])  # type: ignore[index]
            return output

    Misreporting.__name__ = original.__name__
    module.__class__ = Misreporting
    return module


@cache
def _table() -> dict[str, Any]:
    """Read the families: a configuration class, a class per task, and the settings."""
    text = Path(__file__).with_suffix(".json").read_text("utf-8")
    table: dict[str, Any] = json.loads(text)
    return table


def block_path(module: nn.Module, block: int) -> str:
    """Return the path of a block in the outermost list of the module.

    Blocks are counted from 1, and -1 is the last. Of several lists, as in an
    encoder-decoder, the last is taken for -1 and the first for others.
    """
    lists = []
    for path, part in module.named_modules():
        if not isinstance(part, nn.ModuleList) or len(part) < abs(block):
            continue
        # Rotary embeddings, one for each kind of layer, have no weights.
        if next(part.parameters(), None) is not None:
            lists.append(path)
    if block > 0:
        return f"{min(lists, key=lambda path: path.count('.'))}.{block - 1}"
    path = min(reversed(lists), key=lambda path: path.count("."))
    count = len(module.get_submodule(path))  # type: ignore[arg-type]
    return f"{path}.{count + block}"


class PlainGPT(nn.Module):
    """A small GPT in plain PyTorch, as people write one: no config, no
    `hidden_states`, and logits of minus infinity for words that no tokenizer has.

    >>> PlainGPT()(torch.tensor([[5, 6]])).shape
    torch.Size([1, 2, 136])
    """

    def __init__(self, seed: int = 0, *, masked: bool = True) -> None:
        super().__init__()
        words, width = 136, 32
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tokens = nn.Embedding(words, width)
            self.positions = nn.Embedding(64, width)
            self.blocks = nn.ModuleList(_PlainBlock(width) for _ in range(LAYERS))
            self.norm = nn.LayerNorm(width)
            self.head = nn.Linear(width, words, bias=False)
            for norm in self.modules():
                if isinstance(norm, nn.LayerNorm):
                    nn.init.normal_(norm.weight, 1.0, 0.1)
        unused = torch.zeros(words)
        if masked:
            unused[128:] = float("-inf")
        self.register_buffer("unused", unused, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of every token."""
        places = torch.arange(ids.shape[1], device=ids.device)
        states = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            states = block(states)
        logits: Tensor = self.head(self.norm(states)) + self.unused
        return logits


class _PlainBlock(nn.Module):
    """A block with two heads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.joined = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, states: Tensor) -> Tensor:
        """Return the states after attention and MLP."""
        joined = self.joined(self.before_attention(states))
        q, k, v = joined.unflatten(-1, (6, -1)).transpose(1, 2).chunk(3, 1)
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        states = states + self.out(read.transpose(1, 2).flatten(2))
        mixed: Tensor = states + self.mlp(self.before_mlp(states))
        return mixed
