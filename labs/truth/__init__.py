"""Models whose inner workings are known, and every analysis scored on them.

program      the language: variables that are maps of others, or gathered by attention
programs     ten programs, each with its vocabulary and its longest input
rewrite      programs for hosts that lack positions, or a mask that hides the future
circuit      which variable is written where, by which head or MLP, and read by which
units        the heads and neurons that compute a variable, as matrices over channels
layout       these matrices at a host's width, with norms that change nothing
hosts        the same in GPT-2, OPT, BERT, Llama and a plain module
wires        the edges of a circuit, and what the program says of each
known        a model with its program and its circuit: what every score is given
outputs      is a compiled model its program, on all inputs?
save         compiled models as folders that load like any other
exchange     what a head or an MLP writes, exchanged for what it wrote in another run
train        models that learn a program and its circuit
cache        trained models, each trained once
scores/      one analysis each: what it should find, and what it did
tally        questions, cases, scores and their intervals
baselines    the questions of patching and of edges, put to TransformerLens
eap_ig       edges of a GPT-2 by a published estimate, in plain PyTorch
runs         every analysis on every model
report       the tables of tables.md
"""
