"""Compare: exact zeros for what is the same, and numpy's arithmetic for the rest."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import PassError, StatesError, TextError
from hiddenscope.measures import linear_cka
from hiddenscope.passes import Batching
from hiddenscope.results import story_of, views_of
from hiddenscope.results.pictures import Grid
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.unit.analyses.blocks import Blocks

ONE, TWO = "The cat sat on the mat.", "The cat sat in the hat."
LONGER = "The cat and the dog sat in the garden of the house."
MEASURES = ["l2", "relative", "cosine", "mean", "deviation"]
Tiny = Callable[..., hs.Model]


@pytest.fixture(scope="module")
def bare() -> hs.Model:
    return hs.load((tiny_model("gpt2"), None))


def other(family: str = "gpt2", seed: int = 1) -> hs.Model:
    return hs.load((tiny_model(family, seed=seed), tiny_tokenizer()))


def states(values: torch.Tensor, model: str = "toy") -> hs.States:
    ids = list(range(values.shape[1]))
    tokens = hs.Tokens(
        None, [0] * len(ids), range(len(ids)), ids, [f"t{k}" for k in ids]
    )
    return hs.States(
        tuple(Site(k) for k in range(len(values))), values, tokens, hs.Source(model)
    )


@pytest.mark.parametrize("family", ["llama", "mamba", "t5", "fnet"])
def test_a_text_and_itself_are_the_same(tiny: Tiny, family: str) -> None:
    result = hs.compare(tiny(family), ONE, ONE)
    assert result.facts["run"] == ("apart" if family == "fnet" else "together")
    for name in ("l2", "relative", "mean", "deviation"):
        cells = result.data[name].values
        assert (cells[np.isfinite(cells)] == 0).all()
    cosine = result.data["cosine"].values
    assert (cosine[np.isfinite(cosine)] == 1).all()
    assert all(facts["first_difference"] is None for facts in result.facts["stacks"])
    assert views_of(result)
    assert "have equal states everywhere" in story_of(result)[0].prose
    assert "tested" not in result.summary()


@pytest.mark.parametrize("family", ["gpt2", "mamba"])
def test_a_common_beginning_is_exactly_zero_however_long_the_rest(
    tiny: Tiny, family: str
) -> None:
    model = tiny(family)
    result = hs.compare(model, "The cat and", LONGER * 2)
    shared = len(model.tokenizer("The cat and").input_ids)
    l2 = result.data["l2"].values
    assert (l2[:, :shared] == 0).all()
    assert np.isnan(l2[:, shared:]).all()
    assert result.facts["tokens_compared"] == shared
    assert result.facts["gaps"] == l2.shape[1] - shared
    assert result.facts["stacks"][0]["first_difference"]["token"][0] is None
    assert "a gap against" in result.summary()


def test_insertions_are_gaps_and_the_last_of_what_is_replaced_stands_together(
    bare: hs.Model,
) -> None:
    result = hs.compare(bare, [[5, 6, 7, 8]], [[5, 9, 10, 7, 11, 8]])
    rows = [result.data[name].values for name in ("position", "other_position")]
    columns = list(zip(*rows, strict=True))
    assert columns == [(0, 0), (-1, 1), (1, 2), (2, 3), (-1, 4), (3, 5)]
    gaps = np.isnan(result.data["l2"].values)
    assert (gaps == [[False, True, False, False, True, False]]).all()
    grid, *_ = views_of(result)
    assert isinstance(grid, Grid)
    assert grid.tokens == ("5", None, "6", "7", None, "8")
    assert grid.second == ("5", "9", "10", "7", "11", "8")
    assert "Hatched" in grid.note


def test_states_need_no_model(tiny: Tiny) -> None:
    model = tiny("gpt2")
    a, b = model.capture(ONE), model.capture(TWO)
    result, expected = hs.compare(a, b), hs.compare(model, ONE, TWO)
    np.testing.assert_allclose(result.data["l2"], expected.data["l2"], atol=1e-4)
    assert "cka" not in result.data
    some = hs.compare(a, b, sites="layer.1,final")
    assert some.data["site"].values.tolist() == ["layer.1", "final"]


def test_a_model_that_is_not_to_be_batched_is_run_apart_and_says_its_floor() -> None:
    model = other("llama", seed=0)
    together = hs.compare(model, ONE, LONGER)
    assert together.facts["run"] == "together"
    assert "rounding_floor" not in together.facts
    model.batching = Batching(False, 1e4, "texts in a padded batch came out otherwise")
    apart = hs.compare(model, ONE, LONGER)
    assert apart.facts["run"] == "apart"
    assert "texts in a padded batch came out otherwise" in apart.summary()
    assert 0 <= apart.facts["rounding_floor"]["relative"] < 1e-4
    np.testing.assert_allclose(apart.data["l2"], together.data["l2"], atol=1e-4)
    model.batching = Batching(True, 0.1, "", rope_switch=20)
    assert "positions are scaled" in hs.compare(model, ONE, LONGER).summary()
    assert hs.compare(model, ONE, TWO).facts["run"] == "together"
    # Which models do not round the texts of a batch alike depends on the processor.
    model = other("llama")
    model.trials.once("equal rows", lambda: False, form=bool)
    found = hs.compare(model, ONE, TWO)
    assert found.facts["run"] == "together"
    assert found.facts["rounding_floor"]["relative"] < 1e-4
    assert "not rounded alike" in found.summary()


def test_targets_are_the_decoders_texts(tiny: Tiny) -> None:
    model = tiny("t5")
    a, b = model.capture(ONE, targets="The dog"), model.capture(TWO, targets="The dog")
    result = hs.compare(model, ONE, TWO, targets="The dog")
    expected = hs.compare(a, b).data["l2"]
    np.testing.assert_allclose(result.data["l2"], expected, atol=1e-4)
    for name in ("targets", "other_targets"):
        assert result.data.attrs[name] == ["The dog"]
    encoded = model.encode(ONE, targets="The house")
    own = hs.compare(model, ONE, encoded, targets="The dog")
    assert own.data.attrs["other_targets"] == ["The house"]
    decoding = own.data["stack"].values == "decoder"
    data = own.data.isel(token=decoding)
    l2 = own.data["l2"].values[:, ~decoding]
    assert (l2[np.isfinite(l2)] == 0).all(), "the encoder reads the same"
    before = int(np.argmin(data["id"].values == data["other_id"].values))
    assert before > 1
    rows = [str(site).startswith("decoder") for site in data["site"].values]
    l2 = data["l2"].values[rows]
    assert (l2[:, :before] == 0).all(), "so does the decoder until its texts part"
    assert (l2[:, before] > 0).all()
    both = hs.compare(
        model.capture(ONE, targets="The dog"), model.capture(ONE, targets="The house")
    )
    first = [found.facts["stacks"][1]["first_difference"] for found in (both, own)]
    assert first[0] == first[1]


def test_what_was_encoded_is_taken_as_it_is(tiny: Tiny, counting: Any) -> None:
    model = hs.load((tiny("t5").module, tiny_tokenizer()))
    counted = counting(model)
    plain = hs.compare(model, [ONE, LONGER], [TWO, ONE])
    assert counted.calls == [[ONE, LONGER], [TWO, ONE]], "each text is encoded once"
    a, b = model.encode([ONE, LONGER]), model.encode([TWO, ONE])
    counted.calls.clear()
    assert hs.compare(model, a, b).equals(plain)
    assert not counted.calls
    again = hs.compare(model, model.encode(ONE, targets="The dog"), other=model)
    assert (again.data["l2"].values[np.isfinite(again.data["l2"].values)] == 0).all()
    assert again.data.attrs["other_targets"] == ["The dog"]


@pytest.mark.parametrize("rows", [4, 1000])
def test_what_is_read_in_blocks_is_compared_as_states_are(
    tiny: Tiny, rows: int
) -> None:
    model = tiny("gpt2")
    texts = [ONE, LONGER, TWO] * 4
    a, b = model.capture(texts), model.capture(texts[::-1])
    assert isinstance(a, hs.States) and isinstance(b, hs.States)
    expected = hs.compare(a, b).data
    for left, right in ((Blocks(a, rows), Blocks(b, rows)), (a, Blocks(b, rows))):
        result = hs.compare(left, right)
        for name in MEASURES:
            np.testing.assert_array_equal(result.data[name], expected[name])
        np.testing.assert_array_equal(result.data["string"], expected["string"])
        assert "cka" in result.data, "nobody says that both come from one model"
        for side in (left, right):
            if isinstance(side, Blocks):
                # A text, and a block a site.
                block = min(rows, len(a.tokens))
                text = a.tokens.lengths.max()
                assert side.most <= text + (len(a.sites) + 2) * block
    some = hs.compare(Blocks(a, rows), Blocks(b, rows), sites="layer.1,final")
    assert some.data["site"].values.tolist() == ["layer.1", "final"]
    short = Blocks(a, rows)
    short.states = a.select(tokens=slice(-1))
    with pytest.raises(StatesError, match="fewer rows"):
        hs.compare(short, b)


def test_of_many_tokens_a_sample_decides_how_alike_sites_are() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 2000, 4)
    y = x @ torch.randn(4, 7) + torch.randn(2, 2000, 7)

    def cut(values: torch.Tensor, length: int) -> hs.States:
        """Cut all rows into texts of one length."""
        rows = np.arange(2000)
        tokens = hs.Tokens(None, rows // length, rows % length, rows, rows.astype(str))
        source = hs.Source(f"{values.shape[2]} wide")
        return hs.States((Site(0), Site(1)), values, tokens, source)

    whole = hs.compare(cut(x, 2000), cut(y, 2000))
    pieces = hs.compare(cut(x, 10), cut(y, 10))
    assert whole.facts["cka"]["sampled_tokens"] == 1000
    assert whole.facts["cka"]["tokens"] == 2000
    np.testing.assert_array_equal(whole.data["cka"], pieces.data["cka"])
    np.testing.assert_allclose(whole.data["cka"], linear_cka(x, y)[0], atol=0.05)


def test_equal_states_have_no_likeness() -> None:
    result = hs.compare(
        states(torch.full((2, 9, 3), 0.1)), states(torch.randn(1, 9, 4), model="wider")
    )
    assert np.isnan(result.data["cka"].values).all()
    assert "most_alike" not in result.facts["cka"]
    (section,) = story_of(result)
    assert "all states of a site are equal" in section.prose


def test_one_text_in_two_models(tiny: Tiny) -> None:
    model, second = tiny("gpt2"), other("gpt2")
    result = hs.compare(model, ONE, other=second)
    assert (result.data["l2"].values > 0).all()
    assert result.facts["stacks"][0]["first_difference"]["site"] == "layer.0"
    assert "other" in result.source
    again = hs.compare(model, ONE, other=model)
    assert (again.data["l2"].values == 0).all()
    shallow = hs.load((tiny_model("gpt2", layers=2), tiny_tokenizer()))
    (facts,) = hs.compare(model, ONE, other=shallow).facts["stacks"]
    assert facts["sites_of_one_side"] == "layer.3"


def test_two_tokenizers_meet_where_their_tokens_end() -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[UNK]", *ONE.split()]
    vocabulary = {name: number for number, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"unk_token": "[UNK]", "pad_token": "[UNK]"}
    whole: Any = PreTrainedTokenizerFast(tokenizer_object=words, **options)
    pieces, a = other("gpt2"), hs.load((tiny_model("gpt2"), whole))
    result = hs.compare(a, ONE, other=pieces)
    spans = [model.capture(ONE, "layer.0").tokens.spans for model in (a, pieces)]
    rows = [result.data[name].values for name in ("position", "other_position")]
    both = (rows[0] >= 0) & (rows[1] >= 0)
    assert both.sum() == len(ONE.split())
    assert (spans[0][rows[0][both], 1] == spans[1][rows[1][both], 1]).all()
    assert (np.isnan(result.data["l2"].values).any(0) == ~both).all()
    with pytest.raises(StatesError, match="one id means"):
        hs.compare(a.capture(ONE), pieces.capture(LONGER))


def test_models_of_two_widths_are_compared_by_cka() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(3, 80, 6), torch.randn(2, 80, 9)
    y[1, :, :6] = x[2]
    result = hs.compare(states(x), states(y, model="wider"))
    for name, expected in zip(("cka", "cka_chance"), linear_cka(x, y), strict=True):
        assert result.data[name].dims == ("site", "source_site")
        np.testing.assert_allclose(result.data[name], expected, rtol=1e-5)
    few = hs.compare(states(x[:, :5]), states(y[:, :5], model="wider"))
    assert few.facts["cka"]["few_tokens"] and not result.facts["cka"]["few_tokens"]
    assert result.facts["cka"]["most_alike"]["site"] == "layer.2"
    assert result.facts["cka"]["most_alike"]["source_site"] == "layer.1"
    assert "l2" not in result.data
    (grid,) = views_of(result)
    assert isinstance(grid, Grid)
    assert grid.tokens == ("layer.0", "layer.1")
    assert "linear CKA over 80 tokens" in story_of(result)[0].prose
    sides = []
    for side in (states(x), states(y, model="wider")):
        sites = tuple(Site(site.layer, "", "encoder") for site in side.sites)
        sides.append(replace(side, sites=sites))
    encoders = hs.compare(*sides)
    np.testing.assert_array_equal(encoders.data["cka"], result.data["cka"])


def test_a_drop_at_the_end_is_that_of_the_final_norm() -> None:
    a = torch.ones(4, 2, 3)
    b = a.clone()
    b[:, 1, 0] += torch.tensor([0.0, 2.0, 9.0, 4.0])

    def normed() -> hs.Result:
        """Compare the same, with the last site as the final norm."""
        sites = (Site(0), Site(1), Site(2), Site(None))
        tokens, source = states(a).tokens, hs.Source("toy")
        return hs.compare(*(hs.States(sites, x, tokens, source) for x in (a, b)))

    end = normed().facts["stacks"][0]["end"]
    medians = {one["site"]: one["median"] for one in end.values()}
    assert medians == {"layer.1": 2.0, "layer.2": 9.0, "final": 4.0}
    b[1, 1, 0] = 1 + 6
    result = normed()
    assert result.facts["stacks"][0]["end"]["share_of_drop_by_final_norm"] == 1
    assert "the final norm causes the drop" in story_of(result)[1].prose


def test_narrow_states_are_widened_once() -> None:
    wide = torch.randn(2, 5, 64) * 300  # the squares of these do not fit in float16
    result = hs.compare(states(wide.half()), states(-wide.half()))
    np.testing.assert_allclose(
        result.data["l2"], 2 * wide.half().double().norm(dim=-1), rtol=1e-6
    )
    np.testing.assert_allclose(result.data["relative"], 2, rtol=1e-6)
    assert (result.data["cosine"].values == -1).all()
    assert result.facts["computed_in"] == "float64"
    zeros = hs.compare(states(torch.zeros(1, 2, 4)), states(torch.zeros(1, 2, 4))).data
    assert (zeros["relative"].values == 0).all()
    assert np.isnan(zeros["cosine"].values).all()


def test_what_cannot_be_compared_is_said(tiny: Tiny, bare: hs.Model) -> None:
    model = tiny("gpt2")
    texts = (model, ONE, TWO)
    captured, both = model.capture(ONE), model.capture([ONE, TWO])
    wide, narrow = (states(torch.ones(1, 2, width)) for width in (3, 4))
    cases: list[tuple[Any, dict[str, Any], Any, str]] = [
        ((model, ONE), {}, TextError, "no second text and no other model"),
        ((model, [ONE, ONE]), {}, TextError, "two texts were given as one side"),
        (texts, {"other": model}, TextError, "a second text and another model"),
        ((model, [ONE, TWO], [ONE]), {}, TextError, "2 on one side and 1 on the other"),
        ((bare, ONE, TWO), {}, TextError, "without a tokenizer"),
        ((wide, narrow), {}, TextError, "it takes 3"),
        (texts, {"targets": ONE}, PassError, "has one stack"),
        ((model, ONE), {"other": tiny("t5")}, StatesError, "an encoder and a decoder"),
        ((captured, captured), {"targets": ONE}, StatesError, "nothing else"),
        ((captured, TWO), {}, StatesError, "compared with states"),
        ((model, captured, TWO), {}, StatesError, "need no model"),
        ((captured, both), {}, StatesError, "1 texts .* 2 of"),
    ]
    for arguments, options, error, match in cases:
        with pytest.raises(error, match=match):
            hs.compare(*arguments, **options)
    assert hs.compare(bare, [5, 6, 7], [5, 6, 8]).data["l2"].shape == (5, 3)


def test_texts_with_little_in_common_say_which_tokens_are_paired(tiny: Tiny) -> None:
    """One word stands against the last of the other text, for want of a better one."""
    result = hs.compare(tiny("llama"), [5], list(range(10, 23)))
    assert "1 token could be compared; 12 without a counterpart could not." in (
        result.summary()
    )
    note = "Half of the compared tokens or more differ: without an equal one, the last"
    assert note in result.summary()
    alike = hs.compare(tiny("llama"), [5, 6, 7, 8], [5, 6, 9, 7, 8])
    assert note not in alike.summary()
