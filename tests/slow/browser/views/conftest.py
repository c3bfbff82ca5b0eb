"""The browser that opens pages from disk."""

from tests.pages.fixtures import contexts, show

__all__ = ["contexts", "show"]
