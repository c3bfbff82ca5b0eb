"""Chaos: faults done to stores and to jobs, at length: `make chaos`. `make test` does a slice of the same."""
