"""Which tokens does each head read?"""

from typing import Any

from hiddenscope.analyses.attention.facts import AttentionFacts
from hiddenscope.analyses.attention.findings import attention_dataset, found_heads
from hiddenscope.analyses.attention.random_tokens import check_draws, draw_texts
from hiddenscope.analyses.attention.relations import (
    RelationTests,
    measure_relations,
    significance,
)
from hiddenscope.analyses.attention.selection import (
    Layers,
    NumberChoice,
    Selection,
    select_attentions,
    select_positions,
)
from hiddenscope.analyses.attention.weights import read_weights
from hiddenscope.arguments import checked
from hiddenscope.errors import TextError
from hiddenscope.model import Model, ModelLike, as_model
from hiddenscope.passes import Inputs, Texts
from hiddenscope.passes.record import check_targets
from hiddenscope.results import Result

# A sum of weights differs from 1 by no more than this through rounding, in bfloat16.
ROUNDING = 0.02


@checked
def attention(
    model: ModelLike,
    text: Texts | Inputs,
    layers: Layers | None = None,
    heads: NumberChoice | None = None,
    queries: NumberChoice | None = None,
    *,
    draws: int = 16,
    seed: int = 0,
) -> Result:
    """Compute the attention weights of one text, and test what each head reads.

    The pass keeps the model's own kernel. Weights are computed from its queries, keys,
    mask and scale, for the `layers`, `heads` and `queries` (positions of the tokens
    that read) that are asked for; by default all of the last stack's self-attention.
    `layers` are numbers or sites such as "decoder.layer.2-4.cross". `weighted` is each
    weight times the norm of what the token writes through the head.

    Every head is tested on `draws` texts of random tokens, for how much it reads the
    previous, the first and the same token, and the token that came after an earlier
    occurrence of the same token (induction). The tests are corrected for all heads.
    `draws=0` makes none. A decoder's text comes with `model.encode(text, targets=...)`.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("gpt2"), None))
    >>> result = hs.attention(model, [[5, 6, 7]], layers=2, draws=0)
    >>> pattern = result.data["pattern"].sel(layer=2, head=1)
    >>> pattern.sum("key").round(4).values.tolist()
    [1.0, 1.0, 1.0]
    """
    model = as_model(model)
    check_draws(draws)
    selection = select_attentions(model, layers, heads)
    inputs = _one_text(model.encode(text))
    check_targets(model, inputs, selection.sites, logits=False)
    query_inputs = inputs.of(selection.stack)
    key_inputs = inputs.of(selection.key_stack)
    positions = select_positions(queries, query_inputs.lengths[0])
    weights = read_weights(
        model, inputs, selection, positions, keys=key_inputs.lengths[0]
    )
    notes = list(selection.notes)
    tests = None
    if draws:
        tests = _tested(model, selection, draws, seed, notes)
    # A tokenizer serves one thread at a time.
    with model.lock:
        query_tokens = model.text_encoder.tokens(query_inputs)
        key_tokens = model.text_encoder.tokens(key_inputs)
    data = attention_dataset(
        selection, weights, positions, query_tokens, key_tokens, tests
    )
    notes += _notes(selection)
    facts: AttentionFacts = {
        "layers": len(selection.sites),
        "heads": sum(len(part.heads) for part in selection.attentions),
        "tokens": query_inputs.lengths[0],
        "causal": _is_causal(model, selection),
        "kernel": _kernel(selection),
        "rows_sum_to": _shown_sum(weights.report.smallest_sum),
        "error": weights.report.error,
        "draws": 0 if tests is None else draws,
        "notes": notes,
    }
    listed_heads: Any = {} if tests is None else found_heads(selection, tests)
    source = model.source(selection.stack, checked=True)
    return Result("attention", data, {**facts, **listed_heads}, source)


def _one_text(inputs: Inputs) -> Inputs:
    if len(inputs) == 1:
        return inputs
    raise TextError(
        f"Cannot show the attention of {len(inputs)} texts",
        "every text has tokens of its own",
        "Give one text at a time.",
    )


def _is_causal(model: Model, selection: Selection) -> bool:
    """Tell whether a token reads only itself and tokens before it."""
    if selection.is_cross:
        return False
    return model.anatomy.stack_named(selection.stack).causal


def _tested(
    model: Model, selection: Selection, draws: int, seed: int, notes: list[str]
) -> RelationTests | None:
    """Test the heads on random tokens; where that is not done, a note says why."""
    if selection.is_cross:
        notes.append(
            "Heads of cross-attention were not tested: the tokens that they read are of"
            " another text."
        )
        return None
    causal = _is_causal(model, selection)
    texts = draw_texts(model, selection.stack, draws, seed, causal=causal)
    if texts is None:
        notes.append(
            "Heads were not tested: the window or the vocabulary of this model is too"
            " small for texts of random tokens."
        )
        return None
    if not causal:
        notes.append(
            "Induction was not tested: it is about what followed an earlier token, and"
            " this model reads the whole text."
        )
    scores = measure_relations(model, texts, selection.attentions, selection.heads)
    return significance(scores, seed)


def _kernel(selection: Selection) -> Any:
    """Return which kernels made the pass."""
    kinds = {part.layout.is_fused for part in selection.attentions}
    names = []
    if True in kinds:
        names.append("sdpa")
    if False in kinds:
        names.append("eager")
    return " and ".join(names)


def _shown_sum(smallest: float) -> float:
    """Return the smallest sum of a row; 1 where it is less through rounding alone."""
    return 1.0 if smallest > 1 - ROUNDING else smallest


def _notes(selection: Selection) -> list[str]:
    """Say what is unusual about these attentions."""
    notes = []
    if any(part.projection.norm for part in selection.attentions):
        notes.append(
            "A norm comes after attention and multiplies all that a token gets by one"
            " number. Value-weighted attention leaves this number out, so compare it"
            " within a row."
        )
    return notes
