"""How large is every state, how do states spread, and how alike are layers?

statistics   what each state is by itself, and what the states of a site are together
findings     the labelled arrays, and the facts
"""
