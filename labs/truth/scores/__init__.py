"""Each analysis on models whose answer is known: what it should find, and what it did.

pairs          two inputs whose last answers differ
patch          effects of states, heads and MLPs, exact and by one gradient
edges          what each edge does, and whether the declared circuit is enough
probe          which variables a site holds
lens           the layer from which the output is there
visibility     which states reach which
attention      where each head looks
contributions  which part writes the answer
rewired        ways to rewire one part of a module
drift          which site and module a rewired model differs in
steer          what a variable that is written from outside changes
variable       whether a learned subspace is the compiler's own, and what controls expose
maps           pictures and clusters of states
"""
