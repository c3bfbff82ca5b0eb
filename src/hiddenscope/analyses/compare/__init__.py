"""Where, and by how much, do two texts or two models differ?

sides         both sides of every text, from one model, from two, or from states; which tokens stand in one column
differences   what is measured in every column, the CKA of every pair of sites, and the facts
"""
