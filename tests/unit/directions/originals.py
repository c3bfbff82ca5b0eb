"""Write dictionaries with the libraries that they come from, and what these compute.

Run it where the originals are installed, in an environment of their own:

    pip install --target originals sae-lens==6.54.0 eai-sparsify==1.3.3 \
        dictionary-learning==0.1.0 circuit-tracer==0.5.0 transformer-lens==2.16.1
    PYTHONPATH=originals python tests/unit/directions/originals.py [folder]

Every folder of `files` holds what an original's own `save` wrote, and beside it
`numbers.safetensors`: inputs, and the activations and outputs that the original
computed of them. Where an original only reads a family (Gemma Scope), its files are
written here and its own loader computes the numbers. Llama Scope is written here too,
and computed as the library of its authors does, by hand.
"""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

WIDTH, COUNT, TOKENS, LAYERS = 6, 16, 5, 3
FILES = Path(__file__).parent / "files"


def main() -> None:
    """Write every family below the folder."""
    folder = Path(sys.argv[-1]) if len(sys.argv) > 1 else FILES
    torch.manual_seed(0)
    with torch.no_grad():
        if sys.argv[1:2] == ["back"]:
            read_back(folder)
            return
        for write in (saelens, sparsify, dictionary_learning, circuit_tracer, scopes):
            write(folder)


def numbers(folder: Path, **tensors: Tensor) -> None:
    """Write what an original computed, beside its files."""
    rows = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
    save_file(rows, folder / "numbers.safetensors")


def fill(module: torch.nn.Module) -> None:
    """Give every parameter random numbers; thresholds are positive."""
    for name, parameter in module.named_parameters():
        values = torch.randn_like(parameter) / 2
        parameter.data = values.abs() if "threshold" in name else values


def saelens(folder: Path) -> None:
    """Write each architecture of SAELens, and what its own loader computes."""
    from sae_lens import SAE
    from sae_lens.registry import get_sae_class, get_sae_training_class
    from sae_lens.saes.sae import SAEMetadata

    autoencoder = {"hook_name": "blocks.1.hook_resid_post", "model_name": "tiny"}
    transcoder = {
        "hook_name": "blocks.1.hook_mlp_in",
        "hook_name_out": "blocks.1.hook_mlp_out",
    }
    cases: dict[str, dict[str, Any]] = {
        "standard": {},
        "standard_uncentred": {"apply_b_dec_to_input": False},
        "standard_layer_norm": {"normalize_activations": "layer_norm"},
        "standard_length": {"normalize_activations": "constant_norm_rescale"},
        "gated": {},
        "jumprelu": {},
        "topk": {"k": 4},
        "topk_rescaled": {"k": 4, "rescale_acts_by_decoder_norm": True},
        "batchtopk": {"k": 4},
        "matryoshka_batchtopk": {"k": 4, "matryoshka_widths": [8, COUNT]},
        "transcoder": {},
        "skip_transcoder": {},
        "jumprelu_transcoder": {},
        "jumprelu_skip_transcoder": {},
    }
    for name, changes in cases.items():
        architecture = name.split("_")[0] if name[:5] in ("stand", "topk_") else name
        options = {"d_in": WIDTH, "d_sae": COUNT, **changes}
        metadata = autoencoder
        if "transcoder" in name:
            metadata = transcoder
            options |= {"d_out": WIDTH, "apply_b_dec_to_input": False}
        trained = "batchtopk" in name
        get = get_sae_training_class if trained else get_sae_class
        kind, config = get(architecture)
        original = kind(config(**options))
        original.cfg.metadata = SAEMetadata(**metadata)
        fill(original)
        path = folder / f"saelens_{name}"
        if trained:
            original.topk_threshold.fill_(0.4)
            original.save_inference_model(path)
        else:
            original.save_model(path)
        saelens_numbers(SAE.load_from_disk(path), path)

    # Before version 6 the configuration was flat, and a TopK dictionary "standard".
    old = {"d_in": WIDTH, "d_sae": COUNT, "dtype": "float32", "device": "cpu"}
    old |= {"hook_point": "blocks.1.hook_resid_pre", "normalize_activations": False}
    topk = {"activation_fn_str": "topk", "activation_fn_kwargs": {"k": 4}}
    for name, changes in {"standard": {}, "topk": topk}.items():
        path = folder / f"saelens_old_{name}"
        path.mkdir(parents=True, exist_ok=True)
        weights = folder / f"saelens_{name}" / "sae_weights.safetensors"
        (path / weights.name).write_bytes(weights.read_bytes())
        (path / "cfg.json").write_text(json.dumps(old | changes))
        saelens_numbers(SAE.load_from_disk(path), path)


def saelens_numbers(original: Any, path: Path) -> None:
    """Write what a dictionary of SAELens computes."""
    inputs = torch.randn(TOKENS, WIDTH)
    activations = original.encode(inputs)
    numbers(path, inputs=inputs, activations=activations, outputs=original(inputs))


def read_back(folder: Path) -> None:
    """Let SAELens read what hiddenscope saved, and compare what both compute.

    PYTHONPATH=originals:src python tests/unit/directions/originals.py back FOLDER
    """
    from sae_lens import SAE

    from hiddenscope.directions.dictionary import Dictionary

    paths = [path.parent for path in sorted(FILES.rglob("numbers.safetensors"))]
    for path in paths:
        if any(path.glob("*_0.safetensors")) or "groupmax" in str(path):
            continue
        dictionary = Dictionary.read(path)
        if dictionary.encoding.gate == "topk" and dictionary.reads != dictionary.writes:
            continue
        dictionary.save(folder / path.name)
        original = SAE.load_from_disk(folder / path.name)
        inputs = torch.randn(TOKENS, WIDTH)
        activations = dictionary.activations(inputs)
        torch.testing.assert_close(original.encode(inputs), activations)
        outputs = dictionary.decode(activations, inputs)
        torch.testing.assert_close(original(inputs), outputs)
        print(f"{path.name}: SAELens computes the same of what was saved")


def sparsify(folder: Path) -> None:
    """Write each kind of sparsify's coders, in folders with the names of modules."""
    from sparsify.sparse_coder import SparseCoder, SparseCoderConfig

    cases: dict[str, dict[str, Any]] = {
        "topk/layers.1": {},
        "groupmax/layers.1": {"activation": "groupmax"},
        "transcode/layers.1.mlp": {"transcode": True},
        "skip/layers.1.mlp": {"transcode": True, "skip_connection": True},
    }
    for name, changes in cases.items():
        config = SparseCoderConfig(num_latents=COUNT, k=4, **changes)
        original = SparseCoder(WIDTH, config)
        fill(original)
        path = folder / f"sparsify_{name}"
        original.save_to_disk(path)
        inputs = torch.randn(TOKENS, WIDTH)
        values, places, _ = original.encode(inputs)
        activations = torch.zeros(TOKENS, COUNT).scatter(-1, places, values)
        outputs = original(inputs).sae_out
        numbers(path, inputs=inputs, activations=activations, outputs=outputs)


def dictionary_learning(folder: Path) -> None:
    """Write each class of dictionary_learning as its training saves it."""
    from dictionary_learning.dictionary import (
        AutoEncoder,
        AutoEncoderNew,
        GatedAutoEncoder,
        JumpReluAutoEncoder,
    )
    from dictionary_learning.trainers.batch_top_k import BatchTopKSAE
    from dictionary_learning.trainers.matryoshka_batch_top_k import (
        MatryoshkaBatchTopKSAE,
    )
    from dictionary_learning.trainers.top_k import AutoEncoderTopK
    from dictionary_learning.utils import load_dictionary

    originals = [kind(WIDTH, COUNT) for kind in (AutoEncoder, AutoEncoderNew)]
    originals += [GatedAutoEncoder(WIDTH, COUNT), JumpReluAutoEncoder(WIDTH, COUNT)]
    originals += [AutoEncoderTopK(WIDTH, COUNT, 4), BatchTopKSAE(WIDTH, COUNT, 4)]
    originals.append(MatryoshkaBatchTopKSAE(WIDTH, COUNT, 4, [8, 8]))
    for original in originals:
        fill(original)
        name = type(original).__name__
        if name.endswith("TopKSAE"):
            original.threshold.fill_(0.4)
        path = folder / f"dictionary_learning_{name}"
        path.mkdir(parents=True, exist_ok=True)
        # As `trainSAE` does at its end.
        torch.save(original.state_dict(), path / "ae.pt")
        trainer = {"dict_class": name, "layer": 1, "lm_name": "tiny"}
        if "TopK" in name:
            trainer["k"] = 4
        trainer["submodule_name"] = "resid_post_layer_1"
        (path / "config.json").write_text(json.dumps({"trainer": trainer}))
        inputs = torch.randn(TOKENS, WIDTH)
        # Its loader makes the directions of some of one length.
        original, _ = load_dictionary(str(path), "cpu")
        activations = original.encode(inputs)
        numbers(path, inputs=inputs, activations=activations, outputs=original(inputs))


def circuit_tracer(folder: Path) -> None:
    """Write sets of transcoders of one layer each, and cross-layer ones."""
    from circuit_tracer.transcoder.activation_functions import JumpReLU
    from circuit_tracer.transcoder.cross_layer_transcoder import CrossLayerTranscoder
    from circuit_tracer.transcoder.single_layer_transcoder import (
        SingleLayerTranscoder,
        TranscoderSet,
    )

    hooks = {"feature_input_hook": "mlp.hook_in", "feature_output_hook": "mlp.hook_out"}
    gates: dict[str, Callable[[], Any]] = {
        "relu": lambda: torch.nn.functional.relu,
        "jumprelu": lambda: JumpReLU(torch.rand(COUNT)),
    }
    plain = {"dtype": torch.float32, "device": torch.device("cpu")}
    for name, gate in gates.items():
        members = {}
        for layer in range(LAYERS):
            skip = name == "relu"
            members[layer] = SingleLayerTranscoder(
                WIDTH, COUNT, gate(), layer, skip_connection=skip, **plain
            )
        original = TranscoderSet(members, **hooks)
        fill(original)
        path = folder / f"circuit_tracer_{name}"
        original.to_safetensors(str(path))
        config = {"model_kind": "transcoder_set", "model_name": "tiny", **hooks}
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        inputs = torch.randn(LAYERS, TOKENS, WIDTH)
        activations = original.encode(inputs)
        outputs = original.decode(activations, inputs)
        numbers(path, inputs=inputs, activations=activations, outputs=outputs)

    hooks = {
        "feature_input_hook": "hook_resid_mid",
        "feature_output_hook": "hook_mlp_out",
    }
    for name in ("relu", "jump_relu"):
        original = CrossLayerTranscoder(
            LAYERS, COUNT, WIDTH, name, lazy_decoder=False, **hooks, **plain
        )
        fill(original)
        path = folder / f"cross_layer_{name}"
        original.to_safetensors(str(path))
        config = {"model_kind": "cross_layer_transcoder", "model_name": "tiny", **hooks}
        (path / "config.yaml").write_text(yaml.safe_dump(config))
        cross_layer_numbers(original, path)


def cross_layer_numbers(original: Any, path: Path) -> None:
    """Write what a cross-layer transcoder computes, for every layer."""
    inputs = torch.randn(LAYERS, TOKENS, WIDTH)
    activations = original.encode(inputs)
    outputs = original.decode(activations, inputs)
    numbers(path, inputs=inputs, activations=activations, outputs=outputs)


def scopes(folder: Path) -> None:
    """Write Gemma Scope 1 and 2, read by circuit-tracer, and Llama Scope."""
    from circuit_tracer.transcoder.cross_layer_transcoder import load_gemma_scope_2_clt
    from circuit_tracer.transcoder.single_layer_transcoder import (
        load_gemma_scope_2_transcoder,
        load_gemma_scope_transcoder,
    )

    cpu = torch.device("cpu")

    def tensors(*decoder: int) -> dict[str, Tensor]:
        return {
            "w_enc": torch.randn(WIDTH, COUNT) / 2,
            "w_dec": torch.randn(COUNT, *decoder, WIDTH) / 2,
            "b_enc": torch.randn(COUNT) / 2,
            "b_dec": torch.randn(WIDTH) / 2,
            "threshold": torch.rand(COUNT) / 2,
        }

    path = folder / "gemma-scope-2b-pt-transcoders/layer_1/width_16k/average_l0_9"
    path.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for name, tensor in tensors().items():
        arrays[name.replace("w_", "W_")] = tensor.numpy()
    np.savez(path / "params.npz", **arrays)
    single = load_gemma_scope_transcoder(str(path / "params.npz"), 1, cpu)
    single_numbers(single, path)

    path = folder / "gemma-scope-2-tiny/transcoder/layer_1_width_16k_l0_small_affine"
    path.mkdir(parents=True, exist_ok=True)
    affine = {"affine_skip_connection": torch.randn(WIDTH, WIDTH) / 2}
    save_file(tensors() | affine, path / "params.safetensors")
    config = {
        "hf_hook_point_in": "model.layers.1.pre_feedforward_layernorm.output",
        "hf_hook_point_out": "model.layers.1.post_feedforward_layernorm.output",
        "architecture": "jump_relu",
    }
    (path / "config.json").write_text(json.dumps(config))
    file = str(path / "params.safetensors")
    single_numbers(load_gemma_scope_2_transcoder(file, 1, cpu), path)

    path = folder / "gemma-scope-2-tiny/clt/width_16k_l0_small"
    path.mkdir(parents=True, exist_ok=True)
    files = {}
    for layer in range(LAYERS):
        files[layer] = str(path / f"params_layer_{layer}.safetensors")
        save_file(tensors(LAYERS), files[layer])
    # It leaves out the last of what it is given.
    files[LAYERS] = ""
    original = load_gemma_scope_2_clt(files, device=cpu, dtype=torch.float32)
    cross_layer_numbers(original, path)
    llama_scope(folder / "llama_scope")


def single_numbers(original: Any, path: Path) -> None:
    """Write what a transcoder of one layer computes."""
    inputs = torch.randn(TOKENS, WIDTH)
    activations = original.encode(inputs)
    outputs = original.decode(activations, inputs)
    numbers(path, inputs=inputs, activations=activations, outputs=outputs)


def llama_scope(path: Path) -> None:
    """Write Llama Scope, with the mean norms of states at both of its ends."""
    (path / "checkpoints").mkdir(parents=True, exist_ok=True)
    norms = {"in": 1.5, "out": 4.0}
    config = {
        "hook_point_in": "blocks.1.hook_mlp_in",
        "hook_point_out": "blocks.1.hook_mlp_out",
        "act_fn": "jumprelu",
        "jump_relu_threshold": 0.4,
        "norm_activation": "dataset-wise",
        "dataset_average_activation_norm": norms,
        "apply_decoder_bias_to_pre_encoder": False,
        "sparsity_include_decoder_norm": True,
    }
    (path / "hyperparams.json").write_text(json.dumps(config))
    weights = {
        "encoder.weight": torch.randn(COUNT, WIDTH) / 2,
        "encoder.bias": torch.randn(COUNT) / 2,
        "decoder.weight": torch.randn(WIDTH, COUNT) / 2,
        "decoder.bias": torch.randn(WIDTH) / 2,
    }
    save_file(weights, path / "checkpoints" / "final.safetensors")
    inputs = torch.randn(TOKENS, WIDTH)
    scaled = inputs * math.sqrt(WIDTH) / norms["in"]
    products = scaled @ weights["encoder.weight"].T + weights["encoder.bias"]
    sizes = products * weights["decoder.weight"].norm(dim=0)
    activations = products.where(sizes > config["jump_relu_threshold"], 0)
    outputs = activations @ weights["decoder.weight"].T + weights["decoder.bias"]
    outputs = outputs / (math.sqrt(WIDTH) / norms["out"])
    numbers(path, inputs=inputs, activations=activations, outputs=outputs)


if __name__ == "__main__":
    main()
