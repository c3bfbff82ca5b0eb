"""Chaos: faults done to stores and to jobs, at length: `make chaos`. `make test` does a
slice of the same.
"""

import os
import shutil

IN_MEMORY = "/dev/shm"
ENOUGH = 2**30  # bytes: containers often have 64 MiB there


def memory_folder() -> str | None:
    """A folder in memory for temporary files, since a job waits for the disk after
    every file; None without room.
    """
    there = os.path.isdir(IN_MEMORY) and os.access(IN_MEMORY, os.W_OK)
    return IN_MEMORY if there and shutil.disk_usage(IN_MEMORY).free >= ENOUGH else None
