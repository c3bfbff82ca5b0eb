"""Where do the states of a model live, and how is that known?"""
