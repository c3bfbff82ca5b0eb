"""Graft into texts: the loss of every next token, and what layers of a donor change."""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import hiddenscope as hs
from hiddenscope import texts
from hiddenscope.analyses.graft.compute import by_third
from hiddenscope.analyses.graft.losses import compare_losses
from hiddenscope.analyses.graft.story import LossReport
from hiddenscope.cli.main import app
from hiddenscope.errors import ModuleError, NotFinite, TextError
from hiddenscope.passes import Inputs, Pass
from hiddenscope.passes.losses import Losses, measure_losses
from hiddenscope.results import views_of
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.unit.analyses.refused import check_refused
from tests.unit.loading.adapters import write_adapter

Tiny = Callable[..., hs.Model]

# Of different lengths, so that batches are padded.
TEXTS = [
    [7, 99, 23, 41, 18],
    [8, 45, 77, 60],
    [50, 51],
    [61, 62, 63, 64, 65, 66, 67],
    [30, 31, 32],
    [40, 90, 91],
]


@pytest.fixture(scope="module")
def pair() -> tuple[hs.Model, hs.Model]:
    """Two tiny llamas with nothing in common but their shape."""
    return tuple(hs.load((tiny_model("llama", seed=seed), None)) for seed in (0, 1))  # type: ignore[return-value]


def test_a_copy_of_the_model_changes_nothing_exactly(tiny: Tiny) -> None:
    model = tiny("llama")
    texts = [*TEXTS, [11, 12, 13], [70, 71, 72]]
    result = hs.graft(model, (copy.deepcopy(model.module), None), texts)
    data, losses = result.data, result.facts["losses"]
    assert data["loss_change"].values.tolist() == [0, 0, 0]
    # Texts that all agree tell nothing of how far others may differ.
    assert np.isnan(data[["loss_change_low", "loss_change_high"]].to_array()).all()
    assert data["agreement"].values.tolist() == [1, 1, 1]
    assert losses["raised"] == losses["lowered"] == []
    assert losses["model"]["value"] == losses["donor"]["value"]
    assert losses["tokens"] == sum(len(ids) - 1 for ids in texts)


def test_an_adapted_self_is_a_donor_and_takes_blocks_of_its_base(
    tmp_path: Path,
) -> None:
    write_adapter(tmp_path, "lora", tiny_model("llama"))
    model = hs.load((tiny_model("llama"), None))
    adapted = hs.load(hs.Adapted((tiny_model("llama"), None), tmp_path))
    whole = hs.graft(model, adapted, TEXTS, layers=3)
    losses = whole.facts["losses"]
    assert whole.data["loss"].values == pytest.approx([losses["donor"]["value"]])
    assert losses["donor"]["value"] != pytest.approx(losses["model"]["value"], rel=1e-3)
    back = hs.graft(adapted, model, TEXTS, layers=3)
    assert back.data["loss"].values == pytest.approx([losses["model"]["value"]])


def test_texts_of_a_group_count_as_one(pair: tuple[hs.Model, hs.Model]) -> None:
    words = ["the cat sat", "a hat", "the mat is", "rest", "the best", "a dog"]
    named = [hs.load((one.module, tiny_tokenizer())) for one in pair]
    grouped = hs.graft(*named, texts.read(words, group=[0, 0, 0, 1, 1, 1]))
    assert grouped.facts["groups"] == 2
    assert grouped.facts["losses"]["model"]["low"] is None
    assert np.isnan(grouped.data["loss_change_low"]).all()
    assert "other texts were not tested" in grouped.summary()
    assert "6 texts in 2 groups" in grouped.summary()


def test_what_texts_cannot_be(pair: tuple[hs.Model, hs.Model], tiny: Tiny) -> None:
    model, donor = pair
    larger = tiny_tokenizer()
    larger.add_tokens(["zebra"])
    other = hs.load((donor.module, larger))
    for of, data, kind, words in (
        (donor, [[5]], TextError, "it has one token, so there is no next one"),
        (donor, [[5, 6], ([5, 6], 7)], TextError, "1 of 2 have an answer"),
        (donor, ["a cat", ("a", " b")], TextError, "1 of 2 have an answer"),
    ):
        check_refused(kind, words, hs.graft, model, of, data)
    words = "different vocabularies"
    check_refused(ModuleError, words, hs.graft, tiny("llama"), other, ["a cat"])
    logits = torch.zeros(2, 8)
    logits[0, 7] = -torch.inf
    inputs = Inputs(((5, 7),))
    with pytest.raises(NotFinite, match="rule out a token"):
        measure_losses(inputs, [(0, [0], Pass(None, logits))], 1)


def drawn(generator: np.random.Generator, late: float = 0.0) -> LossReport:
    """Return what is made of windows that change the loss of texts by noise, and the
    last third by more.
    """
    windows = [(hs.Site(layer),) for layer in range(1, 10)]
    of_text = generator.gamma(4.0, size=24)
    change = generator.normal(size=(9, 24)) * of_text / 40
    change[6:] += late * of_text / 4
    loss = np.concatenate([[of_text, of_text + 1], of_text + change])
    shares = generator.uniform(0.5, 1, loss.shape)
    groups = np.arange(24)
    scores = Losses(loss, shares)
    report, _ = compare_losses(windows, scores, by_third(windows, 9), groups, 100)
    return report


def test_noise_is_called_a_change_no_more_often_than_its_level() -> None:
    reports = [drawn(np.random.default_rng(seed)) for seed in range(24)]
    windows = sum(bool(report.raised or report.lowered) for report in reports)
    thirds = 0
    for report in reports:
        assert report.late_less_middle is not None
        assert report.early_less_middle is not None
        sides = report.late_less_middle.side, report.early_less_middle.side
        thirds += any(sides)
    # 5% of 24 runs is 1.2; more than 4 come up by chance in one of 150.
    assert windows <= 4
    assert thirds <= 4


def test_a_planted_harm_is_found_where_it_is() -> None:
    report = drawn(np.random.default_rng(0), late=0.2)
    assert report.raised == ["layer.7", "layer.8", "layer.9"]
    assert report.lowered == []
    assert report.late_less_middle is not None
    assert report.late_less_middle.side == 1
    assert report.late_less_middle.value == pytest.approx(0.2, rel=0.2)
    assert report.late is not None
    assert (report.late.from_, report.late.to) == ("layer.7", "layer.9")


def test_its_findings_views_and_command(
    pair: tuple[hs.Model, hs.Model], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = hs.graft(*pair, TEXTS)
    told = result.summary()
    assert "over 6 texts (18 predicted tokens)" in told
    assert "corrected for all windows" in told
    assert "middle third" in told
    names = [view.title.partition(" of ")[0] for view in views_of(result)]
    assert names == ["Change", "Unchanged predictions"]
    models = {
        name: hs.load((model.module, tiny_tokenizer()))
        for name, model in zip(("own", "donor"), pair, strict=True)
    }
    monkeypatch.setattr("hiddenscope.load", lambda name, *_, **options: models[name])
    file = tmp_path / "texts.txt"
    file.write_text("The cat sat\nA hat\n")
    command = ["graft", "donor", str(file), "--model", "own"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert "2 texts" in done.output
