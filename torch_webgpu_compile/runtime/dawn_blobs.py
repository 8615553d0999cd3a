"""What Dawn's compilers made, kept in the cache folder: its parsed WGSL, SPIR-V, pipelines.

Dawn asks for it by keys of its own, with its version, the adapter and everything else in them that
its blobs follow from: ``BlobCache.cpp`` and ``CacheRequest.h``. It does so in whichever thread
creates a pipeline, without a lock of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..plan.cache_folder import digest_of
from ..plan.stored_entries import read_entry, write_entry
from .interface import Handle

DAWN_VERSION = "v20261009.190412"
"""The version that `descriptor` is of: its struct is in no header of wgpudawn."""

_STYPE = 0x00050007  # webgpu.h, WGPUSType_DawnCacheDeviceDescriptor
_LOAD = "size_t(size_t, uint8_t const *, size_t, uint8_t *, void *, void *)"
_STORE = "void(size_t, uint8_t const *, size_t, uint8_t const *, void *, void *)"


class BlobCache:
    """The two callbacks; any thread may call them.

    Args:
        ffi: Dawn's.
        folder: the cache folder.
    """

    def __init__(self, ffi: Any, folder: str) -> None:
        self._ffi = ffi
        self._folder = folder
        self._found: dict[int, bytes] = {}  # by the thread that is about to ask for it again

    def load(self, key_nbytes: int, key: Handle, nbytes: int, blob: Handle, *_: Any) -> int:
        """The size in bytes of a key's blob, 0 without one; then Dawn asks again with memory."""
        thread = threading.get_ident()
        if not nbytes:
            content = read_entry(self._name(key_nbytes, key), "dawn", self._folder)
            if content:
                self._found[thread] = content
            return len(content or b"")
        content = self._found.pop(thread, b"")
        if len(content) != nbytes:
            return 0
        self._ffi.memmove(blob, content, nbytes)
        return nbytes

    def store(self, key_nbytes: int, key: Handle, nbytes: int, blob: Handle, *_: Any) -> None:
        """Keeps a blob."""
        content = self._ffi.buffer(blob, nbytes)[:]
        write_entry(self._name(key_nbytes, key), "dawn", content, self._folder)

    def _name(self, key_nbytes: int, key: Handle) -> str:
        return digest_of((self._ffi.buffer(key, key_nbytes)[:],))


def descriptor(
    ffi: Any, blobs: BlobCache, on_interrupt: Callable[..., None]
) -> tuple[Handle, tuple[Any, ...]]:
    """(a WGPUDawnCacheDeviceDescriptor for a device's, its callbacks, which the device needs).

    Args:
        on_interrupt: called with an exception that one of them raised, as cffi does.
    """
    load = ffi.callback(_LOAD, blobs.load, error=0, onerror=on_interrupt)
    store = ffi.callback(_STORE, blobs.store, onerror=on_interrupt)
    # Members as words: chain (next, sType); isolationKey (data, length); for each of the two
    # callbacks (nextInChain, callback, userdata1, userdata2).
    words = ffi.new("uintptr_t[12]")
    words[1] = _STYPE
    words[5], words[9] = (int(ffi.cast("uintptr_t", callback)) for callback in (load, store))
    return words, (load, store)
