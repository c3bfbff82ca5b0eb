"""States of sites whose widths differ."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from hiddenscope.app.stored import norms_of
from hiddenscope.app.stores import describe_states
from hiddenscope.cli import main as cli
from hiddenscope.errors import FileError, StatesError
from hiddenscope.sites import Site
from hiddenscope.states import MixedValues, Pair, Source, States, Tokens, join
from hiddenscope.states.mixed import stack_sites
from hiddenscope.testing import tiny_model, tiny_tokenizer

WIDTHS = {"layer.0": 6, "layer.1": 6, "layer.1.attn": 4, "layer.2": 6, "final": 4}
SENTENCE = (
    "layer.0 is 6 wide and layer.1.attn is 4 wide. Select sites of one width with"
    " .select(sites=...), or read one with states['layer.1.attn']."
)


def make(
    dtype: torch.dtype = torch.float32, stack: str | None = None, seed: int = 0
) -> tuple[States, dict[Site, torch.Tensor]]:
    """States of two texts, and the rows of each site that they were made of."""
    generator = torch.Generator().manual_seed(seed)
    prefix = f"{stack}." if stack else ""
    rows = {}
    for name, width in WIDTHS.items():
        values = torch.randn(5, width, generator=generator).to(dtype)
        rows[Site.parse(prefix + name)] = values
    sites = tuple(sorted(rows))
    tokens = Tokens(
        ("a b c", "d e"), [0, 0, 0, 1, 1], [0, 1, 2, 0, 1], range(5), tuple("abcde")
    )
    values = stack_sites(sites, [rows[site] for site in sites])
    return States(sites, values, tokens, Source("toy", cls=None)), rows


def same(states: States, others: States) -> bool:
    pairs = zip(states.values, others.values, strict=True)
    return states.sites == others.sites and all(torch.equal(a, b) for a, b in pairs)


def test_each_site_is_read_in_its_width() -> None:
    states, rows = make()
    assert isinstance(states.values, MixedValues)
    for site, values in rows.items():
        assert torch.equal(states[site], values)
    assert states.widths == tuple(rows[site].shape[1] for site in states.sites)
    assert len(states.values) == 5
    assert torch.equal(states.values[-1], states["final"])
    assert torch.equal(states.values[np.int64(0)], states["layer.0"])
    with pytest.raises(IndexError):
        states.values[5]
    assert states.values.dtype == torch.float32
    assert states.values.device == torch.device("cpu")
    assert states.values.nbytes == 4 * 5 * sum(WIDTHS.values())


REFUSED: dict[str, Callable[[States], Any]] = {
    "shape": lambda states: states.values.shape,
    "width": lambda states: states.width,
    "float": lambda states: states.values.float(),
    "numpy": lambda states: np.asarray(states.values),
    "a slice": lambda states: states.values[:2],  # type: ignore[index]
    "two axes": lambda states: states.values[0, 1],  # type: ignore[index]
    "a mask": lambda states: states.values[torch.ones(5) > 0],  # type: ignore[index]
    "sum": lambda states: states.values + 1,
    "sum from the right": lambda states: 1 + states.values,
    "tensor": lambda states: torch.ones(1) * states.values,  # type: ignore[operator]
    "minus": lambda states: -states.values,
    "equal": lambda states: states.values == states.values,
    "stack": lambda states: torch.stack([states.values]),  # type: ignore[list-item]
    "function": lambda states: torch.equal(states.values, states.values),  # type: ignore[arg-type]
    "pool": lambda states: states.pool("mean"),
    "pool last": lambda states: states.pool("last"),
    "mix": lambda states: states.mix([1.0] * 5),
    "padded": lambda states: states.padded(),
    "to_numpy": lambda states: states.to_numpy(),
    "to_pandas": lambda states: states.to_pandas(),
    "to_xarray": lambda states: states.to_xarray(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_one_tensor_says_the_widths(name: str) -> None:
    states, _ = make()
    with pytest.raises(StatesError) as caught:
        REFUSED[name](states)
    assert str(caught.value).endswith(SENTENCE)


def test_other_attributes_are_simply_missing() -> None:
    values = make()[0].values
    assert not hasattr(values, "_repr_html_")
    assert len({values, values}) == 1
    with pytest.raises(AttributeError):
        getattr(values, "no_such_thing")  # noqa: B009
    with pytest.raises(AttributeError):
        values.sites = ()  # type: ignore[misc, union-attr]
    assert torch.equal(copy.deepcopy(values)[2], values[2])


def test_sites_of_one_width_are_a_tensor_that_shares_memory() -> None:
    states, rows = make()
    layers = states.select(sites="layer.*")
    assert isinstance(layers.values, torch.Tensor)
    assert layers.values.shape == (3, 5, 6)
    assert layers.values.data_ptr() == states["layer.0"].data_ptr()
    both = states.select(sites=["layer.2", "final", "layer.0"], tokens=[1, 4])
    assert both.widths == (6, 6, 4)
    for site in both.sites:
        assert torch.equal(both[site], rows[site][[1, 4]])
    assert states.select(sites="final").width == 4


def test_texts_are_taken_apart_and_joined_again() -> None:
    states, rows = make()
    second = states.of(1)
    for site in states.sites:
        assert torch.equal(second[site], rows[site][3:])
    assert same(join([states.of(0), second]), states)
    with pytest.raises(StatesError, match="differ in sites, width"):
        join([states, states.select(sites="layer.*")])


def test_blocks_and_pooling_by_site() -> None:
    states, rows = make()
    for site, values in rows.items():
        assert torch.equal(torch.cat(list(states.blocks(site, 2))), values)
        pooled = states.pool("mean", site)
        expected = torch.stack([values[:3].mean(0), values[3:].mean(0)])
        torch.testing.assert_close(pooled, expected)


def test_a_value_that_is_not_finite_is_named() -> None:
    states, _ = make()
    states.check_finite()
    states["final"][3, 1] = torch.nan
    with pytest.raises(ArithmeticError, match="a NaN at final, token"):
        states.check_finite()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64]
)
def test_what_is_saved_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    states, _ = make(dtype)
    path = tmp_path / "states.safetensors"
    states.save(path)
    again = States.load(path)
    assert again.values.dtype == dtype
    assert same(again, states)
    assert again.source == states.source
    assert again.tokens.strings == states.tokens.strings


def test_a_pair_whose_encoder_alone_is_mixed_comes_back(tmp_path: Path) -> None:
    encoder, _ = make(stack="encoder")
    decoder = make(stack="decoder")[0].select(sites="layer.*")
    pair = Pair(encoder, decoder)
    path = tmp_path / "states.safetensors"
    pair.save(path)
    again = Pair.load(path)
    assert same(again.encoder, encoder)
    assert isinstance(again.decoder.values, torch.Tensor)
    assert same(again.decoder, decoder)
    assert again["encoder.final"].shape == (5, 4)


@pytest.mark.parametrize("widths", [[6] * 5, [6, 4], [6, 6, 6, 6, 4], "6", [None]])
def test_a_file_whose_widths_do_not_fit_is_refused(tmp_path: Path, widths: Any) -> None:
    states, _ = make()
    assert isinstance(states.values, MixedValues)
    path = tmp_path / "states.safetensors"
    # The header says other widths than the tensors have.
    object.__setattr__(states.values, "widths", widths)
    states.save(path)
    with pytest.raises(FileError, match="damaged"):
        States.load(path)


def test_what_does_not_fit_is_refused() -> None:
    states, rows = make()
    values = states.values
    with pytest.raises(StatesError, match="of 5 tokens"):
        States(states.sites[:2], values, states.tokens, states.source)
    with pytest.raises(StatesError, match="of 5 tokens"):
        States(states.sites, values, states.tokens.of(0), states.source)
    whole = [rows[site].to(torch.int64) for site in states.sites]
    integers = stack_sites(states.sites, whole)
    with pytest.raises(StatesError, match="int64"):
        States(states.sites, integers, states.tokens, states.source)
    narrow = {6: torch.zeros(3, 5, 6), 4: torch.zeros(2, 5, 4).bfloat16()}
    with pytest.raises(StatesError, match="dtype"):
        MixedValues(states.sites, states.widths, narrow)


def test_the_repr_shows_the_widths() -> None:
    states, _ = make()
    first, sites, _ = repr(states).splitlines()
    assert first == "States of toy, float32: 5 sites x 5 tokens x 6 or 4"
    assert "(6 wide); " in sites
    assert sites.endswith("(4 wide)")
    assert repr(states.values) == "<MixedValues float32: 5 sites, 6 and 4 wide>"


def test_the_workbench_lists_a_file_of_mixed_states(tmp_path: Path) -> None:
    states, _ = make()
    path = tmp_path / "states.safetensors"
    states.save(path)
    description = describe_states("name", "label", path)
    assert description is not None
    assert (description.width, description.tokens, description.texts) == (6, 5, 2)
    norms = norms_of(states.of(1)).data["norm"]
    assert norms.shape == (5, 2)


def test_the_command_keeps_and_describes_mixed_states(tmp_path: Path) -> None:
    module = tiny_model("deepseek_v4")
    module.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    path = tmp_path / "states.safetensors"
    arguments = ["capture", "a b", "--model", str(tmp_path / "model"), "--json"]
    arguments += ["--sites", "layer.1,final", "--out", str(path)]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    described = json.loads(result.stdout)
    states = States.load(path)
    assert described["widths"] == list(states.widths) == [256, 64]
    assert described["shape"] == [2, len(states.tokens)]
