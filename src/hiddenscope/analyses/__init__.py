"""One question a file, one function a file; analyses never import one another."""
