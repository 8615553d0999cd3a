"""`BundleWriter`: writes the files of a bundle, its manifest last.

    with BundleWriter("bundle") as writer:
        where = writer.add_tensors("weights/float32", {"w": TensorBytes("float32", (2, 3), data)})
        writer.add("plans/float32-forward.json", text)
        manifest = writer.finish(manifest)

Beside each file of text is a compressed one, with ``.gz`` behind its name, for servers that send
such files in place of the others: kernels and plans are a tenth then. No manifest lists them, nor
what lies beside a bundle for pages (`BESIDE`).

Files are written into a folder within the bundle's, and moved to their places when all of them are
there. Until then an older bundle in the same folder stays as it was; without its manifest, which is
moved last, a folder is no bundle.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from ..dtypes import BY_NAME
from ..errors import BundleError
from ..plan.codec import codec_of
from .hashing import file_of, is_file_name
from .manifest import CHUNK_NBYTES, FORMAT, MANIFEST, File, Manifest
from .tensors import read_header

SHARD_NBYTES = 64 << 20
"""Of a file with weights. Where static sites are hosted, files of 100 MB are too large."""

_MODULES = ("", "-composed", "-report", "-image", "-audio", "-text")
_KINDS = ("js", "d.ts", "LICENSES.txt")
BESIDE = (
    "bundle.d.ts",
    *(f"torch-webgpu{module}.{kind}" for module in _MODULES for kind in _KINDS),
)
"""What may lie in a bundle's folder for pages: its types, the runtime, and the runtime's types."""

_STAGING = ".writing"
_COMPRESSED = ".gz"
_HEADER_NBYTES = 160  # of a tensor in a safetensors header, without its name: at most


@dataclass(frozen=True, slots=True)
class TensorBytes:
    """A tensor: PyTorch's name of its dtype, its sizes, and its elements in rows, as uint8."""

    dtype: str
    sizes: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class BundleWriter:
    """Writes a bundle into a folder that is new, empty, or holds a bundle, which it replaces.

    As a context manager it removes what it has written where it was not finished.

    Args:
        path: the folder.
        shard_nbytes: the largest file with weights; a larger tensor has a file of its own.

    Attributes:
        files: what has been written, by name.

    Raises:
        BundleError: the folder holds something else.
        OSError: it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], shard_nbytes: int = SHARD_NBYTES) -> None:
        self._path = Path(path)
        self._shard_nbytes = shard_nbytes
        self._staging = self._path / _STAGING
        self.files: dict[str, File] = {}
        if not _may_be_replaced(self._path):
            raise BundleError(
                path, "this is not empty, and holds no bundle", "name another folder, or empty it"
            )
        self._is_new = not self._path.exists()
        shutil.rmtree(self._staging, ignore_errors=True)  # of a writer that was interrupted
        self._staging.mkdir(parents=True)

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        if self._is_new:
            with suppress(OSError):  # it is not empty: it was finished
                self._path.rmdir()

    def add(self, name: str, data: bytes | str) -> None:
        """Writes a file; text as UTF-8.

        Raises:
            BundleError: there is a file of this name, or no file may have it.
        """
        path = self._place(name)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
        self.files[name] = file_of(path)

    def add_tensors(
        self, stem: str, tensors: Mapping[str, TensorBytes]
    ) -> dict[str, tuple[str | None, int]]:
        """Writes tensors to the files ``<stem>-00001.safetensors`` and so on.

        Args:
            stem: what the names of the files start with.
            tensors: by name.

        Returns:
            By name, the file and the offset of the first byte in it; (None, 0) for a tensor of
            which all bytes are 0, which is not written.

        Raises:
            BundleError: a tensor has another number of bytes than its sizes say, or as in `add`.
        """
        for name, tensor in tensors.items():
            self._check(name, tensor)
        where: dict[str, tuple[str | None, int]] = dict.fromkeys(tensors, (None, 0))
        stored = [name for name, tensor in tensors.items() if tensor.data.any()]
        nbytes = {
            name: tensors[name].data.nbytes + _HEADER_NBYTES + 6 * len(name) for name in stored
        }
        for number, names in enumerate(_shards(stored, nbytes, self._shard_nbytes), 1):
            file = f"{stem}-{number:05}.safetensors"
            path = self._place(file)
            write_tensors(path, {name: tensors[name] for name in names})
            self.files[file] = file_of(path)
            where |= {name: (file, found.offset) for name, found in read_header(path).items()}
        return where

    def finish(self, manifest: Manifest, beside: Mapping[str, bytes] | None = None) -> Manifest:
        """Writes the manifest and moves all files to their places.

        Args:
            manifest: its ``files`` and ``chunk_nbytes`` are filled in.
            beside: contents of files of `BESIDE`; those that are not given are removed, as an older
                runtime may not run the bundle.

        Returns:
            The manifest as it was written.
        """
        manifest = replace(manifest, files=self.files, chunk_nbytes=CHUNK_NBYTES)
        text = json.dumps(codec_of(Manifest).encode(manifest), allow_nan=False, indent=1)
        (self._staging / MANIFEST).write_text(text + "\n", encoding="utf-8")
        beside = beside or {}
        for name, data in beside.items():
            (self._staging / name).write_bytes(data)
        before = _files_in(self._path)
        for name in (MANIFEST, *before, *BESIDE):
            for suffix in (_COMPRESSED, ""):
                (self._path / f"{name}{suffix}").unlink(missing_ok=True)
        for name in (*beside, *self.files, MANIFEST):
            (self._path / name).parent.mkdir(parents=True, exist_ok=True)
            if name.endswith((".json", ".js")):
                data = gzip.compress((self._staging / name).read_bytes(), mtime=0)
                (self._path / f"{name}{_COMPRESSED}").write_bytes(data)
            os.replace(self._staging / name, self._path / name)
        shutil.rmtree(self._staging)
        for folder in {self._path / name.rpartition("/")[0] for name in before}:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        return manifest

    def _place(self, name: str) -> Path:
        if not is_file_name(name):
            raise BundleError(
                self._path, f"no file may be named {name!r}", "use letters, digits, _, - and ."
            )
        if name in self.files:
            raise BundleError(self._path, f"two files are named {name}", "name one differently")
        path = self._staging / PurePosixPath(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _check(self, name: str, tensor: TensorBytes) -> None:
        nbytes = prod(tensor.sizes) * BY_NAME[tensor.dtype].itemsize
        found = tensor.data.nbytes
        if found != nbytes:
            raise BundleError(
                self._path,
                f"{name}, {tensor.dtype} {tensor.sizes}, has {found} bytes, not {nbytes}",
                "give all of its elements, in rows without gaps",
            )


def write_tensors(
    path: Path, tensors: Mapping[str, TensorBytes], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file. Raises OSError, or the library's own error.

    Others may read it as they may read what ``open`` makes: a web server is another user.
    """
    specs = {
        name: TensorSpec(
            dtype=tensor.dtype,
            shape=list(tensor.sizes),
            data_ptr=tensor.data.ctypes.data,
            data_len=tensor.data.nbytes,
        )
        for name, tensor in tensors.items()
    }
    # safetensors moves a temporary file of mode 0600 to the path; the umask, which is of the whole
    # process, cannot be read without changing it, so an empty file shows the mode.
    path.unlink(missing_ok=True)
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    serialize_file(specs, path, metadata)  # reads the memory of `tensors`
    path.chmod(mode)


def _shards(
    names: Sequence[str], nbytes: Mapping[str, int], most_nbytes: int
) -> Iterator[list[str]]:
    """Names in order, in groups of at most so many bytes if they have more than one member."""
    group: list[str] = []
    total = 0
    for name in names:
        if group and total + nbytes[name] > most_nbytes:
            yield group
            group, total = [], 0
        group.append(name)
        total += nbytes[name]
    if group:
        yield group


def _may_be_replaced(path: Path) -> bool:
    if not path.exists():
        return True
    if not path.is_dir():
        return False
    found = {entry.name for entry in path.iterdir()}
    return not found or _STAGING in found or _manifest_in(path) is not None


def _manifest_in(path: Path) -> dict[str, Any] | None:
    """The manifest of a bundle of any version; None where there is none."""
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_one = isinstance(manifest, dict) and manifest.get("format") == FORMAT
    return manifest if is_one else None


def _files_in(path: Path) -> list[str]:
    """The files that a bundle's manifest lists; none where there is no bundle."""
    files = (_manifest_in(path) or {}).get("files")
    return [name for name in files if is_file_name(name)] if isinstance(files, dict) else []
