"""Can a direction change what the model writes, and what does that cost?

direction  along what the states are changed, and at which sites
logprobs   what the model gives to answers and to plain texts, as it is or while its states are changed
"""
