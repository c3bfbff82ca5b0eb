"""Generators of the documentation, and its site."""
