"""Serves a folder of files as a static host does: ranges, compressed files, a content policy."""

from __future__ import annotations

import argparse
import functools
import http.server
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

POLICY = (
    "default-src 'self'; script-src 'self'; img-src 'self' data: blob:; object-src 'none'; "
    "base-uri 'self'"
)


class Handler(http.server.SimpleHTTPRequestHandler):
    """``Range: bytes=a-b`` is answered with that part; nothing is cached without asking again."""

    extensions_map = {  # noqa: RUF012  (the base class's)
        **http.server.SimpleHTTPRequestHandler.extensions_map,
        ".js": "text/javascript",
        ".mjs": "text/javascript",
        ".json": "application/json",
        ".safetensors": "application/octet-stream",
    }
    quiet = False

    def log_message(self, *args: Any) -> None:
        if not self.quiet:
            super().log_message(*args)

    def end_headers(self) -> None:
        self.send_header("Content-Security-Policy", POLICY)
        self.send_header("Cache-Control", "no-cache")
        self.send_header("Accept-Ranges", "bytes")
        super().end_headers()

    def send_head(self) -> Any:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        path = self.translate_path(self.path)
        if asked is None and "gzip" in self.headers.get("Accept-Encoding", ""):
            with suppress(OSError):
                return self._compressed(path)
        if asked is None or not os.path.isfile(path):
            return super().send_head()
        size = os.path.getsize(path)
        start = int(asked[1])
        end = min(int(asked[2] or size - 1), size - 1)
        if start > end:
            self.send_error(416)
            return None
        file = open(path, "rb")  # noqa: SIM115  (the caller closes it)
        file.seek(start)
        self.send_response(206)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Range", f"bytes {start}-{end}/{size}")
        self.send_header("Content-Length", str(end - start + 1))
        self.end_headers()
        return _Part(file, end - start + 1)

    def _compressed(self, path: str) -> Any:
        """The compressed file beside one. Raises OSError: there is none, or it is older."""
        if os.path.getmtime(f"{path}.gz") < os.path.getmtime(path):
            raise FileNotFoundError(path)
        file = open(f"{path}.gz", "rb")  # noqa: SIM115  (the caller closes it)
        self.send_response(200)
        self.send_header("Content-Type", self.guess_type(path))
        self.send_header("Content-Encoding", "gzip")
        self.send_header("Vary", "Accept-Encoding")
        self.send_header("Content-Length", str(os.fstat(file.fileno()).st_size))
        self.end_headers()
        return file

    def copyfile(self, source: Any, outputfile: Any) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the page has seen enough
            super().copyfile(source, outputfile)


class _Part:
    """The next bytes of a file."""

    def __init__(self, file: Any, left: int) -> None:
        self._file, self._left = file, left

    def read(self, count: int = -1) -> bytes:
        count = self._left if count < 0 else min(count, self._left)
        data: bytes = self._file.read(count)
        self._left -= len(data)
        return data

    def close(self) -> None:
        self._file.close()


@contextmanager
def serving(
    folder: Path, port: int = 0, handler: type[Handler] = Handler
) -> Iterator[http.server.ThreadingHTTPServer]:
    """A server of a folder on this machine alone, in a thread of its own."""
    made = functools.partial(handler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), made)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    try:
        with serving(options.folder, options.port) as server:
            print(f"http://localhost:{server.server_port}/    (Ctrl-C ends it)", flush=True)
            threading.Event().wait()
    except KeyboardInterrupt:
        print()
    except OSError as error:
        parser.exit(1, f"port {options.port}: {error.strerror}; take another one with --port\n")


if __name__ == "__main__":
    main()
