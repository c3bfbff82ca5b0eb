"""Tiny real models by family, a tiny tokenizer for them, and three damaged models.

>>> module = tiny_model("gpt2")
>>> type(module).__name__, sum(weight.numel() for weight in module.parameters()) < 200_000
('GPT2LMHeadModel', True)
"""

import json
import re
from collections.abc import Callable, Mapping
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
# Which pieces of text become one token, in the order in which they are joined; Ġ is how
# byte-level BPE writes a space.
_MERGES = (
    "Ġ t|Ġ a|h e|i n|r e|o n|Ġt he|e r|Ġ s|a t|Ġ w|n d|Ġ c|i s|Ġ o|o r|Ġ i|e s|e n|in"
    " g|a l|Ġo f|Ġ p|i t|Ġa nd|Ġ f"
)


def tiny_model(
    family: str, *, task: str | None = None, layers: int = LAYERS, seed: int = 0
) -> nn.Module:
    """A real model of a family, in eval mode, with weights that are drawn so that every
    block changes its states.

    `task` is one of those that `families()` gives for the family; the first of them if
    not given.

    >>> module = tiny_model("bert", task="base", layers=2)
    >>> type(module).__name__, module.config.num_hidden_layers, module.training
    ('BertModel', 2, False)
    """
    known = _table()
    if family not in known:
        near = get_close_matches(family, known, n=1)
        remedy = (
            f"Did you mean {near[0]!r}?"
            if near
            else "Build it from a configuration with build()."
        )
        raise UnknownModel(
            f"No tiny model {family!r}", f"there are {', '.join(known)}", remedy
        )
    row = known[family]
    classes = row["classes"]
    if task is not None and task not in classes:
        raise UnknownModel(
            f"No tiny {family} for {task!r}",
            f"it is there for {', '.join(classes)}",
            "Ask for these.",
        )
    chosen = classes[task or next(iter(classes))]
    return build(
        {**row, "model_class": chosen, "config": _with_layers(row["config"], layers)},
        seed=seed,
    )


def families() -> dict[str, tuple[str, ...]]:
    """The families that there are tiny models of, and the tasks of each.

    >>> families()["gpt2"]
    ('causal-lm', 'base')
    """
    return {family: tuple(row["classes"]) for family, row in _table().items()}


def build(
    row: Mapping[str, Any], *, seed: int = 0, most: int = MOST_WEIGHTS
) -> nn.Module:
    """A tiny model from a row that names its `model_class`, its `config_class` and what
    its `config` is made with.

    With more than `most` weights it is not tiny, and a ValueError.

    >>> config = {"vocab_size": 128, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    >>> type(build({"model_class": "GPT2Model", "config_class": "GPT2Config", "config": config})).__name__
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
    config_class, model_class = (getattr(transformers, name) for name in names)
    # Some parts keep what their own initialisation drew (buffers, hash tables), so
    # torch's own generator counts too.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module: nn.Module = model_class(config_class(**row["config"])).eval()
    weights = sum(weight.numel() for weight in module.parameters())
    if weights > most:
        raise ValueError(
            f"a tiny {names[1]} has at most {most:,} weights, and this has {weights:,}:"
            " check its config"
        )
    _draw(module, torch.Generator().manual_seed(seed))
    return module


def tiny_tokenizer(
    *, bos: bool = True, cls: bool = False, pad: bool = True
) -> "PreTrainedTokenizerFast":
    """A real byte-level BPE tokenizer of 128 tokens that knows ASCII, made in memory;
    other bytes become `<unk>`.

    A text begins with `<bos>`, or stands between `<cls>` and `<sep>`, or is left as it
    is. The ids of `<pad>`, `<bos>` and `<eos>` are 0, 1 and 2, as in the tiny models.

    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.convert_ids_to_tokens(tokenizer("The rest.").input_ids)
    ['<bos>', 'T', 'he', 'Ġ', 're', 's', 't', '.']
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ascii_bytes = [chr(byte) for byte in range(0x21, 0x7F)] + ["Ġ", "Ċ"]
    merges = [
        (left, right)
        for left, _, right in (merge.partition(" ") for merge in _MERGES.split("|"))
    ]
    pieces = [
        *_SPECIAL.values(),
        *ascii_bytes,
        *(left + right for left, right in merges),
    ]
    ids = {piece: i for i, piece in enumerate(pieces)}
    fast = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    frame = "<cls> $A <sep>" if cls else "<bos> $A" if bos else "$A"
    used = [(token, ids[token]) for token in _SPECIAL.values() if token in frame]
    fast.post_processor = processors.TemplateProcessing(
        single=frame, pair=None, special_tokens=used
    )
    kept = {
        "unk",
        "eos",
        *(["cls", "sep"] if cls else ["bos"] if bos else []),
        *(["pad"] if pad else []),
    }
    special = {
        f"{name}_token": token for name, token in _SPECIAL.items() if name in kept
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=128, **special
    )  # type: ignore[no-untyped-call]


def identity_block(module: nn.Module, block: int = 1) -> str:
    """Plant a fault: make a pre-norm block, counted from 1, add nothing; the path of
    the block.

    >>> identity_block(tiny_model("gpt2"), block=2)
    'transformer.h.1'
    """
    path = _block(module, block)
    with torch.no_grad():
        for weight in module.get_submodule(path).parameters():
            weight.zero_()
    return path


def nan_weight(module: nn.Module, block: int = 1) -> str:
    """Plant a fault: put a NaN in the first matrix of a block, counted from 1; the path
    of the weight.

    >>> nan_weight(tiny_model("gpt2"))
    'transformer.h.0.attn.c_attn.weight'
    """
    path = _block(module, block)
    inside = module.get_submodule(path).named_parameters()
    name, weight = next((name, weight) for name, weight in inside if weight.ndim >= 2)
    with torch.no_grad():
        weight.flatten()[0] = float("nan")
    return f"{path}.{name}"


def misreport(
    module: nn.Module, change: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]
) -> nn.Module:
    """Plant a fault: the same module, whose reported `hidden_states` (in its decoder,
    if it has two) are changed.

    >>> module = misreport(tiny_model("gpt2"), lambda states: states[::-1])
    >>> honest, ids = tiny_model("gpt2"), torch.tensor([[7, 8]])
    >>> reported, true = (m(ids, output_hidden_states=True).hidden_states for m in (module, honest))
    >>> torch.equal(reported[0], true[-1])
    True
    """
    true = type(module)

    class Misreporting(true):  # type: ignore[misc, valid-type]
        @wraps(true.forward)
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            for name in ("hidden_states", "decoder_hidden_states"):
                if isinstance(output, Mapping) and output.get(name) is not None:
                    output[name] = change(output[name])  # type: ignore[index]
            return output

    Misreporting.__name__ = true.__name__
    module.__class__ = Misreporting
    return module


@cache
def _table() -> dict[str, Any]:
    """The families: for each the class of its configuration, a class for each task, and
    what is not as by default.
    """
    table: dict[str, Any] = json.loads(
        Path(__file__).with_name("configs.json").read_text("utf-8")
    )
    return table


def _with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The same configuration for another number of layers; a list with one entry a
    layer is gone through again.
    """

    def changed(name: str, value: Any) -> Any:
        if _DEPTH.fullmatch(name):
            return layers
        if isinstance(value, list) and name.endswith("layer_types"):
            return [value[i % len(value)] for i in range(layers)]
        return value

    return {name: changed(name, value) for name, value in config.items()}


def _draw(module: nn.Module, generator: torch.Generator) -> None:
    """Draw every weight anew: matrices that keep the size of what goes through them,
    and vectors near their own.
    """
    with torch.no_grad():
        for weight in module.parameters():
            if not weight.is_floating_point():
                continue
            noise = torch.randn(weight.shape, generator=generator)
            if weight.ndim >= 2:
                weight.copy_(noise * 0.7 / weight.shape[-1] ** 0.5)
            else:
                weight.add_(0.1 * noise)


def _block(module: nn.Module, block: int) -> str:
    """The path of a block in the outermost list of the module."""
    lists = [
        path
        for path, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) >= block
    ]
    return f"{min(lists, key=lambda path: path.count('.'))}.{block - 1}"
