"""`CacheFolder`: entries on disk that may be missing, damaged or somebody else's.

An entry is a line, its header, and its content:

    torch_webgpu_compile 1 <key> <nbytes> <SHA-256 of key and content>

What has not the key that is asked for, or another checksum, is not there. The checksum finds
accidents: a full disk, a flipped bit, a file that was renamed or cut. Whoever can write into the
folder can also compute checksums, so a folder that others may write to is not used.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
import threading
import warnings
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ..options import default_cache

_FORMAT = b"torch_webgpu_compile 1"
_MAX_NBYTES = 1 << 30
_warned: set[tuple[str, str]] = set()
_lock = threading.Lock()


class CacheWarning(UserWarning):
    """A cache folder cannot be used. Given once per folder and cause; work goes on without it.

    Nobody asked for the default folder: that it cannot be used is no warning.
    """


class CacheFolder:
    """Entries of a folder, by name. Nothing here raises OSError.

    Args:
        path: the folder, which need not exist.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)

    def read(self, name: str, key: str) -> bytes | None:
        """The content that was written under this name and key; None if there is none.

        It is marked as used now.
        """
        try:
            if not self._is_private():
                return None
            entry = read_regular(self._path / name, _MAX_NBYTES)
        except (OSError, ValueError):  # ValueError: a path with a null character
            return None
        header, _, content = entry.partition(b"\n")
        if header != _header(key, content):
            return None
        with suppress(OSError):
            os.utime(self._path / name)
        return content

    def write(self, name: str, key: str, content: bytes) -> bool:
        """Replaces an entry; whether it did. Warns, once, if the folder cannot be used."""
        header = _header(key, content)
        if len(header) + 1 + len(content) > _MAX_NBYTES:
            return False
        try:
            if not self._path.exists() or self._is_private():
                write_atomically(self._path / name, header + b"\n" + content)
                return True
        except (OSError, ValueError) as error:
            cause = getattr(error, "strerror", None) or str(error)
            self._warn(cause, "make room in it, make it writable, or choose another one")
        return False

    def _is_private(self) -> bool:
        """Whether only this user may write to the folder; raises OSError if there is none."""
        others = writable_by_others(self._path)
        if others:
            self._warn(others, "take that permission away (chmod go-w), or choose another one")
        return not others

    def _warn(self, cause: str, next_step: str) -> None:
        default = default_cache()
        if default is not None and self._path.is_relative_to(default):
            return
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
    digest = digest_of((key.encode(), content))
    return f"{_FORMAT.decode()} {key} {len(content)} {digest}".encode()


def digest_of(parts: Iterable[bytes]) -> str:
    """The SHA-256 of parts, each followed by a null byte, in hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
        digest.update(b"\0")
    return digest.hexdigest()


# A pipe without a writer must not block; a link is not followed. Not every system has each.
_READ = os.O_RDONLY | sum(
    getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOFOLLOW", "O_CLOEXEC", "O_BINARY")
)


def read_regular(path: Path, max_nbytes: int) -> bytes:
    """The content of a regular file.

    Raises:
        OSError: it cannot be read, is something else (a folder, a pipe, a device, a link), or has
            more than ``max_nbytes``.
    """
    handle = os.open(path, _READ)
    with os.fdopen(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if status.st_size > max_nbytes:
            raise OSError(errno.EFBIG, f"larger than {max_nbytes:,} bytes", str(path))
        content = file.read(max_nbytes + 1)
    if len(content) > max_nbytes:  # it grew
        raise OSError(errno.EFBIG, f"larger than {max_nbytes:,} bytes", str(path))
    return content


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file so that no reader ever sees half of it. Raises OSError.

    Its folder, and those above it, are made; the folder is then for this user alone.
    """
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handle, temporary = tempfile.mkstemp(".tmp", f"{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise


def writable_by_others(folder: Path) -> str:
    """Other users who may write into a folder, for a message; "" for nobody.

    The group that has only this user's name is this user. Always "" where files have no modes.
    Raises OSError when there is no such folder.
    """
    if os.name != "posix":
        return ""
    status = os.stat(folder)
    if status.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & stat.S_IWOTH:
        return "every user may write to it"
    if status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid):
        return f"its group {status.st_gid} may write to it"
    return ""


def _is_own_group(group: int) -> bool:
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}
