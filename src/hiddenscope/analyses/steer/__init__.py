"""Can a direction change what the model writes, and what does that cost?

direction      along what the states are changed, and at which sites
intervention   the change of states itself
reads          which tokens are read, and where in which texts
logprobs       what the model gives to these tokens
continuations  what it writes after the prompts
sweep          one site after another, with every strength
findings       the labelled arrays, and the facts
"""
