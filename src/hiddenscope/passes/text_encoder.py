"""TextEncoder: turns texts into ids, within the limits of the model.

Texts are strings, ids, chats, or what a tokenizer returned (a BatchEncoding). An answer
is encoded together with the text before it: a tokenizer may merge the two, or split the
answer elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

import numpy as np

from hiddenscope.errors import TextError, without_panic
from hiddenscope.passes.inputs import Inputs, Texts
from hiddenscope.states import Tokens
from hiddenscope.texts import as_list

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message: TypeAlias = Mapping[str, Any]

# What is read of a BatchEncoding, and what changes nothing in the states.
USED = {"input_ids", "attention_mask"}
IGNORED = {
    "special_tokens_mask",
    "offset_mapping",
    "length",
    "overflow_to_sample_mapping",
    "num_truncated_tokens",
}
# Of a token that stands for no character.
NO_SPAN = (-1, -1)
OTHER_TOKENIZER = "Use a tokenizer that you trust, or give lists of token ids."

# Characters of a text of which the beginning is encoded first, and of a long token.
_LONG, _LONG_TOKEN = 2**18, 16


@dataclass
class TextEncoder:
    """A tokenizer with the limits of its model; texts beyond them are refused.

    `window` is the longest text in tokens, `vocabulary` the number of ids, `start` the
    id that opens a decoder's text, `pad` the padding id, `target_window` the decoder's
    own window, if it has one, `shortest` the shortest text.
    """

    tokenizer: PreTrainedTokenizerBase | Any | None
    window: int | None
    vocabulary: int
    name: str = "this model"
    start: int | None = None
    pad: int = 0
    target_window: int | None = None
    shortest: int = 1
    _strings: dict[int, str] = field(default_factory=dict, repr=False)
    # The last texts, whose tokens are often requested again.
    _last: tuple[ref[Inputs], Tokens] | None = field(default=None, repr=False)

    def encode(self, texts: Texts | Inputs, *, truncate: bool | int = False) -> Inputs:
        """Encode texts, which are strings or lists of ids.

        `truncate` keeps the first tokens of longer ones.

        >>> encoder = TextEncoder(None, window=8, vocabulary=100)
        >>> encoder.encode([[5, 6], [7]], truncate=1).lengths
        [1, 1]
        """
        limit = None
        if truncate is True:
            limit = self.window
        elif truncate is not False and truncate < 1:
            raise TextError(
                f"truncate must be at least 1, got {truncate}",
                "a text has at least one token",
                "Give a larger number.",
            )
        elif truncate is not False:
            limit = min(truncate, self.window or truncate)
        if not isinstance(texts, Inputs):
            inputs = self._encoded(texts, limit)
        elif len(texts):
            inputs = texts
        else:
            raise TextError(
                "No texts", "the inputs are empty", "Give at least one text."
            )
        if limit and max(inputs.lengths) > limit:
            ids = tuple(row[:limit] for row in inputs.ids)
            spans = inputs.spans and tuple(row[:limit] for row in inputs.spans)
            inputs = Inputs(ids, inputs.texts, spans, inputs.targets)
        self._check(inputs)
        return inputs

    def encode_whole(self, texts: Sequence[str]) -> Inputs:
        """Encode texts that may be longer than the model takes."""
        inputs = self._tokenized(tuple(texts), None)
        self._check(inputs, whole=True)
        return inputs

    def windows(self, text: str, window: int, stride: int) -> Iterator[Inputs]:
        """Yield windows of a text, each `stride` tokens after the one before.

        Every window has the special tokens that a text has.
        """
        _check_readable(0, text)
        tokenizer: Any = self.tokenizer
        special = tokenizer.num_special_tokens_to_add()
        overlap = window - special - stride
        before: list[int] = []
        after: list[int] = []
        reason = ""
        if overlap < 0:
            reason = (
                f"windows of {window} tokens that begin every {stride} would leave"
                " tokens out"
            )
        elif not getattr(tokenizer, "is_fast", False):
            reason = "its tokenizer is not a fast one, and cannot cut windows"
        else:
            before, after = self.frame()
            if len(before) + len(after) != special:
                reason = "its special tokens do not stand at the ends of a text"
        if reason:
            raise TextError(
                f"Cannot cut a text for {self.name}",
                reason,
                "Give a smaller stride, or shorter texts.",
            )
        with without_panic(TextError, "Cannot encode the text", OTHER_TOKENIZER):
            encoding = tokenizer(
                text,
                add_special_tokens=False,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
            ).encodings[0]
        # The tokenizer's own truncation loses whatever does not fit in the first window
        # in tokenizers 0.23.1 and 0.23.2; that of an encoding does not.
        encoding.truncate(window - special, stride=overlap)
        # The library holds the whole text in some 100 bytes a token. Python's numbers
        # take several times as much, so there is one window of them at a time.
        for piece in (encoding, *encoding.overflowing):
            ids = (*before, *piece.ids, *after)
            spans = (
                *[NO_SPAN] * len(before),
                *map(_span, piece.offsets),
                *[NO_SPAN] * len(after),
            )
            inputs = Inputs((ids,), None, (spans,))
            self._check(inputs)
            yield inputs

    def encode_targets(
        self, texts: Texts | Inputs, count: int, *, truncate: bool | int = False
    ) -> Inputs:
        """Encode the texts of a decoder: its start token, then the text.

        Ids stay as they are.
        """
        encoder = replace(self, window=self.target_window or self.window)
        targets = encoder.encode(texts, truncate=truncate)
        if len(targets) != count:
            raise TextError(
                f"Cannot use {len(targets)} targets with {count} texts",
                "the numbers differ",
                "Give one target for each text.",
            )
        if targets.texts is None or isinstance(texts, Inputs):
            return targets
        start = self.required_start()
        ids = []
        end = getattr(self.tokenizer, "eos_token_id", None)
        for row in targets.ids:
            ends = bool(row) and row[-1] == end
            ids.append((start, *row[: len(row) - ends]))
        spans = None
        if targets.spans:
            pairs = zip(targets.spans, ids, strict=True)
            spans = tuple((NO_SPAN, *row)[: len(text)] for row, text in pairs)
        inputs = Inputs(tuple(ids), targets.texts, spans)
        return encoder.encode(inputs, truncate=truncate)

    def start_tokens(self, count: int) -> Inputs | None:
        """Return targets of the start token alone; None where nothing names it."""
        return None if self.start is None else Inputs(((self.start,),) * count)

    def required_start(self) -> int:
        """Return the id that opens a decoder's text; raise TextError without one."""
        if self.start is None:
            raise TextError(
                f"No targets for the decoder of {self.name}",
                "its configuration names no decoder_start_token_id that is in its"
                " vocabulary",
                "Give `targets=` as lists of ids.",
            )
        return self.start

    def tokens(self, inputs: Inputs) -> Tokens:
        """Return the tokens of encoded texts, one row each, text after text."""
        if self._last is not None and self._last[0]() is inputs:
            return self._last[1]
        lengths = inputs.lengths
        spans: list[tuple[int, int]] = []
        for row in inputs.spans or ():
            spans += row
        tokens = Tokens(
            inputs.texts,
            text=np.repeat(np.arange(len(lengths)), lengths),
            positions=np.concatenate([np.arange(n) for n in lengths]),
            ids=inputs.flat,
            strings=tuple(self.strings(inputs.flat.tolist())),
            spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
            count=len(lengths),
        )
        self._last = ref(inputs), tokens
        return tokens

    def strings(self, tokens: Sequence[int]) -> list[str]:
        """Return many tokens as a reader knows them; see `string`."""
        # A difference with the keys of all known strings would walk through every one
        # of them.
        for token in set(tokens):
            if token not in self._strings:
                self.string(token)
        return list(map(self._strings.__getitem__, tokens))

    def string(self, token: int) -> str:
        """Return a token as a reader knows it: ` Paris`, not `ĠParis`.

        Without a tokenizer it is the id itself.
        """
        if token in self._strings:
            return self._strings[token]
        string, tokenizer = str(token), self.tokenizer
        if tokenizer is not None and token >= 0:
            problem = f"Cannot decode the token {token}"
            with without_panic(TextError, problem, OTHER_TOKENIZER):
                string = str(
                    tokenizer.decode([token], clean_up_tokenization_spaces=False)
                )
            piece = tokenizer.convert_ids_to_tokens(token)
            # Sentencepiece decoders drop the space of a text's first word.
            is_word = isinstance(piece, str) and piece.startswith("▁")
            if is_word and not string.startswith(" "):
                string = f" {string}"
        self._strings[token] = string
        return string

    def frame(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer puts before a text, and those after it.

        >>> TextEncoder(None, window=8, vocabulary=100).frame()
        ([], [])
        """
        if self.tokenizer is None:
            return [], []
        text = "a"
        try:
            bare = self._bare(text)
        except TextError:
            # A tokenizer of few words may not have this one: take one that it has.
            text = self.string(self.ordinary_ids()[0])
            bare = self._bare(text)
        whole = list(self.tokenizer(text).input_ids)
        for start in range(len(whole) - len(bare) + 1):
            end = start + len(bare)
            if whole[start:end] == bare:
                return whole[:start], whole[end:]
        return [], []

    def ordinary_ids(self) -> list[int]:
        """Return the ids that are neither special tokens nor without a token.

        >>> len(TextEncoder(None, window=8, vocabulary=100, pad=0).ordinary_ids())
        99
        """
        special = {self.pad, self.start}
        count = self.vocabulary
        if self.tokenizer is not None:
            special |= set(self.tokenizer.all_special_ids)
            special |= set(getattr(self.tokenizer, "added_tokens_decoder", ()))
            # An embedding may have more rows than there are tokens.
            count = min(count, len(self.tokenizer))
        return [token for token in range(count) if token not in special]

    def single(
        self, token: str | int, name: str = "target", *, before: str = ""
    ) -> int:
        """Return the id of a single token, from a string or an id.

        `before` is the text that it follows.

        >>> TextEncoder(None, window=8, vocabulary=100).single(7)
        7
        """
        shown = repr(token[:40]) if isinstance(token, str) else f"{token!r:.40}"
        problem = f"Cannot use the {name} {shown}"
        if isinstance(token, int) and not isinstance(token, bool):
            if not 0 <= token < self.vocabulary:
                reason = f"the ids of {self.name} are 0 to {self.vocabulary - 1:,}"
                raise TextError(problem, reason, "Give one of these.")
            return token
        if not isinstance(token, str) or self.tokenizer is None:
            reason = f"it is {type(token).__name__}"
            if isinstance(token, str):
                reason = f"{self.name} was loaded without a tokenizer"
            raise TextError(problem, reason, "Give the id of a token.")
        ids = self._following(token, before)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if len(ids) != 1 or ids[0] == unknown:
            reason = "it merges with the text before it"
            if not token:
                reason = "it is empty"
            elif len(ids) == 1:
                reason = f"it is not in the vocabulary of {self.name}"
            elif ids:
                pieces = " ".join(repr(self.string(piece)) for piece in ids[:8])
                reason = f"for {self.name} it is {len(ids)} tokens: {pieces}"
            remedy = (
                "Give a single token, with the space before it where a word begins."
            )
            spaced = f" {token}"
            if token and len(self._following(spaced, before)) == 1:
                remedy += f" Did you mean {spaced!r}?"
            raise TextError(problem, reason, remedy)
        string = self.string(ids[0])
        if string.startswith(" ") and not token.startswith(" "):
            raise TextError(
                problem,
                f"for {self.name} that token begins with a space",
                f"Give {string!r}, or an id.",
            )
        return ids[0]

    def several(
        self,
        tokens: str | int | Sequence[int],
        name: str = "answer",
        *,
        before: str = "",
    ) -> list[int]:
        """Return the ids of one or more tokens, from a string, an id or ids.

        `before` is the text that they follow.

        >>> TextEncoder(None, window=8, vocabulary=100).several([7, 8])
        [7, 8]
        """
        if not isinstance(tokens, str | int):
            ids = [self.single(token, name) for token in tokens]
            if not ids:
                raise TextError(
                    f"Cannot use the {name} []", "it is empty", "Give a token or more."
                )
            return ids
        if isinstance(tokens, int) or self.tokenizer is None:
            return [self.single(tokens, name)]
        ids = self._following(tokens, before)
        unknown = getattr(self.tokenizer, "unk_token_id", None)
        if len(ids) < 2:
            return [self.single(tokens, name, before=before)]
        if unknown in ids:
            raise TextError(
                f"Cannot use the {name} {tokens[:40]!r}",
                f"a part of it is not in the vocabulary of {self.name}",
                "Give ids, or other words.",
            )
        return ids

    def _encoded(self, texts: Any, limit: int | None) -> Inputs:
        if isinstance(texts, str):
            return self._encoded_strings([texts], limit)
        if isinstance(texts, Mapping):
            texts = ids_of_encoding(texts)
        chats = conversations(texts)
        if chats is not None:
            # The template writes the special tokens itself.
            written = rendered(self.tokenizer, chats, self.name)
            return self._tokenized(written, limit, special=False)
        kind = type(texts).__name__
        reason, remedy = "", "Give a string or a list of ids, or a list of either."
        if getattr(texts, "is_meta", False):
            reason, remedy = "a meta tensor has no values", "Give a tensor with values."
        # A tensor or an array of ids, or a column of a frame.
        elif hasattr(texts, "tolist"):
            texts = texts.tolist()
        if isinstance(texts, bytes) or not isinstance(texts, Iterable):
            reason = f"got {type(texts).__name__}"
        elif hasattr(texts, "facts"):
            reason, remedy = f"got a {kind}", "Give the texts themselves."
        elif hasattr(texts, "columns"):
            reason = f"got a {kind}, a table"
            remedy = (
                "Give one column, as in frame['text'].tolist(), or read the file with"
                " hs.read."
            )
        if reason:
            raise TextError("Cannot read the texts", reason, remedy)
        items = [_as_list(text) for text in as_list(texts)]
        if not items:
            raise TextError("No texts", "the list is empty", "Give at least one text.")
        if all(isinstance(item, int) for item in items):
            items = [items]
        if all(isinstance(item, str) for item in items):
            return self._encoded_strings(items, limit)
        # The first text says what the others are taken for.
        strings = isinstance(items[0], str)
        wanted = "a string" if strings else "a list of integers"
        for number, ids in enumerate(items):
            is_ids = isinstance(ids, list) and set(map(type, ids)) <= {int}
            if (strings and not isinstance(ids, str)) or not (strings or is_ids):
                raise TextError(
                    "Cannot read the texts",
                    f"text {number} is {type(ids).__name__}, not {wanted}",
                    "Give strings only, or lists of token ids only.",
                )
        return Inputs(tuple(tuple(ids) for ids in items))

    def _encoded_strings(self, texts: Sequence[str], limit: int | None) -> Inputs:
        most = max(_LONG, _LONG_TOKEN * (self.window or 0))
        for number, text in enumerate(texts):
            # A text that would take a gigabyte to encode is refused by its beginning.
            if limit is None and self.window and len(text) > most:
                (length,) = self._tokenized((text[:most],), None).lengths
                if length > self.window:
                    raise self._too_long(number, f"more than {length:,}")
        return self._tokenized(tuple(map(str, texts)), limit)

    def _following(self, token: str, before: str) -> list[int]:
        """Return the ids that a piece of text adds to the text before it.

        They are none where the tokenizer merges the two.
        """
        context = self._bare(before) if before else []
        whole = self._bare(before + token) if before + token else []
        if whole[: len(context)] != context:
            return []
        ids = whole[len(context) :]
        # Some tokenizers put a space before every text.
        if not before and len(ids) != 1 and token.startswith(" "):
            bare = self._bare(token[1:])
            if len(bare) == 1 and self.string(bare[0]) == token:
                return bare
        return ids

    def _bare(self, text: str) -> list[int]:
        tokenizer: Any = self.tokenizer
        _check_characters(f"The text {ascii(text)[:40]}", text)
        with without_panic(
            TextError, f"Cannot encode the text {ascii(text)[:40]}", OTHER_TOKENIZER
        ):
            encoding = tokenizer(text, add_special_tokens=False, verbose=False)
            return [int(token) for token in encoding["input_ids"]]

    def _tokenized(
        self, texts: tuple[str, ...], limit: int | None, *, special: bool = True
    ) -> Inputs:
        for number, text in enumerate(texts):
            _check_readable(number, text)
        tokenizer: Any = self.tokenizer
        if tokenizer is None:
            reason = f"{self.name} was loaded without a tokenizer"
            remedy = "Give lists of token ids, or load the model with a tokenizer."
            raise TextError(f"Cannot encode the text {texts[0][:40]!r}", reason, remedy)
        fast = bool(getattr(tokenizer, "is_fast", False))
        options: dict[str, bool | int] = {
            "add_special_tokens": special,
            "return_offsets_mapping": fast,
            "return_attention_mask": False,
        }
        if limit:
            options |= {"truncation": True, "max_length": limit}
        with without_panic(TextError, "Cannot encode the texts", OTHER_TOKENIZER):
            encoding = tokenizer(list(texts), verbose=False, **options)
        ids = tuple(tuple(row) for row in encoding["input_ids"])
        spans = None
        if fast:
            spans = tuple(tuple(map(_span, row)) for row in encoding["offset_mapping"])
        return Inputs(ids, texts, spans)

    def _too_long(self, number: int, length: str) -> TextError:
        return TextError(
            f"Text {number}",
            f"it has {length} tokens and {self.name} takes at most {self.window:,}",
            "Split it, or give truncate=True to keep the first tokens only.",
        )

    def _check(self, inputs: Inputs, *, whole: bool = False) -> None:
        for number, length in enumerate(inputs.lengths):
            if not length:
                remedy = "Leave it out, or give it at least one token."
                raise TextError(f"Text {number}", "it has no tokens", remedy)
            if length < self.shortest:
                raise TextError(
                    f"Text {number}",
                    f"it has {length} tokens and {self.name} takes no fewer than"
                    f" {self.shortest}",
                    "Give a longer one.",
                )
            if self.window and length > self.window and not whole:
                raise self._too_long(number, f"{length:,}")
        for number, ids in enumerate(inputs.ids):
            # If one is outside, one of these two is.
            for token in (min(ids), max(ids)):
                if not 0 <= token < self.vocabulary:
                    raise TextError(
                        f"Text {number}",
                        f"id {token} is outside the vocabulary of {self.name}, 0 to"
                        f" {self.vocabulary - 1:,}",
                        "Use the tokenizer that belongs to the model.",
                    )


def _as_list(text: Any) -> Any:
    """Return a tensor, an array or a range of ids as a list; others as they are."""
    if isinstance(text, str):
        return text
    if hasattr(text, "tolist"):
        return text.tolist()
    return as_list(text) if isinstance(text, tuple | range) else text


def _check_readable(number: int, text: str) -> None:
    if not text.strip():
        reason = "it is empty" if not text else "it is only white space"
        raise TextError(
            f"Text {number}", reason, "Leave it out, or give the ids of its tokens."
        )
    _check_characters(f"Text {number}", text)


def _check_characters(problem: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = (
            f"character {error.start} is a lone surrogate ({text[error.start]!a}),"
            " which no tokenizer can read"
        )
        raise TextError(
            problem, reason, "Decode the text again, with errors='replace'."
        ) from None


def _span(pair: tuple[int, int]) -> tuple[int, int]:
    start, end = pair
    return NO_SPAN if start == end else (int(start), int(end))


def text_before(inputs: Inputs, number: int, at: int) -> str | None:
    """Return the text up to the end of a token; None where it is not known."""
    if not inputs.texts:
        return None
    text = inputs.texts[number]
    # A slow tokenizer does not say which characters a token stands for.
    if inputs.spans is None:
        return text if at == len(inputs.ids[number]) - 1 else None
    ends = [end for _, end in inputs.spans[number][: at + 1]]
    return text[: max(0, *ends)]


def token_after(
    encoder: TextEncoder, answer: str | int, texts: Sequence[str | None]
) -> int:
    """Return the id of an answer that follows each of these texts.

    It must be the same after all of them. None is an unknown text.

    >>> token_after(TextEncoder(None, window=8, vocabulary=100), 7, [None])
    7
    """
    known = dict.fromkeys(text for text in texts if text is not None)
    ids: dict[str, int] = {}
    for text in known or [""]:
        ids[text] = encoder.single(answer, "answer", before=text)
    if len(set(ids.values())) > 1:
        each = [f"it is token {id_} after {text[-40:]!r}" for text, id_ in ids.items()]
        raise TextError(
            f"Cannot use the answer {str(answer)[:40]!r}",
            " and ".join(each),
            "Give the id of the token that you mean.",
        )
    return next(iter(ids.values()))


def notes_on_spaces(tokenizer: Any, answers: Sequence[object]) -> Iterator[str]:
    """Yield notes on answers that are also tokens with a leading space.

    Within a sentence, the token with the space is likelier to come next.
    """
    for answer in answers:
        if tokenizer is None or not isinstance(answer, str) or not answer[:1].isalpha():
            continue
        both = [answer, f" {answer}"]
        ids, spaced = tokenizer(both, add_special_tokens=False, verbose=False).input_ids
        if len(spaced) == 1 and spaced != ids:
            yield f"{answer!r} has no leading space; {both[1]!r} is another token."


def ids_of_encoding(encoding: Mapping[str, Any]) -> list[list[int]]:
    """Return the ids of every encoded text, without padding.

    What would change the states and cannot be passed on (segments, positions, a
    decoder's ids) is refused.

    >>> ids_of_encoding({"input_ids": [[5, 6, 0], [7, 8, 9]],
    ...                  "attention_mask": [[1, 1, 0], [1, 1, 1]]})
    [[5, 6], [7, 8, 9]]
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
    texts = []
    for row, mask in zip(rows, masks, strict=True):
        real = np.flatnonzero(mask)
        if len(real) and real[-1] - real[0] + 1 != len(real):
            raise TextError(
                problem,
                "its attention_mask hides tokens in the middle of a text",
                "Padding may stand before or after a text only.",
            )
        texts.append(row[real[0] : real[-1] + 1] if len(real) else [])
    return texts


def _rows(values: Any) -> list[list[int]]:
    """Return a tensor, an array, nested lists or a list of tensors as rows."""
    rows = [_as_list(row) for row in values]
    return rows if rows and isinstance(rows[0], list) else [rows]


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
    wanted = {"role", "content"}
    return all(isinstance(part, Mapping) and wanted <= part.keys() for part in value)


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
