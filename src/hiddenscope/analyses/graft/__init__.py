"""What does another model of the same shape break or mend?

prompts   what both models are asked, and the right answers
runs      the blocks or states of the donor, grafted into the model
findings  the labelled arrays, and the facts
"""
