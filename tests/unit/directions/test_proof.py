"""Sound dictionaries are accepted; those with a fault are refused, and it is named."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import hiddenscope as hs
from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.proof import Trials, prove
from hiddenscope.errors import FileError, NotFinite, StatesError
from hiddenscope.model import Model
from hiddenscope.testing import tiny_model
from labs.dictionaries.__main__ import sequences
from labs.dictionaries.planted import Fault, faults, misplaced
from labs.dictionaries.train import KINDS, Kind, train


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load((tiny_model("llama"), None))


@pytest.fixture(scope="module")
def trained(model: Model) -> Callable[[Kind], Dictionary]:
    states = model.capture(sequences(200, 1), "layer.2")
    later = torch.from_numpy(states.tokens.positions > 0)
    return cache(lambda kind: train(states["layer.2"][later], kind, 96, steps=120))


@pytest.mark.parametrize("kind", KINDS)
def test_a_sound_dictionary_is_accepted(
    model: Model, trained: Callable[[Kind], Dictionary], kind: Kind
) -> None:
    proof = prove([trained(kind)], model, sequences(40, 2))
    assert proof.stated.unexplained < 0.5 < proof.neighbours[0].unexplained * 5
    assert "as stated" in str(proof)
    assert "with first tokens" in str(proof)


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_is_refused_and_what_fits_is_named(
    model: Model, trained: Callable[[Kind], Dictionary], kind: Kind
) -> None:
    for name, fault in faults(trained(kind)).items():
        # What its thresholds held back is too little here.
        if kind == "jumprelu" and name == "activation lost, read as ReLU":
            continue
        with pytest.raises((FileError, StatesError), match=fault.named):
            prove([fault.plant(trained(kind))], model, sequences(40, 2))


@pytest.mark.parametrize(
    ("centred", "named"),
    [
        (True, "bias not subtracted"),
        (False, "bias subtracted"),
    ],
)
def test_a_flipped_bias_of_jumprelu_is_refused_and_named(
    model: Model,
    trained: Callable[[Kind], Dictionary],
    centred: bool,
    named: str,
) -> None:
    sound = trained("jumprelu")
    if centred:
        # The same, with the bias subtracted by the encoder's own.
        assert sound.encoder is not None
        bias = sound.encoder_bias - sound.bias @ sound.encoder
        sound = replace(sound, encoder_bias=bias)
    faulty = replace(sound, encoding=replace(sound.encoding, centred=centred))
    with pytest.raises(StatesError, match=f"; with the decoder's {named}"):
        prove([faulty], model, sequences(40, 2))


@pytest.mark.parametrize("kind", ["topk", "batchtopk"])
def test_what_was_trained_badly_is_accepted_and_said(model: Model, kind: Kind) -> None:
    states = model.capture(sequences(200, 1), "layer.2")
    rows = states["layer.2"][torch.from_numpy(states.tokens.positions > 0)]
    proof = prove([train(rows, kind, 96, steps=25)], model, sequences(40, 2))
    assert proof.stated.unexplained > 0.4
    few = prove([train(rows[:150], kind, 96, steps=150)], model, sequences(40, 2))
    assert few.stated.slope < 0.9
    assert bool(proof.best) == (proof.worse > 1)
    assert proof.best_reading in str(proof)


def test_it_is_said_how_much_less_the_best_reading_leaves(
    model: Model, trained: Callable[[Kind], Dictionary]
) -> None:
    sound = trained("batchtopk")
    assert sound.encoding.threshold is not None
    encoding = replace(sound.encoding, threshold=sound.encoding.threshold * 1.3)
    proof = prove([replace(sound, encoding=encoding)], model, sequences(40, 2))
    assert proof.worse > 1.05
    share = f"{1 / proof.worse:.0%} of that is left, with as many features"
    assert f"{proof.best}, {share}" in str(proof)


@pytest.mark.parametrize("fault", misplaced().values())
def test_a_layer_that_is_called_a_part_is_refused_and_named(
    model: Model, trained: Callable[[Kind], Dictionary], fault: Fault
) -> None:
    with pytest.raises(StatesError, match=fault.named):
        prove([fault.plant(trained("topk"))], model, sequences(40, 2))


@pytest.mark.parametrize("part", ["attn", "mid", "mlp"])
def test_a_part_that_is_called_the_layer_is_refused_and_named(
    model: Model, part: str
) -> None:
    site = f"layer.2.{part}"
    states = model.capture(sequences(100, 1), site)
    later = torch.from_numpy(states.tokens.positions > 0)
    inside = train(states[site][later], "topk", 64, steps=80)
    with pytest.raises(StatesError, match=rf"; at {site}, "):
        prove([inside], model, sequences(20, 2))
    sound = replace(inside, reads=site, writes=site)
    assert prove([sound], model, sequences(20, 2)).stated.unexplained < 0.7


@pytest.mark.parametrize(
    ("end", "wrong"), [("reads", "layer.2.mlp.input"), ("writes", "layer.2")]
)
def test_a_transcoder_with_another_end_is_refused_and_named(
    model: Model, end: str, wrong: str
) -> None:
    sites = {"reads": "layer.2.mid", "writes": "layer.2.mlp"}
    states = model.capture(sequences(100, 1), list(sites.values()))
    rows = torch.from_numpy(states.tokens.positions > 0)
    ends = [states[site][rows] for site in sites.values()]
    sound = train(ends[0], "topk", 64, outputs=ends[1], steps=80)
    prove([sound], model, sequences(20, 2))
    with pytest.raises(StatesError, match=rf"; when it {end} {sites[end]}, "):
        prove([replace(sound, **{end: wrong})], model, sequences(20, 2))


def test_texts_of_one_token_prove_nothing(
    model: Model, trained: Callable[[Kind], Dictionary]
) -> None:
    with pytest.raises(StatesError, match="two tokens or more"):
        prove([trained("topk")], model, [[5], [6]])


def test_a_dictionary_that_knows_nothing_of_these_states(model: Model) -> None:
    states = model.capture(sequences(50, 1), "layer.2")
    untrained = train(states["layer.2"], "topk", 96, steps=0)
    with pytest.raises(StatesError, match="than of states whose numbers are shuffled"):
        prove([untrained], model, sequences(40, 2))


def test_states_that_are_not_finite(
    model: Model, trained: Callable[[Kind], Dictionary]
) -> None:
    states = model.capture(sequences(5, 2), "layer.2")
    states.values[0, 3] = torch.nan
    proof = Trials({"layer.2": states}, states.tokens.positions > 0)
    assert np.isnan(proof.run("", [trained("topk")]).unexplained)


def test_a_cross_layer_set_is_proved_by_its_sum(model: Model, tmp_path: Path) -> None:
    sites = "layer.1.mid,layer.1.mlp,layer.2.mid,layer.2.mlp"
    states = model.capture(sequences(200, 1), sites)
    first, second = states["layer.1.mid"], states["layer.2.mid"]
    lower = train(first, "relu", 64, outputs=states["layer.1.mlp"], steps=60)
    # Features of the first layer write the same to the second, which makes up for it.
    above = lower.directions
    rest = states["layer.2.mlp"] - lower.activations(first) @ above
    upper = train(second, "relu", 96, outputs=rest)
    members = [
        (lower, torch.stack([lower.directions, above], 1), lower.bias),
        (upper, upper.directions[:, None], upper.bias),
    ]
    for block, (member, decoder, bias) in enumerate(members):
        assert member.encoder is not None
        encoded = {
            f"W_enc_{block}": member.encoder.T.contiguous(),
            f"b_enc_{block}": member.encoder_bias,
            f"b_dec_{block}": bias,
        }
        save_file(encoded, tmp_path / f"W_enc_{block}.safetensors")
        decoded = {f"W_dec_{block}": decoder.contiguous()}
        save_file(decoded, tmp_path / f"W_dec_{block}.safetensors")
    hooks = "feature_input_hook: hook_resid_mid\nfeature_output_hook: hook_mlp_out\n"
    (tmp_path / "config.yaml").write_text(hooks)
    dictionary = Dictionary.read(tmp_path, model, "layer.2.mid", texts=sequences(40, 2))
    assert dictionary.proof is not None
    unexplained = dictionary.proof.stated.unexplained
    assert f"{unexplained:.1%} unexplained" in repr(dictionary)
    assert dictionary.facts["unexplained"] == unexplained


def test_a_model_that_computes_a_nan(trained: Callable[[Kind], Dictionary]) -> None:
    module = tiny_model("llama")
    spoilt = hs.load((module, None))
    with torch.no_grad():
        module.get_input_embeddings().weight[7, 0] = torch.nan
    with pytest.raises(NotFinite, match="NaN"):
        prove([trained("topk")], spoilt, [[5, 6, 7, 8]] * 3)
