"""Which tokens does each head read?

selection      the attentions, heads and queries that are asked for
weights        the weights of one text, and of what its values write
random_tokens  texts of random tokens, with and without a repetition
relations      how much each head reads a related token there, tested
findings       the labelled arrays, and the facts
"""
