"""Planted faults: does `hs.drift` find where two runs of a model diverge, and which
module is at fault?

models    the models that faults are planted in, and the texts they read
oracle    what is true of a planted fault, by plain hooks: whether the output moves, and what is wrong on equal input
pairs     the planted faults and the harmless pairs, all from one seed
trial     one pair, given to drift
report    the tables
small     small faults and sound pairs for the systematic test (`python -m faults.systematic`)
"""
