"""What a zoo model must say before it enters the cache.

A conversion can go wrong and still give a model that runs: a permuted weight, a missing first token. So each converted
model is tried on text, and one that fails is not kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hiddenscope.errors import Damaged

if TYPE_CHECKING:
    import torch

FLUENT = (
    "The sun was setting over the hills, and the children walked slowly home along the river.",
    "Water boils at a lower temperature on high mountains because the air pressure there is lower.",
)
_SURPRISE = 5.0


def knows_capitals(module: Any, tokenizer: Any) -> None:
    """The model continues two sentences with the right capital."""
    for country, capital in (("France", " Paris"), ("Germany", " Berlin")):
        found = continuation(module, tokenizer, f"The capital of {country} is", 1)
        if found != capital:
            raise _failed(f"it says that the capital of {country} is {found!r}")


def writes_english(module: Any, tokenizer: Any) -> None:
    """Plain English does not surprise the model, the same words in another order do, and it does not stutter."""
    for text in FLUENT:
        straight = surprise(module, tokenizer, text)
        jumbled = surprise(module, tokenizer, " ".join(sorted(text.split())))
        if not straight < min(_SURPRISE, jumbled - 1):
            raise _failed(f"English costs it {straight:.1f} nats a token, and jumbled words {jumbled:.1f}")
    words = continuation(module, tokenizer, "Once upon a time, there was", 16).split()
    if len(set(words)) < 8:
        raise _failed(f"it writes {' '.join(words)!r}")


def knows_cats(module: Any, tokenizer: Any) -> None:
    """A sentence on a cat lies nearer to one on a kitten than to one on the stock market."""
    import torch

    cat, kitten, market = (
        mean_state(module, tokenizer, text)
        for text in ("A cat sits on the mat.", "A kitten rests on a rug.", "The stock market fell.")
    )
    near, far = torch.cosine_similarity(cat, kitten, dim=0), torch.cosine_similarity(cat, market, dim=0)
    if not near > far:
        raise _failed(f"it puts cat and kitten at {near:.2f}, cat and stock market at {far:.2f}")


def continuation(module: Any, tokenizer: Any, prompt: str, count: int) -> str:
    """The likeliest next tokens, one after another, as text."""
    import torch

    ids, past, written = torch.tensor([tokenizer(prompt)["input_ids"]]), None, []
    with torch.inference_mode():
        for _ in range(count):
            found = module(input_ids=ids, past_key_values=past, use_cache=True)
            ids, past = found.logits[:, -1:].argmax(-1), found.past_key_values
            written.append(int(ids))
    return str(tokenizer.decode(written))


def surprise(module: Any, tokenizer: Any, text: str) -> float:
    """The mean cost of the text's tokens after the first, in nats."""
    import torch

    ids = torch.tensor([tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        logits = module(input_ids=ids).logits.float()
    return float(torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]))


def mean_state(module: Any, tokenizer: Any, text: str) -> torch.Tensor:
    """The mean of the last hidden state over the tokens."""
    import torch

    with torch.inference_mode():
        state: torch.Tensor = module(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).last_hidden_state
    return state[0].mean(0)


def _failed(found: str) -> Damaged:
    return Damaged(
        "The converted model failed its trial",
        found,
        "Nothing was kept. Another version of transformers may convert it.",
    )
