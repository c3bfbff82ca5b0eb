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

from hiddenscope.app.cells import norms_of
from hiddenscope.app.library import describe_states
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
    dtype: torch.dtype = torch.float32, stack: str | None = None
) -> tuple[States, dict[Site, torch.Tensor]]:
    """States of two texts, and the rows of each site that they were made of."""
    generator = torch.Generator().manual_seed(0)
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
    values = states.values
    assert isinstance(values, MixedValues)
    for site, wanted in rows.items():
        assert torch.equal(states[site], wanted)
        assert torch.equal(torch.cat(list(states.blocks(site, 2))), wanted)
        mean = torch.stack([wanted[:3].mean(0), wanted[3:].mean(0)])
        torch.testing.assert_close(states.pool("mean", site), mean)
    assert states.widths == tuple(rows[site].shape[1] for site in states.sites)
    assert len(values) == 5
    assert torch.equal(values[-1], states["final"])
    assert torch.equal(values[np.int64(0)], states["layer.0"])
    with pytest.raises(IndexError):
        values[5]
    assert values.dtype == torch.float32
    assert values.device == torch.device("cpu")
    assert values.nbytes == 4 * 5 * sum(WIDTHS.values())
    first, sites, _ = repr(states).splitlines()
    assert first == "States of toy, float32: 5 sites x 5 tokens x 6 or 4"
    assert "(6 wide); " in sites
    assert sites.endswith("(4 wide)")
    assert repr(values) == "<MixedValues float32: 5 sites, 6 and 4 wide>"


def test_what_needs_one_tensor_says_the_widths() -> None:
    states: Any = make()[0]
    values = states.values
    refused: list[Callable[[], Any]] = [
        lambda: values.shape,
        lambda: states.width,
        lambda: values.float(),
        lambda: np.asarray(values),
        lambda: values[:2],
        lambda: values[torch.ones(5) > 0],
        lambda: values + 1,
        lambda: 1 + values,
        lambda: -values,
        lambda: values == values,
        lambda: torch.stack([values]),
        lambda: states.pool("mean"),
        lambda: states.mix([1.0] * 5),
        states.padded,
        states.to_numpy,
        states.to_pandas,
        states.to_xarray,
    ]
    for number, call in enumerate(refused):
        with pytest.raises(StatesError) as caught:
            call()
        assert str(caught.value).endswith(SENTENCE), number
    # Other attributes are simply missing.
    assert not hasattr(values, "_repr_html_")
    assert len({values, values}) == 1
    with pytest.raises(AttributeError):
        getattr(values, "no_such_thing")  # noqa: B009
    with pytest.raises(AttributeError):
        values.sites = ()
    assert torch.equal(copy.deepcopy(values)[2], values[2])


def test_sites_and_texts_are_taken_apart_and_joined_again() -> None:
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
    second = states.of(1)
    for site in states.sites:
        assert torch.equal(second[site], rows[site][3:])
    assert same(join([states.of(0), second]), states)
    with pytest.raises(StatesError, match="differ in sites, width"):
        join([states, layers])


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "states.safetensors"
    for dtype in (torch.float32, torch.bfloat16):
        states, _ = make(dtype)
        states.save(path)
        again = States.load(path)
        assert again.values.dtype == dtype
        assert same(again, states)
        assert again.source == states.source
        assert again.tokens.strings == states.tokens.strings
    description = describe_states("name", "label", path)
    assert description is not None
    assert (description.width, description.tokens, description.texts) == (6, 5, 2)
    assert norms_of(states.of(1)).data["norm"].shape == (5, 2)
    # A pair whose encoder alone is mixed.
    encoder, _ = make(stack="encoder")
    decoder = make(stack="decoder")[0].select(sites="layer.*")
    Pair(encoder, decoder).save(path)
    pair = Pair.load(path)
    assert same(pair.encoder, encoder)
    assert isinstance(pair.decoder.values, torch.Tensor)
    assert same(pair.decoder, decoder)
    assert pair["encoder.final"].shape == (5, 4)
    for widths in ([6] * 5, [6, 4], [6, 6, 6, 6, 4], "6", [None]):
        states, _ = make()
        # The header says other widths than the tensors have.
        object.__setattr__(states.values, "widths", widths)
        states.save(path)
        with pytest.raises(FileError, match="damaged"):
            States.load(path)


def test_what_does_not_fit_is_refused() -> None:
    states, rows = make()
    sites, values, tokens = states.sites, states.values, states.tokens
    integers = stack_sites(sites, [rows[site].to(torch.int64) for site in sites])
    for parts, said in (
        ((sites[:2], values, tokens), "of 5 tokens"),
        ((sites, values, tokens.of(0)), "of 5 tokens"),
        ((sites, integers, tokens), "int64"),
    ):
        with pytest.raises(StatesError, match=said):
            States(*parts, states.source)
    narrow = {6: torch.zeros(3, 5, 6), 4: torch.zeros(2, 5, 4).bfloat16()}
    with pytest.raises(StatesError, match="dtype"):
        MixedValues(sites, states.widths, narrow)
    states["final"][3, 1] = torch.nan
    with pytest.raises(ArithmeticError, match="a NaN at final, token"):
        states.check_finite()


def test_the_command_keeps_and_describes_mixed_states(tmp_path: Path) -> None:
    module = tiny_model("deepseek_v4")
    module.save_pretrained(tmp_path / "model")
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
