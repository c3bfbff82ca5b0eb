"""The documentation site: what Sphinx needs besides the Markdown of docs/."""
