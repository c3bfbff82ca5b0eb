"""Which states influence a state, and which does it influence?

maps            measures of the Jacobian, and the map of one text
seeds           the vectors of targets, in batches that go through a model together
findings        the labelled arrays, and the facts: reach, decay, own share
sampling        which states of many texts are drawn
aligned         many texts, aligned by distance and depth
random_weights  the same model with nothing learned
tallies         sums over the drawn states
decay, laws     averages, and the laws that they follow
jackknife       intervals over groups of texts
averages        the labelled arrays and facts of averages
"""
