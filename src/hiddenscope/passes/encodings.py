"""What a tokenizer returned (a BatchEncoding) as lists of ids, and chat messages as
text.

>>> ids_of_encoding({"input_ids": [[5, 6, 0], [7, 8, 9]], "attention_mask": [[1, 1, 0], [1, 1, 1]]})
[[5, 6], [7, 8, 9]]
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hiddenscope.errors import TextError

USED = {"input_ids", "attention_mask"}
SAYS_NOTHING = {
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
    "num_truncated_tokens",
}


def ids_of_encoding(encoding: Mapping[str, Any]) -> list[list[int]]:
    """The ids of every text that a tokenizer encoded, without the padding that its
    attention mask leaves out.

    What would change the states and cannot be passed on (segments, positions, a
    decoder's ids) is refused.
    """
    problem = f"Cannot read the texts from a {type(encoding).__name__}"
    if "input_ids" not in encoding:
        reason = (
            "it has no input_ids, only"
            f" {', '.join(map(str, encoding))[:80] or 'nothing'}"
        )
        raise TextError(
            problem,
            reason,
            "Give strings, lists of ids, or what the tokenizer returned.",
        )
    for name in set(encoding) - USED - SAYS_NOTHING:
        if name != "token_type_ids" or any(map(any, _rows(encoding[name]))):
            reason = f"{name} would be left out, and the states would be others"
            remedy = (
                "Give `targets=`."
                if name.startswith(("decoder", "labels"))
                else f"Leave {name} out."
            )
            raise TextError(problem, reason, remedy)
    rows = _rows(encoding["input_ids"])
    masks = (
        _rows(encoding["attention_mask"])
        if "attention_mask" in encoding
        else [[1] * len(row) for row in rows]
    )
    if [*map(len, rows)] != [*map(len, masks)]:
        raise TextError(
            problem,
            "its attention_mask is not of the shape of its input_ids",
            "Encode the texts again.",
        )
    return [_kept(row, mask, problem) for row, mask in zip(rows, masks, strict=True)]


def _rows(values: Any) -> list[list[int]]:
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    nested = [one.tolist() if hasattr(one, "tolist") else one for one in listed]
    return nested if nested and isinstance(nested[0], list) else [nested]


def _kept(row: list[int], mask: list[int], problem: str) -> list[int]:
    seen = np.flatnonzero(mask)
    if len(seen) and seen[-1] - seen[0] + 1 != len(seen):
        reason = "its attention_mask hides tokens in the middle of a text"
        raise TextError(
            problem, reason, "Padding may stand before or after a text only."
        )
    return row[seen[0] : seen[-1] + 1] if len(seen) else []


def conversations(given: Any) -> list[list[Any]] | None:
    """One chat or several, each a list of messages with a role and a content; None
    where it is something else.

    >>> conversations([{"role": "user", "content": "Hello."}])
    [[{'role': 'user', 'content': 'Hello.'}]]
    """
    if not isinstance(given, list | tuple) or not given:
        return None
    if all(map(_is_message, given)):
        return [list(given)]
    nested = all(
        isinstance(chat, list | tuple) and chat and all(map(_is_message, chat))
        for chat in given
    )
    return [list(chat) for chat in given] if nested else None


def _is_message(given: Any) -> bool:
    return isinstance(given, Mapping) and "role" in given and "content" in given


def rendered(tokenizer: Any, chats: list[list[Any]], name: str) -> tuple[str, ...]:
    """Chats as the tokenizer's own template writes them, which transformers renders in
    a sandbox.

    A chat that does not end with an answer is opened for one, as transformers' own
    pipeline does.
    """
    problem = f"Cannot write these chat messages for {name}"
    if not getattr(tokenizer, "chat_template", None):
        reason = (
            "it was loaded without a tokenizer"
            if tokenizer is None
            else "its tokenizer has no chat template"
        )
        raise TextError(
            problem,
            reason,
            "Give the text itself, as the model was trained to read it.",
        )
    texts = []
    for chat in chats:
        opened = chat[-1]["role"] != "assistant"
        try:
            texts.append(
                str(
                    tokenizer.apply_chat_template(
                        chat, tokenize=False, add_generation_prompt=opened
                    )
                )
            )
        except (
            Exception
            # A template may raise anything, and says so by an error of jinja's.
        ) as error:
            reason = (
                f"its chat template refuses them ({type(error).__name__}: {error})"[
                    :300
                ]
            )
            raise TextError(
                problem, reason, "Give messages that the template takes."
            ) from error
    return tuple(texts)
