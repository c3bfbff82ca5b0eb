"""Layouts: the files in which other libraries keep a dictionary.

A layout is told by the files that a folder holds. Each reader below turns one layout
into the fields of a `Dictionary`, which mean the same whatever the file calls them.
What a file says is not yet believed: `proof` tries it on states.
"""

import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from zipfile import ZipFile

import torch
from torch import Tensor

from hiddenscope.directions.encoding import Encoding
from hiddenscope.errors import Damaged, Error, FileError, NotFinite, SiteError
from hiddenscope.files import (
    PathLike,
    check_archive,
    explained,
    locked,
    open_tensors,
    printable,
    read_arrays,
    reading,
    temporary_beside,
    to_disk,
    write_safetensors,
)
from hiddenscope.loading.folder import read_json
from hiddenscope.results import Facts
from hiddenscope.sites import MOST_LAYERS, Site, from_alias, to_alias

if TYPE_CHECKING:
    from hiddenscope.directions.dictionary import Dictionary

Tensors: TypeAlias = dict[str, Tensor]

ORIGINS = (
    *("SAELens", "Gemma Scope", "Llama Scope", "sparsify", "dictionary_learning"),
    *("circuit-tracer", "Qwen Scope", "Goodfire"),
)
SAE_WEIGHTS = "sae_weights.safetensors"
# A configuration is a page of text.
LARGEST_CONFIG = 2**20
# How SAELens norms states, in the words of `Encoding`. The mean length of all states is
# in no file: it is folded into the weights, or the proof refuses the dictionary.
STATE_NORMS = {
    "none": "",
    "constant_norm_rescale": "length",
    "layer_norm": "layer",
    "expected_average_only_in": "",
}
# The state before the MLP as the model's own norm leaves it, without the norm's weight.
NORMED = "ln2.hook_normalized"
# What other hooks of TransformerLens, and modules of transformers, are among the hooks
# that are sites.
HOOKS = {
    "mlp.hook_out": "hook_mlp_out",
    # It is before the norm, in spite of its name.
    "hook_mlp_in": "hook_resid_mid",
    # It is before the norm's weight: `mid`, normed as the model does it.
    NORMED: "hook_resid_mid",
    "output": "hook_resid_post",
    "self_attn.o_proj.input": "attn.hook_z",
    "post_feedforward_layernorm.output": "hook_mlp_out",
    "pre_feedforward_layernorm.output": "mlp.hook_in",
    "mlp.output": "hook_mlp_out",
    "mlp.input": "mlp.hook_in",
    "self_attn.output": "hook_attn_out",
    "attention.output": "hook_attn_out",
    "attn.output": "hook_attn_out",
}
# Folders of Gemma Scope 1 and 2, and what the dictionaries there write; transcoders
# read the input of that.
SCOPES = {
    "res": "",
    "resid_post": "",
    "mlp": "mlp",
    "mlp_out": "mlp",
    "att": "attn.z",
    "attn_out": "attn.z",
    "transcoder": "mlp",
    "transcoders": "mlp",
    "clt": "mlp",
}
# The architectures of SAELens, and what sparsify and dictionary_learning call theirs.
# BatchTopK and Matryoshka dictionaries are saved with the threshold that they learned.
ARCHITECTURES = {
    "standard": "relu",
    "transcoder": "relu",
    "skip_transcoder": "relu",
    "topk": "topk",
    "gated": "gated",
    "jumprelu": "threshold",
    "jumprelu_transcoder": "threshold",
    "jumprelu_skip_transcoder": "threshold",
}
# What SAELens saves of a dictionary in training; for use it is saved as another.
TRAINED = ("batchtopk", "matryoshka_batchtopk")
GATES = ARCHITECTURES | {
    "groupmax": "groups",
    "AutoEncoder": "relu",
    "AutoEncoderNew": "relu",
    "AutoEncoderTopK": "topk",
    "GatedAutoEncoder": "gated",
    "JumpReluAutoEncoder": "threshold",
    "BatchTopKSAE": "threshold",
    "MatryoshkaBatchTopKSAE": "threshold",
}
WORDS = {
    "relu": "ReLU",
    "threshold": "JumpReLU",
    "topk": "TopK",
    "groups": "groupmax",
    "gated": "gated",
}
# What a file holds, and the gates of which it may; the first ones are not without it.
TELLING = {
    "threshold": ("threshold", "topk"),
    "k": ("topk", "groups", "threshold"),
    "b_gate": ("gated",),
    "b_mag": ("gated",),
    "r_mag": ("gated",),
}
# What tensors are called in SAELens; a skip is [input, output] here.
NAMES = {
    "encoder.weight": "W_enc",
    "encoder.bias": "b_enc",
    "decoder.weight": "W_dec",
    "decoder.bias": "b_dec",
    "decoder_bias": "b_dec",
    "encoder_linear.weight": "W_enc",
    "encoder_linear.bias": "b_enc",
    "decoder_linear.weight": "W_dec",
    "decoder_linear.bias": "b_dec",
    "bias": "b_dec",
    "gate_bias": "b_gate",
    "mag_bias": "b_mag",
    "w_enc": "W_enc",
    "w_dec": "W_dec",
    "W_skip": "skip",
    "affine_skip_connection": "skip",
    "activation_function.threshold": "threshold",
}
_HOOK = re.compile(
    r"(?:blocks|(?:model\.)?(?:layers|h))\.(?P<block>[0-9]{1,6})(?:\.(?P<hook>[a-z0-9_.]+))?"
)
# A folder of Gemma Scope, such as "gemma-scope-2b-pt-res-canonical" or "clt".
_SCOPE = re.compile(rf"(?:.*gemma-scope-.*-)?({'|'.join(SCOPES)})(?:_all|-canonical)?")
_MEMBER = re.compile(
    r"(?:(?:params_)?layer|W_enc|W_dec)_([0-9]{1,6})\.safetensors"
    r"|layer([0-9]{1,6})\.sae\.pt"
)
# No model is deeper, and each layer makes a tensor.
MOST_WRITTEN = 1000
# Folders in which a folder without a dictionary is searched for some.
MOST_SEARCHED = 500
AGAIN = "Correct its files, or save it again with the library that made it."
PLACED = "Say where it lies: read(path, site=...)."
SAVED = "Give a folder, or a path where one can be made, on a disk with room."
ELSEWHERE = (
    "Read it with the library that made it, and save it as one of SAELens:"
    " sae.save_model(folder), or sae.save_inference_model(folder) of one in training."
)


class StoredDictionary(NamedTuple):
    """What a file holds, as the fields of `Dictionary`."""

    directions: Tensor
    encoder: Tensor
    encoder_bias: Tensor
    bias: Tensor
    reads: str
    writes: str
    encoding: Encoding
    skip: Tensor | None = None
    facts: Facts = MappingProxyType({})
    later: Mapping[str, Tensor] | None = None


class Unreadable(ValueError):
    """Why a dictionary cannot be read, and what can be done."""

    def __init__(self, reason: str, remedy: str = AGAIN) -> None:
        self.remedy = remedy
        super().__init__(reason)


def read_layout(path: PathLike, site: str = "") -> StoredDictionary:
    """Read the dictionary of a folder, or of the folder that a file lies in.

    Of a set with one for each layer it is the one of the site, or of the file.
    """
    folder = Path(path)
    problem = f"Cannot read a dictionary from {ascii(folder.name or '.')[1:-1]}"
    place = Site.parse(site_of(site) or site) if site else None
    with explained(problem, "Give a folder that can be read."):
        if not folder.exists():
            raise FileError(problem, "there is no such folder", _found(folder))
        files = [folder] if folder.is_file() else []
        folder = folder.parent if files else folder
        for (*others, weights), read in LAYOUTS.items():
            every = list(folder.glob(weights))
            if not every or not all((folder / other).is_file() for other in others):
                continue
            if not all(map(Path.is_file, every)):
                raise Damaged(problem, f"{weights} is no regular file", AGAIN)
            try:
                block = 0
                if "*" in weights:
                    block = _block(every if place else files or every, place)
                return _placed(read(folder, block), place)
            except Error:
                raise
            except Unreadable as error:
                raise FileError(problem, str(error), error.remedy) from None
            # Whatever a configuration with other kinds of values leads to.
            except Exception as error:
                reason = f"its files do not go together ({type(error).__name__}"
                reason = f"{reason}: {printable(str(error))})"[:200]
                raise Damaged(problem, reason, AGAIN) from error
        reason = "its files are of no known library"
        raise FileError(problem, reason, _lying_in(folder) or ELSEWHERE)


def _found(path: Path) -> str:
    """Return how to get a dictionary that is not there."""
    if len(path.parts) == 2 and not path.parent.exists():
        name = printable(path.as_posix())
        return (
            f"Download it first, if it is on a hub: hf download {name} --local-dir sae."
        )
    return "Give a path that exists."


def _lying_in(folder: Path) -> str:
    """Return which of the folders below hold dictionaries."""
    names = []
    for place, _, _ in islice(os.walk(folder), 1, MOST_SEARCHED):
        below = Path(place)
        if any(
            next(below.glob(files[-1]), None) and (below / files[0]).exists()
            for files in LAYOUTS
            if "*" not in files[0]
        ):
            names.append(printable(below.relative_to(folder)))
    if not names:
        return ""
    return (
        f"Give one of the {len(names)} folders below: {', '.join(sorted(names)[:8])}."
    )


def _block(files: Iterable[Path], place: Site | None) -> int:
    """Return the number of the block whose file of a set is meant."""
    matches = [_MEMBER.fullmatch(file.name) for file in files]
    blocks = {int(match[1] or match[2]) for match in matches if match}
    if not blocks:
        # The name of the only file says something else.
        return 0
    if place:
        if (place.layer or 0) - 1 not in blocks:
            raise Unreadable(f"it has no file for {place}", PLACED)
        return (place.layer or 0) - 1
    if len(blocks) != 1:
        raise Unreadable("it holds one for each layer", PLACED)
    return blocks.pop()


def _placed(stored: StoredDictionary, place: Site | None) -> StoredDictionary:
    """Put a dictionary where it is said to lie, unless its files say otherwise."""
    ends = [stored.reads, stored.writes]
    if place and not any(ends):
        ends = [str(place)] * 2
    if not all(ends):
        raise Unreadable("it names no site that is known here", PLACED)
    sites = [Site.parse(end) for end in ends]
    if place:
        places = {(site.layer, site.part) for site in sites}
        if len(places) > 1:
            places |= {(site.layer, "") for site in sites}
        if (place.layer, place.part) not in places:
            remedy = "Leave the site out; if its files are wrong, correct them."
            reason = f"they say that it lies at {stored.reads}, and not at {place}"
            raise Unreadable(reason, remedy)
        sites = [replace(site, stack=place.stack) for site in sites]
    return stored._replace(reads=str(sites[0]), writes=str(sites[1]))


def _saelens(folder: Path, _: int) -> StoredDictionary:
    """Read what SAELens saves, from version 6 on or before."""
    config = _saelens_config(folder)
    tensors = _tensors(folder / SAE_WEIGHTS)
    details = {**config, **(config.get("metadata") or {})}
    architecture = config.get("architecture", "standard")
    # Before version 6 a TopK dictionary was "standard" with another activation.
    if "topk" in (config.get("activation_fn_str"), config.get("activation_fn")):
        architecture = "topk"
    if architecture in TRAINED:
        raise Unreadable(f"it is a checkpoint of {architecture} in training", ELSEWHERE)
    norm = config.get("normalize_activations") or "none"
    if norm is True:
        norm = "expected_average_only_in"
    if norm not in STATE_NORMS:
        raise Unreadable(f"it norms states by {norm!a:.40}", ELSEWHERE)
    if STATE_NORMS[norm] and "W_skip" in tensors:
        reason = "it norms states, and has a skip that reads them as they are"
        raise Unreadable(reason, ELSEWHERE)
    if not (tensors.get("scaling_factor", torch.ones(1)) == 1).all():
        raise Unreadable("its activations have a scaling factor each")
    if config.get("rescale_acts_by_decoder_norm"):
        _unit_directions(tensors)
    hook = details.get("hook_name", details.get("hook_point", ""))
    state_norm = STATE_NORMS[norm] or _state_norm(hook)
    kwargs = details.get("model_from_pretrained_kwargs") or {}
    if kwargs.get("center_writing_weights"):
        # No mean is left for the model's own norm to take out.
        state_norm = {"": "mean", "model": "centred"}.get(state_norm, state_norm)
    if _saelens_config(folder) != config:
        raise Unreadable("it was saved anew while it was read", "Read it again.")
    hook_out = details.get("hf_hook_name_out") or details.get("hook_name_out")
    transcodes = "transcoder" in architecture
    return _stored(
        tensors,
        architecture,
        (site_of(details.get("hf_hook_name") or hook), site_of(hook_out or "")),
        {"origin": "SAELens", "model": details.get("model_name")},
        transcodes=transcodes,
        k=config.get("k") or (config.get("activation_fn_kwargs") or {}).get("k"),
        centred=bool(config.get("apply_b_dec_to_input", not transcodes)),
        state_norm=state_norm,
    )


def _saelens_config(folder: Path) -> Any:
    """Return the configuration; the weights have it where a save was killed."""
    path = folder / "cfg.json"
    if path.exists():
        return _json(path)
    with open_tensors(folder / SAE_WEIGHTS, f"Cannot read {SAE_WEIGHTS}") as file:
        stored = (file.metadata() or {}).get(path.name)
    if stored is None:
        raise Unreadable(f"it has no {path.name}", ELSEWHERE)
    return json.loads(stored)


def _gemma_scope(folder: Path, block: int) -> StoredDictionary:
    """Read Gemma Scope 1 or 2, whose folders say at which site it lies.

    A configuration may say it too. In a cross-layer set there is a file for each layer,
    and features write to their own layer and those above.
    """
    (path,) = (*folder.glob("params.*"), *folder.glob(f"*layer_{block}.safetensors"))
    tensors = _tensors(path)
    place = folder.parts[-6:]
    layer = re.search(r"layer_([0-9]{1,3})", "/".join(place))
    block = int(layer[1]) if layer else block
    scopes = [match[1] for match in map(_SCOPE.fullmatch, place) if match]
    if tensors["W_dec"].ndim == 3:
        tensors["W_dec"] = tensors["W_dec"][:, block:]
        scopes.append("clt")
    reads = writes = ""
    if scopes:
        reads = writes = str(Site(block + 1, SCOPES[scopes[-1]]))
    transcodes = scopes[-1:] in (["transcoder"], ["transcoders"], ["clt"])
    if transcodes:
        reads = f"{writes}.input"
    if (folder / "config.json").is_file():
        config = _json(folder / "config.json")
        reads = site_of(config.get("hf_hook_point_in") or "") or reads
        writes = site_of(config.get("hf_hook_point_out") or "") or writes
    facts: dict[str, Any] = {"origin": "Gemma Scope"}
    if "embedding" in place:
        # It was trained on the rows of the embedding, which Gemma multiplies by this.
        root = math.sqrt(len(tensors["W_enc"]))
        reads = writes = "layer.0"
        facts["scale"] = _scale(tensors, 1 / root, root)
    return _stored(tensors, "threshold", (reads, writes), facts, transcodes=transcodes)


def _llama_scope(folder: Path, _: int) -> StoredDictionary:
    """Read Llama Scope: one threshold, states scaled by their mean norm."""
    config = _json(folder / "hyperparams.json")
    tensors = _tensors(folder / "checkpoints" / "final.safetensors")
    norms = config["dataset_average_activation_norm"]
    root = math.sqrt(len(tensors["W_enc"]))
    # What a transcoder writes has a mean norm of its own.
    facts = {"scale": _scale(tensors, root / norms["in"], norms["out"] / root)}
    threshold = torch.tensor(config["jump_relu_threshold"])
    by_norm = bool(config.get("sparsity_include_decoder_norm"))
    tensors["threshold"] = threshold * norms["out"] / root if by_norm else threshold
    hook = config["hook_point_in"]
    return _stored(
        tensors,
        config.get("act_fn", "jumprelu"),
        (site_of(hook), site_of(config.get("hook_point_out") or "")),
        {"origin": "Llama Scope", **facts},
        centred=bool(config.get("apply_decoder_bias_to_pre_encoder")),
        state_norm=_state_norm(hook),
        by_norm=by_norm,
    )


def _scale(tensors: Tensors, before: float, after: float) -> float:
    """Multiply the states before, and what is decoded after, by way of the weights."""
    tensors["W_enc"] = tensors["W_enc"] * before
    for name in ("W_dec", "b_dec"):
        tensors[name] = tensors[name] * after
    return before


def _unit_directions(tensors: Tensors) -> None:
    """Move the norms of the directions into the encoder."""
    norms = tensors["W_dec"].norm(dim=1)
    tensors["W_dec"] = tensors["W_dec"] / norms[:, None]
    tensors["W_enc"] = tensors["W_enc"] * norms
    tensors["b_enc"] = tensors["b_enc"] * norms


def _sparsify(folder: Path, _: int) -> StoredDictionary:
    """Read sparsify; the folder is named after the module whose output it is."""
    config = _json(folder / "cfg.json")
    module = folder.parent if folder.name.startswith("seed") else folder
    reads = writes = site_of(module.name)
    transcodes = bool(config.get("transcode"))
    if transcodes and writes:
        place = Site.parse(writes)
        if place.part == "attn":
            reason = "it reads what enters attention, which has no name here"
            raise Unreadable(reason, "Take one of the MLP or of the whole block.")
        # Of a block it is the state before.
        before = replace(place, layer=(place.layer or 0) - 1)
        reads = f"{writes}.input" if place.part else str(before)
    return _stored(
        _tensors(folder / "sae.safetensors"),
        config.get("activation", "topk"),
        (reads, writes),
        {"origin": "sparsify"},
        transcodes=transcodes,
        k=config["k"],
        centred=not transcodes,
    )


def _dictionary_learning(folder: Path, _: int) -> StoredDictionary:
    """Read dictionary_learning, whose weights are a pickle that may run no code."""
    trainer = _json(folder / "config.json")["trainer"]
    kind = trainer["dict_class"]
    name = trainer.get("submodule_name") or ""
    site = site_of(re.sub(r"resid_post_layer_(\d+)", r"layers.\1", name))
    tensors = _tensors(folder / "ae.pt")
    if kind == "AutoEncoder":
        # As its own loader does, so that activations say how much is written.
        _unit_directions(tensors)
    return _stored(
        tensors,
        kind,
        (site, site),
        {"origin": "dictionary_learning", "model": trainer.get("lm_name")},
        k=trainer.get("k"),
        centred=kind not in ("AutoEncoderNew", "JumpReluAutoEncoder"),
    )


def _qwen_scope(folder: Path, block: int) -> StoredDictionary:
    """Read Qwen Scope, whose repository is named after the k: ...-W64K-L0_50."""
    tensors = _tensors(folder / f"layer{block}.sae.pt")
    for name in ("W_enc", "W_dec"):
        tensors[name] = tensors[name].T
    k = re.search(r"-L0_([0-9]{1,6})", "/".join(folder.resolve().parts[-6:]))
    if k is None:
        reason = "the name of its folder does not say how many features act"
        raise Unreadable(reason, "Name it as its repository is: ...-L0_50.")
    facts = {"origin": "Qwen Scope"}
    return _stored(tensors, "topk", (str(Site(block + 1)), ""), facts, k=k[1])


def _goodfire(folder: Path, _: int) -> StoredDictionary:
    """Read Goodfire, whose file is named after the layer: ...-SAE-l19.pth."""
    (path,) = folder.glob("*SAE-l*.pt*")
    layer = re.search(r"SAE-l([0-9]{1,6})\.", path.name)
    site = str(Site(int(layer[1]) + 1)) if layer else ""
    return _stored(_tensors(path), "relu", (site, ""), {"origin": "Goodfire"})


def _circuit_tracer(folder: Path, block: int) -> StoredDictionary:
    """Read one layer of circuit-tracer's transcoders, cross-layer ones or not."""
    path = folder / "config.yaml"
    if path.stat().st_size > LARGEST_CONFIG:
        raise Unreadable("its config.yaml is far too long")
    config = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        # What is said in one line, without nesting.
        name, _, value = line.partition(":")
        config[name] = value.partition(" #")[0].strip().strip("\"'")
    hook, hook_out = config["feature_input_hook"], config["feature_output_hook"]
    tensors: Tensors = {}
    for name in ("layer", "W_enc", "W_dec"):
        file = folder / f"{name}_{block}.safetensors"
        if file.is_file():
            tensors |= _tensors(file, f"_{block}")
    tensors["W_enc"] = tensors["W_enc"].T
    gate = "threshold" if "threshold" in tensors else "relu"
    # Its own loader takes a TopK transcoder for one with ReLU.
    if "topk" in config.get("activation_function", "").lower() or "k" in config:
        gate = "topk"
    return _stored(
        tensors,
        gate,
        (site_of(f"blocks.{block}.{hook}"), site_of(f"blocks.{block}.{hook_out}")),
        {"origin": "circuit-tracer", "model": config.get("model_name")},
        transcodes=True,
        k=config.get("k"),
        state_norm=_state_norm(hook),
    )


def _stored(
    tensors: Tensors,
    kind: Any,
    sites: tuple[str, str],
    facts: Facts,
    *,
    transcodes: bool = False,
    k: Any = None,
    **encoding: Any,
) -> StoredDictionary:
    """Return the tensors with SAELens's names as a dictionary; others are unused."""
    gate = GATES.get(kind, kind)
    if gate not in WORDS:
        raise Unreadable(f"it is of an unknown kind, {gate!a:.40}", ELSEWHERE)
    for name, tensor in tensors.items():
        if not tensor.numel():
            raise Unreadable(f"{name} is {list(tensor.shape)}, which holds no number")
        if not tensor.isfinite().all():
            reason = f"{name} has a NaN or an infinity"
            raise NotFinite("Cannot read this dictionary", reason, "Save it again.")
    for name, gates in TELLING.items():
        holds = name in tensors or (name == "k" and k is not None)
        if holds and gate not in gates:
            what = f"{name}, as {WORDS[gates[0]]} does"
        elif gate == gates[0] and not holds:
            what = f"no {name}"
        else:
            continue
        raise Unreadable(f"it calls itself {WORDS[gate]}, and holds {what}")
    reads, writes = sites[0], sites[1] or sites[0]
    if transcodes and reads == writes:
        raise Unreadable("it is a transcoder, and does not name both of its sites")
    if gate in ("topk", "groups"):
        # A number in YAML is a string; 2.7 and true are neither.
        encoding["k"] = int(str(k))
    if gate == "gated":
        tensors["b_enc"] = tensors["b_mag"]
        encoding["gate_bias"] = tensors["b_gate"]
        encoding["gain"] = tensors["r_mag"].exp()
    decoder, later = tensors["W_dec"], None
    if decoder.ndim == 3:
        if decoder.shape[1] > MOST_WRITTEN:
            raise Unreadable(f"it writes to {decoder.shape[1]:,} layers")
        # Features of a cross-layer transcoder write to the layers above too.
        decoder, *above = decoder.unbind(1)
        place, later = Site.parse(writes), {}
        for layer, rows in enumerate(above, (place.layer or 0) + 1):
            later[str(replace(place, layer=layer))] = rows.contiguous()
    if gate == "threshold":
        # One may serve all features.
        encoding["threshold"] = tensors["threshold"].expand(len(decoder)).contiguous()
    return StoredDictionary(
        decoder.contiguous(),
        tensors["W_enc"].contiguous(),
        tensors["b_enc"],
        tensors["b_dec"],
        reads,
        writes,
        Encoding(gate, **encoding),
        tensors.get("skip"),
        facts,
        later,
    )


# The last file holds weights; with a star there is one for each layer. Those with more
# files come first: the names of some lie in several.
LAYOUTS: Mapping[tuple[str, ...], Callable[[Path, int], StoredDictionary]] = {
    ("cfg.json", SAE_WEIGHTS): _saelens,
    (SAE_WEIGHTS,): _saelens,
    ("params.npz",): _gemma_scope,
    ("params.safetensors",): _gemma_scope,
    ("hyperparams.json", "checkpoints/final.safetensors"): _llama_scope,
    ("cfg.json", "sae.safetensors"): _sparsify,
    ("config.json", "ae.pt"): _dictionary_learning,
    ("config.yaml", "W_enc_*.safetensors"): _circuit_tracer,
    ("config.yaml", "layer_*.safetensors"): _circuit_tracer,
    ("layer_*.safetensors",): _gemma_scope,
    ("params_layer_*.safetensors",): _gemma_scope,
    ("layer*.sae.pt",): _qwen_scope,
    ("*SAE-l*.pt*",): _goodfire,
}


def site_of(name: str) -> str:
    """Return the site that a hook or a module's name stands for; "" if none.

    >>> site_of("blocks.4.hook_resid_post"), site_of("model.layers.4.output")
    ('layer.5', 'layer.5')
    >>> site_of("layers.4.mlp"), site_of("layer.5"), site_of("somewhere")
    ('layer.5.mlp', 'layer.5', '')
    """
    # Which of the hidden_states is the last, and so `final`, only a model says.
    if "hidden_states" in name:
        return ""
    match = _HOOK.fullmatch(name)
    if match:
        hook = match["hook"] or "output"
        hook = HOOKS.get(hook, HOOKS.get(f"{hook}.output", hook))
        name = f"blocks.{match['block']}.{hook}"
    for read in (Site.parse, partial(from_alias, depth=MOST_LAYERS, final=True)):
        with suppress(SiteError):
            return str(read(name))
    return ""


def _state_norm(hook: str) -> Any:
    return "model" if hook.endswith(NORMED) else ""


def _json(path: Path) -> Any:
    return read_json(path, largest=LARGEST_CONFIG)


def _tensors(path: Path, suffix: str = "") -> Tensors:
    """Read the tensors of a file by the names of SAELens, in float32.

    No code of a pickle is run. Linear layers are [output, input].
    """
    problem = f"Cannot read {path.name}"
    content: Tensors = {}
    if path.suffix == ".safetensors":
        with open_tensors(path, problem) as file:
            for name in file.keys():  # noqa: SIM118
                content[name] = file.get_tensor(name)
    elif path.suffix == ".npz":
        for name, array in read_arrays(path, problem).items():
            content[name] = torch.from_numpy(array)
    else:
        size = check_archive(path, problem)
        with reading(f"{problem} as tensors alone"), ZipFile(path) as archive:
            _check_pickles(path, archive)
            content = torch.load(path, map_location="cpu", weights_only=True)
            # A tensor may repeat a few numbers without end.
            if sum(tensor.nbytes for tensor in content.values()) > size:
                raise ValueError("its tensors are larger than the file")
    tensors = {}
    for name in list(content):
        tensor = content.pop(name).float()
        turned = name.endswith((".weight", "W_skip"))
        key = NAMES.get(name, name.removesuffix(suffix))
        tensors[key] = tensor.T if turned else tensor
    return tensors


def _check_pickles(path: Path, archive: ZipFile) -> None:
    """Refuse a pickle that takes memory which no file fills.

    torch fills a bytearray with as many zeros as it is told to, and reads its older
    form where a file does not begin as an archive.
    """
    with path.open("rb") as file:
        is_sound = file.read(4) == b"PK\3\4"
    for name in archive.namelist():
        if name.endswith(".pkl"):
            is_sound &= b"bytearray" not in archive.read(name)
    if not is_sound:
        raise ValueError("it holds more than tensors")


def write_saelens(path: PathLike, dictionary: "Dictionary") -> None:
    """Write the files of SAELens; norms in the threshold are folded in."""
    encoding = dictionary.encoding
    transcodes = dictionary.reads != dictionary.writes
    wanted = encoding.gate, transcodes, dictionary.skip is not None
    architectures = {
        (gate, "transcoder" in name, "skip" in name): name
        for name, gate in ARCHITECTURES.items()
    }
    if wanted not in architectures or dictionary.later:
        raise FileError(
            f"Cannot save this dictionary as {Path(path).name}",
            f"SAELens has none like {dictionary!r}",
            "Save its tensors with safetensors.torch.save_file.",
        )
    threshold = encoding.threshold
    if encoding.by_norm and threshold is not None:
        threshold = threshold / dictionary.directions.norm(dim=1)
    gated = encoding.gate == "gated"
    tensors = {
        "W_enc": dictionary.encoder,
        "W_dec": dictionary.directions,
        "b_mag" if gated else "b_enc": dictionary.encoder_bias,
        "b_dec": dictionary.bias,
        "threshold": threshold,
        "b_gate": encoding.gate_bias,
        "r_mag": None if encoding.gain is None else encoding.gain.log(),
        "W_skip": None if dictionary.skip is None else dictionary.skip.T,
    }
    norm_names = {ours: theirs for theirs, ours in reversed(STATE_NORMS.items())}
    hook, norm = hook_of(dictionary.reads), encoding.state_norm
    if transcodes and norm and dictionary.reads.endswith("mid"):
        hook, norm = hook.replace("hook_resid_mid", NORMED), ""
    centring = {"center_writing_weights": encoding.state_norm in ("mean", "centred")}
    config: dict[str, Any] = {
        "architecture": architectures[wanted],
        "d_in": dictionary.width,
        "d_sae": len(dictionary),
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": encoding.centred,
        "normalize_activations": norm_names.get(norm, "none"),
        "metadata": {
            "hook_name": hook,
            "model_name": dictionary.facts.get("model"),
            "model_from_pretrained_kwargs": centring,
            "sae_lens_version": "6.54.0",
        },
    }
    if encoding.k is not None:
        config |= {"k": encoding.k, "rescale_acts_by_decoder_norm": encoding.by_norm}
    if transcodes:
        config["metadata"]["hook_name_out"] = hook_of(dictionary.writes)
        config["d_out"] = dictionary.directions.shape[1]
    folder = Path(path)
    rows = {}
    for name, tensor in tensors.items():
        if tensor is not None:
            rows[name] = tensor.float()
    problem = f"Cannot save a dictionary in {printable(folder)}"
    with explained(problem, SAVED):
        folder.mkdir(parents=True, exist_ok=True)
        _publish(folder, rows, json.dumps(config, indent=2))


def _publish(folder: Path, weights: Mapping[str, Tensor], config: str) -> None:
    """Put weights and configuration in the place of others, both or none of them.

    In between there is no configuration beside the weights, so that no other reader
    takes the new ones for those of the old one; each hold their own.
    """
    targets = folder / "cfg.json", folder / SAE_WEIGHTS
    with temporary_beside(targets[0]) as said, temporary_beside(targets[1]) as held:
        said.write_text(config, encoding="utf-8")
        write_safetensors(held, weights, {targets[0].name: config})
        for path in (said, held):
            to_disk(path)
        with locked(folder, wait=True):
            targets[0].unlink(missing_ok=True)
            os.replace(held, targets[1])
            os.replace(said, targets[0])
            to_disk(folder)


def hook_of(site: str) -> str:
    """Return the hook of TransformerLens at a site, or the site if it has none.

    >>> hook_of("layer.5"), hook_of("layer.0"), hook_of("layer.5.mlp"), hook_of("final")
    ('blocks.4.hook_resid_post', 'blocks.0.hook_resid_pre', 'blocks.4.hook_mlp_out', 'final')
    """  # noqa: E501
    place = Site.parse(site)
    return to_alias(place, "transformer_lens", depth=MOST_LAYERS, final=True) or site
