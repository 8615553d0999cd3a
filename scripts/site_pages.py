"""Lays out the pages of the site: ``docs/``, and the repository's files that its pages link to.

    python scripts/site_pages.py FOLDER

Pages are written for readers of the repository: they link to source files, figures and the Markdown
files beside them. On the site those lie under ``repository/``, and ``README.md`` is its first page.
"""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
ELSEWHERE = "repository/"
FIRST = ("README.md", "CHANGELOG.md", "SECURITY.md", "CONTRIBUTING.md", "web/README.md")
LINK = re.compile(r"(\]\(|src=\")([^)\s\"#]*)(#[^)\s\"]*)?(?=[)\"])")
FENCE = re.compile(r"^ *(```|~~~)")
ITEM = re.compile(r"^( *)([-*]|\d+\.) +")


def main(folder: Path) -> None:
    """Writes all pages, and the files that they link to, into ``folder``; empties it first."""
    shutil.rmtree(folder, ignore_errors=True)
    wanted = [*FIRST, *(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))]
    done = set()
    while wanted:
        name = wanted.pop()
        if name in done:
            continue
        done.add(name)
        source, target = ROOT / name, folder / _site_path(name)
        if not source.is_file():
            raise SystemExit(f"a page links to {name}, which is no file")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            text = source.read_text(encoding="utf-8")
            target.write_text(_page(name, text), encoding="utf-8")
            wanted += _links(name, text)
        else:
            shutil.copyfile(source, target)


def _page(name: str, text: str) -> str:
    """A page's text with links as they are on the site, and lists as Python-Markdown reads them."""
    folder = posixpath.dirname(_site_path(name)) or "."

    def moved(match: re.Match[str]) -> str:
        before, target, anchor = match[1], match[2], match[3] or ""
        if not target or ":" in target:
            return match[0]
        return before + posixpath.relpath(_site_path(_relative(name, target)), folder) + anchor

    return _outside_of_code(_deeper_lists(text), lambda line: LINK.sub(moved, line))


def _site_path(path: str) -> str:
    """Where the site has a file of the repository."""
    if path == "README.md":
        return "index.md"
    return path.removeprefix("docs/") if path.startswith("docs/") else ELSEWHERE + path


def _relative(name: str, target: str) -> str:
    """The path in the repository of what the page ``name`` links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(name), target))


def _links(name: str, text: str) -> list[str]:
    """The files that a page links to, as paths in the repository."""
    found: list[str] = []

    def note(line: str) -> str:
        targets = [match[2] for match in LINK.finditer(line)]
        found.extend(_relative(name, target) for target in targets if target and ":" not in target)
        return line

    _outside_of_code(text, note)
    return found


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """``markdown`` with every line changed that is in no fenced block."""
    lines, fenced = [], False
    for line in markdown.split("\n"):
        fence = bool(FENCE.match(line))
        lines.append(line if fenced or fence else change(line))
        fenced ^= fence
    return "\n".join(lines)


def _deeper_lists(markdown: str) -> str:
    """Content of list items four columns deep, as Python-Markdown wants it: CommonMark, and so
    GitHub, takes it from where the item's text begins.
    """
    lines: list[str] = []
    begins: list[int] = []  # of the items around: where their text begins
    fenced = False
    for line in markdown.split("\n"):
        indent = len(line) - len(line.lstrip())
        if line.strip() and not fenced:
            while begins and indent < begins[-1]:
                begins.pop()
        depth = begins[-1] if begins else 0
        rest = line[min(indent, depth) :]
        lines.append(" " * 4 * len(begins) + rest if line.strip() else line)
        if FENCE.match(line):
            fenced = not fenced
        elif not fenced and (item := ITEM.match(line)):
            begins.append(item.end())
    return "\n".join(lines)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
