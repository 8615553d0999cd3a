"""Files that other processes may be reading, or may have put there."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

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
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink(missing_ok=True)
        raise


def writable_by_others(folder: Path) -> str:
    """Who besides this user may write into a folder, for a message; "" for nobody.

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
