"""The facts of embeddings, as the app shows them."""

from typing import TypedDict


class EmbedFacts(TypedDict):
    """How many vectors there are, and how alike they point."""

    texts: int
    width: int
    mean_cosine: float
