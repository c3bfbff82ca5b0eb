"""Model: a loaded network with its tokenizer, whose states have been proved."""

from __future__ import annotations

import functools
import hashlib
import math
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import nn

from hiddenscope import progress
from hiddenscope.arguments import checked, integer, require, shown
from hiddenscope.discovery import (
    Anatomy,
    Inside,
    accepts,
    arguments,
    find,
    find_inside,
    still_holds,
    target_window,
    text_config,
    trial_ids,
    vocabulary,
    window,
)
from hiddenscope.errors import (
    LoadError,
    ModuleError,
    PassError,
    SiteError,
    TooLarge,
)
from hiddenscope.files import PathLike
from hiddenscope.loading import Loaded, cache_folder, open_source, parse_dtype
from hiddenscope.loading.adapters import base_of
from hiddenscope.loading.size_limit import SizeLimit
from hiddenscope.loading.variants import (
    Adapted,
    ModelVariant,
    Quantised,
    variant_steps,
)
from hiddenscope.model import generation
from hiddenscope.model.batching import try_batching
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.adapters import (
    adapter_settings,
    adapter_weights,
    adapters_on,
    below_adapters,
    has_adapters,
    require_separable,
)
from hiddenscope.modules.module_copy import private_copy, to_random
from hiddenscope.modules.operations import tell_of_slow_products
from hiddenscope.modules.quantised import quantisation_of
from hiddenscope.modules.trials import Memory, Trials, weights_identity
from hiddenscope.modules.weights import (
    Fingerprint,
    devices_of,
    hash_weights,
    trust_finite,
    weight_tensors,
)
from hiddenscope.passes import (
    EVERYTHING,
    Batching,
    Inputs,
    Keep,
    TextEncoder,
    Texts,
    buffers_for,
    check_targets,
    require_recordable,
    run_pass,
    states_in,
)
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import AdapterSource, Pair, Source, States
from hiddenscope.versions import installed_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Loadable: TypeAlias = PathLike | nn.Module | tuple[nn.Module, Any] | ModelVariant
"""What `load` takes: a name, a path, a module, a pair of a module with its tokenizer,
or one of these with adapters or quantised weights.
"""

LIBRARIES = ("hiddenscope", "torch", "transformers", "tokenizers", "safetensors")


@checked
def load(
    source: Loadable | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str
    | torch.device
    | int
    | Mapping[str, str | torch.device | int]
    | None = None,
    attention: str | None = None,
    revision: str | None = None,
    task: str | None = None,
) -> Model:
    """Load a model and prove where its states live.

    The source is a zoo name, a hub id, a folder, a .gguf file or a live module. A
    module comes with its `tokenizer`, as a second argument or as a pair; without one it
    takes lists of ids. `task` chooses a head, such as "causal-lm". `device` is one, or
    "auto", or a map of module names to devices, of which "disk" is one.

    >>> from hiddenscope.testing import tiny_model
    >>> load(tiny_model("gpt2")).capture([[5, 6, 7]], "layer.*").values.shape
    torch.Size([4, 3, 64])
    """
    if isinstance(source, nn.Module):
        source = (source, tokenizer)
    elif tokenizer is not None:
        raise LoadError(
            "Cannot use this tokenizer",
            f"the source is {source!r:.60}, which brings its own",
            "Give hs.load(module, tokenizer).",
        )
    # As in transformers, a number is that of a GPU.
    if isinstance(device, int):
        device = f"cuda:{device}"
    loaded = open_source(
        source,
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


def as_model(source: ModelLike) -> Model:
    """Return a model, loaded unless it is one already.

    Every analysis reads its first argument like this.

    >>> from hiddenscope.testing import tiny_model
    >>> as_model((tiny_model("gpt2"), None))
    Model(GPT2LMHeadModel: 3 layers, 64 wide, float32 on cpu)
    """
    if isinstance(source, Model):
        return source
    model: Model = as_source(source)
    return model


def as_source(source: Any) -> Any:
    """Return what an analysis reads states from.

    A model is loaded where it is named; states and arrays stay as they are.
    """
    return load(source) if is_loadable(source) else source


def is_loadable(source: object) -> bool:
    """Tell whether `load` takes it: a name, a path, a module or a pair with one."""
    if isinstance(source, tuple):
        return len(source) == 2 and isinstance(source[0], nn.Module)
    return isinstance(source, str | os.PathLike | nn.Module | Adapted | Quantised)


@checked
class Model:
    """A loaded network with its tokenizer.

    `module` and `tokenizer` are the user's own objects, untouched. Passes on one model
    are made one at a time, whichever thread makes them.

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
        self.module: nn.Module = require_recordable(loaded.module)
        self._loaded = loaded
        self._text_encoder: TextEncoder | None = None
        self.name = loaded.name
        self.revision = loaded.revision
        self.sentences = loaded.sentences
        # One of Python's own: an interrupt never leaves it half-way.
        self.lock = threading.RLock()
        self.trials = Trials(self.module, memory)
        self._anatomy = self._find()
        # Whether it has an encoder and a decoder, whose texts are targets.
        self.encoder_decoder = len(self._anatomy.stacks) > 1
        self._anatomy_dtype = next(self.module.parameters()).dtype
        self.remembered = self.trials.recalled("anatomy")
        self._unchecked = self.remembered
        # Note where `final` is of another width, or layers before the first are
        # hidden.
        notes = []
        for stack in self._anatomy.stacks:
            final, width = stack.proof.final_width, stack.proof.width
            if final not in (None, width):
                notes.append(
                    f"Its final is {final} wide and its layers {width}: `layer.*,final`"
                    " leaves final out; ask for it by itself."
                )
            if stack.proof.earlier:
                first = stack.blocks[0].path
                notes.append(
                    f"Its layers are those of {first.rpartition('.')[0]}, the list of"
                    f" blocks that it ends with: layer.0 is what enters {first}."
                    f" hidden_states[0] to hidden_states[{stack.proof.earlier - 1}] are"
                    " states of blocks before that, and have no site."
                )
        self.notes = (*loaded.notes, *notes)
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
        """Return the tokenizer; None for a model without one.

        That of a `remembered` model is read when it is first used.
        """
        return self.text_encoder.tokenizer

    @property
    def text_encoder(self) -> TextEncoder:
        """Return the encoder that turns texts into ids."""
        if self._text_encoder is None:
            with self.lock:
                self._text_encoder = _text_encoder(self._loaded, self.module)
        return self._text_encoder

    @property
    def anatomy(self) -> Anatomy:
        """Return where the states are, with the proof.

        A proof that is `remembered` from an earlier load is made again on one batch
        before it is first used. A module that was moved to another dtype is proved
        again.
        """
        if self._unchecked:
            with self.lock:
                if self._unchecked:
                    self._unchecked = False
                    if not still_holds(self.module, self._anatomy):
                        self.trials.forget()
                        self.remembered = False
                        self._anatomy = self._find()
        return self._current_anatomy()

    def _current_anatomy(self) -> Anatomy:
        """Return the anatomy in the dtype that the module has now."""
        weight = next(self.module.parameters(), None)
        if weight is not None and weight.dtype != self._anatomy_dtype:
            with self.lock:
                self._anatomy = self._find()
                self._anatomy_dtype = weight.dtype
        return self._anatomy

    def _find(self) -> Anatomy:
        anatomy = self.trials.once(
            "anatomy", lambda: find(self.module, name=self.name), form=Anatomy
        )

        def inside() -> Inside:
            # A part that was exchanged for one of another kind is looked into again.
            parts = hooks.parts_of(self.module).items()
            kinds = tuple((path, type(part).__name__) for path, part in parts)
            with self.lock:
                return self.trials.once(
                    "inside",
                    lambda: find_inside(self.module, anatomy),
                    key=kinds,
                    form=Inside,
                )

        return anatomy.with_inside(inside)

    @property
    def batching(self) -> Batching:
        """Return whether texts may share padded batches, tried on the module."""
        if self._batching is not None:
            return self._batching

        def attempt() -> Batching:
            with self.lock:
                # The trial makes passes, and they ask for this.
                self._batching = Batching(False, math.inf, "it has not been tried yet")
                try:
                    return try_batching(self)
                finally:
                    self._batching = None

        return self.trials.once("batching", attempt, form=Batching)

    @batching.setter
    def batching(self, batching: Batching | None) -> None:
        self._batching = batching

    def __repr__(self) -> str:
        stacks = " and ".join(f"{stack.depth} layers" for stack in self._anatomy.stacks)
        width = self._anatomy.stacks[0].proof.width
        dtype = _dtype_name(self.dtype)
        return f"Model({self.name}: {stacks}, {width} wide, {dtype} on {self.device})"

    def __reduce__(self) -> NoReturn:
        raise ModuleError(
            "Cannot copy or pickle a Model",
            "it holds a lock and caches that belong to one process",
            "Copy or save model.module, and load it with hs.load((module, tokenizer)).",
        )

    @property
    def folder(self) -> str | None:
        """Return the folder that it was read from; None for a live module."""
        return None if self._loaded.folder is None else os.fspath(self._loaded.folder)

    @property
    def variant(self) -> ModelVariant | None:
        """Return the adapters or the scheme that it was loaded with, if any."""
        return self._loaded.variant

    @property
    def device(self) -> torch.device:
        """Return the device of its inputs."""
        return hooks.input_device(self.module)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of its states."""
        return self._current_anatomy().stacks[0].proof.dtype

    def without_adapters(self) -> Model:
        """Return the model below its PEFT adapters, as a model of its own.

        It shares all weights, and the adapters of this one stay as they are: other
        threads do not see them switched off.

        >>> from hiddenscope.testing import tiny_model
        >>> load(tiny_model("gpt2")).without_adapters()  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hiddenscope.errors.ModuleError: Cannot use GPT2LMHeadModel without its ...
        """
        with self.lock:
            adapted = self._loaded.adapted
            altered = adapted.altered if adapted is not None else ""
            require_separable(self.module, self.name, altered)
            below = below_adapters(self.module)
        return Model(base_of(self._loaded, below))

    def randomised(self, seed: int = 0) -> Model:
        """Return a copy of the model with random weights, as a control.

        Every matrix is drawn again, normal with the spread that it has; vectors, such
        as biases and the gains of norms, stay. The weights of this one stay as they
        are, and where the states of the copy live is proved anew.

        >>> from hiddenscope.testing import tiny_model
        >>> load(tiny_model("gpt2")).randomised(seed=1)  # doctest: +ELLIPSIS
        Model(GPT2LMHeadModel with random weights (seed 1): 3 layers, 64 wide, ...)
        """
        with self.lock:
            drawn = private_copy(self.module, to_random(seed))
        name = f"{self.name} with random weights (seed {seed})"
        # Nothing that was tried on the trained weights, or read from their files, holds
        # for these.
        control = replace(
            self._loaded,
            module=drawn,
            name=name,
            revision=None,
            folder=None,
            sentences=None,
            variant=None,
            adapted=None,
        )
        return Model(control)

    @property
    def pad(self) -> int:
        """Return the id that pads the shorter texts of a batch."""
        return self.text_encoder.pad

    def encode(
        self,
        texts: Texts | Inputs,
        *,
        targets: Texts | Inputs | None = None,
        truncate: bool | int = False,
    ) -> Inputs:
        """Encode texts once, for any number of passes; Inputs stay as they are.

        In an encoder-decoder `targets` are its decoder's texts, by default the start
        token alone. `truncate` keeps the first tokens of a longer text: as many as the
        model takes, or at most the number.

        >>> from hiddenscope.testing import tiny_model
        >>> load((tiny_model("bert"), None)).encode([[5, 6], [7, 8, 9]]).lengths
        [2, 3]
        """
        if targets is not None and not self.encoder_decoder:
            raise PassError(
                "Cannot use targets",
                f"{self.name} has one stack, and no decoder beside an encoder",
                "Leave `targets` out.",
            )
        # A tokenizer serves one thread at a time.
        with self.lock:
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
        """Return the states of any number of texts, in order, one row for each token.

        Texts are batched by length, at most `batch_tokens` at a time. An
        encoder-decoder gives a Pair; `targets` are its decoder's texts, by default the
        start token alone. `keep="device"` leaves states where they are computed.

        >>> from hiddenscope.testing import tiny_model
        >>> model = load((tiny_model("bert"), None))
        >>> model.capture([[5, 6], [7, 8, 9]], "layer.-1").tokens.lengths.tolist()
        [2, 3]
        """
        require_recordable(self.module)
        selected = self._select(sites)
        if batch_tokens is not None:
            integer(batch_tokens, "batch_tokens", 1)
        inputs = self.encode(texts, targets=targets, truncate=truncate)
        check_targets(self, inputs, selected, logits=False)
        kept_dtype = None if dtype is None else parse_dtype(dtype)
        buffers = buffers_for(self, selected, inputs, kept_dtype, keep)
        costs = inputs.costs
        with self.lock, progress.track("Capturing", total=sum(costs)) as advance:
            for indices, batch in inputs.batches(self, batch_tokens=batch_tokens):
                run_pass(self, batch.pad(self), indices, buffers)
                advance(sum(costs[index] for index in indices))
        return states_in(buffers)

    def _select(self, sites: SitePatterns) -> tuple[Site, ...]:
        """Return the sites to capture, at least one."""
        selected = self.anatomy.select(sites)
        if not selected:
            raise PassError(
                "No sites to capture",
                "the list is empty",
                "Name at least one, such as 'layer.*'.",
            )
        return selected

    def capture_generation(
        self,
        prompt: Texts | Inputs,
        *,
        max_new_tokens: int = 20,
        sites: SitePatterns = EVERYTHING,
        **options: Any,
    ) -> States | Pair:
        """Return the states of a prompt and of the text that the model generates.

        Each token's state is recorded once, with the model's cache on. `options` go to
        `generate`, such as `do_sample=True`. An end-of-text token is never read by the
        model and has no state.
        """
        require_recordable(self.module)
        require(max_new_tokens, int, "max_new_tokens", "capture_generation")
        self._select(sites)
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
                raise PassError(
                    f"Cannot record states inside generate of {self.name}",
                    refused,
                    "Generate first, then capture the whole text with capture().",
                )
            return generation.generate(self, inputs, max_new_tokens, sites, options)

    def source(self, stack: str | None = None, *, checked: bool = False) -> Source:
        """Return where the states of a stack come from, for their provenance.

        With `checked` the weights are not looked at again: it is for the end of a pass,
        at whose start they were.
        """
        names = [part.name for part in self._anatomy.stacks]
        if stack is not None and stack not in names:
            raise SiteError(
                f"No stack {shown(stack)} in {self.name}",
                f"it has {', '.join(map(repr, names))}",
                "Name one of them.",
            )
        selected = self._anatomy.stack_named(stack)
        fingerprint = self._fingerprint
        weights = fingerprint.when_checked if checked else fingerprint.value
        notes = fingerprint.notes
        # To look at every part takes as long as some layers of a small model.
        if not notes:
            # The device of the inputs comes before others that hold weights.
            places = dict.fromkeys([str(self.device), *devices_of(self.module)])
            notes["places"] = ", ".join(places)
            notes["quantisation"] = quantisation_of(self.module)
            # PEFT adds weights, and so empties the notes.
            notes["has adapters"] = "yes" if has_adapters(self.module) else ""
        base_weights = ""
        adapters: tuple[AdapterSource, ...] = ()
        if notes["has adapters"]:
            adapted = self._loaded.adapted
            folders = adapted.adapters if adapted is not None else ()
            base_weights, adapters = adapter_sources(self.module, notes, folders)
        config: Any = getattr(self.module, "config", None)
        source_notes = self.notes
        kind = self.device.type
        if torch.is_autocast_enabled(kind):
            # Products are computed in a narrower dtype.
            narrow = _dtype_name(torch.get_autocast_dtype(kind))
            source_notes += (f"Computed under torch.autocast to {narrow}.",)
        return Source(
            self.name,
            revision=self.revision,
            weights=weights,
            dtype=_dtype_name(self.dtype),
            device=notes["places"],
            attention=str(getattr(config, "_attn_implementation", None) or "none"),
            versions=_versions(),
            notes=source_notes,
            depth=selected.depth,
            final=selected.proof.final is not None,
            cls=getattr(self.tokenizer, "cls_token_id", None),
            reported=self._anatomy.reported_names(selected),
            base_weights=base_weights,
            adapters=adapters,
            quantisation=notes["quantisation"],
            causal=selected.causal,
        )


ModelLike: TypeAlias = Model | Loadable
"""A model, or a source that `load` takes."""


def _first_pass(loaded: Loaded) -> None:
    """Run a model from a file on a few tokens, within limits.

    Its config may ask for absurd tensors.
    """
    module = loaded.module
    config = getattr(module, "config", None)
    # Flex attention is compiled, and a limit cannot see into compiled code.
    if getattr(config, "_attn_implementation", None) == "flex_attention":
        return
    try:
        ids = trial_ids(module, 1, 5).to(hooks.input_device(module))
        targets = ids if "decoder_input_ids" in accepts(module) else None
        inputs = arguments(module, ids, targets=targets)
        limit = hooks.dispatching(SizeLimit(module, loaded.name))
        with autograd.restored(), torch.no_grad(), hooks.restoring(module), limit:
            module(**inputs)
    except TooLarge:
        raise
    except Exception:
        # The search for its states says what else is wrong with it.
        return


def _memory(loaded: Loaded) -> Memory | None:
    """Return where the trials of a model are remembered; None for a live module."""
    if loaded.folder is None:
        return None
    weights = weights_identity(loaded.folder)
    if weights is None:
        return None
    # Files of an adapter may change while their folder keeps its name.
    adapters = []
    for step in variant_steps(loaded.variant):
        for folder in step.get("adapters", ()):
            adapters.append(weights_identity(Path(folder)))
    weight = next(loaded.module.parameters())
    config: Any = getattr(loaded.module, "config", None)
    scheme = quantisation_of(loaded.module)
    return Memory(
        cache_folder(),
        weights,
        loaded.variant,
        adapters,
        type(loaded.module).__name__,
        weight.dtype,
        weight.device.type,
        torch.cuda.get_device_name(weight.device) if weight.is_cuda else "",
        getattr(config, "_attn_implementation", None),
        sorted(_versions().items()),
        # The same files may be quantised, or spread over devices, while they are
        # loaded.
        scheme,
        installed_version(scheme.partition(" ")[0]) if scheme else "",
        devices_of(loaded.module),
    )


def _text_encoder(loaded: Loaded, module: nn.Module) -> TextEncoder:
    """Return the encoder of a model's texts, within the limits of its configuration."""
    tokenizer = loaded.tokenizer
    config: Any = getattr(module, "config", None)
    size = vocabulary(module)
    pads = (
        getattr(tokenizer, "pad_token_id", None),
        getattr(text_config(module), "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    # A decoder may have a larger vocabulary than the encoder.
    sizes = (
        size,
        getattr(config, "tgt_vocab_size", None),
        getattr(config, "decoder_vocab_size", None),
        getattr(getattr(config, "decoder", None), "vocab_size", None),
    )
    largest = max(number for number in sizes if isinstance(number, int))
    # The id that opens a decoder's text; None where nothing names it.
    starts = []
    for part in (config, getattr(module, "generation_config", None)):
        starts.append(getattr(part, "decoder_start_token_id", None))
    # CANINE pools this many characters into one position, and needs at least one.
    shortest = getattr(config, "downsampling_rate", 1)
    return TextEncoder(
        tokenizer,
        window(module),
        size,
        loaded.name,
        start=_first_id(starts, largest),
        pad=_first_id(pads, size) or 0,
        target_window=target_window(module),
        shortest=shortest if isinstance(shortest, int) else 1,
    )


def _first_id(ids: Iterable[object], size: int) -> int | None:
    """Return the first id that is in a vocabulary of this size."""
    for token in ids:
        if isinstance(token, int) and 0 <= token < size:
            return token
    return None


def adapter_sources(
    module: nn.Module, hashes: dict[str, str], folders: Sequence[str] = ()
) -> tuple[str, tuple[AdapterSource, ...]]:
    """Return the hash of a model's base and the source of each of its adapters.

    The base has the hash that it would have by itself; what is below merged adapters is
    not known, and has none. `hashes` keeps what was computed, and is to be emptied when
    a weight changes. `folders` name where the adapters come from, in their order.
    """
    if not has_adapters(module):
        return "", ()
    adapters = adapters_on(module)
    if len(folders) != len(adapters):
        folders = [adapter.name for adapter in adapters]
    if "base" not in hashes:
        hashes["base"] = hash_weights(list(weight_tensors(below_adapters(module))))
    sources = []
    for adapter, name in zip(adapters, folders, strict=True):
        key = f"adapter {adapter.name}"
        if key not in hashes:
            hashes[key] = hash_weights(adapter_weights(module, adapter.name))
        both = f"{hashes[key]} {adapter_settings(module, adapter)}"
        digest = hashlib.sha256(both.encode()).hexdigest()
        sources.append(
            AdapterSource(
                name,
                adapter.kind,
                f"sha256:{digest}",
                adapter.strength,
                adapter.is_merged,
            )
        )
    is_merged = any(adapter.is_merged for adapter in adapters)
    return "" if is_merged else hashes["base"], tuple(sources)


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that decide numbers."""
    return {name: installed_version(name) for name in LIBRARIES}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
