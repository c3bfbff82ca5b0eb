"""What hiddenscope costs, measured beside what it is held against. `make bench` runs it
all; nothing here is a test.

measure   CPU time, wall time, memory: one way beside another
capture   every layer, against the bare forward pass; its memory
ragged    texts of many lengths, against padded batches in the order given
depth     layers up to k, against all of them
start     the command, against importing what it works with
load      the second load of a model, against Hugging Face's own
gpu       states from a GPU, against the bare forward pass there
peers     TransformerLens and nnsight, each against its own bare pass
"""
