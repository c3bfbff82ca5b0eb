"""States of texts as transformers itself reports them: float64, one text at a time.

Every oracle of an analysis of states reads them here. `layer.k` is an entry of
`hidden_states`; the raw last layer, which these leave out, is what the last block
gives. Nothing is batched, padded or kept.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn

import hiddenscope as hs

# Within a block of these families: what takes in the stream before the MLP, and what
# takes in the neurons.
MLPS = {
    "llama": ("post_attention_layernorm", "mlp.down_proj"),
    "granite": ("post_attention_layernorm", "mlp.down_proj"),
    "gemma3_text": ("pre_feedforward_layernorm", "mlp.down_proj"),
    "gpt2": ("ln_2", "mlp.c_proj"),
    "bert": ("intermediate", "output.dense"),
    "t5": ("layer.-1", "layer.-1.DenseReluDense.wo"),
}
# Here a norm follows the sum, so that the MLP adds what its projection gives.
NORM_AFTER_SUM = ("bert",)
# A token is a sink if it is this many times as long as the median of its text.
SINK = 4.0

_copies: "WeakKeyDictionary[nn.Module, nn.Module]" = WeakKeyDictionary()
# The last runs of a module, by ids and targets: sites are read one by one.
_runs: "WeakKeyDictionary[nn.Module, dict[Any, Any]]" = WeakKeyDictionary()
MOST_RUNS = 64


class Uncovered(LookupError):
    """A question that the oracles of states do not answer."""


class Rows(NamedTuple):
    """The states of a site, token by token, with the text and position of each."""

    values: np.ndarray
    text: np.ndarray
    position: np.ndarray
    ids: np.ndarray


def in_float64(model: Any) -> nn.Module:
    """Return a copy of a model's module in float64, on the CPU."""
    module = model.module
    if module not in _copies:
        copied = copy.deepcopy(module).cpu().double().eval()
        try:
            _try(copied)
        except RuntimeError:
            # Grouped products of experts have no float64.
            copied = copied.float()
        _copies[module] = copied
    return _copies[module]


def _try(module: nn.Module) -> None:
    inputs = {"input_ids": torch.tensor([[5, 6]])}
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.tensor([[5]])
    with torch.no_grad():
        called(module, inputs)


def called(module: nn.Module, inputs: Mapping[str, Any]) -> Any:
    """Run a module; one without a config takes ids and gives logits."""
    if getattr(module, "config", None) is None:
        return module(inputs["input_ids"])
    return module(**inputs)


def encoded(model: Any, texts: Any, truncate: bool = False) -> list[list[int]]:
    """Return the ids of every text: strings, ids, chats or Inputs."""
    if hasattr(texts, "ids"):
        return [list(ids) for ids in texts.ids]
    if hasattr(texts, "labels"):
        texts = texts.texts
    several = listed(texts)
    rows = []
    for text in several:
        if isinstance(text, str):
            ids = model.tokenizer(text)["input_ids"]
        elif isinstance(text[0], Mapping):
            ids = model.tokenizer.apply_chat_template(text, add_generation_prompt=True)
        else:
            ids = list(map(int, text))
        config = getattr(model.module, "config", None)
        window = getattr(config, "max_position_embeddings", None)
        if truncate and window and len(ids) > window:
            ids = model.tokenizer(text, truncation=True, max_length=window)["input_ids"]
        rows.append(list(ids))
    return rows


def listed(texts: Any) -> list[Any]:
    """Return texts as a list, of which a single one is the only entry."""
    if hasattr(texts, "tolist"):
        texts = texts.tolist()
    if isinstance(texts, str):
        return [texts]
    several = list(texts)
    is_chat = bool(several) and isinstance(several[0], Mapping)
    if is_chat or (several and isinstance(several[0], int)):
        return [several]
    return several


def strings(texts: Any) -> list[Any]:
    """Return what each text is told from others by: its string, or its ids."""
    if hasattr(texts, "ids"):
        return list(texts.texts or texts.ids)
    return listed(texts)


def run(
    model: Any, ids: list[int], targets: list[int] | None = None
) -> dict[str, np.ndarray]:
    """Run one text; return every state by its site, and the logits if there are any."""
    module = in_float64(model)
    config = getattr(module, "config", None)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids])}
    if getattr(config, "is_encoder_decoder", False):
        start = [model.module.config.decoder_start_token_id]
        inputs["decoder_input_ids"] = torch.tensor([targets or start])
    if config is not None:
        inputs["output_hidden_states"] = True
    into_head: list[torch.Tensor] = []
    hooks = []
    if config is None:

        def keep(_: nn.Module, given: Any) -> None:
            into_head[:] = given

        hooks.append(_linear(module).register_forward_pre_hook(keep))
    try:
        seen, output = run_module(module, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    states: dict[str, np.ndarray] = {}
    for name, blocks in seen.items():
        entries = entries_of(output, name)
        if not blocks[-1].output.numel():
            # SqueezeBERT calls its blocks past the hooks: its report is all there is.
            blocks, entries = [], entries or ()
        for number, entry in enumerate(entries if not blocks else ()):
            states[f"{name}layer.{number}"] = rows_of(entry)
        if not blocks:
            continue
        raw = blocks[-1].output
        given = targets or [0] if name == "decoder." else ids
        if len(given) not in raw.shape[:2]:
            raise Uncovered("another number of states than of tokens")
        states[f"{name}layer.0"] = rows_of(blocks[0].input)
        for number, block in enumerate(blocks, 1):
            states[f"{name}layer.{number}"] = rows_of(block.output)
            for part, value in block.parts().items():
                states[f"{name}layer.{number}.{part}"] = rows_of(value)
        if config is None:
            # Nothing reports the normed state, but the head is given it.
            states["final"] = rows_of(into_head[-1])
        if entries is None:
            continue
        first = blocks[0].output
        without_embeddings = first.shape == entries[0].shape and first.equal(entries[0])
        if len(entries) == len(blocks) + 1 and not without_embeddings:
            # The model's own report, but for the last entry, which may be normed.
            for number, entry in enumerate(entries[:-1]):
                states[f"{name}layer.{number}"] = rows_of(entry)
        last = entries[-1]
        if last.shape != raw.shape or not torch.equal(last, raw):
            states[f"{name}final"] = rows_of(last)
    logits = getattr(output, "logits", output if config is None else None)
    if logits is not None and logits.ndim == 3:
        states["logits"] = rows_of(logits)
    return states


def _linear(module: nn.Module) -> nn.Module:
    """Return the last linear map of a module, which is the head of a plain one."""
    return [part for part in module.modules() if isinstance(part, nn.Linear)][-1]


def stacks_of(module: nn.Module) -> dict[str, nn.Module]:
    """Return the stacks of a module by the beginning of the names of their sites."""
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return {"encoder.": module.get_encoder(), "decoder.": module.get_decoder()}
    return {"": getattr(module, "base_model", module)}


def run_module(
    module: nn.Module, inputs: Mapping[str, Any]
) -> "tuple[dict[str, list[Block]], Any]":
    """Run a module; return what went through the blocks of every stack, and its output."""
    family = getattr(getattr(module, "config", None), "model_type", "")
    seen = {}
    for name, stack in stacks_of(module).items():
        seen[name] = [Block(block, family) for block in blocks_of(stack)]
    try:
        with torch.no_grad():
            output = called(module, inputs)
    finally:
        for blocks in seen.values():
            for block in blocks:
                block.forget()
    return seen, output


class Block:
    """What goes into one block and comes out, and what its MLP reads and gives."""

    def __init__(self, block: nn.Module, family: str) -> None:
        self.family = family
        self.input = self.output = torch.empty(0)
        self.mid: Any = None
        self.neurons: Any = None
        self.written: Any = None
        self.hooks = [
            block.register_forward_pre_hook(self._enter, with_kwargs=True),
            block.register_forward_hook(self._leave),
        ]
        if family not in MLPS:
            return
        before, down = (inside(block, path) for path in MLPS[family])
        self.hooks.append(before.register_forward_pre_hook(self._before))
        self.hooks.append(down.register_forward_hook(self._down))

    def _enter(self, _: Any, inputs: Any, named: Any) -> None:
        self.input = inputs[0] if inputs else named["hidden_states"]

    def _leave(self, _: Any, inputs: Any, output: Any) -> None:
        self.output = output[0] if isinstance(output, tuple) else output

    def _before(self, _: Any, inputs: Any) -> None:
        self.mid = inputs[0]

    def _down(self, _: Any, inputs: Any, output: Any) -> None:
        self.neurons, self.written = inputs[0], output

    def forget(self) -> None:
        """Take the hooks away."""
        for hook in self.hooks:
            hook.remove()

    def parts(self) -> dict[str, torch.Tensor]:
        """Return the parts of the block that belong to the MLP."""
        if self.neurons is None:
            return {}
        added = self.output - self.mid
        if self.family in NORM_AFTER_SUM:
            added = self.written
        return {"mid": self.mid, "mlp": added, "mlp.neurons": self.neurons}


def inside(block: nn.Module, path: str) -> nn.Module:
    """Return a module within a block; -1 is the last of a list."""
    for name in path.split("."):
        block = block[-1] if name == "-1" else getattr(block, name)  # type: ignore[index]
    return block


def blocks_of(stack: nn.Module) -> list[nn.Module]:
    """Return the blocks of a stack: its longest list of modules, of equals the last."""
    lists = [part for part in stack.modules() if isinstance(part, nn.ModuleList)]
    within = set()
    for several in lists:
        within |= {id(part) for block in several for part in block.modules()}
    outer = [several for several in lists if id(several) not in within]
    return list(max(reversed(outer), key=len))


def entries_of(output: Any, stack: str) -> Any:
    """Return the hidden states that transformers reports, the last one normed."""
    name = f"{stack.rstrip('.')}_hidden_states".lstrip("_")
    entries = getattr(output, name, None)
    if entries is None:
        return None
    last = getattr(
        output, f"{'encoder_' * (stack == 'encoder.')}last_hidden_state", None
    )
    return entries if last is None else (*entries[:-1], last)


def rows_of(state: torch.Tensor) -> np.ndarray:
    """Return the state of the one text, `[token, width]`; streams lie side by side."""
    values = state.detach().double().numpy()
    # XLNet has tokens before texts.
    values = values[0] if len(values) == 1 else values[:, 0]
    return values.reshape(len(values), -1)


def runs(
    model: Any, texts: Any, targets: Any = None, truncate: bool = False
) -> Iterator[tuple[list[int], dict[str, np.ndarray]]]:
    """Yield the ids and the states of every text."""
    every = encoded(model, texts, truncate)
    of_targets: list[Any] = [None] * len(every)
    if targets is None:
        targets = getattr(texts, "targets", None)
    if targets is not None:
        of_targets = targets_of(model, targets, truncate)
    known = _runs.setdefault(model.module, {})
    for ids, target in zip(every, of_targets, strict=True):
        key = tuple(ids), tuple(target or ())
        if key not in known:
            while len(known) >= MOST_RUNS:
                del known[next(iter(known))]
            known[key] = run(model, ids, target)
        yield ids, known[key]


def targets_of(model: Any, targets: Any, truncate: bool = False) -> list[list[int]]:
    """Return what goes into the decoder: ids as they are, and before a string the
    start token.
    """
    every = encoded(model, targets, truncate)
    if hasattr(targets, "ids"):
        return every
    start = model.module.config.decoder_start_token_id
    end = model.tokenizer.eos_token_id if model.tokenizer else None
    rows = []
    for target, ids in zip(listed(targets), every, strict=True):
        if isinstance(target, str):
            ids = [start, *ids[: len(ids) - (ids[-1] == end)]]
        rows.append(ids)
    return rows


def rows_at(
    model: Any,
    texts: Any,
    site: str,
    targets: Any = None,
    truncate: bool = False,
) -> Rows:
    """Return the states of a site, of one text after another."""
    values, text, position, every = [], [], [], []
    if targets is None:
        targets = getattr(texts, "targets", None)
    of_targets: list[list[int]] = []
    if site.startswith("decoder.") and targets is not None:
        of_targets = targets_of(model, targets, truncate)
    for number, (ids, states) in enumerate(runs(model, texts, targets, truncate)):
        if site not in states:
            raise Uncovered(site)
        if of_targets:
            ids = of_targets[number]
        values.append(states[site])
        length = len(states[site])
        text += [number] * length
        position += range(length)
        every += ids if len(ids) == length else [-1] * length
    return Rows(np.concatenate(values), *map(np.array, (text, position, every)))


def pooled(states: np.ndarray, how: Any) -> np.ndarray:
    """Make one vector of the states of a text, `[token, width]`."""
    if how in ("mean", "mean:sinkless"):
        lengths = np.linalg.norm(states, axis=1)
        # Of two middle ones the shorter.
        median = sorted(lengths)[(len(lengths) - 1) // 2]
        total, count = np.zeros(states.shape[1]), 0
        for state, length in zip(states, lengths, strict=True):
            if length <= SINK * median:
                total, count = total + state, count + 1
        return total / count
    if how == "mean:all":
        return states.sum(0) / len(states)
    if how == "max":
        return states.max(0)
    places = {"last": -1, "first": 0, "cls": 0}
    return states[places.get(how, how)]


def vectors(
    model: Any, texts: Any, site: str, pool: Any, truncate: bool = False
) -> np.ndarray:
    """Return one vector for each text, `[text, width]`."""
    made = []
    for _, states in runs(model, texts, truncate=truncate):
        if site not in states:
            raise Uncovered(site)
        made.append(pooled(states[site], pool))
    return np.array(made)


def is_causal(model: Any, stack: str = "") -> bool:
    """Tell whether the state of a token ignores the tokens behind it."""
    if stack == "decoder.":
        return True
    states = [
        run(model, ids)[f"{stack}layer.1"] for ids in ([5, 6, 7, 8, 9], [5, 6, 7, 8, 4])
    ]
    # Experts group tokens, and round them as they are grouped.
    return bool(np.allclose(states[0][:4], states[1][:4], rtol=1e-5, atol=1e-6))


def default_pool(model: Any, sites: list[str]) -> str:
    """Return what stands for a text where nobody says it."""
    stack = sites[0].partition(".")[0] + "."
    if stack not in ("encoder.", "decoder."):
        stack = ""
    return "last" if is_causal(model, stack) else "mean:sinkless"


def sites_of(result: Any) -> list[str]:
    """Return the names of a result's sites."""
    return [str(site) for site in result.data["site"].to_numpy()]


def need_model(model: Any) -> None:
    """Refuse what is no model: the oracles of states compute them from texts."""
    if not isinstance(model, hs.Model):
        raise Uncovered(f"{type(model).__name__} is no model")


def quantile(numbers: Any, share: float) -> float:
    """Return a quantile of the numbers that are finite; NaN of none."""
    finite = sorted(float(number) for number in numbers if np.isfinite(number))
    if not finite:
        return float("nan")
    place = share * (len(finite) - 1)
    low = int(place)
    high = min(low + 1, len(finite) - 1)
    return finite[low] + (place - low) * (finite[high] - finite[low])


def cka(x: np.ndarray, y: np.ndarray) -> float:
    """Return the linear CKA of two sets of states of the same tokens."""
    x, y = x - x.mean(0), y - y.mean(0)
    scale = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    if not scale > 0:
        return float("nan")
    return float(np.linalg.norm(y.T @ x) ** 2 / scale)


def cka_by_chance(x: np.ndarray, y: np.ndarray) -> float:
    """Return the mean CKA over all pairings of the tokens.

    Of the centred Gram matrices K and L of n tokens, permuted against each other, the
    mean of the sum of products is tr K tr L / (n - 1).
    """
    x, y = x - x.mean(0), y - y.mean(0)
    scale = np.linalg.norm(x @ x.T) * np.linalg.norm(y @ y.T)
    if not scale > 0:
        return float("nan")
    return float(np.sum(x**2) * np.sum(y**2) / (len(x) - 1) / scale)


def copy_key(text: Any) -> str:
    """Return the same string for copies: texts equal up to case, space and marks."""
    import unicodedata

    if not isinstance(text, str):
        return str(list(text))
    plain = unicodedata.normalize("NFKC", text).casefold()
    letters = "".join(mark for mark in plain if mark.isalnum())
    return letters or "".join(plain.split())


def groups_of(texts: list[Any], groups: Any = None) -> np.ndarray:
    """Number the groups of texts by their first key: copies belong together."""
    keys = [copy_key(text) for text in texts]
    names = list(range(len(texts))) if groups is None else list(groups)
    part = list(range(len(texts)))
    changed = True
    while changed:
        changed = False
        for i in range(len(texts)):
            for j in range(len(texts)):
                together = keys[i] == keys[j] or names[i] == names[j]
                if together and part[i] != part[j]:
                    part[i] = part[j] = min(part[i], part[j])
                    changed = True
    first_key = dict.fromkeys(part, "")
    for number in first_key:
        first_key[number] = min(
            k for k, p in zip(keys, part, strict=True) if p == number
        )
    order = sorted(set(first_key.values()))
    return np.array([order.index(first_key[number]) for number in part])
