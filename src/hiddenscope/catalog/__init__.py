"""The list of analyses, the list of public names, and how a parameter is described.

This room imports no torch.
"""

from hiddenscope.catalog.analyses import ANALYSES as ANALYSES
from hiddenscope.catalog.analyses import ANALYSIS as ANALYSIS
from hiddenscope.catalog.analyses import COMMANDS as COMMANDS
from hiddenscope.catalog.analyses import GROUPS as GROUPS
from hiddenscope.catalog.analyses import PUBLIC as PUBLIC
from hiddenscope.catalog.analyses import Analysis as Analysis
from hiddenscope.catalog.analyses import Group as Group
from hiddenscope.catalog.declaration import analysis as analysis
from hiddenscope.catalog.declaration import ask as ask
from hiddenscope.catalog.parameters import SITES as SITES
from hiddenscope.catalog.parameters import TARGETS as TARGETS
from hiddenscope.catalog.parameters import TEXTS as TEXTS
from hiddenscope.catalog.parameters import Description as Description
from hiddenscope.catalog.parameters import Kind as Kind
from hiddenscope.catalog.parameters import Parameter as Parameter
from hiddenscope.catalog.stability import PROVISIONAL as PROVISIONAL
from hiddenscope.catalog.stability import is_provisional as is_provisional
