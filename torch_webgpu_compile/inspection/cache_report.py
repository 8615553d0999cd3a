"""``python -m torch_webgpu_compile cache``."""

from __future__ import annotations

from ..options import from_environment
from ..plan.stored_plans import MAX_NBYTES, remove, stored_plans


def cache(clear: bool = False) -> int:
    """Prints the cache folder, and how many plans of what size are in it; the exit code.

    ``clear``: removes them first. What was measured of this machine's GPU stays.
    """
    folder = from_environment().cache
    if folder is None:
        print("There is no cache folder: TORCH_WEBGPU_CACHE is 0, or this user has no home folder.")
        return 0
    print(f"Cache folder: {folder}")
    if clear:
        print(f"Removed:      {remove(stored_plans(folder)):,} compiled plans")
    plans = stored_plans(folder)
    nbytes = sum(plan.nbytes for plan in plans)
    print(f"In it:        {len(plans):,} compiled plans, {nbytes:,} of {MAX_NBYTES:,} bytes")
    return 1 if clear and plans else 0
