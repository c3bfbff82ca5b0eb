"""The store: states of a whole corpus in a folder, exact, resumable, and never silently wrong.

plan        what a store is to hold, decided before the first pass
folder      the files of a store, their locks, and how a file comes to be there
records     small JSON files that end with their own checksum
commits     the record that makes a unit visible
checksums   CRC-32C of blocks, SHA-256 of files
shard       the safetensors file of one unit
writer      makes a store, and commits units

The format is in docs/store-format.md. Nothing here imports torch.
"""

from hiddenscope.store.plan import StorePlan, StoreRow, UnitDigest
from hiddenscope.store.writer import Writer, create, resume

__all__ = ["StorePlan", "StoreRow", "UnitDigest", "Writer", "create", "resume"]
