"""Results of `attention` and `contributions` as their analyses give them, made of
random numbers: patterns whose rows sum to 1, parts that sum to the logit.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import xarray

from hiddenscope.results import Result, views_of
from hiddenscope.results.dataset import text_array
from hiddenscope.results.pictures import Patterns

SENTENCE = ("The", " capital", " of", " France", " is", " Paris", ".", " The")
EVIL = (
    "</script><script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "abc\u202e\u2066evil\u2069",
    "line\nend",
    "\u2028",
    "long" * 500,
    "=HYPERLINK(1)",
    "",
)
SOURCE = {"model": "smollm2", "dtype": "float32", "device": "cpu"}
RELATIONS = ("previous", "first", "same", "induction")


def known_kinds(*_: str) -> AbstractContextManager[None]:
    """Show results of these kinds, as the catalog knows them all."""
    return nullcontext()


def heads_of(result: Result) -> Patterns:
    """Return the view of all heads."""
    view = views_of(result)[0]
    assert isinstance(view, Patterns)
    return view


def patterns(
    layers: int, heads: int, queries: Sequence[int], keys: int, causal: bool, seed: int
) -> np.ndarray:
    """Rows that sum to 1; in a causal model nothing after the query is read. Head 0
    reads the previous token, head 1 the first one.
    """
    random = np.random.default_rng(seed)
    scores = random.normal(0, 2, (layers, heads, len(queries), keys))
    places = np.arange(keys)
    for row, query in enumerate(queries):
        scores[:, 0, row, max(0, query - 1) % keys] += 7
        if heads > 1:
            scores[:, 1, row, 0] += 7
        if causal:
            scores[:, :, row, places > query] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def attention(
    layers: int = 6,
    heads: int = 4,
    tokens: Sequence[str] = SENTENCE,
    *,
    queries: Sequence[int] | None = None,
    memory: Sequence[str] = (),
    missing: Sequence[tuple[int, int]] = (),
    tested: bool = True,
    causal: bool = True,
    seed: int = 0,
) -> Result:
    """Return a result of `hs.attention`; with a `memory`, one of cross-attention."""
    keys = tuple(memory or tokens)
    queries = range(len(tokens)) if queries is None else queries
    part = "cross" if memory else "attn"
    is_causal = causal and not memory
    pattern = patterns(layers, heads, queries, len(keys), is_causal, seed)
    random = np.random.default_rng(seed + 1)
    norms = random.lognormal(0, 1, (layers, heads, len(keys))).astype(np.float32)
    for row, head in missing:
        pattern[row, head] = norms[row, head] = np.nan
    weighted = pattern * norms[:, :, None, :]
    dims = ("layer", "head", "query", "key")
    variables: dict = {
        "pattern": (dims, pattern),
        "weighted": (dims, weighted),
        "write_norm": (("layer", "head", "key"), norms),
    }
    for name in ("previous", "first", "same"):
        means = random.uniform(0, 1, (layers, heads)).astype(np.float32)
        variables[name] = (("layer", "head"), means)
    names = [
        f"decoder.layer.{k + 1}.cross" if memory else f"layer.{k + 1}.{part}"
        for k in range(layers)
    ]
    coords: dict = {
        "layer": np.arange(1, layers + 1),
        "head": np.arange(heads),
        "site": ("layer", names),
        "query_string": ("query", text_array([tokens[place] for place in queries])),
        "query_position": ("query", np.array(list(queries))),
        "key_string": ("key", text_array(list(keys))),
        "key_position": ("key", np.arange(len(keys))),
    }
    facts: dict = {
        "heads": heads * layers - len(missing),
        "layers": layers,
        "tokens": len(tokens),
        "causal": is_causal,
        "rows_sum_to": 1.0,
        "error": 0.0,
        "draws": 16 * tested,
        "kernel": "sdpa",
        "notes": [],
    }
    if tested:
        score = random.uniform(0, 0.2, (4, layers, heads))
        score[0, :, 0], score[1, :, 1 % heads] = 0.9, 0.8
        score[3, layers // 2, heads - 1] = 0.7
        p = np.where(score > 0.5, 0.001, 0.8)
        for row, head in missing:
            score[:, row, head] = p[:, row, head] = np.nan
        shape = ("relation", "layer", "head")
        variables |= {
            "score": (shape, score),
            "null": (shape, np.full_like(score, 0.05)),
            "p": (shape, p),
        }
        coords["relation"] = list(RELATIONS)
        for place, name in enumerate(RELATIONS):
            found = []
            for row, head in np.argwhere(p[place] < 0.05):
                value = float(score[place, row, head])
                chances = {"null": 0.05, "p": 0.001, "p_half": 0.001}
                site = f"{names[row]}.head.{head}"
                found.append({"site": site, "score": value, **chances})
            facts[f"{name}_heads"] = sorted(found, key=lambda one: -one["score"])
    return Result("attention", xarray.Dataset(variables, coords), facts, SOURCE)


def contributions(
    layers: int = 6, heads: int = 4, steps: Sequence[str] = (" Paris",)
) -> Result:
    """Return a result of `hs.contributions`: the parts sum to the logit."""
    random = np.random.default_rng(0)
    count = len(steps)
    whole = random.normal(0, 0.5, (count, layers, heads))
    parts: dict = {
        "attn_head": (("step", "layer", "head"), whole),
        "mlp": (("step", "layer"), random.normal(0.3, 1, (count, layers))),
        "embedding": ("step", random.normal(0, 0.2, count)),
    }
    total = sum(values.reshape(count, -1).sum(1) for _, values in parts.values())
    parts |= {"logit": ("step", total - 1e-6), "error": ("step", np.full(count, 1e-6))}
    coords = {
        "layer": np.arange(1, layers + 1),
        "head": np.arange(heads),
        "step_string": ("step", text_array(list(steps))),
    }
    facts: dict = {
        "answer": "".join(steps),
        "tokens": 5,
        "steps": list(steps),
        "logit": total.tolist(),
        "total": total.tolist(),
        "error": [1e-6] * count,
        "allowed_error": [1e-3] * count,
        "probability": [0.5] * count,
        "strongest": [],
        "norm_subtracts_mean": False,
        "softcap": None,
        "scale": None,
        "dtype": "float32",
        "notes": [],
    }
    for step, row in np.ndindex(count, layers):
        amount = float(whole[step, row, 0])
        site, share = f"layer.{row + 1}.attn.head.0", amount / float(total[step])
        found = {"site": site, "contribution": amount, "share": share, "step": step}
        facts["strongest"].append(found)
    return Result("contributions", xarray.Dataset(parts, coords), facts, SOURCE)
