"""Which states carry the answer? Put states of one run into another and see how much of
the answer comes along.

contrast  two prompts, the answers that tell them apart, and how their tokens align
cells     every site and token patched, and whole layers
"""
