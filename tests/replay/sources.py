"""Trees whose packages are replayed, and the folder that keeps their recordings."""

from __future__ import annotations

import ast
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, ASKING = "torch_webgpu_compile", "tests/replay/package.py"
RECORDER = "tests/replay/recorder.py"
KEPT = 16
"""Recordings of so many trees stay."""


class ReplayError(Exception):
    """A comparison cannot be made; the message says why and what to do."""


@dataclass(frozen=True)
class Tree:
    """A package that programs are compiled with.

    Attributes:
        label: for a person.
        root: the folder in which the package is.
        asking: its `tests.replay.package`, or ours where it has none.
        has_own: whether it has one.
        programs: the root of what is compiled, and of the recorder.
    """

    label: str
    root: Path
    asking: Path
    has_own: bool
    programs: Path = ROOT

    def key(self, targets: str) -> str:
        """Equal for trees whose recordings are equal: a digest of all that they follow from."""
        digest = hashlib.sha256()
        files = sorted(p for p in (self.root / PACKAGE).rglob("*") if _is_source(p))
        for path in files:
            digest.update(f"{path.relative_to(self.root)}\0".encode() + path.read_bytes())
        for path in (self.asking, *imported(self.programs)):
            digest.update(path.read_bytes())
        # Nodes name lines of libraries by their paths, which are those of the environment.
        environment = f"{sys.prefix} {sys.version} {list(map(_version, _OTHERS))}"
        digest.update(f"{targets} {environment}".encode())
        return digest.hexdigest()[:24]


_OTHERS = ("torch", "transformers", "diffusers", "numpy")


def imported(root: Path) -> list[Path]:
    """The recorder and the files of its repository that it imports, but for the package."""
    found, waiting = dict[Path, None](), [root / RECORDER]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = None
            waiting += file.parent.glob("__init__.py")
            for node in ast.walk(ast.parse(file.read_bytes())):
                if isinstance(node, ast.ImportFrom):
                    waiting += _modules(root, file, node)
    return sorted(found)


def _modules(root: Path, file: Path, node: ast.ImportFrom) -> list[Path]:
    """Of ``from tests.golden import graphs`` and ``from .cases import CASES``."""
    folder = file.parents[node.level - 1] if node.level else root
    module = folder.joinpath(*(node.module or "").split("."))
    if not module.is_relative_to(root) or module.is_relative_to(root / PACKAGE):
        return []
    places = [module, *(module / alias.name for alias in node.names)]
    return [p for place in places if (p := place.with_suffix(".py")).is_file()]


@contextmanager
def programs_of_now() -> Iterator[Path]:
    """The root of a copy of what is compiled: whoever works on it does not change a run."""
    with TemporaryDirectory(prefix="replay-") as folder:
        root = Path(folder)
        for file in imported(ROOT):
            copy = root / file.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, copy)
        yield root


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _is_source(path: Path) -> bool:
    return path.is_file() and path.suffix != ".pyc"


@contextmanager
def working_tree(programs: Path) -> Iterator[Tree]:
    """A copy of the package that this file belongs to, as it is now."""
    with TemporaryDirectory(prefix="replay-") as folder:
        root = Path(folder)
        shutil.copytree(ROOT / PACKAGE, root / PACKAGE)
        asking = root / "package.py"
        shutil.copy(ROOT / ASKING, asking)
        yield Tree("working tree", root, asking, True, programs)


@contextmanager
def tree_of(commit: str, programs: Path) -> Iterator[Tree]:
    """A commit's package in a temporary folder. Raises ReplayError where there is no such commit.

    Unlike a worktree of git, it leaves no trace in the repository when a run is interrupted.
    """
    name = _git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}").decode().strip()
    if not name:
        raise ReplayError(f"{commit!r} is no commit of this repository: see `git log`")
    label = _git("log", "-1", "--format=%h %s", name).decode().strip()
    has_own = bool(_git("ls-tree", name, ASKING))
    with TemporaryDirectory(prefix="replay-") as folder:
        archive = _git("archive", name, PACKAGE, *([ASKING] if has_own else []))
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(folder, filter="data")
        root = Path(folder)
        asking = root / "package.py"
        shutil.copy(root / ASKING if has_own else ROOT / ASKING, asking)
        yield Tree(label, root, asking, has_own, programs)


def default_commit() -> str:
    """What to compare with: HEAD where the package differs from it, else the commit before."""
    return "HEAD" if _git("status", "--porcelain", "--", PACKAGE) else "HEAD~1"


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False).stdout


# ---- recordings that are kept


def file_name(program: str) -> str:
    """The file of a program's recording."""
    return f"{re.sub(r'[^-.a-zA-Z0-9]', '_', program)}.zlib"


def cache_folder() -> Path:
    """Where recordings are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / PACKAGE / "replay"


def folder_of(tree: Tree, targets: str) -> Path:
    """The folder of a tree's recordings, of which the oldest make room for it."""
    folder = cache_folder() / tree.key(targets)
    folder.mkdir(parents=True, exist_ok=True)
    os.utime(folder)
    known = sorted(cache_folder().iterdir(), key=lambda path: path.stat().st_mtime)
    for old in known[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
