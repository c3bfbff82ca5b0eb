"""TextEncoder: texts made into ids by a model's tokenizer, within the limits of the
model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np

from hiddenscope.errors import TextError, without_panic
from hiddenscope.passes.encodings import conversations, ids_of_encoding, rendered
from hiddenscope.passes.inputs import Inputs, Texts
from hiddenscope.states import Tokens
from hiddenscope.texts import listed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OTHER_TOKENIZER = "Use a tokenizer that you trust, or give lists of token ids."


@dataclass
class TextEncoder:
    """A tokenizer and the limits of its model: it makes Inputs of texts, and refuses
    what the model cannot take.

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
    _tokens: dict[int, tuple[ref[Inputs], Tokens]] = field(
        default_factory=dict, repr=False
    )

    def encode(self, texts: Texts | Inputs, *, truncate: bool | int = False) -> Inputs:
        """The ids of one text or many, given as strings or as lists of ids; of longer
        ones perhaps the first alone.

        >>> TextEncoder(None, window=8, vocabulary=100).encode([[5, 6], [7]], truncate=1).lengths
        [1, 1]
        """
        limit = self._limit(truncate)
        if isinstance(texts, Inputs) and not len(texts):
            raise TextError(
                "No texts", "the inputs are empty", "Give at least one text."
            )
        inputs = texts if isinstance(texts, Inputs) else self._encoded(texts, limit)
        if limit and max(inputs.lengths) > limit:
            inputs = _first(inputs, limit)
        self._check(inputs)
        return inputs

    def encode_whole(self, texts: Sequence[str]) -> Inputs:
        """The ids of texts that may be longer than the model takes."""
        inputs = self._tokenized(tuple(texts), None)
        self._check(inputs, whole=True)
        return inputs

    def windows(self, text: str, window: int, stride: int) -> Iterator[Inputs]:
        """A text in windows of so many tokens, each of which begins `stride` tokens
        after the one before.

        Every window is framed by the special tokens that a text has. The tokenizer
        holds the whole text (its library takes some 100 bytes a token); as Python's
        numbers, which take several times as much, there is one at a time.
        """
        _check_readable(0, text)
        tokenizer: Any = self.tokenizer
        overlap = window - tokenizer.num_special_tokens_to_add() - stride
        if overlap < 0 or not getattr(tokenizer, "is_fast", False):
            reason = (
                f"windows of {window} tokens that begin every {stride} would leave"
                " tokens out"
            )
            reason = (
                reason
                if overlap < 0
                else "its tokenizer is not a fast one, and cannot cut windows"
            )
            raise TextError(
                f"Cannot cut a text for {self.name}",
                reason,
                "Give a smaller stride, or shorter texts.",
            )
        cut = {
            "truncation": True,
            "max_length": window,
            "stride": overlap,
            "return_overflowing_tokens": True,
        }
        with without_panic(TextError, "Cannot encode the text", OTHER_TOKENIZER):
            encoding = tokenizer(
                text,
                return_attention_mask=False,
                return_token_type_ids=False,
                verbose=False,
                **cut,
            )
        encodings = encoding.encodings
        del encoding
        for one in encodings:
            inputs = Inputs((tuple(one.ids),), None, (tuple(map(_span, one.offsets)),))
            self._check(inputs)
            yield inputs

    def _limit(self, truncate: bool | int) -> int | None:
        """How many tokens of a text are kept; None for all."""
        if isinstance(truncate, bool):
            return self.window if truncate else None
        if truncate < 1:
            raise TextError(
                f"truncate must be at least 1, got {truncate}",
                "a text has at least one token",
                "Give a larger number.",
            )
        return min(truncate, self.window or truncate)

    def encode_targets(
        self, texts: Texts | Inputs, count: int, *, truncate: bool | int = False
    ) -> Inputs:
        """What the decoder of an encoder-decoder is given: its start token, then the
        text; ids as they are.
        """
        own = replace(self, window=self.target_window or self.window)
        targets = own.encode(texts, truncate=truncate)
        if len(targets) != count:
            problem = f"Cannot use {len(targets)} targets with {count} texts"
            raise TextError(
                problem, "the numbers differ", "Give one target for each text."
            )
        if targets.texts is None or isinstance(texts, Inputs):
            return targets
        start = self.required_start()
        ids = tuple((start, *_without_end(self.tokenizer, row)) for row in targets.ids)
        spans = (
            tuple(((-1, -1), *row) for row in targets.spans) if targets.spans else None
        )
        spans = spans and tuple(
            row[: len(own_ids)] for row, own_ids in zip(spans, ids, strict=True)
        )
        return own.encode(Inputs(ids, targets.texts, spans), truncate=truncate)

    def start_tokens(self, count: int) -> Inputs | None:
        """Targets that are the decoder's start token alone; None where the
        configuration names none.
        """
        return None if self.start is None else Inputs(((self.start,),) * count)

    def required_start(self) -> int:
        """The id that opens a decoder's text, or a TextError where the configuration
        names none.
        """
        if self.start is None:
            reason = (
                "its configuration names no decoder_start_token_id that is in its"
                " vocabulary"
            )
            raise TextError(
                f"No targets for the decoder of {self.name}",
                reason,
                "Give `targets=` as lists of ids.",
            )
        return self.start

    def tokens(self, inputs: Inputs) -> Tokens:
        """The tokens of encoded texts, one row each, text after text."""
        kept = self._tokens.get(id(inputs))
        if kept is not None and kept[0]() is inputs:
            return kept[1]
        lengths, flat = inputs.lengths, inputs.flat.tolist()
        strings = tuple(self.strings(flat))
        spans = [span for row in inputs.spans for span in row] if inputs.spans else []
        tokens = Tokens(
            inputs.texts,
            text=np.repeat(np.arange(len(lengths)), lengths),
            positions=np.concatenate([np.arange(n) for n in lengths]),
            ids=inputs.flat,
            strings=strings,
            spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
            count=len(lengths),
        )
        # Of the last texts, which are often asked about again.
        self._tokens = {id(inputs): (ref(inputs), tokens)}
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
        """A token as a reader knows it: ` Paris`, not `ĠParis`; the id itself where the
        tokenizer has no string.
        """
        if token not in self._strings:
            known = self.tokenizer is not None and token >= 0
            self._strings[token] = (
                _string(self.tokenizer, token) if known else str(token)
            )
        return self._strings[token]

    def single(
        self, token: str | int, name: str = "target", *, before: str = ""
    ) -> int:
        """The id of what must be a single token, given as a string or as an id;
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
            reason = f"{self.name} was loaded without a tokenizer"
            reason = (
                reason if isinstance(token, str) else f"it is {type(token).__name__}"
            )
            raise TextError(problem, reason, "Give the id of a token.")
        ids = self._following(token, before)
        if len(ids) == 1 and ids[0] != getattr(self.tokenizer, "unk_token_id", None):
            if not token.startswith(" ") and (known := self.string(ids[0])).startswith(
                " "
            ):
                raise TextError(
                    problem,
                    f"for {self.name} that token begins with a space",
                    f"Give {known!r}, or an id.",
                )
            return ids[0]
        pieces = " ".join(repr(self.string(piece)) for piece in ids[:8])
        reason = f"for {self.name} it is {len(ids)} tokens: {pieces}"
        if len(ids) == 1:
            reason = f"it is not in the vocabulary of {self.name}"
        elif not ids:
            reason = "it merges with the text before it" if before else "it is empty"
        spaced = (
            ""
            if token[:1].isspace() or not token
            else f" Did you mean {' ' + token!r}?"
        )
        raise TextError(
            problem,
            reason,
            "Give a single token, with the space before it where a word"
            f" begins.{spaced}",
        )

    def _encoded(self, texts: Any, limit: int | None) -> Inputs:
        if isinstance(texts, str):
            texts = [texts]
        if isinstance(texts, Mapping):
            texts = ids_of_encoding(texts)
        if (chats := conversations(texts)) is not None:
            return self._tokenized(
                rendered(self.tokenizer, chats, self.name), limit, special=False
            )
        if getattr(texts, "is_meta", False):
            raise TextError(
                "Cannot read the texts",
                "a meta tensor has no values",
                "Give a tensor with values.",
            )
        # A tensor or an array of ids, or a column of a frame.
        if hasattr(texts, "tolist"):
            texts = texts.tolist()
        if isinstance(texts, bytes) or not isinstance(texts, Iterable):
            remedy = "Give a string or a list of ids, or a list of either."
            raise TextError(
                "Cannot read the texts", f"got {type(texts).__name__}", remedy
            )
        if hasattr(texts, "facts"):
            raise TextError(
                "Cannot read the texts",
                f"got a {type(texts).__name__}",
                "Give the texts themselves.",
            )
        if hasattr(texts, "columns"):
            remedy = (
                "Give one column, as in frame['text'].tolist(), or read the file with"
                " hs.read."
            )
            raise TextError(
                "Cannot read the texts",
                f"got a {type(texts).__name__}, a table",
                remedy,
            )
        given = [
            text if isinstance(text, str) else _as_list(text) for text in listed(texts)
        ]
        if given and all(isinstance(text, int) for text in given):
            given = [given]
        if not given:
            raise TextError("No texts", "the list is empty", "Give at least one text.")
        if all(isinstance(text, str) for text in given):
            return self._tokenized(tuple(map(str, given)), limit)
        return Inputs(tuple(tuple(ids) for ids in _only_ids(given)))

    def _following(self, token: str, before: str) -> list[int]:
        """The ids that a piece of text adds to the text before it; none where the
        tokenizer merges the two.
        """
        context, whole = (
            [] if not text else self._bare(text) for text in (before, before + token)
        )
        if whole[: len(context)] != context:
            return []
        ids = whole[len(context) :]
        # Some tokenizers put a space before every text.
        if not before and len(ids) != 1 and token.startswith(" "):
            bare = self._bare(token[1:])
            ids = bare if len(bare) == 1 and self.string(bare[0]) == token else ids
        return ids

    def _bare(self, text: str) -> list[int]:
        tokenizer: Any = self.tokenizer
        _check_characters(f"The text {ascii(text)[:40]}", text)
        with without_panic(
            TextError, f"Cannot encode the text {ascii(text)[:40]}", OTHER_TOKENIZER
        ):
            return [
                int(i)
                for i in tokenizer(text, add_special_tokens=False, verbose=False)[
                    "input_ids"
                ]
            ]

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
        cut = {"truncation": True, "max_length": limit} if limit else {}
        options = {
            "add_special_tokens": special,
            "return_offsets_mapping": fast,
            "return_attention_mask": False,
        }
        with without_panic(TextError, "Cannot encode the texts", OTHER_TOKENIZER):
            encoding = tokenizer(list(texts), verbose=False, **options, **cut)
        spans = (
            tuple(tuple(map(_span, row)) for row in encoding["offset_mapping"])
            if fast
            else None
        )
        return Inputs(tuple(tuple(ids) for ids in encoding["input_ids"]), texts, spans)

    def _check(self, inputs: Inputs, *, whole: bool = False) -> None:
        for number, length in enumerate(inputs.lengths):
            if not length:
                raise TextError(
                    f"Text {number}",
                    "it has no tokens",
                    "Leave it out, or give it at least one token.",
                )
            if length < self.shortest:
                reason = (
                    f"it has {length} tokens and {self.name} takes no fewer than"
                    f" {self.shortest}"
                )
                raise TextError(f"Text {number}", reason, "Give a longer one.")
            if self.window and length > self.window and not whole:
                reason = (
                    f"it has {length:,} tokens and {self.name} takes at most"
                    f" {self.window:,}"
                )
                remedy = (
                    "Split it, or give truncate=True to keep the first tokens only."
                )
                raise TextError(f"Text {number}", reason, remedy)
        try:
            outside = (inputs.flat < 0) | (inputs.flat >= self.vocabulary)
            wrong = bool(outside.any())
        except OverflowError:  # an id that no 64 bits hold
            wrong = True
        if wrong:
            number, ids = next(
                (k, ids) for k, ids in enumerate(inputs.ids) if self._outside(ids)
            )
            reason = (
                f"id {self._outside(ids)[0]} is outside the vocabulary of {self.name},"
                f" 0 to {self.vocabulary - 1:,}"
            )
            raise TextError(
                f"Text {number}", reason, "Use the tokenizer that belongs to the model."
            )

    def _outside(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if not 0 <= token < self.vocabulary]


def _as_list(ids: Any) -> Any:
    """A tensor, an array or a range of ids as a list; anything else as it is."""
    if hasattr(ids, "tolist"):
        return ids.tolist()
    return listed(ids) if isinstance(ids, tuple | range) else ids


def _only_ids(given: list[Any]) -> list[list[int]]:
    for number, ids in enumerate(given):
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            reason = f"text {number} is {type(ids).__name__}, not a list of integers"
            raise TextError(
                "Cannot read the texts as ids",
                reason,
                "Give strings only, or lists of token ids only.",
            )
    return given


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


def _first(inputs: Inputs, window: int) -> Inputs:
    spans = inputs.spans and tuple(row[:window] for row in inputs.spans)
    return Inputs(
        tuple(ids[:window] for ids in inputs.ids), inputs.texts, spans, inputs.targets
    )


def _span(pair: tuple[int, int]) -> tuple[int, int]:
    """A token that stands for no character has no span."""
    return (-1, -1) if pair[0] == pair[1] else (int(pair[0]), int(pair[1]))


def _without_end(tokenizer: Any, ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _string(tokenizer: Any, token: int) -> str:
    """One token decoded. Sentencepiece decoders drop the space of a text's first word,
    so it is given back.
    """
    with without_panic(TextError, f"Cannot decode the token {token}", OTHER_TOKENIZER):
        text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    piece = tokenizer.convert_ids_to_tokens(token)
    return (
        " " + text
        if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ")
        else text
    )
