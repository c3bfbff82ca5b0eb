"""What would each layer predict, if it were the last?

reading   the engine: the unembedding applied to states, and what is measured of the logits
findings  the readings as labelled arrays, and the facts drawn from them
fitted    lenses that are fitted to a model: tuned and jacobian
"""
