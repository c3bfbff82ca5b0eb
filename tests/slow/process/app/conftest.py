"""The workbench that these tests ask, with a worker process behind it."""

from tests.workbench.fixtures import _offline, another, bench, root, store, tiny_name

__all__ = ["_offline", "another", "bench", "root", "store", "tiny_name"]
