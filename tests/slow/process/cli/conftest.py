"""A tiny model on disk for the commands."""

from tests.unit.cli.conftest import folder, headless

__all__ = ["folder", "headless"]
