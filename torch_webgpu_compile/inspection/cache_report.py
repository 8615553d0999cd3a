"""``python -m torch_webgpu_compile cache``."""

from __future__ import annotations

from ..options import from_environment
from ..plan.stored_entries import KINDS, MAX_NBYTES, remove, stored_entries


def cache(clear: bool = False) -> int:
    """Prints the cache folder, and how many entries of what size are in it; the exit code.

    ``clear``: removes them first. What was measured of this machine's GPU stays.
    """
    folder = from_environment().cache
    if folder is None:
        print("There is no cache folder: TORCH_WEBGPU_CACHE is 0, or this user has no home folder.")
        return 0
    print(f"Cache folder: {folder}")
    if clear:
        print(f"Removed:      {remove(stored_entries(folder)):,} files")
    entries = stored_entries(folder)
    label = "In it:"
    for kind, name in KINDS.items():
        sizes = [entry.nbytes for entry in entries if entry.kind == kind]
        print(f"{label:13} {len(sizes):,} {name}, {sum(sizes):,} bytes")
        label = ""
    print(f"{label:13} {sum(e.nbytes for e in entries):,} of {MAX_NBYTES:,} bytes in all")
    return 1 if clear and entries else 0
