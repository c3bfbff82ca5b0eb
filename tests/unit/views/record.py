"""Record what the views make of results, after a change that is meant; told.json then
shows what changed.

    python -m tests.unit.views.record          of the recorded results, and of new ones
    python -m tests.unit.views.record --anew   of results that are computed again
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import numpy as np

import hiddenscope as hs
from hiddenscope.app.questions import embedded
from hiddenscope.results.result import to_bytes
from hiddenscope.testing import tiny_model, tiny_tokenizer
from tests.registry import CLASSES, MANY, NUMBERED, OTHER, TEXT, result_of, tiny
from tests.unit.views.recorded import RESULTS, TOLD, all_told, names

# Large maps, which show nothing new.
LARGE = {"visibility-1", "visibility-2", "visibility-4", "visibility-7", "drift-2"}
CONTRASTS = [
    hs.Contrast([5, 6, 7], [5, other, 7], 11, answer)
    for other, answer in ((9, 12), (10, 13), (20, 14), (30, 15))
]


def _embedded() -> hs.Result:
    return embedded(tiny("llama"), {"texts": [TEXT, OTHER, "a\ncat"]})


def _pooled() -> hs.Result:
    with TemporaryDirectory() as folder:
        path = Path(folder, "store")
        store = hs.extract(
            tiny("llama"), CLASSES[0], path, sites="layer.*", pool="mean"
        )
        return hs.profile(store)


def _shallow() -> hs.Model:
    return hs.load((tiny_model("llama", layers=2), tiny_tokenizer()))


# What no run of tests/registry.py shows.
MORE: dict[str, Callable[[], hs.Result]] = {
    "embed-0": _embedded,
    "compare-many": lambda: hs.compare(tiny("llama"), [TEXT, "a"], [OTHER, "a"]),
    "compare-short": lambda: hs.compare(tiny("llama"), "the cat", "the mat"),
    "profile-long": lambda: hs.profile(tiny("llama"), MANY),
    "profile-pooled": _pooled,
    "project-tokens": lambda: hs.project(
        hs.each_token(tiny("llama")), (CLASSES[0][:6], CLASSES[1][:6]), method="pca"
    ),
    "project-plain": lambda: hs.project(
        tiny("llama").capture(CLASSES[0]), method="pca"
    ),
    "project-equal": lambda: hs.project(
        tiny("llama"),
        ([f"{text} the" for text in CLASSES[0]], CLASSES[1]),
        method="pca",
    ),
    "series-many": lambda: hs.series(
        [tiny("llama", seed) for seed in range(9)], "lens", "the cat"
    ),
    "steer-site": lambda: hs.steer(
        tiny("llama"),
        [[5, 6, 7], [8, 9]],
        hs.Direction.between(tiny("llama"), [[5, 6]], [[7, 8]], sites="layer.2"),
        strengths=[-40.0, 0.0, 40.0],
        answers=[3, 4],
        quality=[[9, 8, 7, 6]],
        new_tokens=0,
    ),
    "visibility-texts": lambda: hs.visibility(
        tiny("llama"),
        ["the cat", "the mat"],
        sites="layer.1,layer.2",
        sampling=hs.Sampling(align="position"),
    ),
    "patch-groups": lambda: hs.patch(tiny("llama"), CONTRASTS),
    "series-depths": lambda: hs.series(
        [hs.Member(tiny("llama"), at=1), hs.Member(_shallow(), at=10)],
        "profile",
        [TEXT, OTHER],
    ),
    "patch-heads": lambda: hs.patch(
        tiny("llama"), CONTRASTS, sites="*.attn.head.*", into="clean"
    ),
    "patch-zero": lambda: hs.patch(
        tiny("llama"), CONTRASTS[0], sites="layer.*.mlp", method="zero"
    ),
    "patch-gaps": lambda: hs.patch(
        tiny("llama"), hs.Contrast("the cat", "the old cat", 11, 12), window=2
    ),
    "search-queries": lambda: hs.search(
        tiny("llama"), CLASSES[0][:5], texts=CLASSES[0], k=25
    ),
    "search-tokens": lambda: hs.search(
        hs.each_token(tiny("llama")), [1.0] * 64, 3, site="layer.2", texts=[TEXT]
    ),
}


def _rounded(result: hs.Result) -> hs.Result:
    data = result.data.copy()
    for name, variable in data.variables.items():
        if variable.dtype.kind == "f":
            digits = [float(f"{number:.4g}") for number in variable.to_numpy().ravel()]
            values = np.array(digits, variable.dtype).reshape(variable.shape)
            data[name] = (variable.dims, values, variable.attrs)
    return hs.Result(result.kind, data, result.facts, result.source)


def _run(name: str) -> hs.Result:
    if name in MORE:
        return MORE[name]()
    word, _, place = name.rpartition("-")
    return result_of(word, int(place))


def _record() -> None:
    mode: Literal["w", "a"] = "w" if "--anew" in sys.argv else "a"
    runs = [f"{word}-{place}" for word, place in NUMBERED]
    with ZipFile(RESULTS, mode, ZIP_DEFLATED) as archive:
        recorded = {Path(name).stem for name in archive.namelist()}
        for name in sorted({*runs, *MORE} - LARGE - recorded):
            content = to_bytes(_rounded(_run(name)), ".json")
            archive.writestr(ZipInfo(f"{name}.json"), content, ZIP_DEFLATED, 9)
    lines = []
    for name in names():
        told = json.dumps(all_told(name), ensure_ascii=False)
        lines.append(f"{json.dumps(name)}: {told}")
    TOLD.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


if __name__ == "__main__":
    _record()
