"""Texts: what is read from files, frames, datasets and lists, and which texts belong together.

reading  one reader for texts, their labels and their groups
copies   texts that are the same text again
"""

from hiddenscope.texts.copies import copy_groups, copy_key
from hiddenscope.texts.reading import (
    COLUMNS,
    COMPRESSIONS,
    FORMATS,
    UNNAMED,
    Labelled,
    Row,
    is_file,
    names_a_file,
    read,
    rows,
    shipped,
)

__all__ = [
    "COLUMNS",
    "COMPRESSIONS",
    "FORMATS",
    "UNNAMED",
    "Labelled",
    "Row",
    "copy_groups",
    "copy_key",
    "is_file",
    "names_a_file",
    "read",
    "rows",
    "shipped",
]
