"""Model: a loaded network with its tokenizer, whose states have been proved.

batching     whether texts may go through in padded batches
generation   the states of a text while it is generated
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypedDict, Unpack

import torch
from torch import nn

from hiddenscope import progress
from hiddenscope.arguments import checked, require, shown
from hiddenscope.discovery import (
    Anatomy,
    Stack,
    accepts,
    arguments,
    find,
    still_holds,
    trial_ids,
    vocabulary,
)
from hiddenscope.errors import LoadError, ModuleError, PassError, SiteError, TooLarge
from hiddenscope.loading import Loaded, cache_folder, open_source, parse_dtype
from hiddenscope.loading.size_limit import SizeLimit
from hiddenscope.model import generation
from hiddenscope.model.batching import try_batching
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.slow_dtypes import tell_of_slow_products
from hiddenscope.modules.trials import Memory, Trials, weights_identity
from hiddenscope.modules.weights import Fingerprint, trust_finite
from hiddenscope.passes import (
    EVERYTHING,
    Batching,
    Inputs,
    Keep,
    TextEncoder,
    Texts,
    buffers_for,
    check_targets,
    recordable,
    run,
    states_in,
)
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Source, States

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LIBRARIES = ("hiddenscope", "torch", "transformers", "tokenizers", "safetensors")

WINDOWS = (
    "max_position_embeddings",
    "max_seq_len",
    "max_encoder_position_embeddings",
    "max_target_positions",
)


class LoadNames(TypedDict, total=False):
    """What `load` takes beside its own parameters: the head to load, and transformers'
    names for dtype and device.
    """

    task: str | None
    torch_dtype: str | torch.dtype | None
    device_map: str | torch.device | int | None


@checked
def load(
    source: str | os.PathLike[str] | nn.Module | tuple[nn.Module, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    revision: str | None = None,
    **names: Unpack[LoadNames],
) -> Model:
    """Load a model and prove where its states live: a zoo name, a hub id, a folder, a
    .gguf file or a live module.

    A module comes with its `tokenizer`, as a second argument or as a pair; without one
    it takes lists of ids. `task` chooses a head, such as "causal-lm". `torch_dtype` and
    `device_map` mean `dtype` and `device`, as in transformers.

    >>> from hiddenscope.testing import tiny_model
    >>> load(tiny_model("gpt2")).capture([[5, 6, 7]], "layer.*").values.shape
    torch.Size([4, 3, 64])
    """
    if unknown := set(names) - set(LoadNames.__annotations__):
        raise TypeError(f"load() got an unexpected keyword argument {min(unknown)!r}")
    dtype = _one_of("dtype", dtype, "torch_dtype", names.get("torch_dtype"))
    device = _one_of("device", device, "device_map", _device(names.get("device_map")))
    given = _with_tokenizer(source, tokenizer)
    task = names.get("task")
    loaded = open_source(
        given,
        task=task,
        dtype=dtype,
        device=device,
        attention=attention,
        revision=revision,
    )
    for note in loaded.notes:
        progress.note(f"{loaded.name}: {note}")
    tell_of_slow_products(loaded.module, loaded.name)
    return Model(loaded)


def _one_of(name: str, value: Any, alias: str, other: Any) -> Any:
    """The value of a parameter that has two names."""
    if value is not None and other is not None:
        raise LoadError(
            f"{name} and {alias} were both given",
            "they mean the same thing",
            f"Leave {alias} out.",
        )
    return other if value is None else value


def _device(device_map: Any) -> Any:
    """The device that transformers' `device_map` names."""
    if isinstance(device_map, Mapping) or device_map in (
        "balanced",
        "balanced_low_0",
        "sequential",
    ):
        remedy = (
            "Give 'auto' or one device; or load it with transformers, and give"
            " hs.load(module, tokenizer)."
        )
        raise LoadError("Cannot use this device_map", f"got {device_map!r:.60}", remedy)
    return f"cuda:{device_map}" if isinstance(device_map, int) else device_map


def _with_tokenizer(source: Any, tokenizer: Any) -> Any:
    """A live module as the pair of it and its tokenizer; anything else as it is."""
    if isinstance(source, nn.Module):
        return source, tokenizer
    if tokenizer is not None:
        reason = f"the source is {source!r:.60}, which brings its own"
        raise LoadError(
            "Cannot use this tokenizer", reason, "Give hs.load(module, tokenizer)."
        )
    return source


def as_model(given: ModelLike) -> Model:
    """A model as it is; what `load` takes, loaded. Every analysis reads its first
    argument so.

    >>> from hiddenscope.testing import tiny_model
    >>> as_model((tiny_model("gpt2"), None))
    Model(GPT2LMHeadModel: 3 layers, 64 wide, float32 on cpu)
    """
    model: Model = as_source(given)
    return model


def as_source(given: Any) -> Any:
    """What an analysis may read states from: a model, loaded where it is named; states
    and arrays as they are.
    """
    return load(given) if is_loadable(given) else given


def is_loadable(given: Any) -> bool:
    """Whether `load` takes it: a name, a path, a module or a (module, tokenizer) pair."""
    pair = (
        isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], nn.Module)
    )
    return pair or isinstance(given, str | os.PathLike | nn.Module)


class PassLock:
    """A lock that its thread may take again, and that any thread may give back.

    A generator that holds `hs.editing` may be closed by another thread than the one
    that began it.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._owner: int | None = None
        self._depth = 0

    def acquire(self, blocking: bool = True) -> bool:
        """Take it, once another thread has given it back; whether it was taken."""
        with self._free:
            while self._owner not in (None, threading.get_ident()):
                if not blocking:
                    return False
                self._free.wait()
            self._owner = threading.get_ident()
            self._depth += 1
            return True

    def release(self) -> None:
        """Give it back as often as it was taken."""
        with self._free:
            self._depth -= 1
            if not self._depth:
                self._owner = None
                self._free.notify()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *error: object) -> None:
        self.release()


@checked
class Model:
    """A loaded network with its tokenizer; `module` and `tokenizer` are the user's own
    objects, untouched.

    Passes on one model are made one at a time, whichever thread asks.

    >>> from hiddenscope.testing import tiny_model
    >>> model = load((tiny_model("llama"), None))
    >>> model
    Model(LlamaForCausalLM: 3 layers, 64 wide, float32 on cpu)
    """

    def __init__(self, loaded: Loaded) -> None:
        memory = _memory(loaded)
        if memory is not None and memory.knows("anatomy"):
            trust_finite(loaded.module)
        elif loaded.folder is not None:
            _first_pass(loaded)
        self.module: nn.Module = recordable(loaded.module)
        self._loaded = loaded
        self._text_encoder: TextEncoder | None = None
        self.name, self.revision, self.notes = (
            loaded.name,
            loaded.revision,
            loaded.notes,
        )
        self.sentences = loaded.sentences
        self.lock = PassLock()
        self.trials = Trials(self.module, memory)
        self._anatomy, self._found_in = self._find(), self._weights_dtype
        self.remembered = self.trials.recalled("anatomy")
        self._unchecked = self.remembered
        self.notes += tuple(
            map(
                _note_on_final,
                (stack for stack in self._anatomy.stacks if _final_differs(stack)),
            )
        )
        self.notes += tuple(
            _note_on_earlier(stack)
            for stack in self._anatomy.stacks
            if stack.proof.earlier
        )
        # A broken tokenizer is named when a model is first loaded.
        if not self.remembered:
            _ = self.text_encoder
        self._fingerprint = Fingerprint(
            self.module, lambda compute: self.trials.once("weights", compute, form=str)
        )
        self._batching: Batching | None = None
        _ = self.batching

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | Any | None:
        """The tokenizer of its texts; None where it has none. Of a `remembered` model
        it is read when first used.
        """
        return self.text_encoder.tokenizer

    @property
    def text_encoder(self) -> TextEncoder:
        """What makes ids of texts, within the limits of the model."""
        if self._text_encoder is None:
            with self.lock:
                self._text_encoder = _text_encoder(self, self._loaded.tokenizer)
        return self._text_encoder

    @property
    def anatomy(self) -> Anatomy:
        """Where its states are, with the proof.

        A proof that is `remembered` from an earlier load is made again on one batch
        before it is first used. A module that was moved to another dtype is proved
        anew.
        """
        if self._unchecked:
            with self.lock:
                if self._unchecked:
                    self._unchecked = False
                    self._check_memory()
        return self._known_anatomy()

    def _known_anatomy(self) -> Anatomy:
        """The anatomy in the dtype that the module has now."""
        if self._found_in != self._weights_dtype:
            with self.lock:
                self._anatomy, self._found_in = self._find(), self._weights_dtype
        return self._anatomy

    def _find(self) -> Anatomy:
        return self.trials.once(
            "anatomy", lambda: find(self.module, name=self.name), form=Anatomy
        )

    @property
    def _weights_dtype(self) -> torch.dtype | None:
        weight = next(self.module.parameters(), None)
        return None if weight is None else weight.dtype

    @property
    def batching(self) -> Batching:
        """Whether texts may go through it in padded batches, tried on the module as it
        is configured now.
        """
        if self._batching is not None:
            return self._batching
        return self.trials.once("batching", self._try_batching, form=Batching)

    @batching.setter
    def batching(self, batching: Batching | None) -> None:
        self._batching = batching

    def _try_batching(self) -> Batching:
        with self.lock:
            self._batching = Batching(False, math.inf, "it has not been tried yet")
            try:
                return try_batching(self)
            finally:
                self._batching = None

    def _check_memory(self) -> None:
        """Prove the remembered anatomy on one batch; if it does not hold, forget it and
        find it anew.
        """
        if not still_holds(self.module, self._anatomy):
            self.trials.forget()
            self.remembered = False
            self._anatomy = self._find()

    def __repr__(self) -> str:
        stacks = " and ".join(f"{stack.depth} layers" for stack in self._anatomy.stacks)
        width = self._anatomy.stacks[0].proof.width
        return (
            f"Model({self.name}: {stacks}, {width} wide, {_short(self.dtype)} on"
            f" {self.device})"
        )

    def __reduce__(self) -> NoReturn:
        reason = "it holds a lock and caches that belong to one process"
        remedy = (
            "Copy or save model.module, and load it with hs.load((module, tokenizer))."
        )
        raise ModuleError("Cannot copy or pickle a Model", reason, remedy)

    @property
    def folder(self) -> str | None:
        """The folder that it was read from; None for a live module."""
        return None if self._loaded.folder is None else os.fspath(self._loaded.folder)

    @property
    def device(self) -> torch.device:
        """Where its inputs go."""
        return hooks.input_device(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """What its states are computed in."""
        return self._known_anatomy().stacks[0].proof.dtype

    @property
    def encoder_decoder(self) -> bool:
        """Whether it has an encoder and a decoder beside it, whose texts are called
        targets.
        """
        return len(self._anatomy.stacks) > 1

    @property
    def pad(self) -> int:
        """The id that pads the shorter texts of a batch."""
        return self.text_encoder.pad

    def encode(
        self,
        texts: Texts | Inputs,
        *,
        targets: Texts | Inputs | None = None,
        truncate: bool | int = False,
    ) -> Inputs:
        """Texts as the model takes them: encoded once, for any number of passes. Inputs
        stay as they are.

        In an encoder-decoder `targets` are its decoder's texts, the start token alone
        if not given. `truncate` keeps the first tokens of a longer text: as many as the
        model takes, or at most a given number.

        >>> from hiddenscope.testing import tiny_model
        >>> load((tiny_model("bert"), None)).encode([[5, 6], [7, 8, 9]]).lengths
        [2, 3]
        """
        if targets is not None and not self.encoder_decoder:
            reason = f"{self.name} has one stack, and no decoder beside an encoder"
            raise PassError("Cannot use targets", reason, "Leave `targets` out.")
        with self.lock:  # a tokenizer serves one thread at a time
            inputs = self.text_encoder.encode(texts, truncate=truncate)
            if targets is not None:
                targets = self.text_encoder.encode_targets(
                    targets, len(inputs), truncate=truncate
                )
            elif self.encoder_decoder and inputs.targets is None:
                targets = self.text_encoder.start_tokens(len(inputs))
        return inputs if targets is None else inputs.with_targets(targets)

    def capture(
        self,
        texts: Texts | Inputs,
        sites: SitePatterns = EVERYTHING,
        *,
        targets: Texts | None = None,
        batch_tokens: int | None = None,
        dtype: str | torch.dtype | None = None,
        truncate: bool = False,
        keep: Keep = "host",
    ) -> States | Pair:
        """The states of any number of texts, in the order given, one row for each
        token.

        Texts are batched by length, at most `batch_tokens` at a time. An
        encoder-decoder gives a Pair; `targets` are its decoder's texts, the start token
        alone if not given. `keep="device"` leaves states where they are computed.

        >>> from hiddenscope.testing import tiny_model
        >>> load((tiny_model("bert"), None)).capture([[5, 6], [7, 8, 9]], "layer.-1").tokens.lengths.tolist()
        [2, 3]
        """
        recordable(self.module)
        chosen = self.anatomy.select(sites)
        if not chosen:
            raise PassError(
                "No sites to capture",
                "the list is empty",
                "Name at least one, such as 'layer.*'.",
            )
        if batch_tokens is not None and batch_tokens < 1:
            raise PassError(
                f"batch_tokens must be at least 1, got {batch_tokens}",
                "a text has at least one token",
                "Give a larger number.",
            )
        inputs = self.encode(texts, targets=targets, truncate=truncate)
        check_targets(self, inputs, chosen, logits=False)
        buffers = buffers_for(
            self, chosen, inputs, None if dtype is None else parse_dtype(dtype), keep
        )
        costs = inputs.costs
        with self.lock, progress.track("Capturing", total=sum(costs)) as advance:
            for indices, batch in inputs.batches(self, batch_tokens=batch_tokens):
                run(self, batch.pad(self), indices, buffers)
                advance(sum(costs[index] for index in indices))
        return states_in(buffers)

    def capture_generation(
        self,
        prompt: Texts | Inputs,
        *,
        max_new_tokens: int = 20,
        sites: SitePatterns = EVERYTHING,
        **options: Any,
    ) -> States | Pair:
        """The states of a prompt and of what the model generates after it, each token's
        once, with its cache on.

        `options` go to `generate`, such as `do_sample=True`. An end-of-text token is
        never fed in and has no state.
        """
        recordable(self.module)
        require(max_new_tokens, int, "max_new_tokens", "capture_generation")
        with self.lock:
            inputs = self.text_encoder.encode(prompt)
            if len(inputs) != 1:
                raise PassError(
                    "Cannot record states inside generate",
                    f"got {len(inputs)} prompts",
                    "Give one.",
                )
            refused = generation.refusal(self, inputs.lengths[0] + max_new_tokens)
            if refused:
                remedy = "Generate first, then capture the whole text with capture()."
                raise PassError(
                    f"Cannot record states inside generate of {self.name}",
                    refused,
                    remedy,
                )
            return generation.generate(self, inputs, max_new_tokens, sites, options)

    def source(self, stack: str | None = None, *, checked: bool = False) -> Source:
        """Where the states of a stack come from, for their provenance.

        `checked` is for the end of a pass, whose beginning looked at every weight: they
        are not looked at again.
        """
        own = next(
            (part for part in self._anatomy.stacks if stack in (None, part.name)), None
        )
        if own is None:
            names = ", ".join(repr(part.name) for part in self._anatomy.stacks)
            raise SiteError(
                f"No stack {shown(stack)} in {self.name}",
                f"it has {names}",
                "Name one of them.",
            )
        config: Any = getattr(self.module, "config", None)
        return Source(
            self.name,
            revision=self.revision,
            weights=(
                self._fingerprint.when_checked if checked else self._fingerprint.value
            ),
            dtype=_short(self.dtype),
            device=str(self.device),
            attention=str(getattr(config, "_attn_implementation", None) or "none"),
            versions=_versions(),
            notes=(*self.notes, *_autocast_note(self.device)),
            depth=own.depth,
            final=own.proof.final is not None,
            cls=getattr(self.tokenizer, "cls_token_id", None),
            reported=tuple(
                "" if site is None else str(site)
                for site in self._anatomy.reported(own)
            ),
        )


def _first_pass(loaded: Loaded) -> None:
    """Run a model that came from a file on a few tokens, within limits: its config may
    ask for absurd tensors.
    """
    module = loaded.module
    if (
        getattr(getattr(module, "config", None), "_attn_implementation", None)
        == "flex_attention"
    ):
        return  # it is compiled, and cannot be watched
    try:
        ids = trial_ids(module, 1, 5).to(hooks.input_device(module))
        inputs = arguments(
            module, ids, targets=ids if "decoder_input_ids" in accepts(module) else None
        )
        limit = hooks.dispatching(SizeLimit(module, loaded.name))
        with autograd.restored(), torch.no_grad(), hooks.restoring(module), limit:
            module(**inputs)
    except TooLarge:
        raise
    except Exception:  # what else is wrong with it is said by the search for its states
        return


ModelLike: TypeAlias = (
    Model | str | os.PathLike[str] | nn.Module | tuple[nn.Module, Any]
)
"""A model, or what `load` makes one of: a name, a path, a module or a (module,
tokenizer) pair.
"""


def _memory(loaded: Loaded) -> Memory | None:
    """Where the trials of a model that was read from a folder are remembered; a live
    module has no such place.
    """
    weights = None if loaded.folder is None else weights_identity(loaded.folder)
    if weights is None:
        return None
    module = loaded.module
    weight = next(module.parameters())
    config: Any = getattr(module, "config", None)
    kernel = getattr(config, "_attn_implementation", None)
    place = (
        weight.device.type,
        torch.cuda.get_device_name(weight.device) if weight.is_cuda else "",
    )
    identity = (
        weights,
        type(module).__name__,
        weight.dtype,
        *place,
        kernel,
        sorted(_versions().items()),
    )
    return Memory(cache_folder(), *identity)


def _autocast_note(device: torch.device) -> tuple[str, ...]:
    """What must be said of states that are computed under autocast: products are made
    in a narrower dtype.
    """
    if not torch.is_autocast_enabled(device.type):
        return ()
    return (
        (
            "Computed under torch.autocast to"
            f" {_short(torch.get_autocast_dtype(device.type))}."
        ),
    )


def _text_encoder(
    model: Model, tokenizer: PreTrainedTokenizerBase | None
) -> TextEncoder:
    """The tokenizer of a model with the limits that its configuration gives."""
    config: Any = getattr(model.module, "config", None)
    text: Any = (
        config.get_text_config() if hasattr(config, "get_text_config") else config
    )
    starts = [
        getattr(part, "decoder_start_token_id", None)
        for part in (config, _generation_config(model.module))
    ]
    sizes = [
        getattr(config, name, None) for name in ("tgt_vocab_size", "decoder_vocab_size")
    ]
    size = vocabulary(model.module)
    sizes += [size, getattr(getattr(config, "decoder", None), "vocab_size", None)]
    largest = max(size for size in sizes if isinstance(size, int))
    start = next(
        (start for start in starts if isinstance(start, int) and 0 <= start < largest),
        None,
    )
    pads = [
        getattr(tokenizer, "pad_token_id", None),
        getattr(text, "pad_token_id", None),
    ]
    pads += [getattr(tokenizer, "eos_token_id", None)]
    pad = next((pad for pad in pads if isinstance(pad, int) and 0 <= pad < size), 0)
    target_window = getattr(config, "max_decoder_position_embeddings", None)
    # CANINE makes one molecule of so many characters, and needs one.
    pooled = getattr(config, "downsampling_rate", 1)
    shortest = pooled if isinstance(pooled, int) else 1
    return TextEncoder(
        tokenizer,
        _window(model.module, text),
        size,
        model.name,
        start,
        pad,
        target_window,
        shortest,
    )


def _generation_config(module: nn.Module) -> Any:
    return getattr(module, "generation_config", None)


def _window(module: nn.Module, config: Any) -> int | None:
    """The longest text in tokens: what the configuration says, less the places that a
    table of positions keeps free.

    The RoBERTa family counts positions from the padding token's on, and ProphetNet
    looks one place ahead.
    """
    named = [getattr(config, name, None) for name in WINDOWS]
    limits = [limit for limit in named if isinstance(limit, int) and limit > 0][:1]
    ahead = "prophetnet" in str(getattr(config, "model_type", ""))
    for path, part in module.named_modules():
        table, free = getattr(part, "weight", None), getattr(part, "padding_idx", None)
        if (
            "position" in path.rpartition(".")[2]
            and isinstance(table, torch.Tensor)
            and isinstance(free, int)
        ):
            limits.append(table.shape[0] - free - 1 - ahead)
    return min(limits, default=None)


@cache
def _versions() -> dict[str, str]:
    """The versions of the libraries that decide numbers; one that runs from its sources
    has none.
    """
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _final_differs(stack: Stack) -> bool:
    return stack.proof.final_width not in (None, stack.proof.width)


def _note_on_final(stack: Stack) -> str:
    final, width = stack.proof.final_width, stack.proof.width
    return (
        f"Its final is {final} wide and its layers {width}: `layer.*,final` leaves"
        " final out; ask for it by itself."
    )


def _note_on_earlier(stack: Stack) -> str:
    first, before = stack.blocks[0].path, stack.proof.earlier
    blocks = first.rpartition(".")[0]
    return (
        f"Its layers are those of {blocks}, the list of blocks that it ends with:"
        f" layer.0 is what enters {first}. hidden_states[0] to"
        f" hidden_states[{before - 1}] are states of blocks before that, and have no"
        " site."
    )
