"""Poolings of scores: laws between them, and a probe that learns with one."""

import numpy as np
import pytest
import torch
from torch import Tensor

import hiddenscope as hs
from hiddenscope.errors import Error
from hiddenscope.linear.pooled import pooled_logistic
from hiddenscope.linear.problems import Problems
from hiddenscope.states.pooling import SCORE_POOLINGS, parse_pooling, score_pooling

LENGTHS = (5, 9, 1, 20)


def scores(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    real = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    drawn = torch.randn(real.shape, generator=generator, dtype=torch.float64)
    # Padding may hold anything.
    return drawn.masked_fill(~real, 1e6), real


def pooled(name: str, logits: Tensor | None = None) -> Tensor:
    values, real = scores()
    entry = score_pooling(name)
    assert entry is not None
    return entry.reduce(values, real, logits, entry.setting)


def by_text() -> list[Tensor]:
    values, real = scores()
    return [row[mask] for row, mask in zip(values, real, strict=True)]


def means() -> Tensor:
    return torch.stack([text.mean() for text in by_text()])


def highest() -> Tensor:
    return torch.stack([text.max() for text in by_text()])


def test_a_window_as_long_as_the_text_is_the_mean() -> None:
    torch.testing.assert_close(pooled("rolling:20"), means())
    torch.testing.assert_close(pooled("rolling:1000"), means())


def test_windows_of_one_token_are_the_maximum() -> None:
    torch.testing.assert_close(pooled("rolling:1"), highest())


def test_windows_equal_a_plain_loop() -> None:
    expected = []
    for text in by_text():
        size = min(4, len(text))
        windows = [text[k : k + size].mean() for k in range(len(text) - size + 1)]
        expected.append(max(windows))
    torch.testing.assert_close(pooled("rolling:4"), torch.stack(expected))


def test_a_softmax_goes_from_the_maximum_to_the_mean() -> None:
    torch.testing.assert_close(pooled("softmax:1e-4"), highest())
    torch.testing.assert_close(pooled("softmax:1e9"), means())
    assert (pooled("softmax") > means() - 1e-9).all()


def test_attention_without_a_query_is_the_mean() -> None:
    values, _ = scores()
    torch.testing.assert_close(pooled("attention", torch.zeros_like(values)), means())


def test_a_score_so_far_is_that_of_the_text_up_to_there() -> None:
    readings = np.random.default_rng(0).normal(size=(12, 2))
    for pool in ("mean", "rolling:3", "softmax:0.5", "attention"):
        probe = hs.Probe()
        probe.pool = pool
        if pool == "attention":
            probe.query_ = np.zeros(3)
        columns = readings if pool == "attention" else readings[:, :1]
        so_far = probe.so_far(columns)
        for end in range(1, 13):
            assert probe.so_far(columns[:end])[-1] == pytest.approx(so_far[end - 1])
    probe.pool = "last"
    np.testing.assert_array_equal(probe.so_far(readings), readings[:, 0])
    for pool in ("first", "cls", 0):
        probe.pool = pool
        assert set(probe.so_far(readings)) == {readings[0, 0]}
    for pool in ("max", 3):
        probe.pool = pool
        with pytest.raises(Error, match="which scores do not tell"):
            probe.so_far(readings)


@pytest.mark.parametrize(
    "pool", ["rolling:3", "rolling:50", "softmax:0.1", "attention"]
)
def test_a_score_so_far_is_what_was_learnt_without_the_first_token(pool: str) -> None:
    readings = 30 * np.random.default_rng(0).normal(size=(40, 2))
    probe, entry = hs.Probe(), score_pooling(pool)
    assert entry is not None
    probe.pool = pool
    if pool == "attention":
        probe.query_ = np.zeros(3)
    columns = readings if pool == "attention" else readings[:, :1]
    so_far = probe.so_far(columns)
    assert so_far[0] == readings[0, 0]
    for end in range(2, 41):
        tokens = torch.from_numpy(columns[1:end].T)
        real = torch.ones(1, end - 1, dtype=torch.bool)
        expected = entry.reduce(tokens[:1], real, tokens[-1:], entry.setting)
        assert so_far[end - 1] == pytest.approx(float(expected))


def test_a_long_text_is_scored_in_time_that_grows_with_its_length() -> None:
    probe = hs.Probe()
    for probe.pool in ("mean", "rolling", "softmax"):
        assert len(probe.so_far(np.ones((200_000, 1)))) == 200_000


@pytest.mark.parametrize(
    "name", ["rolling:0", "softmax:x", "attention:2", "softmax:inf"]
)
def test_a_setting_that_makes_no_sense_is_refused(name: str) -> None:
    with pytest.raises(Error, match="No pooling"):
        score_pooling(name)


def test_states_are_not_pooled_by_scores() -> None:
    for name in SCORE_POOLINGS:
        with pytest.raises(Error, match=r"pools the scores .* hs\.probe"):
            parse_pooling(name)
        assert parse_pooling(name, scores=True) == name


def planted(seed: int, count: int, width: int = 8) -> tuple[list[Tensor], Tensor]:
    """Draw texts of which those of class 1 have a signal at three tokens."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for number in range(count):
        length = 10 + 7 * number % 30
        text = torch.randn(length, width, generator=generator)
        if number % 2:
            text[4:7, 0] += 4
        texts.append(text)
    return texts, torch.arange(count) % 2


@pytest.mark.parametrize("name", ["rolling:3", "softmax", "attention"])
def test_a_pooling_that_is_learnt_finds_what_a_mean_dilutes(name: str) -> None:
    texts, labels = planted(0, 120)
    train = torch.arange(120)[None] < 60
    problems = Problems(train, labels[None], torch.ones(1))
    correct = {}
    for pool in ("rolling:1000", name):
        entry = score_pooling(pool)
        assert entry is not None
        stacked = torch.stack([text.mean(0) for text in texts])
        fitted = pooled_logistic(texts, entry).fit(stacked, problems)
        right = (fitted.scores(stacked)[:, 0, 0] > 0) == labels
        correct[pool] = float(right[60:].float().mean())
    assert correct[name] > 0.85 > correct["rolling:1000"]


def test_a_text_is_padded_to_texts_of_its_own_length() -> None:
    """A long text among short ones does not make them long, nor changes the fit."""
    texts, labels = planted(2, 40)
    texts[7] = torch.randn(30_000, 8, generator=torch.Generator().manual_seed(5))
    entry = score_pooling("softmax")
    assert entry is not None
    problems = Problems(
        torch.ones(1, 40, dtype=torch.bool), labels[None], torch.ones(1)
    )
    stacked = torch.stack([text.mean(0) for text in texts])
    fitted = pooled_logistic(texts, entry).fit(stacked, problems)
    for text, score in zip(texts, fitted.scores(stacked)[:, 0, 0], strict=True):
        tokens = text @ fitted.coef[:, 0] + fitted.intercept[0]
        real = torch.ones(1, len(text), dtype=torch.bool)
        alone = entry.reduce(tokens.T, real, None, entry.setting)
        assert float(alone) == pytest.approx(float(score), abs=1e-4)


def test_a_fit_that_stops_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, labels = planted(0, 40)
    entry = score_pooling("softmax")
    assert entry is not None
    train = torch.ones(1, 40, dtype=torch.bool)
    stacked = torch.stack([text.mean(0) for text in texts])
    learner = pooled_logistic(texts, entry)
    problems = Problems(train, labels[None], torch.ones(1))
    assert bool(learner.fit(stacked, problems).converged)
    monkeypatch.setattr("hiddenscope.linear.pooled.MOST_STEPS", 1)
    assert not bool(learner.fit(stacked, problems).converged)


def test_the_mean_of_scores_is_the_score_of_the_mean() -> None:
    """A window over all tokens is learnt as logistic regression of the mean is."""
    texts, labels = planted(1, 40)
    problems = Problems(
        torch.ones(1, 40, dtype=torch.bool), labels[None], torch.ones(1)
    )
    stacked = torch.stack([text.mean(0) for text in texts]).double()
    entry = score_pooling("rolling:1000")
    assert entry is not None
    wide = [text.double() for text in texts]
    fitted = pooled_logistic(wide, entry).fit(stacked, problems)
    from sklearn.linear_model import LogisticRegression

    reference = LogisticRegression(C=1.0, tol=1e-8).fit(stacked, labels)
    expected = reference.decision_function(stacked)
    np.testing.assert_allclose(fitted.scores(stacked)[:, 0, 0], expected, atol=0.1)
