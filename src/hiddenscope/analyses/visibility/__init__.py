"""Which states influence a state, and which does it influence?

maps       what is measured of the Jacobian, and the map itself, target by target
findings   the labelled arrays, and the facts: how far influence reaches, how it decays, how much is a token's own
"""
