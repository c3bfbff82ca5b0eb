"""Results: what an analysis returns, its findings in words, and its files."""

from hiddenscope.results.facts import Facts as Facts
from hiddenscope.results.facts import GroupFacts as GroupFacts
from hiddenscope.results.findings import Table as Table
from hiddenscope.results.findings import in_words as in_words
from hiddenscope.results.result import DISPLAYS as DISPLAYS
from hiddenscope.results.result import FINDINGS as FINDINGS
from hiddenscope.results.result import PAINTERS as PAINTERS
from hiddenscope.results.result import RENDERERS as RENDERERS
from hiddenscope.results.result import TABLES as TABLES
from hiddenscope.results.result import Look as Look
from hiddenscope.results.result import Result as Result
from hiddenscope.results.result import Width as Width
from hiddenscope.results.result import to_bytes as to_bytes
