"""Types that analyses name in their signatures and that need torch.

A declaration imports them for type checkers alone, so that it can be read without
torch; `arguments` looks them up here when a call has failed.
"""

# mypy: implicit-reexport
# ruff: noqa: F401

from hiddenscope.analyses.attention.selection import Layers, NumberChoice
from hiddenscope.analyses.contributions.question import AnswerTokens
from hiddenscope.analyses.drift.compute import Candidate, Reference
from hiddenscope.analyses.embed.compute import Adjustment
from hiddenscope.analyses.examples.readings import Directions
from hiddenscope.analyses.lens.fitted import Lens
from hiddenscope.analyses.project.pictures import Method, Pictures
from hiddenscope.analyses.search.compute import Query, Searchable
from hiddenscope.directions.dictionary import Dictionary
from hiddenscope.directions.direction import Direction
from hiddenscope.model import Model, ModelLike
from hiddenscope.passes import Inputs, Texts
from hiddenscope.results import Result
from hiddenscope.series.member import Members
from hiddenscope.sites import Site, SitePatterns
from hiddenscope.states import Pair, Pooling, Readable
from hiddenscope.texts import Labelled
from hiddenscope.vectors import EachToken
