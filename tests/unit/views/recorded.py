"""Results of every analysis as they were once, and what the views made of each.

The results are in results.zip, with four digits, so that they are the same on every
machine; what was said and drawn of them is in told.json. tests/unit/views/record.py
writes both.
"""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import numpy as np

import hiddenscope as hs
from hiddenscope.catalog import ANALYSES
from hiddenscope.results import Listing, findings_of, story_of, tables_of, views_of
from hiddenscope.views.render import page

RESULTS = Path(__file__).with_name("results.zip")
TOLD = Path(__file__).with_name("told.json")
# The markup of these is recorded too: they have lists, bars, folds and terms.
PAGES = ("contributions-0", "drift-3", "profile-0", "search-0")
KINDS = sorted({analysis.word for analysis in ANALYSES if analysis.result} | {"embed"})
NEAR = {"texts": 9, "of": 24, "example": ["a cat", "a cat."]}
SETTING = {
    "answer": " on",
    "site": "layer.2",
    "strength": 1.0,
    "probability_before": 0.01,
    "probability": 0.25,
    "ratio": 25.0,
    "perplexity": 330.0,
    "perplexity_change": 0.5,
}
QUANTISED = {
    "explained_by": "quantisation",
    "moved_layers": [
        {"site": "layer.1", "local": 0.01, "largest": 0.02, "total": 0.03}
    ],
    "moved_tokens": [
        {"token": " cat", "position": 2, "text": 0, "error": 0.25, "kl": None},
        {"token": " mat", "position": 9, "text": 1, "error": 0.5, "kl": 0.125},
    ],
}
HEAD = {"site": "layer.2.attn.head.1", "score": 0.7, "null": 0.1, "p": 0.001}
HEADS = [
    HEAD | {"site": f"layer.{1 + k // 4}.attn.head.{k % 4}", "p_half": 0.01 + k / 50}
    for k in range(12)
]
DOUBTS = [
    {"site": site, "groups": groups, "shown": 0.5, "full_space": 0.03, "p": 0.25}
    for site, groups in (
        ("layer.1", None), ("layer.2", 3), ("layer.3", None), ("final", None)
    )
]  # fmt: skip
# Facts that a tiny model does not give, by the result that has them instead of its own.
# Each changes some of the sentences.
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "anatomy-0": [
        {"head": None, "makes_logits": True},
        {"head": None, "makes_logits": False},
        {"stacks": {0: {"block_kind": "other", "earlier_entries": 2}}},
        {"stacks": {0: {"block_kind": "parallel", "final_norm": None}}},
        {"stacks": {0: {"block_kind": "single", "causal": False}}},
    ],
    "anatomy-2": [{"stacks": {1: {"block_kind": "post-norm"}}}],
    "attention-0": [
        {"induction_heads": HEADS[:1], "previous_heads": HEADS[:1], "rows_sum_to": 0.5},
        {"induction_heads": HEADS, "first_heads": HEADS[:2], "same_heads": HEADS[-2:]},
    ],
    "cluster-1": [{"noise": 5}, {"cluster_count": 0, "clusters": [], "noise": 24}],
    "compare-0": [
        {"rounding_floor": {"between": "two_copies", "relative": 1.2e-7}},
        {"rounding_floor": {"between": "two_runs", "relative": 1.2e-7}},
        {"stacks": {0: {"sites_of_one_side": "layer.4 to layer.5"}}, "gaps": 0},
        {"stacks": {0: {"end": {"final": {"median": 0.5}}}}},
        {"stacks": {0: {"first_difference": {"text": 3, "site": "layer.1"}}}},
    ],
    "compare-2": [{"cka": {"most_alike": None}}, {"cka": {"few_tokens": False}}],
    "contributions-0": [
        {"softcap": 30.0, "notes": ["A note."]},
        {"strongest": {0: {"contribution": -0.46}}, "other": None},
    ],
    "drift-0": [
        {"largest": {"beyond": 0.25}, "as_given": {"error": 0.125}},
        {"changed_weights": [{"name": "head", "relative": 0.01}]},
        {"changed_weights": [{"name": f"{n}", "relative": 0.01 * n} for n in (1, 3, 2)]},
        {"self_check": {"observing_changed_nothing": False}, "notes": ["A note."]},
        {"baseline": {"file": "b.json", "sites": 5, "written": True}},
        {"baseline": {"file": "b.json", "sites": 5, "written": False}},
        {"noise": {"made_of": []}},
        {"noise": {"made_of": ["dtype", "kernel", "new"]}},
    ],
    "drift-1": [
        QUANTISED,
        {"explained_by": "adapter", "beyond": float("inf")},
        {"explained_by": "dtype", "changed_weights": [{"name": "a", "relative": 1}]},
        {"explained_by": None, "unexplained": {"site": "layer.2", "beyond": 12.0, "error": 0.5}},
        {"unexplained": {"site": "layer.2", "beyond": 12.0, "error": 0.5}, "own_code": True},
        {"module": "", "compared": "passes", "hints": [{"fault": "half", "evidence": "Half of it."}]},
        {"consequences": {"restored": [{"sites": ["layer.1"], "share": -0.5}]}},
        *(
            {
                "beyond": 0.5,
                "systematic": {
                    "part": "mlp", "pattern": pattern, "size": 0.01, "beyond": 3.0
                },
            }
            for pattern in ("scale", "bias", "gain", "linear")
        ),
    ],
    "graft-0": [
        {"groups": 1, "middle_less_late": {"value": -0.25, "p": 0.04}},
        {"layers": 2, "lowest": {"to": "layer.2"}, "notes": ["A note."]},
    ],
    "lens-0": [
        {"settled_known_from": None},
        {"settled_known_from": "layer.1"},
        {"accuracy": {"half_from": "layer.1"}, "lens": "tuned"},
    ],
    "lens-4": [
        {"target": {"first_best_at": "layer.1.mlp", "site": "layer.3"}},
        {"target": {"first_in_top_k_at": "layer.2.mlp"}, "lens": "jacobian"},
    ],
    "patch-0": [
        {"into": "clean", "window": 3},
        {"differing_token": None, "answer_token": {"half_at": []}},
        {"layer_windows": {"layers": 3, "largest": {"site": "layer.2.mlp"}}},
        {"agreement": {"cells": 7, "correlation": 0.5, "mean_absolute_error": 0.125}},
    ],
    "patch-1": [
        {"groups": 2},
        {"answers": [{"answer": f" {k}", "other": " "} for k in range(5)]},
        {"logit_difference": {"clean": -0.25}},
    ],
    "patch-heads": [
        {"clear": None},
        {"clear": [{"site": "layer.1", "effect": 0.5, "low": 0.25, "high": 0.75}]},
        {"positions": [1]},
    ],
    "probe-0": [
        {"best": {"p": None, "control": None}},
        {"best": {"interval": [0.25, 1.0]}},
        {"best": {"interval": [0.25, 1.0]}, "chance": 0.99},
        {"above_chance_at": [], "smallest_p": 0.25, "permutations": 3},
        {"smallest_p": 0.04, "permutations": 0},
        {"interval_holds": 0.9, "calibrated": False, "groups": 8, "copies": 1},
        {"calibrated": False, "all_equal_at": ["layer.0"], "left_out": 1234},
        {"fixed_penalty": 0.5, "not_converged_at": ["layer.1", "layer.2"]},
        {"class_count": 9, "near_duplicates": NEAR, "control": {"kind": "by_token_id"}},
        {"near_duplicates": NEAR, "groups_given": True},
        {"chance": 1.0, "mix": {"largest_weight": {"weight": 1.0}}},
    ],
    "profile-0": [
        {"stacks": {0: {"norm_ratio": 12.0, "before_final": {
            "first_token_norm": 1234.5}}}, "tokens": 5000, "tokens_kept": 4096},
        {"stacks": {0: {"massive_activations": {
            "threshold": 1000, "values": 3, "sites": "layer.1", "at_first_tokens": 3,
            "channels": [{"channel": 7, "values": 2}]}, "not_finite": {
            "states": 2, "token": " a", "site": "layer.2"}}}},
        {"stacks": {0: {"few_tokens": False, "effective_rank": {"all_tokens": 1.0},
                        "massive_activations": {
            "threshold": 1000, "values": 1, "sites": "layer.1", "at_first_tokens": 0,
            "channels": [{"channel": 7, "values": 1}]}}}},
    ],
    "project-0": [
        {"parts": {0: {"separation": {"best": {"p_corrected": None}}}}},
        {"parts": {0: {"separation": {"apart_at": []}, "smallest_p": 0.25}}},
        {"parts": {0: {"separation": {"best": {"p": {"neighbour": 0.5}}}}}},
        {"parts": {0: {"smallest_p": 0.02, "copies": 1, "groups": 20}}},
        {"parts": {0: {"class_count": 1, "labels_predicted": 3,
                       "all_equal_at": ["layer.0"]}}},
        {"parts": {0: {"picture": {"doubts": DOUBTS}}}},
        {"parts": {0: {"near_duplicates": NEAR | {"texts": 2}, "dataset": ""}}},
    ],
    "series-0": [
        {"headlines": [], "notes": ["A note."]},
        {"headlines": {0: {"values": {1: {"value": None}}, "place": "best"}}},
        {"same_tokens": False, "members": {0: {"tokens": 40}}},
        {"same_weights": {0: {"computed_once": False}}},
    ],
    "steer-0": [
        {"best": SETTING, "not_written": "no tokens were asked for"},
        {"answers": {0: {"lowest": SETTING | {"ratio": float("inf")}}}},
        {"direction": {"origin": "vector", "spare_first": True}, "upwards": True},
        {"direction": {"pool": "mean"}, "quality": {"masked_every": 7, "texts": 2}},
    ],
    "visibility-0": [{"cut": True, "probes": 64}],
    "visibility-5": [
        {"aligned": {"locality": {"verdict": "below", "low": None}, "batches": 12}},
        {"aligned": {"laws": {0: {"better": "exponential", "explained": None}}}},
        {"aligned": {"laws": {0: {"better": None, "exponent": {"value": None}}}}},
        {"aligned": {"random": {0: {"decays": "above", "verdict": "above"}}}},
    ],
}  # fmt: skip


@cache
def names() -> list[str]:
    """Return the names of the recorded results: an analysis, and which of its runs."""
    with ZipFile(RESULTS) as archive:
        return [name.removesuffix(".json") for name in archive.namelist()]


@cache
def recorded(name: str) -> hs.Result:
    """Return a recorded result."""
    assert name in names(), f"no {name}: run python -m tests.unit.views.record"
    with ZipFile(RESULTS) as archive, TemporaryDirectory() as folder:
        return hs.Result.load(archive.extract(f"{name}.json", folder))


def variants(name: str) -> Iterator[hs.Result]:
    """Yield a recorded result with other facts."""
    result = recorded(name)
    for facts in VARIANTS.get(name, []):
        merged = _merged(result.facts, facts)
        yield hs.Result(result.kind, result.data, merged, result.source)


def _merged(old: Any, new: Any) -> Any:
    """Put some facts into others: those of a group by name, of a list by place."""
    if not isinstance(new, Mapping) or not isinstance(old, Mapping | list):
        return new
    whole = dict(old) if isinstance(old, Mapping) else dict(enumerate(old))
    for key, value in new.items():
        whole[key] = _merged(whole.get(key), value)
    return whole if isinstance(old, Mapping) else list(whole.values())


def portrait(result: hs.Result) -> dict[str, Any]:
    """Return everything that is said and drawn of a result, as JSON keeps it."""
    told: dict[str, Any] = {
        "title": result.title,
        "findings": findings_of(result),
        "tables": [],
        "views": [_plain(view) for view in views_of(result)],
        "sections": [],
    }
    for table in tables_of(result):
        rows = [list(map(str, row)) for row in table.rows]
        told["tables"].append([table.title, list(table.columns), *rows])
    for section in story_of(result):
        listings = [table for table in section.tables if isinstance(table, Listing)]
        bare = replace(section, sentences=(), tables=tuple(listings), figures=())
        plain = _plain(bare)
        # Views and findings are told above.
        plain["views"] = [view.title for view in section.views]
        prose = section.prose
        for place, finding in enumerate(told["findings"]):
            prose = prose.replace(finding, f"[{place}]")
        told["sections"].append({"title": plain.pop("title"), "prose": prose, **plain})
    return told


def _plain(value: Any) -> Any:
    """Return a value as JSON keeps it: of a dataclass what is no default."""
    if isinstance(value, np.ndarray):
        return _summed(value)
    if is_dataclass(value):
        plain: dict[str, Any] = {"kind": type(value).__name__}
        for field in fields(value):
            inner = _plain(getattr(value, field.name))
            default = None if field.default is MISSING else _plain(field.default)
            if inner != default:
                plain[field.name] = inner
        return plain
    if isinstance(value, tuple | list):
        return [_plain(inner) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return value


def _summed(array: np.ndarray) -> str:
    """Return the shape of an array, and sums that tell any two arrays apart: every
    number has a weight of its own in them.
    """
    numbers = np.asarray(array, np.float64).ravel()
    finite = np.isfinite(numbers)
    places = np.arange(1, len(numbers) + 1)
    missing = places[~finite].sum()
    total = (numbers * np.sqrt(places))[finite].sum()
    size = np.abs(numbers[finite]).sum()
    return f"{list(array.shape)} missing {missing} sum {total:.5g} size {size:.5g}"


def sentences(told: Any) -> list[str]:
    """Return every text of a portrait."""
    if isinstance(told, str):
        return [told]
    inner = told.values() if isinstance(told, Mapping) else told
    if not isinstance(told, Mapping | list):
        return []
    return [text for value in inner for text in sentences(value)]


def all_told(name: str) -> dict[str, Any]:
    """Return the portrait of a result, and what its variants say that it does not."""
    told = portrait(recorded(name))
    said = set(sentences(told))
    if name in PAGES:
        _, _, body = page(recorded(name)).partition("<main>")
        told["page"] = body.partition("<noscript>")[0].splitlines()
    told["variants"] = []
    for variant in variants(name):
        new = dict.fromkeys(sentences(portrait(variant)))
        told["variants"].append([text for text in new if text not in said])
    return told
