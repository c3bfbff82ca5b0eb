"""Texts: what is read from files, frames, datasets and lists, and which texts belong
together.

reader      texts, their labels and their groups, from any source
columns     which columns of a table hold them
files       files of texts, row by row
objects     lists, pairs, frames and Hugging Face datasets
row         one text with its label and group
compressed  what is decompressed while it is read
copies      texts that are the same text again
groups      texts that belong together, and texts that look as if they did
"""

from hiddenscope.texts.columns import COLUMNS
from hiddenscope.texts.copies import copy_groups, copy_key
from hiddenscope.texts.files import COMPRESSIONS, FORMATS, is_file, names_a_file
from hiddenscope.texts.groups import Belonging, belonging
from hiddenscope.texts.objects import as_list
from hiddenscope.texts.reader import UNNAMED, read, rows, shipped
from hiddenscope.texts.row import Labelled, Row

__all__ = [
    "COLUMNS",
    "COMPRESSIONS",
    "FORMATS",
    "UNNAMED",
    "Belonging",
    "Labelled",
    "Row",
    "as_list",
    "belonging",
    "copy_groups",
    "copy_key",
    "is_file",
    "names_a_file",
    "read",
    "rows",
    "shipped",
]
