"""Dictionaries on a GPU: fitted to the same bits again, and proved as on a CPU."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.directions.training import Trainer
from hiddenscope.errors import StatesError
from hiddenscope.testing import tiny_model
from labs.dictionaries.__main__ import sequences
from labs.dictionaries.train import train
from tests.unit.directions.test_fit import planted, same, states_of, store_of

TRAINING = hs.Training(tokens=30_000, batch=100, rate=2e-2, device="cuda")


@pytest.mark.parametrize("prefixes", [(), (8, 20)])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    prefixes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = planted(2000)
    training = hs.Training(20_000, 100, prefixes, 2e-2, device="cuda")
    options: dict[str, Any] = {"features": 48, "k": 2, "training": training}
    store = store_of(tmp_path / "store", rows)
    whole = hs.Dictionary.fit(store, **options)
    assert same(whole, hs.Dictionary.fit(store, **options))
    learn = Trainer.learn

    def interrupted(trainer: Trainer, states: Tensor) -> None:
        learn(trainer, states)
        if trainer.step == 70:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "learn", interrupted)
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        hs.Dictionary.fit(store, checkpoint=path, **options)
    monkeypatch.setattr(Trainer, "learn", learn)
    assert same(whole, hs.Dictionary.fit(store, checkpoint=path, **options))


def test_planted_directions_are_learned() -> None:
    rows, directions = planted(2000)
    fitted = hs.Dictionary.fit(states_of(rows), features=48, k=2, training=TRAINING)
    assert fitted.directions.is_cuda
    cosines = (directions.cuda() @ fitted.directions.T).max(1).values
    assert (cosines > 0.9).float().mean() > 0.9
    acts = (fitted.activations(rows.cuda()) > 0).sum(1).float().mean()
    assert float(acts) == pytest.approx(2, rel=0.15)


def test_many_activations_of_one_step_are_the_same_again() -> None:
    # Large enough for the ways of summing that small tensors do not take.
    rows = torch.randn(4096, 256, generator=torch.Generator().manual_seed(0)).cuda()
    weights = []
    for _ in range(2):
        training = hs.Training(device="cuda", prefixes=(512, 2048))
        trainer = Trainer(256, 8192, 32, training, 10)
        trainer.measure(rows)
        for _ in range(5):
            trainer.learn(rows)
        weights.append(trainer.weights.detach().clone())
    assert torch.equal(*weights)


def test_texts_of_a_model_on_the_gpu_are_trained_on_there() -> None:
    model = hs.load((tiny_model("llama").cuda(), None))
    texts = torch.randint(5, 90, (30, 6)).tolist()
    fitted = hs.Dictionary.fit(
        model,
        "layer.2",
        features=40,
        k=4,
        texts=texts,
        training=hs.Training(tokens=4_000, batch=100),
    )
    assert fitted.directions.is_cuda
    assert fitted.facts["rows"] == 150


def test_a_file_is_proved_on_a_model_on_the_gpu(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama"), None))
    states = model.capture(sequences(200, 1), "layer.2")["layer.2"]
    train(states, "topk", 96, steps=120).save(tmp_path)
    texts = sequences(40, 2)
    plain = hs.Dictionary.read(tmp_path, model, texts=texts)
    there = hs.load((tiny_model("llama").cuda(), None))
    proved = hs.Dictionary.read(tmp_path, there, texts=texts)
    assert proved.directions.is_cuda
    assert plain.proof is not None
    assert proved.proof is not None
    expected = plain.proof.stated.unexplained
    assert proved.proof.stated.unexplained == pytest.approx(expected, rel=1e-3)
    config = json.loads((tmp_path / "cfg.json").read_text())
    config["metadata"]["hook_name"] = "blocks.0.hook_resid_post"
    (tmp_path / "cfg.json").write_text(json.dumps(config))
    with pytest.raises(StatesError, match="at layer.2"):
        hs.Dictionary.read(tmp_path, there, texts=texts)
