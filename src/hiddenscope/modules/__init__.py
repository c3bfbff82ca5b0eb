"""Hooks, weights, kernels, trials and copies: all that touches a user's nn.Module."""
