"""Which states carry the answer?

contrast  two prompts, the answers that tell them apart, and how their tokens align
cells     every site and token patched, and whole layers
findings  the labelled arrays, and the facts
"""
