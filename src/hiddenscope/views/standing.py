"""What stands for a text, in words."""

WORDS = {
    "last": "the last token of each text",
    "first": "the first token of each text",
    "cls": "the classification token of each text",
    "each": "every token",
    "mean": "the mean over the tokens of each text",
    "max": "the maximum over the tokens of each text",
}


def standing(token: str | int) -> str:
    """Say what stands for a text.

    >>> standing("mean"), standing(3)
    ('the mean over the tokens of each text', 'token 3 of each text')
    """
    return WORDS.get(str(token), f"token {token} of each text")
