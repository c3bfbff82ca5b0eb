"""Does the proof at load accept sound dictionaries, and refuse the others by name?

train     small dictionaries of every activation, trained as the libraries do
planted   one fault in each, and the words by which a refusal must name what fits
"""
