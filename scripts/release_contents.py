"""Checks that a wheel has the package and nothing else, and an sdist what builds and documents it.

python scripts/release_contents.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

PACKAGE = "torch_webgpu_compile"
FOLDERS = (PACKAGE, "tests", "web", "docs", "examples", "benchmarks", "scripts")


def main(folder: Path) -> None:
    """Raises SystemExit with what is missing and what is too much."""
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    compare(wheel.name, packed, tracked(PACKAGE))
    with tarfile.open(sdist) as archive:
        names = (name.partition("/")[2] for name in archive.getnames())
        packed = {name for name in names if name.startswith(tuple(f"{f}/" for f in FOLDERS))}
    compare(sdist.name, packed, tracked(*FOLDERS))


def tracked(*folders: str) -> set[str]:
    """The files of folders that git knows."""
    command = ["git", "ls-files", "-z", *folders]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(listed.split("\0")) - {""}


def compare(name: str, packed: set[str], expected: set[str]) -> None:
    """Raises SystemExit where the two differ."""
    if packed != expected:
        raise SystemExit(
            f"{name} lacks {sorted(expected - packed)[:20]} and has, without being committed,"
            f" {sorted(packed - expected)[:20]}"
        )
    print(f"{name}: {len(packed)} files, as committed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
