"""One entry for every analysis: what is asked where all of them are tried.

Laws, views, the workbench, interrupts and the GPU read this one list. A new analysis
gets one entry here, and `tests/laws/test_analyses.py` fails until it is there.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hiddenscope as hs
import hiddenscope.testing
from hiddenscope.testing import tiny_model, tiny_tokenizer
from hiddenscope.testing.subjects import ANSWER, RIVAL
from tests.planted import (
    apart,
    circuit_noise,
    clouds,
    compare_noise,
    drift_noise,
    edges_noise,
    examples_of,
    exchanges,
    feature_noise,
    features_of_states,
    flips,
    massive,
    patch_noise,
    planted_direct_path,
    planted_head,
    planted_path,
    previous_token_model,
    random_graft,
    random_model,
    random_states,
    random_texts,
    signed_model,
    signed_pairs,
    steer_noise,
    steered_far,
    variable_noise,
    with_idle_block,
)

IDS = [[5, 6, 7, 8, 9]]
TEXT, OTHER = (
    "The rest of the cats sat on the mat.",
    "A rest of the dogs sat on the mat.",
)
TEXTS = ["The cat sat.", "On the mat.", "The rest of it.", "A cat."]
LABELLED = (TEXTS * 3, [0, 1] * 6)
CLASSES = (
    [f"{'the cat' if k % 2 else 'on or of'} number {k}" for k in range(24)],
    [k % 2 for k in range(24)],
)
# Texts long enough to be aligned by distance.
MANY = [f"{TEXT} {OTHER} Number {k}." for k in range(8)]
CONTRAST = hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12)
CONTRASTS = [
    hs.Contrast([5, 20 + number, 7], [5, 40 + number, 7], 11, 12) for number in range(8)
]

_place: tuple[str, torch.dtype] = ("cpu", torch.float32)


@contextmanager
def placed(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Put the tiny models on another device and in another dtype while the body runs."""
    global _place
    before, _place = _place, (device, dtype)
    try:
        yield
    finally:
        _place = before


def tiny(family: str, seed: int = 0) -> hs.Model:
    """Return a tiny model with a tokenizer, loaded once; no test may change it."""
    return _loaded(family, seed, *_place)


@cache
def _loaded(family: str, seed: int, device: str, dtype: torch.dtype) -> hs.Model:
    module = tiny_model(family, seed=seed).to(device, dtype)
    if module.config.is_encoder_decoder:
        module.config.decoder_start_token_id = 0
    return hs.load((module, tiny_tokenizer()))


def points() -> Any:
    """Draw two clouds of twenty points each."""
    clouds = np.repeat([[1.0, 0, 0], [0, 1.0, 0]], 20, axis=0)
    return clouds + np.random.default_rng(0).normal(0, 0.01, (40, 3))


def faulty(model: Any) -> nn.Module:
    """Copy the module of a model, and plant a fault in its last block."""
    module = model.module if isinstance(model, hs.Model) else model[0]
    copied: Any = copy.deepcopy(module)
    copied.model.layers[-1].mlp.up_proj.weight.data.mul_(1.05)
    return copied


def steered(model: Any) -> hs.Result:
    """Steer along the difference of two texts, with every part of the result."""
    direction = hs.Direction.between(model, [[5, 6]], [[7, 8]])
    return hs.steer(
        model,
        [[5, 6, 7]],
        direction,
        answers=[3, 4],
        quality=[[9, 8, 7, 6]],
        new_tokens=1,
    )


def extracted(model: Any, texts: Any) -> Any:
    """Extract texts, and return the numbers of the store."""
    with TemporaryDirectory() as folder:
        return hs.extract(model, texts, f"{folder}/states").to_xarray()


@dataclass(frozen=True, eq=False)
class Entry(hs.testing.Entry):
    """One analysis, as it is asked where all of them are tried.

    `ask` says what the usual question about a subject has beyond what is required.
    `results` make every kind of result that it can give, on tiny models of several
    families. `request` is what the workbench is sent, if it offers the analysis.
    `noise` makes a result of something that means nothing, and `planted` one of a truth
    that is known, with what must be said of it.
    """

    results: tuple[Callable[[], hs.Result], ...] = ()
    request: dict[str, Any] | None = None
    noise: Callable[[np.random.Generator], hs.Result] | None = None
    planted: tuple[Callable[[], hs.Result], str] | None = None


ENTRIES: dict[str, Entry] = {
    "anatomy": Entry(
        hs.anatomy,
        measures_rounding=("difference",),
        results=(
            lambda: hs.anatomy(tiny("llama")),
            lambda: hs.anatomy(tiny("bert")),
            lambda: hs.anatomy(tiny("t5")),
        ),
        request={},
        noise=lambda generator: hs.anatomy(random_model(int(generator.integers(99)))),
        planted=(
            lambda: hs.anatomy(random_model(0)),
            "Each of the 4 entries of hidden_states equals a named state bit for bit",
        ),
    ),
    "profile": Entry(
        hs.profile,
        results=(
            lambda: hs.profile(tiny("llama"), [TEXT, OTHER]),
            lambda: hs.profile(tiny("llama"), "The"),
            lambda: hs.profile(tiny("t5"), [TEXT, OTHER]),
            lambda: hs.profile(tiny("llama"), [TEXT, OTHER], sites="*.mlp.neurons"),
        ),
        request={"texts": "The rest is here.", "final_norm": "mixed", "sample": 3},
        noise=lambda generator: hs.profile(random_model(1), random_texts(generator, 4)),
        planted=(
            massive,
            "Massive activations: 1 value in channel 2 at layer\\.1, 0 of them at a first token",
        ),
    ),
    "compare": Entry(
        hs.compare,
        lambda subject: {
            "a": subject.texts[0],
            "b": subject.texts[2],
            **subject.target,
        },
        results=(
            lambda: hs.compare(tiny("llama"), TEXT, OTHER),
            lambda: hs.compare(tiny("llama"), TEXT, TEXT),
            lambda: hs.compare(tiny("llama"), TEXT, other=tiny("llama", 1)),
            lambda: hs.compare(tiny("t5"), TEXT, OTHER, targets=TEXT),
        ),
        request={"a": "The rest is here.", "b": "The rest is there."},
        noise=compare_noise,
        planted=(
            lambda: hs.compare(random_model(1), "the cat sat", "the cat sat"),
            "have equal states everywhere\\.",
        ),
    ),
    "drift": Entry(
        hs.drift,
        lambda subject: {"candidate": subject.faulty, "texts": subject.inputs},
        measures_rounding=("envelope", "beyond", "mismatched", "ulp"),
        results=(
            lambda: hs.drift(tiny("llama"), tiny("llama"), [TEXT, OTHER]),
            lambda: hs.drift(tiny("llama"), tiny("llama", 1), [TEXT, OTHER]),
            lambda: hs.drift(tiny("t5"), tiny("t5", 1), [TEXT, OTHER]),
            lambda: hs.drift(tiny("llama"), tiny("llama", 1).capture(TEXT), TEXT),
        ),
        request={"candidate": {"name": "other"}, "texts": ["The rest is here."]},
        noise=drift_noise,
        planted=(
            lambda: drift_noise(np.random.default_rng(0), 1.5),
            "The module at fault is `model\\.layers\\.1\\.mlp\\.up_proj`",
        ),
    ),
    "series": Entry(
        hs.series,
        lambda subject: {
            "models": [subject.model, subject.faulty],
            "analysis": "compare",
            "data": subject.texts[:2],
        },
        results=(
            lambda: hs.series(
                [tiny("llama"), tiny("llama", 1), tiny("llama")],
                "profile",
                [TEXT, OTHER],
            ),
            lambda: hs.series(
                [tiny("llama"), tiny("llama", 1)], "compare", [TEXT, OTHER]
            ),
            lambda: hs.series([tiny("llama"), tiny("bert")], "profile", [TEXT, OTHER]),
            lambda: hs.series([tiny("llama"), tiny("llama", 1)], "probe", CLASSES),
            lambda: hs.series(
                [tiny("llama"), tiny("gpt2")],
                "project",
                CLASSES,
                options={"method": "pca"},
            ),
            lambda: hs.series(
                [tiny("llama"), tiny("llama", 1)],
                "drift",
                [TEXT, OTHER],
                against="previous",
            ),
            lambda: hs.series([tiny("llama"), tiny("llama", 1)], "lens", TEXT),
        ),
        noise=lambda generator: hs.series(
            [random_model(seed) for seed in generator.integers(1000, size=2).tolist()],
            "profile",
            "the cat sat",
        ),
        planted=(
            lambda: hs.series([random_model(0), random_model(0)], "profile", "the cat"),
            "have the same weights \\(sha256:\\w+…\\)\\.",
        ),
    ),
    "project": Entry(
        hs.project,
        lambda subject: {"data": subject.labelled, "method": "pca"},
        seeded={"data": ([f"number {k}" for k in range(30)], [0, 1] * 15)},
        of_copies_too=("shown", "trust"),
        up_to_sign={"x": "text", "y": "text"},
        results=(
            lambda: hs.project(tiny("llama"), CLASSES, method="pca"),
            lambda: hs.project(
                [tiny("llama"), tiny("gpt2")],
                {"a": CLASSES, "b": CLASSES},
                method="pca",
            ),
        ),
        request={"data": "cities-incomplete", "method": "pca", "sites": "layer.1"},
        noise=lambda generator: hs.project(
            random_states(generator, 24), flips(generator, 24), method="pca"
        ),
        planted=(
            lambda: hs.project(*apart(), method="pca"),
            "The classes are apart at layer\\.1 \\(p at most 0\\.05 by silhouettes",
        ),
    ),
    "lens": Entry(
        hs.lens,
        results=(
            lambda: hs.lens(tiny("llama"), TEXT, target="next"),
            lambda: hs.lens(tiny("llama"), [TEXT, OTHER], target=20),
            lambda: hs.lens(tiny("bert"), TEXT),
            lambda: hs.lens(tiny("bart"), TEXT, targets=OTHER),
            lambda: hs.lens(
                tiny("llama"), TEXT, sites="*.attn.head.*,*.mlp", target=20
            ),
        ),
        request={"texts": "The rest is here.", "k": 2, "target": "next"},
        noise=lambda generator: hs.lens(
            random_model(1), random_texts(generator, 2), target="next"
        ),
        planted=(
            lambda: hs.lens(with_idle_block(3), "the cat sat"),
            "the top token from layer\\.[0-2] on",
        ),
    ),
    "contributions": Entry(
        hs.contributions,
        lambda subject: {"answer": [ANSWER, RIVAL]},
        measures_rounding=("error",),
        results=(
            lambda: hs.contributions(tiny("llama"), TEXT, 11, 12),
            lambda: hs.contributions(tiny("gpt2"), TEXT, [11, 12], neurons=3),
            lambda: hs.contributions(tiny("mixtral"), [5, 6, 7], 11),
            lambda: hs.contributions(tiny("t5"), TEXT, [11, 12]),
            lambda: hs.contributions(tiny("hrm_text"), [5, 6, 7], 11),
        ),
        request={
            "text": "The rest is here.",
            "answer": "s",
            "other": "t",
            "neurons": 3,
        },
        noise=lambda generator: hs.contributions(
            random_model(1), random_texts(generator, 1)[0], 11, 12
        ),
        planted=(
            planted_head,
            "layer\\.2\\.attn\\.head\\.2 adds most to the logit of .*",
        ),
    ),
    "visibility": Entry(
        hs.visibility,
        lambda subject: {"texts": subject.one_input},
        seeded={
            "texts": ["The cat sat on the mat.", "No rest on a mat of cats."],
            "sampling": hs.Sampling(per_text=2),
        },
        results=(
            lambda: hs.visibility(tiny("llama"), TEXT, influence="l1"),
            lambda: hs.visibility(tiny("llama"), TEXT, influence="frobenius"),
            lambda: hs.visibility(tiny("llama"), TEXT, influence="relative"),
            lambda: hs.visibility(tiny("llama"), TEXT, influence="logit"),
            lambda: hs.visibility(
                tiny("llama"),
                [TEXT, OTHER],
                sites="layer.*",
                sampling=hs.Sampling(align="position"),
            ),
            lambda: hs.visibility(
                tiny("llama"), MANY, sampling=hs.Sampling(baseline="random")
            ),
            lambda: hs.visibility(tiny("bert"), MANY, sites="layer.*"),
            lambda: hs.visibility(tiny("t5"), tiny("t5").encode(TEXT, targets=OTHER)),
            lambda: hs.visibility(
                tiny("llama"),
                MANY,
                influence="resample",
                sampling=hs.Sampling(per_text=2, baseline="random"),
            ),
            lambda: hs.visibility(
                tiny("llama"),
                MANY,
                influence="logit",
                sampling=hs.Sampling(per_text=2, baseline="random"),
            ),
        ),
        request={"texts": "The rest is here.", "sites": "layer.*"},
        noise=lambda generator: hs.visibility(
            random_model(1), random_texts(generator, 1)[0]
        ),
        planted=(
            lambda: hs.visibility(with_idle_block(2), "the cat sat"),
            "from \\d+% at .* to 100% at layer\\.2",
        ),
    ),
    "attention": Entry(
        hs.attention,
        lambda subject: {"text": subject.one_input, "draws": 6},
        results=(
            lambda: hs.attention(tiny("llama"), TEXT),
            lambda: hs.attention(
                tiny("t5"), tiny("t5").encode(TEXT, targets=OTHER), "decoder.*.cross"
            ),
            lambda: hs.attention(
                tiny("gemma3_text"), TEXT, heads=[0, 2], queries=-1, draws=0
            ),
        ),
        request={"text": "The rest is here.", "layers": "1-2", "draws": 6},
        noise=lambda generator: hs.attention(
            random_model(int(generator.integers(99))), random_texts(generator, 1)[0]
        ),
        planted=(
            lambda: hs.attention(
                (previous_token_model(), tiny_tokenizer()), "the cat sat"
            ),
            "1 of 12 attention heads gives the previous token more than half of the weight \\(p at most 0\\.05\\): layer\\.1\\.attn\\.head\\.2",
        ),
    ),
    "probe": Entry(
        hs.probe,
        tolerance=0.05,  # descent stops where the gradient is 1e-4 of what it was
        results=(
            lambda: hs.probe(tiny("llama"), CLASSES),
            lambda: hs.probe(
                tiny("llama"),
                (CLASSES[0], list(map(float, range(24)))),
                task="regress",
            ),
            lambda: hs.probe(hs.each_token(tiny("llama")), (CLASSES[0], "position")),
        ),
        request={"data": "cities-incomplete", "sites": "layer.1"},
        noise=lambda generator: hs.probe(
            random_states(generator, 24), flips(generator, 24)
        ),
        planted=(
            lambda: hs.probe(*apart()),
            "^Better than guessing the largest class \\(50%\\): .*layer\\.1",
        ),
    ),
    "features": Entry(
        hs.features,
        lambda subject: {"dictionary": subject.dictionary, "texts": subject.inputs},
        of_all_texts=("unexplained",),
        results=(
            lambda: hs.features(tiny("llama"), [TEXT, OTHER], "pca", site="layer.1"),
            lambda: hs.features(tiny("llama"), MANY, "random", site="layer.2.mlp"),
            lambda: hs.features(tiny("llama"), TEXT, "neurons", site="layer.1"),
            lambda: hs.features(
                tiny("bert"), dictionary="random", site="layer.1", data=CLASSES
            ),
        ),
        request={
            "texts": "The rest is here.",
            "dictionary": "random",
            "site": "layer.1",
            "k": 2,
        },
        noise=feature_noise,
        planted=(
            features_of_states,
            "That of the dictionary is less than that of principal components",
        ),
    ),
    "examples": Entry(
        hs.examples,
        lambda subject: {"directions": subject.direction, "texts": subject.inputs},
        results=(
            lambda: hs.examples(tiny("llama"), "layer.2.mlp.neuron.7", [TEXT, OTHER]),
            lambda: hs.examples(
                tiny("llama").capture([TEXT, OTHER], "layer.2"),
                hs.Dictionary.of(np.eye(64)[:9], "layer.2"),
            ),
            lambda: hs.examples(
                tiny("t5"), hs.Direction.of(np.ones(64), sites="layer.1"), [TEXT, OTHER]
            ),
        ),
        request={
            "directions": "layer.1.mlp.neuron.7",
            "texts": ["The rest is here.", "Another."],
            "k": 3,
        },
        noise=examples_of,
        planted=(
            lambda: examples_of(np.random.default_rng(0), 0.5),
            "It prefers “t4”: \\d+% of \\d+ such tokens are strong",
        ),
    ),
    "patch": Entry(
        hs.patch,
        lambda subject: {"method": "both"},
        results=(
            lambda: hs.patch(tiny("llama"), CONTRAST),
            lambda: hs.patch(
                tiny("llama"), [CONTRAST, hs.Contrast([5, 6, 7], [5, 9, 7], 11, 13)]
            ),
            lambda: hs.patch(tiny("llama"), CONTRAST, method="both"),
            lambda: hs.patch(tiny("llama"), CONTRAST, method="attribution"),
        ),
        request={
            "contrasts": {
                "clean": "The rest",
                "corrupt": "The best",
                "answer": "s",
                "other": "t",
            },
            "sites": "*.mlp",
            "into": "clean",
            "method": "both",
            "window": 2,
            "layers": 0,
        },
        noise=patch_noise,
        planted=(
            lambda: hs.patch(
                random_model(3), hs.Contrast("the mat sat", "the hat sat", "a", "e")
            ),
            "the token that differs, restores at least half of the logit difference at layer\\.0",
        ),
    ),
    "variable": Entry(
        hs.variable,
        lambda subject: {
            "sites": subject.site,
            # Where they differ: where attention is local, the last does not see it.
            "tokens": [4],
        },
        up_to_sign={"basis": "width"},
        fitted=("basis",),
        tolerance=0.05,  # the subspace is learned by descent
        results=(
            lambda: hs.variable(signed_model(), signed_pairs(16), sites="layer.*"),
            lambda: hs.variable(tiny("bert"), exchanges(6), sites="layer.1.mlp"),
            lambda: hs.variable(
                tiny("llama"), exchanges(6), sites="layer.1", subspace="pca", rank=2
            ),
        ),
        request={
            "pairs": [
                f'{{"base": "The rest {k} is", "source": "The best {k} is",'
                ' "answer": 11, "counterfactual": 12}'
                for k in range(6)
            ],
            "sites": "layer.1",
        },
        noise=variable_noise,
        planted=(
            lambda: hs.variable(signed_model(), signed_pairs(16), sites="layer.1"),
            "A subspace of rank 1 holds the variable in layer\\.1 at the answering token",
        ),
    ),
    "edges": Entry(
        hs.edges,
        lambda subject: {"exact": 2, "sample": 2},
        results=(
            lambda: hs.edges(tiny("llama"), CONTRAST),
            lambda: hs.edges(tiny("gptj"), CONTRAST, method="exact"),
            lambda: hs.edges(tiny("llama"), CONTRAST, method="dropped", into="clean"),
            lambda: hs.edges(
                tiny("llama"),
                [CONTRAST, hs.Contrast([5, 6, 8], [5, 9, 8], 11, 13)],
                paths=["layer.1.mlp.neuron.7 > logits"],
                exact=0,
                sample=0,
            ),
        ),
        request={
            "contrasts": {
                "clean": "The rest",
                "corrupt": "The best",
                "answer": "s",
                "other": "t",
            },
            "into": "clean",
            "method": "gradient",
            "exact": 2,
            "sample": 2,
        },
        noise=edges_noise,
        planted=(
            planted_path,
            "The strongest edges are layer\\.1\\.attn\\.head\\.2 to logits .*layer\\.2\\.mlp to logits",
        ),
    ),
    "graft": Entry(
        hs.graft,
        lambda subject: {"donor": subject.donor, "data": subject.answered},
        results=(
            lambda: hs.graft(
                tiny("llama"), tiny("llama", 1), [([5, 6, 7], 11), ([8, 9], 12)]
            ),
            lambda: hs.graft(
                tiny("llama"), tiny("llama", 1), [([5, 6, 7], 11)], sites="layer.*"
            ),
            lambda: hs.graft(
                tiny("llama"),
                tiny("llama", 1),
                [[5, 6, 7], [8, 9], [4, 5], [9, 3, 7], [6, 6, 8]],
            ),
        ),
        request={"donor": {"name": "other"}, "data": "upload", "layers": 2},
        noise=random_graft,
        planted=(
            lambda: random_graft(
                np.random.default_rng(0),
                np.repeat(np.arange(12) < 8, 10).reshape(12, 10),
            ),
            "they differ by \\+100 percentage points \\(sign-flip test over 10 prompts: p = 0\\.002\\)",
        ),
    ),
    "circuit": Entry(
        hs.circuit,
        lambda subject: {"random": 1, "method": "gradient"},
        results=(
            lambda: hs.circuit(tiny("llama"), CONTRAST),
            lambda: hs.circuit(tiny("llama"), CONTRASTS, ablation="mean", random=1),
            lambda: hs.circuit(
                tiny("gptj"), CONTRAST, ablation="zero", random=1, method="gradient"
            ),
        ),
        request={
            "contrasts": {
                "clean": "The rest",
                "corrupt": "The best",
                "answer": "s",
                "other": "t",
            },
            "ablation": "zero",
            "method": "gradient",
            "random": 1,
        },
        noise=circuit_noise,
        planted=(
            planted_direct_path,
            "The strongest 0\\.4% of the edges \\(1 of 262\\) keep 1\\.00 .* did not choose",
        ),
    ),
    "steer": Entry(
        hs.steer,
        lambda subject: {
            "prompts": subject.one_input,
            "answers": [ANSWER, RIVAL],
            "quality": subject.inputs,
            "new_tokens": 0 if subject.fills_in else 1,
        },
        results=(
            lambda: steered(tiny("llama")),
            lambda: hs.steer(
                tiny("llama"),
                [[5, 6, 7]],
                hs.Direction.of(
                    SimpleNamespace(coef_=np.ones((1, 64)), site="layer.1"),
                    sites="layer.*",
                ),
                strengths="ablate",
                quality=[[9, 8, 7, 6]],
                new_tokens=0,
            ),
        ),
        request={
            "prompts": ["The rest is here."],
            "direction": {"toward": ["a b"], "away": ["c d"], "sites": "layer.1"},
            "strengths": [-1.0, 1.0],
            "answers": ["t"],
            "new_tokens": 2,
        },
        noise=steer_noise,
        planted=(steered_far, "moves “a” most as asked .*: from a probability of"),
    ),
    "embed": Entry(
        hs.embed,
        request={
            "texts": ["The rest.", "Another.", "The rest."],
            "normalize": False,
        },
    ),
    "search": Entry(
        hs.search,
        lambda subject: {"query": subject.texts[0], "texts": subject.texts, "k": 2},
        results=(
            lambda: hs.search(tiny("llama"), TEXT, texts=[TEXT, OTHER, "mat"], k=2),
            lambda: hs.search(points(), [0.0, 2.0, 1.0], k=2),
        ),
        request={
            "query": "The rest is here.",
            "k": 1,
            "nearness": "l2",
            "pool": -1,
            "texts": ["The rest.", "Another."],
        },
        noise=lambda generator: hs.search(
            generator.standard_normal((30, 6)), generator.standard_normal((2, 6))
        ),
        planted=(
            lambda: hs.search(np.eye(4), np.eye(4)[2:3], 1),
            "Nearest to “query 0” is text 2, with cosine 1\\.00",
        ),
    ),
    "cluster": Entry(
        hs.cluster,
        lambda subject: {"texts": subject.labelled[0]},
        up_to_sign={"place": "text"},
        results=(
            lambda: hs.cluster(points()),
            lambda: hs.cluster(tiny("llama"), CLASSES[0]),
        ),
        request={"texts": ["a", "b", "c", "d e", "f g", "h i"], "smallest": 2},
        noise=lambda generator: hs.cluster(
            generator.standard_normal((40, 6)), smallest=3
        ),
        planted=(clouds, "Cluster 0 has 20 texts; (9\\d|100)% of it comes back"),
    ),
    "extract": Entry(extracted, lambda subject: {"texts": subject.texts}),
}
RUNS = {word: entry.results for word, entry in ENTRIES.items() if entry.results}
NUMBERED = [(word, place) for word, runs in RUNS.items() for place in range(len(runs))]
CASES = [pytest.param(*case, id="-".join(map(str, case))) for case in NUMBERED]


@cache
def result_of(word: str, place: int) -> hs.Result:
    """Return one of the results of an analysis; each is computed once a process."""
    return RUNS[word][place]()
