"""What would each layer predict, if it were the last?

reading   the unembedding applied to states, and measures of the logits
findings  the readings as labelled arrays, and the facts
fitted    lenses that are fitted to a model, and their files: tuned, jacobian, maps
"""
