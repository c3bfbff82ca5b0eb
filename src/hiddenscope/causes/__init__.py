"""What a cause is measured with: contrasts, and the answer's share that comes back.

contrast  two prompts, and the answers that tell them apart
encoding  their tokens, and how those of the two align
measures  what changed logits say of the answers
"""
