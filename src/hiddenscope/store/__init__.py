"""The store: states of a whole corpus in a folder, exact, resumable, and never silently
wrong.

folder   the files of a store, their locks, and how a file comes to be there
records  small JSON files that end with their own checksum; commits among them
plan     what a store is to hold, decided before the first pass
shard    the safetensors file of one unit, written and read with its checksums
rows     which texts are there, where the rows of each lie, and a site as a lazy array
writer   makes a store, and commits units
verify   reads every byte of a store; removes what nobody needs
export   the rows in formats of other programs
store    opens a store, and reads it as States are read

A sequence is what the model is given: the tokens of a text, or of one window of a long
text. A row is one vector of a site: a token's, or where states are pooled a sequence's.

The format is in docs/store-format.md. Nothing here imports torch.
"""

from hiddenscope.store.plan import StorePlan, StoreSequence, UnitDigest
from hiddenscope.store.store import Store, open  # noqa: A004
from hiddenscope.store.verify import damaged_texts, discard_damaged, gc, verify
from hiddenscope.store.writer import Writer, create, recover_plan, resume_store

__all__ = [
    "Store",
    "StorePlan",
    "StoreSequence",
    "UnitDigest",
    "Writer",
    "create",
    "damaged_texts",
    "discard_damaged",
    "gc",
    "open",
    "recover_plan",
    "resume_store",
    "verify",
]
