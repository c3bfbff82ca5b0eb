"""Extract: the states of a whole corpus, in a store on disk.

job       the function that users call, and an extraction that is planned and run
engine    where a job is computed, and how its units come to the workers there
worker    what another process does for a job
corpus    the texts, read one after another, and an index on disk that finds copies
planning  texts made into units of fixed sequences and batches
compute   the states of a unit, and a pipeline that writes while it computes
"""

from hiddenscope.extract.corpus import Corpus
from hiddenscope.extract.engine import Engine
from hiddenscope.extract.job import ExtractJob, JobCost, JobProgress, extract

__all__ = ["Corpus", "Engine", "ExtractJob", "JobCost", "JobProgress", "extract"]
