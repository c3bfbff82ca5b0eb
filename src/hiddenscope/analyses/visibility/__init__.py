"""Which states influence a state, and which does it influence?

maps      measures of the Jacobian, and the map of one text
findings  the labelled arrays, and the facts: reach, decay, own share
"""
