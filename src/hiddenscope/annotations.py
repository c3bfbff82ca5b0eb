"""Types that analyses name in their signatures and that need torch.

A declaration imports them for type checkers alone, so that it can be read without
torch; `arguments` looks them up here when a call has failed.
"""

from hiddenscope.analyses.attention.selection import Layers as Layers
from hiddenscope.analyses.attention.selection import NumberChoice as NumberChoice
from hiddenscope.analyses.contributions.question import AnswerTokens as AnswerTokens
from hiddenscope.analyses.drift.compute import Candidate as Candidate
from hiddenscope.analyses.drift.compute import Reference as Reference
from hiddenscope.analyses.embed.compute import Adjustment as Adjustment
from hiddenscope.analyses.examples.readings import Directions as Directions
from hiddenscope.analyses.lens.fitted import Lens as Lens
from hiddenscope.analyses.project.pictures import Method as Method
from hiddenscope.analyses.project.pictures import Pictures as Pictures
from hiddenscope.analyses.search.compute import Query as Query
from hiddenscope.analyses.search.compute import Searchable as Searchable
from hiddenscope.directions.dictionary import Dictionary as Dictionary
from hiddenscope.directions.direction import Direction as Direction
from hiddenscope.model import Model as Model
from hiddenscope.model import ModelLike as ModelLike
from hiddenscope.passes import Inputs as Inputs
from hiddenscope.passes import Texts as Texts
from hiddenscope.results import Result as Result
from hiddenscope.series.member import Members as Members
from hiddenscope.sites import Site as Site
from hiddenscope.sites import SitePatterns as SitePatterns
from hiddenscope.states import Pair as Pair
from hiddenscope.states import Pooling as Pooling
from hiddenscope.states import Readable as Readable
from hiddenscope.texts import Labelled as Labelled
from hiddenscope.vectors import EachToken as EachToken
