"""The list of analyses and the list of public names. This room imports nothing."""

from hiddenscope.catalog.analyses import ANALYSES as ANALYSES
from hiddenscope.catalog.analyses import ANALYSIS as ANALYSIS
from hiddenscope.catalog.analyses import COMMANDS as COMMANDS
from hiddenscope.catalog.analyses import GROUPS as GROUPS
from hiddenscope.catalog.analyses import PUBLIC as PUBLIC
from hiddenscope.catalog.analyses import Analysis as Analysis
from hiddenscope.catalog.analyses import Group as Group
from hiddenscope.catalog.stability import PROVISIONAL as PROVISIONAL
from hiddenscope.catalog.stability import is_provisional as is_provisional
