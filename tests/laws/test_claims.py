"""Claims: of noise no analysis says that it found something more often than its level,
and each finds what is planted.

A sentence that compares numbers is one of two. Either it is a claim, which goes beyond
the texts at hand: it has a test or an interval, and noise may bring it up as often as
its level says. Or it describes what was measured, and beside it the result says that
nothing was tested.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import xarray

import hiddenscope as hs
from hiddenscope import progress
from hiddenscope.analyses.graft.findings import graft_facts
from hiddenscope.analyses.lens.findings import half_from
from hiddenscope.catalog import ANALYSES
from hiddenscope.measures.distances import Distances
from hiddenscope.measures.separation import separation
from hiddenscope.sites import Site
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.views import sections_of, views_of
from hiddenscope.views.kinds.steer import _moved as steer_moved
from tests.planted import previous_token_model
from tests.slices import long

Tiny = Callable[..., hs.Model]

LEVEL = 0.05
WORDS = [
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "his",
    "dog",
    "there",
    "is",
    "no",
    "end",
    "to",
    "it",
    "hat",
    "day",
]

COMPARES = re.compile(
    r"\b(most|least|more|less|larger|largest|smaller|smallest|lower|lowest|higher|highest|better|best|worse|apart|"
    r"alike|tighter|farther|jumps|differ|differs|times as much|nearest|half"
    r" of|weigh)\b",
    re.IGNORECASE,
)
BACKED = re.compile(
    r"\binterval\b|\bp = |\bp at most\b|not significant|not tested|is shown to|\(.+ to"
    r" .+\)|noise envelope"
)
SAYS_UNTESTED = re.compile(r"\b(was|were) not tested\b")
# Sentences that compare and leave nothing to be tested: definitions, instructions, what
# is equal bit for bit.
PLAIN = {
    "compare": r"have equal states everywhere|over the tokens that differ",
    "anatomy": r"bit for bit|The bar is the raw|largest absolute difference",
    # The last is what is counted below.
    "probe": r"^One more probe|what counts is|^Better than guessing",
    "search": r"^Nearest to|compared with every query",  # every row was looked at
    "project": (
        r"Do not trust|look apart|groups can be seen|^Neighbour is|dashed line|picture"
        r" in two dimensions"
    ),
    # How the states were drawn.
    "visibility": r"^Averaged over .* states were drawn, at most",
    "cluster": r"points that are together here may be apart",
    "drift": (
        r"^In the output, the KL|^Local error is what|sites? differs? on equal input|of"
        r" the candidate differs in"
        r"|^As they were given|differs? all the same|least sensitive part"
        r"|weights? differs?, "
    ),
}
CLAIMS = {
    "project": r"\bare apart at\b",
    "probe": r"^Better than guessing",
    "graft": r"\bthey differ by\b",
    "drift": r"^Drift: the two first differ at\b",
    # Heads of random weights do read some tokens more than others.
    "attention": r"\bmore than half of the weight\b|\bwithout repetition \(p at",
}


def sentences(result: hs.Result) -> list[str]:
    """All that a person is told: the findings, the prose of the page and the notes
    below its pictures.
    """
    told = [
        result.summary(),
        *(f"{section.prose}\n{section.reading}" for section in sections_of(result)),
    ]
    told += [str(getattr(view, "note", "")) for view in views_of(result)]
    return [
        part.strip()
        for text in told
        for part in re.split(r"(?<=[.!?])\s+|\n", text)
        if part.strip()
    ]


def said(result: hs.Result, pattern: str) -> bool:
    return any(re.search(pattern, sentence) for sentence in sentences(result))


def unbacked(result: hs.Result) -> list[str]:
    """The sentences that compare numbers without a test, where the result does not say
    that nothing was tested.
    """
    told = sentences(result)
    if any(SAYS_UNTESTED.search(sentence) for sentence in told):
        return []
    plain = re.compile(PLAIN.get(result.kind, r"(?!)"))
    return [
        one
        for one in told
        if COMPARES.search(one) and not BACKED.search(one) and not plain.search(one)
    ]


def random_texts(generator: np.random.Generator, count: int) -> list[str]:
    return [
        " ".join(generator.choice(WORDS, generator.integers(4, 9)))
        for _ in range(count)
    ]


def random_model(seed: int, family: str = "llama") -> hs.Model:
    return hs.load((tiny_model(family, seed=seed), tiny_tokenizer()))


def random_states(
    generator: np.random.Generator, texts: int, sites: int = 3, width: int = 6
) -> hs.States:
    values = torch.from_numpy(generator.standard_normal((sites, texts, width))).float()
    names = [f"text {number}" for number in range(texts)]
    tokens = hs.Tokens(names, range(texts), [0] * texts, range(texts), ["t"] * texts)
    return hs.States(tuple(map(Site, range(sites))), values, tokens, hs.Source("toy"))


def flips(generator: np.random.Generator, count: int) -> list[str]:
    """Labels that mean nothing, some of each."""
    labels = np.array(["a", "b"])[generator.integers(0, 2, count)]
    labels[:4] = ["a", "b", "a", "b"]
    return list(map(str, generator.permutation(labels)))


def random_graft(generator: np.random.Generator, right: Any = None) -> hs.Result:
    """What `hs.graft` makes of answers that are right by chance, whichever blocks are
    the donor's.
    """
    windows = [(Site(k),) for k in range(1, 13)]
    right = generator.random((12, 10)) < 0.6 if right is None else right
    facts = graft_facts(
        windows,
        right,
        {"model": right[0], "donor": right[1]},
        depth=12,
        groups=np.arange(right.shape[1]),
    )
    base = {
        "donor": "other",
        "prompts": right.shape[1],
        "grafted": "blocks",
        "layers": 1,
        "notes": [],
    }
    share = right.mean(1).astype(np.float32)
    columns = dict.fromkeys(
        ("accuracy", "accuracy_low", "accuracy_high", "probability"), ("site", share)
    )
    data = xarray.Dataset(columns, {"site": [str(window[0]) for window in windows]})
    return hs.Result("graft", data, {**base, **facts}, {"model": "toy"})


def _compare(generator: np.random.Generator) -> hs.Result:
    return hs.compare(random_model(1), *random_texts(generator, 2))


def _steer(generator: np.random.Generator) -> hs.Result:
    model, texts = random_model(2), random_texts(generator, 5)
    direction = hs.Direction.between(model, texts[:2], texts[2:4], sites="layer.1-2")
    given: dict[str, Any] = {
        "strengths": (-1.0, 1.0),
        "answers": ["a", "e"],
        "quality": texts[:2],
        "new_tokens": 0,
    }
    return hs.steer(model, texts[4], direction, **given)


def _patch(generator: np.random.Generator) -> hs.Result:
    word, other = generator.choice(WORDS, 2, replace=False)
    return hs.patch(
        random_model(3),
        hs.Contrast(f"the cat and {word} sat", f"the cat and {other} sat", "a", "e"),
    )


def _drift(generator: np.random.Generator, factor: float = 1.0) -> hs.Result:
    """A model against itself with another attention kernel, which rounds differently;
    or with a weight that is off.
    """
    seed = int(generator.integers(9))
    other: Any = tiny_model("llama", seed=seed)
    other.set_attn_implementation("eager")
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight[0, 0].mul_(factor)
    return hs.drift(
        random_model(seed), (other, tiny_tokenizer()), random_texts(generator, 3)
    )


NOISE: dict[str, Callable[[np.random.Generator], hs.Result]] = {
    "anatomy": lambda generator: hs.anatomy(random_model(int(generator.integers(99)))),
    "profile": lambda generator: hs.profile(
        random_model(1), random_texts(generator, 4)
    ),
    "compare": _compare,
    "project": lambda generator: hs.project(
        random_states(generator, 24), flips(generator, 24), method="pca"
    ),
    "lens": lambda generator: hs.lens(
        random_model(1), random_texts(generator, 2), target="next"
    ),
    "contributions": lambda generator: hs.contributions(
        random_model(1), random_texts(generator, 1)[0], 11, 12
    ),
    "visibility": lambda generator: hs.visibility(
        random_model(1), random_texts(generator, 1)[0]
    ),
    "attention": lambda generator: hs.attention(
        random_model(int(generator.integers(99))), random_texts(generator, 1)[0]
    ),
    "probe": lambda generator: hs.probe(
        random_states(generator, 24), flips(generator, 24)
    ),
    "patch": _patch,
    "graft": random_graft,
    "steer": _steer,
    "search": lambda generator: hs.search(
        generator.standard_normal((30, 6)), generator.standard_normal((2, 6))
    ),
    "cluster": lambda generator: hs.cluster(
        generator.standard_normal((40, 6)), smallest=3
    ),
    "drift": _drift,
    "series": lambda generator: hs.series(
        [random_model(seed) for seed in generator.integers(1_000, size=2).tolist()],
        "profile",
        "the cat sat",
    ),
}


def test_every_analysis_is_under_the_law() -> None:
    assert (
        set(NOISE)
        == set(PLANTED)
        == {analysis.word for analysis in ANALYSES if analysis.result}
    )


@pytest.mark.parametrize("word", NOISE)
def test_what_compares_has_a_test_or_says_that_it_has_none(word: str) -> None:
    for seed in range(3):
        result = NOISE[word](np.random.default_rng(seed))
        assert unbacked(result) == []


def test_the_law_sees_a_sentence_that_compares_without_a_test() -> None:
    result = NOISE["search"](np.random.default_rng(0))
    nearest = [
        {
            **result.facts["nearest"][0],
            "query": "a. This one is better than the others. b",
        }
    ]
    changed = hs.Result("search", result.data, {**result.facts, "nearest": nearest}, {})
    assert unbacked(changed) == ["This one is better than the others."] * 2, (
        "in the findings and on the page"
    )


@pytest.mark.parametrize(
    ("word", "runs"),
    [
        ("graft", 300),
        ("project", 40),
        pytest.param("probe", 30, marks=long),
        ("drift", 10),
        ("attention", 6),
    ],
)
def test_noise_brings_up_a_claim_no_more_often_than_its_level(
    word: str, runs: int
) -> None:
    told = [NOISE[word](np.random.default_rng(seed)).summary() for seed in range(runs)]
    claims = sum(
        any(re.search(CLAIMS[word], line.strip()) for line in lines.splitlines())
        for lines in told
    )
    assert claims <= LEVEL * runs + 2 * (LEVEL * (1 - LEVEL) * runs) ** 0.5


@pytest.mark.parametrize("word", sorted(set(NOISE) - set(CLAIMS)))
def test_an_analysis_without_a_test_claims_nothing(word: str) -> None:
    """It may describe; the words by which the others claim are not its own."""
    result = NOISE[word](np.random.default_rng(7))
    assert not any(said(result, claim) for claim in CLAIMS.values())
    assert not said(
        result, r"\bsignificant|\bshows that\b|\bproves? that\b|\bbecause of\b"
    )


def _massive() -> hs.Result:
    values = torch.ones(2, 6, 8) * torch.linspace(0.5, 1.5, 8)
    values[1, 3, 2] = 5_000
    tokens = hs.Tokens(["a text"], [0] * 6, range(6), range(6), list("abcdef"))
    return hs.profile(hs.States((Site(0), Site(1)), values, tokens, hs.Source("toy")))


def _with_idle_block(block: int) -> hs.Model:
    """A model with a block, counted from 1, that adds next to nothing."""
    module: Any = tiny_model("llama")
    idle = module.model.layers[block - 1]
    with torch.no_grad():
        for weight in (idle.self_attn.o_proj.weight, idle.mlp.down_proj.weight):
            weight.mul_(1e-4)
    return hs.load((module, tiny_tokenizer()))


def _apart(offset: float = 4.0) -> tuple[hs.States, list[str]]:
    generator = np.random.default_rng(0)
    labels = ["a", "b"] * 20
    states = random_states(generator, 40)
    values = states.values.clone()
    values[1] += offset * torch.tensor([[float(label == "a")] for label in labels])
    return hs.States(states.sites, values, states.tokens, states.source), labels


def _steered() -> hs.Result:
    model = random_model(0)
    token = model.encode("a").ids[0][-1]
    weight = model.module.get_output_embeddings().weight[token].detach()  # type: ignore[operator, union-attr]
    direction = hs.Direction.of(weight / weight.norm() * 0.3, sites="layer.3")
    texts = random_texts(np.random.default_rng(0), 3)
    return hs.steer(
        model,
        texts[0],
        direction,
        strengths=(1.0,),
        answers=["a"],
        quality=texts,
        new_tokens=0,
    )


def _clouds() -> hs.Result:
    generator = np.random.default_rng(0)
    return hs.cluster(
        np.repeat(np.eye(3, 8) * 5, 20, axis=0)
        + 0.2 * generator.standard_normal((60, 8))
    )


def _planted_head() -> hs.Result:
    """A head whose values all point to the answer writes it."""
    module: Any = tiny_model("llama")
    word = module.lm_head.weight[11] - module.lm_head.weight[12]
    attention = module.model.layers[1].self_attn
    with torch.no_grad():
        # Its values are such that the sum of them is above zero at the last token.
        attention.o_proj.weight[:, 32:48] += 3 * word[:, None]
    return hs.contributions((module, None), [5, 6, 7, 8], 11, 12)


PLANTED: dict[str, tuple[Callable[[], hs.Result], str]] = {
    "anatomy": (
        lambda: hs.anatomy(random_model(0)),
        r"Each of the 4 entries of hidden_states equals a named state bit for bit",
    ),
    "profile": (
        _massive,
        (
            r"Massive activations: 1 value in channel 2 at layer\.1, 0 of them at a"
            r" first token"
        ),
    ),
    "series": (
        lambda: hs.series([random_model(0), random_model(0)], "profile", "the cat"),
        r"have the same weights \(sha256:\w+…\)\.",
    ),
    "compare": (
        lambda: hs.compare(random_model(1), "the cat sat", "the cat sat"),
        r"have equal states everywhere\.",
    ),
    "project": (
        lambda: hs.project(*_apart(), method="pca"),
        r"The classes are apart at layer\.1 by the silhouette \(p at most 0\.05",
    ),
    "lens": (
        lambda: hs.lens(_with_idle_block(3), "the cat sat"),
        r"the top token from layer\.[0-2] on",
    ),
    "contributions": (
        _planted_head,
        r"layer\.2\.attn\.head\.2 adds most to the logit of .*",
    ),
    "visibility": (
        lambda: hs.visibility(_with_idle_block(2), "the cat sat"),
        r"from \d+% at .* to 100% at layer\.2",
    ),
    "attention": (
        lambda: hs.attention((previous_token_model(), tiny_tokenizer()), "the cat sat"),
        (
            r"1 of 12 gives the previous token more than half of the weight \(p at most"
            r" 0\.05\): layer\.1\.attn\.head\.2"
        ),
    ),
    "probe": (
        lambda: hs.probe(*_apart()),
        r"^Better than guessing the largest class \(50%\): .*layer\.1",
    ),
    "patch": (
        lambda: hs.patch(
            random_model(3), hs.Contrast("the mat sat", "the hat sat", "a", "e")
        ),
        (
            r"the token that differs, restores at least half of the logit difference at"
            r" layer\.0"
        ),
    ),
    "graft": (
        lambda: random_graft(
            np.random.default_rng(0), np.repeat(np.arange(12) < 8, 10).reshape(12, 10)
        ),
        (
            r"they differ by \+100 percentage points \(sign-flip test over 10 prompts:"
            r" p = 0\.002\)"
        ),
    ),
    "steer": (_steered, r"moves “a” most: from a probability of"),
    "search": (
        lambda: hs.search(np.eye(4), np.eye(4)[2:3], 1),
        r"Nearest to “query 0” is text 2, with cosine 1\.00",
    ),
    "cluster": (_clouds, r"Cluster 0 has 20 texts; (9\d|100)% of it comes back"),
    "drift": (
        lambda: _drift(np.random.default_rng(0), 1.5),
        r"The module at fault is `model\.layers\.1\.mlp\.up_proj`",
    ),
}


@pytest.mark.parametrize("word", PLANTED)
def test_what_is_planted_is_found(word: str) -> None:
    make, pattern = PLANTED[word]
    result = make()
    assert said(result, pattern), result.summary()
    assert unbacked(result) == []


def many_texts(generator: np.random.Generator) -> list[list[int]]:
    texts: list[list[int]] = generator.integers(5, 60, (6, 12)).tolist()
    return texts


def test_averages_over_texts_claim_only_with_an_interval() -> None:
    """Every sentence that compares holds an interval."""
    sampling = hs.Sampling(per_text=3, baseline="random")
    for seed in range(2):
        texts = many_texts(np.random.default_rng(seed))
        result = hs.visibility(random_model(1), texts, sampling=sampling)
        assert unbacked(result) == []


def test_a_model_that_mixes_no_tokens_sees_its_own_column() -> None:
    module: Any = tiny_model("llama")
    with torch.no_grad():
        for block in module.model.layers:
            block.self_attn.o_proj.weight.mul_(1e-3)
    texts = many_texts(np.random.default_rng(0))
    result = hs.visibility(hs.load((module, None)), texts)
    column = r"(9\d|100)% \(.+ to 100%\) of that of all lower sites on average: yes"
    assert said(result, column), result.summary()


def test_embed_says_how_alike_vectors_are_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    notes: list[str] = []
    monkeypatch.setattr(progress, "note", notes.append)
    texts = random_texts(np.random.default_rng(0), 6)
    for model in (random_model(0), random_model(1)):
        hs.embed(model, texts)
    assert len(notes) == 2 and all(
        re.search(r"the mean cosine of two of the 6 texts is -?\d\.\d\d", n)
        for n in notes
    )


def _of_views(result: hs.Result) -> Iterator[str]:
    for view in views_of(result):
        yield view.title


@pytest.mark.parametrize("word", ["graft", "patch", "project", "profile", "cluster"])
def test_no_title_claims_what_the_findings_do_not(word: str) -> None:
    titles = " ".join(_of_views(NOISE[word](np.random.default_rng(0))))
    assert not re.search(r"\b(better|worse|tighter|significant|because)\b", titles)


def test_a_share_that_falls_again_is_not_kept_from_there_on() -> None:
    sites = [f"layer.{k}" for k in range(5)]
    assert half_from(sites, np.array([0.0, 0.6, 0.2, 0.5, 0.8])) == "layer.3"
    assert half_from(sites, np.zeros(5)) is None


def test_small_changes_and_shares_of_nothing_are_not_rounded_away() -> None:
    setting = {
        "probability_before": 0.0,
        "probability": 0.1,
        "ratio": float("nan"),
        "perplexity_change": -3e-4,
    }
    assert steer_moved(setting) == "from a probability of 0 to 0.1, perplexity -0.03%"
    setting |= {"probability_before": 0.05, "ratio": 2.0, "perplexity_change": 1.5}
    assert (
        steer_moved(setting)
        == "from a probability of 0.05 to 0.1 (2 times), perplexity +150%"
    )
    right = np.zeros((12, 1000), dtype=bool)
    right[4:8, :8] = (
        # Eight of a thousand prompts are right with blocks from the middle alone.
        True
    )
    assert said(
        random_graft(np.random.default_rng(0), right),
        r"they differ by \+0\.8 percentage points",
    )


def test_the_median_of_two_shuffles_is_between_them() -> None:
    rows = torch.from_numpy(np.random.default_rng(0).standard_normal((8, 3)))
    labels = torch.tensor([[0, 1] * 4, [0, 0, 1, 1] * 2, [0] * 4 + [1] * 4])
    for name, score in separation(Distances(rows), labels).items():
        # Of this one, less is better.
        two = score.under_labels[1:] * (-1 if name == "within" else 1)
        if name == "neighbour":
            # It is kept less the share of pairs of one class: here 2 x 4 x 3 of 8 x 7.
            two = two + 24 / 56
        assert score.chance == pytest.approx(float(two.mean()), abs=1e-6)
