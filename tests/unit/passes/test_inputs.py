"""TextEncoder: what must be a single token is one, or the error says what it is."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Metaspace as Spaced
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Metaspace
from transformers import PreTrainedTokenizerFast

from hiddenscope.errors import TextError
from hiddenscope.passes import TextEncoder
from hiddenscope.testing import tiny_tokenizer


def of_sentence_pieces() -> PreTrainedTokenizerFast:
    """A tokenizer that begins every text with a space of its own."""
    made = Tokenizer(
        WordLevel({"<unk>": 0, "▁": 1, "▁cat": 2, "▁Paris": 3}, unk_token="<unk>")
    )
    made.pre_tokenizer, made.decoder = Metaspace(), Spaced()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


@pytest.fixture(scope="module")
def bytes_() -> TextEncoder:
    return TextEncoder(tiny_tokenizer(), window=None, vocabulary=128, name="toy")


def test_a_token_is_itself_by_name_and_by_id(bytes_: TextEncoder) -> None:
    for token in (" the", "at", "a"):
        found = bytes_.single(token)
        assert bytes_.string(found) == token
        assert bytes_.single(found) == found
        assert bytes_.single(token, before="the c") == found


@pytest.mark.parametrize(
    ("token", "before", "found"),
    [
        (" Paris", "", "it is 5 tokens: ' ' 'P' 'a' 'r' 'is'. Give a single token"),
        # ' Paris' is no single token either.
        ("Paris", "the cat", "'is'. Give a single token, with the space before it"),
        ("t", "the ca", "merges with the text before it"),
        ("", "the ca", "it is empty"),
        ("t", "the ca", "Did you mean ' t'?"),
        ("", "", "it is empty"),
        (128, "", "ids of toy are 0 to 127"),
        (-1, "", "ids of toy are 0 to 127"),
        (True, "", "it is bool"),
        (1.5, "", "it is float"),
    ],
)
def test_what_is_no_single_token_is_said(
    bytes_: TextEncoder, token: Any, before: str, found: str
) -> None:
    with pytest.raises(TextError) as caught:
        bytes_.single(token, "answer", before=before)
    assert found in str(caught.value)
    assert str(caught.value).startswith("Cannot use the answer ")
    assert ("Did you mean" in str(caught.value)) == (token == "t")


def test_a_tokenizer_that_adds_a_space_is_not_taken_at_its_word() -> None:
    encoder = TextEncoder(of_sentence_pieces(), window=None, vocabulary=4, name="toy")
    assert encoder.single(" Paris") == 3
    assert encoder.single(" Paris", before="cat") == 3
    with pytest.raises(TextError, match="begins with a space"):
        encoder.single("Paris")
    with pytest.raises(TextError, match="not in the vocabulary"):
        encoder.single(" Berlin")


def test_without_a_tokenizer_ids_are_wanted() -> None:
    with pytest.raises(TextError, match="loaded without a tokenizer"):
        TextEncoder(None, window=None, vocabulary=9).single("a")
