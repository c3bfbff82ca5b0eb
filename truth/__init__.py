"""Models whose inner workings are known, and every analysis scored on them.

program    the language: variables that are maps of others, or gathered by attention
programs   ten programs, each with its vocabulary and its longest input
circuit    which variable is written at which site, by which head or MLP, read by which
units      the heads and neurons that compute a variable, as matrices over channels
hosts      the same matrices in GPT-2, OPT, BERT, Llama and a plain module
"""
