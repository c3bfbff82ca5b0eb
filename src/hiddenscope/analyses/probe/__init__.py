"""What can a linear probe read from the states of each layer?

labels        what is predicted: given or ready-made labels, and control labels
design        the folds, and the other targets that the same probes are trained on
significance  the scores under permuted labels, and the interval of a score
findings      the scores as a Dataset, and the facts
"""
