"""How do labelled texts lie in every layer, and does the picture tell the truth?

points    the points of a dataset in a model, with their classes
pictures  pictures in two dimensions, compared with the full space
workers   the processes that compute UMAP
findings  everything as one Dataset, and the facts
"""
