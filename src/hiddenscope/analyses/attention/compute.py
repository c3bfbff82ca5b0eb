"""The attention weights of one text as labelled arrays, and what each head reads."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hiddenscope.analyses.attention.relations import (
    FEWEST_DRAWS,
    RelationTests,
    draw_texts,
    measure_relations,
    weights_on_places,
)
from hiddenscope.analyses.attention.selection import (
    Layers,
    NumberChoice,
    Selection,
    select_attentions,
    select_positions,
)
from hiddenscope.analyses.attention.story import LEVEL, AttentionReport, Head
from hiddenscope.errors import TextError, TooLarge
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.attention_weights import (
    WeightRows,
    WeightsReport,
    run_weights,
)
from hiddenscope.passes.buffers import SHARE_OF_FREE_MEMORY, free_memory
from hiddenscope.passes.record import check_targets
from hiddenscope.results import Result
from hiddenscope.results.dataset import (
    Attributes,
    Coordinates,
    Variables,
    site_names,
    text_array,
    to_dataset,
)

if TYPE_CHECKING:
    import xarray

# A sum of weights differs from 1 by no more than this through rounding, in bfloat16.
ROUNDING = 0.02
CELLS = ("layer", "head", "query", "key")
ATTRIBUTES: Mapping[str, Attributes] = {
    "pattern": {"long_name": "attention weight"},
    "weighted": {"long_name": "value-weighted attention", "units": "L2"},
    "write_norm": {"long_name": "norm of what a token writes", "units": "L2"},
    "previous": {"long_name": "mean weight on the previous token"},
    "first": {"long_name": "mean weight on the first token"},
    "same": {"long_name": "mean weight on the same token"},
    "score": {"long_name": "mean weight on random tokens"},
    "null": {"long_name": "mean weight by chance"},
    "p": {"long_name": "corrected p of a score above chance"},
    "p_half": {"long_name": "corrected p of a score above a half"},
}


def read_heads(
    model: ModelLike,
    text: Texts | Inputs,
    layers: Layers | None,
    heads: NumberChoice | None,
    queries: NumberChoice | None,
    *,
    draws: int,
    seed: int,
) -> Result:
    """Return the weights of the heads that are asked for, and the tests of each."""
    model = as_model(model)
    if 0 < draws < FEWEST_DRAWS:
        raise TextError(
            f"Cannot test heads on {draws} draws",
            f"with fewer than {FEWEST_DRAWS} no p-value is below 0.05",
            "Give more, or draws=0 for no test.",
        )
    selection = select_attentions(model, layers, heads)
    inputs = model.encode(text)
    if len(inputs) > 1:
        raise TextError(
            f"Cannot show the attention of {len(inputs)} texts",
            "every text has tokens of its own",
            "Give one text at a time.",
        )
    check_targets(model, inputs, selection.sites, logits=False)
    (tokens,) = inputs.of(selection.stack).lengths
    positions = select_positions(queries, tokens)
    data, weights = read_weights(model, inputs, selection, positions)
    notes = list(selection.notes)
    # A token reads only itself and tokens before it.
    causal = not selection.is_cross
    causal &= model.anatomy.stack_named(selection.stack).causal
    tests = texts = None
    if draws and selection.is_cross:
        notes.append(
            "Heads of cross-attention were not tested: the tokens that they read are of"
            " another text."
        )
    elif draws:
        texts = draw_texts(model, selection.stack, draws, seed, causal=causal)
        if texts is None:
            notes.append(
                "Heads were not tested: the window or the vocabulary of this model is"
                " too small for texts of random tokens."
            )
    if texts is not None:
        if not causal:
            notes.append(
                "Induction was not tested: it is about what followed an earlier token,"
                " and this model reads the whole text."
            )
        tests = measure_relations(model, texts, selection, seed)
        # The score of every head, and what chance gives.
        data.coords["relation"] = list(tests.relations)
        for name in ("score", "null", "p", "p_half"):
            dims = ("relation", "layer", "head")
            data[name] = dims, getattr(tests, name), ATTRIBUTES[name]
    if any(part.projection.norm for part in selection.attentions):
        notes.append(
            "A norm comes after attention and multiplies all that a token gets by one"
            " number. Value-weighted attention leaves this number out, so compare it"
            " within a row."
        )
    fused = {part.layout.is_fused for part in selection.attentions}
    kernels = {(True,): "sdpa", (False,): "eager", (False, True): "sdpa and eager"}
    smallest_sum = weights.smallest_sum
    report = AttentionReport(
        layers=len(selection.sites),
        heads=sum(len(part.heads) for part in selection.attentions),
        tokens=tokens,
        causal=causal,
        kernel=kernels[tuple(sorted(fused))],
        rows_sum_to=1.0 if smallest_sum > 1 - ROUNDING else smallest_sum,
        error=weights.error,
        draws=0 if tests is None else draws,
        notes=notes,
        **({} if tests is None else found_heads(selection, tests)),
    )
    source = model.source(selection.stack, checked=True)
    return Result("attention", data, report, source)


def read_weights(
    model: Model, inputs: Inputs, selection: Selection, positions: list[int]
) -> tuple["xarray.Dataset", WeightsReport]:
    """Run one text and return the weights at some positions.

    They are NaN where a layer has no such head.
    """
    # A tokenizer serves one thread at a time.
    with model.lock:
        strings = model.text_encoder.strings
        of_queries = strings(inputs.of(selection.stack).ids[0])
        of_keys = strings(inputs.of(selection.key_stack).ids[0])
    sites, columns = selection.sites, selection.columns
    keys = len(of_keys)
    shape = (len(sites), len(selection.heads), len(positions), keys)
    # The weights and the value-weighted ones, in float32.
    size = 2 * 4 * math.prod(shape)
    free = free_memory()
    if size > SHARE_OF_FREE_MEMORY * free:
        raise TooLarge(
            f"The weights of {shape[0]} layers, {shape[1]} heads and {shape[2]:,} by"
            f" {keys:,} tokens do not fit in memory",
            f"they take {size / 2**30:,.1f} GiB, and {free / 2**30:,.1f} GiB are free",
            "Choose some tokens that read, such as queries=-1, or some layers, such as"
            " layers=1.",
        )
    # Blocks may differ in their number of heads, and then some cells stay empty.
    pattern = np.full(shape, np.nan, dtype=np.float32)
    write_norm = np.full((*shape[:2], keys), np.nan, dtype=np.float32)

    def receive(rows: WeightRows) -> None:
        # Rows come in the order in which they are asked for.
        start = positions.index(rows.positions[0])
        end = start + len(rows.positions)
        of_sites = rows.values[:, 0].float().cpu().numpy()
        for site, values in zip(rows.sites, of_sites, strict=True):
            pattern[sites.index(site)][columns[site], start:end] = values

    report = run_weights(
        model,
        inputs,
        selection.attentions,
        receive,
        positions=positions,
        writes=True,
    )
    for site, norms in report.write_norms.items():
        values = norms.float().cpu().numpy()
        write_norm[sites.index(site), columns[site]] = values
    numbers = {
        "pattern": pattern,
        "weighted": pattern * write_norm[:, :, None, :],
        "write_norm": write_norm,
    }
    if not selection.is_cross:
        numbers |= weights_on_places(pattern, positions)
    variables: Variables = {}
    for name, values in numbers.items():
        dims = (
            ("layer", "head", "key") if name == "write_norm" else CELLS[: values.ndim]
        )
        variables[name] = dims, values, ATTRIBUTES[name]
    coords: Coordinates = {
        "layer": np.array([site.layer for site in sites]),
        "head": np.array(selection.heads),
        "site": ("layer", text_array(site_names(sites))),
        "query_string": ("query", text_array(of_queries)[positions]),
        "query_position": ("query", np.array(positions)),
        "key_string": ("key", text_array(of_keys)),
        "key_position": ("key", np.arange(keys)),
    }
    return to_dataset(variables, coords), report


def found_heads(selection: Selection, tests: RelationTests) -> dict[str, Any]:
    """Return the heads above chance for each relation, the strongest first."""
    by_relation = {}
    for number, relation in enumerate(tests.relations):
        heads = []
        for layer, column in np.argwhere(tests.p[number] < LEVEL):
            place = number, layer, column
            heads.append(
                Head(
                    site=f"{selection.sites[layer]}.head.{selection.heads[column]}",
                    score=float(tests.score[place]),
                    null=float(tests.null[place]),
                    p=float(tests.p[place]),
                    p_half=float(tests.p_half[place]),
                )
            )
        # The p-values of strong heads are all the smallest that there is.
        heads.sort(key=lambda head: -head.score)
        by_relation[f"{relation}_heads"] = heads
    return by_relation
