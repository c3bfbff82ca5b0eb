"""Texts made into ids, and each token into what a reader knows it as."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from hiddenscope.errors import TextError
from hiddenscope.states import Tokens

Texts: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]


@dataclass(frozen=True)
class Encoded:
    """Some texts as the model takes them: the ids of each, and which characters each id stands for, if known."""

    texts: tuple[str, ...] | None
    ids: tuple[tuple[int, ...], ...]
    spans: tuple[tuple[tuple[int, int], ...], ...] | None = None

    @property
    def lengths(self) -> list[int]:
        """How many tokens each text has."""
        return [len(ids) for ids in self.ids]


@dataclass
class Encoder:
    """A tokenizer and the limits of its model: it makes ids of texts, and refuses what the model cannot take.

    `window` is the longest text in tokens, `vocabulary` the number of ids, `start` the id that opens a decoder's text,
    `pad` the id that fills up the shorter texts of a batch, `target_window` a decoder's own window, if it has one.
    """

    tokenizer: Any
    window: int | None
    vocabulary: int
    name: str = "this model"
    start: int | None = None
    pad: int = 0
    target_window: int | None = None
    _strings: dict[int, str] = field(default_factory=dict, repr=False)

    def encode(self, texts: Texts, *, truncate: bool = False) -> Encoded:
        """The ids of one text or many, given as strings or as lists of ids.

        >>> Encoder(None, window=8, vocabulary=100).encode([[5, 6], [7]]).lengths
        [2, 1]
        """
        if isinstance(texts, str):
            texts = [texts]
        if isinstance(texts, bytes | Mapping) or not isinstance(texts, Iterable):
            reason = f"it is {type(texts).__name__}"
            raise TextError("Texts for a pass", reason, "Give a string or a list of ids, or a list of either.")
        given = [text if isinstance(text, str) else _plain(text) for text in texts]
        if given and all(isinstance(text, int) for text in given):
            given = [given]
        if not given:
            raise TextError("Texts for a pass", "there are none", "Give at least one.")
        if all(isinstance(text, str) for text in given):
            encoded = self._tokenized(tuple(map(str, given)), truncate)
        else:
            encoded = Encoded(None, tuple(tuple(ids) for ids in _only_ids(given)))
        if truncate and self.window:
            encoded = _cut(encoded, self.window)
        for number, ids in enumerate(encoded.ids):
            self._check(number, ids)
        return encoded

    def targets(self, texts: Texts | None, count: int, *, truncate: bool = False) -> Encoded:
        """What an encoder-decoder's decoder is given: its start token, then the text; or the start token alone.

        Targets that are lists of ids are given to it as they are.
        """
        own = replace(self, window=self.target_window or self.window)
        encoded = None if texts is None else self._as_many(own.encode(texts, truncate=truncate), count)
        if encoded is not None and encoded.texts is None:
            return encoded
        if self.start is None:
            reason = "its configuration names no decoder_start_token_id"
            raise TextError(f"The decoder's texts for {self.name}", reason, "Give `targets=` as lists of ids.")
        if encoded is None:
            return Encoded(None, ((self.start,),) * count)
        ids = tuple((self.start, *_without_end(self.tokenizer, row)) for row in encoded.ids)
        spans = tuple(((-1, -1), *row) for row in encoded.spans) if encoded.spans else None
        spans = spans and tuple(row[: len(own)] for row, own in zip(spans, ids, strict=True))
        shifted = Encoded(encoded.texts, ids, spans)
        shifted = _cut(shifted, own.window) if truncate and own.window else shifted
        for number, row in enumerate(shifted.ids):
            own._check(number, row)
        return shifted

    def tokens(self, encoded: Encoded) -> Tokens:
        """The tokens of encoded texts, one row each, text after text."""
        lengths = encoded.lengths
        flat = [i for ids in encoded.ids for i in ids]
        spans = [span for row in encoded.spans for span in row] if encoded.spans else []
        return Tokens(
            encoded.texts,
            text=np.repeat(np.arange(len(lengths)), lengths),
            positions=np.concatenate([np.arange(n) for n in lengths]),
            ids=np.array(flat, dtype=np.int64),
            strings=tuple(self.string(i) for i in flat),
            spans=np.array(spans, dtype=np.int64).reshape(-1, 2),
            count=len(lengths),
        )

    def string(self, token: int) -> str:
        """A token as a reader knows it: ` Paris`, not `ĠParis`; the id itself where it is nothing to a tokenizer."""
        if token not in self._strings:
            known = self.tokenizer is not None and token >= 0
            self._strings[token] = _string(self.tokenizer, token) if known else str(token)
        return self._strings[token]

    def one(self, token: Any, what: str = "target", *, before: str = "") -> int:
        """The id of what must be a single token, given as a string or as an id; `before` is the text that it follows.

        >>> Encoder(None, window=8, vocabulary=100).one(7)
        7
        """
        problem = f"The {what} {str(token)[:40]!r}" if isinstance(token, str) else f"The {what} {token!r:.40}"
        if isinstance(token, int) and not isinstance(token, bool):
            if not 0 <= token < self.vocabulary:
                raise TextError(
                    problem, f"the ids of {self.name} are 0 to {self.vocabulary - 1:,}", "Give one of these."
                )
            return token
        if not isinstance(token, str) or self.tokenizer is None:
            known = f"{self.name} was loaded without a tokenizer"
            reason = known if isinstance(token, str) else f"it is {type(token).__name__}"
            raise TextError(problem, reason, "Give the id of a token.")
        ids = self._following(token, before)
        if len(ids) == 1 and ids[0] != getattr(self.tokenizer, "unk_token_id", None):
            if not token.startswith(" ") and (known := self.string(ids[0])).startswith(" "):
                raise TextError(problem, f"to {self.name} it begins with a space", f"Give {known!r}, or an id.")
            return ids[0]
        said = " ".join(repr(self.string(piece)) for piece in ids[:8])
        several = f"to {self.name} it is {len(ids)} tokens: {said}" if len(ids) > 1 else f"{self.name} does not know it"
        reason = several if ids else "it grows together with the text before it" if before else "it is no token at all"
        spaced = "" if token[:1].isspace() or not token else f" Did you mean {' ' + token!r}?"
        raise TextError(problem, reason, f"Give a single token, with the space before it where a word begins.{spaced}")

    def _following(self, token: str, before: str) -> list[int]:
        """The ids that a piece of text adds to the text before it; none where the two grow together."""
        context, whole = ([] if not text else self._bare(text) for text in (before, before + token))
        if whole[: len(context)] != context:
            return []
        ids = whole[len(context) :]
        if not before and len(ids) != 1 and token.startswith(" "):  # some begin every text with a space of their own
            bare = self._bare(token[1:])
            ids = bare if len(bare) == 1 and self.string(bare[0]) == token else ids
        return ids

    def _bare(self, text: str) -> list[int]:
        return [int(i) for i in self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]

    def _tokenized(self, texts: tuple[str, ...], truncate: bool) -> Encoded:
        for number, text in enumerate(texts):
            _readable(number, text)
        if self.tokenizer is None:
            reason = f"{self.name} was loaded without a tokenizer"
            raise TextError(
                f"The text {texts[0][:40]!r}", reason, "Give lists of token ids, or load it with a tokenizer."
            )
        fast = bool(getattr(self.tokenizer, "is_fast", False))
        cut = {"truncation": True, "max_length": self.window} if truncate and self.window else {}
        made = self.tokenizer(
            list(texts), return_offsets_mapping=fast, return_attention_mask=False, verbose=False, **cut
        )
        spans = tuple(tuple(map(_span, row)) for row in made["offset_mapping"]) if fast else None
        return Encoded(texts, tuple(tuple(ids) for ids in made["input_ids"]), spans)

    def _check(self, number: int, ids: Sequence[int]) -> None:
        if not ids:
            raise TextError(f"Text {number}", "it has no tokens", "Leave it out, or give it one.")
        if self.window and len(ids) > self.window:
            reason = f"it has {len(ids):,} tokens and {self.name} takes {self.window:,}"
            raise TextError(f"Text {number}", reason, "Split it, or give truncate=True to keep the first tokens only.")
        if min(ids) < 0 or max(ids) >= self.vocabulary:
            wrong = next(i for i in ids if not 0 <= i < self.vocabulary)
            reason = f"id {wrong} is outside the vocabulary of {self.name}, 0 to {self.vocabulary - 1:,}"
            raise TextError(f"Text {number}", reason, "Use the tokenizer that belongs to the model.")

    def _as_many(self, encoded: Encoded, count: int) -> Encoded:
        if len(encoded.ids) == count:
            return encoded
        raise TextError(
            f"{count} texts with targets", f"there are {len(encoded.ids)} targets", "Give one for each text."
        )


def _plain(ids: Any) -> Any:
    """A tensor, an array or a range of ids as a list; anything else as it is."""
    return ids.tolist() if hasattr(ids, "tolist") else list(ids) if isinstance(ids, tuple | range) else ids


def _only_ids(given: list[Any]) -> list[list[int]]:
    for number, ids in enumerate(given):
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            reason = f"text {number} is {type(ids).__name__} and no list of whole numbers"
            raise TextError("Texts as ids", reason, "Give strings only, or lists of token ids only.")
    return given


def _readable(number: int, text: str) -> None:
    if not text.strip():
        reason = "there is nothing in it" if not text else "there is nothing in it but white space"
        raise TextError(f"Text {number}", reason, "Leave it out, or give the ids of its tokens.")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        reason = (
            f"the character at {error.start} is a lone surrogate ({text[error.start]!a}), which no tokenizer can read"
        )
        raise TextError(f"Text {number}", reason, "Decode the text again, with errors='replace'.") from None


def _cut(encoded: Encoded, window: int) -> Encoded:
    spans = encoded.spans and tuple(row[:window] for row in encoded.spans)
    return Encoded(encoded.texts, tuple(ids[:window] for ids in encoded.ids), spans)


def _span(pair: tuple[int, int]) -> tuple[int, int]:
    """A token that stands for no character has no span."""
    return (-1, -1) if pair[0] == pair[1] else (int(pair[0]), int(pair[1]))


def _without_end(tokenizer: Any, ids: Sequence[int]) -> Sequence[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


def _string(tokenizer: Any, token: int) -> str:
    """One token decoded; a decoder that drops the space of a word's first token gets it back."""
    text = str(tokenizer.decode([token], clean_up_tokenization_spaces=False))
    piece = tokenizer.convert_ids_to_tokens(token)
    return " " + text if isinstance(piece, str) and piece.startswith("▁") and not text.startswith(" ") else text
