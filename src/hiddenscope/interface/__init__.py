"""Assemble commands and code from what each analysis says of its parameters."""
