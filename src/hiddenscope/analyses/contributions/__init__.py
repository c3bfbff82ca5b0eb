"""Which parts write the answer?

question    the text and the tokens of the answers, as token ids
final_norm  the final norm with its scale frozen, found by its behaviour
parts       what every head, MLP, neuron and bias adds to the logit
findings    the parts as labelled arrays, and the facts
"""
