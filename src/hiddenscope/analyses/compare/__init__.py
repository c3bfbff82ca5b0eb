"""Where, and by how much, do two texts or two models differ?

sides        the two sides of every text, and which of their tokens stand in one column
differences  what is measured in every column
cka          the CKA of every pair of sites
findings     the labelled arrays, and the facts
"""
