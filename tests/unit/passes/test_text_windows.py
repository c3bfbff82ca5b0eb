"""A long text is cut into windows, and no token of it is lost."""

import pytest

import hiddenscope as hs
from hiddenscope.testing import tiny_model, tiny_tokenizer

TEXT = "The cat sat on the mat, and the dog sat on the log. " * 6
NOWHERE = (-1, -1)


@pytest.mark.parametrize(("window", "overlap"), [(16, 0), (16, 5), (9, 0), (64, 30)])
def test_windows_hold_the_tokens_of_the_whole_text(window: int, overlap: int) -> None:
    encoder = hs.load((tiny_model("gpt2"), tiny_tokenizer())).text_encoder
    special = encoder.tokenizer.num_special_tokens_to_add()
    stride = window - special - overlap
    whole = encoder.encode_whole([TEXT])
    assert whole.spans is not None
    tokens = list(zip(whole.ids[0], whole.spans[0], strict=True))
    content = [token for token in tokens if token[1] != NOWHERE]
    cut: list[tuple[int, tuple[int, int]]] = []
    for index, inputs in enumerate(encoder.windows(TEXT, window, stride)):
        assert inputs.spans is not None
        pairs = list(zip(inputs.ids[0], inputs.spans[0], strict=True))
        inside = [pair for pair in pairs if pair[1] != NOWHERE]
        assert len(pairs) - len(inside) == special
        start = index * stride
        assert inside == content[start : start + window - special]
        cut = cut[:start] + inside
    assert cut == content


@pytest.mark.slow
@pytest.mark.real
def test_no_token_of_a_long_text_is_lost_by_a_real_tokenizer(smollm2: hs.Model) -> None:
    """Some versions of tokenizers drop what does not fit in the first window."""
    whole = smollm2.text_encoder.encode_whole([TEXT]).ids[0]
    cut: list[int] = []
    for inputs in smollm2.text_encoder.windows(TEXT, 16, 16):
        cut += inputs.ids[0]
    assert tuple(cut) == tuple(whole)
