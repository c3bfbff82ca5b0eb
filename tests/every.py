"""Every analysis, run on tiny models in every way that makes another result; each is
run once a session.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXT, OTHER = (
    "The rest of the cats sat on the mat.",
    "A rest of the dogs sat on the mat.",
)
CLASSES = (
    [f"{'the cat' if k % 2 else 'on or of'} number {k}" for k in range(24)],
    [k % 2 for k in range(24)],
)
# Texts long enough to be aligned by distance.
MANY = [f"{TEXT} {OTHER} Number {k}." for k in range(6)]


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
    return _loaded(family, seed, *_place)


@cache
def _loaded(family: str, seed: int, device: str, dtype: torch.dtype) -> hs.Model:
    module = tiny_model(family, seed=seed).to(device, dtype)
    if module.config.is_encoder_decoder:
        module.config.decoder_start_token_id = 0
    return hs.load((module, tiny_tokenizer()))


def points() -> Any:
    return np.repeat([[1.0, 0, 0], [0, 1.0, 0]], 20, axis=0) + np.random.default_rng(
        0
    ).normal(0, 0.01, (40, 3))


RUNS: dict[str, list[Callable[[], hs.Result]]] = {
    "anatomy": [lambda: hs.anatomy(tiny("llama")), lambda: hs.anatomy(tiny("bert")), lambda: hs.anatomy(tiny("t5"))],
    "profile": [
        lambda: hs.profile(tiny("llama"), [TEXT, OTHER]),
        lambda: hs.profile(tiny("llama"), "The"),
        lambda: hs.profile(tiny("t5"), [TEXT, OTHER]),
    ],
    "compare": [
        lambda: hs.compare(tiny("llama"), TEXT, OTHER),
        lambda: hs.compare(tiny("llama"), TEXT, TEXT),
        lambda: hs.compare(tiny("llama"), TEXT, other=tiny("llama", 1)),
        lambda: hs.compare(tiny("t5"), TEXT, OTHER, targets=TEXT),
    ],
    "drift": [
        lambda: hs.drift(tiny("llama"), tiny("llama"), [TEXT, OTHER]),
        lambda: hs.drift(tiny("llama"), tiny("llama", 1), [TEXT, OTHER]),
        lambda: hs.drift(tiny("t5"), tiny("t5", 1), [TEXT, OTHER]),
        lambda: hs.drift(tiny("llama"), tiny("llama", 1).capture(TEXT), TEXT),
    ],
    "series": [
        lambda: hs.series([tiny("llama"), tiny("llama", 1), tiny("llama")], "profile", [TEXT, OTHER]),
        lambda: hs.series([tiny("llama"), tiny("llama", 1)], "compare", [TEXT, OTHER]),
        lambda: hs.series([tiny("llama"), tiny("bert")], "profile", [TEXT, OTHER]),
        lambda: hs.series([tiny("llama"), tiny("llama", 1)], "probe", CLASSES),
        lambda: hs.series([tiny("llama"), tiny("gpt2")], "project", CLASSES, options={"method": "pca"}),
        lambda: hs.series([tiny("llama"), tiny("llama", 1)], "drift", [TEXT, OTHER], against="previous"),
        lambda: hs.series([tiny("llama"), tiny("llama", 1)], "lens", TEXT),
    ],
    "project": [
        lambda: hs.project(tiny("llama"), CLASSES, method="pca"),
        lambda: hs.project([tiny("llama"), tiny("gpt2")], {"a": CLASSES, "b": CLASSES}, method="pca"),
    ],
    "lens": [
        lambda: hs.lens(tiny("llama"), TEXT, target="next"),
        lambda: hs.lens(tiny("llama"), [TEXT, OTHER], target=20),
        lambda: hs.lens(tiny("bert"), TEXT),
        lambda: hs.lens(tiny("bart"), TEXT, targets=OTHER),
        lambda: hs.lens(tiny("llama"), TEXT, sites="*.attn.head.*,*.mlp", target=20),
    ],
    "contributions": [
        lambda: hs.contributions(tiny("llama"), TEXT, 11, 12),
        lambda: hs.contributions(tiny("gpt2"), TEXT, [11, 12], neurons=3),
        lambda: hs.contributions(tiny("mixtral"), [5, 6, 7], 11),
        lambda: hs.contributions(tiny("t5"), TEXT, [11, 12]),
        lambda: hs.contributions(tiny("hrm_text"), [5, 6, 7], 11),
    ],
    "visibility": [
        *(lambda measure=measure: hs.visibility(tiny("llama"), TEXT, influence=measure)
          for measure in ("l1", "frobenius", "relative", "logit")),
        lambda: hs.visibility(tiny("llama"), [TEXT, OTHER], sites="layer.*",
                              sampling=hs.Sampling(align="position")),
        lambda: hs.visibility(tiny("llama"), MANY, sampling=hs.Sampling(baseline="random")),
        lambda: hs.visibility(tiny("bert"), MANY, sites="layer.*"),
        lambda: hs.visibility(tiny("t5"), tiny("t5").encode(TEXT, targets=OTHER)),
    ],
    "attention": [
        lambda: hs.attention(tiny("llama"), TEXT),
        lambda: hs.attention(tiny("t5"), tiny("t5").encode(TEXT, targets=OTHER), "decoder.*.cross"),
        lambda: hs.attention(tiny("gemma3_text"), TEXT, heads=[0, 2], queries=-1, draws=0),
    ],
    "probe": [
        lambda: hs.probe(tiny("llama"), CLASSES),
        lambda: hs.probe(tiny("llama"), (CLASSES[0], list(map(float, range(24)))), task="regress"),
        lambda: hs.probe(hs.each_token(tiny("llama")), (CLASSES[0], "position")),
    ],
    "patch": [
        lambda: hs.patch(tiny("llama"), hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12)),
        lambda: hs.patch(tiny("llama"), [hs.Contrast([5, 6, 7], [5, 9, 7], 11, other) for other in (12, 13)]),
        lambda: hs.patch(tiny("llama"), hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12), method="both"),
        lambda: hs.patch(tiny("llama"), hs.Contrast([5, 6, 7], [5, 9, 7], 11, 12), method="attribution"),
    ],
    "graft": [
        lambda: hs.graft(tiny("llama"), tiny("llama", 1), [([5, 6, 7], 11), ([8, 9], 12)]),
        lambda: hs.graft(tiny("llama"), tiny("llama", 1), [([5, 6, 7], 11)], sites="layer.*"),
    ],
    "steer": [
        lambda: hs.steer(
            tiny("llama"),
            [[5, 6, 7]],
            hs.Direction.between(tiny("llama"), [[5, 6]], [[7, 8]]),
            answers=[3, 4],
            quality=[[9, 8, 7, 6]],
            new_tokens=2,
        ),
        lambda: hs.steer(
            tiny("llama"),
            [[5, 6, 7]],
            hs.Direction.of(SimpleNamespace(coef_=np.ones((1, 64)), site="layer.1"), sites="layer.*"),
            strengths="ablate",
            quality=[[9, 8, 7, 6]],
            new_tokens=0,
        ),
    ],
    "search": [
        lambda: hs.search(tiny("llama"), TEXT, texts=[TEXT, OTHER, "mat"], k=2),
        lambda: hs.search(points(), [0.0, 2.0, 1.0], k=2),
    ],
    "cluster": [
        lambda: hs.cluster(points()),
        lambda: hs.cluster(tiny("llama"), CLASSES[0]),
    ],
}  # fmt: skip
NUMBERED = [(word, place) for word, runs in RUNS.items() for place in range(len(runs))]
CASES = [pytest.param(*case, id="-".join(map(str, case))) for case in NUMBERED]


@cache
def result_of(word: str, place: int) -> hs.Result:
    """The result of one run."""
    return RUNS[word][place]()
