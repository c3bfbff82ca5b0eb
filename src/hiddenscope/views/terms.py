"""Terms of the field, each explained in one sentence where a page first uses it.

>>> [term for term, _ in new_terms("The logit of Paris rises.", set())]
['logit']
"""

import re
from collections.abc import Iterator

from hiddenscope.results.pictures import Graph, Grid, Panels, Patterns, View

TERMS = {
    "hidden state": (
        "the vector that a model has for a token: `layer.k` after k blocks, `final`"
        " after the final norm"
    ),
    "residual stream": (
        "the vector of a token that every block reads and adds to; its value after k"
        " blocks is `layer.k`"
    ),
    "site": "the place of a hidden state in the model, such as `layer.3` or `final`",
    "clean prompt": "the prompt whose answer is followed",
    "corrupted prompt": "the same prompt with a change that leads to another answer",
    "logit difference": "the logit of one answer minus that of the other",
    "logit": (
        "the score that the model gives to a token; a softmax turns the logits of all"
        " tokens into probabilities"
    ),
    "unembedding": (
        "the last matrix of the model, which turns a hidden state into logits"
    ),
    "KL": (
        "the Kullback-Leibler divergence of one prediction from another, in nats: 0 if"
        " both give every token the same probability"
    ),
    "entropy": (
        "how undecided a prediction is, in nats: 0 if one token has all of the"
        " probability"
    ),
    "perplexity": (
        "how badly the model predicts a text: 1 if it is sure of every token, larger if"
        " it is surprised"
    ),
    "attention head": (
        "one of the parts of a layer's attention: at each token it reads some tokens,"
        " each with a weight, and adds what it read to the residual stream"
    ),
    "induction": (
        "reading the token that followed an earlier occurrence of the current one"
    ),
    "value-weighted": (
        "multiplied by the norm of what the token that is read writes through the head"
    ),
    "Jacobian": "the matrix of derivatives of one state with respect to another",
    "UMAP": (
        "a method that draws points of many dimensions in two, and tries to keep"
        " neighbours together"
    ),
    "silhouette": (
        "how much nearer points are to their own class than to the next: 1 if the"
        " classes are far apart, 0 if they are mixed, below 0 if points are nearer to"
        " another class"
    ),
    "trustworthiness": (
        "how far neighbours in the picture are neighbours in the full space too: 1 if"
        " all of them are"
    ),
    "p-value": "how often shuffled labels give a score at least as high",
    "kurtosis": (
        "how much a few channels of a state stand out: 3 if its values are normally"
        " distributed"
    ),
    "anisotropy": (
        "the mean cosine between the states of different tokens: 0 if they point"
        " everywhere"
    ),
    "CKA": (
        "centred kernel alignment, how alike two sets of states are: 1 if they are the"
        " same up to a rotation and a scale"
    ),
    "massive activation": (
        "a value at least 1,000 times as large as the median absolute value of its"
        " layer"
    ),
}
_SPELLINGS = {
    "trustworthiness": r"trust(?:worthiness)?",
    "p-value": r"p-values?|p \d",
    "KL": r"KL",
    "CKA": r"CKA",
}


def new_terms(text: str, known: set[str]) -> Iterator[tuple[str, str]]:
    """Yield the terms of a text that are not known yet, in the order of the text, and
    add them to `known`.

    A term in the explanation of another is explained too.
    """
    starts = {}
    for term in TERMS:
        spelling = _SPELLINGS.get(term, rf"{re.escape(term)}s?")
        pattern = rf"\b(?:{spelling})\b"
        match = re.search(pattern if term.isupper() else f"(?i){pattern}", text)
        if match is not None and term not in known:
            starts[term] = match.start()
    known.update(starts)
    for term in sorted(starts, key=starts.__getitem__):
        yield term, TERMS[term]
        yield from new_terms(TERMS[term], known)


def words_on(view: View) -> str:
    """Return all words that a view shows, apart from the user's own texts."""
    words = [view.title, view.note]
    if isinstance(view, Grid):
        for measure in view.measures:
            words += [measure.name, measure.unit]
    elif isinstance(view, Panels):
        words += view.captions
    elif isinstance(view, Patterns):
        words += ["attention weight", *(score.name for score in view.scores)]
    elif isinstance(view, Graph):
        words += [view.value_name, view.unit, view.exact_name]
    else:
        words += [view.y_name, view.unit, *(series.name for series in view.series)]
    return " ".join(words)
