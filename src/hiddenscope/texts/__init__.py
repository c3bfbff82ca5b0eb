"""Texts: what is read from files, frames, datasets and lists, and which texts belong
together.

reader  texts, their labels and their groups, from any source
files   files of texts, row by row, decompressed while they are read
row     one text with its label and group, and the columns of a table that hold them
groups  texts that belong together: copies, groups, and those that look as if they did
"""

from hiddenscope.texts.files import COMPRESSIONS, FORMATS, names_a_file
from hiddenscope.texts.groups import (
    Belonging,
    belonging,
    copy_key,
    number_groups,
)
from hiddenscope.texts.reader import as_list, read, rows, shipped
from hiddenscope.texts.row import COLUMNS, LABEL_NAMES, TEXT_NAMES, Labelled, Row

__all__ = [
    "COLUMNS",
    "COMPRESSIONS",
    "FORMATS",
    "LABEL_NAMES",
    "TEXT_NAMES",
    "Belonging",
    "Labelled",
    "Row",
    "as_list",
    "belonging",
    "copy_key",
    "names_a_file",
    "number_groups",
    "read",
    "rows",
    "shipped",
]
