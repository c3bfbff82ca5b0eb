"""Labs: what is measured beside the package. README.md says which lab answers what."""
