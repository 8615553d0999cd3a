"""Files of a bundle: allowed names, and hashes, made or checked piece by piece."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import BundleError
from .manifest import CHUNK_NBYTES, MANIFEST, File

_NAME = re.compile(r"[\w-]+(\.\w[\w-]*)*(/[\w-]+(\.\w[\w-]*)*)*", re.ASCII)
_KINDS = (".json", ".safetensors")
_MAX_NAME = 200

_COPY_AGAIN = "copy the bundle again from where it is whole, or export it again"


def is_file_name(name: str) -> bool:
    """Whether a bundle may have a file of this name, wherever it is: in a folder or on a server.

    That are letters, digits and ``_.-`` between slashes: nothing absolute, no ``..``, no URL. The
    length is bounded before the pattern sees it.
    """
    is_file = len(name) <= _MAX_NAME and name.endswith(_KINDS) and name != MANIFEST
    return is_file and _NAME.fullmatch(name) is not None


class Digest:
    """The hashes of a file of which the pieces come one by one.

    Args:
        chunk_nbytes: as `Manifest.chunk_nbytes`.
    """

    def __init__(self, chunk_nbytes: int) -> None:
        self._chunk_nbytes = chunk_nbytes
        self._whole, self._chunk = hashlib.sha256(), hashlib.sha256()
        self._chunks: list[str] = []
        self._nbytes = 0

    def add(self, piece: memoryview) -> None:
        """The next bytes, however many."""
        self._whole.update(piece)
        while piece:
            part = piece[: self._chunk_nbytes - self._nbytes % self._chunk_nbytes]
            self._chunk.update(part)
            self._nbytes += len(part)
            piece = piece[len(part) :]
            if self._nbytes % self._chunk_nbytes == 0:
                self._end_chunk()

    def _end_chunk(self) -> None:
        self._chunks.append(self._chunk.hexdigest())
        self._chunk = hashlib.sha256()

    def file(self) -> File:
        """The file, after its last piece."""
        if self._nbytes % self._chunk_nbytes:
            self._end_chunk()
        return File(self._nbytes, self._whole.hexdigest(), tuple(self._chunks))


def file_of(path: Path) -> File:
    """A file as a manifest has it. Raises OSError."""
    digest = Digest(CHUNK_NBYTES)
    for piece in _pieces(path):
        digest.add(piece)
    return digest.file()


def check_presence(path: Path, expected: File) -> None:
    """Raises BundleError where there is no file of the expected length."""
    try:
        status = path.stat()
    except OSError as error:
        raise BundleError(path, f"it cannot be read ({error.strerror})", _COPY_AGAIN) from error
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would wait, and a device never end
        raise BundleError(path, "it is no file", _COPY_AGAIN)
    if status.st_size != expected.nbytes:
        cause = f"it has {status.st_size:,} bytes, the manifest says {expected.nbytes:,}"
        raise BundleError(path, cause, _COPY_AGAIN)


def checked_pieces(path: Path, expected: File, chunk_nbytes: int) -> Iterator[memoryview]:
    """The bytes of a file in order. A piece is valid until the next one is asked for.

    What was read is only to be relied on after the last piece.

    Raises:
        BundleError: the file is missing, or it is not the expected one.
    """
    check_presence(path, expected)
    digest = Digest(chunk_nbytes)
    try:
        for piece in _pieces(path):
            digest.add(piece)
            yield piece
    except OSError as error:
        raise BundleError(path, f"it cannot be read ({error.strerror})", _COPY_AGAIN) from error
    if digest.file() != expected:
        cause = "its SHA-256 is not the one in the manifest: the file was damaged or changed"
        raise BundleError(path, cause, _COPY_AGAIN)


def _pieces(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(CHUNK_NBYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            yield memoryview(buffer)[:count]
