"""Dictionary.fit: planted directions are learned, and a run is exact and resumable."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.cli.main import app
from hiddenscope.directions import feed as feeding
from hiddenscope.directions import training as trained
from hiddenscope.directions.training import REVIVAL, Trainer
from hiddenscope.errors import Error
from hiddenscope.store import StorePlan, StoreSequence, create
from hiddenscope.testing import tiny_model, tiny_tokenizer

WIDTH, FEATURES, ACTIVE = 32, 30, 2
SHORT = hs.Training(tokens=30_000, batch=100, rate=2e-2)
BRIEF = hs.Training(tokens=4_000, batch=100)


def planted(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sparse combinations of known directions, with a mean and a little noise."""
    directions = normalize(torch.randn(FEATURES, WIDTH, generator=drawn(1)))
    generator = drawn(seed + 2)
    acts = torch.rand(rows, FEATURES, generator=generator) < ACTIVE / FEATURES
    sizes = 1 + torch.rand(rows, FEATURES, generator=generator)
    noise = 0.02 * torch.randn(rows, WIDTH, generator=generator)
    return 7 * (acts * sizes @ directions + noise + 0.5), directions


def drawn(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def states_of(rows: Tensor, firsts: tuple[int, ...] = ()) -> hs.States:
    """States of one text, or of texts that begin at these rows."""
    begins = np.isin(np.arange(len(rows)), firsts)
    text = np.cumsum(begins) - (1 if begins[:1].any() else 0)
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(rows)), -1))
    positions = np.arange(len(rows)) - starts
    tokens = hs.Tokens(None, text, positions, positions, ("a",) * len(rows))
    return hs.States((hs.Site(1),), rows[None], tokens, hs.Source("toy"))


def store_of(path: Path, rows: Tensor, texts: int = 4) -> hs.Store:
    """A store of these rows, as texts of one length in as many units."""
    length = len(rows) // texts
    plan = StorePlan(
        {"model": "toy"}, {}, ("layer.1",), {"layer.1": rows.shape[1]}, "float32"
    )
    ids = tuple(range(length))
    spans = tuple((place, place + 1) for place in range(length))
    units = [[StoreSequence(text, 0, ids, spans, text)] for text in range(texts)]
    writer = create(path, plan, units)
    for unit, part in zip(writer.pending(), rows.split(length), strict=True):
        writer.commit(unit, {"layer.1": part.numpy()})
    writer.complete()
    return hs.open(path)


def unexplained(rows: Tensor, again: Tensor) -> float:
    left = (rows - again).square().sum() / (rows - rows.mean(0)).square().sum()
    return float(left)


def numbers(dictionary: hs.Dictionary) -> list[Tensor]:
    assert dictionary.encoder is not None
    assert dictionary.encoding.threshold is not None
    return [
        dictionary.directions,
        dictionary.encoder,
        dictionary.encoder_bias,
        dictionary.bias,
        dictionary.encoding.threshold,
    ]


def same(one: hs.Dictionary, other: hs.Dictionary) -> bool:
    return all(map(torch.equal, numbers(one), numbers(other)))


@pytest.fixture(scope="module")
def learned() -> hs.Dictionary:
    rows, _ = planted(2000)
    return hs.Dictionary.fit(states_of(rows), features=48, k=ACTIVE, training=SHORT)


def test_planted_directions_are_learned(learned: hs.Dictionary) -> None:
    _, directions = planted(1)
    cosines = (directions @ learned.directions.T).max(1).values
    # Of 44 seeds 27 miss one to three of the thirty, and this one misses one.
    assert (cosines > 0.9).sum() >= FEATURES - 2


def test_less_is_left_than_by_as_many_components(learned: hs.Dictionary) -> None:
    rows, _ = planted(2000, seed=5)
    components = hs.Dictionary.pca(states_of(rows), ACTIVE)
    left = unexplained(rows, learned.reconstruct(rows))
    assert left < 0.1 * unexplained(rows, components.reconstruct(rows))
    assert learned.facts["unexplained"] == pytest.approx(left, rel=1)


def test_the_threshold_lets_k_features_act_in_states_that_were_not_seen(
    learned: hs.Dictionary,
) -> None:
    rows, _ = planted(2000, seed=5)
    active = (learned.activations(rows) > 0).sum(1).float().mean()
    assert active == pytest.approx(ACTIVE, rel=0.15)


def test_directions_have_length_one_and_states_their_own_units(
    learned: hs.Dictionary,
) -> None:
    rows, _ = planted(2000, seed=5)
    torch.testing.assert_close(learned.directions.norm(dim=1), torch.ones(48))
    assert unexplained(rows, learned.reconstruct(rows)) < 0.1


def test_a_saved_dictionary_reads_as_the_same(
    learned: hs.Dictionary, tmp_path: Path
) -> None:
    learned.save(tmp_path)
    rows, _ = planted(50)
    again = hs.Dictionary.read(tmp_path)
    assert torch.equal(again.activations(rows), learned.activations(rows))
    assert again.encoding.gate == "threshold"


@pytest.mark.parametrize("prefixes", [(), (8, 20)])
def test_a_step_follows_the_gradient_that_autograd_computes(
    prefixes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    width, features, k, batch = 12, 48, 5, 64
    training = hs.Training(tokens=100, prefixes=prefixes, device="cpu")
    trainer = Trainer(width, features, k, training, 10)
    trainer.size += 1
    rows = torch.randn(batch, width, generator=drawn(0))
    noise = torch.randn(len(trainer.weights), generator=drawn(1))
    trainer.weights.detach().add_(0.1 * noise)
    dead = slice(5, 15)
    trainer.idle[dead] = 1000
    weights = trainer.weights.detach().clone().requires_grad_()
    directions, encoder, encoder_bias, bias = trainer.parts(weights)
    monkeypatch.setattr(trainer, "_update", lambda: setattr(trainer, "step", 1))
    trainer.learn(rows)

    # The same in full: all activations, dense, and one product for each prefix.
    products = (rows - bias) @ encoder.T + encoder_bias
    least = products.flatten().topk(k * batch).values[-1]
    acts = (products * (products >= least)).relu()
    loss = torch.zeros(())
    ends = (*prefixes, features)
    for end in ends:
        again = acts[:, :end] @ directions[:end] + bias
        loss = loss + (rows - again).square().sum() / (batch * len(ends))
    error = (rows - again).detach()
    some = products[:, dead].relu()
    some = some * (some >= some.topk(width // 2).values[:, -1:])
    missed = (error - some @ directions[dead]).square().sum()
    loss = loss + REVIVAL * missed / (error - error.mean(0)).square().sum()
    loss.backward()
    torch.testing.assert_close(trainer.weights.grad, weights.grad)
    torch.testing.assert_close(trainer.threshold, least.detach())


def test_the_first_features_of_a_matryoshka_do_alone() -> None:
    rows, _ = planted(2000)
    left = {}
    for prefixes in ((), (4,)):
        training = replace(SHORT, prefixes=prefixes, tokens=10_000)
        fitted = hs.Dictionary.fit(
            states_of(rows), features=48, k=ACTIVE, training=training
        )
        activations = fitted.activations(rows)
        activations[:, 4:] = 0
        left[prefixes] = unexplained(rows, fitted.decode(activations))
    assert left[(4,)] < left[()]


def test_the_same_seed_gives_the_same_numbers_and_another_does_not() -> None:
    rows, _ = planted(500)
    fits = []
    for seed in (0, 0, 1):
        training = replace(BRIEF, seed=seed)
        fits.append(
            hs.Dictionary.fit(states_of(rows), features=32, k=3, training=training)
        )
    assert same(fits[0], fits[1])
    assert not same(fits[0], fits[2])


def test_a_store_states_and_texts_in_many_portions_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = planted(800)
    store = store_of(tmp_path, rows)
    states = store.to_states()
    kinds = []
    for portion in (2**30, 2**14):
        monkeypatch.setattr(feeding, "PORTION", portion)
        monkeypatch.setattr(feeding, "RUN", 64)
        of_store = hs.Dictionary.fit(store, features=32, k=3, training=BRIEF)
        of_states = hs.Dictionary.fit(states, features=32, k=3, training=BRIEF)
        assert same(of_store, of_states)
        kinds.append(of_store)
    assert not same(*kinds)
    assert kinds[0].facts["rows"] == 796
    assert kinds[0].reads == "layer.1"


def test_every_state_is_fed_once_in_a_pass_whatever_the_portions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.arange(1000.0)[:, None].repeat(1, 4)
    monkeypatch.setattr(feeding, "PORTION", 2**12)
    monkeypatch.setattr(feeding, "RUN", 10)
    feed = feeding.feed_of(states_of(rows, (0, 500)), "", None, False)
    batches = feed.batches(50, 0, 0, "cpu")
    fed: list[float] = []
    while len(fed) < 998:
        fed += next(batches)[:, 0].tolist()
    # The last batch goes on into the next pass.
    assert sorted(fed[:998]) == [*range(1, 500), *range(501, 1000)]
    assert fed != sorted(fed)
    later = feed.batches(50, 0, 7, "cpu")
    begun = feed.batches(50, 0, 0, "cpu")
    for _ in range(7):
        next(begun)
    for _ in range(40):
        assert torch.equal(next(begun), next(later))


def test_every_batch_is_whole_and_its_states_are_counted() -> None:
    rows, _ = planted(330)
    feed = feeding.feed_of(states_of(rows), "", None, False)
    batches = islice(feed.batches(250, 0, 3, "cpu"), 9)
    assert {len(batch) for batch in batches} == {250}
    training = replace(BRIEF, batch=250)
    fitted = hs.Dictionary.fit(states_of(rows), features=32, k=3, training=training)
    assert fitted.facts["tokens"] == 4_000
    small = replace(BRIEF, tokens=41, batch=2)
    fitted = hs.Dictionary.fit(states_of(rows), features=32, k=3, training=small)
    assert fitted.facts["tokens"] == 42 and fitted.facts["unexplained"] > 0


def test_a_checkpoint_that_cannot_be_written_is_said_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = planted(330)
    monkeypatch.setattr(Trainer, "learn", lambda *given: pytest.fail("a step was made"))
    with pytest.raises((Error, OSError), match="no/such"):
        hs.Dictionary.fit(
            states_of(rows),
            features=32,
            k=3,
            training=BRIEF,
            checkpoint=tmp_path / "no/such/run.safetensors",
        )


def test_texts_of_a_model_are_fed_without_their_first_tokens() -> None:
    model = hs.load((tiny_model("llama"), None))
    texts = torch.randint(5, 90, (30, 6), generator=drawn(0)).tolist()
    captured = model.capture(texts, "layer.2")
    assert isinstance(captured, hs.States)
    fitted = hs.Dictionary.fit(
        model, "layer.2", features=40, k=4, texts=texts, training=BRIEF
    )
    every = replace(BRIEF, first_tokens=True)
    of_all = hs.Dictionary.fit(captured, features=40, k=4, training=every)
    assert fitted.facts["rows"] == 150
    assert of_all.facts["rows"] == 180


@pytest.mark.parametrize("prefixes", [(), (8,)])
def test_an_interrupted_run_goes_on_to_the_same_numbers(
    prefixes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Servers of other tests may have threads of their own.
    others = threading.active_count()
    rows, _ = planted(900)
    monkeypatch.setattr(feeding, "PORTION", 2**14)
    training = replace(SHORT, tokens=6_000, batch=50, prefixes=prefixes)
    options: dict[str, Any] = {"features": 48, "k": 3, "training": training}
    whole = hs.Dictionary.fit(states_of(rows), **options)
    learn = Trainer.learn

    def interrupted(trainer: Trainer, states: Tensor) -> None:
        learn(trainer, states)
        if trainer.step == 50:
            os.kill(os.getpid(), signal.SIGINT)

    path = tmp_path / "run.safetensors"
    monkeypatch.setattr(Trainer, "learn", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hs.Dictionary.fit(states_of(rows), checkpoint=path, **options)
    monkeypatch.setattr(Trainer, "learn", learn)
    amounts = []
    with progress.sent_to(lambda what, done, total: amounts.append((done, total))):
        again = hs.Dictionary.fit(states_of(rows), checkpoint=path, **options)
    assert same(whole, again)
    assert again.facts == whole.facts
    assert 50 <= amounts[1][0] < 120
    assert amounts[-1] == (120, 120)
    # A run that is done is not done again.
    assert same(whole, hs.Dictionary.fit(states_of(rows), checkpoint=path, **options))
    assert threading.active_count() < others + 3


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    rows, _ = planted(200)
    path = tmp_path / "run.safetensors"
    hs.Dictionary.fit(
        states_of(rows), features=16, k=2, training=BRIEF, checkpoint=path
    )
    with pytest.raises(Error, match=r"another run: k was 2\. Give k=2"):
        hs.Dictionary.fit(
            states_of(rows), features=16, k=3, training=BRIEF, checkpoint=path
        )
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(Error, match="not those that were written"):
        hs.Dictionary.fit(
            states_of(rows), features=16, k=2, training=BRIEF, checkpoint=path
        )


def test_a_checkpoint_of_other_states_or_without_a_tensor_is_refused(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.safetensors"
    options: dict[str, Any] = {"features": 16, "k": 2, "checkpoint": path}
    rows, _ = planted(300)
    hs.Dictionary.fit(states_of(rows), training=BRIEF, **options)
    others, _ = planted(300, seed=1)
    with pytest.raises(
        Error, match="the states there have another mean. Give the same"
    ):
        hs.Dictionary.fit(states_of(others), training=BRIEF, **options)
    longer = replace(BRIEF, tokens=8_000)
    with pytest.raises(Error, match=r"tokens was 4000\. Give tokens=4000, or another"):
        hs.Dictionary.fit(states_of(rows), training=longer, **options)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    del tensors["idle"]
    save_file(tensors, path, metadata)
    with pytest.raises(Error, match="not those that were written. Save it again"):
        hs.Dictionary.fit(states_of(rows), training=BRIEF, **options)
    save_file(tensors, path)
    with pytest.raises(Error, match="it has no checksum"):
        hs.Dictionary.fit(states_of(rows), training=BRIEF, **options)


def refused() -> Iterator[tuple[dict[str, Any], str]]:
    rows, _ = planted(200)
    damaged = rows.clone()
    damaged[7, 3] = torch.nan
    yield {}, "layer.1: k is 32, and there are 16 features. Give k from 1 to 16"
    for k in (0, True):
        yield {"k": k}, "k must be an integer >= 1"
    yield {"k": 2, "site": 1}, "a site is a string"
    yield (
        {"k": 2, "features": 300},
        "there are 200 states, besides those of first tokens",
    )
    yield {"k": 2, "source": states_of(damaged)}, "has a NaN"
    yield {"k": 2, "source": states_of(rows[:1].repeat(200, 1))}, "states are equal"
    yield {"k": 2, "texts": ["a"]}, "a model needs texts"
    yield {"k": 2, "training": hs.Training(prefixes=(8, 8))}, "rising numbers"
    prefixes: Any = (2.5,)
    yield (
        {"k": 2, "training": hs.Training(prefixes=prefixes)},
        "a prefix must be an int",
    )
    endless = replace(BRIEF, rate=1e30)
    yield {"k": 2, "training": endless}, "grow without bound. Give a lower rate"
    yield {"k": 2, "training": hs.Training(tokens=0)}, "tokens must be an integer"
    # One state has no spread to be scaled by.
    yield {"k": 2, "training": hs.Training(batch=1)}, "batch must be an integer >= 2"
    for rate in (0.0, -1.0, float("nan")):
        training = hs.Training(rate=rate)
        yield {"k": 2, "training": training}, "learning rate is .* Give one above 0"
    yield {"k": 2, "features": 0}, "features must be an integer >= 1: got 0"
    for device in ("nope", "cuda:99", "meta"):
        training = replace(BRIEF, device=device)
        yield {"k": 2, "training": training}, f"Cannot load on device '{device}'"
    yield {"k": 2, "site": "layer.9"}, "layer.9"
    both = states_of(rows)
    values = both.values[0].expand(2, -1, -1)
    both = replace(both, sites=(hs.Site(1), hs.Site(2)), values=values)
    yield {"k": 2, "source": both}, "it lies at one site, and these are 2"


@pytest.mark.parametrize(("change", "message"), list(refused()))
def test_what_cannot_be_fitted_is_said_in_a_sentence(
    change: dict[str, Any], message: str
) -> None:
    rows, _ = planted(200)
    options = {"source": states_of(rows), "features": 16, "training": BRIEF, **change}
    with pytest.raises(Error, match=message):
        hs.Dictionary.fit(**options)


def test_an_empty_store_is_said_to_be_empty(tmp_path: Path) -> None:
    plan = StorePlan({"model": "toy"}, {}, ("layer.1",), {"layer.1": 4}, "float32")
    text = StoreSequence(0, 0, (5, 6), ((0, 1), (1, 2)), 0)
    create(tmp_path, plan, [[text]])
    with pytest.raises(Error, match="there are 0 states"):
        hs.Dictionary.fit(hs.open(tmp_path), features=16, k=2)


def test_the_largest_products_are_exact_whatever_was_likely() -> None:
    products = torch.randn(5000, generator=drawn(3))
    trainer = Trainer(4, 10, 2, replace(BRIEF, device="cpu"), 1)
    for smallest in (-9.0, 0.0, 1.0, 9.0):
        trainer.threshold.fill_(smallest)
        places = trainer._largest(products, 700)
        assert torch.equal(places, places.sort().values)
        assert torch.equal(
            products[places].sort().values, products.sort().values[-700:]
        )


def test_features_that_do_not_act_are_revived(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = planted(600)
    dead = []
    for weight in (0.0, REVIVAL):
        monkeypatch.setattr(trained, "REVIVAL", weight)
        trainer = Trainer(WIDTH, 32, 2, replace(BRIEF, device="cpu", rate=1e-2), 160)
        trainer.measure(rows)
        # So low a bias keeps them below the others, but not always below zero.
        trainer.parts(trainer.weights.detach())[2][:8] = -0.3
        for _ in range(150):
            order = torch.randperm(600, generator=drawn(trainer.step))
            trainer.learn(rows[order[:100]])
        dead.append(int((trainer.idle > 400).sum()))
    assert dead[1] < 0.6 * dead[0], dead


def test_features_live_where_a_few_states_are_massive() -> None:
    # One state in 200 is a hundred times as long as the others, along one direction.
    rows, directions = planted(1000)
    massive = rows.clone()
    massive[::200] += 4000 * directions[0]
    training = replace(SHORT, tokens=8_000)
    fitted = hs.Dictionary.fit(
        states_of(massive), features=32, k=ACTIVE, training=training
    )
    is_alive = (fitted.activations(rows) > 0).any(0)
    assert is_alive.sum() >= 28
    assert unexplained(rows, fitted.reconstruct(rows)) < 0.2


def test_the_first_reconstruction_is_as_long_as_it_should_be() -> None:
    rows, _ = planted(500)
    trainer = Trainer(WIDTH, 512, 8, replace(BRIEF, device="cpu"), 10)
    trainer.measure(rows)
    left = []
    for longer in (0.9, 1.0, 1.1):
        with torch.no_grad():
            states = trainer._scaled(rows)
            *_, missed = trainer._encoded(states)
        left.append(float((longer * (missed[:, 0] + states) - states).square().sum()))
    assert left[1] == min(left)
    assert left[1] < states.square().sum()


def test_what_is_left_after_few_steps_is_what_was_measured() -> None:
    rows, _ = planted(2000)
    training = hs.Training(tokens=3 * 500, batch=500, rate=1e-9)
    fitted = hs.Dictionary.fit(
        states_of(rows), features=48, k=ACTIVE, training=training
    )
    left = (rows - fitted.reconstruct(rows)).square().sum()
    left /= (rows - rows.mean(0)).square().sum()
    assert fitted.facts["unexplained"] == pytest.approx(float(left), rel=0.15)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_dictionary_is_fitted_whatever_the_gradient_mode(mode: Any) -> None:
    rows, _ = planted(200)
    training = hs.Training(tokens=400, batch=100)
    expected = hs.Dictionary.fit(states_of(rows), features=8, k=2, training=training)
    with mode():
        states = states_of(rows.clone())
        again = hs.Dictionary.fit(states, features=8, k=2, training=training)
        assert not torch.is_grad_enabled()
    assert torch.equal(again.directions, expected.directions)


def test_the_command_keeps_a_dictionary_and_goes_on(tmp_path: Path) -> None:
    model = hs.load((tiny_model("gpt2"), tiny_tokenizer()))
    texts = [f"the river {number} runs to the old city" for number in range(40)]
    hs.extract(model, texts, tmp_path / "store", sites="layer.2")
    words = ["fit", str(tmp_path / "store"), "--to", str(tmp_path / "sae")]
    words += ["--features", "16", "-k", "4", "--tokens", "4000", "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["k"] == 4
    assert repr(hs.Dictionary.read(tmp_path / "sae")).startswith("Dictionary(16 feat")
    again = CliRunner().invoke(app, words)
    assert again.stdout == done.stdout
    other = CliRunner().invoke(app, [*words, "--seed", "1"])
    assert other.exit_code == 2
    assert "seed was 0" in other.stderr
    missing = CliRunner().invoke(app, ["fit", "none", "--to", "x", "--features", "2"])
    assert missing.exit_code == 2
    assert not Path("x").exists()
