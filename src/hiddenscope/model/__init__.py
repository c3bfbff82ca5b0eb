"""Model: a loaded network with its tokenizer, whose states have been proved.

fingerprint  a hash by which its weights are known again
batching     which texts go through together, and whether they may
generation   the states of a text while it is written
"""

from __future__ import annotations

import math
import threading
from functools import cache, cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hiddenscope import hooks, progress
from hiddenscope.anatomy import Anatomy, Stack, find, vocabulary
from hiddenscope.errors import PassError
from hiddenscope.loading import Loaded, open_source
from hiddenscope.model import batching, generation
from hiddenscope.model.batching import Batching
from hiddenscope.model.fingerprint import Fingerprint
from hiddenscope.passes import EVERYTHING, Encoder, Texts, landings, make_batch, run, together, watchable
from hiddenscope.states import Pair, Source, States

if TYPE_CHECKING:
    import os

    from transformers import PreTrainedTokenizerBase

LIBRARIES = ("hiddenscope", "torch", "transformers", "tokenizers", "safetensors")
WINDOWS = ("max_position_embeddings", "max_seq_len", "max_encoder_position_embeddings", "max_target_positions")
BUDGETS = {"cpu": 2048, "cuda": 16384}
# What a batch costs whatever is in it, in tokens: measured on a CPU, guessed on a GPU.
ANOTHER_BATCH = {"cpu": 64, "cuda": 2048}


def load(
    source: str | os.PathLike[str] | tuple[nn.Module, PreTrainedTokenizerBase | None] | None = None,
    *,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    revision: str | None = None,
) -> Model:
    """Load a model and prove where its states live: a zoo name, a hub id, a folder, a .gguf, or (module, tokenizer).

    >>> from hiddenscope.testing import tiny_model
    >>> load((tiny_model("gpt2"), None)).capture([[5, 6, 7]], "layer.*").values.shape
    torch.Size([4, 3, 64])
    """
    loaded = open_source(source, task=task, dtype=dtype, device=device, attention=attention, revision=revision)
    for note in loaded.notes:
        progress.note(f"{loaded.name}: {note}")
    return Model(loaded)


class Model:
    """A loaded network with its tokenizer; `module` and `tokenizer` are the user's own objects, untouched.

    Passes on one model are made one at a time, whichever thread asks.

    >>> from hiddenscope.testing import tiny_model
    >>> model = load((tiny_model("llama"), None))
    >>> model
    Model(LlamaForCausalLM: 3 layers, 64 wide, float32 on cpu)
    """

    def __init__(self, loaded: Loaded) -> None:
        self.module: nn.Module = watchable(loaded.module)
        self.tokenizer = loaded.tokenizer
        self.name, self.revision, self.notes = loaded.name, loaded.revision, loaded.notes
        self.lock = threading.RLock()
        self.anatomy: Anatomy = find(self.module, name=self.name)
        self.notes += tuple(map(_of_another_width, (s for s in self.anatomy.stacks if _differs(s))))
        self.encoder = _encoder(self)
        self._fingerprint = Fingerprint(self.module)
        self.batching = Batching(False, math.inf, "not tried yet")
        self.batching = batching.check(self)

    def __repr__(self) -> str:
        stacks = " and ".join(f"{stack.depth} layers" for stack in self.anatomy.stacks)
        width = self.anatomy.stacks[0].proof.width
        return f"Model({self.name}: {stacks}, {width} wide, {_short(self.dtype)} on {self.device})"

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return hooks.input_device(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """What its states are computed in."""
        return self.anatomy.stacks[0].proof.dtype

    @property
    def batches(self) -> bool:
        """Whether a text in a padded batch gives what it gives alone."""
        return self.batching.padded

    @property
    def turn(self) -> int | None:
        """The length beyond which every text of a batch is computed otherwise, if there is one."""
        return self.batching.turn

    @property
    def masks(self) -> bool:
        """Whether texts of one length must carry a mask."""
        return self.batching.masked

    def capture(
        self,
        texts: Texts,
        sites: Any = EVERYTHING,
        *,
        targets: Texts | None = None,
        batch_tokens: int | None = None,
        dtype: torch.dtype | None = None,
        truncate: bool = False,
    ) -> States | Pair:
        """The states of any number of texts, in the order given, one row for each token.

        Texts are batched by length, at most `batch_tokens` at a time. An encoder-decoder gives a Pair; `targets` are
        its decoder's texts, the start token alone if not given.

        >>> from hiddenscope.testing import tiny_model
        >>> load((tiny_model("bert"), None)).capture([[5, 6], [7, 8, 9]], "layer.-1").tokens.lengths.tolist()
        [2, 3]
        """
        watchable(self.module)
        wanted = self.anatomy.select(sites)
        if batch_tokens is not None and batch_tokens < 1:
            raise PassError(f"Batches of {batch_tokens} tokens", "a text has at least one", "Give a larger number.")
        with self.lock:  # a tokenizer serves one thread at a time
            encoded = self.encoder.encode(texts, truncate=truncate)
        two = len(self.anatomy.stacks) > 1
        if targets is not None and not two:
            raise PassError("Targets for a decoder", f"{self.name} has one stack", "Leave `targets` out.")
        aims = self.encoder.targets(targets, len(encoded.ids), truncate=truncate) if two else None
        landed = landings(self, wanted, encoded, aims, dtype)
        kind = self.device.type if self.device.type in BUDGETS else "cpu"
        budget, another = batch_tokens or BUDGETS[kind], ANOTHER_BATCH[kind]
        lengths = (
            encoded.lengths if aims is None else [sum(pair) for pair in zip(encoded.lengths, aims.lengths, strict=True)]
        )
        with self.lock, progress.track("Capturing", total=sum(lengths)) as advance:
            for numbers in batching.plan(
                lengths, budget, padded=self.batches, turn=self.batching.turn, another=another
            ):
                run(self, make_batch(self, encoded, aims, numbers), numbers, landed)
                advance(sum(lengths[number] for number in numbers))
        return together(landed)

    def capture_generation(
        self, prompt: Texts, *, max_new_tokens: int = 20, sites: Any = EVERYTHING, **options: Any
    ) -> States | Pair:
        """The states of a prompt and of what the model writes after it, each token's once, with its cache on.

        `options` go to `generate`, such as `do_sample=True`. An end-of-text token is never fed in and has no state.
        """
        watchable(self.module)
        with self.lock:
            if self._generation:
                remedy = "Generate first, then capture the whole text with capture()."
                raise PassError(f"States from inside generate of {self.name}", self._generation, remedy)
            encoded = self.encoder.encode(prompt)
            if len(encoded.ids) != 1:
                raise PassError("States from inside generate", f"{len(encoded.ids)} prompts were given", "Give one.")
            return generation.generate(self, encoded, max_new_tokens, sites, options)

    def source(self, stack: str | None = None) -> Source:
        """Where the states of a stack come from, for their provenance."""
        found = next(part for part in self.anatomy.stacks if stack in (None, part.name))
        config: Any = getattr(self.module, "config", None)
        return Source(
            self.name,
            revision=self.revision,
            weights=self._fingerprint.value,
            dtype=_short(self.dtype),
            device=str(self.device),
            attention=str(getattr(config, "_attn_implementation", None) or "none"),
            versions=_versions(),
            notes=self.notes,
            depth=found.depth,
            final=found.proof.final is not None,
            cls=getattr(self.tokenizer, "cls_token_id", None),
            reported=tuple("" if site is None else str(site) for site in self.anatomy.reported(found)),
        )

    @cached_property
    def _generation(self) -> str:
        """Why states from inside `generate` are refused; empty if they are not."""
        return generation.check(self)


def _encoder(model: Model) -> Encoder:
    """The encoder of a model's texts, with the limits its configuration gives."""
    config: Any = getattr(model.module, "config", None)
    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    starts = [getattr(part, "decoder_start_token_id", None) for part in (config, _generation_config(model.module))]
    start = next((start for start in starts if isinstance(start, int)), None)
    pads = [getattr(model.tokenizer, "pad_token_id", None), getattr(text, "pad_token_id", None)]
    pads += [getattr(model.tokenizer, "eos_token_id", None)]
    size = vocabulary(model.module)
    pad = next((pad for pad in pads if isinstance(pad, int) and 0 <= pad < size), 0)
    target_window = getattr(config, "max_decoder_position_embeddings", None)
    return Encoder(model.tokenizer, _window(model.module, text), size, model.name, start, pad, target_window)


def _generation_config(module: nn.Module) -> Any:
    return getattr(module, "generation_config", None)


def _window(module: nn.Module, config: Any) -> int | None:
    """The longest text in tokens: what the configuration says, less the places that a table of positions keeps free.

    The RoBERTa family counts positions from the padding token's on, and ProphetNet looks one place ahead.
    """
    named = [getattr(config, name, None) for name in WINDOWS]
    limits = [limit for limit in named if isinstance(limit, int) and limit > 0][:1]
    ahead = "prophetnet" in str(getattr(config, "model_type", ""))
    for path, part in module.named_modules():
        table, free = getattr(part, "weight", None), getattr(part, "padding_idx", None)
        if "position" in path.rpartition(".")[2] and isinstance(table, torch.Tensor) and isinstance(free, int):
            limits.append(table.shape[0] - free - 1 - ahead)
    return min(limits, default=None)


@cache
def _versions() -> dict[str, str]:
    """The versions of the libraries that decide numbers; one that runs from its sources has none."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _differs(stack: Stack) -> bool:
    return stack.proof.final_width not in (None, stack.proof.width)


def _of_another_width(stack: Stack) -> str:
    final, width = stack.proof.final_width, stack.proof.width
    return f"Its final is {final} wide and its layers {width}: `layer.*,final` leaves final out; ask for it by itself."
