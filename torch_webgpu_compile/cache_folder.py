"""`CacheFolder`: entries on disk that may be missing, damaged or somebody else's.

An entry is a line, its header, and its content:

    torch_webgpu_compile 1 <key> <nbytes> <SHA-256 of key and content>

What has not the key that is asked for, or another checksum, is not there. The checksum finds
accidents: a full disk, a flipped bit, a file that was renamed or cut. Whoever can write into the
folder can also compute checksums, so a folder that others may write to is not used.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from pathlib import Path

from .files import read_regular, writable_by_others, write_atomically

_FORMAT = b"torch_webgpu_compile 1"
_MAX_NBYTES = 1 << 30
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


class CacheWarning(UserWarning):
    """A cache folder cannot be used. Given once per folder and cause; work goes on without it."""


class CacheFolder:
    """Entries of a folder, by name. Nothing here raises OSError.

    Args:
        path: the folder, which need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def read(self, name: str, key: str) -> bytes | None:
        """The content that was written under this name and key; None if there is none."""
        try:
            if not self._is_private():
                return None
            entry = read_regular(self._path / name, _MAX_NBYTES)
        except (OSError, ValueError):  # ValueError: a path with a null character
            return None
        header, _, content = entry.partition(b"\n")
        return content if header == _header(key, content) else None

    def write(self, name: str, key: str, content: bytes) -> None:
        """Replaces an entry. Warns, once, if the folder cannot be used."""
        header = _header(key, content)
        if len(header) + 1 + len(content) > _MAX_NBYTES:
            return
        try:
            if not self._path.exists() or self._is_private():
                write_atomically(self._path / name, header + b"\n" + content)
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            self._warn(cause, "make room in it, make it writable, or choose another one")

    def _is_private(self) -> bool:
        """Whether only this user may write to the folder; raises OSError if there is none."""
        others = writable_by_others(self._path)
        if others:
            self._warn(others, "take that permission away (chmod go-w), or choose another one")
        return not others

    def _warn(self, cause: str, next_step: str) -> None:
        with _lock:
            key = str(self._path), cause
            if key in _warned:
                return
            _warned.add(key)
        warnings.warn(
            f"the cache folder {self._path} is not used: {cause}; {next_step} "
            "(TORCH_WEBGPU_CACHE=0 is none). Everything else works as before",
            CacheWarning,
            stacklevel=2,
        )


def _header(key: str, content: bytes) -> bytes:
    digest = hashlib.sha256(key.encode())
    digest.update(b"\n")
    digest.update(content)
    return f"{_FORMAT.decode()} {key} {len(content)} {digest.hexdigest()}".encode()
