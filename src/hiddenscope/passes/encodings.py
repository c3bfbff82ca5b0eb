"""The output of a tokenizer (a BatchEncoding) as lists of ids, and chats as text.

>>> ids_of_encoding({"input_ids": [[5, 6, 0], [7, 8, 9]],
...                  "attention_mask": [[1, 1, 0], [1, 1, 1]]})
[[5, 6], [7, 8, 9]]
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hiddenscope.errors import TextError

Message: TypeAlias = Mapping[str, Any]

USED = {"input_ids", "attention_mask"}
# These change nothing in the states.
IGNORED = {
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
    "num_truncated_tokens",
}


def ids_of_encoding(encoding: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of every encoded text, without padding.

    What would change the states and cannot be passed on (segments, positions, a
    decoder's ids) is refused.
    """
    problem = f"Cannot read the texts from a {type(encoding).__name__}"
    if "input_ids" not in encoding:
        names = ", ".join(map(str, encoding))[:80] or "nothing"
        raise TextError(
            problem,
            f"it has no input_ids, only {names}",
            "Give strings, lists of ids, or what the tokenizer returned.",
        )
    for name in set(encoding) - USED - IGNORED:
        # Segments that are all zero change nothing.
        if name == "token_type_ids" and not any(map(any, _rows(encoding[name]))):
            continue
        remedy = f"Leave {name} out."
        if name.startswith(("decoder", "labels")):
            remedy = "Give `targets=`."
        raise TextError(
            problem, f"{name} would be left out, and the states would be others", remedy
        )
    rows = _rows(encoding["input_ids"])
    masks = [[1] * len(row) for row in rows]
    if "attention_mask" in encoding:
        masks = _rows(encoding["attention_mask"])
    if [len(row) for row in rows] != [len(mask) for mask in masks]:
        raise TextError(
            problem,
            "its attention_mask is not of the shape of its input_ids",
            "Encode the texts again.",
        )
    pairs = zip(rows, masks, strict=True)
    return [_without_padding(row, mask, problem) for row, mask in pairs]


def _rows(values: Any) -> list[list[int]]:
    """Return a tensor, an array or nested lists as rows."""
    rows = []
    for row in _as_list(values):
        # A list of tensors or arrays: each of them is a row.
        if hasattr(row, "tolist"):
            row = _as_list(row)
        rows.append(row)
    if rows and isinstance(rows[0], list):
        return rows
    return [rows]


def _as_list(values: Any) -> list[Any]:
    listed: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return listed


def _without_padding(row: list[int], mask: list[int], problem: str) -> list[int]:
    real = np.flatnonzero(mask)
    if not len(real):
        return []
    first, last = real[0], real[-1]
    if last - first + 1 != len(real):
        raise TextError(
            problem,
            "its attention_mask hides tokens in the middle of a text",
            "Padding may stand before or after a text only.",
        )
    return row[first : last + 1]


def conversations(texts: Any) -> list[list[Message]] | None:
    """Return one chat or several, each a list of messages; None for anything else.

    A message has a role and a content.

    >>> conversations([{"role": "user", "content": "Hello."}])
    [[{'role': 'user', 'content': 'Hello.'}]]
    """
    if _is_chat(texts):
        return [list(texts)]
    if not isinstance(texts, list | tuple) or not texts:
        return None
    if all(_is_chat(chat) for chat in texts):
        return [list(chat) for chat in texts]
    return None


def _is_chat(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    for message in value:
        if not isinstance(message, Mapping):
            return False
        if "role" not in message or "content" not in message:
            return False
    return True


def rendered(
    tokenizer: Any, chats: Sequence[list[Message]], name: str
) -> tuple[str, ...]:
    """Return chats as the tokenizer's own template writes them.

    transformers renders the template in a sandbox. A chat that does not end with an
    answer is opened for one, as transformers' own pipeline does.
    """
    problem = f"Cannot write these chat messages for {name}"
    if not getattr(tokenizer, "chat_template", None):
        reason = "its tokenizer has no chat template"
        if tokenizer is None:
            reason = "it was loaded without a tokenizer"
        raise TextError(
            problem,
            reason,
            "Give the text itself, as the model was trained to read it.",
        )
    texts = []
    for chat in chats:
        opened = chat[-1]["role"] != "assistant"
        try:
            text = tokenizer.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=opened
            )
        except Exception as error:
            # A template refuses messages by an error of jinja's, and may raise
            # anything.
            cause = f"{type(error).__name__}: {error}"
            reason = f"its chat template refuses them ({cause})"[:300]
            raise TextError(
                problem, reason, "Give messages that the template takes."
            ) from error
        texts.append(str(text))
    return tuple(texts)
