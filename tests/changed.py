"""Which test files depend on what changed, the nearest first.

    python -m tests.changed [COMMIT]        prints them, with the reason for each

By imports alone all tests depend on nearly every module, as they compile whole graphs. So a test
file is near what changed when it changed itself, imports it, is called after it
(``test_lowering_views.py`` after ``views.py``), or was often changed in the same commits, which
count less the more tests they changed; so are the samples of the operators that a changed module
names. Then come importers of importers, up to `_FARTHEST`. What is named in a string counts as
imported: a template, data, a family of lowerings that a registry loads.
"""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

_ROOTS = ("torch_webgpu_compile", "tests", "benchmarks")
_FARTHEST = 3  # imports: beyond them are nearly all tests
_COMMITS = 1000  # of the history
_HALF_LIFE = 300  # commits
_OFTEN = 0.2  # a commit that changed one test file counts 1, of four test files each a quarter
_SHOWN = 6


@dataclass(frozen=True)
class Near:
    """What depends on a change.

    Attributes:
        since: the commit that the tree is compared with.
        files: that differ.
        reasons: by test file, or operator in brackets, the nearest first.
        others: how many test files there are beside them.
    """

    since: str
    files: tuple[str, ...]
    reasons: dict[str, str]
    others: int

    def summary(self) -> str:
        """One line."""
        shown = [f"{path} ({reason})" for path, reason in list(self.reasons.items())[:_SHOWN]]
        more = len(self.reasons) - len(shown)
        return (
            f"{len(self.files)} files differ from {self.since[:10]}; in full, while there is time: "
            + (", ".join(shown) or "nothing")
            + (f", then {more} more" if more else "")
            + f"; the rest of these and {self.others} other files take turns"
        )


def _git(root: Path, *arguments: str) -> list[str]:
    command = ["git", *arguments]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def changed_files(root: Path, commit: str) -> tuple[str, tuple[str, ...]]:
    """The commit that is compared with, and the paths that differ from it, new files too.

    Args:
        commit: empty for the one where HEAD left main.

    Raises:
        ValueError: there is no such commit, or no git.
    """
    try:
        since = _git(root, "rev-parse", "--verify", f"{commit or _left_main(root)}^{{commit}}")[0]
        tracked = _git(root, "diff", "--name-only", "--no-renames", since)
        new = _git(root, "ls-files", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise ValueError(f"no changes since {commit or 'main'}: {reason}") from error
    return since, tuple(sorted({*tracked, *new}))


def _left_main(root: Path) -> str:
    for main in ("main", "origin/main"):
        with suppress(subprocess.CalledProcessError):
            return _git(root, "merge-base", main, "HEAD")[0]
    return "HEAD"


@cache
def _sources(root: Path) -> _Sources:
    return _Sources(root)


class _Sources:
    """The files of the repository that can depend on others."""

    def __init__(self, root: Path) -> None:
        tracked = _git(root, "ls-files", "--cached", "--others", "--exclude-standard", *_ROOTS)
        self.root = root
        self.texts = {
            path: (root / path).read_text(errors="replace")
            for path in tracked
            if path.endswith((".py", ".jinja")) and (root / path).is_file()
        }
        self.tests = sorted(path for path in self.texts if _is_test(path))

    def naming(self, word: str, folder: str = "") -> set[str]:
        """The files below a folder that have a word in quotes."""
        pattern = re.compile(rf"""["']{re.escape(word)}["']""")
        return {
            path
            for path, text in self.texts.items()
            if path.startswith(folder) and word in text and pattern.search(text)
        }

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        """By module's path, the paths of those that import it or name it in their folder."""
        import grimp

        graph = grimp.build_graph(*_ROOTS, cache_dir=None)
        paths = {_module(path): path for path in self.texts if path.endswith(".py")}
        found = defaultdict[str, set[str]](set)
        for module, path in paths.items():
            if module in graph.modules:
                importers = graph.find_modules_that_directly_import(module)
                found[path] |= {paths[importer] for importer in importers if importer in paths}
            if not found[path] and not _is_test(path):  # a registry loads it, by its name
                found[path] |= self.naming(Path(path).stem, f"{Path(path).parent}/") - {path}
        return found

    def users(self, path: str) -> set[str]:
        """The modules and templates that use a file that is no module: that name it; of a template,
        its name without endings; of the package's files, its folder, else their package."""
        if path.endswith(".py"):
            return {path}
        words = [Path(path).name]
        if path.endswith(".jinja"):
            words += [words[0].partition(".")[0]]
        if path.startswith(_ROOTS):
            words += [Path(path).parent.name]
        for word in words:
            if found := self.naming(word) - {path}:
                return found
        for folder in Path(path).parents:
            if f"{folder}/__init__.py" in self.texts:
                return {f"{folder}/__init__.py"}
        return set()

    def modules(self, path: str) -> set[str]:
        """The modules that a changed file is part of, through the templates that include it."""
        found, ahead = set[str](), {path}
        while ahead:
            new = {user for one in ahead for user in self.users(one)} - found
            found |= new
            ahead = {user for user in new if not user.endswith(".py")}
        return {user for user in found if user.endswith(".py")}


def _is_test(path: str) -> bool:
    return path.startswith("tests/") and bool(re.fullmatch(r"test_\w+\.py", Path(path).name))


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _is_called_after(test: str, path: str) -> bool:
    word = Path(path).name.partition(".")[0]
    if word in ("__init__", "conftest") or not path.startswith(_ROOTS[0]):
        return False
    tested = Path(test).stem.removeprefix("test_")
    return f"_{word}_" in f"_{tested}_" or f"_{tested}_" in f"_{word}_"


def _operators(text: str, path: str) -> set[str]:
    """The names of operators that a module of the package names, as PyTorch's samples have them."""
    if not path.startswith(_ROOTS[0]):
        return set()
    return {name.strip("_") for name in re.findall(r"\baten\.(\w+)", text)}


@cache
def _changed_together(root: Path) -> Mapping[str, Mapping[str, float]]:
    """By file, the test files that were changed with it, and how often; old commits count less."""
    log = _git(root, "log", f"-{_COMMITS}", "--no-merges", "--format=tformat:commit", "--name-only")
    found: dict[str, dict[str, float]] = {}
    for age, commit in enumerate("\n".join(log).split("commit\n")):
        files = [line for line in commit.splitlines() if line]
        tests = [file for file in files if _is_test(file)]
        for file, test in itertools.product(files, tests):
            weights = found.setdefault(file, {})
            weights[test] = weights.get(test, 0) + 0.5 ** (age / _HALF_LIFE) / len(tests)
    return found


def _distances(sources: _Sources, starts: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Files that import one of `starts`, directly or not, with the number of imports between."""
    importers = sources.importers
    seen = ahead = set(starts)
    for distance in range(_FARTHEST + 1):
        yield from ((path, distance) for path in ahead)
        ahead = {user for path in ahead for user in importers[path]} - seen
        seen = seen | ahead


_Reason = tuple[str, int, float, str]
"""A test file or operator, its distance, among equals a weight, and why."""


def near_tests(root: Path, commit: str = "") -> Near:
    """The test files that depend on what changed since a commit."""
    since, files = changed_files(root, commit)
    sources, together = _sources(root), _changed_together(root)
    ranks: dict[str, tuple[int, float, str]] = {}
    for file in files:
        weights = together.get(file, {})
        for test, distance, weight, reason in _near(sources, file, weights):
            rank = (distance, -weight, reason)
            ranks[test] = min(rank, ranks.get(test, rank))
    reasons = {test: rank[2] for test, rank in sorted(ranks.items(), key=lambda item: item[1])}
    return Near(since, files, reasons, len({*sources.tests} - reasons.keys()))


def _near(sources: _Sources, file: str, weights: Mapping[str, float]) -> Iterator[_Reason]:
    """What depends on a file."""
    starts = sources.modules(file)
    for path, distance in _distances(sources, starts):
        if _is_test(path):
            reason = f"{distance} imports from {file}" if distance else "changed"
            yield path, distance, weights.get(path, 0), reason
    operators = {name for path in starts for name in _operators(sources.texts[path], path)}
    for name in sorted(operators):  # the fewer, the more it is about each
        yield f"[{name}]", 1, 10 / len(operators), f"named by {file}"
    is_conftest = Path(file).name == "conftest.py"
    folder = Path(file).parent if is_conftest else Path("tests", Path(file).parts[0])
    for test in sources.tests:
        weight = weights.get(test, 0)
        if folder in Path(test).parents:
            yield test, _FARTHEST if is_conftest else 1, weight, f"in {folder}"
        if weight >= _OFTEN:
            yield test, 1, weight, f"often changed with {file}"
        if any(_is_called_after(test, path) for path in (file, *starts)):
            yield test, 1, max(weight, _OFTEN), f"called after {file}"


if __name__ == "__main__":
    found = near_tests(Path(__file__).parent.parent, *sys.argv[1:])
    print(found.summary())
    for test, reason in found.reasons.items():
        print(f"{test:50} {reason}")
