"""Assemble commands, forms and code from what each analysis says of its parameters."""
