"""Measure other libraries beside ours: the same task, model and texts, in turn.

environments   which library lives in which environment, and how it is made
worker         the process of one library: prepare a task, run it, report
ways           what a library gives to a worker: a task that is ready to run
tasks          the tasks: inputs, libraries, and how close the numbers must be
beside         run the workers in turn and compare
hiddenscope_, plain_, transformer_lens_, nnsight_, nnterp_, torchlens_, sentences_
               each task as the documentation of that library recommends it

The files of libraries run in environments that have none of our packages.
"""
