"""What stands for a text, in words."""

from hiddenscope.states.pooling import POOLINGS, meaning_of


def standing(token: str | int) -> str:
    """Say what stands for a text.

    >>> standing("mean"), standing(3)
    ('the mean over the tokens of each text', 'token 3 of each text')
    """
    if token == "each":
        return "every token"
    if isinstance(token, int) or token in POOLINGS:
        return meaning_of(token)
    # A result of another version may name a pooling that is not known here.
    return f"token {token} of each text"
