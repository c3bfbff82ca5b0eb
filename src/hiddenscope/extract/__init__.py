"""Extract: the states of a whole corpus, in a store on disk.

corpus     the texts, read one after another, and an index on disk that finds copies
planning   texts made into units of fixed sequences and batches
compute    the states of a unit, and a pipeline in which a unit is written while the next is computed
schedule   which units are to be computed, in hand, done
recipe     how another process comes by the same model
local      units over processes of this machine
cluster    units over Ray actors
job        what a job will cost, and how far it is
"""

from hiddenscope.extract.extract import Corpus as Corpus
from hiddenscope.extract.extract import Engine as Engine
from hiddenscope.extract.extract import ExtractJob as ExtractJob
from hiddenscope.extract.extract import JobProgress as JobProgress
from hiddenscope.extract.extract import extract as extract
