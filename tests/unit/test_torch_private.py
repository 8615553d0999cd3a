"""PyTorch's private names are rows of one table, and nobody but it and patches imports them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest
import torch

import torch_webgpu_compile
from tests.missing_names import run_without_names
from torch_webgpu_compile import torch_private
from torch_webgpu_compile.errors import PyTorchVersionError
from torch_webgpu_compile.torch_private import missing, versions
from torch_webgpu_compile.torch_private.symbols import SYMBOLS, UNDOCUMENTED, Loss, resolve

pytestmark = pytest.mark.rotates(3)

PACKAGE = Path(torch_webgpu_compile.__file__).parent
REPOSITORY = PACKAGE.parent
TABLE = PACKAGE / "torch_private"
SOURCES = sorted(PACKAGE.rglob("*.py"))
_HERE = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
_MISSING = {("_compile_session_context", (2, 11))}


def _imports(tree):
    """By the name in a module: what it is imported from, dotted."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def _dotted(node, names):
    """What an expression such as ``torch.nn.functional`` is, by what its first name is."""
    first, *others = ast.unparse(node).split(".")
    return ".".join([names[first], *others]) if first in names else ""


def _with_aliases(tree, names):
    """The names of `_imports`, and other ones for the same: ``module: Any = torch.nn``."""
    names = dict(names)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(node.value, ast.Attribute):
            path = _dotted(node.value, names)
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if path and isinstance(target, ast.Name):
                    names.setdefault(target.id, path)
    return names


def _is_private(path):
    parts = path.split(".")
    if parts[0] not in ("torch", "functorch") or parts[:2] == ["torch", "ops"]:
        return False  # operators are public, and have a schema
    hidden = any(part.startswith("_") and not part.endswith("__") for part in parts)
    return hidden or any(f"{path}.".startswith(f"{module}.") for module in UNDOCUMENTED)


_BY_TEXT = ("import_module", "find_spec", "after_import", "getattr", "hasattr")


def private_names(tree):
    """The private names of PyTorch that a module imports or reaches, with their lines."""
    imports = _with_aliases(tree, _imports(tree))
    inner = set()
    for node in ast.walk(tree):
        paths = []
        if isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and node not in inner:
            part = node
            while isinstance(part, ast.Attribute):
                inner.add(part)
                part = part.value
            paths = [_dotted(node, imports)] if isinstance(part, ast.Name) else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in _BY_TEXT:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant)]
            owner = _dotted(node.args[0], imports) if node.args else ""
            paths = [text for text in texts if isinstance(text, str)]
            paths += [f"{owner}.{text}" for text in paths]
        yield from ((path, node.lineno) for path in paths if _is_private(path))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("import torch\nx = torch._C._DisableAutocast()", "torch._C._DisableAutocast"),
        ("from torch import nn as n\nn._reduction", "torch.nn._reduction"),
        ("import torch\nnn: Any = torch.nn\nnn._reduction", "torch.nn._reduction"),
        ("def f():\n  from functorch.compile import x", "functorch.compile.x"),
        ("import torch.fx.experimental.y", "torch.fx.experimental.y"),
        ("import torch\ngetattr(torch.compiler, '_x', None)", "torch.compiler._x"),
        ("import_module('torch._inductor')", "torch._inductor"),
        ("import torch\ntorch.ops.aten._to_copy.default(torch.nn.Linear.__name__)", None),
    ],
)
def test_a_private_name_is_found(source, found):
    assert [path for path, _ in private_names(ast.parse(source))] == ([found] if found else [])


def test_nobody_else_imports_private_names():
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {name}"
        for path in SOURCES
        if path.parent.name != "patches" and TABLE not in path.parents
        for name, line in private_names(ast.parse(path.read_text()))
    ]
    assert not found


def test_each_row_is_known_to_the_type_checker_and_used():
    block = next(
        node
        for node in ast.parse((TABLE / "__init__.py").read_text()).body
        if isinstance(node, ast.If)
    )
    typed = {
        name: path
        for name, path in _imports(ast.Module(block.body, [])).items()
        if _is_private(path) or name in SYMBOLS
    }
    declared = {node.target.id for node in block.body if isinstance(node, ast.AnnAssign)}
    assert typed.keys() | declared == SYMBOLS.keys()
    assert not typed.keys() & declared
    for name, path in typed.items():
        row = SYMBOLS[name]
        assert path == (row.dotted.rpartition(".")[0] if row.is_variable else row.dotted)
    used = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("torch_private"):
                used |= {alias.name for alias in node.names}
    assert used - {"versions"} == SYMBOLS.keys()


def test_each_row_is_there_on_the_versions_that_were_tried():
    for row in SYMBOLS.values():
        assert row.purpose
        if _HERE in versions.TRIED and (row.name, _HERE) not in _MISSING:
            assert getattr(torch_private, row.name) == resolve(row)
        elif _HERE in versions.TRIED:
            assert row.loss is Loss.REPLACED
            with pytest.raises((ImportError, AttributeError)):
                resolve(row)


def test_a_name_without_a_row_is_no_attribute():
    with pytest.raises(AttributeError, match="has no attribute 'tree_flaten'"):
        _ = torch_private.tree_flaten


def test_what_stands_in_for_a_missing_name():
    by_loss = {loss: next(r for r in SYMBOLS.values() if r.loss is loss) for loss in Loss}
    fatal, lazy, replaced = (by_loss[loss] for loss in (Loss.FATAL, Loss.USE, Loss.REPLACED))
    with pytest.raises(
        PyTorchVersionError, match=rf"no `{re.escape(fatal.dotted)}`.* for {fatal.purpose}"
    ):
        missing.stand_in(fatal)
    assert missing.stand_in(replaced) is None
    absent = missing.stand_in(lazy)
    assert not isinstance(1, absent)
    assert {absent: 1}
    for use in (lambda: absent(1), lambda: absent.attribute, lambda: absent[int](1)):
        with pytest.raises(PyTorchVersionError, match=r"tried with PyTorch 2\.11 to 2\.14"):
            use()


_IMPORTS = """
import pkgutil
import torch_webgpu_compile
for module in pkgutil.walk_packages(torch_webgpu_compile.__path__, "torch_webgpu_compile."):
    if ".patches." not in module.name and not module.name.endswith("__main__"):
        __import__(module.name)
from torch_webgpu_compile.capture.graph.aot import capture
assert not isinstance(torch_private._int_mm, type(torch.relu))
print("imported")
"""


def test_the_package_is_imported_without_names_that_are_not_fatal():
    run = run_without_names(_IMPORTS)
    assert run.stdout == "imported\n", run.stderr


def test_a_version_that_is_too_old_is_an_error():
    with pytest.raises(
        PyTorchVersionError, match=r"needs PyTorch 2.11 or newer, and this is 2.10.0"
    ):
        versions.check("2.10.0", pytest.fail)


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0", "2.13.0+cpu", "2.14.1+cu130"])
def test_a_version_that_is_known(version):
    versions.check(version, pytest.fail)


@pytest.mark.parametrize("version", ["2.15.0", "3.0.0a0+git1234567"])
def test_a_version_that_is_newer(monkeypatch, version):
    monkeypatch.setattr(versions, "_warned", set())
    said = []
    versions.check(version, said.append)
    versions.check(version, said.append)
    assert len(said) == 1
    assert said[0].startswith(f"PyTorch {version} is newer than 2.14, the newest that")


def test_pages_and_the_requirement_name_these_versions():
    numbers = [versions.text(version) for version in versions.TRIED]
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"torch>={numbers[0]}" in project["dependencies"]
    *older, newest = numbers
    assert f"| PyTorch | {', '.join(numbers)}:" in (REPOSITORY / "docs/versions.md").read_text()
    assert f"torch ({older[0]} to {newest})" in (REPOSITORY / "README.md").read_text()
    text = f"PyTorch {', '.join(older)} and {newest} are supported"
    assert text in (REPOSITORY / "CONTRIBUTING.md").read_text()
