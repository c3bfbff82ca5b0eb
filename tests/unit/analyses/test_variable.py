"""Variables: what is exchanged, what is learned, and what the controls expose."""

import csv
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.errors import (
    ArgumentError,
    Error,
    FileError,
    SiteError,
    StatesError,
    TextError,
)
from hiddenscope.testing import tiny_model
from tests.planted import exchanges, signed_model, signed_pairs, variable_noise
from tests.unit.analyses.refused import check_refused

Tiny = Callable[..., hs.Model]

PAIRS = exchanges(6)
WIDTH = 64


@pytest.fixture(scope="module")
def signed() -> hs.Model:
    return signed_model()


@pytest.fixture(scope="module")
def planted(signed: hs.Model) -> hs.Result:
    return hs.variable(signed, signed_pairs(16), sites="layer.1")


def test_a_subspace_of_full_rank_is_the_whole_state(tiny: Tiny) -> None:
    result = hs.variable(tiny("llama"), PAIRS, sites="layer.1", rank=WIDTH)
    assert np.array_equal(result.data["learned"], result.data["whole"])


def test_what_is_planted_is_found_and_its_direction_too(planted: hs.Result) -> None:
    (cell,) = planted.facts["cells"]
    assert (cell["value"], cell["failed"]) == (1.0, [])
    basis = planted.data["basis"].values[0, 0]
    assert basis.shape == (1, WIDTH)
    assert abs(basis[0, 0]) > 0.8
    assert np.allclose(basis @ basis.T, np.eye(1))
    for control in ("unchanged", "random", "mismatched", "shuffled", "reinitialised"):
        assert float(planted.data[control][0, 0]) < cell["low"]
    assert "survives all controls" in planted.summary()


def test_a_basis_is_orthonormal_at_parts_of_any_width(tiny: Tiny) -> None:
    sites = "layer.1,layer.2.mlp.neurons,layer.3.attn"
    data = hs.variable(tiny("gpt2"), PAIRS, sites=sites, tokens=[-1], rank=3).data
    assert data["basis"].sizes["width"] == 256
    for basis in np.nan_to_num(data["basis"].values[:, 0]):
        assert np.allclose(basis @ basis.T, np.eye(3), atol=1e-8)


def dormant_model() -> hs.Model:
    """The signed model, with a neuron that knows the sign and that nothing reads, and
    one that is always zero and would turn the answer (Makelov et al. 2023).
    """
    module: Any = signed_model().module
    mlp = module.model.layers[1].mlp
    with torch.no_grad():
        mlp.gate_proj.weight[:2] = mlp.up_proj.weight[:2] = 0
        mlp.gate_proj.weight[0, 0], mlp.up_proj.weight[0, 0] = 2, 1
        mlp.down_proj.weight[0, 1] = 8
    return hs.load((module, None))


def test_a_dormant_pathway_is_exposed() -> None:
    pairs = signed_pairs(20)
    result = hs.variable(dormant_model(), pairs, sites="layer.2.mlp.neurons")
    (cell,) = result.facts["cells"]
    # Exchanging both neurons as one direction turns answers, and is no finding.
    assert cell["value"] > 0.6
    assert {"whole", "read"} <= set(cell["failed"])
    assert cell["unread"] == pytest.approx(0.5, abs=0.1)
    assert "as in a dormant pathway" in result.summary()
    assert "holds the variable" not in result.summary()
    rows = np.zeros((1, WIDTH))
    rows[0, :2] = 1
    given = hs.variable(
        dormant_model(), pairs, sites="layer.2.mlp.neurons", subspace=rows
    )
    (cell,) = given.facts["cells"]
    assert cell["value"] > 0.6 and {"whole", "read"} <= set(cell["failed"])


def two_signs_model() -> hs.Model:
    """A GPT-2 that answers with two signs of its last token, which stand in the numbers
    0 and 1 of its state.
    """
    module: Any = tiny_model("gpt2", layers=1)
    embeddings = module.transformer.wte.weight
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for part in (module.transformer.h[0].attn, module.transformer.h[0].mlp):
            part.c_proj.weight.mul_(1e-2)
        embeddings[20:60] = torch.randn(40, WIDTH, generator=generator) / 2
        embeddings[20:60, :2] += torch.tensor(SIGNS * 10)
        module.lm_head.weight = torch.nn.Parameter(0 * embeddings)
        module.lm_head.weight[11:15, :2] = torch.tensor(SIGNS)
    return hs.load((module, None))


SIGNS = [[3.0, 3.0], [3.0, -3.0], [-3.0, 3.0], [-3.0, -3.0]]


def two_signs_pairs(count: int) -> list[hs.Interchange]:
    """Pairs that differ in both signs, of which the first alone is exchanged."""
    random = np.random.default_rng(0)
    pairs = []
    for k in range(count):
        base, source = (
            kind + 4 * int(random.integers(10)) for kind in (k % 4, 3 - k % 4)
        )
        filler, other = random.choice(30, 2, replace=False).tolist()
        pair = hs.Interchange(
            [60 + filler, 20 + base],
            [60 + other, 20 + source],
            11 + k % 4,
            11 + (k + 2) % 4,
        )
        pairs.append(pair)
    return pairs


@pytest.mark.parametrize("rank", [2, 4])
def test_what_is_hardly_read_makes_no_dormant_pathway(rank: int) -> None:
    """The second sign is read too: it must not be moved for along what is not."""
    model = two_signs_model()
    result = hs.variable(model, two_signs_pairs(16), sites="layer.1", rank=rank)
    (cell,) = result.facts["cells"]
    assert result.facts["right"] == 1
    assert (cell["value"], cell["failed"]) == (1.0, [])
    assert float(result.data["read"][0, 0]) > 0.9


@pytest.mark.parametrize("rank", [2, 4])
def test_a_dormant_pathway_is_exposed_in_a_subspace(rank: int) -> None:
    pairs = signed_pairs(20)
    rows = np.eye(WIDTH)[:rank]
    rows[0, 1], rows[1] = 1, np.eye(WIDTH)[10]
    options: Any = {"sites": "layer.2.mlp.neurons", "subspace": rows}
    (cell,) = hs.variable(dormant_model(), pairs, **options).facts["cells"]
    assert cell["value"] > 0.6 and "read" in cell["failed"]


def test_one_direction_of_exchange_needs_no_source(signed: hs.Model) -> None:
    """A push toward one answer is no variable: any source gives it."""
    pairs = [pair for pair in signed_pairs(24) if pair.value == 0]
    (cell,) = hs.variable(signed, pairs, sites="layer.1").facts["cells"]
    assert cell["value"] == 1.0
    assert cell["failed"] == ["mismatched"]


def test_labels_at_random_find_nothing() -> None:
    for seed in range(3):
        result = variable_noise(np.random.default_rng(seed))
        assert all(cell["failed"] for cell in result.facts["cells"])
        assert "No subspace survives the controls." in result.summary()


def test_sites_that_cannot_be_exchanged_are_left_out(tiny: Tiny) -> None:
    result = hs.variable(tiny("llama"), PAIRS, sites="layer.1,layer.1.mid", tokens=[-1])
    assert result.data["site"].values.tolist() == ["layer.1"]
    note = "mid of some blocks cannot be exchanged and was left out."
    assert result.facts["notes"] == [note]


def test_prompts_of_several_lengths(tiny: Tiny) -> None:
    longer = []
    for pair in PAIRS[:3]:
        base, source = [9, *pair.base], [9, *pair.source]
        longer.append(replace(pair, base=base, source=source))
    result = hs.variable(tiny("llama"), [*PAIRS, *longer], sites="layer.1", tokens=[-1])
    assert result.facts["pairs"] == 9


def test_two_groups_show_nothing(signed: hs.Model) -> None:
    pairs = signed_pairs(8)
    grouped = [replace(pair, group=k % 2) for k, pair in enumerate(pairs)]
    facts = hs.variable(signed, grouped, sites="layer.1").facts
    assert facts["groups"] == 2
    assert facts["cells"][0]["value"] == 1.0 and facts["cells"][0]["failed"]


def test_a_direction_and_principal_components(signed: hs.Model) -> None:
    pairs = signed_pairs(8)
    direction = hs.Direction.of(np.eye(WIDTH)[0])
    rows = hs.variable(signed, pairs, sites="layer.1", subspace=np.eye(WIDTH)[0])
    given = hs.variable(signed, pairs, sites="layer.1", subspace=direction)
    assert given.data.equals(rows.data)
    assert float(given.data["learned"][0, 0]) == 1.0
    pca = hs.variable(signed, pairs, sites="layer.1", subspace="pca", rank=2)
    assert pca.data["basis"].sizes["rank"] == 2


def test_pairs_of_a_file(tmp_path: Path, tiny: Tiny) -> None:
    model = tiny("llama")
    pairs = []
    for word, other in [("cat", "sat"), ("mat", "hat"), ("end", "his")]:
        pairs.append(hs.Interchange(f"the {word} on", f"the {other} on", "a", "b"))
    rows = []
    for pair in pairs:
        rows.append({k: v for k, v in asdict(pair).items() if v is not None})
    table, lines = tmp_path / "pairs.csv", tmp_path / "pairs.jsonl"
    with table.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, [*rows[0], "group"])
        writer.writeheader()
        writer.writerows(rows)
    lines.write_text("\n".join(map(json.dumps, rows)))
    options: Any = {"sites": "layer.1", "tokens": [-1]}
    expected = hs.variable(model, pairs, **options)
    for path in (table, lines):
        assert hs.variable(model, str(path), **options).data.equals(expected.data)
    lines.write_text("{not json")
    with pytest.raises(TextError, match="Line 1 is no pair: it is no JSON object"):
        hs.variable(model, str(lines))
    with pytest.raises(FileError, match="no such file"):
        hs.variable(model, "nowhere.csv")
    table.write_text("base,other\na b,c d\n")
    with pytest.raises(ArgumentError, match="no parameter 'other'"):
        hs.variable(model, str(table))


# The same prompts, of which something else follows.
OTHERWISE = [replace(pair, counterfactual=pair.answer) for pair in PAIRS]
# What is said, and the changed fields of the pairs or options of `variable`.
REFUSED: dict[str, tuple[type[Error], dict[str, Any]]] = {
    "both prompts are the same": (TextError, {"source": (40, 6, 7)}),
    "has one token": (TextError, {"base": [7], "source": [8]}),
    "one prompt is a string": (TextError, {"source": "The cat"}),
    "source must be one prompt": (TextError, {"source": 5}),
    "answer must be one token": (TextError, {"answer": 1.5}),
    "the base has 3 tokens, the source 2": (TextError, {"source": [5, 6]}),
    "the variable is 1 in both": (TextError, {"value": 1, "source_value": 1}),
    "every counterfactual is the answer itself": (TextError, {"counterfactual": 11}),
    "all pairs belong to one group": (TextError, {"group": "a"}),
    "group must name what belongs together": (TextError, {"group": []}),
    "at must be a position": (TextError, {"at": "last"}),
    "the rank is 65, and layer.1 is 64 wide": (SiteError, {"rank": 65}),
    "no such site can be exchanged": (SiteError, {"sites": "layer.1.attn.head.*"}),
    "have token 5": (TextError, {"tokens": [5]}),
    "equal states at every site and token": (TextError, {"tokens": [0]}),
    "the subspace is 3 wide": (StatesError, {"subspace": [1.0, 0, 0]}),
    "different answers": (TextError, {"pairs": [PAIRS[0], *OTHERWISE]}),
    "the rank is 3, and 2 rows": (
        StatesError,
        {"subspace": np.eye(WIDTH)[:2], "rank": 3},
    ),
    "depend on one another": (StatesError, {"subspace": np.zeros((2, WIDTH))}),
}


def asked(model: Any, **given: Any) -> hs.Result:
    options: dict[str, Any] = {"sites": "layer.1"}
    for name in ("pairs", "sites", "tokens", "subspace", "rank"):
        if name in given:
            options[name] = given.pop(name)
    pairs = options.pop("pairs", None)
    if pairs is None:
        few = [replace(pair, answer=11, counterfactual=12) for pair in PAIRS]
        pairs = [replace(few[0], **given), *few[1:]]
        if set(given) & {"counterfactual", "group"}:
            pairs = [replace(pair, **given) for pair in few]
    return hs.variable(model, pairs, **options)


def test_bad_input_is_refused_in_one_sentence(tiny: Tiny) -> None:
    for words, (kind, given) in REFUSED.items():
        check_refused(kind, words, asked, tiny("llama"), **given)


def test_answers_that_are_not_told_apart_are_refused() -> None:
    module: Any = tiny_model("llama", layers=2)
    with torch.no_grad():
        module.lm_head.weight[12] = module.lm_head.weight[11]
    pairs = [replace(pair, answer=11, counterfactual=12) for pair in PAIRS]
    with pytest.raises(TextError, match="prefer the answers alike, within rounding"):
        hs.variable((module, None), pairs, sites="layer.1")


def test_random_weights_that_cannot_be_drawn_are_a_note(
    signed: hs.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(model: hs.Model, seed: int) -> hs.Model:
        raise StatesError("Cannot draw weights", "they are packed", "Unpack them.")

    monkeypatch.setattr(hs.Model, "randomised", refuse)
    result = hs.variable(signed, signed_pairs(12), sites="layer.1")
    assert "Random weights were not tried: they are packed." in result.summary()
    assert np.isnan(result.data["reinitialised"]).all()
