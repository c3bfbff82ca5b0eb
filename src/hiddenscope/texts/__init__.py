"""Texts: what is read from files, frames, datasets and lists, and which texts belong
together.

reading  one reader for texts, their labels and their groups
folder   the files of texts in a folder
copies   texts that are the same text again
groups   texts that belong together, and texts that look as if they did
"""

from hiddenscope.texts.copies import copy_groups, copy_key
from hiddenscope.texts.folder import COMPRESSIONS, FORMATS
from hiddenscope.texts.groups import Belonging, belonging
from hiddenscope.texts.reading import (
    COLUMNS,
    UNNAMED,
    Labelled,
    Row,
    is_file,
    listed,
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
    "Belonging",
    "Labelled",
    "Row",
    "belonging",
    "copy_groups",
    "copy_key",
    "is_file",
    "listed",
    "names_a_file",
    "read",
    "rows",
    "shipped",
]
