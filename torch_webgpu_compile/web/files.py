"""The files of a bundle: `BundleWriter` writes them, `BundleFiles` reads and checks them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import TensorSpec, serialize_file

from ..errors import BundleError
from ..plan.codec import codec_of, read_json
from .manifest import CHUNK_NBYTES, FORMAT, VERSION, File, Manifest

MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*\.(json|safetensors)")


@dataclass(frozen=True)
class TensorBytes:
    """A tensor as bytes: its dtype's name in PyTorch, its sizes, and uint8 of elements in rows."""

    dtype: str
    sizes: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class BundleWriter:
    """Writes a bundle. It is in its place once it is finished, and not before.

    Args:
        path: the folder. It may be new or empty, or hold a bundle, which is replaced.
        shard_nbytes: most bytes of tensors in a file, but for larger tensors.

    Raises:
        BundleError: the folder holds something else.
    """

    def __init__(self, path: Path, shard_nbytes: int = 64 << 20) -> None:
        self._path = path.resolve()
        self._shard_nbytes = shard_nbytes
        if self._path.exists() and not _is_replaceable(self._path):
            raise BundleError(f"{path} holds something else than a bundle; choose another folder")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.mkdtemp(prefix=f".{self._path.name}-", dir=self._path.parent)
        self._folder = Path(made)
        self._folder.chmod(0o755)
        self._files: dict[str, File] = {}

    def __enter__(self) -> BundleWriter:
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)  # what was not finished

    def add(self, name: str, data: bytes) -> None:
        """Adds a file."""
        self._new(name).write_bytes(data)
        self._note(name)

    def add_tensors(
        self, stem: str, tensors: Mapping[str, TensorBytes]
    ) -> dict[str, tuple[str, int]]:
        """Adds safetensors files; where each tensor is: the file, and its first byte in that.

        Tensors whose bytes are all 0 are left out.
        """
        places: dict[str, tuple[str, int]] = {}
        kept = {name: tensor for name, tensor in tensors.items() if tensor.data.any()}
        for number, shard in enumerate(self._shards(kept), 1):
            name = f"{stem}-{number:05}.safetensors"
            path = self._new(name)
            write_tensors(path, shard)
            start, header = read_header(path)
            for label in shard:
                places[label] = (name, start + header[label]["data_offsets"][0])
            self._note(name)
        return places

    def finish(self, manifest: Manifest) -> None:
        """Writes the manifest, with the files so far, and puts the bundle in its place."""
        whole = replace(manifest, files=self._files, chunk_nbytes=CHUNK_NBYTES)
        text = json.dumps(codec_of(Manifest).encode(whole), allow_nan=False, indent=1)
        (self._folder / MANIFEST).write_text(text, encoding="utf-8")
        if self._path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self._path.name}-", dir=self._path.parent))
            os.replace(self._path, old)  # a folder takes the place of an empty one
            os.replace(self._folder, self._path)
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(self._folder, self._path)

    def _shards(self, tensors: Mapping[str, TensorBytes]) -> Iterator[dict[str, TensorBytes]]:
        shard: dict[str, TensorBytes] = {}
        nbytes = 0
        for name, tensor in tensors.items():
            if shard and nbytes + tensor.data.nbytes > self._shard_nbytes:
                yield shard
                shard, nbytes = {}, 0
            shard[name] = tensor
            nbytes += tensor.data.nbytes
        if shard:
            yield shard

    def _new(self, name: str) -> Path:
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _note(self, name: str) -> None:
        whole, chunks = hashlib.sha256(), []
        path = self._folder / name
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_NBYTES):
                whole.update(chunk)
                chunks.append(hashlib.sha256(chunk).hexdigest())
        self._files[name] = File(path.stat().st_size, whole.hexdigest(), tuple(chunks))


def write_tensors(path: Path, tensors: Mapping[str, TensorBytes]) -> None:
    """Writes a safetensors file."""
    specs = {
        name: TensorSpec(
            dtype=t.dtype,
            shape=list(t.sizes),
            data_ptr=t.data.ctypes.data,
            data_len=t.data.nbytes,
        )
        for name, t in tensors.items()
    }
    serialize_file(specs, path)  # the arrays live as long as `tensors` does


def _is_replaceable(path: Path) -> bool:
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or not any(path.iterdir())


def read_header(path: Path) -> tuple[int, dict[str, Any]]:
    """Where the data of a safetensors file starts, and what its header says."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header: dict[str, Any] = json.loads(file.read(length))
    return 8 + length, header


class BundleFiles:
    """Reads the files of a bundle, whose manifest may say anything.

    Attributes:
        manifest: as it is in the file: of the right types, and not verified otherwise.

    Raises:
        BundleError: there is no manifest, or not one of this version.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            text = (path / MANIFEST).read_bytes()
        except OSError as error:
            raise BundleError(f"{path} is no bundle ({error.strerror}: {MANIFEST})") from error
        self.manifest = decode_manifest(text)

    def read(self, name: str) -> bytes:
        """A whole file. Raises BundleError where it is not what the manifest says."""
        return b"".join(chunk for _, chunk in self.chunks(name))

    def chunks(
        self, name: str, start: int = 0, end: int | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """(first byte, content) of the chunks that hold the bytes start … end of a file.

        Raises:
            BundleError: the file is missing, too short or too long, or a chunk has another hash.
        """
        entry, size = self.manifest.files[name], self.manifest.chunk_nbytes
        end = entry.nbytes if end is None else end
        path = self.path / name
        try:
            if path.stat().st_size != entry.nbytes:
                raise BundleError(
                    f"{path} has {path.stat().st_size} bytes, the manifest says {entry.nbytes}; "
                    "copy or export the bundle again"
                )
            with path.open("rb") as file:
                for number in range(start // size, -(-end // size)):
                    file.seek(number * size)
                    chunk = file.read(size)
                    if hashlib.sha256(chunk).hexdigest() != entry.chunks[number]:
                        raise BundleError(
                            f"{path} is damaged: chunk {number} has another SHA-256; copy or "
                            "export the bundle again"
                        )
                    yield number * size, chunk
        except OSError as error:
            raise BundleError(f"{path} cannot be read ({error.strerror})") from error


def decode_manifest(text: bytes) -> Manifest:
    """A manifest from its JSON. Raises BundleError for anything else."""
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError("it is of no bundle")
        if data.get("version") != VERSION:
            raise BundleError(
                f"the bundle has version {data.get('version')!r}, this package reads {VERSION}; "
                "export the model again"
            )
        manifest: Manifest = read_json(Manifest, text)
    except BundleError:
        raise
    except (ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise BundleError(f"{MANIFEST}: {error}; export the model again") from error
    return manifest
