"""Which parts write the answer?

Split the logit of an answer into what each head, MLP and bias adds to it.
"""

from hiddenscope.analyses.contributions.findings import (
    contributions_dataset,
    contributions_facts,
)
from hiddenscope.analyses.contributions.parts import check_stack, split_logits
from hiddenscope.analyses.contributions.question import AnswerTokens, encode_question
from hiddenscope.arguments import checked, integer
from hiddenscope.errors import PassError
from hiddenscope.model import ModelLike, as_model
from hiddenscope.passes import Inputs, Texts, load_with_head
from hiddenscope.passes.unembed import Unembedding
from hiddenscope.results import Result
from hiddenscope.sites import Site


@checked
def contributions(
    model: ModelLike,
    text: Texts | Inputs,
    answer: AnswerTokens,
    other: AnswerTokens | None = None,
    *,
    neurons: int = 20,
    targets: Texts | None = None,
) -> Result:
    """Split the logit of an answer into what each part of the model adds to it.

    The parts are the embeddings, every head, every MLP and the biases. The scale of the
    final norm is frozen at its value in this text, so that the parts sum to the logit;
    the sum is checked. With `other`, they sum to the difference of the two logits. An
    answer of several tokens is taken token by token, each after those before it; two
    answers are compared at the first token that differs. The strongest `neurons` are
    listed too. `targets` is the decoder's text before the answer, in an
    encoder-decoder.

    >>> import hiddenscope as hs
    >>> from hiddenscope.testing import tiny_model
    >>> model = hs.load((tiny_model("llama"), None))
    >>> result = hs.contributions(model, [5, 6, 7], answer=11, other=12)
    >>> dict(result.data["attn_head"].sizes)
    {'step': 1, 'layer': 3, 'head': 4}
    >>> abs(float(result.data["error"].item())) < 1e-4
    True
    """
    model = as_model(model)
    neurons = integer(neurons, "neurons", 0)
    if not model.anatomy.makes_logits:
        raise PassError(
            f"Cannot split the logits of {model.name} into parts",
            "it has no head, and makes no logits",
            load_with_head(model),
        )
    stack = check_stack(model)
    question = encode_question(model, text, answer, other, targets)
    last = Site(stack.depth, "", stack.name if model.encoder_decoder else None)
    unembedding = Unembedding(model, last)
    if unembedding.recipe.method == "whole":
        raise PassError(
            f"Cannot split the logits of {model.name} into parts",
            unembedding.recipe.reason,
            "Use hs.lens or hs.patch.",
        )
    parts = split_logits(model, question, unembedding, neurons=neurons)
    with model.lock:
        data = contributions_dataset(model, question, parts)
        facts = contributions_facts(model, question, unembedding.recipe, parts)
    return Result("contributions", data, dict(facts), model.source(last.stack))
