"""What a dictionary is made of, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.directions.encoding import Encoding
from hiddenscope.directions.proof import scaled
from hiddenscope.errors import (
    ArgumentError,
    Error,
    FileError,
    NotFinite,
    SiteError,
    StatesError,
)
from hiddenscope.linear.probe import Probe
from hiddenscope.testing import tiny_model, tiny_tokenizer

FILES = Path(__file__).parent / "files"


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load((tiny_model("llama"), None))


@pytest.fixture(scope="module")
def states(model: hs.Model) -> hs.States:
    texts = [[k, k + 1, 5, 6, k, 9] for k in range(10, 30)]
    captured = model.capture(texts, "layer.2")
    assert isinstance(captured, hs.States)
    return captured


def test_a_feature_is_in_the_units_of_the_states() -> None:
    plain = hs.Dictionary.read(FILES / "saelens_standard")
    state = torch.randn(1, 6, generator=torch.Generator().manual_seed(0))
    halved = scaled(plain, 0.5)
    close = torch.testing.assert_close
    close(halved.activations(state), plain.activations(state * 0.5))
    close(halved.reconstruct(state), plain.reconstruct(state * 0.5) / 0.5)
    # States of Llama Scope are scaled, and so are its directions.
    for dictionary in (plain, halved, hs.Dictionary.read(FILES / "llama_scope")):
        activations = torch.zeros(2, len(dictionary))
        activations[1, 7] = 1
        nothing, moved = dictionary.decode(activations).double()
        close(
            dictionary[7].vectors[dictionary.writes], moved - nothing, check_dtype=False
        )


def test_random_directions_point_everywhere_and_are_scaled_to_fit(
    states: hs.States,
) -> None:
    drawn = hs.Dictionary.random(states, 64, 8)
    units = torch.nn.functional.normalize(drawn.directions)
    alike = (units @ units.T - torch.eye(64)).abs()
    assert alike.median() < 0.2
    rows = states["layer.2"][torch.from_numpy(states.tokens.positions > 0)]
    spread = rows - rows.mean(0)
    left = rows - drawn.reconstruct(rows)
    assert left.square().sum() < spread.square().sum()


def test_directions_of_one_site_are_taken_there() -> None:
    several = hs.Direction.of({"layer.1": [1.0, 0.0], "layer.2": [0.0, 1.0]})
    taken = hs.Dictionary.of([several], "layer.2")
    assert taken.directions.tolist() == [[0.0, 1.0]]
    with pytest.raises(SiteError, match="name none, or several"):
        hs.Dictionary.of([several])
    with pytest.raises(SiteError):
        hs.Dictionary.of([[0.0, 1.0]], "nonsense")


@pytest.mark.parametrize(
    "vectors",
    [
        [[0.0, 1.0], [1.0]],
        ["river"],
        [[0.0, float("nan")]],
        [],
        [3.0],
        torch.tensor([[1j, 0.0]]),
    ],
)
def test_what_is_no_set_of_vectors_is_refused(vectors: list) -> None:
    with pytest.raises(StatesError, match="vectors of one width"):
        hs.Dictionary.of(vectors, "layer.2")


def test_states_that_say_nothing_are_refused(
    model: hs.Model, states: hs.States
) -> None:
    single = model.capture([[5], [6]], "layer.2")
    broken = replace(states, values=states.values * torch.nan)
    for make in (
        lambda source: hs.Dictionary.pca(source, 2),
        lambda source: hs.Dictionary.random(source, 8, 2),
    ):
        with pytest.raises(StatesError, match="first tokens left out"):
            make(single)
        with pytest.raises(NotFinite):
            make(broken)
        alike = replace(states, values=states.values[:, :1].expand_as(states.values))
        with pytest.raises(StatesError, match="all states are equal"):
            make(alike)


def test_other_calls_that_cannot_be_meant_are_refused(model: hs.Model) -> None:
    dictionary = hs.Dictionary.of([[0.0, 2.0], [3.0, 0.0]], "layer.2")
    with pytest.raises(StatesError, match="has 2 features"):
        dictionary.decode(torch.ones(1, 3))
    with pytest.raises(SiteError, match="others are named"):
        hs.Dictionary.neurons(model, "*.mlp.neurons")
    with pytest.raises(StatesError, match="Cannot decode 1 activations"):
        dictionary.decode(torch.tensor(1.0))
    for use in (dictionary.encode, dictionary.activations):
        with pytest.raises(StatesError, match="Cannot encode states of width 1"):
            use(torch.tensor(1.0))
    with pytest.raises(Error, match="on device 'nope'"):
        dictionary.to("nope")


def test_how_many_random_directions_is_a_number_above_0(states: hs.States) -> None:
    for count, active in ((-5, 1), (0, 1), (True, 1), (8, 0), (8, True)):
        with pytest.raises(StatesError, match="must be an integer >= 1"):
            hs.Dictionary.random(states, count, active)


def test_directions_keep_no_gradient_and_have_a_length() -> None:
    rows = torch.ones(2, 3, requires_grad=True)
    assert not hs.Dictionary.of(rows, "layer.2").directions.requires_grad
    with pytest.raises(StatesError, match="with finite numbers"):
        hs.Dictionary.of([[1e300, 1e300]], "layer.2")


def test_a_list_of_features_is_refused_and_numpy_is_encoded() -> None:
    dictionary = hs.Dictionary.of([[0.0, 2.0], [3.0, 0.0]], "layer.2")
    state = np.array([[1.0, 5.0]], np.float32)
    assert dictionary.encode(state).to_dense().tolist() == [[5.0, 1.0]]
    assert dictionary[np.int64(1)].facts["feature"] == 1
    for index in ([1, 2], "1", 1.5, slice(2)):
        with pytest.raises(Error, match="integer"):
            dictionary[index]  # type: ignore[index]
    with pytest.raises(ArgumentError, match="states must be"):
        dictionary.encode("river")  # type: ignore[arg-type]


def test_the_features_of_a_dictionary_are_its_directions_in_order() -> None:
    dictionary = hs.Dictionary.of([[0.0, 2.0], [3.0, 0.0]], "layer.2")
    assert [direction.facts["feature"] for direction in dictionary] == [0, 1]
    again = hs.Dictionary.of(list(dictionary))
    assert torch.equal(again.directions, dictionary.directions)
    with pytest.raises(StatesError, match="not an array"):
        hs.Add(dictionary)


def test_an_encoding_without_what_it_needs_is_refused() -> None:
    for gate, name in (("topk", "k"), ("threshold", "threshold"), ("gated", "gain")):
        with pytest.raises(StatesError, match=f"{name} is missing|gate_bias is miss"):
            Encoding(gate)
    plain = hs.Dictionary.of([[0.0, 2.0], [3.0, 0.0]], "layer.2")
    with pytest.raises(StatesError, match="k is 3, and there are 2 features"):
        replace(plain, encoding=Encoding("topk", k=3))


def test_texts_are_of_no_use_without_a_model() -> None:
    with pytest.raises(ArgumentError, match="texts are for a proof"):
        hs.Dictionary.read(FILES / "saelens_standard", texts=["A text."])


@pytest.mark.parametrize(
    "encoding", [Encoding("topk", k=2), Encoding("groups", k=2)], ids=["k", "groups"]
)
def test_no_states_have_no_activations(encoding: Encoding) -> None:
    plain = hs.Dictionary.of(torch.eye(4), "layer.2")
    none = replace(plain, encoding=encoding).activations(torch.zeros(0, 4))
    assert none.shape == (0, 4)


def test_rows_that_stand_for_whole_texts_are_refused(tmp_path: Path) -> None:
    model = hs.load((tiny_model("llama"), tiny_tokenizer()))
    texts = [f"The rest {number}" for number in range(40)]
    hs.extract(model, texts, tmp_path / "pooled", sites="layer.1", pool="mean")
    store = hs.open(tmp_path / "pooled")
    for ask in (
        lambda: hs.Dictionary.fit(store, features=8, k=2),
        lambda: hs.Dictionary.pca(store, 2),
        lambda: hs.Dictionary.random(store, 8, 2),
        lambda: hs.features(store, dictionary="pca", site="layer.1"),
    ):
        with pytest.raises(StatesError, match="each row stands for a whole text"):
            ask()


def test_what_a_file_says_of_itself_is_printed_safely(tmp_path: Path) -> None:
    direction = hs.Direction.of([0.0, 1.0], sites="layer.2")
    hostile = replace(direction, facts={"origin": "\x1b[31mred", "feature": "\x07"})
    hostile.save(tmp_path / "d.gguf")
    again = hs.Direction.load(tmp_path / "d.gguf")
    for shown in (repr(again), again.title):
        assert "\\x1b[31mred" in shown
        assert shown.isprintable()


@pytest.mark.parametrize("site", [[[]], 7, {"a": 1}, None])
def test_a_probe_whose_site_is_no_name(tmp_path: Path, site: Any) -> None:
    probe = Probe(site="layer.2").fit([[0.0], [1.0]], [0, 1])
    probe.site = site
    probe.save(tmp_path / "probe.safetensors")
    with pytest.raises(FileError, match="its site is no name"):
        Probe.load(tmp_path / "probe.safetensors")
    probe.site = "\x1b[31mlayer.2"
    assert repr(probe).isprintable()
