"""How large is every state, how do states spread, and how alike are layers?

statistics  each state by itself, and the states of a site together
findings    the labelled arrays, and the facts
"""
