"""The only room that touches a user's nn.Module: hooks, weights, kernels, trials and
copies.
"""
