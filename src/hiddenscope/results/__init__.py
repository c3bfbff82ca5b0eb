"""Result: what an analysis returns, and how it is written to a file."""

from hiddenscope.results.result import DISPLAYS as DISPLAYS
from hiddenscope.results.result import FINDINGS as FINDINGS
from hiddenscope.results.result import PAINTERS as PAINTERS
from hiddenscope.results.result import RENDERERS as RENDERERS
from hiddenscope.results.result import TABLES as TABLES
from hiddenscope.results.result import Facts as Facts
from hiddenscope.results.result import Look as Look
from hiddenscope.results.result import Result as Result
from hiddenscope.results.result import Table as Table
from hiddenscope.results.result import Width as Width
from hiddenscope.results.result import in_words as in_words
from hiddenscope.results.result import to_bytes as to_bytes
