"""Extract: the states of a whole corpus, in a store on disk.

extract     the function that users call
job         an extraction, planned and run
status      what a job will cost, and how far it is
engine      where a job is computed
corpus      the texts, read one after another, and an index on disk that finds copies
planning    texts made into units of fixed sequences and batches
compute     the states of a unit, and a pipeline that writes while it computes
schedule    which units are waiting, in hand, done
recipe      how another process loads the same model
local       units over processes of this machine
ray_engine  units over Ray actors
"""

from hiddenscope.extract.corpus import Corpus as Corpus
from hiddenscope.extract.engine import Engine as Engine
from hiddenscope.extract.extract import extract as extract
from hiddenscope.extract.job import ExtractJob as ExtractJob
from hiddenscope.extract.status import JobCost as JobCost
from hiddenscope.extract.status import JobProgress as JobProgress
