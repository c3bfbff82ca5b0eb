"""Model: a loaded network with its tokenizer, whose states have been proved."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from torch import nn

from hiddenscope import progress
from hiddenscope.arguments import checked, integer, renamed, require, shown
from hiddenscope.discovery import (
    Anatomy,
    Inside,
    Stack,
    accepts,
    arguments,
    find,
    find_inside,
    still_holds,
    trial_ids,
)
from hiddenscope.errors import (
    LoadError,
    ModuleError,
    PassError,
    SiteError,
    TooLarge,
)
from hiddenscope.loading import Loaded, cache_folder, open_source, parse_dtype
from hiddenscope.loading.adapters import base_of
from hiddenscope.loading.size_limit import SizeLimit
from hiddenscope.loading.variants import Adapted, ModelVariant, Quantised
from hiddenscope.model import generation
from hiddenscope.model.batching import try_batching
from hiddenscope.model.lock import PassLock
from hiddenscope.model.provenance import AdapterProvenance
from hiddenscope.model.text_limits import text_encoder
from hiddenscope.modules import autograd, hooks
from hiddenscope.modules.adapters import below_adapters, require_separable
from hiddenscope.modules.offload import devices_of
from hiddenscope.modules.quantised import quantisation_of
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
    require_recordable,
    run_pass,
    states_in,
)
from hiddenscope.sites import SitePatterns
from hiddenscope.states import Pair, Source, States
from hiddenscope.versions import installed_version

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Loadable: TypeAlias = (
    str | os.PathLike[str] | nn.Module | tuple[nn.Module, Any] | ModelVariant
)
"""What `load` takes: a name, a path, a module, a pair of a module with its tokenizer,
or one of these with adapters or quantised weights.
"""

LIBRARIES = ("hiddenscope", "torch", "transformers", "tokenizers", "safetensors")


@checked
@renamed(
    {
        "torch_dtype": "Give dtype=.",
        "load_in_8bit": "Give hs.load(hs.Quantised(source, 'bnb-int8')).",
        "load_in_4bit": "Give hs.load(hs.Quantised(source, 'nf4')).",
        "quantization_config": "Give hs.load(hs.Quantised(source, 'nf4')).",
    },
    torch_dtype="dtype",
    device_map="device",
    attn_implementation="attention",
    load_in_8bit="hs.Quantised",
    load_in_4bit="hs.Quantised",
    quantization_config="hs.Quantised",
)
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
        self.lock = PassLock()
        self.trials = Trials(self.module, memory)
        self._anatomy = self._find()
        self._anatomy_dtype = self._weights_dtype
        self.remembered = self.trials.recalled("anatomy")
        self._unchecked = self.remembered
        self.notes = (*loaded.notes, *_notes_on(self._anatomy))
        # A broken tokenizer is named when a model is first loaded.
        if not self.remembered:
            _ = self.text_encoder
        self._fingerprint = Fingerprint(
            self.module, lambda compute: self.trials.once("weights", compute, form=str)
        )
        adapted = loaded.adapted
        names = adapted.adapters if adapted is not None else ()
        self._adapters = AdapterProvenance(self.module, names)
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
                self._text_encoder = text_encoder(
                    self.module, self._loaded.tokenizer, self.name
                )
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
        if self._anatomy_dtype != self._weights_dtype:
            with self.lock:
                self._anatomy = self._find()
                self._anatomy_dtype = self._weights_dtype
        return self._anatomy

    def _find(self) -> Anatomy:
        anatomy = self.trials.once(
            "anatomy", lambda: find(self.module, name=self.name), form=Anatomy
        )

        def inside() -> Inside:
            kinds = []
            # A part that was exchanged for one of another kind is looked into again.
            for path, part in hooks.parts_of(self.module).items():
                kinds.append((path, type(part).__name__))
            with self.lock:
                return self.trials.once(
                    "inside",
                    lambda: find_inside(self.module, anatomy),
                    key=tuple(kinds),
                    form=Inside,
                )

        return anatomy.with_inside(inside)

    @property
    def _weights_dtype(self) -> torch.dtype | None:
        weight = next(self.module.parameters(), None)
        return None if weight is None else weight.dtype

    @property
    def batching(self) -> Batching:
        """Return whether texts may share padded batches, tried on the module."""
        if self._batching is not None:
            return self._batching
        return self.trials.once("batching", self._try_batching, form=Batching)

    @batching.setter
    def batching(self, batching: Batching | None) -> None:
        self._batching = batching

    def _try_batching(self) -> Batching:
        with self.lock:
            # The trial makes passes, and they ask for this.
            self._batching = Batching(False, math.inf, "it has not been tried yet")
            try:
                return try_batching(self)
            finally:
                self._batching = None

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

    @property
    def encoder_decoder(self) -> bool:
        """Tell whether it has an encoder and a decoder, whose texts are targets."""
        return len(self._anatomy.stacks) > 1

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
        selected = self.anatomy.select(sites)
        if not selected:
            raise PassError(
                "No sites to capture",
                "the list is empty",
                "Name at least one, such as 'layer.*'.",
            )
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
            notes["places"] = _places(self.module, self.device)
            notes["quantisation"] = quantisation_of(self.module)
        base_weights, adapters = self._adapters.sources(weights)
        config: Any = getattr(self.module, "config", None)
        return Source(
            self.name,
            revision=self.revision,
            weights=weights,
            dtype=_dtype_name(self.dtype),
            device=notes["places"],
            attention=str(getattr(config, "_attn_implementation", None) or "none"),
            versions=_versions(),
            notes=(*self.notes, *_autocast_note(self.device)),
            depth=selected.depth,
            final=selected.proof.final is not None,
            cls=getattr(self.tokenizer, "cls_token_id", None),
            reported=self._anatomy.reported_names(selected),
            base_weights=base_weights,
            adapters=adapters,
            quantisation=notes["quantisation"],
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
    weight = next(loaded.module.parameters())
    config: Any = getattr(loaded.module, "config", None)
    gpu = torch.cuda.get_device_name(weight.device) if weight.is_cuda else ""
    return Memory(
        cache_folder(),
        weights,
        _variant_identity(loaded.variant),
        type(loaded.module).__name__,
        weight.dtype,
        weight.device.type,
        gpu,
        getattr(config, "_attn_implementation", None),
        sorted(_versions().items()),
        # The same files may be quantised, or spread over devices, while they are
        # loaded.
        _quantiser(loaded.module),
        devices_of(loaded.module),
    )


def _quantiser(module: nn.Module) -> str:
    """Return the scheme of quantised weights, with the version that made them."""
    scheme = quantisation_of(module)
    library = scheme.partition(" ")[0]
    return f"{scheme} {installed_version(library)}" if scheme else ""


def _variant_identity(variant: ModelVariant | None) -> str:
    """Tell variants of one folder apart, and files of an adapter that have changed."""
    if variant is None:
        return ""
    files = []
    inner: Any = variant
    while isinstance(inner, Adapted | Quantised):
        if isinstance(inner, Adapted):
            for folder in inner.folders:
                files.append(weights_identity(Path(folder).expanduser()))
        inner = inner.base
    return f"{variant} {files}"


@functools.cache
def _versions() -> dict[str, str]:
    """Return the versions of the libraries that decide numbers."""
    return {name: installed_version(name) for name in LIBRARIES}


def _places(module: nn.Module, device: torch.device) -> str:
    """Name the device of the inputs, and after it all others that hold weights."""
    places = [str(device)]
    places += [place for place in devices_of(module) if place != str(device)]
    return ", ".join(places)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _autocast_note(device: torch.device) -> tuple[str, ...]:
    """Note that autocast computes products in a narrower dtype."""
    if not torch.is_autocast_enabled(device.type):
        return ()
    dtype = _dtype_name(torch.get_autocast_dtype(device.type))
    return (f"Computed under torch.autocast to {dtype}.",)


def _notes_on(anatomy: Anatomy) -> list[str]:
    """Note where `final` is of another width, or layers before the first are hidden."""
    notes = []
    for stack in anatomy.stacks:
        final, width = stack.proof.final_width, stack.proof.width
        if final not in (None, width):
            notes.append(
                f"Its final is {final} wide and its layers {width}: `layer.*,final`"
                " leaves final out; ask for it by itself."
            )
    return notes + [_note_on_earlier(s) for s in anatomy.stacks if s.proof.earlier]


def _note_on_earlier(stack: Stack) -> str:
    first = stack.blocks[0].path
    blocks = first.rpartition(".")[0]
    last = stack.proof.earlier - 1
    return (
        f"Its layers are those of {blocks}, the list of blocks that it ends with:"
        f" layer.0 is what enters {first}. hidden_states[0] to hidden_states[{last}]"
        " are states of blocks before that, and have no site."
    )
