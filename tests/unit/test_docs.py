"""The pages: their links lead somewhere, they say whom they are for, and versions agree."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

import torch_webgpu_compile
from torch_webgpu_compile.compiler import PASSES

ROOT = Path(__file__).parents[2]
FENCED = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]*)\)|(?:src|href)=\"([^\"]*)\"")
HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.M)
LONGEST_README = 150


def markdown_files() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a repository of git")
    return listed.stdout.split()


@cache
def text_of(path: Path) -> str:
    """A page without its code."""
    return FENCED.sub("", path.read_text(encoding="utf-8"))


@cache
def anchors(path: Path) -> set[str]:
    """Those that GitHub, and the site, give to a page's headings."""
    headings = HEADING.findall(text_of(path))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", name.lower()).replace(" ", "-") for name in plain}


def broken(path: Path) -> list[str]:
    found = []
    for target in ("".join(groups) for groups in LINK.findall(text_of(path))):
        name, _, anchor = target.partition("#")
        if ":" in name:
            continue
        file = path.parent / name if name else path
        is_there = file.is_file() and (not anchor or anchor in anchors(file))
        if not is_there:
            found.append(target)
    return found


def test_links_lead_to_files_and_headings() -> None:
    found = {name: broken(ROOT / name) for name in markdown_files()}
    assert "docs/performance.md" in found
    assert not {name: links for name, links in found.items() if links}


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b`-c: d\n[1](#a-b-c-d) [2](#a) [3](page.md#a-b-c-d) [4](other.md)\n")
    assert broken(page) == ["#a", "other.md"]


def test_pages_say_whom_they_are_for() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        title, _, first = page.read_text(encoding="utf-8").partition("\n\n")
        assert re.fullmatch("# .+", title), page
        assert re.match(r"For everyone .*?[Tt]his\s+page\s+(answers|lists)", first, re.S), page


def test_the_navigation_has_every_page() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^ +- (?:\w+: )?(\S+\.md)$", config, re.M))
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert {name for name in named if "/" not in name} - {"index.md"} == pages
    for name in named - pages - {"index.md"}:
        assert (ROOT / name.removeprefix("repository/")).is_file(), name


def test_the_readme_is_short_and_leads_to_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("\n") <= LONGEST_README
    reached, wanted = set(), [ROOT / "README.md"]
    while wanted:
        page = wanted.pop()
        if page not in reached and page.suffix == ".md":
            reached.add(page)
            names = ("".join(groups).partition("#")[0] for groups in LINK.findall(text_of(page)))
            wanted += [(page.parent / name).resolve() for name in names if ":" not in name]
    assert set((ROOT / "docs").glob("*.md")) <= reached


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/api.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: torch_webgpu_compile\.(\w+)", page, re.M)
    errors = {
        name
        for name in torch_webgpu_compile.__all__
        if getattr(torch_webgpu_compile, name).__module__ == "torch_webgpu_compile.errors"
    }
    assert "errors" in named
    assert set(named) - {"errors"} == set(torch_webgpu_compile.__all__) - errors


def test_the_page_on_fusion_names_passes_in_their_order() -> None:
    page = (ROOT / "docs/fusion.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| `(\w+)` \|", page, re.M)
    joining = [step.name for step in PASSES if step.name.startswith(("join_", "repeat_lanes"))]
    assert [name for name in named if name in joining] == joining
    assert {*named, "fuse"} <= {step.name for step in PASSES}


def test_packages_have_one_version() -> None:
    version = torch_webgpu_compile.__version__
    package = json.loads((ROOT / "web/package.json").read_text())
    lock = json.loads((ROOT / "web/package-lock.json").read_text())
    assert package["version"] == lock["version"] == lock["packages"][""]["version"] == version
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{version}]" in changes
